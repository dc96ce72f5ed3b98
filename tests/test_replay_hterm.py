"""The H-term of ddpg_hterm.py, td3_hterm.py and sac_hterm.py."""

import copy
import itertools
import math
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from torch import distributions

from algos import ddpg, ddpg_hterm, sac, sac_hterm, td3, td3_hterm
from algos.worker_learner import ReplayBuffer

OBS_DIM, ACT_DIM, LENGTH, COUNT, SIGMA, GAMMA = 4, 2, 5, 7, 0.3, 0.9
OBS = gymnasium.spaces.Box(-np.inf, np.inf, (OBS_DIM,))
BOX = gymnasium.spaces.Box(np.float32([-2.0, 0.0]), np.float32([2.0, 1.0]))
SCRIPTS = [ddpg_hterm, td3_hterm, sac_hterm]


def make_agent(script, **options):
    """An agent and its target, which differ, in double precision."""
    torch.manual_seed(0)
    if script is not sac_hterm:
        options = {"exploration_noise": SIGMA, **options}
    options = {"hidden_size": 6, "num_envs": 2, "gamma": GAMMA, **options}
    args = script.Args(hterm_length=LENGTH, **options)
    agent = script.Agent(OBS, BOX, args).double()
    agent.warm_up.fill_(False)
    target = copy.deepcopy(agent.critics if script is sac_hterm else agent)
    with torch.no_grad():
        if script is sac_hterm:
            agent.log_temperature.fill_(-0.7)
        for parameter in target.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return agent, target.requires_grad_(False), args


def random_windows(script):
    """As a buffer gives them: some end, and what follows then begins elsewhere."""
    generator = torch.Generator().manual_seed(2)

    def normal(*shape):
        return torch.randn(LENGTH, COUNT, *shape, dtype=torch.float64, generator=generator)

    done = torch.zeros(LENGTH, COUNT, dtype=torch.bool)
    for window, step in ((1, 0), (2, 2), (3, 2), (4, LENGTH - 1)):
        done[step, window] = True
    terminated = done.clone()
    terminated[:, 3] = False  # truncated
    u = 0.5 * normal(ACT_DIM)
    windows = {"obs": normal(OBS_DIM), "next_obs": normal(OBS_DIM), "raw_action": u}
    going_on = ~done[:-1]
    windows["obs"][1:][going_on] = windows["next_obs"][:-1][going_on]
    mask = torch.ones(LENGTH, COUNT, dtype=torch.float64)
    mask[1:] = (~done[:-1]).cumprod(0)
    log_prob, action = normal() - 1, u.clamp(-1, 1)
    if script is sac_hterm:
        action = u.tanh()
        log_prob -= (1 - action.square()).log().sum(-1)
    return {
        **windows,
        "action": action,
        "reward": 3 * normal(),
        "log_prob": log_prob,
        "terminated": terminated,
        "done": done,
        "mask": mask,
        "discount": GAMMA ** torch.arange(LENGTH, dtype=torch.float64).unsqueeze(1),
    }


def critic_of(script, agent):
    """Its critics, or of SAC's target, which is no more than these, all."""
    return getattr(agent, "critic" if script is ddpg_hterm else "critics", agent)


def actor_gradient(agent, loss, keep=False):
    """Of the actor's parameters; the temperature and the critics must have none."""
    others = [p for name, p in agent.named_parameters() if not name.startswith("actor.")]
    parameters = list(agent.actor.parameters())
    if not keep:
        found = torch.autograd.grad(loss, others, allow_unused=True, retain_graph=True)
        assert found == (None,) * len(others)
    return torch.cat([x.flatten() for x in torch.autograd.grad(loss, parameters)])


# The reference: numpy, one window and one step at a time.


def numpy_mlp(parameters, x):
    w1, b1, w2, b2, w3, b3 = parameters  # weights (out, in)
    x = np.maximum(w1 @ x + b1, 0)
    x = np.maximum(w2 @ x + b2, 0)
    return w3 @ x + b3


def arrays(network):
    return [parameter.detach().numpy().copy() for parameter in network.parameters()]


def numpy_value(parameters, obs, action):
    """Q(s, a) of one critic, the smaller one of two."""
    x = np.concatenate((obs, action))
    return min(numpy_mlp(parameters[i : i + 6], x).item() for i in range(0, len(parameters), 6))


