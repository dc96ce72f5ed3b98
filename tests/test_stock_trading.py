"""StockTrading against a scalar reference in plain Python, its invariants, and print."""

import csv
import functools
import gzip
import importlib
import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import vec_envs
from algos import play
from vec_envs.stock_trading import load_market, market_features, random_walk, turbulence

ROOT = Path(__file__).parent.parent
WALK = "StockTrading,data=random_walk"
needs_skfolio = pytest.mark.skipif(
    importlib.util.find_spec("skfolio") is None, reason="the prices are in skfolio"
)


def actions_of(env, steps, seed=0):
    """Random actions, some of them beyond the bounds and some of them 0."""
    rng = torch.Generator().manual_seed(seed)
    shape = (steps, env.num_envs, *env.single_action_space.shape)
    action = 3 * torch.rand(shape, generator=rng) - 1.5
    action[torch.rand(shape, generator=rng) < 0.1] = 0.0
    return action


def reference_step(kind, cash, shares, price, action, most, fee, sell_all):
    """One env, one step, in Python floats -> cash, shares, fees."""
    assets = cash + sum(h * p for h, p in zip(shares, price, strict=True))
    if kind == "weights":
        action = [min(max(a, 0.0), 1.0) for a in action]
        total = max(1.0, sum(action))
    fees, shares, wishes = 0.0, list(shares), []
    for i, price_now in enumerate(price):
        if sell_all:
            wish = -shares[i]
        elif kind == "weights":
            wish = action[i] / total * assets / price_now - shares[i]
        else:
            wish = 0 if abs(action[i]) < 0.1 else int(min(max(action[i], -1.0), 1.0) * most[i])
        if wish < 0:
            sold = min(-wish, shares[i])
            shares[i] -= sold
            cash += sold * price_now * (1 - fee)
            fees += sold * price_now * fee
            wish = 0
        wishes.append(wish)
    cost = sum(w * p for w, p in zip(wishes, price, strict=True)) * (1 + fee)
    part = min(1.0, cash / cost) if cost else 1.0
    for i, wish in enumerate(wishes):
        bought = wish * part
        if kind == "shares":
            bought = float(int(bought))
        shares[i] += bought
        cash -= bought * price[i] * (1 + fee)
        fees += bought * price[i] * fee
    return cash, shares, fees


@pytest.mark.parametrize("turbulence", ["", ",max_turbulence=25"])
@pytest.mark.parametrize("kind", ["shares", "weights"])
def test_equals_the_scalar_reference(kind, turbulence):
    env = vec_envs.make(f"{WALK},actions={kind},steps=40,fee=0.01{turbulence}", 3, seed=5)
    obs, _ = env.reset(seed=7)
    state = [(env.cash[i].item(), env.shares[i].tolist()) for i in range(3)]
    short_of_cash = sold_out = 0
    for action in actions_of(env, 39):
        row, most = env.row.tolist(), env.max_trade.tolist()
        sell_all = (obs[:, 21] > 1.0).tolist()
        before = env.assets.tolist()
        obs, reward, terminated, truncated, _ = env.step(action)
        assert not terminated.any() and not truncated.any()
        for i, (cash, shares) in enumerate(state):
            price = env.prices[row[i] + 1].tolist()
            given = action[i].double().tolist()
            cash, shares, fees = reference_step(
                kind, cash, shares, price, given, most[i], 0.01, sell_all[i]
            )
            state[i] = cash, shares
            assets = cash + sum(h * p for h, p in zip(shares, price, strict=True))
            assert env.cash[i].item() == pytest.approx(cash, abs=1e-6)
            assert env.shares[i].tolist() == pytest.approx(shares, rel=1e-9, abs=1e-9)
            assert env.ledger["fees"][i].item() == pytest.approx(fees, rel=1e-9, abs=1e-9)
            assert env.ledger["assets"][i].item() == pytest.approx(assets, rel=1e-12)
            assert reward[i].item() == pytest.approx(1e-4 * (assets - before[i]), abs=1e-5)
            own = [cash / assets, *(h * p / assets for h, p in zip(shares, price, strict=True))]
            assert obs[i, :21].tolist() == pytest.approx(own, abs=1e-6)
            short_of_cash += cash < 1e3
            sold_out += sell_all[i]
    assert short_of_cash  # else the pro rata was never needed
    assert bool(sold_out) == bool(turbulence)


