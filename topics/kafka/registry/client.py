"""Makes requests to a schema registry with confluent-kafka's client, and converts its errors into this project's.

A registered schema is the packaged schema with one more field in front, `frame_header`: the ten bytes that begin Avro's
single-object encoding. The value after a registry's five bytes is thus our unchanged frame, and stock clients can read
it.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from rollstream.topics.closing import Closing
from rollstream.topics.config import RegistryConfig
from rollstream.topics.errors import ConfigurationError, RegistryUnavailable, SchemaRefused, brief
from rollstream.topics.secrets import resolve
from rollstream.topics.wire.catalogue import CATALOGUE, run_and_name, spec_of, topic_name
from rollstream.topics.wire.codec import HEADER_SIZE, MAGIC, Schema, schemas

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import Schema as RegistrySchema

FRAME_HEADER = "frame_header"
"""Name of the field that registered schemas have before our own fields."""


class Subject(NamedTuple):
    """A record type of a topic, and the name of its schemas in the registry."""

    topic: str
    """Full name."""
    record: str
    name: str

    @property
    def versions(self) -> tuple[Schema, ...]:
        """Every schema of the record, oldest first."""
        return schemas()[self.record]


def subject_of(config: RegistryConfig, topic: str, record: str) -> Subject | None:
    """Return the subject of a record type of a run's topic; None if the catalogue has no such records on the topic."""
    place = run_and_name(topic)
    values = () if place is None else spec_of(place[1]).values
    if record not in values:
        return None
    full_name = f"rollstream.{record}"
    if config.subjects == "record":
        return Subject(topic, record, full_name)
    first = config.subjects == "topic" and record == values[0]
    return Subject(topic, record, f"{topic}-value" if first else f"{topic}-{full_name}")


def subjects_of(config: RegistryConfig, run: str) -> list[Subject]:
    """Return the subjects of a run, in the order of the catalogue."""
    pairs = ((topic_name(run, spec.name), record) for spec in CATALOGUE for record in spec.values)
    return [subject for pair in pairs if (subject := subject_of(config, *pair)) is not None]


def registered_text(schema: Schema) -> str:
    """Return the text of a schema as it is registered: always the same characters, because registries compare them."""
    header = {
        "name": FRAME_HEADER,
        "type": {"type": "fixed", "name": "FrameHeader", "namespace": "rollstream", "size": HEADER_SIZE},
        # Avro writes the default of bytes as a string with one character for each byte.
        "default": (MAGIC + schema.fingerprint).decode("latin-1"),
        "doc": "Header of Avro's single-object encoding: C3 01 and the fingerprint of the schema of the other fields. "
        "Readers of rollstream go by it; writers leave it at its default.",
    }
    return json.dumps({**schema.source, "fields": [header, *schema.source["fields"]]}, separators=(",", ":"))


COMPATIBILITY = "BACKWARD_TRANSITIVE"
"""Compatibility level of our subjects: our readers resolve every older schema."""
_DENIED = (401, 403)
_REFUSED = (409, 422)


