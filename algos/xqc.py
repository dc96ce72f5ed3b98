"""XQC: crossq.py with weights of unit norm and critics that predict a distribution of the return.

Palenicek, Vogt, Watson, Posner, Peters 2026, arXiv:2509.25174. Critic i gives probabilities p_i to
returns z_1 ... z_K: Q_i = Σ_k z_k p_ik. With p' those of the critic whose Q_i(s', a') is smaller:

    y_k  = r / σ + γ (1 − terminated) ( z_k − α log π(a'|s') )
    m_j  = Σ_k p'_k max(0, 1 − |clip(y_k) − z_j| / Δz)                no gradient
    L(p) = Σ_i E[ − Σ_j m_j log p_ij(s, a) ]                          cross-entropy
    w   ← w / ‖w‖       each unit's incoming weights, after every step of Adam

    python algos/xqc.py --env HalfCheetah

What differs from crossq.py: `critic_loss`, `project`: cross-entropy has a bounded gradient. As
`BatchNorm` follows each hidden layer, only the direction of weights counts; `normalize_weights`
lets the learning rate (3e-4, annealed to a tenth) alone set the angle of a step. Adam's β₁ is 0.9;
rewards are divided by σ, the standard deviation of the return; z is −5 to 5; four hidden layers; α
begins at 0.01; H̄ is −dim(A)/2. Unlike the paper or its code (in brackets): no target networks, 1
update per step (2), critics 256 wide (512), 4 environments, γ = 0.99 (theirs: 1 − 5/T, T steps an
episode), scaled rewards clipped to ±10, the policy's log σ ≥ −20 (−10), PyTorch's initial weights
(norm 1 after an update), inputs without learned scale and shift, L(α) with log α; the rates of
actor and α fall to 0.1 (0.7) of the first; the actor's statistics move at its updates (critics').
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal

import vec_envs
from algos.worker_learner import (
    ReplayBuffer,
    Result,
    RewardScaler,
    Run,
    TransitionArgs,
    Workers,
    average_gradients,
    parse,
    var_mean_over_learners,
)


@dataclass
class Args(TransitionArgs):
    """XQC on any environment with continuous actions."""

    env: str = "HalfCheetah"
    num_envs: int = 4
    num_steps: int = 1
    """steps of each environment between updates"""
    utd_ratio: float = 1.0
    """updates of the critics per transition collected"""
    policy_delay: int = 3
    """updates of the critics per update of actor and temperature"""
    batch_size: int = 256
    """transitions of one gradient step"""
    buffer_size: int = 1_000_000
    """capacity of the replay buffer, in transitions"""
    warmup_steps: int = 5000
    """steps with uniformly random actions; updates begin when the buffer has as many transitions"""
    learning_rate: float = 3e-4
    """Adam's learning rate for actor, critics and temperature, annealed linearly to a tenth"""
    gamma: float = 0.99
    """γ, the discount factor; `discount` in a batch is γⁿ"""
    hidden_size: int = 256
    """width of the four hidden layers of the actor"""
    critic_hidden_size: int = 256
    """width of the four hidden layers of the critics"""


LIMITS = {"batch_size": (2, None)}  # one transition has no variance

# What differs by environment; a flag on the command line wins.
TUNED = {
    "Pendulum": dict(total_steps=10_000, warmup_steps=1000, hidden_size=64, critic_hidden_size=128),
}


class BatchNorm(nn.BatchNorm1d):
    """Batch normalisation; while training, with the statistics of all learners' batches."""

    def forward(self, x: Tensor) -> Tensor:  # (B, features)
        if not self.training:
            return super().forward(x)
        var, mean = var_mean_over_learners(x, 0)
        self.running_mean.lerp_(mean.detach(), self.momentum)
        self.running_var.lerp_(var.detach(), self.momentum)
        x = (x - mean) / (var + self.eps).sqrt()
        return x * self.weight + self.bias if self.affine else x


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    layers = [BatchNorm(inputs, eps=1e-3, momentum=0.01, affine=False)]  # no learned scale, shift
    for size in (inputs, hidden, hidden, hidden):
        layers += [nn.Linear(size, hidden, bias=False), BatchNorm(hidden, 1e-3, 0.01), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, outputs))


@torch.no_grad()
def normalize_weights(network: nn.Module) -> None:
    """w ← w / ‖w‖ for the incoming weights of each unit, also of the last layer."""
    for layer in network.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.copy_(F.normalize(layer.weight))


