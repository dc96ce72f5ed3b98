"""CrossQ: sac.py without target networks; batch normalisation makes the critics' own values do.

Bhatt, Palenicek, Belousov, Argus, Amiranashvili, Brox, Peters 2024, arXiv:1902.05605. (s, a) and
(s', a') come from different distributions, which is why normalisation used to fail in critics. In
one batch, both are normalised by the statistics of their mixture, and nothing need be slow:

    [ Q_i(s, a) ; Q_i(s', a') ] = Q_i( [ s ; s' ], [ a ; a' ] )              one pass
    y    = r + γ (1 − terminated) ( min_i Q_i(s', a') − α log π(a'|s') )     no gradient
    L(Q) = Σ_i E[ ½ ( Q_i(s, a) − y )² ]
    L(π) = E[ α log π(ã|s) − min_i Q_i(s, ã) ]                every `policy_delay` updates

    python algos/crossq.py --env Ant

By the paper it learns from as few transitions as REDQ, with a twentieth of the updates; that is not
measured here. What differs from sac.py:
- `BatchRenorm` before each layer of actor and critics (Ioffe 2017, arXiv:1702.03275). Statistics of
  the batch only while it learns (`critics.train()`), running ones elsewhere: a' and the policy's Q.
- `critic_loss`: the one pass. No target network, no `polyak`.
- `update`: the actor moves once for `policy_delay` updates of the critics.
- Half the warm-up, wide critics, and Adam's β₁ = 0.5. The paper's width is 2048, for a GPU;
  with 512, for a CPU, Ant had 5387 and 6086 after 300 k steps (two seeds; an hour on one core).
"""

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
    Workers,
    flatten,
    gradient_step,
    parse,
    var_mean_over_learners,
)


@dataclass
class Args(ReplayArgs):
    """CrossQ on any environment of vec_envs with continuous actions."""

    env: str = "Ant"
    num_envs: int = 4
    horizon: int = 1
    """steps of each environment between updates"""
    utd_ratio: float = 1.0
    """updates per transition collected"""
    batch_size: int = 256
    """transitions of one gradient step"""
    buffer_size: int = 1_000_000
    """transitions kept for replay"""
    warmup_steps: int = 5000
    """steps with uniformly random actions, before the first update"""
    learning_rate: float = 1e-3
    """of Adam, for actor, critics and temperature"""
    discount: float = 0.99
    """γ"""
    policy_delay: int = 3
    """updates of the critics for one of the actor"""
    renorm_after: int = 100_000
    """batches of plain batch normalisation, before renormalisation"""
    n_step: int = 1
    """rewards (without the entropies) summed before the critics are asked"""
    prioritized: bool = False
    """replay in proportion to the TD error (Schaul 2016) instead of uniformly"""
    reward_scale: float = 1.0
    """factor of all rewards"""
    max_grad_norm: float = 0.0
    """gradients longer than this are shortened to it (0: never)"""
    hidden_size: int = 256
    """width of the actor's two hidden layers"""
    critic_hidden_size: int = 512
    """width of the critics' two hidden layers"""
    bf16: bool = False
    """matrix products of the losses (not for ∂Q/∂a) in bfloat16, where fast; may cost return"""


LIMITS = {
    **dict.fromkeys(("horizon", "buffer_size", "n_step", "hidden_size"), (1, None)),
    **dict.fromkeys(("policy_delay", "critic_hidden_size"), (1, None)),
    "batch_size": (2, None),
    "discount": (0, 1),
}

# What differs by environment; a flag on the command line wins.
TUNED = {
    "Pendulum": dict(total_steps=10_000, warmup_steps=1000, hidden_size=64, critic_hidden_size=128),
}


