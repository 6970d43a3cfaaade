"""Loops of other projects, reduced to what moves rollouts: `python -m tests.bench.kills.loops ROLE FOLDER ARGS`.

Nothing is generated and nothing computed. Parameters are the list of uids they were trained on, in checkpoints that
are replaced atomically every five steps. docs/comparison.md names the sources that each loop follows.
"""

import json
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

from rollstream.topics.files.atomic_files import write_bytes

GROUP = 4
STEP_GROUPS = 8
CHECKPOINT_EVERY = 5
AHEAD_GROUPS = 4 * STEP_GROUPS
"""Groups that workers may be ahead of the trainer, as every loop bounds it."""
EPISODE_S = 0.02
WORKERS = 2
_POLL_S = 0.01
_clock = threading.Event()
"""Never set: waiting for it passes the time of an episode, or of a poll."""
Group = list[str]


class Folder:
    """The files of one loop."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.witness, self.streams = path / "witness", path / "streams"
        self.checkpoint, self.progress = path / "checkpoint.json", path / "streams" / "progress"

    @property
    def stopping(self) -> bool:
        """Whether workers must begin no further group."""
        return (self.path / "stop").exists()

    def produced(self) -> list[str]:
        """Every uid that was handed over; a worker notes a uid once the call that takes it has returned."""
        lines = (line for file in self.witness.glob("*") for line in file.read_text().splitlines(keepends=True))
        return [uid for line in lines if line.endswith("\n") for uid in line.split()]

    def load(self) -> dict[str, Any]:
        """The newest checkpoint."""
        state: dict[str, Any] = {"step": 0, "lineage": [], "groups": 0}
        return json.loads(self.checkpoint.read_text()) if self.checkpoint.exists() else state

    def trained_groups(self) -> int:
        """Groups that the trainer of these streams has trained on."""
        return int(self.progress.read_text() or 0) if self.progress.exists() else 0


def episodes(folder: Folder, hand_over: Callable[[Group], None], ahead: Callable[[], int]) -> None:
    """Play groups, hand each over, and note it, until the loop stops; wait while too many are ahead of the trainer."""
    incarnation, number = uuid.uuid4().hex[:8], 0
    folder.witness.mkdir(exist_ok=True)
    with (folder.witness / incarnation).open("w") as witness:
        while not folder.stopping:
            if ahead() >= AHEAD_GROUPS:
                _clock.wait(_POLL_S)
                continue
            _clock.wait(EPISODE_S)
            group = [f"{incarnation}-{number}-{member}" for member in range(GROUP)]
            hand_over(group)
            witness.write(" ".join(group) + "\n")
            witness.flush()
            number += 1


class Trainer:
    """Takes groups, eight a step, and keeps the uids that its parameters were trained on."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.state = folder.load()
        self._waiting: list[Group] = []
        self.taken = 0
        """Groups taken since the start of this process."""

    def take(self, group: Group) -> None:
        """Take a group, and train once a step is full."""
        self._waiting.append(group)
        self.taken += 1
        if len(self._waiting) == STEP_GROUPS:
            self.step()

    def step(self) -> None:
        """Train on the waiting groups, and save a checkpoint after every fifth step."""
        self.state["lineage"] += [uid for group in self._waiting for uid in group]
        self.state["groups"] += len(self._waiting)
        self.state["step"] += 1
        self._waiting = []
        if self.state["step"] % CHECKPOINT_EVERY == 0:
            self.save()

    def save(self) -> None:
        """Replace the checkpoint."""
        write_bytes(self._folder.checkpoint, json.dumps(self.state).encode())

    def finish(self) -> None:
        """Train on the rest, and save."""
        if self._waiting:
            self.step()
        self.save()


# ---------------------------------------------------------------------- streams of JSON lines, as in PipelineRL


