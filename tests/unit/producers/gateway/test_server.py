"""Over real connections, a gateway with a key answers only those who have its key or the key of a session."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from rollstream.producers.gateway.config import GatewayConfig
from rollstream.producers.gateway.errors import NoSuchSession
from rollstream.producers.gateway.server import GatewayServer
from rollstream.producers.gateway.service import SessionRequest
from rollstream.producers.gateway.sessions import CapturedSession, session_key
from rollstream.topics.errors import ConfigurationError
from tests.unit.producers.gateway.test_sessions import START

SECRET = "s3cret"


async def answer_of(path: str, authorization: bytes, body: str = "", **settings: Any) -> bytes:
    """Answer of a gateway that starts one session and knows none."""

    async def no_session(name: str) -> Any:
        raise NoSuchSession(f"no session is named {name}")

    async def start(_request: SessionRequest) -> list[CapturedSession]:
        return [CapturedSession(START, 0, 0, 0)]

    service: Any = SimpleNamespace(session=no_session, start=start, fail_call=None)
    unused: Any = None
    config = GatewayConfig(api_key="env:GATEWAY_KEY", host="127.0.0.1", port=0, **settings)
    async with GatewayServer(service, unused, unused, config) as server:
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {path} HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\nContent-Length: {len(body)}\r\n".encode()
        writer.write(head + b"Authorization: " + authorization + b"\r\n\r\n" + body.encode())
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
    return answer


async def status_of(path: str, authorization: bytes) -> int:
    """Status of a request to a gateway without sessions."""
    return int((await answer_of(path, authorization)).split()[1])


@pytest.mark.parametrize(
    "path", ["/rl/start_session", "/rl/end_session", "/v1/completions", "/sessions/g.0/completions"]
)
@pytest.mark.parametrize("key", [b"s3cr\xc3\xa9t", b"s3cr\xe9t", b"g.0~\xe9", b"\xe9~00", b"\xc3\xa9~\xff"])
def test_a_key_beyond_ascii_is_a_wrong_key(monkeypatch: pytest.MonkeyPatch, path: str, key: bytes) -> None:
    monkeypatch.setenv("GATEWAY_KEY", SECRET)
    assert asyncio.run(status_of(path, b"Bearer " + key)) == 401


def test_the_keys_of_the_gateway_and_of_a_session_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_KEY", SECRET)
    for key in (SECRET, session_key("g.0", SECRET)):
        assert asyncio.run(status_of("/sessions/g.0/v1/completions", f"Bearer {key}".encode())) == 404


@pytest.mark.parametrize(
    ("public_url", "base_url"),
    [
        ("", "http://gateway/sessions/g.0/v1"),
        ("https://gateway.example", "https://gateway.example/sessions/g.0/v1"),
        ("https://gateway.example/rl/", "https://gateway.example/rl/sessions/g.0/v1"),
    ],
)
def test_sessions_have_addresses_at_the_public_url(
    monkeypatch: pytest.MonkeyPatch, public_url: str, base_url: str
) -> None:
    monkeypatch.setenv("GATEWAY_KEY", SECRET)
    request = answer_of("/rl/start_session", b"Bearer s3cret", '{"task_id": "t"}', public_url=public_url)
    answer = json.loads(asyncio.run(request).partition(b"\r\n\r\n")[2])
    assert answer["base_url"] == answer["sessions"][0]["base_url"] == base_url


@pytest.mark.parametrize("public_url", ["gateway.example", "ftp://gateway.example", "https://", "https://g/?a=b"])
def test_a_public_url_that_is_no_address_is_refused(public_url: str) -> None:
    with pytest.raises(ConfigurationError, match="must begin with http:// or https://"):
        GatewayConfig(public_url=public_url)
