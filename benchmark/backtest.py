"""Back-test trained policies of StockTrading on the years that none of them has seen.

    python benchmark/backtest.py RUN_DIR...                   runs that differ in their seed only
    python benchmark/backtest.py RUN_DIR... --tried DIR...    all others that were tried, too
    python benchmark/backtest.py RUN_DIR... --walk-forward 4  trains each anew before each fold
    python benchmark/backtest.py RUN_DIR... --ensemble        FinRL's: in each quarter the run that
                                                              was best in the one before
    python benchmark/backtest.py RUN_DIR... --figure backtest.png --daily assets.csv
    python benchmark/backtest.py RUN_DIR... --orders          what each would do after the last row

Of each run it takes the snapshot (best.pt or last.pt) with the higher Sharpe ratio on the
validation years, and trades on the test years, by the dates of the run's own --env. The table is
printed for several fees, with comparisons: holding all stocks, equal weights restored at each row,
and, for the default data, the index. What it says of chance:

- Sharpe ratio S with its standard error √((1 − γ₃S + ¼(γ₄ − 1)S²) / (n − 1)), γ₃ and γ₄ the
  skewness and kurtosis of the n returns (Mertens 2002);
- deflated Sharpe ratio (Bailey and López de Prado 2014): the probability that the best run's true
  Sharpe ratio is above 0, given that it is the best of N that were tried. Below 0.95 it may be
  luck. Also of the returns in excess of equal weights: in a rising market everybody is above 0;
- probability of back-test overfitting (Bailey et al. 2017): how often the run that is best on one
  half of 16 blocks of time is below the median on the other half. 0.5 is chance.
"""

import csv
import importlib
import itertools
import shlex
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch
import tyro
from torch import Tensor

import vec_envs
from algos import play
from algos.worker_learner import UserError
from algos.worker_learner.arguments import say_in_one_sentence
from vec_envs.stock_trading import StockTrading, load_market

sys.path.insert(0, str(Path(__file__).parent))
from returns import ROOT, append, commit

METRICS = {
    "cumulative": "cumulative return",
    "annual": "annual return",
    "volatility": "volatility",
    "sharpe": "Sharpe",
    "sharpe_error": "± error",
    "drawdown": "max. drawdown",
    "calmar": "Calmar",
    "turnover": "turnover a year",
    "fees": "fees / capital",
}
FEWEST = 20  # rows of the test years of which statistics say anything
OWN = {"seed", "run_dir", "resume", "pause_at", "device", "env_device", "torch_threads", "compile"}
OWN |= {"env_threads", "num_workers", "checkpoint_every", "save_replay", "log_every"}


@dataclass
class Options:
    """Back-test trained policies of StockTrading."""

    run_dirs: tyro.conf.Positional[list[str]]
    """folders of runs that differ in nothing but their seed (--ensemble: or their script)"""
    tried: list[str] = field(default_factory=list)
    """folders of all other runs that were tried before these: they count for the deflated Sharpe
    ratio and the probability of overfitting"""
    fees: list[float] = field(default_factory=lambda: [0.0, 0.001, 0.002])
    """parts of the value traded; 0.001 is 10 basis points"""
    walk_forward: int = 0
    """train anew before each of so many equal folds of the test years (0: do not)"""
    ensemble: bool = False
    """in each quarter trade by the run with the best Sharpe ratio in the quarter before"""
    figure: str = ""
    """draw equity, drawdown and holdings into this file, at the middle one of --fees"""
    daily: str = ""
    """write the assets on each date, a column a strategy, into this .csv, at that fee, too"""
    orders: bool = False
    """print what each run orders after the last row of the data, for a close not yet known"""
    results: str = ""
    """append the table's rows to this .csv"""
    what: str = "backtest"
    """the first column of these rows"""


class Account(NamedTuple):
    """What trading over T rows left in the books."""

    dates: np.ndarray  # (T + 1,), the first is the eve
    assets: np.ndarray  # (T + 1,), the first is the capital
    fees: np.ndarray  # (T,)
    traded: np.ndarray  # (T,) value sold and bought
    weights: np.ndarray  # (T, D) parts of the assets in each stock

    @property
    def returns(self) -> np.ndarray:
        return np.diff(self.assets) / self.assets[:-1]


