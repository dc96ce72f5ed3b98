"""play.py with policies trained a moment before: that what it says is so, and how it fails."""

import contextlib
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

import vec_envs
from algos import dqn, mappo, play, ppo, sac, sac_discrete, vdn
from algos.worker_learner import UserError
from vec_envs.core import ContractError
from vec_envs.drawing import CannotDraw, choose_gl

ROOT = Path(__file__).parent.parent
TRAINING = ("--total-steps", "4096", "--num-envs", "8", "--eval-every", "0", "--eval-episodes", "3")


def run(*arguments, **environment) -> subprocess.CompletedProcess:
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def call(run_dir, **options) -> None:
    play.main(play.Args(str(run_dir), **options))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """A run folder of each of two environments, trained side by side."""
    folder = tmp_path_factory.mktemp("runs")
    children = {}
    for name in ("CartPole", "Hopper"):
        command = [sys.executable, ROOT / "algos" / "ppo.py", "--env", name, *TRAINING]
        command += ["--run-dir", folder / name, "--env-threads", "1", "--seed", "3"]
        children[name] = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    for child in children.values():
        assert child.wait(100) == 0
    return {name: folder / name for name in children}


@pytest.fixture
def altered(runs, tmp_path):
    """A copy of the CartPole policy with something in it changed."""

    def alter(source="CartPole", arguments=None, **changes) -> Path:
        saved = torch.load(runs[source] / "best.pt", weights_only=True)
        saved["args"].update(arguments or {})
        torch.save({**saved, **changes}, tmp_path / "best.pt")
        return tmp_path

    return alter


