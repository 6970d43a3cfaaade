"""Contents of the Kafka image: a Java runtime with the modules that Kafka needs, the host's C library, busybox, jars.

Every file comes from this machine or this package; `kafka_entries` lists each with its path.
"""

import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rollstream.infra.broker.java_runtime import Jars, JavaRuntime, find_jars, find_java, packaged_java
from rollstream.infra.config import BrokerConfig, render_properties, server_properties
from rollstream.topics.errors import BrokerUnavailable
from tests.support.image.entries import (
    USER_ID,
    ImageEntry,
    account_files,
    file_entry,
    needed_libraries,
    with_parents,
)

# log4j needs java.desktop (java.beans); Kafka and its authorizers load the other modules.
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
# Libraries of the host that the image may contain. Native libraries that need further ones (X11, sound, fonts) serve
# graphics and are left out.
_HOST_LIBRARIES = re.compile(r"^(ld-linux.*|libc|libm|libdl|libpthread|librt|libz|libgcc_s|libstdc\+\+)\.so(\.\d+)*$")
_C_LIBRARY_PARTS = ("libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1")
_APPLETS = ("sh", "cat", "chmod", "cp", "echo", "env", "grep", "id", "kill", "ls", "mkdir", "ps", "rm", "sed", "sleep")


@dataclass(frozen=True)
class KafkaInputs:
    """Programs and jars of this machine that the image is built from."""

    java: JavaRuntime
    jlink: Path
    jars: Jars
    busybox: Path


def find_inputs(environment: Mapping[str, str]) -> KafkaInputs:
    """Find all inputs. Raises BrokerUnavailable, naming everything that is missing, with the remedy."""
    missing: list[str] = []
    path = environment.get("PATH", "")
    if platform.system() != "Linux":
        missing.append("an image of this machine's files needs Linux")
    busybox = shutil.which("busybox", path=path)
    if busybox is None:
        missing.append("busybox is not on PATH (Debian: apt-get install busybox-static)")
    elif needed_libraries(Path(busybox)):
        missing.append(f"{busybox} is not static (Debian: apt-get install busybox-static)")
    java_search = find_java(environment, packaged_java())
    jlink = jars = None
    if java_search.runtime is None:
        missing.extend(java_search.refused or ("no Java (Debian: apt-get install openjdk-17-jdk-headless)",))
    else:
        jlink = java_search.runtime.home / "bin" / "jlink"
        if not jlink.exists():
            missing.append(f"{java_search.runtime.home} has no bin/jlink: a JDK is needed, not a runtime alone")
        search = find_jars(environment, java_search.runtime)
        jars = search.jars
        if jars is None:
            missing.extend(search.refused)
    if missing or java_search.runtime is None or jlink is None or jars is None or busybox is None:
        raise BrokerUnavailable(f"the image cannot be built here: {'; '.join(missing)}")
    return KafkaInputs(java_search.runtime, jlink, jars, Path(busybox))


def kafka_entries(inputs: KafkaInputs, scratch: Path) -> list[ImageEntry]:
    """Return all entries of the image, sorted by path. `scratch` is an empty folder for the runtime."""
    runtime = scratch / "java"
    _link_runtime(inputs.jlink, runtime)
    entries = [
        *_files_of(runtime, "/opt/java"),
        *(file_entry(f"/opt/kafka/libs/{jar.name}", jar) for jar in sorted(inputs.jars.directory.glob("*.jar"))),
        file_entry("/bin/busybox", inputs.busybox, 0o755),
        *(ImageEntry(f"/bin/{name}", link="busybox") for name in _APPLETS),
        *_settings(),
        *(ImageEntry(path, mode=0o1777) for path in ("/tmp", "/var/tmp")),
        *(
            ImageEntry(path, user_id=USER_ID)
            for path in ("/opt/kafka/config", "/opt/kafka/logs", "/var/lib/kafka/data", "/mnt/shared/config")
        ),
    ]
    return with_parents(entries)


def _settings() -> Iterator[ImageEntry]:
    package = Path(__file__).parent
    defaults = server_properties(
        BrokerConfig(host="localhost"), port=9092, controller_port=9093, log_dir="/var/lib/kafka/data", bind="0.0.0.0"
    )
    log4j = package.joinpath("log4j2.yaml").read_bytes()
    texts = {
        "/etc/kafka/docker/server.properties": render_properties(defaults).encode(),
        "/etc/kafka/docker/log4j2.yaml": log4j,
        "/etc/kafka/docker/tools-log4j2.yaml": log4j,
    }
    for path, data in texts.items():
        yield ImageEntry(path, data, mode=0o644)
    yield from account_files("appuser", "/tmp")
    yield ImageEntry("/etc/kafka/docker/run", package.joinpath("run.sh").read_bytes(), mode=0o755)


def _link_runtime(jlink: Path, target: Path) -> None:
    answer = subprocess.run(
        [
            # jlink runs once, so optimizing its code does not pay: with these options it takes a third of the time.
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


def _files_of(runtime: Path, target: str) -> Iterator[ImageEntry]:
    """Yield the runtime's files, except those for graphics, and the host libraries they need, at the host's paths."""
    own = {path.name for path in runtime.rglob("*.so")}
    host: dict[str, Path] = {}
    for path in sorted(runtime.rglob("*")):
        target_path = f"{target}/{path.relative_to(runtime)}"
        if path.is_symlink():
            yield ImageEntry(target_path, link=str(path.readlink()))
        elif path.is_file():
            # jlink's modes depend on the umask, so they are set here: of the runtime, only programs are executable.
            is_program = path.parent.name == "bin" or path.name == "jspawnhelper"
            if is_program or ".so" in path.name:
                needed = needed_libraries(path)
                if not all(_HOST_LIBRARIES.match(name) for name in needed.keys() - own):
                    continue
                host |= {name: where for name, where in needed.items() if _HOST_LIBRARIES.match(name) and where}
            yield file_entry(target_path, path, 0o755 if is_program else 0o644)
    # Native libraries in the jars (zstd, lz4, snappy) need the C library's parts under their old names.
    parts = (host["libc.so.6"].parent / name for name in _C_LIBRARY_PARTS)
    for where in sorted({*host.values(), *(part for part in parts if part.exists())}):
        yield file_entry(str(where), where, 0o755)
