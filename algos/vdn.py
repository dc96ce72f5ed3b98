"""Value decomposition networks (VDN): agents that share a reward learn values which add up to it.

Sunehag et al. 2017, arXiv:1706.05296. Each agent i has a value Q_i of its own actions, by what it
sees, h^i (with --recurrent: has seen); the team's value is their sum, so that the best joint
action is everybody's own best one, and nobody needs the others to find it:

    Q_tot(h, a) = Σ_i Q_i(h^i, a^i)
    y_t    = r_t + γ (1 − terminated_t) [ (1 − λ (1 − done_t)) q_{t+1} + λ (1 − done_t) y_{t+1} ]
    q_{t+1} = Q̄_tot(h', argmax_a Q(h', a))              double Q-learning; Q̄: the target network
    L(θ)   = E[ w α ( Q_tot(h_t, a_t) − y_t )² ]              r: the sum of all agents' rewards
    α      = 1 where the value is too low, less where it is too high (Rashid 2020, arXiv:2006.10800)
    w      = 1, or the importance weight of prioritised replay

    python algos/vdn.py --env Spread
    python algos/vdn.py --env lbforaging:Foraging-8x8-2p-2f-coop-v3

Evaluation prints the sum of the rewards over agents and steps, and beside it what simple
policies have there.

What makes it work, each where it stands:
- `--updates`: many gradient steps after each rollout, on a few stretches each.
- `Agent`: one network for all agents, told apart by their number, with --recurrent a GRU; actions
  that an agent does not have, or cannot take now, are never the best.
- `stretches`: the replay buffer has whole ones of `horizon` steps, each with the memory that its
  first step had (Kapturowski 2019, R2D2); where an episode ends inside, the memory begins anew.
- `td_loss`: a truncated episode bootstraps from its true last observation, a terminated one does
  not. --prioritized draws stretches by their TD errors, --td-lambda looks further than a step.
- `td_loss`, α: where it takes two, an agent that does its part earns nothing while the other does
  not, and a value that falls as readily as it rises unlearns the part before both have found it.
  Such optimism is for finding out: in the second half of a run α is 1.
- `RewardScaler`: rewards in units of the standard deviation of the return.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import vec_envs
from algos.worker_learner import (
    ReplayBuffer,
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
    """VDN on any environment of vec_envs with several agents and discrete actions."""

    env: str = "Spread"
    """environment: a name of vec_envs (Spread, SpeakerListener), or pettingzoo:package.module"""
    total_steps: int = 2_000_000
    horizon: int = 25
    """steps of each environment in a rollout, and in a stretch of the replay buffer"""
    updates: int = 100
    """gradient steps after each rollout"""
    batch_size: int = 8
    """stretches of one gradient step"""
    buffer_size: int = 2000
    """stretches in the replay buffer, rounded up to a multiple of --num-envs"""
    save_replay: bool = True
    """keep the replay buffer in checkpoints: a resumed run goes on exactly"""
    prioritized: bool = False
    """replay in proportion to the TD errors (Schaul 2016) instead of uniformly"""
    learning_rate: float = 1e-3
    """of Adam, annealed linearly to zero"""
    discount: float = 0.95
    """γ: near 1 the values, of 1 / (1 − γ) rewards, are learnt late; far from it, what comes after
    the first success counts for nothing"""
    lowering_weight: float = 0.1
    """α in the beginning: weight of errors that lower a value; half way it is 1, no optimism"""
    td_lambda: float = 0.5
    """λ: 0 trusts the target network after one step, 1 the rewards until the stretch ends"""
    double_q: bool = True
    """the target network values the action that the other one prefers"""
    target_update: float = 0.01
    """τ: how far the target network goes towards the other at each update"""
    final_epsilon: float = 0.05
    """ε in the end: how often an agent's action is a random one"""
    exploration_fraction: float = 0.3
    """part of the run during which ε goes from 1 to --final-epsilon"""
    max_grad_norm: float = 10.0
    """gradients longer than this are shortened to it"""
    recurrent: bool = False
    """agents remember (GRU): slower, for where they do not see all that counts"""
    hidden_size: int = 64
    """width of the agents' layers"""


