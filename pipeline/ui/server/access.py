"""Decides who may ask: by the host that a request names, its origin, its token, and a header that forms cannot send.

A page of a foreign site must neither read a run nor change it through the browser of somebody who may. DNS rebinding
gives such a page our address under its own name, so a request must name a host of ours. Its requests have a foreign
origin, and cannot have the header of a change without asking first, which nobody answers.
"""

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Mapping

from rollstream.pipeline.ui.config import UiConfig
from rollstream.topics.secrets import resolve

CHANGE_HEADER = "X-Rollstream"
_TOKEN_BYTES = 24
_LOCAL = "localhost"
_HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::[0-9]{1,5})?")


class Access:
    """The rules of one server."""

    def __init__(self, config: UiConfig) -> None:
        """Resolve the token, or draw one where it is required. Raises ConfigurationError if it cannot be resolved."""
        self._host = config.host
        self.token = resolve("ui.token", config.token)
        self._drawn = not self.token and not config.is_loopback
        if self._drawn:
            self.token = secrets.token_urlsafe(_TOKEN_BYTES)
        self._names = {name.lower().rstrip(".") for name in (_LOCAL, config.host, *config.names)}
        # Cookies are for a host and all its ports: each server has one of its own, which does not tell the token.
        self._session = hmac.digest(self.token.encode(), b"session of the page", hashlib.sha256).hex()
        self.cookie = f"rollstream-{self._session[:8]}"

    @property
    def session(self) -> str:
        """The value of the cookie of a browser that gave the token."""
        return self._session[8:]

    def url(self, port: int) -> str:
        """URL to open, with an address of this machine where the server listens on all; and with the token if it was
        drawn, as one that was set is known and must not be in logs."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        base = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        return f"{base}?token={self.token}" if self._drawn else base

    def knows_host(self, header: str) -> bool:
        """Whether a request names this server: by an address, which no name server can turn elsewhere, or by a name
        of ours, at any port, as ports are forwarded."""
        name = host_of(header)
        if name is None:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name.rstrip(".") in self._names
        return True

    def is_own_page(self, headers: Mapping[str, str]) -> bool:
        """Whether a request comes from our page, from an address that somebody typed, or from a program."""
        if headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
            return False
        origin = headers.get("Origin")
        if origin is None:
            return True
        scheme, _, place = origin.partition("://")
        return scheme in ("http", "https") and place.lower() == headers.get("Host", "").lower()

    def is_token(self, given: str) -> bool:
        """Whether this is the token; the time it takes does not tell how much of it is right."""
        return hmac.compare_digest(given.encode(errors="replace"), self.token.encode())

    def admits(self, cookie: str, authorization: str) -> bool:
        """Whether a request may be answered, by the cookie of a browser or the token of a program."""
        if not self.token:
            return True
        by_cookie = hmac.compare_digest(cookie.encode(errors="replace"), self.session.encode())
        scheme, _, given = authorization.partition(" ")
        return by_cookie or (scheme.lower() == "bearer" and self.is_token(given.strip()))


def host_of(header: str) -> str | None:
    """The name or address in a Host header, in small letters and without its port; None if it is no host."""
    match = _HOST.fullmatch(header.lower())
    return (match["address"] or match["name"]) if match else None
