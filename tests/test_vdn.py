"""VDN and QMIX: gradients against loops in double precision, memory, mixing, replay, runs."""

import signal
import types

import gymnasium
import numpy as np
import pytest
import torch
from test_offpolicy import NoEvaluator

from algos import play, qmix, vdn, worker_learner
from algos.worker_learner import ReplayBuffer, UserError, flatten, gradient_of
from vec_envs import make

TINY = {
    **{"num_envs": 4, "hidden_size": 8, "eval_episodes": 2, "eval_every": 0, "batch_size": 4},
    **{"updates": 8, "recurrent": True},
}
A, OBS, STATE, ACTIONS, HIDDEN = 3, 4, 5, 3, 4


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def make_agent(script, available_in_obs=False, **options):
    options = {"recurrent": True, "discount": 0.99, **options}
    args = script.Args(num_envs=2, hidden_size=HIDDEN, batch_size=3, buffer_size=8, **options)
    mask = torch.ones(A, ACTIONS, dtype=torch.bool)
    mask[1, 2] = False
    envs = types.SimpleNamespace(
        num_agents=A,
        single_observation_space=gymnasium.spaces.Box(-np.inf, np.inf, (OBS,)),
        single_action_space=gymnasium.spaces.Discrete(ACTIONS),
        state_dim=STATE,
        available_in_obs=available_in_obs,
        action_mask=mask,
    )
    agents = [script.Agent(envs, args).double() for _ in range(2)]  # itself and a target
    agents[0].lowering_weight.fill_(args.lowering_weight)  # in double precision
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
        "reward": torch.randn(steps, envs, **double),
        "alive": alive[0],
        "next_alive": alive[1],
        "done": done,
        "terminated": done & (torch.rand(steps, envs) < 0.5),
        "hidden": torch.randn(1, envs, A, HIDDEN, **double),
    }


class Reference:
    """The networks once more, for one agent and one step at a time, in numpy."""

    def __init__(self, agent):
        self.w = {k: v.detach().numpy().copy() for k, v in agent.named_parameters()}

    def remember(self, obs, i, h):
        w, clip = self.w, np.clip(obs / np.sqrt(1 + 1e-8), -10, 10)
        x = np.maximum(w["encoder.weight"] @ np.r_[clip, np.eye(A)[i]] + w["encoder.bias"], 0)
        if "memory.weight" in w:
            return np.maximum(w["memory.weight"] @ x + w["memory.bias"], 0)
        gates_x = (w["memory.weight_ih"] @ x + w["memory.bias_ih"]).reshape(3, -1)
        gates_h = (w["memory.weight_hh"] @ h + w["memory.bias_hh"]).reshape(3, -1)
        reset, keep = (1 / (1 + np.exp(-gates_x[k] - gates_h[k])) for k in (0, 1))
        return (1 - keep) * np.tanh(gates_x[2] + reset * gates_h[2]) + keep * h

    def q(self, h, i):
        q = self.w["head.weight"] @ h + self.w["head.bias"]
        return q[:2] if i == 1 else q  # the second agent has one action less

    def mix(self, q, state):
        w = self.w
        if "mixer.weight1.weight" not in w:
            return sum(q)
        s = np.clip(state / np.sqrt(1 + 1e-8), -10, 10)

        def layer(name, x):
            return w[f"mixer.{name}.weight"] @ x + w[f"mixer.{name}.bias"]

        hidden = np.abs(layer("weight1", s)).reshape(A, -1).T @ np.array(q) + layer("bias1", s)
        hidden = np.where(hidden > 0, hidden, np.expm1(np.minimum(hidden, 0)))
        last = layer("bias2.2", np.maximum(layer("bias2.0", s), 0))[0]
        return np.abs(layer("weight2", s)) @ hidden + last


