"""Segments: training commands that run on this machine as subprocesses, or on a cluster by Ray.

A segment is a list of commands, run one after the other; each is (words, file of its output), and
its errors are in the file of that name that ends in .log. Where the run folder of a training
command holds a run already, that run goes on: a segment may be killed and started again anywhere.
What runs them, `Here` or a `Cluster`, has these functions:

    slots()                 how many segments there is room for at this moment
    start(name, commands)   begin one
    wait(seconds)           {name: exit status} of what ended; waits for one, at most so long
    stop(name)              end one at once; wait() does not report it
    close(gently)           end all; gently: by SIGTERM first, at which a run saves a checkpoint
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import torch

from algos.worker_learner.arguments import UserError
from vec_envs.core import available_cores

STOP_SECONDS = 60  # that a run may take to save, once it is asked to end
GOOD = 0, 3  # exit statuses: finished, paused (run.PAUSED)
Commands = list[tuple[list[str], str]]


def launch(words: list[str], output: str, **variables: str) -> subprocess.Popen:
    """Start a command that dies with this thread; write the host name to `host` beside `output`."""
    kernel = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []  # not on macOS
    watch = '(while kill -0 $$ && kill -0 "$0"; do sleep 1; done; kill -9 -$$) >&- 2>&- & '
    begin = '[ "$PPID" -eq "$0" ] && exec "$@"'  # not if this process has ended already
    guard = [*kernel, "sh", "-c", begin if kernel else watch + begin, str(os.getpid())]
    options = {"stdin": subprocess.DEVNULL, "start_new_session": True}
    with open(os.path.join(os.path.dirname(output), "host"), "w") as file:
        file.write(f"{socket.gethostname()}\n")
    if "--run-dir" in words:
        folder = words[words.index("--run-dir") + 1]
        if os.path.exists(os.path.join(folder, "args.json")):
            at = words[words.index("--pause-at") + 1]
            words = [*words[:2], "--resume", folder, "--pause-at", at]
    with open(output, "wb") as out, open(os.path.splitext(output)[0] + ".log", "ab") as log:
        streams = {"stdout": out, "stderr": log, "env": {**os.environ, **variables}}
        return subprocess.Popen([*guard, *words], **streams, **options)


def perform(commands: Commands, **variables: str) -> int:
    """Run commands until one fails -> the exit status of the last. KeyboardInterrupt ends it."""
    for command in commands:
        process = launch(*command, **variables)
        try:
            status = process.wait(1e9)  # with a limit: only then can Ray interrupt it
        except KeyboardInterrupt:
            _kill(process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            raise
        if status not in GOOD:
            break
    return status


class Here:
    """This machine: as many segments as its cores and GPUs hold, each --cpus and --gpus of them."""

    def __init__(self, args: Any):
        self.cpus, self.gpus = args.cpus, args.gpus
        self._running: dict[str, tuple] = {}  # name -> its process, the commands after it, its GPU

    def slots(self) -> int:
        room = [available_cores() / self.cpus]
        room += [torch.cuda.device_count() * int(1 / self.gpus + 1e-6)] if self.gpus else []
        return int(min(room) + 1e-6)

    def start(self, name: str, commands: Commands) -> None:
        every = ",".join(map(str, range(torch.cuda.device_count())))
        mine = (os.environ.get("CUDA_VISIBLE_DEVICES") or every).split(",")  # perhaps a job's part
        used = [gpu for *_, gpu in self._running.values()]
        self._next(name, commands, min(mine, key=used.count) if self.gpus else "")

    def _next(self, name: str, commands: Commands, gpu: str) -> None:
        process = launch(*commands[0], CUDA_VISIBLE_DEVICES=gpu)
        self._running[name] = process, commands[1:], gpu

    def wait(self, seconds: float) -> dict[str, int]:
        ended, until = {}, time.monotonic() + seconds
        while not ended and time.monotonic() < until:
            time.sleep(0.02)
            for name, (process, later, gpu) in list(self._running.items()):
                if (status := process.poll()) in GOOD and later:
                    self._next(name, later, gpu)
                elif status is not None:
                    ended[name] = status
                    del self._running[name]
        return ended

    def stop(self, name: str) -> None:
        if name in self._running:
            process, *_ = self._running.pop(name)
            _kill(process, signal.SIGKILL)
            process.wait()

    def close(self, gently: bool = False) -> None:
        processes = [process for process, *_ in self._running.values()] if gently else []
        for process in processes:
            _kill(process, signal.SIGTERM)
        until = time.monotonic() + STOP_SECONDS
        while any(process.poll() is None for process in processes) and time.monotonic() < until:
            time.sleep(0.02)
        for name in list(self._running):
            self.stop(name)


def _kill(process: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # ended; this on macOS
        os.killpg(process.pid, number)  # a session of its own


class Cluster:
    """A Ray cluster: the same commands as tasks. Every node sees the same folders and this code."""

    def __init__(self, args: Any):
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns
        try:
            import ray
        except ImportError:
            raise UserError('--cluster needs Ray: pip install -e ".[cluster]"') from None
        try:
            options = {"log_to_driver": False, "logging_level": "error"}
            ray.init(address=args.cluster, ignore_reinit_error=True, **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            advice = "no cluster answers; ray start --head starts one; none is this machine alone"
            raise UserError(f"--cluster is {args.cluster}, but {advice}") from error
        # By value: a node's worker process need not import this package, and with it torch.
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        self.ray, self.cpus, self.gpus = ray, args.cpus, args.gpus
        self._refs: dict[str, object] = {}
        self._task = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=-1)(perform)
        bundle = {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}
        ray.autoscaler.sdk.request_resources(bundles=[bundle] * args.agents)  # where it can grow

    def slots(self) -> int:
        there = self.ray.cluster_resources()
        room = [there.get("CPU", 0) / self.cpus]
        room += [there.get("GPU", 0) * int(1 / self.gpus + 1e-6)] if self.gpus else []
        return int(min(room) + 1e-6)

    def start(self, name: str, commands: Commands) -> None:
        hidden = {} if self.gpus else {"CUDA_VISIBLE_DEVICES": ""}  # Ray shows all of a node's
        self._refs[name] = self._task.remote(commands, **hidden)

    def wait(self, seconds: float) -> dict[str, int]:
        if not self._refs:
            return time.sleep(seconds) or {}
        done, _ = self.ray.wait(list(self._refs.values()), num_returns=1, timeout=seconds)
        ended = [name for name, ref in self._refs.items() if ref in done]
        return {name: self._status(self._refs.pop(name)) for name in ended}

    def _status(self, ref: object) -> int:
        try:
            return self.ray.get(ref)
        except self.ray.exceptions.RayTaskError as error:  # it did not even begin
            why = " ".join(str(error.cause).split())[-300:]
            raise UserError(f"--cluster: a run could not start on a node: {why}") from None
        except self.ray.exceptions.RayError:  # whatever ended the task: as if killed
            return -signal.SIGKILL

    def stop(self, name: str) -> None:
        if name in self._refs:
            self.ray.cancel(self._refs.pop(name), force=True)

    def close(self, gently: bool = False) -> None:
        if refs := list(self._refs.values()) if gently else []:
            for ref in refs:
                self.ray.cancel(ref)  # KeyboardInterrupt in `perform`
            self.ray.wait(refs, num_returns=len(refs), timeout=STOP_SECONDS)
        for name in list(self._refs):
            self.stop(name)
        if self.ray.is_initialized():  # closed for the first time
            self.ray.autoscaler.sdk.request_resources(bundles=[])  # it may shrink again
            self.ray.shutdown()
