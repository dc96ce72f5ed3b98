"""Score, watch, film or export a trained policy: the best one of a run, or the last.

    python algos/play.py demo                           a trained Ant; or demo:hopper
    python algos/play.py RUN_DIR                        the returns of ten deterministic episodes
    python algos/play.py RUN_DIR --video ant.mp4        ten seconds on film, .mp4 or .gif
    python algos/play.py RUN_DIR --show                 in a window
    python algos/play.py RUN_DIR --export policy.pt2    for programs that have only torch
    python algos/play.py RUN1 RUN2 RUN3                 several policies as one, in all uses above

best.pt and last.pt have weights, arguments and the name of a script, which lies beside this file.
"""

import contextlib
import importlib.util
import io
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from torch import Tensor, nn

import vec_envs
from algos.worker_learner.arguments import UserError, check_args, read_flags, say_in_one_sentence
from algos.worker_learner.files import load_checked
from algos.worker_learner.workers import LONGEST_EVALUATION, compare_returns, score
from vec_envs.drawing import CannotDraw, choose_gl, draw, open_window, seconds_per_step

FASTEST_FILM = {".mp4": 50, ".gif": 20}  # pictures a second; a Hopper steps 125 times a second
WIDTH = {".mp4": 640, ".gif": 320}  # of a picture, at most
FILMED = 3  # episodes, of which the best one is filmed
DEMO = {"demo": "ant", "demo:hopper": "hopper"}  # folders of algos/demo


@dataclass
class Args:
    """Score, watch, film or export a trained policy."""

    run_dir: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN_DIR")]
    """folder of the run; demo or demo:hopper: a policy that comes with the code"""
    others: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[...]")] = ()
    """folders of more runs of any scripts in the same environment; their mean action is taken"""
    weights: tuple[float, ...] = ()
    """weights of the runs in the mean action, one for each run (none: equal weights)"""
    checkpoint: Literal["best", "last"] = "best"
    """which policy of the run"""
    episodes: int = 10
    """number of episodes, played all at once (--show: one after another)"""
    seed: int = 0
    """seed of the environments; the same seed gives the same result"""
    json: bool = False
    """print the scores as one JSON object and nothing else"""
    video: str = ""
    """film the best of three episodes into this .mp4 or .gif file (.png: only the end of one)"""
    seconds: float = 10.0
    """maximum length of the film (if an episode is shorter than two seconds, the next follow)"""
    width: int = 0
    """width of the film in pixels (0: at most 320 in a .gif, 640 in an .mp4)"""
    show: bool = False
    """play in a window"""
    export: str = ""
    """write the policy to this .pt2 file by torch.export"""


LIMITS = {"episodes": (1, 10_000), "seed": (0, 2**31 - 1), "seconds": (0.1, 3600)}
LIMITS["width"] = (0, 4096)


class Ensemble(nn.Module):
    """Several policies as one: the weighted mean of their actions. Of discrete actions the one with
    the largest mean probability; a script without π (DQN) gives its best action probability 1."""

    def __init__(self, agents: list[nn.Module], weights: tuple[float, ...], env: vec_envs.VecEnv):
        super().__init__()
        self.agents, self.one_agent = nn.ModuleList(agents), env.num_agents is None
        self.choices = int(getattr(env.single_action_space, "n", 0))  # 0: continuous actions
        self.register_buffer("weights", torch.tensor([x / sum(weights) for x in weights]))

    def opinion(self, agent: nn.Module, obs: Tensor) -> Tensor:  # (N, ..., act_dim or choices)
        if self.choices and hasattr(agent, "policy"):  # that of mappo.py normalises obs itself
            return agent.policy(agent.normalizer(obs) if self.one_agent else obs).probs
        action = agent(obs)
        return nn.functional.one_hot(action, self.choices).float() if self.choices else action

    def forward(self, obs: Tensor) -> Tensor:
        mean = torch.stack([self.opinion(agent, obs) for agent in self.agents], -1) @ self.weights
        return mean.argmax(-1) if self.choices else mean


