"""SAC with the Hamiltonian term (H-term): sac.py plus a policy gradient along K-step windows.

Liu & Fang 2020; Liu, Li, Wu, Wang 2023 (NeurIPS and ICLR workshops): the energy H is minus the
expected K-step return. Windows: K consecutive steps of the buffer's newest part, a = tanh u, b the
policy that drew u, m_j is 1 until an episode ends, V̄(s) = min_i Q̄_i(s, ã) − α log π(ã|s):

    δ_j = r_j − α log π(a_j|s_j) + γ (1 − terminated_j) V̄(s_{j+1}) − V̄(s_j)
    ρ_j = min( 1, Π_{i≤j} π(a_i|s_i) / b(a_i|s_i) )
    g_i = Σ_{j≥i} γ^j m_j ρ_j δ_j                       ρ, δ and g have no gradient
    ĝ   = h / rms(h),  h = g − ρ Σmg / Σmρ              rms: root of a running mean square
    L_H = − (1/Σm) Σ m_i ĝ_i log π(a_i|s_i)
    L   = L(π) + λ_H L_H                λ_H falls linearly to 0; λ_H ‖∇L_H‖ ≤ ¼ ‖∇L(π)‖

    python algos/sac_hterm.py --env Hopper

What differs from sac.py: `collect` stores u, log b; `hamiltonian_term` and its part in `update`.
With λ_H = 0 it is sac.py, bit for bit. What differs from the paper and its code (in brackets): g
sums TD errors (rewards) that contain the entropy, with importance ratios, at γ = 0.99 (0.8), in
windows of new steps that stop with their episode; baseline and scale of ĝ; λ_H falls; the gradient
of λ_H L_H is capped. No effect has been found in either direction (benchmark/results/hterm).
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
    ReplayArgs,
    ReplayBuffer,
    Result,
    Run,
    Workers,
    average_gradients,
    mean_over_learners,
    parse,
)


@dataclass
class Args(ReplayArgs):
    """SAC with the H-term on any environment with continuous actions."""

    env: str = "HalfCheetah"
    num_envs: int = 4
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
    """γ, the discount factor"""
    tau: float = 0.005
    """τ: how far the target networks move at each of their updates"""
    hidden_size: int = 256
    """width of the two hidden layers of actor and critics"""
    hterm_coef: float = 0.125
    """initial λ_H, the weight of the H-term; it falls linearly to zero (0: the same as sac.py)"""
    hterm_length: int = 8
    """K, the number of steps in a window; a batch has W = batch_size / K windows"""
    hterm_newest: int = 1000
    """number of newest transitions that windows are drawn from; for older ones ρ is about 0"""


LIMITS = {"hterm_length": (1, None), "hterm_newest": (1, None)}

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
        return self.normal(obs).mean.tanh()

    def normal(self, obs: Tensor) -> Normal:  # N(μ(s), σ(s)²), from which u is drawn
        mean, log_std = self.mean_and_log_std(obs).chunk(2, -1)
        return Normal(mean, log_std.clamp(-20, 2).exp())

    def sample(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """a = tanh(u), u ~ N(μ(s), σ(s)²) -> a (B, act_dim), log π(a|s) (B,)."""
        normal = self.normal(obs)
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
        self.register_buffer("warm_up", torch.tensor(True))  # a tensor: worker processes share it
        low, high = torch.tensor(action_space.low), torch.tensor(action_space.high)
        self.register_buffer("action_center", (high + low) / 2)
        self.register_buffer("action_scale", (high - low) / 2)
        self.register_buffer("mean_square_g", torch.ones(()))  # running mean of h²
        self.register_buffer("hterm_coef", torch.tensor(0.0), persistent=False)  # λ_H now

    def forward(self, obs: Tensor) -> Tensor:
        return self.to_env(self.actor(obs))

    def to_env(self, action: Tensor) -> Tensor:
        return self.action_center + self.action_scale * action


@torch.no_grad()
def collect(agent: Agent, envs: vec_envs.VecEnv, rollout: dict[str, Tensor]) -> None:
    """T steps in every environment: drawn from π; at first uniform, where log b = 10⁹: so ρ = 0."""
    for t in range(len(rollout["obs"])):
        obs = envs.obs
        normal = agent.actor.normal(obs)
        u = normal.rsample()
        action = torch.where(agent.warm_up, 2 * torch.rand_like(u) - 1, u.tanh())
        rollout["obs"][t] = obs
        rollout["action"][t] = action
        rollout["raw_action"][t] = u
        rollout["log_prob"][t] = torch.where(agent.warm_up, 1e9, log_density(normal, u))
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


def hamiltonian_term(agent, target: Critics, windows: dict, args: Args) -> tuple[Tensor, Tensor]:
    """− (1/Σm) Σ m_i ĝ_i log π(a_i|s_i), and the effective sample size (Σρ)²/Σρ²."""
    mask, total = windows["mask"], mean_over_learners(windows["mask"].sum())
    log_prob = log_density(agent.actor.normal(windows["obs"]), windows["raw_action"])  # (K, W)
    with torch.no_grad():
        # s_0 ... s_K: next_obs_j is obs_{j+1}, or an episode's true last one, after which m = 0
        states = torch.cat((windows["obs"][:1], windows["next_obs"]))  # (K + 1, W, obs_dim)
        action, new_log_prob = agent.actor.sample(states)
        value = torch.minimum(*target(states, action)) - agent.log_temperature.exp() * new_log_prob
        reward = windows["reward"] - agent.log_temperature.exp() * log_prob
        delta = reward + args.gamma * ~windows["terminated"] * value[1:] - value[:-1]
        ratio = (log_prob - windows["log_prob"]).cumsum(0).exp().clamp(max=1)
        g = (windows["discount"] * mask * ratio * delta).flip(0).cumsum(0).flip(0)
        sum_g, sum_ratio = mean_over_learners(torch.stack(((mask * g).sum(), (mask * ratio).sum())))
        g = g - ratio * sum_g / sum_ratio.clamp(min=1e-8)  # baseline: no bias if ρ is not clipped
        mean_square = mean_over_learners((mask * g.square()).sum()) / total
        g = g / (agent.mean_square_g.lerp_(mean_square, 0.01).sqrt() + 1e-6)
        sample_size = (mask * ratio).sum().square() / ((mask * ratio.square()).sum() + 1e-8)
    return -(mask * g * log_prob).sum() / total, sample_size


@torch.no_grad()
def soft_update(target: nn.Module, network: nn.Module, tau: float) -> None:
    """θ̄ ← (1 − τ) θ̄ + τ θ"""
    for theirs, ours in zip(target.parameters(), network.parameters(), strict=True):
        theirs.lerp_(ours, tau)


def update(agent: Agent, target: Critics, optimizers, batch, windows: dict | None, args: Args):
    """One step of critics, actor and temperature -> what to log."""
    critic_optimizer, actor_optimizer = optimizers
    q_loss, _ = critic_loss(agent, target, batch)
    critic_optimizer.zero_grad()
    q_loss.backward()
    average_gradients(agent.critics)
    critic_optimizer.step()

    policy_loss, log_prob = actor_loss(agent, batch)
    actor_optimizer.zero_grad()
    loss = policy_loss + temperature_loss(agent, log_prob)  # they share no parameter
    loss.backward(inputs=actor_optimizer.param_groups[0]["params"])  # not the critics'
    average_gradients(agent.actor, agent.log_temperature)
    losses = {"critic": q_loss, "actor": policy_loss, "entropy": -log_prob.mean()}
    if windows is not None:
        hterm, sample_size = hamiltonian_term(agent, target, windows, args)
        base = [parameter.grad for parameter in agent.actor.parameters()]  # ∇L without the term
        agent.actor.zero_grad()  # sets each .grad to None: the tensors in `base` are kept
        (agent.hterm_coef * hterm).backward()
        average_gradients(agent.actor)
        norm = nn.utils.get_total_norm([parameter.grad for parameter in agent.actor.parameters()])
        shrink = 0.25 * nn.utils.get_total_norm(base) / (norm + 1e-6)  # λ ‖∇L_H‖ ≤ ¼ ‖∇L‖
        for parameter, gradient in zip(agent.actor.parameters(), base, strict=True):
            parameter.grad = gradient + shrink.clamp(max=1) * parameter.grad
        losses |= {"hamiltonian": hterm, "effective_sample_size": sample_size}
    actor_optimizer.step()

    soft_update(target, agent.critics, args.tau)
    return losses | {"temperature": agent.log_temperature.detach().exp()}


def train(args: Args) -> Result:
    run = Run(args, __file__, LIMITS)
    args = run.args
    workers = Workers(run, collect, "bounded", ahead=True)  # ahead: workers collect during updates
    agent = Agent(workers.observation_space, workers.action_space, args).to(run.device)
    target = copy.deepcopy(agent.critics).requires_grad_(False)
    critic_optimizer = torch.optim.Adam(agent.critics.parameters(), args.learning_rate, fused=True)
    actor_parameters = [*agent.actor.parameters(), agent.log_temperature]
    actor_optimizer = torch.optim.Adam(actor_parameters, args.learning_rate, fused=True)
    optimizers = critic_optimizer, actor_optimizer
    learn = run.compile(update)  # compiled in long runs (--compile)
    extra = {"raw_action": workers.action_space.shape, "log_prob": ()}
    replay = ReplayBuffer(run, workers.start(agent, 1, **extra), args.buffer_size)
    step = run.start(
        agent=agent, target=target, critic_optimizer=critic_optimizer,
        actor_optimizer=actor_optimizer, workers=workers, replay=replay,
    )  # fmt: skip

    shape = max(1, args.batch_size // args.hterm_length), args.hterm_length  # W, K
    losses: dict[str, Tensor] = {}  # of the last update
    while step < args.total_steps:
        agent.warm_up.fill_(step < args.warmup_steps)
        rollout = workers.collect()
        replay.add(rollout)
        before, step = step, step + args.num_envs * run.world_size
        if step >= args.warmup_steps and len(replay) >= min(args.warmup_steps, args.buffer_size):
            agent.hterm_coef.fill_(args.hterm_coef * (1 - before / args.total_steps))
            for _ in range(int(before * args.utd_ratio), int(step * args.utd_ratio)):
                batch = replay.sample(args.batch_size)
                windows = replay.windows(*shape, args.hterm_newest) if args.hterm_coef > 0 else None
                losses = learn(agent, target, optimizers, batch, windows, args)

        run.log_episodes(step, rollout)
        if step // args.log_every > before // args.log_every:
            run.log(step, losses, replay_size=len(replay))
        run.evaluate(step)
        run.checkpoint(step)
    return run.finish(step)


if __name__ == "__main__":
    train(parse(Args, TUNED))
