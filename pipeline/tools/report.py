"""`rollstream report`: writes one HTML file that shows the course of a run, and how to verify each claim."""

import argparse
from pathlib import Path

from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.report.document import document
from rollstream.pipeline.report.run_facts import facts_of
from rollstream.topics.files.atomic_files import write_bytes


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream report`."""
    set_handler(parser, show_report, example="rollstream report --run main -o report.html")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE.html", help="the file (default: report.html in the run's directory)"
    )
    parser.add_argument("--archive", default="", metavar="ARCHIVE", help="read an archive instead of the topics")


def show_report(config: RunConfig, args: argparse.Namespace) -> int:
    """Write the report and print its path."""
    print(write_report(config, args.output, args.archive))
    return 0


def write_report(config: RunConfig, output: Path | None = None, archive: str = "") -> Path:
    """Write the report of a run as it is now, and return its path."""
    path = output or config.run_dir / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, document(facts_of(config, archive)).encode())
    return path
