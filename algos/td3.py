"""Twin delayed deep deterministic policy gradient (TD3): ddpg.py plus three things, less --noise.

Fujimoto, van Hoof, Meger 2018, arXiv:1802.09477. With Q̄, μ̄ the slow target networks,

    a'   = clip( μ̄(s') + clip(σ̃ ε, −c, c), −1, 1 ),  ε ~ N(0, 1)
    y    = r + γ (1 − terminated) min_i Q̄_i(s', a')
    L(Q) = Σ_i E[ ½ ( Q_i(s, a) − y )² ]
    L(μ) = − E[ Q_1(s, μ(s)) ]              every `policy_delay` updates

    python algos/td3.py --env HalfCheetah

The three things, against the overestimation that a deterministic policy seeks out:
- `Critics`, `critic_loss`: two critics, the smaller of which is believed;
- `critic_loss`: noise on the target's action, so that a narrow peak of Q̄ does not count;
- `update`: actor and target networks move once for `policy_delay` updates of the critics.
"""

import copy
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
    flatten,
    gradient_step,
    parse,
)


@dataclass
class Args(ReplayArgs):
    """TD3 on any environment of vec_envs with continuous actions."""

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
    """of Adam, for actor and critics"""
    discount: float = 0.99
    """γ"""
    polyak: float = 0.005
    """τ: how far the target networks move at each of the actor's updates"""
    exploration_noise: float = 0.1
    """σ of the noise on actions, in units of half the action range"""
    target_noise: float = 0.2
    """σ̃, that of the noise on the target's actions"""
    target_noise_clip: float = 0.5
    """c: where that noise is cut"""
    policy_delay: int = 2
    """updates of the critics for one of the actor"""
    n_step: int = 1
    """rewards summed before the target networks are asked"""
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
    "policy_delay": (1, None),
}

# What differs by environment; a flag on the command line wins.
TUNED = {"Pendulum": dict(total_steps=10_000, warmup_steps=1000, policy_delay=1)}


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
    """Actor and critics. forward: observation (N, obs_dim) → the environment's action, no noise.

    All of the policy's mathematics is in units where the action range is [−1, 1].
    """

    def __init__(self, observation_space, action_space, args: Args):
        super().__init__()
        obs_dim, act_dim = observation_space.shape[0], action_space.shape[0]
        self.exploration_noise = args.exploration_noise
        self.actor = mlp(obs_dim, args.hidden_size, act_dim)
        self.critics = Critics(2, obs_dim + act_dim, args.hidden_size)
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

    def explore(self, obs: Tensor) -> Tensor:
        action = self.act(obs)
        action = (action + self.exploration_noise * torch.randn_like(action)).clamp(-1, 1)
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


def critic_loss(agent: Agent, target: Agent, batch: dict, args: Args) -> tuple[Tensor, Tensor]:
    """Σ_i E[ ½ w ( Q_i(s, a) − y )² ] with importance weights w, and the TD errors (B,)."""
    with torch.no_grad():
        noise = args.target_noise * torch.randn_like(batch["action"])
        noise = noise.clamp(-args.target_noise_clip, args.target_noise_clip)
        next_action = (target.act(batch["next_obs"]) + noise).clamp(-1, 1)
        next_value = target.critics(batch["next_obs"], next_action).amin(0)
        future = batch["discount"] * ~batch["terminated"] * next_value
        y = args.reward_scale * batch["reward"] + future
    error = y - agent.critics(batch["obs"], batch["action"])  # (2, B)
    return 0.5 * (batch["weight"] * error.square()).mean(1).sum(), error.detach().abs().mean(0)


def actor_loss(agent: Agent, batch: dict, args: Args) -> Tensor:
    """− E[ Q_1(s, μ(s)) ]"""
    action = agent.act(batch["obs"])
    with torch.autocast(action.device.type, enabled=False):  # ∂Q/∂a is not in bfloat16
        return -agent.critics(batch["obs"], action, members=slice(1)).mean()


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
        for network in (agent.critics, agent.actor)
    ]
    rollout = workers.start(agent, args.horizon)
    replay = ReplayBuffer(
        run, rollout, args.buffer_size, n_step=args.n_step, discount=args.discount,
        prioritized=args.prioritized,
    )  # fmt: skip
    gradients = run.gradient(critic_loss, agent.critics), run.gradient(actor_loss, agent.actor)
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