@pytest.mark.parametrize("kind", ["shares", "weights"])
def test_the_books_balance_and_cash_is_never_negative(kind):
    env = vec_envs.make(f"{WALK},actions={kind},steps=200,capital=1.0,max_shares=0", 16)
    if kind == "shares":  # whole shares need more
        env = vec_envs.make(f"{WALK},actions={kind},steps=200,capital=10_000.0", 16)
    env.reset(seed=1)
    scale = env.capital
    for action in actions_of(env, 199):
        before, shares, row = env.assets, env.shares, env.row
        env.step(action)
        gain = (shares * (env.prices[row + 1] - env.prices[row])).sum(1)
        error = env.assets - before - gain + env.ledger["fees"]
        assert error.abs().max() <= 1e-9 * scale
        assert env.cash.min() >= 0 and env.shares.min() >= 0
        assert kind == "weights" or bool((env.shares == env.shares.round()).all())


def test_the_policy_matters():
    """FinRL's vectorised environment overwrites every action with ones."""
    returns = []
    for level in (-1.0, 0.3, 1.0):
        env = vec_envs.make(f"{WALK},steps=30", 2)
        env.reset(seed=3)
        for _ in range(30):
            *_, info = env.step(torch.full((2, 20), level))
        returns.append(info["episode_return"][0].item())
    assert returns[0] == 0.0  # nothing to sell
    assert len(set(returns)) == 3


def test_stocks_are_sold_each_on_its_own():
    """FinRL's vectorised environment sells by a mask that mixes the stocks."""
    env = vec_envs.make(f"{WALK},fee=0.0", 2)
    env.reset(seed=0)
    env.step(torch.ones(2, 20))
    before, action = env.shares.clone(), torch.zeros(2, 20)
    action[0, 4], action[1, 7] = -0.5, -0.5
    env.step(action)
    sold = before - env.shares
    expected = torch.zeros(2, 20, dtype=torch.float64)
    for i, stock in ((0, 4), (1, 7)):
        expected[i, stock] = min(before[i, stock], (0.5 * env.max_trade[i, stock]).floor())
    assert expected.sum() > 0 and torch.equal(sold, expected)


@pytest.mark.parametrize("kind", ["shares", "weights"])
def test_tomorrow_is_not_observed_today(kind, monkeypatch):
    import vec_envs.stock_trading as module

    true = load_market("random_walk")
    rows = np.searchsorted(true.dates, np.datetime64("2019-01-01")) - 1 + 10  # shown at step 10
    changed = true.close.copy()
    changed[rows + 1 :] *= np.random.default_rng(0).uniform(0.5, 2.0, changed[rows + 1 :].shape)
    observed = []
    for close in (true.close, changed):
        monkeypatch.setattr(module, "load_market", lambda *a, c=close: true._replace(close=c))
        env = vec_envs.make(f"{WALK},split=test,actions={kind},max_turbulence=30", 1)
        obs, _ = env.reset(seed=0)
        seen = [obs]
        for action in actions_of(env, 12):
            seen.append(env.step(action)[0])
        observed.append(torch.cat(seen))
    assert torch.equal(observed[0][:11], observed[1][:11])
    assert not torch.equal(observed[0][11], observed[1][11])


