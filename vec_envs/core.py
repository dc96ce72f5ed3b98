"""The contract of every environment in `vec_envs`, and the part of it that all have in common.

A `VecEnv` is a `gymnasium.vector.VectorEnv` whose arrays are torch tensors, batch first:

    env = make("Ant", num_envs=64)
    obs, info = env.reset(seed=0)                                   # (N, obs_dim) float32
    obs, reward, terminated, truncated, info = env.step(action)     # action (N, act_dim) or (N,)

- **Autoreset in the same step** (`AutoresetMode.SAME_STEP`): where an episode ends, `obs` is
  already the first observation of the next one, and `info["final_obs"]` the last one of the old.
  `final_obs` is always the whole (N, obs_dim) tensor of true next observations, so that a learner
  reads it without asking where an episode ended.
- `info["episode_return"]`, `info["episode_length"]` (N,): statistics of the running episode,
  final where it ended. `info["success"]` (N,), 0 or 1, may say whether the step was a success.
  Do not change a returned tensor in place: `obs`, `env.obs` and, where no episode ended,
  `final_obs` are the same tensor.
- Actions are in the env's own bounds (`single_action_space`). The env clips those out of bounds; a
  control cost is charged for the action as given (MuJoCo) or as clipped (Pendulum), as in
  Gymnasium. Wrong shapes are an error; so are NaN and discrete actions that do not exist, except
  on a GPU, where looking would cost a synchronisation.
- `state_dict()` holds everything the future depends on: simulator, episodes, random generator.
- One seed, one sequence of episodes. The environments' generators are seeded by `env_seeds(seed)`,
  so that they do not draw the numbers that torch draws after `torch.manual_seed(seed)`.

To write an environment, subclass `VecEnv` and give it three methods, each for all envs at once
(`chasing.py` is the tutorial). They use masks and `torch.where` instead of data-dependent indexing,
so that on a GPU a step has no host synchronisation and can be captured as a CUDA graph:

    _restart(mask)      draw a new initial state where mask (N,) is true
    _simulate(action)   advance every env one step -> reward (N,), terminated (N,)
    _observe()          the present observation -> (N, obs_dim)

**Several agents in one env** (`MultiAgentVecEnv`; `particles.py`). The agents' axis is second:
obs (N, A, obs_dim), action (N, A) or (N, A, act_dim), reward (N, A). The agents share one episode:
terminated, truncated and the statistics stay (N,); `episode_return` sums over the agents.

- `num_agents` is A (None for a single agent); `single_observation_space` and
  `single_action_space` are those of one agent, large enough for each. Agents that need less are
  padded: `obs_mask` (A, obs_dim) marks the entries that are an agent's own, the others are zero;
  `action_mask` (A, n) or (A, act_dim) marks its own actions, or entries of its action. A padded
  entry has no effect; a padded Discrete action is an error.
- `state` (N, state_dim) is what a centralised critic may see in training: the environment's own
  state where it defines one, else all observations concatenated without the padding;
  `info["final_state"]` is to it what `final_obs` is to `obs`.
- `alive` (N, A): false once an agent has left an episode that others continue, even by a limit of
  its own, which is no truncation then: scripts take its value as 0. Its observation is zero, its
  reward 0 (or its share, where a reward is the team's), its action ignored. An environment that
  changes it has it in `state_names`. `info["final_alive"]` is to it what `final_obs` is to `obs`.
- `action_low`, `action_high` (A, act_dim), with continuous actions: each agent's own bounds.
- `available_in_obs`: if true, the last n entries of each observation say which of the n actions are
  allowed now (1) or not (0), so that an observation is never stored without its mask.
"""

import os
import signal
import sys
from multiprocessing import forkserver, resource_tracker
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

SIGNALS = {signal.SIGINT, signal.SIGTERM}
SAFE_PATH = "PYTHONSAFEPATH", "forkserver"  # any text does; this one says that it is ours


