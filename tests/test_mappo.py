"""MAPPO: what it adds to PPO, piece by piece; runs with several agents."""

import types

import gymnasium
import numpy as np
import pytest
import torch
from interrupted import both_checkpoints

from algos import mappo, play, ppo
from algos.worker_learner import UserError
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
        action_low=torch.tensor(box.low).expand(3, -1),
        action_high=torch.tensor(box.high).expand(3, -1),
    )


def make_agent(discrete=True, available_in_obs=False, **options):
    args = mappo.Args(num_envs=2, **{"hidden_size": 8, **options})
    agent = mappo.Agent(world(available_in_obs, discrete), args).double()
    for parameter in agent.parameters():  # away from the nearly silent last layer
        parameter.data += 0.3 * torch.randn_like(parameter)
    return agent, args


def random_rollout(discrete=True, num_steps=5, envs=2):
    double = {"dtype": torch.float64}
    shape = (num_steps, envs, 3)
    done = torch.rand(num_steps, envs) < 0.3
    actions = torch.randint(0, 2, shape) if discrete else torch.randn(*shape, 4, **double)
    return {
        "obs": torch.randn(*shape, 6, **double),
        "next_obs": torch.randn(*shape, 6, **double),
        "state": torch.randn(num_steps, envs, 10, **double),
        "next_state": torch.randn(num_steps, envs, 10, **double),
        "action": actions,
        "reward": torch.randn(shape, **double) * 7 - 20,
        "alive": torch.ones(shape, **double),
        "terminated": done & (torch.rand(num_steps, envs) < 0.5),
        "done": done,
    }


def gradient(agent, loss):
    agent.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in agent.parameters() if p.grad is not None])


def test_losses_are_ppos_where_nobody_dies():
    log_ratio, advantage, value, returns = torch.randn(4, 40, 3)
    alive = torch.ones(40, 3)
    torch.testing.assert_close(
        mappo.policy_loss(log_ratio, advantage, alive, 0.2),
        ppo.policy_loss(log_ratio, advantage, 0.2),
    )
    torch.testing.assert_close(mappo.value_loss(value, returns), ppo.value_loss(value, returns))


@pytest.mark.parametrize("discrete", [True, False])
def test_the_dead_count_for_nothing(discrete):
    """The policy's gradient is that of a batch which the dead are not in; their value is learnt."""
    agent, args = make_agent(discrete, entropy_coef=0.1)
    batch = mappo.prepare(agent, random_rollout(discrete), args)
    batch["log_prob"] = batch["log_prob"] + 0.3 * torch.randn_like(batch["log_prob"])
    batch["alive"][3:, 1:] = 0
    loss, losses = mappo.mappo_loss(agent, batch, args)
    before = gradient(agent, loss)
    for name in ("advantage", "log_prob"):  # nonsense where they are dead
        batch[name] = torch.where(batch["alive"] > 0, batch[name], batch[name] - 7)
    loss, other = mappo.mappo_loss(agent, batch, args)
    torch.testing.assert_close(gradient(agent, loss), before)
    for name in ("approx_kl", "clip_fraction"):
        assert losses[name] > 0 and torch.allclose(losses[name], other[name])
    batch["alive"][:] = 1
    loss, _ = mappo.mappo_loss(agent, batch, args)
    assert not torch.allclose(gradient(agent, loss), before)


def test_actions_an_agent_does_not_have_are_never_taken():
    agent, _ = make_agent(available_in_obs=True)
    obs = torch.randn(500, 3, 6, dtype=torch.float64)
    obs[..., 2:] = 1.0  # which of the four actions are there now
    obs[..., 3] = 0.0
    available = agent.available(obs)
    own = [[True, False, True, True], [True, False, False, False], [True, False, True, True]]
    assert available.tolist() == [own] * 500
    for actions in (agent(obs), agent.policy(obs).sample()):
        assert available.gather(-1, actions.unsqueeze(-1)).all()
    left = torch.where(torch.arange(3).unsqueeze(1) == 1, 0.0, obs)  # none: any of its own will do
    assert agent.available(left)[0].tolist() == [own[0], [True, True, False, False], own[2]]
    policy = agent.policy(obs)
    log_probs = [policy.log_prob(torch.full((500, 3), action)) for action in range(4)]
    log_probs = torch.stack(log_probs, -1)
    assert (log_probs.exp()[~available] == 0).all()
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(500, 3, dtype=torch.float64))
    expected = -(log_probs.exp() * log_probs).where(available, 0.0).sum(-1)
    torch.testing.assert_close(policy.entropy(), expected)


