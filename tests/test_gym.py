"""Gymnasium's environments behind the contract: equal to their own selves, and how they break."""

import random
import sys

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Box, Discrete

from algos.worker_learner.workers import score
from vec_envs import make
from vec_envs.core import ContractError, env_seeds
from vec_envs.gym import INSTALL, NO_TIME_LIMIT, GymEnv, flag, number

PACKAGE = '''
import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Sequence, Tuple


class Counter(gymnasium.Env):
    """Observes (steps, last action) in one array that it writes again and again; ends after 3."""

    def __init__(self, observation_space=None, action_space=None):
        self.observation_space = observation_space or Box(-np.inf, np.inf, (2,), np.float64)
        self.action_space = action_space or Discrete(4, start=5)
        self.array = np.zeros(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.array[:] = 0
        return self.observe(), {}

    def observe(self):
        if isinstance(self.observation_space, Discrete):
            return self.observation_space.start + int(self.array[0])
        if isinstance(self.observation_space, Dict):
            square = self.array[0] * np.arange(4).reshape(2, 2)
            return {"steps": int(self.array[0]), "pair": (self.array, square)}
        return self.array

    def step(self, action):
        assert self.action_space.contains(action), action
        self.array[:] = self.array[0] + 1, np.sum(action)
        return self.observe(), 1.0, bool(self.array[0] == 3), False, {}


gymnasium.register("Counter-v0", entry_point="counting:Counter")
for name, space in {
    "Multi": MultiDiscrete([[2, 3, 4]], start=[[0, 5, -1]]),
    "Binary": MultiBinary((2, 2)),
    "ManyBinary": MultiBinary(13),
    "Whole": Box(0, 9, (2,), np.int64),
    "Square": Box(0, 9, (2, 2)),
}.items():
    gymnasium.register(f"Counter{name}-v0", Counter, kwargs={"action_space": space})
for name, space in {
    "Dict": Dict({"steps": Discrete(4), "pair": Tuple((Box(-9, 9, (2,)), Box(-9, 9, (2, 2))))}),
    "Sequence": Dict({"all": Sequence(Discrete(2))}),
    "Image": Dict({"camera": Box(0, 255, (8, 8, 3), np.uint8), "speed": Box(0, 1, (1,))}),
}.items():
    gymnasium.register(f"Counter{name}-v0", Counter, kwargs={"observation_space": space})
gymnasium.register(
    "CounterTuple-v0", Counter, kwargs={"action_space": Tuple((Discrete(2), Box(0, 1, (2,))))}
)
gymnasium.register(
    "CounterDiscrete-v0", Counter, kwargs={"observation_space": Discrete(4, start=-1)}
)
boxes = Tuple([Box(-9, 9, (2,))] * 3)
both = {"observation_space": boxes, "action_space": Tuple([Discrete(2)] * 2)}
gymnasium.register("CounterTuples-v0", Counter, kwargs=both)
'''

SILENT = """
import gymnasium
def make():
    assert 1 == 2
gymnasium.register("Silent-v0", make)
"""


@pytest.fixture
def counting(tmp_path, monkeypatch):
    """A package that registers environments when it is imported, gone after the test."""
    (tmp_path / "counting.py").write_text(PACKAGE)
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "silent.py").write_text(SILENT)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("counting", None)
    sys.modules.pop("silent", None)
    for id in [id for id in gymnasium.registry if id.startswith(("Counter", "Silent"))]:
        del gymnasium.registry[id]


def refusal(name: str, **options) -> str:
    """The message of the ValueError that `make` raises, which must be one sentence."""
    with pytest.raises(ValueError) as raised:
        make(name, 2, **options)
    message = str(raised.value)
    assert "\n" not in message and len(message) < 400, message
    return message


