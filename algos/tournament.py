"""Tournament-based ensemble training: an asynchronous pool of agents and a leaderboard.

After ElegantRL-Podracer (Liu et al. 2021, arXiv:2112.05923). No agent waits for another:

- the orchestrator keeps as many of the --agents in training as there is room for: with more cores
  it starts more, with fewer it stops those with the weakest parents and continues them later;
- the generator chooses what is trained next when there is room: a fresh agent, of each script in
  turn, or one that continues from where an agent of the leaderboard ended;
- the updater scores a trained agent and puts it on the leaderboard, which has all past agents.

    python algos/tournament.py --algos ppo sac --env Hopper --agents 8 --root runs/t1

The oldest agent that waits is continued, unless the generator draws one with as many steps whose
score is higher by more than the standard error of the gap: a copy of that one replaces it, and the
replaced one is never drawn. A copy has other random numbers, and its --perturb hyper-parameters
(the learning rate) times 0.8 or 1.25. The first agent of each script has the script's values, each
later fresh one random factors from ½ to 2 of these. Of γ and λ, 1 − γ and 1 − λ are multiplied.

What differs from the paper: scores have errors, and come from episodes that no agent trained on;
only an agent that is worse by more than the error is replaced; agents are compared at equal steps;
the best one is scored again on fresh episodes, since the highest of many scores is too high.
"""

import math
import random
import statistics
from dataclasses import dataclass, field
from typing import Literal

from algos.populations import Agent, Population, PopulationArgs, is_better, parse, run


@dataclass
class Args(PopulationArgs):
    """An asynchronous tournament of agents. After -- come flags for the scripts."""

    algos: list[str] = field(default_factory=lambda: ["ppo"])
    """names of scripts in algos/, or paths, taken in turn by fresh agents"""
    segments: int = 0
    """number of segments to train in all (0: as many as --agents need for --total-steps)"""
    strategy: Literal["best-of-k", "softmax", "truncation", "fresh"] = "best-of-k"
    """how agents are drawn from the leaderboard. softmax: by standardised scores; truncation: one
    of the best quarter; fresh: none, all agents are independent"""
    k: int = 3
    """k of best-of-k: so many agents are drawn at random, and the best of them is taken"""
    fresh: float = 0.1
    """probability of beginning a new agent when no agent waits to be continued"""


def compete(population: Population, args: Args) -> None:
    """The orchestrator: begin what there is room for, wait for one event, and repeat."""
    segments = args.segments or args.agents * (args.total_steps // population.period)
    while population.flights or population.count < in_all(population, segments):
        population.expected = in_all(population, segments)  # to estimate the time left
        ended = [x for x in population.agents.values() if x.step >= args.total_steps]
        agents = args.agents - (0 if args.segments else len(ended))  # how many still need training
        if not agents and not population.flights:
            break  # some segments were longer than asked
        room = min(agents, population.pool.slots(), population.expected - population.done)
        while len(population.flights) < room:
            generate(population, args)
        population.work()


def in_all(population: Population, segments: int) -> int:
    """`segments`, and one for each that failed; at most twice as many."""
    return segments + min(segments, len(population.journal.of("failed")))


def generate(population: Population, args: Args) -> None:
    """The generator: begin the agent that is trained next."""
    generator = population.random("generate", population.count)
    own = next_in_line(population, args)
    out = {line["id"] for line in population.journal.of("replaced")} | no_good(population)
    kept = [agent for agent in population.agents.values() if agent.id not in out]
    unfinished = [agent for agent in kept if agent.step < args.total_steps]
    begun = (*population.agents.values(), *population.flights.values())
    roots = sum(not agent.parent for agent in begun)
    if own is not None and roots >= args.agents:
        fair = [agent for agent in unfinished if agent.pause_at == own.pause_at]
        other = draw(fair, args, generator)
        if other is None or not is_better(other, own):
            population.child(own, False)
        else:
            population.journal.note("replaced", id=own.id, by=other.id)
            population.child(other, True)
        return
    other = draw(unfinished, args, generator)
    if roots < args.agents or other is None or generator.random() < args.fresh:
        population.fresh(args.algos[roots % len(args.algos)])
    else:
        population.child(other, True)


def next_in_line(population: Population, args: Args) -> Agent | None:
    """The oldest agent that is not at its end, has no descendant and was not replaced."""
    used = {line["id"] for line in population.journal.of("replaced")}
    used |= {agent.parent for agent in population.agents.values()}
    used |= {agent.parent for agent in population.flights.values()}
    used |= no_good(population)
    waiting = [a for a in population.agents.values() if a.id not in used]
    waiting = [agent for agent in waiting if agent.step < args.total_steps]
    return min(waiting, key=lambda agent: agent.id, default=None)


def no_good(population: Population) -> set[str]:
    """Agents of which two descendants have failed."""
    failures = [line["parent"] for line in population.journal.failures()]
    return {parent for parent in failures if failures.count(parent) > 1}


def draw(candidates: list[Agent], args: Args, generator: random.Random) -> Agent | None:
    """One of `candidates`, by --strategy; None if there are none, or for the strategy fresh."""
    if not candidates or args.strategy == "fresh":
        return None
    ranked = sorted(candidates, key=lambda agent: (-agent.score, agent.id))
    if args.strategy == "truncation":
        return generator.choice(ranked[: max(1, len(ranked) // 4)])
    if args.strategy == "softmax":
        scores = [agent.score for agent in ranked]
        scale = statistics.pstdev(scores) or 1.0
        odds = [math.exp((score - scores[0]) / scale) for score in scores]
        return generator.choices(ranked, odds)[0]
    return min(generator.sample(ranked, min(args.k, len(ranked))), key=ranked.index)


if __name__ == "__main__":
    args, words = parse(Args)
    run(Population(args, args.algos, words, "tournament"), compete)
