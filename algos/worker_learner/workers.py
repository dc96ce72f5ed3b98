"""The processes of a run: workers that collect, and an evaluator that scores the policy."""

import contextlib
import copy
import ctypes
import dataclasses
import itertools
import math
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any, Literal

import gymnasium
import torch.multiprocessing
from torch import Tensor, distributed, nn

import vec_envs
from algos.worker_learner.arguments import RunArgs, UserError, check_actions, hung_up, warn
from vec_envs.core import Elsewhere, available_cores, start_forkserver, unblock_signals

MAX_RESTARTS = 3  # of a child process that dies, before the run gives up
SILENT_SECONDS = 60  # until a silent worker is named, and named again
LONGEST_EVALUATION = 20_000  # steps, for environments whose episodes need not end
SHARED_MEMORY = "/dev/shm"


class ChildFailed(UserError):
    """What the function of a child process raised."""


class Child:
    """A process that runs `function(pipe, restarts, *arguments)` and dies with this one.

    It answers every message with one message; an answer ("error", text) is raised as a UserError.
    When it dies it is started again, up to MAX_RESTARTS times, and asked the same again.
    """

    def __init__(self, name: str, function: Callable, *arguments: Any):
        self.name, self._function, self._arguments = name, function, arguments
        self.restarts, self.answered, self._question = 0, False, None
        self._start()

    def _start(self) -> None:
        context = torch.multiprocessing.get_context("forkserver")
        self.pipe, theirs = context.Pipe()
        arguments = self._function, theirs, self.restarts, *self._arguments
        self.process = context.Process(target=_child_main, args=arguments, daemon=True)
        start_forkserver()
        self.process.start()
        theirs.close()  # so that its death is an end of file here

    def ask(self, question: Any) -> None:
        self._question = question
        with contextlib.suppress(OSError):  # it is dead: answer() sees the same and starts another
            self.pipe.send(question)

    def answer(self, wait: float | None = None) -> Any:
        """Its answer, or None after `wait` seconds without one (default: as long as it lives)."""
        while True:
            try:
                while not self.pipe.poll(SILENT_SECONDS if wait is None else wait):
                    if wait is not None:
                        return None
                    warn(f"{self.name} has not answered for {SILENT_SECONDS} s: does it hang?")
                answer, self.answered = self.pipe.recv(), True
                break
            except (EOFError, OSError):
                self.process.join(1)
                self.close()  # it may live on without its pipe, and write where its successor does
                code = self.process.exitcode
                if code == 1 and not self.answered:  # it could not import the program again
                    hint = "is it a file, and does it call train under if __name__ == '__main__'?"
                    raise UserError(f"{self.name} could not import your program; {hint}") from None
                if self.restarts == MAX_RESTARTS:
                    died = f"process died {MAX_RESTARTS + 1} times (exit code {code})"
                    raise UserError(f"{self.name} {died}") from None
                self.restarts += 1
                if code != -signal.SIGTERM:  # which a whole group gets, when the run is to stop
                    warn(f"a child process died ({self.name}, {code}); restarting it.")
                self._start()
                self.ask(self._question)
        if isinstance(answer, tuple) and answer[0] == "error":
            raise ChildFailed(f"{self.name} failed: {answer[1]}")
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _child_main(function: Callable, pipe: Connection, *arguments: Any) -> None:
    die_with_parent()  # the fork server is the parent; it ends with the run
    os.close(forkserver._forkserver._forkserver_alive_fd)  # lest this copy keep it alive
    if distributed.is_torchelastic_launched():  # its signals are for the learner to answer
        os.setpgrp()
    unblock_signals()
    torch.set_num_threads(1)
    try:
        function(pipe, *arguments)
    except BaseException as error:
        if hung_up(pipe):  # the parent is gone
            return
        if not isinstance(error, UserError | vec_envs.core.ContractError):
            traceback.print_exc()
        pipe.send(("error", f"{type(error).__name__}: {error}"))


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def shared(agent: nn.Module, tensors: dict, what: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Copies that several processes see. UserError if there is no room, as in Docker's 64 MB.

    Without this check the allocation succeeds, and the kernel kills who writes there first.
    """
    needed = sum(x.nbytes for x in (*agent.state_dict().values(), *tensors.values()))
    if os.path.isdir(SHARED_MEMORY) and needed > (free := shutil.disk_usage(SHARED_MEMORY).free):
        there = f"{needed >> 20} MiB of shared memory where {free >> 20} MiB are free"
        advice = f"give it more (Docker: docker run --shm-size {(needed >> 19) + 64}m)"
        raise UserError(f"{what}: needs {there} in {SHARED_MEMORY}; {advice}")
    agent = copy.deepcopy(agent).cpu().share_memory()
    return agent, {k: x.cpu().clone().share_memory_() for k, x in tensors.items()}


class Workers:
    """The collecting half: envs in this process (num_workers 0) or split over N processes.

    `collect(agent, envs, rollout)` steps `envs` with `agent` and fills the tensors of `rollout`,
    each (time, env, ...). Worker processes fill their own columns of the same tensors, which then
    lie in shared memory; `agent` there is a copy that is refreshed before each collection. With
    `ahead`, for off-policy learners, they collect the next rollout while the learner learns, by the
    agent (weights, warm-up) of one iteration before. `actions`: those that the script supports,
    "any", "bounded" (continuous) or "discrete". `multi_agent`: the third axis is that of agents.
    """

    def __init__(
        self, run: Any, collect: Callable, actions: Literal["any", "bounded", "discrete"] = "any",
        ahead: bool = False, multi_agent: bool = False,
    ):  # fmt: skip
        start_forkserver()  # now: it imports torch while the learner gets ready
        self._run, self.args, self._collect, self._ahead = run, run.args, collect, ahead
        self._asked, self._begin = False, 0
        self._children: list[Child] = []
        args, here = run.args, not run.args.num_workers
        where = args.env_device if here else "cpu"
        device = run.device if where == "same" else torch.device(where)
        self.envs = _make_envs(args, args.num_envs if here else 1, args.seed, device)
        run.at_end.callback(self.close)
        if multi_agent != (self.envs.num_agents is not None):
            has, fit = ("one agent", "ppo.py") if multi_agent else ("several agents", "mappo.py")
            raise UserError(f"--env {args.env} has {has}; {fit} fits it")
        self.observation_space = self.envs.single_observation_space
        self.action_space = self.envs.single_action_space
        check_actions(args.env, self.action_space, actions, multi_agent)
        self.exact_resume = here and device.type == "cpu" and self.envs.exact_resume
        self.go_on = False  # with the episodes that were saved
        if here and device.type != run.device.type:
            self.envs = Elsewhere(self.envs, run.device)

    def start(self, agent: nn.Module, num_steps: int, **extra: tuple) -> dict[str, Tensor]:
        """Get ready to collect `num_steps` steps of every env by `agent` -> the empty rollout.

        Its tensors are (num_steps, num_envs, ...): obs, action, reward, next_obs (the true
        one, at an episode's end not the reset's), terminated, done (terminated or truncated),
        episode_return, episode_length, and those in `extra`: name=(shape of one entry), float32.
        """
        args, device, self._agent = self.args, self._run.device, agent
        agents = () if self.envs.num_agents is None else (self.envs.num_agents,)
        obs, action = (*agents, *self.observation_space.shape), (*agents, *self.action_space.shape)
        shapes = {"obs": obs, "action": action, "reward": agents, "next_obs": obs, **extra}
        types = {"terminated": torch.bool, "done": torch.bool, "episode_length": torch.int64}
        shapes |= dict.fromkeys((*types, "episode_return"), ())
        if isinstance(self.action_space, gymnasium.spaces.Discrete):
            types["action"] = torch.int64
        lead = num_steps, args.num_envs
        self._rollout = {
            name: torch.zeros(*lead, *shape, dtype=types.get(name), device=device)
            for name, shape in shapes.items()
        }
        self._rollout["done"][-1] = True  # nothing came before the first step
        if not args.num_workers:
            self.envs.reset()
            return self._rollout
        self.envs.close()
        self._shared_agent, self._shared = shared(agent, self._rollout, "--num-workers")
        edges = [args.num_envs * i // args.num_workers for i in range(args.num_workers + 1)]
        threads = max(1, (args.env_threads or available_cores()) // args.num_workers)
        for index, (low, high) in enumerate(itertools.pairwise(edges)):
            columns = {name: x[:, low:high] for name, x in self._shared.items()}
            own = dataclasses.replace(args, num_envs=high - low, env_threads=threads)
            given = self._collect, self._shared_agent, columns, own, index
            self._children.append(Child(f"worker {index}", _worker_main, *given))
        return self._rollout

    def start_anew(self, step: int) -> None:
        """New episodes, before the first rollout, by seeds that the run has not used by `step`."""
        self._begin = step
        if not self._children:
            self.envs.reset(seed=(self.args.seed + step) % 2**31)

    def collect(self) -> dict[str, Tensor]:
        """The rollout, filled. UserError if there is a NaN or infinity in it."""
        try:
            if self._children:
                self._collect_from_children()
            else:
                self._collect(self._agent, self.envs, self._rollout)
        except Exception as error:
            self._run.check_weights()  # of a NaN, perhaps, whose cause is here
            self._check_rollout()  # or here
            if isinstance(error, UserError | vec_envs.core.ContractError):
                self._run.fail(error)
            if (good := self._run.dir / "checkpoint.pt").exists():
                error.add_note(f"The last good checkpoint is {good}")
            raise
        self._check_rollout()
        return self._rollout

    def _check_rollout(self) -> None:
        """UserError that names the first NaN or infinity in the rollout."""
        floats = {name: x for name, x in self._rollout.items() if x.is_floating_point()}
        if math.isfinite(sum(x.sum() for x in floats.values())):  # one transfer for all
            return
        for t, (name, x) in itertools.product(range(len(self._rollout["done"])), floats.items()):
            if len(wrong := x[t][~x[t].isfinite()]):  # else only the sum was too large
                step = (t + 1) * self.args.num_envs * self._run.world_size + self._run.step
                self._run.fail(f"{name} is {wrong[0]} at step {step}: training stopped")

    def _collect_from_children(self) -> None:
        if not self._asked:
            self._ask_children()
        restarts = sum(child.restarts for child in self._children)
        try:
            for child in self._children:
                child.answer()
        finally:
            for name, tensor in self._rollout.items():
                tensor.copy_(self._shared[name])
        if restarts != sum(child.restarts for child in self._children):
            self._run.end_episodes()  # the successors began new ones
        self._asked = self._ahead
        if self._ahead:
            self._ask_children()

    def _ask_children(self) -> None:
        self._shared_agent.load_state_dict(self._agent.state_dict())
        for child in self._children:
            child.ask(self._begin)

    def state_dict(self) -> dict[str, Any]:
        if not self.exact_resume:
            return {}
        last_step = {name: x[-1].clone() for name, x in self._rollout.items()}
        return {**self.envs.state_dict(), "last_step": last_step}  # which `collect` may go on from

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.go_on = bool(state) and self.exact_resume  # none is saved where it would not be exact
        if self.go_on:
            for name, x in state["last_step"].items():
                self._rollout[name][-1] = x
            self.envs.load_state_dict({k: x for k, x in state.items() if k != "last_step"})

    def close(self) -> None:
        for child in self._children:
            child.close()
        self._children.clear()
        self.envs.close()


def _worker_main(pipe, restarts, collect, agent, columns, args, index) -> None:
    seed = args.seed + 1_000_003 * (index + 1) + 7919 * restarts  # another for each restart
    envs = _make_envs(args, args.num_envs, seed % 2**31)
    if restarts:
        for tensor in columns.values():  # what its predecessor left is of other episodes
            tensor.zero_()
        columns["done"][-1] = True
    seed = (seed + pipe.recv()) % 2**31  # the first question: at which step the run begins
    torch.manual_seed(seed)  # envs derive other streams from it than torch
    envs.reset(seed=seed)
    while True:
        collect(agent, envs, columns)
        pipe.send("collected")
        pipe.recv()


class Evaluator:
    """Scores snapshots of the policy in a process of its own, at low priority.

    While one is scored the newest of the others waits: the learner neither waits nor changes the
    weights under it. Its envs and seeds are its own: evaluating changes nothing in training.
    """

    def __init__(self, args: RunArgs, agent: nn.Module):
        self._agent, _ = shared(agent, {}, "the evaluator")
        self._child = Child("the evaluator", _evaluator_main, self._agent, args)
        self.pending: list[tuple[int, dict[str, Tensor]]] = []  # (step, weights): scored, waiting
        self.failed = False  # the last time
        self.close = self._child.close

    def submit(self, step: int, weights: dict[str, Tensor]) -> None:
        if step not in (pending for pending, _ in self.pending):
            self.pending[1:] = [(step, weights)]
            if len(self.pending) == 1:
                self._ask()

    def results(self, wait: float = 0.0) -> list[tuple[int, dict, dict]]:
        """What it has finished: (step, weights, what `score` found) each."""
        finished = []
        if not self._child.answered and self._child.process.exitcode == 1:  # said now, not if asked
            self._child.answer()
        while self.pending:
            try:
                if (answer := self._child.answer(wait)) is None:
                    break
                finished.append((*self.pending.pop(0), answer))
                self.failed = False
            except ChildFailed as error:
                step, _ = self.pending.pop(0)  # lest a resumed run fail again
                if self.failed and not wait:  # at the end of a run it would end nothing else
                    raise
                self.failed = True
                warn(f"{error}; there is no evaluation of step {step}. Training goes on.")
                self._child._start()
            if self.pending:
                self._ask()
        return finished

    def _ask(self) -> None:
        step, weights = self.pending[0]
        self._agent.load_state_dict(weights)
        self._child.ask(step)


def _evaluator_main(pipe, restarts, agent, args) -> None:
    os.nice(10)
    args = dataclasses.replace(args, env=vec_envs.for_evaluation(args.env), env_threads=1)
    envs = _make_envs(args, args.eval_episodes, args.seed)
    while True:
        step = pipe.recv()
        # the seed follows from the step: evaluating one snapshot twice gives one result
        seed = ((args.seed + 1) * 1_000_000 + step) % 2**31  # more, some simulators do not take
        pipe.send(score(agent, envs, seed=seed)[0])


@torch.no_grad()
def score(agent: nn.Module, envs: vec_envs.VecEnv, seed: int) -> tuple[dict[str, float], list]:
    """Play one episode in each env -> means (of each agent too, if rewards differ), returns."""
    obs, _ = envs.reset(seed=seed)
    running, paid, last = torch.ones(envs.num_envs, dtype=torch.bool), 0.0, {}
    for _ in range(min(envs.max_episode_steps, LONGEST_EVALUATION)):
        obs, reward, terminated, truncated, info = envs.step(agent(obs))
        for name in {"episode_return", "episode_length", "success"} & info.keys():
            last[name] = torch.where(running, info[name].float().cpu(), last.get(name, 0.0))  # (N,)
        paid = paid + reward.cpu().t() * running  # (num_agents, num_envs)
        running &= ~(terminated | truncated).cpu()
        if not running.any():
            break
    returns, std = last["episode_return"], last["episode_return"].std(correction=0)
    found = {"return": returns.mean(), "return_std": std, "length": last["episode_length"].mean()}
    found |= {"success": last["success"].mean()} if "success" in last else {}
    if envs.num_agents is not None and (paid != paid[0]).any():
        found |= {f"return_agent_{i}": mean for i, mean in enumerate(paid.mean(1))}
    return {name: x.item() for name, x in found.items()}, returns.tolist()


def compare_returns(envs: vec_envs.VecEnv) -> str:
    """What simple policies get there, where it is known; whether returns are sums over agents."""
    known = ", ".join(f"{policy} {value:.1f}" for policy, value in envs.known_returns.items())
    cut = f", in whole episodes (here {LONGEST_EVALUATION} steps of each)"
    known = known and f"To compare: {known}{cut * (envs.max_episode_steps > LONGEST_EVALUATION)}.\n"
    return known if envs.num_agents is None else f"Returns are sums over the agents.\n{known}"


def _make_envs(args: RunArgs, num_envs: int, seed: int, device: Any = "cpu") -> vec_envs.VecEnv:
    try:
        return vec_envs.make(args.env, num_envs, device, seed, args.env_threads)
    except ValueError as error:
        raise UserError(f"--env {args.env}: {str(error).removeprefix(f'{args.env}: ')}") from None
