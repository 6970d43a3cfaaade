"""Requests as probes and scrapers make them: the status and the text, whatever the status is."""

import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from rollstream.topics.metrics.catalogue import COMMON, of_role


def probe(url: str, timeout_s: float = 60.0) -> tuple[int, str]:
    """Status and text of an answer. Raises OSError if there is none."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


Series = dict[str, dict[tuple[tuple[str, str], ...], float]]
"""Values by name of the series and its labels, without run and process."""


def scrape(url: str) -> tuple[Series, set[tuple[str, ...]]]:
    """Series at the service port of a process, and the values of run and process in them."""
    status, text = probe(f"{url}/metrics")
    assert status == 200
    series: Series = {}
    places = set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in COMMON}
            series.setdefault(sample.name, {})[tuple(sorted(labels.items()))] = sample.value
            places.add(tuple(sample.labels[name] for name in COMMON))
    return series, places


def lacking(series: Series, role: str) -> set[str]:
    """Metrics that a role always serves and that are not there."""
    always = (spec for spec in of_role(role) if not spec.when)
    return {spec.name for spec in always} - {name.removesuffix("_count") for name in series}
