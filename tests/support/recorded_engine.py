"""An engine with a script of three turns with tools, and what it sampled, to compare rollouts with."""

from collections.abc import Sequence

import numpy as np

from rollstream.producers.inference.decoding import DecodeRow
from rollstream.topics.records import Rollout
from tests.support.producing import ScriptedGenerator, SortedRow

CALL = '<tool_call>{"name": "add", "arguments": {"a": 20, "b": 22}}</tool_call>'
SCRIPT = [f"I add.\n{CALL}", f"{CALL}\n{CALL}", "42"]


class RecordedEngine(ScriptedGenerator):
    """Keeps what the engine was asked and what it sampled."""

    def __init__(self) -> None:
        super().__init__(SCRIPT, versions=(3,))
        self.sampled: list[tuple[list[int], SortedRow]] = []

    def start(self, rows: Sequence[DecodeRow]) -> list[int]:
        slots = super().start(rows)
        self.sampled += [(list(row.prompt), self.decoding[slot]) for row, slot in zip(rows, slots, strict=True)]
        return slots


def assert_is_the_engines_own(rollout: Rollout, engine: RecordedEngine, turns: int = 3) -> None:
    """Tokens, mask and log-probabilities of so many turns are those of the engine, byte for byte."""
    sampled: list[tuple[list[int], SortedRow]] = []
    for prompt, row in engine.sampled:
        if rollout.tokens[: len(prompt) + len(row.tokens)].tolist() == [*prompt, *row.tokens]:
            sampled.append((prompt, row))
    tokens, mask, logprobs = (
        [*sampled[-1][0], *sampled[-1][1].tokens],
        np.zeros(len(rollout.tokens), bool),
        rollout.logprobs,
    )
    assert rollout.tokens.tolist() == tokens
    expected = np.zeros(len(tokens), "<f4")
    for prompt, row in sampled:
        mask[len(prompt) : len(prompt) + len(row.tokens)] = True
        expected[len(prompt) : len(prompt) + len(row.tokens)] = row.logprobs
    assert rollout.loss_mask.tolist() == mask.tolist()
    assert logprobs.tobytes() == expected.tobytes()
    assert len({len(prompt) for prompt, _row in sampled}) == turns
