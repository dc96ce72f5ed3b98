"""The H-term of ddpg_hterm.py, td3_hterm.py and sac_hterm.py."""

import copy
import itertools
import math
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from torch import distributions, nn

from algos import ddpg_hterm, sac_hterm, td3_hterm, worker_learner
from algos.worker_learner import ReplayBuffer, UserError, flatten

OBS_DIM, ACT_DIM, LENGTH, COUNT, SIGMA, DISCOUNT = 4, 2, 5, 7, 0.3, 0.9
OBS = gymnasium.spaces.Box(-np.inf, np.inf, (OBS_DIM,))
BOX = gymnasium.spaces.Box(np.float32([-2.0, 0.0]), np.float32([2.0, 1.0]))
SCRIPTS = [ddpg_hterm, td3_hterm, sac_hterm]


def make_agent(script, **options):
    """An agent and its target, which differ, in double precision."""
    torch.manual_seed(0)
    if script is not sac_hterm:
        options = {"exploration_noise": SIGMA, **options}
    options = {"hidden_size": 6, "num_envs": 2, "discount": DISCOUNT, **options}
    args = script.Args(hterm_length=LENGTH, reward_scale=3.0, **options)
    agent = script.Agent(OBS, BOX, args).double()
    agent.warm_up.fill_(False)
    target = copy.deepcopy(agent.critics if script is sac_hterm else agent)
    with torch.no_grad():
        if script is sac_hterm:
            agent.actor.log_temperature.fill_(-0.7)
        for parameter in target.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return agent, target, args


def random_windows():
    """As a buffer gives them: some end, and what follows then begins elsewhere."""
    generator = torch.Generator().manual_seed(2)

    def normal(*shape):
        return torch.randn(LENGTH, COUNT, *shape, dtype=torch.float64, generator=generator)

    done = torch.zeros(LENGTH, COUNT, dtype=torch.bool)
    for window, step in ((1, 0), (2, 2), (3, 2), (4, LENGTH - 1)):
        done[step, window] = True
    terminated = done.clone()
    terminated[:, 3] = False  # truncated
    windows = {"obs": normal(OBS_DIM), "next_obs": normal(OBS_DIM), "x": 0.5 * normal(ACT_DIM)}
    going_on = ~done[:-1]
    windows["obs"][1:][going_on] = windows["next_obs"][:-1][going_on]
    mask = torch.ones(LENGTH, COUNT, dtype=torch.float64)
    mask[1:] = (~done[:-1]).cumprod(0)
    return {
        **windows,
        "action": windows["x"].tanh(),
        "reward": normal(),
        "log_prob": normal() - 1,
        "terminated": terminated,
        "done": done,
        "mask": mask,
    }


def gradient_of(agent, term):
    """Of all the actor's parameters but the temperature, which must have none."""
    parameters = dict(agent.actor.named_parameters())
    found = torch.autograd.grad(term, list(parameters.values()), allow_unused=True)
    found = dict(zip(parameters, found, strict=True))
    assert found.pop("log_temperature", None) is None
    return torch.cat([gradient.flatten() for gradient in found.values()]).numpy()


# The reference: numpy, one window and one step at a time.


def numpy_mlp(parameters, x):
    w1, b1, w2, b2, w3, b3 = parameters  # weights (out, in)
    x = np.maximum(w1 @ x + b1, 0)
    x = np.maximum(w2 @ x + b2, 0)
    return w3 @ x + b3


def arrays(network):
    named = network.named_parameters()
    return [p.detach().numpy().copy() for name, p in named if name != "log_temperature"]


def numpy_values(script, parameters, obs, action):
    x = np.concatenate((obs, action))
    if script is ddpg_hterm:
        return numpy_mlp(parameters, x)
    members = [
        [array[i].T if n % 2 == 0 else array[i][0]
         for n, array in enumerate(parameters)]
        for i in range(2)
    ]  # fmt: skip
    return np.concatenate([numpy_mlp(member, x) for member in members])


def numpy_policy(script, actor, obs):
    """Mean and standard deviation of x."""
    output = numpy_mlp(actor, obs)
    if script is sac_hterm:
        return output[:ACT_DIM], np.exp(np.clip(output[ACT_DIM:], -20, 2))
    return np.tanh(output), SIGMA


