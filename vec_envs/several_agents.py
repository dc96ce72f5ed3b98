"""Environments with several agents from elsewhere, behind the contract of `MultiAgentVecEnv`.

    env = make("pettingzoo:mpe2.simple_tag_v3", num_envs=4)       # a PettingZoo parallel env
    env = make("lbforaging:Foraging-8x8-2p-2f-coop-v3", 4)        # a Gymnasium id with tuples
    env = make("smac:3m", num_envs=4)                             # StarCraft II, a map of SMAC

`MultiAgentGymEnv` batches copies of one adapter, which has lists, one entry per agent, in place of
whatever the package has. A package with another interface needs another adapter only.
"""

import importlib
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete
from torch import Tensor

from vec_envs.core import MultiAgentVecEnv, env_seeds
from vec_envs.gym import NO_TIME_LIMIT, in_words, is_flat, maker, short

PETTINGZOO = "pettingzoo:"  # the prefix of a module with a `parallel_env`
SMAC = "smac:"  # the prefix of a map of SMAC


class MultiAgentGymEnv(MultiAgentVecEnv):
    """`num_envs` copies of an env with several agents, stepped one after another in this process.

    `name` is "pettingzoo:package.module", a module with PettingZoo's `parallel_env`, to which
    `options` go; or a Gymnasium id whose spaces and observations are tuples, one entry per agent;
    or "smac:MAP" (`_SmacEnv`).
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
        for kind, agents_spaces in zip(("observation", "action"), spaces, strict=True):
            for space in agents_spaces:
                whole = kind == "action" and isinstance(space, Box) and space.dtype.kind != "f"
                if not is_flat(space) or whole:
                    raise ValueError(
                        f"{name}: the {kind} space {short(space)} of an agent is not supported, "
                        f"only Discrete and a flat Box{' of floats' * (kind == 'action')} are"
                    )
        kinds = {type(space) for space in first.action_spaces}
        if len(kinds) > 1 or not all(isinstance(s, Box) for s in first.observation_spaces):
            raise ValueError(
                f"{name}: the agents' spaces are not supported together, only flat Boxes of "
                "observations and actions that are all Discrete or all flat Boxes are"
            )
        if first.action_masks is None:  # masks and state() may not exist before
            first.reset(env_seeds(seed, 1)[0], None)
        masked = any(mask is not None for mask in first.action_masks) and kinds == {Discrete}
        super().__init__(name, num_envs, device, seed, *spaces, NO_TIME_LIMIT, masked)
        self.metadata = {**getattr(first.env, "metadata", {}), **self.metadata}
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
    available to each agent, None where the env has no mask (no list at all: not known yet).
    """

    action_masks: list[np.ndarray | None] | None = None

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


class _SmacEnv(_PettingZooEnv):
    """The same for a map of SMAC (StarCraft Multi-Agent Challenge, arXiv:1902.04043).

    The team's reward is divided among the agents, dead ones too, so that their sum, and with it
    `episode_return`, is the team's: 20 for a battle won, by default. A dead unit, whose only action
    is 0, is no longer alive. A battle at its time limit has ended, unless `continuing_episode` says
    that it was cut off. StarCraft takes its seed when it is launched, at the first reset; later
    seeds are not taken, since each would launch it anew. Never run with StarCraft: the tests have
    a stand-in with SMAC's interface.
    """

    def __init__(self, make_one: Callable[..., Any]):
        self._make_one, self._launched, self.env = make_one, False, make_one()
        info = self.env.get_env_info()
        count, obs_dim = info["n_agents"], info["obs_shape"]
        self.observation_spaces = [Box(-np.inf, np.inf, (obs_dim,)) for _ in range(count)]
        self.action_spaces = [Discrete(info["n_actions"]) for _ in range(count)]
        self.action_masks = [np.ones(info["n_actions"]) for _ in range(count)]
        self._state = np.zeros(info["state_shape"], np.float32)

    def state(self) -> np.ndarray:
        return self._state

    def reset(self, seed: int | None, options: dict | None) -> None:
        if not self._launched:
            self.env, self._launched = self._make_one(seed=seed), True
        self.env.reset()
        self._look()

    def step(self, actions: np.ndarray) -> tuple[list[float], bool, bool]:
        alive = [observation is not None for observation in self.observations]
        reward, over, info = self.env.step(np.where(alive, actions, 0).tolist())
        self._look()
        # Without any info the game was lost, and SMAC has started another.
        truncated = bool(over) and (not info or bool(info.get("episode_limit")))
        rewards = [float(reward) / len(alive)] * len(alive)
        return rewards, bool(over) and not truncated, truncated

    def _look(self) -> None:
        self._state = np.array(self.env.get_state(), np.float32)
        self.action_masks = [np.array(mask) for mask in self.env.get_avail_actions()]
        observations = [np.array(obs, np.float32) for obs in self.env.get_obs()]
        pairs = zip(observations, self.action_masks, strict=True)
        self.observations = [None if mask[0] else obs for obs, mask in pairs]


def _own_action(action: np.ndarray, space: gymnasium.Space) -> Any:
    """A padded action in the agent's own `space`: from its start on, clipped, without padding."""
    if isinstance(space, Discrete):
        return int(action) + int(space.start)
    return np.clip(action[: space.shape[0]].astype(space.dtype), space.low, space.high)


def _multi_agent_maker(name: str, options: dict[str, Any]) -> Callable[[], _PettingZooEnv]:
    """A function that makes one env with several agents; ValueError if `name` is unknown."""
    if name.startswith(SMAC):
        return lambda: _SmacEnv(_smac_maker(name, options))
    if not name.startswith(PETTINGZOO):
        # Gymnasium's checker would warn that rewards are lists.
        make_one = maker(name, {"disable_env_checker": True, **options}, flat=False)
        return lambda: _TupleEnv(make_one())
    path = name.removeprefix(PETTINGZOO)
    try:
        module = importlib.import_module(path)
    except Exception as error:
        hint = "; pip install pettingzoo mpe2" if isinstance(error, ImportError) else ""
        raise ValueError(
            f"{name}: importing {path!r} failed with {in_words(error)}{hint}"
        ) from error
    if not hasattr(module, "parallel_env"):
        raise ValueError(f"{name}: the module {path!r} has no parallel_env")

    def make_one() -> _PettingZooEnv:
        try:
            return _PettingZooEnv(module.parallel_env(**options))
        except Exception as error:
            raise ValueError(f"{name}: {in_words(error)}") from error

    return make_one


def _smac_maker(name: str, options: dict[str, Any]) -> Callable[..., Any]:
    """SMAC's `StarCraft2Env` of the map in `name`, whose seed is yet to be given."""
    try:
        module = importlib.import_module("smac.env")
    except ImportError as error:
        raise ValueError(
            f"{name} needs SMAC ({in_words(error)}): pip install "
            "git+https://github.com/oxwhirl/smac.git, and StarCraft II with SMAC's maps in the "
            "folder SC2PATH, as its README says"
        ) from error

    def make_one(**seed: int | None) -> Any:
        try:
            return module.StarCraft2Env(map_name=name.removeprefix(SMAC), **options, **seed)
        except (LookupError, TypeError) as error:  # of the map, of an option
            raise ValueError(f"{name}: {in_words(error)}") from error

    return make_one
