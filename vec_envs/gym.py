"""Any Gymnasium environment, and any PettingZoo parallel one, behind the `VecEnv` contract.

    env = make("LunarLander-v3", num_envs=16)                     # stepped one after another, here
    env = make("BipedalWalker-v3", num_envs=16, processes=True)   # stepped in 16 processes
    env = make("my_package:MyEnv-v0", num_envs=4)                 # an id that my_package registers
    env = make("pettingzoo:mpe2.simple_tag_v3", num_envs=4)       # several agents, by its module
    env = make("lbforaging:Foraging-8x8-2p-2f-coop-v3", 4)        # the same as a Gymnasium id

Episodes, time limits and random generators are Gymnasium's own: env i after `reset(seed)` plays
what `gymnasium.make(id)` plays after `reset(seed=env_seeds(seed, num_envs)[i])`.
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

from vec_envs.core import MultiAgentVecEnv, VecEnv, env_seeds

PETTINGZOO = "pettingzoo:"  # the prefix of a module with a `parallel_env`
NO_TIME_LIMIT = 10**9  # `max_episode_steps` of an env that is never truncated


class GymEnv(VecEnv):
    """`num_envs` copies of the Gymnasium environment `name`, an id or "package:id".

    Observations: a flat Box as float32 (N, obs_dim); a Discrete(n) one-hot (N, n).
    Actions: a flat Box of floats in the env's own bounds, clipped to them (N, act_dim); a
    Discrete(n) always 0 ... n - 1 (N,), also where the env counts from another start.

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
        self._first_seed: int | None = seed  # of the first reset(), if that has none
        self._processes: list[multiprocessing.Process] = []
        # A daemonic process (a worker, the evaluator) may not start any: there one after another.
        processes = processes and not multiprocessing.current_process().daemon
        kwargs: dict[str, Any] = {"copy": False, "autoreset_mode": AutoresetMode.SAME_STEP}
        if processes:
            methods = multiprocessing.get_all_start_methods()
            kwargs["context"] = "forkserver" if "forkserver" in methods else "spawn"
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

    # The spec and not its id, which is registered in this process only. Gymnasium sends a nested
    # function to a new process by value, so that the process need not import this module and torch.
    def make_one() -> gymnasium.Env:
        env = gymnasium.make(spec, **options)
        if not copies:
            return env
        # Copied, because an env may write its next episode into the array of its last observation.
        return TransformObservation(env, np.copy, None)

    return make_one


def _ignoring_ctrl_c(make_one: Callable[[], gymnasium.Env]) -> Callable[[], gymnasium.Env]:
    """`make_one` for a process of its own that leaves Ctrl-C, which all receive, to its parent."""

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
    """A Gymnasium id with a Tuple of action spaces, one per agent."""


