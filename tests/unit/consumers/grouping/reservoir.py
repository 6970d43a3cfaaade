"""A batch maker that takes groups apart, for tests of the rules that make that safe; not one to train with."""

import random
from collections.abc import Iterable, Sequence
from typing import Any

from consumers.grouping.batch_maker import BatchMaker, MakerContext, SealedGroup
from topics.examples import RLExample, Source


class ReservoirMaker(BatchMaker):
    """Draws batches at random from single examples; keeps the newest version of each prompt and no zero advantages."""

    def __init__(self, context: MakerContext) -> None:
        super().__init__(context)
        self._held: dict[Source, tuple[RLExample, SealedGroup]] = {}
        self._discarded: list[tuple[Source, str]] = []

    def add_rollout(self, example: RLExample, group: SealedGroup) -> None:
        prompt = (group.environment, group.example_id)
        newest = group.policy_version
        for source, (_example, other) in list(self._held.items()):
            if (other.environment, other.example_id) == prompt:
                newest = max(newest, other.policy_version)
                if other.policy_version < group.policy_version:
                    del self._held[source]
                    self._discarded.append((source, "superseded_version"))
        if newest > group.policy_version:
            self._discarded.append((example.source, "superseded_version"))
        elif not example.advantage.any():
            self._discarded.append((example.source, "zero_variance"))
        else:
            self._held[example.source] = (example, group)

    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        if len(self._held) < batch_size:
            return None
        draw = random.Random(f"{self.context.seed}/{self.context.partition}/{self.batch_number}")
        chosen = draw.sample(sorted(self._held), batch_size)
        return [self._held.pop(source)[0] for source in chosen]

    def get_batch_metadata(self, batch: Sequence[RLExample]) -> dict[str, Any]:
        return {"maker": "reservoir"}

    def discard(self, sources: Iterable[Source]) -> None:
        for source in sources:
            del self._held[source]

    @property
    def held(self) -> int:
        return len(self._held)

    def take_discarded(self) -> list[tuple[Source, str]]:
        taken, self._discarded = self._discarded, []
        return taken
