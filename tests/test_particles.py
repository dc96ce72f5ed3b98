"""The particle world against mpe2's, against written-out rules, and against the contract."""

import importlib
import itertools
import math

import numpy as np
import pytest
import torch

from vec_envs import make

MPE2 = {"Spread": "simple_spread_v3", "SpeakerListener": "simple_speaker_listener_v4"}
NAMES = [name + kind for name in MPE2 for kind in ("", "Continuous")]


def original(name: str):
    """mpe2's parallel env, and its world."""
    module = importlib.import_module(f"mpe2.{MPE2[name.removesuffix('Continuous')]}")
    env = module.parallel_env(max_cycles=25, continuous_actions=name.endswith("Continuous"))
    return env, env.unwrapped.world


def take_over(env, index: int, world) -> None:
    """Put mpe2's present state into env `index`."""
    for i, agent in enumerate(world.agents):
        env.position[index, i] = torch.tensor(agent.state.p_pos)
        env.velocity[index, i] = torch.tensor(agent.state.p_vel)
    for i, landmark in enumerate(world.landmarks):
        env.landmark[index, i] = torch.tensor(landmark.state.p_pos)
    if hasattr(env, "goal"):
        env.goal[index] = world.landmarks.index(world.agents[0].goal_b)
        env.message[index] = torch.tensor(world.agents[0].state.c)


def draw(env, rng) -> np.ndarray:
    """Actions (N, A) or (N, A, act_dim), continuous ones also out of bounds.

    Spread's agents chase each other most of the time, so that they bump.
    """
    shape, sizes = (env.num_envs, env.num_agents), env.action_mask.sum(1).numpy()
    actions = rng.integers(0, sizes, shape)
    if "Spread" in env.name:
        toward = env.position.mean(1, keepdim=True) - env.position
        along_x = toward.abs()[..., 0] > toward.abs()[..., 1]
        chase = torch.where(along_x, 1 + (toward[..., 0] > 0), 3 + (toward[..., 1] > 0).int())
        actions = np.where(rng.random(shape) < 0.7, chase.numpy(), actions)
    if env.continuous:
        size = env.action_mask.shape[1]
        return (np.eye(size)[actions] + rng.uniform(-0.3, 0.3, (*shape, size))).astype(np.float32)
    return actions


@pytest.mark.parametrize("name", NAMES)
def test_equals_mpe2_step_by_step(name):
    """Two hundred episodes, one an env: observations, rewards, states, and the simulator's own."""
    episodes = 200
    env = make(name, episodes, dtype=torch.float64)
    env.reset()
    kept = {}  # the simulator's state after the step, before the restart

    def restart(mask):
        kept.update(position=env.position, velocity=env.velocity)
        type(env)._restart(env, mask)

    originals = []
    for index in range(episodes):
        theirs, world = original(name)
        first, _ = theirs.reset(seed=index)
        take_over(env, index, world)
        originals.append((theirs, world))
        ours = env._observe()[index].numpy()
        for vector, mine, own in zip(first.values(), ours, env.obs_mask.numpy(), strict=True):
            assert np.array_equal(mine[own], vector)
    env.obs, env._restart = env._observe(), restart
    rng, contacts = np.random.default_rng(0), 0
    for t in range(25):
        actions = draw(env, rng)
        _, reward, terminated, truncated, info = env.step(torch.from_numpy(actions))
        if t < 24:
            kept.update(position=env.position, velocity=env.velocity)
        assert truncated.all() == truncated.any() == (t == 24) and not terminated.any()
        final, final_state = info["final_obs"].numpy(), info["final_state"].numpy()
        for index, (theirs, world) in enumerate(originals):
            given = [
                action[mask].clip(0, 1) if env.continuous else action
                for action, mask in zip(actions[index], env.action_mask.numpy(), strict=True)
            ]
            names = theirs.possible_agents
            obs, rewards, *ends, _ = theirs.step(dict(zip(names, given, strict=True)))
            what = f"episode {index} step {t}"
            for i, agent in enumerate(names):
                body, own = world.agents[i].state, env.obs_mask[i].numpy()
                position, velocity = kept["position"][index, i], kept["velocity"][index, i]
                assert np.abs(position.numpy() - body.p_pos).max() < 1e-12, what
                assert np.abs(velocity.numpy() - body.p_vel).max() < 1e-12, what
                assert np.abs(final[index, i][own] - obs[agent]).max() < 1e-6, what
                assert not final[index, i][~own].any(), what
                assert reward[index, i].item() == pytest.approx(rewards[agent], rel=1e-6), what
                assert [end[agent] for end in ends] == [False, t == 24]
            assert np.abs(final_state[index] - theirs.unwrapped.state()).max() < 1e-6
            if "Spread" in name:
                contacts += theirs.unwrapped.scenario.reward(world.agents[0], world) < 0
    assert contacts > 500 or "Spread" not in name


