"""The chart as Helm renders it: what each value adds, and that two releases share nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders import CONFIG, isvc
from rendered_chart import NAMESPACE, Object, find, identity, pod_specs, render

from argosy.main import COMMANDS
from argosy_batch.config import BatchConfig
from argosy_batch.main import build_parser as batch_parser
from argosy_batch.main import config_of as batch_config
from argosy_operator.config import OperatorConfig
from argosy_operator.desired.pod_template import pod_template
from argosy_operator.desired.upgrades import default_images
from argosy_operator.names import NAME_LABEL
from argosy_resource.engine_command import ENGINE_PORT, NODE_COMPONENT
from argosy_router.main import build_parser as router_parser
from argosy_router.main import config_of as router_config

GUIDE = Path(__file__).parents[2] / "docs" / "cluster-variants.md"
EVERYTHING: dict[str, Any] = {
    "watchNamespaces": ["team"],
    "operator": {"replicas": 2},
    "nodeCache": {"enabled": True},
    "monitoring": {"podMonitor": True, "rules": True, "dashboard": True},
    "router": {"apiKeys": ["sk-a-key-of-ours"]},
}
FILES: dict[str, Any] = {"batch": {"storage": {"bucket": "s3://files"}, "replicas": 2}}


def kinds(objects: list[Object]) -> set[str]:
    return {each["kind"] for each in objects}


def engine_template(config: OperatorConfig, **spec: Any) -> Object:
    """Template of the pods of a new service."""
    service = isvc(**spec)
    template, _ = pod_template(service, config, default_images(service, config), key_digest="d")
    return dict(template)


def operator_environment(objects: list[Object]) -> dict[str, str]:
    (container,) = pod_specs(objects)["argosy-operator"]["containers"]
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


def test_runbooks_are_where_the_administrator_says() -> None:
    for given, wanted in (
        ({}, "docs/reference/alerts.md"),
        ({"runbookUrl": "https://git/a.md"}, "https://git/a.md"),
    ):
        objects = render({"monitoring": {"rules": True, **given}})
        found = [
            rule["annotations"]["runbook_url"]
            for each in objects
            if each["kind"] == "PrometheusRule"
            for group in each["spec"]["groups"]
            for rule in group["rules"]
        ]
        assert len(found) > 15
        assert {url.partition("#")[0] for url in found} == {wanted}


def test_services_may_not_name_what_the_release_keeps_its_keys_and_files_in() -> None:
    told = operator_environment(render())
    assert told["ARGOSY_RESERVED_SECRETS"].split(",") == ["argosy-fleet-key", "argosy-router-keys"]
    assert "ARGOSY_RESERVED_CLAIMS" not in told
    values = {
        "fleetKey": {"existingSecret": "fleet"},
        "router": {"existingKeysSecret": "clients", "tlsSecret": "tls", "ingress": {"tlsSecret": "tls"}},
        "batch": {
            "storage": {"volume": {"persistentVolumeClaim": {"claimName": "files"}}, "credentialsSecret": "b"}
        },
    }
    told = operator_environment(render(values))
    assert told["ARGOSY_RESERVED_SECRETS"].split(",") == ["fleet", "clients", "tls", "b"]
    assert told["ARGOSY_RESERVED_CLAIMS"] == "files"


def test_rendered_twice_it_is_the_same() -> None:
    assert render(EVERYTHING) == render(EVERYTHING)


def test_no_object_is_rendered_twice() -> None:
    found = [identity(each) for each in render(EVERYTHING | FILES)]
    assert len(found) == len(set(found))


def test_the_definition_can_be_installed_by_somebody_else() -> None:
    assert "CustomResourceDefinition" in kinds(render())
    assert "CustomResourceDefinition" not in kinds(render({"crds": {"install": False}}))


def test_whoever_may_view_or_edit_a_namespace_may_view_or_edit_its_services() -> None:
    objects = render()
    granted: dict[str, set[str]] = {}
    for role in (each for each in objects if each["kind"] == "ClusterRole"):
        for label in role["metadata"]["labels"]:
            _, _, builtin = label.partition("rbac.authorization.k8s.io/aggregate-to-")
            for rule in role["rules"] if builtin else ():
                assert rule["apiGroups"] == ["inference.argosy.dev"]
                assert "inferenceservices/finalizers" not in rule["resources"]
                granted.setdefault(builtin, set()).update(
                    f"{verb} {resource}" for verb in rule["verbs"] for resource in rule["resources"]
                )
    assert granted.keys() == {"view", "edit", "admin"}
    assert {each.split()[0] for each in granted["view"]} == {"get", "list", "watch"}
    assert granted["edit"] == granted["admin"] > granted["view"]
    assert {"create inferenceservices", "patch inferenceservices/scale"} <= granted["edit"]
    assert "patch inferenceservices/status" not in granted["edit"], "the operator alone reports"
    chosen = render({"watchNamespaces": ["team"], "userRoles": {"create": False}})
    assert "ClusterRole" not in kinds(chosen)


def numbers_for_names(value: Any, path: str = "") -> list[str]:
    """Paths of names, labels and variables that are no texts."""
    if isinstance(value, dict):
        return [
            each for name, nested in value.items() for each in numbers_for_names(nested, f"{path}.{name}")
        ]
    if isinstance(value, list):
        return [each for nested in value for each in numbers_for_names(nested, path)]
    is_name = re.search(r"([nN]ame|[nN]amespace|value)$|[lL]abels[.]", path) is not None
    return [] if isinstance(value, str) or not is_name else [path]


def test_names_of_digits_stay_texts() -> None:
    """Kubernetes takes 123 for a name, and YAML for a number, with which the API server refuses the object."""
    router = {"existingKeysSecret": "4", "tlsSecret": "5", "ingress": {"enabled": True, "tlsSecret": "6"}}
    values = {
        "imagePullSecrets": [{"name": "1"}],
        "fleetKey": {"existingSecret": "2"},
        "watchNamespaces": ["3"],
        "router": router,
        "networkPolicies": {"enabled": True},
        "monitoring": {"podMonitor": True, "rules": True, "dashboard": True},
        "nodeCache": {"enabled": True},
    }
    for obj in render(values, release="123", namespace="456"):
        if obj["kind"] != "CustomResourceDefinition":
            assert numbers_for_names(obj) == [], obj["metadata"]


def test_two_releases_share_no_object() -> None:
    """Each in its namespace, for namespaces of its own, the definition installed by the first."""
    first = render(EVERYTHING)
    second = render(
        EVERYTHING | {"watchNamespaces": ["other"], "crds": {"install": False}}, namespace="argosy-two"
    )
    assert not {identity(each) for each in first} & {identity(each) for each in second}
    shared = render(EVERYTHING | {"crds": {"install": False}}, namespace="argosy-two")
    in_team = {identity(each) for each in shared if each["metadata"].get("namespace") == "team"}
    assert not in_team & {identity(each) for each in first}, "names of Roles have the release's namespace"


@pytest.mark.parametrize("arbitrary", [False, True])
def test_pods_run_as_the_images_user_or_as_whom_the_cluster_chooses(arbitrary: bool) -> None:
    values = EVERYTHING | FILES | {"arbitraryUids": arbitrary, "nodeCache": {"enabled": False}}
    objects = render(values)
    specs = pod_specs(objects)
    assert specs.keys() == {"argosy-operator", "argosy-router", "argosy-batch", "argosy-test-router"}
    environment = operator_environment(objects)
    required = {"POD_NAMESPACE": "n", "POD_NAME": "p", "ARGOSY_FLEET_KEY": "0123456789abcdef"}
    config = OperatorConfig.from_env({**environment, **required})
    template = engine_template(config)
    for spec in (*specs.values(), template["spec"]):
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        users = {security.get(each) for each in ("runAsUser", "runAsGroup", "fsGroup")}
        assert users == ({None} if arbitrary else {10001})
        for container in spec["containers"]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert "runAsUser" not in container["securityContext"]


def test_an_unset_value_leaves_the_pods_of_engines_as_they_were() -> None:
    environment = operator_environment(render())
    assert (
        not {"ARGOSY_ARBITRARY_UIDS", "ARGOSY_IMAGE_VOLUMES", "ARGOSY_NODE_CACHE_PATH"} & environment.keys()
    )
    assert CONFIG.arbitrary_uids is False


def test_operator_and_routers_have_the_priority_that_they_are_given() -> None:
    plain, given = (
        pod_specs(render(values))
        for values in (
            {},
            {"operator": {"priorityClassName": "infra"}, "router": {"priorityClassName": "serving"}},
        )
    )
    assert not any("priorityClassName" in spec for spec in plain.values())
    assert given["argosy-operator"]["priorityClassName"] == "infra"
    assert given["argosy-router"]["priorityClassName"] == "serving"


@pytest.mark.parametrize("replicas", [1, 2])
def test_operators_are_told_their_lease_and_their_names(replicas: int) -> None:
    objects = render({"operator": {"replicas": replicas}})
    deployment = find(objects, "Deployment", "argosy-operator")
    assert deployment["spec"]["replicas"] == replicas
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    names = {each["name"]: each.get("valueFrom") for each in container["env"]}
    assert names["POD_NAME"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    role = find(objects, "Role", "argosy-operator-fleet")
    (lease,) = (rule for rule in role["rules"] if "leases" in rule["resources"] and "resourceNames" in rule)
    assert lease["resourceNames"] == [operator_environment(objects)["ARGOSY_LEASE"]]
    budgets = {each["metadata"]["name"] for each in objects if each["kind"] == "PodDisruptionBudget"}
    assert ("argosy-operator" in budgets) is (replicas > 1)
    assert all(each["metadata"].get("namespace", NAMESPACE) == NAMESPACE for each in objects)


def test_an_only_operator_ends_before_the_next_one_starts() -> None:
    """The version before may know no lease, so nothing else keeps both from writing."""
    (one, two) = (
        find(render({"operator": {"replicas": replicas}}), "Deployment", "argosy-operator")
        for replicas in (1, 2)
    )
    assert one["spec"]["strategy"] == {"type": "Recreate"}
    assert two["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


POLICIES: dict[str, Any] = {"watchNamespaces": ["team"], "networkPolicies": {"enabled": True}}


def ports(policy: Object) -> dict[int, list[Object]]:
    """Open ports of a policy, with who may use them; nobody listed means everybody."""
    return {
        port["port"]: rule.get("from", [])
        for rule in policy["spec"].get("ingress", ())
        for port in rule.get("ports", ())
    }


def container_ports(spec: Object) -> set[int]:
    return {port["containerPort"] for each in spec["containers"] for port in each.get("ports", ())}


def test_network_policies_open_the_ports_that_programs_use_and_no_others() -> None:
    monitoring = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    values = {**POLICIES, "networkPolicies": {"enabled": True, "monitoring": monitoring}}
    objects = render(values)
    specs = pod_specs(objects)
    for name in ("argosy-operator", "argosy-router"):
        policy = find(objects, "NetworkPolicy", name)
        assert ports(policy).keys() == container_ports(specs[name])
        template = find(objects, "Deployment", name)["spec"]["template"]
        assert policy["spec"]["podSelector"]["matchLabels"] == template["metadata"]["labels"]
    engines = find(objects, "NetworkPolicy", f"argosy-engines-{NAMESPACE}")
    assert engines["metadata"]["namespace"] == "team"
    template = engine_template(CONFIG, model={"source": "hf://org/name"})
    spec = template["spec"]
    wanted = container_ports(spec) | container_ports({"containers": spec["initContainers"]})
    assert ports(engines).keys() == wanted
    assert engines["spec"]["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    for port, labels in ((8000, "router"), (8009, "operator")):
        (peer,) = (each for each in ports(engines)[port] if "podSelector" in each)
        assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == labels
        assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": NAMESPACE}
    router = ports(find(objects, "NetworkPolicy", "argosy-router"))
    assert router[8080] == []
    assert monitoring[0] in router[8081]
    assert ports(find(objects, "NetworkPolicy", "argosy-operator")) == {8082: monitoring}


def test_the_nodes_of_a_replica_reach_each_other_on_every_port() -> None:
    objects = render({**POLICIES, "networkPolicies": {"enabled": True}})
    replicas = find(objects, "NetworkPolicy", f"argosy-engines-{NAMESPACE}")["spec"]
    nodes = find(objects, "NetworkPolicy", f"argosy-engine-nodes-{NAMESPACE}")
    assert nodes["metadata"]["namespace"] == "team"
    assert nodes["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == NODE_COMPONENT
    for policy in (replicas, nodes["spec"]):
        (rule,) = (each for each in policy["ingress"] if "ports" not in each)
        (peer,) = rule["from"]
        (expression,) = peer["podSelector"]["matchExpressions"]
        assert expression["values"] == ["engine", NODE_COMPONENT]
        assert peer.keys() == {"podSelector"}, "of the same namespace"
        assert peer["podSelector"]["matchLabels"] == {NAME_LABEL: "argosy"}, "of every service"
    row = next(line for line in GUIDE.read_text().splitlines() if line.startswith("| engine, workers"))
    assert "of whichever service of the namespace" in row


def test_clients_may_be_chosen_and_nobody_reads_metrics_unasked() -> None:
    clients = [{"namespaceSelector": {"matchLabels": {"llm": "yes"}}}]
    objects = render({**POLICIES, "networkPolicies": {"enabled": True, "clients": clients}})
    router = ports(find(objects, "NetworkPolicy", "argosy-router"))
    labels = find(objects, "Pod", "argosy-test-router")["metadata"]["labels"]
    (test,) = (each for each in router[8080] if each not in clients)
    assert test["podSelector"]["matchLabels"].items() <= labels.items(), "`helm test` goes on to work"
    assert clients[0] in router[8080]
    (operator,) = router[8081]
    assert operator["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "operator"
    assert ports(find(objects, "NetworkPolicy", "argosy-operator")) == {}
    assert "NetworkPolicy" not in kinds(render())


def test_names_are_bounded_and_namespaces_listed_where_all_are_served() -> None:
    names = {"team-b": ["b-*", "google/*"], "*": []}
    told = operator_environment(render({"modelNames": names}))
    assert json.loads(told["ARGOSY_MODEL_NAMES"]) == names
    assert "ARGOSY_MODEL_NAMES" not in operator_environment(render())

    def lists_namespaces(objects: list[Object]) -> set[str]:
        return {
            role["metadata"]["labels"]["app.kubernetes.io/component"]
            for role in objects
            for rule in (role.get("rules") or () if role["kind"] in ("Role", "ClusterRole") else ())
            if "namespaces" in rule["resources"]
        }

    assert lists_namespaces(render()) == {"operator"}
    assert lists_namespaces(render({"watchNamespaces": ["team"]})) == set()


def test_an_ingress_and_a_route_lead_to_the_routers() -> None:
    given: dict[str, Any] = {
        "ingress": {"enabled": True, "className": "nginx", "hosts": ["a.example.com"], "tlsSecret": "cert"},
        "httpRoute": {
            "enabled": True,
            "parentRefs": [{"name": "gateway", "namespace": "infra"}],
            "hostnames": ["b.example.com"],
        },
        "service": {"port": 8443},
    }
    objects = render({"router": given})
    (service,) = find(objects, "Service", "argosy-router")["spec"]["ports"]
    ingress = find(objects, "Ingress", "argosy-router")["spec"]
    (rule,) = ingress["rules"]
    assert (rule["host"], ingress["ingressClassName"]) == ("a.example.com", "nginx")
    assert ingress["tls"] == [{"secretName": "cert", "hosts": ["a.example.com"]}]
    (path,) = rule["http"]["paths"]
    assert path["backend"]["service"] == {"name": "argosy-router", "port": {"name": service["name"]}}
    route = find(objects, "HTTPRoute", "argosy-router")["spec"]
    assert route["hostnames"] == ["b.example.com"]
    assert route["rules"][0]["backendRefs"] == [{"name": "argosy-router", "port": service["port"]}]
    assert not {"Ingress", "HTTPRoute"} & kinds(render())
    (any_host,) = find(render({"router": {"ingress": {"enabled": True}}}), "Ingress", "argosy-router")[
        "spec"
    ]["rules"]
    assert "host" not in any_host


def test_gateways_find_routers_and_engines_by_an_inference_pool() -> None:
    gateways = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateways"}}}]
    values: dict[str, Any] = {
        **EVERYTHING,
        "router": {"endpointPicker": {"enabled": True}},
        "networkPolicies": {"enabled": True, "gateways": gateways},
    }
    objects = render(values)
    pool = find(objects, "InferencePool", "argosy")
    picker = pool["spec"]["endpointPickerRef"]
    ports = find(objects, "Service", picker["name"])["spec"]["ports"]
    (port,) = (each for each in ports if each["port"] == picker["port"]["number"])
    assert picker["failureMode"] == "FailClose"
    (router,) = pod_specs(objects)["argosy-router"]["containers"]
    opened = {each["name"]: each["containerPort"] for each in router["ports"]}
    assert f"--ext-proc-port={opened[port['targetPort']]}" in router["args"]
    labels = engine_template(CONFIG)["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert pool["spec"]["targetPorts"] == [{"number": ENGINE_PORT}]
    for name, number in (("argosy-router", 9002), (f"argosy-engines-{NAMESPACE}", ENGINE_PORT)):
        rules = find(objects, "NetworkPolicy", name)["spec"]["ingress"]
        assert {"ports": [{"port": number, "protocol": "TCP"}], "from": gateways} in rules
    off = render({**EVERYTHING, "networkPolicies": {"enabled": True, "gateways": gateways}})
    assert "InferencePool" not in kinds(off)
    assert "9002" not in str(find(off, "Service", "argosy-router"))
    assert gateways not in [
        rule.get("from")
        for each in off
        if each["kind"] == "NetworkPolicy"
        for rule in each["spec"]["ingress"]
    ]


def test_an_endpoint_picker_that_clients_could_reach_is_refused() -> None:
    picker = {"enabled": True, "inferencePool": False}
    with pytest.raises(AssertionError, match=r"networkPolicies\.enabled.*allowUnrestricted"):
        render({"router": {"endpointPicker": picker}})
    render({"router": {"endpointPicker": {**picker, "allowUnrestricted": True}}})


def test_a_route_without_a_gateway_is_refused() -> None:
    with pytest.raises(AssertionError, match="parentRefs"):
        render({"router": {"httpRoute": {"enabled": True}}})


@pytest.mark.parametrize("namespaces", [[], ["team"]])
def test_all_programs_are_scraped(namespaces: list[str]) -> None:
    objects = render({"monitoring": {"podMonitor": True}, "watchNamespaces": namespaces})
    monitors = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "PodMonitor"}
    assert monitors.keys() == {"argosy-operator", "argosy-router", "argosy-engines"}
    specs = pod_specs(objects)
    for name in ("argosy-operator", "argosy-router"):
        (endpoint,) = monitors[name]["podMetricsEndpoints"]
        (container,) = specs[name]["containers"]
        assert endpoint["port"] in {port["name"] for port in container["ports"]}
    template = engine_template(CONFIG)
    engines = monitors["argosy-engines"]
    assert engines["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert set(engines["podTargetLabels"]) <= template["metadata"]["labels"].keys()
    (endpoint,) = engines["podMetricsEndpoints"]
    assert endpoint["port"] == template["spec"]["containers"][0]["ports"][0]["name"]
    assert engines["namespaceSelector"] == ({"matchNames": namespaces} if namespaces else {"any": True})


def test_monitors_rules_and_dashboards_have_the_labels_that_their_readers_look_for() -> None:
    values = {
        "monitoring": {
            "podMonitor": True,
            "rules": True,
            "labels": {"release": "kube-prometheus-stack"},
            "dashboard": True,
            "dashboardAnnotations": {"grafana_folder": "Inference"},
        }
    }
    objects = render(values)
    selected = [each for each in objects if each["kind"] in ("PodMonitor", "PrometheusRule")]
    assert len(selected) == 5
    assert all(each["metadata"]["labels"]["release"] == "kube-prometheus-stack" for each in selected)
    dashboards = [each for each in objects if each["kind"] == "ConfigMap" and each.get("data")]
    assert {each["metadata"]["name"] for each in dashboards} == {
        "argosy-operator-dashboard",
        "argosy-router-dashboard",
    }
    for each in dashboards:
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert each["metadata"]["annotations"] == {"grafana_folder": "Inference"}
        (text,) = each["data"].values()
        assert json.loads(text)["panels"]


def test_pods_have_the_metadata_and_the_variables_that_they_are_given() -> None:
    affinity = {"nodeAffinity": {}}
    common: dict[str, Any] = {
        "affinity": affinity,
        "podLabels": {"cost-center": "7"},
        "podAnnotations": {"example.com/note": "x"},
    }
    given: dict[str, Any] = {
        "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/batches"}},
        "env": [{"name": "OTEL_TRACES_SAMPLER", "value": "always_on"}],
    }
    objects = render({"operator": common, "router": {**common, **given}})
    plain = render()
    for name in ("argosy-operator", "argosy-router"):
        template = find(objects, "Deployment", name)["spec"]["template"]
        before = find(plain, "Deployment", name)["spec"]["template"]
        assert template["metadata"] == {
            "labels": {**before["metadata"]["labels"], "cost-center": "7"},
            "annotations": {"example.com/note": "x"},
        }
        assert "annotations" not in before["metadata"]
        assert template["spec"]["affinity"] == affinity
        assert "affinity" not in before["spec"]
    account = find(objects, "ServiceAccount", "argosy-router")["metadata"]
    assert account["annotations"] == given["serviceAccount"]["annotations"]
    (router,) = pod_specs(objects)["argosy-router"]["containers"]
    assert given["env"][0] in router["env"]
    with pytest.raises(AssertionError, match=r"podLabels.*app\.kubernetes\.io"):
        render({"router": {"podLabels": {"app.kubernetes.io/name": "other"}}})


def test_a_list_that_is_set_to_null_is_empty() -> None:
    """As Helm has it: null removes the chart's own value."""
    given = {"enabled": True, "clients": None, "gateways": None, "monitoring": None}
    empty = {"enabled": True, "clients": [], "gateways": [], "monitoring": []}
    rendered = [render({"networkPolicies": each, "watchNamespaces": ["team"]}) for each in (given, empty)]
    assert rendered[0] == rendered[1]


