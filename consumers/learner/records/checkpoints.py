"""Checkpoints: parameters, optimizer, rng, step, position in the log and recent steps, in one atomic save.

`restore` never sees an unfinished save.
"""

import base64
import json
import logging
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from rollstream.consumers.learner.checkpoint_paths import META, LearnerPosition, is_remote, learner_directory
from rollstream.consumers.learner.config import CheckpointConfig
from rollstream.consumers.learner.reproducibility import differences
from rollstream.consumers.learner.training.train_step import TrainState
from rollstream.topics.errors import Fenced, RollstreamError, StateRefused, brief
from rollstream.topics.files.atomic_files import DirectoryLock, StoreError, lock_directory
from rollstream.topics.heartbeats import beating_during
from rollstream.topics.logs import event
from rollstream.topics.records import LearnerStep
from rollstream.topics.wire.codec import decode_as, encode

logger = logging.getLogger(__name__)
PATIENCE_S = 90.0
"""Less than supervisor.ready_timeout_s, because the learner reports no progress meanwhile."""
_POLL_S = 0.1


class CheckpointOwnership:
    """Lets the newest owner of a directory save. A lock is held during each save, and its file names the owner.

    A new owner waits for a save in progress, though not for ever; after that, the process before it saves no more.
    Without locks, as at a URL, nothing is promised.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        # Next to the directory, in which orbax expects checkpoints; no learner has a name that begins with a dot.
        self._file = directory.with_name(f".{directory.name}.lock")
        self._id = uuid.uuid4().hex

    def take(self) -> DirectoryLock | None:
        """Become the owner once no process is saving, or after `PATIENCE_S`; return the lock, None without one. Raises
        StoreError if the file cannot be written."""
        lock = self._lock()
        try:
            self._file.write_text(self._id)
        except OSError as error:
            if lock is not None:
                lock.release()
            raise StoreError(
                f"{self._file} cannot be written ({error.strerror or error}); check the free space and the permissions "
                "there, or set learner.checkpoint.directory to another disk"
            ) from error
        return lock

    def lock(self) -> DirectoryLock | None:
        """Return the lock to hold during a save, None without one. Raises Fenced if another process is the owner."""
        lock = self._lock()
        if lock is not None and self._file.read_text() != self._id:
            lock.release()
            raise Fenced(
                f"another process of this name has begun to write the checkpoints in {self._directory}, so this one "
                "saves none; start it again if it is the only learner of this name, or give each learner a name"
            )
        return lock

    def _lock(self) -> DirectoryLock | None:
        """Take the lock once it is free. A process that was suspended during a save may hold it for ever, so after
        `PATIENCE_S` this process goes on without it, as on a file system without locks."""
        deadline, waits = time.monotonic() + PATIENCE_S, False
        while True:
            try:
                return lock_directory(self._file.parent, self._file.name)
            except StoreError as error:
                if not isinstance(error.__cause__, BlockingIOError) or time.monotonic() > deadline:
                    event(logger, "checkpoints_without_lock", level=logging.WARNING, error=str(error))
                    return None
            if not waits:
                event(logger, "checkpoints_locked", directory=str(self._directory))
                waits = True
            time.sleep(_POLL_S)


_MOST_NAMED = 5
SAVE_TIMEOUT_S = 24 * 3600
"""Seconds after which a save fails: far more than a slow store needs for a large model."""

for _noisy in ("absl", "orbax"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)


class CheckpointFailed(RollstreamError):
    """A checkpoint could not be written: its disk is full, gone, read-only, or too slow."""

    exit_code = 1


@dataclass(frozen=True, kw_only=True)
class RestoredCheckpoint:
    """Contents of a checkpoint."""

    state: TrainState
    position: LearnerPosition
    fingerprint: dict[str, str]


class Checkpoints:
    """The checkpoints of one learner. Saves run in the background; call `wait` before relying on a save."""

    def __init__(self, config: CheckpointConfig, run: str, learner: str, *, owner: bool = False) -> None:
        """The learner itself is the `owner`: remains of interrupted saves are deleted, and an earlier owner saves no
        more. This may wait for a save of the earlier owner. At a URL there are no locks, so nothing is deleted.
        """
        self.directory = learner_directory(config.directory, run, learner)
        self._reference = self.directory.with_name(f"{learner}.reference")
        local_lead = jax.process_index() == 0 and not is_remote(self.directory)
        self._ownership = CheckpointOwnership(self.directory) if owner and local_lead else None
        self._releasing: threading.Thread | None = None
        lock = None if self._ownership is None else self._ownership.take()
        self._async = ocp.AsyncOptions(timeout_secs=SAVE_TIMEOUT_S)
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=config.keep,
                create=True,
                cleanup_tmp_directories=lock is not None,
                async_options=self._async,
            ),
        )
        if lock is not None:
            lock.release()

    @property
    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, position: LearnerPosition, fingerprint: dict[str, str]) -> None:
        """Start to save; the arrays are copied before this returns. An existing checkpoint of the step is kept.

        All processes of a learner call this together; the lead's position is saved. Raises CheckpointFailed, also if
        the previous save failed, and Fenced if a later learner of this name owns the checkpoints.
        """
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        # Copies, because the next update reuses the buffers of the state while the save still runs.
        arrays = _copy(state._asdict())
        meta = {
            "position": position.position,
            "oldest": position.oldest,
            "trained_total": position.trained_total,
            "skipped_total": position.skipped_total,
            "recent_steps": [base64.b64encode(encode(record)).decode() for record in position.recent_steps],
            "fingerprint": fingerprint,
        }
        args = ocp.args.Composite(state=ocp.args.StandardSave(arrays), meta=ocp.args.JsonSave(meta))
        with self._writing(), self._locked():
            self._manager.save(step, args=args)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock, if this process has the right to it, until the save that begins in the block has ended."""
        if self._releasing is not None:
            self._releasing.join()
        lock = None if self._ownership is None else self._ownership.lock()
        try:
            yield
        finally:
            if lock is not None:
                self._releasing = threading.Thread(target=self._release_after_save, args=(lock,), daemon=True)
                self._releasing.start()

    def _release_after_save(self, lock: DirectoryLock) -> None:
        with lock, suppress(OSError, ValueError):  # The error of a save is raised where the save is awaited.
            self._manager.wait_until_finished()

    def wait(self) -> None:
        """Wait until every save is complete on disk. Raises CheckpointFailed."""
        with self._writing():
            self._manager.wait_until_finished()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with beating_during("training"):  # a large checkpoint may take many minutes
                yield
        except TimeoutError as error:  # an OSError
            raise CheckpointFailed(
                f"no checkpoint could be written to {self.directory} within {SAVE_TIMEOUT_S / 3600:g} h "
                f"({brief(error)}); set learner.checkpoint.directory to a faster store; a restarted learner resumes "
                f"from the newest checkpoint"
            ) from error
        except (OSError, ValueError) as error:  # orbax raises both if the operating system refuses
            raise CheckpointFailed(
                f"no checkpoint could be written to {self.directory} ({brief(error)}); make room there, or "
                f"move the checkpoints to another disk and set learner.checkpoint.directory to it; a restarted learner "
                f"resumes from the newest checkpoint"
            ) from error

    def restore(
        self, like: TrainState, step: int | None = None, *, fingerprint: Mapping[str, str] | None = None
    ) -> RestoredCheckpoint | None:
        """Restore the checkpoint of `step`, by default the newest complete one; return None if there is none yet.

        `like` is an abstract state, or one with arrays: it gives shapes and shardings. The number of processes and
        devices may differ from those of the save. Raises StateRefused if there is no checkpoint of `step`, or if its
        arrays are not like these; the error then names the settings that differ from those of `fingerprint`.
        """
        if step is not None and step not in self.steps:
            raise StateRefused(
                f"no checkpoint of step {step} in {self.directory}; there are checkpoints of steps {self.steps}"
            )
        step = self._manager.latest_step() if step is None else step
        if step is None:
            return None
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like._asdict())
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), meta=ocp.args.JsonRestore())
        try:
            with beating_during("training"):
                saved: Any = self._manager.restore(step, args=args)
        except (ValueError, KeyError, TypeError) as error:  # orbax raises any of them for a tree of other arrays
            # The error, too: a file that cannot be read has nothing to do with settings that happen to differ.
            causes = (self._changed_since(step, fingerprint), " ".join(brief(error).split()))
            raise StateRefused(
                f"the checkpoint of step {step} in {self.directory} cannot be restored into the model and optimizer of "
                f"this learner ({'; '.join(filter(None, causes))}); if model or optimizer have changed, restore the "
                f"settings that it was saved with, or start another run, or another learner.name with "
                f"learner.take_over. If its files are damaged, delete them: the learner then resumes from the "
                f"checkpoint before it"
            ) from error
        meta: dict[str, Any] = saved["meta"]
        return RestoredCheckpoint(
            state=TrainState(**saved["state"]),
            position=LearnerPosition(
                position=meta["position"],
                oldest=meta["oldest"],
                trained_total=meta["trained_total"],
                skipped_total=meta["skipped_total"],
                recent_steps=tuple(decode_as(LearnerStep, base64.b64decode(record)) for record in meta["recent_steps"]),
            ),
            fingerprint=meta["fingerprint"],
        )

    def _changed_since(self, step: int, fingerprint: Mapping[str, str] | None) -> str:
        """Settings and code that differ from those of a checkpoint, as text; "" if none are known."""
        if fingerprint is None:
            return ""
        try:
            saved = json.loads((self.directory / str(step) / META).read_text())["fingerprint"]
        except (OSError, ValueError, KeyError):  # The files are damaged, too.
            return ""
        changed = differences(saved, fingerprint).items()
        texts = [f"{name} was {then}, is {now}" for name, (then, now) in changed if name.startswith("learner.")]
        # Settings that decide which arrays there are come first.
        texts.sort(key=lambda text: not text.startswith(("learner.model.", "learner.optimizer.")))
        code = ["the code that settings name has changed"] if saved.get("code") != fingerprint.get("code") else []
        return "; ".join(code + texts[:_MOST_NAMED])

    def save_reference(self, params: Mapping[str, jax.Array]) -> None:
        """Save reference parameters next to the checkpoints; the save is complete when this returns.

        All processes of a learner call this together. Raises CheckpointFailed.
        """
        with self._writing(), ocp.StandardCheckpointer(async_options=self._async) as checkpointer:
            checkpointer.save(self._reference, dict(params), force=True)

    def reference(self, like: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Restore the reference parameters; `like` gives shapes and shardings. Raises StateRefused without them."""
        if not self._reference.exists():
            raise StateRefused(
                f'learner.reference is "initial", but {self._reference} does not exist: it was deleted, or this '
                "learner began with another reference; give the directory of a checkpoint, or another learner.name "
                "with learner.take_over"
            )
        with ocp.StandardCheckpointer() as checkpointer:
            params: dict[str, jax.Array] = checkpointer.restore(self._reference, dict(like))
        return params

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._writing():
            self._manager.close()


@jax.jit
def _copy(arrays: dict[str, Any]) -> dict[str, Any]:
    copies: dict[str, Any] = jax.tree.map(jnp.copy, arrays)
    return copies