def reference_loss(online, target, batch, weight, args):
    """E[ w (Q_tot − y)² ], one env, one step, one agent after another."""
    b = {k: v.numpy() for k, v in batch.items()}
    steps, envs = b["reward"].shape
    total = 0.0
    for e in range(envs):
        value, next_value = np.zeros(steps), np.zeros(steps)
        ours, theirs = b["hidden"][0, e].copy(), b["hidden"][0, e].copy()
        for t in range(steps):
            chosen, following = [], []
            for i in range(A):
                ours[i] = online.remember(b["obs"][t, e, i], i, ours[i])
                theirs[i] = target.remember(b["obs"][t, e, i], i, theirs[i])
                chosen.append(online.q(ours[i], i)[b["action"][t, e, i]] * b["alive"][t, e, i])
                next_obs = b["next_obs"][t, e, i]
                next_q = target.q(target.remember(next_obs, i, theirs[i]), i)
                own_q = online.q(online.remember(next_obs, i, ours[i]), i)
                best = np.argmax(own_q if args.double_q else next_q)
                following.append(next_q[best] * b["next_alive"][t, e, i])
            value[t] = online.mix(chosen, b["state"][t, e])
            next_value[t] = target.mix(following, b["next_state"][t, e])
            if b["done"][t, e]:
                ours[:], theirs[:] = 0, 0
        for t in range(steps):  # Σ of the λ-weighted n-step returns, forwards
            y, factor, share = 0.0, 1.0, 1.0
            for k in range(t, steps):
                y += share * factor * b["reward"][k, e]
                stop = b["done"][k, e] or k == steps - 1
                alive = factor * args.discount * (not b["terminated"][k, e])
                y += share * (1.0 if stop else 1 - args.td_lambda) * alive * next_value[k]
                if stop:
                    break
                share, factor = share * args.td_lambda, factor * args.discount
            optimism = args.lowering_weight if value[t] > y else 1.0
            total += weight[e].item() * optimism * (value[t] - y) ** 2
    return total / (steps * envs)


@pytest.mark.parametrize(
    ("script", "options"),
    [
        (vdn, {"recurrent": True, "td_lambda": 0.6}),
        (vdn, {"recurrent": False, "td_lambda": 0.0, "double_q": False}),
        (qmix, {"recurrent": False, "td_lambda": 1.0, "mixing_size": 3, "lowering_weight": 0.5}),
    ],
)
def test_loss_and_gradient(script, options):
    agent, target, args = make_agent(script, discount=0.9, **options)
    batch, weight = random_batch(), torch.rand(2, dtype=torch.float64) + 0.5
    batch["reward"] *= 5  # so that some values are too high and some too low
    loss, error, _ = script.td_loss(agent, target, batch, weight, args)
    loss.backward()
    online, fixed = Reference(agent), Reference(target)
    np.testing.assert_allclose(
        loss.item(), reference_loss(online, fixed, batch, weight, args), rtol=1e-10
    )
    assert error.shape == batch["reward"].shape and (error > 0).any() and (error < 0).any()
    rng, step = np.random.default_rng(0), 1e-6
    for name, parameter in agent.named_parameters():
        array = online.w[name]
        for index in rng.choice(array.size, min(2, array.size), replace=False):
            values = []
            for sign in (1, -1):
                array.flat[index] += sign * step
                values.append(reference_loss(online, fixed, batch, weight, args))
                array.flat[index] -= sign * step
            slope = (values[0] - values[1]) / (2 * step)
            assert abs(parameter.grad.flatten()[index].item() - slope) < 1e-6, name


def test_the_team_gains_by_what_an_agent_gains():
    """∂Q_tot / ∂Q_i ≥ 0 in every state; 1 for the sum; elsewhere it depends on the state."""
    for script in (vdn, qmix):
        agent, *_ = make_agent(script)
        if script is qmix:
            for parameter in agent.mixer.parameters():
                parameter.data += torch.randn_like(parameter)
        q = (3 * torch.randn(500, A, dtype=torch.float64)).requires_grad_()
        state = torch.randn(500, STATE, dtype=torch.float64)
        total = agent.mix(q) if script is vdn else agent.mix(q, state)
        (slope,) = torch.autograd.grad(total.sum(), q)
        assert (slope >= 0).all() and (slope > 0).any()
        assert (slope == 1).all() == (script is vdn)
        assert (slope.std(0) > 0.01).all() == (script is qmix)


def test_the_mixer_begins_close_to_the_sum():
    agent = qmix.Agent(make("Spread", 2), qmix.Args())
    q, state = torch.randn(400, 3), torch.randn(400, 54)
    total = agent.mix(q, state)
    correlation = torch.corrcoef(torch.stack((total, q.sum(1))))[0, 1]
    assert correlation > 0.95, correlation