def numpy_log_prob(script, actor, obs, x):
    mean, std = numpy_policy(script, actor, obs)
    return np.log(np.exp(-0.5 * ((x - mean) / std) ** 2) / (std * np.sqrt(2 * np.pi))).sum()


def numpy_g(script, actor, critics, target_actor, windows, noise, temperature):
    """g_i and w_i of every window (K, L), both 0 after its end."""
    g, w = np.zeros((LENGTH, COUNT)), np.zeros((LENGTH, COUNT))

    def value(obs, noise):
        if script is not sac_hterm:
            return numpy_values(script, critics, obs, np.tanh(numpy_mlp(target_actor, obs))).min()
        mean, std = numpy_policy(script, actor, obs)
        u = mean + std * noise
        slope = np.log(1 - np.tanh(u) ** 2).sum()
        entropy = slope - numpy_log_prob(script, actor, obs, u)
        return numpy_values(script, critics, obs, np.tanh(u)).min() + temperature * entropy

    for window in range(COUNT):
        chain = 0.0
        for j in range(LENGTH):
            obs, x = windows["obs"][j, window], windows["x"][j, window]
            after = windows["next_obs"][j, window]
            delta = 3 * windows["reward"][j, window] - value(obs, noise[j, window])
            if not windows["terminated"][j, window]:
                delta += DISCOUNT * value(after, noise[j + 1, window])
            log_prob = numpy_log_prob(script, actor, obs, x)
            if script is sac_hterm:
                delta -= temperature * (log_prob - np.log(1 - np.tanh(x) ** 2).sum())
            chain += log_prob - windows["log_prob"][j, window]
            w[j, window] = min(1, np.exp(chain))
            g[: j + 1, window] += DISCOUNT**j * w[j, window] * delta
            if windows["done"][j, window]:
                break
    return g, w


def numpy_term(script, actor, g, windows):
    total = 0.0
    for j, window in itertools.product(range(LENGTH), range(COUNT)):
        obs, x = windows["obs"][j, window], windows["x"][j, window]
        if script is sac_hterm:
            loss = -numpy_log_prob(script, actor, obs, x)
        else:
            loss = 0.5 * ((x - np.tanh(numpy_mlp(actor, obs))) ** 2).sum()
        total += windows["mask"][j, window] * g[j, window] * loss
    return total / windows["mask"].sum()


def slopes(function, parameters):
    """The gradient of function(parameters) by central differences, flat."""
    found = []
    for array in parameters:
        for index in np.ndindex(array.shape):
            kept, values = array[index], []
            for sign in (1, -1):
                array[index] = kept + sign * 1e-5
                values.append(function(parameters))
            array[index] = kept
            found.append((values[0] - values[1]) / 2e-5)
    return np.array(found)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_term_and_its_gradient(script):
    """δ, chain, centring, scale and loss, with ends of both kinds inside the windows."""
    agent, target, args = make_agent(script)
    agent.g_square.fill_(4.0)
    windows = random_windows()
    plain = {name: tensor.numpy() for name, tensor in windows.items()}
    torch.manual_seed(5)
    term, effective = script.hamiltonian_term(agent, target, windows, args)
    torch.manual_seed(5)
    noise = torch.randn(LENGTH + 1, COUNT, ACT_DIM, dtype=torch.float64).numpy()
    critics, target_actor = target, None
    if script is not sac_hterm:
        critics = target.critic if script is ddpg_hterm else target.critics
        target_actor = arrays(target.actor)
    actor = arrays(agent.actor)
    g, w = numpy_g(script, actor, arrays(critics), target_actor, plain, noise, math.exp(-0.7))
    mask = plain["mask"]
    assert mask.sum() == LENGTH * COUNT - 4 - 2 - 2
    if script is sac_hterm:
        g = g - w * (g * mask).sum() / w.sum()
    mean_square = 0.99 * 4 + 0.01 * (g**2 * mask).sum() / mask.sum()
    np.testing.assert_allclose(agent.g_square, mean_square)
    g = g / (np.sqrt(mean_square) + 1e-6)
    if script is not sac_hterm:
        assert (g < -1).any()
        g = np.maximum(g, -1)
    np.testing.assert_allclose(effective, w.sum() ** 2 / (w**2).sum())
    assert 2 < effective < 0.9 * mask.sum()

    def reference(parameters):
        return numpy_term(script, parameters, g, plain)

    np.testing.assert_allclose(term.item(), reference(actor), rtol=1e-7)
    gradient, expected = gradient_of(agent, term), slopes(reference, actor)
    np.testing.assert_allclose(gradient, expected, atol=1e-8)
    assert np.abs(expected).max() > 0.01