def test_without_routers_there_is_nothing_to_test() -> None:
    objects = render({"router": {"replicas": 0}})
    assert "Pod" not in kinds(objects)
    assert operator_environment(objects)["ARGOSY_ROUTER_URL"] == ""


def test_programs_read_their_namespace_from_their_pods() -> None:
    """So that Kustomize can move the objects to another namespace."""
    for name, spec in pod_specs(render(FILES)).items():
        for container in spec["containers"]:
            written = json.dumps([container.get("args"), container.get("env")])
            assert NAMESPACE not in written, name
            names = [each["name"] for each in container.get("env", ())]
            for position, variable in enumerate(container.get("env", ())):
                for used in re.findall(r"[$][(](\w+)[)]", variable.get("value", "")):
                    assert used in names[:position], "Kubernetes knows what is before it"


def batch_program(values: dict[str, Any]) -> tuple[list[Object], Object, BatchConfig]:
    """All objects, the container of `argosy batch`, and what the program makes of its arguments."""
    objects = render(values)
    (container,) = pod_specs(objects)["argosy-batch"]["containers"]
    command, *arguments = container["args"]
    assert command in {each.name for each in COMMANDS}
    parser = batch_parser()
    return objects, container, batch_config(parser, parser.parse_args(arguments), {"ARGOSY_FLEET_KEY": "k"})


