"""The mathematics of pqn.py, dqn.py, d3qn.py and sac_discrete.py against numpy; kill and resume."""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from test_offpolicy import NoEvaluator
from test_runs import (
    ROOT,
    finish,
    kill,
    load,
    nothing_is_left_running,  # noqa: F401  (a fixture of every test here)
    pause,
    same,
    start_command,
    wait_for_pause,
)

from algos import d3qn, dqn, pqn, sac_discrete, worker_learner
from algos.worker_learner import UserError, Workers, flatten, gradient_of

OBS = gymnasium.spaces.Box(-np.inf, np.inf, (5,))
ACTIONS = gymnasium.spaces.Discrete(3)
HIDDEN, SIZE = 7, 12


def make_agent(module, **options):
    torch.manual_seed(0)
    args = module.Args(hidden_size=HIDDEN, num_envs=4, **options)
    agent = module.Agent(OBS, ACTIONS, args).double()
    with torch.no_grad():  # away from the special values of initialisation
        for parameter in agent.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    agent.normalizer.mean.fill_(0.1)
    agent.normalizer.var.fill_(1.7)
    return agent, args


def random_batch():
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "obs": normal(SIZE, 5),
        "next_obs": normal(SIZE, 5),
        "action": torch.randint(3, (SIZE,), generator=generator),
        "reward": normal(SIZE),
        "returns": normal(SIZE),
        "terminated": torch.rand(SIZE, generator=generator) < 0.3,
        "discount": torch.tensor([0.9, 0.81, 0.729], dtype=torch.float64).repeat(SIZE // 3),
        "weight": torch.rand(SIZE, generator=generator, dtype=torch.float64),
    }


# The same once more, in numpy and float64, from nothing but the flat weights.


