"""Which of two variants of the CPU kernels serves on a CPU that the tables do not know."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch

from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.native import build, library
from argosy_engine.native.build import MeasuredChoice, NativeUnavailable, Variant, own_variants
from argosy_engine.native.kernel_choice import kept_figures, measured_figures
from argosy_engine.native.library import Kernels

REAL_FLAGS = build.cpu_flags()
VARIANTS = {each.name: each for each in build.VARIANTS}
UNKNOWN = ("GenuineIntel", 6, 85)
NAMES = "avx512_bf16", "avx512"
SLOWER, FASTER = [2e-5, 2e-4, 8e-4], [2e-5, 1.6e-4, 6e-4]
"""Seconds by rows, of which the geometric means differ by 1.19 times."""


class Meter:
    """Answers with given seconds, and counts how often it is asked."""

    def __init__(self, default: list[float] = SLOWER, rival: list[float] = FASTER) -> None:
        self.seconds, self.asked = dict(zip(NAMES, (default, rival), strict=True)), 0

    def __call__(self, variants: Sequence[Variant]) -> dict[str, list[float]]:
        assert tuple(each.name for each in variants) == NAMES
        self.asked += 1
        return self.seconds


LIBRARIES = build.cache_directory()
"""Where they are built, for the test that loads them."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of what is kept, on an unknown CPU without AMX."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "cpu_model", lambda: UNKNOWN)
    monkeypatch.setattr(build, "cpu_flags", lambda: VARIANTS["avx512_bf16"].cpu_flags)
    return tmp_path / "argosy" / "native"


def first(measure: Meter | None = None) -> str:
    return own_variants(measure)[0].name


@pytest.mark.parametrize(
    ("default", "rival", "chosen"),
    [
        (SLOWER, FASTER, "avx512"),
        (FASTER, SLOWER, "avx512_bf16"),
        (SLOWER, SLOWER, "avx512_bf16"),
        ([1.09e-4] * 3, [1e-4] * 3, "avx512_bf16"),
        ([1.11e-4] * 3, [1e-4] * 3, "avx512"),
        ([1e-5, 1e-4, 2e-3], [2e-5, 1e-4, 1e-3], "avx512_bf16"),  # one choice for all numbers of rows
    ],
)
def test_the_default_is_left_above_a_tenth_and_measured_once(
    default: list[float], rival: list[float], chosen: str, caplog: pytest.LogCaptureFixture
) -> None:
    meter = Meter(default, rival)
    assert first() == "avx512_bf16", "without a measurement the default serves"
    with caplog.at_level(logging.INFO):
        assert first(meter) == chosen
    assert f"CPU kernels {chosen}: measured on this CPU" in caplog.text
    assert (first(), first(meter), first(Meter(rival, default))) == (chosen,) * 3
    assert meter.asked == 1


@pytest.mark.parametrize(
    "model", [("AuthenticAMD", 25, 17), ("AuthenticAMD", 26, 2), ("GenuineIntel", 6, 143)]
)
def test_known_cpus_are_not_measured(
    model: tuple[str, int, int], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "cpu_model", lambda: model)
    meter = Meter()
    assert first(meter) == ("avx512" if model[0] == "GenuineIntel" else "avx512_bf16")
    assert not meter.asked
    assert not cache.exists()


def test_cpus_with_one_variant_or_amx_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter()
    for name in ("avx2", "avx512"):
        monkeypatch.setattr(build, "cpu_flags", lambda name=name: VARIANTS[name].cpu_flags)
        assert first(meter) == name
    monkeypatch.setattr(build, "cpu_flags", lambda: VARIANTS["amx_bf16"].cpu_flags)
    assert first(meter) == "amx_bf16"
    assert not meter.asked
    assert own_variants(meter, has_tiles=False)[0].name == "avx512", "the system may refuse AMX"
    assert meter.asked == 1


def file_of(folder: Path, model: tuple[str, int, int] = UNKNOWN) -> Path:
    return MeasuredChoice(VARIANTS[NAMES[0]], VARIANTS[NAMES[1]], model).file(folder)