class BatchRenorm(nn.Module):
    """x (..., B, features) with mean 0 and variance 1, over the batch or by running statistics,
    times a learnt scale, plus a learnt shift.

    While training, with m, s² of the batch and μ, σ² the running ones, r and d without gradient:

        y = (x − m) / s · r + d,   r = clip(s/σ, 1/3, 3),   d = clip((m − μ)/σ, −5, 5)

    so that y is what the running statistics would give unless the batch is far from them. In the
    first `after` batches r = 1 and d = 0, which is batch normalisation. To s² and σ² 1e-3 is added.
    """

    def __init__(self, after: int, *shape: int):
        super().__init__()
        self.after = after
        self.scale = nn.Parameter(torch.ones(shape))
        self.shift = nn.Parameter(torch.zeros(shape))
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.scale)  # never in bfloat16
        if not self.training:
            slope = self.scale * torch.rsqrt(self.var + 1e-3)
            return torch.addcmul(self.shift - self.mean * slope, x, slope)
        var, mean = var_mean_over_learners(x, -2, keepdim=True)
        inverse_std = torch.rsqrt(var + 1e-3)
        with torch.no_grad():
            std = (self.var + 1e-3).sqrt()
            r = (1 / (inverse_std * std)).clamp(1 / 3, 3)
            d = ((mean - self.mean) / std).clamp(-5, 5)
            warm = self.batches >= self.after
            r, d = torch.where(warm, r, 1.0), torch.where(warm, d, 0.0)
            self.mean.lerp_(mean, 0.01)
            self.var.lerp_(var, 0.01)
            self.batches += 1
        slope = self.scale * r * inverse_std
        return torch.addcmul(self.shift + self.scale * d - mean * slope, x, slope)


def mlp(inputs: int, hidden: int, outputs: int, renorm_after: int) -> nn.Sequential:
    """inputs → hidden → hidden → outputs, ReLU, each layer's input normalised."""
    return nn.Sequential(
        *(BatchRenorm(renorm_after, 1, inputs), nn.Linear(inputs, hidden), nn.ReLU(inplace=True)),
        *(BatchRenorm(renorm_after, 1, hidden), nn.Linear(hidden, hidden), nn.ReLU(inplace=True)),
        *(BatchRenorm(renorm_after, 1, hidden), nn.Linear(hidden, outputs)),
    )


class Critics(nn.Module):
    """Networks Q_i(s, a), i < count, as one batched network: obs, action (B, ...) → (count, B)."""

    def __init__(self, count: int, inputs: int, hidden: int, renorm_after: int):
        super().__init__()
        sizes = (inputs, hidden), (hidden, hidden), (hidden, 1)
        for layer, (rows, columns) in enumerate(sizes, 1):  # initial values as nn.Linear's
            for name, shape in (("weight", (rows, columns)), ("bias", (1, columns))):
                values = torch.empty(count, *shape).uniform_(-(rows**-0.5), rows**-0.5)
                self.register_parameter(f"{name}{layer}", nn.Parameter(values))
            self.add_module(f"renorm{layer}", BatchRenorm(renorm_after, count, 1, rows))

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        w1, b1, w2, b2, w3, b3 = self.parameters(recurse=False)
        x = torch.cat((obs, action), -1).expand(len(w1), -1, -1)  # (count, B, inputs)
        x = torch.baddbmm(b1, self.renorm1(x), w1).relu_()
        x = torch.baddbmm(b2, self.renorm2(x), w2).relu_()
        return (self.renorm3(x) * w3.transpose(1, 2)).sum(-1) + b3.squeeze(-1)  # never in bfloat16


class Agent(nn.Module):
    """Actor, critics, temperature. forward: observation (N, obs_dim) → the environment's action.

    All of the policy's mathematics is in units where the action range is [−1, 1].
    """

    def __init__(self, observation_space, action_space, args: Args):
        super().__init__()
        obs_dim, act_dim = observation_space.shape[0], action_space.shape[0]
        self.actor = mlp(obs_dim, args.hidden_size, 2 * act_dim, args.renorm_after)
        self.actor.log_temperature = nn.Parameter(torch.zeros(()))  # in the actor's optimizer
        inputs = obs_dim + act_dim
        self.critics = Critics(2, inputs, args.critic_hidden_size, args.renorm_after)
        self.eval()  # running statistics, except where a network learns
        self.target_entropy = -act_dim
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


