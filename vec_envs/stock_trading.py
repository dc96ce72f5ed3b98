"""Stock trading as batched tensors: FinRL's environment without its errors.

An agent with cash buys and sells D stocks, once a day (or minute). At step t it sees the closing
prices up to t; its orders are executed at the *next* close, t + 1, which it has not seen. Nothing
is sold short and nothing is borrowed. In one step, with prices p, shares h, cash b and a fee c:

    sales first      b ← b + (1 − c) Σ p sold
    then purchases   b ← b − (1 + c) Σ p bought     all shrunk by one factor if b is too small
    reward           100 (assets after − assets before) / initial capital     assets = b + Σ p h

so that b ≥ 0 always, and the change of the assets is Σ h Δp − fees with the shares h held before.
All of this is float64; observations and rewards are float32.

    python algos/ppo.py --env StockTrading                          20 stocks, share counts
    python algos/ppo.py --env StockTrading,actions=weights          portfolio weights
    python algos/ppo.py --env StockTrading,data=prices.csv,test=2023-01-01,validation=2022-01-01

The data are split by date: training before `validation`, validation before `test`, and `test`,
which nobody should look at before all else is decided (benchmark/backtest.py). Training episodes
begin at random dates. The default data are 20 stocks of the S&P 500, daily 1990-2022, as shipped by
skfolio (pip install --no-deps skfolio). They are large companies of today, which nobody knew in
1990 (survivorship bias): compare with the average of the same stocks, not with zero.

Definition: Liu et al. 2020, FinRL, arXiv:2011.09607; Li et al. 2021, arXiv:2112.05923. What differs
here: the policy's action is what is executed, the fee is part of what must be affordable, no shares
are given away at reset, orders are executed at a price that is not yet known when they are given.
Observations are relative (FinRL: cash, prices and share counts themselves); scarce cash is divided
pro rata (FinRL: one stock after another); orders in a dead zone around 0 are left out; `max_shares`
follows from the capital (FinRL: 100); actions may be portfolio weights; a training episode is one
year from a random date (FinRL: all training years).
"""

import csv
import functools
import gzip
import importlib.util
import multiprocessing
import re
import sys
import textwrap
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from vec_envs.core import VecEnv, env_seeds

SHIPPED = {"sp500": "sp500_dataset.csv.gz", "sp500_index": "sp500_index.csv.gz"}  # by skfolio
TURBULENCE_ROWS = 252
LONGEST_HOLIDAY = 14  # days without prices that are nothing to speak of
UNREADABLE = KeyError, ValueError, ImportError, EOFError, zipfile.BadZipFile, zlib.error, csv.Error


class Market(NamedTuple):
    """Closing prices (T, D) float64 of D stocks at T dates (datetime64)."""

    dates: np.ndarray
    names: tuple[str, ...]
    close: np.ndarray


