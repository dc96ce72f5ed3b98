"""TD3 with the Hamiltonian term (H-term): td3.py plus a policy gradient along K-step windows.

Unroll the Bellman equation and read each (state, action) as a spin: H(π) is minus the expected
K-step return, and its minimum is the best policy (Liu & Fang 2020; Liu, Li, Wu, Wang 2023,
"Stationary Deep RL with Quantum K-spin Hamiltonian Regularization"). The actor of TD3 sees single
states through the critics; the H-term shows it what K actions in a row led to. A deterministic
policy has no density, so what is differentiated is the one that explores, π = N(μ(s), σ²). Windows
come from the newest part of the replay buffer; x is an action before it is cut to [−1, 1], b the
policy that drew it, m_j is 1 until an episode ends, V̄(s) = min_i Q̄_i(s, μ̄(s)):

    δ_j  = r_j + γ (1 − terminated_j) V̄(s_{j+1}) − V̄(s_j)
    w_j  = min(1, exp Σ_{i≤j} log π(x_i|s_i)/b(x_i|s_i))
    g_i  = Σ_{j≥i} γ^j m_j w_j δ_j                w, δ, g without gradient; ĝ: scaled, at least −1
    L_H  = 1/(2Σm) Σ m_i ĝ_i ‖ x_i − μ(s_i) ‖²                      = − Σ m ĝ log π, up to scale
    L    = L(μ) / mean|Q| + λ L_H          λ falls linearly to 0; λ ‖∇L_H‖ at most ¼ of the other

Without the bounds of w and ĝ, ∇L_H is, up to scale and after warm-up, that of −J_K, the expected
K-step return that V̄ bootstraps. With λ = 0 the run is td3.py's, bit for bit. Of the scale, 1/σ² is
left out: with σ = 0.1 --hterm-coef 12.5 puts it back, as far as the cap lets it. On Hopper (five
seeds, 100 k steps) no effect is shown: the variance between seeds is 0.40 × td3.py's [0.08, 7.43],
p = 0.20, the interquartile mean 1006 beside 989 (difference 17 [−560, 557]), at 1.6 times the time.
With windows from the last 50 k steps it was 620 (four seeds): of 256 steps 2 or 3 counted (the
effective sample size), since μ had left the others; of the last 1000 it is 11 to 15.

    python algos/td3_hterm.py --env Hopper     `diff algos/td3.py algos/td3_hterm.py`: the lesson

The other form, self-imitation, is sac_hterm.py's: it showed nothing there and was not tried here.
"""

import copy
import math
from dataclasses import dataclass

import torch
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
    """TD3 with the H-term on any environment of vec_envs with continuous actions."""

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
    hterm_coef: float = 0.125
    """λ at first, weight of the H-term (0: td3.py)"""
    hterm_length: int = 8
    """K, steps of a window; there are as many windows as make a batch"""
    hterm_newest: int = 1000
    """windows are from so many of the last steps; the policy has left older ones: their w is 0"""


LIMITS = {
    **dict.fromkeys(("horizon", "batch_size", "buffer_size", "n_step", "hidden_size"), (1, None)),
    **dict.fromkeys(("discount", "polyak"), (0, 1)),
    **dict.fromkeys(("policy_delay", "hterm_length", "hterm_newest"), (1, None)),
    "exploration_noise": (1e-3, None),  # the H-term's density needs some
}

