"""Five classic control problems as batched tensors, equal step by step to Gymnasium's environments.

CartPole-v1, Pendulum-v1, Acrobot-v1, MountainCar-v0 and MountainCarContinuous-v0: the same
equations, constants, distribution of first states, reward, termination, time limit and keyword
arguments. First states are drawn from this project's own generator, so equal means: from the same
state, the same actions lead to the same states, observations and rewards.

The whole simulator state of an env is one row of `state` (N, state_dim): float64 on a CPU, as in
Gymnasium (float32 where Gymnasium rounds to it), and float32 on a GPU. The equations are written
for arrays of `xp`: NumPy on a CPU, where its calls on small arrays take a third of torch's time,
and torch on a GPU.

Source: gymnasium/envs/classic_control/*.py, Farama Foundation, MIT licence.
"""

import functools
import math
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from vec_envs.core import VecEnv

Array = Any  # of NumPy or torch, whichever `xp` is


class ClassicEnv(VecEnv):
    """What the five have in common: a state of one row per env, Gymnasium's spaces, time limit and
    pictures.

    A subclass writes `_initial_state` and `_advance`, and `_observe` if it is not the state.
    """

    state_names = ("state",)
    gymnasium_id: str
    state_dim: int
    cpu_dtype = torch.float64

    def __init__(self, num_envs: int, device: torch.device | str = "cpu", seed: int = 0):
        theirs = gymnasium.make(self.gymnasium_id)
        spaces = theirs.observation_space, theirs.action_space
        steps = theirs.spec.max_episode_steps
        super().__init__(type(self).__name__, num_envs, device, seed, *spaces, steps)
        self.dtype = self.cpu_dtype if self.device.type == "cpu" else torch.float32
        self.state = torch.zeros(num_envs, self.state_dim, dtype=self.dtype, device=self.device)

    @property
    def xp(self) -> Any:
        return np if self.looks else torch

    def _initial_state(self) -> Tensor:
        """A fresh first state for every env -> (N, state_dim)."""
        raise NotImplementedError

    def _advance(self, state: Array, action: Array) -> tuple[tuple[Array, ...], Array, Array]:
        """One step from the columns of the state -> new columns, reward, terminated, (N,) each."""
        raise NotImplementedError

    def _simulate(self, action: Tensor) -> tuple[Tensor, Tensor]:
        if self.xp is torch:
            columns, reward, terminated = self._advance(self.state.T, action)
            self.state = torch.stack(columns, 1)
            return reward, terminated
        columns, reward, terminated = self._advance(self.state.numpy().T, action.numpy())
        self.state = torch.from_numpy(np.stack(columns, 1))
        return torch.from_numpy(reward), torch.from_numpy(terminated)

    def _restart(self, mask: Tensor) -> None:
        # Drawn for all envs, so that the number of draws does not depend on how many are done.
        self.state = torch.where(mask.unsqueeze(1), self._initial_state(), self.state)

    def _observe(self) -> Tensor:
        # A copy even where the state is float32 already: a caller that changes an observation in
        # place must not change the state.
        return self.state.to(torch.float32, copy=True)

    def render(self, index: int = 0) -> np.ndarray:
        """An RGB picture (height, width, 3) uint8 of env number `index`, by Gymnasium's own env.

        Raises gymnasium.error.DependencyNotInstalled where pygame is missing.
        """
        self._gymnasium_env.state = self.state[index].double().cpu().numpy()
        return self._gymnasium_env.render()

    @functools.cached_property
    def _gymnasium_env(self) -> gymnasium.Env:
        env = gymnasium.make(self.gymnasium_id, render_mode="rgb_array")
        env.reset()  # Pendulum's render() reads an attribute that reset() sets
        return env.unwrapped


