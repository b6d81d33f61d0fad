"""Models that are fetched: from buckets, a hub and a registry, into caches of nodes and claims, with what goes wrong.

The sources run on this machine, at the bridge's address, to which pods have a route.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import unquote

import pytest

from bucket_server import BUCKET, BucketServer, refusal
from cluster import Cluster
from cluster.kubectl import RESTRICTED
from cluster.settings import HOST_ADDRESS
from cluster.shell import poll
from conftest import GPUS, SYSTEM, TENANT, Stack, expose_torch, install, recorded
from go_registry import GoRegistry, built_registry, find_go, running_go_registry
from hub_faults import Fault, Hold
from hub_repositories import files_under
from hub_server import HubServer, SeenRequest
from loopback_certificate import issue_certificate
from oci_artifacts import files as layers
from oci_artifacts import push
from published_checkpoints import PUBLISHED
from scripted_http import Asked, Reply, ScriptedHttp, file_reply
from test_whole_path import condition, is_ready, manifest, sdk

CACHED = "team-cached"
"""A namespace that admits hostPath volumes."""
CLAIM, SMALL_CLAIM = "models", "small"
KEY_ID, SECRET_KEY = "AKIAE2E", "e2e-secret-access-key"
TOKEN, WRONG_TOKEN = "hf_e2e_right", "hf_e2e_wrong"
S3_SECRET, HUB_SECRET = "s3-credentials", "hub-token"
GS_SECRET, REGISTRY_SECRET, WEB_SECRET = "google-storage", "registry", "web-server"
REGISTRY_LOGIN = ("e2e", "e2e-registry-password")
REPOSITORY = "acme/qwen"
CREDENTIALS = "/var/run/argosy/model-credentials"
"""Where the container that fetches sees the Secret."""
S3_SOURCE = f"s3://{BUCKET}/acme/qwen"
IN_POD = {"type": "none"}
NODE, CLAIMED = {"type": "node"}, {"type": "claim", "claimName": CLAIM}
LOOK = """
import json, os
print(json.dumps({"env": dict(os.environ), "mounts": open("/proc/mounts").read(),
                  "writable": os.access("/models", os.W_OK), "run": os.listdir("/var/run")}))
"""
"""Prints what an engine's process can see."""


def service(
    name: str,
    source: str,
    cache: dict[str, str],
    *,
    namespace: str = TENANT,
    secret: str = "",
    **changes: Any,
) -> dict[str, Any]:
    """A service of one replica without a GPU."""
    model: dict[str, Any] = {"source": source, "cache": cache}
    if secret:
        model["secretRef"] = {"name": secret}
    engine = {"threads": 1, "maxNumSeqs": 4, "maxModelLen": 1024}
    spec = {
        "model": model,
        "replicas": 1,
        "engine": engine,
        "resources": {"memory": "2Gi"},
        "rollout": {"drainSeconds": 0},
    }
    made = manifest(**(spec | changes))
    made["metadata"] |= {"name": name, "namespace": namespace}
    return made


def put_secret(cluster: Cluster, namespace: str, name: str, **values: str) -> None:
    data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
    metadata = {"name": name, "namespace": namespace}
    cluster.kubectl.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})


def wait_for(
    cluster: Cluster,
    name: str,
    what: str,
    accept: Callable[[dict[str, Any]], bool] = is_ready,
    *,
    namespace: str = TENANT,
) -> dict[str, Any]:
    return cluster.kubectl.poll(what, ("isvc", name, "-n", namespace), accept, 240)


def cached(status: str, reason: str, text: str = "") -> Callable[[dict[str, Any]], bool]:
    """Whether the condition ModelCached is so."""

    def accept(found: dict[str, Any]) -> bool:
        seen = condition(found, "ModelCached")
        return (seen.get("status"), seen.get("reason")) == (status, reason) and text in seen["message"]

    return accept


def has_reason(found: dict[str, Any], reason: str, text: str = "") -> bool:
    conditions = found.get("status", {}).get("conditions", ())
    return any(each["reason"] == reason and text in each["message"] for each in conditions)


def pods(cluster: Cluster, name: str, namespace: str = TENANT) -> list[dict[str, Any]]:
    found = cluster.kubectl.pods(namespace, f"inference.argosy.dev/service={name}")
    return [pod for pod in found if not pod["metadata"].get("deletionTimestamp")]


