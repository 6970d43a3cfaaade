"""The page of a real run, served as a user serves it: `rollstream ui` as a process, and answers that equal those of the
command line."""

import json
import re
import signal
import socket
import subprocess
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollstream.consumers.models.tokenizer import CharacterTokenizer
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.index.run_index import RunIndex
from rollstream.pipeline.index.writer import index_file
from rollstream.pipeline.run import plan as plans
from rollstream.pipeline.run.supervisor import Supervisor
from rollstream.pipeline.ui.run_page import RunPage
from rollstream.pipeline.ui_config import UiConfig
from rollstream.producers.flow.mixture import EASY, HARD
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import clients
from rollstream.topics.records import EnvironmentState, MixtureState, PausedEnvironment, SessionEvent
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.support.command_line import answer_of
from tests.support.page import PageClient
from tests.support.planted import Planted, plant
from tests.support.runs import RealRun, rollout
from tests.support.waiting import eventually

TIMES = (
    "quiet_s",
    "policy_age_s",
    "rollouts_per_s",
    "read_per_s",
    "batches_per_s",
    "policies_per_s",
    "steps_per_s",
    "history",
)
"""Fields of a snapshot that depend on when it was made."""
CHANGE = {"X-Rollstream": "1"}


@pytest.fixture(scope="module")
def planted(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planted]:
    """A finished run with one fact of each kind."""
    run = RealRun(KafkaConfig(bootstrap_servers=broker), "paged", tmp_path_factory.mktemp("paged"))
    try:
        planted = plant(run)
        for kind, more in (
            ("start", {"environment": "env"}),
            ("failed", {"reason": "no agent"}),
            ("finished", {"reason": "no agent"}),
        ):
            event = SessionEvent(session="s1", kind=kind, author="a", group_id="g", wall_time=1.0, **more)  # type: ignore[arg-type]
            run.send_bytes("calls", encode(event), encode_key("s1"), 0)
        easy = EnvironmentState(
            environment="env", drawn=7, successes=3.0, trials=6.0, pools=zlib.compress(bytes([EASY, HARD, EASY, 0, 0]))
        )
        state = MixtureState(worker_id="w0", environments=(easy,), wall_time=1.0)
        run.send_bytes("control", encode(state), encode_key("mixture", "w0"))
        yield planted
    finally:
        run.stop()


@pytest.fixture(scope="module")
def run(planted: Planted) -> RealRun:
    return planted.run


def url_of(run: RealRun, process: subprocess.Popen[bytes]) -> str:
    def printed() -> str | None:
        match = re.search(r"^page of runs? .*: (http://\S+)$", run.log_of(process), re.MULTILINE)
        return match and match[1]

    return eventually(printed, 60, "the address of the page") or ""


@pytest.fixture(scope="module")
def page(run: RealRun) -> PageClient:
    return PageClient(url_of(run, run.start("ui")))


def command(run: RealRun, *words: str) -> object:
    """JSON that a command prints."""
    return json.loads(run.said(*words, "--json").stdout)


def of_run(page: PageClient, run: RealRun, path: str) -> Any:
    return page.json(f"/api/runs/{run.name}/{path}")


@pytest.fixture(scope="module")
def indexed(run: RealRun, page: PageClient) -> PageClient:
    """The page, once it has indexed what the run holds."""

    def done() -> bool:
        indexed = of_run(page, run, "overview")["indexed"]
        return bool(indexed["offset_done"] == indexed["offset_total"] > 0 and of_run(page, run, "facets")["fates"])

    eventually(done, 60, "the index of the run")
    return page


def test_the_overview_is_what_top_prints(run: RealRun, indexed: PageClient) -> None:
    assert indexed.json("/api/runs") == {"runs": [{"run": run.name, "source": "topics", "learners": ["main"]}]}
    eventually(lambda: of_run(indexed, run, "overview")["top"]["quiet"], 60, "the run to be quiet")
    expected: Any = command(run, "top")
    overview = of_run(indexed, run, "overview")
    for snapshot in (expected, overview["top"]):
        for name in TIMES:
            del snapshot[name]
        for component in snapshot["components"]:
            del component["age_s"]
    assert overview["top"] == expected
    assert overview["top"]["rewards"]
    assert (overview["live"], overview["problem"]) == (False, None)


