"""Desired children as tables: what each field of the spec changes in the objects."""

from __future__ import annotations

import base64
import copy
import dataclasses
from typing import Any

import msgspec
import pytest
from builders import CONFIG, isvc, pod

from argosy_operator.desired.children import Plan, plan_children
from argosy_operator.desired.rollout import blocked_surge
from argosy_operator.names import REQUESTS_ANNOTATION, REVISION_LABEL, ROUTABLE_GATE
from argosy_operator.observation import Observation
from argosy_operator.pod import Pod
from argosy_protocol.headers import internal_key
from argosy_resource.engine_command import SERVICE_LABEL, engine_args, engine_env
from argosy_resource.types import InferenceService

NOTHING = Observation()


def plan(**spec: Any) -> Plan:
    return plan_children(isvc(**spec), NOTHING, CONFIG)


def container(made: Plan) -> dict[str, Any]:
    (only,) = made.deployment["spec"]["template"]["spec"]["containers"]
    return only


def pod_spec(made: Plan) -> dict[str, Any]:
    return made.deployment["spec"]["template"]["spec"]


SERVE = ["serve", "builtin://tiny", "--host", "0.0.0.0", "--port", "8000", "--served-model-name", "tiny",
         "--any-model-name"]  # fmt: skip
SHUTDOWN = ["--shutdown-timeout", "45"]


@pytest.mark.parametrize(
    ("spec", "args"),
    [
        ({}, [*SERVE, *SHUTDOWN]),
        (
            {"model": {"source": "builtin://tiny", "servedName": "org/Tiny", "aliases": ["a", "b"]}},
            [*SERVE, *SHUTDOWN],
        ),
        ({"model": {"source": "pvc://claim/dir/x/"}}, ["serve", "/model/dir/x", *SERVE[2:], *SHUTDOWN]),
        ({"model": {"source": "pvc://claim"}}, ["serve", "/model", *SERVE[2:], *SHUTDOWN]),
        ({"model": {"source": "file:///opt/x"}}, ["serve", "/opt/x", *SERVE[2:], *SHUTDOWN]),
        (
            {
                "engine": {
                    "device": "cpu",
                    "dtype": "float32",
                    "maxModelLen": 4096,
                    "maxNumSeqs": 8,
                    "maxNumBatchedTokens": 512,
                    "blockSize": 16,
                    "kvCacheMemory": "64Mi",
                    "threads": 1,
                    "enablePrefixCaching": False,
                    "shutdownTimeoutSeconds": 5,
                }
            },
            [
                *SERVE,
                *("--device", "cpu", "--dtype", "float32", "--max-model-len", "4096", "--max-num-seqs", "8"),
                *("--max-num-batched-tokens", "512", "--block-size", "16"),
                *("--kv-cache-memory-bytes", str(64 * 2**20), "--threads", "1"),
                *("--shutdown-timeout", "5", "--no-enable-prefix-caching"),
            ],
        ),
        (
            {"engine": {"gpuMemoryUtilization": 0.85}},
            [*SERVE, "--gpu-memory-utilization", "0.85", *SHUTDOWN],
        ),
        (
            {"parallelism": {"tensor": 2, "pipeline": 3, "data": 4, "expert": True}},
            [
                *SERVE,
                *(
                    "--tensor-parallel-size",
                    "2",
                    "--pipeline-parallel-size",
                    "3",
                    "--data-parallel-size",
                    "4",
                ),
                *(*SHUTDOWN, "--enable-expert-parallel"),
            ],
        ),
    ],
)
def test_engine_args(spec: dict[str, Any], args: list[str]) -> None:
    service = isvc(**spec)
    assert engine_args(service) == args
    assert container(plan_children(service, NOTHING, CONFIG))["args"] == args


def test_engine_args_of_the_local_fleet() -> None:
    assert engine_args(isvc(), host="127.0.0.1", port=9001)[2:6] == ["--host", "127.0.0.1", "--port", "9001"]


