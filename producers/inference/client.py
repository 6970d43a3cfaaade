"""Asks OpenAI-compatible completion servers for samples, and returns token ids exactly as the server sampled them.

Ours and vLLM (return_token_ids) answer in one shape. What may pass (no connection, 429, 502, 503, 504) is tried again,
on the next server, until a deadline; what will not (other errors) is raised at once.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp
import numpy as np

from topics.errors import RollstreamError
from topics.records import Float32, Int32
from topics.secrets import resolve

_RETRIED_STATUS = {429, 502, 503, 504}
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0


class InferenceUnavailable(RollstreamError):
    """No server answered within the deadline."""


class InferenceRefused(RollstreamError):
    """A server refused the request, or its answer lacks what a rollout needs; asking again would not help."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sample."""

    text: str
    """What was sampled, without the end token or stop string."""
    truncated: bool
    """Whether a token limit cut it off."""
    prompt_tokens: Int32
    """The prompt as the server saw it."""
    tokens: Int32
    """The tokens sampled, the end token included."""
    logprobs: Float32
    """Their log-probabilities."""
    lowest_version: int
    """Lowest policy version that sampled any of them; -1 when the server does not say."""
    highest_version: int
    replica_id: str = "unknown"
    """Which server it was."""
    sampling_params: Mapping[str, str]
    """What was asked for."""
    timestamp: float
    """Wall time of the answer, seconds since the Unix epoch."""
    inference_time_s: float
    """Seconds between request and answer."""


class CompletionsClient:
    """An async client over one or more servers of the same model; use it as an async context manager."""

    def __init__(
        self, base_urls: Sequence[str], *, model: str = "policy", api_key: str = "", timeout_s: float = 60.0
    ) -> None:
        """`base_urls` end in /v1, as OpenAI's clients take them; `timeout_s` bounds a call, retries included.

        `api_key` may be a reference (topics.secrets). Raises ConfigurationError where it leads nowhere.
        """
        api_key = resolve("worker.api_key", api_key)
        self.model = model
        self.timeout_s = timeout_s
        self.newest_version = -1
        """Newest policy version any answer named."""
        self._urls = [url.rstrip("/") for url in base_urls]
        self._turn = itertools.count()
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # The deadline of each call bounds everything; connections are as many as the caller's concurrency.
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._session:
            await self._session.close()

    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        n: int,
        max_tokens: int,
        temperature: float,
        seed: int,
        stop: Sequence[str] = (),
    ) -> list[Completion]:
        """`n` samples after a prompt, in the order of the choices.

        Raises InferenceUnavailable after the deadline, InferenceRefused for an answer that cannot be used.
        """
        asked: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt if isinstance(prompt, str) else [int(token) for token in prompt],
            "n": n,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "logprobs": 1,
            "return_token_ids": True,
            **({"stop": list(stop)} if stop else {}),
        }
        began = time.monotonic()
        url, body = await self._request("POST", "/completions", asked)
        found = parse_completions(body, url=url, asked=asked, elapsed_s=time.monotonic() - began)
        if len(found) != n:
            raise InferenceRefused(f"{url} answered {len(found)} choices where n={n} were asked for")
        self.newest_version = max(self.newest_version, *(c.highest_version for c in found))
        return found

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens, by the server's tokenizer (POST /tokenize, as vLLM has it)."""
        asked = {"model": self.model, "prompt": text, "add_special_tokens": False}
        url, body = await self._request("POST", "/tokenize", asked, under_v1=False)
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise InferenceRefused(f"{url}/tokenize answered without tokens")
        return tokens

    async def version(self) -> int:
        """The policy version a server has now, by its list of models; -1 when it does not say."""
        _url, body = await self._request("GET", "/models", None)
        versions = [m.get("policy_version", -1) for m in body.get("data", []) if m.get("id") == self.model]
        version = max((v for v in versions if isinstance(v, int)), default=-1)
        self.newest_version = max(self.newest_version, version)
        return version

    async def _request(
        self, method: str, path: str, asked: dict[str, Any] | None, *, under_v1: bool = True
    ) -> tuple[str, dict[str, Any]]:
        assert self._session, "used outside its context manager"
        deadline = time.monotonic() + self.timeout_s
        first = next(self._turn)
        for attempt in itertools.count():
            url = self._urls[(first + attempt) % len(self._urls)]
            url = url if under_v1 else url.removesuffix("/v1")
            left_s = deadline - time.monotonic()
            try:
                async with (
                    asyncio.timeout(max(left_s, 0.001)),
                    self._session.request(method, url + path, json=asked) as response,
                ):
                    if response.status == 200:
                        return url, await _json_object(response, url)
                    cause = f"{response.status} {_error_message(await response.text())}"
                    if response.status not in _RETRIED_STATUS:
                        raise InferenceRefused(f"{url}{path} refused the request: {cause}")
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
                cause = str(error) or type(error).__name__
            except aiohttp.InvalidURL as error:
                raise InferenceRefused(
                    f"{url} is no URL; worker.inference_urls are like http://host:8000/v1"
                ) from error
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt)
            if time.monotonic() + pause_s >= deadline:
                raise InferenceUnavailable(
                    f"no answer from {url}{path} within {self.timeout_s:g} s ({cause}); is the inference server up, "
                    "and are weights published?"
                )
            await asyncio.sleep(pause_s)
        raise AssertionError("unreachable")


