"""What people see of a population: a table in the terminal, lineage.csv, descent.png."""

import contextlib
import csv
import dataclasses
import io
import json
import time
from pathlib import Path
from typing import Any

from algos.worker_learner import files
from algos.worker_learner.agents import Agent

SHOWN = 12  # agents in the table
COLUMNS = ("id", "parent", "script", "flags", "seed", "score", "error", "episodes", "step")
COLUMNS += ("fuse", "commit")


def table(population: Any) -> str:
    """Score and its standard error, steps, age, parent of the best agents; what runs where."""
    now = time.time()
    lines = [f"{'agent':>6} {'script':12} {'score':>9}   {'± error':8} {'steps':>9} {'age':>7}"]
    lines[0] += f" {'parent':>6}  hyper-parameters"
    for agent in population.ranked()[:SHOWN]:
        score = f"{agent.score:9.1f} ± {agent.error:<8.1f} {agent.step:9}"
        line = f"{agent.id:>6} {Path(agent.script).stem:12} {score}"
        line += f" {_duration(now - agent.published)} {agent.parent or '-':>6}"
        lines.append(line + "".join(f"  {k} {x:g}" for k, x in agent.flags.items()))
    for name, part in population.running:
        with contextlib.suppress(OSError):  # it has not begun
            host = (population.root / "flight" / name / "host").read_text().strip()
            until = population.flights[name].pause_at
            lines.append(f"{name:>6} part {part} to step {until} on {host}")
    waiting = len(population.parts()) - len(population.running)
    failed = sum(line["event"] == "failed" for line in population.journal)
    seconds = max(1e-9, now - population.began)
    left, done = "", population.count - len(population.flights)
    if done and population.expected:
        left = _duration(seconds / done * max(0, population.expected - done)).strip()
        left = f"; about {left} left"
    counts = f"{len(population.agents)} agents, {failed} failed, {waiting} waiting"
    return "\n".join([*lines, f"{counts}; after {_duration(seconds).strip()}{left}"])


def write_lineage(population: Any) -> None:
    """lineage.csv: a line for each agent that is published."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for agent in sorted(population.agents.values(), key=lambda agent: agent.id):
        writer.writerow(dataclasses.asdict(agent) | {"flags": json.dumps(agent.flags)})
    files.quietly("lineage.csv", files.save, text.getvalue(), population.root / "lineage.csv")


def plot_descent(population: Any, title: str) -> None:
    """descent.png: each agent a point, a line to its parent; by steps, and by time."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    winners = {agent.id for agent in population.lineage(population.best())}
    for axis, label in zip(figure.subplots(1, 2, sharey=True), ("steps", "minutes"), strict=True):

        def place(agent: Agent, label: str = label) -> tuple[float, float]:
            minutes = (agent.published - population.began) / 60
            return agent.step if label == "steps" else minutes, agent.score

        for agent in population.agents.values():
            colour, width = ("C1", 2.0) if agent.id in winners else ("C0", 0.6)
            if parent := population.agents.get(agent.parent):
                ends = zip(place(parent), place(agent), strict=True)
                axis.plot(*ends, color=colour, linewidth=width, zorder=1)
            how = {"fmt": "o", "ms": 3, "color": colour, "elinewidth": 0.6}
            axis.errorbar(*place(agent), agent.error, **how)
        axis.set_xlabel(label)
    figure.axes[0].set_ylabel("score: mean return ± standard error")
    figure.suptitle(f"{title}; in orange the descent of the best")
    figure.savefig(population.root / "descent.png", dpi=110)


def _duration(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours:3}h{rest // 60:02}m" if hours else f"{rest // 60:3}m{rest % 60:02}s"
