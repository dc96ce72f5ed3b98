"""An example: how to wrap an outside simulator that is batched already, here NVIDIA's Isaac Lab.

    python algos/ppo.py --env vec_envs.isaac_lab:IsaacLab,task=Isaac-Ant-Direct-v0

Isaac Lab steps thousands of robots on a GPU and returns torch tensors. Four things remain to do for
the contract of `VecEnv`; another simulator needs the same four:

1. **Make it**, on `device`, and say its spaces. Isaac Lab's actions have no bounds, but the
   scripts want some: here ±`action_limit`.
2. **Autoreset**: after the last step of an episode Isaac Lab returns the first observation of the
   next one, as the contract wants, but not the last observation of the old one. `final_obs` has
   the observation before it instead, the nearest that is known. This matters at time limits only,
   where a learner bootstraps from V(final_obs).
3. **Copies**: Isaac Lab writes each step into the same tensors.
4. **Statistics**: `episode_return` and `episode_length`.

Written after Isaac Lab's documentation (version 3.0: `DirectRLEnv`, `ManagerBasedRLEnv`), and
tested with a stand-in that has this interface. **Never run with Isaac Lab itself.**
"""

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from vec_envs.core import VecEnv


class IsaacLab(VecEnv):
    """`num_envs` copies of an Isaac Lab `task` with a single agent.

    Observation: its group "policy", one vector (obs_dim,); action (act_dim,), continuous, clipped
    to ±`action_limit`, in the units of the task. ValueError: Isaac Lab is missing, other spaces.
    """

    exact_resume = False  # a simulator that is not ours cannot be saved
    _env: gymnasium.Env | None = None  # where the constructor failed

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        task: str = "Isaac-Ant-Direct-v0",
        action_limit: float = 1.0,
    ):
        self._env = launch(task, num_envs, device, seed)
        env = self._env.unwrapped
        obs_space, action_space = env.single_observation_space["policy"], env.single_action_space
        for space in (obs_space, action_space):
            if not isinstance(space, Box) or len(space.shape) != 1:
                raise ValueError(f"{task}: the space {space} is not supported, only a flat Box is")
        limits = Box(-action_limit, action_limit, action_space.shape)
        steps = int(env.max_episode_length)
        unbounded = Box(-np.inf, np.inf, obs_space.shape)
        super().__init__(task, num_envs, device, seed, unbounded, limits, steps)
        self._first_seed: int | None = seed  # of the first reset(), if that has none

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Tensor, dict]:
        """Start a new episode in every env: obs (N, obs_dim), {}."""
        seed, self._first_seed = self._first_seed if seed is None else seed, None
        observations, _ = self._env.reset(seed=seed, options=options)
        self._returns, self._lengths = (torch.zeros_like(x) for x in (self._returns, self._lengths))
        self.obs = observations["policy"].float().clone()
        return self.obs, {}

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """As `VecEnv.step`; where an episode ended `final_obs` is the observation before."""
        if self.obs is None:
            raise RuntimeError(f"{self.name}: call reset() before the first step()")
        limit = float(self.single_action_space.high[0])
        action = self.check_action(action).float().clamp(-limit, limit)
        observations, reward, terminated, truncated, _ = self._env.step(action)
        before, self.obs = self.obs, observations["policy"].float().clone()
        reward, terminated = reward.float().clone(), terminated.bool().clone()
        truncated = truncated.bool().clone()
        done = terminated | truncated
        returns, lengths = self._returns + reward, self._lengths + 1
        self._returns = torch.where(done, 0.0, returns)
        self._lengths = torch.where(done, 0, lengths)
        final_obs = torch.where(done.unsqueeze(1), before, self.obs)
        info = {"final_obs": final_obs, "episode_return": returns, "episode_length": lengths}
        return self.obs, reward, terminated, truncated, info

    def close_extras(self, **kwargs: Any) -> None:
        if self._env is not None:
            self._env.close()


def launch(task: str, num_envs: int, device: torch.device | str, seed: int) -> gymnasium.Env:
    """Isaac Lab's own env; ValueError if Isaac Lab is not installed or does not know the task."""
    try:
        from isaaclab.app import AppLauncher
    except ImportError as error:
        raise ValueError(
            f"{task} needs Isaac Lab ({error}), an NVIDIA GPU and Isaac Sim: "
            'pip install "isaaclab[isaacsim,all]", as its documentation says'
        ) from error
    # The simulator must run before anything else of Isaac Lab is imported.
    AppLauncher(headless=True, device=str(device))
    import isaaclab_tasks  # noqa: F401, which registers the tasks
    from isaaclab_tasks.utils import parse_env_cfg

    if task not in gymnasium.registry:
        raise ValueError(f"Isaac Lab has no task {task!r}")
    config = parse_env_cfg(task, device=str(device), num_envs=num_envs)
    config.seed = seed
    return gymnasium.make(task, cfg=config, disable_env_checker=True)
