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
        (b"[" * 100_000, "invalid JSON"),
        (b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}', "integer `-1`"),
        (b'{"a":{"dtype":"F32","shape":[20],"data_offsets":[0,80]}}', "not fully covered"),
        (b'{"a":{"dtype":"I8","shape":[64],"data_offsets":[0,64]}}', "a is I8, not one of F64, F32, F16, BF16"),
    ],
)
def test_what_is_wrong_is_named(header: bytes, why: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointRefused, match=why):
        safetensors_files.read(write(tmp_path / "evil.safetensors", header))


def test_views_are_the_bytes_of_their_tensors(tmp_path: Path) -> None:
    tensors = {"b": ("F32", [2, 3], [0, 24]), "none": ("F16", [0, 4], [24, 24]), "a": ("BF16", [5, 4], [24, 64])}
    header = {
        name: dict(zip(("dtype", "shape", "data_offsets"), entry, strict=True)) for name, entry in tensors.items()
    }
    views = safetensors_files.read(write(tmp_path / "model.safetensors", json.dumps(header).encode()))
    assert {name: (view.shape, view.tobytes()) for name, view in views.items()} == {
        name: (tuple(shape), BODY[begin:end]) for name, (_dtype, shape, (begin, end)) in tensors.items()
    }
