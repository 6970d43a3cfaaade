"""Over real connections, a gateway with a key answers only those who have its key or the key of a session."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rollstream.producers.gateway.config import GatewayConfig
from rollstream.producers.gateway.errors import NoSuchSession
from rollstream.producers.gateway.server import GatewayServer
from rollstream.producers.gateway.session_names import session_key

SECRET = "s3cret"


async def status_of(path: str, authorization: bytes) -> int:
    """Status of a request to a gateway without sessions."""

    async def no_session(name: str) -> Any:
        raise NoSuchSession(f"no session is named {name}")

    service: Any = SimpleNamespace(session=no_session, fail_call=None)
    unused: Any = None
    config = GatewayConfig(api_key="env:GATEWAY_KEY", host="127.0.0.1", port=0)
    async with GatewayServer(service, unused, unused, config) as server:
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {path} HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\nContent-Length: 0\r\n".encode()
        writer.write(head + b"Authorization: " + authorization + b"\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
    return int(answer.split()[1])


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
