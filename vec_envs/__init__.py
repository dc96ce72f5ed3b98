"""Batched environments: tensors in, tensors out, on CPU or GPU. `make` builds one."""

import ast
import difflib
import importlib.util
import inspect
import re
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch

from vec_envs.core import ContractError, MultiAgentVecEnv, VecEnv

__all__ = [
    "NAMES",
    "MultiAgentVecEnv",
    "VecEnv",
    "base_name",
    "for_evaluation",
    "make",
    "refuse_program_in",
    "simulates_on_gpu",
    "vec_env_class",
]

# name -> the module of this folder that defines it (imported when `make` needs it)
NAMES = {
    **dict.fromkeys(("Ant", "Humanoid", "HalfCheetah", "Hopper", "Walker2d", "Swimmer"), "mujoco"),
    **dict.fromkeys(("InvertedPendulum", "InvertedDoublePendulum", "Reacher", "Pusher"), "mujoco"),
    **dict.fromkeys(
        ("CartPole", "Pendulum", "Acrobot", "MountainCar", "MountainCarContinuous"), "classic"
    ),
    "Chasing": "chasing",
    "StockTrading": "stock_trading",
    **dict.fromkeys(("Spread", "SpeakerListener"), "particles"),
    **dict.fromkeys(("SpreadContinuous", "SpeakerListenerContinuous"), "particles"),
}


def make(
    name: str,
    num_envs: int,
    device: torch.device | str = "cpu",
    seed: int = 0,
    env_threads: int = 0,
    **options: Any,
) -> VecEnv:
    """`num_envs` copies of the environment `name` as one batched env.

    `name` is one of `NAMES`, any Gymnasium id ("LunarLander-v3"), "package:Id-v0" for an id
    that a package registers when it is imported, "my_module:MyVecEnv" for a subclass of `VecEnv`
    (made by `MyVecEnv(num_envs, device=device, seed=seed)`), "pettingzoo:package.module" for a
    parallel environment of PettingZoo, or "smac:3m" for a map of SMAC. The same `seed` (at least 0)
    gives the same episodes. `env_threads` is the number of threads that step MuJoCo on a CPU (0:
    one per core). `options` are the environment's own keyword arguments; they may also follow the
    name: "Spread,physics=openai".
    ValueError: unknown name or option, missing package, space that is not supported.
    """
    name, comma, rest = name.partition(",")
    words = re.split(r",(?=\s*\w+=)", rest) if comma else []  # a value, too, may have commas
    options |= dict(map(_option, words))
    for own in ("num_envs", "device", "seed", "env_threads"):
        if own in options:
            raise ValueError(f"{own} cannot follow the name {name!r}; it has its own flag")
    if (kind := vec_env_class(name)) is not None:
        threads = {"env_threads": env_threads} if NAMES.get(name) == "mujoco" else {}
        try:
            return kind(num_envs, device=device, seed=seed, **threads, **options)
        except (TypeError, LookupError) as error:  # of an option, or of the call itself
            if error.__traceback__.tb_next is not None and not (options and name in NAMES):
                raise  # from within: somebody looks for a bug in a class of their own
            all_own = (inspect.signature(base).parameters for base in kind.__mro__)
            own = next(own for own in all_own if "options" not in own)  # not where it hands them on
            hint = f"; its options are {', '.join([*own][3:])}" if [*own][3:] else ""
            raise ValueError(f"{name}: {error}{hint * ('keyword' in str(error))}") from error
    import gymnasium

    if ":" not in name and name not in gymnasium.registry:
        if name.startswith("ALE/"):
            raise ValueError(f"{name}: Atari's pictures are not supported, only numbers are")
        known = [*NAMES, *gymnasium.registry]
        by_lower_case = {known_name.lower(): known_name for known_name in known}
        nearest = difflib.get_close_matches(name.lower(), by_lower_case, n=4, cutoff=0.5)
        hint = ", ".join(by_lower_case[match] for match in nearest)
        hint = f"the nearest names are {hint}" if hint else f"known are {', '.join(NAMES)}"
        hint += "; ids and classes of other packages have their module before them, module:Id-v0"
        hint += " (a module of PettingZoo: pettingzoo:mpe2.simple_tag_v3)"
        raise ValueError(f"unknown environment {name!r}; {hint}")
    if ".py:" in name:
        raise ValueError(f"{name}: a module is named as in an import, without .py")
    from vec_envs.gym import GymEnv, SeveralAgents
    from vec_envs.several_agents import PETTINGZOO, SMAC, MultiAgentGymEnv

    if not name.startswith((PETTINGZOO, SMAC)):
        try:
            return GymEnv(name, num_envs, device=device, seed=seed, **options)
        except SeveralAgents:
            pass
    return MultiAgentGymEnv(name, num_envs, device=device, seed=seed, **options)


