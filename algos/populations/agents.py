"""What an agent of a population is: its record, its run folder, its commands; the command line."""

import dataclasses
import importlib.util
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
import tyro

import vec_envs
from algos.worker_learner import files
from algos.worker_learner.arguments import (
    RUN_LIMITS,
    UserError,
    check_args,
    flag,
    read_flags,
    say_in_one_sentence,
)

ALGOS = Path(__file__).parent.parent
PROGRAMS = "play", "generations", "tournament"  # of ALGOS, that train nothing themselves
OURS = "--env", "--total-steps", "--seed", "--run-dir", "--resume", "--pause-at"
SCORE = 2**30  # first seed of the episodes that score an agent; training has seeds below 2²⁹
FRESH = 3 * 2**29  # first seed of those that score the winner again
STOP = signal.SIGINT, signal.SIGTERM
asked: list[int] = []  # to stop, by which signal
SHAPES = "hidden_size", "buffer_size", "num_envs", "ensemble_size", "mixing_size", "hterm_memory"


@dataclass
class PopulationArgs:
    """The arguments of both programs. After -- come flags for the scripts: -- --num-envs 32"""

    env: str = "Hopper"
    """environment, as in the scripts"""
    total_steps: int = 1_000_000
    """environment steps of an agent's whole training, over which its schedules extend"""
    period: int = 0
    """steps of a segment, after which agents are scored and selected (0: a tenth of
    --total-steps, at least one rollout)"""
    agents: int = 8
    """number of agents, which are trained side by side as far as there is room"""
    root: str = ""
    """folder of the population; the same command continues it (empty: runs/{program}__{env})"""
    eval_episodes: int = 20
    """episodes that score an agent, with seeds that no agent was trained on"""
    perturb: list[str] = field(default_factory=lambda: ["learning_rate"])
    """hyper-parameters that differ by agent, and change by 0.8 or 1.25 when an agent is copied"""
    same_hyperparameters: bool = False
    """change no hyper-parameters; only select agents"""
    seed: int = 0
    """seed of everything that is random"""
    cluster: str = "none"
    """where segments run: none (this machine), auto or an address (a Ray cluster)"""
    cpus: float = 1.0
    """cores, and so threads, of one run; with 0.5 two runs share a core. If the same command goes
    on with another number, agents that have begun keep their threads"""
    gpus: float = 0.0
    """GPUs of one run; fractions are allowed, as 0.5 (0: it trains on the CPU)"""
    replay: str = ""
    """train the segments that led to the agent with this number again, in {root}/replay/"""


LIMITS = {
    **dict.fromkeys(("total_steps", "agents", "slow", "k"), (1, None)),
    **dict.fromkeys(("survivors", "fresh"), (0, 1)),
    **{"seed": (0, 2**31 - 1), "cpus": (0.01, None), "gpus": (0, 1), "eval_episodes": (2, 10_000)},
    "fuse": (1, 100),
}
AnyArgs = TypeVar("AnyArgs", bound=PopulationArgs)  # the Args of one of the programs


@dataclass
class Agent:
    """One segment and what came of it: a line of lineage.csv."""

    id: str
    parent: str  # "": it begins its training
    script: str
    flags: dict[str, float]  # the hyper-parameters that differ
    seed: int
    pause_at: int  # where its segment ends
    fuse: int = 1  # runs with different seeds, averaged at its end
    generation: int = 0
    member: int = 0
    commit: str = ""
    step: int = 0
    score: float = math.nan  # mean return of its episodes
    error: float = math.nan  # standard error of that mean
    episodes: int = 0
    published: float = 0.0  # time


def is_better(one: Agent, other: Agent) -> bool:
    """Whether the gap between two scores is larger than the standard error of that gap."""
    return one.score - other.score > math.hypot(one.error, other.error)


def read_agent(path: Path, name: str, known: dict[str, dict]) -> Agent:  # known: flags of scripts
    """What `save_agent` wrote; Value- or TypeError if damaged or of other name, script or flags."""
    agent = Agent(**json.loads(path.read_text()))
    if (agent.id, set(agent.flags)) != (name, set(known.get(agent.script, [None]))):
        raise ValueError("not of this population")
    return agent


def save_agent(agent: Agent, path: Path) -> None:
    files.save(json.dumps(dataclasses.asdict(agent), indent=2) + "\n", path)


# Run folders.