class StockTrading(VecEnv):
    """Buy and sell stocks; see above.

    Observation (2 + 10·D,), float32, in this order; everything is relative, so that 1990 and 2020
    look alike:
        1       cash / assets
        D       value of the shares held / assets
        1       turbulence / max_turbulence (0 where that is not given)
        D       last return, in percent
        D       macd: 100 (EMA₁₂ − EMA₂₆) / price
        D, D    boll_ub, boll_lb: 100 (SMA₂₀ ± 2 σ₂₀) / price − 100, Bollinger's bands
        D       rsi_30 / 100, relative strength: average rise / (average rise + average fall)
        D       cci_30 / 100, commodity channel index: (price − SMA₃₀) / (0.015 · mean deviation₃₀)
        D       dx_30 / 100, directional index; of closing prices alone it is |2 rsi − 1|
        D, D    sma_30, sma_60: 100 SMA / price − 100
    Indicators are those of FinRL, over 12 to 60 rows of data up to now; before its first row a
    price is taken to have stood still.
    Action (D,), two kinds:
        shares    in [−1, 1]: sell or buy this part of `max_shares`, in whole shares; less than a
                  tenth of it is nothing. max_shares=0: as many as capital / D buys at the first
                  price of the episode, at least one.
        weights   in [0, 1]: the parts of the assets to hold at the next close, divided by their
                  sum where it is above 1; fractional shares are allowed; the rest is cash.
    Reward: change of the assets in percent of the initial capital.
    Never terminates; in training truncated after `steps`, else at the end of the split, which is
    one episode.
    First state: cash only; in training at a random row, else at the row before the first date of
    the split.

    `data`: "sp500", a file (see `load_market`), "random_walk" (33 years of 20 stocks) or
    "synthetic" (five years of minutes of 93 stocks), both by `market_seed` and without any pattern.
    `split` is train, validation, test, or all; without it, training is on train and policies are
    scored in validation. (Its one episode is the same for every seed: generations.py and
    tournament.py, which score on fresh episodes, see the same one with a standard error of 0.)
    `end`: test ends before this date. `fee`: part of the
    value traded, each way. `max_turbulence`: above it everything is sold and nothing bought;
    the turbulence of D stocks is about D on the average. `leak`: for testing only, the returns that
    the present order will earn on its first day are observed, too (D more numbers, in percent).
    """

    state_names = ("cash", "shares", "max_trade", "row", "assets")
    evaluation_options = "split=validation"  # whose episodes are all the same one
    reward_scale = 100.0
    dead_zone = 0.1

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        data: str = "sp500",
        actions: str = "shares",
        split: str = "",
        validation: str = "2017-01-01",
        test: str = "2019-01-01",
        end: str = "",
        steps: int = 252,
        fee: float = 0.001,
        capital: float = 1e6,
        max_shares: int = 0,
        max_turbulence: float = 0.0,
        leak: bool = False,
        market_seed: int = 0,
    ):
        for key, value, allowed in (
            ("actions", actions, ("shares", "weights")),
            ("split", split or "train", ("train", "validation", "test", "all")),
            ("leak", leak, (True, False)),
        ):
            if value not in allowed:
                choice = " or ".join(map(str, allowed))
                raise ValueError(f"StockTrading: {key} is {value!r}, allowed is {choice}")
        for key, value, low, high in (
            ("fee", fee, 0.0, 0.99),
            ("capital", capital, 1.0, 1e15),
            ("steps", steps, 1, 10**9),
            ("max_shares", max_shares, 0, 10**12),
            ("max_turbulence", max_turbulence, 0.0, 1e9),
            ("market_seed", market_seed, 0, 2**31 - 1),
        ):
            if not isinstance(value, int | type(low)) or not low <= value <= high:
                raise ValueError(
                    f"StockTrading: {key} is {value}, allowed are {type(low).__name__}s "
                    f"from {low:g} to {high:g}"
                )
        market, part = load_market(str(data), market_seed), split or "train"
        cuts = str(validation), str(test), str(end)
        first, last = rows_of(market, part, *cuts)
        window = steps if part == "train" else last - first
        if not 1 <= window <= last - first:
            raise ValueError(
                f"StockTrading: {part} has {last - first + 1} rows, too few for {steps} steps"
            )
        if actions == "shares" and not max_shares:
            _say_few(str(data), market_seed, capital)
        self.actions, self.fee, self.capital = actions, float(fee), float(capital)
        self.max_shares, self.max_turbulence = max_shares, float(max_turbulence)
        self.data, self.dates, self.stocks = str(data), market.dates[first : last + 1], market.names
        features = market_features(market, first, last, self.max_turbulence)
        close = torch.from_numpy(market.close[first : last + 1].copy())  # (R, D)
        if leak:  # of row t: the return from t + 1, where the order is executed, to t + 2
            leaked = torch.zeros_like(close)
            leaked[:-2] = 100 * (close[2:] / close[1:-1] - 1)
            features = torch.cat((features, leaked.float()), 1)
        count = close.shape[1]
        super().__init__(
            "StockTrading",
            num_envs,
            device,
            seed,
            single_observation_space=Box(-np.inf, np.inf, (1 + count + features.shape[1],)),
            single_action_space=Box(-1.0 if actions == "shares" else 0.0, 1.0, (count,)),
            max_episode_steps=window,
        )
        self.prices, self.features = close.to(self.device), features.to(self.device)
        self.starts = len(close) - window  # rows at which an episode may begin: the first so many
        kind = {"dtype": torch.float64, "device": self.device}
        self.cash = torch.full((num_envs,), self.capital, **kind)
        self.shares = torch.zeros(num_envs, count, **kind)
        self.max_trade = torch.zeros(num_envs, count, **kind)  # whole shares of an action of 1
        self.row = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self.assets = self.cash.clone()
        # What the last step booked: assets, fees, traded value (N,), shares (N, D). Not touched by
        # the restart at an episode's end, which comes in the same step.
        self.ledger: dict[str, Tensor] = {}
        self._drawn: list[tuple] = []
        if not split:  # then policies are scored in validation
            first, last = rows_of(market, "validation", *cuts)
            window = last - first
        scored = market.close[first : last + 1]
        growth = scored[window:] / scored[1 : 1 + len(scored) - window]  # of each episode
        years = f"buy and hold in {split or 'validation'}"
        self.known_returns = {years: 100 * float((growth.mean(1) - 1).mean())}

    def _restart(self, mask: Tensor) -> None:
        draw = self.uniform(0.0, float(self.starts), dtype=torch.float64).long()
        row = torch.where(mask, draw.clamp(max=self.starts - 1), self.row)
        price = self.prices.index_select(0, row)  # (N, D)
        if self.max_shares:
            most = torch.full_like(price, self.max_shares)
        else:
            most = (self.capital / price.shape[1] / price).floor().clamp(min=1.0)
        column = mask.unsqueeze(1)
        self.row = row
        self.cash = torch.where(mask, self.capital, self.cash)
        self.assets = torch.where(mask, self.capital, self.assets)
        self.shares = torch.where(column, 0.0, self.shares)
        self.max_trade = torch.where(column, most, self.max_trade)

    def _simulate(self, action: Tensor) -> tuple[Tensor, Tensor]:
        row = self.row + 1
        price = self.prices.index_select(0, row)  # (N, D): the next close, at which all is executed
        order = self._order(action.double(), price)
        if self.max_turbulence:
            turbulent = self.features.index_select(0, self.row)[:, :1] > 1.0
            order = torch.where(turbulent, -self.shares, order)

        sold = torch.minimum((-order).clamp(min=0.0), self.shares)
        sales = (sold * price).sum(1)
        cash = self.cash + (1 - self.fee) * sales
        bought = order.clamp(min=0.0)
        cost = (1 + self.fee) * (bought * price).sum(1)
        affordable = (cash / cost.clamp(min=1e-300)).clamp(max=1.0)  # pro rata
        bought = bought * affordable.unsqueeze(1)
        if self.actions == "shares":
            bought = bought.floor()
        purchases = (bought * price).sum(1)
        self.cash = (cash - (1 + self.fee) * purchases).clamp(min=0.0)  # of rounding: −1e-10
        self.shares = self.shares - sold + bought

        assets = self.cash + (self.shares * price).sum(1)
        reward = (assets - self.assets) * (self.reward_scale / self.capital)
        self.assets, self.row = assets, row
        traded = sales + purchases
        self.ledger = {"assets": assets, "fees": self.fee * traded, "traded": traded}
        self.ledger["shares"] = self.shares
        return reward, torch.zeros_like(reward, dtype=torch.bool)

    def _order(self, action: Tensor, price: Tensor) -> Tensor:
        """Shares to buy (above 0) or to sell (below), (N, D), before what is affordable."""
        if self.actions == "shares":
            action = torch.where(action.abs() < self.dead_zone, 0.0, action.clamp(-1.0, 1.0))
            return (action * self.max_trade).trunc()
        weight = action.clamp(0.0, 1.0)
        weight = weight / weight.sum(1, keepdim=True).clamp(min=1.0)
        assets = self.cash + (self.shares * price).sum(1)
        return weight * assets.unsqueeze(1) / price - self.shares

    def _observe(self) -> Tensor:
        value = self.shares * self.prices.index_select(0, self.row)
        own = torch.cat((self.cash.unsqueeze(1), value), 1) / self.assets.unsqueeze(1)
        return torch.cat((own.float(), self.features.index_select(0, self.row)), 1)

    def render(self, index: int = 0) -> np.ndarray:
        """An RGB picture: the assets of env `index` at the moments it was drawn, and what it holds.

        Needs matplotlib (the extra `plot`).
        """
        from matplotlib import colormaps
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        row, price = int(self.row[index]), self.prices[self.row[index]]
        episode = index, row - int(self._lengths[index])  # which env, and where it began
        if self._drawn and (self._drawn[-1][0] != episode or self._drawn[-1][1] >= row):
            self._drawn.clear()
        held = (self.shares[index] * price / self.assets[index]).cpu().numpy()
        self._drawn.append((episode, row, float(self.assets[index]), held))
        _, *columns = zip(*self._drawn, strict=True)
        rows, assets, held = map(np.array, columns)
        prices = self.prices[torch.from_numpy(rows)].cpu().numpy()
        figure = Figure(figsize=(6.4, 4.8))
        top, bottom = figure.subplots(2, sharex=True)
        top.plot(self.dates[rows], assets / self.capital, label="agent")
        top.plot(self.dates[rows], (prices / prices[0]).mean(1), label="buy and hold")
        top.set_ylabel("assets / capital")
        top.legend(loc="upper left")
        bottom.stackplot(self.dates[rows], held.T, colors=colormaps["tab20"].colors)
        bottom.set_ylim(0, 1)
        bottom.set_ylabel("part in each stock")
        figure.autofmt_xdate()
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def rows_of(market: Market, split: str, validation: str, test: str, end: str) -> tuple[int, int]:
    """First and last row of a part of the data; a later part's first is the eve of its first date.

    ValueError: a date that is none, or dates in the wrong order or outside of the data.
    """
    dates = market.dates
    days = {"validation": validation, "test": test, "end": end or str(dates[-1] + 1)}
    cuts = [0]
    for key, text in days.items():
        try:
            if np.isnat(day := np.datetime64(text)) or day >= np.datetime64("10000"):  # 20220101
                raise ValueError
            cuts.append(int(np.searchsorted(dates, day)))
        except ValueError:
            raise ValueError(f"StockTrading: {key} is {text!r}, not a date (2019-01-31)") from None
        if split != "all" and not cuts[-2] < cuts[-1]:
            raise ValueError(
                f"StockTrading: no row is between {key}={text} and the cut before it; the data are "
                f"from {dates[0]} to {dates[-1]}: choose validation=DATE < test=DATE among them"
            )
    if split == "all":
        return 0, cuts[3] - 1
    part = ("train", "validation", "test").index(split)
    return max(cuts[part] - 1, 0), cuts[part + 1] - 1


