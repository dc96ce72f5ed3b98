"""Every script learns: cues that want one of two answers, which only the next step pays for."""

import importlib
import sys

import gymnasium
import pytest
import torch
from test_offpolicy import NoEvaluator
from test_scripts import CONTINUOUS, DISCRETE, MULTI_AGENT, SCRIPTS

import vec_envs
from algos.worker_learner import run as run_module
from algos.worker_learner.workers import score

MODULE = """
import gymnasium, numpy as np
from gymnasium.spaces import Box, Discrete
from pettingzoo import ParallelEnv

WANTED = 1, -1, -1, 1, -1, 1
CUES, SPACE = np.eye(7, dtype=np.float32), Box(-1, 1, (7,), np.float32)

def paid(worth):
    return np.float32([0] * 6 + [worth])

class Echo(gymnasium.Env):
    observation_space = SPACE

    def __init__(self, discrete=False):
        self.action_space = Discrete(2) if discrete else Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.worth = self.np_random.integers(6), None
        return CUES[self.cue], {}

    def step(self, action):
        if self.worth is not None:  # this action does nothing
            return paid(0), self.worth, True, False, {}
        action = 2.0 * action - 1 if isinstance(self.action_space, Discrete) else action[0]
        self.worth = float(action * WANTED[self.cue])
        return paid(self.worth), 0.0, False, False, {}

class Echoes(ParallelEnv):
    metadata, possible_agents = {"name": "echoes"}, ["a", "b"]

    def observation_space(self, agent):
        return SPACE

    def action_space(self, agent):
        return Discrete(2)

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents, self.worth = ["a", "b"], None
        self.cue = dict(zip("ab", self.rng.integers(6, size=2)))
        return {a: CUES[self.cue[a]] for a in "ab"}, {"a": {}, "b": {}}

    def step(self, actions):
        over, rewards = self.worth is not None, self.worth or {"a": 0.0, "b": 0.0}
        self.worth = {a: (2.0 * actions[a] - 1) * WANTED[self.cue[a]] for a in "ab"}
        self.agents = [] if over else ["a", "b"]
        ends = {"a": over, "b": over}, {"a": False, "b": False}
        return {a: paid(self.worth[a]) for a in "ab"}, rewards, *ends, {"a": {}, "b": {}}

def parallel_env():
    return Echoes()

for kind in ("Box", "Discrete"):
    gymnasium.register(f"Echo{kind}-v0", Echo, kwargs={"discrete": kind == "Discrete"})
"""
SMALL = {
    **{"total_steps": 2000, "num_envs": 8, "hidden_size": 32, "critic_hidden_size": 32},
    **{"learning_rate": 3e-3, "epochs": 4, "minibatch_size": 64, "batch_size": 64, "updates": 10},
    **{"warmup_steps": 100, "buffer_size": 4000, "utd_ratio": 0.5},
    **{"tau": 0.05, "exploration_fraction": 0.3, "policy_delay": 2},
    **{"num_steps": 2, "eval_every": 0, "device": "cpu"},
}
OTHER = {script: {"num_steps": 16} for script in (*SCRIPTS, "pqn")}
OTHER |= {script: {"total_steps": 3000} for script in ("redq", "crossq")}  # they are careful
OTHER |= {script: {"num_steps": 10, "total_steps": 4000} for script in MULTI_AGENT}
OTHER |= {s: {**OTHER[s], "utd_ratio": 0.2, "batch_size": 256} for s in ("maddpg", "matd3")}


