"""`rollstream top`: shows the state of a run on one screen, from its topics alone, even after the run has ended.

`frame` and `line` are pure functions of a `RunSnapshot`. The demo shows the same frame.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.command_line.plain_values import compact, tell
from rollstream.pipeline.command_line.text_tables import printable
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.process import interruption
from rollstream.pipeline.run.component_metrics import component_lines
from rollstream.pipeline.run.observer import RunObserver
from rollstream.pipeline.run.run_statistics import RunSnapshot
from rollstream.topics.kafka import clients

NEWEST = 1000
"""Number of newest rollouts whose mean reward is shown."""
LINES = 20
"""Height of a frame without the tables of components."""
_ALL_LINES = 1_000_000
_FRAME_S = 0.5
LINE_S = 2.0
"""Time between two printed lines."""
_LEAST_WIDTH = 80
_MOST_WIDTH = 120
_ROWS = 4
_FAR = 1e300
"""Value that stands for an infinite mean, so that differences stay finite."""
_SPARKS = "▁▂▃▄▅▆▇█"
_NODES = ("envs", "rollouts", "grouping", "batches", "inference", "weights", "learner")


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream top`."""
    set_handler(parser, top, example="rollstream top --run main", json=True)
    parser.add_argument("--once", action="store_true", help="show the present state and exit, as --json does")


def top(config: RunConfig, args: argparse.Namespace) -> int:
    """Show the run until interrupted, or once."""
    clients.check_broker(config.kafka)
    group = config.labeling.group_id(config.run)
    patience_s = config.supervisor.step_patience_s
    following = RunObserver(
        config.kafka, config.run, keep=NEWEST, logged=False, labeling_group=group, step_patience_s=patience_s
    )
    with closing(following) as observer:
        if args.json or args.once:
            observer.catch_up(
                _history_progress(observer, lambda s: print(_history(s), file=sys.stderr, flush=True), LINE_S)
            )
            snapshot = observer.snapshot(NEWEST)
            if args.json:
                print(compact(snapshot.as_dict()))
            else:
                console = Console()
                console.print(frame(snapshot, console.width, _ALL_LINES))
            tell(observer.skipped)
        elif sys.stdout.isatty():
            follow(observer, Console())
        else:
            _print_lines(observer)
    return 0


def follow(observer: RunObserver, console: Console) -> None:
    """Show the run on the terminal's alternate screen until interrupted, and then restore the terminal."""

    def restore() -> None:
        console.set_alt_screen(False)
        console.show_cursor(True)

    interruption.last_acts.append(restore)
    try:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while True:
                live.update(frame(observer.snapshot(NEWEST), console.width, console.height), refresh=True)
                _read_for(observer, _FRAME_S)
    finally:
        restore()  # `Live` does not restore the terminal if it is interrupted while it starts
        interruption.last_acts.remove(restore)


def _print_lines(observer: RunObserver) -> None:
    """Print a line every few seconds until interrupted."""
    observer.catch_up(_history_progress(observer, lambda s: print(line(s), flush=True), 0.0))
    while True:
        print(line(observer.snapshot(NEWEST)), flush=True)
        _read_for(observer, LINE_S)


def _history_progress(observer: RunObserver, show: Callable[[RunSnapshot], None], first_s: float) -> Callable[[], None]:
    """Return a callback that, while history is read, shows a snapshot every few seconds, the first after `first_s`."""
    due = time.monotonic() + first_s

    def tell() -> None:
        nonlocal due
        if time.monotonic() >= due and observer.history_left:
            show(observer.snapshot(NEWEST))
            due = time.monotonic() + LINE_S

    return tell


def _read_for(observer: RunObserver, seconds: float) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        observer.poll(min(left, 0.2))


# ---------------------------------------------------------------------- what is shown


def line(s: RunSnapshot) -> str:
    """Return the state of a run in one line."""
    return (
        (f"{_history(s)}  " if s.history_left else "")
        + f"step {s.step}  version {s.policy_version}  rollouts {s.rollouts:,} ({_rate(s.rollouts_per_s)})  "
        f"reward {s.reward:.3f}  success {s.success:.3f}  batches {s.batches:,} ({s.waiting:,} waiting)  "
        f"in flight {s.in_flight:,}  unread {s.unread:,}  dropped {sum(s.dropped.values()):,}"
        + (f"  {s.waiting_for_labels:,} wait for labels" if s.waiting_for_labels else "")
        + (f"  quiet for {_duration(s.quiet_s)}" if s.quiet else "")
        + (f"  {s.records_skipped:,} records unreadable" if s.records_skipped else "")
        + (f"  {_paused(s)}" if s.paused or s.paused_environments else "")
        + (f"  {_configuration(s)}" if s.configuration else "")
        + (f"  stalled at {s.stalled_stage}: {s.stalled}" if s.stalled else "")
    )


