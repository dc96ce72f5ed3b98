"""Deep deterministic policy gradient (DDPG): Q-learning where an actor finds the best action.

Lillicrap et al. 2016, arXiv:1509.02971. With Q̄, μ̄ the slow target networks,

    y    = r + γ (1 − terminated) Q̄(s', μ̄(s'))
    L(Q) = E[ ½ ( Q(s, a) − y )² ]
    L(μ) = − E[ Q(s, μ(s)) ]
    θ̄    ← (1 − τ) θ̄ + τ θ                       after every update

    python algos/ddpg.py --env HalfCheetah

What makes it work, each where it stands:
- `ReplayBuffer`: transitions of the last million steps, drawn at random, so that neighbours in time
  do not dominate a batch; `num_envs` environments collect, and the number of updates follows the
  number of transitions (`utd_ratio`).
- `critic_loss`: a truncated episode bootstraps from its true last observation, a terminated one
  does not.
- `train`: the actor's loss passes through the critic, which gets no gradient (`run.gradient`).
- `explore`: noise on the action, either independent or an Ornstein–Uhlenbeck process of each env;
  uniform actions at first. `move_target`: the target networks follow slowly.
- Defaults are those of TD3's authors: independent noise, two layers of 256, one learning rate.
"""

import copy
from dataclasses import dataclass
from typing import Literal

import torch
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
)


@dataclass
class Args(ReplayArgs):
    """DDPG on any environment of vec_envs with continuous actions."""

    env: str = "HalfCheetah"
    num_envs: int = 4
    horizon: int = 1
    """steps of each environment between updates"""
    utd_ratio: float = 1.0
    """updates per transition collected"""
    batch_size: int = 256
    """transitions of one gradient step"""
    buffer_size: int = 1_000_000
    """transitions kept for replay"""
    warmup_steps: int = 10_000
    """steps with uniformly random actions, before the first update"""
    learning_rate: float = 1e-3
    """of Adam, for actor and critic"""
    discount: float = 0.99
    """γ"""
    polyak: float = 0.005
    """τ: how far the target networks move at each update"""
    noise: Literal["gaussian", "ou"] = "gaussian"
    """exploration: independent noise, or an Ornstein–Uhlenbeck process ε ← (1 − θ) ε + σ N(0, 1)"""
    exploration_noise: float = 0.1
    """σ, in units of half the action range"""
    noise_decay: float = 0.15
    """θ of the Ornstein–Uhlenbeck process: how fast it forgets"""
    n_step: int = 1
    """rewards summed before the target networks are asked"""
    prioritized: bool = False
    """replay in proportion to the TD error (Schaul 2016) instead of uniformly"""
    reward_scale: float = 1.0
    """factor of all rewards"""
    max_grad_norm: float = 0.0
    """gradients longer than this are shortened to it (0: never)"""
    hidden_size: int = 256
    """width of the two hidden layers of actor and critic"""
    bf16: bool = False
    """matrix products of the losses (not for ∂Q/∂a) in bfloat16, where fast; may cost return"""


LIMITS = {
    **dict.fromkeys(("horizon", "batch_size", "buffer_size", "n_step", "hidden_size"), (1, None)),
    **dict.fromkeys(("discount", "polyak", "noise_decay"), (0, 1)),
}

# What differs by environment; a flag on the command line wins.
TUNED = {"Pendulum": dict(total_steps=10_000, warmup_steps=1000)}


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """inputs → hidden → hidden → outputs, ReLU."""
    return nn.Sequential(
        *(nn.Linear(inputs, hidden), nn.ReLU(inplace=True)),
        *(nn.Linear(hidden, hidden), nn.ReLU(inplace=True)),
        nn.Linear(hidden, outputs),
    )


