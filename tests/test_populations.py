"""generations.py and tournament.py: selection exactly, by a stand-in whose scores are known, and
faults with real processes: kills, lost cores, damaged folders, a full disk, NaN.
"""

import contextlib
import csv
import io
import json
import math
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from algos import generations, play, tournament
from algos.populations import Agent, Population, is_better
from algos.populations import agents as population_agents
from algos.populations.agents import (
    FRESH,
    SCORE,
    descend,
    fuse,
    last_line,
    read_score,
    scaled,
    scoring,
)
from algos.populations.journal import Journal
from algos.populations.leaderboard import table
from algos.worker_learner import UserError, files, segments
from algos.worker_learner.segments import Here

ROOT = Path(__file__).parent.parent
PATIENCE = 240  # seconds, for machines that are busy with something else
CORES = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


# Helpers, for test_cluster.py too.


@pytest.fixture
def stand_in(tmp_path) -> Path:
    return write_stand_in(tmp_path / "scripts")


def write_stand_in(folder: Path) -> Path:
    """A folder with the stand-in as a script and as play.py, and the checkpoint it begins with."""
    folder.mkdir()
    for name in ("trainer", "play"):
        shutil.copyfile(ROOT / "tests" / "population_program.py", folder / f"{name}.py")
    torch.save(checkpoint(0.0), folder / "checkpoint.pt")
    return folder


def checkpoint(value: float) -> dict:
    torch.manual_seed(int(value))
    group = {"lr": 1e-3 * (1 + value), "betas": (0.9, 0.999), "params": [0]}
    moments = {"exp_avg": torch.full((2,), value), "step": torch.tensor(3.0)}
    return {
        "agent": {"weight": torch.full((2,), value), "count": torch.tensor(int(value))},
        "target": {"weight": torch.full((2,), 2 * value)},
        "optimizer": {"state": {0: moments}, "param_groups": [group]},
        "workers": {"episode": torch.full((2,), value)},
        "replay": {"obs": torch.full((2,), value)},
        "run": {"step": 7, "random": [torch.get_rng_state()]},
        "pending_evaluations": [(1, {})],
    }


def drive(program: str, root: Path, flags: str, words: str = "") -> str:
    """`python algos/{program}.py` in this process, where torch is imported -> what it says."""
    words = [f"algos/{program}.py", "--root", str(root), *flags.split(), "--", *words.split()]
    with (
        contextlib.redirect_stdout(io.StringIO()) as said,
        mock.patch.object(sys, "argv", words),
        mock.patch.object(sys, "excepthook", sys.excepthook),
        mock.patch.object(signal, "signal"),
    ):
        runpy.run_path(str(ROOT / "algos" / f"{program}.py"), run_name="__main__")
    return said.getvalue()


def begin(program: str, root: Path, flags: str, words: str = "", **options) -> subprocess.Popen:
    """The same as a process of its own, which can be killed."""
    command = [sys.executable, str(ROOT / "algos" / f"{program}.py"), "--root", str(root)]
    command += [*flags.split(), "--", *words.split()]
    out = open(root.with_suffix(".out"), "ab")
    options = {"cwd": ROOT, "stdout": out, "stderr": out, "start_new_session": True} | options
    return subprocess.Popen(command, **options)


def finish(process: subprocess.Popen, root: Path, code: int = 0) -> str:
    process.wait(PATIENCE)
    said = root.with_suffix(".out").read_text()
    assert process.returncode == code, said
    assert "Traceback" not in said, said
    return said


def kill(driver: subprocess.Popen, root: Path) -> None:
    driver.kill()
    driver.wait()
    wait_for(lambda: not processes_of(root), "the end of what the driver has started")


def wait_for(condition, what: str):
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, f"after {PATIENCE} s: {what}"
        time.sleep(0.01)
    return found


def journal(root: Path, event: str | None = None) -> list[dict]:
    path = root / "journal.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]
    return [line for line in lines if event in (None, line["event"])]


def agents(root: Path) -> dict[str, Agent]:
    folders = sorted((root / "agents").iterdir())
    return {x.name: Agent(**json.loads((x / "agent.json").read_text())) for x in folders}


