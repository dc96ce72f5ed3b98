"""What comes from outside: a VecEnv of one's own, Isaac Lab and SMAC, the latter two by stand-ins.

Neither Isaac Lab nor StarCraft II runs here. The stand-ins have the interface that their
documentation and source have, and are strict: an action that is not available is an error.
"""

import os
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
import torch
from gymnasium.spaces import Box, Discrete

import vec_envs
from algos import a2c, mappo, ppo, qmix, vdn
from algos.worker_learner import UserError
from algos.worker_learner.arguments import say_in_one_sentence
from vec_envs import make
from vec_envs.core import ContractError, MultiAgentVecEnv

ROOT = Path(__file__).parent.parent
NOBODY = torch.zeros(4, dtype=torch.bool)
TINY = {"num_envs": 4, "hidden_size": 8, "eval_every": 0, "eval_episodes": 2}


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A folder on the path of Python, here and in child processes; its modules are forgotten."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


MY_MODULE = '''
import gymnasium
import torch
from gymnasium.spaces import Box, Discrete
from vec_envs import VecEnv


class Guess(VecEnv):
    """Sees one of three signs one-hot; a reward for naming it; ten steps an episode."""

    state_names = ("sign",)

    def __init__(self, num_envs, device="cpu", seed=0, worth=1.0):
        super().__init__("Guess", num_envs, device, seed, Box(0, 1, (3,)), Discrete(3), 10)
        self.worth, self.sign = worth, torch.zeros(num_envs, 3, device=self.device)

    def draw(self):
        return torch.eye(3, device=self.device)[self.uniform(0, 3).long()]

    def _restart(self, mask):
        self.sign = torch.where(mask.unsqueeze(1), self.draw(), self.sign)

    def _simulate(self, action):
        right = action == self.sign.argmax(1)
        self.sign = self.draw()
        return self.worth * right, torch.zeros_like(right)

    def _observe(self):
        return self.sign.clone()


class Single(gymnasium.Env):
    pass


class NoDevice(Guess):
    def __init__(self, num_envs):
        super().__init__(num_envs)


class Bug(Guess):
    def __init__(self, num_envs, device="cpu", seed=0, worth=1.0):
        None + 1
'''


@pytest.fixture
def mine(outside):
    (outside / "my_module.py").write_text(MY_MODULE)
    (outside / "my_broken_module.py").write_text("1 / 0")
    return "my_module:Guess"


def test_a_vec_env_of_ones_own(mine):
    env = make(f"{mine},worth=2.5", 5, seed=3)
    assert (env.num_envs, env.worth) == (5, 2.5) and isinstance(env, vec_envs.VecEnv)
    obs, _ = env.reset(seed=3)
    assert env.step(obs.argmax(1))[1].tolist() == [2.5] * 5
    assert vec_envs.simulates_on_gpu(mine, 4)  # by itself: its tensors are wherever they shall be
    assert not vec_envs.simulates_on_gpu("CartPole-v1", 4)
    assert not vec_envs.simulates_on_gpu("my_broken_module:Guess", 4)  # what is wrong `make` says


@pytest.mark.parametrize("options", ["", ",worth=2"])
def test_an_error_within_its_constructor_keeps_its_traceback(mine, options):
    with pytest.raises(TypeError, match="NoneType"):
        make(f"my_module:Bug{options}", 5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_module:Guess,size=3", "my_module:Guess: .*unexpected keyword argument 'size'"),
        ("my_module:Single", "does not register 'Single', nor is that a subclass of VecEnv"),
        ("my_module:NoDevice", "my_module:NoDevice: .*unexpected keyword argument 'device'"),
        ("my_module.py:Guess", "a module is named as in an import, without .py"),
        ("my_module:Missing", "does not register 'Missing', nor is that a subclass of VecEnv"),
        ("my_broken_module:Guess", "'my_broken_module' failed with ZeroDivisionError"),
        ("no_such_module:Guess", "No module named 'no_such_module'; is it installed, or its fold"),
    ],
)
def test_what_is_none_is_refused_in_one_sentence(mine, tmp_path, name, message):
    with pytest.raises(UserError, match=message) as error:
        ppo.train(ppo.Args(env=name, run_dir=str(tmp_path / "run"), **TINY))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


