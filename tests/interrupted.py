"""A run that is interrupted and goes on, beside the same run without an interruption."""

import itertools
import signal

import pytest
import torch


def both_checkpoints(script, args: dict, at: int, tmp_path, monkeypatch) -> tuple[dict, dict]:
    """Ctrl-C during update `at` (from 0), then --resume -> last checkpoints: this run's, a whole's.

    They have the same step and the same last return.
    """
    script.train(script.Args(**args, run_dir=str(tmp_path / "whole")))
    calls, update = itertools.count(), script.update

    def interrupted(*inputs):
        if next(calls) == at:
            signal.raise_signal(signal.SIGINT)
        return update(*inputs)

    monkeypatch.setattr(script, "update", interrupted)
    with pytest.raises(SystemExit):
        script.train(script.Args(**args, run_dir=str(tmp_path / "parts")))
    script.train(script.Args(resume=str(tmp_path / "parts")))
    paths = (tmp_path / name / "checkpoint.pt" for name in ("parts", "whole"))
    ours, theirs = (torch.load(path, weights_only=True) for path in paths)
    assert ours["run"]["step"] == theirs["run"]["step"] >= args["total_steps"]
    assert ours["run"]["last_return"] == theirs["run"]["last_return"]
    return ours, theirs
