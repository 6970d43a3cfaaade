"""Over real connections, the server of the page answers only permitted clients, and tells browsers what they may do."""

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.cookies import SimpleCookie
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.index.indexed_run import RolloutPlace
from rollstream.pipeline.ui.server.answers import CONTENT_SECURITY
from rollstream.pipeline.ui.server.page_server import PageFiles, PageServer
from rollstream.pipeline.ui_config import UiConfig
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError, TopicError
from rollstream.topics.records import NamedArray
from rollstream.topics.wire.media import Medium
from tests.support.log_lines import log_lines
from tests.support.page import Answer, PageClient, page_server

SECRET = "a secret of thirty-one letters."
CHANGE = {"X-Rollstream": "1"}


@pytest.fixture(scope="module")
def open_page() -> Iterator[PageClient]:
    """A server on a loopback address, without a token."""
    with page_server(UiConfig(port=0)) as server:
        yield PageClient(server.url)


@pytest.fixture(scope="module")
def secret_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageClient]:
    """A server that requires a token."""
    file = tmp_path_factory.mktemp("secret") / "token"
    file.write_text(SECRET)
    with page_server(UiConfig(port=0, token=f"file:{file}", names=("page.example",))) as server:
        yield PageClient(server.url)


def cookie_of(answer: Answer) -> SimpleCookie:
    return SimpleCookie(answer.headers["Set-Cookie"])


def test_a_loopback_address_needs_no_token_and_answers_json(open_page: PageClient) -> None:
    answer = open_page.get("/api/runs")
    assert (answer.status, answer.json) == (200, {"runs": []})
    assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
    assert answer.headers["Cache-Control"] == "no-store"
    assert "Set-Cookie" not in answer.headers


@pytest.mark.parametrize(
    ("path", "status"),
    [("/", 200), ("/api/runs", 200), ("/api/runs/none/overview", 404), ("/api/nothing", 404), ("/none.js", 404)],
)
def test_every_answer_keeps_the_browser_within_the_page(open_page: PageClient, path: str, status: int) -> None:
    answer = open_page.get(path)
    assert answer.status == status
    assert answer.headers["Content-Security-Policy"] == CONTENT_SECURITY
    assert "unsafe" not in CONTENT_SECURITY
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert "Access-Control-Allow-Origin" not in answer.headers
    if status == 404:
        assert "error" in answer.json


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "", "a/b"])
def test_a_host_that_is_not_ours_is_refused_as_a_name_server_may_say_anything(open_page: PageClient, host: str) -> None:
    for path in ("/", "/api/runs"):
        answer = open_page.get(path, Host=host)
        assert answer.status == 421
        assert b"ui.names" in answer.body


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:9", "[::1]:8080", "192.168.0.7:80"])
def test_addresses_and_localhost_are_ours_at_any_port_as_ports_are_forwarded(open_page: PageClient, host: str) -> None:
    assert open_page.get("/api/runs", Host=host).status == 200


def test_further_names_are_a_setting(secret_page: PageClient) -> None:
    assert secret_page.get("/", Host="page.example").status == 401
    assert secret_page.get("/", Host="other.example").status == 421


def test_the_token_is_given_once_and_then_a_cookie_that_scripts_and_other_sites_do_not_have(
    secret_page: PageClient,
) -> None:
    assert urlsplit(secret_page.url).query == "", "a token that was set is known, and must not be in logs"
    assert secret_page.get("/api/runs").status == 401
    assert secret_page.get("/").status == 401
    given = secret_page.get(f"/?token={SECRET.replace(' ', '%20')}")
    assert (given.status, given.headers["Location"]) == (303, "./")
    assert SECRET not in str(given.headers)
    (name, morsel), *others = cookie_of(given).items()
    assert others == []
    assert (morsel["httponly"], morsel["samesite"], morsel["path"]) == (True, "Strict", "/")
    cookie = f"{name}={morsel.value}"
    assert secret_page.get("/api/runs", Cookie=cookie).status == 200
    assert secret_page.get("/", Cookie=cookie).status == 200
    assert secret_page.get("/api/runs", Cookie=f"{name}={morsel.value[:-1]}x").status == 401
    assert secret_page.get("/api/runs", Cookie=f"other={morsel.value}").status == 401


@pytest.mark.parametrize("token", ["", "a%20secret", "x" * 4000, "%C3%A9", "%00", f"{SECRET.replace(' ', '%20')}x"])
def test_another_token_is_refused(secret_page: PageClient, token: str) -> None:
    answer = secret_page.get(f"/?token={token}")
    assert answer.status == 401
    assert "Set-Cookie" not in answer.headers


