"""Readers of a slice buffer while it is written, and copies that are saved and loaded."""

import os
import threading
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from rollstream.consumers.buffers.slices import buffer as slice_buffer
from rollstream.consumers.buffers.slices import store as slice_store
from rollstream.consumers.buffers.slices.buffer import EpisodeSliceBuffer, NothingToDraw
from rollstream.consumers.buffers.slices.state import DECODER
from rollstream.consumers.buffers.storage import journal as journals
from rollstream.consumers.buffers.storage.journal import JournalFollower
from rollstream.consumers.buffers.storage.segments import SegmentFiles
from rollstream.topics.files import atomic_files
from rollstream.topics.files.atomic_files import StoreError
from tests.support.slice_rings import (
    content,
    feed,
    journal_of,
    ring,
)


def test_a_reader_follows_the_writer_and_draws_nothing_that_it_has_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreError, match="nothing was stored there"):
        ring(tmp_path, read_only=True)
    with ring(tmp_path) as writer, ring(tmp_path, read_only=True) as reader:
        with pytest.raises(NothingToDraw):
            reader.sample(1)
        offset = 0
        for target in (10, 400, 460):
            while offset < target:
                feed(writer, offset)
                offset += 1
            if target == 400:
                with monkeypatch.context() as patch:
                    patch.setattr(journals, "LEAST_BYTES", 10)
                    writer.flush()
            assert reader.size() == writer.size()
            content(reader, tmp_path)
        with pytest.raises(StoreError, match="was opened read-only"):
            feed(reader, offset)
        gather, behind = slice_buffer.gather, []

        def slow(*arguments: Any, **options: Any) -> Any:
            """The writer drops everything that was drawn, before the first sample is read."""
            nonlocal offset
            if not behind:
                behind.append(offset)
                while offset < behind[0] + 400:
                    feed(writer, offset)
                    offset += 1
            return gather(*arguments, **options)

        monkeypatch.setattr(slice_buffer, "gather", slow)
        with ring(tmp_path, read_only=True) as late:
            content(late, tmp_path)
        assert offset > behind[0]


def test_a_reader_on_another_machine_has_what_was_flushed_and_draws_no_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot know which later steps the writer's machine has kept, but follows every flush."""
    boot = "writer's"
    monkeypatch.setattr(slice_store, "boot_id", lambda: boot)
    with ring(tmp_path) as writer:
        boot = "reader's"
        feed(writer, 0)
        with ring(tmp_path, read_only=True) as reader:
            for begin, flushed, stop in ((1, 100, 150), (150, 250, 300), (300, 500, 550)):
                for offset in range(begin, stop):
                    feed(writer, offset)
                    if offset + 1 == flushed:
                        writer.flush()
                    if offset + 1 >= flushed:
                        assert reader.position == {0: flushed}
                        content(reader, tmp_path)
            writer.flush()
            assert reader.position == writer.position == {0: 550}
            assert reader.size() == writer.size()


def test_a_reader_of_a_journal_does_not_depend_on_the_position_that_forked_processes_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file, opened = Path.open, list[IO[bytes]]()

    def noted(path: Path, *args: Any, **options: Any) -> IO[bytes]:
        opened.append(open_file(path, *args, **options))
        return opened[-1]

    with ring(tmp_path) as writer:
        feed(writer, 0)
        monkeypatch.setattr(Path, "open", noted)
        with closing(JournalFollower(journal_of(tmp_path), DECODER)) as follower:
            shared = opened[-1].fileno()
            assert follower.read().records
            assert os.lseek(shared, 0, os.SEEK_CUR) == 0, "it does not move it either"
            os.lseek(shared, 5, os.SEEK_SET)
            feed(writer, 1)
            assert [type(record).__name__ for record in follower.read().records] == ["AddRecord"]
            assert follower.read().records == []


def test_every_answer_of_a_reader_is_of_what_the_writer_has_added(tmp_path: Path) -> None:
    arrays = {"number": np.arange(6)}
    with EpisodeSliceBuffer(tmp_path, 100, 4) as writer, EpisodeSliceBuffer(tmp_path, 100, 4, read_only=True) as reader:
        with pytest.raises(NothingToDraw):
            reader.check_drawable(4)
        writer.add(arrays, at=(0, 0), episode="e", last=False)
        assert reader.is_open("e")
        writer.add(arrays, at=(0, 1))
        assert reader.position == {0: 2}
        writer.add(arrays, at=(0, 2), episode="e")
        reader.check_drawable(12)
        reader.close()
        writer.add(arrays, at=(0, 3))
        assert reader.position == {0: 3}, "a closed reader stays as it was"


