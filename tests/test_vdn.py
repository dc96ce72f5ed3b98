"""VDN and QMIX: gradients against loops in double precision, mixing, exploration, replay, runs."""

import copy
import types

import gymnasium
import numpy as np
import pytest
import torch
from interrupted import both_checkpoints

from algos import play, qmix, vdn
from algos.worker_learner import ReplayBuffer, UserError
from vec_envs import make

TINY = {
    **{"num_envs": 4, "hidden_size": 8, "eval_episodes": 2, "eval_every": 0, "batch_size": 4},
    **{"updates": 8},
}
A, OBS, STATE, ACTIONS, HIDDEN = 3, 4, 5, 3, 4
BOTH = pytest.mark.parametrize("script", [vdn, qmix])


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def fake_envs(available_in_obs=False):
    mask = torch.ones(A, ACTIONS, dtype=torch.bool)
    mask[1, 2] = False
    return types.SimpleNamespace(
        num_agents=A,
        single_observation_space=gymnasium.spaces.Box(-np.inf, np.inf, (OBS,)),
        single_action_space=gymnasium.spaces.Discrete(ACTIONS),
        state_dim=STATE,
        available_in_obs=available_in_obs,
        action_mask=mask,
    )


def make_agent(script, available_in_obs=False, **options):
    args = script.Args(num_envs=2, hidden_size=HIDDEN, batch_size=3, **options)
    envs = fake_envs(available_in_obs)
    agents = [script.Agent(envs, args).double() for _ in range(2)]  # itself and a target
    if script is vdn:
        agents[0].lowering_weight.fill_(args.lowering_weight)  # in double precision
    agents[0].reward_scaler.statistics.var.fill_(4.0)
    for parameter in [*agents[0].parameters(), *agents[1].parameters()]:
        parameter.data += 0.3 * torch.randn_like(parameter)
    return *agents, args


def random_batch(steps=5, envs=2):
    double = {"dtype": torch.float64}
    done = torch.rand(steps, envs) < 0.3
    alive = (torch.rand(2, steps, envs, A) < 0.8).double()
    return {
        "obs": torch.randn(steps, envs, A, OBS, **double),
        "next_obs": torch.randn(steps, envs, A, OBS, **double),
        "state": torch.randn(steps, envs, STATE, **double),
        "next_state": torch.randn(steps, envs, STATE, **double),
        "action": torch.randint(0, 2, (steps, envs, A)),
        "reward": torch.randn(steps, envs, A, **double),
        "alive": alive[0],
        "next_alive": alive[1],
        "done": done,
        "terminated": done & (torch.rand(steps, envs) < 0.5),
    }


class Reference:
    """The networks once more, for one agent and one step at a time, in numpy."""

    def __init__(self, agent):
        self.w = {k: v.detach().numpy().copy() for k, v in agent.named_parameters()}

    def q(self, obs, i):
        w, x = self.w, np.r_[np.clip(obs / np.sqrt(1 + 1e-8), -10, 10), np.eye(A)[i]]
        for layer in (0, 2):
            x = np.maximum(w[f"network.{layer}.weight"] @ x + w[f"network.{layer}.bias"], 0)
        q = w["network.4.weight"] @ x + w["network.4.bias"]
        return q[:2] if i == 1 else q  # the second agent has one action less

    def mix(self, q, state):
        w = self.w
        if "mixer.w1.weight" not in w:
            return sum(q)
        s = np.clip(state / np.sqrt(1 + 1e-8), -10, 10)

        def layer(name, x):
            return w[f"mixer.{name}.weight"] @ x + w[f"mixer.{name}.bias"]

        hidden = np.abs(layer("w1", s)).reshape(A, -1).T @ np.array(q) + layer("b1", s)
        hidden = np.where(hidden > 0, hidden, np.expm1(np.minimum(hidden, 0)))
        last = layer("b2.2", np.maximum(layer("b2.0", s), 0))[0]
        return np.abs(layer("w2", s)) @ hidden + last


