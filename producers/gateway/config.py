"""Settings of the gateway."""

from dataclasses import dataclass
from typing import Literal

from rollstream.topics.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """A gateway, behind which agents make model calls. Model, servers and temperature are those of section worker."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """Port to listen on. `rollstream run` starts a gateway only if it is set; `rollstream gateway` takes a free port if
    it is 0."""
    processes: int = 1
    """Gateways that `rollstream run` starts, on this port and the next ones: any of them serves any session."""
    replica_id: str = "gateway-0"
    """Name of the gateway, unique among those of a run that are up. One that restarts under its name takes up at once
    what it left."""
    api_key: str = ""
    """Secret of the gateway, as a reference: env:NAME or file:PATH. Requests below /rl need it as their Bearer token,
    and calls need it or the key of their session; empty: nothing is checked."""
    environment: str = "agent"
    """Environment of sessions that name none."""
    sampling: Literal["run", "agent"] = "run"
    """Sampling parameters of calls: run sets worker.temperature and removes the agent's (top_p, top_k, min_p,
    penalties, logit_bias); agent leaves them, and an episode that cannot be trained on for them is cancelled."""
    idle_timeout_s: float = 1800.0
    """Time without a record after which a session that is not ended counts as abandoned."""
    reward_timeout_s: float = 7 * 86400.0
    """Time that an ended session waits for its reward; then its episode is cancelled."""
    takeover_s: float = 10.0
    """Time after which another gateway writes the rollouts that a gateway began to write and did not finish."""
    max_sessions: int = 10_000
    """Most open sessions; beyond, starting one is refused with 429."""
    remembered_sessions: int = 10_000
    """Finished sessions that a gateway remembers of each partition, the newest, some 3 KiB each: a reward or an end of
    theirs may be repeated. Older ones are unknown to it."""
    max_calls: int = 1_000
    """Most calls of one session; beyond, a call is refused and the episode is cancelled."""
    max_group_size: int = 1_024
    """Most episodes of one group."""
    max_body_bytes: int = 1024 * 1024
    """Largest body of a request, in bytes; larger ones are refused with status 413."""
    metrics_interval_s: float = 5.0
    """Time between two records of the gateway on the metrics topic; 0 writes none."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigurationError(f"gateway.port is {self.port}; it must be between 0 and 65535")
        for name in ("idle_timeout_s", "reward_timeout_s", "takeover_s"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"gateway.{name} is {getattr(self, name)}; it must be above 0")
        for name in ("processes", "max_sessions", "remembered_sessions", "max_calls", "max_group_size"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"gateway.{name} is {getattr(self, name)}; it must be at least 1")
        if not self.environment:
            raise ConfigurationError("gateway.environment is empty; name the environment of sessions that name none")