@functools.lru_cache(maxsize=2)  # several environments of one process read a file once
def load_market(data: str, seed: int = 0) -> Market:
    """Prices by name or from a file.

    .csv, .csv.gz   a header `date,NAME,NAME...`, then one row a date, oldest first
    .npz            arrays close (T, D), dates (T,) and, if you like, names (D,)
    .parquet        as the .csv, dates as index or first column (needs pandas and pyarrow)

    Prices should be adjusted for splits and dividends; dates are those of the exchange, an offset
    from UTC is left out. A table with a row for each date and stock becomes one of these by
    frame.pivot(index="date", columns="tic", values="close").to_csv("prices.csv"). ValueError that
    names the row: prices that are missing or not above zero, dates out of order. A stock that was
    not traded on all dates cannot be among them. A policy knows a stock by its column alone: newer
    prices need the same columns in the same order.
    """
    if data == "random_walk":
        days = np.arange("1990-01-01", "2023-01-01", dtype="datetime64[D]")
        return random_walk(days[np.is_busday(days)], 20, seed)
    if data == "synthetic":
        days = np.arange("2015-01-01", "2020-01-01", dtype="datetime64[D]")
        minutes = np.arange(570, 960)  # 9:30 to 15:59
        days = days[np.is_busday(days)].astype("datetime64[m]")
        return random_walk((days[:, None] + minutes).ravel(), 93, seed)
    path = _shipped(data) if data in SHIPPED else Path(data).expanduser()
    readers = {".csv": _read_csv, ".gz": _read_csv, ".npz": _read_npz, ".parquet": _read_parquet}
    kind = path.suffix.lower()
    if kind not in readers:
        names = ", ".join((*SHIPPED, "random_walk", "synthetic"))
        raise ValueError(
            f"data is {data!r}, allowed are {names}, or a file .csv, .csv.gz, .npz, .parquet"
        )
    try:
        dates, names, close = readers[kind](path)
        dates = np.asarray(dates).astype("datetime64[s]" if len(dates) else "datetime64[D]")
    except OSError as error:
        raise ValueError(f"{data}: {error.strerror or error}") from None
    except UNREADABLE as error:
        raise ValueError(f"{data}: {error}".partition("\n")[0]) from None
    _check(data, dates, names, close)
    if (dates == dates.astype("datetime64[D]")).all():
        dates = dates.astype("datetime64[D]")
    if data not in SHIPPED:
        _say_doubts(data, dates, names, close)
    return Market(dates, tuple(map(str, names)), close)


