"""Container images without a registry: built by buildah, or packed from one binary, then handed to each node.

buildah works on the base of `base_image.py` in a store inside the cache, in namespaces of its own, so that a
build leaves no mount behind. Tags are content: a rebuilt image has a new tag, an unchanged one is on the
nodes already. Pods must name the exact tag returned here and use `imagePullPolicy: IfNotPresent` (or Never).

A build sees two read-only files of this machine, for its RUN steps only, never in the image: the certificate
bundle and pip's settings (mirror, proxy), so that `pip install` works inside where it works outside.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster import base_image
from cluster.go_binaries import REPOSITORY, single_binary_tag
from cluster.node import ctr, ctr_argv
from cluster.settings import NodeSettings, Settings
from cluster.shell import CONTAINED, ClusterError, pipe, poll, remove_tree, run, say

CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
PIP_SETTINGS = ("index-url", "extra-index-url", "trusted-host", "proxy", "timeout", "default-timeout")


def load_single_binary(settings: Settings, binaries: Path, name: str) -> str:
    """Pack `binaries/NAME` alone into an image and put it on every node that lacks it; returns its tag."""
    tag = single_binary_tag(name)
    lacking = [node for node in settings.nodes if tag not in list_images(node)]
    if lacking:
        with tempfile.TemporaryDirectory(dir=settings.state) as folder:
            archive = Path(folder) / "image.tar"
            pack(archive, tag, binaries / name)
            for node in lacking:
                _import_file(node, archive)
    return tag


def ensure_base(settings: Settings) -> str:
    """The base image's tag in buildah's store: the value of a Dockerfile's BASE argument."""
    tag = f"{REPOSITORY}/base:{base_image.SUITE}-{base_image.key()}"
    if _buildah(settings, "images", "--quiet", tag, check=False).strip():
        return tag
    rootfs = base_image.ensure_rootfs(settings)
    container = _buildah(settings, "from", "--pull-never", "scratch").strip()
    try:
        _buildah(settings, "add", "--quiet", container, str(rootfs), "/")
        _buildah(settings, "config", "--cmd", "bash", "--env", "LANG=C.UTF-8", container)
        _buildah(settings, "commit", "--quiet", container, tag)
    finally:
        _buildah(settings, "rm", container)
    return tag


def build(
    settings: Settings,
    dockerfile: Path,
    context: Path,
    name: str,
    arguments: Mapping[str, str] | None = None,
    ignore: Path | None = None,
) -> str:
    """Build `dockerfile` over `context` with BASE set to our base image (unless in `arguments`).

    `ignore` is a .dockerignore file other than the context's own. Steps that did not change come from the
    store. Returns the tag, `localhost/argosy-e2e/NAME:id-<first 12 digits of the image id>`: with letters in front, for
    digits alone are a number to `helm --set` and to YAML. Raises ClusterError with the end of the build's output.
    """
    arguments = {"BASE": "", **(arguments or {})}
    arguments["BASE"] = arguments["BASE"] or ensure_base(settings)
    started = time.monotonic()
    settings.logs.mkdir(parents=True, exist_ok=True)
    id_file = settings.state / f"image-{name}.id"
    words = [
        "bud",
        "--isolation=chroot",
        "--pull-never",
        "--layers",
        "--network=host",
        f"--iidfile={id_file}",
    ]
    words += [f"--volume={source}:{target}:ro" for source, target in _visible_files(settings)]
    words += [f"--build-arg={key}={value}" for key, value in arguments.items()]
    words += [f"--ignorefile={ignore}"] if ignore else []
    output = _buildah(
        settings, *words, f"--file={dockerfile}", f"--tag={REPOSITORY}/{name}:latest", str(context)
    )
    (settings.logs / f"image-{name}.log").write_text(output)
    image_id = id_file.read_text().strip().removeprefix("sha256:")
    tag = f"{REPOSITORY}/{name}:id-{image_id[:12]}"
    _buildah(settings, "tag", image_id, tag)
    say(f"built image {tag} in {time.monotonic() - started:.1f} s")
    return tag


def run_inside(settings: Settings, tag: str, *command: str) -> str:
    """Run a command in a container of an image, as the image's user; return what it prints.

    Raises ClusterError with the end of its output when it fails.
    """
    container = _buildah(settings, "from", "--pull-never", tag).strip()
    try:
        return _buildah(settings, "run", "--isolation=chroot", container, "--", *command)
    finally:
        _buildah(settings, "rm", container)


def inspect(settings: Settings, tag: str) -> dict[str, Any]:
    """What buildah knows of an image of its store: `OCIv1` is its configuration, as the OCI has it."""
    return json.loads(_buildah(settings, "inspect", "--type=image", tag))


