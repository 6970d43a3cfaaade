"""The ledger of a run that is still growing: it reads only new records, and saves its state in a file.

The file can be deleted at any time; the topics are then read from the beginning. That also happens if the file is
damaged or other code has written it, or if the topics no longer hold what was read; the reason is reported.

Saved values name the code of the classes that they belong to, so no other code continues from them. Reading them calls
nothing but constructors of named tuples and `__setstate__`.
"""

import json
import logging
import math
import sys
import time
import zlib
from array import array
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from rollstream.consumers.log_view import ViewOutdated
from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.pipeline.audit.ledger.proof import Books, first_reading
from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.files.atomic_files import (
    DirectoryLock,
    StoreError,
    lock_directory,
    remove_unfinished,
    write_bytes,
)
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.client_calls import OffsetGone
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)

_COLLECTIONS: dict[str, type] = {each.__name__: each for each in (tuple, set, dict, Counter)}
_SCALARS = frozenset((type(None), bool, int, float, str))
_NUMBERS = "numbers "
_LEVEL = 1


def saved(value: object) -> dict[str, Any]:
    """Return plain values from which `restored` makes an equal object, except for the settings of Kafka in it."""
    modules = {__name__}
    plain = _plain(value, modules)
    return {"code": _digests(modules), "value": plain}


def restored(state: dict[str, Any], kafka: KafkaConfig) -> Any:
    """Return the object that `saved` was given, with these settings of Kafka.

    Raises ValueError, KeyError, TypeError, AttributeError or zlib.error if `saved` did not make the values, or other
    code made them.
    """
    if state["code"] != _digests(state["code"]):
        raise ValueError("other code than this has written it")
    return _object(state["value"], kafka)


def packed(numbers: Sequence[int] | npt.NDArray[Any]) -> str:
    """Return integers as text, which is very short for equal or evenly growing numbers."""
    values = np.asarray(numbers, "<i8")
    return b64encode(zlib.compress(np.diff(values, prepend=0).astype("<i8").tobytes(), _LEVEL)).decode()


def unpacked(text: str) -> npt.NDArray[np.int64]:
    """Return the integers in a text. Raises ValueError or zlib.error if `packed` did not make the text."""
    return np.cumsum(np.frombuffer(zlib.decompress(b64decode(text, validate=True)), "<i8")).astype(np.int64)


def _plain(value: object, modules: set[str]) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is list:
        return _each(value, lambda item: _plain(item, modules))
    if isinstance(value, KafkaConfig):
        return {"of": "kafka", "is": None}
    if isinstance(value, array | np.ndarray):
        dtype = value.dtype.str if isinstance(value, np.ndarray) else "array"
        return {"of": _NUMBERS + dtype, "is": packed(np.asarray(value))}
    name, content = kind.__name__, cast(Any, value)
    if name not in _COLLECTIONS:
        modules.add(kind.__module__)
        name = f"{kind.__module__}:{name}"
        content = content if isinstance(value, tuple) else content.__getstate__()
    if isinstance(content, dict):
        content = [*content], [*content.values()]
    items = sorted(content) if kind is set else [*content]
    return {"of": name, "is": _plain(items, modules)}


def _each(values: Any, convert: Callable[[Any], Any]) -> list[Any]:
    """Convert each value that JSON does not hold as it is."""
    return [*values] if _SCALARS.issuperset(map(type, values)) else [*map(convert, values)]


def _object(value: Any, kafka: KafkaConfig) -> Any:
    if isinstance(value, list):
        return _each(value, lambda item: _object(item, kafka))
    if not isinstance(value, dict):
        return value
    name, content = value["of"], value["is"]
    if name == "kafka":
        return kafka
    if name.startswith(_NUMBERS):
        dtype, numbers = name.removeprefix(_NUMBERS), unpacked(content)
        return array("q", numbers.tobytes()) if dtype == "array" else numbers.astype(dtype)
    items = _object(content, kafka)
    if name in _COLLECTIONS:
        return _COLLECTIONS[name](_pairs(items) if issubclass(_COLLECTIONS[name], dict) else items)
    module, _, class_name = name.partition(":")
    cls = getattr(sys.modules[module], class_name)
    if not (module.startswith("rollstream.") and isinstance(cls, type)):
        raise ValueError(f"{name} is no class of rollstream")
    if issubclass(cls, tuple):
        return cls(*items)
    made: Any = cls.__new__(cls)
    if hasattr(cls, "__setstate__"):
        made.__setstate__(_pairs(items))
    else:
        made.__dict__.update(_pairs(items))
    return made


def _pairs(columns: list[Any]) -> dict[Any, Any]:
    keys, values = columns
    return dict(zip(keys, values, strict=True))


