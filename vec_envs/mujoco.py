"""Gymnasium's ten MuJoCo environments, batched: observations, rewards, first states, terminations.

    MujocoEnv                                       what all ten have in common
        Locomotion                                  those that are rewarded for running along x:
            HalfCheetah, Swimmer, Hopper, Walker2d, Ant, Humanoid
        InvertedPendulum, InvertedDoublePendulum, Reacher, Pusher

Each equals Gymnasium's v5 environment made with the same keyword arguments, step by step, and
differs from it only in a default: Ant and Humanoid do not observe contact forces (they have 27 and
270 numbers), which are large and sudden. Gymnasium's own keyword turns them on:
`make("Ant", 64, include_cfrc_ext_in_observation=True)`.

The physics is MuJoCo's, in C threads on a CPU and by mujoco_warp on a GPU: `mujoco_simulation.py`.
Its two simulators have the same interface, so every reward and observation is written once.

MuJoCo fills body positions at the *start* of its last substep; Gymnasium reads them as they are, so
they lag `qpos` by one substep. So do ours.
"""

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import mujoco
import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from vec_envs.core import VecEnv
from vec_envs.mujoco_simulation import EVERYTHING, CSimulation, Painter, WarpSimulation

ASSETS = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"


class MujocoEnv(VecEnv):
    """What all ten have in common; a subclass adds observation, reward and termination.

    `defaults` holds Gymnasium's keyword arguments. `env_threads`: threads of the C engine (0: one
    per core). `backend`: "c" or "warp"; None takes C on a CPU and warp on a GPU.
    """

    xml_file: str
    frame_skip: int
    max_episode_steps = 1000
    camera_elevation, camera_follows = -15, False  # degrees; whether it follows the robot
    normal_velocity = False  # the distribution of first velocities: normal, else uniform
    defaults: dict[str, Any] = {}
    sim: CSimulation | WarpSimulation | None = None  # where the constructor failed

    def __init__(
        self, num_envs: int, device: torch.device | str = "cpu", seed: int = 0,
        env_threads: int = 0, backend: str | None = None, **options: Any,
    ):  # fmt: skip
        name, device = type(self).__name__, torch.device(device)
        allowed = {"xml_file": self.xml_file, "frame_skip": self.frame_skip, **self.defaults}
        for option, value in options.items():
            if option not in allowed:
                raise ValueError(f"{name}: unknown option {option!r}; it has {', '.join(allowed)}")
            is_name = option == "main_body" and isinstance(value, str)
            if not is_name and not _is_like(value, allowed[option]):
                raise ValueError(
                    f"{name}: {option} is {value!r}; it must be like {allowed[option]!r}"
                )
        self.options = SimpleNamespace(**{**allowed, **options})
        backend = backend or ("c" if device.type == "cpu" else "warp")
        if backend not in ("c", "warp") or (backend == "c" and device.type != "cpu"):
            raise ValueError(
                f"{name}: backend is {backend!r} on {device}; 'c' (CPU) and 'warp' are there"
            )
        # MuJoCo would log warnings to a file in the user's folder; an unstable episode ends here.
        mujoco.set_mju_user_warning(lambda message: None)
        file = self.options.xml_file  # as in Gymnasium: one of its own, or a path
        self.xml_path = Path(file).expanduser() if file.startswith((".", "~")) else ASSETS / file
        if not self.xml_path.is_file():
            wish = "a path of your own begins with ./, ~/ or /"
            raise ValueError(f"{name}: there is no file {self.xml_path.absolute()}; {wish}")
        self.model = mujoco.MjModel.from_xml_path(str(self.xml_path))
        self.dt = self.model.opt.timestep * self.options.frame_skip  # seconds per step
        fields = {"qpos": ("qpos", EVERYTHING), "qvel": ("qvel", EVERYTHING), **self._fields()}
        kind, where = (CSimulation, env_threads) if backend == "c" else (WarpSimulation, device)
        self.sim = kind(self.model, max(num_envs, 1), self.options.frame_skip, where, fields)
        self.init_qpos = torch.tensor(self.model.qpos0, dtype=self.sim.dtype, device=device)
        low, high = self.model.actuator_ctrlrange.astype(np.float32).T
        if not (low < high).all():
            raise ValueError(f"{name}: give each actuator of {self.xml_path} a ctrlrange")
        self.device = device
        obs_space = Box(-np.inf, np.inf, (self._observation().shape[1],), np.float32)
        spaces = obs_space, Box(low, high, dtype=np.float32)
        super().__init__(name, num_envs, device, seed, *spaces, self.max_episode_steps)
        self._unstable: Tensor | None = None  # (N,) envs whose simulation diverged in this step

    @property
    def qpos(self) -> Tensor:
        """Joint positions (num_envs, nq)."""
        return self.sim.fields["qpos"]

    @property
    def qvel(self) -> Tensor:
        """Joint velocities (num_envs, nv)."""
        return self.sim.fields["qvel"]

    # What a subclass defines.

    def _fields(self) -> dict[str, tuple[str, Any]]:
        """name -> (array of MjData, index) of what it reads besides qpos and qvel."""
        return {}

    def _initial_state(self) -> tuple[Tensor, Tensor]:
        """First qpos (N, nq) and qvel (N, nv): noise of `reset_noise_scale` around qpos0 and 0."""
        scale, nv = self.options.reset_noise_scale, self.model.nv
        qpos = self.init_qpos + self._uniform(-scale, scale, self.model.nq)
        if self.normal_velocity:
            return qpos, scale * self._normal(nv)
        return qpos, self._uniform(-scale, scale, nv)

    def _observation(self) -> Tensor:
        raise NotImplementedError

    def _progress(self) -> Tensor | None:
        """What the reward compares before and after a step."""
        return None

    def _reward(self, before: Tensor | None, action: Tensor) -> tuple[Tensor, Tensor]:
        """reward (N,), terminated (N,) after a step."""
        raise NotImplementedError

    # The three methods of a VecEnv.

    def _restart(self, mask: Tensor) -> None:
        self.sim.restart(mask, *self._initial_state())
        self._unstable = None

    def _simulate(self, action: Tensor) -> tuple[Tensor, Tensor]:
        action = action.to(self.sim.dtype)
        before = self._progress()
        self._unstable = self.sim.step(action)
        reward, terminated = self._reward(before, action)
        if self._unstable is not None:  # these episodes end, the other envs are not affected
            reward = torch.where(self._unstable, 0.0, reward)
            terminated = terminated | self._unstable
        return reward, terminated

    def _observe(self) -> Tensor:
        observation = self._observation().float()
        if self._unstable is not None:  # the new state is meaningless: the observation before it
            observation = torch.where(self._unstable.unsqueeze(1), self.obs, observation)
        return observation

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "sim": self.sim.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({k: v for k, v in state.items() if k != "sim"})
        self._unstable = None
        self.sim.load_state_dict(state["sim"])

    @functools.cached_property
    def painter(self) -> Painter:
        return Painter(self.xml_path, self.camera_elevation, self.camera_follows)

    def render(self, index: int = 0) -> np.ndarray:
        """An RGB picture (480, 640, 3) uint8 of env number `index`.

        Without a display, MUJOCO_GL=egl (or osmesa) must be set before mujoco is imported.
        """
        self.painter.pose(self.qpos[index].double().cpu().numpy())
        return self.painter.paint()

    def close_extras(self, **kwargs: Any) -> None:
        if "painter" in vars(self) and self.painter.renderer is not None:
            self.painter.renderer.close()
        if isinstance(self.sim, CSimulation):
            self.sim.close()

    # Draws from the env's own generator.

    def _uniform(self, low: float, high: float, size: int) -> Tensor:  # (N, size)
        return self.uniform(low, high, size, dtype=self.sim.dtype)

    def _normal(self, size: int) -> Tensor:  # (N, size)
        return torch.randn(
            self.num_envs, size, generator=self.generator, device=self.device, dtype=self.sim.dtype
        )


