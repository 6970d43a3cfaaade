"""Rollouts made of chats in JSON lines, rendered by the model's chat template; what the assistant says is trained on.

The same file always gives the same rollouts with the same uids, which name the file, its digest and the line.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rollstream.producers.inference.chat.template import ChatTemplate, Message, Tool
from rollstream.producers.inference.dialects.chat_completions import parse_messages, parse_tools
from rollstream.producers.inference.dialects.fields import BadRequest
from rollstream.topics.errors import RecordError, RollstreamError, brief
from rollstream.topics.records import Rollout, RolloutMetadata, Turn
from rollstream.topics.wire.rollout_batch_upcast import PLACE
from rollstream.topics.wire.validation import problems

ENVIRONMENT = "chats"
"""Environment of a line that names none."""
WORKER = "import"
"""Worker in the metadata of imported rollouts."""
FORMS = 'give "messages", or "prompt" with "completion", or "prompt" with "chosen" and "rejected"'


class ChatRollouts(NamedTuple):
    """The rollouts that a line makes, or the reason why it makes none."""

    place: str
    """FILE@DIGEST:LINE, lines counted from 1."""
    rollouts: tuple[Rollout, ...]
    reason: str = ""


def chat_identity(path: Path, name: str) -> str:
    """Return NAME@DIGEST of a file. Raises OSError."""
    with path.open("rb") as file:
        return f"{name}@{hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"


def chat_rollouts(path: Path, identity: str, template: ChatTemplate, vocab_size: int) -> Iterator[ChatRollouts]:
    """Yield what each line of a file makes; empty lines are skipped. Raises OSError."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{identity}:{number}"
            try:
                yield ChatRollouts(place, _rollouts(line, place, template, vocab_size))
            except (RollstreamError, BadRequest) as error:
                yield ChatRollouts(place, (), str(error))
            except (ValueError, TypeError) as error:
                yield ChatRollouts(place, (), brief(error))


def _rollouts(line: bytes, place: str, template: ChatTemplate, vocab_size: int) -> tuple[Rollout, ...]:
    """Raises RollstreamError, BadRequest, ValueError or TypeError for a line that makes none."""
    try:
        values = json.loads(line)
    except ValueError as error:  # UnicodeDecodeError is a ValueError
        raise RecordError(f"not JSON: {error}") from error
    if not isinstance(values, dict):
        raise RecordError(f"a JSON {type(values).__name__} instead of an object; {FORMS}")
    tools = parse_tools(values.get("tools"), None)
    chats = _chats(values)
    example = str(values.get("id", place))
    made = []
    for name, (messages, reward) in chats.items():
        tokens, mask, turns = _rendered(messages, tools, template)
        if max(tokens) >= vocab_size:
            raise RecordError(f"token {max(tokens)} is beyond the model's vocabulary of {vocab_size}")
        rollout = Rollout(
            uid=f"{place}{name and '.'}{name}",
            group_id=place,
            group_size=len(chats),
            environment=str(values.get("environment", ENVIRONMENT)),
            example_id=example,
            policy_version=0,
            lowest_version=0,
            highest_version=0,
            tokens=np.array(tokens, np.int32),
            loss_mask=np.array(mask, np.bool_),
            logprobs=np.zeros(len(tokens), np.float32),
            reward=reward,
            turns=turns,
            metadata=RolloutMetadata(worker_id=WORKER),
            extra={PLACE: place},
        )
        if issues := problems(rollout):
            raise RecordError("; ".join(issues))
        made.append(rollout)
    return tuple(made)


def _chats(values: dict[str, Any]) -> dict[str, tuple[list[Message], float]]:
    """Return the conversations of a line, each with its reward, by what tells their uids apart."""
    if "messages" in values:
        return {"": (parse_messages(values["messages"]), float(values.get("reward", 1.0)))}
    prompt = _messages(values.get("prompt", []), "user")
    if "completion" in values:
        return {"": (prompt + _messages(values["completion"], "assistant"), float(values.get("reward", 1.0)))}
    if "chosen" in values and "rejected" in values:
        better, worse = (prompt + _messages(values[name], "assistant") for name in ("chosen", "rejected"))
        if better == worse:
            raise RecordError('"chosen" and "rejected" are equal')
        return {"chosen": (better, 1.0), "rejected": (worse, 0.0)}
    raise RecordError(FORMS)


def _messages(value: Any, role: str) -> list[Message]:
    """Return messages; a text is one message."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return parse_messages(value) if value else []


def _rendered(
    messages: Sequence[Message], tools: Sequence[Tool], template: ChatTemplate
) -> tuple[list[int], list[bool], tuple[Turn, ...]]:
    """Return the tokens up to the end of the last answer, which of them are answers, and the turns.

    An earlier answer that the template renders otherwise once another message follows, such as one whose reasoning is
    then left out, is not trained on: no policy would sample it there.
    """
    spans = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt, whole = template.render(messages[:number], tools), template.render(messages[: number + 1], tools)
            rest = whole[len(prompt) :] if whole[: len(prompt)] == prompt else []
            ends = [index for index, token in enumerate(rest) if token in template.stop_ids]
            spans.append((number, prompt, rest[: ends[0] + 1] if len(ends) == 1 else []))
    if not spans:
        raise RecordError("no message is the assistant's, so there is nothing to train on")
    _number, prompt, answer = spans[-1]
    if not answer:
        raise RecordError(
            "the chat template does not render the last answer as a policy would sample it: after the prompt, and "
            "closed by one token that ends turns"
        )
    tokens = [*prompt, *answer]
    mask = [False] * len(tokens)
    turns: list[Turn] = []
    for number, prompt, answer in spans:
        begin, end = len(prompt), len(prompt) + len(answer)
        if not answer or tokens[:end] != [*prompt, *answer]:
            continue
        mask[begin:end] = [True] * len(answer)
        if number:
            before = messages[number - 1]
            turns.append(
                Turn(
                    role=before["role"],
                    text=before["content"],
                    start=turns[-1].stop if turns else 0,
                    stop=begin,
                )
            )
        turns.append(Turn(role="assistant", text=messages[number]["content"], start=begin, stop=end))
    return tokens, mask, tuple(turns)
