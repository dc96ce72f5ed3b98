"""PPO with the Hamiltonian term (H-term): ppo.py plus advantage-weighted regression on its past.

Liu & Fang 2020, "Quantum Tensor Networks for Variational RL", and Liu, Li, Wu, Wang 2023,
"Stationary Deep RL with Quantum K-spin Hamiltonian Regularization": an energy, −E[K-step return],
is added to the loss. Here, without K, past actions become more probable, by a weight w:

    memory   the last M rollouts; each gradient step also uses a minibatch of it, half as large
    L_H(θ) = − E[ (w/w̄) σ̄² log π_θ(a|s) ] + 0.05 E[ (R − V_θ(s))² ],   w = min(exp Â, 3)
    L(θ)   = L_PPO + λ_H L_H       R from `gae`;  Â: R − V_θ(s), normalised in the minibatch

    python algos/ppo_hterm.py --env Hopper     does it help? by task: benchmark/README.md

L_H is advantage-weighted regression (AWR; Peng 2019, arXiv:1910.00177), akin to self-imitation (Oh
2018, arXiv:1806.05635). What differs from ppo.py: `recall`, `hamiltonian_term` and their use;
λ_H falls linearly to zero (with λ_H = 0 it is ppo.py, bit for bit); continuous actions only; c_V is
0.5, c_H 0; no explained variance. What differs from AWR: PPO's loss is added; w ≤ 3 (20), divided
by its mean; σ̄² (mean variance) cancels 1/σ² in ∇ log π; L_H trains no σ; log π + H(π) ≥ −20.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal

import vec_envs
from algos.worker_learner import (
    Normalizer,
    ReplayBuffer,
    Result,
    RewardScaler,
    Run,
    RunArgs,
    Workers,
    average_gradients,
    mean_over_learners,
    parse,
    std_mean_over_learners,
)


@dataclass
class Args(RunArgs):
    """PPO with the H-term on any environment with continuous actions."""

    num_steps: int = 64
    """steps of each environment in a rollout"""
    learning_rate: float = 5e-4
    """Adam's learning rate for actor and critic; annealed linearly to zero if --target-kl is 0"""
    target_kl: float = 0.0
    """the learning rate adapts to keep KL(π_old‖π) near this; no early stopping (0: annealed)"""
    epochs: int = 10
    """passes over each rollout"""
    minibatch_size: int = 512
    """transitions of one gradient step"""
    gamma: float = 0.99
    """γ, the discount factor"""
    gae_lambda: float = 0.95
    """λ of the advantage estimator: 0 relies on the critic, 1 on the sampled returns"""
    clip: float = 0.2
    """ε: the probability ratio is clipped to the range from 1 − ε to 1 + ε"""
    hidden_size: int = 64
    """width of the two hidden layers of actor and critic"""
    initial_log_std: float = 0.0
    """log of the initial standard deviation, which is in units of half the action range"""
    hterm_coef: float = 0.5
    """initial λ_H, the weight of the H-term; it falls linearly to zero (0: the same as ppo.py)"""
    hterm_memory: int = 16
    """M, the number of past rollouts in the memory"""


LIMITS = {"num_steps": (2, None), "minibatch_size": (2, None), "initial_log_std": (-10, 10)}
LIMITS["hterm_memory"] = (1, None)

# What differs by environment, rows of ppo.py's; a flag on the command line wins.
TUNED = {
    "Ant": dict(total_steps=2_500_000, num_steps=32, epochs=4, minibatch_size=1024,
                learning_rate=1e-3, initial_log_std=-1.0),
    "Humanoid": dict(total_steps=2_500_000, epochs=2, minibatch_size=1024, learning_rate=3e-3),
    "HalfCheetah": dict(num_steps=32, minibatch_size=128, learning_rate=3e-4, initial_log_std=-1.0,
                        gamma=0.98, gae_lambda=0.92),
    "Hopper": dict(target_kl=0.01),
    "Walker2d": dict(num_steps=32),
    "Swimmer": dict(num_steps=256, gamma=0.9999, gae_lambda=0.98),
}  # fmt: skip