def cut(weights, *shapes):
    """A flat vector into arrays of these shapes."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    assert sum(sizes) == len(weights)
    parts = np.split(weights, np.cumsum(sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def normalized(batch, name="obs"):
    return (batch[name].numpy() - 0.1) / np.sqrt(1.7 + 1e-8)


def network(x, weights, outputs):
    shapes = (HIDDEN, 5), (HIDDEN,), (HIDDEN, HIDDEN), (HIDDEN,), (outputs, HIDDEN), (outputs,)
    w1, b1, w2, b2, w3, b3 = cut(weights, *shapes)
    return np.maximum(np.maximum(x @ w1.T + b1, 0) @ w2.T + b2, 0) @ w3.T + b3


def dueling_network(x, weights, _=None):
    output = network(x, weights, 4)
    q = np.empty((len(x), 3))
    for a in range(3):
        q[:, a] = output[:, 0] + output[:, 1 + a] - output[:, 1:].sum(1) / 3
    return q


def layer_norm_network(x, weights, _=None):
    block = ((HIDDEN, HIDDEN), (HIDDEN,), (HIDDEN,), (HIDDEN,))
    shapes = ((HIDDEN, 5), *block[1:], *block, (3, HIDDEN), (3,))
    *blocks, last, bias = cut(weights, *shapes)
    for w, b, gain, shift in (blocks[:4], blocks[4:]):
        x = x @ w.T + b
        x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
        x = np.maximum(x * gain + shift, 0)
    return x @ last.T + bias


def huber(error):
    return np.where(np.abs(error) <= 1, 0.5 * error**2, np.abs(error) - 0.5)


def flat(module, gradient=False):
    tensors = [p.grad if gradient else p.detach() for p in module.parameters()]
    return torch.cat([tensor.flatten() for tensor in tensors]).numpy().copy()


def assert_gradient(module, loss, reference):
    """loss.backward() gives the slopes of `reference` (flat weights → number), and its value."""
    weights = flat(module)
    np.testing.assert_allclose(loss.item(), reference(weights), rtol=1e-12)
    loss.backward()
    gradient, step = flat(module, gradient=True), 1e-6
    assert np.abs(gradient).max() > 0.01
    for index in range(len(weights)):
        above, below = weights.copy(), weights.copy()
        above[index] += step
        below[index] -= step
        slope = (reference(above) - reference(below)) / (2 * step)
        np.testing.assert_allclose(gradient[index], slope, atol=1e-6)


def test_gradient_of_pqn():
    agent, _ = make_agent(pqn)
    batch = random_batch()
    action, returns = batch["action"].numpy(), batch["returns"].numpy()

    def reference(weights):
        q = layer_norm_network(batch["obs"].numpy(), weights)[np.arange(SIZE), action]
        return 0.5 * np.mean((q - returns) ** 2)

    assert_gradient(agent, pqn.q_loss(agent, batch)[0], reference)


@pytest.mark.parametrize("module", [dqn, d3qn])
def test_gradient_of_dqn_and_d3qn(module, monkeypatch):
    agent, args = make_agent(module)
    batch = random_batch()
    action, target = batch["action"].numpy(), batch["returns"].numpy()
    weight = batch["weight"].numpy() if module is d3qn else 1.0
    predict = dueling_network if module is d3qn else network
    error = predict(normalized(batch), flat(agent), 3)[np.arange(SIZE), action] - target
    assert 2 <= np.sum(np.abs(error) > 1) <= SIZE - 2  # both branches of h are seen

    def reference(weights):
        q = predict(normalized(batch), weights, 3)[np.arange(SIZE), action]
        return np.mean(weight * huber(q - target))

    monkeypatch.setattr(module, "td_target", lambda *arguments: torch.tensor(target))
    loss, _, *td_error = module.q_loss(agent, None, batch, args)
    if module is d3qn:  # what the priorities are made of
        np.testing.assert_allclose(td_error[0].detach(), np.abs(error), rtol=1e-9)
    assert_gradient(agent, loss, reference)


@pytest.mark.parametrize("case", ["dqn", "double dqn", "d3qn"])
def test_td_target(case):
    """y = r + γⁿ (1 − terminated) Q̄(s', a'), a' chosen by Q̄, or by Q where it is double."""
    module = d3qn if case == "d3qn" else dqn
    agent, args = make_agent(module, **({"double_q": True} if case == "double dqn" else {}))
    target_network = copy.deepcopy(agent.q_network)
    with torch.no_grad():
        for parameter in target_network.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    batch, predict = random_batch(), dueling_network if module is d3qn else network
    ours = predict(normalized(batch, "next_obs"), flat(agent), 3)
    slow = predict(normalized(batch, "next_obs"), flat(target_network), 3)
    assert (ours.argmax(1) != slow.argmax(1)).any(), "this batch cannot tell them apart"
    expected = batch["reward"].numpy().copy()
    for i in range(SIZE):
        if not batch["terminated"][i]:
            best = np.argmax(slow[i] if case == "dqn" else ours[i])
            expected[i] += batch["discount"][i].item() * slow[i, best]
    np.testing.assert_allclose(module.td_target(agent, target_network, batch, args), expected)


def test_dueling_identity():
    """The mean of Q over the actions is V, and what is left is A without its mean."""
    agent, _ = make_agent(d3qn)
    x = random_batch()["obs"]
    both = network(x.numpy(), flat(agent), 4)
    q = agent.q_network(x).detach().numpy()
    np.testing.assert_allclose(q.mean(1), both[:, 0], rtol=1e-9)
    np.testing.assert_allclose(np.diff(q, axis=1), np.diff(both[:, 1:], axis=1), rtol=1e-9)


def test_lambda_returns_against_their_definition():
    """G = (1 − λ) Σ_n λ^{n−1} G⁽ⁿ⁾ of n-step returns, the last of which has the rest of the weight.

    It ends where the episode or the rollout does: terminated is worth nothing more, truncated the
    value of its true last observation.
    """
    rng = np.random.default_rng(0)
    steps, envs, discount, decay = 17, 6, 0.9, 0.8
    reward, next_value = rng.normal(size=(2, steps, envs))
    terminated, truncated = rng.random((2, steps, envs)) < 0.15
    done = terminated | truncated
    expected = np.zeros((steps, envs))
    for env in range(envs):
        for t in range(steps):
            rewards, weight = 0.0, 1.0
            for n, k in enumerate(range(t, steps)):
                rewards += discount**n * reward[k, env]
                value = 0.0 if terminated[k, env] else next_value[k, env]
                n_step_return = rewards + discount ** (n + 1) * value
                last = done[k, env] or k == steps - 1
                expected[t, env] += weight * (1 if last else 1 - decay) * n_step_return
                weight *= decay
                if last:
                    break
    args = pqn.Args(discount=discount, q_lambda=decay)
    tensors = [torch.tensor(x) for x in (reward, next_value, terminated, done)]
    np.testing.assert_allclose(pqn.lambda_returns(*tensors, args), expected, atol=1e-12)


