"""Is StockTrading a fair environment? Three checks, their rows in results/stock*.csv.

    python benchmark/stock_checks.py leak     tomorrow's returns are observed: PPO must become rich
    python benchmark/stock_checks.py null     prices nobody can predict: nothing may be significant
    python benchmark/stock_checks.py speed    steps a second beside FinRL's logic in a Python loop

A back-test's table can look plausible, too, where nothing can be learned, or where an error lets
every agent profit; the first two checks find out. Both train PPO (a run in --runs-dir goes on where
it was, a finished one is not trained again) and trade on the test years as benchmark/backtest.py
does.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from tyro.conf import Positional

import vec_envs

sys.path.insert(0, str(Path(__file__).parent))
import backtest
from returns import RESULTS, ROOT, append, begun_at, commit, finish

ENVS = {
    "leak": "StockTrading,actions=weights,leak=true",
    "null": "StockTrading,actions=weights,data=random_walk",
}
STEPS = {"leak": 600_000, "null": 200_000}
SEEDS = {"leak": [1], "null": [21, 22, 23, 24]}


@dataclass
class Options:
    """Check that StockTrading can be learned, and only where there is something to learn."""

    check: Positional[Literal["leak", "null", "speed"]]
    """which one"""
    runs_dir: Path = ROOT / "runs" / "stock"
    """where the run folders are"""
    results: Path = RESULTS
    """where stock.csv and stock_speed.csv are"""
    seconds: float = 3.0
    """of each of the three measurements of speed"""


def train(what: str, seed: int, folder: Path, version: str) -> str:
    """Train PPO in a folder, if that is not done yet -> the commit at which that began."""
    command = ["python", "algos/ppo.py", "--env", ENVS[what], "--seed", str(seed)]
    command += ["--total-steps", str(STEPS[what]), "--torch-threads", "1"]
    if not finish(command, folder, version):
        raise SystemExit(1)
    return begun_at(folder, command)


def learn(options: Options) -> None:
    """The leak test, or the null test."""
    what, version = options.check, commit()
    folders = {seed: options.runs_dir / f"{what}{seed}" for seed in SEEDS[what]}
    begun = {seed: train(what, seed, folder, version) for seed, folder in folders.items()}
    fees = [0.0, 0.001] if what == "null" else [0.001]  # a fee alone might hide a profit
    rows = backtest.main(backtest.Options([*map(str, folders.values())], fees=fees, what=what))
    for row in rows:
        row["commit"] = begun.get(row["seed"], row["commit"])  # of the training
    append(options.results / "stock.csv", rows)
    own = [row for row in rows if row["strategy"] == "ppo"]
    if what == "leak":
        grown = 1 + float(own[0]["cumulative"])
        print(f"\nleak test: the capital times {grown:.4g}, {'passed' if grown > 10 else 'FAILED'}")
    else:
        most = max(float(row[key]) for row in own for key in ("deflated", "deflated_excess"))
        print(f"\nnull test: at most {most:.3f}, {'passed' if most < 0.95 else 'FAILED'}")


class FinRLLoop:
    """The logic of FinRL's StockTradingEnv for one environment, written anew.

    State: one Python list of cash, prices, shares and indicators. Sales in the order of the
    actions, smallest first, then purchases, largest first, each by itself, at the price of the
    same day; memories grow by one entry a step. FinRL reads its data from a pandas frame; here
    they are arrays, which is faster.
    Source of the logic: finrl/meta/env_stock_trading/env_stocktrading.py, MIT licence.
    """

    def __init__(self, prices: np.ndarray, indicators: np.ndarray):
        self.prices, self.indicators = prices, indicators  # (T, D), (T, 8, D)
        self.count, self.hmax, self.fee = prices.shape[1], 100, 0.001
        self.reset()

    def reset(self) -> None:
        self.day, self.state = 0, [1e6]
        self.state += [*self.prices[0].tolist(), *[0] * self.count]
        self.state += self.indicators[0].ravel().tolist()
        self.asset_memory, self.rewards_memory, self.actions_memory = [1e6], [], []
        self.state_memory = []

    def total_asset(self) -> float:
        n = self.count
        prices, shares = np.array(self.state[1 : n + 1]), np.array(self.state[n + 1 : 2 * n + 1])
        return self.state[0] + sum(prices * shares)

    def sell(self, index: int, action: float) -> float:
        price, held = self.state[index + 1], self.state[index + self.count + 1]
        if price <= 0 or held <= 0:
            return 0
        number = min(abs(action), held)
        self.state[0] += price * number * (1 - self.fee)
        self.state[index + self.count + 1] -= number
        return number

    def buy(self, index: int, action: float) -> float:
        price = self.state[index + 1]
        if price <= 0:
            return 0
        number = min(self.state[0] // (price * (1 + self.fee)), action)
        self.state[0] -= price * number * (1 + self.fee)
        self.state[index + self.count + 1] += number
        return number

    def step(self, actions: np.ndarray) -> tuple[list, float, bool]:
        if self.day >= len(self.prices) - 1:
            self.reset()
        actions = (actions * self.hmax).astype(int)
        begin = self.total_asset()
        order = np.argsort(actions)
        for index in order[: np.where(actions < 0)[0].shape[0]]:
            actions[index] = -self.sell(index, actions[index])
        for index in order[::-1][: np.where(actions > 0)[0].shape[0]]:
            actions[index] = self.buy(index, actions[index])
        self.actions_memory.append(actions)
        self.day += 1
        self.state = [
            self.state[0],
            *self.prices[self.day].tolist(),
            *self.state[self.count + 1 : 2 * self.count + 1],
            *self.indicators[self.day].ravel().tolist(),
        ]
        end = self.total_asset()
        self.asset_memory.append(end)
        self.rewards_memory.append(end - begin)
        self.state_memory.append(self.state)
        return self.state, (end - begin) * 1e-4, False


def speed(options: Options) -> None:
    """Three measurements of each, in turn; the median."""
    torch.set_num_threads(1)
    name, many, found = "StockTrading,data=synthetic", 64, {"finrl": [], "ours": []}
    env = vec_envs.make(name, many)
    env.reset(seed=0)
    rows, stocks = 20_000, len(env.stocks)
    indicators = env.features[:rows, 1 + stocks :].reshape(rows, 8, stocks).double().numpy()
    loop = FinRLLoop(env.prices[:rows].numpy(), indicators)
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (100, stocks))
    batch = torch.rand(100, many, stocks) * 2 - 1
    for _ in range(3):
        for label, step, given, count in (
            ("finrl", loop.step, actions, 1),
            ("ours", env.step, batch, many),
        ):
            steps, began = 0, time.process_time()  # not what others use
            while (spent := time.process_time() - began) < options.seconds:
                step(given[steps % 100])
                steps += 1
            found[label].append(steps * count / spent)
        loop.reset()
    finrl, ours = (float(np.median(found[label])) for label in ("finrl", "ours"))
    print(f"{name}, {stocks} stocks, one thread: FinRL's logic {finrl:.0f} steps a second,")
    print(f"{many} environments at once {ours:.0f}: {ours / finrl:.1f} times as many")
    row = {"env": name, "num_envs": many, "finrl_loop_sps": f"{finrl:.0f}", "sps": f"{ours:.0f}"}
    row |= {"ratio": f"{ours / finrl:.1f}", "commit": commit()}
    row["command"] = "python benchmark/stock_checks.py speed"
    append(options.results / "stock_speed.csv", [row])


if __name__ == "__main__":
    sys.excepthook = backtest.say_in_one_sentence
    options = tyro.cli(Options)
    (speed if options.check == "speed" else learn)(options)
