"""A node of Kubernetes in the namespaces of this process: API server, controllers, scheduler, kubelet, services, DNS.

All of it ends with the namespaces. Its files are in one directory; where programs insist on paths of the machine,
mounts of the namespaces hide these.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from tests.cluster import kubernetes_programs
from tests.cluster.namespaces import ADDRESS, give_address, make_cgroup
from tests.support.certificates import Authority
from tests.support.helm import helm
from tests.support.image.build import save_image
from tests.support.image.entries import file_entry, with_parents
from tests.support.waiting import eventually

NODE = "node"
_HIDDEN = ("/run", "/var/log", "/var/lib/cni", "/var/lib/kubelet")
_SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""What the kubelet sets for the whole machine; it finds these values, and leaves those of the machine alone."""
_FILES = {
    "containerd.toml": """\
version = 2
root = "$folder/containerd/root"
state = "$folder/containerd/state"
[grpc]
address = "$folder/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
path = "$folder/containerd/opt"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "pause:local"
# Without CAP_SYS_RESOURCE, nobody may make a process less likely to be killed than its parent.
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "$folder/cni"
""",
    "cni/pods.conflist": """\
{"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "cni0", "isGateway": true,
 "hairpinMode": true, "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.244.0.0/24"}]],
 "routes": [{"dst": "0.0.0.0/0"}]}}]}
""",
    "kubelet.yaml": """\
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: $address
authentication:
  anonymous: {enabled: false}
  webhook: {enabled: false}
  x509: {clientCAFile: $folder/authority.crt}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
cgroupRoot: $cgroup
failCgroupV1: false
failSwapOn: false
containerRuntimeEndpoint: unix://$folder/containerd.sock
clusterDNS: ["$address"]
clusterDomain: cluster.local
resolvConf: $folder/pods-resolv.conf
podLogsDir: $folder/pod-logs
volumePluginDir: $folder/volume-plugins
evictionHard: {memory.available: 200Mi}
# Collecting garbage would remove images that no registry has.
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
""",
    "proxy.yaml": """\
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: iptables
clusterCIDR: 10.244.0.0/16
hostnameOverride: $node
clientConnection: {kubeconfig: $folder/admin.conf}
conntrack: {maxPerCore: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
""",
    "Corefile": """\
cluster.local:53 {
  bind $address
  errors
  kubernetes cluster.local {
    kubeconfig $folder/admin.conf
  }
}
""",
    "pods-resolv.conf": "nameserver $address\n",
    "resolv.conf": "nameserver $address\nsearch default.svc.cluster.local\noptions ndots:5\n",
    "admin.conf": """\
apiVersion: v1
kind: Config
clusters: [{name: tests, cluster: {server: "https://$address:6443", certificate-authority: $folder/authority.crt}}]
users: [{name: admin, user: {client-certificate: $folder/admin.crt, client-key: $folder/admin.key}}]
contexts: [{name: tests, context: {cluster: tests, user: admin}}]
current-context: tests
""",
}
_DAEMONS = {
    "etcd": """\
etcd --data-dir=$folder/etcd-data --unsafe-no-fsync --listen-client-urls=http://127.0.0.1:2379
--advertise-client-urls=http://127.0.0.1:2379 --listen-peer-urls=http://127.0.0.1:2380
""",
    "containerd": "containerd --config=$folder/containerd.toml",
    "kube-apiserver": """\
$kubernetes/kube-apiserver --etcd-servers=http://127.0.0.1:2379 --bind-address=$address --advertise-address=$address
--secure-port=6443 --tls-cert-file=$folder/server.crt --tls-private-key-file=$folder/server.key
--client-ca-file=$folder/authority.crt --cert-dir=$folder/certificates
--service-account-issuer=https://kubernetes.default.svc --service-account-key-file=$folder/accounts.crt
--service-account-signing-key-file=$folder/accounts.key --kubelet-client-certificate=$folder/admin.crt
--kubelet-client-key=$folder/admin.key --kubelet-preferred-address-types=InternalIP --authorization-mode=Node,RBAC
--service-cluster-ip-range=10.96.0.0/16
""",
    "kube-controller-manager": """\
$kubernetes/kube-controller-manager --kubeconfig=$folder/admin.conf --use-service-account-credentials
--service-account-private-key-file=$folder/accounts.key --root-ca-file=$folder/authority.crt --leader-elect=false
--bind-address=127.0.0.1 --cert-dir=$folder/certificates
""",
    "kube-scheduler": """\
$kubernetes/kube-scheduler --kubeconfig=$folder/admin.conf --leader-elect=false --bind-address=127.0.0.1
--cert-dir=$folder/certificates
""",
    "kubelet": """\
$kubernetes/kubelet --kubeconfig=$folder/admin.conf --config=$folder/kubelet.yaml --root-dir=$folder/kubelet-data
--cert-dir=$folder/certificates --hostname-override=$node --node-ip=$address
""",
    "kube-proxy": "$kubernetes/kube-proxy --config=$folder/proxy.yaml",
    "coredns": "$dns -conf $folder/Corefile",
}


