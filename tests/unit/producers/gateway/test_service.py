"""Sessions start only within the limits, however many requests come at once, and beside the sessions of workers."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rollstream.producers.config import CapacityConfig
from rollstream.producers.flow.flow_control import PartitionProgress, RunProgress, largest_group
from rollstream.producers.flow.policy_versions import NoPolicies
from rollstream.producers.gateway.config import GatewayConfig
from rollstream.producers.gateway.errors import NoCapacity
from rollstream.producers.gateway.gateway_process import GatewaySteering
from rollstream.producers.gateway.memory_log import MemoryLog
from rollstream.producers.gateway.service import SessionRequest, SessionService
from rollstream.producers.gateway.sessions import CapturedSession, PartitionSessions
from rollstream.producers.gateway.upstream import Upstream
from rollstream.topics.control.steering import DesiredState
from rollstream.topics.errors import DeliveryError, RecordError
from rollstream.topics.logs import JsonFormatter
from rollstream.topics.records import DesiredProcesses, ModelCall, SessionEvent

CAPACITY = CapacityConfig(
    max_policy_lag=5, rollouts_per_step=8, partitions=1, batch_rollouts=4, group_size=4, workers=2
)
REQUEST = SessionRequest(task_id="t", environment="e", group_size=4)
SERVER = "http://127.0.0.1:9/v1"


class AcknowledgedLog(MemoryLog):
    """A log in memory; appends fail while it is `broken`."""

    def __init__(self) -> None:
        super().__init__()
        self.folds = [PartitionSessions()]
        self.broken = False

    async def append(self, record: ModelCall | SessionEvent) -> None:
        await asyncio.sleep(0)  # No acknowledgement comes before the other requests of the moment.
        if self.broken:
            raise DeliveryError("no broker")
        await super().append(record)


def service(
    log: AcknowledgedLog,
    upstream: Any = None,
    capacity: CapacityConfig | None = CAPACITY,
    read_progress: Callable[[], RunProgress] = RunProgress,
    finish: Callable[[CapturedSession], Awaitable[bool]] | None = None,
    **settings: Any,
) -> SessionService:
    return SessionService(
        log,
        SimpleNamespace(partition_of=lambda _session: 0, finish=finish),  # type: ignore[arg-type]
        upstream or SimpleNamespace(newest_version=3),
        GatewayConfig(**settings),
        assume_version=-1,
        capacity=capacity,
        read_progress=read_progress,
    )


async def started(gateway: SessionService, count: int) -> Sequence[Any]:
    """Sessions of so many groups that are requested one after the other, or the error of each."""
    return [(await asyncio.gather(gateway.start(REQUEST), return_exceptions=True))[0] for _ in range(count)]


def refused(results: Sequence[Any]) -> int:
    assert all(isinstance(result, list | NoCapacity) for result in results), results
    return sum(isinstance(result, NoCapacity) for result in results)


@pytest.mark.parametrize("limited_by", ["capacity", "max_sessions"])
def test_requests_that_come_at_once_start_no_more_sessions_than_those_that_come_one_by_one(limited_by: str) -> None:
    async def scenario() -> None:
        limits = {"capacity": None, "max_sessions": 12} if limited_by == "max_sessions" else {}
        one_by_one = refused(await started(service(AcknowledgedLog(), **limits), 20))  # type: ignore[arg-type]
        gateway = service(AcknowledgedLog(), **limits)  # type: ignore[arg-type]
        starts = (gateway.start(REQUEST) for _ in range(20))
        assert refused(await asyncio.gather(*starts, return_exceptions=True)) == one_by_one
        assert 0 < one_by_one < 20

    asyncio.run(scenario())


def test_a_start_that_fails_leaves_its_room_to_the_next() -> None:
    async def scenario() -> None:
        log = AcknowledgedLog()
        gateway = service(log, capacity=None, max_sessions=4)
        log.broken = True
        with pytest.raises(DeliveryError):
            await gateway.start(REQUEST)
        log.broken = False
        assert len(await gateway.start(REQUEST)) == 4

    asyncio.run(scenario())


def test_a_session_that_is_starting_takes_room_once_however_often_it_is_requested() -> None:
    async def scenario() -> None:
        log = AcknowledgedLog()
        gateway = service(log, capacity=None, max_sessions=8)
        repeated = replace(REQUEST, group_id="g")
        [first, again] = await asyncio.gather(gateway.start(repeated), gateway.start(repeated))
        assert [session.name for session in first] == [session.name for session in again]
        starting = asyncio.ensure_future(gateway.start(REQUEST))
        while len(log.folds[0].open) < 5:  # A part of the sessions is started.
            await asyncio.sleep(0)
        with pytest.raises(NoCapacity, match="8 sessions are open"):
            await gateway.start(REQUEST)
        assert len(await starting) == 4

    asyncio.run(scenario())


def test_sessions_of_agents_in_workers_take_no_room_of_the_gateways() -> None:
    async def scenario() -> None:
        log = AcknowledgedLog()
        for member in range(100):
            start = SessionEvent(
                session=f"w.{member}", kind="start", owner="worker", group_id="w", group_size=100, member=member
            )
            await log.append(start)
        gateway = service(log, max_sessions=50)
        assert len(await gateway.start(REQUEST)) == 4
        assert gateway.open_sessions == 104

    asyncio.run(scenario())


def steered(**numbers: int) -> DesiredState:
    return DesiredState(processes={role: DesiredProcesses(role=role, processes=n) for role, n in numbers.items()})


@pytest.mark.parametrize(("workers", "groups"), [(None, 3), (3, 1), (500, 2)])
def test_gateways_share_the_capacity_with_the_workers_that_operators_want(workers: int | None, groups: int) -> None:
    async def scenario() -> None:
        upstream = Upstream([SERVER], model="m", api_key="", timeout_s=1.0, policies=NoPolicies())
        upstream.note_version(SERVER, 3)
        gateway = service(AcknowledgedLog(), upstream)
        steering = GatewaySteering(upstream, gateway, CAPACITY, workers=1)
        steering.follow(steered(env=2))
        steering.follow(steered() if workers is None else steered(env=workers))
        assert 20 - refused(await started(gateway, 20)) == groups

    asyncio.run(scenario())


def test_a_gateway_asks_the_servers_that_operators_want() -> None:
    upstream = Upstream([SERVER], model="m", api_key="", timeout_s=1.0, policies=NoPolicies())
    steering = GatewaySteering(
        upstream,
        service(AcknowledgedLog()),
        CAPACITY,
        servers=lambda count: [f"http://server-{n}/v1" for n in range(count)],
    )
    steering.follow(steered(infer=2))
    assert upstream.urls == ("http://server-0/v1", "http://server-1/v1")
    steering.follow(steered())
    assert upstream.urls == (SERVER,)


def test_a_group_that_can_never_start_is_refused_for_good() -> None:
    async def scenario() -> None:
        gateway = service(AcknowledgedLog())
        largest = largest_group(CAPACITY)
        assert len(await gateway.start(replace(REQUEST, group_size=largest))) == largest
        with pytest.raises(RecordError, match=f"can never start: at most {largest} rollouts .*worker.concurrency"):
            await service(AcknowledgedLog()).start(replace(REQUEST, group_size=largest + 1))

    asyncio.run(scenario())


def test_members_that_start_one_by_one_reserve_room_for_their_groups_and_complete_them() -> None:
    """As of agents on several machines, one of which is slow: the run would wait for its members for ever."""

    async def begun(gateway: SessionService, member: int, groups: int) -> int:
        """How many of the first groups have this member."""
        requests = [replace(REQUEST, group_id=f"g{number}", member=member) for number in range(groups)]
        return groups - refused([(await asyncio.gather(gateway.start(r), return_exceptions=True))[0] for r in requests])

    async def scenario() -> None:
        whole = service(AcknowledgedLog())
        at_once = 20 - refused(await started(whole, 20))
        gateway = service(AcknowledgedLog())
        assert await begun(gateway, 0, 20) == at_once, "as many groups begin as if all their members began at once"
        for member in (1, 2, 3):
            assert await begun(gateway, member, at_once) == at_once

    asyncio.run(scenario())


def test_rollouts_that_any_gateway_wrote_take_room_until_grouping_has_read_them() -> None:
    """As while grouping is down, or after a restart of the gateway, which reads `calls` from the beginning."""

    async def scenario() -> None:
        log, read_to = AcknowledgedLog(), 0

        def progress() -> RunProgress:
            return RunProgress({0: PartitionProgress(position=read_to, produced=0, finished_untrained=0)})

        gateway = service(log, read_progress=progress)
        at_once = 20 - refused(await started(gateway, 20))
        for end, session in enumerate(list(log.folds[0].open.values()), 1):
            uids = (f"{session.name}.0",)
            event = SessionEvent(session=session.name, kind="finished", author="other", uids=uids, rollouts_end=end)
            await log.append(event)
            gateway.read(session)
            gateway.read(session)  # A record came after the last one that counts.
        restarted = service(log, read_progress=progress)
        for session in log.folds[0].sessions.values():
            restarted.read(session)
        for each in (gateway, restarted):
            with pytest.raises(NoCapacity, match=f" {4 * at_once} of the gateways wait for grouping"):
                await each.start(REQUEST)
        read_to = 4
        assert 20 - refused(await started(gateway, 20)) == 1, "grouping has read one group"

    asyncio.run(scenario())


def test_rollouts_of_workers_take_no_room_of_the_gateways_until_grouping_has_read_them() -> None:
    async def scenario() -> None:
        log = AcknowledgedLog()
        gateway = service(log)
        await log.append(SessionEvent(session="w.0", kind="start", owner="worker", group_id="w"))
        uids = tuple(f"w.0.{branch}" for branch in range(100))
        await log.append(SessionEvent(session="w.0", kind="finished", owner="worker", uids=uids, rollouts_end=100))
        gateway.read(log.folds[0].sessions["w.0"])
        assert len(await gateway.start(REQUEST)) == 4

    asyncio.run(scenario())


def test_a_group_larger_than_any_gateway_starts_takes_no_room() -> None:
    """As of a start that a foreign program wrote: members that nobody begins would hold the capacity for ever."""

    async def scenario() -> None:
        log = AcknowledgedLog()
        await log.append(SessionEvent(session="x.0", kind="start", group_id="x", group_size=1 << 30))
        assert len(await service(log).start(REQUEST)) == 4

    asyncio.run(scenario())


def test_a_session_that_cannot_be_attended_to_ends_nothing_and_waits_while_others_are_attended_to(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> list[str]:
        log, stop, attended = AcknowledgedLog(), asyncio.Event(), list[str]()
        for group in ("bad", "good"):
            await log.append(SessionEvent(session=f"{group}.0", kind="start", group_id=group))
            await log.append(SessionEvent(session=f"{group}.0", kind="failed", author="gateway-0"))

        async def finish(session: CapturedSession) -> bool:
            attended.append(session.name)
            if session.name == "bad.0":
                raise RecordError("a rollout is invalid")
            if attended.count("good.0") == 2:
                stop.set()
            return False

        await asyncio.wait_for(service(log, finish=finish).attend(stop), 60)
        return attended

    assert asyncio.run(scenario()) == ["bad.0", "good.0", "good.0"]
    (record,) = caplog.records
    line = json.loads(JsonFormatter().format(record))
    assert (line["event"], line["session"]) == ("session_left", "bad.0")
    assert line["error"] == "a rollout is invalid"


def test_a_mistake_of_ours_ends_the_gateway() -> None:
    async def scenario() -> None:
        log = MemoryLog()
        await log.append(SessionEvent(session="a.0", kind="start", group_id="a"))
        await log.append(SessionEvent(session="a.0", kind="failed", author="gateway-0"))

        async def finish(_session: CapturedSession) -> bool:
            raise NameError("name 'planted' is not defined")

        await service(log, finish=finish).attend(asyncio.Event())

    with pytest.raises(NameError, match="planted"):
        asyncio.run(scenario())
