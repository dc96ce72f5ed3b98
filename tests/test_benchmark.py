"""The scripts of benchmark/ run, and repeat nothing that is finished."""

import csv
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parent.parent / "benchmark"


def run(*arguments) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_returns_are_kept_once(tmp_path):
    command = [BENCHMARK / "returns.py", "--env", "CartPole", "--seeds", 1, 2]
    command += ["--runs-dir", tmp_path / "runs", "--results", tmp_path]
    flags = ["--", "--total-steps", 200, "--num-envs", 2, "--horizon", 16]
    for said in (2, 0):  # runs that are finished are not repeated
        assert run(*command, *flags).count("ppo__CartPole") == said
    rows = list(csv.DictReader(open(tmp_path / "returns.csv")))
    assert sorted(row["seed"] for row in rows) == ["1", "2"]
    assert all(row["steps"] == "224" and float(row["return"]) >= 8 for row in rows)
    curve = list(csv.DictReader(open(tmp_path / "curves.csv")))
    assert {row["return"] for row in curve} == {row["return"] for row in rows}
    assert "| 224 | 2 |" in run(*command, "--table")


def test_throughput_keeps_the_other_sections(tmp_path):
    command = [BENCHMARK / "throughput.py", "--results", tmp_path, "--rounds", 1, "--seconds", 0.1]
    run(*command, "--sections", "chasing")
    table = run(*command, "--sections", "hterm")
    sections = [row["section"] for row in csv.DictReader(open(tmp_path / "throughput.csv"))]
    assert sections == ["chasing"] * 2 + ["hterm"] * 4
    assert "looping over envs" in table and (tmp_path / "throughput.png").exists()
