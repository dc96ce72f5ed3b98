"""Parallelised Q-network (PQN): Q-learning without replay buffer and without target network.

Gallici, Fellows, Ellis, Pou, Masmitja, Foerster, Martin 2024, arXiv:2407.04811. Many environments
in parallel take the place of the buffer, LayerNorm that of the target network. With λ-returns
from the true next observation s'_t of every step, computed before the epochs,

    G_t  = r_t + γ (1 − terminated_t) [ λ G_{t+1} + (1 − λ) max_a Q(s'_t, a) ]
    L(θ) = ½ E[ (Q(s_t, a_t) − G_t)² ]

    python algos/pqn.py --env CartPole            an environment of vec_envs
    python algos/pqn.py --env LunarLander-v3      a Gymnasium id

What makes it work, each where it stands:
- `QNetwork`: LayerNorm before each ReLU bounds how far one update can move the other states' Q.
- `lambda_returns`: a truncated episode bootstraps from its true last observation, a terminated one
  does not; λ carries the reward of a whole rollout back at once. Exploring steps do not cut it
  (Peng's Q(λ), not Watkins').
- `collect`, `epsilon_at`: ε-greedy, ε annealed by the step; a buffer of the agent, so worker
  processes see it as well.
- `train`: RAdam, whose first steps are short while it does not know the gradient's variance.
"""

from dataclasses import dataclass

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
    parse,
    var_mean_over_learners,
)


@dataclass
class Args(RunArgs):
    """PQN on any environment with discrete actions."""

    env: str = "CartPole"
    num_envs: int = 16
    horizon: int = 32
    """steps of each environment in a rollout"""
    learning_rate: float = 3e-3
    """of RAdam, annealed linearly to zero"""
    epochs: int = 8
    """passes over each rollout"""
    minibatch_size: int = 128
    """transitions of one gradient step"""
    discount: float = 0.99
    """γ"""
    q_lambda: float = 0.9
    """λ of the returns: 0 trusts Q at once, 1 only what came in the rollout"""
    final_epsilon: float = 0.05
    """ε in the end: how often the action is a random one"""
    exploration_fraction: float = 0.5
    """part of the run during which ε goes from 1 to --final-epsilon"""
    max_grad_norm: float = 10.0
    """gradients longer than this are shortened to it"""
    hidden_size: int = 128
    """width of the two hidden layers"""


LIMITS = {
    **dict.fromkeys(("horizon", "epochs", "minibatch_size", "hidden_size"), (1, None)),
    **dict.fromkeys(("discount", "q_lambda", "final_epsilon", "exploration_fraction"), (0, 1)),
    "max_grad_norm": (1e-9, None),
}

