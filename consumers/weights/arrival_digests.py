"""ArrivalDigests: digests tensors while the chunks of their version arrive, so little work follows the last chunk.

A shard of a tensor is digested by another thread once every byte up to its end has arrived.
"""

import hashlib
import os
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from rollstream.topics.params_digest import SHARD_BYTES, digest_of_shards
from rollstream.topics.records import Tensor

_THREADS = min(8, os.cpu_count() or 1)


class _Span(NamedTuple):
    begin: int
    end: int
    tensor: str


class ArrivalDigests:
    """Digests of tensors whose bytes one or several threads write into a content, each byte once."""

    def __init__(self, tensors: Iterable[Tensor], content: memoryview) -> None:
        """`tensors` are whole tensors in the content; a tensor that reaches beyond the content gets no digest."""
        self._content = content
        within = (t for t in tensors if t.start >= 0 and 0 < t.size_bytes <= len(content) - t.start)
        self._waiting = deque(sorted(span for tensor in within for span in _spans(tensor)))
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="digest-arrivals")
        self._shards: dict[str, list[Future[bytes]]] = {}
        self._lock = threading.Lock()
        self._complete_to = 0
        """End of the bytes that have arrived without a gap."""
        self._ahead: dict[int, int] = {}
        """Byte ranges that arrived after a gap: the end of each, by its beginning."""

    def arrived(self, begin: int, end: int) -> None:
        """Note that these bytes have arrived, and begin to digest the shards that are now complete."""
        if begin == end:
            return
        with self._lock:
            self._ahead[begin] = end
            while (reached := self._ahead.pop(self._complete_to, None)) is not None:
                self._complete_to = reached
            while self._waiting and self._waiting[0].end <= self._complete_to:
                span = self._waiting.popleft()
                self._shards.setdefault(span.tensor, []).append(self._pool.submit(self._digest, span))

    def result(self) -> dict[str, str]:
        """Wait for the digests, and return the digests of the tensors that have arrived whole, by name."""
        with self._lock:
            waiting = {span.tensor for span in self._waiting}
        whole = {name: shards for name, shards in self._shards.items() if name not in waiting}
        digests = {name: digest_of_shards([shard.result() for shard in shards]) for name, shards in whole.items()}
        self._pool.shutdown()
        return digests

    def _digest(self, span: _Span) -> bytes:
        return hashlib.sha256(self._content[span.begin : span.end]).digest()


def _spans(tensor: Tensor) -> list[_Span]:
    end = tensor.start + tensor.size_bytes
    return [_Span(at, min(at + SHARD_BYTES, end), tensor.name) for at in range(tensor.start, end, SHARD_BYTES)]