class CartPole(ClassicEnv):
    """Balance a pole on a cart by pushing the cart to the left or to the right (CartPole-v1).

    Observation (4,): cart position x [m], velocity ẋ [m/s], pole angle θ from upright [rad], θ̇.
    Action: 0 pushes to the left, 1 to the right, with 10 N.
    Reward: 1 per step; with `sutton_barto_reward` 0 per step and −1 when the pole falls.
    Terminates at |x| > 2.4 m or |θ| > 12°; truncated after 500 steps.
    First state: uniform in ±0.05, all four.
    Source: Barto, Sutton, Anderson 1983; https://coneural.org/florian/papers/05_cart_pole.pdf.
    """

    gymnasium_id, state_dim = "CartPole-v1", 4
    gravity = 9.8  # m/s²
    cart_mass, pole_mass = 1.0, 0.1  # kg
    half_length = 0.5  # m, from the joint to the pole's centre of mass
    push = 10.0  # N
    dt = 0.02  # s
    max_x, max_angle = 2.4, 12 * 2 * math.pi / 360  # m, rad

    def __init__(
        self, num_envs: int, device: torch.device | str = "cpu", seed: int = 0,
        sutton_barto_reward: bool = False,
    ):  # fmt: skip
        super().__init__(num_envs, device, seed)
        if not isinstance(sutton_barto_reward, bool):
            raise ValueError(f"sutton_barto_reward is {sutton_barto_reward!r}, not true or false")
        self.sutton_barto_reward = sutton_barto_reward

    def _initial_state(self) -> Tensor:
        return self.uniform(-0.05, 0.05, 4, dtype=self.dtype)

    def _advance(self, state: Array, action: Array) -> tuple[tuple[Array, ...], Array, Array]:
        xp, (x, x_dot, theta, theta_dot) = self.xp, state
        sin, cos = xp.sin(theta), xp.cos(theta)
        total_mass = self.cart_mass + self.pole_mass
        moment = self.pole_mass * self.half_length  # the pole's mass times its lever, kg m

        # θ̈ = (g sin θ − a cos θ) / (l (4/3 − m cos²θ / M)) and ẍ = a − m l θ̈ cos θ / M,
        # with a = (F + m l θ̇² sin θ) / M, the cart's acceleration without the term of θ̈.
        force = xp.where(action == 1, self.push, -self.push)
        bare_acc = (force + moment * theta_dot**2 * sin) / total_mass
        theta_acc = (self.gravity * sin - cos * bare_acc) / (
            self.half_length * (4.0 / 3.0 - self.pole_mass * cos**2 / total_mass)
        )
        x_acc = bare_acc - moment * theta_acc * cos / total_mass

        # Explicit Euler: the positions move by the old velocities.
        x, x_dot = x + self.dt * x_dot, x_dot + self.dt * x_acc
        theta, theta_dot = theta + self.dt * theta_dot, theta_dot + self.dt * theta_acc

        terminated = (abs(x) > self.max_x) | (abs(theta) > self.max_angle)
        reward = xp.where(terminated, -1.0, 0.0) if self.sutton_barto_reward else xp.ones_like(x)
        return (x, x_dot, theta, theta_dot), reward, terminated


class Pendulum(ClassicEnv):
    """Swing a pendulum up and hold it there, with a motor weaker than its weight (Pendulum-v1).

    Observation (3,): cos θ, sin θ, θ̇ [rad/s]; θ = 0 is upright, θ̇ stays in ±8.
    Action (1,): torque u in ±2 N m, clipped before the cost is computed.
    Reward: −(θ² + 0.1 θ̇² + 0.001 u²) with θ in [−π, π), of the state before the step.
    Never terminates; truncated after 200 steps.
    First state: θ uniform in ±π, θ̇ uniform in ±1. `g` is the gravity [m/s²].
    """

    gymnasium_id, state_dim = "Pendulum-v1", 2
    mass, length = 1.0, 1.0  # kg, m
    dt = 0.05  # s
    max_speed, max_torque = 8.0, 2.0

    def __init__(
        self, num_envs: int, device: torch.device | str = "cpu", seed: int = 0, g: float = 10.0
    ):
        super().__init__(num_envs, device, seed)
        self.g = float(g)

    def _initial_state(self) -> Tensor:
        theta = self.uniform(-math.pi, math.pi, dtype=self.dtype)
        return torch.stack((theta, self.uniform(-1.0, 1.0, dtype=self.dtype)), 1)

    def _advance(self, state: Array, action: Array) -> tuple[tuple[Array, ...], Array, Array]:
        xp, (theta, theta_dot) = self.xp, state
        # The torque stays float32 until it meets the state, as in Gymnasium.
        torque = xp.asarray(action[:, 0], dtype=xp.float32).clip(-self.max_torque, self.max_torque)
        angle = (theta + math.pi) % (2 * math.pi) - math.pi
        reward = -(angle**2 + 0.1 * theta_dot**2 + 0.001 * torque**2)

        # θ̈ = 3g/(2l) sin θ + 3/(ml²) u: a rod turning about its end. Semi-implicit Euler.
        theta_acc = (
            3 * self.g / (2 * self.length) * xp.sin(theta)
            + 3.0 / (self.mass * self.length**2) * torque
        )
        theta_dot = (theta_dot + theta_acc * self.dt).clip(-self.max_speed, self.max_speed)
        return (theta + theta_dot * self.dt, theta_dot), reward, xp.zeros_like(theta) > 0

    def _observe(self) -> Tensor:
        theta, theta_dot = self.state.unbind(1)
        return torch.stack((theta.cos(), theta.sin(), theta_dot), 1).float()  # (N, 3)


