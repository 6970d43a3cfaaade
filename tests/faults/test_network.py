"""Networks that fail, a broker that stands still, its clock jumping: every rollout ends in one place, once.

Each role reaches a real broker through a link of its own, which a test breaks under load.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from rollstream.consumers.weights.manifests import read_manifests
from rollstream.consumers.weights.step_log import read_steps
from rollstream.producers.flow.policy_versions import PolicyVersions
from rollstream.producers.gateway.upstream import Upstream
from rollstream.producers.inference.client import CompletionsClient
from rollstream.producers.inference.requests import SampleRequest
from rollstream.topics.kafka import connection, groups, topic_admin
from rollstream.topics.kafka.recovering_sender import RecoveringSender
from rollstream.topics.kafka.sender import Delivery, Failure
from rollstream.topics.records import LearnerStep
from rollstream.topics.watched_sockets import watched_socket
from tests.faults.conftest import make_run
from tests.faults.groupers import Supervised
from tests.faults.load import Load
from tests.faults.promises import assert_promises
from tests.support.faulty_network import DOWN, FINE, UP, Weather
from tests.support.linked_broker import LinkedBroker, linked_broker
from tests.support.own_network import dropping, own_network
from tests.support.producing import serving_http
from tests.support.rounds import rounds
from tests.support.runs import SMALL_LEARNER, RealRun, with_batches
from tests.support.settled import settled
from tests.support.shifted_clock import ShiftedClock
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(rounds(1800))]
SEED = 21
TRANSACTION_S = 8.0
SILENT = {
    "cut": Weather(refused=True),
    "silent": Weather(held=frozenset({UP, DOWN})),
    "deaf": Weather(held=frozenset({DOWN})),
    "mute": Weather(held=frozenset({UP})),
}
"""Links that pass nothing of use: nothing at all, or nothing in one direction."""
POOR = {
    "far": Weather(delay_s=0.3),
    "lossy": Weather(loss=0.02),
    "narrow": Weather(bytes_per_s=60_000),
}
"""Links on which work goes on, slowly."""


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LinkedBroker]:
    with linked_broker(tmp_path_factory.mktemp("linked") / "broker", "grouping", "learner", "workers") as broker:
        yield broker


@contextmanager
def a_run(broker: LinkedBroker, name: str, directory: Path) -> Iterator[RealRun]:
    """A run, seen by a client whose network never fails."""
    run = make_run(broker.bootstrap_servers, name, directory).prepare()
    try:
        yield run
    finally:
        run.stop()


@contextmanager
def seen_by(broker: LinkedBroker, role: str, run: RealRun) -> Iterator[RealRun]:
    """The same run as a role sees it, behind its link, with processes of its own."""
    directory = run.directory / role
    directory.mkdir()
    kafka = replace(run.kafka, bootstrap_servers=broker.links[role].address)
    seen = replace(run, kafka=kafka, directory=directory, processes=[])
    try:
        yield seen
    finally:
        seen.stop()


@contextmanager
def audited(
    run: RealRun, grouping: RealRun, workers: RealRun, *, rollouts_per_s: float = 200.0, **settings: object
) -> Iterator[tuple[Supervised, Load]]:
    """Grouping processes and a load, each on the run as they see it; after the block all is settled and audited."""
    groupers = Supervised(grouping, **settings)
    with Load(workers, SEED, rollouts_per_s=rollouts_per_s) as load:
        yield groupers, load
    settled(run, 150, in_flight=0, meanwhile=groupers.revive)
    groupers.stop()
    assert_promises(run, load)


@contextmanager
def behind_links(
    broker: LinkedBroker, name: str, directory: Path, *, rollouts_per_s: float = 200.0, **settings: object
) -> Iterator[tuple[RealRun, Supervised, Load]]:
    """An audited run whose grouping processes and workers reach the broker through a link each."""
    with (
        a_run(broker, name, directory) as run,
        seen_by(broker, "grouping", run) as grouping,
        seen_by(broker, "workers", run) as workers,
        audited(run, grouping, workers, rollouts_per_s=rollouts_per_s, **settings) as (groupers, load),
    ):
        yield run, groupers, load


def members(run: RealRun) -> int:
    """Number of members of the grouping processes' group."""
    return groups.members(run.kafka, run.grouper.group_id(run.name))


