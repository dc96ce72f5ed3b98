"""Value decomposition networks (VDN): agents that share a reward learn values whose sum is trained.

Sunehag et al. 2017, arXiv:1706.05296. Each agent i has values Q_i of its own actions, given its own
observation o^i; the value of the team is their sum, so that the best joint action consists of each
agent's own best one. With r the sum of all agents' rewards, Q̄ the slow target network and
a* = argmax_a Q(o_{t+1}, a), the choice of double Q-learning,

    Q_tot(o, a) = Σ_i Q_i(o^i, a^i)
    y_t  = r_t + γ (1 − terminated_t) [ (1 − λ_t) Q̄_tot(o_{t+1}, a*) + λ_t y_{t+1} ]
    L(θ) = E[ w_t ( Q_tot(o_t, a_t) − y_t )² ]                      λ_t = λ (1 − done_t),  λ = ½

    python algos/vdn.py --env Spread
    python algos/vdn.py --env lbforaging:Foraging-8x8-2p-2f-coop-v3

What differs from the paper:
- feed-forward networks, no LSTM, not dueling; all agents share one, which gets the agent's identity
  (a variant of the paper's); an action that is not available is never the best;
- batches are windows of `num_steps` steps from anywhere in the replay buffer, not episodes; an
  episode that is truncated inside a window bootstraps from its true last observation;
- rewards, stored as they are, are divided by the standard deviation of the return when sampled, and
  clipped to ±10; observations are normalised; the learning rate is annealed to zero;
- double Q-learning, soft target updates, λ = ½ without correction for actions of older policies;
- w_t = α where Q_tot is above y_t, else 1 (Rashid et al. 2020, arXiv:2006.10800). α rises from 0.1
  to 1 in the run's first half: values of what pays only if all cooperate fall more slowly.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import vec_envs
from algos.worker_learner import (
    Normalizer,
    ReplayArgs,
    ReplayBuffer,
    Result,
    RewardScaler,
    Run,
    Workers,
    average_gradients,
    parse,
)


@dataclass
class Args(ReplayArgs):
    """VDN on any environment with several agents and discrete actions."""

    env: str = "Spread"
    total_steps: int = 2_000_000
    num_steps: int = 25
    """steps of each environment in a rollout, and in a window of a batch"""
    updates: int = 100
    """gradient steps after each rollout"""
    batch_size: int = 8
    """windows of one gradient step"""
    buffer_size: int = 50_000
    """capacity of the replay buffer, in environment steps"""
    learning_rate: float = 1e-3
    """Adam's learning rate, annealed linearly to zero"""
    gamma: float = 0.95
    """γ, the discount factor"""
    tau: float = 0.01
    """τ: how far the target network moves at each of its updates"""
    lowering_weight: float = 0.1
    """initial α, the weight of errors where Q_tot is above its target"""
    final_epsilon: float = 0.05
    """final ε, the probability that an agent's action is a random one"""
    exploration_fraction: float = 0.3
    """fraction of the run during which ε goes from 1 to --final-epsilon"""
    max_grad_norm: float = 10.0
    """maximum norm of the gradient; a larger gradient is scaled down to it"""
    hidden_size: int = 64
    """width of the two hidden layers"""


LIMITS = {"lowering_weight": (0, 1)}

# What differs by environment; a flag on the command line wins.
TUNED = {}

TD_LAMBDA = 0.5  # λ: 0 trusts the target network after one step, 1 the rewards of the window


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(inputs, hidden), nn.ReLU(inplace=True)),
        *(nn.Linear(hidden, hidden), nn.ReLU(inplace=True)),
        nn.Linear(hidden, outputs),
    )


