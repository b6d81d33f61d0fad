"""The parts of the cluster that need neither root nor a cluster."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from cluster import build, daemons, dns, images, node, site_closure, volumes
from cluster.settings import Settings
from cluster.shell import ClusterError, poll


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    environment = {"ARGOSY_E2E_CACHE": str(tmp_path / "cache"), "ARGOSY_E2E_STATE": str(tmp_path / "s")}
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


def test_a_kubeconfig_alone_does_not_make_the_cluster_external(tmp_path: Path) -> None:
    settings = Settings.from_env({"KUBECONFIG": "/someone/elses", "ARGOSY_E2E_STATE": str(tmp_path)})
    assert settings.external_kubeconfig is None
    assert settings.kubeconfig == tmp_path / "kubeconfig"


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


def test_every_command_gets_the_name_go_build_gives_it() -> None:
    names = {
        name: build._output_name(package, module.name)
        for module in build.MODULES
        for name, package in module.commands.items()
    }
    assert names.pop("etcd") == "server"
    assert all(name == output for name, output in names.items())


def test_kubernetes_is_stamped_with_the_version_of_its_module() -> None:
    flags = build._linker_flags()
    required = (build.SOURCES / "kubernetes" / "go.mod").read_text()
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
    images._pack(tmp_path / "image.tar", "localhost/x/pause:1", tmp_path / "pause")
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
    assert sorted(site_closure.closure(["torch"])) == ["kit==1", "runtime==1", "torch==1"]
    with pytest.raises(SystemExit):
        site_closure.closure(["nowhere"])


def test_a_volume_is_bound_to_its_claim_and_nodes() -> None:
    volume = volumes._volume("ns", "torch", Path("/run/x"), "1Gi", ["node-a", "node-b"])
    claim = volumes._claim("ns", "torch", "1Gi")
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert volume["spec"]["claimRef"] == {"namespace": "ns", "name": "torch"}
    assert volume["spec"]["accessModes"] == claim["spec"]["accessModes"] == ["ReadOnlyMany"]
