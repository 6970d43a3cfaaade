"""`rollstream completion`: prints the script with which a shell completes commands and flags."""

import argparse

from argcomplete.shell_integration import shellcode


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream completion`."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
    parser.set_defaults(run=_show_completion)


def _show_completion(args: argparse.Namespace) -> int:
    print(shellcode(["rollstream"], shell=args.shell))
    return 0