def _shipped(data: str) -> Path:
    found = importlib.util.find_spec("skfolio")
    if found is None:
        raise ValueError(f"the data {data!r} are in skfolio: pip install --no-deps skfolio")
    return Path(found.submodule_search_locations[0], "datasets", "data", SHIPPED[data])


def _read_csv(path: Path) -> tuple[Any, Any, np.ndarray]:
    with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rt", newline="") as file:
        lines = csv.reader(file)
        header, dates, close = next(lines, []), [], []
        if len(header) < 2 or re.match(r"\d{4}-\d", header[0]):
            wish = "the first line must be date,NAME,NAME... with commas between"
            raise ValueError(f"{wish}, and is {textwrap.shorten(','.join(header), 60)!r}")
        for number, line in enumerate(filter(None, lines), 1):  # without empty lines
            try:
                if len(line) != len(header):
                    raise ValueError(f"{len(line)} entries where the header has {len(header)}")
                dates.append(np.datetime64(line[0][:19]))  # without an offset, +01:00
                close.append([float(word or "nan") for word in line[1:]])
            except ValueError as error:
                wish = "a row is a date, 2019-01-31, and a price of each stock, with commas between"
                raise ValueError(f"row {number} after the header: {error}; {wish}") from None
    return dates, header[1:], np.array(close, np.float64)


