"""The lock files of the images, and the requirements that they are resolved from."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path

import pytest
from packaging.markers import Environment
from packaging.requirements import Requirement

from image_locks import IMAGES, ImageLock, requirement_name, requirements

ROOT = Path(__file__).parents[1]
PYPROJECT = ROOT / "pyproject.toml"
EACH_IMAGE = pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
_ENTRY = re.compile(
    r"^(?P<requirement>[^\s#-].*?)(?P<hashes>(?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n", re.MULTILINE
)


def text(image: ImageLock) -> str:
    return (ROOT / "images" / f"{image.name}.lock").read_text()


def locked(image: ImageLock) -> list[Requirement]:
    return [Requirement(entry["requirement"]) for entry in _ENTRY.finditer(text(image))]


def installed(image: ImageLock, python: str, machine: str) -> dict[str, str]:
    """Versions by name, as pip would choose them on such a machine."""
    environment: Environment = {
        "implementation_name": "cpython",
        "platform_machine": machine,
        "python_full_version": f"{python}.5",
        "python_version": python,
        "sys_platform": "linux",
    }  # type: ignore[typeddict-item]
    found: dict[str, str] = {}
    for each in locked(image):
        if each.marker is None or each.marker.evaluate(dict(environment)):
            (specifier,) = each.specifier
            assert specifier.operator == "==", each
            assert found.setdefault(each.name, specifier.version) == specifier.version, f"{each.name} twice"
    return found


@EACH_IMAGE
def test_every_line_is_a_version_with_the_hashes_of_its_files(image: ImageLock) -> None:
    rest = _ENTRY.sub("", text(image))
    assert [line for line in rest.splitlines() if not line.startswith("#")] == []
    assert len(locked(image)) > 20


@EACH_IMAGE
def test_a_lock_has_what_the_project_asks_for(image: ImageLock) -> None:
    """With another requirement in pyproject.toml: `make locks`."""
    unmet = {}
    for python, machine in itertools.product(["3.11", "3.12", "3.13"], ["x86_64", "aarch64"]):
        versions = installed(image, python, machine)
        for line in requirements(PYPROJECT, image):
            wanted = Requirement(line)
            version = versions.get(requirement_name(wanted.name))
            if version is None or not wanted.specifier.contains(version, prereleases=True):
                unmet[python, machine, line] = version
    assert unmet == {}, "make locks"


def test_the_supported_pythons_are_those_of_the_tests() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    assert project["requires-python"] == ">=3.11"
    supported = [each.rpartition(" ")[2] for each in project["classifiers"] if each[:-2].endswith(":: 3.")]
    assert supported == ["3.11", "3.12", "3.13"]


def test_every_lock_and_extra_belongs_to_an_image() -> None:
    assert {path.stem for path in (ROOT / "images").glob("*.lock")} == {image.name for image in IMAGES}
    copied = set()
    for path in (ROOT / "images").glob("*.Dockerfile"):
        copied |= set(re.findall(r"([\w-]+)\.lock\b", path.read_text().split("\nFROM ")[-1]))
    assert copied == {image.name for image in IMAGES}


def test_an_image_without_torch_has_nothing_of_it() -> None:
    lean = next(image for image in IMAGES if image.without)
    names = set(installed(lean, "3.13", "x86_64"))
    assert not {each for each in names if re.match(r"(torch|triton|xgrammar|nvidia-|cuda-)", each)}
    full = next(image for image in IMAGES if image.name == "engine")
    assert installed(lean, "3.13", "x86_64").items() <= installed(full, "3.13", "x86_64").items(), (
        "one that mounts torch computes with the versions of one that has it"
    )


def test_requirements_are_for_linux_and_keep_their_markers(tmp_path: Path) -> None:
    pyproject = tmp_path / "pyproject.toml"
    pyproject.write_text(
        "[project]\nrequires-python = '>=3.11'\ndependencies = ['a>=1', \"B_b>=2; python_version < '3.12'\"]\n"
        "optional-dependencies = {x = ['c', 'a>=1'], y = ['d']}\n"
    )
    assert requirements(pyproject, ImageLock("image", ("x",))) == [
        "a>=1; sys_platform == 'linux'",
        "B_b>=2; (python_version < '3.12') and sys_platform == 'linux'",
        "c; sys_platform == 'linux'",
    ]
    assert requirements(pyproject, ImageLock("image", ("x", "y"), frozenset({"b-b", "c"}))) == [
        "a>=1; sys_platform == 'linux'",
        "d; sys_platform == 'linux'",
    ]