def load(args: Args) -> dict[str, Any]:
    """What best.pt or last.pt has: script, args, step, agent (state_dict); others and weights."""
    folder = Path(str(args.run_dir).removesuffix("best.pt"))
    if args.run_dir in DEMO and not any(folder.glob("*.*")):  # no run has this name
        folder = Path(__file__).with_name("demo") / DEMO[args.run_dir]
    root, folder = folder, folder / ("best" * (folder / "best/args.json").exists())  # population's
    path = folder / f"{args.checkpoint}.pt"
    other, event = ("last", "evaluation") if path.stem == "best" else ("best", "checkpoint")
    advice = f"; try --checkpoint {other}" * (folder / f"{other}.pt").exists()
    if not path.exists():
        if not (folder / "args.json").exists():
            known = f"; demos are {' and '.join(DEMO)}" * args.run_dir.startswith("demo")
            raise UserError(f"{folder} is not the folder of a run: no args.json is in it{known}")
        raise UserError(f"{folder} has no {path.name} yet: no {event} has been made{advice}")
    saved, problem = load_checked(path)
    if saved is None:
        raise UserError(f"{path} is damaged ({problem}){advice}")
    if not isinstance(saved, dict) or not {"script", "args", "step", "agent"} <= saved.keys():
        raise UserError(f"{path} is not a policy that a script of algos/ has saved")
    vec_envs.refuse_program_in(root, saved["args"]["env"])
    others = [load(replace(args, run_dir=folder, others=(), weights=())) for folder in args.others]
    if len(names := {one["args"]["env"] for one in (saved, *others)}) > 1:
        raise UserError(f"an ensemble needs one environment; these runs have {sorted(names)}")
    weights = args.weights or (1.0,) * (1 + len(others))
    if len(weights) != 1 + len(others) or min(weights) < 0 or not 0 < sum(weights) < math.inf:
        raise UserError(f"--weights {weights}: allowed is one per run, none below 0, not all 0")
    return {**saved, "others": others, "weights": weights}


def make(saved: dict, num_envs: int, seed: int, draws: bool = False) -> tuple[nn.Module, Any]:
    """The agent, made with its run's own arguments, and its environment, both on the CPU."""
    name = vec_envs.for_evaluation(saved["args"]["env"])
    try:  # Gymnasium takes render_mode only when it makes an env; a `VecEnv` takes none
        options = {"render_mode": "rgb_array"} if draws and not vec_envs.vec_env_class(name) else {}
        env = vec_envs.make(name, num_envs, "cpu", seed, **options)
    except ValueError as error:
        raise UserError(_line(error)) from None
    agents, spaces = [], (env.single_observation_space, env.single_action_space)
    spaces = spaces if env.num_agents is None else (env,)  # whose agents differ
    for one in (saved, *saved.get("others", ())):
        script = os.path.relpath(Path(__file__).parent / f"{one['script']}.py")
        try:
            if not os.path.isfile(script):  # nor is what lies elsewhere imported
                raise ImportError(f"No module named {one['script']!r}")
            module = importlib.import_module(".".join(filter(None, (__package__, one["script"]))))
            agents.append(module.Agent(*spaces, module.Args(**one["args"])))
            agents[-1].load_state_dict(one["agent"])
        except (ImportError, AttributeError, TypeError, RuntimeError) as error:
            raise UserError(f"{script} does not fit the policy: {_line(error)[:200]}") from None
    agent = Ensemble(agents, saved["weights"], env) if len(agents) > 1 else agents[0]
    return agent.eval().requires_grad_(False), env


def print_score(args: Args, saved: dict) -> None:
    with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):  # environments print
        agent, env = make(saved, args.episodes, args.seed)
        found, returns = score(agent, env, args.seed)
    facts = {"script": saved["script"], "env": saved["args"]["env"], "run_dir": args.run_dir}
    facts |= {"checkpoint": args.checkpoint, "step": saved["step"], "seed": args.seed}
    facts |= {"others": args.others, "weights": saved["weights"]} if args.others else {}
    if args.json:
        numbers = {"return_mean": found.pop("return"), "length_mean": found.pop("length"), **found}
        return print(json.dumps(facts | numbers | {"episodes": args.episodes, "returns": returns}))
    for one in (saved, *saved["others"]):
        facts |= {"script": one["script"], "step": one["step"]}
        print("{script} on {env}, {checkpoint}.pt of step {step}, seed {seed}".format(**facts))
    print("episode      return", *(f"{i:7}  {x:10.6g}" for i, x in enumerate(returns, 1)), sep="\n")
    mean, std, length = (found.pop(name) for name in ("return", "return_std", "length"))
    print(f"   mean  {mean:10.6g} ± {std:.3g} (standard deviation), {length:.1f} steps long")
    for name, value in found.items():  # the share of successes; of agents that differ, each
        print(f"{name.removeprefix('return_').replace('_', ' '):7}  {value:10.6g}")
    print(compare_returns(env), end="")


def episode(agent: nn.Module, env: vec_envs.VecEnv, seed: int | None) -> Iterator[None]:
    """Play one episode, with a `yield` before each step; at the end print its return."""
    obs, _ = env.reset(seed=seed)
    for _ in range(min(env.max_episode_steps, LONGEST_EVALUATION)):
        yield
        obs, _, terminated, truncated, info = env.step(agent(obs))
        if terminated[0] or truncated[0]:
            break
    print(f"return {info['episode_return'][0]:.6g} in {info['episode_length'][0]} steps")


