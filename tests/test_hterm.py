"""What must hold of the H-term, whichever form it has."""

import dataclasses
import itertools

import gymnasium
import numpy as np
import pytest
import torch

from algos import ppo, ppo_hterm, ppo_hterm_variants
from algos.worker_learner import flatten

OBS = gymnasium.spaces.Box(-np.inf, np.inf, (3,))
BOX = gymnasium.spaces.Box(-1.0, 1.0, (2,))
TINY = {
    "env": "Pendulum",
    "total_steps": 1000,
    "num_envs": 4,
    "horizon": 16,
    "minibatch_size": 32,
    "epochs": 2,
    "hidden_size": 8,
    "eval_episodes": 1,
    "eval_every": 0,
}


@pytest.mark.parametrize("module", [ppo_hterm, ppo_hterm_variants])
def test_lambda_zero_is_the_base_algorithm_bit_for_bit(module, tmp_path):
    weights = []
    for script, options in ((ppo, {}), (module, {"hterm_coef": 0.0}), (module, {})):
        run_dir = tmp_path / str(len(weights))
        script.train(script.Args(**TINY, **options, run_dir=str(run_dir)))
        weights.append(torch.load(run_dir / "last.pt", weights_only=True)["agent"])
    base, zero, with_term = weights
    assert all(torch.equal(base[name], zero[name]) for name in base)
    assert not all(torch.equal(base[name], with_term[name]) for name in base)


@pytest.mark.parametrize("module", [ppo, ppo_hterm, ppo_hterm_variants])
@pytest.mark.parametrize("schedule", ["anneal", "adaptive"])
def test_what_falls_linearly_to_zero(module, schedule, tmp_path, monkeypatch):
    """The learning rate if it is not adapted, λ if it is asked to: by the share left."""
    update, seen = module.update, []

    def spy(agent, optimizer, rollout, gradients, args, *term):
        rate = optimizer.param_groups[0]["lr"].item()
        seen.append([rate / args.learning_rate, *(coef / args.hterm_coef for coef in term[1:])])
        return update(agent, optimizer, rollout, gradients, args, *term)

    monkeypatch.setattr(module, "update", spy)
    options = TINY | {"total_steps": 1024, "target_kl": 1e-9, "run_dir": str(tmp_path)}
    options |= {"hterm_schedule": schedule} if schedule == "anneal" and module is ppo_hterm else {}
    module.train(module.Args(**options, learning_rate_schedule=schedule))
    rate, *coef = np.array(seen).T
    left = 1 - np.arange(len(seen)) / len(seen)
    falls = module is ppo_hterm_variants or schedule == "anneal"
    np.testing.assert_allclose(coef, [left if falls else left**0] * (module is not ppo))
    if schedule == "anneal":
        np.testing.assert_allclose(rate, left, rtol=1e-6)
    else:
        assert rate[-1] < 0.5  # each step moves the policy too far for such a target


def memory_of(returns: torch.Tensor, weight: str = "energy"):
    """An agent, an empty memory, and a rollout of one-step episodes with these returns (T, N)."""
    torch.manual_seed(0)
    options = {"num_envs": returns.shape[1], "hidden_size": 8, "hterm_memory": 2}
    args = ppo_hterm.Args(**options, hterm_weight=weight)
    agent = ppo_hterm.Agent(OBS, BOX, args)
    agent.reward_scaler.statistics.var.fill_(1)
    rollout = {
        "obs": torch.randn(*returns.shape, 3),
        "next_obs": torch.randn(*returns.shape, 3),
        "action": torch.randn(*returns.shape, 2),
        "reward": returns.clone(),
        "terminated": torch.ones(returns.shape, dtype=torch.bool),
        "done": torch.ones(returns.shape, dtype=torch.bool),
    }
    memory = ppo_hterm.SpinMemory(rollout, args)
    return agent, memory, rollout, args


