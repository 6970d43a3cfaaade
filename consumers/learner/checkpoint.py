"""Checkpoints: parameters, optimizer, rng, step, position in the log and recent steps records, all in one atomic save.

A save that did not finish leaves nothing that `restore` would look at.
"""

import base64
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from consumers.learner.checkpoint_paths import learner_directory
from consumers.learner.config import CheckpointConfig
from consumers.learner.progress import Progress
from consumers.learner.step import TrainState
from topics.codec import decode_as, encode
from topics.errors import StateRefused
from topics.records import LearnerStep

for _noisy in ("absl", "orbax"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A checkpoint as it was saved."""

    state: TrainState
    progress: Progress
    fingerprint: dict[str, str]


class Checkpoints:
    """The checkpoints of one learner. Saves run in the background; `wait` before relying on one."""

    def __init__(self, config: CheckpointConfig, run: str, learner: str) -> None:
        self.directory = learner_directory(config.directory, run, learner)
        self._reference = self.directory.with_name(f"{learner}.reference")
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(max_to_keep=config.keep, create=True),
        )

    @property
    def steps(self) -> list[int]:
        """Steps of which there is a complete checkpoint, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, progress: Progress, fingerprint: dict[str, str]) -> None:
        """Begin to save; the arrays are copied before this returns. A checkpoint of the same step is left as it is.

        Several processes call it together; what is said of the log is the lead's.
        """
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        # Copies, because the next update gives the state's buffers away while the save still runs.
        arrays = _copy(state._asdict())
        meta = {
            "position": progress.position,
            "oldest": progress.oldest,
            "trained_total": progress.trained_total,
            "skipped_total": progress.skipped_total,
            "recent_steps": [base64.b64encode(encode(record)).decode() for record in progress.recent_steps],
            "fingerprint": fingerprint,
        }
        self._manager.save(
            step, args=ocp.args.Composite(state=ocp.args.StandardSave(arrays), meta=ocp.args.JsonSave(meta))
        )

    def wait(self) -> None:
        """Return when every save begun is complete on disk."""
        self._manager.wait_until_finished()

    def restore(self, like: TrainState, step: int | None = None) -> Restored | None:
        """The newest complete checkpoint, or None before the first; or the one of `step`.

        `like` is an abstract state, or one with arrays: it gives shapes and where arrays go. Another number of
        processes or devices than at the time of the save may read it. Raises StateRefused when there is none of `step`.
        """
        if step is not None and step not in self.steps:
            raise StateRefused(f"no checkpoint of step {step} in {self.directory}; there are {self.steps}")
        step = self._manager.latest_step() if step is None else step
        if step is None:
            return None
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like._asdict())
        found: Any = self._manager.restore(
            step,
            args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract), meta=ocp.args.JsonRestore()),
        )
        meta: dict[str, Any] = found["meta"]
        return Restored(
            state=TrainState(**found["state"]),
            progress=Progress(
                position=meta["position"],
                oldest=meta.get("oldest", -1),  # Checkpoints of before there were rollout buffers have none.
                trained_total=meta["trained_total"],
                skipped_total=meta["skipped_total"],
                recent_steps=tuple(decode_as(LearnerStep, base64.b64decode(record)) for record in meta["recent_steps"]),
            ),
            fingerprint=meta["fingerprint"],
        )

    def save_reference(self, params: Mapping[str, jax.Array]) -> None:
        """Keep parameters beside the checkpoints for as long as they are; complete when it returns.

        Several processes call it together.
        """
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(self._reference, dict(params), force=True)

    def reference(self, like: Mapping[str, Any]) -> dict[str, jax.Array]:
        """The parameters kept. `like` gives shapes and where they go. Raises StateRefused when there are none."""
        if not self._reference.exists():
            raise StateRefused(
                f'learner.reference is "initial", but {self._reference} is gone or was never kept: this learner began '
                "without it; give another learner.name, or the directory of a checkpoint"
            )
        with ocp.StandardCheckpointer() as checkpointer:
            found: dict[str, jax.Array] = checkpointer.restore(self._reference, dict(like))
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._manager.close()


@jax.jit
def _copy(arrays: dict[str, Any]) -> dict[str, Any]:
    copies: dict[str, Any] = jax.tree.map(jnp.copy, arrays)
    return copies
