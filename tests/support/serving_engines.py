"""Stand-ins for inference engines: they load checkpoints by the routes of vLLM or SGLang, and fail as told.

As in the engines, loading replaces weights in place: one that fails leaves them torn until another succeeds.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from rollstream.consumers.models import huggingface
from rollstream.consumers.models.config import DecoderConfig
from rollstream.consumers.serving.vllm_plugin.requested_versions import HeldVersion, RequestedVersions
from rollstream.topics.config import KafkaConfig
from rollstream.topics.records import PolicyManifest
from rollstream.topics.wire.params_digest import params_digest
from tests.support.checkpoints import random_parameters

MODEL = DecoderConfig(
    vocab_size=11,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    intermediate_size=12,
)
"""A model of a few hundred parameters."""
ARRAYS = random_parameters(MODEL)
MODEL_JSON = json.dumps(asdict(MODEL))


def values_digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Digest of the values of parameters, whatever dtype they are published in."""
    return params_digest({name: array.astype(np.float32) for name, array in arrays.items()})


def published_exactly(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.float32]]:
    """The arrays in float32, rounded to values that bfloat16 can hold."""
    return {name: array.astype(ml_dtypes.bfloat16).astype(np.float32) for name, array in arrays.items()}


def manifest(version: int, model: str = MODEL_JSON) -> PolicyManifest:
    """The manifest of a version of that model; it names no chunks."""
    return PolicyManifest(
        version=version, learner="l", step=version, epoch="e", tensors=(), chunks=(), digest="", model=model
    )


class EngineStandIn:
    """Weights of one engine, and what was asked of it."""

    def __init__(self, label: str = "default") -> None:
        self.reported = label
        """Label of its weights."""
        self.digest = ""
        """Digest of the parameters loaded last."""
        self.paused = False
        self.torn = False
        self.sampled_torn = False
        """Whether it ever sampled while its weights were torn."""
        self.calls: list[str] = []
        """Its calls: pause, load 17, resume; questions for its label are left out."""
        self.refuses: Counter[str] = Counter()
        """How often it still refuses each of those."""
        self.hangs: set[str] = set()
        """Those that it never answers."""
        self.loads = 0

    async def pause(self) -> None:
        await self.call("pause")
        self.paused = True

    async def load(self, directory: Path, label: str) -> None:
        assert self.paused, "weights are replaced while it samples"
        self.loads += 1
        self.torn = True
        await self.call(f"load {label}")
        parameters = huggingface.load(directory)
        assert int(directory.name.removeprefix("version-")) == int(label)
        self.digest, self.torn, self.reported = values_digest(parameters), False, label

    async def resume(self) -> None:
        await self.call("resume")
        self.sampled_torn |= self.torn
        self.paused = False

    async def label(self) -> str:
        if "label" in self.hangs:
            await asyncio.Event().wait()
        return self.reported

    def restart(self) -> None:
        """Lose everything, as a restarted process does."""
        self.reported, self.digest, self.paused, self.torn = "default", "", False, False

    async def call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.hangs:
            await asyncio.Event().wait()
        if self.refuses[name]:
            self.refuses[name] -= 1
            raise RuntimeError(f"{name} is refused, as told")


class VllmStandIn(EngineStandIn):
    """Routes of vLLM's development mode. `reload_weights` and the label of the weights are two requests."""

    def __init__(self) -> None:
        super().__init__()
        self.reloaded = Path()

    async def answer(self, request: web.Request) -> web.Response:
        try:
            match request.method, request.path:
                case "POST", "/pause":
                    assert request.query["mode"] == "keep", "requests in flight would be aborted"
                    await self.pause()
                    return web.json_response({"status": "paused"})
                case "POST", "/collective_rpc":
                    body = await request.json()
                    assert body["method"] == "reload_weights"
                    self.reloaded = Path(body["kwargs"]["weights_path"])
                    await self.load(self.reloaded, self.reloaded.name.removeprefix("version-"))
                    return web.json_response({"results": [None]})
                case "POST", "/update_weight_version":
                    self.reported = (await request.json())["new_version"]
                    return web.json_response({"success": True, "new_version": self.reported})
                case "POST", "/resume":
                    await self.resume()
                    return web.json_response({"status": "resumed"})
                case "GET", "/weight_info":
                    return web.json_response({"weight_version": await self.label()})
                case "GET", "/is_paused":
                    return web.json_response({"is_paused": self.paused})
        except RuntimeError as error:
            return web.json_response({"error": str(error)}, status=500)
        return web.Response(status=404)


