"""A population: agents that are published, agents to be, and the segments that train them."""

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
from typing import Any, NoReturn

from algos.populations import agents, leaderboard
from algos.populations.agents import FRESH, LIMITS, SCORE, Agent, PopulationArgs
from algos.populations.journal import Journal
from algos.worker_learner import files, segments
from algos.worker_learner.arguments import UserError, check_args, flag, tell, warn

MAY_DIFFER = {"root", "cluster", "cpus", "replay"}  # when the same command goes on
KILLED = -signal.SIGKILL, 128 + signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM
MAX_RESTARTS = 3  # of a segment that was killed
FOLDERS = "agents", "flight", "best", "failed"


class Population:
    """Agents that are published and agents to be, and the segments that train them.

    `algos` are names of scripts, or paths; `words` are flags for them.
    Raises UserError, before anything is started, for what cannot be.
    """

    def __init__(self, args: PopulationArgs, algos: list[str], words: list[str], program: str):
        check_args(args, {**LIMITS, "period": (0, args.total_steps)})
        self.args, self.algos, self.words, self.program = args, algos, words, program
        self.root = Path(args.root or f"runs/{program}__{args.env.replace('/', '-')}")
        if args.cluster != "none":  # whose nodes work in other folders
            self.root = self.root.absolute()
        self.hyperparameters, self.period = agents.settings(algos, args, words)
        self.pool = (segments.Here if args.cluster == "none" else segments.Cluster)(args)
        if args.cluster == "none" and not self.pool.slots():
            raise UserError(f"--cpus {args.cpus:g} --gpus {args.gpus:g}: no room here for a run")
        self.agents: dict[str, Agent] = {}
        self.flights: dict[str, Agent] = {}
        self.running: list[tuple[str, str]] = []  # (agent, part): "0" ... of its runs, or "score"
        self.commit = agents.commit()
        self._trained: dict[str, set[str]] = {}  # the parts of an agent that have ended
        self._restarts: dict[str, int] = {}
        self._locked = contextlib.ExitStack()
        try:
            self._open()
        except BaseException as error:
            self._locked.close()
            raise self.cannot_write(error) if isinstance(error, OSError) else error from None
        names = {*self.agents, *self.flights, *(line.get("id", "") for line in self.journal.lines)}
        self.count = max((int(x) + 1 for x in names if x.isdigit()), default=0)  # segments begun
        self.expected = 0  # segments in all, which a program says for the time left
        self.began, self.done_before, self._shown = time.time(), self.done, 0.0
        self.last_end, self.ended = self.began, 0  # of the segments that have ended since then

    def _open(self) -> None:
        """Lock the folder and read it; what a killed driver left half done is finished."""
        if not (self.root / "settings.json").exists():  # killed at once it left empty folders
            found = [x for name in FOLDERS for x in self.root.glob(f"{name}/*")]
            found += self.root.glob("args.json")  # of a run
            if found or self.args.replay:
                what = f"{found[0]}, not of a population" if found else "no population to --replay"
                raise UserError(f"--root {self.root} has {what}; name another")
        for name in FOLDERS:
            (self.root / name).mkdir(parents=True, exist_ok=True)
        self._locked = files.lock(self.root, f"--root {self.root}: another process works in it")
        self._check_settings()
        self.journal = Journal(self.root / "journal.jsonl")
        corrupt = {line["id"] for line in self.journal.of("corrupt")}
        published = {line["id"] for line in self.journal.of("published")}
        folders = sorted((self.root / "agents").glob("[0-9]" * 5))  # nobody's copies
        for folder in [folder for folder in folders if folder.name not in corrupt]:
            try:
                agent = agents.read_agent(folder / "agent.json", folder.name, self.hyperparameters)
            except (OSError, ValueError, TypeError) as error:
                self._corrupt(folder.name, f"agent.json: {error}")
                continue
            self.agents[agent.id] = agent
            if agent.id not in published:
                self._note_published(agent)
        ended = {line["id"] for line in self.journal.of("failed", "orphaned")}
        for path in sorted((self.root / "flight").glob("*.json")):
            with contextlib.suppress(ValueError, TypeError):  # torn, as the machine lost power
                agent = agents.read_agent(path, path.stem, self.hyperparameters)
                if agent.id not in ended and not (self.root / "agents" / agent.id).exists():
                    self.flights[agent.id] = agent
                    continue
            path.unlink()
        for folder in (self.root / "flight").iterdir():
            if folder.is_dir() and folder.name not in self.flights:
                shutil.rmtree(folder)

    def _check_settings(self) -> None:
        """settings.json, written once; UserError where a command that goes on has other flags."""
        path, now = self.root / "settings.json", dataclasses.asdict(self.args)
        now = {name: value for name, value in now.items() if name not in MAY_DIFFER}
        now = {"program": self.program, **now, "algos": self.algos, "words": self.words}
        if not path.exists():
            return files.save(json.dumps(now, indent=2) + "\n", path)
        try:
            before = {"program": self.program, **json.loads(path.read_text())}
        except (ValueError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error}); name another --root") from None
        for name in [name for name in now if before.get(name) != now[name]]:
            what = {"program": "the program", "words": "what follows --"}.get(name, flag(name))
            was = f"{before.get(name)} when {self.root} began and is now {now[name]}"
            raise UserError(f"{what} was {was}; keep it, name another --root or delete it")

    def cannot_write(self, error: OSError) -> UserError:
        why = f"{error.strerror or error}" + f" ({error.filename})" * bool(error.filename)
        return UserError(f"--root {self.root}: {why}; the same command goes on when that is fixed")

    def _corrupt(self, name: str, why: str) -> None:
        warn(f"{self.root / 'agents' / name} is damaged ({why}); it is left out.")
        self.agents.pop(name, None)
        self.journal.note("corrupt", id=name, why=why)

    def _note_published(self, agent: Agent) -> None:
        self.journal.note("published", id=agent.id, score=agent.score, error=agent.error)

    # Agents to be.

    def random(self, *about: Any) -> random.Random:
        """A generator that depends on --seed and on what it is for, not on what happened before."""
        return random.Random(repr((self.args.seed, *about)))

    def fresh(self, algo: str, **more: Any) -> Agent:
        """A new agent; the first one has its script's hyper-parameters, others 1/2 to 2 times."""
        flags = {name: value for name, (value, _) in self.hyperparameters[algo].items()}
        if any(x.script == algo for x in (*self.agents.values(), *self.flights.values())):
            draw = self.random("fresh", self.count)
            flags = self._scaled(algo, flags, lambda: 2 ** draw.uniform(-1, 1))
        return self.begin(self._agent("", algo, flags, self.period, more))

    def child(self, parent: Agent, perturbed: bool, **more: Any) -> Agent:
        """A new agent that goes on where `parent` ended, for one period."""
        flags = parent.flags
        if perturbed:
            draw = self.random("child", self.count)
            flags = self._scaled(parent.script, flags, lambda: draw.choice((0.8, 1.25)))
        end = (parent.step // self.period + 1) * self.period
        return self.begin(self._agent(parent.id, parent.script, flags, end, more))

    def _scaled(self, algo: str, flags: dict[str, float], factor: Callable) -> dict[str, float]:
        known = self.hyperparameters[algo]
        return {name: agents.scaled(x, factor(), known[name][1]) for name, x in flags.items()}

    def _agent(self, parent: str, algo: str, flags: dict, end: int, more: dict) -> Agent:
        end = end if end + self.period <= self.args.total_steps else self.args.total_steps
        seed = self.random("seed", self.count).randrange(2**29)
        return Agent(f"{self.count:05}", parent, algo, flags, seed, end, **more)

    def begin(self, agent: Agent) -> Agent:
        """Write down that this agent is to be trained; `work` does it."""
        agent = dataclasses.replace(agent, commit=self.commit)
        agents.save_agent(agent, self.root / "flight" / f"{agent.id}.json")
        self.flights[agent.id] = agent
        self.count = max(self.count, int(agent.id) + 1)
        return agent

    # Their segments.

    def work(self) -> None:
        """Start what there is room for, stop the weakest where there is not, wait for one event."""
        slots = self.pool.slots()
        order = sorted(self.parts(), key=lambda part: (-self._parent_score(part[0]), part))
        while len(self.running) > slots:
            self._stop(weakest := max(self.running, key=order.index))
            self.journal.note("stopped", id=weakest[0], part=weakest[1])
        for part in order:
            if len(self.running) < slots and part not in self.running and part[0] in self.flights:
                self._start(*part)
        for name, status in self.pool.wait(1.0).items():
            self._ended(*name.split("/"), status)
        agents.stop_if_asked()
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
                done = self._trained.get(name, ())
                parts += [(name, str(k)) for k in range(agent.fuse) if str(k) not in done]
        return parts

    def _start(self, name: str, part: str) -> None:
        agent, folder = self.flights[name], self.root / "flight" / name
        folder.mkdir(exist_ok=True)
        run, commands = folder / ("fused" if part == "score" else f"run{part}"), []
        if part != "score":
            seed = (agent.seed + 7919 * int(part)) % 2**29
            if agent.parent and not run.exists() and not self._descend(agent, run, seed):
                return
            commands.append(agents.training(agent, self.args, self.words, run, seed))
        if part == "score" or agent.fuse == 1:
            commands.append(agents.scoring(agent, run, folder, SCORE, self.args.eval_episodes))
        self.pool.start(f"{name}/{part}", commands)
        self.running.append((name, part))

    def _descend(self, agent: Agent, run: Path, seed: int) -> bool:
        """False where the parent is damaged: then this agent is not to be."""
        if agent.parent in self.agents:
            try:
                agents.descend(self.root / "agents" / agent.parent, run, agent.flags, seed)
                return True
            except (ValueError, FileNotFoundError, KeyError) as error:
                self._corrupt(agent.parent, str(error))
        self._leave(agent.id, "orphaned", parent=agent.parent)
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
            return self._fail(agent, "killed again and again, perhaps for lack of memory")
        if status not in segments.GOOD:
            return self._fail(agent, f"exit status {status}: {agents.last_line(folder)}")
        self._trained.setdefault(name, set()).add(part)
        if agent.fuse > 1 and part != "score":
            runs = [folder / f"run{k}" for k in range(agent.fuse)]
            complete = len(self._trained[name]) == agent.fuse
            if complete and (wrong := agents.fuse(runs, folder / "fused")):
                return self._fail(agent, wrong)
            return None
        if (facts := agents.read_score(folder / "score.json")) is None:
            return self._fail(agent, "its returns are not finite numbers")
        run = folder / ("fused" if agent.fuse > 1 else "run0")
        return self._publish(dataclasses.replace(agent, **facts, published=time.time()), run)

    def _publish(self, agent: Agent, run: Path) -> None:
        (run / "checkpoint.prev.pt").unlink(missing_ok=True)
        agents.save_agent(agent, run / "agent.json")
        os.rename(run, self.root / "agents" / agent.id)
        self.agents[agent.id] = agent
        self._note_published(agent)
        self._leave(agent.id)
        if agent is self.best():
            leaderboard.copy_best(self, agent)

    def _fail(self, agent: Agent, why: str) -> None:
        """Journalled, never ranked. UserError where nothing but failures comes."""
        for log in (self.root / "flight" / agent.id).glob("*.[lo]*"):  # .log and .out
            if os.strerror(errno.ENOSPC) in log.read_text(errors="replace")[-2000:]:  # not its own
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.replace(log, self.root / "failed" / f"{agent.id}.{log.name}")
        facts = {name: getattr(agent, name) for name in ("generation", "member", "flags", "script")}
        self._leave(agent.id, "failed", parent=agent.parent, why=why, **facts)
        failures = [x for x in self.journal.failures() if x.get("script") == agent.script]
        if len(failures) > 2 and agent.script not in {one.script for one in self.agents.values()}:
            self.give_up(f"the first three segments of {agent.script}", why)
        if (count := self.journal.failures_in_a_row()) >= max(3, 2 * self.args.agents):
            self.give_up(f"the last {count} segments", why)

    def give_up(self, what: str, why: str) -> NoReturn:
        """End the program; what failed after the last success will be trained again."""
        self.journal.note("gave up", why=why)
        raise UserError(f"{what} failed, see {self.root}/failed: {why}; the same command goes on")

    def _leave(self, name: str, event: str = "", **facts: Any) -> None:
        """An agent is not to be any more: it is published, or what `event` says."""
        for part in [part for part in self.running if part[0] == name]:
            self._stop(part)
        if event:
            self.journal.note(event, id=name, **facts)
        (self.root / "flight" / f"{name}.json").unlink()
        shutil.rmtree(self.root / "flight" / name, ignore_errors=True)
        del self.flights[name]
        self.last_end, self.ended = time.time(), self.ended + 1

    def _stop(self, part: tuple[str, str]) -> None:
        self.pool.stop("/".join(part))
        self.running.remove(part)

    # What they are worth.

    @property
    def done(self) -> int:
        """Segments that have ended."""
        return self.count - len(self.flights)

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
        """The leaderboard, once a second on a terminal and once a minute elsewhere."""
        tty = sys.stdout.isatty()
        if now or time.time() - self._shown > (1 if tty else 60):
            self._shown = time.time()
            leaderboard.write_lineage(self)
            tell(("\x1b[H\x1b[J" if tty else "") + leaderboard.table(self))

    def finish(self) -> None:
        """Score the best agent again on fresh seeds; best/, lineage.csv, descent.png, a summary."""
        winner = self.best()
        if winner is None:
            raise UserError(f"{self.root}: no agent was published; see {self.root / 'failed'}")
        again = [line for line in self.journal.of("rescored") if line["id"] == winner.id]
        if not again:
            folder, episodes = self.root / "flight" / "again", max(100, self.args.eval_episodes)
            run = self.root / "agents" / winner.id
            folder.mkdir(exist_ok=True)
            self.pool.start("again", [agents.scoring(winner, run, folder, FRESH, episodes)])
            while not (ended := self.pool.wait(1.0)):
                agents.stop_if_asked()
            facts = None if ended["again"] else agents.read_score(folder / "score.json")
            if facts is None:
                why = f"{agents.last_line(folder)}; if {run} is damaged, move it away"
                what = f"the best agent, {winner.id}, could not be scored again: {why}"
                raise UserError(f"{what}; the same command goes on")
            self.journal.note("rescored", id=winner.id, **facts)
            shutil.rmtree(folder, ignore_errors=True)
            again = [facts]
        leaderboard.copy_best(self, winner)
        self.show(now=True)
        files.quietly("descent.png", leaderboard.plot_descent, self)
        tell(leaderboard.summary(self, winner, again[-1]))

    def close(self, gently: bool = False) -> None:
        self.pool.close(gently)
        self.journal.close()
        self._locked.close()


def run(population: Population, train: Callable[[Population, Any], None]) -> None:
    """`train` a population and score its winner again, or --replay an agent; then close it."""
    with _ending(population):
        if population.args.replay:
            tell(f"Trained again: {replay(population, population.args.replay)}")
        else:
            train(population, population.args)
            population.finish()


def replay(population: Population, name: str) -> Path:
    """Train the segments that led to an agent again, with the same seeds -> the last run folder."""
    if name not in population.agents:
        raise UserError(f"--replay is {name}, but {population.root / 'agents'} has no such agent")
    chain = population.lineage(population.agents[name])
    if chain[0].parent:
        raise UserError(f"--replay is {name}, but its ancestor {chain[0].parent} is damaged")
    args = dataclasses.replace(population.args, root=f"{population.root}/replay/{name}", replay="")
    again = Population(args, population.algos, population.words, population.program)
    again.expected, again.done_before = len(chain), sum(x.id in again.agents for x in chain)
    with _ending(again):
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
def _ending(population: Population) -> Iterator[None]:
    """Close at the end; at Ctrl-C let the runs save first, and say how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        tell("\nStopping: the runs save first. The same command goes on.")
        population.close(gently=True)
        raise
    except OSError as error:
        raise population.cannot_write(error) from None
    finally:
        population.close()