@pytest.fixture
def needs_gl(monkeypatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", os.environ.get("MUJOCO_GL", ""))  # undone afterwards
    try:
        choose_gl("Hopper")
    except CannotDraw as error:
        pytest.skip(str(error))


def trained(run_dir: Path) -> tuple[ppo.Agent, dict]:
    """The agent, built without play.py."""
    saved = torch.load(run_dir / "best.pt", weights_only=True)
    env = vec_envs.make(saved["args"]["env"], 1)
    spaces = env.single_observation_space, env.single_action_space
    agent = ppo.Agent(*spaces, ppo.Args(**saved["args"]))
    agent.load_state_dict(saved["agent"])
    return agent.requires_grad_(False), saved


def sums_of_rewards(run_dir: Path, episodes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns and lengths of the first episodes, added up one reward after the other."""
    agent, saved = trained(run_dir)
    env = vec_envs.make(saved["args"]["env"], episodes)
    obs, _ = env.reset(seed=seed)
    returns, lengths, running = np.zeros(episodes), np.zeros(episodes), np.ones(episodes, bool)
    while running.any():
        obs, reward, terminated, truncated, _ = env.step(agent(obs))
        returns += reward.double().numpy() * running
        lengths += running
        running &= ~(terminated | truncated).numpy()
    return returns, lengths


@pytest.mark.parametrize("name", ["CartPole", "Hopper"])
def test_scores_are_the_sums_of_the_rewards(runs, name, capsys):
    returns, lengths = sums_of_rewards(runs[name], episodes=4, seed=5)
    assert returns.std() > 0 or name == "CartPole"  # whose policy may be perfect already
    call(runs[name], episodes=4, seed=5, json=True)
    scores = json.loads(capsys.readouterr().out)
    np.testing.assert_allclose(scores["returns"], returns, rtol=1e-5)
    assert scores["return_mean"] == pytest.approx(returns.mean(), rel=1e-5)
    rounding = 1e-5 * abs(returns.mean())
    assert scores["return_std"] == pytest.approx(returns.std(), rel=1e-4, abs=rounding)
    assert scores["length_mean"] == pytest.approx(lengths.mean())
    assert (scores["script"], scores["env"], scores["episodes"]) == ("ppo", name, 4)

    call(runs[name], episodes=4, seed=5)
    first, _, *rows, last = capsys.readouterr().out.splitlines()
    assert first == f"ppo on {name}, best.pt of step 4096, seed 5"
    assert [row.split()[0] for row in rows] == ["1", "2", "3", "4"]
    np.testing.assert_allclose([float(row.split()[1]) for row in rows], returns, atol=0.0051)
    numbers = [float(number) for number in re.findall(r"[\d.]+", last)]
    expected = [returns.mean(), returns.std(), lengths.mean()]
    np.testing.assert_allclose(numbers, expected, atol=0.051)


def test_scores_are_those_of_the_training_run(runs, capsys):
    _, saved = trained(runs["Hopper"])
    seed = (saved["args"]["seed"] + 1) * 1_000_000 + saved["step"]
    call(runs["Hopper"], episodes=3, seed=seed, json=True, checkpoint="last")
    assert json.loads(capsys.readouterr().out)["return_mean"] == saved["return"]


def test_the_command_prints_one_json_object_and_nothing_else(runs):
    done = run(ROOT / "algos" / "play.py", runs["CartPole"], "--json", "--episodes", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["returns"]) == 2


@pytest.fixture(scope="module")
def members(tmp_path_factory, runs) -> dict[str, list[str]]:
    """Policies of different scripts for each of three environments, hardly trained if at all."""
    folder = tmp_path_factory.mktemp("members")
    found = {"CartPole": [str(runs["CartPole"])], "Hopper": [str(runs["Hopper"])], "Spread": []}
    scripts = [(sac, "Hopper"), (dqn, "CartPole"), (sac_discrete, "CartPole")]
    for number, (script, name) in enumerate([*scripts, (mappo, "Spread"), (vdn, "Spread")]):
        torch.manual_seed(number)
        env, args = vec_envs.make(name, 1), script.Args(env=name, num_envs=1)
        spaces = env.single_observation_space, env.single_action_space
        agent = script.Agent(*(spaces if env.num_agents is None else (env,)), args)
        for parameter in agent.parameters():  # so that no two actions are equally likely
            parameter.data += 0.3 * torch.randn_like(parameter)
        saved = {"script": script.__name__.removeprefix("algos."), "args": vars(args), "step": 7}
        run_dir = folder / f"{saved['script']}-{name}"
        run_dir.mkdir()
        torch.save({**saved, "return": 0.0, "agent": agent.state_dict()}, run_dir / "best.pt")
        found[name].append(str(run_dir))
    return found


def loaded(folders, weights=(), num_envs=64):
    saved = play.load(play.Args(folders[0], others=tuple(folders[1:]), weights=weights))
    agent, env = play.make(saved, num_envs, 0)
    return agent, [play.make(play.load(play.Args(one)), num_envs, 0)[0] for one in folders], env


def test_an_ensemble_acts_by_the_weighted_mean(members):
    agent, (first, second), env = loaded(members["Hopper"], weights=(3.0, 1.0))
    obs, _ = env.reset(seed=2)
    expected = 0.75 * first(obs) + 0.25 * second(obs)
    assert (first(obs) - second(obs)).abs().max() > 0.1
    torch.testing.assert_close(agent(obs), expected)
    for weights in (0.0, 2.0), (1.0, 1e39):  # which float32 does not hold
        alone, _, _ = loaded(members["Hopper"], weights=weights)
        torch.testing.assert_close(alone(obs), second(obs))


def test_an_ensemble_of_discrete_actions_takes_the_likeliest(members):
    """By the definition: π of ppo and of sac_discrete, and DQN's vote, each with its weight."""
    weights = (0.5, 0.3, 0.2)
    agent, (first, second, third), _ = loaded(members["CartPole"], weights)
    obs = 2 * torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    votes = torch.nn.functional.one_hot(second(obs), 2)
    mean = 0.5 * first.actor(first.normalizer(obs)).softmax(-1) + 0.3 * votes
    mean = mean + 0.2 * third.actor(third.normalizer(obs)).softmax(-1)
    assert agent(obs).tolist() == mean.argmax(-1).tolist()
    for one in (first, second, third):
        assert agent(obs).tolist() != one(obs).tolist()  # it is nobody's policy alone


def test_an_ensemble_of_several_agents(members):
    agent, (first, second), env = loaded(members["Spread"], weights=(0.7, 0.3))
    obs, _ = env.reset(seed=2)
    votes = torch.nn.functional.one_hot(second(obs), env.single_action_space.n)
    mean = 0.7 * first.policy(obs).probs + 0.3 * votes
    assert agent(obs).shape == (64, 3) and agent(obs).tolist() == mean.argmax(-1).tolist()
    assert (
        agent(obs).tolist() != first(obs).tolist() and agent(obs).tolist() != second(obs).tolist()
    )


def test_an_ensemble_is_scored_filmed_and_exported_as_one(members, tmp_path, capsys):
    folders, weights = members["CartPole"], ("0.5", "0.3", "0.2")
    command = [ROOT / "algos" / "play.py", *folders, "--weights", *weights, "--seed", "4"]
    done = run(*command, "--json", "--episodes", "3")
    assert (done.returncode, done.stderr) == (0, "")
    scores = json.loads(done.stdout)
    assert scores["weights"] == [0.5, 0.3, 0.2] and scores["others"] == folders[1:]
    agent, _, env = loaded(folders, (0.5, 0.3, 0.2), num_envs=3)
    returns = play.score(agent, env, seed=4)[1]
    assert scores["returns"] == returns
    options = {"others": tuple(folders[1:]), "weights": (0.5, 0.3, 0.2), "seed": 4}
    call(folders[0], **options, episodes=3)
    heads = [
        line for line in capsys.readouterr().out.splitlines() if " on CartPole, best.pt" in line
    ]
    assert [head.split()[0] for head in heads] == ["ppo", "dqn", "sac_discrete"]
    call(folders[0], **options, video=str(tmp_path / "film.gif"))
    env = loaded(folders, num_envs=1)[2]
    best = max(play.score(agent, env, seed)[0]["return"] for seed in (4, 5, 6))
    assert f"return {best:.6g}" in capsys.readouterr().out
    assert read_gif(tmp_path / "film.gif")[0].shape[1:] == (213, 320, 3)
    call(folders[0], **options, export=str(tmp_path / "policy.pt2"))
    program = torch.export.load(tmp_path / "policy.pt2").module()
    obs = 2 * torch.randn(5, 4)
    assert program(obs).tolist() == agent(obs).tolist()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1.0,), r"--weights \(1.0,\): allowed is one per run, none below 0, not all 0"),
        ((1.0, -1.0), "none below 0"),
        ((0.0, 0.0), "not all 0"),
        ((1.0, float("nan")), "one per run"),
    ],
)
def test_weights_that_cannot_be(members, weights, message):
    first, second = members["Hopper"]
    with pytest.raises(UserError, match=message):
        call(first, others=(second,), weights=weights)