class Node:
    """A node that is ready for pods."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._began = folder, time.monotonic()
        programs = kubernetes_programs.kubernetes()
        self._names = {
            "folder": str(folder),
            "address": ADDRESS,
            "node": NODE,
            "kubernetes": str(programs),
            "dns": str(kubernetes_programs.dns()),
            "cgroup": make_cgroup(folder),
        }
        path = f"{programs}:{os.environ['PATH']}:/usr/sbin:/sbin"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("ROLLSTREAM", "KAFKA_"))},
            "PATH": path,
            "KUBECONFIG": f"{folder}/admin.conf",
            **{f"HELM_{kind}_HOME": f"{folder}/helm" for kind in ("CACHE", "CONFIG", "DATA")},
        }
        self._helm = str(helm())
        self._hide()
        self._write()
        self._certify()
        for daemon in ("etcd", "containerd", "kube-apiserver"):
            self._start(daemon)
        eventually(lambda: self.kubectl("get", "--raw", "/readyz") == "ok", 300, "the API server", every_s=0.5)
        for daemon in ("kube-controller-manager", "kube-scheduler"):
            self._start(daemon)
        self._import_pause()
        for daemon in ("kubelet", "kube-proxy", "coredns"):
            self._start(daemon)
        self.kubectl("wait", "--for=create", "node/node", "--timeout=300s")
        self.kubectl("wait", "--for=condition=Ready", "node/node", "--timeout=300s")
        eventually(lambda: self.kubectl("get", "serviceaccount", "default"), 300, "accounts for pods", every_s=0.5)
        self.say(f"a node of Kubernetes {kubernetes_programs.KUBERNETES} is ready")

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:6.0f} s] {text}", flush=True)

    def run(self, *words: str, stdin: str | None = None, timeout_s: float = 1800.0) -> str:
        """Output of a command, which must succeed."""
        answer = subprocess.run(
            words,
            cwd=self.folder,
            env=self.environment,
            input=stdin or "",
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert answer.returncode == 0, f"{words}: {answer.stdout[-2000:]}{answer.stderr[-4000:]}"
        return answer.stdout.strip()

    def kubectl(self, *words: str) -> str:
        return self.run("kubectl", *words)

    def helm(self, *words: str) -> str:
        return self.run(self._helm, *words)

    def apply(self, *objects: dict[str, Any]) -> None:
        """Create objects, or bring them up to date."""
        self.run(
            "kubectl", "apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        )

    def items(self, kind: str, *words: str) -> list[dict[str, Any]]:
        """Objects of a kind."""
        found: list[dict[str, Any]] = json.loads(self.kubectl("get", kind, "-o", "json", *words))["items"]
        return found

    def import_image(self, archive: Path, *tags: str) -> None:
        """Bring an image to the node, as a file that `docker save` writes, and give it further tags."""
        self._ctr("import", str(archive))
        [name] = json.loads(self.run("tar", "-xOf", str(archive), "manifest.json"))[0]["RepoTags"]
        for tag in tags:
            self._ctr("tag", f"docker.io/library/{name}", f"docker.io/library/{tag}")

    def offer_disks(self, count: int) -> None:
        """Volumes that claims of pods get, as from the administrator of a cluster."""
        name, here = "local", {"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE]}
        default = {"storageclass.kubernetes.io/is-default-class": "true"}
        storage_class = {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": name, "annotations": default},
            "provisioner": "kubernetes.io/no-provisioner",
            "volumeBindingMode": "WaitForFirstConsumer",
        }
        volumes = []
        for number in range(count):
            path = self.folder / f"disk-{number}"
            path.mkdir()
            spec = {
                "capacity": {"storage": "100Gi"},
                "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
                "storageClassName": name,
                "local": {"path": str(path)},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
            }
            volumes.append(
                {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": path.name}, "spec": spec}
            )
        self.apply(storage_class, *volumes)

    def report(self) -> str:
        """What one needs to see when something does not happen."""
        texts = [f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in self.folder.glob("*.log")]
        commands: Sequence[Sequence[str]] = (
            ("get", "pods,jobs,statefulsets", "-o", "wide"),
            ("get", "events", "--sort-by=.lastTimestamp"),
            *(("logs", "--all-containers", "--tail=15", pod["metadata"]["name"]) for pod in self.items("pods")),
        )
        for words in commands:
            answer = subprocess.run(["kubectl", *words], env=self.environment, capture_output=True, text=True)
            texts.append(f"$ kubectl {' '.join(words)}\n{answer.stdout[-6000:]}{answer.stderr[-1000:]}")
        return "\n".join(texts)

    def _hide(self) -> None:
        """Mount over paths of the machine that programs insist on."""
        self.run("mount", "--make-rshared", "/")
        for hidden in _HIDDEN:
            Path(hidden).mkdir(parents=True, exist_ok=True)
            self.run("mount", "-t", "tmpfs", "tmpfs", hidden)
        give_address()
        for name in ("ipv4/ip_forward", "bridge/bridge-nf-call-iptables"):
            Path("/proc/sys/net", name).write_text("1")
        for name, value in _SYSCTLS.items():
            kept = self.folder / "sysctl" / name
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(f"{value}\n")
            self.run("mount", "--bind", str(kept), f"/proc/sys/{name}")

    def _write(self) -> None:
        for name, text in _FILES.items():
            file = self.folder / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(Template(text).substitute(self._names))
        self.run("mount", "--bind", str(self.folder / "resolv.conf"), str(Path("/etc/resolv.conf").resolve()))

    def _certify(self) -> None:
        authority = Authority(self.folder)
        authority.issue("server", addresses=(ADDRESS, "10.96.0.1"))
        authority.issue("admin", organization="system:masters")
        authority.issue("accounts")

    def _start(self, daemon: str) -> None:
        words = Template(_DAEMONS[daemon]).substitute(self._names).split()
        with (self.folder / f"{daemon}.log").open("wb") as log:
            subprocess.Popen(
                words, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _import_pause(self) -> None:
        """The image of the process that holds a pod's namespaces."""
        busybox = shutil.which("busybox")
        assert busybox
        entries = with_parents([file_entry("/bin/busybox", Path(busybox), 0o755)])
        config = {"Entrypoint": ["/bin/busybox", "sleep", "2147483647"]}
        self.import_image(save_image(self.folder / "pause.tar", "pause:local", entries, config))

    def _ctr(self, *words: str) -> None:
        self.run("ctr", "-a", str(self.folder / "containerd.sock"), "-n", "k8s.io", "images", *words)