class MultiAgentGymEnv(MultiAgentVecEnv):
    """`num_envs` copies of an env with several agents, stepped one after another in this process.

    `name` is "pettingzoo:package.module", a module with PettingZoo's `parallel_env`, to which
    `options` go; or a Gymnasium id whose spaces and observations are tuples, one entry per agent.
    Observations: flat Boxes; actions: all Discrete, or all flat Boxes of floats. Where observations
    or infos have an "action_mask", the masks stand at the end of the observations
    (`available_in_obs`). The state is the env's own `state()` where it has one. An agent that is no
    longer in PettingZoo's `agents` is not `alive`; the episode ends when none is left, truncated if
    any agent was truncated in its last step.

    ValueError: unknown module, id or option, missing package, space that is not supported.
    """

    exact_resume = False  # a simulator that is not ours cannot be saved

    def __init__(
        self, name: str, num_envs: int, device: torch.device | str = "cpu", seed: int = 0,
        **options: Any,
    ):  # fmt: skip
        make_one = _multi_agent_maker(name, options)
        self._envs = [make_one() for _ in range(max(1, num_envs))]
        first = self._envs[0]
        spaces = first.observation_spaces, first.action_spaces
        for pair in zip(*spaces, strict=True):
            _check_spaces(name, *pair)
        kinds = {type(space) for space in first.action_spaces}
        if len(kinds) > 1 or not all(isinstance(s, Box) for s in first.observation_spaces):
            raise ValueError(
                f"{name}: the agents' spaces are not supported together, only flat Boxes of "
                "observations and actions that are all Discrete or all flat Boxes are"
            )
        first.reset(env_seeds(seed, 1)[0], None)  # masks and state() may not exist before
        masked = any(mask is not None for mask in first.action_masks) and kinds == {Discrete}
        super().__init__(name, num_envs, device, seed, *spaces, NO_TIME_LIMIT, masked)
        self.metadata = {**first.env.metadata, **self.metadata}
        self._own_state = None if first.state() is None else torch.empty(0)  # (N, state_dim)
        self._first_seed: int | None = seed  # of the first reset(), if that has none

    @property
    def state(self) -> Tensor:
        return self._state_of(self.obs) if self._own_state is None else self._own_state

    @property
    def state_dim(self) -> int:
        state = self._envs[0].state()
        return super().state_dim if state is None else len(state)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Tensor, dict]:
        """Start a new episode in every env, with seeds `env_seeds`: obs (N, A, obs_dim), {}.

        Without a seed the first reset takes the constructor's, and later ones continue the envs'
        random generators.
        """
        seed = self._first_seed if seed is None else seed
        self._first_seed = None
        seeds = [None] * self.num_envs if seed is None else env_seeds(seed, self.num_envs)
        for env, env_seed in zip(self._envs, seeds, strict=True):
            env.reset(env_seed, options)
        self._returns.zero_()
        self._lengths.zero_()
        self.obs = self._observe()
        self._update_state()
        return self.obs, {}

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """As `MultiAgentVecEnv.step`."""
        if self.obs is None:
            raise RuntimeError(f"{self.name}: call reset() before the first step()")
        actions = self.check_action(action).detach().cpu().numpy()
        results = [env.step(a) for env, a in zip(self._envs, actions, strict=True)]
        rewards, terminated, truncated = zip(*results, strict=True)
        reward = torch.tensor(np.array(rewards), dtype=torch.float32, device=self.device)
        terminated = torch.tensor(terminated, device=self.device)
        truncated = torch.tensor(truncated, device=self.device)
        self.obs = final_obs = self._observe()
        self._update_state()
        final_state = self.state
        returns, lengths = self._returns + reward.sum(1), self._lengths + 1
        done = terminated | truncated
        ended = done.nonzero().flatten().tolist()
        for i in ended:
            self._envs[i].reset(None, None)
        if ended:
            self.obs = self._observe()
            self._update_state()
        self._returns = torch.where(done, 0.0, returns)
        self._lengths = torch.where(done, 0, lengths)
        info = {"final_obs": final_obs, "episode_return": returns, "episode_length": lengths}
        return self.obs, reward, terminated, truncated, {**info, "final_state": final_state}

    def _observe(self) -> Tensor:
        """The observations of all agents, padded (N, A, obs_dim)."""
        n = int(self.single_action_space.n) if self.available_in_obs else 0
        shape = (self.num_envs, self.num_agents, *self.single_observation_space.shape)
        obs = np.zeros(shape, np.float32)
        for i, env in enumerate(self._envs):
            pairs = zip(env.observations, env.action_masks, strict=True)
            for agent, (observation, mask) in enumerate(pairs):
                if observation is not None:
                    obs[i, agent, : len(observation)] = observation
                    if n:
                        own = int(env.action_spaces[agent].n)
                        # A mask that allows nothing, as at an episode's end, is taken to allow
                        # all: a policy cannot be computed over an empty set of actions.
                        given = mask is not None and np.any(mask)
                        obs[i, agent, shape[2] - n :][:own] = mask if given else 1
        return torch.from_numpy(obs).to(self.device)

    def _update_state(self) -> None:
        """Read `alive` and the envs' own states."""
        alive = [[obs is not None for obs in env.observations] for env in self._envs]
        self.alive = torch.tensor(alive, device=self.device)
        if self._own_state is not None:
            states = np.stack([env.state() for env in self._envs]).astype(np.float32)
            self._own_state = torch.from_numpy(states).to(self.device)

    def render(self, index: int = 0) -> np.ndarray:
        """An RGB picture (height, width, 3) uint8 of env number `index`."""
        picture = self._envs[index].env.render()
        if not isinstance(picture, np.ndarray):
            raise NotImplementedError(f"{self.name} has no picture")
        return picture

    def close_extras(self, **kwargs: Any) -> None:
        for env in getattr(self, "_envs", ()):
            env.env.close()


