"""PettingZoo's environments behind the contract: equal to their own selves; masks and deaths."""

import sys

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, Tuple
from mpe2 import simple_tag_v3

from algos import maddpg, mappo, matd3, qmix, vdn
from algos.worker_learner.workers import compare_returns
from vec_envs import make
from vec_envs.core import ContractError, MultiAgentVecEnv, env_seeds
from vec_envs.gym import GymEnv

# Two agents. "mortal" leaves after two steps, "other" after four: by its end, or by a time limit.
# An agent sees its own steps; action k is allowed if steps % 3 ≠ k, and an error if it is not.
MODULE = """
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from pettingzoo import ParallelEnv

class Mortal(ParallelEnv):
    metadata = {"name": "mortal"}
    possible_agents = ["mortal", "other"]

    def __init__(self, in_info=False, limit=False, actions=None, render_mode=None):
        self.in_info, self.limit = in_info, limit
        self.actions = actions or {"mortal": Discrete(3), "other": Discrete(2, start=5)}

    def observation_space(self, agent):
        inner = Box(-9.0, 9.0, (2,) if agent == "mortal" else (1,))
        mask = Box(0, 1, (3,), np.int8)
        return inner if self.in_info else Dict({"observation": inner, "action_mask": mask})

    def action_space(self, agent):
        return self.actions[agent]

    def look(self, agents):
        seen = {a: np.full(2 - (a == "other"), self.steps, np.float32) for a in agents}
        masks = {a: np.arange(self.actions[a].n) != self.steps % 3 for a in agents}
        masks = {a: mask & (self.steps < 4) for a, mask in masks.items()}  # nothing at the end
        if self.in_info:
            return seen, {a: {"action_mask": masks[a]} for a in agents}
        return {a: {"observation": seen[a], "action_mask": masks[a]} for a in agents}, {
            a: {} for a in agents
        }

    def reset(self, seed=None, options=None):
        self.agents, self.steps = list(self.possible_agents), 0
        return self.look(self.agents)

    def step(self, actions):
        assert set(actions) == set(self.agents)
        for agent, action in actions.items():
            own = self.action_space(agent)
            assert own.contains(action), (agent, action)
            assert action - own.start != self.steps % 3
        self.steps += 1
        acted = list(self.agents)
        gone = {a: self.steps == (2 if a == "mortal" else 4) for a in acted}
        by_limit = {a: gone[a] and self.limit and a == "other" for a in acted}
        ended = {a: gone[a] and not by_limit[a] for a in acted}
        self.agents = [a for a in acted if not gone[a]]
        observations, infos = self.look(acted)
        return observations, dict.fromkeys(acted, 1.0), ended, by_limit, infos

def parallel_env(**options):
    return Mortal(**options)
"""


