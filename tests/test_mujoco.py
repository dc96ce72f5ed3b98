"""The MuJoCo environments against Gymnasium's own, step by step, and how they break."""

import contextlib
import importlib
import multiprocessing
import re
import threading
import time
from types import SimpleNamespace

import gymnasium
import mujoco
import numpy as np
import pytest
import torch

from vec_envs import NAMES, make, vec_env_class
from vec_envs.mujoco import ASSETS

MUJOCO = [name for name, module in NAMES.items() if module == "mujoco"]
# Ours observe no contact forces unless asked; Gymnasium's get the same keyword.
FORCES, NO_FORCES = ({"include_cfrc_ext_in_observation": value} for value in (True, False))
SLIM = {f"include_{name}_in_observation": False for name in ("cinert", "cvel", "qfrc_actuator")}
SLIM |= NO_FORCES
CASES = [
    *((name, NO_FORCES if name in ("Ant", "Humanoid") else {}, {}) for name in MUJOCO),
    *((name, FORCES, FORCES) for name in ("Ant", "Humanoid")),
    ("Humanoid", SLIM, SLIM),
    ("Hopper", *2 * ({"healthy_z_range": (0.9, 1.5), "ctrl_cost_weight": 0.1},)),
    ("Ant", *2 * ({"contact_cost_weight": 0.0, **NO_FORCES, "healthy_z_range": (0.4, 1.0)},)),
    (
        "Humanoid",
        *2 * ({**SLIM, "contact_cost_weight": 1e-4, "contact_cost_range": (0.1, 0.5)},),
    ),
    ("Walker2d", *2 * ({"terminate_when_unhealthy": False, "frame_skip": 2},)),
    ("Swimmer", *2 * ({"exclude_current_positions_from_observation": False},)),
]


def twin(gym_env, env, index):
    """Put Gymnasium's env into the state in which env number `index` starts its episode."""
    model, data = gym_env.unwrapped.model, gym_env.unwrapped.data
    mujoco.mj_resetData(model, data)
    gym_env.unwrapped.set_state(env.qpos[index].numpy(), env.qvel[index].numpy())


@pytest.mark.parametrize(("name", "gym_options", "options"), CASES)
def test_equals_gymnasium_step_by_step(name, gym_options, options):
    num_envs, limit = 3, min(250, vec_env_class(name).max_episode_steps)
    env = make(name, num_envs, seed=1, **options)
    id = f"{name}-v5"
    assert env.max_episode_steps == gymnasium.spec(id).max_episode_steps
    env.max_episode_steps = limit
    gym_options = {**gym_options, "max_episode_steps": limit}
    gym_envs = [gymnasium.make(id, **gym_options) for _ in range(num_envs)]
    for gym_env in gym_envs:
        gym_env.reset()
    obs, _ = env.reset(seed=2)
    for index, gym_env in enumerate(gym_envs):
        twin(gym_env, env, index)
    space = env.single_action_space
    rng = np.random.default_rng(3)
    restarts = 0
    for t in range(260):  # past the time limit
        # A quarter of the actions lie outside the bounds.
        action = rng.uniform(1.3 * space.low, 1.3 * space.high, (num_envs, *space.shape))
        action = action.astype(np.float32)
        obs, reward, terminated, truncated, info = env.step(torch.from_numpy(action))
        # gymnasium.make's TimeLimit counts along: every twin() follows a reset
        given = [gym_env.step(one) for gym_env, one in zip(gym_envs, action, strict=True)]
        true_obs, true_reward, *true_ends, _ = zip(*given, strict=True)
        what, error = f"{name} step {t}", {"rtol": 1e-6, "atol": 1e-6}
        np.testing.assert_allclose(info["final_obs"].numpy(), true_obs, **error, err_msg=what)
        np.testing.assert_allclose(reward.numpy(), true_reward, rtol=1e-5, atol=1e-5)
        assert [tuple(terminated.tolist()), tuple(truncated.tolist())] == true_ends, what
        for index in (terminated | truncated).nonzero().flatten().tolist():
            restarts += 1
            gym_envs[index].reset()
            twin(gym_envs[index], env, index)
            fresh = gym_envs[index].unwrapped._get_obs()
            np.testing.assert_allclose(obs[index].numpy(), fresh, **error)
    assert restarts >= num_envs