def await_both(run: RealRun, groupers: Supervised) -> None:
    """Wait until two processes are in the group again; those that ended are started anew."""

    def back() -> bool:
        groupers.revive()
        return members(run) == 2

    eventually(back, 120, "both are back", every_s=0.5)


def index_end(run: RealRun) -> int:
    return topic_admin.bounds(run.kafka, run.topic("batch-index"))[0][1]


def batched_more(run: RealRun, entries: int) -> Callable[[], bool]:
    """A condition: the index has so many more entries than now, of batches or of the ends of transactions."""
    wanted = index_end(run) + entries
    return lambda: index_end(run) >= wanted


def passed(seconds: float) -> Callable[[], bool]:
    """A condition: so much time has passed, for faults that only time measures."""
    until = time.monotonic() + seconds
    return lambda: time.monotonic() > until


@pytest.mark.parametrize("weather", SILENT)
def test_grouping_that_hears_nothing_of_the_broker_loses_and_repeats_nothing(
    linked: LinkedBroker, run_name: str, tmp_path: Path, weather: str
) -> None:
    with behind_links(linked, run_name, tmp_path, kafka__transaction_timeout_s=TRANSACTION_S) as (run, groupers, load):
        for _ in range(rounds(2)):
            load.await_more(100)
            with linked.links["grouping"].during(SILENT[weather]):
                # Sessions end, and then transactions time out, in the middle of which some of the processes are.
                eventually(lambda: members(run) == 0, 60, "every session ended", every_s=0.2)
                eventually(passed(TRANSACTION_S), 60, "transactions ran out", every_s=0.2)
            await_both(run, groupers)
        load.await_more(50)


@pytest.fixture
def filtered(tmp_path: Path) -> Iterator[LinkedBroker]:
    """A broker in a network of its own, whose packets a test may drop."""
    with own_network(), linked_broker(tmp_path / "broker", "grouping", "workers") as broker:
        yield broker


def test_grouping_whose_packets_are_dropped_below_tcp_loses_and_repeats_nothing(
    filtered: LinkedBroker, run_name: str, tmp_path: Path
) -> None:
    settings = {"kafka__transaction_timeout_s": TRANSACTION_S}
    with behind_links(filtered, run_name, tmp_path, **settings) as (run, groupers, load):
        for _ in range(rounds(2)):
            load.await_more(100)
            with dropping(filtered.links["grouping"].port):
                eventually(lambda: members(run) == 0, 60, "every session ended", every_s=0.2)
                eventually(passed(TRANSACTION_S), 60, "transactions ran out", every_s=0.2)
            await_both(run, groupers)
        load.await_more(50)


class InferenceServer:
    """Answers lists of models, and calls unless it is `stuck`."""

    def __init__(self, *, stuck: bool) -> None:
        self.stuck = stuck
        self.waiting = set[str]()
        """First words of the sessions that wait."""

    async def __call__(self, request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "policy", "owned_by": "rollstream", "policy_version": 3}]})
        if self.stuck:
            self.waiting.add(request.headers["X-Session-ID"].partition("-")[0])
            await asyncio.Event().wait()
        logprobs = {"tokens": ["1"], "token_logprobs": [-0.5]}
        choice = {"index": 0, "text": "1", "finish_reason": "stop", "token_ids": [3], "prompt_token_ids": [1]}
        return web.json_response({"choices": [{**choice, "logprobs": logprobs}], "policy_version": 3})


class NoPolicies:
    versions = PolicyVersions()

    def read(self, _wait_s: float) -> PolicyVersions:
        return self.versions


SESSIONS = 12
"""Enough that, of two servers, each is the first choice of some."""


