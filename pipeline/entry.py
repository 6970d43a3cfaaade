"""Where the command `rollstream` begins: Ctrl-C is answered for before anything slow is imported."""

import signal
import sys

from pipeline import interruption


def main() -> None:
    """Run one command and exit with its code."""
    interruption.take_over()
    try:
        from pipeline.cli import main as run

        code = run()
    except BaseException:
        # Whatever the interruption became on its way: the import system wraps it, a library may hide it.
        if not interruption.received():
            raise
    if interruption.received():
        interruption.end()
    # What Ctrl-C ends from here on has answered already.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)
