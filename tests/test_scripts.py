"""Every script is short, mostly algorithm, a small diff to its parent, answers --help and runs."""

import ast
import importlib
import importlib.util
import inspect
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from algos import ppo
from algos.worker_learner import Run, parse

ALGOS = Path(__file__).parent.parent / "algos"
SCRIPTS = ["a2c", "ppo", "ppo_hterm"]
CONTINUOUS = ["ddpg", "td3", "sac", "redq", "mod_sac", "crossq", "xqc"]
CONTINUOUS += ["ddpg_hterm", "td3_hterm", "sac_hterm"]
DISCRETE = ["pqn", "dqn", "d3qn", "sac_discrete"]  # a choice among a few actions
MULTI_AGENT = ["mappo", "vdn", "qmix", "maddpg", "matd3"]
RUNS = [(script, "CartPole") for script in ("a2c", "ppo")]
RUNS += [(script, "Pendulum") for script in (*SCRIPTS, *CONTINUOUS)]
RUNS += [(script, "CartPole") for script in DISCRETE]
RUNS += [(script, "Spread") for script in MULTI_AGENT]

# (parent, child): at most so many changed lines of code, and the definitions that may differ; any
# other that both have must be the same text
PAIRS = {
    ("a2c", "ppo"): (95, {"Args", "policy_loss", "prepare", "update", "train"}),
    ("ppo", "ppo_hterm"): (120, {"Args", "Agent", "ppo_loss", "gradient_step", "update", "train"}),
    ("ppo", "mappo"): (
        182,
        {"Args", "Agent", "collect", "gae", "prepare", "policy_loss", "gradient_step"}
        | {"update", "train"},
    ),
    ("dqn", "pqn"): (108, {"Args", "mlp", "q_loss", "update", "train"}),
    ("dqn", "d3qn"): (50, {"Args", "Agent", "collect", "q_loss", "train"}),
    ("ddpg", "td3"): (49, {"Args", "Agent", "critic_loss", "actor_loss", "update", "train"}),
    ("td3", "sac"): (
        82,
        {"Args", "Actor", "Agent", "collect", "critic_loss", "actor_loss", "update", "train"},
    ),
    ("sac", "mod_sac"): (35, {"Args", "Agent", "update", "train"}),
    ("sac", "redq"): (
        94,
        {"Args", "Critics", "Agent", "critic_loss", "actor_loss", "update", "train"},
    ),
    ("sac", "crossq"): (
        113,
        {"Args", "mlp", "Agent", "critic_loss", "actor_loss", "update", "train"},
    ),
    ("crossq", "xqc"): (
        100,
        {"Args", "mlp", "Critics", "Agent", "critic_loss", "actor_loss", "update", "train"},
    ),
    ("sac", "sac_discrete"): (
        144,
        {"Args", "Critics", "Agent", "collect", "critic_loss", "actor_loss", "temperature_loss"}
        | {"update", "train"},
    ),
    ("ddpg", "ddpg_hterm"): (96, {"Args", "Agent", "collect", "update", "train"}),
    ("td3", "td3_hterm"): (100, {"Args", "Agent", "collect", "update", "train"}),
    ("sac", "sac_hterm"): (104, {"Args", "Actor", "Agent", "collect", "update", "train"}),
    ("ddpg_hterm", "td3_hterm"): (
        54,
        {"Args", "Agent", "critic_loss", "actor_loss", "hamiltonian_term", "update", "train"},
    ),
    ("vdn", "qmix"): (
        60,
        {"Args", "Agent", "collect", "mix", "schedule", "td_loss", "td_target", "train"},
    ),
    ("maddpg", "matd3"): (
        41,
        {"Args", "Agent", "critic_loss", "actor_loss", "update", "train"},
    ),
}


