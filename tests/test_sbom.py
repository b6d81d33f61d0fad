"""The bill of materials that an image carries."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

import sbom

STATUS = """\
Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u10
Description: GNU C Library
 more about it

Package: gone
Status: deinstall ok config-files
Architecture: all
Version: 1

Package: libstdc++6
Status: install ok installed
Architecture: amd64
Version: 1:12.2.0-14
"""
RELEASE = 'NAME="Debian"\nID=debian\nVERSION_ID="12"\n'


def distribution(folder: Path, name: str, version: str, *fields: str) -> metadata.Distribution:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "\n".join(["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", *fields, ""])
    )
    return metadata.Distribution.at(info)


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    return sbom.bill_of_materials(
        [
            distribution(tmp_path, "Some_Thing", "2.0+cpu", "License-Expression: MIT OR Apache-2.0"),
            distribution(
                tmp_path, "argosy", "0.1.0", "License-Expression: Apache-2.0", "Requires-Dist: some.thing>=1",
                "Requires-Dist: other[x]; extra == 'more'", "Requires-Dist: absent>=3",
            ),
            distribution(tmp_path, "other", "1", "Classifier: License :: OSI Approved :: BSD License"),
            distribution(tmp_path, "silent", "3"),
        ],
        STATUS,
        RELEASE,
    )  # fmt: skip


def errors(document: dict[str, Any]) -> object:
    return JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(document))


def test_it_satisfies_the_schema_of_cyclonedx(document: dict[str, Any]) -> None:
    assert errors(document) is None
    assert errors({**document, "components": [{"name": "no type"}]}) is not None


def test_it_lists_distributions_python_and_debians_packages(document: dict[str, Any]) -> None:
    python = platform.python_version()
    assert document["metadata"]["component"]["purl"] == "pkg:pypi/argosy@0.1.0"
    assert [each["purl"] for each in document["components"]] == [
        "pkg:pypi/other@1",
        "pkg:pypi/silent@3",
        "pkg:pypi/some-thing@2.0%2Bcpu",
        f"pkg:generic/python@{python}",
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u10?arch=amd64&distro=debian-12",
        "pkg:deb/debian/libstdc%2B%2B6@1%3A12.2.0-14?arch=amd64&distro=debian-12",
    ]


def test_it_has_licenses_as_they_are_declared(document: dict[str, Any]) -> None:
    licenses = {each["name"]: each.get("licenses") for each in document["components"][:3]}
    assert licenses == {
        "other": [{"license": {"name": "BSD License"}}],
        "silent": None,
        "some-thing": [{"expression": "MIT OR Apache-2.0"}],
    }


def test_it_has_the_dependencies_that_are_installed(document: dict[str, Any]) -> None:
    graph = {each["ref"]: each["dependsOn"] for each in document["dependencies"]}
    assert graph["pkg:pypi/argosy@0.1.0"] == ["pkg:pypi/other@1", "pkg:pypi/some-thing@2.0%2Bcpu"]
    assert graph["pkg:pypi/silent@3"] == []


def test_another_version_has_another_serial_number(document: dict[str, Any], tmp_path: Path) -> None:
    def serial(version: str) -> str:
        folder = tmp_path / version
        folder.mkdir()
        found = sbom.bill_of_materials([distribution(folder, "argosy", version)], "", "")
        return str(found["serialNumber"])

    (tmp_path / "again").mkdir()
    again = sbom.bill_of_materials([distribution(tmp_path / "again", "argosy", "1.0")], "", "")
    assert serial("1.0") == again["serialNumber"]
    assert serial("1.0.1") != again["serialNumber"]


def test_this_environment_has_a_valid_one(tmp_path: Path) -> None:
    target = tmp_path / "share" / "argosy.cdx.json"
    sbom.main(target)
    document = json.loads(target.read_text())
    assert errors(document) is None
    assert "pytest" in [each["name"] for each in document["components"]]


def test_without_argosy_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="argosy is not installed"):
        sbom.bill_of_materials([distribution(tmp_path, "other", "1")], "", "")
