"""xqc.py against references written out independently: loops and numpy in double precision."""

import gymnasium
import numpy as np
import pytest
import torch
from test_offpolicy import assert_same, resume_of, run_of
from test_sac_family import assert_gradient, joint, numbers, optimizers_of, random_batch
from torch import nn

from algos import xqc

OBS_DIM, ACT_DIM, BATCH, TEMPERATURE = 4, 2, 9, np.exp(-3.0)
OBS = gymnasium.spaces.Box(-np.inf, np.inf, (OBS_DIM,))
BOX = gymnasium.spaces.Box(np.float32([-2.0, 0.0]), np.float32([2.0, 1.0]))


def make_agent(num_bins: int = 11):
    """An agent in double precision, away from the special values of initialisation."""
    torch.manual_seed(0)
    args = xqc.Args(num_envs=2, hidden_size=5, critic_hidden_size=6)
    agent = xqc.Agent(OBS, BOX, args).double()
    agent.critics.bins = torch.linspace(-2, 2, num_bins, dtype=torch.float64)
    for network in (agent.critics.q1, agent.critics.q2):
        network[-1] = nn.Linear(6, num_bins, dtype=torch.float64)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        agent.log_temperature.fill_(-3)
        agent.reward_scaler.statistics.var.fill_(4.0)  # σ = 2
        for name, buffer in agent.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.add_(0.5 * torch.rand_like(buffer))
    agent.warm_up.fill_(False)
    return agent, args


# The references.


class Normalize:
    """Batch normalisation's definition, for the layers of one network."""

    def __init__(self, network, training: bool):
        self.state = {k: b.numpy().copy() for k, b in network.named_buffers()}
        self.training = training

    def __call__(self, name: str, x, weights):
        state = (self.state[f"{name}.running_{kind}"] for kind in ("mean", "var"))
        mean, var = (x.mean(0), x.var(0)) if self.training else state
        x = (x - mean) / np.sqrt(var + 1e-3)
        learned = f"{name}.weight" in weights
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"] if learned else x


def network(weights, name, x, normalize):
    """Input normalised; four times a layer without bias, normalised, ReLU; a layer with bias."""
    x = normalize(f"{name}.0", x, weights)
    for layer in (1, 4, 7, 10):
        x = x @ weights[f"{name}.{layer}.weight"].T
        x = np.maximum(normalize(f"{name}.{layer + 1}", x, weights), 0)
    return x @ weights[f"{name}.13.weight"].T + weights[f"{name}.13.bias"]


def policy(weights, obs, noise, normalize):
    """The squashed Gaussian -> action, log-probability."""
    mean, log_std = np.split(network(weights, "mean_and_log_std", obs, normalize), 2, axis=1)
    log_std = log_std.clip(-20, 2)
    u = mean + np.exp(log_std) * noise
    density = np.exp(-0.5 * noise**2) / (np.exp(log_std) * np.sqrt(2 * np.pi))
    return np.tanh(u), np.log(density * np.cosh(u) ** 2).sum(1)


def softmax(x):
    x = np.exp(x)
    return x / x.sum(1, keepdims=True)


def distributions(weights, x, normalize):
    return [softmax(network(weights, name, x, normalize)) for name in ("q1", "q2")]


def projected(returns, p, bins):
    """One return at a time: all to the bin that it is, or parts by distance to both neighbours."""
    m = np.zeros_like(p)
    for b, k in np.ndindex(*p.shape):
        y = min(max(returns[b, k], bins[0]), bins[-1])
        above = next(j for j in range(len(bins)) if bins[j] >= y)
        if bins[above] == y:
            m[b, above] += p[b, k]
            continue
        width = bins[above] - bins[above - 1]
        m[b, above] += p[b, k] * (y - bins[above - 1]) / width
        m[b, above - 1] += p[b, k] * (bins[above] - y) / width
    return m


# Projection