@pytest.mark.parametrize("name", MUJOCO)
def test_initial_states_have_gymnasiums_distribution(name):
    env = make(name, 400, seed=0)
    env.reset()
    gym_env = gymnasium.make(f"{name}-v5").unwrapped
    states = []
    for seed in range(400):
        gym_env.reset(seed=seed)
        states.append(gym_env.state_vector())
    ours, theirs = torch.cat((env.qpos, env.qvel), 1).numpy(), np.array(states)
    scale = theirs.std(0) + 1e-9
    assert np.abs((ours.mean(0) - theirs.mean(0)) / scale).max() < 0.35  # 5 standard errors
    np.testing.assert_allclose(ours.std(0), theirs.std(0), rtol=0.3, atol=1e-9)
    # bounded draws stay inside the same bounds
    for quantile in (0.0, 1.0):
        ours_edge, edge = np.quantile(ours, quantile, axis=0), np.quantile(theirs, quantile, axis=0)
        assert np.abs((ours_edge - edge) / scale).max() < 2.5


def test_threads_do_not_change_a_number():
    runs = []
    for threads in (1, 3):
        env = make("Hopper", 7, seed=5, env_threads=threads)
        obs, _ = env.reset()
        generator = torch.Generator().manual_seed(0)
        for _ in range(100):
            obs, *_ = env.step(torch.rand(7, 3, generator=generator) * 2 - 1)
        runs.append(obs)
    assert torch.equal(*runs)


@pytest.mark.parametrize("where", ["caller", "helper", "both", "wait"])
def test_an_error_in_a_thread_leaves_nothing_behind(where, monkeypatch):
    """It is raised in the calling thread, and the next step takes no answer of this one."""
    env, calm = (make("Hopper", 4, seed=0, env_threads=threads) for threads in (4, 1))
    env.reset()
    start = env.state_dict()
    calm.load_state_dict(start)
    sim, step_one, caller = env.sim, env.sim._step_one, threading.get_ident()
    all_at_work = threading.Barrier(4)  # each thread has one of the four envs

    def fail(*args):
        all_at_work.wait(10)
        here = "caller" if threading.get_ident() == caller else "helper"
        if where in (here, "both"):
            raise ZeroDivisionError(here)
        time.sleep(0.1 * (here == "helper"))  # still at work when the other has failed
        step_one(*args)

    def interrupt():  # Ctrl-C while the calling thread waits for the helpers
        raise ZeroDivisionError("wait")

    action = torch.full((4, 3), 0.5)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError) as raised:
        patch.setattr(sim, "_step_one", fail)
        if where == "wait":
            patch.setattr(sim, "answers", SimpleNamespace(get=interrupt))
        env.step(action)
    assert str(raised.value) == {"both": "caller"}.get(where, where)
    assert sim.answers.empty() or where == "wait"
    env.load_state_dict(start)
    assert sim.answers.empty() and sim.calls.empty()
    for _ in range(50):
        got, expected = env.step(action), calm.step(action)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize("name", ["Ant", "Humanoid", "InvertedDoublePendulum", "HalfCheetah"])
def test_state_dict_continues_bit_for_bit(name, tmp_path):
    def roll(env, steps, generator):
        shape = (4, *env.single_action_space.shape)
        steps = [env.step(torch.rand(shape, generator=generator) * 2 - 1) for _ in range(steps)]
        return torch.stack([step[0] for step in steps]), torch.stack([step[1] for step in steps])

    env = make(name, 4, seed=0)
    env.reset()
    generator = torch.Generator().manual_seed(1)
    roll(env, 120, generator)
    torch.save(env.state_dict(), tmp_path / "state.pt")
    actions = generator.get_state()
    expected = roll(env, 120, generator)
    other = make(name, 4, seed=99)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    generator.set_state(actions)
    got = roll(other, 120, generator)
    assert torch.equal(expected[0], got[0])
    assert torch.equal(expected[1], got[1])
    with pytest.raises(ValueError, match="4 envs"):
        make(name, 5).load_state_dict(env.state_dict())