def test_the_ledger_is_what_the_command_proves_and_offsets_are_listed_by_fate(run: RealRun, page: PageClient) -> None:
    assert of_run(page, run, "ledger")["running"] or of_run(page, run, "ledger")["ledger"]
    kept = eventually(lambda: (got := of_run(page, run, "ledger"))["ledger"] and got, 60, "the ledger")
    assert kept["ledger"] == command(run, "ledger")
    assert kept["seconds"] > 0
    book = kept["ledger"]
    for fate in ("batched", "dead_lettered", "control", "in_flight", "unread"):
        listed = of_run(page, run, f"ledger/offsets?fate={fate}")
        assert listed["total"] == book[fate] == sum(map(length_of, listed["ranges"])), fate
    assert of_run(page, run, "ledger/offsets?fate=dropped&reason=stale_version")["total"] == 4
    first = of_run(page, run, "ledger/offsets?fate=dropped&limit=1")
    second = of_run(page, run, f"ledger/offsets?fate=dropped&limit=1&after={first['next']}")
    assert second["ranges"] != first["ranges"]


def length_of(text: str) -> int:
    first, _, last = text.partition(":")[2].partition("-")
    return int(last) - int(first) + 1


def test_a_rollout_is_what_show_and_lineage_print(run: RealRun, planted: Planted, indexed: PageClient) -> None:
    actual = of_run(indexed, run, f"rollouts?uid={planted.batches[0].uids[0]}")
    assert (actual["matching"], actual["next"]) == (1, None)
    place = actual["rows"][0]["place"]
    details = of_run(indexed, run, f"rollouts/{place.replace(':', '/')}")
    shown: Any = command(run, "show", place)
    assert details["row"] == actual["rows"][0]
    assert details["fate"] == shown[0]["fate"]
    assert details["row"]["advantage"] == pytest.approx(shown[0]["advantage"])
    assert {row["uid"] for row in details["group"]} == {member["uid"] for member in shown[0]["group"]}
    assert details["lineage"] == command(run, "lineage", "--offset", place)
    assert details["tokens"]["texts"] == [CharacterTokenizer().texts()[each] for each in details["tokens"]["ids"]]


def test_rollouts_are_filtered_and_paged(run: RealRun, indexed: PageClient) -> None:
    facets = of_run(indexed, run, "facets")
    assert facets["fates"]["dead_lettered"] == 1
    stale = of_run(indexed, run, "rollouts?fate=dropped&reason=stale_version&order=oldest&limit=3")
    assert (stale["matching"], len(stale["rows"])) == (4, 3)
    rest = of_run(indexed, run, f"rollouts?fate=dropped&reason=stale_version&order=oldest&after={stale['next']}")
    assert [row["uid"] for row in stale["rows"] + rest["rows"]] == [f"stale-{n}" for n in range(4)]
    assert [s["name"] for s in of_run(indexed, run, "series?names=reward/produced")["series"]] == ["reward/produced"]


def test_groups_drops_and_versions_add_up_to_what_the_tools_count(run: RealRun, indexed: PageClient) -> None:
    book: Any = command(run, "ledger")
    assert of_run(indexed, run, "drops?buckets=7")["totals"] == book["dropped"]
    rollouts = of_run(indexed, run, "rollouts?skip=0&limit=2")
    assert rollouts["rows"][1:] == of_run(indexed, run, "rollouts?skip=1&limit=1")["rows"]
    groups = of_run(indexed, run, "groups?zero_variance=false&limit=1000")
    assert groups["matching"] == len(groups["rows"]) > 0
    assert all(row["std"] > 0 for row in groups["rows"])
    assert of_run(indexed, run, "spread")["by_environment"]["env"]["groups"] >= groups["matching"]
    versions = of_run(indexed, run, "weights")["versions"]
    assert [version["version"] for version in versions] == [6, 5, 0]
    place = groups["rows"][0]["members"][0].replace(":", "/")
    estimators = of_run(indexed, run, f"rollouts/{place}/estimators")["estimators"]
    assert {"grpo", "rloo"} <= {estimator["name"] for estimator in estimators}


