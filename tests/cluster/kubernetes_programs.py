"""Programs of a Kubernetes node: daemons from Debian; Kubernetes itself and its DNS, which Go compiles once.

They are kept next to the other files that tests fetch.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rollstream.infra.broker.java_runtime import cache_dir
from tests.cluster import namespaces
from tests.support.debian import install_program

KUBERNETES, _DNS = "1.34.4", "1.12.4"
_DEBIAN = {
    "etcd": "etcd-server",
    "containerd": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "iptables": "iptables",
    "ip": "iproute2",
    "busybox": "busybox-static",
}
_COMMANDS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl")
# Parts of Kubernetes that its own module replaces by folders of its repository.
_STAGED = """
    api apiextensions-apiserver apimachinery apiserver cli-runtime client-go cloud-provider cluster-bootstrap
    code-generator component-base component-helpers controller-manager cri-api cri-client csi-translation-lib
    dynamic-resource-allocation endpointslice externaljwt kms kube-aggregator kube-controller-manager kube-proxy
    kube-scheduler kubectl kubelet metrics mount-utils pod-security-admission sample-apiserver sample-cli-plugin
    sample-controller"""
_DNS_SOURCE = """\
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
)

func init() { dnsserver.Directives = []string{"bind", "errors", "kubernetes"} }
func main() { coremain.Run() }
"""
_COMPILE_S = 3 * 3600.0


def missing() -> list[str]:
    """What this machine lacks to run a node, after apt has been asked for it."""
    problems = namespaces.missing() or [
        problem for program, package in _DEBIAN.items() if (problem := install_program(program, package))
    ]
    return (
        problems
        if shutil.which("go")
        else [*problems, "go is not installed (https://go.dev), which compiles Kubernetes"]
    )


def kubernetes() -> Path:
    """Directory of kube-apiserver, kubelet, kubectl and the other commands."""
    staged = KUBERNETES.replace("1.", "0.", 1)
    replaced = "".join(f"replace k8s.io/{name} => k8s.io/{name} v{staged}\n" for name in _STAGED.split())
    version = "k8s.io/component-base/version"
    major, minor, _ = KUBERNETES.split(".")
    # Helm asks the API server, which otherwise does not know its version, whether it is new enough for the chart.
    stamps = {"gitVersion": f"v{KUBERNETES}", "gitMajor": major, "gitMinor": minor}
    return _compiled(
        f"kubernetes-{KUBERNETES}",
        {"go.mod": f"module node\n\ngo 1.24.0\n\nrequire k8s.io/kubernetes v{KUBERNETES}\n{replaced}"},
        *(f"-ldflags=-s -w {' '.join(f'-X {version}.{name}={value}' for name, value in stamps.items())}",),
        *(f"k8s.io/kubernetes/cmd/{command}" for command in _COMMANDS),
    )


def dns() -> Path:
    """Path of CoreDNS with the plug-ins that a cluster needs."""
    module = f"module coredns\n\ngo 1.24.0\n\nrequire github.com/coredns/coredns v{_DNS}\n"
    return _compiled(f"coredns-{_DNS}", {"go.mod": module, "main.go": _DNS_SOURCE}, "-ldflags=-s -w", ".") / "coredns"


def _compiled(name: str, module: Mapping[str, str], *words: str) -> Path:
    """Directory of programs of a Go module with these files, compiled if they are not there."""
    folder = cache_dir(os.environ).with_name("test-files") / name
    if not folder.exists():
        print(f"compiling {name}, once", flush=True)
        filling = folder.with_name(f"{name}.filling")
        with tempfile.TemporaryDirectory(prefix="rollstream-go-") as scratch:
            for file, text in module.items():
                (Path(scratch) / file).write_text(text)
            # The checksums of what the module proxy answers are compared with the public ones.
            command = ["go", "build", "-mod=mod", "-o", f"{filling}/", *words]
            subprocess.run(command, check=True, timeout=_COMPILE_S, cwd=scratch)
        filling.rename(folder)
    return folder


if __name__ == "__main__":
    print(kubernetes(), dns())
