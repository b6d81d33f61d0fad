"""Google credentials: finds them as Google's tools do, among named values, in files and on the machine.

In this order: GOOGLE_BEARER_TOKEN; GOOGLE_SERVICE_ACCOUNT_KEY (the JSON itself); GOOGLE_APPLICATION_CREDENTIALS (its
path); gcloud's own file below HOME, unless it cannot be used, which is a warning; the service account of a machine on
Google Cloud, or of a pod with workload identity there; else none. STORAGE_EMULATOR_HOST means none.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from argosy_fetcher.errors import AccessDenied
from argosy_fetcher.sources.credential_values import header_value, is_true, read_text

if TYPE_CHECKING:
    from obstore.store import GCSConfig

_log = logging.getLogger(__name__)
_MACHINE = Path("/sys/class/dmi/id/product_name")
_GCLOUD_FILE = ".config/gcloud/application_default_credentials.json"
_TYPES = ("service_account", "authorized_user")


@dataclass(frozen=True)
class GoogleAccess:
    """How requests are authorized."""

    config: GCSConfig
    token: str = ""
    """Sent as it is, if not empty."""
    is_anonymous: bool = False


def google_access(source: str, credentials: Mapping[str, str]) -> GoogleAccess:
    """Return how to authorize requests. Makes none.

    Args:
        source: name of the model's source, for errors.

    Raises:
        AccessDenied: credentials are malformed, or of a kind that is not supported.
    """
    if credentials.get("STORAGE_EMULATOR_HOST") or is_true(credentials, "GOOGLE_SKIP_SIGNATURE"):
        return GoogleAccess({"skip_signature": True}, is_anonymous=True)
    if token := credentials.get("GOOGLE_BEARER_TOKEN"):
        return GoogleAccess({}, header_value(source, "GOOGLE_BEARER_TOKEN", token))
    if key := credentials.get("GOOGLE_SERVICE_ACCOUNT_KEY"):
        return GoogleAccess({"service_account_key": key})
    if (path := _credentials_file(source, credentials)) is not None:
        return GoogleAccess({"application_credentials": str(path)})
    if _has_metadata(credentials):
        return GoogleAccess({})
    return GoogleAccess({"skip_signature": True}, is_anonymous=True)


def _credentials_file(source: str, credentials: Mapping[str, str]) -> Path | None:
    if named := credentials.get("GOOGLE_APPLICATION_CREDENTIALS"):
        path = Path(named).expanduser()
    else:
        path = Path(credentials.get("HOME", "/nonexistent"), _GCLOUD_FILE)
        if not path.is_file():
            return None
    if (fault := _fault(path)) is None:
        return path
    if named:
        raise AccessDenied(f"{source}: {path} {fault}")
    _log.warning("%s %s; it is not used", path, fault)
    return None


def _fault(path: Path) -> str | None:
    """What is wrong with a file of credentials; None if nothing."""
    try:
        kind = json.loads(read_text(path))["type"]
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError):
        return "is not a file of Google credentials"
    if kind not in _TYPES:
        return (
            f"has credentials of a type other than {' and '.join(_TYPES)}; set "
            "GOOGLE_BEARER_TOKEN=$(gcloud auth print-access-token)"
        )
    return None


def _has_metadata(credentials: Mapping[str, str]) -> bool:
    """Whether this machine gives out tokens of a service account, told as google-auth does: by its firmware's name."""
    if credentials.get("GCE_METADATA_HOST"):
        return True
    try:
        return _MACHINE.read_text("utf-8").startswith("Google")
    except (OSError, ValueError):
        return False
