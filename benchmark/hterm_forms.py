"""Two other forms of ppo_hterm.py: for runs that fall back, and with a memory of good rollouts.

    python benchmark/hterm_forms.py --env Hopper --form setback
    python benchmark/stability.py --env Hopper --arms "setback=hterm_forms --form setback"

With Ḡ the mean return of the episodes that ended in a rollout, smoothed over about ten rollouts:

    setback   λ_H is 0 unless Ḡ is below the highest Ḡ so far
    better    a rollout is remembered only if its mean return is above Ḡ

All else is ppo_hterm.py's. A stopped run goes on by `--resume FOLDER` of this file.
"""

from dataclasses import dataclass
from typing import Literal
from unittest import mock

import torch
from torch import Tensor

from algos import ppo_hterm
from algos.worker_learner import parse

original_update = ppo_hterm.update


@dataclass
class Args(ppo_hterm.Args):
    """ppo_hterm.py's, and the form."""

    form: Literal["setback", "better"] = "setback"
    """when λ_H acts (setback), or what is remembered (better)"""


class Agent(ppo_hterm.Agent):
    """ppo_hterm.py's, and the run's returns, which are saved with it."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.register_buffer("smoothed", torch.tensor(float("nan")))  # Ḡ
        self.register_buffer("highest", torch.tensor(float("-inf")))


def update(agent: Agent, optimizer, rollout, memory, learn, args) -> dict[str, Tensor]:
    """ppo_hterm.py's, with its λ_H or its memory as the form has it."""
    worse, ended = False, rollout["done"]
    if ended.any():
        mean_return = rollout["episode_return"][ended].mean()
        if agent.smoothed.isnan():  # the first
            agent.smoothed.copy_(mean_return)
        worse = bool(mean_return < agent.smoothed)
        agent.smoothed.lerp_(mean_return, 0.1)
        agent.highest.copy_(torch.maximum(agent.highest, agent.smoothed))
    if args.form == "setback" and not agent.smoothed < agent.highest:
        agent.hterm_coef.zero_()
    if args.form == "better" and worse:
        with mock.patch.object(memory, "add", lambda _: memory.end_episodes()):
            return original_update(agent, optimizer, rollout, memory, learn, args)
    return original_update(agent, optimizer, rollout, memory, learn, args)


if __name__ == "__main__":
    ppo_hterm.Agent, ppo_hterm.update = Agent, update
    ppo_hterm.train(parse(Args, ppo_hterm.TUNED))
