"""SAC with the Hamiltonian term (H-term): sac.py plus a policy gradient along K-step windows.

Unroll the Bellman equation and read each (state, action) as a spin: H(π) is minus the expected
K-step return, and its minimum is the best policy (Liu & Fang 2020; Liu, Li, Wu, Wang 2023,
"Stationary Deep RL with Quantum K-spin Hamiltonian Regularization"). The actor of SAC sees single
states through the critics; the H-term shows it what K actions in a row led to. Windows come from
the newest part of the replay buffer; x is an action before tanh, b the policy that drew it, m_j is
1 until an episode ends, V̄(s) = min_i Q̄_i(s, ã) − α log π(ã|s):

    δ_j  = r_j − α log π(a_j|s_j) + γ (1 − terminated_j) V̄(s_{j+1}) − V̄(s_j)
    w_j  = min(1, exp Σ_{i≤j} log π(x_i|s_i)/b(x_i|s_i))         tanh's slope cancels in the ratio
    g_i  = Σ_{j≥i} γ^j m_j w_j δ_j                    w, δ, g without gradient
    ĝ    = ( g − w Σmg / Σmw ) / its scale            w times a baseline: w is a ratio
    L_H  = − (1/Σm) Σ m_i ĝ_i log π(x_i|s_i)
    L    = L(π) + λ L_H                    λ falls linearly to 0; λ ‖∇L_H‖ at most ¼ ‖∇L(π)‖

Without the truncation of w, and but for a window's own part in the baseline, ∇L_H is, up to scale,
that of −J_K, the expected K-step return that V̄ bootstraps. The temperature's loss does not see it,
and with λ = 0 the run is sac.py's, bit for bit. No effect is shown on Hopper (five seeds beside
sac.py's eight, 100 k steps): the variance between seeds was 3.6 × sac.py's [0.86, 18.5], p = 0.15,
the interquartile mean 1481 beside 1204 (difference 277 [−618, 866]). Windows from the last 100 k
steps did not show one either (eight seeds); there only 4 to 6 of a batch's 256 steps counted (the
effective sample size), of the last 1000 it is 30 to 37: π has left the others.

    python algos/sac_hterm.py --env Hopper      `diff algos/sac.py algos/sac_hterm.py`: the lesson

Another form is `--hterm energy --hterm-coef 0.5 --hterm-newest 1000000`: self-imitation (Oh, Guo,
Singh, Lee 2018, arXiv:1806.05635) with the replay buffer as its memory, drawn from uniformly, and
for the policy only. R_i is the return with entropies from step i to its window's or its episode's
end, bootstrapped there, λ constant:

    E_i  = max(0, R_i − min_k Q̄_k(s_i, ã_i))            energy that π leaves unused, Ē its mean
    L_H  = 1/(2 Σm) Σ m_i min(E_i/Ē, 3) ‖ a_i − tanh μ(s_i) ‖²

It is zero where nothing in memory beats the critics. It showed no effect either (five seeds).
"""

import copy
import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vec_envs
from algos.worker_learner import (
    ReplayArgs,
    ReplayBuffer,
    Result,
    Run,
    UserError,
    Workers,
    flatten,
    gradient_step,
    mean_over_learners,
    parse,
)


@dataclass
class Args(ReplayArgs):
    """SAC with the H-term on any environment of vec_envs with continuous actions."""

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
    """of Adam, for actor, critics and temperature"""
    discount: float = 0.99
    """γ"""
    polyak: float = 0.005
    """τ: how far the target network moves towards the critics at each update"""
    n_step: int = 1
    """rewards (without the entropies) summed before the target network is asked"""
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
    hterm: Literal["chain", "energy"] = "chain"
    """form of the H-term: a policy gradient along windows, or self-imitation"""
    hterm_coef: float = 0.125
    """λ, weight of the H-term, of a chain at first (0: sac.py)"""
    hterm_length: int = 8
    """K, steps of a window; there are as many windows as make a batch"""
    hterm_newest: int = 1000
    """windows are from so many of the last steps; of a chain, the policy has left older ones"""


