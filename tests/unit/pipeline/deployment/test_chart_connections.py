"""How the pods of a chart connect to brokers that already exist: as the user of the settings, or of a role's Secret."""

from pathlib import Path

import pytest

from tests.support.charts import PRODUCTION, Release, write_chart

pytestmark = pytest.mark.long
PASSWORD = "ROLLSTREAM_KAFKA__CLIENT__SASL_PASSWORD"


def test_brokers_whose_connection_the_settings_secure_are_not_of_the_chart(tmp_path: Path) -> None:
    flags = ["-X", "security.protocol=SASL_SSL", "-X", "sasl.password=env:SASL", "-b", "kafka:9093"]
    chart = write_chart(tmp_path, "", *flags)
    release = Release(chart, PRODUCTION, over={"brokers": {"enabled": True}})
    assert not any(release.of(kind) for kind in ("Kafka", "KafkaNodePool", "KafkaTopic", "KafkaUser"))
    config = release.settings("env")
    assert config.kafka.bootstrap_servers == "kafka:9093"
    assert config.kafka.client["sasl.password"] == "env:SASL"


def test_values_give_a_role_its_own_user_and_every_pod_further_files(tmp_path: Path) -> None:
    chart = write_chart(tmp_path, "", "-X", "security.protocol=SASL_SSL", "-b", "kafka:9093")
    authority = {"name": "ca", "secret": {"secretName": "kafka-ca"}}
    mount = {"name": "ca", "mountPath": "/etc/ca", "readOnly": True}
    user = {"secretRef": {"name": "main-env"}}
    over = {"extraVolumes": [authority], "extraVolumeMounts": [mount], "roles": {"env": {"extraEnvFrom": [user]}}}
    pods = Release(chart, over=over).pods()
    assert {"env", "group", "learn", "topics"} <= pods.keys()
    for role, pod in pods.items():
        assert authority in pod["spec"]["volumes"]
        for container in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())):
            assert mount in container["volumeMounts"]
            assert container["envFrom"][1:] == ([user] if role == "env" else [])


@pytest.mark.parametrize(
    ("text", "flags", "variables", "key"),
    [
        ("", [], {PASSWORD: "canary"}, PASSWORD),
        ("", [], {PASSWORD: "env:SASL"}, "SASL"),
        ("", ["-X", "sasl.password=env:SASL"], {"ROLLSTREAM_KAFKA__CLIENT__SASL__USERNAME": "other"}, "SASL"),
        ("", ["-X", "sasl.password=file:key"], {}, "kafka-client-sasl-password"),
        ('kafka.client.sasl.password = "env:SASL"\n', [], {}, "SASL"),
    ],
    ids=["variable", "reference in a variable", "flag", "file", "reference in the file"],
)
def test_a_roles_own_user_overrides_that_of_the_run(
    text: str,
    flags: list[str],
    variables: dict[str, str],
    key: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, given in variables.items():
        monkeypatch.setenv(name, given)
    secured = ["-X", "security.protocol=SASL_SSL", "-X", "sasl.username=main", "-b", "kafka:9093", *flags]
    over = {"roles": {"env": {"extraEnvFrom": [{"secretRef": {"name": "own"}}]}}}
    release = Release(write_chart(tmp_path, text, *secured), over=over)
    own = {"ROLLSTREAM_KAFKA__CLIENT__SASL_USERNAME": "own", PASSWORD: "of the role"}
    client = release.settings("env", {"own": own}).kafka.client
    assert (client["sasl.username"], client["sasl.password"]) == ("own", f"env:{PASSWORD}")
    pod = release.pods()["env"]["spec"]
    assert PASSWORD not in {variable["name"] for variable in pod["containers"][0].get("env", ())}, "it would win"

    client, pod = release.settings("group").kafka.client, release.pods()["group"]["spec"]
    keys = {f"env:{v['name']}": v["valueFrom"]["secretKeyRef"]["key"] for v in pod["containers"][0].get("env", ())}
    mounted = [item for volume in pod["volumes"] for item in volume.get("secret", {}).get("items", ())]
    keys |= {f"file:/run/secrets/{item['path']}": item["key"] for item in mounted}
    assert (client["sasl.username"], keys[client["sasl.password"]]) == ("main", key)