@pytest.mark.parametrize(
    ("name", "options", "steps", "terminates", "truncates"),
    [
        ("CartPole-v1", {"max_episode_steps": 20}, 150, True, True),
        ("LunarLander-v3", {"max_episode_steps": 85}, 300, True, True),
        ("LunarLander-v3", {"continuous": True}, 300, True, False),
        ("LunarLanderContinuous-v3", {}, 150, True, False),
        ("BipedalWalker-v3", {"max_episode_steps": 60}, 200, True, True),
        ("BipedalWalkerHardcore-v3", {"max_episode_steps": 20}, 50, False, True),
        ("Ant-v5", {"max_episode_steps": 60}, 150, False, True),
        ("FrozenLake-v1", {"max_episode_steps": 10}, 100, True, True),
        ("Blackjack-v1", {}, 60, True, False),
    ],
)
def test_equals_gymnasium_step_by_step(name, options, steps, terminates, truncates):
    if name.startswith(("Lunar", "Bipedal")):
        pytest.importorskip("Box2D", reason="has no wheel for Python 3.14")
    num_envs, seed = 3, 7
    env = make(name, num_envs, seed=123, **options)
    gym_envs = [gymnasium.make(name, **options) for _ in range(num_envs)]
    limit = options.get("max_episode_steps", gym_envs[0].spec.max_episode_steps)
    assert env.max_episode_steps == (limit or NO_TIME_LIMIT)
    space = gym_envs[0].action_space
    rng = np.random.default_rng(1)

    def as_float32(observation):
        if isinstance(gym_envs[0].observation_space, gymnasium.spaces.Discrete):
            return np.eye(gym_envs[0].observation_space.n, dtype=np.float32)[observation]
        if isinstance(observation, tuple):  # of Discrete spaces
            sizes = [part.n for part in gym_envs[0].observation_space]
            parts = zip(sizes, observation, strict=True)
            return np.concatenate([np.eye(n, dtype=np.float32)[value] for n, value in parts])
        return observation.astype(np.float32)

    obs, info = env.reset(seed=seed)
    assert info == {}
    for index, gym_env in enumerate(gym_envs):
        first, _ = gym_env.reset(seed=env_seeds(seed, num_envs)[index])
        np.testing.assert_array_equal(obs[index].numpy(), as_float32(first))
    assert not torch.equal(obs[0], obs[1]) or name in ("FrozenLake-v1", "BipedalWalker-v3")
    returns, lengths = np.zeros(num_envs), np.zeros(num_envs)
    seen_terminated = seen_truncated = False
    for t in range(steps):
        if isinstance(space, gymnasium.spaces.Discrete):
            action = gym_action = rng.integers(space.n, size=num_envs)
        else:  # a part of the actions lies outside the bounds
            action = rng.uniform(1.2 * space.low, 1.2 * space.high, (num_envs, *space.shape))
            gym_action = np.clip(action, space.low, space.high).astype(np.float32)
        obs, reward, terminated, truncated, info = env.step(torch.from_numpy(action))
        assert obs.dtype == reward.dtype == info["final_obs"].dtype == torch.float32
        assert terminated.dtype == truncated.dtype == torch.bool
        assert env.obs is obs and env.single_observation_space.contains(obs[0].numpy())
        for index, gym_env in enumerate(gym_envs):
            what = f"{name} env {index} step {t}"
            true_obs, true_reward, *true_done, _ = gym_env.step(gym_action[index])
            true_obs = as_float32(true_obs)
            np.testing.assert_array_equal(info["final_obs"][index].numpy(), true_obs, what)
            assert reward[index].item() == np.float32(true_reward), what
            assert [terminated[index].item(), truncated[index].item()] == true_done, what
            returns[index] += true_reward
            lengths[index] += 1
            assert info["episode_length"][index].item() == lengths[index], what
            assert info["episode_return"][index].item() == pytest.approx(returns[index], 1e-4, 1e-3)
            if any(true_done):
                returns[index] = lengths[index] = 0
                true_obs = as_float32(gym_env.reset()[0])
            np.testing.assert_array_equal(obs[index].numpy(), true_obs, what)
        seen_terminated |= bool((terminated & ~truncated).any())
        seen_truncated |= bool((truncated & ~terminated).any())
    assert seen_terminated >= terminates and seen_truncated >= truncates
    env.close()


