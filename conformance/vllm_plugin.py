"""Pytest plugin that runs the server tests of vLLM's source distribution against a server of ours, or vLLM's own.

It puts stand-ins in place of `vllm` and of the fixture that starts servers, leaves out what no conformance model can
answer (`vllm_tests.py` has the reasons), and writes every result as a line of JSON.
"""

from __future__ import annotations

import inspect
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

import vllm_stand_ins
from remote_server import IGNORED_FLAGS, RemoteOpenAIServer, Target
from vllm_tests import MODEL_NAMES, SKIPPED, TESTS, TestFile

RESULTS = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--server-kind", choices=("argosy", "vllm"), required=True)
    group.addoption("--server-python", required=True)
    group.addoption("--server-version", required=True)
    group.addoption("--server-model", required=True)
    group.addoption("--server-logs", type=Path, required=True)
    group.addoption("--results", type=Path, required=True)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as by Ctrl-C, which stops the servers
    options = early_config.known_args_namespace
    RemoteOpenAIServer.target = Target(
        options.server_kind, options.server_python, options.server_model, options.server_logs, MODEL_NAMES
    )
    vllm_stand_ins.install(early_config.rootpath, options.server_model, options.server_version)
    early_config.stash[RESULTS] = options.results


def pytest_unconfigure(config: pytest.Config) -> None:
    RemoteOpenAIServer.target.close()


def test_file(item: pytest.Item) -> TestFile:
    """Return the entry of the table that a test belongs to."""
    path = item.path.relative_to(item.config.rootpath / "tests").as_posix()
    return TESTS[path]


def left_out(item: pytest.Item) -> str | None:
    """Return why a test is not run; None if it is."""
    name = item.name
    entry = test_file(item)
    for pattern, reason in (*entry.skip.items(), *SKIPPED.items()):
        if re.search(pattern, name):
            return reason
    fixtures = getattr(item, "fixturenames", ())
    if any(
        re.search("server|client", fixture) for fixture in fixtures
    ) or "RemoteOpenAIServer" in inspect.getsource(item.obj):  # type: ignore[attr-defined]
        return None
    return "tests vLLM's own classes, without a server"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    vllm_stand_ins.end_collection()
    kept = []
    for item in items:
        reason = left_out(item)
        if reason is None:
            kept.append(item)
        else:
            _write(config, item.nodeid, "left out", reason)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    entry = test_file(item)
    RemoteOpenAIServer.ignored = {
        name: count for name, count in IGNORED_FLAGS.items() if name not in entry.kept
    }
    RemoteOpenAIServer.thinks = entry.thinks
    RemoteOpenAIServer.reuse = not entry.own_server


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    outcome = yield
    report = outcome.get_result()
    if report.failed or report.skipped or report.when == "call":
        result = "failed" if report.failed else "skipped" if report.skipped else "passed"
        message = str(call.excinfo.value) if call.excinfo is not None else ""
        _write(item.config, item.nodeid, result, message[:600])


@pytest.fixture(scope="session")
def local_asset_server() -> None:
    """Stands for vLLM's server of images, which tests of text models name but do not use."""


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        raise pytest.UsageError(f"{report.nodeid} cannot be collected:\n{report.longreprtext}")


def _write(config: pytest.Config, test: str, result: str, message: str) -> None:
    line = json.dumps({"test": test.removeprefix("tests/"), "result": result, "message": message})
    with config.stash[RESULTS].open("a") as file:
        file.write(line + "\n")
