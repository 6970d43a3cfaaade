"""Retention of files of policy versions: a file stays if a kept version, or a version that it builds on, names it.

A file that no manifest names may belong to a version that is being published. It may only be removed if it is old
enough, or by the publisher itself.
"""

import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from rollstream.consumers.weights.chains import needed
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.content import parsed, place_of, root_of
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.files.atomic_files import StoreError
from rollstream.topics.files.parallel import in_parallel
from rollstream.topics.files.stores import StoredFile, check_mounted, fault_of, open_store, shown
from rollstream.topics.logs import event
from rollstream.topics.records import PolicyManifest

logger = logging.getLogger(__name__)


class FilesToPrune(NamedTuple):
    """The files of a run at one URL, and which of them may be removed."""

    url: str
    files: int
    """Number of files of the run at the URL."""
    removable: tuple[str, ...]
    """URLs of the files that may be removed."""
    size_bytes: int
    """Total size of the removable files."""
    problem: str = ""
    """Why no file may be removed."""


def left_behind(
    run: str,
    listed: Iterable[str],
    manifests: Mapping[int, PolicyManifest],
    keep_versions: int,
    *,
    unreadable: Collection[int] = (),
) -> list[str]:
    """Return the listed files of a run that no kept version needs.

    Files with other names are not returned, because they do not belong to the run. Files of a version without a
    manifest are not returned either if the version is one of `unreadable` or a later version has a manifest, because
    this release may be unable to read its manifest.
    """
    latest = max((*manifests, *unreadable), default=-1)
    # Names, not URLs: the same store may have another URL now, such as another path to the same directory.
    named = {
        place_of(chunk.url)[1]
        for version in needed(manifests, keep_versions)
        for manifest in (manifests.get(version),)
        if manifest is not None
        for chunk in manifest.chunks
        if chunk.url
    }
    left = []
    for name in listed:
        file = parsed(run, name)
        if file is None or (file.version <= latest and file.version not in manifests):
            continue
        if name not in named:
            left.append(name)
    return left


def incomplete(
    run: str, url: str, listed: Mapping[str, StoredFile], manifests: Mapping[int, PolicyManifest], keep_versions: int
) -> set[int]:
    """Return the versions that are still needed, and of which a file of the run at `url` is not listed or has another
    size.

    Files at other URLs, and those of the run from which this one was restored, are not judged, because they are not
    listed.
    """
    return {
        version
        for version, size_bytes, name in _files_at(run, url, manifests, keep_versions)
        if name not in listed or listed[name].size_bytes != size_bytes
    }


def names_store(run: str, url: str, manifests: Mapping[int, PolicyManifest], keep_versions: int) -> bool:
    """Whether a version that is still needed has files of the run at `url`."""
    return bool(_files_at(run, url, manifests, keep_versions))


def _files_at(
    run: str, url: str, manifests: Mapping[int, PolicyManifest], keep_versions: int
) -> list[tuple[int, int, str]]:
    """Return version, size in bytes and name of the files of the run at `url` that are still needed."""
    files = [
        (version, chunk.size_bytes, *place_of(chunk.url))
        for version in needed(manifests, keep_versions)
        for chunk in manifests[version].chunks
        if chunk.url and root_of(run, chunk.url) is not None
    ]
    # Stores are opened to compare their URLs: once for each, because a version may have thousands of files.
    here = {root for root in {root for *_, root, _ in files} if _normal(root) == _normal(url)}
    return [(version, size_bytes, name) for version, size_bytes, root, name in files if root in here]


def roots(run: str, config: WeightsConfig, manifests: Iterable[PolicyManifest]) -> list[str]:
    """Return the URLs below which files of a run lie: the configured URL, and the URLs in manifests."""
    urls = {config.url: None} if config.url else {}
    for manifest in manifests:
        for chunk in manifest.chunks:
            if chunk.url and (root := root_of(run, chunk.url)) is not None:
                urls[root] = None
    return list({_normal(url): None for url in urls})


def _normal(url: str) -> str:
    """Return the URL as its store names it, and as it is if this process cannot open the store."""
    with suppress(ConfigurationError):
        url = open_store(url).url
    return url.rstrip("/") or "/"


