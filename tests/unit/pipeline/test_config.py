"""One typed tree from a file, variables and flags; whatever is wrong with it is one error that says where."""

import dataclasses
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.pipeline.config import RunConfig, load, secret_references, to_toml
from rollstream.pipeline.deployment.container_settings import withheld_variables
from rollstream.pipeline.deployment.description import ROLES
from rollstream.pipeline.run import plan
from rollstream.pipeline.run.plan import child_environment
from rollstream.pipeline.settings import known_keys
from rollstream.producers.inference.client import CompletionsClient
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.kafka import clients
from rollstream.topics.secrets import is_secret, resolve, resolve_options


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_flags_win_over_variables_and_variables_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, 'run = "a"\n[grouping]\nbatch_rollouts = 1\nseed = 1\nmin_group_size = 1\n')
    environment = {"ROLLSTREAM_GROUPING__SEED": "2", "ROLLSTREAM_GROUPING__MIN_GROUP_SIZE": "2"}
    config = load(path, environment=environment, flags=["grouping.min_group_size=3"])
    grouping = config.grouping
    assert (config.run, grouping.batch_rollouts, grouping.seed, grouping.min_group_size) == ("a", 1, 2, 3)


def test_the_usual_variable_names_the_brokers(tmp_path: Path) -> None:
    path = write(tmp_path, '[kafka]\nbootstrap_servers = "file:1"\n')
    environment = {"KAFKA_BOOTSTRAP_SERVERS": "variable:1"}
    assert load(path, environment=environment).kafka.bootstrap_servers == "variable:1"
    flags = ["kafka.bootstrap_servers=flag:1"]
    assert load(path, environment=environment, flags=flags).kafka.bootstrap_servers == "flag:1"


@pytest.mark.parametrize(
    ("how", "value"),
    [
        ({"flags": ["kafka.client.security.protocol=SSL"]}, "SSL"),
        ({"client_flags": ["security.protocol=SSL"]}, "SSL"),
        ({"environment": {"ROLLSTREAM_KAFKA__CLIENT__SECURITY_PROTOCOL": "SSL"}}, "SSL"),
    ],
)
def test_kafkas_own_keys_pass_through_dotted(how: dict[str, Any], value: str) -> None:
    assert load(**how).kafka.client == {"security.protocol": value}


@pytest.mark.parametrize(
    "line", ['"enable.ssl.certificate.verification" = false', "enable.ssl.certificate.verification = false"]
)
def test_kafkas_own_keys_in_a_file_may_be_quoted_or_not(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, f"[kafka.client]\n{line}\nlinger.ms = 3\n")
    assert load(path).kafka.client == {"enable.ssl.certificate.verification": "false", "linger.ms": "3"}


