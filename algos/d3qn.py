"""Dueling double DQN with prioritised replay (D3QN): dqn.py plus four changes.

1. Dueling (Wang et al. 2016, arXiv:1511.06581): a value and advantages instead of Q itself, so that
   every transition teaches what the state is worth, whichever action was taken,
       Q(s, a) = V(s) + A(s, a) − mean_b A(s, b)
2. Double Q-learning (van Hasselt, Guez, Silver 2016, arXiv:1509.06461): Q chooses, Q̄ evaluates,
       y = r + γ (1 − terminated) Q̄(s', argmax_a Q(s', a))
3. Prioritised replay (Schaul et al. 2016, arXiv:1511.05952): transition i is drawn with
   probability P(i) ∝ |δ_i|^0.6, δ_i its TD error when last drawn (before: the largest so far),
       L(θ) = E[ w_i h(δ_i) ],   w_i ∝ (size · P(i))^−β, at most 1 in a batch,   β from 0.4 to 1
4. Temporally extended ε-greedy (Dabney, Ostrovski, Barreto 2021, arXiv:2006.01782): a random action
   is repeated for some steps. Single random actions rarely reach MountainCar's goal.

    python algos/d3qn.py --env MountainCar        an environment of vec_envs
    python algos/d3qn.py --env LunarLander-v3     a Gymnasium id

What differs from dqn.py, 1 to 4: `QNetwork`; `q_loss`; `prioritized` in `Args`; `collect`.
What differs from the papers, besides what dqn.py names: V and A have one layer each, and their
gradients are not rescaled (Wang); the length of a repetition is geometric (mean L), not zeta; it
ends with the episode; ε is the fraction of steps that are random, not of decisions (Dabney).
"""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    """D3QN on any environment with discrete actions."""

    env: str = "CartPole"
    num_envs: int = 8
    prioritized: bool = True
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
    """Adam's learning rate, annealed linearly to zero"""
    gamma: float = 0.99
    """γ, the discount factor; `discount` in a batch is γⁿ"""
    tau: float = 0.01
    """τ: how far the target network moves at each of its updates"""
    final_epsilon: float = 0.05
    """final ε, the probability of a random action"""
    exploration_fraction: float = 0.2
    """fraction of the run during which ε goes from 1 to --final-epsilon"""
    exploration_length: float = 1.0
    """L: mean number of steps that a random action lasts (1: never repeated)"""
    max_grad_norm: float = 10.0
    """maximum norm of the gradient; a larger gradient is scaled down to it"""
    hidden_size: int = 128
    """width of the two hidden layers"""


LIMITS = {"exploration_length": (1, None)}

# What differs by environment; a flag on the command line wins.
TUNED = {
    "CartPole": dict(total_steps=50_000, eval_every=10_000, n_step=10, utd_ratio=0.5),
    "Acrobot": dict(total_steps=100_000, eval_every=20_000, n_step=3, utd_ratio=1.0,
                    hidden_size=256, tau=0.005, exploration_length=10),
    "MountainCar": dict(total_steps=120_000, eval_every=20_000, n_step=10, utd_ratio=0.5,
                        exploration_length=20),
    "LunarLander-v3": dict(total_steps=300_000, eval_every=50_000, n_step=5),
}  # fmt: skip


class QNetwork(nn.Module):
    """Q(s, a) = V(s) + A(s, a) − mean_b A(s, b): without the mean, V could be anything."""

    def __init__(self, obs_dim: int, hidden: int, num_actions: int):
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Linear(obs_dim, hidden), nn.ReLU(inplace=True)),
            *(nn.Linear(hidden, hidden), nn.ReLU(inplace=True)),
        )
        self.value = nn.Linear(hidden, 1)
        self.advantage = nn.Linear(hidden, num_actions)

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x)
        advantage = self.advantage(features)
        return self.value(features) + advantage - advantage.mean(-1, keepdim=True)


class Agent(nn.Module):
    """The Q-function. forward: observation (N, obs_dim) → argmax_a Q(s, a), (N,)."""

    def __init__(self, observation_space, action_space, args: Args):
        super().__init__()
        obs_dim, self.num_actions = observation_space.shape[0], int(action_space.n)
        self.normalizer = Normalizer(obs_dim)
        self.q_network = QNetwork(obs_dim, args.hidden_size, self.num_actions)
        self.exploration_length = args.exploration_length
        self.register_buffer("epsilon", torch.tensor(1.0))  # a tensor: worker processes share it

    def forward(self, obs: Tensor) -> Tensor:
        return self.q_network(self.normalizer(obs)).argmax(-1)


