"""`rollstream ledger` and `rollstream verify`: what can be asked of a run, live or over, from its topics alone.

Exit code 0 when the answer is yes, 1 when it is no.
"""

import argparse
import json
import os
import random

from pipeline.config import RunConfig
from pipeline.report import ledger_text, verification_text


def show_ledger(config: RunConfig, args: argparse.Namespace) -> int:
    """Print the ledger; 1 when it does not balance."""
    from pipeline.ledger import ledger

    book = ledger(config.kafka, config.run).as_dict()
    print(json.dumps(book) if args.json else ledger_text(book))
    return 0 if book["balanced"] else 1


def show_verification(config: RunConfig, args: argparse.Namespace) -> int:
    """Compute batches again and print what differs; 1 when one does."""
    from pipeline.progress import progress
    from pipeline.verify import index_of, verify

    only = list(args.batch) or None
    if args.last is not None or args.sample is not None:
        names = list(index_of(config.kafka, config.run))
        only = names[-args.last :] if args.last is not None else _sample(names, args.sample, args.seed)
    with progress("batches") as show:
        found = verify(
            config.kafka, config.run, config.grouper.makers, only=only, processes=os.cpu_count() or 1, progress=show
        ).as_dict()
    print(json.dumps(found) if args.json else verification_text(found))
    return 0 if not found["mismatches"] else 1


def _sample(names: list[str], count: int, seed: int) -> list[str]:
    return random.Random(seed).sample(names, min(count, len(names)))
