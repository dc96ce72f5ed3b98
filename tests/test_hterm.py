"""What must hold of PPO's H-term."""

import gymnasium
import numpy as np
import pytest
import torch
from interrupted import both_checkpoints

from algos import ppo, ppo_hterm
from algos.worker_learner import UserError
from benchmark import hterm_forms
from benchmark.hterm_control import uniform_term

OBS = gymnasium.spaces.Box(-np.inf, np.inf, (3,))
BOX = gymnasium.spaces.Box(-1.0, 1.0, (2,))
TINY = {
    "env": "Pendulum",
    "total_steps": 1000,
    "num_envs": 4,
    "num_steps": 16,
    "minibatch_size": 32,
    "epochs": 2,
    "hidden_size": 8,
    "eval_episodes": 1,
    "eval_every": 0,
}


def test_lambda_zero_is_the_base_algorithm_bit_for_bit(tmp_path):
    weights, logs = [], []
    fast = {**TINY, "learning_rate": 0.05}  # else no ratio reaches the clip
    for script, options in ((ppo, {}), (ppo_hterm, {"hterm_coef": 0.0}), (ppo_hterm, {})):
        run_dir = tmp_path / str(len(weights))
        script.train(script.Args(**fast, **options, run_dir=str(run_dir)))
        weights.append(torch.load(run_dir / "last.pt", weights_only=True)["agent"])
        rows = [line.split(",") for line in open(run_dir / "metrics.csv")]
        logs.append({(step, tag): x for step, _, tag, x in rows if tag.startswith("losses/")})
    base, zero, with_term = weights
    assert logs[1].items() < logs[0].items() and logs[1].keys() < logs[2].keys()
    assert max(float(x) for (_, tag), x in logs[0].items() if tag == "losses/clip_fraction") > 0.01
    assert all(torch.equal(base[name], zero[name]) for name in base)
    assert not all(torch.equal(base[name], with_term[name]) for name in base)


@pytest.mark.parametrize("target_kl", [0, 1e-9])
@pytest.mark.parametrize("module", [ppo, ppo_hterm])
def test_the_learning_rate_falls(module, target_kl, tmp_path, monkeypatch):
    """By the part that is left of the run, or, if it is adapted, to a KL divergence of 0."""
    update, seen = module.update, []

    def spy(agent, optimizer, *inputs):
        seen.append(optimizer.param_groups[0]["lr"] / inputs[-1].learning_rate)
        return update(agent, optimizer, *inputs)

    monkeypatch.setattr(module, "update", spy)
    options = TINY | {"total_steps": 1024, "run_dir": str(tmp_path), "target_kl": target_kl}
    module.train(module.Args(**options))
    if target_kl == 0:
        np.testing.assert_allclose(seen, 1 - np.arange(len(seen)) / len(seen), rtol=1e-6)
    else:
        # each of two epochs moves the policy too far for such a target; nothing else changes it
        np.testing.assert_allclose(seen[:3], 1.5 ** (-2.0 * np.arange(3)), rtol=1e-6)


def make_agent(**options):
    torch.manual_seed(0)
    args = ppo_hterm.Args(**{"num_envs": 5, "num_steps": 4, "hidden_size": 8, **options})
    return ppo_hterm.Agent(OBS, BOX, args), args


class FakeRun:
    """What a replay buffer asks of a run."""

    device, step = torch.device("cpu"), 0

    def __init__(self, args):
        self.args = args


def make_memory(rollout, args):
    capacity = args.hterm_memory * rollout["done"].numel()
    return ppo_hterm.ReplayBuffer(FakeRun(args), rollout, capacity)


def test_a_memory_that_does_not_fit_names_its_own_flag(tmp_path):
    given = {"env": "Pendulum", "num_envs": 4, "compile": "none", "run_dir": str(tmp_path / "run")}
    with pytest.raises(UserError, match=r"^--hterm-memory: .* transitions need .* a smaller one"):
        ppo_hterm.train(ppo_hterm.Args(**given, hterm_memory=10**10, device="cpu"))


def random_rollout(args):
    shape = args.num_steps, args.num_envs
    terminated = torch.rand(shape) < 0.2
    return {
        "obs": torch.randn(*shape, 3),
        "next_obs": torch.randn(*shape, 3),
        "action": torch.randn(*shape, 2),
        "reward": torch.randn(shape),
        "terminated": terminated,
        "done": terminated | (torch.rand(shape) < 0.2),
    }


def gradient(agent, term):
    agent.zero_grad()
    term.backward()
    return [p.grad for p in agent.parameters() if p.grad is not None]


