"""The texts of tokens: by the run's tokenizer, read once, or none if another tokenizer made the tokens."""

from collections.abc import Iterator

from rollstream.consumers.models.tokenizer import CharacterTokenizer
from rollstream.consumers.models.tokenizer_file import character_tokenizer_files
from rollstream.consumers.models.tokenizer_log import RunTokenizer, digest_of, parts_of
from rollstream.pipeline.index.indexed_run import TokenizerOfSource
from rollstream.topics.errors import TopicError
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.wire.codec import encode


class Source:
    """A log with nothing but a tokenizer, which counts how often it is read."""

    def __init__(self, texts: list[str]) -> None:
        self.texts, self.reads = texts, 0

    def messages(self, name: str, partition: int, start: int) -> Iterator[KafkaRecord]:
        assert (name, partition, start) == ("tokenizers", 0, 0)
        self.reads += 1
        if not self.texts:
            raise TopicError("there is no topic main.tokenizers")
        files = character_tokenizer_files(CharacterTokenizer())
        for part in parts_of(RunTokenizer(digest_of(files), self.texts, files)):
            yield KafkaRecord("main.tokenizers", 0, part.part, 0, b"", encode(part))


def test_each_token_has_its_text_unless_the_tokenizer_is_anothers() -> None:
    ours = CharacterTokenizer()
    source = Source(ours.texts())
    texts_of = TokenizerOfSource(source).texts_of  # type: ignore[arg-type]
    assert texts_of([*ours.encode("a b"), ours.eos_id]) == ["a", " ", "b", "<|endoftext|>"]
    assert texts_of([ours.vocab_size - 1]) == ["\n"]
    assert source.reads == 1
    assert texts_of([5, ours.vocab_size]) is None
    assert texts_of([5, -1]) is None


def test_a_tokenizer_that_is_put_later_is_found_and_a_missing_topic_is_none() -> None:
    source = Source([])
    texts_of = TokenizerOfSource(source).texts_of  # type: ignore[arg-type]
    assert texts_of([2]) is None
    source.texts = CharacterTokenizer().texts()
    assert texts_of([2]) == ["0"]
