"""The equations of pqn.py, dqn.py, d3qn.py and sac_discrete.py against numpy; kill and resume."""

import copy

import gymnasium
import numpy as np
import pytest
import torch
from test_offpolicy import NoEvaluator, resume_of, run_of
from test_runs import load, same
from test_workers import fake_run

from algos import d3qn, dqn, pqn, sac_discrete, worker_learner
from algos.worker_learner import ReplayBuffer, UserError, Workers

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
    layers = (HIDDEN, 5), (HIDDEN,), (HIDDEN, HIDDEN), (HIDDEN,)
    w1, b1, w2, b2, w_v, b_v, w_a, b_a = cut(weights, *layers, (1, HIDDEN), (1,), (3, HIDDEN), (3,))
    x = np.maximum(np.maximum(x @ w1.T + b1, 0) @ w2.T + b2, 0)
    value, advantage = x @ w_v.T + b_v, x @ w_a.T + b_a
    q = np.empty((len(x), 3))
    for a in range(3):
        q[:, a] = value[:, 0] + advantage[:, a] - advantage.sum(1) / 3
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


def make_target(agent):
    target = copy.deepcopy(agent.q_network).requires_grad_(False)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return target


def reference_target(module, agent, target, batch):
    """y = r + γⁿ (1 − terminated) Q̄(s', a'), a' chosen by Q̄ (dqn.py) or by Q (d3qn.py)."""
    predict = dueling_network if module is d3qn else network
    ours = predict(normalized(batch, "next_obs"), flat(agent), 3)
    slow = predict(normalized(batch, "next_obs"), flat(target), 3)
    assert (ours.argmax(1) != slow.argmax(1)).any(), "this batch cannot tell them apart"
    y = batch["reward"].numpy().copy()
    for i in range(SIZE):
        if not batch["terminated"][i]:
            best = np.argmax(ours[i] if module is d3qn else slow[i])
            y[i] += batch["discount"][i].item() * slow[i, best]
    return y


@pytest.mark.parametrize("module", [dqn, d3qn])
def test_gradient_of_dqn_and_d3qn(module):
    agent, _ = make_agent(module)
    target, batch = make_target(agent), random_batch()
    action, weight = batch["action"].numpy(), batch["weight"].numpy()
    y = reference_target(module, agent, target, batch)
    predict = dueling_network if module is d3qn else network
    q = predict(normalized(batch), flat(agent), 3)[np.arange(SIZE), action]
    assert 2 <= np.sum(np.abs(q - y) > 1) <= SIZE - 2  # both branches of h are seen

    def reference(weights):
        q = predict(normalized(batch), weights, 3)[np.arange(SIZE), action]
        return np.mean(weight * huber(q - y))

    loss, value, td_error = module.q_loss(agent, target, batch)
    np.testing.assert_allclose(value, q, rtol=1e-9)
    np.testing.assert_allclose(td_error, q - y, rtol=1e-9)  # what the priorities are made of
    assert_gradient(agent, loss, reference)


@pytest.mark.parametrize("module", [dqn, d3qn])
def test_update_is_one_clipped_step_and_a_soft_update(module):
    agent, args = make_agent(module, tau=0.3, max_grad_norm=0.05)
    target, batch = make_target(agent), random_batch()
    ours, slow = flat(agent), flat(target)
    loss, _, td_error = module.q_loss(agent, target, batch)
    loss.backward()
    gradient = flat(agent, gradient=True)
    norm = np.linalg.norm(gradient)
    assert norm > 0.05
    optimizer = torch.optim.SGD(agent.parameters(), 1.0)
    logged, errors = module.update(agent, target, optimizer, batch, args)
    ours = ours - gradient * 0.05 / norm
    np.testing.assert_allclose(flat(agent), ours, atol=1e-6)
    np.testing.assert_allclose(flat(target), slow + 0.3 * (ours - slow), atol=1e-6)
    torch.testing.assert_close(errors, td_error)
    assert logged["grad_norm"].item() == pytest.approx(norm)


