"""Policy versions newer than the one held that may yet be had: the newest first, each tried again until a newer one is
held. No I/O here.
"""

from topics.records import PolicyManifest

_MOST = 8
"""More versions back chunks are gone, as publishers keep few."""
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0


class Candidates:
    """Versions to be tried, with the time at which each is due."""

    def __init__(self) -> None:
        self._manifests: dict[int, PolicyManifest] = {}
        self._due: dict[int, float] = {}
        self._delays: dict[int, float] = {}

    def add(self, manifest: PolicyManifest) -> None:
        """Take a version in, due at once; the oldest leaves where there are many."""
        self._manifests[manifest.version] = manifest
        self._due[manifest.version] = 0.0
        self._delays[manifest.version] = _FIRST_DELAY_S
        if len(self._manifests) > _MOST:
            self.drop(min(self._manifests))

    def next(self, now: float) -> PolicyManifest | None:
        """The newest version that is due."""
        due = [version for version, at in self._due.items() if at <= now]
        return self._manifests[max(due)] if due else None

    def put_off(self, version: int, now: float) -> float:
        """Try a version again later, and later each time; returns in how many seconds."""
        delay = self._delays[version]
        self._due[version] = now + delay
        self._delays[version] = min(2 * delay, _LONGEST_DELAY_S)
        return delay

    def drop(self, version: int) -> None:
        """Never try a version again."""
        for by_version in (self._manifests, self._due, self._delays):
            by_version.pop(version, None)

    def held(self, version: int) -> None:
        """Drop what is no newer than the version held."""
        for older in [other for other in self._manifests if other <= version]:
            self.drop(older)
