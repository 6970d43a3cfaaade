"""For tests of producers: a generator whose answers can be computed by hand, and servers in a thread of their own."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from consumers.models.tokenizer import CharacterTokenizer
from producers.config import InferenceConfig
from producers.inference.batching import Generated
from producers.inference.server import InferenceServer

TOKENIZER = CharacterTokenizer("0123456789>+=")


class SortingGenerator:
    """Answers `429>` with `249` and the end token where the row's seed is even or it is greedy, else with `429`.
    Of a longer conversation it takes the digits since the last `>` before.

    The logprob of the token at index i is -(i + 1) / 8: exact in float32. `versions` holds what `refresh` returns, the
    last one for ever; `before_generate` runs at the start of each batch.
    """

    max_prompt_tokens = 16
    max_new_tokens = 12

    def __init__(
        self, versions: Sequence[int] = (0,), *, before_generate: Callable[[list[str]], None] = lambda _: None
    ) -> None:
        self.versions = list(versions)
        self.version = -1
        self.before_generate = before_generate
        self.batches: list[tuple[int, list[str]]] = []
        """Version and prompts of each batch."""
        self.seeds: list[int] = []

    def refresh(self) -> int:
        self.version = self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]
        return self.version

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        temperatures: Sequence[float],
        max_tokens: Sequence[int],
    ) -> list[Generated]:
        texts = [TOKENIZER.decode(prompt) for prompt in prompts]
        self.batches.append((self.version, texts))
        self.seeds += seeds
        self.before_generate(texts)
        rows = []
        for text, seed, temperature, limit in zip(texts, seeds, temperatures, max_tokens, strict=True):
            digits = text.removesuffix(">").rsplit(">", 1)[-1]
            answer = "".join(sorted(digits)) if seed % 2 == 0 or temperature == 0 else digits
            tokens = [*TOKENIZER.encode(answer), TOKENIZER.eos_id]
            finish = "stop" if len(tokens) <= limit else "length"
            tokens = tokens[:limit]
            rows.append(Generated(tokens, [-(i + 1) / 8 for i in range(len(tokens))], finish))
        return rows


@contextmanager
def _in_a_thread(
    start: Callable[[], Coroutine[Any, Any, Any]], close: Callable[[], Coroutine[Any, Any, Any]]
) -> Iterator[None]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="test-server")
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(start(), loop).result(30)
        try:
            yield
        finally:
            asyncio.run_coroutine_threadsafe(close(), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


@contextmanager
def serving(generator: SortingGenerator, **config: Any) -> Iterator[InferenceServer]:
    """A real inference server over a generator."""
    server = InferenceServer(generator, TOKENIZER, InferenceConfig(**config))
    with _in_a_thread(server.start, server.close):
        yield server


@contextmanager
def serving_http(handler: Callable[[web.Request], Coroutine[Any, Any, web.Response]]) -> Iterator[str]:
    """Some other HTTP server; `handler` answers every request. Yields the base_url of its /v1."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    found: list[int] = []

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found.append(runner.addresses[0][1])

    with _in_a_thread(start, runner.cleanup):
        yield f"http://127.0.0.1:{found[0]}/v1"