@torch.no_grad()
def trade(policy: Callable[[Tensor], Tensor], env: StockTrading) -> Account:
    """One episode of the first env, by policy: observation (1, obs_dim) -> action (1, D)."""
    obs, _ = env.reset(seed=0)
    books = []
    for row in range(1, env.max_episode_steps + 1):
        obs, *_ = env.step(policy(obs))
        book = env.ledger
        weights = (book["shares"][0] * env.prices[row] / book["assets"][0]).numpy()
        books.append((*(book[key].item() for key in ("assets", "fees", "traded")), weights))
    assets, fees, traded, weights = (np.array(column) for column in zip(*books, strict=True))
    return Account(env.dates, np.append(env.capital, assets), fees, traded, weights)


def chain(accounts: list[Account]) -> Account:
    """Accounts of one fold after another: each begins with what the one before it ended with.

    What was held is turned into cash there without a fee, and bought anew at the fold's first
    close.
    """
    whole = accounts[0]
    for later in accounts[1:]:
        factor = whole.assets[-1] / later.assets[0]
        assets = np.append(whole.assets, factor * later.assets[1:])
        fees, traded = (factor * x for x in (later.fees, later.traded))
        books = (whole.fees, fees), (whole.traded, traded), (whole.weights, later.weights)
        dates = np.append(whole.dates, later.dates[1:])
        whole = Account(dates, assets, *(np.concatenate(pair) for pair in books))
    return whole


# Statistics. The formulas are compared with empyrical-reloaded's and ffn's in the tests.


def sharpe(returns: np.ndarray) -> float:
    """Mean / standard deviation of a period, without a riskless rate; 0 where nothing moves."""
    deviation = returns.std(ddof=1)
    return float(returns.mean() / deviation) if deviation > 0 else 0.0


def sharpe_error(returns: np.ndarray) -> float:
    """Standard error of `sharpe` for returns that are independent, but not normal."""
    ratio, away = sharpe(returns), returns - returns.mean()
    deviation = returns.std() or 1.0  # of a run that never trades
    skewness, kurtosis = ((away**k).mean() / deviation**k for k in (3, 4))
    variance = 1 - skewness * ratio + (kurtosis - 1) / 4 * ratio**2
    return float(np.sqrt(max(variance, 0.0) / (len(returns) - 1)))


def drawdown(assets: np.ndarray) -> np.ndarray:
    """How far below its highest value so far, as a part of it (T,), at most 0."""
    return assets / np.maximum.accumulate(assets) - 1


def metrics(account: Account, year: int) -> dict[str, float]:
    """The numbers of METRICS; `year` is the number of rows in one."""
    returns, assets = account.returns, account.assets
    cumulative = assets[-1] / assets[0] - 1
    annual = (1 + cumulative) ** (year / len(returns)) - 1
    deepest = drawdown(assets).min()
    return {
        "cumulative": cumulative,
        "annual": annual,
        "volatility": returns.std(ddof=1) * np.sqrt(year),
        "sharpe": sharpe(returns) * np.sqrt(year),
        "sharpe_error": sharpe_error(returns) * np.sqrt(year),
        "drawdown": deepest,
        "calmar": annual / -deepest if deepest else np.nan,
        "turnover": (account.traded / 2 / assets[:-1]).mean() * year,
        "fees": account.fees.sum() / assets[0],
    }


def deflated_sharpe(returns: np.ndarray, trials: list[float]) -> float:
    """Probability that the true Sharpe ratio is above what the best of the trials has by luck.

    `trials`: Sharpe ratios of a period (see `sharpe`) of all that was tried, this one included.
    Expected best of N without skill: σ ((1 − γ) Z(1 − 1/N) + γ Z(1 − 1/(N e))), γ Euler's constant.
    """
    luck, count, quantile = 0.0, len(trials), NormalDist().inv_cdf
    if count > 1:
        gamma = np.euler_gamma
        luck = (1 - gamma) * quantile(1 - 1 / count) + gamma * quantile(1 - 1 / (count * np.e))
        luck *= np.std(trials, ddof=1)
    return NormalDist().cdf((sharpe(returns) - luck) / max(sharpe_error(returns), 1e-300))


