"""Keys in force on a real broker: forged marks and rollouts change nothing and are in the books, tools go on."""

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import Producer

from rollstream.consumers.grouping.config import GrouperConfig, GroupingConfig
from rollstream.consumers.grouping.core.effects import CORE_VERSION
from rollstream.consumers.grouping.process.mark_writer import drain
from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.audit.verification import verify
from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.topics.records import GroupCancelled, Mark
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.support.command_line import answer_of
from tests.support.runs import RealRun, rollout
from tests.support.settled import settled
from tests.support.waiting import eventually


def new_key(folder: Path, name: str) -> str:
    """Write a private key as an operator does; return its public key."""
    answer = answer_of(folder, "key", "new", str(folder / name))
    assert answer.returncode == 0, answer.stderr
    assert answer_of(folder, "key", "show", str(folder / name)).stdout == answer.stdout
    return answer.stdout.strip()


def forge(run: RealRun) -> int:
    """Write forged records to every partition with a plain client; return their number."""
    config = replace(run.grouping, generation=1)
    marks = [
        Mark(kind="policy_version", policy_version=2**19),
        Mark(kind="drain"),
        *(
            Mark(kind="configuration", generation=1, configuration=changed.to_json())
            for changed in (
                replace(config, exclude_environments=("env",)),
                replace(config, mark_keys=()),
                replace(config, environment_keys=()),
            )
        ),
    ]
    producer = Producer({"bootstrap.servers": run.kafka.bootstrap_servers})
    for partition in range(run.topics.partitions):
        for mark in marks:
            producer.produce(run.topic("rollouts"), encode(mark), encode_key("mark", mark.kind), partition)
    others = [rollout("x0", 2, uid="impostor", reward=1000.0)]
    cancelled = GroupCancelled(
        environment="env", example_id="x0", policy_version=0, group_size=4, uids=("x0-2", "x0-3")
    )
    for record in (*others, cancelled):
        producer.produce(run.topic("rollouts"), encode(record), encode_key("env", "x0"))
    assert producer.flush(120) == 0
    return run.topics.partitions * len(marks) + 2


def batched(run: RealRun) -> list[str]:
    return [uid for batch in run.read("batches") for uid in batch.uids]  # type: ignore[attr-defined]


@pytest.mark.kafka
def test_forged_records_are_dropped_by_a_run_with_keys_and_its_own_tools_are_obeyed(real_run: RealRun) -> None:
    run = real_run
    grouping_key, environment_key = (new_key(run.directory, name) for name in ("grouping.pem", "env.pem"))
    run.grouping = GroupingConfig(
        batch_rollouts=4,
        max_batch_age_s=3600.0,
        mark_keys=(grouping_key,),
        environment_keys=(f"env:{environment_key}",),
    )
    run.prepare()
    keyless = run.start("group")
    assert keyless.wait(120) == 2
    assert "name the private key of one of them in grouper.signing_key (it is not set)" in run.log_of(keyless)

    run.grouper = GrouperConfig(signing_key=f"file:{run.directory / 'grouping.pem'}")
    process = run.start("group")
    signing = replace(run.kafka, signing_key=f"file:{run.directory / 'env.pem'}")
    with RolloutProducer(signing, run.name) as producer:
        for member in range(2):
            producer.send(rollout("x0", member))
    forged = forge(run)
    with RolloutProducer(signing, run.name) as producer:
        for example in range(6):
            for member in range(2 if example == 0 else 0, 4):
                producer.send(rollout(f"x{example}", member))
    eventually(lambda: len(batched(run)) == 24, 120, "the honest groups in batches")
    process.send_signal(signal.SIGKILL)
    process.wait()

    run.start("group")
    # Two members of a group of four stay open, and a mark of the new version goes to every partition.
    run.publish_version(1)
    excluded = run.said("exclude", "--env", "env", "--json")
    assert excluded.returncode == 0, excluded.stderr
    drain(run.kafka, run.name, run.grouper)
    with RolloutProducer(signing, run.name) as producer:
        for member in range(4):
            producer.send(rollout("late", member))

    def books() -> tuple[int, int, list[str]]:
        book = ledger(run.kafka, run.name)
        return book.batched, sum(book.dropped.values()), book.problems

    eventually(lambda: books() == (24, forged + 4, []), 120, "every record in the books")
    dropped = ledger(run.kafka, run.name).dropped
    assert dropped == {"invalid": forged, "excluded": 4}
    assert verify(run.kafka, run.name).mismatches == []
    top = json.loads(run.said("top", "--once", "--json").stdout)
    assert top["policy_version"] == 1, top

    # The tools name the configuration in force now, and the one under which a record got its fate.
    in_force = top["configuration"]
    assert (in_force["estimator"], in_force["mark_keys"], in_force["environment_keys"]) == ("rloo", 1, ["env"])
    assert (in_force["generation"], in_force["before"]) == (1, 1)
    assert list(in_force["changed"]) == ["exclude_environments"]
    text = f"generation 1, core {CORE_VERSION}, estimator rloo, marks signed, signed environments env"
    assert text[:70] in run.said("top", "--once").stdout
    [late, early] = [
        json.loads(run.said("lineage", "--rollout", uid, "--json").stdout)[0] for uid in ("late-0", "x0-0")
    ]
    assert late["children"][-1] == {
        "kind": "configuration", "name": "of generation 1", "core": str(CORE_VERSION), "estimator": "rloo",
        "marks": "signed", "signed environments": "env", "changed": "exclude_environments",
    }  # fmt: skip
    assert early["children"][-1]["name"] == "of generation 0"


MENDING = """
from tests.support.runs import rollout
from tests.support.settled import settled

def fix(value, key, headers):
    return rollout("x0", int(value))
"""


def test_a_letter_is_sent_again_only_with_a_signature_that_its_environment_needs(real_run: RealRun) -> None:
    run = real_run
    run.grouping = GroupingConfig(batch_rollouts=4, environment_keys=(f"env:{new_key(run.directory, 'env.pem')}",))
    run.prepare()
    run.start("group")
    for member in range(4):
        run.send_bytes("rollouts", b"%d" % member, encode_key("env", "x0"))
    settled(run, dead_lettered=4)
    (run.directory / "mending.py").write_text(MENDING)
    redrive = ("dlq", "redrive", "--json", "--fix", str(run.directory / "mending.py"))
    left = json.loads(run.said(*redrive).stdout)["left"]
    assert len(left) == 4
    assert all("name its private key in kafka.signing_key" in why for why in left.values())
    signing = run.command(*redrive, kafka__signing_key=f"file:{run.directory / 'env.pem'}")[4:]
    answer = json.loads(answer_of(run.directory, *signing).stdout)
    assert (len(answer["redriven"]), answer["left"]) == (4, {})
    eventually(lambda: len(batched(run)) == 4, 120, "the repaired group in a batch")
    assert ledger(run.kafka, run.name).dropped == {}