REFUSED = (
    ("rollouts?limit=many", 400, "limit"),
    ("rollouts?skip=-1", 400, "skip"),
    ("rollouts?version=1.5", 400, "version"),
    ("rollouts?reward_min=nan", 400, "reward_min"),
    ("rollouts?fate=eaten", 400, "fate"),
    ("rollouts?order=random", 400, "order"),
    ("rollouts?after=nonsense", 400, "cursor"),
    ("rollouts?version=99999999999999999999", 400, "version"),
    ("groups?zero_variance=perhaps", 400, "zero_variance"),
    ("drops?buckets=0", 400, "buckets"),
    ("rollouts/0/x", 400, "offset"),
    ("rollouts/0/999999", 404, "999999"),
    ("rollouts/77/0", 404, "77"),
    ("ledger/offsets?fate=gone", 400, "fate"),
    ("dead-letters?after=9:9", 400, "after"),
    ("sessions/none", 404, "session"),
)


def test_a_parameter_that_cannot_be_used_is_told_with_a_remedy(run: RealRun, indexed: PageClient) -> None:
    for path, status, named in REFUSED:
        answer = indexed.get(f"/api/runs/{run.name}/{path}")
        assert answer.status == status, answer.body
        assert answer.json.get("remedy") or status != 400
        assert named in answer.json["error"] + answer.json.get("remedy", "")
    refused = indexed.get("/api/events")
    assert (refused.status, "run=NAME" in refused.json["remedy"]) == (400, True)


def test_texts_of_a_run_travel_as_json_and_never_as_a_page(run: RealRun, indexed: PageClient) -> None:
    script = "<script>alert(1)</script>"
    answer = indexed.get(f"/api/runs/{run.name}/rollouts?environment={script.replace('<', '%3C')}")
    assert (answer.status, answer.json["rows"]) == (200, [])
    letter = indexed.get(f"/api/runs/{run.name}/dead-letters")
    for each in (answer, letter):
        assert each.headers["Content-Type"] == "application/json; charset=utf-8"
        assert each.headers["X-Content-Type-Options"] == "nosniff"
    assert "not a record" in letter.json["rows"][0]["preview"]


def test_dead_letters_are_listed_and_sent_again_once(run: RealRun, page: PageClient) -> None:
    listed = of_run(page, run, "dead-letters")
    expected: Any = command(run, "dlq", "ls")
    assert [row["place"] for row in listed["rows"]] == [letter["letter"] for letter in expected]
    assert (listed["rows"][0]["reason"], listed["rows"][0]["redriven"]) == (expected[0]["reason"], False)
    path, poison = f"/api/runs/{run.name}/dead-letters/redrive", listed["rows"][0]["place"]
    for body in (b"", b"[]", b"{", b'{"places": "0:1"}', b'{"places": []}'):
        assert page.ask("POST", path, CHANGE, body).status == 400
    left = page.ask("POST", path, CHANGE, json.dumps({"places": [poison]}).encode()).json
    assert (left["redriven"], list(left["left"])) == (0, [poison])
    mended = dead_letter(run)
    sent = page.ask("POST", path, CHANGE, json.dumps({"places": [mended]}).encode())
    assert (sent.status, sent.json["redriven"]) == (200, 1)
    assert {row["place"]: row["redriven"] for row in of_run(page, run, "dead-letters")["rows"]}[mended]
    again = page.ask("POST", path, CHANGE, json.dumps({"places": [mended]}).encode())
    assert (again.json["redriven"], list(again.json["left"])) == (0, [mended])


def dead_letter(run: RealRun) -> str:
    """Write a dead letter that holds a sound rollout, as if its error were fixed; return its place."""
    places: list[str] = []
    headers = {
        "__streams.errors.topic": run.topic("rollouts"),
        "__streams.errors.partition": "0",
        "__streams.errors.offset": "3",
        "__streams.errors.message": "planted",
    }
    producer = clients.producer(run.kafka)
    producer.produce(
        run.topic("dead-letters"),
        encode(rollout("again")),
        encode_key("env", "again"),
        0,
        headers=list(headers.items()),
        on_delivery=lambda _error, message: places.append(f"{message.partition()}:{message.offset()}"),
    )
    assert producer.flush(120) == 0
    return places[0]