def test_pqn_bootstraps_from_the_best_action_at_the_true_next_observation():
    agent, args = make_agent(pqn)
    names = ("obs", "next_obs", "action", "reward", "terminated")
    rollout = {name: random_batch()[name].unflatten(0, (4, 3)) for name in names}
    rollout["done"] = rollout["terminated"] | (torch.arange(3) == 1)
    prepared = pqn.prepare(agent, rollout, args)
    q = layer_norm_network(normalized(random_batch(), "next_obs"), flat(agent))
    value = torch.tensor(q.max(1)).view(4, 3)
    ends = rollout["terminated"], rollout["done"]
    expected = pqn.lambda_returns(rollout["reward"], value, *ends, args).flatten()
    torch.testing.assert_close(prepared["returns"], expected)
    torch.testing.assert_close(prepared["obs"], torch.tensor(normalized(random_batch())))


def test_d3qn_tells_the_buffer_how_wrong_each_transition_was():
    agent, args = make_agent(d3qn)
    target, told = copy.deepcopy(agent.q_network), []
    batch = random_batch() | {"index": torch.arange(SIZE) + 7}
    _, _, error = d3qn.q_loss(agent, target, batch, args)
    optimizer = torch.optim.SGD([flatten(agent)], 1e-3)
    replay = SimpleNamespace(sample=lambda size: batch, update_priorities=lambda *x: told.extend(x))
    d3qn.update(agent, target, optimizer, replay, gradient_of(d3qn.q_loss, agent), args)
    assert torch.equal(told[0], batch["index"])
    torch.testing.assert_close(told[1], error.detach())


def sac_parts(weights):
    """log α, the actor's weights, and the critics': (2, inputs, outputs) and (2, 1, outputs)."""
    shapes = [(2, 5, HIDDEN), (2, HIDDEN, HIDDEN), (2, HIDDEN, 3)]
    shapes += [(2, 1, HIDDEN), (2, 1, HIDDEN), (2, 1, 3)]
    critics = sum(int(np.prod(shape)) for shape in shapes)
    return weights[0], weights[1:-critics], cut(weights[-critics:], *shapes)


def critic(x, parts, i):
    w1, w2, w3, b1, b2, b3 = (part[i] for part in parts)
    return np.maximum(np.maximum(x @ w1 + b1, 0) @ w2 + b2, 0) @ w3 + b3


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


def test_gradient_of_discrete_sac(monkeypatch):
    agent, args = make_agent(sac_discrete)
    agent.target_entropy.fill_(0.5)
    batch, target = random_batch(), random_batch()["returns"]
    x, action = normalized(batch), batch["action"].numpy()
    frozen_log_alpha, frozen_actor, frozen_critics = sac_parts(flat(agent))

    def reference(weights):
        log_alpha, actor, critics = sac_parts(weights)
        total = 0.0
        for i in range(2):
            q = critic(x, critics, i)[np.arange(SIZE), action]
            total += 0.5 * np.mean((q - target.numpy()) ** 2)
        probs, q = softmax(network(x, actor, 3)), [critic(x, frozen_critics, i) for i in range(2)]
        for a in range(3):
            cost = np.exp(frozen_log_alpha) * np.log(probs[:, a]) - np.minimum(*q)[:, a]
            total += np.mean(probs[:, a] * cost)
        probs = softmax(network(x, frozen_actor, 3))
        entropy = -np.mean(np.sum(probs * np.log(probs), 1))
        return total + log_alpha * (entropy - 0.5 * np.log(3))

    monkeypatch.setattr(sac_discrete, "critic_target", lambda *arguments: target)
    assert_gradient(agent, sac_discrete.sac_loss(agent, None, batch, args)[0], reference)


