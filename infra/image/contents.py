"""What goes into the image: a runtime cut to what Kafka needs, the host's C library, busybox and the jars.

Everything is a file of this machine or of this package; `entries` names each with its place, and reads none twice.
"""

import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from infra.config import BrokerConfig, render_properties, server_properties
from infra.jars import Jars, find_jars
from infra.java import JavaRuntime, find_java, packaged_java
from topics.errors import BrokerUnavailable

USER_ID = 1000
"""Who the broker runs as; its folders are theirs."""

# java.desktop for log4j (java.beans), the rest as Kafka and its authorizers load them.
_MODULES = (
    "java.base",
    "java.desktop",
    "java.logging",
    "java.management",
    "java.naming",
    "java.net.http",
    "java.rmi",
    "java.scripting",
    "java.security.jgss",
    "java.security.sasl",
    "java.sql",
    "jdk.crypto.ec",
    "jdk.management",
    "jdk.net",
    "jdk.security.auth",
    "jdk.unsupported",
)
# What the runtime may need of the host. A native library that needs more (X11, sound, fonts) draws, and is left out.
_HOST_LIBRARIES = re.compile(r"^(ld-linux.*|libc|libm|libdl|libpthread|librt|libz|libgcc_s|libstdc\+\+)\.so(\.\d+)*$")
_C_LIBRARY_PARTS = ("libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1")
_APPLETS = ("sh", "cat", "chmod", "cp", "echo", "env", "grep", "id", "kill", "ls", "mkdir", "ps", "rm", "sed", "sleep")


@dataclass(frozen=True)
class Entry:
    """One path of the image: a directory (no data, no link), a link, or a file with its bytes."""

    path: str
    """Absolute, in the image."""
    data: bytes | None = None
    link: str | None = None
    mode: int = 0o755
    user_id: int = 0


@dataclass(frozen=True)
class Parts:
    """What this machine gives."""

    java: JavaRuntime
    jlink: Path
    jars: Jars
    busybox: Path


def find_parts(environment: Mapping[str, str]) -> Parts:
    """Find them all. Raises BrokerUnavailable naming everything that is missing, with the remedy."""
    missing: list[str] = []
    path = environment.get("PATH", "")
    if platform.system() != "Linux":
        missing.append("an image of this machine's files needs Linux")
    busybox = shutil.which("busybox", path=path)
    if busybox is None:
        missing.append("busybox is not on PATH (Debian: apt-get install busybox-static)")
    elif _needed_libraries(Path(busybox)):
        missing.append(f"{busybox} is not static (Debian: apt-get install busybox-static)")
    java = find_java(environment, packaged_java())
    jlink = jars = None
    if java.found is None:
        missing.extend(java.refused or ("no Java (Debian: apt-get install openjdk-17-jdk-headless)",))
    else:
        jlink = java.found.home / "bin" / "jlink"
        if not jlink.exists():
            missing.append(f"{java.found.home} has no bin/jlink: a JDK is needed, not a runtime alone")
        search = find_jars(environment, java.found)
        jars = search.found
        if jars is None:
            missing.extend(search.refused)
    if missing or java.found is None or jlink is None or jars is None or busybox is None:
        raise BrokerUnavailable(f"the image cannot be built here: {'; '.join(missing)}")
    return Parts(java.found, jlink, jars, Path(busybox))


def entries(parts: Parts, scratch: Path) -> list[Entry]:
    """Everything in the image, sorted by path. `scratch` is an empty folder, for the runtime."""
    runtime = scratch / "java"
    _link_runtime(parts.jlink, runtime)
    found = [
        *_files_of(runtime, "/opt/java"),
        *(_file(f"/opt/kafka/libs/{jar.name}", jar) for jar in sorted(parts.jars.directory.glob("*.jar"))),
        _file("/bin/busybox", parts.busybox, 0o755),
        *(Entry(f"/bin/{name}", link="busybox") for name in _APPLETS),
        *_settings(),
        *(Entry(path, mode=0o1777) for path in ("/tmp", "/var/tmp")),
        *(
            Entry(path, user_id=USER_ID)
            for path in ("/opt/kafka/config", "/opt/kafka/logs", "/var/lib/kafka/data", "/mnt/shared/config")
        ),
    ]
    paths = {entry.path for entry in found}
    parents = {str(parent) for path in paths for parent in Path(path).parents} - paths - {"/"}
    return sorted([*found, *(Entry(path) for path in parents)], key=lambda entry: entry.path)


