"""`rollstream sql`: runs one query over an archive and prints a table, JSON or CSV, or draws two columns."""

import argparse
import csv
import io
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from rollstream.consumers.archive.sql import VIEWS, QueryResult, queried_type, query, times_of
from rollstream.consumers.archive.tables import SCHEMAS
from rollstream.pipeline.command_line.command_parser import Runs, set_handler
from rollstream.pipeline.command_line.plain_values import compact
from rollstream.pipeline.command_line.text_tables import printable, table
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.tools.archive import place_of
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.files.stores import open_store

_MOST_BARS = 40


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream sql`."""
    set_handler(parser, show_sql, example="rollstream sql 'select * from drops_by_reason'", json=True, run_action=Runs)
    parser.add_argument("query", nargs="?", metavar="QUERY", help="one SELECT statement")
    parser.add_argument(
        "--archive", metavar="ARCHIVE", help="a directory, or a URL that fsspec supports (default: archive in data_dir)"
    )
    parser.add_argument("--csv", action="store_true", help="print CSV")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw two columns: as a line, or as bars if the first is text"
    )


def show_sql(config: RunConfig, args: argparse.Namespace) -> int:
    """Print the result of the query, or the tables if there is no query."""
    if args.query is None:
        show_tables(args.json)
        return 0
    if args.csv and args.json:
        raise ConfigurationError("--json and --csv cannot be combined; give one of them")
    answer = query(open_store(place_of(config, args.archive)), args.query, getattr(args, "runs", None))
    if args.json:
        _refuse_repeated(answer.columns)
    if args.plot is not None:
        plot(answer, args.plot)
    if args.json:
        print(compact([dict(zip(answer.columns, map(_plain, row), strict=True)) for row in answer.rows]))
    elif args.csv:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(answer.columns)
        writer.writerows(answer.rows)
        sys.stdout.write(printable(text.getvalue()) if sys.stdout.isatty() else text.getvalue())
    else:
        print(table(answer.columns, [tuple(map(_shown, row)) for row in answer.rows]))
    return 0


def _refuse_repeated(columns: Sequence[str]) -> None:
    """Raise ConfigurationError if two columns have the same name: an object of JSON has each name once."""
    repeated = [name for name, count in Counter(columns).items() if count > 1]
    if repeated:
        raise ConfigurationError(
            f"--json needs different names of columns, but several columns have the name {', '.join(repeated)}; give "
            f"each a name of its own with `as`, or use --csv"
        )


def show_tables(as_json: bool) -> None:
    """Print the tables with their columns, and the views."""
    tables = {
        name: [
            *(f"{f.name} {queried_type(f.type)}" for f in schema),
            *(f"{column} timestamp with time zone" for column in times_of(name).values()),
        ]
        for name, schema in SCHEMAS.items()
    }
    views = {name: about for name, (about, _text) in VIEWS.items()}
    if as_json:
        print(json.dumps({"tables": tables, "views": views}))
        return
    for name in tables:
        print(f"{name}: {', '.join([*SCHEMAS[name].names, *times_of(name).values()])}\n")
    print("views:\n" + "\n".join(f"{name}: {about}" for name, about in views.items()))


def _plain(value: Any) -> Any:
    """Convert a value to a plain value for JSON."""
    if isinstance(value, Decimal):
        return float(value) if value.as_tuple().exponent else int(value)  # A sum of integers has no decimal places.
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, date | datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _shown(value: Any) -> Any:
    """Convert a value to a table cell: numbers stay, other values become text."""
    plain = _plain(value)
    if plain is None or isinstance(plain, bool | int | float | str):
        return "" if plain is None else plain
    return json.dumps(plain, ensure_ascii=False)


def plot(answer: QueryResult, path: Path) -> None:
    """Draw two columns: bars if the first column is text, a line if it has numbers or times; rows without a value in it
    are no points of a line. Rows that are not drawn are counted on stderr.

    Raises ConfigurationError if matplotlib is missing or the columns cannot be drawn.
    """
    if len(answer.columns) != 2 or not answer.rows:
        raise ConfigurationError(
            f"--plot needs two columns and rows; got {len(answer.rows)} rows of {', '.join(answer.columns)}"
        )
    xs: Sequence[Any] = [row[0] for row in answer.rows]
    ys = [_plain(row[1]) for row in answer.rows]
    if not all(isinstance(y, int | float) or y is None for y in ys):
        raise ConfigurationError(f"--plot needs numbers in the second column; {answer.columns[1]} has other values")
    bars = any(isinstance(x, str) for x in xs)
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if x is not None]
    if not bars and not (points and all(isinstance(x, int | float | Decimal | date) for x, _y in points)):
        raise ConfigurationError(
            f"--plot needs text, numbers or times in the first column; {answer.columns[0]} has other values, or none; "
            "convert it, e.g. with cast(... as text)"
        )
    if path.suffix.lower() != ".png":
        raise ConfigurationError(f"--plot writes PNG; the name of {path} must end in .png")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError('--plot needs matplotlib: pip install "rollstream[sql]"') from error
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if bars:
        xs, ys = ["" if x is None else x for x in xs[:_MOST_BARS]], ys[:_MOST_BARS]
        axes.bar(range(len(xs)), [0 if y is None else y for y in ys])
        axes.set_xticks(range(len(xs)), xs, rotation=30, ha="right")
        drawn = len(xs)
    else:
        points.sort(key=lambda point: point[0])
        axes.plot([x for x, _y in points], [float("nan") if y is None else y for _x, y in points], marker=".")
        drawn = len(points)
    axes.set_xlabel(answer.columns[0])
    axes.set_ylabel(answer.columns[1])
    axes.grid(alpha=0.3)
    figure.savefig(path, format="png")
    if drawn < len(answer.rows):
        reason = f"at most {_MOST_BARS} bars are drawn" if bars else f"the others have no {answer.columns[0]}"
        print(f"{path} shows {drawn:,} of {len(answer.rows):,} rows: {reason}", file=sys.stderr)
