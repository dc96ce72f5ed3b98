"""The scripts of benchmark/ run, and repeat nothing that is finished."""

import csv
import fcntl
import gzip
import importlib
import itertools
import json
import math
import multiprocessing
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch

BENCHMARK = Path(__file__).parent.parent / "benchmark"


def run(*arguments) -> str:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def no_compiler(tmp_path_factory, monkeypatch) -> None:
    """Long runs that are stopped at once would be compiled, which takes half a minute."""
    folder = tmp_path_factory.mktemp("bin")
    if git := shutil.which("git"):
        (folder / "git").symlink_to(git)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)


def test_returns_are_kept_once(tmp_path):
    command = [BENCHMARK / "returns.py", "--env", "CartPole", "--seeds", 1, 2]
    command += ["--runs-dir", tmp_path / "runs", "--results", tmp_path]
    flags = ["--", "--total-steps", 200, "--num-envs", 2, "--num-steps", 16]
    for finished in (0, 2):  # runs that are finished are not repeated
        assert run(*command, *flags).count("is finished, and its row") == finished
    rows = list(csv.DictReader(open(tmp_path / "returns.csv")))
    assert sorted(row["seed"] for row in rows) == ["1", "2"]
    assert all(row["steps"] == "224" and float(row["return"]) >= 8 for row in rows)
    curve = list(csv.DictReader(open(tmp_path / "curves.csv")))
    assert {row["return"] for row in curve} == {row["return"] for row in rows}
    shown = run(*command, "--table").splitlines()[2]
    assert shown.startswith("| CartPole | ppo.py --num-envs 2 --num-steps 16 | 0.22 k | 20 | ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("returns.py -- --seed 7", "--seed stands after --; this program sets it"),
        ("returns.py -- --env=Ant", "--env=Ant stands after --"),
        ("returns.py --script play", "--script is play; allowed is a2c, crossq, "),
        ("returns.py --table", ", where no returns.csv is"),
        ("populations.py --table", ", where no populations.csv is"),
        ("throughput.py --table", ", where no throughput.csv is"),
        ("throughput.py --sections nope", "--sections has nope; allowed is as_it_comes, env, "),
        ("throughput.py --sections learners --rounds 0", "--rounds is 0, --seconds 3.0; allowed"),
        ("throughput.py --sections learners --seconds 0", "--rounds is 5, --seconds 0.0; allowed"),
        ("time_to_ant.py --table", ", where no time_to_ant.csv is"),
        ("time_to_ant.py --contenders ppo play", "--contenders play: allowed are stable_"),
    ],
)
def test_mistakes_are_one_sentence(words, said, tmp_path):
    script, *words = words.split()
    command = [sys.executable, BENCHMARK / script, "--results", tmp_path, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and said in done.stderr and done.stderr.count("\n") == 1, (
        done.stderr
    )
    assert not list(tmp_path.iterdir())


def test_what_is_missing_is_said_before_anything_is_measured(throughput, time_to_ant, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != "sbx" or None)
    said = "needs sbx: pip install -e"
    with pytest.raises(SystemExit, match=f"the section as_it_comes {said}"):
        throughput.main(throughput.Options(sections=["learners", "as_it_comes"]))
    with pytest.raises(SystemExit, match=f"--contenders sbx {said}"):
        time_to_ant.main(time_to_ant.Options(contenders=["ppo", "sbx"]))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    throughput.draw([], Path("nowhere"))  # says that there is none


def test_rows_of_other_columns_are_refused(time_to_ant, tmp_path):
    rows = [{"a": "1", "b": "x, y"}]
    for more in ([], [{"a": "2", "b": ""}]):  # what is there already is not written again
        time_to_ant.append(tmp_path / "a.csv", rows + more)
    assert (tmp_path / "a.csv").read_text() == 'a,b\n1,"x, y"\n2,\n'
    with pytest.raises(SystemExit, match=r"a\.csv is a file of other columns"):
        time_to_ant.append(tmp_path / "a.csv", [{"a": "1"}])
    assert (tmp_path / "a.csv").read_text().count("\n") == 3
    with open(tmp_path / "a.csv", "a") as file:
        file.write("3,to")  # the disk was full
    with pytest.raises(SystemExit, match=r"a\.csv: its last line was written only in part"):
        time_to_ant.append(tmp_path / "a.csv", rows)


def test_the_table_of_returns(tmp_path):
    """Seed and speed make no row of their own; settings, length and version do."""
    names = "script,env,seed,steps,return,std,best,seconds,threads,parallel,commit,command"
    rows = [
        f"ppo,Hopper,{seed},{steps},{value},0,0,0,1 1,2,{commit},"
        f"python algos/ppo.py --env Hopper --seed {seed} --eval-episodes 20 {flags}"
        for seed, steps, value, commit, flags in (
            *((1, 1003520, 100, "0", ""), (2, 1003520, 300, "1", "--torch-threads 1")),
            *((3, 1003520, 400, "94941e8887-dirty", "--compile none"), (3, 300000, 7, "2", "")),
            (1, 1003520, 500, "2", "--num-steps 8"),
        )
    ]
    (tmp_path / "returns.csv").write_text("\n".join((names, *rows)) + "\n")
    _, _, *lines, _, absent = run(
        BENCHMARK / "returns.py", "--table", "--results", tmp_path
    ).splitlines()
    assert lines == [
        "| Hopper | ppo.py | 300 k | 20 | 7.00 (1) |  |  |",
        "| Hopper | ppo.py | 1 M | 20 | 400 (1) | 200 ± 141 (2) | Tianshou 2609, zoo 2410 |",
        "| Hopper | ppo.py --num-steps 8 | 1 M | 20 | 500 (1) |  | Tianshou 2609, zoo 2410 |",
    ]
    absent = set(absent.removeprefix("Not measured yet: ").removesuffix(".").split(", "))
    assert {"Ant", "Walker2d", "a2c.py"} < absent
    assert not absent & {"Hopper", "ppo.py", "StockTrading"}


def test_figure_of_the_returns(tmp_path):
    shutil.copy(BENCHMARK / "results" / "curves.csv", tmp_path)
    run(BENCHMARK / "returns.py", "--figure", "--results", tmp_path)
    assert (tmp_path / "returns.png").stat().st_size > 10_000


def test_the_readmes_hold_what_was_measured(throughput, capsys, tmp_path):
    """Whoever appends a row runs --table again and pastes what it prints."""
    results, text = BENCHMARK / "results", (BENCHMARK / "README.md").read_text()
    shutil.copy(results / "populations.csv", tmp_path)  # a figure is drawn beside it
    returns = run(BENCHMARK / "returns.py", "--table")
    trials = r"^\| [^|]* \| \w+\.py --(?!bf16 ).*\n"  # of other flags: they are in the CSV only
    returns = re.sub(trials, "", returns, flags=re.M)
    with open(results / "throughput.csv", newline="") as file:
        throughput.show([row for row in csv.DictReader(file) if row["section"] == "as_it_comes"])
    tables = [returns, capsys.readouterr().out, run(BENCHMARK / "time_to_ant.py", "--table")]
    tables += [run(BENCHMARK / "populations.py", "--table", "--results", tmp_path)]
    for table in tables:
        one_repetition = table.strip().replace(" ± nan", "")  # has no standard error
        assert one_repetition in text, table.partition("\n")[0]
    found = set()  # (environment, script, steps, return, its standard deviation, seeds)
    for line in re.findall(r"^\| (.*) \|$", returns, re.M)[1:]:
        env, script, steps, _, *cells = line.split(" | ")
        for mean, std, seeds in re.findall(r"(\S+) ± (\S+) \((\d+)\)", " ".join(cells[:2])):
            key = env, script.split()[0], steps
            found |= {(*key, f"{float(mean):.{d}f}", f"{float(std):.{d}f}", seeds) for d in (0, 1)}
    row = r"^\| ([\w-]+)[^|]*\| (\w+\.py) \| ([\d.]+ [kM]) \| (-?[\d.]+) ± ([\d.]+) \((\d+)\)"
    quoted = re.findall(row, (BENCHMARK.parent / "README.md").read_text().replace("−", "-"), re.M)
    assert len(quoted) >= 5 and set(quoted) <= found, set(quoted) - found


# time_to_ant.py: when the clock stops.


@pytest.fixture(scope="module")
def time_to_ant():
    sys.path.insert(0, str(BENCHMARK))
    yield importlib.import_module("time_to_ant")
    sys.path.remove(str(BENCHMARK))


def evaluations(*scores: float) -> str:
    """metrics.csv of a run that had these returns after 100, 200, … steps."""
    lines = ["step,seconds,tag,value", "50,0.5,losses/value,9999", "100,1,eval/length,9999"]
    lines += [f"{100 * (i + 1)},{i},eval/episodic_return,{x}" for i, x in enumerate(scores)]
    return "\n".join(lines) + "\n"


def test_the_first_return_that_reaches_the_target_counts(time_to_ant):
    metrics = evaluations(900, 5000.5, 6000)
    torn = "400,3,eval/episodic_return,9000"  # its end is not written yet
    for target, found in ((5000, (200, 5000.5)), (900, (100, 900)), (7000, (300, 6000))):
        assert time_to_ant.decisive(metrics + torn, target) == found
    assert time_to_ant.decisive("", 0) == (0, -math.inf)


STAND_IN = """
import os, signal, sys
folder, metrics, last = sys.argv[1:]
def stop(*_):
    open(folder + "/stopped", "w").close()
    os._exit(1)
signal.signal(signal.SIGTERM, stop)
open(folder + "/metrics.csv", "w").write(metrics)
eval(last)
"""


def test_a_race_ends_at_the_target_the_limit_or_the_end(time_to_ant, tmp_path):
    def race(last: str, *scores: float, minutes: float = 1) -> tuple[int, float]:
        for file in tmp_path.iterdir():
            file.unlink()
        words = [sys.executable, "-c", STAND_IN, str(tmp_path), evaluations(*scores), last]
        return time_to_ant.race(words, tmp_path / "metrics.csv", 5000, minutes)[1:]

    assert race("signal.pause()", 900, 5100) == (200, 5100)
    assert (tmp_path / "stopped").exists()
    assert race("None", 900, 4900, 800) == (200, 4900)  # it ends by itself, and is not stopped
    assert not (tmp_path / "stopped").exists()
    assert race("signal.pause()", minutes=0) == (0, -math.inf)
    with pytest.raises(SystemExit, match="ended with 1: no Ant here"):
        race("sys.exit('no Ant here')", 900)


@pytest.mark.parametrize(
    ("contender", "env", "steps"),
    [("ppo", "CartPole", "4096"), ("stable_baselines3", "InvertedPendulum", "2048")],
)
def test_a_row_is_of_a_real_run(time_to_ant, tmp_path, contender, env, steps, no_compiler):
    if contender in time_to_ant.PEERS:
        pytest.importorskip(contender)
    command = [BENCHMARK / "time_to_ant.py", "--contenders", contender, "--results", tmp_path]
    said = run(*command, "--env", env, "--target", 2, "--eval-every", 2048, "--eval-episodes", 2)
    (row,) = csv.DictReader(open(tmp_path / "time_to_ant.csv"))
    assert row["contender"] == time_to_ant.PEERS.get(contender, "ppo.py")
    assert f" --env {env} --seed 1 --eval-every 2048 --eval-episodes 2" in row["command"]
    assert row["steps"] == steps and float(row["return"]) >= 2 and int(row["seconds"]) > 0
    assert said.splitlines()[-1].startswith(f"| {row['contender']} | {row['seconds']} | ")


def test_cleanrl_has_the_mean_of_its_last_episodes(time_to_ant, tmp_path):
    lines = [f"global_step={step}, episodic_return=[{value}]" for step, value in
             ((50, 1.0), (120, 3.0), (180, 5.0), (260, 7.0))]  # fmt: skip
    program = tmp_path / "python"
    program.write_text("\n".join(("#!/bin/sh", "cat <<END", "SPS: 9", *lines, "END")))
    program.chmod(0o700)
    options = {"cleanrl_python": str(program), "run_dir": tmp_path}
    with pytest.raises(SystemExit, match="0"):
        time_to_ant.train_cleanrl(time_to_ant.Options(eval_every=100, eval_episodes=2, **options))
    rows = [line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines()]
    assert [(step, value) for step, _, _, value in rows] == [("120", "2"), ("260", "6")]


def test_random_actions_are_of_the_whole_range(throughput, monkeypatch):
    given, space = [], gymnasium.spaces.Box(np.float32([-1, 2]), np.float32([1, 4]))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])  # moves that two agents have
    envs = {"single_action_space": space, "num_agents": 2, "action_mask": mask}
    envs = SimpleNamespace(reset=lambda: None, step=given.append, **envs)
    monkeypatch.setattr(throughput.steppers.vec_envs, "make", lambda *arguments: envs)
    for make, low, high in (
        (throughput.steppers.ours, [-1, 2], [1, 4]),
        (throughput.steppers.particles, [0, 0], [4, 1]),
    ):
        given.clear()
        step = make("any", 100)
        for i in range(50):
            step(i)
        found = torch.stack(given).view(-1, 2)
        torch.testing.assert_close(found.amin(0).float(), torch.Tensor(low), atol=0.01, rtol=0)
        torch.testing.assert_close(found.amax(0).float(), torch.Tensor(high), atol=0.01, rtol=0)


