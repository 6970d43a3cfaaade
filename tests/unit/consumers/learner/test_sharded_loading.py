"""Processes that share a checkpoint: each reads its share of every tensor, and never has the whole in memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rollstream.consumers.models import huggingface
from rollstream.infra.broker.ports import free_port
from rollstream.topics.wire.params_digest import params_checksum
from tests.support.checkpoints import LARGE, random_parameters
from tests.support.loading_child import Job
from tests.support.paths import ROOT

SHARE = 0.7
"""Peak of each of two processes, as a share of the whole."""


@pytest.mark.long
def test_two_processes_load_a_checkpoint_that_neither_holds_whole(tmp_path: Path) -> None:
    params = random_parameters(LARGE)
    digest = params_checksum(params)
    whole = sum(array.nbytes for array in params.values())
    huggingface.save(tmp_path / "model", LARGE, params)
    coordinator = f"127.0.0.1:{free_port('127.0.0.1')}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    jobs = [Job(str(tmp_path / "model"), process, 2, coordinator) for process in range(2)]
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.loading_child", msgspec.json.encode(job).decode()],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for job in jobs
    ]
    try:
        answers = [json.loads(child.communicate(timeout=600)[0].splitlines()[-1]) for child in children]
    finally:
        for child in children:
            child.kill()
    for answer in answers:
        assert answer["digest"] == digest
        assert 0.5 * whole <= answer["held_bytes"] < 0.51 * whole
        assert answer["held_bytes"] < answer["peak_bytes"] + 2**20 < SHARE * whole, f"of {whole} bytes"
