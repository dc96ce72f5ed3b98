"""Discrete soft actor-critic (SAC): sac.py for discrete actions, where expectations are exact sums.

Christodoulou 2019, arXiv:1910.07207. E over a ~ π(·|s) is a sum over all actions, and each critic
gives Q of every action at once. With α the temperature and Q̄ the slow target networks,

    y    = r + γ (1 − terminated) Σ_a π(a|s') ( min_i Q̄_i(s', a) − α log π(a|s') )
    L(Q) = Σ_i E[ ½ ( Q_i(s, a) − y )² ]
    L(π) = E[ Σ_a π(a|s) ( α log π(a|s) − min_i Q_i(s, a) ) ]
    L(α) = log α · ( E[ H(π(·|s)) ] − H̄ )            H̄, target entropy, a fraction of log |A|

    python algos/sac_discrete.py --env CartPole            an environment of vec_envs
    python algos/sac_discrete.py --env LunarLander-v3      a Gymnasium id

What differs from sac.py:
- `Agent.policy`: a categorical distribution. `collect` draws from it from the beginning.
- `critic_loss`, `actor_loss`: the sums. No gradient passes through the critics to the actor.
- `target_entropy_at`: the paper's H̄ = 0.98 log |A| explores, but keeps the policy almost random; H̄
  falls from there (Xu et al. 2021, arXiv:2112.02852, lower it as well).
What differs from the paper: this schedule; Q̄ moves a little at each update (copied every 8000);
batches of 128 (64), a buffer of 100,000 (1 M), no random steps at first (20,000), Adam's rate 1e-3
(3e-4), annealed to zero; rewards are not clipped (±1); observations are vectors, normalised by
running statistics; eight environments; L(α) has log α in place of α, which begins at 0.2; with
--exploration-length, actions are repeated, likely ones more than π says (else Acrobot's goal is
rarely found); --n-step sums n discounted rewards, no entropies; --prioritized weighs L(Q) alone.
"""

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import vec_envs
from algos.worker_learner import (
    Normalizer,
    ReplayBuffer,
    Result,
    Run,
    TransitionArgs,
    Workers,
    average_gradients,
    parse,
)


@dataclass
class Args(TransitionArgs):
    """Discrete SAC on any environment with discrete actions."""

    env: str = "CartPole"
    num_envs: int = 8
    num_steps: int = 1
    """steps of each environment between updates"""
    utd_ratio: float = 0.25
    """updates per transition collected"""
    batch_size: int = 128
    """transitions of one gradient step"""
    buffer_size: int = 100_000
    """capacity of the replay buffer, in transitions"""
    warmup_steps: int = 1000
    """steps before the first update"""
    learning_rate: float = 1e-3
    """Adam's learning rate for actor, critics and temperature, annealed linearly to zero"""
    gamma: float = 0.99
    """γ, the discount factor; `discount` in a batch is γⁿ"""
    tau: float = 0.01
    """τ: how far the target networks move at each of their updates"""
    target_entropy_ratio: float = 0.3
    """final H̄, as a fraction of log |A|, the entropy of a uniformly random action"""
    exploration_fraction: float = 0.2
    """fraction of the run during which H̄ falls from the paper's 0.98 to --target-entropy-ratio"""
    exploration_length: float = 1.0
    """L: mean number of steps between two draws of an action where π is uniform (1: each step)"""
    initial_temperature: float = 0.2
    """initial α"""
    hidden_size: int = 128
    """width of the two hidden layers of actor and critics"""


LIMITS = {"target_entropy_ratio": (0, 1), "exploration_length": (1, None)}
LIMITS["initial_temperature"] = (1e-9, None)

# What differs by environment; a flag on the command line wins.
TUNED = {
    "CartPole": dict(total_steps=50_000, eval_every=10_000, utd_ratio=1.0, learning_rate=3e-4,
                     exploration_fraction=0.5),
    "Acrobot": dict(total_steps=100_000, eval_every=20_000, n_step=3, utd_ratio=1.0,
                    hidden_size=256, tau=0.005, exploration_length=6, warmup_steps=5000,
                    exploration_fraction=0.3, initial_temperature=1.0),
    "MountainCar": dict(total_steps=120_000, eval_every=20_000),
    "LunarLander-v3": dict(total_steps=300_000, eval_every=50_000),
}  # fmt: skip


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(inputs, hidden), nn.ReLU(inplace=True)),
        *(nn.Linear(hidden, hidden), nn.ReLU(inplace=True)),
        nn.Linear(hidden, outputs),
    )


