"""QMIX: vdn.py with a mixing network in place of the sum; it sees the state and is monotonic.

Rashid, Samvelyan, Schroeder de Witt, Farquhar, Foerster, Whiteson 2018, arXiv:1803.11485. The best
joint action still consists of each agent's own best one if Q_tot never falls when a Q_i grows; how
much each Q_i counts may depend on the state s and on the others:

    Q_tot(o, a, s) = w₂(s)ᵀ elu( W₁(s) [Q_1 … Q_A] + b₁(s) ) + b₂(s) ,     W₁, w₂ ≥ 0
    ∂Q_tot / ∂Q_i ≥ 0
    L(θ)           = E[ ( Q_tot(o_t, a_t, s_t) − y_t )² ]                  y_t as in vdn.py

    python algos/qmix.py --env Spread
    python algos/qmix.py --env lbforaging:Foraging-8x8-2p-2f-coop-v3

What differs from vdn.py:
- `Mixer`: hypernetworks compute its weights from the state: W₁, b₁, w₂ by one linear layer each
  (absolute values make W₁ and w₂ ≥ 0), b₂ by two layers.
- `collect` stores the state; `td_target` and `td_loss` give it, normalised by running
  statistics, to the mixing network.
- All errors have the same weight: the mixing network needed no w_t. γ is 0.9 (0.95 there),
  1.5 M steps (2 M).
What differs from the paper (in brackets): what vdn.py lists, except w_t (a GRU that also sees the
agent's last action; batches of 32 episodes; one-step targets by max_a Q̄_tot; RMSProp at 5e-4);
γ = 0.9 (0.99); the mixing network begins close to Σ_i Q_i + A (see `Mixer`).
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
    """QMIX on any environment with several agents and discrete actions."""

    env: str = "Spread"
    total_steps: int = 1_500_000
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
    gamma: float = 0.9
    """γ, the discount factor"""
    tau: float = 0.01
    """τ: how far the target network moves at each of its updates"""
    final_epsilon: float = 0.05
    """final ε, the probability that an agent's action is a random one"""
    exploration_fraction: float = 0.3
    """fraction of the run during which ε goes from 1 to --final-epsilon"""
    max_grad_norm: float = 10.0
    """maximum norm of the gradient; a larger gradient is scaled down to it"""
    hidden_size: int = 64
    """width of the two hidden layers of the agents' network"""
    mixing_size: int = 32
    """width of the mixing network"""


LIMITS = {"mixing_size": (1, None)}

# What differs by environment; a flag on the command line wins.
TUNED = {}

TD_LAMBDA = 0.5  # λ: 0 trusts the target network after one step, 1 the rewards of the window


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(inputs, hidden), nn.ReLU(inplace=True)),
        *(nn.Linear(hidden, hidden), nn.ReLU(inplace=True)),
        nn.Linear(hidden, outputs),
    )


class Mixer(nn.Module):
    """Q_tot (...) of the agents' values q (..., A) and the normalised state (..., state_dim).

    At first W₁ ≈ 1 / A, w₂ ≈ A / width and b₁ ≈ 1: b₁ adds A to Q_tot and keeps elu nearly linear.
    """

    def __init__(self, agents: int, state_dim: int, width: int):
        super().__init__()
        self.shape = agents, width
        self.w1 = nn.Linear(state_dim, agents * width)
        self.b1 = nn.Linear(state_dim, width)
        self.w2 = nn.Linear(state_dim, width)
        self.b2 = nn.Sequential(nn.Linear(state_dim, width), nn.ReLU(), nn.Linear(width, 1))
        for layer, bias in ((self.w1, 1 / agents), (self.b1, 1), (self.w2, agents / width)):
            nn.init.orthogonal_(layer.weight, 0.1 * bias)
            nn.init.constant_(layer.bias, bias)

    def forward(self, q: Tensor, state: Tensor) -> Tensor:
        w1 = self.w1(state).abs().unflatten(-1, self.shape)  # (..., A, width)
        hidden = nn.functional.elu((q.unsqueeze(-2) @ w1).squeeze(-2) + self.b1(state))
        return (hidden * self.w2(state).abs()).sum(-1) + self.b2(state).squeeze(-1)


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
        self.state_normalizer = Normalizer(envs.state_dim)
        self.mixer = Mixer(agents, envs.state_dim, args.mixing_size)
        self.register_buffer("agent_id", torch.eye(agents))
        self.register_buffer("action_mask", envs.action_mask.clone())  # (A, num_actions)
        self.register_buffer("epsilon", torch.tensor(1.0))  # a tensor: worker processes share it

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
        rollout["state"][t] = envs.state
        _, reward, terminated, truncated, info = envs.step(action)
        rollout["reward"][t] = reward
        rollout["next_obs"][t] = info["final_obs"]  # never the first one of a new episode
        rollout["next_alive"][t] = info["final_alive"]
        rollout["next_state"][t] = info["final_state"]
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


def mix(agent: Agent, q: Tensor, state: Tensor) -> Tensor:
    """Q_tot (T, B) of the agents' values (T, B, A) and the state (T, B, state_dim)."""
    return agent.mixer(q, agent.state_normalizer(state))


@torch.no_grad()
def td_target(agent: Agent, target: Agent, batch: dict[str, Tensor], args: Args) -> Tensor:
    """y (T, B): the target network's value of the actions that the learned one prefers."""
    best = agent(batch["next_obs"]).unsqueeze(-1)
    next_q = target.values(batch["next_obs"]).gather(-1, best).squeeze(-1)  # (T, B, A)
    next_value = mix(target, next_q * batch["next_alive"], batch["next_state"])
    reward = agent.reward_scaler.scale(batch["reward"].sum(-1))  # of the team, by the present std
    return lambda_returns(reward, next_value, batch["terminated"], batch["done"], args.gamma)


def td_loss(agent: Agent, target: Agent, batch: dict, args: Args) -> tuple[Tensor, dict]:
    """E[ ( Q_tot − y )² ] of some windows (T, B, ...), and what to log of it."""
    q = agent.values(batch["obs"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    value = mix(agent, q * batch["alive"], batch["state"])  # (T, B); an agent that left counts 0
    error = value - td_target(agent, target, batch, args)
    loss = error.square().mean()
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
    """The learning rate and ε from now on, each linear in time."""
    progress = step / args.total_steps
    optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - progress)
    explored = min(progress / max(args.exploration_fraction, 1e-9), 1)
    agent.epsilon.fill_(1 - (1 - args.final_epsilon) * explored)


def train(args: Args) -> Result:
    run = Run(args, __file__, LIMITS)
    args = run.args
    workers = Workers(run, collect, "discrete", multi_agent=True)
    agent = Agent(workers.envs, args).to(run.device)
    target = copy.deepcopy(agent).requires_grad_(False)
    target.normalizer = agent.normalizer  # both see the same observations
    target.state_normalizer = agent.state_normalizer
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, fused=True)
    learn = run.compile(update)  # compiled in long runs (--compile)
    agents, state = (workers.envs.num_agents,), (workers.envs.state_dim,)
    rollout = workers.start(
        agent, args.num_steps, alive=agents, next_alive=agents, state=state, next_state=state
    )
    replay = ReplayBuffer(run, rollout, args.buffer_size)
    step = run.start(
        agent=agent, target=target, optimizer=optimizer, workers=workers, replay=replay
    )

    while step < args.total_steps:
        schedule(agent, optimizer, step, args)
        rollout = workers.collect()
        replay.add(rollout)
        agent.normalizer.update(rollout["obs"].flatten(-2), rollout["alive"])
        agent.state_normalizer.update(rollout["state"])
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