BROKEN = """
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from my_module import Guess

memory = torch.zeros(2, 3)


def like(**changes):
    class Broken(Guess):
        def __init__(self, num_envs, device="cpu", seed=0):
            own = changes.get("obs", Box(0, 1, (3,))), changes.get("act", Discrete(3))
            own += (changes.get("limit", 9),)
            super(Guess, self).__init__("Broken", num_envs, device, seed, *own)
            self.worth, self.sign, self.steps = 1.0, torch.zeros(num_envs, 3), 0

        def _simulate(self, action):
            self.steps += 1
            reward, terminated = super()._simulate(action)
            return changes.get("reward", reward), changes.get("terminated", terminated)

        def _observe(self):
            return changes.get("observe", Guess._observe)(self)

        state_names = changes.get("state", ("sign",))

    return Broken


Grid, Start = like(obs=Box(0, 1, (3, 1))), like(act=Discrete(3, start=1))
Parts, Endless, Typo = like(act=MultiDiscrete([3])), like(limit=None), like(state=("sing",))
Wide, Double = like(observe=lambda e: torch.zeros(2, 4)), like(observe=lambda e: e.sign.double())
Itself, Sick = like(observe=lambda e: e.sign), like(observe=lambda e: e.sign + torch.inf)
Same = like(observe=lambda e: memory.copy_(e.sign))
One, Never = like(reward=1.0), like(terminated=False)
Column, Late = like(reward=torch.ones(2, 1)), like(
    observe=lambda e: e.sign * (torch.nan if e.steps == 3 else 1)
)
"""


@pytest.fixture
def broken(mine, outside):
    (outside / "my_broken_envs.py").write_text(BROKEN)
    return "my_broken_envs"


@pytest.mark.parametrize(
    ("name", "stage", "message"),
    [
        ("Grid", 0, r"observation space is Box\(.* \(3, 1\).*, it must be a Box \(n,\) of floats$"),
        ("Start", 0, r"action space is Discrete\(3, start=1\), it must be .* or a Discrete from 0"),
        ("Parts", 0, r"action space is MultiDiscrete\(\[3\]\), it must be"),
        ("Endless", 0, r"max_episode_steps is None, it must be an int"),
        ("Typo", 1, r"sing must be a tensor \(2, ...\), since it is in state_names"),
        ("Wide", 1, r"observation is \(2, 4\) of torch.float32, expected a tensor \(2, 3\)"),
        ("Double", 1, "observation is .*float64, expected .*float32"),
        ("Itself", 1, "its observation is sign itself, not a copy"),
        ("Sick", 1, "its first observation has NaN or infinity"),
        ("One", 2, r"reward is a float, expected a tensor \(2,\)$"),
        ("Column", 2, r"reward is \(2, 1\) of torch.float32, expected a tensor \(2,\)$"),
        ("Same", 2, "its observation is the one before, not a new tensor"),
        ("Never", 2, r"terminated is a bool, expected a tensor \(2,\) of torch.bool"),
    ],
)
def test_what_breaks_the_contract_is_named(broken, name, stage, message):
    def play():
        env = make(f"{broken}:{name}", 2)
        assert stage > 0
        env.reset()
        assert stage > 1
        env.step(torch.zeros(2, dtype=torch.int64))

    with pytest.raises(ValueError if stage == 0 else ContractError, match=f"Broken: .*{message}"):
        play()


class Team(MultiAgentVecEnv):
    """Its tensors are written in place. Ends after 3 steps; agent 1 leaves after the first one."""

    state_names = ("count", "alive")

    def __init__(self, num_envs):
        spaces = [Box(0, 9, (1,))] * 2, [Discrete(2)] * 2
        super().__init__("Team", num_envs, "cpu", 0, *spaces, 10)
        self.count, self.over = torch.zeros(num_envs, 2), torch.zeros(num_envs, dtype=torch.bool)

    @property
    def state(self):
        return self.count

    def _restart(self, mask):
        self.count[mask], self.over[mask], self.alive[mask] = 0, False, True

    def _simulate(self, action):
        self.count += 1
        self.over[:], self.alive[:, 1] = self.count[:, 0] == 3, False
        return self.count, self.over

    def _observe(self):
        return self.count.unsqueeze(2) * self.alive.unsqueeze(2)


