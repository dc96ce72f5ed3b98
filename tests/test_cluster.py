"""Populations on a Ray cluster of several nodes on this machine, some of which die.

Needs Ray (pip install -e ".[cluster]"); each scenario takes about a minute.
"""

import json
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch

from algos import tournament
from algos.worker_learner.agents import Agent
from algos.worker_learner.population import Population

ray = pytest.importorskip("ray", reason='no Ray here: pip install -e ".[cluster]"')

ROOT = Path(__file__).parent.parent
PATIENCE = 240  # seconds
SOON = {"health_check_period_ms": 500, "health_check_initial_delay_ms": 500}
SOON |= {"health_check_failure_threshold": 3}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def cluster(monkeypatch):
    """A cluster of a head without cores; nodes are added by the tests."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    for name, value in SOON.items():
        monkeypatch.setenv(f"RAY_{name}", str(value))
    head = {"num_cpus": 0, "object_store_memory": 100 << 20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    yield made
    ray.shutdown()
    made.shutdown()


def add_node(cluster):
    return cluster.add_node(num_cpus=2, object_store_memory=100 << 20)


@pytest.fixture
def population(tmp_path, cluster):
    """Makes a tournament of the stand-in on the cluster; it is closed in the end."""
    scripts, made = tmp_path / "scripts", []
    scripts.mkdir()
    for name in ("trainer", "play"):
        shutil.copyfile(ROOT / "tests" / "population_program.py", scripts / f"{name}.py")
    content = {"agent": {"weight": torch.zeros(2)}, "run": {"random": []}, "workers": {}}
    torch.save(content, scripts / "checkpoint.pt")

    def make(segments: int, sleep: float) -> tuple[Population, tournament.Args]:
        args = tournament.Args(
            algos=[f"{scripts}/trainer.py"], env="Known", agents=4, segments=segments,
            total_steps=1000, period=100, root=str(tmp_path / "root"), cluster=cluster.address,
        )  # fmt: skip
        made.append(Population(args, args.algos, ["--sleep", str(sleep)], "tournament"))
        return made[0], args

    yield make
    for one in made:
        one.close()


def advance(population: Population, args: tournament.Args, until, what: str) -> None:
    """What tournament.compete does, until a condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < deadline, f"after {PATIENCE} s: {what}"
        room = min(args.agents, population.pool.slots())
        while len(population.flights) < room and population.count < args.segments:
            tournament.generate(population, args)
        population.work()


def trainers(root: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_text().split("\0")
            except OSError:  # it ended meanwhile
                continue
            if any(x.startswith(f"{root}/") for x in words) and "setpriv" not in words[0]:
                found.append(int(entry.name))
    return found


def assert_every_segment_counts_once(population: Population, count: int) -> None:
    folders = sorted((population.root / "agents").iterdir())
    found = {x.name: Agent(**json.loads((x / "agent.json").read_text())) for x in folders}
    published = [x["id"] for x in population.journal.lines if x["event"] == "published"]
    assert sorted(published) == sorted(found)
    failed = [x for x in population.journal.lines if x["event"] == "failed"]
    assert len(found) + len(failed) == count and not failed, failed
    for agent in found.values():
        before = found[agent.parent].score if agent.parent else 0.0
        assert agent.score == pytest.approx(before + 100 * agent.flags["learning_rate"])
    assert not list((population.root / "flight").glob("*.json"))


def test_a_node_that_is_killed_loses_no_segment(cluster, population):
    nodes = [add_node(cluster), add_node(cluster)]
    competing, args = population(12, 3.0)
    advance(competing, args, lambda: len(trainers(competing.root)) >= 4, "four in training")
    before = {name for name, _ in competing.running}
    cluster.remove_node(nodes[1], allow_graceful=False)  # SIGKILL to its raylet
    advance(competing, args, lambda: not competing.flights and competing.count == 12, "the end")
    assert before <= competing.agents.keys(), "a segment of the killed node was lost"
    assert_every_segment_counts_once(competing, 12)
    assert not trainers(competing.root)


def test_half_of_the_nodes_go_and_come_back(cluster, population):
    nodes = [add_node(cluster), add_node(cluster)]
    competing, args = population(12, 5.0)
    advance(competing, args, lambda: len(competing.agents) >= 4, "the first agents")
    advance(competing, args, lambda: len(competing.running) == 4, "four in training")
    cluster.remove_node(nodes[1], allow_graceful=False)
    advance(competing, args, lambda: competing.pool.slots() == 2, "the cluster's knowledge of it")
    advance(competing, args, lambda: len(competing.running) <= 2, "two of four stop")
    stopped = {x["id"] for x in competing.journal.lines if x["event"] == "stopped"}
    add_node(cluster)
    advance(competing, args, lambda: competing.pool.slots() == 4, "the node")
    advance(competing, args, lambda: not competing.flights and competing.count == 12, "the end")
    assert stopped and stopped <= competing.agents.keys()
    assert_every_segment_counts_once(competing, 12)