def test_seeds():
    env, same = (make("CartPole-v1", 3, seed=4) for _ in range(2))
    first, _ = env.reset()
    torch.testing.assert_close(first, same.reset()[0], rtol=0, atol=0)  # the constructor's seed
    again, _ = env.reset()
    assert not torch.equal(first, again)  # without a seed the generators run on
    torch.testing.assert_close(env.reset(seed=4)[0], first, rtol=0, atol=0)
    assert len({tuple(row) for row in first.tolist()}) == 3


@pytest.mark.parametrize("name", ["CartPole", "CartPole-v1"])  # our own, Gymnasium's
def test_a_reset_changes_nothing_that_was_returned(name):
    env = make(name, 2)
    env.reset(seed=0)
    info = env.step(torch.tensor([0, 1]))[-1]
    env.reset()
    assert info["episode_return"].tolist() == info["episode_length"].tolist() == [1, 1]


def test_no_two_seeds_share_an_episode():
    """Seed 0, env 1 is not seed 1, env 0."""
    firsts = [make("CartPole-v1", 8, seed=seed).reset()[0] for seed in range(10)]
    assert len({tuple(row) for row in torch.cat(firsts).tolist()}) == 80


def test_seeds_of_environments():
    for seed in (0, 7, 2**31 - 1, 2**40):
        seeds = env_seeds(seed, 1000)
        assert len(set(seeds)) == 1000 and 0 <= min(seeds) and max(seeds) < 2**31
        assert all(type(env_seed) is int for env_seed in seeds)
        assert env_seeds(seed, 10) == seeds[:10] and seed not in seeds
    with pytest.raises(ValueError):
        env_seeds(-1, 1)


def test_its_state_cannot_be_saved():
    env = make("CartPole-v1", 3, seed=4)
    env.reset()
    assert not env.exact_resume
    with pytest.raises(NotImplementedError, match="CartPole-v1: a simulator that is not ours"):
        env.state_dict()


@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium's, on what is tested here
def test_an_id_that_a_package_registers(counting):
    env = make("counting:Counter-v0", 2)
    assert env.max_episode_steps == NO_TIME_LIMIT
    assert env.single_action_space == gymnasium.spaces.Discrete(4)  # the env's own starts at 5
    env.reset()
    for step in (1, 2, 3):
        obs, _, terminated, _, info = env.step(torch.tensor([0, 3]))
        # though the env writes its next episode into the array that it returned
        assert info["final_obs"].tolist() == [[step, 5.0], [step, 8.0]]
    assert terminated.all() and obs.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    with pytest.raises(ValueError, match=r"counting:Counter-v0.* 4, allowed are 0 to 3"):
        env.step(torch.tensor([0, 4]))
    assert "counting:Nothing-v0: the package 'counting' does not" in refusal("counting:Nothing-v0")


def test_discrete_observations_count_from_their_start(counting):
    env = make("counting:CounterDiscrete-v0", 2)
    obs, _ = env.reset()
    assert obs.tolist() == [[1.0, 0.0, 0.0, 0.0]] * 2 and obs.dtype == torch.float32
    for _ in range(3):
        obs, _, _, _, info = env.step(torch.tensor([0, 3]))
    assert info["final_obs"].tolist() == [[0.0, 0.0, 0.0, 1.0]] * 2
    assert obs.tolist() == [[1.0, 0.0, 0.0, 0.0]] * 2


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_dict_is_flattened_and_said_so(counting, capfd):
    env = make("counting:CounterDict-v0", 2)
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("counting:CounterDict-v0: observations Dict(")
    assert said[0].endswith("as 10 numbers") and env.single_observation_space.shape == (10,)
    env.reset()
    for step in (1, 2, 3):
        obs, _, _, _, info = env.step(torch.tensor([0, 3]))
        for action, final in zip((5, 8), info["final_obs"].tolist(), strict=True):
            pair = [step, action, 0, step, 2 * step, 3 * step]  # "pair" is before "steps"
            assert final == [*pair, *(i == step for i in range(4))]
    assert obs.tolist() == [[0, 0, 0, 0, 0, 0, 1, 0, 0, 0]] * 2  # of the next episode
    env.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_actions_with_several_parts_are_one_choice(counting, capfd):
    env = make("counting:CounterMulti-v0", 24)
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("counting:")]
    assert len(said) == 1 and "actions MultiDiscrete(" in said[0]
    assert said[0].endswith("as one of 24 choices")
    assert env.single_action_space == gymnasium.spaces.Discrete(24)
    env.reset()
    _, _, _, _, info = env.step(torch.arange(24))  # the env refuses what is not in its space
    expected = [a + b + c for a in (0, 1) for b in (5, 6, 7) for c in (-1, 0, 1, 2)]
    assert info["final_obs"][:, 1].tolist() == expected
    with pytest.raises(ValueError, match="allowed are 0 to 23"):
        env.step(torch.full((24,), 24))
    env.close()
    env = make("counting:CounterBinary-v0", 16)
    env.reset()
    _, _, _, _, info = env.step(torch.arange(16))
    assert info["final_obs"][:, 1].tolist() == [bin(i).count("1") for i in range(16)]