def test_a_contender_that_is_none(time_to_ant):
    with pytest.raises(SystemExit, match="--contenders nobody: allowed are stable_baselines3, sbx"):
        time_to_ant.check("nobody", time_to_ant.Options())


def test_who_has_not_reached_the_target_comes_last(time_to_ant, capsys):
    row = dict.fromkeys(time_to_ant.COLUMNS, "x") | {"target": "5000", "steps": "9"}
    rows = [
        row | {"contender": name, "seconds": seconds, "return": value}
        for name, seconds, value in (
            *(("c", "1800", "1327.2"), ("b", "420", "5000.0")),
            *(("d", "60", "12.0"), ("a", "400", "5100")),
        )
    ]
    time_to_ant.show(rows)
    said = capsys.readouterr().out.splitlines()[2:]
    assert [line[:4] for line in said] == ["| a ", "| b ", "| c ", "| d "]
    assert said[0].startswith("| a | 400 | 5,100 | 9 |")
    assert said[2].startswith("| c | not reached in 1,800 | best 1,327 | 9 |")


# throughput.py: what is measured, without waiting for it.


@pytest.fixture(scope="module")
def throughput():
    sys.path.insert(0, str(BENCHMARK))
    yield importlib.import_module("throughput")
    sys.path.remove(str(BENCHMARK))


