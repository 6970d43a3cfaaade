"""A chart as the real helm renders it: its objects are valid, and agree with catalogue, description and settings."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest

from rollstream.pipeline.command_line.cli import build_parser
from rollstream.pipeline.command_line.process_number import AUTO, number_of_host
from rollstream.pipeline.config import RunConfig, load
from rollstream.pipeline.deployment.container_settings import HOME
from rollstream.pipeline.deployment.description import ROLES, counts, role_of
from rollstream.pipeline.deployment.scaling import bounds
from rollstream.pipeline.settings import is_setting_variable
from rollstream.topics.metrics.catalogue import CATALOGUE_OF_METRICS
from rollstream.topics.wire.catalogue import CATALOGUE, topic_name
from tests.support.charts import (
    CONTROL,
    DEVELOPMENT,
    MUCH,
    PRODUCTION,
    TEMPLATE,
    THEIR_BROKERS,
    Release,
    by_helm,
    write_chart,
)
from tests.support.custom_resources import SPECS, check_custom

pytestmark = pytest.mark.long
OLDEST, NEWEST = "1.31", kubernetes_validate.latest_version()


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chart(tmp_path_factory.mktemp("much"))


@pytest.fixture(scope="module")
def releases(chart: Path) -> dict[str, Release]:
    return {
        "defaults": Release(chart),
        "development": Release(chart, DEVELOPMENT),
        "production": Release(chart, PRODUCTION),
        "their brokers": Release(chart, PRODUCTION, over=THEIR_BROKERS),
    }


# ------------------------------------------------------------------ validity


def test_every_object_is_valid_in_old_and_new_clusters_and_by_its_operator(
    releases: dict[str, Release], tmp_path: Path
) -> None:
    kinds, seen = set(), set()
    for name, release in {**releases, "control": Release(write_chart(tmp_path, CONTROL), PRODUCTION)}.items():
        for document in release.objects:
            key = (document["apiVersion"], document["kind"])
            kinds.add(key)
            if (text := json.dumps(document)) in seen:
                continue
            seen.add(text)
            assert ": null" not in text, "a key with nothing below it"
            if key in SPECS:
                check_custom(document)
                if document["kind"] == "JobSet":
                    [job] = document["spec"]["replicatedJobs"]
                    metadata = {"name": "job"}
                    document = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, **job["template"]}
                else:
                    continue
            for version in (OLDEST, NEWEST):
                try:
                    kubernetes_validate.validate(document, version, strict=True)
                except kubernetes_validate.ValidationError as error:
                    pytest.fail(f"{name}: {document['kind']} {document['metadata']['name']} in {version}: {error}")
            assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", document["metadata"]["name"])
    assert kinds >= SPECS.keys(), "each custom kind was seen"


@pytest.mark.parametrize("files", [(), (DEVELOPMENT,), (PRODUCTION,)], ids=["defaults", "development", "production"])
@pytest.mark.parametrize("text", [MUCH, CONTROL], ids=["tokens", "control"])
def test_helm_finds_nothing_to_complain_about(text: str, files: tuple[str, ...], tmp_path: Path) -> None:
    lint = by_helm(write_chart(tmp_path, text), ("lint", "--strict", "."), files)
    assert lint.returncode == 0, lint.stdout + lint.stderr


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ({"roles": {"group": {"replicas": 5}}}, "roles.group.replicas is 5, but the settings of the run allow 4 at"),
        ({"roles": {"env": {"replicas": 3}}}, "roles.env.replicas is 3, but the settings of the run allow 2 at most"),
        ({"autoscaling": {"enabled": True, "maxReplicas": 5}}, "more processes than the 4 partitions"),
        ({"brokers": {"enabled": False}}, "brokers.enabled is false: name your brokers in brokers.bootstrapServers"),
        ({"roles": {"nobody": {}}}, "values don't meet the specifications of the schema"),
        ({"run": {"name": None}}, "values don't meet the specifications of the schema"),
        ({"run": {"digest": "of another chart"}}, "upgrade with --reset-then-reuse-values in place of --reuse-values"),
    ],
    ids=str,
)
def test_values_that_the_run_does_not_allow_are_refused(over: Mapping[str, Any], says: str, chart: Path) -> None:
    refused = by_helm(chart, TEMPLATE, over=over)
    assert refused.returncode != 0
    assert says in refused.stderr


# ------------------------------------------------------------------ roles


def test_every_process_of_the_run_is_a_pod_whose_command_its_role_takes(chart: Path) -> None:
    release = Release(chart, PRODUCTION, over={"autoscaling": {"enabled": False}})
    config = load(chart.parent / "run.toml")
    pods = release.pods()
    assert pods.keys() == {*counts(config), "topics", "tools", "archive", "prune"}
    numbers = {}
    for workload in release.objects:
        spec = workload.get("spec", {})
        if workload["kind"] == "StatefulSet":
            numbers[workload["metadata"]["name"]] = spec["replicas"]
        elif workload["kind"] == "JobSet":
            [job] = spec["replicatedJobs"]
            numbers["arithmetic-learn"] = job["template"]["spec"]["completions"]
    assert numbers == {f"arithmetic-{name}": count for name, count in counts(config).items()} | {
        "arithmetic-archive": 1
    }
    for name, pod in pods.items():
        if name == "tools":
            continue
        [container] = pod["spec"]["containers"]
        assert container["command"] == ["rollstream"]
        arguments = ["0" if word == AUTO else word for word in container["args"]]
        assert build_parser().parse_args(arguments).command == name
        if name == "topics":
            assert arguments[:2] == ["topics", "apply"]
            continue
        role = role_of(name)
        words = [*role.command, *role.flags]
        assert container["args"][: len(words)] == words
        assert (AUTO in container["args"]) == role.numbered


def test_all_pods_agree_on_settings_and_every_address_is_a_pod_that_listens_there(releases: dict[str, Release]) -> None:
    for case, release in releases.items():
        configs = {role: release.settings(role) for role in release.pods()}
        env = configs["env"]
        for role, config in configs.items():
            user = {key: config.kafka.client.get(key) for key in ("sasl.username", "sasl.password")}
            name = "operate" if role == "tools" else role
            own = {"sasl.username": f"arithmetic-{name}", "sasl.password": user["sasl.password"]}
            assert user == (own if case in ("defaults", "production") else dict.fromkeys(user)), role
            assert (config.service.host, config.service.port) == ("0.0.0.0", 8081)
            assert (config.run, config.data_dir, config.topics) == ("arithmetic", Path(HOME), env.topics)
        services = release.of("Service")
        for url in env.worker.inference_urls:
            host, port = urlsplit(url).hostname or "", urlsplit(url).port
            pod, _, service = host.partition(".")
            assert services[service]["spec"]["clusterIP"] == "None"
            assert release.of("StatefulSet")[pod.rpartition("-")[0]]["spec"]["serviceName"] == service
            assert configs["infer"].inference.replica(number_of_host(host)).port == port
            assert configs["infer"].inference.host == "0.0.0.0"
        assert len(env.worker.inference_urls) == env.inference.replicas == 2
        [(name, learner)] = release.of("JobSet").items()
        host, _, port = configs["learn"].learner.coordinator.partition(":")
        network = learner["spec"]["network"]
        assert (host, port) == (f"{name}-team-0-0.{network['subdomain']}", "8476")
        assert number_of_host(host) == 0
        assert len(host.partition(".")[0]) <= 63


def test_addresses_of_brokers_are_those_of_the_listener_or_of_the_values(releases: dict[str, Release]) -> None:
    for case, replicas, addresses in (
        ("defaults", (3, 2), "arithmetic-kafka-kafka-bootstrap:9093"),
        ("development", (1, 1), "arithmetic-kafka-kafka-bootstrap:9092"),
        ("their brokers", (1, 1), "kafka:9094"),
    ):
        release = releases[case]
        config = release.settings("group")
        assert config.kafka.bootstrap_servers == addresses
        assert (config.topics.replication_factor, config.topics.min_insync_replicas) == replicas
        clusters = release.of("Kafka")
        if case == "their brokers":
            assert not clusters
            assert not release.of("KafkaTopic")
            assert not release.of("KafkaUser")
            continue
        [listener] = clusters["arithmetic-kafka"]["spec"]["kafka"]["listeners"]
        assert addresses.endswith(f":{listener['port']}")
        assert config.kafka.client.get("security.protocol", "PLAINTEXT") == (
            "SASL_SSL" if listener["tls"] else "PLAINTEXT"
        )
        assert (clusters["arithmetic-kafka"]["spec"]["kafka"].get("authorization") is not None) == listener["tls"]
        nodes = release.of("KafkaNodePool")["arithmetic-nodes"]
        assert nodes["metadata"]["labels"]["strimzi.io/cluster"] == "arithmetic-kafka"
        assert nodes["spec"]["replicas"] == replicas[0]


def test_replicas_given_by_flags_are_those_of_brokers_that_the_chart_does_not_run(tmp_path: Path) -> None:
    flags = ["--set=topics.replication_factor=-1", "--set=topics.min_insync_replicas=2"]
    chart = write_chart(tmp_path, "", *flags)
    one_replica = {"brokers": {"replicationFactor": 1, "minInSyncReplicas": 1}}
    for over, replicas in ((THEIR_BROKERS, (-1, 2)), (one_replica, (1, 1))):
        topics = Release(chart, over=over).settings("topics").topics
        assert (topics.replication_factor, topics.min_insync_replicas) == replicas


def test_topics_are_those_that_topics_apply_would_create(releases: dict[str, Release]) -> None:
    for case in ("development", "production"):
        release = releases[case]
        config = release.settings("topics")
        topics = {topic["spec"]["topicName"]: topic["spec"] for topic in release.of("KafkaTopic").values()}
        assert topics.keys() == {topic_name("arithmetic", spec.name) for spec in CATALOGUE}
        for spec in CATALOGUE:
            topic = topics[topic_name("arithmetic", spec.name)]
            assert topic["partitions"] == spec.partition_count(config.topics)
            assert topic["replicas"] == config.topics.replication_factor
            wanted = spec.settings(config.topics, config.kafka)
            assert {key: str(value) for key, value in topic["config"].items()} == wanted
    for topic in release.of("KafkaTopic").values():
        assert topic["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}, "the log outlives a release"


def test_a_value_that_changes_the_pods_of_a_job_makes_another_job(chart: Path) -> None:
    """Kubernetes refuses a change of a job's pods."""
    changes: tuple[Mapping[str, Any], ...] = (
        {"image": "registry.example/rollstream:2"},
        {"wait": {"resources": {"limits": {"memory": "3Gi"}}}},
        {"roles": {"learn": {"resources": {"limits": {"memory": "3Gi"}}}}},
    )

    def jobs(over: Mapping[str, Any]) -> dict[str, Any]:
        release = Release(chart, over=over)
        return release.of("Job") | release.of("JobSet")

    before = jobs({})
    for change in changes:
        after = jobs(change)
        assert before.keys() != after.keys(), change
        assert [name for name in before.keys() & after.keys() if before[name] != after[name]] == [], change


