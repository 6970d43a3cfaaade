"""The story of a run on a node of Kubernetes, told to stdout: installed, killed, scaled, upgraded, installed again.

The chart is the one that users get, and helm is the real one. In the end the run is drained, and the independent
auditor judges its log.
"""

import itertools
import json
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

from rollstream.infra.config import BrokerConfig, image_environment, server_properties
from tests.broker.test_demo import SMALL
from tests.cluster.kubernetes_node import NODE, Node
from tests.cluster.steps import last_step, steps
from tests.faults.auditor import audit
from tests.support.image.build import TAG, save_application, save_kafka
from tests.support.paths import ROOT
from tests.support.waiting import eventually

RUN, SERVERS = "main", "broker-0.broker:9092"
_PATIENCE_S = 900.0
_REQUEST_S = 600
"""A worker whose server vanishes must not wait as long as for an answer."""
_FLAGS = (*SMALL, "--set=learner.max_steps=1000000", f"--set=worker.request_timeout_s={_REQUEST_S}")
_VALUES = {
    "brokers": {"enabled": False, "bootstrapServers": SERVERS},
    "imagePullPolicy": "Never",
}
_ATOMIC = ("--reset-then-reuse-values", "--atomic")
_OF_RUN = f"app.kubernetes.io/instance={RUN}"
_PODS, _PARTITIONS = 6, 4
"""Pods that last: two that group, two workers, a server, a learner."""


@dataclass(frozen=True)
class Moment:
    """When something was done to the run, by both clocks, and its last step then."""

    began: float
    time_ms: float
    step: int