def test_the_memory_is_seen_by_the_present_critic():
    """Its λ-returns are those that `prepare` would compute now, with scale and critic of now."""
    agent, args = make_agent(num_envs=3, num_steps=6, hterm_memory=2)
    rollouts = [random_rollout(args) for _ in range(3)]
    memory = make_memory(rollouts[0], args)
    for rollout in rollouts:  # the third takes the place of the first
        memory.add(rollout)
    agent.reward_scaler.statistics.var.fill_(4)
    agent.critic[0].weight.data.mul_(2)
    last = {name: torch.cat([x[name] for x in rollouts[1:]]) for name in rollouts[0]}
    expected = []  # of each window of 6 steps
    value = agent.value(agent.normalizer(last["obs"])).detach().numpy()
    next_value = agent.value(agent.normalizer(last["next_obs"])).detach().numpy()
    reward = last["reward"].numpy() / 2
    for start in range(7):
        for env in range(3):
            advantage = 0.0
            for t in reversed(range(start, start + 6)):
                follows = not last["terminated"][t, env]
                delta = reward[t, env] + 0.99 * follows * next_value[t, env] - value[t, env]
                advantage = delta + 0.99 * 0.95 * (not last["done"][t, env]) * advantage
                expected.append([*last["action"][t, env].tolist(), advantage + value[t, env]])
    past = ppo_hterm.recall(agent, memory, args)
    assert len(past["obs"]) == 6 * 1  # a quarter of 2 rollouts of 3 environments
    for _ in range(50):
        past = ppo_hterm.recall(agent, memory, args)
        found = torch.cat((past["action"], past["returns"].unsqueeze(1)), 1).numpy()
        distance = np.abs(found[:, None] - np.array(expected)).max(-1).min(1)
        assert (distance < 1e-5).all()


def test_what_is_remembered_is_of_all_rollouts_so_far():
    """Each environment alike, and no place that is still empty."""
    agent, args = make_agent(num_envs=8, num_steps=4, hterm_memory=16)
    rollout = random_rollout(args)
    memory = make_memory(rollout, args)
    code = torch.arange(3 * 32.0).view(3, 4, 8, 1)  # tells where an action is from
    for actions in code:
        memory.add(rollout | {"action": actions.expand(4, 8, 2)})
    drawn = [ppo_hterm.recall(agent, memory, args)["action"][:, 0] for _ in range(1000)]
    counts = torch.bincount(torch.cat(drawn).long(), minlength=96).view(12, 8)
    assert len(counts) == 12 and (counts > 0).all()
    torch.testing.assert_close(
        counts.sum(0) / counts.sum(), torch.full((8,), 1 / 8), atol=0.01, rtol=0
    )


def random_past(size=64):
    past = {"obs": torch.randn(size, 3), "returns": torch.linspace(-1, 9, size)}
    return past | {"action": torch.randn(size, 2)}


def test_the_term_against_numpy():
    agent, _ = make_agent()
    agent.log_std.data = torch.tensor([-1.5, 0.3])
    past = random_past()
    x, action = past["obs"], past["action"].numpy()
    mean, std = agent.actor(x).detach().numpy(), agent.log_std.exp().detach().numpy()
    advantage = past["returns"].numpy() - agent.value(x).detach().numpy()
    density = np.exp(-(((action - mean) / std) ** 2) / 2) / (std * np.sqrt(2 * np.pi))
    entropy = np.log(std * np.sqrt(2 * np.pi * np.e)).sum()
    log_prob = np.log(density).sum(1) + entropy
    assert log_prob.min() < -20 < log_prob.max()
    log_prob = np.maximum(log_prob, -20)
    weight = np.exp((advantage - advantage.mean()) / advantage.std(ddof=1))
    assert weight.max() > 3 > weight.min()
    weight = np.minimum(weight, 3) / np.minimum(weight, 3).mean()
    expected = -(weight * (std**2).mean() * log_prob).mean() + 0.05 * (advantage**2).mean()
    term = ppo_hterm.hamiltonian_term(agent, past)
    np.testing.assert_allclose(term.item(), expected, rtol=1e-5)
    gradient(agent, term)
    assert agent.log_std.grad is None  # the mean only
    learnt = [p.grad.clone() for p in agent.critic.parameters()]  # by its own part only
    gradient(agent, 0.05 * (past["returns"] - agent.value(x)).square().mean())
    torch.testing.assert_close(learnt, [p.grad for p in agent.critic.parameters()])


def test_where_all_sigmas_are_alike_the_mean_learns_by_weighted_regression():
    """½ w ‖a − μ_θ(s)‖², whatever σ is."""
    agent, _ = make_agent()
    agent.log_std.data.fill_(0.7)
    past = random_past()
    advantage = (past["returns"] - agent.value(past["obs"])).detach()
    weight = ((advantage - advantage.mean()) / advantage.std()).exp().clamp(max=3)
    error = (past["action"] - agent.actor(past["obs"])).square().sum(1)
    gradient(agent, 0.5 * (weight / weight.mean() * error).mean())
    expected = [p.grad.clone() for p in agent.actor.parameters()]
    gradient(agent, ppo_hterm.hamiltonian_term(agent, past))
    torch.testing.assert_close([p.grad for p in agent.actor.parameters()], expected)


