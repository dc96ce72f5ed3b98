"""The command line of every script, and the errors that a user sees: one sentence each."""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import select
import shlex
import shutil
import signal
import sys
import time
import typing
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, TypeVar

import gymnasium
import torch
import tyro
from tqdm import tqdm

import vec_envs
from vec_envs.core import ContractError, available_cores


class UserError(Exception):
    """What went wrong, in one sentence; a script prints it without a traceback."""


@dataclasses.dataclass
class RunArgs:
    """The arguments that all scripts share; those that are typed most often come first."""

    typed = ()  # the words of the command line, if the arguments come from one
    env: str = "Ant"
    """environment: a name of vec_envs, a Gymnasium id, or package:Id-v0 (,option=value ...)"""
    total_steps: int = 1_000_000
    """how many environment steps to train for"""
    seed: int = 0
    """seed of everything that is random"""
    num_envs: int = 0
    """environments stepped together (0: 64; long on-policy runs on a GPU 4096, MuJoCo: .[gpu])"""
    run_dir: str = ""
    """folder of this run (empty: runs/{env}__{script}__{seed}__{time})"""
    resume: str = ""
    """go on with the run in this folder, with its arguments; --total-steps may be larger"""
    pause_at: int = 0
    """save and stop at this step, before --total-steps; --resume goes on (0: no pause)"""
    eval_every: int = 100_000
    """steps between evaluations of the deterministic policy (0: only at the end)"""
    eval_episodes: int = 10
    """episodes of one evaluation"""
    checkpoint_every: int = 100_000
    """steps between checkpoints (one is also saved ten minutes after the last)"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where networks and simulation run (auto: the GPU where there is one)"""
    env_device: Literal["same", "cpu"] = "same"
    """where environments are simulated (same: with the networks, if possible; workers: CPU)"""
    num_workers: int = 0
    """processes that collect (0: only this one, which suits GPU and MuJoCo environments)"""
    env_threads: int = 0
    """threads that step MuJoCo on a CPU (0: one per core, shared among the workers)"""
    torch_threads: int = 0
    """threads of torch on a CPU, at most (0: up to 8 if a measurement finds them faster)"""
    compile: Literal["auto", "none", "default", "onednn", "graphs"] = "auto"
    """auto: CUDA graphs on a GPU; in a long run on a CPU torch.compile (onednn: by its products)"""


@dataclasses.dataclass
class ReplayArgs(RunArgs):
    """Further arguments, of the scripts that have a replay buffer."""

    save_replay: bool = True
    """save the replay buffer in the checkpoint; otherwise a resumed run fills a new one"""
    log_every: int = 1000
    """steps between entries of the losses in metrics.csv"""


@dataclasses.dataclass
class TransitionArgs(ReplayArgs):
    """Further arguments, of the scripts that sample single transitions from the buffer."""

    n_step: int = 1
    """n of n-step returns: the number of rewards that are summed before bootstrapping"""
    prioritized: bool = False
    """sample in proportion to the TD error (Schaul 2016) instead of uniformly"""


# Smallest and largest value of a flag, where a script has no LIMITS of its own for it.
RUN_LIMITS = {
    **dict.fromkeys("total_steps checkpoint_every log_every num_steps n_step".split(), (1, None)),
    **dict.fromkeys("batch_size minibatch_size buffer_size updates epochs".split(), (1, None)),
    **dict.fromkeys("policy_delay hidden_size critic_hidden_size".split(), (1, None)),
    **dict.fromkeys("gamma gae_lambda tau final_epsilon exploration_fraction".split(), (0, 1)),
    **dict.fromkeys("num_workers env_threads torch_threads".split(), (0, 1024)),
    **{"num_envs": (0, 2**20), "seed": (0, 2**31 - 1), "eval_episodes": (1, 10_000)},
    **{"max_grad_norm": (1e-9, None), "utd_ratio": (0, 1000)},
}

SHARED = "num_envs", "num_workers", "minibatch_size", "batch_size"  # N learners divide them

# What a run replaces by its choice for the machine: --resume takes these beside what was chosen.
AUTO = dict(device="auto", env_device="same", num_envs=0, torch_threads=0, compile="auto")
AnyArgs = TypeVar("AnyArgs", bound=RunArgs)  # RunArgs, or the Args of a script


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_args(args: Any, limits: dict[str, tuple]) -> None:
    """UserError for a number outside of its (smallest, largest) value, by default (0, None)."""
    for name, value in vars(args).items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        low, high = limits.get(name, (0, None))
        if not (low is None or value >= low) or not (high is None or value <= high):
            allowed = f"at least {low}" if high is None else f"from {low} to {high}"
            raise UserError(f"{flag(name)} is {value}; allowed is {allowed}")
        bits, largest = (32, 3e38) if isinstance(value, float) else (64, 2**63 - 1)
        if not abs(value) <= largest:
            raise UserError(f"{flag(name)} is {value}; it must be a finite number of {bits} bits")