def numpy_policy(script, actor, obs):
    """Mean and standard deviation of u."""
    output = numpy_mlp(actor, obs)
    if script is sac_hterm:
        return output[:ACT_DIM], np.exp(np.clip(output[ACT_DIM:], -20, 2))
    return np.tanh(output), SIGMA


def numpy_log_prob(script, actor, obs, u):
    """Of SAC's policy log π(a|s), a = tanh u; of the others' log π(u|s)."""
    mean, std = numpy_policy(script, actor, obs)
    density = np.exp(-0.5 * ((u - mean) / std) ** 2) / (std * np.sqrt(2 * np.pi))
    if script is sac_hterm:
        density = density / (1 - np.tanh(u) ** 2)
    return np.log(density).sum()


def numpy_g(script, actor, critics, target_actor, windows, noise, temperature):
    """g_i and w_i of every window (K, L), both 0 after its end."""
    g, w = np.zeros((LENGTH, COUNT)), np.zeros((LENGTH, COUNT))

    def value(obs, noise):
        if script is not sac_hterm:
            return numpy_value(critics, obs, np.tanh(numpy_mlp(target_actor, obs)))
        mean, std = numpy_policy(script, actor, obs)
        u = mean + std * noise
        entropy = -numpy_log_prob(script, actor, obs, u)
        return numpy_value(critics, obs, np.tanh(u)) + temperature * entropy

    for window in range(COUNT):
        c = 0.0
        for j in range(LENGTH):
            obs, u = windows["obs"][j, window], windows["raw_action"][j, window]
            after = windows["next_obs"][j, window]
            delta = windows["reward"][j, window] - value(obs, noise[j, window])
            if not windows["terminated"][j, window]:
                delta += GAMMA * value(after, noise[j + 1, window])
            log_prob = numpy_log_prob(script, actor, obs, u)
            if script is sac_hterm:
                delta -= temperature * log_prob
            c += log_prob - windows["log_prob"][j, window]
            w[j, window] = min(1, np.exp(c))
            g[: j + 1, window] += GAMMA**j * w[j, window] * delta
            if windows["done"][j, window]:
                break
    return g, w


def numpy_loss(script, actor, g, windows):
    total = 0.0
    for j, window in itertools.product(range(LENGTH), range(COUNT)):
        obs, u = windows["obs"][j, window], windows["raw_action"][j, window]
        if script is sac_hterm:
            loss = -numpy_log_prob(script, actor, obs, u)
        else:
            loss = 0.5 * ((u - np.tanh(numpy_mlp(actor, obs))) ** 2).sum()
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
def test_the_loss_and_its_gradient(script):
    """δ, chain, baseline, scale and loss, with ends of both kinds inside the windows."""
    agent, target, args = make_agent(script)
    agent.mean_square_g.fill_(0.5)
    windows = random_windows(script)
    plain = {name: tensor.numpy() for name, tensor in windows.items()}
    torch.manual_seed(5)
    loss, sample_size = script.hamiltonian_term(agent, target, windows, args)
    torch.manual_seed(5)
    noise = torch.randn(LENGTH + 1, COUNT, ACT_DIM, dtype=torch.float64).numpy()
    critics = target if script is sac_hterm else critic_of(script, target)
    target_actor = None if script is sac_hterm else arrays(target.actor)
    actor = arrays(agent.actor)
    g, w = numpy_g(script, actor, arrays(critics), target_actor, plain, noise, math.exp(-0.7))
    mask = plain["mask"]
    assert mask.sum() == LENGTH * COUNT - 4 - 2 - 2
    if script is sac_hterm:
        g = g - w * (g * mask).sum() / w.sum()
    mean_square = 0.99 * 0.5 + 0.01 * (g**2 * mask).sum() / mask.sum()
    np.testing.assert_allclose(agent.mean_square_g, mean_square)
    g = g / (np.sqrt(mean_square) + 1e-6)
    if script is not sac_hterm:
        assert (g < -1).any()
        g = np.maximum(g, -1)
    np.testing.assert_allclose(sample_size, w.sum() ** 2 / (w**2).sum())
    assert 2 < sample_size < 0.9 * mask.sum()

    def reference(parameters):
        return numpy_loss(script, parameters, g, plain)

    np.testing.assert_allclose(loss.item(), reference(actor), rtol=1e-7)
    expected = slopes(reference, actor)
    np.testing.assert_allclose(actor_gradient(agent, loss), expected, atol=1e-8)
    assert np.abs(expected).max() > 0.01