async def answers_within_20_s_of_a_lost_server(urls: list[str], lost: InferenceServer) -> None:
    """Ask for answers, make the first server vanish, and await answers from the others, long before the deadline."""

    async def asked(call: Callable[[int], Awaitable[object]]) -> None:
        await asyncio.gather(*map(call, range(SESSIONS)))

    async def connect() -> None:
        with pytest.raises((aiohttp.ClientConnectorError, TimeoutError)):
            await plain.get(urls[0])

    async with AsyncExitStack() as opened:
        client = await opened.enter_async_context(CompletionsClient(urls, timeout_s=300))
        upstream = Upstream(urls, model="policy", api_key="", timeout_s=300, policies=NoPolicies())
        await opened.enter_async_context(upstream)
        plain = await opened.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(socket_factory=watched_socket), timeout=aiohttp.ClientTimeout(total=None)
            )
        )
        calls = [
            asyncio.create_task(asked(call))
            for call in (
                lambda n: client.complete(
                    SampleRequest(prompt=[1], n=1, max_tokens=8, temperature=1.0, seed=5, session=f"group-{n}")
                ),
                lambda n: upstream.call(f"episode-{n}", "/completions", {"prompt": "1", "model": "policy"}),
            )
        ]
        await asyncio.to_thread(eventually, lambda: len(lost.waiting) == 2, 60, "requests of both wait")
        with dropping(urlsplit(urls[0]).port or 0):
            async with asyncio.timeout(20):
                await asyncio.gather(*calls, connect())


def test_a_server_that_vanishes_without_a_word_costs_its_requests_seconds_only() -> None:
    """As a pod whose address is deleted with it: nobody closes or resets its connections."""
    lost, other = InferenceServer(stuck=True), InferenceServer(stuck=False)
    with own_network(), serving_http(lost) as first, serving_http(other) as second:
        asyncio.run(answers_within_20_s_of_a_lost_server([first, second], lost))


def test_a_tenth_of_the_packets_dropped_costs_time_only(filtered: LinkedBroker, run_name: str, tmp_path: Path) -> None:
    with (
        behind_links(filtered, run_name, tmp_path, rollouts_per_s=50) as (run, _, load),
        dropping(filtered.links["grouping"].port, 0.1),
        dropping(filtered.links["workers"].port, 0.1),
    ):
        load.await_more(100)
        eventually(batched_more(run, 10), 180, "batches come through", every_s=0.5)


@pytest.mark.parametrize("weather", POOR)
def test_poor_links_of_grouping_and_workers_cost_time_only(
    linked: LinkedBroker, run_name: str, tmp_path: Path, weather: str
) -> None:
    with (
        behind_links(linked, run_name, tmp_path, rollouts_per_s=50) as (run, _, load),
        linked.links["grouping"].during(POOR[weather]),
        linked.links["workers"].during(POOR[weather]),
    ):
        load.await_more(100)
        eventually(batched_more(run, 10), 180, "batches come through", every_s=0.5)


@pytest.mark.parametrize("weather", ["silent", "mute"])
def test_workers_that_cannot_reach_the_broker_lose_and_repeat_nothing(
    linked: LinkedBroker, run_name: str, tmp_path: Path, weather: str
) -> None:
    with behind_links(linked, run_name, tmp_path) as (_, _, load):
        for _ in range(rounds(2)):
            load.await_more(100)
            with linked.links["workers"].during(SILENT[weather]):
                eventually(passed(5.0), 60, "producers' requests wait", every_s=0.2)
        load.await_more(50)


def steps_of(run: RealRun) -> dict[int, LearnerStep]:
    return read_steps(run.kafka, run.name, "default")


