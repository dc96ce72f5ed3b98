"""Worker processes, and compiled rollouts, collect what the same envs would have given here."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import vec_envs
from algos import ppo, sac
from algos.worker_learner import RunArgs, Workers

HORIZON, ROLLOUTS = 30, 3
ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("module", [ppo, sac])
def test_workers_collect_what_the_same_envs_would_here(module):
    args = module.Args(env="Pendulum", num_envs=5, num_workers=2, seed=3, device="cpu")
    run = SimpleNamespace(args=args, device=torch.device("cpu"), check_rollout=lambda rollout: None)
    workers = Workers(run, module.collect)
    torch.manual_seed(0)
    agent = module.Agent(workers.observation_space, workers.action_space, args)
    collected = []
    try:
        empty = workers.start(agent, HORIZON)
        shapes = {name: (tensor.shape[2:], tensor.dtype) for name, tensor in empty.items()}
        for number in range(ROLLOUTS):
            with torch.no_grad():  # the workers see the weights as they are now
                for parameter in agent.parameters():
                    parameter.add_(0.01 * number)
            collected.append({name: x.clone() for name, x in workers.collect().items()})
            assert collected[-1]["obs"].abs().sum() > 0
    finally:
        workers.close()

    for index, columns in enumerate((slice(0, 2), slice(2, 5))):
        torch.manual_seed(0)
        agent = module.Agent(workers.observation_space, workers.action_space, args)
        seed = args.seed + 1_000_003 * (index + 1)
        torch.manual_seed(seed)
        envs = vec_envs.make("Pendulum", columns.stop - columns.start, seed=seed)
        envs.reset()
        for number, theirs in enumerate(collected):
            with torch.no_grad():
                for parameter in agent.parameters():
                    parameter.add_(0.01 * number)
            ours = {
                name: torch.zeros(HORIZON, envs.num_envs, *shape, dtype=dtype)
                for name, (shape, dtype) in shapes.items()
            }
            module.collect(agent, envs, ours)
            for name, tensor in ours.items():
                assert torch.equal(tensor, theirs[name][:, columns]), (index, number, name)


def count_on(agent, envs, rollout):
    """As a policy that remembers: this collection begins with what the last one ended with."""
    rollout["count"].copy_(rollout["count"][-1:] + 1)


def test_a_replaced_worker_begins_anew_and_the_replay_buffer_knows():
    args = sac.Args(env="Pendulum", num_envs=2, num_workers=1, device="cpu")
    ended = []
    run = SimpleNamespace(args=args, device=torch.device("cpu"), check_rollout=lambda rollout: None)
    run.end_episodes = lambda: ended.append(len(ended))
    workers = Workers(run, count_on, ahead=True)
    agent = sac.Agent(workers.observation_space, workers.action_space, args)
    workers.start(agent, 4, count=())
    try:
        workers.collect()
        assert workers.collect()["count"].eq(2).all() and not ended
        workers._children[0].process.kill()
        workers._children[0].process.join()
        workers.collect()  # perhaps it had sent this before it was killed
        assert workers.collect()["count"].le(2).all() and ended == [0]
    finally:
        workers.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_environments_that_start_anew_do_not_repeat_the_runs_beginning(num_workers):
    args = ppo.Args(env="Pendulum", num_envs=4, num_workers=num_workers, seed=3, device="cpu")
    run = SimpleNamespace(args=args, device=torch.device("cpu"), check_rollout=lambda rollout: None)
    begun = []
    for step in (None, 0, 1000, 1000, 2000):
        workers = Workers(run, ppo.collect)
        torch.manual_seed(0)
        agent = ppo.Agent(workers.observation_space, workers.action_space, args)
        workers.start(agent, 2)
        if step is not None:
            workers.start_anew(step)
        begun.append({name: x.clone() for name, x in workers.collect().items()})
        workers.close()
    plain, zero, one, again, two = (rollout["obs"][0] for rollout in begun)
    assert torch.equal(plain, zero) and torch.equal(one, again)
    for a, b in ((plain, one), (plain, two), (one, two)):
        assert (a != b).any(1).all()
    if num_workers:  # their random generators too
        actions = [rollout["action"][0] for rollout in begun]
        assert torch.equal(actions[2], actions[3]) and (actions[1] != actions[2]).any(1).all()


class Sign(torch.nn.Module):
    """A policy without noise: a discrete action, by the sign of what is seen."""

    def forward(self, obs):
        return (obs.sum(-1) > 0).long()


@torch.no_grad()
def collect(agent, envs, rollout):
    for t in range(len(rollout["obs"])):
        rollout["obs"][t] = envs.obs
        _, reward, terminated, truncated, info = envs.step(agent(envs.obs))
        rollout["reward"][t] = reward
        rollout["next_obs"][t] = info["final_obs"]
        rollout["done"][t] = terminated | truncated
        rollout["episode_return"][t] = info["episode_return"]
        rollout["episode_length"][t] = info["episode_length"]


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
@pytest.mark.parametrize("env", ["CartPole", "MountainCar", "Spread"])
def test_a_compiled_rollout_is_what_the_same_envs_would_give(env):
    """But for the restart of an episode, whose random numbers are others."""
    rollouts = []
    for how in ("none", "rollout"):
        args = RunArgs(env=env, num_envs=4, device="cpu", compile=how)
        run = SimpleNamespace(args=args, device=torch.device("cpu"), check_rollout=lambda x: None)
        workers = Workers(run, collect, multi_agent=env == "Spread")
        workers.start(Sign(), 3)
        workers.envs._lengths[1] = workers.envs.max_episode_steps - 2  # a time limit inside
        rollouts.append({name: x.clone() for name, x in workers.collect().items()})
        assert workers.envs.looks == (how == "none")
    eager, compiled = rollouts
    assert eager["done"].nonzero().tolist() == compiled["done"].nonzero().tolist() == [[1, 1]]
    for name in eager:
        torch.testing.assert_close(eager[name][:2], compiled[name][:2], atol=1e-6, rtol=1e-6)
        rest = (slice(None), [0, 2, 3])
        torch.testing.assert_close(eager[name][rest], compiled[name][rest], atol=1e-6, rtol=1e-6)
    assert compiled["episode_length"][2, 1] == 1
    first = compiled["obs"][2, 1]  # of the next episode
    assert not torch.equal(first, compiled["next_obs"][1, 1])
    if env == "CartPole":
        assert 0 < first.abs().max() <= 0.05


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_a_worker_that_compiled_leaves_nothing_behind(tmp_path):
    command = [sys.executable, ROOT / "algos" / "dqn.py", "--num-envs", "2", "--num-workers", "1"]
    command += ["--compile", "rollout", "--total-steps", "1500", "--eval-episodes", "1"]
    done = subprocess.run(
        [*command, "--run-dir", tmp_path / "run"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "Done: 1500 steps" in done.stdout
    assert "leaked" not in done.stderr
