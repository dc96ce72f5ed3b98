"""MADDPG and MATD3: losses and gradients against loops in double precision, draws, runs."""

import types

import gymnasium
import numpy as np
import pytest
import torch
from interrupted import both_checkpoints

from algos import maddpg, matd3, play
from algos.worker_learner import UserError

A, OBS, ACTIONS, HIDDEN, BATCH = 3, 4, 3, 5, 6
TINY = {"num_envs": 4, "hidden_size": 8, "eval_episodes": 2, "eval_every": 0, "batch_size": 16}
BOTH = pytest.mark.parametrize("script", [maddpg, matd3])


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def make_agents(script, discrete=False, available_in_obs=False, **options):
    args = script.Args(num_envs=2, hidden_size=HIDDEN, **options)
    mask = torch.ones(A, ACTIONS, dtype=torch.bool)
    mask[1, 2] = False
    box = gymnasium.spaces.Box(np.float32([-1, 0, 2]), np.float32([1, 4, 3]))
    envs = types.SimpleNamespace(
        num_agents=A,
        single_observation_space=gymnasium.spaces.Box(-np.inf, np.inf, (OBS,)),
        single_action_space=gymnasium.spaces.Discrete(ACTIONS) if discrete else box,
        available_in_obs=available_in_obs,
        action_mask=mask,
        action_low=torch.tensor(box.low).expand(A, -1),
        action_high=torch.tensor(box.high).expand(A, -1),
    )
    return *(script.Agent(envs, args).double() for _ in range(2)), args


def random_batch(discrete=False):
    double = {"dtype": torch.float64}
    action = torch.rand(BATCH, A, ACTIONS, **double) * 2 - 1
    action[:, 1, 2] = 0
    if discrete:
        action = torch.randint(0, 2, (BATCH, A))
    alive = (torch.rand(2, BATCH, A) < 0.8).double()
    alive[0, 0, 0], alive[1, 0, 0] = 1, 0  # dies in a step after which others go on
    terminated = torch.rand(BATCH) < 0.4
    terminated[0] = False
    return {
        "obs": torch.randn(BATCH, A, OBS, **double),
        "next_obs": torch.randn(BATCH, A, OBS, **double),
        "action": action,
        "reward": torch.randn(BATCH, A, **double),
        "alive": alive[0],
        "next_alive": alive[1],
        "terminated": terminated,
    }


def network(w, prefix, i, x):
    for layer in (0, 2, 4):
        x = w[f"{prefix}.{i}.{layer}.weight"] @ x + w[f"{prefix}.{i}.{layer}.bias"]
        x = np.maximum(x, 0) if layer < 4 else x
    return x


def policy(w, obs):
    """The outputs of one step's actors (A, ACTIONS), one after another."""
    raw = np.stack([network(w, "actors", i, obs[i]) for i in range(A)])
    raw[1, 2] = 0
    return raw


