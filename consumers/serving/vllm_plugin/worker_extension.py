"""Methods added to vLLM's workers by --worker-extension-cls; serve-weights calls them through /collective_rpc.

vLLM has no call that reports the progress of a worker's fetch. With these methods, serve-weights pauses the engine for
a version only once each of its workers holds it.
"""

from typing import Any


class WorkerExtension:
    """Added to the class of vLLM's workers."""

    def rollstream_fetch(self, version: str) -> None:
        """Begin to fetch a version; it is a string because vLLM passes only strings."""
        self._transfer_engine().fetch(int(version))

    def rollstream_status(self, version: str) -> dict[str, Any]:
        """Return whether this worker holds a version, the error of its fetch if it failed, whether another fetch would
        fail, too, and counts of updates."""
        engine = self._transfer_engine()
        status = engine.status()
        error = status.error if status.requested == int(version) else ""
        return {
            "held": engine.holds(int(version)),
            "error": error,
            "final": bool(error) and status.final,
            "updates": dict(engine.updates),
        }

    def _transfer_engine(self) -> Any:
        engine = getattr(self, "weight_transfer_engine", None)
        if engine is None:
            raise RuntimeError(
                'no weight transfer engine; start vLLM with --weight-transfer-config \'{"backend": "rollstream"}\''
            )
        return engine
