"""How fast a run is: threads, compilation, memory. Nothing here changes more than rounding."""

import contextlib
import ctypes
import itertools
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from algos.worker_learner.arguments import UserError
from vec_envs.core import available_cores

WIDE = 256  # units of a layer from which on products of matrices take most of an update
WORTH_COMPILING = 15_000  # gradient steps: some ten seconds of compiling, half a millisecond each
LONGEST_COMPILED = 16  # steps of a rollout, which the compiler writes out one after another


def choose_compile(args: Any, device: str) -> str:
    """--compile, and what `auto` is here: `default` where it repays the time that it takes.

    On a CPU it saves a third or more of the update of narrow networks, whose time goes into calls.
    That of wide ones goes into products of matrices, which are the same: there it gained nothing.
    """
    compiler = any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++")))
    if args.compile == "auto":
        narrow = network_width(args) < WIDE and gradient_steps(args) >= WORTH_COMPILING
        return "default" if compiler and (device == "cuda" or narrow) else "none"
    if args.compile == "graphs" and device == "cpu":
        raise UserError("--compile is graphs, which needs --device cuda; use default")
    if args.compile != "none" and not compiler:
        raise UserError(f"--compile is {args.compile}, which needs a C++ compiler; use none")
    return args.compile


def network_width(args: Any) -> int:
    return max(getattr(args, name, 0) for name in ("hidden_size", "critic_hidden_size"))


def gradient_steps(args: Any) -> float:
    """How many a run makes: of a replay buffer's script, or of one with rollouts."""
    if hasattr(args, "utd_ratio"):
        return args.total_steps * args.utd_ratio
    rollout = args.num_steps * args.num_envs
    minibatches = -(-rollout // getattr(args, "minibatch_size", rollout))
    return args.total_steps / rollout * getattr(args, "epochs", 1) * minibatches


def choose_threads(args: Any) -> int:
    """--torch-threads, and what 0 is here: all cores where they multiply matrices faster than one.

    Measured, for it depends on what else runs: a core that another process uses makes all threads
    wait at the end of each operation. In narrow networks they wait more than they work. A resumed
    run keeps what its args.json says.
    """
    cores = min(8, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if args.torch_threads or network_width(args) < WIDE or cores < 2:
        return args.torch_threads or 1
    x, seconds = torch.ones(256, 256), {}
    for threads in (1, cores):
        torch.set_num_threads(threads)
        times = []
        for _ in range(40):
            torch.relu(x @ x)
            times.append(time.perf_counter())
        seconds[threads] = statistics.median(b - a for a, b in itertools.pairwise(times))
    return min(seconds, key=seconds.get)


def prepare(args: Any, world_size: int) -> None:
    """Set up torch and the C library (glibc) in the learner's process."""
    if args.device == "cuda" and world_size > 1:
        index, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if index >= count:
            raise UserError(f"--nproc-per-node is more than this machine's GPUs, {count}")
        torch.cuda.set_device(index)
    torch.set_num_threads(args.torch_threads)
    torch.set_flush_denormal(True)  # Adam's moments of dead units become such, and are slow
    # Tensors of a megabyte, made anew in each update, are else new pages from the kernel each time:
    # a good part of the time of redq.py's update.
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):
            mallopt, trim_threshold, mmap_threshold = ctypes.CDLL(None).mallopt, -1, -3
            mallopt(mmap_threshold, 32 << 20)  # bytes, the most that is allowed
            mallopt(trim_threshold, 256 << 20)


def compiled(function: Callable, args: Any) -> Callable:
    """`function` by torch.compile, for --compile rollout, default or graphs."""
    if args.compile == "graphs":  # whose next run overwrites what the last one gave
        graphed = torch.compile(function, mode="reduce-overhead")
        return lambda *inputs: pytree.tree_map_only(Tensor, torch.clone, graphed(*inputs))
    # On a CPU random numbers are torch's: the compiler draws its own one by one.
    return torch.compile(function, options={"fallback_random": args.device == "cpu"})


def compiled_rollout(collect: Callable, envs: Any, args: Any, num_steps: int) -> Callable:
    """`collect`, compiled where that is asked for and the environments are tensor operations."""
    if args.compile == "none" or not envs.compilable or num_steps > LONGEST_COMPILED:
        return collect
    envs.looks = False
    return compiled(collect, args)
