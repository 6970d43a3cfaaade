"""Requests to a schema registry, through the client that comes with confluent-kafka, and what their errors mean."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from rollstream.topics.closing import Closing
from rollstream.topics.codec import Schema
from rollstream.topics.config import RegistryConfig
from rollstream.topics.errors import ConfigurationError, RegistryUnavailable, SchemaRefused, brief
from rollstream.topics.kafka.registry.subjects import Subject, registered_text
from rollstream.topics.secrets import resolve

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import Schema as RegistrySchema

COMPATIBILITY = "BACKWARD_TRANSITIVE"
"""Our readers resolve every older schema."""
_DENIED = (401, 403)
_REFUSED = (409, 422)


class RegistryClient(Closing):
    """A registry, asked and told about our subjects. Every method raises RegistryUnavailable and SchemaRefused."""

    def __init__(self, config: RegistryConfig, timeout_s: float | None = None) -> None:
        """`timeout_s` replaces that of the settings. Raises ConfigurationError if the registry's client is not
        installed, or does not take the settings."""
        try:
            from confluent_kafka.schema_registry import SchemaRegistryClient
        except ImportError as error:
            raise ConfigurationError(
                f"kafka.registry.url is set, and its client is not installed ({brief(error)}): "
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
        """Return the newest schemas of a subject, from the first that the registry does not hold; oldest first."""
        versions = subject.versions
        for i in range(len(versions), 0, -1):
            if self._find(subject, versions[i - 1]) is not None:
                return versions[i:]
        return versions

    def register(self, subject: Subject) -> tuple[Schema, ...]:
        """Register what is `missing`, and return it; writes nothing if nothing is."""
        missing = self.missing(subject)
        with self._errors(f"registering {subject.name}"):
            for schema in missing:
                self._client.register_schema(subject.name, _for_client(schema))
                if schema is missing[0]:
                    # A registry may know no settings of a subject without schemas.
                    self._set_compatibility(subject)
        return missing

    def _set_compatibility(self, subject: Subject) -> None:
        from confluent_kafka.schema_registry import SchemaRegistryError

        try:
            self._client.set_compatibility(subject.name, COMPATIBILITY)
        except SchemaRegistryError as error:
            # Not every registry has levels of subjects, or lets every writer set them: then its own level holds.
            if error.http_status_code >= 500:
                raise

    def _find(self, subject: Subject, schema: Schema) -> int | None:
        from confluent_kafka.schema_registry import SchemaRegistryError

        with self._errors(f"looking for {subject.name}"):
            try:
                schema_id = self._client.lookup_schema(subject.name, _for_client(schema)).schema_id
            except SchemaRegistryError as error:
                # Another address than that of a registry answers 404 with no code of a registry's.
                if error.http_status_code == 404 and error.error_code // 100 == 404:
                    return None
                raise
        if schema_id is None:
            raise RegistryUnavailable(f"the registry at {self.url} gives {subject.name} no id")
        return schema_id

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        from confluent_kafka.schema_registry import SchemaRegistryError

        try:
            yield
        except (RegistryUnavailable, SchemaRefused):
            raise
        except SchemaRegistryError as error:
            if error.http_status_code in _DENIED:
                raise SchemaRefused(
                    f"{doing}: the registry at {self.url} refuses this client ({error.http_status_code}); check "
                    "kafka.registry.username and password, and its access rules"
                ) from error
            if error.http_status_code in _REFUSED:
                raise SchemaRefused(
                    f"{doing}: the registry at {self.url} refuses the schema ({brief(error)}); another release or "
                    "program registered one that does not go with it: give the subject back, or another run a name"
                ) from error
            raise RegistryUnavailable(f"{doing}: the registry at {self.url} answers {brief(error)}") from error
        except Exception as error:  # the errors of its HTTP client have no base of their own, and it parses what comes
            raise RegistryUnavailable(
                f"{doing}: no registry answers at {self.url} ({brief(error)}); {_remedy(str(error))}"
            ) from error


def _remedy(error: str) -> str:
    """Return what helps against an error of a connection, by OpenSSL's words for those of certificates."""
    words = error.lower()
    if "certificate verify failed" in words:
        return "name the authority of its certificate in kafka.registry.ca, or check the host in kafka.registry.url"
    if "certificate required" in words or "handshake failure" in words:
        return "it asks for a certificate of this client: name it, and its key, in kafka.registry.certificate"
    return "start it, or check kafka.registry.url"


def _for_client(schema: Schema) -> "RegistrySchema":
    from confluent_kafka.schema_registry import Schema as RegistrySchema

    return RegistrySchema(registered_text(schema), "AVRO")