@pytest.mark.parametrize("processes", [2, 10_000])
def test_the_longest_names_of_runs_leave_room_for_the_pods_of_a_learner(processes: int, tmp_path: Path) -> None:
    release = Release(write_chart(tmp_path, f'run = "{"r" * 30}"\n[learner]\nprocesses = {processes}\n'))
    [(name, learner)] = release.of("JobSet").items()
    [job] = learner["spec"]["replicatedJobs"]
    last = job["template"]["spec"]["completions"] - 1
    assert last == processes - 1
    # JobSet checks the longest name of a pod with a suffix as Kubernetes adds it.
    assert len(f"{name}-{job['name']}-{job['replicas'] - 1}-{last}-abcde") <= 63


def test_the_pods_of_a_learner_keep_their_service_when_another_job_replaces_theirs(chart: Path) -> None:
    services, jobs = [], set()
    for image in ("rollstream:1", "rollstream:2"):
        release = Release(chart, over={"image": image})
        [(name, job)] = release.of("JobSet").items()
        jobs.add(name)
        service = release.of("Service")[job["spec"]["network"]["subdomain"]]
        services.append(service)
        labels = release.pods()["learn"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
        [waits] = release.pods()["env"]["spec"]["initContainers"]
        assert any(word.startswith(f"{service['metadata']['name']}:") for word in waits["args"])
    assert len(jobs) == 2
    assert services[0] == services[1]


def test_probes_ask_the_service_port_and_producers_wait_for_consumers(releases: dict[str, Release]) -> None:
    release = releases["defaults"]
    services = release.of("Service")
    for name, pod in release.pods().items():
        if name in ("topics", "tools", "prune", "archive"):
            continue
        role, [container] = role_of(name), pod["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["service"] == release.settings(name).service.port
        for probe, path in (("startupProbe", "/readyz"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
            assert container[probe]["httpGet"] == {"path": path, "port": "service"}
        assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] >= 1800
        stop_s = release.settings(name).supervisor.stop_timeout_s
        assert pod["spec"]["terminationGracePeriodSeconds"] > stop_s
        [wait] = pod["spec"]["initContainers"]
        args = build_parser().parse_args(wait["args"])
        assert args.role == name
        assert {host.partition(":")[0].removeprefix("arithmetic-") for host in args.ready} == {
            other for other in role.after if other in release.pods()
        }
        for host in args.ready:
            service, _, port = host.partition(":")
            assert int(port) in [each["port"] for each in services[service]["spec"]["ports"]]


@pytest.mark.parametrize(("timeout_s", "seconds"), [("7200", 14400), ("1801", 3605), ("10", 3600)])
def test_a_pod_may_start_twice_as_long_as_its_process_waits(timeout_s: str, seconds: int, tmp_path: Path) -> None:
    release = Release(write_chart(tmp_path, MUCH, f"--set=supervisor.ready_timeout_s={timeout_s}"))
    [container] = release.pods()["learn"]["spec"]["containers"]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == seconds
    assert 2 * release.settings("learn").supervisor.ready_timeout_s <= seconds


def test_containers_have_no_rights_and_write_to_few_places(releases: dict[str, Release]) -> None:
    for release in releases.values():
        for name, pod in release.pods().items():
            spec = pod["spec"]
            assert spec["automountServiceAccountToken"] is False
            assert spec["securityContext"]["runAsNonRoot"] is True
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert spec["securityContext"]["fsGroup"] == 1000
            writable = {
                volume["name"] for volume in spec["volumes"] if {"emptyDir", "persistentVolumeClaim"} & volume.keys()
            }
            for container in (*spec["containers"], *spec.get("initContainers", ())):
                assert container["securityContext"]["readOnlyRootFilesystem"] is True
                assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
                assert container["securityContext"]["allowPrivilegeEscalation"] is False
                assert container["resources"]["limits"]["memory"], name
                mounted = {mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] in writable}
                assert mounted == {str(HOME), "/tmp"}
                assert all(mount.get("readOnly") or mount["name"] in writable for mount in container["volumeMounts"])


def test_roles_that_keep_files_have_a_claim_that_outlives_the_release(
    releases: dict[str, Release], tmp_path: Path
) -> None:
    release = releases["defaults"]
    claims = {
        name: volume["persistentVolumeClaim"]["claimName"]
        for name, pod in release.pods().items()
        for volume in pod["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert claims == {name: f"arithmetic-{name}" for name in ("learn", "serve-weights", "archive")}
    there = release.of("PersistentVolumeClaim")
    assert there.keys() == set(claims.values())
    assert there["arithmetic-learn"]["spec"]["accessModes"] == ["ReadWriteMany"], "processes on several machines"
    assert all(claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for claim in there.values())
    assert release.settings("learn").learner.checkpoint.directory.startswith(str(HOME))
    control = Release(write_chart(tmp_path, CONTROL))
    assert control.of("PersistentVolumeClaim").keys() == {"cells-2-fill", "cells-2-archive"}
    assert control.settings("fill").fill.directory == f"{HOME}/windows"


def test_what_ends_by_itself_is_a_job_that_another_one_replaces(tmp_path: Path) -> None:
    release = Release(write_chart(tmp_path, 'run = "Cells_2"\n[collect]\nprocesses = 2\nplayer = "cell:play"\n'))
    [name] = [name for name in release.of("Job") if name.startswith("cells-2-collect-")]
    job = release.of("Job")[name]["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 2, 2)
    pod = job["template"]["spec"]
    assert (pod["restartPolicy"], pod["subdomain"]) == ("OnFailure", "cells-2-collect")
    other = Release(release.chart, over={"image": "other:2"})
    assert name not in other.of("Job"), "jobs cannot be changed"
    scaled = Release(release.chart, over={"brokers": {"storage": {"size": "1Ti"}}})
    assert name in scaled.of("Job"), "what a pod does not see starts none again"
    learner = Release(write_chart(tmp_path, ""))
    assert any(name.startswith("main-learn-") for name in learner.of("Job"))
    assert not learner.of("JobSet")


def test_secrets_are_referred_to_and_written_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLSTREAM_LABELING__JUDGE__API_KEY", "canary in a variable")
    monkeypatch.setenv("MODEL_KEY", "canary")
    chart = write_chart(tmp_path, MUCH)
    assert not any("canary" in path.read_text() for path in chart.rglob("*") if path.is_file())
    release = Release(chart, over={"secretName": "theirs"})
    [container] = release.pods()["env"]["spec"]["containers"]
    keys = {v["name"]: v["valueFrom"]["secretKeyRef"] for v in container["env"] if "valueFrom" in v}
    password = keys.pop("ROLLSTREAM_KAFKA__CLIENT__SASL_PASSWORD")
    assert password == {"name": "arithmetic-env", "key": "password"}
    assert keys == {"MODEL_KEY": {"name": "theirs", "key": "MODEL_KEY"}}, "the judge's key is not for workers"
    [labeler] = release.pods()["label"]["spec"]["containers"]
    assert "ROLLSTREAM_LABELING__JUDGE__API_KEY" in {variable["name"] for variable in labeler["env"]}
    assert "secrets" not in {volume["name"] for volume in release.pods()["env"]["spec"]["volumes"]}
    config = release.settings("gateway")
    assert config.gateway.api_key == "file:/run/secrets/gateway-api-key"
    volumes = {volume["name"]: volume for volume in release.pods()["gateway"]["spec"]["volumes"]}
    assert volumes["secrets"]["secret"]["items"] == [{"key": "gateway-api-key", "path": "gateway-api-key"}]


def test_operators_run_commands_in_a_pod_that_nothing_starts_by_itself_and_that_has_everything(
    releases: dict[str, Release],
) -> None:
    release = releases["defaults"]
    tools = release.of("CronJob")["arithmetic-tools"]["spec"]
    assert tools["suspend"] is True
    pod = tools["jobTemplate"]["spec"]["template"]
    [container] = pod["spec"]["containers"]
    sources = {v["name"]: v["valueFrom"]["secretKeyRef"] for v in container["env"] if "valueFrom" in v}
    password = sources.pop("ROLLSTREAM_KAFKA__CLIENT__SASL_PASSWORD")
    assert password == {"name": "arithmetic-operate", "key": "password"}
    assert "arithmetic-operate" in release.of("KafkaUser")
    assert sources.keys() == {"MODEL_KEY"}
    config = release.settings("tools")
    assert (config.run, config.kafka.client["sasl.username"]) == ("arithmetic", "arithmetic-operate")
    assert config.gateway.api_key == "file:/run/secrets/gateway-api-key"
    [secrets] = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "secrets"]
    assert [item["key"] for item in secrets["secret"]["items"]] == ["gateway-api-key"]
    assert "/etc/rollstream" in {mount["mountPath"] for mount in container["volumeMounts"]}


@pytest.mark.parametrize("text", [MUCH, ""], ids=["secrets", "no secrets"])
def test_the_notes_name_the_secret_that_must_exist_and_how_to_run_commands(text: str, tmp_path: Path) -> None:
    chart = write_chart(tmp_path, text)
    shown = '{{ dict "kind" "Notes" "text" (include (print .Template.BasePath "/NOTES.txt") .) | toJson }}'
    (chart / "templates" / "notes.yaml").write_text(shown)
    [notes] = [each["text"] for each in Release(chart).objects if each["kind"] == "Notes"]
    secret = (
        "create secret generic arithmetic-secrets -n default --from-literal=MODEL_KEY=... --from-file=gateway-api-key="
    )
    assert (secret in notes) == ("secret" in notes) == bool(text)
    assert ("job/tools -- rollstream ledger --config /etc/rollstream/run.toml" in notes) == bool(text)


def test_pods_of_development_are_small(releases: dict[str, Release]) -> None:
    for name, pod in releases["development"].pods().items():
        for container in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())):
            assert container["resources"]["requests"]["cpu"] == "100m", name


def test_the_pod_of_commands_stays_until_it_is_told_to_end(releases: dict[str, Release]) -> None:
    [container] = releases["defaults"].pods()["tools"]["spec"]["containers"]
    _python, *arguments = (*container["command"], *container["args"])
    stopping = "import os, threading; threading.Timer(1.0, os.kill, (os.getpid(), 15)).start()"
    arguments[-1] = f"{stopping}; {arguments[-1]}"
    assert subprocess.run([sys.executable, *arguments], timeout=300).returncode == 0


def test_every_variable_is_a_setting(releases: dict[str, Release]) -> None:
    for release in releases.values():
        names = {
            name for each in release.of("ConfigMap").values() for name in each["data"] if name.startswith("ROLLSTREAM_")
        }
        for pod in release.pods().values():
            [container] = pod["spec"]["containers"]
            names |= {v["name"] for v in container.get("env", ()) if v["name"] != "MODEL_KEY"}
        assert len(names) > 8
        assert all(is_setting_variable(RunConfig, name) for name in names)


# ------------------------------------------------------------------ operations


def test_grouping_is_scaled_by_a_metric_that_it_serves_and_not_below_one_process(
    releases: dict[str, Release], chart: Path
) -> None:
    release = releases["production"]
    [scaled] = release.of("ScaledObject").values()
    [trigger] = scaled["spec"]["triggers"]
    [metric] = re.findall(r"rollstream_\w+", trigger["metadata"]["query"])
    [spec] = [spec for spec in CATALOGUE_OF_METRICS if spec.name == metric]
    assert {"partition"} <= set(spec.labels)
    assert 'run="arithmetic"' in trigger["metadata"]["query"]
    target = release.of("StatefulSet")[scaled["spec"]["scaleTargetRef"]["name"]]
    assert "replicas" not in target["spec"], "the number is KEDA's"
    config = release.settings("group")
    least, most = bounds(config.grouper.autoscale, config.topics.partitions)
    assert (scaled["spec"]["minReplicaCount"], scaled["spec"]["maxReplicaCount"]) == (least, most) == (1, 4)
    assert trigger["metadata"]["threshold"] == str(config.grouper.autoscale.lag_per_process)
    assert releases["defaults"].of("StatefulSet")["arithmetic-group"]["spec"]["replicas"] == 2


def test_monitoring_finds_the_pods_by_their_labels_and_port(releases: dict[str, Release]) -> None:
    release = releases["production"]
    [monitor] = release.of("PodMonitor").values()
    labels = monitor["spec"]["selector"]["matchLabels"].items()
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    seen = {
        name
        for name, pod in release.pods().items()
        if labels <= pod["metadata"]["labels"].items()
        and endpoint["port"] in [port["name"] for port in pod["spec"]["containers"][0].get("ports", ())]
    }
    assert seen == {role.name for role in ROLES if role.name in release.pods() and not role.is_tool}
    assert "RollstreamLoopStuck" in {
        rule["alert"] for rule in release.of("PrometheusRule")["arithmetic"]["spec"]["groups"][0]["rules"]
    }
    assert (
        "rollstream" in json.loads(release.of("ConfigMap")["arithmetic-dashboard"]["data"]["rollstream.json"])["title"]
    )


def test_disruptions_take_one_pod_of_a_role_at_a_time_and_none_of_a_learner(releases: dict[str, Release]) -> None:
    release = releases["production"]
    budgets = release.of("PodDisruptionBudget")
    assert budgets["arithmetic-learn"]["spec"]["minAvailable"] == 2
    assert {name for name, each in budgets.items() if each["spec"].get("maxUnavailable") == 1} == {
        f"arithmetic-{name}" for name in ("infer", "group", "label", "env")
    }
    pods = {name: pod["metadata"]["labels"] for name, pod in release.pods().items()}
    for name, budget in budgets.items():
        selector = budget["spec"]["selector"]["matchLabels"].items()
        assert [role for role, labels in pods.items() if selector <= labels.items()] == [
            name.removeprefix("arithmetic-")
        ]
