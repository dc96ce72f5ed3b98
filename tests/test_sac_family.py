"""redq.py, mod_sac.py and crossq.py against references written out independently in numpy."""

import copy

import gymnasium
import numpy as np
import pytest
import torch

from algos import crossq, mod_sac, redq
from algos.worker_learner import UserError, flatten, gradient_of

OBS_DIM, ACT_DIM, BATCH, TEMPERATURE = 4, 2, 9, np.exp(-0.7)
OBS = gymnasium.spaces.Box(-np.inf, np.inf, (OBS_DIM,))
BOX = gymnasium.spaces.Box(np.float32([-2.0, 0.0]), np.float32([2.0, 1.0]))


def make_agent(script, **options):
    """An agent in double precision away from the special values of initialisation, its target."""
    torch.manual_seed(0)
    args = script.Args(num_envs=2, hidden_size=5, **options)
    agent = script.Agent(OBS, BOX, args).double()
    agent.warm_up.fill_(False)
    target = copy.deepcopy(agent.critics)
    with torch.no_grad():
        for parameter in [*agent.parameters(), *target.parameters()]:
            parameter.add_(0.2 * torch.randn_like(parameter))
        agent.actor.log_temperature.fill_(-0.7)
        for name, buffer in agent.named_buffers():
            if name.endswith(("mean", "var")):
                buffer.add_(0.5 * torch.rand_like(buffer))
    return agent, target, args


def random_batch():
    generator = np.random.default_rng(1)
    batch = {
        "obs": generator.normal(size=(BATCH, OBS_DIM)),
        "action": generator.uniform(-1, 1, (BATCH, ACT_DIM)),
        "reward": generator.normal(size=BATCH),
        "next_obs": 0.3 + 2 * generator.normal(size=(BATCH, OBS_DIM)),
        "terminated": generator.random(BATCH) < 0.3,
        "discount": generator.choice([0.9, 0.81], BATCH),
        "weight": generator.uniform(0.1, 1, BATCH),
    }
    return {name: torch.tensor(value) for name, value in batch.items()}


def optimizers_of(agent):
    networks = agent.critics, agent.actor
    return tuple(torch.optim.Adam([flatten(network)], 1e-2, fused=True) for network in networks)


# The references: one critic, one example of the definition at a time.


def numbers(network):
    return {name: p.detach().numpy().copy() for name, p in network.named_parameters()}


def identity(layer, x):
    return x


def q_value(weights, i, x, normalize=identity):
    """Critic i on x (B, obs_dim + act_dim) -> (B,)."""
    for layer in (1, 2, 3):
        x = normalize(layer, x) @ weights[f"weight{layer}"][i] + weights[f"bias{layer}"][i]
        x = np.maximum(x, 0) if layer < 3 else x
    return x[:, 0]


def policy(weights, obs, noise, normalize=identity):
    """The squashed Gaussian -> action, log-probability; 1 − tanh² as it stands."""
    layers = sorted({int(name.split(".")[0]) for name, w in weights.items() if w.ndim == 2 and
                     name.endswith("weight")})  # fmt: skip
    x = obs
    for layer in layers:
        x = normalize(layer, x) @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
        x = np.maximum(x, 0) if layer != layers[-1] else x
    mean, log_std = np.split(x, 2, axis=1)
    action = np.tanh(mean + np.exp(log_std) * noise)
    density = np.exp(-0.5 * noise**2) / (np.exp(log_std) * np.sqrt(2 * np.pi))
    return action, np.log(density / (1 - action**2)).sum(1)


def slopes(function, weights, names):
    """{name: gradient of function(weights)} by central differences."""
    found = {}
    for name in names:
        array, gradient = weights[name], np.zeros_like(weights[name])
        for index in np.ndindex(array.shape):
            kept, values = array[index], []
            for sign in (1, -1):
                array[index] = kept + sign * 1e-5
                values.append(function(weights))
            array[index] = kept
            gradient[index] = (values[0] - values[1]) / 2e-5
        found[name] = gradient
    return found


