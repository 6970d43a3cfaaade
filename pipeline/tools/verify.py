"""`rollstream verify`: recomputes batches from the log and compares them bit for bit.

Exit code 0 if all are equal, 1 if one differs, or if a batch that was named cannot be verified.
"""

import argparse
import os
import random

from rollstream.pipeline.audit.texts import verification_text
from rollstream.pipeline.audit.verification import index_of, verify
from rollstream.pipeline.command_line.command_parser import positive_count, set_handler
from rollstream.pipeline.command_line.plain_values import compact, tell
from rollstream.pipeline.command_line.progress_bar import progress
from rollstream.pipeline.config import RunConfig
from rollstream.topics.errors import ConfigurationError


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream verify`."""
    set_handler(parser, show_verification, example="rollstream verify --run main --last 20", json=True)
    parser.add_argument("batch", nargs="*", metavar="BATCH", help="verify only these batches")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="every batch and every drop (the default)")
    which.add_argument("--sample", type=positive_count, metavar="N", help="N batches drawn at random")
    which.add_argument("--last", type=positive_count, metavar="N", help="the newest N batches")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of --sample (default: %(default)s)")


def show_verification(config: RunConfig, args: argparse.Namespace) -> int:
    """Compute batches again and print the differences; return 1 if there are any or a named batch is unverifiable."""
    if args.batch and (args.all or args.last is not None or args.sample is not None):
        raise ConfigurationError(
            "batches are named, and --all, --last or --sample is given, too; use only one of these"
        )
    only = list(args.batch) or None
    if args.last is not None or args.sample is not None:
        names = list(index_of(config.kafka, config.run))
        only = names[-args.last :] if args.last is not None else _sample(names, args.sample, args.seed)
    with progress("batches") as show:
        verification = verify(
            config.kafka,
            config.run,
            config.grouper.makers,
            estimators=config.grouper.estimators,
            only=only,
            processes=os.cpu_count() or 1,
            progress=show,
        )
    result = verification.as_dict()
    text = verification_text(result)
    if result["unverifiable"]:
        text += f"\n{result['unverifiable']:,} batches are not verifiable: the log lacks their rollouts or journal"
    print(compact(result) if args.json else text)
    tell(verification.skipped)
    return 0 if not result["mismatches"] and not (args.batch and result["unverifiable"]) else 1


def _sample(names: list[str], count: int, seed: int) -> list[str]:
    return random.Random(seed).sample(names, min(count, len(names)))