def test_throughput_keeps_the_other_sections(tmp_path):
    pytest.importorskip("mpe2")
    path = tmp_path / "throughput.csv"  # as it was before there were threads in it
    lines = (BENCHMARK / "results" / "throughput.csv").read_text().splitlines()
    before = list(csv.DictReader(lines))
    same = {"section": "particles", "group": "of before", "median": "1", "lowest": "1"}
    old = {"section": "sac", "group": "former", "what": "CraneRL", "unit": "updates/s"}
    old |= {"median": "3", "lowest": "2", "highest": "4", "ratio": "1.0", "machine": "any, 2 cores"}
    names = [name for name in before[0] if name != "threads"]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows([old, old | same, old | {"section": "as_it_comes"}])
    command = [BENCHMARK / "throughput.py", "--results", tmp_path, "--rounds", 1, "--seconds", 0.1]
    table = run(*command, "--sections", "particles")
    rows = list(csv.DictReader(open(path)))
    sections = ["as_it_comes", *["particles"] * 8, "sac"]
    assert [row["section"] for row in rows] == sections
    assert rows[-1] == old | dict.fromkeys({*rows[-1]} - {*old}, "")
    assert "one world" in table and "of before" not in table and "former" in table
    assert (tmp_path / "throughput.png").exists()


