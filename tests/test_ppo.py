"""The mathematics of a2c.py and ppo.py against references written out independently."""

import copy

import gymnasium
import numpy as np
import pytest
import torch

from algos import a2c, ppo

BOX = gymnasium.spaces.Box(-2.0, 2.0, (3,))
OBS = gymnasium.spaces.Box(-np.inf, np.inf, (5,))


def make_agent(module=ppo, action_space=BOX, **options):
    torch.manual_seed(0)
    args = module.Args(hidden_size=7, num_envs=4, **options)
    agent = module.Agent(OBS, action_space, args).double()
    with torch.no_grad():  # away from the special values of initialisation
        for parameter in agent.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return agent, args


def gradient(agent, loss):
    agent.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in agent.parameters()])


def random_batch(agent, size=12, discrete=False):
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    action = torch.randint(3, (size,), generator=generator) if discrete else normal(size, 3)
    return {
        "obs": normal(size, 5),
        "action": action,
        "log_prob": -3 + 0.5 * normal(size),
        "advantage": normal(size),
        "returns": normal(size),
    }


def random_rollout(steps=6, envs=4):
    shape, double = (steps, envs), {"dtype": torch.float64}
    rollout = {name: 3 + torch.randn(*shape, 5, **double) for name in ("obs", "next_obs")}
    rollout |= {"action": torch.randn(*shape, 3, **double), "reward": torch.randn(shape, **double)}
    return rollout | {name: torch.rand(shape) < 0.2 for name in ("terminated", "done")}


