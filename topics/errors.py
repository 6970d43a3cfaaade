"""Errors shown to people: each names the fault, the place and the remedy in one line.

Commands print the message and exit with `exit_code`; a traceback appears only with --debug.
"""


class RollstreamError(Exception):
    """Base of every error raised on purpose; commands exit with `exit_code`."""

    exit_code = 2


class ConfigurationError(RollstreamError):
    """A setting is unknown, of the wrong type, or contradicts another."""


class BrokerUnavailable(RollstreamError):
    """No broker answers at the address given, none can be started here, or a request to the brokers fails."""


class AccessDenied(BrokerUnavailable):
    """The brokers refuse this client: its credentials, its certificate, or an operation that its user may not do."""


class RegistryUnavailable(RollstreamError):
    """The schema registry does not answer, or its answer is unusable."""


class SchemaRefused(RollstreamError):
    """The schema registry lacks a schema, refuses it, or refuses this client."""


class TopicError(RollstreamError):
    """A topic is missing, was recreated, or differs from the catalogue in a way that cannot be repaired."""


class RecordError(RollstreamError):
    """A record cannot be encoded, or the bytes read are not one of our records."""


class RecordTooLarge(RecordError):
    """A record exceeds the size limit; its producer refuses it."""


class DeliveryError(RollstreamError):
    """The broker did not accept a record."""


class StateRefused(RollstreamError):
    """Continuing might lose or repeat records, or change results; for example, stored state and the log contradict each
    other."""


class Fenced(RollstreamError):
    """Another process took this process's place, so that this one must not start again."""

    exit_code = 3


class Lapsed(Fenced):
    """A transaction outlived its timeout, and no other process has this one's place: the process may start again."""

    exit_code = 2


class DeadlineExceeded(RollstreamError):
    """An awaited event did not happen in time."""


def brief(error: BaseException) -> str:
    """Return the class and message of an error, in at most 200 characters."""
    # Not repr(error), which contains all the bytes if the error is a UnicodeDecodeError.
    return f"{type(error).__name__}: {error}"[:200]
