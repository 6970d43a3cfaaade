"""A version in temporary files has the bits of one in memory, and is refused where that one is."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from rollstream.consumers.weights.chains import SpooledVersion, SpoolFailed
from rollstream.consumers.weights.content import WeightsRefused
from rollstream.consumers.weights.fetcher import ChunkFetcher
from rollstream.consumers.weights.step_log import StepLog
from rollstream.topics.records import PolicyManifest
from rollstream.topics.wire.params_digest import params_digest
from tests.model.test_weights_deltas import params, publish, publisher
from tests.support.runs import RealRun
from tests.support.versions import visible_manifests

VERSIONS = 4


@pytest.fixture
def manifests(run: RealRun) -> dict[int, PolicyManifest]:
    """The manifests of a full version and of three deltas."""
    with closing(StepLog(run.kafka, run.name, "default")) as log, closing(publisher(run)) as source:
        for step in range(VERSIONS):
            publish(source, log, step)
    return visible_manifests(run, VERSIONS - 1)


def test_each_tensor_has_the_bits_of_its_version_and_its_files_have_no_names(
    run: RealRun, manifests: dict[int, PolicyManifest], tmp_path: Path
) -> None:
    directory = tmp_path / "made" / "here"
    with closing(ChunkFetcher(run.kafka, run.name)) as fetcher:
        for version in range(VERSIONS):
            with SpooledVersion(fetcher, manifests, version, directory) as spooled:
                arrays = {name: np.asarray(tensor) for name, tensor in spooled.tensors.items()}
                assert params_digest(arrays) == params_digest(params(version))
                assert {(t.shape, t.dtype, t.nbytes) for t in spooled.tensors.values()} == {
                    (array.shape, array.dtype, array.nbytes) for array in params(version).values()
                }
                assert not list(tmp_path.iterdir())


def test_a_version_that_differs_from_its_manifest_is_refused_and_the_tensor_is_named(
    run: RealRun, manifests: dict[int, PolicyManifest], tmp_path: Path
) -> None:
    table = next(tensor for tensor in manifests[2].tensors if tensor.name == "table")
    forged = blake3(b"other").hexdigest()
    tensors = tuple(replace(t, digest=forged) if t is table else t for t in manifests[2].tensors)
    changes = {
        "tensor table of policy version 2 differs": {"tensors": tensors},
        "policy version 2 as a whole differs": {"digest": forged + ".tree"},
        "tensor table of policy version 2 has too few bytes": {
            "tensors": tuple(replace(t, start=2**40) if t is table else t for t in manifests[2].tensors)
        },
    }
    with closing(ChunkFetcher(run.kafka, run.name)) as fetcher:
        for message, change in changes.items():
            lying = manifests | {2: replace(manifests[2], **change)}
            with pytest.raises(WeightsRefused, match=message):
                SpooledVersion(fetcher, lying, 2, tmp_path)
        with SpooledVersion(fetcher, manifests, 2, tmp_path) as spooled:
            assert params_digest(dict(spooled.tensors)) == params_digest(params(2)), "the fetcher still works"


def test_a_directory_that_cannot_be_written_is_named(
    run: RealRun, manifests: dict[int, PolicyManifest], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with closing(ChunkFetcher(run.kafka, run.name)) as fetcher, pytest.raises(SpoolFailed, match=r"file.* free space"):
        SpooledVersion(fetcher, manifests, 0, tmp_path / "file")
