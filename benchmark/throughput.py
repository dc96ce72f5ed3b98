"""Every speed claim: what CraneRL does in a second, beside what others do, in one run.

    pip install -e ".[benchmark]"
    python benchmark/throughput.py                     # all sections
    python benchmark/throughput.py --sections env      # one of them
    python benchmark/throughput.py --table             # Markdown of results/throughput.csv

The contenders of a group take turns for several rounds, so that a slow minute of the machine hits
all of them; the median counts. `ratio` is CraneRL's median over that contender's. Threads and sizes
are those named in a row; where none is, the contender's own defaults.
"""

import copy
import csv
import ctypes
import datetime
import functools
import importlib
import itertools
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import torch
import tyro
from returns import RESULTS, ROOT, commit

import vec_envs
from algos import ppo, ppo_hterm, redq
from algos import sac as sac_script
from algos.worker_learner import (
    ReplayBuffer,
    Run,
    Workers,
    flatten,
    gradient_of,
    keep_freed_memory,
)
from vec_envs.chasing import Chasing
from vec_envs.core import available_cores

Contenders = dict[str, Callable[[], float]]  # what it is -> measure once, units a second


@dataclass
class Options:
    """Measure, write results/throughput.csv and throughput.png, print a table."""

    sections: list[str] = field(default_factory=lambda: list(SECTIONS))
    """what to measure; the other sections keep their rows"""
    rounds: int = 5
    """turns of each contender"""
    seconds: float = 3.0
    """length of a turn (a training: 5 to 15 times that)"""
    results: Path = RESULTS
    """folder of the CSV and the figure"""
    table: bool = False
    """print the CSV as Markdown and measure nothing"""


def per_second(step: Callable[[int], None], units: int, seconds: float) -> float:
    """Call step(0), step(1), … for so long -> units a second."""
    start, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < seconds:
        step(count)
        count += 1
    return count * units / passed


# Sections: each yields (group, unit, contenders); the first contender is CraneRL.


def env(options: Options) -> Iterator[tuple[str, str, Contenders]]:
    """Random actions through step(): observations, rewards and autoreset included."""
    for num_envs in (64, 1024):
        for name in ("Hopper", "Ant"):
            turns = {}
            for what, make in ENV_STEPPERS.items():
                if num_envs > 64 and "Gymnasium" in what:
                    continue  # a thousand environments in Python, or a thousand processes
                step = make(name, num_envs)
                turns[what] = lambda step=step, n=num_envs: per_second(step, n, options.seconds)
            yield f"{name}, {num_envs} environments", "env steps/s", turns


def crane_stepper(name: str, num_envs: int) -> Callable[[int], None]:
    envs = vec_envs.make(name, num_envs)
    envs.reset()
    low, high = map(torch.from_numpy, (envs.single_action_space.low, envs.single_action_space.high))
    actions = low + (high - low) * torch.rand(50, num_envs, len(low))
    return lambda i: envs.step(actions[i % 50])


def physics_stepper(name: str, num_envs: int) -> Callable[[int], None]:
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


def envpool_stepper(name: str, num_envs: int) -> Callable[[int], None]:
    import envpool

    envs = envpool.make_gymnasium(
        f"{name}-v4", num_envs=num_envs, num_threads=available_cores(), seed=0
    )
    envs.reset()
    space = envs.action_space
    actions = np.random.uniform(space.low, space.high, (50, num_envs, *space.shape))
    return lambda i: envs.step(actions[i % 50])


def gymnasium_stepper(mode: str) -> Callable[[str, int], Callable[[int], None]]:
    def make(name: str, num_envs: int) -> Callable[[int], None]:
        options = {"include_cfrc_ext_in_observation": False} if name == "Ant" else {}
        envs = gymnasium.make_vec(f"{name}-v5", num_envs, vectorization_mode=mode, **options)
        envs.reset(seed=0)
        actions = [envs.action_space.sample() for _ in range(50)]
        return lambda i: envs.step(actions[i % 50])

    return make


ENV_STEPPERS = {
    "CraneRL step()": crane_stepper,
    "mujoco.rollout, physics alone": physics_stepper,
    "EnvPool, one thread a core": envpool_stepper,
    "Gymnasium AsyncVectorEnv": gymnasium_stepper("async"),
    "Gymnasium SyncVectorEnv": gymnasium_stepper("sync"),
}

