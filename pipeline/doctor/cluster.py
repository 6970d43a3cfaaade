"""Looks at the brokers of a run: versions, topics against the catalogue, how long records are kept, and clocks."""

import time
from collections.abc import Iterator
from importlib.metadata import version

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.doctor.findings import Finding
from rollstream.topics.catalogue import topic_name
from rollstream.topics.errors import ConfigurationError, RollstreamError
from rollstream.topics.kafka import granted, provisioning, topic_admin
from rollstream.topics.kafka.waiting_records import oldest_age_s

_OLDEST_BROKER = (4, 0)
_SKEW_S = 5.0
"""Difference of clocks beyond which stream time of grouping and times in logs mislead."""


def check_versions(config: RunConfig) -> Iterator[Finding]:
    """Yield the versions of client and broker."""
    ours = f"rollstream {version('rollstream')}, librdkafka {granted.client_version()}"
    try:
        broker = granted.broker_version(config.kafka)
    except ConfigurationError:
        yield Finding(
            check="versions", level="note", text=f"{ours}; the brokers' version cannot be asked for from here"
        )
        return
    older = tuple(map(int, broker.split("."))) < _OLDEST_BROKER
    yield Finding(
        check="versions",
        level="fault" if older else "ok",
        text=f"{ours}, brokers {broker} or newer",
        remedy="upgrade the brokers to Kafka 4.0 or newer" if older else "",
    )


def check_topics(config: RunConfig) -> Iterator[Finding]:
    """Yield topics that are missing or differ from the catalogue."""
    try:
        plans = provisioning.plan(config.kafka, config.topics, config.run)
    except RollstreamError as error:
        yield Finding(
            check="topics",
            level="note",
            text=f"settings of topics were not looked at: {error}",
            remedy="run it as the user audit or operate, which may see them",
        )
        return
    differing = [plan for plan in plans if plan.needed]
    for plan in differing:
        changes = "; ".join(f"{key} is {now or 'unset'}, not {right}" for key, (now, right) in plan.changes.items())
        text = f"topic {plan.topic} is missing" if plan.create else f"topic {plan.topic}: {changes or 'schemas lack'}"
        yield Finding(check="topics", level="fault", text=text, remedy="rollstream topics apply")
    if not differing:
        yield Finding(check="topics", level="ok", text=f"{len(plans)} topics are as the catalogue says")


def check_retention(config: RunConfig) -> Iterator[Finding]:
    """Yield whether brokers may delete rollouts before grouping has read them."""
    topic = topic_name(config.run, "rollouts")
    kept_s = topic_admin.retention_s(config.kafka, topic)
    if kept_s == float("inf"):
        yield Finding(check="retention", level="ok", text=f"{topic} keeps its records for ever, or does not say")
        return
    try:
        age_s = oldest_age_s(config.kafka, config.grouper.group_id(config.run))
    except RollstreamError as error:
        age_s = None
        yield Finding(check="retention", level="note", text=f"the position of grouping cannot be seen: {error}")
    where = "" if age_s is None else f", and grouping stands at a record that is {age_s / 3600:.1f} h old"
    yield Finding(
        check="retention",
        level="fault",
        text=f"{topic} keeps records for {kept_s / 3600:.1f} h{where} (it must keep them)",
        remedy="rollstream topics apply, and rollstream prune for room",
    )


def check_clock(config: RunConfig) -> Iterator[Finding]:
    """Yield whether the clock of this machine is behind the one that stamped the newest rollout."""
    topic = topic_name(config.run, "rollouts")
    places = [(topic, partition) for partition in range(topic_admin.partitions_of(config.kafka, topic))]
    newest = [stamp for _offset, stamp in topic_admin.offsets(config.kafka, places, "max_timestamp").values()]
    stamped = [stamp for stamp in newest if stamp > 0]
    if not stamped:
        yield Finding(check="clock", level="note", text="there is no rollout yet whose time could be compared")
        return
    ahead_s = max(stamped) / 1000 - time.time()
    skewed = ahead_s > _SKEW_S
    yield Finding(
        check="clock",
        level="fault" if skewed else "ok",
        text=(
            f"the brokers stamped a rollout {ahead_s:.0f} s after this machine's time"
            if skewed
            else f"this clock is not behind the brokers' (the newest rollout is {-ahead_s:.0f} s old)"
        ),
        remedy="let NTP set the clocks of this machine and of the brokers" if skewed else "",
    )
