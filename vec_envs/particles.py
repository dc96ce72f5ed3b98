"""Multi-agent particle environments as batched tensors, equal step by step to mpe2's.

Discs in the plane that accelerate, glide and push each other (Lowe et al. 2017, arXiv:1706.02275;
Mordatch and Abbeel 2017, arXiv:1703.04908). Two cooperative games, each with five discrete moves
or, as `SpreadContinuous` and `SpeakerListenerContinuous`, with mpe2's continuous actions:

    Spread            three agents cover three landmarks without colliding
    SpeakerListener   one knows which landmark is the goal, the other can move: they communicate

Motion: per axis, with force F (mass 1), velocity v, position p, all from before the step,

    p ← p + v dt              v ← (1 − damping) v + F dt             `physics="mpe2"`
    v ← (1 − damping) v + F dt   and then   p ← p + v dt             `physics="openai"`

openai is the order in the first authors' code, which most published returns come from (on a command
line: --env Spread,physics=openai); forces, observations and rewards here are mpe2's in both.
`dtype` is that of the simulator's state; observations and rewards are float32. First states are
drawn from this project's own generator: equal means that from the same state the same actions lead
to the same states, observations and rewards.

What a return means (sum over agents, 25 steps, physics mpe2):

    Spread                     random −79.1   doing nothing −73.1   best assignment, scripted −26.7
    SpeakerListener            random −79.8   message ignored −31.4   goal known, scripted −15.0

Source: mpe2/simple_spread, mpe2/simple_speaker_listener, Farama Foundation, MIT licence.
"""

from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor
from torch.nn.functional import embedding, pad

from vec_envs.core import MultiAgentVecEnv

PHYSICS = ("mpe2", "openai")
COLOURS = np.array([[0.65, 0.15, 0.15], [0.15, 0.65, 0.15], [0.15, 0.15, 0.65]])  # of landmarks


class ParticleEnv(MultiAgentVecEnv):
    """What the games have in common: agents that move, landmarks that do not, and rendering."""

    state_names = ("position", "velocity", "landmark")
    dt, damping, push = 0.1, 0.25, 5.0  # s, share of v lost in a step, force of a move
    num_landmarks = 3
    continuous = False
    radius: tuple[float, ...]  # of the agents, then of the landmarks
    obs_dims: tuple[int, ...]  # of each agent, as the next
    action_dims: tuple[int, ...]

    def __init__(
        self, num_envs: int, device: torch.device | str = "cpu", seed: int = 0,
        physics: str = "mpe2", dtype: torch.dtype = torch.float32,
    ):  # fmt: skip
        name = type(self).__name__
        if physics not in PHYSICS:
            raise ValueError(f"{name}: physics is {physics!r}, allowed are {', '.join(PHYSICS)}")
        spaces = (
            [Box(-np.inf, np.inf, (size,)) for size in self.obs_dims],
            [Box(0.0, 1.0, (n,)) if self.continuous else Discrete(n) for n in self.action_dims],
        )
        super().__init__(name, num_envs, device, seed, *spaces, max_episode_steps=25)
        self.physics, self.dtype = physics, dtype
        if physics != "mpe2":
            self.known_returns = {}
        kind = {"dtype": dtype, "device": self.device}
        self.position = torch.zeros(num_envs, self.num_agents, 2, **kind)
        self.velocity = torch.zeros(num_envs, self.num_agents, 2, **kind)
        self.landmark = torch.zeros(num_envs, self.num_landmarks, 2, **kind)
        # nothing, left, right, down, up
        moves = [[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]]
        self._moves = self.push * torch.tensor(moves, **kind)

    def _restart(self, mask: Tensor) -> None:
        mask = mask.view(-1, 1, 1)
        agents, landmarks = self.num_agents, self.num_landmarks
        places = self.uniform(-1.0, 1.0, agents + landmarks, 2, dtype=self.dtype)
        self.position = torch.where(mask, places[:, :agents], self.position)
        self.landmark = torch.where(mask, places[:, agents:], self.landmark)
        self.velocity = torch.where(mask, 0.0, self.velocity)

    def _force_of(self, action: Tensor) -> Tensor:
        """The agents' own forces (..., 2) of actions (..., 5) or, discrete, (...)."""
        if not self.continuous:
            return embedding(action.long(), self._moves)  # rows by index, without a synchronisation
        action = action.clamp(0, 1)
        direction = action[..., 2:5:2] - action[..., 1:5:2]  # right − left, up − down
        return self.push * direction.to(self.dtype)

    def _move(self, force: Tensor) -> None:
        """One step of the motion with `force` (N, A, 2)."""
        if self.physics == "mpe2":
            self.position = self.position + self.velocity * self.dt
        self.velocity = self.velocity * (1 - self.damping) + force * self.dt
        if self.physics == "openai":
            self.position = self.position + self.velocity * self.dt

    def _colours(self, index: int) -> np.ndarray:
        """Colours of the agents, then of the landmarks (A + L, 3), in [0, 1]."""
        raise NotImplementedError

    def render(self, index: int = 0) -> np.ndarray:
        """An RGB picture (350, 350, 3) uint8 of env number `index`: the square from −1.4 to 1.4."""
        entities = torch.cat((self.position[index], self.landmark[index])).double().cpu().numpy()
        side = (np.arange(350) + 0.5) / 125 - 1.4
        picture = np.full((350, 350, 3), 255, np.uint8)
        last_first = reversed(list(zip(entities, self.radius, self._colours(index), strict=True)))
        for (x, y), radius, colour in last_first:  # agents last, above the landmarks
            distance = np.hypot(side[None, :] - x, -side[:, None] - y)  # rows count downwards
            picture[distance < radius] = 255 * np.minimum(colour, 1)
            picture[np.abs(distance - radius) < 0.006] = 0
        return picture


