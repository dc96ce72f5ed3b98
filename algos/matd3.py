"""Multi-agent TD3 (MATD3): maddpg.py with two critics an agent, of which the lower one counts.

Ackermann, Gabler, Osa, Sugiyama 2019, arXiv:1910.01465: maddpg.py plus TD3's three changes
(Fujimoto, van Hoof, Meger 2018, arXiv:1802.09477), since critics overestimate here, too:

    y^i    = r^i + γ (1 − terminated) min_k Q̄^i_k( x', ã¹, …, ãᴬ ) ,    ã^i = μ̄^i(o'^i) + noise
    L(φ^i) = Σ_k E[ ( Q^i_k(x, a¹ … aᴬ) − y^i )² ]
    L(θ^i) = − E[ Q^i_1(x, a¹ …, μ^i(o^i), … aᴬ) ]
                                     discrete actions: + 1e-4 of the mean squared logit

    python algos/matd3.py --env SpeakerListener              discrete actions
    python algos/matd3.py --env SpreadContinuous             continuous actions (Box)
    python algos/matd3.py --env pettingzoo:mpe2.simple_tag_v3          three hunt one

Evaluation prints the sum of the rewards over agents and steps (also where agents are opponents),
and beside it what simple policies have there.

What differs from maddpg.py, each where it stands:
- `Agent`: two sets of critics.
- `critic_loss`: the lower of the two target values; noise on the target's continuous actions
  (discrete ones have that of Gumbel-softmax).
- `update`: the actors and the target networks move at every --policy-delay-th update only.
"""

import copy
from dataclasses import dataclass

import gymnasium
import torch
from torch import Tensor, nn

import vec_envs
from algos.worker_learner import (
    ReplayArgs,
    ReplayBuffer,
    Result,
    Run,
    Workers,
    flatten,
    gradient_step,
    mean_over_learners,
    parse,
)


@dataclass
class Args(ReplayArgs):
    """MATD3 on any environment of vec_envs with several agents."""

    env: str = "SpeakerListener"
    """environment: a name of vec_envs (Spread, SpeakerListener), or pettingzoo:package.module"""
    horizon: int = 5
    """steps of each environment between updates"""
    utd_ratio: float = 0.02
    """updates per environment step"""
    batch_size: int = 1024
    """steps, of all agents, of one update"""
    buffer_size: int = 200_000
    """environment steps in the replay buffer"""
    warmup_steps: int = 5000
    """steps before the first update"""
    learning_rate: float = 1e-3
    """of Adam, for actors and critics, annealed linearly to zero"""
    discount: float = 0.95
    """γ"""
    polyak: float = 0.01
    """τ: how far the target networks move at each update of the actors"""
    exploration_noise: float = 0.3
    """standard deviation of the noise on continuous actions, in units of half their range"""
    target_noise: float = 0.2
    """standard deviation of the noise on the target's continuous actions, in the same units"""
    target_noise_clip: float = 0.5
    """where that noise is cut"""
    policy_delay: int = 2
    """updates of the critics for one of the actors"""
    logit_cost: float = 1e-4
    """weight of the mean squared output of the actors: the more, the longer they stay undecided"""
    reward_scale: float = 0.1
    """factor of all rewards"""
    max_grad_norm: float = 0.5
    """gradients longer than this are shortened to it"""
    hidden_size: int = 64
    """width of the two hidden layers of actors and critics"""
    log_every: int = 5000


LIMITS = {
    **dict.fromkeys(("horizon", "batch_size", "buffer_size", "hidden_size"), (1, None)),
    "policy_delay": (1, None),
    **dict.fromkeys(("discount", "polyak"), (0, 1)),
    "max_grad_norm": (1e-9, None),
}

# What differs by environment, as in the tables of papers; a flag on the command line wins.
TUNED = {}


class Networks(nn.Module):
    """`count` networks, each inputs → hidden → hidden → outputs, ReLU, as one batched network.

    forward: (count, B, inputs), or (B, inputs) for all of them → (count, B, outputs).
    """

    def __init__(self, count: int, inputs: int, hidden: int, outputs: int):
        super().__init__()
        sizes = (inputs, hidden), (hidden, hidden), (hidden, outputs)
        for layer, (rows, columns) in enumerate(sizes, 1):  # initial values as nn.Linear's
            for name, shape in (("weight", (rows, columns)), ("bias", (1, columns))):
                values = torch.empty(count, *shape).uniform_(-(rows**-0.5), rows**-0.5)
                self.register_parameter(f"{name}{layer}", nn.Parameter(values))

    def forward(self, x: Tensor) -> Tensor:
        w1, b1, w2, b2, w3, b3 = self.parameters()
        x = torch.baddbmm(b1, x.expand(len(w1), -1, -1), w1).relu()
        return torch.baddbmm(b3, torch.baddbmm(b2, x, w2).relu(), w3)


