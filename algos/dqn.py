"""Deep Q-network (DQN): Q-learning from a replay buffer, towards a target network.

Mnih et al. 2015, doi:10.1038/nature14236. With Q̄ the slow target network,

    y    = r + γ (1 − terminated) max_a Q̄(s', a)
    L(θ) = E[ h( Q(s, a) − y ) ]              h(δ) = ½ δ² where |δ| ≤ 1, else |δ| − ½

    python algos/dqn.py --env CartPole            an environment of vec_envs
    python algos/dqn.py --env LunarLander-v3      a Gymnasium id

Actions are ε-greedy (`collect`): with probability ε a random one, else argmax_a Q(s, a).
What differs from the paper (its values in brackets):
- observations are vectors, normalised by running statistics, which are saved with the agent;
- Q̄ moves a little after each update (`soft_update`), not all the way after every 10,000th;
- Adam, not RMSProp, at a rate of 1e-3 (2.5e-4) annealed to zero; the gradient's norm is clipped;
- batches of 128 (32), a buffer of 100,000 transitions (1 M), updates from step 1000 on (50,000); ε
  falls during a fifth of the run (the first million frames); two layers of 128 units;
- eight environments collect; rewards are not clipped (paper: ±1), ε ends at 0.05 (0.1), evaluation
  is greedy (ε = 0.05); a truncated episode bootstraps from its true last observation;
- with --n-step (CartPole: 10), r sums n discounted rewards (fewer if the episode ends) and γⁿ
  replaces γ; there is no correction for the random actions among the n;
- with --prioritized, transitions are drawn by their TD errors; w in the loss corrects for this.
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
    """DQN on any environment with discrete actions."""

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
    """Adam's learning rate, annealed linearly to zero"""
    gamma: float = 0.99
    """γ, the discount factor; `discount` in a batch is γⁿ"""
    tau: float = 0.01
    """τ: how far the target network moves at each of its updates"""
    final_epsilon: float = 0.05
    """final ε, the probability of a random action"""
    exploration_fraction: float = 0.2
    """fraction of the run during which ε goes from 1 to --final-epsilon"""
    max_grad_norm: float = 10.0
    """maximum norm of the gradient; a larger gradient is scaled down to it"""
    hidden_size: int = 128
    """width of the two hidden layers"""


# What differs by environment; a flag on the command line wins.
TUNED = {
    "CartPole": dict(total_steps=50_000, eval_every=10_000, n_step=10, utd_ratio=0.5),
    "Acrobot": dict(total_steps=100_000, eval_every=20_000, n_step=3, utd_ratio=1.0,
                    hidden_size=256, tau=0.005),
    "LunarLander-v3": dict(total_steps=300_000, eval_every=50_000, n_step=5),
}  # fmt: skip


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(inputs, hidden), nn.ReLU(inplace=True)),
        *(nn.Linear(hidden, hidden), nn.ReLU(inplace=True)),
        nn.Linear(hidden, outputs),
    )


class Agent(nn.Module):
    """The Q-function. forward: observation (N, obs_dim) → argmax_a Q(s, a), (N,)."""

    def __init__(self, observation_space, action_space, args: Args):
        super().__init__()
        obs_dim, self.num_actions = observation_space.shape[0], int(action_space.n)
        self.normalizer = Normalizer(obs_dim)
        self.q_network = mlp(obs_dim, args.hidden_size, self.num_actions)
        self.register_buffer("epsilon", torch.tensor(1.0))  # a tensor: worker processes share it

    def forward(self, obs: Tensor) -> Tensor:
        return self.q_network(self.normalizer(obs)).argmax(-1)


@torch.no_grad()
def collect(agent: Agent, envs: vec_envs.VecEnv, rollout: dict[str, Tensor]) -> None:
    """T steps in every environment, ε-greedy."""
    for t in range(len(rollout["obs"])):
        obs = envs.obs
        random_action = torch.randint_like(rollout["action"][t], agent.num_actions)
        explore = torch.rand_like(rollout["reward"][t]) < agent.epsilon
        action = torch.where(explore, random_action, agent(obs))
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
        next_value = target(agent.normalizer(batch["next_obs"])).amax(-1)
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
    run = Run(args, __file__)
    args = run.args
    workers = Workers(run, collect, "discrete", ahead=True)  # ahead: workers collect during updates
    agent = Agent(workers.observation_space, workers.action_space, args).to(run.device)
    target = copy.deepcopy(agent.q_network).requires_grad_(False)
    optimizer = torch.optim.Adam(agent.q_network.parameters(), args.learning_rate, fused=True)
    learn = run.compile(update)  # compiled in long runs (--compile)
    replay = ReplayBuffer(run, workers.start(agent, args.num_steps), args.buffer_size)
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
