"""What one GPU does: is its physics right, how fast is it, how soon does it walk. 15 minutes.

    pip install -e ".[gpu,plot]"
    python benchmark/gpu.py                          # results/gpu.csv, gpu.png

Sections, in this order, in what is left of --minutes (what does not fit is said, not measured):

    parity    one step of mujoco_warp from the states of MuJoCo's C engine, beside the C engine's
    envs      env.step() alone, random actions
    typed     the speed of commands as somebody types them, beside --device cpu
    updates   sac.py's gradient updates with each --compile mode, physics being a small part
    replay    sac.py on Ant with a quarter of the environments
    ppo       ppo.py on each robot till it earns 6000; seconds to 3000, 5000 and 6000
    compile   ppo.py's training speed with the other --compile modes

The sections typed, replay and ppo have no --compile: on a GPU the scripts choose graphs.

The trainings are the scripts themselves, stopped by SIGTERM. Seconds are of training: what comes
before the end of the first iteration (imports, kernels, PPO's graphs, but not SAC's, whose first
update is later) is listed apart. Evaluations are deterministic, by the C engine, in a process
beside. PPO's flags for so many environments are those of locomotion on GPUs elsewhere (24 steps, 5
epochs of 4 minibatches, rate by KL), not tuned here.
Without a GPU it says so; `--device cpu --envs 8 --seconds 1 --results FOLDER` tries the script out.
"""

import csv
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import itertools
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import tyro
from returns import RESULTS, ROOT, commit

import vec_envs
from algos.worker_learner.arguments import say_in_one_sentence

LEVELS = (3000, 5000, 6000)
MODES = "none", "default", "graphs"  # of --compile; on a GPU auto is graphs
TYPED = "ppo_hterm.py --env Ant", "sac.py --env HalfCheetah", "ppo.py --env Ant --total-steps 1e8"
COLUMNS = ("section", "what", "seconds", "value", "unit", "note", "device", "versions", "commit")
COLUMNS += ("date", "command")
ENDLESS = "--total-steps 10000000000"
WARM_UP = 12_000  # steps: later than the first update of each
SHORTEST = 15  # seconds; with less left, a measurement is not begun


@dataclass
class Options:
    """Measure what one GPU does, and write gpu.csv and gpu.png."""

    sections: list[str] = field(default_factory=lambda: list(SECTIONS))
    """which of them"""
    robots: list[str] = field(default_factory=lambda: ["Ant", "Humanoid"])
    """MuJoCo environments for parity, envs and ppo"""
    envs: int = 4096
    """environments stepped together"""
    minutes: float = 15.0
    """for everything"""
    seconds: float = 0.0
    """of each training (0: what is left of the minutes, in fair shares)"""
    device: Literal["cuda", "cpu"] = "cuda"
    """cpu: a trial of this script, no measurement"""
    results: Path = RESULTS
    """folder of the CSV and the figure"""


@dataclass
class Clock:
    """When the minutes are over, and how many trainings still want a share of them."""

    end: float
    seconds: float
    shares: list[float]

    def left(self) -> float:
        return self.end - time.perf_counter()

    def share(self) -> float:
        """Seconds for the next training."""
        mine, rest = self.shares[0], sum(self.shares)
        self.shares = self.shares[1:]
        return self.seconds or max(0.0, self.left() * mine / rest)


# Training runs of the scripts.


def progress(run_dir: Path) -> tuple[list[tuple[int, float]], dict[str, list[tuple[int, float]]]]:
    """[(step, seconds)] of the iterations, and [(step, return)] of "training" and "evaluation"."""
    path, iterations = run_dir / "metrics.csv", {}
    returns: dict[str, list[tuple[int, float]]] = {"training": [], "evaluation": []}
    names = {"charts/episodic_return": "training", "eval/episodic_return": "evaluation"}
    lines = path.read_text().splitlines(keepends=True)[1:] if path.exists() else []
    for line in lines:
        if line.count(",") == 3 and line.endswith("\n"):  # it is being written
            step, seconds, tag, value = line.split(",")
            if tag in names:
                returns[names[tag]].append((int(step), float(value)))
            elif not tag.startswith(("charts/episodic", "eval/")):
                iterations.setdefault(int(step), float(seconds))
    return sorted(iterations.items()), returns