def test_the_energy_and_its_gradient():
    """Return to the window's or the episode's end less min Q, weight and loss, a step at a time."""
    agent, target, args = make_agent(sac_hterm, hterm="energy")
    agent.mean_energy.fill_(2.0)
    windows = random_windows()
    plain = {name: tensor.numpy() for name, tensor in windows.items()}
    torch.manual_seed(5)
    term, effective = sac_hterm.energy_term(agent, target, windows, args)
    torch.manual_seed(5)
    noise = torch.randn(LENGTH + 1, COUNT, ACT_DIM, dtype=torch.float64).numpy()
    actor, critics = arrays(agent.actor), arrays(target)

    def value(obs, noise):
        """min_i Q̄_i(s, ã) and − α log π(ã|s)"""
        mean, std = numpy_policy(sac_hterm, actor, obs)
        u = mean + std * noise
        log_prob = numpy_log_prob(sac_hterm, actor, obs, u) - np.log(1 - np.tanh(u) ** 2).sum()
        return numpy_values(sac_hterm, critics, obs, np.tanh(u)).min(), -math.exp(-0.7) * log_prob

    energy = np.zeros((LENGTH, COUNT))
    for i, window in itertools.product(range(LENGTH), range(COUNT)):
        if plain["mask"][i, window] == 0:
            continue
        total, discount, entropy = 0.0, 1.0, 0.0
        for j in range(i, LENGTH):
            total += discount * (3 * plain["reward"][j, window] + entropy)
            discount *= DISCOUNT
            if plain["terminated"][j, window]:
                break
            after, entropy = value(plain["next_obs"][j, window], noise[j + 1, window])
            if plain["done"][j, window] or j == LENGTH - 1:
                total += discount * (after + entropy)
                break
        energy[i, window] = max(0, total - value(plain["obs"][i, window], noise[i, window])[0])
    assert 5 < (energy > 0).sum() < plain["mask"].sum() - 5
    mean_energy = 0.99 * 2 + 0.01 * energy[energy > 0].mean()
    np.testing.assert_allclose(agent.mean_energy, mean_energy)
    weight = np.minimum(energy / (mean_energy + 1e-6), 3)
    assert (weight == 3).any()
    np.testing.assert_allclose(effective, weight.sum() ** 2 / (weight**2).sum())

    def reference(parameters):
        total = 0.0
        for i, window in itertools.product(range(LENGTH), range(COUNT)):
            mean = numpy_mlp(parameters, plain["obs"][i, window])[:ACT_DIM]
            distance = ((plain["action"][i, window] - np.tanh(mean)) ** 2).sum()
            total += 0.5 * weight[i, window] * distance
        return total / plain["mask"].sum()

    np.testing.assert_allclose(term.item(), reference(actor), rtol=1e-7)
    expected = slopes(reference, actor)
    np.testing.assert_allclose(gradient_of(agent, term), expected, atol=1e-8)
    assert np.abs(expected).max() > 0.01


def test_a_memory_that_is_beaten_adds_exactly_nothing():
    """No return above min Q: the actor moves as without windows, bit for bit, and Ē stays."""
    agent, target, args = make_agent(sac_hterm, hterm="energy")
    windows = random_windows()
    windows["reward"] -= 1000
    agent.mean_energy.fill_(2.0)
    other = copy.deepcopy(agent)
    term, effective = sac_hterm.energy_term(agent, target, windows, args)
    assert term.item() == 0 and effective.item() == 0 and agent.mean_energy.item() == 2
    steps = [actor_step(sac_hterm, x, t, 1.0) for x, t in ((agent, term), (other, None))]
    assert all(torch.equal(a, b) for a, b in zip(*steps, strict=True))


