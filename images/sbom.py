"""Write what an image has installed as a software bill of materials: CycloneDX 1.6, JSON.

    python sbom.py FILE

Lists the Python interpreter, the distributions that it imports, and Debian's packages. Runs while an image is built,
with the standard library of whatever Python the base has. Invariant: the same installation gives the same bytes, so
that an unchanged layer stays unchanged; the document has no time, and its serial number is a hash of what it lists.
"""

from __future__ import annotations

import json
import platform
import re
import sys
import uuid
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT_DISTRIBUTION = "argosy"
_NAMESPACE = uuid.UUID("8f0b2a4e-6f0c-5a1d-9c57-2f6f1f0e7a10")
"""Of the serial numbers (RFC 9562, version 5)."""


def bill_of_materials(
    distributions: list[metadata.Distribution], dpkg_status: str, os_release: str
) -> dict[str, Any]:
    """The CycloneDX document of an installation.

    Args:
        distributions: installed Python distributions, `argosy` among them, which the document is about.
        dpkg_status: the text of /var/lib/dpkg/status; empty where the base is no Debian.
        os_release: the text of /etc/os-release.

    Raises:
        ValueError: `argosy` is not among the distributions.
    """
    chosen = {_normal(each.metadata["Name"]): each for each in reversed(distributions)}
    if ROOT_DISTRIBUTION not in chosen:
        raise ValueError(f"{ROOT_DISTRIBUTION} is not installed: run this with the Python of the image")
    parts = {name: _distribution(name, each) for name, each in sorted(chosen.items())}
    subject = parts.pop(ROOT_DISTRIBUTION) | {"type": "application"}
    components = [*parts.values(), _interpreter(), *_debian_packages(dpkg_status, os_release)]
    references = {name: _purl(name, each.version) for name, each in chosen.items()}
    dependencies = [
        {
            "ref": references[name],
            "dependsOn": sorted(references[each] for each in _required(chosen[name]) & chosen.keys()),
        }
        for name in sorted(chosen)
    ]
    content = {"metadata": {"component": subject}, "components": components, "dependencies": dependencies}
    serial = uuid.uuid5(_NAMESPACE, json.dumps(content, sort_keys=True))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        **content,
    }


def _distribution(name: str, distribution: metadata.Distribution) -> dict[str, Any]:
    purl = _purl(name, distribution.version)
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": distribution.version,
        "purl": purl,
    }
    if licenses := _licenses(distribution.metadata):
        component["licenses"] = licenses
    return component


def _licenses(fields: metadata.PackageMetadata) -> list[dict[str, Any]]:
    """SPDX expression (PEP 639), or the names of the classifiers; CycloneDX takes one expression or several names."""
    if "License-Expression" in fields:
        return [{"expression": fields["License-Expression"]}]
    classifiers = fields.get_all("Classifier") or []
    names = {each.rpartition(" :: ")[2] for each in classifiers if each.startswith("License :: ")}
    return [{"license": {"name": name}} for name in sorted(names)]


def _required(distribution: metadata.Distribution) -> set[str]:
    """Normalised names of what a distribution names as required, that of extras and other platforms included."""
    return {_normal(re.split(r"[^\w.-]", each, maxsplit=1)[0]) for each in distribution.requires or []}


def _interpreter() -> dict[str, Any]:
    version = platform.python_version()
    purl = f"pkg:generic/python@{version}"
    cpe = f"cpe:2.3:a:python:python:{version}:*:*:*:*:*:*:*"
    return {
        "type": "platform",
        "bom-ref": purl,
        "name": "python",
        "version": version,
        "purl": purl,
        "cpe": cpe,
    }


def _debian_packages(dpkg_status: str, os_release: str) -> Iterator[dict[str, Any]]:
    system = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', os_release, re.MULTILINE))
    vendor = system.get("ID", "debian")
    release = quote(f"{vendor}-{system.get('VERSION_ID', '')}".rstrip("-"))
    for paragraph in sorted(dpkg_status.split("\n\n")):
        fields = dict(re.findall(r"^([\w-]+): *(.*)$", paragraph, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            name, version, architecture = (fields[key] for key in ("Package", "Version", "Architecture"))
            purl = f"pkg:deb/{vendor}/{quote(name)}@{quote(version, safe='')}?arch={architecture}&distro={release}"
            yield {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def _purl(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{quote(version, safe='')}"


def _normal(name: str) -> str:
    """The name as PyPI compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _text(path: str) -> str:
    file = Path(path)
    return file.read_text(errors="replace") if file.is_file() else ""


def main(target: Path) -> None:
    document = bill_of_materials(
        list(metadata.distributions()), _text("/var/lib/dpkg/status"), _text("/etc/os-release")
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(document, indent=1) + "\n")
    target.chmod(0o644)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
