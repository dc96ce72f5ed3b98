"""How fast a run is: threads, compilation, CUDA graphs, memory. Compilation changes rounding, and
on a GPU random numbers. CUDA graphs round learning rates to 32 bits."""

import contextlib
import ctypes
import inspect
import math
import os
import re
import shutil
import sys
import sysconfig
import threading
import timeit
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from algos.worker_learner.arguments import UserError, tell, warn
from vec_envs.core import available_cores

WIDE = 256  # units of a layer from which on products of matrices take most of an update
RECHECK_SECONDS = 60  # until it is asked again whether several threads are faster
OPTIONS = "weight_decay", "amsgrad", "maximize"  # of Adam, which _Adam lacks
WORTH_COMPILING = 15_000  # gradient steps: 15 to 40 seconds of compiling, 1 to 6 milliseconds each


def choose_compile(args: Any, device: str, resumed: bool, learners: int = 1) -> str:
    """--compile, with `auto` replaced: by `graphs` on a GPU, or in a long run by the faster one."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) is not None  # torch tries no other
    compiler &= os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
    compiler &= learners == 1 and torch.__version__ >= "2.13"
    one_dnn = compiler and device == "cpu" and torch.backends.mkldnn.is_available()
    possible = {"graphs": device == "cuda" and learners == 1, "onednn": one_dnn}
    possible |= {"default": compiler, "none": True}
    if args.compile == "auto":
        possible["default"] &= gradient_steps(args) >= WORTH_COMPILING
        possible["onednn"] &= possible["default"] and one_dnn_is_faster(args.torch_threads or 1)
        return next(name for name in possible if possible[name])
    if possible[args.compile]:
        return args.compile
    needs = "one learner, torch 2.13, C++ and Python.h"
    needs += ", on a CPU with oneDNN" if args.compile == "onednn" else ""
    needs = "one learner on a GPU" if args.compile == "graphs" else needs
    if resumed:  # elsewhere, or with more learners
        tell(f"Not exact: --compile {args.compile} needs {needs}; the run goes on without it.")
        return "none"
    raise UserError(f"--compile is {args.compile}, which needs {needs}; use auto")


def gradient_steps(args: Any) -> float:
    """How many a run makes: of a script with --utd-ratio, or with so many after each rollout."""
    if hasattr(args, "utd_ratio"):
        return args.total_steps * args.utd_ratio
    rollout = args.num_steps * args.num_envs
    minibatches = -(-rollout // getattr(args, "minibatch_size", rollout))
    passes = getattr(args, "epochs", getattr(args, "updates", 1))
    return args.total_steps / rollout * passes * minibatches


def choose_threads(args: Any) -> int:
    """--torch-threads, with 0 replaced: by up to 8 if they multiply matrices faster than one.

    Measured, for it depends on what else runs: a core that another process uses makes all threads
    wait at the end of each operation. In narrow networks they wait more than they work.
    """
    limit = int(re.match(r"\d*", os.environ.get("OMP_NUM_THREADS", ""))[0] or 8)
    if learners := os.environ.get("LOCAL_WORLD_SIZE"):  # of torchrun, which sets the former itself
        limit = available_cores() // int(learners)
    cores = min(8, available_cores(), limit)
    width = max(getattr(args, name, 0) for name in ("hidden_size", "critic_hidden_size"))
    if args.torch_threads or width < WIDE or cores < 2:
        return args.torch_threads or 1
    return cores if any(gain(cores) > 1.4 for _ in range(3)) else 1  # too many are corrected later


def gain(threads: int) -> float:
    """How many times as fast as one thread so many multiply matrices at this moment."""
    x, seconds = torch.ones(256, 256), []
    for count in (1, threads):
        torch.set_num_threads(count)
        timeit.timeit(lambda: x @ x, number=10)  # the first one starts the threads
        seconds.append(timeit.timeit(lambda: torch.relu(x @ x), number=150))
    return seconds[0] / seconds[1]  # of sums: a few very long waits are what costs


def one_dnn_is_faster(threads: int) -> bool:
    """Whether oneDNN multiplies matrices 1.4 times as fast as torch's own library, MKL."""
    torch.set_num_threads(threads)
    x = torch.ones(256, 256)
    ways = torch.mm, lambda a, b: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    turns = [[timeit.timeit(partial(way, x, x), number=10) for way in ways] for _ in range(20)]
    usual, one_dnn = map(min, zip(*turns, strict=True))  # in turns, as other programs come and go
    return usual > 1.4 * one_dnn


def recheck_threads(args: Any) -> None:
    """Go on with one thread where several are slower, as while others use the cores."""
    if args.torch_threads > 1 and all(gain(args.torch_threads) < 1 for _ in range(2)):
        tell(f"{args.torch_threads} torch threads are slower than one: this run goes on with one.")
        args.torch_threads = 1
    torch.set_num_threads(args.torch_threads)