def _read_npz(path: Path) -> tuple[Any, Any, np.ndarray]:
    with np.load(path) as arrays:
        if missing := {"close", "dates"} - set(arrays):
            raise ValueError(f"it has no array {missing.pop()!r}, but {', '.join(arrays)}")
        close = arrays["close"].astype(np.float64)
        try:
            names = arrays["names"] if "names" in arrays else range(close.shape[-1])
            return arrays["dates"], names, close
        except ValueError as error:  # an array of Python objects, as pandas has them
            raise ValueError(f"{error}; save names by .astype(str), dates as datetime64") from None


def _read_parquet(path: Path) -> tuple[Any, Any, np.ndarray]:
    import pandas

    frame = pandas.read_parquet(path)
    if isinstance(frame.index, pandas.RangeIndex):
        frame = frame.set_index(frame.columns[0])
    if getattr(frame.index, "tz", None) is not None:
        frame.index = frame.index.tz_localize(None)  # local time, as in a .csv
    return frame.index.to_numpy(), list(frame.columns), frame.to_numpy(np.float64)


def _check(source: str, dates: np.ndarray, names: Any, close: np.ndarray) -> None:
    """ValueError that names the first row that cannot be traded on."""
    if close.shape != (len(dates), len(names)) or close.size == 0:
        raise ValueError(
            f"{source}: prices of shape {close.shape} for {len(dates)} dates, {len(names)} stocks"
        )
    columns = {str(name).strip().lower() for name in names}
    if columns & {"volume", "adj close"} or {"open", "high", "low"} <= columns:
        wish = "one of open, high, low, adj close and volume; each must be a stock's closing prices"
        raise ValueError(f"{source}: a column is {wish}")
    if "" in columns or len(set(map(str, names))) < len(names):
        raise ValueError(f"{source}: a column has no name, or two have the same one")
    order = np.diff(dates) <= np.timedelta64(0)
    bad = ~(np.isfinite(close) & (close > 0))
    if np.isnat(dates).any():
        row, what = int(np.isnat(dates).argmax()), "the date is missing"
    elif (no_year := (dates >= np.datetime64("10000")) | (dates < np.datetime64("1600"))).any():
        # 20220101, seconds since 1970, or the number of the row
        row, what = int(no_year.argmax()), "the date is not written as 2019-01-31"
    elif order.any():
        row = int(order.argmax()) + 1
        what = f"{dates[row]} comes after {dates[row - 1]}; the oldest must be first, each once"
    elif bad.any():
        row, stock = (int(x) for x in np.argwhere(bad)[0])
        price = close[row, stock]
        what = "is missing" if np.isnan(price) else f"is {price}"
        what = f"the price of {names[stock]} on {dates[row]} {what}; it must be above 0 (a stock "
        what += "that came later is left out, or the data begin with it)"
    else:
        return
    raise ValueError(f"{source}, row {row + 1} of the data: {what}")


