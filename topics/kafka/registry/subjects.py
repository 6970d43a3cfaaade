"""Subjects of a schema registry for the record types of our topics, and the schemas under them.

A registered schema is the packaged schema with one more field in front, `frame_header`: the ten bytes that begin Avro's
single-object encoding. The value after a registry's five bytes is thus our unchanged frame, and stock clients can read
it.
"""

import json
from typing import NamedTuple

from rollstream.topics.config import RegistryConfig
from rollstream.topics.wire.catalogue import CATALOGUE, run_and_name, spec_of, topic_name
from rollstream.topics.wire.codec import HEADER_SIZE, MAGIC, Schema, schemas

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