def test_leak_shows_what_an_order_will_earn():
    env = vec_envs.make(f"{WALK},actions=weights,leak=true,fee=0.0", 4)
    obs, _ = env.reset(seed=0)
    assert obs.shape[1] == 2 + 11 * 20
    leaked = obs[:, -20:].double()
    action = torch.zeros(4, 20)
    action[:, 3] = 1.0
    env.step(action)
    before = env.assets
    env.step(action)
    gain = 100 * (env.assets / before - 1)
    assert gain == pytest.approx(leaked[:, 3], abs=1e-4)


def test_indicators_are_those_of_their_definitions():
    rng = np.random.default_rng(0)
    dates = np.arange("2000-01-01", "2001-01-01", dtype="datetime64[D]")
    market = random_walk(dates, 2, 3)
    features = market_features(market, 100, 365, 0.0).reshape(-1, 19)
    t, i = 100 + int(rng.integers(200)), 1
    x = market.close[: t + 1, i]
    ema_12 = ema_26 = x[0]
    rise = fall = 0.0
    for before, now in itertools.pairwise(x):
        ema_12 += 2 / 13 * (now - ema_12)
        ema_26 += 2 / 27 * (now - ema_26)
        rise += (max(now - before, 0) - rise) / 30
        fall += (max(before - now, 0) - fall) / 30
    sma = {n: x[-n:].mean() for n in (20, 30, 60)}
    sigma, price = x[-20:], x[-1]
    sigma = np.sqrt(((sigma - sma[20]) ** 2).sum() / 19)
    rsi = rise / (rise + fall)
    expected = [
        100 * (x[-1] / x[-2] - 1),
        100 * (ema_12 - ema_26) / price,
        100 * (sma[20] + 2 * sigma) / price - 100,
        100 * (sma[20] - 2 * sigma) / price - 100,
        rsi,
        (price - sma[30]) / (0.015 * abs(x[-30:] - sma[30]).mean()) / 100,
        abs(rise - fall) / (rise + fall),
        100 * sma[30] / price - 100,
        100 * sma[60] / price - 100,
    ]
    found = features[t - 100, 1:].reshape(9, 2)[:, i]
    assert found.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_turbulence_is_the_mahalanobis_distance():
    market = load_market("random_walk")
    env = vec_envs.make(f"{WALK},max_turbulence=40,split=test", 1)
    obs, _ = env.reset(seed=0)
    returns = np.diff(market.close, axis=0) / market.close[:-1]
    t = np.searchsorted(market.dates, np.datetime64("2019-01-01")) - 1  # entry t − 1 is of row t
    past, now = returns[t - 253 : t - 1], returns[t - 1]
    away = now - past.mean(0)
    expected = away @ np.linalg.solve(np.cov(past.T), away)
    assert 40 * obs[0, 21].item() == pytest.approx(expected, rel=1e-5)
    early = turbulence(market.close[:260], 0)
    assert not early[:253].any() and early[253:].all()


def test_windows_are_random_in_training_and_fixed_in_test():
    train = vec_envs.make(f"{WALK},steps=20", 500)
    train.reset(seed=0)
    last = train.row + 20
    assert train.row.unique().numel() > 400 and last.max() < len(train.dates)
    assert train.dates[-1] < np.datetime64("2017-01-01")
    for _ in range(20):
        *_, truncated, _ = train.step(torch.zeros(500, 20))
    assert truncated.all() and not torch.equal(train.row + 20, last)  # new windows
    cuts = {"validation": ("2017-01-02", "2018-12-31"), "test": ("2019-01-01", "2022-12-30")}
    for split, (first, last) in cuts.items():
        env = vec_envs.make(f"{WALK},split={split}", 2)
        env.reset(seed=0)
        assert env.row.tolist() == [0, 0]
        assert str(env.dates[1]) == first and str(env.dates[-1]) == last  # [0] is the eve
        assert env.max_episode_steps == len(env.dates) - 1