class Acrobot(ClassicEnv):
    """Swing the end of a two-link chain above a line by turning its middle joint (Acrobot-v1).

    Observation (6,): cos θ₁, sin θ₁, cos θ₂, sin θ₂, θ̇₁, θ̇₂ [rad/s]; θ₁ = 0 hangs down, θ₂ is
    relative to the first link; the velocities stay in ±4π and ±9π.
    Action: 0, 1, 2 are the torques −1, 0, 1 N m on the joint between the links.
    Reward: −1 per step, 0 on reaching the goal.
    Terminates where −cos θ₁ − cos(θ₁ + θ₂) > 1; truncated after 500 steps.
    First state: uniform in ±0.1, all four.
    Source: Sutton 1996 with the equations of Sutton and Barto's book; RLPy's implementation.
    """

    gymnasium_id, state_dim = "Acrobot-v1", 4
    gravity = 9.8  # m/s²
    mass_1, mass_2 = 1.0, 1.0  # kg
    length_1 = 1.0  # m
    center_1, center_2 = 0.5, 0.5  # m, from a link's joint to its centre of mass
    inertia_1, inertia_2 = 1.0, 1.0  # kg m²
    dt = 0.2  # s
    max_speed_1, max_speed_2 = 4 * math.pi, 9 * math.pi

    def _initial_state(self) -> Tensor:
        return self.uniform(-0.1, 0.1, 4, dtype=self.dtype)

    def _derivative(self, state: Array, torque: Array) -> Array:
        """d state / dt (4, N) under the torque (N,) on the middle joint."""
        xp, (theta_1, theta_2, speed_1, speed_2) = self.xp, state
        m_1, m_2, g = self.mass_1, self.mass_2, self.gravity
        l_1, c_1, c_2 = self.length_1, self.center_1, self.center_2
        sin_2, cos_2 = xp.sin(theta_2), xp.cos(theta_2)

        # The two equations of motion, of the shoulder (no torque) and of the middle joint (τ):
        #   d₁ θ̈₁ + d₂ θ̈₂ + φ₁ = 0
        #   d₂ θ̈₁ + (m₂ c₂² + I₂) θ̈₂ + m₂ l₁ c₂ θ̇₁² sin θ₂ + φ₂ = τ
        # with inertias d, and gravity and the links' pull on each other in φ; solved for θ̈₂, θ̈₁.
        d_1 = (
            m_1 * c_1**2
            + m_2 * (l_1**2 + c_2**2 + 2 * l_1 * c_2 * cos_2)
            + self.inertia_1
            + self.inertia_2
        )
        d_2 = m_2 * (c_2**2 + l_1 * c_2 * cos_2) + self.inertia_2
        phi_2 = m_2 * c_2 * g * xp.cos(theta_1 + theta_2 - math.pi / 2)
        phi_1 = (
            -m_2 * l_1 * c_2 * speed_2**2 * sin_2
            - 2 * m_2 * l_1 * c_2 * speed_2 * speed_1 * sin_2
            + (m_1 * c_1 + m_2 * l_1) * g * xp.cos(theta_1 - math.pi / 2)
            + phi_2
        )
        acceleration_2 = (
            torque + d_2 / d_1 * phi_1 - m_2 * l_1 * c_2 * speed_1**2 * sin_2 - phi_2
        ) / (m_2 * c_2**2 + self.inertia_2 - d_2**2 / d_1)
        acceleration_1 = -(d_2 * acceleration_2 + phi_1) / d_1
        return xp.stack((speed_1, speed_2, acceleration_1, acceleration_2))

    def _advance(self, state: Array, action: Array) -> tuple[tuple[Array, ...], Array, Array]:
        xp, torque = self.xp, action - 1.0  # in floats: 0 − 1 would overflow in an unsigned type
        # One step of the classical Runge-Kutta method of fourth order.
        k_1 = self._derivative(state, torque)
        k_2 = self._derivative(state + self.dt / 2 * k_1, torque)
        k_3 = self._derivative(state + self.dt / 2 * k_2, torque)
        k_4 = self._derivative(state + self.dt * k_3, torque)
        theta_1, theta_2, speed_1, speed_2 = state + self.dt / 6 * (k_1 + 2 * k_2 + 2 * k_3 + k_4)

        theta_1, theta_2 = wrap(theta_1), wrap(theta_2)
        speed_1 = speed_1.clip(-self.max_speed_1, self.max_speed_1)
        speed_2 = speed_2.clip(-self.max_speed_2, self.max_speed_2)
        terminated = -xp.cos(theta_1) - xp.cos(theta_2 + theta_1) > 1.0
        return (theta_1, theta_2, speed_1, speed_2), xp.where(terminated, 0.0, -1.0), terminated

    def _observe(self) -> Tensor:
        theta_1, theta_2, speed_1, speed_2 = self.state.unbind(1)
        parts = theta_1.cos(), theta_1.sin(), theta_2.cos(), theta_2.sin(), speed_1, speed_2
        return torch.stack(parts, 1).float()  # (N, 6)


