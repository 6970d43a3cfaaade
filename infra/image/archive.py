"""Writes an image as an archive for `docker load`, with the same bytes for the same entries.

All files have the same time, and no user of this machine is named. The image's id is the digest of its configuration,
which names the digest of its one layer, so the id depends on no registry or clock.
"""

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rollstream.infra.image.entries import USER_ID, ImageEntry

_CREATED = "1970-01-01T00:00:00Z"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """How containers of an image run."""

    command: tuple[str, ...]
    entrypoint: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    ports: tuple[int, ...] = ()
    """TCP ports that programs of the image listen on."""
    user: str = f"{USER_ID}:{USER_ID}"
    folder: str = "/"
    """The folder that the command starts in."""
    volumes: tuple[str, ...] = ()
    """Folders whose contents outlive a container."""
    labels: Mapping[str, str] = field(default_factory=dict)
    health: tuple[str, ...] = ()
    """Command that exits with 0 while the container works; empty: no health check."""


def write_image(target: Path, entries: Iterable[ImageEntry], settings: ImageSettings, tag: str, scratch: Path) -> str:
    """Write the archive of an image named `tag`; return its id, `sha256:` and 64 hexadecimal digits."""
    layer = scratch / "layer.tar"
    with layer.open("w+b") as stream:
        write_layer(stream, entries)
        stream.seek(0)
        diff_id = hashlib.file_digest(stream, "sha256").hexdigest()
    configuration = json.dumps(_configuration(settings, diff_id), sort_keys=True).encode()
    image_id = hashlib.sha256(configuration).hexdigest()
    manifest = [{"Config": f"{image_id}.json", "RepoTags": [tag], "Layers": [f"{diff_id}/layer.tar"]}]
    with tarfile.open(target, "w") as archive:
        _add(archive, ImageEntry(f"/{image_id}.json", configuration, mode=0o644))
        _add(archive, ImageEntry(f"/{diff_id}/layer.tar", source=layer, mode=0o644))
        _add(archive, ImageEntry("/manifest.json", json.dumps(manifest).encode(), mode=0o644))
    return f"sha256:{image_id}"


def write_layer(stream: IO[bytes], entries: Iterable[ImageEntry]) -> None:
    """Write the image's files as one tar."""
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            _add(archive, entry)


def _add(archive: tarfile.TarFile, entry: ImageEntry) -> None:
    info = tarfile.TarInfo(entry.path.removeprefix("/"))
    info.mode, info.uid, info.gid, info.mtime = entry.mode, entry.user_id, entry.user_id, 0
    if entry.source is not None:
        with entry.source.open("rb") as data:
            info.size = entry.source.stat().st_size
            archive.addfile(info, data)
    elif entry.data is not None:
        info.size = len(entry.data)
        archive.addfile(info, io.BytesIO(entry.data))
    else:
        info.type = tarfile.DIRTYPE if entry.link is None else tarfile.SYMTYPE
        info.linkname = entry.link or ""
        archive.addfile(info)


def _configuration(settings: ImageSettings, diff_id: str) -> dict[str, Any]:
    machine = platform.machine()
    config: dict[str, Any] = {
        "Cmd": list(settings.command),
        "Entrypoint": list(settings.entrypoint) or None,
        "Env": [f"{name}={value}" for name, value in settings.variables.items()],
        "ExposedPorts": {f"{port}/tcp": {} for port in settings.ports},
        "Labels": dict(settings.labels) or None,
        "User": settings.user,
        "Volumes": {folder: {} for folder in settings.volumes} or None,
        "WorkingDir": settings.folder,
    }
    if settings.health:
        config["Healthcheck"] = {"Test": ["CMD", *settings.health]}
    return {
        "architecture": _ARCHITECTURES.get(machine, machine),
        "os": "linux",
        "created": _CREATED,
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{diff_id}"]},
        "history": [{"created": _CREATED, "created_by": "rollstream image"}],
    }
