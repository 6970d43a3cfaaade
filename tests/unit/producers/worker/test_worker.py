"""When a worker begins groups, how long it waits for them at a shutdown, and what it does while servers refuse."""

import asyncio
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from aiohttp import web

from rollstream.producers.config import WorkerConfig
from rollstream.producers.environments.environment import Endpoint, Episode, Generate, Message, Prompt, Score, Split
from rollstream.producers.flow.mixture import Mixture
from rollstream.producers.flow.policy_versions import NoPolicies
from rollstream.producers.gateway.config import GatewayConfig
from rollstream.producers.inference.client import client_of
from rollstream.producers.inference.errors import InferenceRefused
from rollstream.producers.record_sender import limit_bytes_of
from rollstream.producers.tasks.environment_loading import with_settings
from rollstream.producers.worker.local_gateway import LocalGateway
from rollstream.producers.worker.worker import Worker, WorkerReport
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError, DeadlineExceeded
from rollstream.topics.records import GroupCancelled, Rollout
from rollstream.topics.wire import codec
from tests.support.producing import OneTokenPolicy, serving_http


class Held:
    """An environment of one turn whose episodes end when `go_on` is set."""

    name, max_tokens, stop = "held", 4, ()

    def __init__(self) -> None:
        self.began, self.go_on = asyncio.Event(), asyncio.Event()

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return [Prompt(example_id="t", text="8+9?")]

    async def run(self, prompt: Prompt, generate: Generate) -> Episode:
        reply = await generate(prompt.text)
        self.began.set()
        await self.go_on.wait()
        return Episode(turns=(Message(role="user", text=prompt.text), reply), score=Score(reward=1.0))


class Outlet:
    """Keeps what a worker sends, and tells when the worker looks after its groups."""

    send_timeout_s = 60.0

    def __init__(self) -> None:
        self.sent: list[Rollout | GroupCancelled] = []
        self.polled = asyncio.Event()
        self.full = 0
        """How many records find no room in the queue."""

    def awaits_label(self, environment: str) -> bool:
        return False

    def send(self, rollout: Rollout, *, timeout_s: float | None = None) -> None:
        self.sent.append(rollout)

    def cancel(self, cancelled: GroupCancelled, *, timeout_s: float | None = None) -> None:
        if self.full:
            assert timeout_s == 0.0, "the event loop would stand still for so long"
            self.full -= 1
            raise DeadlineExceeded("full")
        self.sent.append(cancelled)

    def poll(self) -> None:
        self.polled.set()

    def flush(self, timeout_s: float) -> None:
        return


async def stopped_after_its_only_group_began(clock: SimpleNamespace, *, waits_s: float) -> WorkerReport:
    """The report of a worker that is asked to stop long after its last group began. The group lasts for `waits_s` more,
    and the worker waits up to 10 s for it."""
    config = WorkerConfig(worker_id="w", group_size=1, groups=1, drain_timeout_s=10.0, assume_version=0)
    held, outlet, stop = Held(), Outlet(), asyncio.Event()
    worker = Worker(
        Mixture([with_settings(held, config)]),
        OneTokenPolicy(),  # type: ignore[arg-type]
        outlet,  # type: ignore[arg-type]
        config,
        incarnation="1",
    )
    working = asyncio.ensure_future(worker.run(stop))

    async def looked() -> None:
        outlet.polled.clear()
        polled = asyncio.ensure_future(outlet.polled.wait())
        await asyncio.wait({working, polled}, return_when=asyncio.FIRST_COMPLETED)
        polled.cancel()

    await held.began.wait()
    await looked()
    clock.now_s += 1000.0
    await looked()
    stop.set()
    await looked()
    clock.now_s += waits_s
    await looked()
    held.go_on.set()
    return await working


@pytest.mark.parametrize(("waits_s", "rollouts", "cancelled"), [(9.0, 1, 0), (11.0, 0, 1)])
def test_the_time_of_a_shutdown_begins_with_the_request_to_stop(
    monkeypatch: pytest.MonkeyPatch, waits_s: float, rollouts: int, cancelled: int
) -> None:
    clock = SimpleNamespace(now_s=5.0, time=time.time)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr("rollstream.producers.worker.worker.time", clock)
    report = asyncio.run(stopped_after_its_only_group_began(clock, waits_s=waits_s))
    assert (report.rollouts, report.cancelled) == (rollouts, cancelled)


