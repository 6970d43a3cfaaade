"""Runs whose records carry ids of a real schema registry: stock clients read them, and no reader of ours needs it."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient, SchemaRegistryError
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from rollstream.consumers.archive.manifest import newest
from rollstream.consumers.archive.restorer import restore
from rollstream.consumers.grouping.process.bootstrap import initialise
from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.audit.verification import verify
from rollstream.topics.config import KafkaConfig, RegistryConfig
from rollstream.topics.errors import RegistryUnavailable, SchemaRefused
from rollstream.topics.files.stores import LocalStore
from rollstream.topics.kafka import provisioning
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.registry.client import FRAME_HEADER, registered_text, subject_of
from rollstream.topics.kafka.registry.writers import SchemaIds
from rollstream.topics.records import Mark, TrainingBatch, same
from rollstream.topics.wire.catalogue import CATALOGUE, spec_of, topic_name
from rollstream.topics.wire.codec import REGISTRY_MAGIC, decode, encode, kind_of, record_of, schemas
from rollstream.topics.wire.keys import encode_key
from tests.broker.test_demo import environment
from tests.support.command_line import answer_of
from tests.support.https_front import https_front
from tests.support.runs import RealRun, rollout
from tests.support.schema_registry import SchemaRegistry, schema_registry
from tests.support.settled import settled
from tests.support.waiting import eventually

pytestmark = pytest.mark.long  # A registry of 158 MB, which takes ten seconds to start.


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchemaRegistry]:
    with schema_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[SchemaRegistry]:
    """A registry for a test that kills it."""
    with schema_registry(tmp_path) as running:
        yield running


def framings(kafka: KafkaConfig, run: str, topic: str) -> set[bool]:
    """Whether records of a topic carry an id; both values if some do and some do not."""
    messages = read_to_end(kafka, topic_name(run, topic))
    return {(message.value or b"").startswith(REGISTRY_MAGIC) for message in messages if kind_of(message.value)}


def stock_readings(kafka: KafkaConfig, run: str, url: str) -> dict[str, int]:
    """Read all that carries an id with the stock deserializer, compare it with ours; return counts by record type."""
    # By default it waits for an answer for ever.
    read = AvroDeserializer(SchemaRegistryClient({"url": url, "timeout": 120}))
    counts: dict[str, int] = {}
    for spec in CATALOGUE:
        topic = topic_name(run, spec.name)
        for message in read_to_end(kafka, topic) if spec.values else ():
            if kind_of(message.value) and (message.value or b"").startswith(REGISTRY_MAGIC):
                ours = decode(message.value)
                stock = read(message.value, SerializationContext(topic, MessageField.VALUE))
                assert stock.keys() - ours.__dict__.keys() == {FRAME_HEADER}
                assert same(record_of(type(ours), stock), ours)
                counts[type(ours).__name__] = counts.get(type(ours).__name__, 0) + 1
    return counts


def values(kafka: KafkaConfig, run: str, topic: str) -> dict[tuple[int, int], bytes | None]:
    """Bytes of each record of a topic, by partition and offset."""
    return {(m.partition, m.offset): m.value for m in read_to_end(kafka, topic_name(run, topic))}


def test_a_run_as_a_user_starts_it_is_read_by_the_stock_deserializer(
    compiled: Path, tmp_path: Path, broker: str, run_name: str, registry: SchemaRegistry
) -> None:
    (tmp_path / "run.toml").write_text(
        f'[kafka.registry]\nurl = "{registry.url}"\n\n'
        "[learner]\nmodel = { num_hidden_layers = 1 }\nrollouts_per_step = 32\nmicrobatch_rows = 4\nmax_steps = 2\n\n"
        "[worker]\ngroup_size = 4\n\n[grouping]\nbatch_rollouts = 8\n\n[topics]\npartitions = 2\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-m", "rollstream", "run", "run.toml", "--run", run_name, "--set=data_dir=data"],
        env=environment(compiled, KAFKA_BOOTSTRAP_SERVERS=broker),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kafka = KafkaConfig(bootstrap_servers=broker)
    counts = stock_readings(kafka, run_name, registry.url)
    written = {
        "Rollout",
        "TrainingBatch",
        "BatchIndexEntry",
        "JournalRecord",
        "LearnerStep",
        "PolicyManifest",
        "Metrics",
    }
    assert written <= counts.keys()
    assert "schema_id_unknown" not in done.stderr
    for spec in CATALOGUE:
        assert framings(kafka, run_name, spec.name) <= {True}
    book = ledger(kafka, run_name)
    assert book.balanced, book.problems
    assert verify(kafka, run_name).mismatches == []


def test_a_run_switched_on_half_way_whose_registry_dies_loses_nothing_and_outlives_it(
    real_run: RealRun, mortal: SchemaRegistry
) -> None:
    run = real_run.prepare()
    plain = run.kafka
    group = run.start("group")
    run.send(rollout(f"a{n}", member) for n in range(8) for member in range(4))
    settled(run, batched=32, in_flight=0)
    group.terminate()
    assert group.wait(300) == 0

    run.kafka = replace(plain, registry=RegistryConfig(url=mortal.url, timeout_s=60))
    refused = run.start("group")
    run.send_bytes("rollouts", b"\0\0\0\0\x4d and what a foreign program says", encode_key("env", "a0"))
    with pytest.raises(SchemaRefused, match="register it with `rollstream topics apply`"):
        run.send([rollout("unregistered")])
    assert refused.wait(300) == 2
    assert "rollstream topics apply" in run.log_of(refused)
    applied = run.said("topics", "apply", "--json")
    assert applied.returncode == 0, applied.stderr
    subjects = {name for plan in json.loads(applied.stdout) for name in plan["subjects"]}
    assert f"{run.name}.rollouts-value" in subjects
    assert not any(plan.needed for plan in provisioning.plan(run.kafka, run.topics, run.name))

    SchemaRegistryClient({"url": mortal.url})
    group = run.start("group")
    run.send(rollout(f"b{n}", member) for n in range(8) for member in range(4))
    settled(run, batched=64, in_flight=0)
    assert stock_readings(plain, run.name, mortal.url)["TrainingBatch"] >= 2

    mortal.kill()
    # A running process keeps its ids.
    run.send(rollout(f"c{n}", member) for n in range(4) for member in range(4))
    settled(run, batched=80, in_flight=0)
    group.send_signal(signal.SIGKILL)
    group.wait()
    # A process that starts now gets none.
    group = run.start("group")
    run.send(rollout(f"d{n}", member) for n in range(4) for member in range(4))
    settled(run, batched=96, in_flight=0)
    assert "schema_id_unknown" in run.log_of(group)
    group.terminate()
    assert group.wait(300) == 0

    assert framings(plain, run.name, "rollouts") == {True, False}
    assert framings(plain, run.name, "batches") == {True, False}
    check(plain, run.name)
    letters = [m.header("__streams.errors.message") for m in read_to_end(plain, run.topic("dead-letters"))]
    assert len(letters) == 1
    assert "schema 77" in str(letters[0])

    archived = answer_of(run.directory, *RealRun(plain, run.name, run.directory).command("archive")[4:])
    assert archived.returncode == 0, archived.stderr
    store = LocalStore(run.directory / "archive")
    manifest = newest(store, run.name)
    assert manifest is not None
    restored = f"{run.name}-restored"
    restore(plain, run.topics, store, manifest, restored)
    assert values(plain, restored, "batches") == values(plain, run.name, "batches")
    check_batches(plain, restored)
    replayed = answer_of(run.directory, *RealRun(plain, run.name, run.directory).command("replay", "--json")[4:])
    assert replayed.returncode == 0, replayed.stderr


def check(kafka: KafkaConfig, run: str) -> None:
    book = ledger(kafka, run)
    assert book.balanced, book.problems
    assert book.dead_lettered == 1
    check_batches(kafka, run)


def check_batches(kafka: KafkaConfig, run: str) -> None:
    result = verify(kafka, run)
    assert result.mismatches == []
    batches = [decode(message.value) for message in read_to_end(kafka, topic_name(run, "batches"))]
    assert result.batches == len(batches)
    assert sum(len(batch) for batch in batches if isinstance(batch, TrainingBatch)) == 96


def test_a_schema_that_does_not_go_with_the_registered_ones_is_refused_on_both_sides(
    real_run: RealRun, registry: SchemaRegistry
) -> None:
    run = real_run
    run.kafka = replace(run.kafka, registry=RegistryConfig(url=registry.url, timeout_s=60))
    foreign, subject = SchemaRegistryClient({"url": registry.url}), f"{run.name}.metrics-value"
    theirs = {"type": "record", "name": "Metrics", "namespace": "rollstream"}
    foreign.register_schema(subject, Schema(json.dumps({**theirs, "fields": [{"name": "x", "type": "int"}]}), "AVRO"))
    foreign.set_compatibility(subject, "FULL_TRANSITIVE")
    with pytest.raises(SchemaRefused, match=rf"registering {subject}.*refuses the schema"):
        provisioning.apply(run.kafka, run.topics, run.name)
    assert provisioning.describe(run.kafka, run.name) == [], "nothing is created for a run that cannot be set up"

    foreign.delete_subject(subject)
    provisioning.apply(run.kafka, run.topics, run.name)
    rollouts = subject_of(run.kafka.registry, run.topic("rollouts"), "Rollout")
    assert rollouts is not None
    newest_schema = json.loads(registered_text(rollouts.versions[-1]))
    newest_schema["fields"].append({"name": "added", "type": "int"})
    with pytest.raises(SchemaRegistryError) as refusal:
        foreign.register_schema(rollouts.name, Schema(json.dumps(newest_schema), "AVRO"))
    assert refusal.value.http_status_code == 409
    newest_schema["fields"][-1]["default"] = 0
    assert foreign.register_schema(rollouts.name, Schema(json.dumps(newest_schema), "AVRO")) > 0


def test_a_stock_serializer_writes_what_our_readers_take(real_run: RealRun, registry: SchemaRegistry) -> None:
    run = real_run
    run.kafka = replace(run.kafka, registry=RegistryConfig(url=registry.url, timeout_s=60))
    run.prepare()
    [schema] = schemas()["Mark"]
    text = registered_text(schema)
    settings = {
        "auto.register.schemas": False,
        "subject.name.strategy": lambda context, name: f"{context.topic}-{name}",
    }
    write = AvroSerializer(SchemaRegistryClient({"url": registry.url}), text, conf=settings)
    header = json.loads(text)["fields"][0]["default"].encode("latin-1")
    mark = Mark(kind="drain")
    value = write(
        {FRAME_HEADER: header, **mark.__dict__}, SerializationContext(run.topic("rollouts"), MessageField.VALUE)
    )
    assert decode(value) == mark
    assert value == SchemaIds(run.kafka.registry).framed(run.topic("rollouts"), encode(mark))
    assert "Mark" in spec_of("rollouts").values


def test_ids_come_by_themselves_once_the_registry_does(
    real_run: RealRun, mortal: SchemaRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    run = real_run
    run.kafka = replace(run.kafka, registry=RegistryConfig(url=mortal.url, timeout_s=60))
    mortal.kill()
    with pytest.raises(RegistryUnavailable, match="no registry answers at"):
        provisioning.apply(run.kafka, run.topics, run.name)
    ids, topic, value = SchemaIds(run.kafka.registry, ask_again_s=0.1), run.topic("evals"), encode(rollout())
    assert ids.framed(topic, value) == value
    assert "schema_id_unknown" in caplog.text
    mortal.start()
    provisioning.apply(run.kafka, run.topics, run.name)
    eventually(lambda: ids.framed(topic, value) != value, 60, "an id")
    assert same(decode(ids.framed(topic, value)), decode(value))
    # Once it has ids, a value whose id is missing is written without one.
    other = f"{run.name}-other.evals"
    assert ids.framed(other, value) == value


def test_a_run_whose_registry_wants_tls_and_a_password_keeps_the_password_to_itself(
    real_run: RealRun, registry: SchemaRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, password = real_run, "a-word-that-nobody-says"
    monkeypatch.setenv("REGISTRY_PASSWORD", password)
    with https_front(tmp_path, registry.url, "main", password, clients_have_certificates=True) as front:
        (run.directory / "run.toml").write_text(
            f'[kafka.registry]\nurl = "{front.url}"\nusername = "main"\npassword = "env:REGISTRY_PASSWORD"\n'
            f'ca = "{front.authority}"\ncertificate = "{front.client}"\ntimeout_s = 60.0\n'
        )
        applied = run.said("topics", "apply", "--config", "run.toml")
        assert applied.returncode == 0, applied.stderr
        initialise(run.kafka, run.name, run.grouping, run.grouper)
        run.publish_version(0)
        group = run.start("group", "--config", "run.toml", forked=False)
        run.send(rollout(f"x{n}", member) for n in range(8) for member in range(4))
        settled(run, batched=32, in_flight=0)
        words = Path(f"/proc/{group.pid}/cmdline").read_bytes().decode()
        group.terminate()
        assert group.wait(300) == 0
    assert front.passed
    assert front.refused == []
    assert framings(run.kafka, run.name, "batches") == {True}
    assert stock_readings(run.kafka, run.name, registry.url)["TrainingBatch"] >= 1
    assert password not in "".join((words, applied.stdout, applied.stderr, run.log_of(group)))
