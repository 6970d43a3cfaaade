"""Floods of hostile requests over real connections, and what the answers say of the server."""

import contextlib
import re
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from tests.support.hostile_input import HostileInput

NAMES = (
    *("model", "messages", "prompt", "max_tokens", "n", "seed", "temperature", "top_p", "logprobs", "tools", "stream"),
    *("token_ids", "tokens", "stop", "task_id", "group_size", "environment", "session_id", "reward", "components"),
)
"""Names of fields in the bodies of requests."""
INFERENCE = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/models")
GATEWAY = ("/rl/start_session", "/rl/set_reward", "/rl/end_session", "/sessions/x", "/sessions/x/v1/chat/completions")
SERVICE = ("/livez", "/readyz", "/metrics")
TIMEOUT_S = 60.0
_AT_ONCE = 8


def page_paths(run: str) -> tuple[str, ...]:
    """Paths of the page's API, with hostile parameters."""
    api = f"/api/runs/{run}"
    return (
        "/api/runs",
        f"{api}/overview",
        f"{api}/rollouts?text=%ff&limit=-1",
        f"{api}/rollouts?reward_min=nan&order=x&after=%00",
        f"{api}/rollouts/x/-1",
        f"{api}/rollouts/0/1",
        f"{api}/rollouts/0/9223372036854775807",
        f"{api}/groups?after=x&order=spread",
        f"{api}/series?names=%2500&points=99999999999999999999",
        f"{api}/drops",
        f"{api}/weights",
    )


def request_flood(
    url: str, paths: Sequence[str], requests: int, hostile: HostileInput, alive: Callable[[], bool] = lambda: True
) -> Counter[str]:
    """Send requests on connections of their own, eight at a time; count answers by status."""
    place, answers = urlsplit(url), Counter[str]()
    assert place.hostname is not None
    for begun in range(0, requests, _AT_ONCE):
        connections = []
        for _ in range(min(_AT_ONCE, requests - begun)):
            connection = socket.create_connection((place.hostname, place.port or 80), TIMEOUT_S)
            with contextlib.suppress(OSError):  # The server may answer before it has read everything.
                connection.sendall(hostile.request(paths, NAMES))
            connections.append(connection)
        for connection in connections:
            with connection:
                try:
                    # Nothing more comes, so a server that waits for the rest of a body has to give up.
                    connection.shutdown(socket.SHUT_WR)
                    answer = connection.recv(65536)
                except OSError:  # It may be closed by now.
                    answer = b""
            match = re.match(rb"HTTP/1\.[01] (\d+)", answer)
            answers[match[1].decode() if match else "closed"] += 1
        assert alive()
    return answers


def failures(answers: Counter[str]) -> set[str]:
    """Statuses from 500 on, which only a server's own fault gives; without 501 (methods) and 503 (not ready)."""
    return {status for status in answers if status.startswith("5") and status not in ("501", "503")}
