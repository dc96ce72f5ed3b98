"""Discrete soft actor-critic (SAC): entropy-seeking actor-critic, with the expectations exact.

Christodoulou 2019, arXiv:1910.07207, after Haarnoja et al. 2018, arXiv:1812.05905. With a few
actions, E over a ~ π(·|s) is a sum over all of them: no sample, no reparametrisation, and critics
that give Q of every action at once. With the policy π, twin critics Q₁, Q₂, their slow copies Q̄₁,
Q̄₂, and the temperature α:

    y      = r + γ (1 − terminated) Σ_a π(a|s') [ min_i Q̄_i(s', a) − α log π(a|s') ]
    L_Q    = Σ_i ½ E[ (Q_i(s, a) − y)² ]
    L_π    = E[ Σ_a π(a|s) ( α log π(a|s) − min_i Q_i(s, a) ) ]
    L_α    = log α · ( E[ H(π(·|s)) ] − H̄ ),   H̄ = some part of log(number of actions)

    python algos/sac_discrete.py --env CartPole            an environment of vec_envs
    python algos/sac_discrete.py --env LunarLander-v3      a Gymnasium id

What makes it work, each where it stands:
- `Critics`: the twins are one batched product.
- `sac_loss`: Q is a constant in L_π, which needs no gradient through it, π one in L_Q and L_α, so
  that the three losses have no weight in common and one optimizer steps them all.
- `critic_target`: a truncated episode bootstraps from its true last observation, a terminated one
  does not. With --n-step the reward is r_0 + γ r_1 + … of n steps, which an episode's end cuts
  short.
- `target_entropy_at`: the paper's H̄, 0.98 of the largest entropy, explores, and keeps the policy
  almost random for ever; it falls from there (Xu et al. 2021, arXiv:2112.02852, lower it as well).
- `collect`: --exploration-length keeps the noise of a draw for some steps, as dqn.py a random
  action. Acrobot needs it: with a new draw in each step hardly an episode reaches the goal.
- `train`: the number of updates follows the transitions collected, however many environments there
  are.
"""

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import vec_envs
from algos.worker_learner import (
    ReplayArgs,
    ReplayBuffer,
    Result,
    Run,
    Workers,
    count_learners,
    flatten,
    gradient_step,
    parse,
    var_mean_over_learners,
)


@dataclass
class Args(ReplayArgs):
    """Discrete SAC on any environment with discrete actions."""

    env: str = "CartPole"
    num_envs: int = 8
    horizon: int = 1
    """steps of each environment between updates"""
    utd_ratio: float = 0.25
    """updates per transition collected"""
    batch_size: int = 128
    """transitions of one gradient step"""
    buffer_size: int = 100_000
    """transitions kept for replay"""
    warmup_steps: int = 1000
    """steps before the first update"""
    n_step: int = 1
    """rewards summed before Q̄ stands for the rest"""
    learning_rate: float = 1e-3
    """of Adam, annealed linearly to zero"""
    discount: float = 0.99
    """γ"""
    polyak: float = 0.01
    """τ: how far the target critics move towards the critics at each update"""
    target_entropy: float = 0.3
    """H̄ in the end, as a part of log(number of actions), the entropy of choosing blindly"""
    exploration_fraction: float = 0.2
    """part of the run during which H̄ falls to it from the paper's 0.98"""
    exploration_length: float = 1.0
    """steps for which the noise that draws the action is kept, in the mean"""
    initial_temperature: float = 0.2
    """α in the beginning"""
    hidden_size: int = 128
    """width of the two hidden layers of actor and critics"""


LIMITS = {
    **dict.fromkeys(("horizon", "batch_size", "buffer_size", "n_step", "hidden_size"), (1, None)),
    **dict.fromkeys(("discount", "polyak", "target_entropy", "exploration_fraction"), (0, 1)),
    "initial_temperature": (1e-9, None),
    "exploration_length": (1, None),
}

# What differs by environment, as in the tables of papers; a flag on the command line wins.
TUNED = {
    "CartPole": dict(total_steps=50_000, eval_every=10_000, utd_ratio=1.0, learning_rate=3e-4,
                     exploration_fraction=0.5),
    "Acrobot": dict(total_steps=100_000, eval_every=20_000, n_step=3, utd_ratio=1.0,
                    hidden_size=256, polyak=0.005, exploration_length=6, warmup_steps=5000,
                    exploration_fraction=0.3, initial_temperature=1.0),
    "MountainCar": dict(total_steps=120_000, eval_every=20_000),
    "LunarLander-v3": dict(total_steps=300_000, eval_every=50_000),
}  # fmt: skip


