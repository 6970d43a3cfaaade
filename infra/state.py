"""What a data directory says about the broker on it (broker.json) or the cluster in it (cluster.json), so that another
process finds it.

Written whole or not at all. A state whose process is gone is no broker: the start time guards against a reused pid.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.config import Layout
from infra.processes import ProcessIdentity, is_running
from topics.errors import BrokerUnavailable


@dataclass(frozen=True)
class BrokerState:
    """What broker.json holds: the process, the address and how to kill it."""

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
    """The state of the broker that runs on `data_dir`; None where there is none or its process is gone."""
    state = read(Layout(root=data_dir).state)
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


@dataclass(frozen=True)
class ClusterState:
    """What cluster.json holds, beside the directories of the nodes; it stays while nothing runs."""

    cluster_id: str
    controller_ports: tuple[int, ...]

    @property
    def nodes(self) -> int:
        return len(self.controller_ports)


def read_cluster(layout: Layout) -> ClusterState | None:
    """The cluster of a data directory; None where there is none. Raises BrokerUnavailable for nonsense."""
    try:
        fields = json.loads(layout.cluster.read_text())
        return ClusterState(fields["cluster_id"], tuple(map(int, fields["controller_ports"])))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise BrokerUnavailable(f"{layout.cluster} is not a cluster's state ({error!r}): give another --data") from None


def write_cluster(layout: Layout, state: ClusterState) -> None:
    _write_whole(layout.cluster, dataclasses.asdict(state))


def _write_whole(path: Path, fields: dict[str, Any]) -> None:
    aside = path.with_suffix(".json.new")
    aside.write_text(json.dumps(fields, indent=2))
    aside.replace(path)
