"""The tokenizer of a run as records: whole or not at all, in any order, and the one that was written last."""

from collections.abc import Sequence

import pytest

from rollstream.consumers.models.tokenizer_log import (
    TEXTS_AT_ONCE,
    RunTokenizer,
    digest_of,
    newest_tokenizer,
    parts_of,
)
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.records import TokenizerPart
from rollstream.topics.wire.codec import encode


def tokenizer(word: str, tokens: int = 3) -> RunTokenizer:
    files = {"tokenizer.json": word.encode() * 10, "tokenizer_config.json": b""}
    return RunTokenizer(digest_of(files), [f"{word}{number}" for number in range(tokens)], files)


def messages(*parts: TokenizerPart) -> list[KafkaRecord]:
    return [KafkaRecord("main.tokenizers", 0, at, 0, b"", encode(part)) for at, part in enumerate(parts)]


@pytest.mark.parametrize("tokens", [0, 3, TEXTS_AT_ONCE, 2 * TEXTS_AT_ONCE + 1])
def test_a_tokenizer_of_any_size_is_read_as_it_was_written(tokens: int) -> None:
    written = tokenizer("a", tokens)
    parts = parts_of(written, piece_bytes=3)
    assert max(len(part.data) for part in parts) == 3
    assert newest_tokenizer(messages(*reversed(parts))) == written


def test_the_tokenizer_that_was_written_last_is_the_runs() -> None:
    first, second = tokenizer("a"), tokenizer("b")
    both = [*parts_of(first), *parts_of(second)]
    assert newest_tokenizer(messages(*both)) == second
    assert newest_tokenizer(messages(*both, parts_of(first)[0])) == first
    assert newest_tokenizer(messages()) is None


def damaged(parts: Sequence[TokenizerPart]) -> list[TokenizerPart]:
    whole = next(part for part in parts if part.file == "tokenizer.json")
    return [*parts, TokenizerPart(**vars(whole) | {"data": whole.data[1:]})]


def claiming(parts: int) -> list[TokenizerPart]:
    return [TokenizerPart(**vars(part) | {"parts": parts}) for part in parts_of(tokenizer("b"))]


def test_a_tokenizer_that_is_not_whole_or_differs_from_its_digest_does_not_count() -> None:
    first, second = tokenizer("a"), tokenizer("b")
    for newer in (parts_of(second)[:-1], parts_of(second)[1:], damaged(parts_of(second)), claiming(2**50)):
        assert newest_tokenizer(messages(*parts_of(first), *newer)) == first
