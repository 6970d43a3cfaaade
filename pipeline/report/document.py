"""The report of a run as one HTML file: no script, no external resource, every text of the run escaped. Pure."""

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

from rollstream.pipeline.command_line.text_tables import bytes_text, printable, utc_time
from rollstream.pipeline.report.line_chart import COLOURS, Curve, chart, number_text
from rollstream.pipeline.report.run_facts import RunFacts

_LONGEST_TEXT = 4000
"""Largest number of characters shown of a turn."""


class _Chart(NamedTuple):
    title: str
    names: tuple[str, ...]
    """Names of series; a name that ends with / stands for all series that begin with it."""
    about: str = ""


_SECTIONS: Mapping[str, tuple[_Chart, ...]] = {
    "Learning": (
        _Chart(
            "Reward",
            ("reward/", "trained/reward"),
            "mean over rollouts produced, of all environments and of each, and over those trained on",
        ),
        _Chart("Success by environment", ("success/",), "share of rollouts, by the step that published their version"),
        _Chart("Length in sampled tokens", ("length/", "trained/completions/mean_length")),
        _Chart("Truncated", ("truncated/", "trained/completions/clipped_ratio"), "share of rollouts"),
    ),
    "Optimization": (
        _Chart("Loss", ("loss",)),
        _Chart("Divergence", ("kl", "mismatch"), "kl from the reference policy; mismatch between sampler and learner"),
        _Chart("Entropy", ("entropy",)),
        _Chart("Gradient norm", ("optim/grad_norm",), "before clipping"),
    ),
    "Flow": (
        _Chart("Staleness in steps", ("staleness",), "mean age of the rollouts trained on"),
        _Chart("Tokens a second", ("tokens_per_s",), "of the learner, over everything"),
        _Chart("Seconds of a step", ("step_s", "step_s/"), "by stage; load and broadcast_weights run during training"),
    ),
}


def document(facts: RunFacts) -> str:
    """Return the report as HTML."""
    parts = [
        _head(facts),
        _figures(facts),
        _settings(facts),
        *_charts(facts),
        _evaluations(facts),
        _ledger(facts),
        _drops(facts),
        _versions(facts),
    ]
    parts += [_rollouts("Best rollouts", facts.best), _rollouts("Worst rollouts", facts.worst), _commands(facts)]
    return page(f"{facts.run}: report of a run", "".join(parts))


def page(title: str, body: str) -> str:
    """Return a page with the style of reports; `body` is HTML."""
    style = files("rollstream.pipeline.report").joinpath("style.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        f"{body}</main>\n</body>\n</html>\n"
    )


# ---------------------------------------------------------------------- parts of the page


def _head(facts: RunFacts) -> str:
    rows = [
        ("Learner", _named(facts.learner, facts.learners)),
        ("Environments", ", ".join(facts.environments) or "none"),
        ("Model", _model(facts)),
        ("From", _span(facts.first_ms, facts.last_ms)),
        ("Read from", "the topics of the run" if facts.ledger is not None else f"the archive {facts.source}"),
        ("Configuration", f"SHA-256 {facts.configuration}" if facts.configuration else "its file is missing here"),
        ("Written", _moment(facts.written_s * 1000)),
    ]  # fmt: skip
    items = "".join(f"<div><dt>{name}</dt><dd>{_text(value)}</dd></div>" for name, value in rows)
    return f"<header><p>Report of a run</p><h1>{_text(facts.run)}</h1>{_verdict(facts)}<dl>{items}</dl></header>\n"


def _named(learner: str | None, learners: Sequence[str]) -> str:
    others = [name for name in learners if name != learner]
    return (
        "no learner has a step on record"
        if learner is None
        else learner + (f" (others: {', '.join(others)})" if others else "")
    )


def _model(facts: RunFacts) -> str:
    shape = ", ".join(f"{name} {value}" for name, value in facts.model.items() if isinstance(value, int | str))
    return (
        f"{facts.parameters:,} parameters" + (f"; {shape}" if shape else "") if facts.parameters else "not on the log"
    )


