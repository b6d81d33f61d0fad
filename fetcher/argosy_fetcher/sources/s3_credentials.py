"""S3 credentials: finds keys and region as the AWS tools do, among named values and in the tools' files.

In this order: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN; a web identity (AWS_ROLE_ARN and
AWS_WEB_IDENTITY_TOKEN_FILE, as EKS sets them for a service account); static keys of AWS_PROFILE in the tools' files; a
container's credentials (AWS_CONTAINER_CREDENTIALS_*); the role of a machine on EC2 (`instance_metadata`); else none,
and requests are not signed. The tools' files are left out with a warning if they are malformed and nobody named them.
"""

from __future__ import annotations

import configparser
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from argosy_fetcher.errors import AccessDenied
from argosy_fetcher.sources.credential_values import header_value, is_true, read_text
from argosy_fetcher.sources.instance_metadata import role_service

if TYPE_CHECKING:
    from obstore.store import S3Config

_log = logging.getLogger(__name__)
_DEFAULT_PROFILE = "default"


def s3_config(source: str, credentials: Mapping[str, str]) -> S3Config:
    """Return credentials and region for obstore; `skip_signature` is set if there are no credentials. Makes no request,
    except to the metadata service of a machine on EC2.

    Args:
        source: name of the model's source, for errors.

    Raises:
        AccessDenied: credentials are incomplete, malformed or of a kind that is not supported.
    """
    config = _credentials(source, credentials)
    if region := _region(source, credentials):
        config["region"] = region
    return config


def _credentials(source: str, credentials: Mapping[str, str]) -> S3Config:
    if is_true(credentials, "AWS_SKIP_SIGNATURE"):
        return {"skip_signature": True}
    key, secret = credentials.get("AWS_ACCESS_KEY_ID", ""), credentials.get("AWS_SECRET_ACCESS_KEY", "")
    if bool(key) != bool(secret):
        raise AccessDenied(f"{source}: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are needed together")
    if key:
        return _keys(source, key, secret, credentials.get("AWS_SESSION_TOKEN", ""))
    role, token_file = credentials.get("AWS_ROLE_ARN"), credentials.get("AWS_WEB_IDENTITY_TOKEN_FILE")
    if role and token_file:
        return _web_identity(role, token_file, credentials)
    if (config := _profile_keys(source, credentials)) is not None:
        return config
    if path := credentials.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"):
        return {"container_credentials_relative_uri": path}
    url = credentials.get("AWS_CONTAINER_CREDENTIALS_FULL_URI")
    token_file = credentials.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")
    if url and token_file:
        return {"container_credentials_full_uri": url, "container_authorization_token_file": token_file}
    if metadata := role_service(credentials):
        return {"metadata_endpoint": metadata}
    return {"skip_signature": True}


def _web_identity(role: str, token_file: str, credentials: Mapping[str, str]) -> S3Config:
    config: S3Config = {"role_arn": role, "web_identity_token_file": token_file}
    if session := credentials.get("AWS_ROLE_SESSION_NAME"):
        config["role_session_name"] = session
    if url := credentials.get("AWS_ENDPOINT_URL_STS"):
        config["endpoint_url_sts"] = url  # type: ignore[typeddict-unknown-key]
    return config


def _keys(source: str, key: str, secret: str, token: str) -> S3Config:
    config: S3Config = {
        "access_key_id": header_value(source, "AWS_ACCESS_KEY_ID", key),
        "secret_access_key": header_value(source, "AWS_SECRET_ACCESS_KEY", secret),
    }
    if token:
        config["session_token"] = header_value(source, "AWS_SESSION_TOKEN", token)
    return config


def _profile_keys(source: str, credentials: Mapping[str, str]) -> S3Config | None:
    """Static keys of the profile; None if there are none and none was asked for."""
    profile = credentials.get("AWS_PROFILE") or _DEFAULT_PROFILE
    section = _section(source, credentials, "AWS_SHARED_CREDENTIALS_FILE", "credentials", profile)
    key, secret = section.get("aws_access_key_id", ""), section.get("aws_secret_access_key", "")
    if key and secret:
        return _keys(source, key, secret, section.get("aws_session_token", ""))
    if credentials.get("AWS_PROFILE"):
        raise AccessDenied(
            f"{source}: the AWS tools' credentials file has no keys for the profile {profile!r}; for other kinds of "
            f"profiles run `eval $(aws configure export-credentials --profile {profile} --format env)`"
        )
    return None


def _region(source: str, credentials: Mapping[str, str]) -> str:
    """The region as named, or as the profile has it; empty if neither."""
    named = credentials.get("AWS_REGION") or credentials.get("AWS_DEFAULT_REGION")
    if not named:
        profile = credentials.get("AWS_PROFILE") or _DEFAULT_PROFILE
        section = profile if profile == _DEFAULT_PROFILE else f"profile {profile}"
        named = _section(source, credentials, "AWS_CONFIG_FILE", "config", section).get("region", "")
    return header_value(source, "AWS_REGION", named)


def _section(
    source: str, credentials: Mapping[str, str], variable: str, file_name: str, section: str
) -> Mapping[str, str]:
    """A section of a file of the AWS tools; empty if there is none.

    Args:
        variable: names the file; without it, it is `.aws/FILE_NAME` below HOME.
    """
    if named := credentials.get(variable):
        path = Path(named).expanduser()
    elif home := credentials.get("HOME"):
        path = Path(home, ".aws", file_name)
    else:
        return {}
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(read_text(path))
    except OSError:
        return {}
    except (configparser.Error, ValueError):
        # not the parser's text, which quotes lines
        if named or credentials.get("AWS_PROFILE"):
            raise AccessDenied(f"{source}: {path} is not a file of the AWS tools") from None
        _log.warning("%s is not a file of the AWS tools; it is not used", path)
        return {}
    return parser[section] if parser.has_section(section) else {}