def gradient(agent, term):
    agent.zero_grad()
    term.backward()
    return [p.grad for p in agent.parameters() if p.grad is not None]


def test_an_empty_or_beaten_memory_contributes_exactly_zero():
    returns = torch.full((4, 5), -9.0)  # worse than the critic expects
    agent, memory, rollout, args = memory_of(returns)
    for filled in (False, True):
        if filled:
            memory.add(rollout)
        term = ppo_hterm.hamiltonian_term(agent, next(memory.draw(agent, 16, args)), args)
        assert term.item() == 0
        assert all((g == 0).all() for g in gradient(agent, term))


def test_steps_are_drawn_in_proportion_to_their_energy():
    levels = torch.linspace(-3, 3, 20)
    agent, memory, rollout, args = memory_of(levels.unsqueeze(1).repeat(1, 10_000))
    rollout["obs"].zero_()  # one state, one value
    memory.add(rollout)
    value = agent.value(agent.normalizer(torch.zeros(3)))
    energy = (levels - value).clamp(min=0)
    spins = next(memory.draw(agent, 200_000, args))
    index = (spins["returns"].unsqueeze(1) - levels).abs().argmin(1)
    torch.testing.assert_close(spins["returns"], levels[index], atol=1e-5, rtol=0)
    frequencies = torch.bincount(index, minlength=20) / len(index)
    torch.testing.assert_close(frequencies, energy / energy.sum(), atol=0.01, rtol=0)
    torch.testing.assert_close(spins["mean_energy"], energy[energy > 0].mean(), rtol=1e-4, atol=0)


def test_the_memory_is_seen_by_the_present_critic():
    """Its λ-returns are those that `prepare` would compute now, with scale and critic of now."""
    agent, memory, rollout, args = memory_of(torch.randn(6, 3))
    for name in ("terminated", "done"):
        rollout[name] = torch.rand(6, 3) < 0.3
    rollout["done"] |= rollout["terminated"]
    for age in range(3):  # the third takes the place of the first
        memory.add(rollout | {"reward": rollout["reward"] + age})
    agent.reward_scaler.statistics.var.fill_(4)
    agent.critic[0].weight.data.mul_(2)
    value = agent.value(agent.normalizer(rollout["obs"]))
    next_value = agent.value(agent.normalizer(rollout["next_obs"]))
    expected = []
    for age in (1, 2):
        reward, ends = (rollout["reward"] + age) / 2, (rollout["terminated"], rollout["done"])
        advantage = ppo_hterm.gae(reward, value, next_value, *ends, args)
        expected.append((advantage + value)[advantage > 0])
    drawn = next(memory.draw(agent, 10_000, args))["returns"].unique()
    assert 0 < len(drawn) <= 2 * 6  # of one env, a quarter of them
    assert ((drawn.unsqueeze(1) - torch.cat(expected)).abs().min(1).values < 1e-4).all()


@pytest.mark.parametrize("form", ["boltzmann", "energy", "uniform"])
def test_the_memory_term_against_numpy(form):
    returns = torch.linspace(-1, 9, 20).view(4, 5)
    agent, memory, rollout, args = memory_of(returns, form)
    agent.log_std.data = torch.tensor([-1.5, 0.3])
    memory.add(rollout)
    spins = next(memory.draw(agent, 64, args))
    x, action = spins["obs"], spins["action"].numpy()
    mean, std = agent.actor(x).detach().numpy(), agent.log_std.exp().detach().numpy()
    advantage = spins["returns"].numpy() - agent.value(x).detach().numpy()
    density = np.exp(-(((action - mean) / std) ** 2) / 2) / (std * np.sqrt(2 * np.pi))
    entropy = np.log(std * np.sqrt(2 * np.pi * np.e)).sum()
    log_prob = np.log(density).sum(1) + entropy
    assert log_prob.min() < -20 < log_prob.max()
    log_prob = np.maximum(log_prob, -20)
    weight = np.ones(64)
    if form == "boltzmann":
        weight = np.exp((advantage - advantage.mean()) / advantage.std(ddof=1))
        assert weight.max() > 3 > weight.min()
        weight = np.minimum(weight, 3) / np.minimum(weight, 3).mean()
    elif form == "energy":
        advantage = np.maximum(0, advantage)
        weight = np.minimum(advantage / spins["mean_energy"].item(), 3)
    expected = -(weight * (std**2).mean() * log_prob).mean() + 0.05 * (advantage**2).mean()
    term = ppo_hterm.hamiltonian_term(agent, spins, args)
    np.testing.assert_allclose(term.item(), expected, rtol=1e-5)
    gradient(agent, term)
    assert agent.log_std.grad is None  # the mean only
    learnt = [p.grad.clone() for p in agent.critic.parameters()]  # by its own part only
    error = spins["returns"] - agent.value(x)
    error = error.clamp(min=0) if form == "energy" else error
    gradient(agent, 0.05 * error.square().mean())
    torch.testing.assert_close(learnt, [p.grad for p in agent.critic.parameters()])


