"""Any Gymnasium environment, and any PettingZoo parallel one, behind the `VecEnv` contract.

    env = make("LunarLander-v3", num_envs=16)                     # stepped one after another, here
    env = make("BipedalWalker-v3", num_envs=16, processes=True)   # stepped in 16 processes
    env = make("my_package:MyEnv-v0", num_envs=4)                 # an id that my_package registers
    env = make("pettingzoo:mpe2.simple_tag_v3", num_envs=4)       # several agents, by its module
    env = make("lbforaging:Foraging-8x8-2p-2f-coop-v3", 4)        # the same as a Gymnasium id

Episodes, time limits and random generators are Gymnasium's own: env i after `reset(seed)` plays
what `gymnasium.make(id)` plays after `reset(seed=seed + i)`.
"""

import importlib
import multiprocessing
import signal
import textwrap
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TransformObservation
from torch import Tensor

from vec_envs.core import MultiAgentVecEnv, VecEnv

PETTINGZOO = "pettingzoo:"  # what begins the name of a module with a `parallel_env`
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

    exact_resume = False  # a simulator that is not ours cannot be saved
    _envs: SyncVectorEnv | AsyncVectorEnv | None = None

    def __init__(
        self, name: str, num_envs: int, device: torch.device | str = "cpu", seed: int = 0,
        processes: bool = False, **options: Any,
    ):  # fmt: skip
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
        self._next_seed: int | None = int(seed)  # of a reset() that names none
        self._processes: list[multiprocessing.Process] = []
        # a worker or an evaluator may have no children: there envs are stepped one after another
        processes = processes and not multiprocessing.current_process().daemon
        kwargs: dict[str, Any] = {"copy": False, "autoreset_mode": AutoresetMode.SAME_STEP}
        if processes:
            methods = multiprocessing.get_all_start_methods()
            kwargs["context"] = "forkserver" if "forkserver" in methods else "spawn"
        kind = AsyncVectorEnv if processes else SyncVectorEnv
        make = _deaf_to_ctrl_c(make_one) if processes else make_one
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


def _maker(name: str, options: dict[str, Any], copies: bool = True) -> Callable[[], gymnasium.Env]:
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
        if not copies:
            return env
        # Copied, because an env may write its next episode into the array of its last observation.
        return TransformObservation(env, np.copy, None)

    return make_one


def _deaf_to_ctrl_c(make_one: Callable[[], gymnasium.Env]) -> Callable[[], gymnasium.Env]:
    """`make_one` in a process of its own, where Ctrl-C is for the parent to answer."""

    def make() -> gymnasium.Env:
        if multiprocessing.parent_process() is not None:  # Gymnasium also makes one in the parent
            signal.signal(signal.SIGINT, signal.SIG_IGN)
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
        message = textwrap.shorten(f"{name}: {type(error).__name__}: {error}", 300)
        raise ValueError(message) from error
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
    for kind, space in (("observation", observation), ("action", action)):
        is_flat = isinstance(space, Box) and len(space.shape) == 1
        is_float = kind == "observation" or np.issubdtype(space.dtype, np.floating)
        if not isinstance(space, Discrete) and not (is_flat and is_float):
            raise ValueError(
                f"{name}: the {kind} space {textwrap.shorten(str(space), 200)} is not supported, "
                f"only Discrete and a flat Box{' of floats' if kind == 'action' else ''} are"
            )


class SeveralAgents(ValueError):
    """A Gymnasium id with a Tuple of action spaces, one an agent."""


