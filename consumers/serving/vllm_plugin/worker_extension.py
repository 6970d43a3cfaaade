"""Methods that vLLM's workers get with --worker-extension-cls: serve-weights calls them by /collective_rpc.

vLLM's engine has no call by which a worker says how far a fetch is. With these, it pauses only for versions that each
of its workers holds.
"""

from typing import Any


class WorkerExtension:
    """Added to the class of vLLM's workers."""

    def rollstream_fetch(self, version: str) -> None:
        """Begin to fetch a version; vLLM passes texts only."""
        self._transfer_engine().fetch(int(version))

    def rollstream_status(self, version: str) -> dict[str, Any]:
        """Return whether this worker holds a version, the error of its fetch if it failed, and counts of updates."""
        engine = self._transfer_engine()
        status = engine.status()
        error = status.error if status.requested == int(version) else ""
        return {"held": engine.holds(int(version)), "error": error, "updates": dict(engine.updates)}

    def _transfer_engine(self) -> Any:
        engine = getattr(self, "weight_transfer_engine", None)
        if engine is None:
            raise RuntimeError('start vLLM with --weight-transfer-config \'{"backend": "rollstream"}\'')
        return engine