def test_what_a_step_has_returned_no_restart_changes():
    env, steps = Team(2), []
    env.reset()
    for _ in range(4):
        _, *result, info = env.step(torch.zeros(2, 2, dtype=torch.int64))
        steps.append([*result, *(info[f"final_{name}"] for name in ("obs", "state", "alive"))])
    for t, (reward, terminated, truncated, obs, state, alive) in enumerate(steps):
        now = float(t % 3 + 1)
        assert reward.tolist() == state.tolist() == [[now, now]] * 2
        assert obs.squeeze(2).tolist() == [[now, 0.0]] * 2 and not truncated.any()
        assert terminated.tolist() == [t == 2] * 2 and alive.tolist() == [[True, False]] * 2
    assert env.alive.tolist() == [[True, False]] * 2


def test_a_script_says_only_that(capsys):
    say_in_one_sentence(ContractError, ContractError("Broken: reward is a float"), None)
    assert capsys.readouterr().err == "Broken: reward is a float\n"


def test_a_run_fails_in_one_sentence(broken, tmp_path):
    with pytest.raises(UserError, match="Broken: reward is a float"):
        ppo.train(ppo.Args(env=f"{broken}:One", run_dir=str(tmp_path / "run"), **TINY))


def test_a_nan_in_an_observation_is_named_where_actions_are_discrete(broken, tmp_path):
    with pytest.raises(UserError, match="next_obs is nan at step 12"):
        ppo.train(ppo.Args(env=f"{broken}:Late", run_dir=str(tmp_path / "run"), **TINY))


def test_the_environment_of_the_readme(outside):
    text = (ROOT / "vec_envs" / "README.md").read_text()
    (outside / "my_env.py").write_text(text.split("```python\n")[1].split("```")[0])
    env = make("my_env:Brake", 3, seed=1)
    env.reset()
    push = torch.full((3, 1), 1.0)
    ends = [env.step(push)[2:4] for _ in range(100)]
    assert torch.stack([terminated for terminated, _ in ends]).any()
    assert not torch.stack([truncated for _, truncated in ends]).any()


def test_its_run_learns_and_is_played(mine, tmp_path):
    """By the commands that a user types, with its workers and its evaluator in other processes."""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(*words):
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    script, folder = ROOT / "algos" / "ppo.py", tmp_path / "run"
    numbers = ("--total-steps", 8192, "--num-envs", 16, "--num-steps", 32, "--num-workers", 1)
    numbers += ("--learning-rate", 0.01, "--minibatch-size", 128, "--eval-every", 0)
    run(script, "--env", mine, *numbers, "--run-dir", folder)
    said = run(ROOT / "algos" / "play.py", folder)
    assert "ppo on my_module:Guess" in said and "mean          10 ± 0 (" in said


LOCKS = """
import gymnasium
import numpy as np
from gymnasium.spaces import Dict, MultiBinary, MultiDiscrete


class Lock(gymnasium.Env):
    '''Shows what opens it; a point for each part of the action that does; four steps.'''

    def __init__(self, space):
        self.action_space = space
        self.observation_space = Dict({"key": space, "switched": MultiBinary((1, 2))})

    def look(self):
        self.key = self.np_random.integers(2, size=self.action_space.shape)
        self.key = self.key.astype(self.action_space.dtype)
        return {"key": self.key, "switched": np.zeros((1, 2), np.int8)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.look(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.steps += 1
        reward = float((action == self.key).sum())
        return self.look(), reward, self.steps == 4, False, {}


for name, space in {"Wheels": MultiDiscrete([2, 5, 3]), "Switches": MultiBinary(3)}.items():
    gymnasium.register(f"Lock{name}-v0", Lock, kwargs={"space": space})
"""


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("script", [ppo, a2c])
@pytest.mark.parametrize("name", ["LockWheels-v0", "LockSwitches-v0"])
def test_actions_of_several_parts_are_learnt(outside, tmp_path, script, name):
    """All three parts, at each of the four steps: 12; by chance at most 6."""
    (outside / "locks.py").write_text(LOCKS)
    options = {"num_envs": 16, "gamma": 0.0, "eval_every": 0}
    ppos, a2cs = {"total_steps": 8192, "learning_rate": 0.01}, {"total_steps": 24_576}
    options |= a2cs if script is a2c else ppos
    try:
        args = script.Args(env=f"locks:{name}", run_dir=str(tmp_path / "run"), **options)
        result = script.train(args)
    finally:
        for known in ("LockWheels-v0", "LockSwitches-v0"):
            gymnasium.registry.pop(known, None)
    assert result.last_return > 11


