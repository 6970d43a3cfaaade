"""Settings of the page of a run."""

import ipaddress
from dataclasses import dataclass

from rollstream.topics.errors import ConfigurationError

OFF = -1
"""Port of a run that serves no page."""


@dataclass(frozen=True, kw_only=True)
class UiConfig:
    """The page of a run: where it is served, and for whom."""

    host: str = "127.0.0.1"
    """Address to listen on. Any other than a loopback address requires a token."""
    port: int = OFF
    """Port of the page that `rollstream run` and `rollstream demo` serve; 0: a free one, -1: they serve none.
    `rollstream ui` takes a free one unless it is set."""
    token: str = ""
    """Secret that a browser must give once, as ?token=; empty: none on a loopback address, elsewhere one that is drawn
    and printed."""
    names: tuple[str, ...] = ()
    """Names of hosts by which browsers may reach it beside addresses and localhost, such as that of a proxy."""
    index_cache_bytes: int = 256 * 2**20
    """Memory for the index that the page fills, which has about a kilobyte for each rollout: once it is larger than
    this, more is read from the disk."""

    def __post_init__(self) -> None:
        if self.index_cache_bytes < 2**20:
            raise ConfigurationError(f"ui.index_cache_bytes is {self.index_cache_bytes}; it must be at least 1048576")
        if not OFF <= self.port < 1 << 16:
            raise ConfigurationError(f"ui.port is {self.port}; it must be a port, 0 for a free one, or -1 for none")
        if not self.host:
            raise ConfigurationError("ui.host is empty; name an address to listen on, such as 127.0.0.1 or 0.0.0.0")

    @property
    def is_loopback(self) -> bool:
        """Whether only programs of this machine can reach the page."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
