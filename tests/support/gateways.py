"""For tests of the gateway: processes of the real command, and what a session left on the log."""

import http.client
import json
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollstream.producers.gateway.sessions import group_of
from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.wire import codec
from rollstream.topics.wire.catalogue import topic_name
from tests.support.runs import RealRun
from tests.support.waiting import eventually


@dataclass
class GatewayUnderTest:
    """A gateway in a process of its own."""

    process: "subprocess.Popen[bytes]"
    url: str
    log: Path

    def post(self, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, Any], Mapping[str, str]]:
        """Status, JSON and headers of a request."""
        return post(self.url + path, body, **headers)

    def start_session(self, **fields: Any) -> dict[str, Any]:
        status, answer, _headers = self.post("/rl/start_session", {"task_id": "t", **fields})
        assert status in (200, 201), answer
        return answer


def post(url: str, body: Any = None, **headers: str) -> tuple[int, dict[str, Any], Mapping[str, str]]:
    """Status, JSON and headers of a request; status 0 if the connection is lost."""
    data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **names})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, json.loads(answer.read()), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read()), dict(error.headers)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return 0, {"lost": repr(error)}, {}


@contextmanager
def gateway(
    kafka: KafkaConfig, run: str, inference_url: str, folder: Path, *flags: str, script: str = "", **settings: object
) -> Iterator[GatewayUnderTest]:
    """`rollstream role gateway` in front of a server, or a script in its place; killed at the end."""
    directory = folder / f"gateway-{len(list(folder.glob('gateway-*')))}"
    directory.mkdir()
    started = RealRun(kafka, run, directory, TopicsConfig(partitions=int(str(settings.pop("topics.partitions", 2)))))
    changed = {"worker.inference_urls": json.dumps([inference_url]), **settings}
    values = {name.replace(".", "__"): value for name, value in changed.items()}
    process = started.start("gateway", *flags, script=script, **values)

    def address() -> "re.Match[str] | None":
        assert process.poll() is None, started.log_of(process)[-2000:]
        return re.search(r"^gateway of run .*: (http://\S+)$", started.log_of(process), re.MULTILINE)

    try:
        yield GatewayUnderTest(process, eventually(address, 60, "its address")[1], directory / "gateway-0.log")
    finally:
        process.kill()
        process.wait(300)


def records(kafka: KafkaConfig, run: str, topic: str = "rollouts") -> list[Any]:
    """All records of a topic of a run."""
    return [codec.decode(message.value) for message in read_to_end(kafka, topic_name(run, topic))]


def calls_of(kafka: KafkaConfig, run: str, session: str) -> list[Any]:
    """All records of `calls` about one session, in order."""
    assert group_of(session)
    return [record for record in records(kafka, run, "calls") if record.session == session]


def await_records(kafka: KafkaConfig, run: str, count: int, what: str, topic: str = "rollouts") -> list[Any]:
    """Wait until a topic holds so many records, and return them."""

    def enough() -> list[Any]:
        there = records(kafka, run, topic)
        return there if len(there) >= count else []

    return eventually(enough, 60, what, every_s=0.1)
