"""redq.py, mod_sac.py and crossq.py against references written out independently in numpy."""

import copy
import dataclasses
import json
import sys

import gymnasium
import numpy as np
import pytest
import torch

from algos import crossq, mod_sac, redq
from algos.worker_learner import UserError, parse
from algos.worker_learner.arguments import check_args

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
        agent.log_temperature.fill_(-0.7)
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
    lists = agent.critics.parameters(), [*agent.actor.parameters(), agent.log_temperature]
    return tuple(torch.optim.Adam(parameters, 1e-2, fused=True) for parameters in lists)


# The references: one critic, one example of the definition at a time.


def numbers(network):
    return {name: p.detach().numpy().copy() for name, p in network.named_parameters()}


def ensemble_value(weights, i, x):
    """Critic i of redq.py on x (B, obs_dim + act_dim) -> (B,)."""
    for layer in ("first", "second", "last"):
        x = x @ weights[f"{layer}.weight"][i] + weights[f"{layer}.bias"][i]
        x = np.maximum(x, 0) if layer != "last" else x
    return x[:, 0]


def multilayer(weights, name, x, normalize=None):
    """What an nn.Sequential of linear layers, `normalize` before each, and ReLUs gives."""
    layers = sorted(int(key.split(".")[1]) for key, w in weights.items()
                    if key.startswith(name) and w.ndim == 2)  # fmt: skip
    for layer in layers:
        x = normalize(f"{name}.{layer - 1}", x, weights) if normalize else x
        x = x @ weights[f"{name}.{layer}.weight"].T + weights[f"{name}.{layer}.bias"]
        x = np.maximum(x, 0) if layer != layers[-1] else x
    return x


def policy(weights, obs, noise, normalize=None):
    """The squashed Gaussian -> action, log-probability."""
    output = multilayer(weights, "mean_and_log_std", obs, normalize)
    mean, log_std = np.split(output, 2, axis=1)
    u = mean + np.exp(log_std) * noise
    density = np.exp(-0.5 * noise**2) / (np.exp(log_std) * np.sqrt(2 * np.pi))
    return np.tanh(u), np.log(density * np.cosh(u) ** 2).sum(1)  # 1 / (1 − tanh²) is cosh²


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


def assert_gradient(loss, network, reference):
    """Of all parameters of `network`: autograd's equals the reference's to 1e-6."""
    parameters = dict(network.named_parameters())
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


def target_of(batch, value):
    future = np.where(batch["terminated"], 0, batch["discount"].numpy() * value)
    return batch["reward"].numpy() + future


def joint(*parts):
    return np.concatenate([np.asarray(part) for part in parts], 1)


# REDQ


def watched_target(target, drawn):
    """`target`, which notes in `drawn` the subset that it was asked for."""

    def forward(obs, action, subset):
        drawn.append(sorted(subset.tolist()))
        return target(obs, action, subset)

    return forward


def test_redq_gradient_of_the_critics():
    """Every critic learns; the target is the smallest of the M that were drawn."""
    agent, target, args = make_agent(redq, ensemble_size=5, subset_size=3)
    batch, drawn = random_batch(), []
    torch.manual_seed(5)
    loss, td_error = redq.critic_loss(agent, watched_target(target, drawn), batch, args)
    torch.manual_seed(5)
    noise = torch.randn(BATCH, ACT_DIM, dtype=torch.float64).numpy()
    (drawn,) = drawn
    assert len(set(drawn)) == 3  # without replacement
    next_action, log_prob = policy(numbers(agent.actor), batch["next_obs"].numpy(), noise)
    x, theirs = joint(batch["next_obs"], next_action), numbers(target)
    value = np.min([ensemble_value(theirs, i, x) for i in drawn], axis=0) - TEMPERATURE * log_prob
    y = target_of(batch, value)
    x = joint(batch["obs"], batch["action"])

    def reference(weights):
        return loss_of([ensemble_value(weights, i, x) for i in range(5)], y, batch)

    assert_gradient(loss, agent.critics, reference)
    ours = numbers(agent.critics)
    errors = np.mean([np.abs(ensemble_value(ours, i, x) - y) for i in range(5)], axis=0)
    np.testing.assert_allclose(td_error, errors)


