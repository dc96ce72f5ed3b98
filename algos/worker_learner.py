"""The only code the scripts share: run folder, worker processes, evaluator, several learners.

A script's `train` reads like this, and nothing happens that is not on one of its lines:

    run = Run(args, __file__, LIMITS)                  # checks the arguments, makes the run folder
    workers = Workers(run, collect)                    # envs, here or in --num-workers processes
    agent = Agent(workers.observation_space, workers.action_space, args).to(run.device)
    workers.start(agent, args.horizon)
    step = run.start(agent=agent, optimizer=optimizer, workers=workers)   # prints, or resumes
    while step < args.total_steps:
        rollout = workers.collect()                    # collect(agent, envs, rollout), everywhere
        ...                                            # the algorithm
        run.log(step, losses)                          # metrics.csv, TensorBoard; stops at NaN
        run.evaluate(step)                             # if due, in another process
        run.checkpoint(step)                           # if due, or if somebody said stop
    return run.finish(step)

`agent` is an `nn.Module` whose `forward` is the deterministic policy: raw observation in, action of
the environment out. Weights and trajectories cross process borders in shared memory; the pipes
carry only signals. Children die with their parent, however it dies.

Several learners: `torchrun --nproc-per-node N algos/ppo.py --env Ant` starts N of these processes.
The flags describe the whole run: each learner has an N-th of the envs, the workers and the batch
(`SHARED`), its own seeds and its own replay buffer; `step` counts the steps of all. They begin with
learner 0's weights. `gradient_step` begins with one all-reduce of the flat vector (gloo on
CPUs, nccl on GPUs), and what is computed over a batch (statistics of a normaliser, the mean of the
advantages, a KL divergence) comes from `…_over_learners`: N learners do what one would do with the
whole batch. Learner 0 evaluates, logs, prints and saves; the others save theirs as
checkpoint.rankK.pt, for the envs, replay and random generator in it. With --max-restarts torchrun
starts dead learners again, and nodes may come and go (--nnodes=1:2): all go on from the last
checkpoint in the --run-dir, which every node must see, as many as there are then.
"""

import argparse
import contextlib
import copy
import ctypes
import dataclasses
import fcntl
import importlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import gymnasium
import torch
import torch.multiprocessing
import tyro
from torch import Tensor, distributed, nn
from torch.utils import _pytree as pytree
from tqdm import tqdm

import vec_envs
from vec_envs.core import Elsewhere, available_cores

MAX_RESTARTS = 3  # of a child process that dies, before the run gives up
LOCK_SECONDS = 5  # that a killed run may take to let go of its folder
CHECKPOINT_SECONDS = 600  # after which a slow run is saved before --checkpoint-every says so
LONGEST_COMPILED = 16  # steps of a rollout, which the compiler writes out one after another
LONGEST_EVALUATION = 20_000  # steps, for environments whose episodes need not end


class UserError(SystemExit):
    """What went wrong in one sentence: printed without a traceback when nobody catches it."""


@dataclass
class RunArgs:
    """The command line that every script shares; a script may have defaults of its own."""

    env: str = "Ant"
    """environment: a name of vec_envs, a Gymnasium id, or package:Id-v0 (,option=value ...)"""
    total_steps: int = 1_000_000
    """how many environment steps to train for"""
    num_envs: int = 0
    """environments stepped together, all workers counted (0: 64; 4096 where a GPU simulates and
    --total-steps are at least 100 rollouts of them)"""
    seed: int = 0
    """seed of everything that is random"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where networks and simulation run (auto: the GPU where there is one)"""
    env_device: Literal["same", "cpu", "cuda"] = "same"
    """where environments simulate (same: where the networks are, if they can; workers: the CPU)"""
    num_workers: int = 0
    """processes that collect (0: this one, right for GPU and MuJoCo environments)"""
    env_threads: int = 0
    """threads that step MuJoCo on a CPU (0: one a core, shared among the workers)"""
    torch_threads: int = 1
    """threads of the learner's tensor operations on a CPU; more help large networks only"""
    run_dir: str = ""
    """folder of this run (empty: runs/{env}__{script}__{seed}__{time})"""
    resume: str = ""
    """go on with the run in this folder, with its arguments"""
    eval_every: int = 100_000
    """steps between evaluations of the deterministic policy (0: only at the end)"""
    eval_episodes: int = 10
    """episodes of one evaluation"""
    checkpoint_every: int = 100_000
    """steps between checkpoints (ten minutes at most)"""
    compile: Literal["none", "rollout", "default", "graphs"] = "none"
    """torch.compile. rollout: of rollouts up to 16 steps where environments are tensor operations;
    default: of these and of the losses with their gradients; graphs: with CUDA graphs (GPU only)"""


@dataclass
class ReplayArgs(RunArgs):
    """What scripts with a replay buffer share besides."""

    save_replay: bool = True
    """keep the replay buffer in the checkpoint; without it a resumed run fills it anew"""
    log_every: int = 1000
    """steps between entries of the losses in metrics.csv"""


RUN_LIMITS = {
    "total_steps": (1, None),
    "num_envs": (0, 2**20),
    "seed": (0, 2**31 - 1),
    "num_workers": (0, 1024),
    "env_threads": (0, 1024),
    "torch_threads": (1, 1024),
    "eval_episodes": (1, 10_000),
    "checkpoint_every": (1, None),
    "log_every": (1, None),
}

# What N learners divide among themselves, where a script has it.
SHARED = "num_envs", "num_workers", "minibatch_size", "batch_size", "hterm_windows"


@dataclass
class Result:
    """What `train` returns: where the run is and how well its policy did."""

    run_dir: Path
    step: int
    seconds: float
    last_return: float
    best_return: float