def descend(parent: Path, folder: Path, flags: dict[str, float], seed: int) -> None:
    """Make a run folder that goes on where `parent` ended, with other flags and random numbers.

    The environments start new episodes. A changed learning rate is put into the optimizers too.
    Raises ValueError if the parent's checkpoint is damaged.
    """
    content, wrong = files.load_checked(parent / "checkpoint.pt")
    if content is None:
        raise ValueError(f"{parent / 'checkpoint.pt'} is damaged ({wrong})")
    started = json.loads((parent / "args.json").read_text())
    if "learning_rate" in flags:
        ratio = flags["learning_rate"] / (started["args"]["learning_rate"] or 1)
        for entry in content.values():
            for group in entry.get("param_groups", ()) if isinstance(entry, dict) else ():
                group["lr"] *= ratio
    random = [torch.Generator().manual_seed(seed).get_state()]
    content["run"] |= {"random": random, "best_return": -math.inf}  # best.pt is not copied
    content |= {"workers": {}, "pending_evaluations": []}
    started["args"] |= {**flags, "seed": seed, "run_dir": str(folder), "pause_at": 0}
    left = shutil.ignore_patterns("checkpoint*", "best.pt", "last.pt", "agent.json", "*.png")
    temporary = _copy(parent, folder, left)
    files.save(content, temporary / "checkpoint.pt")
    files.save(json.dumps(started, indent=2) + "\n", temporary / "args.json")
    temporary.rename(folder)


def fuse(runs: list[Path], folder: Path) -> str:
    """A run folder like the first of `runs`, with the mean of networks and optimizer moments.

    Of the first run alone: counters, random numbers, environments, replay buffer and memory, of
    which there is no mean, and what is not a number with a fraction. Returns what is wrong, or "".
    """
    contents = [files.load_checked(run / "checkpoint.pt")[0] for run in runs]
    policies = [files.load_checked(run / "last.pt")[0] for run in runs]
    if any(content is None for content in (*contents, *policies)):
        return f"a checkpoint in {runs[0].parent} is damaged"
    averaged = [k for k in contents[0] if k in ("agent", "target") or k.endswith("optimizer")]
    for key in averaged:
        contents[0][key] = _mean([content[key] for content in contents])
    policies[0]["agent"] = _mean([policy["agent"] for policy in policies])
    temporary = _copy(runs[0], folder, shutil.ignore_patterns("*.pt"))
    files.save(contents[0], temporary / "checkpoint.pt")
    files.save(policies[0], temporary / "last.pt")
    temporary.rename(folder)
    return ""


def _copy(run: Path, folder: Path, left: Any) -> Path:
    """A copy without what is `left`, beside `folder`, whose name it gets when it is complete."""
    temporary = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(run, temporary, ignore=left)
    return temporary


