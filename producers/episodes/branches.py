"""Folds the model calls of an episode into branches, by longest exact token prefix. Pure.

A call continues an earlier answer if its prompt begins with that answer's whole sequence, prompt and answer. An answer
that no call continues ends a branch. A call that continues no answer, for example because the agent rewrote its
history, begins a new branch. Every sampled token is trained exactly once: an answer shared by several branches counts
in the first branch's loss mask only. Answers whose form was constrained are never trained, because the server left out
tokens that the policy might have chosen.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from rollstream.producers.episodes.call_sequences import (
    CONSTRAINED,
    TOOLS,
    CallSequence,
    CallSequences,
    ChatMessage,
    new_messages,
)
from rollstream.producers.json_text import encodable
from rollstream.topics.records import Bool, Float32, InferenceMetadata, Int32, Int64, ModelCall, Turn
from rollstream.topics.wire.media import IMAGE_PARTS


@dataclass(frozen=True)
class AnswerPlace:
    """An answer of a call, and the tokens that it covers in a branch."""

    uid: str
    """uid of the call."""
    answer: int
    """Index of the answer."""
    start: int
    stop: int
    trained: bool
    """Whether the loss mask of this branch includes its tokens."""


@dataclass(frozen=True, eq=False)
class Branch:
    """One sequence of an episode; arrays have shape [T]."""

    tokens: Int32
    loss_mask: Bool
    logprobs: Float32
    """Log-probabilities of trained tokens, 0 elsewhere."""
    versions: Int64
    """Policy version that sampled each trained token, -1 elsewhere or if the server named none."""
    turns: tuple[Turn, ...]
    calls: tuple[AnswerPlace, ...]
    """Answers in the branch, in order."""
    messages: tuple[ChatMessage, ...] = ()
    """Messages of the request that its last answer is for."""
    truncated: bool = False
    """Whether a token limit cut its last answer off."""
    replica_id: str = "unknown"
    """Server of its last answer."""


@dataclass(eq=False)
class _Sample:
    sequence: CallSequence
    answer: int
    parent: "_Sample | None"
    continued: bool = False
    trained: bool = False
    path: "list[_Sample]" = field(default_factory=list)


def distinct(calls: Sequence[ModelCall]) -> list[ModelCall]:
    """Return the calls without retries: of calls with the same request and repetition, only the first on the log."""
    first: dict[tuple[str, int], ModelCall] = {}
    for call in calls:
        first.setdefault((call.request, call.repetition), call)
    return list(first.values())


def branches_of(calls: Sequence[ModelCall]) -> list[Branch]:
    """Return the branches of an episode that have tokens to train, from its calls in the order of the log, retries
    included.

    Raises RecordError if a prompt cannot be rebuilt, or an answer has not one log-probability for each token.
    """
    everything = CallSequences(calls)
    known = CallSequences()
    samples: dict[tuple[str, int], _Sample] = {}
    for call in distinct(calls):
        sequence = everything.by_uid[call.uid]
        place = known.continued_by(sequence.prompt)
        parent = None if place is None else samples[place]
        for index, answer in enumerate(call.answers):
            if len(answer.tokens):
                samples[call.uid, index] = sample = _Sample(sequence, index, parent)
                sample.path = [*(parent.path if parent else ()), sample]
                if parent is not None:
                    parent.continued = True
        known.index(sequence)
    branches = [_branch(sample) for sample in samples.values() if not sample.continued]
    return [branch for branch in branches if branch.loss_mask.any()]


def _branch(leaf: _Sample) -> Branch:
    tokens = leaf.sequence.with_answer(leaf.answer)
    mask, logprobs = np.zeros(len(tokens), np.bool_), np.zeros(len(tokens), np.float32)
    versions = np.full(len(tokens), -1, np.int64)
    turns: list[Turn] = []
    places: list[AnswerPlace] = []
    before: Sequence[ChatMessage] = ()
    numbers = itertools.count(1)
    for sample in leaf.path:
        call, answer = sample.sequence.call, sample.sequence.call.answers[sample.answer]
        start = sample.sequence.prompt_length
        stop = start + len(answer.tokens)
        trained = not sample.trained and CONSTRAINED not in call.sampling
        sample.trained = True
        if trained:
            mask[start:stop] = True
            logprobs[start:stop] = answer.logprobs
            for span in answer.spans:
                versions[start + span.start : start + span.stop] = span.version
        added = new_messages(before, sample.sequence.messages)
        turns += _turns(added, places[-1].stop if places else 0, start, numbers)
        before = sample.sequence.messages
        highest = max((span.version for span in answer.spans), default=-1)
        turns.append(
            Turn(
                role="assistant",
                text=answer.text,
                start=start,
                stop=stop,
                has_logprobs=trained,
                timestamp=call.answered,
                inference=InferenceMetadata(
                    model_version=highest,
                    sampling_params={name: value for name, value in call.sampling.items() if name != TOOLS},
                    inference_time_s=max(0.0, call.answered - call.began),
                ),
            )
        )
        places.append(AnswerPlace(call.uid, sample.answer, start, stop, trained))
    last = leaf.sequence.call
    return Branch(
        tokens=tokens.astype("<i4"),
        loss_mask=mask,
        logprobs=logprobs.astype("<f4"),
        versions=versions.astype("<i8"),
        turns=tuple(turns),
        calls=tuple(places),
        messages=leaf.sequence.messages,
        truncated=last.answers[leaf.answer].finish_reason == "length",
        replica_id=last.replica_id,
    )


def _turns(messages: Sequence[ChatMessage], start: int, stop: int, numbers: Iterator[int]) -> list[Turn]:
    """Return the turns of the messages before an answer; the last turn covers the tokens of all these messages."""
    turns = [
        Turn(role=str(message.get("role", "user")), text=_text(message, numbers), start=start, stop=start)
        for message in messages[:-1]
    ]
    last = messages[-1] if messages else {"role": "user"}
    return [*turns, Turn(role=str(last.get("role", "user")), text=_text(last, numbers), start=start, stop=stop)]


def _text(message: ChatMessage, numbers: Iterator[int]) -> str:
    """Return the text of a message, with the number of each image in its place."""
    content = message.get("content")
    if isinstance(content, str):
        return encodable(content)
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        return encodable(
            "".join(
                f"[image {next(numbers)}]" if part.get("type") in IMAGE_PARTS else str(part.get("text", ""))
                for part in parts
            )
        )
    return ""
