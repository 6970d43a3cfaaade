"""Memory that was freed between blocks in use is returned to the system, if the C library would keep it."""

import json
import os
import platform
import subprocess
import sys

import pytest

from rollstream.consumers.freed_memory import MALLOC_SETTINGS
from tests.support.paths import ROOT

# Run in a process of its own, because memory that earlier tests left in this one would count, too.
FRAGMENTED = """
import json
from rollstream.consumers.freed_memory import FreedMemory, resident_bytes

{first}
small, large = FreedMemory(10_000_000), FreedMemory(2**40)
blocks = [{block} for _ in range(50_000)]
full = resident_bytes()
# One block in a hundred stays: no heap can shrink at its end.
blocks = blocks[::100]
kept = resident_bytes()
large_did, small_did, after = large.give_back(), small.give_back(), resident_bytes()
again = small.give_back()
print(json.dumps([full, kept, after, large_did, small_did, again]))
"""


@pytest.mark.parametrize(
    ("first", "block"),
    [
        ("", "bytes(4_000)"),
        (
            "import pyarrow as pa; from rollstream.consumers.freed_memory import use_c_library_for_arrow as use; use()",
            "pa.array(range(500), pa.int64())",
        ),
    ],
    ids=["python", "arrow"],
)
@pytest.mark.long
def test_freed_memory_goes_back_once_the_process_has_grown(first: str, block: str) -> None:
    script = FRAGMENTED.format(first=first, block=block)
    answer = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    full, kept, after, large_did, small_did, again = json.loads(answer.stdout)
    assert not large_did, "it has not grown by a tebibyte"
    if platform.libc_ver()[0] != "glibc":
        assert not small_did
        return
    assert full - kept < 50_000_000, "the C library keeps what lies between blocks that stay"
    assert small_did
    assert kept - after > 150_000_000
    assert not again, "it has not grown since"


REUSED = """
import json, os, resource, sys
from rollstream.consumers.freed_memory import reuse_freed_memory

def faults(of_kib):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(200):
        bytes(bytearray(of_kib * 1024))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults(200)
before, did = faults(200), reuse_freed_memory()
faults(200)
print(json.dumps([before, did, faults(200), os.environ.get("ARROW_DEFAULT_MEMORY_POOL")]))
"""


@pytest.mark.parametrize(
    "variables", [{}, {"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}]
)
def test_arrays_reuse_the_pages_of_freed_ones_unless_the_environment_says_how_to_allocate(
    variables: dict[str, str],
) -> None:
    told = {*MALLOC_SETTINGS, "ARROW_DEFAULT_MEMORY_POOL"}
    environment = {name: value for name, value in os.environ.items() if name not in told}
    command = [sys.executable, "-c", REUSED]
    answer = subprocess.run(command, cwd=ROOT, env=environment | variables, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    before, did, after, pool = json.loads(answer.stdout)
    assert did == (not variables and platform.libc_ver()[0] == "glibc")
    assert pool == ("system" if did else None)
    if did:
        assert before > 200 * 40 > 1000 > after
