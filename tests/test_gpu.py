"""Collecting and learning never wait for the device: no number is asked of it on the way.

On a GPU `torch.cuda.set_sync_debug_mode` raises an error there. Without one, the questions are seen
as operations: what a script does is the same code, only an environment's step is not.
"""

import contextlib
import functools
import importlib
import sys

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import vec_envs
from algos import sac, worker_learner
from algos.worker_learner import engine
from algos.worker_learner import run as run_module
from tests.test_classic import Watch
from tests.test_scripts import RUNS
from vec_envs.core import Elsewhere

SMALL = {"total_steps": 192, "num_envs": 4, "num_steps": 16, "hidden_size": 8, "warmup_steps": 64}
SMALL |= {"batch_size": 8, "minibatch_size": 32, "buffer_size": 256, "updates": 2, "epochs": 2}
SMALL |= {"log_every": 64, "prioritized": True, "n_step": 2, "utd_ratio": 0.25}
SMALL |= {"critic_hidden_size": 8}


class NoEvaluator:
    """In place of a process, of which this test has no need."""

    pending, failed = (), False

    def __init__(self, *arguments):
        pass

    def submit(self, *arguments):
        pass

    def results(self, wait=0.0):
        return []

    close = submit


class Guard:
    """Between `on` and `off` nothing may be asked of the device; `allow`ed functions may."""

    def __init__(self, device: str):
        self.device, self.active, self.watch = device, False, Watch()

    def on(self):
        self.active = True
        if self.device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        else:
            self.watch.__enter__()

    def off(self):
        self.active = False
        if self.device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        else:
            self.watch.__exit__(None, None, None)

    def allow(self, function):
        @functools.wraps(function)
        def allowed(*arguments, **named):
            if not self.active:
                return function(*arguments, **named)
            self.off()
            try:
                return function(*arguments, **named)
            finally:
                self.on()

        return allowed


def train_guarded(script: str, env: str, device: str, folder, monkeypatch) -> set[str]:
    """Train for a few rollouts -> what was asked of the device but by logging and saving."""
    module, guard = importlib.import_module(f"algos.{script}"), Guard(device)
    run_class = worker_learner.Run
    monkeypatch.setattr(run_module, "Evaluator", NoEvaluator)
    for name in ("log", "log_episodes", "evaluate", "checkpoint"):
        monkeypatch.setattr(run_class, name, guard.allow(getattr(run_class, name)))
    checked = guard.allow(worker_learner.Workers._check_rollout)
    monkeypatch.setattr(worker_learner.Workers, "_check_rollout", checked)
    # These ask there: is anybody done, how many steps, are there such classes, where are the norms.
    if device == "cpu":
        for place, name in (
            (vec_envs.VecEnv, "step"),
            (torch.optim.RAdam, "step"),
            (torch.nn.functional, "one_hot"),
            (torch.nn.utils, "clip_grad_norm_"),
            (torch.nn.utils, "get_total_norm"),
        ):
            monkeypatch.setattr(place, name, guard.allow(getattr(place, name)))
    else:  # torch asks whether a deviation is negative
        independent = torch.distributions.Independent
        monkeypatch.setattr(independent, "sample", guard.allow(independent.sample))
    start, finish = run_class.start, run_class.finish

    def start_guarded(*arguments, **named):
        step = start(*arguments, **named)
        guard.on()
        return step

    def finish_unguarded(*arguments):
        guard.off()
        return finish(*arguments)

    monkeypatch.setattr(run_class, "start", start_guarded)
    monkeypatch.setattr(run_class, "finish", finish_unguarded)
    small = {k: v for k, v in SMALL.items() if hasattr(module.Args, k)}
    try:
        module.train(module.Args(env=env, device=device, run_dir=str(folder), **small))
    finally:
        if guard.active:
            guard.off()
    return guard.watch.seen


@pytest.mark.parametrize(("script", "env"), [run for run in RUNS if run[0] != "mod_sac"])
def test_nothing_is_asked_of_the_device(script, env, tmp_path, monkeypatch):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert not train_guarded(script, env, device, tmp_path / "run", monkeypatch)


