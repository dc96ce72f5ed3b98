"""ddpg.py, td3.py and sac.py against references written out independently, and their resume."""

import copy
import math
import random
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from test_runs import (
    finish,
    kill,
    nothing_is_left_running,  # noqa: F401  (a fixture of every test here)
    pause,
    start_command,
    wait_for_pause,
)
from torch import distributions

from algos import (
    a2c,
    crossq,
    ddpg,
    ddpg_hterm,
    mod_sac,
    ppo_hterm,
    redq,
    sac,
    sac_hterm,
    td3,
    td3_hterm,
)
from algos.worker_learner import ReplayBuffer, Run, RunArgs, UserError, Workers
from vec_envs import classic

OBS_DIM, ACT_DIM, HIDDEN, BATCH = 4, 2, 6, 10
OBS = gymnasium.spaces.Box(-np.inf, np.inf, (OBS_DIM,))
BOX = gymnasium.spaces.Box(np.float32([-2.0, 0.0]), np.float32([2.0, 1.0]))
SCRIPTS = [ddpg, td3, sac]


def deterministic(script):
    return script in (ddpg, td3)


def make_agent(script, dtype=torch.float64, **options):
    """An agent and its target, which differ, in double precision."""
    torch.manual_seed(0)
    args = script.Args(hidden_size=HIDDEN, num_envs=2, **options)
    agent = script.Agent(OBS, BOX, args).to(dtype)
    agent.warm_up.fill_(False)
    if not deterministic(script):
        agent.log_temperature.data.fill_(-0.7)
    target = copy.deepcopy(agent if deterministic(script) else agent.critics)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return agent, target, args


def random_batch():
    generator = np.random.default_rng(1)
    batch = {
        "obs": generator.normal(size=(BATCH, OBS_DIM)),
        "action": generator.uniform(-1, 1, (BATCH, ACT_DIM)),
        "reward": generator.normal(size=BATCH),
        "next_obs": generator.normal(size=(BATCH, OBS_DIM)),
        "terminated": generator.random(BATCH) < 0.3,
        "discount": generator.choice([0.9, 0.81], BATCH),
        "weight": generator.uniform(0.1, 1, BATCH),
    }
    return {name: torch.tensor(value) for name, value in batch.items()}


# The references: numpy and plain loops, from nothing but the parameters as arrays.


def numpy_mlp(parameters, x):
    w1, b1, w2, b2, w3, b3 = parameters  # weights (out, in)
    x = np.maximum(x @ w1.T + b1, 0)
    x = np.maximum(x @ w2.T + b2, 0)
    return x @ w3.T + b3


def numpy_critics(script, parameters, obs, action):
    """Q_i (B,) of every critic i."""
    x = np.concatenate((obs, action), 1)
    networks = [parameters] if script is ddpg else [parameters[:6], parameters[6:]]
    return [numpy_mlp(network, x)[:, 0] for network in networks]


def numpy_sample(parameters, obs, noise):
    """SAC's action and log-probability, 1 − tanh² as it stands."""
    mean, log_std = np.split(numpy_mlp(parameters, obs), 2, axis=1)
    std = np.exp(np.clip(log_std, -20, 2))
    u = mean + std * noise
    density = np.exp(-0.5 * ((u - mean) / std) ** 2) / (std * np.sqrt(2 * np.pi))
    return np.tanh(u), np.log(density / (1 - np.tanh(u) ** 2)).sum(1)


def numpy_critic_loss(script, critics, target_critics, target_actor, temperature, batch, noise):
    options = {}
    if script is sac:
        next_action, log_prob = numpy_sample(target_actor, batch["next_obs"], noise)
        options = {"entropy": -temperature * log_prob}
    else:
        next_action = np.tanh(numpy_mlp(target_actor, batch["next_obs"]))
    if script is td3:
        next_action = np.clip(next_action + np.clip(0.3 * noise, -0.2, 0.2), -1, 1)
    values = numpy_critics(script, target_critics, batch["next_obs"], next_action)
    total = 0.0
    predictions = numpy_critics(script, critics, batch["obs"], batch["action"])
    for b in range(BATCH):
        future = min(value[b] for value in values)
        if script is sac:
            future += options["entropy"][b]
        y = batch["reward"][b]
        if not batch["terminated"][b]:
            y += batch["discount"][b] * future
        total += sum(0.5 * batch["weight"][b] * (q[b] - y) ** 2 for q in predictions) / BATCH
    return total


