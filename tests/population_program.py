"""A stand-in for a script of algos/, and for play.py, whose scores are known; it starts in 20 ms.

A step adds the learning rate to the value of a run, and the score is that value ± --noise. It is
copied as trainer.py and as play.py into one folder, beside checkpoint.pt, which every run begins
with. Without torch: what it has learned is in state.json. While a file `hold` is beside it, runs
that have come to step --hold wait.
"""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

DEFAULTS = {"learning_rate": 1.0, "gamma": 0.9, "noise": 0.0, "fails": 0.0, "nan_below": 0.0}
DEFAULTS |= {"hold": 1e9}
TUNED = {"Known": {"learning_rate": 2.0}}
LIMITS = {"gamma": (0, 1)}

if __name__ != "__main__":  # a population's driver has loaded it, to know its flags
    from dataclasses import make_dataclass

    Args = make_dataclass("Args", [(name, type(x), x) for name, x in DEFAULTS.items()])


def option(name: str, default: str | None = None) -> str | None:
    places = [at for at, word in enumerate(sys.argv) if word == name]
    return sys.argv[places[-1] + 1] if places else default


def train() -> int:
    folder = Path(option("--resume") or option("--run-dir"))
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit((folder / "saved").touch()))
    if option("--resume"):
        args = json.loads((folder / "args.json").read_text())["args"]
    else:
        given = {k: float(option("--" + k.replace("_", "-"), x)) for k, x in DEFAULTS.items()}
        args = given | {"seed": int(option("--seed")), "total": int(option("--total-steps"))}
        shutil.copyfile(Path(__file__).with_name("checkpoint.pt"), folder / "checkpoint.pt")
        write(folder / "args.json", {"script": "trainer", "args": args})
    state = folder / "state.json"
    before = json.loads(state.read_text()) if state.exists() else {"step": 0, "value": 0.0}
    while before["step"] >= args["hold"] and Path(__file__).with_name("hold").exists():
        time.sleep(0.02)
    if args["seed"] % 100 < args["fails"]:
        print(f"losses/policy is nan at step {before['step']}: training stopped", file=sys.stderr)
        return 1
    end = int(option("--pause-at"))
    if end > before["step"]:
        value = before["value"] + (end - before["step"]) * args["learning_rate"]
        write(state, {"step": end, "value": value})
    shutil.copyfile(Path(__file__).with_name("checkpoint.pt"), folder / "last.pt")
    return 0 if end >= args["total"] else 3


def play() -> int:
    folder = Path(sys.argv[1])
    args = json.loads((folder / "args.json").read_text())["args"]
    state = json.loads((folder / "state.json").read_text())
    value, count = state["value"], int(option("--episodes"))
    if value < args["nan_below"]:
        value = float("nan")
    returns = [value + args["noise"] * (-1) ** number for number in range(count)]
    print(json.dumps({"step": state["step"], "returns": returns}))
    return 0


def write(path: Path, content: dict) -> None:
    path.with_suffix(".new").write_text(json.dumps(content))
    os.replace(path.with_suffix(".new"), path)


if __name__ == "__main__":
    sys.exit(play() if Path(__file__).stem == "play" else train())