def test_gae_against_the_sum_it_abbreviates():
    """Â_t = Σ_l (γλ)^l δ_{t+l} up to the first end of an episode, in plain Python."""
    rng = np.random.default_rng(0)
    steps, envs = 17, 6
    reward, value, next_value = rng.normal(size=(3, steps, envs))
    terminated = rng.random((steps, envs)) < 0.15
    truncated = rng.random((steps, envs)) < 0.15
    done = terminated | truncated
    args = ppo.Args(gamma=0.9, gae_lambda=0.8)
    expected = np.zeros((steps, envs))
    for env in range(envs):
        for t in range(steps):
            weight = 1.0
            for k in range(t, steps):
                bootstrap = 0.0 if terminated[k, env] else 0.9 * next_value[k, env]
                expected[t, env] += weight * (reward[k, env] + bootstrap - value[k, env])
                weight *= 0.9 * 0.8
                if done[k, env]:
                    break
    tensors = [torch.tensor(x) for x in (reward, value, next_value, terminated, done)]
    for module in (ppo, a2c):
        np.testing.assert_allclose(module.gae(*tensors, args).numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("module", [ppo, a2c])
@pytest.mark.parametrize("discrete", [False, True])
def test_log_prob_and_entropy_written_out(module, discrete):
    """log π(a|s) sums over the dimensions of an action, and so does the entropy."""
    agent, _ = make_agent(module, gymnasium.spaces.Discrete(3) if discrete else BOX)
    batch = random_batch(agent, discrete=discrete)
    output, action = agent.actor(batch["obs"]).detach().numpy(), batch["action"].numpy()
    if discrete:
        probability = np.exp(output) / np.exp(output).sum(1, keepdims=True)
        log_prob = np.log(probability[np.arange(len(action)), action])
        entropy = -(probability * np.log(probability)).sum(1)
    else:
        std = np.exp(agent.log_std.detach().numpy())
        density = np.exp(-0.5 * ((action - output) / std) ** 2) / (std * np.sqrt(2 * np.pi))
        log_prob = np.log(density).sum(1)
        entropy = np.full(len(action), np.log(std * np.sqrt(2 * np.pi * np.e)).sum())
    policy = agent.policy(batch["obs"])
    np.testing.assert_allclose(policy.log_prob(batch["action"]).detach().numpy(), log_prob)
    np.testing.assert_allclose(policy.entropy().detach().numpy(), entropy)


def test_sampling_follows_the_distribution():
    agent, _ = make_agent(action_space=gymnasium.spaces.Discrete(3))
    obs = torch.randn(1, 5, dtype=torch.float64)
    probabilities = agent.actor(agent.normalizer(obs)).softmax(-1).squeeze(0)
    draws = agent.policy(agent.normalizer(obs.expand(40_000, 5))).sample()
    frequencies = torch.bincount(draws, minlength=3) / 40_000
    assert (frequencies - probabilities).abs().max() < 0.015  # 6 standard errors
    assert agent(obs).item() == probabilities.argmax()

    agent, _ = make_agent()
    draws = agent.policy(agent.normalizer(obs.expand(40_000, 5))).sample()
    mean = agent.actor(agent.normalizer(obs)).squeeze(0)
    assert ((draws.mean(0) - mean) / agent.log_std.exp()).abs().max() < 0.03
    assert (draws.std(0) / agent.log_std.exp() - 1).abs().max() < 0.03


def numpy_ppo_loss(weights, batch, args):
    """PPO's loss once more, in numpy and float64, from nothing but the flat weights."""
    x, action, old_log_prob, advantage, returns = batch
    shapes = [(3,), (7, 5), (7,), (7, 7), (7,), (3, 7), (3,), (7, 5), (7,), (7, 7), (7,), (1, 7)]
    shapes.append((1,))
    parts, start = [], 0
    for shape in shapes:
        size = int(np.prod(shape))
        parts.append(weights[start : start + size].reshape(shape))
        start += size
    assert start == len(weights)
    log_std, w1, b1, w2, b2, w3, b3, v1, c1, v2, c2, v3, c3 = parts

    mean = np.tanh(np.tanh(x @ w1.T + b1) @ w2.T + b2) @ w3.T + b3
    value = (np.tanh(np.tanh(x @ v1.T + c1) @ v2.T + c2) @ v3.T + c3)[:, 0]
    density = np.exp(-0.5 * ((action - mean) / np.exp(log_std)) ** 2) / (
        np.exp(log_std) * np.sqrt(2 * np.pi)
    )
    ratio = np.prod(density, 1) / np.exp(old_log_prob)
    normalized = (advantage - advantage.mean()) / (advantage.std(ddof=1) + 1e-8)
    surrogate = np.where(
        normalized > 0,
        np.minimum(ratio, 1 + args.clip) * normalized,
        np.maximum(ratio, 1 - args.clip) * normalized,
    )
    error = (value - returns) ** 2
    entropy = np.sum(log_std + 0.5 * np.log(2 * np.pi * np.e))
    return -surrogate.mean() + args.value_coef * 0.5 * error.mean() - args.entropy_coef * entropy


def test_gradient_of_the_loss():
    agent, args = make_agent(entropy_coef=0.03, value_coef=0.7, clip=0.3)
    batch = random_batch(agent)
    loss, losses = ppo.ppo_loss(agent, batch, args)
    slopes = gradient(agent, loss).numpy()
    log_ratio = agent.policy(batch["obs"]).log_prob(batch["action"]) - batch["log_prob"]
    ratio = log_ratio.detach().exp().numpy()
    assert losses["approx_kl"].item() == pytest.approx((ratio - 1 - np.log(ratio)).mean())
    outside = (ratio < 0.7) | (ratio > 1.3)
    assert losses["clip_fraction"].item() == pytest.approx(outside.mean())
    assert 0 < outside.mean() < 1
    names = [name for name, _ in agent.named_parameters()]
    assert names[0] == "log_std" and names[1].startswith("actor") and names[7].startswith("critic")
    weights = torch.cat([p.detach().flatten() for p in agent.parameters()]).numpy()
    names = ("obs", "action", "log_prob", "advantage", "returns")
    arrays = [batch[name].numpy() for name in names]
    np.testing.assert_allclose(loss.item(), numpy_ppo_loss(weights, arrays, args), rtol=1e-12)
    step = 1e-6
    for index in range(len(weights)):
        above, below = weights.copy(), weights.copy()
        above[index] += step
        below[index] -= step
        slope = numpy_ppo_loss(above, arrays, args) - numpy_ppo_loss(below, arrays, args)
        np.testing.assert_allclose(slopes[index], slope / (2 * step), atol=2e-8)


def test_a2c_gradient_is_ppos_before_the_first_step():
    """At θ = θ_old the ratio is 1 and PPO's gradient is the policy gradient."""
    agent, args = make_agent(entropy_coef=0.01)
    batch = random_batch(agent)
    advantage = batch["advantage"]  # which PPO normalises and A2C takes as it is
    batch["advantage"] = (advantage - advantage.mean()) / advantage.std()
    batch["log_prob"] = agent.policy(batch["obs"]).log_prob(batch["action"]).detach()
    ours = gradient(agent, a2c.a2c_loss(agent, batch, args)[0])
    torch.testing.assert_close(ours, gradient(agent, ppo.ppo_loss(agent, batch, args)[0]))


def test_clip_stops_the_gradient_on_one_side_only():
    for log_ratio, advantage, flows in (
        (0.5, 1.0, False),
        (0.5, -1.0, True),
        (-0.5, 1.0, True),
        (-0.5, -1.0, False),
    ):
        x = torch.tensor([log_ratio], requires_grad=True)
        ppo.policy_loss(x, torch.tensor([advantage]), 0.2).backward()
        assert (x.grad.item() != 0) == flows


def test_normalizer_holds_the_statistics_of_all_it_saw():
    normalizer = ppo.Normalizer(3).double()
    batches = [torch.randn(n, 3, dtype=torch.float64) * 5 + 100 for n in (2, 50, 1, 333)]
    for batch in batches:
        normalizer.update(batch)
    everything = torch.cat(batches)
    torch.testing.assert_close(normalizer.mean, everything.mean(0))
    torch.testing.assert_close(normalizer.var, everything.var(0, correction=0))
    x = normalizer(everything)
    torch.testing.assert_close(x.mean(0), torch.zeros(3, dtype=torch.float64), atol=1e-6, rtol=0)


def test_normalised_numbers_are_within_ten():
    agent = ppo.Agent(gymnasium.spaces.Box(-np.inf, np.inf, (2,)), BOX, ppo.Args(num_envs=1))
    x = torch.tensor([[1e6, -1e6]])
    assert agent.normalizer(x).tolist() == agent.reward_scaler.scale(x).tolist() == [[10, -10]]


def test_reward_scaler_against_a_loop():
    rng = np.random.default_rng(0)
    scaler = ppo.RewardScaler(2, gamma=0.9).double()
    running, seen = np.zeros(2), []
    for _ in range(3):  # three rollouts: returns go on from one to the next
        reward, done = rng.normal(size=(5, 2)) * 50, rng.random((5, 2)) < 0.3
        scaled = scaler(torch.tensor(reward), torch.tensor(done)).numpy()
        for t in range(5):
            running = running * 0.9 + reward[t]
            seen.append(running.copy())
            running = np.where(done[t], 0, running)
        np.testing.assert_allclose(scaled, np.clip(reward / np.std(seen), -10, 10), rtol=1e-6)
    before = {name: x.clone() for name, x in scaler.state_dict().items()}
    again = scaler.scale(torch.tensor(reward))  # the same, and nothing is taken in
    np.testing.assert_array_equal(again.numpy(), scaled)
    assert all(torch.equal(x, before[name]) for name, x in scaler.state_dict().items())


def test_learning_rate_adapts_to_the_kl():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer, args = torch.optim.Adam([weight]), ppo.Args(target_kl=0.01)
    for before, kl, after in (
        *((1e-3, 0.1, 1e-3 / 1.5), (1e-3, 0.001, 1.5e-3), (1e-3, 0.01, 1e-3)),
        *((1.2e-6, 0.1, 1e-6), (9e-3, 0.001, 1e-2)),  # its bounds
    ):
        optimizer.param_groups[0]["lr"] = before
        ppo.adapt_learning_rate(optimizer, torch.tensor(kl), args)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(after)


class Recorder(torch.optim.SGD):
    """Remembers the learning rate of each step."""

    def __init__(self, *inputs):
        super().__init__(*inputs)
        self.rates = []

    def step(self):
        self.rates.append(self.param_groups[0]["lr"])
        super().step()


def test_the_learning_rate_changes_once_an_epoch_not_at_each_minibatch():
    """4 minibatches an epoch; any policy has moved too far for such a target."""
    options = {"epochs": 3, "minibatch_size": 6}
    agent, args = make_agent(target_kl=1e-9, **options)
    optimizer = Recorder(agent.parameters(), 0.01)
    ppo.update(agent, optimizer, random_rollout(), ppo.gradient_step, args)
    expected = [0.01] * 4 + [0.01 / 1.5] * 4 + [0.01 / 2.25] * 4
    np.testing.assert_allclose(optimizer.rates, expected)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 / 1.5**3)


