"""Deep Q-network (DQN): Q-learning from a replay buffer, towards a target network.

Mnih et al. 2015, doi:10.1038/nature14236; double Q-learning: van Hasselt, Guez, Silver 2016,
arXiv:1509.06461. Q is the network with weights θ, Q̄ its slow copy, the target network:

    y    = r + γ (1 − terminated) Q̄(s', a'),   a' = argmax_a Q̄(s', a)
                                          with --double-q argmax_a Q(s', a)
    L(θ) = E[ h( Q(s, a) − y ) ],   h(δ) = ½ δ² where |δ| ≤ 1, else |δ| − ½

    python algos/dqn.py --env CartPole            an environment of vec_envs
    python algos/dqn.py --env LunarLander-v3      a Gymnasium id

What makes it work, each where it stands:
- `collect`, `epsilon_at`: ε-greedy, ε annealed by the step; a buffer of the agent, so worker
  processes see it as well. With --exploration-length a random action is kept for some steps
  (Dabney, Ostrovski, Barreto 2021, arXiv:2006.01782): single ones do not climb MountainCar's hill.
- `td_target`: a truncated episode bootstraps from its true last observation, a terminated one does
  not. With --n-step the reward is r_0 + γ r_1 + … of n steps, which an episode's end cuts short.
- `update`: the gradient is clipped.
- `train`: Q̄ follows, a little each time (θ̄ ← θ̄ + τ (θ − θ̄)) or all the way every so often
  (--polyak 1 --target-every 500). The number of updates follows the transitions collected, however
  many environments there are. Mnih's rhythm, one environment and an update every fourth step, is
  --num-envs 1 --horizon 4 --utd-ratio 0.25.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import vec_envs
from algos.worker_learner import (
    ReplayArgs,
    ReplayBuffer,
    Result,
    Run,
    Workers,
    count_learners,
    flatten,
    gradient_step,
    parse,
    var_mean_over_learners,
)


@dataclass
class Args(ReplayArgs):
    """DQN on any environment with discrete actions."""

    env: str = "CartPole"
    num_envs: int = 8
    horizon: int = 1
    """steps of each environment between updates"""
    utd_ratio: float = 0.25
    """updates per transition collected"""
    batch_size: int = 128
    """transitions of one gradient step"""
    buffer_size: int = 100_000
    """transitions kept for replay"""
    warmup_steps: int = 1000
    """steps before the first update"""
    n_step: int = 1
    """rewards summed before Q̄ stands for the rest"""
    learning_rate: float = 1e-3
    """of Adam, annealed linearly to zero"""
    discount: float = 0.99
    """γ"""
    double_q: bool = False
    """a' is the best action by Q, not by Q̄, which likes what it overestimates"""
    polyak: float = 0.01
    """τ: how far the target network moves towards Q each time"""
    target_every: int = 1
    """updates between two such moves of the target network"""
    final_epsilon: float = 0.05
    """ε in the end: how often the action is a random one"""
    exploration_fraction: float = 0.2
    """part of the run during which ε goes from 1 to --final-epsilon"""
    exploration_length: float = 1.0
    """steps for which a random action is kept, in the mean"""
    max_grad_norm: float = 10.0
    """gradients longer than this are shortened to it"""
    hidden_size: int = 128
    """width of the two hidden layers"""


LIMITS = {
    **dict.fromkeys(("horizon", "batch_size", "buffer_size", "n_step", "hidden_size"), (1, None)),
    "target_every": (1, None),
    **dict.fromkeys(("discount", "polyak", "final_epsilon", "exploration_fraction"), (0, 1)),
    "exploration_length": (1, None),
    "max_grad_norm": (1e-9, None),
}

# What differs by environment, as in the tables of papers; a flag on the command line wins.
TUNED = {
    "CartPole": dict(total_steps=50_000, eval_every=10_000, n_step=10),
    "Acrobot": dict(total_steps=100_000, eval_every=20_000, n_step=3, utd_ratio=1.0,
                    hidden_size=256, polyak=0.005, exploration_length=10),
    "MountainCar": dict(total_steps=120_000, eval_every=20_000, n_step=10, utd_ratio=0.5,
                        exploration_length=20),
    "LunarLander-v3": dict(total_steps=300_000, eval_every=50_000, n_step=5),
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


class QNetwork(nn.Module):
    """Normalised observations (..., obs_dim) → Q of every action (..., num_actions)."""

    def __init__(self, obs_dim: int, num_actions: int, hidden: int):
        super().__init__()
        self.first = nn.Linear(obs_dim, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.last = nn.Linear(hidden, num_actions)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).relu()).relu())


class Agent(nn.Module):
    """The Q-function. forward: observation (N, obs_dim) → argmax_a Q(s, a), (N,)."""

    def __init__(self, observation_space, action_space, args: Args):
        super().__init__()
        obs_dim, self.num_actions = observation_space.shape[0], int(action_space.n)
        self.normalizer = Normalizer(obs_dim)
        self.q_network = QNetwork(obs_dim, self.num_actions, args.hidden_size)
        self.register_buffer("epsilon", torch.tensor(1.0))
        self.register_buffer("kept", torch.zeros(args.num_envs))  # 1 + random action, or 0: none
        self.exploration_length = args.exploration_length

    def forward(self, obs: Tensor) -> Tensor:
        return self.q_network(self.normalizer(obs)).argmax(-1)