class Run:
    """One training run: its arguments, folder, logs, evaluations and checkpoints.

    `args` are those of this learner, one of `learners`; a single one has all that was asked for.
    `limits` maps an argument's name to the (smallest, largest) value allowed, None for no bound;
    a number that is not in it must be 0 or more.
    Raises UserError, before anything is written, for arguments that cannot be.
    """

    def __init__(self, args: RunArgs, script: str, limits: dict[str, tuple]):
        self.script, self._script_path = Path(script).stem, Path(script)
        if _join_learners():
            args = _restarted_args(args, self.script)
        self.learners = count_learners()
        self.rank = distributed.get_rank() if self.learners > 1 else 0  # 0 speaks and saves
        self._checkpoint = f"checkpoint.rank{self.rank}.pt" if self.rank else "checkpoint.pt"
        self.resumed = bool(args.resume)
        if self.resumed:
            args = _saved_args(args, self.script)
        check_args(args, {**RUN_LIMITS, **limits})
        if args.total_steps < getattr(args, "warmup_steps", 0):
            raise UserError(
                f"--total-steps is {args.total_steps}; allowed is at least --warmup-steps, "
                f"{args.warmup_steps}, before which nothing is learned"
            )
        if args.env_device == "cuda" and args.num_workers:
            raise UserError("--env-device is cuda, but --num-workers simulate on the CPU; drop one")
        for flag, device in (("--device", args.device), ("--env-device", args.env_device)):
            if device == "cuda" and not torch.cuda.is_available():
                other = "auto" if flag == "--device" else "same"
                advice = "the run was saved so" if self.resumed else f"use cpu or {other}"
                raise UserError(f"{flag} is cuda, but torch finds no CUDA device; {advice}")
        if args.device == "auto":
            args = dataclasses.replace(args, device="cuda" if torch.cuda.is_available() else "cpu")
        if args.device == "cuda" and self.learners > 1:
            index, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
            if index >= count:
                raise UserError(f"--nproc-per-node is more than this machine's GPUs, {count}")
            torch.cuda.set_device(index)
        if args.compile == "graphs" and args.device == "cpu":
            raise UserError("--compile is graphs, which needs --device cuda; use default")
        compilers = os.environ.get("CXX", "c++"), "g++", "clang++"
        if args.compile != "none" and not any(map(shutil.which, compilers)):
            raise UserError(f"--compile is {args.compile}, which needs a C++ compiler; use none")
        if args.env_device == "same" and not vec_envs.simulates_on_gpu(args.env):
            args = dataclasses.replace(args, env_device="cpu")
        if not args.num_envs:
            same = "cpu" if args.num_workers else args.device
            where = same if args.env_device == "same" else args.env_device
            enough = args.total_steps >= 100 * 4096 * getattr(args, "horizon", 1)
            many = where == "cuda" and enough
            args = dataclasses.replace(args, num_envs=4096 if many else 64)
        if args.num_workers > args.num_envs:
            raise UserError(
                f"--num-workers is {args.num_workers}, more than --num-envs, {args.num_envs}"
            )
        if not args.run_dir:
            args = _with_run_dir(args, self.script, time.strftime(STAMP))
        self._whole_args = args
        self.args = args = _learners_share(args, self.rank, self.learners, limits)
        self.dir = Path(args.run_dir)
        self.device = torch.device(args.device)
        torch.set_num_threads(args.torch_threads)  # small networks: two wait more than they work
        torch.set_flush_denormal(True)  # Adam's moments of dead units become such, and are slow
        keep_freed_memory()
        torch.manual_seed(args.seed)

        self.seconds = 0.0  # of training, over all resumes
        self.step = 0  # after the last iteration
        self.best_return, self.last_return = -math.inf, math.nan
        self.training_return = math.nan
        self._state: dict[str, Any] | None = None  # name -> object with state_dict()
        self._stop_signal = 0
        self._handlers: dict[int, Any] = {}
        self._evaluator: Evaluator | None = None
        self._warned: set[str] = set()
        self._lock: tuple[int, int] | None = None  # its folder's, while it has it

    # The run's life: start, log, evaluate, checkpoint, finish.

    def start(self, agent: nn.Module, **state: Any) -> int:
        """Say what runs where; after --resume put the saved state back. Returns the step to go on.

        `agent` and every object in `state` have `state_dict` and `load_state_dict`, and together
        they are all that the future of the run depends on, besides torch's random generators.
        """
        self._state = state = {"agent": agent, **state}
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            if self.rank == 0:
                self._lock = _lock(self.dir)  # who still trains there may save once more
            saved = self._load_checkpoint() if self.resumed and self.rank == 0 else None
            pending = (saved or {}).get("pending_evaluations", [])
            step = self._load_state(state, saved)
            if step and not state["workers"].go_on:
                self._say(
                    "Not exact: the environments start new episodes, since they run or ran in "
                    "workers,\non a GPU, by Gymnasium or for other learners. What is learnt goes "
                    "on as saved."
                )
                state["workers"].start_anew(step)
                self.end_episodes()
            self.step = step
            if self.rank == 0:
                self._open_files(step, pending={number for number, _ in pending})
        except BaseException as error:
            self._unlock()
            if isinstance(error, OSError):
                raise UserError(f"--run-dir {self.dir}: {error.strerror}") from None
            raise
        self._describe(agent, step)
        with contextlib.suppress(ValueError):  # not the main thread
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._on_signal)
        if self.rank == 0:
            self._evaluator = Evaluator(self.args, agent)
        for number, snapshot in pending:
            self._evaluator.submit(number, _what_fits(agent, snapshot))
        self._bar = tqdm(
            total=self.args.total_steps,
            initial=min(step, self.args.total_steps),
            unit="step",
            unit_scale=True,
            mininterval=0.5 if sys.stderr.isatty() else 30,
            dynamic_ncols=True,
            disable=self.rank > 0,
        )
        self._saved_at = time.perf_counter()
        self._began = self._saved_at - self.seconds
        self._warm: tuple[int, float] | None = None  # step and time after the first iteration
        return step

    def log(self, step: int, losses: dict[str, Tensor], **charts: Tensor | float) -> None:
        """Write losses/… and charts/… to metrics.csv and TensorBoard; UserError at NaN or infinity.

        `charts/SPS` is added: environment steps per second without the first iteration.
        """
        self.seconds = time.perf_counter() - self._began
        metrics = {f"losses/{name}": value.detach() for name, value in losses.items()}
        metrics |= {f"charts/{name}": value for name, value in charts.items()}
        kind = {"device": self.device, "dtype": torch.float64}
        values = torch.stack([torch.as_tensor(value, **kind) for value in metrics.values()])
        values = mean_over_learners(values).tolist()  # one transfer for all
        metrics = dict(zip(metrics, values, strict=True))
        for tag, value in metrics.items():
            if not math.isfinite(value):
                self._fail(f"{tag} is {value} at step {step}: training stopped")
        if self._warm is None:
            self._warm = (step, self.seconds)
        elif self.seconds > self._warm[1]:
            metrics["charts/SPS"] = (step - self._warm[0]) / (self.seconds - self._warm[1])
        self._write(step, metrics)
        shown = self.training_return if math.isnan(self.last_return) else self.last_return
        self._bar.set_postfix_str(f"return {shown:.0f}", refresh=False)
        _to_terminal(self._bar.update, min(step, self.args.total_steps) - self._bar.n)

    def end_episodes(self) -> None:
        """What is collected from now on is of other episodes than what a replay buffer has last."""
        for thing in self._state.values():
            if hasattr(thing, "end_episodes"):
                thing.end_episodes()

    def log_episodes(self, step: int, batch: dict[str, Tensor]) -> None:
        """Log mean return and length of the training episodes that ended in a batch.

        The batch has `done`, `episode_return` and `episode_length`, each (time, env).
        """
        if self.learners == 1 and not batch["done"].any():
            return
        done = batch["done"].float()
        sums = [(batch[name] * done).sum() for name in ("episode_return", "episode_length")]
        count, *sums = mean_over_learners(torch.stack([done.sum(), *sums]))
        if count.item():
            self.training_return, mean_length = [(total / count).item() for total in sums]
            found = {"return": self.training_return, "length": mean_length}
            self._write(step, {f"charts/episodic_{name}": value for name, value in found.items()})

    def evaluate(self, step: int) -> None:
        """Hand the present policy to the evaluator if one is due; log what it has found by now."""
        if self.rank > 0:
            return
        every = self.args.eval_every  # self.step: that of the iteration before
        if every and step // every > self.step // every and step < self.args.total_steps:
            self._evaluator.submit(step, _snapshot(self._state["agent"]))
        self._collect_evaluations()

    def checkpoint(self, step: int) -> None:
        """Save if a checkpoint is due. After SIGINT or SIGTERM: save, say how to resume, exit."""
        before, self.step = self.step, step
        late = time.perf_counter() - self._saved_at > CHECKPOINT_SECONDS
        wish = _largest_over_learners(self._stop_signal or int(late))  # all stop, or save, or none
        if wish > 1:  # a signal: SIGINT is 2, SIGTERM 15
            self._stop_signal = wish
            saved = self._save_checkpoint(step)
            self.close()
            command = self._command(self._script_path, "--resume", self.dir)
            but = "" if saved else ", which could not be saved"
            self._say(f"\nStopped at step {step}{but}. Go on with:\n    {command}")
            raise SystemExit(128 + self._stop_signal)
        if wish or step // self.args.checkpoint_every > before // self.args.checkpoint_every:
            self._save_checkpoint(step)

    def finish(self, step: int) -> Result:
        """Last checkpoint and evaluation, learning_curve.png, a summary."""
        self._save_checkpoint(step)
        _leave_learners()
        if self.rank > 0:
            self.close()
            return Result(self.dir, step, self.seconds, self.last_return, self.best_return)
        if step not in (number for number, _ in self._evaluator.pending):
            self._evaluator.submit(step, _snapshot(self._state["agent"]))
        seconds = self.seconds
        while self._evaluator.pending:
            self._collect_evaluations(wait=0.2)
            if self._stop_signal:
                self.checkpoint(step)
        self._began = time.perf_counter() - seconds  # to wait is not to train
        self._save_checkpoint(step)  # the evaluations it waited for are no longer pending
        self.close()
        self._quietly("learning_curve.png", self._plot)
        _tell(
            f"\nDone: {step} steps in {self.seconds:.0f} s. Deterministic return over "
            f"{self.args.eval_episodes} episodes: last {self.last_return:.1f}, "
            f"best {self.best_return:.1f}.\n"
            + compare_returns(self._state["workers"].envs)
            + "Score, watch or film it: "
            + self._command(self._script_path.with_name("play.py"), self.dir)
        )
        return Result(self.dir, step, self.seconds, self.last_return, self.best_return)

    def close(self) -> None:
        """End the child processes and close the files; safe to call twice."""
        if self._evaluator is not None:
            self._evaluator.close()
        if self._state is not None:
            self._state["workers"].close()
        if getattr(self, "_bar", None) is not None and self.rank == 0:
            _to_terminal(self._bar.close)
            self._quietly("metrics.csv", self._metrics_file.close)
            self._quietly("TensorBoard's file", self._tensorboard.close)
        self._unlock()
        _leave_learners()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def _unlock(self) -> None:
        """Let another process train in the folder."""
        handle, self._lock = _LOCKS.pop(self._lock, None), None
        if handle is not None:
            with contextlib.suppress(OSError):  # not by os.close alone: a forked child has it too
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)

    def gradient(self, loss_function: Callable, network: nn.Module, bf16: bool = True) -> Callable:
        """`gradient_of` a loss, compiled as --compile says and, where allowed, as --bf16 says."""
        bf16 = bf16 and getattr(self.args, "bf16", False) and _multiplies_bf16(self.device)
        function = gradient_of(loss_function, network, bf16)
        if self.args.compile in ("none", "rollout"):
            return function
        if self.learners > 1:  # what learners tell each other interrupts what is compiled
            global _group_mean
            _group_mean = torch.compiler.disable(_group_mean)
        return _compiled(function, self.args)

    # Files.

    def _open_files(self, step: int, pending: set[int]) -> None:
        """Open metrics.csv and TensorBoard's file, without what comes again after `step`."""
        if not self.resumed and (self.dir / "args.json").exists():
            raise UserError(
                f"--run-dir {self.dir} holds a run already; resume it (--resume {self.dir}) "
                "or name another folder"
            )
        content = {"script": self.script, "args": dataclasses.asdict(self._whole_args)}
        _write_atomically(json.dumps(content, indent=2) + "\n", self.dir / "args.json")
        self._cut_metrics(step, pending)
        self._metrics_file = open(self.dir / "metrics.csv", "a", buffering=1)

        # Not SummaryWriter: its thread prints a traceback when the disk is full, and a killed run
        # loses what it had not written yet.
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._tensorboard = RecordWriter(open(self.dir / name, "ab"))
        self._write_event(file_version="brain.Event:2")
        if self.resumed:  # hides what the killed run wrote after its checkpoint
            self._write_event(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def _describe(self, agent: nn.Module, step: int) -> None:
        args, count = self.args, sum(p.numel() for p in agent.parameters())
        device = torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"
        if getattr(args, "bf16", False) and not _multiplies_bf16(self.device):
            device += " (not fast at bfloat16: --bf16 is ignored)"
        cores = args.env_threads or available_cores()
        where = f"{args.num_workers} worker processes" if args.num_workers else "this process"
        if self.device.type == "cuda" and (args.num_workers or args.env_device == "cpu"):
            where += " on the CPU"
        if self.learners > 1:
            where += f" of each of {self.learners} learners"
        self._say(
            f"{self.script} on {args.env}: {args.num_envs} environments in {where}, "
            f"{device}, {cores} simulation threads, {count} parameters, seed {args.seed}\n"
            f"{'Resumed at step ' + str(step) + ' in' if self.resumed else 'Run folder'} {self.dir}"
            f"   (curves: tensorboard --logdir {self.dir.parent})"
        )

    def _command(self, script: Path, *arguments: Any) -> str:
        """A command line for a shell in this folder, by the Python that runs now."""
        found = shutil.which("python")
        here = found is not None and Path(found).parent == Path(sys.executable).parent
        python = ["python" if here else os.path.relpath(sys.executable)]
        if self.learners > 1 and "--resume" in arguments:
            python += ["-m", "torch.distributed.run", "--nproc-per-node", str(self.learners)]
        return shlex.join([*python, os.path.relpath(script), *map(str, arguments)])

    def _say(self, text: str) -> None:
        if self.rank == 0:
            _tell(text)

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        if self.rank > 0:
            return
        rows = (f"{step},{self.seconds:.3f},{tag},{value:.8g}\n" for tag, value in metrics.items())
        self._quietly("metrics.csv", self._metrics_file.write, "".join(rows))
        points = [{"tag": tag, "simple_value": value} for tag, value in metrics.items()]
        self._quietly("TensorBoard's file", self._write_event, step=step, summary={"value": points})

    def _write_event(self, **event: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._tensorboard.write(Event(wall_time=time.time(), **event).SerializeToString())
        self._tensorboard.flush()

    def _quietly(self, what: str, function: Callable, *arguments: Any, **options: Any) -> bool:
        """Call a function that writes; a full disk is a warning, once, and training goes on."""
        try:
            function(*arguments, **options)
            self._warned.discard(what)
            return True
        except (OSError, RuntimeError, ValueError) as error:
            if what not in self._warned:
                self._warned.add(what)
                _tell(f"Warning: {what} could not be written ({error}); training goes on.")
            return False

    def _metrics_rows(self) -> list[list[str]]:
        """The complete rows of metrics.csv: step, seconds, tag, value."""
        path = self.dir / "metrics.csv"
        text = path.read_text(errors="replace") if path.exists() else ""
        lines = text.split("\n")[1:-1]  # the last one is empty, or torn
        rows = [f"{line}\n".split(",") for line in lines]
        return [row for row in rows if len(row) == 4 and row[0].isdecimal()]

    def _cut_metrics(self, step: int, pending: set[int]) -> None:
        """Begin, or drop the rows that come again: later ones, and of pending evaluations."""
        if step >= self.args.total_steps:
            pending = {*pending, step}  # `finish` evaluates again
        kept = ["step,seconds,tag,value\n"]
        for row in self._metrics_rows():
            again = row[2].startswith("eval/") and int(row[0]) in pending
            if int(row[0]) <= step and not again:
                kept.append(",".join(row))
        _write_atomically("".join(kept), self.dir / "metrics.csv")

    def _save_checkpoint(self, step: int) -> bool:
        """Write checkpoint.pt so that at every moment a good one exists, and last.pt beside it."""
        weights = self._state["agent"].state_dict().items()
        for name, x in weights:
            if x.is_floating_point() and not x.isfinite().all():
                self._fail(f"{name} has NaN or infinity at step {step}: training stopped")
        self._saved_at = time.perf_counter()
        self.seconds = self._saved_at - self._began
        names = "seconds", "best_return", "last_return", "training_return"
        content = {name: thing.state_dict() for name, thing in self._state.items()}
        content["run"] = run = {name: getattr(self, name) for name in names}
        run |= {"step": step, "learners": self.learners, "random": torch.get_rng_state()}
        if self.device.type == "cuda":
            run["cuda_random"] = torch.cuda.get_rng_state()
        if self.rank == 0:
            _largest_over_learners(0)  # the others first: where checkpoint.pt is, there are theirs
            content["pending_evaluations"] = list(self._evaluator.pending)
        path = self.dir / self._checkpoint
        saved = self._quietly(path.name, _save_atomically, content, path, True)
        if self.rank > 0:
            _largest_over_learners(0)
            return saved
        self._save_policy("last.pt", step, self.last_return, _snapshot(self._state["agent"]))
        return saved

    def _set_own_state(self, own: dict[str, Any]) -> None:
        torch.set_rng_state(own["random"])
        if "cuda_random" in own:
            torch.cuda.set_rng_state(own["cuda_random"])
        for name in ("seconds", "best_return", "last_return", "training_return"):
            setattr(self, name, own[name])

    def _load_state(self, state: dict[str, Any], saved: dict[str, Any] | None) -> int:
        """Put into `state` what was `saved` by learner 0, and by this one -> the step.

        Without anything saved, all learners begin with learner 0's weights.
        """
        own, now = saved, {"learners": 1, **saved["run"]} if saved else None
        if self.learners > 1 or (now and now["learners"] > 1):
            kinds = nn.Module if saved is None else nn.Module | torch.optim.Optimizer
            things = {k: x for k, x in state.items() if isinstance(x, kinds)}
            common = {k: saved[k] if saved else _snapshot(x) for k, x in things.items()}
            common, now = _from_learner_0((common, now))
            if self.rank > 0 and now is not None:
                own = self._load_checkpoint(now)
            complete = own is not None and now["learners"] == self.learners
            if _largest_over_learners(int(not complete)):  # one that lacks its own is enough
                for name, content in common.items():
                    state[name].load_state_dict(_what_fits(state[name], content))
                if now is None:
                    return 0
                self._set_own_state(now)
                torch.manual_seed(self.args.seed + now["step"])
                state["workers"].go_on = False
                self._say(
                    f"Not exact: {now['learners']} learner(s) saved, now there are "
                    f"{self.learners}, or a file is missing. Replay buffers fill anew."
                )
                return now["step"]
        if own is None:
            return 0
        try:
            for name, thing in state.items():
                thing.load_state_dict(own[name])
            self._set_own_state(own["run"])
        except (RuntimeError, LookupError, ValueError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"--resume {self.dir}: {self._checkpoint} does not fit args.json and "
                f"{self.script}.py ({type(error).__name__}: {reason})"
            ) from None
        return own["run"]["step"]

    def _load_checkpoint(self, now: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """This learner's newest intact checkpoint; with `now`, that of learner 0's step."""
        newest, damaged = self.dir / self._checkpoint, False
        for path in (newest, newest.with_suffix(".prev.pt")):
            content, problem = load_checked(path) if path.exists() else (None, "")
            if content and "run" not in content:
                problem = "a file of another kind"
            if problem:
                damaged = True
                _tell(f"Warning: {path} is damaged ({problem}); trying the one before.")
            elif content and all(content["run"][k] == now[k] for k in ("step", "learners") if now):
                if path != newest:  # lest the next save keep a worse one instead of it
                    os.replace(path, newest)
                return content
        if damaged and self.rank == 0:
            raise UserError(
                f"--resume {self.dir}: no checkpoint in it is intact; nothing was changed"
            )
        return None  # killed before the first checkpoint: from the start, with the same seed

    def _save_policy(self, name: str, step: int, mean_return: float, weights: dict) -> None:
        content = {"script": self.script, "args": dataclasses.asdict(self.args), "step": step}
        content |= {"return": mean_return, "agent": weights}
        self._quietly(name, _save_atomically, content, self.dir / name, False)

    def _plot(self) -> None:
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return
        figure = Figure(figsize=(7, 4))
        axes = figure.subplots()
        rows = self._metrics_rows()
        for tag, label in (
            ("charts/episodic_return", "training, with exploration"),
            ("eval/episodic_return", "evaluation, deterministic"),
        ):
            points = sorted((int(row[0]), float(row[3])) for row in rows if row[2] == tag)
            axes.plot(*zip(*points, strict=True) if points else ([], []), label=label)
        axes.set(title=f"{self.script} on {self.args.env}", xlabel="steps", ylabel="return")
        axes.legend()
        figure.savefig(self.dir / "learning_curve.png")

    # Evaluation, signals, failure.

    def _collect_evaluations(self, wait: float = 0.0) -> None:
        try:
            results = self._evaluator.results(wait)
        except ChildFailed as failure:
            self._fail(f"the evaluator {failure}")
        for step, weights, (mean, std, length) in results:
            if not math.isfinite(mean):
                self._fail(f"the return of the evaluation at step {step} is {mean}")
            self.last_return = mean
            found = {"return": mean, "return_std": std, "length": length}
            self._write(step, {f"eval/episodic_{name}": value for name, value in found.items()})
            if mean > self.best_return:
                self.best_return = mean
                self._save_policy("best.pt", step, mean, weights)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.learners > 1:  # torchrun passes signals on, and kills who does not stop
            self._stop_signal = self._stop_signal or number
            return
        if self._stop_signal:  # asked twice
            self.close()
            raise SystemExit(128 + number)
        self._stop_signal = number
        with contextlib.suppress(RuntimeError):  # it came during another print
            _tell("Stopping after this iteration; once more to stop at once, without saving.")

    def check_rollout(self, rollout: dict[str, Tensor]) -> None:
        """UserError that names the first NaN or infinity in a rollout (time, env, ...)."""
        floats = {name: x for name, x in rollout.items() if x.is_floating_point()}
        if math.isfinite(sum(x.sum() for x in floats.values())):  # one transfer for all
            return
        wrong = {name: ~x.isfinite() for name, x in floats.items()}
        firsts = {name: mask.nonzero()[0].tolist() for name, mask in wrong.items() if mask.any()}
        if not firsts:  # only the sum was too large
            return
        name = min(firsts, key=lambda name: firsts[name][0])
        index = tuple(firsts[name])
        step = self.step + (index[0] + 1) * self.args.num_envs * self.learners
        self._fail(f"{name} is {rollout[name][index]} at step {step}: training stopped")

    def _fail(self, message: str) -> None:
        self.close()
        good = self.dir / "checkpoint.pt"
        hint = f"; the last good checkpoint is {good}" if good.exists() else ""
        raise UserError(f"{message}{hint}") from None


# Processes.


class ChildFailed(Exception):
    """A child process died too often, or its code raised an error."""


class Child:
    """A process that runs `function(pipe, *arguments)` and dies with this one.

    It answers every message with one message; an answer ("error", text) is raised as ChildFailed.
    When it dies it is started again, up to MAX_RESTARTS times, and asked the same again.
    """

    def __init__(self, function: Callable, *arguments: Any):
        self._function, self._arguments = function, arguments
        self.restarts = 0
        self._question: Any = None
        self._start()

    def _start(self) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_child_main,
            args=(self._function, theirs, os.getpid(), self.restarts, *self._arguments),
            daemon=True,
        )
        resource_tracker.ensure_running()  # it would be started below, and unblock the signal
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # not for the child
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()  # so that its death is an end of file here

    def ask(self, question: Any) -> None:
        self._question = question
        with contextlib.suppress(OSError):  # it is dead: answer() sees the same and starts another
            self.pipe.send(question)

    def answer(self, wait: float | None = None) -> Any:
        """Its answer, or None after `wait` seconds without one (default: as long as it lives)."""
        while True:
            try:
                if not self.pipe.poll(wait):
                    return None
                answer = self.pipe.recv()
            except (EOFError, OSError):
                self.process.join(5)
                if self.restarts == MAX_RESTARTS:
                    raise ChildFailed(
                        f"process died {MAX_RESTARTS + 1} times (exit code {self.process.exitcode})"
                    ) from None
                self.restarts += 1
                _tell(f"Warning: a child process died ({self.process.exitcode}); restarting it.")
                self._start()
                self.ask(self._question)
                continue
            if isinstance(answer, tuple) and answer[0] == "error":
                raise ChildFailed(f"failed: {answer[1]}")
            return answer

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _child_main(
    function: Callable, pipe: Connection, parent: int, restart: int, *arguments: Any
) -> None:
    _die_with(parent)
    if distributed.is_torchelastic_launched():  # its signals are for the learner to answer
        os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # torch.compile uses tqdm, whose own lock is a semaphore
    try:
        function(pipe, restart, *arguments)
    except (EOFError, BrokenPipeError):  # the parent is gone
        pass
    except BaseException as error:
        if not isinstance(error, UserError | ValueError):
            traceback.print_exc()
        pipe.send(("error", f"{type(error).__name__}: {error}"))


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


class Workers:
    """The collecting half: envs in this process (num_workers 0) or split over N processes.

    `collect(agent, envs, rollout)` steps `envs` with `agent` and fills the tensors of `rollout`,
    each (time, env, ...). Worker processes fill their own columns of the same tensors, which then
    lie in shared memory; `agent` there is a copy that is refreshed before each collection. With
    `ahead`, for off-policy learners, they collect the next rollout while the learner learns;
    `policy_lag` is how many steps of all envs older than the learner's the weights then were that
    collected the last rollout (0: none, or it was collected here).
    `actions` are those that a script can choose, "bounded" being continuous ones within bounds. A
    script for several agents says so by `multi_agent`, and gets their axis as the third.
    """

    def __init__(
        self,
        run: Run,
        collect: Callable,
        actions: Literal["any", "bounded", "discrete"] = "any",
        ahead: bool = False,
        multi_agent: bool = False,
    ):
        self.args, self.device, self._collect = run.args, run.device, collect
        self._ahead, self._asked = ahead, False
        self.policy_lag = 0
        self._run = run
        args = run.args
        one = dataclasses.replace(args, num_envs=1) if args.num_workers else args
        same = run.device if args.env_device == "same" else torch.device(args.env_device)
        device = torch.device("cpu") if args.num_workers else same
        self.envs = _make_envs(one, args.seed, device)
        if multi_agent != (self.envs.num_agents is not None):
            many, script = self.envs.num_agents or 1, run.script
            wants = "several agents (Spread, SpeakerListener)" if multi_agent else "a single one"
            raise UserError(f"--env {args.env} has {many} agent(s), but {script} is for {wants}")
        self.observation_space = self.envs.single_observation_space
        self.action_space = self.envs.single_action_space
        _check_actions(args.env, self.action_space, actions, multi_agent)
        here = not args.num_workers and device.type == "cpu"
        self.exact_resume = here and self.envs.exact_resume
        self.go_on = True  # with the episodes that were saved
        if device.type != self.device.type and not args.num_workers:
            self.envs = Elsewhere(self.envs, self.device)
        self._children: list[Child] = []

    def start(self, agent: nn.Module, horizon: int, **extra: tuple[int, ...]) -> dict[str, Tensor]:
        """Get ready to collect `horizon` steps of every env by `agent` -> the empty rollout.

        Its tensors are (horizon, num_envs, ...): obs, action, reward, next_obs (the true
        one, at an episode's end not the reset's), terminated, done (terminated or truncated),
        episode_return, episode_length, and those in `extra`, by the shape of one entry.
        """

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            lead = horizon, self.args.num_envs
            return torch.zeros(*lead, *shape, dtype=dtype, device=self.device)

        agents = () if self.envs.num_agents is None else (self.envs.num_agents,)
        obs_shape = (*agents, *self.observation_space.shape)
        discrete = isinstance(self.action_space, gymnasium.spaces.Discrete)
        action_type = torch.int64 if discrete else torch.float32
        self._rollout = {
            "obs": zeros(*obs_shape),
            "next_obs": zeros(*obs_shape),
            "reward": zeros(*agents),
            "episode_return": zeros(),
            **{name: zeros(*shape) for name, shape in extra.items()},
            "action": zeros(*agents, *self.action_space.shape, dtype=action_type),
            "terminated": zeros(dtype=torch.bool),
            "done": zeros(dtype=torch.bool),
            "episode_length": zeros(dtype=torch.int64),
        }
        self._agent = agent
        if not self.args.num_workers:
            self._collect = _compiled_collect(self._collect, self.envs, self.args, horizon)
            self.envs.reset()
            return self._rollout
        self.envs.close()
        self._shared_agent = copy.deepcopy(agent).cpu().share_memory()
        self._begin = torch.zeros((), dtype=torch.int64).share_memory_()
        self._shared = {k: v.cpu().clone().share_memory_() for k, v in self._rollout.items()}
        count = self.args.num_workers
        edges = [self.args.num_envs * i // count for i in range(count + 1)]
        cores = self.args.env_threads or available_cores()
        for index, (low, high) in enumerate(itertools.pairwise(edges)):
            args = dataclasses.replace(
                self.args, num_envs=high - low, env_threads=max(1, cores // count)
            )
            columns = {k: v[:, low:high] for k, v in self._shared.items()}
            given = self._collect, self._shared_agent, columns, args, index, self._begin
            self._children.append(Child(_worker_main, *given))
        return self._rollout

    def start_anew(self, step: int) -> None:
        """New episodes, before the first rollout, by seeds that the run has not used by `step`."""
        if self._children:
            self._begin.fill_(step)
        else:
            self.envs.reset(seed=self.args.seed + step)

    def collect(self) -> dict[str, Tensor]:
        """The rollout, filled. UserError if there is a NaN or infinity in it."""
        failure = None
        if not self._children:
            try:
                self._collect(self._agent, self.envs, self._rollout)
            except ValueError as error:  # an environment refuses a NaN, which has a cause here
                failure = error
        else:
            lag = self._rollout["done"].numel() * count_learners()
            self.policy_lag = lag if self._asked else 0
            if not self._asked:
                self._ask_children()
            restarts = [child.restarts for child in self._children]
            for index, child in enumerate(self._children):
                try:
                    child.answer()
                except ChildFailed as error:
                    failure = UserError(f"worker {index} {error}")
            if restarts != [child.restarts for child in self._children]:
                self._run.end_episodes()  # the successors began new ones
            for name, tensor in self._rollout.items():
                tensor.copy_(self._shared[name])
            self._asked = False
            if self._ahead and failure is None:
                self._ask_children()
        self._run.check_rollout(self._rollout)
        if isinstance(failure, UserError):
            self._run._fail(failure)
        if failure is not None:
            raise failure
        return self._rollout

    def _ask_children(self) -> None:
        states = (agent.state_dict().values() for agent in (self._agent, self._shared_agent))
        for ours, theirs in zip(*states, strict=True):
            theirs.copy_(ours)
        for child in self._children:
            child.ask("collect")
        self._asked = True

    def state_dict(self) -> dict[str, Any]:
        return self.envs.state_dict() if self.exact_resume else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.go_on = bool(state) and self.exact_resume  # none is saved where it would not be exact
        if self.go_on:
            self.envs.load_state_dict(state)

    def close(self) -> None:
        for child in self._children:
            child.close()
        self._children.clear()
        self.envs.close()


def _worker_main(pipe, restart, collect, agent, columns, args, index, begin) -> None:
    # every worker, and every successor of one that died, draws its own random numbers
    seed = args.seed + 1_000_003 * (index + 1) + 7919 * restart
    envs = _make_envs(args, seed, "cpu")
    collect = _compiled_collect(collect, envs, args, len(columns["done"]))
    if restart:
        for tensor in columns.values():  # what its predecessor left is of other episodes
            tensor.zero_()
    pipe.recv()  # the first question; where a resumed run goes on is known by now
    torch.manual_seed(seed + int(begin) + 2**32)  # else noise would follow the environments'
    envs.reset(seed=seed + int(begin))
    while True:
        collect(agent, envs, columns)
        pipe.send("collected")
        pipe.recv()


def _compiled_collect(
    collect: Callable, envs: vec_envs.VecEnv, args: RunArgs, horizon: int
) -> Callable:
    if args.compile == "none" or not envs.compilable or horizon > LONGEST_COMPILED:
        return collect
    envs.looks = False
    return _compiled(collect, args)


class Evaluator:
    """Scores snapshots of the policy in a process of its own, at low priority.

    A snapshot waits in line until the process is free, so the learner neither waits nor changes
    the weights under it. Its envs and seeds are its own: evaluating changes nothing in training.
    """

    def __init__(self, args: RunArgs, agent: nn.Module):
        self._agent = copy.deepcopy(agent).cpu().share_memory()
        self._child = Child(_evaluator_main, self._agent, args)
        self.pending: list[tuple[int, dict[str, Tensor]]] = []  # (step, weights), oldest first

    def submit(self, step: int, weights: dict[str, Tensor]) -> None:
        self.pending.append((step, weights))
        if len(self.pending) == 1:
            self._ask()

    def results(self, wait: float = 0.0) -> list[tuple[int, dict, tuple[float, float, float]]]:
        """What it has finished: (step, weights, (mean return, std, mean length)) each."""
        finished = []
        while self.pending and (answer := self._child.answer(wait)) is not None:
            finished.append((*self.pending.pop(0), answer))
            if self.pending:
                self._ask()
        return finished

    def _ask(self) -> None:
        step, weights = self.pending[0]
        self._agent.load_state_dict(weights)
        self._child.ask(step)

    def close(self) -> None:
        self._child.close()


def _evaluator_main(pipe, restart, agent, args) -> None:
    os.nice(10)
    args = dataclasses.replace(args, num_envs=args.eval_episodes, env_threads=1)
    envs = _make_envs(args, args.seed, "cpu")
    while True:
        step = pipe.recv()
        # the seed follows from the step: evaluating one snapshot twice gives one result
        seed = ((args.seed + 1) * 1_000_000 + step) % 2**31  # more, some simulators do not take
        pipe.send(score(agent, envs, seed=seed)[:3])


@torch.no_grad()
def score(
    agent: nn.Module, envs: vec_envs.VecEnv, seed: int
) -> tuple[float, float, float, list[float]]:
    """Play one episode in each env -> mean and std of the return, mean length, all returns."""
    obs, _ = envs.reset(seed=seed)
    if hasattr(agent, "start_episodes"):  # an agent that remembers
        agent.start_episodes()
    running = torch.ones(envs.num_envs, dtype=torch.bool)
    returns, lengths = torch.zeros(envs.num_envs), torch.zeros(envs.num_envs)
    for _ in range(min(envs.max_episode_steps, LONGEST_EVALUATION)):
        obs, _, terminated, truncated, info = envs.step(agent(obs))
        returns = torch.where(running, info["episode_return"].float().cpu(), returns)
        lengths = torch.where(running, info["episode_length"].float().cpu(), lengths)
        running &= ~(terminated | truncated).cpu()
        if not running.any():
            break
    std = returns.std(correction=0).item()
    return returns.mean().item(), std, lengths.mean().item(), returns.tolist()


def compare_returns(envs: vec_envs.VecEnv) -> str:
    """A line with what simple policies get there, where it is known; else nothing."""
    known = ", ".join(f"{policy} {value:.1f}" for policy, value in envs.known_returns.items())
    many = "" if envs.num_agents is None else " (sum over agents)"
    return known and f"To compare{many}: {known}.\n"


# Replay.

PRIORITY_BLOCK = 256  # priorities summed together: a draw looks at all sums, then into one block


class ReplayBuffer:
    """The last `capacity` transitions of all envs, in preallocated tensors (T, N, ...).

    T = ceil(capacity / N) time steps of N envs on the learner's device, of all that `rollout` has
    but its episode statistics; with several learners, each keeps its own part of the capacity, and
    len is that of all of them. next_obs is the true one at an episode's end. Row `position` is
    written next: when full it holds the oldest step, and nothing that is drawn crosses this seam.
    With `prioritized`, i is drawn with P(i) = p_i / Σ p, p = (|δ| + ε)^α, and weighted by
    (size · P(i))^−β over the largest such weight of its batch (Schaul 2016, arXiv:1511.05952); β
    is `importance_exponent`, to be annealed.
    UserError if it does not fit in memory.
    """

    def __init__(
        self, run: Run, rollout: dict[str, Tensor], capacity: int, *, n_step: int = 1,
        discount: float = 0.99, prioritized: bool = False, priority_exponent: float = 0.6,
    ):  # fmt: skip
        horizon, self.num_envs = rollout["done"].shape[:2]
        self._learners = count_learners()
        self.capacity_rows = -(-capacity // (self.num_envs * self._learners))
        size, least = self.capacity_rows * self.num_envs, max(horizon, n_step) * self.num_envs
        if size < least:
            least *= self._learners
            raise UserError(
                f"--buffer-size is {capacity}; allowed is at least {least}, "
                "--num-envs times the larger of --horizon and --n-step"
            )
        kept = {k: x for k, x in rollout.items() if not k.startswith("episode_")}
        needed = size * sum(x[0, 0].numel() * x.element_size() for x in kept.values())
        needed += prioritized * 4 * size
        if self._learners > 1 and run.device.type == "cpu":  # this machine's learners share it
            needed *= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if needed > (free := _free_memory(run.device)):
            raise UserError(
                f"--buffer-size is {capacity}, which needs {needed / 2**30:.1f} GiB of memory "
                f"where {free / 2**30:.1f} GiB are free; choose a smaller one"
            )
        self.data = {k: x.new_zeros(self.capacity_rows, *x.shape[1:]) for k, x in kept.items()}
        self._flat = {name: tensor.flatten(0, 1) for name, tensor in self.data.items()}
        self.position, self.rows, self._saved = 0, 0, run.args.save_replay
        self.n_step, self.prioritized, self.device = n_step, prioritized, run.device
        self.priority_exponent, self.importance_exponent = priority_exponent, 0.4
        blocks, device = -(-size // PRIORITY_BLOCK) if prioritized else 0, run.device
        self.priority = torch.zeros(blocks, PRIORITY_BLOCK, device=device)
        self.block_sum = torch.zeros(blocks, dtype=torch.float64, device=device)
        self.largest = torch.ones((), device=device)  # priority so far, that of new transitions
        self._powers = discount ** torch.arange(n_step + 1, device=device)  # γ^k
        self._ahead = self.num_envs * torch.arange(n_step, device=device)

    def __len__(self) -> int:
        return self.rows * self.num_envs * self._learners

    def add(self, rollout: dict[str, Tensor]) -> None:
        """Store a rollout (H, N, ...) in place of the oldest steps."""
        horizon = len(rollout["reward"])
        fit = min(horizon, self.capacity_rows - self.position)  # the rest goes to the beginning
        for part, start in ((slice(0, fit), self.position), (slice(fit, horizon), 0)):
            end = start + part.stop - part.start
            if start == end:
                continue
            for name, tensor in self.data.items():
                tensor[start:end] = rollout[name][part]
            if self.prioritized:
                low, high = start * self.num_envs, end * self.num_envs
                self.priority.view(-1)[low:high] = self.largest
                touched = slice(low // PRIORITY_BLOCK, -(-high // PRIORITY_BLOCK))
                self.block_sum[touched] = self.priority[touched].sum(1, dtype=torch.float64)
        self.position = (self.position + horizon) % self.capacity_rows
        self.rows = min(self.rows + horizon, self.capacity_rows)

    def end_episodes(self) -> None:
        """What is added next does not follow what is here, as if all episodes were truncated."""
        done = self.data["done"].view(self.capacity_rows, self.num_envs, -1)
        done[self.position - 1, :, -1] = True  # of a stretch its last step

    def sample(self, batch_size: int) -> dict[str, Tensor]:
        """B transitions: what the rollout has of each, and discount, index, weight, all (B, ...).

        With n steps, cut where an episode or the buffer ends, the reward is Σ_k γ^k r_{t+k}, and
        next_obs and terminated are those of the last step used; discount = γ^(steps used), so

            target = reward + discount · (1 − terminated) · V(next_obs)
        """
        if self.prioritized:
            index, weight = self._draw(batch_size)
        else:
            index = torch.randint(self.rows * self.num_envs, (batch_size,), device=self.device)
            weight = torch.ones(batch_size, device=self.device)
        batch = {name: flat.index_select(0, index) for name, flat in self._flat.items()}
        batch |= {"index": index, "weight": weight, "discount": self._powers[1].expand(batch_size)}
        if self.n_step > 1:
            path = (index.unsqueeze(1) + self._ahead) % len(self._flat["reward"])  # (B, n)
            newest = (self.position - 1) % self.capacity_rows
            stop = self._flat["done"][path] | (path // self.num_envs == newest)
            reached = (~stop).cumprod(1).roll(1, 1)  # (B, n): no stop before this step
            reached[:, 0].fill_(1)
            steps = reached.sum(1)
            last = path.gather(1, steps.unsqueeze(1) - 1).squeeze(1)
            batch["reward"] = (self._flat["reward"][path] * reached * self._powers[:-1]).sum(1)
            batch["discount"] = self._powers[steps]
            for name in ("next_obs", "terminated", "done"):
                batch[name] = self._flat[name][last]
        return batch

    def _draw(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """Draw blocks, then places in them -> indices (B,) and importance weights (B,)."""
        ends = self.block_sum.cumsum(0)
        point = torch.rand(batch_size, dtype=torch.float64, device=self.device) * ends[-1]
        block = torch.searchsorted(ends, point, right=True).clamp(max=len(ends) - 1)
        inside = self.priority[block].cumsum(1, dtype=torch.float64)  # (B, PRIORITY_BLOCK)
        point = (point - ends[block] + self.block_sum[block]).clamp(min=0)
        point = torch.minimum(point, inside[:, -1] * (1 - 1e-12))  # rounding must not lead out
        place = torch.searchsorted(inside, point.unsqueeze(1), right=True).squeeze(1)
        index = block * PRIORITY_BLOCK + place
        chance = self.priority.view(-1)[index] / ends[-1]
        weight = (self.rows * self.num_envs * chance) ** -self.importance_exponent
        return index, (weight / weight.max()).float()

    def update_priorities(self, index: Tensor, td_error: Tensor) -> None:
        """p = (|δ| + ε)^α for the transitions (B,) of a batch."""
        if not self.prioritized:
            return
        priority = (td_error.detach().abs().float() + 1e-6) ** self.priority_exponent
        self.priority.view(-1)[index] = priority
        self.largest = torch.maximum(self.largest, priority.max())
        block = index // PRIORITY_BLOCK
        self.block_sum[block] = self.priority[block].sum(1, dtype=torch.float64)

    def windows(self, count: int, length: int, newest: int | None = None) -> dict[str, Tensor]:
        """`count` (B) windows of `length` (K) consecutive steps of one env each, (K, B, ...).

        `newest`: only from so many of the last transitions. mask (K, B) is 1 up to and with the
        first end of an episode and 0 after it: m_0 = 1, m_j = Π_{i<j} (1 − done_i).
        """
        envs = self.num_envs * self._learners
        rows = self.rows if newest is None else min(self.rows, -(-newest // envs))
        if length > rows:
            raise ValueError(f"windows of {length} steps from a replay buffer with {rows}")
        first = torch.randint(rows - length + 1, (count,), device=self.device)
        env = torch.randint(self.num_envs, (count,), device=self.device)
        ahead = torch.arange(length, device=self.device).unsqueeze(1) + self.position - rows
        index = (first + ahead) % self.capacity_rows * self.num_envs + env  # (K, B)
        batch = {name: flat[index] for name, flat in self._flat.items()}
        mask = torch.ones_like(batch["reward"])
        mask[1:] = (~batch["done"][:-1]).cumprod(0)
        return {**batch, "mask": mask, "index": index}

    def state_dict(self) -> dict[str, Any]:
        """Everything, or with --no-save-replay nothing."""
        if not self._saved:
            return {}
        # Only the filled part, unless its copy would be large.
        full = self.rows > self.capacity_rows // 2
        data = {k: x if full else x[: self.rows].clone() for k, x in self.data.items()}
        names = ("position", "rows", "priority", "block_sum", "largest", "importance_exponent")
        return {"data": data, **{name: getattr(self, name) for name in names}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state:
            _tell("Not exact: the replay buffer was not saved (--no-save-replay); it fills anew.")
            return
        for name, tensor in state["data"].items():
            self.data[name][: len(tensor)] = tensor
        for name in state.keys() - {"data"}:
            value = state[name]
            setattr(self, name, value.to(self.device) if isinstance(value, Tensor) else value)


def _free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable")) * 1024
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError, KeyError):  # in a container with a limit
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / f"memory.{x}").read_text()) for x in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = int(stat["inactive_file"]) + int(stat["active_file"])  # given back when needed
        free = min(free, limit - used + cached)
    return free


# Learners.

STAMP = "%Y%m%d-%H%M%S"
_RUNS = itertools.count()  # of this process: torchrun starts it again with the same numbers
_LOCKS: dict[tuple[int, int], int] = {}  # its folders: device and inode -> what holds the lock
_JOINS = itertools.count()  # the process groups that it has had


def count_learners() -> int:
    """How many processes learn together: 1 without torchrun."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def gradient_step(
    gradient: Tensor, optimizer: torch.optim.Optimizer, max_grad_norm: float = 0.0
) -> Tensor | None:
    """One step along the learners' mean gradient, at most `max_grad_norm` long (0: any length).

    The optimizer has one vector, of `flatten`, and the gradient is one of `gradient_of`. One
    all-reduce: where each learner's loss is a mean over its N-th of a batch, the result is the
    gradient of the mean over the whole batch. Returns its norm before, if it is limited.
    """
    (weights,) = optimizer.param_groups[0]["params"]
    weights.grad, norm = gradient, None
    if count_learners() > 1:
        _all_reduce(gradient.div_(count_learners()))
    if max_grad_norm:
        norm = gradient.norm()
        gradient.mul_((max_grad_norm / (norm + 1e-6)).clamp(max=1))
    optimizer.step()
    return norm


def mean_over_learners(x: Tensor) -> Tensor:
    """The mean of the learners' x, with a gradient; with one learner, x itself."""
    return _group_mean(x) if count_learners() > 1 else x


def _group_mean(x: Tensor) -> Tensor:
    return _MeanOverLearners.apply(x)


class _MeanOverLearners(torch.autograd.Function):
    """m = 1/N Σ_i x_i, where the whole loss is a mean, 1/N Σ_j L_j(m): so is then its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _all_reduce((x / count_learners()).contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _MeanOverLearners.apply(gradient)


def var_mean_over_learners(
    x: Tensor, dim: int | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """torch.var_mean(x, dim, correction=0) of the union of all learners' x, all of one shape."""
    mean = x.mean(dim, keepdim=True)
    var = (x - mean).square().mean(dim, keepdim=keepdim)  # torch.var_mean is slow on a CPU
    mean = mean.view_as(var)
    if count_learners() == 1:
        return var, mean
    mean = mean.double()  # in which E[x²] − E[x]² loses nothing that counts
    mean, square = mean_over_learners(torch.stack((mean, var + mean.square())))
    return (square - mean.square()).clamp(min=0).to(var), mean.to(var)


def std_mean_over_learners(x: Tensor) -> tuple[Tensor, Tensor]:
    """x.std() and x.mean() of the union of all learners' x, all of one shape."""
    if count_learners() == 1:
        return x.std(), x.mean()
    var, mean = var_mean_over_learners(x)
    size = x.numel() * count_learners()
    return (var * (size / (size - 1))).sqrt(), mean


def _join_learners() -> bool:
    """Become one of torchrun's learners; False without torchrun."""
    if not distributed.is_torchelastic_launched():
        return False
    _die_with(os.getppid())
    if distributed.is_initialized():
        return True
    variables, where = os.environ, {}
    if (store := _engines_store()) is not None:
        # What the dead have left there must not be read again. Each node counts its own restarts.
        if variables["GROUP_WORLD_SIZE"] != "1" and variables["TORCHELASTIC_MAX_RESTARTS"] != "0":
            raise UserError(
                "--max-restarts is set, on several nodes; torchrun then needs the environment "
                "variable TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
            )
        start = f"start {variables['TORCHELASTIC_RESTART_COUNT']}.{next(_JOINS)}"
        where = {"store": distributed.PrefixStore(start, store)}
        where |= {"rank": int(variables["RANK"]), "world_size": int(variables["WORLD_SIZE"])}
    # Adam imports this. Imported later it keeps the process group, whose threads, still there when
    # Python ends, then abort the learner now and then ("terminate called without ...").
    importlib.import_module("torch._dynamo")
    cuda = torch.cuda.is_available() and distributed.is_nccl_available()
    distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", **where)
    return True


def _engines_store() -> distributed.Store | None:
    """torchrun's own store, where it has one: it outlives the learners."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return distributed.TCPStore(address, port, is_master=False)


def _leave_learners() -> None:
    if distributed.is_torchelastic_launched() and distributed.is_initialized():
        distributed.destroy_process_group()


def _all_reduce(x: Tensor, operation: Any = distributed.ReduceOp.SUM) -> Tensor:
    with _one_sentence_if_alone():
        distributed.all_reduce(x, operation)
    return x


def _largest_over_learners(number: int) -> int:
    """The largest number that a learner has; returns when all have asked."""
    if count_learners() == 1:
        return number
    return int(_all_reduce(torch.tensor(number), distributed.ReduceOp.MAX))


def _from_learner_0(thing: Any) -> Any:
    """What learner 0 has, for all of them."""
    things = [thing]
    if count_learners() > 1:
        with _one_sentence_if_alone():
            distributed.broadcast_object_list(things, device=torch.device("cpu"))
    return things[0]


@contextlib.contextmanager
def _one_sentence_if_alone() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # of torch.distributed, when another process is gone
        reason, *_ = str(error).split(". ")
        raise UserError(f"Another learner stopped ({reason})") from None


# Small things.


def _tell(text: str) -> None:
    _to_terminal(tqdm.write, text)


def _to_terminal(function: Callable, *arguments: Any) -> None:
    """Call what prints; a full disk or nobody reading is no reason to stop.

    `python algos/ppo.py | tee log` is such a case: Ctrl-C ends tee as well.
    """
    with contextlib.suppress(OSError):
        function(*arguments)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _make_envs(args: RunArgs, seed: int, device: torch.device | str) -> vec_envs.VecEnv:
    try:
        return vec_envs.make(args.env, args.num_envs, device, seed, args.env_threads)
    except ValueError as error:
        raise UserError(f"--env {args.env}: {error}") from None


def _check_actions(env: str, space: gymnasium.Space, actions: str, multi_agent: bool) -> None:
    discrete = isinstance(space, gymnasium.spaces.Discrete)
    if actions == "discrete" and not discrete:
        fit = "mappo.py, maddpg.py and matd3.py" if multi_agent else "sac.py, td3.py and ppo.py"
        raise UserError(f"--env {env} has continuous actions; {fit} fit it")
    if actions == "bounded" and discrete:
        raise UserError(f"--env {env} has discrete actions; dqn.py, ppo.py and a2c.py fit it")
    if discrete:
        return
    low, high = torch.tensor(space.low), torch.tensor(space.high)
    if not (high - low).float().isfinite().all():
        what = "actions without bounds, or too far apart for float32; give its action space others"
        raise UserError(f"--env {env} has {what}")


def check_args(args: RunArgs, limits: dict[str, tuple]) -> None:
    for field in dataclasses.fields(args):
        name, value, kind = field.name, getattr(args, field.name), type(field.default)
        flag = "--" + name.replace("_", "-")
        if kind in (bool, int, float, str) and not isinstance(
            value, int | float if kind is float else kind
        ):
            raise UserError(f"{flag} is {value!r}; it must be of type {kind.__name__}")
        if get_origin(field.type) is Literal and value not in get_args(field.type):
            raise UserError(f"{flag} is {value}; allowed is {', '.join(get_args(field.type))}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        low, high = limits.get(name, (0, None))
        if (low is not None and not value >= low) or (high is not None and not value <= high):
            allowed = f"from {low} to {high}" if high is not None else f"at least {low}"
            raise UserError(f"{flag} is {value}; allowed is {allowed}")
        bits, largest = (32, 3e38) if kind is float else (64, 2**63 - 1)
        if not abs(value) <= largest:
            raise UserError(f"{flag} is {value}; it must be a finite number of {bits} bits")


def _saved_args(given: RunArgs, script: str) -> RunArgs:
    """The arguments in the folder given.resume; only --total-steps may be given anew."""
    path = Path(given.resume) / "args.json"
    try:
        content = json.loads(path.read_text())
        saved, made_by = type(given)(**content["args"]), content["script"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--resume {given.resume}: {path} cannot be read ({error})") from None
    if made_by != script:
        raise UserError(f"--resume {given.resume}: that run is of {made_by}, not {script}")
    typed = {word.partition("=")[0].replace("_", "-") for word in sys.argv}
    typed = {word.replace("--no-", "--", 1) for word in typed}
    for field in dataclasses.fields(given):
        value, flag = getattr(given, field.name), "--" + field.name.replace("_", "-")
        begun = ("device", "auto"), ("env_device", "same"), ("num_envs", 0)
        resolved = (field.name, value) in (*begun, ("run_dir", given.resume))  # when it began
        untouched = resolved or (value == field.default and flag not in typed)
        if field.name == "resume" or untouched or value == getattr(saved, field.name):
            continue
        if field.name != "total_steps":
            raise UserError(f"{flag} is {value}, but a resumed run keeps its own; leave it out")
        saved = dataclasses.replace(saved, total_steps=value)
    return dataclasses.replace(saved, run_dir=given.resume)


def _with_run_dir(args: RunArgs, script: str, stamp: str) -> RunArgs:
    name = f"{args.env.replace(':', '-').replace('/', '-')}__{script}__{args.seed}__{stamp}"
    return dataclasses.replace(args, run_dir=f"runs/{name}")


def _lock(folder: Path) -> tuple[int, int]:
    """Its key in _LOCKS; UserError while another process trains in it.

    A lock ends with its process. On a network file system another node may not see it.
    """
    identity = folder.stat().st_dev, folder.stat().st_ino
    if identity in _LOCKS:  # by a run of this process that raised
        return identity
    handle = os.open(folder, os.O_RDONLY)
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < until:
                time.sleep(0.1)
                continue
            os.close(handle)
            message = f"--run-dir or --resume {folder}: another process is training in it"
            raise UserError(message) from None
        except OSError:  # a file system without locks
            pass
        break
    _LOCKS[identity] = handle
    return identity


def _restarted_args(args: RunArgs, script: str) -> RunArgs:
    """What a learner goes on with that torchrun started: again, or on a node that joined.

    The command is the same each time: where its run folder holds a run, that is resumed. The time
    in a folder's default name is that of the first start, which torchrun's store remembers.
    """
    run = next(_RUNS)
    if args.resume:
        return args
    if not args.run_dir:
        if (store := _engines_store()) is None:
            raise UserError("--run-dir is empty; learners that are started again need to know it")
        stamp = store.compare_set(f"crane_rl/{run}", "", time.strftime(STAMP)).decode()
        args = _with_run_dir(args, script, stamp)
    exists = _from_learner_0((Path(args.run_dir) / "args.json").exists())
    return dataclasses.replace(args, resume=args.run_dir) if exists else args


def _learners_share(args: RunArgs, rank: int, learners: int, limits: dict[str, tuple]) -> RunArgs:
    """The arguments of one of several learners: its part of SHARED, a seed, threads of its own."""
    if learners == 1:
        return args
    share = {name: getattr(args, name) for name in SHARED if hasattr(args, name)}
    for name, value in share.items():
        low, _ = limits.get(name, (1 if name == "num_envs" else 0, None))
        if value % learners or value // learners < low:
            raise UserError(
                f"--{name.replace('_', '-')} is {value}, for all learners; {learners} learners can "
                f"share a multiple of {learners}" + f", {low * learners} or more" * (low > 1)
            )
        share[name] = value // learners
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    share["env_threads"] = max(1, (args.env_threads or available_cores()) // here)
    share["seed"] = (args.seed + 15_485_863 * rank) % 2**31
    return dataclasses.replace(args, **share)


def parse(args_class: type[RunArgs], tuned: dict[str, dict[str, Any]]) -> RunArgs:
    """The command line, with the defaults that a script's table `tuned` has for its --env.

    Flags that are given win over the table. A resumed run takes its arguments from its folder.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--env", default=args_class.env)
    first.add_argument("--resume")
    given, _ = first.parse_known_args()
    own = {} if given.resume else tuned.get(vec_envs.base_name(given.env), {})
    sys.excepthook = _say_in_one_sentence
    return tyro.cli(args_class, default=args_class(**own))


def _say_in_one_sentence(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """sys.excepthook of a script: no traceback for Ctrl-C, `| head` or memory that is missing."""
    if kind is KeyboardInterrupt:  # while it trains, Run._on_signal answers
        print("Stopped", file=sys.stderr)
    elif kind is BrokenPipeError:  # --help | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    elif isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error):
        asked = re.search(r"ried to allocate ([\d.]+ \w+)", str(error))
        needed = f" for {asked[1]} more" if asked else ""
        advice = "choose smaller sizes: networks, batches, --num-envs, --horizon"
        print(f"Not enough memory{needed}; {advice}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def flatten(agent: nn.Module) -> nn.Parameter:
    """Make all parameters of `agent` views of one vector, which is returned.

    For an optimizer that then has one tensor: one kernel a step, one norm to clip, one all-reduce,
    instead of one a layer. Its gradient comes from `gradient_of`.
    """
    parameters = list(agent.parameters())
    vector = nn.Parameter(nn.utils.parameters_to_vector(parameters).detach())
    parts = vector.data.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part.view_as(parameter)
    return vector


def gradient_of(loss_function: Callable, network: nn.Module, bf16: bool = False) -> Callable:
    """∂ loss / ∂ network as a function: one vector, in the order of `flatten`.

    Where loss_function(…) is the loss, or (loss, …), the new function(…) is (gradient, loss, …), of
    tensors, or dicts of them, without gradients of their own. Of all that the loss depends on, only
    `network` gets one. With `bf16` the products of matrices are in bfloat16 (torch.autocast), and
    so are their results: what needs more digits says so (`.to(obs)`).
    """
    weights = list(network.parameters())
    learnt = [weight for weight in weights if weight.requires_grad]

    def detached(x: Tensor | dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
        return {k: v.detach() for k, v in x.items()} if isinstance(x, dict) else x.detach()

    def gradient(*arguments: Any) -> tuple[Tensor, ...]:
        with torch.autocast(weights[0].device.type, torch.bfloat16, enabled=bf16):
            result = loss_function(*arguments)
        loss, *more = result if isinstance(result, tuple) else (result,)
        found = iter(torch.autograd.grad(loss, learnt, materialize_grads=True))  # 0 where unused
        parts = [next(found) if w.requires_grad else torch.zeros_like(w) for w in weights]
        return torch.cat([part.flatten() for part in parts]), *map(detached, (loss, *more))

    return gradient


def keep_freed_memory() -> None:
    """Have the C library (glibc) keep what is freed.

    Tensors of a megabyte, made anew in each update, are else new pages from the kernel each time:
    a good part of the time of redq.py's update.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):
            mallopt, trim_threshold, mmap_threshold = ctypes.CDLL(None).mallopt, -1, -3
            mallopt(mmap_threshold, 32 << 20)  # bytes, the most that is allowed
            mallopt(trim_threshold, 256 << 20)


def _multiplies_bf16(device: torch.device) -> bool:
    if device.type == "cpu":
        return torch.cpu._is_avx512_bf16_supported()
    return torch.cuda.is_bf16_supported(including_emulation=False)


def _compiled(function: Callable, args: RunArgs) -> Callable:
    if hasattr(torch._dynamo.config, "trace_autograd_ops"):  # torch 2.11: no break at the gradient
        torch._dynamo.config.trace_autograd_ops = True
    if args.compile == "graphs":  # whose next run overwrites what the last one gave
        graphed = torch.compile(function, mode="reduce-overhead")
        return lambda *inputs: pytree.tree_map_only(Tensor, torch.clone, graphed(*inputs))
    # On a CPU what calls the kernels is C++ as well, not Python, and random numbers are torch's:
    # the compiler's come one by one, and with them all that they are fused with.
    on_cpu = args.device == "cpu"
    options = {"cpp_wrapper": on_cpu, "fallback_random": on_cpu}
    return torch.compile(function, options=options)


def _what_fits(thing: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """`saved`, but a network's tensors whose shape follows the number of learners as they are."""
    if not isinstance(thing, nn.Module):
        return saved
    now = thing.state_dict()
    return {k: x if x.shape == now[k].shape else now[k] for k, x in saved.items()}


def _snapshot(network: nn.Module) -> dict[str, Tensor]:
    return {name: x.cpu().clone() for name, x in network.state_dict().items()}


def _write_atomically(text: str, path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def _save_atomically(content: dict[str, Any], path: Path, keep_previous: bool) -> None:
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if keep_previous and path.exists():
        os.replace(path, path.with_suffix(".prev.pt"))
    os.replace(temporary, path)


def load_checked(path: Path) -> tuple[Any, str]:
    """The content of a .pt file, or None and what is wrong with it.

    torch.load notices a truncated file but not a flipped bit; the checksums inside do.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            for entry in archive.infolist():
                if entry.external_attr:  # not in the checksums; torch would see an empty folder
                    damaged = entry.filename
        if damaged is not None:
            return None, f"wrong checksum of {damaged}"
        # mmap: a large replay buffer is not in memory twice while it is copied to its place
        return torch.load(path, weights_only=True, map_location="cpu", mmap=True), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
