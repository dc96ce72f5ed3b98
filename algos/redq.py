"""Randomized ensembled double Q-learning (REDQ): sac.py with ten critics, twenty updates per step.

Chen, Wang, Zhou, Ross 2021, arXiv:2101.05982. With N critics, a random subset 𝓜 of M of them drawn
anew for each update, and a', ã drawn anew from π at s' and s,

    y    = r + γ (1 − terminated) ( min_{i∈𝓜} Q̄_i(s', a') − α log π(a'|s') )
    L(Q) = Σ_i E[ ½ ( Q_i(s, a) − y )² ]                          all N of them
    L(π) = E[ α log π(ã|s) − 1/N Σ_i Q_i(s, ã) ]          every `policy_delay`-th update

    python algos/redq.py --env Hopper

What differs from sac.py:
- `EnsembleLinear`: one layer of all N networks is one batched matrix product.
- `critic_loss`: the minimum over M = 2 random critics of N = 10; M sets the target's pessimism.
- `actor_loss`: the mean over all critics. `update`: the steps of actor and α are delayed.
- One environment, a lower learning rate, a shorter warm-up, target entropies by environment.
What differs from the paper: PyTorch's initial weights (the authors' code: Xavier's, biases zero).
"""

import copy
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal

import vec_envs
from algos.worker_learner import (
    ReplayBuffer,
    Result,
    Run,
    TransitionArgs,
    UserError,
    Workers,
    average_gradients,
    mean_over_learners,
    parse,
)


@dataclass
class Args(TransitionArgs):
    """REDQ on any environment with continuous actions."""

    env: str = "Hopper"
    total_steps: int = 125_000
    num_envs: int = 1
    num_steps: int = 1
    """steps of each environment between updates"""
    utd_ratio: float = 20.0
    """updates of the critics per transition collected"""
    policy_delay: int = 20
    """updates of the critics per update of actor and temperature"""
    ensemble_size: int = 10
    """N, the number of critics"""
    subset_size: int = 2
    """M, the number of random critics whose minimum is used in the target"""
    batch_size: int = 256
    """transitions of one gradient step"""
    buffer_size: int = 1_000_000
    """capacity of the replay buffer, in transitions"""
    warmup_steps: int = 5000
    """steps with uniformly random actions; updates begin when the buffer has as many transitions"""
    target_entropy: float | None = None
    """H̄, the target entropy, towards which α is adjusted (None: −dim(A))"""
    learning_rate: float = 3e-4
    """Adam's learning rate for actor, critics and temperature"""
    gamma: float = 0.99
    """γ, the discount factor; `discount` in a batch is γⁿ"""
    tau: float = 0.005
    """τ: how far the target networks move at each of their updates"""
    hidden_size: int = 256
    """width of the two hidden layers of actor and critics"""


LIMITS = {"ensemble_size": (1, None), "subset_size": (1, None), "target_entropy": (None, None)}

# What differs by environment; a flag on the command line wins.
TUNED = {
    "Hopper": dict(target_entropy=-1.0), "HalfCheetah": dict(target_entropy=-3.0),
    "Walker2d": dict(target_entropy=-3.0), "Ant": dict(target_entropy=-4.0),
    "Humanoid": dict(target_entropy=-2.0),
    "Pendulum": dict(total_steps=2500, warmup_steps=500, hidden_size=64),
}  # fmt: skip


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(inputs, hidden), nn.ReLU(inplace=True)),
        *(nn.Linear(hidden, hidden), nn.ReLU(inplace=True)),
        nn.Linear(hidden, outputs),
    )