def test_redq_draws_every_subset_alike():
    agent, target, args = make_agent(redq, ensemble_size=4, subset_size=2)
    drawn, batch = [], random_batch()
    for _ in range(600):
        redq.critic_loss(agent, watched_target(target, drawn), batch, args)
    subsets, counts = np.unique(drawn, axis=0, return_counts=True)
    assert len(subsets) == 6 and min(counts) > 60  # 100 ± 9 each


def test_redq_gradient_of_the_actor():
    """Against the mean of all critics, not their minimum."""
    agent, _, _ = make_agent(redq, ensemble_size=5)
    batch = random_batch()
    torch.manual_seed(5)
    loss, log_prob = redq.actor_loss(agent, batch)
    torch.manual_seed(5)
    noise = torch.randn(BATCH, ACT_DIM, dtype=torch.float64).numpy()
    critics = numbers(agent.critics)

    def reference(weights):
        action, log_prob = policy(weights, batch["obs"].numpy(), noise)
        x = joint(batch["obs"], action)
        value = np.mean([ensemble_value(critics, i, x) for i in range(5)], axis=0)
        return (TEMPERATURE * log_prob - value).mean()

    assert_gradient(loss, agent.actor, reference)
    expected = policy(numbers(agent.actor), batch["obs"].numpy(), noise)[1]
    np.testing.assert_allclose(log_prob, expected)


def test_an_ensemble_begins_as_linear_layers_do():
    torch.manual_seed(0)
    layer = redq.EnsembleLinear(10, 25, 40)
    for values in (layer.weight, layer.bias):  # uniform in ± 1 / √25
        assert values.abs().max() < 0.2 and values.abs().max() > 0.19
        assert values.std().item() == pytest.approx(0.2 / 3**0.5, rel=0.1)


def moves(script, numbers_of_updates, delay, **options):
    """Which of (critics, actor, target) each update moved."""
    agent, target, args = make_agent(script, **options)
    optimizers, batch, found = optimizers_of(agent), random_batch(), []
    parts = [agent.critics, agent.actor] + ([] if script is crossq else [target])
    others = (agent,) if script is crossq else (agent, target)
    for number in numbers_of_updates:
        before = [torch.cat([p.detach().flatten() for p in part.parameters()]) for part in parts]
        due = (number + 1) % delay == 0 if delay else agent.policy_due.item() >= 0  # as in `train`
        script.update(*others, optimizers, batch, due, args)
        after = [torch.cat([p.detach().flatten() for p in part.parameters()]) for part in parts]
        found.append([not torch.equal(a, b) for a, b in zip(before, after, strict=True)])
    return found, agent


def test_the_actor_waits_for_the_critics():
    """It moves after the last of the updates of the critics that it waits for."""
    found, _ = moves(redq, range(8), 4, ensemble_size=3)
    assert found == [[True, number in (3, 7), True] for number in range(8)]
    found, _ = moves(crossq, range(7), 3, critic_hidden_size=6)
    assert found == [[True, number in (2, 5)] for number in range(7)]


@pytest.mark.parametrize("script", [redq, crossq, mod_sac])
def test_only_their_own_loss_moves_the_critics(script):
    """The actor's leaves no gradient in them, and they learn again afterwards."""
    agent, target, args = make_agent(script, **({"ensemble_size": 3} if script is redq else {}))
    others = (agent,) if script is crossq else (agent, target)
    before = copy.deepcopy(others)
    torch.manual_seed(3)
    script.critic_loss(*before, random_batch(), *(args,) * (script is redq))[0].backward()
    torch.manual_seed(3)
    losses, _ = script.update(*others, optimizers_of(agent), random_batch(), True, args)
    assert "actor" in losses and all(p.requires_grad for p in agent.parameters())
    both = zip(agent.critics.parameters(), before[0].critics.parameters(), strict=True)
    for ours, expected in both:
        torch.testing.assert_close(ours.grad, expected.grad)


