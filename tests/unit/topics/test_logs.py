"""The log of a process is one JSON object a line, also where a library warns."""

import json
import subprocess
import sys

WARNS = """
import logging, warnings
from rollstream.topics import logs
logs.setup()
logs.event(logging.getLogger("rollstream.x"), "begun", count=3)
warnings.warn("the cache\\ncannot be read")
"""


def test_events_and_warnings_of_libraries_are_one_json_object_a_line() -> None:
    done = subprocess.run([sys.executable, "-c", WARNS], capture_output=True, text=True, timeout=300, check=True)
    begun, warned = map(json.loads, done.stderr.splitlines())
    assert (begun["event"], begun["count"], begun["level"]) == ("begun", 3, "info")
    assert (warned["logger"], warned["level"]) == ("py.warnings", "warning")
    assert "the cache\ncannot be read" in warned["event"]
