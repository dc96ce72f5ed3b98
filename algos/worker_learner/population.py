"""The folder of a population, which generations.py and tournament.py share.

    agents/ID/          a run folder after its segment, with agent.json; never changed again
    flight/ID.json      an agent to be: written before its segment is started
    flight/ID/          its run folders, until one rename publishes the agent
    journal.jsonl       what happened: one object a line, each forced to the disk
    settings.json       the flags that all began with
    best/               the policy with the best score, for play.py
    lineage.csv, descent.png    views, made anew from agents/

What is true is in the first four; a driver that is killed anywhere goes on from them. An agent that
descends from another goes on where that one ended, with other random numbers, and perhaps other
hyper-parameters. Its score is the mean return over episodes by seeds from 2³⁰ on; runs have seeds
below 2²⁹.
"""

import contextlib
import dataclasses
import errno
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from algos.worker_learner import files, leaderboard, segments
from algos.worker_learner.agents import (
    FRESH,
    LIMITS,
    SCORE,
    Agent,
    Journal,
    PopulationArgs,
    check_settings,
    commit,
    descend,
    first_flags,
    fuse,
    hyperparameters,
    last_line,
    load_script,
    read_score,
    scaled,
    scoring,
    script_path,
    sync,
)
from algos.worker_learner.arguments import UserError, check_args, flag, tell, warn

OURS = "--env", "--total-steps", "--seed", "--run-dir", "--resume", "--pause-at"
KILLED = -signal.SIGKILL, 128 + signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM
MAX_RESTARTS = 3  # of a segment that was killed


