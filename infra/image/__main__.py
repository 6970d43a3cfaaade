"""`python -m rollstream.infra.image`: builds images, for a Docker engine or as files, and bills of materials."""

import argparse
import logging
import sys
from pathlib import Path

from rollstream.infra.image.bill_of_materials import bill_of_materials
from rollstream.infra.image.build import (
    APPLICATION_TAG,
    EXTRAS,
    PYTHON_TAG,
    TAG,
    build,
    build_application,
    build_python,
)
from rollstream.infra.image.distributions import needed_distributions
from rollstream.topics.errors import RollstreamError

_TAGS = {"kafka": TAG, "python": PYTHON_TAG, "rollstream": APPLICATION_TAG}


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m rollstream.infra.image", description=__doc__)
    actions = parser.add_subparsers(dest="action", metavar="COMMAND", required=True)
    action = actions.add_parser("build", help="build an image from this machine's files")
    action.add_argument(
        "image",
        nargs="?",
        choices=sorted(_TAGS),
        default="kafka",
        help="kafka: a broker, from this machine's Java and Kafka's jars; rollstream: every role, from this Python and "
        "its packages; python: a base for infra/image/Dockerfile if no registry is reachable (default: %(default)s)",
    )
    action.add_argument("--tag", help=f"name of the image (default: {', '.join(_TAGS.values())})")
    action.add_argument("--output", type=Path, metavar="FILE", help="write an archive for `docker load` instead")
    action.add_argument(
        "--extras", default=",".join(EXTRAS), help="extras in the image of rollstream (default: %(default)s)"
    )
    bill = actions.add_parser("bill", help="print the bill of materials of the installed packages, as CycloneDX")
    bill.add_argument("--extras", default=",".join(EXTRAS), help="extras of rollstream (default: %(default)s)")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        print(_bill(args) if args.action == "bill" else _build(args))
    except RollstreamError as error:
        print(f"python -m rollstream.infra.image: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _bill(args: argparse.Namespace) -> str:
    return bill_of_materials(needed_distributions(_extras(args))).decode()


def _build(args: argparse.Namespace) -> str:
    tag = args.tag or _TAGS[args.image]
    if args.image == "kafka":
        return build(tag, args.output)
    if args.image == "python":
        return build_python(tag, args.output)
    return build_application(tag, args.output, _extras(args))


def _extras(args: argparse.Namespace) -> list[str]:
    return [name for name in args.extras.split(",") if name]


if __name__ == "__main__":
    sys.exit(main())