def test_a_worker_begins_no_storm_of_groups_while_its_server_asks_to_be_left_alone() -> None:
    requests: list[float] = []

    async def refuse(_request: web.Request) -> web.Response:
        requests.append(time.monotonic())
        return web.json_response({"error": {"message": "full"}}, status=429, headers={"Retry-After": "120"})

    async def played(url: str) -> WorkerReport:
        config = WorkerConfig(
            inference_urls=(url,),
            engine="rollstream",
            group_size=1,
            groups=4,
            concurrency=2,
            request_timeout_s=2.0,
            assume_version=0,
        )
        async with client_of(config) as client:
            worker = Worker(
                Mixture([with_settings(Held(), config)]),
                client,
                Outlet(),  # type: ignore[arg-type]
                config,
                incarnation="1",
            )
            return await worker.run(asyncio.Event())

    with serving_http(refuse) as url:
        began = time.monotonic()
        report = asyncio.run(played(url))
    assert (report.groups, report.cancelled) == (4, 4)
    assert time.monotonic() - began >= 4.0, "two groups at a time, each for the whole time of a request"
    assert len(requests) <= 2, "the first groups ask once; the server's time is not over for the others"


class Raising(Held):
    """An environment whose error repeats all that its tool printed."""

    async def run(self, prompt: Prompt, generate: Generate) -> Episode:
        raise ValueError("x" * KafkaConfig.max_record_bytes)


@pytest.mark.parametrize("full", [0, 5])
def test_a_group_is_cancelled_whatever_its_environment_raises_and_even_if_the_queue_is_full(full: int) -> None:
    config = WorkerConfig(worker_id="w", group_size=2, groups=1, episode_attempts=1, assume_version=0)
    outlet = Outlet()
    outlet.full = full
    worker = Worker(
        Mixture([with_settings(Raising(), config)]),
        OneTokenPolicy(),  # type: ignore[arg-type]
        outlet,  # type: ignore[arg-type]
        config,
        incarnation="1",
    )
    assert asyncio.run(worker.run(asyncio.Event())).cancelled == 2
    [cancelled] = outlet.sent
    assert isinstance(cancelled, GroupCancelled)
    assert len(cancelled.uids) == 2
    assert "ValueError('xxx" in cancelled.reason
    assert len(codec.encode(cancelled)) < limit_bytes_of(KafkaConfig())


class Asking:
    """An agent that makes one call."""

    name, max_tokens = "asking", 4

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return [Prompt(example_id="t", text="8+9?")]

    async def play(self, prompt: Prompt, endpoint: Endpoint) -> Score:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as agent:
            await agent.completions.create(model=endpoint.model, prompt=prompt.text)
        return Score(reward=1.0)


def test_a_server_that_does_not_know_the_model_of_an_agent_ends_the_worker() -> None:
    async def refuse(http: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no model is named policy"}}, status=404)

    async def played(url: str) -> WorkerReport:
        config = WorkerConfig(inference_urls=(url,), group_size=1, groups=2, concurrency=1, assume_version=0)
        gateway = LocalGateway(
            KafkaConfig(),
            "run",
            config,
            GatewayConfig(),
            name="w",
            policies=NoPolicies(),
            temperatures={},
            recorded=False,
        )
        async with client_of(config) as client, gateway:
            worker = Worker(
                Mixture([with_settings(Asking(), config)]),
                client,
                Outlet(),  # type: ignore[arg-type]
                config,
                incarnation="1",
                gateway=gateway,
            )
            return await worker.run(asyncio.Event())

    with serving_http(refuse) as url, pytest.raises(InferenceRefused, match=r"404 .*no model is named policy"):
        asyncio.run(played(url))


def test_a_worker_that_plays_agents_alone_shows_the_version_that_answered_them() -> None:
    config = WorkerConfig(worker_id="w")
    gateway: Any = SimpleNamespace(newest_version=5)
    mixture, client, outlet = Mixture([with_settings(Asking(), config)]), OneTokenPolicy(), Outlet()
    worker = Worker(mixture, client, outlet, config, incarnation="1", gateway=gateway)  # type: ignore[arg-type]
    assert worker.metrics()["policy_version"] == 5


@pytest.mark.parametrize("name", ["gpu3:worker", "", "w" * 101, "a b"])
def test_a_worker_whose_name_cannot_be_part_of_a_url_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"worker_id .* letters, digits"):
        WorkerConfig(worker_id=name)
