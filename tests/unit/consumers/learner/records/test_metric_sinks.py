"""MetricSinks hold each step once, whatever a resumed learner executes again, and never end the learner."""

import json
import logging
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollstream.consumers.learner.records import metric_sinks
from rollstream.consumers.learner.records.metric_sinks import MetricSinks, open_sinks, serve_newest
from rollstream.consumers.learner.records.metric_sinks_config import SinksConfig
from rollstream.topics.catalogue import topic_name
from rollstream.topics.codec import encode
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.keys import encode_key
from rollstream.topics.metric_catalogue import CATALOGUE_OF_METRICS
from rollstream.topics.metric_values import VALUES
from rollstream.topics.records import LearnerStep, Metrics
from tests.simulation.installation import World, installed
from tests.support.paths import ROOT

NAMES = {"reward": 0.25, "optim/lr": 1e-3, "clip_ratio/high_mean": float("nan")}


def step_of(number: int) -> LearnerStep:
    return LearnerStep(
        learner="a",
        step=number,
        input_run="r",
        uses=(),
        position=number,
        policy_version=number,
        params_digest="d",
        trained_total=0,
        skipped_total=0,
        metrics={**NAMES, "trained/reward": float(number)},
        timestamp=1.8e9 + number,
    )


class Elsewhere:
    """A stand-in for the sink of the topic `metrics`, which tests/broker/test_sinks.py tests."""

    last = -1

    def write(self, step: LearnerStep) -> None: ...

    def close(self) -> None: ...


_killed: list[MetricSinks] = []
"""Closed when a test is over: until then they are as a learner that was killed left them."""


@pytest.fixture(autouse=True)
def _no_broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(metric_sinks, "TopicSink", lambda *_: Elsewhere())
    yield
    while _killed:
        _killed.pop().close()


def opened(config: SinksConfig, recorded: int) -> MetricSinks:
    return open_sinks(config, KafkaConfig(), "r", "a", recorded)


def write(config: SinksConfig, recorded: int, *steps: int) -> MetricSinks:
    """The sinks of a learner that resumes after step `recorded` (-1: none), makes these steps and is killed."""
    sinks = opened(config, recorded)
    _killed.append(sinks)
    for step in steps:
        sinks.write(step_of(step))
    return sinks


def lines_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "r" / "a.jsonl").read_text().splitlines()]


def test_a_learner_that_resumes_serves_the_newest_step_on_record_with_its_own_time() -> None:
    def served() -> tuple[float, ...]:
        names = ("step", "policy_version", "step_timestamp_seconds")
        specs = {spec.name: spec for spec in CATALOGUE_OF_METRICS}
        return tuple(VALUES.values_of(specs[f"rollstream_learner_{name}"])[()] for name in names)

    recorded = [step_of(0), step_of(1), replace(step_of(2), policy_version=-1)]
    serve_newest(recorded)
    assert served() == (2, 1, recorded[-1].timestamp)
    serve_newest([])
    assert served() == (2, 1, recorded[-1].timestamp)


def test_json_lines_hold_each_step_once_under_its_names(tmp_path: Path) -> None:
    config = SinksConfig(jsonl=str(tmp_path))
    write(config, -1, 0, 1, 2, 3)
    write(config, 3, 2, 3, 4)

    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert lines[2] == {
        "run": "r",
        "learner": "a",
        "step": 2,
        "policy_version": 2,
        "timestamp": 1.8e9 + 2,
        "reward": 0.25,
        "optim/lr": 1e-3,
        "clip_ratio/high_mean": None,
        "trained/reward": 2.0,
    }


@pytest.mark.parametrize("left", [b'{"run": "r", "step": 2, "rew', b'{"run": "r", "st\xc3', b"{"])
def test_half_a_line_is_cut_off_and_written_again(tmp_path: Path, left: bytes) -> None:
    config = SinksConfig(jsonl=str(tmp_path))
    write(config, -1, 0, 1)
    with (tmp_path / "r" / "a.jsonl").open("ab") as file:
        file.write(left)
    write(config, 2, 1, 2, 3)
    assert [line["step"] for line in lines_of(tmp_path)] == [0, 1, 2, 3]


def test_a_line_longer_than_what_is_read_at_once_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_sinks, "TAIL_BYTES", 16)
    test_json_lines_hold_each_step_once_under_its_names(tmp_path)


def test_only_half_a_line_is_no_step(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "a.jsonl").write_text('{"step": 7')
    write(SinksConfig(jsonl=str(tmp_path)), 7, 0)
    assert [line["step"] for line in lines_of(tmp_path)] == [0]


def test_what_an_earlier_run_of_the_name_left_is_put_aside(tmp_path: Path) -> None:
    config = SinksConfig(jsonl=str(tmp_path), tensorboard=str(tmp_path / "tb"))
    write(config, -1, 0, 1, 2)
    write(config, 0, 1)
    assert [line["step"] for line in lines_of(tmp_path)] == [1]
    assert len((tmp_path / "r" / "a.jsonl.1").read_text().splitlines()) == 3
    assert [step for name, step, _ in scalars(tmp_path / "tb" / "r" / "a") if name == "reward"] == [1]


def test_what_was_put_aside_stays_when_an_earlier_file_was_deleted(tmp_path: Path) -> None:
    config = SinksConfig(jsonl=str(tmp_path))
    for first in (10, 20, 30):
        write(config, -1, first)
    (tmp_path / "r" / "a.jsonl.1").unlink()
    write(config, -1, 40)
    held = [json.loads(path.read_text())["step"] for path in (tmp_path / "r").glob("a.jsonl*")]
    assert sorted(held) == [20, 30, 40]


