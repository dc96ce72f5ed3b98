"""Time to Ant 5000 on two cores: how long until a policy scores 5000, as a leaderboard.

    python benchmark/time_to_ant.py                             # four contenders, one after another
    python benchmark/time_to_ant.py --contenders ppo --seed 2   # one, with another seed
    python benchmark/time_to_ant.py --table                     # Markdown of time_to_ant.csv

Everybody scores a deterministic policy every 100,000 steps over 10 episodes. The clock starts with
a contender's process and stops at its first score of --target or more: imports, compilation and
evaluations count as they come. A run that ends before, by itself or at --limit, has a row with its
best return, which is below the target.

Ours are what somebody types. Theirs are PPO with what rl-baselines3-zoo has for Ant, the library's
defaults (one environment) with observations and rewards normalised; the zoo has no other settings
for SBX. CleanRL's PPO (`--contenders cleanrl --cleanrl-python .../bin/python`) wants a Python of
3.10, with `pip install "cleanrl[mujoco]" "gymnasium==0.29.1" "numpy<2"`. It has no evaluation:
the returns are those of its last ten training episodes, with the policy's noise, on Ant-v4.
"""

import csv
import datetime
import importlib.util
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import lines
import torch
import tyro
from returns import RESULTS, ROOT, append, commit, machine

PEERS = {"stable_baselines3": "Stable-Baselines3 PPO", "sbx": "SBX PPO", "cleanrl": "CleanRL PPO"}
COLUMNS = ("date", "commit", "contender", "command", "seed", "target", "seconds", "steps", "return")
COLUMNS += ("machine", "torch")


@dataclass
class Options:
    """Measure each contender once and append a row to results/time_to_ant.csv."""

    contenders: list[str] = field(
        default_factory=lambda: ["ppo", "ppo_hterm", "stable_baselines3", "sbx"]
    )
    """stable_baselines3, sbx, cleanrl, or scripts of algos/"""
    env: str = "Ant"
    """environment: a name of vec_envs/mujoco.py"""
    target: float = 5000
    """return that stops the clock"""
    limit: float = 30
    """minutes after which a run is stopped"""
    seed: int = 1
    """seed of everything that is random"""
    eval_every: int = 100_000
    """steps between evaluations"""
    eval_episodes: int = 10
    """episodes of one evaluation"""
    results: Path = RESULTS
    """folder of the CSV"""
    table: bool = False
    """print the CSV as Markdown and measure nothing"""
    cleanrl_python: str = ""
    """a Python that has CleanRL"""
    peer: str = ""
    """train this library until it is stopped: the process that the clock measures"""
    run_dir: Path = Path()
    """folder of --peer's metrics.csv"""


def train_peer(options: Options) -> None:
    """PPO of a library; evaluations, their normaliser frozen, go to metrics.csv as ours do."""
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize

    def make(seed: int, num_envs: int, training: bool) -> VecNormalize:
        slim = {"include_cfrc_ext_in_observation": False} if options.env == "Ant" else {}
        envs = make_vec_env(f"{options.env}-v5", num_envs, seed=seed, env_kwargs=slim)
        return VecNormalize(envs, training=training, norm_reward=training)

    envs, count = make(options.seed, 1, True), options.eval_episodes
    score_envs = make(options.seed + 1_000_000, count, False)
    kind = importlib.import_module(options.peer).PPO
    model, start = kind("MlpPolicy", envs, seed=options.seed, device="cpu"), time.perf_counter()
    with open(options.run_dir / "metrics.csv", "w", buffering=1) as file:
        while True:
            model.learn(options.eval_every, reset_num_timesteps=False)
            score_envs.obs_rms = envs.obs_rms
            mean, _ = evaluate_policy(model, score_envs, count)
            seconds = time.perf_counter() - start
            file.write(f"{model.num_timesteps},{seconds:.3f},eval/episodic_return,{mean:.8g}\n")


def train_cleanrl(options: Options) -> None:
    """CleanRL's own script; the mean of its last training episodes goes to metrics.csv."""
    command = [options.cleanrl_python, "-u", "-m", "cleanrl.ppo_continuous_action", "--env-id"]
    command += [f"{options.env}-v4", "--seed", str(options.seed)]
    start, due, returns = time.perf_counter(), options.eval_every, []
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=options.run_dir) as child,
        open(options.run_dir / "metrics.csv", "w", buffering=1) as file,
    ):
        for line in child.stdout:
            if found := re.match(r"global_step=(\d+), episodic_return=\[(.*)\]", line):
                step, returns = int(found[1]), [*returns, float(found[2])][-options.eval_episodes :]
                if step >= due:
                    seconds, due = time.perf_counter() - start, due + options.eval_every
                    mean = sum(returns) / len(returns)
                    file.write(f"{step},{seconds:.3f},eval/episodic_return,{mean:.8g}\n")
    sys.exit(child.returncode)