@torch.no_grad()
def collect(agent: Agent, envs: vec_envs.VecEnv, rollout: dict[str, Tensor]) -> None:
    """T steps of every env; in a part ε of them the action is a random one, else the best.

    A random action is kept with probability 1 − 1/L, L = --exploration-length. One begins with
    probability p = ε / (ε + L (1 − ε)): then p L / (p L + 1 − p) = ε of the steps are random.
    """
    epsilon, length = agent.epsilon, agent.exploration_length
    draws = torch.rand(rollout["action"].shape, device=envs.device)  # (T, N)
    begins = draws < epsilon / (epsilon + length * (1 - epsilon))
    new = torch.randint_like(draws, 1, agent.num_actions + 1) * begins  # 1 + action, or 0: none
    stays = torch.rand_like(draws) > 1 / length
    for t in range(len(rollout["obs"])):
        obs = envs.obs
        kept = rollout["kept"][t - 1]  # before 0: the last rollout's
        kept = torch.where(stays[t] & (kept > 0), kept, new[t])
        rollout["kept"][t] = kept
        action = torch.where(kept > 0, kept.long() - 1, agent(obs))
        rollout["obs"][t] = obs
        rollout["action"][t] = action
        _, reward, terminated, truncated, info = envs.step(action)
        rollout["reward"][t] = reward
        rollout["next_obs"][t] = info["final_obs"]
        rollout["terminated"][t] = terminated
        rollout["done"][t] = terminated | truncated
        rollout["episode_return"][t] = info["episode_return"]
        rollout["episode_length"][t] = info["episode_length"]


def epsilon_at(step: int, args: Args) -> float:
    """ε: from 1 linearly to its final value, and there it stays."""
    progress = step / max(args.exploration_fraction * args.total_steps, 1)
    return max(1 - (1 - args.final_epsilon) * progress, args.final_epsilon)


@torch.no_grad()
def td_target(agent: Agent, target_network: QNetwork, batch, args: Args) -> Tensor:
    """y = r + γ (1 − terminated) Q̄(s', a'), (B,); reward and γ are those of n steps."""
    next_obs = agent.normalizer(batch["next_obs"])
    next_q = target_network(next_obs)
    chooser = agent.q_network(next_obs) if args.double_q else next_q  # double Q: this line
    next_value = next_q.gather(-1, chooser.argmax(-1, keepdim=True)).squeeze(-1)
    return batch["reward"] + batch["discount"] * ~batch["terminated"] * next_value


def q_loss(agent: Agent, target_network, batch, args: Args) -> tuple[Tensor, Tensor]:
    """E[ h( Q(s, a) − y ) ] of one batch, and Q(s, a), (B,)."""
    q = agent.q_network(agent.normalizer(batch["obs"]))
    q = q.gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    y = td_target(agent, target_network, batch, args)
    return nn.functional.smooth_l1_loss(q, y), q


def update(agent: Agent, target_network, optimizer, replay, loss_gradient, args: Args) -> dict:
    """One gradient step on a batch from the replay buffer -> what to log."""
    batch = replay.sample(args.batch_size)
    gradient, loss, q = loss_gradient(agent, target_network, batch, args)
    norm = gradient_step(gradient, optimizer, args.max_grad_norm)
    return {"q_loss": loss, "q_value": q, "gradient_norm": norm}


def train(args: Args) -> Result:
    run = Run(args, __file__, LIMITS)
    args = run.args
    workers = Workers(run, collect, "discrete", ahead=True)
    agent = Agent(workers.observation_space, workers.action_space, args).to(run.device)
    target_network = copy.deepcopy(agent.q_network)
    weights, target_weights = flatten(agent), flatten(target_network).detach()
    learning_rate = torch.tensor(args.learning_rate, device=run.device)
    optimizer = torch.optim.Adam([weights], learning_rate, fused=True)
    rollout = workers.start(agent, args.horizon, kept=())
    empty = {name: tensor for name, tensor in rollout.items() if name != "kept"}
    replay = ReplayBuffer(run, empty, args.buffer_size, n_step=args.n_step, discount=args.discount)
    loss_gradient = run.gradient(q_loss, agent)
    state = {"target": target_network, "optimizer": optimizer, "replay": replay}
    step = run.start(agent=agent, workers=workers, **state)
    rollout["kept"][-1] = agent.kept  # of a resumed run

    losses: dict[str, Tensor] = {}  # of the last update
    while step < args.total_steps:
        agent.epsilon.fill_(epsilon_at(step, args))
        left = 1 - step / args.total_steps
        optimizer.param_groups[0]["lr"].fill_(args.learning_rate * left)
        rollout = workers.collect()
        agent.kept.copy_(rollout["kept"][-1])
        replay.add(rollout)
        agent.normalizer.update(rollout["obs"])
        before, step = step, step + args.horizon * args.num_envs * run.learners

        if step >= args.warmup_steps and len(replay) >= min(args.warmup_steps, args.buffer_size):
            for number in range(int(before * args.utd_ratio), int(step * args.utd_ratio)):
                losses = update(agent, target_network, optimizer, replay, loss_gradient, args)
                if number % args.target_every == 0:
                    target_weights.lerp_(weights.detach(), args.polyak)

        run.log_episodes(step, rollout)
        if step // args.log_every > before // args.log_every:
            means = {name: value.mean() for name, value in losses.items()}
            run.log(step, means, replay_size=len(replay), policy_lag=workers.policy_lag)
        run.evaluate(step)
        run.checkpoint(step)
    return run.finish(step)


if __name__ == "__main__":
    train(parse(Args, TUNED))
