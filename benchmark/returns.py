"""What a script's policy earns: one row a run in results/returns.csv, its curve in curves.csv.

    python benchmark/returns.py --script ppo --env Hopper --seeds 1 2 3 4 5
    python benchmark/returns.py --script ppo --env Ant --seeds 1 2 3 -- --num-steps 64
    python benchmark/returns.py --table            # the table of benchmark/README.md
    python benchmark/returns.py --figure           # results/returns.png of curves.csv

What follows `--` are flags for the script.

Runs have one torch thread (but for `-- --torch-threads`), are `--parallel` at a time, and lie in
`--runs-dir`: a finished run is not repeated, one that was interrupted goes on where it was. The
return is the mean of the last deterministic evaluation, after all steps. Seconds are of training
alone, with `--parallel` runs sharing the machine: they are no speed claim (benchmark/throughput.py
makes those).
"""

import csv
import fcntl
import hashlib
import io
import itertools
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import lines
import tyro

import vec_envs
from vec_envs import particles
from vec_envs.core import VecEnv

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmark" / "results"
COLUMNS = (
    *("script", "env", "seed", "steps", "return", "std", "best", "seconds"),
    *("torch_threads_and_env_threads", "parallel", "commit", "command"),
)
FIRST_OF_0_2 = "94941e8887"  # rows are only appended: those above the first of this commit are 0.1
NO_SETTINGS = {  # flags with a value that do not change what is learned
    *("--env", "--seed", "--total-steps", "--eval-every", "--eval-episodes"),
    *("--env-threads", "--torch-threads", "--compile"),
}
OURS = {"--env", "--seed", "--eval-episodes", "--env-threads", "--run-dir", "--resume"}
ELSEWHERE = {"StockTrading"}  # scored by backtest.py


def task(row: dict) -> str:
    """The environment of a row; Humanoid observed 45 numbers in the runs of seeds 31 to 43."""
    former = row["env"] == "Humanoid" and 31 <= int(row["seed"]) <= 43
    return "Humanoid (45)" if former else row["env"]


@dataclass
class Options:
    """Train one script with several seeds and keep what came out."""

    script: str = "ppo"
    """name of a script in algos/"""
    env: str = "Hopper"
    """environment"""
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 5])
    """one run each"""
    eval_episodes: int = 20
    """episodes of an evaluation"""
    env_threads: int = 1
    """threads that step MuJoCo in each run"""
    parallel: int = 2
    """runs at a time"""
    runs_dir: Path = ROOT / "runs" / "returns"
    """where the run folders are"""
    results: Path = RESULTS
    """where returns.csv and curves.csv are"""
    table: bool = False
    """print the table of returns.csv and train nothing"""
    figure: bool = False
    """draw curves.csv into returns.png and train nothing"""


def commit() -> str:
    """The commit of this tree, marked where code differs from it or is new."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True).stdout

    changed = git("status", "--porcelain", "algos", "vec_envs", "benchmark", ":!benchmark/results")
    return (git("rev-parse", "--short=10", "HEAD").strip() or "unknown") + "-dirty" * bool(changed)


def machine() -> str:
    """The processor, and how many cores there are."""
    info = Path("/proc/cpuinfo")  # of Linux
    names = re.findall(r"^model name\s*: (.*)", info.read_text(), re.M) if info.exists() else []
    return f"{(names or [platform.processor()])[0].strip()}, {os.cpu_count()} cores"


def evaluations(run_dir: Path) -> dict[int, dict[str, float]]:
    """{step: {"seconds": ..., "episodic_return": ..., ...}} of a run's metrics.csv."""
    found: dict[int, dict[str, float]] = {}
    with open(run_dir / "metrics.csv", newline="") as file:
        for row in csv.DictReader(file):
            if row["tag"].startswith("eval/"):
                entry = found.setdefault(int(row["step"]), {"seconds": float(row["seconds"])})
                entry[row["tag"].removeprefix("eval/")] = float(row["value"])
    return found