def append(path: Path) -> Callable[[object], None]:
    """Return a function that appends a line to a stream and flushes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a")

    def write(value: object) -> None:
        file.write(json.dumps(value) + "\n")
        file.flush()

    return write


def lines(path: Path, since: int = 0) -> Iterator[Any]:
    """Yield the values of a stream, without the first `since`; yield None while no further line is complete."""
    file = None
    position = number = 0
    while True:
        if file is None and path.exists():
            file = path.open()
        line = file.readline() if file else ""
        if file and line.endswith("\n"):
            position, number = file.tell(), number + 1
            if number > since:
                yield json.loads(line)
            continue
        if file:
            file.seek(position)
        yield None


def stream_worker(folder: Folder, name: str) -> None:
    """Append groups to the stream of one worker."""
    path = folder.streams / f"actor-{name}.jsonl"
    write, written = append(path), path.read_bytes().count(b"\n")

    def hand_over(group: Group) -> None:
        nonlocal written
        write(group)
        written += 1

    # The workers are equally fast, so each may be ahead by its share.
    episodes(folder, hand_over, lambda: WORKERS * written - folder.trained_groups())
    write("end")


def preprocessor(folder: Folder) -> None:
    """Copy the streams of the workers, from their beginning, to the one that the trainer reads."""
    write = append(folder.streams / "training.jsonl")
    readers = {name: lines(folder.streams / f"actor-{name}.jsonl") for name in range(WORKERS)}
    while readers:
        groups = {name: next(reader) for name, reader in readers.items()}
        for name, group in groups.items():
            if group == "end":
                del readers[name]
            elif group is not None:
                write(group)
        if not any(groups.values()):
            _clock.wait(_POLL_S)
    write("end")


def stream_trainer(folder: Folder, kept: str) -> None:
    """Train on a stream from its beginning or, if it is kept, after the groups that the checkpoint holds."""
    trainer = Trainer(folder)
    since = trainer.state["groups"] if kept == "kept" else 0
    for group in lines(folder.streams / "training.jsonl", since):
        if group == "end":
            break
        if group is None:
            _clock.wait(_POLL_S)
            continue
        trainer.take(group)
        write_bytes(folder.progress, str(since + trainer.taken).encode())
    trainer.finish()


# ---------------------------------------------------------------------- a file for each step, as in prime-rl


def orchestrator(folder: Folder) -> None:
    """Collect groups in memory, and write a file for each step; the step after the checkpoint is the first."""
    held: list[Group] = []
    first: int = folder.load()["step"]
    step, lock = first, threading.Lock()

    def write_step() -> None:
        nonlocal step, held
        step += 1
        write_bytes(folder.streams / f"step_{step}.json", json.dumps(held).encode())
        held = []

    def hand_over(group: Group) -> None:
        with lock:
            held.append(group)
            if len(held) == STEP_GROUPS:
                write_step()

    def ahead() -> int:
        return (step - first) * STEP_GROUPS + len(held) - folder.trained_groups()

    folder.streams.mkdir(exist_ok=True)
    workers = [threading.Thread(target=episodes, args=(folder, hand_over, ahead)) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    write_step()
    write_bytes(folder.streams / "last", str(step).encode())


def step_trainer(folder: Folder) -> None:
    """Wait for the file of each step, and train on it."""
    trainer = Trainer(folder)
    while True:
        path, last = folder.streams / f"step_{trainer.state['step'] + 1}.json", folder.streams / "last"
        ended = last.exists() and trainer.state["step"] >= int(last.read_text())
        if ended:
            break
        try:
            groups: list[Group] = json.loads(path.read_text())
        except FileNotFoundError:
            _clock.wait(_POLL_S)
            continue
        for group in groups:
            trainer.take(group)
        if len(groups) < STEP_GROUPS:
            trainer.step()
        write_bytes(folder.progress, str(trainer.taken).encode())
    trainer.finish()


# ---------------------------------------------------------------------- a queue in one process, as in AReaL


def queue_loop(folder: Folder) -> None:
    """Play groups in threads, and train on them as they come from a queue in memory."""
    results: Queue[Group | None] = Queue()
    trainer = Trainer(folder)

    def play() -> None:
        episodes(folder, results.put, results.qsize)
        results.put(None)

    workers = [threading.Thread(target=play, daemon=True) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    ended = 0
    while ended < WORKERS:
        group = results.get()
        if group is None:
            ended += 1
        else:
            trainer.take(group)
    trainer.finish()


ROLES: dict[str, Callable[..., None]] = {
    "worker": stream_worker,
    "preprocessor": preprocessor,
    "trainer": stream_trainer,
    "orchestrator": orchestrator,
    "step-trainer": step_trainer,
    "loop": queue_loop,
}


def main() -> None:
    """Run one role."""
    role, path, *arguments = sys.argv[1:]
    os.chdir(path)
    ROLES[role](Folder(Path(path)), *arguments)


if __name__ == "__main__":
    main()