def reference_loss(online, target, batch, lowering_weight, td_lambda, gamma):
    """E[ w (Q_tot − y)² ], one env, one step, one agent after another; σ of the return is 2."""
    b = {k: v.numpy() for k, v in batch.items()}
    steps, envs = b["done"].shape
    total = 0.0
    for e in range(envs):
        value, next_value = np.zeros(steps), np.zeros(steps)
        for t in range(steps):
            chosen, following = [], []
            for i in range(A):
                q = online.q(b["obs"][t, e, i], i)[b["action"][t, e, i]]
                chosen.append(q * b["alive"][t, e, i])
                next_obs = b["next_obs"][t, e, i]
                best = np.argmax(online.q(next_obs, i))
                following.append(target.q(next_obs, i)[best] * b["next_alive"][t, e, i])
            value[t] = online.mix(chosen, b["state"][t, e])
            next_value[t] = target.mix(following, b["next_state"][t, e])
        for t in range(steps):  # Σ of the λ-weighted n-step returns, forwards
            y, factor, share = 0.0, 1.0, 1.0
            for k in range(t, steps):
                reward = np.clip(b["reward"][k, e].sum() / np.sqrt(4 + 1e-8), -10, 10)
                y += share * factor * reward
                stop = b["done"][k, e] or k == steps - 1
                future = factor * gamma * (not b["terminated"][k, e])
                y += share * (1.0 if stop else 1 - td_lambda) * future * next_value[k]
                if stop:
                    break
                share, factor = share * td_lambda, factor * gamma
            weight = lowering_weight if value[t] > y else 1.0
            total += weight * (value[t] - y) ** 2
    return total / (steps * envs)


@pytest.mark.parametrize("td_lambda", [None, 0.0, 1.0])
@BOTH
def test_loss_and_gradient(script, td_lambda, monkeypatch):
    if td_lambda is not None:
        monkeypatch.setattr(script, "TD_LAMBDA", td_lambda)
    options = {"lowering_weight": 0.3} if script is vdn else {"mixing_size": 3}
    agent, target, args = make_agent(script, gamma=0.9, **options)
    batch = random_batch()
    batch["reward"] *= 5  # so that some values are too high and some too low
    loss, _ = script.td_loss(agent, target, batch, args)
    loss.backward()
    online, fixed = Reference(agent), Reference(target)
    settings = options.get("lowering_weight", 1.0), script.TD_LAMBDA, args.gamma
    np.testing.assert_allclose(
        loss.item(), reference_loss(online, fixed, batch, *settings), rtol=1e-10
    )
    rng, step = np.random.default_rng(0), 1e-6
    for name, parameter in agent.named_parameters():
        array = online.w[name]
        for index in rng.choice(array.size, min(2, array.size), replace=False):
            values = []
            for sign in (1, -1):
                array.flat[index] += sign * step
                values.append(reference_loss(online, fixed, batch, *settings))
                array.flat[index] -= sign * step
            slope = (values[0] - values[1]) / (2 * step)
            assert abs(parameter.grad.flatten()[index].item() - slope) < 1e-6, name


def team_value(script, agent, q, state):
    return script.mix(q) if script is vdn else script.mix(agent, q, state)


def test_the_team_gains_by_what_an_agent_gains():
    """∂Q_tot / ∂Q_i ≥ 0 in every state; 1 for the sum; elsewhere it depends on the state."""
    for script in (vdn, qmix):
        agent, *_ = make_agent(script)
        if script is qmix:
            for parameter in agent.mixer.parameters():
                parameter.data += torch.randn_like(parameter)
        q = (3 * torch.randn(500, A, dtype=torch.float64)).requires_grad_()
        state = torch.randn(500, STATE, dtype=torch.float64)
        (slope,) = torch.autograd.grad(team_value(script, agent, q, state).sum(), q)
        assert (slope >= 0).all() and (slope > 0).any()
        assert (slope == 1).all() == (script is vdn)
        assert (slope.std(0) > 0.01).all() == (script is qmix)


