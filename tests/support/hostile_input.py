"""Hostile input by seed, for floods of every kind: damaged bytes, values that make no sense, records of any type with
such values in them, JSON bodies and HTTP requests.

Nothing here goes through the checks of our own producers. The same seed gives the same input.
"""

import io
import json
import math
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import fastavro
import numpy as np

from rollstream.topics.records import NamedArray
from rollstream.topics.wire import codec
from rollstream.topics.wire.codec import MAGIC, encode, values_of
from rollstream.topics.wire.trajectory_arrays import to_record
from tests.support.batches import random_batch
from tests.support.index_logs import MadeRun
from tests.support.runs import rollout
from tests.support.trajectories import numbered

NUMBERS = (0, 1, -1, 2, 2**31 - 1, -(2**31), 2**31, 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-320, 1e300, 1e6, math.nan, math.inf, -math.inf)
ODD = "a\x1b[31m\u202e\x00" * 3
"""A name with a terminal's escape, a change of direction and a zero byte."""
TEXTS = ("", "\0", '"', ODD, "x" * 600, "env", "../..", "a" * 40_000)
PLAUSIBLE = ("env", "main", "default", "made", "0-0", "0-1", "1-0", "g1", "g2", "s1", "s2", "s3", "w0", "exact", "{}")
"""Names that records share, so that they refer to each other."""
JSON_NUMBERS = (0, -1, 1, 2**31, 2**63, -(2**63), 10**400, 1e308, 1e-320, math.nan, math.inf, 0.5)
JSON_TEXTS = (
    "",
    "\0",
    "a\x1b[31m\u202e",
    "../../etc/passwd",
    "x" * 5000,
    "\ud800",
    "' or 1=1 --",
    "<script>alert(1)</script>",
)
METHODS = ("POST", "POST", "POST", "GET", "PUT", "DELETE", "OPTIONS", "HEAD", "BREW")
_ODD_HEADERS = (
    "Authorization: Bearer \xff",
    "Content-Type: text/\x01",
    "Transfer-Encoding: chunked",
    "X: " + "y" * 9000,
)
_DTYPES = ("<f4", "<i8", "|b1", "O", "<U9", "<f16", ">f4", "")
_SHAPES = ((), (0,), (2**31,), (-1, -1), (2, 2**62), (1,) * 70, (4, 2))
_HELD, _NEW = 100, 0.2
"""Records of a kind that are held, and the share of values for which a new one is made."""
Values = dict[str, Any]