def test_projection_onto_the_bins():
    """Also of returns at bins, at both ends and beyond; the mean is that of what is clipped."""
    torch.manual_seed(0)
    bins = torch.linspace(-2, 2, 9, dtype=torch.float64)
    returns = 1.5 * torch.randn(40, 9, dtype=torch.float64)
    returns[0], returns[1, :4] = bins, torch.tensor([-2.0, 2.0, -7.0, 7.0])
    p = torch.randn(40, 9, dtype=torch.float64).softmax(-1)
    m = xqc.project(returns, p, bins)
    np.testing.assert_allclose(m, projected(*(x.numpy() for x in (returns, p, bins))), atol=1e-15)
    torch.testing.assert_close(m.sum(-1), torch.ones(40, dtype=torch.float64))
    torch.testing.assert_close(m[0], p[0])
    torch.testing.assert_close(m @ bins, (p * returns.clamp(-2, 2)).sum(-1))
    assert (returns.abs() > 2).sum() > 20


def test_projection_in_single_precision():
    """With the script's own bins, where rounding must not lead out of them."""
    bins = xqc.Critics(OBS_DIM, ACT_DIM, 4).bins
    assert len(bins) == 101 and bins[0] == -5 and bins[-1] == 5
    torch.manual_seed(0)
    returns = torch.cat((bins[None], bins[None] + 1e-6, 4 * torch.randn(500, 101)))
    p = torch.randn(502, 101).softmax(-1)
    m = xqc.project(returns, p, bins)
    assert m.min() >= -1e-6
    torch.testing.assert_close(m.sum(-1), torch.ones(502))
    torch.testing.assert_close(m @ bins, (p * returns.clamp(-5, 5)).sum(-1), atol=2e-5, rtol=1e-5)


# Losses


def test_gradients():
    """Of both losses; the target is the distribution of the critic with the smaller mean."""
    agent, _ = make_agent()
    batch = random_batch()
    bins = agent.critics.bins.numpy()
    learning, still = (Normalize(agent.actor, training) for training in (True, False))
    critics_learning = Normalize(agent.critics, True)
    running = agent.critics.q2[0]
    mean_before, var_before = running.running_mean.clone(), running.running_var.clone()
    torch.manual_seed(5)
    loss, td_error = xqc.critic_loss(agent, batch)
    torch.manual_seed(5)
    noise = torch.randn(BATCH, ACT_DIM, dtype=torch.float64).numpy()
    next_obs = batch["next_obs"].numpy()
    next_action, log_prob = policy(numbers(agent.actor), next_obs, noise, still)
    x = np.concatenate((joint(batch["obs"], batch["action"]), joint(next_obs, next_action)))
    now = distributions(numbers(agent.critics), x, critics_learning)
    means = np.stack([p @ bins for p in now])
    smaller = means[:, BATCH:].argmin(0)
    assert set(smaller) == {0, 1}
    next_p = np.stack([now[smaller[b]][BATCH + b] for b in range(BATCH)])
    y = np.empty_like(next_p)
    for b, k in np.ndindex(*y.shape):
        y[b, k] = batch["reward"][b] / 2
        if not batch["terminated"][b]:
            y[b, k] += batch["discount"][b] * (bins[k] - TEMPERATURE * log_prob[b])
    m = projected(y, next_p, bins)
    np.testing.assert_allclose(m @ bins, (next_p * y.clip(-2, 2)).sum(1))

    def critics_reference(weights):
        total = 0
        for p in distributions(weights, x, critics_learning):
            total = total - (m * np.log(p[:BATCH])).sum(1)
        return (batch["weight"].numpy() * total).mean()

    assert_gradient(loss, agent.critics, critics_reference)
    np.testing.assert_allclose(td_error, abs(means[:, :BATCH] - m @ bins).max(0))
    expected = 0.99 * mean_before + 0.01 * torch.tensor(x.mean(0))
    torch.testing.assert_close(running.running_mean, expected)
    expected = 0.99 * var_before + 0.01 * torch.tensor(x.var(0))
    torch.testing.assert_close(running.running_var, expected)

    critics_still = Normalize(agent.critics, False)
    torch.manual_seed(5)
    loss, log_prob = xqc.actor_loss(agent, batch)
    critics, obs = numbers(agent.critics), batch["obs"].numpy()

    def actor_reference(weights):
        action, log_prob = policy(weights, obs, noise, learning)
        p = distributions(critics, joint(obs, action), critics_still)
        return (TEMPERATURE * log_prob - np.minimum(*(x @ bins for x in p))).mean()

    assert_gradient(loss, agent.actor, actor_reference)
    both = *agent.actor.modules(), *agent.critics.modules()
    assert not any(module.training for module in both)
    assert agent.log_temperature.grad is None and not log_prob.requires_grad
    xqc.temperature_loss(agent, log_prob).backward()  # H̄ = −dim(A) / 2
    torch.testing.assert_close(agent.log_temperature.grad, 1 - log_prob.mean())


