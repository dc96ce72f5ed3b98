"""benchmark/backtest.py: its formulas against other packages, and real runs from end to end."""

import csv
import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import vec_envs
from algos.worker_learner import UserError
from vec_envs.stock_trading import random_walk

ROOT = Path(__file__).parent.parent
WALK = "StockTrading,data=random_walk,actions=weights"


def program(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmark" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def backtest():
    return program("backtest")


@pytest.fixture
def account(backtest):
    """An account of 1000 days: skewed returns with a mean."""
    rng = np.random.default_rng(0)
    returns = 0.0007 + 0.01 * (rng.gamma(4, size=1000) - 4) / 2
    dates = np.datetime64("2018-12-31") + np.arange(1001)
    assets = 1e6 * np.append(1, 1 + returns).cumprod()
    return backtest.Account(
        dates, assets, np.full(1000, 10.0), assets[:-1] / 100, np.ones((1000, 1))
    )


def test_metrics_are_those_of_empyrical(backtest, account):
    empyrical = pytest.importorskip("empyrical")
    found, returns = backtest.metrics(account, 252), account.returns
    expected = {
        "cumulative": empyrical.cum_returns_final(returns),
        "annual": empyrical.annual_return(returns),
        "volatility": empyrical.annual_volatility(returns),
        "sharpe": empyrical.sharpe_ratio(returns),
        "drawdown": empyrical.max_drawdown(returns),
        "calmar": empyrical.calmar_ratio(returns),
    }
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-9), key
    assert found["fees"] == pytest.approx(1000 * 10 / 1e6)
    assert found["turnover"] == pytest.approx(252 * 0.005)  # half of what was sold and bought


def trials_of(count: int, mean: float = 0.0, rows: int = 1005) -> np.ndarray:
    rng = np.random.default_rng(count)
    common = rng.standard_normal((rows, 1))
    return 0.01 * (common + rng.standard_normal((rows, count))) + mean * np.arange(count)


@pytest.mark.parametrize("count", [1, 2, 20])
def test_the_deflated_sharpe_ratio_is_that_of_ffn(backtest, count):
    ffn, pandas = pytest.importorskip("ffn"), pytest.importorskip("pandas")
    returns = trials_of(count, 2e-5) + 5e-4
    ratios = [backtest.sharpe(column) for column in returns.T]
    best = returns[:, int(np.argmax(ratios))]
    series = pandas.Series(best, pandas.bdate_range("2019-01-01", periods=len(best)))
    expected = ffn.calc_deflated_sharpe_ratio(series, ratios, nperiods=252, annualized_trials=False)
    assert 0.05 < expected < 0.999
    assert backtest.deflated_sharpe(best, ratios) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("count", "mean"), [(2, 0.0), (7, 0.0), (7, 1e-4)])
def test_the_probability_of_overfitting_is_that_of_ffn(backtest, count, mean):
    ffn, pandas = pytest.importorskip("ffn"), pytest.importorskip("pandas")
    returns = trials_of(count, mean)
    expected = ffn.calc_prob_backtest_overfitting(pandas.DataFrame(returns), n_blocks=8)
    assert 0 < expected < 1
    assert backtest.overfitting(returns, blocks=8) == pytest.approx(expected, abs=1e-12)


def test_the_standard_error_of_the_sharpe_ratio_is_its_spread(backtest):
    """Of 3000 histories of skewed returns the ratios spread as the formula says."""
    rng = np.random.default_rng(0)
    histories = 0.0015 + 0.01 * (4 - rng.gamma(4, size=(3000, 500))) / 2
    spread = np.std([backtest.sharpe(h) for h in histories])
    said = np.mean([backtest.sharpe_error(h) for h in histories])
    assert said == pytest.approx(spread, rel=0.05)


def test_a_run_that_never_trades_is_like_any_other(backtest):
    assert backtest.sharpe_error(np.zeros(101)) == pytest.approx(0.1)
    assert backtest.deflated_sharpe(np.zeros(101), [0.0]) == 0.5
    good = 0.001 + trials_of(1, rows=160)[:, 0] / 100
    table = np.stack((np.zeros(160), good), 1)
    assert backtest.overfitting(table) == backtest.overfitting(table[:, ::-1]) == 0.0


