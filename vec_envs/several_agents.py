"""Environments with several agents from elsewhere, behind the contract of `MultiAgentVecEnv`.

    env = make("pettingzoo:mpe2.simple_tag_v3", num_envs=4)       # a PettingZoo parallel env
    env = make("lbforaging:Foraging-8x8-2p-2f-coop-v3", 4)        # a Gymnasium id with tuples
    env = make("smac:3m", num_envs=4)                             # StarCraft II, a map of SMAC

`MultiAgentGymEnv` batches copies of an adapter, whose lists have one entry per agent whatever the
package has. A package with another interface needs only another adapter.
"""

import importlib
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete
from torch import Tensor

from vec_envs.core import ContractError, MultiAgentVecEnv, env_seeds
from vec_envs.gym import (
    NO_TIME_LIMIT,
    Outside,
    check_spaces,
    flag,
    flat_box,
    flattener,
    in_words,
    introduce,
    maker,
    number,
    one_choice,
    own_action,
)

PETTINGZOO = "pettingzoo:"  # the prefix of a module with a `parallel_env`
SMAC = "smac:"  # the prefix of a map of SMAC


class MultiAgentGymEnv(Outside, MultiAgentVecEnv):
    """`num_envs` copies of an env with several agents, stepped one after another in this process.

    `name` is "pettingzoo:package.module", a module with PettingZoo's `parallel_env`, to which
    `options` go; or a Gymnasium id whose spaces and observations are tuples, one entry per agent;
    or "smac:MAP" (`_SmacEnv`).
    Observations and actions of an agent are those of a `GymEnv`, flattened in the same way; all
    agents' actions become Discrete, or all are flat Boxes. Where observations or infos have an
    "action_mask", the masks stand at the end of the observations (`available_in_obs`). The state is
    the env's own `state()` where it has one. An agent that was terminated or truncated, or is no
    longer in PettingZoo's `agents`, is not `alive`; the episode ends when none is left, truncated
    if any agent was truncated, and not terminated, in its last step.

    ValueError: unknown module, id or option, missing package, space that is not supported.
    """

    def __init__(
        self, name: str, /, num_envs: int, device: torch.device | str = "cpu", seed: int = 0,
        **options: Any,
    ):  # fmt: skip
        make_one = _multi_agent_maker(name, options)
        envs = [make_one() for _ in range(max(1, num_envs))]
        first = envs[0]
        if not first.action_spaces:
            raise ValueError(f"{name}: it has no agents")
        for observation, action in zip(first.observation_spaces, first.action_spaces, strict=True):
            check_spaces(name, observation, action)
        introduce(name, first.observation_spaces[0], first.action_spaces[0])
        observations = [flat_box(space) for space in first.observation_spaces]
        actions = [one_choice(space) for space in first.action_spaces]
        if len({type(space) for space in actions}) > 1:
            raise ValueError(
                f"{name}: the agents' spaces are not supported together, only actions that are "
                "all discrete or all Boxes are (a Tuple has an entry for each agent)"
            )
        if first.action_masks is None:  # masks and state() may not exist before
            first.reset(env_seeds(seed, 1)[0], None)
        masked = any(m is not None for m in first.action_masks) and isinstance(actions[0], Discrete)
        if masked and not all(isinstance(space, Discrete) for space in first.action_spaces):
            raise ValueError(f"{name}: action masks are supported for Discrete actions only")
        spaces = observations, actions
        super().__init__(name, num_envs, device, seed, *spaces, NO_TIME_LIMIT, masked)
        self._own_state = None if first.state() is None else torch.empty(0)  # (N, state_dim)
        self._outside(envs, seed)

    @property
    def state(self) -> Tensor:
        return self._state_of(self.obs) if self._own_state is None else self._own_state

    @property
    def state_dim(self) -> int:
        state = self._envs[0].state()
        return super().state_dim if state is None else len(state)

    def _observe(self) -> Tensor:
        """The observations of all agents, padded (N, A, obs_dim); also reads `alive` and states."""
        discrete = isinstance(self.single_action_space, Discrete)
        n = int(self.single_action_space.n) if self.available_in_obs else 0
        shape = (self.num_envs, self.num_agents, *self.single_observation_space.shape)
        obs = np.zeros(shape, np.float32)
        for i, env in enumerate(self._envs):
            pairs = zip(env.observations, env.action_masks, strict=True)
            for agent, (observation, mask) in enumerate(pairs):
                if observation is not None:
                    obs[i, agent, : len(observation)] = observation
                    own = int(self.action_mask[agent].sum()) if n else 0
                    if discrete and mask is not None and len(mask) != own:
                        late = "comes in a step, and none came at the first reset"
                        why = f"has {len(mask)} entries for {own} actions" if n else late
                        raise ContractError(f"{self.name}: agent {agent}'s action mask {why}")
                    if n:
                        # A mask that allows nothing, as at an episode's end, is taken to allow
                        # all: a policy cannot be computed over an empty set of actions.
                        given = mask is not None and np.any(mask)
                        obs[i, agent, shape[2] - n :][:own] = mask if given else 1
        alive = [
            [observation is not None for observation in env.observations] for env in self._envs
        ]
        self.alive = torch.tensor(alive, device=self.device)
        if self._own_state is not None:
            states = np.stack([env.state() for env in self._envs]).astype(np.float32)
            self._own_state = torch.from_numpy(states).to(self.device)
        return torch.from_numpy(obs).to(self.device)