@pytest.fixture
def echo(tmp_path, monkeypatch):
    (tmp_path / "echo.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(run_module, "Evaluator", NoEvaluator)
    yield
    sys.modules.pop("echo", None)
    for id in [id for id in gymnasium.registry if id.startswith("Echo")]:
        del gymnasium.registry[id]


@pytest.mark.parametrize("script", [*SCRIPTS, *CONTINUOUS, *DISCRETE, *MULTI_AGENT])
def test_collect_keeps_apart_what_the_environment_said(script):
    """Terminated from truncated, the true next observation from the reset's, before from after."""
    module, many = importlib.import_module(f"algos.{script}"), script in MULTI_AGENT
    name = "SpeakerListener" if many else "CartPole" if script in DISCRETE else "Pendulum"
    envs = vec_envs.make(name, 3)
    envs.reset()
    args = module.Args(num_envs=3, hidden_size=4)
    spaces = (envs,) if many else (envs.single_observation_space, envs.single_action_space)
    agent, agents = module.Agent(*spaces, args), (envs.num_agents,) if many else ()
    shapes = dict.fromkeys(("obs", "next_obs"), (*agents, *envs.single_observation_space.shape))
    shapes |= dict.fromkeys(("alive", "next_alive", "reward"), agents)
    shapes |= dict.fromkeys(("state", "next_state"), (getattr(envs, "state_dim", 0),))
    shapes |= dict.fromkeys(("log_prob", "random", "episode_return", "episode_length"), ())
    shapes |= {"raw_action": (1,)}
    rollout = {key: torch.zeros(4, 3, *shape) for key, shape in shapes.items()}
    shape, kind = envs.action_space.shape[1:], torch.from_numpy(envs.action_space.sample()).dtype
    rollout["action"] = torch.zeros(4, 3, *shape, dtype=kind)
    ends = torch.tensor([True, False, False]), torch.tensor([False, True, False])
    rollout |= {key: torch.zeros(4, 3, dtype=torch.bool) for key in ("terminated", "done")}
    said, step = [], envs.step

    def watched(action):
        now = {"obs": envs.obs.clone(), "terminated": ends[0], "done": ends[0] | ends[1]}
        now |= {"state": envs.state.clone(), "alive": envs.alive.float()} if many else {}
        _, reward, _, _, info = step(action)
        info = {key: torch.rand(x.shape) for key, x in info.items()}  # unlike all else
        now |= {"reward": reward, "next_obs": info["final_obs"]}
        now |= {key: info[key] for key in ("episode_return", "episode_length")}
        if many:
            envs.alive = torch.rand(envs.alive.shape) < 0.5
            now |= {"next_state": info["final_state"], "next_alive": info["final_alive"]}
        said.append(now)
        return envs.obs, reward, *ends, info

    envs.step = watched
    module.collect(agent, envs, rollout)
    for key in said[0]:
        ours, theirs = rollout[key], torch.stack([now[key] for now in said]).to(rollout[key])
        unused = not ours.any() and key in ("state", "next_state", "alive", "next_alive")
        assert unused or torch.equal(ours, theirs), key


@pytest.mark.parametrize("script", ["a2c", *DISCRETE, *MULTI_AGENT])
def test_the_learning_rate_falls_linearly_to_zero(script, tmp_path, monkeypatch):
    module, rates = importlib.import_module(f"algos.{script}"), []

    def watched(*given, original=module.update):
        first = [x[0] if isinstance(x, list | tuple) else x for x in given]
        (optimizer,) = (x for x in first if isinstance(x, torch.optim.Optimizer))
        rates.append(float(optimizer.param_groups[0]["lr"]))
        return original(*given)

    monkeypatch.setattr(run_module, "Evaluator", NoEvaluator)
    monkeypatch.setattr(module, "update", watched)
    options = {**SMALL, "total_steps": 100, "num_envs": 4, "num_steps": 5, "learning_rate": 1e-3}
    options |= {"warmup_steps": 20, "minibatch_size": 8, "env": "CartPole"}
    options |= {"env": "Spread"} if script in MULTI_AGENT else {}
    options = {k: v for k, v in options.items() if hasattr(module.Args, k)}
    module.train(module.Args(**options, run_dir=str(tmp_path / "run")))
    assert sorted(set(rates))[::-1] == pytest.approx([1e-3, 8e-4, 6e-4, 4e-4, 2e-4])


@pytest.mark.parametrize("script", [*SCRIPTS, *CONTINUOUS, *DISCRETE, *MULTI_AGENT])
def test_it_learns(script, echo, tmp_path):
    module, many = importlib.import_module(f"algos.{script}"), script in MULTI_AGENT
    kind = "Discrete" if script in DISCRETE else "Box"
    env = "pettingzoo:echo" if many else f"echo:Echo{kind}-v0"
    options = {**SMALL, **OTHER.get(script, {})}
    options = {k: v for k, v in options.items() if hasattr(module.Args, k)}
    module.train(module.Args(env=env, **options, run_dir=str(tmp_path / "run")))
    saved = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    envs = vec_envs.make(env, 100)
    spaces = (envs,) if many else (envs.single_observation_space, envs.single_action_space)
    agent = module.Agent(*spaces, module.Args(**saved["args"]))
    agent.load_state_dict(saved["agent"])
    mean = score(agent.eval().requires_grad_(False), envs, seed=1)[0]["return"]
    assert mean > 0.6 * (envs.num_agents or 1)  # of 1 each; without learning 0
