"""Hooks of mkdocs: the site's home is README.md, and files that pages link to outside of docs are part of the site."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
    "CHANGELOG.md": "changelog.md",
    "recipes/README.md": "recipes/index.md",
    **{
        f"recipes/{page.parent.name}/README.md": f"recipes/{page.parent.name}.md"
        for page in ROOT.glob("recipes/*/*.md")
    },
}
"""Pages outside of docs, and their names in the site."""
_LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]+)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside of docs, and every file that a page links to."""
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in OUTSIDE}
    for name, text in texts.items():
        files.append(
            File.generated(
                config,
                OUTSIDE[name],
                content=_relinked(text, posixpath.dirname(name), posixpath.dirname(OUTSIDE[name])),
            )
        )
    pages = (
        (posixpath.join("docs", posixpath.dirname(file.src_uri)), file.content_string)
        for file in files
        if file.src_uri.endswith(".md") and file.src_uri not in OUTSIDE.values()
    )
    for folder, text in [*pages, *((posixpath.dirname(name), text) for name, text in texts.items())]:
        for link in _LINK.findall(text):
            path = posixpath.normpath(posixpath.join(folder, link[0]))
            uri = _uri(path)
            if uri.startswith("files/") and (ROOT / path).is_file() and files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links that leave docs to the site's copies."""
    if page.file.src_uri in OUTSIDE.values():
        return markdown
    folder = posixpath.dirname(page.file.src_uri)
    return _relinked(markdown, posixpath.join("docs", folder), folder)


def _relinked(text: str, folder: str, site_folder: str) -> str:
    def sub(link: re.Match[str]) -> str:
        if ":" in link[1]:
            return link[0]
        uri = _uri(posixpath.normpath(posixpath.join(folder, link[1])))
        return f"]({posixpath.relpath(uri, site_folder or '.')}{link[2] or ''})"

    return _LINK.sub(sub, text)


def _uri(path: str) -> str:
    """Place of a file of the repository in the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return OUTSIDE.get(path, f"files/{path}")
