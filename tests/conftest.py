"""What all tests share: the lanes by which a run is chosen (.ci/gate), Hypothesis without limits of time and HTTP
clients with a generous one, because a machine that also runs other tests misses shorter ones, and which are made
quickly, and Triton's interpreter for the kernels.

`--lanes` names what runs, as `make test` does; without it everything that the arguments name runs. Hypothesis draws the
same examples each time, so that a change is not red for what it did not touch; `--lanes full` draws new ones, and more.

Triton decides when it decorates a function, its own library's (`tl.sum`) included: the variable must be set when triton
is imported, which other libraries do. It is not left to subprocesses, where kernels are compiled. The interpreter
multiplies matrices by NumPy, whose threads would wait for one another longer than such small products take; their
number, too, is read once.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import inspect
import json
import os
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from gate.lanes import FULL, UNITS, BadTable, Lanes

ROOT = Path(__file__).resolve().parents[1]
SECONDS = ROOT / ".ci" / "gate" / "seconds.json"
"""Files of tests that take long, and their seconds when they were last recorded."""

if "ARGOSY_TEST_GPU" not in os.environ:
    os.environ["TRITON_INTERPRET"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    try:
        import triton
    except ImportError:  # there is none for this platform; tests/gpu is left out
        pass
    else:
        triton.knobs.runtime.interpret = True
    del os.environ["TRITON_INTERPRET"], os.environ["OPENBLAS_NUM_THREADS"]

settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("argosy", settings.get_profile("random"), derandomize=True, max_examples=50)
settings.load_profile("argosy")

# It gives up connecting and reading after 5 s where nobody says otherwise. The object is the default of all functions
# and clients.
try:
    import httpx

    default = inspect.signature(httpx.get).parameters["timeout"].default
    default.connect = default.read = default.write = default.pool = 60.0

    # Each would read the certificates of all public authorities, which takes 35 ms. No test talks to their hosts.
    context = ssl.create_default_context(cafile=Path(__file__).parent / "support" / "public_authority.pem")
    for name in filter(importlib.util.find_spec, ("httpx", "httpx2")):  # of which the SDKs use one
        library = importlib.import_module(name)
        functions = [library.Client.__init__, library.AsyncClient.__init__, library.request, library.stream]
        functions += [library.get, library.post, library.put, library.patch, library.delete, library.head]
        for function in functions:
            inspect.unwrap(function).__kwdefaults__["verify"] = context
        for function in (library.HTTPTransport.__init__, library.AsyncHTTPTransport.__init__):
            assert list(inspect.signature(function).parameters)[1] == "verify"
            function.__defaults__ = (context, *function.__defaults__[1:])
except ImportError:  # a machine with what the GPU's tests need alone
    pass


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--lanes",
        help="lanes of .ci/gate/lanes.toml, such as 'units gpu', all or full; default: whatever is named",
    )


class ChosenLanes:
    """Leaves out the tests of other lanes, and puts the files that take longest first."""

    def __init__(self, lanes: Lanes, chosen: frozenset[str]) -> None:
        self.lanes = lanes
        self.chosen = chosen
        self._lane_of = functools.cache(lanes.of_test)

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        if collection_path.suffix != ".py" or not collection_path.is_relative_to(ROOT):
            return None
        path = collection_path.relative_to(ROOT).as_posix()
        has_smoke = UNITS in self.chosen and self.lanes.has_smoke(path)
        return True if self._lane_of(path) not in self.chosen and not has_smoke else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept, left_out = [], []
        for item in items:
            (kept if self._is_chosen(item) else left_out).append(item)
        config.hook.pytest_deselected(items=left_out)
        seconds: dict[str, float] = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
        items[:] = sorted(kept, key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0.0))

    def _is_chosen(self, item: pytest.Item) -> bool:
        if item.get_closest_marker("full") and FULL not in self.chosen:
            return False
        return self.lanes.holds(item.nodeid, self.chosen)


class StartedProcesses:
    """Notes in a test's report how many Pythons it started (property `started`): `gate slow` reads it.

    Others, such as git, take milliseconds.
    """

    def __init__(self) -> None:
        self.count = 0
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            words = arguments[1] if isinstance(arguments[1], (list, tuple)) else [arguments[1]]
            self.count += any(
                "python" in os.fsdecode(word) or "argosy" in os.fsdecode(word) for word in words
            )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.before = self.count
        return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if self.count > self.before:
            item.user_properties.append(("started", self.count - self.before))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Fail a test that leaves the garbage collector otherwise than it was.

    A callback that a program's `main` has left freezes what is alive while later tests run: what they have dropped
    stays, and nothing shows who refers to it.
    """
    yield
    left = [each for each in gc.callbacks if each.__module__.startswith("argosy")]
    was_enabled = gc.isenabled()
    for each in left:
        gc.callbacks.remove(each)
    gc.enable()
    assert not left, f"the collector still calls {left}"
    assert was_enabled, "the collector is still disabled"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the SDKs that tests have imported connect within 60 s instead of 5; the object is all clients' default. Their
    import would take 2 s here, where the process that only gives out tests to others waits for it as well.

    Keep the garbage collector from what all tests have imported: a million objects, 0.2 s each time. It rested until
    now.
    """
    for name in ("anthropic", "openai"):
        if name in sys.modules:
            sys.modules[name].DEFAULT_TIMEOUT.connect = 60.0
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.enable()  # if none was collected
    gc.unfreeze()  # libraries warn of what is not collected in the end


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # what is imported stays
    config.pluginmanager.register(StartedProcesses(), "started-processes")
    if (words := config.getoption("--lanes")) is None:
        return
    try:
        lanes = Lanes.read()
        chosen = lanes.parse(words.split())
    except BadTable as error:
        raise pytest.UsageError(str(error)) from None
    for name in config.args:  # of which xdist says nothing but that no tests ran
        if not (config.invocation_params.dir / name.partition("::")[0]).exists():
            raise pytest.UsageError(f"there is no {name}; TESTS= takes files and folders of tests")
    if FULL in chosen:
        settings.load_profile("random")
    config.pluginmanager.register(ChosenLanes(lanes, chosen), "chosen-lanes")
