"""Access rules (ACLs) of brokers that have an authorizer: reads, adds and removes them, and asks which a user has."""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicCollection, libversion

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import AccessDenied, BrokerUnavailable, ConfigurationError
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.client_calls import COORDINATOR_REQUEST_S, answer_of, description_of
from rollstream.topics.kafka.hanging_transactions import admin_client

if TYPE_CHECKING:
    from confluent_kafka.admin._acl import AclBinding

_TIMEOUT_S = 30.0
Resource = Literal["topic", "group", "transactionalId", "cluster"]
_RESOURCES: dict[Resource, str] = {
    "topic": "TOPIC",
    "group": "GROUP",
    "transactionalId": "TRANSACTIONAL_ID",
    "cluster": "BROKER",
}
"""The client library's names of resources by Strimzi's names; the library calls the cluster BROKER."""
EVERY_HOST = "*"
T = TypeVar("T")


@dataclass(frozen=True, order=True, kw_only=True)
class AccessEntry:
    """One access rule of the brokers, for one operation."""

    principal: str
    """The user that it applies to, such as User:main-env."""
    resource: Resource
    name: str
    """Name of the resource, or its beginning; `*` stands for every name."""
    prefix: bool
    """Whether it covers every name that begins with `name`."""
    operation: str
    """Spelled as in Strimzi's KafkaUser: Read, DescribeConfigs."""
    allow: bool = True
    host: str = EVERY_HOST

    def covers(self, resource: str, name: str) -> bool:
        """Whether the rule applies to the resource with this name; the operation does not matter."""
        if resource != self.resource:
            return False
        return self.name in (name, "*") or (self.prefix and name.startswith(self.name))


def entries(kafka: KafkaConfig) -> list[AccessEntry]:
    """Return the rules of the brokers about topics, groups, transactional ids and the cluster, sorted.

    Raises AccessDenied if this user may not see them, ConfigurationError if the brokers have no authorizer, and
    BrokerUnavailable if no broker answers.
    """
    from confluent_kafka.admin._acl import AclBindingFilter, AclOperation, AclPermissionType
    from confluent_kafka.admin._resource import ResourcePatternType
    from confluent_kafka.admin._resource import ResourceType as Kind

    # Checked first, because describe_acls does not say why it gets no answer.
    clients.check_broker(kafka)
    client = clients.admin(kafka)
    any_text: Any = None
    every = AclBindingFilter(
        Kind.ANY, any_text, ResourcePatternType.ANY, any_text, any_text, AclOperation.ANY, AclPermissionType.ANY
    )
    answer = client.describe_acls(every, request_timeout=_TIMEOUT_S)
    bindings = _refusing(answer, "Describe")
    if not bindings:
        _check_authorizer(kafka)
    kinds = {name: kind for kind, name in _RESOURCES.items()}
    return sorted(_entry(binding, kinds[binding.restype.name]) for binding in bindings if binding.restype.name in kinds)


def _check_authorizer(kafka: KafkaConfig) -> None:
    """Raise ConfigurationError if the brokers have no authorizer, AccessDenied if rules cannot be seen.

    In both cases the client hides the broker's error and returns no rules. It reports the error of a request to remove
    rules, so this requests the removal of a rule that cannot exist. A user who may see rules but not change them sees
    at least the rule that grants this right, so this function is not called for such a user.
    """
    from confluent_kafka.admin._acl import AclBindingFilter, AclOperation, AclPermissionType
    from confluent_kafka.admin._resource import ResourcePatternType
    from confluent_kafka.admin._resource import ResourceType as Kind

    none = AclBindingFilter(
        Kind.TOPIC,
        "rollstream-no-such-topic",
        ResourcePatternType.LITERAL,
        "User:rollstream-nobody",
        "*",
        AclOperation.READ,
        AclPermissionType.ALLOW,
    )
    client = clients.admin(kafka)
    _await(client.delete_acls([none], request_timeout=_TIMEOUT_S), "Describe")


def add(kafka: KafkaConfig, added: Iterable[AccessEntry]) -> None:
    """Add rules; rules that already exist stay. Raises as `entries` does."""
    client = clients.admin(kafka)
    bindings = [_binding(entry) for entry in added]
    _await(client.create_acls(bindings, request_timeout=_TIMEOUT_S) if bindings else {})


def remove(kafka: KafkaConfig, removed: Iterable[AccessEntry]) -> None:
    """Remove rules; a rule that is already gone is not an error. Raises as `entries` does."""
    from confluent_kafka.admin._acl import AclBindingFilter

    client = clients.admin(kafka)
    filters = [
        AclBindingFilter(
            b.restype, b.name, b.resource_pattern_type, b.principal, b.host, b.operation, b.permission_type
        )
        for b in map(_binding, removed)
    ]
    _await(client.delete_acls(filters, request_timeout=_TIMEOUT_S) if filters else {})


def _await(changes: Mapping[Any, "Future[Any]"], operation: str = "Alter") -> None:
    for change in changes.values():
        _refusing(change, operation)


