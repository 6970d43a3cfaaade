"""The pure parts of the tools: what records look like to people and programs, times, places, sums over partitions."""

import json
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.pipeline.command_line.plain_values import compact, decoded, key_text, plain, time_text
from rollstream.pipeline.index.lineage import LineageNode, parse_place
from rollstream.pipeline.tools.cat import facts, milliseconds, resolve
from rollstream.pipeline.tools.replay import AdvantageStatistics
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import Drop, GroupCancelled, PolicyManifest
from rollstream.topics.wire.keys import encode_key
from tests.support.runs import rollout


def test_a_record_becomes_json_with_its_long_arrays_summarised_or_in_full() -> None:
    record = rollout(tokens=np.arange(20, dtype="<i4"), logprobs=np.zeros(20, "<f4"), loss_mask=np.ones(20, bool))
    short, full = json.loads(json.dumps(plain(record))), json.loads(json.dumps(plain(record, full=True)))
    assert short["tokens"] == {"dtype": "int32", "length": 20, "min": 0, "max": 19, "mean": 9.5}
    assert full["tokens"] == list(range(20))
    assert short["metadata"]["worker_id"] == "w0"


def test_undecodable_bytes_are_shown_by_their_beginning() -> None:
    assert decoded(None) is None
    assert decoded(b"\xff" * 40) == b"\xff" * 40
    assert plain(b"\xff" * 40) == {"bytes": 40, "hex": "ff" * 16}
    assert plain(b"\xff" * 40, full=True)["hex"] == "ff" * 40
    assert key_text(encode_key("env", "ü")) == '["env","ü"]'
    assert key_text(b"\xff\xfe") == "fffe"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("12.5", 12_500),
        ("1970-01-01T00:01", 60_000),
        ("1970-01-01T01:00:00+01:00", 0),
        ("1970-01-02", 86_400_000),
    ],
)
def test_a_time_is_iso_in_utc_or_seconds(text: str, expected: int) -> None:
    assert milliseconds(text) == expected


def test_a_negative_time_is_relative_to_now() -> None:
    before = time.time() * 1000
    assert before - 60_000 - 1 <= milliseconds("-60") <= time.time() * 1000 - 60_000


@given(st.integers(0, 10**6), st.integers(0, 10**12))
def test_a_place_is_read_as_it_is_printed(partition: int, offset: int) -> None:
    place = parse_place(f"{partition}:{offset}")
    assert (place.partition, place.offset) == (partition, offset)
    assert parse_place(str(place)) == place


@pytest.mark.parametrize("text", ["", "1", "1:", ":1", "1:-1", "a:b", "1:2:3", "1.0:2"])
def test_an_invalid_place_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a place in rollouts"):
        parse_place(text)


def test_a_topic_is_found_by_its_name_or_whole_name() -> None:
    assert resolve("main", "rollouts") == "main.rollouts"
    assert resolve("main", "other.rollouts") == "other.rollouts"
    with pytest.raises(ConfigurationError, match="there is no topic 'rollout'"):
        resolve("main", "rollout")


def test_records_are_about_what_they_name() -> None:
    cancelled = GroupCancelled(environment="env", example_id="x", policy_version=3, group_size=4, uids=("a", "b"))
    assert facts(cancelled) == {
        "environment": {"env"},
        "example_id": {"x"},
        "uid": {"a", "b"},
        "policy_version": {3},
    }
    assert facts(rollout("x", 1))["uid"] == {"x-1"}
    assert facts(Drop(offset=1, reason="late", uid="u"))["uid"] == {"u"}
    manifest = PolicyManifest(version=7, learner="main", step=1, epoch="e", tensors=(), chunks=(), digest="")
    assert facts(manifest)["policy_version"] == {7}
    assert (
        facts(b"poison")
        == facts(None)
        == {"environment": set(), "example_id": set(), "uid": set(), "policy_version": set()}
    )


def test_a_tree_is_drawn_with_each_branch_under_its_own() -> None:
    tree = LineageNode(
        "a",
        "1",
        {"x": 1000},
        [LineageNode("b", "2", {}, [LineageNode("c", "3")]), LineageNode("d", "4", {"list": [1, 2]})],
    )
    assert list(tree.lines()) == ["a 1: x 1,000", "├─ b 2", "│  └─ c 3", "└─ d 4: list 1 2"]
    assert tree.as_dict()["children"][0]["children"] == [{"kind": "c", "name": "3"}]


def test_a_name_in_a_tree_is_not_obeyed_by_a_terminal_and_adds_no_line() -> None:
    tree = LineageNode("rollout", "a\x1b[31m\u202e", {"environment": "e\nstep main/7"}, [LineageNode("drop", "\x07")])
    assert list(tree.lines()) == [
        r"rollout a\u001b[31m\u202e: environment e\u000astep main/7",
        r"└─ drop \u0007",
    ]


@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-1, 1)), min_size=1), st.integers(0, 100))
def test_advantages_of_partitions_add_up(values: list[tuple[float, float]], cut: int) -> None:
    whole, first, second = AdvantageStatistics(), AdvantageStatistics(), AdvantageStatistics()
    for i, (advantage, reward) in enumerate(values):
        whole.add(advantage, reward)
        (first if i < cut else second).add(advantage, reward)
    first.merge(second)
    assert first.as_dict() == pytest.approx(whole.as_dict())
    assert whole.as_dict()["std"] == pytest.approx(float(np.std([a for a, _ in values])), abs=1e-6)


@pytest.mark.parametrize("text", ["\U0001f3f4\U000e0067\U000e007f", "\U0001d173a", "\x1b\u202e", "\ud800 alone"])
def test_characters_that_terminals_may_not_get_are_read_back_from_json(text: str) -> None:
    shown = compact({"uid": text})
    assert json.loads(shown) == {"uid": text}
    assert not {"\x1b", "\u202e", "\U000e0067", "\U0001d173"} & {*shown}


@pytest.mark.parametrize("text", ["nan", "inf", "1e400"])
def test_a_time_that_is_not_finite_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a time"):
        milliseconds(text)


@pytest.mark.parametrize("full", [False, True])
def test_non_finite_numbers_are_spelled_out_in_json(full: bool) -> None:
    record = rollout(reward=math.nan, logprobs=np.array([math.nan, math.inf, -math.inf] * 4, "<f4"))
    shown = json.loads(compact(plain(record, full=full)), parse_constant=pytest.fail)
    assert shown["reward"] == "NaN"
    assert shown["logprobs"][:3] == ["NaN", "Infinity", "-Infinity"] if full else shown["logprobs"]["max"] == "NaN"
    assert compact({"mean": math.inf, "of": [math.nan, 1.5]}) == '{"mean": "Infinity", "of": ["NaN", 1.5]}'


@pytest.mark.parametrize(
    ("at_ms", "text"),
    [
        (-5, "1969-12-31T23:59:59.995Z"),
        (253_402_300_799_999, "9999-12-31T23:59:59.999Z"),
        (2**62, "4611686018427387904 ms"),
        (-(10**15), "-1000000000000000 ms"),
    ],
)
def test_a_time_outside_the_calendar_is_shown_in_milliseconds(at_ms: int, text: str) -> None:
    assert time_text(at_ms) == text