def test_clients_keys_of_several_origins_are_merged(tmp_path: Path) -> None:
    path = write(tmp_path, '[kafka.client]\n"a.b" = "file"\n"c.d" = "file"\n')
    assert load(path, client_flags=["c.d=flag"]).kafka.client == {"a.b": "file", "c.d": "flag"}


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"flags": ["learner.max_step=3"]}, "--set learner.max_step: unknown key learner.max_step"),
        ({"flags": ["learner.max_step=3"]}, "did you mean learner.max_steps?"),
        ({"flags": ["lerner.max_steps=3"]}, "did you mean learner?"),
        ({"flags": ["batch_rollouts=3"]}, "did you mean grouping.batch_rollouts?"),
        ({"flags": ["grouping"]}, "--set grouping: give key=value"),
        ({"flags": ["grouping=3"]}, "grouping is a table of settings"),
        (
            {"flags": ["learner.max_steps=many"]},
            "learner.max_steps: learner.max_steps expects a whole number, got 'many'",
        ),
        ({"flags": ["learner.max_steps=2.5"]}, "expects a whole number, got '2.5'"),
        ({"flags": ["learner.model.tie_word_embeddings=perhaps"]}, "expects true or false"),
        ({"flags": ["worker.logprobs_mode=cooked"]}, "expects one of 'raw', 'processed', got 'cooked'"),
        ({"flags": ["worker.inference_urls=http://x"]}, "expects a list, each item a string as in TOML"),
        (
            {"flags": ["learner.model.num_key_value_heads=0"]},
            "num_attention_heads is 2 and num_key_value_heads 0; both must be at least 1",
        ),
        *(
            ({"flags": [f"{setting}={value}"]}, f"{setting} is {value}; it must be a finite number")
            for setting, value in (
                ("supervisor.restarts", -1),
                ("supervisor.stop_timeout_s", "nan"),
                ("supervisor.backoff_s", -1.0),
                ("supervisor.adoption_s", "inf"),
                ("worker.drain_timeout_s", "nan"),
                ("kafka.transaction_timeout_s", "nan"),
            )
        ),
        ({"flags": ["learner.model.head_dim=3"]}, "--set learner.model.head_dim: [learner.model] head_dim 3 is odd"),
        ({"flags": ["run=a/b"]}, "run name 'a/b' cannot be part of a topic name"),
        ({"flags": ["grouping.batch_bytes=9000000"]}, "leaves no room in kafka.max_record_bytes"),
        # A grouping process would also refuse it at its start.
        ({"flags": ["kafka.max_record_bytes=4500000"]}, "batch_bytes 4194304 leaves no room in kafka.max_record_bytes"),
        ({"flags": ["grouping.batch_rollouts=1000"]}, "raise max_policy_lag to"),
        ({"client_flags": ["group.id="]}, "-X group.id: [kafka] kafka.client sets group.id"),
        (
            {"client_flags": ["linger.ms=7", "isolation.level=read_committed", "client.id=me"]},
            "-X isolation.level: [kafka] kafka.client sets isolation.level, which depends on the reader",
        ),
        ({"client_flags": ["nonsense"]}, "-X nonsense: give key=value"),
        (
            {"environment": {"ROLLSTREAM_GROUPING__BATCH_ROLLOUT": "3"}},
            "ROLLSTREAM_GROUPING__BATCH_ROLLOUT: unknown key grouping.batch_rollout; did you mean",
        ),
        (
            {"environment": {"ROLLSTREAM_LEARNER__MAX_STEPS": "x"}},
            "ROLLSTREAM_LEARNER__MAX_STEPS: learner.max_steps expects a whole number",
        ),
    ],
)
def test_a_wrong_setting_says_where_what_and_what_instead(how: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(**how)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "[grouping]\nbatch_rollout = 3\n",
            "unknown key grouping.batch_rollout; did you mean grouping.batch_rollouts?",
        ),
        ('[grouping]\nbatch_rollouts = "3"\n', "grouping.batch_rollouts expects a whole number, got '3'"),
        ("[grouping]\nbatch_rollouts = 0\n", "grouping.batch_rollouts is 0; it must be at least 1"),
        ("grouping = 3\n", "grouping is a table of settings"),
        ("[grouping\n", "is not TOML"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigurationError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert says in str(caught.value)


TWO_SECTIONS = """# what the demo needs
[grouping]
exclude_workers = [
  "a",
]
batch_rollouts = 16
batch_bytes = 1024

[learner]
max_steps = 3
optimizer.epsilon = 1e-9
"""


@pytest.mark.parametrize(
    ("changed", "how", "origin"),
    [
        (("= 16", "= 0"), {}, "run.toml:6: "),
        (("= 16", '= "many"'), {}, "run.toml:6: "),
        (("[\n", "[\n 3,"), {}, "run.toml:3: "),
        (("max_steps", "max_step"), {}, "run.toml:10: "),
        (("optimizer.epsilon", "optimizer.epsilom"), {}, "run.toml:11: "),
        (("= 16", "= 16"), {"environment": {"ROLLSTREAM_GROUPING__BATCH_ROLLOUTS": "0"}}, None),
        (("= 16", "= 0"), {"environment": {"ROLLSTREAM_GROUPING__BATCH_ROLLOUTS": "-1"}}, None),
        (("= 1024", "= 9000000"), {}, "run.toml:7: "),
        (("= 1024", "= 6000000"), {"flags": ["kafka.max_record_bytes=6000000"]}, "--set kafka.max_record_bytes: "),
        (("= 16", "= 16"), {"options": [("--steps", "learner.max_steps=many")]}, "--steps: "),
        (("= 16", "= 16"), {"options": [("--run", "run=a/b")]}, "--run: "),
    ],
)
def test_the_error_for_a_bad_value_names_its_origin(
    tmp_path: Path, changed: tuple[str, str], how: dict[str, Any], origin: str | None
) -> None:
    """The error names the line of the file, the variable or the flag that gave the value, whatever else is set."""
    path = write(tmp_path, TWO_SECTIONS.replace(*changed))
    environment = {"ROLLSTREAM_GROUPING__SEED": "1", "ROLLSTREAM_LEARNER__SEED": "1", **how.pop("environment", {})}
    with pytest.raises(ConfigurationError) as raised:
        load(path, environment=environment, client_flags=["linger.ms=3"], **how)
    text = str(raised.value).removeprefix(f"{tmp_path}/")
    assert text.startswith(origin or "ROLLSTREAM_GROUPING__BATCH_ROLLOUTS: "), text
    places = ("run.toml", "ROLLSTREAM_", "--", "-X")
    assert sum(text.count(place) for place in places) == 1, text


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"absent\.toml cannot be read: No such file"):
        load(tmp_path / "absent.toml")


