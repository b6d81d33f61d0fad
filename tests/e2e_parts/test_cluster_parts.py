"""The parts of the cluster that need neither root nor a cluster."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import daemons, distribution_files, dns, go_binaries, images, node, shell, volumes
from cluster.settings import Settings
from cluster.shell import ClusterError, poll

E2E = Path(volumes.__file__).parents[1]


@pytest.fixture
def state() -> Iterator[Path]:
    """A folder whose path leaves room for the names of sockets, which pytest's does not in its worker processes."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="a-") as name:
        yield Path(name)


@pytest.fixture
def settings(tmp_path: Path, state: Path) -> Settings:
    environment = {"ARGOSY_E2E_CACHE": str(tmp_path / "cache"), "ARGOSY_E2E_STATE": str(state)}
    return Settings.from_env({**environment, "ARGOSY_E2E_NODES": "2"})


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"ARGOSY_E2E_NODES": "3"}, "expected 1 or 2"),
        ({"ARGOSY_E2E_EXTERNAL": "1"}, "needs KUBECONFIG"),
        ({"ARGOSY_E2E_EXTERNAL": "1", "KUBECONFIG": "/nowhere"}, "is not a file"),
        ({"ARGOSY_E2E_STATE": "/" + "x" * 90}, "too long"),
    ],
)
def test_settings_refuse_what_they_can_not_use(environment: dict[str, str], complaint: str) -> None:
    with pytest.raises(ClusterError, match=complaint):
        Settings.from_env(environment)


def test_a_kubeconfig_alone_does_not_make_the_cluster_external(state: Path) -> None:
    settings = Settings.from_env({"KUBECONFIG": "/someone/elses", "ARGOSY_E2E_STATE": str(state)})
    assert settings.external_kubeconfig is None
    assert settings.kubeconfig == state / "kubeconfig"


def test_nodes_share_nothing(settings: Settings) -> None:
    a, b = settings.nodes
    for name in (
        "name",
        "address",
        "pod_subnet",
        "netns",
        "link",
        "cgroup",
        "data",
        "run",
        "containerd_socket",
    ):
        assert getattr(a, name) != getattr(b, name), name
    assert all(len(each.link) <= 15 for each in settings.nodes)  # IFNAMSIZ


def test_kubelet_config_names_the_nodes_own_folders(settings: Settings) -> None:
    for each in settings.nodes:
        config = json.loads(json.dumps(node.kubelet_config(settings, each)))
        assert config["cgroupRoot"] == f"/{each.cgroup}"
        assert config["resolvConf"].startswith(str(each.run))
        assert each.name in config["tlsCertFile"]


def test_cluster_dns_uses_the_image_and_address_given() -> None:
    text = dns.render("localhost/x/coredns:abc")
    assert "image: localhost/x/coredns:abc" in text
    assert "clusterIP: 10.96.0.10" in text
    assert "$" not in text


MOUNTS = """\
24 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
310 24 254:0 /run/netns /run/netns rw,relatime shared:1 - ext4 /dev/vda rw
311 310 0:4 net:[4026532] /run/netns/argosy-e2e-node-a rw shared:2 - nsfs nsfs rw
312 24 254:0 /srv /srv/with\\040space rw - ext4 /dev/vda rw
"""


@pytest.mark.parametrize(
    ("path", "is_mounted"),
    [
        ("/run/netns", True),  # bound to itself, as `ip netns add` does it: the same device as its parent
        ("/run/netns/argosy-e2e-node-a", True),
        ("/run", False),
        ("/run/netns/other", False),
        ("/srv/with space", True),
    ],
)
def test_a_folder_bound_to_itself_is_a_mount_point(path: str, is_mounted: bool) -> None:
    assert (Path(path) in shell.mount_points(MOUNTS)) is is_mounted


def test_nothing_of_the_cluster_asks_python_what_is_mounted() -> None:
    """`os.path.ismount` compares devices, and so misses folders that are bound within one file system."""
    folder = Path(go_binaries.__file__).parent
    asking = [path.name for path in folder.glob("*.py") if "ismount(" in path.read_text()]
    assert asking == []


def recording_python(folder: Path) -> Path:
    """A `python` that writes down how it is called, and fails for what `FAIL` names."""
    fake = folder / "python"
    fake.write_text('#!/bin/sh\necho "$*" >> "$CALLS"\ncase "$*" in *"$FAIL"*) exit 1;; esac\n')
    fake.chmod(0o755)
    return fake


