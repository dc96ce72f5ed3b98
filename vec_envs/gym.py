"""Any Gymnasium environment behind the `VecEnv` contract.

    env = make("LunarLander-v3", num_envs=16)                     # stepped one after another, here
    env = make("BipedalWalker-v3", num_envs=16, processes=True)   # stepped in 16 processes
    env = make("my_package:MyEnv-v0", num_envs=4)                 # an id that my_package registers

Episodes, time limits and random generators are Gymnasium's own: env i after `reset(seed)` plays
what `gymnasium.make(id)` plays after `reset(seed=env_seeds(seed, num_envs)[i])`.
"""

import importlib
import math
import multiprocessing
import os
import sys
import textwrap
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple, flatten_space
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import FlattenObservation
from torch import Tensor

from vec_envs.core import VecEnv, env_seeds, start_forkserver, unblock_signals

NO_TIME_LIMIT = 10**9  # `max_episode_steps` of an env that is never truncated
MOST_CHOICES = 4096  # of a MultiDiscrete or MultiBinary action, which becomes one Discrete

# Packages whose ids are known to work, and what pip installs for each.
INSTALL = {
    "panda_gym": "panda-gym",
    "pybullet_envs_gymnasium": "pybullet_envs_gymnasium",
    "gymnasium_robotics": 'gymnasium-robotics "mujoco<4"',
    "highway_env": "highway-env",
    "lbforaging": "lbforaging",
}


