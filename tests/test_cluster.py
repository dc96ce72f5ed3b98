"""Populations on a Ray cluster of several nodes on this machine, some of which die.

Needs Ray (pip install -e ".[cluster]"); each scenario takes about half a minute.
"""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_populations import (
    ROOT,
    agents,
    assert_every_segment_counts_once,
    begin,
    finish,
    journal,
    processes_of,
    wait_for,
    write_stand_in,
)

ray = pytest.importorskip("ray", reason='no Ray here: pip install -e ".[cluster]"')

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
    made.shutdown()


def add_node(cluster):
    return cluster.add_node(num_cpus=2, object_store_memory=100 << 20)


def compete(cluster, tmp_path, monkeypatch, hold: int):
    """A tournament of the stand-in on the cluster -> its process, its folder, what it waits for."""
    scripts, root = write_stand_in(tmp_path / "scripts"), tmp_path / "root"
    monkeypatch.chdir(tmp_path)  # --root is relative, and the nodes work in another folder
    (scripts / "hold").touch()
    flags = f"--algos {scripts}/trainer.py --env Known --agents 4 --segments 12 --total-steps 1000"
    flags += f" --period 100 --cluster {cluster.address}"
    driver = begin("tournament", Path("root"), flags, f"--hold {hold}", cwd=tmp_path)
    return driver, root, scripts / "hold"


def four_in_training(root) -> bool:
    return len(processes_of(root, "trainer.py")) == 4


def test_a_node_that_is_killed_loses_no_segment(cluster, tmp_path, monkeypatch):
    nodes = [add_node(cluster), add_node(cluster)]
    driver, root, hold = compete(cluster, tmp_path, monkeypatch, 0)
    wait_for(lambda: four_in_training(root), "four in training")
    begun = {path.stem for path in (root / "flight").glob("*.json")}
    cluster.remove_node(nodes[1], allow_graceful=False)  # SIGKILL to its raylet
    wait_for(lambda: len(processes_of(root, "trainer.py")) == 2, "the end of what ran there")
    hold.unlink()
    finish(driver, root)
    assert begun <= agents(root).keys(), "a segment of the killed node was lost"
    assert len(agents(root)) == 12
    assert_every_segment_counts_once(root)
    assert not processes_of(root)


def test_at_ctrl_c_the_runs_on_the_nodes_save(cluster, tmp_path, monkeypatch):
    add_node(cluster)
    driver, root, _ = compete(cluster, tmp_path, monkeypatch, 0)
    wait_for(lambda: len(list(root.rglob("checkpoint.pt"))) == 2, "two in training")
    driver.send_signal(signal.SIGINT)
    assert "The same command goes on." in finish(driver, root, -signal.SIGINT)
    assert len(list(root.rglob("saved"))) == 2
    assert not processes_of(root)


def test_a_node_without_the_folders_is_one_sentence(cluster):
    add_node(cluster)
    program = f"""from types import SimpleNamespace
from algos.worker_learner import segments
args = SimpleNamespace(cluster="{cluster.address}", cpus=1, gpus=0, agents=1)
pool = segments.Cluster(args)
pool.start("00000/0", [(["true"], "/none/run0.out")])
while not pool.wait(5):
    pass"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    said = done.stderr.splitlines()[-1]
    assert "--cluster: a run could not start on a node: " in said and "'/none/host'" in said


def test_half_of_the_nodes_go_and_come_back(cluster, tmp_path, monkeypatch):
    nodes = [add_node(cluster), add_node(cluster)]
    driver, root, hold = compete(cluster, tmp_path, monkeypatch, 100)
    wait_for(lambda: len(journal(root, "published")) == 4, "the first agents")
    wait_for(lambda: four_in_training(root), "four in training")
    cluster.remove_node(nodes[1], allow_graceful=False)
    wait_for(lambda: len(journal(root, "stopped")) == 2, "two of four stop")
    stopped = {line["id"] for line in journal(root, "stopped")}
    add_node(cluster)
    wait_for(lambda: four_in_training(root), "the node")
    hold.unlink()
    finish(driver, root)
    assert stopped <= agents(root).keys() and len(agents(root)) == 12
    assert_every_segment_counts_once(root)
