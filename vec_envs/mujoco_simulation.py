"""MuJoCo beneath the environments of `mujoco.py`: two simulators, and the renderer of pictures.

Both simulators have the same interface (`fields`, `step`, `restart`, `state_dict`), so that
`mujoco.py` has every reward and observation once:

- `CSimulation`, on a CPU: one `MjData` per env, stepped in threads by `mj_step`, which releases
  the GIL. Its physics is as fast as `mujoco.rollout` (a whole `step()` has 0.79 to 0.91 of that,
  benchmark/throughput.py) and, unlike it, keeps the solver's warm start between steps, without
  which HalfCheetah drifts away from Gymnasium within 100 steps. It also has every field, contact
  forces included.
- `WarpSimulation`, on an NVIDIA GPU: `mujoco_warp`, single precision. It has no PGS solver, so
  Humanoid is solved by Newton's method there.

`Painter` renders one env on the CPU; no simulator depends on it.
"""

import os
import queue
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import mujoco
import numpy as np
import torch
from torch import Tensor

from vec_envs.core import available_cores

# The warnings after which MuJoCo has reset an unstable simulation by itself.
UNSTABLE = slice(mujoco.mjtWarning.mjWARN_BADQPOS, mujoco.mjtWarning.mjWARN_BADQACC + 1)
COMPLETE = mujoco.mjtState.mjSTATE_INTEGRATION  # with the solver's warm start
EVERYTHING = slice(None)  # the index of a field that is a whole array


class CSimulation:
    """`num_envs` simulations by the official C engine.

    `fields` maps a name to (array of MjData, index into it); `self.fields[name]` is then a float64
    tensor (num_envs, size) with the values after the last `step` or `restart`. After an exception
    the state is undefined until the next `restart` of all or `load_state_dict`.
    """

    dtype = torch.float64

    def __init__(
        self, model: mujoco.MjModel, num_envs: int, frame_skip: int, threads: int, fields: dict
    ):
        self.model, self.frame_skip = model, frame_skip
        self.contact_forces = any(array == "cfrc_ext" for array, _ in fields.values())
        self.data = [mujoco.MjData(model) for _ in range(num_envs)]
        # The calling thread works too, beside threads - 1 helpers.
        self.threads = min(threads or available_cores(), num_envs)
        self.calls, self.answers = queue.SimpleQueue(), queue.SimpleQueue()
        self.unanswered = 0  # calls that helpers have been given and not answered
        self.process = os.getpid()  # in which the helpers are
        for _ in range(self.threads - 1):
            threading.Thread(target=_help, args=(self.calls, self.answers), daemon=True).start()
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

    def state_of(self, data: mujoco.MjData) -> np.ndarray:
        state = np.zeros(mujoco.mj_stateSize(self.model, COMPLETE))
        mujoco.mj_getState(self.model, data, state, COMPLETE)
        return state

    def state_dict(self) -> dict[str, Tensor]:
        physics = np.stack([self.state_of(data) for data in self.data])
        fields = {name: field.clone() for name, field in self.fields.items()}
        return {"physics": torch.from_numpy(physics), **fields}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._wait()
        for data, row in zip(self.data, state["physics"].numpy(), strict=True):
            mujoco.mj_resetData(self.model, data)
            mujoco.mj_setState(self.model, data, row, COMPLETE)
        for name, field in self.fields.items():
            field.copy_(state[name])

    def _step_one(self, data: mujoco.MjData, control: np.ndarray, row: np.ndarray) -> None:
        control[:] = row
        mujoco.mj_step(self.model, data, self.frame_skip)
        if self.contact_forces:
            mujoco.mj_rnePostConstraint(self.model, data)

    def _for_each(self, function: Callable, items: Iterator[tuple], length: int) -> None:
        """Call `function` with every item; all threads take from `items`, so none waits long."""

        def work() -> None:
            for item in items:
                function(*item)

        if os.getpid() != self.process:  # forked, and a fork has no helpers
            self.process, self.threads, self.unanswered = os.getpid(), 1, 0
        self._wait()
        for _ in range(min(self.threads, length) - 1):
            self.unanswered += 1
            self.calls.put(work)
        try:
            work()
        finally:
            error = self._wait()
        if error is not None:
            raise error

    def _wait(self) -> BaseException | None:
        """Until no helper is at work -> the error of one of them, if there was any.

        After an error in the calling thread too (Ctrl-C, even while it waits here): the next call
        would take answers that are left for its own and return while its helpers are at work.
        """
        error = None
        while self.unanswered:
            error = self.answers.get() or error
            self.unanswered -= 1
        return error

    def close(self) -> None:
        """End the helpers; what comes after runs in the calling thread alone."""
        for _ in range(self.threads - 1):
            self.calls.put(None)
        self.threads = 1

    __del__ = close

    def _gather(self) -> None:
        for name, views in self.views.items():
            np.concatenate(views, out=self.fields[name].numpy().reshape(-1))


def _help(calls: queue.SimpleQueue, answers: queue.SimpleQueue) -> None:
    """A helper thread: makes calls until one is None. (Futures would cost more.)"""
    while (call := calls.get()) is not None:
        try:
            call()
            answers.put(None)
        except BaseException as error:
            answers.put(error)
        del call  # it refers to the simulation, which could not be deleted before the next call


