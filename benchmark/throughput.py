"""Every speed claim: what CraneRL does in a second, beside what others do, in one run.

    pip install -e ".[benchmark]"
    python benchmark/throughput.py                     # all sections
    python benchmark/throughput.py --sections env      # one of them
    python benchmark/throughput.py --table             # Markdown of results/throughput.csv

`as_it_comes`, the first section, is what somebody types, `python algos/sac.py --env HalfCheetah`:
no flags but --run-dir, evaluations off, and where the others' `learning_starts` is lowered as well,
--warmup-steps. Beside it are other libraries at their defaults (peers.py), and where these are less
or more work, at our sizes. Each training is a process of its own, without OMP_NUM_THREADS and the
like and without a GPU. Ours are stopped long before their --total-steps, by which they choose what
to compile; the speed is that of the last two thirds of what was done by then, when all is loaded
and compiled. Updates are gradient steps of the critics.

The contenders of a group take turns for several rounds, so that a slow minute of the machine hits
all of them; the median counts. `ratio` is CraneRL's median, of the group's first row, over that
contender's. `threads` are torch's. A section that is measured anew replaces its rows of before.
"""

import csv
import datetime
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import steppers
import torch
import tyro
from returns import RESULTS, ROOT, commit, machine

from algos import ppo
from algos.worker_learner.arguments import say_in_one_sentence
from vec_envs.core import available_cores

Turn = tuple[float, str]  # units a second, torch's threads where there are any
Contenders = Mapping[str, Callable[[], Turn]]  # what it is -> measure once
COLUMNS = ("section", "group", "what", "unit", "median", "lowest", "highest", "ratio", "rounds")
COLUMNS += ("threads", "machine", "torch", "commit", "date")


@dataclass
class Options:
    """Measure, write results/throughput.csv and throughput.png, print a table."""

    sections: list[str] = field(default_factory=lambda: list(SECTIONS))
    """what to measure; the other sections keep their rows"""
    rounds: int = 5
    """turns of each contender"""
    seconds: float = 3.0
    """length of a turn (a training: 5 to 15 times that)"""
    results: Path = RESULTS
    """folder of the CSV and the figure"""
    table: bool = False
    """print the CSV as Markdown and measure nothing"""


# How a turn is measured: calls in this process, or a training in its own.


def per_second(step: steppers.Stepper, units: int, seconds: float) -> Turn:
    """Call step(0), step(1), … for so long."""
    start, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < seconds:
        step(count)
        count += 1
    return count * units / passed, ""