class Agent(nn.Module):
    """All agents' values. forward: observations (N, A, obs_dim) → their best actions (N, A)."""

    def __init__(self, envs: vec_envs.MultiAgentVecEnv, args: Args):
        super().__init__()
        agents, obs_dim = envs.num_agents, envs.single_observation_space.shape[0]
        num_actions = int(envs.single_action_space.n)
        self.available_in_obs = envs.available_in_obs
        self.normalizer = Normalizer(agents * obs_dim, several=True)  # counts per agent: some leave
        self.reward_scaler = RewardScaler(args.num_envs, args.gamma)
        self.network = mlp(obs_dim + agents, args.hidden_size, num_actions)
        self.register_buffer("agent_id", torch.eye(agents))
        self.register_buffer("action_mask", envs.action_mask.clone())  # (A, num_actions)
        self.register_buffer("epsilon", torch.tensor(1.0))  # a tensor: worker processes share it
        self.register_buffer("lowering_weight", torch.tensor(args.lowering_weight))  # α

    def forward(self, obs: Tensor) -> Tensor:
        return self.values(obs).argmax(-1)

    def available(self, obs: Tensor) -> Tensor:
        """Available actions (..., A, num_actions) bool; in some environments obs ends with them."""
        mask = self.action_mask.expand(*obs.shape[:-1], -1)
        allowed = obs[..., -mask.shape[-1] :] > 0 if self.available_in_obs else mask
        return mask & (allowed | ~allowed.any(-1, keepdim=True))  # all if it has left (no effect)

    def values(self, obs: Tensor) -> Tensor:
        """Q_i of every action (..., A, num_actions), −10⁹ where it is not available."""
        x = self.normalizer(obs.flatten(-2)).view_as(obs)
        x = torch.cat((x, self.agent_id.expand(*x.shape[:-1], -1)), -1)
        return self.network(x).masked_fill(~self.available(obs), -1e9)


def epsilon_greedy(agent: Agent, obs: Tensor) -> Tensor:
    """Each agent's best action, with probability ε one drawn from those that it has, (N, A)."""
    best = agent(obs)
    random = Categorical(agent.available(obs).float()).sample()
    explores = torch.rand(best.shape, device=best.device) < agent.epsilon
    return torch.where(explores, random, best)


@torch.no_grad()
def collect(agent: Agent, envs: vec_envs.MultiAgentVecEnv, rollout: dict[str, Tensor]) -> None:
    """T steps in every environment by ε-greedy actions, each agent on its own."""
    for t in range(len(rollout["obs"])):
        obs = envs.obs
        action = epsilon_greedy(agent, obs)
        rollout["obs"][t] = obs
        rollout["action"][t] = action
        rollout["alive"][t] = envs.alive
        _, reward, terminated, truncated, info = envs.step(action)
        rollout["reward"][t] = reward
        rollout["next_obs"][t] = info["final_obs"]  # never the first one of a new episode
        rollout["next_alive"][t] = info["final_alive"]
        rollout["terminated"][t] = terminated
        rollout["done"][t] = terminated | truncated
        rollout["episode_return"][t] = info["episode_return"]
        rollout["episode_length"][t] = info["episode_length"]


def lambda_returns(reward, next_value, terminated, done, gamma: float) -> Tensor:
    """y_t = r_t + γ (1 − terminated_t) [ (1 − λ_t) next_value_t + λ_t y_{t+1} ], all (T, B).

    λ_t = λ (1 − done_t), and 0 at the last step of a window.
    """
    discount = gamma * (~terminated).to(reward)
    decay = TD_LAMBDA * (~done).to(reward)
    returns, following = torch.empty_like(reward), next_value[-1]
    for t in reversed(range(len(reward))):
        following = torch.lerp(next_value[t], following, decay[t])
        returns[t] = following = reward[t] + discount[t] * following
    return returns


def mix(q: Tensor) -> Tensor:
    """Q_tot (T, B) of the agents' values (T, B, A)."""
    return q.sum(-1)