def wrap(angle: Array) -> Array:
    """`angle` less its whole turns; within ±π it is not touched, not even by rounding."""
    return angle - 2 * math.pi * (angle / (2 * math.pi)).round()


class MountainCar(ClassicEnv):
    """Swing a weak car in a valley until it reaches the top of the right hill (MountainCar-v0).

    Observation (2,): position in [−1.2, 0.6], velocity in ±0.07 per step.
    Action: 0 accelerates to the left, 1 not at all, 2 to the right.
    Reward: −1 per step.
    Terminates at position ≥ 0.5 with velocity ≥ `goal_velocity`; truncated after 200 steps.
    First state: position uniform in [−0.6, −0.4], at rest.
    Source: Moore 1990, Sutton's code.
    """

    gymnasium_id, state_dim = "MountainCar-v0", 2
    power, gravity = 0.001, 0.0025
    min_position, max_position, max_speed = -1.2, 0.6, 0.07
    goal_position = 0.5

    def __init__(
        self, num_envs: int, device: torch.device | str = "cpu", seed: int = 0,
        goal_velocity: float = 0.0,
    ):  # fmt: skip
        super().__init__(num_envs, device, seed)
        self.goal_velocity = float(goal_velocity)

    def _initial_state(self) -> Tensor:
        position = self.uniform(-0.6, -0.4, dtype=self.dtype)
        return torch.stack((position, torch.zeros_like(position)), 1)

    def _drive(self, state: Array, throttle: Array) -> tuple[tuple[Array, Array], Array]:
        """One step with `throttle` (N,) in [−1, 1] -> columns of the state, terminated (N,)."""
        xp, (position, velocity) = self.xp, state
        # v ← v + power · throttle − gravity · cos 3x, then x ← x + v; the hill's height is sin 3x.
        # The cosine in double precision, as in Gymnasium, even where all else is float32.
        slope = self.gravity * xp.cos(xp.asarray(3 * position, dtype=xp.float64))
        slope = xp.asarray(slope, dtype=position.dtype)
        velocity = velocity + (throttle * self.power - slope)
        velocity = velocity.clip(-self.max_speed, self.max_speed)
        position = (position + velocity).clip(self.min_position, self.max_position)
        # The wall on the left stops the car, without bouncing.
        velocity = xp.where((position == self.min_position) & (velocity < 0), 0.0, velocity)
        terminated = (position >= self.goal_position) & (velocity >= self.goal_velocity)
        return (position, velocity), terminated

    def _advance(self, state: Array, action: Array) -> tuple[tuple[Array, ...], Array, Array]:
        columns, terminated = self._drive(state, action - 1.0)
        return columns, -self.xp.ones_like(columns[0]), terminated


class MountainCarContinuous(MountainCar):
    """The same valley with a continuous throttle that costs energy (MountainCarContinuous-v0).

    Observation (2,): as MountainCar. First state: as MountainCar.
    Action (1,): throttle in ±1, clipped for the motion.
    Reward: −0.1 · throttle² per step, of the action before clipping, +100 on reaching the goal.
    Terminates at position ≥ 0.45 with velocity ≥ `goal_velocity`; truncated after 999 steps.
    """

    gymnasium_id = "MountainCarContinuous-v0"
    power = 0.0015
    goal_position = 0.45
    cpu_dtype = torch.float32  # Gymnasium rounds this one's state to float32 after every step

    def _advance(self, state: Array, action: Array) -> tuple[tuple[Array, ...], Array, Array]:
        xp = self.xp
        action = xp.asarray(action[:, 0], dtype=xp.float32)
        columns, terminated = self._drive(state, action.clip(-1.0, 1.0))
        return columns, xp.where(terminated, 100.0, 0.0) - 0.1 * action**2, terminated