def environment(**variables: str) -> dict[str, str]:
    """Where a program decides on its threads by itself, and finds no GPU."""
    fixed = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    mine = {k: v for k, v in os.environ.items() if k not in fixed}
    return mine | {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", **variables}


def run(command: list) -> str:
    """What a program prints."""
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    if done.returncode:
        raise SystemExit(f"{command} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def losses(run_dir: Path) -> list[tuple[float, float]]:
    """(step, seconds) of what metrics.csv has by now of the losses."""
    path = run_dir / "metrics.csv"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [line.split(",") for line in lines if line.count(",") == 3 and ",losses/" in line]
    return sorted({(float(step), float(seconds)) for step, seconds, *_ in rows})


def train(command: list, run_dir: Path, total: float, folder: str) -> None:
    """Run a script till its losses of so many steps are logged, and stop it."""
    paths = os.pathsep.join((folder, os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, *map(str, command)]
    with open(f"{folder}/stderr", "w+") as said:
        where = {"stdout": subprocess.DEVNULL, "stderr": said, "env": environment(PYTHONPATH=paths)}
        with subprocess.Popen(command, **where) as child:
            while child.poll() is None and max(losses(run_dir), default=(0,))[0] < total:
                time.sleep(0.5)
            stopped = child.poll() is None
            child.terminate()
        if child.returncode and not stopped:
            text = Path(said.name).read_text()[-2000:]
            raise SystemExit(f"{command} ended with {child.returncode}: {text}")


def slope(points: list[tuple[float, float]], begin: float) -> float:
    """Units a second between the first and the last of (units, seconds), from `begin` units on."""
    points = [point for point in points if point[0] >= begin]
    if len(points) < 2:
        raise SystemExit(f"a training said too little to measure it: {points}; more --seconds")
    return (points[-1][0] - points[0][0]) / (points[-1][1] - points[0][1])


def ours(
    script: str, flags: str, total: float, utd_ratio: float = 1, warmup: int = 0, learners: int = 1
) -> Turn:
    """A script's steps a second, times its updates a step, by the rows of its metrics.csv."""
    total = warmup + total
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "slow.py").write_text(steppers.SLOW)
        run_dir = Path(folder) / "run"
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={learners}"]
        command = command if learners > 1 else []
        command += [ROOT / "algos" / f"{script}.py", *flags.split(), "--run-dir", run_dir]
        command += ["--warmup-steps", warmup] * (warmup > 0) + ["--eval-every", 0]
        train(command, run_dir, total, folder)
        args = json.loads((run_dir / "args.json").read_text())["args"]
        points = losses(run_dir)
    return slope(points, (total + 2 * warmup) / 3) * utd_ratio, str(args["torch_threads"])


def theirs(
    library: str, algorithm: str, env: str, total: float, unit: str = "updates", num_envs: int = 1,
    warmup: int = 0, say_every: int = 500, **settings: Any,
) -> Turn:  # fmt: skip
    """A peer's updates or steps a second."""
    total = warmup + round(total)
    settings |= {"learning_starts": warmup} if warmup else {}
    command = [ROOT / "benchmark" / "peers.py", "--library", library, "--algorithm", algorithm]
    command += ["--env", env, "--num-envs", num_envs, "--total-steps", total]
    command += ["--say-every", say_every, "--settings", json.dumps(settings)]
    said = run(command)
    threads = re.search(r"^threads (\d+)", said, re.M)[1]
    lines = re.findall(r"^(\d+) (\d+) ([\d.]+)$", said, re.M)  # steps, updates, seconds
    late = [x for x in lines if float(x[0]) >= (total + 2 * warmup) / 3]
    points = [(float(x[unit == "updates"]), float(x[2])) for x in late]
    return slope(points, 0), "XLA's" if library == "sbx" else threads


# Sections: each yields (group, unit, contenders); the first contender is CraneRL.


def as_it_comes(options: Options) -> Iterator[tuple[str, str, Contenders]]:
    """`python algos/SCRIPT.py --env ENV`, as it is typed.

    The same warm-up for all, with random actions, which the update's speed does not depend on.
    Stable-Baselines3's TD3 and DDPG have 400 and 300 units by default. REDQ's peer is the loop over
    ten networks, and --log-every 10 is there because a thousand steps take ten minutes.
    """
    length = 5 * options.seconds
    sb3, sbx = partial(theirs, "stable_baselines3"), partial(theirs, "sbx")
    same = {"policy_kwargs": {"net_arch": [256, 256]}}
    wide = {"policy_kwargs": {"net_arch": {"pi": [256, 256], "qf": [512, 512]}}}
    off_policy = {
        "sac": {"Stable-Baselines3 SAC": partial(sb3, "SAC"), "SBX SAC": partial(sbx, "SAC")},
        **{
            name.lower(): {
                f"Stable-Baselines3 {name}": partial(sb3, name),
                f"Stable-Baselines3 {name}, 256 units as ours": partial(sb3, name, **same),
            }
            for name in ("TD3", "DDPG")
        },
        "crossq": {"SBX CrossQ, 256 and 512 units as ours": partial(sbx, "CrossQ", **wide)},
    }
    for script, peers in off_policy.items():
        sizes = {"total": 200 * length, "warmup": 1000}
        turns = {f"CraneRL {script}.py": partial(ours, script, "--env HalfCheetah", **sizes)}
        turns |= {k: partial(peer, env="HalfCheetah-v5", **sizes) for k, peer in peers.items()}
        yield f"{script.upper()} on HalfCheetah", "updates/s", turns

    sizes = {"total": 4 * length, "warmup": 200}
    plain = partial(theirs, "plain", "REDQ", "Hopper-v5", say_every=10, **sizes)
    redq = partial(ours, "redq", "--env Hopper --log-every 10", utd_ratio=20, **sizes)
    turns = {"CraneRL redq.py": redq, "ten critics one after another, plain PyTorch": plain}
    yield "REDQ on Hopper", "updates/s", turns

    sizes = {"total": 1500 * length, "warmup": 1000}
    equal = {"batch_size": 128, "policy_kwargs": {"net_arch": [128, 128]}, **sizes}
    equal |= {"train_freq": 4, "gradient_steps": 1}
    dqn = partial(ours, "dqn", utd_ratio=0.25, **sizes)
    turns = {
        "CraneRL dqn.py --num-envs 1": partial(dqn, "--utd-ratio 0.25 --num-envs 1"),
        "CraneRL dqn.py, 8 environments": partial(dqn, "--utd-ratio 0.25"),
        "Stable-Baselines3 DQN, sizes as ours": partial(sb3, "DQN", "CartPole-v1", **equal),
    }
    yield "DQN on CartPole, an update every 4 steps", "updates/s", turns

    def rollouts(steps: int, speed: int) -> dict:
        return {"total": steps * round(speed * length / steps), "unit": "steps"}

    for env in ("Hopper", "Ant"):
        args = ppo.Args(**ppo.TUNED[env])
        equal = {"n_steps": args.num_steps, "batch_size": args.minibatch_size}
        equal |= {"n_epochs": args.epochs, "num_envs": 64, **rollouts(64 * args.num_steps, 6000)}
        peer, eight = partial(sb3, "PPO", f"{env}-v5"), {"num_envs": 8, **rollouts(16_384, 4000)}
        physics = partial(per_second, steppers.physics(env, 64), 64, options.seconds)
        turns = {
            "CraneRL ppo.py": partial(ours, "ppo", f"--env {env}", 24_000 * length),
            "mujoco.rollout, physics alone": physics,
            "Stable-Baselines3 PPO": partial(peer, **rollouts(2048, 1700)),
            "SBX PPO, 8 environments": partial(sbx, "PPO", f"{env}-v5", **eight),
            "Stable-Baselines3 PPO, 64 environments, our sizes": partial(peer, **equal),
        }
        yield f"PPO on {env}", "env steps/s", turns


def env(options: Options) -> Iterator[tuple[str, str, Contenders]]:
    """Random actions through step(): observations, rewards and autoreset included."""
    for num_envs in (64, 1024):
        for name in ("Hopper", "Ant"):
            turns = {}
            for what, make in steppers.MUJOCO.items():
                if num_envs > 64 and "Gymnasium" in what:
                    continue  # a thousand environments in Python, or a thousand processes
                turns[what] = partial(per_second, make(name, num_envs), num_envs, options.seconds)
            yield f"{name}, {num_envs} environments", "env steps/s", turns


def particles(options: Options) -> Iterator[tuple[str, str, Contenders]]:
    """Random moves through step(); mpe2 is one world in Python."""
    for num_envs in (64, 1024):
        for name, peer in (("Spread", "simple_spread_v3"),
                           ("SpeakerListener", "simple_speaker_listener_v4")):  # fmt: skip
            found = {"CraneRL step()": (steppers.particles(name, num_envs), num_envs)}
            found |= {f"mpe2 {peer}, one world": (steppers.mpe2(peer), 1)}
            turns = {k: partial(per_second, *x, options.seconds) for k, x in found.items()}
            yield f"{name}, {num_envs} environments", "env steps/s", turns


def agents(options: Options) -> Iterator[tuple[str, str, Contenders]]:
    """Training of one policy for three agents, of 64 worlds, by 10 epochs of one minibatch each.

    The peer is what PettingZoo's documentation combines: mpe2, SuperSuit, Stable-Baselines3's PPO
    (whose critic sees one agent's observation, and whose rewards are each agent's own).
    """
    length, size = 5 * options.seconds, 3 * 25 * 64  # it counts each agent's steps
    total = size * round(1500 * length / size)

    def stable_baselines() -> Turn:
        settings = {"n_steps": 25, "batch_size": size, "num_envs": 64, "unit": "steps"}
        speed, threads = theirs("stable_baselines3", "PPO", "Spread", total, **settings)
        return speed / 3, threads

    turns = {
        "CraneRL mappo.py": partial(ours, "mappo", "--env Spread", 10_000 * length),
        "Stable-Baselines3 PPO by SuperSuit, the same sizes": stable_baselines,
    }
    yield "PPO for the agents of Spread", "training steps/s", turns


def hterm(options: Options) -> Iterator[tuple[str, str, Contenders]]:
    """What the H-term costs: each script with it beside the one without."""
    length = 5 * options.seconds
    long, short = {"total": 8000 * length}, {"total": 200 * length, "warmup": 1000}
    for base, sizes in {"ppo": long, "ddpg": short, "td3": short, "sac": short}.items():
        turns = {
            f"CraneRL {name}.py": partial(ours, name, "--env Hopper", **sizes)
            for name in (f"{base}_hterm", base)
        }
        yield f"{base.upper()} with the H-term, on Hopper", "training steps/s", turns


def workers(options: Options) -> Iterator[tuple[str, str, Contenders]]:
    """Worker processes that collect, for environments of which one process has one core's worth."""
    length = 5 * options.seconds
    for what, name, flags, speed in (
        ("PPO on an environment that sleeps for 5 ms a step", "slow:Slow-v0",
         "--num-envs 16 --num-steps 8 --minibatch-size 128", 170),
        ("PPO on BipedalWalker-v3", "BipedalWalker-v3", "", 3000),
        ("PPO on LunarLander-v3", "LunarLander-v3", "", 5000),
        ("SAC on BipedalWalker-v3, an update every 16 steps", "BipedalWalker-v3",
         "--utd-ratio 0.0625 --num-envs 16 --warmup-steps 1000", 1500),
    ):  # fmt: skip
        script, turns = what.split()[0].lower(), {}
        for count in (0, 1, 2, 4):
            cores = count if "slow" in name else min(count, available_cores())
            command = f"--env {name} --num-workers {count} {flags}"
            number = f"{count or 'no'} worker{'s' * (count != 1)}"
            run_of = partial(ours, script, command, speed * max(cores, 1) * length)
            turns[f"CraneRL {script}.py, {number}"] = run_of
        yield what, "training steps/s", turns


def learners(options: Options) -> Iterator[tuple[str, str, Contenders]]:
    """torchrun: learners that share the envs, the cores and each minibatch."""
    for name, speed in (("Hopper", 12_000), ("Ant", 8000), ("BipedalWalker-v3", 4000)):
        total = speed * 10 * options.seconds
        turns = {
            f"CraneRL ppo.py, {count} learner{'s' * (count > 1)}": partial(
                ours, "ppo", f"--env {name}", total, learners=count
            )
            for count in (1, 2)
        }
        yield f"PPO on {name} with several learners", "training steps/s", turns


SECTIONS = {
    **{"as_it_comes": as_it_comes, "env": env, "particles": particles, "agents": agents},
    **{"hterm": hterm, "workers": workers, "learners": learners},
}
NEEDS = {  # packages of the others that a section measures
    "as_it_comes": ("stable_baselines3", "sbx"),
    "env": ("envpool",),
    "particles": ("mpe2",),
    "agents": ("stable_baselines3", "supersuit", "mpe2"),
}


# Measuring and showing.


def measure(section: str, options: Options, version: str) -> list[dict]:
    about = {
        "rounds": options.rounds,
        "machine": f"{machine()}, no GPU used",
        "torch": torch.__version__,
        "commit": version,
        "date": datetime.date.today().isoformat(),
    }
    rows = []
    for group, unit, contenders in SECTIONS[section](options):
        rounds = [{k: turn() for k, turn in contenders.items()} for _ in range(options.rounds)]
        found = {what: [turns[what] for turns in rounds] for what in contenders}
        medians = {k: statistics.median(speed for speed, _ in x) for k, x in found.items()}
        for what, turns in found.items():
            speeds = [speed for speed, _ in turns]
            row = {"section": section, "group": group, "what": what, "unit": unit}
            row |= {"median": round(medians[what]), "lowest": round(min(speeds))}
            row |= {"highest": round(max(speeds)), "threads": turns[-1][1]}
            row |= {"ratio": round(next(iter(medians.values())) / medians[what], 2), **about}
            rows.append({name: row[name] for name in COLUMNS})
            print(*rows[-1].values(), sep="  ", flush=True)
    return rows


def show(rows: list[dict]) -> None:
    """Print the rows as Markdown."""
    print("| what | median | lowest to highest | first row ÷ this one |\n|---|---|---|---|")
    for section, group in dict.fromkeys((row["section"], row["group"]) for row in rows):
        mine = [row for row in rows if (row["section"], row["group"]) == (section, group)]
        print(f"| **{group}** ({mine[0]['unit']}; {mine[0]['machine'].partition(',')[0]}) | | | |")
        for row in mine:
            span = f"{int(row['lowest']):,} – {int(row['highest']):,}"
            print(f"| {row['what']} | {int(row['median']):,} | {span} | {row['ratio']} × |")


def draw(rows: list[dict], path: Path) -> None:
    """A figure of what comes as it is typed; the other sections are in the table."""
    try:
        from matplotlib import pyplot
    except ImportError:
        print("No figure without matplotlib: pip install matplotlib")
        return
    rows = [row for row in rows if row["section"] == "as_it_comes"]
    groups = list(dict.fromkeys(row["group"] for row in rows))
    if not groups:
        return
    size = {"figsize": (11, 1.5 * -(-len(groups) // 2)), "layout": "constrained", "squeeze": False}
    figure, panels = pyplot.subplots(-(-len(groups) // 2), 2, **size)
    for axes in panels.flat[len(groups) :]:
        axes.axis("off")
    for axes, group in zip(panels.flat, groups, strict=False):
        mine = [row for row in rows if row["group"] == group][::-1]
        colours = ["#d95f02" if "CraneRL" in row["what"] else "#9aa5b1" for row in mine]
        names = [row["what"].replace("Stable-Baselines3", "SB3") for row in mine]
        bars = axes.barh(names, [float(row["median"]) for row in mine], color=colours)
        axes.bar_label(bars, [f" {int(row['median']):,}" for row in mine], fontsize=8)
        title = f"{group.partition(',')[0]} ({mine[0]['unit']})"
        axes.set_title(title, loc="left", fontsize=9)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(labelsize=8, length=0)
        axes.set_xticks([])
        axes.margins(x=0.15)
    figure.savefig(path, dpi=110)


def check(options: Options) -> None:
    """SystemExit, before anything is measured, for what cannot be."""
    for section in options.sections:
        if section not in SECTIONS:
            raise SystemExit(f"--sections has {section}; allowed is {', '.join(SECTIONS)}")
        needs = NEEDS.get(section, ())
        if missing := [name for name in needs if not importlib.util.find_spec(name)]:
            advice = 'pip install -e ".[benchmark]", or choose others by --sections'
            raise SystemExit(f"the section {section} needs {', '.join(missing)}: {advice}")
    if options.rounds < 1 or not 0 < options.seconds <= 3600:
        what = f"--rounds is {options.rounds}, --seconds {options.seconds}"
        raise SystemExit(f"{what}; allowed is at least 1, and more than 0 to 3600")


def main(options: Options) -> None:
    path = options.results / "throughput.csv"
    rows = list(csv.DictReader(open(path, newline=""))) if path.exists() else []
    rows = [dict.fromkeys(COLUMNS, "") | row for row in rows]  # older ones have no threads
    if options.table and not rows:
        raise SystemExit(f"--results is {options.results}, where no throughput.csv is")
    if not options.table:
        check(options)
        torch.set_num_threads(1)
        version = commit()  # before any file of results/ changes
        for section in options.sections:
            new = measure(section, options, version)
            rows = [row for row in rows if row["section"] != section] + new
            order = [*SECTIONS, *(row["section"] for row in rows)]  # former sections come last
            rows.sort(key=lambda row: order.index(row["section"]))
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
        draw(rows, options.results / "throughput.png")
    show(rows)


if __name__ == "__main__":
    sys.excepthook = say_in_one_sentence
    main(tyro.cli(Options))