def test_stretches_are_unrolled_as_they_were_played():
    """Step by step, with a new memory after an end, as the unrolled network has it."""
    agent, *_ = make_agent(vdn)
    batch = random_batch(steps=9)
    q, memories = agent.unroll(batch["obs"], batch["hidden"][0], batch["done"])
    hidden = batch["hidden"][0]
    for t in range(9):
        single, hidden = agent.step(batch["obs"][t], hidden)
        torch.testing.assert_close(q[t], single)
        torch.testing.assert_close(memories[t], hidden)
        hidden = torch.where(batch["done"][t].view(-1, 1, 1), torch.zeros_like(hidden), hidden)
    assert batch["done"].any()


def test_collecting_goes_on_with_the_memory_of_the_rollout_before():
    env = make("SpeakerListener", 2, seed=0)
    env.reset()
    agent = vdn.Agent(env, vdn.Args(hidden_size=HIDDEN))
    zeros = {"hidden": (2, HIDDEN), "next_hidden": (2, HIDDEN), "alive": (2,), "next_alive": (2,)}
    shapes = {"obs": (2, 11), "next_obs": (2, 11), "reward": (2,), **zeros}
    rollout = {name: torch.zeros(10, 2, *shape) for name, shape in shapes.items()}
    rollout["action"] = torch.zeros(10, 2, 2, dtype=torch.int64)
    flags = {name: torch.zeros(10, 2, dtype=torch.bool) for name in ("done", "terminated")}
    rollout |= {**flags, "episode_return": torch.zeros(10, 2), "episode_length": torch.zeros(10, 2)}
    obs, done, stored = [], [], []
    for _ in range(4):  # an episode of 25 ends in the third
        vdn.collect(agent, env, rollout)
        obs.append(rollout["obs"].clone())
        done.append(rollout["done"].clone())
        stored.append(rollout["hidden"].clone())
    obs, done, stored = torch.cat(obs), torch.cat(done), torch.cat(stored)
    assert done[24].all() and done.sum() == 2
    _, memories = agent.unroll(obs, torch.zeros(2, 2, HIDDEN), done)
    expected = torch.cat((torch.zeros_like(memories[:1]), memories[:-1]))
    torch.testing.assert_close(stored, expected * (torch.arange(40) != 25).view(-1, 1, 1, 1))
    assert rollout["alive"].all() and rollout["next_alive"].all()


def test_explorers_choose_among_all_that_is_available():
    env = make("SpeakerListener", 500, seed=0)
    env.reset()
    agent = vdn.Agent(env, vdn.Args(hidden_size=HIDDEN))
    for epsilon in (1.0, 0.0):
        agent.epsilon.fill_(epsilon)
        seen = []
        step = env.step

        def keep(action, seen=seen, step=step):
            seen.append(action)
            return step(action)

        env.step = keep
        rollout = {
            name: torch.zeros(2, 500, *shape)
            for name, shape in {
                **{"obs": (2, 11), "next_obs": (2, 11), "reward": (2,), "action": (2,)},
                **{"hidden": (2, HIDDEN), "next_hidden": (2, HIDDEN)},
                **{"alive": (2,), "next_alive": (2,), "episode_return": (), "episode_length": ()},
                **{"done": (), "terminated": ()},
            }.items()
        }
        vdn.collect(agent, env, rollout)
        del env.step
        speaker, listener = seen[0].T
        if epsilon:
            assert (speaker.bincount() / 500 - 1 / 3).abs().max() < 0.08
            assert (listener.bincount() / 500 - 1 / 5).abs().max() < 0.08
        else:
            q, _ = agent.step(rollout["obs"][0], rollout["hidden"][0])
            assert torch.equal(seen[0], q.argmax(-1))


def test_agents_explore_each_by_its_own_chance():
    env, zeros = make("Spread", 2000, seed=0), {"hidden": (HIDDEN,), "next_hidden": (HIDDEN,)}
    env.reset()
    agent = vdn.Agent(env, vdn.Args(hidden_size=HIDDEN))
    agent.epsilon.fill_(0.5)
    shapes = {"obs": (18,), "next_obs": (18,), **zeros}
    shapes |= dict.fromkeys(("alive", "next_alive", "action", "reward"), ())
    rollout = {name: torch.zeros(1, 2000, 3, *shape) for name, shape in shapes.items()}
    for name in ("done", "terminated", "episode_return", "episode_length"):
        rollout[name] = torch.zeros(1, 2000)
    vdn.collect(agent, env, rollout)
    best = agent.step(rollout["obs"][0], rollout["hidden"][0])[0].argmax(-1)
    differs = (rollout["action"][0] != best).double()  # ε times 4/5 of 5 actions
    assert (differs.mean(0) - 0.4).abs().max() < 0.06
    assert (differs.T.corrcoef() - torch.eye(3)).abs().max() < 0.1