class GymEnv(VecEnv):
    """`num_envs` copies of the Gymnasium environment `name`, an id or "package:id".

    Observations: float32 (N, obs_dim), flattened by Gymnasium's `FlattenObservation`: a Box in row
    order, a Discrete(n) as a one-hot vector of n numbers, the parts of a Dict (sorted by name) or
    Tuple one after another. Images are refused: no network of the collection is made for them.
    Actions: a flat Box of floats in the env's own bounds, clipped to them (N, act_dim); a
    Discrete(n) always 0 ... n - 1 (N,), also where the env counts from another start. A
    MultiDiscrete or MultiBinary action becomes one Discrete, whose numbers count through all
    combinations, the last part fastest; so every script for discrete actions can learn it, but
    more than 4096 combinations are refused.

    With `processes` each env runs in a process of its own. They are not forked, because neither
    torch's threads nor CUDA work in a forked process, so a script that uses them needs
    `if __name__ == "__main__":`. `options` go to `gymnasium.make`: the env's keyword arguments and
    `max_episode_steps`; `render_mode="rgb_array"` if `render` is used.

    ValueError: unknown id or option, missing package, space that is not supported.
    """

    exact_resume = False  # a simulator that is not ours cannot be saved
    _envs: SyncVectorEnv | AsyncVectorEnv | None = None

    def __init__(
        self, name: str, num_envs: int, device: torch.device | str = "cpu", seed: int = 0,
        processes: bool = False, **options: Any,
    ):  # fmt: skip
        make_one = maker(name, options)
        probe = _probe(name, maker(name, options, flat=False))
        observation, action = probe.observation_space, probe.action_space
        max_episode_steps = (probe.spec and probe.spec.max_episode_steps) or NO_TIME_LIMIT
        probe.close()
        flat = flatten_space(observation)
        with np.errstate(over="ignore"):  # a bound beyond float32 becomes infinite
            obs_space = Box(flat.low.astype(np.float32), flat.high.astype(np.float32))
        if not (is_flat(observation) and is_flat(action)):
            _say_what_is_flattened(name, observation, action, obs_space)
        if not isinstance(action, Box):
            action = Discrete(math.prod(_choices(action)))  # the contract counts from 0
        super().__init__(name, num_envs, device, seed, obs_space, action, max_episode_steps)
        self._first_seed: int | None = seed  # of the first reset(), if that has none
        self._processes: list[multiprocessing.Process] = []
        # A daemonic process (a worker, the evaluator) may not start any: there one after another.
        processes = processes and not multiprocessing.current_process().daemon
        kwargs: dict[str, Any] = {"copy": False, "autoreset_mode": AutoresetMode.SAME_STEP}
        if processes:
            start_forkserver()
            kwargs["context"] = "forkserver"
        kind = AsyncVectorEnv if processes else SyncVectorEnv
        make = _ignoring_ctrl_c(make_one) if processes else make_one
        try:
            self._envs = kind([make] * num_envs, **kwargs)
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(
                f"{name}: an environment's process died as it started (what it printed says why; "
                'a script without `if __name__ == "__main__":` is a common reason)'
            ) from error
        if processes:
            self._processes = self._envs.processes
        self.metadata, self.render_mode = self._envs.metadata, self._envs.render_mode

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Tensor, dict]:
        """Start a new episode in every env, with seeds `env_seeds`: obs (N, obs_dim), {}.

        Without a seed the first reset takes the constructor's, and later ones continue the envs'
        random generators. `options` is handed to the envs.
        """
        seed = self._first_seed if seed is None else seed
        self._first_seed = None
        seeds = None if seed is None else env_seeds(seed, self.num_envs)
        observations, _ = self._ask(self._envs.reset, seed=seeds, options=options)
        # Not in place: the last step's info may hold them.
        self._returns, self._lengths = (torch.zeros_like(x) for x in (self._returns, self._lengths))
        self.obs = self._observation_tensor(observations)
        return self.obs, {}

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """As `VecEnv.step`; RuntimeError also when an env's process has died."""
        if self.obs is None:
            raise RuntimeError(f"{self.name}: call reset() before the first step()")
        observations, reward, terminated, truncated, gym_info = self._ask(
            self._envs.step, self._gym_action(action)
        )
        self.obs = final_obs = self._observation_tensor(observations)
        ended = np.flatnonzero(terminated | truncated)
        if ended.size:
            true_next = observations.copy()
            for index in ended:
                true_next[index] = gym_info["final_obs"][index]
            final_obs = self._observation_tensor(true_next)
        # Gymnasium does not reuse these arrays, so that the tensors may share their memory.
        reward = torch.from_numpy(reward.astype(np.float32)).to(self.device)
        terminated = torch.from_numpy(terminated).to(self.device)
        truncated = torch.from_numpy(truncated).to(self.device)
        returns = self._returns + reward
        lengths = self._lengths + 1
        self._returns, self._lengths = returns, lengths
        if ended.size:
            done = terminated | truncated
            self._returns = torch.where(done, 0.0, returns)
            self._lengths = torch.where(done, 0, lengths)
        info = {"final_obs": final_obs, "episode_return": returns, "episode_length": lengths}
        return self.obs, reward, terminated, truncated, info

    def render(self, index: int = 0) -> np.ndarray:
        """An RGB picture (height, width, 3) uint8 of env number `index`."""
        if self.render_mode != "rgb_array":
            raise NotImplementedError(
                f'{self.name} has no picture: make it with render_mode="rgb_array"'
            )
        return self._ask(self._envs.render)[index]

    def close_extras(self, **kwargs: Any) -> None:
        """End the envs and their processes (called by `close`)."""
        if self._envs is None:  # the constructor failed, and older Gymnasiums close all the same
            return
        try:
            self._envs.close(**kwargs)
        except (EOFError, OSError):  # a process died since the last step
            self._kill()

    def _ask(self, call: Callable, *args: Any, **kwargs: Any) -> Any:
        """`call` a method of the vectorised env; if it fails, end the processes that remain."""
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            if not self._processes or self._envs.closed:
                raise
            lost_pipe = isinstance(error, (EOFError, ConnectionError))
            if lost_pipe:  # the process is about to end: wait for its exit code
                wait([process.sentinel for process in self._processes], timeout=1)
            codes = [process.exitcode for process in self._processes]
            self._kill()
            if not lost_pipe:
                raise
            dead = ", ".join(f"{i} (exit code {c})" for i, c in enumerate(codes) if c is not None)
            raise RuntimeError(f"{self.name}: the process of env {dead} died") from error

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._envs.closed = True  # Gymnasium's own close would wait for an answer

    def _gym_action(self, action: Tensor) -> np.ndarray:
        action = self.check_action(action).detach().cpu().numpy()
        space = self.single_action_space
        if isinstance(space, Box):
            action = np.clip(action.astype(space.dtype), space.low, space.high)
        # For tensors on a GPU, `check_action` has not looked at the values.
        if self.device.type != "cpu" and not self.action_space.contains(action):
            raise ValueError(f"{self.name}: not an action of {space}: {action}")
        if isinstance(space, Box):
            return action
        theirs = self._envs.single_action_space
        parts = np.unravel_index(action, _choices(theirs))  # one (N,) for each part
        action = np.stack(parts, -1).reshape(-1, *theirs.shape).astype(theirs.dtype)
        return action + getattr(theirs, "start", 0)

    def _observation_tensor(self, observations: np.ndarray) -> Tensor:
        """A float32 copy (N, obs_dim) on the device of Gymnasium's reused array."""
        return torch.from_numpy(observations.astype(np.float32)).to(self.device)


def maker(name: str, options: dict[str, Any], flat: bool = True) -> Callable[[], gymnasium.Env]:
    """A function that makes one env, with flat observations; ValueError for an unknown `name`."""
    package, _, id = name.rpartition(":")
    if package:
        try:
            importlib.import_module(package)
        except Exception as error:
            hint = ""
            if isinstance(error, ImportError):
                hint = "; is it installed, or its folder on the PYTHONPATH?"
            if isinstance(error, ImportError) and package in INSTALL:
                hint = f"; pip install {INSTALL[package]}"
            raise ValueError(
                f"{name}: importing the package {package!r} failed with {in_words(error)}{hint}"
            ) from error
    try:
        spec = gymnasium.spec(id)
    except gymnasium.error.Error as error:
        neither = (
            f"the package {package!r} does not register {id!r}, nor is that a subclass of VecEnv "
            "in it (a gymnasium.Env is made by its id, so register it)"
        )
        raise ValueError(f"{name}: {neither if package else error}") from error

    # The spec and not its id, which is registered in this process only. Gymnasium sends a nested
    # function to a new process by value, so that the process need not import this module and torch.
    def make_one() -> gymnasium.Env:
        env = gymnasium.make(spec, **options)
        # To flatten is to copy, and an env may write its next episode into the array of its last
        # observation.
        return FlattenObservation(env) if flat else env

    return make_one


