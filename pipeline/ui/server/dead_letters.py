"""Dead letters for the page: rows for its list, and sending letters again."""

from collections.abc import Sequence
from typing import Any

from rollstream.pipeline.command_line.plain_values import compact, decoded, plain
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.tools import dlq
from rollstream.pipeline.ui.server.answers import UnusableParameter
from rollstream.topics.config import KafkaConfig

_PREVIEW = 200
_MOST_SENT = 1000


def rows(kafka: KafkaConfig, run: str) -> list[dict[str, Any]]:
    """Return a row for each letter, newest first. No letter's value is kept: it may have a megabyte."""
    previews: dict[dlq.Place, str] = {}

    def note(letter: dlq.Letter) -> None:
        previews[letter.place] = _preview(letter.value)

    letters = dlq.read(kafka, run, with_value=(), each=note)
    return [_row(letter, previews[letter.place]) for letter in reversed(letters)]


def _row(letter: dlq.Letter, preview: str) -> dict[str, Any]:
    return {
        "place": letter.name,
        "source": f"{letter.topic} {letter.partition}:{letter.source}",
        "reason": letter.reason,
        "time_ms": letter.at_ms,
        "bytes": letter.size_bytes,
        "redriven": bool(letter.redriven),
        "preview": preview,
    }


def _preview(value: bytes | None) -> str:
    record = decoded(value)
    if isinstance(record, bytes):
        # A character of UTF-8 has at most four bytes.
        return record[: 4 * _PREVIEW].decode(errors="replace")[:_PREVIEW]
    # A complete record may have thousands of tokens; `plain` abbreviates them.
    return compact(plain(record))[:_PREVIEW] if record else ""


def redrive(config: RunConfig, places: object) -> dict[str, Any]:
    """Send letters again, each at most once; return the number sent, and why each other letter was not sent."""
    if not isinstance(places, Sequence) or isinstance(places, str) or not places or len(places) > _MOST_SENT:
        raise UnusableParameter("places is not a list of places", f'give 1 to {_MOST_SENT:,} places, such as ["0:3"]')
    names = [str(place) for place in places]
    letters = dlq.chosen(dlq.read(config.kafka, config.run, with_value=frozenset(names)), names, config.run)
    sent, left = dlq.resend(config, letters)
    return {"redriven": len(sent), "left": {letter.name: why for letter, why in left}}
