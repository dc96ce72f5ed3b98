"""The replay buffer against plain Python loops and statistics."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from algos import sac
from algos.worker_learner import ReplayBuffer, UserError, arguments
from algos.worker_learner import replay as replay_module

CPU = torch.device("cpu")


def fail(message):
    raise UserError(message)


def fake_run(save_replay=True, step=0, **options):
    args = SimpleNamespace(save_replay=save_replay, total_steps=1000, **options)
    return SimpleNamespace(device=CPU, args=args, step=step, fail=fail)


class Stream:
    """Random rollouts whose obs says where it stands: obs = (time, env), next_obs = obs + ½."""

    def __init__(self, num_envs=3, num_steps=2, seed=0, end=0.15):
        self.num_envs, self.num_steps, self.end = num_envs, num_steps, end
        self.rng, self.time = np.random.default_rng(seed), 0
        self.history = {"reward": [], "terminated": [], "done": []}

    def empty(self):
        shape = (self.num_steps, self.num_envs)
        return {
            "obs": torch.zeros(*shape, 2),
            "action": torch.zeros(*shape, 1),
            "reward": torch.zeros(shape),
            "next_obs": torch.zeros(*shape, 2),
            "terminated": torch.zeros(shape, dtype=torch.bool),
            "done": torch.zeros(shape, dtype=torch.bool),
            "log_prob": torch.zeros(shape),
            "episode_return": torch.zeros(shape),
            "episode_length": torch.zeros(shape, dtype=torch.int64),
        }

    def next(self):
        rollout = self.empty()
        rollout["obs"][..., 0] = self.time + torch.arange(self.num_steps).unsqueeze(1)
        rollout["obs"][..., 1] = torch.arange(self.num_envs)
        rollout["next_obs"] = rollout["obs"] + 0.5
        rollout["reward"] = torch.tensor(self.rng.normal(size=(self.num_steps, self.num_envs)))
        rollout["reward"] = rollout["reward"].float()
        ends = self.rng.random((2, self.num_steps, self.num_envs)) < self.end
        rollout["terminated"] = torch.tensor(ends[0])
        rollout["done"] = torch.tensor(ends[0] | ends[1])
        for name, rows in self.history.items():
            rows.extend(rollout[name].double().numpy())
        self.time += self.num_steps
        return rollout


def filled(stream, capacity, times, **options):
    replay = ReplayBuffer(fake_run(**options), stream.empty(), capacity)
    for _ in range(times):
        replay.add(stream.next())
    return replay


def test_the_oldest_steps_are_overwritten():
    stream = Stream(num_envs=3, num_steps=2)
    replay = ReplayBuffer(fake_run(), stream.empty(), capacity=20)  # 7 rows: 2 do not divide them
    assert replay.data.keys() == stream.empty().keys() - {"episode_return", "episode_length"}
    torch.manual_seed(0)
    for times in range(1, 12):
        replay.add(stream.next())
        assert len(replay) == min(times * 2, 7) * 3
        batch = replay.sample(500)
        seen = {tuple(row) for row in batch["obs"].int().tolist()}
        newest = times * 2
        oldest = max(0, newest - 7)
        assert seen == {(t, n) for t in range(oldest, newest) for n in range(3)}
        assert torch.equal(batch["next_obs"], batch["obs"] + 0.5)
        time, env = batch["obs"].long().unbind(1)
        for name in ("reward", "terminated", "done"):
            expected = torch.tensor(np.array(stream.history[name]))[time, env]
            assert torch.equal(batch[name].double(), expected), name
        assert (batch["weight"] == 1).all() and (batch["discount"] == np.float32(0.99)).all()


def test_sizes_are_those_of_all_learners(monkeypatch):
    monkeypatch.setattr(replay_module, "world_size", lambda: 2)
    replay = filled(Stream(num_envs=3, num_steps=2), 60, 4)
    assert len(replay) == 8 * 2 * 3
    windows = replay.windows(300, 2, newest=24)  # the last 4 steps
    assert set(windows["obs"][0, :, 0].tolist()) == {4, 5, 6}
    assert len(filled(Stream(num_envs=3, num_steps=2), 60, 7)) == 60


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("times", [4, 17])  # with free space, and after two rounds
def test_n_step_against_a_loop(times, prioritized):
    """Reward, discount, next_obs and terminated by walking through the episodes in float64."""
    stream = Stream(num_envs=3, num_steps=3)
    options = {"n_step": 5, "gamma": 0.9, "prioritized": prioritized}
    replay = filled(stream, 60, times, **options)
    batch = replay.sample(800)
    newest = stream.time - 1
    history = {name: np.array(rows) for name, rows in stream.history.items()}
    lengths = set()
    for i in range(800):
        time, env = batch["obs"][i].int().tolist()
        total, k = 0.0, 0
        while True:
            total += 0.9**k * history["reward"][time + k, env]
            k += 1
            if k == 5 or history["done"][time + k - 1, env] or time + k - 1 == newest:
                break
        last = time + k - 1
        np.testing.assert_allclose(batch["reward"][i], total, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(batch["discount"][i], 0.9**k, rtol=1e-6)
        assert batch["next_obs"][i].tolist() == [last + 0.5, env + 0.5]
        assert batch["terminated"][i] == history["terminated"][last, env]
        assert batch["done"][i] == history["done"][last, env]
        lengths.add((k, bool(history["done"][last, env]), last == newest))
    assert {k for k, _, _ in lengths} == {1, 2, 3, 4, 5} and len(lengths) > 8


def test_truncation_bootstraps_and_termination_does_not():
    stream = Stream(num_envs=2, num_steps=4, end=0)
    replay = ReplayBuffer(fake_run(n_step=3, gamma=0.5), stream.empty(), 100)
    rollout = stream.next()
    rollout["reward"][:] = 1
    rollout["done"][1] = True
    rollout["terminated"][1] = torch.tensor([True, False])  # env 0 terminates, env 1 is truncated
    replay.add(rollout)
    batch = replay.sample(100)
    value = 10.0
    target = batch["reward"] + batch["discount"] * ~batch["terminated"] * value
    first = batch["obs"][:, 0] == 0  # 1 + ½, then the episode ends
    for env, expected in ((0, 1.5), (1, 1.5 + 0.25 * value)):
        mine = first & (batch["obs"][:, 1] == env)
        assert mine.any() and (target[mine] == expected).all()
        assert (batch["next_obs"][mine, 0] == 1.5).all()  # the true one of that step


@pytest.mark.parametrize("times", [2, 7, 11])  # the last row is in the middle, the last, the first
def test_nothing_crosses_the_end_of_what_was_before(times):
    stream = Stream(num_envs=3, num_steps=2, end=0)
    replay = filled(stream, 42, times, n_step=4)  # 14 rows
    last = stream.time - 1
    replay.end_episodes()
    replay.add(stream.next())
    batch, windows = replay.sample(500), replay.windows(500, 4)
    before = batch["obs"][:, 0] <= last
    assert before.any() and (batch["next_obs"][before, 0] <= last + 0.5).all()
    after = windows["obs"][..., 0] > last
    crossing = after & (windows["obs"][0, :, 0] <= last)
    assert crossing.any() and (windows["mask"][crossing] == 0).all()
    assert not replay.data["terminated"].any()


@pytest.mark.parametrize("newest", [None, 20])
@pytest.mark.parametrize("times", [5, 23])
def test_windows(times, newest):
    stream = Stream(num_envs=3, num_steps=2)
    replay = filled(stream, 40, times)  # 14 rows
    windows = replay.windows(400, 6, newest)
    obs, done = windows["obs"], windows["done"]
    assert obs.shape == (6, 400, 2) and windows["mask"].shape == (6, 400)
    assert (obs[..., 1] == obs[0, :, 1]).all()  # one env
    assert obs[0, :, 1].unique().tolist() == [0, 1, 2]  # any of them
    torch.testing.assert_close(windows["discount"], 0.99 ** torch.arange(6.0).unsqueeze(1))
    assert (obs[1:, :, 0] == obs[:-1, :, 0] + 1).all()  # consecutive: no seam
    rows = min(stream.time, 14) if newest is None else min(stream.time, 7)
    first = obs[0, :, 0]
    assert set(first.int().tolist()) == set(range(stream.time - rows, stream.time - 6 + 1))
    assert torch.equal(replay._flat["log_prob"][windows["index"]], windows["log_prob"])
    for b in range(400):
        alive = 1.0
        for k in range(6):
            assert windows["mask"][k, b] == alive
            alive *= not done[k, b]
    at_least_one = replay.windows(50, 6, 1)["obs"]  # however few are asked for
    assert (at_least_one[0, :, 0] == stream.time - 6).all()
    assert len(replay.windows(1, 15)["obs"]) == min(stream.time, 14)  # as long as there are steps


def test_proportional_sampling_has_the_right_distribution():
    """χ² of 100 000 draws; with 1173 cells its mean is about 1173 and its deviation 48."""
    stream = Stream(num_envs=3, num_steps=1)
    replay = filled(stream, 1200, 391, prioritized=True)  # 1173 of 1200
    size, draws = len(replay), 100_000
    torch.manual_seed(1)
    error = torch.rand(size) * torch.randint(3, (size,))  # a third of them 0
    replay.update_priorities(torch.arange(size), error)
    expected = (error.double() + 1e-6) ** 0.6
    expected = expected / expected.sum()
    index = torch.cat([replay.sample(2000)["index"] for _ in range(50)])
    counts = torch.bincount(index, minlength=size).double()
    assert len(counts) == size  # never where nothing is stored
    common = expected * draws > 5
    chi_square = ((counts - expected * draws) ** 2 / (expected * draws))[common].sum().item()
    cells = int(common.sum())
    assert cells > 700
    assert abs(chi_square - cells) < 5 * (2 * cells) ** 0.5
    uniform = torch.full_like(expected, draws / size)[common]
    wrong = ((counts[common] - uniform) ** 2 / uniform).sum().item()
    assert wrong > 10 * cells  # the test can tell


def test_new_transitions_get_the_largest_priority_so_far():
    stream = Stream(num_envs=4, num_steps=1)
    replay = filled(stream, 40, 3, prioritized=True)
    assert replay.priority.flatten()[:12].tolist() == [1.0] * 12
    replay.update_priorities(torch.tensor([0, 1]), torch.tensor([-32.0, 1 / 32]))
    replay.update_priorities(torch.tensor([0]), torch.tensor([0.0], requires_grad=True))
    assert not replay.priority.requires_grad and not replay.largest.requires_grad
    replay.add(stream.next())
    expected = [1e-6**0.6, 1 / 8, *[1.0] * 10, *[8.0] * 4]
    torch.testing.assert_close(
        replay.priority.flatten()[:16], torch.tensor(expected), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize(("step", "beta"), [(0, 0.4), (500, 0.7), (1000, 1.0)])
def test_importance_weights(step, beta):
    """w_i ∝ (size · P(i))^−β, the largest of the batch being 1; β grows during the run."""
    stream = Stream(num_envs=4, num_steps=1)
    replay = filled(stream, 400, 50, prioritized=True)
    replay._run.step = step
    error = torch.rand(200) + 0.01
    replay.update_priorities(torch.arange(200), error)
    probability = (error.double() + 1e-6) ** 0.6
    probability = probability / probability.sum()
    batch = replay.sample(64)
    weight = (200 * probability[batch["index"]]) ** -beta
    torch.testing.assert_close(batch["weight"].double(), weight / weight.max(), rtol=1e-5, atol=0)
    everything = torch.cat([replay.sample(2000)["weight"] for _ in range(5)])
    assert everything.max() == 1 and everything.min() < 0.5


@pytest.mark.parametrize("times", [7, 40])
def test_saved_and_loaded_it_draws_the_same(times, tmp_path):
    options = {"n_step": 3, "prioritized": True}
    stream = Stream(num_envs=3, num_steps=2)
    replay = filled(stream, 100, times, **options)
    replay.update_priorities(torch.arange(30), 100 * torch.randn(30))  # sets `largest`
    for name, saved in replay.state_dict()["data"].items():
        assert len(saved) == min(2 * times, 34)  # what is filled
        assert saved.untyped_storage().nbytes() == saved.nbytes  # else all is saved with a view
        copied = saved.data_ptr() != replay.data[name].data_ptr()
        assert copied == (times == 7)  # a full buffer is not in memory twice
    torch.save(replay.state_dict(), tmp_path / "replay.pt")

    other = ReplayBuffer(fake_run(**options), stream.empty(), 100)
    other.load_state_dict(torch.load(tmp_path / "replay.pt", weights_only=True))
    assert len(other) == len(replay)
    rollouts = [stream.next() for _ in range(20)]
    drawn = []
    for buffer in (replay, other):
        torch.manual_seed(0)
        mine = drawn.append([]) or drawn[-1]
        for rollout in rollouts:
            mine += [buffer.sample(32), buffer.windows(8, 4)]
            buffer.update_priorities(mine[-2]["index"], mine[-2]["reward"])
            buffer.add(rollout)
    for ours, theirs in zip(*drawn, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_without_save_replay_nothing_is_saved_and_a_resumed_run_says_so(capsys):
    stream = Stream()
    replay = ReplayBuffer(fake_run(save_replay=False), stream.empty(), 100)
    replay.add(stream.next())
    assert replay.state_dict() == {}
    replay.load_state_dict({})
    assert "--no-save-replay" in capsys.readouterr().out
    del replay._run.args.save_replay  # ppo_hterm.py has no such flag
    assert replay.state_dict()["rows"] == 2


def test_what_is_saved_of_a_buffer_on_a_gpu_is_copied_to_the_cpu():
    """A GPU may have no room for it. There is nothing to copy from a "meta" device."""
    run, device = fake_run(), torch.device("meta")
    run.device = device
    empty = {name: x.to(device) for name, x in Stream().empty().items()}
    with pytest.raises(NotImplementedError, match="copy out of meta"):
        ReplayBuffer(run, empty, 100).state_dict()


def test_a_full_buffer_does_not_become_larger():
    """Its oldest row would not stand where the new, empty rows begin."""
    stream, saved = Stream(), {}
    for rollouts in (1, 6):  # of 2 · 3 transitions, in a buffer of 24
        replay = ReplayBuffer(fake_run(), stream.empty(), 24)
        for _ in range(rollouts):
            replay.add(stream.next())
        saved[rollouts] = replay.state_dict()
    ReplayBuffer(fake_run(), stream.empty(), 24).load_state_dict(saved[6])
    larger = ReplayBuffer(fake_run(), stream.empty(), 48)
    larger.load_state_dict(saved[1])
    with pytest.raises(ValueError, match="--buffer-size is larger than before"):
        larger.load_state_dict(saved[6])


def test_a_batch_is_no_larger_than_the_buffer():
    args = sac.Args(batch_size=300, buffer_size=256, run_dir="run")
    with pytest.raises(UserError, match="--batch-size is 300; allowed is at most --buffer-size"):
        arguments.resolve(args, "sac", arguments.RUN_LIMITS)


def test_too_large_a_buffer_is_an_error_that_names_the_size(monkeypatch):
    empty = Stream().empty()
    row = 4 * (2 + 1 + 1 + 2 + 1) + 2
    with pytest.raises(UserError, match=r"--buffer-size: 10{12} transitions need 27939\.7 GiB"):
        assert row == 30
        ReplayBuffer(fake_run(), empty, 10**12)
    with pytest.raises(UserError, match=r"--buffer-size is 3; allowed is at least 6"):
        ReplayBuffer(fake_run(), empty, 3)
    with pytest.raises(UserError, match=r"is 12; allowed is at least 15, .*-steps or --n-step, or"):
        ReplayBuffer(fake_run(n_step=5), empty, 12)
    monkeypatch.setattr(replay_module, "_free_memory", lambda device: 2**30)
    ReplayBuffer(fake_run(), empty, 20_000_000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    ReplayBuffer(fake_run(), empty, 20_000_000)  # it stands there, but this run is alone
    monkeypatch.setattr(replay_module, "world_size", lambda: 2)  # a part each
    with pytest.raises(UserError, match=r"--buffer-size: 40000000 transitions need 1\.1 GiB"):
        ReplayBuffer(fake_run(), empty, 40_000_000)
    elsewhere = fake_run()
    elsewhere.device = torch.device("meta")  # as each learner has a GPU of its own
    ReplayBuffer(elsewhere, empty, 40_000_000)


@pytest.mark.parametrize("prioritized", [False, True])
def test_memory_is_what_it_must_hold(prioritized, monkeypatch):
    empty, run = Stream(num_envs=7).empty(), fake_run(prioritized=prioritized)
    must = 100_002 * (30 + 4 * prioritized)  # 7 · 14,286 transitions
    with monkeypatch.context() as patch:
        patch.setattr(replay_module, "_free_memory", lambda device: must - 1)
        with pytest.raises(UserError, match="100000 transitions need"):
            ReplayBuffer(run, empty, 100_000)
        patch.setattr(replay_module, "_free_memory", lambda device: must)
        replay = ReplayBuffer(run, empty, 100_000)
    seen, held = set(), 0
    for thing in [*vars(replay).values(), *replay.data.values(), *replay._flat.values()]:
        if isinstance(thing, torch.Tensor) and thing.data_ptr() not in seen:
            seen.add(thing.data_ptr())
            held += thing.untyped_storage().nbytes()
    assert must <= held < 1.05 * must


def test_a_td_error_of_another_shape_is_an_error():
    """Of a critic whose output was not squeezed: (B, 1) − (B,) is (B, B), and trains."""
    replay = ReplayBuffer(fake_run(), Stream().empty(), 100)
    replay.update_priorities(torch.arange(4), torch.ones(4))
    with pytest.raises(UserError, match=r"have the shape \(4, 4\), not \(4,\): is a squeeze"):
        replay.update_priorities(torch.arange(4), torch.ones(4, 4))


def test_a_nan_priority_draws_what_is_there():
    """So that the loss, which is NaN as well, is reported: by its name, at the next log."""
    replay = filled(Stream(4), 40, 10, prioritized=True)
    for wrong in (math.nan, math.inf):
        replay.update_priorities(torch.tensor([3]), torch.tensor([wrong]))
        assert replay.sample(64)["index"].max() < 40


@pytest.mark.parametrize(
    ("groups", "folder", "limit", "used", "prefix"),
    [
        ("0::/", "", "memory.max", "memory.current", ""),  # a container of one's own
        ("0::/slurm/job_1/step_0", "slurm/job_1", "memory.max", "memory.current", ""),
        (
            "9:cpu,cpuacct:/a\n4:memory:/job_1",
            *("memory/job_1", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ),
    ],
)
def test_free_memory_is_what_a_container_or_a_job_may_have(
    groups, folder, limit, used, prefix, tmp_path, monkeypatch
):
    def root(*parts):
        return Path(tmp_path, *(str(part).lstrip("/") for part in parts))

    group = root("/sys/fs/cgroup", folder)
    for path in (root("/proc/self"), group):
        path.mkdir(parents=True)
    root("/proc/meminfo").write_text("MemTotal: 9999 kB\nMemAvailable: 8000 kB\n")
    root("/proc/self/cgroup").write_text(groups + "\n")
    monkeypatch.setattr(replay_module, "Path", root)
    assert replay_module._free_memory(torch.device("cpu")) == 8000 * 1024
    (group / limit).write_text("5000\n")
    (group / used).write_text("4000\n")
    (group / "memory.stat").write_text(f"{prefix}inactive_file 300\n{prefix}active_file 20\n")
    assert replay_module._free_memory(torch.device("cpu")) == 5000 - 4000 + 320
    (group / limit).write_text(f"{10**9}\n")  # more than the machine has
    assert replay_module._free_memory(torch.device("cpu")) == 8000 * 1024
