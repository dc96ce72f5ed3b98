"""Multi-agent DDPG (MADDPG): each agent has an actor of its own and a critic that sees everything.

Lowe, Wu, Tamar, Harb, Abbeel, Mordatch 2017, arXiv:1706.02275. In training, agent i's critic gets
the observations of all agents, x = (o^1 … o^A), and all actions; its actor only o^i. Each maximises
its own reward r^i: agents may cooperate or compete. With Q̄, μ̄ the slow target networks,

    y^i    = r^i + γ (1 − terminated) Q̄^i( x', μ̄¹(o'¹), …, μ̄ᴬ(o'ᴬ) )
    L(φ^i) = E[ ( Q^i(x, a¹ … aᴬ) − y^i )² ]
    L(θ^i) = − E[ Q^i(x, a¹ …, μ^i(o^i), … aᴬ) ]       other actions from the replay buffer

    python algos/maddpg.py --env SpeakerListener                      discrete actions
    python algos/maddpg.py --env SpreadContinuous                     continuous actions
    python algos/maddpg.py --env pettingzoo:mpe2.simple_tag_v3        three chase one

Discrete actions are drawn by the straight-through Gumbel-softmax (Jang, Gu, Poole 2017,
arXiv:1611.01144): one-hot, but with the gradient of the softmax (the authors' code: the relaxed
sample itself); 10⁻⁴ times the mean squared logit is then added to L(θ^i) (their code: 10⁻³, with
unscaled rewards). Continuous actions are a tanh plus Gaussian noise (theirs: a Gaussian policy).
What else differs from the paper: no ensembles, no inference of policies; rewards times 0.1;
learning rates of 1e-3 (1e-2), annealed to zero; 64 environments, an update after every 50 steps
(100) from step 5000 on (25,600), 200,000 steps in the replay buffer (10⁶); the gradient norm of all
agents together is clipped (their code: each matrix's); an agent that has left the episode has the
value 0 and does not learn.
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
    """MADDPG on any environment with several agents."""

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
        self.critics = Networks(agents, agents * (obs_dim + outputs), args.hidden_size, 1)
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
    """E[ ( Q^i(x, a) − y^i )² ], the mean over agents."""
    next_obs = batch["next_obs"]
    with torch.no_grad():
        next_action = act(target, target.outputs(next_obs))
        q = q_values(target.critics, next_obs, next_action)
        goes_on = batch["next_alive"] * ~batch["terminated"].unsqueeze(1)  # (B, A)
        y = args.reward_scale * batch["reward"] + args.gamma * goes_on * q
    q = q_values(agent.critics, batch["obs"], agent.encode(batch["action"]))
    return masked_mean((q - y).square(), batch["alive"])


def actor_loss(agent: Agent, batch: dict[str, Tensor], args: Args) -> Tensor:
    """− E[ Q^i(x, …, μ^i(o^i), …) ], the mean over agents, plus the penalty on large logits."""
    obs, output = batch["obs"], agent.outputs(batch["obs"])
    # own[i, :, j] is True if i = j: in joint[i], critic i's input, only agent i's action is new
    joint = torch.where(agent.own, act(agent, output), agent.encode(batch["action"]))
    loss = -q_values(agent.critics, obs, joint)  # (B, A)
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


def update(agent: Agent, target: Agent, optimizers, batch: dict, args: Args) -> dict:
    """One step of critics, actors and target networks -> what to log."""
    critic_optimizer, actor_optimizer = optimizers
    q_loss = critic_loss(agent, target, batch, args)
    critic_optimizer.zero_grad()
    q_loss.backward()
    average_gradients(agent.critics)
    nn.utils.clip_grad_norm_(agent.critics.parameters(), args.max_grad_norm)
    critic_optimizer.step()

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
            for _ in range(int(before * args.utd_ratio), int(step * args.utd_ratio)):
                batch = replay.sample(args.batch_size)
                losses = learn(agent, target, optimizers, batch, args)

        run.log_episodes(step, rollout)
        if step // args.log_every > before // args.log_every:
            run.log(step, losses, replay_size=len(replay))
        run.evaluate(step)
        run.checkpoint(step)
    return run.finish(step)


if __name__ == "__main__":
    train(parse(Args, TUNED))
