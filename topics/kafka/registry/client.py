"""Makes requests to a schema registry with confluent-kafka's client, and converts its errors into this project's."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from rollstream.topics.closing import Closing
from rollstream.topics.config import RegistryConfig
from rollstream.topics.errors import ConfigurationError, RegistryUnavailable, SchemaRefused, brief
from rollstream.topics.kafka.registry.subjects import Subject, registered_text
from rollstream.topics.secrets import resolve
from rollstream.topics.wire.codec import Schema

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import Schema as RegistrySchema

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
