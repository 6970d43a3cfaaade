"""Policy versions that a follower has yet to fetch: newest first, retried until it holds a newer version. No I/O."""

from rollstream.topics.records import PolicyManifest

_MOST = 8
"""Maximum number of candidates; publishers keep few versions, so the chunks of older versions are gone."""
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0


class VersionCandidates:
    """Versions to fetch, each with the time at which it is due."""

    def __init__(self) -> None:
        self._manifests: dict[int, PolicyManifest] = {}
        self._due: dict[int, float] = {}
        self._delays: dict[int, float] = {}

    @property
    def oldest(self) -> int:
        """The lowest version, -1 if there is none."""
        return min(self._manifests, default=-1)

    def add(self, manifest: PolicyManifest) -> None:
        """Add a version that is due at once; if there are too many versions, the oldest is dropped."""
        self._manifests[manifest.version] = manifest
        self._due[manifest.version] = 0.0
        self._delays[manifest.version] = _FIRST_DELAY_S
        if len(self._manifests) > _MOST:
            self.drop(min(self._manifests))

    def next(self, now: float) -> PolicyManifest | None:
        """Return the newest version that is due, None if there is none."""
        due = [version for version, at in self._due.items() if at <= now]
        return self._manifests[max(due)] if due else None

    def delay(self, version: int, now: float) -> float:
        """Delay a version, longer at each call; return the delay in seconds."""
        delay_s = self._delays[version]
        self._due[version] = now + delay_s
        self._delays[version] = min(2 * delay_s, _LONGEST_DELAY_S)
        return delay_s

    def drop(self, version: int) -> None:
        """Remove a version."""
        for by_version in (self._manifests, self._due, self._delays):
            by_version.pop(version, None)

    def drop_up_to(self, version: int) -> None:
        """Remove a version and all older versions."""
        for older in [other for other in self._manifests if other <= version]:
            self.drop(older)
