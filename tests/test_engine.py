"""What --compile auto is: by the number of updates and whether there is a compiler; and threads."""

import copy
import itertools
import re
import shutil
import sys
import sysconfig
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.torch_version import TorchVersion

from algos import a2c, crossq, dqn, ppo, qmix, redq, sac, vdn
from algos.worker_learner import UserError, engine


@pytest.mark.parametrize(
    ("args", "steps"),
    [
        (sac.Args(num_envs=4), 1_000_000),
        (dqn.Args(total_steps=50_000, utd_ratio=0.25), 12_500),
        (a2c.Args(total_steps=8000, num_envs=10, num_steps=8), 100),
        (
            ppo.Args(total_steps=64_000, num_envs=10, num_steps=64, minibatch_size=300, epochs=5),
            1500,
        ),
        (vdn.Args(num_envs=64), 125_000),
        (qmix.Args(num_envs=64), 93_750),
    ],
)
def test_gradient_steps_of_a_run(args, steps):
    assert engine.gradient_steps(args) == steps


def test_auto_compiles_where_it_pays(monkeypatch):
    monkeypatch.setattr(engine, "one_dnn_is_faster", lambda threads: False)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/" + name)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))
    assert engine.choose_compile(sac.Args(num_envs=4), "cpu", False) == "default"
    assert engine.choose_compile(sac.Args(total_steps=15_000), "cpu", False) == "default"
    short = sac.Args(num_envs=4, total_steps=14_999)
    assert engine.choose_compile(short, "cpu", False) == "none"
    assert engine.choose_compile(short, "cuda", False) == "graphs"
    assert engine.choose_compile(short, "cuda", False, 2) == "none"
    assert engine.choose_compile(sac.Args(compile="graphs"), "cuda", False) == "graphs"
    with pytest.raises(UserError, match="graphs, which needs one learner on a GPU; use auto"):
        engine.choose_compile(sac.Args(compile="graphs"), "cuda", False, 2)
    assert engine.choose_compile(sac.Args(num_envs=4), "cpu", False, 2) == "none"
    with pytest.raises(UserError, match="default, which needs one learner, torch"):
        engine.choose_compile(sac.Args(compile="default"), "cpu", False, 2)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", TorchVersion("2.12.1"))
        assert engine.choose_compile(sac.Args(num_envs=4), "cpu", False) == "none"
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/none")  # without python3-dev
    assert engine.choose_compile(sac.Args(num_envs=4), "cpu", False) == "none"
    assert engine.choose_compile(sac.Args(compile="graphs"), "cuda", False) == "graphs"


def test_a_compiler_is_one_that_torch_uses(monkeypatch):
    """g++, or what CXX says: torch does not look for another, and would say so after a warm-up."""
    if engine.choose_compile(sac.Args(), "cpu", False) == "none":
        pytest.skip("nothing is compiled here")
    monkeypatch.setattr(engine, "one_dnn_is_faster", lambda threads: False)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in ("c++", "clang++") else None)
    for value, chosen in ((None, "none"), ("clang++", "default"), ("clang++ -O1", "none")):
        monkeypatch.delenv("CXX", raising=False)
        if value:
            monkeypatch.setenv("CXX", value)
        assert engine.choose_compile(sac.Args(), "cpu", False) == chosen


def test_nothing_is_compiled_where_a_debugger_is_to_stop(monkeypatch):
    def update():
        return 0

    assert engine.unless_debugged("default", sac.update) == "default"
    assert engine.unless_debugged("graphs", update) == "none"  # here is a word: breakpoint()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "gettrace", lambda: print)
        assert engine.unless_debugged("default", sac.update) == "none"
    with monkeypatch.context() as patch:  # of Python 3.12, by number
        tools = SimpleNamespace(DEBUGGER_ID=0, get_tool={0: "pdb", 1: None}.get)
        patch.setattr(sys, "monitoring", tools, raising=False)
        assert engine.unless_debugged("default", sac.update) == "none"
        tools.DEBUGGER_ID = 1
        assert engine.unless_debugged("default", sac.update) == "default"
    exec("def cell(): pass", spaces := {"__name__": "nowhere"})
    assert engine.unless_debugged("default", spaces["cell"]) == "default"


