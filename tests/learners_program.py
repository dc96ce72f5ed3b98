"""What every learner of test_learners.py runs: 20 updates of each script on its half of a batch.

`python -m torch.distributed.run --nproc-per-node 2 learners_program.py FOLDER` writes a file for
each learner, {case: state of the agent}; learner 0, when it is alone again, writes whole.pt: the
same by one learner with the whole batch. Random numbers are patched so that a learner draws its
part of what the one draws.
"""

import copy
import importlib
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import torch
from torch import Tensor, distributed, nn

import vec_envs
from algos.worker_learner import count_learners, flatten, gradient_of

OBS = gymnasium.spaces.Box(-np.inf, np.inf, (5,))
BOX = gymnasium.spaces.Box(-2.0, 2.0, (3,))
CHOICE = gymnasium.spaces.Discrete(3)
PARTS = 2  # learners that share
HORIZON, ENVS, MINIBATCH = 8, 10, 20  # of a rollout: 4 minibatches an epoch
BATCH = 20  # transitions from a replay buffer
UPDATES = 20


class Randomness:
    """Each learner's part of random numbers that do not depend on how many learners there are."""

    def __init__(self, batch: int):
        self.batch, self.calls = batch, 0
        self.learners = count_learners()
        self.rank = distributed.get_rank() if self.learners > 1 else 0

    def next(self, learner: int = -1) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * self.calls + learner + 1)

    def mine(self, x: Tensor, axis: int = 0) -> Tensor:
        """The part of x that is this learner's, along its axis of the envs or of the batch."""
        size = x.shape[axis] // self.learners
        return x.narrow(axis, self.rank * size, size)

    def randn_like(self, x: Tensor) -> Tensor:
        """For a batch, or for T steps of windows: (T × batch, ...)."""
        self.calls += 1
        x = x.unflatten(0, (-1, self.batch // self.learners))
        whole = torch.randn(len(x), self.batch, *x.shape[2:], generator=self.next())
        return self.mine(whole, 1).flatten(0, 1)

    def rand(self, *size: int, device=None) -> Tensor:  # what all draw alike
        self.calls += 1
        return self.kept["rand"](*size, generator=self.next())

    def randint(self, high: int, size: tuple, device=None) -> Tensor:
        """Places in a rollout, (T, N) flattened."""

        def draw(high: int, count: int, generator: torch.Generator) -> Tensor:
            return self.kept["randint"](high, (count,), generator=generator)

        return self.places(draw, high, *size)

    def randperm(self, size: int, device=None) -> Tensor:
        def draw(high: int, count: int, generator: torch.Generator) -> Tensor:
            return self.kept["randperm"](high, generator=generator)

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
        names = ("randn_like", "rand", "randint", "randperm")
        self.kept = {name: getattr(torch, name) for name in names}
        for name in names:
            setattr(torch, name, getattr(self, name))
        return self

    def __exit__(self, *error) -> None:
        for name, function in self.kept.items():
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
    values = noise(100 * seed + 52, axis, *lead, *agents, *action.shape)
    discrete = isinstance(action, gymnasium.spaces.Discrete)
    batch["action"] = values.abs().long().clamp(max=action.n - 1) if discrete else values.tanh()
    return {name: random.mine(x, axis) for name, x in batch.items()}


def result(agent: nn.Module, optimizer, *others: nn.Module) -> dict[str, Tensor]:
    """What must not depend on the number of learners: all but what each env has of its own."""
    state = {"learning_rate": torch.as_tensor(optimizer.param_groups[0]["lr"])}
    for number, network in enumerate((agent, *others)):
        state |= {f"{number}.{k}": x.double() for k, x in network.state_dict().items()}
    own = ("discounted_return", "noise", "kept")
    return {k: x for k, x in state.items() if not k.endswith(own)}


# On-policy scripts: as many epochs on a rollout as make 20 updates.

ON_POLICY = {
    "a2c": {},
    "ppo": {"learning_rate_schedule": "adaptive"},
    "ppo discrete": {"clip_value": True, "entropy_coef": 0.01},
    "ppo_hterm": {},
    "ppo_hterm_variants": {"hterm_length": 2},
    "pqn discrete": {},
    "mappo": {"learning_rate_schedule": "adaptive"},
}


def on_policy(case: str) -> dict[str, Tensor]:
    name = case.split()[0]
    module = importlib.import_module(f"algos.{name}")
    learners = count_learners()
    options = {"horizon": HORIZON, "num_envs": ENVS // learners, "hidden_size": 16}
    if name != "a2c":
        options |= {"epochs": UPDATES // 4, "minibatch_size": MINIBATCH // learners}
    args = module.Args(**options, **ON_POLICY[case])
    torch.manual_seed(0)
    with Randomness(MINIBATCH) as random:
        if name == "mappo":
            envs = vec_envs.make("SpreadContinuous", 1, "cpu", 0)
            agent = module.Agent(envs, args)
            state, agents = (envs.state_dim,), (envs.num_agents,)
            seen = (*agents, *envs.single_observation_space.shape)
            shapes = {"obs": seen, "next_obs": seen, "state": state, "next_state": state}
            shapes |= {"alive": agents}
            action = envs.single_action_space
        else:
            action, shapes, agents = CHOICE if "discrete" in case else BOX, {}, ()
            agent = module.Agent(OBS, action, args)
        weights = flatten(agent)
        optimizer = torch.optim.Adam([weights], torch.tensor(1e-3), eps=1e-5, fused=True)
        loss = next(
            getattr(module, name)
            for name in ("minibatch_loss", "batch_loss", "q_loss")
            if hasattr(module, name)
        )
        gradients = gradient_of(loss, agent)
        if "hterm" in name:
            second = "hamiltonian_term" if name == "ppo_hterm" else f"{args.hterm}_term"
            gradients = gradients, gradient_of(getattr(module, second), agent)
        extra: tuple = ()
        for number in range(UPDATES if name == "a2c" else 1):
            lead = HORIZON, ENVS
            rollout = make_batch(random, number, 1, lead, shapes, action, agents)
            if name == "ppo_hterm":
                memory = module.SpinMemory(rollout, args)
                spins = make_batch(random, 1, 0, (MINIBATCH // 2,), {"returns": ()}, action)
                # What a learner draws is its own: here it is given.
                memory.draw = lambda *inputs, spins=spins: itertools.repeat(spins)
                extra = memory, args.hterm_coef
            if name == "ppo_hterm_variants":
                extra = module.Windows(rollout, args), 0.125
            module.update(agent, optimizer, rollout, gradients, args, *extra)
    return result(agent, optimizer)


# Replay scripts: 20 batches, as from a replay buffer.

OFF_POLICY = {name: {} for name in "ddpg td3 sac mod_sac redq crossq maddpg matd3".split()}
OFF_POLICY |= {name: {} for name in "dqn d3qn sac_discrete".split()}
OFF_POLICY |= {name: {"recurrent": True} for name in "vdn qmix".split()}
OFF_POLICY["td3 clipped"] = {"max_grad_norm": 0.1}
OFF_POLICY |= {name: {} for name in ("ddpg_hterm", "td3_hterm", "sac_hterm")}
OFF_POLICY["sac_hterm energy"] = {"hterm": "energy"}


def off_policy(case: str) -> dict[str, Tensor]:
    name = case.split()[0]
    module = importlib.import_module(f"algos.{name}")
    options = {"batch_size": BATCH // count_learners(), "hidden_size": 16, **OFF_POLICY[case]}
    if name == "crossq":
        options |= {"critic_hidden_size": 16, "renorm_after": 10}
    args = module.Args(**options, num_envs=ENVS // count_learners())
    shapes = {"weight": (), "discount": ()}
    axis, lead, agents = 0, (BATCH,), ()
    torch.manual_seed(0)
    if name in ("vdn", "qmix", "maddpg", "matd3"):
        kind = "Spread" if name in ("vdn", "qmix") else "SpreadContinuous"
        envs = vec_envs.make(kind, 1, "cpu", 0)
        agent, action, agents = module.Agent(envs, args), envs.single_action_space, (3,)
        shapes = dict.fromkeys(("obs", "next_obs"), (3, *envs.single_observation_space.shape))
        shapes |= {"alive": agents, "next_alive": agents}
        if name in ("vdn", "qmix"):
            axis, lead = 1, (HORIZON, BATCH)
            state = dict.fromkeys(("state", "next_state"), (envs.state_dim,))
            shapes |= {"reward": (), "hidden": (3, args.hidden_size), **state}
    else:
        action = CHOICE if name in ("dqn", "d3qn", "sac_discrete") else BOX
        agent = module.Agent(OBS, action, args)
    with Randomness(BATCH) as random:
        rest = axis, lead, shapes, action, agents
        batches = [make_batch(random, seed, *rest) for seed in range(UPDATES)]
        for batch in batches:
            for positive in batch.keys() & {"weight", "discount"}:
                batch[positive] = batch[positive].abs().clamp(max=1)
        windows = []
        if "hterm" in name:
            for seed in range(UPDATES):
                lead, shapes = (HORIZON, BATCH), {"x": BOX.shape, "log_prob": ()}
                windows.append(make_batch(random, 100 + seed, 1, lead, shapes, action))
                over = windows[-1]["done"].cumsum(0) - windows[-1]["done"].long()
                windows[-1]["mask"] = (over == 0).float()
        agent_after, target, optimizer = updates(name, module, agent, args, batches, windows)
    return result(agent_after, optimizer, *target)


def updates(name: str, module, agent: nn.Module, args, batches: list, windows: list) -> tuple:
    """All batches, by the script's own `update` -> the agent, [target], an optimizer."""
    if name in ("dqn", "d3qn", "sac_discrete", "vdn", "qmix"):
        which = {"dqn": "q_network", "d3qn": "q_network", "sac_discrete": "critics"}.get(name)
        target = copy.deepcopy(getattr(agent, which) if which else agent)
        weights, loss = flatten(agent), {"sac_discrete": "sac_loss"}.get(name, "q_loss")
        loss = gradient_of(getattr(module, loss if which else "td_loss"), agent)
        optimizer = torch.optim.Adam([weights], torch.tensor(1e-3), fused=True)
        remaining = iter(batches)

        def sample(size):
            batch = next(remaining)
            if name in ("vdn", "qmix"):  # a stretch of each env is one thing
                ones = torch.ones(batch["done"].shape[1])
                batch = {k: x.transpose(0, 1) for k, x in batch.items()}
                batch |= {"weight": ones, "discount": ones}
            return {**batch, "index": torch.arange(len(batch["done"]))}

        replay = SimpleNamespace(sample=sample, update_priorities=lambda *a: None)
        for _ in batches:
            module.update(agent, target, optimizer, replay, loss, args)
        return agent, [target], optimizer
    actor, critic = ("actors", "critics") if name in ("maddpg", "matd3") else ("actor", "critics")
    if name in ("ddpg", "ddpg_hterm"):
        critic = "critic"
    whole = name not in ("sac", "sac_hterm", "mod_sac", "redq")
    target = copy.deepcopy(agent if whole else agent.critics)
    optimizers = [
        torch.optim.Adam([flatten(getattr(agent, part))], torch.tensor(1e-3), fused=True)
        for part in (critic, actor)
    ]
    actor_loss = getattr(module, "policy_loss", module.actor_loss)
    gradients = [
        gradient_of(loss, getattr(agent, part))
        for loss, part in ((module.critic_loss, critic), (actor_loss, actor))
    ]
    numbered = name in ("td3", "td3_hterm", "redq", "crossq", "matd3")
    targets = [] if name == "crossq" else [target.requires_grad_(False)]
    if windows:
        energy = getattr(args, "hterm", "chain") == "energy"
        term = module.energy_term if energy else module.hamiltonian_term
        gradients.append(gradient_of(term, agent.actor))
    for number, batch in enumerate(batches):
        # now as it is, now capped
        term = [windows[number], 1e-2 if number % 4 else 1e2] if windows else []
        extra = [*([number] if numbered else []), args, *term]
        module.update(agent, *targets, optimizers, batch, gradients, *extra)
    return agent, targets, optimizers[0]


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
