"""RunLease: the right of one `rollstream run` to supervise a run, as a record on the run's topic `control`.

Another `rollstream run` of the run is refused, on any machine, with the place of the first. Clocks of two machines are
never compared: to learn whether a supervisor still runs, the next one waits for a further record of it.
"""

import logging
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rollstream.infra.broker.process_identity import ProcessIdentity, identify
from rollstream.pipeline.command_line.text_tables import utc_time
from rollstream.pipeline.process.role_process import ORPHAN_GRACE_S
from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.control.named_records import write
from rollstream.topics.control.steering import SUPERVISOR, SteeringFollower, desired_state
from rollstream.topics.errors import ConfigurationError, DeadlineExceeded, DeliveryError, Fenced
from rollstream.topics.kafka.recovering_sender import RecoveringSender
from rollstream.topics.kafka.sender import Failure
from rollstream.topics.logs import event
from rollstream.topics.records import RunSupervisor
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key

logger = logging.getLogger(__name__)
RENEW_S = 5.0
"""Time between two records of a supervisor."""
_MARGIN_S = RENEW_S + ORPHAN_GRACE_S
"""Time after which nothing of a supervisor is left, in addition to the time that its processes wait for the next."""
_LOOK_S = 0.1
_OWN_RECORD_S = 30.0


class RunLease(Closing):
    """The lease of this process on a run; `close` gives it back."""

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        following: SteeringFollower,
        *,
        directory: Path,
        adoption_s: float,
        previous: ProcessIdentity | None = None,
        take_over: bool = False,
        me: ProcessIdentity | None = None,
    ) -> None:
        """Take the lease. `directory` is the folder of the run's files; `previous` is the process that supervised
        the run in this folder until it was killed, and whose lease therefore has ended. `take_over` ends the lease of
        another process.

        Raises ConfigurationError if another process supervises the run, Fenced if one took the lease at the same time,
        and TopicError, BrokerUnavailable or DeliveryError if the lease cannot be recorded.
        """
        self._kafka, self._run, self._following = kafka, run, following
        before = following.state.supervisors
        holder = following.state.supervisor
        if not (holder is None or take_over or (previous and holder.supervisor == _text(previous))):
            self._await_end_of(holder)
        me = me or identify(os.getpid())
        assert me is not None, "this process runs"
        self._record = RunSupervisor(
            supervisor=_text(me),
            epoch=0 if holder is None else holder.epoch + 1,
            host=socket.gethostname(),
            pid=me.pid,
            directory=str(directory.absolute()),
            began=time.time(),
            lease_s=adoption_s + _MARGIN_S,
            wall_time=time.time(),
        )
        own = self._record.supervisor
        write(kafka, run, SUPERVISOR, {**dict.fromkeys(before), own: self._record})
        deadline = time.monotonic() + _OWN_RECORD_S
        while own not in following.state.supervisors and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        self._sender = RecoveringSender(kafka, on_failure=self._lose)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()
        try:
            self.check()
        except Fenced:
            self.close()
            raise

    def check(self) -> None:
        """Raise Fenced if another process supervises the run now."""
        newest = self._following.state.supervisor
        if newest is not None and newest.rank > self._record.rank:
            raise Fenced(
                f"run {self._run} was taken over: it is supervised {_place(newest)}; this `rollstream run` stops its "
                "own processes and ends"
            )

    def close(self) -> None:
        """Give the lease back, so that another process need not wait for its end."""
        self._closing.set()
        self._thread.join()
        self._send(None)

    def _await_end_of(self, holder: RunSupervisor) -> None:
        """Wait until a lease has ended. Raises ConfigurationError if its process, or another, writes a record."""
        print(
            f"run {self._run} was supervised {_place(holder)}, until it ended without a word, or still is: this "
            f"`rollstream run` waits {holder.lease_s:.0f} s for a sign of it; `--take-over` does not wait",
            flush=True,
        )
        deadline = time.monotonic() + holder.lease_s
        newest: RunSupervisor | None = holder
        while newest == holder:
            if time.monotonic() < deadline:
                time.sleep(_LOOK_S)
                newest = self._following.state.supervisor
            else:
                # The follower may have lost its brokers meanwhile.
                newest = desired_state(self._kafka, self._run).supervisor
                if newest == holder:
                    return
        if newest is not None:
            raise ConfigurationError(
                f"run {self._run} is supervised {_place(newest)}; stop it there, or take the run over with "
                "`rollstream run --take-over`, which ends it there"
            )

    def _renew(self) -> None:
        while not self._closing.wait(RENEW_S):
            self._send(encode(replace(self._record, wall_time=time.time())))

    def _send(self, value: bytes | None) -> None:
        key = encode_key(SUPERVISOR, self._record.supervisor)
        with suppress(DeliveryError, DeadlineExceeded):  # the next record may succeed, and `_lose` logs failures
            self._sender.send(topic_name(self._run, "control"), value, key, partition=0, timeout_s=0.0)
            self._sender.waiting(RENEW_S)

    def _lose(self, failure: Failure) -> None:
        event(logger, "lease_not_renewed", level=logging.WARNING, error=failure.reason, again_in_s=RENEW_S)


def _text(process: ProcessIdentity) -> str:
    return f"{process.started}:{process.pid}"


def _place(supervisor: RunSupervisor) -> str:
    return (
        f"on {supervisor.host} by process {supervisor.pid} since {utc_time(supervisor.began)} (its files: "
        f"{supervisor.directory})"
    )
