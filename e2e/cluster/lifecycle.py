"""Up and down: the order in which the parts are started, and removed.

Bring-up begins with the take-down, so a crashed run is no obstacle. The take-down works from records on disk
and from fixed names, kills nothing it did not start, and ends by checking that nothing is left.
"""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from cluster import (
    artifacts,
    cgroups,
    control_plane,
    daemons,
    dns,
    fake_gpus,
    go_binaries,
    images,
    network,
    node,
    pki,
    preflight,
    service_url,
    volumes,
)
from cluster.kubectl import Helm, Kubectl
from cluster.settings import NodeSettings, Settings
from cluster.shell import ClusterError, find, poll, remove_tree, run, say

ENDING_S = 30
"""How long processes of a node that was killed may take to end."""
JOINED_TAINT = "argosy-e2e=joined:NoSchedule"


@dataclass(frozen=True)
class Cluster:
    """A running cluster, ours or the user's: what a test needs of it."""

    settings: Settings
    kubectl: Kubectl
    helm: Helm

    @property
    def external(self) -> bool:
        """Whether it is the user's: nothing on its nodes can be touched then."""
        return self.settings.external_kubeconfig is not None

    @property
    def kubeconfig(self) -> Path:
        return self.settings.kubeconfig

    @cached_property
    def node_names(self) -> list[str]:
        return [item["metadata"]["name"] for item in self.kubectl.get("nodes")["items"]]

    def advertise_gpus(self, count: int, node_name: str | None = None) -> None:
        """See `fake_gpus.advertise`; on every node unless one is named. An external cluster keeps its own."""
        if self.external:
            return
        for name in [node_name] if node_name else self.node_names:
            fake_gpus.advertise(self.kubectl, name, count)

    def build_image(
        self, dockerfile: Path, context: Path, name: str, arguments: dict[str, str] | None = None
    ) -> str:
        """Build an image and put it on every node; returns the exact tag for the pods. See `images.build`.

        An external cluster gets none from here: ARGOSY_E2E_IMAGE_<NAME> names one its nodes can pull.
        """
        if self.external:
            variable = f"ARGOSY_E2E_IMAGE_{name.upper().replace('-', '_')}"
            if not (tag := self.settings.environment.get(variable)):
                raise ClusterError(f"an external cluster needs {variable}: an image that its nodes can pull")
            return tag
        tag = images.build(self.settings, dockerfile, context, name, arguments)
        images.load(self.settings, tag)
        return tag

    def prune_images(self, keep: list[str]) -> None:
        """See `images.prune`: call it with every tag of this run to keep the stores small."""
        if not self.external:
            images.prune(self.settings, keep)

    def service(self, namespace: str, name: str, port: int) -> AbstractContextManager[str]:
        """`with cluster.service("argosy", "router", 8080) as url:` See `service_url.service`."""
        return service_url.service(self.kubectl, namespace, name, port, routed=not self.external)

    def expose_folder(self, namespace: str, name: str, folder: Path) -> str:
        """See `volumes.expose`; returns the claim's name."""
        return volumes.expose(self.settings, self.kubectl, namespace, name, folder)

    def make_disk(self, namespace: str, name: str, *, size: str = "") -> Path:
        """See `volumes.make_disk`."""
        return volumes.make_disk(self.settings, self.kubectl, namespace, name, size=size)

    def join_node(self, tags: Sequence[str]) -> Cluster:
        """Boot a second node that has these images, and return the cluster with it.

        The node stays until the cluster is taken down. Its taint keeps other pods away than those that tolerate it, so
        tests that know of one node are not affected.
        """
        if self.external:
            raise ClusterError("an external cluster gets no nodes from here")
        grown = replace(self, settings=replace(self.settings, node_count=2))
        second = grown.settings.nodes[1]
        if self.settings.node_count == 1:
            binaries = go_binaries.binaries(self.settings)
            with _exclusive(self.settings):
                pki.create_node(self.settings, second)
                network.connect(second, self.settings.nodes)
                (self.settings.state / "node-count").write_text("2")
                node.start(self.settings, binaries, second)
            images.load_single_binary(grown.settings, binaries, "pause")
            node.wait_ready(self.kubectl, second)
        self.kubectl("taint", "node", second.name, JOINED_TAINT, "--overwrite")
        for tag in tags:
            images.load(grown.settings, tag)
        return grown

    def collect_artifacts(self, target: Path) -> Path:
        """See `artifacts.collect`."""
        return artifacts.collect(self.settings, self.kubectl, target)

    def kill_node(self, name: str) -> None:
        """Pull the plug of a node of ours; the host then reaches Services through a living one."""
        chosen = self._node(name)
        node.kill(self.settings, chosen)
        living = [each for each in self.settings.nodes if daemons.alive(self.settings, each.name)]
        if living:
            network.route_services_through(living[0])

    @contextmanager
    def silent_node(self, name: str) -> Iterator[None]:
        """Silence a node while the block runs: the cluster hears nothing from it; see `node.freeze_kubelet`."""
        chosen = self._node(name)
        node.freeze_kubelet(self.settings, chosen)
        try:
            yield
        finally:
            node.thaw_kubelet(self.settings, chosen)
            node.wait_ready(self.kubectl, chosen)

    def start_node(self, name: str) -> None:
        """Boot a killed node and wait until it is Ready."""
        node.start(self.settings, go_binaries.binaries(self.settings), self._node(name))
        node.wait_ready(self.kubectl, self._node(name))

    def _node(self, name: str) -> NodeSettings:
        if self.external:
            raise ClusterError("the nodes of an external cluster are not ours to stop")
        for each in self.settings.nodes:
            if each.name == name:
                return each
        raise ClusterError(
            f"no node {name!r} here, only {', '.join(each.name for each in self.settings.nodes)}"
        )