def assert_gradient(loss, network, reference, without=()):
    """Of all parameters of `network`: autograd's equals the reference's to 1e-6."""
    parameters = {k: p for k, p in network.named_parameters() if k not in without}
    ours = torch.autograd.grad(loss, list(parameters.values()))
    weights = numbers(network)
    np.testing.assert_allclose(loss.item(), reference(weights), rtol=1e-9)
    theirs = slopes(reference, weights, parameters)
    for name, gradient in zip(parameters, ours, strict=True):
        np.testing.assert_allclose(gradient.numpy(), theirs[name], atol=1e-6, err_msg=name)
    assert max(np.abs(gradient).max() for gradient in theirs.values()) > 0.05


def loss_of(predictions, y, batch):
    errors = [np.asarray(batch["weight"]) * (q - y) ** 2 for q in predictions]
    return sum(0.5 * error.mean() for error in errors)


def target_of(batch, value, scale=1.0):
    future = np.where(batch["terminated"], 0, batch["discount"].numpy() * value)
    return scale * batch["reward"].numpy() + future


def joint(*parts):
    return np.concatenate([np.asarray(part) for part in parts], 1)


# REDQ


def test_redq_gradient_of_the_critics():
    """Every critic learns; the target is the smallest of the M that were drawn."""
    agent, target, args = make_agent(redq, ensemble_size=5, subset_size=3, reward_scale=2.0)
    batch, drawn = random_batch(), []

    def watched(obs, action, members):
        drawn.extend(members.tolist())
        return target(obs, action, members=members)

    torch.manual_seed(5)
    loss, td_error = redq.critic_loss(agent, watched, batch, args)
    torch.manual_seed(5)
    noise = torch.randn(BATCH, ACT_DIM, dtype=torch.float64).numpy()
    assert len(set(drawn)) == 3  # without replacement
    next_action, log_prob = policy(numbers(agent.actor), batch["next_obs"].numpy(), noise)
    x, theirs = joint(batch["next_obs"], next_action), numbers(target)
    value = np.min([q_value(theirs, i, x) for i in drawn], axis=0) - TEMPERATURE * log_prob
    y = target_of(batch, value, scale=2.0)
    x = joint(batch["obs"], batch["action"])

    def reference(weights):
        return loss_of([q_value(weights, i, x) for i in range(5)], y, batch)

    assert_gradient(loss, agent.critics, reference)
    ours = numbers(agent.critics)
    errors = np.mean([np.abs(q_value(ours, i, x) - y) for i in range(5)], axis=0)
    np.testing.assert_allclose(td_error, errors)


def test_redq_draws_every_subset_alike():
    agent, target, args = make_agent(redq, ensemble_size=4, subset_size=2)
    counts = {}

    def watched(obs, action, members):
        key = tuple(sorted(members.tolist()))
        counts[key] = counts.get(key, 0) + 1
        return target(obs, action, members=members)

    for _ in range(600):
        redq.critic_loss(agent, watched, random_batch(), args)
    assert len(counts) == 6 and min(counts.values()) > 60  # 100 ± 9 each


def test_redq_gradient_of_the_actor():
    """Against the mean of all critics, not their minimum."""
    agent, _, args = make_agent(redq, ensemble_size=5)
    batch = random_batch()
    torch.manual_seed(5)
    loss, log_prob = redq.actor_loss(agent, batch, args)
    torch.manual_seed(5)
    noise = torch.randn(BATCH, ACT_DIM, dtype=torch.float64).numpy()
    critics = numbers(agent.critics)

    def reference(weights):
        action, log_prob = policy(weights, batch["obs"].numpy(), noise)
        x = joint(batch["obs"], action)
        value = np.mean([q_value(critics, i, x) for i in range(5)], axis=0)
        return (TEMPERATURE * log_prob - value).mean()

    assert_gradient(loss, agent.actor, reference, without={"log_temperature"})
    expected = policy(numbers(agent.actor), batch["obs"].numpy(), noise)[1]
    np.testing.assert_allclose(log_prob, expected)


