"""What an administrator installs, checked without Helm: values and their schema, RBAC, examples, Dockerfiles."""

from __future__ import annotations

import argparse
import dataclasses
import http.server
import json
import re
import subprocess
import sys
import threading
import tomllib
from contextlib import nullcontext
from ipaddress import ip_network
from pathlib import Path
from typing import Any, ClassVar

import jsonschema
import pytest
import yaml
from builders import CONFIG, isvc
from chart_rules import fleet_rules, helper_rules

from argosy.terminal import age_seconds, size_bytes
from argosy_operator.desired.pod_template import HOME, model_volume
from argosy_operator.names import AUTOSCALERS
from argosy_operator.reconcile.controller import WATCHED
from argosy_resource.model import ModelCache, SecretReference
from argosy_resource.validation import load_manifests
from argosy_router.main import build_parser, config_of

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "argosy"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def test_default_values_satisfy_the_schema() -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(VALUES)


@pytest.mark.parametrize(
    "wrong",
    [
        {"routr": {}},
        {"router": {"replica": 2}},
        {"router": {"apiKeys": ["short"]}},
        {"operator": {"image": {"tag": 1}}},
        {"watchNamespaces": ["Not_a_name"]},
        {"modelFetch": {"env": {"HTTPS_PROXY": "http://proxy:3128"}}},
        {"modelFetch": {"env": [{"name": "HF_TOKEN", "valueFrom": {}}]}},
        {"nodeCache": {"path": "var/lib/argosy"}},
        {"nodeCache": {"path": "/"}},
        {"nodeCache": {"path": "/var/../etc"}},
        {"nodeCache": {"maxSize": "500GB of models"}},
        {"nodeCache": {"maxAge": "30"}},
        {"engine": {"image": {"repository": "registry.example/a: b"}}},
        {"router": {"image": {"tag": "1: 2"}}},
        {"fleetKey": {"existingSecret": "a, optional: true}"}},
        {"router": {"existingKeysSecret": "My_Keys"}},
        {"router": {"tlsSecret": "a\nb"}},
        {"imagePullSecrets": [{"name": "a,b"}]},
        {"global": {"imagePullSecrets": [{"nam": "registry"}]}},
        {"global": {"imagePullSecrets": ["a,b"]}},
        {"global": {"imagePullSecrets": "registry"}},
        {"operator": {"priorityClassName": "a: b"}},
        {"router": {"env": [{"name": "POD_NAME", "value": "x"}]}},
    ],
    ids=str,
)
def test_typos_in_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(wrong)


@pytest.mark.parametrize("secrets", [["registry"], [{"name": "registry"}], [], None], ids=str)
def test_a_parent_charts_global_values_are_accepted(secrets: Any) -> None:
    values = {"global": {"imagePullSecrets": secrets, "storageClass": "fast"}}
    jsonschema.Draft202012Validator(SCHEMA).validate(values)


def closed(schema: dict[str, Any]) -> bool:
    if schema.get("type") != "object" or "properties" not in schema:
        return True
    return schema.get("additionalProperties") is False and all(map(closed, schema["properties"].values()))


def test_the_schema_leaves_no_object_open() -> None:
    properties = {name: each for name, each in SCHEMA["properties"].items() if name != "global"}
    assert closed({**SCHEMA, "properties": properties}), "global is the parent chart's"
    assert all(map(closed, SCHEMA["$defs"].values()))


def test_the_operator_reads_every_variable_of_the_chart() -> None:
    text = (CHART / "templates" / "operator.yaml").read_text()
    given = set(re.findall(r"- name: (ARGOSY_\w+)", text))
    source = (ROOT / "operator" / "argosy_operator" / "config.py").read_text()
    assert "ARGOSY_NODE_CACHE_PATH" in given
    assert given <= set(re.findall(r'"(ARGOSY_\w+)"', source))


