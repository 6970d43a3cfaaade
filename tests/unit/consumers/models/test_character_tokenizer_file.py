"""The files of the character tokenizer: the package that reads them gives the same ids and texts."""

from pathlib import Path

from rollstream.consumers.models.tokenizer import CharacterTokenizer
from rollstream.consumers.models.tokenizer_file import load_tokenizer, write_character_tokenizer


def test_an_engine_that_reads_the_files_tokenizes_as_the_learner_does(tmp_path: Path) -> None:
    ours = CharacterTokenizer()
    write_character_tokenizer(tmp_path, ours)
    theirs = load_tokenizer(tmp_path)
    text = ours.vocabulary + "3 + 4 =\n  7"
    assert theirs.encode(text) == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    assert (theirs.eos_ids, theirs.vocab_size) == (ours.eos_ids, ours.vocab_size)
    assert theirs.decode([ours.pad_id, 5, ours.eos_id]) == ours.decode([ours.pad_id, 5, ours.eos_id])