def chain(log_ratio, delta, mask):
    """g and w of the scripts' docstrings, (K, L); that the scripts have them is tested above."""
    w = log_ratio.cumsum(0).exp().clamp(max=1)
    each = GAMMA ** torch.arange(len(delta)).unsqueeze(1) * mask * w * delta
    return torch.stack([each[i:].sum(0) for i in range(len(each))]), w


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
            q = reward + GAMMA * (1 - end) * (transition @ future)
            future = (policy * q).sum(1)
        return (start * future).sum()

    # all windows (s_0, a_0, d_0, ..., s_K); after a termination they go on but do not count
    steps = itertools.product(range(states), range(actions), (0, 1))
    windows = list(itertools.product(itertools.product(steps, repeat=length), range(states)))
    s = np.array([[step[0] for step in path] + [last] for path, last in windows]).T  # (K + 1, L)
    a = np.array([[step[1] for step in path] for path, _ in windows]).T
    d = np.array([[step[2] for step in path] for path, _ in windows]).T
    here, following = s[:-1], s[1:]
    likelihood = np.exp(behaviour.numpy())[here, a] * transition[here, a, following]
    likelihood *= np.where(d, end[here, a], 1 - end[here, a])
    probability = torch.tensor(start[s[0]] * likelihood.prod(0))
    assert abs(probability.sum() - 1) < 1e-12
    delta = torch.tensor(
        reward[here, a] + GAMMA * (1 - d) * value[following] - value[here]
    )  # (K, L)
    mask = torch.tensor(np.concatenate((np.ones_like(d[:1]), (1 - d).cumprod(0)[:-1])))
    logits = torch.tensor(rng.normal(size=(states, actions)), requires_grad=True)
    log_prob = logits.log_softmax(1)[here, a]
    log_ratio = (log_prob - behaviour[here, a]).detach()
    largest = log_ratio.cumsum(0).max()
    assert largest > 0.4  # some are truncated; not so where all are divided by the largest one
    smaller = torch.cat((log_ratio[:1] - largest, log_ratio[1:]))
    g, w = chain(smaller, delta, mask)
    (-(probability * mask * g * log_prob).sum() * largest.exp()).backward()
    expected = slopes(lambda arrays: -k_step_return(arrays[0]), [logits.detach().numpy().copy()])
    np.testing.assert_allclose(logits.grad.numpy().flatten(), expected, atol=1e-8)
    assert np.abs(expected).max() > 0.01
    # a baseline times w changes nothing
    logits.grad = None
    log_prob = logits.log_softmax(1)[here, a]
    (-(probability * mask * (g - 0.7 * w) * log_prob).sum() * largest.exp()).backward()
    np.testing.assert_allclose(logits.grad.numpy().flatten(), expected, atol=1e-8)


@pytest.mark.parametrize("script", SCRIPTS)
def test_nothing_after_an_episodes_end_reaches_the_loss(script):
    results = []
    for spoilt in (False, True):
        agent, target, args = make_agent(script)
        windows = random_windows(script)
        if spoilt:
            after = windows["mask"] == 0
            for name in ("obs", "next_obs", "raw_action", "action", "reward", "log_prob"):
                windows[name][after] += 10 * torch.randn_like(windows[name][after])
            windows["terminated"][after] ^= True
        torch.manual_seed(5)
        loss, sample_size = script.hamiltonian_term(agent, target, windows, args)
        gradient = actor_gradient(agent, loss)
        results.append((loss.item(), sample_size.item(), gradient.numpy()))
    for clean, spoilt in zip(*results, strict=True):
        np.testing.assert_allclose(spoilt, clean, rtol=1e-9, atol=1e-12)


