"""Any Gymnasium environment behind the `VecEnv` contract.

    env = make("LunarLander-v3", num_envs=16)
    env = make("my_package:MyEnv-v0", num_envs=4)      # an id that my_package registers

The copies are stepped one after another in this process; the scripts' --num-workers divides them
among processes. Episodes, time limits and random generators are Gymnasium's own: env i after
`reset(seed)` plays what `gymnasium.make(id)` plays after
`reset(seed=env_seeds(seed, num_envs)[i])`.
"""

import contextlib
import importlib
import math
import multiprocessing
import os
import random
import sys
import textwrap
import traceback
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.spaces.utils import flatdim, flatten, flatten_space
from torch import Tensor

from vec_envs import NAMES
from vec_envs.core import ContractError, VecEnv, env_seeds

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


class Outside:
    """What `GymEnv` and `MultiAgentGymEnv` have in common: the environments are not ours.

    Each of `_envs` has `reset(seed, options)`, `step(action)` -> reward (or one per agent),
    terminated, truncated, and `env`, the environment itself; `success` of the last step is None
    where the env does not say it.
    """

    exact_resume = False  # a simulator that is not ours cannot be saved
    _envs: list[Any] = []  # where the constructor failed

    def _outside(self, envs: list[Any], seed: int) -> None:
        """The last part of the constructor."""
        self._envs, self._first_seed = envs, seed  # of the first reset(), if that has none
        self.metadata = {**getattr(envs[0].env, "metadata", {}), **self.metadata}
        self.looks = True  # every value is on the CPU first

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Tensor, dict]:
        """Start a new episode in every env, with seeds `env_seeds`: obs (N, ..., obs_dim), {}.

        Without a seed the first reset takes the constructor's, and later ones continue the envs'
        random generators. `options` is handed to the envs.
        """
        seed = self._first_seed if seed is None else seed
        self._first_seed, seeds = None, [None] * self.num_envs
        if seed is not None:
            seeds = env_seeds(seed, self.num_envs)
            random.seed(seeds[0])  # some environments draw from these
            np.random.seed(seeds[0])
        for env, env_seed in zip(self._envs, seeds, strict=True):
            env.reset(env_seed, options)
        return self._first_observation()

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """As `VecEnv.step`; info["success"] (N,) is there where the envs say it."""
        *result, info = super().step(action)
        said = [env.success for env in self._envs]
        if any(success is not None for success in said):
            info["success"] = torch.tensor([success or 0.0 for success in said], device=self.device)
        return *result, info

    def _restart(self, mask: Tensor) -> None:
        for index in mask.nonzero().flatten().tolist():
            self._envs[index].reset(None, None)

    def _simulate(self, action: Tensor) -> tuple[Tensor, Tensor]:
        pairs = zip(self._envs, action.cpu().numpy(), strict=True)
        results = zip(*[env.step(own) for env, own in pairs], strict=True)
        reward, terminated, self._truncated = (
            torch.tensor(values, device=self.device) for values in results
        )
        return reward, terminated

    def _truncate(self, lengths: Tensor) -> Tensor:
        return self._truncated

    def render(self, index: int = 0) -> np.ndarray:
        """An RGB picture (height, width, 3) uint8 of env number `index`."""
        env = self._envs[index].env
        picture = env.render() if getattr(env, "render_mode", None) else None
        if not isinstance(picture, np.ndarray):
            wish = 'make it with render_mode="rgb_array"'
            raise NotImplementedError(f"{self.name} has no picture: {wish}")
        return picture

    def close_extras(self, **kwargs: Any) -> None:
        for env in self._envs:
            env.env.close()


class GymEnv(Outside, VecEnv):
    """`num_envs` copies of the Gymnasium environment `name`, an id or "package:id".

    Observations: float32 (N, obs_dim), flattened by Gymnasium's `flatten`: a Box in row order, a
    Discrete(n) as a one-hot vector of n numbers, the parts of a Dict or Tuple one after another, in
    the order of the space. Images are refused: no network of the collection is made for them.
    Actions: a flat Box of floats in the env's own bounds, clipped to them (N, act_dim); a
    Discrete(n) always 0 ... n - 1 (N,), also where the env counts from another start. A
    MultiDiscrete or MultiBinary action becomes one Discrete, whose numbers count through all
    combinations, the last part fastest; so every script for discrete actions can learn it, but
    more than 4096 combinations are refused.

    `options` go to `gymnasium.make`: the env's keyword arguments and `max_episode_steps`;
    `render_mode="rgb_array"` if `render` is used.

    ValueError: unknown id or option, missing package, space that is not supported.
    """

    def __init__(
        self, name: str, /, num_envs: int, device: torch.device | str = "cpu", seed: int = 0,
        **options: Any,
    ):  # fmt: skip
        make_one = maker(name, options)
        first = make_one()
        observation, action = first.observation_space, first.action_space
        try:
            both = isinstance(action, Tuple) and isinstance(observation, Tuple)
            if both and len(action) == len(observation):
                raise SeveralAgents(f"{name} has several agents: make it by vec_envs.make")
            check_spaces(name, observation, action)
            spaces = flat_box(observation), one_choice(action)
            steps = (first.spec and first.spec.max_episode_steps) or NO_TIME_LIMIT
            super().__init__(name, num_envs, device, seed, *spaces, steps)
        except ValueError:
            first.close()
            raise
        introduce(name, observation, action)
        envs = [first, *(make_one() for _ in range(num_envs - 1))]
        self._outside([_FlatEnv(name, env) for env in envs], seed)

    def _observe(self) -> Tensor:
        return torch.from_numpy(np.stack([env.seen for env in self._envs])).to(self.device)


