"""Several learners, started by torchrun: real processes that share a batch, die and come back."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch

from algos.worker_learner import UserError, learners
from algos.worker_learner.files import load_checked

ROOT = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
PATIENCE = 240  # seconds, for machines that are busy with something else


@pytest.fixture(scope="module")
def after_20_updates(tmp_path_factory):
    """{"whole": by one learner, "learner0": by two with half of its batch each, "learner1"}"""
    folder = tmp_path_factory.mktemp("learners")
    program = ROOT / "tests" / "learners_program.py"
    command = [*TORCHRUN, "--nproc-per-node", "2", program, folder]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, env=environment
    )
    assert done.returncode == 0, done.stderr
    names = ("whole", "learner0", "learner1")
    return {name: torch.load(folder / f"{name}.pt", weights_only=True) for name in names}


def test_two_learners_with_half_the_batch_are_one_with_all_of_it(after_20_updates):
    whole, first, second = after_20_updates.values()
    for case, expected in whole.items():
        for name, value in expected.items():
            assert torch.equal(first[case][name], second[case][name]), (case, name)
            difference = (first[case][name] - value).abs()
            allowed = 1e-5 + 1e-6 * value.abs()  # a variance of rewards is in the hundreds
            assert (difference < allowed).all(), (case, name, difference.max())


# Runs that are disturbed.

TINY = (
    "--env CartPole --num-envs 4 --num-steps 64 --minibatch-size 256 --epochs 1 --hidden-size 8 "
    "--checkpoint-every 256 --eval-every 1000 --eval-episodes 2"
)
TOTAL = 2560


def sabotage(rank: int, life: int, number: int, action: str) -> str:
    """What learner `rank`, restarted `life` times, does when its checkpoint `number` is written."""
    return f"""
import itertools, os, signal
if (os.environ.get("RANK"), os.environ.get("TORCHELASTIC_RESTART_COUNT")) == ("{rank}", "{life}"):
    count, replace = itertools.count(1), os.replace
    def disturbing(source, target):
        replace(source, target)
        if str(target).endswith(("checkpoint.pt", "rank{rank}.pt")) and next(count) == {number}:
            {action}
    os.replace = disturbing
"""


# Ctrl-C for torchrun, which passes it on; the learner goes on when it has come, not before.
INTERRUPT = """
def interrupt_the_agent():
    import select
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    os.kill(os.getppid(), signal.SIGINT)
    select.select([reader], [], [], 120)
"""

# Else gloo's threads abort the learner as Python ends ("terminate called without an exception").
COUNT_THREADS = """
import atexit, multiprocessing, os, sys, time
def threads():
    names = (f"/proc/self/task/{number}/comm" for number in os.listdir("/proc/self/task"))
    return [open(name).read().strip() for name in names if os.path.exists(name)]
def count():
    learner = multiprocessing.parent_process() is None and sys.argv[0] != "-c"  # not a forkserver
    if "RANK" in os.environ and learner:
        until = time.monotonic() + 5  # some are about to end
        while len(threads()) > 1 and time.monotonic() < until:
            time.sleep(0.05)
        print("threads in the end:", len(threads()), threads(), flush=True)
atexit.register(count)
"""


class Torchrun:
    """`torchrun {options} algos/ppo.py {flags}`, whose processes all carry a mark."""

    started: list["Torchrun"] = []

    def __init__(
        self, folder: Path, options: str, flags: str, code: str = "", command=None, **variables: str
    ):
        self.mark, self.logs = uuid.uuid4().hex, folder
        folder.mkdir(parents=True)
        (folder / "matplotlib.py").write_text("raise ImportError")  # saves a second of each run
        (folder / "sitecustomize.py").write_text(code)
        paths = os.pathsep.join((str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")))
        environment = {**os.environ, "PYTHONPATH": paths, "MARK": self.mark, **variables}
        command = command or [*TORCHRUN, *options.split(), "algos/ppo.py", *flags.split()]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=open(folder / "out", "w"),
            stderr=open(folder / "err", "w"),
            start_new_session=True,
        )
        Torchrun.started.append(self)

    @property
    def out(self) -> str:
        return (self.logs / "out").read_text()

    @property
    def text(self) -> str:
        return self.out + (self.logs / "err").read_text()

    def alive(self) -> list[int]:
        """All living processes that were started by it."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # it ended meanwhile
                continue
        return found

    def finish(self, code: int | None = 0) -> str:
        """Wait for its end; it must leave no process behind -> what it printed."""
        self.process.wait(PATIENCE)
        assert code is None or self.process.returncode == code, self.text
        wait_for(lambda: not self.alive(), "processes that outlive the run", 30)
        return self.out