def _refusing(request: "Future[T]", operation: str) -> T:
    try:
        return answer_of(request, _TIMEOUT_S)
    except KafkaException as exception:
        error: KafkaError = exception.args[0]
        if error.code() == KafkaError.SECURITY_DISABLED:
            raise ConfigurationError(
                "the brokers have no authorizer, so every client may perform every operation; set their "
                "authorizer.class.name, for example to org.apache.kafka.metadata.authorizer.StandardAuthorizer"
            ) from exception
        if error.code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED:
            raise AccessDenied(
                f"access rules need the right {operation} on the cluster, which this user lacks; run the command as a "
                "super user of the brokers, or grant the right"
            ) from exception
        raise BrokerUnavailable(f"access rules: {error.str()} ({error.name()})") from exception


def _entry(binding: "AclBinding", resource: Resource) -> AccessEntry:
    from confluent_kafka.admin._acl import AclPermissionType
    from confluent_kafka.admin._resource import ResourcePatternType

    return AccessEntry(
        principal=binding.principal,
        resource=resource,
        name=binding.name,
        prefix=binding.resource_pattern_type is ResourcePatternType.PREFIXED,
        operation=operation_name(binding.operation),
        allow=binding.permission_type is AclPermissionType.ALLOW,
        host=binding.host,
    )


def operation_name(operation: Any) -> str:
    """Return the name of an operation of the client library as Strimzi spells it, e.g. DescribeConfigs."""
    return "".join(word.capitalize() for word in str(operation.name).split("_"))


def _binding(entry: AccessEntry) -> "AclBinding":
    from confluent_kafka.admin._acl import AclBinding, AclOperation, AclPermissionType
    from confluent_kafka.admin._resource import ResourcePatternType
    from confluent_kafka.admin._resource import ResourceType as Kind

    operation = next(each for each in AclOperation if operation_name(each) == entry.operation)
    return AclBinding(
        Kind[_RESOURCES[entry.resource]],
        entry.name,
        ResourcePatternType.PREFIXED if entry.prefix else ResourcePatternType.LITERAL,
        entry.principal,
        entry.host,
        operation,
        AclPermissionType.ALLOW if entry.allow else AclPermissionType.DENY,
    )


_NO_SUCH_PRODUCER = 2**62
_TRANSACTIONAL_ID_DENIED = 53
_DENIED = (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED)
_ABSENT = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.GROUP_ID_NOT_FOUND)


def topic_operations(kafka: KafkaConfig, topics: Iterable[str]) -> dict[str, frozenset[str] | None]:
    """Return the operations that the user may do on each topic, such as Read; None for a topic that does not exist.

    The set of a topic on which the user lacks Describe is empty. Raises BrokerUnavailable.
    """
    client, names = clients.admin(kafka), list(topics)
    answers = client.describe_topics(TopicCollection(names), include_authorized_operations=True) if names else {}
    return {name: _operations(answer, f"topic {name}") for name, answer in answers.items()}


def group_operations(kafka: KafkaConfig, groups: Iterable[str]) -> dict[str, frozenset[str] | None]:
    """Return the operations that the user may do on each consumer group, whether it exists or not."""
    client, names = clients.admin(kafka), list(groups)
    if not names:
        return {}
    answers = client.describe_consumer_groups(
        names, include_authorized_operations=True, request_timeout=COORDINATOR_REQUEST_S
    )
    return {name: _operations(answer, f"group {name}") for name, answer in answers.items()}


def cluster_operations(kafka: KafkaConfig) -> frozenset[str]:
    """Return the operations that the user may do on the cluster."""
    client = clients.admin(kafka)
    return _operations(client.describe_cluster(include_authorized_operations=True), "the cluster") or frozenset()


def writable_ids(kafka: KafkaConfig, ids: Iterable[str]) -> dict[str, bool]:
    """Return whether the user may write under each transactional id.

    Asks a broker to abort a transaction of a producer that cannot exist; the reason for the refusal shows the
    permission. Fences no producer. Raises as `admin_client` does, and BrokerUnavailable if the request fails.
    """
    from kafka.errors import KafkaError as OtherKafkaError
    from kafka.protocol.producer.transaction import EndTxnRequest

    allowed = {}
    with admin_client(kafka) as client:
        for name in ids:
            request = EndTxnRequest(
                transactional_id=name, producer_id=_NO_SUCH_PRODUCER, producer_epoch=0, committed=False
            )
            try:
                # Brokers check the permission first, so any broker can answer.
                response: Any = client._manager.run(_sent, client, request)
            except (OtherKafkaError, OSError, ValueError) as error:
                raise BrokerUnavailable(f"asking about transactional id {name}: {error}") from error
            allowed[name] = response.error_code != _TRANSACTIONAL_ID_DENIED
    return allowed


async def _sent(client: Any, request: Any) -> Any:
    return await client._manager.send(request)


def client_version() -> str:
    """Return the version of librdkafka."""
    return libversion()[0]


def broker_version(kafka: KafkaConfig) -> str:
    """Return the version of a broker, such as 4.2, as its supported requests show it."""
    with admin_client(kafka) as client:
        return ".".join(map(str, client._manager.broker_version_data.broker_version[:2]))


def _operations(answer: Any, what: str) -> frozenset[str] | None:
    try:
        described = answer_of(answer, _TIMEOUT_S)
    except KafkaException as exception:
        error: KafkaError = exception.args[0]
        code = error.code()
        if code in _DENIED:
            return frozenset()
        if code in _ABSENT:
            return None
        raise BrokerUnavailable(f"asking about {what}: {description_of(error)}") from exception
    return frozenset(map(operation_name, described.authorized_operations or ()))
