"""What docs/access.md and docs/limits.md tell people to write and run."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from argosy_router.auth.api_keys import KeyTable
from argosy_router.auth.key_terms import KeyTerms
from argosy_router.config import RouterConfig
from argosy_router.main import build_parser, config_of

DOCS = Path(__file__).parents[2] / "docs" / "access.md"


def block(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


def test_the_key_that_the_commands_make_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *making, serving = block("bash").splitlines()
    made = subprocess.run(
        ["bash", "-euc", "\n".join([*making, 'printf %s "$key"'])],
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    monkeypatch.chdir(tmp_path)
    _, _, *flags = shlex.split(serving)
    config = config_of(build_parser().parse_args(flags), {})
    assert config.api_keys_file is not None
    table = KeyTable(is_closed=True)
    assert table.load(config.api_keys_file.read_text(), 0.0) == []
    account = table.account_of(b"Bearer " + made.stdout)
    assert account is not None
    assert account.name == "shop"


def test_the_example_of_a_key_file_is_one() -> None:
    table = KeyTable(is_closed=True)
    assert table.load(block("keys"), 0.0) == []
    assert table.account_of(b"Bearer sk-a-key-as-it-is") is not None


def test_all_terms_and_defaults_are_documented() -> None:
    text = DOCS.read_text()
    assert [term for term in KeyTerms.__struct_fields__ if f"`{term}`" not in text] == []
    text = DOCS.with_name("limits.md").read_text()
    limits = RouterConfig().flow_control
    assert f"| {limits.max_queued_requests} |" in text
    assert f"| {limits.max_queued_bytes >> 20} MiB of bodies |" in text
    assert f"| {limits.queue_timeout_s:.0f} s |" in text
