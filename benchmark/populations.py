"""Populations at equal compute: results/populations.csv, populations.png and a table.

    python benchmark/populations.py                # what is not in the CSV yet, then the table
    python benchmark/populations.py --steps 500000 --agents 8
    python benchmark/populations.py --table        # of what there is

Four ways to spend the same number of environment steps, --agents times --steps, with one script:

    generations    algos/generations.py: selection after each fifth of the training
    tournament     algos/tournament.py: the same number of segments, nobody waits
    independent    as many runs with the script's own settings that differ by seed; the best counts
    one run        a single run with --agents times as many steps, which its schedules follow

All are scored in the same way. The winner is the agent with the highest score that was published;
`before` is that score, over 20 episodes, by which it was chosen; `after` its score over 100 fresh
episodes. `before` is too high where many scores are compared (the winner's curse): who compares
methods reads `after`. Runs lie in --runs-dir: what was interrupted goes on where it was.
"""

import csv
import json
import math
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from algos.worker_learner.arguments import say_in_one_sentence

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmark" / "results"
METHODS = "generations", "tournament", "independent", "one run"
KEY = "env", "method", "seed", "script", "agents", "steps"
COLUMNS = (*KEY, "before", "before_error", "after", "after_error", "published", "failed")
COLUMNS += ("seconds", "commit")


@dataclass
class Options:
    """Compare populations with independent runs and with one long run."""

    script: str = "ppo"
    """name of a script in algos/"""
    envs: list[str] = field(default_factory=lambda: ["Hopper", "Walker2d"])
    """environments"""
    agents: int = 4
    """size of a population"""
    steps: int = 200_000
    """environment steps of an agent's whole training"""
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 5])
    """one repetition each"""
    runs_dir: Path = ROOT / "runs" / "populations"
    """where the populations are"""
    results: Path = RESULTS
    """where populations.csv is"""
    table: bool = False
    """print the table, draw the figure and train nothing"""


