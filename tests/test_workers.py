"""Worker processes collect what the same envs would have given here."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import vec_envs
from algos import ppo, sac
from algos.worker_learner import RunArgs, UserError, Workers
from algos.worker_learner import workers as module
from algos.worker_learner.arguments import say_in_one_sentence
from algos.worker_learner.workers import Child, Evaluator

NUM_STEPS, ROLLOUTS = 30, 3
ROOT = Path(__file__).parent.parent


def fake_run(args):
    """What `Workers` ask of a run."""
    cpu, at_end = torch.device("cpu"), contextlib.ExitStack()
    return SimpleNamespace(args=args, device=cpu, at_end=at_end)


@pytest.mark.parametrize("module", [ppo, sac])
def test_workers_collect_what_the_same_envs_would_here(module):
    args = module.Args(env="Pendulum", num_envs=5, num_workers=2, seed=3, device="cpu")
    run = fake_run(args)
    workers = Workers(run, module.collect)
    torch.manual_seed(0)
    agent = module.Agent(workers.observation_space, workers.action_space, args)
    collected = []
    try:
        empty = workers.start(agent, NUM_STEPS)
        shapes = {name: (tensor.shape[2:], tensor.dtype) for name, tensor in empty.items()}
        for number in range(ROLLOUTS):
            with torch.no_grad():  # the workers see the weights as they are now
                for parameter in agent.parameters():
                    parameter.add_(0.01 * number)
            collected.append({name: x.clone() for name, x in workers.collect().items()})
            assert collected[-1]["obs"].abs().sum() > 0
    finally:
        workers.close()

    for index, columns in enumerate((slice(0, 2), slice(2, 5))):
        torch.manual_seed(0)
        agent = module.Agent(workers.observation_space, workers.action_space, args)
        seed = args.seed + 1_000_003 * (index + 1)
        torch.manual_seed(seed)
        envs = vec_envs.make("Pendulum", columns.stop - columns.start, seed=seed)
        envs.reset()
        for number, theirs in enumerate(collected):
            with torch.no_grad():
                for parameter in agent.parameters():
                    parameter.add_(0.01 * number)
            ours = {
                name: torch.zeros(NUM_STEPS, envs.num_envs, *shape, dtype=dtype)
                for name, (shape, dtype) in shapes.items()
            }
            module.collect(agent, envs, ours)
            for name, tensor in ours.items():
                assert torch.equal(tensor, theirs[name][:, columns]), (index, number, name)


def count_on(agent, envs, rollout):
    """As a policy that remembers: this collection begins with what the last one ended with."""
    rollout["count"].copy_(rollout["count"][-1:] + 1)


def test_a_replaced_worker_begins_anew_and_the_replay_buffer_knows():
    args = sac.Args(env="Pendulum", num_envs=2, num_workers=1, device="cpu")
    ended = []
    run = fake_run(args)
    run.end_episodes = lambda: ended.append(len(ended))
    workers = Workers(run, count_on, ahead=True)
    agent = sac.Agent(workers.observation_space, workers.action_space, args)
    workers.start(agent, 4, count=())
    try:
        workers.collect()
        assert workers.collect()["count"].eq(2).all() and not ended
        workers._children[0].process.kill()
        workers._children[0].process.join()
        workers.collect()  # perhaps it had sent this before it was killed
        assert workers.collect()["count"].le(2).all() and ended == [0]
    finally:
        workers.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_environments_that_start_anew_do_not_repeat_the_runs_beginning(num_workers):
    sizes = {"num_envs": 4, "num_workers": num_workers, "compile": "none"}
    args = ppo.Args(env="Pendulum", seed=3, device="cpu", **sizes)
    run = fake_run(args)
    begun = []
    for step in (None, 0, 1000, 1000, 2000):
        workers = Workers(run, ppo.collect)
        torch.manual_seed(0)
        agent = ppo.Agent(workers.observation_space, workers.action_space, args)
        workers.start(agent, 2)
        if step is not None:
            workers.start_anew(step)
        begun.append({name: x.clone() for name, x in workers.collect().items()})
        workers.close()
    plain, zero, one, again, two = (rollout["obs"][0] for rollout in begun)
    assert torch.equal(plain, zero) and torch.equal(one, again)
    for a, b in ((plain, one), (plain, two), (one, two)):
        assert (a != b).any(1).all()
    if num_workers:  # their random generators too
        actions = [rollout["action"][0] for rollout in begun]
        assert torch.equal(actions[2], actions[3]) and (actions[1] != actions[2]).any(1).all()


class Sign(torch.nn.Module):
    """A policy without noise: a discrete action, by the sign of what is seen."""

    def forward(self, obs):
        return (obs.sum(-1) > 0).long()


@torch.no_grad()
def collect(agent, envs, rollout):
    for t in range(len(rollout["obs"])):
        rollout["obs"][t] = envs.obs
        _, reward, terminated, truncated, info = envs.step(agent(envs.obs))
        rollout["reward"][t] = reward
        rollout["next_obs"][t] = info["final_obs"]
        rollout["done"][t] = terminated | truncated
        rollout["episode_return"][t] = info["episode_return"]
        rollout["episode_length"][t] = info["episode_length"]


def close_its_pipe(pipe, restarts):
    """As an environment may that closes all files: at first it lives on without its pipe."""
    pipe.recv()
    if not restarts:
        pipe.close()
        time.sleep(1000)
    pipe.send(restarts)


def test_a_worker_that_lost_its_pipe_is_dead_before_its_successor_starts():
    child = Child("worker 0", close_its_pipe)
    try:
        first, started = child.process, []
        start = child._start
        child._start = lambda: started.append(first.is_alive()) or start()
        child.ask("collect")
        assert child.answer() == 1 and started == [False]
    finally:
        child.close()


def leave_with_1(pipe, restarts):
    """As a simulator written in C does that gives up."""
    pipe.recv()
    pipe.send(restarts)
    pipe.recv()
    os._exit(1)


def test_a_child_that_leaves_with_1_is_started_again():
    """Only one that never answered could not import the program."""
    child = Child("worker 0", leave_with_1)
    try:
        for restarts in range(3):
            child.ask("collect")
            assert child.answer() == restarts
    finally:
        child.close()


def lose_the_robot(pipe, restarts, kind):
    pipe.recv()
    raise kind("connection to the robot lost")


@pytest.mark.parametrize("kind", [BrokenPipeError, ConnectionResetError, EOFError])
def test_an_environments_own_connection_is_not_the_learners(kind, capfd):
    child = Child("worker 0", lose_the_robot, kind)
    child.ask(0)
    with pytest.raises(UserError, match=f"worker 0 failed: {kind.__name__}: connection to the ro"):
        child.answer()
    child.close()
    say_in_one_sentence(kind, kind("connection to the robot lost"), None)  # without workers
    assert f"{kind.__name__}: connection to the robot lost" in capfd.readouterr().err


def test_a_silent_worker_is_named(monkeypatch, capsys):
    """After each minute; an evaluator, which nobody waits for, is not."""
    waited, polls = [], iter((False, False, False, True))
    pipe = SimpleNamespace(
        poll=lambda seconds: waited.append(seconds) or next(polls), recv=lambda: "collected"
    )
    monkeypatch.setattr(Child, "_start", lambda self: setattr(self, "pipe", pipe))
    child = Child("worker 3", None)
    assert child.answer() == "collected" and waited == [60] * 4
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if "Warning: worker 3" in line] == said and len(said) == 3
    waited.clear()
    polls = iter((False,))
    assert child.answer(wait=0.2) is None and waited == [0.2] and not capsys.readouterr().out


def test_seeds_of_workers_are_their_own_and_fit_in_31_bits(monkeypatch):
    seeds = []
    args = RunArgs(env="CartPole", seed=2**31 - 1)
    envs = SimpleNamespace(reset=lambda seed: seeds.append(seed))
    monkeypatch.setattr(module, "_make_envs", lambda args, count, seed: seeds.append(seed) or envs)
    monkeypatch.setattr(torch, "manual_seed", seeds.append)

    def collect(*arguments):
        raise StopIteration

    for index, restarts, begin in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 5)):
        pipe = SimpleNamespace(recv=lambda begin=begin: begin)
        columns = {"done": torch.zeros(1)}
        with pytest.raises(StopIteration):
            module._worker_main(pipe, restarts, collect, None, columns, args, index)
    assert all(0 <= seed < 2**31 for seed in seeds) and len(set(seeds)) == 4


def test_too_little_shared_memory_is_one_sentence(monkeypatch):
    """As in a Docker container, which has 64 MB: the kernel would kill the first to write there."""
    args = ppo.Args(env="Pendulum", num_envs=4, num_workers=2, device="cpu")
    run = fake_run(args)
    workers = Workers(run, ppo.collect)
    agent = ppo.Agent(workers.observation_space, workers.action_space, args)
    disk = SimpleNamespace(free=64 << 20)
    monkeypatch.setattr(module.os.path, "isdir", lambda folder: True)  # macOS has no /dev/shm
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: disk)
    match = r"--num-workers.* needs \d+ MiB .* 64 MiB are free in /dev/shm.*docker run --shm-size"
    with pytest.raises(UserError, match=match):
        workers.start(agent, 1_000_000)
    disk.free = 1000
    with pytest.raises(UserError, match=r"the evaluator.*--shm-size"):
        Evaluator(args, agent)


def test_one_policy_waits_for_the_evaluator_the_newest(monkeypatch, capsys):
    """The queue had no bound, and every checkpoint held all the weights in it."""
    asked, answers = [], []

    class Answering:
        close, answered = None, False

        def __init__(self, *arguments):
            self.ask, self.process = asked.append, SimpleNamespace(exitcode=None)
            self._start = lambda: asked.append("another process")

        def answer(self, wait):
            if answers and isinstance(answers[-1], Exception):
                raise answers.pop()
            return answers.pop() if answers else None

    monkeypatch.setattr(module, "Child", Answering)
    agent = torch.nn.Linear(1, 1)
    evaluator = Evaluator(RunArgs(), agent)
    for step in range(1, 10):
        evaluator.submit(step, {name: x + step for name, x in agent.state_dict().items()})
    evaluator.submit(1, agent.state_dict())  # as a resumed run may: it is being scored
    assert [step for step, _ in evaluator.pending] == [1, 9] and asked == [1]
    answers.append((1.0, 0.0, 1.0))
    ((step, weights, _),) = evaluator.results()
    assert step == 1 and torch.equal(weights["bias"], agent.bias + 1)
    assert [step for step, _ in evaluator.pending] == [9] and asked == [1, 9]
    assert torch.equal(evaluator._agent.bias, agent.bias + 9)
    # one that fails is left out, lest a resumed run fail again; two in a row are no accident
    evaluator.submit(10, agent.state_dict())
    answers.append(module.ChildFailed("the evaluator failed: it rained"))
    assert evaluator.results() == [] and asked == [1, 9, "another process", 10]
    assert (
        "it rained; there is no evaluation of step 9. Training goes on." in capsys.readouterr().out
    )
    answers.append({"return": 1.0})
    assert len(evaluator.results()) == 1
    for step, message in ((11, "once"), (12, "twice")):
        evaluator.submit(step, agent.state_dict())
        answers.append(module.ChildFailed(message))
        if step == 11:
            evaluator.results()
    with pytest.raises(UserError, match="twice"):
        evaluator.results()
    evaluator.submit(13, agent.state_dict())
    answers.append(module.ChildFailed("at the end"))
    assert evaluator.results(wait=0.2) == [] and evaluator.failed and not evaluator.pending


FROM_ELSEWHERE = """
import os

import torch.multiprocessing

from vec_envs.core import start_forkserver, unblock_signals


def child(pipe):
    unblock_signals()
    pipe.send(os.environ.get("PYTHONSAFEPATH"))


if __name__ == "__main__":
    context = torch.multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    start_forkserver()
    context.Process(target=child, args=(theirs,)).start()
    theirs.close()
    print(ours.recv(), os.environ.get("PYTHONSAFEPATH"))
"""


@pytest.mark.parametrize("own", [None, "1"])
def test_modules_of_the_folder_where_one_stands_are_not_imported(tmp_path, own):
    """As with `python script.py`; what begins the children is a `python -c`, which would."""
    (tmp_path / "program.py").write_text(FROM_ELSEWHERE)
    here = tmp_path / "here"
    here.mkdir()
    for name in ("random.py", "tyro.py"):
        (here / name).write_text("raise SystemExit('imported')")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | ({"PYTHONSAFEPATH": own} if own else {})
    command = [sys.executable, tmp_path / "program.py"]
    options = {"capture_output": True, "text": True, "cwd": here, "env": environment}
    done = subprocess.run(command, **options)
    assert done.stdout == f"{own} {own}\n", done.stderr