def test_lists_in_variables_and_flags_are_written_as_in_toml() -> None:
    config = load(flags=['worker.inference_urls=["http://a/v1", "http://b/v1"]'])
    assert config.worker.inference_urls == ("http://a/v1", "http://b/v1")


def test_default_paths_and_urls_follow_data_dir_run_and_port() -> None:
    config = load(flags=["data_dir=/d", "run=r", "inference.port=7777"])
    assert config.learner.checkpoint.directory == "/d/runs/r/checkpoints"
    assert config.broker.data_dir == Path("/d/broker")
    assert config.worker.inference_urls == ("http://127.0.0.1:7777/v1",)
    explicit = load(flags=["data_dir=/d", "learner.checkpoint.directory=/c", "broker.data_dir=/b"])
    assert (explicit.learner.checkpoint.directory, explicit.broker.data_dir) == ("/c", Path("/b"))


def test_each_replica_has_a_port_a_name_and_a_url_of_its_own(tmp_path: Path) -> None:
    config = load(flags=["inference.port=7777", "inference.replicas=3"])
    assert config.worker.inference_urls == tuple(f"http://127.0.0.1:{port}/v1" for port in (7777, 7778, 7779))
    replicas = [config.inference.replica(ordinal) for ordinal in range(3)]
    assert [(r.port, r.replica_id) for r in replicas] == [(7777, "infer-0"), (7778, "infer-1"), (7779, "infer-2")]
    roles = plan.plan(config, tmp_path / "run.toml").of("infer")
    assert [role.name for role in roles] == ["infer", "infer-1", "infer-2"]
    assert [role.arguments[5:7] for role in roles] == [("--ordinal", str(number)) for number in range(3)]
    settled = plan.settle(load(flags=["inference.replicas=2"]))
    assert settled.inference.port
    assert len(settled.worker.inference_urls) == 2


def test_servers_of_ones_own_start_none(tmp_path: Path) -> None:
    urls = 'worker.inference_urls=["http://a/v1"]'
    external = load(flags=[urls])
    assert plan.settle(external).worker.inference_urls == ("http://a/v1",)
    roles = plan.plan(plan.settle(external), tmp_path)
    assert roles.of("infer") == ()
    assert [role.kind for role in roles.consumers] == ["learn", "group", "group"]
    assert load(flags=[urls, "inference.replicas=1"]).inference.replicas == 1
    assert load(flags=[urls, "inference.port=7777"]).inference.replicas == 1


def test_a_context_is_as_long_as_the_learners_rows_unless_it_is_set() -> None:
    assert load(flags=["learner.sequence_length=96"]).inference.max_model_len == 96
    assert load(flags=["learner.sequence_length=96", "inference.max_model_len=48"]).inference.max_model_len == 48


def test_a_configuration_written_as_toml_loads_equal(tmp_path: Path) -> None:
    config = load(
        flags=["data_dir=/d", "run=r", 'grouping.exclude_workers=["a", "b"]', "learner.optimizer.epsilon=1e-9"],
        client_flags=["security.protocol=SSL", 'sasl.username=q"\\\x7fü\n'],
    )
    assert load(write(tmp_path, to_toml(config))) == config


def is_for_clients(key: str) -> bool:
    """Whether a key of librdkafka may be set, to any text."""
    try:
        KafkaConfig(client={key: ""})
    except ConfigurationError:
        return False
    return not is_secret(key)


