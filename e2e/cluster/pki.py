"""The certificates and kubeconfigs of the cluster, made by openssl: the smallest set that works.

One CA signs everything but the front proxy's certificate. The API server's client certificate towards kubelets is
what makes logs, exec and port-forward work. With the front proxy's it presents itself to aggregated APIs; that has a CA
of its own, because who holds a certificate of it may speak for every user.
"""

from __future__ import annotations

import json
from pathlib import Path

from cluster.settings import HOST_ADDRESS, KUBERNETES_SERVICE_ADDRESS, NodeSettings, Settings
from cluster.shell import run

VALID_DAYS = "30"
FRONT_PROXY = "front-proxy-client"
"""Name of the certificate that the API server presents to aggregated APIs."""

API_SERVER_NAMES = (
    "DNS:kubernetes",
    "DNS:kubernetes.default",
    "DNS:kubernetes.default.svc",
    "DNS:kubernetes.default.svc.cluster.local",
    "DNS:localhost",
    "IP:127.0.0.1",
    f"IP:{HOST_ADDRESS}",
    f"IP:{KUBERNETES_SERVICE_ADDRESS}",
)


def create(settings: Settings) -> None:
    """Write every key, certificate and kubeconfig of a fresh cluster."""
    folder = settings.pki
    folder.mkdir(parents=True, mode=0o700)
    _ca(folder, "ca")
    _ca(folder, "front-proxy-ca")
    _issue(folder, FRONT_PROXY, f"/CN={FRONT_PROXY}", "clientAuth", authority="front-proxy-ca")
    run("openssl", "genrsa", "-out", folder / "sa.key", "2048")
    run("openssl", "rsa", "-in", folder / "sa.key", "-pubout", "-out", folder / "sa.pub")
    _issue(folder, "apiserver", "/CN=kube-apiserver", "serverAuth", API_SERVER_NAMES)
    _issue(folder, "apiserver-kubelet-client", "/O=system:masters/CN=apiserver-kubelet-client", "clientAuth")
    for name, subject in (
        ("admin", "/O=system:masters/CN=admin"),
        ("controller-manager", "/CN=system:kube-controller-manager"),
        ("scheduler", "/CN=system:kube-scheduler"),
        ("proxy", "/CN=system:kube-proxy"),
    ):
        _issue(folder, name, subject, "clientAuth")
        _kubeconfig(settings, name, folder / f"{name}.kubeconfig")
    for node in settings.nodes:
        create_node(settings, node)
    _kubeconfig(settings, "admin", settings.kubeconfig)


def create_node(settings: Settings, node: NodeSettings) -> None:
    """Write the certificates and the kubeconfig of a node."""
    folder = settings.pki
    _issue(folder, node.name, f"/O=system:nodes/CN=system:node:{node.name}", "clientAuth")
    _kubeconfig(settings, node.name, folder / f"{node.name}.kubeconfig")
    names = (f"DNS:{node.name}", f"IP:{node.address}")
    _issue(folder, f"{node.name}-serving", f"/O=system:nodes/CN=system:node:{node.name}", "serverAuth", names)


def create_serving(settings: Settings, name: str, names: tuple[str, ...]) -> tuple[Path, Path]:
    """Write the serving certificate of a test's own server, signed by the cluster's CA; returns it and its key.

    Args:
        names: what clients call the server, as `DNS:name` and `IP:address`.
    """
    _issue(settings.pki, name, f"/CN={name}", "serverAuth", names)
    return settings.pki / f"{name}.crt", settings.pki / f"{name}.key"


def _new_key(path: Path) -> None:
    run("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", path)
    path.chmod(0o600)


def _ca(folder: Path, name: str) -> None:
    key, certificate = folder / f"{name}.key", folder / f"{name}.crt"
    _new_key(key)
    run(
        *("openssl", "req", "-x509", "-new", "-key", key, "-out", certificate),
        *(
            "-days",
            VALID_DAYS,
            "-subj",
            f"/CN=argosy-e2e-{name}",
            "-addext",
            "keyUsage=critical,keyCertSign,digitalSignature",
        ),
    )


def _issue(
    folder: Path,
    name: str,
    subject: str,
    usage: str,
    alternative_names: tuple[str, ...] = (),
    authority: str = "ca",
) -> None:
    key, request, certificate = (folder / f"{name}{suffix}" for suffix in (".key", ".csr", ".crt"))
    extensions = folder / f"{name}.ext"
    lines = [
        "basicConstraints=CA:FALSE",
        "keyUsage=digitalSignature,keyEncipherment",
        f"extendedKeyUsage={usage}",
    ]
    if alternative_names:
        lines.append(f"subjectAltName={','.join(alternative_names)}")
    extensions.write_text("\n".join(lines) + "\n")
    _new_key(key)
    run("openssl", "req", "-new", "-key", key, "-subj", subject, "-out", request)
    run(
        *(
            "openssl",
            "x509",
            "-req",
            "-in",
            request,
            "-out",
            certificate,
            "-days",
            VALID_DAYS,
            "-extfile",
            extensions,
        ),
        *("-CA", folder / f"{authority}.crt", "-CAkey", folder / f"{authority}.key", "-CAcreateserial"),
    )
    request.unlink()
    extensions.unlink()


def _kubeconfig(settings: Settings, name: str, path: Path) -> None:
    """A kubeconfig that points at the certificate files of `name`; JSON is YAML."""
    folder = settings.pki
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": "argosy-e2e",
                "cluster": {
                    "server": f"https://{settings.host_address}:{settings.api_port}",
                    "certificate-authority": str(folder / "ca.crt"),
                },
            }
        ],
        "users": [
            {
                "name": name,
                "user": {
                    "client-certificate": str(folder / f"{name}.crt"),
                    "client-key": str(folder / f"{name}.key"),
                },
            }
        ],
        "contexts": [{"name": "argosy-e2e", "context": {"cluster": "argosy-e2e", "user": name}}],
        "current-context": "argosy-e2e",
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
    path.chmod(0o600)
