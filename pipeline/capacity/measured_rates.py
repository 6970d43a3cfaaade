"""Rates of one process of each kind, measured by `make bench`: those in the package, or a user's own.

The rates in the package were measured on the machine that `machine` describes. Other machines have other rates.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rollstream.topics.errors import ConfigurationError

_ROWS = ("produce", "group-and-batch", "restore", "feed", "weights-1024", "weights-files-1024")
"""Rows of the benchmark that a plan needs."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRate:
    """Records of one size that one process handles in a second."""

    per_s: float
    size_bytes: int

    def seconds(self, size_bytes: float) -> float:
        """Seconds for one record of another size: proportional to its bytes if it is larger, the same if smaller,
        because some of the cost is per record."""
        return max(1.0, size_bytes / self.size_bytes) / self.per_s


@dataclass(frozen=True, kw_only=True)
class MeasuredRates:
    """Rates of the processes of a run, and of one broker."""

    machine: str
    produce: MeasuredRate
    """Rollouts that one process sends."""
    group: MeasuredRate
    """Rollouts that one grouping process groups, batches and commits."""
    restore: MeasuredRate
    """Rollouts in flight that one grouping process reads again when it takes over their partitions."""
    feed: MeasuredRate
    """Rollouts of batches that one learner process fetches, checks and packs."""
    publish_bytes_per_s: float
    """Bytes of a policy version, divided by the time to publish it to the log and to load it in another process."""
    publish_to_files_bytes_per_s: float
    """The same rate for a version in the files of a directory."""
    broker_bytes_per_s: float
    """Bytes of records that one broker receives from one client in a second."""


def shipped() -> MeasuredRates:
    """Return the rates in the package."""
    return of_benchmark(json.loads(resources.files(__package__).joinpath("measured_rates.json").read_text("utf-8")))


def from_file(path: Path) -> MeasuredRates:
    """Read the rates in the output of `make bench ARGS="--full --json"`.

    Raises ConfigurationError if a rate is missing, as some are without --full.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8").strip().rpartition("\n")[2])
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read as JSON of a benchmark: {error}") from error
    return of_benchmark(document, str(path))


def of_benchmark(document: Any, where: str = "the package") -> MeasuredRates:
    """Return the rates in a document that the benchmark printed. Raises ConfigurationError if one is missing."""
    try:
        rows: dict[str, Mapping[str, Any]] = {row["name"]: row for row in document["rows"]}
        missing = [name for name in _ROWS if name not in rows]
        if missing:
            raise ConfigurationError(
                f"{where} lacks the rows {', '.join(missing)}; measure them with "
                f'`make bench ARGS="--json {" ".join(f"--only {name}" for name in _ROWS)}"`'
            )
        rates = {name: _rate(rows[name]) for name in _ROWS}
        produced = rows["produce"]
        machine = document["machine"]
        load = f"load {machine['load_before']} before" if "load_before" in machine else "load not recorded"
        return MeasuredRates(
            machine=str(machine.get("name") or f"{machine['cores']} cores shared with the broker, {load}"),
            produce=rates["produce"],
            group=rates["group-and-batch"],
            restore=rates["restore"],
            feed=rates["feed"],
            publish_bytes_per_s=rates["weights-1024"].per_s * rates["weights-1024"].size_bytes,
            publish_to_files_bytes_per_s=rates["weights-files-1024"].per_s * rates["weights-files-1024"].size_bytes,
            broker_bytes_per_s=float(produced["baseline_rollouts_per_s"]) * int(produced["size_bytes"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f'{where} is not the JSON of a benchmark ({error!r}); `make bench ARGS="--full --json"` prints it'
        ) from error


def _rate(row: Mapping[str, Any]) -> MeasuredRate:
    rate = MeasuredRate(per_s=float(row["rollouts_per_s"]), size_bytes=int(row["size_bytes"]))
    if not (rate.per_s > 0 and rate.size_bytes > 0):
        raise ValueError(f"row {row['name']} has no rate")
    return rate
