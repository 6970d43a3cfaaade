"""A log of sessions in memory, for episodes that leave nothing on `calls`: evaluations and checks of environments."""

import asyncio
import time
from collections.abc import Callable, Sequence
from copy import copy

from rollstream.producers.flow.policy_versions import PolicySource
from rollstream.producers.gateway.episode_rollouts import RolloutForm, episode_records
from rollstream.producers.gateway.sessions import CapturedSession, PartitionSessions
from rollstream.topics.records import ModelCall, Rollout, SessionEvent


class MemoryLog:
    """One partition of sessions in memory."""

    records_skipped = 0

    def __init__(self) -> None:
        self.folds = [PartitionSessions(keep_finished=0)]

    def partition_of(self, _session: str) -> int:
        """Return the only partition."""
        return 0

    async def append(self, record: ModelCall | SessionEvent) -> None:
        """Apply a record."""
        fold = self.folds[0]
        fold.apply(fold.position, int(time.time() * 1000), record)

    async def latest(self, _session: str) -> None:
        """Return at once: the sessions are always up to date."""

    async def current(self, _partition: int) -> PartitionSessions:
        """Return the sessions."""
        return self.folds[0]


class MemoryWriter:
    """Finishes sessions in memory; its rollouts go only to `on_written`."""

    def __init__(
        self,
        log: MemoryLog,
        form: RolloutForm,
        policies: PolicySource,
        on_written: Callable[[CapturedSession, Sequence[Rollout]], None],
    ) -> None:
        self._log, self._form, self._policies, self._on_written = log, form, policies, on_written

    def partition_of(self, _session: CapturedSession) -> int:
        """Return the only partition."""
        return 0

    async def finish(self, session: CapturedSession) -> bool:
        """Finish a closed session; return whether it is finished."""
        if session.closed is None or session.finished is not None:
            return session.finished is not None
        policies = await asyncio.to_thread(self._policies.read, 0.0)
        records, reason = await asyncio.to_thread(episode_records, copy(session), self._form, policies)
        rollouts = [record for record in records if isinstance(record, Rollout)]
        self._on_written(session, rollouts)
        uids = tuple(rollout.uid for rollout in rollouts)
        await self._log.append(SessionEvent(session=session.name, kind="finished", uids=uids, reason=reason))
        return True
