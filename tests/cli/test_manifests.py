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
    ("spec", "fields"),
    [
        ({}, ""),
        (
            {"engine": {"image": "x", "upgradePolicy": "Automatic"}},
            "spec.engine.image, spec.engine.upgradePolicy",
        ),
        ({"resources": {"cpu": 4, "memory": "1Gi"}}, "spec.resources.cpu, spec.resources.memory"),
        ({"resources": {"gpu": {}}}, ""),
        (
            {"resources": {"gpu": {"resourceName": "nvidia.com/mig-1g.10gb"}}},
            "spec.resources.gpu.resourceName",
        ),
        (
            {"placement": {"nodeSelector": {"a": "b"}, "tolerations": [{}], "priorityClassName": "p"}},
            "spec.placement.nodeSelector, spec.placement.tolerations, spec.placement.priorityClassName",
        ),
        (
            {
                "resources": {
                    "cpuLimit": 4,
                    "sharedMemory": "1Gi",
                    "claims": [{"name": "gpu", "resourceClaimName": "one"}],
                }
            },
            "spec.resources.cpuLimit, spec.resources.sharedMemory, spec.resources.claims",
        ),
        (
            {
                "placement": {
                    "affinity": {"podAntiAffinity": {}},
                    "topologySpreadConstraints": [{"topologyKey": "zone"}],
                    "runtimeClassName": "nvidia",
                    "schedulerName": "gang",
                    "serviceAccountName": "models",
                }
            },
            "spec.placement.affinity, spec.placement.topologySpreadConstraints, spec.placement.runtimeClassName, "
            "spec.placement.schedulerName, spec.placement.serviceAccountName",
        ),
        ({"rollout": {"maxSurge": 2, "maxUnavailable": 1, "drainSeconds": 5}}, ""),
        ({"podDisruptionBudget": {"maxUnavailable": "10%"}}, ""),
        ({"podDisruptionBudget": {"maxUnavailable": 2}}, "spec.podDisruptionBudget.maxUnavailable"),
        (
            {"rollout": {"drainSeconds": 6, "progressDeadlineSeconds": 60}},
            "spec.rollout.drainSeconds, spec.rollout.progressDeadlineSeconds",
        ),
        (
            {"podTemplate": {"metadata": {"labels": {"a": "b"}, "annotations": {"a": "b"}}}},
            "spec.podTemplate.metadata.labels, spec.podTemplate.metadata.annotations",
        ),
        (
            {
                "podTemplate": {
                    "spec": {
                        "imagePullSecrets": [{"name": "a"}],
                        "volumes": [{"name": "a", "emptyDir": {}}],
                        "containers": [
                            {
                                "name": "engine",
                                "env": [
                                    {
                                        "name": "A",
                                        "valueFrom": {
                                            "secretKeyRef": {"name": "a", "key": "b", "optional": True}
                                        },
                                    }
                                ],
                            }
                        ],
                    }
                }
            },
            "spec.podTemplate.spec.volumes, spec.podTemplate.spec.imagePullSecrets",
        ),
        (
            {
                "replicas": 2,
                "engine": {"threads": 1, "env": [{"name": "A", "value": "b"}], "shutdownTimeoutSeconds": 1},
                "router": {"policy": "least-load", "limits": {"maxQueuedRequests": 5}},
                "podTemplate": {
                    "spec": {"containers": [{"name": "engine", "env": [{"name": "A", "value": "b"}]}]}
                },
            },
            "",
        ),
    ],
    ids=str,
)
def test_fields_for_clusters_are_named_in_one_line(
    tmp_path: Path, spec: dict[str, object], fields: str, capsys: pytest.CaptureFixture[str]
) -> None:
    read(tmp_path, manifest(**spec), gpus=1)
    line = f"default/tiny: without effect on this machine: {fields}\n"
    assert capsys.readouterr().err == (line if fields else "")


