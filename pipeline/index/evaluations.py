"""The table of evaluations: figures with intervals by version, environment and suite."""

import json
import sqlite3
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from rollstream.pipeline.index.series import learners, steps_of_versions
from rollstream.producers.worker.evaluation_figures import Answer, Figure, figures

VERSIONS = 20
"""Number of versions in a table that names no number."""


class _Part(NamedTuple):
    """The answers of one environment in one evaluation."""

    environment: str
    answers: list[Answer]
    samples: int
    expected: int
    """Number of answers of the whole evaluation; fewer are there if it was cut short."""
    suites: Sequence[str]


def evaluations(db: sqlite3.Connection, learner: str | None, versions: int) -> dict[str, Any]:
    """Return a row for each environment and suite of the newest `versions` evaluated versions, newest first, and the
    number of evaluated versions.

    `step` is the step of the learner, by default the one with the most steps, that published the version.
    """
    known = learners(db)
    steps = steps_of_versions(db, learner or (known[0] if known else None))
    evaluated = [v for (v,) in db.execute("select distinct version from evaluated order by version desc")]
    rows = []
    for version in evaluated[:versions]:
        for phase, parts in sorted(_parts(db, version).items()):
            named = [(part.environment, [part]) for part in parts]
            suites = sorted({suite for part in parts for suite in part.suites})
            named += [(suite, [part for part in parts if suite in part.suites]) for suite in suites]
            place = {"version": version, "step": steps.get(version), "phase": phase}
            rows += [place | _row(name, members, suite=i >= len(parts)) for i, (name, members) in enumerate(named)]
    return {"rows": rows, "versions": len(evaluated)}


def _row(name: str, parts: Sequence[_Part], *, suite: bool) -> dict[str, Any]:
    given: Mapping[str, Figure] = figures([part.answers for part in parts])
    return {
        "name": name,
        "environments": [part.environment for part in parts] if suite else None,
        "samples": max(part.samples for part in parts),
        "answers": sum(len(part.answers) for part in parts),
        "expected": sum(part.expected for part in parts),
        "figures": {figure: value._asdict() for figure, value in given.items()},
    }


def _parts(db: sqlite3.Connection, version: int) -> dict[str, list[_Part]]:
    """Return the environments of a version's evaluations, by phase."""
    rows = db.execute(
        "select phase, (select name from names where id = environment) as name, example, reward, success, samples,"
        " prompts, suites from evaluated where version = ? order by phase, name, episode",
        (version,),
    )
    grouped: defaultdict[tuple[str, str], list[tuple[Any, ...]]] = defaultdict(list)
    for phase, name, *values in rows:
        grouped[phase, name].append(tuple(values))
    parts: defaultdict[str, list[_Part]] = defaultdict(list)
    for (phase, name), answers in grouped.items():
        *_rest, samples, prompts, suites = answers[-1]
        expected = len(answers) if prompts is None else prompts * samples
        given = [Answer(example, reward, bool(success)) for example, reward, success, *_rest in answers]
        parts[phase].append(_Part(name, given, samples, expected, _names(suites)))
    return parts


def _names(text: str) -> Sequence[str]:
    """Return the suites that a rollout names; other programs may write anything to `evals`."""
    with suppress(ValueError, RecursionError):
        names = json.loads(text)
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return names
    return ()