def test_which_optimizers_are_compiled():
    """A graph does what the optimizer does, or there is none."""
    weights = [torch.zeros(2, requires_grad=True)]
    adam, kinds = torch.optim.Adam(weights, 0.1, fused=True), torch.optim
    for optimizer, default, graphs in (
        (adam, True, True),
        (kinds.Adam(weights, 0.1, weight_decay=0.1), False, True),
        (kinds.Adam(weights, 0.1, amsgrad=True), False, True),
        (kinds.Adam([{"params": weights}, {"params": [torch.zeros(1)]}], 0.1), False, True),
        (kinds.AdamW(weights, 0.1), False, isinstance(kinds.AdamW(weights), kinds.Adam)),
        (kinds.RAdam(weights, 0.1), False, True),
        (kinds.RMSprop(weights, 0.1), False, False),
        (kinds.SGD(weights, 0.1), False, False),
    ):
        state = {"one": adam, "other": optimizer, "network": torch.nn.Linear(1, 1)}
        found = tuple(engine.fits(how, state.values()) for how in ("default", "graphs"))
        assert found == (default, graphs), optimizer


def test_what_run_start_refuses_is_not_compiled(capsys):
    """`train` has made it by then."""
    args = sac.Args(compile="none", device="cpu")
    for make in (engine.compiled, engine.captured):
        make(print, args)("anything")
    assert capsys.readouterr().out == "anything\n" * 2  # not that it cannot be compiled


@pytest.mark.parametrize("how", ["default", "onednn"])
def test_large_products_of_a_compiled_graph(how, capfd):
    """By oneDNN if asked; those of a bias, a gradient, a stack and of small sizes are right."""
    if engine.choose_compile(sac.Args(), "cpu", False) == "none":
        pytest.skip("nothing is compiled here")
    torch.manual_seed(0)
    sizes = (256, 160, 256, 3)
    layers = [torch.nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
    stack = redq.EnsembleLinear(2, 256, 160), redq.EnsembleLinear(2, 160, 256)
    network, x = torch.nn.ModuleList([torch.nn.Sequential(*layers), *stack]), torch.randn(256, 256)
    one = torch.ones(1)  # a bias that is broadcast
    adam = torch.optim.Adam(network.parameters(), 0.01)

    def update(network, adam, x):
        plain, *stack = network
        loss = plain(x).square().mean()
        for layer in stack:
            x = layer(x, slice(None)).relu()
        loss = loss + (x - 1).square().mean() + torch.addmm(one.to(x), x[0], x[1]).mean()
        pair = x[:2].detach()  # what oneDNN is not asked for: a factor of the bias, 64 bits
        loss = loss + torch.addmm(x.new_ones(256), *pair, beta=0.5).mean()
        loss = loss + torch.mm(*pair.double()).to(x).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        return loss

    twin = copy.deepcopy(network).double()
    twins_adam = torch.optim.Adam(twin.parameters(), 0.01)
    reference = [update(twin, twins_adam, x.double()).item() for _ in range(4)]
    learn = engine.compiled(update, sac.Args(device="cpu", compile=how))
    first = [learn(network, adam, x).item()]  # as it is, to make Adam's moments
    first.append(learn(network, adam, x).item())  # compiled, maybe from the cache
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):  # it prints what it does
        first += [learn(network, adam, x).item() for _ in range(2)]
    found = len(re.findall("exec,cpu,(?:inner_product|matmul)", capfd.readouterr().out))
    assert found == (2 * 17 if how == "onednn" else 0)  # 6 forward, 6 of weights, 5 of inputs
    torch.testing.assert_close(first, reference, rtol=1e-4, atol=0)
    for ours, exact in zip(network.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, exact.float(), rtol=1e-3, atol=1e-4)


def test_one_dnn_is_chosen_where_it_is_faster(monkeypatch):
    monkeypatch.setattr(engine, "one_dnn_is_faster", lambda threads: True)
    if engine.choose_compile(sac.Args(), "cpu", False) == "none":
        pytest.skip("nothing is compiled here")
    assert engine.choose_compile(sac.Args(), "cpu", False) == "onednn"
    assert engine.choose_compile(sac.Args(total_steps=10_000), "cpu", False) == "none"
    assert engine.choose_compile(sac.Args(), "cuda", False) == "graphs"
    monkeypatch.setattr(engine, "one_dnn_is_faster", lambda threads: False)
    assert engine.choose_compile(sac.Args(), "cpu", False) == "default"
    again = sac.Args(compile="onednn")  # as a resumed run has it: what was chosen once is kept
    assert engine.choose_compile(again, "cpu", True) == "onednn"
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)  # Apple's processors
    assert engine.choose_compile(again, "cpu", True) == "none"
    with pytest.raises(UserError, match=r"Python\.h, on a CPU with oneDNN; use auto"):
        engine.choose_compile(again, "cpu", False)