def test_senders_whose_links_fail_for_a_minute_deliver_every_record(
    linked: LinkedBroker, run_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The links work again just before the senders examine their clients, which then wait to connect."""
    weathers = {"grouping": SILENT["cut"], "workers": SILENT["silent"]}
    with a_run(linked, run_name, tmp_path) as run:
        failures: list[Failure] = []
        delivered: list[Delivery] = []
        senders = []
        for name, weather in weathers.items():
            kafka = replace(run.kafka, bootstrap_servers=linked.links[name].address)
            sender = RecoveringSender(kafka, on_failure=failures.append)
            sender.send(run.topic("metrics"), b"before", on_delivery=delivered.append)
            sender.flush(60)
            linked.links[name].become(weather)
            sender.send(run.topic("metrics"), b"during", on_delivery=delivered.append)
            senders.append(sender)
        deadline = time.monotonic() + 2 * connection.SILENT_S - 2
        while time.monotonic() < deadline:
            for sender in senders:
                sender.poll(0.05)
        for name in weathers:
            linked.links[name].become(FINE)
        for sender in senders:
            sender.flush(90)
    assert (failures, len(delivered)) == ([], 4)
    assert "client_stranded" not in caplog.text


@pytest.mark.parametrize("weather", ["cut", "deaf"])
def test_a_learner_behind_a_link_that_fails_ends_with_the_bits_of_an_undisturbed_one(
    linked: LinkedBroker, run_name: str, tmp_path: Path, weather: str
) -> None:
    steps = 40
    settings = {**SMALL_LEARNER, "learner__max_steps": steps, "learner__checkpoint__every_steps": 3}
    runs = [make_run(linked.bootstrap_servers, f"{run_name}-{which}", tmp_path / which) for which in ("whole", "cut")]
    for run in runs:
        run.directory.mkdir()
        with_batches(run, 2 * steps)
    whole, cut = runs
    with seen_by(linked, "learner", cut) as learner:
        undisturbed = whole.start("learn", **settings)
        assert undisturbed.wait(600) == 0, whole.log_of(undisturbed)[-3000:]
        process = learner.start("learn", **settings, kafka__transaction_timeout_s=TRANSACTION_S)
        for after in (2, 12):
            eventually(lambda after=after: max(steps_of(cut), default=-1) >= after, 300, f"step {after}", every_s=0.1)
            with linked.links["learner"].during(SILENT[weather]):
                eventually(passed(2 * TRANSACTION_S), 60, "its transactions ran out", every_s=0.2)
            # The learner goes on by itself, or says that it must be started again.
            eventually(
                lambda after=after, p=process: p.poll() is not None or max(steps_of(cut)) > after, 300, "it goes on"
            )
            if process.poll() not in (None, 0):
                print("started again, after:", learner.log_of(process).strip().splitlines()[-1])
                process = learner.start("learn", **settings, kafka__transaction_timeout_s=TRANSACTION_S)
        assert process.wait(600) == 0, learner.log_of(process)[-3000:]
    expected, actual = steps_of(whole), steps_of(cut)
    assert sorted(actual) == list(range(steps + 1))
    assert {n: step.params_digest for n, step in actual.items()} == {n: s.params_digest for n, s in expected.items()}
    assert {n: step.uses for n, step in actual.items()} == {n: step.uses for n, step in expected.items()}
    assert sorted(read_manifests(cut.kafka, cut.name)) == list(range(steps + 1))
    for run in runs:
        run.stop()


def test_a_broker_that_stands_still_past_all_timeouts_loses_and_repeats_nothing(
    linked: LinkedBroker, run_name: str, tmp_path: Path
) -> None:
    with (
        a_run(linked, run_name, tmp_path) as run,
        audited(run, run, run, kafka__transaction_timeout_s=TRANSACTION_S) as (groupers, load),
    ):
        for seconds in (3.0, 2 * TRANSACTION_S):
            load.await_more(100)
            with linked.stopped():
                eventually(passed(seconds), 60, "the broker stands still", every_s=0.2)
            linked.await_answer()
            load.await_more(100)
            groupers.revive()


def test_a_broker_whose_clock_jumps_loses_and_repeats_nothing(run_name: str, tmp_path: Path) -> None:
    """The clock jumps ahead, then behind the true time, and then to the true time."""
    (tmp_path / "clock").mkdir()
    clock = ShiftedClock(tmp_path / "clock")
    environment = {**os.environ, **clock.environment}
    with (
        linked_broker(tmp_path / "broker", environment=environment) as broker,
        a_run(broker, run_name, tmp_path) as run,
        audited(run, run, run, rollouts_per_s=60, kafka__transaction_timeout_s=TRANSACTION_S) as (groupers, load),
    ):
        for ahead_s in (20, -20, 0):
            load.await_more(50)
            clock.be(ahead_s)
            eventually(batched_more(run, 10), 120, "grouping goes on", every_s=0.5)
            groupers.revive()