def prepare(args: Any, world_size: int) -> None:
    """Set up torch and the C library (glibc) in the learner's process."""
    if args.device == "cuda" and world_size > 1:
        index, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if index >= count:
            raise UserError(f"--nproc-per-node is more than the {count} GPUs of this machine")
        torch.cuda.set_device(index)
    if args.compile == "graphs":  # CUDA cannot record on its default stream
        torch.cuda.set_stream(torch.cuda.Stream())
    torch.set_num_threads(args.torch_threads)
    torch.set_flush_denormal(True)  # Adam's moments of dead units; such small numbers are slow
    # Otherwise glibc returns large tensors' memory, and asks for new pages in the next update.
    with contextlib.suppress(AttributeError):  # no glibc
        mallopt, trim_threshold, mmap_threshold = ctypes.CDLL(None).mallopt, -1, -3
        mallopt(mmap_threshold, 32 << 20)  # bytes, the most that is allowed
        mallopt(trim_threshold, 256 << 20)


def unless_debugged(how: str, update: Callable) -> str:
    """`how`, or "none" where a debugger is to stop in the script: it cannot in what is compiled."""
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    if sys.gettrace() or (monitoring and monitoring.get_tool(monitoring.DEBUGGER_ID)):
        return "none"
    with contextlib.suppress(OSError, TypeError):  # no file: a notebook's cell
        return "none" if "breakpoint()" in inspect.getsource(inspect.getmodule(update)) else how
    return how


def fits(how: str, things: Iterable) -> bool:
    """Whether --compile `how` can take the steps of all optimizers among them."""
    optimizers = [x for x in things if isinstance(x, torch.optim.Optimizer)]
    if how == "graphs":  # others ask a rate that is a tensor for its number
        return all(isinstance(x, torch.optim.Adam | torch.optim.RAdam) for x in optimizers)
    return all(map(_plain, optimizers))


def _plain(adam: torch.optim.Optimizer) -> bool:
    """Whether `_Adam` does what it does: one group, no options, as many steps of each weight."""
    options = [group.get(k) for group in adam.param_groups for k in OPTIONS]
    if type(adam) is not torch.optim.Adam or options != [0, False, False]:
        return False
    weights, states = adam.param_groups[0]["params"], adam.state.values()
    kinds = {x.dtype for x in (*weights, *(state["step"] for state in states))}
    steps = {float(adam.state.get(x, {}).get("step", 0)) for x in weights}
    return kinds == {torch.float32} and len(steps) == 1  # of float64, torch 2.13 forgets steps


def watch_optimizers(known: Iterable) -> Callable:
    """Warn of one whose steps would not be resumed, since it is not known -> how to end this."""
    ids, thread = set(map(id, known)), threading.get_ident()

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if threading.get_ident() == thread and id(optimizer) not in ids:
            ids.add(id(optimizer))
            how = "unless something given to it saves it, a resumed run begins it anew"
            warn(f"an optimizer was not given to run.start; {how}.")

    return register_optimizer_step_pre_hook(look).remove


class _Adam:
    """An Adam as the compiler reads it: the same weights and moments, and no fused kernel."""

    def __init__(self, adam: torch.optim.Adam):
        group = adam.param_groups[0]
        self.param_groups = [{"params": group["params"]}]
        self.betas, self.eps = group["betas"], group["eps"]
        self.rate = torch.zeros((), dtype=torch.float64, device=group["params"][0].device)
        self.moments, names = adam.state[group["params"][0]], ("exp_avg", "exp_avg_sq", "step")
        self.state = [(x, *map(adam.state[x].get, names)) for x in group["params"]]

    def zero_grad(self) -> None:
        for weight, *_ in self.state:
            weight.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """θ ← θ − η m̂ / (√v̂ + ε), with m̂ = m / (1 − β₁ᵗ) and v̂ = v / (1 − β₂ᵗ)."""
        t = self.state[0][3].double() + 1  # 1 − 0.999ᵗ is small at first
        # βᵗ = exp(t ln β), for the compiler computes a power again for every 16 weights.
        one, two = (1 - torch.exp(t * math.log(beta or 1e-99)) for beta in self.betas)
        rate = self.rate / one
        for weight, m, v, step in self.state:
            step.add_(1)
            m.lerp_(weight.grad, 1 - self.betas[0])
            v.mul_(self.betas[1]).addcmul_(weight.grad, weight.grad, value=1 - self.betas[1])
            weight.sub_(rate * m / ((v / two).sqrt() + self.eps))