def batch_url(objects: list[Object]) -> str:
    """Where routers look for files and batches."""
    (container,) = pod_specs(objects)["argosy-router"]["containers"]
    arguments = router_parser().parse_args(container["args"][1:])
    return router_config(arguments, {"ARGOSY_FLEET_KEY": "0123456789abcdef"}).batch.batch_url


def test_without_a_storage_there_are_no_files_and_batches() -> None:
    objects = render(EVERYTHING | {"networkPolicies": {"enabled": True}})
    assert "argosy-batch" not in {each["metadata"]["name"] for each in objects}
    assert batch_url(objects) == ""


CLAIM = {"persistentVolumeClaim": {"claimName": "files"}}


def test_files_and_batches_are_kept_in_a_volume_by_a_program_of_their_own() -> None:
    objects, container, config = batch_program(EVERYTHING | {"batch": {"storage": {"volume": CLAIM}}})
    spec = pod_specs(objects)["argosy-batch"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in spec["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert config.storage == mounts["storage"]
    assert volumes["storage"] == {"name": "storage", **CLAIM}
    environment = {each["name"]: each.get("value") for each in container["env"]}
    assert environment["ARGOSY_FLEET_KEY_DIR"] == mounts["fleet-key"]
    (router,) = pod_specs(objects)["argosy-router"]["containers"]
    assert container["image"] == router["image"]
    assert "storage" not in str(router)
    assert find(objects, "Deployment", "argosy-batch")["spec"]["strategy"] == {"type": "Recreate"}
    (port,) = find(objects, "Service", "argosy-batch")["spec"]["ports"]
    assert batch_url(objects) == f"http://argosy-batch:{port['port']}"
    assert [each["containerPort"] for each in container["ports"] if each["name"] == port["targetPort"]] == [
        config.port
    ]
    assert config.router_url == "http://argosy-router.$(POD_NAMESPACE).svc"
    assert "PodDisruptionBudget argosy-batch" not in [" ".join(identity(each)[::2]) for each in objects]


def test_files_and_batches_are_kept_in_a_bucket() -> None:
    values: dict[str, Any] = {
        "storage": {"bucket": "s3://files/argosy", "credentialsSecret": "files"},
        "replicas": 2,
        "extraArgs": ["--batch-max-inflight=8"],
        "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/files"}},
        "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "podLabels": {"cost-center": "7"},
    }
    objects, container, config = batch_program({"batch": values})
    assert (config.storage, config.batch_max_inflight) == ("s3://files/argosy", 8)
    assert container["envFrom"] == [{"secretRef": {"name": "files"}}]
    assert values["env"][0] in container["env"]
    assert "storage" not in {each["name"] for each in container["volumeMounts"]}
    account = find(objects, "ServiceAccount", "argosy-batch")["metadata"]
    assert account["annotations"] == values["serviceAccount"]["annotations"]
    deployment = find(objects, "Deployment", "argosy-batch")["spec"]
    assert deployment["replicas"] == 2
    assert deployment["strategy"]["type"] == "RollingUpdate"
    assert deployment["template"]["metadata"]["labels"]["cost-center"] == "7"
    assert find(objects, "PodDisruptionBudget", "argosy-batch")
    assert find(objects, "Deployment", "argosy-router")