class HostileInput:
    """Draws of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._last: dict[str, list[bytes]] = {}

    # ------------------------------------------------------------------ bytes

    def damaged(self, value: bytes) -> bytes:
        """Some bytes with one to three damages: a flipped bit, bytes added or removed, a run of ones."""
        data = bytearray(value)
        for _ in range(self.random.randint(1, 3)):
            at = self.random.randrange(len(data)) if data else 0
            match self.random.randrange(4):
                case 0 if data:
                    data[at] ^= 1 << self.random.randrange(8)
                case 1:
                    data[at:at] = self.random.randbytes(self.random.randint(1, 8))
                case 2:
                    del data[at + 1 : at + 1 + self.random.randint(1, 8)]
                case _:
                    data[at : at + 8] = b"\xff" * 8
        return bytes(data)

    def junk(self) -> bytes:
        """Random bytes."""
        return self.random.randbytes(self.random.choice((0, 1, 5, 60, 2000)))

    # ------------------------------------------------------------------ records

    def value(self, kinds: Sequence[str]) -> bytes | None:
        """A value for a topic whose records are of some kinds: hostile, damaged, foreign, or none at all."""
        kind = self.random.random()
        if kind < 0.03:
            return None
        if kind < 0.1 or not kinds:
            return self.junk()
        if kind < 0.15:
            return self._held(self.random.choice(_kinds()))
        record = self._held(self.random.choice(kinds))
        return self.damaged(record) if kind < 0.55 else record

    def _held(self, kind: str) -> bytes:
        """One of the last records of a kind, or a new one: to damage one is faster than to make it."""
        held = self._last.setdefault(kind, [])
        if len(held) < 4 or self.random.random() < _NEW:
            held.append(self.record(kind))
            del held[:-_HELD]
            return held[-1]
        return self.random.choice(held)

    def record(self, kind: str) -> bytes:
        """A record of a kind, well encoded: a sound one with a few senseless values, or one made up from its schema."""
        schema = codec.schemas()[kind][-1]
        values = self._values(kind)
        out = io.BytesIO()
        out.write(MAGIC + schema.fingerprint)
        fastavro.schemaless_writer(out, schema.parsed, values)
        return out.getvalue()

    def key(self, *parts: object) -> bytes | None:
        """A key of a record: the one of these parts, or bytes that are no key."""
        sound = json.dumps(parts, separators=(",", ":"), default=str).encode()
        return self.random.choice((None, b"", b"\xff", b"[" * 100, self.random.randbytes(9), sound, sound, sound))

    def time_ms(self) -> int:
        """A time of a record that no clock had."""
        return self.random.choice((0, -1, 1, 2**62, -(2**62), 2**63 - 1, 10**12))

    def _values(self, kind: str) -> Values:
        schema, samples = _parsed(kind), _samples().get(kind, ())
        if not samples or self.random.random() < 0.2:
            length = self.random.randrange(5)
            made: Values = self._of(schema, _named(kind), length)
            return made
        values = dict(self.random.choice(samples))
        for _ in range(self.random.randint(1, 3)):
            self._change(values, schema, _named(kind))
        return values

    def _change(self, values: Values, schema: Any, named: dict[str, Any]) -> None:
        """Replace one field, or one within it, by something senseless; values that others share stay as they are."""
        field = self.random.choice(schema["fields"])
        name, kind = field["name"], _resolved(field["type"], named)
        if isinstance(kind, dict) and kind["type"] == "record":
            values[name] = dict(values[name])
            self._change(values[name], kind, named)
        elif isinstance(kind, dict) and kind["type"] == "array" and values[name] and self.random.random() < 0.7:
            items = list(values[name])
            at = self.random.randrange(len(items))
            item = _resolved(kind["items"], named)
            if isinstance(item, dict) and item["type"] == "record":
                items[at] = dict(items[at])
                self._change(items[at], item, named)
            else:
                items[at] = self._leaf(item)
            values[name] = items
        else:
            values[name] = self._of(kind, named, self.random.randrange(9), hostile=1.0)

    def _of(self, schema: Any, named: dict[str, Any], length: int, *, hostile: float = 0.1) -> Any:
        """Values of a schema, each senseless with a probability, and plausible otherwise."""
        kind = _resolved(schema, named)
        if isinstance(kind, str) or kind["type"] not in ("array", "map", "enum", "record"):
            return self._leaf(kind, length) if self.random.random() < hostile else self._plausible(kind, length)
        if kind["type"] == "record":
            return {f["name"]: self._of(f["type"], named, length, hostile=hostile) for f in kind["fields"]}
        if kind["type"] == "enum":
            return self.random.choice(kind["symbols"])
        count = self.random.randrange(4)
        if kind["type"] == "array":
            return [self._of(kind["items"], named, length, hostile=hostile) for _ in range(count)]
        return {self._text(): self._of(kind["values"], named, length, hostile=hostile) for _ in range(count)}

    def _leaf(self, kind: Any, length: int = 0) -> Any:
        choose = self.random.choice
        match kind if isinstance(kind, str) else kind["type"]:
            case "string":
                return self._text()
            case "long":
                return choose(NUMBERS)
            case "int":
                return choose([number for number in NUMBERS if -(2**31) <= number < 2**31])
            case "double":
                return choose(FLOATS)
            case "boolean":
                return choose((True, False))
            case _:
                if isinstance(kind, dict) and "dtype" in kind:
                    return self._array(kind["dtype"], length)
                return self.junk()

    def _plausible(self, kind: Any, length: int) -> Any:
        match kind if isinstance(kind, str) else kind["type"]:
            case "string":
                return self.random.choice(PLAUSIBLE)
            case "long" | "int":
                return self.random.randrange(5)
            case "double":
                return float(self.random.randrange(3))
            case "boolean":
                return self.random.random() < 0.5
            case _:
                dtype = kind.get("dtype", "|u1") if isinstance(kind, dict) else "|u1"
                return np.arange(length).astype(dtype).tobytes()

    def _text(self) -> str:
        return self.random.choice((*TEXTS, f"env{self.random.randrange(1000)}", f"u{self.random.randrange(1000)}"))

    def _array(self, dtype: str, length: int) -> bytes:
        count = self.random.choice((length, 0, length + 1, 2 * length, 7))
        if np.dtype(dtype).kind == "f":
            # A float32 overflows to infinity here, as a producer's would.
            with np.errstate(over="ignore"):
                return np.full(count, self.random.choice(FLOATS)).astype(dtype).tobytes()
        if np.dtype(dtype).kind == "b":
            return bytes(self.random.choice((0, 1)) for _ in range(count))
        limits = np.iinfo(dtype)
        numbers = [self.random.choice((0, 1, -1, 3, limits.max, limits.min)) for _ in range(count)]
        return np.array([max(limits.min, number) for number in numbers], dtype).tobytes()

    def named_array(self) -> NamedArray:
        """An array whose bytes are seldom what its dtype and shape say."""
        choose = self.random.choice
        stored = choose(("", "", "", f"20261130/{'ab' * 32}", "../x"))
        data = self.random.randbytes(choose((0, 1, 16)))
        return NamedArray(dtype=choose(_DTYPES), shape=choose(_SHAPES), data=data, stored=stored)

    # ------------------------------------------------------------------ JSON and HTTP

    def json_value(self, names: Sequence[str], depth: int = 2) -> Any:
        """A JSON value whose objects have some names."""
        choose = self.random.choice
        match self.random.randrange(6 if depth else 4):
            case 0:
                return choose(JSON_NUMBERS)
            case 1:
                return choose(JSON_TEXTS)
            case 2:
                return choose((None, True, False, [], {}))
            case 3:
                return [{"role": choose(("user", "assistant", *JSON_TEXTS)), "content": choose((*JSON_TEXTS, None))}]
            case 4:
                return [self.json_value(names, depth - 1) for _ in range(3)]
            case _:
                return {choose((*names, *JSON_TEXTS)): self.json_value(names, depth - 1) for _ in range(3)}

    def json_object(self, names: Sequence[str], most: int = 8) -> dict[str, Any]:
        """A JSON object with some of the names."""
        chosen = self.random.sample(names, self.random.randint(0, min(most, len(names))))
        return {name: self.json_value(names) for name in chosen}

    def changed(self, sound: Any, names: Sequence[str]) -> Any:
        """A sound JSON value with one to three values in it replaced."""
        copied = json.loads(json.dumps(sound))
        for _ in range(self.random.randint(1, 3)):
            at: Any = copied
            while isinstance(at, dict | list) and at:
                place = self.random.choice(list(at) if isinstance(at, dict) else range(len(at)))
                if self.random.random() < 0.4 or not (isinstance(at[place], dict | list) and at[place]):
                    at[place] = self.json_value(names)
                    break
                at = at[place]
        return copied

    def body(self, names: Sequence[str]) -> bytes:
        """The body of a request, mostly JSON."""
        kind = self.random.random()
        if kind < 0.05:
            return b"[" * 100_000
        if kind < 0.15:
            return self.junk()
        return json.dumps(self.json_object(names)).encode("utf-8", "surrogatepass")

    def request(self, paths: Sequence[str], names: Sequence[str]) -> bytes:
        """The bytes of a request."""
        choose, kind = self.random.choice, self.random.random()
        path = choose((*paths, "/", "/nowhere", "/metrics", f"/{'../' * 9}etc/passwd", "/%00", "/\xff"))
        if kind < 0.1:
            return self.random.randbytes(choose((1, 40, 3000)))
        if kind < 0.2:
            # Half a request, as from a client that hung up.
            return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{{".encode("latin-1")
        body = self.body(names)
        headers = [f"Host: {choose(('x', 'localhost', '127.0.0.1', chr(255)))}", "Connection: close"]
        headers.append(f"Content-Length: {choose((len(body), len(body), len(body), len(body) + 1, -1, 'x', 2**70))}")
        headers += self.random.sample(_ODD_HEADERS, choose((0, 0, 1, 2)))
        return "\r\n".join([f"{choose(METHODS)} {path} HTTP/1.1", *headers, "", ""]).encode("latin-1") + body


def _resolved(schema: Any, named: dict[str, Any]) -> Any:
    """The schema that a name or a wrapped schema refers to; any other schema is returned as it is."""
    if isinstance(schema, str):
        return named.get(schema, schema)
    if isinstance(schema, dict) and isinstance(schema["type"], dict | list):
        return _resolved(schema["type"], named)
    return schema


@cache
def _kinds() -> tuple[str, ...]:
    return tuple(sorted(codec.schemas()))


@cache
def _parsed(kind: str) -> Any:
    return codec.schemas()[kind][-1].source


@cache
def _named(kind: str) -> dict[str, Any]:
    """The named schemas within a schema, by name."""
    named: dict[str, Any] = {}

    def visit(schema: Any) -> None:
        if isinstance(schema, list):
            for part in schema:
                visit(part)
        elif isinstance(schema, dict):
            if schema.get("type") in ("record", "enum"):
                named[schema["name"]] = schema
            for part in schema.values():
                if isinstance(part, dict | list):
                    visit(part)

    visit(_parsed(kind))
    return named


@cache
def _samples() -> dict[str, tuple[Values, ...]]:
    """Sound records by kind, as values of their schemas; other kinds are made from their schemas alone."""
    made = MadeRun(partitions=1, groups=2)
    records: list[object] = [rollout(turns=()), rollout(member=1, group_id="g1"), random_batch(0, rows=4)]
    records += [to_record(numbered(number)) for number in range(2)]
    chunk = [*made.chunk(), made.policy(1)]
    records += [codec.decode(record.value) for _name, record in chunk if codec.kind_of(record.value)]
    samples: dict[str, tuple[Values, ...]] = {}
    for record in records:
        name = type(record).__name__
        if len(samples.get(name, ())) < 4:
            assert encode(record)
            samples[name] = (*samples.get(name, ()), values_of(record))
    return samples
