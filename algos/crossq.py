"""CrossQ: sac.py without target networks; batch normalisation in the critics takes their place.

Bhatt, Palenicek, Belousov, Argus, Amiranashvili, Brox, Peters 2024, arXiv:1902.05605. (s, a) and
(s', a') have different distributions; here the statistics of their mixture normalise both:

    [ Q_i(s, a) ; Q_i(s', a') ] = Q_i( [ s ; s' ], [ a ; a' ] )              one pass
    y    = r + γ (1 − terminated) ( min_i Q_i(s', a') − α log π(a'|s') )     no gradient
    L(Q) = Σ_i E[ ½ ( Q_i(s, a) − y )² ]
    L(π) = E[ α log π(ã|s) − min_i Q_i(s, ã) ]          every `policy_delay`-th update

    python algos/crossq.py --env Ant

What differs from sac.py:
- `BatchRenorm` before each layer of actor and critics (Ioffe 2017, arXiv:1702.03275). A network
  uses the batch's statistics only while it is updated; a' and the Q of L(π) use running ones.
- `critic_loss`: the one pass; no target networks. `update`: the steps of actor and α are delayed.
- Half the warm-up, wide critics, and Adam's β₁ = 0.5.
What differs from the paper: four environments, critics 512 wide (2048), PyTorch's initial weights,
γ = 0.99 on Swimmer, too (0.9999); from the authors' code: log α in place of α in L(α), and β₁ = 0.5
for α, too (0.9).
"""

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
    Workers,
    average_gradients,
    parse,
    var_mean_over_learners,
)


@dataclass
class Args(TransitionArgs):
    """CrossQ on any environment with continuous actions."""

    env: str = "Ant"
    num_envs: int = 4
    num_steps: int = 1
    """steps of each environment between updates"""
    utd_ratio: float = 1.0
    """updates of the critics per transition collected"""
    policy_delay: int = 3
    """updates of the critics per update of actor and temperature"""
    batch_size: int = 256
    """transitions of one gradient step"""
    buffer_size: int = 1_000_000
    """capacity of the replay buffer, in transitions"""
    warmup_steps: int = 5000
    """steps with uniformly random actions; updates begin when the buffer has as many transitions"""
    learning_rate: float = 1e-3
    """Adam's learning rate for actor, critics and temperature"""
    gamma: float = 0.99
    """γ, the discount factor; `discount` in a batch is γⁿ"""
    hidden_size: int = 256
    """width of the two hidden layers of the actor"""
    critic_hidden_size: int = 512
    """width of the two hidden layers of the critics"""


LIMITS = {"batch_size": (2, None)}  # one transition has no variance

# What differs by environment; a flag on the command line wins.
TUNED = {
    "Pendulum": dict(total_steps=10_000, warmup_steps=1000, hidden_size=64, critic_hidden_size=128),
}


class BatchRenorm(nn.Module):
    """Batch renormalisation of x (B, features), then a learned scale and a learned shift.

    While training, with mean m and standard deviation s of the batch, μ and σ the running ones:

        y = (x − m) / s · r + d,   r = clip(s/σ, 1/3, 3),   d = clip((m − μ)/σ, −5, 5)

    r and d have no gradient; unless they are clipped, y = (x − μ) / σ, as at evaluation. In the
    first 100,000 batches r = 1, d = 0 (batch normalisation): μ and σ² are not yet reliable.
    """

    def __init__(self, features: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(features))
        self.shift = nn.Parameter(torch.zeros(features))
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("var", torch.ones(features))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        running_std = (self.var + 1e-3).sqrt()
        if not self.training:
            return (x - self.mean) * (self.scale / running_std) + self.shift
        var, mean = var_mean_over_learners(x, 0)
        std = (var + 1e-3).sqrt()
        with torch.no_grad():
            reliable = self.batches >= 100_000
            r = torch.where(reliable, (std / running_std).clamp(1 / 3, 3), 1.0)
            d = torch.where(reliable, ((mean - self.mean) / running_std).clamp(-5, 5), 0.0)
            self.mean.lerp_(mean, 0.01)  # 0.99 of the old, 0.01 of this batch's
            self.var.lerp_(var, 0.01)
            self.batches += 1
        return (x - mean) * (self.scale * r / std) + (self.scale * d + self.shift)


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        *(BatchRenorm(inputs), nn.Linear(inputs, hidden), nn.ReLU(inplace=True)),
        *(BatchRenorm(hidden), nn.Linear(hidden, hidden), nn.ReLU(inplace=True)),
        *(BatchRenorm(hidden), nn.Linear(hidden, outputs)),
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