def _span(first_ms: int | None, last_ms: int | None) -> str:
    if first_ms is None or last_ms is None:
        return "no rollout yet"
    return f"{_moment(first_ms)} to {_moment(last_ms)} ({(last_ms - first_ms) / 1000:,.0f} s of rollouts)"


def _verdict(facts: RunFacts) -> str:
    book = facts.ledger
    if book is None:
        return '<p class="verdict open">The ledger of an archive is proved once its topics are restored</p>'
    if not book["balanced"]:
        return f'<p class="verdict bad">The ledger does not balance: {len(book["problems"])} problems</p>'
    if book["undecided"]:
        return '<p class="verdict open">The ledger balances; an open transaction still hides records</p>'
    return f'<p class="verdict good">The ledger balances: {book["produced"]:,} records, each in exactly one place</p>'


def _figures(facts: RunFacts) -> str:
    """Return tiles with the most important figures."""
    steps = facts.curves.get("loss") or facts.curves.get("step_s")
    tiles = []
    for name, curve in _curves_of(facts, ("reward/produced", "success/")):
        tiles.append((name, number_text(curve.values[-1]), f"from {number_text(curve.values[0])}"))
    if steps is not None:
        tiles.append(("newest step", number_text(steps.steps[-1]), f"{len(steps.steps):,} on record"))
    if facts.groups:
        share = facts.zero_variance / facts.groups
        tiles.append(("groups of zero variance", f"{share:.1%}", f"{facts.zero_variance:,} of {facts.groups:,}"))
    tiles.append(("policy versions", f"{facts.versions:,}", bytes_text(facts.version_bytes)))
    cells = "".join(
        f"<div><dt>{_text(name)}</dt><dd><b>{_text(value)}</b> <span>{_text(more)}</span></dd></div>"
        for name, value, more in tiles
    )
    return f'<dl class="tiles">{cells}</dl>\n'


def _settings(facts: RunFacts) -> str:
    if not facts.configuration:
        return ""
    rows = "".join(
        f'<tr><th scope="row"><code>{_text(each.key)}</code></th><td>{_text(each.value)}</td>'
        f"<td>{_text(each.default)}</td></tr>"
        for each in facts.settings
    )
    heads = "<tr><th>setting</th><th>value</th><th>default</th></tr>"
    table = f'<div class="wide"><table><thead>{heads}</thead><tbody>{rows}</tbody></table></div>'
    return f"<section><h2>Settings that were changed</h2>{table if rows else '<p>None.</p>'}</section>\n"


def _charts(facts: RunFacts) -> Iterator[str]:
    number = 0
    for section, charts in _SECTIONS.items():
        drawn = []
        for one in charts:
            curves = [curve for _name, curve in _curves_of(facts, one.names)]
            if curves:
                drawn.append(figure(one.title, one.about, curves, number))
                number += 1
        if section == "Flow" and facts.spread is not None:
            about = "share of groups whose members all have one reward, by policy version"
            drawn.append(figure("Groups of zero variance", about, [facts.spread], number))
        if drawn:
            yield f'<section><h2>{section}</h2><div class="charts">{"".join(drawn)}</div></section>\n'


def _curves_of(facts: RunFacts, names: Sequence[str]) -> list[tuple[str, Curve]]:
    return [
        (name, curve)
        for wanted in names
        for name, curve in sorted(facts.curves.items())
        if name == wanted or (wanted.endswith("/") and name.startswith(wanted))
    ]