@settings(max_examples=40)
@given(client=st.dictionaries(st.text(min_size=1).filter(is_for_clients), st.text()))
def test_any_key_and_text_survives_toml(client: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    config = load()
    config = dataclasses.replace(config, kafka=dataclasses.replace(config.kafka, client=client))
    path = tmp_path_factory.mktemp("toml") / "run.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert load(path) == config


def test_every_setting_is_documented_and_known_by_its_dotted_key() -> None:
    keys = known_keys(RunConfig)
    assert "kafka.bootstrap_servers" in keys
    assert "kafka.client.*" in keys
    assert len(set(keys)) == len(keys)
    assert {k.partition(".")[0] for k in keys} == {f.name for f in dataclasses.fields(RunConfig)}


def test_a_pretrained_model_gets_its_own_default_learning_rates() -> None:
    def rates(*flags: str) -> tuple[float, float, float]:
        learner = load(flags=flags).learner
        return learner.optimizer.learning_rate, learner.optimizer.final_learning_rate, learner.warm_start.learning_rate

    assert rates() == (2e-3, 4e-4, 2e-3)
    assert rates("learner.pretrained=model") == pytest.approx((1e-6, 2e-7, 1e-5))
    given = ("learner.pretrained=model", "learner.optimizer.learning_rate=1e-5")
    assert rates(*given) == pytest.approx((1e-5, 2e-6, 1e-5))
    given += ("learner.optimizer.final_learning_rate=0.1", "learner.warm_start.learning_rate=0.2")
    assert rates(*given) == (1e-5, 0.1, 0.2)


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ((), 60),
        (("supervisor.workers=0",), 0),
        (("supervisor.workers=0", "task=dsort3"), 60),
        (("learner.pretrained=model",), 0),
        (("learner.pretrained=model", "task=dsort3"), 60),
        (("learner.pretrained=model", "environments=[{use='add'}]"), 60),
        (("learner.pretrained=model", "learner.warm_start.file=taught.jsonl"), 60),
        (("learner.pretrained=model", "learner.warm_start.steps=7"), 7),
    ],
)
def test_a_model_that_plays_no_named_task_is_not_taught_the_default_one(flags: tuple[str, ...], steps: int) -> None:
    assert load(flags=flags).learner.warm_start.steps == steps


SECRETS = {"worker.api_key": "--set", "kafka.client.sasl.password": "-X", "kafka.client.ssl.key.pem": "-X"}


@pytest.mark.parametrize("key", SECRETS)
def test_a_secret_in_a_file_or_flag_is_refused(key: str, tmp_path: Path) -> None:
    path = write(tmp_path, f'{key} = "canary"\n')
    with pytest.raises(ConfigurationError, match=rf"run\.toml:1: {key} is a secret.*{key}=env:NAME") as raised:
        load(path)
    assert "canary" not in str(raised.value)
    with pytest.raises(ConfigurationError, match=f"--set {key}: {key} is a secret"):
        load(flags=[f"{key}=canary"])
    if key.startswith("kafka.client."):
        name = key.removeprefix("kafka.client.")
        with pytest.raises(ConfigurationError, match=f"-X {name}: {key} is a secret"):
            load(client_flags=[f"{name}=canary"])
        with pytest.raises(ConfigurationError, match=f"ROLLSTREAM_KAFKA__CLIENT: {key} is a secret"):
            load(environment={"ROLLSTREAM_KAFKA__CLIENT": f'{{"{name}" = "canary"}}'})


def test_a_secret_is_kept_as_a_reference_to_its_variable_or_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_text("canary in a file\n")
    environment = {"ROLLSTREAM_KAFKA__CLIENT__SASL_PASSWORD": "canary in a variable", "KEY": "canary"}
    config = load(flags=["worker.api_key=file:key"], client_flags=["ssl.key.pem=env:KEY"], environment=environment)
    references = {"worker.api_key": config.worker.api_key, **config.kafka.client}
    assert references == {
        "worker.api_key": f"file:{tmp_path / 'key'}",
        "sasl.password": "env:ROLLSTREAM_KAFKA__CLIENT__SASL_PASSWORD",
        "ssl.key.pem": "env:KEY",
    }
    assert "canary" not in to_toml(config)
    secrets = [resolve(key, value, environment) for key, value in references.items()]
    assert secrets == ["canary in a file", "canary in a variable", "canary"]
    assert load(write(tmp_path, to_toml(config))) == config
    environment |= {"ROLLSTREAM_LEARNER__NAME": "other", "KAFKA_BOOTSTRAP_SERVERS": "h:1", "PATH": "/bin"}
    assert child_environment(config, environment).keys() == {"ROLLSTREAM_KAFKA__CLIENT__SASL_PASSWORD", "KEY", "PATH"}


