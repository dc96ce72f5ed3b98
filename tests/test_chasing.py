"""The tutorial environment against its rules written once more, for one world, in plain numpy."""

import math

import numpy as np
import pytest
import torch

from vec_envs import make

PARTS = ("robot_position", "robot_velocity", "agent_position", "agent_velocity")


class World:
    """The rules for a single world, in double precision; its chance comes from outside."""

    def __init__(self, parts):
        self.robot, self.robot_v, self.agent, self.agent_v = (
            np.array(part, np.float64) for part in parts
        )
        self.steps = 0

    def step(self, thrust, robot_thrust):
        def unit(vector):
            length = math.sqrt(sum(x * x for x in vector))
            return vector / length if length > 1 else vector

        thrust, before = thrust.astype(np.float64), math.dist(self.robot, self.agent)
        self.robot_v = self.robot_v * 0.5 + unit(robot_thrust.astype(np.float64))
        self.robot = self.robot + self.robot_v * 0.01
        self.agent_v = self.agent_v * 0.75 + unit(thrust)
        self.agent = self.agent + self.agent_v * 0.01
        after = math.dist(self.robot, self.agent)
        reward = before - after - 0.02 * math.hypot(*thrust)
        caught = after < 1
        self.steps += 1
        return self.obs(), reward + 8 * caught, caught, self.steps >= 1024

    def obs(self):
        return np.concatenate((self.robot, self.robot_v, self.agent, self.agent_v))


def state(env, index):
    return [getattr(env, part)[index].numpy() for part in PARTS]


# float64 shows that the rules are the same; float32, as the env is, what rounding adds to them.
@pytest.mark.parametrize(
    ("dim", "dtype", "error"),
    [*((dim, torch.float64, 1e-6) for dim in (1, 2, 3)), (2, torch.float32, 1e-4)],
)
def test_equals_the_rules_for_one_world(dim, dtype, error):
    env = make("Chasing", 6, seed=dim, dim=dim)
    env.reset()
    for part in PARTS:
        setattr(env, part, getattr(env, part).to(dtype))
    env._check_shapes = lambda **results: None  # which are float32 otherwise
    worlds = [World(state(env, index)) for index in range(6)]
    rng = np.random.default_rng(0)
    ends = np.zeros(2, int)
    for t in range(1400):
        action = rng.uniform(-1.5, 1.5, (6, dim))
        toward = (env.robot_position - env.agent_position).numpy()
        action[:3] = toward[:3] / np.linalg.norm(toward[:3], axis=1, keepdims=True)  # good chasers
        action = action.astype(np.float32)
        chance = torch.Generator()
        chance.set_state(env.generator.get_state())
        robot_thrust = torch.rand(6, dim, generator=chance).numpy()
        obs, reward, terminated, truncated, info = env.step(torch.from_numpy(action))
        inputs = zip(worlds, action, robot_thrust, strict=True)
        given = [world.step(*thrusts) for world, *thrusts in inputs]
        true_obs, true_reward, *true_ends = zip(*given, strict=True)
        what, final = f"step {t}", info["final_obs"].numpy()
        np.testing.assert_allclose(final, true_obs, rtol=0, atol=error, err_msg=what)
        np.testing.assert_allclose(reward.numpy(), true_reward, rtol=1e-6, atol=error)
        assert [tuple(terminated.tolist()), tuple(truncated.tolist())] == true_ends, what
        for index in (terminated | truncated).nonzero().flatten().tolist():
            ends += [x[index] for x in true_ends]
            assert not np.allclose(obs[index].numpy(), final[index]), what  # the next episode
            assert not env.robot_velocity[index].any() and not env.agent_velocity[index].any()
            worlds[index] = World(state(env, index))
        np.testing.assert_allclose(obs.numpy(), [world.obs() for world in worlds], atol=error)
    assert ends.min() >= 3  # both kinds


@pytest.mark.parametrize("dim", [2, 3])
def test_a_catch_ends_the_episode_and_pays_eight(dim):
    env = make("Chasing", 3, seed=0, dim=dim)
    env.reset()
    env.robot_position[:] = 0.0
    env.agent_position[:] = 0.0
    env.agent_position[:, 0] = torch.tensor([-0.9, -1.2, -5.0])
    still = torch.zeros(3, dim)
    _, reward, terminated, truncated, info = env.step(still)
    assert terminated.tolist() == [True, False, False]  # at a distance below 1, in any dimension
    assert not truncated.any()
    assert 7.9 < reward[0] < 8.1
    assert reward[1:].abs().max() < 0.1
    assert env._distance()[0] > 1.0  # a new chase; final_obs has the old one
    assert info["final_obs"][0, 2 * dim] == pytest.approx(-0.9)
    assert info["episode_length"].tolist() == [1, 1, 1]
    assert info["episode_return"][0] == reward[0]