def test_a_picture_is_of_one_episode():
    """Another episode, also one that begins later, and another env begin a new curve."""
    pytest.importorskip("matplotlib")
    new = functools.partial(vec_envs.make, f"{WALK},actions=weights,steps=9", 2)

    def draw(env, row):
        env.reset(seed=0)
        env.row = torch.full((2,), row)
        env.render()
        env.step(torch.eye(20)[:2])
        return env.render()

    env, other = new(), new()
    early, late = draw(env, 20), draw(env, 700)
    assert np.array_equal(late, draw(new(), 700)) and not np.array_equal(early, late)
    draw(other, 700)
    other._drawn.clear()
    for each in (env, other):
        each.step(torch.eye(20)[:2])
    assert np.array_equal(env.render(1), other.render(1))


def test_resumes_exactly_and_seeds_are_reproduced():
    one = vec_envs.make(f"{WALK},steps=15", 4, seed=2)
    one.reset(seed=9)
    actions = actions_of(one, 40)
    for action in actions[:10]:
        one.step(action)
    two = vec_envs.make(f"{WALK},steps=15", 4, seed=77)
    two.load_state_dict(one.state_dict())
    for action in actions[10:]:
        ours, theirs = one.step(action), two.step(action)
        assert all(torch.equal(a, b) for a, b in zip(ours[:4], theirs[:4], strict=True))


def test_a_step_asks_nothing_of_a_gpu():
    from tests.test_classic import Watch

    env = vec_envs.make(f"{WALK},steps=3,max_turbulence=25", 2)
    env.reset(seed=0)
    env.looks = False
    with Watch() as watch:
        for _ in range(5):
            env.step(torch.ones(2, 20))
    assert not watch.seen


def test_synthetic_prices_have_no_drift_and_a_u_shaped_day():
    days = np.arange("2000-01-03", "2002-12-31", dtype="datetime64[D]").astype("datetime64[m]")
    market = random_walk((days[:, None] + np.arange(30)).ravel(), 10, 0)
    returns = market.close[1:] / market.close[:-1] - 1
    deviation = returns.std(0) / np.sqrt(len(returns))
    assert (abs(returns.mean(0)) < 4 * deviation).all()
    by_minute = np.concatenate((np.zeros((1, 10)), returns)).reshape(-1, 30, 10)[1:].std((0, 2))
    assert by_minute[0] > 1.5 * by_minute[15] and by_minute[-1] > 1.5 * by_minute[15]
    assert np.array_equal(market.close, random_walk(market.dates, 10, 0).close)
    assert not np.array_equal(market.close, random_walk(market.dates, 10, 1).close)


SMALL = {"total_steps": 128, "num_envs": 4, "num_steps": 8, "hidden_size": 8, "warmup_steps": 32}
SMALL |= {
    "batch_size": 8,
    "minibatch_size": 16,
    "buffer_size": 256,
    "epochs": 1,
    "eval_episodes": 2,
}


@pytest.mark.parametrize("kind", ["shares", "weights"])
@pytest.mark.parametrize("script", ["ppo", "ppo_hterm", "ddpg", "td3", "sac"])
def test_scripts_train_on_it_unchanged(script, kind, tmp_path, monkeypatch):
    from algos.worker_learner import run as run_module
    from tests.test_gpu import NoEvaluator

    monkeypatch.setattr(run_module, "Evaluator", NoEvaluator)  # it plays episodes like any other
    module = importlib.import_module(f"algos.{script}")
    small = {k: v for k, v in SMALL.items() if hasattr(module.Args, k)}
    args = module.Args(env=f"{WALK},actions={kind},steps=20", run_dir=str(tmp_path / "r"), **small)
    assert module.train(args).step >= 128


