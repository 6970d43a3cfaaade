"""Both forms of the ledger agree at each moment: the full reading, and the one that goes on from a file.

The runs have everything that the ledger shows: exclusions, letters sent again, sessions, retired learners, splits and
labels.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollstream.consumers.buffers.trajectories.buffer import TrajectoryReplayBuffer
from rollstream.consumers.buffers.trajectories.filler import TrajectoryFiller
from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.pipeline.audit.ledger import Ledger, LiveLedger, ledger
from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.kafka import topic_admin
from rollstream.topics.wire.keys import encode_key
from tests.broker.test_gateway import complete
from tests.model.test_live_ledger import learn
from tests.support.command_line import answer_of
from tests.support.gateways import gateway
from tests.support.ledgers import plain
from tests.support.producing import SortingGenerator, serving
from tests.support.runs import RealRun, rollout
from tests.support.trajectories import numbered
from tests.support.trajectory_runs import HOSTILE, for_trajectories, send
from tests.support.waiting import eventually


@dataclass
class Readers:
    """The readings of one run that are compared."""

    run: RealRun
    kept: LiveLedger
    """Goes on in this process."""
    moments: int = 0
    pruned: bool = False
    """Whether records were deleted since the last reading; everything is then read again."""

    @classmethod
    def of(cls, run: RealRun) -> "Readers":
        return cls(run, LiveLedger(run.kafka, run.name, run.directory / run.name / "kept" / "books"))

    def from_file(self) -> Ledger:
        """A reading that begins with the file of the one before, as in another process."""
        with LiveLedger(self.run.kafka, self.run.name, self.run.directory / self.run.name / "file" / "books") as reader:
            book = reader.poll()
            assert not self.moments or bool(reader.begun_anew) == self.pruned, reader.begun_anew
            self.pruned = False
            return book

    def agree(self) -> Ledger:
        """The full reading, which the others must equal, once the run was at rest while all were made."""

        def compared() -> Ledger | None:
            before = plain(self.kept.poll())
            stored, whole, after = self.from_file(), ledger(self.run.kafka, self.run.name), plain(self.kept.poll())
            self.moments += 1
            if before != after:
                return None
            assert plain(stored) == plain(whole) == after
            return whole

        book = eventually(compared, 60, "a moment at which nothing moves")
        assert book is not None
        assert book.problems == []
        return book

    def await_book(self, **expected: object) -> Ledger:
        def there() -> Ledger | None:
            book = self.agree()
            return book if all(getattr(book, name) == value for name, value in expected.items()) else None

        book = eventually(there, 120, f"a ledger with {expected}")
        assert book is not None
        return book


@pytest.fixture
def run(broker: str, run_name: str, tmp_path: Path) -> Iterator[RealRun]:
    made = RealRun(KafkaConfig(bootstrap_servers=broker), run_name, tmp_path, TopicsConfig(partitions=2))
    made.grouping = GroupingConfig(batch_rollouts=8, max_batch_age_s=0.5, group_deadline_s=600.0)
    yield made.prepare()
    made.stop()


@pytest.mark.kafka
def test_readings_agree_over_exclusions_sessions_and_retirement(run: RealRun) -> None:
    readers = Readers.of(run)
    readers.agree()
    run.start("group")
    run.send(rollout(f"a{n}", member) for n in range(6) for member in range(4))
    readers.await_book(batched=24, unread=0)
    run.send(rollout(f"b{n}", member, environment="other") for n in range(4) for member in range(4))
    readers.await_book(batched=40)
    run.told("exclude", "--env", "other")
    readers.agree()
    run.send(rollout(f"c{n}", member, environment="other") for n in range(2) for member in range(4))
    assert readers.await_book(unread=0).dropped["excluded"] == 8
    run.send_bytes("rollouts", b"\xc3\x01 not a record", encode_key("env", "poison"), 1)
    readers.await_book(dead_lettered=1)
    learn(run, 1, "trained")
    assert readers.agree().trained == 40
    run.told("learner", "retire", "main", "--reason", "it diverged")
    assert readers.agree().learners["main"]["retired"]
    run.told("learner", "resume", "main")
    assert "retired" not in readers.agree().learners["main"]
    in_sessions(run, readers)
    run.send(rollout(f"open{n}", 0) for n in range(4))
    readers.await_book(in_flight=4, unread=0)
    before = readers.agree()
    pruned(readers, "calls")
    book = readers.agree()
    assert (book.calls["recorded"], book.batched) == (0, before.batched)
    assert readers.moments > 10


def in_sessions(run: RealRun, readers: Readers) -> None:
    """Sessions of a gateway, compared while they are open, while they end, and afterwards."""
    with (
        serving(SortingGenerator(versions=(0,))) as server,
        gateway(run.kafka, run.name, server.base_url, run.directory) as agents,
    ):
        first, second = (agents.start_session(task_id=f"s{n}", environment="sorting") for n in range(2))
        complete(first, "429>", seed=2)
        assert readers.agree().calls["open_sessions"] == 2
        complete(second, "31>", seed=2)
        complete(first, "75>", seed=2)
        assert readers.agree().calls["open"] == 3
        assert agents.post("/rl/set_reward", {"session_id": first["session_id"], "reward": 0.5})[0] == 200
        agents.post("/rl/end_session", {"session_id": first["session_id"]})
        book = readers.agree()
        assert (book.calls["in_rollouts"], book.calls["open"]) == (2, 1)
        agents.post("/rl/end_session", {"session_id": second["session_id"], "cancel": True})
        readers.agree()
        assert agents.post("/rl/set_reward", {"session_id": second["session_id"], "reward": float("inf")})[0] != 0
        third = agents.start_session(task_id="s3", environment="sorting")
        complete(third, "86>", seed=2)
        for session in (second, third):
            agents.post("/rl/set_reward", {"session_id": session["session_id"], "reward": 1.0})
            agents.post("/rl/end_session", {"session_id": session["session_id"]})
        eventually(lambda: readers.agree().calls["open_sessions"] == 0, 120, "all sessions are over")
    books = readers.await_book(unread=0)
    assert (books.calls["recorded"], books.calls["sessions"]) == (4, 3)
    assert books.calls["in_rollouts"] == 3


def pruned(readers: Readers, *topics: str) -> None:
    """Prune the run, and check that it deletes something of each of these topics."""
    run, readers.pruned = readers.run, True
    run.told("prune", "--yes", "--keep-batches", "0")
    for topic in topics:
        bounds = topic_admin.bounds(run.kafka, run.topic(topic)).values()
        assert any(low > 0 for low, _end in bounds), topic


MENDING = """
from rollstream.topics.wire.codec import encode
from tests.support.runs import rollout

