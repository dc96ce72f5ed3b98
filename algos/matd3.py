"""Multi-agent TD3 (MATD3): maddpg.py with td3.py's two critics, target noise and delayed actors.

Ackermann, Gabler, Osa, Sugiyama 2019, arXiv:1910.01465. With td3.py's clipped noise on continuous
target actions, and none on discrete ones (these are drawn, as in maddpg.py),

    y^i    = r^i + γ (1 − terminated) min_k Q̄^i_k( x', ã¹, …, ãᴬ ) ,   ã^i = μ̄^i(o'^i) + noise
    L(φ^i) = Σ_k E[ ( Q^i_k(x, a¹ … aᴬ) − y^i )² ]
    L(θ^i) = − E[ Q^i_1(x, a¹ …, μ^i(o^i), … aᴬ) ]             after every d-th update of critics

    python algos/matd3.py --env SpreadContinuous

What differs from maddpg.py: `Critics`, the noise in `critic_loss`, and in `update` the delay of
actors and targets (`policy_delay`). From the paper: what maddpg.py lists; discrete ã has no noise.
"""

import copy
from dataclasses import dataclass

import gymnasium
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

import vec_envs
from algos.worker_learner import (
    ReplayArgs,
    ReplayBuffer,
    Result,
    Run,
    Workers,
    average_gradients,
    mean_over_learners,
    parse,
)


@dataclass
class Args(ReplayArgs):
    """MATD3 on any environment with several agents."""

    env: str = "SpeakerListener"
    num_steps: int = 5
    """steps of each environment between updates"""
    utd_ratio: float = 0.02
    """updates per environment step"""
    batch_size: int = 1024
    """environment steps of one update, each with all agents"""
    buffer_size: int = 200_000
    """capacity of the replay buffer, in environment steps"""
    warmup_steps: int = 5000
    """steps before the first update"""
    learning_rate: float = 1e-3
    """Adam's learning rate for actors and critics, annealed linearly to zero"""
    gamma: float = 0.95
    """γ, the discount factor"""
    tau: float = 0.01
    """τ: how far the target networks move at each of their updates"""
    exploration_noise: float = 0.3
    """σ of the noise on continuous actions, in units of half the action range"""
    target_noise: float = 0.2
    """σ̃ of the noise on the target actors' continuous actions"""
    target_noise_clip: float = 0.5
    """c: the absolute value to which the target noise is clipped"""
    policy_delay: int = 2
    """d: updates of the critics per update of actors and target networks"""
    logit_cost: float = 1e-4
    """weight of the mean squared logit of discrete actions"""
    reward_scale: float = 0.1
    """factor by which all rewards are multiplied"""
    max_grad_norm: float = 0.5
    """maximum norm of the gradient; a larger gradient is scaled down to it"""
    hidden_size: int = 64
    """width of the two hidden layers of actors and critics"""


# What differs by environment; a flag on the command line wins.
TUNED = {}


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(inputs, hidden), nn.ReLU(inplace=True)),
        *(nn.Linear(hidden, hidden), nn.ReLU(inplace=True)),
        nn.Linear(hidden, outputs),
    )


class Networks(nn.ModuleList):
    """One network per agent. forward: (A, B, inputs) → (B, A, outputs)."""

    def __init__(self, agents: int, inputs: int, hidden: int, outputs: int):
        super().__init__(mlp(inputs, hidden, outputs) for _ in range(agents))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([network(own) for network, own in zip(self, x, strict=True)], 1)


class Critics(nn.Module):
    """Two networks per agent, each (A, B, inputs) → (B, A, 1)."""

    def __init__(self, *sizes: int):
        super().__init__()
        self.q1, self.q2 = Networks(*sizes), Networks(*sizes)


