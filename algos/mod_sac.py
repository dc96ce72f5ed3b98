"""Modified soft actor-critic (ModSAC): sac.py whose policy waits while the critics are unreliable.

The rule is that of ElegantRL's ModSAC. At each update of the critics, with their loss L(Q),

    due = ( n ≥ 0 )                       n = 0 at first
    L̄ ← 0.995 L̄ + 0.005 L(Q)              L̄ = 1 at first
    λ = exp( − L̄² )                       reliability of the critics, in (0, 1]
    n ← n + 1 / (2 − λ)                   updates of the policy that are due
    if due:  n ← n − 1  and update actor and temperature

so that the policy moves at every update of the critics while their loss is small (λ → 1), and at
every second while it is large (λ → 0).

    python algos/mod_sac.py --env HalfCheetah

What differs from sac.py: `critics_reliability`, and `due`, which `train` finds before an update.
What differs from ElegantRL (github.com/AI4Finance-Foundation/ElegantRL): there the policy is due if
n_π / n_Q < 1 / (2 − λ), with the numbers of updates of policy and critics since the last rollout
and the λ of the present update (here: of the one before); L(Q) is half the sum of two smooth L1
losses (here: of two squares); in some of its versions the temperature does not wait. L(Q) has the
unit of a squared return, so what is "large" depends on the rewards, which this script does not
scale: λ differs from 0 only if L(Q) falls below about 2; if it never does, the policy is updated
at every second update of the critics.
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
    Workers,
    average_gradients,
    mean_over_learners,
    parse,
)


@dataclass
class Args(TransitionArgs):
    """ModSAC on any environment with continuous actions."""

    env: str = "HalfCheetah"
    num_envs: int = 4
    num_steps: int = 1
    """steps of each environment between updates"""
    utd_ratio: float = 1.0
    """updates per transition collected"""
    batch_size: int = 256
    """transitions of one gradient step"""
    buffer_size: int = 1_000_000
    """capacity of the replay buffer, in transitions"""
    warmup_steps: int = 10_000
    """steps with uniformly random actions; updates begin when the buffer has as many transitions"""
    learning_rate: float = 1e-3
    """Adam's learning rate for actor, critics and temperature"""
    gamma: float = 0.99
    """γ, the discount factor; `discount` in a batch is γⁿ"""
    tau: float = 0.005
    """τ: how far the target networks move at each of their updates"""
    hidden_size: int = 256
    """width of the two hidden layers of actor and critics"""


# What differs by environment; a flag on the command line wins.
TUNED = {"Pendulum": dict(total_steps=10_000, warmup_steps=1000)}


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
        self.critics = Critics(obs_dim, act_dim, args.hidden_size)
        self.log_temperature = nn.Parameter(torch.zeros(()))  # log α
        self.target_entropy = -act_dim
        self.register_buffer("average_critic_loss", torch.ones(()))  # L̄
        self.register_buffer("policy_due", torch.zeros(()))  # n
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


def critic_loss(agent: Agent, target: Critics, batch: dict) -> tuple[Tensor, Tensor]:
    """Σ_i E[ ½ w δ_i² ] with δ_i = Q_i(s, a) − y, importance weights w; and max_i |δ_i| (B,)."""
    with torch.no_grad():
        next_action, next_log_prob = agent.actor.sample(batch["next_obs"])
        next_value = torch.minimum(*target(batch["next_obs"], next_action))
        next_value = next_value - agent.log_temperature.exp() * next_log_prob
        y = batch["reward"] + batch["discount"] * ~batch["terminated"] * next_value
    q1, q2 = agent.critics(batch["obs"], batch["action"])
    delta = torch.stack((q1, q2)) - y  # δ_i, (2, B)
    return 0.5 * (batch["weight"] * delta.square().sum(0)).mean(), delta.detach().abs().amax(0)


def actor_loss(agent: Agent, batch: dict) -> tuple[Tensor, Tensor]:
    """E[ α log π(ã|s) − min_i Q_i(s, ã) ], and log π(ã|s) (B,)."""
    action, log_prob = agent.actor.sample(batch["obs"])
    value = torch.minimum(*agent.critics(batch["obs"], action))
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


@torch.no_grad()
def critics_reliability(agent: Agent, loss: Tensor) -> Tensor:
    """L̄ ← 0.995 L̄ + 0.005 L(Q), and λ = exp(− L̄²)"""
    agent.average_critic_loss.lerp_(mean_over_learners(loss), 0.005)
    return (-agent.average_critic_loss.square()).exp()


def update(agent: Agent, target: Critics, optimizers, batch: dict, due: bool, args: Args):
    """One step of critics; if `due`, of actor and temperature -> what to log, TD errors (B,)."""
    critic_optimizer, actor_optimizer = optimizers
    q_loss, td_error = critic_loss(agent, target, batch)
    critic_optimizer.zero_grad()
    q_loss.backward()
    average_gradients(agent.critics)
    critic_optimizer.step()
    reliability = critics_reliability(agent, q_loss)
    losses = {"critic": q_loss, "reliability": reliability}

    agent.policy_due += 1 / (2 - reliability)
    if due:
        agent.policy_due -= 1
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
    run = Run(args, __file__)
    args = run.args
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
            for _ in range(int(before * args.utd_ratio), int(step * args.utd_ratio)):
                batch = replay.sample(args.batch_size)
                due = agent.policy_due.item() >= 0  # here: compiled code cannot branch on a tensor
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
