"""Ends a child process when the process that started this keeper ends, even by kill -9.

Run as a script: `child_keeper.py '<json>'`. Only the starting process holds the other end of the keeper's standard
input, so end of file means that the starting process has ended. The keeper prints the child's pid and exits with the
child's status. It needs the standard library only.
"""

import json
import os
import subprocess
import sys
import threading
from typing import Any


def main() -> int:
    """Start the child described by the task, end it when standard input closes, and return its exit status."""
    task: dict[str, Any] = json.loads(sys.argv[1])
    with open(task["log"], "ab") as log:
        child = subprocess.Popen(
            task["command"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=task["cwd"], start_new_session=True
        )
    threading.Thread(target=_end_with_parent, args=(child, task), daemon=True).start()
    try:
        os.write(sys.stdout.fileno(), b"%d\n" % child.pid)
    except BrokenPipeError:
        # The parent died before it read the pid; the thread sees the end of file and ends the child.
        child.terminate()
    return child.wait()


def _end_with_parent(child: subprocess.Popen[bytes], task: dict[str, Any]) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    child.terminate()
    try:
        child.wait(task["stop_timeout_s"])
    except subprocess.TimeoutExpired:
        try:
            if task["kill_command"]:
                subprocess.run(task["kill_command"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=30)
        finally:
            # Also if the command fails or hangs, because this keeper ends only after the child.
            child.kill()


if __name__ == "__main__":
    sys.exit(main())