def test_the_mean_of_the_target_is_bellmans(monkeypatch):
    """r/σ + γ (1 − terminated) (min Q − α log π), while all of it is within the bins."""
    agent, _ = make_agent(num_bins=101)
    project, seen = xqc.project, []

    def wide(returns, p, bins):  # with room at both ends
        assert returns.abs().max() < 10
        bins = torch.linspace(-10, 10, 101, dtype=torch.float64)
        seen.append((project(returns, p, bins) @ bins, p @ agent.critics.bins))
        return project(returns, p, agent.critics.bins)

    monkeypatch.setattr(xqc, "project", wide)
    batch = random_batch()
    torch.manual_seed(5)
    xqc.critic_loss(agent, batch)
    torch.manual_seed(5)
    with torch.no_grad():
        _, log_prob = agent.actor.sample(batch["next_obs"])
    ((mean, next_q),) = seen
    future = batch["discount"] * (next_q - TEMPERATURE * log_prob)
    expected = batch["reward"] / 2 + future.masked_fill(batch["terminated"], 0)
    torch.testing.assert_close(mean, expected)


# Updates


def norms(agent):
    return [
        layer.weight.norm(dim=1)
        for network in (agent.actor, agent.critics)
        for layer in network.modules()
        if isinstance(layer, nn.Linear)
    ]


def test_weights_keep_their_norm():
    """Of each unit of each layer, after every step of its network; the actor waits for its turn."""
    agent, args = make_agent()
    optimizers, batch = optimizers_of(agent), random_batch()
    actor_layers = 5
    for number in range(6):
        before = [p.detach().clone() for p in agent.actor.parameters()]
        xqc.update(agent, optimizers, batch, number % args.policy_delay == 2, args)
        found = norms(agent)
        assert len(found) == 15
        for norm in found[0 if number >= 2 else actor_layers :]:
            torch.testing.assert_close(norm, torch.ones_like(norm), rtol=1e-12, atol=1e-12)
        after = agent.actor.parameters()
        moved = not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert moved == (number in (2, 5))
    assert all(p.requires_grad for p in agent.parameters())


def test_only_the_direction_of_weights_counts():
    """Batch normalisation undoes what else is in them, except in the last layer."""
    agent, _ = make_agent()
    batch = random_batch()
    for layers in (agent.critics.q1, agent.critics.q2):
        for layer in layers:
            if isinstance(layer, xqc.BatchNorm):
                layer.eps = 0.0
    agent.critics.train()
    before = agent.critics(batch["obs"], batch["action"])
    with torch.no_grad():
        for layers in (agent.critics.q1, agent.critics.q2):
            for layer in layers[:-1]:
                if isinstance(layer, nn.Linear):
                    layer.weight.mul_(3)
    torch.testing.assert_close(agent.critics(batch["obs"], batch["action"]), before)


# Runs


def test_resume_bit_for_bit(tmp_path):
    """Statistics of batches and rewards, and the annealed learning rate, go on as well."""
    options = {"utd_ratio": 1.0, "total_steps": 300, "critic_hidden_size": 8}
    updates = run_of(xqc, tmp_path / "reference", **options)
    run_of(xqc, tmp_path / "killed", kill_after=updates * 2 // 3, **options)
    resume_of(xqc, tmp_path / "killed")
    names = "killed", "reference"
    ours, theirs = (torch.load(tmp_path / n / "checkpoint.pt", weights_only=True) for n in names)
    assert_same(ours, theirs)
    rate = theirs["critic_optimizer"]["param_groups"][0]["lr"]
    assert rate == pytest.approx(1e-4, rel=0.1)  # a tenth, at the end of the last rollout
    assert theirs["agent"]["reward_scaler.statistics.count"] == 300
