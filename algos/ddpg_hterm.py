"""DDPG with the Hamiltonian term (H-term): ddpg.py plus a policy gradient along K-step windows.

Liu & Fang 2020 (NeurIPS workshop); Liu, Li, Wu, Wang 2023, "Stationary Deep RL with Quantum K-spin
Hamiltonian Regularization" (ICLR workshop). The energy H is minus the expected K-step return: L(μ)
judges single actions of the actor, H judges K consecutive actions by what they led to. A window
is K consecutive steps from the newest part of the replay buffer, u is the action before clipping,
b the policy that drew it, m_j is 1 up to an episode's end, then 0, V̄(s) = Q̄(s, μ̄(s)):

    δ_j = r_j + γ (1 − terminated_j) V̄(s_{j+1}) − V̄(s_j)
    ρ_j = min( 1, Π_{i≤j} π(u_i|s_i) / b(u_i|s_i) )            π = N(μ(s), σ²), which explores
    g_i = Σ_{j≥i} γ^j m_j ρ_j δ_j                       ρ, δ and g have no gradient
    ĝ   = max( −1, g / rms(g) )                         rms: root of a running mean square
    L_H = 1/(2Σm) Σ m_i ĝ_i ‖ u_i − μ(s_i) ‖²           = − σ²/Σm Σ m_i ĝ_i log π(u_i|s_i) + const.
    L   = L(μ) / mean|Q| + λ_H L_H     λ_H falls linearly to 0; λ_H ‖∇L_H‖ ≤ ¼ ‖∇L(μ)‖ / mean|Q|

    python algos/ddpg_hterm.py --env Hopper

What differs from ddpg.py: `collect` stores u, log b; `hamiltonian_term` and its part in `update`.
With λ_H = 0 it is ddpg.py, bit for bit. What differs from the paper and its code (in brackets): g
sums TD errors (rewards), with importance ratios, at γ = 0.99 (0.8), in windows of new steps that
stop with their episode; ĝ is scaled and bounded, L(μ) divided by mean|Q|; λ_H falls; the gradient
of λ_H L_H is capped. No effect has been found in either direction (benchmark/results/hterm).
"""

import copy
import math
from dataclasses import dataclass

import torch
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
    """DDPG with the H-term on any environment with continuous actions."""

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
    """Adam's learning rate for every network"""
    gamma: float = 0.99
    """γ, the discount factor"""
    tau: float = 0.005
    """τ: how far the target networks move at each of their updates"""
    exploration_noise: float = 0.1
    """σ of the noise on actions, in units of half the action range"""
    hidden_size: int = 256
    """width of the two hidden layers of actor and critic"""
    hterm_coef: float = 0.125
    """initial λ_H, the weight of the H-term; it falls linearly to zero (0: the same as ddpg.py)"""
    hterm_length: int = 8
    """K, the number of steps in a window; a batch has W = batch_size / K windows"""
    hterm_newest: int = 1000
    """number of newest transitions that windows are drawn from; for older ones ρ is about 0"""


LIMITS = {"hterm_length": (1, None), "hterm_newest": (1, None)}
LIMITS["exploration_noise"] = (1e-3, None)  # σ: the H-term needs a density

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
        self.register_buffer("mean_square_g", torch.ones(()))  # running mean of g²
        self.register_buffer("hterm_coef", torch.tensor(0.0), persistent=False)  # λ_H now

    def forward(self, obs: Tensor) -> Tensor:
        return self.to_env(self.actor(obs))

    def policy(self, obs: Tensor) -> Normal:
        """N(μ(s), σ²): the policy with its exploration noise."""
        mean = self.actor(obs)
        return Normal(mean, torch.full_like(mean, self.exploration_noise))

    def to_env(self, action: Tensor) -> Tensor:
        return self.action_center + self.action_scale * action