ISAAC_APP = """
launched = []
class AppLauncher:
    def __init__(self, launcher_args=None, **options):
        launched.append(options)
"""

ISAAC_TASKS = """
import gymnasium
import torch
from gymnasium.spaces import Box, Dict
from isaaclab.app import launched
from types import SimpleNamespace

assert launched, "Isaac Lab cannot be imported before the simulator runs"


class Walk(gymnasium.Env):
    '''Env i walks by its action and falls at 3 + i; five steps at most. All buffers are reused.'''

    max_episode_length = 5

    def __init__(self, cfg, render_mode=None):
        self.cfg, self.num_envs = cfg, cfg.scene.num_envs
        self.single_observation_space = Dict({
            "policy": Box(-float("inf"), float("inf"), (2,)),
            "critic": Box(-float("inf"), float("inf"), (7,)),
        })
        self.single_action_space = Box(-float("inf"), float("inf"), (1,))
        self.observations = {"policy": torch.zeros(self.num_envs, 2)}
        self.reset_terminated = torch.zeros(self.num_envs, dtype=torch.bool)
        self.reset_time_outs = torch.zeros(self.num_envs, dtype=torch.bool)
        self.reward = torch.zeros(self.num_envs)
        self.extras, self.episode_length_buf = {}, torch.zeros(self.num_envs, dtype=torch.long)

    def reset(self, seed=None, options=None):
        self.seed_of_reset = seed
        self.observations["policy"].zero_()
        self.observations["policy"][:, 1] = torch.arange(self.num_envs)
        self.episode_length_buf.zero_()
        return self.observations, self.extras

    def step(self, action):
        assert action.shape == (self.num_envs, 1) and action.abs().max() <= 1
        place = self.observations["policy"][:, 0]
        place += action[:, 0]
        self.episode_length_buf += 1
        self.reset_terminated[:] = place >= 3 + torch.arange(self.num_envs)
        self.reset_time_outs[:] = self.episode_length_buf >= self.max_episode_length
        self.reward[:] = place
        over = self.reset_terminated | self.reset_time_outs
        place[over] = 0
        self.episode_length_buf[over] = 0
        return (
            self.observations, self.reward, self.reset_terminated, self.reset_time_outs, self.extras
        )


gymnasium.register("Isaac-Walk-v0", entry_point=Walk)
"""

ISAAC_UTILS = """
from types import SimpleNamespace
def parse_env_cfg(task_name, device="cuda:0", num_envs=None, use_fabric=None):
    return SimpleNamespace(scene=SimpleNamespace(num_envs=num_envs), device=device, seed=None)
"""


@pytest.fixture
def isaac_lab(outside):
    for file, text in {
        "isaaclab/__init__.py": "",
        "isaaclab/app.py": ISAAC_APP,
        "isaaclab_tasks/__init__.py": ISAAC_TASKS,
        "isaaclab_tasks/utils.py": ISAAC_UTILS,
    }.items():
        (outside / file).parent.mkdir(exist_ok=True)
        (outside / file).write_text(text)
    yield "vec_envs.isaac_lab:IsaacLab,task=Isaac-Walk-v0"
    gymnasium.registry.pop("Isaac-Walk-v0", None)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium's: steps are tensors
