"""The errors people see: each names what was wrong, where, and the remedy, in one line.

Commands print the message and exit with `exit_code`; a traceback appears only with --debug.
"""


class RollstreamError(Exception):
    """Base of every error raised on purpose; `exit_code` is what a command exits with."""

    exit_code = 2


class ConfigurationError(RollstreamError):
    """A setting is unknown, of the wrong type, or contradicts another."""


class BrokerUnavailable(RollstreamError):
    """No broker answers at the address given, or none can be started here."""


class TopicError(RollstreamError):
    """A topic is missing, was recreated, or differs from the catalogue in a way that cannot be mended."""


class RecordError(RollstreamError):
    """A record cannot be encoded, or the bytes read are not a record of ours."""


class RecordTooLarge(RecordError):
    """A value exceeds the record limit; refused where it is produced."""


class DeliveryError(RollstreamError):
    """The broker did not accept a record."""


class StateRefused(RollstreamError):
    """Stored state and the log contradict each other; guessing would lose or repeat rollouts."""


class Fenced(RollstreamError):
    """Another process took over this one's transactional id, or its transaction outlived the timeout."""

    exit_code = 3


class DeadlineExceeded(RollstreamError):
    """Something awaited did not happen in time."""
