"""Explains why no broker answers, and detects clients that will never reach a broker again although brokers answer.

None runs, or the brokers refuse this client's protocol, certificate or credentials: the client library reports the same
failure for most of these, so the address is also tried with a plain socket.

While brokers are fenced, as after a laptop slept or during a rolling upgrade, their answers about metadata name no
broker. librdkafka then drops all brokers that it knows, and sometimes does not return to bootstrap.servers
(https://github.com/confluentinc/librdkafka/issues/5301). The client stays silent: it reports no error, and its consumer
neither reads nor joins its group. Only a new client helps.
"""

import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import AccessDenied, BrokerUnavailable, RollstreamError
from rollstream.topics.kafka import clients
from rollstream.topics.secrets import resolve

_SLICE_S = 0.5
_PROBE_S = 3.0
_FENCED_PAUSE_S = 0.2
_NOT_SURE_S = 1.0
"""Time after which the address is tried with a socket; not earlier, because a starting broker also closes connections.
"""
_REFUSED = (KafkaError._AUTHENTICATION, KafkaError._SSL)
_WANTS_CERTIFICATE = ("alert bad certificate", "alert certificate required", "alert handshake failure")
_REFUSES_CERTIFICATE = ("alert certificate unknown", "alert certificate expired", "alert unknown ca")


def check_broker(config: KafkaConfig, timeout_s: float = 10.0) -> None:
    """Return once a broker answers and names a broker that is up. Raises AccessDenied as soon as it is known that the
    brokers refuse this client, and BrokerUnavailable if none answers so within `timeout_s`."""
    errors: list[KafkaError] = []
    client: Producer = clients.bare(config, error_cb=errors.append)
    start, tried, fenced = time.monotonic(), False, False
    while True:
        left_s = timeout_s - (time.monotonic() - start)
        try:
            answer = client.list_topics(clients.FIRST_TOPIC, timeout=max(0.01, min(_SLICE_S, left_s)))
            if answer.brokers:
                return
            fenced = True
            if left_s <= 0:
                raise _fenced(config)
            # Requests of an admin client would wait for such a broker until they time out.
            time.sleep(min(_FENCED_PAUSE_S, left_s))
            client = clients.bare(config, error_cb=errors.append)  # see `stranded_clients`
        except KafkaException as exception:
            client.poll(0)  # calls error_cb with the errors so far
            sure = any(error.code() in _REFUSED for error in errors)
            if sure or left_s <= 0 or (not tried and time.monotonic() - start > _NOT_SURE_S):
                tried = True
                error = _fenced(config) if fenced and not sure else explain(config, errors)
                if left_s <= 0 or isinstance(error, AccessDenied):
                    raise error from exception


def check_access(config: KafkaConfig) -> None:
    """Raise AccessDenied if the brokers refuse this client; return otherwise, after a short wait if none answers."""
    try:
        check_broker(config, _NOT_SURE_S)
    except AccessDenied:
        raise
    except BrokerUnavailable:
        return


def explain(config: KafkaConfig, errors: Sequence[KafkaError]) -> RollstreamError:
    """Return the error that explains what a client reported and how the brokers' addresses respond to a socket."""
    address = config.client.get("bootstrap.servers", config.bootstrap_servers)
    protocol = config.client.get("security.protocol", "PLAINTEXT").upper()
    reported = " ".join(error.str() for error in errors)
    for error in errors:
        if error.code() == KafkaError._AUTHENTICATION:
            user = config.client.get("sasl.username", "")
            of_user = f" of user {user}" if user else ""
            return AccessDenied(
                f"the brokers at {address} refuse the credentials{of_user} ({_core(error)}); check sasl.username, "
                "sasl.password and sasl.mechanism in kafka.client"
            )
    if protocol.endswith("SSL"):
        return _of_tls(config, address, reported) or _absent(address, errors)
    if any(_speaks_tls(*place) for place in _places(address)):
        return AccessDenied(
            f"the brokers at {address} speak TLS, but security.protocol in kafka.client is {protocol}; set it to SSL "
            "or SASL_SSL, and ssl.ca.location to the certificate of their authority"
        )
    if any(_listens(*place) for place in _places(address)) and "refused" not in reported:
        return BrokerUnavailable(
            f"{address} accepts connections but does not answer like a broker; it may be starting, need SASL "
            "(security.protocol in kafka.client), or not be a Kafka broker"
        )
    return _absent(address, errors)