def processes_of(root: Path, program: str = "") -> list[int]:
    """Those, but for drivers, whose command line names something in this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_text().split("\0")
            except OSError:  # it ended meanwhile
                continue
            inside = any(word.startswith(f"{root}/") for word in words)
            if inside and (not program or any(word.endswith(program) for word in words)):
                found.append(int(entry.name))
    return found


def assert_every_segment_counts_once(root: Path) -> None:
    """agents/, journal and lineage.csv agree; every score follows from the parent's."""
    found = agents(root)
    assert sorted(x["id"] for x in journal(root, "published")) == sorted(found)
    with open(root / "lineage.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == sorted(found)
    for agent in found.values():
        parent = found.get(agent.parent)
        before, step = (parent.score, parent.step) if parent else (0.0, 0)
        gain = (agent.step - step) * agent.flags.get("learning_rate", 1.0)
        assert agent.score == pytest.approx(before + gain)
        assert agent.step == agent.pause_at > step
    assert not list((root / "flight").glob("*.json"))


def agent(name: str, score: float, error: float = 0.0, **more) -> Agent:
    facts = {"parent": "", "script": "ppo", "flags": {}, "seed": 0, "pause_at": 1, "step": 1} | more
    return Agent(name, score=score, error=error, **facts)


# Selection.


def test_better_means_by_more_than_the_error_of_the_gap():
    assert is_better(agent("a", 10, 3), agent("b", 4.9, 4))  # the error of the gap is 5
    assert not is_better(agent("a", 10, 3), agent("b", 5.1, 4))
    assert not is_better(agent("a", 10), agent("b", 10))


def select(scores: list[tuple[float, float] | None], generation: int = 1, **options):
    members = [x and agent(str(i), *x) for i, x in enumerate(scores)]
    parents = generations.select(members, generation, generations.Args(**options))
    return [int(parent.id) * (-1 if copied else 1) for parent, copied in parents]


def test_the_best_replace_who_is_worse_by_more_than_the_error():
    scores = [(1, 0), (50, 0), (99, 2), (100, 2), (3, 200), (2, 0), (97, 0), (98, 1)]
    # two survivors, 3 and 2, in turn; 4's error is too large; 6 is worse than 3 (by 3 > 2), 7 not
    assert select(scores) == [-3, -2, 2, 3, 4, -3, 6, 7]
    assert select(scores, survivors=0.125) == [-3, -3, 2, 3, 4, -3, -3, 7]
    assert select([(5, 0), (10, 0), (1, 0), (0, 0)], survivors=0.5) == [0, 1, -1, 0]
    failed = [None, None, (5, 0), (9, 0), (1, 0), (2, 0), None, None]  # two of eight survive
    assert select(failed) == [-3, -2, 2, 3, -3, -2, -3, -2]
    assert select([(5, 0), None, (6, 9)]) == [0, -2, 2], "one that failed is replaced at any rate"
    assert select([(1, 0), (1, 0), (9, 0), (2, 0)], 1, slow=5) == [-2, 1, 2, 3]
    assert select([(1, 0), (1, 0), (9, 0), (2, 0)], 5, slow=5) == [-2, -2, 2, -2]


def test_how_the_generator_draws():
    board = [agent(str(score), score) for score in range(8)]
    args = {name: tournament.Args(strategy=name) for name in ("best-of-k", "softmax", "fresh")}
    args["truncation"] = tournament.Args(strategy="truncation")
    many = {
        name: [tournament.draw(board, args[name], random.Random(seed)) for seed in range(4000)]
        for name in args
    }
    assert set(many["fresh"]) == {None}
    assert {x.score for x in many["truncation"]} == {6, 7}
    drawn = {name: [x and x.score for x in many[name]] for name in args}
    share = {name: drawn[name].count(7) / 4000 for name in args}
    assert share["best-of-k"] == pytest.approx(3 / 8, abs=0.03)  # it is among three of eight
    assert min(x.score for x in many["best-of-k"]) == 2
    spread = math.sqrt(sum((x - 3.5) ** 2 for x in range(8)) / 8)
    odds = [math.exp(x / spread) for x in range(8)]
    assert share["softmax"] == pytest.approx(odds[7] / sum(odds), abs=0.03)
    assert tournament.draw([], args["softmax"], random.Random(0)) is None


def test_factors_keep_a_hyperparameter_in_its_limits():
    assert scaled(1e-3, 1.25, None) == 1.25e-3
    assert scaled(0.99, 1.25, (0, 1)) == 0.9875  # γ: its distance from 1
    assert scaled(10, 0.8, (1, None)) == 8 and scaled(1, 0.4, (1, None)) == 1
    assert scaled(9.0, 1.25, (0, 10)) == 10
    assert scaled(2, 1.25, (1, None)) == 3 and scaled(2, 0.8, (1, None)) == 1  # not 2 again
    assert scaled(0.005, 0.8, (0, 1)) == 0.004 and scaled(0.005, 1.25, (0, 1)) == 0.00625  # τ
    assert scaled(0.9999, 0.5, (0, 1)) == 0.99995


def test_a_score_is_of_episodes_that_nobody_trained_on(tmp_path):
    words, output = scoring(agent("a", 0, seed=2**29 - 1), tmp_path, tmp_path, SCORE, 20)
    assert 2**30 <= int(words[-1]) < FRESH and words[-3] == "20"
    words, _ = scoring(agent("a", 0, seed=2**29 - 1), tmp_path, tmp_path, FRESH, 20)
    assert FRESH <= int(words[-1]) < 2**31
    Path(output).write_text(json.dumps({"step": 5, "returns": [1.0, 3.0, 5.0]}))
    error = 2 / math.sqrt(3)  # the sample standard deviation, by the root of their number
    assert read_score(Path(output)) == {"score": 3, "error": error, "episodes": 3, "step": 5}
    Path(output).write_text('an environment prints\n{"step": 5, "returns": [1.0, 3.0, 5.0]}\n')
    assert read_score(Path(output))["score"] == 3
    Path(output).write_text('{"step": 5, "returns": [1.0, NaN]}')
    assert read_score(Path(output)) is None
    Path(output).write_text('an environment prints {"step": 5}')
    assert read_score(Path(output)) is None


def test_generations_with_known_scores(stand_in, tmp_path):
    """Five generations of four: who descends from whom follows from the learning rates."""
    root, flags = tmp_path / "known", f"--algo {stand_in}/trainer.py --env Known --agents 4"
    said = drive("generations", root, f"{flags} --total-steps 500 --period 100")
    found = agents(root)
    assert len(found) == 20
    assert found["00000"].flags == {"learning_rate": 2.0}  # of TUNED, for the first one
    assert all(1 <= x.flags["learning_rate"] <= 4 for x in list(found.values())[:4])
    assert_every_segment_counts_once(root)
    kept = {x.id for x in found.values() if (root / "agents" / x.id / "checkpoint.pt").exists()}
    assert kept == {x.id for x in found.values() if x.generation > 3}  # of a size, with its buffer
    for generation in range(2, 6):
        now = [x for x in found.values() if x.generation == generation]
        before = {x.member: x for x in found.values() if x.generation == generation - 1}
        expected = generations.select([before[i] for i in range(4)], generation, generations.Args())
        for child, (parent, copied) in zip(now, expected, strict=True):
            assert child.parent == parent.id
            ratio = child.flags["learning_rate"] / parent.flags["learning_rate"]
            assert min(abs(ratio - x) for x in ((0.8, 1.25) if copied else (1,))) < 1e-3
    assert len({x.seed for x in found.values()}) == 20
    best = max(found.values(), key=lambda x: x.score)
    assert json.loads((root / "best" / "agent.json").read_text())["id"] == best.id
    assert (root / "best" / "best.pt").exists() and (root / "best" / "args.json").exists()
    (again,) = journal(root, "rescored")
    assert again["id"] == best.id and again["episodes"] == 100
    assert f"Best: agent {best.id}, {best.score:.1f} ± 0.0 over 20 episodes" in said
    before = journal(root)
    drive("generations", root, f"{flags} --total-steps 500 --period 100")  # all is done
    assert journal(root) == before and len(agents(root)) == 20
    (root / "agents" / ".DS_Store").touch()  # of a file manager
    shutil.rmtree(root / "agents" / "00000")  # of a generation that is over
    drive("generations", root, f"{flags} --total-steps 500 --period 100")
    assert journal(root) == before


def test_noise_replaces_nobody(stand_in, tmp_path):
    """The same scores with errors larger than every gap."""
    root = tmp_path / "noisy"
    flags = f"--algo {stand_in}/trainer.py --env Known --agents 4 --total-steps 300 --period 100"
    drive("generations", root, flags, "--noise 100000")
    found = agents(root)
    assert len(found) == 12 and found["00003"].error == pytest.approx(1e5 / math.sqrt(19))
    for child in list(found.values())[4:]:
        assert child.member == found[child.parent].member


def test_a_tournament_with_known_scores(stand_in, tmp_path):
    root, flags = tmp_path / "t", f"--algos {stand_in}/trainer.py --env Known"
    flags += " --agents 8 --cpus 0.25"
    drive("tournament", root, f"{flags} --total-steps 250 --period 50")
    found = agents(root)
    assert len(found) == 40
    assert_every_segment_counts_once(root)
    replaced = {line["id"]: line["by"] for line in journal(root, "replaced")}
    assert replaced, "no agent was replaced: nothing was tested"
    for worse, better in replaced.items():
        assert is_better(found[better], found[worse])
        assert found[better].pause_at == found[worse].pause_at  # at equal training
        assert worse not in {x.parent for x in found.values()}
    independent = tmp_path / "independent"
    drive("tournament", independent, f"{flags} --total-steps 200 --period 100 --strategy fresh")
    assert not journal(independent, "replaced")
    chains = [x.parent for x in agents(independent).values() if x.parent]
    assert len(chains) == len(set(chains)) == 8


@pytest.mark.parametrize("strategy", ["best-of-k", "fresh"])
def test_the_slot_of_an_agent_at_its_end_is_nobody_elses(strategy):
    """Of agents whose speeds differ each gets its share of the segments."""
    args = tournament.Args(agents=8, total_steps=100, strategy=strategy)
    waiting, speeds = {}, random.Random(1)
    population = mock.Mock(agents={}, flights={}, count=0, period=10, done=0)
    population.journal.of.return_value = population.journal.failures.return_value = []
    population.random = lambda *about: random.Random(repr(about))
    population.pool.slots.return_value = 8

    def begin(parent: Agent | None) -> None:
        name, at = f"{population.count:05}", (parent.pause_at if parent else 0) + 10
        own = (parent and parent.seed) or speeds.uniform(0.7, 1)  # the time of a segment
        child = agent(name, 0, 1, parent=parent.id if parent else "", pause_at=at, seed=own)
        population.flights[name], population.count = child, population.count + 1
        waiting[name] = waiting.get(child.parent, 0) + own

    def work() -> None:
        name = min(population.flights, key=waiting.get)
        ended = population.flights.pop(name)
        ended.step = ended.pause_at
        population.agents[name] = ended
        population.done = population.count - len(population.flights)

    population.fresh = lambda algo: begin(None)
    population.child = lambda parent, perturbed: begin(parent)
    population.work = work
    tournament.compete(population, args)
    ends = [one for one in population.agents.values() if one.step == 100]
    assert len(ends) == 8 == sum(not one.parent for one in population.agents.values())
    assert population.count == 80


def test_the_oldest_goes_on_unless_an_equally_trained_one_is_better():
    """One failure of a descendant is not held against an agent."""
    oldest, better = agent("00000", 10, pause_at=50), agent("00001", 20, pause_at=50)
    later = agent("00002", 100, pause_at=60)
    everyone = {one.id: one for one in (oldest, better, later)}
    population = mock.Mock(agents=everyone, flights={}, count=5)
    population.journal.of.return_value = []
    population.journal.failures.return_value = [{"parent": "00000"}, {"parent": "00001"}]
    population.random.return_value = random.Random(0)
    tournament.generate(population, tournament.Args(agents=3, total_steps=100))
    population.child.assert_called_once_with(better, True)
    population.journal.note.assert_called_once_with("replaced", id="00000", by="00001")


def test_the_winner_is_scored_again_on_fresh_episodes(tmp_path):
    (tmp_path / "flight").mkdir()
    population = mock.Mock(root=tmp_path, args=generations.Args(eval_episodes=20))
    population.best.return_value, population.journal.of.return_value = agent("00000", 1), []
    population.pool.wait.return_value = {"again": 1}  # it fails
    with pytest.raises(UserError, match="could not be scored again"):
        Population.finish(population)
    _, ((words, _),) = population.pool.start.call_args.args
    assert int(words[-1]) >= FRESH and words[-3] == "100"


def test_an_agent_whose_descendants_fail_replaces_nobody():
    """The best one diverges after its score: what goes on from it fails."""
    best, weaker = agent("00000", 100, pause_at=50), agent("00001", 10, pause_at=50)
    population = mock.Mock(agents={"00000": best, "00001": weaker}, flights={}, count=4)
    population.journal.of.return_value = []
    population.journal.failures.return_value = [{"parent": "00000"}] * 2
    population.random.return_value = random.Random(0)
    tournament.generate(population, tournament.Args(agents=2, total_steps=100))
    population.child.assert_called_once_with(weaker, False)
    population.journal.note.assert_not_called()


@pytest.mark.parametrize("content", [b"5\n", b"\xff\n"])
def test_a_damaged_journal_is_one_sentence(tmp_path, content):
    (tmp_path / "journal.jsonl").write_bytes(content)
    with pytest.raises(UserError, match="is damaged"):
        Journal(tmp_path / "journal.jsonl")


def test_runs_with_different_seeds_become_one_agent(stand_in, tmp_path):
    root, flags = tmp_path / "fused", f"--algo {stand_in}/trainer.py --env Known --agents 2"
    flags += " --total-steps 200 --period 100 --fuse 2 --same-hyperparameters"
    drive("generations", root, flags)
    found = agents(root)  # networks that begin differently are not averaged
    assert [found[name].fuse for name in sorted(found)] == [1, 1, 2, 2]
    assert (
        not any(x.flags for x in found.values())
        and (root / "agents" / "00003" / "checkpoint.pt").exists()
    )
    assert_every_segment_counts_once(root)


def test_the_reason_of_a_failure_is_told_from_its_beginning(tmp_path):
    (tmp_path / "run0.log").write_text(f"step 1\n--env Nonsense: {'no such name, ' * 100}\n")
    assert last_line(tmp_path).startswith("--env Nonsense: no such name")


# Run folders.


def save_run(folder: Path, value: float) -> Path:
    folder.mkdir()
    torch.save(checkpoint(value), folder / "checkpoint.pt")
    torch.save({"script": "ppo", "agent": checkpoint(value)["agent"]}, folder / "last.pt")
    args = {"learning_rate": 1e-3, "gamma": 0.9, "seed": 3}
    (folder / "args.json").write_text(json.dumps({"script": "ppo", "args": args}))
    (folder / "metrics.csv").write_text("step,seconds,tag,value\n")
    return folder


def test_fusion_is_the_true_mean(tmp_path):
    runs = [save_run(tmp_path / f"run{value}", value) for value in (1.0, 2.0, 6.0)]
    fuse(runs, tmp_path / "fused")
    fused = torch.load(tmp_path / "fused" / "checkpoint.pt", weights_only=True)
    first = checkpoint(1.0)
    assert fused["agent"]["weight"].tolist() == [3, 3]  # not 1/4, 1/4, 1/2
    assert fused["target"]["weight"].tolist() == [6, 6]
    assert fused["optimizer"]["state"][0]["exp_avg"].tolist() == [3, 3]
    assert fused["optimizer"]["state"][0]["step"] == 3
    group = fused["optimizer"]["param_groups"][0]
    assert group["lr"] == pytest.approx(4e-3) and group["betas"] == (0.9, 0.999)
    assert fused["agent"]["count"] == 1, "an integer has no mean"
    assert fused["workers"]["episode"].tolist() == fused["replay"]["obs"].tolist() == [1, 1]
    assert torch.equal(fused["run"]["random"][0], first["run"]["random"][0])
    policy = torch.load(tmp_path / "fused" / "last.pt", weights_only=True)
    assert policy["agent"]["weight"].tolist() == [3, 3]
    (runs[1] / "last.pt").write_bytes(b"torn")
    assert "is damaged" in fuse(runs, tmp_path / "again") and not (tmp_path / "again").exists()


def test_a_descendant_has_other_random_numbers_and_its_own_learning_rate(tmp_path):
    parent = save_run(tmp_path / "parent", 1.0)
    before = {path.name: path.read_bytes() for path in parent.iterdir()}
    descend(parent, tmp_path / "child", {"learning_rate": 3e-3}, seed=11)
    saved = torch.load(tmp_path / "child" / "checkpoint.pt", weights_only=True)
    assert saved["agent"]["weight"].tolist() == [1, 1]
    assert saved["optimizer"]["param_groups"][0]["lr"] == pytest.approx(6e-3)  # 2e-3, times three
    assert saved["workers"] == {} and saved["pending_evaluations"] == []
    torch.manual_seed(11)
    assert torch.equal(saved["run"]["random"][0], torch.get_rng_state())
    args = json.loads((tmp_path / "child" / "args.json").read_text())["args"]
    assert (args["learning_rate"], args["gamma"], args["seed"]) == (3e-3, 0.9, 11)
    assert before == {path.name: path.read_bytes() for path in parent.iterdir()}
    started = json.loads((parent / "args.json").read_text())
    started["args"]["learning_rate"] = 0.0
    (parent / "args.json").write_text(json.dumps(started))
    descend(parent, tmp_path / "still", {"learning_rate": 0.0}, seed=11)
    saved = torch.load(tmp_path / "still" / "checkpoint.pt", weights_only=True)
    assert saved["optimizer"]["param_groups"][0]["lr"] == 0
    (parent / "checkpoint.pt").write_bytes(before["checkpoint.pt"][:-100])
    with pytest.raises(ValueError, match="damaged"):
        descend(parent, tmp_path / "another", {}, seed=12)
    assert not (tmp_path / "another").exists()


# Faults.


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


# A segment of agent 00001 stops, as by Ctrl-Z, before its second checkpoint is in place.
PAUSE = """
    import itertools, os, signal, sys
    count, replace = itertools.count(1), os.replace
    def pausing(source, target):
        if str(target).endswith("/00001/run0/checkpoint.pt") and next(count) == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        replace(source, target)
    if any(word.endswith("ppo.py") for word in sys.orig_argv):
        os.replace = pausing
"""


def paused(run: Path) -> list[int]:
    """Processes of a run that have stopped themselves."""
    found = processes_of(run.parent, "ppo.py")
    with contextlib.suppress(OSError):  # one ended meanwhile
        states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2] for pid in found]
        return [pid for pid, state in zip(found, states, strict=True) if state.split()[0] == "T"]
    return []