@torch.no_grad()
def collect(agent: Agent, envs: vec_envs.VecEnv, rollout: dict[str, Tensor]) -> None:
    """T steps in every environment, ε-greedy, where a random action is repeated.

    It is repeated with probability 1 − 1/L while its episode lasts; else a new one begins with
    probability p = ε / (ε + L (1 − ε)): then p L / (p L + 1 − p) = ε of a long episode is random.
    """
    epsilon, length = agent.epsilon, agent.exploration_length
    begin_probability = epsilon / (epsilon + length * (1 - epsilon))
    for t in range(len(rollout["obs"])):
        obs = envs.obs
        random_action = torch.randint_like(rollout["action"][t], agent.num_actions)
        begin = torch.rand_like(rollout["reward"][t]) < begin_probability
        repeat = torch.rand_like(rollout["reward"][t]) < 1 - 1 / length
        # in the same episode only; at t = 0, row −1 is the last step of the rollout before
        repeat &= rollout["random"][t - 1].bool() & ~rollout["done"][t - 1]
        action = torch.where(begin, random_action, agent(obs))
        action = torch.where(repeat, rollout["action"][t - 1], action)
        rollout["random"][t] = begin | repeat
        rollout["obs"][t] = obs
        rollout["action"][t] = action
        _, reward, terminated, truncated, info = envs.step(action)
        rollout["reward"][t] = reward
        rollout["next_obs"][t] = info["final_obs"]  # never the first one of a new episode
        rollout["terminated"][t] = terminated
        rollout["done"][t] = terminated | truncated
        rollout["episode_return"][t] = info["episode_return"]
        rollout["episode_length"][t] = info["episode_length"]


def epsilon_at(step: int, args: Args) -> float:
    """ε: from 1 linearly to its final value, and there it stays."""
    progress = step / max(args.exploration_fraction * args.total_steps, 1)
    return max(1 - (1 - args.final_epsilon) * progress, args.final_epsilon)


def q_loss(agent: Agent, target: nn.Module, batch: dict) -> tuple[Tensor, ...]:
    """E[ w h( Q(s, a) − y ) ] with importance weights w; Q(s, a) and the TD errors, each (B,)."""
    with torch.no_grad():
        next_obs = agent.normalizer(batch["next_obs"])
        best = agent.q_network(next_obs).argmax(-1, keepdim=True)
        next_value = target(next_obs).gather(-1, best).squeeze(-1)
        y = batch["reward"] + batch["discount"] * ~batch["terminated"] * next_value
    q = agent.q_network(agent.normalizer(batch["obs"]))  # (B, num_actions)
    q = q.gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    loss = (batch["weight"] * F.smooth_l1_loss(q, y, reduction="none")).mean()
    return loss, q.detach(), (q - y).detach()


@torch.no_grad()
def soft_update(target: nn.Module, network: nn.Module, tau: float) -> None:
    """θ̄ ← (1 − τ) θ̄ + τ θ"""
    for theirs, ours in zip(target.parameters(), network.parameters(), strict=True):
        theirs.lerp_(ours, tau)


def update(agent: Agent, target: nn.Module, optimizer, batch: dict, args: Args):
    """One step of the Q-network -> what to log, the TD errors (B,)."""
    loss, q, td_error = q_loss(agent, target, batch)
    optimizer.zero_grad()
    loss.backward()
    average_gradients(agent.q_network)
    norm = nn.utils.clip_grad_norm_(agent.q_network.parameters(), args.max_grad_norm)
    optimizer.step()
    soft_update(target, agent.q_network, args.tau)
    return {"q": loss, "q_value": q.mean(), "grad_norm": norm}, td_error


def train(args: Args) -> Result:
    run = Run(args, __file__, LIMITS)
    args = run.args
    workers = Workers(run, collect, "discrete", ahead=True)  # ahead: workers collect during updates
    agent = Agent(workers.observation_space, workers.action_space, args).to(run.device)
    target = copy.deepcopy(agent.q_network).requires_grad_(False)
    optimizer = torch.optim.Adam(agent.q_network.parameters(), args.learning_rate, fused=True)
    learn = run.compile(update)  # compiled in long runs (--compile)
    rollout = workers.start(agent, args.num_steps, random=())  # random: 1 if the action was, else 0
    replay = ReplayBuffer(run, rollout, args.buffer_size)
    step = run.start(
        agent=agent, target=target, optimizer=optimizer, workers=workers, replay=replay
    )

    losses: dict[str, Tensor] = {}  # of the last update
    while step < args.total_steps:
        agent.epsilon.fill_(epsilon_at(step, args))
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - step / args.total_steps)
        rollout = workers.collect()
        replay.add(rollout)
        agent.normalizer.update(rollout["obs"])
        before, step = step, step + args.num_steps * args.num_envs * run.world_size
        if step >= args.warmup_steps and len(replay) >= min(args.warmup_steps, args.buffer_size):
            for _ in range(int(before * args.utd_ratio), int(step * args.utd_ratio)):
                batch = replay.sample(args.batch_size)
                losses, td_error = learn(agent, target, optimizer, batch, args)
                replay.update_priorities(batch["index"], td_error)

        run.log_episodes(step, rollout)
        if step // args.log_every > before // args.log_every:
            run.log(step, losses, replay_size=len(replay))
        run.evaluate(step)
        run.checkpoint(step)
    return run.finish(step)


if __name__ == "__main__":
    train(parse(Args, TUNED))