class Critics(nn.Module):
    """Two networks. forward: observation (B, ...) → Q_1(s, ·), Q_2(s, ·), each (B, num_actions)."""

    def __init__(self, obs_dim: int, num_actions: int, hidden: int):
        super().__init__()
        self.q1 = mlp(obs_dim, hidden, num_actions)
        self.q2 = mlp(obs_dim, hidden, num_actions)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        return self.q1(obs), self.q2(obs)


class Agent(nn.Module):
    """Actor, critics, temperature. forward: observation (N, obs_dim) → likeliest action (N,)."""

    def __init__(self, observation_space, action_space, args: Args):
        super().__init__()
        obs_dim, self.num_actions = observation_space.shape[0], int(action_space.n)
        self.normalizer = Normalizer(obs_dim)
        self.actor = mlp(obs_dim, args.hidden_size, self.num_actions)
        self.critics = Critics(obs_dim, self.num_actions, args.hidden_size)
        self.log_temperature = nn.Parameter(torch.tensor(math.log(args.initial_temperature)))
        self.register_buffer("target_entropy", torch.tensor(0.98))  # in units of log |A|
        self.exploration_length = args.exploration_length

    def forward(self, obs: Tensor) -> Tensor:
        return self.actor(self.normalizer(obs)).argmax(-1)

    def policy(self, obs: Tensor) -> Categorical:
        """π(·|s) for normalised observations; its `logits` are log π(a|s) of every action."""
        return Categorical(logits=self.actor(obs))


@torch.no_grad()
def collect(agent: Agent, envs: vec_envs.VecEnv, rollout: dict[str, Tensor]) -> None:
    """T steps in every environment: actions drawn from π, or the previous action again.

    The previous action is repeated with probability (1 − 1/L) π(a_{t−1}|s) / max_a π(a|s): likely
    actions are taken more often than π says; where π is uniform, a draw lasts L steps on average.
    """
    for t in range(len(rollout["obs"])):
        obs, last_action = envs.obs, rollout["action"][t - 1]  # t = 0: of the rollout before
        policy = agent.policy(agent.normalizer(obs))
        action = policy.sample()
        last_prob = policy.probs.gather(-1, last_action.unsqueeze(-1)).squeeze(-1)
        repeat_prob = last_prob / policy.probs.amax(-1) * (1 - 1 / agent.exploration_length)
        repeat = (torch.rand_like(repeat_prob) < repeat_prob) & ~rollout["done"][t - 1]
        action = torch.where(repeat, last_action, action)
        rollout["obs"][t] = obs
        rollout["action"][t] = action
        _, reward, terminated, truncated, info = envs.step(action)
        rollout["reward"][t] = reward
        rollout["next_obs"][t] = info["final_obs"]  # never the first one of a new episode
        rollout["terminated"][t] = terminated
        rollout["done"][t] = terminated | truncated
        rollout["episode_return"][t] = info["episode_return"]
        rollout["episode_length"][t] = info["episode_length"]


def target_entropy_at(step: int, args: Args) -> float:
    """H̄ / log |A|: from 0.98 linearly to its final value, and there it stays."""
    progress = min(step / max(args.exploration_fraction * args.total_steps, 1), 1)
    return 0.98 - (0.98 - args.target_entropy_ratio) * progress


def critic_loss(agent: Agent, target: Critics, batch: dict) -> tuple[Tensor, Tensor]:
    """Σ_i E[ ½ w δ_i² ] with δ_i = Q_i(s, a) − y, importance weights w; and max_i |δ_i| (B,)."""
    with torch.no_grad():
        next_obs = agent.normalizer(batch["next_obs"])
        policy = agent.policy(next_obs)
        next_value = torch.minimum(*target(next_obs))  # (B, num_actions)
        next_value = next_value - agent.log_temperature.exp() * policy.logits
        next_value = (policy.probs * next_value).sum(-1)
        y = batch["reward"] + batch["discount"] * ~batch["terminated"] * next_value
    q1, q2 = agent.critics(agent.normalizer(batch["obs"]))
    action = batch["action"].unsqueeze(-1)
    q1, q2 = q1.gather(-1, action).squeeze(-1), q2.gather(-1, action).squeeze(-1)
    delta = torch.stack((q1, q2)) - y  # δ_i, (2, B)
    return 0.5 * (batch["weight"] * delta.square().sum(0)).mean(), delta.detach().abs().amax(0)


