"""Pictures and windows of an environment, for play.py: what differs from machine to machine."""

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import gymnasium
import numpy as np

from vec_envs import NAMES, VecEnv, base_name

TRY_GL = "import mujoco; mujoco.Renderer(mujoco.MjModel.from_xml_string('<mujoco/>'), 8, 8).close()"
Window = tuple[Callable[[], bool], Callable[[], None]]
NO_WINDOW = "--show: no window can be opened on this display"


class CannotDraw(Exception):
    """Why there is no picture or no window, in one sentence."""


def seconds_per_step(env: VecEnv) -> float:
    return getattr(env, "dt", None) or 1 / (env.metadata.get("render_fps") or 30)


def draw(env: VecEnv) -> np.ndarray:
    """An RGB picture (height, width, 3) uint8 of the first environment, or `CannotDraw`."""
    try:
        return env.render(0)
    except Exception as error:  # a package is missing, or whatever somebody's environment raises
        reason = str(error) or type(error).__name__
        raise CannotDraw(f"{env.name} cannot be drawn: {reason}") from None


def choose_gl(name: str) -> None:
    """Have MuJoCo draw without a window: MUJOCO_GL, which it reads when it is imported.

    Each way is tried in a process of its own, since it cannot be changed after the import.
    `CannotDraw` if none works; nothing happens where the environment `name` is not MuJoCo's.
    """
    name = base_name(name)
    made_by = NAMES.get(name) or getattr(gymnasium.registry.get(name), "entry_point", "")
    foreign = ":" in name and importlib.util.find_spec("mujoco") is not None  # not imported yet
    if sys.platform != "linux" or not (foreign or "mujoco" in str(made_by)):
        return
    given = os.environ.get("MUJOCO_GL")
    for way in (given,) if given else ("egl", "osmesa", "glfw"):
        command = [sys.executable, "-P", "-c", TRY_GL]  # -P: not by a mujoco.py of this folder
        trial = subprocess.run(command, env={**os.environ, "MUJOCO_GL": way}, capture_output=True)
        if trial.returncode == 0:
            os.environ["MUJOCO_GL"] = way
            return
    if foreign:  # which perhaps does not draw by MuJoCo
        return
    raise CannotDraw(
        f"no OpenGL without a window here (tried {given or 'EGL, OSMesa and GLFW'}); on Debian and "
        "Ubuntu: apt-get install libegl1 libgl1-mesa-dri"
    )


def open_window(env: VecEnv) -> Window:
    """Functions that show the present state (false once the window is closed), and close it.

    `CannotDraw` if there is no window. MuJoCo's viewer can be turned with the mouse; everything
    else is shown by its pictures.
    """
    return mujoco_window(env) if hasattr(env, "painter") else picture_window(env)


def mujoco_window(env: VecEnv) -> Window:
    import glfw
    import mujoco.viewer

    glfw.ERROR_REPORTING = "ignore"
    if not glfw.init():  # the viewer would wait for ever
        raise CannotDraw(NO_WINDOW)
    painter, threads = env.painter, set(threading.enumerate())
    hide = {"show_left_ui": False, "show_right_ui": False}
    try:
        viewer = mujoco.viewer.launch_passive(painter.model, painter.data, **hide)
    except RuntimeError as error:  # macOS wants mjpython instead of python
        raise CannotDraw(f"--show: {error}") from None
    for name in ("lookat", "distance", "azimuth", "elevation"):
        setattr(viewer.cam, name, getattr(painter.camera, name))
    viewer.cam.type, viewer.cam.trackbodyid = mujoco.mjtCamera.mjCAMERA_TRACKING, 1

    def update() -> bool:
        painter.pose(env.qpos[0].numpy())
        viewer.sync()
        return viewer.is_running()

    def close() -> None:
        viewer.close()
        for thread in set(threading.enumerate()) - threads:  # else Python's end may crash it
            thread.join(5)

    return update, close


def picture_window(env: VecEnv) -> Window:
    os.environ["PYGAME_HIDE_SUPPORT_PROMPT"] = "1"
    try:
        import pygame
    except ImportError:
        raise CannotDraw("--show needs pygame: pip install pygame") from None
    try:
        window = pygame.display.set_mode(draw(env).shape[1::-1])
    except pygame.error as error:
        raise CannotDraw(f"--show: {error}") from None
    if pygame.display.get_driver() == "offscreen":  # what SDL takes where it finds no display
        raise CannotDraw(NO_WINDOW)

    def update() -> bool:
        picture = pygame.surfarray.make_surface(draw(env).swapaxes(0, 1))
        window.blit(picture, (0, 0))
        pygame.display.flip()
        return not pygame.event.get(pygame.QUIT)

    return update, pygame.display.quit
