"""VllmPluginEngine: updates a vLLM whose workers fetch policy versions themselves, through our plug-in.

A version passes from the log into the engine's memory; serve-weights does not fetch it, and writes no file. The engine
samples while its workers fetch, and pauses once each of them holds the version.
"""

import asyncio
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollstream.consumers.serving.config import ServingConfig
from rollstream.consumers.serving.engines import EngineFailed, EngineHttp, VersionLate, VersionUnfit, VllmEngine
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.topics.config import KafkaConfig

NAME = "vllm-plugin"
"""Name of this kind of engine in serving.engine."""
EXTENSION = "rollstream.consumers.serving.vllm_plugin.worker_extension.WorkerExtension"
"""Name of our class for vLLM's --worker-extension-cls."""
_LOOK_S = 0.05
_LONGEST_LOOK_S = 1.0


class VllmPluginEngine(VllmEngine):
    """Routes of the development mode of a vLLM that has our weight transfer engine and worker extension."""

    def __init__(
        self, http: EngineHttp, kafka: KafkaConfig, run: str, config: ServingConfig, weights: WeightsConfig
    ) -> None:
        super().__init__(http)
        self._http = http
        self._load_timeout_s = config.load_timeout_s
        self._info = {
            "run": run,
            "kafka": asdict(kafka),
            "fetch_timeout_s": weights.fetch_timeout_s,
            "files_at_once": weights.files_at_once,
        }

    async def prepare(self, label: str) -> None:
        """Have each worker fetch a version while the engine samples; return once all workers hold it.

        Raises VersionUnfit with the reason if a worker cannot fetch it, VersionLate if a worker has not fetched it in
        time, and EngineFailed if the engine does not answer.
        """
        await self._http.post("/init_weight_transfer_engine", {"init_info": self._info}, loading=True)
        await self._call("rollstream_fetch", label)
        deadline, look_s = time.monotonic() + self._load_timeout_s, _LOOK_S
        while True:
            workers = await self._call("rollstream_status", label)
            if workers and all(worker["held"] for worker in workers):
                return
            for worker in workers:
                if worker["error"]:
                    raise (VersionUnfit if worker["final"] else VersionLate)(worker["error"])
            if time.monotonic() > deadline:
                raise VersionLate(f"its workers did not fetch version {label} within {self._load_timeout_s:g} s")
            await asyncio.sleep(look_s)
            # Each check interrupts the engine's sampling for a moment.
            look_s = min(2 * look_s, _LONGEST_LOOK_S)

    async def load(self, directory: Path, label: str) -> None:
        """See ServingEngine; the version is loaded from the workers' memory, and no directory is read."""
        try:
            await self._http.post("/start_weight_update")
        except EngineFailed:
            # An earlier update may still be open, because the serve-weights that began it was killed.
            await self._http.post("/finish_weight_update", {})
            await self._http.post("/start_weight_update")
        # The label names the version in the engine, unless something else has replaced the weights.
        before = await self.label()
        update = {"version": int(label), "onto": int(before) if before.isdecimal() else -1}
        await self._http.post("/update_weights", {"update_info": update}, loading=True)
        await self._http.post("/finish_weight_update", {"weight_version": label})

    async def _call(self, method: str, label: str) -> list[dict[str, Any]]:
        """Call a method of the worker extension on each worker."""
        answer = await self._http.post("/collective_rpc", {"method": method, "args": [label]})
        results: list[dict[str, Any]] = answer.get("results", [])
        return results
