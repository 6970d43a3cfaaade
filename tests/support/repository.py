"""A repository of Maven artifacts on this machine, for tests of what fetches them."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rollstream.infra.broker.java_runtime import LockedJar


def artifact_path(jar: LockedJar) -> Path:
    """Path of a jar in a repository."""
    group, artifact, version = jar.coordinates.split(":")
    return Path(*group.split("."), artifact, version, jar.name)


@contextmanager
def serving(root: Path) -> Iterator[str]:
    """Serve a folder as a repository; gives its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=os.fspath(root))) as server:
        thread = threading.Thread(target=server.serve_forever, name="repository")
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing on stderr."""