def moves(script, numbers_of_updates, **options):
    """Which of (critics, actor, target) each update moved."""
    agent, target, args = make_agent(script, **options)
    optimizers, found = optimizers_of(agent), []
    gradients = (
        gradient_of(script.critic_loss, agent.critics),
        gradient_of(script.policy_loss, agent.actor),
    )
    parts = [agent.critics, agent.actor] + ([] if script is crossq else [target])
    others = (agent,) if script is crossq else (agent, target)
    for number in numbers_of_updates:
        before = [torch.cat([p.detach().flatten() for p in part.parameters()]) for part in parts]
        extra = () if script is mod_sac else (number,)
        script.update(*others, optimizers, random_batch(), gradients, *extra, args)
        after = [torch.cat([p.detach().flatten() for p in part.parameters()]) for part in parts]
        found.append([not torch.equal(a, b) for a, b in zip(before, after, strict=True)])
    return found, agent


def test_the_actor_waits_for_the_critics():
    found, _ = moves(redq, range(8), ensemble_size=3, policy_delay=4)
    assert found == [[True, number % 4 == 0, True] for number in range(8)]
    found, _ = moves(crossq, range(7), critic_hidden_size=6)
    assert found == [[True, number % 3 == 0] for number in range(7)]


def test_redq_steers_to_the_entropy_that_was_asked_for():
    assert make_agent(redq)[0].target_entropy == -ACT_DIM
    assert make_agent(redq, target_entropy=-0.5)[0].target_entropy == -0.5


def test_redq_subset_larger_than_the_ensemble(tmp_path):
    args = redq.Args(env="Pendulum", subset_size=4, ensemble_size=3, run_dir=str(tmp_path / "run"))
    with pytest.raises(UserError, match=r"--subset-size is 4; allowed is from 1 to .*, 3"):
        redq.train(args)
    assert not (tmp_path / "run").exists()


# ModSAC


@pytest.mark.parametrize("losses", [[1e-4], [1e4], [0.8], [0.05, 20.0], [20.0, 0.05]])
def test_mod_sac_policy_follows_the_critics_loss(losses, monkeypatch):
    """Every update while the loss is small, every second while it is large; also after a change."""
    losses = np.repeat(losses, 400)
    remaining, original = iter(torch.tensor(losses)), mod_sac.critics_reliability
    monkeypatch.setattr(
        mod_sac, "critics_reliability", lambda agent, _: original(agent, next(remaining))
    )
    found, _ = moves(mod_sac, range(len(losses)))
    average, due, expected = 1.0, 0.0, []
    for loss in losses:
        average = 0.995 * average + 0.005 * loss
        due += 1 / (2 - np.exp(-(average**2)))
        expected.append(due > 0)
        due -= expected[-1]
    moved = [policy for _, policy, _ in found]
    assert moved == expected
    assert all(critics and target for critics, _, target in found)
    shares = {1e-4: 1.0, 0.05: 0.95, 0.8: 0.68, 20.0: 0.5, 1e4: 0.5}
    for last in range(399, len(losses), 400):  # 100 updates of each loss, the average near it
        if losses[last] < losses[0]:
            continue  # L̄ falls by a factor of e in 200 updates
        assert abs(np.mean(moved[last - 99 : last + 1]) - shares[losses[last]]) < 0.1


# CrossQ


class Renorm:
    """BatchRenorm's definition, for the three layers of a network, or of critic i."""

    def __init__(self, network, names, training: bool, after: int, i: int = 0):
        state = {k: b.detach().numpy().copy() for k, b in network.named_buffers()}
        self.mean, self.var, self.batches = (
            [state[f"{name}.{k}"] for name in names] for k in ("mean", "var", "batches")
        )
        self.names, self.training, self.after, self.i, self.kept = names, training, after, i, {}

    def __call__(self, n: int, x, weights):
        def own(array):
            return array.reshape(-1, array.shape[-1])[self.i]

        mean, var = own(self.mean[n]), own(self.var[n])
        m, v = (x.mean(0), x.var(0)) if self.training else (mean, var)
        y = (x - m) / np.sqrt(v + 1e-3)
        if self.training and self.batches[n] >= self.after:
            s = np.sqrt(var + 1e-3)  # r and d are those of the first call: they have no gradient
            fresh = np.clip(np.sqrt(v + 1e-3) / s, 1 / 3, 3), np.clip((m - mean) / s, -5, 5)
            r, d = self.kept.setdefault(n, fresh)
            y = y * r + d
        scale, shift = (own(weights[f"{self.names[n]}.{k}"]) for k in ("scale", "shift"))
        return y * scale + shift


