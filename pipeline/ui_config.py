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
    """Port of the page that `rollstream run` and `rollstream demo` serve; 0: a free port, -1: no page.
    `rollstream ui` uses a free port if it is -1."""
    token: str = ""
    """Secret that a browser must send once, as ?token=; empty: none on a loopback address, and on any other
    address a random secret, which is printed."""
    names: tuple[str, ...] = ()
    """Host names by which browsers may reach the page besides addresses and localhost, such as the name of a proxy."""
    index_cache_bytes: int = 256 * 2**20
    """Memory to cache the page's index, which takes about a kilobyte for each rollout; parts of a larger index are read
    from the disk."""

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