@pytest.mark.parametrize(
    ("container", "details"),
    [
        (
            {"volumeMounts": [{"name": "a", "mountPath": "/data"}]},
            ["volumeMounts: a at /data", "name a path of this machine"],
        ),
        (
            {"env": [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "b"}}}]},
            ["TOKEN comes from the Secret 'hub'", "`optional: true`"],
        ),
        (
            {"env": [{"name": "LEVEL", "valueFrom": {"configMapKeyRef": {"name": "logs", "key": "b"}}}]},
            ["LEVEL comes from the ConfigMap 'logs'"],
        ),
    ],
    ids=["a volume", "a Secret", "a ConfigMap"],
)
def test_what_an_engine_would_miss_is_refused(
    tmp_path: Path, container: dict[str, object], details: list[str]
) -> None:
    volumes = [{"name": "a", "emptyDir": {}}]
    template = {"spec": {"volumes": volumes, "containers": [{"name": "engine", **container}]}}
    with pytest.raises(UsageError, match="default/tiny: its engines would miss") as refusal:
        read(tmp_path, manifest(podTemplate=template), gpus=1)
    assert all(each in refusal.value.details for each in details)


@pytest.mark.parametrize(
    ("spec", "details"),
    [
        (
            {"model": {"source": "hf://acme/tiny", "secretRef": {"name": "hub"}}},
            ["spec.model.secretRef", "no Secret 'hub'", "HF_TOKEN, in the environment of `argosy up`"],
        ),
        (
            {"placement": {"serviceAccountName": "models", "automountServiceAccountToken": True}},
            ["spec.placement.automountServiceAccountToken", "leave it out here"],
        ),
    ],
    ids=["the credentials of a model", "an account's token"],
)
def test_credentials_of_a_cluster_are_refused(
    tmp_path: Path, spec: dict[str, object], details: list[str]
) -> None:
    with pytest.raises(UsageError, match="what only a cluster has; nothing was changed") as refusal:
        read(tmp_path, manifest(**spec), gpus=1)
    assert all(each in refusal.value.details for each in details)


def test_a_limit_of_the_cpu_below_its_request_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refusal:
        read(tmp_path, manifest(resources={"cpu": 2, "cpuLimit": "1500m"}), gpus=1)
    assert "spec.resources.cpuLimit: Invalid value: must be at least as much as cpu" in refusal.value.details


def test_names_of_another_namespace_are_refused(tmp_path: Path) -> None:
    thief = manifest("b", model={"source": "builtin://tiny", "aliases": ["default/new"]})
    elsewhere = thief.replace("metadata:", "metadata:\n  namespace: team-b", 1)
    with pytest.raises(
        UsageError, match="team-b/b: the model name 'default/new' is a name of namespace default"
    ):
        read(tmp_path, manifest("a") + "---\n" + elsewhere, gpus=1)
    assert len(read(tmp_path, elsewhere, gpus=1)) == 1


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
        (
            manifest(resources={"gpu": {"count": 2}}),
            "is not valid",
            "must be 1, the number of devices in spec.parallelism (tensor * pipeline * data), not 2",
        ),
        (
            manifest(engine={"args": ["--max-logprobs=-2", "--seed=1"]}),
            "default/tiny: spec.engine.args: --max-logprobs must be a whole number at least -1",
            "",
        ),
        (
            manifest(engine={"type": "vllm"}, model={"source": "hf://org/name"}),
            "spec.engine.type vllm needs a cluster; on this machine start the engine yourself",
            "",
        ),
        (
            manifest(parallelism={"tensor": 2, "nodes": 2}),
            "spec.parallelism.nodes needs a cluster; on this machine set it to 1",
            "",
        ),
        (
            manifest(engine={"args": ["--max-logprob=2"]}),
            "is not valid",
            "unknown flag --max-logprob; did you mean --max-logprobs?",
        ),
        (
            manifest("a") + "---\n" + manifest("b", model={"source": "builtin://tiny", "servedName": "a"}),
            "default/b: the model name 'a' belongs to default/a, which is as old and comes first by "
            "name; change servedName",
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
    with pytest.raises(UsageError, match="needs 4 GPUs, this machine has 3; lower"):
        read(tmp_path, manifest(resources={"gpu": {}}, parallelism={"tensor": 4}), gpus=3)


def test_devices_of_a_claim_need_a_cluster(tmp_path: Path) -> None:
    claims = [{"name": "gpu", "resourceClaimTemplateName": "h200"}]
    with pytest.raises(UsageError, match=r"needs a cluster; on this machine set spec\.resources\.gpu"):
        read(tmp_path, manifest(engine={"device": "cuda"}, resources={"claims": claims}), gpus=1)


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