def update_of(script, coef, windows=None, values=True):
    """One `update` that moves nothing -> its actor's gradient, ∇L(π) and ∇L_H; all V̄ may be 0."""
    agent, target, args = make_agent(script)
    if not values:
        for parameter in critic_of(script, target).parameters():
            parameter.zero_()
        if script is sac_hterm:
            agent.log_temperature.data.fill_(-math.inf)
    batch = {name: x.flatten(0, 1) for name, x in random_windows(script).items()}
    ones = torch.ones(LENGTH * COUNT, dtype=torch.float64)
    batch |= {"weight": ones, "discount": GAMMA * ones}
    other, temperature = copy.deepcopy(agent), 0.0
    torch.manual_seed(7)
    script.critic_loss(other, target, batch, *([args] if script is td3_hterm else []))
    loss = script.actor_loss(other, batch)
    if script is sac_hterm:
        loss, log_prob = loss
        (temperature,) = torch.autograd.grad(
            script.temperature_loss(other, log_prob), other.log_temperature
        )
    elif windows is not None:
        q = critic_of(script, other)(batch["obs"], batch["action"])
        loss = loss / (q if script is ddpg_hterm else q[0]).abs().mean().detach()
    base = actor_gradient(other, loss, keep=True)
    term = torch.zeros_like(base)
    if windows is not None:
        term = actor_gradient(other, script.hamiltonian_term(other, target, windows, args)[0])
    parameters = list(agent.actor.parameters())
    if script is sac_hterm:
        parameters.append(agent.log_temperature)
    optimizers = [
        torch.optim.SGD(group, 0.0) for group in (critic_of(script, agent).parameters(), parameters)
    ]
    due = (True,) if script is td3_hterm else ()
    torch.manual_seed(7)
    agent.hterm_coef.fill_(coef)
    script.update(agent, target, optimizers, batch, *due, windows, args)
    if script is sac_hterm:
        assert torch.equal(agent.log_temperature.grad, temperature) and temperature != 0
    return torch.cat([x.grad.flatten() for x in agent.actor.parameters()]), base, term


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_update_adds_the_capped_gradient_of_the_term(script):
    """λ as given where λ ‖∇L_H‖ is small, else so that it is ¼ ‖∇L‖."""
    for coef in (1e-4, 1e4):
        found, base, term = update_of(script, coef, random_windows(script))
        allowed = min(coef, 0.25 * base.norm().item() / term.norm().item())
        assert (allowed == coef) == (coef < 1)
        # clip_grad_norm_ divides by the norm + 1e-6
        torch.testing.assert_close(found, base + allowed * term, rtol=1e-7, atol=1e-10)
        assert (allowed * term).norm() > 1e-6 * base.norm()


@pytest.mark.parametrize("script", SCRIPTS)
def test_nothing_unexpected_adds_exactly_nothing(script):
    """TD errors of zero, or no windows: the gradient is the base's, bit for bit."""
    found, base, _ = update_of(script, 0.0)
    assert torch.equal(found, base)
    windows = random_windows(script)
    windows["reward"].zero_()
    found, base, term = update_of(script, 1.0, windows, values=False)
    assert not term.any()
    assert torch.equal(found, base)


def test_td3s_policy_moves_after_the_last_of_the_delayed_updates(tmp_path, monkeypatch):
    """And windows are drawn for those updates only."""
    moved, drawn = [], []

    class Spy(ReplayBuffer):
        def windows(self, *given):
            drawn.append(len(moved))
            return super().windows(*given)

    def update(agent, *rest, original=td3_hterm.update):
        before = copy.deepcopy(agent.actor.state_dict())
        result = original(agent, *rest)
        after = agent.actor.state_dict()
        moved.append(any(not torch.equal(before[name], after[name]) for name in before))
        return result

    monkeypatch.setattr(td3_hterm, "ReplayBuffer", Spy)
    monkeypatch.setattr(td3_hterm, "update", update)
    run_of(td3_hterm, tmp_path / "run", policy_delay=3, total_steps=120)
    first = 118 - len(moved) + 2  # the number of the first update
    expected = [number % 3 == 2 for number in range(first, 120)]
    assert moved == expected and drawn == [i for i, x in enumerate(expected) if x]


