"""Compares what the driver is asked when Triton's launcher starts our kernels, and when `direct_launch` does.

In the tests' own process kernels are interpreted, so this is for another one, in which a `StubDriver` is the driver.
"""

from __future__ import annotations

import logging
import struct
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from argosy_engine.triton_kernels.launch import KNOWN_DEVICES, Launch
from gpu_accounting.stub_driver import STREAM, StubDriver, Written

warnings.simplefilter("ignore")
_stub: StubDriver | None = None


def stub_driver() -> StubDriver:
    global _stub
    if _stub is None:
        _stub = StubDriver()
    return _stub


def recorded(module: str) -> Iterator[Launch]:
    """Yield the launches of every case of a module on an H100, each variant once."""
    from gpu_report.cases import ALL_CASES
    from gpu_report.report import launches_of

    traits, seen = KNOWN_DEVICES["H100"], set()
    for case in ALL_CASES[module](traits):
        for launch in launches_of(case, traits):
            if (launch.kernel, launch.variant) not in seen:
                seen.add((launch.kernel, launch.variant))
                yield launch


def real_arguments(launch: Launch, *, changed: bool = False) -> dict[str, Any]:
    """Replace fake tensors by others on the CPU. With `changed`, other tensors, and other values of what isn't compiled
    in."""
    open_values = {each.name for each in launch.kernel.params if each.do_not_specialize}
    arguments: dict[str, Any] = {}
    for name, value in launch.arguments.items():
        if isinstance(value, torch.Tensor):
            value = torch.zeros(64, dtype=torch.uint8).view(value.dtype)
        elif changed and isinstance(value, float) and not name.isupper():
            value = value * 3 + 1
        elif changed and name in open_values and isinstance(value, int):
            value += 7
        arguments[name] = value
    return arguments


def compare_module(module: str) -> dict[str, int]:
    """Start every launch of a module by both; return how many there were, and how often they were started directly.

    Raises:
        AssertionError: the driver was asked for different things.
    """
    from argosy_engine.triton_kernels import launch as launching
    from argosy_engine.triton_kernels.direct_launch import Direct, load_module

    stub = stub_driver()
    launches = list(recorded(module))
    direct = Direct(load_module(str(stub.library)))
    counts = {"launches": len(launches), "direct": 0}
    for launch in launches:
        options = launch.num_warps, launch.num_stages
        sets = [real_arguments(launch), real_arguments(launch, changed=True)]
        launching.set_direct(None)
        with stub.written() as expected:
            for arguments in sets:
                launching.start_kernel(launch.kernel, launch.grid, *options, arguments)
        launching.set_direct(direct)
        launching.start_kernel(launch.kernel, launch.grid, *options, sets[0])
        with stub.written() as found:
            is_direct = [
                launching.start_kernel(launch.kernel, launch.grid, *options, arguments) for arguments in sets
            ]
        assert is_direct == [True, True], (launch.name, launch.arguments, direct.last_refusal)
        assert found == expected, (launch.name, found, expected)
        assert {each.stream for each in found} == {STREAM}
        counts["direct"] += 1
    launching.set_direct(None)
    return counts


class Started:
    """A kernel with every kind of argument, started one way after the other."""

    def __init__(self) -> None:
        from argosy_engine.triton_kernels import direct_launch
        from argosy_engine.triton_kernels import launch as launching

        self.stub, self._launching, self._module = stub_driver(), launching, direct_launch
        self.kernel = direct_launch._probe
        self.kernel.device_caches.clear()
        self.direct = direct_launch.Direct(direct_launch.load_module(str(self.stub.library)))
        launching.set_direct(self.direct)

    def arguments(self, **changes: Any) -> dict[str, Any]:
        usual = {
            "out_ptr": torch.zeros(16), "source_ptr": torch.zeros(64), "absent_ptr": None, "count": 5, "wide": 1 << 40,
            "stride": 2, "factor": 0.5, "one": 1, "BLOCK": 16, "NAME": "once",
        }  # fmt: skip
        return usual | changes

    def start(self, grid: tuple[int, ...] = (3,), **changes: Any) -> bool:
        return self._launching.start_kernel(self.kernel, grid, 1, 1, self.arguments(**changes))

    def close(self) -> None:
        self._launching.set_direct(None)
        self.stub.metadata, self.stub.extra_sizes = {}, (8, 8)
        self.stub.set_context(0x1000)
        self.stub.refuse(0)