def compiled(update: Callable, args: Any) -> Callable:
    """`update` with its losses, their gradients and the optimizers' steps as one compiled graph.

    The first updates run as they are: in them Adam makes its moments. Where it cannot be one graph,
    all do: in two graphs backward() would add to gradients that zero_grad() has not cleared.
    """
    torch._dynamo.config.trace_autograd_ops = True  # through backward(), by torch 2.13

    def without_gradients(*inputs: Any) -> Any:
        return pytree.tree_map_only(Tensor, Tensor.detach, update(*inputs))

    # The compiler counts its graphs by code; those of other runs in this process are not ours.
    without_gradients.__code__ = without_gradients.__code__.replace()
    cpu = args.device == "cpu"  # where the compiler draws its own random numbers one by one, and
    options = {"fallback_random": cpu, "cpp_wrapper": cpu}  # Python between kernels costs 5 %
    if args.compile == "onednn":
        from algos.worker_learner.products import OneDNN  # here, as it imports the compiler

        options["post_grad_custom_post_pass"] = OneDNN()
    compute = torch.compile(without_gradients, options=options, fullgraph=True)
    twins: dict[torch.optim.Adam, _Adam] = {}
    exc = torch._dynamo.exc
    failures = exc.TorchDynamoException, exc.FailOnRecompileLimitHit

    def learn(*inputs: Any) -> Any:
        leaves, tree = pytree.tree_flatten(inputs)
        optimizers = [x for x in leaves if isinstance(x, torch.optim.Optimizer)]
        if args.compile == "none" or not all(adam.state for adam in optimizers):
            return update(*inputs)
        try:
            for adam in optimizers:
                moments = adam.state.get(adam.param_groups[0]["params"][0])
                if adam not in twins or twins[adam].moments is not moments:  # new, or loaded
                    if not _plain(adam):
                        raise exc.Unsupported("an optimizer is not a plain Adam for all weights")
                    twins[adam] = _Adam(adam)
                twins[adam].rate.fill_(adam.param_groups[0]["lr"])  # a number would be compiled in
            leaves = [twins[x] if isinstance(x, torch.optim.Optimizer) else x for x in leaves]
            return compute(*pytree.tree_unflatten(leaves, tree))
        except failures as error:  # before anything was computed
            args.compile, error = "none", error.__cause__ or error
            places = re.findall(r'File "(.*?)", (line \d+)', str(error))
            where = " (" + ", ".join(places[-1]) + ")" if places else ""
            why = (str(error).strip() or repr(error)).splitlines()[0]
            tell(f"From here on not compiled: {why}{where}")
            return update(*inputs)

    return learn


def captured(function: Callable, args: Any) -> Callable:
    """`function`, recorded as a CUDA graph: one launch for hundreds of kernels, the same results.

    There is a graph for each combination of shapes and of other inputs; twice each runs without.
    Modules and optimizers change in place. What a graph returns is overwritten when it runs again.
    """
    runs: dict[tuple, int] = {}
    graphs: dict[tuple, tuple] = {}
    rates: dict[int, Tensor] = {}

    def graphed(*inputs: Any) -> Any:
        leaves, tree = pytree.tree_flatten(inputs)
        if args.compile == "graphs" and not fits("graphs", leaves):
            args.compile = "none"
            tell("From here on not compiled: an optimizer is neither Adam nor RAdam")
        if args.compile == "none":
            return function(*inputs)
        given = [x for x in leaves if isinstance(x, Tensor)]
        key = [getattr(x, "shape", x) for x in leaves]
        key = tuple(x if x.__hash__ else id(x) for x in key)
        runs[key] = runs.get(key, 0) + 1
        with _capturable(leaves, rates):
            if runs[key] <= 2 or torch.cuda.is_current_stream_capturing():
                return function(*inputs)
            if key not in graphs:
                graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
                leaves = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
                places = [x for x in leaves if isinstance(x, Tensor)]
                with torch.cuda.graph(graph, stream=here, capture_error_mode="thread_local"):
                    results = function(*pytree.tree_unflatten(leaves, tree))
                results = pytree.tree_map_only(Tensor, Tensor.detach, results)
                graphs[key] = graph, places, results
        graph, places, results = graphs[key]
        for place, tensor in zip(places, given, strict=True):
            place.copy_(tensor)
        graph.replay()
        return results

    return graphed


@contextlib.contextmanager
def _capturable(inputs: list, rates: dict[int, Tensor]) -> Iterator[None]:
    """Optimizers' learning rates are tensors here: a number would stay in the graph as it is."""
    optimizers = [x for x in inputs if isinstance(x, torch.optim.Optimizer)]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for weight, state in (item for optimizer in optimizers for item in optimizer.state.items()):
        state["step"] = state["step"].to(weight.device)  # loading leaves some on the CPU
    numbers = [group["lr"] for group in groups]
    for i, group in enumerate(groups):
        if i not in rates:
            rates[i] = torch.empty((), device=group["params"][0].device)
        group |= {"lr": rates[i].fill_(numbers[i]), "capturable": True}
    try:
        yield
    finally:
        for group, number in zip(groups, numbers, strict=True):
            group |= {"lr": number, "capturable": False}
