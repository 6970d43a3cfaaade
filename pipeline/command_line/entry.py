"""Entry point of the command `rollstream`: handles Ctrl-C before anything slow is imported."""

import signal
import sys

from rollstream.pipeline.process import interruption


def main() -> None:
    """Run one command and exit with its code."""
    try:
        interruption.take_over()
        from rollstream.pipeline.command_line.cli import main as run
        from rollstream.pipeline.process.orphans import leave_exit_code

        code = run()
        leave_exit_code(code)
    except BaseException:
        # The interruption may arrive as another exception, because the import system wraps it or a library hides it.
        if not interruption.received():
            raise
    if interruption.received():
        interruption.end()
    # The command is done: from here on Ctrl-C simply ends the process.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)