STABLE_BASELINES = """
import sys, time
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
env, num_envs, n_steps, batch_size, n_epochs, steps = sys.argv[1], *map(int, sys.argv[2:])
options = {"include_cfrc_ext_in_observation": False} if env == "Ant-v5" else {}
model = PPO(
    "MlpPolicy", make_vec_env(env, num_envs, env_kwargs=options), device="cpu",
    n_steps=n_steps, batch_size=batch_size, n_epochs=n_epochs,
)
model.learn(n_steps * num_envs)
before, start = model.num_timesteps, time.perf_counter()
model.learn(steps, reset_num_timesteps=False)
print("steps/s", (model.num_timesteps - before) / (time.perf_counter() - start))
"""


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
class Large(Slow):
    observation_space = gymnasium.spaces.Box(-1, 1, (84 * 84 * 4,))
    def reset(self, *, seed=None, options=None):
        return numpy.zeros(84 * 84 * 4, "float32"), {}
    def step(self, action):
        return numpy.zeros(84 * 84 * 4, "float32"), 0.0, False, False, {}
gymnasium.register("Large-v0", Large, max_episode_steps=100)
"""


def training_speed(script: str, *flags: str, learners: int = 1, second_half: bool = False) -> float:
    """The steps per second that a script itself reports, without evaluations in between."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable]
        if learners > 1:
            command += [
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={learners}",
            ]
        command += [ROOT / "algos" / script, "--eval-every", "0"]
        command += ["--eval-episodes", "1", "--run-dir", f"{folder}/run", *flags]
        (Path(folder) / "slow.py").write_text(SLOW)
        paths = os.pathsep.join((folder, os.environ.get("PYTHONPATH", "")))
        environment = {**os.environ, "PYTHONPATH": paths}
        subprocess.run(command, check=True, capture_output=True, env=environment)
        rows = (Path(folder) / "run" / "metrics.csv").read_text().splitlines()
        found = [row.split(",") for row in rows if ",charts/SPS," in row]
        if second_half:  # when all that is to be compiled is
            middle, last = ([float(x) for x in found[i][:2]] for i in (len(found) // 2, -1))
            return (last[0] - middle[0]) / (last[1] - middle[1])
        return float(found[-1][3])


def training(options: Options) -> Iterator[tuple[str, str, Contenders]]:
    """PPO, collection and update: `python algos/ppo.py --env ENV` against Stable-Baselines3's.

    Theirs with their defaults (2048 steps, 10 passes in minibatches of 64) and with our sizes. Ours
    are the longer turns: at the beginning the evaluator's process, which imports torch, takes two
    seconds from the training, where a usual run has minutes.
    """

    def crane(name: str) -> float:
        steps = str(int(8000 * 15 * options.seconds))
        return training_speed("ppo.py", "--env", name, "--total-steps", steps)

    def stable_baselines(name: str, num_envs: int, sizes=(2048, 64, 10)) -> float:
        rollout = sizes[0] * num_envs
        steps = max(1, round(1700 * 6 * options.seconds / rollout)) * rollout
        numbers = map(str, (num_envs, *sizes, steps))
        command = [sys.executable, "-c", STABLE_BASELINES, f"{name}-v5", *numbers]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return float(re.search(r"steps/s (\S+)", done.stdout)[1])

    for name in ("Hopper", "Ant"):
        physics = physics_stepper(name, 64)
        ours = ppo.Args(**ppo.TUNED[name])
        sizes = ours.horizon, ours.minibatch_size, ours.epochs
        yield (
            f"PPO on {name}",
            "training steps/s",
            {
                "CraneRL ppo.py": lambda name=name: crane(name),
                "Stable-Baselines3 PPO, 1 environment": lambda name=name: stable_baselines(name, 1),
                "Stable-Baselines3 PPO, 8 environments": lambda name=name: stable_baselines(
                    name, 8
                ),
                "Stable-Baselines3 PPO, 64 environments, our sizes": (
                    lambda name=name, sizes=sizes: stable_baselines(name, 64, sizes)
                ),
                "mujoco.rollout, physics alone": lambda physics=physics: per_second(
                    physics, 64, options.seconds
                ),
            },
        )


STABLE_BASELINES_DQN = """
import sys, time
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
num_envs, gradient_steps, threads, steps = map(int, sys.argv[1:])
if threads:
    torch.set_num_threads(threads)
class Clock(BaseCallback):
    def _on_step(self):
        if self.num_timesteps <= 2000:  # learning began at 1000
            self.start, self.before = time.perf_counter(), self.num_timesteps
        return True
clock = Clock()
model = DQN(
    "MlpPolicy", make_vec_env("CartPole-v1", num_envs), train_freq=10, batch_size=128,
    gradient_steps=gradient_steps, buffer_size=10_000, learning_starts=1000,
    policy_kwargs={"net_arch": [128, 128]}, exploration_final_eps=0.05, device="cpu",
)
model.learn(steps, callback=clock)
print("steps/s", (model.num_timesteps - clock.before) / (time.perf_counter() - clock.start))
"""


def dqn(options: Options) -> Iterator[tuple[str, str, Contenders]]:
    """DQN at CleanRL's settings, two layers of 128.

    Ours on vec_envs' CartPole, which is CartPole-v1 step by step, and on Gymnasium's own as well.
    Stable-Baselines3 counts a step of all environments as one of the ten between two updates. Of
    our runs the second half is measured, when what --compile compiles is compiled.
    """

    def crane(num_envs: int, every: int, speed: int, env="CartPole", more: str = "") -> float:
        horizon = max(1, every // num_envs)
        flags = f"--env {env} --num-envs {num_envs} --horizon {horizon} {more} "
        flags += f"--utd-ratio {1 / every} --batch-size 128 --buffer-size 10000 --polyak 1 "
        flags += f"--target-every 50 --warmup-steps 1000 --n-step 1 --total-steps {speed * length}"
        return training_speed("dqn.py", *flags.split(), second_half=True)

    def stable_baselines(num_envs: int, gradient_steps: int, threads: int, speed: int) -> float:
        numbers = map(str, (num_envs, gradient_steps, threads, int(speed * length)))
        command = [sys.executable, "-c", STABLE_BASELINES_DQN, *numbers]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return float(re.search(r"steps/s (\S+)", done.stdout)[1])

    length = round(5 * options.seconds)
    yield (
        "DQN, 1 environment, an update every 10 steps",
        "training steps/s",
        {
            "CraneRL dqn.py --compile default --num-workers 1": lambda: crane(
                1, 10, 18_000, more="--compile default --num-workers 1"
            ),
            "CraneRL dqn.py --compile default": lambda: crane(
                1, 10, 16_000, more="--compile default"
            ),
            "CraneRL dqn.py": lambda: crane(1, 10, 4000),
            "CraneRL dqn.py, CartPole-v1": lambda: crane(1, 10, 4000, "CartPole-v1"),
            "Stable-Baselines3 DQN, 1 thread": lambda: stable_baselines(1, 1, 1, 3000),
            "Stable-Baselines3 DQN, its own threads": lambda: stable_baselines(1, 1, 0, 1000),
        },
    )
    yield (
        "DQN, 64 environments, an update every 10 steps of them all",
        "training steps/s",
        {
            "CraneRL dqn.py --compile default": lambda: crane(
                64, 640, 300_000, more="--compile default"
            ),
            "CraneRL dqn.py": lambda: crane(64, 640, 100_000),
            "CraneRL dqn.py, CartPole-v1": lambda: crane(64, 640, 60_000, "CartPole-v1"),
            "Stable-Baselines3 DQN, 64 environments, 1 thread": lambda: stable_baselines(
                64, 1, 1, 30_000
            ),
            "Stable-Baselines3 DQN, 1 environment, 1 thread": lambda: stable_baselines(
                1, 1, 1, 3000
            ),
        },
    )
    yield (
        "DQN, 64 environments, an update every 10 transitions",
        "training steps/s",
        {
            "CraneRL dqn.py --compile default": lambda: crane(
                64, 10, 30_000, more="--compile default"
            ),
            "CraneRL dqn.py": lambda: crane(64, 10, 15_000),
            "Stable-Baselines3 DQN, 64 environments, 1 thread": lambda: stable_baselines(
                64, 64, 1, 5000
            ),
        },
    )


class LoopingChasing(Chasing):
    """The same game with the end of an episode seen to env by env, as in the documents."""

    def step(self, action):
        reward, caught = self._simulate(self.check_action(action))
        self._lengths = self._lengths + 1
        done = torch.zeros(self.num_envs, dtype=torch.bool)
        for i in range(self.num_envs):
            if caught[i] or self._lengths[i] >= self.max_episode_steps:
                done[i] = True
                self._restart(torch.arange(self.num_envs) == i)
                self._lengths[i] = 0
        self.obs = self._observe()
        return self.obs, reward, done, done & ~caught, {}


def chasing(options: Options) -> Iterator[tuple[str, str, Contenders]]:
    """vec_envs/chasing.py against a Python loop over its envs."""
    turns = {}
    for what, kind in (("CraneRL, batched", Chasing), ("looping over envs", LoopingChasing)):
        envs = kind(1024)
        envs.reset()
        action = torch.rand(1024, 2) * 2 - 1
        turns[what] = lambda envs=envs, action=action: per_second(
            lambda i: envs.step(action), 1024, options.seconds
        )
    yield "Chasing, 1024 environments", "env steps/s", turns


def particles(options: Options) -> Iterator[tuple[str, str, Contenders]]:
    """Random moves through step(); mpe2 is one world in Python."""
    for num_envs in (64, 1024):
        for ours, theirs in (("Spread", "simple_spread_v3"),
                             ("SpeakerListener", "simple_speaker_listener_v4")):  # fmt: skip
            turns = {
                "CraneRL step()": (particle_stepper(ours, num_envs), num_envs),
                f"mpe2 {theirs}, one world": (mpe2_stepper(theirs), 1),
            }
            yield (
                f"{ours}, {num_envs} environments",
                "env steps/s",
                {
                    what: functools.partial(per_second, step, units, options.seconds)
                    for what, (step, units) in turns.items()
                },
            )


def particle_stepper(name: str, num_envs: int) -> Callable[[int], None]:
    envs = vec_envs.make(name, num_envs)
    envs.reset()
    sizes = envs.action_mask.sum(1)  # moves that each agent has
    actions = (torch.rand(50, num_envs, envs.num_agents) * sizes).long()
    return lambda i: envs.step(actions[i % 50])


def mpe2_stepper(name: str) -> Callable[[int], None]:
    env = importlib.import_module(f"mpe2.{name}").parallel_env()
    env.reset(seed=0)
    actions = [{a: env.action_space(a).sample() for a in env.agents} for _ in range(50)]

    def step(i: int) -> None:
        env.step(actions[i % 50])
        if not env.agents:  # it has ended
            env.reset()

    return step


STABLE_BASELINES_AGENTS = """
import sys, time
import supersuit
from mpe2 import simple_spread_v3
from stable_baselines3 import PPO
worlds, steps = map(int, sys.argv[1:])
env = supersuit.pettingzoo_env_to_vec_env_v1(simple_spread_v3.parallel_env())
env = supersuit.concat_vec_envs_v1(env, worlds, num_cpus=1, base_class="stable_baselines3")
model = PPO("MlpPolicy", env, n_steps=25, batch_size=25 * 3 * worlds, device="cpu")
model.learn(25 * 3 * worlds)
before, start = model.num_timesteps, time.perf_counter()
model.learn(3 * steps, reset_num_timesteps=False)  # it counts each agent's steps
print("steps/s", (model.num_timesteps - before) / 3 / (time.perf_counter() - start))
"""


def agents(options: Options) -> Iterator[tuple[str, str, Contenders]]:
    """Training of one policy for three agents, of 64 worlds, by 10 epochs of one minibatch each.

    The peer is what PettingZoo's documentation combines: mpe2, SuperSuit, Stable-Baselines3's PPO
    (whose critic sees one agent's observation, and whose rewards are each agent's own).
    """

    def stable_baselines() -> float:
        steps = str(int(500 * 5 * options.seconds))
        command = [sys.executable, "-c", STABLE_BASELINES_AGENTS, "64", steps]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return float(re.search(r"steps/s (\S+)", done.stdout)[1])

    steps = str(int(10_000 * 5 * options.seconds))
    yield (
        "PPO for the agents of Spread",
        "training steps/s",
        {
            "CraneRL mappo.py": functools.partial(
                training_speed, "mappo.py", "--env", "Spread", "--total-steps", steps,
                "--num-envs", "64", "--horizon", "25", "--epochs", "10",
            ),
            "Stable-Baselines3 PPO by SuperSuit, the same sizes": stable_baselines,
        },
    )  # fmt: skip


def hterm(options: Options) -> Iterator[tuple[str, str, Contenders]]:
    """Transitions learnt from in a second by `update` alone, on one rollout of Hopper."""
    keep_freed_memory()  # as Run does
    turns = {}
    for what, script in (("CraneRL ppo_hterm.py", ppo_hterm), ("ppo.py", ppo)):
        args = script.Args(env="Hopper", num_envs=64, device="cpu")
        run = SimpleNamespace(args=args, device=torch.device("cpu"), check_rollout=lambda _: None)
        workers = Workers(run, script.collect)
        agent = script.Agent(workers.observation_space, workers.action_space, args)
        optimizer = torch.optim.Adam([flatten(agent)], torch.tensor(1e-4), fused=True)
        empty = workers.start(agent, args.horizon)
        extra, gradients = (), gradient_of(script.minibatch_loss, agent)
        if script is ppo_hterm:
            extra = (ppo_hterm.SpinMemory(empty, args), args.hterm_coef)
            gradients = gradients, gradient_of(ppo_hterm.hamiltonian_term, agent)
        inputs = agent, optimizer, workers.collect(), gradients, args, *extra

        def step(i, update=script.update, inputs=inputs):
            update(*inputs)

        turns[what] = lambda step=step: per_second(step, 64 * 64, options.seconds)
    yield "PPO's update with the H-term", "transitions/s", turns


def replay_hterm(options: Options) -> Iterator[tuple[str, str, Contenders]]:
    """The second half of a run, where an environment's step costs little beside its update."""
    steps = 1000 + int(700 * options.seconds)
    flags = f"--env Hopper --warmup-steps 1000 --log-every 250 --total-steps {steps}".split()
    for base in ("ddpg", "td3", "sac"):
        turns = {
            f"CraneRL {name}.py": functools.partial(
                training_speed, f"{name}.py", *flags, second_half=True
            )
            for name in (f"{base}_hterm", base)
        }
        yield f"{base.upper()} with the H-term, an update a step", "training steps/s", turns


OBS, ACT, BATCH, HIDDEN = 17, 6, 256, 256  # HalfCheetah's sizes


def sac_stepper(script=sac_script, **flags: bool | str) -> Callable[[int], None]:
    """Sampling and `update` of sac.py or redq.py, on random transitions."""
    args = script.Args(device="cpu", **flags)
    torch.set_num_threads(args.torch_threads)  # the compiler has as many
    spaces = gymnasium.spaces.Box(-np.inf, np.inf, (OBS,)), gymnasium.spaces.Box(-1.0, 1.0, (ACT,))
    agent = script.Agent(*spaces, args)
    target = copy.deepcopy(agent.critics).requires_grad_(False)
    optimizers = tuple(
        torch.optim.Adam([flatten(network)], 3e-4, fused=True)
        for network in (agent.critics, agent.actor)
    )
    rollout = {"obs": torch.randn(1000, 4, OBS), "action": torch.rand(1000, 4, ACT) * 2 - 1}
    rollout |= {"reward": torch.randn(1000, 4), "next_obs": torch.randn(1000, 4, OBS)}
    rollout |= dict.fromkeys(("terminated", "done"), torch.zeros(1000, 4, dtype=torch.bool))
    run = SimpleNamespace(device=torch.device("cpu"), args=args, learners=1)
    replay = ReplayBuffer(run, rollout, 4000)
    replay.add(rollout)
    functions = (script.critic_loss, agent.critics), (script.policy_loss, agent.actor)
    gradients = [Run.gradient(run, *function) for function in functions]

    def step(i: int) -> None:
        number = (i,) if script is redq else ()
        batch = replay.sample(BATCH)
        script.update(agent, target, optimizers, batch, gradients, *number, args)

    for i in range(20):  # the compiler's time is not counted
        step(i)
    torch.set_num_threads(1)
    return step


def plain_sac_stepper() -> Callable[[int], None]:
    """SAC's update as it is usually written: separate critics, three optimizers, fp32."""
    mlp, normal = sac_script.mlp, torch.distributions.Normal
    actor = mlp(OBS, HIDDEN, 2 * ACT)
    critics, targets = ([mlp(OBS + ACT, HIDDEN, 1) for _ in range(2)] for _ in range(2))
    log_alpha = torch.zeros(1, requires_grad=True)
    weights = [weight for critic in critics for weight in critic.parameters()]
    groups = weights, list(actor.parameters()), [log_alpha]
    critic_optimizer, actor_optimizer, alpha_optimizer = (
        torch.optim.Adam(group, 3e-4) for group in groups
    )
    obs, next_obs = torch.randn(2, 100_000, OBS)
    action, reward, done = torch.rand(100_000, ACT), torch.randn(100_000), torch.zeros(100_000)

    def sample(obs):
        mean, log_std = actor(obs).chunk(2, -1)
        policy = normal(mean, log_std.clamp(-20, 2).exp())
        u = policy.rsample()
        log_prob = policy.log_prob(u) - torch.log(1 - u.tanh().square() + 1e-6)
        return u.tanh(), log_prob.sum(-1)

    def smallest(networks, obs, action):
        x = torch.cat((obs, action), -1)
        return torch.min(*(network(x).squeeze(-1) for network in networks))

    def step(i: int) -> None:
        index = torch.randint(100_000, (BATCH,))
        s, a, r, next_s, d = (x[index] for x in (obs, action, reward, next_obs, done))
        alpha = log_alpha.detach().exp()
        with torch.no_grad():
            next_a, log_prob = sample(next_s)
            y = r + 0.99 * (1 - d) * (smallest(targets, next_s, next_a) - alpha * log_prob)
        x = torch.cat((s, a), -1)
        loss = sum(torch.nn.functional.mse_loss(q(x).squeeze(-1), y) for q in critics)
        critic_optimizer.zero_grad()
        loss.backward()
        critic_optimizer.step()
        new_a, log_prob = sample(s)
        actor_optimizer.zero_grad()
        (alpha * log_prob - smallest(critics, s, new_a)).mean().backward()
        actor_optimizer.step()
        alpha_optimizer.zero_grad()
        (-log_alpha * (log_prob.detach() - ACT)).mean().backward()
        alpha_optimizer.step()
        with torch.no_grad():
            for ours, theirs in zip(critics, targets, strict=True):
                for w, v in zip(ours.parameters(), theirs.parameters(), strict=True):
                    v.mul_(0.995).add_(0.005 * w)

    return step


def looped_redq_stepper() -> Callable[[int], None]:
    """redq.py's update with ten networks one after another, each with an optimizer of its own."""
    args, mlp, mse = redq.Args(), redq.mlp, torch.nn.functional.mse_loss
    spaces = gymnasium.spaces.Box(-np.inf, np.inf, (OBS,)), gymnasium.spaces.Box(-1.0, 1.0, (ACT,))
    agent = redq.Agent(*spaces, args)
    critics, targets = (
        [mlp(OBS + ACT, HIDDEN, 1) for _ in range(args.ensemble_size)] for _ in range(2)
    )
    optimizers = [torch.optim.Adam(critic.parameters(), 3e-4) for critic in critics]
    actor_optimizer = torch.optim.Adam(agent.actor.parameters(), 3e-4)
    obs, next_obs = torch.randn(2, 4000, OBS)
    action, reward = torch.rand(4000, ACT) * 2 - 1, torch.randn(4000)

    def step(i: int) -> None:
        index = torch.randint(4000, (BATCH,))
        s, a, r, next_s = (x[index] for x in (obs, action, reward, next_obs))
        with torch.no_grad():
            next_a, log_prob = agent.sample(next_s)
            x, some = torch.cat((next_s, next_a), -1), torch.randperm(len(critics))[:2]
            smallest = torch.min(*(targets[k](x).squeeze(-1) for k in some))
            y = r + 0.99 * (smallest - agent.actor.log_temperature.exp() * log_prob)
        x = torch.cat((s, a), -1)
        for critic, optimizer in zip(critics, optimizers, strict=True):
            optimizer.zero_grad()
            mse(critic(x).squeeze(-1), y).backward()
            optimizer.step()
        if i % args.policy_delay == 0:
            new_a, log_prob = agent.sample(s)
            x = torch.cat((s, new_a), -1)
            value = sum(critic(x).squeeze(-1) for critic in critics) / len(critics)
            actor_optimizer.zero_grad()
            loss = (agent.actor.log_temperature.detach().exp() * log_prob - value).mean()
            (loss + redq.temperature_loss(agent, log_prob.detach())).backward()
            actor_optimizer.step()
        with torch.no_grad():
            for critic, target in zip(critics, targets, strict=True):
                for ours, theirs in zip(critic.parameters(), target.parameters(), strict=True):
                    theirs.lerp_(ours, 0.005)

    return step


def memory(options: Options) -> Iterator[tuple[str, str, Contenders]]:
    """A million transitions of HalfCheetah's sizes: what the process grows by, and what it must."""
    numbers = {"obs": (OBS,), "action": (ACT,), "reward": (), "next_obs": (OBS,)}
    rollout = {name: torch.ones(1000, 4, *shape) for name, shape in numbers.items()}
    rollout |= dict.fromkeys(("terminated", "done"), torch.zeros(1000, 4, dtype=torch.bool))
    run = SimpleNamespace(device=torch.device("cpu"), args=sac_script.Args())
    row = sum(x[0, 0].numel() * x.element_size() for x in rollout.values())

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def held() -> float:
        ctypes.CDLL(None).malloc_trim(0)  # what the turn before has freed must not be used again
        before = resident()
        replay = ReplayBuffer(run, rollout, 1_000_000)
        for _ in range(250):
            replay.add(rollout)
        return resident() - before

    turns = {"CraneRL, resident memory": held, "what it must hold": lambda: 1_000_000 * row}
    yield "A replay buffer of a million transitions", "bytes", turns


def stable_baselines_sac() -> Callable[[int], None]:
    from stable_baselines3 import SAC

    model = SAC("MlpPolicy", gymnasium.make("HalfCheetah-v5"), device="cpu", batch_size=BATCH)
    model.learn(500)
    return lambda i: model.train(20, BATCH)


def updates_per_second(
    step: Callable[[int], None], options: Options, threads: int = 1, updates: int = 1
) -> Callable[[], float]:
    """A turn of a contender that makes so many updates a step."""

    def turn() -> float:
        torch.set_num_threads(threads)
        speed = per_second(step, updates, options.seconds)
        torch.set_num_threads(1)
        return speed

    return turn


def ours_on_sac(script, options: Options) -> Contenders:
    turns = {}
    for compiled, threads, bf16 in itertools.product(
        ("default", "none"), sorted({1, available_cores()}), (True, False)
    ):
        if compiled == "none" and threads > 1:
            continue
        name = f"CraneRL {Path(script.__file__).name}" + " --bf16" * bf16
        name += " --compile default" * (compiled == "default")
        name += f" --torch-threads {threads}" * (threads > 1)
        step = sac_stepper(script, bf16=bf16, compile=compiled, torch_threads=threads)
        turns[name] = updates_per_second(step, options, threads)
    return turns


def sac(options: Options) -> Iterator[tuple[str, str, Contenders]]:
    """SAC's gradient updates: batch 256, two hidden layers of 256, HalfCheetah's sizes.

    All run in this process, and so with the C library's memory as the scripts have it.
    """
    keep_freed_memory()
    turns = ours_on_sac(sac_script, options)
    for threads in sorted({1, available_cores()}):
        many = f", {threads} torch threads" * (threads > 1)
        turns["plain loop, fp32" + many] = updates_per_second(plain_sac_stepper(), options, threads)
        sb3 = updates_per_second(stable_baselines_sac(), options, threads, updates=20)
        turns["Stable-Baselines3 SAC" + (many or ", 1 torch thread")] = sb3
    yield "SAC updates", "updates/s", turns
    torch._dynamo.reset()  # of one function, as gradient_of's, it keeps eight compiled forms
    turns = ours_on_sac(redq, options)
    for threads in sorted({1, available_cores()}):
        many = f", {threads} torch threads" * (threads > 1)
        looped = updates_per_second(looped_redq_stepper(), options, threads)
        turns["ten critics one after another, fp32" + many] = looped
    yield "REDQ updates, ten critics", "updates/s", turns


def workers(options: Options) -> Iterator[tuple[str, str, Contenders]]:
    """Worker processes that collect, for environments of which one process has one core's worth."""
    length = 5 * options.seconds
    for what, name, flags, speed in (
        ("PPO on an environment that sleeps for 5 ms a step", "slow:Slow-v0",
         "--num-envs 16 --horizon 8 --minibatch-size 128", 170),
        ("PPO on BipedalWalker-v3", "BipedalWalker-v3", "", 3000),
        ("PPO on LunarLander-v3", "LunarLander-v3", "", 5000),
        ("SAC on BipedalWalker-v3, an update every 16 steps", "BipedalWalker-v3",
         "--utd-ratio 0.0625 --num-envs 16 --warmup-steps 1000", 1500),
    ):  # fmt: skip
        script, turns = what.split()[0].lower() + ".py", {}
        for count in (0, 1, 2, 4):
            cores = count if "slow" in name else min(count, available_cores())
            total = ("--total-steps", str(int(speed * max(cores, 1) * length)))
            command = (script, "--env", name, "--num-workers", str(count), *total, *flags.split())
            number = f"{count or 'no'} worker{'s' * (count != 1)}"
            turns[f"CraneRL {script}, {number}"] = functools.partial(training_speed, *command)
        yield what, "training steps/s", turns
    with tempfile.TemporaryDirectory() as folder:
        yield "A batch of two workers, 84 x 84 x 4 observations", "bytes", bytes_of_a_batch(folder)


def bytes_of_a_batch(folder: str) -> Contenders:
    """What two workers' batch holds in shared memory, and what all processes write for it.

    What they write is what /proc counts: into pipes and files, and not into memory.
    """
    Path(folder, "slow.py").write_text(SLOW)
    sys.path.insert(0, folder)  # the workers' as well
    args = ppo.Args(env="slow:Large-v0", num_envs=4, num_workers=2, device="cpu", hidden_size=8)
    device, check = torch.device("cpu"), lambda rollout: None
    workers = Workers(SimpleNamespace(args=args, device=device, check_rollout=check), ppo.collect)
    agent = ppo.Agent(workers.observation_space, workers.action_space, args)
    rollout = workers.start(agent, 16)
    workers.collect()

    def bytes_so_far() -> int:
        processes = os.getpid(), *(child.pid for child in multiprocessing.active_children())
        files = (Path(f"/proc/{pid}/io").read_text() for pid in processes)
        return sum(int(re.search(r"wchar: (\d+)", text)[1]) for text in files)

    def written() -> float:
        before = bytes_so_far()
        workers.collect()
        return bytes_so_far() - before

    held = sum(x.numel() * x.element_size() for x in rollout.values())
    return {"CraneRL, through pipes": written, "the batch, in shared memory": lambda: held}


def learners(options: Options) -> Iterator[tuple[str, str, Contenders]]:
    """torchrun: learners that share the envs, the cores and each minibatch."""
    for name, speed in (("Hopper", 12_000), ("Ant", 8000), ("BipedalWalker-v3", 4000)):
        flags = "--env", name, "--total-steps", str(int(speed * 10 * options.seconds))
        turns = {
            "CraneRL ppo.py, 1 learner": functools.partial(training_speed, "ppo.py", *flags),
            "CraneRL ppo.py, 2 learners": functools.partial(
                training_speed, "ppo.py", *flags, learners=2
            ),
        }
        if name in ("Hopper", "Ant"):
            turns["mujoco.rollout, physics alone"] = functools.partial(
                per_second, physics_stepper(name, 64), 64, options.seconds
            )
        yield f"PPO on {name} with several learners", "training steps/s", turns


SECTIONS = {
    **{"env": env, "training": training, "dqn": dqn, "chasing": chasing},
    **{"particles": particles, "agents": agents, "hterm": hterm},
    **{"replay_hterm": replay_hterm, "memory": memory, "sac": sac},
    **{"workers": workers, "learners": learners},
}


# Measuring and showing.


def measure(section: str, options: Options, version: str) -> list[dict]:
    cpu = next((x for x in open("/proc/cpuinfo") if "model name" in x), platform.processor())
    about = {
        "rounds": options.rounds,
        "machine": f"{cpu.split(':')[-1].strip()}, {os.cpu_count()} cores, no GPU used",
        "torch": torch.__version__,
        "commit": version,
        "date": datetime.date.today().isoformat(),
    }
    rows = []
    for group, unit, contenders in SECTIONS[section](options):
        found: dict[str, list[float]] = {what: [] for what in contenders}
        for _ in range(options.rounds):
            for what, turn in contenders.items():
                found[what].append(turn())
        medians = {what: statistics.median(values) for what, values in found.items()}
        ours = next(iter(medians.values()))
        for what, values in found.items():
            row = {"section": section, "group": group, "what": what, "unit": unit}
            row |= {"median": round(medians[what]), "lowest": round(min(values))}
            row |= {"highest": round(max(values)), "ratio": round(ours / medians[what], 2)}
            rows.append(row | about)
            print(*row.values(), sep="  ", flush=True)
    return rows


def show(rows: list[dict]) -> None:
    """Print the rows as Markdown."""
    print("| what | median | lowest to highest | first row ÷ this one |\n|---|---|---|---|")
    for group in dict.fromkeys(row["group"] for row in rows):
        mine = [row for row in rows if row["group"] == group]
        print(f"| **{group}** ({mine[0]['unit']}; {mine[0]['machine'].partition(',')[0]}) | | | |")
        for row in mine:
            span = f"{int(row['lowest']):,} – {int(row['highest']):,}"
            print(f"| {row['what']} | {int(row['median']):,} | {span} | {row['ratio']} × |")


def draw(rows: list[dict], path: Path) -> None:
    from matplotlib import pyplot

    groups = list(dict.fromkeys(row["group"] for row in rows))
    sizes = [sum(row["group"] == group for row in rows) for group in groups]
    figure, panels = pyplot.subplots(
        len(groups), 1, figsize=(8, 0.6 * len(groups) + 0.3 * sum(sizes)), squeeze=False,
        gridspec_kw={"height_ratios": sizes}, layout="constrained",
    )  # fmt: skip
    for axes, group in zip(panels[:, 0], groups, strict=True):
        mine = [row for row in rows if row["group"] == group][::-1]
        colours = ["#d95f02" if "CraneRL" in row["what"] else "#9aa5b1" for row in mine]
        bars = axes.barh([row["what"] for row in mine], [float(r["median"]) for r in mine])
        for bar, colour in zip(bars, colours, strict=True):
            bar.set_color(colour)
        axes.bar_label(bars, [f" {int(row['median']):,}" for row in mine], fontsize=8)
        axes.set_title(f"{group} ({mine[0]['unit']})", loc="left", fontsize=9)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(labelsize=8, length=0)
        axes.set_xticks([])
        axes.margins(x=0.12)
    figure.savefig(path, dpi=110)


def main(options: Options) -> None:
    path = options.results / "throughput.csv"
    rows = list(csv.DictReader(open(path))) if path.exists() else []
    if not options.table:
        torch.set_num_threads(1)
        version = commit()  # before any file of results/ changes
        for section in options.sections:
            new = measure(section, options, version)
            rows = [row for row in rows if row["section"] != section] + new
            rows.sort(key=lambda row: list(SECTIONS).index(row["section"]))
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
        draw(rows, options.results / "throughput.png")
    show(rows)


if __name__ == "__main__":
    main(tyro.cli(Options))