def wait_for(condition, what: str, seconds: float = PATIENCE):
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"after {seconds} s: {what}"
        time.sleep(0.02)
    return result


@pytest.fixture(autouse=True)
def nothing_is_left_running():
    yield
    for run in Torchrun.started:
        for pid in run.alive():
            os.kill(pid, signal.SIGKILL)
    Torchrun.started.clear()


def load(run_dir: Path, name: str = "checkpoint.pt") -> dict:
    return torch.load(run_dir / name, weights_only=True)


def same(a, b) -> bool:
    """Equal to the last bit, all the way down."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, list) else a == b


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_learner_and_ctrl_c_change_nothing(tmp_path):
    """Learner 1 is killed, the engine restarts both; Ctrl-C; the printed command: the same end."""
    flags = f"{TINY} --total-steps {TOTAL} --seed 1"
    two = "--standalone --nproc-per-node 2"  # two at the same time, which torch 2.6 needs told
    reference = f"{flags} --run-dir {tmp_path / 'reference'}"
    reference = Torchrun(tmp_path / "1", two, reference, COUNT_THREADS)
    killed = sabotage(1, 0, 3, "os.kill(os.getpid(), signal.SIGKILL)")
    stopped = sabotage(0, 1, 3, "interrupt_the_agent()") + INTERRUPT
    run_dir = tmp_path / "run"
    disturbed = Torchrun(
        tmp_path / "2", f"{two} --max-restarts 3", f"{flags} --run-dir {run_dir}", killed + stopped
    )
    said = disturbed.finish(None)
    assert "Resumed at step 512" in said, disturbed.text  # learner 0 had not saved 768 yet
    assert "Not exact" not in said
    assert "Traceback" not in said
    step = load(run_dir)["run"]["step"]
    assert 512 < step < TOTAL, disturbed.text
    command = re.search(rf"Stopped at step {step}. Go on with:\n +(.+)\n", said)[1]
    assert "torch.distributed.run --nproc-per-node 2" in command
    resumed = Torchrun(tmp_path / "3", "", "", command=shlex.split(command))
    assert f"Resumed at step {step}" in resumed.finish()
    said = reference.finish()
    assert said.count("ppo on CartPole: 2 environments") == said.count("Done: 2560 steps") == 1
    assert re.findall(r"threads in the end: (\d+)", said) == ["1", "1"], said
    for name in ("checkpoint.pt", "checkpoint.rank1.pt"):
        ours, theirs = load(run_dir, name), load(tmp_path / "reference", name)
        assert ours["run"]["step"] == TOTAL
        for part in ("agent", "optimizer", "workers"):
            assert same(ours[part], theirs[part]), (name, part)
    envs = [
        load(run_dir, name)["workers"]["obs"] for name in ("checkpoint.pt", "checkpoint.rank1.pt")
    ]
    assert not torch.equal(*envs), "both learners' environments had the same seed"
    rows = (run_dir / "metrics.csv").read_text().splitlines()
    assert len(rows) == len(set(row.split(",", 3)[0] + row.split(",", 3)[2] for row in rows))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nodes_leave_and_join(tmp_path):
    """An agent with a learner; another joins it, and is killed; the first goes on alone."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    options = (
        "--nnodes 1:2 --nproc-per-node 1 --max-restarts 9 --rdzv-backend c10d "
        f"--rdzv-endpoint localhost:{port} --rdzv-id job "
        "--rdzv-conf last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5"
    )
    flags = f"{TINY} --compile none --total-steps 1000000000 --run-dir {tmp_path / 'run'}"
    # else a node that joins is not told where the others are (torch 2.13)
    variable = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def starts(learners: int) -> int:
        """How often a group of so many has begun; its learner 0 said so, on any node."""
        envs = "2 environments in this process of each of 2 learners,"
        said = envs if learners == 2 else "4 environments in this process,"
        return sum(node.out.count(f"ppo on CartPole: {said}") for node in Torchrun.started)

    def saved_by(learners: int, after: int) -> dict | None:
        """The newest checkpoint, if so many learners saved it after that step."""
        content, _ = load_checked(tmp_path / "run" / "checkpoint.pt")  # None while it is replaced
        run = content["run"] if content else {"world_size": 0}
        return run if run["world_size"] == learners and run["step"] > after else None

    first = Torchrun(tmp_path / "1", options, flags, **variable)
    step = wait_for(lambda: saved_by(1, 0), "a checkpoint of the first node alone")["step"]
    second = Torchrun(tmp_path / "2", options, flags, **variable)
    wait_for(lambda: starts(2), "two learners")
    step = wait_for(lambda: saved_by(2, step), "a checkpoint of two learners")["step"]
    second.process.kill()
    second.finish(-signal.SIGKILL)
    step = wait_for(lambda: saved_by(1, step), "the first node to go on alone")["step"]
    first.process.send_signal(signal.SIGINT)
    first.finish(None)
    assert "Traceback" not in first.out
    assert starts(2) and len(re.findall(r"Resumed at step \d+", first.out + second.out)) >= 2
    assert load(tmp_path / "run")["run"]["step"] >= step


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_cannot_be_shared_is_one_sentence(tmp_path):
    run = Torchrun(tmp_path / "1", "--nproc-per-node 2", "--env CartPole --num-envs 5")
    run.finish(1)
    said = "--num-envs is 5; 2 learners can share a multiple of 2\n"
    assert said in run.text


