"""Forks a learner: copies its checkpoint to another run, where a new learner continues from it. Needs no JAX.

The copy is complete or absent. The new learner does not inherit the steps of the old one, so their records are not
copied.
"""

import json
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from rollstream.consumers.learner.checkpoint_paths import COMMITTED, META, checkpoint_steps, is_remote
from rollstream.topics.errors import ConfigurationError, StateRefused


def copy_checkpoint(source: Path, step: int, target: Path, changed: Mapping[str, int] = MappingProxyType({})) -> None:
    """Copy the checkpoint of a step, without its recent steps, and the reference parameters, if any.

    `changed` replaces fields of the learner's position, such as its places in another index, under the names that
    `places_in` returns.

    Copying twice has no further effect. Raises StateRefused, naming the available steps, if there is no checkpoint of
    this step, ConfigurationError if the target holds another checkpoint or a copy with other places.
    """
    available = checkpoint_steps(source)
    if step not in available:
        raise StateRefused(f"no checkpoint of step {step} in {source}; {_there_are(available)}")
    held = checkpoint_steps(target)
    if held:
        if held != [step]:
            raise ConfigurationError(
                f"{target} already holds checkpoints of steps {held}; give another run, or another learner.name"
            )
        if (target / str(step) / META).read_text() != _without_steps(source / str(step) / META, changed):
            raise ConfigurationError(
                f"{target} already holds a copy of step {step} from another source, or for another index; give another "
                "run, or another learner.name"
            )
        return
    if is_remote(target):
        _copy_reference(source, target)
        _copy_to_store(source / str(step), target / str(step), changed)
        return
    target.mkdir(parents=True, exist_ok=True)
    # Copied next to the target, where no learner reads; the rename to the target is atomic.
    copy = target.parent / f".fork-{target.name}-{uuid.uuid4().hex[:8]}"
    try:
        _copy_reference(source, target)
        shutil.copytree(source / str(step), copy)
        (copy / META).write_text(_without_steps(copy / META, changed), encoding="utf-8")
        copy.rename(target / str(step))
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _copy_to_store(source: Path, target: Path, changed: Mapping[str, int]) -> None:
    """Copy a checkpoint to an object store, which cannot rename: the file that marks it complete is written last."""
    _copy_files(source, target, but=(META, COMMITTED))
    (target / META).write_text(_without_steps(source / META, changed))
    (target / COMMITTED).write_text("")


def _copy_files(source: Path, target: Path, *, but: tuple[str, ...] = ()) -> None:
    for path in source.iterdir():
        below = tuple(name.removeprefix(f"{path.name}/") for name in but)
        if path.is_dir():
            _copy_files(path, target / path.name, but=below)
        elif path.name not in but:
            (target / path.name).write_bytes(path.read_bytes())


def _without_steps(meta: Path, changed: Mapping[str, int]) -> str:
    return json.dumps({**json.loads(meta.read_text()), **changed, "recent_steps": []})


def places_in(source: Path, step: int) -> dict[str, int]:
    """The places in the index that a checkpoint names: `position`, and `oldest` if batches may be read again."""
    meta = json.loads((source / str(step) / META).read_text())
    return {name: int(meta[name]) for name in ("position", "oldest") if meta[name] >= 0}


def _copy_reference(source: Path, target: Path) -> None:
    """Copy the reference parameters of the KL term, which are next to the checkpoints, if there are any."""
    before, after = (directory.with_name(f"{directory.name}.reference") for directory in (source, target))
    if not before.exists():
        return
    if is_remote(target):
        _copy_files(before, after)
    else:
        shutil.rmtree(after, ignore_errors=True)
        shutil.copytree(before, after)


def _there_are(steps: list[int]) -> str:
    return f"there are checkpoints of steps {steps}" if steps else "there is none; check learner.checkpoint.directory"
