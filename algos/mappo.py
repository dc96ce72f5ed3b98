"""Multi-agent PPO (MAPPO): ppo.py with one policy for all agents and a critic that sees the state.

Yu, Velu, Vinitsky, Gao, Wang, Bayen, Wu 2022, arXiv:2103.01955. Agents i = 1 … A share networks,
which get i as a one-hot vector; each has its own σ. A policy sees o^i, the critic sees the state s:

    π_θ(a^i | o^i, i)      V_θ(s, i)
    L(θ) = − E_i[ min( ρ^i Â^i , clip(ρ^i, 1−ε, 1+ε) Â^i ) ]
           + c_V ½ E_i[ (V(s, i) − R^i)² ] − c_H E_i[ H(π(·|o^i, i)) ]

    python algos/mappo.py --env SpeakerListener          discrete actions
    python algos/mappo.py --env SpreadContinuous         continuous actions (Box)
    python algos/mappo.py --no-centralized-value         IPPO (arXiv:2011.09533): V(o^i, i)

What differs from ppo.py: an axis for the agents, (T, N, A, ...); each agent gets the sum of all
rewards; the critic learns normalised returns instead of returns of normalised rewards; one step per
epoch, on the whole rollout, as the paper recommends; dead agents' actions are not in policy losses.
What differs from the paper: no recurrent networks, no LayerNorm (observations and state are
normalised by running statistics); a truncated episode bootstraps from its true last state; no Huber
loss, value clip or PopArt (returns are normalised, the critic's last layer is not rescaled); no
death masking (dead agents have a value: they get credit for what their team earns later); learning
rate and c_H are annealed, c_H from 0.03 (0.01; with less, a speaker may use one word for two
goals); γ is 0.9 (0.99), the rate 1e-3 (7e-4), the joint gradient norm ≤ 0.5 (10 per network).
"""

from dataclasses import dataclass

import gymnasium
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

import vec_envs
from algos.worker_learner import (
    Normalizer,
    Result,
    Run,
    RunArgs,
    Workers,
    average_gradients,
    mean_over_learners,
    parse,
)


@dataclass
class Args(RunArgs):
    """MAPPO on any environment with several agents."""

    env: str = "Spread"
    total_steps: int = 2_000_000
    num_steps: int = 25
    """steps of each environment in a rollout"""
    learning_rate: float = 1e-3
    """Adam's learning rate for actor and critic, annealed linearly to zero"""
    epochs: int = 10
    """passes over each rollout"""
    centralized_value: bool = True
    """the critic sees the state; otherwise each agent's own observation (IPPO)"""
    gamma: float = 0.9
    """γ, the discount factor: the horizon is about 1 / (1 − γ) steps"""
    gae_lambda: float = 0.95
    """λ of the advantage estimator: 0 relies on the critic, 1 on the sampled returns"""
    clip: float = 0.2
    """ε: the probability ratio is clipped to the range from 1 − ε to 1 + ε"""
    value_coef: float = 0.5
    """c_V, weight of the value loss"""
    entropy_coef: float = 0.03
    """c_H, weight of the entropy bonus, annealed linearly to zero"""
    max_grad_norm: float = 0.5
    """maximum norm of the gradient; a larger gradient is scaled down to it"""
    hidden_size: int = 64
    """width of the two hidden layers of actor and critic"""


# What differs by environment; a flag on the command line wins.
TUNED = {"Spread": dict(total_steps=3_000_000), "SpreadContinuous": dict(total_steps=3_000_000)}