def test_the_memory_term_of_discrete_actions():
    args = ppo_hterm.Args(num_envs=5, hidden_size=8, hterm_weight="uniform")
    agent = ppo_hterm.Agent(OBS, gymnasium.spaces.Discrete(3), args)
    spins = {"obs": torch.randn(64, 3), "action": torch.randint(3, (64,))}
    spins["returns"] = torch.ones(64)
    chances = agent.actor(spins["obs"]).softmax(-1).detach().double().numpy()
    log_prob = np.log(chances[np.arange(64), spins["action"]])
    entropy = -(chances * np.log(chances)).sum(1)
    error = 1 - agent.value(spins["obs"]).detach().numpy()
    expected = -(log_prob + entropy).mean() + 0.05 * (error**2).mean()
    term = ppo_hterm.hamiltonian_term(agent, spins, args)
    np.testing.assert_allclose(term.item(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("weight", ["boltzmann", "energy", "uniform"])
def test_the_smallest_minibatch_leaves_finite_weights(weight, tmp_path):
    options = TINY | {"minibatch_size": 2, "total_steps": 128, "run_dir": str(tmp_path)}
    ppo_hterm.train(ppo_hterm.Args(**options, hterm_weight=weight))
    agent = torch.load(tmp_path / "last.pt", weights_only=True)["agent"]
    assert all(x.isfinite().all() for x in agent.values())


def test_an_update_adds_the_term_of_the_newest_rollout_too():
    agent, memory, rollout, args = memory_of(torch.randn(4, 5))
    args = dataclasses.replace(args, epochs=1, minibatch_size=20, max_grad_norm=1e9)
    weights = flatten(agent)
    (base, term), zero = torch.randn(2, len(weights)), torch.zeros(())
    gradients = lambda *_: (base.clone(), zero, {"kl": zero}), lambda *_: (term, zero)
    optimizer = torch.optim.SGD([weights], 0.0)
    ppo_hterm.update(agent, optimizer, rollout, gradients, args, memory, 0.5)
    torch.testing.assert_close(weights.grad, base + 0.5 * term)
    assert memory.filled[:, 0].all() and torch.equal(memory.reward[:, 0], rollout["reward"])


def test_settings_are_ppos_but_for_the_term():
    """And on Hopper the learning rate is annealed, where ppo.py adapts it."""
    for env, expected in ppo.TUNED.items():
        tuned = ppo_hterm.TUNED.get(env, {})
        tuned = {name: value for name, value in tuned.items() if not name.startswith("hterm_")}
        assert tuned == ({} if env == "Hopper" else expected), env


def test_the_chain_has_the_gradient_of_the_k_step_return():
    """Tabular, every trajectory enumerated: autograd of L_H = finite differences of −J_K."""
    rng = np.random.default_rng(0)
    states, actions, length, discount = 3, 2, 3, 0.9
    transition = rng.dirichlet(np.ones(states), size=(states, actions))
    end = rng.random((states, actions)) * 0.3  # probability of termination
    reward, value = rng.normal(size=(states, actions)), rng.normal(size=states)
    behaviour = torch.tensor(rng.normal(size=(states, actions))).log_softmax(1)
    start = np.array([0.5, 0.3, 0.2])

    def k_step_return(logits: torch.Tensor) -> torch.Tensor:
        """J_K = E_π[ Σ γ^j r_j + γ^K V(s_K) ] by dynamic programming."""
        policy = logits.softmax(1)
        future = torch.tensor(value)
        for _ in range(length):
            following = torch.einsum("sat,t->sa", torch.tensor(transition), future)
            q = torch.tensor(reward) + discount * torch.tensor(1 - end) * following
            future = (policy * q).sum(1)
        return (torch.tensor(start) * future).sum()

    logits = torch.tensor(rng.normal(size=(states, actions)), requires_grad=True)
    # all windows (s_0, a_0, d_0, s_1, ...); after a termination they go on but do not count
    loss = torch.zeros((), dtype=torch.float64)
    steps = list(itertools.product(range(states), range(actions), (False, True)))
    for window in itertools.product(steps, repeat=length):
        for last in range(states):
            path = [step[0] for step in window] + [last]
            probability = start[path[0]]
            for (s, a, d), following in zip(window, path[1:], strict=True):
                probability *= behaviour[s, a].exp().item() * transition[s, a, following]
                probability *= end[s, a] if d else 1 - end[s, a]
            delta = [
                reward[s, a] + discount * (not d) * value[following] - value[s]
                for (s, a, d), following in zip(window, path[1:], strict=True)
            ]
            mask = np.cumprod([1.0] + [float(not d) for _, _, d in window[:-1]])
            index_s, index_a = [w[0] for w in window], [w[1] for w in window]
            log_ratio = logits.log_softmax(1)[index_s, index_a] - behaviour[index_s, index_a]
            g = ppo_hterm_variants.chain_gradient(
                log_ratio.detach().unsqueeze(0),
                torch.tensor([delta]),
                torch.tensor(mask).unsqueeze(0),
                discount,
                truncation=float("inf"),
            )
            loss = loss - probability * (torch.tensor(mask) * log_ratio.exp() * g[0]).sum()
    loss.backward()
    expected = torch.autograd.grad(-k_step_return(logits), logits)[0]
    torch.testing.assert_close(logits.grad, expected, atol=1e-8, rtol=0)
    # and the dynamic programme itself against finite differences
    step = torch.zeros_like(logits)
    step[1, 0] = 1e-5
    slope = (k_step_return(logits + step) - k_step_return(logits - step)) / 2e-5
    torch.testing.assert_close(-slope, expected[1, 0], atol=1e-8, rtol=0)


def test_a_chain_of_one_is_the_td_policy_gradient():
    delta, log_ratio = torch.randn(6, 1), torch.zeros(6, 1)
    g = ppo_hterm_variants.chain_gradient(log_ratio, delta, torch.ones(6, 1), 0.9)
    assert torch.equal(g, delta)


def test_nothing_after_an_episodes_end_reaches_a_window():
    args = ppo_hterm_variants.Args(num_envs=2, hterm_length=4)
    shape = (9, 2)
    rollout = {"obs": torch.zeros(*shape, 3), "action": torch.zeros(*shape, 2)}
    windows = ppo_hterm_variants.Windows(rollout, args)
    done = torch.zeros(shape, dtype=torch.bool)
    done[4, 0] = True
    clock = torch.arange(9.0).unsqueeze(1).expand(shape)
    cut = windows.cut({"done": done, "reward": torch.ones(shape), "clock": clock})
    assert len(cut["mask"]) == 12  # 6 beginnings, 2 envs
    for mask, times, ends, worth in zip(
        cut["mask"], cut["clock"], cut["done"], cut["worth"], strict=True
    ):
        assert (times.diff() == 1).all()
        last = ends.nonzero().min().item() if ends.any() else 3
        assert mask.tolist() == [1.0] * (last + 1) + [0.0] * (3 - last)
        assert worth == last + 1
    # a TD error after the end changes nothing before it
    delta, mask = torch.randn(1, 4), torch.tensor([[1.0, 1.0, 0.0, 0.0]])
    g = ppo_hterm_variants.chain_gradient(torch.randn(1, 4) * 0, delta, mask, 0.9)
    delta[0, 2:] = 1e6
    again = ppo_hterm_variants.chain_gradient(torch.randn(1, 4) * 0, delta, mask, 0.9)
    assert torch.equal(g[0, :2], again[0, :2])


def test_the_chain_term_against_loops():
    """The loss, its gradient and the effective sample size, window by window and step by step."""
    torch.manual_seed(0)
    args = ppo_hterm_variants.Args(num_envs=2, hterm_length=3, hidden_size=4)
    agent = ppo_hterm_variants.Agent(OBS, BOX, args).double()
    rollout = {"obs": torch.randn(5, 2, 3).double(), "action": torch.randn(5, 2, 2).double()}
    rollout |= {"reward": torch.randn(5, 2).double(), "delta": torch.randn(5, 2).double()}
    rollout["done"] = torch.zeros(5, 2, dtype=torch.bool)
    rollout["done"][2, 0] = rollout["done"][0, 1] = True
    now = agent.log_prob_entropy(rollout["obs"], rollout["action"])[0].detach()
    rollout["log_prob"] = now + 0.6 * torch.randn(5, 2).double()  # the policy has moved since
    windows = ppo_hterm_variants.Windows(rollout, args).double()
    term, logged = ppo_hterm_variants.chain_term(agent, windows.cut(rollout), windows, args)

    worths, ratios, weights = [], [], []  # of each living step of each window
    for begin, env in itertools.product(range(3), range(2)):
        ends = [t for t in range(begin, begin + 3) if rollout["done"][t, env]]
        steps = [(t, env) for t in range(begin, min([*ends, begin + 2]) + 1)]
        rho = [(now[step] - rollout["log_prob"][step]).exp().item() for step in steps]
        for i, step in enumerate(steps):
            chains = [np.prod(rho[: j + 1]) / rho[i] for j in range(len(steps))]
            deltas = [0.99**j * rollout["delta"][s].item() for j, s in enumerate(steps)]
            worths.append(sum(min(1, chains[j]) * deltas[j] for j in range(i, len(steps))))
            weights.append(min(1, np.prod(rho[: i + 1])))
            log_prob = agent.log_prob_entropy(rollout["obs"][step], rollout["action"][step])[0]
            ratios.append((log_prob - rollout["log_prob"][step]).exp())
    g = np.array(worths) - np.mean(worths)
    g = g / (np.sqrt(0.99 + 0.01 * np.mean(g**2)) + 1e-6)  # the average of squares begins at 1
    gains = [torch.minimum(r * x, r.clamp(0.8, 1.2) * x) for r, x in zip(ratios, g, strict=True)]
    loss = -torch.stack(gains).mean()
    effective = np.sum(weights) ** 2 / np.sum(np.square(weights))
    assert len(g) == 13 and min(weights) < 0.7  # windows are cut, and chains are below 1
    torch.testing.assert_close(logged["effective_sample_size"].item(), effective)
    torch.testing.assert_close(term, loss)
    actor = list(agent.actor.parameters())
    ours, theirs = torch.autograd.grad(term, actor), torch.autograd.grad(loss, actor)
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-6)


def test_the_published_term_against_loops():
    torch.manual_seed(0)
    args = ppo_hterm_variants.Args(hterm="published", hterm_length=3, hterm_windows=2)
    agent = ppo_hterm_variants.Agent(OBS, BOX, args)
    rollout = {"obs": torch.randn(9, 4, 3), "action": 3 * torch.randn(9, 4, 2)}
    rollout |= {"reward": torch.randn(9, 4), "done": torch.rand(9, 4) < 0.2}
    windows = ppo_hterm_variants.Windows(rollout, args)
    cut = windows.cut(rollout)
    windows.keep_best(cut)
    assert torch.equal(windows.worth.sort().values, cut["worth"].sort().values[-8:])
    best = windows.draw(cut, "top")["worth"]
    assert torch.equal(best.sort().values, cut["worth"].sort().values[-2:])
    windows.mask[:, 2] = 0
    torch.manual_seed(1)
    term, _ = ppo_hterm_variants.published_term(agent, windows)
    torch.manual_seed(1)
    low, high, expected = windows.reward.min(), windows.reward.max(), 0.0
    for i in torch.randint(8, (2,)):
        chain = 0.0
        for k in range(3):
            alive = windows.mask[i, k]
            log_prob, _ = agent.log_prob_entropy(windows.obs[i, k], windows.action[i, k])
            chain += alive * log_prob
            share = alive * (windows.reward[i, k] - low) / (high - low)
            expected -= 0.8 ** (k + 1) * share * chain.clamp(-16, 2) / 2
    torch.testing.assert_close(term, expected)


def test_the_variants_td_errors_and_cap():
    args = ppo_hterm_variants.Args(num_envs=4, hidden_size=8, discount=0.5)
    agent = ppo_hterm_variants.Agent(OBS, BOX, args)
    rollout = {"obs": torch.randn(6, 4, 3), "next_obs": torch.randn(6, 4, 3)}
    rollout |= {"action": torch.randn(6, 4, 2), "reward": torch.zeros(6, 4)}
    rollout |= {"terminated": torch.rand(6, 4) < 0.3, "done": torch.rand(6, 4) < 2}
    delta = ppo_hterm_variants.prepare(agent, rollout, args)["delta"].view(6, 4)
    value, next_value = agent.value(rollout["obs"]), agent.value(rollout["next_obs"])
    expected = torch.where(rollout["terminated"], 0.0, 0.5 * next_value) - value
    torch.testing.assert_close(delta, expected.detach())
    base, term = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0])
    for coef, added in ((0.1, 0.2), (9.0, 1.25)):
        sum_ = ppo_hterm_variants.add_capped(base, term, coef)
        torch.testing.assert_close(sum_, base + torch.tensor([0.0, added]))


