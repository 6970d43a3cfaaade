"""Commands to a real `rollstream run` whose processes are killed at that moment, and the proof of each.

`kill -9` ends the overseer, which is started again and adopts its processes, or the processes of a role, which the
overseer starts again, or all, as when a machine fails.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rollstream.consumers.weights.rollback import note_of
from rollstream.infra.broker.ports import free_port_row
from rollstream.producers.worker.evaluator import evaluated_versions
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import LearnerStep, Mark, Rollout, TrainingBatch
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import decode
from tests.support.gateways import post
from tests.support.steered_run import SteeredRun
from tests.support.waiting import eventually

OVERSEER, SCALED, ALL = "overseer", "scaled", "all"
GAME = '''
"""The more letters a reply has, the better."""

import time

from tests.support.command_line import in_full
from rollstream import Prompt, Score, SingleTurn


class Letters(SingleTurn):
    max_tokens = 6

    def __init__(self, name):
        self.name = name

    def prompts(self, split):
        return [Prompt(example_id=f"{split}-{n}", text=f"{self.name} {n}:") for n in range(12)]

    def score(self, prompt, reply, truncated):
        time.sleep(0.02)  # Else the run takes the whole machine, and what watches it reads ever longer topics.
        return Score(reward=sum(character.isalpha() for character in reply) / 6)
'''
RECIPE = """
[[environments]]
use = "game.py:Letters"
options = { name = "plain" }

[[environments]]
use = "game.py:Letters"
options = { name = "other" }

[topics]
partitions = 2

[supervisor]
workers = 1

[grouper]
processes = 1

[inference]
max_rows = 32

[evaluation]
every_versions = 100000

[worker]
group_size = 4
metrics_interval_s = 1

[grouping]
batch_rollouts = 8