@pytest.fixture
def mortal(tmp_path, monkeypatch):
    (tmp_path / "mortal.py").write_text(MODULE)
    (tmp_path / "empty.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield "pettingzoo:mortal"
    sys.modules.pop("mortal", None)
    sys.modules.pop("empty", None)


@pytest.mark.parametrize("continuous", [False, True])
def test_equals_pettingzoo_step_by_step(continuous):
    """simple_tag: four agents, two teams, two sizes of observation."""
    options = {"max_cycles": 10, "continuous_actions": continuous}
    env = make("pettingzoo:mpe2.simple_tag_v3", 3, seed=5, **options)
    originals = [simple_tag_v3.parallel_env(**options) for _ in range(3)]
    seeds = zip(originals, env_seeds(5, 3), strict=True)
    expected = [theirs.reset(seed=seed)[0] for theirs, seed in seeds]
    obs, _ = env.reset()
    assert obs.shape == (3, 4, 16) and env.obs_mask.sum(1).tolist() == [16, 16, 16, 14]
    rng, ended = np.random.default_rng(0), 0
    for _ in range(35):
        for i, seen in enumerate(expected):
            for k, vector in enumerate(seen.values()):
                assert np.array_equal(obs[i, k, : len(vector)].numpy(), vector)
                assert not obs[i, k, len(vector) :].any()
            assert np.array_equal(env.state[i].numpy(), originals[i].state())
        actions = rng.random((3, 4, 5), np.float32) if continuous else rng.integers(0, 5, (3, 4))
        obs, reward, terminated, truncated, info = env.step(torch.from_numpy(actions))
        for i, theirs in enumerate(originals):
            given = dict(zip(theirs.agents, actions[i], strict=True))
            seen, rewards, _, truncations, _ = theirs.step(given)
            np.testing.assert_allclose(reward[i].numpy(), list(rewards.values()), rtol=1e-6)
            final = np.concatenate(list(seen.values()))
            assert np.array_equal(info["final_obs"][i][env.obs_mask].numpy(), final)
            assert np.array_equal(info["final_state"][i].numpy(), theirs.state())
            over = all(truncations.values())
            assert (terminated[i].item(), truncated[i].item()) == (False, over)
            expected[i] = theirs.reset()[0] if over else seen
            ended += over
    assert ended == 9


def test_no_two_seeds_share_an_episode():
    """Seed 0, env 1 is not seed 1, env 0."""
    name = "pettingzoo:mpe2.simple_tag_v3"
    firsts = [make(name, 3, seed=seed).reset()[0] for seed in range(3)]
    again = make(name, 3, seed=9).reset(seed=1)[0]
    assert torch.equal(again, firsts[1])
    assert len({tuple(row) for row in torch.cat(firsts).flatten(1).tolist()}) == 9


@pytest.mark.parametrize("in_info", [False, True])
@pytest.mark.parametrize("limit", [False, True])
def test_masks_deaths_and_sizes(mortal, in_info, limit):
    env = make(mortal, 2, in_info=in_info, limit=limit)
    obs, _ = env.reset()
    assert env.available_in_obs and env.single_observation_space.shape == (2 + 3,)
    assert env.action_mask.tolist() == [[True] * 3, [True, True, False]]
    own = [[True] * 5, [True, False, True, True, False]]
    assert env.obs_mask.tolist() == own and env.state_dim == 8
    for t in range(12):
        step = t % 4
        mask = [float(step % 3 != k) for k in range(3)]
        first = [step, step, *mask] if step < 2 else [0] * 5  # dead: it sees nothing
        assert obs[1].tolist() == [first, [step, 0, *mask[:2], 0]], t
        assert env.alive[0].tolist() == [step < 2, True]
        action = torch.tensor([[(step + 1) % 3, 1 - step % 2 if step != 2 else 0]] * 2)
        action[:, 1] = next(k for k in range(2) if k != step % 3)
        obs, reward, terminated, truncated, info = env.step(action)
        assert reward[0].tolist() == [float(step < 2), 1.0]
        over = step == 3
        assert terminated.tolist() == [over and not limit] * 2
        assert truncated.tolist() == [over and limit] * 2
        if over:
            assert info["final_obs"][0, 1, 0] == 4 and obs[0, 1, 0] == 0
            assert info["final_obs"][0, 1, 2:].tolist() == [1, 1, 0]  # there is always an action
            assert info["episode_return"].tolist() == [6.0, 6.0]
            assert info["episode_length"].tolist() == [4, 4]


def test_mappo_takes_only_available_actions(mortal, tmp_path):
    """The environment would refuse others; the dead are in the rollout, and in no policy loss."""
    result = mappo.train(
        mappo.Args(
            env=mortal,
            total_steps=400,
            num_envs=4,
            num_steps=20,
            epochs=2,
            hidden_size=8,
            eval_every=0,
            eval_episodes=2,
            run_dir=str(tmp_path / "run"),
        )
    )
    assert result.last_return == 6.0


@pytest.mark.parametrize("script", [mappo, vdn, qmix])
def test_of_who_has_left_nothing_counts_in_the_statistics(mortal, script, tmp_path):
    """ "mortal" is there for two of four steps."""
    sizes = dict(total_steps=400, num_envs=4, num_steps=20, hidden_size=8)
    run = dict(eval_every=0, eval_episodes=1, run_dir=str(tmp_path / "run"))
    script.train(script.Args(env=mortal, **sizes, **run))
    saved = torch.load(tmp_path / "run" / "last.pt", weights_only=True)["agent"]
    first, second = saved["normalizer.count"].view(2, 5)  # agents, their numbers
    assert first.tolist() == [200.0] * 5 and second.tolist() == [400.0] * 5


GRIDS = """
import numpy as np
from gymnasium.spaces import Box, Dict, MultiDiscrete
from pettingzoo import ParallelEnv

class Grids(ParallelEnv):
    metadata = {"name": "grids"}
    possible_agents = ["a", "b"]

    def __init__(self, size=4):
        self.size = size

    def observation_space(self, agent):
        return Box(-1e300, 1e300, (2, 2), np.float64) if agent == "a" else Dict(x=Box(0, 9, (1,)))

    def action_space(self, agent):
        return MultiDiscrete([2, 3], start=[0, 5])

    def look(self):
        grid = np.arange(self.size) + self.steps
        return {"a": grid.reshape(2, -1), "b": {"x": np.ones(1) * self.steps}}

    def reset(self, seed=None, options=None):
        self.agents, self.steps = list(self.possible_agents), 0
        return self.look(), {}

    def step(self, actions):
        assert all(self.action_space(agent).contains(x) for agent, x in actions.items())
        self.steps += 1
        reward = {agent: np.array([x.sum()]) for agent, x in actions.items()}
        late = dict.fromkeys(self.agents, self.steps == 3)  # and yet they stay in `agents`
        return self.look(), reward, dict.fromkeys(self.agents, False), late, {}

parallel_env = Grids
"""


def test_spaces_are_flattened_and_an_episode_ends_that_keeps_its_agents(tmp_path, monkeypatch):
    (tmp_path / "grids.py").write_text(GRIDS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "grids", raising=False)
    env = make("pettingzoo:grids", 2)
    obs, _ = env.reset()
    assert env.single_action_space == Discrete(6) and env.obs_mask.sum(1).tolist() == [4, 1]
    for t in (1, 2, 3, 1):
        obs, reward, terminated, truncated, info = env.step(torch.tensor([[0, 5], [4, 1]]))
        assert reward.tolist() == [[5.0, 8.0], [7.0, 6.0]] and not terminated.any()
        assert info["final_obs"][0].tolist() == [[t, t + 1, t + 2, t + 3], [t, 0, 0, 0]]
        assert truncated.all() == truncated.any() == (t == 3) and obs[0, 0, 0] == t % 3
        assert info["episode_length"].tolist() == [t, t] and env.alive.all()
    with pytest.raises(ValueError, match="grids: an observation has 6 numbers and not 4"):
        make("pettingzoo:grids", 1, size=6).reset()


ENDS = """
import numpy as np
from gymnasium.spaces import Box
from pettingzoo import ParallelEnv

class Ends(ParallelEnv):
    metadata = {"name": "ends"}
    possible_agents = ["a", "b", "c"]
    low, high = {"a": -1.0, "b": -0.05, "c": 2.0}, {"a": 1.0, "b": 0.05, "c": 4.0}

    def observation_space(self, agent):
        return Box(-99, 99, (1,))

    def action_space(self, agent):
        return Box(self.low[agent], self.high[agent], (1 + (agent == "c"),))

    def look(self):  # of everybody, also of who has left
        return {agent: np.float32([10 + self.steps]) for agent in self.possible_agents}

    def reset(self, seed=None, options=None):
        self.agents, self.steps = list(self.possible_agents), 0
        return self.look(), {}

    def step(self, actions):
        self.steps += 1
        terminated = {x: self.steps == {"a": 1, "b": 3}.get(x) for x in self.agents}
        truncated = {x: self.steps == 3 and x == "c" for x in self.agents}
        reward = dict.fromkeys(self.agents, 1.0)
        self.agents = [x for x in self.agents if not terminated[x] and not truncated[x]]
        return self.look(), reward, terminated, truncated, {}

parallel_env = Ends
"""


def test_who_dies_at_the_time_limit_of_others_does_not_go_on(tmp_path, monkeypatch):
    """`a` leaves at step 1, `b` dies at step 3, when only `c` is cut off."""
    (tmp_path / "ends.py").write_text(ENDS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ends", raising=False)
    env = make("pettingzoo:ends", 2)
    env.reset()
    for t in (1, 2, 3, 1):
        _, _, terminated, truncated, info = env.step(torch.zeros(2, 3, 2))
        assert info["final_alive"].tolist() == [[False, t < 3, True]] * 2
        assert info["final_obs"][0, :, 0].tolist() == [0, (10 + t) * (t < 3), 10 + t]
        assert not terminated.any() and truncated.tolist() == [t == 3] * 2
        assert env.alive.tolist() == [[t == 3, True, True]] * 2

    assert env.action_low.tolist() == [[-1, 0], [pytest.approx(-0.05), 0], [2, 2]]
    assert env.action_high.tolist() == [[1, 0], [pytest.approx(0.05), 0], [4, 4]]
    for script in (maddpg, matd3, mappo):  # each agent has its own range, and all of it
        agent = script.Agent(env, script.Args(num_envs=2, hidden_size=8))
        for end, bound in ((1.0, env.action_high), (-1.0, env.action_low)):
            assert torch.equal(agent.to_env(torch.full((2, 3, 2), end)), bound.expand(2, -1, -1))


ODD = """
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from pettingzoo import ParallelEnv

class Odd(ParallelEnv):
    metadata = {"name": "odd"}
    possible_agents = ["a", "b"]
    state_space = Box(-9, 9, (2,))

    def __init__(self, how):
        self.how = how

    def state(self):  # not where everybody has left
        return np.concatenate([np.ones(1) + self.steps for _ in self.agents])

    def observation_space(self, agent):
        parts = {"action_mask": Box(0, 1, (2 + 2 * (self.how == "parts"),), np.int8)}
        parts["map" if self.how == "map" else "observation"] = Box(-99, 99, (1,))
        return Dict(parts, z=Box(0, 9, (2,))) if self.how in ("parts", "map", "short") else Box(
            -99, 99, (1,))

    def action_space(self, agent):
        return MultiDiscrete([2, 2]) if self.how == "parts" else Discrete(2)

    def look(self):
        seen = np.full(1, self.steps, np.float32)
        parts = {"action_mask": np.ones({"short": 1, "parts": 4}.get(self.how, 2))}
        parts |= {"map": seen, "observation": seen, "z": np.full(2, 7.0)}
        seen = parts if self.how in ("parts", "map", "short") else seen
        return dict.fromkeys(self.possible_agents, {} if self.how == "no array" else seen)

    def infos(self):
        if self.how == "late mask" and self.steps:
            return {"a": {"action_mask": np.array([0, 1])}}
        return None if self.how == "no infos" else dict.fromkeys(self.possible_agents)

    def reset(self, seed=None, options=None):
        self.agents, self.steps = list(self.possible_agents), 0
        return self.look(), self.infos()

    def step(self, actions):
        self.steps += 1
        if self.how == "stale":  # "a" is cut off at step 1, and said to be for ever
            terminated = {"a": False, "b": self.steps == 3}
            truncated = {"a": True, "b": False}
        else:
            terminated = dict.fromkeys(self.agents, self.steps == 3)
            truncated = dict.fromkeys(self.agents, self.how == "both" and self.steps == 3)
        self.agents = [x for x in self.agents if not (terminated[x] or truncated[x])]
        rewards = dict.fromkeys(self.possible_agents, 1.0)
        return self.look(), rewards, terminated, truncated, self.infos()

parallel_env = Odd
"""


@pytest.fixture
def odd(tmp_path, monkeypatch):
    (tmp_path / "odd.py").write_text(ODD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd", raising=False)
    return "pettingzoo:odd"


@pytest.mark.parametrize("how", ["both", "stale", "no infos"])
def test_what_ended_in_the_last_step_decides_whether_the_episode_was_cut_off(odd, how):
    """Who is terminated and truncated at once is terminated; who left before does not count."""
    env = make(odd, 2, how=how)
    env.reset()
    for t in (1, 2, 3, 1):
        *_, terminated, truncated, info = env.step(torch.zeros(2, 2, dtype=torch.int64))
        assert terminated.tolist() == [t == 3] * 2 and not truncated.any()
        assert info["final_alive"].tolist() == [[how != "stale", True]] * 2
        # without agents there is no state: the last one stands for it
        assert info["final_state"][0, -1] == min(t, 2) + 1 if how != "stale" else True


def test_masks_and_observations_that_are_not_as_declared(odd):
    with pytest.raises(ValueError, match="action masks are supported for Discrete actions onl"):
        make(odd, 1, how="parts")
    for how, words in (
        ("short", "odd: agent 0's action mask has 1 entries for 2 actions"),
        ("no array", r"odd: an observation is not in its space Box\(-99.*TypeError"),
    ):
        with pytest.raises(ContractError, match=words):
            make(odd, 1, how=how).reset()
    env = make(odd, 1, how="late mask")
    env.reset()
    with pytest.raises(ContractError, match="agent 0's action mask comes in a step, and none"):
        env.step(torch.zeros(1, 2, dtype=torch.int64))
    obs, _ = make(odd, 1, how="map").reset()  # all parts but the mask, in the order of their names
    assert obs[0, 0].tolist() == [0.0, 7.0, 7.0, 1.0, 1.0]


class Pair(gymnasium.Env):
    """Two agents as tuples, as lbforaging has them; the second's actions begin at 5."""

    observation_space = Tuple((Box(-9, 9, (2,)), Box(-9, 9, (1,))))
    action_space = Tuple((Discrete(3), Discrete(2, start=5)))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.first = 0, self.np_random.integers(100)
        return self.look(), {}

    def look(self):
        return np.float32([self.steps, self.first]), np.float32([self.steps])

    def step(self, actions):
        assert self.action_space.contains(actions), actions
        self.steps += 1
        return self.look(), [float(a) for a in actions], self.steps == 3, False, {}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tuples_of_spaces_are_several_agents():
    gymnasium.register("Pair-v0", Pair)
    try:
        env = make("Pair-v0", 2, seed=4)
        obs, _ = env.reset()
        assert obs.shape == (2, 2, 2) and env.state.shape == (2, 3)
        assert env.action_mask.tolist() == [[True] * 3, [True, True, False]]
        for t in (1, 2, 3, 1):
            obs, reward, terminated, _, info = env.step(torch.tensor([[2, 1], [0, 0]]))
            assert reward.tolist() == [[2.0, 6.0], [0.0, 5.0]] and env.alive.all()
            assert info["final_obs"][:, 1].tolist() == [[t, 0.0]] * 2
            assert terminated.tolist() == [t == 3] * 2 and obs[:, 0, 0].tolist() == [t % 3] * 2
            assert info["episode_return"].tolist() == [8.0 * t, 5.0 * t]
        with pytest.raises(ValueError, match="has several agents"):
            GymEnv("Pair-v0", 2)
    finally:
        del gymnasium.registry["Pair-v0"]


def test_foraging():
    pytest.importorskip("lbforaging")
    env = make("lbforaging:Foraging-5x5-2p-1f-coop-v3", 4, seed=3)
    obs, _ = env.reset()
    assert obs.shape == (4, 2, 9) and env.state.shape == (4, 18)
    chance, ended, fed = torch.Generator().manual_seed(0), 0, 0
    for _ in range(300):
        actions = torch.randint(6, (4, 2), generator=chance)
        obs, reward, terminated, _, info = env.step(actions)
        ended += terminated.sum().item()
        fed += reward.sum().item()
        for i in range(4):
            food = info["final_obs"][i, 0, 2]
            assert (food == 0) == (terminated[i] and info["episode_return"][i] == 1)
    assert ended >= 20 and fed >= 1  # what both carry home is worth 1 together


def test_what_is_not_supported_is_refused_in_one_sentence(mortal):
    mixed = {"mortal": Discrete(3), "other": Box(0.0, 1.0, (2,))}
    whole = {"mortal": Box(0, 9, (2,), np.int64), "other": Discrete(2)}
    for name, options, words in (
        ("pettingzoo:no_such.module", {}, "importing 'no_such.module' failed"),
        ("pettingzoo:mpe2.simple_tagg", {}, "No module named 'mpe2.simple_tagg'$"),
        ("pettingzoo:empty", {}, "the module 'empty' has no parallel_env"),
        (mortal, {"unknown": 1}, "unexpected keyword argument 'unknown'"),
        (mortal, {"actions": mixed}, "spaces are not supported together"),
        (mortal, {"actions": whole}, "the action space Box.*only Discrete, MultiDiscrete"),
        (mortal, {"num_envs": 0}, "num_envs is 0"),
    ):
        with pytest.raises(ValueError, match=words) as raised:
            make(name, options.pop("num_envs", 2), **options)
        assert "\n" not in str(raised.value)


def test_render():
    env = make("pettingzoo:mpe2.simple_spread_v3", 1, render_mode="rgb_array")
    env.reset()
    picture = env.render()
    assert picture.shape == (700, 700, 3) and picture.std() > 0
    env.close()


def test_a_score_of_several_agents_says_that_it_is_their_sum():
    said = compare_returns(make("Spread", 1)).splitlines()
    assert said[0] == "Returns are sums over the agents." and said[1].startswith("To compare: ")
    assert not compare_returns(make("CartPole", 1))
    env = make("Spread", 1)
    env.max_episode_steps = 20_001
    assert compare_returns(env).endswith(" in whole episodes (here 20000 steps of each).\n")


def test_bounds_of_actions_that_an_agent_lacks_do_not_count():
    actions = [Box(2.0, 3.0, (size,)) for size in (1, 3)]
    observations = [Box(2.0, 3.0, (size,)) for size in (2, 1)]
    envs = MultiAgentVecEnv("two", 4, "cpu", 0, observations, actions, 5)
    assert envs.single_action_space.low.tolist() == [2, 2, 2]
    assert envs.single_action_space.high.tolist() == [3, 3, 3]
    assert envs.single_observation_space.low.tolist() == [2, 0]  # filled with zeros
    assert envs.action_mask.tolist() == [[True, False, False], [True, True, True]]