@pytest.mark.parametrize("backend", ["c", "warp"])
def test_an_unstable_env_ends_alone(backend, request):
    """One env is thrown out of all bounds; the others must not notice."""
    how = make if backend == "c" else request.getfixturevalue("make_warp")
    env, calm = (how("HalfCheetah", 3, seed=0) for _ in range(2))
    env.reset()
    calm.reset()
    action = torch.zeros(3, 6)
    before, *_ = env.step(action)
    calm.step(action)
    before = before.clone()
    if backend == "c":
        env.sim.data[1].qvel[:] = 1e12
    else:
        env.sim.qvel[1] = float("nan")
    obs, reward, terminated, truncated, info = env.step(action)
    calm_obs, calm_reward, *_ = calm.step(action)
    assert terminated.tolist() == [False, True, False]
    assert not truncated.any()
    assert torch.equal(info["final_obs"][1], before[1])  # its last sane observation
    assert reward[1] == 0
    assert torch.isfinite(obs).all()
    assert info["episode_length"].tolist() == [2, 2, 2]
    for index in (0, 2):
        assert torch.equal(obs[index], calm_obs[index])
        assert reward[index] == calm_reward[index]
    for _ in range(20):
        obs, reward, terminated, *_ = env.step(action)
        assert torch.isfinite(obs).all() and not terminated.any()


def test_actions_that_cannot_be():
    env = make("Ant", 2)
    with pytest.raises(RuntimeError, match="Ant: call reset"):
        env.step(torch.zeros(2, 8))
    env.reset()
    with pytest.raises(ValueError, match=r"Ant: the action has shape \(8,\), expected \(2, 8\)"):
        env.step(torch.zeros(8))
    action = torch.zeros(2, 8)
    action[1, 3] = float("nan")
    with pytest.raises(ValueError, match=r"Ant: the action at index \(1, 3\) is nan"):
        env.step(action)


def test_an_env_whose_constructor_failed_can_be_closed():
    """As some Gymnasiums do when it is deleted."""
    Ant = vec_env_class("Ant")
    Ant.__new__(Ant).close()


def test_unknown_names_and_options():
    with pytest.raises(ValueError, match="HalfCheetah"):
        make("Halfcheeta", 1)
    with pytest.raises(ValueError, match="ctrl_cost_weight"):
        make("Ant", 1, control_cost_weight=1)
    with pytest.raises(ValueError, match="num_envs is 0"):
        make("Ant", 0)


@pytest.fixture
def make_warp():
    """`make` by mujoco_warp on a CPU: kernels that compile fast, and fewer steps of the solver.

    Without a GPU Python launches all iterations, 100 in most models, needed or not; C makes 16 at
    most in these tests.
    """
    pytest.importorskip("mujoco_warp")
    importlib.import_module("warp").config.optimization_level = 0

    def make_warp(name, num_envs, **options):
        env = make(name, num_envs, backend="warp", **options)
        env.sim.model.opt.iterations = 20
        return env

    return make_warp


@pytest.mark.parametrize("name", [*MUJOCO, "Ant with elliptic cones"])
def test_warp_agrees_with_c_until_chaos(name, tmp_path, make_warp):
    """From the same states, one step in single precision is one step in double.

    Not always: where a contact begins or ends within a step, the two get pushes of a different
    size. And Ant's feet are steep capsules, whose pyramids of friction the two turn differently:
    along the foot in C, along the world's axes in warp. Round cones have no such directions.
    """
    options = {}
    if name.endswith("cones"):
        text = (ASSETS / "ant.xml").read_text().replace("<option ", '<option cone="elliptic" ')
        (tmp_path / "round.xml").write_text(text)
        options["xml_file"] = str(tmp_path / "round.xml")
    kind, num_envs = name.split()[0], 4
    c = make(kind, num_envs, seed=0, **options)
    warp = make_warp(kind, num_envs, seed=0, **options)
    c.reset()
    warp.reset()
    everyone = torch.ones(num_envs, dtype=torch.bool)
    warp.sim.restart(everyone, c.qpos.float(), c.qvel.float())
    np.testing.assert_allclose(warp._observe().numpy(), c._observe().numpy(), atol=1e-4)
    generator = torch.Generator().manual_seed(0)
    agree = []
    for _ in range(12):
        # the fields lag by a substep, so they are carried over with the state
        warp.sim.load_state_dict(
            {
                "qpos_": c.qpos.float(),
                "qvel_": c.qvel.float(),
                "warmstart_": torch.zeros(num_envs, c.model.nv),
                **{field: value.float() for field, value in c.sim.fields.items()},
            }
        )
        action = torch.rand(num_envs, *c.single_action_space.shape, generator=generator) * 2 - 1
        _, c_reward, c_terminated, _, c_info = c.step(action)
        _, warp_reward, warp_terminated, _, warp_info = warp.step(action)
        gap = (warp_info["final_obs"] - c_info["final_obs"]).abs() / (1 + c_info["final_obs"].abs())
        same = (gap.amax(1) < 2e-3) & ((warp_reward - c_reward).abs() < 1e-2 * (1 + c_reward.abs()))
        agree.append(same & (warp_terminated == c_terminated))
    assert torch.stack(agree).float().mean() > (0.5 if name == "Ant" else 0.9)
    assert torch.stack(agree)[:2].all()