def filled_replay():
    """Rollouts 0 to 4 of 3 steps and 2 envs; three fit. All of env e in rollout r is 2 r + e."""
    rollout = {
        "obs": torch.zeros(3, 2, 1), "reward": torch.zeros(3, 2),
        "hidden": torch.zeros(3, 2, 1, 1), "next_hidden": torch.zeros(3, 2, 1, 1),
        "done": torch.zeros(3, 2, dtype=torch.bool), "episode_return": torch.zeros(3, 2),
    }  # fmt: skip
    run = types.SimpleNamespace(
        device=torch.device("cpu"), args=types.SimpleNamespace(save_replay=True)
    )
    replay = ReplayBuffer(run, vdn.stretches(rollout), 6)
    for number in range(5):
        for name in ("obs", "reward", "hidden", "next_hidden"):
            envs = torch.tensor([0.0, 1.0]).view(-1, *[1] * (rollout[name].dim() - 2))
            rollout[name][:] = 2 * number + envs + 100 * (name == "next_hidden")
        rollout["hidden"][1:] = -1  # not kept
        replay.add(vdn.stretches(rollout))
    return replay, rollout


def test_replay_keeps_whole_stretches_with_the_memory_they_began_with():
    replay, _ = filled_replay()
    batch = replay.sample(2000)
    assert batch["obs"].shape == (2000, 3, 1) and batch["hidden"].shape == (2000, 1, 1, 1)
    assert batch.keys() >= {"obs", "reward", "hidden", "done"} and "next_hidden" not in batch
    assert set(batch["reward"].unique().tolist()) == {4.0, 5.0, 6.0, 7.0, 8.0, 9.0}
    for step in range(3):
        assert torch.equal(batch["reward"][:, step], batch["obs"][:, 2 - step, 0])
    assert torch.equal(batch["reward"][:, 0], batch["hidden"][:, 0, 0, 0])


@pytest.mark.parametrize("script", [vdn, qmix])
def test_priorities_are_from_a_stretchs_errors(script):
    agent, target, args = make_agent(script)
    batch, weight = random_batch(), torch.ones(2, dtype=torch.float64)
    _, error, _ = script.td_loss(agent, target, batch, weight, args)
    told = []
    drawn = {name: x.transpose(0, 1) for name, x in batch.items()}
    drawn |= {"index": torch.tensor([7, 4]), "weight": weight, "discount": weight}
    replay = types.SimpleNamespace(
        sample=lambda size: dict(drawn), update_priorities=lambda *given: told.append(given)
    )
    optimizer = torch.optim.SGD([flatten(agent)], 1e-3)
    script.update(agent, target, optimizer, replay, gradient_of(script.td_loss, agent), args)
    ((index, priority),) = told
    assert index.tolist() == [7, 4]
    for i in range(2):
        errors = error[:, i].abs()
        torch.testing.assert_close(priority[i], 0.9 * errors.max() + 0.1 * errors.mean())


def test_actions_that_are_not_available_are_never_the_best():
    agent, *_ = make_agent(vdn, available_in_obs=True)
    agent.head.bias.data[2] += 100
    obs = torch.randn(50, A, OBS, dtype=torch.float64)
    obs[..., -ACTIONS:] = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    assert agent(obs)[:, 0].tolist() == [2] * 50
    assert agent(obs)[:, 1].tolist() == [1] * 50  # it never has the third


# Runs.