def test_one_dnn_is_measured(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch, "mm", lambda a, b: a)
        assert not engine.one_dnn_is_faster(2)
    assert torch.get_num_threads() == 2  # those of the run, and not as many as there are cores
    product = torch.ops.mkldnn._linear_pointwise

    def four_times(a, b):
        for _ in range(4):
            product(a, b, None, "none", [], "")

    monkeypatch.setattr(torch, "mm", four_times)
    assert engine.one_dnn_is_faster(1)


@pytest.mark.parametrize(("limit", "most"), [("1", 1), ("", 6), ("3,1", 3), ("64", 6)])
def test_omp_num_threads_is_a_limit(limit, most, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    monkeypatch.setattr(engine, "available_cores", lambda: 6)
    tried = []
    monkeypatch.setattr(torch, "set_num_threads", tried.append)
    assert engine.choose_threads(sac.Args(torch_threads=5)) == 5
    assert engine.choose_threads(sac.Args(hidden_size=64)) == 1
    chosen = engine.choose_threads(sac.Args())
    assert chosen in (1, most) and set(tried) == ({1, most} if most > 1 else set())


def test_how_many_threads_are_tried(monkeypatch):
    """Eight at most, where actor or critic is wide; torchrun's learners share the cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.setattr(engine, "available_cores", lambda: 20)
    monkeypatch.setattr(engine, "gain", lambda threads: 2)
    assert engine.choose_threads(crossq.Args(hidden_size=64, critic_hidden_size=256)) == 8
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torchrun sets it
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert engine.choose_threads(sac.Args()) == 5


def test_torch_is_set_up(monkeypatch):
    flushes = torch.set_flush_denormal(False)  # False as well: it cannot
    engine.prepare(sac.Args(device="cpu", compile="none", torch_threads=2), 1)
    assert torch.get_num_threads() == 2
    assert not flushes or torch.tensor(1e-38) / 100 == 0
    called = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "a stream")
    monkeypatch.setattr(torch.cuda, "set_stream", called.append)
    monkeypatch.setattr(torch.cuda, "set_device", called.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    args = sac.Args(device="cuda", compile="graphs", torch_threads=1)
    engine.prepare(args, 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    args.compile = "none"
    engine.prepare(args, 3)
    assert called == ["a stream", 1]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="--nproc-per-node is more than the 2 GPUs"):
        engine.prepare(args, 3)
    monkeypatch.setattr(engine.ctypes, "CDLL", lambda name: object())  # another library than glibc
    engine.prepare(sac.Args(device="cpu", compile="none", torch_threads=1), 1)


def test_more_threads_only_where_they_are_faster(monkeypatch, capsys):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(engine, "available_cores", lambda: 2)
    for factors, chosen in (((1.9,), 2), ((1.2, 1.0, 1.3), 1), ((0.3, 1.2, 1.9), 2)):
        gains = iter(factors)
        monkeypatch.setattr(engine, "gain", lambda threads, gains=gains: next(gains))
        assert engine.choose_threads(sac.Args()) == chosen
    args, gains = sac.Args(torch_threads=2), iter((1.2, 0.3, 1.2, 0.3, 0.3))
    monkeypatch.setattr(engine, "gain", lambda threads: next(gains))
    for left in (2, 2, 1):  # only what is slow twice is given up
        engine.recheck_threads(args)
        assert args.torch_threads == left == torch.get_num_threads()
    engine.recheck_threads(args)  # it has no gains left to ask for
    said = "2 torch threads are slower than one: this run goes on with one.\n"
    assert capsys.readouterr().out == said


def test_a_few_long_waits_count(monkeypatch):
    """Beside another program most products are as fast as before; the median does not see it."""
    relu, calls = torch.relu, itertools.count(1)

    def wait_at_times(x):
        if torch.get_num_threads() == 2 and next(calls) % 15 == 0:
            time.sleep(0.1)
        return relu(x)

    monkeypatch.setattr(torch, "relu", wait_at_times)
    assert engine.gain(2) < 1
    torch.set_num_threads(1)


def test_without_a_compiler(monkeypatch, capsys):
    """A new run says so; one that began with a compiler goes on without, for it takes no flag."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="--compile is default, which needs one learner, torch"):
        engine.choose_compile(sac.Args(compile="default"), "cpu", False)
    assert engine.choose_compile(sac.Args(compile="default"), "cpu", True) == "none"
    assert (
        "default needs one learner, torch 2.13, C++ and Python.h; the run"
        in capsys.readouterr().out
    )


def test_learners_who_join_a_run_go_on_without_graphs(capsys):
    """A run that began alone on a GPU has chosen them; nobody typed what is impossible now."""
    assert engine.choose_compile(sac.Args(compile="graphs"), "cuda", True, 2) == "none"
    assert "graphs needs one learner on a GPU; the run goes on" in capsys.readouterr().out


def two_networks(update, how, steps=6):
    """`update` of two networks, one after the other, repeated -> what it returned, all weights."""
    torch.manual_seed(0)
    networks = [torch.nn.Linear(3, 1) for _ in range(2)]
    adams = [torch.optim.Adam(network.parameters(), 0.1) for network in networks]
    args = sac.Args(device="cpu", compile=how)
    learn = update if how == "none" else engine.compiled(update, args)
    found = [learn(networks, adams, torch.ones(4, 3), 10 * i, i % 2 == 1) for i in range(steps)]
    return found, torch.cat([x.flatten() for net in networks for x in net.parameters()]), args


def test_an_update_that_cannot_be_one_graph_runs_as_it_is(capsys):
    """In two graphs, backward() added to gradients that zero_grad() had not cleared, silently."""
    if engine.choose_compile(sac.Args(), "cpu", False) == "none":
        pytest.skip("nothing is compiled here")

    def update(networks, adams, x, step, due, stops=True):
        for network, adam in zip(networks, adams, strict=True):
            loss = network(x).square().mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
            if stops and loss > 1e9:  # which depends on a tensor
                print("large")
        return step, due

    given = list(range(0, 60, 10))
    (expected, weights, _), (found, same, args) = (
        two_networks(update, how) for how in ("none", "default")
    )
    assert args.compile == "none" and "From here on not compiled: " in capsys.readouterr().out
    torch.testing.assert_close(same, weights, rtol=0, atol=0)
    assert found == expected == list(zip(given, [False, True] * 3, strict=True))
    # and in one graph for each `due`
    found, same, args = two_networks(partial(update, stops=False), "default")
    assert args.compile == "default", capsys.readouterr().out
    assert found == expected
    torch.testing.assert_close(same, weights)


def test_an_optimizer_that_run_start_was_not_given_is_not_taken_for_adam(capsys):
    if engine.choose_compile(sac.Args(), "cpu", False) == "none":
        pytest.skip("nothing is compiled here")
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], 0.1, weight_decay=10.0)

    def update(optimizer):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()

    learn = engine.compiled(update, sac.Args(device="cpu", compile="default"))
    learn(optimizer), learn(optimizer)
    assert "not compiled: an optimizer is not a plain Adam" in capsys.readouterr().out
    assert weight[0] < -0.09  # 1 → 1 · (1 − 0.1 · 10) − 0.1 → −0.1


