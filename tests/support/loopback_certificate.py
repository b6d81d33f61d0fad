"""Certificates for servers of tests on this machine."""

from __future__ import annotations

import subprocess
from pathlib import Path


def issue_certificate(folder: Path, address: str = "127.0.0.1") -> tuple[Path, Path]:
    """Return files of an address's certificate, which is its own authority, and of its key."""
    certificate, key = folder / "loopback.crt", folder / "loopback.key"
    new = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=fetcher-test -days 2"
    )
    extensions = (f"subjectAltName=IP:{address}", "basicConstraints=critical,CA:FALSE")
    files = [
        "-addext",
        extensions[0],
        "-addext",
        extensions[1],
        "-out",
        str(certificate),
        "-keyout",
        str(key),
    ]
    subprocess.run([*new.split(), *files], check=True, capture_output=True)
    return certificate, key