class Actor(nn.Module):
    """A squashed Gaussian. forward: observation (B, obs_dim) → its mean action in [−1, 1]."""

    def __init__(self, obs_dim: int, act_dim: int, hidden: int):
        super().__init__()
        self.mean_and_log_std = mlp(obs_dim, hidden, 2 * act_dim)

    def forward(self, obs: Tensor) -> Tensor:
        mean, _ = self.mean_and_log_std(obs).chunk(2, -1)
        return mean.tanh()

    def sample(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """a = tanh(u), u ~ N(μ(s), σ(s)²) -> a (B, act_dim), log π(a|s) (B,)."""
        mean, log_std = self.mean_and_log_std(obs).chunk(2, -1)
        normal = Normal(mean, log_std.clamp(-20, 2).exp())
        u = normal.rsample()
        return u.tanh(), log_density(normal, u)


def log_density(normal: Normal, u: Tensor) -> Tensor:  # (..., act_dim) -> (...)
    """log π(a|s) = log N(u) − Σ log(1 − tanh²u), log(1 − tanh²u) = 2 (log 2 − u − softplus(−2u))"""
    return (normal.log_prob(u) - 2 * (math.log(2) - u - F.softplus(-2 * u))).sum(-1)


class Critics(nn.Module):
    """Two networks. forward: observation, action (B, ...) → logits of p_1 and p_2, (2, B, K)."""

    def __init__(self, obs_dim: int, act_dim: int, hidden: int):
        super().__init__()
        self.register_buffer("bins", torch.linspace(-5, 5, 101))  # z
        self.q1 = mlp(obs_dim + act_dim, hidden, len(self.bins))
        self.q2 = mlp(obs_dim + act_dim, hidden, len(self.bins))

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        x = torch.cat((obs, action), -1)
        return torch.stack((self.q1(x), self.q2(x)))


class Agent(nn.Module):
    """Actor, critics, temperature. forward: observation (N, obs_dim) → the environment's action."""

    def __init__(self, observation_space, action_space, args: Args):
        super().__init__()
        obs_dim, act_dim = observation_space.shape[0], action_space.shape[0]
        self.actor = Actor(obs_dim, act_dim, args.hidden_size)
        self.critics = Critics(obs_dim, act_dim, args.critic_hidden_size)
        self.eval()  # running statistics, except where a network learns
        self.reward_scaler = RewardScaler(args.num_envs, args.gamma)
        self.log_temperature = nn.Parameter(torch.tensor(0.01).log())  # log α
        self.target_entropy = -act_dim / 2
        self.register_buffer("warm_up", torch.tensor(True))  # a tensor: worker processes share it
        low, high = torch.tensor(action_space.low), torch.tensor(action_space.high)
        self.register_buffer("action_center", (high + low) / 2)
        self.register_buffer("action_scale", (high - low) / 2)

    def forward(self, obs: Tensor) -> Tensor:
        return self.to_env(self.actor(obs))

    def to_env(self, action: Tensor) -> Tensor:
        return self.action_center + self.action_scale * action


@torch.no_grad()
def collect(agent: Agent, envs: vec_envs.VecEnv, rollout: dict[str, Tensor]) -> None:
    """T steps in every environment: actions drawn from π, uniform ones at first."""
    for t in range(len(rollout["obs"])):
        obs = envs.obs
        action, _ = agent.actor.sample(obs)
        action = torch.where(agent.warm_up, 2 * torch.rand_like(action) - 1, action)
        rollout["obs"][t] = obs
        rollout["action"][t] = action
        _, reward, terminated, truncated, info = envs.step(agent.to_env(action))
        rollout["reward"][t] = reward
        rollout["next_obs"][t] = info["final_obs"]  # never the first one of a new episode
        rollout["terminated"][t] = terminated
        rollout["done"][t] = terminated | truncated
        rollout["episode_return"][t] = info["episode_return"]
        rollout["episode_length"][t] = info["episode_length"]


def project(returns: Tensor, p: Tensor, bins: Tensor) -> Tensor:
    """The p of each return, both (B, K), shared by the two bins around it: the mean is the same."""
    place = (returns.clamp(bins[0], bins[-1]) - bins[0]) / (bins[-1] - bins[0]) * (len(bins) - 1)
    lower = place.long().clamp(0, len(bins) - 2)  # lower + 1 is a valid index, even if place is NaN
    m = torch.zeros_like(p).scatter_add_(1, lower, p * (lower + 1 - place))
    return m.scatter_add_(1, lower + 1, p * (place - lower))


def critic_loss(agent: Agent, batch: dict) -> tuple[Tensor, Tensor]:
    """Σ_i E[ −w Σ_j m_j log p_ij(s, a) ], importance weights w; max_i |Q_i − Σ_j m_j z_j| (B,)."""
    with torch.no_grad():
        next_action, next_log_prob = agent.actor.sample(batch["next_obs"])
    obs = torch.cat((batch["obs"], batch["next_obs"]))  # (2 B, obs_dim)
    action = torch.cat((batch["action"], next_action))
    logits, next_logits = agent.critics.train()(obs, action).chunk(2, 1)  # each (2, B, K)
    agent.critics.eval()
    with torch.no_grad():
        z, next_p = agent.critics.bins, next_logits.softmax(-1)
        next_q1, next_q2 = next_p @ z  # (B,) each
        next_p = torch.where((next_q1 < next_q2)[:, None], *next_p)  # (B, K), of the smaller Q
        next_return = z - (agent.log_temperature.exp() * next_log_prob)[:, None]
        discount = (batch["discount"] * ~batch["terminated"])[:, None]
        y = agent.reward_scaler.scale(batch["reward"])[:, None] + discount * next_return
        m = project(y, next_p, z)
        td_error = (logits.softmax(-1) @ z - m @ z).abs().amax(0)
    cross_entropy = -(m * logits.log_softmax(-1)).sum((0, -1))  # (B,)
    return (batch["weight"] * cross_entropy).mean(), td_error


def actor_loss(agent: Agent, batch: dict) -> tuple[Tensor, Tensor]:
    """E[ α log π(ã|s) − min_i Q_i(s, ã) ], and log π(ã|s) (B,)."""
    agent.actor.train()
    action, log_prob = agent.actor.sample(batch["obs"])
    agent.actor.eval()
    p = agent.critics(batch["obs"], action).softmax(-1)  # (2, B, K)
    value = torch.minimum(*p @ agent.critics.bins)
    return (agent.log_temperature.detach().exp() * log_prob - value).mean(), log_prob.detach()


def temperature_loss(agent: Agent, log_prob: Tensor) -> Tensor:
    """− log α · E[ log π(ã|s) + H̄ ]: α grows while the entropy is below H̄."""
    return -agent.log_temperature * (log_prob + agent.target_entropy).mean()


def update(agent: Agent, optimizers, batch: dict, due: bool, args: Args):
    """One step of critics; if `due`, of actor and temperature -> what to log, TD errors (B,)."""
    critic_optimizer, actor_optimizer = optimizers
    q_loss, td_error = critic_loss(agent, batch)
    critic_optimizer.zero_grad()
    q_loss.backward()
    average_gradients(agent.critics)
    critic_optimizer.step()
    normalize_weights(agent.critics)
    losses = {"critic": q_loss}

    if due:
        policy_loss, log_prob = actor_loss(agent, batch)
        actor_optimizer.zero_grad()
        loss = policy_loss + temperature_loss(agent, log_prob)  # they share no parameter
        loss.backward(inputs=actor_optimizer.param_groups[0]["params"])  # not the critics'
        average_gradients(agent.actor, agent.log_temperature)
        actor_optimizer.step()
        normalize_weights(agent.actor)
        temperature = agent.log_temperature.detach().exp()
        losses |= {"actor": policy_loss, "entropy": -log_prob.mean(), "temperature": temperature}
    return losses, td_error


def train(args: Args) -> Result:
    run = Run(args, __file__, LIMITS)
    args = run.args
    workers = Workers(run, collect, "bounded", ahead=True)  # ahead: workers collect during updates
    agent = Agent(workers.observation_space, workers.action_space, args).to(run.device)
    actor_parameters = [*agent.actor.parameters(), agent.log_temperature]
    critic_optimizer = torch.optim.Adam(agent.critics.parameters(), args.learning_rate, fused=True)
    actor_optimizer = torch.optim.Adam(actor_parameters, args.learning_rate, fused=True)
    optimizers = critic_optimizer, actor_optimizer
    learn = run.compile(update)  # compiled in long runs (--compile)
    replay = ReplayBuffer(run, workers.start(agent, args.num_steps), args.buffer_size)
    step = run.start(
        agent=agent, critic_optimizer=critic_optimizer, actor_optimizer=actor_optimizer,
        workers=workers, replay=replay,
    )  # fmt: skip

    losses: dict[str, Tensor] = {}  # of the last update
    while step < args.total_steps:
        agent.warm_up.fill_(step < args.warmup_steps)
        for group in critic_optimizer.param_groups + actor_optimizer.param_groups:
            group["lr"] = args.learning_rate * (1 - 0.9 * step / args.total_steps)
        rollout = workers.collect()
        replay.add(rollout)
        agent.reward_scaler(rollout["reward"], rollout["done"])  # updates σ; critic_loss divides
        before, step = step, step + args.num_steps * args.num_envs * run.world_size
        if step >= args.warmup_steps and len(replay) >= min(args.warmup_steps, args.buffer_size):
            for number in range(int(before * args.utd_ratio), int(step * args.utd_ratio)):
                batch = replay.sample(args.batch_size)
                due = (number + 1) % args.policy_delay == 0
                new, td_error = learn(agent, optimizers, batch, due, args)
                losses |= new  # the actor's loss is in it only if `due`
                replay.update_priorities(batch["index"], td_error)

        run.log_episodes(step, rollout)
        if step // args.log_every > before // args.log_every:
            run.log(step, losses, replay_size=len(replay))
        run.evaluate(step)
        run.checkpoint(step)
    return run.finish(step)


if __name__ == "__main__":
    train(parse(Args, TUNED))