def test_a_chain_of_folds_is_the_whole(backtest, account):
    """Cut where nobody would notice, it is the same account again."""
    parts = []
    for rows in (slice(0, 400), slice(400, 1000)):
        more = slice(rows.start, rows.stop + 1)
        scale = 1e6 / account.assets[rows.start]
        books = (scale * x[rows] for x in (account.fees, account.traded))
        assets = scale * account.assets[more]
        parts.append(backtest.Account(account.dates[more], assets, *books, account.weights[rows]))
    dates, *books = backtest.chain(parts)
    assert np.array_equal(dates, account.dates)
    for one, other in zip(books, account[1:], strict=True):
        assert one.shape == other.shape and np.allclose(one, other, rtol=1e-12, atol=0)


def test_trade_keeps_the_books_of_the_environment(backtest):
    env = vec_envs.make(f"{WALK},split=test,fee=0.002", 1)
    weights = itertools.cycle((torch.full((1, 20), 0.05), torch.eye(20)[:1], torch.zeros(1, 20)))
    account = backtest.trade(lambda obs: next(weights), env)
    steps = env.max_episode_steps
    assert account.dates.shape == account.assets.shape == (steps + 1,)
    assert account.weights.shape == (steps, 20)
    assert account.fees == pytest.approx(0.002 * account.traded)
    assert account.weights[0] == pytest.approx(0.05, abs=1e-3)
    assert account.weights[1] == pytest.approx(np.eye(20)[0], abs=2e-3)
    assert account.weights[2] == pytest.approx(0.0, abs=1e-12)
    prices = env.prices.numpy()
    held = account.weights[:-1] * (prices[2:] / prices[1:-1] - 1)  # from step 1 on
    expected = held.sum(1) - account.fees[1:] / account.assets[1:-1]
    assert account.returns[1:] == pytest.approx(expected, abs=1e-12)


def test_comparisons_do_not_flee_from_turbulence(backtest):
    one, other = (backtest.baselines(WALK + more, 0.001) for more in ("", ",max_turbulence=15"))
    for label, account in one.items():
        assert np.array_equal(account.assets, other[label].assets)


def test_paths_of_a_command_are_kept_from_the_repository_on(backtest, monkeypatch):
    monkeypatch.chdir(ROOT / "benchmark")
    words = ["backtest.py", "../runs/new", f"{ROOT}/runs/a", "/else/b.csv", "--fees", "0.001"]
    expected = ["benchmark/backtest.py", "runs/new", "runs/a", "b.csv", "--fees", "0.001"]
    assert [backtest.typed(word) for word in words] == expected


def test_folds_cover_the_test_years_once_and_train_before_them(backtest):
    whole = vec_envs.make(f"{WALK},split=test", 1).dates[1:]
    names = backtest.fold_names(WALK, 3)
    tests = [vec_envs.make(f"{name},split=test", 1).dates[1:] for name in names]
    assert np.array_equal(np.concatenate(tests), whole)
    for name, test in zip(names, tests, strict=True):
        train = vec_envs.make(name, 1).dates
        validation = vec_envs.make(f"{name},split=validation", 1).dates[1:]
        assert train[-1] < validation[0] and validation[-1] < test[0]
        assert 700 < (test[0] - validation[0]).astype(int) < 740  # two years, as it was


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[str]:
    """Two short runs."""
    folders = [str(tmp_path_factory.mktemp("runs") / f"seed{seed}") for seed in (1, 2)]
    for seed, folder in enumerate(folders, 1):
        command = [sys.executable, "algos/ppo.py", "--env", f"{WALK},steps=30", "--seed", str(seed)]
        command += ["--total-steps", "2048", "--num-envs", "16", "--eval-episodes", "2"]
        command += ["--compile", "none", "--run-dir", folder]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folders


@pytest.fixture
def altered(runs, tmp_path):
    """A copy of the second run with other arguments, of whatever script."""

    def alter(script: str = "ppo", **arguments) -> str:
        for name in ("best.pt", "last.pt"):
            saved = torch.load(Path(runs[1], name), weights_only=True)
            saved["args"].update(arguments)
            torch.save({**saved, "script": script}, tmp_path / name)
        return str(tmp_path)

    return alter


