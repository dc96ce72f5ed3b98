"""PPO with the two other forms of the H-term, kept to be compared with: chain and published.

ppo_hterm.py explains the idea. Both forms raise the log-probability of K consecutive actions by
what followed them: a policy gradient along windows. On Hopper (10 fresh seeds) neither beat
ppo.py (40): variance ratios 0.23 [0.09, 0.70], p = 0.41, and 2.20 [0.26, 8.63], p = 0.19, and below
its interquartile mean by 241 [−77, 593] and 253 [−108, 1365] (benchmark/README.md).

`--hterm chain`, the TD-coupled K-spin chain. A window has K steps of one env from this rollout;
m_j is 1 until an episode ends inside it, δ_j the TD error, ρ_j = π_θ/π_old, c_j = Σ_{i≤j} log ρ_i:

    v_ij = min(1, exp(c_j − log ρ_i))              ratio of the chain so far without its own link
    g_i  = Σ_{j≥i} γ^j m_j v_ij δ_j                both without gradient; ĝ: centred, scaled to 1
    L_H  = − (1/Σm) Σ m_i min( ρ_i ĝ_i , clip(ρ_i, 1−ε, 1+ε) ĝ_i )

Without truncation and clip its gradient is, up to scale, that of −J_K, the expected K-step return
with bootstrap. λ falls linearly to 0, and ‖λ∇L_H‖ is held below a quarter of ‖∇L_PPO‖.
`--window-selection top` takes the windows with the best K-step rewards, which is self-imitation.

`--hterm published`, the last variant that ElegantRL had (2023), from its formula:

    L_H = − mean Σ_k 0.8^k r̃_k m_k clamp( Σ_{j≤k} log π_θ(a_j|s_j), −16, 2 )

r̃ are the rewards, scaled to [0, 1], of the windows with the largest reward sum ever seen, without
importance weights however stale they are. Theirs ranked whole episodes and let windows run across
their ends; here windows are ranked, m_k stops them, and λ falls and is capped as above.

    python algos/ppo_hterm_variants.py --env Hopper --hterm chain
"""

import math
from dataclasses import dataclass
from typing import Literal

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