class Critics(nn.Module):
    """Two networks. forward: observation, action (B, ...) → Q_1(s, a), Q_2(s, a), each (B,)."""

    def __init__(self, obs_dim: int, act_dim: int, hidden: int):
        super().__init__()
        self.q1 = mlp(obs_dim + act_dim, hidden, 1)
        self.q2 = mlp(obs_dim + act_dim, hidden, 1)

    def forward(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat((obs, action), -1)
        return self.q1(x).squeeze(-1), self.q2(x).squeeze(-1)


class Agent(nn.Module):
    """Actor, critics, temperature. forward: observation (N, obs_dim) → the environment's action."""

    def __init__(self, observation_space, action_space, args: Args):
        super().__init__()
        obs_dim, act_dim = observation_space.shape[0], action_space.shape[0]
        self.actor = Actor(obs_dim, act_dim, args.hidden_size)
        self.critics = Critics(obs_dim, act_dim, args.critic_hidden_size)
        self.eval()  # running statistics, except where a network learns
        self.log_temperature = nn.Parameter(torch.zeros(()))  # log α
        self.target_entropy = -act_dim
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


def critic_loss(agent: Agent, batch: dict) -> tuple[Tensor, Tensor]:
    """Σ_i E[ ½ w δ_i² ] with δ_i = Q_i(s, a) − y, importance weights w; and max_i |δ_i| (B,)."""
    with torch.no_grad():
        next_action, next_log_prob = agent.actor.sample(batch["next_obs"])
    obs = torch.cat((batch["obs"], batch["next_obs"]))  # (2 B, obs_dim)
    action = torch.cat((batch["action"], next_action))
    agent.critics.train()
    (q1, next_q1), (q2, next_q2) = (q.chunk(2) for q in agent.critics(obs, action))
    agent.critics.eval()
    with torch.no_grad():
        next_value = torch.minimum(next_q1, next_q2)
        next_value = next_value - agent.log_temperature.exp() * next_log_prob
        y = batch["reward"] + batch["discount"] * ~batch["terminated"] * next_value
    delta = torch.stack((q1, q2)) - y  # δ_i, (2, B)
    return 0.5 * (batch["weight"] * delta.square().sum(0)).mean(), delta.detach().abs().amax(0)


def actor_loss(agent: Agent, batch: dict) -> tuple[Tensor, Tensor]:
    """E[ α log π(ã|s) − min_i Q_i(s, ã) ], and log π(ã|s) (B,)."""
    agent.actor.train()
    action, log_prob = agent.actor.sample(batch["obs"])
    agent.actor.eval()
    value = torch.minimum(*agent.critics(batch["obs"], action))
    temperature = agent.log_temperature.detach().exp()
    return (temperature * log_prob - value).mean(), log_prob.detach()


def temperature_loss(agent: Agent, log_prob: Tensor) -> Tensor:
    """− log α · E[ log π(ã|s) + H̄ ]: α grows while the entropy is below H̄."""
    return -agent.log_temperature * (log_prob + agent.target_entropy).mean()


def update(agent: Agent, optimizers, batch: dict, due: bool, args: Args):
    """One step of critics; if `due`, of actor and temperature -> what to log, TD errors (B,)."""
    critic_optimizer, actor_optimizer = optimizers
    q_loss, td_error = critic_loss(agent, batch)
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
    return losses, td_error


def train(args: Args) -> Result:
    run = Run(args, __file__, LIMITS)
    args = run.args
    workers = Workers(run, collect, "bounded", ahead=True)  # ahead: workers collect during updates
    agent = Agent(workers.observation_space, workers.action_space, args).to(run.device)
    actor_parameters = [*agent.actor.parameters(), agent.log_temperature]
    adam = dict(lr=args.learning_rate, betas=(0.5, 0.999), fused=True)
    critic_optimizer = torch.optim.Adam(agent.critics.parameters(), **adam)
    actor_optimizer = torch.optim.Adam(actor_parameters, **adam)
    optimizers = critic_optimizer, actor_optimizer
    learn = run.compile(update)  # compiled in long runs (--compile)
    replay = ReplayBuffer(run, workers.start(agent, args.num_steps), args.buffer_size)
    step = run.start(
        agent=agent, critic_optimizer=critic_optimizer, actor_optimizer=actor_optimizer,
        workers=workers, replay=replay,
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
                new, td_error = learn(agent, optimizers, batch, due, args)
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