def begun_at(run_dir: Path, command: list[str]) -> str:
    """The commit at which the run in a folder began; SystemExit if it is of another command."""
    begun = json.loads((run_dir / "begun.json").read_text())
    if begun["command"] != shlex.join(command):
        raise SystemExit(f"{run_dir} is of another command, {begun['command']}; delete it")
    return begun["commit"]


def finish(command: list[str], run_dir: Path, version: str) -> bool:
    """Start a run, or go on with it where it was, to its end; False if another process is at it.

    The run itself holds the lock, so it counts as running after its benchmark was killed.
    SystemExit where the folder is of another command, or the run fails.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{run_dir} is at work in another process and left to it", flush=True)
            return False
        resume, begun = (run_dir / "args.json").exists(), run_dir / "begun.json"
        if begun.exists():
            begun_at(run_dir, command)
        elif resume:
            raise SystemExit(f"{run_dir} is of a run that no benchmark began; delete it")
        if not resume:  # else the commit is that of its first step
            begun.write_text(json.dumps({"command": shlex.join(command), "commit": version}))
        rest = ["--resume", run_dir] if resume else [*command[2:], "--run-dir", run_dir]
        done = subprocess.run(
            [sys.executable, ROOT / command[1], *rest],
            **{"capture_output": True, "text": True, "cwd": ROOT, "pass_fds": [lock.fileno()]},
        )
    if done.returncode:
        raise SystemExit(f"{run_dir} ended with {done.returncode}: {done.stderr[-2000:]}")
    return True


def spelled_out(flags: list[str]) -> list[str]:
    """--flag_name=value as --flag-name value."""
    found = []
    for word in flags:
        name, equals, value = word.partition("=")
        named = [name.replace("_", "-"), *([value] if equals else [])]
        found += named if word.startswith("--") else [word]
    return found


def run_all(train: Callable[..., None], jobs: list[tuple], parallel: int) -> None:
    """All jobs, some at a time. One that fails stops no other; at the end SystemExit says why."""

    def why_not(job: tuple) -> str:
        try:
            train(*job)
        except SystemExit as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(parallel) as pool:
        if failed := list(filter(None, pool.map(why_not, jobs))):
            raise SystemExit("\n".join(failed))


def train(options: Options, flags: list[str], seed: int, version: str) -> None:
    """One run to its end, and its rows."""
    words = [options.script, options.env, *flags, str(seed)]
    name = "__".join(w.removeprefix("--").replace("/", "-").replace(":", "-") for w in words)
    if len(name.encode()) > 200:  # a folder's name may have 255 bytes
        name = f"{name[:150]}__{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    run_dir = options.runs_dir / name
    command = ["python", f"algos/{options.script}.py", "--env", options.env, "--seed", str(seed)]
    command += ["--env-threads", str(options.env_threads)]
    command += ["--torch-threads", "1"] * ("--torch-threads" not in flags)
    command += ["--eval-episodes", str(options.eval_episodes), *flags]
    note = run_dir / "finished.json"  # what returns.csv says of it: this run is not repeated
    if note.exists():
        begun_at(run_dir, command)
        return print(f"{run_dir} is finished, and its row was written then", flush=True)
    if not finish(command, run_dir, version):
        return
    curve = evaluations(run_dir)
    last = max(curve)
    best = max(entry["episodic_return"] for entry in curve.values())
    row = dict.fromkeys(COLUMNS, "")
    row |= {"script": options.script, "env": options.env, "seed": seed, "steps": last}
    row |= {"return": round(curve[last]["episodic_return"], 2), "best": round(best, 2)}
    row |= {"std": round(curve[last]["episodic_return_std"], 2)}
    row |= {"seconds": round(curve[last]["seconds"], 1), "parallel": options.parallel}
    torch_threads = dict(itertools.pairwise(command))["--torch-threads"]
    row |= {"torch_threads_and_env_threads": f"{torch_threads} {options.env_threads}"}
    row |= {"commit": begun_at(run_dir, command), "command": shlex.join(command)}
    append(options.results / "returns.csv", [row])
    points = [
        {"script": options.script, "env": options.env, "flags": shlex.join(flags), "seed": seed}
        | {"step": step, "seconds": entry["seconds"], "return": round(entry["episodic_return"], 2)}
        for step, entry in sorted(curve.items())
    ]
    append(options.results / "curves.csv", points)
    note.write_text(json.dumps(row))
    print(f"{name}: {row['return']}", flush=True)


def append(path: Path, rows: list[dict]) -> None:
    """Add rows to a CSV, but for those that it has; SystemExit if it has other columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # two runs may end at once
        file.seek(0)
        header, *before = file.read().splitlines(keepends=True) or [""]
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        if not header:
            writer.writeheader()
        elif header.strip() != ",".join(rows[0]):
            raise SystemExit(f"{path} is a file of other columns; name another one")
        elif not (before or [header])[-1].endswith("\n"):
            raise SystemExit(f"{path}: its last line was written only in part; remove that line")
        writer.writerows(rows)
        new = text.getvalue().splitlines(keepends=True)
        file.write("".join(line for line in new if line not in before))  # some may come again


