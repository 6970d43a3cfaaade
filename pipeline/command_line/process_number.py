"""The flag for the number of a process of a role: a number, or `auto` for the number at the end of the host's name.

Each pod of a Kubernetes StatefulSet has such a name, e.g. run-group-3, and keeps it across restarts.
"""

import argparse
import re
import socket

AUTO = "auto"
_AT_THE_END = re.compile(r".*-(\d+)")


def add_number(parser: argparse.ArgumentParser, what: str, flag: str = "--ordinal") -> None:
    """Add the flag to the parser of a role; `what` names the process in the help text."""
    parser.add_argument(
        flag,
        type=number,
        default=0,
        metavar="N",
        help=f"number of this {what}, from 0; auto: the one at the end of the host's name, as in run-group-3 "
        "(default: 0)",
    )


def number(text: str) -> int:
    """Return the number given by the flag's value. Raises ArgumentTypeError if it is neither a number nor `auto`."""
    if text == AUTO:
        return number_of_host(socket.gethostname())
    if not re.fullmatch("[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a process; give 0, 1, ... or {AUTO}")
    return int(text)


def number_of_host(host: str) -> int:
    """Return the number after the last `-` of a host's name without its domain.

    The `-` is required, because the names of Docker's containers are hexadecimal and often end in digits.
    """
    match = _AT_THE_END.fullmatch(host.partition(".")[0])
    if match is None:
        raise argparse.ArgumentTypeError(
            f"the host's name {host!r} does not end in - and a number, as names of a StatefulSet's pods do; give the "
            "number itself"
        )
    return int(match[1])
