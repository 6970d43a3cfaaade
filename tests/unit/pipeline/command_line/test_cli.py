"""The command line: an error is one line and an exit code, help is immediate, a user's own files do not matter."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest

from docs.build import commands
from rollstream.pipeline.command_line.cli import build_parser
from rollstream.pipeline.command_line.command_parser import configuration_flags
from rollstream.topics.errors import RollstreamError
from rollstream.topics.kafka import clients
from tests.support.command_line import answer_of, in_full
from tests.support.paths import ROOT

COMMAND = Path(sys.executable).with_name("rollstream")
NOBODY = "127.0.0.1:1"


def start(arguments: Sequence[str], cwd: Path, **environment: str) -> subprocess.Popen[str]:
    base = {k: v for k, v in os.environ.items() if not k.startswith(("ROLLSTREAM", "KAFKA_"))}
    return subprocess.Popen(
        [str(COMMAND), *in_full(arguments)],
        cwd=cwd,
        env={**base, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> "subprocess.CompletedProcess[str]":
    output, errors = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def assert_one_line(answer: "subprocess.CompletedProcess[str]", *says: str) -> None:
    assert answer.returncode == 2, answer.stderr
    assert len(answer.stderr.splitlines()) == 1, answer.stderr
    assert answer.stderr.startswith("rollstream: ")
    for part in says:
        assert part in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (["topics", "plan", "--set", "grouping.batch_rollout=3"], {}, ["--set", "grouping.batch_rollouts"]),
        (["group", "--config", "bad.toml"], {}, ["bad.toml", "unknown key kafka.bootstrap", "kafka.bootstrap_servers"]),
        (["env", "--config", "none.toml"], {}, ["none.toml cannot be read"]),
        (["run", "bad.toml"], {}, ["bad.toml", "unknown key"]),
        (["learn"], {"ROLLSTREAM_LEARNER__STEPS": "1"}, ["ROLLSTREAM_LEARNER__STEPS", "unknown key learner.steps"]),
        (["demo", "--steps", "many"], {}, ["learner.max_steps expects a whole number, got 'many'"]),
        (["demo", "--task", "dsort5"], {}, ["no environment is named 'dsort5'", "dsort3"]),
        (["collect"], {}, ["collect.player is ''", "named package.module:function"]),
        (["collect", "--set", "collect.player=os:sep"], {}, ["collect.player is 'os:sep', a str"]),
        (["label"], {}, ["no labeler is named", "set labeling.labeler"]),
        (["fill"], {}, ["fill.directory is empty"]),
        (["run", "--set", "learner.sequence_length=11"], {}, ["may have 12 tokens", "set it to 12"]),
        (["learn", "--set", "learner.sequence_length=11"], {}, ["may have 12 tokens", "set it to 12"]),
        (["demo", "--set", "learner.sequence_length=11"], {}, ["tokens", "more than learner.sequence_length, 11"]),
        (["prune", "--dry-run", "--keep-hours", "inf"], {}, ["--keep-hours must be 0 or more, and finite"]),
        (["group", "--set", "kafka.compression_level=13"], {}, ["kafka.compression_level is 13", "-1 to 12"]),
        (["topics", "plan", "-X", "no.such.key=1"], {}, ['No such configuration property: "no.such.key"']),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_2(
    arguments: list[str],
    environment: dict[str, str],
    says: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "bad.toml").write_text('[kafka]\nbootstrap = "x"\n')
    assert_one_line(answer_of(tmp_path, *arguments), *says)


def test_a_file_that_cannot_be_written_is_one_line_and_exit_2(tmp_path: Path) -> None:
    answer = answer_of(tmp_path, "deploy", "compose", "-o", str(tmp_path / "none" / "compose.yaml"))
    assert_one_line(answer, "No such file or directory", "none/compose.yaml", "check the path")


def test_a_broker_that_a_variable_names_and_nobody_runs_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", NOBODY)
    assert_one_line(answer_of(tmp_path, "broker", "start"), "KAFKA_BOOTSTRAP_SERVERS is set to 127.0.0.1:1", "unset it")


def test_an_error_cannot_send_commands_to_a_terminal(tmp_path: Path) -> None:
    answer = answer_of(tmp_path, "topics", "plan", "--set", "\x1b]0;owned\x07\u202e=1")
    assert answer.returncode == 2
    assert "\\u001b]0;owned\\u0007\\u202e" in answer.stderr
    assert not {"\x1b", "\x07", "\u202e"} & {*answer.stderr}


@pytest.mark.parametrize(
    ("words", "servers"),
    [
        ("learn --set supervisor.ready_timeout_s=0", NOBODY),
        ("ledger", NOBODY),
        ("topics plan", "no-such-host.invalid:9092"),
    ],
)
def test_no_broker_is_one_line_and_exit_2_for_tools_and_roles(
    words: str, servers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "check_broker", partial(clients.check_broker, timeout_s=0.0))
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", servers)
    answer = answer_of(tmp_path, *words.split())
    assert_one_line(answer, f"no Kafka broker answers at {servers}", "rollstream broker start")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ledgr"], "has no command 'ledgr', did you mean ledger?"),
        (["topics", "aply"], "rollstream topics has no command 'aply', did you mean apply?"),
        (["broker", "strat"], "did you mean start?"),
        (["verify", "--last", "0"], "argument --last: '0' is not a number from 1 on"),
        (["verify", "--last", "all"], "argument --last: 'all' is not a number from 1 on"),
        (["topics", "xyz"], "choose from plan, apply, describe, acls; see `rollstream topics --help`"),
        (["show", "0:1", "--color", "alway"], "argument --color: invalid choice 'alway', did you mean always?"),
        ([], "required: COMMAND; see `rollstream --help`"),
        (["demo", "--steps", "many"], "--steps: learner.max_steps expects a whole number"),
        (["ledger", "--run", "a/b"], "--run: run name 'a/b'"),
    ],
)
def test_a_mistyped_word_is_reported_in_one_line_with_the_nearest_one(
    arguments: list[str], says: str, tmp_path: Path
) -> None:
    assert_one_line(answer_of(tmp_path, *arguments), says)


def test_the_version_is_the_installed_one(tmp_path: Path) -> None:
    output, errors = start(["--version"], tmp_path).communicate(timeout=300)
    assert (output, errors) == (f"rollstream {metadata.version('rollstream')}\n", "")


IN_BASH = """
source <("$0" completion bash)
for line; do
  COMP_LINE="$line"; COMP_POINT=${#line}; COMP_TYPE=9; COMPREPLY=()
  _python_argcomplete "$0"
  echo "${COMPREPLY[@]}"
done
"""
COMPLETIONS = {
    "le": {"ledger"},
    "role le": {"learn"},
    "steer le": {"learner"},
    "topics ": {"plan", "apply", "describe", "acls", "-h", "--help"},
    "ledger --b": {"--bootstrap-servers", "--by"},
    "ledger --set grouping.batch_": {"grouping.batch_rollouts=", "grouping.batch_bytes="},
    "completion ": {"bash", "zsh", "fish", "-h", "--help"},
}


def test_bash_completes_commands_flags_and_settings(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", IN_BASH, str(COMMAND), *(f"rollstream {typed}" for typed in COMPLETIONS)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stderr == ""
    assert dict(zip(COMPLETIONS, (set(line.split()) for line in done.stdout.splitlines()), strict=True)) == COMPLETIONS


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_offered_the_same(shell: str, tmp_path: Path) -> None:
    """Ask as the scripts of these shells do, which are printed, too."""
    script, errors = start(["completion", shell], tmp_path).communicate(timeout=300)
    assert errors == ""
    assert f'_ARGCOMPLETE_SHELL="{shell}"' in script or f"_ARGCOMPLETE_SHELL {shell}" in script
    answer = tmp_path / "answer"
    variables = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_SHELL": shell, "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_DFS": "\t"}
    line = {"COMP_LINE": "rollstream led", "COMP_POINT": "14", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    start([], tmp_path, **variables, **line).communicate(timeout=300)
    assert answer.read_text().split()[0] == "ledger"


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    for arguments in (["--debug", "topics", "plan", "--set", "x=1"], ["topics", "plan", "--set", "x=1", "--debug"]):
        with pytest.raises(RollstreamError):
            answer_of(tmp_path, *arguments)


def test_a_closed_output_pipe_is_no_error(tmp_path: Path) -> None:
    process = start(["--help"], tmp_path)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    assert "Traceback" not in process.communicate(timeout=300)[1]


def test_every_command_answers_help(tmp_path: Path) -> None:
    for name in commands():
        answer = answer_of(tmp_path, *name.split(), "--help")
        assert answer.returncode == 0, answer.stderr
        assert f"usage: rollstream {name}" in answer.stdout


def test_a_users_own_files_of_our_names_do_not_matter(tmp_path: Path) -> None:
    for name in ("pipeline", "topics", "consumers", "producers", "infra"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong file was imported')\n")
    assert_one_line(ended(start(["topics", "plan", "--set", "x=1"], tmp_path)), "unknown key x")
    child = subprocess.run(
        [sys.executable, "-P", "-m", "rollstream", "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stderr


LOADING = """
import os, sys
code = compile(sys.argv[1], "code", "exec")
before = set(sys.modules)
try:
    exec(code)
except SystemExit:
    pass
files = {getattr(module, "__file__", None) for name, module in sys.modules.items() if name not in before}
print(sum(os.path.getsize(file) for file in files if file and os.path.exists(file)), file=sys.stderr)
"""


def bytes_loaded_by(code: str) -> int:
    """Size of the modules that a fresh interpreter loads for this code; the time would depend on the machine's load."""
    done = subprocess.run(
        [sys.executable, "-c", LOADING, code], cwd=ROOT, check=True, capture_output=True, text=True, timeout=300
    )
    return int(done.stderr)


def test_help_loads_less_than_numpy() -> None:
    cli = "rollstream.pipeline.command_line"
    shown = f"import {cli}.entry; from {cli}.cli import main; main(['--help'])"
    assert bytes_loaded_by(shown) < bytes_loaded_by("import numpy") / 2


def test_the_core_loads_no_more_than_three_times_what_numpy_does() -> None:
    core = (
        "import rollstream.topics.wire.codec, rollstream.topics.kafka.clients, rollstream.pipeline.config;"
        "import rollstream.consumers.grouping.process.grouping_process"
    )
    assert bytes_loaded_by(core) <= 3 * bytes_loaded_by("import numpy")


def test_flags_may_follow_any_command() -> None:
    args = build_parser().parse_args(["demo", "--seed", "3", "--steps", "7", "-b", "h:1", "--keep"])
    assert (vars(args)["seed="], vars(args)["learner.max_steps="], args.keep) == ("3", "7", True)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--config", "a run.toml", "--run", "main"],
        ["-b", "h:1,g:1", "--set", "task=add", "--set", 'worker.inference_urls=["http://a/v1"]'],
        ["--bootstrap-servers=h:1", "-X", "security.protocol=SSL", "-X", "sasl.password=env:KEY"],
    ],
)
def test_the_flags_of_one_command_configure_another_in_the_same_way(flags: list[str]) -> None:
    doctor = build_parser().parse_args(["doctor", *flags])
    words = shlex.split(f"topics apply{configuration_flags(doctor)}")
    apply = build_parser().parse_args(words)
    names = ("config", "set", "client", "run=", "kafka.bootstrap_servers=")
    assert [getattr(apply, name) for name in names] == [getattr(doctor, name) for name in names]


def test_the_example_of_every_command_is_shown_as_it_is_typed_on_lines_that_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = 0
    for name, parser in commands().items():
        _, example, text = parser.format_help().partition("example:\n")
        if not example:
            continue
        shown += 1
        assert max(map(len, text.splitlines())) <= 80, name
        words = shlex.split(text.replace("\\\n", ""))
        assert words[: 1 + len(name.split())] == ["rollstream", *name.split()]
        parser.parse_args(words[1 + len(name.split()) :])
    assert shown > 15