LIMITS = {
    **dict.fromkeys(("horizon", "updates", "batch_size", "buffer_size", "hidden_size"), (1, None)),
    **dict.fromkeys(("discount", "td_lambda", "target_update", "lowering_weight"), (0, 1)),
    **dict.fromkeys(("final_epsilon", "exploration_fraction"), (0, 1)),
    "max_grad_norm": (1e-9, None),
}

# What differs by environment, as in the tables of papers; a flag on the command line wins.
TUNED = {}


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


class RewardScaler(nn.Module):
    """Rewards divided by the standard deviation of the discounted return, G ← γ G + r."""

    def __init__(self, num_envs: int, discount: float):
        super().__init__()
        self.discount = discount
        self.register_buffer("discounted_return", torch.zeros(num_envs))
        self.statistics = Normalizer(1)

    def forward(self, reward: Tensor, done: Tensor) -> Tensor:  # both (T, N)
        returns = torch.empty_like(reward)
        for t in range(len(reward)):
            self.discounted_return.mul_(self.discount).add_(reward[t])
            returns[t] = self.discounted_return
            self.discounted_return.masked_fill_(done[t], 0)
        self.statistics.update(returns.unsqueeze(-1))
        return (reward * torch.rsqrt(self.statistics.var + 1e-8)).clamp(-10, 10)


