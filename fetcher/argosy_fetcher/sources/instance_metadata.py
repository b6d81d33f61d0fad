"""Instance metadata of EC2: whether this machine has a role, whose credentials obstore then gets from the same service.

AWS's tools ask the service's address on every machine. Here only machines whose firmware is Amazon's do, because
elsewhere nobody answers there, and public buckets should not wait for that. A machine without a role, and a pod that is
kept from the service, read public buckets.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import httpx

from argosy_fetcher.sources.credential_values import is_true

PROBE_TIMEOUT_S: Final = 1.0
"""As in AWS's tools: the service runs beside the machine."""
VENDOR_FILE: Final = Path("/sys/class/dmi/id/sys_vendor")
_ADDRESS: Final = "http://169.254.169.254"
_ROLES: Final = "/latest/meta-data/iam/security-credentials/"


def role_service(credentials: Mapping[str, str], vendor_file: Path = VENDOR_FILE) -> str:
    """Return the URL of the service that gives out credentials of this machine's role; empty if it has none.

    AWS_METADATA_ENDPOINT names the service and says that there is a role; AWS_EC2_METADATA_SERVICE_ENDPOINT names it,
    and AWS_EC2_METADATA_DISABLED forbids to ask it.
    """
    if is_true(credentials, "AWS_EC2_METADATA_DISABLED"):
        return ""
    if named := credentials.get("AWS_METADATA_ENDPOINT"):
        return named
    url = credentials.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or (_ADDRESS if is_ec2(vendor_file) else "")
    url = url.rstrip("/")
    return url if url and _has_role(url) else ""


def is_ec2(vendor_file: Path) -> bool:
    """Whether a machine's firmware, as this file names its vendor, is that of EC2."""
    try:
        return vendor_file.read_text("utf-8").strip() == "Amazon EC2"
    except (OSError, ValueError):
        return False


def _has_role(url: str) -> bool:
    try:
        with httpx.Client(timeout=PROBE_TIMEOUT_S, trust_env=False) as client:
            token = client.put(
                f"{url}/latest/api/token", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"}
            )
            token.raise_for_status()
            roles = client.get(f"{url}{_ROLES}", headers={"X-aws-ec2-metadata-token": token.text})
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return False
    return roles.status_code == 200 and bool(roles.text.strip())
