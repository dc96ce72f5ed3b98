"""What people see of a population: a table in the terminal, lineage.csv, descent.png, best/."""

import contextlib
import csv
import dataclasses
import io
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from algos.populations.agents import Agent, script_path
from algos.worker_learner import files
from algos.worker_learner.arguments import command_line

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
        line += f" {_duration(now - agent.published):>7} {agent.parent or '-':>6}"
        lines.append(line + "".join(f"  {k} {x:g}" for k, x in agent.flags.items()))
    for name, part in population.running:
        with contextlib.suppress(OSError):  # it has not begun
            host = (population.root / "flight" / name / "host").read_text().strip()
            until = population.flights[name].pause_at
            lines.append(f"{name:>6} part {part} to step {until} on {host}")
    failed = len(population.journal.failures())
    waiting = len(population.parts()) - len(population.running)
    text = f"{len(population.agents)} agents, {failed} failed, {waiting} waiting"
    seconds = now - population.began
    if population.ended:  # since this driver began
        each = (population.last_end - population.began) / population.ended
        left = max(0, each * (population.expected - population.done_before) - seconds)
        text += f"; after {_duration(seconds)}; about {_duration(left)} left"
    return "\n".join([*lines, text])


def write_lineage(population: Any) -> None:
    """lineage.csv: a line for each agent that is published."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for agent in sorted(population.agents.values(), key=lambda agent: agent.id):
        writer.writerow(dataclasses.asdict(agent) | {"flags": json.dumps(agent.flags)})
    files.quietly("lineage.csv", files.save, text.getvalue(), population.root / "lineage.csv")


def plot_descent(population: Any) -> None:
    """descent.png: each agent a point, a line to its parent; by steps, and by time."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure, agents = Figure(figsize=(11, 4.5), layout="constrained"), population.agents
    winners = {agent.id for agent in population.lineage(population.best())}
    began = population.journal.lines[0]["time"]
    steps = {name: agent.step for name, agent in agents.items()}
    minutes = {name: (agent.published - began) / 60 for name, agent in agents.items()}
    places = {"steps": steps, "minutes": minutes}
    for axis, (label, x) in zip(figure.subplots(1, 2, sharey=True), places.items(), strict=True):
        for name, agent in agents.items():
            colour, width = ("C1", 2.0) if name in winners else ("C0", 0.6)
            if parent := agents.get(agent.parent):
                ends = (x[parent.id], x[name]), (parent.score, agent.score)
                axis.plot(*ends, color=colour, linewidth=width, zorder=1)
            how = {"fmt": "o", "ms": 3, "color": colour, "elinewidth": 0.6}
            axis.errorbar(x[name], agent.score, agent.error, **how)
        axis.set_xlabel(label)
    figure.axes[0].set_ylabel("score: mean return ± standard error")
    title = f"{population.program} on {population.args.env}; in orange the descent of the best"
    figure.suptitle(title)
    figure.savefig(population.root / "descent.png", dpi=110)


def copy_best(population: Any, agent: Agent) -> None:
    """best/: the policy of an agent as best.pt, which play.py takes."""
    folder, best = population.root / "agents" / agent.id, population.root / "best"
    for source, target in (("last.pt", "best.pt"), ("args.json",) * 2, ("agent.json",) * 2):
        shutil.copyfile(folder / source, best / f"{target}.tmp")
        os.replace(best / f"{target}.tmp", best / target)


def summary(population: Any, winner: Agent, again: dict[str, Any]) -> str:
    """The winner's score, and its score on fresh episodes."""
    before = f"{winner.score:.1f} ± {winner.error:.1f} over {winner.episodes} episodes"
    after = f"{again['score']:.1f} ± {again['error']:.1f} on {again['episodes']} fresh ones"
    after += ", which had no part in its selection" if again["error"] else ", all alike"
    play = os.path.relpath(script_path(winner.script).with_name("play.py"))
    play = command_line(play, str(population.root / "best"))
    return f"\nBest: agent {winner.id}, {before}; {after}.\nWatch or film it: {play}"


def _duration(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}h{rest // 60:02}m" if hours else f"{rest // 60}m{rest % 60:02}s"