def test_every_setting_that_holds_a_secret_is_handed_on_to_the_processes_of_a_run() -> None:
    """Walks the settings as their page lists them, so that a new one cannot be forgotten."""
    names = [key for key in known_keys(RunConfig) if is_secret(key)]
    assert {"grouper.signing_key", "kafka.signing_key", "gateway.api_key", "ui.token"} <= set(names)
    named = {key: f"env:SECRET_{number}" for number, key in enumerate(names)}
    config = load(environment={}, flags=[f"{key}={value}" for key, value in named.items()])
    assert secret_references(config) == {key: ("env", value.removeprefix("env:")) for key, value in named.items()}


def test_a_secret_option_given_by_its_own_variable_is_a_secret() -> None:
    variable = "ROLLSTREAM_COLLECT__OPTIONS__API_KEY"
    config = load(environment={variable: "canary", "ROLLSTREAM_KAFKA__CLIENT__LINGER_MS": "7"})
    assert secret_references(config) == {"collect.options.api_key": ("env", variable)}
    assert "canary" not in repr(config)
    assert config.kafka.client == {"linger.ms": "7"}


@pytest.mark.parametrize("label", ["0", "JUDGE_ADD", "1"])
def test_a_secret_of_an_entry_is_given_by_its_variable_with_number_or_name(label: str, tmp_path: Path) -> None:
    entries = '[[environments]]\nuse = "add"\nname = "judge-add"\n[[environments]]\nuse = "dsort3"\n'
    variable = f"ROLLSTREAM_ENVIRONMENTS__{label}__OPTIONS__API_KEY"
    config = load(write(tmp_path, entries), environment={variable: "canary"})
    assert secret_references(config) == {f"environments.{int(label == '1')}.options.api_key": ("env", variable)}
    assert "canary" not in to_toml(config)
    # As a process of the run does, which inherits the variable.
    assert load(write(tmp_path, to_toml(config)), environment={variable: "canary"}) == config


@pytest.mark.parametrize("name", ["ROLLSTREAM_MY__PASSWORD", "ROLLSTREAM_LEARNER__PASS"])
def test_a_variable_with_a_secret_may_have_the_form_of_a_setting(name: str, tmp_path: Path) -> None:
    environment = {name: "canary"}
    config = load(client_flags=[f"sasl.password=env:{name}"], environment=environment)
    assert secret_references(config) == {"kafka.client.sasl.password": ("env", name)}
    assert load(write(tmp_path, to_toml(config)), environment=environment) == config
    assert child_environment(config, environment) == environment
    with pytest.raises(ConfigurationError, match=f"{name}: unknown key "):
        load(environment=environment)
    with pytest.raises(ConfigurationError, match=r"ROLLSTREAM_LEARNER__STEPS: unknown key learner\.steps"):
        load(client_flags=[f"sasl.password=env:{name}"], environment={**environment, "ROLLSTREAM_LEARNER__STEPS": "3"})


def test_secrets_among_options_reach_the_roles_that_use_them_and_no_others(tmp_path: Path) -> None:
    variable = "ROLLSTREAM_ENVIRONMENTS__0__OPTIONS__API_KEY"
    path = write(
        tmp_path,
        """
        [[environments]]
        use = "dsort3"
        options = {judge = {api_key = "env:JUDGE"}, panel = [{api_key = "env:JUDGE"}]}
        [collect.options]
        api_key = "env:PLAYER"
        """,
    )
    environment = {variable: "canary", "JUDGE": "canary", "PLAYER": "canary", "PATH": "/bin"}
    config = load(path, environment=environment)
    assert secret_references(config) == {
        "environments.0.options.api_key": ("env", variable),
        "environments.0.options.judge.api_key": ("env", "JUDGE"),
        "environments.0.options.panel.0.api_key": ("env", "JUDGE"),
        "collect.options.api_key": ("env", "PLAYER"),
    }
    assert child_environment(config, environment) == environment
    resolved = resolve_options("options", config.environments[0].options, environment)
    assert resolved == {"api_key": "canary", "judge": {"api_key": "canary"}, "panel": [{"api_key": "canary"}]}
    with pytest.raises(ConfigurationError, match=r"options\.panel\.0\.api_key is a secret"):
        load(write(tmp_path, '[[environments]]\nuse = "dsort3"\noptions = {panel = [{api_key = "plain"}]}'))
    withheld = {role.name: withheld_variables(config, role.secrets) for role in ROLES}
    assert withheld["env"] == withheld["eval"] == withheld["learn"] == {"PLAYER"}
    assert withheld["collect"] == {variable, "JUDGE"}
    assert withheld["group"] == withheld["infer"] == {variable, "JUDGE", "PLAYER"}