def test_the_mixer_begins_close_to_the_sum():
    agent = qmix.Agent(make("Spread", 2), qmix.Args())
    q, state = torch.randn(400, 3), torch.randn(400, 54)
    total = qmix.mix(agent, q, state)
    correlation = torch.corrcoef(torch.stack((total, q.sum(1))))[0, 1]
    assert correlation > 0.95, correlation


def empty_rollout(steps, env):
    obs = env.obs.shape
    shapes = {"obs": obs, "next_obs": obs, **dict.fromkeys(("reward", "alive"), obs[:2])}
    shapes |= {"next_alive": obs[:2], "episode_return": obs[:1], "episode_length": obs[:1]}
    shapes |= dict.fromkeys(("state", "next_state"), env.state.shape)
    rollout = {name: torch.zeros(steps, *shape) for name, shape in shapes.items()}
    rollout["action"] = torch.zeros(steps, *obs[:2], dtype=torch.int64)
    flags = {name: torch.zeros(steps, obs[0], dtype=torch.bool) for name in ("done", "terminated")}
    return rollout | flags


@BOTH
def test_explorers_choose_among_all_that_is_available(script):
    env = make("SpeakerListener", 500, seed=0)
    env.reset()
    agent = script.Agent(env, script.Args(hidden_size=HIDDEN))
    for epsilon in (1.0, 0.0):
        agent.epsilon.fill_(epsilon)
        rollout = empty_rollout(2, env)
        script.collect(agent, env, rollout)
        speaker, listener = rollout["action"][0].T
        if epsilon:
            assert (speaker.bincount() / 500 - 1 / 3).abs().max() < 0.08
            assert (listener.bincount() / 500 - 1 / 5).abs().max() < 0.08
        else:
            best = agent.values(rollout["obs"][0]).argmax(-1)
            assert torch.equal(rollout["action"][0], best)
            assert torch.equal(agent(rollout["obs"][0]), best)
        assert rollout["alive"].all() and rollout["next_alive"].all()


def test_agents_explore_each_on_its_own():
    env = make("Spread", 2000, seed=0)
    env.reset()
    agent = vdn.Agent(env, vdn.Args(hidden_size=HIDDEN))
    agent.epsilon.fill_(0.5)
    rollout = empty_rollout(1, env)
    vdn.collect(agent, env, rollout)
    best = agent(rollout["obs"][0])
    differs = (rollout["action"][0] != best).double()  # ε times 4/5 of 5 actions
    assert (differs.mean(0) - 0.4).abs().max() < 0.06
    assert (differs.T.corrcoef() - torch.eye(3)).abs().max() < 0.1


@BOTH
def test_actions_that_are_not_available_are_never_taken(script):
    agent, *_ = make_agent(script, available_in_obs=True)
    agent.network[-1].bias.data[2] += 100
    obs = torch.randn(300, A, OBS, dtype=torch.float64)
    obs[..., -ACTIONS:] = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    obs[:, 2] = 0.0  # this agent has left: no action is available, any of its own will do
    best = agent(obs)
    assert best[:, 0].tolist() == [2] * 300 and best[:, 1].tolist() == [1] * 300
    for epsilon in (1.0, 0.5):
        agent.epsilon.fill_(epsilon)
        action = script.epsilon_greedy(agent, obs)
        assert set(action[:, 0].tolist()) == {1, 2} and set(action[:, 1].tolist()) == {1}
    obs[:, 1] = 0.0
    assert set(script.epsilon_greedy(agent, obs)[:, 1].tolist()) <= {0, 1}


