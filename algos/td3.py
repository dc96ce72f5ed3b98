"""Twin delayed deep deterministic policy gradient (TD3): ddpg.py plus three changes.

Fujimoto, van Hoof, Meger 2018, arXiv:1802.09477. With Q̄, μ̄ the slow target networks,

    a'   = clip( μ̄(s') + clip(σ̃ ε, −c, c), −1, 1 ),  ε ~ N(0, I)
    y    = r + γ (1 − terminated) min_i Q̄_i(s', a')
    L(Q) = Σ_i E[ ½ ( Q_i(s, a) − y )² ]
    L(μ) = − E[ Q_1(s, μ(s)) ]                   after every d-th update of the critics
    θ̄    ← (1 − τ) θ̄ + τ θ                       at the same time

    python algos/td3.py --env HalfCheetah

What differs from ddpg.py (the first against overestimation, the others against noisy targets):
- `Critics`, `critic_loss`: two critics, and the smaller of their target values.
- `critic_loss`: noise on the target actor's action, so that a narrow peak of Q̄ counts less.
- `update`: actor and target networks move after every d-th update of the critics.
What differs from the paper: two layers of 256 (400 and 300), batches of 256 (100), 10,000 steps of
uniform actions everywhere (only on HalfCheetah and Ant, else 1000), four environments collect,
a' is clipped to the action range (as in the authors' code). With --n-step, r is a sum of n
discounted rewards and `discount` is γⁿ (else γ); with --prioritized, `weight` corrects L(Q) alone.
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
    """TD3 on any environment with continuous actions."""

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
    target_noise: float = 0.2
    """σ̃ of the noise on the target actor's actions"""
    target_noise_clip: float = 0.5
    """c: the absolute value to which the target noise is clipped"""
    policy_delay: int = 2
    """d: updates of the critics per update of actor and target networks"""
    hidden_size: int = 256
    """width of the two hidden layers of actor and critics"""


# What differs by environment; a flag on the command line wins.
TUNED = {"Pendulum": dict(total_steps=10_000, warmup_steps=1000, policy_delay=1)}


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
    """Actor and critics. forward: observation (N, obs_dim) → the environment's action."""

    def __init__(self, observation_space, action_space, args: Args):
        super().__init__()
        obs_dim, act_dim = observation_space.shape[0], action_space.shape[0]
        self.actor = Actor(obs_dim, act_dim, args.hidden_size)
        self.critics = Critics(obs_dim, act_dim, args.hidden_size)
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


def critic_loss(agent: Agent, target: Agent, batch: dict, args: Args) -> tuple[Tensor, Tensor]:
    """Σ_i E[ ½ w δ_i² ] with δ_i = Q_i(s, a) − y, importance weights w; and max_i |δ_i| (B,)."""
    with torch.no_grad():
        noise = args.target_noise * torch.randn_like(batch["action"])
        noise = noise.clamp(-args.target_noise_clip, args.target_noise_clip)
        next_action = (target.actor(batch["next_obs"]) + noise).clamp(-1, 1)
        next_value = torch.minimum(*target.critics(batch["next_obs"], next_action))
        y = batch["reward"] + batch["discount"] * ~batch["terminated"] * next_value
    q1, q2 = agent.critics(batch["obs"], batch["action"])
    delta = torch.stack((q1, q2)) - y  # δ_i, (2, B)
    return 0.5 * (batch["weight"] * delta.square().sum(0)).mean(), delta.detach().abs().amax(0)


def actor_loss(agent: Agent, batch: dict) -> Tensor:
    """− E[ Q_1(s, μ(s)) ]"""
    action = agent.actor(batch["obs"])
    return -agent.critics.q1(torch.cat((batch["obs"], action), -1)).mean()


@torch.no_grad()
def soft_update(target: nn.Module, network: nn.Module, tau: float) -> None:
    """θ̄ ← (1 − τ) θ̄ + τ θ"""
    for theirs, ours in zip(target.parameters(), network.parameters(), strict=True):
        theirs.lerp_(ours, tau)


def update(agent: Agent, target: Agent, optimizers, batch: dict, due: bool, args: Args):
    """One step of critics and, if `due`, of actor and targets -> what to log, TD errors (B,)."""
    critic_optimizer, actor_optimizer = optimizers
    q_loss, td_error = critic_loss(agent, target, batch, args)
    critic_optimizer.zero_grad()
    q_loss.backward()
    average_gradients(agent.critics)
    critic_optimizer.step()
    if not due:
        return {"critic": q_loss}, td_error  # actor and target networks wait

    policy_loss = actor_loss(agent, batch)
    actor_optimizer.zero_grad()
    policy_loss.backward(inputs=actor_optimizer.param_groups[0]["params"])  # not the critics'
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
    critic_optimizer = torch.optim.Adam(agent.critics.parameters(), args.learning_rate, fused=True)
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