def length(vector: Tensor) -> Tensor:
    """‖vector‖, (..., 2) -> (...), rounded as in NumPy."""
    x, y = vector.unbind(-1)
    return (x * x + y * y).sqrt()


class Spread(ParticleEnv):
    """Three agents cover three landmarks without colliding (mpe2's simple_spread_v3).

    Observation (18,): own velocity, own position, the landmarks and then the other agents relative
    to it, four zeros (the others' messages in mpe2, which nobody sends here).
    Action: 0 nothing, 1 left, 2 right, 3 down, 4 up; continuous (5,) in [0, 1]: 2 − 1, 4 − 3.
    Reward of agent i: ½ G − ½ (how many agents overlap with it), G = − Σ over landmarks of the
    distance to the nearest agent.
    Truncated after 25 steps. First state: all places uniform in [−1, 1]², at rest.
    """

    known_returns = {"random": -79.1, "doing nothing": -73.1, "scripted": -26.7}
    radius = (0.15,) * 3 + (0.05,) * 3
    contact_force, contact_margin = 100.0, 1e-3
    obs_dims, action_dims = (18,) * 3, (5,) * 3

    def __init__(self, *where: Any, **options: Any):
        super().__init__(*where, **options)
        # Pairs (0, 1), (0, 2), (1, 2), and how each agent sees its two: which row of (Δ, −Δ).
        self._first = torch.tensor([0, 0, 1], device=self.device)
        self._second = torch.tensor([1, 2, 2], device=self.device)
        self._own_pairs = torch.tensor([0, 1, 3, 2, 4, 5], device=self.device)
        self._zero = torch.zeros((), dtype=self.dtype, device=self.device)
        self._no_message = torch.zeros(self.num_envs, 3, 4, device=self.device)

    def _pairs(self) -> tuple[Tensor, Tensor]:
        """Δ from the second agent to the first (N, pairs, 2), and its length (N, pairs)."""
        first = self.position.index_select(1, self._first)
        difference = first - self.position.index_select(1, self._second)
        return difference, length(difference)

    def _of_each(self, vector: Tensor) -> Tensor:
        """A vector that is ±x (N, pairs, 2) to a pair's agents -> (N, A, the other two, 2)."""
        both = torch.cat((vector, -vector), 1)
        return both.index_select(1, self._own_pairs).view(-1, 3, 2, vector.shape[2])

    def _simulate(self, action: Tensor) -> tuple[Tensor, Tensor]:
        # Contact: F = 100 Δ/d · k log(1 + exp(−(d − 0.3) / k)), on the first of a pair
        (away, distance), k = self._pairs(), self.contact_margin
        depth = torch.logaddexp(self._zero, -(distance - 2 * self.radius[0]) / k) * k
        contact = self.contact_force * away / distance.unsqueeze(-1) * depth.unsqueeze(-1)
        contact = self._of_each(contact)
        self._move(self._force_of(action) + contact[:, :, 0] + contact[:, :, 1])

        nearest = length(self.landmark.unsqueeze(2) - self.position.unsqueeze(1)).amin(2)  # (N, L)
        overlap = (self._pairs()[1] < 2 * self.radius[0]).to(self.dtype).unsqueeze(-1)
        collisions = self._of_each(overlap).abs().sum((2, 3))  # (N, A)
        reward = -0.5 * nearest.sum(1, keepdim=True) - 0.5 * collisions
        return reward, torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)

    def _observe(self) -> Tensor:
        landmarks = (self.landmark.unsqueeze(1) - self.position.unsqueeze(2)).flatten(2)
        others = self._of_each(-self._pairs()[0]).flatten(2)  # (N, A, 4)
        parts = torch.cat((self.velocity, self.position, landmarks, others), 2)
        return torch.cat((parts.float(), self._no_message), 2)

    def _colours(self, index: int) -> np.ndarray:
        return np.array([[0.35, 0.35, 0.85]] * 3 + [[0.25, 0.25, 0.25]] * 3)