def _mean(things: list[Any]) -> Any:
    first = things[0]
    if isinstance(first, dict):
        return {key: _mean([thing[key] for thing in things]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_mean(list(entries)) for entries in zip(*things, strict=True))
    if isinstance(first, torch.Tensor) and first.is_floating_point():
        return torch.stack([thing.double() for thing in things]).mean(0).to(first.dtype)
    if isinstance(first, float) and any(thing != first for thing in things):
        return math.fsum(things) / len(things)  # a learning rate that adapts itself
    return first


def scaled(value: float, factor: float, limits: tuple | None) -> float:
    """A hyper-parameter times a factor, within its limits; of γ and λ their distance from 1."""
    low, high = limits or (0, None)
    near_one = high == 1 and value > 0.5  # not τ and ε
    new = factor * (1 - value if near_one else value)
    step = math.copysign(max(1, abs(new - value)), new - value)  # of an integer 1 at least
    new = value + step if isinstance(value, int) else float(f"{new:.4g}")
    new = round(1 - new, 12) if near_one else new
    new = new if high is None else min(high, new)
    new = new if low is None else max(low, new)
    return round(new) if isinstance(value, int) else new


# The commands of a segment, and what they print.


def training(agent: Agent, args: PopulationArgs, words: list[str], run: Path, seed: int) -> tuple:
    """The command that trains an agent in a run folder; one that is there already goes on."""
    command = [sys.executable, str(script_path(agent.script)), "--run-dir", str(run)]
    command += ["--pause-at", str(agent.pause_at)]
    if not agent.parent:  # later segments have these from args.json
        threads = str(max(1, int(args.cpus)))
        command += ["--env", args.env, "--total-steps", str(args.total_steps)]
        command += ["--env-threads", threads, "--torch-threads", threads]
        command += ["--eval-every", "0", "--eval-episodes", "1"]  # play.py scores it instead
        command += ["--seed", str(seed), *words]
        command += [word for name, x in agent.flags.items() for word in (flag(name), str(x))]
    return command, f"{run}.out"


def scoring(agent: Agent, run: Path, folder: Path, first_seed: int, episodes: int) -> tuple:
    """The command that writes score.json into a folder: play.py, which is beside the script."""
    script = script_path(agent.script).with_name("play.py")
    words = [sys.executable, str(script), str(run), "--checkpoint", "last", "--json"]
    words += ["--episodes", str(episodes), "--seed", str(first_seed + agent.seed)]
    return words, str(folder / "score.json")


def read_score(path: Path) -> dict[str, Any] | None:
    """Mean return, its standard error, episodes and step; None if a return is not finite."""
    try:
        content = json.loads(path.read_text().splitlines()[-1])  # an environment may print, too
    except (ValueError, IndexError):
        return None
    returns = content["returns"]
    if not all(map(math.isfinite, returns)):
        return None
    error = statistics.stdev(returns) / math.sqrt(len(returns))
    facts = {"score": statistics.fmean(returns), "error": error, "episodes": len(returns)}
    return facts | {"step": content["step"]}


def last_line(folder: Path) -> str:
    """Of the log that was written last."""
    logs = sorted(folder.glob("*.log"), key=os.path.getmtime)
    lines = logs[-1].read_text(errors="replace").strip().splitlines() if logs else []
    return lines[-1][:300] if lines else ""


def commit() -> str:
    """The commit of this tree, marked where files differ from it; empty without git."""
    command = ["git", "-C", ALGOS, "describe", "--always", "--abbrev=10", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


# Scripts and the command line.


def parse(args_class: type[AnyArgs]) -> tuple[AnyArgs, list[str]]:
    """The command line before --, and the words after it, which are flags for the scripts."""
    sys.excepthook = say_in_one_sentence
    for number in STOP:
        signal.signal(number, lambda number, _: asked.append(number))
    words = [*sys.argv[1:], "--"]
    at = words.index("--")
    args = read_flags(args_class, words[:at], config=(tyro.conf.FlagCreatePairsOff,))
    return args, words[at + 1 : -1]


def stop_if_asked() -> None:
    """KeyboardInterrupt after SIGINT or SIGTERM; where they come, subprocess may have a lock."""
    if asked:
        asked.clear()
        for number in STOP:  # another one ends the program at once
            signal.signal(number, signal.default_int_handler)
        raise KeyboardInterrupt


def script_path(algo: str) -> Path:
    """algos/{algo}.py, or the path of a script."""
    path = Path(algo) if algo.endswith(".py") else ALGOS / f"{algo}.py"
    if not path.is_file() or path.stem in PROGRAMS:
        raise UserError(f"the algorithm is {algo}, but {path} is not a script that trains")
    if not path.with_name("play.py").is_file():
        raise UserError(f"{path} needs play.py beside it, which scores its agents")
    return path.resolve()


def load_script(algo: str) -> ModuleType:
    path = script_path(algo)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # for dataclasses
    spec.loader.exec_module(module)
    return module


def settings(algos: list[str], args: PopulationArgs, words: list[str]) -> tuple[dict, int]:
    """{algo: its hyper-parameters}, and the steps of a segment, at least a rollout."""
    if not algos:
        raise UserError("--algos is empty; name at least one script")
    found = {algo: hyperparameters(algo, args, words) for algo in algos}
    least = max(rollout for _, rollout in found.values())
    if 0 < args.period < least:
        raise UserError(f"--period is {args.period}, but a script collects {least} steps at a time")
    known = {algo: flags for algo, (flags, _) in found.items()}
    return known, args.period or max(args.total_steps // 10, least)


def hyperparameters(
    algo: str, args: PopulationArgs, words: list[str]
) -> tuple[dict[str, tuple[float, tuple]], int]:
    """{what differs by agent: (the first agent's value, its limits)}, and the steps of a rollout.

    The value is the script's own for --env, unless `words` have another. Words that the script
    does not take end this program as they would end the script.
    """
    script = load_script(algo)
    if not all(hasattr(script, name) for name in ("Args", "TUNED")):
        raise UserError(f"the algorithm is {algo}, which has no Args and TUNED to train by")
    limits = {**RUN_LIMITS, **getattr(script, "LIMITS", {})}
    defaults = script.Args(**script.TUNED.get(vec_envs.base_name(args.env), {}))
    given = read_flags(script.Args, words, prog=f"{script.__name__}.py", default=defaults)
    check_args(given, limits)
    if refused := [word for word in words if word.split("=")[0].replace("_", "-") in OURS]:
        raise UserError(f"{refused[0]} stands after --, but the population sets it itself")
    found = {}
    for name in [name.replace("-", "_") for name in args.perturb if not args.same_hyperparameters]:
        value = getattr(given, name, None)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"--perturb is {name}, but {script.__name__}.py has no such number")
        fixed = name.endswith(SHAPES) or name.startswith("initial_")  # once a network is made
        if flag(name) in OURS or fixed or not value:
            raise UserError(f"--perturb is {name}, here {value}, which cannot differ by agent")
        found[name] = value, limits.get(name, (0, None))
    rollout = getattr(given, "num_steps", 1) * (getattr(given, "num_envs", 1) or 64)
    return found, min(rollout, args.total_steps)
