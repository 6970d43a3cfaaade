"""Safetensors files of unknown origin are read as views within the file, or refused with one kind of error."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.files import safetensors_files
from rollstream.consumers.files.safetensors_files import CheckpointRefused

BODY = bytes(range(64))
NUMBERS = st.one_of(st.integers(-5, 70), st.sampled_from([2**63, 2**70, -(2**70), 1.0, 0.5, True, None, "1"]))
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F64", "I8", "", 7, None]),
        "shape": st.lists(NUMBERS, max_size=4) | NUMBERS,
        "data_offsets": st.lists(NUMBERS, min_size=1, max_size=3) | NUMBERS,
    }
)
HEADERS = st.one_of(st.dictionaries(st.text(max_size=3), ENTRIES, max_size=3), st.lists(ENTRIES), NUMBERS)


def write(path: Path, header: bytes) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + BODY)
    return path


@given(HEADERS)
def test_no_header_gives_more_than_the_bytes_of_its_tensors(
    tmp_path_factory: pytest.TempPathFactory, header: object
) -> None:
    path = write(tmp_path_factory.getbasetemp() / "any.safetensors", json.dumps(header).encode())
    try:
        tensors = safetensors_files.read(path)
    except CheckpointRefused:
        return
    assert isinstance(header, dict)
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            assert 0 <= begin <= end <= len(BODY)
            assert tensors[name].tobytes() == BODY[begin:end]


@given(st.binary(max_size=40))
def test_any_bytes_are_a_file_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.safetensors"
    path.write_bytes(data)
    with contextlib.suppress(CheckpointRefused):
        assert safetensors_files.read(path) == {}


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (b"[" * 100_000, "recursion"),
        (b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}', "lies at 0 to -4"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', "has 4 bytes"),
        (b'{"a":{"dtype":"F32","shape":[20],"data_offsets":[0,80]}}', "lies at 0 to 80 of 64 bytes"),
    ],
)
def test_what_is_wrong_is_named(header: bytes, why: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointRefused, match=why):
        safetensors_files.read(write(tmp_path / "evil.safetensors", header))