def test_the_chain_has_the_gradient_of_the_k_step_return():
    """Tabular, every trajectory enumerated: autograd of L_H = finite differences of −J_K."""
    rng = np.random.default_rng(0)
    states, actions, length = 3, 2, 3
    transition = rng.dirichlet(np.ones(states), size=(states, actions))
    end = rng.random((states, actions)) * 0.3  # probability of termination
    reward, value = rng.normal(size=(states, actions)), rng.normal(size=states)
    behaviour = torch.tensor(rng.normal(size=(states, actions))).log_softmax(1)
    start = np.array([0.5, 0.3, 0.2])

    def k_step_return(logits):
        """J_K = E_π[ Σ γ^j r_j + γ^K V(s_K) ] by dynamic programming."""
        policy = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        future = value
        for _ in range(length):
            q = reward + DISCOUNT * (1 - end) * (transition @ future)
            future = (policy * q).sum(1)
        return (start * future).sum()

    # all windows (s_0, a_0, d_0, ..., s_K); after a termination they go on but do not count
    steps = itertools.product(range(states), range(actions), (0, 1))
    windows = list(itertools.product(itertools.product(steps, repeat=length), range(states)))
    s = np.array([[step[0] for step in path] + [last] for path, last in windows]).T  # (K + 1, L)
    a = np.array([[step[1] for step in path] for path, _ in windows]).T
    d = np.array([[step[2] for step in path] for path, _ in windows]).T
    here, following = s[:-1], s[1:]
    chance = np.exp(behaviour.numpy())[here, a] * transition[here, a, following]
    chance *= np.where(d, end[here, a], 1 - end[here, a])
    probability = torch.tensor(start[s[0]] * chance.prod(0))
    assert abs(probability.sum() - 1) < 1e-12
    delta = torch.tensor(
        reward[here, a] + DISCOUNT * (1 - d) * value[following] - value[here]
    )  # (K, L)
    mask = torch.tensor(np.concatenate((np.ones_like(d[:1]), (1 - d).cumprod(0)[:-1])))
    logits = torch.tensor(rng.normal(size=(states, actions)), requires_grad=True)
    log_prob = logits.log_softmax(1)[here, a]
    log_ratio = (log_prob - behaviour[here, a]).detach()
    g, w = sac_hterm.chain_gradient(log_ratio, delta, mask, DISCOUNT, truncation=math.inf)
    assert w.max() > 1.5
    (-(probability * mask * g * log_prob).sum()).backward()
    expected = slopes(lambda arrays: -k_step_return(arrays[0]), [logits.detach().numpy().copy()])
    np.testing.assert_allclose(logits.grad.numpy().flatten(), expected, atol=1e-8)
    assert np.abs(expected).max() > 0.01
    # a baseline times w changes nothing
    logits.grad = None
    log_prob = logits.log_softmax(1)[here, a]
    (-(probability * mask * (g - 0.7 * w) * log_prob).sum()).backward()
    np.testing.assert_allclose(logits.grad.numpy().flatten(), expected, atol=1e-8)
    # and no ratio counts more than 1 by default
    _, w = sac_hterm.chain_gradient(log_ratio, delta, mask, DISCOUNT)
    torch.testing.assert_close(w, log_ratio.cumsum(0).exp().clamp(max=1))


def test_a_chain_of_one_is_the_td_policy_gradient():
    delta = torch.randn(1, 6)
    g, w = sac_hterm.chain_gradient(torch.zeros(1, 6), delta, torch.ones(1, 6), 0.9)
    assert torch.equal(g, delta) and torch.equal(w, torch.ones(1, 6))


@pytest.mark.parametrize(
    ("script", "form"), [*((script, {}) for script in SCRIPTS), (sac_hterm, {"hterm": "energy"})]
)
def test_nothing_after_an_episodes_end_reaches_the_term(script, form):
    results = []
    for spoilt in (False, True):
        agent, target, args = make_agent(script, **form)
        windows = random_windows()
        if spoilt:
            after = windows["mask"] == 0
            for name in ("obs", "next_obs", "x", "action", "reward", "log_prob"):
                windows[name][after] += 10 * torch.randn_like(windows[name][after])
            windows["terminated"][after] ^= True
        torch.manual_seed(5)
        term, effective = (script.energy_term if form else script.hamiltonian_term)(
            agent, target, windows, args
        )
        results.append((term.item(), effective.item(), gradient_of(agent, term)))
    for clean, spoilt in zip(*results, strict=True):
        np.testing.assert_allclose(spoilt, clean, rtol=1e-9, atol=1e-12)