def _digests(modules: Collection[str]) -> dict[str, str]:
    """Return a digest of the source of each module."""
    files = {name: Path(str(sys.modules[name].__file__)) for name in sorted(modules)}
    return {name: blake3(file.read_bytes()).hexdigest() for name, file in files.items()}


_LOCK = "books.lock"
_SHARE = 20
"""Writing the file takes at most 1/20 of the time; after a kill, records since the last write are read again."""
Ranges = list[tuple[int, int]]
"""First and last offset of each range."""


class LiveLedger(Closing):
    """The ledger of one run, brought up to date by each poll."""

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        path: Path,
        group: str | None = None,
        labeling_group: str | None = None,
    ) -> None:
        """Prepare the ledger; `path` is the file, and the other arguments are as in `ledger`.

        Only one process at a time writes the file; a second process only reads it.
        """
        self._kafka, self._arguments, self._path = kafka, (kafka, run, group, labeling_group), path
        self._books: Books | None = None
        self._lock: DirectoryLock | None = None
        self._kept: object = None
        """The positions when the file was last written."""
        self._written_at, self._cost_s = -math.inf, 0.0
        self.begun_anew = ""
        """Why the last poll read the topics from the beginning; empty if it read only new records."""
        self.state_bytes = 0
        """Size of the file as of the last poll."""

    def poll(self) -> Ledger:
        """Read new records, and return the same ledger as `ledger`. Raises the errors of `ledger`, and StoreError."""
        clients.check_broker(self._kafka)
        self.begun_anew = ""
        books = self._books or self._stored()
        self._books = None  # A `Books` is invalid after an error.
        if books is not None:
            try:
                result = books.read()
            except (ViewOutdated, OffsetGone) as error:
                self._tell(str(error))
                books = None
        if books is None:
            books, result = first_reading(*self._arguments)
        self._books = books
        self._store(books)
        return result

    def offsets(self, fate: str, reason: str | None = None) -> dict[int, Ranges]:
        """Return, by partition, the ranges of offsets of `rollouts` with a fate, as of the last poll.

        `fate` is a fate of the journal or `in_flight`; `reason` selects drops with this reason, by default all drops.
        Offsets that got their fate before a pruned journal begins are not included.
        """
        journals = {} if self._books is None else self._books.journals
        return {number: journal.of_fate(fate, reason).ranges() for number, journal in journals.items()}

    @property
    def positions(self) -> dict[int, int]:
        """Position of grouping in each partition of `rollouts`, as of the last poll; none before the first."""
        return {} if self._books is None else {n: journal.position for n, journal in self._books.journals.items()}

    def close(self) -> None:
        """Write the file if it is outdated, and let another process write it from now on."""
        if self._books is not None and self._kept != self._books.positions:
            self._write(self._books)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _stored(self) -> Books | None:
        """Return the `Books` in the file; None, after reporting the reason, if the file cannot be used."""
        try:
            data = self._path.read_bytes()
            books: Books = restored(json.loads(zlib.decompress(data)), self._kafka)
            run, *groups = subject = books.subject
        except FileNotFoundError:
            self._tell("there is no saved ledger")
            return None
        except (KeyError, TypeError, ValueError, AttributeError, zlib.error) as error:
            self._tell(f"{self._path} is damaged, or other code than this has written it ({error!r})")
            return None
        if subject != Books(*self._arguments).subject:
            self._tell(f"{self._path} belongs to run {run} and groups {', '.join(groups)}")
            return None
        self._kept, self.state_bytes = books.positions, len(data)
        return books

    def _store(self, books: Books) -> None:
        """Write the file if it is outdated, but so rarely that writing takes at most 1/`_SHARE` of the time."""
        due = time.monotonic() - self._written_at > _SHARE * self._cost_s
        if due and self._kept != books.positions:
            self._write(books)

    def _write(self, books: Books) -> None:
        began = time.monotonic()
        data = zlib.compress(json.dumps(saved(books), ensure_ascii=False, separators=(",", ":")).encode(), 1)
        self.state_bytes = len(data)
        if self._may_write():
            write_bytes(self._path, data)
        self._kept, self._written_at = books.positions, time.monotonic()
        self._cost_s = self._written_at - began

    def _may_write(self) -> bool:
        if self._lock is None:
            try:
                self._lock = lock_directory(self._path.parent, _LOCK)
            except StoreError:
                return False
            remove_unfinished(self._path.parent)
        return True

    def _tell(self, why: str) -> None:
        self.begun_anew = why
        event(logger, "ledger_begun_anew", why=why, file=str(self._path))
