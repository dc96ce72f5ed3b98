"""The replay buffer: uniform or prioritised, with n-step returns, in preallocated tensors."""

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from algos.worker_learner.arguments import tell
from algos.worker_learner.learners import world_size

# What Linux calls a control group's limit and use of memory, and its cached part: versions 2 and 1.
CGROUP = {"": ("max", "current", ""), "memory": ("limit_in_bytes", "usage_in_bytes", "total_")}


class ReplayBuffer:
    """The last `capacity` transitions of all envs, in preallocated tensors (T, N, ...).

    T = ceil(capacity / N) time steps of N envs on the learner's device, of all that `rollout` has
    except its episode statistics; with several learners, each has its own part of the capacity, and
    len counts all of them. next_obs is the true one at an episode's end. Row `position` is written
    next: when full it holds the oldest step, and nothing that is drawn crosses this seam.
    `n_step`, `gamma` and `prioritized` are the run's arguments, where it has them. If prioritised,
    transition i is drawn with probability P(i) = p_i / Σ p, p = (|δ| + ε)^α, and weighted by
    (size · P(i))^−β over the largest such weight of this learner's batch (Schaul 2016,
    arXiv:1511.05952). UserError, which names `flag`, if it does not fit in memory.
    """

    alpha = 0.6  # α

    def __init__(self, run: Any, rollout: dict, capacity: int, flag: str = "--buffer-size"):
        self._run, device, learners = run, run.device, world_size()
        self.n_step = getattr(run.args, "n_step", 1)
        self.prioritized = getattr(run.args, "prioritized", False)
        num_steps, self.num_envs = rollout["done"].shape[:2]
        self.capacity_rows = -(-capacity // (self.num_envs * learners))
        if self.capacity_rows < max(num_steps, self.n_step):
            least = max(num_steps, self.n_step) * self.num_envs * learners
            why = "--num-envs times --num-steps" + " or --n-step" * hasattr(run.args, "n_step")
            run.fail(f"{flag} is {capacity}; allowed is at least {least}, {why}, or less of these")
        size = self.capacity_rows * self.num_envs  # of this learner
        stored = {k: x for k, x in rollout.items() if not k.startswith("episode_")}
        needed = size * (4 * self.prioritized + sum(x[0, 0].nbytes for x in stored.values()))
        if learners > 1 and device.type == "cpu":  # this machine's learners share it
            needed *= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if needed > (free := _free_memory(device)):
            there = f"{needed / 2**30:.1f} GiB of memory where {free / 2**30:.1f} GiB are free"
            run.fail(f"{flag}: {capacity} transitions need {there}; choose a smaller one")
        self.data = {k: x.new_zeros(self.capacity_rows, *x.shape[1:]) for k, x in stored.items()}
        self._flat = {name: tensor.flatten(0, 1) for name, tensor in self.data.items()}
        self.position, self.rows = 0, 0
        self.priority = torch.zeros(size if self.prioritized else 0, device=device)
        self.largest = torch.ones((), device=device)  # priority so far, that of new transitions
        steps = torch.arange(self.n_step + 1, device=device)
        self._gamma = getattr(run.args, "gamma", 0.99)
        self._powers = self._gamma**steps  # γ^k
        self._following = self.num_envs * steps[:-1]

    @property
    def beta(self) -> float:
        """β, which grows from 0.4 to 1 during the run."""
        return 0.4 + 0.6 * self._run.step / self._run.args.total_steps

    def __len__(self) -> int:
        return self.rows * self.num_envs * world_size()

    def add(self, rollout: dict[str, Tensor]) -> None:
        """Store a rollout (num_steps, N, ...) in place of the oldest steps."""
        num_steps, device = len(rollout["done"]), self.priority.device
        rows = (self.position + torch.arange(num_steps, device=device)) % self.capacity_rows
        for name, tensor in self.data.items():
            tensor.index_copy_(0, rows, rollout[name])
        if self.prioritized:
            self.priority.view(-1, self.num_envs)[rows] = self.largest
        self.position = (self.position + num_steps) % self.capacity_rows
        self.rows = min(self.rows + num_steps, self.capacity_rows)

    def end_episodes(self) -> None:
        """What is added next does not follow what is here, as if all episodes were truncated."""
        self.data["done"][self.position - 1] = True

    def sample(self, batch_size: int) -> dict[str, Tensor]:
        """B transitions: what the rollout has of each, and discount, index, weight, all (B, ...).

        With n steps, cut where an episode or the buffer ends, the reward is Σ_k γ^k r_{t+k}, and
        next_obs and terminated are those of the last step used; discount = γ^(steps used), so

            target = reward + discount · (1 − terminated) · V(next_obs)
        """
        if self.prioritized:
            index, weight = self._draw(batch_size)
        else:
            device = self.priority.device
            index = torch.randint(self.rows * self.num_envs, (batch_size,), device=device)
            weight = torch.ones(batch_size, device=device)
        batch = {name: flat.index_select(0, index) for name, flat in self._flat.items()}
        batch |= {"index": index, "weight": weight, "discount": self._powers[1].expand(batch_size)}
        if self.n_step > 1:
            path = (index.unsqueeze(1) + self._following) % len(self._flat["reward"])  # (B, n)
            newest = (self.position - 1) % self.capacity_rows
            stop = self._flat["done"][path] | (path // self.num_envs == newest)
            reached = (~stop).cumprod(1).roll(1, 1)  # (B, n): no stop before this step
            reached[:, 0].fill_(1)
            steps = reached.sum(1)
            last = path.gather(1, steps.unsqueeze(1) - 1).squeeze(1)
            batch["reward"] = (self._flat["reward"][path] * reached * self._powers[:-1]).sum(1)
            batch["discount"] = self._powers[steps]
            for name in ("next_obs", "terminated", "done"):
                batch[name] = self._flat[name][last]
        return batch

    def _draw(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """Draw in proportion to the priorities -> indices (B,) and importance weights (B,)."""
        size = self.rows * self.num_envs
        ends = self.priority[:size].cumsum(0, dtype=torch.float64)
        point = torch.rand(batch_size, dtype=torch.float64, device=ends.device) * ends[-1]
        index = torch.searchsorted(ends, point, right=True).clamp(max=size - 1)  # of NaN it is size
        weight = (size * self.priority[index] / ends[-1]) ** -self.beta
        return index, (weight / weight.max()).float()

    def update_priorities(self, index: Tensor, td_error: Tensor) -> None:
        """p = (|δ| + ε)^α for the transitions (B,) of a batch; changes nothing if uniform."""
        if td_error.shape != index.shape:  # a value (B, 1) minus one (B,) is (B, B)
            shapes = f"{tuple(td_error.shape)}, not {tuple(index.shape)}: is a squeeze(-1) missing?"
            self._run.fail(f"update_priorities: the TD errors have the shape {shapes}")
        if self.prioritized:
            priority = (td_error.detach().abs().float() + 1e-6) ** self.alpha
            self.largest = torch.maximum(self.largest, priority.max())
            self.priority[index] = priority

    def windows(self, count: int, length: int, newest: int | None = None) -> dict[str, Tensor]:
        """`count` (B) windows of `length` (K) consecutive steps of one env each, (K, B, ...).

        K is less while the buffer has fewer steps of each env.
        `newest`: only from so many of the last transitions, and at least one window of each env.
        mask (K, B) is 1 up to and with the first end of an episode and 0 after it: m_0 = 1,
        m_j = Π_{i<j} (1 − done_i); discount (K, 1) is γ^j.
        """
        envs, device = self.num_envs * world_size(), self.priority.device
        length = min(length, self.rows)
        rows = self.rows if newest is None else min(self.rows, max(length, -(-newest // envs)))
        first = torch.randint(rows - length + 1, (count,), device=device)
        env = torch.randint(self.num_envs, (count,), device=device)
        ahead = torch.arange(length, device=device).unsqueeze(1) + self.position - rows
        index = (first + ahead) % self.capacity_rows * self.num_envs + env  # (K, B)
        batch = {name: flat[index] for name, flat in self._flat.items()}
        mask = torch.ones(batch["done"].shape, device=device)  # rewards may be several agents'
        mask[1:] = (~batch["done"][:-1]).cumprod(0)
        discount = self._gamma ** torch.arange(length, device=device).unsqueeze(1)
        return {**batch, "mask": mask, "discount": discount, "index": index}

    def state_dict(self) -> dict[str, Any]:
        """Everything, or with --no-save-replay nothing."""
        if not getattr(self._run.args, "save_replay", True):
            return {}
        # Only the filled part, unless its copy would be large; on the CPU, for a GPU may be full.
        full = self.rows > self.capacity_rows // 2
        data = {k: x if full else x[: self.rows].to("cpu", copy=True) for k, x in self.data.items()}
        names = "position", "rows", "priority", "largest"
        return {"data": data, **{name: getattr(self, name) for name in names}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state:
            tell("Not exact: the replay buffer was not saved (--no-save-replay); it starts empty.")
            return
        if state["position"] != state["rows"] < self.capacity_rows:  # full, and in a larger one
            raise ValueError("--buffer-size is larger than before")
        for name, tensor in state["data"].items():
            self.data[name][: len(tensor)] = tensor
        self.position, self.rows = state["position"], state["rows"]
        for name in ("priority", "largest"):
            getattr(self, name).copy_(state[name])


def _free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable")) * 1024
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for line in groups:  # a container or a cluster's job may have limits: "0::/job_1"; in version
        _, kind, path = line.split(":", 2)  # 1 of cgroups "4:memory:/job_1"
        limit, used, of = CGROUP.get(kind, CGROUP[""])
        own = Path("/sys/fs/cgroup", kind, path[1:])
        for group in (own, *own.parents):
            with contextlib.suppress(OSError, ValueError, KeyError):  # there is none in this one
                most, now = (int((group / f"memory.{x}").read_text()) for x in (limit, used))
                stat = dict(x.split() for x in (group / "memory.stat").read_text().splitlines())
                cached = int(stat[f"{of}inactive_file"]) + int(stat[f"{of}active_file"])
                free = min(free, most - now + cached)  # what is cached is given back when needed
    return free