def actor_loss(agent: Agent, batch: dict) -> tuple[Tensor, Tensor]:
    """E[ Σ_a π(a|s) ( α log π(a|s) − min_i Q_i(s, a) ) ], and H(π(·|s)) (B,)."""
    obs = agent.normalizer(batch["obs"])
    policy = agent.policy(obs)
    with torch.no_grad():
        value = torch.minimum(*agent.critics(obs))  # (B, num_actions)
        temperature = agent.log_temperature.exp()
    cost = temperature * policy.logits - value
    return (policy.probs * cost).sum(-1).mean(), policy.entropy().detach()


def temperature_loss(agent: Agent, entropy: Tensor) -> Tensor:
    """log α · ( E[ H(π(·|s)) ] − H̄ ): α grows while the entropy is below H̄."""
    target_entropy = agent.target_entropy * math.log(agent.num_actions)
    return agent.log_temperature * (entropy - target_entropy).mean()


@torch.no_grad()
def soft_update(target: nn.Module, network: nn.Module, tau: float) -> None:
    """θ̄ ← (1 − τ) θ̄ + τ θ"""
    for theirs, ours in zip(target.parameters(), network.parameters(), strict=True):
        theirs.lerp_(ours, tau)


def update(agent: Agent, target: Critics, optimizers, batch: dict, args: Args):
    """One step of critics, actor and temperature -> what to log, the TD errors (B,)."""
    critic_optimizer, actor_optimizer = optimizers
    q_loss, td_error = critic_loss(agent, target, batch)
    critic_optimizer.zero_grad()
    q_loss.backward()
    average_gradients(agent.critics)
    critic_optimizer.step()

    policy_loss, entropy = actor_loss(agent, batch)
    actor_optimizer.zero_grad()
    (policy_loss + temperature_loss(agent, entropy)).backward()  # they share no parameter
    average_gradients(agent.actor, agent.log_temperature)
    actor_optimizer.step()

    soft_update(target, agent.critics, args.tau)
    losses = {"critic": q_loss, "actor": policy_loss, "entropy": entropy.mean()}
    return losses | {"temperature": agent.log_temperature.detach().exp()}, td_error


def train(args: Args) -> Result:
    run = Run(args, __file__, LIMITS)
    args = run.args
    workers = Workers(run, collect, "discrete", ahead=True)  # ahead: workers collect during updates
    agent = Agent(workers.observation_space, workers.action_space, args).to(run.device)
    target = copy.deepcopy(agent.critics).requires_grad_(False)
    critic_optimizer = torch.optim.Adam(agent.critics.parameters(), args.learning_rate, fused=True)
    actor_parameters = [*agent.actor.parameters(), agent.log_temperature]
    actor_optimizer = torch.optim.Adam(actor_parameters, args.learning_rate, fused=True)
    optimizers = critic_optimizer, actor_optimizer
    learn = run.compile(update)  # compiled in long runs (--compile)
    replay = ReplayBuffer(run, workers.start(agent, args.num_steps), args.buffer_size)
    step = run.start(
        agent=agent, target=target, critic_optimizer=critic_optimizer,
        actor_optimizer=actor_optimizer, workers=workers, replay=replay,
    )  # fmt: skip

    losses: dict[str, Tensor] = {}  # of the last update
    while step < args.total_steps:
        agent.target_entropy.fill_(target_entropy_at(step, args))
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - step / args.total_steps)
        rollout = workers.collect()
        replay.add(rollout)
        agent.normalizer.update(rollout["obs"])
        before, step = step, step + args.num_steps * args.num_envs * run.world_size
        if step >= args.warmup_steps and len(replay) >= min(args.warmup_steps, args.buffer_size):
            for _ in range(int(before * args.utd_ratio), int(step * args.utd_ratio)):
                batch = replay.sample(args.batch_size)
                losses, td_error = learn(agent, target, optimizers, batch, args)
                replay.update_priorities(batch["index"], td_error)

        run.log_episodes(step, rollout)
        if step // args.log_every > before // args.log_every:
            run.log(step, losses, replay_size=len(replay))
        run.evaluate(step)
        run.checkpoint(step)
    return run.finish(step)


if __name__ == "__main__":
    train(parse(Args, TUNED))
