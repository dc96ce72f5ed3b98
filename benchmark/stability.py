"""Does the H-term make training more reliable? Many seeds of several arms, and the statistics.

    pip install -e ".[benchmark]"
    python benchmark/stability.py --env Hopper --arms base hterm --seeds 20
    python benchmark/stability.py --table          # only analyse runs/study/runs.csv.gz
    python benchmark/stability.py --beside hterm   # the same with another arm than the base, shown
    python benchmark/stability.py --only-seeds 4000 4009    # the same of some seeds, shown

The first trains what is missing, two single-threaded runs at a time, and appends each to the file
of the study, runs.csv.gz: a finished run is never repeated, one that was killed goes on. Then both
write beside that file seeds.csv (a row a run), table.csv (a row an arm), across.csv (the arms over
several environments) and a figure for each environment. All arms have the same seeds. An arm is a
command, see ARMS; others can be given as "NAME=SCRIPT FLAGS":

    python benchmark/stability.py --arms base "gae=ppo --gae-lambda 0.98" mine=my_ppo --seeds 8

Of a run count: `final`, the mean deterministic return over the last 10 % of its samples; `area`,
the same over all of them; `drawdown`, the deepest fall below an earlier evaluation. Across runs:
the ratio of the variances of `final` to the base's, with a bootstrap interval and a permutation
p-value; the interquartile mean (IQM), the mean of the worst quarter, and the probability that a
run of the arm beats one of the base (Agarwal 2021, arXiv:2108.13264). Intervals are 95 %, and all
of it is scipy's; rliable computes the same IQM but brings pandas, seaborn and arch.
"""

import csv
import fcntl
import gzip
import io
import itertools
import math
import os
import shlex
import sys
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
import tyro
from returns import (
    OURS,
    ROOT,
    append,
    begun_at,
    commit,
    evaluations,
    fewer_colours,
    finish,
    run_all,
    spelled_out,
)
from scipy import integrate, stats

from algos.worker_learner.arguments import say_in_one_sentence

# name -> script, and its flags; of algos/, but for the control
ARMS = {"base": "ppo", "hterm": "ppo_hterm", "control": "hterm_control"}
# Rows of a table, `memory` to `sb3` of arms that only commit 642c06a can train; others follow by
# name.
ORDER = ["base", "hterm", "control", "memory", "compute", "chain", "published", "rate", "logstd"]
ORDER += ["sb3", "ddpg", "ddpg_hterm", "td3", "td3_hterm", "sac", "sac_hterm"]
# what an arm is compared with, if not with `base`
BASE = {
    f"{base}_{form}": base
    for base in ("ddpg", "td3", "sac")
    for form in ("hterm", "stale", "energy")
}
RUNS = "runs.csv.gz"
COLUMNS = (
    *("env", "steps", "arm", "seed", "step", "seconds", "return", "return_std", "log_std"),
    *("parallel", "commit", "command"),
)


@dataclass
class Options:
    """Train several arms with the same seeds, and compare their spread."""

    env: str = "Hopper"
    """environment"""
    arms: list[str] = field(default_factory=lambda: ["base", "hterm"])
    """names in ARMS, or "NAME=SCRIPT FLAGS" """
    seeds: int = 20
    """how many seeds an arm has"""
    first_seed: int = 4000
    """the first of them; those of another development or confirmation set begin elsewhere"""
    total_steps: int = 1_000_000
    """environment steps of a run"""
    evaluations: int = 25
    """evaluations of a run, equally spaced"""
    eval_episodes: int = 10
    """episodes of each"""
    parallel: int = 2
    """runs at a time"""
    runs_dir: Path = ROOT / "runs" / "hterm"
    """where the run folders are"""
    results: Path = ROOT / "runs" / "study"
    """folder of the study: its runs, tables and figures"""
    table: bool = False
    """train nothing: the tables and figures of what there is"""
    beside: str = ""
    """train nothing and print the tables with this arm in the place of the base"""
    only_seeds: tuple[int, int] | None = None
    """train nothing and print the tables of these seeds only: the first and the last"""


# The file of a study: one gzip member a run, so that appending a run leaves all others as they are.