def test_openai_physics_against_the_rules_for_one_world():
    """Velocity first, then position by the new velocity; three agents in plain Python."""
    env = make("Spread", 5, seed=1, physics="openai", dtype=torch.float64)
    env.reset()
    env.position *= 0.3  # close enough to push each other
    moves = [(0, 0), (-5, 0), (5, 0), (0, -5), (0, 5)]
    worlds = [(p.numpy().copy(), np.zeros((3, 2))) for p in env.position]
    rng, touched = np.random.default_rng(0), False
    for _ in range(24):
        actions = draw(env, rng)
        env.step(torch.from_numpy(actions))
        for index, (p, v) in enumerate(worlds):
            force = np.array([moves[action] for action in actions[index]], float)
            for i in range(3):
                for j in range(3):
                    if i != j:
                        d = math.dist(p[i], p[j])
                        touched |= d < 0.3
                        depth = 1e-3 * np.logaddexp(0, (0.3 - d) / 1e-3)
                        force[i] += 100 * (p[i] - p[j]) / d * depth
            v[:] = 0.75 * v + 0.1 * force
            p[:] = p + 0.1 * v
            # the contact's steep force multiplies differences of rounding
            assert np.abs(env.position[index].numpy() - p).max() < 1e-11
            assert np.abs(env.velocity[index].numpy() - v).max() < 1e-11
    assert touched


@pytest.mark.parametrize("name", NAMES)
def test_the_contract_with_several_agents(name):
    env = make(name, 4, seed=0)
    obs, _ = env.reset()
    agents, size = env.num_agents, env.single_observation_space.shape[0]
    assert obs.shape == env.observation_space.shape == (4, agents, size)
    assert env.obs_mask.shape == (agents, size) and not obs[:, ~env.obs_mask].any()
    assert env.state.shape == (4, env.state_dim) and env.state_dim == env.obs_mask.sum()
    assert torch.equal(env.state, obs[:, env.obs_mask])
    assert env.alive.all() and env.alive.shape == (4, agents)
    rng, total = np.random.default_rng(0), torch.zeros(4)
    for t in range(50):
        before = env.landmark.clone()
        result = env.step(torch.from_numpy(draw(env, rng)))
        obs, reward, terminated, truncated, info = result
        assert reward.shape == (4, agents) and reward.dtype == obs.dtype == torch.float32
        assert terminated.shape == truncated.shape == (4,) and not terminated.any()
        total += reward.sum(1)
        torch.testing.assert_close(info["episode_return"], total)
        assert torch.equal(info["final_state"], info["final_obs"][:, env.obs_mask])
        if t % 25 == 24:  # all end together: another world, and the old one's last observation
            assert truncated.all() and info["episode_length"].tolist() == [25] * 4
            assert not torch.equal(before, env.landmark) and not env.velocity.any()
            assert not torch.equal(obs, info["final_obs"])
            assert env.position.abs().max() <= 1
            total = torch.zeros(4)
        else:
            assert not truncated.any() and torch.equal(obs, info["final_obs"])
            assert torch.equal(before, env.landmark)