def figure(title: str, about: str, curves: Sequence[Curve], number: int) -> str:
    """Return a chart with a table of its curves; `number` is unique among the charts of a page."""
    rows = "".join(
        f'<tr><th scope="row"><span class="key c{i % COLOURS}"></span>{_text(c.name)}</th>'
        f"<td>{number_text(c.values[0])}</td><td>{number_text(min(c.values))}</td><td>{number_text(max(c.values))}</td>"
        f'<td data-value="{c.values[-1]!r}">{number_text(c.values[-1])}</td></tr>'
        for i, c in enumerate(curves)
    )
    return (
        f"<figure><figcaption><b>{_text(title)}</b>{f' <span>{_text(about)}</span>' if about else ''}</figcaption>"
        f"{chart(title, curves, number)}<table><thead><tr><td></td><th>first</th><th>lowest</th><th>highest</th>"
        f"<th>last</th></tr></thead><tbody>{rows}</tbody></table></figure>"
    )


def _evaluations(facts: RunFacts) -> str:
    """Return the table of evaluations; empty if there is none."""
    rows = facts.evaluations["rows"]
    if not rows:
        return ""
    ks = sorted({int(name[5:]) for row in rows for name in row["figures"] if name.startswith("pass@")})
    names = ["reward", "success", *(f"pass@{k}" for k in ks)]
    heads = "".join(f"<th>{name}</th>" for name in ("version", "step", "environment", "phase", "answers", *names))
    body = "".join(
        f'<tr><th scope="row">{row["version"]}</th><td>{"" if row["step"] is None else row["step"]}</td>'
        f"<td>{'suite ' * (row['environments'] is not None)}{_text(row['name'])}</td><td>{_text(row['phase'])}</td>"
        f"<td>{row['answers']:,}{_missing(row)}, {row['samples']:,} a prompt</td>"
        + "".join(f"<td>{_interval(row['figures'].get(name))}</td>" for name in names)
        + "</tr>"
        for row in rows
    )
    shown, versions = len({row["version"] for row in rows}), facts.evaluations["versions"]
    note = "Means over the prompts, with 95 % intervals." + (
        f" The newest {shown} of {versions:,} evaluated versions." if shown < versions else ""
    )
    return (
        f'<section><h2>Evaluations</h2><p>{note}</p><div class="wide"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></section>\n"
    )


def _missing(row: Mapping[str, Any]) -> str:
    return f" of {row['expected']:,}" if row["answers"] < row["expected"] else ""


def _interval(figure: Mapping[str, float] | None) -> str:
    if figure is None:
        return ""
    mean, low, high = (number_text(figure[name]) for name in ("mean", "low", "high"))
    return f"{mean} <small>({low} to {high})</small>"


def _ledger(facts: RunFacts) -> str:
    book = facts.ledger
    if book is None:
        places = dict(facts.fates)
        note = "Counts from the index of the archive; a proof needs the topics."
    else:
        names = ("batched", "dropped", "dead_lettered", "control", "in_flight", "unread")
        places = {n: sum(book[n].values()) if n == "dropped" else book[n] for n in names}
        note = f"{book['produced']:,} records were produced, {sum(places.values()):,} are in these places."
    problems = "".join(f"<li>{_text(problem)}</li>" for problem in (book or {}).get("problems", ()))
    return (
        f"<section><h2>Where every rollout is</h2><p>{note}</p>{_bars(places)}"
        f"{f'<ul class=problems>{problems}</ul>' if problems else ''}</section>\n"
    )


def _drops(facts: RunFacts) -> str:
    drops = dict(sorted(facts.drops.items(), key=lambda item: -item[1]))
    return f"<section><h2>Drops by reason</h2>{_bars(drops) if drops else '<p>No rollout was dropped.</p>'}</section>\n"


def _bars(counts: Mapping[str, int]) -> str:
    """Return counts as a table with a bar for each count."""
    most = max(counts.values(), default=0) or 1
    rows = "".join(
        f'<tr><th scope="row">{_text(name.replace("_", " "))}</th><td data-name="{_text(name)}">{count:,}</td>'
        f'<td class="bar"><svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="c0 fill" width="{100 * count / most:.2f}" height="10"/></svg></td></tr>'
        for name, count in counts.items()
    )
    return f'<table class="bars"><tbody>{rows}</tbody></table>'


