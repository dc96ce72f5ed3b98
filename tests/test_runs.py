"""What `worker_learner/` promises of a run, tried with real processes and real signals.

Runs are killed, starved of disk, fed NaN and started with nonsense; they are tiny, and each test
lets its runs live at the same time. Every one has a session of its own, in which the tests look
for processes that should be gone.
"""

import contextlib
import dataclasses
import fcntl
import gc
import hashlib
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import unittest.mock
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_workers import fake_run

import vec_envs
from algos import ppo, sac, vdn
from algos.worker_learner import Run, UserError, Workers, engine, files, workers
from algos.worker_learner import run as run_module
from algos.worker_learner.arguments import saved_args
from algos.worker_learner.files import load_checked
from algos.worker_learner.run import PAUSED
from algos.worker_learner.workers import score

ROOT = Path(__file__).parent.parent
PATIENCE = 240  # seconds, for machines that are busy with something else
TOTAL = 6000
TINY = (
    "--num-envs 4 --num-steps 16 --minibatch-size 32 --epochs 1 --hidden-size 8 "
    f"--total-steps {TOTAL} --checkpoint-every 500 --eval-every 1500 --eval-episodes 2"
)
CARTPOLE, HOPPER = f"--env CartPole --seed 1 {TINY}", f"--env Hopper --env-threads 2 {TINY}"
SESSIONS: set[int] = set()

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


# Helpers: start, watch, kill and finish a run; compare what it left.


@dataclass
class Started:
    process: subprocess.Popen
    dir: Path
    logs: Path

    def step(self) -> int:
        """The last step in metrics.csv, 0 before the first."""
        try:
            lines = (self.dir / "metrics.csv").read_text().splitlines()
        except FileNotFoundError:
            return 0
        return int(lines[-1].split(",")[0]) if len(lines) > 1 and "," in lines[-1] else 0

    def has_checkpoint(self) -> bool:
        return (self.dir / "checkpoint.pt").exists()

    def children(self) -> list[int]:
        """Its child processes in the order of their start: the workers, then the evaluator."""
        parents = alive(self.process.pid)
        server = {pid for pid in parents if parents[pid] == self.process.pid}
        return sorted(pid for pid in parents if parents[pid] in server)


@dataclass
class Ended:
    code: int
    out: str
    err: str
    dir: Path

    @property
    def text(self) -> str:
        return self.out + self.err


def start(flags: str | list, run_dir: Path | None = None, sabotage: str = "", **options) -> Started:
    """`python algos/ppo.py flags`; `sabotage` is code that runs in it before anything else."""
    command = [sys.executable, str(ROOT / "algos" / "ppo.py")]
    command += flags.split() if isinstance(flags, str) else flags
    if run_dir is not None:
        command += ["--run-dir", str(run_dir)]
    elif "--resume" in command:
        run_dir = Path(command[command.index("--resume") + 1])
    return start_command(command, run_dir, sabotage, **options)


