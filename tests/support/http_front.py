"""A front before an HTTP server, as a load balancer is: it passes requests on, and answers some itself, badly."""

import http.client
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast
from urllib.parse import urlsplit

BUSY, SHORT = "503", "short"
_NOT_PASSED_ON = {"transfer-encoding", "connection", "content-length", "date", "server"}
_SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class HttpFront(ThreadingHTTPServer):
    """The front; by method, `faults` strike the next requests, and `always` strikes every request after these."""

    daemon_threads = True

    def __init__(self, behind: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind = urlsplit(behind).netloc
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.faults: dict[str, deque[str]] = defaultdict(deque)
        self.always: dict[str, str] = {}
        self.struck: Counter[tuple[str, str]] = Counter()
        """How many requests each fault struck, by method and fault."""
        self._lock = threading.Lock()

    def fault_of(self, method: str) -> str:
        """The fault that a request has, or the empty string."""
        with self._lock:
            waiting = self.faults[method]
            fault = waiting.popleft() if waiting else self.always.get(method, "")
            self.struck[method, fault] += bool(fault)
        return fault


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _pass_on(self) -> None:
        front = cast(HttpFront, self.server)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = front.fault_of(self.command)
        if fault == BUSY:
            self._answer(503, {"Content-Type": "application/xml"}, _SLOW_DOWN)
            return
        connection = http.client.HTTPConnection(front.behind, timeout=60)
        try:
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            content = answer.read()
            headers = {name: value for name, value in answer.getheaders() if name.lower() not in _NOT_PASSED_ON}
            length = answer.getheader("Content-Length") if self.command == "HEAD" else None
        finally:
            connection.close()
        self._answer(answer.status, headers, content, short=fault == SHORT, length=length)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on  # noqa: N815

    def _answer(
        self, status: int, headers: dict[str, str], content: bytes, *, short: bool = False, length: str | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if short else content)
        if short:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def http_front(behind: str) -> Iterator[HttpFront]:
    """Serve a front of the server at a URL."""
    front = HttpFront(behind)
    threading.Thread(target=front.serve_forever, daemon=True).start()
    try:
        yield front
    finally:
        front.shutdown()
        front.server_close()
