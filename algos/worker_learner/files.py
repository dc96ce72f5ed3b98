"""What is in a run folder: its lock, metrics.csv, TensorBoard's file, checkpoints."""

import contextlib
import copy
import fcntl
import io
import os
import pickle
import re
import socket
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from algos.worker_learner.arguments import UserError, warn

LOCK_SECONDS = 5  # that a killed run may take to let go of its folder
_WARNED: set[str] = set()  # what could not be written the last time


def check_unused(folder: Path) -> None:
    """UserError where there is a run in it, or in a folder of it."""
    for found in (*folder.glob("args.json"), *folder.glob("*/args.json")):
        advice = f"resume it (--resume {found.parent}) or name another folder"
        raise UserError(f"--run-dir {folder} holds a run already; {advice}")


def lock(folder: Path, busy: str) -> contextlib.ExitStack:
    """UserError(busy) while another run has the folder; `close()` what it returns to let go."""
    handle, held = os.open(folder, os.O_RDONLY), contextlib.ExitStack()
    held.callback(os.close, handle)
    for _ in range(10 * LOCK_SECONDS + 1):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held.callback(fcntl.flock, handle, fcntl.LOCK_UN)  # a forked child has the handle, too
        except BlockingIOError:
            time.sleep(0.1)
            continue
        except OSError:  # a file system without locks
            pass
        return held
    held.close()
    raise UserError(busy)


class Log:
    """metrics.csv and TensorBoard's file: what `write` was given is in them when it returns.

    Opened by a resumed run, both lose what comes again: all after `step`; metrics.csv also the
    evaluations in `pending`. Not SummaryWriter: its thread raises when the disk is full.
    """

    def __init__(self, folder: Path, step: int, pending: set[int]):
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        path, rows = folder / "metrics.csv", ["step,seconds,tag,value\n"]
        text = path.read_text(errors="replace") if path.exists() else ""
        for line in text.split("\n")[1:-1]:  # the last one is empty, or torn
            at, *rest = line.split(",")
            if at.isdecimal() and len(rest) == 3 and int(at) <= step:
                if int(at) not in pending or not rest[1].startswith("eval/"):
                    rows.append(f"{line}\n")
        save("".join(rows), path)
        self._csv, self._event = open(path, "a", buffering=1), event_pb2.Event
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._tensorboard = RecordWriter(open(folder / name, "ab"))
        self._write_event(file_version="brain.Event:2")
        begin = event_pb2.SessionLog(status=event_pb2.SessionLog.START)  # hides what a killed run
        self._write_event(step=step + 1, session_log=begin)  # wrote after its checkpoint

    def write(self, step: int, seconds: float, metrics: dict[str, float]) -> None:
        rows = (f"{step},{seconds:.3f},{tag},{value:.8g}\n" for tag, value in metrics.items())
        quietly("metrics.csv", self._csv.write, "".join(rows))
        points = [{"tag": tag, "simple_value": value} for tag, value in metrics.items()]
        quietly("TensorBoard's file", self._write_event, step=step, summary={"value": points})

    def _write_event(self, **content: Any) -> None:
        event = self._event(wall_time=time.time(), **content)
        self._tensorboard.write(event.SerializeToString())
        self._tensorboard.flush()

    def close(self) -> None:
        quietly("metrics.csv", self._csv.close)
        quietly("TensorBoard's file", self._tensorboard.close)


def plot(folder: Path, title: str) -> None:
    """learning_curve.png of metrics.csv, where matplotlib is installed."""
    try:
        from matplotlib import figure, ticker
    except ImportError:
        return
    axes = figure.Figure(figsize=(7, 4)).subplots()
    axes.xaxis.set_major_formatter(ticker.EngFormatter())
    text, _, _torn = (folder / "metrics.csv").read_text().rpartition("\n")
    rows = [line.split(",") for line in text.split("\n")]
    for tag, style, label in (
        ("charts/episodic_return", "-", "training, with exploration"),
        ("eval/episodic_return", ".-", "evaluation, deterministic"),
    ):
        points = sorted((int(row[0]), float(row[3])) for row in rows if row[2] == tag)
        axes.plot(*zip(*points, strict=True) if points else ([], []), style, label=label)
    axes.set(title=title, xlabel="steps", ylabel="return")
    axes.legend(loc="lower right")
    axes.figure.savefig(folder / "learning_curve.png")


