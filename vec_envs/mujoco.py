"""Gymnasium's ten MuJoCo environments, batched: MuJoCo's physics, rewards and observations here.

Each class equals Gymnasium's v5 environment made with the same keyword arguments, step by step, and
differs from it only in defaults: contact-force and inertia observations are off (Ant has 27
numbers, Humanoid 45), because they are slow to learn from and cost time. Turn them on with
Gymnasium's own keywords, e.g. `make("Ant", 64, include_cfrc_ext_in_observation=True)`.

Two simulators have the same face (`fields`, `step`, `restart`), so every reward and observation is
written once:

- `CSimulation`, on a CPU: one `MjData` per env, stepped in threads by `mj_step`, which releases
  the GIL. Its physics is as fast as `mujoco.rollout` (a whole `step()` has 0.79 to 0.91 of that,
  benchmark/throughput.py) and, unlike it, keeps the solver's warm start between steps, without
  which HalfCheetah drifts away from Gymnasium within 100 steps. It also has every field, contact
  forces included.
- `WarpSimulation`, on an NVIDIA GPU: `mujoco_warp`, single precision. It has no PGS solver, so
  Humanoid is solved by Newton's method there.

MuJoCo fills body positions at the *start* of its last substep; Gymnasium reads them as they are, so
they lag `qpos` by one substep. That is kept here, since equal means equal.
"""

import functools
import queue
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import mujoco
import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from vec_envs.core import VecEnv, available_cores

ASSETS = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"
# The warnings after which MuJoCo has reset an unstable simulation by itself.
UNSTABLE = slice(mujoco.mjtWarning.mjWARN_BADQPOS, mujoco.mjtWarning.mjWARN_BADQACC + 1)
COMPLETE = mujoco.mjtState.mjSTATE_INTEGRATION  # with the solver's warm start
EVERYTHING = slice(None)


