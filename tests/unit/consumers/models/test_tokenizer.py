"""The character tokenizer loses nothing and replaces nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.models.config import DecoderConfig
from rollstream.consumers.models.tokenizer import PRINTABLE_ASCII, CharacterTokenizer, PromptRefused

TOKENIZER = CharacterTokenizer()


@given(st.text(PRINTABLE_ASCII))
def test_text_survives_encoding_and_decoding(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_no_character_shares_a_token_with_another_or_with_a_special_one() -> None:
    ids = TOKENIZER.encode(PRINTABLE_ASCII)
    assert sorted({*ids, TOKENIZER.pad_id, TOKENIZER.eos_id}) == list(range(TOKENIZER.vocab_size))


def test_a_character_outside_the_vocabulary_is_refused_by_name() -> None:
    with pytest.raises(PromptRefused, match="'é'"):
        TOKENIZER.encode("café")


def test_the_end_token_is_silent_and_padding_is_seen() -> None:
    two = TOKENIZER.encode("2")
    assert TOKENIZER.decode([*two, TOKENIZER.eos_id]) == "2"
    assert TOKENIZER.decode([TOKENIZER.pad_id, *two]) == "\ufffd2"


def test_a_token_of_a_model_with_a_larger_vocabulary_is_seen_and_ends_nothing() -> None:
    assert (
        TOKENIZER.decode([*TOKENIZER.encode("2"), TOKENIZER.vocab_size, TOKENIZER.vocab_size + 30]) == "2\ufffd\ufffd"
    )


def test_the_default_model_has_a_row_for_every_token() -> None:
    assert DecoderConfig().vocab_size == TOKENIZER.vocab_size