def _configuration(s: RunSnapshot) -> str:
    """Return the grouping configuration in force, in one line."""
    return printable(s.configuration.text, keep="") if s.configuration else ""


def _paused(s: RunSnapshot) -> str:
    names = (*map(str, s.paused), *(printable(name, keep="") for name in s.paused_environments))
    return f"paused: {', '.join(names)}"


def _history(s: RunSnapshot) -> str:
    return f"reading history, {100 * (s.history - s.history_left) // s.history} %"


def frame(s: RunSnapshot, width: int, height: int = LINES) -> Group:
    """Return the state of a run for a screen of 80 columns or more: 20 lines, and below them the tables of the run's
    components, as far as `height` leaves room."""
    width = min(max(width, _LEAST_WIDTH), _MOST_WIDTH)
    inner = width - 4
    half = width // 2
    middle, bottom = Table.grid(), Table.grid()
    for grid in (middle, bottom):
        grid.add_column(width=half)
        grid.add_column(width=width - half)
    middle.add_row(
        _panel("rewards of rollouts produced", _rewards(s, half - 4)),
        _panel("versions behind, when trained on", _staleness(s, width - half - 4)),
    )
    books = f"where records are, {s.records_skipped:,} unreadable" if s.records_skipped else "where records are"
    books = f"{books}, {_paused(s)}" if s.paused or s.paused_environments else books
    bottom.add_row(_panel(books, _books(s, half - 4)), _panel("dropped", _drops(s, width - half - 4)))
    tables = component_lines(s.components, height - LINES)
    components = [Text("\n".join(line.ljust(width) for line in tables), no_wrap=True)] if tables else []
    stalled = printable(f"stalled at {s.stalled_stage}: {s.stalled}", keep="")[:inner] if s.stalled else ""
    return Group(
        _header(s, width),
        _panel(stalled, _flow(s, inner), width, below=_configuration(s)[:inner]),
        middle,
        bottom,
        *components,
    )


def _header(s: RunSnapshot, width: int) -> Text:
    state = _history(s) if s.history_left else f"quiet for {_duration(s.quiet_s)}" if s.quiet else "live"
    right = f"{_duration(s.seconds)} of records, {state} "
    name = f" {s.run}"[: width - len(right) - 1]
    text = Text(name + right.rjust(width - len(name)), no_wrap=True)
    text.stylize("bold", 0, len(name))
    text.stylize("yellow" if s.quiet or s.history_left else "green", width - len(state) - 1)
    return text


def _panel(title: str, lines: Iterable[str], width: int | None = None, below: str = "") -> Panel:
    text = Text("\n".join(lines), no_wrap=True, overflow="crop")
    text.highlight_words(_NODES if not title else (), "bold cyan")
    text.highlight_regex(r"[▁▂▃▄▅▆▇█]+", "green")
    return Panel(
        text,
        title=Text(title) if title else None,
        title_align="left",
        subtitle=Text(below) if below else None,
        subtitle_align="left",
        width=width,
        border_style="dim",
    )


def _flow(s: RunSnapshot, width: int) -> list[str]:
    """Return a diagram of the loop, with rates on the edges and totals below the nodes."""
    forward, columns = _chain(
        ("envs", "rollouts", "grouping", "batches"),
        (_rate(s.rollouts_per_s), _rate(s.read_per_s), _rate(s.batches_per_s)),
        width,
        "{}▶",
    )
    behind = max(0, s.policy_version - s.sampled_version)
    served = "no rollouts yet" if s.sampled_version < 0 else f"samples version {_count(s.sampled_version)}"
    version = "none yet" if s.policy_version < 0 else f"version {_count(s.policy_version)}"
    age = f", {_duration(s.policy_age_s)} ago" if s.policy_age_s else ""
    back, below = _chain(
        ("inference", "weights", "learner"),
        (f"{_count(behind)} behind", _rate(s.policies_per_s)),
        width,
        "◀{}",
    )
    produced, held = f"{_count(s.produced)}, {_count(s.unread)} unread", f"{_count(s.in_flight)} in flight"
    return [
        forward,
        _put(width, zip([*columns[1:3], width], (produced, held, _count(s.batches)), strict=True)),
        _put(
            width,
            (
                (columns[0] + 1, "▲"),
                *(
                    [(columns[0] + 4, f"{_count(s.waiting_for_labels)} wait for labels")]
                    if s.waiting_for_labels
                    else []
                ),
                (width, f"{_count(s.waiting)} waiting, {_rate(s.steps_per_s)} steps ▼"),
            ),
        ),
        back,
        _put(width, zip([*below[:2], width], (served, version + age, f"step {_count(s.step)}"), strict=True)),
    ]