def test_every_script_has_its_case():
    import learners_program as program

    tested = {case.split()[0] for case in (*program.ON_POLICY, *program.OFF_POLICY)}
    scripts = (ROOT / "algos").glob("*.py")
    assert {path.stem for path in scripts if "average_gradients(" in path.read_text()} == tested


def test_only_a_lost_connection_means_that_another_learner_stopped(monkeypatch):
    monkeypatch.setattr(learners, "world_size", lambda: 2)
    for said, kind in (
        ("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1", UserError),
        ("NCCL error: remote process exited or there was a network error", UserError),
        ("Tensors must be contiguous", RuntimeError),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", RuntimeError),
    ):

        def fail(*arguments, said=said):
            raise RuntimeError(said)

        monkeypatch.setattr(learners.distributed, "all_reduce", fail)
        for function, x in (
            (learners.largest_over_learners, 1),
            (learners.mean_over_learners, torch.ones(1)),
        ):
            with pytest.raises(kind) as error:
                function(x)
            assert str(error.value).startswith("Another learner stopped") == (kind is UserError)


def test_gradients_are_averaged_in_one_all_reduce(monkeypatch):
    sent = []
    monkeypatch.setattr(learners, "world_size", lambda: 2)
    monkeypatch.setattr(learners.distributed, "all_reduce", lambda x, op: sent.append(x.add_(1)))
    network, scale = torch.nn.Linear(3, 2), torch.nn.Parameter(torch.ones(()))
    network.bias.requires_grad_(False)
    (scale * network(torch.ones(1, 3)).sum()).backward()
    before = [network.weight.grad.clone(), scale.grad.clone()]
    learners.average_gradients(network, scale)
    after = [network.weight.grad, scale.grad]
    assert len(sent) == 1 and sent[0].shape == (7,) and network.bias.grad is None
    for theirs, ours in zip(before, after, strict=True):
        torch.testing.assert_close(ours, theirs / 2 + 1)  # the other learner's half is 1
