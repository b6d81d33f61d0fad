"""Builds the cluster's binaries from their Go modules, once, into a cache outside the tree.

`go/` holds one small module per family, so that versions and checksums are pinned by its go.mod and go.sum:

- `go/kubernetes`: etcd and the Kubernetes commands (they share most of their packages), and `pause`;
- `go/helm`: helm;
- `go/coredns`: CoreDNS with the few plugins that cluster DNS needs.

Everything is built without cgo: no C compiler is needed, and the same binary runs on the host and in an empty
image. The cache folder is named by a hash of those files: a new version never meets an old binary. To change
a version: `go get MODULE@VERSION && go mod tidy` in the module's folder. A new Kubernetes also needs its
`replace` lines brought to the same minor version: one for every `./staging` line of its own go.mod.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import time
from collections import deque
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cluster.settings import Settings
from cluster.shell import SEARCH_PATH, ClusterError, failure_text, find, run, say

SOURCES = Path(__file__).parent / "go"
FLAGS = ("-mod=readonly", "-trimpath", "-buildvcs=false")
LINKER_FLAGS = "-s -w"
PROGRESS_PERIOD = 20.0


@dataclass(frozen=True)
class Module:
    """A Go module of ours and the commands it yields: name of the binary -> Go package."""

    name: str
    commands: dict[str, str]


MODULES = (
    Module(
        "kubernetes",
        {
            "etcd": "go.etcd.io/etcd/server/v3",
            "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
            "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
            "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
            "kube-proxy": "k8s.io/kubernetes/cmd/kube-proxy",
            "kubectl": "k8s.io/kubernetes/cmd/kubectl",
            "kubelet": "k8s.io/kubernetes/cmd/kubelet",
            "pause": "./pause",
        },
    ),
    Module("helm", {"helm": "helm.sh/helm/v4/cmd/helm"}),
    Module("coredns", {"coredns": "."}),
)

PACKAGES = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "buildah": "buildah",
    "debootstrap": "debootstrap",
    "openssl": "openssl",
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
    "tar": "tar",
}
"""Command -> Debian package."""
REPOSITORY = "localhost/argosy-e2e"
"""The prefix of every image made for the cluster."""
CNI_PLUGINS = Path("/usr/lib/cni")


@cache
def version_key() -> str:
    """Twelve hex digits that change with any source, version, flag or architecture."""
    digest = hashlib.sha256(repr((FLAGS, linker_flags(), platform.machine())).encode())
    for path in sorted(SOURCES.rglob("*")):
        if path.is_file():
            digest.update(str(path.relative_to(SOURCES)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def single_binary_tag(name: str) -> str:
    """The image that holds one of the binaries and nothing else."""
    return f"{REPOSITORY}/{name}:{version_key()}"


def binaries(settings: Settings) -> Path:
    """The folder the binaries are (or will be) in."""
    return settings.cache / f"bin-{version_key()}"


def ensure_packages() -> None:
    """Install the Debian packages whose commands are missing; does nothing when all are there."""
    missing = {package for command, package in PACKAGES.items() if find(command) is None}
    if not (CNI_PLUGINS / "bridge").exists():
        missing.add("containernetworking-plugins")
    if not missing:
        return
    if find("apt-get") is None:
        raise ClusterError(
            f"missing {', '.join(sorted(missing))}, and there is no apt-get to install them with"
        )
    say(f"installing {' '.join(sorted(missing))}")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    run("apt-get", "update", env=quiet, timeout=300)
    run("apt-get", "install", "-y", "--no-install-recommends", *sorted(missing), env=quiet, timeout=900)
    absent = [command for command in PACKAGES if find(command) is None]
    if absent:
        raise ClusterError(f"still missing after the installation: {', '.join(absent)}")


def ensure_binaries(settings: Settings) -> Path:
    """Build what the cache lacks and return the folder of binaries."""
    folder = binaries(settings)
    folder.mkdir(parents=True, exist_ok=True)
    with open(settings.cache / "build-lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two builds the second finds everything built
        for module in MODULES:
            missing = {
                name: package for name, package in module.commands.items() if not (folder / name).exists()
            }
            if missing:
                _build(module, missing, folder, settings.cache / "build-logs")
    return folder


def _build(module: Module, commands: dict[str, str], folder: Path, logs: Path) -> None:
    """One `go build` of the module's missing commands: they share what they compile."""
    go = _go()
    logs.mkdir(parents=True, exist_ok=True)
    staging = folder / f".staging-{module.name}"
    work = folder / f".work-{module.name}"
    say(f"building {' '.join(commands)} (once; minutes on a small machine)")
    argv = [
        go,
        "build",
        "-v",
        *FLAGS,
        f"-ldflags={linker_flags()}",
        "-o",
        f"{staging}{os.sep}",
        *commands.values(),
    ]
    env = {**os.environ, "PATH": SEARCH_PATH, "CGO_ENABLED": "0", "GOTMPDIR": str(work)}
    started = time.monotonic()
    try:
        for path in (staging, work):
            shutil.rmtree(path, ignore_errors=True)  # of a build that was killed
            path.mkdir()
        _run_reporting(argv, SOURCES / module.name, env, logs / f"{module.name}.log", module.name)
        for name, package in commands.items():
            (staging / output_name(package, module.name)).rename(folder / name)
    finally:
        for path in (staging, work):
            shutil.rmtree(path, ignore_errors=True)
    say(f"built {module.name} in {time.monotonic() - started:.0f} s")


def _run_reporting(argv: list[str], cwd: Path, env: dict[str, str], log_file: Path, name: str) -> None:
    """Run a build to its end, saying now and then how far it is. It ends with us, compilers included."""
    started = reported = time.monotonic()
    compiled = 0
    tail: deque[str] = deque(maxlen=40)
    with (
        open(log_file, "w") as log,
        subprocess.Popen(
            argv,
            cwd=cwd,
            env=env,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        assert process.stderr
        try:
            for line in process.stderr:
                log.write(line)
                tail.append(line)
                compiled += 1
                if time.monotonic() - reported > PROGRESS_PERIOD:
                    reported = time.monotonic()
                    say(f"  {name}: {compiled} packages, {reported - started:.0f} s")
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    if process.returncode:
        raise ClusterError(failure_text(argv, process.returncode, "".join(tail)))


def linker_flags() -> str:
    """Charts and clients read the version: without these Kubernetes calls itself v0.0.0-master."""
    required = (SOURCES / "kubernetes" / "go.mod").read_text()
    match = re.search(r"^\s*k8s\.io/kubernetes (v(\d+)\.(\d+)\.\d+)", required, re.MULTILINE)
    assert match
    stamps = {"gitVersion": match[1], "gitMajor": match[2], "gitMinor": match[3]}
    flags = [f"-X=k8s.io/component-base/version.{name}={value}" for name, value in stamps.items()]
    return " ".join([LINKER_FLAGS, *flags])


def output_name(package: str, module: str) -> str:
    """The name that `go build -o FOLDER/` gives a package's binary: the last element that is no version suffix."""
    if package == ".":
        return module
    elements = package.split("/")
    return elements[-2] if elements[-1] in ("v2", "v3", "v4") else elements[-1]


def _go() -> str:
    go = find("go") or ("/usr/local/go/bin/go" if Path("/usr/local/go/bin/go").exists() else None)
    if go is None:
        raise ClusterError(
            "Go is needed to build Kubernetes and was not found: install Go 1.21 or newer (it fetches "
            "the exact toolchain itself) from https://go.dev/dl and put it on PATH"
        )
    return go
