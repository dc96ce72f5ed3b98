"""MAPPO: what it adds to PPO, piece by piece; runs with several agents."""

import signal
import types

import gymnasium
import numpy as np
import pytest
import torch

from algos import mappo, play, ppo
from algos.worker_learner import UserError, flatten, gradient_of
from vec_envs import make

TINY = {"num_envs": 4, "hidden_size": 8, "eval_episodes": 2, "eval_every": 0, "epochs": 2}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def world(available_in_obs=False, discrete=True):
    """What `Agent` asks of an env: three agents, of which the second has fewer actions."""
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1, 2:] = False
    box = gymnasium.spaces.Box(-1.0, 1.0, (4,))
    return types.SimpleNamespace(
        num_agents=3,
        single_observation_space=gymnasium.spaces.Box(-np.inf, np.inf, (6,)),
        single_action_space=gymnasium.spaces.Discrete(4) if discrete else box,
        state_dim=10,
        available_in_obs=available_in_obs,
        action_mask=mask,
    )


def make_agent(discrete=True, available_in_obs=False, **options):
    args = mappo.Args(num_envs=2, **{"hidden_size": 8, **options})
    agent = mappo.Agent(world(available_in_obs, discrete), args).double()
    for parameter in agent.parameters():  # away from the nearly silent last layer
        parameter.data += 0.3 * torch.randn_like(parameter)
    return agent, args


def random_rollout(discrete=True, horizon=5, envs=2):
    double = {"dtype": torch.float64}
    shape = (horizon, envs, 3)
    done = torch.rand(horizon, envs) < 0.3
    actions = torch.randint(0, 2, shape) if discrete else torch.randn(*shape, 4, **double)
    return {
        "obs": torch.randn(*shape, 6, **double),
        "next_obs": torch.randn(*shape, 6, **double),
        "state": torch.randn(horizon, envs, 10, **double),
        "next_state": torch.randn(horizon, envs, 10, **double),
        "action": actions,
        "reward": torch.randn(shape, **double) * 7 - 20,
        "alive": torch.ones(shape, **double),
        "terminated": done & (torch.rand(horizon, envs) < 0.5),
        "done": done,
    }


def gradient(agent, loss):
    agent.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in agent.parameters() if p.grad is not None])


def test_losses_are_ppos_where_nobody_dies():
    args = mappo.Args(clip_value=True)
    log_ratio, advantage, value, old, returns = torch.randn(5, 40, 3)
    alive = torch.ones(40, 3)
    torch.testing.assert_close(
        mappo.policy_loss(log_ratio, advantage, alive, 0.2),
        ppo.policy_loss(log_ratio, advantage, 0.2),
    )
    torch.testing.assert_close(
        mappo.value_loss(value, old, returns, args),
        ppo.value_loss(value, old, returns, args),
    )


@pytest.mark.parametrize("discrete", [True, False])
def test_the_dead_count_for_nothing(discrete):
    """The policy's gradient is that of a batch which the dead are not in; their value is learnt."""
    agent, args = make_agent(discrete, entropy_coef=0.1)
    batch = mappo.prepare(agent, random_rollout(discrete), args)
    batch["log_prob"] = batch["log_prob"] + 0.3 * torch.randn_like(batch["log_prob"])
    batch["alive"][3:, 1:] = 0
    loss, losses = mappo.minibatch_loss(agent, batch, args)
    before = gradient(agent, loss)
    for name in ("advantage", "log_prob"):  # nonsense where they are dead
        batch[name] = torch.where(batch["alive"] > 0, batch[name], batch[name] - 7)
    loss, other = mappo.minibatch_loss(agent, batch, args)
    torch.testing.assert_close(gradient(agent, loss), before)
    assert losses["kl"] > 0 and torch.allclose(losses["kl"], other["kl"])
    batch["alive"][:] = 1
    loss, _ = mappo.minibatch_loss(agent, batch, args)
    assert not torch.allclose(gradient(agent, loss), before)


