"""Several learners: how torchrun's processes find each other, and averages over all of them.

`torchrun --nproc-per-node N algos/ppo.py --env Ant` starts N processes. The flags describe the
whole run: each learner has an N-th of the envs, the workers and the batch, and its own seeds and
replay buffer; `step` counts the steps of all. They begin with learner 0's weights and average their
gradients; what is computed over a batch (statistics, mean advantages, a KL divergence) comes from
`…_over_learners`: N learners do what one would do with the whole batch. Learner 0 evaluates, logs,
prints and saves; checkpoint.rankK.pt has learner K's envs, replay buffer and random generator.
"""

import contextlib
import copy
import importlib
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from algos.worker_learner.arguments import AnyArgs, UserError

SHARES_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # torchrun's own, which outlives the learners
_JOINS = itertools.count()  # the process groups that this process has had
# What gloo, nccl and the store say when another process is gone or out of reach.
GONE = r"[Cc]onnection|by peer|[Tt]imed? ?out|[Bb]roken pipe|[Ss]ocket|remote process"


def world_size() -> int:
    """How many processes learn together: 1 without torchrun."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def average_gradients(*things: nn.Module | nn.Parameter) -> None:
    """Replace every gradient of modules or parameters by its mean over the learners.

    Where each learner's loss is a mean over its N-th of a batch, that is the gradient of the mean
    over the whole batch. One all-reduce of one vector; with one learner nothing.
    """
    if world_size() == 1:
        return
    parameters = ([x] if isinstance(x, Tensor) else x.parameters() for x in things)
    gradients = [p.grad for p in itertools.chain(*parameters) if p.grad is not None]
    vector = _all_reduce(torch.cat([x.flatten() for x in gradients]).div_(world_size()))
    for gradient, mean in zip(gradients, vector.split([x.numel() for x in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def mean_over_learners(x: Tensor) -> Tensor:
    """The mean of the learners' x, with a gradient; with one learner, x itself."""
    return _MeanOverLearners.apply(x) if world_size() > 1 else x


class _MeanOverLearners(torch.autograd.Function):  # torch's own all_reduce is deprecated
    """m = 1/N Σ_i x_i; ∂(Σ_j L_j)/∂x_i = 1/N Σ_j ∂L_j/∂m is a mean over the learners, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _all_reduce((x / world_size()).contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _MeanOverLearners.apply(gradient)


def var_mean_over_learners(x: Tensor, dim: int | None = None) -> tuple[Tensor, Tensor]:
    """torch.var_mean(x, dim, correction=0) of the union of all learners' x, all of one shape."""
    mean = x.mean(dim, keepdim=True)  # detached below, as ∂var/∂mean is 0
    var = (x - mean.detach()).square().mean(dim=dim)  # torch.var_mean is slow on a CPU
    mean = mean.view_as(var)
    if world_size() == 1:
        return var, mean
    mean = mean.double()  # in which E[x²] − E[x]² loses nothing that counts
    mean, square = mean_over_learners(torch.stack((mean, var + mean.square())))
    return (square - mean.square()).clamp(min=0).to(var), mean.to(var)


def std_mean_over_learners(x: Tensor) -> tuple[Tensor, Tensor]:
    """x.std() and x.mean() of the union of all learners' x, all of one shape."""
    if world_size() == 1:
        return x.std(), x.mean()
    var, mean = var_mean_over_learners(x)
    size = x.numel() * world_size()
    return (var * (size / (size - 1))).sqrt(), mean


# How they find each other.


def join_learners() -> bool:
    """Become one of torchrun's learners; False without torchrun."""
    if not distributed.is_torchelastic_launched() or distributed.is_initialized():
        return distributed.is_initialized()
    variables, start = os.environ, ""
    if variables.get(SHARES_STORE) == "True":
        # What the dead have left there must not be read again. Each node counts its own restarts.
        if variables["GROUP_WORLD_SIZE"] != "1" and variables["TORCHELASTIC_MAX_RESTARTS"] != "0":
            needed = "the environment variable TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
            raise UserError(f"--max-restarts is set, on several nodes; this needs {needed}")
        start = variables["TORCHELASTIC_RESTART_COUNT"]
    store, rank, size = next(distributed.rendezvous("env://"))
    store = distributed.PrefixStore(f"start {start}.{next(_JOINS)}", store)
    # Adam imports this. Imported later it keeps the process group, whose threads, still there when
    # Python ends, then abort the learner now and then ("terminate called without ...").
    importlib.import_module("torch._dynamo")
    cuda = torch.cuda.is_available() and distributed.is_nccl_available()
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size)
    return True


def leave_learners() -> None:
    if distributed.is_torchelastic_launched() and distributed.is_initialized():
        distributed.destroy_process_group()


def restarted_args(args: AnyArgs) -> AnyArgs:
    """What a learner goes on with that torchrun started: again, or on a node that joined.

    The command is the same each time: where its run folder holds a run, that is resumed.
    """
    if args.resume:
        return args
    if args.run_dir:
        args, found = copy.copy(args), Path(args.run_dir, "args.json").exists()
        args.resume = args.run_dir if from_learner_0(found) else ""
    elif os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0" or os.environ.get(SHARES_STORE) != "True":
        raise UserError("--run-dir is empty; learners that are started again need to know it")
    return args


def largest_over_learners(value: int) -> int:
    """The largest value that a learner has; returns when all have asked."""
    if world_size() == 1:
        return value
    return int(_all_reduce(torch.tensor(value), distributed.ReduceOp.MAX))


def from_learner_0(thing: Any) -> Any:
    """What learner 0 has, for all of them."""
    things = [thing]
    if world_size() > 1:
        with _one_sentence_if_alone():
            distributed.broadcast_object_list(things, device=torch.device("cpu"))
    return things[0]


def _all_reduce(x: Tensor, operation: Any = distributed.ReduceOp.SUM) -> Tensor:
    with _one_sentence_if_alone():
        distributed.all_reduce(x, operation)
    return x


@contextlib.contextmanager
def _one_sentence_if_alone() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason, *_ = str(error).split(". ")
        if not re.search(GONE, reason):  # an error of this process
            raise
        raise UserError(f"Another learner stopped ({reason})") from None
