"""journal.jsonl: what happened to a population."""

import contextlib
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

from algos.worker_learner import files
from algos.worker_learner.arguments import UserError

ENDS = "failed", "published", "gave up"  # of segments


class Journal:
    """What is in journal.jsonl, and what is added. Raises UserError if it is damaged, OSError."""

    def __init__(self, path: Path):
        try:
            text = path.read_text() if path.exists() else ""
            if text and not text.endswith("\n"):  # torn: nothing was done that it would say
                text = text[: text.rfind("\n") + 1]
                files.save(text, path)
            self.lines = [json.loads(line) for line in text.splitlines()]
            if not all(isinstance(line, dict) and "event" in line for line in self.lines):
                raise ValueError("a line is not an event")
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}); repair or remove that line") from None
        self._file = open(path, "a")

    def note(self, event: str, **facts: Any) -> None:
        """Add a line, and wait until it is on the disk."""
        line = {"time": time.time(), "event": event, **facts}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.lines.append(line)

    def of(self, *events: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] in events]

    def failures(self) -> list[dict[str, Any]]:
        """Segments that failed, without those in a row that ended the program: they come again."""
        kept: list[dict[str, Any]] = []
        for line in self.of(*ENDS):
            if line["event"] == "gave up":
                while kept and kept[-1]["event"] == "failed":
                    kept.pop()
            else:
                kept.append(line)
        return [line for line in kept if line["event"] == "failed"]

    def failures_in_a_row(self) -> int:
        latest = reversed(self.of(*ENDS))
        return len([*itertools.takewhile(lambda line: line["event"] == "failed", latest)])

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what a full disk has left in the buffer
            self._file.close()