def test_batches_reach_routers_that_speak_tls() -> None:
    """By the name that the certificate has to have, and with its authority; not with its private key."""
    router = {"tlsSecret": "certificate", "service": {"port": 443}}
    objects, container, config = batch_program({"router": router, "batch": {"storage": {"volume": CLAIM}}})
    assert config.router_url == "https://argosy-router.$(POD_NAMESPACE).svc"
    environment = {each["name"]: each.get("value") for each in container["env"]}
    (volume,) = (
        each for each in pod_specs(objects)["argosy-batch"]["volumes"] if each["name"] == "router-ca"
    )
    (item,) = volume["secret"]["items"]
    assert volume["secret"]["secretName"] == "certificate"
    assert item["key"] == "ca.crt"
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert environment["SSL_CERT_FILE"] == f"{mounts['router-ca']}/{item['path']}"
    assert environment["SSL_CERT_DIR"] == "/etc/ssl/certs"


def test_policies_and_monitors_have_the_ways_to_and_from_batches() -> None:
    prometheus = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    values = {
        "batch": {"storage": {"volume": CLAIM}},
        "networkPolicies": {"enabled": True, "clients": [{"podSelector": {}}], "monitoring": prometheus},
        "monitoring": {"podMonitor": True},
    }
    objects = render(values)

    def peer(name: str) -> Object:
        return {"podSelector": find(objects, "Deployment", name)["spec"]["selector"]}

    requests, _ = find(objects, "NetworkPolicy", "argosy-router")["spec"]["ingress"]
    assert peer("argosy-batch") in requests["from"]
    policy = find(objects, "NetworkPolicy", "argosy-batch")["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [
        {"ports": [{"port": 8082, "protocol": "TCP"}], "from": [peer("argosy-router"), *prometheus]}
    ]
    monitor = find(objects, "PodMonitor", "argosy-batch")["spec"]
    assert monitor["selector"] == peer("argosy-batch")["podSelector"]
    assert monitor["podMetricsEndpoints"] == [{"port": "http", "path": "/metrics"}]