def test_an_ensemble_of_two_environments(runs, members):
    with pytest.raises(UserError, match=r"one environment; these runs have \['CartPole', 'Hopper'"):
        call(runs["Hopper"], others=(str(runs["CartPole"]),))
    with pytest.raises(UserError, match="nowhere is not the folder of a run"):
        call(runs["Hopper"], others=("nowhere",))


USE_EXPORT = """
import sys
sys.modules["algos"] = sys.modules["vec_envs"] = None  # importing them is an error
import torch
policy = torch.export.load("policy.pt2").module()
torch.save([policy(obs) for obs in torch.load("observations.pt")], "actions.pt")
"""


def test_an_exported_policy_needs_nothing_but_torch(runs, tmp_path, capsys):
    children = []
    for name, run_dir in runs.items():
        folder = tmp_path / name
        folder.mkdir()
        call(run_dir, export=str(folder / "policy.pt2"))
        assert f"torch.export.load('{folder}/policy.pt2').module()" in capsys.readouterr().out
        obs_dim = trained(run_dir)[0].normalizer.mean.shape[0]
        observations = [torch.randn(batch, obs_dim) for batch in (1, 2, 5)]
        torch.save(observations, folder / "observations.pt")
        command = [sys.executable, "-I", "-c", USE_EXPORT]
        children.append(subprocess.Popen(command, cwd=folder))
    for (name, run_dir), child in zip(runs.items(), children, strict=True):
        assert child.wait(60) == 0
        agent, folder = trained(run_dir)[0], tmp_path / name
        for obs, action in zip(
            torch.load(folder / "observations.pt"), torch.load(folder / "actions.pt"), strict=True
        ):
            torch.testing.assert_close(action, agent(obs), atol=1e-6, rtol=0)


