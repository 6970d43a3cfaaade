"""ArrivalDigests: digests tensors while the chunks of their version arrive, so little work follows the last chunk.

Another thread digests each piece of a tensor once every byte up to its end has arrived.
"""

import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from blake3 import blake3

from rollstream.topics.records import Tensor


class ArrivalDigests:
    """Digests of tensors whose bytes one or several threads write into a content, each byte once."""

    def __init__(self, tensors: Iterable[Tensor], content: memoryview) -> None:
        """`tensors` are whole tensors in the content; a tensor that reaches beyond the content gets no digest."""
        self._content = content
        # Of several tensors of one name, the last counts, as in the arrays of a version.
        by_name = {tensor.name: tensor for tensor in tensors}.values()
        within = (t for t in by_name if t.start >= 0 and 0 < t.size_bytes <= len(content) - t.start)
        self._waiting = deque(sorted(within, key=lambda tensor: tensor.start))
        """Tensors without a digest. `_hash` has `_hash_bytes` bytes of the first."""
        self._hash, self._hash_bytes = blake3(), 0
        self._digests: dict[str, str] = {}
        # One thread digests faster than chunks arrive.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="digest-arrivals")
        self._lock = threading.Lock()
        self._complete_to = 0
        """End of the bytes that have arrived without a gap."""
        self._ahead: dict[int, int] = {}
        """Byte ranges that arrived after a gap: the end of each, by its beginning."""

    def arrived(self, begin: int, end: int) -> None:
        """Note that these bytes have arrived, and begin to digest the bytes that are now complete."""
        if begin == end:
            return
        with self._lock:
            self._ahead[begin] = end
            if begin != self._complete_to:
                return
            while (reached := self._ahead.pop(self._complete_to, None)) is not None:
                self._complete_to = reached
            self._pool.submit(self._digest, self._complete_to)

    def result(self) -> dict[str, str]:
        """Wait for the digests, and return the digests of the tensors that have arrived whole, by name."""
        self._pool.shutdown()
        return self._digests

    def _digest(self, complete_to: int) -> None:
        while self._waiting and (begin := self._waiting[0].start + self._hash_bytes) < complete_to:
            tensor = self._waiting[0]
            end = min(complete_to, tensor.start + tensor.size_bytes)
            self._hash.update(self._content[begin:end])
            self._hash_bytes += end - begin
            if self._hash_bytes == tensor.size_bytes:
                self._digests[tensor.name] = self._hash.hexdigest()
                self._waiting.popleft()
                self._hash, self._hash_bytes = blake3(), 0