def test_episodes_end_and_begin_one_by_one():
    env = make("SpeakerListener", 3, seed=0)
    env.reset()
    env._lengths[1] = 24
    actions = torch.tensor([[2, 1]] * 3)
    obs, _, _, truncated, info = env.step(actions)
    assert truncated.tolist() == [False, True, False]
    heard = [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    assert obs[:, 1, 8:].tolist() == heard  # the new episode has heard nothing
    assert info["final_obs"][1, 1, 8:].tolist() == [0.0, 0.0, 1.0]
    assert env.velocity[:, 1, 0].tolist() == [-0.5, 0.0, -0.5]
    assert not env.velocity[:, 0].any()  # a speaker does not move


def test_first_states_fill_the_square_evenly():
    env = make("SpeakerListener", 6000, seed=0)
    env.reset()
    for places in (env.position, env.landmark):
        assert places.abs().max() <= 1
        assert places.mean(0).abs().max() < 0.05 and (places.std(0) - 3**-0.5).abs().max() < 0.03
    assert (env.goal.bincount() / 6000 - 1 / 3).abs().max() < 0.03


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_continues_bit_for_bit(name, tmp_path):
    def roll(env, rng):
        return [env.step(torch.from_numpy(draw(env, rng)))[:2] for _ in range(40)]

    env = make(name, 4, seed=0)
    env.reset()
    roll(env, np.random.default_rng(0))
    torch.save(env.state_dict(), tmp_path / "state.pt")
    expected = roll(env, np.random.default_rng(1))
    other = make(name, 4, seed=9)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(other.state, other.obs[:, other.obs_mask])
    got = roll(other, np.random.default_rng(1))
    for ours, theirs in zip(got, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_impossible_actions_are_refused_by_name_and_index():
    env = make("SpeakerListener", 3)
    env.reset()
    for action, message in (
        (torch.zeros(3, dtype=torch.int64), r"shape \(3,\), expected \(3, 2\)"),
        (torch.zeros(3, 2), "type torch.float32, expected integers"),
        (torch.tensor([[0, 0], [0, 5], [0, 0]]), r"\(1, 1\) is 5, allowed are 0 to 4"),
        (torch.tensor([[0, 0], [0, 4], [3, 0]]), r"\(2, 0\) is 3, .* this agent are 0 to 2"),
    ):
        with pytest.raises(ValueError, match=f"SpeakerListener: .*{message}"):
            env.step(action)
    env = make("SpeakerListenerContinuous", 3)
    env.reset()
    with pytest.raises(ValueError, match=r"\(2, 1, 4\) is nan"):
        action = torch.zeros(3, 2, 5)
        action[2, 1, 4] = math.nan
        env.step(action)
    with pytest.raises(ValueError, match="Spread: physics is 'moon', allowed are mpe2, openai"):
        make("Spread", 3, physics="moon")


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_shows_where_they_are(name):
    env = make(name, 2, seed=0)
    env.reset()
    env.position[1] = torch.tensor([[0.5, 0.5], [-0.5, 0.0], [0.0, -1.0]])[: env.num_agents]
    env.landmark[1] = torch.tensor([[1.2, 1.2], [1.2, -1.2], [-1.2, 1.2]])
    picture = env.render(1)
    assert picture.shape == (350, 350, 3) and picture.dtype == np.uint8
    assert (picture[0, 175] == 255).all()  # nobody at the top
    places = torch.cat((env.position[1], env.landmark[1])).tolist()
    for x, y in places:  # rows from the top, columns from the left
        assert (picture[int((1.4 - y) * 125), int((x + 1.4) * 125)] < 255).any()
    assert not np.array_equal(picture, env.render(0))


def scripted(env, listens: bool = True) -> torch.Tensor:
    """SpeakerListener's listener, if it knew the goal, or nothing; Spread's, if they agreed."""
    if env.num_agents == 3:  # each has a landmark, so that their ways add up to the least
        orders = torch.tensor(list(itertools.permutations(range(3))))  # (6, A)
        ways = env.landmark[:, orders] - env.position.unsqueeze(1)  # (N, 6, A, 2)
        best = ways.norm(dim=-1).sum(-1).argmin(1)
        way = ways[torch.arange(len(best)), best] - 0.4 * env.velocity
    else:
        goal = env.landmark.gather(1, env.goal.view(-1, 1, 1).expand(-1, 1, 2))
        goal = goal if listens else env.landmark.mean(1, keepdim=True)
        way = goal - env.position[:, 1:] - 0.4 * env.velocity[:, 1:]  # from where it would glide to
    along_x, x, y = way.abs()[..., 0] > way.abs()[..., 1], way[..., 0] > 0, way[..., 1] > 0
    move = torch.where(along_x, 1 + x.int(), 3 + y.int())
    move = torch.where(way.abs().amax(2) < 0.12, 0, move)
    return move if env.num_agents == 3 else torch.cat((torch.zeros_like(move), move), 1)


@pytest.mark.parametrize(
    "name, policy, error",
    [
        ("Spread", "random", 1.6),
        ("Spread", "doing nothing", 1.6),
        ("Spread", "scripted", 0.6),
        ("SpreadContinuous", "random", 1.6),
        ("SpeakerListener", "random", 4.5),
        ("SpeakerListener", "scripted", 1.2),
        ("SpeakerListener", "message ignored", 1.6),
        ("SpeakerListenerContinuous", "random", 4.5),
    ],
)
def test_returns_of_simple_policies(name, policy, error):
    """The figures that stand beside every result, within four standard errors or so."""
    env = make(name, 4000, seed=0)
    env.reset()
    sizes, chance = env.action_mask.sum(1), torch.Generator().manual_seed(0)
    for _ in range(25):
        if policy in ("scripted", "message ignored"):
            actions = scripted(env, policy == "scripted")
        elif env.continuous:
            actions = torch.rand(env.action_space.shape, generator=chance)
        else:
            uniform = torch.rand(4000, env.num_agents, generator=chance)
            actions = (uniform * sizes * (policy == "random")).long()
        *_, info = env.step(actions)
    assert abs(info["episode_return"].mean().item() - env.known_returns[policy]) < error