def test_env_is_merged_by_name_and_the_operators_comes_first() -> None:
    overlay = {
        "name": "engine",
        "env": [
            {"name": "B", "value": "2"},
            {"name": "C", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        ],
    }
    spec = {
        "engine": {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "1"}]},
        "podTemplate": {"spec": {"containers": [overlay]}},
    }
    env = container(plan(**spec))["env"]
    own = ["ARGOSY_API_KEY", "HOME", "POD_NAME", "ARGOSY_INTERNAL_KEYS_FILE", "ARGOSY_WARM_UP_FROM"]
    assert [each["name"] for each in env] == [*own, "A", "B", "C"]
    assert env[0]["valueFrom"] == {"secretKeyRef": {"name": "tiny-engine-key", "key": "ARGOSY_API_KEY"}}
    assert env[6] == {"name": "B", "value": "2"}
    assert env[7] == {"name": "C", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    assert engine_env(isvc(**spec)) == {"A": "1", "B": "2"}


def test_pod_is_restricted() -> None:
    made = plan()
    spec, only = pod_spec(made), container(made)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == 10001
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    security = only["securityContext"]
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["readOnlyRootFilesystem"] is True
    assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName", "initContainers"} & spec.keys()
    mounts = {mount["mountPath"]: mount["name"] for mount in only["volumeMounts"]}
    kinds = {volume["name"]: next(key for key in volume if key != "name") for volume in spec["volumes"]}
    assert {path: kinds[name] for path, name in mounts.items()} == {
        "/tmp": "emptyDir",
        "/home/argosy": "emptyDir",
        "/dev/shm": "emptyDir",
        "/etc/argosy-key": "secret",
    }


def test_overlay_is_added_and_takes_nothing_away() -> None:
    made = plan(
        podTemplate={
            "metadata": {"labels": {"team": "search"}, "annotations": {"a": "b"}},
            "spec": {
                "volumes": [
                    {"name": "site", "persistentVolumeClaim": {"claimName": "site", "readOnly": True}}
                ],
                "containers": [
                    {
                        "name": "engine",
                        "volumeMounts": [{"name": "site", "mountPath": "/site", "readOnly": True}],
                    }
                ],
            },
        }
    )
    template = made.deployment["spec"]["template"]
    assert template["metadata"]["labels"]["team"] == "search"
    assert template["metadata"]["labels"][SERVICE_LABEL] == "tiny"
    assert template["metadata"]["annotations"]["a"] == "b"
    claim = {"claimName": "site", "readOnly": True}
    assert pod_spec(made)["volumes"][-1] == {"name": "site", "persistentVolumeClaim": claim}
    assert container(made)["volumeMounts"][-1] == {"name": "site", "mountPath": "/site", "readOnly": True}
    assert len(container(made)["volumeMounts"]) == 5


def test_model_on_a_claim_is_mounted_read_only() -> None:
    made = plan(model={"source": "pvc://models/qwen"})
    claim = {"claimName": "models", "readOnly": True}
    assert {"name": "argosy-model", "persistentVolumeClaim": claim} in pod_spec(made)["volumes"]
    mount = {"name": "argosy-model", "mountPath": "/model", "readOnly": True}
    assert mount in container(made)["volumeMounts"]


def test_gate_probes_and_drain() -> None:
    made = plan(rollout={"drainSeconds": 7}, engine={"shutdownTimeoutSeconds": 30})
    assert pod_spec(made)["readinessGates"] == [{"conditionType": ROUTABLE_GATE}]
    assert pod_spec(made)["terminationGracePeriodSeconds"] == 7 + 30 + 15
    only = container(made)
    assert only["lifecycle"] == {"preStop": {"sleep": {"seconds": 7}}}
    paths = {
        name: only[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert paths == {"startupProbe": "/ready?wait=3", "readinessProbe": "/ready", "livenessProbe": "/health"}
    # An engine whose load stalls ends itself; a limit of the kubelet would end one that advances.
    startup = only["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 7 * 24 * 3600
    assert "lifecycle" not in container(plan(rollout={"drainSeconds": 0}))


@pytest.mark.parametrize(
    ("resources", "rendered"),
    [
        ({}, {}),
        (
            {"gpu": {}},
            {
                "requests": {"cpu": "2", "memory": "7168Mi", "nvidia.com/gpu": "1"},
                "limits": {"nvidia.com/gpu": "1"},
            },
        ),
        (
            {"gpu": {}, "cpuLimit": "1500m", "sharedMemory": "16Gi"},
            {
                "requests": {"cpu": "1500m", "memory": "22528Mi", "nvidia.com/gpu": "1"},
                "limits": {"cpu": "1500m", "nvidia.com/gpu": "1"},
            },
        ),
        (
            {"gpu": {}, "cpuLimit": 3, "memory": "1Gi", "sharedMemory": 1},
            {
                "requests": {"cpu": "2", "memory": "1Gi", "nvidia.com/gpu": "1"},
                "limits": {"cpu": "3", "memory": "1Gi", "nvidia.com/gpu": "1"},
            },
        ),
        (
            {"gpu": {}, "cpu": "100m"},
            {
                "requests": {"cpu": "100m", "memory": "11264Mi", "nvidia.com/gpu": "2"},
                "limits": {"nvidia.com/gpu": "2"},
            },
        ),
        (
            {"claims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]},
            {"requests": {"cpu": "2", "memory": "7168Mi"}, "claims": [{"name": "gpu"}]},
        ),
        (
            {"gpu": {"resourceName": "amd.com/gpu"}, "cpu": "500m", "memory": "1Gi"},
            {
                "requests": {"cpu": "500m", "memory": "1Gi", "amd.com/gpu": "2"},
                "limits": {"memory": "1Gi", "amd.com/gpu": "2"},
            },
        ),
    ],
)
def test_resources(resources: dict[str, Any], rendered: dict[str, Any]) -> None:
    parallelism = {"tensor": 2} if "cpu" in resources else {}
    assert container(plan(resources=resources, parallelism=parallelism))["resources"] == rendered


@pytest.mark.parametrize(
    ("parallelism", "cpu", "memory"),
    [
        ({"tensor": 8}, "9", f"{(2 + 8 * 4 + 1) * 1024}Mi"),
        ({"tensor": 8, "nodes": 2}, "5", f"{(2 + 4 * 4 + 1) * 1024}Mi"),
    ],
)
def test_each_gpu_of_a_pod_has_a_cpu_and_host_memory(
    parallelism: dict[str, int], cpu: str, memory: str
) -> None:
    made = plan(resources={"gpu": {}}, parallelism=parallelism, model={"source": "hf://org/model"})
    requests = container(made)["resources"]["requests"]
    assert (requests["cpu"], requests["memory"]) == (cpu, memory)
    (fetch,) = pod_spec(made)["initContainers"]
    assert fetch["resources"] == {}


def test_claims_of_a_service_on_cpus_are_no_gpus() -> None:
    claims = [{"name": "disk", "resourceClaimTemplateName": "disk"}]
    made = plan(resources={"claims": claims}, engine={"device": "cpu"})
    assert container(made)["resources"] == {"claims": [{"name": "disk"}]}


def test_requests_come_with_the_next_image_or_edit() -> None:
    before = plan(resources={"gpu": {}})
    live = copy.deepcopy(before.deployment)
    del live["metadata"]["annotations"][REQUESTS_ANNOTATION]
    kept = plan_children(isvc(resources={"gpu": {}}), Observation(deployment=live), CONFIG)
    assert container(kept)["resources"]["requests"] == {"nvidia.com/gpu": "1"}
    assert REQUESTS_ANNOTATION not in kept.deployment["metadata"]["annotations"]
    edited = plan_children(
        isvc(resources={"gpu": {}}, engine={"maxNumSeqs": 7}), Observation(deployment=live), CONFIG
    )
    assert container(edited)["resources"] == container(before)["resources"]


def test_placement() -> None:
    toleration = {"key": "gpu", "operator": "Exists"}
    spec = pod_spec(
        plan(placement={"nodeSelector": {"a": "b"}, "tolerations": [toleration], "priorityClassName": "p"})
    )
    assert (spec["nodeSelector"], spec["tolerations"], spec["priorityClassName"]) == (
        {"a": "b"},
        [toleration],
        "p",
    )
    assert not {"nodeSelector", "tolerations", "priorityClassName"} & pod_spec(plan()).keys()


@pytest.mark.parametrize(
    ("rollout", "surge", "unavailable"),
    [
        ({}, 1, 0),
        ({"maxSurge": 0}, 0, 1),
        ({"maxSurge": 3}, 3, 0),
        ({"maxUnavailable": 0}, 1, 0),
        ({"maxUnavailable": 2}, 0, 2),
        ({"maxSurge": 1, "maxUnavailable": 1}, 1, 1),
    ],
)
def test_rollout(rollout: dict[str, int], surge: int, unavailable: int) -> None:
    strategy = plan(rollout=rollout).deployment["spec"]["strategy"]["rollingUpdate"]
    assert strategy == {"maxSurge": surge, "maxUnavailable": unavailable}


@pytest.mark.parametrize(
    ("replicas", "budget", "number"),
    [
        *((replicas, {}, 1) for replicas in (0, 1, 2, 10)),
        (11, {}, 2),
        (1000, {}, 100),
        (100, {"maxUnavailable": 3}, 3),
        (7, {"maxUnavailable": "50%"}, 4),
        (7, {"maxUnavailable": "100%"}, 7),
        (1, {"maxUnavailable": "1%"}, 1),
        (7, {"maxUnavailable": 0}, 0),
        (7, {"maxUnavailable": "0%"}, 0),
    ],
)
def test_the_disruption_budget_grows_with_the_replicas(
    replicas: int, budget: dict[str, Any], number: int
) -> None:
    made = plan(replicas=replicas, podDisruptionBudget=budget)
    assert made.budget["spec"]["maxUnavailable"] == number
    assert made.deployment == plan(replicas=replicas).deployment, "the pods do not depend on it"


@pytest.mark.parametrize("spec", [{}, {"engine": {"type": "vllm"}, "model": {"source": "pvc://claim/model"}}])
def test_nothing_is_sent_that_the_api_server_leaves_out(spec: dict[str, Any]) -> None:
    """It drops maps and lists of metadata that are empty, which would look like a change by another writer."""

    def empty(value: Any, path: str = "") -> list[str]:
        if isinstance(value, dict):
            return [found for name, each in value.items() for found in empty(each, f"{path}.{name}")] or (
                [] if value or path.endswith(("emptyDir", "resources")) else [path]
            )
        if isinstance(value, list):
            return [found for each in value for found in empty(each, path)] or ([] if value else [path])
        return []

    plan = plan_children(isvc(**spec), Observation(), CONFIG)
    assert [found for each in (plan.deployment, plan.service, plan.budget) for found in empty(each)] == []


def test_objects_belong_to_the_resource() -> None:
    made = plan()
    names = [(obj["kind"], obj["metadata"]["name"]) for obj in made.objects]
    assert names == [
        ("Secret", "tiny-engine-key"),
        ("Service", "tiny-engine"),
        ("PodDisruptionBudget", "tiny-engine"),
        ("Deployment", "tiny-engine"),
    ]
    for obj in made.objects:
        (owner,) = obj["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == ("uid-team-tiny", True)
        assert obj["metadata"]["namespace"] == "team"
    assert made.budget["spec"]["maxUnavailable"] == 1
    labels = made.deployment["spec"]["template"]["metadata"]["labels"]
    for obj in (made.service["spec"]["selector"], made.deployment["spec"]["selector"]["matchLabels"]):
        assert obj.items() <= labels.items()
    key = base64.b64decode(made.secret["data"]["ARGOSY_API_KEY"]).decode()
    assert key == internal_key(CONFIG.fleet_key, "uid-team-tiny")
    assert base64.b64decode(made.secret["data"]["api-keys"]).decode() == f"{key}\n"


@pytest.mark.parametrize("length", [1, 30, 40, 63])
def test_names_fit_what_kubernetes_derives_from_them(length: int) -> None:
    made = plan_children(isvc("a" * length), NOTHING, CONFIG)
    for obj in made.objects:
        assert len(obj["metadata"]["name"]) <= 63
    assert len(f"{made.deployment['metadata']['name']}-0123456789-abcde") <= 63


def test_long_names_do_not_collide() -> None:
    first, second = (plan_children(isvc("a" * 60 + end), NOTHING, CONFIG) for end in ("bcd", "bce"))
    assert first.deployment["metadata"]["name"] != second.deployment["metadata"]["name"]


SAME_REVISION: list[dict[str, Any]] = [
    {"replicas": 5},
    {"rollout": {"maxSurge": 2}},
    {"rollout": {"progressDeadlineSeconds": 60}},
    {"router": {"policy": "least-load"}},
    {"router": {"limits": {"maxQueuedRequests": 5}}},
    {"router": {"hedgeAfter": 2}},
    {"paused": True},
    {"model": {"source": "builtin://tiny", "aliases": ["a"]}},
    {"model": {"source": "builtin://tiny", "servedName": "org/Tiny"}},
]
OTHER_REVISION: list[dict[str, Any]] = [
    {"engine": {"image": "other"}},
    {"engine": {"env": [{"name": "A", "value": "b"}]}},
    {"engine": {"shutdownTimeoutSeconds": 1}},
    {"engine": {"args": ["--max-logprobs=5"]}},
    {"rollout": {"drainSeconds": 1}},
    {"resources": {"gpu": {}}},
    {"parallelism": {"tensor": 2}},
    {"placement": {"nodeSelector": {"a": "b"}}},
    {"placement": {"schedulerName": "gang"}},
    {"placement": {"topologySpreadConstraints": [{"topologyKey": "zone"}]}},
    {"resources": {"cpuLimit": 4}},
    {"resources": {"sharedMemory": "2Gi"}},
    {"podTemplate": {"metadata": {"annotations": {"a": "b"}}}},
    {"podTemplate": {"spec": {"imagePullSecrets": [{"name": "registry"}]}}},
]


@pytest.mark.parametrize("spec", SAME_REVISION, ids=str)
def test_revision_stays(spec: dict[str, Any]) -> None:
    assert plan(**spec).revision == plan().revision


def test_a_number_of_gpus_that_follows_may_be_written() -> None:
    def spec(gpu: dict[str, Any]) -> dict[str, Any]:
        return {"parallelism": {"tensor": 2}, "resources": {"gpu": gpu}}

    assert plan(**spec({"count": 2})).revision == plan(**spec({})).revision


def test_a_quantity_renders_alike_as_number_and_as_string() -> None:
    def spec(cpu: object, memory: object, scratch: object) -> dict[str, Any]:
        volumes = [{"name": "scratch", "emptyDir": {"sizeLimit": scratch}}]
        return {
            "resources": {"cpu": cpu, "memory": memory},
            "podTemplate": {"spec": {"volumes": volumes}},
            "model": {"source": "hf://org/name", "cache": {"sizeLimit": scratch}},
        }

    numbers, strings = plan(**spec(4, 1024, 2048)), plan(**spec("4", "1024", "2048"))
    assert numbers.deployment["spec"]["template"] == strings.deployment["spec"]["template"]
    assert container(numbers)["resources"] == {
        "requests": {"cpu": "4", "memory": "1024"},
        "limits": {"memory": "1024"},
    }
    limits = [
        volume["emptyDir"].get("sizeLimit") for volume in pod_spec(numbers)["volumes"] if "emptyDir" in volume
    ]
    assert limits.count("2048") == 2


@pytest.mark.parametrize("spec", OTHER_REVISION, ids=str)
def test_revision_changes(spec: dict[str, Any]) -> None:
    made = plan(**spec)
    assert made.revision != plan().revision
    assert made.deployment["spec"]["template"]["metadata"]["labels"][REVISION_LABEL] == made.revision


def test_image_pull_secrets_are_the_operators_and_the_services() -> None:
    spec = {"podTemplate": {"spec": {"imagePullSecrets": [{"name": "team"}, {"name": "registry"}]}}}
    config = dataclasses.replace(CONFIG, image_pull_secrets=("registry",))
    for given, names in ((spec, ["registry", "team"]), ({}, ["registry"])):
        pod_spec = plan_children(isvc(**given), Observation(), config).deployment["spec"]["template"]["spec"]
        assert [secret["name"] for secret in pod_spec["imagePullSecrets"]] == names
    assert "imagePullSecrets" not in plan().deployment["spec"]["template"]["spec"]


def test_a_failed_engine_tells_why_in_its_termination_message() -> None:
    """The kubelet takes the end of the log for it: the engine's last line."""
    assert container(plan())["terminationMessagePolicy"] == "FallbackToLogsOnError"


STARVED = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu. preemption: not helpful."
NO_DEVICE = "0/2 nodes are available: 2 cannot allocate all claims. preemption: not helpful."
NO_CPU = "0/2 nodes are available: 2 Insufficient cpu."
CLAIMS = {"resources": {"claims": [{"name": "gpu", "resourceClaimTemplateName": "h200"}]}}
SHARED_CLAIM = {"resources": {"claims": [{"name": "gpu", "resourceClaimName": "h200"}]}}
WITHOUT_DEVICE = pod("new-1", "new", ready=False, gate="", node="", unschedulable=NO_DEVICE)
WAITING = pod("new-1", "new", ready=False, gate="", node="", unschedulable=STARVED)
STARTING = pod("new-1", "new", ready=False, gate="")
OLD = pod("old-1", "old")


def deployment(revision: str, surge: int) -> dict[str, Any]:
    return {
        "metadata": {},
        "spec": {
            "template": {"metadata": {"labels": {REVISION_LABEL: revision}}},
            "strategy": {"rollingUpdate": {"maxSurge": surge, "maxUnavailable": 1 - surge}},
        },
    }


GPU = {"resources": {"gpu": {}}}


def refused(message: str) -> dict[str, Any]:
    return {"status": {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": message}]}}


REFUSED = refused(
    'pods "a" is forbidden: exceeded quota: team, requested: pods=1, used: pods=2, limited: pods=2'
)
FORBIDDEN = refused('pods "a" is forbidden: violates PodSecurity "restricted:latest"')


@pytest.mark.parametrize(
    ("name", "spec", "pods", "live", "expected"),
    [
        ("no gpu wanted", {}, (WAITING, OLD), deployment("new", 1), None),
        ("surge starves", GPU, (WAITING, OLD), deployment("new", 1), "gpu"),
        ("starved pod got the GPU, old ones left", GPU, (STARTING, OLD), deployment("new", 0), "gpu"),
        ("surge found a GPU", GPU, (STARTING, OLD), deployment("new", 1), None),
        ("no old pod left", GPU, (STARTING,), deployment("new", 0), None),
        ("old pod is going", GPU, (WAITING, pod("old-1", "old", is_terminating=True)), deployment("new", 1), None),
        ("a GPU is about to be free", GPU, (WAITING, OLD, pod("old-2", "old", is_terminating=True)),
         deployment("new", 1), None),
        ("fewer are about to be free than are wanted", GPU,
         (WAITING, pod("new-2", "new", ready=False, node="", unschedulable=STARVED), OLD,
          pod("old-2", "old", is_terminating=True)), deployment("new", 1), "gpu"),
        ("old pod holds no GPU", GPU, (WAITING, pod("old-1", "old", node="")), deployment("new", 1), None),
        ("surge finds no device of a claim", CLAIMS, (WITHOUT_DEVICE, OLD), deployment("new", 1), "gpu"),
        ("replicas share the claim", SHARED_CLAIM, (WITHOUT_DEVICE, OLD), deployment("new", 1), None),
        ("starves for something else", GPU, (
            pod("new-1", "new", ready=False, node="", unschedulable=NO_CPU), OLD), deployment("new", 1), "room"),
        ("starves for memory, without a GPU", {}, (
            pod("new-1", "new", ready=False, node="", unschedulable="0/2 nodes: 2 Insufficient memory."), OLD),
         deployment("new", 1), "room"),
        ("a gate holds it", {}, (pod("new-1", "new", ready=False, node="", gate_words="waits for kueue"), OLD),
         deployment("new", 1), "room"),
        ("no node has the label that it asks for", {}, (
            pod("new-1", "new", ready=False, node="",
                unschedulable="0/2 nodes: 2 node(s) didn't match Pod's node affinity/selector."), OLD),
         deployment("new", 1), None),
        ("the quota is full", {}, (OLD,), deployment("new", 1) | REFUSED, "quota"),
        ("the quota is full, no rollout", {}, (pod("new-1", "new"),), deployment("new", 1) | REFUSED, None),
        ("it was full for another revision", {}, (OLD,), deployment("other", 1) | REFUSED, None),
        ("pods are refused for another reason", {}, (OLD,), deployment("new", 1) | FORBIDDEN, None),
        ("scaling up, no rollout", GPU, (WAITING, pod("new-2", "new")), deployment("new", 1), None),
        ("next edit tries a surge again", GPU, (pod("b-1", "b"), OLD), deployment("b", 0), None),
        ("user wants no surge", {**GPU, "rollout": {"maxSurge": 0}}, (WAITING, OLD), deployment("new", 0), None),
        ("other resource name", {"resources": {"gpu": {"resourceName": "amd.com/gpu"}}}, (WAITING, OLD), None, None),
    ],
)  # fmt: skip
def test_what_a_surge_lacks(
    name: str, spec: dict[str, Any], pods: tuple[Pod, ...], live: dict[str, Any] | None, expected: str | None
) -> None:
    observed = Observation(deployment=live, pods=pods)
    found = blocked_surge(isvc(**spec), observed, "new")
    assert (None if found is None else found.missing) == expected, name


@pytest.mark.parametrize(
    ("rollout", "waited_s", "phase", "left_s"),
    [
        ({}, 0, "in-place", 0),
        ({"inPlaceAfterSeconds": 600}, 0, "waiting-for-node", 600),
        ({"inPlaceAfterSeconds": 600}, 599, "waiting-for-node", 1),
        ({"inPlaceAfterSeconds": 600}, 600, "in-place", 0),
        ({"inPlaceAfterSeconds": 600, "maxUnavailable": 0}, 900, "waiting-for-capacity", 0),
    ],
)
def test_a_cluster_autoscaler_gets_its_time_before_a_replica_is_replaced_in_place(
    rollout: dict[str, int], waited_s: int, phase: str, left_s: int
) -> None:
    service: InferenceService = isvc(**GPU, replicas=2, rollout=rollout)
    usual = plan_children(service, NOTHING, CONFIG)
    starved = pod(
        "n",
        usual.revision,
        ready=False,
        gate="",
        node="",
        unschedulable=STARVED,
        unschedulable_since="2026-01-01T00:00:00Z",
    )
    time = f"2026-01-01T00:{waited_s // 60:02}:{waited_s % 60:02}Z"
    seen = Observation(deployment=usual.deployment, pods=(starved, OLD), time=time)
    planned = plan_children(service, seen, CONFIG)
    assert (planned.rollout.phase, planned.rollout.node_wait_s) == (phase, left_s)
    strategy = planned.deployment["spec"]["strategy"]["rollingUpdate"]
    assert strategy == (
        {"maxSurge": 0, "maxUnavailable": 1} if phase == "in-place" else {"maxSurge": 1, "maxUnavailable": 0}
    )
    if phase == "in-place":
        afresh = msgspec.structs.replace(starved, unschedulable_since=time)
        seen = Observation(deployment=planned.deployment, pods=(afresh, OLD), time=time)
        assert plan_children(service, seen, CONFIG).rollout.phase == "in-place", (
            "it does not wait for each replica"
        )


def test_replacing_in_place_changes_the_strategy_and_nothing_else() -> None:
    service: InferenceService = isvc(**GPU, replicas=2)
    usual = plan_children(service, NOTHING, CONFIG)
    starved = pod("n", usual.revision, ready=False, gate="", node="", unschedulable=STARVED)
    fallen_back = plan_children(
        service, Observation(deployment=usual.deployment, pods=(starved, OLD)), CONFIG
    )
    assert fallen_back.rollout.phase == "in-place"
    strategy = fallen_back.deployment["spec"]["strategy"]["rollingUpdate"]
    assert strategy == {"maxSurge": 0, "maxUnavailable": 1}
    assert fallen_back.deployment["spec"]["template"] == usual.deployment["spec"]["template"]
    settled = Observation(deployment=fallen_back.deployment, pods=(pod("n", usual.revision),))
    again = plan_children(service, settled, CONFIG)
    assert (again.rollout, again.deployment["spec"]) == (usual.rollout, usual.deployment["spec"])


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({}, ["http://tiny-engine.team.svc:8000"]),
        ({"enablePrefixCaching": False}, []),
        ({"env": [{"name": "ARGOSY_WARM_UP_FROM", "value": ""}]}, [""]),
    ],
    ids=str,
)
def test_new_replicas_warm_up_from_the_services_ready_ones(
    engine: dict[str, object], expected: list[str]
) -> None:
    env = container(plan(engine=engine))["env"]
    found = [each for each in env if each["name"] == "ARGOSY_WARM_UP_FROM"]
    assert [each["value"] for each in found] == expected


def test_annotations_that_are_security_settings_reach_no_pod() -> None:
    """The API server makes the first one the container's AppArmor profile."""
    given = {
        "container.apparmor.security.beta.kubernetes.io/engine": "unconfined",
        "container.seccomp.security.alpha.kubernetes.io/engine": "unconfined",
        "seccomp.security.alpha.kubernetes.io/pod": "unconfined",
        "team": "a",
    }
    made = plan(podTemplate={"metadata": {"annotations": given}})
    assert made.deployment["spec"]["template"]["metadata"]["annotations"] == {"team": "a"}
