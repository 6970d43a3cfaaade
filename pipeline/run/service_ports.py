"""Service ports of a run on one machine: the supervisor has service.port, its processes have the ports after it.

A list of them for Prometheus (file_sd_configs) is among the files of the run.
"""

import json
import logging
from dataclasses import replace
from pathlib import Path

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.run.role_spec import RoleSpec
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)


class ServicePorts:
    """Gives every process its own port, in the order in which they first start; no ports if service.port is 0."""

    def __init__(self, config: RunConfig, *, resumed: bool = False) -> None:
        """`resumed` tells whether processes of a previous supervisor go on: each of them keeps its port."""
        self._service, self._run, self._supervisor = config.service, config.run, config.service.port
        self.path: Path = config.run_dir / "targets.json"
        self._ports = _listed(self.path) if resumed else {}
        self._retired = set(self._ports)

    def place(self, spec: RoleSpec) -> RoleSpec:
        """Return the process with its port in its arguments, the same port at every start. An optional process, such as
        the page, gets none."""
        if not self._service.port or spec.optional:
            return spec
        port = self._ports.setdefault(spec.name, 1 + max(self._ports.values(), default=self._service.port))
        self._retired.discard(spec.name)
        self._write()
        return replace(spec, arguments=(*spec.arguments, "--set", f"service.port={port}"))

    def retire(self, name: str) -> None:
        """Remove a process that is no longer wanted from the list; its port stays reserved for it."""
        if self._service.port:
            self._retired.add(name)
            self._write()

    def _write(self) -> None:
        listed = {name: port for name, port in self._ports.items() if name not in self._retired}
        processes = {"supervisor": self._supervisor, **listed}
        targets = [
            {
                "targets": [f"{self._service.host}:{port}"],
                # Prometheus drops labels with this prefix, but each sample names its run and process.
                "labels": {"__meta_run": self._run, "__meta_process": name},
            }
            for name, port in processes.items()
        ]
        partial = self.path.with_suffix(".partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(targets, indent=2) + "\n")
            partial.replace(self.path)
        except OSError as error:  # the run goes on, and Prometheus has the earlier list
            event(logger, "targets_not_written", level=logging.WARNING, path=str(self.path), error=str(error))


def _listed(path: Path) -> dict[str, int]:
    """Return the ports in the list of a previous supervisor, by process name; none if the list cannot be read."""
    try:
        entries = json.loads(path.read_text())
        ports = {e["labels"]["__meta_process"]: int(e["targets"][0].rpartition(":")[2]) for e in entries}
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return {}
    ports.pop("supervisor", None)
    return ports