def test_entries_an_action_does_not_have_do_not_count():
    """Neither in the ratio nor in a gradient: there the policy is N(0, 1), whatever is learnt."""
    agent, args = make_agent(discrete=False, entropy_coef=0.1)
    obs = torch.randn(50, 3, 6, dtype=torch.float64)
    policy, action = agent.policy(obs), agent.policy(obs).sample()
    assert not agent(obs)[:, 1, 2:].any() and agent(obs)[:, 0].all()
    mean, std = agent.actor(agent.with_id(agent.normalize(obs))), agent.log_std.exp()
    own = torch.distributions.Normal(mean, std.expand_as(mean))
    none = torch.distributions.Normal(torch.zeros_like(mean), 1.0)
    there = agent.action_mask
    log_prob = torch.where(there, own.log_prob(action), none.log_prob(action)).sum(-1)
    torch.testing.assert_close(policy.log_prob(action), log_prob)
    entropy = torch.where(there, own.entropy(), none.entropy()).sum(-1)
    torch.testing.assert_close(policy.entropy(), entropy)
    agent.log_std.data += 0.5
    agent.actor[-1].bias.data += 0.5
    other = action.clone()
    other[:, 1, 2:] += 1
    moved = agent.policy(obs)
    ratios = [moved.log_prob(a) - policy.log_prob(a) for a in (action, other)]
    torch.testing.assert_close(*ratios)
    rollout = random_rollout(discrete=False)
    loss, _ = mappo.mappo_loss(agent, mappo.prepare(agent, rollout, args), args)
    gradient(agent, loss)
    assert not agent.log_std.grad[1, 2:].any() and agent.log_std.grad[1, :2].all()


@pytest.mark.parametrize("centralized", [True, False])
def test_what_the_critic_sees(centralized):
    agent, _ = make_agent(centralized_value=centralized)
    obs = torch.randn(4, 3, 6, dtype=torch.float64, requires_grad=True)
    state = torch.randn(4, 10, dtype=torch.float64, requires_grad=True)
    value = agent.value(obs, state)
    assert value.shape == (4, 3)
    assert value[0, 0] != value[0, 1]  # the agent's number is an input
    of_obs, of_state = torch.autograd.grad(value[2, 1], (obs, state), allow_unused=True)
    if centralized:
        assert of_obs is None and of_state[2].all() and not of_state[:2].any()
    else:
        assert of_state is None and of_obs[2, 1].all() and of_obs.count_nonzero() == 6


def test_returns_are_those_of_the_team():
    """Advantages by PPO's estimator from the sum of rewards, in the rewards' own units."""
    agent, args = make_agent()
    agent.return_statistics.update(torch.tensor([[-5.0], [9.0]], dtype=torch.float64))
    rollout = random_rollout(num_steps=30)
    value = agent.value(rollout["obs"], rollout["state"])
    next_value = agent.value(rollout["next_obs"], rollout["next_state"])
    batch = mappo.prepare(agent, rollout, args)
    reward = rollout["reward"].sum(-1)
    for i in range(3):
        values, ends = (value[..., i], next_value[..., i]), (rollout["terminated"], rollout["done"])
        expected = ppo.gae(reward, *values, *ends, args)
        torch.testing.assert_close(batch["advantage"].view(30, 2, 3)[..., i], expected)
        returns = (expected + value[..., i]).detach()
        torch.testing.assert_close(batch["returns"].view(30, 2, 3)[..., i], returns)


def test_an_update_is_epochs_of_steps_on_the_whole_rollout():
    """And takes in what was seen, last."""
    agent, args = make_agent(epochs=3)
    rollout, steps = random_rollout(), []

    def learn(agent, optimizer, batch, args):
        steps.append((len(batch["obs"]), agent.normalizer.count.max().item()))
        return mappo.gradient_step(agent, optimizer, batch, args)

    optimizer = torch.optim.SGD(agent.parameters(), 0.1)
    logged = mappo.update(agent, optimizer, rollout, learn, args)
    assert steps == [(10, 0)] * 3 and all(x.isfinite() for x in logged.values())
    seen = rollout["obs"].flatten(0, 1).flatten(1), rollout["state"].flatten(0, 1)
    for normalizer, x in zip((agent.normalizer, agent.state_normalizer), seen, strict=True):
        torch.testing.assert_close(normalizer.mean, x.mean(0))