def quietly(what: str, function: Callable, *arguments: Any, **options: Any) -> bool:
    """Call a function that writes; a full disk is a warning, once, and training goes on."""
    try:
        function(*arguments, **options)
        _WARNED.discard(what)
        return True
    except OSError as error:
        if what not in _WARNED:
            _WARNED.add(what)
            warn(f"{what} could not be written ({error}); the run goes on.")
        return False


def save(content: Any, path: Path, backup: bool = False) -> None:
    """Text as such, else by torch.save: the file is new as a whole, or as it was before."""
    (temporary := path.with_suffix(".tmp")).unlink(missing_ok=True)  # a link would be followed
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode()) if isinstance(content, str) else torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error.__context__, OSError):  # torch.save hides it behind its own
            raise error.__context__ from None
        raise
    if backup and path.exists():
        os.replace(path, path.with_suffix(".prev.pt"))
    os.replace(temporary, path)


def check_loadable(state: dict[str, Any]) -> None:
    """UserError for a thing in it whose state_dict() could be saved, but not loaded."""
    for name, thing in state.items():
        try:
            torch.save(thing.state_dict(), file := io.BytesIO())
            file.seek(0)
            torch.load(file, weights_only=True, map_location="cpu")
        except (pickle.PickleError, AttributeError, TypeError) as error:
            what = re.search(r"GLOBAL (\S+)", str(error))
            allowed = "a checkpoint can have tensors, numbers, text, lists, dicts"
            found = f"the state of {name} has {what[1] if what else 'another type'}"
            raise UserError(f"run.start: {found}; {allowed}") from None


def load_checked(path: Path) -> tuple[Any, str]:
    """The content of a .pt file, or None and what is wrong with it.

    torch.load notices a truncated file but not a flipped bit; the checksums inside do.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            for entry in archive.infolist():
                if entry.external_attr:  # not in the checksums; torch would see an empty folder
                    damaged = entry.filename
        if damaged is not None:
            return None, f"wrong checksum of {damaged}"
        # mmap: a large replay buffer is not in memory twice while it is copied to its place
        return torch.load(path, weights_only=True, map_location="cpu", mmap=True), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def read_checkpoint(path: Path, now: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """The newest intact checkpoint, `path` or its backup; with `now`, that of learner 0's step."""
    problem = ""
    for name in (path, path.with_suffix(".prev.pt")):
        if not name.exists():
            continue
        os.close(os.open(name, os.O_RDONLY))  # OSError: what cannot be read is not damaged
        content, wrong = load_checked(name)
        if not wrong and not (isinstance(content, dict) and isinstance(content.get("run"), dict)):
            wrong = "a file of another kind"
        if wrong:
            problem = wrong
            warn(f"{name} is damaged ({wrong}); trying the one before.")
        elif all(content["run"][key] == now[key] for key in ("step", "world_size") if now):
            for key in [key for key in content if "param_groups" in content[key]]:
                content[key] = copy.deepcopy(content[key])  # else Adam's moments stay in the file
            if name != path:  # lest the next save replace it, and leave a worse one
                os.replace(name, path)
            return content
    if problem and not now:
        where = f"--resume {path.parent}"
        raise UserError(f"{where}: no checkpoint in it is intact; nothing was changed")
    return None  # killed before the first checkpoint: from the start, with the same seed


def snapshot(network: nn.Module) -> dict[str, Tensor]:
    return {name: x.cpu().clone() for name, x in network.state_dict().items()}


def what_fits(thing: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """`saved`; a network's tensors whose shape follows the number of learners stay as they are."""
    if not isinstance(thing, nn.Module):
        return saved
    now = thing.state_dict()
    return {k: now[k] if k in now and x.shape != now[k].shape else x for k, x in saved.items()}