[learner]
rollouts_per_step = 32
microbatch_rows = 4
sequence_length = 64
threads = 1
max_steps = 100000
model = { num_hidden_layers = 1 }
# A policy that has learned the game gives equal replies, whose groups are dropped as fast as workers play them.
optimizer = { learning_rate = 1e-6, final_learning_rate = 1e-6 }
"""


class CommandedRun(SteeredRun):
    """A run whose rollouts are counted while it goes on."""

    def __init__(self, broker: str, name: str, directory: Path, recipe: Path) -> None:
        super().__init__(broker, name, directory, recipe, {})
        self._played: Counter[str] = Counter()
        self._next: dict[int, int] = {}

    def played(self) -> Counter[str]:
        """Rollouts on the log, by environment."""
        for message in read_to_end(self.kafka, topic_name(self.name, "rollouts"), start=self._next):
            self._next[message.partition] = message.offset + 1
            record = decode(message.value) if message.value else None
            if isinstance(record, Rollout):
                self._played[record.environment] += 1
        return self._played.copy()


def records(run: CommandedRun, topic: str) -> list[object]:
    return [decode(message.value) for message in read_to_end(run.kafka, topic_name(run.name, topic)) if message.value]


def await_played(run: CommandedRun, environment: str, more: int = 24) -> None:
    before = run.played()[environment]
    eventually(lambda: run.played()[environment] >= before + more, 300, f"rollouts of {environment}", every_s=0.3)


def await_paused(run: CommandedRun) -> None:
    """Groups that had begun are finished, and nothing follows them."""

    def nothing_comes() -> bool:
        before = run.played()
        await_played(run, "plain")
        return run.played()["other"] == before["other"]

    eventually(nothing_comes, 300, "no further rollouts of the paused environment")
    before = run.played()["other"]
    run.await_steps(2)
    assert run.played()["other"] == before


# ---------------------------------------------------------------------- commands: each gives one, and returns its proof

Proof = Callable[[], None]
Strike = Callable[[], None]


SCALES = ("env", "group", "infer", "gateway", "eval")


def scale(run: CommandedRun, strike: Strike) -> Proof:
    run.say("scale", *(f"{role}=2" for role in SCALES))
    strike()

    def there() -> None:
        run.await_processes(**dict.fromkeys(SCALES, 2))
        second = f"http://127.0.0.1:{run.values['gateway.port'] + 1}/rl/start_session"
        eventually(lambda: post(second, {"task_id": "t"})[0] in (200, 201), 300, "the second gateway answers")

    return there


def pause(run: CommandedRun, strike: Strike) -> Proof:
    await_played(run, "other", 1)
    run.say("environment", "pause", "other", "--reason", "its verifier hangs")
    strike()
    return lambda: await_paused(run)


def resume(run: CommandedRun, strike: Strike) -> Proof:
    pause(run, lambda: None)()
    run.say("environment", "resume", "other")
    strike()
    return lambda: await_played(run, "other")


def weigh(run: CommandedRun, strike: Strike) -> Proof:
    run.say("environment", "weigh", "other=60")
    strike()

    def mostly_other() -> None:
        def there() -> bool:
            before = run.played()
            await_played(run, "other", 120)
            return run.played()["plain"] - before["plain"] <= 24

        eventually(there, 300, "six rollouts of the other environment for one of this")

    return mostly_other


def stop_at_step(run: CommandedRun, strike: Strike) -> Proof:
    last = run.step_ahead()
    run.say("stop", "--at-step", str(last))
    strike()

    def ended() -> None:
        assert run.process.wait(600) == 0, run.output
        assert f"as `rollstream steer stop --at-step {last}` asked" in run.output
        assert last <= run.top()["step"] <= last + 1

    return ended


def drain(run: CommandedRun, strike: Strike) -> Proof:
    run.say("stop", "--drain")
    strike()

    def ended() -> None:
        assert run.process.wait(600) == 0, run.output
        books = run.books()
        assert books.in_flight == 0, "groups that lack members of a worker that was killed are cancelled"
        assert "as `rollstream steer stop --drain` asked, with nothing in flight" in run.output
        assert run.top()["waiting"] == 0
        batches = {batch.batch_id for batch in records(run, "batches") if isinstance(batch, TrainingBatch)}
        steps = [step for step in records(run, "steps") if isinstance(step, LearnerStep)]
        assert {use.batch_id for step in steps for use in step.uses} == batches

    return ended


def evaluate(run: CommandedRun, strike: Strike) -> Proof:
    version = json.loads(run.say("evaluate", "--json"))["evaluate_version"]
    assert version > 0
    strike()

    def evaluated() -> bool:
        answers = [record for record in records(run, "evals") if isinstance(record, Rollout)]
        return all(version in versions for versions in evaluated_versions(answers, ("plain", "other")).values())

    def proven() -> None:
        eventually(evaluated, 300, f"version {version} evaluated", every_s=0.3)

    return proven


def roll_back(run: CommandedRun, strike: Strike) -> Proof:
    before = json.loads(run.say("weights", "ls", "--json"))
    source = before[-2]["version"]
    run.say("weights", "rollback", str(source), "--reason", "reward hacking", "--take-over")
    strike()

    def rolled_back() -> None:
        notes = {}
        for message in read_to_end(run.kafka, topic_name(run.name, "policies")):
            note = note_of(message)
            if note is not None:
                notes[decode(message.value).version] = note  # type: ignore[attr-defined]
        [(version, note)] = notes.items()
        assert (note.source, note.reason) == (source, "reward hacking")
        listed = {each["version"]: each for each in json.loads(run.say("weights", "ls", "--json"))}
        assert listed[version]["digest"] == {each["version"]: each for each in before}[source]["digest"]

        def goes_on() -> bool:
            if run.process.poll() is not None:
                # The rollback fenced the learner, and with it ended the run; its operator starts it again.
                assert run.process.returncode == 3, run.output
                run.start()
            newest = json.loads(run.say("weights", "ls", "--json"))[-1]["version"]
            return bool(newest > version)

        eventually(goes_on, 300, "a version after that of the rollback", every_s=0.5)

    return rolled_back


def exclude(run: CommandedRun, strike: Strike) -> Proof:
    await_played(run, "other", 1)
    # Otherwise workers would go on playing rollouts that are dropped at once, and nothing would slow them down.
    run.say("environment", "pause", "other", "--reason", "it is excluded")
    words = ["exclude", "--env", "other", "--timeout", "500", "--json", "--run", run.name]
    command = [sys.executable, "-P", "-m", "rollstream", "steer", *words, "-b", run.kafka.bootstrap_servers]
    excluding = subprocess.Popen(command, cwd=run.directory, stdout=subprocess.PIPE)

    def marked() -> bool:
        marks = [record for record in records(run, "rollouts") if isinstance(record, Mark)]
        return any(mark.kind == "configuration" and "other" in mark.configuration for mark in marks)

    eventually(marked, 300, "its mark", every_s=0.01)
    strike()

    def excluded() -> None:
        output, _errors = excluding.communicate(timeout=600)
        assert excluding.returncode == 0
        generation = json.loads(output)["generation"]
        seen = run.top()["step"]
        run.await_steps(4)
        batches = [record for record in records(run, "batches") if isinstance(record, TrainingBatch)]
        later = [batch for batch in batches if batch.generation >= generation]
        assert later
        assert {group.environment for batch in later for group in batch.groups} == {"plain"}
        # The learner may train one more step that it planned before it knew of the exclusion.
        steps = [step for step in records(run, "steps") if isinstance(step, LearnerStep) and step.step > seen + 1]
        trained = {use.batch_id for step in steps for use in step.uses if use.use == "trained"}
        assert trained
        assert not trained & {batch["batch_id"] for batch in json.loads(output)["batches"]}

    return excluded


# ------------------------------------------------------------------------------------------------ a command, and a kill

Command = Callable[[CommandedRun, Strike], Proof]
ENDING = (stop_at_step, drain)


def check_command(broker: str, name: str, directory: Path, command: Command, victim: str) -> None:
    """Play a run, give `command`, kill `victim`, and check the command's proof and the books of the run.

    Args:
        broker: Bootstrap servers.
        name: The run's name.
        directory: The folder of the run's files.
        command: One of this module's commands.
        victim: A role, or OVERSEER, SCALED (the roles that `scale` scales) or ALL.
    """
    (directory / "game.py").write_text(GAME)
    (directory / "run.toml").write_text(RECIPE)
    run = CommandedRun(broker, name, directory, directory / "run.toml")
    if command is scale:
        run.values["gateway.port"] = free_port_row("127.0.0.1", 2)
    if command is roll_back:
        run.values["learner.weights.keep_versions"] = 1000  # the learner goes on while the command starts

    def strike() -> None:
        if victim in (OVERSEER, ALL):
            run.kill() if victim == OVERSEER else run.kill_all()
            run.start()
        else:
            for role in SCALES if victim == SCALED else (victim,):
                run.kill_role(role)

    try:
        run.start()
        run.await_steps(2)
        command(run, strike)()
        if command not in ENDING:
            run.await_steps(2)
            run.stop()
        run.check()
    finally:
        run.close()
