"""`rollstream import` between files counts records, can be restarted, and loses only what is damaged."""

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pytest

from rollstream.consumers.grouping.testing import example_rollout
from rollstream.pipeline.command_line.cli import main
from rollstream.topics.records import OldMetadata, Rollout, RolloutBatch
from rollstream.topics.wire.avro_files import container_metadata, read_rollouts, write_rollouts
from rollstream.topics.wire.codec import schemas, values_of
from tests.support.old_form import old_form
from tests.support.pages import blocks, page, section

STEP = OldMetadata(worker_id="w", timestamp=5.0, weight_step=7)


def batch(name: str, groups: int = 2, size: int = 3, **fields: Any) -> RolloutBatch:
    """Groups of environments a and b in turn."""
    return old_form(
        [
            [
                example_rollout(
                    f"{name}-{g}-{m}", float(m), environment="ab"[g % 2], example_id=f"{name}-{g}", **fields
                )
                for m in range(size)
            ]
            for g in range(groups)
        ],
        STEP,
    )


def write(path: Path, *batches: RolloutBatch, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    out = io.BytesIO()
    schema = schemas()["RolloutBatch"][-1].parsed
    fastavro.writer(out, schema, [values_of(b) for b in batches], sync_interval=1, **options)
    path.write_bytes(out.getvalue())


def imported(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    code = main(["import", *map(str, words), "--json"])
    out, err = capsys.readouterr()
    assert err == ""
    return code, json.loads(out)


def rollouts(directory: Path) -> list[Rollout]:
    return [r for path in sorted(directory.rglob("*.avro")) for r in read_rollouts(path.read_bytes())]


def test_every_rollout_of_a_directory_is_in_the_target_by_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "old" / "one.avro", batch("x"), batch("y", groups=3))
    write(tmp_path / "old" / "deep" / "two.avro", batch("z", groups=1), codec="deflate")
    code, report = imported(capsys, tmp_path / "old", tmp_path / "new")
    assert code == 0
    assert report["complete"]
    assert report["batches"] == 3
    assert report["environments"]["a"] == {"read": 12, "refused": 0, "there_before": 0, "written": 12, "in_target": 12}
    assert report["environments"]["b"] == {"read": 6, "refused": 0, "there_before": 0, "written": 6, "in_target": 6}
    made = rollouts(tmp_path / "new")
    assert Counter(r.environment for r in made) == {"a": 12, "b": 6}
    assert len({r.uid for r in made}) == 18
    assert {r.metadata.weight_step for r in made} == {-1}, "their own, which each of them has"
    assert (tmp_path / "new" / "deep" / "two.avro").exists()


def test_a_repeated_import_writes_only_missing_and_changed_rollouts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    write(old / "one.avro", batch("x"))
    write(old / "two.avro", batch("y"))
    imported(capsys, old, new)
    before = {path.name: path.stat().st_ino for path in new.glob("*.avro")}
    (new / "two.avro").unlink()
    write(old / "three.avro", batch("z"))
    code, report = imported(capsys, old, new)
    assert (code, report["total"]) == (
        0,
        {"read": 18, "refused": 0, "there_before": 6, "written": 12, "in_target": 18},
    )
    assert (new / "one.avro").stat().st_ino == before["one.avro"]
    write(old / "one.avro", batch("x"), batch("w"))
    code, report = imported(capsys, old, new)
    assert (code, report["total"]["there_before"], report["total"]["written"]) == (0, 12, 12)
    made = rollouts(new)
    assert len(made) == len({r.uid for r in made}) == 24


def test_a_file_of_another_source_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As of two hosts that both wrote rollouts.avro."""
    for host in ("a", "b"):
        write(tmp_path / host / "rollouts.avro", batch(host))
    imported(capsys, tmp_path / "a", tmp_path / "new")
    made = (tmp_path / "new" / "rollouts.avro").read_bytes()
    assert main(["import", str(tmp_path / "b"), str(tmp_path / "new"), "--json"]) == 2
    assert "has 6 rollouts that this source lacks" in capsys.readouterr().err
    assert (tmp_path / "new" / "rollouts.avro").read_bytes() == made


def test_damaged_and_invalid_rollouts_are_named_and_counted_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "old"
    write(old / "good.avro", batch("x"))
    write(old / "torn.avro", batch("y"), batch("z"))
    torn = old / "torn.avro"
    torn.write_bytes(torn.read_bytes()[:-40])
    (old / "pickle.avro").write_bytes(b"\x80\x04N.")
    write(old / "senseless.avro", batch("s", groups=1), batch("t", groups=1, logprobs=np.ones(4, "<f4")))
    (old / "notes.txt").write_text("not a file of rollouts")
    code, report = imported(capsys, old, tmp_path / "new")
    assert code == 1
    assert not report["complete"]
    assert report["environments"][""] == {"read": 2, "refused": 2, "there_before": 0, "written": 0, "in_target": 0}
    assert report["environments"]["a"]["read"] == report["environments"]["a"]["in_target"] + 3
    assert len(rollouts(tmp_path / "new")) == 6 + 6 + 3
    named = {refused["place"].split("@")[0]: refused["reason"] for refused in report["refused"]}
    assert set(named) == {"torn.avro", "pickle.avro", "senseless.avro"}
    assert "above 0" in named["senseless.avro"]
    assert json.loads((tmp_path / "new" / "import.json").read_text())["refused"] == report["refused"]


def test_a_file_of_something_else_is_named_batch_by_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = {"type": "record", "name": "RolloutBatch", "fields": [{"name": "n", "type": "int"}]}
    with open(tmp_path / "other.avro", "wb") as file:
        fastavro.writer(file, schema, [{"n": 1}, {"n": 2}])
    code, report = imported(capsys, tmp_path / "other.avro", tmp_path / "new")
    assert code == 1
    assert [refused["reason"] for refused in report["refused"]] == ["not a RolloutBatch: KeyError: 'groups'"] * 2


def test_a_writers_own_schema_with_lists_and_null_metadata_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = {"type": "array", "items": "int"}
    floats = {"type": "array", "items": "float"}
    rollout = {
        "type": "record",
        "name": "Rollout",
        "fields": [
            {"name": "env_name", "type": "string"},
            {"name": "env_example_id", "type": "string"},
            {"name": "prompt_tokens", "type": numbers},
            {"name": "response_tokens", "type": numbers},
            {"name": "response_logprobs", "type": floats},
            {"name": "token_rewards", "type": floats},
            {"name": "episode_reward", "type": "float"},
        ],
    }
    group = {"type": "record", "name": "RolloutGroup", "fields": [{"name": "rollouts", "type": _list(rollout)}]}
    schema = {
        "type": "record",
        "name": "RolloutBatch",
        "fields": [{"name": "groups", "type": _list(group)}, {"name": "metadata", "type": ["null", "string"]}],
    }
    values = {
        "env_name": "math",
        "env_example_id": "q",
        "prompt_tokens": [1],
        "response_tokens": [2, 3],
        "response_logprobs": [-1.0, -2.0],
        "token_rewards": [0.0, 1.0],
        "episode_reward": 1.0,
    }
    with open(tmp_path / "own.avro", "wb") as file:
        fastavro.writer(file, schema, [{"groups": [{"rollouts": [values, values]}], "metadata": None}])
    code, _told = imported(capsys, tmp_path / "own.avro", tmp_path / "new")
    assert code == 0
    first, second = rollouts(tmp_path / "new")
    assert first.tokens.tolist() == [1, 2, 3]
    assert (first.metadata.worker_id, first.metadata.timestamp, first.metadata.weight_step) == ("", 0.0, -1)
    assert (first.group_id, first.group_size) == (second.group_id, 2)


def _list(item: Any) -> dict[str, Any]:
    return {"type": "array", "items": item}


def test_a_dry_run_counts_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "one.avro", batch("x"))
    code, report = imported(capsys, tmp_path / "one.avro", tmp_path / "new", "--dry-run")
    assert (code, report["total"]["read"], report["total"]["written"]) == (0, 6, 0)
    assert not (tmp_path / "new").exists()


def test_a_target_that_lost_a_rollout_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "old" / "one.avro", batch("x"))
    imported(capsys, tmp_path / "old", tmp_path / "new")
    made = tmp_path / "new" / "one.avro"
    identity = container_metadata(made.read_bytes())["rollstream.source"].decode()
    kept = read_rollouts(made.read_bytes())[1:]
    with open(made, "wb") as file:
        write_rollouts(file, kept, {"rollstream.source": identity})
    code, report = imported(capsys, tmp_path / "old", tmp_path / "new")
    assert (code, report["complete"]) == (1, False)
    assert report["environments"]["a"]["in_target"] == 2


def test_the_text_output_is_a_table_with_the_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "old" / "one.avro", batch("x"))
    (tmp_path / "old" / "two.avro").write_bytes(b"no")
    assert main(["import", str(tmp_path / "old"), str(tmp_path / "new")]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[0].split("  ")[0] == "environment"
    assert "(unreadable)" in out
    assert "6 of 7 rollouts read are in" in out
    assert "refused two.avro@" in err
    (tmp_path / "old" / "two.avro").unlink()
    assert main(["import", str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    assert "all 6 rollouts read are in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "target", "why"),
    [
        ("nowhere", "new", "does not exist"),
        ("empty", "new", "has no file whose name ends in .avro"),
        ("old", "old/new", "is inside"),
        ("old", "old/one.avro", "is inside"),
        ("old/one.avro", "old/one.avro", "is a file"),
    ],
)
def test_invalid_arguments_name_the_valid_ones(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    source: str,
    target: str,
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("old/one.avro"), batch("x"))
    Path("empty").mkdir()
    assert main(["import", source, target]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("content", ["rollouts of the old form", "something else"])
def test_a_file_that_no_import_made_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    source, target = tmp_path / "old" / "one.avro", tmp_path / "new"
    write(source, batch("x"))
    write(target / "one.avro", batch("y"))
    if content == "something else":
        (target / "one.avro").write_text(content)
    before = source.read_bytes(), (target / "one.avro").read_bytes()
    # The directory of the source itself holds such a file, too.
    for directory in (target, source.parent):
        assert main(["import", str(source), str(directory)]) == 2
        err = capsys.readouterr().err
        assert f"{directory / 'one.avro'} is not a file of an earlier import" in err
        assert "import into another directory" in err
    assert (source.read_bytes(), (target / "one.avro").read_bytes()) == before
    assert not (target / "import.json").exists()


def test_the_page_shows_how_old_data_becomes_a_file_that_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [snippet] = blocks(section(page("trainers"), "From batch metadata to rollout metadata"), "python")
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "docs/trainers.md", "exec"), {})
    code, report = imported(capsys, "old.avro", "new")
    assert (code, report["environments"]["math"]["written"]) == (0, 1)
    [made] = rollouts(tmp_path / "new")
    assert (made.metadata.worker_id, made.metadata.weight_step) == ("host_1", 12)
