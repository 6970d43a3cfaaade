"""Labels of weights: numbers, digests and steps name policy versions."""

import pytest

from rollstream.producers.flow.policy_versions import PolicyVersions
from rollstream.topics.records import PolicyManifest


def manifest(version: int, step: int) -> PolicyManifest:
    return PolicyManifest(
        version=version, learner="default", step=step, epoch="e", tensors=(), chunks=(), digest=f"{version:064x}"
    )


def known() -> PolicyVersions:
    versions = PolicyVersions()
    for version in range(4):
        versions.add(manifest(version, 10 * version))
    return versions


@pytest.mark.parametrize(
    ("label", "version"),
    [("3", 3), (f"{2:064x}", 2), ("default/10", 1), ("17", 17), ("default", -1), ("-1", -1), ("", -1), ("٣", -1)],
)
def test_a_label_names_a_version(label: str, version: int) -> None:
    assert known().version_of(label) == version


def test_a_version_on_record_has_its_learner_step() -> None:
    versions = known()
    assert [versions.step_of(version) for version in (0, 3, 17, -1)] == [0, 30, -1, -1]
    assert versions.steps == {0: 0, 1: 10, 2: 20, 3: 30}


def test_labels_not_on_record_are_told() -> None:
    versions = known()
    assert not versions.lacks(["3", "default/10"])
    assert not versions.lacks([])
    assert versions.lacks(["3", "17"])
    assert versions.lacks(["default"])
