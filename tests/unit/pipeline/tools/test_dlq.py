"""Dead letters of megabytes are listed in little memory, and only letters that are shown or sent keep their values."""

import json
import re
import sys
import tracemalloc
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.pipeline.audit.ledger import REDRIVEN
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.tools import dlq
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.records import Rollout
from rollstream.topics.wire.codec import encode
from tests.support.runs import rollout

MIB = 1 << 20
LETTERS = 64
TOPIC = "main.dead-letters"


def letter(offset: int, value: bytes | None) -> KafkaRecord:
    headers = (
        ("__streams.errors.topic", b"main.unlabelled"),
        ("__streams.errors.partition", b"0"),
        ("__streams.errors.offset", b"%d" % offset),
    )
    return KafkaRecord(TOPIC, 0, offset, 1000 + offset, b"key", value, headers)


def redriven(offset: int, letter_offset: int) -> KafkaRecord:
    return KafkaRecord(TOPIC, 0, offset, 5000, b"key", None, ((REDRIVEN, b"%d" % letter_offset),))


def large_letters(*_: object, **__: object) -> Iterator[KafkaRecord]:
    """Letters of a MiB, of which one record is in memory at a time, as if they came from a broker."""
    for offset in range(LETTERS):
        yield letter(offset, bytes(MIB))
    yield redriven(LETTERS, 0)


@pytest.fixture(autouse=True)
def _without_a_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlq, "read_to_end", large_letters)
    monkeypatch.setattr(clients, "check_broker", lambda _kafka: None)


@pytest.fixture
def measured() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def peak_mib() -> float:
    return tracemalloc.get_traced_memory()[1] / MIB


@pytest.mark.usefixtures("measured")
def test_a_list_has_the_sizes_of_large_letters_and_takes_little_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert dlq.dlq(RunConfig(run="main"), Namespace(action="ls", json=True)) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(each["letter"], each["size_bytes"]) for each in listed] == [(f"0:{n}", MIB) for n in range(LETTERS)]
    assert [each["letter"] for each in listed if each["redriven"]] == ["0:0"]
    assert peak_mib() < LETTERS / 4


@pytest.mark.parametrize("names", [["0:2"], ["0:2", "0:0"], []])
def test_the_letters_that_are_shown_have_their_values(
    names: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = [letter(offset, encode(rollout(member=offset))) for offset in range(3)]
    monkeypatch.setattr(dlq, "read_to_end", lambda *_, **__: iter(small))
    assert dlq.dlq(RunConfig(run="main"), Namespace(action="show", letter=names, json=True)) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["letter"] for each in shown] == (names or ["0:0", "0:1", "0:2"])
    assert [each["value"]["uid"] for each in shown] == [f"x-{each['offset']}" for each in shown]


def test_a_letter_that_is_named_twice_is_sent_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = [letter(offset, encode(rollout(member=offset))) for offset in range(2)]
    monkeypatch.setattr(dlq, "read_to_end", lambda *_, **__: iter(small))
    words = Namespace(action="redrive", letter=["0:1", "0:0", "0:1"], fix=None, dry_run=True, json=True)
    assert dlq.dlq(RunConfig(run="main"), words) == 0
    assert json.loads(capsys.readouterr().out)["redriven"] == ["0:1", "0:0"]


def redrive(fix: Path | None, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The answer of a redrive that sends nothing."""
    dlq.dlq(RunConfig(run="main"), Namespace(action="redrive", letter=[], fix=fix, dry_run=True, json=True))
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_a_letter_without_a_value_is_left_with_the_reason_until_a_script_creates_its_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dlq, "read_to_end", lambda *_, **__: iter([letter(0, None)]))
    reason = "its record had no value, or its bytes were not kept; a script (--fix) can create the record"
    assert redrive(None, capsys) == {"redriven": [], "left": {"0:0": reason}}
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "created_rollout.py").write_bytes(b"VALUE = %r\n" % encode(rollout()))
    script = tmp_path / "mend.py"
    script.write_text("import created_rollout\ndef fix(value, key, headers):\n    return created_rollout.VALUE\n")
    assert redrive(script, capsys) == {"redriven": ["0:0"], "left": {}}


def test_a_record_that_is_too_large_is_left_and_does_not_hold_back_other_letters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dlq, "read_to_end", lambda *_, **__: iter([letter(0, b"0"), letter(1, b"1")]))
    config = RunConfig(run="main")

    def fix(value: bytes | None, _key: bytes | None, _headers: dict[str, str]) -> Rollout:
        return rollout(extra={"note": "x" * config.kafka.max_record_bytes if value == b"0" else "x"})

    large, small = dlq.read(config.kafka, "main")
    sent, [(left, why)] = dlq.resend(config, [large, small], fix, dry_run=True)
    assert (sent, left) == ([small], large)
    assert re.search(r"the record has 8\d{6} bytes and the limit is 8387584; let a script \(--fix\) shorten it", why)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def fix(:\n", r"mend\.py cannot be imported: SyntaxError: .* \(mend\.py, line 1\)"),
        ("import no_such_module\n", r"ModuleNotFoundError: No module named 'no_such_module' \(mend\.py, line 1\)"),
        ("\nrows = 1 / 0\n", r"mend\.py cannot be imported: ZeroDivisionError: .* \(mend\.py, line 2\)"),
        ("fix = 3\n", r"mend\.py does not define a function fix\(value, key, headers\)"),
    ],
)
def test_a_script_that_cannot_be_used_is_one_line_with_its_fault(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = tmp_path / "mend.py"
    script.write_text(text)
    with pytest.raises(ConfigurationError, match=says) as error:
        redrive(script, capsys)
    assert "\n" not in str(error.value)


def test_letters_that_were_not_named_keep_no_value() -> None:
    letters = dlq.read(RunConfig().kafka, "main", with_value=frozenset({"0:5"}))
    assert [each.name for each in letters if each.value is not None] == ["0:5"]
    assert {each.size_bytes for each in letters} == {MIB}


class Started:
    """A stand-in for the producer of a redrive, all of whose letters another process has sent."""

    def __init__(self, *_: object) -> None: ...

    def start(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.usefixtures("measured")
def test_the_check_for_letters_that_another_process_sent_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    value = encode(rollout())
    monkeypatch.setattr(dlq, "read_to_end", lambda *_, **__: iter([letter(0, value)]))
    config = RunConfig(run="main")
    letters = dlq.read(config.kafka, "main")
    monkeypatch.setattr(dlq, "read_to_end", large_letters)
    monkeypatch.setattr(dlq, "TransactionalProducer", Started)
    monkeypatch.setattr(dlq, "await_decided", lambda *_, **__: None)
    assert dlq.resend(config, letters) == ([], [(letters[0], "was redriven by another process")])
    assert peak_mib() < LETTERS / 4


def test_many_letters_are_sent_in_transactions_that_no_timeout_cuts_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction of all letters of a bad deploy would outlive kafka.transaction_timeout_s at each attempt."""
    monkeypatch.setattr(dlq, "PORTION_BYTES", 100)
    monkeypatch.setattr(dlq, "PORTION_LETTERS", 3)
    items: list[Any] = [(number, b"", b"x" * size) for number, size in enumerate([10] * 4 + [90, 30, 200, 1])]
    portions = [[number for number, _key, _value in portion] for portion in dlq.portions(items)]
    assert portions == [[0, 1, 2], [3, 4], [5, 6], [7]]