import vec_envs
from algos.worker_learner import (
    Result,
    Run,
    RunArgs,
    UserError,
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
    """PPO with other forms of the H-term on any environment of vec_envs."""

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
    hterm: Literal["chain", "published"] = "chain"
    """which form"""
    hterm_coef: float = 0.125
    """λ, weight of the H-term at first; it falls linearly to zero (0: ppo.py)"""
    hterm_length: int = 8
    """K, steps of a window"""
    hterm_windows: int = 0
    """L, windows of a minibatch (0: as many as make its size)"""
    window_selection: Literal["uniform", "top"] = "uniform"
    """chain: any windows of the rollout, or those with the best K-step rewards"""
    log_std_schedule: str = ""
    """log σ at equal distances of the training, as "0 -0.5 -1", instead of learning it: with
    --hterm-coef 0 this is ppo.py with another run's noise (a control)"""


LIMITS = {
    **dict.fromkeys(("horizon", "minibatch_size"), (2, None)),
    **dict.fromkeys(("epochs", "hidden_size"), (1, None)),
    **dict.fromkeys(("discount", "gae_lambda"), (0, 1)),
    **dict.fromkeys(("target_kl", "max_grad_norm"), (1e-9, None)),
    "initial_log_std": (-10, 10),
    "hterm_length": (1, None),
}

# What differs by environment, as in the tables of papers; a flag on the command line wins.
TUNED = {
    "CartPole": dict(total_steps=49_152, eval_every=10_000, learning_rate=1e-3, gae_lambda=0.98),
    "Acrobot": dict(total_steps=98_304, eval_every=20_000, num_envs=32, minibatch_size=256,
                    learning_rate=1e-3, discount=0.98),
    "Ant": dict(total_steps=2_500_000, horizon=32, epochs=4, minibatch_size=1024,
                learning_rate=1e-3, initial_log_std=-1.0),
    "HalfCheetah": dict(horizon=32, minibatch_size=128, learning_rate=3e-4, initial_log_std=-1.0,
                        discount=0.98, gae_lambda=0.92),
    "Hopper": dict(learning_rate_schedule="adaptive"),
    "Walker2d": dict(horizon=32),
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

    def log_prob_entropy(self, x: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """log π(a|s) and the entropy of π(·|s), each (...), for normalised observations x."""
        output = self.actor(x)
        if self.discrete:
            log_probs = output.log_softmax(-1)
            log_prob = log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
            return log_prob, -(log_probs.exp() * log_probs).sum(-1)
        log_std = self.log_std
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
        "delta": reward + args.discount * next_value * ~rollout["terminated"] - value,
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


class Windows(nn.Module):
    """Where the H-term's windows of K steps come from: tensors (windows, K, ...)."""

    def __init__(self, rollout: dict[str, Tensor], args: Args):
        super().__init__()
        self.length = args.hterm_length
        self.count = args.hterm_windows or max(1, args.minibatch_size // args.hterm_length)
        self.register_buffer("g_square", torch.ones((), device=rollout["obs"].device))
        if args.hterm == "published":  # the archive, at first without any worth
            for name in ("obs", "action", "reward", "mask"):
                source = rollout["reward" if name == "mask" else name]
                shape = (4 * self.count, self.length, *source.shape[2:])
                self.register_buffer(name, torch.zeros(shape, dtype=source.dtype).to(source.device))
            worth = torch.full((4 * self.count,), -math.inf, device=rollout["obs"].device)
            self.register_buffer("worth", worth)

    def cut(self, steps: dict[str, Tensor]) -> dict[str, Tensor]:
        """All windows in tensors (T, N, ...) -> (windows, K, ...), with their mask m."""
        windows = {
            name: tensor.unfold(0, self.length, 1).movedim(-1, 2).flatten(0, 1)
            for name, tensor in steps.items()
        }
        alive = (~windows["done"]).float().cumprod(1)  # m_{j+1}: no end up to step j
        windows["mask"] = torch.cat((torch.ones_like(alive[:, :1]), alive[:, :-1]), 1)
        windows["worth"] = (windows["reward"] * windows["mask"]).sum(1)
        return windows

    def keep_best(self, windows: dict[str, Tensor]) -> None:
        """published: the archive becomes the best of itself and these windows."""
        worth = torch.cat((self.worth, windows["worth"]))
        best = worth.topk(len(self.worth)).indices
        for name in ("obs", "action", "reward", "mask", "worth"):
            both = torch.cat((getattr(self, name), windows[name]))
            getattr(self, name).copy_(both[best])

    def draw(self, windows: dict[str, Tensor], selection: str) -> dict[str, Tensor]:
        """chain: some of this rollout's windows, any or the best by K-step reward."""
        if selection == "top":
            index = windows["worth"].topk(min(self.count, len(windows["worth"]))).indices
        else:
            worth = windows["worth"]
            index = torch.randint(len(worth), (self.count,), device=worth.device)
        return {name: tensor[index] for name, tensor in windows.items()}


def chain_gradient(
    log_ratio: Tensor, delta: Tensor, mask: Tensor, discount: float, truncation: float = 1.0
) -> Tensor:
    """g_i = Σ_{j≥i} γ^j m_j v_ij δ_j,  v_ij = min(truncation, exp(c_j − log ρ_i)); all (L, K)."""
    length = delta.shape[1]
    powers = discount ** torch.arange(length, device=delta.device, dtype=delta.dtype)
    chain = (log_ratio * mask).cumsum(1)  # c_j
    v = (chain.unsqueeze(1) - log_ratio.unsqueeze(2)).exp().clamp(max=truncation)  # (L, i, j)
    return ((powers * mask * delta).unsqueeze(1) * v).triu().sum(2)


def chain_term(agent: Agent, spins: dict, windows: Windows, args: Args) -> tuple[Tensor, dict]:
    """− (1/Σm) Σ m_i min( ρ_i ĝ_i , clip(ρ_i, 1−ε, 1+ε) ĝ_i ), and what to log of it."""
    mask, total = spins["mask"], mean_over_learners(spins["mask"].sum())
    log_ratio = agent.log_prob_entropy(spins["obs"], spins["action"])[0] - spins["log_prob"]
    with torch.no_grad():
        g = chain_gradient(log_ratio, spins["delta"], mask, args.discount)
        g = g - mean_over_learners((g * mask).sum()) / total
        windows.g_square.lerp_(mean_over_learners((g.square() * mask).sum()) / total, 0.01)
        g = g / (windows.g_square.sqrt() + 1e-6)
        w = mask * (log_ratio * mask).cumsum(1).exp().clamp(max=1)
        effective = w.sum().square() / (w.square().sum() + 1e-8)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
    loss = -(mask * torch.minimum(ratio * g, clipped * g)).sum() / total
    return loss, {"hamiltonian": loss, "effective_sample_size": effective}


def published_term(agent: Agent, windows: Windows) -> tuple[Tensor, dict]:
    """− mean Σ_k 0.8^k r̃_k m_k clamp( Σ_{j≤k} log π(a_j|s_j), −16, 2 )"""
    index = torch.randint(len(windows.worth), (windows.count,), device=windows.worth.device)
    mask, reward = windows.mask[index], windows.reward[index]
    lowest, highest = windows.reward.amin(), windows.reward.amax()
    reward = (reward - lowest) / (highest - lowest).clamp(min=1e-6)
    obs = agent.normalizer(windows.obs[index])
    log_prob, _ = agent.log_prob_entropy(obs, windows.action[index])
    chain = (log_prob * mask).cumsum(1).clamp(-16, 2)
    powers = 0.8 ** torch.arange(1, windows.length + 1, device=obs.device)
    loss = -(powers * reward * mask * chain).sum(1).mean()
    return loss, {"hamiltonian": loss}


def add_capped(base: Tensor, term: Tensor, coef: float) -> Tensor:
    """g + λ ∇term, with λ ‖∇term‖ at most a quarter of ‖g‖."""
    coef = (0.25 * base.norm() / (term.norm() + 1e-12)).clamp(max=coef)
    return base + coef * term


def update(agent, optimizer, rollout, gradients, args, windows, coef) -> dict[str, Tensor]:
    """Some epochs of minibatch gradient steps -> mean of each logged quantity."""
    loss_gradient, term_gradient = gradients
    batch = prepare(agent, rollout, args)
    if coef > 0 and args.hterm == "published":
        windows.keep_best(windows.cut(rollout))
    elif coef > 0:
        names, shape = ("obs", "action", "log_prob", "delta"), rollout["done"].shape
        whole = {name: batch[name].unflatten(0, shape) for name in names}
        spins = windows.cut(whole | {name: rollout[name] for name in ("done", "reward")})
    size, device = len(batch["obs"]), batch["obs"].device
    logged = []
    for _ in range(args.epochs):
        for index in torch.randperm(size, device=device).split(args.minibatch_size):
            if len(index) < 2:  # a single advantage cannot be normalised
                continue
            minibatch = {name: tensor[index] for name, tensor in batch.items()}
            gradient, _, losses = loss_gradient(agent, minibatch, args)
            if coef > 0:
                inputs = (windows,)
                if args.hterm == "chain":
                    inputs = windows.draw(spins, args.window_selection), windows, args
                term, _, more = term_gradient(agent, *inputs)
                losses |= more
                # the cap is of the whole batch's gradients, as with one learner
                gradient, term = mean_over_learners(gradient), mean_over_learners(term)
                gradient = add_capped(gradient, term, coef)
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


def parse_schedule(words: str) -> list[float]:
    """UserError if `words` are not numbers with spaces between."""
    try:
        return [float(word) for word in words.split()]
    except ValueError:
        raise UserError(f"--log-std-schedule is {words!r}; it must be numbers, as '0 -1'") from None


def train(args: Args) -> Result:
    run = Run(args, __file__, LIMITS)
    args = run.args
    if args.hterm_length > args.horizon:
        raise UserError(
            f"--hterm-length is {args.hterm_length}; allowed is at most --horizon, {args.horizon}"
        )
    workers = Workers(run, collect)
    agent = Agent(workers.observation_space, workers.action_space, args).to(run.device)
    log_std_schedule = parse_schedule(args.log_std_schedule)
    if log_std_schedule and agent.discrete:
        raise UserError(f"--log-std-schedule is given, but --env {args.env} has discrete actions")
    if log_std_schedule:
        agent.log_std.requires_grad_(False)
    weights = flatten(agent)  # all parameters, now views of one vector
    learning_rate = torch.tensor(args.learning_rate, device=run.device)
    optimizer = torch.optim.Adam([weights], learning_rate, eps=1e-5, fused=True)
    windows = Windows(workers.start(agent, args.horizon), args)
    term = chain_term if args.hterm == "chain" else published_term
    gradients = run.gradient(minibatch_loss, agent), run.gradient(term, agent)
    step = run.start(agent=agent, optimizer=optimizer, workers=workers, windows=windows)

    while step < args.total_steps:
        left = 1 - step / args.total_steps
        if args.learning_rate_schedule == "anneal":
            optimizer.param_groups[0]["lr"].fill_(args.learning_rate * left)
        if log_std_schedule:
            places = np.linspace(0, 1, len(log_std_schedule))
            agent.log_std.fill_(np.interp(1 - left, places, log_std_schedule))
        rollout = workers.collect()
        step += args.horizon * args.num_envs * run.learners
        losses = update(agent, optimizer, rollout, gradients, args, windows, args.hterm_coef * left)

        run.log_episodes(step, rollout)
        run.log(step, losses, learning_rate=optimizer.param_groups[0]["lr"])
        run.evaluate(step)
        run.checkpoint(step)
    return run.finish(step)


if __name__ == "__main__":
    train(parse(Args, TUNED))