class Agent(nn.Module):
    """Actor and critic. forward: observation (N, obs_dim) → the environment's action, no noise.

    All of the policy's mathematics is in units where the action range is [−1, 1].
    """

    def __init__(self, observation_space, action_space, args: Args):
        super().__init__()
        obs_dim, act_dim = observation_space.shape[0], action_space.shape[0]
        self.exploration_noise = args.exploration_noise
        self.memory = 1 - args.noise_decay if args.noise == "ou" else 0.0
        self.register_buffer("noise", torch.zeros(args.num_envs, act_dim))  # at the last step
        self.actor = mlp(obs_dim, args.hidden_size, act_dim)
        self.critic = mlp(obs_dim + act_dim, args.hidden_size, 1)
        self.register_buffer("warm_up", torch.tensor(True))  # explore by uniform actions
        low, high = torch.tensor(action_space.low), torch.tensor(action_space.high)
        self.register_buffer("action_center", (high + low) / 2)
        self.register_buffer("action_scale", (high - low) / 2)

    def forward(self, obs: Tensor) -> Tensor:
        return self.to_env(self.act(obs))

    def act(self, obs: Tensor) -> Tensor:
        """μ(s)"""
        return self.actor(obs).to(obs).tanh()  # tanh not in bfloat16

    def to_env(self, action: Tensor) -> Tensor:
        return self.action_center + self.action_scale * action

    def value(self, obs: Tensor, action: Tensor) -> Tensor:
        """Q(s, a) (B,)"""
        x, last = self.critic[:-1](torch.cat((obs, action), -1)), self.critic[-1]
        return (x.to(obs) * last.weight).sum(-1) + last.bias  # the last layer never in bfloat16

    def explore(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """An action (N, act_dim) and its noise, which follows `noise`, that of the step before."""
        noise = self.memory * noise + self.exploration_noise * torch.randn_like(noise)
        action = (self.act(obs) + noise).clamp(-1, 1)
        return torch.where(self.warm_up, torch.rand_like(action) * 2 - 1, action), noise


@torch.no_grad()
def collect(agent: Agent, envs: vec_envs.VecEnv, rollout: dict[str, Tensor]) -> None:
    """T steps of the present policy, with exploration, in every env."""
    for t in range(len(rollout["obs"])):
        obs = envs.obs
        action, noise = agent.explore(obs, rollout["noise"][t - 1])  # before 0: the last rollout's
        rollout["obs"][t] = obs
        rollout["action"][t] = action
        _, reward, terminated, truncated, info = envs.step(agent.to_env(action))
        rollout["reward"][t] = reward
        rollout["next_obs"][t] = info["final_obs"]
        rollout["terminated"][t] = terminated
        rollout["done"][t] = done = terminated | truncated
        rollout["noise"][t] = noise.masked_fill(done.unsqueeze(-1), 0)
        rollout["episode_return"][t] = info["episode_return"]
        rollout["episode_length"][t] = info["episode_length"]


def critic_loss(agent: Agent, target: Agent, batch: dict, args: Args) -> tuple[Tensor, Tensor]:
    """E[ ½ w ( Q(s, a) − y )² ] with importance weights w, and the TD errors (B,)."""
    with torch.no_grad():
        next_action = target.act(batch["next_obs"])
        next_value = target.value(batch["next_obs"], next_action)
        future = batch["discount"] * ~batch["terminated"] * next_value
        y = args.reward_scale * batch["reward"] + future
    error = y - agent.value(batch["obs"], batch["action"])  # (B,)
    return 0.5 * (batch["weight"] * error.square()).mean(), error.detach()


def actor_loss(agent: Agent, batch: dict, args: Args) -> Tensor:
    """− E[ Q(s, μ(s)) ]"""
    action = agent.act(batch["obs"])
    with torch.autocast(action.device.type, enabled=False):  # ∂Q/∂a is not in bfloat16
        return -agent.value(batch["obs"], action).mean()


@torch.no_grad()
def move_target(target: nn.Module, network: nn.Module, polyak: float) -> None:
    """θ̄ ← (1 − τ) θ̄ + τ θ"""
    for theirs, ours in zip(target.parameters(), network.parameters(), strict=True):
        theirs.lerp_(ours, polyak)


def update(agent, target, optimizers, batch, gradients, args: Args) -> tuple[dict, Tensor]:
    """One step of critic, actor and targets -> what to log, the TD errors (B,)."""
    critic_optimizer, actor_optimizer = optimizers
    critic_gradient, actor_gradient = gradients
    losses = {}
    gradient, losses["critic"], td_error = critic_gradient(agent, target, batch, args)
    gradient_step(gradient, critic_optimizer, args.max_grad_norm)
    gradient, losses["actor"] = actor_gradient(agent, batch, args)
    gradient_step(gradient, actor_optimizer, args.max_grad_norm)
    move_target(target, agent, args.polyak)
    return losses, td_error


def train(args: Args) -> Result:
    run = Run(args, __file__, LIMITS)
    args = run.args
    workers = Workers(run, collect, "bounded", ahead=True)
    agent = Agent(workers.observation_space, workers.action_space, args).to(run.device)
    target = copy.deepcopy(agent).requires_grad_(False)
    optimizers = critic_optimizer, actor_optimizer = [
        torch.optim.Adam([flatten(network)], args.learning_rate, fused=True)
        for network in (agent.critic, agent.actor)
    ]
    rollout = workers.start(agent, args.horizon, noise=workers.action_space.shape)
    kept = {name: tensor for name, tensor in rollout.items() if name != "noise"}
    replay = ReplayBuffer(
        run, kept, args.buffer_size, n_step=args.n_step, discount=args.discount,
        prioritized=args.prioritized,
    )  # fmt: skip
    gradients = run.gradient(critic_loss, agent.critic), run.gradient(actor_loss, agent.actor)
    step = run.start(
        agent=agent, target=target, critic_optimizer=critic_optimizer,
        actor_optimizer=actor_optimizer, workers=workers, replay=replay,
    )  # fmt: skip
    rollout["noise"][-1] = agent.noise * workers.go_on  # of a resumed run

    losses: dict[str, Tensor] = {}  # of the last updates
    while step < args.total_steps:
        agent.warm_up.fill_(step < args.warmup_steps)
        rollout = workers.collect()
        agent.noise.copy_(rollout["noise"][-1])
        replay.add(rollout)
        before, step = step, step + args.horizon * args.num_envs * run.learners
        if step >= args.warmup_steps and len(replay) >= min(args.warmup_steps, args.buffer_size):
            replay.importance_exponent = 0.4 + 0.6 * before / args.total_steps
            for _ in range(int(before * args.utd_ratio), int(step * args.utd_ratio)):
                batch = replay.sample(args.batch_size)
                losses, td_error = update(agent, target, optimizers, batch, gradients, args)
                replay.update_priorities(batch["index"], td_error)

        run.log_episodes(step, rollout)
        if step // args.log_every > before // args.log_every:
            run.log(step, losses, replay_size=len(replay), policy_lag=workers.policy_lag)
        run.evaluate(step)
        run.checkpoint(step)
    return run.finish(step)


if __name__ == "__main__":
    train(parse(Args, TUNED))
