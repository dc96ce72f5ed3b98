"""Any single-agent Gymnasium environment behind the `VecEnv` contract.

    env = make("LunarLander-v3", num_envs=16)                     # stepped one after another, here
    env = make("BipedalWalker-v3", num_envs=16, processes=True)   # stepped in 16 processes
    env = make("my_package:MyEnv-v0", num_envs=4)                 # an id that my_package registers

Episodes, time limits and random generators are Gymnasium's own: env i after `reset(seed)` plays
what `gymnasium.make(id)` plays after `reset(seed=seed + i)`.
"""

import importlib
import multiprocessing
import textwrap
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TransformObservation
from torch import Tensor

from vec_envs.core import VecEnv

NO_TIME_LIMIT = 10**9  # `max_episode_steps` of an env that is never truncated


class GymEnv(VecEnv):
    """`num_envs` copies of the Gymnasium environment `name`, an id or "package:id".

    Observations: a flat Box as float32 (N, obs_dim); a Discrete(n) one-hot (N, n).
    Actions: a flat Box of floats in the env's own bounds, clipped to them (N, act_dim); a
    Discrete(n) always 0 ... n - 1 (N,), also where the env counts from another start.

    With `processes` each env runs in a process of its own. The processes are not forked, which
    neither the threads of torch nor CUDA would survive, so a script that asks for them needs
    `if __name__ == "__main__":`. `options` go to `gymnasium.make`: the env's keyword arguments and
    `max_episode_steps`; `render_mode="rgb_array"` for an env whose `render` is used.

    ValueError: unknown id or option, missing package, space that is not supported.
    """

    exact_resume = False  # a simulator that is not ours cannot be saved: see `state_dict`
    _envs: SyncVectorEnv | AsyncVectorEnv | None = None

    def __init__(
        self,
        name: str,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        processes: bool = False,
        **options: Any,
    ):
        make_one = _maker(name, options)
        probe = _probe(name, make_one)
        observation, action = probe.observation_space, probe.action_space
        max_episode_steps = (probe.spec and probe.spec.max_episode_steps) or NO_TIME_LIMIT
        probe.close()
        if isinstance(action, Discrete):
            action = Discrete(int(action.n))  # the contract counts from 0
        if isinstance(observation, Discrete):
            obs_space = Box(0.0, 1.0, (int(observation.n),))
        else:
            with np.errstate(over="ignore"):  # a bound beyond float32 becomes infinite
                low, high = observation.low.astype(np.float32), observation.high.astype(np.float32)
            obs_space = Box(low, high)
        super().__init__(name, num_envs, device, seed, obs_space, action, max_episode_steps)
        self._seed = int(seed)
        self._next_seed: int | None = self._seed  # of a reset() that names none
        self._steps = 0
        self._processes: list[multiprocessing.Process] = []
        kwargs: dict[str, Any] = {"copy": False, "autoreset_mode": AutoresetMode.SAME_STEP}
        if processes:
            methods = multiprocessing.get_all_start_methods()
            kwargs["context"] = "forkserver" if "forkserver" in methods else "spawn"
        kind = AsyncVectorEnv if processes else SyncVectorEnv
        try:
            self._envs = kind([make_one] * num_envs, **kwargs)
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(
                f"{name}: an environment's process died as it started (what it printed says why; "
                'a script without `if __name__ == "__main__":` is a common reason)'
            ) from error
        if processes:
            self._processes = self._envs.processes
        self.metadata, self.render_mode = self._envs.metadata, self._envs.render_mode

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Tensor, dict]:
        """Start a new episode in every env, in env i with `seed + i`: obs (N, obs_dim), {}.

        Without a seed the first reset takes the constructor's, and later ones let the envs' random
        generators run on. `options` is handed to the envs.
        """
        seed = self._next_seed if seed is None else int(seed)
        self._next_seed = None
        observations, _ = self._ask(self._envs.reset, seed=seed, options=options)
        self._returns.zero_()
        self._lengths.zero_()
        self.obs = self._observation_tensor(observations)
        return self.obs, {}

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """As `VecEnv.step`; RuntimeError also when an env's process has died."""
        if self.obs is None:
            raise RuntimeError(f"{self.name}: call reset() before the first step()")
        observations, reward, terminated, truncated, gym_info = self._ask(
            self._envs.step, self._gym_action(action)
        )
        self._steps += 1
        self.obs = final_obs = self._observation_tensor(observations)
        ended = np.flatnonzero(terminated | truncated)
        if ended.size:
            true_next = observations.copy()
            for index in ended:
                true_next[index] = gym_info["final_obs"][index]
            final_obs = self._observation_tensor(true_next)
        # These three are not reused: the tensors may keep their memory.
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

    def state_dict(self) -> dict[str, Any]:
        """How far the envs are, not where: a Gymnasium simulator cannot be saved in general."""
        return {"steps": torch.tensor(self._steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start a new episode in every env, with seeds that the run has not used before."""
        self._steps = int(state["steps"])
        self.reset(seed=self._seed + self.num_envs * self._steps)

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
        """`call` on the vectorised env; where it fails, no process is left waiting for the rest."""
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
        # `check_action` does not look on a GPU; here the action is on the CPU anyway
        if self.device.type != "cpu" and not self.action_space.contains(action):
            raise ValueError(f"{self.name}: not an action of {space}: {action}")
        if isinstance(space, Discrete):
            action = action.astype(np.int64) + self._envs.single_action_space.start
        return action

    def _observation_tensor(self, observations: np.ndarray) -> Tensor:
        """A float32 copy (N, obs_dim) on the device of Gymnasium's reused array."""
        space = self._envs.single_observation_space
        if isinstance(space, Box):
            return torch.from_numpy(observations.astype(np.float32)).to(self.device)
        values = torch.tensor(observations - space.start, dtype=torch.int64)
        return torch.nn.functional.one_hot(values, int(space.n)).float().to(self.device)


def _maker(name: str, options: dict[str, Any]) -> Callable[[], gymnasium.Env]:
    """A function that makes one env; ValueError if `name` is not registered."""
    package, _, id = name.rpartition(":")
    if package:
        try:
            importlib.import_module(package)
        except Exception as error:
            raise ValueError(
                f"{name}: importing the package {package!r} failed with "
                f"{type(error).__name__}: {error}"
            ) from error
    try:
        spec = gymnasium.spec(id)
    except gymnasium.error.Error as error:
        reason = f"the package {package!r} does not register {id!r}" if package else error
        raise ValueError(f"{name}: {reason}") from error

    # The spec itself and no id: what this process has registered, a new process has not. A nested
    # function is sent to it by value, so that it need not import torch.
    def make_one() -> gymnasium.Env:
        env = gymnasium.make(spec, **options)
        # Copied, because an env may write its next episode into the array of its last observation.
        return TransformObservation(env, np.copy, None)

    return make_one


def _probe(name: str, make_one: Callable[[], gymnasium.Env]) -> gymnasium.Env:
    """One env, to know the spaces; ValueError if it cannot be made or its spaces do not fit."""
    try:
        env = make_one()
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        if "box2d" in str(error).lower():
            raise ValueError(f'{name} needs Box2D: pip install "crane-rl[box2d]"') from error
        raise ValueError(f"{name} needs a package that is missing: {error}") from error
    except (gymnasium.error.Error, TypeError) as error:
        raise ValueError(f"{name}: {error}") from error
    for kind, space in (("observation", env.observation_space), ("action", env.action_space)):
        is_flat = isinstance(space, Box) and len(space.shape) == 1
        is_float = kind == "observation" or np.issubdtype(space.dtype, np.floating)
        if not isinstance(space, Discrete) and not (is_flat and is_float):
            env.close()
            raise ValueError(
                f"{name}: the {kind} space {textwrap.shorten(str(space), 200)} is not supported, "
                f"only Discrete and a flat Box{' of floats' if kind == 'action' else ''} are"
            )
    return env
