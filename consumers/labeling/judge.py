"""The labeler `judge`: a model behind an OpenAI-compatible URL scores rollouts.

Calls for the rollouts of one poll run concurrently, within limits on concurrent calls and calls per second. If the
judge refuses a call and answers a short question, or its answer has no readable score, the rollout is refused with the
reason, and never gets a reward of zero. If the judge refuses the short question as well, labeling ends. If the judge
cannot be reached, calls are repeated for a while; then labeling ends. Nothing is lost when labeling ends.
"""

import asyncio
import math
import random
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import aiohttp

from rollstream.consumers.labeling.config import JudgeConfig
from rollstream.consumers.labeling.labeler import RolloutLabel
from rollstream.topics.errors import ConfigurationError, RecordError, RollstreamError
from rollstream.topics.heartbeats import beating
from rollstream.topics.records import Rollout
from rollstream.topics.secrets import resolve
from rollstream.topics.watched_sockets import watched_socket

_RETRIED_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}
_REFUSED_STATUS = {400, 413, 422}
"""Statuses that refuse one request, e.g. for a prompt that is too long, or all requests, e.g. for a parameter; others,
e.g. for a wrong key, always apply to all."""
_BUSY_STATUS = {429, 503}
"""Statuses of a judge without room, which say nothing about the rollout."""
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0
_SHORT_TEXTS = dict.fromkeys(("prompt", "response", "conversation"), "Hello")
"""Texts of a question that a judge answers unless it refuses or fails at every request."""


class JudgeUnavailable(RollstreamError):
    """The judge did not answer within labeling.judge.patience_s, or refuses every request."""


def judge_prompt(template: str, rollout: Rollout) -> str:
    """Fill `{prompt}`, `{response}` and `{conversation}` of a template with texts of the rollout's turns.

    The response is the assistant's last turn, and the prompt is all turns before it. Raises RecordError if the
    assistant has no turn.
    """
    replies = [number for number, turn in enumerate(rollout.turns) if turn.role == "assistant"]
    if not replies:
        raise RecordError(f"rollout {rollout.uid!r} has no turn of the assistant, so there is nothing to judge")
    before = rollout.turns[: replies[-1]]
    texts = {
        "prompt": "\n".join(turn.text for turn in before),
        "response": rollout.turns[replies[-1]].text,
        "conversation": "\n".join(f"{turn.role}: {turn.text}" for turn in rollout.turns),
    }
    return _filled(template, texts)


def _filled(template: str, texts: Mapping[str, str]) -> str:
    # All placeholders are replaced in one pass, because a text may contain another placeholder.
    return re.sub(r"\{(prompt|response|conversation)\}", lambda match: texts[match[1]], template)


def parse_score(text: str, config: JudgeConfig) -> float:
    """Return the last score in a judge's answer, scaled to 0 to 1.

    Raises RecordError if there is no score, or if it is out of range.
    """
    matches = re.findall(config.score_pattern, text)
    if not matches:
        raise RecordError(f"the judge's answer {text[-200:]!r} has no score that labeling.judge.score_pattern matches")
    try:
        score = float(matches[-1])
    except ValueError:
        raise RecordError(f"the judge's score {matches[-1]!r} is not a number") from None
    if not (math.isfinite(score) and config.lowest <= score <= config.highest):
        raise RecordError(f"the judge's score {score:g} is not between {config.lowest:g} and {config.highest:g}")
    return (score - config.lowest) / (config.highest - config.lowest)


class RateLimit:
    """Spaces calls evenly at `per_s` calls per second; 0 means no limit."""

    def __init__(self, per_s: float, clock: Callable[[], float]) -> None:
        self._interval_s = 1 / per_s if per_s else 0.0
        self._clock = clock
        self._next_s = 0.0

    def pause_s(self) -> float:
        """Reserve the next call; return the seconds until it may be made."""
        now_s = self._clock()
        begin_s = max(self._next_s, now_s)
        self._next_s = begin_s + self._interval_s
        return begin_s - now_s


