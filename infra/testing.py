"""KafkaContainer: a real Kafka for tests that use testcontainers, with the official image or one with its contract.

    with KafkaContainer() as kafka:
        run_tests_against(kafka.bootstrap_servers)

Needs the package testcontainers. If Ryuk's image is not available, set TESTCONTAINERS_RYUK_DISABLED=true.
"""

import io
import tarfile
import time
from collections.abc import Mapping
from typing import Any, Self

from docker.errors import DockerException, ImageNotFound
from testcontainers.core.container import DockerContainer

from rollstream.infra.broker.kafka_protocol import broker_answers
from rollstream.infra.broker.launch_commands import new_cluster_id
from rollstream.infra.config import BrokerConfig, image_environment, server_properties
from rollstream.topics.errors import BrokerUnavailable

OFFICIAL_IMAGE = BrokerConfig().image
_PORT, _CONTROLLER_PORT, _NETWORK_PORT = 9092, 9093, 9094
_SCRIPT = "/tmp/rollstream-start"
_DATA = "/tmp/kafka-data"


class KafkaContainer(DockerContainer):
    """One KRaft node in a container, plaintext, on a port of this host."""

    def __init__(
        self,
        image: str = OFFICIAL_IMAGE,
        *,
        port: int = 0,
        alias: str = "",
        properties: Mapping[str, str] | None = None,
        heap_max_mib: int = 320,
        start_timeout_s: float = 180.0,
        **options: Any,
    ) -> None:
        """Configure the container, without starting it. Raises BrokerUnavailable if no Docker engine answers.

        `port` is the port on this host, 0 for any free one; a test that restarts the container must set it. `alias` is
        the container's name on a network of containers, on which it then also listens: see `network_address`.
        `properties` are Kafka's own keys and override rollstream.infra.config. `options` are passed to DockerContainer.
        """
        try:
            super().__init__(image, **options)
        except DockerException as error:
            raise BrokerUnavailable(f"no Docker engine answers ({error}); start one, or set DOCKER_HOST") from error
        self._start_timeout_s = start_timeout_s
        self._properties = dict(properties or {})
        self._alias = alias
        if alias:
            self.with_network_aliases(alias)
        self._address: tuple[str, int] | None = None
        # The broker advertises the mapped port, which is known only once the container runs. So the container first
        # waits for its script. This needs only a shell and `run`, which the official image and ours have.
        waiting = f"while [ ! -f {_SCRIPT} ]; do sleep 0.1; done; exec sh {_SCRIPT}"
        self.with_command(["sh", "-c", waiting])
        self.with_bind_ports(_PORT, port or None)
        self.with_env("CLUSTER_ID", new_cluster_id())
        self.with_env("KAFKA_HEAP_OPTS", f"-Xms96m -Xmx{heap_max_mib}m")

    def start(self) -> Self:
        """Start the container and return when the broker answers. Raises BrokerUnavailable, with the end of the log."""
        self._ensure_image()
        began = time.monotonic()
        try:
            super().start()
            self._address = self._mapped_address()
            self._put_script(*self._address)
            while not broker_answers(*self._address):
                if time.monotonic() - began > self._start_timeout_s:
                    raise BrokerUnavailable(f"Kafka did not answer within {self._start_timeout_s:g} s:\n{self._tail()}")
                self.reload()
                if self.status == "exited":
                    raise BrokerUnavailable(f"Kafka ended while starting; the end of its log:\n{self._tail()}")
                time.sleep(0.1)
        except BaseException:
            self.stop()
            raise
        return self

    @property
    def bootstrap_servers(self) -> str:
        """host:port for clients. Raises BrokerUnavailable before `start`."""
        if self._address is None:
            raise BrokerUnavailable("the Kafka container is not started; use it as a context manager, or call start")
        host, port = self._address
        return f"{host}:{port}"

    @property
    def network_address(self) -> str:
        """host:port for clients in other containers on the same network. Raises BrokerUnavailable without an alias."""
        if not self._alias:
            raise BrokerUnavailable("the Kafka container has no alias, so other containers cannot reach it; give one")
        return f"{self._alias}:{_NETWORK_PORT}"

    def get_bootstrap_server(self) -> str:
        """Return `bootstrap_servers`, under the name that other Kafka containers use."""
        return self.bootstrap_servers

    def _ensure_image(self) -> None:
        images = self.get_docker_client().client.images
        try:
            images.get(self.image)
        except ImageNotFound:
            try:
                images.pull(self.image)
            except DockerException as error:
                reason = getattr(error, "explanation", None) or error
                raise BrokerUnavailable(
                    f"image {self.image} is not on this machine and cannot be pulled ({reason}); load it with "
                    "docker load, or name another one with the same variables and paths"
                ) from None

    def _mapped_address(self) -> tuple[str, int]:
        host = self.get_container_host_ip()
        # The engine always maps IPv4 ports, and localhost may resolve to ::1 first.
        return "127.0.0.1" if host == "localhost" else host, self._get_exposed_port(_PORT)

    def _put_script(self, host: str, port: int) -> None:
        config = BrokerConfig(host=host, properties=self._properties)
        # Any KAFKA_ property replaces the image's own file, so this sets all of them.
        properties = server_properties(
            config, port=_PORT, controller_port=_CONTROLLER_PORT, log_dir=_DATA, bind="0.0.0.0"
        ) | {"advertised.listeners": f"PLAINTEXT://{host}:{port}"}
        if self._alias:
            properties |= {
                "listeners": f"{properties['listeners']},NETWORK://0.0.0.0:{_NETWORK_PORT}",
                "advertised.listeners": f"{properties['advertised.listeners']},NETWORK://{self.network_address}",
                "listener.security.protocol.map": f"{properties['listener.security.protocol.map']},NETWORK:PLAINTEXT",
            }
        lines = [f"export {key}='{value}'" for key, value in sorted(image_environment(properties).items())]
        script = "\n".join([*lines, "exec /etc/kafka/docker/run", ""]).encode()
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            info = tarfile.TarInfo(_SCRIPT.rpartition("/")[2])
            info.size, info.mode = len(script), 0o755
            tar.addfile(info, io.BytesIO(script))
        self.get_wrapped_container().put_archive("/tmp", archive.getvalue())

    def _tail(self, lines: int = 20) -> str:
        out, err = self.get_logs()
        return "\n".join((out + err).decode(errors="replace").splitlines()[-lines:])