def test_actions_an_agent_does_not_have_are_never_taken():
    agent, _ = make_agent(available_in_obs=True)
    obs = torch.randn(500, 3, 6, dtype=torch.float64)
    obs[..., 2:] = 1.0  # which of the four actions are there now
    obs[..., 3] = 0.0
    available = agent.available(obs)
    own = [[True, False, True, True], [True, False, False, False], [True, False, True, True]]
    assert available.tolist() == [own] * 500
    for actions in (agent(obs), agent.sample(obs)):
        assert available.gather(-1, actions.unsqueeze(-1)).all()
    x = agent.normalize(obs)
    log_probs = torch.stack(
        [
            agent.log_prob_entropy(x, torch.full((500, 3), action), available)[0]
            for action in range(4)
        ],
        -1,
    )
    assert (log_probs.exp()[~available] == 0).all()
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(500, 3, dtype=torch.float64))
    _, entropy = agent.log_prob_entropy(x, agent.sample(obs), available)
    expected = torch.distributions.Categorical(logits=log_probs.where(available, -1e30)).entropy()
    torch.testing.assert_close(entropy, expected)


def test_entries_an_action_does_not_have_do_not_count():
    agent, _ = make_agent(discrete=False)
    obs = torch.randn(50, 3, 6, dtype=torch.float64)
    action, available = agent.sample(obs), agent.available(obs)
    assert not action[:, 1, 2:].any() and action[:, 0].any()
    x = agent.normalize(obs)
    log_prob, entropy = agent.log_prob_entropy(x, action, available)
    mean = agent.actor(agent.numbered(x))
    normal = torch.distributions.Normal(mean, agent.log_std.exp())
    for ours, theirs in ((log_prob, normal.log_prob(action)), (entropy, normal.entropy())):
        expected = torch.stack(
            [theirs[:, 0].sum(-1), theirs[:, 1, :2].sum(-1), theirs[:, 2].sum(-1)], -1
        )
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("centralized", [True, False])
def test_what_the_critic_sees(centralized):
    agent, _ = make_agent(centralized_value=centralized)
    obs = torch.randn(4, 3, 6, dtype=torch.float64, requires_grad=True)
    state = torch.randn(4, 10, dtype=torch.float64, requires_grad=True)
    value = agent.value(agent.critic_input(obs, state))
    assert value.shape == (4, 3)
    assert value[0, 0] != value[0, 1]  # the agent's number is an input
    of_obs, of_state = torch.autograd.grad(value[2, 1], (obs, state), allow_unused=True)
    if centralized:
        assert of_obs is None and of_state[2].all() and not of_state[:2].any()
    else:
        assert of_state is None and of_obs[2, 1].all() and of_obs.count_nonzero() == 6


@pytest.mark.parametrize("team", [True, False])
def test_returns_are_those_of_the_team(team):
    """Advantages by PPO's estimator from the sum of rewards, in the rewards' own units."""
    agent, args = make_agent(team_reward=team)
    agent.value_normalizer.update(torch.tensor([[-5.0], [9.0]], dtype=torch.float64))
    rollout = random_rollout(horizon=30)
    real = [
        agent.value_normalizer.real(agent.value(agent.critic_input(rollout[o], rollout[s])))
        for o, s in (("obs", "state"), ("next_obs", "next_state"))
    ]
    batch = mappo.prepare(agent, rollout, args)
    for i in range(3):
        reward = rollout["reward"].sum(-1) if team else rollout["reward"][..., i]
        expected = ppo.gae(
            reward, *(x[..., i] for x in real), rollout["terminated"], rollout["done"], args
        )
        torch.testing.assert_close(batch["advantage"].view(30, 2, 3)[..., i], expected)
        returns = agent.value_normalizer.real(batch["returns"].view(30, 2, 3)[..., i])
        torch.testing.assert_close(returns, (expected + real[0][..., i]).detach())
        old = agent.value_normalizer.real(batch["value"].view(30, 2, 3)[..., i])
        torch.testing.assert_close(old, real[0][..., i].detach())


def test_an_update_takes_in_what_was_seen():
    agent, args = make_agent()
    rollout, optimizer = random_rollout(), torch.optim.SGD([flatten(agent)], 0.1)
    mappo.update(agent, optimizer, rollout, gradient_of(mappo.minibatch_loss, agent), args)
    seen = rollout["obs"].flatten(0, 1).flatten(1), rollout["state"].flatten(0, 1)
    for normalizer, x in zip((agent.normalizer, agent.state_normalizer), seen, strict=True):
        torch.testing.assert_close(normalizer.mean, x.mean(0))


def test_the_value_normalizer_and_its_way_back():
    normalizer = mappo.ValueNormalizer(1).double()
    returns = torch.randn(300, 3, dtype=torch.float64) * 40 - 90
    normalizer.update(returns.unsqueeze(-1))
    normal = normalizer(returns)
    assert abs(normal.mean()) < 1e-9 and abs(normal.std(correction=0) - 1) < 1e-6
    torch.testing.assert_close(normalizer.real(normal), returns)