@BOTH
def test_target_network_follows(script):
    """One step of Adam on the network; θ̄ ← (1 − τ) θ̄ + τ θ."""
    agent, target, args = make_agent(script)
    target.requires_grad_(False)
    optimizer = torch.optim.Adam(agent.parameters(), 1e-2)
    ours, theirs = (copy.deepcopy(x) for x in (agent, target))
    losses = script.update(agent, target, optimizer, random_batch(), args)
    assert losses.keys() == {"td", "value", "grad_norm"} and losses["grad_norm"] > 0
    rows = zip(
        *(x.parameters() for x in (ours, agent, theirs, target)), strict=True
    )  # before, after, before, after
    for before, after, target_before, target_after in rows:
        assert not torch.equal(before, after)
        torch.testing.assert_close(target_after, target_before.lerp(after, args.tau))


@BOTH
@pytest.mark.parametrize("max_norm", [1e-2, 1e3])
def test_a_step_is_down_the_shortened_gradient(script, max_norm):
    agent, target, args = make_agent(script, max_grad_norm=max_norm)
    batch, parameters = random_batch(), list(agent.parameters())
    before = [p.detach().clone() for p in parameters]
    loss, _ = script.td_loss(agent, target, batch, args)
    gradients = torch.autograd.grad(loss, parameters)
    norm = torch.cat([x.flatten() for x in gradients]).norm().item()
    assert 1e-2 < norm < 1e3
    script.update(agent, target, torch.optim.SGD(parameters, 0.1), batch, args)
    for old, new, gradient in zip(before, parameters, gradients, strict=True):
        expected = 0.1 * gradient * min(1, max_norm / norm)
        torch.testing.assert_close(old - new, expected, rtol=1e-3, atol=1e-9)


@BOTH
def test_rewards_are_scaled_when_they_are_used(script):
    """The same batch has other targets once the statistics of the return are others."""
    agent, target, args = make_agent(script)
    batch = random_batch()
    batch["terminated"][:] = batch["done"][:] = True  # y = r
    for var in (4.0, 100.0):
        agent.reward_scaler.statistics.var.fill_(var)
        y = script.td_target(agent, target, batch, args)
        torch.testing.assert_close(y, batch["reward"].sum(-1) / (var + 1e-8) ** 0.5)


def test_windows_are_consecutive_steps_of_one_environment():
    """Of what the replay buffer holds; a reward may have an axis for the agents."""
    steps, envs = torch.arange(3).view(3, 1), torch.arange(2)
    rollout = {name: torch.zeros(3, 2, A) for name in ("obs", "reward")}
    rollout["done"] = torch.zeros(3, 2, dtype=torch.bool)
    args = types.SimpleNamespace(save_replay=True, total_steps=1)
    run = types.SimpleNamespace(device=torch.device("cpu"), args=args, step=0)
    replay = ReplayBuffer(run, rollout, 12)  # six steps
    for number in range(5):
        value = (100 * envs + 3 * number + steps).float().unsqueeze(-1)
        replay.add({**rollout, "obs": value.expand(3, 2, A), "reward": value.expand(3, 2, A)})
    batch = replay.windows(500, 3)
    assert batch["reward"].shape == (3, 500, A) and batch["mask"].shape == (3, 500)
    assert torch.equal(batch["reward"], batch["obs"])
    first, *rest = batch["reward"][..., 0]
    assert all(torch.equal(x, first + i) for i, x in enumerate(rest, 1))
    assert set(first.unique().tolist()) == {*range(9, 13), *range(109, 113)}


# Runs.


@BOTH
def test_resume_is_bit_identical(script, tmp_path, monkeypatch):
    """With rollouts that end in mid-episode."""
    tiny = {**TINY, "env": "SpeakerListener", "total_steps": 1200, "num_steps": 15}
    tiny |= {"updates": 2, "buffer_size": 600}
    ours, theirs = both_checkpoints(script, tiny, 22, tmp_path, monkeypatch)
    for part in ("agent", "target", "workers", "replay"):
        torch.testing.assert_close(ours[part], theirs[part], rtol=0, atol=0)