def relaxed(raw, gumbel):
    """softmax(logits + Gumbel noise), what the one-hot draws have the gradient of."""
    raw = raw.copy()
    raw[1, 2] = -np.inf  # the second agent has one action less
    exp = np.exp(raw + gumbel - (raw + gumbel).max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def one_hot(index):
    return np.eye(ACTIONS)[index]


def critics_of(script):
    return ["critics"] if script is maddpg else ["critics.q1", "critics.q2"]


def reference(script, ours, theirs, batch, args, gumbel=None):
    """Both losses of a batch, one step and one agent after another.

    `gumbel`, where actions are discrete: the noise (BATCH, A, ACTIONS) of the target's actors, that
    of the actors, and what actions were drawn before any weight was changed.
    """
    b = {k: v.numpy() for k, v in batch.items()}
    critic, actor = 0.0, 0.0
    for n in range(BATCH):
        x, next_x = b["obs"][n].ravel(), b["next_obs"][n].ravel()
        next_raw, raw = policy(theirs, b["next_obs"][n]), policy(ours, b["obs"][n])
        if gumbel is None:
            next_action, action, stored = np.tanh(next_raw), np.tanh(raw), b["action"][n]
        else:
            next_action = one_hot(relaxed(next_raw, gumbel[0][n]).argmax(-1))
            soft = relaxed(raw, gumbel[1][n])
            action = one_hot(gumbel[2][n].argmax(-1)) + soft - gumbel[2][n]
            stored = one_hot(b["action"][n])
        for i in range(A):
            future = min(
                network(theirs, name, i, np.r_[next_x, next_action.ravel()])[0]
                for name in critics_of(script)
            )
            y = args.reward_scale * b["reward"][n, i]
            if not b["terminated"][n]:
                y += args.gamma * future * b["next_alive"][n, i]
            for name in critics_of(script):
                value = network(ours, name, i, np.r_[x, stored.ravel()])[0]
                critic += b["alive"][n, i] * (value - y) ** 2
            joint = stored.copy()
            joint[i] = action[i]
            value = network(ours, critics_of(script)[0], i, np.r_[x, joint.ravel()])[0]
            cost = 0.0  # of logits: those of continuous actions are none
            if gumbel is not None:
                cost = args.logit_cost * (raw[i] ** 2).sum() / (2 if i == 1 else 3)
            actor += b["alive"][n, i] * (cost - value)
    return critic / b["alive"].sum(), actor / b["alive"].sum()


@BOTH
@pytest.mark.parametrize("discrete", [False, True])
def test_losses_and_gradients(script, discrete):
    """The logits' cost is charged on discrete actions only."""
    options = {"target_noise": 0.0} if script is matd3 else {}
    agent, target, args = make_agents(script, discrete, logit_cost=0.1, gamma=0.9, **options)
    batch = random_batch(discrete)
    torch.manual_seed(1)
    losses = script.critic_loss(agent, target, batch, args), script.actor_loss(agent, batch, args)
    ours, theirs = (
        {k: v.detach().numpy().copy() for k, v in x.named_parameters()} for x in (agent, target)
    )
    gumbel = None
    if discrete:  # what gumbel_softmax draws, in this order
        torch.manual_seed(1)
        shape = BATCH, A, ACTIONS
        noise = [-torch.empty(shape).double().exponential_().log().numpy() for _ in range(2)]
        raws = zip(
            np.stack([policy(ours, obs) for obs in batch["obs"].numpy()]), noise[1], strict=True
        )
        gumbel = *noise, np.stack([relaxed(raw, g) for raw, g in raws])
    expected = reference(script, ours, theirs, batch, args, gumbel)
    np.testing.assert_allclose([loss.item() for loss in losses], expected, rtol=1e-10)
    rng, step = np.random.default_rng(0), 1e-6
    for which, part in enumerate(("critics", "actors")):
        agent.zero_grad()
        losses[which].backward(inputs=list(getattr(agent, part).parameters()))
        for name, parameter in agent.named_parameters():
            if not name.startswith(part):
                assert parameter.grad is None
                continue
            for index in rng.choice(parameter.numel(), min(6, parameter.numel()), replace=False):
                values = []
                for sign in (1, -1):
                    ours[name].flat[index] += sign * step
                    values.append(reference(script, ours, theirs, batch, args, gumbel)[which])
                    ours[name].flat[index] -= sign * step
                slope = (values[0] - values[1]) / (2 * step)
                assert abs(parameter.grad.flatten()[index].item() - slope) < 1e-7, name
        agent.zero_grad(set_to_none=True)


@BOTH
def test_discrete_actions_are_draws_with_the_gradient_of_the_softmax(script):
    agent, *_ = make_agents(script, discrete=True)
    for parameter in agent.actors.parameters():
        parameter.data *= 3
    obs = torch.randn(1, A, OBS, dtype=torch.float64).expand(4000, -1, -1)
    state = torch.get_rng_state()
    logits = agent.outputs(obs)
    action = script.act(agent, logits)
    assert ((action.detach() - action.detach().round()).abs() < 1e-9).all()
    torch.testing.assert_close(action.sum(-1), torch.ones_like(action[..., 0]))
    probability = logits[0].softmax(-1)
    assert (action.mean(0) - probability).abs().max() < 0.035 and probability[1, 2] == 0
    torch.set_rng_state(state)
    soft = torch.nn.functional.gumbel_softmax(logits, hard=False)
    direction = torch.randn_like(action)
    slopes = [
        torch.autograd.grad((x * direction).sum(), agent.actors[0][0].weight, retain_graph=True)[0]
        for x in (action, soft)
    ]
    torch.testing.assert_close(*slopes)
    assert torch.equal(agent.encode(action.argmax(-1)), action.round().float())
    assert torch.equal(agent(obs), logits.argmax(-1))


def collected(script, agent, obs):
    """What `collect` does in one step of envs with these observations, (N, A) or (N, A, n)."""
    taken, flags = [], torch.zeros(len(obs), dtype=torch.bool)

    def step(action):
        taken.append(action)
        info = {"final_obs": obs, "final_alive": torch.ones(len(obs), A)}
        info |= {"episode_return": 0.0, "episode_length": 0}
        return obs, torch.zeros(len(obs), A), flags, flags, info

    envs = types.SimpleNamespace(obs=obs, alive=torch.ones(len(obs), A), step=step)
    names = "reward alive next_obs next_alive terminated done episode_return episode_length"
    rollout = {"obs": torch.zeros(1, *obs.shape), **{name: [None] for name in names.split()}}
    rollout["action"] = [None]
    script.collect(agent, envs, rollout)
    assert torch.equal(taken[0], agent.to_env(rollout["action"][0]))
    return rollout["action"][0]


@BOTH
def test_actions_that_are_not_available_are_never_drawn(script):
    agent, *_ = make_agents(script, discrete=True, available_in_obs=True)
    obs = torch.randn(300, A, OBS, dtype=torch.float64)
    obs[..., -ACTIONS:] = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    for actions in (agent(obs), collected(script, agent, obs)):
        assert set(actions[:, 0].tolist()) <= {1, 2} and set(actions[:, 1].tolist()) == {1}
    obs[:, 1] = 0.0  # it has left, and none is available: any of its own will do
    for actions in (agent(obs), collected(script, agent, obs)):
        assert set(actions[:, 1].tolist()) <= {0, 1}
    batch = {**random_batch(discrete=True), "obs": obs[:BATCH]}
    assert script.actor_loss(agent, batch, script.Args()).abs() < 1e3


@BOTH
def test_actions_are_drawn_from_the_policy(script):
    agent, *_ = make_agents(script, discrete=True)
    for parameter in agent.actors.parameters():
        parameter.data *= 3
    obs = torch.randn(1, A, OBS, dtype=torch.float64).expand(4000, -1, -1)
    actions = torch.nn.functional.one_hot(collected(script, agent, obs)).double()
    assert (actions.mean(0) - agent.outputs(obs)[0].softmax(-1)).abs().max() < 0.035


@BOTH
def test_continuous_actions(script):
    agent, *_ = make_agents(script, exploration_noise=0.5)
    obs = torch.randn(500, A, OBS, dtype=torch.float64)
    action, mean = collected(script, agent, obs), agent.outputs(obs).tanh()
    assert torch.equal(script.act(agent, agent.outputs(obs)), mean)
    assert action.abs().max() <= 1 and not action[:, 1, 2].any()
    noise = (action - mean)[mean.abs() < 0.2]
    assert 0.35 < noise.std() < 0.5  # cut at the bounds
    ends = torch.tensor([-1.0, 1.0], dtype=torch.float64).view(2, 1, 1).expand(2, A, ACTIONS)
    assert agent.to_env(ends)[:, 0].tolist() == [[-1, 0, 2], [1, 4, 3]]
    torch.testing.assert_close(agent(obs), agent.to_env(mean))


def test_noise_on_the_targets_actions_is_cut(monkeypatch):
    agent, target, args = make_agents(matd3, target_noise=10.0, target_noise_clip=0.25)
    for parameter in target.actors.parameters():
        parameter.data *= 0.1  # far from the bounds
    seen, q_values, batch = [], matd3.q_values, random_batch()

    def keep(critic, obs, action):
        if critic in (target.critics.q1, target.critics.q2):
            seen.append(action)
        return q_values(critic, obs, action)

    monkeypatch.setattr(matd3, "q_values", keep)
    matd3.critic_loss(agent, target, batch, args)
    noise = seen[0] - target.outputs(batch["next_obs"]).tanh()
    assert torch.equal(seen[0], seen[1]) and not noise[:, 1, 2].any()
    size = noise[:, 0].abs()
    assert size.max() < 0.25 + 1e-9 and (size > 0.2499).double().mean() > 0.7
    assert (noise[:, 0] > 0).any() and (noise[:, 0] < 0).any()
    for parameter in target.actors.parameters():
        parameter.data *= 100  # at the bounds
    matd3.critic_loss(agent, target, batch, args)
    assert seen[2].abs().max() == 1


@BOTH
def test_who_moves_when(script):
    """Of matd3.py actors and target networks only where they are due."""
    agent, target, args = make_agents(script)
    target.requires_grad_(False)
    batch = random_batch()
    optimizers = [
        torch.optim.Adam(network.parameters(), 1e-2) for network in (agent.critics, agent.actors)
    ]

    def weights(part):
        return torch.cat([p.detach().flatten() for p in part.parameters()]).clone()

    for number in range(7):
        before = [weights(x) for x in (agent.critics, agent.actors, target)]
        rest = script is maddpg or number in (2, 5)
        due = [] if script is maddpg else [rest]
        losses = script.update(agent, target, optimizers, batch, *due, args)
        after = [weights(x) for x in (agent.critics, agent.actors, target)]
        moved = [not torch.equal(x, y) for x, y in zip(before, after, strict=True)]
        assert moved == [True, rest, rest]
        assert losses.keys() == ({"critic", "actor"} if rest else {"critic"})
        assert all(parameter.requires_grad for parameter in agent.parameters())
        if rest:  # θ̄ ← (1 − τ) θ̄ + τ θ
            torch.testing.assert_close(after[2], before[2].lerp(weights(agent), args.tau))


@BOTH
def test_steps_are_down_shortened_gradients(script):
    """Of all critics together, and of all actors."""
    agent, target, args = make_agents(script, max_grad_norm=1e-3)
    networks = agent.critics, agent.actors
    optimizers = [torch.optim.SGD(network.parameters(), 1.0) for network in networks]
    before = [[p.detach().clone() for p in network.parameters()] for network in networks]
    script.update(agent, target, optimizers, random_batch(), *[True] * (script is matd3), args)
    for network, old in zip(networks, before, strict=True):
        step = [x - p for x, p in zip(old, network.parameters(), strict=True)]
        assert torch.cat([x.flatten() for x in step]).norm().item() == pytest.approx(1e-3, rel=1e-2)


# Runs.


@BOTH
@pytest.mark.parametrize("env", ["SpeakerListener", "SpeakerListenerContinuous"])
def test_resume_is_bit_identical(script, env, tmp_path, monkeypatch):
    tiny = {**TINY, "env": env, "total_steps": 1000, "warmup_steps": 100, "buffer_size": 600}
    ours, theirs = both_checkpoints(script, tiny, 9, tmp_path, monkeypatch)
    for part in ("agent", "target", "workers"):
        torch.testing.assert_close(ours[part], theirs[part], rtol=0, atol=0)


def test_opponents_and_play(tmp_path, capsys):
    """PettingZoo's hunt, whose agents have different rewards and observations."""
    run_dir = str(tmp_path / "run")
    env = "pettingzoo:mpe2.simple_tag_v3"
    args = maddpg.Args(**TINY, env=env, total_steps=120, warmup_steps=40, run_dir=run_dir)
    maddpg.train(args)
    play.main(play.Args(run_dir, checkpoint="last", episodes=2))
    mean, *agents, _ = capsys.readouterr().out.splitlines()[-6:]
    assert "25.0 steps long" in mean
    assert [line.rsplit(maxsplit=1)[0] for line in agents] == [f"agent {i}" for i in range(4)]
    each = [float(line.split()[2]) for line in agents]
    assert sum(each) == pytest.approx(float(mean.split()[1]), abs=0.03)
    assert each[0] == each[1] == each[2] != each[3]  # the hunters are one team
    tags = {line.split(",")[2] for line in open(f"{run_dir}/metrics.csv")}
    assert {f"eval/episodic_return_agent_{i}" for i in range(4)} < tags
    play.main(play.Args(run_dir, checkpoint="last", export=str(tmp_path / "policy.pt2")))
    exported = torch.export.load(tmp_path / "policy.pt2").module()
    assert exported(torch.zeros(5, 4, 16)).shape == (5, 4)
    with pytest.raises(UserError, match="Pendulum has one agent"):
        maddpg.train(maddpg.Args(**TINY, env="Pendulum", run_dir=str(tmp_path / "none")))


@pytest.mark.parametrize("script", [maddpg, matd3])
def test_updates_follow_what_is_collected_after_the_warm_up(script, tmp_path, monkeypatch):
    """A rollout is 20 steps: from step 200 on there are two updates each time."""
    made, update = [], script.update
    monkeypatch.setattr(script, "update", lambda *given: made.append(1) or update(*given))
    sizes = dict(total_steps=400, num_envs=4, num_steps=5, hidden_size=8, batch_size=8)
    when = dict(warmup_steps=200, utd_ratio=0.1, eval_every=0, eval_episodes=1)
    script.train(script.Args(env="SpreadContinuous", run_dir=str(tmp_path / "r"), **sizes, **when))
    assert len(made) == 2 * 11
