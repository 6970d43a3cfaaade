"""Secrets of a whole run on a secured broker, whose weights lie in an S3 store: no file, object, record, answer or
command line of it holds one.
"""

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from rollstream.infra.broker.ports import free_port, free_port_row
from rollstream.topics.wire.signatures import write_key
from tests.broker.test_demo import SMALL, environment
from tests.support.command_line import in_full
from tests.support.probes import probe
from tests.support.s3_server import content_of, objects, s3_server
from tests.support.secured_broker import SecuredBroker, secured_broker
from tests.support.waiting import eventually

RUN = "discreet"
PASSWORDS = ("kafka", "inference", "gateway", "page", "judge", "serving")
"""Secrets that are texts of ours, each in a variable; private keys lie in a file and in a variable."""
STORE = "store-z9-not-to-be-seen"
"""The secret key of the S3 store, in the variable that its client reads."""
GIVEN = {
    "learn": (),
    "group": (),
    "infer": ("inference",),
    "env": ("inference", "environment"),
    "gateway": ("inference", "gateway", "environment"),
    "page": ("page",),
}
"""Secrets in variables that the processes of each role use, beside the password of Kafka, which all use, and the key
of the store, which is no setting of ours and goes to all of them."""
SETTINGS = """
data_dir = "data"

[kafka.client]
"security.protocol" = "SASL_SSL"
"sasl.mechanism" = "SCRAM-SHA-512"
"sasl.username" = "discreet"
"sasl.password" = "env:SECRET_KAFKA"
"ssl.ca.location" = "{authority}"

[kafka]
bootstrap_servers = "{address}"
signing_key = "env:SECRET_ENVIRONMENT"

[grouping]
mark_keys = ["{mark_key}"]
environment_keys = ["dsort3:{environment_key}"]

[grouper]
signing_key = "file:{folder}/marks.pem"

[inference]
api_key = "env:SECRET_INFERENCE"

[gateway]
port = {gateway}
api_key = "env:SECRET_GATEWAY"

[learner.weights]
transport = "files"
url = "{store}"

[labeling.judge]
api_key = "env:SECRET_JUDGE"

[serving]
api_key = "env:SECRET_SERVING"

[ui]
port = {page}
token = "env:SECRET_PAGE"

[service]
port = {service}

[topics]
partitions = 2

[supervisor]
workers = 1
"""


@dataclass
class DiscreetRun:
    """A run with secrets of every kind, each a text that occurs nowhere by chance."""

    broker: SecuredBroker
    store: str
    """URL of the folder of its weights."""
    folder: Path
    secrets: dict[str, str] = field(default_factory=dict)
    """Texts by name; of a private key, a line of its PEM."""
    variables: dict[str, str] = field(default_factory=dict)
    service: int = field(default_factory=lambda: free_port_row("127.0.0.1", 12))

    def __post_init__(self) -> None:
        keys = {name: write_key(self.folder / f"{name}.pem") for name in ("marks", "environment")}
        for name in PASSWORDS:
            self.secrets[name] = self.variables[f"SECRET_{name.upper()}"] = f"{name}-z9-not-to-be-seen"
        self.secrets["store"] = STORE
        for name in keys:
            text = (self.folder / f"{name}.pem").read_text()
            self.secrets[name] = text.splitlines()[1]
        self.variables["SECRET_ENVIRONMENT"] = (self.folder / "environment.pem").read_text()
        (self.folder / "run.toml").write_text(
            SETTINGS.format(
                authority=self.broker.authority,
                address=self.broker.secured,
                store=self.store,
                mark_key=keys["marks"],
                environment_key=keys["environment"],
                folder=self.folder,
                gateway=free_port("127.0.0.1"),
                page=free_port("127.0.0.1"),
                service=self.service,
            )
        )

    def start(self, variables: Mapping[str, str], *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / "out.txt").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "rollstream", *in_full(words), "--run", RUN, *SMALL],
                env={**variables, **self.variables},
                cwd=self.folder,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def found_in(self, content: bytes | str, but: tuple[str, ...] = ()) -> set[str]:
        """Names of the secrets in some bytes, without those that may be there."""
        data = content.encode(errors="surrogateescape") if isinstance(content, str) else content
        return {name for name, secret in self.secrets.items() if secret.encode() in data} - set(but)

    def found_in_files(self) -> dict[str, set[str]]:
        """Files below the folder with the secrets in them, except the two in which we put keys."""
        files = (path for path in self.folder.rglob("*") if path.is_file() and path.suffix != ".pem")
        return {str(path): actual for path in files if (actual := self.found_in(path.read_bytes()))}

    def found_in_objects(self) -> tuple[int, set[str]]:
        """Number of objects in the store, and the secrets in their names and bytes."""
        keys = objects()
        return len(keys), {name for key in keys for name in self.found_in(key.encode() + content_of(key))}

    def found_in_records(self) -> tuple[int, set[str]]:
        """Number of records of all topics of the run, uncommitted ones too, and the secrets in them."""
        admin = AdminClient({"bootstrap.servers": self.broker.open})
        consumer = Consumer(
            {
                "bootstrap.servers": self.broker.open,
                "group.id": "searches",
                "isolation.level": "read_uncommitted",
                "enable.partition.eof": True,
                "enable.auto.commit": False,
            }
        )
        topics = admin.list_topics(timeout=60).topics
        places = [TopicPartition(t, p, 0) for t in topics if t.startswith(RUN) for p in topics[t].partitions]
        consumer.assign(places)
        left, records, names = len(places), 0, set[str]()
        while left:
            message = consumer.poll(60)
            assert message is not None
            if message.error():
                left -= 1
                continue
            records += 1
            for part in (message.key(), message.value(), *(value for _name, value in message.headers() or ())):
                names |= self.found_in(part or b"")
        consumer.close()
        return records, names


