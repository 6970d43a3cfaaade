"""Writes an image as an archive for `docker load`, the same bytes for the same entries: sorted names, one time, no host
users.

Its id is the digest of its configuration, which names the digest of its one layer: it depends on no registry or clock.
"""

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from rollstream.infra.image.contents import USER_ID, ImageEntry

_CREATED = "1970-01-01T00:00:00Z"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def write_image(target: Path, entries: Iterable[ImageEntry], tag: str, scratch: Path) -> str:
    """Write the archive of an image called `tag`; return its id, `sha256:` and 64 hexadecimal digits."""
    layer = scratch / "layer.tar"
    with layer.open("w+b") as stream:
        write_layer(stream, entries)
        stream.seek(0)
        diff_id = hashlib.file_digest(stream, "sha256").hexdigest()
    configuration = json.dumps(_configuration(diff_id), sort_keys=True).encode()
    image_id = hashlib.sha256(configuration).hexdigest()
    manifest = [{"Config": f"{image_id}.json", "RepoTags": [tag], "Layers": [f"{diff_id}/layer.tar"]}]
    with tarfile.open(target, "w") as archive:
        _add(archive, ImageEntry(f"/{image_id}.json", configuration, mode=0o644))
        with layer.open("rb") as stream:
            info = _info(ImageEntry(f"/{diff_id}/layer.tar", mode=0o644))
            info.type, info.size = tarfile.REGTYPE, layer.stat().st_size
            archive.addfile(info, stream)
        _add(archive, ImageEntry("/manifest.json", json.dumps(manifest).encode(), mode=0o644))
    return f"sha256:{image_id}"


def write_layer(stream: IO[bytes], entries: Iterable[ImageEntry]) -> None:
    """Write the image's files as one tar."""
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            _add(archive, entry)


def _add(archive: tarfile.TarFile, entry: ImageEntry) -> None:
    archive.addfile(_info(entry), io.BytesIO(entry.data) if entry.data is not None else None)


def _info(entry: ImageEntry) -> tarfile.TarInfo:
    info = tarfile.TarInfo(entry.path.removeprefix("/"))
    info.mode, info.uid, info.gid, info.mtime = entry.mode, entry.user_id, entry.user_id, 0
    if entry.data is not None:
        info.size = len(entry.data)
    elif entry.link is not None:
        info.type, info.linkname = tarfile.SYMTYPE, entry.link
    else:
        info.type = tarfile.DIRTYPE
    return info


def _configuration(diff_id: str) -> dict[str, Any]:
    machine = platform.machine()
    return {
        "architecture": _ARCHITECTURES.get(machine, machine),
        "os": "linux",
        "created": _CREATED,
        "config": {
            "Cmd": ["/etc/kafka/docker/run"],
            "Env": ["PATH=/opt/java/bin:/bin", "LANG=C.UTF-8"],
            "ExposedPorts": {"9092/tcp": {}},
            "User": f"{USER_ID}:{USER_ID}",
            "WorkingDir": "/",
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{diff_id}"]},
        "history": [{"created": _CREATED, "created_by": "rollstream image"}],
    }
