"""Settings of the gateway."""

import re
from dataclasses import dataclass
from typing import Literal

from rollstream.topics.errors import ConfigurationError

_ADDRESS = re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?")


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """A gateway through which agents make model calls. Model, servers and temperature come from section worker."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """Port to listen on. `rollstream run` starts a gateway only if it is set; `rollstream role gateway` chooses a free
    port if it is 0."""
    public_url: str = ""
    """Address at which agents reach the gateways, such as https://gateway.example/rl of a proxy with TLS; the base_url
    of each session begins with it. If empty, it begins with http:// and the host that the request names."""
    processes: int = 1
    """Gateways that `rollstream run` starts, on this port and the following ports; each serves any session."""
    replica_id: str = "gateway-0"
    """Name of the gateway, unique among a run's running gateways. A gateway that restarts under the same name resumes
    its unfinished work at once."""
    api_key: str = ""
    """Secret of the gateway, as a reference: env:NAME or file:PATH. Starting a session needs it as Bearer token; calls,
    rewards and ends need it or the key of their session; if empty, nothing is checked."""
    environment: str = "agent"
    """Environment of sessions that do not name one."""
    sampling: Literal["run", "agent"] = "run"
    """Sampling parameters of calls: run sets worker.temperature and replaces the agent's (top_p, top_k, min_p,
    penalties, logit_bias, min_tokens, ignore_eos, bad_words, allowed_token_ids, thinking_token_budget, watermarking,
    use_beam_search) by neutral values; agent does this only for parameters that a call leaves out, and an episode that
    the agent's make unfit for training is cancelled."""
    idle_timeout_s: float = 1800.0
    """Time without a record after which a session that has not ended counts as abandoned."""
    reward_timeout_s: float = 7 * 86400.0
    """Time that an ended session waits for its reward; then its episode is cancelled."""
    takeover_s: float = 10.0
    """Time after which another gateway writes the rollouts that a gateway began to write but did not finish."""
    max_sessions: int = 10_000
    """Maximum number of open sessions; starting more is refused with status 429."""
    remembered_sessions: int = 10_000
    """Number of newest finished sessions that a gateway remembers for each partition, about 3 KiB each. Clients may
    repeat a reward or an end of a remembered session; older sessions are unknown to the gateway."""
    max_calls: int = 1_000
    """Maximum number of calls in one session; a further call is refused, and the episode is cancelled. It also limits
    the episodes of agents in workers, evaluators and `rollstream env check`."""
    max_group_size: int = 1_024
    """Maximum number of episodes in one group."""
    max_body_bytes: int = 1024 * 1024
    """Maximum size of a request's body in bytes; larger requests are refused with status 413."""
    metrics_interval_s: float = 5.0
    """Time between two records of the gateway on the metrics topic; 0 writes none."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535 or (self.port and self.port + self.processes - 1 > 65535):
            raise ConfigurationError(
                f"gateway.port is {self.port}; it must be between 0 and 65535, and so must the port of the last of "
                f"{self.processes} gateway.processes"
            )
        if self.public_url and not _ADDRESS.fullmatch(self.public_url):
            raise ConfigurationError(
                f"gateway.public_url is {self.public_url!r}; it must begin with http:// or https:// and a host, and "
                "may end with a path"
            )
        for name in ("idle_timeout_s", "reward_timeout_s", "takeover_s"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"gateway.{name} is {getattr(self, name)}; it must be above 0")
        for name in ("processes", "max_sessions", "remembered_sessions", "max_calls", "max_group_size"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"gateway.{name} is {getattr(self, name)}; it must be at least 1")
        if not self.environment:
            raise ConfigurationError(
                "gateway.environment is empty; set it to the environment of sessions that do not name one"
            )