def fix(value, key, headers):
    return encode(rollout("mended", int(value))) if value.isdigit() else None
"""


def test_readings_agree_over_letters_of_rollouts_sent_again(run: RealRun) -> None:
    readers = Readers.of(run)
    grouping = run.start("group")
    run.send(rollout(f"a{n}", member) for n in range(2) for member in range(4))
    for member in range(4):
        run.send_bytes("rollouts", b"%d" % member, encode_key("env", "poison"), member % 2)
    run.send_bytes("rollouts", b"beyond repair", encode_key("env", "poison"), 1)
    readers.await_book(batched=8, dead_lettered=5)
    (run.directory / "mending.py").write_text(MENDING)
    redrive = run.command("dlq", "redrive", "--fix", str(run.directory / "mending.py"), "--json")[4:]
    grouping.kill()
    grouping.wait()
    answer = json.loads(answer_of(run.directory, *redrive).stdout)
    assert (len(answer["redriven"]), len(answer["left"])) == (4, 1)
    assert readers.agree().unread == 4
    again = json.loads(answer_of(run.directory, *redrive).stdout)
    assert (len(again["redriven"]), len(again["left"])) == (0, 1), "each is sent once"
    readers.agree()
    run.start("group")
    readers.await_book(batched=12, dead_lettered=5, unread=0)


def test_readings_agree_over_labels_letters_and_fillers(real_run: RealRun) -> None:
    run = for_trajectories(real_run)
    run.prepare()
    readers = Readers.of(run)
    assert readers.agree().unlabelled["produced"] == 0
    send(run, [numbered(number, worker=f"w{number % 3}") for number in range(12)], "trajectories")
    assert readers.agree().trajectories["records"] == 12
    send(run, [numbered(number) for number in (54, 55, 155)], "unlabelled")
    run.send_bytes("unlabelled", b"no trajectory", b"key", partition=1)
    run.send_bytes("unlabelled", HOSTILE, b"key", partition=0)
    assert readers.agree().unlabelled["pending"] == 5
    labeler = run.start("label", "tests.support.trajectories:double")
    eventually(lambda: readers.agree().unlabelled["pending"] == 0, 120, "all is labeled")
    book = readers.agree()
    assert (book.unlabelled["labeled"], book.unlabelled["dead_lettered"]) == (1, 4)
    labeler.kill()
    labeler.wait()
    answer = json.loads(run.said("dlq", "redrive", "--json").stdout)
    assert (len(answer["redriven"]), len(answer["left"])) == (2, 2)
    assert readers.agree().unlabelled["pending"] == len(answer["redriven"])
    send(run, [numbered(number, worker="w9") for number in range(200, 230)], "unlabelled")
    readers.agree()
    labeler = run.start("label", "tests.support.trajectories:mended")
    eventually(lambda: readers.agree().unlabelled["pending"] == 0, 120, "all is labeled")
    labeler.terminate()
    assert labeler.wait(300) == 0
    book = readers.agree()
    assert book.unlabelled["labeled"] == 1 + len(answer["redriven"]) + 30
    with TrajectoryReplayBuffer() as buffer, closing(TrajectoryFiller(run.kafka, run.name, [buffer])) as filler:
        filler.fill(300)
        assert readers.agree().trajectories["records"] == book.trajectories["records"]
        pruned(readers, "trajectories", "unlabelled")
        assert readers.agree().unlabelled["labeled"] == book.unlabelled["labeled"]
    send(run, [numbered(number, worker="w7") for number in range(300, 310)], "trajectories")
    readers.agree()
    assert readers.moments > 10