def listed_files(
    run: str, urls: Iterable[str], *, timeout_s: float, in_use: Collection[str] = ()
) -> dict[str, Mapping[str, StoredFile] | str]:
    """Return the files of a run at each URL, or why they cannot be listed within `timeout_s` per URL.

    At URLs `in_use` there must be files of the run, so that a directory without any is not mounted.
    """
    return {url: _listed(run, url, timeout_s, url in in_use) for url in urls}


def _listed(run: str, url: str, timeout_s: float, in_use: bool) -> Mapping[str, StoredFile] | str:
    deadline = time.monotonic() + timeout_s

    def check() -> None:
        if time.monotonic() > deadline:
            raise StoreError(f"no answer within {timeout_s:g} s")

    try:
        store = open_store(url)
        [files] = in_parallel([run], store.listing, 1, check=check, ended=threading.Event())
        if in_use:
            check_mounted(store, run)
        return files
    except (StoreError, OSError, ConfigurationError) as error:
        return fault_of(error)


def prunable(
    run: str,
    listed: Mapping[str, Mapping[str, StoredFile] | str],
    manifests: Mapping[int, PolicyManifest],
    config: WeightsConfig,
    *,
    unreadable: int = 0,
    spared: Collection[str] = (),
    now_s: float | None = None,
) -> list[FilesToPrune]:
    """Return the files that may be removed: no kept version needs them, and they are older than `orphan_hours`.

    The files must be listed before the manifests are read. If a manifest is unreadable, no file may be removed, because
    the manifest may name it. Files with `spared` names stay.
    """
    oldest = (time.time() if now_s is None else now_s) - config.orphan_hours * 3600
    plans = []
    for url, files in listed.items():
        if isinstance(files, str):
            plans.append(FilesToPrune(shown(url), 0, (), 0, f"not listed: {files}"))
        elif unreadable:
            reason = f"{unreadable} unreadable records of policies may name these files"
            plans.append(FilesToPrune(shown(url), len(files), (), 0, reason))
        else:
            left = left_behind(run, files, manifests, config.keep_versions)
            left = [name for name in left if name not in spared]
            old = [name for name in left if (written := files[name].modified) is not None and written < oldest]
            urls = tuple(f"{url.rstrip('/')}/{name}" for name in old)
            ours = sum(parsed(run, name) is not None for name in files)
            plans.append(FilesToPrune(shown(url), ours, urls, sum(files[name].size_bytes for name in old)))
    return plans


def remove_files(urls: Iterable[str], *, at_once: int, timeout_s: float) -> tuple[int, str]:
    """Delete files; return the number of deleted files, and the problem of the first file that was not deleted.

    If the store stops answering, the number is 0, even if some files were deleted.
    """
    chosen, problems = list(urls), dict[str, str]()
    if not chosen:
        return 0, ""
    deadline = time.monotonic() + timeout_s

    def check() -> None:
        if time.monotonic() > deadline:
            raise StoreError(f"{shown(chosen[0])}: the store did not answer within {timeout_s:g} s")

    def remove(url: str) -> None:
        root, name = place_of(url)
        try:
            stores[root].delete(name)
        except (StoreError, OSError) as error:
            problems[url] = f"{shown(url)}: {fault_of(error)}"

    try:
        stores = {root: open_store(root) for root in {place_of(url)[0] for url in chosen}}
        for _ in in_parallel(chosen, remove, min(at_once, len(chosen)), check=check, ended=threading.Event()):
            deadline = time.monotonic() + timeout_s
    except (StoreError, ConfigurationError) as error:
        return 0, str(error)
    return len(chosen) - len(problems), next(iter(problems.values()), "")


def remove_expired(urls: Iterable[str], config: WeightsConfig) -> None:
    """Delete files of a publisher; log failures, and leave the files that remain to `rollstream prune`."""
    removed, problem = remove_files(urls, at_once=config.files_at_once, timeout_s=config.store_timeout_s)
    if removed:
        event(logger, "weight_files_removed", files=removed)
    if problem:
        event(logger, "weight_files_left", level=logging.WARNING, reason=problem)
