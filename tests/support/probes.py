"""Requests as probes and scrapers make them: the status and the text, whatever the status is."""

import urllib.error
import urllib.request


def probe(url: str, timeout_s: float = 60.0) -> tuple[int, str]:
    """Status and text of an answer. Raises OSError if there is none."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