def _versions(facts: RunFacts) -> str:
    if not facts.newest_versions:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{v["version"]}</th><td>{v["step"]}</td><td>{_text(v["kind"])}</td>'
        f"<td>{bytes_text(v['bytes'])}</td>"
        f"<td>{_moment(v['created_ms'])}</td><td><code>{_text(v['digest'][:16])}</code></td></tr>"
        for v in facts.newest_versions
    )
    more = facts.versions - len(facts.newest_versions)
    note = f"<p>The newest {len(facts.newest_versions)}; {more:,} more are on record.</p>" if more > 0 else ""
    return (
        f'<section><h2>Weights</h2>{note}<div class="wide"><table><thead><tr><th>version</th><th>step</th><th>kind</th>'
        f"<th>size</th><th>published</th><th>digest</th></tr></thead><tbody>{rows}</tbody></table></div></section>\n"
    )


def _rollouts(title: str, rollouts: Sequence[Mapping[str, Any]]) -> str:
    if not rollouts:
        return ""
    return f"<section><h2>{title}</h2>{''.join(map(_rollout, rollouts))}</section>\n"


def _rollout(details: Mapping[str, Any]) -> str:
    row = details["row"]
    facts = [
        ("reward", row["reward"]), ("advantage", row["advantage"]), ("environment", row["environment"]),
        ("example", row["example"]), ("version", row["version"]), ("step", row["step"]), ("tokens", row["length"]),
        ("fate", row["reason"] or row["fate"]), *sorted(details["components"].items()),
    ]  # fmt: skip
    items = "".join(
        f"<div><dt>{_text(name)}</dt><dd>{_text(number_text(value) if isinstance(value, float) else str(value))}</dd>"
        "</div>"
        for name, value in facts
        if value is not None
    )
    turns = "".join(
        f'<div class="turn"><h4>{_text(turn["role"] or "unknown")}</h4><pre>{_text(_clipped(turn["text"]))}</pre></div>'
        for turn in details["turns"]
    )
    return (
        f"<article><h3>Rollout {_text(row['place'])} <small>{_text(row['uid'] or '')}</small></h3>"
        f"<dl>{items}</dl>{turns or '<p>It has no turns; its tokens are on the log.</p>'}</article>"
    )


def _clipped(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]} ... ({len(text):,} characters)"


def _commands(facts: RunFacts) -> str:
    """Command lines that prove or show each claim above."""
    run, place = facts.run, next((r["row"]["place"] for r in (*facts.best, *facts.worst)), "0:0")
    if facts.ledger is None:
        rows = [
            ("The archive is whole", f"rollstream archive {facts.source} --run {run} --check"),
            ("Its topics can be restored", f"rollstream restore {facts.source} --run {run} --into {run}-again"),
            ("Every record is in exactly one place", f"rollstream ledger --run {run}-again"),
        ]
    else:
        rows = [("Every record is in exactly one place, and drops by reason", f"rollstream ledger --run {run}")]
        rows += [
            ("Every batch and drop follows from the log, bit for bit", f"rollstream verify --run {run}"),
            ("Figures of a step", f"rollstream cat steps --run {run}"),
            ("A rollout with its tokens, group and fate", f"rollstream show --run {run} {place}"),
            ("The step and the version that it went into", f"rollstream lineage --run {run} --offset {place}"),
            ("Versions with their digests", f"rollstream weights ls --run {run}"),
        ]
    cells = "".join(
        f"<tr><th scope=row>{_text(claim)}</th><td><code>{_text(line)}</code></td></tr>" for claim, line in rows
    )
    return f'<section><h2>Verify it</h2><table class="commands"><tbody>{cells}</tbody></table></section>\n'


# ---------------------------------------------------------------------- texts


def _text(text: str) -> str:
    """Escape text for HTML; markup and invisible characters are shown, not interpreted."""
    return escape(printable(text))


def _moment(time_ms: float | None) -> str:
    return "unknown" if time_ms is None else utc_time(time_ms / 1000)
