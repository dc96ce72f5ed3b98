"""Processes that tests start are forked from one that has imported torch: 0.2 s each and not 5.

conftest.py puts `Warm` in the place of `subprocess.Popen`. For this Python and a script of this
project it starts what Popen starts: a process of its own with that script as `__main__`, the given
environment, folder, streams and session, and `sitecustomize.py` of its PYTHONPATH; it ends by
itself, by signals, and is waited for as any other. Other commands are left to Popen.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parent.parent
PR_SET_CHILD_SUBREAPER = 36
LOCK = threading.Lock()


class Warm(subprocess.Popen):
    def _execute_child(self, command, *options) -> None:
        (cwd, environment), pipes, new_session = options[4:6], options[9:15], options[20]
        cwd = os.path.abspath(cwd or ".")
        if not _is_script(command, cwd):
            return super()._execute_child(command, *options)
        given = enumerate((pipes[0], pipes[3], pipes[5]))  # -1: as here
        streams = [stream if stream >= 0 else number for number, stream in given]
        request = {"command": list(map(str, command[1:])), "cwd": cwd, "new_session": new_session}
        request["environment"] = dict(os.environ if environment is None else environment)
        with LOCK:
            socket.send_fds(_server(), [json.dumps(request).encode()], streams)
            self.pid, self._child_created = int(_server().recv(100)), True
        self._close_pipe_fds(*pipes)


def _is_script(command, cwd: str) -> bool:
    if sys.platform != "linux" or isinstance(command, str) or command[0] != sys.executable:
        return False
    path = Path(cwd, command[1])
    return path.suffix == ".py" and path.parent in (ROOT / "algos", ROOT / "benchmark")


@functools.cache
def _server() -> socket.socket:
    """The process to fork from, one for all tests of this process, at the other end of a socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # the forks' parent, once theirs has ended
    command = [sys.executable, __file__, str(theirs.fileno())]
    server = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()])
    theirs.close()
    atexit.register(server.wait)  # what is registered last happens first
    atexit.register(ours.close)
    return ours


def _serve(control: socket.socket) -> None:
    """Fork a process for each request, and in it run what was asked for."""
    while True:
        request, streams, *_ = socket.recv_fds(control, 1 << 20, 3)
        if not request:  # the tests have ended
            return
        reader, writer = os.pipe()
        between = os.fork()
        if not between:
            if pid := os.fork():
                os.write(writer, str(pid).encode())
                os._exit(0)
            for file in (reader, writer, control.detach()):
                os.close(file)
            _become(streams, **json.loads(request))
            return
        os.waitpid(between, 0)  # before the tests are told, which wait for a child of theirs
        control.send(os.read(reader, 100))
        for file in (reader, writer, *streams):
            os.close(file)


def _become(streams: list[int], command: list, cwd: str, environment: dict, new_session: bool):
    from multiprocessing import util

    if new_session:
        os.setsid()
    os.chdir(cwd)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.orig_argv = [sys.executable, *command]
    script, *_ = sys.argv = command
    folders = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    # ROOT, before an editable installation of another clone.
    sys.path[:1] = [os.path.dirname(os.path.abspath(script)), *folders, str(ROOT)]
    util.spawnv_passfds = _fork_and_execute
    sys.modules.pop("sitecustomize", None)  # Debian's Python has one, too
    with contextlib.suppress(ImportError):
        importlib.import_module("sitecustomize")
    runpy.run_path(script, run_name="__main__")


def _fork_and_execute(path: bytes, words: list[str], kept: list[int]) -> int:
    """As multiprocessing's own for `python -c CODE`, without another Python: its forkserver."""
    if pid := os.fork():
        return pid
    low = 3
    for file in (*sorted(kept), os.sysconf("SC_OPEN_MAX")):
        os.closerange(low, file)
        low = file + 1
    at = words.index("-c") + 1  # Python 3.14 has arguments after it
    sys.argv = ["-c", *words[at + 1 :]]
    try:
        exec(words[at])
    finally:
        os._exit(0)


if __name__ == "__main__":
    # Not MuJoCo, which decides when it is imported how it draws.
    for module in ("gymnasium.vector", "torch._dynamo", "torch.utils.tensorboard", "tyro"):
        importlib.import_module(module)
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