def _settings() -> Iterator[Entry]:
    here = files("infra.image")
    defaults = server_properties(
        BrokerConfig(host="localhost"), port=9092, controller_port=9093, log_dir="/var/lib/kafka/data", bind="0.0.0.0"
    )
    log4j = here.joinpath("log4j2.yaml").read_bytes()
    texts = {
        "/etc/kafka/docker/server.properties": render_properties(defaults).encode(),
        "/etc/kafka/docker/log4j2.yaml": log4j,
        "/etc/kafka/docker/tools-log4j2.yaml": log4j,
        "/etc/passwd": f"root:x:0:0::/:/bin/sh\nappuser:x:{USER_ID}:{USER_ID}::/tmp:/bin/sh\n".encode(),
        "/etc/group": f"root:x:0:\nappuser:x:{USER_ID}:\n".encode(),
        # Without it the C library asks DNS for localhost.
        "/etc/nsswitch.conf": b"hosts: files dns\n",
    }
    for path, data in texts.items():
        yield Entry(path, data, mode=0o644)
    yield Entry("/etc/kafka/docker/run", here.joinpath("run.sh").read_bytes(), mode=0o755)


def _link_runtime(jlink: Path, target: Path) -> None:
    answer = subprocess.run(
        [
            # A third of the time: it runs once, and is not worth compiling well.
            *(str(jlink), "-J-XX:TieredStopAtLevel=1", "-J-XX:+UseSerialGC"),
            *("--add-modules", ",".join(_MODULES), "--output", str(target)),
            *("--no-header-files", "--no-man-pages"),
        ],
        capture_output=True,
        text=True,
        timeout=600,
    )
    if answer.returncode != 0:
        lines = (answer.stdout + answer.stderr).strip().splitlines() or [f"exit {answer.returncode}"]
        raise BrokerUnavailable(f"{jlink} cannot make a runtime: {lines[0]}; a full JDK is needed")


def _files_of(runtime: Path, target: str) -> Iterator[Entry]:
    """The runtime's files, less what only draws, and the host's libraries they need, where their loader looks."""
    own = {path.name for path in runtime.rglob("*.so")}
    host: dict[str, Path] = {}
    for path in sorted(runtime.rglob("*")):
        place = f"{target}/{path.relative_to(runtime)}"
        if path.is_symlink():
            yield Entry(place, link=str(path.readlink()))
        elif path.is_file():
            # jlink copies modes, and its own umask's; only what is run is executable here.
            runs = path.parent.name == "bin" or path.name == "jspawnhelper"
            if runs or ".so" in path.name:
                needed = _needed_libraries(path)
                if not all(_HOST_LIBRARIES.match(name) for name in needed.keys() - own):
                    continue
                host |= {name: where for name, where in needed.items() if _HOST_LIBRARIES.match(name) and where}
            yield _file(place, path, 0o755 if runs else 0o644)
    # Native parts of the jars (zstd, lz4, snappy) ask for the C library's parts by their old names.
    parts = (host["libc.so.6"].parent / name for name in _C_LIBRARY_PARTS)
    for where in sorted({*host.values(), *(part for part in parts if part.exists())}):
        yield _file(str(where), where, 0o755)


def _needed_libraries(path: Path) -> dict[str, Path | None]:
    """The shared libraries a file needs, by name, with the host's file where it has one; empty for a static one."""
    answer = subprocess.run(["ldd", str(path)], capture_output=True, text=True, timeout=60)
    found: dict[str, Path | None] = {}
    for line in answer.stdout.splitlines():
        name, _, where = line.strip().partition(" => ")
        where = where.partition(" (")[0]
        if not where and name.startswith("/"):  # the loader itself
            loader = Path(name.partition(" (")[0])
            found[loader.name] = loader
        elif where:
            found[name] = Path(where) if where.startswith("/") else None
    return found


def _file(path: str, source: Path, mode: int = 0o644) -> Entry:
    return Entry(path, source.read_bytes(), mode=mode)
