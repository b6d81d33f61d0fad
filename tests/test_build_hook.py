"""The build hook: wheels are pure unless ARGOSY_COMPILE=1 asks for a compiled router (`make test-wheel`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hatchling", reason="needs hatchling (make install-dev)")

from hatch_build import VARIABLE, CompiledRouterHook

ROOT = Path(__file__).parents[1]


@pytest.fixture
def hook() -> CompiledRouterHook:
    unused: Any = None
    return CompiledRouterHook(str(ROOT), {}, unused, unused, "", "wheel")


@pytest.mark.parametrize("value", [None, "", "0"])
def test_a_wheel_is_pure_by_default(
    value: str | None, hook: CompiledRouterHook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    build_data: dict[str, Any] = {"force_include": {}}
    hook.initialize("standard", build_data)
    assert build_data == {"force_include": {}}
    assert hook.dependencies() == []


def test_an_editable_installation_is_always_pure(
    hook: CompiledRouterHook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    build_data: dict[str, Any] = {"force_include": {}}
    hook.initialize("editable", build_data)
    assert build_data == {"force_include": {}}


def test_a_compiled_wheel_needs_the_pinned_mypy(
    hook: CompiledRouterHook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    assert any(needed.startswith("mypy==") for needed in hook.dependencies())


def test_another_value_is_refused(hook: CompiledRouterHook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(ValueError, match="ARGOSY_COMPILE=yes"):
        hook.dependencies()