def test_the_first_section_is_what_somebody_types(throughput, monkeypatch):
    commands = []

    def run(command: list) -> str:  # a peer: 50 steps a second, 4 of them an update
        steps = range(0, 500_000, 100)  # it loads something at first
        lines = [f"{step} {step // 4} {step / 50 + 9 * (step > 150)}" for step in steps]
        return "\n".join(("threads 2", "a warning 1 2 3", *lines))

    def train(command: list, run_dir: Path, total: float, folder: str) -> None:
        commands.append([str(word) for word in command])
        run_dir.mkdir()
        (run_dir / "args.json").write_text('{"args": {"torch_threads": 1}}')
        every = 10 if "--log-every" in commands[-1] else 1000
        steps = range(0, 500_000, every)  # 100 a second, but for a while to compile
        rows = [f"{x},{x / 100 + 9 * (x > 150)},losses/critic,0" for x in steps]
        others = [f"{x},{x},charts/episodic_return,0" for x in (100, 600_000)]
        torn = "600000,7"  # it is being written
        (run_dir / "metrics.csv").write_text("\n".join(("step,...", *rows, *others, torn)))

    monkeypatch.setattr(throughput, "run", run)
    monkeypatch.setattr(throughput, "train", train)
    monkeypatch.setattr(throughput.steppers, "physics", lambda *sizes: lambda i: None)
    found = {
        (group, what): (unit, *turn())
        for group, unit, contenders in throughput.as_it_comes(throughput.Options(seconds=1))
        for what, turn in contenders.items()
        if "physics" not in what
    }
    assert found["SAC on HalfCheetah", "CraneRL sac.py"] == ("updates/s", pytest.approx(100), "1")
    sb3 = found["SAC on HalfCheetah", "Stable-Baselines3 SAC"]
    assert sb3 == ("updates/s", pytest.approx(12.5), "2")
    assert found["REDQ on Hopper", "CraneRL redq.py"][1] == pytest.approx(2000)
    assert found["PPO on Ant", "SBX PPO, 8 environments"][1] == pytest.approx(50)
    allowed = {"--env", "--warmup-steps", "--run-dir", "--eval-every"}
    typed = {}
    for script, *words in commands:
        flags = {word for word in words if word.startswith("--")} - allowed
        typed.setdefault(Path(script).stem, []).append(flags)
    redq, dqn = typed.pop("redq"), typed.pop("dqn")
    assert redq == [{"--log-every"}] and dqn == [{"--num-envs", "--utd-ratio"}, {"--utd-ratio"}]
    assert typed.keys() == {"sac", "td3", "ddpg", "crossq", "ppo"}
    assert not any(flags for several in typed.values() for flags in several)
    with pytest.raises(SystemExit, match="more --seconds"):
        throughput.slope([(1, 1)], 0)


def test_a_section_is_measured_in_turns(throughput, monkeypatch):
    ours, theirs = iter((10, 30, 21)), iter((2, 9, 7))
    contenders = {"ours": lambda: (next(ours), "2"), "theirs": lambda: (next(theirs), "1")}
    sections = {"some": lambda options: [("group", "steps/s", contenders)]}
    monkeypatch.setattr(throughput, "SECTIONS", sections)
    rows = throughput.measure("some", throughput.Options(rounds=3), "now")
    names = "what", "median", "lowest", "highest", "ratio", "threads"
    found = [tuple(row[name] for name in names) for row in rows]
    assert found == [("ours", 21, 10, 30, 1, "2"), ("theirs", 7, 2, 9, 3, "1")]


def test_a_turn_in_this_process(throughput, monkeypatch):
    clock = SimpleNamespace(perf_counter=iter((5.0, 5.0, 6.0, 7.0, 8.0)).__next__)
    monkeypatch.setattr(throughput, "time", clock)
    steps = []
    assert throughput.per_second(steps.append, 10, 2.5) == (10, "") and steps == [0, 1, 2]