def mlp(inputs: int, hidden: int, outputs: int, last_gain: float) -> nn.Sequential:
    """inputs → hidden → hidden → outputs, tanh, orthogonal weights."""
    layers = [nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)]
    for layer, gain in zip(layers, (2**0.5, 2**0.5, last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class Agent(nn.Module):
    """Actor and critic. forward: observations (N, A, obs_dim) → the env's actions, no noise.

    Continuous: a Gaussian with mean actor(o, i), in units in which the action range is [−1, 1];
    only what the environment gets is clipped to this range. Discrete: actor(o, i) are logits.
    """

    def __init__(self, envs: vec_envs.MultiAgentVecEnv, args: Args):
        super().__init__()
        agents, obs_dim = envs.num_agents, envs.single_observation_space.shape[0]
        action_space = envs.single_action_space
        self.discrete = isinstance(action_space, gymnasium.spaces.Discrete)
        outputs = int(action_space.n) if self.discrete else action_space.shape[0]
        self.centralized_value = args.centralized_value
        self.available_in_obs = envs.available_in_obs
        self.normalizer = Normalizer(agents * obs_dim, several=True)  # counts per agent: some leave
        self.state_normalizer = Normalizer(envs.state_dim)
        self.return_statistics = Normalizer(1)
        self.actor = mlp(obs_dim + agents, args.hidden_size, outputs, last_gain=0.01)
        critic_inputs = envs.state_dim if args.centralized_value else obs_dim
        self.critic = mlp(critic_inputs + agents, args.hidden_size, 1, last_gain=1.0)
        self.register_buffer("agent_id", torch.eye(agents))
        self.register_buffer("action_mask", envs.action_mask.clone())  # (A, outputs)
        self.register_buffer("entropy_coef", torch.tensor(args.entropy_coef))
        if not self.discrete:
            self.log_std = nn.Parameter(torch.zeros(agents, outputs))
            low, high = envs.action_low, envs.action_high  # (A, act_dim)
            self.register_buffer("action_center", (high + low) / 2)
            self.register_buffer("action_scale", (high - low) / 2)

    def forward(self, obs: Tensor) -> Tensor:
        return self.to_env(self.policy(obs).mode)

    def to_env(self, action: Tensor) -> Tensor:
        if self.discrete:
            return action
        return self.action_center + self.action_scale * action.clamp(-1, 1)

    def normalize(self, obs: Tensor) -> Tensor:
        return self.normalizer(obs.flatten(-2)).view_as(obs)

    def with_id(self, x: Tensor) -> Tensor:  # (..., A, size) -> (..., A, size + A)
        return torch.cat((x, self.agent_id.expand(*x.shape[:-1], -1)), -1)

    def available(self, obs: Tensor) -> Tensor:
        """Available actions, or entries of them (..., A, outputs) bool; some envs' obs end so."""
        mask = self.action_mask.expand(*obs.shape[:-1], -1)
        allowed = obs[..., -mask.shape[-1] :] > 0 if self.available_in_obs else mask
        return mask & (allowed | ~allowed.any(-1, keepdim=True))  # all if it has left (no effect)

    def policy(self, obs: Tensor) -> Distribution:
        """π(·|o, i) for observations (..., A, obs_dim)."""
        output, missing = self.actor(self.with_id(self.normalize(obs))), ~self.available(obs)
        if self.discrete:
            return Categorical(logits=output.masked_fill(missing, -1e9))
        std = self.log_std.exp().expand_as(output).masked_fill(missing, 1)
        # N(0, 1) where an agent does not have such an entry: it has no effect on ρ.
        normal = Normal(output.masked_fill(missing, 0), std)
        return Independent(normal, 1)

    def value(self, obs: Tensor, state: Tensor) -> Tensor:
        """V(s, i) (..., A), for states (..., state_dim); the critic's output is normalised V."""
        if self.centralized_value:
            x = self.state_normalizer(state).unsqueeze(-2).expand(*obs.shape[:-1], -1)
        else:
            x = self.normalize(obs)
        mean, std = self.return_statistics.mean, (self.return_statistics.var + 1e-8).sqrt()
        return mean + std * self.critic(self.with_id(x)).squeeze(-1)


@torch.no_grad()
def collect(agent: Agent, envs: vec_envs.MultiAgentVecEnv, rollout: dict[str, Tensor]) -> None:
    """T steps of the present policy in every environment."""
    for t in range(len(rollout["obs"])):
        obs = envs.obs
        action = agent.policy(obs).sample()
        rollout["obs"][t] = obs
        rollout["state"][t] = envs.state
        rollout["alive"][t] = envs.alive
        rollout["action"][t] = action
        _, reward, terminated, truncated, info = envs.step(agent.to_env(action))
        rollout["reward"][t] = reward
        rollout["next_obs"][t] = info["final_obs"]  # never the first one of a new episode
        rollout["next_state"][t] = info["final_state"]
        rollout["terminated"][t] = terminated
        rollout["done"][t] = terminated | truncated
        rollout["episode_return"][t] = info["episode_return"]
        rollout["episode_length"][t] = info["episode_length"]


def gae(reward, value, next_value, terminated, done, args: Args) -> Tensor:
    """Generalised advantage estimation (Schulman 2016, arXiv:1506.02438), (T, N, A) or (T, N, 1).

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
    """What the epochs need of each step, (T·N, A, ...), computed once by the old policy."""
    value = agent.value(rollout["obs"], rollout["state"])
    next_value = agent.value(rollout["next_obs"], rollout["next_state"])
    reward = rollout["reward"].sum(-1, keepdim=True)  # (T, N, 1): each agent gets the whole sum
    # An episode ends for all its agents.
    terminated, done = rollout["terminated"].unsqueeze(-1), rollout["done"].unsqueeze(-1)
    advantage = gae(reward, value, next_value, terminated, done, args)
    returns = advantage + value
    agent.return_statistics.update(returns.unsqueeze(-1))
    log_prob = agent.policy(rollout["obs"]).log_prob(rollout["action"])
    batch = {name: rollout[name] for name in ("obs", "state", "action", "alive")}  # raw obs
    batch |= {"log_prob": log_prob, "advantage": advantage, "returns": returns}
    return {name: tensor.flatten(0, 1) for name, tensor in batch.items()}


def masked_mean(x: Tensor, alive: Tensor) -> Tensor:
    """Mean of x (B, A) over living agents; its mean over learners is that of the whole batch."""
    return (x * alive).sum() / mean_over_learners(alive.sum()).clamp(min=1)


def policy_loss(log_ratio: Tensor, advantage: Tensor, alive: Tensor, clip: float) -> Tensor:
    """− E[ min( ρ Â , clip(ρ, 1−ε, 1+ε) Â ) ]"""
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return -masked_mean(torch.minimum(ratio * advantage, clipped * advantage), alive)


def value_loss(value: Tensor, returns: Tensor) -> Tensor:
    """½ E[ (V − R)² ]"""
    return 0.5 * (value - returns).square().mean()


def mappo_loss(agent: Agent, batch: dict[str, Tensor], args: Args) -> tuple[Tensor, dict]:
    """L(θ) of the rollout, and what to log of it."""
    policy, alive = agent.policy(batch["obs"]), batch["alive"]
    log_ratio = policy.log_prob(batch["action"]) - batch["log_prob"]
    advantage = batch["advantage"] - mean_over_learners(masked_mean(batch["advantage"], alive))
    std = mean_over_learners(masked_mean(advantage.square(), alive)).sqrt()
    variance = agent.return_statistics.var.squeeze() + 1e-8  # loss / variance: of normalised V, R
    losses = {
        "policy": policy_loss(log_ratio, advantage / (std + 1e-8), alive, args.clip),
        "value": value_loss(agent.value(batch["obs"], batch["state"]), batch["returns"]) / variance,
        "entropy": masked_mean(policy.entropy(), alive),
    }
    loss = losses["policy"] + args.value_coef * losses["value"]
    loss = loss - agent.entropy_coef * losses["entropy"]
    with torch.no_grad():
        ratio = log_ratio.exp()
        losses["approx_kl"] = masked_mean(ratio - 1 - log_ratio, alive)  # ≈ KL(π_old‖π), ≥ 0
        losses["clip_fraction"] = masked_mean(((ratio - 1).abs() > args.clip).float(), alive)
    return loss, losses


def gradient_step(agent: Agent, optimizer, batch: dict[str, Tensor], args: Args) -> dict:
    """One step on all of a rollout -> what to log."""
    loss, losses = mappo_loss(agent, batch, args)
    optimizer.zero_grad()
    loss.backward()
    average_gradients(agent)
    losses["grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    return losses


def update(agent: Agent, optimizer, rollout: dict, learn, args: Args) -> dict[str, Tensor]:
    """Some epochs of one gradient step -> mean of each logged quantity."""
    batch = prepare(agent, rollout, args)
    logged = []
    for _ in range(args.epochs):  # no minibatches: an epoch is one step along the whole gradient
        losses = learn(agent, optimizer, batch, args)  # `gradient_step`, perhaps compiled
        logged.append(torch.stack([*losses.values()]).detach())  # copy: CUDA graphs reuse them
    agent.normalizer.update(rollout["obs"].flatten(-2), rollout["alive"])  # last: all saw the same
    agent.state_normalizer.update(rollout["state"])
    unexplained = batch["advantage"].var(correction=0)  # R − V_old = Â
    unexplained = unexplained / (batch["returns"].var(correction=0) + 1e-8)
    means = dict(zip(losses, torch.stack(logged).mean(0), strict=True))
    return means | {"explained_variance": 1 - unexplained}


def train(args: Args) -> Result:
    run = Run(args, __file__)
    args = run.args
    workers = Workers(run, collect, multi_agent=True)
    agent = Agent(workers.envs, args).to(run.device)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)
    learn = run.compile(gradient_step)  # compiled in long runs (--compile)
    state, agents = (workers.envs.state_dim,), (workers.envs.num_agents,)
    workers.start(agent, args.num_steps, state=state, next_state=state, alive=agents)
    step = run.start(agent=agent, optimizer=optimizer, workers=workers)

    while step < args.total_steps:
        remaining = 1 - step / args.total_steps
        optimizer.param_groups[0]["lr"] = args.learning_rate * remaining
        agent.entropy_coef.fill_(args.entropy_coef * remaining)
        rollout = workers.collect()
        step += args.num_steps * args.num_envs * run.world_size
        losses = update(agent, optimizer, rollout, learn, args)

        run.log_episodes(step, rollout)
        run.log(step, losses, learning_rate=optimizer.param_groups[0]["lr"])
        run.evaluate(step)
        run.checkpoint(step)
    return run.finish(step)


if __name__ == "__main__":
    train(parse(Args, TUNED))