def update(module, agent, optimizer, rollout, args):
    learn = () if module is a2c else (module.gradient_step,)
    return module.update(agent, optimizer, rollout, *learn, args)


@pytest.mark.parametrize("module", [ppo, a2c])
def test_what_an_update_logs(module, monkeypatch):
    """The explained variance is of the old values; the rest is the mean over the minibatches."""
    agent, args = make_agent(module)
    rollout, other = random_rollout(), copy.deepcopy(agent)
    batch = module.prepare(other, rollout, args)
    value, returns = other.value(batch["obs"]).detach().numpy(), batch["returns"].numpy()
    seen = []

    name = f"{module.__name__.split('.')[1]}_loss"
    original = getattr(module, name)

    def loss_function(*inputs):
        loss, losses = original(*inputs)
        seen.append({name: x.item() for name, x in losses.items()})
        return loss, losses

    monkeypatch.setattr(module, name, loss_function)
    logged = update(module, agent, Recorder(agent.parameters(), 0.01), rollout, args)
    explained = 1 - np.var(returns - value) / np.var(returns)
    assert logged["explained_variance"].item() == pytest.approx(explained)
    assert len(seen) == (1 if module is a2c else args.epochs)
    for name in seen[0]:
        assert logged[name].item() == pytest.approx(np.mean([x[name] for x in seen])), name
    more = {"approx_kl", "clip_fraction"} if module is ppo else set()
    assert logged.keys() - more == {
        *{"policy", "value", "entropy", "grad_norm", "explained_variance"}
    }
    assert all(logged[name] > 0 for name in more - {"clip_fraction"})


