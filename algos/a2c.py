"""Advantage actor-critic (A2C): one step of the policy gradient on each short rollout.

Mnih, Badia, Mirza, Graves, Lillicrap, Harley, Silver, Kavukcuoglu 2016, arXiv:1602.01783, in its
synchronous form. With the advantage Â_t and the return R_t = Â_t + V(s_t), both without a gradient,

    L(θ) = − E[ Â_t log π_θ(a_t|s_t) ]
           + c_V ½ E[ (V(s_t) − R_t)² ] − c_H E[ H(π(·|s_t)) ]

    python algos/a2c.py --env CartPole       discrete actions
    python algos/a2c.py --env HalfCheetah    continuous actions (Box)

A rollout is used only once (see ppo.py). What differs from the paper (its values in brackets):
- all environments step together, and one gradient is computed from all (paper: many threads);
- `gae` computes Â_t; the paper's n-step return is the case λ = 1;
- by running statistics, observations are normalised and rewards are divided by the standard
  deviation of the return; both are clipped to ±10; the statistics are saved with the agent, frozen
  in evaluation and fixed within an iteration;
- a truncated episode bootstraps from the value of its true last observation (`gae`);
- orthogonal initial weights, the actor's last layer near zero; σ does not depend on the state;
- RMSProp is torch's, with ε outside of the root (paper: inside);
- actor and critic share no layer (as in the paper's MuJoCo tasks); the norm of the gradient is
  clipped; two tanh layers of 64 (there 200 ReLU units, then an LSTM); c_H is 0 (1e-4; Atari 0.01).
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
    RewardScaler,
    Run,
    RunArgs,
    Workers,
    average_gradients,
    parse,
)


@dataclass
class Args(RunArgs):
    """A2C on any environment."""

    env: str = "CartPole"
    num_envs: int = 8
    num_steps: int = 5
    """steps of each environment in a rollout"""
    learning_rate: float = 1e-3
    """RMSProp's learning rate for actor and critic, annealed linearly to zero"""
    gamma: float = 0.99
    """γ, the discount factor"""
    gae_lambda: float = 0.95
    """λ of the advantage estimator: 0 relies on the critic, 1 on the sampled returns"""
    value_coef: float = 0.5
    """c_V, weight of the value loss"""
    entropy_coef: float = 0.0
    """c_H, weight of the entropy bonus"""
    max_grad_norm: float = 0.5
    """maximum norm of the gradient; a larger gradient is scaled down to it"""
    hidden_size: int = 64
    """width of the two hidden layers of actor and critic"""
    initial_log_std: float = 0.0
    """log of the initial standard deviation, which is in units of half the action range"""


LIMITS = {"initial_log_std": (-10, 10)}

# What differs by environment; a flag on the command line wins.
TUNED = {
    "CartPole": dict(total_steps=50_000, eval_every=10_000, gamma=0.995, gae_lambda=0.9),
    "Acrobot": dict(total_steps=100_000, eval_every=20_000, num_envs=16),
}  # fmt: skip