def test_flow_control_counts_the_rollouts_of_the_largest_groups_that_a_worker_plays(tmp_path: Path) -> None:
    entries = '[[environments]]\nuse = "dsort3"\n[[environments]]\nuse = "add"\ngroup_size = 64\n'
    flags = ["worker.group_size=4", "worker.concurrency=8"]
    config, alone = load(write(tmp_path, entries), flags=flags), load(flags=flags)
    assert config.capacity.in_flight == 64 // 4 * alone.capacity.in_flight


def test_a_missing_secret_is_an_error_that_names_its_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"sasl\.password is env:NO_SUCH.*export NO_SUCH"):
        clients.producer(KafkaConfig(client={"sasl.password": "env:NO_SUCH"}))
    with pytest.raises(ConfigurationError, match=r"worker\.api_key is file:.*cannot be read: .*No such file"):
        CompletionsClient(["http://h/v1"], api_key=f"file:{tmp_path / 'none'}")


def test_a_configuration_is_written_for_its_owner_alone(tmp_path: Path) -> None:
    config = load(flags=[f"data_dir={tmp_path}"])
    path = plan.write(config)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    assert stat.S_IMODE(plan.write(config).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("collect.processes=1", "collect.processes is 1, but no player is set; set collect.player"),
        ("collect.processes=-1", "collect.processes -1"),
        ("collect.steps=0", "collect.steps 0 at least 1"),
        ("labeling.processes=2", "labeling.processes is 2, but no labeler is named; set labeling.labeler"),
        ("labeling.processes=-1", "labeling.processes is -1; it must be at least 0"),
        ("fill.max_bytes=-1", "fill.max_bytes -1 must be at least 0"),
    ],
)
def test_a_control_task_that_cannot_run_is_refused_with_its_setting(flag: str, says: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load(flags=[flag])
    assert says in str(refused.value)


def test_a_run_has_the_roles_of_a_control_task_that_are_configured_and_by_default_none(tmp_path: Path) -> None:
    assert not load().is_control
    assert plan.plan(load(), tmp_path).of("fill", "label", "collect") == ()
    flags = ["collect.processes=2", "collect.player=a:b", "labeling.processes=1", "labeling.labeler=a:c", "seed=3"]
    config = load(flags=[*flags, "fill.directory=windows"])
    roles = plan.plan(config, tmp_path / "run.toml")
    assert config.is_control
    assert [spec.name for spec in roles.consumers] == ["fill", "label-0"]
    assert [spec.name for spec in roles.producers] == ["collect-0", "collect-1"]
    assert all(spec.finishes for spec in roles.producers)
    assert (config.collect.seed, config.fill.seed) == (3, 3)
    for flag in ("fill.directory=windows", "labeling.processes=1", "collect.processes=1"):
        assert load(flags=["collect.player=a:b", "labeling.labeler=a:c", flag]).is_control


@pytest.mark.parametrize(
    "layer",
    [
        {"environment": {"ROLLSTREAM_KAFKA__CLIENT": '{"sasl.password": "not to be seen"}'}},
        {"flags": ['kafka.client={"sasl.password": "not to be seen"}']},
        {"flags": ['kafka.client=["not to be seen"]']},
        {"file": '[kafka]\nclient = "sasl.password=not to be seen"\n'},
        {"file": '[kafka.client]\n"sasl.password" = ["not to be seen"]\n'},
        {"file": '[worker]\napi_key = ["not to be seen"]\n'},
        {"file": 'kafka = "sasl.password=not to be seen"\n'},
        {"flags": ['kafka="sasl.password=not to be seen"']},
        {"file": 'environments = ["api_key=not to be seen"]\n'},
        {"flags": ['environments=[{use = "add", options = {api_key = "not to be seen"}]']},
        {"environment": {"ROLLSTREAM_ENVIRONMENTS__0": "api_key=not to be seen"}},
    ],
    ids=str,
)
def test_an_error_about_a_value_that_may_hold_a_secret_does_not_show_it(layer: dict[str, Any], tmp_path: Path) -> None:
    path = None
    if "file" in layer:
        path = tmp_path / "run.toml"
        path.write_text(layer["file"])
    with pytest.raises(ConfigurationError) as error:
        load(path, **{name: value for name, value in layer.items() if name != "file"})
    assert "not to be seen" not in str(error.value)


def test_a_run_without_workers_leaves_room_for_one_that_is_started_by_hand() -> None:
    none, one = (load(flags=[f"supervisor.workers={number}"]).capacity for number in (0, 1))
    assert none == one
    assert none.share >= none.group_size