def _chain(nodes: Sequence[str], labels: Sequence[str], width: int, arrow: str) -> tuple[str, list[int]]:
    """Return nodes with labeled arrows between them, `width` wide, and the column of each node."""
    room = width - sum(map(len, nodes))
    text, columns = "", []
    for i, (node, label) in enumerate(zip(nodes, labels, strict=False)):
        columns.append(len(text))
        edge = room * (i + 1) // len(labels) - room * i // len(labels)
        text += f"{node} {arrow.format(f' {label} '.center(edge - 3, '─'))} "
    return text + nodes[-1], [*columns, len(text)]


def _put(width: int, parts: Iterable[tuple[int, str]]) -> str:
    """Return texts at their columns, moved to the left if they would pass the right margin."""
    text = ""
    for column, part in parts:
        start = max(min(column, width - len(part)), len(text) + 1 if text else 0)
        text = text.ljust(start) + part
    return text[:width]


def _rewards(s: RunSnapshot, width: int) -> list[str]:
    return [
        f"reward  {s.reward:.3f}",
        sparkline(s.rewards, width),
        f"success  {s.success:.3f}",
        sparkline(s.successes, width),
    ]


def sparkline(values: Sequence[float], width: int, least: float = 0.0, most: float = 1.0) -> str:
    """Return a character for each of the newest values that fit; values beyond the bounds widen the scale."""
    values = [min(max(value, -_FAR), _FAR) if value == value else 0.0 for value in values[-width:]]
    least, most = min((least, *values)), max((most, *values))
    return "".join(_SPARKS[round((value - least) / (most - least) * (len(_SPARKS) - 1))] for value in values)


def _staleness(s: RunSnapshot, width: int) -> list[str]:
    """Return bars for the smallest policy lags, and one for all larger lags."""
    lags = {lag: s.staleness.get(lag, 0) for lag in range(_ROWS - 1)}
    rest = sum(s.staleness.values()) - sum(lags.values())
    rows = [*((str(lag), rollouts) for lag, rollouts in lags.items()), (f"{_ROWS - 1}+", rest)]
    return _bars(rows, width) if s.staleness else ["nothing trained on yet", *[""] * (_ROWS - 1)]


def _drops(s: RunSnapshot, width: int) -> list[str]:
    """Return bars for the most frequent reasons, and one for all other reasons."""
    drops = sorted(s.dropped.items(), key=lambda item: (-item[1], item[0]))
    rows = [(printable(reason.replace("_", " "), keep=""), count) for reason, count in drops]
    if len(rows) > _ROWS:
        rows[_ROWS - 1 :] = [("others", sum(count for _reason, count in rows[_ROWS - 1 :]))]
    lines = _bars(rows, width) if rows else ["nothing"]
    return lines + [""] * (_ROWS - len(lines))


def _bars(rows: Sequence[tuple[str, int]], width: int) -> list[str]:
    names, counts = (max(map(len, column)) for column in zip(*((n, _count(c)) for n, c in rows), strict=True))
    room = width - names - counts - 2
    most = max((count for _name, count in rows), default=0) or 1
    return [
        f"{name:{names}} {'█' * round(count / most * room):{room}} {_count(count):>{counts}}" for name, count in rows
    ]


def _books(s: RunSnapshot, width: int) -> list[str]:
    """Return the fates of records, as counted by the journal and the steps."""
    pairs: Mapping[str, tuple[int, str, int]] = {
        "produced": (s.produced, "unread", s.unread),
        "batched": (s.batched, "in flight", s.in_flight),
        "trained": (s.trained, "dead letters", s.dead_lettered),
        "skipped": (s.skipped, "control", s.control),
    }
    left = (width - 2) // 2
    right = width - 2 - left
    return [
        f"{name}{_count(count):>{left - len(name)}}  {other}{_count(another):>{right - len(other)}}"
        for name, (count, other, another) in pairs.items()
    ]


# ---------------------------------------------------------------------- numbers


def _count(number: int) -> str:
    """Format a count in about six characters, however large it is."""
    if abs(number) < 1_000_000:
        return f"{number:,}"
    size = abs(number)
    power = next((power for power in range(2, 6) if size < 1000 ** (power + 1)), 6)
    return f"{number / 1000**power:.1f}{'MGTPE'[power - 2]}"


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}/s" if per_s >= 100 else f"{per_s:.1f}/s"


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