@torch.no_grad()
def collect(agent: Agent, envs: vec_envs.VecEnv, rollout: dict[str, Tensor]) -> None:
    """T steps in every environment: actions μ(s) + σ ε, uniform ones at first."""
    for t in range(len(rollout["obs"])):
        obs = envs.obs
        policy = agent.policy(obs)
        u = policy.mean + agent.exploration_noise * torch.randn_like(policy.mean)
        u = torch.where(agent.warm_up, 2 * torch.rand_like(u) - 1, u)
        log_prob = policy.log_prob(u)
        action = u.clamp(-1, 1)
        rollout["obs"][t] = obs
        rollout["action"][t] = action
        rollout["raw_action"][t] = u
        # log b: uniform actions have the density ½ in each dimension
        rollout["log_prob"][t] = torch.where(agent.warm_up, -math.log(2), log_prob).sum(-1)
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


def hamiltonian_term(agent, target: Agent, windows: dict, args: Args) -> tuple[Tensor, Tensor]:
    """1/(2Σm) Σ m_i ĝ_i ‖ u_i − μ(s_i) ‖², and the effective sample size (Σρ)²/Σρ²."""
    mask, total = windows["mask"], mean_over_learners(windows["mask"].sum())
    policy, u = agent.policy(windows["obs"]), windows["raw_action"]  # (K, W, act_dim)
    with torch.no_grad():
        # s_0 ... s_K: next_obs_j is obs_{j+1}, or an episode's true last one, after which m = 0
        states = torch.cat((windows["obs"][:1], windows["next_obs"]))  # (K + 1, W, obs_dim)
        value = target.critic(states, target.actor(states))
        delta = windows["reward"] + args.gamma * ~windows["terminated"] * value[1:] - value[:-1]
        ratio = (policy.log_prob(u).sum(-1) - windows["log_prob"]).cumsum(0).exp().clamp(max=1)
        g = (windows["discount"] * mask * ratio * delta).flip(0).cumsum(0).flip(0)
        mean_square = mean_over_learners((mask * g.square()).sum()) / total
        g = g / (agent.mean_square_g.lerp_(mean_square, 0.01).sqrt() + 1e-6)
        sample_size = (mask * ratio).sum().square() / ((mask * ratio.square()).sum() + 1e-8)
    distance = (u - policy.mean).square().sum(-1)
    # g ≥ −1: minus a distance has no minimum, and would drive μ away without end
    return 0.5 * (mask * g.clamp(min=-1) * distance).sum() / total, sample_size


@torch.no_grad()
def soft_update(target: nn.Module, network: nn.Module, tau: float) -> None:
    """θ̄ ← (1 − τ) θ̄ + τ θ"""
    for theirs, ours in zip(target.parameters(), network.parameters(), strict=True):
        theirs.lerp_(ours, tau)


def update(agent: Agent, target: Agent, optimizers, batch, windows: dict | None, args: Args):
    """One step of critic, actor and targets -> what to log."""
    critic_optimizer, actor_optimizer = optimizers
    q_loss, _ = critic_loss(agent, target, batch)
    critic_optimizer.zero_grad()
    q_loss.backward()
    average_gradients(agent.critic)
    critic_optimizer.step()

    policy_loss = actor_loss(agent, batch)
    scale = 1.0
    if windows is not None:  # in units of Q, λ means about the same in every environment
        q = agent.critic(batch["obs"], batch["action"])
        scale = mean_over_learners(q.abs().mean().detach()).clamp(min=1e-6)
    actor_optimizer.zero_grad()
    loss = policy_loss / scale
    loss.backward(inputs=actor_optimizer.param_groups[0]["params"])  # not the critic's
    average_gradients(agent.actor)
    losses = {"critic": q_loss, "actor": policy_loss}
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

    soft_update(target, agent, args.tau)
    return losses


def train(args: Args) -> Result:
    run = Run(args, __file__, LIMITS)
    args = run.args
    workers = Workers(run, collect, "bounded", ahead=True)  # ahead: workers collect during updates
    agent = Agent(workers.observation_space, workers.action_space, args).to(run.device)
    target = copy.deepcopy(agent).requires_grad_(False)
    critic_optimizer = torch.optim.Adam(agent.critic.parameters(), args.learning_rate, fused=True)
    actor_optimizer = torch.optim.Adam(agent.actor.parameters(), args.learning_rate, fused=True)
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