class _PettingZooEnv:
    """One PettingZoo parallel env, with lists, one entry per agent, in place of its dictionaries.

    `observations`: the present ones, flat, None for an agent that has left. `action_masks`: the
    actions available to each agent, None where the env has no mask (no list at all: not known yet).
    """

    action_masks: list[np.ndarray | None] | None = None
    success: float | None = None
    _state: np.ndarray | None = None

    def __init__(self, name: str, env: Any):
        self.env, self.agents = env, env.possible_agents
        spaces = [env.observation_space(agent) for agent in self.agents]
        masked = [isinstance(space, Dict) and "action_mask" in space.keys() for space in spaces]
        self.observation_spaces = [
            Dict({k: part for k, part in space.items() if k != "action_mask"}) if has else space
            for space, has in zip(spaces, masked, strict=True)
        ]
        self.action_spaces = [env.action_space(agent) for agent in self.agents]
        self._masked, self._flat = masked, [flattener(name, x) for x in self.observation_spaces]
        space = getattr(env, "state_space", None)
        self._has_state = isinstance(space, Box) and len(space.shape) == 1

    def state(self) -> np.ndarray | None:
        if self._has_state:
            try:
                self._state = self.env.state()
            except Exception:  # without agents some have none: then their last one is taken
                if self.env.agents:
                    raise
        return self._state

    def reset(self, seed: int | None, options: dict | None) -> None:
        observations, infos = self.env.reset(seed=seed, options=options)
        self._store(observations, infos, self.env.agents)

    def step(self, actions: np.ndarray) -> tuple[list[float], bool, bool]:
        """-> rewards, terminated, truncated; `actions` (A,) or (A, act_dim) are padded."""
        given = {
            agent: own_action(action, space)
            for agent, action, space in zip(self.agents, actions, self.action_spaces, strict=True)
            if agent in self.env.agents
        }
        observations, rewards, terminations, truncations, infos = self.env.step(given)
        # An env should take who has left from its `agents`; not all of them do.
        left = {agent for ends in (terminations, truncations) for agent in ends if ends[agent]}
        present = [agent for agent in self.env.agents if agent not in left]
        cut_off = [a for a in given if truncations.get(a) and not terminations.get(a)]
        over, truncated = not present, bool(cut_off)
        seen = present or cut_off or list(given)  # at the end: who could have gone on, if any
        self._store(observations, infos, seen)
        rewards = [number(rewards.get(agent, 0.0)) for agent in self.agents]
        return rewards, over and not truncated, over and truncated

    def _store(self, observations: dict, infos: dict, present: list) -> None:
        self.observations, self.action_masks = [], []
        for agent, masked, flat in zip(self.agents, self._masked, self._flat, strict=True):
            obs = observations.get(agent) if agent in present else None
            mask = ((infos or {}).get(agent) or {}).get("action_mask")
            self.observations.append(None if obs is None else flat(obs))
            if obs is not None and masked:
                mask = obs["action_mask"]
            self.action_masks.append(mask)


class _TupleEnv(_PettingZooEnv):
    """The same for a Gymnasium env with tuples, one entry per agent, of spaces and observations."""

    def __init__(self, name: str, env: gymnasium.Env):
        self.env = env
        self.observation_spaces = list(env.observation_space)
        self.action_spaces = list(env.action_space)
        self._flat = [flattener(name, space) for space in self.observation_spaces]

    def state(self) -> None:
        return None

    def reset(self, seed: int | None, options: dict | None) -> None:
        self._store(*self.env.reset(seed=seed, options=options))

    def step(self, actions: np.ndarray) -> tuple[list[float], bool, bool]:
        given = tuple(map(own_action, actions, self.action_spaces))
        observations, rewards, terminated, truncated, info = self.env.step(given)
        self._store(observations, info)
        # One reward is everyone's.
        rewards = np.broadcast_to(np.asarray(rewards, float), (len(self.action_spaces),))
        return rewards.tolist(), flag(np.all(terminated)), flag(np.any(truncated))

    def _store(self, observations: tuple, info: dict) -> None:
        pairs = zip(self._flat, observations, strict=True)
        self.observations = [flat(observation) for flat, observation in pairs]
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
        self.success = float(info.get("battle_won", False))
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


def _multi_agent_maker(name: str, options: dict[str, Any]) -> Callable[[], _PettingZooEnv]:
    """A function that makes one env with several agents; ValueError if `name` is unknown."""
    if name.startswith(SMAC):
        return lambda: _SmacEnv(_smac_maker(name, options))
    if not name.startswith(PETTINGZOO):
        # Gymnasium's checker would warn that rewards are lists.
        make_one = maker(name, {"disable_env_checker": True, **options})
        return lambda: _TupleEnv(name, make_one())
    path = name.removeprefix(PETTINGZOO)
    try:
        module = importlib.import_module(path)
    except Exception as error:
        absent = getattr(error, "name", None) in ("pettingzoo", "mpe2")
        hint = "; pip install pettingzoo mpe2" if absent else ""
        raise ValueError(
            f"{name}: importing {path!r} failed with {in_words(error)}{hint}"
        ) from error
    if not hasattr(module, "parallel_env"):
        raise ValueError(f"{name}: the module {path!r} has no parallel_env")

    def make_one() -> _PettingZooEnv:
        try:
            return _PettingZooEnv(name, module.parallel_env(**options))
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