class Actor(nn.Module):
    """A squashed Gaussian. forward: observation (B, obs_dim) → its mean action in [−1, 1]."""

    def __init__(self, obs_dim: int, act_dim: int, hidden: int):
        super().__init__()
        self.mean_and_log_std = mlp(obs_dim, hidden, 2 * act_dim)

    def forward(self, obs: Tensor) -> Tensor:
        mean, _ = self.mean_and_log_std(obs).chunk(2, -1)
        return mean.tanh()

    def sample(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """a = tanh(u), u ~ N(μ(s), σ(s)²) -> a (B, act_dim), log π(a|s) (B,)."""
        mean, log_std = self.mean_and_log_std(obs).chunk(2, -1)
        normal = Normal(mean, log_std.clamp(-20, 2).exp())
        u = normal.rsample()
        return u.tanh(), log_density(normal, u)


def log_density(normal: Normal, u: Tensor) -> Tensor:  # (..., act_dim) -> (...)
    """log π(a|s) = log N(u) − Σ log(1 − tanh²u), log(1 − tanh²u) = 2 (log 2 − u − softplus(−2u))"""
    return (normal.log_prob(u) - 2 * (math.log(2) - u - F.softplus(-2 * u))).sum(-1)


class EnsembleLinear(nn.Module):
    """N linear layers. forward: x (N, B, inputs), or (B, inputs) for all → (N, B, outputs)."""

    def __init__(self, ensemble_size: int, inputs: int, outputs: int):
        super().__init__()
        scale = inputs**-0.5  # initial values as nn.Linear's
        self.weight = nn.Parameter(scale * (2 * torch.rand(ensemble_size, inputs, outputs) - 1))
        self.bias = nn.Parameter(scale * (2 * torch.rand(ensemble_size, 1, outputs) - 1))

    def forward(self, x: Tensor, subset: slice | Tensor) -> Tensor:
        weight, bias = self.weight[subset], self.bias[subset]
        return torch.baddbmm(bias, x.expand(len(weight), -1, -1), weight)


class Critics(nn.Module):
    """N networks. forward: observation, action (B, ...) → Q_i(s, a), i in a subset, (M, B)."""

    def __init__(self, ensemble_size: int, obs_dim: int, act_dim: int, hidden: int):
        super().__init__()
        self.first = EnsembleLinear(ensemble_size, obs_dim + act_dim, hidden)
        self.second = EnsembleLinear(ensemble_size, hidden, hidden)
        self.last = EnsembleLinear(ensemble_size, hidden, 1)

    def forward(self, obs: Tensor, action: Tensor, subset: slice | Tensor = slice(None)) -> Tensor:
        x = self.first(torch.cat((obs, action), -1), subset).relu_()
        x = self.second(x, subset).relu_()
        return self.last(x, subset).squeeze(-1)


class Agent(nn.Module):
    """Actor, critics, temperature. forward: observation (N, obs_dim) → the environment's action."""

    def __init__(self, observation_space, action_space, args: Args):
        super().__init__()
        obs_dim, act_dim = observation_space.shape[0], action_space.shape[0]
        self.actor = Actor(obs_dim, act_dim, args.hidden_size)
        self.critics = Critics(args.ensemble_size, obs_dim, act_dim, args.hidden_size)
        self.log_temperature = nn.Parameter(torch.zeros(()))  # log α
        self.target_entropy = -act_dim if args.target_entropy is None else args.target_entropy
        self.register_buffer("warm_up", torch.tensor(True))  # a tensor: worker processes share it
        low, high = torch.tensor(action_space.low), torch.tensor(action_space.high)
        self.register_buffer("action_center", (high + low) / 2)
        self.register_buffer("action_scale", (high - low) / 2)

    def forward(self, obs: Tensor) -> Tensor:
        return self.to_env(self.actor(obs))

    def to_env(self, action: Tensor) -> Tensor:
        return self.action_center + self.action_scale * action


@torch.no_grad()
def collect(agent: Agent, envs: vec_envs.VecEnv, rollout: dict[str, Tensor]) -> None:
    """T steps in every environment: actions drawn from π, uniform ones at first."""
    for t in range(len(rollout["obs"])):
        obs = envs.obs
        action, _ = agent.actor.sample(obs)
        action = torch.where(agent.warm_up, 2 * torch.rand_like(action) - 1, action)
        rollout["obs"][t] = obs
        rollout["action"][t] = action
        _, reward, terminated, truncated, info = envs.step(agent.to_env(action))
        rollout["reward"][t] = reward
        rollout["next_obs"][t] = info["final_obs"]  # never the first one of a new episode
        rollout["terminated"][t] = terminated
        rollout["done"][t] = terminated | truncated
        rollout["episode_return"][t] = info["episode_return"]
        rollout["episode_length"][t] = info["episode_length"]


def critic_loss(agent: Agent, target: Critics, batch: dict, args: Args) -> tuple[Tensor, Tensor]:
    """Σ_i E[ ½ w ( Q_i(s, a) − y )² ] with importance weights w, and the mean |TD error| (B,)."""
    with torch.no_grad():
        next_action, next_log_prob = agent.actor.sample(batch["next_obs"])
        draw = mean_over_learners(torch.rand(args.ensemble_size, device=next_action.device))
        subset = draw.topk(args.subset_size).indices  # M random critics, the same for all learners
        next_value = target(batch["next_obs"], next_action, subset).amin(0)
        next_value = next_value - agent.log_temperature.exp() * next_log_prob
        y = batch["reward"] + batch["discount"] * ~batch["terminated"] * next_value
    td_error = agent.critics(batch["obs"], batch["action"]) - y  # (N, B)
    squared_error = td_error.square().sum(0)
    return 0.5 * (batch["weight"] * squared_error).mean(), td_error.detach().abs().mean(0)


def actor_loss(agent: Agent, batch: dict) -> tuple[Tensor, Tensor]:
    """E[ α log π(ã|s) − 1/N Σ_i Q_i(s, ã) ], and log π(ã|s) (B,)."""
    action, log_prob = agent.actor.sample(batch["obs"])
    value = agent.critics(batch["obs"], action).mean(0)
    temperature = agent.log_temperature.detach().exp()
    return (temperature * log_prob - value).mean(), log_prob.detach()


def temperature_loss(agent: Agent, log_prob: Tensor) -> Tensor:
    """− log α · E[ log π(ã|s) + H̄ ]: α grows while the entropy is below H̄."""
    return -agent.log_temperature * (log_prob + agent.target_entropy).mean()


@torch.no_grad()
def soft_update(target: nn.Module, network: nn.Module, tau: float) -> None:
    """θ̄ ← (1 − τ) θ̄ + τ θ"""
    for theirs, ours in zip(target.parameters(), network.parameters(), strict=True):
        theirs.lerp_(ours, tau)


def update(agent: Agent, target: Critics, optimizers, batch: dict, due: bool, args: Args):
    """One step of critics; if `due`, of actor and α -> what to log, the mean |TD error| (B,)."""
    critic_optimizer, actor_optimizer = optimizers
    q_loss, td_error = critic_loss(agent, target, batch, args)
    critic_optimizer.zero_grad()
    q_loss.backward()
    average_gradients(agent.critics)
    critic_optimizer.step()
    losses = {"critic": q_loss}

    if due:
        policy_loss, log_prob = actor_loss(agent, batch)
        actor_optimizer.zero_grad()
        loss = policy_loss + temperature_loss(agent, log_prob)  # they share no parameter
        loss.backward(inputs=actor_optimizer.param_groups[0]["params"])  # not the critics'
        average_gradients(agent.actor, agent.log_temperature)
        actor_optimizer.step()
        temperature = agent.log_temperature.detach().exp()
        losses |= {"actor": policy_loss, "entropy": -log_prob.mean(), "temperature": temperature}

    soft_update(target, agent.critics, args.tau)
    return losses, td_error


def train(args: Args) -> Result:
    run = Run(args, __file__, LIMITS)
    args = run.args
    if args.subset_size > args.ensemble_size:
        raise UserError(f"--subset-size is {args.subset_size}; allowed is at most --ensemble-size")
    workers = Workers(run, collect, "bounded", ahead=True)  # ahead: workers collect during updates
    agent = Agent(workers.observation_space, workers.action_space, args).to(run.device)
    target = copy.deepcopy(agent.critics).requires_grad_(False)
    critic_optimizer = torch.optim.Adam(agent.critics.parameters(), args.learning_rate, fused=True)
    actor_parameters = [*agent.actor.parameters(), agent.log_temperature]
    actor_optimizer = torch.optim.Adam(actor_parameters, args.learning_rate, fused=True)
    optimizers = critic_optimizer, actor_optimizer
    learn = run.compile(update)  # compiled in long runs (--compile)
    replay = ReplayBuffer(run, workers.start(agent, args.num_steps), args.buffer_size)
    step = run.start(
        agent=agent, target=target, critic_optimizer=critic_optimizer,
        actor_optimizer=actor_optimizer, workers=workers, replay=replay,
    )  # fmt: skip

    losses: dict[str, Tensor] = {}  # of the last update
    while step < args.total_steps:
        agent.warm_up.fill_(step < args.warmup_steps)
        rollout = workers.collect()
        replay.add(rollout)
        before, step = step, step + args.num_steps * args.num_envs * run.world_size
        if step >= args.warmup_steps and len(replay) >= min(args.warmup_steps, args.buffer_size):
            for number in range(int(before * args.utd_ratio), int(step * args.utd_ratio)):
                batch = replay.sample(args.batch_size)
                due = (number + 1) % args.policy_delay == 0
                new, td_error = learn(agent, target, optimizers, batch, due, args)
                losses |= new  # the actor's loss is in it only if `due`
                replay.update_priorities(batch["index"], td_error)

        run.log_episodes(step, rollout)
        if step // args.log_every > before // args.log_every:
            run.log(step, losses, replay_size=len(replay))
        run.evaluate(step)
        run.checkpoint(step)
    return run.finish(step)


if __name__ == "__main__":
    train(parse(Args, TUNED))