def test_a_step_of_pqn_is_clipped():
    agent, args = make_agent(pqn, max_grad_norm=0.05)
    pqn.q_loss(agent, random_batch())[0].backward()
    ours, gradient = flat(agent), flat(agent, gradient=True)
    norm = np.linalg.norm(gradient)
    assert norm > 0.05
    optimizer = torch.optim.SGD(agent.parameters(), 1.0)
    logged = pqn.gradient_step(agent, optimizer, random_batch(), args)
    np.testing.assert_allclose(flat(agent), ours - gradient * 0.05 / norm, atol=1e-6)
    assert logged["grad_norm"].item() == pytest.approx(norm)


def test_dueling_identity():
    """The mean of Q over the actions is V, and what is left is A without its mean."""
    agent, _ = make_agent(d3qn)
    x = random_batch()["obs"]
    q_network = agent.q_network
    q, features = q_network(x), q_network.features(x)
    value, advantage = q_network.value(features).squeeze(-1), q_network.advantage(features)
    torch.testing.assert_close(q.mean(1), value)
    torch.testing.assert_close(q.diff(dim=1), advantage.diff(dim=1))


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
    args = pqn.Args(gamma=discount, q_lambda=decay)
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


def sac_parts(weights):
    """log α; the weights of the actor, of Q_1 and of Q_2."""
    return weights[0], *np.split(weights[1:], 3)


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


def discrete_sac():
    agent, args = make_agent(sac_discrete)
    agent.target_entropy.fill_(0.5)
    target = copy.deepcopy(agent.critics).requires_grad_(False)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return agent, target, args


def test_gradient_of_discrete_sac():
    """Of the three losses together: of each weight only the one that it is there for."""
    agent, target, _ = discrete_sac()
    batch = random_batch()
    x, action, weight = normalized(batch), batch["action"].numpy(), batch["weight"].numpy()
    log_alpha, *frozen = sac_parts(flat(agent))
    next_x, slow = normalized(batch, "next_obs"), np.split(flat(target), 2)
    probs = softmax(network(next_x, frozen[0], 3))
    next_q = np.minimum(*(network(next_x, w, 3) for w in slow))
    y = batch["reward"].numpy().copy()
    for i in range(SIZE):
        for a in range(3):
            value = probs[i, a] * (next_q[i, a] - np.exp(log_alpha) * np.log(probs[i, a]))
            y[i] += 0 if batch["terminated"][i] else batch["discount"][i].item() * value

    def reference(weights):
        learned_log_alpha, actor, *critics = sac_parts(weights)
        total = 0.0
        for w in critics:
            q = network(x, w, 3)[np.arange(SIZE), action]
            total += 0.5 * np.mean(weight * (q - y) ** 2)
        probs, q = softmax(network(x, actor, 3)), [network(x, w, 3) for w in frozen[1:]]
        for a in range(3):
            cost = np.exp(log_alpha) * np.log(probs[:, a]) - np.minimum(*q)[:, a]
            total += np.mean(probs[:, a] * cost)
        probs = softmax(network(x, frozen[0], 3))
        entropy = -np.mean(np.sum(probs * np.log(probs), 1))
        return total + learned_log_alpha * (entropy - 0.5 * np.log(3))

    q_loss, td_error = sac_discrete.critic_loss(agent, target, batch)
    policy_loss, entropy = sac_discrete.actor_loss(agent, batch)
    loss = q_loss + policy_loss + sac_discrete.temperature_loss(agent, entropy)
    errors = [abs(network(x, w, 3)[np.arange(SIZE), action] - y) for w in frozen[1:]]
    np.testing.assert_allclose(td_error, np.maximum(*errors))
    assert_gradient(agent, loss, reference)