@pytest.fixture(scope="module")
def lines():
    """benchmark/lines.py"""
    spec = importlib.util.spec_from_file_location("lines", ALGOS.parent / "benchmark" / "lines.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ALL = [*SCRIPTS, *CONTINUOUS, *DISCRETE, *MULTI_AGENT]


def test_every_script_is_tested(lines):
    assert sorted(ALL) == [path.stem for path in lines.scripts()]
    assert PAIRS.keys() >= {(parent, child) for child, parent in lines.PARENTS.items()}


@pytest.mark.parametrize("script", ALL)
def test_a_script_is_short_and_mostly_algorithm(script, lines):
    length, docstring, algorithm = lines.measure(ALGOS / f"{script}.py")
    assert length <= 300
    assert docstring <= 25
    assert algorithm >= 0.5


def test_the_helper_is_short():
    for package, most in (("worker_learner", 2335), ("populations", 940)):  # the aim: 1100
        files = (ALGOS / package).glob("*.py")
        lengths = {path.name: len(path.read_text().splitlines()) for path in files}
        assert max(lengths.values()) <= 400, lengths
        assert sum(lengths.values()) <= most, lengths


@pytest.mark.parametrize("script", ALL)
def test_the_training_step_is_in_the_open(script):
    """zero_grad, backward, average_gradients, perhaps again for a second term, then step."""
    calls = {"zero_grad()": "z", ".backward(": "b", "average_gradients(": "a"}
    calls["optimizer.step()"] = "s"
    found = re.findall("|".join(map(re.escape, calls)), (ALGOS / f"{script}.py").read_text())
    assert re.fullmatch("((zba)+s)+", "".join(calls[call] for call in found)), found


def definitions(script: str) -> dict[str, str]:
    source = (ALGOS / f"{script}.py").read_text()
    return {
        node.name: ast.get_source_segment(source, node)
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


@pytest.mark.parametrize(("parent", "child"), PAIRS)
def test_siblings_have_not_drifted_apart(parent, child):
    ours, theirs = definitions(parent), definitions(child)
    drifted = {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}
    assert drifted <= PAIRS[parent, child][1]


@pytest.mark.parametrize(("parent", "child"), PAIRS)
def test_a_variant_is_its_parent_and_a_small_diff(parent, child, lines):
    changed = lines.changed_lines(ALGOS / f"{parent}.py", ALGOS / f"{child}.py")
    assert changed <= PAIRS[parent, child][0]


def test_the_readme_lists_every_script_with_its_length():
    table = r"^\| \[(\w+)\.py\]\(algos/\1\.py\) .*?\| (\d+) \| `"
    listed = re.findall(table, (ALGOS.parent / "README.md").read_text(), re.M)
    scripts = [p for p in ALGOS.glob("*.py") if p.stem != "__init__"]
    lines = {p.stem: p.read_text().count("\n") for p in scripts}
    assert {name: int(count) for name, count in listed} == lines


def test_the_reading_path_says_how_long_each_difference_is(lines):
    text = (ALGOS / "README.md").read_text()
    said = re.findall(r"`diff (\w+)\.py (\w+)\.py` \| (\d+) \|", text)
    assert len(said) >= 13
    for parent, child, changed in said:
        found = lines.changed_lines(ALGOS / f"{parent}.py", ALGOS / f"{child}.py")
        assert int(changed) == found, (parent, child)


def run(script: str, flags: list, monkeypatch) -> None:
    """As `python algos/{script}.py`, but in this process: torch is imported once."""
    monkeypatch.setattr(sys, "argv", [f"algos/{script}.py", *map(str, flags)])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    runpy.run_path(str(ALGOS / f"{script}.py"), run_name="__main__")


@pytest.mark.parametrize("script", [*ALL, "play"])
def test_help(script, capsys, monkeypatch):
    with pytest.raises(SystemExit) as end:
        run(script, ["--help"], monkeypatch)
    assert end.value.code in (0, None)
    assert "usage" in capsys.readouterr().out


def test_help_that_nobody_reads():
    """`python algos/sac.py --help | head`"""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, ALGOS / "sac.py", "--help"], stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    assert done.stderr == b""


def test_windows_is_told_of_wsl(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit, match="on Windows use it in WSL"):
        runpy.run_path(str(ALGOS / "__init__.py"))


@pytest.mark.parametrize(("script", "env"), RUNS)
def test_short_run(script, env, tmp_path, capsys, monkeypatch):
    called = {"log_episodes": [], "evaluate": [], "checkpoint": []}
    originals = dict(vars(Run))
    for name in called:

        def method(run, step, *rest, name=name):
            called[name].append(step)
            originals[name](run, step, *rest)

        monkeypatch.setattr(Run, name, method)
    folder = tmp_path / "run"
    flags = ["--env", env, "--num-envs", 4, "--total-steps", 500, "--run-dir", folder]
    if "_hterm" not in script or script in SCRIPTS:
        flags += ["--num-steps", 16]
    if script in (*CONTINUOUS, *DISCRETE[1:], "maddpg", "matd3"):
        warmup = 480 if script == "redq" else 400  # its 20 updates a step take long
        flags += ["--warmup-steps", warmup, "--log-every", 64]
    elif script in ("vdn", "qmix"):
        flags += ["--log-every", 64]
    run(script, flags, monkeypatch)
    assert re.search("Done: 5(00|12) steps", capsys.readouterr().out)
    every_step = sorted(set(called["evaluate"]))  # each is called once in an iteration
    assert len(every_step) > 1 and list(called.values()) == [every_step] * 3
    assert "losses/" in (folder / "metrics.csv").read_text()
    for name in ("args.json", "metrics.csv", "checkpoint.pt", "best.pt", "last.pt"):
        assert (folder / name).exists(), name


def test_flags_win_over_an_environments_own_defaults(monkeypatch):
    for command, num_steps, gamma in (
        ("--env HalfCheetah", 32, 0.98),
        ("--env HalfCheetah --num-steps 64 --gamma 0.99", 64, 0.99),  # the general defaults
        ("--env Hopper", 64, 0.99),
        ("--env Hopper --num-steps 1.5e3", 1500, 0.99),  # as people write millions
        ("--env Hopper --num-steps=1e+3", 1000, 0.99),
        ("--run_dir 1e3 --num_steps 1e3", 1000, 0.99),
        ("--resume somewhere", 64, 0.99),  # the folder's arguments count, not the table
    ):
        monkeypatch.setattr(sys, "argv", ["ppo.py", *command.split()])
        args = parse(ppo.Args, ppo.TUNED)
        assert (args.num_steps, args.gamma) == (num_steps, gamma), command
        assert args.run_dir in ("", "1e3")  # a name that looks like a number stays as it is


@pytest.mark.parametrize("name", ["td3", "td3_hterm", "redq", "crossq", "xqc", "matd3"])
def test_the_actor_is_due_after_the_last_of_the_delayed_updates(name, monkeypatch, tmp_path):
    """And not after the first: updates 18 to 39 are made, of which 20, 23, ... move it."""
    script, dues = importlib.import_module(f"algos.{name}"), []

    def update(*given, original=script.update):
        dues.append(given[list(inspect.signature(original).parameters).index("due")])
        return original(*given)

    monkeypatch.setattr(script, "update", update)
    options = dict(warmup_steps=20, total_steps=40, utd_ratio=1.0, policy_delay=3, batch_size=8)
    options |= dict(num_envs=2, eval_episodes=1, hidden_size=8, run_dir=str(tmp_path / "run"))
    options |= {"num_steps": 1} if name == "matd3" else {"env": "Pendulum"}
    script.train(script.Args(**options))
    assert dues == [number in range(20, 40, 3) for number in range(18, 40)]