def run_name(about: dict) -> str:
    env = about["env"].replace("/", "-").replace(":", "-")
    return f"{env}__{about['steps']}__{about['arm']}__{about['seed']}"


def locked_runs(file: BinaryIO) -> dict[str, list[dict[str, str]]]:
    """Name -> rows of every run in an open file, which stays locked until it is closed.

    An append that was killed leaves an incomplete last member, which is removed. SystemExit if a
    member is damaged otherwise, since there may be runs after it.
    """
    fcntl.flock(file, fcntl.LOCK_EX)
    file.seek(0)
    data, members, end = file.read(), [], 0
    while end < len(data):
        member = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)  # 16: with gzip's header
        try:
            members.append(member.decompress(data[end:]))
        except zlib.error as error:
            raise SystemExit(
                f"{file.name} is damaged after byte {end} ({error}): take it from git, or keep the "
                f"runs before that byte with truncate -s {end}"
            ) from None
        if not member.eof:
            print(f"{file.name}: the last run was written only in part and is removed", flush=True)
            members.pop()
            file.truncate(end)
            break
        end = len(data) - len(member.unused_data)
    runs: dict[str, list[dict[str, str]]] = {}
    for row in csv.DictReader(io.StringIO(b"".join(members).decode(), newline="")):
        runs.setdefault(run_name(row), []).append(row)
    return dict(sorted(runs.items()))


def read_runs(path: Path) -> dict[str, list[dict[str, str]]]:
    if not path.exists():
        return {}
    with open(path, "r+b") as file:
        return locked_runs(file)


def append_run(path: Path, rows: list[dict]) -> None:
    """Append a run in one write, unless another process has done it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        runs = locked_runs(file)
        if run_name(rows[0]) in runs:
            return
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        if not runs:
            writer.writeheader()
        writer.writerows(rows)
        file.write(gzip.compress(text.getvalue().encode(), mtime=0))


# Training: an arm's command, run to its end, becomes the rows of a run.


def script_of(arm: str) -> tuple[str, str, list[str]]:
    """An arm's name, script and flags; SystemExit if there is none."""
    name, _, words = arm.partition("=")
    words = words or ARMS.get(name, "")
    if not words or not name.replace("-", "").replace("_", "").isalnum():
        raise SystemExit(
            f"--arms has {arm!r}; allowed is {', '.join(ARMS)} or 'NAME=SCRIPT FLAGS', "
            "the name of letters, digits, - and _"
        )
    try:
        script, *flags = shlex.split(words)
    except ValueError as error:  # quotes that do not end, or nothing
        raise SystemExit(f"--arms has {arm!r}, which cannot be read: {error}") from None
    folder = "benchmark" if script in ("hterm_control", "hterm_forms") else "algos"
    if not (ROOT / folder / f"{script}.py").exists():
        raise SystemExit(f"--arms has {name}, but there is no {folder}/{script}.py")
    flags = spelled_out(flags)
    if ours := OURS.union(("--total-steps", "--eval-every", "--device")).intersection(flags):
        raise SystemExit(f"--arms has {name} with {ours.pop()}, which all arms have in common")
    return name, f"{folder}/{script}.py", flags