def test_a_turn_in_another_process(throughput, monkeypatch):
    """Its own threads, no GPU; SuperSuit counts each of three agents' steps."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    found = throughput.environment(more="1")
    assert found["CUDA_VISIBLE_DEVICES"] == "" and "OMP_NUM_THREADS" not in found
    assert found["PATH"] and found["more"] == "1"
    monkeypatch.setattr(throughput, "theirs", lambda *sizes, **settings: (300, "2"))
    ((_, _, contenders),) = throughput.agents(throughput.Options())
    assert contenders["Stable-Baselines3 PPO by SuperSuit, the same sizes"]() == (100, "2")


def test_a_training_is_stopped_when_it_has_been_measured(throughput, tmp_path, no_compiler):
    command = [BENCHMARK.parent / "algos" / "ppo.py", "--env", "CartPole", "--num-envs", 4]
    command += ["--run-dir", tmp_path / "run", "--eval-every", 0, "--num-steps", 16]
    throughput.train(command, tmp_path / "run", 256, str(tmp_path))
    steps = [step for step, _ in throughput.losses(tmp_path / "run")]
    assert 256 <= steps[-1] < 49_152 and steps[0] == 64
    with pytest.raises(SystemExit, match="holds a run already"):
        throughput.train(command, tmp_path / "run", 1e9, str(tmp_path))


@pytest.mark.parametrize("library", ["stable_baselines3", "plain"])
def test_peers_say_what_they_have_done(library):
    pytest.importorskip("stable_baselines3")
    command = [BENCHMARK / "peers.py", "--library", library, "--env", "Pendulum-v1"]
    command += ["--total-steps", 12, "--say-every", 4, "--settings", '{"learning_starts": 8}']
    threads, *lines = (line.split() for line in run(*command).splitlines() if line[-1:].isdigit())
    assert threads[0] == "threads" and [line[0] for line in lines] == ["0", "4", "8", "12"]
    per_step = 20 if library == "plain" else 1
    assert int(lines[-1][1]) == 4 * per_step and float(lines[0][2]) < float(lines[-1][2])


# stability.py: the statistics, on samples whose answer is known.


@pytest.fixture(scope="module")
def stability():
    sys.path.insert(0, str(BENCHMARK))
    yield importlib.import_module("stability")
    sys.path.remove(str(BENCHMARK))


def test_statistics_with_a_known_answer(stability):
    x = np.array([9.0, 1, 8, 2, 7, 3, 6, 4])
    assert stability.iqm(x) == (3 + 4 + 6 + 7) / 4
    assert stability.worst_quarter(x) == 1.5 and stability.worst_quarter(x[:5]) == 1.5
    assert stability.improvement(np.array([1.0, 2, 3]), np.array([2.0, 0])) == 4.5 / 6
    rng = np.random.default_rng(0)
    base, steadier = rng.normal(100, 3, 100), rng.normal(150, 1.5, 100)
    found = stability.compare(steadier, base)
    assert found["variance_ratio"] == pytest.approx(np.var(steadier) / np.var(base))
    assert 0.12 < found["variance_ratio_low"] < 0.25 < found["variance_ratio_high"] < 0.5
    assert found["variance_p"] < 0.01
    assert found["iqm_difference_low"] < 50 < found["iqm_difference_high"]
    assert found["improvement"] == 1
    both = [base, base[::2]], [steadier, 2 * steadier[::2]]  # ratios q and 4 q: the mean is 2 q
    runs = [
        {"env": env, "steps": "10", "arm": arm, "seed": i, "final": value}
        for arm, samples in zip(("base", "memory"), both, strict=True)
        for env, sample in zip(("Ant", "Hopper"), samples, strict=True)
        for i, value in enumerate(sample)
    ]
    (row,) = stability.across(runs)
    assert row["envs"] == "Ant Hopper" and row["variance_ratio"] == pytest.approx(0.5, rel=0.4)
    assert row["variance_ratio_low"] < 0.5 < row["variance_ratio_high"]
    assert row["iqm_ratio_low"] < math.sqrt(1.5 * 3) < row["iqm_ratio_high"]
    wide, narrow = base[:10], base[10:20] / 2  # two alike say more, two opposite ones nothing
    alone = stability.variance_p(wide, narrow)
    assert stability.combined_p([(wide, narrow)]) == pytest.approx(alone)
    assert stability.combined_p([(wide, narrow)] * 3) < alone / 2 < 0.4
    assert stability.combined_p([(wide, narrow), (narrow, wide)]) > 0.9
    third = [run | {"env": "Walker2d"} for run in runs if run["env"] == "Ant"]
    rows = stability.across(runs + third)  # with all three, and without each
    assert [len(row["envs"].split()) for row in rows] == [3, 2, 2, 2] and row in rows
    longer = [run | {"steps": "20"} for run in runs]  # of each environment the longest runs count
    assert stability.across(runs + longer) == [row]
    zeros = dict.fromkeys(("area", "drawdown", "log_std", "seconds"), "0")
    table = stability.analyse([run | zeros for run in runs], beside="memory")
    ratios = {row["arm"]: row["variance_ratio"] for row in table if row["env"] == "Ant"}
    assert ratios["base"] == pytest.approx(np.var(base) / np.var(steadier))
    assert np.isnan(ratios["memory"])


def test_identical_runs_have_no_interval(stability):
    same, other = np.full(5, 500.0), np.arange(5.0)
    for x, y in ((same, same), (same, other), (other, same)):
        found = stability.compare(x, y)
        assert np.isnan(found["variance_p"])
    assert stability.compare(same, other)["variance_ratio"] == 0
    rounded = np.full(20, 499.99)  # whose np.var is not 0
    found = stability.compare(np.arange(20.0), rounded)
    assert np.isnan(found["variance_ratio"]) and np.isnan(found["variance_p"])


def test_the_permutation_test_is_uniform_if_nothing_differs(stability):
    """Also when the means differ, and on runs of two kinds, as Hopper's are."""
    rng = np.random.default_rng(1)

    def sample(mean: float, scale: float = 1.0) -> np.ndarray:
        return mean + scale * (3 * (rng.random(20) < 0.7) + rng.normal(0, 0.5, 20))

    p = np.array([stability.variance_p(sample(0), sample(2), 199) for _ in range(200)])
    for level in (0.1, 0.3, 0.5):  # binomial: three standard deviations are at most 0.11
        assert abs((p <= level).mean() - level) < 0.11, level
    p = np.array([stability.variance_p(sample(0, 0.3), sample(0), 199) for _ in range(20)])
    assert (p < 0.05).mean() > 0.8