def test_redq_target_follows_by_tau():
    agent, target, args = make_agent(redq, ensemble_size=3, tau=0.25)
    before = [p.detach().clone() for p in target.parameters()]
    redq.update(agent, target, optimizers_of(agent), random_batch(), False, args)
    rows = zip(before, agent.critics.parameters(), target.parameters(), strict=True)
    for old, ours, theirs in rows:
        torch.testing.assert_close(theirs, old.lerp(ours, 0.25))


def test_redq_steers_to_the_entropy_that_was_asked_for(monkeypatch):
    """None is −dim(A), and 0 is 0; also on the command line, in args.json, and when checked."""
    assert make_agent(redq)[0].target_entropy == -ACT_DIM
    for given, flag, entropy in ((0.0, "0", 0), (-0.5, "-0.5", -0.5), (None, "None", -ACT_DIM)):
        assert make_agent(redq, target_entropy=given)[0].target_entropy == entropy
        monkeypatch.setattr(sys, "argv", ["redq.py", "--target-entropy", flag])
        args = parse(redq.Args, {})
        assert args.target_entropy == given
        check_args(args, redq.LIMITS)
        assert redq.Args(**json.loads(json.dumps(dataclasses.asdict(args)))) == args
    monkeypatch.setattr(sys, "argv", ["redq.py", "--env", "Ant"])
    assert parse(redq.Args, redq.TUNED).target_entropy == -4


def test_redq_subset_larger_than_the_ensemble(tmp_path):
    args = redq.Args(env="Pendulum", subset_size=4, ensemble_size=3, run_dir=str(tmp_path / "run"))
    with pytest.raises(UserError, match="--subset-size is 4; allowed is at most --ensemble-size"):
        redq.train(args)
    assert not (tmp_path / "run").exists()


# ModSAC


def test_mod_sac_asks_before_an_update_whether_the_policy_is_due(tmp_path, monkeypatch):
    update, seen = mod_sac.update, []

    def spy(*given):
        seen.append(given[-2])
        assert given[-2] == (given[0].policy_due >= 0)
        return update(*given)

    monkeypatch.setattr(mod_sac, "update", spy)
    mod_sac.train(mod_sac.Args(
        env="Pendulum", total_steps=160, warmup_steps=80, hidden_size=8, eval_episodes=1,
        compile="none", device="cpu", run_dir=str(tmp_path / "run"),
    ))  # fmt: skip
    assert 0 < sum(seen) < len(seen)


@pytest.mark.parametrize("losses", [[1e-4], [1e4], [0.8], [0.05, 20.0], [20.0, 0.05]])
def test_mod_sac_policy_follows_the_critics_loss(losses, monkeypatch):
    """Every update while the loss is small, every second while it is large; also after a change."""
    losses = np.repeat(losses, 400)
    remaining, original = iter(torch.tensor(losses)), mod_sac.critics_reliability
    monkeypatch.setattr(
        mod_sac, "critics_reliability", lambda agent, _: original(agent, next(remaining))
    )
    zeros = torch.zeros(BATCH)  # losses of one layer each, which are quick
    critic, actor = (lambda x: x.critics.q1[0]), (lambda x: x.actor.mean_and_log_std[0])
    monkeypatch.setattr(mod_sac, "critic_loss", lambda x, *_: (critic(x).weight.sum(), zeros))
    monkeypatch.setattr(mod_sac, "actor_loss", lambda x, *_: (actor(x).weight.sum(), zeros))
    found, _ = moves(mod_sac, range(len(losses)), None)
    average, due, expected = 1.0, 0.0, []
    for loss in losses:
        expected.append(due >= 0)
        average = 0.995 * average + 0.005 * loss
        due += 1 / (2 - np.exp(-(average**2))) - expected[-1]
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
    """BatchRenorm's definition, for the layers of one network."""

    def __init__(self, network, training: bool):
        self.state = {k: b.detach().numpy().copy() for k, b in network.named_buffers()}
        self.training, self.first = training, {}

    def __call__(self, name: str, x, weights):
        mean, var = self.state[f"{name}.mean"], self.state[f"{name}.var"]
        m, v = (x.mean(0), x.var(0)) if self.training else (mean, var)
        y = (x - m) / np.sqrt(v + 1e-3)
        if self.training and self.state[f"{name}.batches"] >= 100_000:
            s = np.sqrt(var + 1e-3)  # r and d are those of the first call: they have no gradient
            now = np.clip(np.sqrt(v + 1e-3) / s, 1 / 3, 3), np.clip((m - mean) / s, -5, 5)
            r, d = self.first.setdefault(name, now)
            y = y * r + d
        return y * weights[f"{name}.scale"] + weights[f"{name}.shift"]


