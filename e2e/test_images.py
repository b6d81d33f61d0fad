"""What the images consist of: labels, a list of what is installed, layers that a change of the code leaves alone."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from cluster import images
from conftest import Stack
from image_context import ROOT, label_arguments

LABEL = "org.opencontainers.image."


@pytest.fixture
def built_here(stack: Stack) -> Stack:
    if stack.cluster.external:
        pytest.skip("the images of an external cluster are not built here")
    return stack


@pytest.mark.parametrize("name", ["engine", "router", "operator"])
def test_an_image_lists_what_it_has_installed(built_here: Stack, name: str) -> None:
    settings, tag = built_here.cluster.settings, built_here.images[name]
    document = json.loads(images.run_inside(settings, tag, "cat", "/usr/share/sbom/argosy.cdx.json"))
    assert document["metadata"]["component"]["name"] == "argosy"
    purls = {each["purl"].partition("?")[0] for each in document["components"]}
    listed = images.run_inside(settings, tag, "/opt/venv/bin/pip", "list", "--format=json")
    for each in json.loads(listed):
        plain = re.sub(r"[-_.]+", "-", each["name"]).lower()
        assert plain == "argosy" or f"pkg:pypi/{plain}@{each['version']}" in purls
    assert any(purl.startswith("pkg:deb/debian/libc6@") for purl in purls)
    locked = (ROOT / "images" / f"{'engine-without-torch' if name == 'engine' else name}.lock").read_text()
    for purl in purls:
        if purl.startswith("pkg:pypi/") and not purl.startswith(("pkg:pypi/pip@", "pkg:pypi/setuptools@")):
            version = purl.removeprefix("pkg:pypi/").replace("@", "==")
            assert f"\n{version} " in locked, f"{version} is in no lock"


def test_a_change_of_the_code_leaves_the_layers_of_dependencies(built_here: Stack, tmp_path: Path) -> None:
    settings = built_here.cluster.settings
    context = tmp_path / "context"
    shutil.copytree(ROOT / "dist" / "images", context)
    (wheel,) = context.glob("argosy-*.whl")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("argosy_protocol/another_module.py", "")
    arguments = {**label_arguments(), "VERSION": "9.9.9"}
    before = images.inspect(settings, built_here.images["operator"])
    tag = images.build(settings, context / "operator.Dockerfile", context, "operator-changed", arguments)
    try:
        after = images.inspect(settings, tag)
    finally:
        images.remove(settings, tag)

    layers_before, layers_after = (each["OCIv1"]["rootfs"]["diff_ids"] for each in (before, after))
    same = [one for one, other in zip(layers_before, layers_after, strict=True) if one == other]
    installation = [step for step in steps(after) if "--require-hashes" in step]
    assert len(installation) == 1
    assert layers_after[steps(after).index(installation[0])] in same
    assert layers_before != layers_after

    labels = after["OCIv1"]["config"]["Labels"]
    assert labels[f"{LABEL}title"] == "argosy-operator"
    assert labels[f"{LABEL}version"] == "9.9.9"
    assert labels[f"{LABEL}licenses"] == "Apache-2.0"
    assert labels[f"{LABEL}revision"] == arguments["REVISION"]
    assert labels[f"{LABEL}created"] == arguments["CREATED"]
    assert labels[f"{LABEL}base.name"] == images.ensure_base(settings)


def steps(inspected: dict[str, Any]) -> list[str]:
    """The build's steps that made a layer, as many as the image has layers."""
    history = inspected["OCIv1"]["history"]
    made = [each.get("created_by", "") for each in history if not each.get("empty_layer")]
    assert len(made) == len(inspected["OCIv1"]["rootfs"]["diff_ids"])
    return made
