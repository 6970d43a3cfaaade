"""`python -m rollstream.infra.image build`: builds the image; loads it into the Docker engine or writes it."""

import argparse
import sys
from pathlib import Path

from rollstream.infra.image.build import TAG, build
from rollstream.topics.errors import RollstreamError


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m rollstream.infra.image", description=__doc__)
    actions = parser.add_subparsers(dest="action", metavar="COMMAND", required=True)
    action = actions.add_parser("build", help="build the image of this machine's Java and Kafka's jars")
    action.add_argument("--tag", default=TAG, help="name of the image (default: %(default)s)")
    action.add_argument("--output", type=Path, metavar="FILE", help="write an archive for `docker load` instead")
    args = parser.parse_args()
    try:
        print(build(args.tag, args.output))
    except RollstreamError as error:
        print(f"python -m rollstream.infra.image: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