@pytest.mark.parametrize(
    ("router", "place"),
    [
        ({"storage": {"volume": CLAIM}}, r"batch\.storage\.volume"),
        ({"storage": {"bucket": "s3://files"}}, r"batch\.storage\.bucket"),
        ({"storage": {"credentialsSecret": "files"}}, r"batch\.storage\.credentialsSecret"),
        ({"extraArgs": ["--storage-ttl=86400"]}, r"batch\.extraArgs"),
        ({"extraArgs": ["--batch-max-inflight", "8"]}, r"batch\.extraArgs"),
    ],
    ids=str,
)
def test_values_of_routers_that_kept_files_name_their_new_place(router: dict[str, Any], place: str) -> None:
    with pytest.raises(AssertionError, match=place):
        render({"router": router})


@pytest.mark.parametrize(
    "storage", [{}, {"volume": {}, "bucket": "", "credentialsSecret": ""}, None], ids=str
)
def test_the_old_defaults_of_the_storage_are_taken(storage: Any) -> None:
    router = {"storage": storage, "extraArgs": ["--batch-share=0.7", "--response-ttl=86400"]}
    assert batch_url(render({"router": router})) == ""


KUSTOMIZE = Path(__file__).parents[2] / "deploy" / "kustomize"
OVERLAY: dict[str, Any] = {
    "namespace": "llm",
    "resources": ["deploy/kustomize"],
    "images": [{"name": "argosy-router", "newName": "registry.example.com/router", "newTag": "1"}],
}