@pytest.fixture
def run(tmp_path: Path) -> Iterator[DiscreetRun]:
    with secured_broker(tmp_path / "broker") as broker, s3_server(STORE) as bucket:
        folder = tmp_path / "run"
        folder.mkdir()
        discreet = DiscreetRun(broker, f"{bucket}/{RUN}", folder)
        resources = [{"type": kind, "name": "*", "patternType": "literal"} for kind in _KINDS]
        rules = [("discreet", {"resource": resource, "operations": ["All"]}) for resource in resources]
        broker.admit({"discreet": discreet.secrets["kafka"]}, rules)
        yield discreet


_KINDS = ("topic", "group", "transactionalId")


def role_of(process: psutil.Process) -> str:
    """Role of a process of the run by its command line; empty for others, such as helpers of a pool."""
    words = process.cmdline()
    commands = words[words.index("rollstream") + 1 :] if "rollstream" in words else [""]
    command = commands[1] if commands[0] == "role" else commands[0]
    return {"ui": "page"}.get(command, command)


def variables_of(process: psutil.Process) -> str:
    return "\0".join(f"{name}={value}" for name, value in process.environ().items())


@pytest.mark.long
def test_no_secret_leaves_the_processes_that_use_it(run: DiscreetRun, compiled: Path) -> None:
    process = run.start(environment(compiled), "run", "run.toml", "--set=learner.max_steps=4")
    log = run.folder / "out.txt"
    scraped = 0
    try:
        eventually(
            lambda: b"processes are ready" in log.read_bytes() or process.poll() is not None, 500, "a run that is ready"
        )
        assert process.poll() is None, log.read_text()[-3000:]
        children = psutil.Process(process.pid).children(recursive=True)
        seen = {}
        for child in children:
            assert run.found_in("\0".join(child.cmdline())) == set(), child.cmdline()
            if role := role_of(child):
                seen[role] = run.found_in(variables_of(child))
        assert all({"kafka", "store"} <= actual for actual in seen.values()), seen
        assert {role: actual - {"kafka", "store"} for role, actual in seen.items()} == {
            role: set(given) for role, given in GIVEN.items()
        }
        assert run.found_in("\0".join(psutil.Process(process.pid).cmdline())) == set()
        for port in range(run.service, run.service + 12):
            for path in ("metrics", "livez", "readyz"):
                try:
                    _status, text = probe(f"http://127.0.0.1:{port}/{path}")
                except urllib.error.URLError:
                    continue
                scraped += 1
                assert run.found_in(text) == set()
        assert process.wait(500) == 0, log.read_text()[-3000:]
    finally:
        process.kill()
        process.wait()
    assert scraped >= 3 * len(GIVEN)
    answers = [said(run, *words) for words in COMMANDS] + [said(run, *COMMANDS[0], faults=fault) for fault in FAULTS]
    for answer in answers:
        assert run.found_in(answer) == set(), answer
    report = said(run, "report", "--config", "run.toml", "-o", str(run.folder / "report.html"))
    assert (run.folder / "report.html").exists(), report
    assert run.found_in_files() == {}
    stored, actual = run.found_in_objects()
    assert stored >= 4, "keep_versions is four, and each has a file or more"
    assert actual == set()
    records, actual = run.found_in_records()
    assert records > 100
    assert actual == set()
    assert run.found_in(run.broker.log.read_bytes()) == set()
    print(
        f"{len(run.secrets)} secrets, {records:,} records, {stored} objects, {len(seen)} roles, {scraped} pages, "
        f"{len(answers)} answers"
    )


COMMANDS = (
    ("ledger", "--config", "run.toml"),
    ("doctor", "--config", "run.toml", "--role", "env"),
    ("top", "--once", "--json", "--config", "run.toml"),
    ("env", "--config", "run.toml", "--set=worker.no_such_key=1"),
    ("group", "--config", "run.toml", "--set=grouper.signing_key=file:nowhere.pem"),
    ("deploy", "compose", "--config", "run.toml", "-o", "deployed"),
)
FAULTS: tuple[Mapping[str, str], ...] = (
    {"SECRET_KAFKA": "kafka-z9-not-to-be-seen-but-wrong"},
    {"SECRET_ENVIRONMENT": "kafka-z9-not-to-be-seen"},
    {"ROLLSTREAM_KAFKA__CLIENT": '{"sasl.password": "kafka-z9-not-to-be-seen"}'},
)
"""Variables with which a command fails: a wrong password, a key that is none, a secret in a table."""


def said(run: DiscreetRun, *words: str, faults: Mapping[str, str] | None = None) -> str:
    """Output of a command, with its traceback if it fails."""
    answer = subprocess.run(
        [sys.executable, "-P", "-m", "rollstream", "--debug", *in_full(words), "--run", RUN],
        env={**environment(run.folder), **run.variables, **(faults or {})},
        cwd=run.folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return answer.stdout + answer.stderr