class VllmPluginStandIn(EngineStandIn):
    """Routes of a vLLM with our plug-in. It fetches versions from the log as the plug-in does, and has no model."""

    def __init__(self) -> None:
        super().__init__()
        self.versions: RequestedVersions | None = None
        self.loaded: HeldVersion | None = None
        self.updating = False
        """Whether an update was started and not finished."""

    async def answer(self, request: web.Request) -> web.Response:
        body: Any = await request.json() if request.can_read_body else {}
        try:
            match request.method, request.path:
                case "POST", "/init_weight_transfer_engine":
                    info = body["init_info"]
                    kafka = KafkaConfig(**info.pop("kafka"))
                    self.versions = self.versions or RequestedVersions(kafka, **info)
                case "POST", "/collective_rpc":
                    return web.json_response({"results": [self.worker(body["method"], *body["args"])]})
                case "POST", "/pause":
                    assert request.query["mode"] == "keep", "requests in flight would be aborted"
                    await self.pause()
                case "POST", "/start_weight_update":
                    if self.updating:
                        raise RuntimeError("start_weight_update called while a weight update is already active")
                    self.updating = True
                case "POST", "/update_weights":
                    await self.load_held(body["update_info"]["version"])
                case "POST", "/finish_weight_update":
                    self.updating = False
                    self.reported = body.get("weight_version", self.reported)
                case "POST", "/resume":
                    await self.resume()
                case "GET", "/weight_info":
                    return web.json_response({"weight_version": await self.label()})
                case _:
                    return web.Response(status=404)
            return web.json_response({"message": "done"})
        except RuntimeError as error:
            return web.json_response({"error": str(error)}, status=500)

    def worker(self, method: str, version: str) -> dict[str, Any] | None:
        assert self.versions is not None
        loaded = self.loaded is not None and self.loaded.version == int(version)
        if method == "rollstream_fetch":
            return None if loaded else self.versions.request(int(version))
        assert method == "rollstream_status"
        status = self.versions.status()
        held = loaded or int(version) == status.held
        return {"held": held, "error": status.error, "final": status.final, "updates": {}}

    async def load_held(self, version: int) -> None:
        assert self.paused, "weights are replaced while it samples"
        assert self.versions is not None
        assert self.updating
        self.loads += 1
        self.torn, self.updating = True, False
        await self.call(f"load {version}")
        same = self.loaded is not None and self.loaded.version == version
        self.loaded = self.loaded if same and self.loaded else self.versions.take(version)
        self.digest, self.torn, self.updating = values_digest(self.loaded.arrays), False, True

    def restart(self) -> None:
        super().restart()
        self.close()
        self.loaded, self.updating = None, False

    def close(self) -> None:
        if self.versions is not None:
            self.versions.close()
        self.versions = None


class SglangStandIn(EngineStandIn):
    """Routes of SGLang. A load that fails is an answer of status 200 without success.

    It always has a request in flight, as servers of a run have. So it does not empty its cache of prefixes, and a load
    that asks for that ends its scheduler.
    """

    async def answer(self, request: web.Request) -> web.Response:
        body: Any = await request.json() if request.can_read_body else {}
        try:
            match request.method, request.path:
                case "POST", "/pause_generation":
                    assert body == {"mode": "in_place"}, "requests in flight would be aborted"
                    await self.pause()
                case "POST", "/update_weights_from_disk":
                    assert body["abort_all_requests"] is False, "requests in flight would be aborted"
                    assert body["flush_cache"] is False, "Cache flush failed after updating weights"
                    await self.load(Path(body["model_path"]), body["weight_version"])
                    return web.json_response({"success": True, "message": "done", "num_paused_requests": 0})
                case "POST", "/flush_cache":
                    return web.Response(status=400, text="Flush cache failed.")
                case "POST", "/continue_generation":
                    await self.resume()
                case "GET", "/model_info":
                    return web.json_response({"model_path": "m", "weight_version": await self.label()})
                case _:
                    return web.Response(status=404)
            return web.json_response({"status": "ok"})
        except RuntimeError as error:
            return web.json_response({"success": False, "message": str(error), "num_paused_requests": 0})
