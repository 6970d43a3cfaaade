"""The inference server: the dialects over HTTP, in front of an engine that follows the topic `weights`.

Any OpenAI client can use it. Each answer names the policy versions that sampled it. `/readyz` is 200 once a version is
loaded, until the server drains.
"""

import asyncio
import itertools
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from rollstream.producers.config import InferenceConfig
from rollstream.producers.inference.admission import (
    RETRY_AFTER_S,
    Admission,
    Draining,
    TooManyWaiting,
    authorised,
)
from rollstream.producers.inference.chat.conversations import ConversationMemory
from rollstream.producers.inference.chat.plain_template import PlainTemplate
from rollstream.producers.inference.chat.template import ChatTemplate
from rollstream.producers.inference.decoding import DecodeRequest, DecodeResult, Generator, NotReady, row_seed
from rollstream.producers.inference.dialects import fields
from rollstream.producers.inference.dialects.chat_completions import ChatCompletions
from rollstream.producers.inference.dialects.completions import Completions
from rollstream.producers.inference.dialects.dialect import AnswerHeader, Dialect
from rollstream.producers.inference.dialects.fields import BadRequest, error_body
from rollstream.producers.inference.dialects.sampled_choices import choices_of, encode, has_new_stop
from rollstream.producers.inference.dialects.sampling_parameters import RequestLimits, SamplingRequest, check_names
from rollstream.producers.inference.engine import Engine
from rollstream.producers.inference.event_stream import EventStream
from rollstream.producers.inference.token_codec import TokenCodec
from rollstream.topics.http_server import BoundServer, listen
from rollstream.topics.logs import event
from rollstream.topics.metrics.values import CONTENT_TYPE, text_of
from rollstream.topics.secrets import resolve

logger = logging.getLogger(__name__)
_OPEN_PATHS = {"/livez", "/readyz", "/health", "/metrics"}
"""Paths that need no key, because probes and scrapers have none."""


