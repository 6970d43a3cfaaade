"""Large arrays of rollouts in a store. An array is stored before the record that names it, and checked when it is read.

An object's name is the day on which it was written, UTC, and the BLAKE3 of its bytes. Equal arrays of a day are one
object. A later day's records never name it, so once its day is over, the log tells whether anything still needs it. A
record names no place: only the settings decide which store a process opens.
"""

import calendar
import math
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cache

from blake3 import blake3

from rollstream.topics.config import ArraysConfig
from rollstream.topics.errors import ConfigurationError, DeliveryError, RecordError
from rollstream.topics.files.atomic_files import StoreError
from rollstream.topics.files.stores import Store, check_mounted, fault_of, open_store, shown
from rollstream.topics.records import NamedArray, Rollout, TrainingBatch
from rollstream.topics.records.arrays import STORED_NAME, dtype_of, shape_problem
from rollstream.topics.wire import codec
from rollstream.topics.wire.frame_scanner import ScanFrame, frame_scanner
from rollstream.topics.wire.media import is_medium
from rollstream.topics.wire.rl_examples import IN_THE_RECORD

FOLDER = "arrays"
NAMING = ("dead-letters", "unlabelled", "rollouts", "evals", "batches")
"""Topics whose records may name stored arrays. A record's content moves from left to right only, so whoever reads them
in this order sees each name at least once."""
_REMEMBERED = 4096
"""Number of objects that a producer knows it has written."""
_RETRY_S = 0.2


class ArrayMissing(RecordError):
    """An array that a record names is not in the store, or its bytes are not the ones named."""


class StoredArrays:
    """The arrays of a run in one folder of a store."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store, self._folder = store, folder
        self._written: dict[str, None] = {}

    @classmethod
    def of(cls, run: str, config: ArraysConfig) -> "StoredArrays":
        """Open the arrays of a run. Raises ConfigurationError if kafka.arrays.url is empty or cannot be opened."""
        if not config.url:
            raise ConfigurationError(
                f"records of run {run} name arrays in a store, but kafka.arrays.url is empty; set it as for the "
                "producers of the run"
            )
        return cls(open_store(config.url), f"{run}/{FOLDER}")

    @property
    def url(self) -> str:
        """URL of the folder, without secrets."""
        return f"{shown(self._store.url)}/{self._folder}"

    def put(self, array: NamedArray) -> NamedArray:
        """Store an array that is in a record, and return the array that names it. Raises StoreError."""
        name = f"{day_name(time.time())}/{blake3(array.data).hexdigest()}"
        if name not in self._written:
            self._store.write(self._path(name), array.data)
            self._written[name] = None
            if len(self._written) > _REMEMBERED:
                del self._written[next(iter(self._written))]
        return replace(array, data=b"", stored=name)

    def load(self, array: NamedArray) -> NamedArray:
        """Return an array with its bytes, whether it was stored or not.

        Raises ArrayMissing if the bytes are missing or damaged, and StoreError if the store cannot be read.
        """
        if not array.stored:
            return array
        data = self.read(array.stored)
        if problem := shape_problem(array.shape, dtype_of(array.dtype).itemsize, len(data)):
            raise ArrayMissing(f"{self.url}/{array.stored} is no array of shape {array.shape}: {problem}")
        return replace(array, data=data, stored="")

    def read(self, name: str) -> bytes:
        """Return the bytes of an object. Raises as `load` does."""
        try:
            data = self._store.read(self._path(name))
        except FileNotFoundError:
            check_mounted(self._store, self._folder)
            raise ArrayMissing(f"{self.url}/{name} is missing") from None
        if blake3(data).hexdigest() != name.rpartition("/")[2]:
            raise ArrayMissing(f"{self.url}/{name} is damaged: the BLAKE3 of its {len(data)} bytes differs")
        return data

    def copy_from(self, other: "StoredArrays", names: Iterable[str]) -> list[str]:
        """Store objects of another folder under their names; return why each of the others was not copied, which is
        missing or damaged there. Raises StoreError."""
        problems = []
        for name in names:
            try:
                self._store.write(self._path(name), other.read(name))
            except ArrayMissing as error:
                problems.append(str(error))
        return problems

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every object, by name. Raises StoreError."""
        before = len(self._path(""))
        listed = {name[before:]: file.size_bytes for name, file in self._store.listing(self._folder).items()}
        return {name: size_bytes for name, size_bytes in listed.items() if STORED_NAME.fullmatch(name)}

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects. Raises StoreError."""
        for name in names:
            self._store.delete(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"


class LargeArrays:
    """Stores the large arrays of the rollouts that a producer sends."""

    def __init__(self, run: str, config: ArraysConfig) -> None:
        self._above_bytes = config.above_bytes
        self._arrays = StoredArrays.of(run, config) if config.url else None

    def stored(self, rollout: Rollout, timeout_s: float) -> Rollout:
        """Return a rollout whose large arrays lie in the store; the same rollout if it has none.

        Raises DeliveryError if the store does not take them within `timeout_s`.
        """
        arrays = rollout.token_arrays
        if self._arrays is None or not arrays:
            return rollout
        # The members of a group share an image, so it is an object whatever its size.
        large = [
            name
            for name, array in arrays.items()
            if not array.stored
            and (is_medium(name) or (len(array.data) > self._above_bytes and name not in IN_THE_RECORD))
        ]
        if not large:
            return rollout
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return replace(rollout, token_arrays={**arrays, **{n: self._arrays.put(arrays[n]) for n in large}})
            except (StoreError, OSError) as error:
                if time.monotonic() > deadline:
                    raise DeliveryError(
                        f"rollout {rollout.uid} was not sent: {self._arrays.url} did not take its arrays within "
                        f"{timeout_s:g} s ({fault_of(error)}); check the store and its free space, then send it again"
                    ) from error
                time.sleep(_RETRY_S)


def day_name(time_s: float) -> str:
    """Return the day of a time in seconds since the Unix epoch, UTC, as in names of objects."""
    return time.strftime("%Y%m%d", time.gmtime(time_s))


def day_of(name: str) -> float:
    """Return the beginning of the day on which an object was written, in seconds since the Unix epoch; infinity for a
    day that does not exist."""
    try:
        return float(calendar.timegm(time.strptime(name[:8], "%Y%m%d")))
    except ValueError:
        return math.inf


_STORED_FIELDS: Mapping[str, str] = {"Rollout": "token_arrays.stored", "TrainingBatch": "token_arrays.array.stored"}
_scanner = cache(lambda kind: frame_scanner(kind, {_STORED_FIELDS[kind]}))


def names_in(value: bytes | None) -> set[str]:
    """Return the names of the stored arrays that a record names; none for bytes that are no record."""
    kind = codec.kind_of(value)
    if value is None or kind not in _STORED_FIELDS:
        return set()
    scan: ScanFrame = _scanner(kind)
    fields = scan(value)
    if fields is not None:
        [stored] = fields
        names: Collection[str] = stored.values() if isinstance(stored, dict) else stored
    else:
        try:
            names = [array.stored for array in _arrays_of(codec.decode(value))]
        except RecordError:
            return set()
    return {name for name in names if STORED_NAME.fullmatch(name)}


def _arrays_of(record: Rollout | TrainingBatch) -> list[NamedArray]:
    if isinstance(record, Rollout):
        return list(record.token_arrays.values())
    return [entry.array for entry in record.token_arrays]