def decisive(metrics: str, target: float) -> tuple[int, float]:
    """(step, return) of a metrics.csv's first evaluation of `target` or more, else of its best.

    (0, −inf) where there is none. A last line without its end is still being written.
    """
    found = re.findall(r"^(\d+),[^,]*,eval/episodic_return,(.*)\n", metrics, re.M)
    scores = [(int(step), float(value)) for step, value in found]
    reached = [score for score in scores if score[1] >= target]
    return reached[0] if reached else max(scores, key=lambda x: x[1], default=(0, -math.inf))


def race(
    command: list[str], metrics: Path, target: float, minutes: float
) -> tuple[float, int, float]:
    """Run a command until its metrics.csv has a return of `target`, and stop it.

    Returns the seconds that this took, and step and return as `decisive` has them; without such a
    return the seconds until the command ended or the minutes were over.
    SystemExit where the command fails.
    """
    from throughput import environment  # here, since it would cost a peer's clock a second

    with tempfile.TemporaryFile("w+") as said:
        where = {"stdout": subprocess.DEVNULL, "stderr": said, "cwd": ROOT, "env": environment()}
        start, status, before = time.perf_counter(), None, 0
        with subprocess.Popen(command, **where) as child:
            try:
                while True:
                    seconds = time.perf_counter() - start
                    text = metrics.read_text() if metrics.exists() else ""
                    step, score = decisive(text, target)
                    if step > before:
                        print(f"{seconds:7.0f} s, {step:,} steps: {score:.1f}", flush=True)
                    if score >= target or status is not None or seconds >= 60 * minutes:
                        break
                    before, status = step, child.poll()  # read once more after its end
                    time.sleep(1)
            finally:
                child.terminate()
        if status:
            said.seek(0)
            raise SystemExit(f"{shlex.join(command)} ended with {status}: {said.read()[-2000:]}")
    return seconds, step, score


def check(contender: str, options: Options) -> None:
    """SystemExit for a name that is none, or whose package is missing."""
    if contender not in PEERS and contender not in (path.stem for path in lines.scripts()):
        raise SystemExit(f"--contenders {contender}: allowed are {', '.join(PEERS)} and scripts")
    if contender == "cleanrl" and not os.access(options.cleanrl_python, os.X_OK):
        raise SystemExit(f"--cleanrl-python {options.cleanrl_python!r} is not a program")
    if contender in ("stable_baselines3", "sbx"):
        for name in ("stable_baselines3", contender):
            if not importlib.util.find_spec(name):
                advice = 'pip install -e ".[benchmark]", or choose others'
                raise SystemExit(f"--contenders {contender} needs {name}: {advice}")


def measure(contender: str, options: Options, version: str) -> dict:
    """One contender's row."""
    program = "benchmark/time_to_ant.py" if contender in PEERS else f"algos/{contender}.py"
    command = [program, *(["--peer", contender] if contender in PEERS else [])]
    for name in ("env", "seed", "eval_every", "eval_episodes"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    print(shlex.join(["python", *command]), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        whole = [sys.executable, *command, "--run-dir", folder]
        whole += ["--cleanrl-python", options.cleanrl_python] if contender == "cleanrl" else []
        metrics = Path(folder) / "metrics.csv"
        seconds, steps, score = race(whole, metrics, options.target, options.limit)
    row = {"date": datetime.date.today().isoformat(), "commit": version, "seed": options.seed}
    row |= {"contender": PEERS.get(contender, f"{contender}.py"), "target": options.target}
    row |= {"command": shlex.join(["python", *command]), "seconds": round(seconds), "steps": steps}
    row |= {"return": round(score, 1), "torch": torch.__version__, "machine": machine()}
    return {name: row[name] for name in COLUMNS}


def show(rows: list[dict]) -> None:
    """Print the leaderboard as Markdown: the fastest first, then who came nearest."""

    def place(row: dict) -> tuple:
        reached = float(row["return"]) >= float(row["target"])
        return (not reached, float(row["seconds"]) if reached else -float(row["return"]))

    print("| contender | seconds | return | steps | seed | machine | date, commit |")
    print("|---|---|---|---|---|---|---|")
    for row in sorted(rows, key=place):
        cells = [row["contender"], f"{int(row['seconds']):,}", f"{float(row['return']):,.0f}"]
        if place(row)[0]:
            cells[1:3] = f"not reached in {cells[1]}", f"best {cells[2].replace('-inf', 'none')}"
        cells += [f"{int(row['steps']):,}", row["seed"], row["machine"]]
        print(f"| {' | '.join([*cells, row['date'] + ', ' + row['commit']])} |")


def main(options: Options) -> None:
    path = options.results / "time_to_ant.csv"
    version = commit()  # before the CSV changes
    contenders = [] if options.table else options.contenders
    for contender in contenders:
        check(contender, options)
    for contender in contenders:
        append(path, [measure(contender, options, version)])
    if not path.exists():
        raise SystemExit(f"--results is {options.results}, where no time_to_ant.csv is")
    with open(path, newline="") as file:
        show(list(csv.DictReader(file)))


if __name__ == "__main__":
    options = tyro.cli(Options)
    if not options.peer:  # whose clock runs
        from algos.worker_learner.arguments import say_in_one_sentence

        sys.excepthook = say_in_one_sentence
    {"": main, "cleanrl": train_cleanrl}.get(options.peer, train_peer)(options)
