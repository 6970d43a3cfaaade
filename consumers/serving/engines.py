"""HTTP routes by which third-party inference engines load a checkpoint while they serve: vLLM's, SGLang's, your own.

An engine is a class that takes an EngineHttp, the connection to one server. Its methods return once the server has done
what they request, and raise EngineFailed otherwise.

With our plug-in in vLLM a version passes from the log into the engine's memory; serve-weights does not fetch it, and
writes no file. The engine samples while its workers fetch, and pauses once each of them holds the version.
"""

import asyncio
import hashlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

import aiohttp

from rollstream.consumers.serving.config import ServingConfig
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError, RollstreamError
from rollstream.topics.logs import event
from rollstream.topics.secrets import resolve
from rollstream.topics.user_code import load_object
from rollstream.topics.watched_sockets import watched_socket

logger = logging.getLogger(__name__)

_QUOTED = 300
VLLM_LORA = "vllm-lora"
"""Name of the engine that loads only adapters."""
POLICY = "policy"
"""Name of the adapter in vLLM; requests give this name as their model."""
_TRIAL = "policy-on-trial"


class EngineFailed(RollstreamError):
    """An engine refused or failed a request, or did not answer."""


class VersionUnfit(EngineFailed):
    """An engine cannot fetch a version, and continues with the version that it has."""


class VersionLate(EngineFailed):
    """An engine could not fetch a version in time, but may be able to later; it continues with the version it has."""


def base_url(url: str) -> str:
    """Return the URL of a server without the path of its OpenAI-compatible API."""
    return url.rstrip("/").removesuffix("/v1")


class EngineHttp:
    """JSON over HTTP with one server; use it as an async context manager."""

    def __init__(self, url: str, config: ServingConfig) -> None:
        """Resolve the API key. Raises ConfigurationError if that fails."""
        self.url = base_url(url)
        key = resolve("serving.api_key", config.api_key)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._config = config
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # One connection for each request: servers close idle connections, and aiohttp does not repeat a POST on a
        # connection that has just closed.
        connector = aiohttp.TCPConnector(force_close=True, socket_factory=watched_socket)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout, connector=connector)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object that a GET request returns. Raises EngineFailed."""
        return _object(path, await self._request("GET", path, None, self._config.request_timeout_s))

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, loading: bool = False) -> dict[str, Any]:
        """Return the JSON object that a POST request returns. Raises EngineFailed.

        The request may take serving.load_timeout_s with `loading`, else serving.request_timeout_s.
        """
        return _object(path, await self.post_for_text(path, body, loading=loading))

    async def post_for_text(self, path: str, body: Mapping[str, Any] | None = None, *, loading: bool = False) -> str:
        """Like `post`, but return the response as text, for a route that does not answer with JSON."""
        timeout_s = self._config.load_timeout_s if loading else self._config.request_timeout_s
        return await self._request("POST", path, body, timeout_s)

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> str:
        assert self._session, "used outside its context manager"
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(method, self.url + path, json=body) as response,
            ):
                text = await response.text(errors="replace")
                if response.status != 200:
                    raise EngineFailed(f"{path} answered {response.status}: {' '.join(text.split())[:_QUOTED]}")
                return text
        except TimeoutError as error:
            raise EngineFailed(f"{path} did not answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise EngineFailed(f"{path}: {str(error) or type(error).__name__}") from error


def _object(path: str, text: str) -> dict[str, Any]:
    try:
        answer = json.loads(text) if text else {}
    except ValueError as error:
        raise EngineFailed(f"{path}: {error}") from error
    return answer if isinstance(answer, dict) else {}


class ServingEngine(Protocol):
    """Interface by which one kind of engine changes its weights. Requests in flight survive if `pause` keeps them."""

    async def pause(self) -> None:
        """Stop sampling until `resume`."""

    async def load(self, directory: Path, label: str) -> None:
        """Load the checkpoint in a directory, and sample under this label from then on."""

    async def resume(self) -> None:
        """Continue to sample."""

    async def label(self) -> str:
        """Return the label of the weights in use."""


@runtime_checkable
class PreparedEngine(Protocol):
    """An engine that fetches versions itself while it samples."""

    async def prepare(self, label: str) -> None:
        """Return once the version of this label can be loaded.

        Raises VersionUnfit if it cannot be fetched, and VersionLate if it has not been fetched in time.
        """


class VllmEngine:
    """Routes of vLLM's development mode (VLLM_SERVER_DEV_MODE=1).

    Requests in flight are kept: vLLM drops their cached keys and values, and recomputes them with the new weights.
    """

    def __init__(self, http: EngineHttp) -> None:
        self._http = http

    async def pause(self) -> None:
        """See ServingEngine."""
        await self._http.post("/pause?mode=keep")

    async def load(self, directory: Path, label: str) -> None:
        """See ServingEngine."""
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        await self._http.post("/collective_rpc", reload, loading=True)
        await self._http.post("/update_weight_version", {"new_version": label})

    async def resume(self) -> None:
        """See ServingEngine."""
        await self._http.post("/resume")

    async def label(self) -> str:
        """See ServingEngine."""
        return str((await self._http.get("/weight_info")).get("weight_version", ""))


class VllmLoraEngine(VllmEngine):
    """Routes of vLLM for adapters on a base model that does not change, and routes of its development mode.

    It needs `--enable-lora` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1. Requests name the adapter, POLICY, as their model.

    Each request carries the adapter's path, from which vLLM reads the adapter whenever the engine does not hold it. An
    update therefore replaces the files at that path, and then makes the engine drop the adapter. The update does not
    set vLLM's `load_inplace`, because requests would carry it too, and read the adapter again in each step.
    """

    async def load(self, directory: Path, label: str) -> None:
        """See ServingEngine."""
        # This trial load finds a damaged adapter, which would end the engine if it were read within a step. With
        # load_inplace, vLLM lets the trial be repeated under the same name.
        await self._post_adapter("load", lora_name=_TRIAL, lora_path=str(directory), load_inplace=True)
        path = str(await asyncio.to_thread(replace_adapter, directory, self._http.url))
        for number in await self._held():
            drop = {"method": "remove_lora", "args": [number]}
            await self._http.post("/collective_rpc", drop, loading=True)
        await self._post_adapter("unload", lora_name=_TRIAL)
        paths = {model.get("id"): model.get("root") for model in (await self._http.get("/v1/models")).get("data", [])}
        if paths.get(POLICY) != path:
            if POLICY in paths:
                await self._post_adapter("unload", lora_name=POLICY)
            await self._post_adapter("load", lora_name=POLICY, lora_path=path)
        await self._http.post("/update_weight_version", {"new_version": label})

    async def _post_adapter(self, verb: str, **adapter: object) -> None:
        # vLLM answers these routes with plain text.
        await self._http.post_for_text(f"/v1/{verb}_lora_adapter", adapter, loading=True)

    async def _held(self) -> list[int]:
        """Numbers of the adapters that the engine's workers hold; each worker returns a set, as text."""
        answer = await self._http.post("/collective_rpc", {"method": "list_loras"})
        return sorted({int(number) for held in answer.get("results", []) for number in re.findall(r"\d+", str(held))})