@pytest.mark.parametrize(("script", "env"), [("ppo", "Pendulum"), ("mappo", "Spread")])
@pytest.mark.parametrize("device", [None, "meta"])
def test_all_that_environments_elsewhere_give_is_where_the_learner_is(script, env, device):
    """On a "meta" device there are no numbers; with a GPU, from there to the CPU with numbers."""
    if device is None and not torch.cuda.is_available():
        pytest.skip("no GPU")
    here = torch.device(device or "cpu")
    envs = Elsewhere(vec_envs.make(env, 3, "cpu" if device else "cuda"), here)
    action = envs.single_action_space.sample()
    action = torch.zeros(3, *((envs.num_agents,) if envs.num_agents else ()), *action.shape).long()
    obs, _ = envs.reset(seed=1)
    *results, info = envs.step(action)
    given = [obs, *results, *info.values(), envs.obs]
    given += [envs.state, envs.alive] if envs.num_agents else []
    assert {x.device.type for x in given} == {here.type} == {envs.device.type}
    assert envs.max_episode_steps == envs.envs.max_episode_steps


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is an error instead")
def test_mod_sac_asks_whose_turn_it_is(tmp_path, monkeypatch):
    seen = train_guarded("mod_sac", "Pendulum", "cpu", tmp_path / "run", monkeypatch)
    assert seen == {"_local_scalar_dense"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is an error instead")
def test_a_question_would_be_seen(tmp_path, monkeypatch):
    module = importlib.import_module("algos.ppo")
    update = module.update

    def curious(*arguments):
        losses = update(*arguments)
        next(iter(losses.values())).mean().item()
        return losses

    monkeypatch.setattr(module, "update", curious)
    seen = train_guarded("ppo", "CartPole", "cpu", tmp_path / "run", monkeypatch)
    assert seen == {"_local_scalar_dense"}


class Recorder(TorchDispatchMode):
    """What a CUDA graph does, on a CPU: runs the same operations again, on the same memory."""

    made: list["Recorder"] = []
    active = 0

    def __init__(self):
        super().__init__()
        self.operations, self.replays = [], 0
        Recorder.made.append(self)

    def __torch_dispatch__(self, function, types, inputs=(), named=None):
        outputs = function(*inputs, **(named or {}))
        self.operations.append((function, inputs, named or {}, outputs))
        return outputs

    def replay(self):
        self.replays += 1
        if self.replays == 1:  # the operations ran when they were recorded, as those of CUDA do not
            return
        with torch._C._AutoDispatchBelowAutograd():  # the gradients' operations are recorded, too
            for function, inputs, named, outputs in self.operations:
                again = pytree.tree_leaves(function(*inputs, **named))
                for place, tensor in zip(pytree.tree_leaves(outputs), again, strict=True):
                    if isinstance(place, torch.Tensor) and place.data_ptr() != tensor.data_ptr():
                        place.copy_(tensor)


@contextlib.contextmanager
def record(graph: Recorder, stream: None, capture_error_mode: str):
    Recorder.active += 1
    try:
        with graph:
            yield
    finally:
        Recorder.active -= 1


def train_recorded(script: str, env: str, folder, monkeypatch, how: str) -> dict:
    """A few updates with --compile `how` -> the weights at its end."""
    module = importlib.import_module(f"algos.{script}")
    monkeypatch.setattr(run_module, "Evaluator", NoEvaluator)
    monkeypatch.setattr(engine, "choose_compile", lambda *arguments: how)
    small = {k: v for k, v in SMALL.items() if hasattr(module.Args, k)} | {"total_steps": 320}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module.train(module.Args(env=env, device=device, run_dir=str(folder), **small))
    return torch.load(folder / "checkpoint.pt", weights_only=True)["agent"]


@pytest.fixture
def recorder(monkeypatch):
    """CUDA graphs, without a GPU by `Recorder`."""
    monkeypatch.setattr(Recorder, "made", [])
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorder)
        monkeypatch.setattr(torch.cuda, "graph", record)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Recorder.active > 0)
        for name in ("Stream", "set_stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, lambda *stream: None)
        name = "_get_capturable_supported_devices"  # by torch's rule of GPUs alone
        place = sys.modules[torch.optim.RAdam.__module__]
        monkeypatch.setattr(place, name, lambda **options: ["cpu"])


def test_graphs_of_a_function_without_a_script(recorder):
    """One for each flag, by the present rate; inputs and the optimizer stay as they are."""
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def update(network, adam, x, doubled):
        loss = network(2 * x if doubled else x).sum()
        adam.zero_grad()
        loss.backward()
        adam.step()
        return loss

    found = {}
    for how in ("none", "graphs"):
        args = sac.Args(device=device, compile=how, torch_threads=1)
        engine.prepare(args, 1)
        torch.manual_seed(0)
        network, learn = torch.nn.Linear(1, 1).to(device), engine.captured(update, args)
        found[how] = []
        adam = torch.optim.Adam(network.parameters(), 1.0, fused=True)
        given = list(torch.arange(12.0, device=device).view(12, 1))
        for number, x in enumerate(given):
            group = adam.param_groups[0]
            group["lr"] = rate = 1 / (1 + number)
            loss = learn(network, adam, x, number % 3 == 2)
            found[how].append(loss.item())
            assert group["lr"] is rate and not group["capturable"]
        assert [x.item() for x in given] == [*range(12)]
        assert loss.requires_grad == (
            how == "none"
        )  # else a graph would keep the gradient's memory
        found[how].append(network.weight.item())
    assert found["graphs"] == pytest.approx(found["none"], rel=1e-5)


@pytest.mark.parametrize(("script", "env"), [run for run in RUNS if run[0] != "a2c"])
def test_a_graph_computes_what_it_recorded(script, env, tmp_path, monkeypatch, recorder):
    """Nothing that a number of Python decides, and no memory that another takes the place of."""

    def rates_of_32_bits(run, update, period=1):
        def plainly(*inputs):
            with engine._capturable(pytree.tree_leaves(inputs), {}):
                return update(*inputs)

        return plainly

    ours = train_recorded(script, env, tmp_path / "graphs", monkeypatch, "graphs")
    assert sum(graph.replays for graph in Recorder.made) > 2 or torch.cuda.is_available()
    monkeypatch.setattr(worker_learner.Run, "compile", rates_of_32_bits)
    theirs = train_recorded(script, env, tmp_path / "none", monkeypatch, "none")
    close = 1e-4 if script == "xqc" else 0  # on a GPU it adds in any order
    torch.testing.assert_close(ours, theirs, rtol=close, atol=close)
