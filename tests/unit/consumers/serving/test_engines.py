"""Routes of engines: which requests are sent in which order, and what happens after refusals and silence."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollstream.consumers.serving.config import ServingConfig
from rollstream.consumers.serving.engines import (
    EngineFailed,
    EngineHttp,
    ServingEngine,
    SglangEngine,
    VllmEngine,
    engine_named,
)
from rollstream.topics.errors import ConfigurationError
from tests.support.producing import nobody_listening, serving_http

DIRECTORY = Path("/checkpoints/version-17")
QUICK = ServingConfig(request_timeout_s=0.05, load_timeout_s=0.1)
SENT_BY_VLLM = [
    ("POST", "/pause?mode=keep", None),
    ("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(DIRECTORY)}}),
    ("POST", "/update_weight_version", {"new_version": "17"}),
    ("POST", "/resume", None),
    ("GET", "/weight_info", None),
]
SENT_BY_SGLANG = [
    ("POST", "/pause_generation", {"mode": "in_place"}),
    (
        "POST",
        "/update_weights_from_disk",
        {"model_path": str(DIRECTORY), "weight_version": "17", "abort_all_requests": False, "flush_cache": False},
    ),
    ("POST", "/flush_cache", None),
    ("POST", "/continue_generation", {}),
    ("GET", "/model_info", None),
]


def ask(
    engine: Callable[[EngineHttp], ServingEngine],
    handler: Callable[[web.Request], Coroutine[Any, Any, web.Response]],
    what: Callable[[ServingEngine], Awaitable[object]],
    config: ServingConfig | None = None,
) -> object:
    async def main() -> object:
        async with EngineHttp(url, config or ServingConfig()) as http:
            return await what(engine(http))

    with serving_http(handler) as url:
        return asyncio.run(main())


@pytest.mark.parametrize(
    ("engine", "sent"),
    [(VllmEngine, SENT_BY_VLLM), (SglangEngine, SENT_BY_SGLANG)],
    ids=["vllm", "sglang"],
)
def test_an_update_is_these_requests_in_this_order(
    engine: type[VllmEngine | SglangEngine], sent: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    monkeypatch.setenv("ENGINE_KEY", "k-17")

    async def handler(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer k-17"
        seen.append((request.method, str(request.rel_url), await request.json() if request.can_read_body else None))
        return web.json_response({"success": True, "weight_version": "17"})

    async def update(engine: ServingEngine) -> str:
        await engine.pause()
        await engine.load(DIRECTORY, "17")
        await engine.resume()
        return await engine.label()

    assert ask(engine, handler, update, ServingConfig(api_key="env:ENGINE_KEY")) == "17"
    assert seen == sent


def test_a_load_that_sglang_answers_without_success_has_failed() -> None:
    async def handler(_request: web.Request) -> web.Response:
        return web.json_response({"success": False, "message": "shapes do not agree"})

    with pytest.raises(EngineFailed, match="shapes do not agree"):
        ask(SglangEngine, handler, lambda engine: engine.load(DIRECTORY, "17"))


def test_a_refusal_names_the_route_and_the_reason() -> None:
    async def handler(_request: web.Request) -> web.Response:
        return web.json_response({"error": "out of memory"}, status=500)

    with pytest.raises(EngineFailed, match=r"/collective_rpc answered 500.*out of memory"):
        ask(VllmEngine, handler, lambda engine: engine.load(DIRECTORY, "17"))


def test_an_engine_that_never_answers_fails_in_time() -> None:
    async def handler(_request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(EngineFailed, match=r"/pause\?mode=keep did not answer within 0.05 s"):
        ask(VllmEngine, handler, lambda engine: engine.pause(), QUICK)
    with pytest.raises(EngineFailed, match=r"/collective_rpc did not answer within 0.1 s"):
        ask(VllmEngine, handler, lambda engine: engine.load(DIRECTORY, "17"), QUICK)


def test_no_engine_and_an_answer_that_is_no_json_are_failures() -> None:
    async def handler(_request: web.Request) -> web.Response:
        return web.Response(text="<html>")

    with pytest.raises(EngineFailed, match="/weight_info"):
        ask(VllmEngine, handler, lambda engine: engine.label())

    async def main() -> None:
        async with EngineHttp(url, ServingConfig()) as http:
            await VllmEngine(http).pause()

    with nobody_listening() as url, pytest.raises(EngineFailed, match="/pause"):
        asyncio.run(main())


def test_an_engine_of_your_own_is_named_by_its_import_path(tmp_path: Path) -> None:
    (tmp_path / "my_engine.py").write_text(
        "class Mine:\n    def __init__(self, http): self.http = http\n"
        + "".join(f"    async def {name}(self, *_): pass\n" for name in ("pause", "load", "resume", "label"))
        + "class Half:\n    async def pause(self): pass\n"
    )
    engine = engine_named(f"{tmp_path}/my_engine.py:Mine")
    http = EngineHttp("http://127.0.0.1:1/v1/", ServingConfig())
    assert http.url == "http://127.0.0.1:1"
    assert engine(http).http is http  # type: ignore[attr-defined]
    assert engine_named("vllm") is VllmEngine
    with pytest.raises(ConfigurationError, match="has no method load, resume, label"):
        engine_named(f"{tmp_path}/my_engine.py:Half")
    with pytest.raises(
        ConfigurationError, match=re.escape("'vlm'; it must be vllm, sglang, vllm-lora, vllm-plugin or package")
    ):
        engine_named("vlm")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"urls": ("127.0.0.1:8000",)}, "serving.urls contains"),
        ({"keep_versions": 0}, "serving.keep_versions is 0"),
        ({"load_timeout_s": 0.0}, "serving.load_timeout_s is 0"),
        ({"metrics_interval_s": -1.0}, "serving.metrics_interval_s is -1"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ServingConfig(**settings)