LIMITS = {
    **dict.fromkeys(("horizon", "batch_size", "buffer_size", "n_step", "hidden_size"), (1, None)),
    **dict.fromkeys(("discount", "polyak"), (0, 1)),
    **dict.fromkeys(("hterm_length", "hterm_newest"), (1, None)),
}

# What differs by environment; a flag on the command line wins.
TUNED = {"Pendulum": dict(total_steps=10_000, warmup_steps=1000, hidden_size=128)}


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
    """Actor, critics, temperature. forward: observation (N, obs_dim) → the environment's action.

    All of the policy's mathematics is in units where the action range is [−1, 1].
    """

    def __init__(self, observation_space, action_space, args: Args):
        super().__init__()
        obs_dim, act_dim = observation_space.shape[0], action_space.shape[0]
        self.actor = mlp(obs_dim, args.hidden_size, 2 * act_dim)
        self.actor.log_temperature = nn.Parameter(torch.zeros(()))  # in the actor's optimizer
        self.critics = Critics(2, obs_dim + act_dim, args.hidden_size)
        self.target_entropy = -act_dim
        self.register_buffer("warm_up", torch.tensor(True))  # explore by uniform actions
        low, high = torch.tensor(action_space.low), torch.tensor(action_space.high)
        self.register_buffer("action_center", (high + low) / 2)
        self.register_buffer("action_scale", (high - low) / 2)
        scale = "g_square" if args.hterm == "chain" else "mean_energy"
        self.register_buffer(scale, torch.ones(()))  # of the H-term, running mean

    def forward(self, obs: Tensor) -> Tensor:
        mean, _ = self.actor(obs).chunk(2, -1)
        return self.to_env(mean.tanh())

    def to_env(self, action: Tensor) -> Tensor:
        return self.action_center + self.action_scale * action

    def draw(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """u ~ N(μ(s), σ(s)²) and log N(u; μ, σ²), each (B, act_dim)."""
        mean, log_std = self.actor(obs).to(obs).chunk(2, -1)  # the rest not in bfloat16
        log_std = log_std.clamp(-20, 2)
        noise = torch.randn_like(mean)
        u = mean + log_std.exp() * noise
        return u, -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)

    def sample(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """a = tanh(u), u = μ(s) + σ(s) ε -> a (B, act_dim), log π(a|s) (B,)."""
        u, log_normal = self.draw(obs)
        log_prob = (log_normal - log_slope(u)).sum(-1)  # first: gradients add up as in sac.py
        return u.tanh(), log_prob

    def log_prob(self, obs: Tensor, x: Tensor) -> Tensor:
        """log π(x|s) of actions before tanh, (...)."""
        mean, log_std = self.actor(obs).to(obs).chunk(2, -1)  # the rest not in bfloat16
        log_std = log_std.clamp(-20, 2)
        z = (x - mean) * (-log_std).exp()
        return (-0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)

    def explore(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """An action a (N, act_dim), x = atanh a, and log b(x|s) (N,)."""
        u, log_normal = self.draw(obs)
        uniform = torch.rand_like(u) * 2 - 1
        action = torch.where(self.warm_up, uniform, u.tanh())
        x = torch.where(self.warm_up, uniform.clamp(-1 + 1e-6, 1 - 1e-6).atanh(), u)
        log_uniform = log_slope(x) - math.log(2)  # the density ½ of a, times da/dx
        return action, x, torch.where(self.warm_up, log_uniform, log_normal).sum(-1)


def log_slope(u: Tensor) -> Tensor:
    """log(1 − tanh²u) = 2 (log 2 − u − softplus(−2u)), without cancellation."""
    return 2 * (math.log(2) - u - F.softplus(-2 * u))


def check_windows(args: Args, learners: int) -> None:
    """UserError unless every learner has windows from the first update on."""
    least = args.hterm_length * args.num_envs * learners if args.hterm_coef > 0 else 0
    for name in ("buffer_size", "hterm_newest", "warmup_steps"):
        if getattr(args, name) < least:
            what = f"--{name.replace('_', '-')} is {getattr(args, name)}; allowed is at least"
            raise UserError(f"{what} {least}, --hterm-length times --num-envs")


@torch.no_grad()
def collect(agent: Agent, envs: vec_envs.VecEnv, rollout: dict[str, Tensor]) -> None:
    """T steps of the present policy, with exploration, in every env."""
    for t in range(len(rollout["obs"])):
        obs = envs.obs
        action, rollout["x"][t], rollout["log_prob"][t] = agent.explore(obs)
        rollout["obs"][t] = obs
        rollout["action"][t] = action
        _, reward, terminated, truncated, info = envs.step(agent.to_env(action))
        rollout["reward"][t] = reward
        rollout["next_obs"][t] = info["final_obs"]
        rollout["terminated"][t] = terminated
        rollout["done"][t] = terminated | truncated
        rollout["episode_return"][t] = info["episode_return"]
        rollout["episode_length"][t] = info["episode_length"]


def critic_loss(agent: Agent, target: Critics, batch: dict, args: Args) -> tuple[Tensor, Tensor]:
    """Σ_i E[ ½ w ( Q_i(s, a) − y )² ] with importance weights w, and the TD errors (B,)."""
    with torch.no_grad():
        next_action, log_prob = agent.sample(batch["next_obs"])
        next_value = target(batch["next_obs"], next_action).amin(0)
        next_value -= agent.actor.log_temperature.exp() * log_prob
        future = batch["discount"] * ~batch["terminated"] * next_value
        y = args.reward_scale * batch["reward"] + future
    error = y - agent.critics(batch["obs"], batch["action"])  # (2, B)
    return 0.5 * (batch["weight"] * error.square()).mean(1).sum(), error.detach().abs().mean(0)


def actor_loss(agent: Agent, batch: dict, args: Args) -> tuple[Tensor, Tensor]:
    """E[ α log π(ã|s) − min_i Q_i(s, ã) ], and log π(ã|s) (B,)."""
    action, log_prob = agent.sample(batch["obs"])
    with torch.autocast(action.device.type, enabled=False):  # ∂Q/∂a is not in bfloat16
        value = agent.critics(batch["obs"], action).amin(0)
    temperature = agent.actor.log_temperature.detach().exp()
    return (temperature * log_prob - value).mean(), log_prob.detach()


def temperature_loss(agent: Agent, log_prob: Tensor) -> Tensor:
    """− log α · E[ log π(ã|s) + H̄ ]: α grows while the entropy is below H̄."""
    return -agent.actor.log_temperature * (log_prob + agent.target_entropy).mean()


def policy_loss(agent: Agent, batch: dict, args: Args) -> tuple[Tensor, Tensor, Tensor]:
    """What actor and temperature lower together, the actor's part of it, log π(ã|s) (B,)."""
    loss, log_prob = actor_loss(agent, batch, args)
    return loss + temperature_loss(agent, log_prob), loss, log_prob


def chain_gradient(log_ratio, delta, mask, discount, truncation=1.0) -> tuple[Tensor, Tensor]:
    """g_i = Σ_{j≥i} γ^j m_j w_j δ_j and w_j = min(truncation, exp c_j); all (K, L)."""
    powers = discount ** torch.arange(len(delta), device=delta.device, dtype=delta.dtype)
    w = log_ratio.cumsum(0).exp().clamp(max=truncation)  # c_j = Σ_{i≤j} log π/b
    term = powers.unsqueeze(1) * mask * w * delta
    return term.flip(0).cumsum(0).flip(0), w


def window_delta(
    agent, target: Critics, windows: dict, log_prob: Tensor | None, args: Args
) -> Tensor:
    """δ_j = r_j − α log π(a_j|s_j) + γ (1 − terminated_j) V̄(s_{j+1}) − V̄(s_j), (K, L)

    `log_prob` is log π(x_j|s_j); without it log π(ã_j|s_j) is taken for that of a_j, so that
    δ_j = r_j + γ (1 − terminated_j) V̄(s_{j+1}) − min_i Q̄_i(s_j, ã_j).
    """
    temperature = agent.actor.log_temperature.exp()
    # next_obs_j is obs_{j+1}, or the true last observation where an episode ends and m stays 0
    states = torch.cat((windows["obs"][:1], windows["next_obs"])).flatten(0, 1)
    action, next_log_prob = agent.sample(states)
    value = target(states, action).amin(0) - temperature * next_log_prob
    value = value.view(len(windows["obs"]) + 1, -1)  # (K + 1, L)
    if log_prob is None:
        log_prob = next_log_prob.view_as(value)[:-1]
    else:
        log_prob = log_prob - log_slope(windows["x"]).sum(-1)  # of a instead of x
    reward = args.reward_scale * windows["reward"] - temperature * log_prob
    return reward + args.discount * ~windows["terminated"] * value[1:] - value[:-1]


def hamiltonian_term(agent, target: Critics, windows: dict, args: Args) -> tuple[Tensor, Tensor]:
    """− (1/Σm) Σ m_i ĝ_i log π(x_i|s_i), and the effective sample size (Σw)²/Σw²."""
    mask, total = windows["mask"], mean_over_learners(windows["mask"].sum())
    log_prob = agent.log_prob(windows["obs"], windows["x"])  # (K, L)
    with torch.no_grad():
        delta = window_delta(agent, target, windows, log_prob, args)
        g, w = chain_gradient(log_prob - windows["log_prob"], delta, mask, args.discount)
        sums = mean_over_learners(torch.stack(((g * mask).sum(), (w * mask).sum())))
        g = g - w * sums[0] / sums[1].clamp(min=1e-8)
        agent.g_square.lerp_(mean_over_learners((g.square() * mask).sum()) / total, 0.01)
        g = g / (agent.g_square.sqrt() + 1e-6)
        effective = (mask * w).sum().square() / ((mask * w.square()).sum() + 1e-8)
    return -(mask * g * log_prob).sum() / total, effective


def energy_term(agent, target: Critics, windows: dict, args: Args) -> tuple[Tensor, Tensor]:
    """1/(2 Σm) Σ m_i min(E_i/Ē, 3) ‖ a_i − tanh μ(s_i) ‖², and the weights' effective sample size.

    E_i = max(0, R_i − min_k Q̄_k(s_i, ã_i)), where the difference is Σ_{j≥i} γ^{j−i} m_j δ_j.
    """
    mask, total = windows["mask"], mean_over_learners(windows["mask"].sum())
    mean, _ = agent.actor(windows["obs"]).chunk(2, -1)  # (K, L, act_dim)
    with torch.no_grad():
        energy = window_delta(agent, target, windows, None, args)
        for j in range(len(energy) - 2, -1, -1):  # from the end: δ becomes the sum
            energy[j] += args.discount * mask[j + 1] * energy[j + 1]
        energy = mask * energy.clamp(min=0)
        sums = mean_over_learners(torch.stack((energy.sum(), (energy > 0).sum())))
        found = torch.where(sums[1] > 0, sums[0] / sums[1], agent.mean_energy)
        agent.mean_energy.lerp_(found, 0.01)
        weight = (energy / (agent.mean_energy + 1e-6)).clamp(max=3)
        effective = weight.sum().square() / (weight.square().sum() + 1e-8)
    distance = (windows["action"] - mean.tanh()).square().sum(-1)
    return 0.5 * (weight * distance).sum() / total, effective


def add_capped(base: Tensor, term: Tensor, coef: float) -> Tensor:
    """∇L + λ ∇L_H, with λ ‖∇L_H‖ at most ¼ ‖∇L‖ (less the temperature's part)."""
    coef = (0.25 * base[1:].norm() / (term.norm() + 1e-12)).clamp(max=coef)  # 0: temperature
    return base + coef * term


@torch.no_grad()
def move_target(target: nn.Module, network: nn.Module, polyak: float) -> None:
    """θ̄ ← (1 − τ) θ̄ + τ θ"""
    for theirs, ours in zip(target.parameters(), network.parameters(), strict=True):
        theirs.lerp_(ours, polyak)


def update(agent, target, optimizers, batch, gradients, args, windows, coef) -> tuple[dict, Tensor]:
    """One step of critics, actor and temperature -> what to log, the TD errors (B,)."""
    critic_optimizer, actor_optimizer = optimizers
    critic_gradient, actor_gradient, hamiltonian_gradient = gradients
    losses = {}
    gradient, losses["critic"], td_error = critic_gradient(agent, target, batch, args)
    gradient_step(gradient, critic_optimizer, args.max_grad_norm)
    gradient, _, losses["actor"], log_prob = actor_gradient(agent, batch, args)
    if windows is not None:
        term, loss, size = hamiltonian_gradient(agent, target, windows, args)
        losses |= {"hamiltonian": loss, "effective_sample_size": size}
        # the cap is of the whole batch's gradients, as with one learner
        gradient, term = mean_over_learners(gradient), mean_over_learners(term)
        gradient = add_capped(gradient, term, coef)
    gradient_step(gradient, actor_optimizer, args.max_grad_norm)
    losses["entropy"] = -log_prob.mean()
    losses["temperature"] = agent.actor.log_temperature.exp()
    move_target(target, agent.critics, args.polyak)
    return losses, td_error


def train(args: Args) -> Result:
    run = Run(args, __file__, LIMITS)
    args = run.args
    check_windows(args, run.learners)
    workers = Workers(run, collect, "bounded", ahead=True)
    agent = Agent(workers.observation_space, workers.action_space, args).to(run.device)
    target = copy.deepcopy(agent.critics).requires_grad_(False)
    optimizers = critic_optimizer, actor_optimizer = [
        torch.optim.Adam([flatten(network)], args.learning_rate, fused=True)
        for network in (agent.critics, agent.actor)
    ]
    rollout = workers.start(agent, args.horizon, x=workers.action_space.shape, log_prob=())
    chain = args.hterm == "chain"
    unread = () if chain else ("x", "log_prob")
    kept = {name: tensor for name, tensor in rollout.items() if name not in unread}
    replay = ReplayBuffer(
        run, kept, args.buffer_size, n_step=args.n_step, discount=args.discount,
        prioritized=args.prioritized,
    )  # fmt: skip
    gradients = run.gradient(critic_loss, agent.critics), run.gradient(policy_loss, agent.actor)
    term = hamiltonian_term if chain else energy_term  # not in bfloat16: ratios are exact
    gradients += (run.gradient(term, agent.actor, bf16=False),)
    step = run.start(
        agent=agent, target=target, critic_optimizer=critic_optimizer,
        actor_optimizer=actor_optimizer, workers=workers, replay=replay,
    )  # fmt: skip

    window_shape = max(1, args.batch_size // args.hterm_length), args.hterm_length  # L, K
    losses: dict[str, Tensor] = {}  # of the last updates
    while step < args.total_steps:
        agent.warm_up.fill_(step < args.warmup_steps)
        rollout = workers.collect()
        replay.add(rollout)
        before, step = step, step + args.horizon * args.num_envs * run.learners
        if step >= args.warmup_steps and len(replay) >= min(args.warmup_steps, args.buffer_size):
            replay.importance_exponent = 0.4 + 0.6 * before / args.total_steps
            coef = args.hterm_coef * (1 - chain * before / args.total_steps)
            for _ in range(int(before * args.utd_ratio), int(step * args.utd_ratio)):
                batch = replay.sample(args.batch_size)
                windows = replay.windows(*window_shape, args.hterm_newest) if coef > 0 else None
                losses, td_error = update(
                    agent, target, optimizers, batch, gradients, args, windows, coef
                )
                replay.update_priorities(batch["index"], td_error)

        run.log_episodes(step, rollout)
        if step // args.log_every > before // args.log_every:
            run.log(step, losses, replay_size=len(replay), policy_lag=workers.policy_lag)
        run.evaluate(step)
        run.checkpoint(step)
    return run.finish(step)


if __name__ == "__main__":
    train(parse(Args, TUNED))
