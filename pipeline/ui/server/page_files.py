"""Serves the files of the page, which are the files in its folder with a known suffix, each with an ETag."""

import hashlib
import re
from pathlib import Path

from aiohttp import web

PAGE = Path(__file__).parents[1] / "page"
_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".json": "application/json",
    ".txt": "text/plain",
}
_TEXTS = ("text/", "application/json", "image/svg")
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class PageFiles:
    """The files below a folder. A file that changes is read again, so the page can be edited without a restart."""

    def __init__(self, folder: Path = PAGE) -> None:
        self._folder = folder.resolve()
        self._read: dict[Path, tuple[tuple[int, int], bytes, str]] = {}

    def answer(self, request: web.Request) -> web.Response:
        """Return the file that a path names, or 304 if the browser has it."""
        path = self.find(request.match_info.get("path", "") or "index.html")
        if path is None:
            raise web.HTTPNotFound(reason="the page has no such file")
        content, etag = self._content(path)
        headers = {"ETag": etag, "Cache-Control": "no-cache"}
        if etag in [tag.strip().removeprefix("W/") for tag in request.headers.get("If-None-Match", "").split(",")]:
            return web.Response(status=304, headers=headers)
        kind = _TYPES[path.suffix]
        charset = "utf-8" if kind.startswith(_TEXTS) else None
        return web.Response(body=content, content_type=kind, charset=charset, headers=headers)

    def find(self, name: str) -> Path | None:
        """Return the file of a name; None if there is none, or if a part of the name is hidden or invalid."""
        parts = name.split("/")
        if not all(_SEGMENT.fullmatch(part) for part in parts):
            return None
        path = self._folder.joinpath(*parts)
        if path.suffix not in _TYPES or not path.is_file() or not path.resolve().is_relative_to(self._folder):
            return None
        return path

    def _content(self, path: Path) -> tuple[bytes, str]:
        status = path.stat()
        stamp = (status.st_mtime_ns, status.st_size)
        known = self._read.get(path)
        if known is None or known[0] != stamp:
            content = path.read_bytes()
            known = (stamp, content, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
            self._read[path] = known
        return known[1], known[2]
