"""Proximal policy optimisation (PPO): a2c.py plus epochs on each rollout, with a clipped ratio.

Schulman, Wolski, Dhariwal, Radford, Klimov 2017, arXiv:1707.06347. With the probability ratio
ρ_t(θ) = π_θ(a_t|s_t) / π_old(a_t|s_t), the advantage Â_t and the return R_t = Â_t + V_old(s_t),

    L(θ) = − E[ min( ρ_t Â_t , clip(ρ_t, 1−ε, 1+ε) Â_t ) ]
           + c_V ½ E[ (V(s_t) − R_t)² ] − c_H E[ H(π(·|s_t)) ]

    python algos/ppo.py --env Ant            continuous actions (Box)
    python algos/ppo.py --env CartPole       discrete actions

What differs from a2c.py: `policy_loss` has the clipped ratio; `update` makes several epochs of
minibatch steps by Adam; `adapt_learning_rate` keeps the KL divergence near --target-kl, if given
(as in the paper's Roboschool runs); else the rate is annealed (Atari runs). Not in the paper:
- by running statistics, observations are normalised and rewards are divided by the standard
  deviation of the return; both are clipped to ±10; the statistics are saved with the agent, frozen
  in evaluation and fixed within an iteration, so that π_old and π_θ see the same numbers;
- advantages are normalised in each minibatch, gradients are clipped to a norm;
- a truncated episode bootstraps from the value of its true last observation (`gae`);
- orthogonal initial weights, the actor's last layer near zero; Adam's ε is 1e-5 (default 1e-8).
The paper's MuJoCo runs: 1 environment for 2048 steps (here 64 for 64 steps), minibatches of 64
(here 512), learning rate 3e-4 (here 5e-4).
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
    mean_over_learners,
    parse,
    std_mean_over_learners,
)


@dataclass
class Args(RunArgs):
    """PPO on any environment."""

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


LIMITS = {"num_steps": (2, None), "minibatch_size": (2, None), "initial_log_std": (-10, 10)}

# What differs by environment; a flag on the command line wins.
TUNED = {
    "CartPole": dict(total_steps=49_152, eval_every=10_000, learning_rate=1e-3, gae_lambda=0.98),
    "Acrobot": dict(total_steps=98_304, eval_every=20_000, num_envs=32, minibatch_size=256,
                    learning_rate=1e-3, gamma=0.98),
    "Ant": dict(total_steps=2_500_000, num_steps=32, epochs=4, minibatch_size=1024,
                learning_rate=1e-3, initial_log_std=-1.0),
    "Humanoid": dict(total_steps=2_500_000, epochs=2, minibatch_size=1024, learning_rate=3e-3),
    "HalfCheetah": dict(num_steps=32, minibatch_size=128, learning_rate=3e-4, initial_log_std=-1.0,
                        gamma=0.98, gae_lambda=0.92),
    "Hopper": dict(target_kl=0.01),
    "Walker2d": dict(num_steps=32),
    "Swimmer": dict(num_steps=256, gamma=0.9999, gae_lambda=0.98),
    "Pendulum": dict(minibatch_size=1024, learning_rate=1e-3, gamma=0.95),
    "LunarLanderContinuous-v3": dict(gamma=0.999, gae_lambda=0.98),
    "BipedalWalker-v3": dict(total_steps=2_500_000, num_steps=256, minibatch_size=2048,
                             learning_rate=7e-4, initial_log_std=-0.5),
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


def value_loss(value: Tensor, returns: Tensor) -> Tensor:
    """½ E[ (V − R)² ]"""
    return 0.5 * (value - returns).square().mean()


def ppo_loss(agent: Agent, batch: dict[str, Tensor], args: Args) -> tuple[Tensor, dict]:
    """L(θ) of one minibatch, and what to log of it."""
    policy = agent.policy(batch["obs"])
    log_ratio = policy.log_prob(batch["action"]) - batch["log_prob"]
    std, mean = std_mean_over_learners(batch["advantage"])
    advantage = (batch["advantage"] - mean) / (std + 1e-8)
    losses = {
        "policy": policy_loss(log_ratio, advantage, args.clip),
        "value": value_loss(agent.value(batch["obs"]), batch["returns"]),
        "entropy": policy.entropy().mean(),
    }
    loss = losses["policy"] + args.value_coef * losses["value"]
    loss = loss - args.entropy_coef * losses["entropy"]
    with torch.no_grad():
        ratio = log_ratio.exp()
        losses["approx_kl"] = (ratio - 1 - log_ratio).mean()  # ≈ KL(π_old‖π), ≥ 0
        losses["clip_fraction"] = ((ratio - 1).abs() > args.clip).float().mean()
    return loss, losses


def gradient_step(agent: Agent, optimizer, batch: dict[str, Tensor], args: Args) -> dict:
    """One step on a minibatch -> what to log."""
    loss, losses = ppo_loss(agent, batch, args)
    optimizer.zero_grad()
    loss.backward()
    average_gradients(agent)
    losses["grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    return losses


def update(agent: Agent, optimizer, rollout: dict, learn, args: Args) -> dict[str, Tensor]:
    """Some epochs of minibatch gradient steps -> mean of each logged quantity."""
    batch = prepare(agent, rollout, args)
    size, device = len(batch["obs"]), batch["obs"].device
    logged = []
    for _ in range(args.epochs):
        for index in torch.randperm(size, device=device).split(args.minibatch_size):
            if len(index) < 2:  # a single advantage cannot be normalised
                continue
            minibatch = {name: x[index] for name, x in batch.items()}
            losses = learn(agent, optimizer, minibatch, args)  # `gradient_step`, perhaps compiled
            logged.append(torch.stack([*losses.values()]).detach())  # copy: CUDA graphs reuse them
        if args.target_kl > 0:  # by the KL divergence at the epoch's last minibatch
            adapt_learning_rate(optimizer, mean_over_learners(losses["approx_kl"]), args)
    agent.normalizer.update(rollout["obs"])  # last, so that all of the above saw one normaliser
    unexplained = batch["advantage"].var(correction=0)  # R − V_old = Â
    unexplained = unexplained / (batch["returns"].var(correction=0) + 1e-8)
    means = dict(zip(losses, torch.stack(logged).mean(0), strict=True))
    return means | {"explained_variance": 1 - unexplained}


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
    workers = Workers(run, collect)
    agent = Agent(workers.observation_space, workers.action_space, args).to(run.device)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)
    learn = run.compile(gradient_step)  # compiled in long runs (--compile)
    workers.start(agent, args.num_steps)  # resets the environments, makes `collect`'s `rollout`
    step = run.start(agent=agent, optimizer=optimizer, workers=workers)

    while step < args.total_steps:
        remaining = 1 - step / args.total_steps
        if args.target_kl == 0:  # else `update` adapts it
            optimizer.param_groups[0]["lr"] = args.learning_rate * remaining
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