def test_sessions_and_mixtures_are_those_on_the_log(run: RealRun, page: PageClient) -> None:
    (row,) = of_run(page, run, "sessions?state=cancelled")["rows"]
    assert (row["session"], row["environment"], row["reason"], row["calls"]) == ("s1", "env", "no agent", 0)
    assert of_run(page, run, "sessions?state=open")["rows"] == []
    session = of_run(page, run, "sessions/s1")
    assert session["session"] == row
    assert [event["kind"] for event in session["events"]] == ["start", "failed", "finished"]
    (worker,) = of_run(page, run, "mixture")["workers"]
    environment = {"environment": "env", "weight": 1.0, "drawn": 7, "success": 0.5, "unlocked": True, "paused": False}
    pools = {"easy": 2, "hard": 1, "other": 2}
    assert worker == {"worker": "w0", "environments": [environment | {"pools": pools}]}


def test_a_mixture_has_the_weights_and_pauses_that_were_recorded(run: RealRun, page: PageClient) -> None:
    def weight() -> tuple[float, bool]:
        (worker,) = of_run(page, run, "mixture")["workers"]
        (row,) = worker["environments"]
        return row["weight"], row["paused"]

    assert run.said("environment", "weigh", "env=4").returncode == 0
    # The page keeps its answer for some seconds.
    eventually(lambda: weight() == (4.0, False), 60, "the recorded weight")
    # The command refuses to pause the only environment of a run.
    paused = PausedEnvironment(environment="env", reason="why not")
    run.send_bytes("control", encode(paused), encode_key("environment", "env"))
    eventually(lambda: weight() == (0.0, True), 60, "the pause")


def test_commands_are_recorded_as_the_command_line_records_them(run: RealRun, page: PageClient) -> None:
    path = f"/api/runs/{run.name}/commands"
    assert of_run(page, run, "overview")["commands"]
    recorded = page.ask("POST", path, CHANGE, b'{"command": "scale", "processes": {"env": 3}}')
    assert (recorded.status, recorded.json) == (200, {"recorded": True})
    assert of_run(page, run, "commands")["state"]["processes"] == {"env": 3}
    refused = page.ask("POST", path, CHANGE, b'{"command": "scale", "processes": {"learn": 3}}')
    assert (refused.status, "learner" in refused.json["error"]) == (400, True)
    assert page.ask("POST", path, CHANGE, b'{"command": "explode"}').status == 400
    assert page.ask("POST", path, {}, b'{"command": "scale", "processes": {"env": 9}}').status == 403
    assert of_run(page, run, "commands")["state"]["processes"] == {"env": 3}


def test_a_run_that_moves_tells_its_streams(run: RealRun, page: PageClient) -> None:
    with page.events(f"/api/events?run=absent&run={run.name}") as events:
        assert next(events) == ("unknown", {"run": "absent", "value": None})
        name, first = next(events)
        assert (name, first["run"]) == ("overview", run.name)
        run.send([rollout("more", 0)])
        report: dict[str, Any] = {}
        while "changed" not in report or report["overview"]["top"]["produced"] == first["value"]["top"]["produced"]:
            name, value = next(events)
            assert value["run"] == run.name
            report[name] = value["value"]
    assert report["overview"]["live"]
    assert set(report["changed"]) >= {"rollouts", "steps", "versions", "dead_letters"}


def test_the_page_ends_at_once_while_browsers_listen(run: RealRun) -> None:
    process = run.start("ui")
    page = PageClient(url_of(run, process))
    with page.events(f"/api/events?run={run.name}") as events:
        assert next(events)[0] == "overview"
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert {name for name, _ in events} <= {"overview", "changed"}, "the stream ends"
        assert process.wait(60) == 0
        assert time.monotonic() - began < 5, "a second, and what else a busy machine does"