class _FlatEnv:
    """One Gymnasium env; `seen` is its present observation, flat, float32."""

    success: float | None = None

    def __init__(self, name: str, env: gymnasium.Env):
        self.env, self.action_space = env, env.action_space
        self.flat = flattener(name, env.observation_space)

    def reset(self, seed: int | None, options: dict | None) -> None:
        observation, _ = self.env.reset(seed=seed, options=options)
        self.seen = self.flat(observation)

    def step(self, action: np.ndarray) -> tuple[float, bool, bool]:
        given = own_action(action, self.action_space)
        observation, reward, terminated, truncated, info = self.env.step(given)
        self.seen = self.flat(observation)
        self.success = None if self.success is None else 0.0  # some say only that there was one
        for name in ("is_success", "success"):  # gymnasium_robotics, panda_gym; Meta-World
            said = np.asarray(info.get(name))
            if said.size == 1 and said.dtype.kind in "biuf":  # not where it is None, or a text
                self.success = float(said.item())
        return number(reward), flag(terminated), flag(truncated)


def flattener(name: str, space: gymnasium.Space) -> Callable[[Any], np.ndarray]:
    """A function that makes a flat float32 copy of an observation.

    A copy, because an env may write its next observation into the array of this one.
    """
    size = flatdim(space) if space.is_np_flattenable else 0  # which `check_spaces` refuses

    def flat(observation: Any) -> np.ndarray:
        try:
            vector = flatten(space, observation)
        except Exception as error:
            reason = f"an observation is not in its space {short(space)} ({in_words(error)})"
            raise ContractError(f"{name}: {reason}") from error
        if vector.shape != (size,):
            numbers = f"an observation has {vector.size} numbers and not {size}, as its space"
            raise ContractError(f"{name}: {numbers} {short(space)}")
        return vector.astype(np.float32, copy=False)

    return flat


def number(reward: Any) -> float:
    """A reward, which some environments return in an array. ContractError if it is not a number."""
    with contextlib.suppress(TypeError, ValueError):
        if reward is not None:
            return np.asarray(reward, float).item()
    raise ContractError(f"the environment's reward is {reward!r}; it must be one number")


def flag(over: Any) -> bool:
    """Whether an episode is over, which some environments return in an array; None: it is not."""
    value = np.asarray(False if over is None else over)
    if value.size != 1 or value.dtype.kind not in "biuf":
        raise ContractError(f"the environment's terminated or truncated is {over!r}, not one bool")
    return bool(value.item())


def own_action(action: np.ndarray, space: gymnasium.Space) -> Any:
    """What an env or agent with this `space` is given of `action` (act_dim,) or (), which may be
    padded: clipped, or counted from the space's start, as `space.sample()` would give it."""
    if isinstance(space, Box):
        return action[: space.shape[0]].astype(space.dtype).clip(space.low, space.high)
    if isinstance(space, Discrete):
        return space.start + action
    parts = np.reshape(np.unravel_index(action, _choices(space)), space.shape)
    return parts.astype(space.dtype) + getattr(space, "start", space.dtype.type(0))


def flat_box(space: gymnasium.Space) -> Box:
    """The space of the flattened observations, float32."""
    whole = flatten_space(space)
    with np.errstate(over="ignore"):  # a bound beyond float32 becomes infinite
        return Box(whole.low.astype(np.float32), whole.high.astype(np.float32))


def one_choice(space: gymnasium.Space) -> Box | Discrete:
    """A space of actions with all its parts in one Discrete, which counts from 0."""
    return space if isinstance(space, Box) else Discrete(math.prod(_choices(space)))


def maker(name: str, options: dict[str, Any]) -> Callable[[], gymnasium.Env]:
    """A function that makes one env. Both raise ValueError with one sentence."""
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
            "in it (a gymnasium.Env is made by its id, so register it; a module of PettingZoo has "
            "its prefix: pettingzoo:mpe2.simple_tag_v3)"
        )
        raise ValueError(f"{name}: {neither if package else error}") from error

    def make_one() -> gymnasium.Env:
        try:
            return gymnasium.make(spec, **options)
        except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
            if "box2d" in str(error).lower():
                raise ValueError(f'{name} needs Box2D: pip install "gymnasium[box2d]"') from error
            raise ValueError(f"{name} needs a package that is missing: {error}") from error
        except Exception as error:  # of its constructor, which is not ours
            if isinstance(error, TypeError) and "'render_mode': 'rgb_array'" in str(error):
                raise ValueError(f"{name} cannot be drawn: it takes no render_mode") from error
            raise ValueError(f"{name}: {in_words(error)}") from error

    return make_one


def check_spaces(name: str, observation: gymnasium.Space, action: gymnasium.Space) -> None:
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


def introduce(name: str, observation: gymnasium.Space, action: gymnasium.Space) -> None:
    """A line on the terminal, in a run's first process: what is flattened, and a better name."""
    said = []
    if (own := name.rpartition("-v")[0]) in NAMES:
        said.append(f"--env {own} is its newest version here, faster, with the scripts' settings")
    if not is_flat(observation):
        said.append(f"observations {short(observation)} as {flatdim(observation)} numbers")
    if not is_flat(action):
        said.append(f"actions {short(action)} as one of {math.prod(_choices(action))} choices")
    first = multiprocessing.parent_process() is None and os.environ.get("RANK", "0") == "0"
    if said and first:
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
