"""PPO with the Hamiltonian term (H-term): ppo.py plus a memory with Boltzmann weights.

Read each (state, action) as a spin: H(π) is minus the expected K-step return, so the policy of
minimal energy is the one with the largest return (Liu & Fang 2020, "Quantum Tensor Networks for
Variational RL"; Liu, Li, Wu, Wang 2023, "Stationary Deep RL with Quantum K-spin Hamiltonian
Regularization"). They report 65–86 % less variance between seeds. Their Algorithm 1 keeps
trajectories in a second memory and lifts the log-probability of the best; here each step of it has
a Boltzmann weight, with R, its λ-return, a mixture of the bootstrapped chains of all lengths K:

    memory   the last M rollouts, in each update those of a random quarter of the environments;
             beside each minibatch half as many steps of it
    Â(s,a) = R − V_θ(s), with mean 0 and deviation 1 in a minibatch
    L_H    = − mean[ w/w̄ σ̄² log π_θ(a|s) ] + 0.05 mean[ (R − V_θ(s))² ],   w = min(exp Â, 3)
    L      = L_PPO + λ L_H

By itself, the first part would be least for π(a|s) ∝ π_M(a|s) E[w|s,a], π_M being the last M
policies mixed by their visits to s: it holds the policy near what it did, and nearer where that
went better than expected. Of this a Gaussian takes over the mean only: σ is not differentiated, and
σ̄², the mean of σ², makes it the regression ½ w ‖a − μ_θ(s)‖² where all σ are equal: advantage-
weighted regression (Peng, Kumar, Zhang, Levine 2019, arXiv:1910.00177) beside PPO's loss, w over w̄.
R is computed again before each update, with the present critic and the present scale of rewards: a
return in the units of its day looks good when the scale has grown since. Nothing else corrects for
the age of a step, nor for the critic, and where the environment is random, luck counts as merit.
With λ = 0 and the same `--learning-rate-schedule` (on Hopper they differ) the run is ppo.py's, bit
for bit.

`--hterm-weight uniform` is the control, w = 1: the same work without the idea. `energy` counts only
what the present policy leaves unused, E = max(0, R − V_θ(s)): steps are drawn ∝ E, E² stands in the
second part, and min(E/Ē, 3) in the place of w/w̄, Ē the mean of the positive E. It is zero when
nothing in memory beats the critic, and is self-imitation learning (Oh, Guo, Singh, Lee 2018,
arXiv:1806.05635) seen from the Hamiltonian's side.

Variance between fresh seeds after 1 M steps, as a part of ppo.py's (benchmark/README.md):

                  seeds    with the H-term        the control
    HalfCheetah   20       0.60 [0.27, 1.35]      0.89 [0.40, 1.96]
    Hopper        40       0.23 [0.05, 1.50]      0.25 [0.08, 0.87]
    Walker2d      20       1.23 [0.33, 3.94]      0.93 [0.22, 3.46]
    Ant           10       0.20 [0.03, 1.37]      1.50 [0.15, 11.35]
    Swimmer       10       0.004 [0.001, 0.04]    0.07 [0.01, 1.06]

By itself only Swimmer's is shown (p = 0.002), where ppo.py has learnt little by the end; the four
others together have 0.43 [0.20, 0.86], p = 0.054.

    python algos/ppo_hterm.py --env Ant        `diff algos/ppo.py algos/ppo_hterm.py`: the lesson

The chain form and the published one are in ppo_hterm_variants.py.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import gymnasium
import torch
from torch import Tensor, nn

import vec_envs
from algos.worker_learner import (
    Result,
    Run,
    RunArgs,
    Workers,
    count_learners,
    flatten,
    gradient_step,
    mean_over_learners,
    parse,
    std_mean_over_learners,
    var_mean_over_learners,
)


@dataclass
class Args(RunArgs):
    """PPO with the H-term on any environment of vec_envs."""

    horizon: int = 64
    """steps of each environment in a rollout"""
    learning_rate: float = 5e-4
    """of Adam, for actor and critic"""
    learning_rate_schedule: Literal["anneal", "adaptive", "constant"] = "anneal"
    """anneal: linearly to zero; adaptive: by the KL divergence towards --target-kl"""
    target_kl: float = 0.01
    """what adaptive steers to: the divergence from the policy that collected the rollout"""
    epochs: int = 10
    """passes over each rollout"""
    minibatch_size: int = 512
    """transitions of one gradient step"""
    discount: float = 0.99
    """γ"""
    gae_lambda: float = 0.95
    """λ of the advantage estimator: 0 trusts the critic, 1 the returns"""
    clip: float = 0.2
    """ε: how far the probability ratio may leave 1 before its gradient stops"""
    clip_value: bool = False
    """also clip the change of the value"""
    value_coef: float = 0.5
    """c_V, weight of the value loss"""
    entropy_coef: float = 0.0
    """c_H, weight of the entropy bonus"""
    max_grad_norm: float = 0.5
    """gradients longer than this are shortened to it"""
    hidden_size: int = 64
    """width of the two hidden layers of actor and critic"""
    initial_log_std: float = 0.0
    """logarithm of the first standard deviation, in units of half the action range"""
    hterm_coef: float = 0.5
    """λ, weight of the H-term (0: ppo.py)"""
    hterm_schedule: Literal["anneal", "constant"] = "constant"
    """of λ; anneal: linearly to zero"""
    hterm_memory: int = 16
    """M, rollouts in the memory"""
    hterm_weight: Literal["boltzmann", "energy", "uniform"] = "boltzmann"
    """of a step in the memory; boltzmann: min(exp Â, 3); energy: by max(0, R − V), as is the chance
    to be drawn; uniform: 1, the same work without the idea (a control)"""


LIMITS = {
    **dict.fromkeys(("horizon", "minibatch_size"), (2, None)),
    **dict.fromkeys(("epochs", "hidden_size"), (1, None)),
    **dict.fromkeys(("discount", "gae_lambda"), (0, 1)),
    **dict.fromkeys(("target_kl", "max_grad_norm"), (1e-9, None)),
    "initial_log_std": (-10, 10),
    "hterm_memory": (1, None),
}

# What differs by environment, as in the tables of papers; a flag on the command line wins.
TUNED = {
    "CartPole": dict(total_steps=49_152, eval_every=10_000, learning_rate=1e-3, gae_lambda=0.98),
    "Acrobot": dict(total_steps=98_304, eval_every=20_000, num_envs=32, minibatch_size=256,
                    learning_rate=1e-3, discount=0.98),
    "Ant": dict(total_steps=2_500_000, horizon=32, epochs=4, minibatch_size=1024,
                learning_rate=1e-3, initial_log_std=-1.0, hterm_coef=0.1),
    "HalfCheetah": dict(horizon=32, minibatch_size=128, learning_rate=3e-4, initial_log_std=-1.0,
                        discount=0.98, gae_lambda=0.92),
    "Walker2d": dict(horizon=32, hterm_schedule="anneal"),
    "Pendulum": dict(minibatch_size=1024, learning_rate=1e-3, discount=0.95),
    "LunarLanderContinuous-v3": dict(discount=0.999, gae_lambda=0.98),
    "BipedalWalker-v3": dict(total_steps=2_500_000, horizon=256, minibatch_size=2048,
                             learning_rate=7e-4, initial_log_std=-0.5),
}  # fmt: skip


class Normalizer(nn.Module):
    """Observations with mean 0 and variance 1, by the statistics of all that was seen."""

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))
        self.register_buffer("count", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.mean) * torch.rsqrt(self.var + 1e-8)).clamp(-10, 10)

    def update(self, x: Tensor) -> None:
        """Take in all learners' batches x (B, size); Chan's formula for the variance of a union."""
        x = x.reshape(-1, x.shape[-1])
        var, mean = var_mean_over_learners(x, 0)
        size = len(x) * count_learners()
        total = self.count + size
        share = size / total
        between = (mean - self.mean).square() * (1 - share)
        self.mean.lerp_(mean, share)
        self.var.lerp_(var + between, share)
        self.count.copy_(total)


class RewardScaler(nn.Module):
    """Rewards divided by the standard deviation of the discounted return, G ← γ G + r."""

    def __init__(self, num_envs: int, discount: float):
        super().__init__()
        self.discount = discount
        self.register_buffer("discounted_return", torch.zeros(num_envs))
        self.statistics = Normalizer(1)

    def forward(self, reward: Tensor, done: Tensor) -> Tensor:  # both (T, N)
        returns = torch.empty_like(reward)
        for t in range(len(reward)):
            self.discounted_return.mul_(self.discount).add_(reward[t])
            returns[t] = self.discounted_return
            self.discounted_return.masked_fill_(done[t], 0)
        self.statistics.update(returns.unsqueeze(-1))
        return self.scale(reward)

    def scale(self, reward: Tensor) -> Tensor:
        return (reward * torch.rsqrt(self.statistics.var + 1e-8)).clamp(-10, 10)


def mlp(inputs: int, hidden: int, outputs: int, last_gain: float) -> nn.Sequential:
    """inputs → hidden → hidden → outputs, tanh, orthogonal weights."""
    layers = [nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)]
    for layer, gain in zip(layers, (math.sqrt(2), math.sqrt(2), last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class Agent(nn.Module):
    """Actor and critic. forward: observation (N, obs_dim) → the environment's action, no noise.

    Continuous: a Gaussian around actor(s) in units where the action range is [−1, 1]; what leaves
    the range is clipped on its way to the environment only. Discrete: actor(s) are logits.
    """

    def __init__(self, observation_space, action_space, args: Args):
        super().__init__()
        obs_dim = observation_space.shape[0]
        self.discrete = isinstance(action_space, gymnasium.spaces.Discrete)
        outputs = int(action_space.n) if self.discrete else action_space.shape[0]
        self.normalizer = Normalizer(obs_dim)
        self.reward_scaler = RewardScaler(args.num_envs, args.discount)
        self.actor = mlp(obs_dim, args.hidden_size, outputs, last_gain=0.01)
        self.critic = mlp(obs_dim, args.hidden_size, 1, last_gain=1.0)
        if not self.discrete:
            self.log_std = nn.Parameter(torch.full((outputs,), args.initial_log_std))
            low, high = torch.tensor(action_space.low), torch.tensor(action_space.high)
            self.register_buffer("action_center", (high + low) / 2)
            self.register_buffer("action_scale", (high - low) / 2)

    def forward(self, obs: Tensor) -> Tensor:
        output = self.actor(self.normalizer(obs))
        return output.argmax(-1) if self.discrete else self.to_env(output)

    def to_env(self, action: Tensor) -> Tensor:
        if self.discrete:
            return action
        return self.action_center + self.action_scale * action.clamp(-1, 1)

    def sample(self, obs: Tensor) -> Tensor:
        output = self.actor(self.normalizer(obs))
        if self.discrete:  # argmax of logits plus Gumbel noise is a draw from the softmax
            return (output - torch.empty_like(output).exponential_().log()).argmax(-1)
        return output + self.log_std.exp() * torch.randn_like(output)

    def log_prob_entropy(self, x: Tensor, action: Tensor, fixed_std=False) -> tuple[Tensor, Tensor]:
        """log π(a|s) and the entropy of π(·|s), each (...), for normalised observations x."""
        output = self.actor(x)
        if self.discrete:
            log_probs = output.log_softmax(-1)
            log_prob = log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
            return log_prob, -(log_probs.exp() * log_probs).sum(-1)
        log_std = self.log_std.detach() if fixed_std else self.log_std
        z = (action - output) * (-log_std).exp()
        normalization = (log_std + 0.5 * math.log(2 * math.pi)).sum()
        log_prob = -0.5 * z.square().sum(-1) - normalization
        return log_prob, (normalization + 0.5 * z.shape[-1]).expand_as(log_prob)

    def value(self, x: Tensor) -> Tensor:  # (..., obs_dim) -> (...)
        return self.critic(x).squeeze(-1)


@torch.no_grad()
def collect(agent: Agent, envs: vec_envs.VecEnv, rollout: dict[str, Tensor]) -> None:
    """T steps of the present policy in every env."""
    for t in range(len(rollout["obs"])):
        obs = envs.obs
        action = agent.sample(obs)
        rollout["obs"][t] = obs
        rollout["action"][t] = action
        _, reward, terminated, truncated, info = envs.step(agent.to_env(action))
        rollout["reward"][t] = reward
        rollout["next_obs"][t] = info["final_obs"]
        rollout["terminated"][t] = terminated
        rollout["done"][t] = terminated | truncated
        rollout["episode_return"][t] = info["episode_return"]
        rollout["episode_length"][t] = info["episode_length"]


def gae(reward, value, next_value, terminated, done, args: Args) -> Tensor:
    """Generalised advantage estimation (Schulman 2016, arXiv:1506.02438), all (T, N).

    δ_t = r_t + γ (1 − terminated_t) V(s'_t) − V(s_t)      s'_t: the true next observation
    Â_t = δ_t + γ λ (1 − done_t) Â_{t+1}
    """
    delta = reward + args.discount * next_value * ~terminated - value
    decay = args.discount * args.gae_lambda * (~done).to(delta)
    advantage, following = torch.empty_like(delta), torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        advantage[t] = following = delta[t] + decay[t] * following
    return advantage


def policy_loss(log_ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """− E[ min( ρ Â , clip(ρ, 1−ε, 1+ε) Â ) ]"""
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio * advantage, clipped * advantage).mean()


def value_loss(value: Tensor, old_value: Tensor, returns: Tensor, args: Args) -> Tensor:
    """½ E[ (V − R)² ], or the larger of that and the same with V within ε of what it was."""
    squared_error = (value - returns).square()
    if args.clip_value:
        clipped = old_value + (value - old_value).clamp(-args.clip, args.clip)
        squared_error = torch.maximum(squared_error, (clipped - returns).square())
    return 0.5 * squared_error.mean()


@torch.no_grad()
def prepare(agent: Agent, rollout: dict[str, Tensor], args: Args) -> dict[str, Tensor]:
    """What the epochs need of each transition, (T·N, ...), computed once by the old policy."""
    obs = agent.normalizer(rollout["obs"])
    value, next_value = agent.value(obs), agent.value(agent.normalizer(rollout["next_obs"]))
    done = rollout["done"]
    reward = agent.reward_scaler(rollout["reward"], done)
    advantage = gae(reward, value, next_value, rollout["terminated"], done, args)
    batch = {
        "obs": obs,
        "action": rollout["action"],
        "log_prob": agent.log_prob_entropy(obs, rollout["action"])[0],
        "value": value,
        "advantage": advantage,
        "returns": advantage + value,
    }
    return {name: tensor.flatten(0, 1) for name, tensor in batch.items()}


def minibatch_loss(agent: Agent, batch: dict[str, Tensor], args: Args) -> tuple[Tensor, dict]:
    """The loss of one minibatch, and what to log of it."""
    log_prob, entropy = agent.log_prob_entropy(batch["obs"], batch["action"])
    log_ratio = log_prob - batch["log_prob"]
    std, mean = std_mean_over_learners(batch["advantage"])
    advantage = (batch["advantage"] - mean) / (std + 1e-8)
    losses = {
        "policy": policy_loss(log_ratio, advantage, args.clip),
        "value": value_loss(agent.value(batch["obs"]), batch["value"], batch["returns"], args),
        "entropy": entropy.mean(),
    }
    total = losses["policy"] + args.value_coef * losses["value"]
    total = total - args.entropy_coef * losses["entropy"]
    with torch.no_grad():  # Schulman's estimator of the KL divergence, never negative
        losses["kl"] = (log_ratio.exp() - 1 - log_ratio).mean()
    return total, losses


class SpinMemory(nn.Module):
    """The last M rollouts as they were collected, (T, M, N, ...)."""

    NAMES = ("obs", "next_obs", "action", "reward", "terminated", "done")

    def __init__(self, rollout: dict[str, Tensor], args: Args):
        super().__init__()
        for name in self.NAMES:
            empty = torch.zeros_like(rollout[name]).unsqueeze(1)
            self.register_buffer(name, empty.repeat_interleave(args.hterm_memory, 1))
        self.register_buffer("filled", torch.zeros_like(self.done))
        self.register_buffer("next_place", torch.zeros_like(self.done[0, :1, 0], dtype=torch.int64))

    def add(self, rollout: dict[str, Tensor]) -> None:
        """Put a rollout in the place of the oldest."""
        for name in self.NAMES:
            getattr(self, name).index_copy_(1, self.next_place, rollout[name].unsqueeze(1))
        self.filled.index_fill_(1, self.next_place, True)
        self.next_place.add_(1).remainder_(self.filled.shape[1])

    @torch.no_grad()
    def draw(self, agent: Agent, batch_size: int, args: Args) -> Iterator[dict[str, Tensor]]:
        """Minibatches without end; R is computed once, by the present critic.

        A quarter of the environments, because V of all would take as long as the epochs.
        """
        envs = torch.randperm(self.filled.shape[2], device=self.filled.device)
        envs = envs[: math.ceil(len(envs) / 4)]
        kept = {name: getattr(self, name)[:, :, envs] for name in (*self.NAMES, "filled")}
        obs = agent.normalizer(kept["obs"])  # (T, M, n, obs_dim), n of the N environments
        value, next_value = agent.value(obs), agent.value(agent.normalizer(kept["next_obs"]))
        reward = agent.reward_scaler.scale(kept["reward"])
        advantage = gae(reward, value, next_value, kept["terminated"], kept["done"], args)
        chance, common = kept["filled"], {}
        if args.hterm_weight == "energy":
            advantage = advantage.masked_fill(~kept["filled"], -1e9)  # an empty place has none
            chance = advantage.clamp(min=0)
            positive = mean_over_learners((chance > 0).sum())
            common["mean_energy"] = mean_over_learners(chance.sum()) / positive.clamp(min=1)
        steps = {"obs": obs, "action": kept["action"], "returns": advantage + value}
        steps = {name: tensor.flatten(0, 2) for name, tensor in steps.items()}
        cumulated = chance.flatten().double().cumsum(0)
        while True:
            height = torch.rand_like(cumulated[-1].expand(batch_size)) * cumulated[-1]
            chosen = torch.searchsorted(cumulated, height, right=True).clamp(max=len(cumulated) - 1)
            yield {name: tensor[chosen] for name, tensor in steps.items()} | common


def hamiltonian_term(agent: Agent, spins: dict[str, Tensor], args: Args) -> Tensor:
    """− mean[ w/w̄ σ̄² log π_θ(a|s) ] + 0.05 mean[ (R − V_θ(s))² ],  w = min(exp Â, 3)

    Â is R − V with mean 0 and deviation 1 in the minibatch. `energy`: with E = max(0, R − V) in the
    place of R − V, and min(E/Ē, 3) in that of w/w̄. An action that is very unlikely by now, its
    log π 20 below what it is in the mean, − entropy, counts no more.
    """
    advantage = spins["returns"] - agent.value(spins["obs"])
    if args.hterm_weight == "energy":
        advantage = advantage.clamp(min=0)
        weight = (advantage.detach() / spins["mean_energy"].clamp(min=1e-8)).clamp(max=3)
    elif args.hterm_weight == "uniform":
        weight = torch.ones_like(advantage)
    else:
        std, mean = std_mean_over_learners(advantage.detach())
        weight = ((advantage.detach() - mean) / (std + 1e-8)).exp().clamp(max=3)
        weight = weight / mean_over_learners(weight.mean())
    log_prob, entropy = agent.log_prob_entropy(spins["obs"], spins["action"], fixed_std=True)
    log_prob = (log_prob + entropy.detach()).clamp(min=-20)
    variance = 1.0 if agent.discrete else (2 * agent.log_std.detach()).exp().mean()
    return -(weight * variance * log_prob).mean() + 0.05 * advantage.square().mean()


def update(agent, optimizer, rollout, gradients, args, memory, coef) -> dict[str, Tensor]:
    """Some epochs of minibatch gradient steps -> mean of each logged quantity."""
    loss_gradient, hamiltonian_gradient = gradients
    batch = prepare(agent, rollout, args)
    if coef > 0:
        memory.add(rollout)
        spins = memory.draw(agent, max(2, args.minibatch_size // 2), args)
    size, device = len(batch["obs"]), batch["obs"].device
    logged = []
    for _ in range(args.epochs):
        for index in torch.randperm(size, device=device).split(args.minibatch_size):
            if len(index) < 2:  # a single advantage cannot be normalised
                continue
            minibatch = {name: tensor[index] for name, tensor in batch.items()}
            gradient, _, losses = loss_gradient(agent, minibatch, args)
            if coef > 0:
                term, losses["hamiltonian"] = hamiltonian_gradient(agent, next(spins), args)
                gradient += coef * term
            losses["gradient_norm"] = gradient_step(gradient, optimizer, args.max_grad_norm)
            logged.append(losses)
            if args.learning_rate_schedule == "adaptive":
                adapt_learning_rate(optimizer, mean_over_learners(losses["kl"]), args.target_kl)
    agent.normalizer.update(rollout["obs"])  # last, so that all of the above saw one normaliser
    return {name: sum(losses[name] for losses in logged) / len(logged) for name in logged[0]}


@torch.no_grad()
def adapt_learning_rate(optimizer, kl: Tensor, target: float) -> None:
    """A third less where the policy moved too far, half more where it hardly moved."""
    rate = optimizer.param_groups[0]["lr"]
    factor = torch.where(kl > 2 * target, 1 / 1.5, torch.where(kl < target / 2, 1.5, 1.0))
    rate.copy_((rate * factor).clamp(1e-6, 1e-2))


def train(args: Args) -> Result:
    run = Run(args, __file__, LIMITS)
    args = run.args
    workers = Workers(run, collect)
    agent = Agent(workers.observation_space, workers.action_space, args).to(run.device)
    weights = flatten(agent)  # all parameters, now views of one vector
    learning_rate = torch.tensor(args.learning_rate, device=run.device)
    optimizer = torch.optim.Adam([weights], learning_rate, eps=1e-5, fused=True)
    memory = SpinMemory(workers.start(agent, args.horizon), args)
    gradients = run.gradient(minibatch_loss, agent), run.gradient(hamiltonian_term, agent)
    step = run.start(agent=agent, optimizer=optimizer, workers=workers, memory=memory)

    while step < args.total_steps:
        left = 1 - step / args.total_steps
        if args.learning_rate_schedule == "anneal":
            optimizer.param_groups[0]["lr"].fill_(args.learning_rate * left)
        rollout = workers.collect()
        step += args.horizon * args.num_envs * run.learners
        coef = args.hterm_coef * (left if args.hterm_schedule == "anneal" else 1)
        losses = update(agent, optimizer, rollout, gradients, args, memory, coef)

        run.log_episodes(step, rollout)
        run.log(step, losses, learning_rate=optimizer.param_groups[0]["lr"])
        run.evaluate(step)
        run.checkpoint(step)
    return run.finish(step)


if __name__ == "__main__":
    train(parse(Args, TUNED))