def test_thrust_is_limited_but_charged_in_full():
    env = make("Chasing", 3, seed=0)
    env.reset()
    velocity, before = env.agent_velocity.clone(), env._distance()
    thrust = torch.tensor([[0.3, 0.4], [1.0, 1.0], [30.0, 40.0]])
    _, reward, *_ = env.step(thrust)
    gained = env.agent_velocity - 0.75 * velocity
    half = math.sqrt(0.5)
    torch.testing.assert_close(gained, torch.tensor([[0.3, 0.4], [half, half], [0.6, 0.8]]))
    charged = before - env._distance() - reward
    torch.testing.assert_close(
        charged, 0.02 * torch.tensor([0.5, math.sqrt(2), 50.0]), atol=2e-6, rtol=0
    )
    for _ in range(200):  # speeds stay below their limits 1 / (1 - factor)
        env.step(thrust)
        assert env.agent_velocity.norm(dim=1).max() < 4.0001
        assert env.robot_velocity.norm(dim=1).max() < 2.0001


def test_first_states():
    env = make("Chasing", 4000, seed=1, dim=3)
    obs, _ = env.reset()
    assert obs.shape == (4000, 12) and obs.dtype == torch.float32
    robot, robot_velocity, agent, agent_velocity = obs.split(3, 1)
    assert not robot_velocity.any() and not agent_velocity.any()
    for start, mean in ((robot, 0.0), (agent, -8.0)):
        assert (start.mean(0) - mean).abs().max() < 0.08  # 5 standard errors
        assert (start.std(0) - 1).abs().max() < 0.06


def roll(env, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(steps):
        toward = env.robot_position - env.agent_position
        noise = torch.rand(toward.shape, generator=generator)
        out.append(env.step(toward / toward.norm(dim=1, keepdim=True) + 0.2 * noise)[:4])
    return [torch.stack(parts) for parts in zip(*out, strict=True)]


def test_seeds_reproduce():
    runs = []
    for constructor_seed, reset_seed in ((5, None), (5, None), (6, None), (6, 5)):
        env = make("Chasing", 8, seed=constructor_seed)
        obs, _ = env.reset(seed=reset_seed)
        runs.append([obs, *roll(env, 50, 0)])
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    assert not torch.equal(runs[0][0], runs[2][0])
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[3], strict=True))


@pytest.mark.parametrize("name", ["Chasing", "CartPole", "Spread", "Hopper"])
@pytest.mark.parametrize("seed", [0, 3])
def test_envs_do_not_draw_the_scripts_numbers(name, seed):
    """A script's torch.manual_seed(seed) and its envs of the same seed: two sequences."""
    torch.manual_seed(seed)
    state, numbers = torch.get_rng_state(), torch.rand(8)
    env, same = (make(name, 8, seed=seed) for _ in range(2))
    first = env.uniform(0.0, 1.0)
    assert not torch.equal(first, numbers)
    assert torch.equal(same.uniform(0.0, 1.0), first)
    env.reset(seed=seed)
    assert torch.equal(env.obs, make(name, 8).reset(seed=seed)[0])
    env.generator.manual_seed(seed)  # as it was once: this test would notice
    assert torch.equal(env.generator.get_state(), state)
    assert torch.equal(env.uniform(0.0, 1.0), numbers)


def test_state_dict_continues_bit_for_bit(tmp_path):
    env = make("Chasing", 8, seed=0)
    env.reset()
    roll(env, 200, 1)
    torch.save(env.state_dict(), tmp_path / "state.pt")
    expected = roll(env, 600, 2)
    assert expected[2].any()  # caught, so that restarts are in it
    other = make("Chasing", 8, seed=99)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    got = roll(other, 600, 2)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_an_episode_is_truncated_after_1024_steps():
    env = make("Chasing", 2, seed=0)
    env.reset()
    away = torch.full((2, 2), -1.0)
    for _ in range(1023):
        assert not torch.cat(env.step(away)[2:4]).any()
    _, _, terminated, truncated, info = env.step(away)
    assert truncated.all() and not terminated.any()
    assert info["episode_length"].tolist() == [1024, 1024]


def test_impossible_arguments_are_refused_by_name():
    env = make("Chasing", 3)
    with pytest.raises(RuntimeError, match="Chasing: call reset"):
        env.step(torch.zeros(3, 2))
    env.reset()
    with pytest.raises(ValueError, match=r"Chasing: .*shape \(3, 3\), expected \(3, 2\)"):
        env.step(torch.zeros(3, 3))
    action = torch.zeros(3, 2)
    action[2, 1] = math.nan
    with pytest.raises(ValueError, match=r"Chasing: .*index \(2, 1\) is nan"):
        env.step(action)
    with pytest.raises(ValueError, match="Chasing: dim is 0"):
        make("Chasing", 3, dim=0)
    with pytest.raises(ValueError, match="Chasing: num_envs is 0"):
        make("Chasing", 0)


def test_a_float64_action_leaves_the_state_float32():
    env = make("Chasing", 3)
    env.reset()
    obs, reward, *_ = env.step(torch.zeros(3, 2, dtype=torch.float64))
    assert {obs.dtype, reward.dtype, *(getattr(env, part).dtype for part in PARTS)} == {
        torch.float32
    }