def test_agents_that_differ_have_statistics_of_their_own():
    env = make("SpeakerListener", 200)
    agent = mappo.Agent(env, mappo.Args())
    obs, _ = env.reset()
    agent.normalizer.update(obs.flatten(-2))
    x = agent.normalize(obs)
    assert x.shape == obs.shape and not x[:, ~env.obs_mask].any()
    speaker, listener = x[:, 0, :3], x[:, 1, 2:8]
    for part in (speaker, listener):
        assert part.mean(0).abs().max() < 1e-4 and (part.std(0) - 1).abs().max() < 1e-2


# Runs.


def test_resume_is_bit_identical(tmp_path, monkeypatch):
    tiny = {**TINY, "env": "SpeakerListener", "total_steps": 1500, "horizon": 25}
    mappo.train(mappo.Args(**tiny, run_dir=str(tmp_path / "whole")))
    calls, update = iter(range(100)), mappo.update

    def interrupted(*args):
        if next(calls) == 6:
            signal.raise_signal(signal.SIGINT)
        return update(*args)

    monkeypatch.setattr(mappo, "update", interrupted)
    with pytest.raises(SystemExit):
        mappo.train(mappo.Args(**tiny, run_dir=str(tmp_path / "parts")))
    mappo.train(mappo.Args(resume=str(tmp_path / "parts")))
    ours, theirs = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)
        for name in ("parts", "whole")
    )
    assert ours["run"]["step"] == theirs["run"]["step"] == 1500
    for part in ("agent", "workers"):
        assert all(torch.equal(x, theirs[part][k]) for k, x in ours[part].items())
    assert ours["run"]["last_return"] == theirs["run"]["last_return"]


def test_workers_and_play(tmp_path, capsys):
    """Two worker processes collect; play.py scores, films and exports what was learnt."""
    run_dir = tmp_path / "run"
    args = mappo.Args(
        **TINY,
        env="SpeakerListenerContinuous",
        total_steps=400,
        num_workers=2,
        run_dir=str(run_dir),
    )
    result = mappo.train(args)
    capsys.readouterr()
    best = {"run_dir": str(run_dir), "checkpoint": "last"}
    play.main(play.Args(**best, episodes=2, json=True))
    assert '"return_mean"' in capsys.readouterr().out and result.step >= 400
    play.main(play.Args(**best, video=str(tmp_path / "film.gif")))
    assert "25 pictures, 2.5 seconds" in capsys.readouterr().out
    play.main(play.Args(**best, export=str(tmp_path / "policy.pt2")))
    policy = torch.export.load(tmp_path / "policy.pt2").module()
    assert policy(torch.zeros(7, 2, 11)).shape == (7, 2, 5)


def test_one_agent_or_several_is_one_sentence(tmp_path):
    for script, env, message in (
        (mappo, "CartPole", r"--env CartPole has 1 agent\(s\), but mappo is for several agents"),
        (ppo, "Spread", r"--env Spread has 3 agent\(s\), but ppo is for a single one"),
    ):
        with pytest.raises(UserError, match=message):
            script.train(script.Args(**TINY, env=env, run_dir=str(tmp_path / "none")))
        assert not (tmp_path / "none").exists()


def test_the_living_are_the_batch():
    """Losses are PPO's on those that live; the critic's on all."""
    agent, args = make_agent(entropy_coef=0.1)
    batch = mappo.prepare(agent, random_rollout(), args)
    batch["log_prob"] = batch["log_prob"] + 0.3 * torch.randn_like(batch["log_prob"])
    batch["alive"][3:, 1:] = 0
    living = batch["alive"] > 0
    total, losses = mappo.minibatch_loss(agent, batch, args)
    weighted = losses["policy"] + args.value_coef * losses["value"] - 0.1 * losses["entropy"]
    torch.testing.assert_close(total, weighted)
    log_prob, entropy = agent.log_prob_entropy(batch["obs"], batch["action"], batch["available"])
    advantage = batch["advantage"][living]
    advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
    log_ratio = (log_prob - batch["log_prob"])[living]
    torch.testing.assert_close(losses["policy"], ppo.policy_loss(log_ratio, advantage, args.clip))
    torch.testing.assert_close(losses["entropy"], entropy[living].mean())
    value = agent.value(batch["critic_input"])
    expected = ppo.value_loss(value, batch["value"], batch["returns"], args)
    torch.testing.assert_close(losses["value"], expected)