def numpy_actor_loss(script, critics, actor, temperature, batch, noise):
    if script is sac:
        action, log_prob = numpy_sample(actor, batch["obs"], noise)
        values = numpy_critics(script, critics, batch["obs"], action)
        return np.mean(temperature * log_prob - np.minimum(*values))
    action = np.tanh(numpy_mlp(actor, batch["obs"]))
    return -np.mean(numpy_critics(script, critics, batch["obs"], action)[0])


def slopes(function, parameters):
    """The gradient of function(parameters) by central differences, flat."""
    found, step = [], 1e-5
    for array in parameters:
        for index in np.ndindex(array.shape):
            kept = array[index]
            values = []
            for sign in (1, -1):
                array[index] = kept + sign * step
                values.append(function(parameters))
            array[index] = kept
            found.append((values[0] - values[1]) / (2 * step))
    return np.array(found)


def arrays(network):
    return [parameter.detach().numpy().copy() for parameter in network.parameters()]


def critic_of(script, agent):
    return agent.critic if script is ddpg else agent.critics


OPTIONS = {ddpg: {}, td3: {"target_noise": 0.3, "target_noise_clip": 0.2}, sac: {}}


@pytest.mark.parametrize("script", SCRIPTS)
def test_gradient_of_the_critics(script):
    agent, target, args = make_agent(script, **OPTIONS[script])
    if script is td3:
        target.actor.network[-1].bias.data.add_(2)  # so near to 1 that the noise leads out
    batch = random_batch()
    torch.manual_seed(5)
    loss, td_error = script.critic_loss(agent, target, batch, *(args,) * (script is td3))
    critic = critic_of(script, agent)
    loss.backward(inputs=list(critic.parameters()))
    torch.manual_seed(5)
    noise = torch.randn(BATCH, ACT_DIM, dtype=torch.float64).numpy()
    target_critics = arrays(target if script is sac else critic_of(script, target))
    actor = arrays(agent.actor if script is sac else target.actor)
    plain = {name: tensor.numpy() for name, tensor in batch.items()}

    def reference(parameters):
        return numpy_critic_loss(
            script, parameters, target_critics, actor, math.exp(-0.7), plain, noise
        )

    parameters = arrays(critic)
    np.testing.assert_allclose(loss.item(), reference(parameters), rtol=1e-10)
    gradient = torch.cat([p.grad.flatten() for p in critic.parameters()]).numpy()
    np.testing.assert_allclose(gradient, slopes(reference, parameters), atol=1e-6)
    assert np.abs(gradient).max() > 0.1
    assert td_error.shape == (BATCH,)


@pytest.mark.parametrize("script", SCRIPTS)
def test_gradient_of_the_actor(script):
    agent, _, _ = make_agent(script)
    batch = random_batch()
    torch.manual_seed(5)
    loss = script.actor_loss(agent, batch)
    loss = loss[0] if script is sac else loss
    network = list(agent.actor.parameters())
    loss.backward(inputs=network)
    torch.manual_seed(5)
    noise = torch.randn(BATCH, ACT_DIM, dtype=torch.float64).numpy()
    critics = arrays(critic_of(script, agent))
    plain = {name: tensor.numpy() for name, tensor in batch.items()}

    def reference(parameters):
        return numpy_actor_loss(script, critics, parameters, math.exp(-0.7), plain, noise)

    parameters = [parameter.detach().numpy().copy() for parameter in network]
    np.testing.assert_allclose(loss.item(), reference(parameters), rtol=1e-10)
    gradient = torch.cat([p.grad.flatten() for p in network]).numpy()
    np.testing.assert_allclose(gradient, slopes(reference, parameters), atol=1e-6)
    assert np.abs(gradient).max() > 0.01


def test_gradient_of_the_temperature():
    """α grows while the entropy −E[log π] is below its target −2, and the other way round."""
    agent, _, _ = make_agent(sac)
    for log_prob, slope in ((torch.tensor([1.0, 2.0]), 0.5), (torch.tensor([2.0, 4.0]), -1.0)):
        agent.zero_grad()
        sac.temperature_loss(agent, log_prob.double()).backward()
        np.testing.assert_allclose(agent.log_temperature.grad, slope)