def test_the_node_cache_is_off_and_alone_has_a_host_path() -> None:
    assert VALUES["nodeCache"]["enabled"] is False
    with_host_path = [
        path.name
        for path in (CHART / "templates").rglob("*")
        if path.is_file() and re.search(r"hostPath:|runAsUser: 0", path.read_text())
    ]
    assert with_host_path == ["node-cache.yaml"]
    text = (CHART / "templates" / "node-cache.yaml").read_text()
    assert text.startswith("{{- if .Values.nodeCache.enabled }}\n")
    assert text.endswith("{{- end }}\n")
    assert text.count("capabilities: {drop: [ALL]}") == text.count("runAsUser: 0") == 1
    assert text.count('include "argosy.containerSecurity"') == 1, "what runs for long is not root"


def test_operator_and_node_cache_mean_the_same_directory() -> None:
    """The operator's pods mount what the first container makes and the second one prunes."""
    text = (CHART / "templates" / "node-cache.yaml").read_text()
    assert "hostPath: {path: {{ .Values.nodeCache.path }}," in text
    assert "mkdir -p /cache/models" in text
    assert "{name: cache, mountPath: /cache}" in text
    assert "{name: cache, mountPath: /cache/models, subPath: models}" in text
    config = dataclasses.replace(CONFIG, node_cache_path=VALUES["nodeCache"]["path"])
    model = {"source": "hf://org/name", "cache": {"type": "node"}}
    (volume,) = model_volume(isvc(model=model), config).volumes[:1]
    assert volume["hostPath"]["path"] == f"{VALUES['nodeCache']['path']}/models"


@pytest.mark.parametrize(
    ("value", "is_valid"),
    [("500Gi", True), ("1.5T", True), ("64000000", True), ("500 Gi", False), ("500GB", False), ("-1", False)],
)
def test_sizes_of_the_node_cache_are_those_of_the_command_line(value: str, is_valid: bool) -> None:
    assert jsonschema.Draft202012Validator(SCHEMA).is_valid({"nodeCache": {"maxSize": value}}) is is_valid
    with nullcontext() if is_valid else pytest.raises(argparse.ArgumentTypeError):
        size_bytes(value)


@pytest.mark.parametrize(
    ("value", "is_valid"), [("30d", True), ("1.5h", True), ("30", False), ("30 d", False), ("d", False)]
)
def test_ages_of_the_node_cache_are_those_of_the_command_line(value: str, is_valid: bool) -> None:
    assert jsonschema.Draft202012Validator(SCHEMA).is_valid({"nodeCache": {"maxAge": value}}) is is_valid
    with nullcontext() if is_valid else pytest.raises(argparse.ArgumentTypeError):
        age_seconds(value)


