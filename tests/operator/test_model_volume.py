"""The model's part of a pod: volumes, the container that fetches, credentials, and a cache that is not there."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
from builders import CONFIG, isvc, isvc_object, pod
from harness import Operator, condition, living_pods, new_cluster
from virtual_time import virtual_time

from argosy.commands.models import build_parser as models_parser
from argosy_operator.config import OperatorConfig
from argosy_operator.desired.children import plan_children
from argosy_operator.desired.diff import compute_diff
from argosy_operator.desired.pod_template import cache_problem
from argosy_operator.names import DEPLOYMENTS
from argosy_operator.observation import Observation
from argosy_resource.types import parse

Manifest = dict[str, Any]
HUB = "hf://org/name@main"
NODE_CACHE = {"node_cache_path": "/var/lib/argosy"}


def pod_spec(model: Manifest, config: OperatorConfig = CONFIG, **spec: Any) -> Manifest:
    made = plan_children(isvc(model=model, **spec), Observation(), config)
    found: Manifest = made.deployment["spec"]["template"]["spec"]
    return found


def volume(spec: Manifest, name: str) -> Manifest:
    (found,) = (each for each in spec["volumes"] if each["name"] == name)
    return {key: value for key, value in found.items() if key != "name"}


def mounts(container: Manifest) -> dict[str, Manifest]:
    """Name of a volume -> its mount in the container."""
    return {mount["name"]: mount for mount in container["volumeMounts"]}


def literals(container: Manifest) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


@pytest.mark.parametrize(
    ("cache", "source", "sub_path"),
    [
        (None, {"emptyDir": {}}, None),
        ({}, {"emptyDir": {}}, None),
        ({"type": "none", "sizeLimit": "60Gi"}, {"emptyDir": {"sizeLimit": "60Gi"}}, None),
        (
            {"type": "claim", "claimName": "models"},
            {"persistentVolumeClaim": {"claimName": "models"}},
            "argosy/{scope}",
        ),
        (
            {"type": "node"},
            {"hostPath": {"path": "/var/lib/argosy/models", "type": "Directory"}},
            "team/{scope}",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize(("secret", "scope"), [(None, "public"), ("hf-token", "secret-hf-token")])
def test_one_container_fetches_into_the_cache_and_the_engine_reads_it(
    cache: Manifest | None, source: Manifest, sub_path: str | None, secret: str | None, scope: str
) -> None:
    model = {"source": HUB, **({"cache": cache} if cache is not None else {})}
    if secret is not None:
        model["secretRef"] = {"name": secret}
    spec = pod_spec(model, dataclasses.replace(CONFIG, **NODE_CACHE))
    (fetch,), (engine,) = spec["initContainers"], spec["containers"]
    assert volume(spec, "argosy-models") == source
    written: Manifest = {"name": "argosy-models", "mountPath": "/models"}
    if sub_path is not None:
        written["subPath"] = sub_path.format(scope=scope)
    assert mounts(fetch)["argosy-models"] == written
    assert mounts(engine)["argosy-models"] == {**written, "readOnly": True}


def test_the_engine_requests_the_room_that_a_gguf_file_takes_once_it_is_widened() -> None:
    source = "hf://org/name:Q4_K_M@main"
    spec = pod_spec({"source": source, "widenedSize": "16Gi"}, resources={"memory": "24Gi"})
    (fetch,), (engine,) = spec["initContainers"], spec["containers"]
    assert engine["resources"]["requests"] == {"memory": "24Gi", "ephemeral-storage": "16Gi"}
    assert "ephemeral-storage" not in str([engine["resources"]["limits"], fetch["resources"]])
    assert source in fetch["args"]
    assert {"HOME": "/home/argosy", "ARGOSY_OFFLINE": "1"}.items() <= literals(engine).items()
    assert volume(spec, "argosy-home") == {"emptyDir": {}}
    assert mounts(engine)["argosy-home"]["mountPath"] == "/home/argosy"
    assert "ephemeral-storage" not in str(pod_spec({"source": HUB}))


def test_the_container_that_fetches() -> None:
    resources = {"cpu": "4", "memory": "32Gi", "gpu": {}}
    engine = {"image": "other:1"}
    config = dataclasses.replace(CONFIG, fetch_env={"HTTPS_PROXY": "http://proxy:3128", "HOME": "/x"})
    spec = pod_spec({"source": HUB}, config, resources=resources, engine=engine)
    (fetch,), (only,) = spec["initContainers"], spec["containers"]
    assert fetch["name"] == "fetch-model"
    assert (fetch["image"], fetch["imagePullPolicy"]) == (CONFIG.engine_image, CONFIG.image_pull_policy)
    assert only["image"] == "other:1", (
        "an image that a service chooses neither writes to the store nor has the Secret"
    )
    assert fetch["args"] == [
        *("models", "pull", HUB, "--download-dir", "/models"),
        *("--progress-port", "8009", "--make-room"),
    ]
    assert fetch["resources"] == {"requests": {"cpu": "4", "memory": "32Gi"}, "limits": {"memory": "32Gi"}}
    assert fetch["securityContext"] == only["securityContext"]
    assert fetch["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert [port["containerPort"] for port in fetch["ports"]] == [8009]
    assert literals(fetch) == {"HTTPS_PROXY": "http://proxy:3128", "HOME": "/tmp", "ARGOSY_MIN_FREE": "15%"}


@pytest.mark.parametrize(
    ("limit", "size"),
    [("60Gi", str(60 << 30)), (1000, "1000"), ("0.5Gi", str(1 << 29)), ("9000Ti", "9" * 15)],
)
def test_a_model_that_the_kubelet_would_evict_is_not_fetched(limit: int | str, size: str) -> None:
    spec = pod_spec({"source": HUB, "cache": {"type": "none", "sizeLimit": limit}})
    (fetch,) = spec["initContainers"]
    assert fetch["args"][-2:] == ["--max-size", size]
    assert models_parser().parse_args(fetch["args"][1:]).max_size == int(size)


def test_kubernetes_expands_no_variable_in_a_source() -> None:
    """The kubelet replaces $(NAME) in args, and turns $$ into $."""
    key = "$(ARGOSY_API_KEY)"
    (engine,) = pod_spec({"source": f"file:///{key}"})["containers"]
    assert engine["args"][:2] == ["serve", "/$$(ARGOSY_API_KEY)"]
    spec = pod_spec({"source": f"s3://bucket/$/{key}"})
    (fetch,), (engine,) = spec["initContainers"], spec["containers"]
    assert fetch["args"][2] == engine["args"][1] == "s3://bucket/$$/$$(ARGOSY_API_KEY)"


def test_a_claim_is_filled_and_a_nodes_disk_is_not() -> None:
    claim = pod_spec({"source": HUB, "cache": {"type": "claim", "claimName": "models"}})
    assert "ARGOSY_MIN_FREE" not in literals(claim["initContainers"][0])


def test_the_administrator_decides_how_much_of_a_nodes_disk_is_left() -> None:
    config = replace(CONFIG, fetch_env={"ARGOSY_MIN_FREE": "5%"})
    assert literals(pod_spec({"source": HUB}, config)["initContainers"][0])["ARGOSY_MIN_FREE"] == "5%"


def test_nothing_that_an_engine_writes_reaches_the_container_that_fetches() -> None:
    """A pod whose sandbox is made anew runs its init containers again: a `.netrc` or a configuration in a shared home
    would send credentials elsewhere."""
    spec = pod_spec({"source": HUB, "secretRef": {"name": "hf-token"}})
    (fetch,), (engine,) = spec["initContainers"], spec["containers"]
    writable = {name for name, mount in mounts(engine).items() if not mount.get("readOnly")}
    assert not writable & mounts(fetch).keys()


def test_an_engine_neither_fetches_nor_has_credentials() -> None:
    spec = pod_spec({"source": HUB, "secretRef": {"name": "hf-token"}})
    (fetch,), (engine,) = spec["initContainers"], spec["containers"]
    assert engine["args"][:2] == ["serve", HUB]
    assert engine["args"][engine["args"].index("--download-dir") :][:2] == ["--download-dir", "/models"]
    assert literals(engine)["ARGOSY_OFFLINE"] == "1"
    assert "ARGOSY_OFFLINE" not in literals(fetch)
    projected = {"secretName": "hf-token", "optional": True, "defaultMode": 0o440}
    assert volume(spec, "argosy-model-credentials") == {"secret": projected}
    assert "argosy-model-credentials" not in mounts(engine)
    where = mounts(fetch)["argosy-model-credentials"]
    assert where["readOnly"] is True
    assert literals(fetch)["ARGOSY_CREDENTIALS_DIR"] == where["mountPath"]
    assert "ARGOSY_CREDENTIALS_DIR" not in literals(engine)


def test_without_a_secret_there_are_no_credentials() -> None:
    spec = pod_spec({"source": HUB})
    assert "argosy-model-credentials" not in [each["name"] for each in spec["volumes"]]
    (fetch,) = spec["initContainers"]
    assert "ARGOSY_CREDENTIALS_DIR" not in literals(fetch)


@pytest.mark.parametrize("source", ["builtin://tiny", "pvc://models/a", "file:///models/a"])
def test_a_model_that_is_there_is_not_fetched(source: str) -> None:
    config = dataclasses.replace(CONFIG, fetch_env={"A": "b"}, image_volumes=True, **NODE_CACHE)
    assert pod_spec({"source": source}, config) == pod_spec({"source": source})
    spec = pod_spec({"source": source})
    (engine,) = spec["containers"]
    assert "initContainers" not in spec
    assert "ARGOSY_OFFLINE" not in literals(engine)
    assert "--download-dir" not in engine["args"]


def test_an_overlay_gets_no_volume_of_the_operator() -> None:
    """The CRD refuses it, but a resource may have been stored before it did."""
    overlay = {"name": "engine", "volumeMounts": [{"name": "argosy-models", "mountPath": "/all"}]}
    spec = pod_spec({"source": HUB}, podTemplate={"spec": {"containers": [overlay]}})
    (engine,) = spec["containers"]
    assert [mount["mountPath"] for mount in engine["volumeMounts"] if mount["name"] == "argosy-models"] == [
        "/models"
    ]


def test_pods_go_to_nodes_with_the_cache() -> None:
    config = dataclasses.replace(CONFIG, **NODE_CACHE, node_cache_selector={"cache": "yes", "zone": "a"})
    placement = {"nodeSelector": {"zone": "b"}}
    on_node = pod_spec({"source": HUB, "cache": {"type": "node"}}, config, placement=placement)
    assert on_node["nodeSelector"] == {"cache": "yes", "zone": "b"}
    assert pod_spec({"source": HUB}, config, placement=placement)["nodeSelector"] == {"zone": "b"}


def test_an_image_volume_takes_the_place_of_the_container_that_fetches() -> None:
    model = {"source": "oci://registry.example/models/a:v1", "secretRef": {"name": "registry"}}
    config = dataclasses.replace(CONFIG, image_volumes=True, image_pull_secrets=("ours",))
    spec = pod_spec(model, config)
    (engine,) = spec["containers"]
    assert "initContainers" not in spec
    reference = {"reference": "registry.example/models/a:v1", "pullPolicy": "IfNotPresent"}
    assert volume(spec, "argosy-model") == {"image": reference}
    assert mounts(engine)["argosy-model"] == {"name": "argosy-model", "mountPath": "/model", "readOnly": True}
    assert engine["args"][:2] == ["serve", "/model"]
    assert "--download-dir" not in engine["args"]
    assert spec["imagePullSecrets"] == [{"name": "ours"}, {"name": "registry"}]


@pytest.mark.parametrize(
    ("model", "is_enabled"),
    [
        ({"source": "oci://registry.example/a"}, False),
        ({"source": "oci://registry.example/a", "cache": {"type": "claim", "claimName": "c"}}, True),
        ({"source": HUB}, True),
    ],
    ids=["not enabled", "another cache is asked for", "no image"],
)
def test_other_models_are_fetched(model: Manifest, is_enabled: bool) -> None:
    spec = pod_spec(model, dataclasses.replace(CONFIG, image_volumes=is_enabled))
    assert [each["name"] for each in spec["initContainers"]] == ["fetch-model"]


ON_NODE = {"source": HUB, "cache": {"type": "node"}}


@virtual_time
async def test_without_a_node_cache_no_pod_is_made_and_the_status_says_why() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(model=ON_NODE))
        await operator.settle()
        assert not living_pods(cluster)
        assert not [name for name in cluster.children() if name.startswith("Deployment/")]
        told = {
            "Ready": "False",
            "Progressing": "False",
            "Reconciling": "False",
            "Degraded": "True",
            "Stalled": "True",
        }
        for kind, status in told.items():
            assert condition(cluster, kind) == (status, "NodeCacheDisabled")
        assert "nodeCache.enabled" in cluster.condition("Ready")["message"]
        cluster.writes.clear()
        await operator.settle()
        assert cluster.writes == []
    async with Operator(cluster, **NODE_CACHE) as operator:
        await operator.settle()
    assert condition(cluster, "Ready") == ("True", "ReplicasRoutable")


@virtual_time
async def test_a_placement_on_nodes_without_the_cache_is_told_at_once() -> None:
    cluster = new_cluster()
    selector = {"cache": "yes", "zone": "a"}
    placement = {"nodeSelector": {"zone": "b", "gpu": "h200"}}
    async with Operator(cluster, **NODE_CACHE, node_cache_selector=selector) as operator:
        cluster.create(isvc_object(model=ON_NODE, placement=placement))
        await operator.settle()
        assert not living_pods(cluster)
        for kind, status in (("Ready", "False"), ("Degraded", "True"), ("Stalled", "True")):
            assert condition(cluster, kind) == (status, "NodeCacheElsewhere")
        assert "label zone is 'a' there and 'b' in spec.placement" in cluster.condition("Ready")["message"]
        cluster.edit("tiny", lambda spec: spec["placement"]["nodeSelector"].update(zone="a"))
        await operator.settle()
        assert condition(cluster, "Ready") == ("True", "ReplicasRoutable")


def test_other_caches_do_not_restrict_the_placement() -> None:
    config = dataclasses.replace(CONFIG, **NODE_CACHE, node_cache_selector={"zone": "a"})
    service = parse(isvc_object(model={"source": HUB}, placement={"nodeSelector": {"zone": "b"}}))
    assert cache_problem(service, config) is None


@virtual_time
async def test_replicas_outlive_the_node_cache_and_an_edit_that_asks_for_it() -> None:
    cluster = new_cluster()
    async with Operator(cluster, **NODE_CACHE) as operator:
        cluster.create(isvc_object("cached", model=ON_NODE, replicas=2))
        cluster.create(isvc_object("tiny", replicas=2))
        cluster.create(isvc_object("plain"))
        await operator.settle()
    before = {name: deployments(cluster, name) for name in ("cached", "tiny")}
    async with Operator(cluster, engine_image="new:2") as operator:
        cluster.edit("tiny", lambda spec: spec.update(model=ON_NODE))
        await operator.settle()
        for name, was in before.items():
            assert deployments(cluster, name) == was
            assert len(living_pods(cluster, name)) == 2
            assert condition(cluster, "Routable", name) == ("True", "ReplicasRoutable")
            assert condition(cluster, "Ready", name) == ("False", "NodeCacheDisabled")
        (plain,) = living_pods(cluster, "plain")
        assert plain["spec"]["containers"][0]["image"] == "new:2", "they do not have its turn"
        cluster.edit("tiny", lambda spec: spec.update(model={"source": "builtin://tiny"}))
        await operator.settle()
        assert condition(cluster, "Ready") == ("True", "ReplicasRoutable")


def test_a_service_without_its_cache_takes_no_turn_from_others() -> None:
    service = isvc(model=ON_NODE)
    config = dataclasses.replace(CONFIG, **NODE_CACHE)
    made = plan_children(service, Observation(), config)
    observed = Observation(deployment=made.deployment, pods=(pod("a", made.revision),))
    changed = dataclasses.replace(config, engine_image="new:2")
    assert compute_diff(service, observed, changed).takes_turn
    without = compute_diff(service, observed, dataclasses.replace(changed, node_cache_path=""))
    assert not without.takes_turn
    assert "Deployment" not in [change.wanted["kind"] for change in without.children]


@pytest.mark.parametrize("ended_by", ["administrator", "user"])
@virtual_time
async def test_a_service_that_loses_its_cache_during_its_turn_holds_up_no_other(ended_by: str) -> None:
    cluster = new_cluster()
    before = {"source": "builtin://tiny"} if ended_by == "user" else ON_NODE
    node_cache = "" if ended_by == "user" else "/var/lib/argosy"
    async with Operator(cluster, node_cache_path=node_cache) as operator:
        cluster.create(isvc_object("a", model=before))
        cluster.create(isvc_object("b"))
        await operator.settle()
    cluster.broken_images.add("broken:1")
    async with Operator(cluster, node_cache_path=node_cache, engine_image="broken:1") as operator:
        await operator.settle()
        assert condition(cluster, "Progressing", "b") == ("False", "WaitingForTurn")
        if ended_by == "user":
            cluster.edit("a", lambda spec: spec.update(model=ON_NODE))
            await operator.settle()
            assert images(cluster, "b") == ["argosy-engine:test", "broken:1"], "it has its turn"
    async with Operator(cluster, engine_image="good:2") as operator:
        await operator.settle()
        assert condition(cluster, "Ready", "a") == ("False", "NodeCacheDisabled")
        assert condition(cluster, "Ready", "b") == ("True", "ReplicasRoutable")
        assert images(cluster, "b") == ["good:2"]
    async with Operator(cluster, engine_image="good:2", **NODE_CACHE) as operator:
        await operator.settle()
        assert condition(cluster, "Ready", "a") == ("True", "ReplicasRoutable")


def images(cluster: Any, name: str) -> list[str]:
    return sorted(pod["spec"]["containers"][0]["image"] for pod in living_pods(cluster, name))


def deployments(cluster: Any, name: str) -> list[Manifest]:
    """Specs of the service's Deployments."""
    return [
        obj["spec"]
        for (kind, _, each), obj in cluster.objects.items()
        if kind == DEPLOYMENTS and each.startswith(f"{name}-")
    ]