@pytest.mark.parametrize("module", [ppo, a2c])
def test_returns_that_are_all_alike_log_no_infinity(module):
    """`run.log` would stop the training."""
    agent, args = make_agent(module, gamma=0.0)
    rollout = random_rollout()
    rollout["reward"].zero_()
    optimizer = Recorder(agent.parameters(), 0.01)
    logged = update(module, agent, optimizer, rollout, args)
    assert all(x.isfinite() for x in logged.values())


def test_each_epoch_has_every_transition_once_in_an_order_of_its_own():
    agent, args = make_agent(epochs=2, minibatch_size=6)
    seen = []

    def learn(agent, optimizer, batch, args):
        seen.append(batch["advantage"])
        return ppo.gradient_step(agent, optimizer, batch, args)

    ppo.update(agent, Recorder(agent.parameters(), 0.01), random_rollout(), learn, args)
    first, second = torch.cat(seen[:4]), torch.cat(seen[4:])
    assert torch.equal(first.sort().values, second.sort().values) and len(first) == 24
    assert not torch.equal(first, second)


@pytest.mark.parametrize("module", [ppo, a2c])
def test_the_first_policy_hardly_depends_on_the_observation(module):
    """Orthogonal weights, the actor's last layer near zero."""
    agent = module.Agent(OBS, BOX, module.Args(num_envs=1))
    for network, gain in ((agent.actor, 0.01), (agent.critic, 1.0)):
        weight = network[-1].weight.double()
        torch.testing.assert_close(weight @ weight.T, gain**2 * torch.eye(len(weight)).double())
        assert not network[-1].bias.any()


def test_actions_are_rescaled_and_clipped_for_the_environment():
    space = gymnasium.spaces.Box(np.float32([-1.0, 0.0]), np.float32([3.0, 0.5]))
    agent = ppo.Agent(OBS, space, ppo.Args(num_envs=1))
    action = torch.tensor([[0.0, 0.0], [-1.0, 1.0], [-9.0, 9.0], [0.5, -0.5]])
    expected = [[1.0, 0.25], [-1.0, 0.5], [-1.0, 0.5], [2.0, 0.125]]
    torch.testing.assert_close(agent.to_env(action), torch.tensor(expected))