@pytest.mark.parametrize("script", [sac, redq, mod_sac, crossq, sac_hterm])
def test_the_temperature_moves_by_its_own_loss_only(script):
    """Down the slope of −log α · (E[log π] + H̄), with H̄ = −dim(A), not by the actor's loss."""
    agent, _, _ = make_agent(script)
    loss, log_prob = script.actor_loss(agent, random_batch())
    loss.backward()
    assert agent.log_temperature.grad is None and not log_prob.requires_grad
    script.temperature_loss(agent, log_prob).backward()
    torch.testing.assert_close(agent.log_temperature.grad, 2 - log_prob.mean())


def test_the_standard_deviation_is_bounded():
    agent, _, _ = make_agent(sac)
    obs = random_batch()["obs"]
    for log_std, bound in ((9.0, 2), (-99.0, -20)):
        agent.actor.mean_and_log_std[-1].bias.data[ACT_DIM:] = log_std
        torch.manual_seed(3)
        action, _ = agent.actor.sample(obs)
        torch.manual_seed(3)
        noise = torch.randn(BATCH, ACT_DIM, dtype=torch.float64)
        u = agent.actor.mean_and_log_std(obs)[:, :ACT_DIM] + math.exp(bound) * noise
        torch.testing.assert_close(action, u.tanh(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mean", [0.0, -3.0, 9.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_prob_is_that_of_torch_distributions(mean, dtype):
    """Also where tanh(u) is 1 to the last bit: TanhTransform's cache remembers u."""
    agent, _, _ = make_agent(sac, dtype)
    with torch.no_grad():
        agent.actor.mean_and_log_std[-1].bias[:ACT_DIM] += mean
    obs = random_batch()["obs"].to(dtype)
    torch.manual_seed(3)
    action, log_prob = agent.actor.sample(obs)
    mean, log_std = agent.actor.mean_and_log_std(obs).double().chunk(2, -1)
    torch.manual_seed(3)
    u = mean + log_std.exp() * torch.randn(BATCH, ACT_DIM, dtype=dtype)
    squash = distributions.transforms.TanhTransform(cache_size=1)
    reference = distributions.TransformedDistribution(
        distributions.Independent(distributions.Normal(mean, log_std.exp()), 1), squash
    )
    expected = reference.log_prob(squash(u))
    tolerance = 1e-6 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(log_prob.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(action.double(), u.tanh(), rtol=tolerance, atol=tolerance)


def actor_parameters(script, agent):
    own = [] if deterministic(script) else [agent.log_temperature]
    return [*agent.actor.parameters(), *own]


def optimizers_of(script, agent):
    critic = critic_of(script, agent).parameters()
    return torch.optim.SGD(critic, 0.1), torch.optim.SGD(actor_parameters(script, agent), 0.1)


def update(script, agent, target, optimizers, args, due=True):
    extra = (due,) if script in (td3, mod_sac) else ()
    return script.update(agent, target, optimizers, random_batch(), *extra, args)


def weights(network):
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
@pytest.mark.skipif(torch.__version__ < "2.13", reason="its compiler does not read backward()")
def test_compiled_steps_of_ppo_are_the_same():
    """With the H-term, whose weight changes; of minibatches of two sizes, and without a memory."""
    found, graphs = [], torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for how in ("default", "none"):
        args = ppo_hterm.Args(num_envs=1, hidden_size=8)
        torch.manual_seed(0)
        agent = ppo_hterm.Agent(OBS, BOX, args)
        run = SimpleNamespace(args=RunArgs(compile=how, device="cpu"))
        learn = Run.compile(run, ppo_hterm.gradient_step)
        optimizer = torch.optim.Adam(agent.parameters(), 0.01, fused=True)
        logged = []
        for number, size in enumerate((6, 4, 6, 4, 6)):
            agent.hterm_coef.fill_(0.5 / (number + 1))
            obs, action = torch.randn(size, OBS_DIM), torch.randn(size, ACT_DIM)
            x = torch.randn(size, 3)
            batch = {"obs": obs, "action": action}
            batch |= {"log_prob": x[:, 0] - 4, "advantage": x[:, 1], "returns": x[:, 2]}
            past = batch if number > 1 else None
            logged.append(learn(agent, optimizer, batch, past, args))
        found.append((logged, agent.state_dict(), optimizer.state_dict()["state"]))
    assert graphs["unique_graphs"] - before == 2  # without a memory; with one, of any size
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
@pytest.mark.skipif(torch.__version__ < "2.13", reason="its compiler does not read backward()")
def test_compiled_updates_are_the_same():
    """Networks, Adam's moments and what is returned, in turns with and without the actor."""
    found, graphs = [], torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for how in ("default", "none"):
        agent, target, args = make_agent(td3, torch.float32, target_noise=0.0)
        run = SimpleNamespace(args=RunArgs(compile=how, device="cpu"))
        learn = Run.compile(run, td3.update)
        networks = agent.critics, agent.actor
        optimizers = [torch.optim.Adam(x.parameters(), fused=True) for x in networks]
        batch = {k: x.float() if x.is_floating_point() else x for k, x in random_batch().items()}
        for number in range(7):
            optimizers[1].param_groups[0]["lr"] = 0.01 / (number + 1)  # a schedule
            results = learn(agent, target, optimizers, batch, number % 2 == 1, args)
        states = [optimizer.state_dict()["state"] for optimizer in optimizers]
        found.append((results, agent.state_dict(), target.state_dict(), states))
    assert graphs["unique_graphs"] - before == 2  # with the actor, without it
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("script", [*SCRIPTS, mod_sac])
def test_an_update_is_one_gradient_step_of_each_network(script):
    """Each down the slope of its own loss; the actor's is that of the new critics; the target by τ.

    Twice: no gradient is left from the first update, nor from the actor's loss in the critics.
    """
    agent, target, args = make_agent(script, tau=0.25)
    ours, ours_target = copy.deepcopy(agent), copy.deepcopy(target)
    optimizers, batch = optimizers_of(script, agent), random_batch()

    def descend(loss, parameters):
        parameters = list(parameters)
        gradients = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.data -= 0.1 * gradient

    for seed in range(2):
        torch.manual_seed(seed)
        losses, _ = update(script, agent, target, optimizers, args)
        assert losses.keys() >= {"critic", "actor"}
        torch.manual_seed(seed)
        loss, _ = script.critic_loss(ours, ours_target, batch, *(args,) * (script is td3))
        descend(loss, critic_of(script, ours).parameters())
        loss = script.actor_loss(ours, batch)
        if not deterministic(script):
            loss = loss[0] + script.temperature_loss(ours, loss[1])
        descend(loss, actor_parameters(script, ours))
        followed = ours if deterministic(script) else ours.critics
        for theirs, own in zip(ours_target.parameters(), followed.parameters(), strict=True):
            theirs.data.copy_(0.75 * theirs + 0.25 * own)
        torch.testing.assert_close(weights(agent), weights(ours))
        torch.testing.assert_close(weights(target), weights(ours_target))
    assert all(parameter.requires_grad for parameter in agent.parameters())


def test_policy_delay():
    """Actor and target networks move only where they are due."""
    agent, target, args = make_agent(td3)
    optimizers = optimizers_of(td3, agent)
    moved = []
    for number in range(7):
        parts = (agent.actor, target.actor, target.critics, agent.critics)
        before = [weights(part) for part in parts]
        losses, _ = update(td3, agent, target, optimizers, args, number in (2, 5))
        moved.append([not torch.equal(a, weights(b)) for a, b in zip(before, parts, strict=True)])
        assert ("actor" in losses) == (number in (2, 5))
    assert moved == [[number in (2, 5)] * 3 + [True] for number in range(7)]


@pytest.mark.parametrize("script", SCRIPTS)
def test_truncation_bootstraps_from_the_true_last_observation(script):
    """From collect's rollout through the replay buffer to the target."""
    options = {"target_noise": 0.0} if script is td3 else {}
    agent, target, args = make_agent(script, torch.float32, **options)
    shape = (1, 2)  # one step of two envs: the first terminates, the second is truncated
    rollout = {
        "obs": torch.randn(*shape, OBS_DIM),
        "action": torch.rand(*shape, ACT_DIM),
        "reward": torch.tensor([[1.0, 2.0]]),
        "next_obs": torch.randn(*shape, OBS_DIM),
        "terminated": torch.tensor([[True, False]]),
        "done": torch.tensor([[True, True]]),
    }
    run = SimpleNamespace(device=torch.device("cpu"), args=SimpleNamespace(gamma=0.5))
    replay = ReplayBuffer(run, rollout, 2)
    replay.add(rollout)
    batch = replay.sample(50)
    torch.manual_seed(5)
    _, td_error = script.critic_loss(agent, target, batch, *(args,) * (script is td3))
    torch.manual_seed(5)
    entropy = torch.zeros(50)
    with torch.no_grad():
        if script is sac:
            next_action, log_prob = agent.actor.sample(batch["next_obs"])
            entropy = -math.exp(-0.7) * log_prob
        else:
            next_action = target.actor(batch["next_obs"])
        if script is ddpg:
            value = target.critic(batch["next_obs"], next_action)
            prediction = agent.critic(batch["obs"], batch["action"])
        else:
            critics = target if script is sac else target.critics
            value = torch.stack(critics(batch["next_obs"], next_action)).amin(0)
            prediction = torch.stack(agent.critics(batch["obs"], batch["action"]))  # (2, 50)
    terminated = batch["reward"] == 1
    assert terminated.any() and not terminated.all()
    expected = prediction - torch.where(terminated, 1.0, 2 + 0.5 * (value + entropy))
    if script is not ddpg:  # of the critic that is further away
        expected = torch.maximum(*expected.abs())
    torch.testing.assert_close(td_error, expected, rtol=1e-4, atol=1e-4)


class Line:
    """Environments of which each even one ends an episode at every tenth step."""

    def __init__(self, num_envs):
        self.obs, self.time = torch.randn(1, OBS_DIM).expand(num_envs, OBS_DIM), 0
        self.given = []

    def step(self, action):
        self.given.append(action)
        self.time += 1
        reward = torch.zeros(len(self.obs))
        ended = (torch.arange(len(self.obs)) % 2 == 0) & (self.time % 10 == 0)
        info = {"final_obs": self.obs, "episode_return": reward, "episode_length": reward.long()}
        return self.obs, reward, ended, ended, info


def collected(script, agent, num_steps=20, num_envs=400):
    """Actions that were stored, and those that the environments got, both (T, N, act_dim)."""
    shape, envs = (num_steps, num_envs), Line(num_envs)
    rollout = {
        **{name: torch.zeros(*shape, OBS_DIM) for name in ("obs", "next_obs")},
        "action": torch.zeros(*shape, ACT_DIM),
        **{name: torch.zeros(shape) for name in ("reward", "episode_return")},
        **{name: torch.zeros(shape).bool() for name in ("terminated", "done")},
        "episode_length": torch.zeros(shape).long(),
    }
    script.collect(agent, envs, rollout)
    return rollout["action"], torch.stack(envs.given), envs.obs[0]


def assert_independent(noise):
    """Of step, environment and dimension."""
    pairs = (noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1])
    for a, b in (*pairs, (noise[..., 0], noise[..., 1])):
        assert abs(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]) < 0.05


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_first_actions_are_uniform(script):
    agent, _, _ = make_agent(script, torch.float32)
    agent.warm_up.fill_(True)
    action, given, _ = collected(script, agent)
    assert action.abs().max() <= 1 and abs(action.mean()) < 0.03
    assert abs(action.std() - 3**-0.5) < 0.02
    assert_independent(action)
    expected = torch.tensor([0.0, 0.5]) + torch.tensor([2.0, 0.5]) * action  # BOX
    torch.testing.assert_close(given, expected)


@pytest.mark.parametrize("script", [ddpg, td3])
def test_exploration_noise(script):
    """μ(s) + σ ε, cut to the range of actions, which is where the environments' bounds are."""
    agent, _, _ = make_agent(script, torch.float32, exploration_noise=0.05)
    action, _, obs = collected(script, agent)
    noise = action - agent.actor(obs).detach()
    assert abs(noise.std() - 0.05) < 0.002 and abs(noise.mean()) < 0.002
    assert_independent(noise)
    agent.actor.network[-1].bias.data[0] = 9.0  # μ = 1
    action, given, _ = collected(script, agent)
    at_bound = action[..., 0] == 1
    assert action.max() == 1 and 0.4 < at_bound.float().mean() < 0.6
    low, high = torch.tensor(BOX.low), torch.tensor(BOX.high)
    assert (given >= low).all() and (given <= high).all()
    assert (given[..., 0][at_bound] == high[0]).all()
    assert (agent(obs.unsqueeze(0)).detach()[0, 0] - high[0]).abs() < 1e-4  # without noise


def test_sac_explores_by_its_policy():
    agent, _, _ = make_agent(sac, torch.float32)
    action, _, obs = collected(sac, agent)
    mean, log_std = agent.actor.mean_and_log_std(obs).detach().chunk(2, -1)
    u = action.clamp(-1 + 1e-6, 1 - 1e-6).atanh()
    noise = (u - mean) / log_std.exp()
    assert noise.mean((0, 1)).abs().max() < 0.05 and abs(noise.std() - 1) < 0.02
    assert_independent(noise)


# Whole runs: in this process where a test may end one from inside, else as a command.

TINY = {
    **{"env": "Pendulum", "num_envs": 2, "total_steps": 300, "hidden_size": 8, "batch_size": 16},
    **{"warmup_steps": 50, "buffer_size": 200, "eval_every": 0, "eval_episodes": 1},
    **{"checkpoint_every": 50, "log_every": 100, "device": "cpu", "learning_rate": 1e-3},
}


class NoEvaluator:
    """In place of the evaluator's process."""

    def __init__(self, *_):
        self.pending, self.failed = [], False

    def submit(self, *_):
        pass

    def results(self, *_):
        return []

    def close(self):
        pass


class Killed(BaseException):
    pass


def run_of(script, run_dir, kill_after=None, **options):
    """Train; or fall silent after so many updates, as a killed process does."""
    count = 0

    def watched(*arguments, original=script.update):
        nonlocal count
        count += 1
        if count == kill_after:
            raise Killed
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("algos.worker_learner.run.Evaluator", NoEvaluator)
        patch.setattr(script, "update", watched)
        try:
            known = {k: v for k, v in {**TINY, **options}.items() if hasattr(script.Args, k)}
            script.train(script.Args(**known, run_dir=str(run_dir)))
        except Killed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    return count


def resume_of(script, run_dir):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("algos.worker_learner.run.Evaluator", NoEvaluator)
        script.train(script.Args(resume=str(run_dir)))


def assert_same(a, b, where=""):
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a.keys() - {"seconds", "pending_evaluations"}:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for i, pair in enumerate(zip(a, b, strict=True)):
            assert_same(*pair, f"{where}.{i}")
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b or a != a, where


@pytest.mark.parametrize("script", [ddpg, sac])
def test_no_update_before_the_warm_up_is_over(script, tmp_path):
    """Also where the buffer is full before."""
    assert run_of(script, tmp_path, total_steps=100, buffer_size=20) == 100 - 50 + 2


def test_a_run_that_would_only_warm_up(tmp_path):
    said = "--total-steps is 49; allowed is at least --warmup-steps, 50"
    with pytest.raises(UserError, match=said):
        run_of(sac, tmp_path / "run", total_steps=49)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("script", "options"),
    [
        (ddpg, {"utd_ratio": 0.3}),
        (td3, {"prioritized": True, "n_step": 3, "policy_delay": 3}),
        (sac, {"num_steps": 3, "utd_ratio": 1.3}),
        (sac, {"prioritized": True}),
        (ddpg_hterm, {"total_steps": 240}),
        (td3_hterm, {"total_steps": 240}),
        (sac_hterm, {"total_steps": 240}),
    ],
)
def test_resumed_is_bit_identical(script, options, tmp_path):
    updates = run_of(script, tmp_path / "reference", **options)
    ratio = options.get("utd_ratio", 1.0)
    collected = options.get("total_steps", 300) - 50
    assert abs(updates - ratio * collected) <= 3 * ratio + 1  # they follow what is collected
    moment = random.randrange(2, updates)
    print("killed at update", moment)
    run_of(script, tmp_path / "killed", kill_after=moment, **options)
    resume_of(script, tmp_path / "killed")
    ours, theirs = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)
        for name in ("killed", "reference")
    )
    assert ours["replay"]["data"].keys() >= {"obs", "action", "next_obs", "reward"}
    assert_same(ours, theirs)


