"""A policy that answers with random text, to try an environment without a model or a server."""

import random
import time
from collections.abc import Sequence

import numpy as np

from rollstream.consumers.models.tokenizer import Tokenizer
from rollstream.producers.inference.client import Completion
from rollstream.producers.inference.requests import SampleRequest

_END = 0.2
"""Probability that a token ends the reply."""


class RandomPolicy:
    """Samples characters of an alphabet with equal probability; its version is 0."""

    def __init__(self, tokenizer: Tokenizer, alphabet: str) -> None:
        self._tokenizer = tokenizer
        self._tokens = sorted({token for character in alphabet for token in tokenizer.encode(character)})

    async def complete(self, request: SampleRequest) -> list[Completion]:
        """Return the samples of a request. Raises PromptRefused for a text that cannot be encoded."""
        began = time.monotonic()
        prompt = request.prompt
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        draw = random.Random(request.seed)
        return [self._sample(draw, ids, request, time.monotonic() - began) for _ in range(request.n)]

    async def tokenize(self, text: str, *, session: str) -> list[int]:
        """Return the token ids of a text. Raises PromptRefused for a text that cannot be encoded."""
        return self._tokenizer.encode(text)

    def _sample(
        self, draw: random.Random, prompt: Sequence[int], request: SampleRequest, elapsed_s: float
    ) -> Completion:
        tokens: list[int] = []
        text = ""
        ended = False
        while not ended and len(tokens) < request.max_tokens:
            ended = draw.random() < _END
            tokens.append(self._tokenizer.eos_id if ended else draw.choice(self._tokens))
            text = self._tokenizer.decode(tokens)
            for end in filter(text.endswith, request.stop):
                text, ended = text.removesuffix(end), True
        probability = np.full(len(tokens), (1.0 - _END) / len(self._tokens))
        if tokens[-1] == self._tokenizer.eos_id:
            probability[-1] = _END
        return Completion(
            text=text,
            truncated=not ended,
            prompt_tokens=np.asarray(prompt, np.int32),
            tokens=np.asarray(tokens, np.int32),
            logprobs=np.log(probability).astype(np.float32),
            versions=np.zeros(len(tokens), np.int64),
            replica_id="random text",
            sampling_params={},
            timestamp=time.time(),
            inference_time_s=elapsed_s,
        )
