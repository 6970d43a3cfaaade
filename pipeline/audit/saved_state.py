"""Objects of the ledger as plain values for JSON, and back; each attribute is saved under its own name.

The values name the code of the classes that they belong to, so no other code continues from them. Reading them calls
nothing but constructors of named tuples and `__setstate__`.
"""

import sys
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

from rollstream.topics.config import KafkaConfig

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
