"""The engine: rows join and leave, weights swap between steps, tokens stream, a cancelled request frees its slots."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import Any

import pytest

from rollstream.producers.config import InferenceConfig
from rollstream.producers.inference.decoding import (
    DecodeRequest,
    DecodeResult,
    DecodeRow,
    NotReady,
    PolicySpan,
    row_seed,
)
from rollstream.producers.inference.engine import Engine
from tests.support.producing import TOKENIZER, SortedRow, SortingGenerator
from tests.support.waiting import eventually

ANSWER = [*TOKENIZER.encode("123456"), TOKENIZER.eos_id]


class SteppedGenerator(SortingGenerator):
    """Decodes one token a call, when the test allows the call."""

    def __init__(self, versions: Sequence[int] = (0,)) -> None:
        super().__init__(versions, tokens_at_once=1)
        self.slots = 4
        self.allowed = threading.Semaphore(0)
        self.calls = 0

    def refresh(self) -> int:
        """The version that the test has set last."""
        self.version = self.versions[0]
        return self.version

    @property
    def behind(self) -> bool:
        return self.version != self.versions[0]

    def decode(self) -> list[SortedRow]:
        assert self.allowed.acquire(timeout=300)
        self.calls += 1
        return super().decode()


@contextmanager
def running(generator: SortingGenerator, *, gather_ms: int = 0, **config: Any) -> Iterator[Engine]:
    engine = Engine(generator, InferenceConfig(refresh_ms=1, gather_ms=gather_ms, **config))
    engine.start()
    try:
        yield engine
    finally:
        if isinstance(generator, SteppedGenerator):
            generator.allowed.release(1000)
        engine.close()


def request(prompt: str = "654321>", n: int = 1, max_tokens: int = 10, **more: Any) -> DecodeRequest:
    return DecodeRequest(
        prompts=[TOKENIZER.encode(prompt)] * n, seeds=[0] * n, max_tokens=max_tokens, temperature=1.0, **more
    )


def step(engine: Engine, generator: SteppedGenerator, calls: int = 1) -> None:
    """Let the engine make so many decode calls, and wait until it has."""
    calls += generator.calls
    generator.allowed.release(calls - generator.calls)
    eventually(lambda: engine.statistics.decode_calls >= calls, 60, f"{calls} calls")


def started(generator: SortingGenerator, count: int) -> Callable[[], bool]:
    return lambda: len(generator.seeds) >= count


def test_a_request_joins_and_leaves_while_another_decodes() -> None:
    generator = SteppedGenerator()
    with running(generator) as engine:
        long = engine.submit(request())
        eventually(started(generator, 1), 60, "the long request decodes")
        step(engine, generator, 2)
        short = engine.submit(request("21>", n=2, max_tokens=2))
        # The call that is waiting began before this request.
        step(engine, generator, 3)
        assert [row.tokens for row in short.result(300).rows] == [TOKENIZER.encode("12")] * 2
        assert not long.done()
        step(engine, generator, 2)
        assert long.result(300).rows[0].tokens == ANSWER
        assert engine.decoding == 0


def test_each_token_is_of_the_version_that_sampled_it() -> None:
    generator = SteppedGenerator(versions=(3,))
    with running(generator) as engine:
        future = engine.submit(request())
        eventually(started(generator, 1), 60, "it decodes")
        for version in (3, 5, 6):
            generator.versions = [version]
            step(engine, generator, 2)
        step(engine, generator)
        row = future.result(300).rows[0]
    assert row.tokens == ANSWER
    assert [span.version for span in row.spans] == [3, 5, 6]
    edges = [0, *(span.stop for span in row.spans)]
    assert [span.start for span in row.spans] == edges[:-1]
    assert edges[-1] == len(row.tokens)
    assert future.result().version == 3


def test_with_one_version_a_request_new_weights_wait_for_it_and_new_requests_for_them() -> None:
    generator = SteppedGenerator(versions=(3,))
    with running(generator, swap="between_requests") as engine:
        first = engine.submit(request())
        eventually(started(generator, 1), 60, "it decodes")
        generator.versions = [4]
        second = engine.submit(request("21>"))
        step(engine, generator, 6)
        assert len(generator.seeds) == 1
        step(engine, generator, 4)
        assert first.result(300).rows[0].spans == [PolicySpan(3, 0, 7)]
        assert second.result(300).rows[0].spans == [PolicySpan(4, 0, 3)]


def test_tokens_are_handed_on_as_they_are_decoded() -> None:
    generator = SteppedGenerator()
    seen: list[tuple[int, list[int], list[float]]] = []
    with running(generator) as engine:
        future = engine.submit(
            request(n=2, on_tokens=lambda row, tokens, logprobs: seen.append((row, list(tokens), list(logprobs))))
        )
        eventually(started(generator, 2), 60, "it decodes")
        step(engine, generator)
        # A call is counted before its tokens are handed on.
        first = [(0, ANSWER[:1], [-0.125]), (1, ANSWER[:1], [-0.125])]
        eventually(lambda: seen == first, 60, "the first token of each row")
        step(engine, generator, 6)
        rows = future.result(300).rows
    for index, row in enumerate(rows):
        assert [token for number, tokens, _ in seen if number == index for token in tokens] == row.tokens
        assert [value for number, _, values in seen if number == index for value in values] == row.logprobs


def test_a_cancelled_request_frees_its_slots_and_starts_no_more_rows() -> None:
    generator = SteppedGenerator()
    with running(generator) as engine:
        large = engine.submit(request(n=6))
        other = engine.submit(request("21>"))
        eventually(started(generator, 4), 60, "four rows decode")
        step(engine, generator)
        assert large.cancel()
        step(engine, generator, 2)
        assert list(generator.decoding) == [0]
        step(engine, generator, 2)
        assert other.result(300).rows[0].tokens == [*TOKENIZER.encode("12"), TOKENIZER.eos_id]
        with pytest.raises(CancelledError):
            large.result(0)
        assert len(generator.seeds) == 5
        assert engine.waiting == 0


def test_a_request_ends_its_own_rows() -> None:
    generator = SteppedGenerator()
    with running(generator) as engine:
        future = engine.submit(request(ends=lambda tokens, _new: TOKENIZER.decode(tokens).endswith("23")))
        generator.allowed.release(3)
        row = future.result(300).rows[0]
    assert (TOKENIZER.decode(row.tokens), row.finish_reason) == ("123", "stop")
    assert engine.statistics.tokens == 3


def test_a_request_whose_own_function_fails_is_the_only_one_that_fails() -> None:
    def refuse(_row: int, _tokens: Sequence[int], _logprobs: Sequence[float]) -> None:
        raise ValueError("nobody listens")

    with running(SortingGenerator(tokens_at_once=1)) as engine:
        failing, other = engine.submit(request(on_tokens=refuse)), engine.submit(request())
        with pytest.raises(ValueError, match="nobody listens"):
            failing.result(300)
        assert other.result(300).rows[0].tokens == ANSWER
        eventually(lambda: engine.decoding == 0, 60, "its slot is free")


def test_an_error_of_the_generator_fails_what_decodes_and_nothing_after_it() -> None:
    class FailsOnce(SteppedGenerator):
        def decode(self) -> list[SortedRow]:
            decoded = super().decode()
            if self.calls == 2:
                raise ValueError("out of memory")
            return decoded

    generator = FailsOnce()
    # Otherwise the engine may decode the first request, and wait there, before the second one comes.
    with running(generator, gather_ms=2000) as engine:
        futures = [engine.submit(request(n=3)), engine.submit(request(n=3))]
        eventually(started(generator, 4), 60, "both decode")
        generator.allowed.release(1000)
        for future in futures:
            with pytest.raises(ValueError, match="out of memory"):
                future.result(300)
        assert engine.submit(request()).result(300).rows[0].tokens == ANSWER


def test_closing_finishes_what_decodes_and_refuses_what_waits() -> None:
    generator = SteppedGenerator()
    engine = Engine(generator, InferenceConfig(refresh_ms=1, gather_ms=0))
    engine.start()
    decoding: Future[DecodeResult] = engine.submit(request(n=5))
    eventually(started(generator, 4), 60, "four of five rows decode")
    waiting = engine.submit(request())
    closing = threading.Thread(target=engine.close)
    closing.start()
    generator.allowed.release(1000)
    closing.join(300)
    assert [row.tokens for row in decoding.result(0).rows] == [ANSWER] * 5
    with pytest.raises(NotReady, match="stopped"):
        waiting.result(0)
    with pytest.raises(NotReady, match="stopped"):
        engine.submit(request()).result(0)


def test_closing_waits_no_longer_than_it_is_told() -> None:
    generator = SteppedGenerator()
    engine = Engine(generator, InferenceConfig(refresh_ms=1, gather_ms=0))
    engine.start()
    future = engine.submit(request())
    eventually(started(generator, 1), 60, "it decodes")
    threading.Timer(0.2, lambda: generator.allowed.release(1)).start()
    engine.close(timeout_s=0.1)
    with pytest.raises(NotReady, match="stopped"):
        future.result(0)


def test_every_row_of_a_request_has_a_seed_of_its_own() -> None:
    assert len({row_seed("a", 1), row_seed("a", 2), row_seed("b", 1), row_seed("a", 1, 0)}) == 4
    assert 0 <= row_seed(1) < 2**64
    assert DecodeRow(request(n=2), 1).prompt == TOKENIZER.encode("654321>")
