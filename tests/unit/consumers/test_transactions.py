"""A process that writes in transactions ends with a one-line error if no broker answers or another has its ordinal."""

from collections.abc import Iterator, Sequence

import pytest

from rollstream.consumers import transactions
from rollstream.consumers.transactions import ExactlyOnce
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import DeliveryError, Fenced, Lapsed
from rollstream.topics.kafka.client_calls import Stalled
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.kafka.records import GroupPosition
from rollstream.topics.kafka.transactions import Transaction, fence, transactional_id
from tests.simulation.installation import World, installed
from tests.support.modelled_run import KAFKA, RUN, ModelledRun


class Writer(ExactlyOnce[None]):
    """Writes nothing."""

    def _write(self, transaction: Transaction, parts: Sequence[None]) -> list[GroupPosition]:
        return []


def test_a_producer_that_nobody_answers_is_given_up_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "RETRY_FOR_S", 0.5)
    nobody = KafkaConfig(bootstrap_servers="127.0.0.1:1", transaction_timeout_s=1.0)
    reader = Reader(nobody)
    writer = Writer(nobody, "main", "main.grouper", "grouper", 0, reader, "main.rollouts")
    with pytest.raises(DeliveryError, match=r"init_transactions had no answer for 0\.5 s; are the brokers up\?"):
        writer.start_producer()
    reader.close()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    with installed(world):
        ModelledRun(world)
        yield world


def writer_of(kind: type[Writer]) -> Writer:
    """A writer under ordinal 0, whose member is not in a group."""
    return kind(KAFKA, RUN, f"{RUN}.grouper", "grouper", 0, Reader(KAFKA), f"{RUN}.rollouts")


class Paused(Writer):
    """Is paused within a transaction, while another process starts under its ordinal."""

    def _write(self, transaction: Transaction, parts: Sequence[None]) -> list[GroupPosition]:
        writer_of(Writer).start()
        raise Stalled("commit_transaction did not return")


def test_a_process_that_was_paused_leaves_its_ordinal_to_the_one_that_replaced_it(world: World) -> None:
    def work() -> None:
        paused = writer_of(Paused)
        paused.start()
        paused.publish([None])

    with pytest.raises(Fenced, match="commit_transaction did not return, and another process has since started as"):
        world.result_of(work)


@pytest.mark.parametrize(("rival", "ends", "code"), [(False, "outlived kafka", 2), (True, "was taken over", 3)])
def test_a_fenced_process_may_start_again_unless_another_has_its_place(
    world: World, rival: bool, ends: str, code: int
) -> None:
    def work() -> None:
        writer = writer_of(Writer)
        writer.start()
        if rival:
            writer_of(Writer).start()
        else:
            fence(KAFKA, transactional_id(RUN, "grouper", 0))
        writer.publish([None])

    with pytest.raises(Fenced, match=ends) as fenced:
        world.result_of(work)
    assert (fenced.value.exit_code, isinstance(fenced.value, Lapsed)) == (code, not rival)


def test_a_claim_that_expired_is_no_claim_of_another_process(world: World) -> None:
    def work() -> list[bool]:
        first, second = writer_of(Writer), writer_of(Writer)
        first.start()
        rivals = [first.has_rival]
        world.cluster.groups[f"{RUN}.grouper.turn-0"].offsets.clear()
        rivals.append(first.has_rival)
        second.start()
        return [*rivals, first.has_rival, second.has_rival]

    assert world.result_of(work) == [False, False, True, False]
