"""Generational evolution of any script of the collection (population-based training).

Jaderberg et al. 2017, arXiv:1711.09846; with the fusion of ElegantRL-Podracer (Liu et al. 2021,
arXiv:2112.05923). N agents train for one period. Then an evaluator scores every agent, and a
selector replaces agent i by a copy of one of the best, j, if

    score_j − score_i > √(error_i² + error_j²)          error: the standard error of a score

The copy continues with other random numbers, its --perturb hyper-parameters (the learning rate)
multiplied by 0.8 or 1.25. At the start, those of all agents but the first are the script's, times
random factors between ½ and 2. (Of γ and λ, the distance from 1 is multiplied.)

    python algos/generations.py --algo ppo --env Hopper --agents 8
    python algos/generations.py --algo ppo --env Ant --agents 10 --fuse 3 -- --epochs 8

With `--fuse K` an agent is trained K times with different seeds in each period after the first, and
networks and optimizer moments become the mean of the K runs.

What differs from the papers:
- only a gap above its standard error counts; no agent was trained on the episodes that score it;
- all K runs have the same weight 1/K (theirs are averaged one after another: ¼, ¼, ½);
- agents with odd numbers can be replaced less often, `--slow` (Li et al. 2025, arXiv:2506.03225);
- the best agent is scored again on fresh episodes, since the highest of many scores is too high.
"""

from dataclasses import dataclass

from algos.populations import Agent, Population, PopulationArgs, is_better, parse, run
from algos.worker_learner import UserError


@dataclass
class Args(PopulationArgs):
    """Generations of agents of one script. After -- come flags for the script."""

    algo: str = "ppo"
    """name of a script in algos/, or a path"""
    fuse: int = 1
    """runs of one agent with different seeds, whose networks are averaged"""
    survivors: float = 0.25
    """fraction of the agents, the best ones, of which copies may be made"""
    slow: int = 1
    """agents with odd numbers can be replaced only every so many periods (1: after each period)"""


def select(members: list[Agent | None], generation: int, args: Args) -> list[tuple[Agent, bool]]:
    """For each member of the next generation: its parent, and True if that is another agent.

    `members[i]` is None where member i failed: it is always replaced.
    """
    living = [agent for agent in members if agent is not None]
    ranked = sorted(living, key=lambda agent: (-agent.score, agent.id))
    best = ranked[: max(1, int(args.survivors * len(members)))]
    parents, copies = [], 0
    for number, agent in enumerate(members):
        protected = number % 2 == 1 and generation % args.slow > 0
        candidate = best[copies % len(best)]
        if agent is None or (not protected and is_better(candidate, agent) and agent not in best):
            parents.append((candidate, True))
            copies += 1
        else:
            parents.append((agent, False))
    return parents


def evolve(population: Population, args: Args) -> None:
    """All generations; one that an earlier process has begun is finished."""
    generations = args.total_steps // population.period
    population.expected = generations * args.agents  # segments in all, to estimate the time left
    begun = (*population.agents.values(), *population.flights.values())  # finished; in training
    first = max((agent.generation for agent in begun), default=1)
    for generation in range(first, generations + 1):
        while (missing := who_is_missing(population, generation, args)) or population.flights:
            begin(population, generation, missing, args)
            population.work()  # if a parent's files are damaged, its descendants are missing again
        members = members_of(population, generation, args)
        if not any(members):
            why = population.journal.lines[-1].get("why", "their parents are damaged")
            population.give_up(f"all agents of generation {generation}", why)
        for agent in population.agents.values():  # replay buffers are large
            if agent.generation < generation - 1:
                checkpoint = population.root / "agents" / agent.id / "checkpoint.pt"
                checkpoint.unlink(missing_ok=True)
        if all(agent.step >= args.total_steps for agent in members if agent):
            break  # segments end where an iteration does, which may be later than asked


def begin(population: Population, generation: int, missing: list[int], args: Args) -> None:
    """The missing members of a generation: fresh ones, or descendants of those before."""
    before = members_of(population, generation - 1, args)
    if missing and generation > 1 and not any(before):
        why = "are damaged; the same command trains them again"
        raise UserError(f"all agents of generation {generation - 1} {why}")
    parents = select(before, generation - 1, args) if any(before) else []
    for member in missing:
        place = {"generation": generation, "member": member}
        if generation == 1:  # no average of networks that begin differently
            population.fresh(args.algo, **place)
        else:
            population.child(*parents[member], **place, fuse=args.fuse)


def members_of(population: Population, generation: int, args: Args) -> list[Agent | None]:
    """The finished agents of a generation, each at its number; None: not finished, or failed."""
    members: list[Agent | None] = [None] * args.agents
    for agent in population.agents.values():
        if agent.generation == generation:
            members[agent.member] = agent
    return members


def who_is_missing(population: Population, generation: int, args: Args) -> list[int]:
    """The members of a generation that have neither begun nor failed."""
    failed = population.journal.failures()
    known = {line["member"] for line in failed if line["generation"] == generation}
    begun = (*population.agents.values(), *population.flights.values())
    known |= {agent.member for agent in begun if agent.generation == generation}
    return [member for member in range(args.agents) if member not in known]


if __name__ == "__main__":
    args, words = parse(Args)
    run(Population(args, [args.algo], words, "generations"), evolve)