def test_target_of_discrete_sac_is_what_samples_converge_to():
    """Σ_a π(a|s') [...] is the mean of [...] over actions drawn by Gumbel noise."""
    agent, _ = make_agent(sac_discrete)
    target_critics, batch = copy.deepcopy(agent.critics), random_batch()
    with torch.no_grad():
        for parameter in target_critics.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    batch = {name: value[:2].repeat_interleave(40_000, 0) for name, value in batch.items()}
    batch["terminated"][:] = False
    noise = -torch.empty(80_000, 3).exponential_().log()
    action = agent(batch["next_obs"], noise).numpy()
    log_alpha, actor, _ = sac_parts(flat(agent))
    *_, critics = sac_parts(np.concatenate([flat(agent)[:1], actor, flat(target_critics)]))
    x, rows = normalized(batch, "next_obs"), np.arange(80_000)
    q = np.minimum(critic(x, critics, 0), critic(x, critics, 1))[rows, action]
    log_prob = np.log(softmax(network(x, actor, 3)))[rows, action]
    drawn = batch["reward"] + batch["discount"] * torch.tensor(q - np.exp(log_alpha) * log_prob)
    exact = sac_discrete.critic_target(agent, target_critics, batch)
    for one in (slice(0, 40_000), slice(40_000, None)):
        error = 6 * (drawn[one].std() / 200).item()
        assert drawn[one].mean().item() == pytest.approx(exact[one][0].item(), abs=error)
        assert drawn[one].std() > 0.01 and exact[one].std() < 1e-9
    batch["terminated"][:] = True
    exact = sac_discrete.critic_target(agent, target_critics, batch)
    torch.testing.assert_close(exact, batch["reward"])


@pytest.mark.parametrize("module", [pqn, dqn, d3qn])
def test_epsilon_falls_linearly_and_stays(module):
    args = module.Args(total_steps=1000, exploration_fraction=0.5, final_epsilon=0.2)
    for step, epsilon in ((0, 1.0), (250, 0.6), (499, 0.2016), (500, 0.2), (900, 0.2)):
        assert module.epsilon_at(step, args) == pytest.approx(epsilon)
    args = module.Args(total_steps=1000, exploration_fraction=0.0, final_epsilon=0.2)
    assert module.epsilon_at(1, args) == 0.2


def test_target_entropy_falls_linearly_and_stays():
    args = sac_discrete.Args(total_steps=1000, exploration_fraction=0.5, target_entropy=0.38)
    for step, entropy in ((0, 0.98), (250, 0.68), (500, 0.38), (900, 0.38)):
        assert sac_discrete.target_entropy_at(step, args) == pytest.approx(entropy)


class Corridor:
    """An environment that only says where it is; 300 of them at once."""

    device, obs = torch.device("cpu"), torch.randn(300, 5, dtype=torch.float64)

    def step(self, action):
        nothing, zeros = torch.zeros(300, dtype=torch.bool), torch.zeros(300)
        info = {"final_obs": self.obs, "episode_return": zeros, "episode_length": zeros}
        return self.obs, zeros, nothing, nothing, info


def empty_rollout():
    names = ("reward", "terminated", "done", "episode_return", "episode_length", "kept")
    rollout = {name: torch.zeros(100, 300) for name in names}
    rollout |= {"obs": torch.zeros(100, 300, 5), "next_obs": torch.zeros(100, 300, 5)}
    return rollout | {"action": torch.zeros(100, 300, dtype=torch.int64)}


@pytest.mark.parametrize("module", [pqn, dqn, d3qn])
def test_actions_are_random_with_probability_epsilon(module):
    agent, _ = make_agent(module)
    rollout = empty_rollout()
    for epsilon in (0.0, 0.3, 1.0):
        agent.epsilon.fill_(epsilon)
        module.collect(agent, Corridor(), rollout)
        best = (rollout["action"] == agent(Corridor.obs)).double().mean().item()
        assert best == pytest.approx(1 - epsilon * 2 / 3, abs=6 * 0.5 / 30_000**0.5)  # 6 sigma
    counts = torch.bincount(rollout["action"].flatten(), minlength=3) / 30_000
    assert (counts - 1 / 3).abs().max() < 6 * 0.5 / 30_000**0.5


