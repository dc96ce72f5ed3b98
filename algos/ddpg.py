"""Deep deterministic policy gradient (DDPG): Q-learning where an actor finds the best action.

Lillicrap et al. 2016, arXiv:1509.02971. With Q̄, μ̄ the slow target networks,

    y    = r + γ (1 − terminated) Q̄(s', μ̄(s'))
    L(Q) = E[ ½ ( Q(s, a) − y )² ]
    L(μ) = − E[ Q(s, μ(s)) ]
    θ̄    ← (1 − τ) θ̄ + τ θ                       after every update

    python algos/ddpg.py --env HalfCheetah

`collect` explores with noise on μ(s); `ReplayBuffer` mixes transitions of different times, so that
the transitions of a batch are nearly independent; `soft_update` makes y change slowly.
What differs from the paper (its values in brackets; most of ours are those of TD3's authors):
- the noise is independent from step to step (paper: an Ornstein–Uhlenbeck process), σ = 0.1 (0.2);
  the first actions are uniform;
- two layers of 256 (400 and 300), the action enters the first (second), no batch normalisation,
  no weight decay, PyTorch's initial weights (the last layers near zero);
- Adam's rate is 1e-3 for both networks (actor 1e-4), τ = 0.005 (0.001), batches of 256 (64);
- four environments collect, one update per transition; a truncated episode bootstraps from its true
  last observation; with --n-step, r is a sum of n discounted rewards and `discount` is γⁿ (else γ);
  with --prioritized, `weight` (else 1) corrects L(Q) for the non-uniform sampling, not L(μ).
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import vec_envs
from algos.worker_learner import (
    ReplayBuffer,
    Result,
    Run,
    TransitionArgs,
    Workers,
    average_gradients,
    parse,
)


@dataclass
class Args(TransitionArgs):
    """DDPG on any environment with continuous actions."""

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
    """Adam's learning rate for every network"""
    gamma: float = 0.99
    """γ, the discount factor; `discount` in a batch is γⁿ"""
    tau: float = 0.005
    """τ: how far the target networks move at each of their updates"""
    exploration_noise: float = 0.1
    """σ of the noise on actions, in units of half the action range"""
    hidden_size: int = 256
    """width of the two hidden layers of actor and critic"""


# What differs by environment; a flag on the command line wins.
TUNED = {"Pendulum": dict(total_steps=10_000, warmup_steps=1000)}


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(inputs, hidden), nn.ReLU(inplace=True)),
        *(nn.Linear(hidden, hidden), nn.ReLU(inplace=True)),
        nn.Linear(hidden, outputs),
    )


class Actor(nn.Module):
    """μ(s). forward: observation (B, obs_dim) → action in [−1, 1]."""

    def __init__(self, obs_dim: int, act_dim: int, hidden: int):
        super().__init__()
        self.network = mlp(obs_dim, hidden, act_dim)

    def forward(self, obs: Tensor) -> Tensor:
        return self.network(obs).tanh()


class Critic(nn.Module):
    """One network. forward: observation, action (B, ...) → Q(s, a) (B,)."""

    def __init__(self, obs_dim: int, act_dim: int, hidden: int):
        super().__init__()
        self.q = mlp(obs_dim + act_dim, hidden, 1)

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        x = torch.cat((obs, action), -1)
        return self.q(x).squeeze(-1)


class Agent(nn.Module):
    """Actor and critic. forward: observation (N, obs_dim) → the environment's action."""

    def __init__(self, observation_space, action_space, args: Args):
        super().__init__()
        obs_dim, act_dim = observation_space.shape[0], action_space.shape[0]
        self.actor = Actor(obs_dim, act_dim, args.hidden_size)
        self.critic = Critic(obs_dim, act_dim, args.hidden_size)
        self.exploration_noise = args.exploration_noise
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
    """T steps in every environment: actions μ(s) + σ ε, uniform ones at first."""
    for t in range(len(rollout["obs"])):
        obs = envs.obs
        action = agent.actor(obs)
        action = (action + agent.exploration_noise * torch.randn_like(action)).clamp(-1, 1)
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


def critic_loss(agent: Agent, target: Agent, batch: dict) -> tuple[Tensor, Tensor]:
    """E[ ½ w ( Q(s, a) − y )² ] with importance weights w, and the TD errors (B,)."""
    with torch.no_grad():
        next_action = target.actor(batch["next_obs"])
        next_value = target.critic(batch["next_obs"], next_action)
        y = batch["reward"] + batch["discount"] * ~batch["terminated"] * next_value
    q = agent.critic(batch["obs"], batch["action"])
    squared_error = (q - y).square()
    return 0.5 * (batch["weight"] * squared_error).mean(), (q - y).detach()


def actor_loss(agent: Agent, batch: dict) -> Tensor:
    """− E[ Q(s, μ(s)) ]"""
    action = agent.actor(batch["obs"])
    return -agent.critic(batch["obs"], action).mean()


@torch.no_grad()
def soft_update(target: nn.Module, network: nn.Module, tau: float) -> None:
    """θ̄ ← (1 − τ) θ̄ + τ θ"""
    for theirs, ours in zip(target.parameters(), network.parameters(), strict=True):
        theirs.lerp_(ours, tau)


def update(agent: Agent, target: Agent, optimizers, batch: dict, args: Args):
    """One step of critic, actor and targets -> what to log, the TD errors (B,)."""
    critic_optimizer, actor_optimizer = optimizers
    q_loss, td_error = critic_loss(agent, target, batch)
    critic_optimizer.zero_grad()
    q_loss.backward()
    average_gradients(agent.critic)
    critic_optimizer.step()

    policy_loss = actor_loss(agent, batch)
    actor_optimizer.zero_grad()
    policy_loss.backward(inputs=actor_optimizer.param_groups[0]["params"])  # not the critic's
    average_gradients(agent.actor)
    actor_optimizer.step()

    soft_update(target, agent, args.tau)
    return {"critic": q_loss, "actor": policy_loss}, td_error


def train(args: Args) -> Result:
    run = Run(args, __file__)
    args = run.args
    workers = Workers(run, collect, "bounded", ahead=True)  # ahead: workers collect during updates
    agent = Agent(workers.observation_space, workers.action_space, args).to(run.device)
    target = copy.deepcopy(agent).requires_grad_(False)
    critic_optimizer = torch.optim.Adam(agent.critic.parameters(), args.learning_rate, fused=True)
    actor_optimizer = torch.optim.Adam(agent.actor.parameters(), args.learning_rate, fused=True)
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
                losses, td_error = learn(agent, target, optimizers, batch, args)
                replay.update_priorities(batch["index"], td_error)

        run.log_episodes(step, rollout)
        if step // args.log_every > before // args.log_every:
            run.log(step, losses, replay_size=len(replay))
        run.evaluate(step)
        run.checkpoint(step)
    return run.finish(step)


if __name__ == "__main__":
    train(parse(Args, TUNED))