def test_programs_give_the_token_as_bearer_and_never_in_the_address_of_the_api(secret_page: PageClient) -> None:
    assert secret_page.get("/api/runs", Authorization=f"Bearer {SECRET}").status == 200
    assert secret_page.get("/api/runs", Authorization=f"bearer {SECRET[:-1]}").status == 401
    assert secret_page.get(f"/api/runs?token={SECRET.replace(' ', '%20')}").status == 401


def test_a_token_or_a_cookie_beyond_ascii_is_a_wrong_one(secret_page: PageClient) -> None:
    (name, morsel), *_others = cookie_of(secret_page.get(f"/?token={SECRET.replace(' ', '%20')}")).items()
    for encoding in ("utf-8", "latin-1"):
        # The client sends each character of a header as one byte.
        beyond = "é".encode(encoding).decode("latin-1")
        assert secret_page.get("/api/runs", Authorization=f"Bearer {SECRET}{beyond}").status == 401
        assert secret_page.get("/api/runs", Cookie=f"{name}={morsel.value[:-1]}{beyond}").status == 401
    assert secret_page.get("/?token=%E9").status == 401


def test_a_page_of_another_origin_reads_nothing(open_page: PageClient) -> None:
    own = f"http://{open_page.place}"
    assert open_page.get("/api/runs", Origin=own).status == 200
    for origin in ("http://evil.example", "null", f"{own}1", f"ftp://{open_page.place}", ""):
        assert open_page.get("/api/runs", Origin=origin).status == 403
    for site in ("cross-site", "same-site"):
        assert open_page.get("/api/runs", Sec_Fetch_Site=site).status == 403
    assert open_page.get("/api/runs", Sec_Fetch_Site="none").status == 200
    assert open_page.get("/", Sec_Fetch_Site="cross-site").status == 200, "a link to the page may be anywhere"


def test_changes_need_a_header_that_forms_of_other_sites_cannot_send(open_page: PageClient) -> None:
    path = "/api/runs/none/commands"
    assert open_page.ask("POST", path, body=b"{}").status == 403
    assert open_page.ask("POST", path, {"X-Rollstream": "yes"}, b"{}").status == 403
    assert open_page.ask("POST", path, {**CHANGE, "Origin": "http://evil.example"}, b"{}").status == 403
    assert open_page.ask("OPTIONS", path, {"Access-Control-Request-Method": "POST"}).status == 403
    assert open_page.ask("POST", path, CHANGE, b"{}").status == 404, "there is no such run"


@pytest.mark.parametrize(
    "path",
    [
        "/../server/api.py",
        "/..%2fserver/api.py",
        "/%2e%2e/config.py",
        "/....//config.py",
        "//etc/passwd",
        "/vendor/../../config.py",
        "/.hidden.js",
        "/index.html%00.js",
        "/index.html/",
        "/C:%5cindex.html",
    ],
)
def test_no_path_leads_out_of_the_folder_of_the_page(open_page: PageClient, path: str) -> None:
    answer = open_page.get(path)
    assert answer.status in (400, 404)
    assert b"import" not in answer.body


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret.js").write_text("secret")
    folder = tmp_path / "page"
    folder.mkdir()
    (folder / "link.js").symlink_to(tmp_path / "secret.js")
    (folder / "own.js").write_text("own")
    files = PageFiles(folder)
    assert files.find("own.js") == folder / "own.js"
    assert files.find("link.js") is None


def test_files_are_asked_for_again_and_sent_once(open_page: PageClient) -> None:
    first = open_page.get("/")
    assert first.headers["Content-Type"] == "text/html; charset=utf-8"
    again = open_page.get("/", If_None_Match=f'"other", {first.headers["ETag"]}')
    assert (again.status, again.body) == (304, b"")
    assert again.headers["Content-Security-Policy"] == CONTENT_SECURITY
    assert open_page.get("/", If_None_Match='"other"').status == 200


@pytest.mark.parametrize("length", [5_000, 60_000, 10_000_000])
def test_a_huge_query_is_refused_and_the_server_goes_on(open_page: PageClient, length: int) -> None:
    try:
        answer = open_page.get(f"/api/runs?text={'x' * length}")
    except ConnectionError:
        assert length > 60_000, "the parser closes the connection while the request is sent"
    else:
        assert answer.status in (400, 414)
    assert open_page.get("/api/runs").status == 200