class Normalizer(nn.Module):
    """Observations with mean 0 and variance 1, by the statistics of all that was seen."""

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))
        self.register_buffer("count", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.mean) * torch.rsqrt(self.var + 1e-8)).clamp(-10, 10)

    def update(self, x: Tensor) -> None:
        """Take in all learners' batches x (B, size); Chan's formula for the variance of a union."""
        x = x.reshape(-1, x.shape[-1])
        var, mean = var_mean_over_learners(x, 0)
        size = len(x) * count_learners()
        total = self.count + size
        share = size / total
        between = (mean - self.mean).square() * (1 - share)
        self.mean.lerp_(mean, share)
        self.var.lerp_(var + between, share)
        self.count.copy_(total)


class Actor(nn.Module):
    """Normalised observations (..., obs_dim) → logits of π (..., num_actions)."""

    def __init__(self, obs_dim: int, num_actions: int, hidden: int):
        super().__init__()
        self.first = nn.Linear(obs_dim, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.last = nn.Linear(hidden, num_actions)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).relu()).relu())


class Critics(nn.Module):
    """Normalised observations (B, obs_dim) → Q_i of every action (2, B, num_actions)."""

    def __init__(self, obs_dim: int, num_actions: int, hidden: int):
        super().__init__()
        sizes = [(obs_dim, hidden), (hidden, hidden), (hidden, num_actions)]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for inputs, outputs in sizes:  # as nn.Linear's: uniform in ± 1 / √inputs
            bound = 1 / math.sqrt(inputs)
            self.weights.append(torch.empty(2, inputs, outputs).uniform_(-bound, bound))
            self.biases.append(torch.empty(2, 1, outputs).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        x = x.expand(2, *x.shape)
        (w1, w2, w3), (b1, b2, b3) = self.weights, self.biases
        x = torch.baddbmm(b1, x, w1).relu()
        return torch.baddbmm(b3, torch.baddbmm(b2, x, w2).relu(), w3)


class Agent(nn.Module):
    """Actor, critics, temperature. forward: observation (N, obs_dim) → action (N,).

    The most probable action or, with Gumbel noise (N, num_actions) on the logits, a draw from π.
    """

    def __init__(self, observation_space, action_space, args: Args):
        super().__init__()
        obs_dim, self.num_actions = observation_space.shape[0], int(action_space.n)
        self.normalizer = Normalizer(obs_dim)
        self.actor = Actor(obs_dim, self.num_actions, args.hidden_size)
        self.critics = Critics(obs_dim, self.num_actions, args.hidden_size)
        self.log_temperature = nn.Parameter(torch.tensor(math.log(args.initial_temperature)))
        self.register_buffer("target_entropy", torch.tensor(0.98))  # of log(num_actions)
        self.register_buffer("noise", torch.zeros(args.num_envs, self.num_actions))
        self.exploration_length = args.exploration_length

    def forward(self, obs: Tensor, noise: Tensor | float = 0.0) -> Tensor:
        return (self.actor(self.normalizer(obs)) + noise).argmax(-1)


@torch.no_grad()
def collect(agent: Agent, envs: vec_envs.VecEnv, rollout: dict[str, Tensor]) -> None:
    """T steps of the present policy in every env.

    The noise of a draw is kept with probability 1 − 1/L, L = --exploration-length, so that several
    in a row agree where π leaves the choice open. Where an action shows in the next state they are
    then no draws from π, which off-policy learning does not need.
    """
    gumbel = -torch.empty_like(rollout["noise"]).exponential_().log()  # (T, N, num_actions)
    stays = torch.rand_like(gumbel[..., :1]) > 1 / agent.exploration_length
    for t in range(len(rollout["obs"])):
        obs = envs.obs
        kept = rollout["noise"][t - 1]  # before 0: the last rollout's
        noise = torch.where(stays[t], kept, gumbel[t])
        action = agent(obs, noise)
        rollout["noise"][t] = noise
        rollout["obs"][t] = obs
        rollout["action"][t] = action
        _, reward, terminated, truncated, info = envs.step(action)
        rollout["reward"][t] = reward
        rollout["next_obs"][t] = info["final_obs"]
        rollout["terminated"][t] = terminated
        rollout["done"][t] = terminated | truncated
        rollout["episode_return"][t] = info["episode_return"]
        rollout["episode_length"][t] = info["episode_length"]


@torch.no_grad()
def critic_target(agent: Agent, target_critics: Critics, batch: dict[str, Tensor]) -> Tensor:
    """y = r + γ (1 − terminated) Σ_a π(a|s') [ min_i Q̄_i(s', a) − α log π(a|s') ], (B,)"""
    next_obs = agent.normalizer(batch["next_obs"])
    log_probs = agent.actor(next_obs).log_softmax(-1)
    soft_q = target_critics(next_obs).amin(0) - agent.log_temperature.exp() * log_probs
    next_value = (log_probs.exp() * soft_q).sum(-1)
    return batch["reward"] + batch["discount"] * ~batch["terminated"] * next_value


def critic_loss(q: Tensor, action: Tensor, target: Tensor) -> Tensor:
    """Σ_i ½ E[ (Q_i(s, a) − y)² ] for q (2, B, num_actions)."""
    taken = q.gather(-1, action.expand(2, -1).unsqueeze(-1)).squeeze(-1)  # (2, B)
    return 0.5 * (taken - target).square().mean(1).sum()


def actor_loss(log_probs: Tensor, q: Tensor, temperature: Tensor) -> Tensor:
    """E[ Σ_a π(a|s) ( α log π(a|s) − min_i Q_i(s, a) ) ]"""
    cost = temperature.detach() * log_probs - q.detach().amin(0)  # (B, num_actions)
    return (log_probs.exp() * cost).sum(-1).mean()


def temperature_loss(log_temperature: Tensor, entropy: Tensor, target: Tensor) -> Tensor:
    """log α · ( E[ H(π(·|s)) ] − H̄ ): α falls while the entropy is above its target."""
    return log_temperature * (entropy.detach() - target)


def target_entropy_at(step: int, args: Args) -> float:
    """H̄ / log(number of actions): from 0.98 linearly to its final value, and there it stays."""
    progress = step / max(args.exploration_fraction * args.total_steps, 1)
    return max(0.98 - (0.98 - args.target_entropy) * progress, args.target_entropy)


def sac_loss(agent: Agent, target_critics, batch, args: Args) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of the three losses of one batch, and what to log of it."""
    target = critic_target(agent, target_critics, batch)
    obs = agent.normalizer(batch["obs"])
    log_probs, q = agent.actor(obs).log_softmax(-1), agent.critics(obs)
    temperature = agent.log_temperature.exp()
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    target_entropy = agent.target_entropy * math.log(agent.num_actions)
    critic = critic_loss(q, batch["action"], target)
    actor = actor_loss(log_probs, q, temperature)
    total = critic + actor + temperature_loss(agent.log_temperature, entropy, target_entropy)
    logged = {"critic": critic, "actor": actor, "entropy": entropy, "temperature": temperature}
    return total, {**logged, "q_value": q}


def update(agent: Agent, target_critics, optimizer, replay, loss_gradient, args: Args) -> dict:
    """One gradient step on a batch from the replay buffer -> what to log."""
    batch = replay.sample(args.batch_size)
    gradient, _, losses = loss_gradient(agent, target_critics, batch, args)
    gradient_step(gradient, optimizer)
    return losses


def train(args: Args) -> Result:
    run = Run(args, __file__, LIMITS)
    args = run.args
    workers = Workers(run, collect, "discrete", ahead=True)
    agent = Agent(workers.observation_space, workers.action_space, args).to(run.device)
    target_critics = copy.deepcopy(agent.critics)
    weights, target_weights = flatten(agent), flatten(target_critics).detach()
    critic_weights = weights.detach()[-len(target_weights) :]  # the agent's last parameters
    learning_rate = torch.tensor(args.learning_rate, device=run.device)
    optimizer = torch.optim.Adam([weights], learning_rate, fused=True)
    rollout = workers.start(agent, args.horizon, noise=(agent.num_actions,))
    empty = {name: tensor for name, tensor in rollout.items() if name != "noise"}
    replay = ReplayBuffer(run, empty, args.buffer_size, n_step=args.n_step, discount=args.discount)
    loss_gradient = run.gradient(sac_loss, agent)
    state = {"target": target_critics, "optimizer": optimizer, "replay": replay}
    step = run.start(agent=agent, workers=workers, **state)
    rollout["noise"][-1] = agent.noise  # of a resumed run

    losses: dict[str, Tensor] = {}  # of the last update
    while step < args.total_steps:
        agent.target_entropy.fill_(target_entropy_at(step, args))
        left = 1 - step / args.total_steps
        optimizer.param_groups[0]["lr"].fill_(args.learning_rate * left)
        rollout = workers.collect()
        agent.noise.copy_(rollout["noise"][-1])
        replay.add(rollout)
        agent.normalizer.update(rollout["obs"])
        before, step = step, step + args.horizon * args.num_envs * run.learners

        if step >= args.warmup_steps and len(replay) >= min(args.warmup_steps, args.buffer_size):
            for _ in range(int(before * args.utd_ratio), int(step * args.utd_ratio)):
                losses = update(agent, target_critics, optimizer, replay, loss_gradient, args)
                target_weights.lerp_(critic_weights, args.polyak)

        run.log_episodes(step, rollout)
        if step // args.log_every > before // args.log_every:
            means = {name: value.mean() for name, value in losses.items()}
            run.log(step, means, replay_size=len(replay), policy_lag=workers.policy_lag)
        run.evaluate(step)
        run.checkpoint(step)
    return run.finish(step)


if __name__ == "__main__":
    train(parse(Args, TUNED))