def scalars(directory: Path) -> list[tuple[str, int, float]]:
    """Scalars that TensorBoard shows for a directory, in order, without those that a later start purged."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    shown: list[tuple[str, int, float]] = []
    for path in sorted(directory.glob("events.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            string = Event.FromString(data[at + 12 : at + 12 + length])
            at += 12 + length + 4
            if string.session_log.status == SessionLog.START:
                shown = [item for item in shown if item[1] < string.step]
            shown += [(value.tag, string.step, value.simple_value) for value in string.summary.value]
    return shown


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    config, directory = SinksConfig(tensorboard=str(tmp_path)), tmp_path / "r" / "a"
    write(config, -1, 0, 1, 2)
    # As a kill between an event and its note leaves it: step 2 is written, but not noted.
    (directory / "rollstream.json").write_text('{"last": 1}')
    write(config, 2, 1, 2, 3)

    series = scalars(directory)
    assert [(step, value) for name, step, value in series if name == "trained/reward"] == [(n, n) for n in range(4)]
    assert {name for name, _, _ in series} == {"reward", "optim/lr", "trained/reward"}, "what is not finite is left out"


def history(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Steps and figures in a file of Weights & Biases, whose framing is LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        part = data[at + 7 : at + 7 + length]
        at += 7 + length
        whole = part if kind in (1, 2) else whole + part
        record = Record.FromString(whole) if kind in (1, 4) else Record()
        if record.HasField("history"):
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            yield record.history.step.num, items


RESUMED = """
import sys
sys.path.insert(0, {root!r})
from tests.unit.consumers.learner.records.test_metric_sinks import Elsewhere, SinksConfig, metric_sinks, write
metric_sinks.TopicSink = lambda *_: Elsewhere()
write(SinksConfig(wandb={directory!r}), {recorded}, *{steps}).close()
"""


@pytest.mark.long
def test_weights_and_biases_keeps_one_run_with_each_step_once_offline(tmp_path: Path) -> None:
    root = str(ROOT)
    for recorded, steps in ((-1, (0, 1, 2)), (2, (1, 2, 3))):
        code = RESUMED.format(root=root, directory=str(tmp_path), recorded=recorded, steps=steps)
        subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    assert len(files) == 2
    assert len({path.name for path in files}) == 1, "one id, so that the service joins them"
    items = [item for path in files for item in history(path)]
    assert [step for step, _ in items] == [0, 1, 2, 3]
    assert items[3][1]["trained/reward"] == "3"
    assert items[3][1]["optim/lr"] == "0.001"


class Full(Elsewhere):
    """A sink that has no room for the second step."""

    def write(self, step: LearnerStep) -> None:
        if step.step:
            raise OSError(28, "No space left on device")


def test_a_sink_that_fails_is_left_alone_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_sinks, "TopicSink", lambda *_: Full())
    sinks = opened(SinksConfig(jsonl=str(tmp_path), tensorboard=str(tmp_path / "tb")), -1)
    with caplog.at_level(logging.WARNING):
        for step in (0, 1, 2):
            sinks.write(step_of(step))
    sinks.close()
    assert [record.message for record in caplog.records] == ["sink_lost"]
    assert [line["step"] for line in lines_of(tmp_path)] == [0, 1, 2]
    assert [step for name, step, _ in scalars(tmp_path / "tb" / "r" / "a") if name == "reward"] == [0, 1, 2]


def test_a_sink_that_cannot_be_opened_does_not_keep_the_learner_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "r").write_text("a file where the directory belongs")
    with caplog.at_level(logging.WARNING):
        write(SinksConfig(jsonl=str(tmp_path)), -1, 0)
    assert [record.message for record in caplog.records] == ["sink_lost"]


@pytest.mark.parametrize(("setting", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_missing_package_is_an_error_that_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigurationError, match=rf"{package}.*pip install 'rollstream\[sinks\]'"):
        opened(SinksConfig(**{setting: str(tmp_path)}), -1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("before", "after", "read"), [(5000, 3, 1000), (5000, 1500, 7502), (20, 3, 25)])
def test_the_last_step_on_metrics_is_searched_from_its_end(
    before: int, after: int, read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, world = [], World()
    original = metric_sinks.read_to_end

    def counting(*given: Any, **named: Any) -> Iterator[Any]:
        for record in original(*given, **named):
            records.append(record)
            yield record

    monkeypatch.setattr(metric_sinks, "read_to_end", counting)
    topic, kafka = topic_name("main", "metrics"), KafkaConfig(bootstrap_servers="model:1")
    with installed(world):
        cluster = world.begin()
        cluster.create(topic, 1)
        log = cluster.topics[topic][0]
        assert world.result_of(lambda: metric_sinks.last_on_topic(kafka, "main", "learn-a")) == -1
        for component, step in [
            *(("infer-0", 9),) * before,
            ("learn-a", 4),
            ("learn-a", 5),
            *(("infer-0", 9),) * after,
        ]:
            value = encode(Metrics(component=component, timestamp=0.0, step=step))
            log.append(0, encode_key(component), value, [], (7, log.end), 0, transactional=False)
        assert world.result_of(lambda: metric_sinks.last_on_topic(kafka, "main", "learn-a")) == 5
    assert len(records) == read
