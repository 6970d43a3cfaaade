"""Keeps a child process no longer than the process that asked for it, however that one ends, kill -9 included.

Run as a script: `keeper.py '<json>'`. Its standard input is a pipe whose other end only the asking process holds: end
of file means that one is gone. Prints the child's pid, exits with the child's status. Needs the standard library alone.
"""

import json
import os
import subprocess
import sys
import threading
from typing import Any


def main() -> int:
    """Start the child named by the task, end it when standard input closes, and return its exit status."""
    task: dict[str, Any] = json.loads(sys.argv[1])
    with open(task["log"], "ab") as log:
        child = subprocess.Popen(
            task["command"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=task["cwd"], start_new_session=True
        )
    threading.Thread(target=_end_with_asker, args=(child, task), daemon=True).start()
    try:
        os.write(sys.stdout.fileno(), b"%d\n" % child.pid)
    except BrokenPipeError:
        # The asker died before it could listen; the thread sees the end of file and ends the child.
        child.terminate()
    return child.wait()


def _end_with_asker(child: subprocess.Popen[bytes], task: dict[str, Any]) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    child.terminate()
    try:
        child.wait(task["stop_timeout_s"])
    except subprocess.TimeoutExpired:
        if task["kill_command"]:
            subprocess.run(task["kill_command"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=30)
        child.kill()


if __name__ == "__main__":
    sys.exit(main())