def test_a_tournament_on_it_and_its_best_policy_played_drawn_and_exported(tmp_path, capsys):
    root, words = tmp_path / "root", "--num-envs 4 --num-steps 8 --hidden-size 8 --compile none"
    flags = "--algos ppo --agents 1 --total-steps 64 --period 32 --eval-episodes 2 --env"
    command = [sys.executable, "algos/tournament.py", *flags.split(), f"{WALK},steps=20"]
    command += ["--root", root, "--", *words.split()]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert len(list((root / "agents").iterdir())) == 2  # segments, one after the other

    call = functools.partial(play.Args, str(root / "best"), episodes=2)
    play.main(call())
    assert "To compare: buy and hold " in capsys.readouterr().out
    play.main(call(video=str(tmp_path / "assets.png")))
    assert (tmp_path / "assets.png").stat().st_size > 10_000
    play.main(call(export=str(tmp_path / "policy.pt2")))
    policy = torch.export.load(tmp_path / "policy.pt2").module()
    agent, env = play.make(play.load(call()), 3, 0)
    obs, _ = env.reset()
    assert env.max_episode_steps > 500  # the validation years
    torch.testing.assert_close(policy(obs), agent(obs), atol=1e-6, rtol=0)


# Files.

ROWS = [["2020-01-01", "10", "20"], ["2020-01-02", "11", "21"], ["2020-01-05", "12", "22"]]


def write(path: Path, rows, header=("date", "A", "B")) -> str:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


@pytest.mark.parametrize(
    ("place", "word", "message"),
    [
        ((1, 1), "", "row 2 of the data: the price of A on 2020-01-02T00:00:00 is missing"),
        ((1, 2), "0", "row 2 of the data: the price of B on 2020-01-02T00:00:00 is 0.0"),
        ((2, 2), "-1", "row 3 of the data: the price of B on 2020-01-05T00:00:00 is -1.0"),
        ((2, 0), "2020-01-02", "row 3 of the data: 2020-01-02T00:00:00 comes after 2020-01-02"),
        ((2, 0), "2019-12-31", "row 3 of the data: 2019-12-31T00:00:00 comes after 2020-01-02"),
        ((0, 1), "ten", "row 1 after the header: could not convert string to float: 'ten'"),
        ((1, 0), "soon", "row 2 after the header"),
        ((1, 0), "01/02/2020", "a row is a date, 2019-01-31, and a price of each stock"),
        ((1, 0), "20200102", "row 2 of the data: the date is not written as 2019-01-31"),
        ((1, 0), "1", "row 2 of the data: the date is not written as 2019-01-31"),
        ((0, 0), "", "row 1 of the data: the date is missing"),
        ((2, 0), "", "row 3 of the data: the date is missing"),
    ],
)
def test_an_error_in_a_file_names_the_row(tmp_path, place, word, message):
    rows = [list(row) for row in ROWS]
    rows[place[0]][place[1]] = word
    path = write(tmp_path / "prices.csv", rows)
    with pytest.raises(ValueError) as error:
        vec_envs.make(f"StockTrading,data={path}", 1)
    assert str(error.value).count("prices.csv") == 1 and message in str(error.value)


def test_a_volume_is_no_stock(tmp_path):
    path = write(tmp_path / "prices.csv", ROWS, ("date", "Close", "Volume"))
    with pytest.raises(ValueError, match=r"prices\.csv: a column is one of open, high, low, adj"):
        load_market(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (
            ("date", "Close", "Adj Close"),
            "a column is one of open, high, low, adj close and volume",
        ),
        (("date", "A", "A"), "a column has no name, or two have the same one"),
        (("date", "A", ""), "a column has no name, or two have the same one"),
        (("2019-12-31", "9", "19"), "the first line must be date,NAME,NAME... with commas between"),
        (("date;A;B",), "the first line must be date,NAME,NAME... with commas between, and is"),
    ],
)
def test_a_header_that_names_no_stocks_is_refused(tmp_path, header, message):
    with pytest.raises(ValueError, match=message):
        load_market(write(tmp_path / "prices.csv", ROWS, header))


