"""Every script answers --help, runs, and differs from its parent only where the lesson is."""

import ast
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from algos import ppo
from algos.worker_learner import parse

ALGOS = Path(__file__).parent.parent / "algos"
SCRIPTS = ["a2c", "ppo", "ppo_hterm", "ppo_hterm_variants"]
CONTINUOUS = ["ddpg", "td3", "sac", "redq", "mod_sac", "crossq"]
CONTINUOUS += ["ddpg_hterm", "td3_hterm", "sac_hterm"]
DISCRETE = ["pqn", "dqn", "d3qn", "sac_discrete"]  # a choice among a few actions
MULTI_AGENT = ["mappo", "vdn", "qmix", "maddpg", "matd3"]
RUNS = [(script, env) for script in SCRIPTS for env in ("CartPole", "Pendulum")]
RUNS += [(script, "Pendulum") for script in CONTINUOUS]
RUNS += [(script, "CartPole") for script in DISCRETE]
RUNS += [(script, "Spread") for script in MULTI_AGENT]

# parent, child: the definitions that may differ; any other that both have must be the same text
PAIRS = {
    ("a2c", "ppo"): {"Args", "policy_loss", "value_loss", "prepare", "update", "train"},
    ("ppo", "ppo_hterm"): {"Args", "RewardScaler", "Agent", "update", "train"},
    ("pqn", "dqn"): {"Args", "QNetwork", "Agent", "collect", "q_loss", "update", "train"},
    ("dqn", "d3qn"): {"Args", "QNetwork", "td_target", "q_loss", "update", "train"},
    ("dqn", "sac_discrete"): {"Args", "Agent", "collect", "update", "train"},
    ("ppo", "ppo_hterm_variants"): {"Args", "prepare", "update", "train"},
    ("ddpg", "td3"): {"Args", "Agent", "collect", "critic_loss", "actor_loss", "update", "train"},
    ("td3", "sac"): {"Args", "Agent", "critic_loss", "actor_loss", "update", "train"},
    ("sac", "redq"): {"Args", "Agent", "critic_loss", "actor_loss", "update", "train"},
    ("sac", "mod_sac"): {"Args", "Agent", "update", "train"},
    ("sac", "crossq"): {
        *{"Args", "mlp", "Critics", "Agent", "critic_loss", "actor_loss", "update", "train"},
    },
    ("ddpg", "ddpg_hterm"): {"Args", "Agent", "collect", "update", "train"},
    ("td3", "td3_hterm"): {"Args", "Agent", "collect", "update", "train"},
    ("sac", "sac_hterm"): {"Args", "Agent", "collect", "update", "train"},
    ("ddpg_hterm", "td3_hterm"): {
        *{"Args", "Agent", "collect", "critic_loss", "actor_loss", "window_delta"},
        *{"update", "train"},
    },
    ("td3_hterm", "sac_hterm"): {
        *{"Args", "Agent", "critic_loss", "actor_loss", "window_delta", "hamiltonian_term"},
        *{"add_capped", "update", "train"},
    },
    ("ppo", "mappo"): {
        *{"Args", "Agent", "collect", "policy_loss", "prepare", "minibatch_loss"},
        *{"update", "train"},
    },
    ("ppo", "vdn"): {"Args", "Agent", "collect", "update", "train"},
    ("vdn", "qmix"): {"Args", "Agent", "collect", "td_target", "td_loss", "train"},
    ("maddpg", "matd3"): {"Args", "Agent", "critic_loss", "actor_loss", "update", "train"},
}


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
    assert drifted == PAIRS[parent, child]


def test_the_readme_lists_every_script_with_its_length():
    table = r"^\| \[(\w+)\.py\]\(algos/\1\.py\) .*?\| (\d+) \| `"
    listed = re.findall(table, (ALGOS.parent / "README.md").read_text(), re.M)
    scripts = [p for p in ALGOS.glob("*.py") if p.stem not in ("__init__", "worker_learner")]
    lines = {p.stem: p.read_text().count("\n") for p in scripts}
    assert {name: int(count) for name, count in listed} == lines


def run(command: list) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """What each script of the two tests below said, by its test's name; several run at a time."""
    with ThreadPoolExecutor(3) as pool:
        futures = {}
        for item in request.session.items:
            if getattr(item, "originalname", "") in ("test_help", "test_short_run"):
                script, env = (item.callspec.params.get(name) for name in ("script", "env"))
                command, folder = [sys.executable, ALGOS / f"{script}.py"], None
                if env is None:
                    command += ["--help"]
                else:
                    folder = tmp_path_factory.mktemp(script) / "run"
                    command += ["--env", env, "--num-envs", "4", "--horizon", "16"]
                    command += ["--total-steps", "500", "--run-dir", folder]
                    if script in (*CONTINUOUS, *DISCRETE[1:], "maddpg", "matd3"):
                        command += ["--warmup-steps", "400", "--log-every", "64"]
                futures[item.name] = folder, pool.submit(run, command)
        return {name: (folder, future.result()) for name, (folder, future) in futures.items()}


@pytest.mark.parametrize("script", [*SCRIPTS, *CONTINUOUS, *DISCRETE, *MULTI_AGENT, "play"])
def test_help(script, results, request):
    _, done = results[request.node.name]
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout


def test_help_that_nobody_reads():
    """`python algos/sac.py --help | head`"""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, ALGOS / "sac.py", "--help"], stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    assert done.stderr == b""


@pytest.mark.parametrize(("script", "env"), RUNS)
def test_short_run(script, env, results, request):
    folder, done = results[request.node.name]
    assert done.returncode == 0, done.stderr
    assert "Done: 512 steps" in done.stdout
    assert "losses/" in (folder / "metrics.csv").read_text()
    for name in ("args.json", "metrics.csv", "checkpoint.pt", "best.pt", "last.pt"):
        assert (folder / name).exists(), name


def test_flags_win_over_an_environments_own_defaults(monkeypatch):
    for command, horizon, discount in (
        ("--env HalfCheetah", 32, 0.98),
        ("--env HalfCheetah --horizon 64 --discount 0.99", 64, 0.99),  # the general defaults
        ("--env Hopper", 64, 0.99),
        ("--resume somewhere", 64, 0.99),  # the folder's arguments count, not the table
    ):
        monkeypatch.setattr(sys, "argv", ["ppo.py", *command.split()])
        args = parse(ppo.Args, ppo.TUNED)
        assert (args.horizon, args.discount) == (horizon, discount), command