class Sloppy(gymnasium.Env):
    """What environments out there do, and draws from NumPy's and Python's own generators."""

    observation_space, action_space = Box(-1, 1, (3,)), Discrete(2)

    def __init__(self, size=3, name=""):
        self.size = size

    def look(self):
        return [random.random(), *np.random.random(self.size - 1)]

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self.look(), {}

    def step(self, action):
        self.steps += 1
        return self.look(), np.array([2]), np.array([self.steps == 3]), None, {}


@pytest.fixture
def sloppy():
    gymnasium.register("Sloppy-v0", Sloppy)
    yield "Sloppy-v0"
    del gymnasium.registry["Sloppy-v0"]


@pytest.mark.parametrize("reward", [None, np.ones(2), [], "x", {}])
def test_a_reward_that_is_not_a_number_is_an_error(reward):
    with pytest.raises(ContractError, match=r"reward is .*; it must be one number"):
        number(reward)


def test_an_end_may_stand_in_an_array_but_must_be_one():
    """`bool([False])` is true."""
    for kind in (bool, int, np.bool_, torch.tensor, lambda x: [x], lambda x: np.array([[x]])):
        assert flag(kind(True)) is True and flag(kind(False)) is False
    assert flag(None) is False
    for several in ([False, False], np.zeros(2), "False", {}, ()):
        with pytest.raises(ContractError, match=r"terminated or truncated is .*, not one bool"):
            flag(several)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_env_may_be_sloppy(sloppy):
    """Lists, arrays of one number and None are taken for what they mean; one seed, one episode."""
    env, same = (make(f"{sloppy},name=x", 2, seed=3) for _ in range(2))
    first, _ = env.reset()
    runs = []
    for each in (env, same):
        runs.append([each.reset(seed=3)[0], *(each.step([0, 1])[0] for _ in range(3))])
    assert torch.equal(runs[0][0], first) and not torch.equal(first[0], first[1])
    assert torch.equal(torch.stack(runs[0]), torch.stack(runs[1]))
    _, reward, terminated, truncated, _ = env.step([0, 1])
    assert reward.tolist() == [2.0, 2.0] and not (terminated | truncated).any()
    env.step([0, 1])
    assert env.step([0, 1])[2].all()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_observation_that_is_not_of_its_space_is_named(sloppy):
    env = make(sloppy, 2, size=4)
    with pytest.raises(ValueError, match=r"Sloppy-v0: an observation has 4 numbers and not 3"):
        env.reset()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gymnasiums_version_of_an_environment_that_is_here_names_it(capfd):
    make("Pendulum-v1", 1)
    assert "Pendulum-v1: --env Pendulum is its newest version here" in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore::UserWarning")