@pytest.mark.parametrize(("fail", "steps"), [("nothing", 2), ("cluster build", 1)])
def test_the_binaries_are_built_before_any_test_has_a_deadline(fail: str, steps: int, tmp_path: Path) -> None:
    fake = recording_python(tmp_path)
    calls = tmp_path / "calls"
    environment = {"PATH": f"{fake.parent}:{os.environ['PATH']}", "CALLS": str(calls), "FAIL": fail}
    script = E2E / "run.sh"
    done = subprocess.run(["bash", script, "-k", "chosen"], env=environment, timeout=60)
    first, *rest = calls.read_text().splitlines()
    assert first == "-m cluster build"
    assert len(rest) == steps - 1
    assert bool(done.returncode) is (fail != "nothing")
    for line in rest:
        assert line.startswith("-m pytest")
        assert line.endswith("-k chosen")
        assert "timeout_func_only=true" in line, (
            "images are built by fixtures, whose commands have their own deadlines"
        )


def test_for_a_cluster_of_the_users_nothing_is_built(tmp_path: Path) -> None:
    (tmp_path / "kubeconfig").touch()
    environment = {
        "ARGOSY_E2E_EXTERNAL": "1",
        "KUBECONFIG": str(tmp_path / "kubeconfig"),
        "ARGOSY_E2E_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": str(E2E),
        "PATH": "",
    }
    done = subprocess.run([sys.executable, "-m", "cluster", "build"], env=environment, timeout=60)
    assert done.returncode == 0
    assert not (tmp_path / "cache").exists()


BUILD = """
import os
from cluster import go_binaries, shell
from cluster.settings import Settings
shell.stop_cleanly()
go_binaries.ensure_binaries(Settings.from_env(dict(os.environ)))
"""


def fake_go(folder: Path, script: str) -> dict[str, str]:
    """The environment of a build with another `go`, and a cache below `folder`."""
    path = folder / "path"
    path.mkdir()
    (path / "go").write_text(f"#!/bin/sh\n{script}\n")
    (path / "go").chmod(0o755)
    return {
        "PATH": f"{path}:{os.environ['PATH']}",
        "PYTHONPATH": str(E2E),
        "TMPDIR": str(folder),
        "PID_FILE": str(folder / "pid"),
        "ARGOSY_E2E_CACHE": str(folder / "cache"),
        "ARGOSY_E2E_STATE": "/nowhere",  # a build has none
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_a_build_that_is_stopped_leaves_neither_process_nor_folder(
    number: signal.Signals, tmp_path: Path
) -> None:
    temporary = '"${GOTMPDIR:-$TMPDIR}/go-build123"'
    go = f'mkdir {temporary}; echo $$ > "$PID_FILE"; echo compiling >&2; exec sleep 60'
    environment = fake_go(tmp_path, go)
    # As a job of a shell that is not interactive: SIGINT is ignored until somebody says otherwise.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen([sys.executable, "-c", BUILD], env=environment)
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        try:
            pid = int(poll("the build to start", lambda: _read(tmp_path / "pid"), 30))
            process.send_signal(number)
            process.wait(timeout=30)
        finally:
            process.kill()
    assert process.returncode != 0
    poll("go to end", lambda: not Path(f"/proc/{pid}").exists() or None, 10)
    assert list(tmp_path.rglob("go-build*")) == []
    (binaries,) = (tmp_path / "cache").glob("bin-*")
    assert list(binaries.iterdir()) == []


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path: Path) -> None:
    names = sorted({name for module in go_binaries.MODULES for name in module.commands})
    # Whether it finds anything in its folders, and one file for each command, in the folder that follows -o.
    go = f"""ls "$GOTMPDIR" >&2
while [ "$1" != -o ]; do shift; done
cd "$2" && ls >&2 && touch server {" ".join(names)}"""
    environment = fake_go(tmp_path, go)
    settings = Settings.from_env(environment)
    folder = go_binaries.binaries(settings)
    for stale in (".work-kubernetes/go-build1", ".staging-kubernetes"):
        (folder / stale).mkdir(parents=True)
    (folder / ".staging-kubernetes" / "kubelet").touch()
    subprocess.run([sys.executable, "-c", BUILD], env=environment, check=True, timeout=60)
    assert sorted(path.name for path in folder.iterdir()) == names
    assert (settings.cache / "build-logs" / "kubernetes.log").read_text() == ""


def test_every_command_gets_the_name_go_build_gives_it() -> None:
    names = {
        name: go_binaries.output_name(package, module.name)
        for module in go_binaries.MODULES
        for name, package in module.commands.items()
    }
    assert names.pop("etcd") == "server"
    assert all(name == output for name, output in names.items())


