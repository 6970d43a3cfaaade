"""An object store for tests that want gs://: files of a folder, over HTTP as tensorstore asks Google for them.

A process that calls `use` gets gs:// there. A file system of fsspec takes the place of gcsfs, and cannot rename.
"""

import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_OBJECTS = re.compile(r"(?:/upload)?/storage/v1/b/([^/]+)/o/?(.*)")
_lock = threading.Lock()


@contextmanager
def object_store(folder: Path) -> Iterator[int]:
    """Serve a folder, buckets below it; yields the port."""

    class Handler(_Handler):
        root = folder

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """The calls of Google's JSON API that read, write, list and delete objects."""

    protocol_version = "HTTP/1.1"
    root: Path

    def log_message(self, *_said: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        bucket, name, query = self._asked()
        if not name:
            return self._listed(bucket, query)
        with _lock:
            path = self.root / bucket / name
            data = path.read_bytes() if path.is_file() else None
            generation = str(path.stat().st_mtime_ns) if data is not None else ""
        if data is None:
            return self._answer(404)
        if query.get("alt") != "media":
            return self._answer(200, _described(name, generation, len(data)))
        headers = {"X-Goog-Generation": generation}
        span = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if span is None:
            return self._answer(200, data, headers)
        begin = int(span[1]) if span[1] else len(data) - int(span[2])
        end = int(span[2]) + 1 if span[1] and span[2] else len(data)
        part = data[begin:end]
        headers["Content-Range"] = f"bytes {begin}-{begin + len(part) - 1}/{len(data)}"
        return self._answer(206, part, headers)

    def do_POST(self) -> None:
        bucket, _name, query = self._asked()
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.root / bucket / query["name"]
        with _lock:
            generation = path.stat().st_mtime_ns if path.exists() else 0
            if "ifGenerationMatch" in query and int(query["ifGenerationMatch"]) != generation:
                return self._answer(412)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            generation = path.stat().st_mtime_ns
        return self._answer(200, _described(query["name"], str(generation), len(data)))

    def do_DELETE(self) -> None:
        bucket, name, _query = self._asked()
        with _lock:
            path = self.root / bucket / name
            there = path.is_file()
            path.unlink(missing_ok=True)
        self._answer(204 if there else 404)

    def _asked(self) -> tuple[str, str, dict[str, str]]:
        parts = urlsplit(self.path)
        match = _OBJECTS.fullmatch(parts.path)
        assert match is not None, self.path
        return match[1], unquote(match[2]), {key: values[0] for key, values in parse_qs(parts.query).items()}

    def _listed(self, bucket: str, query: dict[str, str]) -> None:
        below = self.root / bucket
        names = sorted(str(path.relative_to(below)) for path in below.rglob("*") if path.is_file())
        begin, end = query.get("startOffset", ""), query.get("endOffset", "\U0010ffff")
        chosen = [name for name in names if begin <= name < end and name.startswith(query.get("prefix", ""))]
        items = [json.loads(_described(name, "1", (below / name).stat().st_size)) for name in chosen]
        self._answer(200, json.dumps({"kind": "storage#objects", "items": items}).encode())

    def _answer(self, code: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _described(name: str, generation: str, size: int) -> bytes:
    return json.dumps({"name": name, "generation": generation, "size": str(size)}).encode()


def use(folder: Path, port: int) -> None:
    """Make gs:// that store in this process: for fsspec, for tensorstore, and for what orbax asks Google itself."""
    import fsspec
    from fsspec.implementations.dirfs import DirFileSystem
    from fsspec.implementations.local import LocalFileSystem

    class Buckets(DirFileSystem):  # type: ignore[misc]
        """Paths at gs:// as files of the folder; what it lists begins with the bucket, as with gcsfs."""

        protocol = ("gcs", "gs")

        def __init__(self, **_options: Any) -> None:
            super().__init__(path=str(folder), fs=LocalFileSystem(auto_mkdir=True))

        def _join(self, path: Any) -> Any:
            if isinstance(path, list | tuple):
                return [self._join(one) for one in path]
            return super()._join(re.sub(r"^(gs|gcs)://", "", str(path)))

        def rename(self, *_arguments: Any, **_options: Any) -> None:
            raise NotImplementedError("an object store renames nothing")

    fsspec.register_implementation("gcs", Buckets, clobber=True)
    os.environ["TENSORSTORE_GCS_HTTP_URL"] = f"http://127.0.0.1:{port}"
    os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = "nobody"
    # google-cloud-storage says whether a bucket has folders of its own; this one has none.
    storage: Any = ModuleType("google.cloud.storage")
    storage.Client = lambda: SimpleNamespace(get_bucket=lambda _name: SimpleNamespace())
    cloud: Any = sys.modules.setdefault("google.cloud", ModuleType("google.cloud"))
    cloud.storage = sys.modules["google.cloud.storage"] = storage