def test_the_control_is_the_term_of_steps_that_are_all_alike():
    """Where every advantage is 0, all weights are 1."""
    agent, _ = make_agent()
    past = random_past()
    with torch.no_grad():
        alike = past | {"returns": agent.value(past["obs"])}
    terms = [f(agent, alike) for f in (uniform_term, ppo_hterm.hamiltonian_term)]
    torch.testing.assert_close(*terms)
    assert uniform_term(agent, past) != ppo_hterm.hamiltonian_term(agent, past)


def test_an_update_is_one_step_along_the_sum_of_both_losses():
    """And the newest rollout is in the memory by then."""
    options = {"epochs": 1, "minibatch_size": 20, "hterm_coef": 0.5}
    agent, args = make_agent(**options)
    rollout, given = random_rollout(args), {}

    def learn(agent, optimizer, batch, past, args):
        given.update(batch=batch, past=past)
        assert len(memory) == 20 and torch.equal(memory.data["reward"][:4], rollout["reward"])
        return ppo_hterm.gradient_step(agent, optimizer, batch, past, args)

    memory = make_memory(rollout, args)
    optimizer = torch.optim.SGD(agent.parameters(), 0.0)
    agent.hterm_coef.fill_(0.8 * args.hterm_coef)
    logged = ppo_hterm.update(agent, optimizer, rollout, memory, learn, args)
    found = [p.grad.clone() for p in agent.parameters()]
    agent.normalizer.count.zero_()
    base = ppo_hterm.ppo_loss(agent, given["batch"], args)[0]
    base = torch.autograd.grad(base, list(agent.parameters()))
    added = ppo_hterm.hamiltonian_term(agent, given["past"])
    assert logged["hamiltonian"].item() == pytest.approx(added.item())
    added = torch.autograd.grad(added, list(agent.parameters()), materialize_grads=True)
    both = [x + 0.5 * 0.8 * y for x, y in zip(base, added, strict=True)]
    norm = torch.nn.utils.get_total_norm(both)
    torch.testing.assert_close(logged["grad_norm"], norm)
    torch.testing.assert_close(found, [x * (0.5 / norm).clamp(max=1) for x in both])
    assert len(given["past"]["obs"]) == 10  # half a minibatch


@pytest.mark.parametrize("form", ["setback", "better"])
def test_the_other_forms_act_on_what_is_worse_or_keep_what_is_better(form):
    """Mean returns 10, 20, 5, 30: Ḡ is 10, 11, 10.4 (a setback), 12.36."""
    _, args = make_agent(epochs=1, minibatch_size=20)
    args = hterm_forms.Args(**vars(args), form=form)
    agent = hterm_forms.Agent(OBS, BOX, args)
    rollout = random_rollout(args)
    memory, optimizer = make_memory(rollout, args), torch.optim.SGD(agent.parameters(), 0.0)
    weights, sizes = [], []
    for mean_return in (10.0, 20.0, 5.0, 30.0):
        rollout["episode_return"] = torch.full_like(rollout["reward"], mean_return)
        agent.hterm_coef.fill_(0.5)
        hterm_forms.update(agent, optimizer, rollout, memory, ppo_hterm.gradient_step, args)
        weights.append(agent.hterm_coef.item())
        sizes.append(len(memory) // 20)
    assert weights == ([0, 0, 0.5, 0] if form == "setback" else [0.5] * 4)
    assert sizes == ([1, 2, 3, 4] if form == "setback" else [1, 2, 2, 3])


def test_the_smallest_minibatch_leaves_finite_weights(tmp_path):
    options = TINY | {"minibatch_size": 2, "total_steps": 128, "run_dir": str(tmp_path)}
    ppo_hterm.train(ppo_hterm.Args(**options))
    agent = torch.load(tmp_path / "last.pt", weights_only=True)["agent"]
    assert all(x.isfinite().all() for x in agent.values())


def test_settings_are_ppos():
    for env, tuned in ppo_hterm.TUNED.items():
        assert tuned == ppo.TUNED[env], env


def test_the_weight_of_the_term_falls_to_zero(tmp_path, monkeypatch):
    update, seen = ppo_hterm.update, []
    monkeypatch.setattr(
        ppo_hterm,
        "update",
        lambda *inputs: seen.append(inputs[0].hterm_coef.item()) or update(*inputs),
    )
    ppo_hterm.train(ppo_hterm.Args(**TINY | {"total_steps": 1024, "run_dir": str(tmp_path)}))
    np.testing.assert_allclose(seen, ppo_hterm.Args.hterm_coef * (1 - np.arange(16) / 16))


def test_resume_is_bit_identical_with_a_full_memory(tmp_path, monkeypatch):
    tiny = {**TINY, "hterm_memory": 3}
    ours, theirs = both_checkpoints(ppo_hterm, tiny, 7, tmp_path, monkeypatch)
    assert all(torch.equal(x, theirs["agent"][name]) for name, x in ours["agent"].items())
    memories = ours["memory"], theirs["memory"]
    assert [m["rows"] for m in memories] == [48, 48]
    for name, x in memories[0]["data"].items():
        assert torch.equal(x, memories[1]["data"][name]), name
