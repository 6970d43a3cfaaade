"""A server that answers with random text, to try an environment without a model."""

import random
from collections.abc import Sequence
from dataclasses import replace
from math import log
from typing import NamedTuple

from rollstream.consumers.learner.pretrained import tokenizer_of
from rollstream.pipeline.config import RunConfig
from rollstream.producers.inference.chat.selection import chat_template
from rollstream.producers.inference.decoding import DecodeRow, FinishReason
from rollstream.producers.inference.server import InferenceServer

_END = 0.2
"""Probability that a token ends the reply."""


class RandomTokens(NamedTuple):
    """A new token of the row in a slot."""

    slot: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason | None
    kept: Sequence[Sequence[int]] = ()


class RandomGenerator:
    """Samples tokens with equal probability; its version is 0."""

    cache_bytes = 0
    behind = False

    def __init__(self, tokens: Sequence[int], end: int, *, slots: int, max_model_len: int) -> None:
        """`end` is the token that ends a reply."""
        self._tokens, self._end = tokens, end
        self._slots = slots
        self.max_model_len = max_model_len
        self._rows: dict[int, tuple[DecodeRow, random.Random, int]] = {}
        """Rows with their random numbers and their numbers of tokens so far, by slot."""

    @property
    def free(self) -> int:
        """Slots without a row."""
        return self._slots - len(self._rows)

    def refresh(self) -> int:
        """Return the version."""
        return 0

    def start(self, rows: Sequence[DecodeRow]) -> Sequence[int]:
        """Start rows; return the slot of each."""
        slots = [slot for slot in range(self._slots) if slot not in self._rows][: len(rows)]
        self._rows |= {slot: (row, random.Random(row.seed), 0) for slot, row in zip(slots, rows, strict=True)}
        return slots

    def decode(self) -> Sequence[RandomTokens]:
        """Draw a token of every row."""
        answer = []
        for slot, (row, draw, count) in list(self._rows.items()):
            ended = draw.random() < _END
            token = self._end if ended else draw.choice(self._tokens)
            reason: FinishReason | None = "stop" if ended else "length" if count + 1 >= row.request.max_tokens else None
            logprob = log(_END) if ended else log((1.0 - _END) / len(self._tokens))
            answer.append(RandomTokens(slot, [token], [logprob], reason))
            self._rows[slot] = row, draw, count + 1
            if reason:
                del self._rows[slot]
        return answer

    def routed_experts(self, slot: int, length: int) -> None:
        """Return None: there are no experts."""

    def end(self, slot: int) -> None:
        """Remove the row in a slot."""
        del self._rows[slot]

    def reset(self) -> None:
        """Remove all rows."""
        self._rows.clear()


def random_server(config: RunConfig, alphabet: str) -> InferenceServer:
    """Return a server of this machine that renders chats as the run's servers do, and answers with characters of an
    alphabet. Raises ConfigurationError for a chat template that cannot be used."""
    tokenizer, settings = tokenizer_of(config.learner), config.inference
    template = chat_template(
        settings.chat_template, tokenizer, config.learner.pretrained, settings.chat_template_kwargs
    )
    settings = replace(settings, host="127.0.0.1", port=0, replicas=1, api_key="", model=config.worker.model)
    tokens = sorted({token for character in alphabet for token in tokenizer.encode(character)})
    generator = RandomGenerator(tokens, tokenizer.eos_id, slots=settings.max_rows, max_model_len=settings.max_model_len)
    return InferenceServer(generator, tokenizer, settings, template)
