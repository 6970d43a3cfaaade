"""An answer is cut at its first stop string, and its text grows, wherever tokens and characters are cut; for both, few
tokens are decoded."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.consumers.models.tokenizer import CharacterTokenizer
from rollstream.consumers.models.tokenizer_file import TokenizerFile, load_tokenizer
from rollstream.producers.inference.decoding import SampledSequence
from rollstream.producers.inference.dialects.sampled_choices import (
    GrowingText,
    SampledChoice,
    has_new_stop,
    sampled_choice,
)
from rollstream.producers.inference.dialects.sampling_parameters import SamplingParameters
from rollstream.producers.inference.token_codec import TokenCodec
from tests.support.checkpoints import write_tokenizer
from tests.support.producing import CountingCodec

CHARACTERS = st.sampled_from("ab \n</äß漢字🍎👩\u200d")
TEXTS = st.text(CHARACTERS, max_size=80) | st.text(st.sampled_from("\nß🍎"), max_size=80)


@cache
def bytes_in_pairs() -> TokenizerFile:
    """A tokenizer of Qwen's kind, some of whose tokens are a part of a character or end within one."""
    with TemporaryDirectory() as directory:
        write_tokenizer(Path(directory), ["aab </a> äß äß 漢字漢字 🍎👩\u200d🍎 b\n\n"] * 3)
        return load_tokenizer(directory)


@cache
def bytes_where_needed() -> TokenizerFile:
    """A tokenizer of Llama 2's kind, which writes characters outside its vocabulary as bytes."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581ab</>", "</s>"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True))
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return TokenizerFile(tokenizer, [vocabulary["</s>"]])


def cut(tokens: Sequence[int], stops: Sequence[str], tokenizer: TokenCodec, *ids: int) -> SampledChoice:
    parameters = SamplingParameters(
        n=1, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=None, stop=(*stops,), stop_token_ids=frozenset(ids)
    )
    row = SampledSequence(tokens, [0.0] * len(tokens), "length")
    return sampled_choice(0, [1], row, parameters, tokenizer)


def first_stop(tokens: Sequence[int], stops: Sequence[str], tokenizer: TokenCodec) -> tuple[int, str, str | None]:
    """Length, text and stop of an answer by definition: the shortest beginning whose text contains a stop."""
    for length in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:length])
        if places := [(text.find(stop), stop) for stop in stops if stop in text]:
            start, stop = min(places)
            return length, text[:start], stop
    return len(tokens), tokenizer.decode(tokens), None


def stops_of(data: st.DataObject, text: str) -> list[str]:
    """Stops of which most are parts of the text, and none has an incomplete character."""
    text = text.replace("\ufffd", "")
    begin = data.draw(st.integers(0, max(0, len(text) - 1)))
    part = text[begin : begin + data.draw(st.integers(1, 4))]
    return [stop for stop in (part, data.draw(st.text(CHARACTERS, max_size=3))) if stop] or ["</a>"]


def sampled(data: st.DataObject) -> tuple[TokenizerFile, list[int]]:
    """A tokenizer, and tokens of a row before its end: any at all, or those of a text, perhaps cut off."""
    tokenizer = data.draw(st.sampled_from([bytes_in_pairs, bytes_where_needed]))()
    tokens = tokenizer.encode(data.draw(TEXTS))
    if tokenizer is bytes_in_pairs():
        anything = st.lists(st.integers(0, min(tokenizer.eos_ids) - 1), max_size=80)
        tokens = data.draw(st.just(tokens) | anything)
    return tokenizer, tokens[: data.draw(st.integers(0, len(tokens)))]


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_an_answer_is_cut_at_the_shortest_beginning_with_a_stop(data: st.DataObject) -> None:
    tokenizer, tokens = sampled(data)
    stops = stops_of(data, tokenizer.decode(tokens))
    choice = cut(tokens, stops, tokenizer)
    length, text, stop = first_stop(tokens, stops, tokenizer)
    if stop is None or not any(stop in tokenizer.decode(tokens) for stop in stops):
        assert (len(choice.tokens), choice.text, choice.stop_reason) == (len(tokens), tokenizer.decode(tokens), None)
    else:
        assert (len(choice.tokens), choice.text, choice.stop_reason) == (length, text, stop)
        assert choice.finish_reason == "stop"


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_a_growing_row_is_ended_with_the_first_new_tokens_that_complete_a_stop(data: st.DataObject) -> None:
    tokenizer, tokens = sampled(data)
    stops = stops_of(data, tokenizer.decode(tokens))
    length = 0
    while length < len(tokens):
        new = min(data.draw(st.integers(1, 5) | st.integers(1, 60)), len(tokens) - length)
        length += new
        complete = any(stop in tokenizer.decode(tokens[:length]) for stop in stops)
        assert has_new_stop(tokens[:length], new, stops, tokenizer) == complete
        if complete:
            break


def test_a_stop_is_seen_after_characters_of_several_tokens() -> None:
    tokenizer = bytes_where_needed()
    tokens = tokenizer.encode("🍎漢🍎漢🍎漢🍎\n")
    assert has_new_stop(tokens, 1, ["\n"], tokenizer)
    assert not has_new_stop(tokens[:-1], 1, ["\n"], tokenizer)


def test_a_stop_token_ends_an_answer_unless_a_stop_string_is_completed_before_it() -> None:
    tokenizer = CharacterTokenizer()
    tokens, token = tokenizer.encode("one; two. three."), tokenizer.encode(".")[0]
    choice = cut(tokens, ["; ", "three"], tokenizer, token)
    assert (choice.text, choice.stop_reason, len(choice.tokens)) == ("one", "; ", 5)
    choice = cut(tokens, ["three"], tokenizer, token)
    assert (choice.text, choice.stop_reason, len(choice.tokens)) == ("one; two", token, 9)


@pytest.mark.parametrize("new", [1, 100])
def test_to_find_a_stop_at_the_end_of_a_long_answer_few_tokens_are_decoded(new: int) -> None:
    codec, length, stops = CountingCodec(), 4096, ["</answer>"]
    tokens = codec.encode("x" * (length - 9) + "</answer>" + "x" * (new - 1))
    CountingCodec.decoded = 0
    assert cut(tokens, stops, codec).tokens == tokens[:length]
    assert CountingCodec.decoded <= 16 * length
    CountingCodec.decoded = 0
    for end in range(new, length, new):
        assert not has_new_stop(tokens[:end], new, stops, codec)
    assert has_new_stop(tokens, new, stops, codec)
    assert CountingCodec.decoded <= 128 * length


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_the_text_of_a_growing_row_is_that_of_all_its_tokens(data: st.DataObject) -> None:
    tokenizer, tokens = sampled(data)
    growing, length = GrowingText(tokenizer), 0
    while length < len(tokens):
        length += data.draw(st.integers(1, 5))
        assert growing.text_of(tokens[:length]) == tokenizer.decode(tokens[:length])


@pytest.mark.parametrize("new", [1, 8])
def test_for_the_text_of_a_growing_row_few_tokens_are_decoded(new: int) -> None:
    codec, length = CountingCodec(), 4096
    tokens = codec.encode("x" * length)
    growing = GrowingText(codec)
    CountingCodec.decoded = 0
    for end in range(new, length + 1, new):
        assert growing.text_of(tokens[:end]) == "x" * end
    assert CountingCodec.decoded <= 4 * length