@pytest.mark.long
def test_several_runs_of_an_archive_are_shown_without_a_broker(
    run: RealRun, planted: Planted, indexed: PageClient, tmp_path: Path
) -> None:
    other = run.beside("other").prepare()
    archive = str(tmp_path / "archive")
    for each in (run, other):
        command(each, "archive", archive)
    process = run.start("ui", "--archive", archive, "--run", other.name, kafka__bootstrap_servers="127.0.0.1:1")
    page = PageClient(url_of(run, process))
    archived = [{"run": name, "source": "archive", "learners": []} for name in (other.name, run.name)]
    listed = page.json("/api/runs")["runs"]
    assert [(each["run"], each["source"]) for each in listed] == [(each["run"], "archive") for each in archived]
    uid = planted.batches[0].uids[0]

    def found() -> Any:
        rows = of_run(page, run, f"rollouts?uid={uid}")["rows"]
        return rows and rows[0]["fate"] == "trained" and rows

    rows = eventually(found, 60, "the index of the archive")
    assert rows == of_run(indexed, run, f"rollouts?uid={uid}")["rows"]
    live, held = of_run(indexed, run, "overview")["top"], of_run(page, run, "overview")["top"]
    same = ("batched", "trained", "skipped", "dropped", "dead_lettered", "step", "policy_version", "rewards")
    assert {name: held[name] for name in same} == {name: live[name] for name in same}
    refused = page.get(f"/api/runs/{run.name}/ledger")
    assert refused.status == 404
    assert "restore" in refused.body.decode()


def test_a_run_that_is_not_there_is_an_error_that_names_those_that_are(run: RealRun) -> None:
    done = answer_of(run.directory, *run.command("ui")[4:], "--run", "nowhere")
    assert done.returncode == 2
    assert "there is no run nowhere, but " in done.stderr


def test_commands_answer_as_users_start_them_several_at_once_and_while_a_page_fills_the_index(
    planted: Planted, tmp_path: Path
) -> None:
    run, batch = replace(planted.run, directory=tmp_path), planted.batches[0]
    config = RunConfig(run=run.name, kafka=run.kafka, data_dir=tmp_path)
    file = index_file(config)
    for words in (("lineage", "--rollout", batch.uids[0]), ("show", batch.uids[0]), ("lineage", "--policy", "6")):
        file.unlink(missing_ok=True)
        command = run.command(*words, "--json")
        both = [subprocess.Popen(command, stdout=subprocess.PIPE, cwd=run.directory) for _ in range(2)]
        answers = [process.communicate(timeout=300)[0] for process in both]
        assert [process.returncode for process in both] == [0, 0]
        file.unlink()
        with RunIndex.open(config):  # It owns the index, and has not read anything.
            again = answer_of(run.directory, *command[4:])
        assert again.returncode == 0, again.stderr
        assert answers == [again.stdout.encode()] * 2


def test_the_page_beside_a_run_says_where_it_is_and_its_failure_is_not_that_of_the_run(run: RealRun) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    with taken, Supervisor(run.directory / "logs", environment=run.environment()) as supervisor:
        config = RunConfig(run=run.name, kafka=run.kafka, data_dir=run.directory, ui=UiConfig(port=0))
        page = RunPage(config, plans.write(config), supervisor)
        lines: list[str] = []

        def look() -> bool:
            supervisor.poll(0.05)
            page.tell(lines.append)
            return bool(lines)

        eventually(look, 60, "the address of the page")
        assert lines[0].startswith(f"page of run {run.name}: http://127.0.0.1:")
        assert PageClient(lines[0].rpartition(" ")[2]).json("/api/runs")["runs"][0]["run"] == run.name
        look()
        assert len(lines) == 1, "it is said once"
        supervisor.stop(["page"])
        config = replace(config, ui=UiConfig(port=taken.getsockname()[1]))
        page = RunPage(config, plans.write(config), supervisor)
        lines.clear()
        eventually(look, 60, "the failure of the page")
        assert re.search(r"cannot listen.*the run goes on", lines[0])
    with Supervisor(run.directory / "logs") as supervisor:
        config = replace(config, ui=UiConfig())
        RunPage(config, plans.write(config), supervisor).tell(lambda line: pytest.fail(line))
        assert supervisor.pids == {}, "a run serves no page unless ui.port says so"
