"""How to write an environment: an agent chases a randomly moving robot. Copy this file.

A `VecEnv` is `num_envs` environments that step together: every variable is a tensor whose first
axis, of size N, counts the environments. You write the rules of one environment, with that axis in
front. `VecEnv` (core.py) does the rest: it checks actions, counts steps, truncates, restarts, sums
returns, saves and restores. Five steps:

1. **Spaces**: observation and action of one environment, given to `super().__init__` with the
   largest number of steps of an episode.
2. **State**: one tensor for each quantity that changes, its name in `state_names`. Everything the
   future depends on must be there, or a resumed run is a different run.
3. **`_restart(mask)`**: new first states where the mask (N,) is true, the others unchanged.
4. **`_simulate(action)`**: the rules; changes the state, returns reward and terminated.
5. **`_observe()`**: the observation of the present state.

Then make it: `MyEnv(1024)`; or give a script its module and its name: `--env my_module:MyEnv`.
`tests/test_chasing.py` is the sixth step: the same rules written again for a single environment in
NumPy, and both must agree.

There is no Python loop over environments, and no `if` that reads a tensor. A loop multiplies the
interpreter's time by N, and on a GPU each of its operations launches a kernel and each read waits
for the device. "Where it ended, do this" is therefore `torch.where(ended, this, that)`: both are
computed for all, one is kept, and a step can be captured as a CUDA graph.

Source: ElegantRL's tutorial "How to create a VecEnv on GPUs"
(elegantrl.readthedocs.io/en/latest/tutorial/Creating_VecEnv.html). It has the physics in tensors
and finds the ended episodes in a loop over envs; that loop alone makes a step of
1024 envs take 26 times as long (benchmark/throughput.py, on 2 cores). The rules are that
page's; the ChasingEnv.py it links to has others (caught at distance < dim, no reward for it).
"""

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from vec_envs.core import VecEnv


class Chasing(VecEnv):
    """An agent chases a robot that drifts away at random, in `dim` dimensions.

    Observation (4·dim,): robot position, robot velocity, agent position, agent velocity.
    Action (dim,): the agent's thrust. It is shortened to length 1 if it is longer, but its cost is
    that of the full length. The robot's thrust is uniform in [0, 1) along each axis, limited in the
    same way. Motion of both: velocity ← velocity · factor + thrust, position ← position +
    velocity · 0.01, with factor 0.50 for the robot and 0.75 for the agent, whose top speed is
    therefore twice the robot's.
    Reward: the decrease of the distance − 0.02 · length of the thrust, and +8 on the catch.
    Terminates at distance < 1, the catch; truncated after 1024 steps.
    First state: robot normal(0, 1), agent normal(−8, 1) along each axis, both at rest.
    """

    robot_factor, agent_factor = 0.50, 0.75  # of the velocity that remains after a step
    dt = 0.01
    thrust_cost = 0.02
    initial_distance = 8.0  # along each axis
    catch_distance, catch_reward = 1.0, 8.0

    # Step 2a. What state_dict() saves and load_state_dict() restores, besides core.py's own.
    state_names = ("robot_position", "robot_velocity", "agent_position", "agent_velocity")

    def __init__(
        self, num_envs: int, device: torch.device | str = "cpu", seed: int = 0, dim: int = 2
    ):
        if dim < 1:
            raise ValueError(f"Chasing: dim is {dim}, it must be at least 1")
        # Step 1. Spaces, of one environment: no N in them.
        super().__init__(
            "Chasing",
            num_envs,
            device,
            seed,
            single_observation_space=Box(-np.inf, np.inf, (4 * dim,)),
            single_action_space=Box(-1.0, 1.0, (dim,)),
            max_episode_steps=1024,
        )
        # Step 2b. State, of all environments, on the device. reset() calls _restart to fill it.
        self.robot_position = torch.zeros(num_envs, dim, device=self.device)
        self.robot_velocity = torch.zeros(num_envs, dim, device=self.device)
        self.agent_position = torch.zeros(num_envs, dim, device=self.device)
        self.agent_velocity = torch.zeros(num_envs, dim, device=self.device)

    # Step 3. Every env draws a first state, and those in the mask take it. Drawing for all seems
    # wasteful, but to know how many need one, Python would have to wait for the GPU.
    def _restart(self, mask: Tensor) -> None:
        mask = mask.unsqueeze(1)  # (N, 1), so that it chooses whole rows
        self.robot_position = torch.where(mask, self._normal(), self.robot_position)
        self.robot_velocity = torch.where(mask, 0.0, self.robot_velocity)
        start = self._normal() - self.initial_distance
        self.agent_position = torch.where(mask, start, self.agent_position)
        self.agent_velocity = torch.where(mask, 0.0, self.agent_velocity)

    # Step 4. The rules. Envs whose episode ends are not touched: core.py keeps their last
    # observation, then calls _restart. The time limit is core.py's, too.
    def _simulate(self, action: Tensor) -> tuple[Tensor, Tensor]:
        distance_before = self._distance()

        # Random numbers come from self.generator: it is seeded, and saved with the state.
        robot_thrust = limit(self.uniform(0.0, 1.0, *self.single_action_space.shape))  # (N, dim)
        self.robot_velocity = self.robot_velocity * self.robot_factor + robot_thrust
        self.robot_position = self.robot_position + self.robot_velocity * self.dt

        action = action.float()  # a float64 action would make the whole state float64
        self.agent_velocity = self.agent_velocity * self.agent_factor + limit(action)
        self.agent_position = self.agent_position + self.agent_velocity * self.dt

        distance = self._distance()
        caught = distance < self.catch_distance
        reward = distance_before - distance - self.thrust_cost * action.norm(dim=1)
        # Arithmetic instead of an if: `caught` is 0 or 1.
        return reward + self.catch_reward * caught, caught

    # Step 5. Called after _simulate and again after _restart. torch.cat makes a new tensor, so that
    # an observation that somebody keeps does not change.
    def _observe(self) -> Tensor:
        parts = [getattr(self, name) for name in self.state_names]
        return torch.cat(parts, 1)  # (N, 4·dim)

    def _distance(self) -> Tensor:  # (N,)
        return (self.robot_position - self.agent_position).norm(dim=1)

    def _normal(self) -> Tensor:  # (N, dim)
        shape = self.agent_position.shape
        return torch.randn(shape, generator=self.generator, device=self.device)


def limit(thrust: Tensor) -> Tensor:
    """`thrust` (N, dim), shortened to length 1 where it is longer."""
    return thrust / thrust.norm(dim=1, keepdim=True).clamp(min=1.0)