def up(settings: Settings) -> Cluster:
    """Bring the cluster up from nothing (whatever ran before is taken down) and return it, ready with DNS."""
    if settings.external_kubeconfig:
        cluster = connect(settings)
        cluster.kubectl("get", "--raw=/readyz")
        say(f"using the cluster of {settings.kubeconfig}")
        return cluster
    started = time.monotonic()
    go_binaries.ensure_packages()
    preflight.check_permissions()
    with _exclusive(settings):
        _take_down(settings, purge=False)
        shutil.rmtree(settings.logs, ignore_errors=True)
        settings.state.mkdir(parents=True, exist_ok=True)
        preflight.check_cgroups(settings.nodes[0])
        preflight.wait_for_ports()
        binaries = go_binaries.ensure_binaries(settings)
        (settings.state / "node-count").write_text(str(settings.node_count))
        cluster = _connect(settings, binaries)
        pki.create(settings)
        network.create(settings)
        control_plane.start(settings, binaries, cluster.kubectl)
        for each in settings.nodes:
            node.start(settings, binaries, each)
        images.load_single_binary(settings, binaries, "pause")
        dns_image = images.load_single_binary(settings, binaries, "coredns")
        for each in settings.nodes:
            node.wait_ready(cluster.kubectl, each)
        say(f"{settings.node_count} node(s) Ready")
        dns.install(cluster.kubectl, dns_image)
    say(f"cluster up in {time.monotonic() - started:.1f} s: export KUBECONFIG={settings.kubeconfig}")
    return cluster


def down(settings: Settings, *, purge: bool = False) -> None:
    """Remove everything `up` made but the caches and the logs; with `purge`, those too. Idempotent."""
    if settings.external_kubeconfig:
        return
    started = time.monotonic()
    with _exclusive(settings):
        _take_down(settings, purge=purge)
        if purge:
            remove_tree(settings.state)
            remove_tree(settings.cache / "nodes")
            images.forget(settings)
    say(f"cluster down in {time.monotonic() - started:.1f} s, nothing left")


def connect(settings: Settings) -> Cluster:
    """The cluster that is already up. Raises ClusterError when there is none."""
    if settings.external_kubeconfig:
        return _connect(settings, None)
    for name in control_plane.NAMES:
        daemons.require(settings, name)
    count = int((settings.state / "node-count").read_text())
    return _connect(replace(settings, node_count=count), go_binaries.binaries(settings))


def status(settings: Settings) -> str:
    """A few lines for a human."""
    lines = []
    if not settings.external_kubeconfig:
        for name in daemons.names(settings):
            pid = daemons.alive(settings, name)
            lines.append(f"{name}: {f'running, pid {pid}' if pid else 'gone'}")
        if not lines:
            return "no cluster"
    try:
        lines.append(connect(settings).kubectl("get", "nodes,pods", "-A", "-o", "wide").stdout.rstrip())
    except ClusterError as error:
        lines.append(str(error))
    return "\n".join(lines)


def _connect(settings: Settings, binaries: Path | None) -> Cluster:
    def command(name: str) -> str | Path:
        own = (binaries or go_binaries.binaries(settings)) / name
        if own.exists():
            return own
        if (found := find(name)) is None:
            raise ClusterError(
                f"{name} is needed to use the cluster of {settings.kubeconfig}, and is not on PATH"
            )
        return found

    helm = Helm(command("helm"), settings.kubeconfig, settings.state / "helm")
    return Cluster(settings, Kubectl(command("kubectl"), settings.kubeconfig), helm)


def _take_down(settings: Settings, *, purge: bool) -> None:
    for each in settings.possible_nodes:
        node.kill(settings, each)
    control_plane.stop(settings)
    for name in daemons.names(settings):
        daemons.kill(settings, name)
    _refuse_strangers(settings)
    network.destroy(settings)
    cgroups.destroy(settings)
    node.forget(settings, images=purge)
    if settings.state.is_dir():
        for path in settings.state.iterdir():
            if path == settings.logs:
                continue
            if path.is_dir():
                remove_tree(path)
            else:
                path.unlink()
    if remains := [*network.remains(settings), *cgroups.remains(settings)]:
        raise ClusterError(f"could not remove {', '.join(remains)}")


def _refuse_strangers(settings: Settings) -> None:
    """Living processes in a namespace of ours, but no record: a run with another state folder."""
    for each in settings.possible_nodes:
        if not Path(f"/run/netns/{each.netns}").exists():
            continue
        # Those of a node that was killed a moment ago may still be ending: a large one gives its memory back first.
        with suppress(ClusterError):
            poll(
                f"the end of {each.name}'s processes", lambda each=each: not _pids_in(each), timeout=ENDING_S
            )
        if pids := _pids_in(each):
            raise ClusterError(
                f"processes {' '.join(pids[:5])} run in the network namespace {each.netns}, unknown to "
                f"{settings.state}: take that cluster down with the ARGOSY_E2E_STATE it was started with"
            )


def _pids_in(node: NodeSettings) -> list[str]:
    return run("ip", "netns", "pids", node.netns, check=False).stdout.split()


@contextmanager
def _exclusive(settings: Settings) -> Iterator[None]:
    """One bring-up or take-down at a time."""
    settings.cache.mkdir(parents=True, exist_ok=True)
    with open(settings.cache / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ClusterError("another process is starting or removing the cluster") from None
        yield
