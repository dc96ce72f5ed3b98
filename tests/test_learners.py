"""Several learners, started by torchrun: real processes that share a batch, die and come back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
PATIENCE = 240  # seconds, for machines that are busy with something else


@pytest.fixture(scope="module")
def after_20_updates(tmp_path_factory):
    """{"whole": by one learner, "learner0": by two with half of its batch each, "learner1"}"""
    folder = tmp_path_factory.mktemp("learners")
    program = ROOT / "tests" / "learners_program.py"
    command = [*TORCHRUN, "--nproc-per-node", "2", program, folder]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, env=environment
    )
    assert done.returncode == 0, done.stderr
    names = ("whole", "learner0", "learner1")
    return {name: torch.load(folder / f"{name}.pt", weights_only=True) for name in names}


def test_two_learners_with_half_the_batch_are_one_with_all_of_it(after_20_updates):
    whole, first, second = after_20_updates.values()
    for case, expected in whole.items():
        for name, value in expected.items():
            assert torch.equal(first[case][name], second[case][name]), (case, name)
            difference = (first[case][name] - value).abs().max().item()
            assert difference < 1e-5, (case, name, difference)