class Agent(nn.Module):
    """Actors and critics. forward: observations (N, A, obs_dim) → the environment's actions."""

    def __init__(self, envs: vec_envs.MultiAgentVecEnv, args: Args):
        super().__init__()
        agents, obs_dim = envs.num_agents, envs.single_observation_space.shape[0]
        action_space = envs.single_action_space
        self.discrete = isinstance(action_space, gymnasium.spaces.Discrete)
        outputs = int(action_space.n) if self.discrete else action_space.shape[0]
        self.available_in_obs = envs.available_in_obs
        self.exploration_noise = args.exploration_noise
        self.actors = Networks(agents, obs_dim, args.hidden_size, outputs)
        self.critics = Critics(agents, agents * (obs_dim + outputs), args.hidden_size, 1)
        self.register_buffer("action_mask", envs.action_mask.clone())  # (A, outputs)
        self.register_buffer("own", torch.eye(agents, dtype=torch.bool).view(agents, 1, agents, 1))
        if not self.discrete:
            low, high = envs.action_low, envs.action_high  # (A, act_dim)
            self.register_buffer("action_center", (high + low) / 2)
            self.register_buffer("action_scale", (high - low) / 2)

    def forward(self, obs: Tensor) -> Tensor:
        output = self.outputs(obs)
        return output.argmax(-1) if self.discrete else self.to_env(output.tanh())

    def available(self, obs: Tensor) -> Tensor:
        """Available actions, or entries of them (B, A, outputs) bool; some envs' obs end so."""
        mask = self.action_mask.expand(*obs.shape[:-1], -1)
        allowed = obs[..., -mask.shape[-1] :] > 0 if self.available_in_obs else mask
        return mask & (allowed | ~allowed.any(-1, keepdim=True))  # all if it has left (no effect)

    def outputs(self, obs: Tensor) -> Tensor:
        """Logits, or actions before tanh, (B, A, outputs)."""
        output = self.actors(obs.transpose(0, 1))
        return output.masked_fill(~self.available(obs), -1e9 if self.discrete else 0.0)

    def encode(self, action: Tensor) -> Tensor:
        """An action from the replay buffer as the critics see it: one-hot where discrete."""
        return F.one_hot(action, self.action_mask.shape[1]).float() if self.discrete else action

    def to_env(self, action: Tensor) -> Tensor:
        return action if self.discrete else self.action_center + self.action_scale * action


def act(agent: Agent, output: Tensor) -> Tensor:
    """μ^i(o^i) (B, A, outputs) in [−1, 1]; discrete: one-hot, drawn. Both with a gradient."""
    return F.gumbel_softmax(output, hard=True) if agent.discrete else output.tanh()


@torch.no_grad()
def collect(agent: Agent, envs: vec_envs.MultiAgentVecEnv, rollout: dict[str, Tensor]) -> None:
    """T steps in every environment: drawn or noisy actions."""
    for t in range(len(rollout["obs"])):
        obs = envs.obs
        output = agent.outputs(obs)
        if agent.discrete:
            action = Categorical(logits=output).sample()
        else:
            noise = agent.exploration_noise * torch.randn_like(output)
            action = (output.tanh() + noise * agent.available(obs)).clamp(-1, 1)
        rollout["obs"][t] = obs
        rollout["action"][t] = action
        rollout["alive"][t] = envs.alive
        _, reward, terminated, truncated, info = envs.step(agent.to_env(action))
        rollout["reward"][t] = reward
        rollout["next_obs"][t] = info["final_obs"]  # never the first one of a new episode
        rollout["next_alive"][t] = info["final_alive"]
        rollout["terminated"][t] = terminated
        rollout["done"][t] = terminated | truncated
        rollout["episode_return"][t] = info["episode_return"]
        rollout["episode_length"][t] = info["episode_length"]


def masked_mean(x: Tensor, alive: Tensor) -> Tensor:
    """Mean of x (B, A) over living agents; its mean over learners is that of the whole batch."""
    return (x * alive).sum() / mean_over_learners(alive.sum()).clamp(min=1)


def q_values(critic: Networks, obs: Tensor, action: Tensor) -> Tensor:
    """Q^i(x, a) (B, A) of joint actions (B, A, outputs), or (A, B, A, outputs), one per critic."""
    x = torch.cat((obs.flatten(1).expand(*action.shape[:-2], -1), action.flatten(-2)), -1)
    return critic(x.expand(obs.shape[1], -1, -1)).squeeze(-1)


def critic_loss(agent: Agent, target: Agent, batch: dict[str, Tensor], args: Args) -> Tensor:
    """Σ_k E[ ( Q^i_k(x, a) − y^i )² ], the mean over agents."""
    next_obs = batch["next_obs"]
    with torch.no_grad():
        next_action = act(target, target.outputs(next_obs))
        if not agent.discrete:
            noise = args.target_noise * torch.randn_like(next_action)
            noise = noise.clamp(-args.target_noise_clip, args.target_noise_clip)
            next_action = (next_action + noise * target.available(next_obs)).clamp(-1, 1)
        q1 = q_values(target.critics.q1, next_obs, next_action)
        q2 = q_values(target.critics.q2, next_obs, next_action)
        goes_on = batch["next_alive"] * ~batch["terminated"].unsqueeze(1)  # (B, A)
        y = args.reward_scale * batch["reward"] + args.gamma * goes_on * torch.minimum(q1, q2)
    action = agent.encode(batch["action"])
    q1 = q_values(agent.critics.q1, batch["obs"], action)
    q2 = q_values(agent.critics.q2, batch["obs"], action)
    return masked_mean((q1 - y).square() + (q2 - y).square(), batch["alive"])