def delete(cluster: Cluster, name: str, namespace: str = TENANT) -> None:
    """Delete a service and wait until its pods have left their volumes: while a pod has a disk of a node mounted, the
    kubelet does not set the group (`fsGroup`) that the next one needs to write there."""
    cluster.kubectl("delete", "isvc", name, "-n", namespace, "--timeout=60s")
    selector = f"inference.argosy.dev/service={name}"
    poll(
        f"the pods of {name} to end", lambda: not cluster.kubectl.pods(namespace, selector), 60, interval=0.25
    )


def weights_asked_for(seen: Iterable[SeenRequest | Asked]) -> Counter[str]:
    """How often each file of weights was asked for; not counted are single bytes, which show what a server can do."""
    found: Counter[str] = Counter()
    for each in seen:
        first, _, last = each.headers.get("range", "").removeprefix("bytes=").partition("-")
        path = unquote(each.path)  # clients of Google's storage quote slashes and dots too
        if path.endswith(".safetensors") and (first != last or not first):
            found[PurePath(path).name] += 1
    return found


@pytest.fixture(scope="module")
def bucket(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketServer]:
    """A bucket with a model, for those who sign with our key."""
    folder = tmp_path_factory.mktemp("qwen")
    PUBLISHED["qwen3"].write(folder)
    objects = {f"acme/qwen/{path}": Path(file).read_bytes() for path, file in files_under(folder).items()}

    def check(asked: Asked) -> Reply | None:
        signed = asked.headers.get("authorization", "").startswith(f"AWS4-HMAC-SHA256 Credential={KEY_ID}/")
        return None if signed else refusal(403, "AccessDenied")

    with BucketServer(objects, host=HOST_ADDRESS) as server:
        server.on_list = server.on_read = check
        yield server


@pytest.fixture(scope="module")
def google_bucket(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketServer]:
    """A look-alike of Google Cloud Storage with a public model."""
    folder = tmp_path_factory.mktemp("google")
    PUBLISHED["qwen3"].write(folder)
    objects = {f"acme/qwen/{path}": Path(file).read_bytes() for path, file in files_under(folder).items()}
    with BucketServer(objects, host=HOST_ADDRESS) as server:
        yield server


@pytest.fixture(scope="module")
def registry(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GoRegistry]:
    """A container registry, go-containerregistry's, with a login and a model whose files are layers."""
    folder = tmp_path_factory.mktemp("registry")
    PUBLISHED["qwen3"].write(folder)
    go = find_go()
    assert go is not None
    with running_go_registry(built_registry(go), REGISTRY_LOGIN, HOST_ADDRESS) as server:
        contents = {path: Path(file).read_bytes() for path, file in files_under(folder).items()}
        push(server, REPOSITORY, "v1", layers(contents))
        yield server