def read_gif(path: Path) -> tuple[np.ndarray, int]:
    """Its pictures, those that are equal to the one before left out, and its milliseconds."""
    with Image.open(path) as image:
        pairs = [
            (np.array(one.convert("RGB")), one.info["duration"])
            for one in ImageSequence.Iterator(image)
        ]
    pictures, durations = zip(*pairs, strict=True)
    return np.stack(pictures), sum(durations)


def assert_is_a_film(pictures: np.ndarray) -> None:
    assert len(pictures) > 2
    changed = (pictures[1:] != pictures[:-1]).any(-1).mean((1, 2))  # share of the pixels
    assert (changed > 0).mean() > 0.5 and changed.max() < 0.9  # a pole may stand still
    assert pictures[-1].std() > 5  # not one colour


@pytest.mark.parametrize("name", ["CartPole", "CartPole-v1"])
def test_a_gif_of_classic_control(altered, name, tmp_path, capsys):
    call(altered(arguments={"env": name}), video=str(tmp_path / "film.gif"), seed=1)
    steps = int(re.search(r"in (\d+) steps", capsys.readouterr().out)[1])
    pictures, milliseconds = read_gif(tmp_path / "film.gif")
    count = math.ceil(min(steps / 3, 10 / 0.06))  # ten seconds at most; 50 steps a second
    assert milliseconds == 60 * count  # a picture for each third step
    assert pictures.shape[1:] == (213, 320, 3)
    assert_is_a_film(pictures)


@pytest.mark.parametrize("name", ["Hopper", "Hopper-v5"])
def test_a_gif_of_mujoco(altered, name, tmp_path, needs_gl):
    film = tmp_path / "film.gif"
    folder = altered("Hopper", arguments={"env": name})
    done = run(ROOT / "algos" / "play.py", folder, "--video", film)
    said = "" if name == "Hopper" else f"{name}: --env Hopper is its newest version here"
    assert done.returncode == 0 and done.stderr.partition(",")[0].strip() == said
    assert_is_a_film(read_gif(film)[0])


def test_an_mp4(runs, tmp_path, capsys):
    pytest.importorskip("imageio_ffmpeg")
    import imageio

    call(runs["CartPole"], video=str(tmp_path / "film.mp4"), seed=1)
    steps = int(re.search(r"in (\d+) steps", capsys.readouterr().out)[1])
    with imageio.get_reader(tmp_path / "film.mp4") as reader:
        assert reader.get_meta_data()["fps"] == 50
        assert reader.get_meta_data()["size"] == (600, 400)
        pictures = np.stack([picture for picture in reader])
    assert len(pictures) == min(max(steps, 100), 500)  # at least two seconds of 50
    assert_is_a_film(pictures)


