"""Checks that a restored state and the log agree while the log is read again from the watermark to the position."""

from rollstream.consumers.grouping.core.drop_rules import Clocks
from rollstream.consumers.grouping.core.task_state import TaskState
from rollstream.topics.errors import StateRefused


class Replay:
    """A state that is being restored, and its unfinished offsets that have not been read again yet."""

    def __init__(self, state: TaskState) -> None:
        self.ended = False
        self._state = state
        self._awaited = set(state.unfinished)
        self._topic = f"rollouts[{state.partition}]"

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to read again."""
        return not self._awaited and self._state.watermark == self._state.position

    def is_skipped(self, offset: int) -> bool:
        """Whether a record became a dead letter without being decoded."""
        return offset in self._state.skipped

    def meet(self, offset: int) -> bool:
        """Return whether an offset is still awaited, and stop awaiting it."""
        awaited = offset in self._awaited
        self._awaited.discard(offset)
        return awaited

    def check_offset(self, offset: int) -> None:
        """Raise StateRefused if an offset must not be read again."""
        if self.ended or offset >= self._state.position:
            raise StateRefused(
                f"offset {offset} of {self._topic} is not to be read again: the state was taken at "
                f"{self._state.position}"
            )

    def finished_too_early(self, offset: int) -> StateRefused:
        """Return the error for an unfinished offset that finishes when it is read again."""
        return StateRefused(f"offset {offset} of {self._topic} was unfinished, but is finished when read again")

    def unexpected_effect(self, offset: int) -> StateRefused:
        """Return the error for an offset that has an effect when it is read again."""
        return StateRefused(
            f"re-reading offset {offset} of {self._topic} had an effect that it did not have before: "
            f"the journal does not belong to this log; set kafka.max_record_bytes back if it was changed, go back to "
            f"the release that wrote it, or start a new run"
        )

    def end(self, clocks: Clocks) -> int:
        """End the replay and return the position to continue from.

        Raises StateRefused unless every unfinished offset was read again and `clocks` agree with the state.
        """
        state = self._state
        if self._awaited:
            raise StateRefused(
                f"{self._topic} no longer holds unfinished offsets {sorted(self._awaited)[:5]}; they were "
                f"deleted before they were batched; restore the topic or start a new run"
            )
        reached = (clocks.stream_time_ms, clocks.policy_version, clocks.config.generation)
        recorded = (state.stream_time_ms, state.policy_version, state.generation)
        if reached != recorded:
            raise StateRefused(
                f"re-reading {self._topic} gave stream time, policy version and generation {reached}, "
                f"but the journal says {recorded}; the records are not the ones that the journal was written for: "
                f"restore the topic, set kafka.max_record_bytes back if it was changed, or start a new run"
            )
        self.ended = True
        return state.position