def known_and_unknown() -> dict[str, list[bool]]:
    """Start the kernel twice with arguments that it was not compiled for before; return what was direct."""
    changes: dict[str, dict[str, Any]] = {
        "nothing": {},
        "an open integer of 64 bits": {"count": 1 << 33},
        "another integer": {"stride": 3},
        "an integer that is 1": {"stride": 1},
        "another constant": {"BLOCK": 32},
        "another name": {"NAME": "twice"},
        "another dtype": {"source_ptr": torch.zeros(64, dtype=torch.float16)},
        "another alignment": {"source_ptr": torch.zeros(64)[1:]},
        "a tensor for none": {"absent_ptr": torch.zeros(1)},
        "an integer for a float": {"factor": 2},
        "a parameter of torch": {"source_ptr": torch.nn.Parameter(torch.zeros(64))},
        "a boolean": {"one": False},
    }
    started = Started()
    try:
        started.start()
        return {name: [started.start(**change) for _ in range(2)] for name, change in changes.items()}
    finally:
        started.close()


def values() -> list[tuple[Any, ...]]:
    """Return what the driver was given of the values that change from launch to launch."""
    started = Started()
    try:
        started.start()
        tensors = [torch.zeros(16), torch.zeros(64)]
        with started.stub.written() as found:
            assert started.start((4, 5, 6), out_ptr=tensors[0], source_ptr=tensors[1], count=-3, factor=0.1)
        (written,) = found
        out, source, count, wide, stride, factor, *scratch = written.parameters
        assert scratch == [bytes(8)] * 2
        return [
            (written.grid, written.block, written.attributes),
            (_int(out) == tensors[0].data_ptr(), _int(source) == tensors[1].data_ptr()),
            (*struct.unpack("<i4x", count), _int(wide), *struct.unpack("<i4x", stride)),
            struct.unpack("<f4x", factor),
        ]
    finally:
        started.close()


def _int(content: bytes) -> int:
    return int.from_bytes(content, "little")


def refusals() -> dict[str, tuple[list[bool], str]]:
    """Start kernels that Triton has compiled otherwise; return what was direct, and why the last was not."""
    found = {}
    for name, metadata in {
        "clusters": {"num_ctas": 2},
        "a cooperative grid": {"launch_cooperative_grid": True},
        "programmatic launches": {"launch_pdl": True},
        "scratch space": {"profile_scratch_size": 8},
        "much shared memory": {"shared": 228 << 10},
        "instruments": {"instrumentation_mode": "x"},
    }.items():
        started = Started()
        started.stub.metadata = metadata
        original = started._launching._start_by_triton
        started._launching._start_by_triton = _compile  # Triton would ask for memory to launch some of these
        try:
            found[name] = [started.start() for _ in range(3)], started.direct.last_refusal
        finally:
            started._launching._start_by_triton = original
            started.close()
    for name, sizes in {"no scratch": (), "a parameter more": (8, 8, 4), "many more": (8,) * 5}.items():
        started = Started()
        started.stub.extra_sizes = sizes
        try:
            found[name] = [started.start() for _ in range(3)], started.direct.last_refusal
        finally:
            started.close()
    return found


def _compile(known: Any, grid: Any, num_warps: int, num_stages: int, arguments: dict[str, Any]) -> Any:
    return known.kernel.warmup(**arguments, grid=grid, num_warps=num_warps, num_stages=num_stages)


