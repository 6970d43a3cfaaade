"""The page that accompanies a run: a process that `rollstream run` and `rollstream demo` start if ui.port is set.

It is a separate process, because filling the index would keep the supervisor's thread from its roles, and because a
failure of the page must not affect the roles: the run goes on without the page, and reports that.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rollstream.infra.broker.ports import free_port
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.deployment.container_settings import withheld_variables
from rollstream.pipeline.run.supervised_role import RoleSpec
from rollstream.pipeline.run.supervisor import Supervisor
from rollstream.pipeline.ui.server.access import Access
from rollstream.pipeline.ui_config import OFF

PAGE = "page"
_TOKEN = "ROLLSTREAM_UI__TOKEN"
_STOP_S = 3.0


class RunPage:
    """The process of the page, if the settings ask for one."""

    def __init__(self, config: RunConfig, path: Path, supervisor: Supervisor) -> None:
        """Start the process without waiting for it; `path` is the configuration that the run's processes share."""
        self._run, self._supervisor = config.run, supervisor
        self._said = ""
        self._wanted = config.ui.port != OFF
        if not self._wanted:
            return
        ui = replace(config.ui, port=config.ui.port or free_port(config.ui.host))
        access = Access(ui)
        self._url = access.url(ui.port)
        flags = ("--config", str(path), "--set", f"ui.port={ui.port}")
        environment = dict.fromkeys(withheld_variables(config, ()), "")
        if access.token:
            environment[_TOKEN] = access.token
        supervisor.start(
            RoleSpec(
                name=PAGE,
                arguments=("-P", "-m", "rollstream", "ui", *flags),
                environment=environment,
                optional=True,
                ready_timeout_s=config.supervisor.ready_timeout_s,
                stop_timeout_s=_STOP_S,
                restarts=config.supervisor.restarts,
                backoff_s=config.supervisor.backoff_s,
            )
        )

    def tell(self, say: Callable[[str], None]) -> None:
        """Say the page's address when the page listens, and the reason if it fails for good, each only once."""
        if not self._wanted:
            return
        failure = self._supervisor.failure(PAGE)
        if failure:
            news = f"the page of run {self._run} {failure}; the run goes on: `rollstream ui` shows it, too"
        elif self._supervisor.is_ready(PAGE):
            news = f"page of run {self._run}: {self._url}"
        else:
            return
        if news != self._said:
            self._said = news
            say(news)