def test_dates_are_those_of_the_exchange(tmp_path):
    """As yfinance writes them: midnight there, with the offset from UTC."""
    for offset in ("+09:00", "-05:00"):
        rows = [[f"{row[0]} 00:00:00{offset}", *row[1:]] for row in ROWS]
        dates = load_market(write(tmp_path / f"{offset[:3]}.csv", rows)).dates
        assert dates.astype(str).tolist() == [row[0] for row in ROWS]


def test_npz_files_of_objects_say_what_to_do(tmp_path):
    close, dates = np.ones((2, 1)), np.arange("2020-01-01", "2020-01-03", dtype="datetime64[D]")
    np.savez(tmp_path / "a.npz", close=close, dates=dates, names=np.array(["A"], object))
    np.savez(tmp_path / "b.npz", prices=close, dates=dates)
    with pytest.raises(
        ValueError, match=r"a\.npz: Object arrays .*; save names by \.astype\(str\)"
    ):
        load_market(str(tmp_path / "a.npz"))
    with pytest.raises(ValueError, match=r"b\.npz: it has no array 'close', but prices, dates"):
        load_market(str(tmp_path / "b.npz"))


def test_a_capital_too_small_for_whole_shares_is_said_once(tmp_path, capsys):
    path = write(tmp_path / "dear.csv", ROWS)
    name = f"StockTrading,data={path},split=all,steps=1,capital="
    for _ in "12":
        vec_envs.make(f"{name}100", 1)
    said = capsys.readouterr().err
    assert said.count("an order is at most 2 shares of B; actions=weights trades parts") == 1
    vec_envs.make(f"{name}100,actions=weights", 1)
    vec_envs.make(f"{name}1000", 1)
    assert not capsys.readouterr().err


def test_splits_and_missing_weeks_are_named(tmp_path, capsys):
    rows = [["2020-01-01", "10", "20"], ["2020-01-02", "11", "10"], ["2020-01-03", "12", "11"]]
    load_market(write(tmp_path / "split.csv", rows))
    said = capsys.readouterr().err
    assert "B changes by -50 % on 2020-01-02; is that a split" in said and said.count("\n") == 1
    rows[1:] = [["2020-01-15", "11", "21"], ["2021-03-01", "12", "22"], ["2021-03-02", "12", "22"]]
    load_market(write(tmp_path / "gap.csv", rows))
    said = capsys.readouterr().err
    assert said.endswith("gap.csv: there are no prices between 2020-01-15 and 2021-03-01\n")
    load_market(write(tmp_path / "prices.csv", ROWS))
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    "damage", ["cut.csv.gz", "flipped.csv.gz", "cut.npz", "soon.npz", "word.csv", "cut.parquet"]
)
def test_a_damaged_file_is_one_sentence(tmp_path, damage):
    path = tmp_path / damage
    text = "date,A,B\n" + "".join(",".join(row) + "\n" for row in ROWS)
    if damage.endswith(".gz"):
        whole = gzip.compress(text.encode())
        flipped = whole[:12] + bytes(255 - x for x in whole[12:])
        path.write_bytes(whole[:40] if damage == "cut.csv.gz" else flipped)
    elif damage == "cut.npz":
        np.savez(path, close=np.ones((99, 2)), dates=np.arange(99))
        path.write_bytes(path.read_bytes()[:500])
    elif damage == "soon.npz":
        np.savez(path, close=np.ones((1, 2)), dates=np.array(["soon"]))
    elif damage == "cut.parquet":  # or what is needed to read it is not there
        path.write_bytes(b"PAR1")
    else:
        path.write_text(text + "1" * 200_000)  # longer than a field may be
    with pytest.raises(ValueError) as error:
        vec_envs.make(f"StockTrading,data={path}", 1)
    assert damage in str(error.value) and "\n" not in str(error.value)