def test_target_of_discrete_sac_is_what_samples_converge_to():
    """Σ_a π(a|s') [...] is the mean of [...] over actions drawn from π."""
    agent, target, _ = discrete_sac()
    batch = {name: value[:1].expand(40_000, *value.shape[1:]) for name, value in
             random_batch().items()}  # fmt: skip
    batch["terminated"] = torch.zeros(40_000, dtype=torch.bool)
    x, next_x = (agent.normalizer(batch[name]) for name in ("obs", "next_obs"))
    with torch.no_grad():
        policy = agent.policy(next_x)
        action = policy.sample()
        q = torch.minimum(*target(next_x)).gather(-1, action.unsqueeze(-1)).squeeze(-1)
        q = q - agent.log_temperature.exp() * policy.log_prob(action)
        drawn = batch["reward"] + batch["discount"] * q
        for weight in agent.critics.parameters():
            weight.fill_(1)  # so large that |Q − y| = Q − y, and equal
        q = agent.critics(x)[0][0, batch["action"][0]]
        assert q > max(drawn.max(), batch["reward"][0])
        _, td_error = sac_discrete.critic_loss(agent, target, batch)
        exact = q - td_error
        error = 6 * (drawn.std() / 200).item()
        assert drawn.mean().item() == pytest.approx(exact[0].item(), abs=error)
        assert drawn.std() > 0.01 and exact.std() < 1e-9
        batch["terminated"] = ~batch["terminated"]
        _, td_error = sac_discrete.critic_loss(agent, target, batch)
        torch.testing.assert_close(q - td_error, batch["reward"])


def test_an_update_of_discrete_sac_is_a_step_of_each_network():
    """The actor's by the new critics; the temperature's by its own loss; the target's by τ.

    Twice: no gradient is left from the first update.
    """
    agent, target, args = discrete_sac()
    args.tau = 0.3
    ours, slow, batch = copy.deepcopy(agent), copy.deepcopy(target), random_batch()

    def descend(loss, parameters):
        gradients = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.data -= 0.1 * gradient

    def parts(agent):
        return [*agent.critics.parameters()], [*agent.actor.parameters(), agent.log_temperature]

    optimizers = [torch.optim.SGD(part, 0.1) for part in parts(agent)]
    for _ in range(2):
        sac_discrete.update(agent, target, optimizers, batch, args)
        critics, actor = parts(ours)
        descend(sac_discrete.critic_loss(ours, slow, batch)[0], critics)
        loss, entropy = sac_discrete.actor_loss(ours, batch)
        descend(loss + sac_discrete.temperature_loss(ours, entropy), actor)
        for theirs, own in zip(slow.parameters(), critics, strict=True):
            theirs.data.copy_(0.7 * theirs + 0.3 * own)
        np.testing.assert_allclose(flat(agent), flat(ours))
        np.testing.assert_allclose(flat(target), flat(slow))


def test_an_update_of_pqn_is_epochs_over_all_transitions():
    """Each in an order of its own, with the returns of the Q and the normaliser of before."""
    agent, args = make_agent(pqn, epochs=3, minibatch_size=5)
    names, seen = ("obs", "next_obs", "action", "reward", "terminated"), []
    rollout = {name: random_batch()[name].unflatten(0, (4, 3)) for name in names}
    rollout["done"] = rollout["terminated"]
    expected = pqn.prepare(agent, rollout, args)["returns"]

    def learn(agent, optimizer, batch, args):
        seen.append(batch["returns"])
        return pqn.gradient_step(agent, optimizer, batch, args)

    optimizer = torch.optim.SGD(agent.parameters(), 0.1)
    logged = pqn.update(agent, optimizer, rollout, learn, args)
    assert [len(returns) for returns in seen] == [5, 5, 2] * 3
    orders = torch.cat(seen).view(3, SIZE)
    assert torch.equal(orders.sort(1).values, expected.sort().values.expand(3, SIZE))
    assert len({tuple(order.tolist()) for order in orders}) == 3
    assert logged.keys() == {"q", "q_value", "grad_norm"}


@pytest.mark.parametrize("module", [pqn, dqn, d3qn])
def test_epsilon_falls_linearly_and_stays(module):
    args = module.Args(total_steps=1000, exploration_fraction=0.5, final_epsilon=0.2)
    for step, epsilon in ((0, 1.0), (250, 0.6), (499, 0.2016), (500, 0.2), (900, 0.2)):
        assert module.epsilon_at(step, args) == pytest.approx(epsilon)
    args = module.Args(total_steps=1000, exploration_fraction=0.0, final_epsilon=0.2)
    assert module.epsilon_at(1, args) == 0.2