def film(args: Args, saved: dict) -> None:
    import imageio

    kind = Path(args.video).suffix
    if kind == ".mp4" and importlib.util.find_spec("imageio_ffmpeg") is None:
        raise UserError('an .mp4 needs ffmpeg: pip install "imageio[ffmpeg]", or make it a .gif')
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame, too, draws without a window
    choose_gl(saved["args"]["env"])
    agent, env = make(saved, 1, args.seed, draws=True)
    open(args.video, "ab").close()  # where nobody may write, imageio has tracebacks, minutes later
    if kind == ".png":
        return still(args, agent, env)
    from PIL import Image
    from tqdm import trange

    seeds = range(args.seed, args.seed + FILMED)
    (mean, _, length, *_), best = max(([*score(agent, env, x)[0].values()], x) for x in seeds)
    every = math.ceil(1 / (seconds_per_step(env) * FASTEST_FILM[kind]))  # steps a picture
    seconds = every * seconds_per_step(env)
    count = math.ceil(min(max(length / every, 2 / seconds), args.seconds / seconds))
    width = args.width or WIDTH[kind]
    if hasattr(env, "painter"):  # to draw small pictures is faster than to shrink large ones
        env.painter.size = round(width * 0.75), width
    how = {"duration": 1000 * seconds, "loop": 0}  # for ever
    if kind == ".mp4":
        how, width = {"fps": 1 / seconds, "macro_block_size": 2}, width + width % 2  # even sizes
    obs, _ = env.reset(seed=best)
    with imageio.get_writer(args.video, mode="I", **how) as writer:
        for _ in trange(count, desc=args.video, leave=False, disable=None):
            picture = draw(env)
            if picture.shape[1] > width or args.width:
                height = round(picture.shape[0] * width / picture.shape[1])
                height += height % 2 * (kind == ".mp4")
                picture = np.asarray(Image.fromarray(picture).resize((width, height)))
            writer.append_data(picture)
            for _ in range(every):
                obs, *_ = env.step(agent(obs))
    env.close()
    print(
        f"{args.video}: {count} pictures, {count * seconds:.1f} seconds from the best of {FILMED} "
        f"episodes (seed {best}): return {mean:.6g} in {length:.0f} steps"
    )


def still(args: Args, agent: nn.Module, env: vec_envs.VecEnv) -> None:
    """The last picture of an episode; of StockTrading, the curve of its assets."""
    import imageio

    steps = int(score(agent, env, args.seed)[0]["length"])  # of this very episode
    for step, _ in enumerate(episode(agent, env, args.seed), 1):
        if step == steps or step % max(1, steps // 50) == 0:  # the curve has 50 points
            picture = draw(env)
    env.close()
    imageio.imwrite(args.video, picture)
    print(f"{args.video}: a picture of the state before the last step of the episode")


def show(args: Args, saved: dict) -> None:
    if sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        raise UserError("--show needs a display, and there is none; take --video FILE.gif")
    agent, env = make(saved, 1, args.seed, draws=True)
    env.reset()
    update, close = open_window(env)
    due = time.perf_counter()
    for number in range(args.episodes):
        for _ in episode(agent, env, args.seed if number == 0 else None):
            if not update():
                return close()
            due = max(due + seconds_per_step(env), time.perf_counter())
            time.sleep(max(0.0, due - time.perf_counter()))
    close()


def export(args: Args, saved: dict) -> None:
    agent, env = make(saved, 2, args.seed)
    obs, _ = env.reset()
    program = torch.export.export(agent, (obs,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    content = io.BytesIO()  # given a path, torch has a RuntimeError where it cannot write
    torch.export.save(program, content)
    Path(args.export).write_bytes(content.getvalue())
    print(
        f"{args.export}: observations (batch, {', '.join(map(str, obs.shape[1:]))}), float32, to "
        f"actions of {env.name}. To use it:\n    import torch\n"
        f"    policy = torch.export.load({args.export!r}).module()\n"
        "    actions = policy(observations)"
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def main(args: Args) -> None:
    check_args(args, LIMITS)
    asked = [name for name in ("json", "video", "show", "export") if getattr(args, name)]
    if len(asked) > 1:
        raise UserError(f"--{asked[0]} and --{asked[1]}: use one at a time")
    for name, endings in (("video", (*FASTEST_FILM, ".png")), ("export", (".pt2",))):
        path = Path(getattr(args, name))
        if name in asked and path.suffix not in endings:
            raise UserError(f"--{name} {path}: the name must end in {' or '.join(endings)}")
        if name in asked and not path.parent.is_dir():
            raise UserError(f"--{name} {path}: there is no folder {path.parent}")
    torch.set_num_threads(1)  # the networks are small
    tasks = {"video": film, "show": show, "export": export}
    try:
        tasks.get("".join(asked), print_score)(args, load(args))
    except (CannotDraw, OSError) as error:  # no OpenGL, no window; full disk, no permission
        raise UserError(_line(error)) from None


if __name__ == "__main__":
    sys.excepthook = say_in_one_sentence
    args = read_flags(Args, sys.argv[1:], config=(tyro.conf.FlagCreatePairsOff,))
    if args.json:  # PyBullet prints in C
        sys.stdout = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
    main(args)
