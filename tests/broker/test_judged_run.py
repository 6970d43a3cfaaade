"""A run in which a judge over HTTP gives the rewards, as a user starts it: labeled once, grouped, trained, counted."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.consumers.labeling.positions import source_of
from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.audit.verification import verify
from rollstream.pipeline.config import load
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import GroupCancelled, Metrics, Rollout, TrainingBatch
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import decode
from tests.broker.test_demo import environment
from tests.support.waiting import eventually

ESSAYS = '''
from rollstream import Prompt, Score, SingleTurn


class Essays(SingleTurn):
    """Essays, which a labeler judges."""

    name = "essays"
    max_tokens = 8

    def prompts(self, split):
        return [Prompt(example_id=str(n), text=f"write {n}: ") for n in range(20 if split == "train" else 0)]

    def score(self, prompt, response_text, truncated):
        return Score(reward=-1.0, components={"length": len(response_text)})
'''
JUDGE = '''
"""A judge: the score is the number of distinct characters, or no number for one answer of eight. It answers once a
file is there."""

import http.server
import json
import pathlib
import sys
import time


class Judge(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        while not pathlib.Path(sys.argv[1]).exists():
            time.sleep(0.05)
        answer = body["messages"][0]["content"].removeprefix("judge:")
        score = "no idea" if sum(map(ord, answer)) % 8 == 0 else len(set(answer))
        message = {"role": "assistant", "content": f"Score: {score}"}
        content = json.dumps({"choices": [{"message": message}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge)
print(server.server_address[1], flush=True)
server.serve_forever()
'''
SETTINGS = """
[[environments]]
use = "essays.py:Essays"
rewards = "labeler"

[[environments]]
use = "dsort3"

[labeling]
labeler = "judge"

[labeling.judge]
url = "{url}"
template = "judge:{{response}}"

[learner]
model = {{ num_hidden_layers = 1 }}
rollouts_per_step = 32
microbatch_rows = 4
max_steps = 4

[inference]
max_rows = 64

[worker]
group_size = 4
metrics_interval_s = 0.2

[grouping]
batch_rollouts = 8

[topics]
partitions = 2
"""


@pytest.fixture
def judge(tmp_path: Path) -> Iterator[str]:
    """URL of a judge in a process of its own, which answers once the file `open` is there."""
    command = [sys.executable, "-c", JUDGE, str(tmp_path / "open")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/v1"
        process.kill()


@pytest.mark.long  # JAX compiles for a minute
def test_rollouts_that_a_judge_rewards_are_trained_on_and_counted_also_when_the_labeler_is_killed(
    compiled: Path, tmp_path: Path, broker: str, run_name: str, judge: str
) -> None:
    (tmp_path / "essays.py").write_text(ESSAYS)
    (tmp_path / "run.toml").write_text(SETTINGS.format(url=judge))
    log = tmp_path / "run.log"
    kafka = KafkaConfig(bootstrap_servers=broker)
    capacity = load(tmp_path / "run.toml").capacity

    def records(topic: str, kind: type = object) -> list[Any]:
        decoded = [decode(message.value) for message in read_to_end(kafka, topic_name(run_name, topic))]
        return [record for record in decoded if isinstance(record, kind)]

    def labelers() -> list[int]:
        """Process ids of the labelers that were started."""
        events = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        return [e["pid"] for e in events if (e["event"], e.get("role")) == ("role_started", "label-0")]

    def held_back() -> bool:
        """Whether both workers wait for capacity, with rollouts that wait for labels."""
        newest = {record.component: record.values for record in records("metrics", Metrics)}
        workers = [newest.get(f"env-{n}", {}) for n in range(2)]
        return all(values.get("waiting_for_capacity") and values["waiting_for_labels"] for values in workers)

    command = ["rollstream", "run", "run.toml", "--run", run_name, "--set=data_dir=data"]
    with log.open("w") as errors:
        run = subprocess.Popen(
            [sys.executable, "-P", "-m", *command],
            env=environment(compiled, KAFKA_BOOTSTRAP_SERVERS=broker),
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
    try:
        eventually(lambda: labelers() or run.poll() is not None, 300, "the labeler to start", every_s=0.5)
        eventually(lambda: held_back() or run.poll() is not None, 300, "the workers to wait", every_s=0.5)
        assert run.poll() is None, log.read_text()[-3000:]
        waiting = len(records("unlabelled"))
        assert 0 < waiting <= capacity.workers * capacity.share
        assert not [r for r in records("rollouts", Rollout) if r.environment == "essays"]
        (tmp_path / "open").touch()
        eventually(lambda: [r for r in records("rollouts", Rollout) if r.environment == "essays"], 120, "a label")
        os.kill(labelers()[-1], signal.SIGKILL)
        assert run.wait(400) == 0, log.read_text()[-3000:]
    finally:
        run.terminate()
        run.wait(300)
    assert len(labelers()) == 2

    messages = list(read_to_end(kafka, topic_name(run_name, "rollouts")))
    sources = [(source_of(message), decode(message.value)) for message in messages]
    essays = [(source, r) for source, r in sources if isinstance(r, Rollout) and r.environment == "essays"]
    assert len(records("unlabelled")) > waiting, "the workers went on once there were labels"
    assert None not in [source for source, _rollout in essays]
    assert Counter(rollout.uid for _source, rollout in essays).most_common(1)[0][1] == 1
    for _source, rollout in essays:
        answer = rollout.turns[-1].text
        assert (rollout.reward, rollout.reward_components) == (len(set(answer)) / 10, {"length": len(answer)})
    unjudged = {r.uid for r in records("unlabelled") if sum(map(ord, r.turns[-1].text)) % 8 == 0}
    assert not unjudged & {rollout.uid for _source, rollout in essays}

    batched = {uid for batch in records("batches", TrainingBatch) for uid in batch.uids}
    assert batched & {rollout.uid for _source, rollout in essays}
    assert {source for source, r in sources if isinstance(r, Rollout) and r.environment == "dsort3"} == {None}
    book = ledger(kafka, run_name)
    assert book.balanced, book.problems
    assert book.trained >= 128
    assert book.unlabelled["labeled"] == len(essays)
    cancelled = {uid for record in records("rollouts", GroupCancelled) for uid in record.uids}
    assert book.unlabelled["dead_lettered"] == len(cancelled & unjudged) > 0
    outstanding = book.unlabelled["pending"] + book.in_flight + book.unread + book.batched - book.trained - book.skipped
    assert outstanding <= capacity.limit
    assert verify(kafka, run_name).mismatches == []