def settings(command: str) -> str:
    """The flags of a command that change what is learned, as they were typed."""
    words, kept = iter(shlex.split(command)[2:]), []
    for word in words:
        if word in NO_SETTINGS:
            next(words)
        else:
            kept.append(word)
    return shlex.join(kept)


def beside(env: str, script: str, steps: int, peers: list[dict]) -> str:
    """What others report after as many steps, and the return of a scripted policy where known."""
    found = [
        f"{peer['who']} {peer['return']}"
        for peer in peers
        if (env.split()[0], script) == (peer["env"], peer["script"])
        and 0.9 < steps / int(peer["steps"]) < 1.1
    ]
    scripted = getattr(particles, env, VecEnv).known_returns.get("scripted")
    return ", ".join(found + ([] if scripted is None else [f"scripted {scripted}"]))


def table(results: Path) -> None:
    """Print returns.csv as Markdown, sorted by environment; then what is not in it.

    Runs that differ in seed and speed only are one row: mean ± standard deviation (how many).
    """
    with open(results / "returns.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    with open(RESULTS / "peers.csv", newline="") as file:
        peers = list(csv.DictReader(file))
    newer = next((i for i, row in enumerate(rows) if row["commit"].startswith(FIRST_OF_0_2)), 0)
    groups: dict[tuple, dict[str, list[float]]] = {}
    for i, row in enumerate(rows):
        flags = dict(itertools.pairwise(shlex.split(row["command"])))
        key = task(row), row["script"], settings(row["command"]), int(row["steps"])
        key += (int(flags.get("--eval-episodes", 10)),)
        version = "0.2" if i >= newer else "0.1"
        groups.setdefault(key, {}).setdefault(version, []).append(float(row["return"]))

    def cell(returns: list[float]) -> str:
        if not returns:
            return ""
        mean = statistics.mean(returns)
        decimals = 0 if abs(mean) >= 100 else 2
        spread = f" ± {statistics.stdev(returns):.{decimals}f}" if len(returns) > 1 else ""
        return f"{mean:.{decimals}f}{spread} ({len(returns)})"

    print("| environment | script | steps | episodes | 0.2 | 0.1 | others |")
    print("|---|---|---|---|---|---|---|")
    for (env, script, flags, steps, episodes), found in sorted(groups.items()):
        rounded = float(f"{steps:.2g}")
        length = f"{rounded / 1e6:g} M" if rounded >= 1e6 else f"{rounded / 1e3:g} k"
        cells = [env, f"{script}.py {flags}".strip(), length, str(episodes)]
        cells += [cell(found.get(version, [])) for version in ("0.2", "0.1")]
        print(f"| {' | '.join([*cells, beside(env, script, steps, peers)])} |")
    measured = {vec_envs.base_name(row["env"]) for row in rows}
    absent = sorted({*vec_envs.NAMES} - ELSEWHERE - measured)
    trained = {row["script"] for row in rows}
    absent += [path.name for path in lines.scripts() if path.stem not in trained]
    if absent:
        print(f"\nNot measured yet: {', '.join(absent)}.")


def figure(results: Path) -> None:
    """A panel an environment: every run's curve thin, their median thick, a colour a script.

    Only of runs with the scripts' own settings (how long, how often evaluated and how fast are
    none; --bf16 was a flag of former commits); simple policies' returns, where known, dotted.
    """
    no_settings = NO_SETTINGS | {"--bf16"}
    try:
        from matplotlib import pyplot
    except ImportError:
        raise SystemExit("No figure without matplotlib: pip install matplotlib") from None
    panels: dict[str, dict[str, list[tuple]]] = {}  # env -> script -> (who, its points) a run
    with open(results / "curves.csv", newline="") as file:
        for row in csv.DictReader(file):
            flags = {w for w in shlex.split(row["flags"]) if w.startswith("--")}
            if flags <= no_settings:
                name = row["script"] + " --bf16" * ("--bf16" in flags)
                runs = panels.setdefault(task(row), {}).setdefault(name, [])
                who, step = (row["seed"], row["flags"]), int(row["step"])
                if not runs or runs[-1][0] != who or step <= runs[-1][1][-1][0]:
                    runs.append((who, []))  # the rows of a run follow one another
                runs[-1][1].append((step, float(row["return"])))
    if not panels:
        raise SystemExit(f"{results}/curves.csv has no run with a script's own settings")
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    size = {"figsize": (4.2 * columns, 3.2 * rows), "squeeze": False, "layout": "constrained"}
    _, axes = pyplot.subplots(rows, columns, **size)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (env, scripts) in zip(axes.flat, sorted(panels.items()), strict=False):
        known = getattr(particles, env, VecEnv).known_returns
        for policy, value in known.items():
            axis.axhline(value, color="grey", linestyle=":", linewidth=1)
            axis.text(0, value, policy, transform=axis.get_yaxis_transform(), fontsize=6)
        for number, (script, runs) in enumerate(sorted(scripts.items())):
            colour = f"C{number}"
            at: dict[int, list[float]] = {}
            for _, points in runs:
                axis.plot(*zip(*points, strict=True), c=colour, alpha=0.35, lw=0.7)
                for step, value in points:
                    at.setdefault(step, []).append(value)
            medians = {  # where at least half of the runs were evaluated
                step: statistics.median(values)
                for step, values in sorted(at.items())
                if 2 * len(values) >= len(runs)
            }
            axis.plot(*zip(*medians.items(), strict=True), ".-", c=colour, label=script)
        axis.set_title(env.rpartition(":")[2])
        axis.set_xlabel("environment steps")
        axis.legend(fontsize=7, ncols=1 + len(scripts) // 7)
    pyplot.savefig(results / "returns.png", dpi=90)
    fewer_colours(results / "returns.png")


def fewer_colours(path: Path) -> None:
    """A figure with 64 colours, a third as large: each version stays in git."""
    from PIL import Image  # which matplotlib needs

    with Image.open(path) as image:
        image.convert("RGB").quantize(64).save(path, optimize=True)


def main(options: Options, flags: list[str]) -> None:
    if options.script not in (known := [path.stem for path in lines.scripts()]):
        raise SystemExit(f"--script is {options.script}; allowed is {', '.join(known)}")
    if ours := [word for word in flags if word.split("=")[0].replace("_", "-") in OURS]:
        raise SystemExit(f"{ours[0]} stands after --; this program sets it by its own flags")
    if options.parallel < 1:
        raise SystemExit(f"--parallel is {options.parallel}; allowed is at least 1")
    for name, asked in (("returns.csv", options.table), ("curves.csv", options.figure)):
        if asked and not (options.results / name).exists():
            raise SystemExit(f"--results is {options.results}, where no {name} is")
    if options.figure:
        figure(options.results)
        return
    if options.table:
        table(options.results)
        return
    version, flags = commit(), spelled_out(flags)  # the commit before returns.csv changes
    run_all(train, [(options, flags, seed, version) for seed in options.seeds], options.parallel)


if __name__ == "__main__":
    from algos.worker_learner.arguments import say_in_one_sentence  # a second, for who imports this

    sys.excepthook = say_in_one_sentence
    words = [*sys.argv[1:], "--"]
    end = words.index("--")
    main(tyro.cli(Options, args=words[:end]), words[end + 1 : -1])