@pytest.mark.parametrize("script", [ddpg, td3, sac, redq, mod_sac, crossq])
def test_what_train_hands_on(script, tmp_path, monkeypatch):
    """The flags and each batch's errors to the buffer, whose β rises to 1; warm-up ends in time."""
    made, told, betas, warm = [], [], [], []

    class Spy(ReplayBuffer):
        def __init__(self, *given):
            super().__init__(*given)
            made.append((self.n_step, self.prioritized, round(self._powers[1].item(), 6)))

        def sample(self, batch_size):
            betas.append(self.beta)
            self.drawn = super().sample(batch_size)
            return self.drawn

        def update_priorities(self, index, td_error):
            told.append(index is self.drawn["index"] and td_error.shape == index.shape)

    def collect(agent, *rest, original=script.collect):
        warm.append(agent.warm_up.item())
        original(agent, *rest)

    monkeypatch.setattr(script, "ReplayBuffer", Spy)
    monkeypatch.setattr(script, "collect", collect)
    options = {"n_step": 3, "gamma": 0.9, "prioritized": True}
    small = {"total_steps": 100, "utd_ratio": 0.5, "critic_hidden_size": 8}
    count = run_of(script, tmp_path / "run", **options, **small)
    assert made == [(3, True, 0.9)] and warm == [True] * 25 + [False] * 25
    assert told == [True] * count and 20 < count < 30
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    for name in {"critic_optimizer", "actor_optimizer"} & saved.keys():
        expected = (0.5 if script is crossq else 0.9, 0.999)
        assert saved[name]["param_groups"][0]["betas"] == expected
    assert betas[0] < 0.75 and betas == sorted(betas)
    assert betas[-1] == 0.4 + 0.6 * 98 / 100  # never above 1, however long a rollout is