async def _json_object(response: aiohttp.ClientResponse, url: str) -> dict[str, Any]:
    try:
        body = await response.json(content_type=None)
    except ValueError as error:
        raise InferenceRefused(f"{url} answered something that is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InferenceRefused(f"{url} answered a JSON {type(body).__name__} where an object belongs")
    return body


def _error_message(text: str) -> str:
    return " ".join(text.split())[:500]


def parse_completions(
    body: Mapping[str, Any], *, url: str, asked: Mapping[str, Any], elapsed_s: float
) -> list[Completion]:
    """Completions in an answer of ours or vLLM's, in the order of their index.

    Raises InferenceRefused, naming what is missing: token ids, the prompt's, logprobs, or numbers that do not match.
    """
    try:
        choices = sorted(body["choices"], key=lambda choice: choice["index"])
        return [_completion(choice, body, url, asked, elapsed_s) for choice in choices]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InferenceRefused(f"{url} answered in a shape that is not OpenAI's completions: {error!r}") from error


def _completion(
    choice: Mapping[str, Any], body: Mapping[str, Any], url: str, asked: Mapping[str, Any], elapsed_s: float
) -> Completion:
    tokens = choice.get("token_ids")
    prompt_tokens = choice.get("prompt_token_ids") or body.get("prompt_token_ids")
    if tokens is None or prompt_tokens is None:
        raise InferenceRefused(
            f"{url} answered without token_ids and prompt_token_ids; tokens are never guessed from text: use a server "
            "that returns them (rollstream infer, or a vLLM that knows return_token_ids)"
        )
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    if logprobs is None or len(logprobs) != len(tokens) or any(value is None for value in logprobs):
        raise InferenceRefused(
            f"{url} answered {len(tokens)} tokens without a logprob for each; does it allow logprobs?"
        )
    values = np.asarray(logprobs, np.float32)
    if not all(map(math.isfinite, values)):
        raise InferenceRefused(f"{url} answered a logprob that is not finite")
    version = _version(body)
    return Completion(
        text=str(choice["text"]),
        truncated=choice["finish_reason"] != "stop",
        prompt_tokens=np.asarray(prompt_tokens, np.int32),
        tokens=np.asarray(tokens, np.int32),
        logprobs=values,
        lowest_version=int(choice.get("lowest_version", version)),
        highest_version=int(choice.get("highest_version", version)),
        replica_id=str(body.get("replica_id") or url),
        sampling_params={key: str(asked[key]) for key in ("temperature", "max_tokens", "seed", "stop") if key in asked},
        timestamp=time.time(),
        inference_time_s=elapsed_s,
    )


def _version(body: Mapping[str, Any]) -> int:
    """Ours says policy_version; SGLang's shape has metadata.weight_version, a string."""
    said = body.get("policy_version", (body.get("metadata") or {}).get("weight_version"))
    try:
        return int(said)
    except (TypeError, ValueError):
        return -1
