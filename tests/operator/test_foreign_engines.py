"""Services of stock vLLM and SGLang: their program, flags, probes, keys, names and models."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from builders import CONFIG, isvc, isvc_object
from harness import Operator, condition, living_pods, new_cluster
from virtual_time import virtual_time

from argosy_operator.desired.children import deployment_problem, plan_children
from argosy_operator.observation import Observation
from argosy_resource import crd
from argosy_resource.engine_arguments import ARGS_RULES, FOREIGN_ENGINES, OWN_KEY, argument_problems
from argosy_resource.fleet_document import fleet_service
from argosy_resource.types import API_VERSION, KIND
from argosy_resource.validation import ManifestError, validate_manifest

SOURCE = {"source": "pvc://models/qwen", "servedName": "org/Qwen", "aliases": ["qwen"]}
REMOTE = {"source": "hf://org/name"}
SECRET = {"secretKeyRef": {"name": "tiny-engine-key", "key": "ARGOSY_API_KEY"}}


def pod_spec(**spec: Any) -> dict[str, Any]:
    return plan_children(isvc(**spec), Observation(), CONFIG).deployment["spec"]["template"]["spec"]


def container(kind: str, engine: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    (only,) = pod_spec(**{"model": SOURCE, **spec, "engine": {"type": kind, **(engine or {})}})["containers"]
    return only


def test_vllm_is_started_with_its_flags() -> None:
    made = container(
        "vllm",
        {
            "dtype": "bfloat16",
            "maxModelLen": 4096,
            "maxNumSeqs": 8,
            "maxNumBatchedTokens": 512,
            "blockSize": 16,
            "kvCacheMemory": "1Gi",
            "enablePrefixCaching": False,
            "shutdownTimeoutSeconds": 5,
            "args": ["--enable-lora"],
        },
        parallelism={"tensor": 2, "pipeline": 3, "data": 2, "expert": True},
    )
    assert made["command"] == ["vllm", "serve"]
    assert made["args"] == [
        *("/model/qwen", "--host", "0.0.0.0", "--port", "8000", "--served-model-name", "org/Qwen", "qwen"),
        *("--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "8"),
        *("--max-num-batched-tokens", "512", "--block-size", "16", "--kv-cache-memory-bytes", str(2**30)),
        *("--shutdown-timeout", "5", "--tensor-parallel-size", "2", "--pipeline-parallel-size", "3"),
        *("--data-parallel-size", "2", "--no-enable-prefix-caching", "--enable-expert-parallel"),
        "--enable-lora",
    ]


def test_sglang_is_started_with_its_flags() -> None:
    made = container(
        "sglang",
        {
            "device": "cuda",
            "maxModelLen": 4096,
            "maxNumSeqs": 8,
            "maxNumBatchedTokens": 512,
            "blockSize": 16,
            "gpuMemoryUtilization": 0.8,
            "enablePrefixCaching": False,
            "args": ["--ep-size=2", "--log-level=$(ARGOSY_API_KEY)"],
        },
        parallelism={"tensor": 2},
        resources={"gpu": {}},
    )
    assert made["command"] == ["python3", "-m", "sglang.launch_server"]
    assert made["args"] == [
        *("--model-path", "/model/qwen", "--host", "0.0.0.0", "--port", "8000"),
        *("--served-model-name", "org/Qwen", "--enable-metrics", "--device", "cuda"),
        *("--context-length", "4096", "--max-running-requests", "8", "--chunked-prefill-size", "512"),
        *("--page-size", "16", "--mem-fraction-static", "0.8", "--tensor-parallel-size", "2"),
        *("--disable-radix-cache", "--ep-size=2", "--log-level=$$(ARGOSY_API_KEY)"),
        "--api-key=$(ARGOSY_API_KEY)",
    ]


@pytest.mark.parametrize("kind", FOREIGN_ENGINES)
def test_they_are_ready_once_they_are_healthy(kind: str) -> None:
    made = container(kind)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert made[probe]["httpGet"] == {"path": "/health", "port": "http"}
    assert pod_spec(engine={"type": kind}, model=SOURCE)["readinessGates"]
    startup = made["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 3600, "they do not notice a stall"
    assert made["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_key_cannot_be_replaced() -> None:
    overlay = {"containers": [{"name": "engine", "env": [{"name": "VLLM_API_KEY", "value": "mine"}]}]}
    made = container(
        "vllm", {"env": [{"name": "VLLM_API_KEY", "value": "mine"}]}, podTemplate={"spec": overlay}
    )
    keys = [variable for variable in made["env"] if variable["name"] == "VLLM_API_KEY"]
    assert keys == [{"name": "VLLM_API_KEY", "valueFrom": SECRET}]


def test_the_user_has_a_name_which_may_be_another() -> None:
    for env, name in (([], "argosy"), ([{"name": "USER", "value": "me"}], "me")):
        users = [each for each in container("vllm", {"env": env})["env"] if each["name"] == "USER"]
        assert users == [{"name": "USER", "value": name}]


@pytest.mark.parametrize("kind", FOREIGN_ENGINES)
def test_a_fetched_model_is_found_by_a_link(kind: str) -> None:
    spec = pod_spec(engine={"type": kind}, model=REMOTE)
    (engine,), (fetch,) = spec["containers"], spec["initContainers"]
    assert "/model/linked" in engine["args"]
    assert fetch["args"][-3:] == ["--any-architecture", "--link", "/model/linked"]
    mounts = {
        each["name"]: {mount["mountPath"]: mount.get("readOnly", False) for mount in each["volumeMounts"]}
        for each in (engine, fetch)
    }
    assert {path: mounts["engine"][path] for path in ("/model", "/models")} == {
        "/model": True,
        "/models": True,
    }
    assert {path: mounts["fetch-model"][path] for path in ("/model", "/models")} == {
        "/model": False,
        "/models": False,
    }
    assert fetch["image"] == CONFIG.engine_image


def test_each_type_has_its_image() -> None:
    config = dataclasses.replace(CONFIG, vllm_image="vllm:1", sglang_image="sglang:1")
    for kind, image in (("argosy", CONFIG.engine_image), ("vllm", "vllm:1"), ("sglang", "sglang:1")):
        made = plan_children(isvc(engine={"type": kind}, model=SOURCE), Observation(), config)
        (only,) = made.deployment["spec"]["template"]["spec"]["containers"]
        assert only["image"] == image
    assert container("vllm", {"image": "mine:1"})["image"] == "mine:1"


def test_routers_call_them_by_the_names_of_clients() -> None:
    """Only our engine takes a name from a header."""
    assert fleet_service(isvc(model=SOURCE)).engine_model == "tiny"
    entry = fleet_service(isvc(model=SOURCE, engine={"type": "vllm"}))
    assert (entry.engine_model, entry.model, entry.aliases) == ("", "org/Qwen", ("qwen",))


@pytest.mark.parametrize("engine", FOREIGN_ENGINES)
def test_flags_that_are_not_the_users(engine: Any) -> None:
    for name, reason in {
        "host": "engines listen where routers and probes call them, by plain HTTP",
        "api-key": "an engine has the key of its service's Secret",
        "served-model-name": "use spec.model.servedName and aliases",
        "dtype": "use spec.engine.dtype",
        "tensor-parallel-size": "use spec.parallelism.tensor",
        "nnodes": "the operator starts one node of such an engine, which would wait for others for ever",
    }.items():
        assert argument_problems([f"--{name}=x"], engine) == [f"--{name} cannot be set here: {reason}"]
    assert argument_problems(["--something-new=1", "--enable-lora"], engine) == []
    assert argument_problems(["--tensor_parallel=4"], engine) == [
        "--tensor_parallel stands for --tensor-parallel-size, which cannot be set here: use spec.parallelism.tensor"
    ]
    problem = deployment_problem(isvc(engine={"type": engine, "args": ["--port=1"]}, model=SOURCE), CONFIG)
    assert problem is not None
    assert problem.reason == "InvalidEngineArgs"


@pytest.mark.parametrize("engine", FOREIGN_ENGINES)
def test_their_parsers_take_short_forms_of_flags_so_these_are_refused_too(engine: Any) -> None:
    own = FOREIGN_ENGINES[engine].own_flags
    refused = [f"--{name[:length]}=x" for name in own for length in range(1, len(name) + 1)]
    refused += [
        "--api_key=mine",
        "--served_model_name=x",
        "--tensor_parallel=4",
        "--api-key.a=mine",
        "--api_key",
    ]
    if engine == "sglang":
        refused += ["--tp=4", "--tp_size=4"]
    rules = [each.rule for each in ARGS_RULES if f"self.type != '{engine}'" in each.rule]
    patterns = [rule.partition("arg.matches(r'")[2].partition("')")[0] for rule in rules]
    for argument in refused:
        assert argument_problems([argument], engine), argument
        assert sum(bool(re.search(pattern, argument)) for pattern in patterns) == 1, argument
    for argument in ("--api-keys=x", "--max-lora-rank=8", "--hostile", "--ep-size=2", "--max-num-seqs-x=1"):
        assert argument_problems([argument], engine) == []
        assert not any(re.search(pattern, argument) for pattern in patterns), argument


@pytest.mark.parametrize("engine", FOREIGN_ENGINES)
def test_the_field_that_is_named_for_a_flag_exists(engine: Any) -> None:
    fields = {
        name.rpartition("spec.")[2] for name in FOREIGN_ENGINES[engine].own_flags.values() if "spec." in name
    }
    assert {"engine.maxModelLen", "parallelism.tensor", "model.source"} <= fields
    for field in fields - {"model.servedName and aliases"}:
        schema = crd.schema()["properties"]["spec"]
        for part in field.split("."):
            schema = schema["properties"][part]


def test_a_key_among_the_arguments_is_in_no_message() -> None:
    model = {"source": "hf://org/model"}
    for flag in ("--api-key", "--api_k", "--admin-api-key"):
        spec = {"model": model, "engine": {"type": "sglang", "args": [f"{flag}=sk-secret"]}}
        with pytest.raises(ManifestError) as refused:
            validate_manifest(
                {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "a"}, "spec": spec}
            )
        assert "an engine has the key of its service's Secret" in str(refused.value)
        assert "sk-secret" not in str(refused.value)
    assert not [each for each in ARGS_RULES if OWN_KEY in each.message and each.message_expression]


@virtual_time
async def test_a_change_of_names_is_the_users_own() -> None:
    """It restarts engines that are started with the names, and does not wait for a turn."""
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(engine={"type": "vllm"}, model=SOURCE))
        await operator.settle()
        assert condition(cluster, "Ready") == ("True", "ReplicasRoutable")
        (before,) = living_pods(cluster)
        cluster.edit("tiny", lambda spec: spec.update(model={**SOURCE, "aliases": ["other"]}))
        await operator.settle()
        (after,) = living_pods(cluster)
    assert "other" in after["spec"]["containers"][0]["args"]
    assert after["metadata"]["name"] != before["metadata"]["name"]
    assert condition(cluster, "Ready") == ("True", "ReplicasRoutable")