class Agent(nn.Module):
    """All agents' values. forward: observations (N, A, obs_dim) → the best actions (N, A).

    `forward` goes through episodes step by step and remembers; `start_episodes` forgets.
    """

    def __init__(self, envs: vec_envs.VecEnv, args: Args):
        super().__init__()
        agents, obs_dim = envs.num_agents, envs.single_observation_space.shape[0]
        self.available_in_obs, self.recurrent = envs.available_in_obs, args.recurrent
        self.hidden_size, self.hidden = args.hidden_size, None
        self.normalizer = Normalizer(agents * obs_dim)  # agents that differ have each their own
        self.reward_scaler = RewardScaler(args.num_envs, args.discount)
        self.encoder = nn.Linear(obs_dim + agents, args.hidden_size)
        layer = nn.GRUCell if args.recurrent else nn.Linear
        self.memory = layer(args.hidden_size, args.hidden_size)
        self.head = nn.Linear(args.hidden_size, int(envs.single_action_space.n))
        self.register_buffer("number", torch.eye(agents))
        self.register_buffer("action_mask", envs.action_mask.clone())  # (A, n)
        self.register_buffer("epsilon", torch.tensor(1.0))
        self.register_buffer("lowering_weight", torch.tensor(args.lowering_weight))

    def start_episodes(self) -> None:
        self.hidden = None

    def forward(self, obs: Tensor) -> Tensor:
        hidden = self.hidden
        if hidden is None:
            hidden = obs.new_zeros(*obs.shape[:2], self.hidden_size)
        q, hidden = self.step(obs, hidden)
        self.hidden = hidden if self.recurrent else None
        return q.argmax(-1)

    def available(self, obs: Tensor) -> Tensor:
        """The actions that there are now, (..., A, n) bool."""
        mask = self.action_mask.expand(*obs.shape[:-1], -1)
        return mask & (obs[..., -mask.shape[-1] :] > 0) if self.available_in_obs else mask

    def encode(self, obs: Tensor) -> Tensor:
        x = self.normalizer(obs.flatten(-2)).view_as(obs)
        x = torch.cat((x, self.number.expand(*x.shape[:-1], -1)), -1)  # who it is
        return self.encoder(x).relu()

    def remember(self, x: Tensor, hidden: Tensor) -> Tensor:
        """One step of the memory: both (..., A, hidden_size)."""
        if not self.recurrent:
            return self.memory(x).relu()
        return self.memory(x.flatten(0, -2), hidden.flatten(0, -2)).view_as(hidden)

    def values(self, obs: Tensor, hidden: Tensor) -> Tensor:
        """Q_i of every action (..., A, n), hardly anything where an action is not available."""
        return self.head(hidden).masked_fill(~self.available(obs), -1e9)

    def step(self, obs: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.remember(self.encode(obs), hidden)
        return self.values(obs, hidden), hidden

    def unroll(self, obs: Tensor, hidden: Tensor, done: Tensor) -> tuple[Tensor, Tensor]:
        """Stretches obs (T, B, A, obs_dim) from hidden (B, A, H) -> Q (T, B, A, n), memories."""
        if not self.recurrent:
            return self.step(obs, hidden)  # which does not look at `hidden`
        x, states = self.encode(obs), []
        for t in range(len(obs)):
            hidden = self.remember(x[t], hidden)
            states.append(hidden)
            hidden = hidden * ~done[t].view(-1, 1, 1)  # the next episode begins without
        memories = torch.stack(states)
        return self.values(obs, memories), memories

    def mix(self, q: Tensor) -> Tensor:
        """Q_tot (...) of the agents' values (..., A)."""
        return q.sum(-1)


@torch.no_grad()
def collect(agent: Agent, envs: vec_envs.VecEnv, rollout: dict[str, Tensor]) -> None:
    """T steps of every env; each agent's action is with probability ε a random one, else its best.

    The rollout goes on from the memory at the end of the one before, which it still holds.
    """
    hidden = rollout["next_hidden"][-1].clone()  # (N, A, H)
    for t in range(len(rollout["obs"])):
        obs = envs.obs
        rollout["hidden"][t] = hidden
        rollout["alive"][t] = envs.alive
        q, hidden = agent.step(obs, hidden)
        chance = torch.rand_like(q).masked_fill(~agent.available(obs), -1)
        explores = torch.rand_like(q[..., 0]) < agent.epsilon
        action = torch.where(explores, chance.argmax(-1), q.argmax(-1))
        rollout["obs"][t] = obs
        rollout["action"][t] = action
        _, reward, terminated, truncated, info = envs.step(action)
        done = terminated | truncated
        hidden = hidden * ~done.view(-1, 1, 1)
        rollout["reward"][t] = reward
        rollout["next_obs"][t] = info["final_obs"]
        rollout["next_hidden"][t] = hidden
        rollout["next_alive"][t] = torch.where(done.unsqueeze(-1), rollout["alive"][t], envs.alive)
        rollout["terminated"][t] = terminated
        rollout["done"][t] = done
        rollout["episode_return"][t] = info["episode_return"]
        rollout["episode_length"][t] = info["episode_length"]


class Remembered:
    """What the agents remember at the end of a rollout, from where `collect` goes on."""

    def __init__(self, rollout: dict[str, Tensor]):
        self.hidden = rollout["next_hidden"][-1]  # (N, A, H), the rollout's own

    def end_episodes(self) -> None:
        self.hidden.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        return {"hidden": self.hidden.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.hidden.copy_(state["hidden"])


def stretches(rollout: dict[str, Tensor]) -> dict[str, Tensor]:
    """(T, N, ...) → (1, N, T, ...): to the replay buffer each env's T steps are one thing."""
    kept = {**rollout, "hidden": rollout["hidden"][:1]}  # of the memory: how it began
    del kept["next_hidden"]
    return {name: x.transpose(0, 1).unsqueeze(0) for name, x in kept.items()}


def lambda_returns(reward, next_value, terminated, done, args: Args) -> Tensor:
    """y_t of the docstring, all (T, B); the last step's y is that of λ = 0."""
    returns, following = torch.empty_like(reward), next_value[-1]
    for t in reversed(range(len(reward))):
        trace = args.td_lambda * (~done[t]).to(reward)
        future = (1 - trace) * next_value[t] + trace * following
        returns[t] = following = reward[t] + args.discount * future * ~terminated[t]
    return returns


@torch.no_grad()
def td_target(agent: Agent, target: Agent, batch: dict, memories: Tensor, args: Args) -> Tensor:
    """y (T, B): what the target network thinks of the actions that come next."""
    _, target_memories = target.unroll(batch["obs"], batch["hidden"][0], batch["done"])
    next_q, _ = target.step(batch["next_obs"], target_memories)
    chooser = agent.step(batch["next_obs"], memories)[0] if args.double_q else next_q
    next_q = next_q.gather(-1, chooser.argmax(-1, keepdim=True)).squeeze(-1)
    next_value = target.mix(next_q * batch["next_alive"])
    return lambda_returns(batch["reward"], next_value, batch["terminated"], batch["done"], args)


def td_loss(agent: Agent, target: Agent, batch: dict, weight: Tensor, args: Args):
    """E[ w α ( Q_tot − y )² ] of some stretches -> the loss, the TD errors (T, B), what to log."""
    q, memories = agent.unroll(batch["obs"], batch["hidden"][0], batch["done"])
    q = q.gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)  # (T, B, A)
    value = agent.mix(q * batch["alive"])  # (T, B); the dead add nothing
    error = value - td_target(agent, target, batch, memories.detach(), args)
    weight = torch.where(error > 0, agent.lowering_weight * weight, weight)  # (T, B), w α
    loss = (weight * error.square()).mean()
    return loss, error.detach(), {"td": loss, "value": value.mean()}


def update(agent: Agent, target: Agent, optimizer, replay, loss_gradient, args: Args):
    """One gradient step on stretches from the replay buffer -> what to log."""
    drawn = replay.sample(args.batch_size)
    index, weight, _ = (drawn.pop(name) for name in ("index", "weight", "discount"))  # (B,)
    batch = {name: x.transpose(0, 1) for name, x in drawn.items()}  # (T, B, ...)
    gradient, _, error, losses = loss_gradient(agent, target, batch, weight, args)
    losses["gradient_norm"] = gradient_step(gradient, optimizer, args.max_grad_norm)
    error = error.abs()  # of a stretch: the largest counts most (R2D2)
    replay.update_priorities(index, 0.9 * error.amax(0) + 0.1 * error.mean(0))
    return losses


def train(args: Args) -> Result:
    run = Run(args, __file__, LIMITS)
    args = run.args
    workers = Workers(run, collect, "discrete", multi_agent=True)
    agent = Agent(workers.envs, args).to(run.device)
    target = copy.deepcopy(agent)
    weights, target_weights = flatten(agent), flatten(target).detach()
    learning_rate = torch.tensor(args.learning_rate, device=run.device)
    optimizer = torch.optim.Adam([weights], learning_rate, fused=True)
    agents, memory = (workers.envs.num_agents,), (workers.envs.num_agents, args.hidden_size)
    rollout = workers.start(
        agent, args.horizon, alive=agents, next_alive=agents, hidden=memory, next_hidden=memory
    )
    first = stretches({**rollout, "reward": rollout["reward"].sum(-1)})
    size = max(args.buffer_size, args.num_envs * run.learners)  # one rollout at least
    replay = ReplayBuffer(run, first, size, prioritized=args.prioritized)
    loss_gradient = run.gradient(td_loss, agent)
    step = run.start(
        agent=agent, target=target, optimizer=optimizer, workers=workers, replay=replay,
        remembered=Remembered(rollout),
    )  # fmt: skip

    while step < args.total_steps:
        left = 1 - step / args.total_steps
        optimizer.param_groups[0]["lr"].fill_(args.learning_rate * left)
        explored = step / max(1, args.exploration_fraction * args.total_steps)
        agent.epsilon.fill_(max(args.final_epsilon, 1 - (1 - args.final_epsilon) * explored))
        half = min(2 * step / args.total_steps, 1)
        agent.lowering_weight.fill_(args.lowering_weight + (1 - args.lowering_weight) * half)
        rollout = workers.collect()
        step += args.horizon * args.num_envs * run.learners
        reward = agent.reward_scaler(rollout["reward"].sum(-1), rollout["done"])  # the team's
        replay.add(stretches({**rollout, "reward": reward}))
        agent.normalizer.update(rollout["obs"].flatten(-2))
        target.normalizer.load_state_dict(agent.normalizer.state_dict())
        for _ in range(args.updates):
            losses = update(agent, target, optimizer, replay, loss_gradient, args)
            target_weights.lerp_(weights.detach(), args.target_update)

        run.log_episodes(step, rollout)
        run.log(step, losses)
        run.evaluate(step)
        run.checkpoint(step)
    return run.finish(step)


if __name__ == "__main__":
    train(parse(Args, TUNED))