class Agent(nn.Module):
    """Actors and critics. forward: observations (N, A, obs_dim) → the env's actions, no noise.

    Inside, an action is (…, A, act_dim): one-hot, or in units where the action range is [−1, 1].
    """

    def __init__(self, envs: vec_envs.VecEnv, args: Args):
        super().__init__()
        agents, obs_dim = envs.num_agents, envs.single_observation_space.shape[0]
        action_space = envs.single_action_space
        self.discrete = isinstance(action_space, gymnasium.spaces.Discrete)
        outputs = int(action_space.n) if self.discrete else action_space.shape[0]
        self.available_in_obs = envs.available_in_obs
        self.exploration_noise = args.exploration_noise
        self.actors = Networks(agents, obs_dim, args.hidden_size, outputs)
        seen = agents * (obs_dim + outputs)
        self.critics = nn.ModuleList(Networks(agents, seen, args.hidden_size, 1) for _ in range(2))
        self.register_buffer("action_mask", envs.action_mask.clone())  # (A, outputs)
        self.register_buffer("own", torch.eye(agents, dtype=torch.bool).view(agents, 1, agents, 1))
        if not self.discrete:
            low, high = torch.tensor(action_space.low), torch.tensor(action_space.high)
            self.register_buffer("action_center", (high + low) / 2)
            self.register_buffer("action_scale", (high - low) / 2)

    def forward(self, obs: Tensor) -> Tensor:
        output = self.outputs(obs)
        return output.argmax(-1) if self.discrete else self.to_env(output.tanh())

    def available(self, obs: Tensor) -> Tensor:
        """The actions that there are, or entries of an action, (B, A, outputs) bool."""
        mask = self.action_mask.expand(*obs.shape[:-1], -1)
        return mask & (obs[..., -mask.shape[-1] :] > 0) if self.available_in_obs else mask

    def outputs(self, obs: Tensor) -> Tensor:
        """Logits, or actions before tanh, (B, A, outputs) for observations (B, A, obs_dim)."""
        output = self.actors(obs.transpose(0, 1)).transpose(0, 1)
        return output.masked_fill(~self.available(obs), -1e9 if self.discrete else 0.0)

    def act(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Differentiable actions (B, A, outputs), and the outputs that they come from."""
        output = self.outputs(obs)
        if not self.discrete:
            return output.tanh(), output
        soft = (output - torch.empty_like(output).exponential_().log()).softmax(-1)
        hard = nn.functional.one_hot(soft.argmax(-1), soft.shape[-1]).to(soft)
        return hard + soft - soft.detach(), output

    def explore(self, obs: Tensor) -> Tensor:
        """What to store: numbers of actions (B, A), or noisy actions (B, A, outputs)."""
        action, _ = self.act(obs)
        if self.discrete:
            return action.argmax(-1)
        noise = self.exploration_noise * torch.randn_like(action)
        return (action + noise * self.available(obs)).clamp(-1, 1)

    def stored(self, action: Tensor) -> Tensor:
        """What was stored, as the critics see it."""
        if not self.discrete:
            return action
        return nn.functional.one_hot(action, self.action_mask.shape[1]).float()

    def to_env(self, action: Tensor) -> Tensor:
        return action if self.discrete else self.action_center + self.action_scale * action

    def values(self, obs: Tensor, action: Tensor, number: int) -> Tensor:
        """Q^i_k (A, B); action (B, A, outputs), or (A, B, A, outputs), one for each critic."""
        x = obs.flatten(-2).expand(*action.shape[:-2], -1)
        return self.critics[number](torch.cat((x, action.flatten(-2)), -1)).squeeze(-1)


@torch.no_grad()
def collect(agent: Agent, envs: vec_envs.VecEnv, rollout: dict[str, Tensor]) -> None:
    """T steps of the present policies, with exploration, in every env."""
    for t in range(len(rollout["obs"])):
        obs = envs.obs
        action = agent.explore(obs)
        rollout["obs"][t] = obs
        rollout["action"][t] = action
        rollout["alive"][t] = envs.alive
        _, reward, terminated, truncated, info = envs.step(agent.to_env(action))
        done = terminated | truncated
        rollout["reward"][t] = reward
        rollout["next_obs"][t] = info["final_obs"]
        rollout["next_alive"][t] = torch.where(done.unsqueeze(-1), rollout["alive"][t], envs.alive)
        rollout["terminated"][t] = terminated
        rollout["done"][t] = done
        rollout["episode_return"][t] = info["episode_return"]
        rollout["episode_length"][t] = info["episode_length"]


def masked_mean(x: Tensor, alive: Tensor) -> Tensor:
    """The mean of x (A, B) over the agents that live, alive (B, A) 1 or 0; a learner's part."""
    return (x * alive.T).sum() / mean_over_learners(alive.sum()).clamp(min=1)


def critic_loss(agent: Agent, target: Agent, batch: dict[str, Tensor], args: Args) -> Tensor:
    """Σ_k E[ ( Q^i_k(x, a) − y^i )² ], the mean over agents."""
    next_obs = batch["next_obs"]
    with torch.no_grad():
        next_action, _ = target.act(next_obs)
        if not agent.discrete:
            noise = args.target_noise * torch.randn_like(next_action)
            noise = noise.clamp(-args.target_noise_clip, args.target_noise_clip)
            next_action = (next_action + noise * target.available(next_obs)).clamp(-1, 1)
        next_values = (target.values(next_obs, next_action, k) for k in (0, 1))
        next_value = torch.minimum(*next_values) * batch["next_alive"].T
        future = args.discount * next_value * ~batch["terminated"]  # (A, B)
        y = args.reward_scale * batch["reward"].T + future
    action = agent.stored(batch["action"])
    values = (agent.values(batch["obs"], action, k) for k in (0, 1))
    return sum(masked_mean((value - y).square(), batch["alive"]) for value in values)


def actor_loss(agent: Agent, batch: dict[str, Tensor], args: Args) -> Tensor:
    """− E[ Q^i_1(x, …, μ^i(o^i), …) ], the mean over agents, and the cost of large outputs."""
    action, output = agent.act(batch["obs"])
    joint = torch.where(agent.own, action, agent.stored(batch["action"]))  # (A, B, A, outputs)
    value = agent.values(batch["obs"], joint, 0)
    available = agent.available(batch["obs"])
    cost = torch.where(available, output.square(), 0.0).sum(-1) / available.sum(-1).clamp(min=1)
    return masked_mean(args.logit_cost * cost.T - value, batch["alive"])


@torch.no_grad()
def move_target(target: nn.Module, network: nn.Module, polyak: float) -> None:
    """θ̄ ← (1 − τ) θ̄ + τ θ"""
    for theirs, ours in zip(target.parameters(), network.parameters(), strict=True):
        theirs.lerp_(ours, polyak)


def update(agent, target, optimizers, batch, gradients, number: int, args: Args) -> dict:
    """Update `number` of critics and actors -> what to log."""
    critic_optimizer, actor_optimizer = optimizers
    critic_gradient, actor_gradient = gradients
    losses = {}
    gradient, losses["critic"] = critic_gradient(agent, target, batch, args)
    gradient_step(gradient, critic_optimizer, args.max_grad_norm)
    if number % args.policy_delay == 0:
        gradient, losses["actor"] = actor_gradient(agent, batch, args)
        gradient_step(gradient, actor_optimizer, args.max_grad_norm)
        move_target(target, agent, args.polyak)
    return losses


def train(args: Args) -> Result:
    run = Run(args, __file__, LIMITS)
    args = run.args
    workers = Workers(run, collect, multi_agent=True)
    agent = Agent(workers.envs, args).to(run.device)
    target = copy.deepcopy(agent).requires_grad_(False)
    learning_rate = torch.tensor(args.learning_rate, device=run.device)
    optimizers = critic_optimizer, actor_optimizer = [
        torch.optim.Adam([flatten(network)], learning_rate, fused=True)
        for network in (agent.critics, agent.actors)
    ]
    agents = (workers.envs.num_agents,)
    rollout = workers.start(agent, args.horizon, alive=agents, next_alive=agents)
    replay = ReplayBuffer(run, rollout, args.buffer_size)
    gradients = run.gradient(critic_loss, agent.critics), run.gradient(actor_loss, agent.actors)
    step = run.start(
        agent=agent, target=target, critic_optimizer=critic_optimizer,
        actor_optimizer=actor_optimizer, workers=workers, replay=replay,
    )  # fmt: skip

    losses: dict[str, Tensor] = {}  # of the last updates
    while step < args.total_steps:
        left = 1 - step / args.total_steps
        for optimizer in (critic_optimizer, actor_optimizer):
            optimizer.param_groups[0]["lr"].fill_(args.learning_rate * left)
        rollout = workers.collect()
        replay.add(rollout)
        before, step = step, step + args.horizon * args.num_envs * run.learners
        if step >= args.warmup_steps and len(replay) >= min(args.warmup_steps, args.buffer_size):
            for number in range(int(before * args.utd_ratio), int(step * args.utd_ratio)):
                batch = replay.sample(args.batch_size)
                losses |= update(agent, target, optimizers, batch, gradients, number, args)

        run.log_episodes(step, rollout)
        if step // args.log_every > before // args.log_every:
            run.log(step, losses, replay_size=len(replay))
        run.evaluate(step)
        run.checkpoint(step)
    return run.finish(step)


if __name__ == "__main__":
    train(parse(Args, TUNED))
