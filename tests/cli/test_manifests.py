"""Valid manifests that ask for what one machine cannot do."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from argosy.errors import UsageError
from argosy.local.manifests import read_services


def manifest(name: str = "tiny", **spec: object) -> str:
    return yaml.safe_dump(
        {
            "apiVersion": "inference.argosy.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": name},
            "spec": {"model": {"source": "builtin://tiny"}, **spec},
        }
    )


def read(tmp_path: Path, text: str, gpus: int = 0) -> list[str]:
    file = tmp_path / "fleet.yaml"
    file.write_text(text, encoding="utf-8")
    return [service.key for service in read_services([str(file)], gpus=gpus)]


def test_several_documents_are_one_fleet(tmp_path: Path) -> None:
    assert read(tmp_path, manifest("a") + "---\n" + manifest("b")) == ["default/a", "default/b"]


SECRET = "apiVersion: v1\nkind: Secret\nmetadata: {name: token}\n"
DEPLOYMENT = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\nspec: {replicas: -1}\n"


def indented(*texts: str) -> str:
    """The objects as the items of a `List`."""
    return yaml.safe_dump(
        {"apiVersion": "v1", "kind": "List", "items": [yaml.safe_load(text) for text in texts]}
    )


@pytest.mark.parametrize(
    "text",
    [
        "---\n".join((SECRET, manifest("a"), DEPLOYMENT)),
        indented(SECRET, manifest("a"), DEPLOYMENT),
    ],
)
def test_other_kinds_are_skipped_and_named(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read(tmp_path, text) == ["default/a"]
    assert capsys.readouterr().err == (
        'skipped, as a local fleet has InferenceServices only: Secret "token", Deployment "web"\n'
    )


def test_many_other_kinds_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert read(tmp_path, "---\n".join([manifest("a"), *[SECRET] * 13])) == ["default/a"]
    assert capsys.readouterr().err.endswith('Secret "token" and 3 more\n')


@pytest.mark.parametrize(
    ("text", "message", "details"),
    [
        ("", "no InferenceService in it", ""),
        (SECRET, 'no InferenceService in it, but Secret "token"', ""),
        (
            manifest().replace("inference.argosy.dev/v1alpha1", "serving.kserve.io/v1beta1"),
            'InferenceService "tiny" is not valid',
            'apiVersion: Unsupported value: "serving.kserve.io/v1beta1"',
        ),
        (
            manifest().replace("InferenceService", "InferenceServise"),
            "is not valid",
            'kind: Unsupported value: "InferenceServise"',
        ),
        (SECRET + "---\nspec: {}\n", "is not valid", "kind: Required value"),
        ("kind: List\nitems: 5\n", "is not valid", "items in body must be of type array"),
        ("a: [", "is not valid; nothing was changed", "not valid YAML"),
        (manifest(replicas=-1), 'InferenceService "tiny" is not valid', "spec.replicas: Invalid value: -1"),
        (manifest(replica=2), 'InferenceService "tiny" is not valid', "did you mean 'replicas'?"),
        (manifest(model={"source": "pvc://weights/m"}), "needs a cluster; on this machine use file:///", ""),
        (manifest(model={"source": "file:///nonexistent"}), "/nonexistent is not a directory", ""),
        (manifest(resources={"gpu": {"count": 2}}), "is not valid", "a replica runs on one GPU today"),
        (
            manifest("a") + "---\n" + manifest("b", model={"source": "builtin://tiny", "servedName": "a"}),
            "default/a and default/b both claim the model name 'a'; change servedName",
            "",
        ),
    ],
)
def test_refusals_name_the_remedy(tmp_path: Path, text: str, message: str, details: str) -> None:
    with pytest.raises(UsageError) as refusal:
        read(tmp_path, text, gpus=1)
    assert message in str(refusal.value)
    assert details in refusal.value.details


def test_a_replica_needs_its_gpu_on_this_machine(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs 1 GPU, this machine has 0; lower"):
        read(tmp_path, manifest(resources={"gpu": {}}), gpus=0)


def test_a_service_and_its_canary_may_serve_one_name(tmp_path: Path) -> None:
    same = {"source": "builtin://tiny", "servedName": "chat"}
    stable = manifest("stable", model=same, router={"canary": {"service": "next", "weight": 10}})
    assert read(tmp_path, stable + "---\n" + manifest("next", model=same)) == [
        "default/stable",
        "default/next",
    ]


def test_one_service_in_two_files_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(manifest(), encoding="utf-8")
    with pytest.raises(UsageError, match="default/tiny is given twice"):
        read_services([str(file), str(file)], gpus=0)
