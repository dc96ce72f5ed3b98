"""Running statistics that are saved with the agent: of observations, and of returns for rewards."""

import torch
from torch import Tensor, nn

from algos.worker_learner.learners import mean_over_learners, var_mean_over_learners, world_size


class Normalizer(nn.Module):
    """Observations with mean 0 and variance 1, by the statistics of all that was seen.

    These are buffers: saved with the agent, and fixed from one `update` to the next. `several`: of
    several agents, some of which may leave, so that each entry has a count of its own.
    """

    def __init__(self, size: int, several: bool = False):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))
        self.register_buffer("count", torch.zeros(size if several else ()))

    def forward(self, x: Tensor) -> Tensor:  # (..., size)
        return ((x - self.mean) * torch.rsqrt(self.var + 1e-8)).clamp(-10, 10)

    @torch.no_grad()
    def update(self, x: Tensor, alive: Tensor | None = None) -> None:
        """Take in all learners' x (..., size); Chan's formula for the variance of a union.

        With `alive` (..., A), x has an equal part of each agent; of who has left it does not count.
        """
        x, part = x.reshape(-1, x.shape[-1]), 1.0
        if alive is None:
            var, mean = var_mean_over_learners(x, 0)
        else:
            counts = alive.reshape(len(x), -1).repeat_interleave(x.shape[1] // alive.shape[-1], 1)
            part = mean_over_learners(counts.float().mean(0))  # (size,), 0 if none has lived
            mean = mean_over_learners((counts * x).mean(0)) / part.clamp(min=1e-9)
            var = mean_over_learners((counts * (x - mean).square()).mean(0)) / part.clamp(min=1e-9)
        size = part * len(x) * world_size()
        self.count.add_(size)
        share = size / self.count.clamp(min=1)
        between = (mean - self.mean).square() * (1 - share)
        self.mean.lerp_(mean, share)
        self.var.lerp_(var + between, share)


class RewardScaler(nn.Module):
    """Rewards divided by the standard deviation of the discounted return, G ← γ G + r."""

    def __init__(self, num_envs: int, gamma: float):
        super().__init__()
        self.gamma = gamma
        self.register_buffer("discounted_return", torch.zeros(num_envs))
        self.statistics = Normalizer(1)

    @torch.no_grad()
    def forward(self, reward: Tensor, done: Tensor) -> Tensor:  # both (T, N)
        returns = torch.empty_like(reward)
        for t in range(len(reward)):
            self.discounted_return.mul_(self.gamma).add_(reward[t])
            returns[t] = self.discounted_return
            self.discounted_return.masked_fill_(done[t], 0)
        self.statistics.update(returns.unsqueeze(-1))
        return self.scale(reward)

    def end_episodes(self) -> None:
        self.discounted_return.zero_()

    def scale(self, reward: Tensor) -> Tensor:
        """Rewards (...) by the present statistics, which stay as they are."""
        return (reward * torch.rsqrt(self.statistics.var + 1e-8)).clamp(-10, 10)
