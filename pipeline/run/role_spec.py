"""Specifications of processes for a supervisor: their commands, timeouts and restarts."""

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """One process of a run: `python *arguments`, with this Python."""

    name: str
    """Unique within the run, kind first, e.g. group-0; also the name of its log file."""
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to those of the supervisor; an empty value removes a variable."""
    finishes: bool = False
    """Whether it exits with 0 by itself when its work is done."""
    optional: bool = False
    """Whether the run goes on without it when it fails."""
    ready_timeout_s: float = 120.0
    """How long it may take from its start, or from its last progress report, until it is ready."""
    stop_timeout_s: float = 20.0
    restarts: int = 3
    """How often it is started again after exiting unexpectedly, within `window_s`."""
    window_s: float = 600.0
    """Time after which an exit is forgotten."""
    backoff_s: float = 0.5
    """Pause before the first restart; it doubles with each further restart."""
    address: tuple[str, int] | None = None
    """IP address and port where it serves clients, whose connections wait for it while it is started again."""
    expendable: bool = False
    """Whether the other processes go on if it never becomes ready, or exits more often than `restarts` allows."""
    shares_work: bool = False
    """Whether processes of its kind share their work; the run then goes on without it while another is ready."""

    @property
    def kind(self) -> str:
        """Its name up to the first dash; roles of one kind stop together."""
        return self.name.partition("-")[0]

    @property
    def command_digest(self) -> str:
        """A digest of its command line and variables."""
        command = [sys.executable, self.arguments, sorted(self.environment.items())]
        return hashlib.sha256(json.dumps(command).encode()).hexdigest()