class WarpSimulation:
    """`num_envs` simulations by mujoco_warp (CUDA; its CPU backend serves the tests)."""

    dtype = torch.float32

    def __init__(
        self, model: mujoco.MjModel, num_envs: int, frame_skip: int, device: torch.device,
        fields: dict,
    ):  # fmt: skip
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
            if not warp.is_conditional_graph_supported():  # drivers before CUDA 12.4
                self.model.opt.graph_conditional = False
            self.data = mujoco_warp.make_data(model, nworld=num_envs)
        arrays = {array for array, _ in fields.values()}
        self.contact_forces = "cfrc_ext" in arrays
        # What a restart has to recompute from qpos and qvel; contacts only if they are observed.
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
        self.graphs: dict[Callable, object] = {}
        warp.synchronize_device(self.device)  # torch's stream may be another than warp's
        self._gather()

    def step(self, control: Tensor) -> Tensor:
        """`frame_skip` substeps of all -> mask (N,) of those that went unstable."""
        self.ctrl.copy_(control)
        self._compute(self._substeps)
        # NaN fails every comparison, so "not below" catches it; 1e10 is MuJoCo's own bound.
        stable = (self.qpos.abs().amax(1) < 1e10) & (self.qvel.abs().amax(1) < 1e10)
        self.qpos.copy_(torch.where(stable.unsqueeze(1), self.qpos, self.qpos0))
        self.qvel.copy_(torch.where(stable.unsqueeze(1), self.qvel, 0.0))
        self.warmstart.copy_(torch.where(stable.unsqueeze(1), self.warmstart, 0.0))
        self._gather()
        return ~stable

    def restart(self, mask: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        """Put the envs in `mask` (N,) into the state qpos (N, nq), qvel (N, nv)."""
        column, before = mask.unsqueeze(1), self.fields
        self.qpos.copy_(torch.where(column, qpos, self.qpos))
        self.qvel.copy_(torch.where(column, qvel, self.qvel))
        self.warmstart.copy_(torch.where(column, 0.0, self.warmstart))
        self.ctrl.copy_(torch.where(column, 0.0, self.ctrl))
        warmstart = self.warmstart.clone()
        if self.refresh:
            self._compute(self._refresh)
        self.warmstart.copy_(warmstart)
        self._gather()
        # As after a reset in C: cfrc_ext is computed in steps only, and without control
        # qfrc_actuator is 0.
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

    def _refresh(self) -> None:
        for compute in self.refresh:
            compute(self.model, self.data)

    def _compute(self, work: Callable[[], None]) -> None:
        """Launch `work`; on a GPU one by one at first, later as a graph."""
        if not self.device.is_cuda:
            with self.warp.ScopedDevice(self.device):
                return work()
        # On torch's stream the order is right without synchronisation.
        with self._on(torch.cuda.current_stream()):
            if work in self.graphs:
                return self.warp.capture_launch(self.graphs[work])
            work()  # compiles the kernels, which a capture cannot
        # On a stream of its own: CUDA captures nothing on the default one, which is torch's.
        with self._on(torch.cuda.Stream()), self.warp.ScopedCapture() as capture:
            work()
        self.graphs[work] = capture.graph

    def _on(self, stream):
        return self.warp.ScopedStream(self.warp.stream_from_torch(stream))

    def _gather(self) -> None:
        self.fields = {
            name: source[index].reshape(source.shape[0], -1).clone()
            for name, (source, index) in self.sources.items()
        }


class Painter:
    """Renders a robot under a sky and on an infinite floor.

    Gymnasium's floors are 40 m wide, and an Ant gets farther than that. `follows`: the camera goes
    with the robot.
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
                geom.size[:2] = 0  # means infinite
                geom.material, geom.rgba = "painted_floor", (1, 1, 1, 1)
        for light in spec.lights:
            light.active = False
        sun = spec.worldbody.add_light(pos=(0, -1, 3), dir=(0, 1, -3), diffuse=(0.5, 0.5, 0.5))
        sun.type = mujoco.mjtLightType.mjLIGHT_DIRECTIONAL
        sun.mode = mujoco.mjtCamLight.mjCAMLIGHT_TRACKCOM  # farther away it casts no shadow
        spec.visual.quality.shadowsize = 1024  # 4096 is half the work of a picture without a GPU
        spec.visual.headlight.ambient = spec.visual.headlight.diffuse = (0.35, 0.35, 0.35)
        with warnings.catch_warnings():  # MuJoCo 4 calls parts of the cheetah's file deprecated
            warnings.simplefilter("ignore")
            self.model = spec.compile()
        self.data = mujoco.MjData(self.model)
        self.size = 480, 640
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
        """Put the robot into the joint positions `qpos` (nq,)."""
        self.data.qpos[:] = qpos
        mujoco.mj_forward(self.model, self.data)
        if self.follows:  # in x and y only, so that a jump is visible
            self.camera.lookat[:2] = self.data.subtree_com[1, :2]

    def paint(self) -> np.ndarray:
        """An RGB picture (*size, 3) uint8; `size` can be changed before the first one."""
        if self.renderer is None:
            buffer = self.model.vis.global_  # the largest picture that it draws
            buffer.offheight = max(buffer.offheight, self.size[0])
            buffer.offwidth = max(buffer.offwidth, self.size[1])
            self.renderer = mujoco.Renderer(self.model, *self.size)
        for _ in range(2):  # an infinite floor is centred on the camera of the scene before
            self.renderer.update_scene(self.data, self.camera)
        return self.renderer.render()