@pytest.mark.parametrize("script", [vdn, qmix])
def test_resume_is_bit_identical(script, tmp_path, monkeypatch):
    """With rollouts that end in mid-episode, where the agents remember something."""
    tiny = {**TINY, "env": "SpeakerListener", "total_steps": 1200, "horizon": 15}
    tiny |= {"prioritized": True, "updates": 2, "buffer_size": 40}
    script.train(script.Args(**tiny, run_dir=str(tmp_path / "whole")))
    calls, update = iter(range(1000)), script.update

    def interrupted(*args):
        if next(calls) == 22:
            signal.raise_signal(signal.SIGINT)
        return update(*args)

    monkeypatch.setattr(script, "update", interrupted)
    with pytest.raises(SystemExit):
        script.train(script.Args(**tiny, run_dir=str(tmp_path / "parts")))
    script.train(script.Args(resume=str(tmp_path / "parts")))
    ours, theirs = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)
        for name in ("parts", "whole")
    )
    assert ours["run"]["step"] == theirs["run"]["step"] == 1200
    for part in ("agent", "target", "workers"):
        assert all(torch.equal(x, theirs[part][k]) for k, x in ours[part].items())
    torch.testing.assert_close(ours["replay"], theirs["replay"], rtol=0, atol=0)
    torch.testing.assert_close(ours["remembered"], theirs["remembered"], rtol=0, atol=0)
    assert ours["run"]["last_return"] == theirs["run"]["last_return"]


@pytest.mark.parametrize("script", [vdn, qmix])
def test_what_changes_during_a_run(script, tmp_path, monkeypatch):
    """ε and α; and the target network sees what the other one sees. Rewards are the team's."""
    seen, team = [], []

    def collect(agent, envs, rollout, original=script.collect):
        original(agent, envs, rollout)
        team.append(rollout["reward"].sum(-1))

    def scaled(self, reward, done, original=script.RewardScaler.forward):
        assert torch.equal(reward, team[-1])
        return original(self, reward, done)

    def watched(agent, target, *rest, original=script.update):
        assert agent.normalizer.mean.equal(target.normalizer.mean)
        if script is qmix:
            assert agent.state_normalizer.mean.equal(target.state_normalizer.mean)
        seen.append((agent.epsilon.item(), agent.lowering_weight.item()))
        return original(agent, target, *rest)

    monkeypatch.setattr(worker_learner, "Evaluator", NoEvaluator)
    monkeypatch.setattr(script, "update", watched)
    monkeypatch.setattr(script, "collect", collect)
    monkeypatch.setattr(script.RewardScaler, "forward", scaled)
    options = {"total_steps": 400, "horizon": 10, "updates": 1, "recurrent": False}
    options |= {"exploration_fraction": 0.5, "final_epsilon": 0.2, "lowering_weight": 0.1}
    script.train(script.Args(**TINY | options, run_dir=str(tmp_path / "run")))
    part = np.arange(10) / 10
    expected = np.stack((np.maximum(0.2, 1 - 1.6 * part), np.minimum(1, 0.1 + 1.8 * part)), 1)
    np.testing.assert_allclose(seen, expected, rtol=1e-6)


def test_play_and_refusals(tmp_path, capsys):
    run_dir = str(tmp_path / "run")
    result = vdn.train(vdn.Args(**TINY, total_steps=200, num_workers=2, run_dir=run_dir))
    capsys.readouterr()
    play.main(play.Args(run_dir, checkpoint="last", episodes=2))
    first = capsys.readouterr().out
    play.main(play.Args(run_dir, checkpoint="last", episodes=2))
    assert capsys.readouterr().out == first and "25.0 steps long" in first  # nothing remembered
    assert result.step == 200
    with pytest.raises(UserError, match="a policy that remembers cannot be exported"):
        play.main(play.Args(run_dir, checkpoint="last", export=str(tmp_path / "policy.pt2")))
    for env, message in (
        ("SpreadContinuous", "SpreadContinuous has continuous actions; mappo.py"),
        ("CartPole", r"CartPole has 1 agent\(s\), but vdn is for several agents"),
    ):
        with pytest.raises(UserError, match=message):
            vdn.train(vdn.Args(**TINY, env=env, run_dir=str(tmp_path / "none")))


def test_what_is_remembered_ends_where_environments_start_anew():
    replay, rollout = filled_replay()
    remembered = vdn.Remembered(rollout)
    state = remembered.state_dict()
    remembered.end_episodes()
    assert not rollout["next_hidden"][-1].any()  # what `collect` goes on with
    remembered.load_state_dict(state)
    assert rollout["next_hidden"][-1].flatten().tolist() == [108, 109]
    replay.end_episodes()
    newest = replay.data["reward"][..., 0] >= 8
    assert replay.data["done"].any(-1).equal(newest)
    assert replay.data["done"][newest].tolist() == [[False, False, True]] * 2
