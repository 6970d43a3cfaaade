"""Decides which requests are answered, by their host, origin and token, and by a header that forms cannot send.

A page of a foreign site must neither read nor change a run through the browser of an authorized user. DNS rebinding can
make the name of such a site resolve to this server, so a request must name a host of this server. Requests of a foreign
page have a foreign origin. They cannot carry the header for changes without a CORS preflight, which is never granted.
"""

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Mapping

from rollstream.pipeline.ui_config import UiConfig
from rollstream.topics.secrets import resolve

CHANGE_HEADER = "X-Rollstream"
_TOKEN_BYTES = 24
_LOCAL = "localhost"
_HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::[0-9]{1,5})?")


class Access:
    """The rules of one server."""

    def __init__(self, config: UiConfig) -> None:
        """Resolve the token, or generate one if required but not set. Raises ConfigurationError if resolving fails."""
        self._host = config.host
        self.token = resolve("ui.token", config.token)
        self._drawn = not self.token and not config.is_loopback
        if self._drawn:
            self.token = secrets.token_urlsafe(_TOKEN_BYTES)
        self._names = {name.lower().rstrip(".") for name in (_LOCAL, config.host, *config.names)}
        # Ports of a host share cookies, so each server has its own cookie name. The cookie does not reveal the token.
        self._session = hmac.digest(self.token.encode(), b"session of the page", hashlib.sha256).hex()
        self.cookie = f"rollstream-{self._session[:8]}"

    @property
    def session(self) -> str:
        """Value of the cookie for a browser that sent the token."""
        return self._session[8:]

    def url(self, port: int) -> str:
        """Return the URL to open, with a loopback address if the server listens on all addresses. It contains the token
        only if the server generated it: users know a token that they set, and it must not get into logs."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        base = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        return f"{base}?token={self.token}" if self._drawn else base

    def knows_host(self, header: str) -> bool:
        """Whether a request names this server, by one of its names or by an address, which DNS cannot redirect. Any
        port is accepted, because ports may be forwarded."""
        name = host_of(header)
        if name is None:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name.rstrip(".") in self._names
        return True

    def is_own_page(self, headers: Mapping[str, str]) -> bool:
        """Whether a request comes from this server's page, from an address that a user typed, or from a program."""
        if headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
            return False
        origin = headers.get("Origin")
        if origin is None:
            return True
        scheme, _, place = origin.partition("://")
        return scheme in ("http", "https") and place.lower() == headers.get("Host", "").lower()

    def is_token(self, given: str) -> bool:
        """Whether this is the token; the comparison takes the same time however much of the token is right."""
        return hmac.compare_digest(given.encode(errors="replace"), self.token.encode())

    def admits(self, cookie: str, authorization: str) -> bool:
        """Whether a request may be answered, by its cookie from a browser or its token from a program."""
        if not self.token:
            return True
        by_cookie = hmac.compare_digest(cookie.encode(errors="replace"), self.session.encode())
        scheme, _, given = authorization.partition(" ")
        return by_cookie or (scheme.lower() == "bearer" and self.is_token(given.strip()))


def host_of(header: str) -> str | None:
    """Return the name or address in a Host header, in lower case and without port; None if the header is invalid."""
    match = _HOST.fullmatch(header.lower())
    return (match["address"] or match["name"]) if match else None