def _ignoring_ctrl_c(make_one: Callable[[], gymnasium.Env]) -> Callable[[], gymnasium.Env]:
    """`make_one` for a process of its own that leaves Ctrl-C, which all receive, to its parent."""

    def make() -> gymnasium.Env:
        if multiprocessing.parent_process() is not None:  # Gymnasium also makes one in the parent
            unblock_signals()
        return make_one()

    return make


def _probe(name: str, make_one: Callable[[], gymnasium.Env]) -> gymnasium.Env:
    """One env, to know the spaces; ValueError if it cannot be made or its spaces do not fit."""
    try:
        env = make_one()
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        if "box2d" in str(error).lower():
            raise ValueError(f'{name} needs Box2D: pip install "gymnasium[box2d]"') from error
        raise ValueError(f"{name} needs a package that is missing: {error}") from error
    except Exception as error:  # of its constructor, which is not ours
        if isinstance(error, TypeError) and "'render_mode': 'rgb_array'" in str(error):
            raise ValueError(f"{name} cannot be drawn: it takes no render_mode") from error
        raise ValueError(f"{name}: {in_words(error)}") from error
    if isinstance(env.action_space, Tuple) and isinstance(env.observation_space, Tuple):
        env.close()
        raise SeveralAgents(f"{name} has several agents: make it by vec_envs.make")
    try:
        _check_spaces(name, env.observation_space, env.action_space)
    except ValueError:
        env.close()
        raise
    return env


def _check_spaces(name: str, observation: gymnasium.Space, action: gymnasium.Space) -> None:
    """ValueError for a space that the docstring of `GymEnv` does not have."""
    if _has_images(observation):
        raise ValueError(
            f"{name}: image observations ({short(observation)}) are not supported, only numbers "
            "are: Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of these"
        )
    if not observation.is_np_flattenable:
        raise ValueError(
            f"{name}: the observation space {short(observation)} is not supported, only Box, "
            "Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of these are"
        )
    if isinstance(action, MultiDiscrete | MultiBinary):
        if (count := math.prod(_choices(action))) > MOST_CHOICES:
            raise ValueError(
                f"{name}: the action space {short(action)} has {count} combinations, "
                f"at most {MOST_CHOICES} are supported"
            )
    elif not is_flat(action) or (isinstance(action, Box) and action.dtype.kind != "f"):
        raise ValueError(
            f"{name}: the action space {short(action)} is not supported, "
            "only Discrete, MultiDiscrete, MultiBinary and a flat Box of floats are"
        )


def is_flat(space: gymnasium.Space) -> bool:
    """Whether it is a Discrete or a Box with one axis."""
    return isinstance(space, Discrete) or (isinstance(space, Box) and len(space.shape) == 1)


def _has_images(space: gymnasium.Space) -> bool:
    if isinstance(space, Dict | Tuple):
        return any(map(_has_images, space.values() if isinstance(space, Dict) else space))
    return isinstance(space, Box) and space.dtype == np.uint8 and len(space.shape) > 1


def _choices(space: Discrete | MultiDiscrete | MultiBinary) -> tuple[int, ...]:
    """How many values each part of a discrete action has."""
    if isinstance(space, Discrete):
        return (int(space.n),)
    if isinstance(space, MultiBinary):
        return (2,) * math.prod(space.shape)
    return tuple(space.nvec.flatten().tolist())


def _say_what_is_flattened(
    name: str, observation: gymnasium.Space, action: gymnasium.Space, obs_space: Box
) -> None:
    """One line on the terminal, in the first process of a run only."""
    if multiprocessing.parent_process() is not None or os.environ.get("RANK", "0") != "0":
        return
    said = []
    if not is_flat(observation):
        said.append(f"observations {short(observation)} as {obs_space.shape[0]} numbers")
    if not is_flat(action):
        said.append(f"actions {short(action)} as one of {math.prod(_choices(action))} choices")
    print(f"{name}: {'; '.join(said)}", file=sys.stderr)


def short(space: gymnasium.Space) -> str:
    """A space on one line."""
    return textwrap.shorten(str(space), 200)


def in_words(error: Exception) -> str:
    """What somebody else's error says, in one line; where it was raised if it says nothing."""
    text = str(error) or f"in {traceback.extract_tb(error.__traceback__)[-1].line}"
    return textwrap.shorten(f"{type(error).__name__}: {text}", 300)


class SeveralAgents(ValueError):
    """A Gymnasium id with a Tuple of action spaces, one per agent."""
