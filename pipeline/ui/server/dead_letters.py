"""Dead letters for the page: rows for its list, and sending letters again."""

from collections.abc import Sequence
from typing import Any

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.tools import dlq
from rollstream.pipeline.tools.plain_values import compact, decoded, plain
from rollstream.pipeline.ui.server.answers import UnusableParameter

_PREVIEW = 200
_MOST_SENT = 1000


def row(letter: dlq.Letter) -> dict[str, Any]:
    """Return a letter as a row."""
    value = decoded(letter.value)
    # A complete record may have thousands of tokens; `plain` abbreviates them.
    preview = value.decode(errors="replace") if isinstance(value, bytes) else compact(plain(value)) if value else ""
    return {
        "place": letter.name,
        "source": f"{letter.topic} {letter.partition}:{letter.source}",
        "reason": letter.reason,
        "time_ms": letter.at_ms,
        "bytes": letter.size_bytes,
        "redriven": bool(letter.redriven),
        "preview": preview[:_PREVIEW],
    }


def redrive(config: RunConfig, places: object) -> dict[str, Any]:
    """Send letters again, each at most once; return the number sent, and why each other letter was not sent."""
    if not isinstance(places, Sequence) or isinstance(places, str) or not places or len(places) > _MOST_SENT:
        raise UnusableParameter("places is not a list of places", f'give 1 to {_MOST_SENT:,} places, such as ["0:3"]')
    names = [str(place) for place in places]
    letters = dlq.chosen(dlq.read(config.kafka, config.run, with_value=frozenset(names)), names, config.run)
    sent, left = dlq.resend(config, letters)
    return {"redriven": len(sent), "left": {letter.name: why for letter, why in left}}