def actor_step(script, agent, term, coef, max_grad_norm=0.0):
    """gradient_step by the sum of some gradient and the term's -> the gradient, the weights."""
    optimizer = torch.optim.Adam([flatten(agent.actor)], 1e-2, fused=True)
    gradient = 2 * nn.utils.parameters_to_vector(agent.actor.parameters()).detach()
    if term is not None:
        parts = torch.autograd.grad(term, list(agent.actor.parameters()), materialize_grads=True)
        gradient = script.add_capped(gradient, nn.utils.parameters_to_vector(parts), coef)
    script.gradient_step(gradient, optimizer, max_grad_norm)
    (weights,) = optimizer.param_groups[0]["params"]
    return weights.grad.clone(), weights.detach().clone()


@pytest.mark.parametrize("script", SCRIPTS)
def test_nothing_unexpected_adds_exactly_nothing(script, monkeypatch):
    """TD errors of zero: the actor moves as without windows, bit for bit."""

    def zero(*arguments):
        return torch.zeros_like(arguments[-2 if script is not sac_hterm else -3]["reward"])

    monkeypatch.setattr(script, "window_delta", zero)
    agent, target, args = make_agent(script)
    other = copy.deepcopy(agent)
    term, _ = script.hamiltonian_term(agent, target, random_windows(), args)
    assert term.item() == 0
    with_term, without = actor_step(script, agent, term, 1.0), actor_step(script, other, None, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(with_term, without, strict=True))


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_terms_gradient_is_capped(script):
    """λ as given where λ ‖∇L_H‖ is small, else so that it is ¼ ‖∇L‖; before shortening."""
    base = actor_step(script, make_agent(script)[0], None, 1.0)[0]
    first = 1 if script is sac_hterm else 0  # the temperature, which the term must not touch
    for coef in (1e-3, 1e3):
        agent, target, args = make_agent(script)
        torch.manual_seed(5)
        term, _ = script.hamiltonian_term(agent, target, random_windows(), args)
        own = torch.tensor(gradient_of(agent, term))
        torch.manual_seed(5)
        agent, target, args = make_agent(script)
        torch.manual_seed(5)
        term, _ = script.hamiltonian_term(agent, target, random_windows(), args)
        added = actor_step(script, agent, term, coef)[0] - base
        assert (added[:first] == 0).all()
        allowed = min(coef, 0.25 * base[first:].norm().item() / own.norm().item())
        assert (allowed == coef) == (coef < 1)
        torch.testing.assert_close(added[first:], allowed * own, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_update_adds_the_term_to_the_base(script):
    """Of TD3 and DDPG in units of mean|Q|: ∇L / mean|Q| + λ ∇L_H."""
    agent, target, args = make_agent(script, max_grad_norm=0.0)
    networks = agent.critic if script is ddpg_hterm else agent.critics, agent.actor
    optimizers = [torch.optim.SGD([flatten(network)], 0.0) for network in networks]
    (weights,) = optimizers[1].param_groups[0]["params"]
    zero, base = torch.zeros(()), torch.randn_like(weights.detach())
    term, error, number = torch.randn_like(base), torch.zeros(3), (0,) * (script is td3_hterm)
    gradients = (
        lambda *_: (torch.zeros_like(optimizers[0].param_groups[0]["params"][0]), zero, error),
        lambda *_: (base, zero, zero, error) if script is sac_hterm else (base, zero),
        lambda *_: (term, zero, zero),
    )
    batch = {name: x[0] for name, x in random_windows().items()}
    args = *number, args, {}, 0.01
    script.update(agent, target, optimizers, batch, gradients, *args)
    if script is ddpg_hterm:
        scale = agent.value(batch["obs"], batch["action"]).abs().mean()
    else:
        scale = agent.critics(batch["obs"], batch["action"])[0].abs().mean()
    expected = base / (1 if script is sac_hterm else scale.detach()) + 0.01 * term
    torch.testing.assert_close(weights.grad, expected)


def rollout_of(script, agent, horizon, num_envs, warm_up=False):
    """What `collect` leaves: episodes end at every fifth step, by termination in even envs."""
    agent.warm_up.fill_(warm_up)
    envs = SimpleNamespace(obs=torch.randn(num_envs, OBS_DIM), time=0)

    def step(action):
        envs.time += 1
        envs.action, final = action, torch.randn(num_envs, OBS_DIM)
        ended = torch.full((num_envs,), envs.time % 5 == 0)
        terminated = ended & (torch.arange(num_envs) % 2 == 0)
        envs.obs = torch.where(ended.unsqueeze(1), torch.randn_like(final), final)
        zero = torch.zeros(num_envs)
        info = {"final_obs": final, "episode_return": zero, "episode_length": zero.long()}
        return envs.obs, torch.randn(num_envs), terminated, ended & ~terminated, info

    envs.step = step
    shapes = {"obs": (OBS_DIM,), "next_obs": (OBS_DIM,), "reward": (), "log_prob": ()}
    shapes |= dict.fromkeys(("action", "x", "noise"), (ACT_DIM,)) | {"episode_return": ()}
    rollout = {name: torch.zeros(horizon, num_envs, *shape) for name, shape in shapes.items()}
    for name in ("terminated", "done"):
        rollout[name] = torch.zeros(horizon, num_envs, dtype=torch.bool)
    rollout["episode_length"] = torch.zeros(horizon, num_envs, dtype=torch.int64)
    script.collect(agent, envs, rollout)
    return rollout


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("warm_up", [False, True])
def test_x_and_its_density_are_stored(script, warm_up):
    """Against torch.distributions, in x-space, where the policy is a Gaussian."""
    agent, _, _ = make_agent(script, num_envs=300)
    rollout = rollout_of(script, agent.float(), 20, 300, warm_up)
    x, action, obs = rollout["x"], rollout["action"], rollout["obs"]
    if script is sac_hterm:
        torch.testing.assert_close(x.tanh(), action, atol=2e-6, rtol=0)
        mean, log_std = agent.actor(obs).chunk(2, -1)
        policy = distributions.Normal(mean, log_std.exp())
        uniform = distributions.Uniform(-1 - 1e-9, 1)
        to_x = distributions.transforms.TanhTransform().inv
        uniform = distributions.TransformedDistribution(uniform, [to_x])
    else:
        torch.testing.assert_close(x.clamp(-1, 1), action)
        assert warm_up or (x.abs() > 1).any()
        policy = distributions.Normal(agent.act(obs), SIGMA)
        uniform = distributions.Uniform(-1, 1 + 1e-6)
    expected = (uniform if warm_up else policy).log_prob(x.detach()).sum(-1)
    assert abs(action.std() - 3**-0.5) < 0.02 or not warm_up
    torch.testing.assert_close(rollout["log_prob"], expected, atol=2e-4, rtol=1e-4)
    if not warm_up:  # so that the policy's ratio to itself is 1
        if script is sac_hterm:
            again = agent.log_prob(obs, x)
        else:
            again = agent.log_prob(x - agent.act(obs))
        torch.testing.assert_close(again, rollout["log_prob"], atol=1e-4, rtol=1e-4)


def test_noise_that_is_carried_over_is_no_part_of_x():
    agent, _, _ = make_agent(ddpg_hterm, noise="ou", noise_decay=0.25, num_envs=3)
    rollout = rollout_of(ddpg_hterm, agent.float(), 4, 3)
    expected = rollout["x"][1:] + 0.75 * rollout["noise"][:-1]
    torch.testing.assert_close(rollout["action"][1:], expected.clamp(-1, 1))


@pytest.mark.parametrize("script", SCRIPTS)
def test_on_policy_from_collection_to_the_term(script):
    """Windows out of a real buffer, of the present policy: all ratios are 1, nothing is lost."""
    agent, target, args = make_agent(script, num_envs=6, batch_size=200)
    agent, target = agent.float(), target.float()
    rollout = rollout_of(script, agent, 25, 6)
    rollout.pop("noise")
    run = SimpleNamespace(device=torch.device("cpu"), args=SimpleNamespace(save_replay=True))
    replay = ReplayBuffer(run, rollout, 150)
    replay.add(rollout)
    windows = replay.windows(40, LENGTH)
    assert windows["x"].shape == (LENGTH, 40, ACT_DIM)
    going_on = windows["mask"][1:].bool()
    followers = windows["next_obs"][:-1][going_on], windows["obs"][1:][going_on]
    assert torch.equal(*followers) and not going_on.all()
    term, effective = script.hamiltonian_term(agent, target, windows, args)
    assert term.isfinite()
    torch.testing.assert_close(effective, windows["mask"].sum(), rtol=1e-3, atol=0)
    for row in replay.windows(40, LENGTH, 6 * LENGTH)["index"].T // 6:
        assert row.tolist() == list(range(20, 25))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_step_along_the_term_makes_what_went_well_likelier(script):
    """One state, two actions, of which one pays."""
    agent, target, args = make_agent(script)
    windows = random_windows()
    for name in ("obs", "next_obs"):
        windows[name][:] = windows["obs"][0, 0].clone()
    good = torch.arange(COUNT) % 2 == 0
    windows["x"][:] = torch.where(good, 0.5, -0.5).unsqueeze(-1)
    windows["reward"][:] = torch.where(good, 100.0, -100.0)
    windows["log_prob"].fill_(-30.0)  # both were rare: no ratio is small

    def preference():
        obs = windows["obs"][0, :1]
        mean = agent.actor(obs)[:, :ACT_DIM] if script is sac_hterm else agent.act(obs)
        return mean.sum().item()

    before = preference()
    for _ in range(3):
        term, _ = script.hamiltonian_term(agent, target, windows, args)
        agent.zero_grad()
        term.backward(inputs=list(agent.actor.parameters()))
        with torch.no_grad():
            for parameter in agent.actor.parameters():
                if parameter.grad is not None:
                    parameter -= 1e-3 * parameter.grad
    assert preference() > before + 1e-4


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_ratios_are_not_in_bfloat16(script, monkeypatch, tmp_path):
    """b(x|s) is stored exactly: beside a rounded π(x|s) a ratio would not be 1 where π is b."""
    asked = {}

    def gradient_of(loss_function, network, bf16):
        asked[loss_function.__name__] = bf16
        return original(loss_function, network)

    original = worker_learner.gradient_of
    monkeypatch.setattr(worker_learner, "gradient_of", gradient_of)
    monkeypatch.setattr(worker_learner, "_multiplies_bf16", lambda device: True)
    options = {"num_envs": 2, "total_steps": 20, "warmup_steps": 16, "eval_every": 0, "bf16": True}
    script.train(script.Args(env="Pendulum", **options, run_dir=str(tmp_path / "run")))
    assert asked.pop("hamiltonian_term") is False and len(asked) == 2 and all(asked.values())


def test_what_train_makes_of_the_form(tmp_path, monkeypatch):
    """λ falls for the chain only, and only the chain needs the behaviour's density."""
    asked, coefs, kept = [], [], []

    class Spy(ReplayBuffer):
        def __init__(self, run, rollout, *rest, **options):
            kept.append(rollout.keys())
            super().__init__(run, rollout, *rest, **options)

        def windows(self, *given):
            asked.append(given)
            return super().windows(*given)

    def add_capped(base, term, coef, original=sac_hterm.add_capped):
        coefs.append(coef)
        return original(base, term, coef)

    monkeypatch.setattr(sac_hterm, "ReplayBuffer", Spy)
    monkeypatch.setattr(sac_hterm, "add_capped", add_capped)
    options = {"num_envs": 2, "total_steps": 100, "warmup_steps": 60, "hterm_newest": 20}
    options |= {"env": "Pendulum", "eval_every": 0, "hidden_size": 8, "batch_size": 32}
    for form in ("chain", "energy"):
        sac_hterm.train(sac_hterm.Args(**options, hterm=form, run_dir=str(tmp_path / form)))
        assert asked == [(4, 8, 20)] * 42
        fractions = [coef / 0.125 for coef in coefs]
        falling = fractions == sorted(fractions, reverse=True) and abs(fractions[-1] - 0.02) < 1e-9
        assert falling if form == "chain" else fractions == [1] * 42
        asked.clear(), coefs.clear()
    assert kept[0] - kept[1] == {"x", "log_prob"} and "action" in kept[1]


@pytest.mark.parametrize("script", SCRIPTS)
def test_windows_that_cannot_be(script, tmp_path):
    for name in ("buffer_size", "hterm_newest", "warmup_steps"):
        flag = "--" + name.replace("_", "-")
        options = {"num_envs": 2, name: 15, "run_dir": str(tmp_path / "run")}
        with pytest.raises(UserError, match=rf"{flag} is 15; allowed is at least 16,") as error:
            script.train(script.Args(env="Pendulum", **options))
        assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="--buffer-size is 60; allowed is at least 64"):
        script.check_windows(script.Args(num_envs=2, buffer_size=60), learners=4)