def test_sigkill(tmp_path):
    """The same with a real process, evaluator included, that is really killed."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    path, run_dir = Path(sac.__file__), tmp_path / "killed"
    command = [sys.executable, path, *flags, "--total-steps=500", f"--run-dir={run_dir}"]
    run = start_command(command, run_dir, pause(2))
    wait_for_pause(run)
    kill(run)
    finish(run, -9)
    done = finish(start_command([sys.executable, path, "--resume", run_dir], run_dir))
    assert "Not exact" not in done.text and "Resumed at step" in done.out
    run_of(sac, tmp_path / "reference", total_steps=500)
    ours, theirs = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)
        for name in ("killed", "reference")
    )
    for content in (ours["run"], theirs["run"]):  # the reference has no evaluator
        content.pop("best_return"), content.pop("last_return")
    assert_same(ours, theirs)


@pytest.mark.parametrize("seconds", [0, 600])
def test_a_slow_run_is_saved_before_its_steps_say_so(seconds, tmp_path, monkeypatch):
    monkeypatch.setattr("algos.worker_learner.run.CHECKPOINT_SECONDS", seconds)
    run_of(sac, tmp_path / "killed", kill_after=100, checkpoint_every=10**6)
    path = tmp_path / "killed" / "checkpoint.pt"
    assert path.exists() == (seconds == 0)
    if seconds == 0:  # the iteration before the one in which it was killed
        assert torch.load(path, weights_only=True)["run"]["step"] == 146
        resume_of(sac, tmp_path / "killed")
        run_of(sac, tmp_path / "reference")
        names = "killed", "reference"
        assert_same(*(torch.load(tmp_path / n / "checkpoint.pt", weights_only=True) for n in names))


def test_best_is_what_was_scored_best_also_before_a_resume(tmp_path, monkeypatch):
    """With the weights that were scored, which are not those that learn when the score comes."""
    scored = {}

    class Late(NoEvaluator):
        known = 0

        def submit(self, step, weights):
            scored[step] = {name: x.clone() for name, x in weights.items()}
            self.pending.append((step, weights))

        def results(self, wait=0.0):  # at the next call; each policy is worse than the one before
            done, self.pending = self.pending[: self.known], self.pending[self.known :]
            self.known = len(self.pending)
            return [(step, weights, {"return": float(-step)}) for step, weights in done]

    monkeypatch.setattr("algos.worker_learner.run.Evaluator", Late)
    options = {k: v for k, v in TINY.items() if hasattr(ddpg.Args, k)}
    options |= {"total_steps": 300, "eval_every": 100, "run_dir": str(tmp_path)}
    with pytest.raises(SystemExit):
        ddpg.train(ddpg.Args(**options, pause_at=150))
    result = ddpg.train(ddpg.Args(resume=str(tmp_path)))
    assert list(scored) == [100, 200, 300] and result.best_return == -100
    best = torch.load(tmp_path / "best.pt", weights_only=True)
    assert (best["step"], best["return"]) == (100, -100)
    assert_same(best["agent"], scored[100])


def test_without_the_replay_buffer_a_resumed_run_fills_it_anew(tmp_path, capsys):
    run_of(sac, tmp_path, kill_after=200, save_replay=False)
    content = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert content["replay"] == {}
    capsys.readouterr()
    resume_of(sac, tmp_path)
    assert "--no-save-replay" in capsys.readouterr().out
    sizes = [
        (int(step), float(value))
        for step, _, tag, value in (
            line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines()[1:]
        )
        if tag == "charts/replay_size"
    ]
    assert sizes[-1][0] == 300 and sizes[-1][1] < 200  # it held 200 before


@pytest.mark.parametrize("script", [a2c, ppo_hterm, redq, mod_sac, crossq])
def test_the_others_resume_bit_for_bit_too(script, tmp_path):
    options = {"utd_ratio": 1.0, "minibatch_size": 8, "epochs": 2, "total_steps": 300}
    options["critic_hidden_size"] = 8
    if script in (a2c, ppo_hterm):
        options["num_steps"] = 8
    updates = run_of(script, tmp_path / "reference", **options)
    run_of(script, tmp_path / "killed", kill_after=updates * 2 // 3, **options)
    resume_of(script, tmp_path / "killed")
    names = "killed", "reference"
    assert_same(*(torch.load(tmp_path / n / "checkpoint.pt", weights_only=True) for n in names))


def test_what_another_number_of_learners_saved(tmp_path, capsys):
    """Weights, optimizers, target and schedules go on; replay and episodes begin anew."""
    run_of(sac, tmp_path, total_steps=300)
    path = tmp_path / "checkpoint.pt"
    saved = torch.load(path, weights_only=True)
    saved["run"]["world_size"] = 2
    torch.save(saved, path)
    resume_of(sac, tmp_path)  # nothing is left to do: what it saves is what it loaded
    said, now = capsys.readouterr().out, torch.load(path, weights_only=True)
    assert "Not exact: 2 learner(s) saved, now there are 1" in said
    for name in ("agent", "target", "critic_optimizer", "actor_optimizer"):
        assert_same(now[name], saved[name], name)
    assert torch.initial_seed() == saved["run"]["step"]  # not the run's first numbers once more
    assert now["replay"]["rows"] == 0 < saved["replay"]["rows"]
    assert not torch.equal(now["workers"]["obs"], saved["workers"]["obs"])


@pytest.mark.parametrize("where", ["here", "in a worker", "on a GPU before"])
def test_where_environments_start_anew_the_buffer_knows(where, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        if where == "on a GPU before":  # from there no environment is saved
            patch.setattr(Workers, "state_dict", lambda self: {})
        run_of(sac, tmp_path, kill_after=150, num_workers=int(where == "in a worker"))
    ended = []
    monkeypatch.setattr(ReplayBuffer, "end_episodes", lambda self: ended.append(len(self)))
    resume_of(sac, tmp_path)
    anew = where != "here"
    assert len(ended) == anew and all(ended)
    assert ("start new episodes" in capsys.readouterr().out) == anew


def test_new_episodes_are_new_to_the_reward_scaler():
    agent = ppo_hterm.Agent(OBS, BOX, ppo_hterm.Args(num_envs=2))
    agent.reward_scaler(torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.bool))
    assert (agent.reward_scaler.discounted_return > 2).all()
    Run.end_episodes(SimpleNamespace(_state={"agent": agent, "workers": object()}))
    assert (agent.reward_scaler.discounted_return == 0).all()


@pytest.mark.parametrize("script", SCRIPTS)
def test_action_spaces_that_do_not_fit(script, tmp_path, monkeypatch):
    class Push(classic.Pendulum):
        largest = math.inf

        def __init__(self, *where, **options):
            super().__init__(*where, **options)
            bound = self.largest
            self.single_action_space = gymnasium.spaces.Box(-bound, bound, (1,))

    monkeypatch.setattr(classic, "Pendulum", Push)
    run_dir = str(tmp_path / "run")
    cases = ("CartPole", 1.0, "discrete actions;"), ("Pendulum", math.inf, "actions without bounds")
    for env, largest, what in (*cases, ("Pendulum", 3e38, "actions without bounds")):
        monkeypatch.setattr(Push, "largest", largest)
        with pytest.raises(UserError, match=rf"--env {env} has {what}") as error:
            script.train(script.Args(env=env, num_envs=1, device="cpu", run_dir=run_dir))
        assert "\n" not in str(error.value) and not (tmp_path / "run").exists()