def start_command(
    command: list, run_dir: Path, sabotage: str = "", paths: tuple = (), plot=False, **options
) -> Started:
    logs = run_dir.parent / f"{run_dir.name}.logs.{time.monotonic_ns()}"
    logs.mkdir(parents=True)
    if not plot:  # saves a second of each run
        (logs / "matplotlib.py").write_text("raise ImportError")
    if sabotage:
        (logs / "sitecustomize.py").write_text(textwrap.dedent(sabotage))
    paths = (logs, *paths, os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    options = {
        "cwd": ROOT,
        "stdout": open(logs / "out", "w"),
        "stderr": open(logs / "err", "w"),
    } | (options)
    process = subprocess.Popen(command, env=environment, start_new_session=True, **options)
    SESSIONS.add(process.pid)
    return Started(process, run_dir, logs)


def resume(run_dir: Path, **options) -> Started:
    return start(["--resume", str(run_dir)], **options)


def finish(run: Started, code: int | None = 0, patience: float = PATIENCE) -> Ended:
    """Wait for the end of a run; it must end with this exit code, and leave no process behind."""
    try:
        run.process.wait(patience)
    except subprocess.TimeoutExpired:
        err = (run.logs / "err").read_text()
        raise AssertionError(f"hangs at step {run.step()}; it said: {err}") from None
    ended = Ended(
        run.process.returncode,
        (run.logs / "out").read_text(),
        (run.logs / "err").read_text(),
        run.dir,
    )
    assert code is None or ended.code == code, ended
    if code != -signal.SIGKILL:
        assert "Traceback" not in ended.text, ended.text
    wait_for(lambda: not alive(run.process.pid), 30, "processes that outlive the run")
    return ended


def kill(run: Started, number: int = signal.SIGKILL, group: bool = False) -> None:
    assert run.process.poll() is None, f"ended too early: {finish(run, None)}"
    send = os.killpg if group else os.kill
    send(run.process.pid, number)
    if run.process.poll() is None:
        send(run.process.pid, signal.SIGCONT)  # it may have paused


def wait_for(condition, seconds: float = PATIENCE, what: str = "", run: Started | None = None):
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        if run is not None and run.process.poll() is not None:
            raise AssertionError(f"ended while waiting for {what}: {finish(run, None)}")
        assert time.monotonic() < deadline, f"after {seconds} s: {what}"
        time.sleep(0.001)
    return result


def wait_for_step(run: Started, step: int) -> None:
    wait_for(lambda: run.step() >= step, what=f"step {step}", run=run)


# A training is over in a second, sooner than a busy machine notices that it has begun: a run that
# is to be disturbed in the middle pauses itself, `pause(4)`, until it is told to go on.


def pause(number: int) -> str:
    """Sabotage: stop, as Ctrl-Z does, when so many checkpoints (one each 500 steps) are done."""
    return f"""
        import itertools, os, signal
        count, replace = itertools.count(1), os.replace
        def pausing(source, target):
            replace(source, target)
            if str(target).endswith("checkpoint.pt") and next(count) == {number}:
                os.kill(os.getpid(), signal.SIGSTOP)
        os.replace = pausing
    """


def wait_for_pause(run: Started) -> None:
    def paused() -> bool:
        stat = Path(f"/proc/{run.process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"

    wait_for(paused, what="its pause", run=run)


def go_on(run: Started) -> None:
    os.kill(run.process.pid, signal.SIGCONT)


def alive(session: int) -> dict[int, int]:
    """The processes of a session that are not dead, and their parents."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended meanwhile
                continue
            state, parent, _, its_session = fields[:4]
            if int(its_session) == session and state not in "ZX":
                found[int(entry.name)] = int(parent)
    return found


@pytest.fixture(autouse=True)
def nothing_is_left_running():
    yield
    for session in SESSIONS:
        for pid in alive(session):
            os.kill(pid, signal.SIGKILL)
    SESSIONS.clear()


def load(run_dir: Path, name: str = "checkpoint.pt") -> dict:
    return torch.load(run_dir / name, weights_only=True, map_location="cpu")


def same(a, b) -> bool:
    """Equal to the last bit, all the way down."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))  # NaN is NaN


def assert_same_end(run_dir: Path, reference: Path) -> None:
    """Both ended with the same weights, optimizer, simulators and random generator."""
    ours, theirs = load(run_dir), load(reference)
    for name in ("agent", "optimizer", "workers"):
        assert same(ours[name], theirs[name]), name
    assert same(ours["run"]["random"], theirs["run"]["random"])
    assert ours["run"]["step"] == theirs["run"]["step"] >= TOTAL
    assert same(load(run_dir, "last.pt")["agent"], theirs["agent"])


def metrics(run_dir: Path) -> list[tuple[int, float, str, float]]:
    """The rows of metrics.csv, each complete."""
    text = (run_dir / "metrics.csv").read_text()
    header, *lines = text.split("\n")
    assert header == "step,seconds,tag,value"
    assert lines.pop() == "", "the last line is torn"
    rows = [line.split(",") for line in lines]
    assert all(len(row) == 4 for row in rows)
    return [(int(step), float(at), tag, float(value)) for step, at, tag, value in rows]


def curves(run_dir: Path) -> dict[tuple[int, str], float]:
    """(step, tag) -> value, each once, without the speed, which is never the same."""
    rows = metrics(run_dir)
    keys = [(step, tag) for step, _, tag, _ in rows]
    assert len(keys) == len(set(keys)), sorted(key for key in keys if keys.count(key) > 1)
    return {(step, tag): value for step, _, tag, value in rows if tag != "charts/SPS"}


def assert_same_curves(run_dir: Path, reference: Path | dict) -> None:
    """But for evaluations that one of them left out, since the evaluator was busy."""
    ours = curves(run_dir)
    theirs = reference if isinstance(reference, dict) else curves(reference)
    for key in ours.keys() ^ theirs.keys():
        assert key[1].startswith("eval/") and key[0] < TOTAL, key
    assert all(ours[key] == theirs[key] for key in ours.keys() & theirs.keys())


def tensorboard_curves(run_dir: Path) -> dict[tuple[int, str], float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    points = [
        (x.step, tag, x.value) for tag in events.Tags()["scalars"] for x in events.Scalars(tag)
    ]
    trained = [(step, tag) for step, tag, _ in points if not tag.startswith("eval/")]
    assert len(trained) == len(set(trained))  # no point comes twice
    return {(step, tag): value for step, tag, value in points if tag != "charts/SPS"}


def hashes(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.is_file()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def references(folder):
    """Runs from start to end that nobody disturbed: {"CartPole": folder, "Hopper": folder}."""
    runs = {
        "CartPole": start(CARTPOLE, folder / "cartpole", plot=True),
        "Hopper": start(HOPPER, folder / "hopper"),
    }
    return {name: finish(run).dir for name, run in runs.items()}


@pytest.fixture(scope="module")
def stopped(folder):
    """A CartPole run that was stopped in its second half by Ctrl-C, and what it said."""
    run = start(CARTPOLE, folder / "stopped", pause(6))
    wait_for_pause(run)
    kill(run, signal.SIGINT)
    return finish(run, 130)


def copy_of(ended: Ended, target: Path) -> Path:
    shutil.copytree(ended.dir, target)
    return target


# Kill and resume.

# The moments at which a save is most vulnerable: written but not in place, and half in place.
KILL_AT_SYNC = """
    import itertools, os, signal
    count, fsync = itertools.count(1), os.fsync
    def fatal(file):
        if next(count) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(file)
    os.fsync = fatal
"""
KILL_BEFORE_TRAINING = """
    import os, signal
    replace = os.replace
    def fatal(source, target):
        replace(source, target)
        if str(target).endswith("args.json"):
            os.kill(os.getpid(), signal.SIGKILL)
    os.replace = fatal
"""
KILL_BETWEEN_RENAMES = """
    import itertools, os, signal
    count, replace = itertools.count(1), os.replace
    def fatal(source, target):
        if str(target).endswith("checkpoint.pt") and next(count) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)
    os.replace = fatal
"""


def test_resume_after_sigkill_is_bit_identical(references, tmp_path):
    later = random.uniform(0, 0.1)
    print("killed so many seconds after its second checkpoint:", later)  # when the test fails

    def killed_early(run_dir: Path, flags: str) -> None:
        """Twice before the first checkpoint."""
        finish(start(flags, run_dir, sabotage=KILL_BEFORE_TRAINING), -9)
        assert (run_dir / "args.json").exists() and not (run_dir / "metrics.csv").exists()
        run = resume(run_dir)
        wait_for_step(run, 1)
        os.killpg(run.process.pid, signal.SIGKILL)  # also where it has ended meanwhile
        finish(run, None)

    def killed_while_saving(run_dir: Path, flags: str) -> None:
        """Before and between the renames; and once anywhere."""
        finish(start(flags, run_dir, sabotage=KILL_AT_SYNC), -9)
        assert (run_dir / "checkpoint.tmp").exists() or (run_dir / "last.tmp").exists()
        finish(resume(run_dir, sabotage=KILL_BETWEEN_RENAMES), -9)
        assert not (run_dir / "checkpoint.pt").exists(), "not killed between the renames"
        run = resume(run_dir, sabotage=pause(2))
        wait_for_pause(run)
        go_on(run)
        time.sleep(later)
        os.killpg(run.process.pid, signal.SIGKILL)  # also where it has ended meanwhile
        finish(run, None)

    def suffer(case: tuple) -> tuple[Path, Path]:
        torment, name, flags = case
        run_dir = tmp_path / f"{torment.__name__}-{name}"
        torment(run_dir, flags)
        return finish(resume(run_dir)).dir, references[name]

    cases = [
        (killed_while_saving, "Hopper", HOPPER),
        (killed_early, "CartPole", CARTPOLE),
        (killed_while_saving, "CartPole", CARTPOLE),
    ]
    with ThreadPoolExecutor() as pool:
        for run_dir, reference in pool.map(suffer, cases):
            assert_same_end(run_dir, reference)
            assert_same_curves(run_dir, reference)
            assert tensorboard_curves(run_dir) == pytest.approx(curves(run_dir), rel=1e-6)


# Signals.


def test_ctrl_c_saves_and_the_printed_command_goes_on(stopped, references, tmp_path):
    run_dir = copy_of(stopped, tmp_path / "a run")
    terminated = start(CARTPOLE, tmp_path / "terminated with a space", pause(4), cwd=tmp_path)
    assert f"Stopped at step {load(stopped.dir)['run']['step']}" in stopped.out
    assert load(stopped.dir)["run"]["step"] < TOTAL

    wait_for_pause(terminated)
    kill(terminated, signal.SIGTERM)
    said = finish(terminated, 143).out
    command = said.split("Go on with:\n")[1].strip()
    shell = start_command(["bash", "-c", command], tmp_path / "again", cwd=tmp_path)
    plain = resume(run_dir)
    finish(shell)
    finish(plain)
    assert_same_end(run_dir, references["CartPole"])
    assert_same_end(terminated.dir, references["CartPole"])
    assert_same_curves(run_dir, references["CartPole"])


def test_a_stalled_evaluator_stalls_neither_training_nor_ctrl_c(references, tmp_path):
    run = start(CARTPOLE, tmp_path / "run", pause(2))  # before the first evaluation
    wait_for_pause(run)
    (evaluator,) = run.children()
    os.kill(evaluator, signal.SIGSTOP)
    go_on(run)
    wait_for_step(run, TOTAL)  # now it waits for the last evaluations
    kill(run, signal.SIGINT)
    finish(run, 130)
    assert len(load(run.dir)["pending_evaluations"]) == 2  # the one that it stalled, the newest
    finish(resume(run.dir, sabotage=KILL_AT_SYNC), -9)  # it has evaluated once more
    assert any(tag == "eval/episodic_return" for _, _, tag, _ in metrics(run.dir))
    finish(resume(run.dir))
    assert_same_end(run.dir, references["CartPole"])
    assert_same_curves(run.dir, references["CartPole"])
    assert load(run.dir)["pending_evaluations"] == []


def test_signals_to_the_whole_group(tmp_path):
    """The terminal sends Ctrl-C, a batch system SIGTERM, to every process of the run."""
    workers, outside = "CartPole --num-workers 2", "CartPole-v1"
    cases = (workers, signal.SIGINT), (workers, signal.SIGTERM), (outside, signal.SIGINT)
    runs = [
        start(f"--env {env} {TINY}", tmp_path / str(index), pause(4))
        for index, (env, _) in enumerate(cases)
    ]
    for run, (_, number) in zip(runs, cases, strict=True):
        wait_for_pause(run)
        kill(run, number, group=True)
    for run, code in zip(runs, (130, 143, 130), strict=True):
        ended = finish(run, code)
        assert "Stopped at step" in ended.out and "died" not in ended.text
        assert load(run.dir)["run"]["step"] >= 2000


def test_ctrl_c_as_the_first_child_starts(tmp_path):
    run = start(f"{CARTPOLE} --total-steps 1000000000 --compile none", tmp_path / "run")
    wait_for(run.children, what="the evaluator", run=run)
    time.sleep(0.2)  # it begins
    kill(run, signal.SIGINT, group=True)
    assert "died" not in finish(run, 130).text


def test_ctrl_c_saves_when_nobody_reads_the_output(references, tmp_path):
    """`python algos/ppo.py | tee log`: Ctrl-C ends tee as well."""
    reader, writer = os.pipe()
    run = start(CARTPOLE, tmp_path / "run", pause(4), stdout=writer, stderr=writer)
    os.close(writer)
    wait_for_pause(run)
    os.close(reader)
    kill(run, signal.SIGINT)
    finish(run, 130)
    step = load(run.dir)["run"]["step"]
    assert 2000 <= step < TOTAL


# Processes.


def shared_memory(run: Started) -> set[str]:
    """The files in /dev/shm that its processes have mapped: others may have files there, too."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in alive(run.process.pid)]
    return set(re.findall(r"/dev/shm/[^\s(]+", "".join(maps)))


def test_no_process_and_no_shared_memory_outlives_a_killed_learner(tmp_path):
    flags = f"--env CartPole {TINY} --num-workers 2 --total-steps 1000000 --compile none"
    runs = [start(flags, tmp_path / name) for name in ("starting", "training")]
    starting, training = runs
    wait_for(starting.children, what="its first child", run=starting)
    kill(starting)
    wait_for_step(training, 2000)
    metrics = training.dir / "metrics.csv"  # once it has evaluated, all its children are up:
    wait_for(lambda: "eval/" in metrics.read_text(), what="its first evaluation", run=training)
    worker, _, evaluator = training.children()
    for pid in (worker, evaluator):  # so busy that they do not notice a closed pipe
        os.kill(pid, signal.SIGSTOP)
    memory = shared_memory(training)
    kill(training)
    for run in runs:
        finish(run, -9)  # waits 30 s for the last process of the session
    assert memory
    wait_for(lambda: not any(map(os.path.exists, memory)), 30, f"one of {memory} is still there")


def test_a_child_that_dies_is_replaced(tmp_path):
    run = start(f"--env CartPole {TINY} --num-workers 2", tmp_path / "run", pause(2))
    wait_for_pause(run)
    worker, _, evaluator = run.children()
    os.kill(worker, signal.SIGKILL)
    os.kill(evaluator, signal.SIGKILL)
    go_on(run)
    ended = finish(run)
    assert ended.text.count("Warning: a child process died") == 2
    found = curves(run.dir)
    steps = range(64, TOTAL + 64, 64)
    assert {step for step, tag in found if tag == "losses/value"} == set(steps)
    assert (load(run.dir)["run"]["step"], "eval/episodic_return") in found


def test_a_child_that_dies_again_and_again_ends_the_run(tmp_path):
    def suffer(case: tuple[str, str]) -> Ended:
        """Its first child, worker or evaluator, and all successors are killed as they appear."""
        name, flags = case
        flags = f"--env CartPole {TINY} --total-steps 1000000 --compile none {flags}"
        run = start(flags, tmp_path / name)
        wait_for_step(run, 1000)
        _, *spared = run.children()
        killed = set()
        while run.process.poll() is None:
            for pid in set(run.children()) - killed - set(spared):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            time.sleep(0.001)
        assert len(killed) == 4  # the first, and three successors
        return finish(run, 1)

    with ThreadPoolExecutor() as pool:
        cases = [("evaluator", "--eval-every 100"), ("worker", "--num-workers 1")]
        evaluator, worker = pool.map(suffer, cases)
    for ended, name in ((evaluator, "the evaluator"), (worker, "worker 0")):
        last = ended.err.splitlines()[-1]
        assert f"{name} process died 4 times (exit code -9)" in last
        assert f"the last good checkpoint is {ended.dir}/checkpoint.pt" in last
        assert ended.text.count("Warning: a child process died") == 3
        assert 500 <= load(ended.dir)["run"]["step"] < 1000000


def test_workers_are_reproducible(tmp_path):
    """One environment in each of two workers; each draws random numbers of its own."""
    flags = f"--env Pendulum {TINY} --num-workers 2 --num-envs 2 --total-steps 3000"
    runs = [start(flags, tmp_path / name) for name in ("one", "two")]
    ends = [finish(run).dir for run in runs]
    agents = [load(end)["agent"] for end in ends]
    assert same(*agents)
    assert_same_curves(*ends)
    returns = agents[0]["reward_scaler.discounted_return"]
    assert returns[0] != returns[1]


@pytest.mark.parametrize("ahead", [False, True])
def test_workers_follow_the_learner(ahead):
    """At once, or one rollout behind, which they collect while the learner learns."""
    args = ppo.Args(env="CartPole", num_envs=2, num_workers=1)
    workers = Workers(fake_run(args), ppo.collect, ahead=ahead)
    agent = ppo.Agent(workers.observation_space, workers.action_space, args)
    workers.start(agent, num_steps=8)
    try:
        taken, wanted = [], [0, 1, 0, 0, 1]
        for action in wanted:
            agent.actor[-1].bias.data = torch.tensor([100.0, 0.0]).roll(action)
            rollout = workers.collect()
            taken.append(rollout["action"].unique().item())
        assert taken == ([wanted[0], *wanted[:-1]] if ahead else wanted)
    finally:
        workers.close()


# In a program of one's own, which calls `train`.

SMALL = dict(env="Pendulum", total_steps=300, warmup_steps=200, hidden_size=8, eval_episodes=1)
SMALL |= dict(torch_threads=1)


def children():
    """How many processes this one has, without those of multiprocessing itself."""
    return len(multiprocessing.active_children())


def test_a_refused_run_leaves_no_process(tmp_path):
    """By a UserError that comes after the workers, before `run.start`."""
    before = children()
    with pytest.raises(UserError, match=r"--buffer-size: 10{12} transitions need"):
        sac.train(sac.Args(**SMALL, num_workers=2, buffer_size=10**12))
    assert children() == before


def test_the_next_run_ends_what_one_that_raised_has_left(tmp_path, monkeypatch):
    """Its workers and evaluator, its lock, its answer to Ctrl-C."""
    before, handler = children(), signal.getsignal(signal.SIGINT)

    def broken(*arguments):
        raise RuntimeError("a bug")

    args = sac.Args(**SMALL, num_workers=1, run_dir=str(tmp_path / "run"))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a bug"):
        patch.setattr(sac, "update", broken)
        sac.train(args)
    assert children() == before + 2
    with pytest.raises(UserError, match="--gamma is 2"):
        sac.train(sac.Args(**SMALL, gamma=2.0))
    assert children() == before and signal.getsignal(signal.SIGINT) is handler


def test_an_environments_error_says_where_the_checkpoint_is(tmp_path, monkeypatch):
    count, collect = itertools.count(), sac.collect

    def failing(*arguments):
        if next(count) == 30:
            raise OSError("the motor's driver is gone")
        collect(*arguments)

    monkeypatch.setattr(sac, "collect", failing)
    args = sac.Args(**SMALL | {"checkpoint_every": 20}, run_dir=str(tmp_path / "run"))
    with pytest.raises(OSError, match="driver is gone") as caught:
        sac.train(args)
    said = f"The last good checkpoint is {tmp_path}/run/checkpoint.pt"
    assert caught.value.__notes__ == [said] and Path(said.split()[-1]).exists()


def test_a_run_that_ended_holds_no_memory(tmp_path):
    """Not until Python looks for circles: runs in a loop would each have a replay buffer."""
    found, make = [], sac.ReplayBuffer

    def remembered(*arguments):
        buffer = make(*arguments)
        found.append(weakref.ref(buffer))
        return buffer

    gc.disable()
    try:
        with unittest.mock.patch.object(sac, "ReplayBuffer", remembered):
            for name in "12":  # imports, in the first, leave circles of their own
                sac.train(sac.Args(**SMALL, run_dir=str(tmp_path / name)))
        assert found[1]() is None
    finally:
        gc.enable()


def test_numbers_of_numpy_and_paths_are_arguments(tmp_path, monkeypatch):
    """As in `for rate in np.logspace(...)`: a checkpoint with them could not be read again."""
    numbers = dict(learning_rate=np.float64(0.01), seed=np.int64(3), save_replay=np.bool_(True))
    folder = sac.train(sac.Args(**SMALL, **numbers, run_dir=tmp_path / "run")).run_dir
    for name in ("checkpoint", "best", "last"):
        assert load_checked(folder / f"{name}.pt")[1] == ""
    monkeypatch.setattr(sys, "argv", ["study.py", "--env", "mine", "--seed=4"])  # not our flags
    assert sac.train(sac.Args(resume=folder, total_steps=np.int64(400))).step == 400


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("compile", "nope", "auto, none, default, onednn, graphs"),
        ("gamma", "high", "one of type float"),
        ("gamma", None, "one of type float"),
        ("seed", 1.5, "one of type int"),
        ("save_replay", "false", "one of type bool"),  # which is true, as every text
    ],
)
def test_a_value_of_another_kind_is_a_sentence(name, value, allowed, tmp_path):
    """As a program may give it, or who edits args.json."""
    args = dataclasses.replace(sac.Args(env="Pendulum", run_dir=str(tmp_path)), **{name: value})
    said = f"{name.replace('_', '-')} is {value!r}; allowed is {allowed}"
    with pytest.raises(UserError, match=said):
        sac.train(args)


class Curriculum:
    """What somebody may want to be saved."""

    def __init__(self, level):
        self.level = level

    def state_dict(self):
        return {"levels": [self.level]}

    def load_state_dict(self, state):
        (self.level,) = state["levels"]


def test_a_state_that_could_not_be_loaded_is_refused_at_once():
    """It was saved, and --resume called the checkpoint damaged."""
    for level in (1, 0.5, "easy", torch.ones(2), {"a": None}):
        files.check_loadable({"curriculum": Curriculum(level)})
    for level, kind in ((np.float64(1), "numpy"), (Path("x"), "pathlib")):
        with pytest.raises(UserError, match=f"the state of curriculum has .*{kind}.* tensors, num"):
            files.check_loadable({"curriculum": Curriculum(level)})


def test_a_second_resume_meets_other_episodes(tmp_path, monkeypatch):
    """An environment that raised would raise again, for ever: its seed followed from the step."""
    begun = []
    monkeypatch.setattr(Workers, "start_anew", lambda self, step: begun.append(step))
    args = ppo.Args(
        env="CartPole-v1", num_envs=2, num_steps=8, minibatch_size=8, hidden_size=8, device="cpu",
        total_steps=64, pause_at=32, eval_every=0, eval_episodes=1, run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    again = dataclasses.replace(args, resume=args.run_dir, run_dir="")
    for one in (args, again, again):
        with pytest.raises(SystemExit):
            ppo.train(one)
    assert begun == [33, 34]


def test_a_device_of_another_name_is_a_sentence():
    with pytest.raises(UserError, match="--device is 'cuda:1'; allowed is auto, cpu, cuda"):
        ppo.train(ppo.Args(device="cuda:1"))


# Files.


def test_what_a_run_leaves(references):
    run_dir = references["CartPole"]
    expected = {"args.json", "metrics.csv", "checkpoint.pt", "checkpoint.prev.pt"}
    expected |= {"best.pt", "last.pt", "learning_curve.png"}
    files = {path.name for path in run_dir.iterdir() if "tfevents" not in path.name}
    assert files == expected

    saved = json.loads((run_dir / "args.json").read_text())
    assert saved["script"] == "ppo"
    args = ppo.Args(**saved["args"])
    assert (args.env, args.num_envs, args.device, args.total_steps) == ("CartPole", 4, "cpu", TOTAL)

    found = curves(run_dir)
    assert {"charts/episodic_return", "losses/value"} <= {tag for _, tag in found}
    assert {tag for _, _, tag, _ in metrics(run_dir)} >= {"charts/SPS"}
    assert tensorboard_curves(run_dir) == pytest.approx(found, rel=1e-6)
    seconds = [at for _, at, tag, _ in metrics(run_dir) if tag == "losses/value"]
    assert seconds == sorted(seconds) and seconds[0] > 0

    evaluations = {step: v for (step, tag), v in found.items() if tag == "eval/episodic_return"}
    assert max(evaluations) == load(run_dir)["run"]["step"]
    best = load(run_dir, "best.pt")
    assert best["return"] == pytest.approx(max(evaluations.values()), rel=1e-7)
    assert evaluations[best["step"]] == max(evaluations.values())
    last = load(run_dir, "last.pt")
    assert last["step"] == max(evaluations)
    assert last["return"] == pytest.approx(evaluations[last["step"]], rel=1e-7)
    for policy in (best, last):  # the weights in the file are those that earned the return
        envs = vec_envs.make(args.env, args.eval_episodes)
        agent = ppo.Agent(envs.single_observation_space, envs.single_action_space, args)
        agent.load_state_dict(policy["agent"])
        found, _ = score(agent, envs, seed=(args.seed + 1) * 1_000_000 + policy["step"])
        assert found["return"] == pytest.approx(policy["return"], rel=1e-6)


def test_evaluation_changes_nothing(references, tmp_path):
    ended = finish(start([*CARTPOLE.split(), "--eval-every", "0"], tmp_path / "run"))
    assert ended.out.count("Evaluating the last policy over 2 episodes ...") == 1
    assert_same_end(ended.dir, references["CartPole"])
    steps = {step for step, tag in curves(ended.dir) if tag == "eval/episodic_return"}
    assert steps == {load(ended.dir)["run"]["step"]}
    # ... and a finished run can be made longer
    ended = finish(start(["--resume", str(ended.dir), "--total-steps", "7000"]))
    assert load(ended.dir)["run"]["step"] == 7040
    assert json.loads((ended.dir / "args.json").read_text())["args"]["total_steps"] == 7000
    curves(ended.dir)


def has_open(run: Started, folder: Path) -> bool:
    """It waits for the folder's lock, or has it."""
    for path in Path(f"/proc/{run.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if path.samefile(folder):
                return True
    return False


def test_a_second_process_in_a_run_folder_is_refused(tmp_path):
    run = start(CARTPOLE, tmp_path / "run", sabotage=pause(4))
    wait_for_pause(run)
    before = (run.dir / "metrics.csv").read_bytes()
    second = finish(resume(run.dir), 1)
    assert f"another run is training in {run.dir}; " in second.err
    third = resume(run.dir)
    wait_for(lambda: has_open(third, run.dir), what="the third process", run=third)
    kill(third, signal.SIGINT)
    assert finish(third, -signal.SIGINT).err == "Stopped\n"
    assert (run.dir / "metrics.csv").read_bytes() == before
    go_on(run)
    finish(run)
    finish(resume(run.dir))  # nobody is in it any more


def test_who_resumes_waits_for_the_last_checkpoint_of_who_still_trains(tmp_path):
    run = finish(start(CARTPOLE, tmp_path / "run"))
    checkpoint = run.dir / "checkpoint.pt"
    older = checkpoint.read_bytes()
    finish(start(["--resume", str(run.dir), "--total-steps", "7000"]))
    last = checkpoint.read_bytes()
    checkpoint.write_bytes(older)
    handle = os.open(run.dir, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    second = resume(run.dir)
    wait_for(lambda: has_open(second, run.dir), what="the second process", run=second)
    checkpoint.write_bytes(last)
    os.close(handle)
    assert "Resumed at step 7040 in" in finish(second).out


def test_a_folder_is_of_one_run_also_within_a_process(tmp_path, monkeypatch):
    """Until it ends, however it ends: the last one here is refused."""
    monkeypatch.setattr(files, "LOCK_SECONDS", 0)
    (tmp_path / "args.json").touch()
    args = ppo.Args(env="CartPole", num_envs=2, device="cpu", run_dir=str(tmp_path))
    held = files.lock(tmp_path, "busy")  # by a run in another thread
    with pytest.raises(UserError, match="another run is training in"):
        ppo.train(args)
    with pytest.raises(UserError, match="busy"):  # still
        files.lock(tmp_path, "busy")
    held.close()
    with pytest.raises(UserError, match="holds a run already"):
        ppo.train(args)
    files.lock(tmp_path, "busy").close()


def test_a_flag_counts_on_resume_even_if_it_is_the_default(tmp_path):
    saved = {"script": "ppo", "args": dataclasses.asdict(ppo.Args(total_steps=500))}
    (tmp_path / "args.json").write_text(json.dumps(saved))
    default = ppo.Args().total_steps
    given = ppo.Args(resume=str(tmp_path), total_steps=default)
    for flag, steps in (("--total_steps", default), ("--total-steps=1", default), ("--x", 500)):
        given.typed = [flag]
        assert saved_args(given, "ppo").total_steps == steps


def test_what_the_run_has_replaced_may_be_said_again(tmp_path):
    """As torchrun does when it starts learners again: `--device auto` is cpu in what was saved.

    Nor does it matter where the folder was, when it was made.
    """
    was = {"device": "cpu", "env_device": "cpu", "num_envs": 64}
    was |= {"torch_threads": 2, "compile": "default"}
    saved = {"script": "ppo", "args": dataclasses.asdict(ppo.Args(**was, run_dir="elsewhere"))}
    (tmp_path / "args.json").write_text(json.dumps(saved))
    again = {"device": "auto", "env_device": "same", "num_envs": 0, "run_dir": str(tmp_path)}
    again |= {"torch_threads": 0, "compile": "auto"}
    given = ppo.Args(resume=str(tmp_path), **again)
    given.typed = [f"--{name.replace('_', '-')}={value}" for name, value in again.items()]
    assert saved_args(given, "ppo") == ppo.Args(**was, run_dir=str(tmp_path))


def test_a_negated_flag_is_not_ignored_on_resume(tmp_path):
    saved = {"script": "sac", "args": dataclasses.asdict(sac.Args())}
    (tmp_path / "args.json").write_text(json.dumps(saved))
    given = sac.Args(resume=str(tmp_path), save_replay=False)
    given.typed = ["--no-save-replay"]
    with pytest.raises(UserError, match="--save-replay is False, but a resumed run keeps its own"):
        saved_args(given, "sac")


@pytest.mark.parametrize(
    ("env", "warp", "steps", "asked", "env_device", "num_envs"),
    [
        ("Spread", False, 10**9, 0, "same", 64),  # by a script with a replay buffer
        ("Hopper", False, 10**9, 0, "cpu", 64),
        ("Hopper", True, 10**6, 0, "cpu", 64),
        ("Hopper", True, 10**6, 1023, "cpu", 1023),
        ("Hopper", True, 10**6, 1024, "same", 1024),
        ("Hopper", True, 10**9, 0, "same", 4096),
        ("Chasing", False, 10**9, 0, "same", 4096),
        ("Chasing", False, 10**9, 4, "same", 4),
        ("Chasing", False, 26_000_000, 0, "same", 64),  # 100 iterations of 4096 x 64 steps are
        ("Chasing", False, 27_000_000, 0, "same", 4096),  # 26.2 million
        ("CartPole-v1", True, 10**9, 0, "cpu", 64),
    ],
)
def test_where_and_how_many_on_a_machine_with_a_gpu(
    env, warp, steps, asked, env_device, num_envs, tmp_path, monkeypatch
):
    """Without mujoco_warp, and few environments, MuJoCo simulates on the CPU; few steps are not
    spent in four rollouts."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: warp or None)
    for name in ("Stream", "set_stream"):  # of CUDA graphs, which `auto` is there
        monkeypatch.setattr(torch.cuda, name, lambda *stream: None)
    script = vdn if env == "Spread" else ppo
    given = script.Args(env=env, total_steps=steps, num_envs=asked, run_dir=str(tmp_path))
    args = Run(given, script.__file__, {}).args
    assert (args.device, args.env_device, args.num_envs) == ("cuda", env_device, num_envs)


def test_damaged_checkpoints(stopped, references, tmp_path):
    truncated = copy_of(stopped, tmp_path / "truncated")
    flipped = copy_of(stopped, tmp_path / "flipped")
    lost = copy_of(stopped, tmp_path / "lost")
    size = (truncated / "checkpoint.pt").stat().st_size
    os.truncate(truncated / "checkpoint.pt", size * 2 // 3)
    weights = load(flipped)["agent"]["actor.0.weight"].numpy().tobytes()
    for run_dir, names in (
        (flipped, ["checkpoint.pt"]),
        (lost, ["checkpoint.pt", "checkpoint.prev.pt"]),
    ):
        for name in names:
            content = bytearray((run_dir / name).read_bytes())
            weights = load(run_dir, name)["agent"]["actor.0.weight"].numpy().tobytes()
            content[content.index(weights) + 5] ^= 0b100
            (run_dir / name).write_bytes(content)
            load(run_dir, name)  # torch does not notice

    foreign = copy_of(stopped, tmp_path / "foreign")
    shutil.copy(foreign / "last.pt", foreign / "checkpoint.pt")
    with open(foreign / "metrics.csv", "ab") as file:
        file.write(b"\xff\x00\n1,2\n\n\xb2,1.0,charts/SPS,1\n20")

    before = hashes(lost)
    # killed as it replaces the damaged one: the good previous one must still be there
    sabotaged = resume(truncated, sabotage=KILL_BETWEEN_RENAMES.replace("== 3", "== 1"))
    runs = [resume(flipped), resume(lost), resume(foreign)]
    assert "checkpoint.pt is damaged" in finish(sabotaged, -9).out
    runs.append(resume(truncated))
    assert "checkpoint.pt is damaged" in finish(runs[0]).out
    assert "checkpoint.pt is damaged (a file of another kind)" in finish(runs[2]).out
    for run in (runs[0], runs[2], runs[3]):
        assert_same_end(finish(run).dir, references["CartPole"])
        assert_same_curves(run.dir, references["CartPole"])
    sentence = finish(runs[1], 1).err.splitlines()[-1]
    assert f"--resume {lost}: no checkpoint in it is intact" in sentence
    assert hashes(lost) == before


def test_a_learner_killed_ahead_of_learner_0_keeps_what_both_have(tmp_path):
    """Its newest is of a step that learner 0 never saved: the one before must not be lost."""
    saved = {}
    for name, step in (("checkpoint.rank1.prev.pt", 100), ("checkpoint.rank1.pt", 200)):
        saved[step] = {"run": {"step": step, "world_size": 2}}
        torch.save(saved[step], tmp_path / name)
    path = tmp_path / "checkpoint.rank1.pt"
    for _ in range(2):
        assert files.read_checkpoint(path, {"step": 100, "world_size": 2}) == saved[100]
        assert load(tmp_path, "checkpoint.rank1.pt") == saved[100]
    assert files.read_checkpoint(path, {"step": 100, "world_size": 3}) is None


def test_a_checkpoint_that_cannot_be_read_is_not_replaced(tmp_path, monkeypatch):
    """A colleague's, or one on a drive that fails: it may be intact."""
    paths = [tmp_path / name for name in ("checkpoint.pt", "checkpoint.prev.pt")]
    for path in paths:
        torch.save({"run": {}}, path)
    before = [path.read_bytes() for path in paths]

    def refused(path, flags):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(files.os, "open", refused)
    with pytest.raises(PermissionError):
        files.read_checkpoint(paths[0])
    assert [path.read_bytes() for path in paths] == before


def test_any_flipped_byte_is_noticed_or_harmless(stopped, tmp_path):
    path = tmp_path / "checkpoint.pt"
    content, good = (stopped.dir / "checkpoint.pt").read_bytes(), load(stopped.dir)

    def noticed(position: int, bit: int) -> bool:
        damaged = bytearray(content)
        damaged[position] ^= 1 << bit
        path.write_bytes(damaged)
        found, problem = load_checked(path)
        assert problem if found is None else same(found, good), (position, bit)
        return found is None

    everywhere = [(random.randrange(len(content)), random.randrange(8)) for _ in range(200)]
    assert sum(noticed(*place) for place in everywhere) > 50
    # a tensor's entry in the table of contents, where each bit has a meaning of its own
    entry = content.rindex(b"PK\1\2", 0, content.rindex(b"archive/data/0"))
    for position in range(entry, entry + 64):
        for bit in range(8):
            noticed(position, bit)


# A full disk.


def limit_files(run: Started, size: int) -> None:
    """From now on no file of the run grows beyond `size` bytes, as if the disk were full."""
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (size, size))


def test_full_disk_does_not_stop_training(tmp_path):
    flags = CARTPOLE.replace("--hidden-size 8", "--hidden-size 64").split()
    files = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    tight = start(flags, tmp_path / "tight", pause(4))  # no room for a checkpoint
    full = start(flags, tmp_path / "full", pause(4), **files)  # no room for anything
    interrupted = start(flags, tmp_path / "interrupted", pause(4))
    for run, size in ((tight, 100_000), (full, 0), (interrupted, 100_000)):
        wait_for_pause(run)
        limit_files(run, size)
    go_on(tight)
    go_on(full)
    kill(interrupted, signal.SIGINT)
    assert ", which could not be saved" in finish(interrupted, 130).out
    said = full.process.communicate(timeout=PATIENCE)[0].decode()
    finish(full, 1)
    assert "Traceback" not in said and "Done: 6016 steps" in said, said
    assert "Stopped at step 6016, which could not be saved" in said
    for name in ("checkpoint.pt", "last.pt", "metrics.csv", "TensorBoard"):
        assert said.count(f"Warning: {name}") == 1, said
    metrics_step = max(row[0] for row in metrics(full.dir))  # evaluations come later
    assert 2000 <= metrics_step < 2500

    ended = finish(tight, 1)
    assert ended.text.count("Warning") == ended.text.count("Warning: checkpoint.pt") == 1
    for run in (tight, full):
        assert load_checked(run.dir / "checkpoint.pt")[1] == ""
        assert 2000 <= load(run.dir)["run"]["step"] < 2500
        assert not list(run.dir.glob("*.tmp"))
    # the older checkpoint is good for the same end
    weights = load(tight.dir, "last.pt")
    assert weights["step"] == 6016
    found = curves(tight.dir)
    finish(resume(tight.dir))
    assert same(load(tight.dir)["agent"], weights["agent"])
    assert_same_curves(tight.dir, found)


def test_full_file_system_and_vanished_folder(tmp_path):
    vanished = start(CARTPOLE, tmp_path / "vanished", pause(4))
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    try:
        if mounted:  # the output goes to the same disk, as a batch system's log does
            run = start(CARTPOLE, disk / "run", pause(4))
            wait_for_pause(run)
            with open(disk / "ballast", "wb", buffering=0) as ballast, pytest.raises(OSError):
                while True:
                    ballast.write(bytes(4096))
            go_on(run)
        wait_for_pause(vanished)
        vanished.dir.rename(tmp_path / "elsewhere")
        go_on(vanished)
        assert "Done: 6016 steps" in finish(vanished, 1).out
        if not mounted:
            pytest.skip("needs the right to mount a tmpfs")
        finish(run, 1)
        assert load_checked(run.dir / "checkpoint.pt")[1] == ""
        (disk / "ballast").unlink()
        finish(resume(run.dir))
        assert load(run.dir)["run"]["step"] == 6016
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_what_is_saved_first_is_never_the_older(tmp_path, monkeypatch):
    """A run that is killed as it pauses has last.pt, which a population scores, or comes again."""
    order = []
    monkeypatch.setattr(run_module, "save", lambda content, path, *more: order.append(path.name))
    monkeypatch.setattr(sys, "argv", ["ppo.py"])
    sizes = {"num_envs": 2, "num_steps": 8, "total_steps": 32, "pause_at": 16, "device": "cpu"}
    with pytest.raises(SystemExit, match="3"):
        ppo.train(ppo.Args(env="CartPole", **sizes, run_dir=str(tmp_path)))
    assert order == ["args.json", "last.pt", "checkpoint.pt"]


def test_a_resumed_run_goes_on_where_no_compiler_is(tmp_path, monkeypatch, capsys):
    sizes = {"num_envs": 2, "num_steps": 8, "total_steps": 32, "device": "cpu"}
    monkeypatch.setattr(sys, "argv", ["ppo.py"])
    with pytest.raises(SystemExit, match="3"):
        ppo.train(ppo.Args(env="CartPole", **sizes, pause_at=16, run_dir=str(tmp_path)))
    saved = json.loads((tmp_path / "args.json").read_text())
    saved["args"]["compile"] = "default"
    (tmp_path / "args.json").write_text(json.dumps(saved))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert ppo.train(ppo.Args(env="CartPole", resume=str(tmp_path))).step == 32
    assert "goes on without it" in capsys.readouterr().out


def test_a_limit_of_evaluations_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(workers, "LONGEST_EVALUATION", 400)  # CartPole's own is 500
    sizes = {"num_envs": 2, "num_steps": 8, "total_steps": 16, "device": "cpu"}
    ppo.train(ppo.Args(env="CartPole", **sizes, run_dir=str(tmp_path)))
    assert "Evaluations stop an episode after 400 steps." in capsys.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_loaded_checkpoint_is_not_kept_open(stopped, tmp_path):
    """Adam takes the tensors that it is given: of a mapped file, they would keep it on the disk."""
    path = copy_of(stopped, tmp_path / "run") / "checkpoint.pt"
    saved = files.read_checkpoint(path)
    moments = saved["optimizer"]
    assert str(path) in Path("/proc/self/maps").read_text()
    del saved
    assert moments["state"] and str(path) not in Path("/proc/self/maps").read_text()


# NaN.

NAN_PACKAGE = """
    import gymnasium, multiprocessing, numpy as np

    class Sick(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
        steps = 0

        def __init__(self, observation=0.0, reward=0.0):
            self.sickness = np.array([0, observation, 0], np.float32), reward

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return self.np_random.normal(size=3).astype(np.float32), {}

        def step(self, action):
            self.steps += 1
            sick = self.steps == 300  # of this environment's life: an evaluation is shorter
            observation, reward = self.sickness if sick else (0, 0)
            return self.np_random.normal(size=3) + observation, 1.0 + reward, False, False, {}

    for name, value in (("Nan", np.nan), ("Inf", np.inf)):
        for what in ("observation", "reward"):
            gymnasium.register(f"{name}{what.title()}-v0", Sick, max_episode_steps=50,
                               kwargs={what: value})

    class SickElsewhere(Sick):
        def step(self, action):
            self.steps = 299 * (multiprocessing.parent_process() is not None)
            return super().step(action)

    gymnasium.register("NanEvaluation-v0", SickElsewhere, max_episode_steps=50,
                       kwargs={"reward": np.nan})
"""


def test_nan_stops_the_run(tmp_path):
    (tmp_path / "sick.py").write_text(textwrap.dedent(NAN_PACKAGE))
    flags = f"{TINY} --eval-every 0"
    cases = {  # case -> (flags, words of the error)
        "observation": (f"--env sick:NanObservation-v0 {flags}", ("next_obs is nan", "step 1200")),
        "infinity": (f"--env sick:InfObservation-v0 {flags}", ("next_obs is inf", "step 1200")),
        "reward": (
            f"--env sick:NanReward-v0 {flags} --num-workers 2",
            ("reward is nan", "step 1200"),
        ),
        "evaluation": (
            f"--env sick:NanEvaluation-v0 {TINY}",
            ("the return of the evaluation at step", "is nan"),
        ),
        "loss": (
            f"--env Pendulum {flags} --learning-rate 1e25",
            ("losses/", "step 64"),
        ),
    }
    with ThreadPoolExecutor(2) as pool:
        ends = pool.map(
            lambda name: finish(start(cases[name][0], tmp_path / name, paths=(tmp_path,)), 1), cases
        )
        for name, ended in zip(cases, ends, strict=True):
            sentence = ended.err.splitlines()[-1]
            assert all(word in sentence for word in cases[name][1]), sentence
            if "step 1200" in cases[name][1]:
                assert "checkpoint.pt" in sentence
                saved = load(ended.dir)
                assert 500 <= saved["run"]["step"] < 1200
                assert all(value.isfinite().all() for value in saved["agent"].values())
            for rows in metrics(ended.dir):
                assert math.isfinite(rows[3])


FRAIL_PACKAGE = """
    import gymnasium, multiprocessing, pathlib
    from gymnasium.envs.classic_control import CartPoleEnv
    from vec_envs.core import ContractError

    class Frail(CartPoleEnv):  # it fails in an evaluation, as often as `falls` has letters
        def reset(self, **options):
            falls = pathlib.Path(__file__).with_name("falls")
            if multiprocessing.parent_process() is not None and (left := falls.read_text()):
                falls.write_text(left[1:])
                raise ContractError("it rained")
            return super().reset(**options)

    gymnasium.register("Frail-v0", Frail, max_episode_steps=50)
"""


def test_an_evaluation_that_fails_is_left_out(tmp_path):
    """It ended the run, and each resumed one again: the checkpoint held the evaluation."""
    (tmp_path / "frail.py").write_text(textwrap.dedent(FRAIL_PACKAGE))
    falls = tmp_path / "falls"

    def run(name, letters, eval_every):
        falls.write_text(letters)
        flags = f"--env frail:Frail-v0 {TINY} --eval-every {eval_every}"
        return start(flags, tmp_path / name, paths=(tmp_path,))

    ended = finish(run("once", "x", 2000))  # at 2000, 4000 and the end, 6000
    assert "it rained; there is no evaluation of step" in ended.out and "nan" not in ended.out
    steps = [row[0] for row in metrics(ended.dir) if row[2] == "eval/episodic_return"]
    assert 6000 <= max(steps) and load(ended.dir)["pending_evaluations"] == []
    ended = finish(run("last", "x", 0))
    assert "last nan" in ended.out
    again = finish(resume(ended.dir, paths=(tmp_path,)))
    assert "nan" not in again.out


@pytest.mark.parametrize("env", ["CartPole-v1", "pettingzoo:mpe2.simple_spread_v3"])
def test_envs_of_others_do_not_repeat_themselves_after_a_resume(env):
    args, several = ppo.Args(env=env, num_envs=2), "mpe2" in env

    def make_workers():
        return Workers(fake_run(args), ppo.collect, multi_agent=several)

    first, second = make_workers(), make_workers()
    start, _ = first.envs.reset()
    second.load_state_dict(first.state_dict())
    second.start_anew(2)
    assert not first.exact_resume and second.envs.obs.shape == start.shape
    assert not torch.isclose(second.envs.obs, start).all(-1).any()


class Staggered:
    """Env i ends each episode after i + 1 steps, each worth 10^i."""

    num_envs, max_episode_steps, num_agents = 3, 99, None

    def reset(self, seed):
        self.lengths = torch.zeros(3, dtype=torch.int64)
        return torch.zeros(3, 1), {}

    def step(self, action):
        lengths = self.lengths + 1
        done = lengths > torch.arange(3)
        self.lengths = torch.where(done, 0, lengths)
        info = {"episode_length": lengths, "episode_return": lengths * 10.0 ** torch.arange(3)}
        return torch.zeros(3, 1), torch.zeros(3), done & False, done, info


def test_a_score_is_of_each_envs_first_episode():
    found, returns = score(torch.nn.Identity(), Staggered(), seed=0)
    assert returns == [1, 20, 300]
    assert found == pytest.approx({"return": 107, "return_std": 136.6919, "length": 2}, rel=1e-5)


class Unequal(Staggered):
    """Agent 0 is paid 1 a step, agent 1 is paid 2."""

    num_agents = 2

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, torch.tensor([[1.0, 2.0]]).expand(3, 2), *rest


def test_a_score_tells_agents_apart_that_are_paid_differently():
    found, _ = score(torch.nn.Identity(), Unequal(), seed=0)
    assert (found["return_agent_0"], found["return_agent_1"]) == (2, 4)  # of 1, 2 and 3 steps


def test_an_evaluations_seed_is_its_own_and_fits_in_31_bits(monkeypatch):
    seeds, steps = [], iter((0, 1, 10**12))
    monkeypatch.setattr(workers.os, "nice", lambda by: None)  # for good
    monkeypatch.setattr(
        workers, "score", lambda agent, envs, seed: seeds.append(seed) or (0.0, 0.0, 0.0, [])
    )
    pipe = SimpleNamespace(recv=lambda: next(steps), send=lambda answer: None)
    args = ppo.Args(env="CartPole", seed=2**31 - 1, eval_episodes=1)
    with pytest.raises(StopIteration):
        workers._evaluator_main(pipe, 0, None, args)
    assert len(set(seeds)) == 3 and all(0 <= seed < 2**31 for seed in seeds)


def test_episodes_that_ended_are_what_is_logged(monkeypatch):
    written = []
    run = SimpleNamespace(world_size=1, _began=3, _write=lambda *row: written.append(row))
    monkeypatch.setattr(time, "perf_counter", lambda: 10)
    done = torch.tensor([[False, True], [True, False]])
    batch = {"done": done, "episode_return": torch.tensor([[1.0, 20.0], [3.0, 400.0]])}
    batch["episode_length"] = torch.tensor([[5, 6], [8, 9]])
    Run.log_episodes(run, 7, batch)
    assert written == [(7, "charts/episodic_", {"return": 11.5, "length": 7.0})]
    Run.log_episodes(run, 8, batch | {"done": done & False})
    assert len(written) == 1 and run.training_return == 11.5
    assert run.seconds == 7  # now, not when the losses before were logged


def test_the_speed_is_that_after_the_first_update(monkeypatch):
    """Neither random actions before it nor its compilation count; no return is shown before one.

    After a minute it is measured again whether one thread is faster.
    """
    written, shown, rechecked, clock = [], [], [], iter((10, 100, 110))
    monkeypatch.setattr(engine, "recheck_threads", rechecked.append)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    bar = SimpleNamespace(n=0, update=lambda steps: None)
    bar.set_postfix_str = lambda text, refresh: shown.append(text)
    run = SimpleNamespace(
        _began=0, _warm=None, _rechecked=0, _bar=bar, device=torch.device("cpu"), world_size=1,
        args=SimpleNamespace(total_steps=9000), last_return=math.nan, training_return=math.nan,
        _write=lambda step, prefix, found: written.append(found.get("charts/SPS")),
    )  # fmt: skip
    Run.log(run, 1000, {}, replay_size=1000)  # only random actions yet
    Run.log(run, 2000, {"critic": torch.tensor(1.0)})
    run.training_return, run.fail = 5.0, pytest.fail
    with pytest.raises(pytest.fail.Exception, match=r"losses/td has the shape \(3,\); log one"):
        Run.log(run, 2500, {"td": torch.ones(3)})
    clock = iter((110, 110, 110))
    for value in (math.nan, math.inf):
        with pytest.raises(pytest.fail.Exception, match=f"losses/td is {value} at step 2500"):
            Run.log(run, 2500, {"td": torch.tensor(value)})
    Run.log(run, 3000, {"critic": torch.tensor(1.0)})
    assert written == [None, None, 100] and shown == ["training return 5"]
    assert rechecked == [run.args]


def test_a_torn_line_is_not_drawn(tmp_path):
    """As a full disk leaves it."""
    for torn in ("", "128,2.", "128,2.5,charts/episodic_return,"):
        rows = f"step,seconds,tag,value\n64,1.5,charts/episodic_return,7\n64,1.5,a b,3\n{torn}"
        (tmp_path / "metrics.csv").write_text(rows)
        files.plot(tmp_path, "torn")


def test_only_a_full_disk_is_a_warning(tmp_path, capsys):
    """A checkpoint that cannot be saved at all was one, too: training went on without any."""
    path = tmp_path / "checkpoint.pt"
    path.touch()
    for content, kind in (({"a": lambda: 0}, Exception), ({"a": threading.Lock()}, TypeError)):
        with pytest.raises(kind, match=r"pickle|local object"):
            files.quietly("checkpoint.pt", files.save, content, path)
        assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint.pt"]
    assert not files.quietly("it", files.save, {}, tmp_path / "nowhere" / "checkpoint.pt")
    assert capsys.readouterr().out.startswith("Warning: it could not be written ([Errno 2]")


def test_a_run_that_is_made_longer_says_that_its_schedules_jump(tmp_path, monkeypatch, capsys):
    saved = {"script": "ppo", "args": dataclasses.asdict(ppo.Args(total_steps=500))}
    (tmp_path / "args.json").write_text(json.dumps(saved))
    for steps, said in (("500", ""), ("900", "--total-steps was 500 and is now 900")):
        monkeypatch.setattr(sys, "argv", ["ppo.py", "--total-steps", steps])
        saved_args(ppo.Args(resume=str(tmp_path), total_steps=int(steps)), "ppo")
        out = capsys.readouterr().out
        assert out.startswith(said) and out.count("schedule") == bool(said)
    with pytest.raises(UserError, match=r"--total-steps is 400, but .* keeps its own \(500\)"):
        saved_args(ppo.Args(resume=str(tmp_path), total_steps=400), "ppo")


# Bad input.


def ended_here(arguments: str, folder: Path, monkeypatch, capsys) -> tuple[int, str]:
    """`python algos/ppo.py arguments` in this process -> its exit status and its errors."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["ppo.py", *arguments.split()])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    capsys.readouterr()
    try:
        runpy.run_path(str(ROOT / "algos" / "ppo.py"), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
    return code, capsys.readouterr().err


def test_bad_input_is_one_sentence(stopped, tmp_path, monkeypatch, capsys):
    saved = (stopped.dir / "args.json").read_text()
    for name, content in {
        "torn": saved[:100],
        "list": "[1]",
        "key": saved.replace("epochs", "epocks"),
        "other": saved.replace('"script": "ppo"', '"script": "sac"'),
        "nameless": saved.replace('"script"', '"scripts"'),
        "misfit": saved.replace('"hidden_size": 8', '"hidden_size": 16'),
        "without": None,
    }.items():
        run_dir = copy_of(stopped, tmp_path / name)
        (run_dir / "args.json").unlink()
        if content is not None:
            assert content != saved
            (run_dir / "args.json").write_text(content)
    for name, own in {"anew": {"world_size": 2}, "less": {}, "kind": None}.items():
        path = copy_of(stopped, tmp_path / name) / "checkpoint.pt"
        content = torch.load(path, weights_only=True)
        del content["optimizer"]
        content["run"] = None if own is None else content["run"] | own
        path.with_suffix(".prev.pt").unlink(missing_ok=True)
        files.save(content, path)
    (tmp_path / "file").touch()
    good = str(stopped.dir)
    cases = [  # arguments, then words that the sentence must hold
        ("--total-steps -5", "--total-steps", "-5", "at least 1"),
        ("--learning-rate nan", "--learning-rate", "nan"),
        ("--learning-rate inf", "--learning-rate", "inf", "finite"),
        ("--learning-rate 1e300", "--learning-rate", "1e+300", "finite", "32 bits"),
        ("--epochs 9223372036854775808", "--epochs", "9223372036854775808", "64 bits"),
        ("--learning-rate -1", "--learning-rate", "-1"),
        ("--num-envs -1", "--num-envs", "-1"),
        ("--num-workers 100 --num-envs 4", "--num-workers", "100", "--num-envs", "4"),
        ("--compile graphs --device cpu", "--compile", "graphs", "auto"),
        ("--env Hoper", "--env", "Hoper", "Hopper"),
        ("--env nopackage:Env-v0", "--env", "nopackage"),
        ("--eval-episodes 0", "--eval-episodes", "0", "1"),
        ("--minibatch-size 0", "--minibatch-size", "0", "at least"),
        ("--num-steps 0", "--num-steps", "0", "at least"),
        ("--epochs 0", "--epochs", "0", "at least"),
        ("--gae-lambda 1.5", "--gae-lambda", "1.5", "0", "1"),
        ("--seed -1", "--seed", "-1", "0"),
        ("--checkpoint-every 0", "--checkpoint-every", "0", "at least 1"),
        ("--nonsense 1", "--nonsense"),
        ("--total-steps many", "--total-steps", "many"),
        ("--total-steps 1e30", "--total-steps", "64 bits"),
        ("--seed 1 --env", "--env", "Missing value"),
        ("--device gpu", "--device", "gpu", "cuda"),
        ("--num-envs 2.5", "--num-envs", "2.5"),
        (f"--resume {tmp_path}/nowhere", "--resume", "nowhere", "there is no run in this folder"),
        (f"--resume {tmp_path}/file", "--resume", "file"),
        (f"--resume {tmp_path}/without", "--resume", "without"),
        (f"--resume {tmp_path}/torn", "--resume", "torn"),
        (f"--resume {tmp_path}/nameless", "--resume", "nameless", "cannot be read"),
        (f"--resume {tmp_path}/list", "--resume", "list"),
        (f"--resume {tmp_path}/key", "--resume", "epocks"),
        (f"--resume {tmp_path}/other", "--resume", "sac", "ppo"),
        (f"--resume {tmp_path}/misfit", "checkpoint.pt does not fit args.json", "size mismatch"),
        (f"--resume {tmp_path}/less", "checkpoint.pt does not fit", "optimizer: KeyError"),
        (f"--resume {tmp_path}/anew", "checkpoint.pt does not fit", "optimizer: KeyError"),
        (f"--resume {tmp_path}/kind", "no checkpoint in it is intact"),
        (f"--resume {good} --num-envs 8", "--num-envs", "8"),
        (f"--resume {good} --env Ant", "--env", "Ant"),
        (f"--resume {good} --learning-rate 0.5", "--learning-rate", "0.5"),
        (f"--resume {good} --run-dir elsewhere", "--run-dir", "elsewhere"),
        (f"--run-dir {good} {CARTPOLE}", "--run-dir", good, "--resume"),
        (f"--run-dir {Path(good).parent} {CARTPOLE}", "--resume", "holds a run already"),
        (f"--run-dir {tmp_path}/file {CARTPOLE}", "--run-dir", "file"),
        (f"--run-dir {tmp_path}/file/run {CARTPOLE}", "--run-dir", "file/run"),
        (f"--run-dir /proc/run {CARTPOLE}", "--run-dir", "/proc/run"),
    ]
    if not torch.cuda.is_available():
        cases.append(("--device cuda", "--device", "cuda", "cpu"))
    empty = tmp_path / "empty"
    empty.mkdir()
    before = {path.name: hashes(path) for path in tmp_path.iterdir() if path.is_dir()}
    good_before = hashes(stopped.dir)

    as_processes = "--total-steps -5", "--nonsense 1", f"--resume {tmp_path}/misfit"
    for arguments, *words in cases:
        ends = [ended_here(arguments, empty, monkeypatch, capsys)]
        if arguments in as_processes:
            script = [sys.executable, str(ROOT / "algos" / "ppo.py"), *arguments.split()]
            ended = finish(start_command(script, tmp_path / "case", cwd=empty), None)
            ends.append((ended.code, ended.err))
        for code, err in ends:
            assert code in (1, 2) and code == ends[0][0], (arguments, err)
            assert all(word in err for word in words), (arguments, words, err)
            if code == 1:  # ours; 2 is the box that tyro draws
                assert err.count("\n") == 1, (arguments, err)
    assert not list(empty.iterdir())
    assert hashes(stopped.dir) == good_before
    assert {name: hashes(tmp_path / name) for name in before} == before


def test_too_little_memory_is_one_sentence(tmp_path):
    command = [sys.executable, "algos/ppo.py", "--env", "CartPole", "--num-steps", 10**12]
    run = start_command([*map(str, command), "--run-dir", str(tmp_path / "a")], tmp_path / "a")
    ended = finish(run, 1)
    needed, sizes = 64 * 4 * 4 * 10**12, "networks, batches, --num-envs, --num-steps"
    assert (
        ended.err == f"Not enough memory for {needed} bytes more; choose smaller sizes: {sizes}\n"
    )


def test_a_size_beyond_64_bits_is_too_little_memory(tmp_path, monkeypatch, capsys):
    """torch has other words where not even the number of bytes can be said."""
    flags = "--env CartPole --hidden-size 1e18"
    code, err = ended_here(flags, tmp_path, monkeypatch, capsys)
    sizes = "networks, batches, --num-envs, --num-steps"
    assert (code, err) == (1, f"Not enough memory; choose smaller sizes: {sizes}\n")


# As a library.

LIBRARY = """
    import os, signal, sys, threading
    from pathlib import Path

    from algos.ppo import Args, train
    from algos.worker_learner import UserError

    tiny = dict(env="Pendulum", num_envs=4, num_steps=16, minibatch_size=32, epochs=1,
                hidden_size=8, total_steps=1000, eval_episodes=2)

    def main(folder):
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        results = [train(Args(**tiny, run_dir=f"{folder}/{name}")) for name in "ab"]
        thread = threading.Thread(
            target=lambda: results.append(train(Args(**tiny, run_dir=f"{folder}/c"))))
        thread.start()
        thread.join()
        assert handlers == [
            signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        assert [result.run_dir for result in results] == [Path(folder, name) for name in "abc"]
        assert all(result.step == 1024 and result.seconds > 0 for result in results)
        assert all(result.last_return == result.best_return < 0 for result in results)
        try:
            train(Args(**tiny, run_dir=f"{folder}/a"))
        except UserError as error:
            assert "--resume" in str(error)

    if __name__ == "__main__":
        main(sys.argv[1])
"""


def test_as_a_library(tmp_path):
    script = tmp_path / "library.py"
    script.write_text(textwrap.dedent(LIBRARY))
    finish(start_command([sys.executable, str(script), str(tmp_path)], tmp_path / "library"))
    agents = [load(tmp_path / name)["agent"] for name in "abc"]
    assert same(agents[0], agents[1]) and same(agents[0], agents[2])


def test_a_program_that_cannot_be_imported_again_is_told_before_an_evaluation(tmp_path):
    script = tmp_path / "unguarded.py"
    args = f"env='CartPole', total_steps=10**9, eval_every=0, run_dir={str(tmp_path / 'run')!r}"
    call = f"train(Args({args}, compile='none'))"
    script.write_text(f"from algos.ppo import Args, train\n{call}\n")
    ended = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ended.returncode == 1
    assert "the evaluator could not import your program; is it a file" in ended.stderr


def test_to_save_writes_to_no_file_outside_of_the_run_folder(tmp_path):
    """Somebody else's run folder may have links where temporary files and files come to be."""
    (tmp_path / "run").mkdir()
    (tmp_path / "mine").write_text("mine")
    for name in ("args.tmp", "args.json"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "mine")
    files.save("theirs", tmp_path / "run" / "args.json")
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "run" / "args.json").read_text() == "theirs"


def test_segments_chain_to_the_undisturbed_run(references, tmp_path):
    """--pause-at has a status of its own, keeps the schedule, and does nothing where it is past."""
    run_dir = tmp_path / "segments"
    assert finish(start(f"{CARTPOLE} --pause-at 1000", run_dir), 3).code == PAUSED
    first = load(run_dir)["run"]["step"]
    assert 1000 <= first < 1000 + 64  # the iteration that reaches it, of 4 environments x 16 steps
    before = hashes(run_dir)["checkpoint.pt"]
    finish(start(["--resume", str(run_dir), "--pause-at", "1000"]), PAUSED)
    assert hashes(run_dir)["checkpoint.pt"] == before
    said = finish(start(["--resume", str(run_dir), "--pause-at", "3500"]), PAUSED).out
    assert f"Stopped at step {load(run_dir)['run']['step']}. Go on with:" in said
    finish(start(["--resume", str(run_dir), "--pause-at", str(TOTAL)]))  # the end is no pause
    assert_same_end(run_dir, references["CartPole"])
    assert_same_curves(run_dir, references["CartPole"])
    # what cannot be saved is no segment: the status says so
    full = """
        import os
        fsync = os.fsync
        def fails(file):
            if os.readlink(f"/proc/self/fd/{file}").endswith("checkpoint.tmp"):
                raise OSError(28, "No space left on device")
            fsync(file)
        os.fsync = fails
    """
    ended = finish(start(f"{CARTPOLE} --pause-at 100", tmp_path / "full", sabotage=full), 1)
    assert "could not be saved" in ended.text