def test_two_kills_change_no_weight_and_neither_does_a_replay(tmp_path):
    """ppo.py itself: a member is killed, then the driver; --replay ends with the same weights."""
    flags = (
        "--algo ppo --env CartPole --agents 1 --total-steps 5000 --period 2500 --eval-episodes 2"
    )
    words = "--num-envs 4 --num-steps 16 --minibatch-size 32 --epochs 2 --hidden-size 8"
    words += " --checkpoint-every 250"
    root = tmp_path / "root"
    driver = begin("generations", root, flags, words, **sabotaged(tmp_path / "pause", PAUSE))
    run = root / "flight" / "00001" / "run0"
    (trainer,) = wait_for(lambda: paused(run), "a pause in the second segment")
    os.kill(trainer, signal.SIGKILL)
    wait_for(lambda: journal(root, "killed"), "the journal's line of it")
    (again,) = wait_for(lambda: paused(run), "a pause after its second start")
    assert again != trainer
    kill(driver, root)
    drive("generations", root, flags, words)
    assert [x["id"] for x in journal(root, "published")] == ["00000", "00001"]
    said = drive("generations", root, f"{flags} --replay 00001", words)
    folders = [root / "agents" / "00001", root / "replay" / "00001" / "agents" / "00001"]
    assert f"Trained again: {folders[1]}" in said
    stormy, calm = (torch.load(folder / "checkpoint.pt") for folder in folders)
    for name in ("agent", "optimizer", "workers"):
        assert same(stormy[name], calm[name]), name
    assert stormy["run"]["step"] == calm["run"]["step"] >= 5000
    assert same(stormy["run"]["random"], calm["run"]["random"])
    # What people do with it: play.py takes best/, TensorBoard has a folder for each member.
    winner = agents(root)[journal(root, "rescored")[0]["id"]]
    best = play.load(play.Args(root / "best"))
    assert (best["script"], best["step"]) == ("ppo", winner.step)
    assert all(list(folder.glob("events.out.tfevents.*")) for folder in (root / "agents").iterdir())
    assert (root / "descent.png").stat().st_size > 1000