def rows_of(seed: int, returns: list[float], total_steps: int = 1000) -> list[dict]:
    """A run of the arm `base`, its evaluations equally spaced."""
    return [
        {"env": "Hopper", "steps": total_steps, "arm": "base", "seed": seed}
        | {"step": total_steps * (i + 1) // len(returns), "seconds": i, "return": value}
        | {"return_std": 1, "log_std": "", "parallel": 2, "commit": "", "command": 'a "b, c"'}
        for i, value in enumerate(returns)
    ]


def test_a_run_in_three_numbers(stability):
    found = stability.summary(rows_of(7, [0, 100, 40, 80, 120, 60, 70, 90, 110, 130]))
    assert found["final"] == 130  # 900 is not in the last 10 %
    assert found["drawdown"] == 60 and found["area"] == pytest.approx((800 - 65) / 9, abs=0.01)
    ended_early = stability.summary(rows_of(7, [0, 100, 40, 80, 120, 60, 70])[:3])
    assert ended_early["final"] == 40


def test_an_append_that_was_killed_loses_only_its_run(stability, tmp_path, capsys):
    path, sizes = tmp_path / "study" / "runs.csv.gz", [0]
    for seed in (1, 2, 3):
        stability.append_run(path, rows_of(seed, [10 * seed, seed]))
        sizes.append(path.stat().st_size)
    stability.append_run(path, rows_of(3, [0, 0]))  # a run that is there
    whole, names = path.read_bytes(), [f"Hopper__1000__base__{seed}" for seed in (1, 2, 3)]
    runs = stability.read_runs(path)
    assert list(runs) == names and len(whole) == sizes[-1] and not capsys.readouterr().out
    assert [row["return"] for row in runs[names[2]]] == ["30", "3"]
    assert runs[names[2]][0]["command"] == 'a "b, c"'
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        complete = max(i for i in range(4) if sizes[i] <= size)
        assert list(stability.read_runs(path)) == names[:complete]
        assert path.stat().st_size == sizes[complete]  # repaired
        assert ("only in part" in capsys.readouterr().out) == (size not in sizes)
    for torn in (1, sizes[2] + 5, sizes[3] - 1):  # the next append repairs it as well
        path.write_bytes(whole[:torn])
        for seed in (1, 2, 3):
            stability.append_run(path, rows_of(seed, [10 * seed, seed]))
        assert path.read_bytes() == whole
    with gzip.open(path, "rt", newline="") as file:  # for any reader it is one CSV
        assert [row["seed"] for row in csv.DictReader(file)] == ["1", "1", "2", "2", "3", "3"]
    damaged = bytearray(whole)
    damaged[sizes[1] - 6] ^= 1  # the first run's checksum
    path.write_bytes(damaged)
    with pytest.raises(SystemExit, match="damaged after byte 0"):
        stability.append_run(path, rows_of(4, [1]))
    assert path.read_bytes() == damaged


def append_runs(stability, path: Path, seeds: list[int]) -> None:
    for seed in seeds:
        stability.append_run(path, rows_of(seed, [seed]))


def test_two_processes_append(stability, tmp_path):
    context, path = multiprocessing.get_context("fork"), tmp_path / "runs.csv.gz"
    both = [list(range(0, 20)), list(range(30, 9, -1))]  # both have 10 to 19
    processes = [context.Process(target=append_runs, args=(stability, path, s)) for s in both]
    with open(path, "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for process in processes:
            process.start()
        processes[0].join(0.5)
        assert processes[0].is_alive() and path.stat().st_size == 0  # both wait
        fcntl.flock(lock, fcntl.LOCK_UN)  # explicitly: both have inherited the open file
    for process in processes:
        process.join()
        assert process.exitcode == 0
    runs = stability.read_runs(path)
    assert {int(rows[0]["seed"]) for rows in runs.values()} == set(range(31))
    assert all(len(rows) == 1 for rows in runs.values())


@pytest.mark.parametrize("folder", [".", "decided", "falling", "annealed", "adaptive"])
def test_the_published_tables_are_of_the_runs(stability, folder):
    study = BENCHMARK / "results" / "hterm" / folder
    runs = [stability.summary(rows) for rows in stability.read_runs(study / "runs.csv.gz").values()]
    with open(study / "seeds.csv", newline="") as file:
        assert list(csv.DictReader(file)) == [{k: str(run[k]) for k in run} for run in runs]
    with open(study / "table.csv", newline="") as file:
        table = [tuple(row.values())[:4] for row in csv.DictReader(file)]
    groups = stability.group(runs).items()
    assert table == [(*of, arm, str(len(arms[arm]))) for of, arms in groups for arm in arms]


def test_the_verdict_of_the_study_is_stouffers_of_its_tasks():
    """Each task's p as a normal deviate with the sign of its log ratio, their sum over √6."""
    study, normal = BENCHMARK / "results" / "hterm" / "decided", statistics.NormalDist()
    with open(study / "table.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["arm"] == "hterm"]
    ratios = [math.log(float(row["variance_ratio"])) for row in rows]
    tails = [normal.inv_cdf(float(row["variance_p"]) / 2) for row in rows]  # below 0
    sum_of_deviates = sum(math.copysign(z, x) for z, x in zip(tails, ratios, strict=True))
    with open(study / "across.csv", newline="") as file:
        verdict = next(row for row in csv.DictReader(file) if row["arm"] == "hterm")
    assert len(rows) == len(verdict["envs"].split()) == 6
    p = 2 * normal.cdf(-abs(sum_of_deviates) / 6**0.5)
    assert float(verdict["variance_p"]) == pytest.approx(p, abs=0.02)
    mean = math.exp(sum(ratios) / 6)
    assert float(verdict["variance_ratio"]) == pytest.approx(mean, rel=1e-2)


def test_the_noise_is_read_from_the_entropy(stability, tmp_path):
    entropy = [2 * (log_std + 0.5 * math.log(2 * math.pi * math.e)) for log_std in (0.0, -1.0)]
    lines = [f"{100 * (i + 1)},1,losses/entropy,{entropy[i]}" for i in range(2)]
    (tmp_path / "metrics.csv").write_text("\n".join(["step,seconds,tag,value", *lines]) + "\n")
    assert stability.log_std(tmp_path)(150) == ""
    for agent, expected in (({"log_std": torch.zeros(2)}, -0.5), ({"actor.0": torch.ones(1)}, "")):
        torch.save({"agent": agent}, tmp_path / "last.pt")
        assert stability.log_std(tmp_path)(150) == expected


def fake_finish(stability, monkeypatch, killed: set[int]) -> list[list[str]]:
    """Runs that only write what a script writes; the seeds in `killed` die once."""
    calls = []

    def finish(command: list[str], run_dir: Path, version: str) -> bool:
        calls.append(command)
        seed = int(command[-1])
        run_dir.mkdir(parents=True, exist_ok=True)
        if seed in killed:
            killed.remove(seed)
            raise SystemExit("killed")
        lines = ["step,seconds,tag,value", "100,1.0,losses/value,3"]
        for step in (500, 1000):
            tags = {"eval/episodic_return": seed + step, "eval/episodic_return_std": 1}
            lines += [f"{step},1.5,{tag},{value}" for tag, value in tags.items()]
        (run_dir / "metrics.csv").write_text("\n".join(lines) + "\n")
        (run_dir / "begun.json").write_text(
            json.dumps({"command": shlex.join(command), "commit": version})
        )
        return True

    monkeypatch.setattr(stability, "finish", finish)
    return calls


def test_a_finished_run_is_never_repeated(stability, monkeypatch, tmp_path, capsys):
    calls = fake_finish(stability, monkeypatch, killed={1001})
    folders = {"runs_dir": tmp_path / "runs", "results": tmp_path / "results"}
    options = {"seeds": 4, "first_seed": 1000, "total_steps": 1000, "parallel": 1}
    options |= {"arms": ["base", "hterm"]}
    with pytest.raises(SystemExit, match=r"^killed$"):
        stability.main(stability.Options(**options, **folders))
    assert len(calls) == 8  # it stopped no other
    for expected in (8 + 1, 8 + 1):  # the killed one was begun twice, none of the others
        stability.main(stability.Options(**options, **folders))
        assert len(calls) == expected
    seeds = list(csv.DictReader(open(folders["results"] / "seeds.csv")))
    assert [row["final"] for row in seeds[:4]] == ["2000.0", "2001.0", "2002.0", "2003.0"]
    table = list(csv.DictReader(open(folders["results"] / "table.csv")))
    assert [row["arm"] for row in table] == ["base", "hterm"]
    assert float(table[1]["variance_ratio"]) == 1 and table[0]["variance_ratio"] == "nan"
    assert (folders["results"] / "Hopper__1000.png").exists()
    before = (folders["results"] / "table.csv").read_bytes()
    capsys.readouterr()
    stability.main(stability.Options(**options, **folders, only_seeds=(1001, 1003)))
    shown = capsys.readouterr().out
    assert "| base | 3 | 2,002 ± 1 |" in shown and "| hterm | 3 | 2,002 ± 1 |" in shown
    assert (folders["results"] / "table.csv").read_bytes() == before
    monkeypatch.setattr(stability, "commit", lambda: "later")
    stability.main(stability.Options(**options, **folders))
    said = capsys.readouterr().out.splitlines()[0]
    assert said.startswith("Not repeated: finished runs of commit ") and "is later)" in said
    options["arms"] = [
        "hterm=ppo_hterm --hterm-coef 0.1",
        "other=ppo",
    ]  # the same name, another command
    with pytest.raises(SystemExit, match="of another command"):
        stability.main(stability.Options(**options, **folders))
    for wrong, said in (
        ("nope", "'nope'; allowed is base, "),
        ("a=nope", "no algos/nope.py"),
        ("a=ppo --total_steps=5", "has a with --total-steps, which all arms have in common"),
    ):
        with pytest.raises(SystemExit, match=said):
            stability.main(stability.Options(arms=[wrong], **folders))
    assert len(calls) == 9


def test_one_way_to_write_a_flag(stability):
    words = ["--total_steps=5", "--env-options=a=b_c", "--compile", "none", "a=b_c", "--no_save"]
    found = ["--total-steps", "5", "--env-options", "a=b_c", "--compile", "none", "a=b_c"]
    assert stability.spelled_out(words) == [*found, "--no-save"]


def test_a_run_at_work_elsewhere_is_left_alone(stability, tmp_path):
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not stability.finish(["python", "algos/nope.py"], tmp_path, "now")
    for version in ("now", "later"):  # the commit is that of the first step, which none has made
        with pytest.raises(SystemExit, match="nope"):
            stability.finish(["python", "algos/nope.py"], tmp_path, version)
        assert json.loads((tmp_path / "begun.json").read_text())["commit"] == version


def test_a_folder_is_not_taken_for_another_commands(stability, tmp_path):
    command = ["python", "algos/ppo.py", "--hidden-size", "0"]  # it fails
    with pytest.raises(SystemExit, match="ended with 1: --hidden-size"):
        stability.finish(command, tmp_path / "a", "then")
    assert stability.begun_at(tmp_path / "a", command) == "then"
    with pytest.raises(SystemExit, match=r"a is of another command, .*size 0; delete it"):
        stability.finish([*command[:3], "8"], tmp_path / "a", "now")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "args.json").write_text("{}")
    with pytest.raises(SystemExit, match="b is of a run that no benchmark began"):
        stability.finish(command, tmp_path / "b", "now")


# gpu.py: without a GPU it can only be tried out.


@pytest.fixture(scope="module")
def gpu():
    sys.path.insert(0, str(BENCHMARK))
    yield importlib.import_module("gpu")
    sys.path.remove(str(BENCHMARK))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_says_that_there_is_none(tmp_path):
    said = run(BENCHMARK / "gpu.py", "--results", tmp_path)
    assert said == "torch finds no CUDA device here, so nothing was measured.\n"
    (row,) = csv.DictReader(open(tmp_path / "gpu.csv"))
    assert row["note"] == "No GPU has run this benchmark yet." and row["value"] == ""
    (tmp_path / "gpu.csv").write_text("of a GPU")
    run(BENCHMARK / "gpu.py", "--results", tmp_path)
    assert (tmp_path / "gpu.csv").read_text() == "of a GPU"  # what one measured stays


def test_gpu_reads_a_run(gpu, tmp_path):
    lines = ["step,seconds,tag,value", "100,5,losses/value,1", "200,5,charts/episodic_return,900"]
    for step in range(200, 1000, 100):  # 5 s of compiling, then 0.5 s an iteration
        seconds = 5 + (step - 100) / 200
        lines += [f"{step},{seconds},losses/value,1", f"{step},{seconds},charts/SPS,1"]
        lines += [f"{step},99,eval/episodic_return,{10 * step}"]  # found later than it was so
    (tmp_path / "metrics.csv").write_text(
        "\n".join(lines) + "\n1000,9,losses/value,1"
    )  # not finished writing
    iterations, returns = gpu.progress(tmp_path)
    assert iterations[:2] == [(100, 5), (200, 5.5)] and iterations[-1][0] == 900
    assert gpu.steady_speed(iterations) == pytest.approx(200)
    assert returns["training"] == [(200, 900)]
    assert gpu.seconds_to(5000, returns["evaluation"], iterations) == pytest.approx(2)
    assert gpu.seconds_to(9500, returns["evaluation"], iterations) is None
    assert gpu.progress(tmp_path / "nothing") == ([], {"training": [], "evaluation": []})


def test_gpu_measures(gpu, monkeypatch):
    """Speeds of the later half, the minutes in fair shares, env steps of all environments."""
    late = [(0, 0), (10, 30), (20, 31), (30, 32), (40, 33)]
    assert gpu.steady_speed(late) == 10 and gpu.steady_speed(late[:1]) == 0
    clock = gpu.Clock(time.perf_counter() + 1000, 0, [6, 3, 1])
    assert [round(clock.share(), -1) for _ in range(3)] == [600, 750, 1000]
    assert gpu.Clock(0, 2, [1]).share() == 2 and gpu.Clock(0, 0, [1]).share() == 0
    speeds = {"Ant: env steps/s": 1000, "Ant, ppo.py: training steps/s": 100}
    rows = [{"what": what, "value": value} for what, value in speeds.items()]
    assert next(gpu.shares_of_physics(rows))[2] == 0.1
    seconds = itertools.count()
    monkeypatch.setattr(gpu, "now", lambda options: next(seconds))
    options = gpu.Options(robots=["Hopper"], envs=2, seconds=3, device="cpu")
    found = [row[2] for row in gpu.envs(options, clock)]
    assert found == [2 * 20 * 2 / 4, 2 * 20 * 8 / 4]  # twice 20 steps in four seconds


def test_gpu_is_tried_out_on_a_cpu(tmp_path, no_compiler):
    command = [BENCHMARK / "gpu.py", "--device", "cpu", "--envs", 8, "--seconds", 1]
    command += ["--results", tmp_path, "--sections", "envs", "ppo", "--robots", "Hopper"]
    assert "| Hopper, ppo.py: training steps/s |" in run(*command)
    rows = list(csv.DictReader(open(tmp_path / "gpu.csv")))
    values = {row["what"]: row["value"] for row in rows}
    for what in ("env steps/s", "ppo.py: training steps/s", "ppo.py: share of physics"):
        assert float(values[f"Hopper{', ' if 'ppo' in what else ': '}{what}"]) > 0
    never = next(row for row in rows if "return of 6000, evaluation" in row["what"])
    assert never["value"] == "" and never["note"].startswith("not within")
    assert {row["device"] for row in rows} == {"CPU, a trial"} and (tmp_path / "gpu.png").exists()
    assert "python algos/ppo.py --env Hopper --num-envs 8" in rows[2]["command"]
    run(*(word for word in command if word != "ppo"))  # the rows of the other section stay
    kept = [row["section"] for row in csv.DictReader(open(tmp_path / "gpu.csv"))]
    trained = [row["section"] for row in rows if row["section"] == "ppo"]
    assert kept == [*trained, "envs", "envs", "physics"]