def test_an_address_that_is_not_loopback_draws_a_token_and_names_it_in_the_url() -> None:
    with page_server(UiConfig(host="0.0.0.0", port=0)) as server:
        client, query = PageClient(server.url), urlsplit(server.url).query
        assert len(query.removeprefix("token=")) >= 32
        assert client.get("/api/runs").status == 401
        assert client.get(f"/?{query}").status == 303
    with page_server(UiConfig(host="0.0.0.0", port=0)) as server:
        assert urlsplit(server.url).query != query


def test_a_port_in_use_is_an_error_that_names_the_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = PageServer(UiConfig(port=taken.getsockname()[1]), {})

        async def enter() -> None:
            async with server:
                pass

        with pytest.raises(ConfigurationError, match=r"ui\.port"):
            asyncio.run(enter())


def test_brokers_that_do_not_answer_hold_up_nobody_who_asks_for_something_else(tmp_path: Path) -> None:
    of_run = ("ledger", "ledger/offsets", "sessions", "dead-letters", "mixture", "rollouts", "overview")
    paths = [f"/api/runs/r/{name}" for name in of_run] + ["/api/events?run=r"]
    with socket.create_server(("127.0.0.1", 0)) as deaf, ThreadPoolExecutor(len(paths)) as asking:
        kafka = KafkaConfig(bootstrap_servers=f"127.0.0.1:{deaf.getsockname()[1]}")
        with page_server(UiConfig(port=0), RunConfig(run="r", kafka=kafka, data_dir=tmp_path)) as server:
            page = PageClient(server.url)
            waiting = [asking.submit(page.get, path) for path in paths]
            page.json("/api/runs")
            seconds = []
            for _ in range(50):
                began = time.monotonic()
                assert page.json("/api/runs") == {"runs": [{"run": "r", "source": "topics", "learners": []}]}
                seconds.append(time.monotonic() - began)
            blocked = [path for path, answer in zip(paths, waiting, strict=True) if not answer.done()]
            wait = {f"/api/runs/r/{name}" for name in ("sessions", "dead-letters", "overview")} | {"/api/events?run=r"}
            assert set(blocked) >= wait, "they wait for the brokers"
            assert sorted(seconds)[25] < 1, "an answer of the loop takes milliseconds"
            assert page.json("/api/runs/r/ledger")["ledger"] is None
            began = time.monotonic()
        assert time.monotonic() - began < 10, "the server ends whatever the brokers do"


def test_a_mistake_of_ours_is_logged_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, open_page: PageClient
) -> None:
    def mistaken(*_: object) -> None:
        raise NameError("name 'etag' is not defined")

    monkeypatch.setattr(PageFiles, "answer", mistaken)
    assert open_page.get("/").status == 500
    assert ", in mistaken" in log_lines(caplog)


def test_settings_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"ui\.port is 65536"):
        UiConfig(port=65536)
    with pytest.raises(ConfigurationError, match=r"ui\.host is empty"):
        UiConfig(host="")


class RunWithImages:
    """Stands in for a run of one rollout with four images."""

    source = "topics"
    media = tuple(
        Medium(number, media_type, NamedArray(dtype="|u1", shape=(3,), data=b"PNG"))
        for number, media_type in enumerate(("image/png", "image/svg+xml", "text/html", "image/webp"))
    )

    def start(self) -> None: ...
    def close(self) -> None: ...

    async def ask(self, question: Callable[["RunWithImages"], Medium]) -> Medium:
        return question(self)

    def medium(self, place: RolloutPlace, number: int) -> Medium:
        if (place, number) == ((0, 7), 4):
            raise TopicError("store/20261130/ab is missing")
        assert place == (0, 7)
        return self.media[number]


def test_images_are_sent_as_such_and_what_could_run_in_a_browser_is_not() -> None:
    async def answers() -> list[Answer]:
        async with PageServer(UiConfig(port=0), {"main": RunWithImages()}) as server:  # type: ignore[dict-item]
            page = PageClient(server.url)
            paths = [f"/api/runs/main/rollouts/0/7/media/{number}" for number in (0, 3, 1, 2, 4, "x", "-1")]
            return [await asyncio.to_thread(page.get, path) for path in paths]

    shown = asyncio.run(answers())
    assert [answer.status for answer in shown] == [200, 200, 415, 415, 404, 404, 404]
    assert [answer.headers["Content-Type"] for answer in shown[:2]] == ["image/png", "image/webp"]
    assert [answer.body for answer in shown[:2]] == [b"PNG", b"PNG"]
    assert shown[0].headers["X-Content-Type-Options"] == "nosniff"
    assert shown[4].json["error"] == "store/20261130/ab is missing"