def _is_like(value: Any, default: Any) -> bool:
    """Whether an option's value has the type of its default."""
    if isinstance(default, tuple):
        same_length = isinstance(value, tuple | list) and len(value) == len(default)
        return same_length and all(map(_is_like, value, default))
    if isinstance(default, bool | str):
        return isinstance(value, type(default))
    if isinstance(default, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, int) and value > 0  # frame_skip


class Locomotion(MujocoEnv):
    """The six that are rewarded for running along x.

    reward = forward_reward_weight · (x' − x)/dt + healthy_reward · [healthy]
             − ctrl_cost_weight · ‖a‖² − contact cost
    Those that can fall terminate when they are no longer healthy.
    """

    camera_follows = True
    skipped_positions = 1  # x (and y), left out because running does not depend on the place
    max_observed_velocity = float("inf")

    def _observation(self) -> Tensor:
        limit = self.max_observed_velocity
        skip = self.skipped_positions * self.options.exclude_current_positions_from_observation
        qvel = self.qvel if limit == float("inf") else self.qvel.clamp(-limit, limit)
        return torch.cat((self.qpos[:, skip:], qvel, *self._extra_observations()), 1)

    def _extra_observations(self) -> list[Tensor]:
        return []

    def _progress(self) -> Tensor:
        return self._x().clone()

    def _x(self) -> Tensor:
        return self.qpos[:, 0]

    def _reward(self, before: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        options = self.options
        reward = options.forward_reward_weight * ((self._x() - before) / self.dt)
        control_cost = options.ctrl_cost_weight * action.square().sum(1)
        healthy = self._healthy()
        if healthy is None:  # it cannot fall
            return reward - control_cost, torch.zeros_like(reward, dtype=torch.bool)
        reward = reward + options.healthy_reward * healthy - (control_cost + self._contact_cost())
        terminated = ~healthy if options.terminate_when_unhealthy else torch.zeros_like(healthy)
        return reward, terminated

    def _healthy(self) -> Tensor | None:
        return None

    def _contact_cost(self) -> Tensor | float:
        return 0.0


LOCOMOTION = {
    "forward_reward_weight": 1.0,
    "ctrl_cost_weight": 0.1,
    "reset_noise_scale": 0.1,
    "exclude_current_positions_from_observation": True,
}
HEALTH = {"healthy_reward": 1.0, "terminate_when_unhealthy": True}


class HalfCheetah(Locomotion):
    """Two legs in a plane. obs 17: position without x (8), velocity (9). Action 6. Never ends."""

    xml_file, frame_skip, normal_velocity = "half_cheetah.xml", 5, True
    defaults = LOCOMOTION


class Swimmer(Locomotion):
    """Three links in a viscous fluid. obs 8: position without x, y (3), velocity (5). Action 2."""

    xml_file, frame_skip, skipped_positions = "swimmer.xml", 4, 2
    camera_elevation = -50
    defaults = {**LOCOMOTION, "ctrl_cost_weight": 1e-4}


class Hopper(Locomotion):
    """One leg. obs 11: position without x (5), velocity within ±10 (6). Action 3.

    Healthy: height > 0.7, |angle| < 0.2, every other state within ±100.
    """

    xml_file, frame_skip, max_observed_velocity = "hopper.xml", 4, 10.0
    defaults = {
        **LOCOMOTION,
        **HEALTH,
        "ctrl_cost_weight": 1e-3,
        "reset_noise_scale": 5e-3,
        "healthy_state_range": (-100.0, 100.0),
        "healthy_z_range": (0.7, float("inf")),
        "healthy_angle_range": (-0.2, 0.2),
    }

    def _healthy(self) -> Tensor:
        options = self.options
        state = torch.cat((self.qpos[:, 2:], self.qvel), 1)
        return (
            _within(self.qpos[:, 1], options.healthy_z_range)
            & _within(self.qpos[:, 2], options.healthy_angle_range)
            & _within(state, options.healthy_state_range).all(1)
        )


class Walker2d(Locomotion):
    """Two legs. obs 17: position without x (8), velocity within ±10 (9). Action 6.

    Healthy: 0.8 < height < 2 and |angle| < 1.
    """

    xml_file, frame_skip, max_observed_velocity = "walker2d_v5.xml", 4, 10.0
    defaults = {
        **LOCOMOTION,
        **HEALTH,
        "ctrl_cost_weight": 1e-3,
        "reset_noise_scale": 5e-3,
        "healthy_z_range": (0.8, 2.0),
        "healthy_angle_range": (-1.0, 1.0),
    }

    def _healthy(self) -> Tensor:
        return _within(self.qpos[:, 1], self.options.healthy_z_range) & _within(
            self.qpos[:, 2], self.options.healthy_angle_range
        )


class Ant(Locomotion):
    """Four legs. obs 27: position without x, y (13), velocity (14) [+ 78 contact forces]. Action 8.

    Healthy: 0.2 ≤ height ≤ 1 and a finite state.
    """

    xml_file, frame_skip, skipped_positions, normal_velocity = "ant.xml", 5, 2, True
    defaults = {
        **LOCOMOTION,
        **HEALTH,
        "ctrl_cost_weight": 0.5,
        "contact_cost_weight": 5e-4,
        "main_body": 1,
        "healthy_z_range": (0.2, 1.0),
        "contact_force_range": (-1.0, 1.0),
        "include_cfrc_ext_in_observation": False,
    }

    def _fields(self) -> dict[str, tuple[str, Any]]:
        fields = {"torso_x": ("xpos", (self.model.body(self.options.main_body).id, slice(0, 1)))}
        if self.options.contact_cost_weight or self.options.include_cfrc_ext_in_observation:
            fields["cfrc_ext"] = ("cfrc_ext", EVERYTHING)
        return fields

    def _x(self) -> Tensor:
        return self.sim.fields["torso_x"].squeeze(1)

    def _contact_forces(self) -> Tensor:
        return self.sim.fields["cfrc_ext"].clamp(*self.options.contact_force_range)

    def _contact_cost(self) -> Tensor | float:
        if not self.options.contact_cost_weight:
            return 0.0
        return self.options.contact_cost_weight * self._contact_forces().square().sum(1)

    def _extra_observations(self) -> list[Tensor]:
        if not self.options.include_cfrc_ext_in_observation:
            return []
        return [self._contact_forces()[:, 6:]]  # without those on body 0, the ground

    def _healthy(self) -> Tensor:
        low, high = self.options.healthy_z_range
        z = self.qpos[:, 2]
        finite = torch.isfinite(self.qpos.sum(1) + self.qvel.sum(1))
        return finite & (low <= z) & (z <= high)


class Humanoid(Locomotion):
    """A body with two legs and two arms. obs 270: position without x, y (22), velocity (23), and of
    each part inertia (130), velocity (78), actuator force (17) [+ 78 contact forces]. Action 17.

    x is the centre of mass. Healthy: 1 < height < 2.
    """

    xml_file, frame_skip, skipped_positions = "humanoid.xml", 5, 2
    # option -> (array of MjData, what of it is observed)
    extras = {
        "include_cinert_in_observation": ("cinert", slice(1, None)),
        "include_cvel_in_observation": ("cvel", slice(1, None)),
        "include_qfrc_actuator_in_observation": ("qfrc_actuator", slice(6, None)),
        "include_cfrc_ext_in_observation": ("cfrc_ext", slice(1, None)),
    }
    defaults = {
        **LOCOMOTION,
        **HEALTH,
        "forward_reward_weight": 1.25,
        "healthy_reward": 5.0,
        "contact_cost_weight": 5e-7,
        "contact_cost_range": (-float("inf"), 10.0),
        "healthy_z_range": (1.0, 2.0),
        "reset_noise_scale": 1e-2,
        **dict.fromkeys(extras, True),
        "include_cfrc_ext_in_observation": False,
    }

    def _fields(self) -> dict[str, tuple[str, Any]]:
        fields = {"body_x": ("xipos", (EVERYTHING, 0))}
        for option, (array, index) in self.extras.items():
            if getattr(self.options, option):
                fields[array] = (array, index)
        if self.options.contact_cost_weight:  # Gymnasium adds body 0, whose force is zero
            fields["cfrc_ext"] = self.extras["include_cfrc_ext_in_observation"]
        return fields

    def _x(self) -> Tensor:
        return self.sim.fields["body_x"] @ self._mass_fraction

    @functools.cached_property
    def _mass_fraction(self) -> Tensor:  # (num_bodies,)
        mass = torch.tensor(self.model.body_mass, dtype=self.sim.dtype, device=self.device)
        return mass / mass.sum()

    def _contact_cost(self) -> Tensor | float:
        if not self.options.contact_cost_weight:
            return 0.0
        cost = self.options.contact_cost_weight * self.sim.fields["cfrc_ext"].square().sum(1)
        return cost.clamp(*self.options.contact_cost_range)

    def _extra_observations(self) -> list[Tensor]:
        return [
            self.sim.fields[array]
            for option, (array, _) in self.extras.items()
            if getattr(self.options, option)
        ]

    def _healthy(self) -> Tensor:
        return _within(self.qpos[:, 2], self.options.healthy_z_range)


class InvertedPendulum(MujocoEnv):
    """A pole on a cart. obs 4: position, velocity. Action 1. reward 1; ends at |angle| > 0.2."""

    xml_file, frame_skip = "inverted_pendulum.xml", 2
    defaults = {"reset_noise_scale": 0.01}

    def _observation(self) -> Tensor:
        return torch.cat((self.qpos, self.qvel), 1)

    def _reward(self, before: None, action: Tensor) -> tuple[Tensor, Tensor]:
        observation = self._observation()
        terminated = ~torch.isfinite(observation).all(1) | (observation[:, 1].abs() > 0.2)
        return (~terminated).to(self.sim.dtype), terminated


class InvertedDoublePendulum(MujocoEnv):
    """Two poles on a cart. obs 9: x, sin and cos of two angles, velocities, force. Action 1.

    reward = healthy_reward − 0.01 x² − (y − 2)² − 1e-3 v1² − 5e-3 v2² with (x, y) the upper tip;
    ends when y ≤ 1.
    """

    xml_file, frame_skip, normal_velocity = "inverted_double_pendulum.xml", 5, True
    defaults = {"healthy_reward": 10.0, "reset_noise_scale": 0.1}

    def _fields(self) -> dict[str, tuple[str, Any]]:
        return {"tip": ("site_xpos", 0), "qfrc_constraint": ("qfrc_constraint", EVERYTHING)}

    def _observation(self) -> Tensor:
        angles = self.qpos[:, 1:]
        force = self.sim.fields["qfrc_constraint"][:, :1].clamp(-10, 10)
        velocity = self.qvel.clamp(-10, 10)
        return torch.cat((self.qpos[:, :1], angles.sin(), angles.cos(), velocity, force), 1)

    def _reward(self, before: None, action: Tensor) -> tuple[Tensor, Tensor]:
        x, _, y = self.sim.fields["tip"].unbind(1)
        v1, v2 = self.qvel[:, 1], self.qvel[:, 2]
        terminated = y <= 1
        distance_penalty = 0.01 * x.square() + (y - 2).square()
        velocity_penalty = 1e-3 * v1.square() + 5e-3 * v2.square()
        reward = self.options.healthy_reward * ~terminated - distance_penalty - velocity_penalty
        return reward, terminated


class Reacher(MujocoEnv):
    """A two-joint arm and a target in a plane; 50 steps. Action 2.

    obs 10: cos and sin of the joints, target, joint velocities, fingertip − target.
    reward = −‖fingertip − target‖ − ‖a‖².
    """

    xml_file, frame_skip, max_episode_steps = "reacher.xml", 2, 50
    camera_elevation = -60
    defaults = {"reward_dist_weight": 1.0, "reward_control_weight": 1.0}

    def _fields(self) -> dict[str, tuple[str, Any]]:
        return {name: ("xpos", self.model.body(name).id) for name in ("fingertip", "target")}

    def _initial_state(self) -> tuple[Tensor, Tensor]:
        qpos = self.init_qpos + self._uniform(-0.1, 0.1, self.model.nq)
        # uniform in the disk of radius 0.2: the area within a radius grows with its square
        radius = 0.2 * self._uniform(0, 1, 1).sqrt()
        angle = self._uniform(0, 2 * np.pi, 1)
        qpos[:, -2:] = torch.cat((radius * angle.cos(), radius * angle.sin()), 1)
        qvel = self._uniform(-0.005, 0.005, self.model.nv)
        qvel[:, -2:] = 0
        return qpos, qvel

    def _offset(self) -> Tensor:  # (N, 3)
        return self.sim.fields["fingertip"] - self.sim.fields["target"]

    def _observation(self) -> Tensor:
        joints, offset = self.qpos[:, :2], self._offset()[:, :2]
        parts = joints.cos(), joints.sin(), self.qpos[:, 2:], self.qvel[:, :2], offset
        return torch.cat(parts, 1)

    def _reward(self, before: None, action: Tensor) -> tuple[Tensor, Tensor]:
        distance = self._offset().norm(dim=1) * self.options.reward_dist_weight
        reward = -distance - action.square().sum(1) * self.options.reward_control_weight
        return reward, torch.zeros_like(reward, dtype=torch.bool)


class Pusher(MujocoEnv):
    """A seven-joint arm that pushes a cylinder to a goal; 100 steps. Action 7.

    obs 23: joint positions (7) and velocities (7), tip, object and goal (3 each).
    reward = −½‖object − tip‖ − ‖object − goal‖ − 0.1‖a‖².
    """

    xml_file, frame_skip, max_episode_steps = "pusher_v5.xml", 5, 100
    camera_elevation = -40
    defaults = {"reward_near_weight": 0.5, "reward_dist_weight": 1.0, "reward_control_weight": 0.1}

    def _fields(self) -> dict[str, tuple[str, Any]]:
        return {name: ("xpos", self.model.body(name).id) for name in ("tips_arm", "object", "goal")}

    def _initial_state(self) -> tuple[Tensor, Tensor]:
        # The cylinder: uniform in a box, but not within 0.17 of the goal. Gymnasium draws until one
        # fits (62 %); here 32 are drawn at once and the first that fits is taken.
        tries = torch.stack((self._uniform(-0.3, 0, 32), self._uniform(-0.2, 0.2, 32)), -1)
        first = (tries.norm(dim=-1) > 0.17).int().argmax(1)  # (N,)
        cylinder = tries.gather(1, first.view(-1, 1, 1).expand(-1, 1, 2)).squeeze(1)
        qpos = self.init_qpos.repeat(self.num_envs, 1)
        qpos[:, -4:-2] = cylinder
        qpos[:, -2:] = 0
        qvel = self._uniform(-0.005, 0.005, self.model.nv)
        qvel[:, -4:] = 0
        return qpos, qvel

    def _observation(self) -> Tensor:
        bodies = (self.sim.fields[name] for name in ("tips_arm", "object", "goal"))
        return torch.cat((self.qpos[:, :7], self.qvel[:, :7], *bodies), 1)

    def _reward(self, before: None, action: Tensor) -> tuple[Tensor, Tensor]:
        options, fields = self.options, self.sim.fields
        near = (fields["object"] - fields["tips_arm"]).norm(dim=1) * options.reward_near_weight
        distance = (fields["object"] - fields["goal"]).norm(dim=1) * options.reward_dist_weight
        control = action.square().sum(1) * options.reward_control_weight
        reward = -distance - control - near
        return reward, torch.zeros_like(reward, dtype=torch.bool)


def _within(value: Tensor, bounds: tuple[float, float]) -> Tensor:
    low, high = bounds  # both excluded
    return low < value if high == float("inf") else (low < value) & (value < high)
