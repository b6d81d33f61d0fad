"""The base of every image built here: Debian with Python, made by debootstrap once and kept as a tar file.

Released images are built on an official Python image; here nothing is pulled from a registry, and the mirror
is the one this machine's apt uses.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from pathlib import Path

from cluster.settings import Settings
from cluster.shell import CONTAINED, ClusterError, find, remove_tree, run, say

SUITE = "bookworm"
PYTHON = (3, 11)
"""The suite's Python: packages given to pods from outside must be of this version."""
INCLUDE = ("ca-certificates", "python3", "python3-pip", "python3-venv")
NEEDLESS = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/info",
    "var/lib/apt/lists",
    "var/cache/apt",
)
VERSION = 1
"""Raise it when this file changes what the tar holds."""


def key() -> str:
    return hashlib.sha256(repr((SUITE, INCLUDE, NEEDLESS, VERSION)).encode()).hexdigest()[:12]


def ensure_rootfs(settings: Settings) -> Path:
    """The tar file of the base's root file system, made when missing (about a minute)."""
    target = settings.cache / f"base-{SUITE}-{key()}.tar"
    if target.exists():
        return target
    mirror = _mirror()
    say(f"making the base image: Debian {SUITE} with Python from {mirror} (once)")
    started = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="base-", dir=settings.cache))
    try:
        root = work / "root"
        run(
            *(*CONTAINED, "debootstrap", "--variant=minbase", f"--include={','.join(INCLUDE)}"),
            *(SUITE, root, mirror),
            env=_proxies(),
            timeout=3600,
        )
        for folder in NEEDLESS:
            run("rm", "-rf", root / folder)
        run("mkdir", "-p", root / "var/lib/apt/lists/partial", root / "var/cache/apt/archives/partial")
        partial = work / "rootfs.tar"
        run("tar", "--numeric-owner", "--exclude=./dev/*", "-C", root, "-cf", partial, ".", timeout=600)
        partial.rename(target)
    finally:
        remove_tree(work)
    say(f"made the base image in {time.monotonic() - started:.0f} s ({target.stat().st_size >> 20} MiB)")
    return target


def _mirror() -> str:
    """The mirror from which apt of this machine gets the suite. Raises ClusterError when it has no source for it."""
    if find("apt-get"):
        words = "$(REPO_URI) $(CODENAME) $(RELEASE) $(COMPONENT)"
        targets = run(
            "apt-get", "indextargets", "--format", words, "Created-By: Packages", check=False
        ).stdout
        for line in targets.splitlines():
            uri, *rest = line.split()
            if SUITE in rest and "main" in rest:
                return uri
    raise ClusterError(f"apt has no source for Debian {SUITE} main: run `apt-get update`, or add one")


def _proxies() -> dict[str, str]:
    """apt's proxy, which debootstrap's downloader does not know about."""
    if not find("apt-config"):
        return {}
    found = {}
    for scheme in ("http", "https"):
        text = run("apt-config", "shell", "PROXY", f"Acquire::{scheme}::Proxy", check=False).stdout
        value = text.partition("=")[2].strip().strip("'")
        if value and f"{scheme}_proxy" not in os.environ:
            found[f"{scheme}_proxy"] = value
    return found