@torch.no_grad()
def td_target(agent: Agent, target: Agent, batch: dict[str, Tensor], args: Args) -> Tensor:
    """y (T, B): the target network's value of the actions that the learned one prefers."""
    best = agent(batch["next_obs"]).unsqueeze(-1)
    next_q = target.values(batch["next_obs"]).gather(-1, best).squeeze(-1)  # (T, B, A)
    next_value = mix(next_q * batch["next_alive"])
    reward = agent.reward_scaler.scale(batch["reward"].sum(-1))  # of the team, by the present std
    return lambda_returns(reward, next_value, batch["terminated"], batch["done"], args.gamma)


def td_loss(agent: Agent, target: Agent, batch: dict, args: Args) -> tuple[Tensor, dict]:
    """E[ w ( Q_tot − y )² ] of some windows (T, B, ...), and what to log of it."""
    q = agent.values(batch["obs"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    value = mix(q * batch["alive"])  # (T, B); an agent that left counts 0
    error = value - td_target(agent, target, batch, args)
    weight = torch.where(error > 0, agent.lowering_weight, 1.0)
    loss = (weight * error.square()).mean()
    return loss, {"td": loss, "value": value.mean()}


@torch.no_grad()
def soft_update(target: nn.Module, network: nn.Module, tau: float) -> None:
    """θ̄ ← (1 − τ) θ̄ + τ θ"""
    for theirs, ours in zip(target.parameters(), network.parameters(), strict=True):
        theirs.lerp_(ours, tau)


def update(agent: Agent, target: Agent, optimizer, batch: dict, args: Args) -> dict:
    """One gradient step, one of the target network -> what to log."""
    loss, losses = td_loss(agent, target, batch, args)
    optimizer.zero_grad()
    loss.backward()
    average_gradients(agent)
    norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    soft_update(target, agent, args.tau)
    return losses | {"grad_norm": norm}


def schedule(agent: Agent, optimizer: torch.optim.Optimizer, step: int, args: Args) -> None:
    """The learning rate, ε and α from now on, each linear in time."""
    progress = step / args.total_steps
    optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - progress)
    explored = min(progress / max(args.exploration_fraction, 1e-9), 1)
    agent.epsilon.fill_(1 - (1 - args.final_epsilon) * explored)
    first, rise = args.lowering_weight, min(2 * progress, 1)  # rise: complete at half of the run
    agent.lowering_weight.fill_(first + (1 - first) * rise)


def train(args: Args) -> Result:
    run = Run(args, __file__, LIMITS)
    args = run.args
    workers = Workers(run, collect, "discrete", multi_agent=True)
    agent = Agent(workers.envs, args).to(run.device)
    target = copy.deepcopy(agent).requires_grad_(False)
    target.normalizer = agent.normalizer  # both see the same observations
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, fused=True)
    learn = run.compile(update)  # compiled in long runs (--compile)
    agents = (workers.envs.num_agents,)
    rollout = workers.start(agent, args.num_steps, alive=agents, next_alive=agents)
    replay = ReplayBuffer(run, rollout, args.buffer_size)
    step = run.start(
        agent=agent, target=target, optimizer=optimizer, workers=workers, replay=replay
    )

    while step < args.total_steps:
        schedule(agent, optimizer, step, args)
        rollout = workers.collect()
        replay.add(rollout)
        agent.normalizer.update(rollout["obs"].flatten(-2), rollout["alive"])
        agent.reward_scaler(rollout["reward"].sum(-1), rollout["done"])  # updates its statistics
        before, step = step, step + args.num_steps * args.num_envs * run.world_size
        for _ in range(args.updates):
            batch = replay.windows(args.batch_size, args.num_steps)
            losses = learn(agent, target, optimizer, batch, args)

        run.log_episodes(step, rollout)
        if step // args.log_every > before // args.log_every:
            run.log(step, losses, replay_size=len(replay))
        run.evaluate(step)
        run.checkpoint(step)
    return run.finish(step)


if __name__ == "__main__":
    train(parse(Args, TUNED))
