"""One training run: its arguments, folder, logs, evaluations, checkpoints; how it is resumed."""

import contextlib
import dataclasses
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, NoReturn

import torch
from torch import Tensor, distributed, nn
from tqdm import tqdm

import vec_envs
from algos.worker_learner import arguments, engine, files, learners, workers
from algos.worker_learner.arguments import AnyArgs, UserError, command_line, tell, to_terminal
from algos.worker_learner.files import Log, plot, quietly, read_checkpoint, save, snapshot
from algos.worker_learner.learners import from_learner_0, largest_over_learners, mean_over_learners
from algos.worker_learner.workers import Evaluator, compare_returns, die_with_parent

PAUSED = 3  # exit status at --pause-at; 0: done, 1: failed, 2: wrong flags, 128 + n: signal n
CHECKPOINT_SECONDS = 600  # after which a slow run is saved before --checkpoint-every says so
OWN = "step", "seconds", "best_return", "last_return", "training_return"  # saved of a Run
BEFORE = threading.local()  # .at_end: of this thread's last run, closed late if that raised
PUT_RANDOM = torch.set_rng_state, torch.cuda.set_rng_state
Number = Tensor | float  # a tensor () or Python's own


@dataclasses.dataclass
class Result:
    """What `train` returns: where the run is and how well its policy did."""

    run_dir: Path
    step: int
    seconds: float
    last_return: float
    best_return: float