def test_isaac_lab(isaac_lab):
    env = make(isaac_lab, 3, seed=7)
    assert sys.modules["isaaclab.app"].launched == [{"headless": True, "device": "cpu"}]
    assert env._env.unwrapped.cfg.seed == 7 and env._env.unwrapped.cfg.device == "cpu"
    assert env.single_observation_space.shape == (2,) and env.max_episode_steps == 5
    assert env.single_action_space.low.tolist() == [-1] and not env.exact_resume
    obs, _ = env.reset()
    assert env._env.unwrapped.seed_of_reset == 7
    kept = [obs]
    lengths = [0, 0, 0]
    ends = {0: (3, True, False), 1: (4, True, False), 2: (5, True, True)}
    for _ in range(12):
        obs, reward, terminated, truncated, info = env.step(torch.full((3, 1), 4.0))  # clipped to 1
        for i, (end, falls, late) in ends.items():
            lengths[i] += 1
            assert info["episode_length"][i] == lengths[i] and reward[i] == lengths[i]
            assert info["episode_return"][i] == lengths[i] * (lengths[i] + 1) / 2
            over = lengths[i] == end
            assert [terminated[i], truncated[i]] == [over and falls, over and late]
            seen = lengths[i] - 1 if over else lengths[i]  # the last that is known
            assert info["final_obs"][i].tolist() == [seen, i]
            lengths[i] = 0 if over else lengths[i]
            assert obs[i].tolist() == [lengths[i], i]
        kept.append(obs)
    assert [x[2, 0].item() for x in kept] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2]
    obs, _ = env.reset(seed=1)
    assert env._env.unwrapped.seed_of_reset == 1 and not obs[:, 0].any()
    with pytest.raises(ValueError, match=r"shape \(3,\), expected \(3, 1\)"):
        env.step(torch.zeros(3))
    env.close()


def test_isaac_lab_trains(isaac_lab, tmp_path):
    options = {"total_steps": 2048, "num_steps": 16, "minibatch_size": 32, "learning_rate": 0.01}
    result = ppo.train(
        ppo.Args(env=isaac_lab, run_dir=str(tmp_path / "run"), **{**TINY, "num_envs": 8}, **options)
    )
    assert result.last_return > 4  # who walks on has 1 + 2 + 3 and more, who stands still 0


def test_without_isaac_lab():
    with pytest.raises(ValueError, match=r'needs Isaac Lab .*pip install "isaaclab\[isaacsim,all]'):
        make("vec_envs.isaac_lab:IsaacLab", 2)
    IsaacLab = vec_envs.vec_env_class("vec_envs.isaac_lab:IsaacLab")
    IsaacLab.__new__(IsaacLab).close()  # as some Gymnasiums do when it is deleted


def test_a_task_that_isaac_lab_does_not_have(isaac_lab):
    with pytest.raises(ValueError, match="Isaac Lab has no task 'Isaac-Run-v0'"):
        make("vec_envs.isaac_lab:IsaacLab,task=Isaac-Run-v0", 2)


# Three units; unit i < 2 dies after its step i + 2; the battle is over after five steps, won if
# unit 2 shot (action 2) in each. Shooting is possible at every step, action 3 never.
SMAC = """
class StarCraft2Env:
    launched = []

    def __init__(self, map_name="8m", seed=None, limit=9, continuing_episode=False, crash=0):
        if map_name != "3m":
            raise KeyError(map_name)
        self.seed_, self.limit, self.crash, self.reports = seed, limit, crash, continuing_episode
        self.running = False

    def get_env_info(self):
        return dict(state_shape=5, obs_shape=2, n_actions=4, n_agents=3, episode_limit=self.limit)

    def reset(self):
        if not self.running:
            self.launched.append(self.seed_)
        self.running, self.steps, self.shots, self.over = True, 0, 0, False
        return self.get_obs(), self.get_state()

    def alive(self, i):
        return i == 2 or self.steps < i + 2

    def get_obs(self):
        assert self.running
        return [[self.steps, i] if self.alive(i) else [0, 0] for i in range(3)]

    def get_state(self):
        assert self.running
        return [self.steps, self.shots, 1, 2, 3]

    def get_avail_actions(self):
        assert self.running
        return [[0, 1, 1, 0] if self.alive(i) else [1, 0, 0, 0] for i in range(3)]

    def step(self, actions):
        assert not self.over and len(actions) == 3
        for action, available in zip(actions, self.get_avail_actions()):
            assert type(action) is int and available[action], "Action is not available"
        self.steps += 1
        self.shots += actions[2] == 2
        if self.steps == self.crash:
            self.over = True
            return 0, True, {}
        won = self.shots == 5
        self.over = won or self.steps == min(5, self.limit)
        info = {"battle_won": won}
        if self.steps == self.limit and self.reports:
            info["episode_limit"] = True
        return 3 * sum(a == 2 for a in actions) + 30 * won, self.over, info

    def close(self):
        self.running = False
"""