@pytest.mark.parametrize("form", ["boltzmann", "uniform"])
def test_any_step_is_drawn_alike(form):
    levels = torch.linspace(-5, 5, 20)
    agent, memory, rollout, args = memory_of(levels.unsqueeze(1).repeat(1, 10_000), form)
    memory.add(rollout)  # half of the memory is still empty
    spins = next(memory.draw(agent, 200_000, args))
    drawn = (spins["returns"].unsqueeze(1) - levels).abs() < 1e-5
    assert drawn.any(1).all()  # no empty place
    torch.testing.assert_close(drawn.float().mean(0), torch.full((20,), 0.05), atol=0.01, rtol=0)


def test_log_std_follows_a_schedule(tmp_path):
    """At 1000 steps of 64: the last iteration begins at 960."""
    options = {**TINY, "hterm_coef": 0.0, "log_std_schedule": "-1 -2 -4"}
    ppo_hterm_variants.train(ppo_hterm_variants.Args(**options, run_dir=str(tmp_path / "run")))
    agent = torch.load(tmp_path / "run" / "last.pt", weights_only=True)["agent"]
    torch.testing.assert_close(agent["log_std"], torch.tensor([-2 - 2 * (0.96 - 0.5) / 0.5]))
    wrong = ppo_hterm_variants.Args(**TINY, log_std_schedule="a", run_dir=str(tmp_path / "wrong"))
    with pytest.raises(SystemExit, match="--log-std-schedule is 'a'"):
        ppo_hterm_variants.train(wrong)
