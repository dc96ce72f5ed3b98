"""Worker processes collect what the same environments would have given in this process."""

from types import SimpleNamespace

import pytest
import torch

import vec_envs
from algos import ppo, sac
from algos.worker_learner import Workers

HORIZON, ROLLOUTS = 30, 3


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
