"""Randomized ensembled double Q-learning (REDQ): sac.py with ten critics and twenty updates a step.

Chen, Wang, Zhou, Ross 2021, arXiv:2101.05982. From each transition much more is learned (UTD ratio
20) without believing one's own errors. With N critics, a random subset 𝓜 of M of them drawn anew
for each update, and a', ã drawn afresh from π at s' and s,

    y    = r + γ (1 − terminated) ( min_{i∈𝓜} Q̄_i(s', a') − α log π(a'|s') )
    L(Q) = Σ_i E[ ½ ( Q_i(s, a) − y )² ]                          all N of them
    L(π) = E[ α log π(ã|s) − 1/N Σ_i Q_i(s, ã) ]                 every `policy_delay` updates

    python algos/redq.py --env Hopper

What differs from sac.py:
- `critic_loss`: the minimum over M = 2 random critics of N = 10. M sets how pessimistic the target
  is, N how much the average over updates varies. Only the M are evaluated.
- `actor_loss`: the mean over all critics.
- `update`: the actor moves once for `policy_delay` updates of the critics: as often as in sac.py
  while that equals `utd_ratio`.
- Target entropies by environment (`TUNED`), one environment, a lower learning rate, a shorter
  warm-up: those of the authors' code.
- `Critics` is sac.py's: the ten are one batched network, so they cost a few large products.
"""

import copy
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vec_envs
from algos.worker_learner import (
    ReplayArgs,
    ReplayBuffer,
    Result,
    Run,
    UserError,
    Workers,
    flatten,
    gradient_step,
    mean_over_learners,
    parse,
)


@dataclass
class Args(ReplayArgs):
    """REDQ on any environment of vec_envs with continuous actions."""

    env: str = "Hopper"
    total_steps: int = 125_000
    num_envs: int = 1
    horizon: int = 1
    """steps of each environment between updates"""
    utd_ratio: float = 20.0
    """updates of the critics per transition collected"""
    policy_delay: int = 20
    """updates of the critics for one of the actor"""
    ensemble_size: int = 10
    """N: critics"""
    subset_size: int = 2
    """M: random critics whose minimum is the target's value"""
    batch_size: int = 256
    """transitions of one gradient step"""
    buffer_size: int = 1_000_000
    """transitions kept for replay"""
    warmup_steps: int = 5000
    """steps with uniformly random actions, before the first update"""
    target_entropy: float = 0.0
    """H̄, the entropy that α steers to (0: −dim(A))"""
    learning_rate: float = 3e-4
    """of Adam, for actor, critics and temperature"""
    discount: float = 0.99
    """γ"""
    polyak: float = 0.005
    """τ: how far the target network moves towards the critics at each update"""
    n_step: int = 1
    """rewards (without the entropies) summed before the target network is asked"""
    prioritized: bool = False
    """replay in proportion to the TD error (Schaul 2016) instead of uniformly"""
    reward_scale: float = 1.0
    """factor of all rewards"""
    max_grad_norm: float = 0.0
    """gradients longer than this are shortened to it (0: never)"""
    hidden_size: int = 256
    """width of the two hidden layers of actor and critics"""
    bf16: bool = False
    """matrix products of the losses (not for ∂Q/∂a) in bfloat16, where fast; may cost return"""


LIMITS = {
    **dict.fromkeys(("horizon", "batch_size", "buffer_size", "n_step", "hidden_size"), (1, None)),
    **dict.fromkeys(("discount", "polyak"), (0, 1)),
    **dict.fromkeys(("policy_delay", "ensemble_size", "subset_size"), (1, None)),
    "target_entropy": (None, None),
}

# What differs by environment; a flag on the command line wins.
TUNED = {
    "Hopper": dict(target_entropy=-1.0),
    "HalfCheetah": dict(target_entropy=-3.0),
    "Walker2d": dict(target_entropy=-3.0),
    "Ant": dict(target_entropy=-4.0),
    "Humanoid": dict(target_entropy=-2.0),
    "Pendulum": dict(total_steps=2500, warmup_steps=500, hidden_size=64),
}


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """inputs → hidden → hidden → outputs, ReLU."""
    return nn.Sequential(
        *(nn.Linear(inputs, hidden), nn.ReLU(inplace=True)),
        *(nn.Linear(hidden, hidden), nn.ReLU(inplace=True)),
        nn.Linear(hidden, outputs),
    )