def load(settings: Settings, tag: str) -> None:
    """Put an image of buildah's store on every node that lacks it."""
    if settings.external_kubeconfig:
        raise ClusterError(
            "images can not be put on an external cluster's nodes: push them to a registry it reads"
        )
    for node in settings.nodes:
        if tag in list_images(node):
            continue
        started = time.monotonic()
        push = [*_buildah_argv(settings, "push", "--quiet", tag, f"docker-archive:/dev/stdout:{tag}")]
        pipe(push, ctr_argv(node, "images", "import", "-"))
        say(f"put {tag} on {node.name} in {time.monotonic() - started:.1f} s")


def list_images(node: NodeSettings) -> set[str]:
    return set(ctr(node, "images", "list", "--quiet").stdout.split())


def prune(settings: Settings, keep: Sequence[str]) -> None:
    """Remove from buildah's store and the nodes our images that are neither in `keep` nor the base."""
    kept = {
        *keep,
        f"{REPOSITORY}/base:{base_image.SUITE}-{base_image.key()}",
        *map(single_binary_tag, ("pause", "coredns")),
    }
    for node in settings.nodes:
        lines = [line.split() for line in ctr(node, "images", "list").stdout.splitlines()[1:]]
        digests = {words[0]: words[2] for words in lines}
        kept_digests = {digests.get(tag) for tag in kept}
        stale = [name for name, digest in digests.items() if digest not in kept_digests and name not in kept]
        if stale:  # the names a kubelet's containers refer to (sha256:...) hold the layers, so they go too
            ctr(node, "images", "remove", "--sync", *stale)
    stored = _buildah(settings, "images", "--format", "{{.Name}}:{{.Tag}}").split()
    stale = [name for name in stored if name.startswith(REPOSITORY) and name not in kept]
    if stale:
        _buildah(settings, "rmi", *stale, check=False)
    _buildah(settings, "rm", "--all", check=False)  # what an interrupted build left
    _buildah(settings, "rmi", "--prune", check=False)


def remove(settings: Settings, *tags: str) -> None:
    """Delete images of buildah's store, and the layers that only they had; those that are not there are passed over."""
    _buildah(settings, "rmi", *tags, check=False)
    _buildah(settings, "rmi", "--prune", check=False)


def forget(settings: Settings) -> None:
    """Delete buildah's store."""
    remove_tree(settings.cache / "buildah")


def _import_file(node: NodeSettings, archive: Path) -> None:
    def attempt() -> bool:
        ctr(node, "images", "import", str(archive))
        return True

    poll(f"the import into {node.name}", attempt, timeout=60)


def _buildah_argv(settings: Settings, *words: str) -> list[str]:
    store = settings.cache / "buildah"
    places = [
        "--root",
        str(store),
        "--runroot",
        str(settings.state / "buildah"),
        "--storage-driver",
        "overlay",
    ]
    return [*CONTAINED, "buildah", *places, *words]


def _buildah(settings: Settings, *words: str, check: bool = True) -> str:
    return run(*_buildah_argv(settings, *words), check=check, timeout=3600).stdout


def _visible_files(settings: Settings) -> list[tuple[Path, str]]:
    """(file of this machine, where a build's RUN steps see it)."""
    pairs = []
    lines = []
    if CERTIFICATES.exists():
        pairs.append((CERTIFICATES, str(CERTIFICATES)))
        lines.append(f"cert = {CERTIFICATES}")
    listed = run("python3", "-m", "pip", "config", "list", check=False).stdout
    for line in listed.splitlines():  # global.index-url='https://...' or :env:.index-url='...'
        key, _, value = line.partition("=")
        option = key.rpartition(".")[2]
        if option in PIP_SETTINGS:
            lines.append(f"{option} = {value.strip().strip(chr(39))}")
    configuration = settings.state / "pip.conf"
    configuration.write_text("\n".join(["[global]", *lines, ""]))
    return [*pairs, (configuration, "/etc/pip.conf")]


def pack(archive: Path, tag: str, binary: Path) -> None:
    """A docker-archive of one layer with one file, which is the entry point."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        member = tar.gettarinfo(binary, arcname=binary.name)
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        member.mode = 0o755
        with open(binary, "rb") as file:
            tar.addfile(member, file)
    content = layer.getvalue()
    configuration = json.dumps(
        {
            "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine],
            "os": "linux",
            "config": {"Entrypoint": [f"/{binary.name}"]},  # absolute: there is no PATH to search
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(content).hexdigest()}"]},
        }
    ).encode()
    manifest = json.dumps([{"Config": "config.json", "RepoTags": [tag], "Layers": ["layer.tar"]}]).encode()
    with tarfile.open(archive, "w") as tar:
        for name, data in (
            ("layer.tar", content),
            ("config.json", configuration),
            ("manifest.json", manifest),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