class RegistryClient(Closing):
    """Finds and registers the schemas of our subjects. Every method may raise RegistryUnavailable or SchemaRefused."""

    def __init__(self, config: RegistryConfig, timeout_s: float | None = None) -> None:
        """`timeout_s` replaces the timeout in the settings. Raises ConfigurationError if the registry's client is not
        installed or rejects the settings."""
        try:
            from confluent_kafka.schema_registry import SchemaRegistryClient
        except ImportError as error:
            raise ConfigurationError(
                f"kafka.registry.url is set, but the registry's client is not installed ({brief(error)}): "
                "pip install 'rollstream[registry]'"
            ) from error
        self.url = config.url
        settings: dict[str, Any] = {"url": config.url, "timeout": timeout_s or config.timeout_s, "max.retries": 0}
        if config.username:
            password = resolve("kafka.registry.password", config.password)
            settings["basic.auth.user.info"] = f"{config.username}:{password}"
        if config.ca:
            settings["ssl.ca.location"] = config.ca
        if config.certificate:
            settings["ssl.certificate.location"] = config.certificate
        try:
            self._client = SchemaRegistryClient(settings)
        except (ValueError, OSError) as error:
            raise ConfigurationError(f"kafka.registry: {brief(error)}") from error
        self._open = ExitStack()
        self._open.push(self._client)

    def close(self) -> None:
        """Close the connections to the registry."""
        self._open.close()

    def id_of(self, subject: Subject, schema: Schema) -> int:
        """Return the id of a registered schema. Raises SchemaRefused if it is not registered."""
        schema_id = self._find(subject, schema)
        if schema_id is None:
            raise SchemaRefused(
                f"the registry at {self.url} does not hold version {schema.version} of {schema.record} under "
                f"{subject.name}; register it with `rollstream topics apply`"
            )
        return schema_id

    def missing(self, subject: Subject) -> tuple[Schema, ...]:
        """Return the schemas of a subject that are newer than every schema in the registry, oldest first."""
        versions = subject.versions
        for i in range(len(versions), 0, -1):
            if self._find(subject, versions[i - 1]) is not None:
                return versions[i:]
        return versions

    def register(self, subject: Subject) -> tuple[Schema, ...]:
        """Register the `missing` schemas and return them; writes nothing if none are missing."""
        missing = self.missing(subject)
        texts = [_for_client(schema) for schema in missing]
        with self._errors(f"registering {subject.name}"):
            for text in texts:
                self._client.register_schema(subject.name, text)
                if text is texts[0]:
                    # Not earlier: a registry may reject settings for a subject that has no schemas.
                    self._set_compatibility(subject)
        return missing

    def _set_compatibility(self, subject: Subject) -> None:
        from confluent_kafka.schema_registry import SchemaRegistryError

        try:
            self._client.set_compatibility(subject.name, COMPATIBILITY)
        except SchemaRegistryError as error:
            # Some registries have no levels per subject, or let only some users set them; their global level applies.
            if error.http_status_code >= 500:
                raise

    def _find(self, subject: Subject, schema: Schema) -> int | None:
        from confluent_kafka.schema_registry import SchemaRegistryError

        text = _for_client(schema)
        with self._errors(f"looking for {subject.name}"):
            try:
                schema_id = self._client.lookup_schema(subject.name, text).schema_id
            except SchemaRegistryError as error:
                # A server that is not a registry answers 404 without a registry's error code.
                if error.http_status_code == 404 and error.error_code // 100 == 404:
                    return None
                raise
        if schema_id is None:
            raise RegistryUnavailable(f"the registry at {self.url} returned no id for {subject.name}")
        return schema_id

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        """Convert the errors of the registry's client; only its calls belong into the block."""
        from confluent_kafka.schema_registry import SchemaRegistryError

        try:
            yield
        except (RegistryUnavailable, SchemaRefused):
            raise
        except SchemaRegistryError as error:
            if error.http_status_code in _DENIED:
                raise SchemaRefused(
                    f"{doing}: the registry at {self.url} refuses this client ({error.http_status_code}); check "
                    "kafka.registry.username and password, and the registry's access rules"
                ) from error
            if error.http_status_code in _REFUSED:
                raise SchemaRefused(
                    f"{doing}: the registry at {self.url} refuses the schema ({brief(error)}); another release or "
                    "program registered an incompatible schema: delete it, or start a run with another name"
                ) from error
            raise RegistryUnavailable(f"{doing}: the registry at {self.url} answers {brief(error)}") from error
        except Exception as error:  # HTTP errors share no base class, and parsing the answer may fail anywhere
            raise RegistryUnavailable(
                f"{doing}: no registry answers at {self.url} ({brief(error)}); {_remedy(str(error))}"
            ) from error


def _remedy(error: str) -> str:
    """Return the remedy for a connection error; errors of certificates are recognized by OpenSSL's words."""
    words = error.lower()
    if "certificate verify failed" in words:
        return "set kafka.registry.ca to the file of the registry's authority, or check the host in kafka.registry.url"
    if "certificate required" in words or "handshake failure" in words:
        return "it requires a client certificate: set kafka.registry.certificate to the file of certificate and key"
    return "start the registry, or check kafka.registry.url"


def _for_client(schema: Schema) -> "RegistrySchema":
    from confluent_kafka.schema_registry import Schema as RegistrySchema

    return RegistrySchema(registered_text(schema), "AVRO")