class CSimulation:
    """`num_envs` simulations by the official C engine.

    `fields` maps a name to (array of MjData, index into it); `self.fields[name]` is then a float64
    tensor (num_envs, size) with the values after the last `step` or `restart`.
    """

    dtype = torch.float64

    def __init__(self, model, num_envs: int, frame_skip: int, threads: int, fields: dict):
        self.model, self.frame_skip = model, frame_skip
        self.contact_forces = any(array == "cfrc_ext" for array, _ in fields.values())
        self.data = [mujoco.MjData(model) for _ in range(num_envs)]
        self.threads = min(threads or available_cores(), num_envs)
        self.calls, self.ends = queue.SimpleQueue(), queue.SimpleQueue()
        for _ in range(self.threads - 1):
            threading.Thread(target=_help, args=(self.calls, self.ends), daemon=True).start()
        # Numpy views into every MjData: one np.concatenate reads a field of all envs at once.
        self.views = {
            name: [getattr(data, array)[index].reshape(-1) for data in self.data]
            for name, (array, index) in fields.items()
        }
        self.fields = {
            name: torch.zeros(num_envs, views[0].size, dtype=torch.float64)
            for name, views in self.views.items()
        }
        self.controls = [data.ctrl for data in self.data]
        self.initial_state = self.state_of(self.data[0])
        self.warnings = [data.warning.number[UNSTABLE] for data in self.data]
        self.warning_counts = np.zeros((num_envs, 3), dtype=self.warnings[0].dtype)

    def step(self, control: Tensor) -> Tensor | None:
        """`frame_skip` substeps of all -> mask (N,) of those that went unstable, or None."""
        work = zip(self.data, self.controls, control.numpy(), strict=True)
        self._for_each(self._step_one, work, len(self.data))
        self._gather()
        np.concatenate(self.warnings, out=self.warning_counts.reshape(-1))
        if not self.warning_counts.any():
            return None
        return torch.from_numpy(self.warning_counts.any(1))

    def restart(self, mask: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        """Put the envs in `mask` (N,) into the state qpos (N, nq), qvel (N, nv)."""
        chosen = mask.nonzero().squeeze(1).tolist()
        positions, velocities = qpos.numpy(), qvel.numpy()

        def restart_one(index: int) -> None:  # mj_resetData would also clear megabytes of scratch
            data = self.data[index]
            mujoco.mj_setState(self.model, data, self.initial_state, COMPLETE)
            self.warnings[index][:] = 0
            data.cfrc_ext[:] = 0
            data.qpos[:] = positions[index]
            data.qvel[:] = velocities[index]
            mujoco.mj_forward(self.model, data)

        self._for_each(restart_one, zip(chosen, strict=True), len(chosen))
        for name, views in self.views.items():
            field = self.fields[name].numpy()
            for index in chosen:
                field[index] = views[index]

    def state_of(self, data) -> np.ndarray:
        state = np.zeros(mujoco.mj_stateSize(self.model, COMPLETE))
        mujoco.mj_getState(self.model, data, state, COMPLETE)
        return state

    def state_dict(self) -> dict[str, Tensor]:
        physics = np.stack([self.state_of(data) for data in self.data])
        fields = {name: field.clone() for name, field in self.fields.items()}
        return {"physics": torch.from_numpy(physics), **fields}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for data, row in zip(self.data, state["physics"].numpy(), strict=True):
            mujoco.mj_resetData(self.model, data)
            mujoco.mj_setState(self.model, data, row, COMPLETE)
        for name, field in self.fields.items():
            field.copy_(state[name])

    def _step_one(self, data, control: np.ndarray, row: np.ndarray) -> None:
        control[:] = row
        mujoco.mj_step(self.model, data, self.frame_skip)
        if self.contact_forces:
            mujoco.mj_rnePostConstraint(self.model, data)

    def _for_each(self, function, items: Iterator[tuple], length: int) -> None:
        """Call `function` with every item; the threads share the queue, so none waits long."""

        def work() -> None:
            for item in items:
                function(*item)

        helpers = min(self.threads, length) - 1
        for _ in range(helpers):
            self.calls.put(work)
        work()
        for _ in range(helpers):
            if (error := self.ends.get()) is not None:
                raise error

    def close(self) -> None:
        """End the threads; what comes after runs in the caller's."""
        for _ in range(self.threads - 1):
            self.calls.put(None)
        self.threads = 1

    __del__ = close

    def _gather(self) -> None:
        for name, views in self.views.items():
            np.concatenate(views, out=self.fields[name].numpy().reshape(-1))


def _help(calls: queue.SimpleQueue, ends: queue.SimpleQueue) -> None:
    """A thread of CSimulation's: makes calls until one is None. (Futures would cost more.)"""
    while (call := calls.get()) is not None:
        try:
            call()
            ends.put(None)
        except BaseException as error:
            ends.put(error)
        del call


class WarpSimulation:
    """`num_envs` simulations by mujoco_warp (CUDA; its CPU backend serves the tests)."""

    dtype = torch.float32

    def __init__(self, model, num_envs: int, frame_skip: int, device: torch.device, fields: dict):
        try:
            import warp

            warp.config.quiet = True
            warp.init()
            import mujoco_warp
        except ImportError as error:
            raise ValueError(
                "MuJoCo on a GPU needs mujoco-warp: pip install mujoco-warp"
            ) from error
        self.mjw, self.warp, self.frame_skip = mujoco_warp, warp, frame_skip
        self.device = warp.device_from_torch(str(device))
        if model.opt.solver == mujoco.mjtSolver.mjSOL_PGS:  # Humanoid's, which warp does not have
            model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
        with warp.ScopedDevice(self.device):
            self.model = mujoco_warp.put_model(model)
            self.data = mujoco_warp.make_data(model, nworld=num_envs)
        arrays = {array for array, _ in fields.values()}
        self.contact_forces = "cfrc_ext" in arrays
        # What a restart has to recompute beyond qpos and qvel; contacts only if they are observed.
        if "qfrc_constraint" in arrays:
            self.refresh = (mujoco_warp.forward,)
        elif arrays - {"qpos", "qvel"}:
            self.refresh = (mujoco_warp.kinematics, mujoco_warp.com_pos, mujoco_warp.com_vel)
        else:
            self.refresh = ()
        self.sources = {
            name: (warp.to_torch(getattr(self.data, array)), (EVERYTHING, *np.index_exp[index]))
            for name, (array, index) in fields.items()
        }
        self.qpos, self.qvel = warp.to_torch(self.data.qpos), warp.to_torch(self.data.qvel)
        self.ctrl = warp.to_torch(self.data.ctrl)
        self.warmstart = warp.to_torch(self.data.qacc_warmstart)
        self.qpos0 = torch.tensor(model.qpos0, dtype=torch.float32, device=device)
        self.graph = None
        self._gather()

    def step(self, control: Tensor) -> Tensor:
        """`frame_skip` substeps of all -> mask (N,) of those that went unstable."""
        self.ctrl.copy_(control)
        with self._on_torch_stream():
            if self.graph is None and self.device.is_cuda and not self.device.is_capturing:
                self._substeps()  # compiles the kernels, which a capture cannot
                with self.warp.ScopedCapture() as capture:
                    self._substeps()
                self.graph = capture.graph
            elif self.graph is not None:
                self.warp.capture_launch(self.graph)
            else:
                self._substeps()
        # NaN fails every comparison, so "not below" catches it; 1e10 is MuJoCo's own bound.
        sane = (self.qpos.abs().amax(1) < 1e10) & (self.qvel.abs().amax(1) < 1e10)
        unstable = ~sane
        self.qpos.copy_(torch.where(sane.unsqueeze(1), self.qpos, self.qpos0))
        self.qvel.copy_(torch.where(sane.unsqueeze(1), self.qvel, 0.0))
        self.warmstart.copy_(torch.where(sane.unsqueeze(1), self.warmstart, 0.0))
        self._gather()
        return unstable

    def restart(self, mask: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        """Put the envs in `mask` (N,) into the state qpos (N, nq), qvel (N, nv)."""
        column, before = mask.unsqueeze(1), self.fields
        self.qpos.copy_(torch.where(column, qpos, self.qpos))
        self.qvel.copy_(torch.where(column, qvel, self.qvel))
        self.warmstart.copy_(torch.where(column, 0.0, self.warmstart))
        self.ctrl.copy_(torch.where(column, 0.0, self.ctrl))
        warmstart = self.warmstart.clone()
        with self._on_torch_stream():
            for compute in self.refresh:
                compute(self.model, self.data)
        self.warmstart.copy_(warmstart)
        self._gather()
        # Forces are not recomputed above, and at rest without control there are none.
        for name in ("cfrc_ext", "qfrc_actuator"):
            if name in self.fields:
                self.fields[name] = torch.zeros_like(self.fields[name])
        # The others keep the fields of their last substep, which `refresh` has moved on.
        self.fields = {k: torch.where(column, v, before[k]) for k, v in self.fields.items()}

    def state_dict(self) -> dict[str, Tensor]:
        physics = {"qpos_": self.qpos, "qvel_": self.qvel, "warmstart_": self.warmstart}
        return {k: v.clone() for k, v in {**physics, **self.fields}.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.qpos.copy_(state["qpos_"])
        self.qvel.copy_(state["qvel_"])
        self.warmstart.copy_(state["warmstart_"])
        self.fields = {name: state[name].to(self.qpos) for name in self.fields}

    def _substeps(self) -> None:
        for _ in range(self.frame_skip):
            self.mjw.step(self.model, self.data)
        if self.contact_forces:
            self.mjw.rne_postconstraint(self.model, self.data)

    def _on_torch_stream(self):
        if self.device.is_cuda:  # the same stream as torch: ordered without any waiting
            return self.warp.ScopedStream(self.warp.stream_from_torch(torch.cuda.current_stream()))
        return self.warp.ScopedDevice(self.device)

    def _gather(self) -> None:
        self.fields = {
            name: source[index].reshape(source.shape[0], -1).clone()
            for name, (source, index) in self.sources.items()
        }


class Painter:
    """Pictures of a robot, under a sky and on a floor that does not end where it runs to.

    Gymnasium's floors are 40 m wide, and an Ant gets farther than that.
    """

    def __init__(self, path: Path, elevation: float, follows: bool):
        texture, builtin = mujoco.mjtTexture, mujoco.mjtBuiltin
        spec = mujoco.MjSpec.from_file(str(path))
        skies = [t for t in spec.textures if t.type == texture.mjTEXTURE_SKYBOX]
        sky = skies[0] if skies else spec.add_texture(name="painted_sky")
        sky.type, sky.builtin = texture.mjTEXTURE_SKYBOX, builtin.mjBUILTIN_GRADIENT
        sky.rgb1, sky.rgb2, sky.width, sky.height = (0.8, 0.87, 0.95), (0.5, 0.65, 0.8), 256, 1536
        tiles = {"type": texture.mjTEXTURE_2D, "builtin": builtin.mjBUILTIN_CHECKER}
        tiles |= {"rgb1": (0.32, 0.38, 0.45), "rgb2": (0.4, 0.46, 0.53)}
        spec.add_texture(name="painted_tiles", width=256, height=256, **tiles)
        material = spec.add_material(name="painted_floor", texuniform=True)
        material.texrepeat = (1, 1)  # a tile is 1 m wide
        material.textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = "painted_tiles"
        for geom in spec.geoms:
            if geom.type == mujoco.mjtGeom.mjGEOM_PLANE:
                geom.size[:2] = 0  # means endless
                geom.material, geom.rgba = "painted_floor", (1, 1, 1, 1)
        for light in spec.lights:
            light.active = False
        sun = spec.worldbody.add_light(pos=(0, -1, 3), dir=(0, 1, -3), diffuse=(0.5, 0.5, 0.5))
        sun.type = mujoco.mjtLightType.mjLIGHT_DIRECTIONAL
        sun.mode = mujoco.mjtCamLight.mjCAMLIGHT_TRACKCOM  # farther away it casts no shadow
        spec.visual.quality.shadowsize = 1024  # 4096 is half the work of a picture without a GPU
        spec.visual.headlight.ambient = spec.visual.headlight.diffuse = (0.35, 0.35, 0.35)
        with warnings.catch_warnings():  # MuJoCo 4 finds the cheetah's file old-fashioned
            warnings.simplefilter("ignore")
            self.model = spec.compile()
        self.data = mujoco.MjData(self.model)
        self.renderer: mujoco.Renderer | None = None
        mujoco.mj_forward(self.model, self.data)
        solid = self.model.geom_type != mujoco.mjtGeom.mjGEOM_PLANE
        position, rotation = self.data.geom_xpos[solid], self.data.geom_xmat[solid]
        half = self.model.geom_aabb[solid, 3:, None]  # of the box around each geom, in its frame
        half = (np.abs(rotation).reshape(-1, 3, 3) @ half).squeeze(-1)
        low, high = (position - half).min(0), (position + half).max(0)
        self.camera, self.follows = mujoco.MjvCamera(), follows
        self.camera.lookat[:] = (low + high) / 2
        self.camera.azimuth, self.camera.elevation = 90, elevation
        self.camera.distance = 1.8 * np.linalg.norm(high - low)  # with room for a jump

    def pose(self, qpos: np.ndarray) -> None:
        """Put it into the joint positions (nq,)."""
        self.data.qpos[:] = qpos
        mujoco.mj_forward(self.model, self.data)
        if self.follows:  # on the ground; that it jumps shall be seen
            self.camera.lookat[:2] = self.data.subtree_com[1, :2]

    def paint(self) -> np.ndarray:
        """An RGB picture (480, 640, 3) uint8."""
        if self.renderer is None:
            self.renderer = mujoco.Renderer(self.model, 480, 640)
        for _ in range(2):  # the floor is laid around where the camera was before
            self.renderer.update_scene(self.data, self.camera)
        return self.renderer.render()


class MujocoEnv(VecEnv):
    """What the ten have in common; each below says what it reads, observes, pays and when it ends.

    `defaults` holds Gymnasium's keyword arguments. `env_threads`: threads of the C engine (0: one a
    core). `backend`: "c" or "warp"; None takes C on a CPU and warp on a GPU.
    """

    xml_file: str
    frame_skip: int
    max_episode_steps = 1000
    camera_elevation, camera_follows = -15, False  # degrees; whether it goes along
    normal_velocity = False  # at the start of an episode; else uniform
    defaults: dict[str, Any] = {}

    def __init__(
        self, num_envs: int, device: torch.device | str = "cpu", seed: int = 0,
        env_threads: int = 0, backend: str | None = None, **options: Any,
    ):  # fmt: skip
        name, device = type(self).__name__, torch.device(device)
        allowed = {"xml_file": self.xml_file, "frame_skip": self.frame_skip, **self.defaults}
        for option, value in options.items():
            if option not in allowed:
                raise ValueError(f"{name}: unknown option {option!r}; it has {', '.join(allowed)}")
            if not _is_like(value, allowed[option]):
                raise ValueError(
                    f"{name}: {option} is {value!r}; it must be like {allowed[option]!r}"
                )
        self.options = SimpleNamespace(**{**allowed, **options})
        backend = backend or ("c" if device.type == "cpu" else "warp")
        if backend not in ("c", "warp") or (backend == "c" and device.type != "cpu"):
            raise ValueError(
                f"{name}: backend is {backend!r} on {device}; 'c' (CPU) and 'warp' are there"
            )
        # Warnings are counted (`unstable_episodes`), not logged to a file in the user's folder.
        mujoco.set_mju_user_warning(lambda message: None)
        self.model = mujoco.MjModel.from_xml_path(str(ASSETS / self.options.xml_file))
        self.dt = self.model.opt.timestep * self.options.frame_skip  # seconds a step
        fields = {"qpos": ("qpos", EVERYTHING), "qvel": ("qvel", EVERYTHING), **self._fields()}
        kind, where = (CSimulation, env_threads) if backend == "c" else (WarpSimulation, device)
        self.sim = kind(self.model, max(num_envs, 1), self.options.frame_skip, where, fields)
        self.init_qpos = torch.tensor(self.model.qpos0, dtype=self.sim.dtype, device=device)
        low, high = self.model.actuator_ctrlrange.astype(np.float32).T
        self.device = device
        obs_space = Box(-np.inf, np.inf, (self._observation().shape[1],), np.float32)
        spaces = obs_space, Box(low, high, dtype=np.float32)
        super().__init__(name, num_envs, device, seed, *spaces, self.max_episode_steps)
        self._unstable: Tensor | None = None  # (N,) envs whose simulation blew up in this step
        self.unstable_episodes = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def qpos(self) -> Tensor:
        """Joint positions (num_envs, nq)."""
        return self.sim.fields["qpos"]

    @property
    def qvel(self) -> Tensor:
        """Joint velocities (num_envs, nv)."""
        return self.sim.fields["qvel"]

    # What an environment says of itself.

    def _fields(self) -> dict[str, tuple[str, Any]]:
        """The arrays of MjData, besides qpos and qvel, that its reward or observation reads."""
        return {}

    def _initial_state(self) -> tuple[Tensor, Tensor]:
        """qpos (N, nq) and qvel (N, nv) at the start: noise of `reset_noise_scale` around qpos0."""
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
        if self._unstable is not None:  # that one episode ends, its neighbours do not notice
            reward = torch.where(self._unstable, 0.0, reward)
            terminated = terminated | self._unstable
            self.unstable_episodes += self._unstable.sum()
        return reward, terminated

    def _observe(self) -> Tensor:
        observation = self._observation().float()
        if self._unstable is not None:  # nobody knows where it went: its last sane observation
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
        return Painter(ASSETS / self.options.xml_file, self.camera_elevation, self.camera_follows)

    def render(self, index: int = 0) -> np.ndarray:
        """An RGB picture (480, 640, 3) uint8 of env `index`; the camera goes along with a runner.

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
    """Whether an option's value can stand where its default does."""
    if isinstance(default, tuple):
        same_length = isinstance(value, tuple | list) and len(value) == len(default)
        return same_length and all(map(_is_like, value, default))
    if isinstance(default, bool | str):
        return isinstance(value, type(default))
    if isinstance(default, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, str) or (isinstance(value, int) and value > 0)  # a body, frame_skip


class Runner(MujocoEnv):
    """The six that are paid for running along x.

    reward = forward_reward_weight · (x' − x)/dt + healthy_reward · [healthy]
             − ctrl_cost_weight · ‖a‖² − contact cost
    It ends when it is no longer healthy (those that can fall).
    """

    camera_follows = True
    skipped_positions = 1  # x (and y): where it is does not matter for how to run
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
        if healthy is None:  # nothing to fall from
            return reward - control_cost, torch.zeros_like(reward, dtype=torch.bool)
        reward = reward + options.healthy_reward * healthy - (control_cost + self._contact_cost())
        terminated = ~healthy if options.terminate_when_unhealthy else torch.zeros_like(healthy)
        return reward, terminated

    def _healthy(self) -> Tensor | None:
        return None

    def _contact_cost(self) -> Tensor | float:
        return 0.0


RUNNER = {
    "forward_reward_weight": 1.0,
    "ctrl_cost_weight": 0.1,
    "reset_noise_scale": 0.1,
    "exclude_current_positions_from_observation": True,
}
FALLING = {"healthy_reward": 1.0, "terminate_when_unhealthy": True}


class HalfCheetah(Runner):
    """Two legs in a plane. obs 17: position without x (8), velocity (9). Action 6. Never ends."""

    xml_file, frame_skip, normal_velocity = "half_cheetah.xml", 5, True
    defaults = RUNNER


class Swimmer(Runner):
    """Three links in a viscous fluid. obs 8: position without x, y (3), velocity (5). Action 2."""

    xml_file, frame_skip, skipped_positions = "swimmer.xml", 4, 2
    camera_elevation = -50
    defaults = {**RUNNER, "ctrl_cost_weight": 1e-4}


class Hopper(Runner):
    """One leg. obs 11: position without x (5), velocity within ±10 (6). Action 3.

    Healthy: height > 0.7, |angle| < 0.2, every other state within ±100.
    """

    xml_file, frame_skip, max_observed_velocity = "hopper.xml", 4, 10.0
    defaults = {
        **RUNNER,
        **FALLING,
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


class Walker2d(Runner):
    """Two legs. obs 17: position without x (8), velocity within ±10 (9). Action 6.

    Healthy: 0.8 < height < 2 and |angle| < 1.
    """

    xml_file, frame_skip, max_observed_velocity = "walker2d_v5.xml", 4, 10.0
    defaults = {
        **RUNNER,
        **FALLING,
        "ctrl_cost_weight": 1e-3,
        "reset_noise_scale": 5e-3,
        "healthy_z_range": (0.8, 2.0),
        "healthy_angle_range": (-1.0, 1.0),
    }

    def _healthy(self) -> Tensor:
        return _within(self.qpos[:, 1], self.options.healthy_z_range) & _within(
            self.qpos[:, 2], self.options.healthy_angle_range
        )


class Ant(Runner):
    """Four legs. obs 27: position without x, y (13), velocity (14) [+ 78 contact forces]. Action 8.

    Healthy: 0.2 ≤ height ≤ 1 and a finite state.
    """

    xml_file, frame_skip, skipped_positions, normal_velocity = "ant.xml", 5, 2, True
    defaults = {
        **RUNNER,
        **FALLING,
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
        return [self._contact_forces()[:, 6:]]  # without the world's own

    def _healthy(self) -> Tensor:
        low, high = self.options.healthy_z_range
        z = self.qpos[:, 2]
        finite = torch.isfinite(self.qpos.sum(1) + self.qvel.sum(1))
        return finite & (low <= z) & (z <= high)


class Humanoid(Runner):
    """A body with two legs and two arms. obs 45: position without x, y (22), velocity (23) [+ 303
    inertia, velocity, actuator and contact-force numbers]. Action 17.

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
        **RUNNER,
        **FALLING,
        "forward_reward_weight": 1.25,
        "healthy_reward": 5.0,
        "contact_cost_weight": 5e-7,
        "contact_cost_range": (-float("inf"), 10.0),
        "healthy_z_range": (1.0, 2.0),
        "reset_noise_scale": 1e-2,
        **dict.fromkeys(extras, False),
    }

    def _fields(self) -> dict[str, tuple[str, Any]]:
        fields = {"body_x": ("xipos", (EVERYTHING, 0))}
        for option, (array, index) in self.extras.items():
            if getattr(self.options, option):
                fields[array] = (array, index)
        if self.options.contact_cost_weight:  # the world body's force is zero
            fields["cfrc_ext"] = self.extras["include_cfrc_ext_in_observation"]
        return fields

    def _x(self) -> Tensor:
        if not hasattr(self, "_body_mass"):
            mass = torch.tensor(self.model.body_mass, dtype=self.sim.dtype, device=self.device)
            self._body_mass = mass / mass.sum()  # (num_bodies,)
        return self.sim.fields["body_x"] @ self._body_mass

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
    low, high = bounds
    return low < value if high == float("inf") else (low < value) & (value < high)