# What differs by environment; a flag on the command line wins.
TUNED = {"Pendulum": dict(total_steps=8000, warmup_steps=1000, policy_delay=1)}


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
        self.register_buffer("g_square", torch.ones(()))  # of the H-term, running mean

    def forward(self, obs: Tensor) -> Tensor:
        return self.to_env(self.act(obs))

    def act(self, obs: Tensor) -> Tensor:
        """μ(s)"""
        return self.actor(obs).to(obs).tanh()  # tanh not in bfloat16

    def to_env(self, action: Tensor) -> Tensor:
        return self.action_center + self.action_scale * action

    def log_prob(self, noise: Tensor) -> Tensor:
        """log N(μ(s) + noise; μ(s), σ²), (...)."""
        normalization = math.log(self.exploration_noise) + 0.5 * math.log(2 * math.pi)
        return (-0.5 * (noise / self.exploration_noise).square() - normalization).sum(-1)

    def explore(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """An action (N, act_dim), x, what it was before it was cut, and log b(x|s) (N,)."""
        mean = self.act(obs)
        noise = self.exploration_noise * torch.randn_like(mean)
        uniform = torch.rand_like(mean) * 2 - 1  # of density ½
        x = torch.where(self.warm_up, uniform, mean + noise)
        log_uniform = -math.log(2) * mean.shape[-1]
        return x.clamp(-1, 1), x, torch.where(self.warm_up, log_uniform, self.log_prob(noise))


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


def chain_gradient(log_ratio, delta, mask, discount, truncation=1.0) -> tuple[Tensor, Tensor]:
    """g_i = Σ_{j≥i} γ^j m_j w_j δ_j and w_j = min(truncation, exp c_j); all (K, L)."""
    powers = discount ** torch.arange(len(delta), device=delta.device, dtype=delta.dtype)
    w = log_ratio.cumsum(0).exp().clamp(max=truncation)  # c_j = Σ_{i≤j} log π/b
    term = powers.unsqueeze(1) * mask * w * delta
    return term.flip(0).cumsum(0).flip(0), w


def window_delta(target: Agent, windows: dict, args: Args) -> Tensor:
    """δ_j = r_j + γ (1 − terminated_j) V̄(s_{j+1}) − V̄(s_j), (K, L)"""
    # next_obs_j is obs_{j+1}, or the true last observation where an episode ends and m stays 0
    states = torch.cat((windows["obs"][:1], windows["next_obs"])).flatten(0, 1)
    value = target.critics(states, target.act(states)).amin(0)
    value = value.view(len(windows["obs"]) + 1, -1)  # (K + 1, L)
    reward = args.reward_scale * windows["reward"]
    return reward + args.discount * ~windows["terminated"] * value[1:] - value[:-1]


def hamiltonian_term(agent, target: Agent, windows: dict, args: Args) -> tuple[Tensor, Tensor]:
    """1/(2Σm) Σ m_i ĝ_i ‖ x_i − μ(s_i) ‖², and the effective sample size (Σw)²/Σw²."""
    mask, total = windows["mask"], mean_over_learners(windows["mask"].sum())
    mean = agent.act(windows["obs"])  # (K, L, act_dim)
    with torch.no_grad():
        delta = window_delta(target, windows, args)
        log_ratio = agent.log_prob(windows["x"] - mean) - windows["log_prob"]
        g, w = chain_gradient(log_ratio, delta, mask, args.discount)
        agent.g_square.lerp_(mean_over_learners((g.square() * mask).sum()) / total, 0.01)
        g = (g / (agent.g_square.sqrt() + 1e-6)).clamp(min=-1)
        effective = (mask * w).sum().square() / ((mask * w.square()).sum() + 1e-8)
    distance = (windows["x"] - mean).square().sum(-1)
    return 0.5 * (mask * g * distance).sum() / total, effective


def add_capped(base: Tensor, term: Tensor, coef: float) -> Tensor:
    """∇L + λ ∇L_H, with λ ‖∇L_H‖ at most ¼ ‖∇L‖."""
    coef = (0.25 * base.norm() / (term.norm() + 1e-12)).clamp(max=coef)
    return base + coef * term


@torch.no_grad()
def move_target(target: nn.Module, network: nn.Module, polyak: float) -> None:
    """θ̄ ← (1 − τ) θ̄ + τ θ"""
    for theirs, ours in zip(target.parameters(), network.parameters(), strict=True):
        theirs.lerp_(ours, polyak)


def update(
    agent, target, optimizers, batch, gradients, number, args, windows, coef
) -> tuple[dict, Tensor]:
    """Update `number` of the critics, perhaps of the actor -> what to log, the TD errors (B,)."""
    critic_optimizer, actor_optimizer = optimizers
    critic_gradient, actor_gradient, hamiltonian_gradient = gradients
    losses = {}
    gradient, losses["critic"], td_error = critic_gradient(agent, target, batch, args)
    gradient_step(gradient, critic_optimizer, args.max_grad_norm)
    if number % args.policy_delay == 0:
        gradient, losses["actor"] = actor_gradient(agent, batch, args)
        if windows is not None:
            with torch.no_grad():
                q = agent.critics(batch["obs"], batch["action"], members=slice(1))
            gradient = gradient / mean_over_learners(q.abs().mean()).clamp(min=1e-6)
            term, loss, size = hamiltonian_gradient(agent, target, windows, args)
            losses |= {"hamiltonian": loss, "effective_sample_size": size}
            # the cap is of the whole batch's gradients, as with one learner
            gradient, term = mean_over_learners(gradient), mean_over_learners(term)
            gradient = add_capped(gradient, term, coef)
        gradient_step(gradient, actor_optimizer, args.max_grad_norm)
        move_target(target, agent, args.polyak)
    return losses, td_error


def train(args: Args) -> Result:
    run = Run(args, __file__, LIMITS)
    args = run.args
    check_windows(args, run.learners)
    workers = Workers(run, collect, "bounded", ahead=True)
    agent = Agent(workers.observation_space, workers.action_space, args).to(run.device)
    target = copy.deepcopy(agent).requires_grad_(False)
    optimizers = critic_optimizer, actor_optimizer = [
        torch.optim.Adam([flatten(network)], args.learning_rate, fused=True)
        for network in (agent.critics, agent.actor)
    ]
    rollout = workers.start(agent, args.horizon, x=workers.action_space.shape, log_prob=())
    replay = ReplayBuffer(
        run, rollout, args.buffer_size, n_step=args.n_step, discount=args.discount,
        prioritized=args.prioritized,
    )  # fmt: skip
    gradients = run.gradient(critic_loss, agent.critics), run.gradient(actor_loss, agent.actor)
    gradients += (run.gradient(hamiltonian_term, agent.actor, bf16=False),)  # exact ratios
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
            coef = args.hterm_coef * (1 - before / args.total_steps)
            for number in range(int(before * args.utd_ratio), int(step * args.utd_ratio)):
                batch = replay.sample(args.batch_size)
                due = coef > 0 and number % args.policy_delay == 0
                windows = replay.windows(*window_shape, args.hterm_newest) if due else None
                new, td_error = update(
                    agent, target, optimizers, batch, gradients, number, args, windows, coef
                )
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