def test_target_entropy_falls_linearly_and_stays():
    args = sac_discrete.Args(total_steps=1000, exploration_fraction=0.5, target_entropy_ratio=0.38)
    for step, entropy in ((0, 0.98), (250, 0.68), (500, 0.38), (900, 0.38)):
        assert sac_discrete.target_entropy_at(step, args) == pytest.approx(entropy)
    args.target_entropy_ratio = 1.0  # above the 0.98 where it begins
    assert sac_discrete.target_entropy_at(2000, args) == pytest.approx(1.0)


def test_no_action_is_repeated_before_the_first_one():
    """A rollout begins as zeros, and action 0 is one that nobody took."""
    args = sac_discrete.Args(num_envs=300, exploration_length=1e9, compile="none", device="cpu")
    workers = Workers(fake_run(args), sac_discrete.collect)
    agent = sac_discrete.Agent(workers.observation_space, workers.action_space, args)
    workers.start(agent, 1)
    assert 75 < workers.collect()["action"].sum() < 225
    first = workers.collect()["action"].clone()
    assert (workers.collect()["action"] == first).float().mean() > 0.8  # from then on they are


class Corridor:
    """An environment that only says where it is; 300 of them at once."""

    device, obs = torch.device("cpu"), torch.randn(300, 5, dtype=torch.float64)

    def step(self, action):
        nothing, zeros = torch.zeros(300, dtype=torch.bool), torch.zeros(300)
        info = {"final_obs": self.obs, "episode_return": zeros, "episode_length": zeros}
        return self.obs, zeros, nothing, nothing, info


def empty_rollout():
    names = ("reward", "episode_return", "episode_length", "random")
    rollout = {name: torch.zeros(100, 300) for name in names}
    rollout |= {name: torch.zeros(100, 300, dtype=torch.bool) for name in ("terminated", "done")}
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


def test_random_actions_are_repeated():
    """A part ε of all steps is random, in runs of the mean length L, also across rollouts."""
    agent, _ = make_agent(d3qn, exploration_length=5.0)
    agent.epsilon.fill_(0.4)
    rollout, random, action = empty_rollout(), [], []
    for _ in range(3):
        d3qn.collect(agent, Corridor(), rollout)
        random.append(rollout["random"].bool())
        action.append(rollout["action"].clone())
    best = agent(Corridor.obs).expand(300, 300)
    random, action = torch.cat(random), torch.cat(action)
    assert torch.equal(action[~random], best[~random])
    random, action = random[100:], action[100:]  # the first rollout begins without any
    assert random.double().mean().item() == pytest.approx(0.4, abs=0.03)
    counts = torch.bincount(action[random], minlength=3) / random.sum()
    assert (counts - 1 / 3).abs().max() < 0.05
    # of those that are random, 1/5 end; those that begin at once are a third the same action
    begin = 0.4 / (0.4 + 5 * 0.6)
    changes = ~random[1:] | (action[1:] != action[:-1])
    differs = 1 / 5 * (1 - begin / 3)
    assert changes[random[:-1]].double().mean().item() == pytest.approx(differs, abs=0.01)
    seam = random[99]  # the last of one rollout, the first of the next
    assert changes[99][seam].double().mean().item() == pytest.approx(differs, abs=0.15)