class MultiAgentGymEnv(MultiAgentVecEnv):
    """`num_envs` copies of a world with several agents, stepped one after another, here.

    `name` is "pettingzoo:package.module", a module with PettingZoo's `parallel_env`, to which
    `options` go; or a Gymnasium id whose spaces and observations are tuples, one entry an agent.
    Observations: flat Boxes; actions: all Discrete, or all flat Boxes of floats. Where observations
    or infos have an "action_mask", the masks stand at the end of the observations
    (`available_in_obs`). The state is the world's own `state()` where it has one. Who is no longer
    in PettingZoo's `agents` is not `alive`; the episode ends when nobody is, truncated if anybody
    was truncated in its last step.

    ValueError: unknown module, id or option, missing package, space that is not supported.
    """

    exact_resume = False  # a simulator that is not ours cannot be saved

    def __init__(
        self, name: str, num_envs: int, device: torch.device | str = "cpu", seed: int = 0,
        **options: Any,
    ):  # fmt: skip
        make_one = _maker_of_worlds(name, options)
        self._worlds = [make_one() for _ in range(max(1, num_envs))]
        world = self._worlds[0]
        spaces = world.observation_spaces, world.action_spaces
        for pair in zip(*spaces, strict=True):
            _check_spaces(name, *pair)
        kinds = {type(space) for space in world.action_spaces}
        if len(kinds) > 1 or not all(isinstance(s, Box) for s in world.observation_spaces):
            raise ValueError(
                f"{name}: the agents' spaces are not supported together, only flat Boxes of "
                "observations and actions that are all Discrete or all flat Boxes are"
            )
        masked = world.masks_actions(seed) and kinds == {Discrete}
        super().__init__(name, num_envs, device, seed, *spaces, NO_TIME_LIMIT, masked)
        self.metadata = {**world.env.metadata, **self.metadata}
        self._own_state = None if world.state() is None else torch.empty(0)
        self._next_seed: int | None = int(seed)  # of a reset() that names none

    @property
    def state(self) -> Tensor:
        return self._state_of(self.obs) if self._own_state is None else self._own_state

    @property
    def state_dim(self) -> int:
        state = self._worlds[0].state()
        return super().state_dim if state is None else len(state)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Tensor, dict]:
        """Start a new episode in every env, in env i with `seed + i`: obs (N, A, obs_dim), {}.

        Without a seed the first reset takes the constructor's, and later ones let the envs' random
        generators run on.
        """
        seed = self._next_seed if seed is None else int(seed)
        self._next_seed = None
        for i, world in enumerate(self._worlds):
            world.reset(None if seed is None else seed + i, options)
        self._returns.zero_()
        self._lengths.zero_()
        self.obs = self._observe()
        self._look()
        return self.obs, {}

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """As `MultiAgentVecEnv.step`."""
        if self.obs is None:
            raise RuntimeError(f"{self.name}: call reset() before the first step()")
        actions = self.check_action(action).detach().cpu().numpy()
        results = [world.step(a) for world, a in zip(self._worlds, actions, strict=True)]
        rewards, terminated, truncated = zip(*results, strict=True)
        reward = torch.tensor(np.array(rewards), dtype=torch.float32, device=self.device)
        terminated = torch.tensor(terminated, device=self.device)
        truncated = torch.tensor(truncated, device=self.device)
        self.obs = final_obs = self._observe()
        self._look()
        final_state = self.state
        returns, lengths = self._returns + reward.sum(1), self._lengths + 1
        done = terminated | truncated
        ended = done.nonzero().flatten().tolist()
        for i in ended:
            self._worlds[i].reset(None, None)
        if ended:
            self.obs = self._observe()
            self._look()
        self._returns = torch.where(done, 0.0, returns)
        self._lengths = torch.where(done, 0, lengths)
        info = {"final_obs": final_obs, "episode_return": returns, "episode_length": lengths}
        return self.obs, reward, terminated, truncated, {**info, "final_state": final_state}

    def _observe(self) -> Tensor:
        """What all agents of all worlds see, padded, as one tensor (N, A, obs_dim)."""
        n = int(self.single_action_space.n) if self.available_in_obs else 0
        shape = (self.num_envs, self.num_agents, *self.single_observation_space.shape)
        obs = np.zeros(shape, np.float32)
        for i, world in enumerate(self._worlds):
            for agent, (seen, mask) in enumerate(zip(world.seen, world.masks, strict=True)):
                if seen is not None:
                    obs[i, agent, : len(seen)] = seen
                    if n:
                        own = int(world.action_spaces[agent].n)
                        # A mask that allows nothing, as at an end, restricts no choice to come.
                        given = mask is not None and np.any(mask)
                        obs[i, agent, shape[2] - n :][:own] = mask if given else 1
        return torch.from_numpy(obs).to(self.device)

    def _look(self) -> None:
        """Note who lives, and the worlds' own states."""
        alive = [[seen is not None for seen in world.seen] for world in self._worlds]
        self.alive = torch.tensor(alive, device=self.device)
        if self._own_state is not None:
            states = np.stack([world.state() for world in self._worlds]).astype(np.float32)
            self._own_state = torch.from_numpy(states).to(self.device)

    def render(self, index: int = 0) -> np.ndarray:
        """An RGB picture (height, width, 3) uint8 of env number `index`."""
        picture = self._worlds[index].env.render()
        if not isinstance(picture, np.ndarray):
            raise NotImplementedError(f"{self.name} has no picture")
        return picture

    def close_extras(self, **kwargs: Any) -> None:
        for world in getattr(self, "_worlds", ()):
            world.env.close()