class SpreadContinuous(Spread):
    """Spread with continuous actions (5,) in [0, 1]."""

    known_returns = {**Spread.known_returns, "random": -75.3}
    continuous = True


class SpeakerListener(ParticleEnv):
    """A speaker that cannot move tells a listener where to go (mpe2's simple_speaker_listener_v4).

    Observation of agent 0, the speaker (3,): the colour of the goal. Of agent 1, the listener
    (11,): own velocity, the landmarks relative to it, the speaker's last message, one-hot (zero
    at the first step).
    Action of the speaker: one of 3 messages; continuous (3,) in [0, 1]: the message itself. Of the
    listener: as in Spread.
    Reward of both: − (distance of listener and goal)².
    Truncated after 25 steps. First state: all places uniform in [−1, 1]², any landmark the goal.
    """

    known_returns = {"random": -79.8, "message ignored": -31.4, "scripted": -15.0}
    radius = (0.075,) * 2 + (0.04,) * 3
    state_names = (*ParticleEnv.state_names, "goal", "message")
    obs_dims, action_dims = (3, 11), (3, 5)

    def __init__(self, *where: Any, **options: Any):
        super().__init__(*where, **options)
        self.goal = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self.message = torch.zeros(self.num_envs, 3, device=self.device)
        self._colour = torch.tensor(COLOURS, dtype=torch.float32, device=self.device)
        self._messages = torch.eye(3, device=self.device)

    def _restart(self, mask: Tensor) -> None:
        random = {"generator": self.generator, "device": self.device}
        goal = torch.randint(self.num_landmarks, (self.num_envs,), **random)
        self.goal = torch.where(mask, goal, self.goal)
        self.message = torch.where(mask.unsqueeze(1), 0.0, self.message)
        super()._restart(mask)

    def _simulate(self, action: Tensor) -> tuple[Tensor, Tensor]:
        force = self._force_of(action[:, 1:])  # (N, 1, 2)
        self._move(torch.cat((torch.zeros_like(force), force), 1))
        message = action[:, 0]
        if self.continuous:
            self.message = message[:, :3].float().clamp(0, 1)
        else:
            self.message = embedding(message.long(), self._messages)

        goal = self.landmark.gather(1, self.goal.view(-1, 1, 1).expand(-1, 1, 2)).squeeze(1)
        reward = -(self.position[:, 1] - goal).square().sum(1, keepdim=True)
        terminated = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        return reward.expand(-1, 2), terminated

    def _observe(self) -> Tensor:
        landmarks = (self.landmark - self.position[:, 1:]).flatten(1)
        listener = torch.cat((self.velocity[:, 1], landmarks), 1).float()
        listener = torch.cat((listener, self.message), 1)  # (N, 11)
        speaker = pad(embedding(self.goal, self._colour), (0, 8))
        return torch.stack((speaker, listener), 1)

    def _colours(self, index: int) -> np.ndarray:
        speaker = self.message[index].cpu().numpy() * 0.5 + 0.25  # the colour that it names
        listener = COLOURS[self.goal[index]] + 0.3
        return np.concatenate(([speaker, listener], COLOURS))


class SpeakerListenerContinuous(SpeakerListener):
    """SpeakerListener with continuous actions in [0, 1]: (3,) of the speaker, (5,) the listener."""

    known_returns = {**SpeakerListener.known_returns, "random": -72.5}
    continuous = True
