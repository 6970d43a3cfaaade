"""Checks the versions and settings of a run's brokers, and compares the run's topics with the catalogue."""

from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.doctor.findings import Finding, Level
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import AccessDenied, ConfigurationError, RollstreamError, TopicError
from rollstream.topics.kafka import access_control, provisioning, topic_admin
from rollstream.topics.wire.catalogue import CATALOGUE, topic_name

_OLDEST_BROKER = (4, 0)
_POSITIONS_KEPT_MIN = 30 * 24 * 60
"""Shortest acceptable time for which brokers keep the positions of a stopped run, such as one that is stopped over a
holiday."""
_CLEANUP_MS = 1000
_SET = "set topics.partitions, and topics.weights_partitions, to the numbers that are there"


def check_versions(config: RunConfig) -> Iterator[Finding]:
    """Yield a finding on the versions of the client and the brokers."""
    ours = f"rollstream {version('rollstream')}, librdkafka {access_control.client_version()}"
    try:
        broker = access_control.broker_version(config.kafka)
    except ConfigurationError:
        yield Finding(
            check="versions", level="note", text=f"{ours}; the brokers' version cannot be determined from here"
        )
        return
    older = tuple(map(int, broker.split("."))) < _OLDEST_BROKER
    yield Finding(
        check="versions",
        level="fault" if older else "ok",
        text=f"{ours}, brokers {broker} or newer",
        remedy="upgrade the brokers to Kafka 4.0 or newer" if older else "",
    )


def check_settings(config: RunConfig) -> Iterator[Finding]:
    """Yield findings on the settings of the brokers on which roles rely."""
    settings = {name: setting.value for name, setting in topic_admin.broker_settings(config.kafka).items()}
    if settings:
        yield from compared_settings(settings, config.kafka)
        return
    yield Finding(
        check="settings",
        level="note",
        text="this user may not see the settings of the brokers",
        remedy="have whoever runs the brokers compare them with docs/security.md#connecting",
    )


def compared_settings(settings: Mapping[str, str | None], kafka: KafkaConfig) -> Iterator[Finding]:
    """Yield a finding for each setting of the brokers that differs from what these settings of clients need, or one
    finding if none does. Settings that a broker does not name are passed over."""
    session_ms, transaction_ms = 1000 * kafka.session_timeout_s, 1000 * kafka.transaction_timeout_s
    session, transaction = "kafka.session_timeout_s", "kafka.transaction_timeout_s"
    classic: Level = "fault" if kafka.group_protocol == "classic" else "ok"
    needs: dict[str, tuple[Callable[[str], bool], Level, str, str]] = {
        "group.min.session.timeout.ms": (
            *(lambda value: float(value) <= session_ms, classic),
            *("consumers are refused", f"set it to {session_ms:.0f}, or raise {session}"),
        ),
        "group.max.session.timeout.ms": (
            *(lambda value: float(value) >= session_ms, classic),
            *("consumers are refused", f"set it to {session_ms:.0f}, or lower {session}"),
        ),
        "transaction.max.timeout.ms": (
            *(lambda value: float(value) >= transaction_ms, "fault"),
            *("grouping and learners are refused", f"set it to {transaction_ms:.0f}, or lower {transaction}"),
        ),
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": (
            *(lambda value: float(value) <= _CLEANUP_MS, "note"),
            *("readers wait longer behind the transaction of a killed process", f"set it to {_CLEANUP_MS}"),
        ),
        "offsets.retention.minutes": (
            *(lambda value: float(value) >= _POSITIONS_KEPT_MIN, "note"),
            "so long after a run stopped, grouping and labeling need `recover`, and prune no longer keeps records for "
            "the archive",
            "set it to 2147483647",
        ),
        "auto.create.topics.enable": (
            *(lambda value: value == "false", "note"),
            *("a program that misspells a name creates a topic", "set it to false"),
        ),
    }
    right = True
    for name, (fits, level, otherwise, remedy) in needs.items():
        value = settings.get(name)
        if value and level != "ok" and not fits(value):
            right = False
            text = f"{name} of the brokers is {value}: {otherwise}"
            yield Finding(check="settings", level=level, text=text, remedy=f"{remedy}, if you may")
    if right:
        yield Finding(check="settings", level="ok", text="settings of the brokers are those that roles need")


def check_topics(config: RunConfig, flags: str = "") -> Iterator[Finding]:
    """Yield a finding for each topic that is missing or differs from the catalogue, or one finding if all match.

    The commands of the remedies end in `flags`.
    """
    try:
        plans = provisioning.plan(config.kafka, config.topics, config.run)
    except TopicError as error:  # a number of partitions
        differing_counts = list(_check_partitions(config, flags))
        yield from differing_counts or [Finding(check="topics", level="fault", text=str(error), remedy=_SET)]
        return
    except RollstreamError as error:
        yield from _check_partitions(config, flags)
        hidden = isinstance(error, AccessDenied) and not topic_admin.runs(config.kafka).get(config.run)
        yield Finding(
            check="topics",
            level="fault" if hidden else "note",
            text=f"this user sees no topic of run {config.run}: {error}"
            if hidden
            else f"settings of topics were not checked: {error}",
            remedy=f"rollstream topics acls apply{flags}, as a user who may; or connect as a user of the run"
            if hidden
            else "run the check as the user audit or operate, which may see them",
        )
        return
    differing = [plan for plan in plans if plan.needed]
    for plan in differing:
        changes = "; ".join(f"{key} is {now or 'unset'}, not {right}" for key, (now, right) in plan.changes.items())
        text = f"topic {plan.topic} is missing" if plan.create else f"topic {plan.topic}: {changes or 'lacks schemas'}"
        yield Finding(check="topics", level="fault", text=text, remedy=f"rollstream topics apply{flags}")
    for plan in plans:
        if plan.replicas:
            now, wanted = plan.replicas
            yield Finding(
                check="topics",
                level="fault" if now < wanted else "note",
                text=f"topic {plan.topic}: replicas of each partition are {now}, not {wanted}",
                remedy=provisioning.MOVE_REPLICAS,
            )
    if not differing and not any(plan.replicas for plan in plans):
        yield Finding(check="topics", level="ok", text=f"{len(plans)} topics match the catalogue")


def _check_partitions(config: RunConfig, flags: str) -> Iterator[Finding]:
    """Yield a finding for each topic to which partitions were added: those of a run have as many as its journal. If
    there is none, yield a finding for a topic that has another number than the settings say.

    This needs no more than Describe, and passes over topics that this user does not see.
    """
    there = topic_admin.runs(config.kafka).get(config.run, {})
    right = there.get("journal", config.topics.partitions)
    names = [spec.name for spec in CATALOGUE if spec.partitions == "P"]
    added = [name for name in names if "journal" in there and there.get(name, right) != right]
    for name in added:
        yield Finding(
            check="topics",
            level="fault",
            text=f"topic {topic_name(config.run, name)} has {there[name]} partitions, and the journal {right}: keys "
            "have moved, and nothing groups what lies in the others",
            remedy=f"brokers cannot remove partitions, so rollstream fork{flags} --into NAME --partitions "
            f"{there[name]}",
        )
    wanted = {spec.name: spec.partition_count(config.topics) for spec in CATALOGUE}
    other = [] if added else [name for name, count in wanted.items() if there.get(name, count) != count]
    for name in other[:1]:
        text = f"topic {topic_name(config.run, name)} has {there[name]} partitions, and the settings say {wanted[name]}"
        yield Finding(check="topics", level="fault", text=text, remedy=_SET)
