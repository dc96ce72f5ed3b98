"""Multi-agent PPO (MAPPO): ppo.py with one policy for all agents and a critic that sees the state.

Yu, Velu, Vinitsky, Gao, Wang, Bayen, Wu 2022, arXiv:2103.01955. Agents i = 1 … A share the weights
and are told apart by their number; the policy sees what its agent sees, the critic everything:

    π_θ(a^i | o^i, i)      V_φ(s, i)

    L(θ, φ) = − E_i[ min( ρ^i Â^i , clip(ρ^i, 1−ε, 1+ε) Â^i ) ]
              + c_V ½ E_i[ (V(s, i) − R^i)² ] − c_H E_i[ H(π(·|o^i, i)) ]

    python algos/mappo.py --env SpeakerListener               discrete actions
    python algos/mappo.py --env SpreadContinuous              continuous actions (Box)
    python algos/mappo.py --no-centralized-value              IPPO (arXiv:2011.09533): V(o^i, i)

Evaluation prints the sum of the rewards over agents and steps, and beside it what simple
policies have there.

What differs from ppo.py, each where it stands:
- `collect`, `prepare`: an axis for the agents, (T, N, A, ...); an env's A agents stay together in a
  minibatch, and a minibatch holds the whole rollout.
- `Agent`: the agent's number beside each observation; a state for the critic; actions that an agent
  does not have, or cannot take now, get no probability.
- `prepare`: every agent is paid what all earn together (`--team-reward`), since that is what they
  are to maximise.
- `ValueNormalizer` in place of the reward scaler: the critic learns returns with mean 0 and
  variance 1, and is read in the rewards' own units.
- `masked_mean`: what an agent does after its death counts for nothing; its value is learnt on, for
  what comes then is part of what its last actions are worth.
- The entropy bonus is large at first, since a speaker who settles early may give two goals one
  word, and zero in the end, since the greedy policy is the one that is evaluated.
"""

import math
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
    var_mean_over_learners,
)


@dataclass
class Args(RunArgs):
    """MAPPO on any environment of vec_envs with several agents."""

    env: str = "Spread"
    """environment: a name of vec_envs (Spread, SpeakerListener), or pettingzoo:package.module"""
    total_steps: int = 2_000_000
    horizon: int = 25
    """steps of each environment in a rollout"""
    learning_rate: float = 1e-3
    """of Adam, for actor and critic"""
    learning_rate_schedule: Literal["anneal", "adaptive", "constant"] = "anneal"
    """anneal: linearly to zero; adaptive: by the KL divergence towards --target-kl"""
    target_kl: float = 0.01
    """what adaptive steers to: the divergence from the policy that collected the rollout"""
    epochs: int = 10
    """passes over each rollout"""
    minibatch_size: int = 720_720
    """steps, of all agents, of one gradient step (more than a rollout has: one minibatch)"""
    centralized_value: bool = True
    """the critic sees the state; else each agent's own observation (IPPO)"""
    team_reward: bool = True
    """pay every agent the sum of all rewards; else its own"""
    discount: float = 0.9
    """γ: an episode of 25 steps that is cut off, not over, has values of 1 / (1 − γ) rewards"""
    gae_lambda: float = 0.95
    """λ of the advantage estimator: 0 trusts the critic, 1 the returns"""
    clip: float = 0.2
    """ε: how far the probability ratio may leave 1 before its gradient stops"""
    clip_value: bool = False
    """also clip the change of the value"""
    value_coef: float = 0.5
    """c_V, weight of the value loss"""
    entropy_coef: float = 0.03
    """c_H, weight of the entropy bonus, annealed linearly to zero"""
    max_grad_norm: float = 0.5
    """gradients longer than this are shortened to it"""
    hidden_size: int = 64
    """width of the two hidden layers of actor and critic"""
    initial_log_std: float = 0.0
    """logarithm of the first standard deviation, in units of half the action range"""


LIMITS = {
    **dict.fromkeys(("horizon", "minibatch_size"), (2, None)),
    **dict.fromkeys(("epochs", "hidden_size"), (1, None)),
    **dict.fromkeys(("discount", "gae_lambda"), (0, 1)),
    **dict.fromkeys(("target_kl", "max_grad_norm"), (1e-9, None)),
    "initial_log_std": (-10, 10),
}