class Goal(gymnasium.Env):
    """Observes its steps; action 1 is a success of that step."""

    observation_space, action_space = Box(0, 9, (1,)), Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = np.zeros(1, np.float32)
        return self.steps, {}

    def step(self, action):
        self.steps += 1
        info = {"is_success": np.array([True])} if action == 1 else {"success": None}
        return self.steps, float(action), bool(self.steps == 3), False, info


class At(torch.nn.Module):
    """Action 1 when so many steps were made, in env 1 never."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def forward(self, obs):
        return ((obs[:, 0] == self.step) & torch.tensor([True, False])).long()


def test_success_is_that_of_an_episodes_last_step(monkeypatch):
    monkeypatch.setitem(gymnasium.registry, "Goal-v0", EnvSpec("Goal-v0", Goal))
    env = make("Goal-v0", 2)
    for step, share in ((0, 0.0), (1, 0.0), (2, 0.5)):
        found, returns = score(At(step), env, seed=0)
        assert returns == [1, 0] and found["success"] == share
    env = make("CartPole-v1", 2)
    env.reset()
    assert "success" not in env.step(torch.tensor([0, 1]))[-1]


def test_flat_spaces_are_no_news(counting, capfd):
    for name in ("counting:Counter-v0", "FrozenLake-v1"):
        make(name, 1)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("CarRacing-v3", {}, ("image observations (Box(0, 255, (96, 96, 3), uint8))", "only num")),
        ("counting:CounterImage-v0", {}, ("image observations (Dict(", "only numbers")),
        ("counting:CounterSequence-v0", {}, ("observation space Dict('all': Sequence(", "only")),
        ("counting:CounterManyBinary-v0", {}, ("MultiBinary(13) has 8192 combinations", "4096")),
        ("counting:CounterSquare-v0", {}, ("action space Box(0.0, 9.0, (2, 2)", "flat Box")),
        ("counting:CounterTuple-v0", {}, ("action space Tuple(", "only Discrete, MultiDiscrete")),
        ("counting:CounterTuples-v0", {}, ("action space Tuple(", "only Discrete, MultiDiscrete")),
        ("counting:CounterWhole-v0", {}, ("action space Box(0, 9, (2,), int64)", "of floats")),
        ("counting:Counter-v0", {"wings": 2}, ("unexpected keyword argument 'wings'",)),
        ("broken:Counter-v0", {}, ("package 'broken' failed with ZeroDivisionError",)),
        (
            "no_such_package:Counter-v0",
            {},
            ("'no_such_package' failed with ModuleNotFound", "PYTH"),
        ),
        ("silent:Silent-v0", {}, ("silent:Silent-v0: AssertionError: in assert 1 == 2",)),
        ("counting:Counter-v0", {"render_mode": "rgb_array"}, ("cannot be drawn: it takes no",)),
        ("ALE/Pong-v5", {}, ("pictures are not supported",)),
        ("Hoper", {}, ("unknown environment 'Hoper'", "Hopper")),
        ("LunarLander-v33", {}, ("unknown environment", "LunarLander-v3")),
    ],
)
def test_what_is_not_supported_is_refused_in_one_sentence(counting, name, options, words):
    if name == "CarRacing-v3":
        pytest.importorskip("Box2D", reason="has no wheel for Python 3.14")
    message = refusal(name, **options)
    assert name in message.replace("environment creator for Counter-v0", "")
    for word in words:
        assert word in message


def test_options_behind_the_name():
    assert make("Spread,physics=openai", 2).physics == "openai"
    assert make("Pendulum,g=9.81", 2).g == 9.81
    assert make("CartPole,sutton_barto_reward=true", 2).sutton_barto_reward is True
    for wrong, said in ("CartPole,sutton_barto_reward=no", "'no'"), ("Pendulum,g={[]}", "{..}"):
        with pytest.raises(ValueError, match=said):
            make(wrong, 2)
    assert make("Ant,healthy_reward=2,frame_skip=1", 2).options.healthy_reward == 2
    assert make("CartPole-v1,max_episode_steps=20", 2).max_episode_steps == 20
    options = make("Hopper,healthy_z_range=(0.5,2),reset_noise_scale=0", 2).options
    assert options.healthy_z_range == (0.5, 2) and options.reset_noise_scale == 0
    options = make("Hopper, healthy_z_range=(0.5,inf), terminate_when_unhealthy=FALSE", 2).options
    assert options.healthy_z_range == (0.5, np.inf) and options.terminate_when_unhealthy is False
    env = make("FrozenLake-v1,desc=['SF','FG'],is_slippery=false,max_episode_steps=7", 2)
    assert env.single_observation_space.shape == (4,) and env.max_episode_steps == 7
    for name, message in {
        "Spread,physics=moon": "allowed are mpe2, openai",
        "Spread,gravity=1": "unexpected keyword argument 'gravity'",
        "Ant,gravity=1": "unknown option 'gravity'",
        "CartPole-v1,gravity=1": "unexpected keyword argument 'gravity'",
        "StockTrading,cost=1": "unexpected .* 'cost'; its options are data, actions, split,",
        "Spread,physics": "'physics' is not an option of an environment",
        "Spread,": "'' is not an option of an environment",
        "Ant,frame_skip=many": "frame_skip is 'many'; it must be like 5",
        "Ant,frame_skip=0": r"frame_skip is 0; it must be like 5",
        "Ant,main_body=foo": "Ant: .*foo",
        "Hopper,healthy_z_range=0.7": r"healthy_z_range is 0.7; it must be like \(0.7, inf\)",
        "Hopper,reset_noise_scale=much": "reset_noise_scale is 'much'; it must be like 0.005",
        "Ant-v5,frame_skip=0": "Ant-v5: ZeroDivisionError",
        "Ant-v5,xml_file=nope.xml": "Ant-v5: OSError: .*nope.xml",
        "Pendulum,g=much": "could not convert string to float: 'much'",
        "CartPole-v1,seed=3": "seed cannot follow the name 'CartPole-v1'",
        "FrozenLake-v1,map_name=none": "FrozenLake-v1: KeyError: 'none'",
        "Spread,physics=openai,dtype": "physics is 'openai,dtype'",
        "Spread,physic=openai": "unexpected keyword argument 'physic'; its options are physics",
        "FetchReach-v4": "unknown environment .* module before them, module:Id-v0 .a module of P",
        "mpe2:simple_tag_v3": "does not register .* PettingZoo has its prefix: pettingzoo:mpe2",
    }.items():
        with pytest.raises(ValueError, match=message):
            make(name, 2)


def test_unknown_id_without_make():
    with pytest.raises(ValueError, match=r"Nothing-v0: .*`Nothing` doesn't exist"):
        GymEnv("Nothing-v0", 1)


def test_missing_box2d(monkeypatch):
    for module in [name for name in sys.modules if name.startswith("gymnasium.envs.box2d")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "Box2D", None)
    assert refusal("LunarLander-v3").endswith('needs Box2D: pip install "gymnasium[box2d]"')


@pytest.mark.parametrize("package", sorted(INSTALL))
def test_a_missing_package_is_named_with_its_install_line(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert refusal(f"{package}:Some-v0").endswith(f"; pip install {INSTALL[package]}")


def test_bad_actions_and_a_step_too_early():
    env = make("Swimmer-v5", 2)
    with pytest.raises(RuntimeError, match=r"Swimmer-v5: call reset\(\)"):
        env.step(torch.zeros(2, 2))
    env.reset()
    with pytest.raises(ValueError, match=r"shape \(2,\), expected \(2, 2\)"):
        env.step(torch.zeros(2))
    with pytest.raises(ValueError, match=r"index \(1, 0\) is nan"):
        env.step(torch.tensor([[0.0, 0.0], [torch.nan, 0.0]]))
    with pytest.raises(ValueError, match="num_envs is 0"):
        make("CartPole-v1", 0)


def test_render():
    env = make("CartPole-v1", 2, render_mode="rgb_array")
    env.reset()
    picture = env.render(1)
    assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2] == 3
    env.close()
    with pytest.raises(NotImplementedError, match='make it with render_mode="rgb_array"'):
        make("CartPole-v1", 1).render()