@pytest.mark.parametrize("module", [dqn, d3qn])
def test_random_actions_are_kept(module):
    """A part ε of all steps is random, in runs of the mean length L, also across rollouts."""
    agent, _ = make_agent(module, exploration_length=5.0)
    agent.epsilon.fill_(0.4)
    rollout, kept = empty_rollout(), []
    for _ in range(3):
        module.collect(agent, Corridor(), rollout)
        kept.append(rollout["kept"].clone())
        best = agent(Corridor.obs).expand(100, 300)
        expected = torch.where(kept[-1] > 0, kept[-1].long() - 1, best)
        assert torch.equal(rollout["action"], expected)
    kept = torch.cat(kept[1:])  # the first begins without any
    assert (kept > 0).double().mean().item() == pytest.approx(0.4, abs=0.03)
    changes = kept[1:] != kept[:-1]
    # of those that are random, 1/5 end; a third of the starts that follow at once have the same
    begin = 0.4 / (0.4 + 5 * 0.6)
    differs = 1 / 5 * (1 - begin / 3)
    assert changes[kept[:-1] > 0].double().mean().item() == pytest.approx(differs, abs=0.01)
    seam = kept[99] > 0  # the last of one rollout, the first of the next
    assert changes[99][seam].double().mean().item() == pytest.approx(differs, abs=0.2)


@pytest.mark.parametrize("length", [1.0, 5.0])
def test_noise_of_discrete_sac_is_kept(length):
    """Each draw is one from π; the noise changes after L steps in the mean, across rollouts too."""
    agent, _ = make_agent(sac_discrete, exploration_length=length)
    rollout, noise = empty_rollout() | {"noise": torch.zeros(100, 300, 3)}, []
    counts = torch.zeros(300, 3)
    for number in range(12):
        sac_discrete.collect(agent, Corridor(), rollout)
        logits = agent.actor(agent.normalizer(Corridor.obs))
        assert torch.equal(rollout["action"], (logits + rollout["noise"]).argmax(-1))
        noise.append(rollout["noise"].clone())
        if number > 1:  # the first draw may be long in coming
            counts += torch.nn.functional.one_hot(rollout["action"], 3).sum(0)
    probs = logits.softmax(-1)
    error = (probs * (1 - probs) * (2 * length - 1) / 1000).sqrt()  # of draws kept for L steps
    assert ((counts / 1000 - probs).abs() < 6 * error + 0.01).all()
    assert (counts.mean(0) / 1000 - probs.mean(0)).abs().max() < 0.01
    noise = torch.cat(noise[2:])
    changes = (noise[1:] != noise[:-1]).any(-1).double()
    assert changes.mean().item() == pytest.approx(1 / length, abs=0.01)
    assert changes[99::100].mean().item() == pytest.approx(1 / length, abs=0.06)  # the seams


def test_worker_processes_see_epsilon():
    args = dqn.Args(num_envs=2, num_workers=1, device="cpu")
    run = SimpleNamespace(args=args, device=torch.device("cpu"), check_rollout=lambda _: None)
    workers = Workers(run, dqn.collect)
    agent = dqn.Agent(workers.observation_space, workers.action_space, args)
    workers.start(agent, 50, kept=())
    for epsilon, low, high in ((0.0, 1.0, 1.0), (1.0, 0.2, 0.8)):
        agent.epsilon.fill_(epsilon)
        rollout = workers.collect()
        best = (rollout["action"] == agent(rollout["obs"])).float().mean().item()
        assert low <= best <= high  # 0.2 and 0.8 are 6 standard errors away from 0.5
    workers.close()