def arm_command(arm: str, options: Options) -> tuple[str, list[str]]:
    """An arm's name and its command, but for the seed."""
    name, script, flags = script_of(arm)
    command = ["python", script, "--env", options.env]
    command += ["--total-steps", str(options.total_steps)]
    command += ["--eval-every", str(max(1, options.total_steps // options.evaluations))]
    command += ["--eval-episodes", str(options.eval_episodes)]
    command += ["--env-threads", "1", "--device", "cpu"]
    command += ["--torch-threads", "1"] * ("--torch-threads" not in flags)
    return name, command + flags


def is_finished(runs: dict, path: Path, name: str, command: list[str]) -> bool:
    """Whether a run is in the file of the study; SystemExit if it is there of another command."""
    if name not in runs:
        return False
    if (before := runs[name][0]["command"]) != shlex.join(command):
        raise SystemExit(
            f"{path} has {name} of another command, {before}; "
            "give the arm another name or the study another folder (--results)"
        )
    return True


def check_commands(options: Options, jobs: list[tuple], version: str) -> None:
    """Before hours of training: SystemExit where a finished run is of another command.

    Says so, too, if it is of another commit: it is not trained again.
    """
    runs, older = read_runs(path := options.results / RUNS), set()
    for _, arm, command, seed, _ in jobs:
        about = {"env": options.env, "steps": options.total_steps, "arm": arm, "seed": seed}
        if is_finished(runs, path, name := run_name(about), [*command, "--seed", str(seed)]):
            older.add(runs[name][0]["commit"])
    if older := sorted(older - {version}):
        print(f"Not repeated: finished runs of commit {', '.join(older)} (this is {version}).")


def train(options: Options, arm: str, command: list[str], seed: int, version: str) -> None:
    """One run to its end, and its rows: one an evaluation."""
    about = {"env": options.env, "steps": options.total_steps, "arm": arm, "seed": seed}
    name, path = run_name(about), options.results / RUNS
    command = [*command, "--seed", str(seed)]
    if is_finished(read_runs(path), path, name, command):
        return
    run_dir = options.runs_dir / name
    if not finish(command, run_dir, version):
        return
    noise, version = log_std(run_dir), begun_at(run_dir, command)
    rows = [
        about
        | {"step": step, "seconds": round(entry["seconds"], 1)}
        | {"return": round(entry["episodic_return"], 2)}
        | {"return_std": round(entry["episodic_return_std"], 2)}
        | {"log_std": noise(step), "parallel": options.parallel, "commit": version}
        | {"command": shlex.join(command)}
        for step, entry in sorted(evaluations(run_dir).items())
    ]
    append_run(path, rows)
    print(f"{name}: {rows[-1]['return']}", flush=True)


def log_std(run_dir: Path) -> Callable[[int], float | str]:
    """How noisy a run of the PPO family was: step -> mean log σ, "" for other scripts.

    From the logged entropy of its Gaussian, Σ log σ + d ½ log 2πe.
    """
    if not (run_dir / "last.pt").exists():
        return lambda step: ""
    saved = torch.load(run_dir / "last.pt", weights_only=True, map_location="cpu")
    tensors = saved.get("agent", {}).items()
    act_dims = [len(tensor) for name, tensor in tensors if name.split(".")[-1] == "log_std"]
    with open(run_dir / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["tag"] == "losses/entropy"]
    if not (act_dims and rows):
        return lambda step: ""
    steps, entropies = zip(*((int(row["step"]), float(row["value"])) for row in rows), strict=True)
    means = np.array(entropies) / act_dims[0] - 0.5 * math.log(2 * math.pi * math.e)
    return lambda step: round(float(np.interp(step, steps, means)), 3)


def seeds(options: Options) -> range:
    return range(options.first_seed, options.first_seed + options.seeds)


# Statistics. Samples are one number a run, along the last axis, so that scipy resamples them fast.


def variance(x: np.ndarray, axis: int = -1) -> np.ndarray:
    """Exactly 0 where all are equal, which np.var is not: the mean of equal numbers is rounded."""
    return np.where(np.ptp(x, axis=axis) == 0, 0.0, np.var(x, axis=axis, ddof=1))


def log_variance_ratio(x: np.ndarray, y: np.ndarray, axis: int = -1) -> np.ndarray:
    """log( Var x / Var y ): its distribution is less skewed than the ratio's."""
    return np.log(variance(x, axis)) - np.log(variance(y, axis))


def iqm(x: np.ndarray, axis: int = -1) -> np.ndarray:
    """Interquartile mean: without the lowest and highest quarter (whole runs, rounded down)."""
    return stats.trim_mean(x, 0.25, axis=axis)


def iqm_difference(x: np.ndarray, y: np.ndarray, axis: int = -1) -> np.ndarray:
    return iqm(x, axis) - iqm(y, axis)


def worst_quarter(x: np.ndarray) -> float:
    """Mean of the lowest quarter of the runs, rounded up to a whole run."""
    return float(np.mean(np.sort(x)[: math.ceil(len(x) / 4)]))


def improvement(x: np.ndarray, y: np.ndarray, axis: int = -1) -> np.ndarray:
    """P( X > Y ) + ½ P( X = Y ), of all pairs; axis as numpy's."""
    x, y = np.moveaxis(x, axis, -1)[..., :, None], np.moveaxis(y, axis, -1)[..., None, :]
    return ((x > y) + 0.5 * (x == y)).mean((-2, -1))


def interval(
    samples: tuple, statistic: Callable, method: str, resamples: int = 9999
) -> tuple[float, float]:
    """95 % bootstrap interval, each sample resampled by itself (stratified); NaN if undefined."""
    if min(map(len, samples)) < 3:
        return math.nan, math.nan
    with warnings.catch_warnings():  # identical runs have no variance, and no interval
        warnings.simplefilter("ignore")
        found = stats.bootstrap(
            samples, statistic, method=method, n_resamples=resamples, batch=1000,
            rng=np.random.default_rng(0),
        )  # fmt: skip
    return tuple(map(float, found.confidence_interval))


def variance_p(x: np.ndarray, y: np.ndarray, resamples: int = 9999) -> float:
    """Permutation test of equal variance: runs change arms after their arm's median is taken off.

    (With the mean it errs too often when ten runs of two kinds are compared.)
    """
    if min(len(x), len(y)) < 3 or variance(x) == 0 or variance(y) == 0:
        return math.nan
    samples, rng = (x - np.median(x), y - np.median(y)), np.random.default_rng(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(
            stats.permutation_test(
                samples, log_variance_ratio, vectorized=True, n_resamples=resamples, rng=rng
            ).pvalue
        )


# From the runs to the table.

COMPARED = [
    f"{name}{end}"
    for name, ends in (
        ("variance_ratio", ("", "_low", "_high")),
        ("variance_p", ("",)),
        ("iqm_difference", ("", "_low", "_high")),
        ("improvement", ("", "_low", "_high")),
    )
    for end in ends
]


def summary(rows: list[dict[str, str]]) -> dict:
    """One run in a row: final, area, drawdown."""
    steps = np.array([int(row["step"]) for row in rows])
    returns = np.array([float(row["return"]) for row in rows])
    about = {name: rows[0][name] for name in ("env", "steps", "arm", "seed")}
    span = steps[-1] - steps[0]
    area = integrate.trapezoid(returns, steps) / span if span else returns[0]
    late = steps > 0.9 * int(rows[0]["steps"])
    late[-1] = True  # of a run that ended early, its last evaluation counts
    return about | {
        "final": round(float(returns[late].mean()), 2),
        "area": round(float(area), 2),
        "drawdown": round(float((np.maximum.accumulate(returns) - returns).max()), 2),
        "log_std": rows[-1]["log_std"],
        "seconds": rows[-1]["seconds"],
        **{name: rows[-1][name] for name in ("parallel", "commit", "command")},
    }


def in_order(arm: str) -> tuple[int, str]:
    return (ORDER.index(arm) if arm in ORDER else len(ORDER), arm)


def group(runs: list[dict]) -> dict[tuple[str, str], dict[str, list[dict]]]:
    """Runs by (environment, steps), then by arm."""
    groups: dict = {}
    for run in sorted(runs, key=lambda run: (run["env"], int(run["steps"]), in_order(run["arm"]))):
        groups.setdefault((run["env"], run["steps"]), {}).setdefault(run["arm"], []).append(run)
    return groups


def column(runs: list[dict], name: str) -> np.ndarray:
    return np.array([float(run[name]) for run in runs if run[name] != ""])


def compare(x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """An arm's finals x beside its base's y."""
    ratio = tuple(map(math.exp, interval((x, y), log_variance_ratio, "BCa")))
    return {
        "variance_ratio": float(variance(x) / variance(y)) if variance(y) else math.nan,
        **dict(zip(("variance_ratio_low", "variance_ratio_high"), ratio, strict=True)),
        "variance_p": variance_p(x, y),
        "iqm_difference": float(iqm_difference(x, y)),
        **bounds("iqm_difference", (x, y), iqm_difference),
        "improvement": float(improvement(x, y)),
        **bounds("improvement", (x, y), improvement),
    }


def bounds(name: str, samples: tuple, statistic: Callable) -> dict[str, float]:
    low, high = interval(samples, statistic, "percentile")
    return {f"{name}_low": low, f"{name}_high": high}


def analyse(runs: list[dict], beside: str = "") -> list[dict]:
    """A row of the table for every environment and arm; each beside its base or another arm."""
    table = []
    for (env, steps), arms in group(runs).items():
        for arm, members in arms.items():
            x = column(members, "final")
            row = {"env": env, "steps": steps, "arm": arm, "seeds": len(x)}
            row |= {"mean": x.mean(), "sd": x.std(ddof=1) if len(x) > 1 else math.nan}
            row |= {"iqm": float(iqm(x)), **bounds("iqm", (x,), iqm)}
            row |= {"iqr": stats.iqr(x), "worst_quarter": worst_quarter(x)}
            for name in ("area", "drawdown", "log_std", "seconds"):
                values = column(members, name)
                row[name] = values.mean() if len(values) else math.nan
            base = beside or BASE.get(arm, "base")
            others = column(arms.get(base, []), "final")
            same = arm == base or min(len(x), len(others)) < 2
            row |= dict.fromkeys(COMPARED, math.nan) if same else compare(x, others)
            table.append(row)
    return table


def mean_log_ratio(*samples: np.ndarray, axis: int = -1) -> np.ndarray:
    """Of samples x1, y1, x2, y2, …: the mean of log( Var xi / Var yi )."""
    pairs = zip(samples[::2], samples[1::2], strict=True)
    return np.mean([log_variance_ratio(x, y, axis) for x, y in pairs], 0)


def mean_log_iqm_ratio(*samples: np.ndarray, axis: int = -1) -> np.ndarray:
    """Of samples x1, y1, x2, y2, …: the mean of log( IQM xi / IQM yi ); NaN if one is negative."""
    pairs = zip(samples[::2], samples[1::2], strict=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.mean([np.log(iqm(x, axis) / iqm(y, axis)) for x, y in pairs], 0)


def combined_p(pairs: list[tuple]) -> float:
    """Stouffer's test of the permutation tests of several environments, each with its direction."""
    tests = [(log_variance_ratio(*pair), variance_p(*pair)) for pair in pairs]
    smaller = [p / 2 if log_ratio < 0 else 1 - p / 2 for log_ratio, p in tests]
    found = stats.combine_pvalues(smaller, "stouffer").pvalue
    return float(2 * min(found, 1 - found))


def across(runs: list[dict], beside: str = "") -> list[dict]:
    """For every arm that several environments have: geometric means of its ratios to the base.

    Of variances and of IQMs; one row of all of them, and one without each, since one can decide.
    """
    rows = []
    for arm in dict.fromkeys(run["arm"] for run in runs):
        base, pairs = beside or BASE.get(arm, "base"), {}
        for (env, _), arms in group(runs).items():  # an environment's longest runs are its last
            if arm != base and min(len(arms.get(name, [])) for name in (arm, base)) >= 3:
                pairs[env] = [column(arms[name], "final") for name in (arm, base)]
        for left_out in ("", *pairs):
            subset = {env: pair for env, pair in pairs.items() if env != left_out}
            if len(subset) < 2:
                continue
            samples = tuple(itertools.chain(*subset.values()))
            low, high = map(math.exp, interval(samples, mean_log_ratio, "BCa"))
            middle = math.exp(mean_log_ratio(*samples))
            about = {"arm": arm, "envs": " ".join(subset), "variance_ratio": middle}
            about |= {"variance_ratio_low": low, "variance_ratio_high": high}
            about |= {"variance_p": combined_p(list(subset.values()))}
            ends = map(math.exp, interval(samples, mean_log_iqm_ratio, "percentile"))
            about |= {"iqm_ratio": math.exp(mean_log_iqm_ratio(*samples))}
            rows.append(about | dict(zip(("iqm_ratio_low", "iqm_ratio_high"), ends, strict=True)))
    return rows


# Showing.


def cell(value: float, digits: int = 0) -> str:
    return "" if math.isnan(value) else f"{value:,.{digits}f}"


def p_value(p: float) -> str:
    return "< 0.001" if p < 0.001 else cell(p, 3)


def span(row: dict, name: str, digits: int = 0) -> str:
    """The value of a column and its interval if it has one, as "0.4 [0.2, 0.9]"."""
    if math.isnan(row[name + "_low"]):
        return cell(row[name], digits)
    ends = (cell(row[name + end], digits) for end in ("_low", "_high"))
    return f"{cell(row[name], digits)} [{', '.join(ends)}]"


def show(table: list[dict], overall: list[dict], beside: str = "base") -> None:
    """Print Markdown: a table for each environment, and one across them."""
    for env, steps in dict.fromkeys((row["env"], row["steps"]) for row in table):
        print(f"\n**{env}, {int(steps):,} steps**\n")
        heads = "arm", "seeds", "mean ± sd", "IQM", "worst quarter", "variance ratio", "p"
        heads += f"IQM − {beside}'s", f"P(better than {beside})", "area", "drawdown", "log σ"
        print(f"| {' | '.join(heads)} |\n" + "|---" * len(heads) + "|")
        for row in table:
            if (row["env"], row["steps"]) != (env, steps):
                continue
            spread = cell(row["sd"]) or "–"
            cells = [row["arm"], str(row["seeds"]), f"{cell(row['mean'])} ± {spread}"]
            cells += [span(row, "iqm"), cell(row["worst_quarter"])]
            digits = 3 if row["variance_ratio"] < 0.01 else 2
            cells += [span(row, "variance_ratio", digits), p_value(row["variance_p"])]
            cells += [span(row, "iqm_difference"), span(row, "improvement", 2)]
            cells += [cell(row["area"]), cell(row["drawdown"]), cell(row["log_std"], 2)]
            print(f"| {' | '.join(cells)} |")
    if overall:
        print(f"\nGeometric means of ratios to {beside}'s:\n")
        print("| arm | environments | variance | p | IQM |\n" + "|---" * 5 + "|")
    for row in overall:
        ratio, iqms = span(row, "variance_ratio", 2), span(row, "iqm_ratio", 3)
        print(f"| {row['arm']} | {row['envs']} | {ratio} | {p_value(row['variance_p'])} | {iqms} |")


def curves(runs: list[list[dict]], points: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """Evaluations of several runs at the same steps: (points,), (runs, points)."""
    found = [[[float(row[name]) for row in rows] for name in ("step", "return")] for rows in runs]
    grid = np.linspace(max(x[0] for x, _ in found), min(x[-1] for x, _ in found), points)
    return grid, np.array([np.interp(grid, x, y) for x, y in found])


def draw(options: Options, runs: list[dict], table: list[dict]) -> None:
    """A figure for each environment: curves, finals, variance ratios, chances of improvement."""
    try:
        from matplotlib import pyplot
    except ImportError:
        print("No figures without matplotlib: pip install matplotlib")
        return
    for (env, steps), arms in group(runs).items():
        figure, panels = pyplot.subplots(2, 2, figsize=(11, 8), layout="constrained")
        colours = dict(zip(arms, pyplot.get_cmap("tab10").colors * 9, strict=False))
        for arm, members in arms.items():
            grid, returns = curves([run["rows"] for run in members])
            panels[0, 0].plot(grid, iqm(returns, 0), color=colours[arm], label=arm)
            if len(returns) >= 3:
                band = stats.bootstrap(
                    (returns,), iqm, method="percentile", n_resamples=1000, axis=0,
                    rng=np.random.default_rng(0),
                ).confidence_interval  # fmt: skip
                panels[0, 0].fill_between(grid, *band, color=colours[arm], alpha=0.15, lw=0)
        panels[0, 0].set(title="IQM of the return, 95 % bootstrap band", xlabel="steps")
        panels[0, 0].legend(frameon=False)
        for place, (arm, members) in enumerate(arms.items()):
            x = np.sort(column(members, "final"))
            spread = place + 0.3 * (np.arange(len(x)) % 5 - 2) / 2  # so that dots don't hide dots
            panels[0, 1].scatter(x, spread, color=colours[arm], s=16, alpha=0.7)
            for value, style in ((float(iqm(x)), "-"), (worst_quarter(x), ":")):
                panels[0, 1].plot([value] * 2, [place - 0.4, place + 0.4], style, color="black")
        panels[0, 1].set(title="each run at the end; IQM (–), worst quarter (···)")
        panels[0, 1].set_yticks(range(len(arms)), arms)
        for panel, name, title, neutral in (
            (panels[1, 0], "variance_ratio", "variance ratio to the base", 1.0),
            (panels[1, 1], "improvement", "probability of beating the base", 0.5),
        ):
            rows = [r for r in table if (r["env"], r["steps"]) == (env, steps)]
            rows = [row for row in rows if not math.isnan(row[f"{name}_low"])]
            for place, row in enumerate(rows):
                ends = [[row[f"{name}_low"], row[f"{name}_high"]], [place] * 2]
                panel.plot(*ends, color=colours[row["arm"]], lw=2)
                panel.plot(row[name], place, "o", color=colours[row["arm"]])
                if name == "variance_ratio":
                    panel.annotate(
                        f"p {p_value(row['variance_p'])}", (row[name], place), (0, 8),
                        textcoords="offset points", ha="center", fontsize=8,
                    )  # fmt: skip
            panel.axvline(neutral, color="black", lw=0.8)
            panel.set_yticks(range(len(rows)), [f"{row['arm']} ({row['seeds']})" for row in rows])
            panel.set(title=f"{title}, 95 % interval", ylim=(-0.6, max(0, len(rows) - 1) + 0.6))
        panels[1, 0].set_xscale("log")
        ticks = [t for t in (0.01, 0.1, 0.2, 0.5, 1, 2, 5, 10) if in_sight(panels[1, 0], t)]
        panels[1, 0].set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        panels[1, 0].minorticks_off()
        for panel in panels.flat:
            panel.spines[["top", "right"]].set_visible(False)
            if panel is not panels[0, 0]:
                panel.invert_yaxis()  # arms from above
        figure.suptitle(f"{env}, {int(steps):,} steps")
        path = options.results / f"{env}__{steps}.png".replace("/", "-")
        figure.savefig(path, dpi=110)
        fewer_colours(path)
        pyplot.close(figure)


def in_sight(panel, x: float) -> bool:
    low, high = panel.get_xlim()
    return low <= x <= high


def write(path: Path, rows: list[dict]) -> None:
    """A CSV in place of the one that was."""
    rounded = [
        {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in rows
    ]
    if not rows:
        path.unlink(missing_ok=True)
        return
    temporary = path.with_suffix(f".{os.getpid()}.tmp")  # another process may write its own
    append(temporary, rounded)
    temporary.replace(path)


def main(options: Options) -> None:
    for name in ("seeds", "evaluations", "parallel", "total_steps", "eval_episodes"):
        if getattr(options, name) < 1:
            value = f"{getattr(options, name)}; allowed is at least 1"
            raise SystemExit(f"--{name.replace('_', '-')} is {value}")
    version = commit()  # before any file of results/ changes
    if not (options.table or options.beside or options.only_seeds):
        arms = [arm_command(arm, options) for arm in options.arms]
        jobs = [(options, *arm, seed, version) for seed in seeds(options) for arm in arms]
        check_commands(options, jobs, version)
        run_all(train, jobs, options.parallel)  # in this order, so that arms keep pace
    finished = read_runs(options.results / RUNS).values()
    runs = [summary(rows) | {"rows": rows} for rows in finished]
    if options.only_seeds:
        first, last = options.only_seeds
        runs = [run for run in runs if first <= int(run["seed"]) <= last]
    if not runs:
        print(f"No run is finished in {options.results}.")
        return
    arms = list(dict.fromkeys(run["arm"] for run in runs))
    if options.beside and options.beside not in arms:
        raise SystemExit(f"--beside is {options.beside}; allowed is {', '.join(arms)}")
    if options.beside or options.only_seeds:
        show(analyse(runs, options.beside), across(runs, options.beside), options.beside or "base")
        return
    table, overall = analyse(runs), across(runs)
    write(options.results / "seeds.csv", [{k: run[k] for k in run if k != "rows"} for run in runs])
    write(options.results / "table.csv", table)
    write(options.results / "across.csv", overall)
    draw(options, runs, table)
    show(table, overall)


if __name__ == "__main__":
    sys.excepthook = say_in_one_sentence
    main(tyro.cli(Options))