def resolve(args: AnyArgs, script: str, limits: dict[str, tuple]) -> AnyArgs:
    """The arguments checked, with what depends on the machine decided."""
    args, gpu = dataclasses.replace(args), torch.cuda.is_available()
    for field in dataclasses.fields(args):  # not only typed: from a program, or from args.json
        value, kind, good = getattr(args, field.name), field.type, True
        if typing.get_origin(kind) is Literal:
            good = value in typing.get_args(kind)
        elif kind in (bool, int, float, str):  # NumPy's numbers, a Path
            try:
                setattr(args, field.name, kind(value))
                same = isinstance(value, str | os.PathLike) if kind is str else kind(value) == value
                good = same or kind is float
            except (ValueError, TypeError, OverflowError):
                good = False
        if not good:
            allowed = ", ".join(map(str, typing.get_args(kind))) or f"one of type {kind.__name__}"
            raise UserError(f"{flag(field.name)} is {value!r}; allowed is {allowed}")
    check_args(args, limits)
    if args.total_steps < (warmup := getattr(args, "warmup_steps", 0)):
        least = f"at least --warmup-steps, {warmup}, before which nothing is learned"
        raise UserError(f"--total-steps is {args.total_steps}; allowed is {least}")
    if (size := getattr(args, "batch_size", 0)) > getattr(args, "buffer_size", size):
        raise UserError(f"--batch-size is {size}; allowed is at most --buffer-size, which is less")
    if args.device not in ("cpu", "auto") and not gpu:
        raise UserError("--device is cuda, but torch finds none; use cpu, on --resume in args.json")
    if args.device == "auto":
        args.device = "cuda" if gpu else "cpu"
    if not args.num_envs:
        here = (args.device, args.env_device, args.num_workers) == ("cuda", "same", 0)
        here &= not hasattr(args, "buffer_size")  # which, as `updates`, is meant for few
        enough = args.total_steps >= 100 * 4096 * getattr(args, "num_steps", 1)
        many = here and enough and vec_envs.simulates_on_gpu(args.env, 4096)
        args.num_envs = 4096 if many else 64
    if args.env_device == "same" and not vec_envs.simulates_on_gpu(args.env, args.num_envs):
        args.env_device = "cpu"
    if args.num_workers > args.num_envs:
        raise UserError(f"--num-workers is {args.num_workers}, but --num-envs is {args.num_envs}")
    env, stamp = re.sub("[:/]", "-", args.env), time.strftime("%Y%m%d-%H%M%S")
    args.run_dir = args.run_dir or f"runs/{env}__{script}__{args.seed}__{stamp}"
    return args


def check_actions(env: str, space: gymnasium.Space, actions: str, multi_agent: bool) -> None:
    """UserError where a script cannot choose actions from a space."""
    discrete = isinstance(space, gymnasium.spaces.Discrete)
    if actions == "discrete" and not discrete:
        fit = "mappo.py, maddpg.py and matd3.py" if multi_agent else "sac.py, td3.py and ppo.py"
        raise UserError(f"--env {env} has continuous actions; {fit} fit it")
    if actions == "bounded" and discrete:
        raise UserError(f"--env {env} has discrete actions; dqn.py, ppo.py and a2c.py fit it")
    if not discrete:
        if not (torch.tensor(space.high) - torch.tensor(space.low)).float().isfinite().all():
            what = "actions without bounds, or with bounds too far apart for float32"
            raise UserError(f"--env {env} has {what}; change its action space")


