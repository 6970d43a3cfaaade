"""Names and keys of sessions. Pure.

A session is named `GROUP.MEMBER`, so its name contains its group, which determines its partition of `calls`. A worker's
further attempts at the same episode are named `GROUP.MEMBER-2` and so on. A session key is the name and a code computed
from it with the gateway's secret, so any gateway with the same secret can check it, and none stores it.
"""

import hashlib
import hmac
import re

from rollstream.topics.errors import RecordError
from rollstream.topics.wire.keys import encode_key, partition_of

_GROUP = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_MEMBER = re.compile(r"[0-9]+(-[0-9]+)?")
_FURTHER_ATTEMPT = re.compile(r"(.+\.[0-9]+)-[0-9]+")
_SEPARATOR = "~"
_CODE_BYTES = 16


def session_name(group: str, member: int, attempt: int = 1) -> str:
    """Return the name of an attempt's session. Raises RecordError if the group's name cannot be part of a URL."""
    if not _GROUP.fullmatch(group):
        raise RecordError(
            f"group_id {group[:64]!r} cannot be part of a URL: use up to 200 letters, digits, '.', '_' and '-'"
        )
    return f"{group}.{member}" if attempt == 1 else f"{group}.{member}-{attempt}"


def group_of(session: str) -> str:
    """Return the group in a session's name. Raises RecordError if the name is invalid."""
    group, _, member = session.rpartition(".")
    if not (group and _MEMBER.fullmatch(member)):
        raise RecordError(f"no session is named {session[:64]!r}; POST /rl/start_session starts one")
    return group


def episode_of(session: str) -> str:
    """Return the episode of a session, `GROUP.MEMBER`, which all attempts at a member share."""
    again = _FURTHER_ATTEMPT.fullmatch(session)
    return again[1] if again else session


def partition_of_group(group: str, partitions: int) -> int:
    """Return the partition of `calls` that holds all sessions of a group."""
    return partition_of(encode_key(group), partitions)


def session_key(session: str, secret: str) -> str:
    """Return the key that authorizes an agent to make the calls of a session."""
    return f"{session}{_SEPARATOR}{_code(session, secret)}"


def session_of_key(key: str, secret: str) -> str | None:
    """Return the session of a key; None if the key was not made with this secret."""
    session, separator, code = key.rpartition(_SEPARATOR)
    right = separator and hmac.compare_digest(code.encode(errors="replace"), _code(session, secret).encode())
    return session if right else None


def _code(session: str, secret: str) -> str:
    return hashlib.blake2b(
        session.encode(errors="replace"), key=secret.encode()[:64], digest_size=_CODE_BYTES
    ).hexdigest()