def test_a_reader_follows_a_journal_that_is_replaced_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may give the inode of a deleted journal to the next one."""
    with ring(tmp_path) as writer, ring(tmp_path, read_only=True) as reader:
        for offset in range(300):
            feed(writer, offset)
        monkeypatch.setattr(journals, "LEAST_BYTES", -(2**20))
        offset = 300
        for replacements in range(1, 6):
            assert reader.size() == writer.size()
            for _time in range(replacements):
                feed(writer, offset)
                offset += 1
            assert reader.stats()["total_steps_added"] == writer.stats()["total_steps_added"]
            content(reader, tmp_path)


def test_a_reader_does_not_repeat_its_draws_when_the_journal_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ring(tmp_path) as writer, ring(tmp_path, read_only=True) as reader, ring(tmp_path, read_only=True) as other:
        for offset in range(50):
            feed(writer, offset)
        reader.sample(30)
        expected = [other.sample(30)["offset"].tolist() for _ in range(2)][1]
        monkeypatch.setattr(journals, "LEAST_BYTES", -(2**20))
        writer.flush()
        assert reader.sample(30)["offset"].tolist() == expected
        assert reader.stats()["draws"] == 2


def test_a_saved_copy_opens_by_itself_and_can_be_loaded(tmp_path: Path) -> None:
    with ring(tmp_path / "ring") as buffer:
        for offset in range(300):
            feed(buffer, offset)
        for _time in range(2):
            buffer.save(tmp_path / "saved")
            assert len(list((tmp_path / "saved").glob("*.journal"))) == 1
        saved = content(buffer, tmp_path / "ring")
        for offset in range(300, 500):
            feed(buffer, offset)
        buffer.load(tmp_path / "saved")
        assert content(buffer, tmp_path / "ring") == saved, "draws, too"
        assert feed(buffer, 300)
        later = content(buffer, tmp_path / "ring")
    with ring(tmp_path / "saved") as copy:
        assert content(copy, tmp_path / "saved") == saved
        copy.save(tmp_path / "saved")
        assert feed(copy, 300)
        assert content(copy, tmp_path / "saved") == later
    with ring(tmp_path / "ring") as buffer:
        assert buffer.position == {0: 301}
        buffer.load(tmp_path / "ring")
        assert buffer.position == {0: 301}
    with EpisodeSliceBuffer(tmp_path / "small", 100) as small:
        with pytest.raises(StoreError, match="is a ring of 3000 steps, but this ring has 100"):
            small.load(tmp_path / "saved")
        with pytest.raises(StoreError, match="nothing was stored there"):
            small.load(tmp_path / "nowhere")
        assert small.size() == 0


def test_other_threads_add_and_draw_while_a_copy_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They drop all segments that are being copied."""
    write = SegmentFiles.write
    with ring(tmp_path / "ring") as buffer:
        for offset in range(300):
            feed(buffer, offset)
        before = content(buffer, tmp_path / "ring")

        def others() -> None:
            for offset in range(300, 700):
                feed(buffer, offset)
            buffer.sample(2)

        def slow(*arguments: Any) -> None:
            monkeypatch.undo()
            write(*arguments)
            thread = threading.Thread(target=others)
            thread.start()
            thread.join(60)
            assert not thread.is_alive(), "it waits for the copy"

        monkeypatch.setattr(SegmentFiles, "write", slow)
        buffer.save(tmp_path / "saved")
        assert buffer.position == {0: 700}
    with ring(tmp_path / "saved") as saved:
        assert content(saved, tmp_path / "saved") | {"drawn": 0} == before | {"drawn": 0}, "as when the copy began"


def test_a_failed_save_leaves_the_earlier_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ring(tmp_path / "ring") as buffer:
        feed(buffer, 0)
        buffer.save(tmp_path / "saved")
        feed(buffer, 1)
        names = sorted(os.listdir(tmp_path / "saved"))

        def full(*_arguments: Any) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(StoreError, match="No space left on device"):
            buffer.save(tmp_path / "saved")
        monkeypatch.undo()
    with ring(tmp_path / "saved") as saved:
        assert saved.position == {0: 1}
        assert sorted(os.listdir(tmp_path / "saved")) == names


def test_a_copy_whose_name_may_not_be_on_disk_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ring(tmp_path / "ring") as buffer:
        feed(buffer, 0)
        buffer.save(tmp_path / "saved")
        feed(buffer, 1)

        def failing(_directory: Path) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(atomic_files, "sync_directory", failing)
        with pytest.raises(StoreError, match=r"slices\.journal is written, but its directory cannot be synced"):
            buffer.save(tmp_path / "saved")
        monkeypatch.undo()
    with ring(tmp_path / "saved") as saved:
        assert saved.position == {0: 2}