def _say_doubts(source: str, dates: np.ndarray, names: Any, close: np.ndarray) -> None:
    """Lines on the terminal, in a run's first process: a split, missing weeks?"""
    if multiprocessing.parent_process() is not None:
        return
    change, days = close[1:] / close[:-1], np.diff(dates) / np.timedelta64(1, "D")
    jump = abs(np.log(change))
    if jump.max(initial=0.0) > np.log(1.8):
        row, stock = np.unravel_index(jump.argmax(), jump.shape)
        what = f"{100 * change[row, stock] - 100:+.0f} % on {dates[row + 1]}; is that a split"
        print(
            f"{source}: {names[stock]} changes by {what} for which it is not adjusted?",
            file=sys.stderr,
        )
    if days.max(initial=0.0) > LONGEST_HOLIDAY:
        between = " and ".join(map(str, dates[days.argmax() :][:2]))
        print(f"{source}: there are no prices between {between}", file=sys.stderr)


@functools.cache
def _say_few(data: str, seed: int, capital: float) -> None:
    """A line on the terminal where orders of whole shares have too few values to choose from."""
    market = load_market(data, seed)
    most = capital / len(market.names) / market.close[-1]
    if most.min() < 10 and multiprocessing.parent_process() is None:
        few = f"{max(most.min(), 1):.0f} shares of {market.names[most.argmin()]}"
        advice = "actions=weights trades parts of shares"
        print(
            f"{data}: with capital={capital:g} an order is at most {few}; {advice}", file=sys.stderr
        )


def random_walk(dates: np.ndarray, stocks: int, seed: int) -> Market:
    """Synthetic prices that nobody can predict: their expected return is 0 at every step.

    One factor, the market (1 % a day), times each stock's β, and 1.5 % a day of each one's own;
    where there are several rows a day, those at its ends vary twice as much as those at noon.
    """
    rng = np.random.default_rng(env_seeds(seed, 1)[0])
    days = dates.astype("datetime64[D]")
    first = np.flatnonzero(np.diff(days, prepend=days[:1] - 1) > np.timedelta64(0))
    per_day = len(dates) / len(first)
    place = (np.arange(len(dates)) % per_day) / max(per_day - 1, 1)  # 0 to 1 within a day
    shape = 1 + (2 * place - 1) ** 2 if per_day > 1 else np.ones(len(dates))
    shape = shape / np.sqrt((shape**2).mean() * per_day)
    beta = rng.uniform(0.5, 1.5, stocks)
    step = 0.010 * rng.standard_normal((len(dates), 1)) * beta
    step += 0.015 * rng.standard_normal((len(dates), stocks))
    variance = 0.010**2 * beta**2 + 0.015**2
    step = step * shape[:, None] - 0.5 * variance * shape[:, None] ** 2  # E[exp(step)] = 1
    close = rng.uniform(20, 200, stocks) * np.exp(step.cumsum(0))
    return Market(dates, tuple(f"synthetic {i}" for i in range(stocks)), close)