def critic_loss(agent: Agent, batch: dict, args: Args) -> tuple[Tensor, Tensor]:
    """Σ_i E[ ½ w ( Q_i(s, a) − y )² ] with importance weights w, and the TD errors (B,)."""
    with torch.no_grad():
        next_action, log_prob = agent.sample(batch["next_obs"])
    obs = torch.cat((batch["obs"], batch["next_obs"]))  # (2 B, obs_dim)
    action = torch.cat((batch["action"], next_action))
    agent.critics.train()
    value, next_values = agent.critics(obs, action).chunk(2, -1)  # (2, B) each
    agent.critics.eval()
    with torch.no_grad():
        next_value = next_values.amin(0)
        next_value -= agent.actor.log_temperature.exp() * log_prob
        future = batch["discount"] * ~batch["terminated"] * next_value
        y = args.reward_scale * batch["reward"] + future
    error = y - value
    return 0.5 * (batch["weight"] * error.square()).mean(1).sum(), error.detach().abs().mean(0)


def actor_loss(agent: Agent, batch: dict, args: Args) -> tuple[Tensor, Tensor]:
    """E[ α log π(ã|s) − min_i Q_i(s, ã) ], and log π(ã|s) (B,)."""
    agent.actor.train()
    action, log_prob = agent.sample(batch["obs"])
    agent.actor.eval()
    with torch.autocast(action.device.type, enabled=False):  # ∂Q/∂a is not in bfloat16
        value = agent.critics(batch["obs"], action).amin(0)
    temperature = agent.actor.log_temperature.detach().exp()
    return (temperature * log_prob - value).mean(), log_prob.detach()


def temperature_loss(agent: Agent, log_prob: Tensor) -> Tensor:
    """− log α · E[ log π(ã|s) + H̄ ]: α grows while the entropy is below H̄."""
    return -agent.actor.log_temperature * (log_prob + agent.target_entropy).mean()


def policy_loss(agent: Agent, batch: dict, args: Args) -> tuple[Tensor, Tensor, Tensor]:
    """What actor and temperature lower together, the actor's part of it, log π(ã|s) (B,)."""
    loss, log_prob = actor_loss(agent, batch, args)
    return loss + temperature_loss(agent, log_prob), loss, log_prob


def update(agent, optimizers, batch, gradients, number, args) -> tuple[dict, Tensor]:
    """Update `number` of the critics, perhaps of the actor -> what to log, the TD errors (B,)."""
    critic_optimizer, actor_optimizer = optimizers
    critic_gradient, actor_gradient = gradients
    losses = {}
    gradient, losses["critic"], td_error = critic_gradient(agent, batch, args)
    gradient_step(gradient, critic_optimizer, args.max_grad_norm)
    if number % args.policy_delay == 0:
        gradient, _, losses["actor"], log_prob = actor_gradient(agent, batch, args)
        gradient_step(gradient, actor_optimizer, args.max_grad_norm)
        losses["entropy"] = -log_prob.mean()
        losses["temperature"] = agent.actor.log_temperature.exp()
    return losses, td_error


def train(args: Args) -> Result:
    run = Run(args, __file__, LIMITS)
    args = run.args
    workers = Workers(run, collect, "bounded", ahead=True)
    agent = Agent(workers.observation_space, workers.action_space, args).to(run.device)
    optimizers = critic_optimizer, actor_optimizer = [
        torch.optim.Adam([flatten(network)], args.learning_rate, betas=(0.5, 0.999), fused=True)
        for network in (agent.critics, agent.actor)
    ]
    rollout = workers.start(agent, args.horizon)
    replay = ReplayBuffer(
        run, rollout, args.buffer_size, n_step=args.n_step, discount=args.discount,
        prioritized=args.prioritized,
    )  # fmt: skip
    gradients = run.gradient(critic_loss, agent.critics), run.gradient(policy_loss, agent.actor)
    step = run.start(
        agent=agent, critic_optimizer=critic_optimizer, actor_optimizer=actor_optimizer,
        workers=workers, replay=replay,
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
                new, td_error = update(agent, optimizers, batch, gradients, number, args)
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