class Story:
    """A run on a node, and what happens to it."""

    def __init__(self, folder: Path) -> None:
        self.node = Node(folder)
        self.say = self.node.say

    # ------------------------------------------------------------------ cluster

    def bring_images(self) -> None:
        for save, tags in ((save_application, ("rollstream:next",)), (save_kafka, ())):
            began = time.monotonic()
            archive = save(self.node.folder / "image.tar")
            built_s, size = time.monotonic() - began, archive.stat().st_size
            self.node.import_image(archive, *tags)
            taken_s = time.monotonic() - began - built_s
            self.say(f"{save.__name__}: {size / 1e9:.2f} GB, built in {built_s:.0f} s, imported in {taken_s:.0f} s")
            archive.unlink()

    def start_broker(self) -> None:
        """A broker in a pod, with a request of CPU: without one a busy node starves it."""
        self.node.offer_disks(3)
        properties = server_properties(
            BrokerConfig(host="broker-0.broker"),
            port=9092,
            controller_port=9093,
            log_dir="/var/lib/kafka/data",
            bind="0.0.0.0",
        )
        variables = {"CLUSTER_ID": "KpdRbDVLaISM29j1SiJqCg", **image_environment(properties)}
        folders = {
            "data": "/var/lib/kafka/data",
            "tmp": "/tmp",
            "config": "/opt/kafka/config",
            "logs": "/opt/kafka/logs",
        }
        container = {
            "name": "kafka",
            "image": TAG,
            "imagePullPolicy": "Never",
            "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "1Gi"}},
            "env": [{"name": name, "value": value} for name, value in variables.items()],
            "readinessProbe": {"tcpSocket": {"port": 9092}, "periodSeconds": 2},
            "volumeMounts": [{"name": name, "mountPath": path} for name, path in folders.items()],
        }
        labels, port = {"app": "broker"}, {"name": "kafka", "port": 9092}
        user = {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000}
        claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
        pod = {
            "securityContext": user,
            "containers": [container],
            "volumes": [{"name": name, "emptyDir": {}} for name in folders if name != "data"],
        }
        self.node.apply(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": "broker"},
                "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels, "ports": [port]},
            },
            {
                "apiVersion": "apps/v1",
                "kind": "StatefulSet",
                "metadata": {"name": "broker"},
                "spec": {
                    "serviceName": "broker",
                    "selector": {"matchLabels": labels},
                    "template": {"metadata": {"labels": labels}, "spec": pod},
                    "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": claim}],
                },
            },
        )
        self.node.kubectl("rollout", "status", "statefulset/broker", "--timeout=600s")
        self.say("a broker is ready in its pod")

    # ------------------------------------------------------------------ run

    def write_chart(self, *flags: str) -> None:
        text = (ROOT / "recipes" / "dsort3" / "run.toml").read_text().replace('run = "demo"', f'run = "{RUN}"')
        (self.node.folder / "run.toml").write_text(text)
        (self.node.folder / "values.yaml").write_text(json.dumps(_VALUES))
        command = (sys.executable, "-P", "-m", "rollstream", "deploy", "chart", "run.toml", "-o", "chart")
        self.node.run(*command, *_FLAGS, *flags)

    def install(self) -> None:
        moment = self.moment()
        values = ("--values", "chart/values-development.yaml", "--values", "values.yaml")
        self.node.helm("install", RUN, "chart", *values)
        self.await_training(moment, "helm install")
        # As the notes of the release say.
        self.node.kubectl("create", "job", "tools", "--from", f"cronjob/{RUN}-tools")
        self.node.kubectl("wait", "pod", "-l", "job-name=tools", "--for", "condition=Ready", "--timeout=600s")
        self.check_ledger()

    def kill(self, role: str) -> None:
        """Delete a pod without a signal to its processes, whose addresses vanish."""
        moment, pod = self.moment(), self.pods(role)[0]["metadata"]
        self.node.kubectl("delete", "pod", pod["name"], "--force", "--grace-period=0")
        self.await_training(moment, f"kubectl delete pod --force {pod['name']}", gone=[pod["uid"]])
        self.check_ledger()

    def kill_broker(self) -> None:
        moment = self.moment()
        self.node.kubectl("delete", "pod", "broker-0", "--force", "--grace-period=0")
        self.node.kubectl("wait", "pod/broker-0", "--for=condition=Ready", "--timeout=600s")
        self.await_training(moment, "kubectl delete pod --force broker-0")
        self.check_ledger()

    def drain_node(self) -> None:
        """Evict all pods of roles, as before work on a machine."""
        moment, gone = self.moment(), self.ids()
        roles = f"--pod-selector={_OF_RUN},app.kubernetes.io/component!=tools"
        self.node.kubectl("drain", NODE, roles, "--delete-emptydir-data", "--force", "--timeout=30m")
        self.node.kubectl("uncordon", NODE)
        self.await_training(moment, "kubectl drain and uncordon", gone=gone)
        self.check_ledger()

    def scale(self, number: int) -> None:
        """Set the number of grouping processes, and wait until they share the partitions."""
        moment = self.moment()
        self.node.helm("upgrade", RUN, "chart", "--reuse-values", "--set", f"roles.group.replicas={number}")
        eventually(lambda: self.members() == number, _PATIENCE_S, f"{number} members of the group", every_s=0.5)
        self.say(f"grouping by {number}: all partitions are assigned after {time.monotonic() - moment.began:.0f} s")
        self.await_training(moment, f"scaling to {number}", pods=_PODS - 2 + number)
        self.check_ledger()

    def members(self) -> int:
        """Number of the grouping processes that share all partitions; 0 while they do not."""
        client = AdminClient({"bootstrap.servers": SERVERS, "log_level": 0})
        [described] = client.describe_consumer_groups([f"{RUN}.grouper"]).values()
        shares = [len(member.assignment.topic_partitions) for member in described.result(30).members]
        return len(shares) if all(shares) and sum(shares) == _PARTITIONS else 0

    def upgrade(self, what: str, *words: str) -> None:
        moment, gone = self.moment(), self.ids()
        self.node.helm("upgrade", RUN, "chart", *_ATOMIC, "--timeout=30m", *words)
        self.await_training(moment, f"helm upgrade --atomic with {what}", gone=gone)
        self.check_ledger()

    def fail_upgrade(self) -> None:
        """Helm takes back an upgrade to an image that the node does not have."""
        moment = self.moment()
        with pytest.raises(AssertionError, match="has been rolled back"):
            self.node.helm("upgrade", RUN, "chart", *_ATOMIC, "--timeout=3m", "--set", "image=rollstream:absent")
        self.await_training(moment, "helm upgrade --atomic, taken back after 3 minutes")
        self.check_ledger()

    def uninstall(self) -> None:
        began = time.monotonic()
        self.node.helm("uninstall", RUN, "--wait", "--timeout=30m")
        eventually(lambda: not self.node.items("pods", "-l", _OF_RUN), _PATIENCE_S, "no pods", every_s=0.5)
        self.say(f"helm uninstall: no pod is left after {time.monotonic() - began:.0f} s")

    def drain(self) -> None:
        """End the run with nothing in flight, and judge it."""
        began = time.monotonic()
        self.tool("steer", "stop", "--drain")
        jobs = ("job", "-l", f"{_OF_RUN},app.kubernetes.io/component=learn")
        self.node.kubectl("wait", *jobs, "--for=condition=complete", "--timeout=60m")
        self.say(f"steer stop --drain: the learner has ended after {time.monotonic() - began:.0f} s")
        self.check_ledger()
        self.say(self.tool("verify").splitlines()[-1])
        self.uninstall()
        judged = audit(SERVERS, RUN)
        self.say(f"the auditor: {judged.produced} records, {judged.batches} batches, findings {judged.findings}")
        assert not judged.findings

    # ------------------------------------------------------------------ what can be seen

    def moment(self) -> Moment:
        return Moment(time.monotonic(), time.time() * 1000, last_step(SERVERS, RUN))

    def ids(self) -> list[str]:
        return [pod["metadata"]["uid"] for pod in self.pods()]

    def pods(self, role: str = "") -> list[dict[str, Any]]:
        """Pods of roles, but those that have ended or were asked to."""
        found = []
        for pod in self.node.items("pods", "-l", _OF_RUN):
            of = pod["metadata"]["labels"]["app.kubernetes.io/component"]
            ended = "deletionTimestamp" in pod["metadata"] or pod["status"]["phase"] in ("Succeeded", "Failed")
            if of not in ("topics", "tools") and role in ("", of) and not ended:
                found.append(pod)
        return found

    def await_training(self, moment: Moment, what: str, *, gone: Collection[str] = (), pods: int = _PODS) -> None:
        """Wait until as many pods are ready, none of them of those `gone`, and then for a step."""

        def ready() -> bool:
            now = self.pods()
            conditions = [each for pod in now for each in pod["status"].get("conditions", ())]
            count = sum(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
            return len(now) == count == pods and not set(self.ids()).intersection(gone)

        eventually(ready, _PATIENCE_S, f"{pods} ready pods after {what}", every_s=0.5)
        ready_s, step = time.monotonic() - moment.began, last_step(SERVERS, RUN)
        eventually(lambda: last_step(SERVERS, RUN) > max(step, moment.step), _PATIENCE_S, f"step {step}", every_s=0.5)
        times = [moment.time_ms, *sorted(at for at, _ in steps(SERVERS, RUN, newest=4000) if at > moment.time_ms)]
        pause_s = max(later - earlier for earlier, later in itertools.pairwise(times)) / 1000
        restarts = sum(each["restartCount"] for pod in self.pods() for each in pod["status"]["containerStatuses"])
        self.say(
            f"{what}: {pods} pods ready after {ready_s:.0f} s; step {moment.step} -> {last_step(SERVERS, RUN)}, "
            f"at most {pause_s:.0f} s between steps; restarts: {restarts}"
        )

    def tool(self, *words: str) -> str:
        """Output of a command in the pod of operators."""
        command = ("rollstream", *words, "--config", "/etc/rollstream/run.toml")
        return self.node.kubectl("exec", "job/tools", "--", *command)

    def check_ledger(self) -> None:
        account = json.loads(self.tool("ledger", "--json"))
        self.say(f"ledger: {account['produced']} records, balanced: {account['balanced']}, unread: {account['unread']}")
        assert account["balanced"]


def main(folder: Path) -> None:
    story = Story(folder)
    try:
        tell(story)
    except BaseException:
        print(story.node.report(), flush=True)
        raise


def tell(story: Story) -> None:
    story.bring_images()
    story.start_broker()
    story.write_chart()
    story.install()
    for role in ("group", "infer", "env", "learn"):
        story.kill(role)
    story.kill_broker()
    story.drain_node()
    for number in (1, 3, 1, 2):
        story.scale(number)
    story.write_chart("--set=learner.optimizer.learning_rate=0.001")
    story.upgrade("other settings")
    story.upgrade("another image", "--set", "image=rollstream:next")
    story.fail_upgrade()
    story.uninstall()
    story.install()
    story.drain()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
