"""A real broker that each role reaches through a link of its own, so that one role's network can fail."""

import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollstream.infra.broker.kafka_protocol import broker_answers
from rollstream.infra.broker.launch_commands import prepare
from rollstream.infra.broker.ports import free_ports
from rollstream.infra.broker.providers import choose_local
from rollstream.infra.config import BrokerConfig, BrokerLayout
from tests.support.faulty_network import HOST, Link
from tests.support.waiting import eventually


@dataclass(frozen=True)
class LinkedBroker:
    """A broker with links."""

    bootstrap_servers: str
    """Its own address, where nothing fails."""
    links: dict[str, Any]
    """By role."""
    process: "subprocess.Popen[bytes]"
    port: int

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the broker with SIGSTOP while the block runs."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def await_answer(self) -> None:
        """Wait until the broker answers."""
        eventually(lambda: broker_answers(HOST, self.port), 180, "the broker to answer")


@contextmanager
def linked_broker(
    directory: Path,
    *roles: str,
    environment: dict[str, str] | None = None,
    link: Callable[[int], Any] = Link,
    **properties: str,
) -> Iterator[LinkedBroker]:
    """Run a broker with a listener for each role, advertised at the role's link; `link` makes a link to a port."""
    layout = BrokerLayout(root=directory)
    directory.mkdir(parents=True)
    port, controller, *ports = free_ports(HOST, 2 + len(roles))
    listening = dict(zip((role.upper() for role in roles), ports, strict=True))
    links = {role: link(own_port) for role, own_port in zip(roles, ports, strict=True)}
    protocols = ",".join(f"{name}:PLAINTEXT" for name in ("PLAINTEXT", "CONTROLLER", *listening))
    config = BrokerConfig(data_dir=directory, properties={"listener.security.protocol.map": protocols, **properties})
    command = prepare(choose_local("java"), config, layout, port=port, controller_port=controller).command
    advertised = {role.upper(): link.port for role, link in links.items()}
    text = layout.properties.read_text()
    for name, at in (("listeners", listening), ("advertised.listeners", advertised)):
        more = "".join(f",{listener}://{HOST}:{where}" for listener, where in at.items())
        text = re.sub(rf"^({name}=.*)$", rf"\1{more}", text, flags=re.MULTILINE)
    layout.properties.write_text(text)
    with layout.log.open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        try:
            broker = LinkedBroker(f"{HOST}:{port}", links, process, port)
            eventually(lambda: broker_answers(HOST, port) or process.poll() is not None, 180, "the broker to answer")
            assert process.poll() is None, layout.log.read_text()[-3000:]
            yield broker
        finally:
            process.kill()
            process.wait(60)
            for link in links.values():
                link.close()