def available_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def start_forkserver() -> None:
    """Start the process that this one's children are forked from, if it does not run yet.

    It imports torch once for all of them; otherwise each would need seconds and memory for it. Not
    on macOS, whose libraries may abort in a process that was forked after they were loaded.
    Signals to a whole process group are blocked in it, and in a child until `unblock_signals`.
    As it is a `python -c`, it would otherwise import a random.py of the folder where one stands.
    """
    vars(sys.modules["__main__"]).setdefault("__spec__", None)  # pdb before Python 3.13 has none
    preload = ["torch", "gymnasium", "tyro"] if sys.platform == "linux" else []
    forkserver.set_forkserver_preload(preload)
    os.environ.setdefault(*SAFE_PATH)
    resource_tracker.ensure_running()  # it would be started below, and unblock the signals
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _forget_safe_path()


def unblock_signals() -> None:
    """In a child of that process: let SIGTERM end it, and leave Ctrl-C to its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    _forget_safe_path()


def _forget_safe_path() -> None:
    """Programs that an environment starts find what lies beside them, unless a user set this."""
    if os.environ.get(SAFE_PATH[0]) == SAFE_PATH[1]:
        del os.environ[SAFE_PATH[0]]


def env_seeds(seed: int, count: int) -> list[int]:
    """`count` seeds of random generators of environments, hashed from one `seed` (at least 0).

    With `seed + i` for env i, env 1 of seed 0 would play the episodes of env 0 of seed 1. With
    `seed` itself, an env's generator would draw the numbers of torch's global one, which a script
    seeds by `torch.manual_seed(seed)`: first states and exploration noise would be the same.
    All are below 2³¹, which every simulator accepts; the i-th does not depend on `count`.
    """
    sequence = np.random.SeedSequence([int(seed), 1])  # 1: another sequence than seed's alone
    return (sequence.generate_state(count) >> 1).tolist()


class ContractError(ValueError):
    """What an environment, or who steps it, does against the contract; a script says only this."""


class VecEnv(VectorEnv):
    """`num_envs` copies of one environment that step together on one device.

    `name` is used in error messages. An episode is truncated after `max_episode_steps` steps.
    `state_names` lists the tensor attributes that make up the simulator's state.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": ["rgb_array"]}
    single_observation_space: Box
    single_action_space: Box | Discrete
    state_names: tuple[str, ...] = ()
    exact_resume = True  # false where there is no `state_dict` (Gymnasium's own envs)
    num_agents: int | None = None  # None: a single agent, and no axis for it
    known_returns: dict[str, float] = {}  # of simple policies, for comparison
    evaluation_options = ""  # added to the name where a policy is scored, e.g. other data

    def __init__(
        self,
        name: str,
        num_envs: int,
        device: torch.device | str,
        seed: int,
        single_observation_space: Box,
        single_action_space: Box | Discrete,
        max_episode_steps: int,
    ):
        if num_envs < 1:
            raise ValueError(f"{name}: num_envs is {num_envs}, it must be at least 1")
        if not isinstance(max_episode_steps, int) or max_episode_steps < 1:
            limit = "it must be an int, at least 1 (10**9: no time limit)"
            raise ValueError(f"{name}: max_episode_steps is {max_episode_steps!r}, {limit}")
        for kind, space in (
            ("observation", single_observation_space),
            ("action", single_action_space),
        ):
            flat = isinstance(space, Box) and len(space.shape) == 1 and space.dtype.kind == "f"
            counts = kind == "action" and isinstance(space, Discrete) and space.start == 0
            if not flat and not counts:
                allowed = "a Box (n,) of floats" + " or a Discrete from 0" * (kind == "action")
                raise ValueError(f"{name}: its {kind} space is {space}, it must be {allowed}")
        self.name = name
        self.num_envs = num_envs
        self.device = torch.device(device)
        self.max_episode_steps = max_episode_steps
        self.single_observation_space = single_observation_space
        self.single_action_space = single_action_space
        self.observation_space = batch_space(single_observation_space, num_envs)
        self.action_space = batch_space(single_action_space, num_envs)
        # Whether a step may read its tensors' values in Python: it costs nothing on a CPU, and a
        # synchronisation on a GPU.
        self.looks = self.device.type == "cpu"
        self.generator = torch.Generator(self.device)  # the env's own
        self.generator.manual_seed(env_seeds(seed, 1)[0])
        self.obs: Tensor | None = None  # (N, obs_dim): the present observation
        self._returns = torch.zeros(num_envs, device=self.device)
        self._lengths = torch.zeros(num_envs, dtype=torch.int64, device=self.device)

    # The three methods a subclass writes.

    def _restart(self, mask: Tensor) -> None:
        raise NotImplementedError

    def _simulate(self, action: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _observe(self) -> Tensor:
        raise NotImplementedError

    def _truncate(self, lengths: Tensor) -> Tensor:
        """Which episodes are over after so many steps (N,); a wrapped simulator knows it itself."""
        return lengths >= self.max_episode_steps

    def _final(self) -> dict[str, Tensor]:
        """More for a step's info, of the state before envs whose episode has ended restart."""
        return {}

    # The contract.

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Tensor, dict]:
        """Start a new episode in every env; `seed` also restarts the random generator."""
        if seed is not None:
            self.generator.manual_seed(env_seeds(seed, 1)[0])
        self._restart(torch.ones(self.num_envs, dtype=torch.bool, device=self.device))
        for name in self.state_names:
            if getattr(getattr(self, name, None), "shape", ())[:1] != (self.num_envs,):
                expected = f"a tensor ({self.num_envs}, ...), since it is in state_names"
                raise ContractError(f"{self.name}: {name} must be {expected}")
        return self._first_observation()

    def _first_observation(self) -> tuple[Tensor, dict]:
        """The end of a reset: statistics from zero, the first observation, which is checked."""
        # Not in place: the last step's info may hold them.
        self._returns, self._lengths = (torch.zeros_like(x) for x in (self._returns, self._lengths))
        self.obs = self._observe()
        self._check_shapes(observation=self.obs)
        if self.looks and not self.obs.isfinite().all():
            raise ContractError(f"{self.name}: its first observation has NaN or infinity")
        memory = self.obs.untyped_storage().data_ptr()
        for name in self.state_names:  # a restart in place would change final_obs
            if getattr(self, name).untyped_storage().data_ptr() == memory:
                raise ContractError(f"{self.name}: its observation is {name} itself, not a copy")
        return self.obs, {}

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Advance every env one step and start a new episode where one ended.

        Returns obs (N, obs_dim), reward (N,) float32, terminated, truncated (N,) bool, info.
        Raises ContractError for an action that cannot be (see above), RuntimeError before `reset`.
        """
        if self.obs is None:
            raise RuntimeError(f"{self.name}: call reset() before the first step()")
        reward, terminated = self._simulate(self.check_action(action))
        final_obs = self._observe()
        self._check_shapes(reward=reward, terminated=terminated, observation=final_obs)
        if final_obs.untyped_storage().data_ptr() == self.obs.untyped_storage().data_ptr():
            raise ContractError(f"{self.name}: its observation is the one before, not a new tensor")
        reward = reward.to(torch.float32, copy=True)  # copies: a restart may write into the env's
        terminated = terminated.clone()
        returns = self._returns + (reward if self.num_agents is None else reward.sum(1))
        lengths = self._lengths + 1
        truncated = self._truncate(lengths)
        done = terminated | truncated
        self.obs = final_obs
        info = {"final_obs": final_obs, "episode_return": returns, "episode_length": lengths}
        info |= self._final()
        if not self.looks or bool(done.any()):  # unknown without a look: then compute it always
            self._restart(done)
            ended = done.view(-1, *[1] * (final_obs.dim() - 1))
            self.obs = torch.where(ended, self._observe(), final_obs)
            self._returns = torch.where(done, 0.0, returns)
            self._lengths = torch.where(done, 0, lengths)
        else:
            self._returns, self._lengths = returns, lengths
        return self.obs, reward, terminated, truncated, info

    def _check_shapes(self, **results: Any) -> None:
        agents = () if self.num_agents is None else (self.num_agents,)
        contract = {
            "reward": (agents, None),
            "terminated": ((), torch.bool),
            "observation": ((*agents, *self.single_observation_space.shape), torch.float32),
        }
        for what, x in results.items():
            (shape, dtype), is_tensor = contract[what], isinstance(x, Tensor)
            shape = self.num_envs, *shape
            if not is_tensor or x.shape != shape or dtype not in (x.dtype, None):
                is_now = f"{tuple(x.shape)} of {x.dtype}" if is_tensor else f"a {type(x).__name__}"
                expected = f"a tensor {shape}" + f" of {dtype}" * (dtype is not None)
                raise ContractError(f"{self.name}: {what} is {is_now}, expected {expected}")

    def check_action(self, action: Tensor) -> Tensor:
        """`action` as a tensor on the device; ContractError if it cannot be an action."""
        action = torch.as_tensor(action, device=self.device).detach()
        space = self.single_action_space
        agents = () if self.num_agents is None else (self.num_agents,)
        expected = (self.num_envs, *agents, *space.shape)
        if action.shape != expected:
            raise ContractError(
                f"{self.name}: the action has shape {tuple(action.shape)}, expected {expected}"
            )
        if isinstance(space, Discrete):
            if action.is_floating_point():
                raise ContractError(
                    f"{self.name}: the action has type {action.dtype}, expected integers"
                )
            allowable = (action >= 0) & (action < space.n)
            allowed = f"0 to {space.n - 1}"
        else:
            allowable = torch.isfinite(action)
            allowed = "finite numbers"
        if self.looks and not allowable.all():
            index = tuple((~allowable).nonzero()[0].tolist())
            raise ContractError(
                f"{self.name}: the action at index {index} is {action[index].item()}, "
                f"allowed are {allowed}"
            )
        return action

    def state_dict(self) -> dict[str, Any]:
        """Everything the future of the envs depends on, as tensors that a checkpoint can hold."""
        if not self.exact_resume:
            raise NotImplementedError(f"{self.name}: a simulator that is not ours cannot be saved")
        names = ("obs", "_returns", "_lengths", *self.state_names)
        values = {name: getattr(self, name) for name in names}
        state = {name: value.clone() for name, value in values.items() if value is not None}
        return {**state, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state from `state_dict` of an env made with the same arguments."""
        for name, value in state.items():
            if name == "generator":
                self.generator.set_state(value.cpu())
            elif len(value) != self.num_envs:
                raise ValueError(
                    f"{self.name}: the saved state has {value.shape[0]} envs, not {self.num_envs}"
                )
            else:
                setattr(self, name, value.clone().to(self.device))

    def render(self, index: int = 0) -> np.ndarray:
        """An RGB picture (height, width, 3) uint8 of env number `index`."""
        raise NotImplementedError(f"{type(self).__name__} has no method render")

    def uniform(
        self, low: float, high: float, *shape: int, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Uniform random numbers (num_envs, *shape) from the env's own generator."""
        draw = torch.rand(
            self.num_envs, *shape, generator=self.generator, device=self.device, dtype=dtype
        )
        return low + (high - low) * draw


class MultiAgentVecEnv(VecEnv):
    """`num_envs` copies of one environment with several agents; see the contract above.

    `observation_spaces` are flat Boxes, `action_spaces` all Discrete or all flat Boxes, one per
    agent. A subclass writes the three methods of `VecEnv`, with the agents' axis:
    _simulate(action) -> reward (N, A), terminated (N,); _observe() -> padded (N, A, obs_dim), whose
    last n entries with `available_in_obs` (Discrete actions) are the mask of available actions.
    """

    num_agents: int

    def __init__(
        self,
        name: str,
        num_envs: int,
        device: torch.device | str,
        seed: int,
        observation_spaces: list[Box],
        action_spaces: list[Box] | list[Discrete],
        max_episode_steps: int,
        available_in_obs: bool = False,
    ):
        obs_space, obs_mask = _padded(observation_spaces)
        action_space, action_mask = _padded(action_spaces, np.inf)
        self.available_in_obs = available_in_obs
        if available_in_obs:
            low, high = (np.pad(b, (0, action_space.n)) for b in (obs_space.low, obs_space.high))
            high[-action_space.n :] = 1.0
            obs_space = Box(low, high)
            obs_mask = torch.cat((obs_mask, action_mask), 1)
        super().__init__(name, num_envs, device, seed, obs_space, action_space, max_episode_steps)
        self.num_agents = len(obs_mask)
        self.observation_space = batch_space(batch_space(obs_space, self.num_agents), num_envs)
        self.action_space = batch_space(batch_space(action_space, self.num_agents), num_envs)
        self.obs_mask, self.action_mask = obs_mask.to(self.device), action_mask.to(self.device)
        self.alive = torch.ones(num_envs, self.num_agents, dtype=torch.bool, device=self.device)
        if isinstance(action_space, Box):  # (A, act_dim): each agent's own, 0 where it is padded
            lows = [torch.from_numpy(space.low).float() for space in action_spaces]
            highs = [torch.from_numpy(space.high).float() for space in action_spaces]
            self.action_low = pad_sequence(lows, batch_first=True).to(self.device)
            self.action_high = pad_sequence(highs, batch_first=True).to(self.device)
        self._own_entries = self.obs_mask.flatten().nonzero().squeeze(1)  # (state_dim,)

    @property
    def state(self) -> Tensor:
        """What a centralised critic sees now (N, state_dim)."""
        return self._state_of(self.obs)

    @property
    def state_dim(self) -> int:
        """How many numbers `state` has for each env."""
        return len(self._own_entries)

    def _state_of(self, obs: Tensor) -> Tensor:
        return obs.flatten(1).index_select(1, self._own_entries)

    def _final(self) -> dict[str, Tensor]:
        return {"final_state": self.state.clone(), "final_alive": self.alive.clone()}

    def check_action(self, action: Tensor) -> Tensor:
        action = super().check_action(action)
        if not self.looks or not isinstance(self.single_action_space, Discrete):
            return action
        excess = action >= self.action_mask.sum(1)  # an agent's own actions come first
        if excess.any():
            env, agent = excess.nonzero()[0].tolist()
            raise ContractError(
                f"{self.name}: the action at index {(env, agent)} is {action[env, agent].item()}, "
                f"allowed for this agent are 0 to {self.action_mask[agent].sum().item() - 1}"
            )
        return action


class Elsewhere:
    """`envs` for a learner on another device: the tensors they return are moved to `device`."""

    def __init__(self, envs: VecEnv, device: torch.device | str):
        self.envs, self.device = envs, torch.device(device)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.envs, name)
        return value.to(self.device) if torch.is_tensor(value) else value

    def reset(self, **options: Any) -> tuple[Tensor, dict]:
        obs, info = self.envs.reset(**options)
        return obs.to(self.device), info

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        *result, info = self.envs.step(action)  # which moves the action to the envs' device
        info = {name: value.to(self.device) for name, value in info.items()}
        return *(x.to(self.device) for x in result), info


def _padded(spaces: list, missing: float = 0.0) -> tuple[Box | Discrete, Tensor]:
    """A space large enough for each of `spaces`, and which of its entries each has (A, size).

    `missing`: the bounds of entries that a space lacks; with infinity they do not count.
    """
    if isinstance(spaces[0], Discrete):
        sizes = torch.tensor([int(space.n) for space in spaces])
        padded = Discrete(int(sizes.max()))
    else:
        sizes = torch.tensor([space.shape[0] for space in spaces])
        pads = [(space, (0, int(sizes.max()) - space.shape[0])) for space in spaces]
        low = [np.pad(space.low, pad, constant_values=missing) for space, pad in pads]
        high = [np.pad(space.high, pad, constant_values=-missing) for space, pad in pads]
        padded = Box(np.min(low, 0), np.max(high, 0), dtype=np.float32)
    return padded, torch.arange(int(sizes.max())) < sizes.unsqueeze(1)