def rollout_of(script, agent, num_steps, num_envs, warm_up=False):
    """What `collect` leaves: episodes end at every fifth step, by termination in even envs."""
    agent.warm_up.fill_(warm_up)
    dtype = next(agent.parameters()).dtype
    envs = SimpleNamespace(obs=torch.randn(num_envs, OBS_DIM, dtype=dtype), time=0)

    def step(action):
        envs.time += 1
        envs.action, final = action, torch.randn(num_envs, OBS_DIM, dtype=dtype)
        ended = torch.full((num_envs,), envs.time % 5 == 0)
        terminated = ended & (torch.arange(num_envs) % 2 == 0)
        envs.obs = torch.where(ended.unsqueeze(1), torch.randn_like(final), final)
        zero = torch.zeros(num_envs)
        info = {"final_obs": final, "episode_return": zero, "episode_length": zero.long()}
        return envs.obs, torch.randn(num_envs), terminated, ended & ~terminated, info

    envs.step = step
    shapes = {"obs": (OBS_DIM,), "next_obs": (OBS_DIM,), "reward": (), "log_prob": ()}
    shapes |= dict.fromkeys(("action", "raw_action"), (ACT_DIM,)) | {"episode_return": ()}
    lead = num_steps, num_envs
    rollout = {name: torch.zeros(*lead, *shape, dtype=dtype) for name, shape in shapes.items()}
    for name in ("terminated", "done"):
        rollout[name] = torch.zeros(lead, dtype=torch.bool)
    rollout["episode_length"] = torch.zeros(lead, dtype=torch.int64)
    script.collect(agent, envs, rollout)
    return rollout


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("warm_up", [False, True])
def test_u_and_the_density_are_stored(script, warm_up):
    """SAC: log b of the action, 10⁹ of a uniform one; the others: of what is clipped."""
    agent, _, _ = make_agent(script, num_envs=300)
    rollout = rollout_of(script, agent, 20, 300, warm_up)
    u, action, obs = rollout["raw_action"], rollout["action"], rollout["obs"]
    assert abs(action.std() - 3**-0.5) < 0.02 or not warm_up
    if script is sac_hterm and warm_up:
        assert (rollout["log_prob"] == 1e9).all()
        return
    if script is sac_hterm:
        torch.testing.assert_close(u.tanh(), action, atol=2e-6, rtol=0)
        mean, log_std = agent.actor.mean_and_log_std(obs).chunk(2, -1)
        policy = distributions.TransformedDistribution(
            distributions.Normal(mean, log_std.exp()), [distributions.TanhTransform()]
        )
        drawn = action
    else:
        torch.testing.assert_close(u.clamp(-1, 1), action)
        assert warm_up or (u.abs() > 1).any()
        policy, drawn = distributions.Normal(agent.actor(obs), SIGMA), u
    ends = torch.tensor([-1 - 1e-9, 1 + 1e-9], dtype=torch.float64)
    uniform = distributions.Uniform(*ends)
    expected = (uniform if warm_up else policy).log_prob(drawn).sum(-1)
    torch.testing.assert_close(rollout["log_prob"], expected, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("script", SCRIPTS)
def test_on_policy_from_collection_to_the_loss(script):
    """Windows out of a real buffer, of the present policy: all ratios are 1, nothing is lost."""
    agent, target, args = make_agent(script, num_envs=6, batch_size=200)
    agent, target = agent.float(), target.float()
    rollout = rollout_of(script, agent, 25, 6)
    run = SimpleNamespace(device=torch.device("cpu"), args=SimpleNamespace(save_replay=True))
    replay = ReplayBuffer(run, rollout, 150)
    replay.add(rollout)
    windows = replay.windows(40, LENGTH)
    assert windows["raw_action"].shape == (LENGTH, 40, ACT_DIM)
    going_on = windows["mask"][1:].bool()
    followers = windows["next_obs"][:-1][going_on], windows["obs"][1:][going_on]
    assert torch.equal(*followers) and not going_on.all()
    loss, sample_size = script.hamiltonian_term(agent, target, windows, args)
    assert loss.isfinite()
    torch.testing.assert_close(sample_size, windows["mask"].sum(), rtol=1e-3, atol=0)
    for row in replay.windows(40, LENGTH, 6 * LENGTH)["index"].T // 6:
        assert row.tolist() == list(range(20, 25))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_step_along_the_gradient_makes_what_went_well_likelier(script):
    """One state, two actions, of which one pays."""
    agent, target, args = make_agent(script)
    windows = random_windows(script)
    for name in ("obs", "next_obs"):
        windows[name][:] = windows["obs"][0, 0].clone()
    good = torch.arange(COUNT) % 2 == 0
    windows["raw_action"][:] = torch.where(good, 0.5, -0.5).unsqueeze(-1)
    windows["reward"][:] = torch.where(good, 100.0, -100.0)
    windows["log_prob"].fill_(-30.0)  # both were rare: no ratio is small

    def preference():
        return agent.actor(windows["obs"][0, :1]).sum().item()

    before = preference()
    for _ in range(3):
        loss, _ = script.hamiltonian_term(agent, target, windows, args)
        agent.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in agent.actor.parameters():
                parameter -= 1e-3 * parameter.grad
    assert preference() > before + 1e-4


def run_of(script, run_dir, **options):
    """A short run -> its checkpoint."""
    options = {"total_steps": 150, "warmup_steps": 60, "num_envs": 2, **options}
    options |= {"env": "Pendulum", "eval_every": 0, "eval_episodes": 1, "hidden_size": 8}
    options |= {"batch_size": 32, "log_every": 50, "run_dir": str(run_dir)}
    script.train(script.Args(**options))
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


def assert_same(ours, theirs, where=""):
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for name in ours.keys() - {"args", "script", "run_dir", "time", "elapsed"}:
            assert_same(ours[name], theirs[name], f"{where}.{name}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), where
        for i, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same(*pair, f"{where}.{i}")
    elif isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), where


@pytest.mark.parametrize(
    ("parent", "child", "options"),
    [
        (ddpg, ddpg_hterm, {"utd_ratio": 0.5}),
        (td3, td3_hterm, {"policy_delay": 3}),
        (sac, sac_hterm, {}),
    ],
)
def test_without_the_term_the_run_is_the_parents_bit_for_bit(parent, child, options, tmp_path):
    """Networks, optimizers, replay buffer, random generator: all that is saved."""
    base = run_of(parent, tmp_path / "base", **options)
    zero = run_of(child, tmp_path / "zero", hterm_coef=0.0, **options)
    with_term = run_of(child, tmp_path / "with", hterm_newest=20, **options)
    actor = [name for name in base["agent"] if name.startswith("actor.")]
    assert any(not torch.equal(base["agent"][name], with_term["agent"][name]) for name in actor)
    zero["agent"].pop("mean_square_g"), zero["target"].pop("mean_square_g", None)
    for name in ("raw_action", "log_prob"):  # what only the child has
        assert zero["replay"]["data"].pop(name).abs().sum() > 0
        zero["workers"].get("last_step", {}).pop(name, None)
    assert base["optimizer" if "optimizer" in base else "actor_optimizer"]["state"]
    assert_same(base, zero)
    curve = (tmp_path / "with" / "metrics.csv").read_text()
    assert "losses/hamiltonian" in curve and "losses/effective_sample_size" in curve
    assert "losses/hamiltonian" not in (tmp_path / "zero" / "metrics.csv").read_text()


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_train_hands_on(script, tmp_path, monkeypatch):
    """L and K of the windows, where from, and λ that falls to 0."""
    asked, coefs = [], []

    class Spy(ReplayBuffer):
        def windows(self, *given):
            asked.append(given)
            return super().windows(*given)

    def update(*given, original=script.update):
        coefs.append(given[0].hterm_coef.item())
        assert given[-2] is not None or script is td3_hterm
        return original(*given)

    monkeypatch.setattr(script, "ReplayBuffer", Spy)
    monkeypatch.setattr(script, "update", update)
    run_of(script, tmp_path / "run", total_steps=100, hterm_newest=20)
    assert len(coefs) == 42 and asked == [(4, 8, 20)] * (21 if script is td3_hterm else 42)
    assert coefs == sorted(coefs, reverse=True)
    assert coefs[0] / 0.125 == pytest.approx(0.42) and coefs[-1] / 0.125 == pytest.approx(0.02)


@pytest.mark.parametrize("script", SCRIPTS)
def test_windows_are_shorter_where_the_buffer_is(script, tmp_path):
    for name in ("buffer_size", "warmup_steps"):
        options = {"num_envs": 2, "warmup_steps": 20, "total_steps": 40, "batch_size": 8, name: 10}
        options |= {"env": "Pendulum", "eval_episodes": 1, "hidden_size": 8}
        script.train(script.Args(**options, run_dir=str(tmp_path / name)))
