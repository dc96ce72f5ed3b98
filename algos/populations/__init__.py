"""Populations: many runs of the scripts, selected by their scores. Two programs use it.

    args, words = parse(Args)                   # before and after -- on the command line
    population = Population(args, algos, words, program)
        checks everything, locks the folder --root and reads what is in it
    population.fresh(algo)                      # an agent to be, from the beginning
    population.child(parent, perturbed)         # one that goes on where `parent` ended
    population.work()                           # starts, stops and ends segments; waits for one
    population.agents, population.flights       # those that are published, those that are to be
    run(population, train)
        train(population, args), which does the above; then the winner is scored again

What is in the folder:

    agents/ID/          a run folder after its segment, with agent.json; never changed again
    flight/ID.json      an agent to be: written before its segment is started
    flight/ID/          its run folders, until one rename publishes the agent
    journal.jsonl       what happened: one object a line, each forced to the disk
    settings.json       the flags that all began with
    failed/             what failed segments printed
    best/               the policy with the best score, for play.py
    lineage.csv, descent.png    views, made anew from agents/

The first four are the truth: a driver that is killed anywhere goes on from them. An agent that
descends from another goes on where that one ended, with other random numbers, and perhaps other
hyper-parameters. Its score is the mean return over episodes by seeds from 2³⁰ on; runs have seeds
below 2²⁹.
"""

from algos.populations.agents import Agent, PopulationArgs, is_better, parse
from algos.populations.population import Population, run