@pytest.mark.parametrize("batches", [0, 100_000])  # batch normalisation, renormalisation
def test_crossq_gradients(batches):
    """(s, a) and (s', a') in one batch; a network's own batch only where it learns."""
    agent, _, _ = make_agent(crossq, critic_hidden_size=6)
    for module in agent.modules():
        if isinstance(module, crossq.BatchRenorm):
            module.batches.fill_(batches)
    running = agent.critics.q2[0]
    running.mean[0] += 30  # farther from any batch than d may lead
    batch = random_batch()
    learning, still = (Renorm(agent.actor, training) for training in (True, False))
    critics_learning = Renorm(agent.critics, True)
    before, var_before = running.mean.clone(), running.var.clone()
    torch.manual_seed(5)
    loss, td_error = crossq.critic_loss(agent, batch)
    torch.manual_seed(5)
    noise = torch.randn(BATCH, ACT_DIM, dtype=torch.float64).numpy()
    next_obs = batch["next_obs"].numpy()
    next_action, log_prob = policy(numbers(agent.actor), next_obs, noise, still)
    both = joint(batch["obs"], batch["action"]), joint(next_obs, next_action)
    x = np.concatenate(both)

    def values(weights, x, normalize):
        return [multilayer(weights, name, x, normalize)[:, 0] for name in ("q1", "q2")]

    now = values(numbers(agent.critics), x, critics_learning)
    value = np.minimum(*(q[BATCH:] for q in now)) - TEMPERATURE * log_prob
    y = target_of(batch, value)

    def critics_reference(weights):
        return loss_of([q[:BATCH] for q in values(weights, x, critics_learning)], y, batch)

    assert_gradient(loss, agent.critics, critics_reference)
    np.testing.assert_allclose(td_error, np.maximum(*(abs(q[:BATCH] - y) for q in now)))
    expected = 0.99 * before + 0.01 * torch.tensor(x.mean(0))
    torch.testing.assert_close(running.mean, expected)
    torch.testing.assert_close(running.var, 0.99 * var_before + 0.01 * torch.tensor(x.var(0)))
    assert running.batches == batches + 1

    critics_still = Renorm(agent.critics, False)
    torch.manual_seed(5)
    loss, _ = crossq.actor_loss(agent, batch)
    critics, obs = numbers(agent.critics), batch["obs"].numpy()

    def actor_reference(weights):
        action, log_prob = policy(weights, obs, noise, learning)
        value = np.minimum(*values(critics, joint(obs, action), critics_still))
        return (TEMPERATURE * log_prob - value).mean()

    assert_gradient(loss, agent.actor, actor_reference)
    assert not any(module.training for module in agent.modules())


def test_renormalised_is_what_the_running_statistics_give():
    """(x − m) / s · r + d = (x − μ) / σ, where r and d are not clipped."""
    torch.manual_seed(0)
    layer = crossq.BatchRenorm(3)
    layer.batches.fill_(100_000)
    layer.mean.copy_(torch.tensor([0.5, -1.0, 0.0]))
    layer.var.copy_(torch.tensor([0.5, 1.0, 2.0]))
    x = torch.randn(64, 3)
    as_evaluated = layer.eval()(x)
    torch.testing.assert_close(layer.train()(x), as_evaluated)