def surroundings() -> dict[str, list[bool]]:
    """Return what was direct while the context, the hooks, an address or the grid were unusual, and after that."""
    import triton

    started = Started()
    stub, found = started.stub, {}
    try:
        started.start()
        stub.set_context(None)
        found["no context"] = [started.start(), started.start()]
        stub.set_context(0x2000)
        found["another context"] = [started.start(), started.start()]
        stub.set_context(0x1000)
        hook = triton.knobs.runtime.launch_enter_hook
        hook.add(_nothing)
        found["a profiler"] = [started.start()]
        hook.remove(_nothing)
        found["none again"] = [started.start()]
        tensor = torch.zeros(16)
        stub.refuse(tensor.data_ptr())
        with pytest.raises(ValueError, match="cannot be accessed from Triton"):
            started.start(out_ptr=tensor)
        stub.refuse(0)
        with pytest.raises(OverflowError):
            started.start((1 << 40,))
        found["at last"] = [started.start()]
        return found
    finally:
        started.close()


def _nothing(metadata: Any) -> None: ...


def start_up(computes: bool) -> tuple[bool, str]:
    """Check the launches as at a start, on a driver that computes the kernel or does not; return what the log says."""
    import ctypes

    from argosy_engine.triton_kernels import direct_launch

    started = Started()
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    direct_launch.logger.addHandler(handler)
    direct_launch.logger.setLevel("INFO")
    load, direct_launch.load_module = direct_launch.load_module, lambda: load(str(started.stub.library))

    def compute(written: Written) -> None:
        out, source, count, wide, stride, factor, *_ = written.parameters
        count, stride, factor = (
            struct.unpack(f"<{kind}4x", each)[0]
            for kind, each in zip("iif", (count, stride, factor), strict=True)
        )
        read = (ctypes.c_float * 256).from_address(_int(source))
        write = (ctypes.c_float * 16).from_address(_int(out))
        is_twice = functions.setdefault(written.function, len(functions)) > 0
        for index in range(count):
            write[index] = (read[index * stride] * factor + 1) * (2 if is_twice else 1) + (_int(wide) >> 32)

    functions: dict[int, int] = {}
    if computes:
        started.stub.listen(compute)
    try:
        return direct_launch.use_direct_launches(torch.device("cpu")), records[-1]
    finally:
        started.stub.listen(None)
        direct_launch.load_module = load
        direct_launch.logger.removeHandler(handler)
        started.close()


def without_compiler() -> tuple[bool, str]:
    """Check the launches where the launcher can't be built."""
    from argosy_engine.triton_kernels import direct_launch

    started = Started()
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    direct_launch.logger.addHandler(handler)
    direct_launch.logger.setLevel("INFO")
    load = direct_launch.load_module

    def fail() -> Any:
        raise RuntimeError("Failed to find C compiler.\nPlease specify it by CC")

    direct_launch.load_module = fail
    try:
        return direct_launch.use_direct_launches(torch.device("cpu")), records[-1]
    finally:
        direct_launch.load_module = load
        direct_launch.logger.removeHandler(handler)
        started.close()


def step_counts(is_direct: bool) -> dict[str, tuple[int, int]]:
    """Return the launches of ours, and the calls of functions per layer, of steps of Qwen3-0.6B."""
    from gpu_accounting.host_runner import HostRunner, count_calls
    from gpu_accounting.measurement import Shape, decode_again
    from gpu_accounting.models import MODELS

    stub, found = stub_driver(), {}
    runners = [
        HostRunner(stub, MODELS["Qwen3-0.6B"], layers, is_direct=is_direct, has_products=False)
        for layers in (2, 4)
    ]
    for shape in (Shape("decode", decodes=4), Shape("mixed", decodes=8, prompts=(512,))):
        totals = []
        for runner in runners:
            for _ in range(2):  # what is chosen once is chosen in the first round
                step = runner.add(shape)
                before = stub.num_launches
                calls = count_calls(lambda runner=runner, step=step: runner.execute(step).get())
                launches = stub.num_launches - before
                if not shape.prompts:
                    runner.execute(decode_again(step)).get()
                runner.finish(step)
            totals.append((launches, sum(calls.values())))
        (few, few_calls), (many, many_calls) = totals
        found[shape.name] = (many - few) // 2, (many_calls - few_calls) // 2
    return found
