"""Requests samples from inference servers and returns token ids exactly as the server sampled them.

Supports rollstream's server, vLLM and SGLang. Transient failures (no connection, 429, 502, 503, 504, an aborted sample)
are retried until a deadline, on another server if there is one; other errors are raised at once.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import aiohttp
from numpy.typing import NDArray

from rollstream.producers.config import WorkerConfig
from rollstream.producers.flow.policy_versions import UNKNOWN, PolicyFollower, PolicyVersions
from rollstream.producers.inference.answers import Sample, refusal_of, samples_of, token_versions
from rollstream.producers.inference.errors import InferenceRefused, InferenceUnavailable
from rollstream.producers.inference.replay_arrays import SamplingMask
from rollstream.producers.inference.replicas import Replica, ReplicaSet
from rollstream.producers.inference.requests import (
    LABEL_ROUTES,
    EngineName,
    SampleRequest,
    engine_request,
    listed_models,
    takes_tokens,
)
from rollstream.producers.inference.retries import (
    MOST_FAULTS,
    RETRIED_STATUS,
    Busy,
    NoTurn,
    ServerFault,
    ServerTurns,
    is_fault,
    retry_after_s,
)
from rollstream.topics.logs import event
from rollstream.topics.records import Float32, Int32, Int64
from rollstream.topics.secrets import resolve
from rollstream.topics.watched_sockets import watched_socket

logger = logging.getLogger(__name__)
T = TypeVar("T")
_NEW_LABEL_S = 1.0
"""Longest wait for the manifest of a version that has just sampled an answer."""
_NO_SUCH_ROUTE = {403, 404, 405}
_MISSING_S = 30.0
"""Time until a label without a version on record is looked up again."""
_LOOK_S = 5.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """One sample of N tokens, with data from its request and from the policy versions on record."""

    text: str
    """Text sampled, without the end token or stop string."""
    truncated: bool
    """Whether a token limit cut the sample off."""
    prompt_tokens: Int32
    """Token ids of the prompt, as the server reports them."""
    tokens: Int32
    """Token ids sampled, including the end token; shape [N]."""
    logprobs: Float32
    """Log-probabilities of `tokens`."""
    versions: Int64
    """Policy version that sampled each token, -1 where it is unknown; shape [N]."""
    weight_step: int = UNKNOWN
    """Learner step of the lowest version; -1 if the version is not on record."""
    replica_id: str = "unknown"
    """Name of the server."""
    sampling_params: Mapping[str, str]
    """Sampling parameters of the request."""
    timestamp: float
    """Wall time of the answer, seconds since the Unix epoch."""
    inference_time_s: float
    """Seconds between request and answer."""
    experts: NDArray[Any] | None = None
    """Experts of the tokens of prompt and answer, see replay_arrays.experts_of; None unless the request asks for them
    and the server names them."""
    mask: SamplingMask | None = None
    """Tokens among which each token was drawn, if the request has filters and the server names them."""

    @property
    def lowest_version(self) -> int:
        """Lowest policy version that sampled a token; -1 if the version of any token is unknown."""
        return int(self.versions.min()) if len(self.versions) else UNKNOWN

    @property
    def highest_version(self) -> int:
        """Highest policy version that sampled a token; -1 if no version is known."""
        return int(self.versions.max()) if len(self.versions) else UNKNOWN


class CompletionsClient:
    """An async client over one or more servers of the same model; use it as an async context manager."""

    def __init__(
        self,
        base_urls: Sequence[str],
        *,
        model: str = "policy",
        api_key: str = "",
        timeout_s: float = 60.0,
        engine: Literal["auto"] | EngineName = "auto",
        max_version_skew: int = 2,
        policies: PolicyFollower | None = None,
    ) -> None:
        """`base_urls` end in /v1, as OpenAI's clients expect; `timeout_s` bounds a call, retries included.

        `api_key` may be a reference (rollstream.topics.secrets). `policies` maps labels of weights to versions and
        steps; without it only labels that are numbers name a version. Raises ConfigurationError if the key cannot be
        resolved.
        """
        api_key = resolve("worker.api_key", api_key)
        self.model = model
        self.timeout_s = timeout_s
        self._engine = engine
        self._replicas = ReplicaSet(base_urls, max_version_skew=max_version_skew)
        self._turns = ServerTurns(self._replicas)
        self._policies = policies
        self._missing: dict[str, float] = {}
        """Labels without a version on record, each with the time of its next lookup."""
        self._sessions = 0
        self._looks: set[asyncio.Task[None]] = set()
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http: aiohttp.ClientSession | None = None

    @property
    def newest_version(self) -> int:
        """Newest policy version in any answer; -1 before the first."""
        return self._replicas.newest_version

    @property
    def urls(self) -> tuple[str, ...]:
        """Servers in use."""
        return tuple(replica.url for replica in self._replicas.replicas)

    def ask(self, urls: Sequence[str]) -> None:
        """Use these servers, at least one, from now on. Other servers may still answer calls in flight."""
        self._replicas.use(urls)

    async def __aenter__(self) -> Self:
        # The deadline of each call bounds the time; the caller's concurrency bounds the connections.
        self._http = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0, socket_factory=watched_socket),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for look in self._looks:
            look.cancel()
        await asyncio.gather(*self._looks, return_exceptions=True)
        if self._http:
            await self._http.close()

    async def complete(self, request: SampleRequest) -> list[Completion]:
        """Return the samples of a request, in the order of the choices.

        Raises InferenceUnavailable after the deadline, ContextTooLong for a prompt that leaves no room, and
        InferenceRefused if the server refuses the request or its answer cannot be used.
        """
        began = time.monotonic()
        samples, replica = await self._ask(
            request.session, "/completions", lambda chosen: self._samples(chosen, request)
        )
        if len(samples) != request.n:
            raise InferenceRefused(f"{replica.url} answered with {len(samples)} choices instead of n={request.n}")
        elapsed_s = time.monotonic() - began
        known = await self._known_versions({span.label for sample in samples for span in sample.spans})
        completions = [_completion(sample, replica.url, request, known, elapsed_s) for sample in samples]
        highest = max(completion.highest_version for completion in completions)
        self._replicas.answered(replica, highest, time.monotonic())
        return completions

    async def tokenize(self, text: str, *, session: str = "") -> list[int]:
        """Return the token ids of a text, without special tokens, from a server's tokenizer (vLLM's /tokenize)."""
        return (await self._ask(session, "/tokenize", lambda replica: self._tokens(replica, text)))[0]

    async def version(self) -> int:
        """Return the lowest policy version in the model lists of the servers that answer; -1 if none names a version.

        Raises InferenceUnavailable if no server answers within the deadline.
        """
        await self._ask("", "/models", self._look)
        replicas = self._replicas.replicas
        await asyncio.gather(*map(self._look_or_rest, replicas if len(replicas) > 1 else ()))
        return min((r.version for r in replicas if r.version >= 0 and not r.failures), default=UNKNOWN)

    async def _ask(self, session: str, route: str, call: Callable[[Replica], Awaitable[T]]) -> tuple[T, Replica]:
        """Return the result of `call` and the server that answered. Raises InferenceUnavailable at the deadline, and
        not before it, even if no server may be asked any more until then."""
        deadline = time.monotonic() + self.timeout_s
        if not session:
            self._sessions += 1
            session = str(self._sessions)
        self._look_around()
        replica = self._replicas.choose(session, time.monotonic())
        cause: BaseException | None = None
        faults = 0
        while True:
            try:
                replica = await self._turns.next(session, deadline, again=cause is not None)
            except NoTurn as error:
                reasons = [str(cause) or type(cause).__name__] if cause is not None else []
                reasons += [str(error)] if str(error) else []
                raise InferenceUnavailable(
                    f"no answer from {replica.url}{route} within {self.timeout_s:g} s ({', and '.join(reasons)}); is "
                    "the inference server up, and are weights published?"
                ) from cause
            asked_s = None
            try:
                async with asyncio.timeout(max(deadline - time.monotonic(), 0.001)):
                    answer = await call(replica)
                self._replicas.answered(replica, UNKNOWN, time.monotonic())
                return answer, replica
            except Busy as error:
                cause, asked_s = error, error.retry_after_s
                if isinstance(error, ServerFault):
                    faults += 1
                    if faults == MOST_FAULTS:
                        raise error.refusal from error
            except aiohttp.InvalidURL as error:
                raise InferenceRefused(
                    f"{replica.url} is not a URL; set worker.inference_urls to URLs like http://host:8000/v1"
                ) from error
            except (aiohttp.ClientError, TimeoutError) as error:
                cause = error
            self._replicas.failed(replica, time.monotonic(), asked_s)

    async def _samples(self, replica: Replica, request: SampleRequest) -> list[Sample]:
        engine = await self._engine_of(replica)
        if takes_tokens(engine) and isinstance(request.prompt, str):
            request = replace(request, prompt=await self._tokens(replica, request.prompt))
        route = engine_request(request, engine, self.model, extensions=replica.named)
        headers = {"X-Session-ID": request.session} if request.session else {}
        try:
            body = await self._json(replica, "POST", route.path, route.payload, headers)
        except InferenceRefused as error:
            if self._engine != "auto" or engine == "rollstream" or error.status not in _NO_SUCH_ROUTE:
                raise
            # The engine is too old for its route or was started without it; its completions work, but name no versions.
            event(logger, "route_missing", level=logging.WARNING, url=replica.url, engine=engine, error=str(error))
            replica.engine = "rollstream"
            return await self._samples(replica, request)
        prompt = None if isinstance(request.prompt, str) else request.prompt
        samples = samples_of(body, route.dialect, source=replica.url, prompt_tokens=prompt)
        if any(sample.aborted for sample in samples):
            raise Busy(f"{replica.url} aborted the request")
        return samples

    async def _engine_of(self, replica: Replica) -> EngineName:
        if self._engine != "auto":
            return self._engine
        if not replica.engine:
            await self._look(replica)
        return replica.engine or "rollstream"

    async def _tokens(self, replica: Replica, text: str) -> list[int]:
        payload = {"model": self.model, "prompt": text, "add_special_tokens": False}
        body = await self._json(replica, "POST", "/tokenize", payload)
        tokens = body.get("tokens") if isinstance(body, dict) else None
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise InferenceRefused(f"{replica.url} answered /tokenize without tokens")
        return tokens

    async def _look(self, replica: Replica) -> int:
        """Ask a server for its list of models; note its kind and version."""
        body = await self._json(replica, "GET", "/v1/models", None)
        if not isinstance(body, dict):
            raise InferenceRefused(f"{replica.url} answered /v1/models without a JSON object")
        engine, version = listed_models(body)
        replica.engine, replica.named = engine or "rollstream", engine is not None
        if version < 0 and replica.engine in LABEL_ROUTES:
            version = await self._labelled(replica, LABEL_ROUTES[replica.engine])
        self._replicas.looked(replica, version, time.monotonic())
        return version

    async def _labelled(self, replica: Replica, route: str) -> int:
        """Return the version that the label of an engine's weights names; -1 if the label or its version is unknown."""
        try:
            body = await self._json(replica, "GET", route, None)
        except (InferenceRefused, ServerFault):
            return UNKNOWN
        label = body.get("weight_version") if isinstance(body, dict) else None
        if not isinstance(label, str):
            return UNKNOWN
        return (await self._known_versions({label})).version_of(label)

    def _look_around(self) -> None:
        """Probe servers that get no requests, so that they get requests again once they are up and up to date."""
        for replica in self._replicas.to_look_at(time.monotonic()):
            look = asyncio.create_task(self._look_or_rest(replica))
            self._looks.add(look)
            look.add_done_callback(self._looks.discard)

    async def _look_or_rest(self, replica: Replica) -> None:
        try:
            async with asyncio.timeout(_LOOK_S):
                await self._look(replica)
        except Busy as error:
            self._replicas.failed(replica, time.monotonic(), error.retry_after_s)
        except (aiohttp.ClientError, TimeoutError, InferenceRefused):
            self._replicas.failed(replica, time.monotonic())

    async def _known_versions(self, labels: Collection[str]) -> PolicyVersions:
        """Return the versions on record, after reading new records if `labels` are not known yet."""
        if self._policies is None:
            return PolicyVersions()
        versions = self._policies.versions
        now = time.monotonic()
        fresh = [label for label in labels if versions.lacks([label]) and now >= self._missing.get(label, 0.0)]
        if fresh and not await asyncio.to_thread(self._policies.await_labels, fresh, _NEW_LABEL_S):
            self._missing = dict.fromkeys(fresh, now + _MISSING_S) | {
                label: until for label, until in self._missing.items() if until > now
            }
        return versions

    async def _json(
        self,
        replica: Replica,
        method: str,
        path: str,
        payload: Mapping[str, Any] | None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Return the JSON of an answer. Raises Busy for a temporary refusal or a fault, InferenceRefused for any other
        refusal."""
        assert self._http, "used outside its context manager"
        url = replica.url.removesuffix("/v1") + path
        async with self._http.request(method, url, json=payload, headers=headers) as response:
            if response.status == 200:
                try:
                    return await response.json(content_type=None)
                except (ValueError, RecursionError) as error:
                    raise InferenceRefused(f"{url} answered something that is not JSON: {error}") from error
            refusal = refusal_of(response.status, await response.text(errors="replace"), source=url)
            if response.status in RETRIED_STATUS:
                raise Busy(str(refusal), retry_after_s(response.headers.get("Retry-After")))
            if is_fault(response.status):
                raise ServerFault(refusal)
            raise refusal


def client_of(config: WorkerConfig, policies: PolicyFollower | None = None) -> CompletionsClient:
    """Return a client of the servers that a worker's settings name. Raises ConfigurationError as the client does."""
    return CompletionsClient(
        config.inference_urls,
        model=config.model,
        api_key=config.api_key,
        timeout_s=config.request_timeout_s,
        engine=config.engine,
        max_version_skew=config.max_version_skew,
        policies=policies,
    )


def _completion(
    sample: Sample, url: str, request: SampleRequest, known: PolicyVersions, elapsed_s: float
) -> Completion:
    versions = token_versions(sample.spans, len(sample.tokens), known.version_of)
    stop = {"stop": str(list(request.stop))} if request.stop else {}
    return Completion(
        text=sample.text,
        truncated=sample.truncated,
        prompt_tokens=sample.prompt_tokens,
        tokens=sample.tokens,
        logprobs=sample.logprobs,
        versions=versions,
        weight_step=known.step_of(int(versions.min())) if len(versions) else UNKNOWN,
        replica_id=sample.replica_id or url,
        sampling_params={
            "temperature": str(request.temperature),
            **{name: str(value) for name, value in request.filters.parameters.items()},
            "max_tokens": str(request.max_tokens),
            "seed": str(request.seed),
            **stop,
        },
        timestamp=time.time(),
        inference_time_s=elapsed_s,
        mask=sample.mask if request.filters.active else None,
        experts=sample.experts if request.routed_experts else None,
    )