def grants(name: str) -> dict[str, set[str]]:
    return {
        f"{group}/{resource}": set(rule["verbs"])
        for rule in helper_rules(name)
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


@pytest.mark.parametrize(
    "name", ["argosy.operatorRules", "argosy.operatorClusterRules", "argosy.routerRules"]
)
def test_no_wildcards_and_nothing_that_leads_further(name: str) -> None:
    for resource, verbs in grants(name).items():
        assert "*" not in resource
        assert not verbs & {"*", "escalate", "bind", "impersonate"}
        assert "exec" not in resource


def test_the_operator_cannot_read_secrets() -> None:
    assert grants("argosy.operatorRules")["/secrets"] == {"create", "patch"}


def test_what_is_listed_and_watched_is_not_read_by_name() -> None:
    assert grants("argosy.operatorRules")["/pods"] == {"list", "watch", "patch", "delete"}
    for role in ("argosy-operator-fleet", "argosy-router-fleet"):
        (rule,) = (each for each in fleet_rules(role) if each["resources"] == ["pods"])
        assert rule["verbs"] == ["list", "watch"]
    (rule,) = (each for each in fleet_rules("argosy-router-fleet") if each["resources"] == ["configmaps"])
    assert rule["verbs"] == ["list", "watch"]


def test_the_operator_may_post_events_but_not_read_them() -> None:
    assert grants("argosy.operatorRules")["/events"] == {"create", "patch"}


def test_the_operator_may_watch_what_it_watches() -> None:
    granted = grants("argosy.operatorRules")
    for kind in (*WATCHED, AUTOSCALERS):
        assert granted[f"{kind.group}/{kind.plural}"] >= {"list", "watch"}


def test_of_namespaces_the_operator_only_learns_which_there_are() -> None:
    assert grants("argosy.operatorClusterRules") == {"/namespaces": {"list", "watch"}}


@pytest.mark.parametrize(
    ("names", "is_valid"),
    [
        ({"team-b": ["b-*", "google/*", "?"], "*": []}, True),
        ({"team-b": "b-*"}, False),
        ({"team-b": ["[a-z]"]}, False),
        ({"team-b": ["ü"]}, False),
        ({"team-b": [""]}, False),
        ({"Team": ["b"]}, False),
        ({"team-*": ["b"]}, False),
        ({"a" * 64: ["b"]}, False),
    ],
)
def test_patterns_of_model_names(names: Any, is_valid: bool) -> None:
    assert jsonschema.Draft202012Validator(SCHEMA).is_valid({"modelNames": names}) is is_valid


def test_the_router_only_reads_pods() -> None:
    assert grants("argosy.routerRules") == {"/pods": {"list", "watch"}}


def test_whoever_asks_the_admin_port_speaks_tls_where_it_does() -> None:
    text = (CHART / "templates" / "router.yaml").read_text()
    probes = re.findall(r"httpGet: .*port: admin.*", text)
    assert len(probes) == 3
    assert all("{{ with .Values.router.tlsSecret }}, scheme: HTTPS{{ end }}" in probe for probe in probes)
    monitor = (CHART / "templates" / "monitoring.yaml").read_text()
    assert re.search(r"if \$\.Values\.router\.tlsSecret }}\n +scheme: https\n", monitor)
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    assert 'ternary "https" "http" (not (empty .Values.router.tlsSecret))' in helpers, (
        "the operator goes by it"
    )


def test_templates_make_nothing_up() -> None:
    """Rendered twice they are the same, with a cluster and without: random values, times and what a cluster holds are
    not for templates, which `helm upgrade`, `helm template` and GitOps tools render anew each time."""
    for path in (CHART / "templates").rglob("*.*"):
        for action in re.findall(r"{{-? *(?!/\*)(.*?)-?}}", path.read_text(), re.DOTALL):
            found = re.search(r"\b(rand\w+|gen[A-Z]\w+|derivePassword|uuidv4|htpasswd|now|lookup)\b", action)
            assert found is None, f"{path.name}: {action}"


def test_the_release_and_the_operator_never_write_the_same_secret() -> None:
    rendered = (CHART / "templates" / "secrets.yaml").read_text()
    assert rendered.count("kind: Secret") == 1
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    given, made = re.findall(r"^argosy-router-\S*keys$", helpers, re.MULTILINE)
    assert (given, made) == ("argosy-router-given-keys", "argosy-router-keys")


def test_by_default_two_routers_that_are_not_disrupted_together() -> None:
    assert VALUES["router"]["replicas"] == 2
    text = (CHART / "templates" / "router.yaml").read_text()
    budget = text[text.index("kind: PodDisruptionBudget") :]
    assert "maxUnavailable: 1" in budget
    assert "if gt (int .Values.router.replicas) 1" in text
    for key in ("kubernetes.io/hostname", "topology.kubernetes.io/zone"):
        assert f'"{key}"' in text


@pytest.mark.parametrize(
    ("networks", "is_valid"),
    [
        (["10.0.0.0/8", "192.168.7.1", "fd00::/8", "::/0", "0.0.0.0/0"], True),
        (["lb.example.com"], False),
        (["10.0.0.0/8 --no-auth"], False),
        ("10.0.0.0/8", False),
    ],
    ids=str,
)
def test_load_balancers_in_front_are_told_to_the_router(networks: Any, is_valid: bool) -> None:
    values = VALUES | {"router": VALUES["router"] | {"trustedProxies": networks}}
    assert jsonschema.Draft202012Validator(SCHEMA).is_valid(values) is is_valid
    if is_valid:
        flags = [f"--trusted-proxy={network}" for network in networks]
        read = config_of(build_parser().parse_args(["--replica", "http://a:1", *flags]), {})
        assert [str(ip_network(network)) for network in read.server.trusted_proxies] == [
            str(ip_network(network)) for network in networks
        ]
    text = (CHART / "templates" / "router.yaml").read_text()
    assert re.search(r"range \.Values\.router\.trustedProxies }}\n +- --trusted-proxy={{ \. }}\n", text)


@pytest.mark.parametrize(
    ("origins", "is_valid"),
    [
        (["https://chat.example.com", "http://localhost:3000", "null", "*"], True),
        (["chat.example.com"], False),
        (["https://chat.example.com/"], False),
        (['https://a"b'], False),
        ("*", False),
    ],
    ids=str,
)
def test_origins_of_web_pages_are_told_to_the_router(origins: Any, is_valid: bool) -> None:
    values = VALUES | {"router": VALUES["router"] | {"allowedOrigins": origins}}
    assert jsonschema.Draft202012Validator(SCHEMA).is_valid(values) is is_valid
    if is_valid:
        flag = f"--allowed-origins={json.dumps(origins)}"
        read = config_of(build_parser().parse_args(["--replica", "http://a:1", flag]), {})
        read.check()
        assert list(read.allowed_origins) == origins
    text = (CHART / "templates" / "router.yaml").read_text()
    assert '- {{ printf "--allowed-origins=%s" (toJson .) | quote }}\n' in text


@pytest.mark.parametrize(
    ("storage", "is_valid"),
    [
        ({"volume": {"persistentVolumeClaim": {"claimName": "batches"}}}, True),
        ({"bucket": "s3://batches/argosy", "credentialsSecret": "batches"}, True),
        ({"volume": {"emptyDir": {}}, "bucket": "s3://batches"}, False),
        ({"bucket": "/var/lib/batches"}, False),
        ({"bucket": "s3://batches --no-auth"}, False),
        ({"volumes": {}}, False),
    ],
    ids=str,
)
def test_files_and_batches_are_in_a_volume_or_a_bucket(storage: dict[str, Any], is_valid: bool) -> None:
    given = VALUES["batch"]["storage"] | storage
    values = VALUES | {"batch": VALUES["batch"] | {"storage": given}}
    assert jsonschema.Draft202012Validator(SCHEMA).is_valid(values) is is_valid
    text = (CHART / "templates" / "batch.yaml").read_text()
    (mounted,) = re.findall(r"{name: storage, mountPath: (\S+)}", text)
    assert re.findall(r"--storage=(\S+)", text) == [mounted, '%s"'], "the volume's path, or the bucket"


def test_a_router_has_the_time_to_drain() -> None:
    text = (CHART / "templates" / "router.yaml").read_text()
    margin = re.search(
        r"terminationGracePeriodSeconds: {{ add \(int \.Values\.router\.shutdownTimeoutSeconds\) (\d+) }}",
        text,
    )
    settle = re.search(r"--drain-settle=(\d+)", text)
    assert margin is not None
    assert settle is not None
    assert int(margin.group(1)) >= int(settle.group(1)) + 10


class RouterServer(http.server.ThreadingHTTPServer):
    """Its end waits for the requests that came in, so that what was asked is known."""

    daemon_threads = False


class Router(http.server.BaseHTTPRequestHandler):
    """What a router answers to the paths of `helm test`; `key` opens it, empty for anybody."""

    key = "sk-open-sesame"
    ready = 200
    chat = 200
    models = ("tiny",)
    answers_in_time = True
    chats: ClassVar[list[str]]
    """Models that were asked."""

    def do_GET(self) -> None:
        allowed = not self.key or self.headers["authorization"] == f"Bearer {self.key}"
        status = self.ready if self.path == "/ready" else 200 if allowed else 401
        body = json.dumps({"data": [{"id": model} for model in self.models]}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        allowed = not self.key or self.headers["authorization"] == f"Bearer {self.key}"
        is_chat = self.path == "/v1/chat/completions" and asked["model"] in self.models and asked["messages"]
        self.chats.append(asked["model"])
        if not self.answers_in_time:
            self.rfile.read(1)  # until the client gives up
            self.close_connection = True
            return
        body = b'{"choices": [{"message": {"content": "Hi"}}]}'
        self.send_response(self.chat if allowed and is_chat else 422)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("router", "keys", "said", "code"),
    [
        ({}, "# ours\nsk-open-sesame name=a\n", "serves tiny", 0),
        ({}, f"sha256:{'0' * 64} name=a\n", "none was tried", 0),
        ({"key": ""}, None, "serves tiny", 0),
        ({}, "sk-open-sesame", "tiny answers a chat", 0),
        ({"chat": 400}, "sk-open-sesame", "no model is for chats", 0),
        ({"chat": 500}, "sk-open-sesame", "no model answers a chat: tiny: 500", 1),
        ({"chat": 503}, "sk-open-sesame", "skipped: tiny has no replica", 0),
        ({"answers_in_time": False}, "sk-open-sesame", "skipped: tiny has no replica", 0),
        ({"ready": 503}, "sk-open-sesame", "GET /ready: 503 instead of 200", 1),
        ({"key": ""}, "sk-open-sesame", "GET /v1/models: 200 instead of 401", 1),
        ({}, "sk-another-one", "GET /v1/models: 401 instead of 200", 1),
    ],
    ids=[
        "a key",
        "digests only",
        "open",
        "a chat",
        "embeddings only",
        "a model that fails",
        "no replica",
        "a request that is held",
        "not ready",
        "a router that asks for no key",
        "a wrong key",
    ],
)
def test_helm_test_requests(
    router: dict[str, Any], keys: str | None, said: str, code: int, tmp_path: Path
) -> None:
    environment = {}
    if keys is not None:
        (tmp_path / "api-keys").write_text(keys)
        environment["KEYS_FILE"] = str(tmp_path / "api-keys")
    done, _ = run_helm_test(router, environment)
    assert said in done.stdout + done.stderr
    assert done.returncode == code


@pytest.mark.parametrize(
    ("router", "asked"),
    [({}, ["a"]), ({"chat": 503}, ["a"]), ({"answers_in_time": False}, ["a"]), ({"chat": 500}, ["a", "b"])],
    ids=["it answers", "no replica", "a request that is held", "it fails"],
)
def test_helm_test_wakes_one_model_at_most(router: dict[str, Any], asked: list[str]) -> None:
    _, chats = run_helm_test({"models": ("a", "b"), "key": "", **router}, {})
    assert chats == asked


def run_helm_test(
    router: dict[str, Any], environment: dict[str, str]
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The script's end, and the models that it sent a chat."""
    chats: list[str] = []
    served = type("Router", (Router,), {**router, "chats": chats})
    with RouterServer(("127.0.0.1", 0), served) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.002,))
        serving.start()
        url = f"http://127.0.0.1:{server.server_port}"
        # Where no answer comes a short time is enough; else the deadline of slow machines.
        chat_s = "30" if served.answers_in_time else "1"
        try:
            done = subprocess.run(
                [sys.executable, "-c", (CHART / "files" / "router-test.py").read_text()],
                env={"ROUTER_URL": url, "READY_S": "0", "CHAT_S": chat_s, **environment},
                capture_output=True,
                text=True,
                timeout=200,
            )
        finally:
            server.shutdown()
            serving.join()
    return done, chats


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_are_valid(path: Path) -> None:
    assert load_manifests(path.read_text())