class SglangEngine:
    """SGLang's routes, which need no special mode. Requests in flight are kept, with their cached keys and values.

    SGLang can flush its prefix cache only while no request is in flight; a load that asks for it at another time ends
    SGLang's scheduler. The flush is therefore a separate request after the load, and SGLang may decline it.
    """

    def __init__(self, http: EngineHttp) -> None:
        self._http = http

    async def pause(self) -> None:
        """See ServingEngine."""
        await self._http.post("/pause_generation", {"mode": "in_place"})

    async def load(self, directory: Path, label: str) -> None:
        """See ServingEngine."""
        # abort_all_requests has its default, but is set because a similar route aborts by default. flush_cache is set
        # because its default can end the scheduler.
        update = {
            "model_path": str(directory),
            "weight_version": label,
            "abort_all_requests": False,
            "flush_cache": False,
        }
        answer = await self._http.post("/update_weights_from_disk", update, loading=True)
        if answer.get("success") is not True:
            raise EngineFailed(f"/update_weights_from_disk: {str(answer.get('message', answer))[:_QUOTED]}")
        try:
            await self._http.post_for_text("/flush_cache")
        except EngineFailed as declined:
            event(logger, "prefixes_kept", level=logging.DEBUG, url=self._http.url, version=label, reason=str(declined))

    async def resume(self) -> None:
        """See ServingEngine."""
        await self._http.post("/continue_generation", {})

    async def label(self) -> str:
        """See ServingEngine."""
        return str((await self._http.get("/model_info")).get("weight_version", ""))


ENGINES: Mapping[str, Callable[[EngineHttp], ServingEngine]] = {
    "vllm": VllmEngine,
    "sglang": SglangEngine,
    VLLM_LORA: VllmLoraEngine,
}
"""Kinds of engines by name."""


def engine_named(name: str) -> Callable[[EngineHttp], ServingEngine]:
    """Return the class or function that creates an engine of this kind.

    Raises ConfigurationError if there is no such name, or a class named by its import path lacks a method.
    """
    if name in ENGINES:
        return ENGINES[name]
    if ":" not in name:
        raise ConfigurationError(
            f"serving.engine is {name!r}; it must be {', '.join(ENGINES)}, vllm-plugin or package.module:Class"
        )
    engine: Callable[[EngineHttp], ServingEngine] = load_object(
        name, "serving.engine names", "an engine is named package.module:Class"
    )
    missing = [method for method in ("pause", "load", "resume", "label") if not callable(getattr(engine, method, None))]
    if missing:
        raise ConfigurationError(f"serving.engine names {name!r}, which has no method {', '.join(missing)}")
    return engine


def replace_adapter(directory: Path, url: str) -> Path:
    """Put the files of `directory` at the path of the engine at `url`, and return that path.

    The path is a symbolic link next to `directory`, replaced atomically. It points to hard links or copies for
    this engine alone, because other engines may have other versions. These files stay when `directory` is removed.
    Raises OSError.
    """
    path = directory.parent / f"adapter-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
    files = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    shutil.copytree(directory, files, copy_function=_link)
    link = files.with_name(f"{files.name}.link")
    link.symlink_to(files.name)
    link.replace(path)
    for earlier in path.parent.glob(f"{path.name}.*"):
        if earlier != files:
            shutil.rmtree(earlier, ignore_errors=True)
    return path


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # A file system without hard links.
        shutil.copyfile(source, target)


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
