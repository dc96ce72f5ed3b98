"""What every learner of test_learners.py runs: 20 updates of each script on its half of a batch.

`python -m torch.distributed.run --nproc-per-node 2 learners_program.py FOLDER` writes a file for
each learner, {case: state of the agent}; learner 0, when it is alone again, writes whole.pt: the
same by one learner with the whole batch. Random numbers are patched so that a learner draws its
part of what the one draws.
"""

import copy
import importlib
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import torch
from torch import Tensor, distributed, nn

import vec_envs
from algos.worker_learner.learners import world_size

OBS = gymnasium.spaces.Box(-np.inf, np.inf, (5,))
BOX = gymnasium.spaces.Box(-2.0, 2.0, (3,))
CHOICE = gymnasium.spaces.Discrete(3)
PARTS = 2  # learners that share
NUM_STEPS, ENVS, MINIBATCH = 8, 10, 20  # of a rollout: 4 minibatches an epoch
BATCH = 20  # transitions, or windows, from a replay buffer
UPDATES = 20


class Randomness:
    """Each learner's part of random numbers that do not depend on how many learners there are."""

    patched = ("randn_like", "rand", "randint", "randperm")

    def __init__(self):
        self.calls, self.learners = 0, world_size()
        self.rank = distributed.get_rank() if self.learners > 1 else 0

    def next(self, learner: int = -1) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * self.calls + learner + 1)

    def mine(self, x: Tensor, axis: int = 0) -> Tensor:
        """The part of x that is this learner's, along its axis of the envs or of the batch."""
        size = x.shape[axis] // self.learners
        return x.narrow(axis, self.rank * size, size)

    def standard_normal(self, shape, dtype=None, device=None) -> Tensor:
        """As torch.distributions draws it: (BATCH, ...), or for windows (K, BATCH, ...)."""
        self.calls += 1
        shape, axis = list(shape), 0 if shape[0] == BATCH // self.learners else 1
        shape[axis] = BATCH
        return self.mine(torch.randn(*shape, generator=self.next()), axis)

    def randn_like(self, x: Tensor) -> Tensor:
        return self.standard_normal(x.shape)

    def rand(self, *size: int, device=None) -> Tensor:  # what all draw alike
        self.calls += 1
        return self.original["rand"](*size, generator=self.next())

    def randint(self, high: int, size: tuple, device=None) -> Tensor:
        """Places in a rollout, (T, N) flattened."""

        def draw(high: int, count: int, generator: torch.Generator) -> Tensor:
            return self.original["randint"](high, (count,), generator=generator)

        return self.places(draw, high, *size)

    def randperm(self, size: int, device=None) -> Tensor:
        def draw(high: int, count: int, generator: torch.Generator) -> Tensor:
            return self.original["randperm"](high, generator=generator)

        return self.places(draw, size, size)

    def places(self, draw, high: int, count: int) -> Tensor:
        """What the learners draw, each in its columns: minibatch by minibatch, side by side."""
        self.calls += 1
        parts = PARTS // self.learners  # that this process plays
        minibatches, width = [], ENVS // PARTS
        for learner in range(self.rank, self.rank + parts):
            own = draw(high // parts, count // parts, self.next(learner))
            if parts > 1:
                own = own // width * ENVS + learner * width + own % width
            minibatches.append(own.split(min(MINIBATCH // PARTS, len(own))))
        return torch.cat([torch.cat(together) for together in zip(*minibatches, strict=True)])

    def __enter__(self):
        self.original = {name: getattr(torch, name) for name in self.patched}
        self.original["normal"] = torch.distributions.normal._standard_normal
        torch.distributions.normal._standard_normal = self.standard_normal
        for name in self.patched:
            setattr(torch, name, getattr(self, name))
        return self

    def __exit__(self, *error) -> None:
        torch.distributions.normal._standard_normal = self.original.pop("normal")
        for name, function in self.original.items():
            setattr(torch, name, function)


def noise(seed: int, spread: int, *shape: int) -> Tensor:
    """Normal numbers whose mean and scale depend on the place along axis `spread`."""
    generator = torch.Generator().manual_seed(seed)
    across = torch.linspace(-1, 1, shape[spread]).view(-1, *[1] * (len(shape) - spread - 1))
    return (1.25 + 0.75 * across) * torch.randn(*shape, generator=generator) + across


def make_batch(random, seed, axis, lead, shapes: dict, action: gymnasium.Space, agents=()) -> dict:
    """A learner's part of noise of these shapes (*lead, ...), with the ends of episodes."""
    shapes = {"obs": (5,), "next_obs": (5,), "reward": agents, **shapes}
    batch = {}
    for number, (name, shape) in enumerate(shapes.items()):
        batch[name] = noise(100 * seed + number, axis, *lead, *shape)
    ends = noise(100 * seed + 50, axis, *lead), noise(100 * seed + 51, axis, *lead)
    batch["terminated"] = ends[0] > 2
    batch["done"] = batch["terminated"] | (ends[1] > 2)
    for name in batch.keys() & {"alive", "next_alive"}:
        batch[name] = (batch[name] > -1).float()
    for name in batch.keys() & {"weight", "discount"}:
        batch[name] = batch[name].abs().clamp(max=1)
    values = noise(100 * seed + 52, axis, *lead, *agents, *action.shape)
    discrete = isinstance(action, gymnasium.spaces.Discrete)
    batch["action"] = values.abs().long().clamp(max=action.n - 1) if discrete else values.tanh()
    return {name: random.mine(x, axis) for name, x in batch.items()}


def call(module, **given) -> None:
    """The script's own `update`, with what it asks for by name."""
    given["learn"] = getattr(module, "gradient_step", None)
    wanted = inspect.signature(module.update).parameters
    module.update(**{name: given[name] for name in wanted})


def result(agent: nn.Module, optimizer, *others: nn.Module) -> dict[str, Tensor]:
    """What must not depend on the number of learners: all but what each env has of its own."""
    state = {"learning_rate": torch.as_tensor(optimizer.param_groups[0]["lr"])}
    for number, network in enumerate((agent, *others)):
        state |= {f"{number}.{k}": x.double() for k, x in network.state_dict().items()}
    return {k: x for k, x in state.items() if not k.endswith("discounted_return")}


# On-policy scripts: as many epochs on a rollout as make 20 updates.

ON_POLICY = {
    "a2c": {},
    "ppo": {"target_kl": 0.01},
    "ppo discrete": {"entropy_coef": 0.01},
    "ppo_hterm": {},
    "pqn discrete": {},
    "mappo": {},
}


def on_policy(case: str) -> dict[str, Tensor]:
    name, learners = case.split()[0], world_size()
    module = importlib.import_module(f"algos.{name}")
    options = {"num_steps": NUM_STEPS, "num_envs": ENVS // learners, "hidden_size": 16}
    options |= {"epochs": UPDATES // (1 if name == "mappo" else 4)} if name != "a2c" else {}
    if hasattr(module.Args, "minibatch_size"):
        options["minibatch_size"] = MINIBATCH // learners
    args = module.Args(**options, **ON_POLICY[case])
    torch.manual_seed(0)
    action, shapes, agents = CHOICE if "discrete" in case else BOX, {}, ()
    if name == "mappo":
        envs = vec_envs.make("SpreadContinuous", 1, "cpu", 0)
        agent, action = module.Agent(envs, args), envs.single_action_space
        state, agents = (envs.state_dim,), (envs.num_agents,)
        shapes = dict.fromkeys(("obs", "next_obs"), (3, *envs.single_observation_space.shape))
        shapes |= {"state": state, "next_state": state, "alive": agents}
    else:
        agent = module.Agent(OBS, action, args)
    if name == "ppo_hterm":
        agent.hterm_coef.fill_(0.35)
    optimizer = torch.optim.Adam(agent.parameters(), 1e-3, eps=1e-5, fused=True)
    with Randomness() as random:
        for number in range(UPDATES if name == "a2c" else 1):
            lead = NUM_STEPS, ENVS
            rollout = make_batch(random, number, 1, lead, shapes, action, agents)
            # What a learner draws from its memory is its own: here it is given.
            past = make_batch(random, 1, 1, lead, shapes, action)
            memory = SimpleNamespace(add=lambda x: None, windows=lambda *x, past=past: past)
            call(
                module, agent=agent, optimizer=optimizer, rollout=rollout, memory=memory,
                args=args,
            )  # fmt: skip
    return result(agent, optimizer)


# Replay scripts: 20 batches, as from a replay buffer.

OFF_POLICY = {name: {} for name in "ddpg td3 sac mod_sac redq crossq xqc maddpg matd3".split()}
OFF_POLICY |= {name: {} for name in "dqn d3qn sac_discrete vdn qmix".split()}
OFF_POLICY |= {name: {} for name in ("ddpg_hterm", "td3_hterm", "sac_hterm")}
# The network that has a target network, if not the whole agent.
SLOW = dict.fromkeys(("sac", "mod_sac", "redq", "sac_discrete", "sac_hterm"), "critics")
SLOW |= {"dqn": "q_network", "d3qn": "q_network"}


def off_policy(case: str) -> dict[str, Tensor]:
    name, learners = case.split()[0], world_size()
    module = importlib.import_module(f"algos.{name}")
    options = {"batch_size": BATCH // learners, "hidden_size": 16, **OFF_POLICY[case]}
    if name in ("crossq", "xqc"):
        options |= {"critic_hidden_size": 16}
    args = module.Args(**options, num_envs=ENVS // learners)
    axis, lead, agents, shapes = 0, (BATCH,), (), {"weight": (), "discount": ()}
    torch.manual_seed(0)
    if name in ("vdn", "qmix", "maddpg", "matd3"):
        team = name in ("vdn", "qmix")
        envs = vec_envs.make("Spread" if team else "SpreadContinuous", 1, "cpu", 0)
        agent, action, agents = module.Agent(envs, args), envs.single_action_space, (3,)
        shapes = dict.fromkeys(("obs", "next_obs"), (3, *envs.single_observation_space.shape))
        shapes |= {"alive": agents, "next_alive": agents}
        if team:  # windows of several steps
            axis, lead = 1, (NUM_STEPS, BATCH)
            shapes |= dict.fromkeys(("state", "next_state"), (envs.state_dim,))
    else:
        action = CHOICE if name in ("dqn", "d3qn", "sac_discrete") else BOX
        agent = module.Agent(OBS, action, args)
    slow = getattr(agent, SLOW[name]) if name in SLOW else agent
    target = copy.deepcopy(slow).requires_grad_(False)
    critic = next((x for x in ("critics", "critic") if hasattr(agent, x)), None)
    actor = next((x for x in ("actors", "actor") if hasattr(agent, x)), None)
    parameters = [list(getattr(agent, x).parameters()) if x else [] for x in (critic, actor)]
    if hasattr(agent, "log_temperature"):
        parameters[1].append(agent.log_temperature)
    optimizers = [torch.optim.Adam(x, 1e-3, fused=True) for x in parameters if x]
    optimizer = torch.optim.Adam(agent.parameters(), 1e-3, fused=True)
    with Randomness() as random:
        for number in range(UPDATES):
            batch = make_batch(random, number, axis, lead, shapes, action, agents)
            windows = None
            if name.endswith("_hterm"):
                more = {"raw_action": BOX.shape, "log_prob": ()}
                lines = NUM_STEPS, BATCH
                windows = make_batch(random, 100 + number, 1, lines, more, action)
                over = windows["done"].cumsum(0) - windows["done"].long()
                windows["mask"] = (over == 0).float()
                windows["discount"] = args.gamma ** torch.arange(len(over)).unsqueeze(1)
                agent.hterm_coef.fill_(1e-2 if number % 4 else 1e2)  # now as it is, now limited
            call(
                module, agent=agent, target=target, optimizer=optimizer, optimizers=optimizers,
                batch=batch, windows=windows, due=number % 2 == 0, args=args,
            )  # fmt: skip
    return result(agent, optimizers[0] if optimizers else optimizer, target)


def all_cases() -> dict[str, dict[str, Tensor]]:
    results = {case: on_policy(case) for case in ON_POLICY}
    return results | {case: off_policy(case) for case in OFF_POLICY}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.save(all_cases(), folder / f"learner{rank}.pt")
    distributed.destroy_process_group()
    if rank == 0:
        torch.save(all_cases(), folder / "whole.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