class Run(Generic[AnyArgs]):
    """One training run: its folder, logs, evaluations, checkpoints, and this learner's `args`.

    `limits`: an argument's (smallest, largest) value, None for no bound; the others' limits are in
    RUN_LIMITS, or 0 and none. UserError, before anything is written, for a value outside of them.
    """

    def __init__(self, args: AnyArgs, script: str, limits: dict[str, tuple] | None = None):
        getattr(BEFORE, "at_end", contextlib.ExitStack()).close()
        self.at_end = BEFORE.at_end = contextlib.ExitStack()  # what `close` undoes, the last first
        limits = {**arguments.RUN_LIMITS, **(limits or {})}
        self.script, self._path = Path(script).stem, Path(script)
        if learners.join_learners():
            die_with_parent()
            args = learners.restarted_args(args)
        self.world_size = learners.world_size()
        self.rank = distributed.get_rank() if self.world_size > 1 else 0  # 0 prints, logs and saves
        self.resumed = bool(args.resume)
        args = arguments.saved_args(args, self.script) if self.resumed else args
        self._whole_args = args = arguments.resolve(args, self.script, limits)
        args.run_dir = from_learner_0(args.run_dir)  # its default name has the time
        args.torch_threads = engine.choose_threads(args)
        args.compile = engine.choose_compile(args, args.device, self.resumed, self.world_size)
        self.args = args = arguments.learners_share(args, self.rank, self.world_size, limits)
        self.dir, self.device = Path(args.run_dir), torch.device(args.device)
        self._file = self.dir / (f"checkpoint.rank{self.rank}.pt" if self.rank else "checkpoint.pt")
        engine.prepare(args, self.world_size)
        torch.manual_seed(args.seed)
        self.step = 0  # after the last iteration
        self.seconds = self._rechecked = 0.0  # of training, over all resumes
        self.best_return, self.last_return, self.training_return = -math.inf, math.nan, math.nan
        self._state: dict[str, Any] = {}  # name -> object with state_dict()
        self._stop_signal = 0
        self.at_end.callback(learners.leave_learners)

    # The run's life: start, log, evaluate, checkpoint, finish.

    def start(self, agent: nn.Module, workers: Any, **state: Any) -> int:
        """Say what runs where; after --resume put the saved state back. Returns the step to go on.

        Each argument has `load_state_dict` and `state_dict` (tensors, numbers, text, lists, dicts;
        a module: tensors only). What none of them holds is lost, but for torch's random generators.
        """
        self._state, args = {"agent": agent, "workers": workers, **state}, self.args
        if not engine.fits(args.compile, state.values()):
            args.compile = "none"  # which the first line says
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            if self.rank == 0:
                busy = f"another run is training in {self.dir}; choose another --run-dir"
                self.at_end.enter_context(files.lock(self.dir, busy))  # who trains may save again
            before = json.loads((self.dir / "args.json").read_text()) if self.resumed else {}
            self._times = self.resumed + (before.get("resumed") or 0)  # how often it was resumed
            pending = self._load_state()
            files.check_loadable({} if self.resumed else self._state)
            self.at_end.callback(engine.watch_optimizers(self._state.values()))
            if self.step and not workers.go_on:
                where = "those of a VecEnv on a CPU, without workers, with as many learners again,"
                tell(f"Not exact: environments start new episodes; only {where} can be restored.")
                workers.start_anew(self.step + self._times)  # each time other ones
                self.end_episodes()
            if self.rank == 0:
                self._open_files({step for step, _ in pending})
            self._describe(agent)
            with contextlib.suppress(ValueError):  # not the main thread
                for number in (signal.SIGINT, signal.SIGTERM):
                    before = signal.signal(number, self._on_signal)
                    self.at_end.callback(signal.signal, number, before)
            if self.rank == 0:
                self._evaluator = Evaluator(args, agent)
                self.at_end.callback(self._evaluator.close)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise UserError(f"--run-dir {self.dir}: {error.strerror or error}") from None
            raise
        for step, weights in pending:
            self._evaluator.submit(step, files.what_fits(agent, weights))
        begin, often = min(self.step, args.total_steps), 0.5 if sys.stderr.isatty() else 30
        self._bar = tqdm(total=args.total_steps, initial=begin, unit="step", unit_scale=True,
                         mininterval=often, dynamic_ncols=True, disable=self.rank > 0)  # fmt: skip
        self.at_end.callback(to_terminal, self._bar.close)
        self._saved_at = time.perf_counter()
        self._began = self._saved_at - self.seconds
        self._warm: tuple[int, float] | None = None  # step and time at the first logged update
        if self._pauses():  # it was killed as it ended
            self._exit(PAUSED)
        return self.step

    def compile(self, update: Callable) -> Callable:
        """`update` as one graph, where --compile says so: no keyword arguments, fixed attributes.

        Each combination of arguments that are no tensors, as `due`, has a graph of its own.
        """
        self.args.compile = engine.unless_debugged(self.args.compile, update)
        make = {"none": None, "graphs": engine.captured}.get(self.args.compile, engine.compiled)
        return make(update, self.args) if make else update

    def log(self, step: int, losses: Mapping[str, Number], **charts: Number) -> None:
        """Write losses/… and charts/… to metrics.csv and TensorBoard; UserError at NaN or infinity.

        `charts/SPS` is added: environment steps per second since the first update that was logged,
        thus without random actions at the beginning, and without compilation.
        """
        self.seconds = time.perf_counter() - self._began
        metrics = {f"losses/{name}": value for name, value in losses.items()}
        metrics |= {f"charts/{name}": value for name, value in charts.items()}
        numbers = [torch.as_tensor(x, device=self.device).double() for x in metrics.values()]
        for tag, x in zip(metrics, numbers, strict=True):
            if x.dim():
                self.fail(f"{tag} has the shape {tuple(x.shape)}; log one number, as its mean()")
        numbers = mean_over_learners(torch.stack(numbers).detach()).tolist()  # one transfer for all
        metrics = dict(zip(metrics, numbers, strict=True))
        for tag, value in metrics.items():
            if not math.isfinite(value):
                self.fail(f"{tag} is {value} at step {step}: training stopped")
        if self._warm is not None and self.seconds > self._warm[1]:
            metrics["charts/SPS"] = (step - self._warm[0]) / (self.seconds - self._warm[1])
        elif losses:
            self._warm = (step, self.seconds)
        self._write(step, "", metrics)
        if self.seconds > self._rechecked + engine.RECHECK_SECONDS:
            self._rechecked = self.seconds
            engine.recheck_threads(self.args)
        shown = self.training_return if math.isnan(self.last_return) else self.last_return
        which = "training return" if math.isnan(self.last_return) else "evaluation"
        if not math.isnan(shown):
            self._bar.set_postfix_str(f"{which} {shown:.5g}", refresh=False)
        to_terminal(self._bar.update, min(step, self.args.total_steps) - self._bar.n)

    def log_episodes(self, step: int, batch: dict[str, Tensor]) -> None:
        """Log mean return and length of the episodes that ended in a batch, (time, env, ...)."""
        self.seconds = time.perf_counter() - self._began
        if self.world_size == 1 and not batch["done"].any():
            return
        done = batch["done"].float()
        sums = [(batch[name] * done).sum() for name in ("episode_return", "episode_length")]
        count, *sums = mean_over_learners(torch.stack([done.sum(), *sums])).tolist()
        if count:
            self.training_return, length = (total / count for total in sums)
            found = {"return": self.training_return, "length": length}
            self._write(step, "charts/episodic_", found)

    def evaluate(self, step: int) -> None:
        """Hand the present policy to the evaluator if one is due; log what it has found by now."""
        every = self.args.eval_every  # self.step is still the last iteration's, until `checkpoint`
        due = every and step // every > self.step // every and step < self.args.total_steps
        if due and self.rank == 0:
            self._evaluator.submit(step, snapshot(self._state["agent"]))
        self._collect_evaluations()

    def checkpoint(self, step: int) -> None:
        """Save if a checkpoint is due. At --pause-at, or after SIGINT or SIGTERM: save and exit."""
        before, self.step = self.step, step
        late = time.perf_counter() - self._saved_at > CHECKPOINT_SECONDS
        wish = largest_over_learners(self._stop_signal or int(late))  # all stop, or save, or none
        if wish > 1 or self._pauses():  # a signal: SIGINT is 2, SIGTERM 15
            saved = self._save()
            self._exit(128 + wish if wish > 1 else PAUSED if saved else 1, saved)
        every, last = self.args.checkpoint_every, step >= self.args.total_steps
        if not last and (wish or step // every > before // every):  # `finish` saves the last one
            self._save()

    def finish(self, step: int) -> Result:
        """Last checkpoint and evaluation, learning_curve.png, a summary."""
        self.step = step
        saved = self._save()
        learners.leave_learners()
        episodes, seconds = self.args.eval_episodes, self.seconds
        if self.rank == 0:
            self._evaluator.submit(step, snapshot(self._state["agent"]))
            tell(f"Evaluating the last policy over {episodes} episodes ...")
            while self._evaluator.pending:
                self._collect_evaluations(wait=0.2)
                if self._stop_signal:
                    self.checkpoint(step)
            if self._evaluator.failed:
                self.last_return = math.nan  # what it is now is that of an older policy
            self._began = time.perf_counter() - seconds  # to wait is not to train
            saved = self._save()  # the evaluations it waited for are no longer pending
            quietly("learning_curve.png", plot, self.dir, f"{self.script} on {self.args.env}")
        play = command_line(os.path.relpath(self._path.with_name("play.py")), str(self.dir))
        how = f"{compare_returns(self._state['workers'].envs)}Score, watch or film it: {play}"
        self.close()
        tell(
            f"\nDone: {step} steps in {seconds:.0f} s. Deterministic return over {episodes} "
            f"episodes: last {self.last_return:.5g}, best {self.best_return:.5g}.\n{how}"
        )
        if not saved:
            self._exit(1, saved)
        return Result(self.dir, step, seconds, self.last_return, self.best_return)

    def close(self) -> None:
        """End the child processes and close the files; safe to call twice."""
        self.at_end.close()
        self._state = {}  # frees the replay buffer now, not when Python looks for cycles

    def fail(self, message: Any) -> NoReturn:
        """Close, and raise a UserError."""
        self.close()
        good = self.dir / "checkpoint.pt"
        hint = f"; the last good checkpoint is {good}" if good.exists() else ""
        raise UserError(f"{message}{hint}") from None

    def end_episodes(self) -> None:
        """What is collected from now on is of other episodes than what came last."""
        for thing in (*self._state.values(), *self._state["agent"].modules()):
            if hasattr(thing, "end_episodes"):
                thing.end_episodes()

    def check_weights(self) -> None:
        """UserError if there is a NaN or infinity in the agent."""
        for name, x in self._state["agent"].state_dict().items():
            if not x.isfinite().all():
                self.fail(f"{name} has NaN or infinity at step {self.step}: training stopped")

    # Pauses, evaluations, signals, what is said.

    def _pauses(self) -> bool:
        return 0 < self.args.pause_at <= self.step < self.args.total_steps

    def _exit(self, status: int, saved: bool = True) -> NoReturn:
        """Close, say how to resume, and end the process."""
        but = "" if saved else ", which could not be saved"
        self.close()
        torchrun = f"-m torch.distributed.run --nproc-per-node {self.world_size}".split()
        script = [*(torchrun if self.world_size > 1 else ()), os.path.relpath(self._path)]
        command = command_line(*script, "--resume", str(self.dir))
        tell(f"\nStopped at step {self.step}{but}. Go on with:\n    {command}")
        raise SystemExit(status)

    def _collect_evaluations(self, wait: float = 0.0) -> None:
        try:
            results = self._evaluator.results(wait) if self.rank == 0 else []
        except UserError as error:
            self.fail(error)
        for step, weights, found in results:
            self.last_return = mean = found["return"]
            if not math.isfinite(mean):
                self.fail(f"the return of the evaluation at step {step} is {mean}")
            self._write(step, "eval/episodic_", found)
            if mean > self.best_return:
                self.best_return = mean
                self._save_policy("best.pt", step, mean, weights)

    def _write(self, step: int, prefix: str, metrics: dict[str, float]) -> None:
        if self.rank == 0:
            self._log.write(step, self.seconds, {prefix + tag: x for tag, x in metrics.items()})

    def _on_signal(self, number: int, frame: Any) -> None:
        asked, self._stop_signal = self._stop_signal, self._stop_signal or number
        if self.world_size > 1:  # torchrun passes signals on, and kills who does not stop
            return
        if asked:
            self.close()
            raise SystemExit(128 + number)
        with contextlib.suppress(RuntimeError):  # it came during another print
            tell("Stopping after this iteration; repeat Ctrl-C to stop at once, without saving.")

    def _describe(self, agent: nn.Module) -> None:
        args, count = self.args, sum(p.numel() for p in agent.parameters())
        device = torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"
        compiled = "not compiled" if args.compile == "none" else f"compiled ({args.compile})"
        where = f"{args.num_workers} worker processes" if args.num_workers else "this process"
        if self.device.type == "cuda" and (args.num_workers or args.env_device == "cpu"):
            where += " on the CPU"
        where += f" of each of {self.world_size} learners" * (self.world_size > 1)
        threads = f"{args.torch_threads} torch thread" + "s" * (args.torch_threads > 1)
        if vec_envs.NAMES.get(vec_envs.base_name(args.env)) == "mujoco":
            cores = args.env_threads or vec_envs.core.available_cores()
            threads = f"{cores} simulation threads, {threads}"
        tell(
            f"{self.script} on {args.env}: {args.num_envs} environments in {where}, {device}, "
            f"{threads}, {compiled}, {count} parameters, seed {args.seed}\n"
            f"{f'Resumed at step {self.step} in' if self.resumed else 'Run folder'} {self.dir}"
            f"   (curves: tensorboard --logdir {self.dir.parent})"
        )
        if self._state["workers"].envs.max_episode_steps > workers.LONGEST_EVALUATION:
            tell(f"Evaluations stop an episode after {workers.LONGEST_EVALUATION} steps.")

    # Files.

    def _open_files(self, pending: set[int]) -> None:
        if not self.resumed:
            files.check_unused(self.dir)
        content = {"script": self.script, "args": dataclasses.asdict(self._whole_args)}
        content["resumed"] = self._times
        save(json.dumps(content, indent=2) + "\n", self.dir / "args.json")
        if self.step >= self.args.total_steps:
            pending = {*pending, self.step}  # `finish` evaluates again
        self._log = Log(self.dir, self.step, pending)
        self.at_end.callback(self._log.close)

    def _save(self) -> bool:
        """Write checkpoint.pt so that at every moment a good one exists, and last.pt beside it."""
        self.check_weights()
        self._saved_at = time.perf_counter()
        self.seconds = self._saved_at - self._began
        content = {name: thing.state_dict() for name, thing in self._state.items()}
        content["run"] = {name: getattr(self, name) for name in ("world_size", *OWN)}
        cuda = [torch.cuda.get_rng_state()] if self.device.type == "cuda" else []
        content["run"]["random"] = [torch.get_rng_state(), *cuda]
        saved = self.rank == 0 or quietly(self._file.name, save, content, self._file, True)
        largest_over_learners(0)  # where learner 0's file is, there are the others'
        if self.rank == 0:
            content["pending_evaluations"] = list(self._evaluator.pending)
            weights = snapshot(self._state["agent"])  # first: who is killed now comes here again
            saved = self._save_policy("last.pt", self.step, self.last_return, weights)
            saved &= quietly(self._file.name, save, content, self._file, True)
        return saved

    def _save_policy(self, name: str, step: int, mean_return: float, weights: dict) -> bool:
        content = {"script": self.script, "args": dataclasses.asdict(self.args), "step": step}
        content |= {"return": mean_return, "agent": weights}
        return quietly(name, save, content, self.dir / name)

    def _load_state(self) -> list[tuple[int, dict]]:
        """Put back what is saved, or begin all with learner 0's weights -> pending evaluations.

        Where one lacks a file of its own (there were fewer), all take networks and optimizers only.
        """
        saved = read_checkpoint(self._file) if self.resumed and self.rank == 0 else None
        now = from_learner_0(saved and saved["run"])
        if now and self.rank > 0:
            saved = read_checkpoint(self._file, now)
        inexact = saved is None or now["world_size"] != self.world_size
        if largest_over_learners(int(inexact)):
            kinds = nn.Module | torch.optim.Optimizer if now else nn.Module
            state = {name: x for name, x in self._state.items() if isinstance(x, kinds)}
            content = {}
            if self.rank == 0:
                content = saved or {k: snapshot(x) for k, x in state.items()}
            content = from_learner_0({k: content[k] for k in state if k in content})
            content = {k: files.what_fits(state[k], x) for k, x in content.items()}
            self._put_back(state, content, now)
            if now:
                torch.manual_seed(self.args.seed + self.step)
                why = f"{now['world_size']} learner(s) saved, now there are {self.world_size}"
                tell(f"Not exact: {why}, or files do not match. Replay buffers start empty.")
            return saved["pending_evaluations"] if saved and self.rank == 0 else []
        self._put_back(self._state, saved, saved["run"])
        return saved.get("pending_evaluations", [])

    def _put_back(self, state: dict[str, Any], saved: dict, own: dict[str, Any] | None) -> None:
        try:
            for name, thing in state.items():
                thing.load_state_dict(saved[name])
            for name in OWN if own else ():
                setattr(self, name, own[name])
            for put, numbers in zip(PUT_RANDOM, own["random"] if own else (), strict=False):
                put(numbers)
        except (RuntimeError, LookupError, ValueError, TypeError) as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            misfit = f"{self._file.name} does not fit args.json and {self.script}.py"
            raise UserError(f"--resume {self.dir}: {misfit} ({name}: {reason})") from None