def normalized_q(renorm, weights, x):
    for n in range(3):
        x = renorm(n, x, weights) @ weights[f"weight{n + 1}"][renorm.i]
        x = x + weights[f"bias{n + 1}"][renorm.i, 0]
        x = np.maximum(x, 0) if n < 2 else x
    return x[:, 0]


def normalized_policy(renorm, weights, obs, noise):
    x = obs
    for n, layer in enumerate((1, 4, 7)):
        x = renorm(n, x, weights) @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
        x = np.maximum(x, 0) if n < 2 else x
    mean, log_std = np.split(x, 2, axis=1)
    u = mean + np.exp(log_std) * noise
    density = np.exp(-0.5 * noise**2) / (np.exp(log_std) * np.sqrt(2 * np.pi))
    return np.tanh(u), np.log(density * np.cosh(u) ** 2).sum(1)  # 1 / (1 − tanh²) is cosh²


@pytest.mark.parametrize("after", [10, 0])  # batch normalisation, renormalisation
def test_crossq_gradients(after):
    """(s, a) and (s', a') in one batch; a network's own batch only where it learns."""
    agent, _, args = make_agent(crossq, critic_hidden_size=6, renorm_after=after, reward_scale=2.0)
    agent.critics.renorm1.mean[..., 0] += 30  # farther from any batch than d may lead
    batch = random_batch()
    layers, actor_layers = ("renorm1", "renorm2", "renorm3"), ("0", "3", "6")
    members = [Renorm(agent.critics, layers, True, after, i) for i in range(2)]
    learning, still = (Renorm(agent.actor, actor_layers, t, after) for t in (True, False))
    running = agent.critics.renorm1
    before, var_before = running.mean.clone(), running.var.clone()
    torch.manual_seed(5)
    loss, td_error = crossq.critic_loss(agent, batch, args)
    torch.manual_seed(5)
    noise = torch.randn(BATCH, ACT_DIM, dtype=torch.float64).numpy()
    next_obs = batch["next_obs"].numpy()
    next_action, log_prob = normalized_policy(still, numbers(agent.actor), next_obs, noise)
    both = joint(batch["obs"], batch["action"]), joint(next_obs, next_action)
    x = np.concatenate(both)
    now = [normalized_q(member, numbers(agent.critics), x) for member in members]
    value = np.minimum(*(q[BATCH:] for q in now)) - TEMPERATURE * log_prob
    y = target_of(batch, value, scale=2.0)

    def critics_reference(weights):
        return loss_of([normalized_q(m, weights, x)[:BATCH] for m in members], y, batch)

    assert_gradient(loss, agent.critics, critics_reference)
    np.testing.assert_allclose(td_error, np.mean([np.abs(q[:BATCH] - y) for q in now], axis=0))
    expected = 0.99 * before + 0.01 * torch.tensor(x.mean(0))
    torch.testing.assert_close(running.mean, expected)
    torch.testing.assert_close(running.var, 0.99 * var_before + 0.01 * torch.tensor(x.var(0)))
    assert running.batches == 1

    members = [Renorm(agent.critics, layers, False, after, i) for i in range(2)]
    torch.manual_seed(5)
    loss, _ = crossq.actor_loss(agent, batch, args)
    critics, obs = numbers(agent.critics), batch["obs"].numpy()

    def actor_reference(weights):
        action, log_prob = normalized_policy(learning, weights, obs, noise)
        values = (normalized_q(m, critics, joint(obs, action)) for m in members)
        return (TEMPERATURE * log_prob - np.minimum(*values)).mean()

    assert_gradient(loss, agent.actor, actor_reference, without={"log_temperature"})
    assert not any(module.training for module in agent.modules())
