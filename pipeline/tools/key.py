"""`rollstream key`: writes private keys for signing marks and rollouts, and shows their public keys."""

import argparse
from pathlib import Path

from rollstream.topics.wire.signatures import Signer, write_key


def register(parser: argparse.ArgumentParser) -> None:
    """Add the forms of `rollstream key`."""
    forms = parser.add_subparsers(dest="form", required=True, metavar="FORM")
    new = forms.add_parser("new", help="write a new private key into a file, and print its public key")
    new.set_defaults(run=_new)
    show = forms.add_parser("show", help="print the public key of a private key")
    show.set_defaults(run=_show)
    for form in (new, show):
        form.add_argument("key_file", metavar="FILE", help="the private key, in PEM")


def _new(args: argparse.Namespace) -> int:
    print(write_key(Path(args.key_file)))
    return 0


def _show(args: argparse.Namespace) -> int:
    print(Signer(f"file:{args.key_file}", "signing_key").public)
    return 0
