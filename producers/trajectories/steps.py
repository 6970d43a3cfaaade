"""One chunk step of environments that run side by side, as whoever plays them has it, and its arrays by path.

What cannot become a row of a trajectory is refused by the name of the array, before anything of it is kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topics.arrays import dtype_name
from topics.errors import RecordError
from topics.trajectories import CONTROL_MODES, Tree, flatten

Leaves = Mapping[str, NDArray[Any]]
"""Arrays [B, ...] by path."""

_ARRAYS = (
    "actions",
    "intervene_flags",
    "rewards",
    "terminations",
    "truncations",
    "dones",
    "prev_logprobs",
    "prev_values",
    "versions",
)
_TREES = ("forward_inputs", "curr_obs", "next_obs")


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkStepResult:
    """What one chunk step of B environments gave. Arrays are [B, ...]; what is None or empty is not recorded.

    A chunk of several actions has them along the second axis. `next_obs` is what the step led to, so at the end of an
    episode the last observation of it, not the first of the next; `curr_obs` is what was acted on.
    """

    actions: Any
    terminations: Any = None
    """bool: the task was over."""
    truncations: Any = None
    """bool: a limit cut the episode off."""
    dones: Any = None
    """bool: the episode ended here; by default where it was terminated or truncated."""
    rewards: Any = None
    """None where somebody else gives them."""
    curr_obs: Any = None
    """A tree of arrays, or one array."""
    next_obs: Any = None
    prev_logprobs: Any = None
    """Log-probabilities of the actions, as they were sampled."""
    prev_values: Any = None
    versions: Any = None
    """int: policy versions that acted; below 0 where none did."""
    intervene_flags: Any = None
    """bool: whether a human acted."""
    forward_inputs: Tree = field(default_factory=dict)
    others: Tree = field(default_factory=dict)
    """Further arrays, by names of yours."""
    control_modes: Any = 0
    """Who acts in an episode that begins with this step: 0 the policy, 1 a human; one number, or one for each of B."""
    model_weights_id: str = ""
    """Name of the weights that acted."""


def leaves_of(step: ChunkStepResult, width: int) -> dict[str, NDArray[Any]]:
    """The arrays of a step by path, each [B, ...] where B is `width`; dones are among them.

    Raises RecordError naming all that is no such array, and where nothing says whether episodes ended.
    """
    tree = {name: value for name in _ARRAYS if (value := getattr(step, name)) is not None}
    tree |= {name: value for name in _TREES if (value := getattr(step, name)) is not None and not _is_empty(value)}
    if "dones" not in tree:
        ends = [np.asarray(tree[name], bool) for name in ("terminations", "truncations") if name in tree]
        if not ends:
            raise RecordError("a chunk step has none of dones, terminations and truncations; give those you have")
        tree["dones"] = np.logical_or.reduce(ends)
    twice = sorted(tree.keys() & step.others.keys())
    if twice:
        raise RecordError(f"others of a chunk step hold {', '.join(twice)}, which have fields of their own")
    found = {path: np.asarray(leaf) for path, leaf in flatten({**tree, **step.others}).items()}
    wrong = [why for path, array in found.items() if (why := _problem(path, array, width))]
    if wrong:
        raise RecordError(f"a chunk step of {width} environments: {'; '.join(wrong)}")
    return found


def control_modes_of(step: ChunkStepResult, width: int) -> list[int]:
    """Who acts, by column. Raises RecordError for what is no control mode of each of them."""
    given = np.asarray(step.control_modes)
    modes = [given.item()] * width if given.ndim == 0 else given.tolist()
    if given.dtype.kind not in "biu" or given.ndim > 1 or len(modes) != width or not set(modes) <= set(CONTROL_MODES):
        raise RecordError(f"control_modes is {step.control_modes!r}; give 0 (policy) or 1 (human), or {width} of them")
    return [int(mode) for mode in modes]


def _is_empty(value: Any) -> bool:
    return isinstance(value, Mapping) and not value


def _problem(path: str, array: NDArray[Any], width: int) -> str:
    if array.ndim < 1 or len(array) != width:
        return f"{path} has shape {array.shape}, which must begin with [{width}]"
    try:
        dtype_name(array.dtype)
    except RecordError as error:
        return f"{path}: {error}"
    return ""