class Critics(nn.Module):
    """Networks Q_i(s, a), i < count, as one batched network: obs, action (B, ...) → (count, B)."""

    def __init__(self, count: int, inputs: int, hidden: int):
        super().__init__()
        sizes = (inputs, hidden), (hidden, hidden), (hidden, 1)
        for layer, (rows, columns) in enumerate(sizes, 1):  # initial values as nn.Linear's
            for name, shape in (("weight", (rows, columns)), ("bias", (1, columns))):
                values = torch.empty(count, *shape).uniform_(-(rows**-0.5), rows**-0.5)
                self.register_parameter(f"{name}{layer}", nn.Parameter(values))

    def forward(self, obs: Tensor, action: Tensor, members: slice | Tensor = slice(None)) -> Tensor:
        w1, b1, w2, b2, w3, b3 = (weight[members] for weight in self.parameters())
        x = torch.cat((obs, action), -1).expand(len(w1), -1, -1)  # (count, B, inputs)
        x = torch.baddbmm(b1, x, w1).relu_()
        x = torch.baddbmm(b2, x, w2).relu_()
        return (x.to(w3) * w3.transpose(1, 2)).sum(-1) + b3.squeeze(-1)  # never in bfloat16


class Agent(nn.Module):
    """Actor, critics, temperature. forward: observation (N, obs_dim) → the environment's action.

    All of the policy's mathematics is in units where the action range is [−1, 1].
    """

    def __init__(self, observation_space, action_space, args: Args):
        super().__init__()
        obs_dim, act_dim = observation_space.shape[0], action_space.shape[0]
        self.actor = mlp(obs_dim, args.hidden_size, 2 * act_dim)
        self.actor.log_temperature = nn.Parameter(torch.zeros(()))  # in the actor's optimizer
        self.critics = Critics(args.ensemble_size, obs_dim + act_dim, args.hidden_size)
        self.target_entropy = args.target_entropy or -act_dim
        self.register_buffer("warm_up", torch.tensor(True))  # explore by uniform actions
        low, high = torch.tensor(action_space.low), torch.tensor(action_space.high)
        self.register_buffer("action_center", (high + low) / 2)
        self.register_buffer("action_scale", (high - low) / 2)

    def forward(self, obs: Tensor) -> Tensor:
        mean, _ = self.actor(obs).chunk(2, -1)
        return self.to_env(mean.tanh())

    def to_env(self, action: Tensor) -> Tensor:
        return self.action_center + self.action_scale * action

    def sample(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """a = tanh(u), u = μ(s) + σ(s) ε -> a (B, act_dim), log π(a|s) (B,).

        log π(a|s) = log N(u; μ, σ²) − Σ log(1 − tanh²u), and, without cancellation,
        log(1 − tanh²u) = 2 (log 2 − u − softplus(−2u)).
        """
        mean, log_std = self.actor(obs).to(obs).chunk(2, -1)  # the rest not in bfloat16
        log_std = log_std.clamp(-20, 2)
        noise = torch.randn_like(mean)
        u = mean + log_std.exp() * noise
        log_normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        log_slope = 2 * (math.log(2) - u - F.softplus(-2 * u))
        return u.tanh(), (log_normal - log_slope).sum(-1)

    def explore(self, obs: Tensor) -> Tensor:
        action, _ = self.sample(obs)
        return torch.where(self.warm_up, torch.rand_like(action) * 2 - 1, action)


@torch.no_grad()
def collect(agent: Agent, envs: vec_envs.VecEnv, rollout: dict[str, Tensor]) -> None:
    """T steps of the present policy, with exploration, in every env."""
    for t in range(len(rollout["obs"])):
        obs = envs.obs
        action = agent.explore(obs)
        rollout["obs"][t] = obs
        rollout["action"][t] = action
        _, reward, terminated, truncated, info = envs.step(agent.to_env(action))
        rollout["reward"][t] = reward
        rollout["next_obs"][t] = info["final_obs"]
        rollout["terminated"][t] = terminated
        rollout["done"][t] = terminated | truncated
        rollout["episode_return"][t] = info["episode_return"]
        rollout["episode_length"][t] = info["episode_length"]


def critic_loss(agent: Agent, target: Critics, batch: dict, args: Args) -> tuple[Tensor, Tensor]:
    """Σ_i E[ ½ w ( Q_i(s, a) − y )² ] with importance weights w, and the TD errors (B,)."""
    with torch.no_grad():
        next_action, log_prob = agent.sample(batch["next_obs"])
        chance = mean_over_learners(torch.rand(args.ensemble_size, device=log_prob.device))
        some = chance.topk(args.subset_size).indices  # the same for all learners
        next_value = target(batch["next_obs"], next_action, members=some).amin(0)
        next_value -= agent.actor.log_temperature.exp() * log_prob
        future = batch["discount"] * ~batch["terminated"] * next_value
        y = args.reward_scale * batch["reward"] + future
    error = y - agent.critics(batch["obs"], batch["action"])  # (N, B)
    return 0.5 * (batch["weight"] * error.square()).mean(1).sum(), error.detach().abs().mean(0)


def actor_loss(agent: Agent, batch: dict, args: Args) -> tuple[Tensor, Tensor]:
    """E[ α log π(ã|s) − 1/N Σ_i Q_i(s, ã) ], and log π(ã|s) (B,)."""
    action, log_prob = agent.sample(batch["obs"])
    with torch.autocast(action.device.type, enabled=False):  # ∂Q/∂a is not in bfloat16
        value = agent.critics(batch["obs"], action).mean(0)
    temperature = agent.actor.log_temperature.detach().exp()
    return (temperature * log_prob - value).mean(), log_prob.detach()


def temperature_loss(agent: Agent, log_prob: Tensor) -> Tensor:
    """− log α · E[ log π(ã|s) + H̄ ]: α grows while the entropy is below H̄."""
    return -agent.actor.log_temperature * (log_prob + agent.target_entropy).mean()


def policy_loss(agent: Agent, batch: dict, args: Args) -> tuple[Tensor, Tensor, Tensor]:
    """What actor and temperature lower together, the actor's part of it, log π(ã|s) (B,)."""
    loss, log_prob = actor_loss(agent, batch, args)
    return loss + temperature_loss(agent, log_prob), loss, log_prob


@torch.no_grad()
def move_target(target: nn.Module, network: nn.Module, polyak: float) -> None:
    """θ̄ ← (1 − τ) θ̄ + τ θ"""
    for theirs, ours in zip(target.parameters(), network.parameters(), strict=True):
        theirs.lerp_(ours, polyak)


def update(agent, target, optimizers, batch, gradients, number, args) -> tuple[dict, Tensor]:
    """Update `number` of the critics, perhaps of the actor -> what to log, the TD errors (B,)."""
    critic_optimizer, actor_optimizer = optimizers
    critic_gradient, actor_gradient = gradients
    losses = {}
    gradient, losses["critic"], td_error = critic_gradient(agent, target, batch, args)
    gradient_step(gradient, critic_optimizer, args.max_grad_norm)
    if number % args.policy_delay == 0:
        gradient, _, losses["actor"], log_prob = actor_gradient(agent, batch, args)
        gradient_step(gradient, actor_optimizer, args.max_grad_norm)
        losses["entropy"] = -log_prob.mean()
        losses["temperature"] = agent.actor.log_temperature.exp()
    move_target(target, agent.critics, args.polyak)
    return losses, td_error


def train(args: Args) -> Result:
    run = Run(args, __file__, LIMITS)
    args = run.args
    if args.subset_size > args.ensemble_size:
        allowed = f"from 1 to --ensemble-size, {args.ensemble_size}"
        raise UserError(f"--subset-size is {args.subset_size}; allowed is {allowed}")
    workers = Workers(run, collect, "bounded", ahead=True)
    agent = Agent(workers.observation_space, workers.action_space, args).to(run.device)
    target = copy.deepcopy(agent.critics).requires_grad_(False)
    optimizers = critic_optimizer, actor_optimizer = [
        torch.optim.Adam([flatten(network)], args.learning_rate, fused=True)
        for network in (agent.critics, agent.actor)
    ]
    rollout = workers.start(agent, args.horizon)
    replay = ReplayBuffer(
        run, rollout, args.buffer_size, n_step=args.n_step, discount=args.discount,
        prioritized=args.prioritized,
    )  # fmt: skip
    gradients = run.gradient(critic_loss, agent.critics), run.gradient(policy_loss, agent.actor)
    step = run.start(
        agent=agent, target=target, critic_optimizer=critic_optimizer,
        actor_optimizer=actor_optimizer, workers=workers, replay=replay,
    )  # fmt: skip

    losses: dict[str, Tensor] = {}  # of the last updates
    while step < args.total_steps:
        agent.warm_up.fill_(step < args.warmup_steps)
        rollout = workers.collect()
        replay.add(rollout)
        before, step = step, step + args.horizon * args.num_envs * run.learners
        if step >= args.warmup_steps and len(replay) >= min(args.warmup_steps, args.buffer_size):
            replay.importance_exponent = 0.4 + 0.6 * before / args.total_steps
            for number in range(int(before * args.utd_ratio), int(step * args.utd_ratio)):
                batch = replay.sample(args.batch_size)
                new, td_error = update(agent, target, optimizers, batch, gradients, number, args)
                losses |= new
                replay.update_priorities(batch["index"], td_error)

        run.log_episodes(step, rollout)
        if step // args.log_every > before // args.log_every:
            run.log(step, losses, replay_size=len(replay), policy_lag=workers.policy_lag)
        run.evaluate(step)
        run.checkpoint(step)
    return run.finish(step)


if __name__ == "__main__":
    train(parse(Args, TUNED))