def test_an_optimizer_that_run_start_was_not_given_is_not_captured(capsys):
    """By graphs, that is; it is seen before any is made, so that this needs no GPU."""
    weight, args = torch.nn.Parameter(torch.ones(2)), sac.Args(device="cpu", compile="graphs")
    optimizer = torch.optim.SGD([weight], 0.1, momentum=0.5)

    def update(optimizer):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()

    learn = engine.captured(update, args)
    learn(optimizer), learn(optimizer)
    said = "From here on not compiled: an optimizer is neither Adam nor RAdam\n"
    assert capsys.readouterr().out == said and args.compile == "none"
    torch.testing.assert_close(weight.data, torch.full((2,), 1 - 0.1 - 0.1 * 1.5))


def test_a_weight_that_joins_later_is_trained(capsys):
    """An Adam whose weights have not made the same steps is not compiled."""
    if engine.choose_compile(sac.Args(), "cpu", False) == "none":
        pytest.skip("nothing is compiled here")
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(4)]
    ours, plain = torch.optim.Adam(weights[:2], 0.1), torch.optim.Adam(weights[2:], 0.1)

    def update(optimizer, both):
        first, second = optimizer.param_groups[0]["params"]
        optimizer.zero_grad()
        (first.sum() + both * second.sum() if both else first.sum()).backward()
        optimizer.step()

    learn = engine.compiled(update, sac.Args(device="cpu", compile="default"))
    for both in (False, True, True):
        learn(ours, both), update(plain, both)
    assert "not compiled: an optimizer is not a plain Adam for all" in capsys.readouterr().out
    torch.testing.assert_close(weights[:2], weights[2:], rtol=0, atol=0)