def test_kubernetes_is_stamped_with_the_version_of_its_module() -> None:
    flags = go_binaries.linker_flags()
    required = (go_binaries.SOURCES / "kubernetes" / "go.mod").read_text()
    version = flags.partition("gitVersion=")[2].split()[0]
    assert f"k8s.io/kubernetes {version}" in required
    replaced = [line for line in required.splitlines() if "=> k8s.io/" in line]
    assert replaced
    assert all(line.endswith(f" v0.{version.removeprefix('v1.')}") for line in replaced)


def test_a_daemon_is_killed_by_its_record(settings: Settings) -> None:
    daemons.start(settings, "sleeper", ["sleep", "60"])
    assert daemons.alive(settings, "sleeper")
    assert daemons.kill(settings, "sleeper")
    assert daemons.alive(settings, "sleeper") is None
    assert not daemons.kill(settings, "sleeper")


def test_a_recycled_pid_is_left_alone(settings: Settings) -> None:
    with subprocess.Popen(["sleep", "60"]) as stranger:
        try:
            settings.pids.mkdir(parents=True)
            (settings.pids / "etcd").write_text(f"{stranger.pid} 1\n")  # same pid, started at another time
            assert not daemons.kill(settings, "etcd")
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_poll_tells_what_it_waited_for_and_the_last_error() -> None:
    def probe() -> None:
        raise ClusterError("connection refused")

    with pytest.raises(ClusterError, match="the moon: not within 0 s; last: connection refused"):
        poll("the moon", probe, timeout=0)


def test_a_packed_image_has_the_binary_and_names_it(tmp_path: Path) -> None:
    (tmp_path / "pause").write_bytes(b"\x7fELF")
    images.pack(tmp_path / "image.tar", "localhost/x/pause:1", tmp_path / "pause")
    with tarfile.open(tmp_path / "image.tar") as archive:
        files = {name: archive.extractfile(name).read() for name in archive.getnames()}  # type: ignore[union-attr]
    manifest = json.loads(files["manifest.json"])[0]
    assert manifest["RepoTags"] == ["localhost/x/pause:1"]
    assert json.loads(files[manifest["Config"]])["config"]["Entrypoint"] == ["/pause"]
    (tmp_path / "layer.tar").write_bytes(files[manifest["Layers"][0]])
    with tarfile.open(tmp_path / "layer.tar") as layer:
        member = layer.getmember("pause")
        assert (member.mode, member.uid, member.mtime) == (0o755, 0, 0)


def test_a_closure_follows_extras_and_skips_what_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def distribution(name: str, *requirements: str) -> None:
        folder = tmp_path / f"{name}-1.dist-info"
        folder.mkdir()
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {name}",
            "Version: 1",
            *(f"Requires-Dist: {r}" for r in requirements),
        ]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")

    distribution(
        "torch", 'kit[cuda,blas] >=1; platform_system == "Linux"', "colors; extra == 'test'", "absent"
    )
    distribution("kit", 'runtime==1; extra == "cuda"', "fft==1; extra == 'fft'")
    for name in ("runtime", "fft", "colors"):
        distribution(name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    assert sorted(distribution_files.closure(["torch"])) == ["kit==1", "runtime==1", "torch==1"]
    with pytest.raises(SystemExit):
        distribution_files.closure(["nowhere"])


def test_a_volume_is_bound_to_its_claim_and_nodes() -> None:
    volume = volumes.local_volume("ns", "torch", Path("/run/x"), "1Gi", ["node-a", "node-b"])
    claim = volumes.claim_of("ns", "torch", "1Gi")
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert volume["spec"]["claimRef"] == {"namespace": "ns", "name": "torch"}
    assert volume["spec"]["accessModes"] == claim["spec"]["accessModes"] == ["ReadOnlyMany"]
    disk = volumes.local_volume("ns", "models", Path("/run/x"), "1Gi", ["node-a"], "ReadWriteOnce")
    assert disk["spec"]["accessModes"] == ["ReadWriteOnce"]


def test_what_belongs_to_one_run_is_removed_from_a_nodes_disk_and_images_are_kept(settings: Settings) -> None:
    for each in settings.nodes:
        for folder in ("containerd", "kubelet", "argosy/models", "disks/ns-models"):
            (each.data / folder).mkdir(parents=True)
    node.forget(settings)
    assert [path.name for each in settings.nodes for path in each.data.iterdir()] == ["containerd"] * 2