def command(options: Options, env: str, method: str, seed: int, root: Path) -> list[str]:
    """Who runs one cell of the table."""
    agents, steps = options.agents, options.steps
    period, program, more = max(1, steps // 5), "tournament", ["--algos", options.script]
    if method == "independent":
        period, more = steps, [*more, "--strategy", "fresh", "--same-hyperparameters"]
    elif method != "tournament":
        program, more = "generations", ["--algo", options.script]
    if method == "one run":  # on two cores, since nothing else runs beside it
        steps = period = agents * steps
        agents, more = 1, [*more, "--same-hyperparameters", "--cpus", "2"]
    words = [sys.executable, str(ROOT / "algos" / f"{program}.py"), "--root", str(root), *more]
    words += ["--env", env, "--seed", str(seed), "--agents", str(agents)]
    words += ["--total-steps", str(steps), "--period", str(period)]
    # each segment would compile anew; narrow networks are fastest with one thread
    return [*words, "--", "--compile", "none", "--torch-threads", "1"]


def run(options: Options, env: str, method: str, seed: int) -> dict:
    """One cell, from its beginning or where it was interrupted -> its row."""
    name = f"{env}__{method}__{seed}__{options.agents}x{options.steps}".replace(" ", "-")
    root = options.runs_dir / name
    options.runs_dir.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with open(options.runs_dir / f"{name}.log", "a") as log:
        words = command(options, env, method, seed, root)
        status = subprocess.run(words, stdout=log, stderr=log, cwd=ROOT).returncode
    if status:
        why = Path(log.name).read_text(errors="replace").strip().rpartition("\n")[2]
        raise SystemExit(f"{root} ended with {status}: {why}; see {log.name}")
    journal = [json.loads(line) for line in (root / "journal.jsonl").read_text().splitlines()]
    winner = json.loads((root / "best" / "agent.json").read_text())
    again = next(x for x in journal if x["event"] == "rescored" and x["id"] == winner["id"])
    events = [line["event"] for line in journal]
    row = {"env": env, "method": method, "seed": seed, "script": options.script}
    row |= {"agents": options.agents, "steps": options.steps}
    row |= {"before": round(winner["score"], 1), "before_error": round(winner["error"], 1)}
    row |= {"after": round(again["score"], 1), "after_error": round(again["error"], 1)}
    row |= {"published": events.count("published"), "failed": events.count("failed")}
    return row | {"seconds": round(time.monotonic() - began), "commit": winner["commit"]}


def read(path: Path) -> list[dict]:
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def groups(options: Options) -> dict[tuple[str, str], list[dict]]:
    """The rows of this size, by environment and method."""
    found: dict[tuple[str, str], list[dict]] = {}
    size = options.script, str(options.agents), str(options.steps)
    for row in read(options.results / "populations.csv"):
        if (row["script"], row["agents"], row["steps"]) == size:
            found.setdefault((row["env"], row["method"]), []).append(row)
    return found


def table(options: Options) -> None:
    """Mean over repetitions ± its standard error, before and after, as Markdown."""
    steps = f"{options.agents} × {options.steps} steps of {options.script}.py"
    print(f"| {steps} | method | repetitions | before | after | lost | after, each |")
    print("|---|---|---|---|---|---|---|")
    found = sorted(groups(options).items(), key=lambda x: (x[0][0], METHODS.index(x[0][1])))
    for (env, method), rows in found:
        before, after = ([float(row[name]) for row in rows] for name in ("before", "after"))
        error = statistics.stdev(after) / math.sqrt(len(after)) if len(after) > 1 else 0.0
        lost = round(statistics.mean(before) - statistics.mean(after))
        each = ", ".join(f"{value:.0f}" for value in sorted(after))
        means = f"{statistics.mean(before):.0f} | {statistics.mean(after):.0f}"
        means += f" ± {error:.0f}" * (len(after) > 1)
        print(f"| {env} | {method} | {len(rows)} | {means} | {lost} | {each} |")


def figure(options: Options) -> None:
    """populations.png: every repetition, before (hollow) and after (filled), and the mean after."""
    try:
        from matplotlib import pyplot
    except ImportError:
        print("No figure without matplotlib: pip install matplotlib")
        return
    found = groups(options)
    envs = list(dict.fromkeys(env for env, _ in found))
    if not envs:
        return
    size = {"figsize": (5 * len(envs), 4), "squeeze": False, "layout": "constrained"}
    _, axes = pyplot.subplots(1, len(envs), **size)
    for axis, env in zip(axes.flat, envs, strict=True):
        for place, method in enumerate(METHODS):
            rows = found.get((env, method), [])
            for number, row in enumerate(rows):
                x = place + 0.3 * (number / max(1, len(rows) - 1) - 0.5)
                axis.plot([x, x], [float(row["before"]), float(row["after"])], c="grey", lw=0.7)
                axis.plot(x, float(row["before"]), "o", mfc="none", c=f"C{place}", ms=5)
                axis.plot(x, float(row["after"]), "o", c=f"C{place}", ms=5)
            if rows:
                mean = statistics.mean(float(row["after"]) for row in rows)
                axis.hlines(mean, place - 0.3, place + 0.3, color=f"C{place}")
        axis.set_xticks(range(len(METHODS)), METHODS, fontsize=8)
        axis.set(title=f"{env}, {options.agents} × {options.steps} steps", ylabel="return")
    pyplot.savefig(options.results / "populations.png", dpi=90)


def main(options: Options) -> None:
    path = options.results / "populations.csv"
    if options.table and not path.exists():
        raise SystemExit(f"--results is {options.results}, where no {path.name} is")
    cells = [(env, m, s) for s in options.seeds for env in options.envs for m in METHODS]
    for env, method, seed in cells if not options.table else []:
        key = [env, method, seed, options.script, options.agents, options.steps]
        if [str(value) for value in key] in [[row[k] for k in KEY] for row in read(path)]:
            continue
        row = run(options, env, method, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if path.stat().st_size == 0:
                writer.writeheader()
            writer.writerow(row)
        scores = f"{row['before']}, scored again {row['after']} ± {row['after_error']}"
        print(f"{env}, {method}, seed {seed}: {scores}, {row['seconds']} s", flush=True)
    table(options)
    figure(options)


if __name__ == "__main__":
    sys.excepthook = say_in_one_sentence
    main(tyro.cli(Options, config=(tyro.conf.FlagCreatePairsOff,)))
