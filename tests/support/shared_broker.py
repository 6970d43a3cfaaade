"""One broker for all processes of a test session: the first that needs it starts it, and stops it at the end."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rollstream.infra.broker.broker import LocalBroker
from rollstream.infra.config import BrokerConfig
from tests.conftest import CLASS_ARCHIVE

JAVA_OPTIONS = "JDK_JAVA_OPTIONS"


@contextmanager
def shared_broker(config: BrokerConfig) -> Iterator[LocalBroker]:
    """The broker on the data directory of `config`, which is the same in all processes.

    It is bound to the process that starts it, which therefore waits at the end until no other uses it.
    """
    place = config.data_dir
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_suffix(".users").open("a") as users:
        with place.with_suffix(".starting").open("a") as starting:
            fcntl.flock(starting, fcntl.LOCK_EX)
            fcntl.flock(users, fcntl.LOCK_SH)  # waits for one that is stopped, and holds off the stop of a running one
            broker = LocalBroker.find(place)
            own = None if broker else _started(config)
        yield own or broker  # type: ignore[misc]
        if own:
            fcntl.flock(users, fcntl.LOCK_EX)
            own.stop()


def _started(config: BrokerConfig) -> LocalBroker:
    """Start a broker; the first in this environment writes the archive of classes when it stops."""
    with pytest.MonkeyPatch.context() as patch:
        if JAVA_OPTIONS not in os.environ:
            patch.setenv(JAVA_OPTIONS, f"-XX:ArchiveClassesAtExit={CLASS_ARCHIVE} -Xlog:cds=off -Xlog:cds+dynamic=off")
        return LocalBroker.start(config=config, bound_to_parent=True)