def test_an_mp4_of_chosen_size(runs, tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    import imageio

    call(runs["CartPole"], video=str(tmp_path / "film.mp4"), seconds=0.2, width=121)
    with imageio.get_reader(tmp_path / "film.mp4") as reader:
        assert reader.get_meta_data()["size"] == (122, 82)  # even


def test_a_picture_is_of_the_end(runs, tmp_path):
    call(runs["CartPole"], video=str(tmp_path / "end.png"), seed=1)
    agent, env = play.make(play.load(play.Args(str(runs["CartPole"]))), 1, 1)
    for _ in play.episode(agent, env, 1):
        last = env.render()
    assert (np.array(Image.open(tmp_path / "end.png")) == last).all()


PRINTS = """
import os
import vec_envs.classic
print("imported")
class Loud(vec_envs.classic.CartPole):
    def _restart(self, mask):
        print("reset")
        os.write(1, b"from C\\n")
        super()._restart(mask)
"""


def test_json_is_all_that_is_printed(altered, tmp_path):
    (tmp_path / "loud.py").write_text(PRINTS)
    folder = altered(arguments={"env": "loud:Loud"})
    done = run(ROOT / "algos" / "play.py", folder, "--json", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert json.loads(done.stdout)["episodes"] == 10 and "from C" in done.stderr


def test_a_film_of_chosen_length_and_size(runs, tmp_path, capsys):
    call(runs["CartPole"], video=str(tmp_path / "film.gif"), seconds=0.3, width=120)
    pictures, milliseconds = read_gif(tmp_path / "film.gif")
    assert milliseconds == 300 and pictures.shape[1:] == (80, 120, 3)
    assert "0.3 seconds from the best of 3 episodes" in capsys.readouterr().out


RENDER = """
import numpy as np, vec_envs
env = vec_envs.make("Hopper", 1)
env.reset(seed=0)
here = env.render()
qpos = env.qpos[0].numpy().copy()
for metres in (2, 1000):  # two tiles, and far beyond the end of Gymnasium's floor
    qpos[0] += metres
    env.painter.pose(qpos)
    assert np.abs(env.painter.paint().astype(int) - here).mean() < 1
qpos[1] += 0.2  # a jump is seen, the camera does not jump too
env.painter.pose(qpos)
assert np.abs(env.painter.paint().astype(int) - here).mean() > 1
env.close()
"""


def test_the_camera_and_the_floor_go_with_the_robot(needs_gl):
    done = run("-c", RENDER)
    assert done.returncode == 0, done.stderr


def test_without_a_gl(monkeypatch, runs, tmp_path):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    tried = []

    def fail(*_, env, **__):
        tried.append(env["MUJOCO_GL"])
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(UserError, match="apt-get install libegl1"):
        call(runs["Hopper"], video=str(tmp_path / "film.gif"))
    assert tried[:2] == ["egl", "osmesa"] and "MUJOCO_GL" not in os.environ
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    with pytest.raises(CannotDraw, match="tried osmesa"):
        choose_gl("HumanoidStandup-v5")
    tried.clear()
    choose_gl("CartPole-v1")
    assert not tried


def test_mp4_without_ffmpeg(monkeypatch, runs, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "imageio\[ffmpeg\]"'):
        call(runs["CartPole"], video=str(tmp_path / "film.mp4"))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is a display")
def test_a_window_without_a_display(monkeypatch, runs):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    with pytest.raises(UserError, match="--show needs a display"):
        call(runs["CartPole"], show=True)


def flip_a_bit(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize("damage", [flip_a_bit, lambda content: content[:-1000], lambda _: b""])
def test_a_damaged_policy(runs, tmp_path, damage):
    (tmp_path / "best.pt").write_bytes(damage((runs["CartPole"] / "best.pt").read_bytes()))
    with pytest.raises(UserError, match=r"best\.pt is damaged"):
        call(tmp_path)


def test_an_error_is_one_sentence_without_a_traceback(runs, tmp_path):
    (tmp_path / "best.pt").write_bytes(flip_a_bit((runs["CartPole"] / "best.pt").read_bytes()))
    done = run(ROOT / "algos" / "play.py", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "is damaged" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"script": "no_such_script"}, "algos/no_such_script.py does not fit .* No module named"),
        ({"script": "../ppo"}, "No module named"),
        ({"script": "play"}, "algos/play.py does not fit the policy"),
        ({"arguments": {"unheard_of": 1}}, "unexpected keyword argument 'unheard_of'"),
        ({"arguments": {"hidden_size": 32}}, "size mismatch"),
        ({"arguments": {"env": "Hopper"}}, "size mismatch"),
        ({"arguments": {"env": "CartPool"}}, "unknown environment 'CartPool'"),
    ],
)
def test_a_policy_that_does_not_fit(altered, changes, message):
    with pytest.raises(UserError, match=message) as error:
        call(altered(**changes))
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


THEIRS = "raise SystemExit('a program of the run folder was executed')"


@pytest.mark.parametrize(
    "changes",
    [
        {"script": "{folder}.theirs"},
        {"arguments": {"env": "{folder}.theirs:CartPole-v1"}},
        {"arguments": {"env": "{folder}:CartPole-v1,g=9.8"}},
        {"arguments": {"env": "pettingzoo:{folder}.inner.theirs"}},
    ],
)
def test_no_program_of_a_run_folder_is_executed(altered, tmp_path, monkeypatch, changes):
    """Run folders are data. Somebody else's may lie where Python looks for modules."""
    (tmp_path / "inner").mkdir()
    for name in ("theirs.py", "inner/theirs.py", "__init__.py"):
        (tmp_path / name).write_text(THEIRS)
    monkeypatch.syspath_prepend(tmp_path.parent)
    monkeypatch.setattr(play, "__package__", "")  # as in `python algos/play.py`
    folder = altered(**json.loads(json.dumps(changes).replace("{folder}", tmp_path.name)))
    with pytest.raises((UserError, ContractError), match=r"No module named|lies in the run"):
        call(folder)
    saved = torch.load(folder / "best.pt", weights_only=True)
    if "arguments" in changes:
        (folder / "args.json").write_text(json.dumps({"script": "ppo", "args": saved["args"]}))
        with pytest.raises(ContractError, match="lies in the run"):
            ppo.train(ppo.Args(resume=str(folder)))
        shutil.copytree(folder, folder / "best")  # of a population
        with pytest.raises(ContractError, match="lies in the run"):
            call(folder)


def test_an_environment_of_ones_own_may_lie_anywhere_else(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    for name in ("mine_beside.py", "run/mine_inside.py"):
        (tmp_path / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "run")  # by whose wish it is a place of modules
    for name in ("mine_beside:Own-v0", "mine_inside:Own", "absent.x:Y", "Hopper", "a/b:c-v1"):
        vec_envs.refuse_program_in(tmp_path / "run", name)


def test_the_folder_where_one_stands_has_no_say_in_how_pictures_are_drawn(tmp_path, monkeypatch):
    """`python -c` would take mujoco.py from there, as in somebody's run folder."""
    (tmp_path / "mujoco.py").write_text("open('executed', 'w').close()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUJOCO_GL", "egl")
    with contextlib.suppress(CannotDraw):
        choose_gl("Hopper")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"video": "film.avi"}, r"film.avi: the name must end in .mp4 or .gif"),
        ({"export": "policy.pt"}, r"policy.pt: the name must end in .pt2"),
        ({"video": "nowhere/film.gif"}, "there is no folder nowhere"),
        ({"episodes": 0}, "--episodes is 0; allowed is from 1"),
        ({"json": True, "video": "film.gif"}, "one at a time"),
    ],
)
def test_what_cannot_be_asked(runs, options, message):
    with pytest.raises(UserError, match=message):
        call(runs["CartPole"], **options)