def market_features(market: Market, first: int, last: int, max_turbulence: float) -> Tensor:
    """What all envs see of rows `first` to `last`: (R, 1 + 9·D) float32, each row of the past only.

    Turbulence, last return, and the eight indicators.
    """
    close = market.close[: last + 1]  # (T, D)
    change = np.diff(close, axis=0, prepend=close[:1])
    rows = slice(first, last + 1)
    count, stocks = last + 1 - first, close.shape[1]
    features = np.zeros((count, 1 + 9 * stocks), np.float32)
    if max_turbulence:
        features[:, 0] = turbulence(close, first) / max_turbulence
    parts = features[:, 1:].reshape(count, 9, stocks)  # a view of the same numbers
    parts[:, 0] = 100 * (change / (close - change))[rows]

    # Averages with exponential weights: of the price over 12 and 26, of rise and fall over 30.
    rate = np.array([2 / 13, 2 / 27, 1 / 30, 1 / 30])[:, None]
    average = np.stack((close[0], close[0], 0 * close[0], 0 * close[0]))  # (4, D)
    now = average.copy()
    for t in range(last + 1):
        now[:2], now[2] = close[t], change[t].clip(0)
        now[3] = now[2] - change[t]
        average += rate * (now - average)
        if t >= first:
            parts[t - first, 1] = 100 * (average[0] - average[1]) / close[t]
            both = average[2] + average[3]
            parts[t - first, 4] = np.where(both > 0, average[2] / np.where(both > 0, both, 1), 0.5)
    parts[:, 6] = abs(2 * parts[:, 4] - 1)

    sma_20, sma_30, sma_60 = (rolling_mean(close, n)[rows] for n in (20, 30, 60))
    variance, deviation = np.zeros_like(sma_20), np.zeros_like(sma_20)
    before = np.concatenate((np.repeat(close[:1], 30, 0), close))
    for lag in range(30):
        past = before[30 + first - lag : 30 + last + 1 - lag]
        deviation += abs(past - sma_30) / 30
        variance += (past - sma_20) ** 2 / 19 if lag < 20 else 0.0
    price, band = close[rows], 2 * np.sqrt(variance)
    parts[:, 2] = 100 * (sma_20 + band) / price - 100
    parts[:, 3] = 100 * (sma_20 - band) / price - 100
    parts[:, 5] = (price - sma_30) / (1.5 * np.maximum(deviation, 1e-9 * price))
    parts[:, 7] = 100 * sma_30 / price - 100
    parts[:, 8] = 100 * sma_60 / price - 100
    return torch.from_numpy(features)


def rolling_mean(x: np.ndarray, n: int) -> np.ndarray:
    """Mean of the last n rows at each row, (T, D) -> (T, D)."""
    total = np.concatenate((np.repeat(x[:1], n, 0), x)).cumsum(0)
    return (total[n:] - total[:-n]) / n


def turbulence(close: np.ndarray, first: int) -> np.ndarray:
    """(y − μ)ᵀ Σ⁻¹ (y − μ) of each row's returns y from `first` on.

    0 in the first 253 rows of the data. μ and Σ are mean and covariance of the 252 returns before
    (Kritzman and Li 2010).
    """
    returns = np.diff(close, axis=0) / close[:-1]  # (T − 1, D): entry t − 1 is of row t
    result = np.zeros(len(close) - first)
    for t in range(max(first, TURBULENCE_ROWS + 1), len(close)):
        past = returns[t - 1 - TURBULENCE_ROWS : t - 1]
        away = returns[t - 1] - past.mean(0)
        result[t - first] = (
            away @ np.linalg.pinv(np.cov(past.T, ddof=1).reshape(2 * away.shape)) @ away
        )
    return result
