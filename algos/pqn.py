"""Parallelised Q-network (PQN): Q-learning without replay buffer and without target network.

Gallici, Fellows, Ellis, Pou, Masmitja, Foerster, Martin 2024, arXiv:2407.04811. Many environments
in parallel take the place of the buffer, LayerNorm that of the target network. With λ-returns
from the true next observation s'_t of every step, computed before the epochs,

    G_t  = r_t + γ (1 − terminated_t) [ λ_t G_{t+1} + (1 − λ_t) max_a Q(s'_t, a) ]
    L(θ) = ½ E[ (Q(s_t, a_t) − G_t)² ]                             λ_t = λ (1 − done_t)

    python algos/pqn.py --env CartPole            an environment of vec_envs
    python algos/pqn.py --env LunarLander-v3      a Gymnasium id

What differs from dqn.py:
- `mlp`: LayerNorm before each ReLU; with it, TD learning is stable without a target network.
- `lambda_returns` carry the reward of a whole rollout back at once. Random actions do not cut them
  (Peng's Q(λ), not Watkins').
- `update`: epochs on the newest rollout, as in ppo.py; RAdam, whose first steps are short.
What differs from the paper (in brackets: its CartPole): 16 environments (32) of 32 steps (64),
layers of 128 (256), 8 epochs (4), a learning rate of 3e-3 (1e-4), λ 0.9 (0.95), ε to 0.05 (0.2) in
half of the run (a fifth), rewards not scaled (0.1); observations are normalised by running
statistics; a truncated episode bootstraps from its true last observation.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import vec_envs
from algos.worker_learner import (
    Normalizer,
    Result,
    Run,
    RunArgs,
    Workers,
    average_gradients,
    parse,
)


@dataclass
class Args(RunArgs):
    """PQN on any environment with discrete actions."""

    env: str = "CartPole"
    num_envs: int = 16
    num_steps: int = 32
    """steps of each environment in a rollout"""
    epochs: int = 8
    """passes over each rollout"""
    minibatch_size: int = 128
    """transitions of one gradient step"""
    learning_rate: float = 3e-3
    """RAdam's learning rate, annealed linearly to zero"""
    gamma: float = 0.99
    """γ, the discount factor"""
    q_lambda: float = 0.9
    """λ of the returns: 0 bootstraps from Q after one step, 1 only at the end of the rollout"""
    final_epsilon: float = 0.05
    """final ε, the probability of a random action"""
    exploration_fraction: float = 0.5
    """fraction of the run during which ε goes from 1 to --final-epsilon"""
    max_grad_norm: float = 10.0
    """maximum norm of the gradient; a larger gradient is scaled down to it"""
    hidden_size: int = 128
    """width of the two hidden layers"""


LIMITS = {"q_lambda": (0, 1)}

# What differs by environment; a flag on the command line wins.
TUNED = {
    "CartPole": dict(total_steps=49_664, eval_every=10_000),  # 97 rollouts of 16 · 32 = 512 steps
    "Acrobot": dict(total_steps=99_840, eval_every=20_000),
    "MountainCar": dict(total_steps=119_808, eval_every=20_000),
    "LunarLander-v3": dict(total_steps=299_520, eval_every=50_000),
}


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(inputs, hidden), nn.LayerNorm(hidden), nn.ReLU(inplace=True)),
        *(nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.ReLU(inplace=True)),
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


def lambda_returns(reward, next_value, terminated, done, args: Args) -> Tensor:
    """G_t = r_t + γ (1 − terminated_t) [ λ_t G_{t+1} + (1 − λ_t) V(s'_t) ], all (T, N).

    λ_t = λ (1 − done_t). Where an episode or the rollout ends, V(s'_t) = max_a Q(s'_t, a) stands
    for all that follows.
    """
    discount = args.gamma * (~terminated).to(reward)
    decay = args.q_lambda * (~done).to(reward)
    returns, following = torch.empty_like(reward), next_value[-1]
    for t in reversed(range(len(reward))):
        following = torch.lerp(next_value[t], following, decay[t])
        returns[t] = following = reward[t] + discount[t] * following
    return returns


@torch.no_grad()
def prepare(agent: Agent, rollout: dict[str, Tensor], args: Args) -> dict[str, Tensor]:
    """What the epochs need of each transition, (T·N, ...), computed once by the old Q."""
    next_value = agent.q_network(agent.normalizer(rollout["next_obs"])).amax(-1)
    ends = rollout["terminated"], rollout["done"]
    batch = {
        "obs": agent.normalizer(rollout["obs"]),
        "action": rollout["action"],
        "returns": lambda_returns(rollout["reward"], next_value, *ends, args),
    }
    return {name: tensor.flatten(0, 1) for name, tensor in batch.items()}


def q_loss(agent: Agent, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """½ E[ (Q(s, a) − G)² ] of one minibatch, and Q(s, a), (B,)."""
    q = agent.q_network(batch["obs"])  # (B, num_actions)
    q = q.gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    return 0.5 * (q - batch["returns"]).square().mean(), q.detach()


def gradient_step(agent: Agent, optimizer, batch: dict[str, Tensor], args: Args) -> dict:
    """One step on a minibatch -> what to log."""
    loss, q = q_loss(agent, batch)
    optimizer.zero_grad()
    loss.backward()
    average_gradients(agent.q_network)
    norm = nn.utils.clip_grad_norm_(agent.q_network.parameters(), args.max_grad_norm)
    optimizer.step()
    return {"q": loss, "q_value": q.mean(), "grad_norm": norm}


def update(agent: Agent, optimizer, rollout: dict, learn, args: Args) -> dict[str, Tensor]:
    """Some epochs of minibatch gradient steps -> mean of each logged quantity."""
    batch = prepare(agent, rollout, args)
    size, device = len(batch["obs"]), batch["obs"].device
    logged = []
    for _ in range(args.epochs):
        for index in torch.randperm(size, device=device).split(args.minibatch_size):
            minibatch = {name: x[index] for name, x in batch.items()}
            losses = learn(agent, optimizer, minibatch, args)  # `gradient_step`, perhaps compiled
            logged.append(torch.stack([*losses.values()]).detach())  # copy: CUDA graphs reuse them
    agent.normalizer.update(rollout["obs"])  # last, so that all of the above saw one normaliser
    return dict(zip(losses, torch.stack(logged).mean(0), strict=True))


def train(args: Args) -> Result:
    run = Run(args, __file__, LIMITS)
    args = run.args
    workers = Workers(run, collect, "discrete")
    agent = Agent(workers.observation_space, workers.action_space, args).to(run.device)
    optimizer = torch.optim.RAdam(agent.q_network.parameters(), args.learning_rate, eps=1e-5)
    learn = run.compile(gradient_step)  # compiled in long runs (--compile)
    workers.start(agent, args.num_steps)  # resets the environments, makes `collect`'s `rollout`
    step = run.start(agent=agent, optimizer=optimizer, workers=workers)

    while step < args.total_steps:
        agent.epsilon.fill_(epsilon_at(step, args))
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - step / args.total_steps)
        rollout = workers.collect()
        step += args.num_steps * args.num_envs * run.world_size
        losses = update(agent, optimizer, rollout, learn, args)

        run.log_episodes(step, rollout)
        run.log(step, losses)
        run.evaluate(step)
        run.checkpoint(step)
    return run.finish(step)


if __name__ == "__main__":
    train(parse(Args, TUNED))
