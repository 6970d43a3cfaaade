"""A rescoring: a verifier, and the environments whose rollouts it scores again.

The id follows from the verifier's code and version and from the environments, so an interrupted rescoring can continue,
and changed code makes a new rescoring.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rollstream.topics.errors import ConfigurationError
from rollstream.topics.user_code import load_object, source_digest


@dataclass(frozen=True)
class Rescoring:
    """A verifier and the environments whose rollouts it scores."""

    verifier: str
    """Name by which it is imported: package.module:Class or path/to/file.py:Class."""
    digest: str
    """Digest of its source; "" if it has no source file."""
    version: str = ""
    """Version stated by the verifier, for changes outside its source, such as a new model behind its URL."""
    environments: tuple[str, ...] = ()
    """Environments whose rollouts are scored again; empty for all."""

    @cached_property
    def id(self) -> str:
        """Name of the rescoring on the log: twelve hexadecimal digits."""
        parts = (Path(self.verifier).name, self.digest, self.version, sorted(self.environments))
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=6).hexdigest()

    def includes(self, environment: str) -> bool:
        """Whether rollouts of an environment are scored again."""
        return not self.environments or environment in self.environments


def rescoring_of(verifier: str, environments: tuple[str, ...] = ()) -> Rescoring:
    """Import a verifier, and return its rescoring.

    The rescoring has the version in the verifier's attribute `version`, if there is one. Raises ConfigurationError if
    the verifier cannot be imported or called.
    """
    named = load_object(verifier, "--verifier names", "a verifier is named package.module:Class")
    if not callable(named):
        raise ConfigurationError(
            f"--verifier names {verifier!r}, which cannot be called; a verifier is a function of a rollout, or a class "
            f"with __call__(self, rollout)"
        )
    return Rescoring(verifier, source_digest(named), str(getattr(named, "version", "")), environments)