@pytest.fixture(scope="module")
def hub(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """The cluster's mirror of a hub, with a model whose weights are four files."""
    folder = tmp_path_factory.mktemp("sharded")
    PUBLISHED["qwen2"].write(folder)
    with HubServer(HOST_ADDRESS) as server:
        server.add_model("acme/sharded", files_under(folder))
        yield server


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return issue_certificate(tmp_path_factory.mktemp("certificate"), HOST_ADDRESS)


@pytest.fixture(scope="module")
def private_hub(
    cluster: Cluster, certificate: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HubServer]:
    """A hub of the tenant's own, with TLS, because tokens are sent, and a private model."""
    folder = tmp_path_factory.mktemp("private")
    PUBLISHED["llama"].write(folder)
    with HubServer(HOST_ADDRESS, certificate) as server:
        server.add_model("acme/private", files_under(folder), is_private=True)
        server.tokens[TOKEN] = {"acme/private"}
        yield server


@pytest.fixture(scope="module")
def release(stack: Stack, hub: HubServer, bucket: BucketServer) -> Iterator[Cluster]:
    """The chart with caches on the nodes and a mirror of the hub, on two nodes with a GPU each."""
    cluster = stack.cluster.join_node([stack.images["engine"]])
    kubectl = cluster.kubectl
    kubectl.namespace(CACHED)
    expose_torch(cluster, CACHED)
    put_secret(
        cluster,
        CACHED,
        S3_SECRET,
        AWS_ACCESS_KEY_ID=KEY_ID,
        AWS_SECRET_ACCESS_KEY=SECRET_KEY,
        AWS_REGION="us-east-1",
        AWS_ENDPOINT_URL=bucket.url,
    )
    cluster.advertise_gpus(1)
    kubectl.namespace(SYSTEM, dict.fromkeys(RESTRICTED, "privileged"))
    mirror = [{"name": "HF_ENDPOINT", "value": hub.endpoint}, {"name": "ARGOSY_MIN_FREE", "value": "64M"}]
    install(
        cluster, stack.images,
        "--set", "nodeCache.enabled=true",
        "--set-json", f"nodeCache.tolerations={json.dumps([{'operator': 'Exists'}])}",
        "--set-json", f"modelFetch.env={json.dumps(mirror)}",
    )  # fmt: skip
    yield cluster
    kubectl(
        "delete",
        "secret",
        HUB_SECRET,
        GS_SECRET,
        REGISTRY_SECRET,
        WEB_SECRET,
        "-n",
        TENANT,
        "--ignore-not-found",
    )
    install(cluster, stack.images)
    kubectl.namespace(SYSTEM, RESTRICTED)
    kubectl.delete_namespace(CACHED)
    cluster.advertise_gpus(0)
    stack.cluster.advertise_gpus(GPUS)


@pytest.fixture(scope="module")
def disk(release: Cluster) -> Path:
    """The disk behind the claim, as this machine sees it."""
    return release.make_disk(TENANT, CLAIM)


def test_without_caches_on_nodes_the_service_says_so(stack: Stack) -> None:
    stack.cluster.kubectl.apply(service("early", S3_SOURCE, NODE))
    wait_for(
        stack.cluster, "early", "the status to say so", lambda found: has_reason(found, "NodeCacheDisabled")
    )
    assert pods(stack.cluster, "early") == []
    delete(stack.cluster, "early")


def test_each_node_fetches_once_and_engines_have_no_credentials(
    stack: Stack, release: Cluster, bucket: BucketServer
) -> None:
    document = service(
        "everywhere",
        S3_SOURCE,
        NODE,
        namespace=CACHED,
        secret=S3_SECRET,
        replicas=2,
        resources={"gpu": {"count": 1}, "cpu": "100m", "memory": "2Gi"},
        placement={"tolerations": [{"operator": "Exists"}]},
    )
    release.kubectl.apply(document)
    found = wait_for(release, "everywhere", "two replicas", namespace=CACHED)
    assert cached("True", "Cached")(found)
    assert found["status"]["modelCache"] == "cached"
    assert "cached" in release.kubectl("get", "isvc", "everywhere", "-n", CACHED).stdout.split()
    release.kubectl.wait_for_event(CACHED, "everywhere", "ModelCached", timeout=30)
    replicas = pods(release, "everywhere", CACHED)
    assert len({pod["spec"]["nodeName"] for pod in replicas}) == 2
    assert weights_asked_for(bucket.asked) == {"model.safetensors": 2}
    for node in release.settings.nodes:
        assert len(list((node.data / "argosy" / "models" / CACHED).rglob("model.safetensors"))) == 1
    with sdk(stack) as client:
        answer = client.chat.completions.create(
            model=f"{CACHED}/everywhere",
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=8,
            extra_body={"ignore_eos": True},
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    for pod in replicas:
        check_engine_has_no_credentials(release, pod)


def check_engine_has_no_credentials(cluster: Cluster, pod: dict[str, Any]) -> None:
    name = pod["metadata"]["name"]
    words = ("-n", CACHED, "-c", "engine", "--", "/opt/venv/bin/python", "-c", LOOK)
    output = cluster.kubectl("exec", name, *words).stdout
    seen = json.loads(output)
    assert seen["env"]["ARGOSY_OFFLINE"] == "1"
    assert not seen["writable"]
    assert "credentials" not in seen["mounts"]
    assert "argosy" not in seen["run"]
    logs = cluster.kubectl("logs", name, "-n", CACHED, "--all-containers").stdout
    for value in (KEY_ID, SECRET_KEY):
        assert value not in output + logs + json.dumps(pod)


def test_a_service_that_comes_back_to_its_node_asks_nobody(release: Cluster, bucket: BucketServer) -> None:
    scale = ("scale", "isvc", "everywhere", "-n", CACHED)
    release.kubectl(*scale, "--replicas=0")
    poll("its pods to be gone", lambda: pods(release, "everywhere", CACHED) == [] or None, 120)
    bucket.asked.clear()
    release.kubectl(*scale, "--replicas=1")
    found = wait_for(release, "everywhere", "a replica", namespace=CACHED)
    assert cached("True", "Cached")(found)
    (pod,) = pods(release, "everywhere", CACHED)
    (fetch,) = pod["status"]["initContainerStatuses"]
    assert "already stored" in fetch["state"]["terminated"]["message"]
    assert bucket.asked == []
    delete(release, "everywhere", CACHED)


@pytest.mark.core
def test_a_bucket_of_google_is_a_source(release: Cluster, google_bucket: BucketServer) -> None:
    put_secret(release, TENANT, GS_SECRET, STORAGE_EMULATOR_HOST=google_bucket.url)
    source = f"gs://{BUCKET}/acme/qwen"
    release.kubectl.apply(service("google", source, IN_POD, secret=GS_SECRET))
    found = wait_for(release, "google", "a replica")
    check_fetched(release, "google", source, found)
    assert weights_asked_for(google_bucket.asked) == {"model.safetensors": 1}
    delete(release, "google")


def test_a_registry_is_a_source(release: Cluster, registry: GoRegistry) -> None:
    user, password = REGISTRY_LOGIN
    values = {"OCI_REGISTRY": registry.host, "OCI_USERNAME": user, "ARGOSY_OCI_PLAIN_HTTP": registry.host}
    put_secret(release, TENANT, REGISTRY_SECRET, **values, OCI_PASSWORD="wrong")
    source = f"oci://{registry.host}/{REPOSITORY}:v1"
    with recorded(release, TENANT, "from-registry") as history:
        release.kubectl.apply(service("from-registry", source, IN_POD, secret=REGISTRY_SECRET))
        history.wait_for("the refusal", cached("False", "FetchFailed", "OCI_"), 240)
    put_secret(release, TENANT, REGISTRY_SECRET, **values, OCI_PASSWORD=password)
    found = wait_for(release, "from-registry", "a replica")
    check_fetched(release, "from-registry", f"oci://{registry.host}/{REPOSITORY}", found)
    assert password not in json.dumps(pods(release, "from-registry"))
    delete(release, "from-registry")


def test_a_web_server_is_a_source(release: Cluster, certificate: tuple[Path, Path], tmp_path: Path) -> None:
    PUBLISHED["qwen3"].write(tmp_path)
    contents = {path: Path(file).read_bytes() for path, file in files_under(tmp_path).items()}
    sums = "".join(f"{hashlib.sha256(content).hexdigest()}  {path}\n" for path, content in contents.items())

    def answer(asked: Asked) -> Reply:
        path = asked.path.removeprefix("/qwen/")
        content = sums.encode() if path == "SHA256SUMS" else contents.get(path)
        return Reply(404) if content is None else file_reply(asked, content, {"ETag": f'"{path}"'})

    values = {"SSL_CERT_FILE": f"{CREDENTIALS}/ca.crt", "ca.crt": certificate[0].read_text()}
    put_secret(release, TENANT, WEB_SECRET, **values)
    with ScriptedHttp(answer, certificate, HOST_ADDRESS) as server:
        source = f"{server.url}/qwen/SHA256SUMS"
        release.kubectl.apply(service("web", source, IN_POD, secret=WEB_SECRET))
        found = wait_for(release, "web", "a replica")
        assert weights_asked_for(server.asked) == {"model.safetensors": 1}
    check_fetched(release, "web", source, found)
    delete(release, "web")


def test_a_folder_of_a_claim_is_a_source(stack: Stack, release: Cluster, disk: Path) -> None:
    """The claim that caches models holds another one, which somebody has copied there."""
    folder = disk / "by-hand" / "qwen"
    folder.mkdir(parents=True)
    PUBLISHED["qwen3"].write(folder)
    for path in files_under(folder).values():
        Path(path).chmod(0o644)  # safetensors writes files that only their owner may read
    document = service("by-hand", f"pvc://{CLAIM}/by-hand/qwen", IN_POD)
    del document["spec"]["model"]["cache"]
    release.kubectl.apply(document)
    found = wait_for(release, "by-hand", "a replica")
    assert condition(found, "ModelCached")["reason"] == "LocalSource"
    (pod,) = pods(release, "by-hand")
    assert "initContainerStatuses" not in pod["status"]
    with sdk(stack) as client:
        answer = client.completions.create(
            model="by-hand", prompt="Hello", max_tokens=8, extra_body={"ignore_eos": True}
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    delete(release, "by-hand")


def check_fetched(cluster: Cluster, name: str, source: str, found: dict[str, Any]) -> None:
    """The init container has fetched the model from its source, and the service says so."""
    assert cached("True", "Cached")(found)
    assert found["status"]["modelCache"] == "cached"
    (pod,) = pods(cluster, name)
    (fetch,) = pod["status"]["initContainerStatuses"]
    message = fetch["state"]["terminated"]["message"]
    assert message.startswith(source)
    assert "fetched in" in message


def test_where_hostpath_is_refused_the_status_names_the_other_cache(release: Cluster) -> None:
    release.kubectl.apply(service("refused", "hf://acme/sharded", NODE))

    def names_remedy(found: dict[str, Any]) -> bool:
        messages = [each["message"] for each in found.get("status", {}).get("conditions", ())]
        return any("violates PodSecurity" in message and "claim" in message for message in messages)

    wait_for(release, "refused", "the status to name the remedy", names_remedy)
    delete(release, "refused")


@pytest.mark.usefixtures("disk")
def test_a_wrong_token_is_told_and_the_right_one_helps(
    release: Cluster, private_hub: HubServer, certificate: tuple[Path, Path]
) -> None:
    values = {
        "HF_ENDPOINT": private_hub.endpoint,
        "SSL_CERT_FILE": f"{CREDENTIALS}/ca.crt",
        "ca.crt": certificate[0].read_text(),
    }
    put_secret(release, TENANT, HUB_SECRET, HF_TOKEN=WRONG_TOKEN, **values)
    document = service("private", "hf://acme/private", CLAIMED, secret=HUB_SECRET, replicas=2)
    with recorded(release, TENANT, "private") as history:
        release.kubectl.apply(document)
        refused = cached("False", "FetchFailed", "does not accept the token")
        found = history.wait_for("the refusal", refused, 240)
    put_secret(release, TENANT, HUB_SECRET, HF_TOKEN=TOKEN, **values)
    told = condition(found, "ModelCached")["message"]
    assert "HF_TOKEN" in told
    assert found["status"]["modelCache"] == "failed"
    release.kubectl.wait_for_event(
        TENANT, "private", "ModelFetchFailed", "does not accept the token", timeout=30
    )
    found = wait_for(release, "private", "two replicas that share what one has fetched")
    assert cached("True", "Cached")(found)
    assert weights_asked_for(private_hub.requests("content")) == {"model.safetensors": 1}
    assert WRONG_TOKEN not in told
    delete(release, "private")


def test_a_killed_fetch_is_continued(release: Cluster, hub: HubServer, disk: Path) -> None:
    shards = [f"model-{number:05}-of-00004.safetensors" for number in range(1, 5)]
    holds = [Hold(after_bytes=1000) for _ in range(2)]
    for shard, hold in zip(shards[2:], holds, strict=True):
        hub.faults.add("content", Fault(hold=hold), path=shard, times=100)
    hub.forget_requests()
    try:
        with recorded(release, TENANT, "cut") as history:
            release.kubectl.apply(service("cut", "hf://acme/sharded", CLAIMED))
            found = history.wait_for("the progress", cached("False", "Fetching", "%"), 240)
        assert "%" in found["status"]["modelCache"]
        assert "fetching the model" in condition(found, "WorkloadReady")["message"]
        release.kubectl.wait_for_event(TENANT, "cut", "ModelFetching", timeout=30)
        for shard in shards[:2]:
            poll(f"{shard} to be complete", lambda shard=shard: list(disk.rglob(shard)), 60)
        assert all(hold.reached.wait(60) for hold in holds)
        assert weights_asked_for(hub.requests("content")).keys() == set(shards)
        hub.forget_requests()
        (pod,) = pods(release, "cut")
        words = ("pod", pod["metadata"]["name"], "-n", TENANT, "--grace-period=1", "--timeout=60s")
        release.kubectl("delete", *words)  # which returns when its processes have ended
    finally:
        for hold in holds:
            hold.release.set()
    wait_for(release, "cut", "a replica with what was continued")
    assert weights_asked_for(hub.requests("content")).keys() == set(shards[2:])
    delete(release, "cut")


def test_a_full_disk_is_told(release: Cluster) -> None:
    release.make_disk(TENANT, SMALL_CLAIM, size="8m")
    cache = {"type": "claim", "claimName": SMALL_CLAIM}
    release.kubectl.apply(service("full", "hf://acme/sharded", cache))
    found = wait_for(release, "full", "the status to say so", cached("False", "FetchFailed", "MiB free"))
    assert found["status"]["modelCache"] == "failed"
    delete(release, "full")
