"""`rollstream ledger` and `rollstream verify`: what can be asked of a run, live or over, from its topics alone.

Exit code 0 when the answer is yes, 1 when it is no.
"""

import argparse
import json

from pipeline.config import RunConfig
from pipeline.report import ledger_text, verification_text


def show_ledger(config: RunConfig, args: argparse.Namespace) -> int:
    """Print the ledger; 1 when it does not balance."""
    from pipeline.ledger import ledger

    book = ledger(config.kafka, config.run).as_dict()
    print(json.dumps(book) if args.json else ledger_text(book))
    return 0 if book["balanced"] else 1


def show_verification(config: RunConfig, args: argparse.Namespace) -> int:
    """Compute every batch again and print what differs; 1 when one does."""
    from pipeline.verify import verify

    found = verify(config.kafka, config.run, config.grouper.makers).as_dict()
    print(json.dumps(found) if args.json else verification_text(found))
    return 0 if not found["mismatches"] else 1