def actor_loss(agent: Agent, batch: dict[str, Tensor], args: Args) -> Tensor:
    """− E[ Q^i_1(x, …, μ^i(o^i), …) ], the mean over agents, plus the penalty on large logits."""
    obs, output = batch["obs"], agent.outputs(batch["obs"])
    # own[i, :, j] is True if i = j: in joint[i], critic i's input, only agent i's action is new
    joint = torch.where(agent.own, act(agent, output), agent.encode(batch["action"]))
    loss = -q_values(agent.critics.q1, obs, joint)  # (B, A)
    if agent.discrete:
        available = agent.available(obs)
        squared = torch.where(available, output.square(), 0.0)
        loss = loss + args.logit_cost * squared.sum(-1) / available.sum(-1)
    return masked_mean(loss, batch["alive"])


@torch.no_grad()
def soft_update(target: nn.Module, network: nn.Module, tau: float) -> None:
    """θ̄ ← (1 − τ) θ̄ + τ θ"""
    for theirs, ours in zip(target.parameters(), network.parameters(), strict=True):
        theirs.lerp_(ours, tau)


def update(agent: Agent, target: Agent, optimizers, batch: dict, due: bool, args: Args) -> dict:
    """One step of critics and, if `due`, of actors and target networks -> what to log."""
    critic_optimizer, actor_optimizer = optimizers
    q_loss = critic_loss(agent, target, batch, args)
    critic_optimizer.zero_grad()
    q_loss.backward()
    average_gradients(agent.critics)
    nn.utils.clip_grad_norm_(agent.critics.parameters(), args.max_grad_norm)
    critic_optimizer.step()
    if not due:
        return {"critic": q_loss}  # actors and target networks wait

    policy_loss = actor_loss(agent, batch, args)
    actor_optimizer.zero_grad()
    policy_loss.backward(inputs=actor_optimizer.param_groups[0]["params"])  # not the critics'
    average_gradients(agent.actors)
    nn.utils.clip_grad_norm_(agent.actors.parameters(), args.max_grad_norm)
    actor_optimizer.step()

    soft_update(target, agent, args.tau)
    return {"critic": q_loss, "actor": policy_loss}


def train(args: Args) -> Result:
    run = Run(args, __file__)
    args = run.args
    workers = Workers(run, collect, multi_agent=True)
    agent = Agent(workers.envs, args).to(run.device)
    target = copy.deepcopy(agent).requires_grad_(False)
    critic_optimizer = torch.optim.Adam(agent.critics.parameters(), args.learning_rate, fused=True)
    actor_optimizer = torch.optim.Adam(agent.actors.parameters(), args.learning_rate, fused=True)
    optimizers = critic_optimizer, actor_optimizer
    learn = run.compile(update)  # compiled in long runs (--compile)
    agents = (workers.envs.num_agents,)
    rollout = workers.start(agent, args.num_steps, alive=agents, next_alive=agents)
    replay = ReplayBuffer(run, rollout, args.buffer_size)
    step = run.start(
        agent=agent, target=target, critic_optimizer=critic_optimizer,
        actor_optimizer=actor_optimizer, workers=workers, replay=replay,
    )  # fmt: skip

    losses: dict[str, Tensor] = {}  # of the last update
    while step < args.total_steps:
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - step / args.total_steps)
        rollout = workers.collect()
        replay.add(rollout)
        before, step = step, step + args.num_steps * args.num_envs * run.world_size
        if step >= args.warmup_steps and len(replay) >= min(args.warmup_steps, args.buffer_size):
            for number in range(int(before * args.utd_ratio), int(step * args.utd_ratio)):
                batch = replay.sample(args.batch_size)
                due = (number + 1) % args.policy_delay == 0
                losses |= learn(agent, target, optimizers, batch, due, args)

        run.log_episodes(step, rollout)
        if step // args.log_every > before // args.log_every:
            run.log(step, losses, replay_size=len(replay))
        run.evaluate(step)
        run.checkpoint(step)
    return run.finish(step)


if __name__ == "__main__":
    train(parse(Args, TUNED))
