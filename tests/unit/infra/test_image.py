"""The image as a file: the same entries give the same bytes and the same id; what is missing to build it is named."""

import hashlib
import json
import tarfile
from pathlib import Path

import pytest

from rollstream.infra.image.archive import ImageSettings, write_image
from rollstream.infra.image.entries import USER_ID, ImageEntry, with_parents
from rollstream.infra.image.kafka_contents import find_inputs
from rollstream.topics.errors import BrokerUnavailable
from tests.support.machine import Machine, script

SETTINGS = ImageSettings(command=("/bin/sh",), variables={"PATH": "/bin"}, ports=(9092,), volumes=("/data",))
ENTRIES = [
    ImageEntry("/bin"),
    ImageEntry("/bin/busybox", b"\x7fELF", mode=0o755),
    ImageEntry("/bin/sh", link="busybox"),
    ImageEntry("/data", user_id=USER_ID),
]


def image(folder: Path, entries: list[ImageEntry]) -> tuple[str, bytes]:
    folder.mkdir()
    image_id = write_image(folder / "image.tar", entries, SETTINGS, "some/kafka:1", folder)
    return image_id, (folder / "image.tar").read_bytes()


def test_the_same_entries_are_the_same_image(tmp_path: Path) -> None:
    assert image(tmp_path / "a", ENTRIES) == image(tmp_path / "b", ENTRIES)


def test_any_difference_is_another_image(tmp_path: Path) -> None:
    other = [*ENTRIES[:-1], ImageEntry("/data", user_id=0)]
    assert image(tmp_path / "a", ENTRIES)[0] != image(tmp_path / "b", other)[0]


def test_an_image_names_the_digests_of_what_it_holds(tmp_path: Path) -> None:
    image_id, _ = image(tmp_path / "a", ENTRIES)
    with tarfile.open(tmp_path / "a" / "image.tar") as archive:

        def read(name: str) -> bytes:
            member = archive.extractfile(name)
            assert member is not None
            return member.read()

        (manifest,) = json.loads(read("manifest.json"))
        configuration = read(manifest["Config"])
        layer = read(manifest["Layers"][0])
    assert manifest["RepoTags"] == ["some/kafka:1"]
    assert image_id == f"sha256:{hashlib.sha256(configuration).hexdigest()}"
    assert json.loads(configuration)["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]
    (tmp_path / "layer.tar").write_bytes(layer)
    with tarfile.open(tmp_path / "layer.tar") as files:
        assert files.getnames() == ["bin", "bin/busybox", "bin/sh", "data"]
        assert {(f.uid, f.mtime) for f in files} == {(0, 0), (USER_ID, 0)}
        assert files.getmember("bin/sh").linkname == "busybox"


def test_a_file_of_this_machine_is_in_the_image_as_its_bytes_would_be(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"\x7fELF")
    by_file = [ImageEntry(e.path, source=source, mode=e.mode) if e.data else e for e in ENTRIES]
    assert image(tmp_path / "a", ENTRIES) == image(tmp_path / "b", by_file)


def test_directories_above_a_file_are_in_the_image_once_and_before_it() -> None:
    entries = with_parents([ImageEntry("/a/b/c", b"1"), ImageEntry("/a/b", mode=0o1777), ImageEntry("/a/b/d", b"2")])
    assert [entry.path for entry in entries] == ["/a", "/a/b", "/a/b/c", "/a/b/d"]
    assert entries[1].mode == 0o1777


def test_everything_that_is_missing_is_named_at_once(machine: Machine) -> None:
    machine.java("17.0.15")
    machine.maven(works=False)
    script(machine.bin / "ldd", "exit 1")
    with pytest.raises(BrokerUnavailable) as refusal:
        find_inputs(machine.environment())
    for part in ("busybox is not on PATH", "no bin/jlink", "could not get the Kafka jars"):
        assert part in str(refusal.value)
    assert "\n" not in str(refusal.value)
