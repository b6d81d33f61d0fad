"""A small external-metrics API (external.metrics.k8s.io/v1beta1), for HorizontalPodAutoscalers.

Serves TLS from this machine and takes requests only from the front proxy: a client certificate of the CA, with one of
the names, that the cluster publishes in kube-system/extension-apiserver-authentication. Notes which users ask.
"""

from __future__ import annotations

import base64
import datetime
import http.server
import json
import ssl
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import pki
from cluster.kubectl import Kubectl
from cluster.settings import HOST_ADDRESS, Settings
from cluster.shell import poll

GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
NAME = "external-metrics"
NAMESPACE = "kube-system"
API_SERVICE = f"{VERSION}.{GROUP}"


@dataclass
class ExternalMetrics:
    """Values by metric, which a test sets, and who has asked for them."""

    port: int = 0
    values: dict[str, int] = field(default_factory=dict)
    users: set[str] = field(default_factory=set)


@contextmanager
def external_metrics(settings: Settings, kubectl: Kubectl) -> Iterator[ExternalMetrics]:
    """Serve the API, and register it until the block ends; yields it when the API server finds it available."""
    metrics = ExternalMetrics()
    trusted = kubectl.get("configmap", "extension-apiserver-authentication", "-n", NAMESPACE)["data"]
    names = frozenset(json.loads(trusted["requestheader-allowed-names"]))
    certificate, key = pki.create_serving(settings, NAME, (f"DNS:{NAME}.{NAMESPACE}.svc",))
    server = _Server((HOST_ADDRESS, 0), _handler(metrics, names))
    server.socket = _context(certificate, key, trusted["requestheader-client-ca-file"]).wrap_socket(
        server.socket, server_side=True, do_handshake_on_connect=False
    )
    metrics.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        kubectl.apply(*_registration(metrics.port, (settings.pki / "ca.crt").read_bytes()))
        poll("the external-metrics API to be available", lambda: _is_available(kubectl), 60, interval=0.5)
        yield metrics
    finally:
        kubectl("delete", "apiservice", API_SERVICE, "--ignore-not-found")
        kubectl("delete", "service,endpointslice", NAME, "-n", NAMESPACE, "--ignore-not-found")
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Nothing: a client without the right certificate ends its connection with an error, as it should."""


def _context(certificate: Path, key: Path, client_ca: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with tempfile.NamedTemporaryFile("w", suffix=".crt") as file:
        file.write(client_ca)
        file.flush()
        context.load_verify_locations(file.name)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _handler(metrics: ExternalMetrics, names: frozenset[str]) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 60

        def do_GET(self) -> None:
            certificate = self.connection.getpeercert()  # type: ignore[attr-defined]
            subject = {key: value for part in certificate["subject"] for key, value in part}
            if names and subject.get("commonName") not in names:
                self.answer(
                    403, {"kind": "Status", "code": 403, "message": f"{subject} is not the front proxy"}
                )
                return
            path = self.path.partition("?")[0].strip("/").split("/")
            if path == ["apis", GROUP, VERSION]:
                resource = {
                    "name": "*",
                    "namespaced": True,
                    "kind": "ExternalMetricValueList",
                    "verbs": ["get"],
                }
                self.answer(
                    200,
                    {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{GROUP}/{VERSION}",
                     "resources": [{**resource, "singularName": ""}]},
                )  # fmt: skip
            elif (
                len(path) == 6
                and path[:4] == ["apis", GROUP, VERSION, "namespaces"]
                and path[5] in metrics.values
            ):
                metrics.users.add(self.headers.get("x-remote-user", ""))
                self.answer(200, _values(path[5], metrics.values[path[5]]))
            else:
                self.answer(404, {"kind": "Status", "apiVersion": "v1", "code": 404, "status": "Failure"})

        def answer(self, status: int, body: Mapping[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def _values(metric: str, value: int) -> dict[str, Any]:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    item = {"metricName": metric, "metricLabels": {}, "timestamp": now, "value": str(value)}
    return {
        "kind": "ExternalMetricValueList",
        "apiVersion": f"{GROUP}/{VERSION}",
        "metadata": {},
        "items": [item],
    }


def _registration(port: int, ca: bytes) -> list[dict[str, Any]]:
    """A Service without pods whose endpoint is this machine, and the APIService that points at it."""
    metadata = {"name": NAME, "namespace": NAMESPACE}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"ports": [{"port": 443}]},
    }
    endpoints = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {**metadata, "labels": {"kubernetes.io/service-name": NAME}},
        "addressType": "IPv4",
        "ports": [{"port": port, "name": ""}],
        "endpoints": [{"addresses": [HOST_ADDRESS], "conditions": {"ready": True}}],
    }
    registration = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": API_SERVICE},
        "spec": {
            "group": GROUP,
            "version": VERSION,
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "service": {"name": NAME, "namespace": NAMESPACE, "port": 443},
            "caBundle": base64.b64encode(ca).decode(),
        },
    }
    return [service, endpoints, registration]


def _is_available(kubectl: Kubectl) -> bool:
    conditions = kubectl.get("apiservice", API_SERVICE).get("status", {}).get("conditions", [])
    return any(each["type"] == "Available" and each["status"] == "True" for each in conditions)
