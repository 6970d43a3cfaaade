"""The group store as a view of a log: filled by position, equal after crashes, restarts and a lost disk."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.consumers.buffers.groups import view
from rollstream.consumers.buffers.groups.batch_files import read_batch
from rollstream.consumers.buffers.groups.config import GroupStoreConfig
from rollstream.consumers.buffers.groups.store import GroupReplayBuffer
from rollstream.consumers.buffers.groups.view import GroupStore
from rollstream.consumers.buffers.storage.journal import write_state
from rollstream.consumers.grouping.makers.batch_maker import FifoBatchMaker, MakerContext
from rollstream.consumers.grouping.testing import example_rollout
from rollstream.pipeline.tools.groups import summary, text_of
from rollstream.topics.files.atomic_files import StoreError
from rollstream.topics.records import GroupCancelled, Mark, Rollout, RolloutMetadata, same
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.rl_examples import examples_of
from tests.support.batches import random_batch
from tests.support.paths import ROOT

CONFIG = GroupStoreConfig(target_group_size=3, max_per_replica=2, seal_timeout_s=5.0)


@dataclass(frozen=True)
class GroupEntry:
    """A record of a log of two partitions."""

    partition: int
    offset: int
    at_ms: int
    value: bytes | None


def log_of(picks: list[tuple[int, int, int, int]]) -> list[GroupEntry]:
    """A log of picks (partition, example, member, seconds since the one before); member 9 is not a rollout."""
    ends, now, collected = [0, 0], 1000, []
    for partition, example, member, wait_s in picks:
        now += wait_s * 1000
        name = f"{partition}/{example}"
        rollout = example_rollout(
            f"{name}-{member}",
            float(member),
            environment="ab"[example % 2],
            example_id=name,
            metadata=RolloutMetadata(replica_id=f"r{member % 2}"),
        )
        value = encode(rollout) if member < 9 else encode(Mark(kind="deadline"))
        collected.append(GroupEntry(partition, ends[partition], now, value))
        ends[partition] += 1
    return collected


def feed(store: GroupStore, entries: list[GroupEntry]) -> None:
    for entry in entries:
        store.read(entry.partition, entry.offset, entry.at_ms, entry.value)


def content(store: GroupStore) -> dict[str, list[tuple[str, tuple[str, ...], float | None]]]:
    """The stored groups by environment, without an order between partitions."""
    return {
        name: sorted((g.group_id, tuple(r.uid for r in g.rollouts), g.sealed_ts) for g in buffer.groups())
        for name, buffer in store.environments.items()
    }


ENTRIES = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 1]),
        st.integers(0, 1),
        st.sampled_from([0, 1, 2, 3, 4, 6, 8, 9]),
        st.sampled_from([0, 0, 0, 1, 6]),
    ),
    min_size=15,
    max_size=25,
).map(log_of)


@settings(max_examples=settings().max_examples // 10)
@given(ENTRIES, st.data())
def test_crashes_restarts_and_a_lost_disk_do_not_change_the_content(
    tmp_path_factory: pytest.TempPathFactory, entries: list[GroupEntry], data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("view")
    whole = GroupStore(directory / "whole", CONFIG)
    feed(whole, entries)
    crashed = GroupStore(directory / "crashed", CONFIG)
    for at, entry in enumerate(entries):
        feed(crashed, [entry])
        then = data.draw(st.sampled_from(["", "", "", "save", "crash"]))
        if then == "save":
            crashed.save()
        elif then == "crash":
            # Unsaved state is gone; partitions may be read in another order than before.
            crashed.release()
            crashed = GroupStore(directory / "crashed", CONFIG)
            again = [e for e in entries[: at + 1] if e.offset >= crashed.position.get(e.partition, 0)]
            feed(crashed, sorted(again, key=lambda e: e.partition) if data.draw(st.booleans()) else again)
    assert content(crashed) == content(whole)
    assert crashed.position == whole.position
    assert len(list(directory.glob("crashed/*/part-*"))) == whole.size(), "nothing is written twice, or left over"
    crashed.close()
    restored = GroupStore(directory / "crashed", CONFIG)
    assert content(restored) == content(whole)
    opened = [b.stats()["open_rollouts"] for b in restored.environments.values()]
    assert sum(opened) == sum(b.stats()["open_rollouts"] for b in whole.environments.values())


def test_time_is_that_of_the_log_and_of_each_partition_by_itself(tmp_path: Path) -> None:
    store = GroupStore(tmp_path, CONFIG)
    feed(store, log_of([(0, 0, 0, 0), (0, 0, 1, 0), (1, 0, 0, 9)]))
    assert store.size() == 0, "time moved on the other partition"
    feed(store, [GroupEntry(0, 2, 7_000, encode(Mark(kind="deadline")))])
    [group] = store.environments["a"].groups()
    assert group.sealed_ts == 7.0
    assert [(source.partition, source.offset) for _rollout, source in group.members] == [(0, 0), (0, 1)]


def test_a_record_below_the_position_is_skipped_and_other_records_are_counted(tmp_path: Path) -> None:
    store = GroupStore(tmp_path, CONFIG)
    entries = log_of([(0, 0, 0, 0), (0, 0, 9, 0)])
    feed(store, [*entries, *entries, GroupEntry(0, 2, 0, b"poison"), GroupEntry(0, 3, 0, None)])
    senseless = encode(example_rollout("u", float("nan")))
    feed(store, [GroupEntry(0, 4, 0, senseless), GroupEntry(0, 5, 0, encode(example_rollout("u", environment="")))])
    counts = {name: count for name, count in store.stats().items() if name != "environments"}
    assert counts == {"rollouts": 1, "other": 1, "unreadable": 4}
    assert store.position == {0: 6}


def test_an_invalid_record_creates_no_folder_and_no_name_of_an_environment_ends_the_view(tmp_path: Path) -> None:
    gone = GroupCancelled(environment="c", example_id="0", policy_version=0, group_size=2, group_id="g", uids=("u",))
    records = [
        example_rollout("u", float("nan"), environment="b"),
        gone,
        replace(gone, uids=()),
        replace(gone, environment="d", group_size=-1),
        example_rollout("u", environment="position.journal"),
    ]
    with GroupStore(tmp_path) as store:
        feed(store, records_of(records))
        counts = {name: count for name, count in store.stats().items() if name != "environments"}
    assert counts == {"rollouts": 1, "cancellations": 1, "unreadable": 3}
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "c", "%70osition.journal", "position.journal"}
    with GroupStore(tmp_path) as again:
        assert again.position == {0: 5}
        assert set(again.environments) == {"c", "position.journal"}
        assert again.environments["position.journal"].stats()["open_rollouts"] == 1


def test_a_group_that_is_on_disk_is_not_written_again(tmp_path: Path) -> None:
    entries = log_of([(0, example, member, 0) for example in range(2) for member in range(3)])
    files = []
    for _filled_again in range(2):
        store = GroupStore(tmp_path, CONFIG)
        feed(store, entries)
        assert store.size() == 2
        files.append({path.name: path.stat().st_ino for path in tmp_path.rglob("part-*")})
        store.release()
    assert files[0] == files[1]


def test_a_rollout_that_a_group_refused_before_it_sealed_is_refused_again_after_a_crash(tmp_path: Path) -> None:
    entries = log_of([(0, 0, member, 0) for member in (0, 2, 4, 1)])
    for _life in range(2):
        store = GroupStore(tmp_path, CONFIG)
        feed(store, entries)
        figures = store.environments["a"].stats()
        assert (figures["groups"], figures["replica_full"], figures["open_rollouts"]) == (1, 1, 0)
        store.release()


def test_a_delivered_rollout_is_not_offered_again_after_a_crash(tmp_path: Path) -> None:
    def opened() -> GroupStore:
        return GroupStore(
            tmp_path,
            CONFIG,
            maker_of=lambda _environment: FifoBatchMaker(MakerContext(partition=0, seed=0, batch_bytes=2**30)),
        )

    entries = log_of([(0, 0, member, 0) for member in range(3)])
    store = opened()
    feed(store, entries)
    assert store.environments["a"].create_and_store_batch(3) is not None
    store.release()
    again = opened()
    feed(again, entries)
    assert again.environments["a"].stats()["held"] == 0
    assert again.environments["a"].create_and_store_batch(3) is None


def test_a_copy_saved_elsewhere_is_loaded_unchanged_and_continues(tmp_path: Path) -> None:
    entries = log_of([(0, example, member, 0) for example in range(3) for member in range(4)])
    store = GroupStore(tmp_path / "store", CONFIG)
    feed(store, entries[:6])
    store.save(tmp_path / "copy")
    feed(store, entries[6:])
    store.save()
    loaded = GroupStore(tmp_path / "other", CONFIG)
    loaded.load(tmp_path / "copy")
    assert loaded.position == {0: 6}
    feed(loaded, entries)
    assert content(loaded) == content(store)
    store.save(tmp_path / "copy")
    assert content(GroupStore(tmp_path / "copy", CONFIG)) == content(store), "saved again over the first"
    with pytest.raises(StoreError, match="is not empty"):
        loaded.load(tmp_path / "copy")
    with pytest.raises(StoreError, match="contains no store"):
        GroupStore(tmp_path / "new", CONFIG).load(tmp_path / "nowhere")


def test_a_copy_leaves_other_stores_and_files_below_both_roots_alone(tmp_path: Path) -> None:
    entries = log_of([(0, 0, member, 0) for member in range(2)])
    users = [tmp_path / "main" / "a" / "open-houses.parquet", tmp_path / "main" / "backup" / "open-day.parquet"]
    with GroupStore(tmp_path / "other", CONFIG) as other, GroupStore(tmp_path / "main", CONFIG) as main:
        feed(other, entries)
        feed(main, entries)
        other.save(tmp_path / "main" / "backup" / "other")
        for path in users:
            path.write_bytes(b"of the user")
        for _save in range(2):
            main.save(tmp_path / "main" / "backup")
    for copy in ("backup", "backup/other"):
        with GroupStore(tmp_path / "main" / copy, CONFIG) as store:
            assert store.environments["a"].stats()["open_rollouts"] == 2
    GroupStore(tmp_path / "main", CONFIG).close()
    assert all(path.read_bytes() == b"of the user" for path in users)
    assert not (tmp_path / "main" / "backup" / "backup").exists()


def test_a_store_that_is_saved_while_it_is_loaded_elsewhere_is_whole_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = log_of([(0, example, member, 0) for example in range(4) for member in range(4)])
    store = GroupStore(tmp_path / "store", CONFIG)
    feed(store, entries[:6])
    store.save()
    copied, saved = view.copy_file, []

    def saving(source: Path, target: Path) -> None:
        if not saved:
            saved.append(True)
            feed(store, entries[:10])
            store.save()
        copied(source, target)

    monkeypatch.setattr(view, "copy_file", saving)
    loaded = GroupStore(tmp_path / "other", CONFIG)
    loaded.load(tmp_path / "store")
    monkeypatch.undo()
    assert loaded.position == {0: 6}, "as it was when the copy began"
    feed(loaded, entries)
    feed(store, entries)
    assert content(loaded) == content(store)


def test_other_threads_read_on_while_a_copy_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = log_of([(0, example, member, 0) for example in range(4) for member in range(4)])
    store = GroupStore(tmp_path / "store", CONFIG)
    feed(store, entries[:6])
    copied, others = view.copy_file, []

    def slow(source: Path, target: Path) -> None:
        if not others:
            others.append(threading.Thread(target=feed, args=(store, entries)))
            others[0].start()
            others[0].join(60)
            assert not others[0].is_alive(), "it waits for the copy"
        copied(source, target)

    monkeypatch.setattr(view, "copy_file", slow)
    store.save(tmp_path / "copy")
    monkeypatch.undo()
    assert others
    copy = GroupStore(tmp_path / "copy", CONFIG)
    assert copy.position == {0: 6}
    feed(copy, entries)
    assert content(copy) == content(store)


def test_training_batches_of_the_log_are_written_once_and_read_back(tmp_path: Path) -> None:
    batches = [random_batch(number) for number in range(3)]
    for _filled_again in range(2):
        store = GroupStore(tmp_path)
        feed(store, [GroupEntry(0, n, n, encode(batch)) for n, batch in enumerate(batches)])
        store.release()
    actual = sorted(map(read_batch, (tmp_path / "batches").glob("batch_*.parquet")), key=lambda b: b.number)
    assert len(actual) == 3
    for stored, batch in zip(actual, batches, strict=True):
        assert stored.metadata["batch_id"] == batch.batch_id
        assert all(map(same, stored.examples, examples_of(batch)))


# ---------------------------------------------------------------------- one writer, many readers


def test_a_store_is_filled_with_the_same_policy_versions_each_time(tmp_path: Path) -> None:
    log = [encode(example_rollout(f"x{v}-{m}", policy_version=v, group_size=3)) for v in (1, 2) for m in range(3)]

    def fill(directory: str, *versions: int) -> dict[str, Any]:
        with GroupStore(tmp_path / directory, GroupStoreConfig(accept_policy_versions=versions)) as store:
            feed(store, [GroupEntry(0, offset, 1000, value) for offset, value in enumerate(log)])
            return {**summary(store, "main"), "records": len(log), "batch_records": 0}

    first = fill("some", 2, 1, 2)
    assert (first["not_accepted"], "left out" in text_of(first)) == (0, False)
    fill("some", 1, 2)
    some = fill("one", 1)
    assert (some["not_accepted"], some["environments"]["env"]["groups"]) == (3, 1)
    assert "3 rollouts of other policy versions were left out" in text_of(some)
    for versions, named in (((), "all policy versions"), ((1, 2), "policy versions 1, 2")):
        with pytest.raises(StoreError, match=f"of policy versions 1, not of {named}.*use an empty directory"):
            fill("one", *versions)
    assert GroupStore(tmp_path / "one", read_only=True).size() == 1
    fill("one", 1)
    assert fill("all")["environments"]["env"]["groups"] == 2
    with pytest.raises(StoreError, match="of all policy versions, not of policy versions 1"):
        fill("all", 1)


def test_a_second_writer_is_refused_and_a_reader_beside_a_writer_sees_what_was_saved(tmp_path: Path) -> None:
    entries = log_of([(0, example, member, 0) for example in range(3) for member in range(4)])
    writer = GroupStore(tmp_path, CONFIG)
    feed(writer, entries[:6])
    writer.save()
    unfinished = tmp_path / "a" / "part.1-2.unfinished"
    unfinished.write_bytes(b"in the making")
    before = sorted(tmp_path.rglob("*"))
    for open_again in (lambda: GroupStore(tmp_path, CONFIG), lambda: GroupReplayBuffer(tmp_path, "a")):
        with pytest.raises(StoreError, match="is being written by another"):
            open_again()
    reader = GroupStore(tmp_path, CONFIG, read_only=True)
    assert (reader.position, content(reader)) == (writer.position, content(writer))
    assert sorted(tmp_path.rglob("*")) == before, "the writer's unfinished files included"
    feed(writer, entries[6:])
    assert reader.size() == 1
    with pytest.raises(StoreError, match="read-only"):
        feed(reader, entries[6:])
    writer.close()
    with pytest.raises(StoreError, match="is closed"):
        feed(writer, entries)
    assert GroupStore(tmp_path, CONFIG).size() == 3
    with pytest.raises(StoreError, match="contains no store"):
        GroupStore(tmp_path / "mistyped", read_only=True)


def test_a_view_and_a_store_filled_by_hand_do_not_write_to_folders_of_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = log_of([(0, 0, member, 0) for member in (0, 1)])
    with GroupStore(tmp_path, CONFIG) as view_of_run:
        feed(view_of_run, entries)
    monkeypatch.chdir(tmp_path / "a")
    for open_by_hand in (lambda: GroupReplayBuffer(tmp_path, "a"), lambda: GroupReplayBuffer(".")):
        with pytest.raises(StoreError, match=r"is part of a view of a run.*give another directory"):
            open_by_hand()
    assert GroupReplayBuffer(tmp_path, "a", read_only=True).size() == 0
    with GroupStore(tmp_path, CONFIG) as view_of_run:
        assert view_of_run.environments["a"].stats()["open_rollouts"] == 2, "nothing was deleted"
    with GroupReplayBuffer(tmp_path, "b", CONFIG) as by_hand:
        by_hand.add_rollout(example_rollout("u", environment="b"))
    with GroupStore(tmp_path, CONFIG) as view_of_run:
        with pytest.raises(StoreError, match=r"b/open\.journal belongs to a store filled by hand.*fill another"):
            feed(view_of_run, [replace(e, offset=2) for e in log_of([(0, 1, 0, 0)])])
        assert view_of_run.position == {0: 2}
    assert GroupReplayBuffer(tmp_path, "b", CONFIG).stats()["open_rollouts"] == 1


def test_two_processes_that_fill_one_root_duplicate_nothing(tmp_path: Path) -> None:
    entries = log_of([(0, 0, member, 0) for member in range(3)])
    writer = GroupStore(tmp_path, CONFIG)
    feed(writer, entries[:2])
    code = "import sys; from rollstream.consumers.buffers.groups.view import GroupStore; GroupStore(sys.argv[1])"
    second = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    assert "StoreError" in second.stderr
    assert "is being written by another" in second.stderr
    feed(writer, entries[2:])
    writer.close()
    assert [len(g.rollouts) for g in GroupStore(tmp_path, read_only=True).environments["a"].groups()] == [3]


# ---------------------------------------------------------------------- the producer's groups


def members_of(group_id: str, size: int) -> list[Rollout]:
    return [example_rollout(f"{group_id}-{n}", float(n), group_id=group_id, group_size=size) for n in range(size)]


def records_of(records: Sequence[object], step_ms: int = 1) -> list[GroupEntry]:
    return [GroupEntry(0, offset, offset * step_ms, encode(record)) for offset, record in enumerate(records)]


def test_with_defaults_groups_of_a_log_are_the_producers_whatever_their_size_and_order(tmp_path: Path) -> None:
    one, other = members_of("one", 16), members_of("other", 16)
    mixed = [rollout for pair in zip(one, other, strict=True) for rollout in pair]
    store = GroupStore(tmp_path)
    feed(store, records_of(mixed, step_ms=60_000))
    groups = list(store.environments["env"].groups())
    assert [{r.group_id for r in group.rollouts} for group in groups] == [{"one"}, {"other"}]
    assert [len(group.rollouts) for group in groups] == [16, 16], "the time it takes splits none"


def test_a_group_whose_other_members_are_cancelled_seals_also_after_a_crash(tmp_path: Path) -> None:
    late, missing = members_of("late", 4), members_of("missing", 2)
    cancelled = GroupCancelled(
        environment="env", example_id="0", policy_version=0, group_size=4, group_id="late", uids=("late-0", "late-3")
    )
    gone = replace(cancelled, group_id="missing", group_size=2, uids=("missing-0", "missing-1"))
    entries = records_of([cancelled, cancelled, late[0], late[1], gone, replace(cancelled, uids=("late-1",)), late[2]])
    store = GroupStore(tmp_path)
    for entry in entries:
        feed(store, [entry])
        store.close()
        store = GroupStore(tmp_path)
    [group] = store.environments["env"].groups()
    assert [r.uid for r in group.rollouts] == ["late-1", "late-2"]
    assert store.environments["env"].stats()["open_groups"] == 0
    feed(store, [GroupEntry(0, len(entries) + n, 99, encode(rollout)) for n, rollout in enumerate(missing)])
    assert store.size() == 2, "what was said of a group is forgotten with it"


def test_groups_and_training_batches_of_a_run_share_a_root_each_with_its_position(tmp_path: Path) -> None:
    batches = [random_batch(number) for number in range(2)]
    store = GroupStore(tmp_path)
    feed(store, records_of(members_of("one", 2)))
    for offset, batch in enumerate(batches):
        store.read(0, offset, 5, encode(batch), topic="batches")
    store.close()
    again = GroupStore(tmp_path)
    assert (dict(again.position), dict(again.position_of("batches"))) == ({0: 2}, {0: 2})
    again.read(0, 1, 5, encode(batches[1]), topic="batches")
    assert again.stats() == {"environments": again.stats()["environments"]}, "it is below the position"
    assert again.size() == 1
    assert len(list((tmp_path / "batches").glob("batch_*.parquet"))) == 2


def held(store: GroupStore) -> list[object]:
    """Content of a store: its positions and, for each environment, the groups in order with the uids of their rollouts,
    and the numbers of open groups and open rollouts."""
    return [
        store.position,
        [
            (
                name,
                [(g.group_id, g.example_id, tuple(r.uid for r in g.rollouts), g.sealed_ts) for g in buffer.groups()],
                [buffer.stats()[figure] for figure in ("open_groups", "open_rollouts")],
            )
            for name, buffer in store.environments.items()
        ],
    ]


def flipped(path: Path, every: int = 1) -> Iterator[int]:
    """Flip each bit of a file in turn, or every so many; the file is restored afterwards."""
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), every):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        yield bit
    path.write_bytes(whole)


def stored(root: Path, saved: int, later: int) -> GroupStore:
    """A store with saved groups of three, one open group, and some groups that sealed since."""
    store = GroupStore(root, CONFIG)
    open_one = [(0, 0, 7, 0)]
    feed(store, log_of([(0, 2 * n + 2, member, 0) for n in range(saved) for member in range(3)] + open_one))
    store.save()
    all_of_it = [*range(saved), *range(saved + 1, saved + 1 + later)]
    entries = log_of([(0, 2 * n + 2, member, 0) for n in all_of_it for member in range(3)])
    feed(store, [replace(entry, offset=entry.offset + 1) for entry in entries[3 * saved :]])
    store.release()
    return store


def test_every_flipped_bit_of_the_index_of_a_view_is_an_error_or_changes_nothing(tmp_path: Path) -> None:
    """It changes nothing in the record of a group that sealed after the save, and seals again."""
    stored(tmp_path, saved=2, later=1)
    with closing(GroupStore(tmp_path, CONFIG, read_only=True)) as store:
        whole = held(store)
    refused, opened, texts = [], [], set[str]()
    for bit in flipped(tmp_path / "a" / "groups.journal", 9):
        try:
            with closing(GroupStore(tmp_path, CONFIG, read_only=True)) as store:
                assert held(store) == whole, f"bit {bit}"
            opened.append(bit)
        except StoreError as error:
            texts.add(str(error))
            refused.append(bit)
    assert 0 < len(opened) < len(refused)
    assert max(refused) < min(opened)
    assert all("groups.journal is damaged" in text and "fill a new directory" in text for text in texts)


def test_every_flipped_bit_of_a_state_is_an_error_that_names_the_file_and_deletes_nothing(tmp_path: Path) -> None:
    stored(tmp_path / "view", saved=1, later=1)
    with GroupReplayBuffer(tmp_path / "hand", "env") as buffer:
        buffer.add_rollout(example_rollout("u"))
    files = sorted(tmp_path.rglob("*.parquet"))
    for _ in flipped(tmp_path / "view" / "position.journal", 37):
        with pytest.raises(StoreError, match=r"position\.journal is damaged.*restore it"):
            GroupStore(tmp_path / "view", CONFIG)
        with pytest.raises(StoreError, match=r"position\.journal is damaged.*restore it"):
            GroupStore(tmp_path / "new", CONFIG).load(tmp_path / "view")
    for _ in flipped(tmp_path / "hand" / "env" / "open.journal", 37):
        with pytest.raises(StoreError, match=r"open\.journal is damaged.*restore it"):
            GroupReplayBuffer(tmp_path / "hand", "env")
    assert sorted(tmp_path.rglob("*.parquet")) == files
    assert held(GroupStore(tmp_path / "view", CONFIG))[0] == {0: 4}
    assert GroupReplayBuffer(tmp_path / "hand", "env").stats()["open_rollouts"] == 1


def test_a_position_file_without_positions_is_refused(tmp_path: Path) -> None:
    write_state(tmp_path / "position.journal", {"topics": {"rollouts": 3}}, ())
    with pytest.raises(StoreError, match=r"position\.journal is damaged"):
        GroupStore(tmp_path)