@pytest.mark.parametrize("place", ["./mine.xml", "~/mine.xml", "mine.xml"])
def test_a_model_of_ones_own(place, tmp_path, monkeypatch):
    """Found where Gymnasium finds it."""
    (tmp_path / "mine.xml").write_text((ASSETS / "hopper.xml").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    if place == "mine.xml":  # one of Gymnasium's own
        with pytest.raises(ValueError, match=r"Hopper: there is no file .*mine\.xml; a path of"):
            make("Hopper", 1, xml_file=place)
        with pytest.raises(OSError, match=r"mine\.xml"):
            gymnasium.make("Hopper-v5", xml_file=place)
    else:
        model = gymnasium.make("Hopper-v5", xml_file=place).unwrapped.model
        assert make("Hopper", 1, xml_file=place).model.nq == model.nq


def test_a_model_whose_actions_have_no_bounds_is_refused(tmp_path):
    text = (ASSETS / "hopper.xml").read_text()
    free = re.sub(r'ctrl(limited|range)="[^"]*"', "", text)
    (tmp_path / "free.xml").write_text(free)
    with pytest.raises(ValueError, match=r"Hopper: give each actuator of .*free\.xml a ctrlrange"):
        make("Hopper", 1, xml_file=str(tmp_path / "free.xml"))


def test_a_forked_process_steps_on():
    """In it there are no threads but one."""
    env = make("Hopper", 4, env_threads=2)
    env.reset()
    child = multiprocessing.get_context("fork").Process(target=env.step, args=(torch.zeros(4, 3),))
    child.start()
    child.join(30)
    child.kill()
    assert child.exitcode == 0
    env.step(torch.zeros(4, 3))


def test_warp_restarts_only_the_masked(make_warp):
    env = make_warp("Ant", 3, seed=0)
    env.reset()
    env.step(torch.zeros(3, 8))
    before = {name: field.clone() for name, field in env.sim.fields.items()}
    mask = torch.tensor([False, True, False])
    env._restart(mask)
    for name, field in env.sim.fields.items():
        assert torch.equal(field[~mask], before[name][~mask]), name
    assert not torch.equal(env.qpos[1], before["qpos"][1])
    assert torch.allclose(env.sim.fields["torso_x"][1], env.qpos[1, :1])


def test_warp_on_a_gpu_captures_on_a_stream_of_its_own(monkeypatch, make_warp):
    """A stand-in without a GPU: CUDA refuses to capture on the default stream, which is torch's."""
    sim = make_warp("Hopper", 2, seed=0).sim
    done, streams = [], []

    @contextlib.contextmanager
    def scoped_stream(stream):
        streams.append(stream)
        yield
        streams.pop()

    @contextlib.contextmanager
    def scoped_capture():
        assert streams == ["other"]
        done.append("capture")
        yield SimpleNamespace(graph="graph")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "torch's")
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "other")
    sim.device = SimpleNamespace(is_cuda=True)
    sim.mjw = SimpleNamespace(step=lambda *_: done.append(streams[-1]))
    sim.warp = SimpleNamespace(stream_from_torch=str, ScopedStream=scoped_stream)
    sim.warp.ScopedCapture = scoped_capture
    sim.warp.capture_launch = lambda graph: done.append((graph, streams[-1]))
    for _ in range(2):
        sim.step(torch.zeros(2, 3))
    substeps = 4
    assert done[:substeps] == ["torch's"] * substeps
    assert done[substeps:] == ["capture", *["other"] * substeps, ("graph", "torch's")]