GOOD = {"seconds": dict(zip(NAMES, (FASTER, SLOWER), strict=True))}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"null",
        b"[" * 4000,
        b'{"seconds": {}}',
        json.dumps(GOOD)[:-9].encode(),
        json.dumps(GOOD | {"variant": "avx512_bf16"}).encode(),
        json.dumps({"seconds": GOOD["seconds"] | {"evil": FASTER}}).encode(),
        json.dumps({"seconds": {"avx512_bf16": FASTER}}).encode(),
        json.dumps({"seconds": GOOD["seconds"] | {"avx512": SLOWER[:2]}}).encode(),
        json.dumps({"seconds": GOOD["seconds"] | {"avx512": [*SLOWER, 1.0]}}).encode(),
        json.dumps({"seconds": GOOD["seconds"] | {"avx512": [0.0, 1.0, 1.0]}}).encode(),
        json.dumps({"seconds": GOOD["seconds"] | {"avx512": [-1.0, 1.0, 1.0]}}).encode(),
        json.dumps({"seconds": GOOD["seconds"] | {"avx512": [float("nan")] * 3}}).encode(),
        json.dumps({"seconds": GOOD["seconds"] | {"avx512": [1e300] * 3}}).encode(),
        json.dumps({"seconds": GOOD["seconds"] | {"avx512": ["1", "1", "1"]}}).encode(),
        json.dumps(GOOD).encode() + b" " * 5000,
    ],
)
def test_a_damaged_file_is_measured_anew(content: bytes, cache: Path) -> None:
    assert first(Meter()) == "avx512"
    file = file_of(cache)
    file.write_bytes(content)
    meter = Meter()
    assert first() == "avx512_bf16", "nothing is read from it"
    assert first(meter) == "avx512"
    assert meter.asked == 1
    assert kept_figures(file, *NAMES) is not None


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file_is_not_read(kind: str, cache: Path, tmp_path: Path) -> None:
    assert first(Meter()) == "avx512"
    file, elsewhere = file_of(cache), tmp_path / "elsewhere"
    file.rename(elsewhere)
    if kind == "link":
        file.symlink_to(elsewhere)
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.mkdir()
    assert first() == "avx512_bf16"
    # A folder cannot be replaced, so what is measured is not kept, and not used.
    assert first(Meter()) == ("avx512_bf16" if kind == "folder" else "avx512")
    assert not list(cache.glob(".choice-*"))
    assert json.loads(elsewhere.read_bytes())["seconds"]["avx512"] == FASTER


def test_figures_are_of_one_model_and_its_kernels(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter()
    assert first(meter) == "avx512"
    hostile = ("../../x y" * 9, 6, 85)
    for model in (("GenuineIntel", 6, 86), ("GenuineIntel", 19, 1), hostile):
        monkeypatch.setattr(build, "cpu_model", lambda model=model: model)
        assert first(meter) == "avx512"
        assert file_of(cache, model).parent == cache
    assert meter.asked == len(list(cache.glob("choice-*.json"))) == 4
    monkeypatch.setattr(build, "cpu_model", lambda: UNKNOWN)
    monkeypatch.setattr(build, "BASE_FLAGS", (*build.BASE_FLAGS, "-DOTHER"))
    assert first() == "avx512_bf16", "other kernels were measured"


def test_processes_that_start_together_measure_once_and_choose_alike(cache: Path) -> None:
    assert first() == "avx512_bf16"
    cache.mkdir(parents=True, exist_ok=True)
    started, chosen = threading.Barrier(4), []
    meter = Meter()

    def start(file: Path) -> None:
        started.wait()
        figures = measured_figures(file, *NAMES, lambda: meter([VARIANTS[name] for name in NAMES]))
        assert figures is not None
        chosen.append(figures.prefers(*NAMES))

    threads = [threading.Thread(target=start, args=(file_of(cache),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert chosen == [True] * 4
    assert meter.asked == 1


def test_what_cannot_be_kept_or_built_leaves_the_default(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Sequence[Variant]) -> dict[str, list[float]]:
        raise NativeUnavailable("there is no C++ compiler")

    assert own_variants(fail)[0].name == "avx512_bf16"
    (tmp_path / "full").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "full"))
    meter = Meter()
    assert first(meter) == "avx512_bf16"
    assert not meter.asked


def test_doctor_says_what_was_chosen_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: "g++")
    assert "avx512_bf16, unless avx512 is faster" in build.describe_choice()
    first(Meter())
    assert build.describe_choice() == (
        "avx512: measured on this CPU, avx512 is 1.19 times as fast as avx512_bf16 (1.1 decide)"
    )
    monkeypatch.setattr(build, "cpu_model", lambda: ("AuthenticAMD", 26, 2))
    assert build.describe_choice() == "avx512_bf16"


@pytest.fixture
def fresh_kernels() -> Iterator[Callable[[], Kernels | None]]:
    library.kernels.cache_clear()
    yield library.kernels
    library.kernels.cache_clear()


@pytest.mark.skipif(
    not VARIANTS["avx512_bf16"].cpu_flags <= REAL_FLAGS, reason="this CPU has one variant or none"
)
def test_an_engine_measures_and_its_variant_is_part_of_its_fingerprint(
    cache: Path, monkeypatch: pytest.MonkeyPatch, fresh_kernels: Callable[[], Kernels | None]
) -> None:
    monkeypatch.setattr(build, "cache_directory", lambda: LIBRARIES)
    before = torch.random.get_rng_state()
    loaded = fresh_kernels()
    assert loaded is not None
    assert torch.equal(torch.random.get_rng_state(), before)
    figures = kept_figures(file_of(cache), *NAMES)
    assert figures is not None
    assert loaded.variant == NAMES[figures.prefers(*NAMES)]
    fingerprints = []
    for pair in ((SLOWER, FASTER), (FASTER, SLOWER)):
        seconds = dict(zip(NAMES, pair, strict=True))
        file_of(cache).write_text(json.dumps({"seconds": seconds}))
        library.kernels.cache_clear()
        args = EngineArgs.of(model="builtin://tiny", dtype="bfloat16", device="cpu", threads=1)
        with closing(InprocClient(args)) as client:
            fingerprints.append(client.config.model_fingerprint)
    assert len(set(fingerprints)) == 2