@pytest.mark.parametrize("module", [pqn, dqn, d3qn, sac_discrete])
def test_continuous_actions_are_an_error_that_names_other_scripts(module, tmp_path):
    args = module.Args(env="Pendulum", run_dir=str(tmp_path / "run"), device="cpu")
    with pytest.raises(UserError, match=r"--env Pendulum has continuous actions.*ppo\.py") as e:
        module.train(args)
    assert "\n" not in str(e.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize("script", [dqn, d3qn, sac_discrete])
def test_what_train_does_with_the_target_and_the_buffer(script, tmp_path, monkeypatch):
    """θ̄ ← θ̄ + τ (θ − θ̄) after each update; n, γ and (d3qn) β as they should be."""
    exponents, following = [], []

    def vector(network):
        return torch.nn.utils.parameters_to_vector(network.parameters()).detach().clone()

    def watched(agent, target, optimizer, replay, *rest, original=script.update):
        before = vector(target)
        assert not following or torch.equal(following.pop(), before)
        assert replay.n_step == 2 and replay._powers[1].item() == pytest.approx(0.9)
        exponents.append(replay.importance_exponent)
        losses = original(agent, target, optimizer, replay, *rest)
        ours = vector(agent.critics if script is sac_discrete else agent.q_network)
        following.append(before.lerp(ours, 0.3))
        return losses

    monkeypatch.setattr(worker_learner, "Evaluator", NoEvaluator)
    monkeypatch.setattr(script, "update", watched)
    script.train(script.Args(
        env="CartPole", num_envs=2, total_steps=100, warmup_steps=20, hidden_size=8, polyak=0.3,
        n_step=2, discount=0.9, eval_every=0, device="cpu", run_dir=str(tmp_path / "run"),
    ))  # fmt: skip
    assert len(exponents) > 10
    assert script is not d3qn or exponents[0] < 0.6 < 0.95 < exponents[-1]


def test_weights_that_are_no_numbers_are_not_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_learner, "Evaluator", NoEvaluator)
    with pytest.raises(UserError, match=r"q_network.* has NaN or infinity at step 100"):
        dqn.train(dqn.Args(
            env="CartPole", num_envs=1, total_steps=300, warmup_steps=30, hidden_size=8,
            learning_rate=1e30, checkpoint_every=100, device="cpu", run_dir=str(tmp_path / "run"),
        ))  # fmt: skip
    assert not list((tmp_path / "run").glob("checkpoint*"))


REPLAY = "--n-step 3 --batch-size 16 --buffer-size 1500 --warmup-steps 300 --log-every 99"
TINY = (
    "--env CartPole --seed 3 --num-envs 4 --hidden-size 8 --total-steps 3000 "
    "--checkpoint-every 700 --eval-every 0 --eval-episodes 2"
)
FLAGS = {
    "pqn": "--horizon 16 --minibatch-size 32 --epochs 1",
    "dqn": f"{REPLAY} --double-q --target-every 7 --polyak 0.5 --exploration-length 9",
    "d3qn": f"{REPLAY} --horizon 4",
    "sac_discrete": f"{REPLAY} --exploration-length 9",
}


def test_resume_after_sigkill_is_bit_identical(tmp_path):
    """Of each script two runs, of which one is killed after its first checkpoint, and resumed."""

    def compare(script: str) -> None:
        python = [sys.executable, str(ROOT / "algos" / f"{script}.py")]
        flags = f"{TINY} {FLAGS[script]}"
        folders = [tmp_path / script / "undisturbed", tmp_path / script / "killed"]
        runs = [
            start_command([*python, *flags.split(), "--run-dir", folder], folder, sabotage)
            for folder, sabotage in zip(folders, ("", pause(1)), strict=True)
        ]
        wait_for_pause(runs[1])
        kill(runs[1])
        finish(runs[1], -9)
        finish(start_command([*python, "--resume", folders[1]], folders[1]))
        finish(runs[0])
        ours, theirs = load(folders[1]), load(folders[0])
        assert ours.keys() == theirs.keys() and ours["run"]["step"] >= 3000
        replay = {"replay", "target"} if script != "pqn" else set()
        for name in {"agent", "optimizer", "workers"} | replay:
            assert same(ours[name], theirs[name]), (script, name)
        assert same(ours["run"]["random"], theirs["run"]["random"]), script

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compare, FLAGS))