def test_files_of_all_kinds_are_the_same_market(tmp_path):
    text = load_market(write(tmp_path / "a.csv", ROWS))
    dates, close = np.array([r[0] for r in ROWS]), np.array([[10.0, 20], [11, 21], [12, 22]])
    np.savez(tmp_path / "a.npz", dates=dates, close=close, names=np.array(["A", "B"]))
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame(close, pandas.to_datetime(dates), ["A", "B"])
    frame.to_parquet(tmp_path / "a.parquet")
    frame.reset_index().to_parquet(tmp_path / "b.parquet")
    files = "a.npz", "a.parquet", "b.parquet"
    for market in (text, *(load_market(str(tmp_path / name)) for name in files)):
        assert market.names == ("A", "B") and np.array_equal(market.close, close)
        assert market.dates.dtype == np.dtype("datetime64[D]")
        assert np.array_equal(market.dates, dates.astype("datetime64[D]"))
    frame.iloc[1, 0] = np.nan
    frame.to_parquet(tmp_path / "a.parquet")
    load_market.cache_clear()
    with pytest.raises(ValueError, match=r"row 2 of the data: the price of A on .* is missing"):
        load_market(str(tmp_path / "a.parquet"))


def test_a_file_as_people_have_it(tmp_path, monkeypatch):
    """In the home folder, an ending in capitals, a comma in its name, an empty last line."""
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "a,b.CSV", [*ROWS, []])
    cuts = "validation=2020-01-02,test=2020-01-05,steps=1"
    assert vec_envs.make("StockTrading", 1, data="~/a,b.CSV", steps=1, split="all").stocks == (
        "A",
        "B",
    )
    with pytest.raises(
        ValueError, match=r"from 2020-01-01 to 2020-01-05: choose validation=DATE < te"
    ):
        vec_envs.make("StockTrading", 1, data="~/a,b.CSV")
    header = ("Date", "Open", "High", "Low", "Close", "Adj Close", "Volume")
    path = write(tmp_path / "yahoo.csv", [[*row, "1", "1", "1", "9"] for row in ROWS], header)
    with pytest.raises(ValueError, match=r"yahoo.csv: a column is one of open, high, low, adj"):
        vec_envs.make(f"StockTrading,data={path},{cuts}", 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("actions=both", "actions is 'both', allowed is shares or weights"),
        ("split=future", "split is 'future'"),
        ("fee=1.5", "fee is 1.5, allowed are floats from 0 to 0.99"),
        ("fee=high", "fee is high, allowed are floats"),
        ("steps=0", "steps is 0, allowed are ints from 1"),
        ("steps=2.5", "steps is 2.5, allowed are ints from 1"),
        ("steps=100000", "train has"),
        ("test=2016-01-01", "test=2016-01-01"),
        ("test=soon", "test is 'soon', not a date"),
        ("test=2030-01-01", "the data are from 1990-01-01 to 2022-12-30"),
        ("data=none.csv", "none.csv: No such file"),
        ("data=prices.txt", "data is 'prices.txt', allowed are sp500"),
        ("wings=2", "wings"),
    ],
)
def test_a_wrong_option_is_one_sentence(options, message):
    with pytest.raises(ValueError) as error:
        vec_envs.make(f"{WALK},{options}", 1)
    assert message in str(error.value) and "\n" not in str(error.value)


# Print.


@needs_skfolio
def test_the_default_data_are_those_that_were_measured():
    """Sharpe ratio 1.04 and drawdown −31.7 % of daily equal weights, 2019-2022 without fees."""
    env = vec_envs.make("StockTrading,actions=weights,split=test,fee=0.0", 1)
    env.reset(seed=0)
    assets = []
    for _ in range(env.max_episode_steps):
        env.step(torch.full((1, 20), 0.05))
        assets.append(env.ledger["assets"].item())
    assets = np.array(assets)
    returns = np.diff(assets) / assets[:-1]
    assert returns.mean() / returns.std(ddof=1) * np.sqrt(252) == pytest.approx(1.04, abs=0.005)
    drawdown = (assets / np.maximum.accumulate(assets) - 1).min()
    assert drawdown == pytest.approx(-0.317, abs=0.0005)


