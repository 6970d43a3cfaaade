"""Large arrays of rollouts lie in a store under the day and the digest of their bytes, and are checked when read."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollstream.consumers.grouping.testing import example_rollout
from rollstream.topics.config import ArraysConfig
from rollstream.topics.errors import ConfigurationError, DeliveryError, RecordError
from rollstream.topics.files import stored_arrays
from rollstream.topics.files.atomic_files import StoreError
from rollstream.topics.files.stored_arrays import ArrayMissing, LargeArrays, StoredArrays, day_name, day_of, names_in
from rollstream.topics.files.stores import LocalStore
from rollstream.topics.records import NamedArray, Rollout
from rollstream.topics.wire.codec import decode, encode
from rollstream.topics.wire.rl_examples import REFERENCE, WEIGHT_VERSION
from tests.support.pairs import driver

EXPERTS = NamedArray.of(np.arange(4 * 100, dtype="|u1").reshape(4, 100))
NAME = f"20261130/{'ab' * 32}"


def arrays_in(directory: Path) -> StoredArrays:
    return StoredArrays.of("main", ArraysConfig(url=str(directory)))


def sent(directory: Path, rollout: Rollout, above_bytes: int) -> Rollout:
    return LargeArrays("main", ArraysConfig(url=str(directory), above_bytes=above_bytes)).stored(rollout, 0.0)


def test_an_array_above_the_size_is_one_object_whoever_stores_it(tmp_path: Path) -> None:
    arrays = arrays_in(tmp_path)
    named = {"routed_experts": EXPERTS, "entropy": NamedArray.of(np.zeros(4, "<f4"))}
    first = sent(tmp_path, example_rollout("a", token_arrays=named), above_bytes=399)
    second = sent(tmp_path, example_rollout("b", token_arrays=named), above_bytes=399)
    stored = first.token_arrays["routed_experts"]
    assert (stored.data, stored.dtype, stored.shape) == (b"", "|u1", (4, 100))
    assert first.token_arrays == second.token_arrays
    assert first.token_arrays["entropy"] == named["entropy"]
    assert arrays.sizes() == {stored.stored: 400}
    assert arrays.load(stored) == EXPERTS
    with pytest.raises(RecordError, match=f"object {stored.stored}; read them with StoredArrays.load"):
        stored.array()
    assert decode(encode(first)).token_arrays == first.token_arrays


def test_small_arrays_and_those_that_rollstream_reads_stay_in_the_record(tmp_path: Path) -> None:
    small = example_rollout("a", token_arrays={"routed_experts": EXPERTS})
    assert sent(tmp_path, small, above_bytes=400) is small
    read = {REFERENCE: NamedArray.of(np.zeros(4, "<f4")), WEIGHT_VERSION: NamedArray.of(np.zeros(4, "<i8"))}
    kept = example_rollout("a", token_arrays=read)
    assert sent(tmp_path, kept, above_bytes=0) is kept
    assert LargeArrays("main", ArraysConfig(above_bytes=0)).stored(small, 0.0) is small
    assert not any(tmp_path.iterdir())


def test_missing_and_damaged_objects_are_told_from_a_store_that_is_not_mounted(tmp_path: Path) -> None:
    arrays = arrays_in(tmp_path)
    stored = arrays.put(EXPERTS)
    other = replace(stored, stored=NAME)
    with pytest.raises(ArrayMissing, match=f"main/arrays/{NAME} is missing"):
        arrays.load(other)
    with pytest.raises(ArrayMissing, match=r"is no array of shape \(4, 99\)"):
        arrays.load(replace(stored, shape=(4, 99)))
    (tmp_path / "main" / "arrays" / stored.stored).write_bytes(b"other")
    with pytest.raises(ArrayMissing, match="is damaged: the BLAKE3 of its 5 bytes differs"):
        arrays.load(stored)
    unmounted = arrays_in(tmp_path / "mount")
    with pytest.raises(StoreError, match="is it mounted"):
        unmounted.load(stored)
    with pytest.raises(ConfigurationError, match=r"kafka\.arrays\.url is empty"):
        StoredArrays.of("main", ArraysConfig())


def test_a_rollout_is_not_sent_before_the_store_has_its_arrays(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DeliveryError, match=r"rollout a was not sent: .* did not take its arrays within 0 s"):
        sent(tmp_path / "file", example_rollout("a", token_arrays={"x": EXPERTS}), above_bytes=0)


def test_copies_keep_their_names_and_what_is_missing_is_named(tmp_path: Path) -> None:
    source = arrays_in(tmp_path / "a")
    stored = source.put(EXPERTS)
    copy = StoredArrays(LocalStore(tmp_path / "b"), "run=main/_arrays")
    [problem] = copy.copy_from(source, [stored.stored, NAME])
    assert f"{NAME} is missing" in problem
    assert copy.load(stored) == EXPERTS
    copy.delete([stored.stored])
    assert copy.sizes() == {}


def test_names_are_found_in_rollouts_and_in_their_batches_and_nowhere_else(tmp_path: Path) -> None:
    d = driver(token_arrays=("routed_experts",))
    names = set()
    for uid, reward in (("a", 1.0), ("b", 0.0)):
        array = NamedArray.of(np.full((4, 8), ord(uid), "|u1"))
        rollout = example_rollout(uid, reward, token_arrays={"routed_experts": array, "entropy": EXPERTS})
        stored = sent(tmp_path, rollout, above_bytes=10)
        d.pipe(stored)
        value = encode(stored)
        assert names_in(value) == {named.stored for named in stored.token_arrays.values()}
        names.add(stored.token_arrays["routed_experts"].stored)
    [batch] = d.batches
    assert names_in(encode(batch)) == names
    assert names_in(None) == names_in(b"junk") == names_in(encode(d.journal[0])) == set()
    # Of a record that no reader takes, what looks like a name is not one.
    odd = replace(EXPERTS, data=b"", stored="../../etc/passwd")
    assert names_in(encode(example_rollout("c", token_arrays={"x": odd}))) == set()


def test_the_day_of_a_name_is_the_day_of_its_writing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert day_name(1_700_000_000) == "20231114"
    assert day_of("20231114/ab") == 1_699_920_000
    assert day_of("20231399/ab") == float("inf")
    monkeypatch.setattr(stored_arrays, "day_name", lambda _time_s: "20200229")
    assert arrays_in(tmp_path).put(EXPERTS).stored.startswith("20200229/")