class Population:
    """Agents that are published and agents to be, and the segments that train them.

    `algos` are names of scripts, or paths; `words` are flags for them.
    Raises UserError, before anything is started, for what cannot be.
    """

    def __init__(self, args: PopulationArgs, algos: list[str], words: list[str], program: str):
        check_args(args, LIMITS)
        self.args, self.algos, self.words, self.program = args, algos, words, program
        self.period = args.period or max(1, args.total_steps // 10)
        self.root = Path(args.root or f"runs/{program}__{args.env.replace('/', '-')}")
        if refused := [word for word in words if word.split("=")[0].replace("_", "-") in OURS]:
            raise UserError(f"{refused[0]} stands after --, but {program}.py has one of its own")
        self.starts = {algo: hyperparameters(algo, args, words) for algo in algos}
        self.limits = {algo: getattr(load_script(algo), "LIMITS", {}) for algo in algos}
        self.agents: dict[str, Agent] = {}
        self.flights: dict[str, Agent] = {}
        try:
            for name in ("agents", "flight", "best", "failed"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
            self._lock()
            check_settings(self.root, args, {"algos": algos, "words": words})
            self.journal = Journal(self.root / "journal.jsonl")
            self._read()
        except OSError as error:
            raise self.cannot_write(error) from None
        names = {*self.agents, *self.flights, *(line.get("id", "") for line in self.journal.lines)}
        self.count = max((int(name) + 1 for name in names if name), default=0)  # segments begun
        self.began = self.journal.lines[0]["time"] if self.journal.lines else time.time()
        self.commit = commit()
        self.running: list[tuple[str, str]] = []  # (agent, part): "0" ... of its runs, or "score"
        self._done: dict[str, set[str]] = {}
        self._restarts: dict[str, int] = {}
        self._failed_at_first: list[str] = []
        self.expected = 0  # segments in all, which a program says for the time left
        self._shown = self._viewed = 0.0
        self.pool = segments.connect(args.cluster, args.cpus, args.gpus, args.agents)
        if args.cluster == "none" and not self.pool.slots():
            needs = f"--cpus is {args.cpus:g} and --gpus {args.gpus:g}"
            raise UserError(f"{needs}; this machine has no room for a single run")

    def _lock(self) -> None:
        try:
            files.lock(self.root)
        except UserError:
            raise UserError(f"--root {self.root}: another process works in it") from None

    def cannot_write(self, error: OSError) -> UserError:
        why = error.strerror or error
        return UserError(f"--root {self.root}: {why}; the same command goes on when that is mended")

    def _read(self) -> None:
        """What agents/ and flight/ hold; what a killed driver left half done is finished."""
        corrupt = {line["id"] for line in self.journal.lines if line["event"] == "corrupt"}
        published = {line["id"] for line in self.journal.lines if line["event"] == "published"}
        for folder in sorted((self.root / "agents").iterdir()):
            try:
                agent = Agent(**json.loads((folder / "agent.json").read_text()))
            except (OSError, ValueError, TypeError) as error:
                if folder.name not in corrupt:
                    self._corrupt(folder.name, f"agent.json: {error}")
                continue
            if agent.id not in corrupt:
                self.agents[agent.id] = agent
                if agent.id not in published:
                    facts = {"score": agent.score, "error": agent.error}
                    self.journal.note("published", id=agent.id, **facts)
        gone = "failed", "orphaned"
        ended = {line["id"] for line in self.journal.lines if line["event"] in gone}
        for path in sorted((self.root / "flight").glob("*.json")):
            agent = Agent(**json.loads(path.read_text()))
            if agent.id in ended or (self.root / "agents" / agent.id).exists():
                path.unlink()
            else:
                self.flights[agent.id] = agent
        for folder in (self.root / "flight").iterdir():
            if folder.is_dir() and folder.name not in self.flights:
                shutil.rmtree(folder)

    def _corrupt(self, name: str, why: str) -> None:
        warn(f"{self.root / 'agents' / name} is damaged ({why}); it is left out.")
        self.agents.pop(name, None)
        self.journal.note("corrupt", id=name, why=str(why))

    # Agents: new ones, their segments, their end.

    def random(self, *about: Any) -> random.Random:
        """A generator that depends on --seed and on what it is for, not on what happened before."""
        return random.Random(repr((self.args.seed, *about)))

    def fresh(self, algo: str, **more: Any) -> Agent:
        """A new agent from the beginning; its hyper-parameters are 1/2 to 2 times the script's."""
        draw, flags = self.random("fresh", self.count), self.starts[algo]
        if self.count:  # the first one has the script's own
            flags = self._scaled(algo, flags, lambda: 2 ** draw.uniform(-1, 1))
        return self.begin(self._agent("", algo, flags, self.period, more))

    def child(self, parent: Agent, perturbed: bool, **more: Any) -> Agent:
        """A new agent that goes on where `parent` ended, for one period."""
        flags, draw = parent.flags, self.random("child", self.count)
        if perturbed:
            flags = self._scaled(parent.script, flags, lambda: draw.choice((0.8, 1.25)))
        end = (parent.step // self.period + 1) * self.period
        return self.begin(self._agent(parent.id, parent.script, flags, end, more))

    def _agent(self, parent: str, algo: str, flags: dict, end: int, more: dict) -> Agent:
        end = end if end + self.period <= self.args.total_steps else self.args.total_steps
        seed = self.random("seed", self.count).randrange(2**29)
        return Agent(f"{self.count:05}", parent, algo, flags, seed, end, **more)

    def _scaled(self, algo: str, flags: dict[str, float], factor: Callable) -> dict[str, float]:
        limits = self.limits[algo]
        return {name: scaled(x, factor(), limits.get(name)) for name, x in flags.items()}

    def begin(self, agent: Agent) -> Agent:
        """Write down that this agent is to be trained; `work` does it."""
        agent = dataclasses.replace(agent, commit=self.commit)
        path = self.root / "flight" / f"{agent.id}.json"
        path.with_suffix(".tmp").write_text(json.dumps(dataclasses.asdict(agent)) + "\n")
        os.replace(path.with_suffix(".tmp"), path)
        self.flights[agent.id] = agent
        self.count = max(self.count, int(agent.id) + 1)
        return agent

    def work(self) -> None:
        """Start what there is room for, stop the weakest where there is not, wait for one event."""
        slots = self.pool.slots()
        order = sorted(self.parts(), key=lambda part: (-self._parent_score(part[0]), part))
        while len(self.running) > slots:
            weakest = max(self.running, key=order.index)
            self.pool.stop("/".join(weakest))
            self.running.remove(weakest)
            self.journal.note("stopped", id=weakest[0], part=weakest[1])
        for part in order:
            if len(self.running) < slots and part not in self.running and part[0] in self.flights:
                self._start(*part)
        for name, status in self.pool.wait(1.0).items():
            self._ended(*name.split("/"), status)
        self.show()

    def _parent_score(self, name: str) -> float:
        parent = self.agents.get(self.flights[name].parent)
        return parent.score if parent else -math.inf

    def parts(self) -> list[tuple[str, str]]:
        """What the flights still need: their runs, or of averaged ones the score."""
        parts = []
        for name, agent in self.flights.items():
            if (self.root / "flight" / name / "fused").exists():
                parts.append((name, "score"))
            else:
                done = self._done.get(name, ())
                parts += [(name, str(k)) for k in range(agent.fuse) if str(k) not in done]
        return parts

    def _start(self, name: str, part: str) -> None:
        agent, folder = self.flights[name], self.root / "flight" / name
        folder.mkdir(exist_ok=True)
        if part == "score":
            commands = [scoring(agent, folder / "fused", folder, SCORE, self.args.eval_episodes)]
        else:
            run, seed = folder / f"run{part}", (agent.seed + 7919 * int(part)) % 2**29
            words = [sys.executable, str(script_path(agent.script)), "--run-dir", str(run)]
            words += ["--pause-at", str(agent.pause_at)]
            if not agent.parent:
                words += [*first_flags(self.args), "--seed", str(seed), *self.words]
                words += [word for k, x in agent.flags.items() for word in (flag(k), str(x))]
            elif not run.exists() and not self._descend(agent, run, seed):
                return
            commands = [(words, str(folder / f"run{part}.out"))]
            if agent.fuse == 1:
                commands.append(scoring(agent, run, folder, SCORE, self.args.eval_episodes))
        self.pool.start(f"{name}/{part}", commands)
        self.running.append((name, part))

    def _descend(self, agent: Agent, run: Path, seed: int) -> bool:
        """False where the parent is damaged: then this agent is not to be."""
        if agent.parent in self.agents:
            try:
                descend(self.root / "agents" / agent.parent, run, agent.flags, seed)
                return True
            except (ValueError, FileNotFoundError, KeyError) as error:
                self._corrupt(agent.parent, str(error))
        self._stop_parts(agent.id)
        self.journal.note("orphaned", id=agent.id, parent=agent.parent)
        self._leave(agent.id)
        return False

    def _ended(self, name: str, part: str, status: int) -> None:
        if (name, part) not in self.running:  # another run of the same agent has failed just now
            return None
        self.running.remove((name, part))
        agent, folder = self.flights[name], self.root / "flight" / name
        if status in KILLED:
            self._restarts[name] = self._restarts.get(name, 0) + 1
            if self._restarts[name] <= MAX_RESTARTS:
                return self.journal.note("killed", id=name, part=part)  # `work` starts it again
        if status not in segments.GOOD:
            return self._fail(name, f"exit status {status}: {last_line(folder)}")
        self._done.setdefault(name, set()).add(part)
        if agent.fuse > 1 and part != "score":
            if len(self._done[name]) == agent.fuse:
                fuse([folder / f"run{k}" for k in range(agent.fuse)], folder / "fused")
            return None
        run = folder / ("fused" if agent.fuse > 1 else "run0")
        facts = read_score(folder / "score.json")
        if facts is None:
            return self._fail(name, "its returns are not finite")
        return self._publish(dataclasses.replace(agent, **facts, published=time.time()), run)

    def _publish(self, agent: Agent, run: Path) -> None:
        (run / "checkpoint.prev.pt").unlink(missing_ok=True)
        files.save(json.dumps(dataclasses.asdict(agent), indent=2) + "\n", run / "agent.json")
        os.rename(run, self.root / "agents" / agent.id)
        sync(self.root / "agents")
        self.journal.note("published", id=agent.id, score=agent.score, error=agent.error)
        self.agents[agent.id] = agent
        self._leave(agent.id)
        if agent is self.best():
            leaderboard.copy_best(self, agent)

    def _fail(self, name: str, why: str) -> None:
        """Journalled, never ranked. UserError where nothing but failures has come so far."""
        agent, folder = self.flights[name], self.root / "flight" / name
        self._stop_parts(name)
        for log in folder.glob("*.log"):
            if os.strerror(errno.ENOSPC) in log.read_text(errors="replace"):  # not its own fault
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.replace(log, self.root / "failed" / f"{name}.{log.name}")
        facts = {"generation": agent.generation, "member": agent.member, "flags": agent.flags}
        self.journal.note("failed", id=name, parent=agent.parent, why=why, **facts)
        self._leave(name)
        self._failed_at_first.append(why)
        if not self.agents and len(self._failed_at_first) >= 3:
            raise UserError(f"the first three segments failed, see {self.root}/failed: {why}")

    def _stop_parts(self, name: str) -> None:
        for part in [part for part in self.running if part[0] == name]:
            self.pool.stop("/".join(part))
            self.running.remove(part)

    def _leave(self, name: str) -> None:
        (self.root / "flight" / f"{name}.json").unlink()
        shutil.rmtree(self.root / "flight" / name, ignore_errors=True)
        del self.flights[name]

    def ranked(self) -> list[Agent]:
        """All published agents, the best first."""
        return sorted(self.agents.values(), key=lambda agent: (-agent.score, agent.id))

    def best(self) -> Agent | None:
        return next(iter(self.ranked()), None)

    def lineage(self, agent: Agent) -> list[Agent]:
        """An agent's ancestors, the first one first, and itself."""
        chain = [agent]
        while chain[0].parent in self.agents:
            chain.insert(0, self.agents[chain[0].parent])
        return chain

    def show(self, now: bool = False) -> None:
        """The leaderboard, at most once a second on a terminal and once a minute elsewhere."""
        clock, tty = time.time(), sys.stdout.isatty()
        if now or clock - self._viewed > 10:
            self._viewed = clock
            leaderboard.write_lineage(self)
        if now or clock - self._shown > (1 if tty else 60):
            self._shown = clock
            tell(("\x1b[H\x1b[J" if tty else "") + leaderboard.table(self))

    def finish(self) -> Agent:
        """Score the best agent again on fresh seeds; best/, lineage.csv, descent.png, a summary."""
        winner = self.best()
        if winner is None:
            raise UserError(f"{self.root}: no agent was published; see {self.root / 'failed'}")
        again = [x for x in self.journal.lines if x["event"] == "rescored" and x["id"] == winner.id]
        if not again:
            folder = self.root / "flight" / "again"
            folder.mkdir(exist_ok=True)
            episodes, run = max(100, self.args.eval_episodes), self.root / "agents" / winner.id
            self.pool.start("again", [scoring(winner, run, folder, FRESH, episodes)])
            while not (ended := self.pool.wait(1.0)):
                pass
            facts = None if ended["again"] else read_score(folder / "score.json")
            if facts is None:
                raise UserError(f"{run} could not be scored again; the same command tries it again")
            self.journal.note("rescored", id=winner.id, **facts)
            again = [facts]
        leaderboard.copy_best(self, winner)
        self.show(now=True)
        title = f"{self.program} on {self.args.env}"
        files.quietly("descent.png", leaderboard.plot_descent, self, title)
        tell(leaderboard.summary(self, winner, again[-1]))
        return winner

    def close(self, gently: bool = False) -> None:
        self.pool.close(gently)
        self.journal.close()
        files.unlock(self.root)


def replay(population: Population, name: str) -> Path:
    """Train the segments that led to an agent again, with the same seeds -> the last run folder."""
    if name not in population.agents:
        raise UserError(f"--replay is {name}, but {population.root / 'agents'} has no such agent")
    chain = population.lineage(population.agents[name])
    if chain[0].parent:
        raise UserError(f"--replay is {name}, but its ancestor {chain[0].parent} is damaged")
    args = dataclasses.replace(population.args, root=str(population.root / "replay" / name))
    again = Population(args, population.algos, population.words, population.program)
    again.expected = len(chain)
    with ending(again):
        for agent in chain:
            if agent.id not in {*again.agents, *again.flights}:
                again.begin(agent)
            while agent.id in again.flights:
                again.work()
            if agent.id not in again.agents:
                raise UserError(f"agent {agent.id} failed this time, see {again.root / 'failed'}")
        again.show(now=True)
    return again.root / "agents" / name


@contextlib.contextmanager
def ending(population: Population) -> Iterator[None]:
    """Close at the end; at Ctrl-C let the runs save first, and say how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        tell("\nStopping: running segments save their checkpoints. The same command goes on.")
        population.close(gently=True)
        raise
    except BaseException as error:
        population.close()
        if isinstance(error, OSError):
            raise population.cannot_write(error) from None
        raise
    population.close()