def test_a_replay_counts_its_own_segments(stand_in, tmp_path, monkeypatch):
    """Of an agent that was not the first one: their numbers say nothing about how many ended."""
    root = tmp_path / "root"
    flags = f"--algo {stand_in}/trainer.py --env Known --agents 3 --total-steps 200 --period 100"
    drive("generations", root, flags, "--noise 100000")  # nobody is replaced
    clock, wait, said = [0.0], Here.wait, []

    def slowly(pool: Here, seconds: float) -> dict[str, int]:
        """Every 100 seconds something ends, but nothing in the first 100."""
        clock[0] += 100
        ended: dict[str, int] = {}
        while said and not ended:
            ended = wait(pool, seconds)
        return ended

    monkeypatch.setattr(time, "time", lambda: clock[0])
    monkeypatch.setattr(Here, "wait", slowly)
    monkeypatch.setattr(Population, "show", lambda self, now=False: said.append(table(self)))
    drive("generations", root, f"{flags} --replay 00005", "--noise 100000")
    assert sorted(agents(root / "replay" / "00005")) == ["00002", "00005"]
    left = [re.findall("after (.*); about (.*) left", text) for text in said]
    assert left == [[], [("3m20s", "3m20s")], [("5m00s", "0m00s")], [("5m00s", "0m00s")]]