class _Parallel:
    """One PettingZoo parallel env: lists, one entry an agent, in place of its dictionaries.

    `seen` and `masks`: the agents' present observations, None for who has left, and the actions
    available to them, None where the env says nothing of that.
    """

    def __init__(self, env: Any):
        self.env, self.agents = env, env.possible_agents
        observations = [env.observation_space(agent) for agent in self.agents]
        self.observation_spaces = [
            space["observation"]
            if isinstance(space, Dict) and "observation" in space.keys()
            else space
            for space in observations
        ]
        self.action_spaces = [env.action_space(agent) for agent in self.agents]
        space = getattr(env, "state_space", None)
        self._has_state = isinstance(space, Box) and len(space.shape) == 1

    def masks_actions(self, seed: int) -> bool:
        """Also the first reset: some worlds have no state() before."""
        self.reset(seed, None)
        return any(mask is not None for mask in self.masks)

    def state(self) -> np.ndarray | None:
        return self.env.state() if self._has_state else None

    def reset(self, seed: int | None, options: dict | None) -> None:
        self._take(*self.env.reset(seed=seed, options=options))

    def step(self, actions: np.ndarray) -> tuple[list[float], bool, bool]:
        """-> rewards, terminated, truncated"""
        given = {
            agent: _own_action(action, space)
            for agent, action, space in zip(self.agents, actions, self.action_spaces, strict=True)
            if agent in self.env.agents
        }
        observations, rewards, _, truncations, infos = self.env.step(given)
        self._take(observations, infos)
        over, truncated = not self.env.agents, any(truncations.values())
        rewards = [float(rewards.get(agent, 0.0)) for agent in self.agents]
        return rewards, over and not truncated, over and truncated

    def _take(self, observations: dict, infos: dict) -> None:
        self.seen, self.masks = [], []
        last = not self.env.agents  # everybody's last observation counts
        for agent in self.agents:
            seen = observations.get(agent) if last or agent in self.env.agents else None
            mask = infos.get(agent, {}).get("action_mask")
            if isinstance(seen, dict):
                seen, mask = seen["observation"], seen.get("action_mask", mask)
            self.seen.append(None if seen is None else np.array(seen))
            self.masks.append(mask)


class _Tuples(_Parallel):
    """The same for a Gymnasium env whose spaces, observations and rewards are one an agent."""

    def __init__(self, env: gymnasium.Env):
        self.env = env
        self.observation_spaces = list(env.observation_space)
        self.action_spaces = list(env.action_space)

    def state(self) -> None:
        return None

    def step(self, actions: np.ndarray) -> tuple[list[float], bool, bool]:
        given = tuple(map(_own_action, actions, self.action_spaces))
        observations, rewards, terminated, truncated, info = self.env.step(given)
        self._take(observations, info)
        shared = np.broadcast_to(np.asarray(rewards, float), (len(self.action_spaces),))
        return shared.tolist(), bool(terminated), bool(truncated)

    def _take(self, observations: tuple, info: dict) -> None:
        self.seen = [np.array(seen) for seen in observations]
        self.masks = list(info.get("action_mask", [None] * len(self.seen)))


def _own_action(action: np.ndarray, space: gymnasium.Space) -> Any:
    """One agent's action as its own space has it: counted from its start, clipped, not padded."""
    if isinstance(space, Discrete):
        return int(action) + int(space.start)
    return np.clip(action[: space.shape[0]].astype(space.dtype), space.low, space.high)


def _maker_of_worlds(name: str, options: dict[str, Any]) -> Callable[[], "_Parallel | _Tuples"]:
    """A function that makes one world; ValueError if there is none of that name."""
    if not name.startswith(PETTINGZOO):
        # the checker warns of rewards that are lists
        make_one = _maker(name, {"disable_env_checker": True, **options}, copies=False)
        return lambda: _Tuples(make_one())
    path = name.removeprefix(PETTINGZOO)
    try:
        module = importlib.import_module(path)
    except Exception as error:
        hint = ": pip install pettingzoo mpe2 lbforaging" if isinstance(error, ImportError) else ""
        raise ValueError(
            f"{name}: importing {path!r} failed with {type(error).__name__}: {error}{hint}"
        ) from error
    if not hasattr(module, "parallel_env"):
        raise ValueError(f"{name}: the module {path!r} has no parallel_env")

    def make_one() -> _Parallel:
        try:
            return _Parallel(module.parallel_env(**options))
        except Exception as error:
            message = textwrap.shorten(f"{name}: {type(error).__name__}: {error}", 300)
            raise ValueError(message) from error

    return make_one