def test_a_film_that_nobody_may_write(runs):
    """Before an episode is played; imageio would say it with two tracebacks."""
    done = run(ROOT / "algos" / "play.py", runs["CartPole"], "--video", "/proc/self/film.gif")
    assert done.returncode == 1 and "/proc/self/film.gif" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_population_is_its_best_agent(runs, tmp_path, capsys):
    shutil.copytree(runs["CartPole"], tmp_path / "best")
    call(tmp_path, episodes=2, json=True)
    call(runs["CartPole"], episodes=2, json=True)
    one, other = map(json.loads, capsys.readouterr().out.splitlines())
    assert one["returns"] == other["returns"]


def test_a_folder_without_a_policy(tmp_path):
    with pytest.raises(UserError, match="nowhere is not the folder of a run"):
        call(tmp_path / "nowhere")
    (tmp_path / "args.json").write_text("{}")
    (tmp_path / "best").mkdir()  # a population without an agent
    with pytest.raises(UserError, match=r"has no best\.pt yet: no evaluation has been made$"):
        call(tmp_path)
    (tmp_path / "best.pt").touch()
    with pytest.raises(UserError, match=r"best\.pt is damaged \(.*\)$"):  # there is no other
        call(tmp_path)
    said = r"has no last\.pt yet: no checkpoint has been made; try --checkpoint best"
    with pytest.raises(UserError, match=said):
        call(tmp_path, checkpoint="last")
    torch.save({"agent": {}}, tmp_path / "best.pt")
    with pytest.raises(UserError, match="is not a policy"):
        call(tmp_path)