def mlp(inputs: int, hidden: int, outputs: int, last_gain: float) -> nn.Sequential:
    """inputs → hidden → hidden → outputs, tanh, orthogonal weights."""
    layers = [nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)]
    for layer, gain in zip(layers, (2**0.5, 2**0.5, last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class Agent(nn.Module):
    """Actor and critic. forward: observation (N, obs_dim) → the environment's action, no noise.

    Continuous: a Gaussian with mean actor(s), in units in which the action range is [−1, 1]; only
    what the environment gets is clipped to this range. Discrete: actor(s) are logits.
    """

    def __init__(self, observation_space, action_space, args: Args):
        super().__init__()
        obs_dim = observation_space.shape[0]
        self.discrete = isinstance(action_space, gymnasium.spaces.Discrete)
        outputs = int(action_space.n) if self.discrete else action_space.shape[0]
        self.normalizer = Normalizer(obs_dim)
        self.reward_scaler = RewardScaler(args.num_envs, args.gamma)
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

    def policy(self, x: Tensor) -> Distribution:
        """π(·|s) for normalised observations x (..., obs_dim)."""
        output = self.actor(x)
        if self.discrete:
            return Categorical(logits=output)
        normal = Normal(output, self.log_std.exp().expand_as(output))
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
    """What the loss needs of each transition, (T·N, ...)."""
    obs = agent.normalizer(rollout["obs"])
    value, next_value = agent.value(obs), agent.value(agent.normalizer(rollout["next_obs"]))
    reward = agent.reward_scaler(rollout["reward"], rollout["done"])  # updates its statistics first
    advantage = gae(reward, value, next_value, rollout["terminated"], rollout["done"], args)
    batch = {
        "obs": obs,
        "action": rollout["action"],
        "advantage": advantage,
        "returns": advantage + value,
    }
    return {name: tensor.flatten(0, 1) for name, tensor in batch.items()}


def policy_loss(log_prob: Tensor, advantage: Tensor) -> Tensor:
    """− E[ Â log π(a|s) ], whose gradient is minus the policy gradient, E[ Â ∇ log π(a|s) ].

    Â is a constant in it: `prepare` has computed it without a gradient.
    """
    return -(log_prob * advantage).mean()


def value_loss(value: Tensor, returns: Tensor) -> Tensor:
    """½ E[ (V − R)² ]"""
    return 0.5 * (value - returns).square().mean()


def a2c_loss(agent: Agent, batch: dict[str, Tensor], args: Args) -> tuple[Tensor, dict]:
    """L(θ) of the rollout, and what to log of it."""
    policy = agent.policy(batch["obs"])
    losses = {
        "policy": policy_loss(policy.log_prob(batch["action"]), batch["advantage"]),
        "value": value_loss(agent.value(batch["obs"]), batch["returns"]),
        "entropy": policy.entropy().mean(),
    }
    loss = losses["policy"] + args.value_coef * losses["value"]
    loss = loss - args.entropy_coef * losses["entropy"]
    return loss, losses


def update(agent: Agent, optimizer, rollout: dict, args: Args) -> dict[str, Tensor]:
    """One gradient step on all of a rollout -> what to log."""
    batch = prepare(agent, rollout, args)
    # A second step on this rollout, by a policy that has changed, would need ppo.py's ratio.
    loss, losses = a2c_loss(agent, batch, args)
    optimizer.zero_grad()
    loss.backward()
    average_gradients(agent)
    losses["grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    agent.normalizer.update(rollout["obs"])  # last, so that all of the above saw one normaliser
    unexplained = batch["advantage"].var(correction=0)  # R − V = Â
    unexplained = unexplained / (batch["returns"].var(correction=0) + 1e-8)
    return losses | {"explained_variance": 1 - unexplained}


def train(args: Args) -> Result:
    run = Run(args, __file__, LIMITS)
    args = run.args
    workers = Workers(run, collect)
    agent = Agent(workers.observation_space, workers.action_space, args).to(run.device)
    # RMSProp, nearly the paper's: with Adam a good policy did not stay good on CartPole.
    optimizer = torch.optim.RMSprop(agent.parameters(), args.learning_rate, eps=1e-5)
    workers.start(agent, args.num_steps)  # resets the environments, makes `collect`'s `rollout`
    step = run.start(agent=agent, optimizer=optimizer, workers=workers)

    while step < args.total_steps:
        remaining = 1 - step / args.total_steps
        optimizer.param_groups[0]["lr"] = args.learning_rate * remaining
        rollout = workers.collect()
        step += args.num_steps * args.num_envs * run.world_size
        losses = update(agent, optimizer, rollout, args)

        run.log_episodes(step, rollout)
        run.log(step, losses, learning_rate=optimizer.param_groups[0]["lr"])
        run.evaluate(step)
        run.checkpoint(step)
    return run.finish(step)


if __name__ == "__main__":
    train(parse(Args, TUNED))
