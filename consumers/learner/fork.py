"""Carries a learner's checkpoint over to another run, where a learner of its own goes on from it. Needs no JAX.

The copy is whole or not there. Steps of the learner it comes from are not the new one's: their records stay behind.
"""

import json
import shutil
import uuid
from pathlib import Path

from topics.errors import ConfigurationError, StateRefused

_META = Path("meta") / "metadata"


def checkpoint_steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints of a learner, ascending; a save under way has another name."""
    return sorted(int(path.name) for path in directory.glob("*") if path.name.isdecimal() and (path / _META).exists())


def copy_checkpoint(source: Path, step: int, target: Path) -> None:
    """Copy the checkpoint of a step between directories of learners, without the steps it would send again, and the
    reference parameters where some are kept.

    To do it twice is to do it once. Raises StateRefused, naming the steps there are, where there is none of this step,
    ConfigurationError where the target holds another.
    """
    there = checkpoint_steps(source)
    if step not in there:
        raise StateRefused(f"no checkpoint of step {step} in {source}; {_there_are(there)}")
    held = checkpoint_steps(target)
    if held:
        if held != [step]:
            raise ConfigurationError(
                f"{target} holds checkpoints of steps {held} already; give another run, or another learner.name"
            )
        return
    target.mkdir(parents=True, exist_ok=True)
    # Beside the target: a rename is whole or not, and a learner never looks there.
    copy = target.parent / f".fork-{target.name}-{uuid.uuid4().hex[:8]}"
    try:
        _copy_reference(source, target)
        shutil.copytree(source / str(step), copy)
        meta = json.loads((copy / _META).read_text(encoding="utf-8"))
        (copy / _META).write_text(json.dumps({**meta, "recent_steps": []}), encoding="utf-8")
        copy.rename(target / str(step))
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _copy_reference(source: Path, target: Path) -> None:
    """Carry over what the KL term compares with, which lies beside the checkpoints, where there is one."""
    before, after = (directory.with_name(f"{directory.name}.reference") for directory in (source, target))
    if before.exists():
        shutil.rmtree(after, ignore_errors=True)
        shutil.copytree(before, after)


def _there_are(steps: list[int]) -> str:
    return f"there are those of steps {steps}" if steps else "there is none; learner.checkpoint.directory says where"
