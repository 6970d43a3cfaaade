"""A real Kafka broker on this machine: it answers once `start` returns, and has ended once `stop` returns.

Tests, the demo and `rollstream broker` use it; several brokers can run side by side. A broker keeps its data.
broker.json in its data directory describes it as soon as its process runs, so that another process can find it. With
`bound_to_parent` it ends when the process that started it ends, for whatever reason.
"""

import dataclasses
import logging
import signal
import subprocess
from pathlib import Path
from typing import Self

from rollstream.infra.broker.broker_start import (
    PlannedBroker,
    StartedBroker,
    reap,
    refuse_running,
    retry_taken_ports,
    run_kill_command,
    start_together,
)
from rollstream.infra.broker.broker_state import BrokerState, find, read, read_cluster
from rollstream.infra.broker.kafka_protocol import broker_answers
from rollstream.infra.broker.ports import choose_port, free_port
from rollstream.infra.broker.process_identity import ProcessIdentity, await_end, is_running, send
from rollstream.infra.broker.providers import choose_local, external_kafka
from rollstream.infra.config import BrokerConfig, BrokerLayout
from rollstream.topics.errors import BrokerUnavailable
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)


class Stopping:
    """Calls `stop` at the end of a with block; subclasses define it."""

    def stop(self) -> None:
        """Stop what was started."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class LocalBroker(Stopping):
    """A broker started by this process (`start`) or found in a data directory (`find`)."""

    def __init__(self, config: BrokerConfig, state: BrokerState, child: subprocess.Popen[bytes] | None) -> None:
        self._config = config
        self._state = state
        self._child = child

    @classmethod
    def start(
        cls,
        data_dir: Path | str | None = None,
        port: int | None = None,
        *,
        config: BrokerConfig | None = None,
        bound_to_parent: bool = False,
    ) -> Self:
        """Start a broker and return when it answers. `data_dir` and `port` override `config`.

        Raises BrokerUnavailable if a broker already runs on this data, the port is in use, no provider works, or the
        broker does not start (the message then includes the tail of its log).
        """
        config = config or BrokerConfig()
        if data_dir is not None:
            config = dataclasses.replace(config, data_dir=Path(data_dir))
        if port is not None:
            config = dataclasses.replace(config, port=port)
        cluster = read_cluster(BrokerLayout(root=config.data_dir))
        if cluster:
            raise BrokerUnavailable(
                f"{config.data_dir} holds a cluster of {cluster.nodes} nodes: start the cluster, or give another --data"
            )
        refuse_running(config.data_dir)
        started = _start(config, bound_to_parent=bound_to_parent)
        return cls(config, started.state, started.child)

    @classmethod
    def find(cls, data_dir: Path | str, *, config: BrokerConfig | None = None) -> Self | None:
        """Return the broker that runs on `data_dir`, started by any process; None if none runs.

        `config` has the settings for stopping and restarting the broker.
        """
        state = find(Path(data_dir))
        if state is None:
            return None
        config = dataclasses.replace(config or BrokerConfig(), data_dir=Path(data_dir))
        return cls(dataclasses.replace(config, host=state.host, port=state.port), state, None)

    @property
    def bootstrap_servers(self) -> str:
        return self._state.bootstrap_servers

    @property
    def port(self) -> int:
        return self._state.port

    @property
    def process(self) -> ProcessIdentity:
        return self._state.process

    @property
    def pid(self) -> int:
        return self._state.process.pid

    @property
    def provider(self) -> str:
        return self._state.provider

    @property
    def data_dir(self) -> Path:
        return self._config.data_dir

    @property
    def log(self) -> Path:
        return BrokerLayout(root=self._config.data_dir).log

    @property
    def running(self) -> bool:
        return is_running(self._state.process)

    def answers(self) -> bool:
        """Return whether the broker serves requests now."""
        return broker_answers(self._state.host, self._state.port)

    def stop(self) -> None:
        """Stop the broker gracefully (SIGTERM), or by force after `stop_timeout_s`. Does nothing if it has ended."""
        if self._send(signal.SIGTERM) and not await_end(self._state.process, self._config.stop_timeout_s):
            event(logger, "broker_killed", level=logging.WARNING, pid=self.pid, after_s=self._config.stop_timeout_s)
            self.kill()
        self._forget("broker_stopped")

    def kill(self) -> None:
        """End the broker at once (SIGKILL), as a crash would."""
        if self._state.kill_command and self.running:
            run_kill_command(self._state.kill_command)
        else:
            self._send(signal.SIGKILL)
        if not await_end(self._state.process, self._config.stop_timeout_s):
            raise BrokerUnavailable(f"broker pid {self.pid} does not end; see {self.log}")
        self._forget("broker_killed")

    def restart(self) -> None:
        """Start the broker again on the same port and data; stop it first if it runs."""
        self.stop()
        bound = self._child is not None and self._child.stdin is not None
        started = _start(dataclasses.replace(self._config, port=self.port), bound_to_parent=bound)
        self._state, self._child = started.state, started.child

    def _send(self, number: signal.Signals) -> bool:
        try:
            return send(self._state.process, number)
        except PermissionError as error:
            raise BrokerUnavailable(
                f"the broker on {self.data_dir} (pid {self.pid}) belongs to another user, who alone may stop it"
            ) from error

    def _forget(self, log_event: str) -> None:
        if self._child is not None:
            reap(self._child, self._config.stop_timeout_s)
        path = BrokerLayout(root=self._config.data_dir).state
        if read(path) == self._state:
            path.unlink(missing_ok=True)
            event(logger, log_event, pid=self.pid, bootstrap_servers=self.bootstrap_servers)


class ExternalBroker(Stopping):
    """A broker that this process does not own: only its address is known."""

    def __init__(self, bootstrap_servers: str) -> None:
        self.bootstrap_servers = bootstrap_servers

    def stop(self) -> None:
        """Leave the broker running."""


def open_broker(config: BrokerConfig, *, bound_to_parent: bool = True) -> LocalBroker | ExternalBroker:
    """Return the broker that KAFKA_BOOTSTRAP_SERVERS names if it is set; otherwise start a local one."""
    given = external_kafka()
    if given:
        return ExternalBroker(given.bootstrap_servers)
    return LocalBroker.start(config=config, bound_to_parent=bound_to_parent)


def _start(config: BrokerConfig, *, bound_to_parent: bool) -> StartedBroker:
    provider = choose_local(config.provider)
    layout = BrokerLayout(root=config.data_dir)

    def attempt() -> StartedBroker:
        controller_port = (
            config.node.controller_ports[config.node.node_id - 1] if config.node else free_port("127.0.0.1")
        )
        planned = PlannedBroker(config, choose_port(config, layout), controller_port)
        return start_together(provider, [planned], bound_to_parent=bound_to_parent)[0]

    return retry_taken_ports(config.data_dir, attempt)