def test_returns_bootstrap_from_the_true_last_observation():
    """A truncated episode's return sees V(s') of its own s', not of the reset's observation."""
    args = ppo.Args(num_envs=1, num_steps=2, gamma=0.5, gae_lambda=1.0)
    agent = ppo.Agent(OBS, BOX, args)
    obs = torch.randn(2, 1, 5)
    next_obs = torch.randn(2, 1, 5)
    agent.normalizer.update(3 + 2 * torch.randn(50, 5))
    rollout = {
        "obs": obs,
        "next_obs": next_obs,
        "action": torch.zeros(2, 1, 3),
        "reward": torch.tensor([[1.0], [1.0]]),
        "terminated": torch.tensor([[False], [True]]),
        "done": torch.tensor([[True], [True]]),
    }
    batch = ppo.prepare(agent, rollout, args)
    assert agent.reward_scaler.statistics.mean == 1  # a truncated episode's return ends, too
    scale = torch.rsqrt(agent.reward_scaler.statistics.var + 1e-8)
    scaled = (rollout["reward"].flatten() * scale).clamp(-10, 10)
    value = agent.value(agent.normalizer(next_obs))[0, 0]
    torch.testing.assert_close(batch["returns"], scaled + torch.stack((0.5 * value, 0 * value)))


@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
@pytest.mark.parametrize("module", [a2c, ppo])
def test_an_update_is_a_step_down_the_shortened_gradient(module, max_norm):
    """Of all transitions, as the old normaliser sees them; what it saw counts afterwards."""
    options = {} if module is a2c else {"epochs": 1, "minibatch_size": 24}
    agent, args = make_agent(module, max_grad_norm=max_norm, **options)
    rollout, other = random_rollout(), copy.deepcopy(agent)
    loss = module.a2c_loss if module is a2c else module.ppo_loss
    expected = gradient(other, loss(other, module.prepare(other, rollout, args), args)[0])
    before = torch.cat([p.detach().flatten() for p in agent.parameters()])
    optimizer = torch.optim.SGD(agent.parameters(), 0.1)
    logged = update(module, agent, optimizer, rollout, args)
    assert logged["grad_norm"].item() == pytest.approx(expected.norm().item())
    step = 0.1 * expected * min(1, max_norm / expected.norm().item())
    after = torch.cat([p.detach().flatten() for p in agent.parameters()])
    torch.testing.assert_close(before - after, step, rtol=1e-3, atol=1e-12)
    torch.testing.assert_close(agent.normalizer.mean, rollout["obs"].flatten(0, 1).mean(0))


def test_who_has_left_does_not_count_in_the_statistics():
    """Nor do zeros of an agent that was never there: its numbers stay as they are."""
    x = 5 + 2 * torch.randn(50, 4, 3, 2)  # (T, N, A, obs_dim)
    x[40:] += 20
    alive = torch.rand(50, 4, 3) < torch.tensor([1.0, 0.5, 0.0])
    alive[40:, :, 1] &= torch.rand(10, 4) < 0.2  # the last ones weigh less: fewer are there
    normalizer = ppo.Normalizer(6, several=True)
    for part in ((0, 40), (40, 45), (45, 50)):
        seen = (x * alive.unsqueeze(-1)).flatten(-2)[slice(*part)]
        normalizer.update(seen, alive[slice(*part)])
    for i in (0, 1):
        living = x[:, :, i][alive[:, :, i]]
        torch.testing.assert_close(normalizer.mean[2 * i : 2 * i + 2], living.mean(0))
        torch.testing.assert_close(normalizer.var[2 * i : 2 * i + 2], living.var(0, correction=0))
    assert normalizer.mean[4:].tolist() == [0, 0] and normalizer.var[4:].tolist() == [1, 1]
    everybody = ppo.Normalizer(6, several=True)
    everybody.update(x.flatten(-2), torch.ones_like(alive))
    plain = ppo.Normalizer(6)
    plain.update(x.flatten(-2))
    torch.testing.assert_close(everybody.mean, plain.mean)
    torch.testing.assert_close(everybody.var, plain.var)