def learners_share(args: AnyArgs, rank: int, learners: int, limits: dict[str, tuple]) -> AnyArgs:
    """The arguments of one of several learners: its part of SHARED, a seed, threads of its own."""
    if learners == 1:
        return args
    if args.pause_at:
        raise UserError(f"--pause-at is {args.pause_at}, but {learners} learners cannot pause")
    args = dataclasses.replace(args)
    for name in (name for name in SHARED if hasattr(args, name)):
        value = getattr(args, name)
        low = max(limits[name][0], int(name == "num_envs"))
        if value % learners or value // learners < low:
            several = f"a multiple of {learners}" + f", {low * learners} or more" * (low > 1)
            raise UserError(f"{flag(name)} is {value}; {learners} learners can share {several}")
        setattr(args, name, value // learners)
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    args.env_threads = max(1, (args.env_threads or available_cores()) // here)
    args.seed = (args.seed + 15_485_863 * rank) % 2**31
    return args


def saved_args(given: AnyArgs, script: str) -> AnyArgs:
    """The arguments in the folder given.resume; --pause-at and --total-steps may be given anew."""
    if not os.path.exists(path := Path(given.resume) / "args.json"):
        raise UserError(f"--resume {given.resume}: there is no run in this folder (no {path.name})")
    try:
        content = json.loads(path.read_text())
        saved = type(given)(**content["args"]) if content["script"] == script else given
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--resume {given.resume}: {path} cannot be read ({error})") from None
    if (made_by := content["script"]) != script:
        raise UserError(f"--resume {given.resume}: that run is of {made_by}.py, not {script}.py")
    vec_envs.refuse_program_in(given.resume, saved.env)
    typed = {re.sub("^--no-", "--", x.partition("=")[0].replace("_", "-")) for x in given.typed}
    again = {**AUTO, "run_dir": given.resume, "resume": given.resume}
    for field in dataclasses.fields(given):
        name, value, before = field.name, getattr(given, field.name), getattr(saved, field.name)
        unsaid = value == field.default and flag(name) not in typed
        if name == "pause_at" or unsaid or value in (before, again.get(name, before)):
            continue
        if name != "total_steps" or value < before:
            raise UserError(f"{flag(name)} is {value}, but a resumed run keeps its own ({before})")
        saved.total_steps = value
        jumps = "schedules, where the script has any (learning rate, ε, β), jump"
        tell(f"--total-steps was {before} and is now {value}: {jumps}.")
    return dataclasses.replace(saved, run_dir=given.resume, pause_at=given.pause_at)


def parse(args_class: type[AnyArgs], tuned: dict[str, dict[str, Any]]) -> AnyArgs:
    """The command line, with the defaults that a script's table `tuned` has for its --env.

    Flags that are given win over the table. A resumed run takes its arguments from its folder.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--env", nargs="?", default=args_class.env)
    first.add_argument("--resume", nargs="?")
    given, _ = first.parse_known_args()
    own = {} if given.resume else tuned.get(vec_envs.base_name(given.env or ""), {})
    sys.excepthook = say_in_one_sentence
    text = f"{args_class.__doc__} The defaults shown are those for --env {given.env}."
    args = read_flags(args_class, sys.argv[1:], default=args_class(**own), description=text)
    args.typed = sys.argv[1:]
    return args


def read_flags(args_class: type, words: list[str], **options: Any) -> Any:
    """tyro.cli, where a whole number may be typed as 2.5e6, too."""
    used, beside = Path(__file__).parent, Path(sys.argv[0]).resolve().with_name("worker_learner")
    if beside.is_dir() and beside != used.resolve():  # of another clone, which is installed
        text = f"the script uses {used}, not the folder beside it; PYTHONPATH=. would change that."
        print(f"Warning: {text}", file=sys.stderr)  # `play.py --json` prints nothing else
    whole = {flag(field.name) for field in dataclasses.fields(args_class) if field.type is int}

    def plain(before: str, word: str) -> str:
        name, equals, value = word.rpartition("=")
        known = (name or before).replace("_", "-") in whole
        number = known and re.fullmatch(r"\d+\.?\d*e\+?\d\d?", value)
        return f"{name}{equals}{Decimal(value):f}" if number else word

    return tyro.cli(args_class, args=list(map(plain, ["", *words], words)), **options)


def say_in_one_sentence(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """sys.excepthook of a script: no traceback for what its user can mend, or did."""
    if issubclass(kind, UserError | ContractError):
        print(error, file=sys.stderr)
    elif kind is KeyboardInterrupt:  # while it trains, Run answers
        print("Stopped", file=sys.stderr, flush=True)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell must see that it was Ctrl-C
        os.kill(os.getpid(), signal.SIGINT)
    elif kind is BrokenPipeError and hung_up(1):  # --help | head; not an environment's own pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    elif re.search("MemoryError|allocate memory|Storage size", repr(error)):  # of CUDA or Python
        asked = re.search(r"ried to allocate ([\d.]+ \w+)", str(error))
        needed = f" for {asked[1]} more" if asked else ""
        advice = "choose smaller sizes: networks, batches, --num-envs, --num-steps"
        tqdm.write(f"Not enough memory{needed}; {advice}", file=sys.stderr)  # below the bar
    else:
        sys.__excepthook__(kind, error, trace)


def hung_up(file: Any) -> bool:
    """Whether who is at the other end of a pipe has closed it."""
    poll = select.poll()
    poll.register(file, select.POLLHUP)  # Linux reports it always, macOS if asked
    return bool(poll.poll(0))


def tell(text: str) -> None:
    """Print a line, on learner 0."""
    if not torch.distributed.is_torchelastic_launched() or os.environ["RANK"] == "0":
        to_terminal(tqdm.write, text)


def warn(text: str) -> None:
    """Print a warning, on any learner."""
    to_terminal(tqdm.write, f"Warning: {text}")


def to_terminal(function: Callable, *arguments: Any) -> None:
    """Call what prints. A full disk is no reason to stop, nor a `| tee log` ended by Ctrl-C."""
    with contextlib.suppress(OSError):
        function(*arguments)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def command_line(*words: str) -> str:
    """A command for a shell in this folder, by the Python that runs now."""
    found = shutil.which("python")
    here = found is not None and Path(found).parent == Path(sys.executable).parent
    return shlex.join(["python" if here else os.path.relpath(sys.executable), *words])