@BOTH
def test_what_changes_during_a_run(script, tmp_path, monkeypatch):
    """Learning rate, ε and α; both networks see the same; rewards are replayed as they came."""
    seen, team, raw = [], [], []

    def collect(agent, envs, rollout, original=script.collect):
        original(agent, envs, rollout)
        raw.append(rollout["reward"].clone())
        team.append(rollout["reward"].sum(-1))

    def scaled(self, reward, done, original=script.RewardScaler.forward):
        assert torch.equal(reward, team[-1])
        return original(self, reward, done)

    def watched(agent, target, optimizer, batch, args, original=script.update):
        assert agent.normalizer.mean.equal(target.normalizer.mean)
        if script is qmix:
            assert agent.state_normalizer.mean.equal(target.state_normalizer.mean)
        assert torch.isin(batch["reward"], torch.cat(raw)).all()
        statistics = [agent.normalizer, agent.reward_scaler.statistics]
        statistics += [agent.state_normalizer] if script is qmix else []
        assert all((x.count == 40 * len(raw)).all() for x in statistics)  # of all so far
        alpha = agent.lowering_weight.item() if script is vdn else 1.0
        seen.append((optimizer.param_groups[0]["lr"], agent.epsilon.item(), alpha))
        return original(agent, target, optimizer, batch, args)

    monkeypatch.setattr(script, "update", watched)
    monkeypatch.setattr(script, "collect", collect)
    monkeypatch.setattr(script.RewardScaler, "forward", scaled)
    options = {"total_steps": 400, "num_steps": 10, "updates": 1, "learning_rate": 1e-2}
    options |= {"exploration_fraction": 0.5, "final_epsilon": 0.2, "seed": 3}
    script.train(script.Args(**TINY | options, run_dir=str(tmp_path / "run")))
    part = np.arange(10) / 10
    alpha = np.minimum(1, 0.1 + 1.8 * part) if script is vdn else np.ones(10)
    expected = np.stack((1e-2 * (1 - part), np.maximum(0.2, 1 - 1.6 * part), alpha), 1)
    np.testing.assert_allclose(seen, expected, rtol=1e-6)


def test_play_export_and_refusals(tmp_path, capsys):
    run_dir = str(tmp_path / "run")
    result = vdn.train(vdn.Args(**TINY, total_steps=200, num_workers=2, run_dir=run_dir))
    capsys.readouterr()
    play.main(play.Args(run_dir, checkpoint="last", episodes=2))
    assert "25.0 steps long" in capsys.readouterr().out
    assert result.step == 200
    play.main(play.Args(run_dir, checkpoint="last", export=str(tmp_path / "policy.pt2")))
    exported = torch.export.load(tmp_path / "policy.pt2").module()
    assert exported(torch.zeros(5, 3, 18)).shape == (5, 3)
    for env, message in (
        ("SpreadContinuous", "SpreadContinuous has continuous actions; mappo.py"),
        ("CartPole", "CartPole has one agent; ppo.py fits it"),
    ):
        with pytest.raises(UserError, match=message):
            vdn.train(vdn.Args(**TINY, env=env, run_dir=str(tmp_path / "none")))


@pytest.mark.parametrize("script", [vdn, qmix])
def test_what_train_learns_from(script, tmp_path, monkeypatch):
    """So many batches of so many windows, each as long as a rollout."""
    asked, windows = [], ReplayBuffer.windows
    monkeypatch.setattr(
        ReplayBuffer, "windows", lambda *given: asked.append(given[1:]) or windows(*given)
    )
    sizes = dict(total_steps=80, num_envs=4, num_steps=10, updates=3, batch_size=6, hidden_size=8)
    run = dict(eval_every=0, eval_episodes=1, run_dir=str(tmp_path / "run"))
    script.train(script.Args(env="Spread", **sizes, **run))
    assert asked == [(6, 10)] * (2 * 3)