# What differs by environment, as in the tables of papers; a flag on the command line wins.
TUNED = {
    "CartPole": dict(total_steps=49_664, eval_every=10_000),
    "Acrobot": dict(total_steps=99_840, eval_every=20_000),
    "MountainCar": dict(total_steps=119_808, eval_every=20_000),
    "LunarLander-v3": dict(total_steps=299_520, eval_every=50_000),
}


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
        self.layers = nn.Sequential(
            *(nn.Linear(obs_dim, hidden), nn.LayerNorm(hidden), nn.ReLU()),
            *(nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.ReLU()),
            nn.Linear(hidden, num_actions),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Agent(nn.Module):
    """The Q-function. forward: observation (N, obs_dim) → argmax_a Q(s, a), (N,)."""

    def __init__(self, observation_space, action_space, args: Args):
        super().__init__()
        obs_dim, self.num_actions = observation_space.shape[0], int(action_space.n)
        self.normalizer = Normalizer(obs_dim)
        self.q_network = QNetwork(obs_dim, self.num_actions, args.hidden_size)
        self.register_buffer("epsilon", torch.tensor(1.0))

    def forward(self, obs: Tensor) -> Tensor:
        return self.q_network(self.normalizer(obs)).argmax(-1)


@torch.no_grad()
def collect(agent: Agent, envs: vec_envs.VecEnv, rollout: dict[str, Tensor]) -> None:
    """T steps of every env; each action is with probability ε a random one, else the best."""
    explores = torch.rand(rollout["action"].shape, device=envs.device) < agent.epsilon  # (T, N)
    random_action = torch.randint_like(rollout["action"], agent.num_actions)
    for t in range(len(rollout["obs"])):
        obs = envs.obs
        action = torch.where(explores[t], random_action[t], agent(obs))
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


def lambda_returns(reward, next_value, terminated, done, args: Args) -> Tensor:
    """G_t = r_t + γ (1 − terminated_t) [ λ G_{t+1} + (1 − λ) V(s'_t) ], all (T, N).

    Where an episode or the rollout ends, V(s'_t) = max_a Q(s'_t, a) stands for all that follows.
    """
    discount = args.discount * (~terminated).to(reward)
    trace = args.q_lambda * (~done).to(reward)
    returns, following = torch.empty_like(reward), next_value[-1]
    for t in reversed(range(len(reward))):
        following = torch.lerp(next_value[t], following, trace[t])
        following = returns[t] = reward[t] + discount[t] * following
    return returns


def q_loss(agent: Agent, batch: dict[str, Tensor]) -> tuple[Tensor, dict]:
    """½ E[ (Q(s, a) − G)² ] of one minibatch, and what to log of it."""
    q = agent.q_network(batch["obs"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    loss = 0.5 * (q - batch["returns"]).square().mean()
    return loss, {"q_loss": loss, "q_value": q.mean()}


@torch.no_grad()
def prepare(agent: Agent, rollout: dict[str, Tensor], args: Args) -> dict[str, Tensor]:
    """What the epochs need of each transition, (T·N, ...), computed once by the old Q."""
    next_value = agent.q_network(agent.normalizer(rollout["next_obs"])).amax(-1)
    returns = lambda_returns(
        rollout["reward"], next_value, rollout["terminated"], rollout["done"], args
    )
    obs = agent.normalizer(rollout["obs"])
    batch = {"obs": obs, "action": rollout["action"], "returns": returns}
    return {name: tensor.flatten(0, 1) for name, tensor in batch.items()}


def update(agent: Agent, optimizer, rollout, loss_gradient, args: Args) -> dict[str, Tensor]:
    """Some epochs of minibatch gradient steps -> mean of each logged quantity."""
    batch = prepare(agent, rollout, args)
    size, device = len(batch["obs"]), batch["obs"].device
    logged = []
    for _ in range(args.epochs):
        for index in torch.randperm(size, device=device).split(args.minibatch_size):
            minibatch = {name: tensor[index] for name, tensor in batch.items()}
            gradient, _, losses = loss_gradient(agent, minibatch)
            losses["gradient_norm"] = gradient_step(gradient, optimizer, args.max_grad_norm)
            logged.append(losses)
    agent.normalizer.update(rollout["obs"])  # last, so that all of the above saw one normaliser
    return {name: sum(losses[name] for losses in logged) / len(logged) for name in logged[0]}


def train(args: Args) -> Result:
    run = Run(args, __file__, LIMITS)
    args = run.args
    workers = Workers(run, collect, "discrete")
    agent = Agent(workers.observation_space, workers.action_space, args).to(run.device)
    weights = flatten(agent)  # all parameters, now views of one vector
    on_gpu = run.device.type == "cuda"
    learning_rate = torch.tensor(args.learning_rate, device=run.device)
    optimizer = torch.optim.RAdam([weights], learning_rate, eps=1e-5, capturable=on_gpu)
    workers.start(agent, args.horizon)
    loss_gradient = run.gradient(q_loss, agent)
    step = run.start(agent=agent, optimizer=optimizer, workers=workers)

    while step < args.total_steps:
        agent.epsilon.fill_(epsilon_at(step, args))
        left = 1 - step / args.total_steps
        optimizer.param_groups[0]["lr"].fill_(args.learning_rate * left)
        rollout = workers.collect()
        step += args.horizon * args.num_envs * run.learners
        losses = update(agent, optimizer, rollout, loss_gradient, args)

        run.log_episodes(step, rollout)
        run.log(step, losses)
        run.evaluate(step)
        run.checkpoint(step)
    return run.finish(step)


if __name__ == "__main__":
    train(parse(Args, TUNED))
