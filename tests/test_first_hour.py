"""The first hour: the demo, one script copied out, an exported policy, an installed wheel."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from algos import dqn, play
from algos.worker_learner import parse

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "algos" / "demo"

# Python imports this file at its start: a process forgets where this project is installed, and
# finds of it what lies on PYTHONPATH, if anything.
FORGET_THE_INSTALLED = f"""
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
sys.path = [folder for folder in sys.path if folder != {str(ROOT)!r}]
"""


@pytest.fixture
def alone(tmp_path) -> Path:
    """An empty folder, for `python` below."""
    (tmp_path / "sitecustomize.py").write_text(FORGET_THE_INSTALLED)
    found = subprocess.run([sys.executable, "-c", "import algos"], **surroundings(tmp_path))
    assert "No module named 'algos'" in found.stderr, "an installed copy cannot be hidden"
    return tmp_path


def surroundings(folder: Path) -> dict:
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    return {"cwd": folder, "env": environment, "capture_output": True, "text": True}


def python(folder: Path, *words: object) -> str:
    """What `python words...` prints in a folder from which nothing else of this project is seen."""
    done = subprocess.run([sys.executable, *map(str, words)], **surroundings(folder))
    assert done.returncode == 0, done.stderr
    return done.stdout


# A random policy has about -50 on Ant and 20 on Hopper. On another processor an Ant may fall.
@pytest.mark.parametrize(("name", "least"), [("demo", 2000), ("demo:hopper", 1000)])
def test_the_demo(name, least, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    play.main(play.Args(name, episodes=3, json=True))
    scores = json.loads(capsys.readouterr().out)
    assert scores["return_mean"] > least
    monkeypatch.chdir(DEMO.parent)  # where a folder has the same name
    play.main(play.Args(name, episodes=3, json=True))
    assert json.loads(capsys.readouterr().out) == scores


@pytest.mark.parametrize("name", ["ant", "hopper"])
def test_a_policy_of_the_demo_is_small_and_says_nothing_of_its_machine(name):
    assert (DEMO / name / "best.pt").stat().st_size <= 300_000
    saved = torch.load(DEMO / name / "best.pt", weights_only=True)
    assert not [value for value in saved["args"].values() if "/" in str(value)]


def test_a_run_called_demo_is_nobody_elses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(DEMO / "hopper", "demo")
    assert play.load(play.Args("demo"))["args"]["env"] == "Hopper"
    assert play.load(play.Args(str(DEMO / "ant")))["args"]["env"] == "Ant"


SHORT = "--env Pendulum --total-steps 600 --warmup-steps 400 --num-envs 4 --eval-episodes 2 "
SHORT += "--torch-threads 1 --hidden-size 32"
USE = """
import sys, torch
policy = torch.export.load("policy.pt2").module()
torch.save(policy(torch.load("obs.pt")), "action.pt")
assert not {"algos", "vec_envs"} & sys.modules.keys()
"""


def test_a_script_copied_out(alone):
    """It trains, is scored and exported; the export needs torch alone."""
    shutil.copytree(ROOT / "vec_envs", alone / "vec_envs")
    shutil.copytree(ROOT / "algos" / "worker_learner", alone / "algos" / "worker_learner")
    for name in ("sac.py", "play.py"):
        shutil.copy(ROOT / "algos" / name, alone / "algos")
    where = "import algos.worker_learner as w, vec_envs as v; print(w.__file__, v.__file__)"
    for path in python(alone, "-c", where).split():
        assert path.startswith(str(alone))

    assert "Done: 600 steps" in python(alone, "algos/sac.py", *SHORT.split(), "--run-dir", "run")
    scores = json.loads(python(alone, "algos/play.py", "run", "--json", "--episodes", "2"))
    assert scores["script"] == "sac" and len(scores["returns"]) == 2
    python(alone, "algos/play.py", "run", "--export", "policy.pt2")
    obs = torch.randn(5, 3)
    torch.save(obs, alone / "obs.pt")
    python(alone, "-I", "-c", USE)
    agent, _ = play.make(play.load(play.Args(str(alone / "run"))), 1, 0)
    torch.testing.assert_close(torch.load(alone / "action.pt"), agent(obs), atol=1e-5, rtol=0)


def test_a_script_of_another_name_in_a_folder_of_ones_own(alone):
    """play.py beside it scores what it has trained, as a program and as a module of a package."""
    shutil.copytree(ROOT / "vec_envs", alone / "vec_envs")
    shutil.copytree(ROOT / "algos" / "worker_learner", alone / "algos" / "worker_learner")
    for name, own in (("sac.py", "my_sac.py"), ("play.py", "play.py")):
        (alone / "mine").mkdir(exist_ok=True)
        shutil.copy(ROOT / "algos" / name, alone / "mine" / own)
    said = python(alone, "mine/my_sac.py", *SHORT.split(), "--run-dir", "run")
    assert "mine/play.py run" in said
    for program in (["mine/play.py"], ["-m", "mine.play"]):
        scores = json.loads(python(alone, *program, "run", "--json", "--episodes", "2"))
        assert scores["script"] == "my_sac" and len(scores["returns"]) == 2


BUILD = "from setuptools import build_meta; build_meta.build_wheel('.')"  # what pip calls


def test_a_wheel_has_everything(alone, tmp_path_factory):
    tree = tmp_path_factory.mktemp("tree")  # a build leaves folders behind
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("algos", "vec_envs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    python(tree, "-c", BUILD)
    (wheel,) = tree.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(alone)
    kinds = ("algos/**/*.py", "vec_envs/**/*.py", "algos/demo/*/best.pt")
    for kind in kinds:
        wanted = {path.relative_to(tree) for path in tree.glob(kind)}
        assert wanted and wanted == {path.relative_to(alone) for path in alone.glob(kind)}

    assert "usage: algos/ppo.py" in python(alone, "algos/ppo.py", "--help")
    scores = json.loads(python(alone, "algos/play.py", "demo", "--json", "--episodes", "3"))
    assert scores["return_mean"] > 2000


def test_a_debugger_stops_in_a_loss(tmp_path):
    """In a run that would be compiled, and on Python 3.11, where pdb's `__main__` has no spec."""
    words = ["-m", "pdb", "algos/ppo.py", "--env", "CartPole", "--total-steps", "1000000"]
    words += ["--run-dir", str(tmp_path / "run")]
    asked = "b ppo_loss\nc\nn\np policy\np agent.actor[0].weight.grad is None\nq\n"
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, input=asked, capture_output=True, text=True
    )
    assert "not compiled" in done.stdout and "Categorical(" in done.stdout, done.stderr
    assert "Error" not in done.stderr


def test_a_clone_that_uses_another_one_says_so(tmp_path, monkeypatch, capsys):
    """One virtual environment, several clones: Python imports the one that is installed."""
    (tmp_path / "worker_learner").mkdir()
    for folder, warned in ((tmp_path, True), (ROOT / "algos", False), (tmp_path.parent, False)):
        monkeypatch.setattr(sys, "argv", [str(folder / "dqn.py"), "--env", "CartPole"])
        parse(dqn.Args, dqn.TUNED)
        said = f"the script uses {ROOT}/algos/worker_learner, not the folder beside it"
        assert (said in capsys.readouterr().err) == warned


def test_the_file_of_a_policy_stands_for_its_folder():
    assert (
        play.load(play.Args(f"{DEMO}/ant/best.pt"))["step"] == play.load(play.Args("demo"))["step"]
    )