class InferenceServer:
    """Serves a generator; use it as an async context manager. `url` and `base_url` are its address once it listens."""

    def __init__(
        self,
        generator: Generator,
        tokenizer: TokenCodec,
        config: InferenceConfig,
        template: ChatTemplate | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """`template` renders chats (default: the plain template); `vocab_size` is the model's (default: the
        tokenizer's).

        Raises ConfigurationError if the key cannot be resolved.
        """
        self.config = config
        self._key = resolve("inference.api_key", config.api_key)
        self._tokenizer = tokenizer
        self._limits = RequestLimits(
            max_model_len=generator.max_model_len,
            max_rows=config.max_rows,
            vocab_size=vocab_size or tokenizer.vocab_size,
            truncated_sampling=config.truncated_sampling,
        )
        self._counter = itertools.count()
        self._errors = 0
        self._started = int(time.time())
        self._failed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine = Engine(generator, config, on_failure=self._on_failure)
        self._admission = Admission(config.max_waiting_requests, lambda: self._engine.waiting)
        memory = ConversationMemory(config.conversation_cache_tokens)
        chat = ChatCompletions(tokenizer, self._limits, template or PlainTemplate(tokenizer), memory)
        self._dialects: dict[str, Dialect[Any]] = {
            "/v1/completions": Completions(tokenizer, self._limits),
            "/v1/chat/completions": chat,
        }
        self._server: BoundServer | None = None
        self.url = ""

    @property
    def base_url(self) -> str:
        """Base URL for OpenAI clients."""
        return f"{self.url}/v1"

    @property
    def version(self) -> int:
        """The policy version loaded, -1 before the first."""
        return self._engine.version

    async def start(self) -> None:
        """Listen and start the engine. Raises ConfigurationError if it cannot listen on the address."""
        self._loop = asyncio.get_running_loop()
        routes = [
            *(web.post(path, self._sample) for path in self._dialects),
            web.post("/tokenize", self._tokenize),
            web.get("/v1/models", self._models),
            web.get("/livez", self._livez),
            web.get("/readyz", self._readyz),
            web.get("/health", self._readyz),
            web.get("/metrics", self._metrics),
        ]
        # By the time the shutdown waits for handlers, the engine has answered or refused every request. A client that
        # disconnects cancels its handler, which cancels its request.
        self._server = await listen(
            routes,
            self.config.host,
            self.config.port,
            name="inference server",
            setting="inference.port",
            max_body_bytes=self.config.max_body_bytes,
            max_body_setting="inference.max_body_bytes",
            middlewares=[self._openai_errors],
            shutdown_timeout=5.0,
            handler_cancellation=True,
        )
        self.url = self._server.url
        self._engine.start()
        event(logger, "inference_listening", url=self.url, replica_id=self.config.replica_id)

    async def close(self) -> None:
        """Refuse new requests, finish admitted requests within inference.drain_timeout_s, and stop listening."""
        drained = not self._engine.alive or await self._admission.drain(self.config.drain_timeout_s)
        if not drained:
            event(logger, "drain_timeout", level=logging.WARNING, unanswered=self._admission.admitted)
        await asyncio.to_thread(self._engine.close)
        if self._server:
            await self._server.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.close()

    async def serve_until(self, stop: asyncio.Event) -> None:
        """Return when `stop` is set. Raises the engine's error if the engine stops first."""
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
            if request.path not in _OPEN_PATHS and not authorised(request.headers.get("Authorization"), self._key):
                raise BadRequest(
                    "the Authorization header does not hold this server's key", status=401, code="invalid_api_key"
                )
            return await handler(request)
        except BadRequest as error:
            self._errors += 1
            return web.json_response(error.body, status=error.status)
        except (NotReady, Draining) as error:
            return self._try_again(error, 503, "not_ready")
        except TooManyWaiting as error:
            return self._try_again(error, 429, "rate_limit_exceeded")
        except web.HTTPException as error:
            if error.status < 400:
                raise
            self._errors += 1
            return web.json_response(error_body(error.reason, kind="invalid_request_error"), status=error.status)
        except Exception as error:  # the generator failed: this request fails, the server continues
            self._failed_request(request, error)
            return web.json_response(error_body(repr(error), kind="server_error"), status=500)

    def _failed_request(self, request: web.Request, error: Exception) -> None:
        self._errors += 1
        event(logger, "request_failed", level=logging.ERROR, exc_info=error, path=request.path, error=repr(error))

    def _try_again(self, error: Exception, status: int, code: str) -> web.Response:
        self._errors += 1
        body = error_body(str(error), kind="server_error", code=code)
        return web.json_response(body, status=status, headers={"Retry-After": str(RETRY_AFTER_S)})

    async def _sample(self, http: web.Request) -> web.StreamResponse:
        with self._admission.admit():
            dialect = self._dialects[http.path]
            request = dialect.parse(await self._body(http), http.headers.get("X-Session-ID", ""))
            if self._engine.version < 0:
                raise NotReady("no weights have arrived yet; try again")
            header = AnswerHeader(
                identifier=f"{dialect.prefix}-{uuid.uuid4().hex}",
                created=int(time.time()),
                model=self.config.model,
                replica_id=self.config.replica_id,
            )
            if request.stream:
                stream = EventStream(http, dialect, request, header)
                response = await stream.write(self._decode(request.sampling, stream.on_tokens))
                if stream.failure is not None:
                    self._failed_request(http, stream.failure)
                return response
            choices = choices_of(request.sampling, await self._decode(request.sampling), self._tokenizer)
            for choice in choices:
                dialect.remember(request, choice)
            return web.json_response(dialect.answer(request, choices, header))

    def _decode(
        self,
        sampling: SamplingRequest,
        on_tokens: Callable[[int, Sequence[int], Sequence[float]], None] | None = None,
    ) -> "asyncio.Future[DecodeResult]":
        rows, parameters = sampling.row_prompts, sampling.parameters

        def ends(tokens: Sequence[int], new: int) -> bool:
            return has_new_stop(tokens, new, parameters.stop, self._tokenizer)

        request = DecodeRequest(
            prompts=rows,
            seeds=[row_seed(parameters.seed, row) for row in range(len(rows))]
            if parameters.seed is not None
            else [row_seed("server", self.config.seed, self.config.replica_id, next(self._counter)) for _ in rows],
            max_tokens=sampling.max_tokens,
            temperature=parameters.temperature,
            top_p=parameters.top_p,
            top_k=parameters.top_k,
            min_p=parameters.min_p,
            stop_token_ids=sorted(parameters.stop_token_ids),
            routed_experts=parameters.routed_experts,
            constraint=sampling.constraint,
            on_tokens=on_tokens,
            ends=ends if parameters.stop else None,
        )
        return asyncio.wrap_future(self._engine.submit(request))

    async def _tokenize(self, http: web.Request) -> web.Response:
        """Encode a text as vLLM does, for a client that continues a prompt."""
        body = await self._body(http)
        check_names(body, {"prompt"}, {"add_special_tokens": (False,)})
        text = body.get("prompt")
        if not isinstance(text, str):
            raise BadRequest("prompt must be a string", "prompt")
        tokens = encode(text, self._tokenizer)
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": self._limits.max_model_len})

    async def _body(self, http: web.Request) -> dict[str, Any]:
        try:
            body = json.loads(await http.read())
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object")
        model = body.get("model")
        if model is not None and model != self.config.model:
            raise BadRequest(
                f"the model {fields.shown(model)} does not exist; this server has {self.config.model!r}",
                "model",
                status=404,
                code="model_not_found",
            )
        return body

    async def _models(self, _request: web.Request) -> web.Response:
        model = {
            "id": self.config.model,
            "object": "model",
            "created": self._started,
            "owned_by": "rollstream",
            "max_model_len": self._limits.max_model_len,
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
        if self._admission.draining:
            return web.Response(text="draining\n", status=503)
        return web.Response(text=f"ok, policy version {self._engine.version}\n")

    def metrics(self) -> dict[str, float]:
        """Metrics by name: totals since the start, whose names end in _total, and the current state."""
        statistics = self._engine.statistics
        return {
            "requests_total": statistics.requests,
            "errors_total": self._errors,
            "decode_calls_total": statistics.decode_calls,
            "rows_total": statistics.rows,
            "prompt_tokens_total": statistics.prompt_tokens,
            "completion_tokens_total": statistics.tokens,
            "generate_seconds_total": statistics.generate_s,
            "weight_swaps_total": statistics.swaps,
            "policy_version": self._engine.version,
            "waiting_requests": self._engine.waiting,
            "admitted_requests": self._admission.admitted,
            "decoding_rows": self._engine.decoding,
            "max_rows": self.config.max_rows,
            "cache_bytes": self._engine.generator.cache_bytes,
        }

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=text_of("infer", self.metrics()), headers={"Content-Type": CONTENT_TYPE})