def test_an_optimizer_that_is_loaded_later_goes_on_from_there():
    """Its moments are other tensors then."""
    if engine.choose_compile(sac.Args(), "cpu", False) == "none":
        pytest.skip("nothing is compiled here")
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    adams = [torch.optim.Adam([weight], 0.1) for weight in weights]

    def update(adam, x):
        adam.zero_grad()
        (x * adam.param_groups[0]["params"][0].square()).sum().backward()
        adam.step()

    args = sac.Args(device="cpu", compile="default")
    learn = engine.compiled(update, args)
    for x in torch.tensor([1.0, 2.0]):
        learn(adams[0], x), update(adams[1], x)
    early = [copy.deepcopy(adam.state_dict()) for adam in adams]
    for x in torch.tensor([3.0, 4.0]):
        learn(adams[0], x), update(adams[1], x)
    for adam, state in zip(adams, early, strict=True):
        adam.load_state_dict(state)
    for x in torch.tensor([5.0, 6.0]):
        for adam in adams:
            adam.param_groups[0]["lr"] = 0.1 / x.item()  # as a schedule has it
        learn(adams[0], x), update(adams[1], x)
    states = [adam.state_dict()["state"][0] for adam in adams]
    assert args.compile == "default" and states[0]["step"] == 4
    torch.testing.assert_close((weights[0], states[0]), (weights[1], states[1]))


def test_random_numbers_are_the_same_when_compiled():
    """On a CPU, where the compiler's own would be drawn one by one."""
    if engine.choose_compile(sac.Args(), "cpu", False) == "none":
        pytest.skip("nothing is compiled here")
    args = sac.Args(device="cpu", compile="default")
    torch.manual_seed(0)
    drawn = engine.compiled(torch.randn_like, args)(torch.ones(5))
    torch.manual_seed(0)
    assert args.compile == "default" and torch.equal(drawn, torch.randn(5))


def test_float64_is_not_compiled(capsys):
    """torch 2.13 would not write Adam's steps."""
    if engine.choose_compile(sac.Args(), "cpu", False) == "none":
        pytest.skip("nothing is compiled here")
    try:
        torch.set_default_dtype(torch.float64)
        weight = torch.nn.Parameter(torch.ones(2))
        adam = torch.optim.Adam([weight], 0.1)

        def update(adam):
            adam.zero_grad()
            weight.square().sum().backward()
            adam.step()

        learn = engine.compiled(update, sac.Args(device="cpu", compile="default"))
        learn(adam), learn(adam), learn(adam)
    finally:
        torch.set_default_dtype(torch.float32)
    assert "not compiled: an optimizer is not a plain Adam" in capsys.readouterr().out
    assert adam.state[weight]["step"] == 3


def test_an_optimizer_that_is_not_saved_is_named_once(capsys):
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    saved, forgotten = torch.optim.SGD([weight], 0.1), torch.optim.Adam([weight], 0.1)
    end = engine.watch_optimizers([saved, "something else"])
    for optimizer in (saved, forgotten, forgotten):
        optimizer.step()
    others = threading.Thread(target=torch.optim.SGD([weight], 0.1).step)
    others.start(), others.join()  # of another run, as tests have
    assert capsys.readouterr().out.count("Warning: an optimizer was not given to run.start") == 1
    end()
    torch.optim.SGD([weight], 0.1).step()
    assert capsys.readouterr().out == ""
