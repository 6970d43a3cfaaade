"""Tools that watch a run with a history say how much of it is still to be read."""

import os
import pty
import re
import signal
import subprocess
import time

from tests.model.test_top import watched_run  # noqa: F401
from tests.support.runs import RealRun

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def test_a_terminal_shows_it_until_it_is_read(run: RealRun) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(run.command("top"), stdout=theirs, stderr=theirs, cwd=os.getcwd()) as process:
        os.close(theirs)
        shown, deadline = "", time.monotonic() + 60
        while not re.search(r"of records, (live|quiet)", shown) and time.monotonic() < deadline:
            shown = COLOUR.sub("", shown + os.read(ours, 65536).decode(errors="replace"))
        process.send_signal(signal.SIGINT)
        os.close(ours)
    assert re.findall(r"of records, (reading history, 0 %|live|quiet)", shown)[0] == "reading history, 0 %"
    assert re.search(r"of records, (live|quiet)", shown)
