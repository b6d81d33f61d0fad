"""What an administrator installs, checked without Helm: values and their schema, RBAC, examples, Dockerfiles."""

from __future__ import annotations

import http.server
import json
import re
import subprocess
import sys
import threading
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from chart_rules import helper_rules

from argosy_operator.reconcile.controller import WATCHED
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
    ],
    ids=str,
)
def test_typos_in_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(wrong)


def closed(schema: dict[str, Any]) -> bool:
    if schema.get("type") != "object" or "properties" not in schema:
        return True
    return schema.get("additionalProperties") is False and all(map(closed, schema["properties"].values()))


def test_the_schema_leaves_no_object_open() -> None:
    assert closed(SCHEMA)
    assert all(map(closed, SCHEMA["$defs"].values()))


def grants(name: str) -> dict[str, set[str]]:
    return {
        f"{group}/{resource}": set(rule["verbs"])
        for rule in helper_rules(name)
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


@pytest.mark.parametrize("name", ["argosy.operatorRules", "argosy.routerRules"])
def test_no_wildcards_and_nothing_that_leads_further(name: str) -> None:
    for resource, verbs in grants(name).items():
        assert "*" not in resource
        assert not verbs & {"*", "escalate", "bind", "impersonate"}
        assert "exec" not in resource


def test_the_operator_cannot_read_secrets() -> None:
    assert grants("argosy.operatorRules")["/secrets"] == {"create", "patch"}


def test_the_operator_may_post_events_but_not_read_them() -> None:
    assert grants("argosy.operatorRules")["/events"] == {"create", "patch"}


def test_the_operator_may_watch_what_it_watches() -> None:
    granted = grants("argosy.operatorRules")
    for kind in WATCHED:
        assert granted[f"{kind.group}/{kind.plural}"] >= {"list", "watch"}


def test_the_router_only_reads_pods() -> None:
    assert grants("argosy.routerRules") == {"/pods": {"get", "list", "watch"}}


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


class Router(http.server.BaseHTTPRequestHandler):
    """What a router answers to the paths of `helm test`; `key` opens it, empty for anybody."""

    key = "sk-open-sesame"
    ready = 200

    def do_GET(self) -> None:
        allowed = not self.key or self.headers["authorization"] == f"Bearer {self.key}"
        status = self.ready if self.path == "/ready" else 200 if allowed else 401
        body = b'{"data": [{"id": "tiny"}]}'
        self.send_response(status)
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
        ({"ready": 503}, "sk-open-sesame", "GET /ready: 503 instead of 200", 1),
        ({"key": ""}, "sk-open-sesame", "GET /v1/models: 200 instead of 401", 1),
        ({}, "sk-another-one", "GET /v1/models: 401 instead of 200", 1),
    ],
    ids=["a key", "digests only", "open", "not ready", "a router that asks for no key", "a wrong key"],
)
def test_helm_test_requests(
    router: dict[str, Any], keys: str | None, said: str, code: int, tmp_path: Path
) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Router", (Router,), router)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {"ROUTER_URL": f"http://127.0.0.1:{server.server_port}", "READY_S": "0"}
        if keys is not None:
            (tmp_path / "api-keys").write_text(keys)
            environment["KEYS_FILE"] = str(tmp_path / "api-keys")
        script = (CHART / "files" / "router-test.py").read_text()
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60
        )
        server.shutdown()
    assert said in done.stdout + done.stderr
    assert done.returncode == code


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_are_valid(path: Path) -> None:
    assert load_manifests(path.read_text())


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