def test_real_runs_from_end_to_end(runs, tmp_path):
    command = [sys.executable, "benchmark/backtest.py", *runs, "--ensemble"]
    command += ["--results", str(tmp_path / "stock.csv"), "--figure", str(tmp_path / "a.png")]
    command += ["--daily", str(tmp_path / "daily.csv"), "--orders"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2 runs tried" in done.stdout and "probability of back-test overfitting" in done.stdout
    with open(tmp_path / "stock.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    strategies = ["ppo", "ppo", "buy and hold", "equal weights", "ensemble"]
    assert [row["strategy"] for row in rows] == 3 * strategies
    assert [row["fee"] for row in rows] == [
        fee for fee in ("0.0", "0.001", "0.002") for _ in "12345"
    ]
    by_fee = [float(row["cumulative"]) for row in rows if row["strategy"] == "equal weights"]
    assert by_fee[0] > by_fee[1] > by_fee[2]
    assert os.path.getsize(tmp_path / "a.png") > 10_000
    assert done.stdout.count("orders after 2022-12-30: hold synthetic 0 ") == 2
    assert "\nensemble at 20 basis points: the orders of " in done.stdout
    with open(tmp_path / "daily.csv", newline="") as file:
        daily = list(csv.DictReader(file))
    names = ["date", "ppo 1", "ppo 2", "buy and hold", "equal weights", "ensemble"]
    assert list(daily[0]) == names and daily[-1]["date"] == "2022-12-30"
    growth = float(daily[-1]["ppo 1"]) / float(daily[0]["ppo 1"]) - 1
    assert growth == pytest.approx(float(rows[5]["cumulative"]), rel=1e-4)  # at the middle fee
    words = rows[0]["command"].split()
    assert words[:5] == ["python", "benchmark/backtest.py", "seed1", "seed2", "--ensemble"]


def test_only_seeds_may_differ_and_scripts_in_an_ensemble(backtest, runs, altered, monkeypatch):
    monkeypatch.setitem(sys.modules, "algos.again", importlib.import_module("algos.ppo"))
    real = os.path.isfile  # as if there were algos/again.py, a copy of ppo.py
    monkeypatch.setattr(os.path, "isfile", lambda path: "again" in str(path) or real(path))
    options = backtest.Options([runs[0], altered(script="again")], fees=[0.0])
    with pytest.raises(UserError, match=r"script is again in .*, ppo in .* their seed only"):
        backtest.main(options)
    options.ensemble = True
    assert [row["strategy"] for row in backtest.main(options)][:2] == ["ppo", "again"]
    options.ensemble = False
    altered(gamma=0.5)
    with pytest.raises(
        UserError, match=r"gamma is 0\.5 in .*, 0\.99 in .*; runs may differ in their"
    ):
        backtest.main(options)
    altered(gamma=0.99, seed=1)
    with pytest.raises(UserError, match="two runs have the seed 1, and would count as two trials"):
        backtest.main(options)
    altered(env=f"{WALK},steps=31")
    with pytest.raises(UserError, match=r"env is .*steps=31 in .*, .*steps=30 in .*; runs may"):
        backtest.main(options)


def test_a_year_is_as_many_rows_as_the_data_have(backtest, runs, altered, tmp_path, monkeypatch):
    weeks = np.arange("1990-01-01", "2023-01-01", 7, dtype="datetime64[D]")
    market = random_walk(weeks, 20, 0)
    np.savez(tmp_path / "weeks.npz", close=market.close, dates=weeks)
    seen, real = [], backtest.ensemble

    def watched(runs, fee, quarter):
        seen.append(quarter)
        return real(runs, fee, quarter)

    monkeypatch.setattr(backtest, "ensemble", watched)
    run = altered(env=f"StockTrading,actions=weights,data={tmp_path}/weeks.npz")
    *_, equal, _ = backtest.main(backtest.Options([run], fees=[0.0], ensemble=True))
    account = backtest.baselines(f"StockTrading,data={tmp_path}/weeks.npz", 0.0)["equal weights"]
    assert float(equal["volatility"]) == pytest.approx(account.returns.std(ddof=1) * 52**0.5, 1e-4)
    assert seen == [13] and equal["strategy"] == "equal weights"


def test_buying_and_holding_leaves_nothing_in_cash(backtest):
    """Whatever the capital, and however prices fall on the first day: the mean growth."""
    market = f"{WALK},test=2020-03-16"
    env = vec_envs.make(f"{market},split=test", 1)
    growth = (env.prices[1:] / env.prices[1]).mean(1).numpy()
    for capital in (1e6, 5e3, 10.0):
        hold = backtest.baselines(f"{market},capital={capital}", 0.01)["buy and hold"]
        np.testing.assert_allclose(hold.assets[1:], capital / 1.01 * growth)
        assert hold.assets[0] == capital and hold.weights.sum(1) == pytest.approx(1.0)
        assert hold.fees.sum() == hold.fees[0] == pytest.approx(capital - hold.assets[1])


def test_data_with_a_comma_in_their_name(backtest, tmp_path):
    dates = np.arange("2020-01-01", "2020-01-13", dtype="datetime64[D]")
    np.savez(tmp_path / "a,b.npz", close=np.full((12, 2), 3.0), dates=dates)
    name = f"StockTrading,data={tmp_path}/a,b.npz,validation=2020-01-05,test=2020-01-09,steps=1"
    assert list(backtest.baselines(name, 0.0)) == ["buy and hold", "equal weights"]


def test_an_ensemble_never_chooses_by_the_test_years(backtest, runs):
    saved = [backtest.snapshot(folder) for folder in runs]
    with pytest.raises(UserError, match="a quarter has 600 rows, the validation years have 521"):
        backtest.ensemble(saved, 0.0, 600)


def test_orders_are_those_of_the_row_that_is_not_yet_known(backtest, altered):
    """With one more row in the data, the policy's next step is what was ordered."""
    for actions, more in (("weights", ""), ("shares", "")):
        run = altered(env=f"StockTrading,data=random_walk,actions={actions},end=2021-03-02{more}")
        saved = torch.load(f"{run}/last.pt", weights_only=True)
        said = backtest.orders(saved)
        saved["args"]["env"] = saved["args"]["env"].replace("03-02", "03-03")
        policy, env = backtest.agent_and_env(saved, split="test")
        obs, _ = env.reset(seed=0)
        for _ in range(env.max_episode_steps - 1):
            obs, *_ = env.step(policy(obs))
        cash, held = float(env.cash), env.shares.clone()
        order = env._order(policy(obs).double(), env.prices[-1:])[0]
        if actions == "weights":
            order = (order + env.shares[0]) * env.prices[-1]
            order = [f"{x:.1%}" for x in order / (env.cash + env.shares @ env.prices[-1])[0]]
            end = ""
        else:
            order = [f"{x:+.0f}" for x in torch.maximum(order, -held[0]) + 0.0]
            end = f" (for at most {cash:.0f} and the sales)"
        pairs = [f"{stock} {x}" for stock, x in zip(env.stocks, order, strict=True)]
        assert (
            said == {"weights": "hold ", "shares": "buy or sell "}[actions] + ", ".join(pairs) + end
        )
    turbulent = {**saved, "args": {**saved["args"]}}
    turbulent["args"]["env"] += ",max_turbulence=0.001"
    assert backtest.orders(turbulent).startswith("sell everything")


def test_the_snapshot_is_chosen_in_validation(backtest, runs, monkeypatch):
    seen = []
    real = backtest.trade

    def watched(policy, env):
        seen.append((str(env.dates[1]), str(env.dates[-1])))
        account = real(policy, env)
        grows = np.linspace(1, 2 if len(seen) == 2 else 0.5, len(account.assets)) ** 2
        return account._replace(assets=1e6 * grows)  # the second one looks better

    monkeypatch.setattr(backtest, "trade", watched)
    assert backtest.snapshot(runs[0])["checkpoint"] == "last"
    assert seen == 2 * [("2017-01-02", "2018-12-31")]


def test_a_run_that_was_never_evaluated_is_scored_by_its_last_policy(backtest, altered):
    folder = altered()
    os.remove(f"{folder}/best.pt")
    assert backtest.snapshot(folder)["checkpoint"] == "last"


def test_walk_forward_trains_a_policy_for_each_fold(backtest, altered):
    run = altered(pause_at=1024)  # its folds do not pause
    chosen = backtest.snapshot(run)
    policies = backtest.snapshots(run, chosen, 2)
    assert [Path(p["args"]["run_dir"]).name for p in policies] == ["1_of_2", "2_of_2"]
    account = backtest.account_of(policies, 0.001)
    assert np.array_equal(account.dates, vec_envs.make(f"{WALK},split=test", 1).dates)
    stamps = [os.stat(p["args"]["run_dir"] + "/last.pt").st_mtime_ns for p in policies]
    backtest.snapshots(run, chosen, 2)  # not trained again
    assert stamps == [os.stat(p["args"]["run_dir"] + "/last.pt").st_mtime_ns for p in policies]
    chosen["args"]["env"] += ",end=2020-01-01"  # as if the data were others
    with pytest.raises(
        UserError, match=r"1_of_2 was trained on .*, not on .* have changed since; rem"
    ):
        backtest.snapshots(run, chosen, 2)


def test_the_ensemble_follows_the_best_of_the_quarter_before(backtest, runs, monkeypatch):
    """Two agents, cash and the first stock: it holds the stock after quarters that were good."""
    real = backtest.agent_and_env
    policies = {1: lambda obs: torch.zeros(1, 20), 2: lambda obs: torch.eye(20)[:1]}

    def fake(saved, **options):
        return policies[saved["args"]["seed"]], real(saved, **options)[1]

    saved = [backtest.snapshot(folder) for folder in runs]
    monkeypatch.setattr(backtest, "agent_and_env", fake)
    account, chosen = backtest.ensemble(saved, 0.0, 63)
    env = vec_envs.make(f"{WALK},split=test", 1)
    market = vec_envs.make(f"{WALK},split=all", 1)
    start = int(np.searchsorted(market.dates, env.dates[1]))
    returns = (market.prices[1:, 0] / market.prices[:-1, 0] - 1).numpy()  # entry t − 1: row t
    for quarter, choice in enumerate(chosen):
        row = start + 63 * (quarter - 1)
        before = returns[row : row + 62]  # of rows row + 1 on; bought at the close of `row`
        if quarter:  # a paper account that goes on already holds the stock at its first row
            before = returns[row - 1 : row + 62]
        assert choice == int(before.mean() > 0)
        held = account.weights[63 * quarter : 63 * (quarter + 1), 0]
        assert held == pytest.approx(float(choice), abs=1e-6)
    assert len(set(chosen)) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere"], "is not the folder of a run"),
        (["RUN", "--walk-forward", "-1"], "--walk-forward is -1; allowed is from 0 to 100"),
        (["RUN", "--walk-forward", "2", "--ensemble"], "--walk-forward: one at a time"),
        (["RUN", "--fees"], "--fees is empty"),
        (["RUN", "--fees", "10"], "--fees has 10; allowed are parts of the value traded"),
        (["RUN", "--fees", "0", "--daily", "/tmp"], "--daily /tmp: Is a directory"),
        (["RUN", "--tried", "RUN"], "a folder is named twice"),
        (["RUN", "--fees", "0", "--results", "/tmp"], "--results /tmp: Is a directory"),
        (["RUN", "--fees", "0", "--figure", "a.xyz"], "--figure a.xyz: Format 'xyz' is not supp"),
    ],
)
def test_errors_are_one_sentence(arguments, message, runs):
    words = [runs[0] if word == "RUN" else word for word in arguments]
    command = [sys.executable, "benchmark/backtest.py", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode and message in done.stderr and "Traceback" not in done.stderr


def test_another_environment_is_refused(backtest, tmp_path):
    torch.save(
        {"script": "ppo", "args": {"env": "CartPole"}, "step": 1, "agent": {}},
        tmp_path / "best.pt",
    )
    with pytest.raises(UserError, match="is a run on CartPole, not on StockTrading"):
        backtest.snapshot(str(tmp_path))


def test_too_few_test_years_are_refused(backtest, altered):
    run = altered(env=f"{WALK},end=2019-01-10")
    with pytest.raises(
        UserError, match=r"the test years have 7 rows, from 2019-01-01 .* at least 20"
    ):
        backtest.main(backtest.Options([run]))


def test_who_has_seen_the_test_years_is_refused(backtest, altered):
    run = altered(env=f"{WALK},split=all")
    with pytest.raises(UserError, match=r"was not trained on the training years: .*split=all"):
        backtest.snapshot(run)


def test_what_was_tried_in_other_years_is_refused(backtest, runs, altered):
    tried = [altered(env=f"{WALK},test=2020-01-01")]
    with pytest.raises(UserError, match=r"--tried .*: its test years are not those of the others"):
        backtest.main(backtest.Options(runs[:1], tried=tried, fees=[0.0]))


def test_the_readme_holds_what_was_measured():
    with open(ROOT / "benchmark" / "results" / "stock.csv", newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if (row["what"], row["fee"]) == ("backtest", "0.001")
        ]
    found: dict[str, list[np.ndarray]] = {}
    for row in rows:
        numbers = [float(row[key]) for key in ("cumulative", "sharpe", "drawdown", "turnover")]
        found.setdefault(row["strategy"], []).append(np.array(numbers) * (100, 1, 100, 1))
    text = (ROOT / "benchmark" / "README.md").read_text().replace("−", "-")
    for strategy, values in found.items():
        cumulative, ratio, drawdown, turnover = np.mean(values, 0)
        spread = [""] * 4
        if len(values) > 1:
            deviations = np.std(values, 0, ddof=1)
            spread = [f" ± {deviations[0]:.0f}", f" ± {deviations[1]:.2f}"]
        cells = f"| {cumulative:.0f}{spread[0]} % | {ratio:.2f}{spread[1]} | {drawdown:.1f} % |"
        assert cells + (f" {turnover:.1f} |" if turnover else " |") in text, strategy


def test_too_few_rows_say_nothing_of_overfitting(backtest):
    table = trials_of(2, rows=16)
    assert backtest.chance(table, table[:, 0])["overfitting"] <= 1
    assert np.isnan(backtest.chance(table[:15], table[:15, 0])["overfitting"])


def test_the_loop_in_python_trades_as_we_do():
    """FinRL executes at the close of the same day, we at the next: the rows are one apart."""
    env = vec_envs.make("StockTrading,data=random_walk,max_shares=100,capital=1e7,split=test", 1)
    env.reset(seed=0)
    loop = program("stock_checks").FinRLLoop(env.prices[1:].numpy(), np.zeros((1100, 8, 20)))
    loop.state[0] = 1e7  # enough: what they do with scarce cash differs
    for action in 2 * torch.rand(100, 20, generator=torch.Generator().manual_seed(0)) - 1:
        action[action.abs() < env.dead_zone] = 0.0
        env.step(action[None])
        loop.step(action.double().numpy())
        assert loop.state[21:41] == env.shares[0].tolist()
        assert loop.state[0] == pytest.approx(env.cash.item(), rel=1e-12)
    assert loop.state[0] > 0 and sum(loop.state[21:41]) > 0


def test_a_check_keeps_the_commit_of_its_training_and_takes_no_other_commands_run(
    backtest, tmp_path, monkeypatch
):
    checks = program("stock_checks")
    monkeypatch.setitem(checks.ENVS, "leak", f"{WALK},steps=20,leak=true")
    monkeypatch.setitem(checks.STEPS, "leak", 64)
    options = checks.Options("leak", runs_dir=tmp_path, results=tmp_path)
    monkeypatch.setattr(checks, "commit", lambda: "of the training")
    monkeypatch.setattr(backtest, "commit", lambda: "of the back-test")
    checks.learn(options)
    with open(tmp_path / "stock.csv", newline="") as file:
        commits = {row["strategy"]: row["commit"] for row in csv.DictReader(file)}
    others = dict.fromkeys(("buy and hold", "equal weights"), "of the back-test")
    assert commits == {"ppo": "of the training", **others}
    monkeypatch.setitem(checks.STEPS, "leak", 128)
    with pytest.raises(SystemExit, match="leak1 is of another command"):
        checks.learn(options)