def test_the_alternatives_in_the_comments_of_the_hub_example_are_valid() -> None:
    text = (ROOT / "examples" / "hub-model.yaml").read_text()
    with_claim = re.sub(
        r"# (type: claim|claimName:)", r"\1", re.sub(r"\n +(type: none|sizeLimit:).*", "", text)
    )
    with_secret = re.sub(r"# (secretRef:|  name: hf-token)", r"\1", with_claim)
    (service,) = load_manifests(with_secret)
    assert service.spec.model.cache == ModelCache(type="claim", claim_name="models")
    assert service.spec.model.secret_ref == SecretReference(name="hf-token")


@pytest.mark.parametrize("path", sorted((ROOT / "images").glob("*.Dockerfile")), ids=lambda path: path.name)
def test_images_run_as_a_number_and_take_their_base_as_an_argument(path: Path) -> None:
    text = path.read_text()
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)
    assert re.search(r"^ARG BASE=\S+$", text, re.MULTILINE)
    stages = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert stages
    assert set(stages) == {"${BASE}"}
    assert "PYTHONSAFEPATH=1" in text
    assert 'ENTRYPOINT ["/opt/venv/bin/argosy"]' in text


def test_the_engines_image_has_what_triton_compiles_with() -> None:
    """A compiler with the headers of libc, and a home that is the volume of the operator's pods."""
    text = (ROOT / "images" / "engine.Dockerfile").read_text()
    image = text.split("\nFROM ")[-1]
    assert re.search(r"apt-get install .* gcc libc6-dev\b", image)
    assert f"ENV HOME={HOME} " in image
    assert f"chown 10001:0 {HOME} && chmod 0770 {HOME}\n" in image, (
        "any user that a cluster chooses is in group 0"
    )


