"""The recipe for nginx before several gateways, as docs/gateway.md shows it: a gateway that dies ends no session."""

import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from rollstream.infra.broker.ports import free_port
from rollstream.pipeline.audit.ledger import ledger
from rollstream.topics.config import KafkaConfig
from tests.support.gateways import gateway, post, records
from tests.support.paths import ROOT
from tests.support.producing import ScriptedGenerator, serving
from tests.support.waiting import eventually

SESSIONS, TURNS = 12, 4
RECIPE = re.compile(r"^map \$uri .*?^}\n(?=```)", re.MULTILINE | re.DOTALL)


@contextmanager
def nginx(folder: Path, ports: tuple[int, int]) -> Iterator[str]:
    """URL of nginx with the configuration in the documentation, before gateways at these ports."""
    program = shutil.which("nginx")
    if program is None:
        pytest.fail("nginx is not installed: run apt-get install nginx", pytrace=False)
    recipe = RECIPE.search((ROOT / "docs" / "gateway.md").read_text())
    assert recipe is not None
    port = free_port("127.0.0.1")
    text = recipe[0].replace("8100", str(ports[0])).replace("8101", str(ports[1]))
    text = text.replace("listen 8080", f"listen 127.0.0.1:{port}")
    paths = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("proxy", "fastcgi", "uwsgi", "scgi"))
    paths += f"client_body_temp_path {folder}/body; access_log off;"
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; error_log stderr; events {{}}\nhttp {{ {paths}\n{text} }}"
    )
    process = subprocess.Popen([program, "-p", folder, "-e", "stderr", "-c", folder / "nginx.conf"])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.long
def test_a_gateway_behind_nginx_dies_and_every_session_finishes(
    kafka: KafkaConfig, run_name: str, tmp_path: Path
) -> None:
    """The dead gateway stays dead. Every second session streams, and repeats a stream that breaks."""
    ports = free_port("127.0.0.1"), free_port("127.0.0.1")
    engine = ScriptedGenerator(["a", "b", "c", "d"], versions=(3,), tokens_at_once=1)
    answered, broken = threading.Semaphore(0), []

    def play(member: int, session: dict[str, Any]) -> None:
        messages: list[Any] = []
        with openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"]) as client:
            for turn in range(TURNS):
                messages.append({"role": "user", "content": f"{turn}?"})
                request: Any = {"model": "any", "messages": messages}
                for attempt in range(2):
                    try:
                        if member % 2:
                            with client.chat.completions.stream(**request) as events:
                                events.until_done()
                                answer = events.get_final_completion()
                        else:
                            answer = client.chat.completions.create(**request)
                        break
                    except (openai.APIError, httpx.TransportError) as error:
                        if attempt or not member % 2:
                            raise
                        broken.append(error)
                assert answer.choices[0].message.content == "abcd"[turn]
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                answered.release()

    with nginx(tmp_path, ports) as url, serving(engine) as server:
        eventually(lambda: server.version == 3, 60, "weights are loaded")
        settings = {"gateway.public_url": url, "worker.concurrency": 100, "learner.max_policy_lag": 100}
        with (
            gateway(kafka, run_name, server.base_url, tmp_path, **settings, **{"gateway.port": ports[0]}) as first,
            gateway(
                kafka, run_name, server.base_url, tmp_path, "--ordinal", "1", **settings, **{"gateway.port": ports[1]}
            ),
        ):
            started = {"task_id": "t", "environment": "sums", "group_size": SESSIONS}
            sessions = post(f"{url}/rl/start_session", started)[1]["sessions"]
            assert {session["base_url"].startswith(url) for session in sessions} == {True}
            with ThreadPoolExecutor(SESSIONS) as agents:
                played = [agents.submit(play, *each) for each in enumerate(sessions)]
                for _ in range(SESSIONS):
                    assert answered.acquire(timeout=300)
                first.process.kill()
                for each in played:
                    each.result()
            print(f"{len(broken)} streams broke")
            for number, session in enumerate(sessions):
                named = {"session_id": session["session_id"]}
                post(f"{url}/rl/set_reward", {**named, "reward": float(number % 2)})
                assert post(f"{url}/rl/end_session", named)[1]["state"] == "finished"
    rollouts = records(kafka, run_name)
    assert [sum(turn.role == "assistant" for turn in rollout.turns) for rollout in rollouts] == [TURNS] * SESSIONS
    books = ledger(kafka, run_name)
    assert (books.balanced, books.calls["in_rollouts"]) == (True, SESSIONS * TURNS)