def _of_tls(config: KafkaConfig, address: str, reported: str) -> RollstreamError | None:
    if "PLAINTEXT broker listener" in reported:
        return AccessDenied(
            f"the brokers at {address} do not speak TLS, but security.protocol in kafka.client asks for it; give the "
            "address of their TLS listener, or remove the key"
        )
    for place in _places(address):
        fault = _certificate_fault(config, *place)
        if fault:
            return AccessDenied(
                f"the certificate of the broker {place[0]}:{place[1]} is not accepted: {fault}; check ssl.ca.location "
                "in kafka.client, and the broker's certificate"
            )
    if any(alert in reported for alert in _REFUSES_CERTIFICATE):
        return AccessDenied(
            f"the brokers at {address} refuse this client's certificate; check that it has not expired and is signed "
            "by an authority that they trust (ssl.certificate.location in kafka.client)"
        )
    if any(alert in reported for alert in _WANTS_CERTIFICATE):
        return AccessDenied(
            f"the brokers at {address} require a client certificate; set ssl.certificate.location and "
            "ssl.key.location in kafka.client"
        )
    if any(_speaks_tls(*place) for place in _places(address)):
        return BrokerUnavailable(
            f"the brokers at {address} speak TLS but do not answer; they may be starting, or need SASL "
            "(security.protocol=SASL_SSL in kafka.client)"
        )
    return None


def _absent(address: str, errors: Sequence[KafkaError]) -> BrokerUnavailable:
    unresolved = any(error.code() == KafkaError._RESOLVE for error in errors)
    reason = "the name has no address" if unresolved else "nothing accepts connections there"
    return BrokerUnavailable(
        f"no Kafka broker answers at {address} ({reason}); start one with `rollstream broker start`, or set "
        "kafka.bootstrap_servers (or KAFKA_BOOTSTRAP_SERVERS)"
    )


def _fenced(config: KafkaConfig) -> BrokerUnavailable:
    address = config.client.get("bootstrap.servers", config.bootstrap_servers)
    return BrokerUnavailable(
        f"the broker at {address} answers, but names no broker that is up: the controllers have fenced the brokers, as "
        "after a pause of the machine, or while brokers start; try again, and read the brokers' logs if it stays so"
    )


def _core(error: KafkaError) -> str:
    """Return the client's message without the address before it and the state after it; the whole message if it has
    no state."""
    return error.str().partition(": ")[2].rpartition(" (after ")[0] or error.str()


def _places(addresses: str) -> list[tuple[str, int]]:
    places = []
    for address in addresses.split(","):
        host, _, port = address.strip().rpartition("://")[2].rpartition(":")
        if host and port.isdecimal():
            places.append((host.strip("[]"), int(port)))
    return places


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), _PROBE_S):
            return True
    except OSError:
        return False


def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        suppress(OSError),
        socket.create_connection((host, port), _PROBE_S) as connection,
        context.wrap_socket(connection, server_hostname=host),
    ):
        return True
    return False


def _certificate_fault(config: KafkaConfig, host: str, port: int) -> str:
    """Return why the certificate of a listener is not accepted; empty if it is, or if this cannot be determined."""
    settings = config.client
    if settings.get("enable.ssl.certificate.verification", "true") == "false":
        return ""
    authority = settings.get("ssl.ca.location")
    try:
        context = ssl.create_default_context()
        # The client also accepts a directory, and "probe" for the authorities of the system.
        if authority and Path(authority).is_dir():
            context = ssl.create_default_context(capath=authority)
        elif authority and authority != "probe":
            context = ssl.create_default_context(cafile=authority)
        elif text := settings.get("ssl.ca.pem"):
            context = ssl.create_default_context(cadata=resolve("ssl.ca.pem", text))
    except (OSError, ValueError) as error:
        return f"ssl.ca.location or ssl.ca.pem cannot be read ({error})"
    context.check_hostname = settings.get("ssl.endpoint.identification.algorithm", "https") != "none"
    try:
        with (
            socket.create_connection((host, port), _PROBE_S) as connection,
            context.wrap_socket(connection, server_hostname=host),
        ):
            return ""
    except ssl.SSLCertVerificationError as error:
        return str(error.verify_message)
    except OSError:
        return ""


SILENT_S = 30.0
"""Time without any sign of a broker after which a client is examined, and between examinations."""
_ANSWER_S = 2.0
_EXAMINATIONS = 3


class StrandedCheck:
    """Examines a client that hears nothing from brokers, until it is known to be stranded.

    A healthy client may fail one examination: after an outage it waits up to ten seconds before it connects again
    (librdkafka's reconnect.backoff.max.ms), or thirty for a connection to be made (socket.connection.setup.timeout.ms),
    and up to sixty for an answer on a connection that is dead (socket.timeout.ms). So only a client that fails three in
    a row, SILENT_S apart, is stranded.
    """

    def __init__(self) -> None:
        self._failed = 0

    def clear(self) -> None:
        """Note that the client has heard from a broker."""
        self._failed = 0

    def is_stranded(self, kafka: KafkaConfig, client: Any, topic: str) -> bool:
        """Examine the client, which may take four seconds, and return whether it is known to be stranded."""
        silent = not _answers(client, topic) and _answers(clients.bare(kafka), clients.FIRST_TOPIC)
        self._failed = self._failed + 1 if silent else 0
        return self._failed >= _EXAMINATIONS


def _answers(client: Any, topic: str) -> bool:
    with suppress(KafkaException):
        client.list_topics(topic, timeout=_ANSWER_S)
        return True
    return False