@pytest.mark.parametrize("path", sorted((ROOT / "images").glob("*.Dockerfile")), ids=lambda path: path.name)
def test_dependencies_are_locked_in_a_layer_below_the_wheel(path: Path) -> None:
    image = path.read_text().split("\nFROM ")[-1]
    installations = re.findall(r"/opt/venv/bin/pip install (.*?)(?: \\)?$", image, re.MULTILINE)
    locked, wheel = installations
    assert "--require-hashes" in locked
    assert "--only-binary :all:" in locked, "a source distribution would build with what no lock names"
    assert ".lock" in locked or "${lock}" in locked
    assert {"--no-deps", "--no-index"} <= set(wheel.split())
    below = image[: image.index(locked)]
    assert not re.search(
        r"^(COPY .*(argosy-|sbom|--from)|ARG (VERSION|REVISION|CREATED|SOURCE)\b)", below, re.MULTILINE
    ), "what changes with each commit would install the dependencies again"


@pytest.mark.parametrize("path", sorted((ROOT / "images").glob("*.Dockerfile")), ids=lambda path: path.name)
def test_images_have_the_labels_of_the_oci(path: Path) -> None:
    image = path.read_text().split("\nFROM ")[-1]
    labels = dict(re.findall(r'org\.opencontainers\.image\.([\w.]+)="([^"]*)"', image))
    assert labels["title"] == f"argosy-{path.name.removesuffix('.Dockerfile')}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert labels["licenses"] == project["license"]
    assert labels["base.name"] == "${BASE}"
    for name in ("version", "revision", "created", "source"):
        assert labels[name] == f"${{{name.upper()}}}"
        assert re.search(rf"^ARG {name.upper()}=$", image, re.MULTILINE)
    last_run = image.rindex("\nRUN ")
    assert last_run < image.index("\nARG VERSION="), "another label would make the layers anew"


def test_the_fleet_key_is_mounted_and_no_variable() -> None:
    """A variable stays what it was when the container started, so that a rotation would need a restart."""
    for name in ("operator", "router"):
        text = (CHART / "templates" / f"{name}.yaml").read_text()
        assert "ARGOSY_FLEET_KEY_DIR" in text
        assert not re.search(r"name: ARGOSY_FLEET_KEY\s", text)
        assert 'secretName: {{ include "argosy.fleetKeySecret" . | quote }}' in text
