"""The service port of a process: whether it is alive (/livez), whether it takes work (/readyz), and its /metrics.

A separate thread answers, even while JAX compiles. It never waits for the role: it reads what the role has noted. The
port is for probes and scrapers in a private network: it needs no key, and nothing can be changed through it.
"""

import logging
import socket
import socketserver
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

from rollstream.pipeline.config import ServiceConfig
from rollstream.pipeline.process.role_process import PHASE, RolePhase
from rollstream.topics.closing import Closing
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.heartbeats import HEARTBEATS, Heartbeats
from rollstream.topics.logs import event
from rollstream.topics.metrics.catalogue import COMMON, of_role
from rollstream.topics.metrics.values import CONTENT_TYPE, VALUES, Exposition, MetricValues

logger = logging.getLogger(__name__)
_REQUEST_S = 10.0
"""How long a connection may be silent."""
_TEXT = "text/plain; charset=utf-8"
Answer = tuple[int, bytes, str]
"""Status, body and type of its content."""


class ServiceServer(Closing):
    """Serves the state of this process at `url` until it is closed."""

    def __init__(
        self,
        config: ServiceConfig,
        *,
        run: str,
        role: str,
        process: str,
        phase: RolePhase = PHASE,
        heartbeats: Heartbeats = HEARTBEATS,
        values: MetricValues = VALUES,
    ) -> None:
        """Listen. `role` is the command that runs, `process` its name within the run, such as group-0.

        Raises ConfigurationError if it cannot listen on the address.
        """
        self._config, self._phase, self._heartbeats, self._values = config, phase, heartbeats, values
        self._role = role
        values.put("rollstream_info", 1, role, version("rollstream"))
        values.put("rollstream_loop_stall_seconds", config.stall_s)
        labels = dict(zip(COMMON, (run, process), strict=True))
        self._exposition = Exposition(of_role(role), values, labels, process=True)
        routes = {"/livez": self.livez, "/readyz": self.readyz, "/metrics": self.metrics}

        class Handler(_Handler):
            def do_GET(self) -> None:
                route = routes.get(self.path.partition("?")[0])
                self.answer(*(route() if route else _text(HTTPStatus.NOT_FOUND, f"paths: {' '.join(routes)}")))

        try:
            self._server = _Server((config.host, config.port), Handler)
        except OSError as error:
            raise ConfigurationError(
                f"the service port cannot listen on {config.host}:{config.port} ({error.strerror}); stop the program "
                "that uses the port, or set service.port (0 for none)"
            ) from error
        port = self._server.server_address[1]
        self.url = f"http://{f'[{config.host}]' if ':' in config.host else config.host}:{port}"
        threading.Thread(target=self._server.serve_forever, name="service", daemon=True).start()
        event(logger, "service_listening", url=self.url)

    def livez(self) -> Answer:
        """Return 200 as long as no loop of the role is stuck, else 503 with the reason."""
        stuck = self._heartbeats.stuck(self._config.stall_s)
        if stuck:
            return _text(HTTPStatus.SERVICE_UNAVAILABLE, f"{stuck} (service.stall_s is {self._config.stall_s:g})")
        return _text(HTTPStatus.OK, "ok")

    def readyz(self) -> Answer:
        """Return 200 from the moment the role is ready until it is asked to stop, else 503 with its phase."""
        phase = self._phase.name
        return _text(HTTPStatus.OK, "ok") if phase == "ready" else _text(HTTPStatus.SERVICE_UNAVAILABLE, phase)

    def metrics(self) -> Answer:
        """Return the catalogued metrics of the role, in the text format of Prometheus."""
        self._values.put("rollstream_ready", self._phase.name == "ready")
        self._values.put("rollstream_uncatalogued_metrics", len(self._values.uncatalogued))
        ages = self._heartbeats.ages
        for loop, age in ages.items():
            self._values.put("rollstream_loop_age_seconds", age, loop)
        # The start counts as a loop only until the first loop beats; its last age would stay for ever.
        self._values.keep(self._role, "loop", ages)
        return HTTPStatus.OK, self._exposition.text(), CONTENT_TYPE

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def _text(status: int, text: str) -> Answer:
    return status, f"{text}\n".encode(), _TEXT


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # HTTPServer.server_bind asks a name server for the name of this machine, which may take long.
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: object, client_address: object) -> None:
        """Do nothing: the role does not care about clients that went away."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _REQUEST_S

    def answer(self, status: int, body: bytes, content_type: str) -> None:
        """Answer a request."""
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Do nothing: probes arrive every few seconds for days, so a line for each would be too many."""