@pytest.mark.parametrize("steps", [1, 4])
def test_no_repetition_of_a_random_action_survives_its_episode(steps):
    class Ending(Corridor):
        """Episodes of 4 steps, the first of the even envs of 2."""

        lengths = 2 * (torch.arange(300) % 2 == 0)

        def step(self, action):
            self.lengths = self.lengths + 1
            obs, reward, no, _, info = super().step(action)
            truncated = self.lengths == 4
            self.lengths = torch.where(truncated, 0, self.lengths)
            return obs, reward, no, truncated, info

    agent, _ = make_agent(d3qn, exploration_length=1e9)  # a random action ends by the episode only
    envs, rollout = Ending(), {name: x[:steps] for name, x in empty_rollout().items()}
    agent.epsilon.fill_(1.0)  # all begin one
    d3qn.collect(agent, envs, rollout)
    random, done = [rollout["random"][-1].bool()], [rollout["done"][-1].clone()]
    assert random[0].all()
    agent.epsilon.fill_(0.0)  # and none begins again
    for _ in range(8 // steps):
        d3qn.collect(agent, envs, rollout)
        random += rollout["random"].bool()
        done += rollout["done"].clone()
    random, done = torch.stack(random), torch.stack(done)
    expected = ~(done.int().cumsum(0) - done.int()).bool()  # until the first end, and not after it
    assert torch.equal(random, expected) and not random[-1].any() and done[:-1].any(0).all()


@pytest.mark.parametrize("env", ["CartPole", "CartPole-v1"])
def test_repeated_actions_go_on_after_a_resume_where_the_episodes_do(env, tmp_path, monkeypatch):
    """CartPole goes on as saved, Gymnasium's CartPole-v1 begins new episodes."""
    last_step, first = [], []

    def watched(agent, envs, rollout, original=d3qn.collect):
        names = "random", "action", "done"
        first.append({name: rollout[name][-1].clone() for name in names})
        original(agent, envs, rollout)
        last_step.append({name: rollout[name][-1].clone() for name in names})

    monkeypatch.setattr(worker_learner.run, "Evaluator", NoEvaluator)
    monkeypatch.setattr(d3qn, "collect", watched)
    folder = tmp_path / "run"
    d3qn.train(d3qn.Args(
        env=env, num_envs=8, num_steps=2, total_steps=80, warmup_steps=80, final_epsilon=1.0,
        exploration_length=1e6, hidden_size=8, eval_every=0, compile="none", device="cpu",
        run_dir=str(folder),
    ))  # fmt: skip
    saved = last_step[-1]
    assert (saved["random"].bool() & ~saved["done"]).any()
    path = folder / "args.json"
    path.write_text(path.read_text().replace('"total_steps": 80', '"total_steps": 96'))
    first.clear()
    d3qn.train(d3qn.Args(resume=str(folder)))
    if env == "CartPole":
        assert same(first[0], saved)
    else:
        assert not first[0]["random"].any()


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("length", [1.0, 5.0])
def test_actions_of_discrete_sac_are_repeated(length, ends):
    """P(a_t) = ρ [a_t = a_{t−1}] + (1 − ρ) π(a_t), ρ = (1 − 1/L) π(a_{t−1}) / max π, in an episode.

    Also at the first step of a rollout, after the last of the one before.
    """

    class Ending(Corridor):
        def step(self, action):
            obs, reward, no, _, info = super().step(action)
            return obs, reward, no, ~no if ends else no, info

    agent, _ = make_agent(sac_discrete, exploration_length=length)
    rollout, actions = empty_rollout(), []
    for _ in range(10):
        sac_discrete.collect(agent, Ending(), rollout)
        actions.append(rollout["action"].clone())
    with torch.no_grad():
        probs = agent.policy(agent.normalizer(Corridor.obs)).probs.expand(1000, -1, -1)
    actions = torch.nn.functional.one_hot(torch.cat(actions), 3)
    before, now, probs = actions[99:-1], actions[100:], probs[100:]  # the first rollout only begins
    rho = (1 - 1 / length) * (probs * before).sum(-1, keepdim=True) / probs.amax(-1, keepdim=True)
    rho = 0 * rho if ends else rho
    expected = rho * before + (1 - rho) * probs
    for part in (before == 1, before == 0, probs > probs.median(), probs < probs.median()):
        for rows in (slice(None), slice(0, None, 100)):  # all steps, the first ones of rollouts
            error = (now - expected)[rows][part[rows]]
            assert len(error) > 500
            assert error.mean().abs() < 6 * 0.5 / len(error) ** 0.5
    assert length == 1 or ends or rho.mean() > 0.3


@pytest.mark.parametrize("module", [pqn, dqn, d3qn, sac_discrete])
def test_train_follows_the_schedule_and_normalises_what_it_saw(module, tmp_path, monkeypatch):
    """ε or H̄ of each rollout; afterwards the normaliser has seen every observation once."""
    used, seen = [], []

    def watched(agent, envs, rollout, original=module.collect):
        used.append((agent.target_entropy if module is sac_discrete else agent.epsilon).item())
        original(agent, envs, rollout)
        seen.append(rollout["obs"].clone())

    class Watched(Workers):
        def start(self, *given, **extra):
            assert self._ahead == (module is not pqn)  # which learns from what it has just done
            return super().start(*given, **extra)

    monkeypatch.setattr(module, "collect", watched)
    monkeypatch.setattr(module, "Workers", Watched)
    options = {"env": "CartPole", "num_steps": 5, "exploration_fraction": 0.5}
    run_of(module, tmp_path / "run", total_steps=100, compile="none", **options)
    args = module.Args(total_steps=100, exploration_fraction=0.5)
    at = module.target_entropy_at if module is sac_discrete else module.epsilon_at
    assert used == pytest.approx([at(step, args) for step in range(0, 100, 10)])
    saved = torch.load(tmp_path / "run" / "last.pt", weights_only=True)["agent"]
    torch.testing.assert_close(saved["normalizer.mean"], torch.cat(seen).flatten(0, 1).mean(0))
    assert saved["normalizer.count"] == 100


def test_worker_processes_see_epsilon():
    args = dqn.Args(num_envs=2, num_workers=1, compile="none", device="cpu")
    workers = Workers(fake_run(args), dqn.collect)
    agent = dqn.Agent(workers.observation_space, workers.action_space, args)
    workers.start(agent, 50)
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


@pytest.mark.parametrize(
    ("script", "name", "value", "allowed"),
    [
        (pqn, "q_lambda", 1.5, "from 0 to 1"),
        (d3qn, "exploration_length", 0.5, "at least 1"),
        (sac_discrete, "exploration_length", 0.0, "at least 1"),
        (sac_discrete, "target_entropy_ratio", 1.1, "from 0 to 1"),
        (sac_discrete, "initial_temperature", 0.0, "at least 1e-09"),
    ],
)
def test_what_a_flag_cannot_be(script, name, value, allowed, tmp_path):
    said = f"--{name.replace('_', '-')} is {value}; allowed is {allowed}"
    with pytest.raises(UserError, match=f"^{said}$"):
        script.train(script.Args(**{name: value}, run_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("script", [dqn, d3qn, sac_discrete])
def test_what_train_does_with_the_target_and_the_buffer(script, tmp_path, monkeypatch):
    """θ̄ ← θ̄ + τ (θ − θ̄) after each update; n, γ, β and the priorities as they should be.

    A quarter of an update for each transition from the warm-up's last two on, of all weights.
    """
    betas, following, errors, told = [], [], [], []

    def vector(network):
        return torch.nn.utils.parameters_to_vector(network.parameters()).detach().clone()

    def watched(agent, target, *rest, original=script.update):
        before = vector(target)
        assert not following or torch.equal(following.pop(), before)
        optimizers = rest[0] if script is sac_discrete else rest[:1]
        learned = [weight for x in optimizers for weight in x.param_groups[0]["params"]]
        assert sorted(map(id, learned)) == sorted(map(id, agent.parameters()))
        assert len({x.param_groups[0]["lr"] for x in optimizers}) == 1
        losses, td_error = original(agent, target, *rest)
        ours = vector(agent.critics if script is sac_discrete else agent.q_network)
        following.append(before.lerp(ours, 0.3))
        errors.append((rest[-2]["index"], td_error))
        return losses, td_error

    class Watched(ReplayBuffer):
        def sample(self, batch_size):
            assert self.n_step == 2 and self._powers[1].item() == pytest.approx(0.9)
            assert self.prioritized == (script is d3qn)
            betas.append(self.beta)
            return super().sample(batch_size)

        def update_priorities(self, *given):
            told.append(given)
            super().update_priorities(*given)

    monkeypatch.setattr(worker_learner.run, "Evaluator", NoEvaluator)
    monkeypatch.setattr(script, "update", watched)
    monkeypatch.setattr(script, "ReplayBuffer", Watched)
    script.train(script.Args(
        env="CartPole", num_envs=2, total_steps=100, warmup_steps=20, hidden_size=8, tau=0.3,
        n_step=2, gamma=0.9, eval_every=0, compile="none", device="cpu",
        run_dir=str(tmp_path / "run"),
    ))  # fmt: skip
    assert len(betas) == 25 - 4 and betas[0] < 0.6 < 0.95 < betas[-1]
    assert same(errors, told)


@pytest.mark.parametrize(
    ("script", "said"), [(dqn, "q_network.*100:"), (sac_discrete, "actor.*32:")]
)
def test_weights_that_are_no_numbers_are_not_saved(script, said, tmp_path, monkeypatch):
    """SAC's policy cannot even act by them, at the next step; DQN's is any action."""
    monkeypatch.setattr(worker_learner.run, "Evaluator", NoEvaluator)
    with pytest.raises(UserError, match=said.replace("*", "* has NaN or infinity at step ")):
        script.train(script.Args(
            env="CartPole", num_envs=1, total_steps=300, warmup_steps=30, hidden_size=8,
            learning_rate=1e30, checkpoint_every=100, compile="none", device="cpu",
            run_dir=str(tmp_path / "run"),
        ))  # fmt: skip
    assert not list((tmp_path / "run").glob("checkpoint*"))


@pytest.mark.parametrize("script", [dqn, d3qn, sac_discrete])
def test_a_run_resumed_without_its_buffer_waits_until_that_is_warm(script, tmp_path, monkeypatch):
    sizes = []

    class Watched(ReplayBuffer):
        def sample(self, batch_size):
            sizes.append(len(self))
            return super().sample(batch_size)

    monkeypatch.setattr(script, "ReplayBuffer", Watched)
    options = {"env": "CartPole", "total_steps": 200, "save_replay": False, "utd_ratio": 0.5}
    run_of(script, tmp_path / "run", kill_after=40, **options)
    assert min(sizes) == 50 and max(sizes) > 100
    sizes.clear()
    resume_of(script, tmp_path / "run")
    assert min(sizes) == 50


REPLAY = {"n_step": 3, "batch_size": 16, "buffer_size": 350, "warmup_steps": 100, "log_every": 99}
FLAGS = {
    pqn: {"num_steps": 16, "minibatch_size": 32, "epochs": 1},
    dqn: {**REPLAY, "prioritized": True, "tau": 0.5},
    d3qn: {**REPLAY, "num_steps": 4, "exploration_length": 9.0},
    sac_discrete: {**REPLAY, "exploration_length": 9.0},
}


@pytest.mark.parametrize("script", FLAGS)
def test_resume_is_bit_identical(script, tmp_path):
    """That a killed process leaves no other than this state is tested with ppo.py and sac.py."""
    options = {"env": "CartPole", "num_envs": 4, "total_steps": 600, "checkpoint_every": 150}
    options |= {"seed": 3, **FLAGS[script]}
    updates = run_of(script, tmp_path / "reference", **options)
    run_of(script, tmp_path / "killed", kill_after=updates * 2 // 3, **options)
    assert 0 < load(tmp_path / "killed")["run"]["step"] < 500
    resume_of(script, tmp_path / "killed")
    ours, theirs = load(tmp_path / "killed"), load(tmp_path / "reference")
    assert ours.keys() == theirs.keys() and ours["run"]["step"] >= 600
    for name in ours.keys() - {"run"}:
        assert same(ours[name], theirs[name]), name
    assert same(ours["run"]["random"], theirs["run"]["random"])
