"""Environments whose speed throughput.py measures: each function -> step(i), called in a loop."""

import importlib
from collections.abc import Callable

import gymnasium
import numpy as np
import torch

import vec_envs
from vec_envs.core import available_cores

Stepper = Callable[[int], object]  # what it returns is not looked at


def ours(name: str, num_envs: int) -> Stepper:
    envs = vec_envs.make(name, num_envs)
    envs.reset()
    low, high = map(torch.from_numpy, (envs.single_action_space.low, envs.single_action_space.high))
    actions = low + (high - low) * torch.rand(50, num_envs, len(low))
    return lambda i: envs.step(actions[i % 50])


def physics(name: str, num_envs: int) -> Stepper:
    """mujoco.rollout, no observation, reward or reset, from states that step() passes through.

    (Without resets a Hopper lies on the floor most of the time, which is another task.)
    """
    import mujoco
    from mujoco import rollout

    envs = vec_envs.make(name, num_envs)
    envs.reset()
    model, kind = envs.model, mujoco.mjtState.mjSTATE_FULLPHYSICS
    size, frame_skip = mujoco.mj_stateSize(model, kind), envs.options.frame_skip
    low, high = model.actuator_ctrlrange.T
    snapshots = []
    for i in range(200):
        action = np.random.uniform(low, high, (num_envs, model.nu))
        if i % 10 == 0:
            states, warmstart = np.empty((num_envs, size)), np.empty((num_envs, model.nv))
            for data, row, start in zip(envs.sim.data, states, warmstart, strict=True):
                mujoco.mj_getState(model, data, row, kind)
                start[:] = data.qacc_warmstart
            controls = np.repeat(action[:, None], frame_skip, 1)
            snapshots.append((states, controls, warmstart))
        envs.step(torch.from_numpy(action).float())
    pool = rollout.Rollout(nthread=available_cores())
    datas = [mujoco.MjData(model) for _ in range(available_cores())]

    def step(i: int) -> None:
        states, controls, warmstart = snapshots[i % len(snapshots)]
        pool.rollout(model, datas, states, controls, initial_warmstart=warmstart)

    return step


def by_envpool(name: str, num_envs: int) -> Stepper:
    import envpool

    envs = envpool.make_gymnasium(
        f"{name}-v4", num_envs=num_envs, num_threads=available_cores(), seed=0
    )
    envs.reset()
    space = envs.action_space
    actions = np.random.uniform(space.low, space.high, (50, num_envs, *space.shape))
    return lambda i: envs.step(actions[i % 50])


def gymnasium_vector(mode: str) -> Callable[[str, int], Stepper]:
    def make(name: str, num_envs: int) -> Stepper:
        options = {"include_cfrc_ext_in_observation": False} if name == "Ant" else {}
        envs = gymnasium.make_vec(f"{name}-v5", num_envs, vectorization_mode=mode, **options)
        envs.reset(seed=0)
        actions = [envs.action_space.sample() for _ in range(50)]
        return lambda i: envs.step(actions[i % 50])

    return make


MUJOCO = {
    "CraneRL step()": ours,
    "mujoco.rollout, physics alone": physics,
    "EnvPool, one thread a core": by_envpool,
    "Gymnasium AsyncVectorEnv": gymnasium_vector("async"),
    "Gymnasium SyncVectorEnv": gymnasium_vector("sync"),
}


def particles(name: str, num_envs: int) -> Stepper:
    envs = vec_envs.make(name, num_envs)
    envs.reset()
    sizes = envs.action_mask.sum(1)  # moves that each agent has
    actions = (torch.rand(50, num_envs, envs.num_agents) * sizes).long()
    return lambda i: envs.step(actions[i % 50])


def mpe2(name: str) -> Stepper:
    env = importlib.import_module(f"mpe2.{name}").parallel_env()
    env.reset(seed=0)
    actions = [{a: env.action_space(a).sample() for a in env.agents} for _ in range(50)]

    def step(i: int) -> None:
        env.step(actions[i % 50])
        if not env.agents:  # it has ended
            env.reset()

    return step


# A module with an environment for Gymnasium that sleeps.
SLOW = """
import time
import gymnasium, numpy
class Slow(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Box(-1, 1, (4,))
    def reset(self, *, seed=None, options=None):
        return numpy.zeros(4, "float32"), {}
    def step(self, action):
        time.sleep(0.005)
        return numpy.zeros(4, "float32"), 0.0, False, False, {}
gymnasium.register("Slow-v0", Slow, max_episode_steps=100)
"""