def test_the_base_for_kustomize_is_the_chart() -> None:
    definition = {"crds": {"install": False}}
    wanted = [
        each for each in render(definition) if "helm.sh/hook" not in each["metadata"].get("annotations", {})
    ]
    found = [
        each for each in yaml.load_all((KUSTOMIZE / "argosy.yaml").read_text(), yaml.CSafeLoader) if each
    ]
    assert sorted(found, key=identity) == sorted(wanted, key=identity), "run `make kustomize`"


def test_an_overlay_moves_the_base_to_another_namespace(tmp_path: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("needs kubectl, which has Kustomize built in")
    for name in ("crds", "deploy"):
        shutil.copytree(KUSTOMIZE.parents[1] / name, tmp_path / name)
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(OVERLAY))
    done = subprocess.run([kubectl, "kustomize", str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    built = [each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each]
    assert {"CustomResourceDefinition", "Namespace", "Deployment"} <= kinds(built)
    assert find(built, "Namespace", "llm")
    assert {each["metadata"].get("namespace", "llm") for each in built} == {"llm"}
    for each in built:
        if "subjects" in each:
            assert {subject["namespace"] for subject in each["subjects"]} == {"llm"}
    for name, spec in pod_specs(built).items():
        assert NAMESPACE not in json.dumps(spec), name
    (router,) = pod_specs(built)["argosy-router"]["containers"]
    assert router["image"] == "registry.example.com/router:1"