@pytest.fixture
def smac(outside):
    (outside / "smac" / "env").mkdir(parents=True)
    (outside / "smac" / "__init__.py").write_text("")
    (outside / "smac" / "env" / "__init__.py").write_text(SMAC)
    return "smac:3m"


def test_smac_step_by_step(smac):
    env = make(smac, 2, seed=4)
    game = sys.modules["smac.env"].StarCraft2Env
    assert not game.launched  # StarCraft needs seconds and gigabytes: not before it is played
    assert env.num_agents == 3 and env.state_dim == 5 and env.available_in_obs
    assert env.single_observation_space.shape == (2 + 4,) and env.single_action_space.n == 4
    obs, _ = env.reset()
    assert game.launched == vec_envs.core.env_seeds(4, 2)
    total = 0
    for t in range(10):
        step = t % 5
        alive = [step < 2, step < 3, True]
        assert env.alive.tolist() == [alive] * 2 and env.state[0, 0] == step
        expected = [[step, i, 0, 1, 1, 0] if alive[i] else [0] * 6 for i in range(3)]
        assert obs.tolist() == [expected] * 2
        action = torch.tensor([[2, 3 * (not alive[1]) + alive[1], 2]] * 2)  # the dead: ignored
        obs, reward, terminated, truncated, info = env.step(action)
        over = step == 4
        gained = 3 * (alive[0] + 1) + 30 * over
        total = gained if step == 0 else total + gained
        assert reward.tolist() == [[pytest.approx(gained / 3)] * 3] * 2
        assert info["episode_return"].tolist() == pytest.approx([total] * 2)
        assert terminated.tolist() == [over] * 2 and not truncated.any()
        assert info["success"].tolist() == [over] * 2  # the battle was won
        assert info["final_state"][0].tolist() == [step + 1, step + 1, 1, 2, 3]
        assert info["final_obs"][0, 2, 0] == step + 1
    env.reset(seed=9)
    assert len(game.launched) == 2  # the game goes on
    env.close()


@pytest.mark.parametrize(
    ("options", "length", "is_cut"),
    [
        ({"limit": 3}, 3, False),  # SMAC's own: a battle not won in time is lost
        ({"limit": 3, "continuing_episode": True}, 3, True),
        ({"crash": 2}, 2, True),
    ],
)
def test_how_a_battle_of_smac_ends(smac, options, length, is_cut):
    env = make(smac, 1, **options)
    env.reset()
    for step in range(1, length + 1):
        _, _, terminated, truncated, _ = env.step(torch.tensor([[1, 1, 1]]))
        ends = [terminated.item(), truncated.item()]
        assert ends == ([False, False] if step < length else [not is_cut, is_cut])


@pytest.mark.parametrize("script", [vdn, qmix, mappo])
def test_smac_trains(smac, tmp_path, script):
    """The stand-in refuses what is not available, in training and in the evaluator's process."""
    options = {"env": smac, "total_steps": 400, "num_steps": 20, "run_dir": str(tmp_path / "run")}
    own = {"epochs": 2} if script is mappo else {"batch_size": 4, "updates": 4}
    result = script.train(script.Args(**options, **own, **TINY))
    assert 0 <= result.last_return <= 3 * (2 + 3 + 5) + 30


def test_without_smac_or_its_map(smac, monkeypatch):
    with pytest.raises(ValueError, match="smac:4m: KeyError: '4m'"):
        make("smac:4m", 1)
    with pytest.raises(ValueError, match=r"smac:3m: TypeError: .*'size'"):
        make("smac:3m,size=3", 1)
    monkeypatch.setitem(sys.modules, "smac.env", None)
    with pytest.raises(ValueError, match=r"needs SMAC .*: pip install git\+.*smac.git, and StarCr"):
        make(smac, 1)