class Judge:
    """Labels rollouts. All calls must be made from one event loop."""

    def __init__(self, config: JudgeConfig) -> None:
        """Raises ConfigurationError if the key cannot be resolved, or no URL is set."""
        if not config.url:
            raise ConfigurationError("labeling.judge.url is empty; set it to an OpenAI-compatible URL that ends in /v1")
        self._config = config
        self._url = f"{config.url.rstrip('/')}/chat/completions"
        key = resolve("labeling.judge.api_key", config.api_key)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._slots = asyncio.Semaphore(config.concurrency)
        self._rate = RateLimit(config.requests_per_s, time.monotonic)
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, rollout: Rollout) -> RolloutLabel:
        """Return the judge's label.

        Raises RecordError if the rollout cannot be labeled, and JudgeUnavailable if the judge cannot be used.
        """
        prompt = judge_prompt(self._config.template, rollout)
        async with self._slots:
            text = await beating("labeling", self._answer(prompt))
        return RolloutLabel(reward=parse_score(text, self._config))

    def longest_s(self, rollouts: int) -> float:
        """Return an upper bound of the seconds that the labels of so many rollouts take."""
        config = self._config
        call_s = config.timeout_s + (config.concurrency / config.requests_per_s if config.requests_per_s else 0.0)
        # Two calls, for the rollout and a short question, may begin within the patience, and two after it.
        rollout_s = config.patience_s + 4 * call_s
        return math.ceil(rollouts / config.concurrency) * rollout_s

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _answer(self, prompt: str) -> str:
        """Return the text of the judge's answer; repeat calls that failed temporarily."""
        config, payload = self._config, self._payload(prompt)
        deadline, pause_s, failure = time.monotonic() + config.patience_s, _FIRST_PAUSE_S, _Failure("it was not called")
        while time.monotonic() < deadline:
            body = await self._ask(payload)
            if not isinstance(body, _Failure):
                return _text_of(body)
            failure = await self._failure_at_others(body) if body.status in _REFUSED_STATUS else body
            # Jitter keeps calls that failed together from being repeated together, also after Retry-After.
            wait_s = failure.retry_after_s + min(pause_s, _LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
            await asyncio.sleep(min(wait_s, max(0.0, deadline - time.monotonic())))
            pause_s *= 2
        if failure.status not in _BUSY_STATUS and await self._answers():
            # Unless the judge has recovered just now, this rollout would hold back all others, at every start again.
            body = await self._ask(payload)
            if not isinstance(body, _Failure):
                return _text_of(body)
            raise RecordError(
                f"the judge failed at this rollout for {config.patience_s:g} s, and answers another question: "
                f"{body.reason}"
            )
        raise JudgeUnavailable(
            f"the judge at {self._url} did not answer within {config.patience_s:g} s: {failure.reason}; start labeling "
            "again once it answers, or raise labeling.judge.patience_s"
        )

    def _payload(self, prompt: str) -> dict[str, Any]:
        config = self._config
        payload: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]}
        if config.temperature >= 0:
            payload["temperature"] = config.temperature
        if config.max_tokens > 0:
            payload["max_tokens"] = config.max_tokens
        return payload

    async def _failure_at_others(self, refusal: "_Failure") -> "_Failure":
        """Return the failure of another question than the refused one, if it may pass.

        Raises RecordError if the judge answers the other question, and JudgeUnavailable if it refuses that one as well.
        """
        body = await self._ask_short()
        if not isinstance(body, _Failure):
            raise RecordError(f"the judge refused the rollout: {refusal.reason}")
        if body.status in _REFUSED_STATUS:
            raise JudgeUnavailable(
                f"the judge at {self._url} refuses every request: {body.reason}; check model, template, temperature "
                "and max_tokens of labeling.judge"
            )
        return body

    async def _answers(self) -> bool:
        """Whether the judge answers a short question."""
        try:
            return not isinstance(await self._ask_short(), _Failure)
        except JudgeUnavailable:
            return False

    async def _ask_short(self) -> "Any | _Failure":
        """Ask a short question as any other: a judge may refuse the template, or a parameter, of all questions."""
        return await self._ask(self._payload(_filled(self._config.template, _SHORT_TEXTS)))

    async def _ask(self, payload: dict[str, Any]) -> "Any | _Failure":
        """Make one call, and return the body of the answer, or a failure: a refusal of this call, or a failure after
        which it may be repeated.

        Raises JudgeUnavailable if the judge refuses every call.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers, connector=aiohttp.TCPConnector(limit=0, socket_factory=watched_socket)
            )
        await asyncio.sleep(self._rate.pause_s())
        try:
            async with (
                asyncio.timeout(self._config.timeout_s),
                self._session.post(self._url, json={"model": self._config.model, **payload}) as response,
            ):
                if response.status == 200:
                    return await response.json(content_type=None)
                reason = f"it answered {response.status}: {(await response.text())[:200]}"
                if response.status not in _RETRIED_STATUS | _REFUSED_STATUS:
                    raise JudgeUnavailable(f"the judge at {self._url} refuses every request: {reason}")
                return _Failure(reason, response.status, _retry_after_s(response.headers.get("Retry-After", "")))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            return _Failure(repr(error))


class _Failure(NamedTuple):
    """A call that was refused, or that may be repeated."""

    reason: str
    status: int = 0
    """Status of the answer, 0 without one."""
    retry_after_s: float = 0.0


def _text_of(body: Any) -> str:
    """Return the text in an answer. Raises RecordError if there is none."""
    try:
        text = body["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError) as error:
        raise RecordError("the judge answered in a shape that is not OpenAI's chat completions") from error
    if not isinstance(text, str):
        raise RecordError("the judge answered without a text")
    return text


def _retry_after_s(header: str) -> float:
    try:
        seconds = float(header)
    except ValueError:
        return 0.0
    return seconds if 0 <= seconds < 3600 else 0.0
