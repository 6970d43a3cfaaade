"""Rules by which a step is computed. They are recorded with the step, so that a replay uses the same rules."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, get_args, get_type_hints

from rollstream.topics.errors import StateRefused
from rollstream.topics.records import LearnerStep


@dataclass(frozen=True, kw_only=True)
class StepRules:
    """The rules of one step. The defaults are the rules of releases that recorded none."""

    sharing: Literal["batches", "rows"] = "batches"
    """How processes share a step: by whole batches, each packed by one process; or by rows, where every process lays
    out the whole step as a single process would, and trains on its rows of each microbatch."""

    attention: Literal["whole_rows", "causal"] = "whole_rows"
    """Keys that a block of queries is compared with, in rows whose scores are too many to hold at once: all keys of the
    row, or only the keys that at least one query sees."""

    layers: Literal["unrolled", "configured"] = "unrolled"
    """How layers are compiled: each separately, or as learner.layers says."""

    reduction: Literal["compiler", "shares"] = "compiler"
    """How gradients are summed over the devices of a mesh: as the compiler decides; or each device gathers the
    parameters of a layer while it computes the layer, and receives the sum of its share."""

    @classmethod
    def recorded(cls, rules: Mapping[str, str]) -> "StepRules":
        """Return the rules in the record of a step. Raises StateRefused for rules that this release does not know."""
        known = {name: get_args(hint) for name, hint in get_type_hints(cls).items()}
        unknown = [f"{name}={value}" for name, value in rules.items() if value not in known.get(name, ())]
        if unknown:
            raise StateRefused(
                f"a step on record was computed by rules that this release does not know ({', '.join(unknown)}); "
                "use the release that computed it, or a later one"
            )
        return cls(**rules)  # type: ignore[arg-type]

    def to_record(self) -> dict[str, str]:
        """Return the rules as they are put on record."""
        return asdict(self)


NEWEST = StepRules(sharing="rows", attention="causal", layers="configured", reduction="shares")
"""The rules of steps that are computed for the first time."""


def rules_of(record: LearnerStep | None) -> StepRules:
    """Return the rules of a step: those of its `record`, or the newest for a step that is not on record.

    Raises StateRefused for rules that this release does not know.
    """
    return NEWEST if record is None else StepRules.recorded(record.rules)