@pytest.fixture(scope="module")
def prices_in_print(tmp_path_factory):
    """Normalised prices as shipped by universal-portfolios -> a file of ours, by name."""
    found = importlib.util.find_spec("universal")
    if found is None:
        licence = "whose licence obliges its users to give feedback, so that no extra has it"
        command = "pip install --no-deps universal-portfolios"
        pytest.skip(f"the prices in print are in universal-portfolios, {licence}: {command}")
    source = Path(found.submodule_search_locations[0], "data")

    def convert(name: str) -> str:
        close = np.genfromtxt(source / f"{name}.csv", delimiter=",", skip_header=1)
        close = close[:, ~np.isnan(close).all(0)]
        ones = np.ones((2, close.shape[1]))  # the price before the first day; and its eve
        close = np.concatenate((ones, close))
        path = tmp_path_factory.mktemp("print") / f"{name}.npz"
        dates = np.datetime64("1900-01-01") + np.arange(len(close))
        np.savez(path, close=close, dates=dates)
        return str(path)

    return convert


def wealth(path: str, kind: str, fee: float) -> float:
    """Of a uniform portfolio, bought once or daily rebalanced, as a multiple of its first value.

    Print does not charge a fee for the first purchase.
    """
    options = f"actions={kind},split=all,fee={fee},capital=1e9"
    env = vec_envs.make(f"StockTrading,data={path},{options}", 1)
    env.reset(seed=0)
    count = len(env.stocks)
    action = torch.ones(1, count) if kind == "shares" else torch.full((1, count), 1 / count)
    env.step(action)
    first = env.ledger["assets"].item()
    for _ in range(env.max_episode_steps - 1):
        env.step(0 * action if kind == "shares" else action)  # 0 shares: hold
    return env.ledger["assets"].item() / first


@pytest.mark.parametrize(
    ("name", "hold", "rebalanced"),
    [("nyse_o", 14.50, 27.08), ("nyse_n", 18.06, 31.55), ("tse", 1.61, 1.60)],
)
def test_equals_print(prices_in_print, name, hold, rebalanced):
    path = prices_in_print(name)
    assert round(wealth(path, "shares", 0.0), 2) == hold
    assert round(wealth(path, "weights", 0.0), 2) == rebalanced
    if name == "nyse_o":
        assert round(wealth(path, "weights", 0.001), 2) == 25.36
        assert load_market(path).close[-1].max() == pytest.approx(54.14, abs=0.005)


@pytest.mark.parametrize("split", ["", ",split=train", ",split=test"])
def test_buy_and_hold_beside_a_score_is_of_the_same_years(split):
    env = vec_envs.make(WALK + split, 1)
    scored = vec_envs.make(vec_envs.for_evaluation(WALK + split), 1)
    (known,) = env.known_returns.values()
    assert list(env.known_returns) == ["buy and hold in " + (split[7:] or "validation")]
    assert env.known_returns == scored.known_returns and len(env.known_returns) == 1
    if split != ",split=train":  # one episode
        growth = (scored.prices[-1] / scored.prices[1]).mean().item()
        assert known == pytest.approx(100 * (growth - 1))


def test_policies_are_scored_on_the_validation_years():
    name = vec_envs.for_evaluation("StockTrading,actions=weights")
    assert name == "StockTrading,split=validation,actions=weights"
    dates = vec_envs.make(name, 2).dates
    assert str(dates[0])[:4] >= "2016" and str(dates[-1])[:4] <= "2018"
    chosen = vec_envs.make(vec_envs.for_evaluation("StockTrading,split=test"), 2).dates
    assert str(chosen[0])[:4] >= "2018"
    assert vec_envs.for_evaluation("Spread,physics=openai") == "Spread,physics=openai"
