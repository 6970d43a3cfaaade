"""For tests of producers: a generator whose answers can be computed by hand, and servers in a thread of their own."""

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from rollstream.consumers.models.tokenizer import CharacterTokenizer
from rollstream.producers.config import InferenceConfig
from rollstream.producers.inference.client import Completion
from rollstream.producers.inference.decoding import DecodeRow, FinishReason
from rollstream.producers.inference.requests import SampleRequest
from rollstream.producers.inference.server import InferenceServer
from tests.support.loops import loop_in_a_thread

TOKENIZER = CharacterTokenizer("0123456789>+=")


class CountingCodec(CharacterTokenizer):
    """Counts the tokens that are decoded."""

    decoded = 0

    def decode(self, ids: Iterable[int]) -> str:
        tokens = list(ids)
        CountingCodec.decoded += len(tokens)
        return super().decode(tokens)


class OneTokenPolicy:
    """A client without a server, whose samples have one token each."""

    newest_version = 0

    async def complete(self, request: SampleRequest) -> list[Completion]:
        sample = Completion(
            text="17",
            truncated=False,
            prompt_tokens=np.asarray([1], np.int32),
            tokens=np.asarray([2], np.int32),
            logprobs=np.asarray([-1.0], np.float32),
            versions=np.asarray([0], np.int64),
            sampling_params={},
            timestamp=1.0,
            inference_time_s=0.5,
        )
        return [sample] * request.n

    async def tokenize(self, text: str, *, session: str) -> list[int]:
        raise NotImplementedError("no environment of these tests has a second turn")


class SortedRow(NamedTuple):
    """Tokens of the row in a slot."""

    slot: int
    tokens: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None
    kept: Sequence[Sequence[int]] = ()


class SortingGenerator:
    """Answers `429>` with `249` and the end token if the row's seed is even or it is greedy, otherwise with `429`.
    In a longer conversation it takes the digits between the last two `>`.

    The logprob of the token at index i is -(i + 1) / 8: exact in float32. `versions` holds what `refresh` returns, the
    last one for ever; `before_generate` runs whenever rows start. A call of `decode` gives `tokens_at_once` tokens of
    each row.
    """

    max_model_len = 28
    cache_bytes = 0
    tokenizer = TOKENIZER

    def __init__(
        self,
        versions: Sequence[int] = (0,),
        *,
        before_generate: Callable[[list[str]], None] = lambda _: None,
        tokens_at_once: int = 4096,
    ) -> None:
        self.versions = list(versions)
        self.version = -1
        self.before_generate = before_generate
        self.tokens_at_once = tokens_at_once
        self.slots = 256
        self.batches: list[tuple[int, list[str]]] = []
        """Version and prompts of the rows that started together."""
        self.seeds: list[int] = []
        self.decoding: dict[int, SortedRow] = {}
        """The rest of each row, by slot."""

    @property
    def free(self) -> int:
        return self.slots - len(self.decoding)

    @property
    def behind(self) -> bool:
        return len(self.versions) > 1

    def refresh(self) -> int:
        self.version = self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]
        return self.version

    def start(self, rows: Sequence[DecodeRow]) -> list[int]:
        texts = [self.tokenizer.decode(row.prompt) for row in rows]
        self.batches.append((self.version, texts))
        self.seeds += [row.seed for row in rows]
        self.before_generate(texts)
        slots = [slot for slot in range(self.slots) if slot not in self.decoding][: len(rows)]
        for slot, row, text in zip(slots, rows, texts, strict=True):
            answer = self.answer(text, row.seed, row.request.temperature)
            tokens = [*self.tokenizer.encode(answer), self.tokenizer.eos_id]
            logprobs = [-(i + 1) / 8 for i in range(len(tokens))]
            limit = row.request.max_tokens
            self.decoding[slot] = SortedRow(
                slot, tokens[:limit], logprobs[:limit], "stop" if len(tokens) <= limit else "length"
            )
        return slots

    def decode(self) -> list[SortedRow]:
        count, decoded = self.tokens_at_once, []
        for slot, row in list(self.decoding.items()):
            if len(row.tokens) <= count:
                decoded.append(self.decoding.pop(slot))
            else:
                decoded.append(SortedRow(slot, row.tokens[:count], row.logprobs[:count], None))
                self.decoding[slot] = row._replace(tokens=row.tokens[count:], logprobs=row.logprobs[count:])
        return decoded

    def routed_experts(self, slot: int, length: int) -> NDArray[np.uint8] | None:
        return None

    def end(self, slot: int) -> None:
        del self.decoding[slot]

    def reset(self) -> None:
        self.decoding.clear()

    def answer(self, text: str, seed: int, temperature: float) -> str:
        """Text of the answer to a prompt."""
        digits = text.removesuffix(">").rsplit(">", 1)[-1]
        return "".join(sorted(digits)) if seed % 2 == 0 or temperature == 0 else digits


class ScriptedGenerator(SortingGenerator):
    """Answers chats of our characters: `script` holds the text of each turn, the last one for all after it."""

    max_model_len = 2048
    tokenizer = CharacterTokenizer()

    def __init__(self, script: Sequence[str], versions: Sequence[int] = (0,), *, tokens_at_once: int = 4096) -> None:
        super().__init__(versions, tokens_at_once=tokens_at_once)
        self.script = list(script)

    def answer(self, text: str, seed: int, temperature: float) -> str:
        return self.script[min(text.count("assistant\n"), len(self.script)) - 1]


@contextmanager
def _in_a_thread(
    start: Callable[[], Coroutine[Any, Any, Any]], close: Callable[[], Coroutine[Any, Any, Any]]
) -> Iterator[None]:
    with loop_in_a_thread() as loop:
        asyncio.run_coroutine_threadsafe(start(), loop).result(300)
        try:
            yield
        finally:
            asyncio.run_coroutine_threadsafe(close(), loop).result(300)


@contextmanager
def serving(generator: SortingGenerator, **config: Any) -> Iterator[InferenceServer]:
    """A real inference server over a generator."""
    inference = InferenceConfig(**config)
    generator.slots = inference.max_rows
    server = InferenceServer(generator, generator.tokenizer, inference)
    with _in_a_thread(server.start, server.close):
        yield server


@contextmanager
def nobody_listening() -> Iterator[str]:
    """A base_url at which connections are refused: its port is bound, so that nobody else can listen there."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}/v1"


@contextmanager
def serving_http(handler: Callable[[web.Request], Coroutine[Any, Any, web.Response]]) -> Iterator[str]:
    """An HTTP server whose `handler` answers every request. Yields the base_url of its /v1."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    collected: list[int] = []

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        collected.append(runner.addresses[0][1])

    with _in_a_thread(start, runner.cleanup):
        yield f"http://127.0.0.1:{collected[0]}/v1"