# What differs by environment, as in the tables of papers; a flag on the command line wins.
TUNED = {"Spread": {"total_steps": 3_000_000}, "SpreadContinuous": {"total_steps": 3_000_000}}


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


class ValueNormalizer(Normalizer):
    """Returns with mean 0 and variance 1, for the critic to learn; `real` is the way back."""

    def forward(self, returns: Tensor) -> Tensor:  # (...)
        return (returns - self.mean) * torch.rsqrt(self.var + 1e-8)

    def real(self, value: Tensor) -> Tensor:
        return self.mean + value * (self.var + 1e-8).sqrt()


def mlp(inputs: int, hidden: int, outputs: int, last_gain: float) -> nn.Sequential:
    """inputs → hidden → hidden → outputs, tanh, orthogonal weights."""
    layers = [nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)]
    for layer, gain in zip(layers, (math.sqrt(2), math.sqrt(2), last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class Agent(nn.Module):
    """Actor and critic. forward: observations (N, A, obs_dim) → the env's actions, no noise.

    Continuous: a Gaussian around actor(o, i) in units where the action range is [−1, 1]; what
    leaves the range is clipped on its way to the env only. Discrete: actor(o, i) are logits.
    """

    def __init__(self, envs: vec_envs.VecEnv, args: Args):
        super().__init__()
        agents, obs_dim = envs.num_agents, envs.single_observation_space.shape[0]
        action_space = envs.single_action_space
        self.discrete = isinstance(action_space, gymnasium.spaces.Discrete)
        outputs = int(action_space.n) if self.discrete else action_space.shape[0]
        self.centralized_value = args.centralized_value
        self.available_in_obs = envs.available_in_obs
        self.normalizer = Normalizer(agents * obs_dim)  # agents that differ have each their own
        self.state_normalizer = Normalizer(envs.state_dim)
        self.value_normalizer = ValueNormalizer(1)
        self.actor = mlp(obs_dim + agents, args.hidden_size, outputs, last_gain=0.01)
        seen = envs.state_dim if args.centralized_value else obs_dim
        self.critic = mlp(seen + agents, args.hidden_size, 1, last_gain=1.0)
        self.register_buffer("number", torch.eye(agents))
        self.register_buffer("action_mask", envs.action_mask.clone())  # (A, outputs)
        self.register_buffer("entropy_coef", torch.tensor(args.entropy_coef))
        if not self.discrete:
            self.log_std = nn.Parameter(torch.full((agents, outputs), args.initial_log_std))
            low, high = torch.tensor(action_space.low), torch.tensor(action_space.high)
            self.register_buffer("action_center", (high + low) / 2)
            self.register_buffer("action_scale", (high - low) / 2)

    def forward(self, obs: Tensor) -> Tensor:
        output = self.policy(self.normalize(obs), self.available(obs))
        return output.argmax(-1) if self.discrete else self.to_env(output)

    def to_env(self, action: Tensor) -> Tensor:
        if self.discrete:
            return action
        return self.action_center + self.action_scale * action.clamp(-1, 1)

    def normalize(self, obs: Tensor) -> Tensor:
        return self.normalizer(obs.flatten(-2)).view_as(obs)

    def available(self, obs: Tensor) -> Tensor:
        """The actions that there are, or entries of an action, (..., A, outputs) bool."""
        mask = self.action_mask.expand(*obs.shape[:-1], -1)
        return mask & (obs[..., -mask.shape[-1] :] > 0) if self.available_in_obs else mask

    def numbered(self, x: Tensor) -> Tensor:
        """The agent's number, one-hot, beside what it sees -> (..., A, size + A)."""
        return torch.cat((x, self.number.expand(*x.shape[:-1], -1)), -1)

    def policy(self, x: Tensor, available: Tensor) -> Tensor:
        """Logits, or the mean of the Gaussian, (..., A, outputs) for normalised observations x."""
        output = self.actor(self.numbered(x))
        return output.masked_fill(~available, -1e9 if self.discrete else 0.0)

    def sample(self, obs: Tensor) -> Tensor:
        available = self.available(obs)
        output = self.policy(self.normalize(obs), available)
        if self.discrete:  # argmax of logits plus Gumbel noise is a draw from the softmax
            return (output - torch.empty_like(output).exponential_().log()).argmax(-1)
        return output + self.log_std.exp() * torch.randn_like(output) * available

    def log_prob_entropy(self, x: Tensor, action: Tensor, available: Tensor):
        """log π(a|o,i) and the entropy of π(·|o,i), each (..., A), for normalised x."""
        output = self.policy(x, available)
        if self.discrete:
            log_probs = output.log_softmax(-1)
            log_prob = log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
            return log_prob, -(log_probs.exp() * log_probs).sum(-1)
        log_std = self.log_std
        z = (action - output) * (-log_std).exp()  # 0 where an agent has no such entry
        normalization = ((log_std + 0.5 * math.log(2 * math.pi)) * available).sum(-1)
        log_prob = -0.5 * z.square().sum(-1) - normalization
        return log_prob, normalization + 0.5 * available.sum(-1)

    def critic_input(self, obs: Tensor, state: Tensor) -> Tensor:
        """What V sees, normalised: (..., A, obs_dim), or the state for each agent (..., A, S)."""
        if not self.centralized_value:
            return self.normalize(obs)
        return self.state_normalizer(state).unsqueeze(-2).expand(*obs.shape[:-1], -1)

    def value(self, x: Tensor) -> Tensor:  # (..., A, size) -> (..., A)
        return self.critic(self.numbered(x)).squeeze(-1)


@torch.no_grad()
def collect(agent: Agent, envs: vec_envs.VecEnv, rollout: dict[str, Tensor]) -> None:
    """T steps of the present policy in every env."""
    for t in range(len(rollout["obs"])):
        obs = envs.obs
        action = agent.sample(obs)
        rollout["obs"][t] = obs
        rollout["state"][t] = envs.state
        rollout["alive"][t] = envs.alive
        rollout["action"][t] = action
        _, reward, terminated, truncated, info = envs.step(agent.to_env(action))
        rollout["reward"][t] = reward
        rollout["next_obs"][t] = info["final_obs"]
        rollout["next_state"][t] = info["final_state"]
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


def masked_mean(x: Tensor, alive: Tensor) -> Tensor:
    """The mean of x over the agents that live (1 or 0), both (B, A); a learner's part."""
    return (x * alive).sum() / mean_over_learners(alive.sum()).clamp(min=1)


def policy_loss(log_ratio: Tensor, advantage: Tensor, alive: Tensor, clip: float) -> Tensor:
    """− E[ min( ρ Â , clip(ρ, 1−ε, 1+ε) Â ) ]"""
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return -masked_mean(torch.minimum(ratio * advantage, clipped * advantage), alive)


def value_loss(value: Tensor, old_value: Tensor, returns: Tensor, args: Args) -> Tensor:
    """½ E[ (V − R)² ], or the larger of that and the same with V within ε of what it was."""
    squared_error = (value - returns).square()
    if args.clip_value:
        clipped = old_value + (value - old_value).clamp(-args.clip, args.clip)
        squared_error = torch.maximum(squared_error, (clipped - returns).square())
    return 0.5 * squared_error.mean()


@torch.no_grad()
def prepare(agent: Agent, rollout: dict[str, Tensor], args: Args) -> dict[str, Tensor]:
    """What the epochs need of each step, (T·N, A, ...), computed once by the old policy."""
    raw, action, reward = rollout["obs"], rollout["action"], rollout["reward"]
    obs, available = agent.normalize(raw), agent.available(raw)
    critic_input = agent.critic_input(raw, rollout["state"])
    next_input = agent.critic_input(rollout["next_obs"], rollout["next_state"])
    real = agent.value_normalizer.real
    value, next_value = real(agent.value(critic_input)), real(agent.value(next_input))
    if args.team_reward:
        reward = reward.sum(-1, keepdim=True)  # (T, N, 1): every agent's
    # An episode ends for all its agents.
    terminated, done = (rollout[name].unsqueeze(-1) for name in ("terminated", "done"))
    advantage = gae(reward, value, next_value, terminated, done, args)
    returns = advantage + value
    agent.value_normalizer.update(returns.unsqueeze(-1))
    batch = {
        "obs": obs,
        "critic_input": critic_input,
        "action": action,
        "available": available,
        "alive": rollout["alive"],
        "log_prob": agent.log_prob_entropy(obs, action, available)[0],
        "value": agent.value_normalizer(value),
        "advantage": advantage,
        "returns": agent.value_normalizer(returns),
    }
    return {name: tensor.flatten(0, 1) for name, tensor in batch.items()}


def minibatch_loss(agent: Agent, batch: dict[str, Tensor], args: Args) -> tuple[Tensor, dict]:
    """The loss of one minibatch, and what to log of it."""
    alive = batch["alive"]
    log_prob, entropy = agent.log_prob_entropy(batch["obs"], batch["action"], batch["available"])
    log_ratio = log_prob - batch["log_prob"]
    advantage = batch["advantage"]
    advantage = advantage - mean_over_learners(masked_mean(advantage, alive))
    variance = mean_over_learners(masked_mean(advantage.square(), alive))
    advantage = advantage / (variance.sqrt() + 1e-8)
    value = agent.value(batch["critic_input"])
    losses = {
        "policy": policy_loss(log_ratio, advantage, alive, args.clip),
        "value": value_loss(value, batch["value"], batch["returns"], args),
        "entropy": masked_mean(entropy, alive),
    }
    total = losses["policy"] + args.value_coef * losses["value"]
    total = total - agent.entropy_coef * losses["entropy"]
    with torch.no_grad():  # Schulman's estimator of the KL divergence, never negative
        losses["kl"] = masked_mean(log_ratio.exp() - 1 - log_ratio, alive)
    return total, losses


def update(agent: Agent, optimizer, rollout, loss_gradient, args: Args) -> dict[str, Tensor]:
    """Some epochs of minibatch gradient steps -> mean of each logged quantity."""
    batch = prepare(agent, rollout, args)
    size, device = len(batch["obs"]), batch["obs"].device
    logged = []
    for _ in range(args.epochs):
        for index in torch.randperm(size, device=device).split(args.minibatch_size):
            if len(index) < 2:  # as in ppo.py
                continue
            minibatch = {name: tensor[index] for name, tensor in batch.items()}
            gradient, _, losses = loss_gradient(agent, minibatch, args)
            losses["gradient_norm"] = gradient_step(gradient, optimizer, args.max_grad_norm)
            logged.append(losses)
            if args.learning_rate_schedule == "adaptive":
                adapt_learning_rate(optimizer, mean_over_learners(losses["kl"]), args.target_kl)
    agent.normalizer.update(rollout["obs"].flatten(-2))  # last, so that all saw one normaliser
    agent.state_normalizer.update(rollout["state"])
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
    workers = Workers(run, collect, multi_agent=True)
    agent = Agent(workers.envs, args).to(run.device)
    weights = flatten(agent)  # all parameters, now views of one vector
    learning_rate = torch.tensor(args.learning_rate, device=run.device)
    optimizer = torch.optim.Adam([weights], learning_rate, eps=1e-5, fused=True)
    state, agents = (workers.envs.state_dim,), (workers.envs.num_agents,)
    workers.start(agent, args.horizon, state=state, next_state=state, alive=agents)
    loss_gradient = run.gradient(minibatch_loss, agent)  # → ∂ loss / ∂ weights, loss, losses
    step = run.start(agent=agent, optimizer=optimizer, workers=workers)

    while step < args.total_steps:
        left = 1 - step / args.total_steps
        if args.learning_rate_schedule == "anneal":
            optimizer.param_groups[0]["lr"].fill_(args.learning_rate * left)
        agent.entropy_coef.fill_(args.entropy_coef * left)
        rollout = workers.collect()
        step += args.horizon * args.num_envs * run.learners
        losses = update(agent, optimizer, rollout, loss_gradient, args)

        run.log_episodes(step, rollout)
        run.log(step, losses, learning_rate=optimizer.param_groups[0]["lr"])
        run.evaluate(step)
        run.checkpoint(step)
    return run.finish(step)


if __name__ == "__main__":
    train(parse(Args, TUNED))