# Killed at each of its moments by itself: `os.rename` publishes, `os.fsync` is the journal's.
KILL_AT = """
    import itertools, os, signal, sys
    count, function = itertools.count(1), os.{name}
    def fatal(*arguments, **options):
        if {after}:
            result = function(*arguments, **options)
        if next(count) == {number}:
            os.kill(os.getpid(), signal.SIGKILL)
        return result if {after} else function(*arguments, **options)
    if any(word.endswith("generations.py") for word in sys.orig_argv):
        os.{name} = fatal
"""


def sabotaged(folder: Path, code: str) -> dict:
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(textwrap.dedent(code))
    return {"env": {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}}


def test_a_driver_killed_anywhere_loses_nothing(stand_in, tmp_path):
    """Killed again and again, in the middle of whatever it does, it ends as the undisturbed one."""
    flags = f"--algo {stand_in}/trainer.py --env Known --agents 4 --total-steps 400 --period 100"
    drive("generations", tmp_path / "calm", flags)
    root, seen = tmp_path / "killed", 0
    for number, moment in enumerate(
        (
            ("rename", False, 1),
            ("rename", True, 1),  # published, but the journal does not know
            ("fsync", False, 2),
            ("fsync", True, 4),
            ("unlink", False, 2),
        )
    ):
        code = KILL_AT.format(**dict(zip(("name", "after", "number"), moment, strict=True)))
        driver = begin("generations", root, flags, **sabotaged(tmp_path / str(number), code))
        finish(driver, root, -signal.SIGKILL)
    for published in (7, 11):
        driver = begin("generations", root, flags)
        wait_for(lambda least=published: len(journal(root, "published")) >= least, "agents")
        time.sleep(random.Random(published).uniform(0, 0.05))
        kill(driver, root)
        before, seen = seen, len(journal(root, "published"))
        assert seen >= max(before, published)
    torn = root / "journal.jsonl"
    torn.write_text(torn.read_text() + '{"time": 1, "eve')
    drive("generations", root, flags)
    assert_every_segment_counts_once(root)
    facts = ("id", "parent", "flags", "seed", "score", "generation", "member")
    ends = [
        [[getattr(x, fact) for fact in facts] for x in agents(end).values()]
        for end in (tmp_path / "calm", root)
    ]
    assert ends[0] == ends[1]