def mlp(inputs: int, hidden: int, outputs: int, last_gain: float) -> nn.Sequential:
    """inputs → hidden → hidden → outputs, tanh, orthogonal weights."""
    layers = [nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)]
    for layer, gain in zip(layers, (2**0.5, 2**0.5, last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class Agent(nn.Module):
    """Actor and critic. forward: observation (N, obs_dim) → the environment's action, no noise."""

    def __init__(self, observation_space, action_space, args: Args):
        super().__init__()
        obs_dim, outputs = observation_space.shape[0], action_space.shape[0]
        self.normalizer = Normalizer(obs_dim)
        self.reward_scaler = RewardScaler(args.num_envs, args.gamma)
        self.actor = mlp(obs_dim, args.hidden_size, outputs, last_gain=0.01)
        self.critic = mlp(obs_dim, args.hidden_size, 1, last_gain=1.0)
        self.log_std = nn.Parameter(torch.full((outputs,), args.initial_log_std))
        self.register_buffer("hterm_coef", torch.tensor(0.0), persistent=False)  # λ_H now
        low, high = torch.tensor(action_space.low), torch.tensor(action_space.high)
        self.register_buffer("action_center", (high + low) / 2)
        self.register_buffer("action_scale", (high - low) / 2)

    def forward(self, obs: Tensor) -> Tensor:
        return self.to_env(self.actor(self.normalizer(obs)))

    def to_env(self, action: Tensor) -> Tensor:
        return self.action_center + self.action_scale * action.clamp(-1, 1)

    def policy(self, x: Tensor, fixed_std: bool = False) -> Independent:
        """π(·|s) for normalised x (..., obs_dim), a Gaussian where the action range is [−1, 1]."""
        mean, log_std = self.actor(x), self.log_std.detach() if fixed_std else self.log_std
        normal = Normal(mean, log_std.exp().expand_as(mean))
        return Independent(normal, 1)  # log π(a|s): the sum over dimensions

    def value(self, x: Tensor) -> Tensor:  # (..., obs_dim) -> (...)
        return self.critic(x).squeeze(-1)


@torch.no_grad()
def collect(agent: Agent, envs: vec_envs.VecEnv, rollout: dict[str, Tensor]) -> None:
    """T steps of the present policy in every environment."""
    for t in range(len(rollout["obs"])):
        obs = envs.obs
        action = agent.policy(agent.normalizer(obs)).sample()
        rollout["obs"][t] = obs
        rollout["action"][t] = action
        _, reward, terminated, truncated, info = envs.step(agent.to_env(action))
        rollout["reward"][t] = reward
        rollout["next_obs"][t] = info["final_obs"]  # never the first one of a new episode
        rollout["terminated"][t] = terminated
        rollout["done"][t] = terminated | truncated
        rollout["episode_return"][t] = info["episode_return"]
        rollout["episode_length"][t] = info["episode_length"]


def gae(reward, value, next_value, terminated, done, args: Args) -> Tensor:
    """Generalised advantage estimation (Schulman 2016, arXiv:1506.02438), all (T, N).

    δ_t = r_t + γ (1 − terminated_t) V(s'_t) − V(s_t)      s'_t: the true next observation
    Â_t = δ_t + γ λ (1 − done_t) Â_{t+1}
    """
    delta = reward + args.gamma * next_value * ~terminated - value
    decay = args.gamma * args.gae_lambda * (~done).to(delta)
    advantage, following = torch.empty_like(delta), torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        advantage[t] = following = delta[t] + decay[t] * following
    return advantage


@torch.no_grad()
def prepare(agent: Agent, rollout: dict[str, Tensor], args: Args) -> dict[str, Tensor]:
    """What the epochs need of each transition, (T·N, ...), computed once by the old policy."""
    obs = agent.normalizer(rollout["obs"])
    value, next_value = agent.value(obs), agent.value(agent.normalizer(rollout["next_obs"]))
    reward = agent.reward_scaler(rollout["reward"], rollout["done"])  # updates its statistics first
    advantage = gae(reward, value, next_value, rollout["terminated"], rollout["done"], args)
    batch = {
        "obs": obs,
        "action": rollout["action"],
        "log_prob": agent.policy(obs).log_prob(rollout["action"]),
        "advantage": advantage,
        "returns": advantage + value,
    }
    return {name: tensor.flatten(0, 1) for name, tensor in batch.items()}


def policy_loss(log_ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """− E[ min( ρ Â , clip(ρ, 1−ε, 1+ε) Â ) ]"""
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio * advantage, clipped * advantage).mean()


def ppo_loss(agent: Agent, batch: dict[str, Tensor], args: Args) -> tuple[Tensor, dict]:
    """L(θ) of one minibatch, and what to log of it."""
    policy = agent.policy(batch["obs"])
    log_ratio = policy.log_prob(batch["action"]) - batch["log_prob"]
    std, mean = std_mean_over_learners(batch["advantage"])
    advantage = (batch["advantage"] - mean) / (std + 1e-8)
    losses = {
        "policy": policy_loss(log_ratio, advantage, args.clip),
        "value": 0.5 * (agent.value(batch["obs"]) - batch["returns"]).square().mean(),
        "entropy": policy.entropy().mean(),
    }
    with torch.no_grad():
        losses["approx_kl"] = (log_ratio.exp() - 1 - log_ratio).mean()  # ≈ KL(π_old‖π), ≥ 0
        losses["clip_fraction"] = ((log_ratio.exp() - 1).abs() > args.clip).float().mean()
    return losses["policy"] + 0.5 * losses["value"], losses


@torch.no_grad()
def recall(agent: Agent, memory: ReplayBuffer, args: Args) -> dict[str, Tensor]:
    """W windows of T steps, a quarter of the memory; R by the present critic, (T·W, ...)."""
    windows = memory.windows(max(1, args.hterm_memory * args.num_envs // 4), args.num_steps)
    obs = agent.normalizer(windows["obs"])  # (T, W, obs_dim)
    value, next_value = agent.value(obs), agent.value(agent.normalizer(windows["next_obs"]))
    reward = agent.reward_scaler.scale(windows["reward"])
    advantage = gae(reward, value, next_value, windows["terminated"], windows["done"], args)
    past = {"obs": obs, "action": windows["action"], "returns": advantage + value}
    return {name: tensor.flatten(0, 1) for name, tensor in past.items()}


def hamiltonian_term(agent: Agent, past: dict[str, Tensor]) -> Tensor:
    """− E[ (w/w̄) σ̄² max(log π(a|s) + H, −20) ] + 0.05 E[ (R − V(s))² ],  w = min(exp Â, 3)"""
    advantage = past["returns"] - agent.value(past["obs"])
    std, mean = std_mean_over_learners(advantage.detach())
    weight = ((advantage.detach() - mean) / (std + 1e-8)).exp().clamp(max=3)
    weight = weight / mean_over_learners(weight.mean())
    policy = agent.policy(past["obs"], fixed_std=True)  # σ does not learn; σ² ∇ log π = a − μ
    log_prob = policy.log_prob(past["action"]) + policy.entropy()  # + H: 0 on average
    likelihood = (weight * policy.variance.mean() * log_prob.clamp(min=-20)).mean()
    return 0.05 * advantage.square().mean() - likelihood


def gradient_step(agent: Agent, optimizer, batch: dict, past: dict | None, args: Args) -> dict:
    """One step on a minibatch and, if there is one, on another of the memory -> what to log."""
    loss, losses = ppo_loss(agent, batch, args)
    if past is not None:
        losses["hamiltonian"] = hamiltonian_term(agent, past)
        loss = loss + agent.hterm_coef * losses["hamiltonian"]
    optimizer.zero_grad()
    loss.backward()
    average_gradients(agent)
    losses["grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
    optimizer.step()
    return losses


def update(agent: Agent, optimizer, rollout: dict, memory, learn, args: Args) -> dict[str, Tensor]:
    """Some epochs of minibatch gradient steps -> mean of each logged quantity."""
    batch = prepare(agent, rollout, args)
    if args.hterm_coef > 0:
        memory.add(rollout)
        past, half = recall(agent, memory, args), max(2, args.minibatch_size // 2)
    size, device = len(batch["obs"]), batch["obs"].device
    logged = []
    for _ in range(args.epochs):
        for index in torch.randperm(size, device=device).split(args.minibatch_size):
            if len(index) < 2:  # a single advantage cannot be normalised
                continue
            minibatch, past_minibatch = {name: x[index] for name, x in batch.items()}, None
            if args.hterm_coef > 0:
                drawn = torch.randint(len(past["obs"]), (half,), device=device)
                past_minibatch = {name: x[drawn] for name, x in past.items()}
            losses = learn(agent, optimizer, minibatch, past_minibatch, args)  # `gradient_step`
            logged.append(torch.stack([*losses.values()]).detach())  # copy: CUDA graphs reuse them
        if args.target_kl > 0:  # by the KL divergence at the epoch's last minibatch
            adapt_learning_rate(optimizer, mean_over_learners(losses["approx_kl"]), args)
    agent.normalizer.update(rollout["obs"])  # last, so that all of the above saw one normaliser
    return dict(zip(losses, torch.stack(logged).mean(0), strict=True))


def adapt_learning_rate(optimizer: torch.optim.Optimizer, kl: Tensor, args: Args) -> None:
    """After an epoch: divide the rate by 1.5 if the KL is too large, multiply if too small."""
    group = optimizer.param_groups[0]
    if kl > 2 * args.target_kl:
        group["lr"] = max(group["lr"] / 1.5, 1e-6)
    elif kl < args.target_kl / 2:
        group["lr"] = min(group["lr"] * 1.5, 1e-2)


def train(args: Args) -> Result:
    run = Run(args, __file__, LIMITS)
    args = run.args
    workers = Workers(run, collect, "bounded")
    agent = Agent(workers.observation_space, workers.action_space, args).to(run.device)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)
    learn = run.compile(gradient_step)  # compiled in long runs (--compile)
    capacity = args.hterm_memory * args.num_steps * args.num_envs * run.world_size
    memory = ReplayBuffer(run, workers.start(agent, args.num_steps), capacity, "--hterm-memory")
    step = run.start(agent=agent, optimizer=optimizer, workers=workers, memory=memory)

    while step < args.total_steps:
        remaining = 1 - step / args.total_steps
        if args.target_kl == 0:  # else `update` adapts it
            optimizer.param_groups[0]["lr"] = args.learning_rate * remaining
        rollout = workers.collect()
        step += args.num_steps * args.num_envs * run.world_size
        agent.hterm_coef.fill_(args.hterm_coef * remaining)
        losses = update(agent, optimizer, rollout, memory, learn, args)

        run.log_episodes(step, rollout)
        run.log(step, losses, learning_rate=optimizer.param_groups[0]["lr"])
        run.evaluate(step)
        run.checkpoint(step)
    return run.finish(step)


if __name__ == "__main__":
    train(parse(Args, TUNED))
