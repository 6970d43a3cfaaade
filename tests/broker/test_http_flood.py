"""Floods of hostile requests to every server that we ship, started as users start them: none ends, hangs or fails, and
an honest request is answered afterwards.
"""

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from rollstream.topics.kafka import provisioning
from tests.broker.test_inference_server import SMALL, publish
from tests.support.gateways import gateway
from tests.support.hostile_input import HostileInput
from tests.support.recipe import write_model
from tests.support.request_flood import GATEWAY, INFERENCE, failures, page_paths, request_flood
from tests.support.runs import RealRun
from tests.support.waiting import eventually

SEED = int(os.environ.get("FLOOD_SEED", "1"))
REQUESTS = int(os.environ.get("FLOOD_REQUESTS", "2000"))


def judged(name: str, answers: Counter[str], log: str) -> None:
    print(f"{name}: seed {SEED}, {answers.total()} requests, {dict(sorted(answers.items()))}")
    assert not failures(answers), answers
    assert "Traceback" not in log, log[log.index("Traceback") :][:3000]


@pytest.mark.long  # Three servers, one after the other
def test_no_request_ends_or_hangs_a_server(real_run: RealRun, compiled: Path) -> None:
    run = real_run
    provisioning.apply(run.kafka, run.topics, run.name)
    publish(run, write_model(run.directory / "model", **SMALL), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
        server = run.start("infer", learner__pretrained=run.directory / "model", inference__max_model_len=512)
    page = run.start("ui")

    def logged(process: "subprocess.Popen[bytes]", pattern: str) -> str:
        def found() -> str:
            assert process.poll() is None, run.log_of(process)
            match = re.search(pattern, run.log_of(process))
            return match[1] if match else ""

        return eventually(found, 240, pattern)

    inference = logged(server, r'"inference_listening".*?"url": "(.*?)"')
    page_url = logged(page, r"page of runs? .*: (http://\S+)")
    hostile = HostileInput(SEED)
    answers = request_flood(inference, INFERENCE, REQUESTS, hostile, lambda: server.poll() is None)
    judged("infer", answers, run.log_of(server))
    answers = request_flood(page_url, page_paths(run.name), REQUESTS, hostile, lambda: page.poll() is None)
    judged("ui", answers, run.log_of(page))
    with gateway(run.kafka, run.name, f"{inference}/v1", run.directory) as front:
        answers = request_flood(front.url, GATEWAY, REQUESTS, hostile, lambda: front.process.poll() is None)
        judged("gateway", answers, front.log.read_text())

        def honest() -> bool:
            return front.post("/rl/start_session", {"task_id": "t", "environment": "outside"})[0] in (200, 201)

        eventually(honest, 60, "a session of an honest agent")
