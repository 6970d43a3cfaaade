"""An HTTPS server before a registry, as operators put one: its own authority, users with passwords, certificates of
clients if asked for. It passes requests on to the registry behind it.
"""

import base64
import http.client
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

HOST = "127.0.0.1"


@dataclass(frozen=True)
class HttpsFront:
    """The server, what its clients trust, and the requests that it let pass and turned away."""

    url: str
    authority: Path
    """Certificate that clients trust."""
    client: Path
    """Certificate and key of a client, in one file."""
    passed: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


@contextmanager
def https_front(
    folder: Path, behind: str, username: str, password: str, *, clients_have_certificates: bool = False
) -> Iterator[HttpsFront]:
    """Serve HTTPS before `behind`, an http URL whose path is the server's own."""
    server_pem, authority, client = folder / "server.pem", folder / "ca.crt", folder / "client.pem"
    _make_certificate(server_pem, authority, HOST)
    _make_certificate(client, folder / "client.crt", "client")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server_pem)
    if clients_have_certificates:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(folder / "client.crt")
    expected = "Basic " + base64.b64encode(f"{username}:{password}".encode()).decode()
    server = ThreadingHTTPServer((HOST, 0), BaseHTTPRequestHandler)
    front = HttpsFront(f"https://{HOST}:{server.server_port}{urlsplit(behind).path}", authority, client)
    server.RequestHandlerClass = partial(_Front, front, urlsplit(behind).netloc, expected)  # type: ignore[assignment]
    # The handshake is each connection's own, so that one that fails holds up no other.
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, name="https-front")
    thread.start()
    try:
        yield front
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _make_certificate(pem: Path, certificate: Path, name: str) -> None:
    """Write a key and its self-signed certificate into one file, and the certificate alone into another."""
    key = pem.with_suffix(".key")
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    made = ["openssl", "req", "-x509", *kind, "-keyout", str(key), "-out", str(certificate)]
    named = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:{HOST}", "-days", "2"]
    subprocess.run([*made, *named], check=True, capture_output=True, timeout=120)
    pem.write_bytes(key.read_bytes() + certificate.read_bytes())


class _Front(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60

    def __init__(self, front: HttpsFront, behind: str, expected: str, *arguments: object) -> None:
        self._front, self._behind, self._expected = front, behind, expected
        super().__init__(*arguments)  # type: ignore[arg-type]

    def handle(self) -> None:
        try:
            super().handle()
        except (ssl.SSLError, ConnectionError):
            self.close_connection = True  # A client that does not trust us says so, and hangs up.

    def do_GET(self) -> None:
        self._pass_on()

    do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != self._expected:
            self._front.refused.append(self.path)
            self._answer(401, "application/json", b'{"error_code": 401, "message": "who are you?"}')
            return
        self._front.passed.append(self.path)
        kept = {name: value for name in ("Content-Type", "Accept") if (value := self.headers.get(name))}
        connection = http.client.HTTPConnection(self._behind, timeout=60)
        try:
            connection.request(self.command, self.path, body, kept)
            answer = connection.getresponse()
            self._answer(answer.status, answer.headers.get_content_type(), answer.read())
        except OSError:
            self._answer(502, "text/plain", b"nobody is behind this server")
        finally:
            connection.close()

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
