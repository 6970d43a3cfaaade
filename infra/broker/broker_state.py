"""State files of a data directory: broker.json describes its broker, cluster.json its cluster, for other processes.

Each file is written whole or not at all. The start time of the process guards against a reused pid.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollstream.infra.broker.process_identity import ProcessIdentity, is_running
from rollstream.infra.config import BrokerLayout
from rollstream.topics.errors import BrokerUnavailable


@dataclass(frozen=True)
class BrokerState:
    """Contents of broker.json: the broker's process, its address, and the command that kills it."""

    process: ProcessIdentity
    host: str
    port: int
    provider: str
    log: str
    kill_command: tuple[str, ...]

    @property
    def bootstrap_servers(self) -> str:
        return f"{self.host}:{self.port}"


def find(data_dir: Path) -> BrokerState | None:
    """Return the state of the broker that runs on `data_dir`; None if there is none or its process has ended."""
    state = read(BrokerLayout(root=data_dir).state)
    return state if state and is_running(state.process) else None


def write(path: Path, state: BrokerState) -> None:
    _write_whole(path, {**dataclasses.asdict(state), "bootstrap_servers": state.bootstrap_servers})


def read(path: Path) -> BrokerState | None:
    try:
        fields = json.loads(path.read_text())
        return BrokerState(
            process=ProcessIdentity(**fields["process"]),
            host=fields["host"],
            port=fields["port"],
            provider=fields["provider"],
            log=fields["log"],
            kill_command=tuple(fields["kill_command"]),
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise BrokerUnavailable(
            f"{path} is not a broker's state ({error!r}): end its broker by hand if one runs, then remove that file"
        ) from None
    except OSError as error:
        raise _unreadable(path, error) from error


@dataclass(frozen=True)
class ClusterState:
    """Contents of cluster.json, which is stored next to the nodes' directories, also while no node runs."""

    cluster_id: str
    controller_ports: tuple[int, ...]

    @property
    def nodes(self) -> int:
        return len(self.controller_ports)


def read_cluster(layout: BrokerLayout) -> ClusterState | None:
    """Return the cluster of a data directory; None if there is none. Raises BrokerUnavailable for an invalid file."""
    try:
        fields = json.loads(layout.cluster.read_text())
        return ClusterState(fields["cluster_id"], tuple(map(int, fields["controller_ports"])))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise BrokerUnavailable(f"{layout.cluster} is not a cluster's state ({error!r}): give another --data") from None
    except OSError as error:
        raise _unreadable(layout.cluster, error) from error


def write_cluster(layout: BrokerLayout, state: ClusterState) -> None:
    _write_whole(layout.cluster, dataclasses.asdict(state))


def _unreadable(path: Path, error: OSError) -> BrokerUnavailable:
    return BrokerUnavailable(
        f"{path} cannot be read ({error}): give another --data, or ask the owner of that directory"
    )


def _write_whole(path: Path, fields: dict[str, Any]) -> None:
    aside = path.with_suffix(".json.new")
    aside.write_text(json.dumps(fields, indent=2))
    aside.replace(path)
