"""A gateway of a real run is killed while agents use it: all sessions finish, and each answer is on the log once."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from rollstream.infra.broker.ports import free_port
from tests.support.gateways import post
from tests.support.steered_run import VALUES, SteeredRun
from tests.support.waiting import eventually

SESSIONS, GROUP, TURNS = 24, 4, 6
KILL_AFTER = SESSIONS * TURNS // 3


@pytest.mark.long
def test_sessions_of_stock_clients_finish_when_the_gateway_is_killed(
    broker: str, run_name: str, tmp_path: Path
) -> None:
    """A stock client repeats a refused or broken request twice within seconds; its agent repeats a broken stream once.
    Every second session streams."""
    port = free_port("127.0.0.1")
    run = SteeredRun(
        broker,
        run_name,
        tmp_path,
        values={**VALUES, "supervisor.workers": 0, "gateway.port": port, "gateway.processes": 1},
    )
    url = f"http://127.0.0.1:{port}/rl/"
    answered, broken = threading.Semaphore(0), []

    def play(member: int, session: dict[str, Any]) -> dict[str, Any]:
        with openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"]) as client:
            for turn in range(TURNS):
                messages: Any = [{"role": "user", "content": f"{turn}{member % 10}>"}]
                request = {"model": "any", "messages": messages, "max_tokens": 12, "stream": bool(member % 2)}
                for attempt in range(2):
                    try:
                        answer = client.chat.completions.create(**request)
                        if request["stream"]:
                            assert [*answer][-1].choices[0].finish_reason
                        break
                    except (openai.APIError, httpx.TransportError) as error:
                        if attempt or not request["stream"]:
                            raise
                        broken.append(error)
                answered.release()
        named = {"session_id": session["session_id"]}
        post(f"{url}set_reward", {**named, "reward": member % GROUP})
        return post(f"{url}end_session", named)[1]

    try:
        run.start()
        groups = [
            eventually(
                lambda n=n: post(f"{url}start_session", {"task_id": f"t{n}", "group_size": GROUP})[1].get("sessions"),
                300,
                "a group",
            )
            for n in range(SESSIONS // GROUP)
        ]
        with ThreadPoolExecutor(SESSIONS) as agents:
            ended = [agents.submit(play, *each) for each in enumerate(s for group in groups for s in group)]
            for _ in range(KILL_AFTER):
                assert answered.acquire(timeout=300)
            assert run.kill_role("gateway") == 1
        states = [(state["state"], state["calls"], len(state["rollouts"])) for state in (e.result() for e in ended)]
        print(f"{len(broken)} streams broke")
        assert [(state, calls) for state, calls, _ in states] == [("finished", TURNS)] * SESSIONS
        run.stop()
        run.check()
        assert run.books().calls["in_rollouts"] == SESSIONS * TURNS
    finally:
        run.close()
