"""An agent outside of a run, at the published port of its gateway: it plays on whatever happens to the containers, and
remembers what it was told.
"""

import http.client
import json
import random
import threading
import urllib.error
import urllib.request
from types import TracebackType
from typing import Any, Self

MEMBERS = 4
_REQUEST_S = 20.0
_PAUSE_S = 0.5


class OutsideAgent:
    """Plays groups of sessions from a thread of its own until it is left."""

    def __init__(self, url: str, seed: int) -> None:
        self.finished: dict[str, float] = {}
        """Reward of each rollout that the gateway said is on record, by uid."""
        self.given_up = 0
        """Sessions that lost a call."""
        self._url, self._rng = url, random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._play, name="outside-agent")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _play(self) -> None:
        number = 0
        while not self._stop.is_set():
            # The group has an id, so that a repeated request does not make another group.
            group = {"task_id": f"t{number % 8}", "group_id": f"outside-{number}", "group_size": MEMBERS}
            started = self._insist("/rl/start_session", {"environment": "outside", **group})
            for session in (started or {}).get("sessions", ()):
                self._play_session(str(session["session_id"]))
            number += 1

    def _play_session(self, session: str) -> None:
        named = {"session_id": session}
        prompt = {"model": "any", "prompt": "429>", "max_tokens": 4, "seed": self._rng.randrange(2**31)}
        if self._insist(f"/sessions/{session}/v1/completions", prompt) is None:
            self.given_up += 1
            self._insist("/rl/end_session", {**named, "status": "failed"})
            return
        reward = float(self._rng.randrange(2))
        self._insist("/rl/set_reward", {**named, "reward": reward})
        state = self._insist("/rl/end_session", named)
        for uid in (state or {}).get("rollouts", ()):
            self.finished[uid] = reward

    def _insist(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Ask until there is an answer; None if it is a refusal, or if the agent is to stop."""
        while not self._stop.is_set():
            status, answer = self._ask(path, body)
            if status in (200, 201):
                return answer
            if status and status != 429 and not (status >= 500 and path.startswith("/rl/")):
                return None
            self._stop.wait(_PAUSE_S)
        return None

    def _ask(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and JSON of an answer; status 0 if there is none."""
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_REQUEST_S) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, {}
        except (OSError, http.client.HTTPException, ValueError):
            return 0, {}