class _PettingZooEnv:
    """One PettingZoo parallel env, with lists, one entry per agent, in place of its dictionaries.

    `observations`: the present ones, None for an agent that has left. `action_masks`: the actions
    available to each agent, None where the env has no mask.
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

    def state(self) -> np.ndarray | None:
        return self.env.state() if self._has_state else None

    def reset(self, seed: int | None, options: dict | None) -> None:
        self._store(*self.env.reset(seed=seed, options=options))

    def step(self, actions: np.ndarray) -> tuple[list[float], bool, bool]:
        """-> rewards, terminated, truncated; `actions` (A,) or (A, act_dim) are padded."""
        given = {
            agent: _own_action(action, space)
            for agent, action, space in zip(self.agents, actions, self.action_spaces, strict=True)
            if agent in self.env.agents
        }
        observations, rewards, _, truncations, infos = self.env.step(given)
        self._store(observations, infos)
        over, truncated = not self.env.agents, any(truncations.values())
        rewards = [float(rewards.get(agent, 0.0)) for agent in self.agents]
        return rewards, over and not truncated, over and truncated

    def _store(self, observations: dict, infos: dict) -> None:
        self.observations, self.action_masks = [], []
        last = not self.env.agents  # the episode is over: these observations are its final ones
        for agent in self.agents:
            obs = observations.get(agent) if last or agent in self.env.agents else None
            mask = infos.get(agent, {}).get("action_mask")
            if isinstance(obs, dict):
                obs, mask = obs["observation"], obs.get("action_mask", mask)
            self.observations.append(None if obs is None else np.array(obs))
            self.action_masks.append(mask)


class _TupleEnv(_PettingZooEnv):
    """The same for a Gymnasium env with tuples, one entry per agent, of spaces and observations."""

    def __init__(self, env: gymnasium.Env):
        self.env = env
        self.observation_spaces = list(env.observation_space)
        self.action_spaces = list(env.action_space)

    def state(self) -> None:
        return None

    def step(self, actions: np.ndarray) -> tuple[list[float], bool, bool]:
        given = tuple(map(_own_action, actions, self.action_spaces))
        observations, rewards, terminated, truncated, info = self.env.step(given)
        self._store(observations, info)
        # One reward is everyone's.
        rewards = np.broadcast_to(np.asarray(rewards, float), (len(self.action_spaces),))
        return rewards.tolist(), bool(terminated), bool(truncated)

    def _store(self, observations: tuple, info: dict) -> None:
        self.observations = [np.array(obs) for obs in observations]
        self.action_masks = list(info.get("action_mask", [None] * len(self.observations)))


def _own_action(action: np.ndarray, space: gymnasium.Space) -> Any:
    """A padded action in the agent's own `space`: from its start on, clipped, without padding."""
    if isinstance(space, Discrete):
        return int(action) + int(space.start)
    return np.clip(action[: space.shape[0]].astype(space.dtype), space.low, space.high)


def _multi_agent_maker(name: str, options: dict[str, Any]) -> Callable[[], _PettingZooEnv]:
    """A function that makes one env with several agents; ValueError if `name` is unknown."""
    if not name.startswith(PETTINGZOO):
        # Gymnasium's checker would warn that rewards are lists.
        make_one = _maker(name, {"disable_env_checker": True, **options}, copies=False)
        return lambda: _TupleEnv(make_one())
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

    def make_one() -> _PettingZooEnv:
        try:
            return _PettingZooEnv(module.parallel_env(**options))
        except Exception as error:
            message = textwrap.shorten(f"{name}: {type(error).__name__}: {error}", 300)
            raise ValueError(message) from error

    return make_one