@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_a_step_is_down_the_shortened_gradient(max_norm):
    agent, args = make_agent(max_grad_norm=max_norm)
    batch = mappo.prepare(agent, random_rollout(), args)
    expected = gradient(agent, mappo.mappo_loss(agent, batch, args)[0])
    before = torch.cat([p.detach().flatten() for p in agent.parameters()])
    mappo.gradient_step(agent, torch.optim.SGD(agent.parameters(), 0.1), batch, args)
    after = torch.cat([p.detach().flatten() for p in agent.parameters()])
    step = 0.1 * expected * min(1, max_norm / expected.norm().item())
    torch.testing.assert_close(before - after, step, rtol=1e-3, atol=1e-9)


def test_the_critic_learns_normalised_returns():
    """Its output is regressed to returns with mean 0 and variance 1."""
    agent, args = make_agent()
    agent.return_statistics.update(torch.tensor([[-5.0], [9.0]], dtype=torch.float64))
    batch = mappo.prepare(agent, random_rollout(), args)
    all_returns = torch.cat((torch.tensor([-5.0, 9.0]).double(), batch["returns"].flatten()))
    mean, std = all_returns.mean(), all_returns.std(correction=0)
    state = agent.state_normalizer(batch["state"]).unsqueeze(1).expand(-1, 3, -1)
    output = agent.critic(agent.with_id(state)).squeeze(-1)
    expected = 0.5 * (output - (batch["returns"] - mean) / std).square().mean()
    _, losses = mappo.mappo_loss(agent, batch, args)
    torch.testing.assert_close(losses["value"], expected)
    ours, theirs = (
        torch.autograd.grad(loss, list(agent.critic.parameters()))
        for loss in (losses["value"], expected)
    )
    torch.testing.assert_close(ours, theirs)


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
    tiny = {**TINY, "env": "SpeakerListener", "total_steps": 1500, "num_steps": 25}
    ours, theirs = both_checkpoints(mappo, tiny, 6, tmp_path, monkeypatch)
    for part in ("agent", "workers"):
        torch.testing.assert_close(ours[part], theirs[part], rtol=0, atol=0)


def test_the_entropy_bonus_falls_to_zero(tmp_path, monkeypatch):
    seen, update = [], mappo.update

    def watched(agent, *given):
        seen.append(agent.entropy_coef.item())
        return update(agent, *given)

    monkeypatch.setattr(mappo, "update", watched)
    options = {**TINY, "env": "Spread", "total_steps": 500, "num_steps": 25, "entropy_coef": 0.1}
    mappo.train(mappo.Args(**options, run_dir=str(tmp_path / "run")))
    assert seen == pytest.approx([0.1, 0.08, 0.06, 0.04, 0.02])


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
        (mappo, "CartPole", "--env CartPole has one agent; ppo.py fits it"),
        (ppo, "Spread", "--env Spread has several agents; mappo.py fits it"),
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
    total, losses = mappo.mappo_loss(agent, batch, args)
    weighted = losses["policy"] + args.value_coef * losses["value"] - 0.1 * losses["entropy"]
    torch.testing.assert_close(total, weighted)
    policy = agent.policy(batch["obs"])
    advantage = batch["advantage"][living]
    advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
    log_ratio = (policy.log_prob(batch["action"]) - batch["log_prob"])[living]
    torch.testing.assert_close(losses["policy"], ppo.policy_loss(log_ratio, advantage, args.clip))
    torch.testing.assert_close(losses["entropy"], policy.entropy()[living].mean())
    kl = (log_ratio.exp() - 1 - log_ratio).mean()
    torch.testing.assert_close(losses["approx_kl"], kl)
    value = agent.value(batch["obs"], batch["state"])
    expected = ppo.value_loss(value, batch["returns"]) / agent.return_statistics.var.squeeze()
    torch.testing.assert_close(losses["value"], expected, rtol=1e-6, atol=0)