def test_fewer_cores_stop_the_weakest_and_more_start_them_again(stand_in, tmp_path):
    if CORES < 2:
        pytest.skip("needs two cores")
    root = tmp_path / "elastic"
    flags = f"--algos {stand_in}/trainer.py --env Known --agents 4 --total-steps 300 --period 100"
    flags += f" --segments 12 --cpus {CORES / 4}"
    (stand_in / "hold").touch()
    driver = begin("tournament", root, flags, "--hold 100")
    wait_for(lambda: len(journal(root, "published")) == 4, "the first agents")
    wait_for(lambda: len(processes_of(root, "trainer.py")) == 4, "four in training")
    everything = os.sched_getaffinity(driver.pid)
    os.sched_setaffinity(driver.pid, sorted(everything)[: CORES // 2])
    wait_for(lambda: len(journal(root, "stopped")) == 4 - int(CORES // 2 / (CORES / 4)), "stops")
    stopped = {line["id"] for line in journal(root, "stopped")}
    parents = agents(root)
    flights = {x.stem: json.loads(x.read_text()) for x in (root / "flight").glob("*.json")}
    scores = {name: parents[flight["parent"]].score for name, flight in flights.items()}
    assert max(scores[x] for x in stopped) <= min(scores[x] for x in scores.keys() - stopped)
    os.sched_setaffinity(driver.pid, everything)
    wait_for(lambda: len(processes_of(root, "trainer.py")) == 4, "four in training again")
    (stand_in / "hold").unlink()
    finish(driver, root)
    assert len(agents(root)) == 12
    assert stopped <= agents(root).keys(), "a segment that was stopped was lost"
    assert_every_segment_counts_once(root)


def test_what_is_damaged_is_left_out(stand_in, tmp_path):
    root = tmp_path / "damaged"
    flags = f"--algo {stand_in}/trainer.py --env Known --agents 4 --total-steps 400 --period 100"
    flags += f" --cpus {CORES / 4}"
    (stand_in / "hold").touch()
    driver = begin("generations", root, flags, "--hold 200")
    wait_for(lambda: len(list((root / "flight").glob("*/run0"))) == 4 and
             len(journal(root, "published")) == 8, "the third generation")  # fmt: skip
    kill(driver, root)
    (stand_in / "hold").unlink()
    first = [x for x in agents(root).values() if x.generation == 1]
    best = max((x for x in agents(root).values() if x.generation == 2), key=lambda x: x.score)
    (root / "agents" / first[0].id / "agent.json").write_text("{")
    damaged = root / "agents" / best.id / "checkpoint.pt"
    damaged.write_bytes(damaged.read_bytes()[:-50])
    torn, *_ = sorted((root / "flight").glob("*.json"))
    torn.write_text("")
    for folder in (root / "flight").glob("0*/"):
        shutil.rmtree(folder)  # so that they begin by reading the damaged one
    said = drive("generations", root, flags, "--hold 200")
    corrupt = {line["id"] for line in journal(root, "corrupt")}
    assert corrupt == {first[0].id, best.id}
    assert f"{root / 'agents' / first[0].id} is damaged" in said
    for name in corrupt - {best.id}:
        shutil.rmtree(root / "agents" / name)
    living = [x for x in agents(root).values() if x.generation > 2]
    assert len(living) == 8
    assert all(x.parent not in corrupt for x in living)


def test_nan_is_journalled_and_replaced_and_never_ranked(stand_in, tmp_path):
    """Of a third of the seeds the loss is NaN; and of low values the returns are."""
    flags = f"--algo {stand_in}/trainer.py --env Known --agents 6 --total-steps 400 --period 100"
    root = tmp_path / "nan"
    drive("generations", root, flags, "--fails 33 --nan-below 205")
    failed = journal(root, "failed")
    assert any("losses/policy is nan" in line["why"] for line in failed)
    assert any("returns are not finite" in line["why"] for line in failed)
    assert not {line["id"] for line in failed} & agents(root).keys()
    assert all(math.isfinite(x.score) for x in agents(root).values())
    assert_every_segment_counts_once(root)
    for generation in range(1, 5):
        count = sum(x.generation == generation for x in agents(root).values())
        assert count + sum(line["generation"] == generation for line in failed) == 6
    logs = {path.name.split(".")[0] for path in (root / "failed").iterdir()}
    assert logs == {line["id"] for line in failed}


@pytest.mark.parametrize("program", ["generations", "tournament"])
def test_after_a_fault_that_has_passed_the_same_command_goes_on(program, stand_in, tmp_path):
    """As when a package is missing for a while: each segment fails at once."""
    root, real, count = tmp_path / "fault", population_agents.training, 0
    algo = "--algo" if program == "generations" else "--algos"
    flags = f"{algo} {stand_in}/trainer.py --env Known --agents 4 --total-steps 400 --period 100"
    broken = [sys.executable, "-c", "raise SystemExit('no module')"]

    def training(*args) -> tuple:
        nonlocal count
        command, output = real(*args)
        count += 1
        return broken if count > 8 else command, output

    said = "the last 8 segments" if program == "tournament" else "all agents of generation 3"
    said += f" failed, see {root}/failed: exit status 1: no module; the same"
    with (
        mock.patch.object(population_agents, "training", training),
        pytest.raises(UserError, match=said),
    ):
        drive(program, root, flags)
    assert len(agents(root)) == 8 and len(journal(root, "failed")) >= 4
    drive(program, root, flags)
    assert sum(x.step == 400 for x in agents(root).values()) == 4
    assert_every_segment_counts_once(root)


def test_a_segment_that_failed_is_made_up_for(stand_in, tmp_path):
    """Otherwise another agent would get to --total-steps by one segment less."""
    flags = f"--algos {stand_in}/trainer.py --env Known --agents 4 --total-steps 400 --period 100"
    root = tmp_path / "failures"
    drive("tournament", root, f"{flags} --strategy fresh", "--fails 15")
    assert journal(root, "failed") and len(agents(root)) == 16
    assert sum(x.step == 400 for x in agents(root).values()) == 4


def test_a_full_disk_is_one_sentence_and_the_same_command_goes_on(stand_in, tmp_path):
    root, fsync = tmp_path / "full", os.fsync
    flags = f"--algo {stand_in}/trainer.py --env Known --agents 2 --total-steps 300 --period 100"

    def full(file: int) -> None:
        name = os.readlink(f"/proc/self/fd/{file}")
        if name.endswith("journal.jsonl") and os.fstat(file).st_size > 300:
            raise OSError(28, "No space left on device")
        fsync(file)

    said = f"--root {root}: No space left on device; the same command goes on"
    with mock.patch.object(os, "fsync", full), pytest.raises(UserError, match=said):
        drive("generations", root, flags)
    assert 1 <= len(agents(root)) < 6
    drive("generations", root, flags)
    assert_every_segment_counts_once(root)
    assert len(agents(root)) == 6


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_and_the_same_command_goes_on(number, stand_in, tmp_path):
    root = tmp_path / "stopped"
    flags = f"--algo {stand_in}/trainer.py --env Known --agents 2 --total-steps 300 --period 100"
    (stand_in / "hold").touch()
    driver = begin("generations", root, flags, "--hold 100")
    wait_for(lambda: len(processes_of(root, "trainer.py")) == min(2, CORES)
             and len(journal(root, "published")) == 2, "the second generation")  # fmt: skip
    said = f"--root {root}: another process works in it"
    with mock.patch.object(files, "LOCK_SECONDS", 0), pytest.raises(UserError, match=said):
        drive("generations", root, flags, "--hold 100")
    driver.send_signal(number)
    assert "The same command goes on." in finish(driver, root, -signal.SIGINT)
    assert not processes_of(root)
    (stand_in / "hold").unlink()
    text = (root / "journal.jsonl").read_text()  # as if the computer had been off for a year
    (root / "journal.jsonl").write_text(re.sub(r'"time": (\d)', r'"time": 1', text))
    said = drive("generations", root, flags, "--hold 100")
    assert_every_segment_counts_once(root)
    assert re.search(r"after \dm\d\ds; about \dm\d\ds left", said)


# Errors, and what segments cost.


def test_mistakes_are_one_sentence(stand_in, tmp_path, capsys):
    root, known = tmp_path / "root", f"--algo {stand_in}/trainer.py --env Known --agents 1"
    known += " --total-steps 100 --period 100"
    drive("generations", root, known)
    (root / "agents" / "00000.bak").mkdir()  # of no agent: it is not looked at
    drive("generations", root, known)
    new = tmp_path / "new"

    def fails(flags: str, said: str, words: str = "", folder=new, program="generations") -> None:
        with pytest.raises(UserError, match=re.escape(said)):
            drive(program, folder, flags, words)
        assert folder is not new or not new.exists()

    fails(f"{known} --seed 5", f"--seed was 0 when {root} began and is now 5", "", root)
    fails(known, "what follows -- was [] when", "--gamma 0.5", root)
    fails(f"{known} --replay 7", "--replay is 7, but", "", root)
    typo = tmp_path / "typo"
    fails(f"{known} --replay 7", f"--root {typo} has no population to --replay", "", typo)
    assert not typo.exists()
    fails("--algo nonsense", "the algorithm is nonsense, but")
    fails("--algo play", "is not a script that trains")
    fails("--agents 0", "--agents is 0; allowed is at least 1")
    fails("--fuse 0", "--fuse is 0; allowed is from 1 to 100")
    fails("--slow 0", "--slow is 0; allowed is at least 1")
    fails("--survivors 2", "--survivors is 2.0; allowed is from 0 to 1")
    fails("--k 0", "--k is 0; allowed is at least 1", program="tournament")
    fails("--cpus 0", "--cpus is 0.0; allowed is at least 0.01")
    fails("--total-steps 5 --period 6", "--period is 6; allowed is from 0 to 5")
    fails("--period 999", "--period is 999, but a script collects 4096 steps at a time")
    fails("--eval-episodes 1", "--eval-episodes is 1; allowed is from 2")
    fails("--perturb speed", "--perturb is speed, but ppo.py has no such number")
    for name, value in (("seed", 0), ("hidden_size", 64), ("num_envs", 0), ("entropy_coef", 0.0)):
        why = f"--perturb is {name}, here {value}, which cannot differ by agent"
        fails(f"--perturb {name}", why)
    fails("--algos", "--algos is empty; name at least one script", program="tournament")
    tournament = known.replace("--algo ", "--algos ")
    was = f"the program was generations when {root} began"
    fails(tournament, f"{was} and is now tournament", "", root, "tournament")
    other = tmp_path / "other"
    (other / "flight" / "diary").mkdir(parents=True)
    fails(known, f"--root {other} has {other}/flight/diary, not of a population", "", other)
    assert (other / "flight" / "diary").exists()
    (other / "flight" / "diary").rename(other / "args.json")  # a run's folder
    fails(known, f"--root {other} has {other}/args.json, not of a population", "", other)
    file = stand_in / "trainer.py"
    fails(known, f"--root {file}: Not a directory ({file}/agents)", "", file)
    lines = ROOT / "benchmark" / "lines.py"
    fails(f"--algo {lines}", f"{lines} needs play.py beside it, which scores its agents")
    (stand_in / "other.py").write_text("")
    fails(f"--algo {stand_in}/other.py", "other.py, which has no Args and TUNED")
    fails("", "--total-steps stands after --, but the population sets it", "--total-steps 5")
    fails(known, "--gamma is 7.0; allowed is from 0 to 1", "--gamma 7")
    fails("--cpus 1000", "--cpus 1000 --gpus 0: no room here for a run")
    with mock.patch.dict(sys.modules, ray=None):
        advice = 'pip install -e ".[cluster]"'
        fails("--cluster auto", f"--cluster needs Ray: {advice}")
    with pytest.raises(SystemExit, match="2"):
        drive("tournament", new, "--algos ppo sac --env Known", "--epochs 3")
    assert "--epochs" in (said := capsys.readouterr().err) and "sac.py" in said
    why = "losses/policy is nan at step 0: training stopped"
    said = f"generation 1 failed, see {tmp_path}/failing/failed: exit status 1: {why}; the same"
    fails(known, said, "--fails 100", tmp_path / "failing")
    said = f"the first three segments of {stand_in}/trainer.py failed, see {tmp_path}/third/failed"
    known = known.replace("--algo ", "--algos ").replace("agents 1", "agents 4")
    third = tmp_path / "third"
    fails(known, said, "--fails 100", third, "tournament")
    fails("--env Ant --perturb initial_log_std", "--perturb is initial_log_std, here -1.0, which")
    with mock.patch.object(torch.cuda, "device_count", lambda: 1):
        fails(f"{known} --gpus 1", "--gpus was 0.0 when", "--fails 100", third, "tournament")


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_damaged_settings_are_one_sentence(stand_in, tmp_path, content):
    flags = f"--algo {stand_in}/trainer.py --env Known --agents 1 --total-steps 100 --period 100"
    drive("generations", tmp_path / "root", flags)
    (tmp_path / "root" / "settings.json").write_text(content)
    with pytest.raises(UserError, match=r"settings\.json is damaged .*; name another --root"):
        drive("generations", tmp_path / "root", flags)


def test_a_best_agent_that_cannot_be_scored_again_is_trained_again_without_its_folder(
    stand_in, tmp_path
):
    root = tmp_path / "root"
    flags = f"--algo {stand_in}/trainer.py --env Known --agents 1 --total-steps 100 --period 100"
    drive("generations", root, flags)
    text = (root / "journal.jsonl").read_text()
    (root / "journal.jsonl").write_text(text[: text.index('{"time": ', text.index("published"))])
    (root / "agents" / "00000" / "state.json").unlink()
    said = f"state.json'; if {root}/agents/00000 is damaged, move it away; the same command goes on"
    with pytest.raises(UserError, match=re.escape(said)):
        drive("generations", root, flags)
    shutil.rmtree(root / "agents" / "00000")
    assert "Best: agent 00001" in drive("generations", root, flags)


THEIRS = {"script": "{theirs}/trainer.py"}, {"flags": {"env": "theirs:Env"}}, {"id": "../../x"}


@pytest.mark.parametrize("changes", THEIRS)
@pytest.mark.parametrize("replayed", [True, False])
def test_agents_of_other_scripts_flags_and_names_are_left_out(
    stand_in, tmp_path, changes, replayed
):
    """A population of somebody else is data: only the scripts of this command line are executed."""
    root, theirs = tmp_path / "root", tmp_path / "theirs"
    flags = f"--algo {stand_in}/trainer.py --env Known --agents 1 --total-steps 100 --period 100"
    drive("generations", root, flags)
    theirs.mkdir()
    for name in ("trainer.py", "play.py"):
        (theirs / name).write_text(f"open({str(theirs / 'executed')!r}, 'w')")
    agent = json.loads((root / "agents" / "00000" / "agent.json").read_text())
    agent |= {"id": "00000" if replayed else "00001"}
    agent |= json.loads(json.dumps(changes).replace("{theirs}", str(theirs)))
    place = "agents/00000/agent" if replayed else "flight/00001"
    (root / f"{place}.json").write_text(json.dumps(agent))
    if replayed:
        with pytest.raises(UserError, match="has no such agent"):
            drive("generations", root, f"{flags} --replay 00000")
        assert journal(root, "corrupt")[0]["id"] == "00000"
    else:
        assert "Best: agent 00000" in drive("generations", root, flags)
        assert len(agents(root)) == 1 and not list((root / "flight").iterdir())
    assert not (theirs / "executed").exists()


def test_who_is_killed_again_and_again_has_failed(stand_in, tmp_path):
    code = (stand_in / "trainer.py").read_text()
    dies = code.replace("sys.exit(play()", "os.kill(os.getpid(), 9); sys.exit(play()")
    (stand_in / "trainer.py").write_text(dies)
    flags = f"--algo {stand_in}/trainer.py --env Known --agents 1 --total-steps 100 --period 100"
    with pytest.raises(UserError, match="killed again and again, perhaps for lack of memory"):
        drive("generations", tmp_path / "root", flags)
    assert len(journal(tmp_path / "root", "killed")) == 3


def test_commands_end_with_who_started_them_also_without_setpriv(tmp_path):
    """macOS has none: a process of the group looks every second whether the starter lives."""
    shutil.copyfile("/bin/sleep", tmp_path / "sleep").chmod(0o755)
    program = f"""
import shutil, sys, time
shutil.which = lambda name: None
sys.path.insert(0, {str(ROOT)!r})
from algos.worker_learner.segments import launch
quick = launch(["sh", "-c", "exit 3"], {str(tmp_path / "quick.out")!r})
assert quick.wait() == 3
launch([{str(tmp_path / "sleep")!r}, "1000"], {str(tmp_path / "slow.out")!r})
time.sleep(1000)"""
    driver = subprocess.Popen([sys.executable, "-c", program])
    try:
        wait_for(lambda: processes_of(tmp_path, "sleep"), "the command")
        time.sleep(2)
        assert processes_of(tmp_path, "sleep"), "it lives as long as its starter"
    finally:
        driver.kill()
        driver.wait()
    wait_for(lambda: not processes_of(tmp_path), "its end")


def test_segments_are_started_killed_and_chained_here(tmp_path):
    pool = Here(SimpleNamespace(cpus=1, gpus=0))
    assert pool.slots() == CORES
    commands = [(["sh", "-c", f"echo {x}"], str(tmp_path / f"{x}.txt")) for x in "ab"]
    pool.start("good", commands)
    assert pool.wait(PATIENCE) == {"good": 0}
    assert (tmp_path / "a.txt").read_text() + (tmp_path / "b.txt").read_text() == "a\nb\n"
    pool.start("bad", [(["sh", "-c", "echo why >&2; exit 7"], str(tmp_path / "c.txt")), *commands])
    (tmp_path / "a.txt").unlink()
    assert pool.wait(PATIENCE) == {"bad": 7}, "the rest must not run"
    assert not (tmp_path / "a.txt").exists() and (tmp_path / "c.log").read_text() == "why\n"
    pool.start("long", [(["sleep", "1000"], str(tmp_path / "d.txt")), *commands])
    pool.start("other", [(["sh", "-c", "sleep 1000", f"{tmp_path}/x"], str(tmp_path / "e.txt"))])
    pool.stop("long")
    assert pool.wait(0.01) == {} and not (tmp_path / "a.txt").exists()
    pool.close()
    wait_for(lambda: not processes_of(tmp_path), "the end of what was started")


def test_parts_of_a_core_are_counted_as_people_do(monkeypatch):
    monkeypatch.setattr(segments, "available_cores", lambda: 7)
    for cpus, slots in ((0.07, 100), (2.0, 3), (7.01, 0)):  # 7 / 0.07 is 99.99999999999999
        assert Here(SimpleNamespace(cpus=cpus, gpus=0)).slots() == slots


def test_a_segment_whose_driver_is_gone_does_not_begin(tmp_path, monkeypatch):
    """Killed between the start of a command and the command's wish to die with it."""
    commands = [(["touch", str(tmp_path / "began")], str(tmp_path / "out.txt"))]
    assert segments.perform(commands) == 0 and (tmp_path / "began").exists()
    (tmp_path / "began").unlink()
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert segments.perform(commands) not in segments.GOOD
    assert not (tmp_path / "began").exists()


@pytest.mark.parametrize(("visible", "expected"), [(None, "0101"), ("2,7", "2727")])
def test_each_segment_has_a_gpu_of_those_that_this_process_may_use(visible, expected, monkeypatch):
    given = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(segments, "launch", lambda *_, **variables: given.append(variables))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for gpus, slots in ((1, 2), (0.6, 2), (0.5, 4), (0.4, 4)):  # no GPU has more than it holds
        assert Here(SimpleNamespace(cpus=0.01, gpus=gpus)).slots() == slots
    pool = Here(SimpleNamespace(cpus=1, gpus=0.5))
    for name in "abcd":
        pool.start(name, [(["true"], "out")])
    assert "".join(x["CUDA_VISIBLE_DEVICES"] for x in given) == expected
