"""One training of another library, for throughput.py to measure beside those of algos/.

    python benchmark/peers.py --library sbx --algorithm SAC --env HalfCheetah-v5 --total-steps 5000

Prints the number of torch's threads and then, every so many steps, "step updates seconds". What is
not in `--settings` (JSON) is the library's default. `--library plain` has REDQ as its authors wrote
it, one network after another.
"""

import importlib
import json
import time
from dataclasses import dataclass
from typing import Literal

import gymnasium
import torch
import tyro
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from torch import nn

from algos import redq


@dataclass
class Options:
    """Train, and say when so many steps and updates were done."""

    library: Literal["stable_baselines3", "sbx", "plain"] = "stable_baselines3"
    """plain: PyTorch without a library, REDQ only"""
    algorithm: str = "SAC"
    """name of the class in the library"""
    env: str = "HalfCheetah-v5"
    """Gymnasium id; Spread: mpe2's, by SuperSuit, whose steps count for each of three agents"""
    num_envs: int = 1
    """environments stepped together"""
    total_steps: int = 5000
    """how many environment steps to train for"""
    say_every: int = 500
    """steps between two lines"""
    settings: str = "{}"
    """arguments of the class"""


class Clock(BaseCallback):
    """Says at the start of a rollout, and so after an update, how far the training is."""

    def __init__(self, every: int):
        super().__init__()
        self.every, self.due = every, 0

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        if self.model.num_timesteps >= self.due:
            self.due = self.model.num_timesteps + self.every
            say(self.model.num_timesteps, self.model._n_updates)

    def _on_training_end(self) -> None:
        say(self.model.num_timesteps, self.model._n_updates)


def say(step: int, updates: int) -> None:
    print(step, updates, time.perf_counter(), flush=True)


def make_envs(options: Options):
    if options.env == "Spread":
        import supersuit
        from mpe2 import simple_spread_v3

        worlds = supersuit.pettingzoo_env_to_vec_env_v1(simple_spread_v3.parallel_env())
        number, kind = options.num_envs, "stable_baselines3"
        return supersuit.concat_vec_envs_v1(worlds, number, num_cpus=1, base_class=kind)
    slim = {"include_cfrc_ext_in_observation": False} if options.env == "Ant-v5" else {}
    return make_vec_env(options.env, options.num_envs, env_kwargs=slim)  # ours has no such forces


def train(options: Options) -> None:
    kind = getattr(importlib.import_module(options.library), options.algorithm)
    settings = {"device": "cpu", **json.loads(options.settings)}
    model = kind("MlpPolicy", make_envs(options), **settings)
    model.learn(options.total_steps, callback=Clock(options.say_every))


def train_redq(options: Options) -> None:
    """Chen et al. 2021 with redq.py's sizes: ten nn.Sequential critics, looped over."""
    args, settings = redq.Args(), json.loads(options.settings)
    env = gymnasium.make(options.env)
    obs_dim, act_dim = env.observation_space.shape[0], env.action_space.shape[0]
    inputs, hidden, count = obs_dim + act_dim, args.hidden_size, args.ensemble_size
    actor, log_alpha = redq.Actor(obs_dim, act_dim, hidden), torch.zeros((), requires_grad=True)
    critics = nn.ModuleList(redq.mlp(inputs, hidden, 1) for _ in range(count))
    targets = nn.ModuleList(redq.mlp(inputs, hidden, 1) for _ in range(count))
    targets.load_state_dict(critics.state_dict())
    groups = critics.parameters(), actor.parameters(), [log_alpha]
    optimizers = [torch.optim.Adam(group, args.learning_rate) for group in groups]
    critic_optimizer, actor_optimizer, alpha_optimizer = optimizers
    sizes = obs_dim, act_dim, 1, obs_dim, 1
    replay = [torch.zeros(options.total_steps, size) for size in sizes]
    obs, _ = env.reset(seed=0)
    updates = 0
    for step in range(options.total_steps):
        if step % options.say_every == 0:
            say(step, updates)
        with torch.no_grad():
            action = actor.sample(torch.from_numpy(obs).float())[0].numpy()
        following, reward, terminated, truncated, _ = env.step(action * env.action_space.high)
        for tensor, x in zip(replay, (obs, action, reward, following, terminated), strict=True):
            tensor[step] = torch.as_tensor(x)
        obs = env.reset()[0] if terminated or truncated else following
        for _ in range(20 * (step >= settings["learning_starts"])):
            index = torch.randint(step + 1, (args.batch_size,))
            s, a, r, next_s, end = (x[index] for x in replay)
            with torch.no_grad():
                next_a, log_prob = actor.sample(next_s)
                x = torch.cat((next_s, next_a), -1)
                least = torch.min(*(targets[i](x) for i in torch.randperm(count)[:2]))
                soft_value = least - log_alpha.exp() * log_prob.unsqueeze(-1)
                y = r + args.gamma * (1 - end) * soft_value
            x = torch.cat((s, a), -1)
            loss = sum(nn.functional.mse_loss(critic(x), y) for critic in critics)
            critic_optimizer.zero_grad()
            loss.backward()
            critic_optimizer.step()
            updates += 1
            if updates % args.policy_delay == 0:
                critics.requires_grad_(False)
                new_a, log_prob = actor.sample(s)
                x = torch.cat((s, new_a), -1)
                value = sum(critic(x).squeeze(-1) for critic in critics) / count
                actor_optimizer.zero_grad()
                (log_alpha.exp().detach() * log_prob - value).mean().backward()
                actor_optimizer.step()
                alpha_optimizer.zero_grad()
                (-log_alpha * (log_prob.detach() - act_dim).mean()).backward()
                alpha_optimizer.step()
                critics.requires_grad_(True)
            with torch.no_grad():
                for ours, theirs in zip(critics.parameters(), targets.parameters(), strict=True):
                    theirs.lerp_(ours, args.tau)
    say(options.total_steps, updates)


if __name__ == "__main__":
    options = tyro.cli(Options)
    print("threads", torch.get_num_threads(), flush=True)
    (train_redq if options.library == "plain" else train)(options)