def vec_env_class(name: str) -> type[VecEnv] | None:
    """The class of one of `NAMES` or of "my_module:MyVecEnv"; None for what is not a `VecEnv`."""
    name = base_name(name)
    if name in NAMES:
        return getattr(import_module(f"vec_envs.{NAMES[name]}"), name)
    module, _, own = name.rpartition(":")
    if not module or not own.isidentifier():  # the id of a Gymnasium environment
        return None
    try:
        kind = getattr(import_module(module), own, None)
    except Exception:  # `GymEnv` imports it again, and says what is wrong with it
        return None
    return kind if isinstance(kind, type) and issubclass(kind, VecEnv) else None


def simulates_on_gpu(name: str, num_envs: int) -> bool:
    """Whether a GPU, where there is one, should simulate `num_envs` of this environment.

    A step of MuJoCo is many small kernels there: an H100 takes 10.7 ms to step 1024 Ants, 14.5 ms
    to step 4096 (HalfCheetah: 2.4 and 3.1 ms); two CPU cores make 10,000 Ant steps a second.
    """
    if NAMES.get(base_name(name)) == "mujoco":
        return num_envs >= 1024 and importlib.util.find_spec("mujoco_warp") is not None
    return vec_env_class(name) is not None


def for_evaluation(name: str) -> str:
    """`name` with its class's `evaluation_options`; options that are in `name` take precedence."""
    base, _, own = name.partition(",")
    options = getattr(vec_env_class(name), "evaluation_options", "")
    return ",".join(filter(None, (base, options, own)))


def refuse_program_in(folder: Path | str, name: str) -> None:
    """ContractError if the module of `name` lies in `folder`, the run folder that names it.

    A run folder of somebody else is data: to open it must not execute a program that came with it.
    Nothing is imported here. What is on the PYTHONPATH itself is there by its user's wish.
    """
    folder, entries = Path(folder).resolve(), None  # None: those of sys.path
    if any(folder in (path, *path.parents) for path in (Path(x).resolve() for x in sys.path)):
        return
    for part in re.split("[:.]", base_name(str(name)).removeprefix("pettingzoo:")):
        if (spec := PathFinder.find_spec(part, entries)) is None:
            return
        if spec.origin and folder in Path(spec.origin).resolve().parents:
            raise ContractError(f"{name}: {spec.origin} lies in the run folder; it is not executed")
        if (entries := spec.submodule_search_locations) is None:
            return


def base_name(name: str) -> str:
    """`name` without the options that follow it."""
    return name.partition(",")[0]


def _option(word: str) -> tuple[str, Any]:
    """ "physics=openai" -> ("physics", "openai"); numbers, tuples, booleans and inf as such."""
    key, equals, value = (part.strip() for part in word.partition("="))
    if not key.isidentifier() or not equals:
        raise ValueError(f"{word!r} is not an option of an environment, such as g=9.8")
    try:
        return key, ast.literal_eval(re.sub(r"\binf\b", "1e999", value))
    except (ValueError, SyntaxError, TypeError):
        return key, {"true": True, "false": False}.get(value.lower(), value)
