"""The control of the H-term's study: ppo_hterm.py with weight 1 for every remembered step.

    python benchmark/hterm_control.py --env Hopper
    python benchmark/stability.py --env Hopper --arms base hterm control

The same memory and the same work, without a preference for steps that were better than expected:
what this arm gains over the base is the effect of replay, what the H-term gains over this arm that
of its weights. A stopped run goes on by `--resume FOLDER` of this file, not of ppo_hterm.py.
"""

import atexit

from torch import Tensor

from algos import ppo_hterm
from algos.worker_learner import parse


def uniform_term(agent: ppo_hterm.Agent, past: dict[str, Tensor]) -> Tensor:
    """− E[ σ̄² log π(a|s) ] + 0.05 E[ (R − V(s))² ]: `hamiltonian_term` with w = 1"""
    advantage = past["returns"] - agent.value(past["obs"])
    policy = agent.policy(past["obs"], fixed_std=True)
    log_prob = policy.log_prob(past["action"]) + policy.entropy()
    likelihood = (policy.variance.mean() * log_prob.clamp(min=-20)).mean()
    return 0.05 * advantage.square().mean() - likelihood


if __name__ == "__main__":
    ppo_hterm.hamiltonian_term, args = uniform_term, parse(ppo_hterm.Args, ppo_hterm.TUNED)
    atexit.register(print, "This was the control: go on by hterm_control.py --resume, no other.")
    ppo_hterm.train(args)
