"""The inference server: OpenAI completions over HTTP, in front of an engine that follows the weights topic.

Any OpenAI client can ask it. Each answer names the policy version that sampled it; `/readyz` is 200 once there is one.
"""

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from producers.config import InferenceConfig
from producers.inference.batching import Engine, Generator, NotReady, Request, row_seed
from producers.inference.protocol import (
    BadRequest,
    CompletionRequest,
    Limits,
    Tokenizer,
    completion_body,
    encode,
    error_body,
    parse_request,
    parse_text,
)
from topics.errors import ConfigurationError
from topics.logs import event

logger = logging.getLogger(__name__)
_MAX_BODY_BYTES = 64 * 1024 * 1024


class InferenceServer:
    """Serves a generator; use it as an async context manager, then `url` and `base_url` say where it listens."""

    def __init__(self, generator: Generator, tokenizer: Tokenizer, config: InferenceConfig) -> None:
        self.config = config
        self._tokenizer = tokenizer
        self._limits = Limits(
            max_prompt_tokens=generator.max_prompt_tokens,
            max_new_tokens=generator.max_new_tokens,
            max_rows=config.max_rows,
        )
        self._counter = itertools.count()
        self._errors = 0
        self._started = int(time.time())
        self._failed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine = Engine(generator, config, on_failure=self._on_failure)
        self._runner: web.AppRunner | None = None
        self.url = ""

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes as base_url."""
        return f"{self.url}/v1"

    @property
    def version(self) -> int:
        """The policy version in place, -1 before the first."""
        return self._engine.version

    async def start(self) -> None:
        """Listen and start the engine. Raises ConfigurationError when the address cannot be listened on."""
        self._loop = asyncio.get_running_loop()
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._openai_errors])
        app.add_routes(
            [
                web.post("/v1/completions", self._completions),
                web.post("/tokenize", self._tokenize),
                web.get("/v1/models", self._models),
                web.get("/livez", self._livez),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics),
            ]
        )
        # The engine has answered or refused every request by the time this waits for handlers.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=5.0)
        await self._runner.setup()
        host, port = self.config.host, self.config.port
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigurationError(
                f"the inference server cannot listen on {host}:{port} ({error.strerror}); stop what uses the port, or "
                "set inference.port (0 takes a free one)"
            ) from error
        port = self._runner.addresses[0][1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._engine.start()
        event(logger, "inference_listening", url=self.url, replica_id=self.config.replica_id)

    async def close(self) -> None:
        """Answer what is being decoded, refuse the rest, and stop listening."""
        await asyncio.to_thread(self._engine.close)
        if self._runner:
            await self._runner.cleanup()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.close()

    async def serve_until(self, stop: asyncio.Event) -> None:
        """Return when `stop` is set. Raises what stopped the engine, if it stops first."""
        waits = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(self._failed.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._engine.error is not None:
            raise self._engine.error

    def _on_failure(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._failed.set)

    @web.middleware
    async def _openai_errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except BadRequest as error:
            self._errors += 1
            return web.json_response(error.body, status=error.status)
        except NotReady as error:
            self._errors += 1
            return web.json_response(
                error_body(str(error), kind="server_error", code="not_ready"), status=503, headers={"Retry-After": "1"}
            )
        except web.HTTPException as error:
            if error.status < 400:
                raise
            return web.json_response(error_body(error.reason, kind="invalid_request_error"), status=error.status)
        except Exception as error:  # the generator's own failure: this request fails, the server goes on
            self._errors += 1
            event(logger, "request_failed", level=logging.ERROR, path=request.path, error=repr(error))
            return web.json_response(error_body(repr(error), kind="server_error"), status=500)

    async def _completions(self, request: web.Request) -> web.Response:
        asked = parse_request(await self._body(request), self._tokenizer, self._limits)
        if self._engine.version < 0:
            raise NotReady("no weights have arrived yet; try again")
        answer = await asyncio.wrap_future(
            self._engine.submit(
                Request(
                    prompts=asked.row_prompts,
                    seeds=self._seeds(asked),
                    temperature=asked.temperature,
                    max_tokens=asked.max_tokens,
                )
            )
        )
        completion = completion_body(
            asked,
            answer,
            self._tokenizer,
            identifier=f"cmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self.config.model,
        )
        return web.json_response({**completion, "replica_id": self.config.replica_id})

    async def _tokenize(self, request: web.Request) -> web.Response:
        tokens = encode(parse_text(await self._body(request)), self._tokenizer)
        return web.json_response(
            {"tokens": tokens, "count": len(tokens), "max_model_len": self._limits.max_prompt_tokens}
        )

    async def _body(self, request: web.Request) -> dict[str, Any]:
        try:
            body = await request.json()
        except ValueError as error:
            raise BadRequest(f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object")
        if body.get("model", self.config.model) != self.config.model:
            raise BadRequest(
                f"the model {body['model']!r} does not exist; this server has {self.config.model!r}",
                "model",
                status=404,
                code="model_not_found",
            )
        return body

    def _seeds(self, asked: CompletionRequest) -> list[int]:
        rows = range(len(asked.prompts) * asked.n)
        if asked.seed is not None:
            return [row_seed(asked.seed, row) for row in rows]
        return [row_seed("server", self.config.seed, self.config.replica_id, next(self._counter)) for _ in rows]

    async def _models(self, _request: web.Request) -> web.Response:
        model = {
            "id": self.config.model,
            "object": "model",
            "created": self._started,
            "owned_by": "rollstream",
            "policy_version": self._engine.version,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _livez(self, _request: web.Request) -> web.Response:
        if not self._engine.alive:
            return web.Response(text=f"engine stopped: {self._engine.error!r}\n", status=503)
        return web.Response(text="ok\n")

    async def _readyz(self, _request: web.Request) -> web.Response:
        if not self._engine.alive or self._engine.version < 0:
            return web.Response(text="no weights yet\n", status=503)
        return web.Response(text=f"ok, policy version {self._engine.version}\n")

    async def _metrics(self, _request: web.Request) -> web.Response:
        seen = self._engine.statistics
        counters = {
            "requests_total": seen.requests,
            "errors_total": self._errors,
            "batches_total": seen.batches,
            "rows_total": seen.rows,
            "prompt_tokens_total": seen.prompt_tokens,
            "completion_tokens_total": seen.tokens,
            "generate_seconds_total": seen.generate_s,
            "weight_swaps_total": seen.swaps,
        }
        gauges = {"policy_version": self._engine.version, "waiting_requests": self._engine.waiting}
        lines = []
        for kind, values in (("counter", counters), ("gauge", gauges)):
            for name, value in values.items():
                lines += [f"# TYPE rollstream_inference_{name} {kind}", f"rollstream_inference_{name} {value}"]
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")
