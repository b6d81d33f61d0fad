"""`kubectl argosy`: what it asks kubectl, and the router behind a port-forward."""

from __future__ import annotations

import base64
import http.server
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_kubectl import fake_kubectl

from argosy.main import KUBECTL_COMMANDS, kubectl_main
from argosy_protocol.headers import internal_key
from argosy_protocol.reports import ADMIN_KEY_UID

FLEET_KEY = b"0123456789abcdef"
OF_QWEN = "--selector inference.argosy.dev/service=qwen,app.kubernetes.io/component in (engine,engine-node)"


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what kubectl answers."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return lambda table: fake_kubectl(tmp_path, table)


@pytest.mark.parametrize("command", [command.name for command in KUBECTL_COMMANDS])
def test_a_command_shows_its_arguments(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        kubectl_main([command, "--help"])
    assert ending.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: kubectl argosy {command}")


def test_help_and_wrong_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert kubectl_main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {command.name} " in shown for command in KUBECTL_COMMANDS)
    assert kubectl_main([]) == 2
    assert kubectl_main(["wy"]) == 2
    assert "'wy' is not a command" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "words", "code", "said"),
    [
        ({"error": 'error: the server doesn\'t have a resource type "x"'}, [], 1, "install the chart"),
        ({"items": []}, [], 0, "no services in this namespace; -A"),
        ({"items": []}, ["-A"], 0, "no services in the cluster"),
    ],
    ids=["no definition", "none here", "none"],
)
def test_top_says_that_there_is_nothing_to_list(
    answers: Any,
    capsys: pytest.CaptureFixture[str],
    answer: dict[str, Any],
    words: list[str],
    code: int,
    said: str,
) -> None:
    answers({"get": answer})
    assert kubectl_main(["top", *words]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err


def test_top_lists_services_and_the_restarts_of_their_engines(
    answers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ready = {"type": "Ready", "status": "False", "reason": "FetchingModel"}
    status = {"routable": "0/2", "model": "qwen", "modelCache": "43 %", "conditions": [ready]}
    labels = {"inference.argosy.dev/service": "qwen"}
    pods = [
        {
            "metadata": {"namespace": "team", "labels": labels},
            "status": {"containerStatuses": [{"restartCount": count}]},
        }
        for count in (1, 3)
    ]
    answers(
        {
            "get inferenceservices.inference.argosy.dev --all-namespaces": {
                "items": [
                    {"metadata": {"name": "qwen", "namespace": "team"}, "status": status},
                    {"metadata": {"name": "new", "namespace": "team"}},
                ]
            },
            "get pods": {"items": pods},
        }
    )
    assert kubectl_main(["top", "-A"]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == [
        "NAMESPACE",
        "SERVICE",
        "READY",
        "ROUTABLE",
        "RESTARTS",
        "MODEL",
        "CACHE",
        "REASON",
    ]
    assert first.split() == ["team", "qwen", "False", "0/2", "4", "qwen", "43", "%", "FetchingModel"]
    assert second.split() == ["team", "new", "Unknown", "-", "0", "-", "-"]


def test_logs_are_those_of_all_pods_of_the_service(answers: Any, capfd: pytest.CaptureFixture[str]) -> None:
    answers(
        {
            f"--namespace=team get pods {OF_QWEN}": {"items": [{"metadata": {"name": "qwen-0"}}]},
            f"--namespace=team logs {OF_QWEN} --prefix --tail=5 --all-containers": {
                "text": "[qwen-0] hello\n"
            },
        }
    )
    assert kubectl_main(["logs", "qwen", "-n", "team", "--tail", "5"]) == 0
    assert capfd.readouterr().out == "[qwen-0] hello\n"
    assert kubectl_main(["logs", "other", "-n", "team"]) == 1


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (
            {
                "get inferenceservices.inference.argosy.dev qwen": {
                    "error": 'Error from server (NotFound): inferenceservices.inference.argosy.dev "qwen" not found'
                },
                "get inferenceservices.inference.argosy.dev": {"items": [{"metadata": {"name": "phi"}}]},
            },
            '"qwen" not found; in this namespace there are: phi. `-n NAMESPACE` looks elsewhere',
        ),
        (
            {"get inferenceservices": {"error": 'error: the server doesn\'t have a resource type "x"'}},
            "install the chart",
        ),
        (
            {"get inferenceservices.inference.argosy.dev qwen": {"metadata": {"namespace": "team"}}},
            "'qwen' has no pods, so no logs; `kubectl argosy why qwen -n team` says why",
        ),
    ],
    ids=["no such service", "no definition", "no pods"],
)
def test_logs_of_a_service_without_pods_say_why_there_are_none(
    answers: Any, capsys: pytest.CaptureFixture[str], table: dict[str, Any], told: str
) -> None:
    nothing = {"text": ""}  # as kubectl answers a selector that selects nothing
    answers({f"get pods {OF_QWEN}": {"items": []}, f"logs {OF_QWEN}": nothing, **table})
    assert kubectl_main(["logs", "qwen"]) == 1
    assert told in capsys.readouterr().err


def test_logs_need_no_right_to_read_services_or_to_list_pods(
    answers: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    refused = {"error": "Error from server (Forbidden): pods is forbidden"}
    answers({"get": refused, f"logs {OF_QWEN}": {"text": "hello\n"}})
    assert kubectl_main(["logs", "qwen"]) == 0
    assert capfd.readouterr().out == "hello\n"


class AdminPort(http.server.BaseHTTPRequestHandler):
    """Answers /decisions to whoever has the admin key."""

    def do_GET(self) -> None:
        expected = f"Bearer {internal_key(FLEET_KEY, ADMIN_KEY_UID)}"
        is_right = self.headers["authorization"] == expected and self.path.startswith("/decisions?limit=7")
        body = b"[]" if is_right else b'{"error": {"message": "no"}}'
        self.send_response(200 if is_right else 401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def cluster_with_router(port: int, key: bytes) -> dict[str, Any]:
    containers = [{"name": "router", "args": ["router", "--port=8080"]}]
    return {
        "--namespace=llm get secret argosy-fleet-key": {"data": {"key": base64.b64encode(key).decode()}},
        "get deployment argosy-router": {
            "spec": {"template": {"spec": {"containers": containers}}},
            "status": {"availableReplicas": 1},
        },
        "port-forward --address=127.0.0.1 deployment/argosy-router :8081": {
            "text": f"Forwarding from 127.0.0.1:{port} -> 8081\n",
            "stays": True,
        },
    }


def test_route_asks_a_router_through_a_port_forward(answers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), AdminPort) as server:
        threading.Thread(target=server.serve_forever, args=(0.002,), daemon=True).start()
        answers(cluster_with_router(server.server_port, FLEET_KEY))
        words = ["route", "--router-namespace", "llm", "--", "--recent", "7", "-o", "json"]
        code = kubectl_main(words)
        server.shutdown()
    assert (code, json.loads(capsys.readouterr().out)) == (0, [])


def test_a_router_that_cannot_be_reached_and_a_key_that_is_none(
    answers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    table = cluster_with_router(1, FLEET_KEY)
    forward = next(words for words in table if words.startswith("port-forward"))
    answers(table | {forward: {"error": "error: no pod is running"}})
    assert kubectl_main(["route", "m", "p", "--router-namespace", "llm"]) == 1
    assert "cannot reach port 8081 of deployment/argosy-router: error: no pod" in capsys.readouterr().err
    answers(cluster_with_router(1, b"short"))
    assert kubectl_main(["route", "m", "p", "--router-namespace", "llm"]) == 1
    assert "argosy-fleet-key" in capsys.readouterr().err


def test_that_no_router_runs_is_said_before_kubectl_waits_for_one(
    answers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    table = cluster_with_router(1, FLEET_KEY)
    answers(table | {"get deployment argosy-router": {"spec": {}, "status": {"availableReplicas": 0}}})
    assert kubectl_main(["route", "m", "p", "--router-namespace", "llm"]) == 1
    assert "no router runs: `kubectl get pods -n llm`" in capsys.readouterr().err


def test_a_release_elsewhere_is_looked_for_with_an_option(
    answers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    answers({"get secret": {"error": 'Error from server (NotFound): namespaces "argosy-system" not found'}})
    assert kubectl_main(["route", "m", "p"]) == 1
    assert "--router-namespace" in capsys.readouterr().err
    missing = 'Error from server (NotFound): deployments.apps "argosy-router" not found'
    answers(cluster_with_router(1, FLEET_KEY) | {"get deployment argosy-router": {"error": missing}})
    assert kubectl_main(["route", "m", "p", "--router-namespace", "llm"]) == 1
    assert "--router-namespace" in capsys.readouterr().err
