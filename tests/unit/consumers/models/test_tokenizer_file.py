"""A model's own tokenizer: tokens of text, special tokens, end tokens, and refused directories."""

import json
from pathlib import Path

import pytest
import tokenizers

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.pretrained import tokenizer_of
from rollstream.consumers.models.tokenizer import CharacterTokenizer
from rollstream.consumers.models.tokenizer_file import TokenizerFile, load_tokenizer
from rollstream.topics.errors import ConfigurationError
from tests.support.checkpoints import write_tokenizer

CORPUS = ["How many apples are left? 12 - 5 = 7 #### 7", "Sie aß zwölf Äpfel. 🍎"] * 3


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, CORPUS)
    return tmp_path


@pytest.fixture
def tokenizer(directory: Path) -> TokenizerFile:
    return load_tokenizer(directory)


def test_text_survives_and_words_of_the_corpus_are_few_tokens(tokenizer: TokenizerFile) -> None:
    for text in (*CORPUS, "unseen 漢字\n", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("apples")) < len("apples")


def test_special_tokens_in_a_text_are_recognised_and_none_is_added(tokenizer: TokenizerFile) -> None:
    start, end = tokenizer.encode("<|im_start|>"), tokenizer.encode("<|im_end|>")
    assert len(start) == len(end) == 1
    assert tokenizer.encode("<|im_start|>7<|im_end|>") == [*start, *tokenizer.encode("7"), *end]


def test_end_tokens_are_silent_other_special_and_unknown_ones_show(tokenizer: TokenizerFile) -> None:
    seven = tokenizer.encode("7")
    assert tokenizer.eos_ids == (*tokenizer.encode("<|im_end|>"), *tokenizer.encode("<|endoftext|>"))
    assert tokenizer.decode([*seven, *tokenizer.eos_ids]) == "7"
    assert tokenizer.decode([*tokenizer.encode("<|im_start|>"), *seven]) == "<|im_start|>7"
    assert tokenizer.decode([*seven, tokenizer.vocab_size, *seven]) == "7\ufffd7"


def test_one_end_token_may_stand_alone_in_any_of_the_configurations(directory: Path) -> None:
    (directory / "generation_config.json").unlink()
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 5, "vocab_size": 400}))
    assert load_tokenizer(directory / "tokenizer.json").eos_ids == (5,)

    (directory / "config.json").unlink()
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    loaded = load_tokenizer(directory)
    assert [loaded.eos_id] == loaded.encode("<|endoftext|>")

    (directory / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigurationError, match="no end token"):
        load_tokenizer(directory)


def test_a_directory_without_a_tokenizer_or_with_too_small_a_model_is_refused(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"vocab_size": 300}))
    with pytest.raises(ConfigurationError, match=r"\d+ tokens and the model's vocab_size is 300"):
        load_tokenizer(directory)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="is not a tokenizer"):
        load_tokenizer(directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ConfigurationError, match=r"there is no .*tokenizer\.json"):
        load_tokenizer(directory)


def test_a_learner_that_starts_from_no_checkpoint_has_the_character_tokenizer(directory: Path) -> None:
    assert tokenizer_of(LearnerConfig()) == CharacterTokenizer()
    assert tokenizer_of(LearnerConfig(pretrained=str(directory))).encode("7") == load_tokenizer(directory).encode("7")


def test_each_token_has_a_text_with_its_space_its_name_or_its_bytes(tokenizer: TokenizerFile) -> None:
    texts = tokenizer.texts()
    assert len(texts) == tokenizer.vocab_size
    assert "".join(texts[each] for each in tokenizer.encode("12 - 5 = 7")) == "12 - 5 = 7"
    assert [texts[each] for each in tokenizer.eos_ids] == ["<|im_end|>", "<|endoftext|>"]
    assert "".join(texts[each] for each in tokenizer.encode("漢")) == r"\xe6\xbc\xa2"


def test_a_decoder_that_omits_the_first_space_takes_none_from_the_texts() -> None:
    model = tokenizers.models.BPE(vocab={"▁": 0, "▁a": 1, "b": 2, "<0x0A>": 3}, merges=[])
    sentences = tokenizers.Tokenizer(model)
    sentences.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    assert TokenizerFile(sentences, [0]).texts() == [" ", " a", "b", "\n"]
