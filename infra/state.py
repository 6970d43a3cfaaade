"""What a broker's data directory says about the broker on it, so that another process finds it: broker.json.

Written whole or not at all. A state whose process is gone is no broker: the start time guards against a reused pid.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

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
    aside = path.with_suffix(".json.new")
    aside.write_text(json.dumps({**dataclasses.asdict(state), "bootstrap_servers": state.bootstrap_servers}, indent=2))
    aside.replace(path)


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