def overfitting(returns: np.ndarray, blocks: int = 16) -> float:
    """Probability of back-test overfitting by combinatorially symmetric cross-validation.

    `returns` (T, N) of N ≥ 2 trials. For every choice of half of the blocks: the rank, on the other
    half, of the trial that is best on this one.
    """
    length, trials = len(returns) // blocks, returns.shape[1]
    parts = returns[: length * blocks].reshape(blocks, length, trials)
    sums, squares = parts.sum(1), (parts**2).sum(1)  # (blocks, N)
    chosen = np.array(list(itertools.combinations(range(blocks), blocks // 2)))
    halves = np.zeros((len(chosen), blocks))
    np.put_along_axis(halves, chosen, 1.0, 1)

    def sharpes(mask: np.ndarray) -> np.ndarray:  # (combinations, N)
        n = length * blocks // 2
        mean = mask @ sums / n
        variance = ((mask @ squares - n * mean**2) / (n - 1)).clip(1e-24)
        return np.where(variance > 1e-24, mean / np.sqrt(variance), 0.0)

    inside, outside = sharpes(halves), sharpes(1 - halves)
    best = np.take_along_axis(outside, inside.argmax(1)[:, None], 1)
    rank = (outside < best).sum(1) + ((outside == best).sum(1) + 1) / 2  # from 1, ties in between
    return float((rank / (trials + 1) <= 0.5).mean())


# Policies.


def with_options(name: str, **options: object) -> str:
    """An environment's name with further options, which replace those it has."""
    return ",".join((name, *(f"{key}={value}" for key, value in options.items())))


def make_env(name: str) -> StockTrading:
    try:
        return vec_envs.make(name, 1)
    except ValueError as error:
        raise UserError(str(error)) from None


def snapshot(run_dir: str) -> dict:
    """best.pt or last.pt of a run, whichever has the higher Sharpe ratio in validation."""
    found = {}
    there = [name for name in ("best", "last") if Path(run_dir, f"{name}.pt").exists()]
    for checkpoint in there or ["best"]:  # of which `load` says that it is missing
        saved = play.load(play.Args(run_dir, checkpoint=checkpoint))
        name, *words = saved["args"]["env"].replace(" ", "").split(",")
        if name != "StockTrading":
            raise UserError(f"{run_dir} is a run on {saved['args']['env']}, not on StockTrading")
        if any(word.startswith("split=") and word != "split=train" for word in words):
            raise UserError(f"{run_dir} was not trained on the training years: {', '.join(words)}")
        account = trade(*agent_and_env(saved, split="validation"))
        found[sharpe(account.returns)] = {**saved, "checkpoint": checkpoint}
    return found[max(found)]


def agent_and_env(saved: dict, **options: object) -> tuple[Callable, StockTrading]:
    name = with_options(saved["args"]["env"], **options)
    return play.make({**saved, "args": {**saved["args"], "env": name}}, 1, 0)


def fold_names(name: str, folds: int) -> list[str]:
    """The environment for each fold of the test years, all that was before it for training."""
    test, validation = (make_env(with_options(name, split=s)).dates for s in ("test", "validation"))
    ahead = test[1] - validation[1]  # validation is as long as it was
    edges = [test[1 + (len(test) - 1) * i // folds] for i in range(folds)]
    ends = [*edges[1:], test[-1] + 1]
    return [
        with_options(name, validation=start - ahead, test=start, end=end)
        for start, end in zip(edges, ends, strict=True)
    ]


def snapshots(run_dir: str, chosen: dict, folds: int) -> list[dict]:
    """The snapshot of a run, or one for each fold, trained like it where it is not yet."""
    if not folds:
        return [chosen]
    found, script = [], importlib.import_module(f"algos.{chosen['script']}")
    for number, name in enumerate(fold_names(chosen["args"]["env"], folds), 1):
        folder = f"{run_dir}/walk_forward/{number}_of_{folds}"
        own = {"env": name, "run_dir": folder, "resume": "", "pause_at": 0}
        last, trained = play.Args(folder, checkpoint="last"), 0
        if Path(folder, "last.pt").exists():
            saved = play.load(last)
            trained, trained_on = saved["step"], saved["args"]["env"]
            if trained_on != name:
                since = "the data or the options have changed since; remove it"
                raise UserError(f"{folder} was trained on {trained_on}, not on {name}: {since}")
        if trained < chosen["args"]["total_steps"]:
            own["resume"] = folder if Path(folder, "args.json").exists() else ""
            script.train(script.Args(**{**chosen["args"], **own}))
        found.append(snapshot(folder))
    return found


def account_of(policies: list[dict], fee: float) -> Account:
    return chain([trade(*agent_and_env(saved, split="test", fee=fee)) for saved in policies])


def ensemble(runs: list[dict], fee: float, quarter: int) -> tuple[Account, list[int]]:
    """FinRL's strategy (Yang et al. 2020) -> its account, and which run trades in each quarter.

    All agents keep a paper account, from a quarter before the test on. In each quarter that agent
    trades whose paper account had the best Sharpe ratio in the quarter before. It takes over the
    shares that its predecessor held. Unlike FinRL's, agents are not trained again. `quarter` is
    the number of rows in one.
    """
    agents, envs = zip(
        *(agent_and_env(saved, split="test", fee=fee) for saved in runs), strict=True
    )
    dates = make_env(with_options(runs[0]["args"]["env"], split="validation")).dates[1:]
    if len(dates) <= quarter:  # what is before was trained on
        few = f"a quarter has {quarter} rows, the validation years have {len(dates)}"
        raise UserError(f"--ensemble chooses by the quarter before the test years: {few}")
    before = dates[-quarter]
    paper = [trade(*agent_and_env(saved, split="test", test=before, fee=fee)) for saved in runs]
    table = np.stack([account.returns for account in paper], 1)  # (T + a quarter, runs)
    quarters = range(0, envs[0].max_episode_steps + 1, quarter)  # + 1: a row that is still to come
    chosen = [int(np.argmax([sharpe(r) for r in table[q : q + quarter].T])) for q in quarters]
    step = itertools.count()
    return trade(lambda obs: agents[chosen[next(step) // quarter]](obs), envs[0]), chosen


def baselines(name: str, fee: float) -> dict[str, Account]:
    """What needs no learning, on the same prices: buy and hold, equal weights, the index."""
    options = {"split": "test", "fee": fee, "max_turbulence": 0.0, "actions": "weights"}
    env = make_env(with_options(name, **options))
    price, stocks = env.prices.numpy(), len(env.stocks)
    spent = env.capital / (1 + fee)  # at the first close, in equal parts
    held = spent / stocks * price[1:] / price[1]  # (T, D) values
    assets, traded = np.append(env.capital, held.sum(1)), spent * np.eye(1, len(held))[0]
    weights = held / held.sum(1, keepdims=True)
    found = {
        "buy and hold": Account(env.dates, assets, fee * traded, traded, weights),
        "equal weights": trade(lambda obs: torch.full((1, stocks), 1 / stocks), env),
    }
    if env.data == "sp500":
        index = load_market("sp500_index")
        price = index.close[np.searchsorted(index.dates, env.dates), 0]
        assets, nothing = env.capital * price / price[0], np.zeros(len(price) - 1)
        weights = np.ones((len(nothing), 1))
        found["S&P 500 (price)"] = Account(env.dates, assets, nothing, nothing, weights)
    return found


@torch.no_grad()
def orders(saved: dict) -> str:
    """What a policy does after the last row of the test years, at a close that is not yet known."""
    policy, env = agent_and_env(saved, split="test")
    obs, _ = env.reset(seed=0)
    most = env.max_trade[0]
    for _ in range(env.max_episode_steps):
        obs, _, _, _, info = env.step(policy(obs))
    last = info["final_obs"]
    if env.max_turbulence and last[0, 1 + len(env.stocks)] > 1:
        return "sell everything: the turbulence is above max_turbulence"
    action = policy(last)[0]
    if env.actions == "weights":
        action = action.clamp(0, 1)
        numbers, cash = [f"{x:.1%}" for x in action / action.sum().clamp(min=1)], ""
    else:
        action = torch.where(action.abs() < env.dead_zone, 0.0, action.clamp(-1, 1))
        held, assets = env.ledger["shares"][0], float(env.ledger["assets"])
        order = torch.maximum((action * most).trunc(), -held)  # it sells only what it has
        numbers = [f"{x:+.0f}" for x in order + 0.0]  # + 0.0: no -0
        cash = f" (for at most {max(0.0, assets - float(held @ env.prices[-1])):.0f} and the sales)"
    what = "hold" if env.actions == "weights" else "buy or sell"
    pairs = zip(env.stocks, numbers, strict=True)
    return f"{what} {', '.join(f'{stock} {number}' for stock, number in pairs)}{cash}"


# What is shown.


def line(label: str, values: list[dict[str, float]]) -> str:
    """A row of the table: the value, or mean ± standard deviation over seeds."""
    cells = []
    for key in METRICS:
        numbers = np.array([value[key] for value in values])
        percent = key not in ("sharpe", "sharpe_error", "calmar", "turnover")
        form = (lambda x: f"{100 * x:.1f} %") if percent else (lambda x: f"{x:.2f}")
        spread = f" ± {form(numbers.std(ddof=1))}" if len(numbers) > 1 else ""
        cells.append(form(numbers.mean()) + spread)
    return " | ".join((f"| {label}", *cells)) + " |"


def draw(file: str, accounts: list[Account], others: dict[str, Account]) -> None:
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError('--figure needs matplotlib: pip install -e ".[plot]"') from None
    figure = Figure(figsize=(8, 9), layout="constrained")
    equity, below, held = figure.subplots(3, sharex=True)
    named = [(f"run {i}", account) for i, account in enumerate(accounts, 1)]
    for label, account in (*named, *others.items()):
        style = "--" if label in others else "-"
        relative = account.assets / account.assets[0]
        equity.plot(account.dates, relative, style, label=label, linewidth=1)
        below.plot(account.dates, 100 * drawdown(account.assets), style, linewidth=1)
    equity.set_ylabel("assets / capital")
    equity.legend(fontsize="small")
    below.set_ylabel("drawdown, percent")
    held.stackplot(accounts[0].dates[1:], accounts[0].weights.T, colors=colormaps["tab20"].colors)
    held.set(ylim=(0, 1), ylabel="holdings of run 1, parts of its assets")
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"--figure {file}: {error}") from None


def chance(table: np.ndarray, equal: np.ndarray) -> dict[str, float]:
    """What luck could have done: of the returns (T, N) of all runs, and of equal weights (T,)."""
    found = {}
    for key, returns in (("deflated", table), ("deflated_excess", table - equal[:, None])):
        trials = [sharpe(column) for column in returns.T]
        found[key] = deflated_sharpe(returns[:, int(np.argmax(trials))], trials)
    enough = len(table) >= 16 and table.shape[1] > 1  # a row in each block, and a choice
    return found | {"overfitting": overfitting(table) if enough else np.nan}


def write_daily(file: str, accounts: dict[str, Account]) -> None:
    """The assets of each strategy on each date, the first date being the eve."""
    dates = next(iter(accounts.values())).dates
    table = zip(dates, *(account.assets for account in accounts.values()), strict=True)
    try:
        with open(file, "w", newline="") as out:
            csv.writer(out, lineterminator="\n").writerows([("date", *accounts), *table])
    except OSError as error:
        raise UserError(f"--daily {file}: {error.strerror}") from None


def check_alike(options: Options, runs: list[dict]) -> None:
    """UserError where runs differ in more than their seed, or have the same one."""
    first, seeds = runs[0], set()
    for run_dir, saved in zip(options.run_dirs, runs, strict=True):
        names = ["env"] if options.ensemble else sorted({*first["args"], *saved["args"]} - OWN)
        pairs = [("script", saved["script"], first["script"])] * (not options.ensemble)
        pairs += [(name, saved["args"].get(name), first["args"].get(name)) for name in names]
        for name, value, other in pairs:
            if value != other:
                raise UserError(
                    f"{name} is {value} in {run_dir}, {other} in {options.run_dirs[0]}; runs may "
                    "differ in their seed only, with --ensemble in all but --env"
                )
        if (own := (saved["script"], saved["args"]["seed"])) in seeds and not options.ensemble:
            raise UserError(f"two runs have the seed {own[1]}, and would count as two trials")
        seeds.add(own)


def typed(word: str) -> str:
    """A word of the command line as it is kept: of a path, what follows the repository's folder."""
    path = Path(word).resolve()
    inside = path.is_relative_to(ROOT) and ("/" in word or path.exists())
    return str(path.relative_to(ROOT)) if inside else Path(word).name


def main(options: Options) -> list[dict]:
    """Print everything -> the rows of the table, one a strategy, seed and fee."""
    torch.set_num_threads(1)
    if not options.run_dirs:
        raise UserError("no run to back-test: name at least one folder")
    if not options.fees:
        raise UserError("--fees is empty; name at least one")
    if wrong := [fee for fee in options.fees if not 0 <= fee <= 0.99]:
        parts = "parts of the value traded from 0 to 0.99; 10 basis points are 0.001"
        raise UserError(f"--fees has {wrong[0]:g}; allowed are {parts}")
    folders = [Path(folder).resolve() for folder in (*options.run_dirs, *options.tried)]
    if len(set(folders)) < len(folders):  # it would count as two trials
        raise UserError("a folder is named twice")
    folds = options.walk_forward
    if not 0 <= folds <= 100:
        raise UserError(f"--walk-forward is {folds}; allowed is from 0 to 100")
    if options.ensemble and folds:
        raise UserError("--ensemble and --walk-forward: one at a time")
    runs = [snapshot(run_dir) for run_dir in options.run_dirs]
    check_alike(options, runs)
    env = runs[0]["args"]["env"]
    test = make_env(with_options(env, split="test"))
    dates, stocks = test.dates, textwrap.shorten(", ".join(test.stocks), 200)
    if len(dates) - 1 < max(FEWEST, folds):
        few = f"the test years have {len(dates) - 1} rows, from {dates[1]} to {dates[-1]}"
        raise UserError(f"{few}; at least {max(FEWEST, folds)} are needed")
    runs = [snapshots(*pair, folds) for pair in zip(options.run_dirs, runs, strict=True)]
    others = [snapshots(run_dir, snapshot(run_dir), folds) for run_dir in options.tried]
    script = ", ".join(dict.fromkeys(policies[0]["script"] for policies in runs))
    days = (dates[-1] - dates[0]) / np.timedelta64(1, "D")
    year = max(1, round((len(dates) - 1) / days * 365.25))  # rows
    quarter = max(1, year // 4)
    chosen = ", ".join(policies[0]["checkpoint"] for policies in runs)
    print(f"{script} on {env}, {dates[1]} to {dates[-1]} ({len(dates) - 1} rows)\n{stocks}")
    print(f"snapshots that were better in validation: {chosen}")
    version, command = commit(), f"python {shlex.join(map(typed, sys.argv))}"
    rows, whose = [], f"{script}, {len(runs)} run{'s' * (len(runs) > 1)}"
    for fee in options.fees:
        own = [account_of(policies, fee) for policies in runs]
        tried = [account_of(policies, fee) for policies in others]
        for run_dir, account in zip(options.tried, tried, strict=True):
            if not np.array_equal(account.dates, own[0].dates):
                raise UserError(f"--tried {run_dir}: its test years are not those of the others")
        without = baselines(env, fee)
        equal = without["equal weights"].returns
        if options.ensemble:
            without["ensemble"], best = ensemble([p[0] for p in runs], fee, quarter)
            print(f"\nensemble, which run trades in each quarter: {[x + 1 for x in best]}")
        print(f"\nfee {1e4 * fee:g} basis points\n\n| | {' | '.join(METRICS.values())} |")
        print("|---" * (len(METRICS) + 1) + "|")
        print(line(whose, [metrics(account, year) for account in own]))
        for label, account in without.items():
            print(line(label, [metrics(account, year)]))

        luck = chance(np.stack([account.returns for account in (*own, *tried)], 1), equal)
        count = len(own) + len(tried)
        overfit = "" if np.isnan(luck["overfitting"]) else (  # which needs several runs
            f"; probability of back-test overfitting {luck['overfitting']:.2f} (0.5 is chance)"
        )  # fmt: skip
        print(
            f"\nof {count} run{'s' * (count > 1)} tried: deflated Sharpe ratio of the best "
            f"{luck['deflated']:.3f}, of its excess over equal weights "
            f"{luck['deflated_excess']:.3f} (below 0.95 it may be luck){overfit}"
        )
        entries = [
            (p[0]["script"], p[0]["args"]["seed"], x, luck) for p, x in zip(runs, own, strict=True)
        ]
        for label, seed, account, extra in (
            *entries,
            *((k, "", x, {}) for k, x in without.items()),
        ):
            numbers = {**metrics(account, year), **dict.fromkeys(luck, np.nan), **extra}
            numbers = {k: "" if np.isnan(x) else f"{x:.5g}" for k, x in numbers.items()}
            facts = {"what": options.what, "strategy": label, "env": env, "seed": seed, "fee": fee}
            rows.append({**facts, **numbers, "commit": version, "command": command})
        if fee == sorted(options.fees)[len(options.fees) // 2]:
            if options.figure:
                draw(options.figure, own, without)
            if options.daily:
                seeds = (f"{p[0]['script']} {p[0]['args']['seed']}" for p in runs)
                write_daily(options.daily, {**dict(zip(seeds, own, strict=True)), **without})
    if options.orders:
        for run_dir, policies in zip(options.run_dirs, runs, strict=True):
            print(f"\n{run_dir}, orders after {dates[-1]}: {orders(policies[-1])}")
        if options.ensemble:
            whose = options.run_dirs[best[-1]]
            print(f"\nensemble at {1e4 * fee:g} basis points: the orders of {whose}")
    if options.results:
        try:
            append(Path(options.results), rows)
        except OSError as error:
            raise UserError(f"--results {options.results}: {error.strerror}") from None
    return rows


if __name__ == "__main__":
    sys.excepthook = say_in_one_sentence
    main(tyro.cli(Options))