def steady_speed(iterations: list[tuple[int, float]]) -> float:
    """Steps per second of the later half; 0 if there is too little."""
    later = iterations[len(iterations) // 2 :] if len(iterations) > 3 else iterations
    if len(later) < 2 or later[-1][1] <= later[0][1]:
        return 0.0
    return (later[-1][0] - later[0][0]) / (later[-1][1] - later[0][1])


def seconds_to(
    level: float, points: list[tuple[int, float]], iterations: list[tuple[int, float]]
) -> float | None:
    """Training seconds after the first iteration to the first return of at least `level`."""
    at = dict(iterations)
    reached = [step for step, value in points if value >= level and step in at]
    return at[min(reached)] - iterations[0][1] if reached else None


def train(
    options: Options, script: str, flags: str, seconds: float, clock: Clock, enough: float = 1e9,
    ready: int = 1,
) -> tuple[list, dict, int, str, str]:  # fmt: skip
    """Let a script train for so many seconds after step `ready`, or till it earns `enough`.

    -> its progress, peak bytes of GPU memory in use beyond what was, what went wrong, its command.
    """
    command = ["python", f"algos/{script}.py", *flags.split(), "--device", options.device]
    command += ["--checkpoint-every", "10000000000"]  # they cost time
    before, peak, first = memory(options), 0, 0.0
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/stderr", "w") as stderr:
        run_dir = Path(folder) / "run"
        child = subprocess.Popen(
            [sys.executable, ROOT / command[1], *command[2:], "--run-dir", run_dir],
            **{"cwd": ROOT, "stdout": subprocess.DEVNULL, "stderr": stderr},
        )
        while child.poll() is None and clock.left() > 0:
            time.sleep(0.2)
            peak = max(peak, memory(options) - before)
            iterations, returns = progress(run_dir)
            if not first and iterations and iterations[-1][0] >= ready:
                first = time.perf_counter()
            walked = any(value >= enough for _, value in returns["evaluation"])
            late = first and time.perf_counter() - first > seconds
            if walked or (late and len(iterations) > 3):  # fewer have no speed
                break
        if stopped := child.poll() is None:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:  # it has its own children, which die with it
                child.kill()
                child.wait()
        iterations, returns = progress(run_dir)
        error = "" if stopped else Path(stderr.name).read_text().strip()[-200:] or "it ended"
    if not error and len(iterations) < 2:
        error = "no second iteration in the time there was"
    return iterations, returns, peak, " ".join(error.split()), shlex.join(command)


def memory(options: Options) -> int:
    """Bytes in use on the GPU, by whomever."""
    if options.device == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


# Sections: each yields (what, seconds or "", value or "", unit, note, command).
Row = tuple[str, float | str, float | str, str, str, str]


def parity(options: Options, clock: Clock) -> Iterator[Row]:
    """From the C engine's states, with the same actions: one step of each."""
    num_envs, steps = min(options.envs, 256), 50 if options.device == "cuda" else 3
    for name in options.robots:
        c = vec_envs.make(name, num_envs, seed=0)
        start = time.perf_counter()
        warp = vec_envs.make(name, num_envs, options.device, seed=0, backend="warp")
        c.reset(), warp.reset()
        gaps, reward_gaps, agree = [], [], []
        for _ in range(steps):
            state = {"qpos_": c.qpos, "qvel_": c.qvel, **c.sim.fields}
            state["warmstart_"] = torch.zeros(num_envs, c.model.nv)
            warp.sim.load_state_dict({k: v.to(options.device).float() for k, v in state.items()})
            action = torch.rand(num_envs, *c.single_action_space.shape) * 2 - 1
            action *= torch.from_numpy(c.single_action_space.high)
            _, c_reward, c_terminated, _, c_info = c.step(action)
            _, reward, terminated, _, info = warp.step(action.to(options.device))
            theirs, ours = c_info["final_obs"], info["final_obs"].cpu()
            gaps.append(((ours - theirs).abs() / (1 + theirs.abs())).amax(1))
            reward_gaps.append((reward.cpu() - c_reward).abs() / (1 + c_reward.abs()))
            agree.append(terminated.cpu() == c_terminated)
        yield f"{name}: seconds, kernels' compilation included", "", since(start), "s", "", ""
        gap, reward_gap = torch.cat(gaps), torch.cat(reward_gaps)
        note = f"{num_envs} environments, {steps} steps, each from the C engine's state"
        for what, value in (
            ("median of the largest relative gap in an observation", gap.median()),
            ("99th percentile of it", gap.quantile(0.99)),
            ("99th percentile of the relative gap in the reward", reward_gap.quantile(0.99)),
            ("share of steps with a gap below 2e-3", (gap < 2e-3).float().mean()),
            ("share of steps that agree on termination", torch.cat(agree).float().mean()),
        ):
            yield f"{name}: {what}", "", value.item(), "", note, ""


def since(start: float) -> float:
    return time.perf_counter() - start


def envs(options: Options, clock: Clock) -> Iterator[Row]:
    """env.step() with random actions: physics, observations, rewards, autoreset."""
    for name, num_envs in itertools.product(options.robots, (options.envs, 4 * options.envs)):
        env = vec_envs.make(name, num_envs, options.device, seed=0)
        env.reset()
        shape = (20, num_envs, *env.single_action_space.shape)
        high = torch.from_numpy(env.single_action_space.high).to(options.device)
        actions = (torch.rand(shape, device=options.device) * 2 - 1) * high
        for i in range(5):
            env.step(actions[i])
        count, start = 0, now(options)
        while now(options) - start < (options.seconds or 5.0):
            for i in range(20):
                env.step(actions[i])
            count += 20 * num_envs
        speed, what = count / (now(options) - start), f"{name}: env steps/s"
        what += f" of {num_envs}" if num_envs > options.envs else ""
        yield what, "", speed, "steps/s", f"{num_envs} environments", ""
        env.close()


def now(options: Options) -> float:
    """The time when the GPU has done what it was told."""
    if options.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def typed(options: Options, clock: Clock) -> Iterator[Row]:
    """Commands as a reader of the README types them, on the GPU and on the CPU beside it."""
    for command, device in itertools.product(TYPED, dict.fromkeys((options.device, "cpu"))):
        what = f"python algos/{command} --device {device}: training steps/s"
        if clock.left() < SHORTEST:
            yield what, "", "", "steps/s", "the minutes were over", ""
            continue
        script, _, flags = command.partition(".py ")
        seconds, where = options.seconds or 6.0, dataclasses.replace(options, device=device)
        found = train(where, script, flags, seconds, clock, ready=WARM_UP)
        speed = steady_speed([point for point in found[0] if point[0] >= WARM_UP])
        error = found[3] or ("" if speed else "too short to say")
        yield what, "", speed or "", "steps/s", error, found[4]


def updates(options: Options, clock: Clock) -> Iterator[Row]:
    """SAC's updates, 256 for each step of 64 environments."""
    for mode in MODES:
        what = f"sac.py --compile {mode}"
        if clock.left() < SHORTEST:
            yield f"{what}: updates/s", "", "", "updates/s", "the minutes were over", ""
            continue
        num_envs, utd = min(64, options.envs), 4
        flags = f"--env Ant --num-envs {num_envs} --utd-ratio {utd} --warmup-steps 1000 {ENDLESS} "
        flags += f"--log-every {num_envs} --buffer-size 100000 --no-save-replay --eval-every 0 "
        flags += f"--eval-episodes 1 --compile {mode}"
        seconds = options.seconds or 12.0
        # the first iterations only collect, the next compile
        found = train(options, "sac", flags, seconds, clock, ready=1500)
        iterations, _, _, error, command = found
        speed = utd * steady_speed([point for point in iterations if point[0] >= 1500])
        error = error or ("" if speed else "too short to say")
        yield f"{what}: updates/s", "", speed or "", "updates/s", error, command


def replay(options: Options, clock: Clock) -> Iterator[Row]:
    """SAC on Ant: 16 updates with 1024 transitions for each step of all environments."""
    num_envs = max(1, options.envs // 4)
    flags = f"--env Ant --num-envs {num_envs} --utd-ratio {16 / num_envs} --batch-size 1024 "
    flags += f"--warmup-steps {20 * num_envs} --log-every {num_envs} {ENDLESS} "
    flags += f"--no-save-replay --eval-every {400 * num_envs} --eval-episodes 4"
    yield from training(options, "sac", "Ant", flags, clock)


def ppo_flags(options: Options, name: str) -> str:
    flags = f"--env {name} --num-envs {options.envs} --num-steps 24 --epochs 5 {ENDLESS} "
    flags += f"--minibatch-size {6 * options.envs} --target-kl 0.01 "
    return flags + f"--eval-every {250 * options.envs}"


def ppo(options: Options, clock: Clock) -> Iterator[Row]:
    for name in options.robots:
        yield from training(options, "ppo", name, ppo_flags(options, name), clock, LEVELS[-1])


def training(
    options: Options, script: str, name: str, flags: str, clock: Clock, enough: float = 1e9
) -> Iterator[Row]:
    """All that is to be said of one training."""
    what, seconds = f"{name}, {script}.py", clock.share()
    if not options.seconds and seconds < SHORTEST:
        yield f"{what}: training steps/s", "", "", "steps/s", "the minutes were over", flags
        return
    start = time.perf_counter()
    found = train(options, script, flags, seconds, clock, enough)
    whole, (iterations, returns, peak, error, command) = since(start), found
    speed = steady_speed(iterations)
    yield f"{what}: training steps/s", "", speed or "", "steps/s", error, command
    if not iterations:
        return
    trained = iterations[-1][1] - iterations[0][1]
    yield f"{what}: seconds of training", "", trained, "s", "without the first iteration", command
    yield (
        f"{what}: seconds of all else",
        "",
        whole - trained,
        "s",
        "imports, kernels, first iteration, end",
        command,
    )
    if peak:
        yield f"{what}: peak GPU memory", "", peak / 2**30, "GiB", "", command
    for kind, points in returns.items():
        for level in LEVELS:
            found = seconds_to(level, points, iterations)
            note = "" if found is not None else f"not within {trained:.0f} s"
            value = "" if found is None else found
            yield f"{what}: seconds to a return of {level}, {kind}", "", value, "s", note, command
        at, last = dict(iterations), -1.0
        for step, value in points:
            if step in at and at[step] - last > trained / 200:  # enough points for a curve
                last = at[step]
                yield f"{what}: {kind}", last - iterations[0][1], value, "return", "", command


def compile(options: Options, clock: Clock) -> Iterator[Row]:
    """PPO's training speed by mode; `ppo` has it for auto, which is graphs."""
    name = options.robots[0]
    for mode in (mode for mode in MODES if mode != "graphs"):
        what = f"{name}, ppo.py --compile {mode}: training steps/s"
        if clock.left() < SHORTEST:
            yield what, "", "", "steps/s", "the minutes were over", ""
            continue
        flags = f"{ppo_flags(options, name)} --compile {mode}"
        found = train(options, "ppo", flags, options.seconds or 10.0, clock)
        iterations, _, _, error, command = found
        yield what, "", steady_speed(iterations) or "", "steps/s", error, command


SECTIONS: dict[str, Callable] = {
    **{"parity": parity, "envs": envs, "typed": typed, "updates": updates},
    **{"replay": replay, "ppo": ppo, "compile": compile},
}


def shares_of_physics(rows: list[dict]) -> Iterator[Row]:
    """How much of a training step env.step() is, where both were measured."""
    speeds = {row["what"]: float(row["value"]) for row in rows if row["value"] != ""}
    for what, speed in speeds.items():
        name = what.split(",")[0]
        alone = speeds.get(f"{name}: env steps/s")
        if what == f"{name}, ppo.py: training steps/s" and alone:
            note = "training steps/s over env steps/s"
            yield f"{name}, ppo.py: share of physics", "", speed / alone, "", note, ""


# Keeping and showing.


def versions() -> str:
    names = ("torch", "mujoco", "mujoco-warp", "warp-lang")
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def show(rows: list[dict]) -> None:
    """Print all but the curves as Markdown."""
    print("| what | value | |\n|---|---|---|")
    for row in rows:
        if row["unit"] != "return":
            value = row["value"] if row["value"] == "" else f"{float(row['value']):,.4g}"
            print(f"| {row['what']} | {value} {row['unit'] if value else ''} | {row['note']} |")


def draw(rows: list[dict], path: Path) -> None:
    rows = [row for row in rows if row["section"] in SECTIONS]
    try:
        from matplotlib import pyplot
    except ImportError:
        print("No figure without matplotlib: pip install matplotlib")
        return
    figure, panels = pyplot.subplots(
        1, 3, figsize=(17, 4.5), layout="constrained", width_ratios=(2, 1, 1)
    )
    curves = list(dict.fromkeys(row["what"] for row in rows if row["unit"] == "return"))
    runs = list(dict.fromkeys(what.rsplit(":", 1)[0] for what in curves))
    for what in curves:
        points = [(float(r["seconds"]), float(r["value"])) for r in rows if r["what"] == what]
        run, kind = what.rsplit(": ", 1)
        style = {"training": {"lw": 0.8, "alpha": 0.6}, "evaluation": {"marker": ".", "label": run}}
        panels[0].plot(*zip(*points, strict=True), color=f"C{runs.index(run)}", **style[kind])
    for level in LEVELS:
        panels[0].axhline(level, color="gray", lw=0.5)
    panels[0].set(title="return (dots: deterministic)", xlabel="training seconds")
    if panels[0].get_legend_handles_labels()[0]:
        panels[0].legend(frameon=False, fontsize=8)
    for panel, unit in ((panels[1], "steps/s"), (panels[2], "updates/s")):
        bars = [row for row in rows if row["unit"] == unit and row["value"] != ""][::-1]
        drawn = panel.barh([r["what"] for r in bars], [float(r["value"]) for r in bars])
        panel.bar_label(drawn, [f" {float(row['value']):,.0f}" for row in bars], fontsize=8)
        panel.set_title(unit)
        panel.set_xticks([])
        panel.margins(x=0.2)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
    figure.suptitle(rows[-1]["device"])
    figure.savefig(path, dpi=110)


def main(options: Options) -> None:
    path = options.results / "gpu.csv"
    if wrong := [name for name in options.sections if name not in SECTIONS]:
        raise SystemExit(f"--sections has {wrong[0]}; allowed is {', '.join(SECTIONS)}")
    if options.device == "cpu" and options.results == RESULTS:
        raise SystemExit("--device cpu only tries this script out: name a folder by --results")
    about = {"versions": versions(), "commit": commit()}
    about |= {"date": datetime.date.today().isoformat()}
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device here, so nothing was measured.")
        if not path.exists():
            nothing = {"section": "none", "note": "No GPU has run this benchmark yet."}
            write(path, [dict.fromkeys(COLUMNS, "") | nothing])
        return
    if importlib.util.find_spec("mujoco_warp") is None:
        print("MuJoCo on a GPU needs mujoco-warp, which is missing: pip install mujoco-warp")
        if options.device == "cuda":
            return
        options.sections = [name for name in options.sections if name != "parity"]
    device = "CPU, a trial" if options.device == "cpu" else torch.cuda.get_device_name()
    shares = [1.0] * ("replay" in options.sections)
    if "ppo" in options.sections:  # walking takes its time, and longest the first robot
        shares += [6.0, *[3.0] * (len(options.robots) - 1)]
    shares += [1.0] * ("compile" in options.sections)  # stays for it
    clock = Clock(time.perf_counter() + 60 * options.minutes, options.seconds, shares)
    rows: list[dict] = []
    before = list(csv.DictReader(open(path, newline=""))) if path.exists() else []
    before = [row for row in before if row["section"] not in (*options.sections, "physics", "none")]

    def keep(section: str, found: Iterator[Row]) -> None:
        for what, seconds, value, unit, note, command in found:
            entry = (section, what, seconds, value, unit, note, device)
            named = zip(COLUMNS, entry, strict=False)
            rows.append(dict(named) | about | {"command": command})
            if unit != "return":
                print(what, value, unit, note, sep="  ", flush=True)
        if rows:
            write(path, before + rows)  # what is measured is kept, whatever follows

    for section in SECTIONS:
        if section not in options.sections:
            continue
        try:
            keep(section, SECTIONS[section](options, clock))
        except Exception as error:  # said, and the other sections go on
            traceback.print_exc()
            note = f"failed: {type(error).__name__}: {error}"[:200]
            keep(section, iter([(section, "", "", "", note, "")]))
    keep("physics", shares_of_physics(before + rows))
    draw(before + rows, options.results / "gpu.png")
    show(before + rows)


if __name__ == "__main__":
    sys.excepthook = say_in_one_sentence
    main(tyro.cli(Options))
