"""StubDriver: Triton's own launcher, and ours, on a CUDA driver that starts nothing and writes down what it is asked.

`stub_driver.c` is built as libcuda.so.1. Kernels are not compiled: of what Triton would have compiled there are the
signature, by which arguments are passed, and a function whose parameters have the sizes that PTX gives them. A process
that uses it must not have TRITON_INTERPRET set, and keeps it to its end. Tensors may be on the CPU or on `meta`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

_SOURCE = Path(__file__).with_name("stub_driver.c")
_PARAMETERS = 128
PARAMETER_BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "u1": 1, "u64": 8, "fp32": 4, "fp64": 8}
"""Of PTX, by Triton's types; pointers take 8."""
STREAM = 0x5EAD


class _Launch(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_int64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("attributes", ctypes.c_uint32),
        ("stream", ctypes.c_uint64),
        ("count", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
        ("bytes", ctypes.c_ubyte * (_PARAMETERS * 8)),
    )


class Written(NamedTuple):
    """One launch, as the driver was asked for it."""

    function: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    attributes: int
    stream: int
    parameters: tuple[bytes, ...]
    """8 bytes each; those beyond a parameter's size are 0."""


_LISTENER = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Launch))


@dataclass(frozen=True, slots=True)
class _Metadata:
    """What Triton notes of a compiled kernel, as far as its launcher and ours look at it."""

    num_warps: int
    shared: int = 8192
    num_ctas: int = 1
    warp_size: int = 32
    global_scratch_size: int = 0
    global_scratch_align: int = 1
    profile_scratch_size: int = 0
    profile_scratch_align: int = 1
    launch_cooperative_grid: bool = False
    launch_pdl: bool = False
    instrumentation_mode: str = ""
    tensordesc_meta: None = None

    def _asdict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


class StubDriver:
    """Triton's active driver from now on.

    Args:
        capability: compute capability that kernels are asked for.
    """

    def __init__(self, capability: int = 90) -> None:
        assert os.environ.get("TRITON_INTERPRET", "0") != "1", "kernels would be interpreted"
        self.folder = Path(tempfile.mkdtemp(prefix="stub-driver-"))
        self.library = self.folder / "libcuda.so.1"
        compiler = next(path for name in ("cc", "gcc", "clang") if (path := shutil.which(name)))
        subprocess.run(  # noqa: S603 - our own arguments, no shell
            [
                compiler,
                "-O2",
                "-shared",
                "-fPIC",
                "-Wl,-soname,libcuda.so.1",
                str(_SOURCE),
                "-o",
                str(self.library),
            ],
            check=True,
        )
        (self.folder / "libcuda.so").symlink_to(self.library)
        os.environ["TRITON_LIBCUDA_PATH"] = str(self.folder)
        self._api = ctypes.CDLL(str(self.library), ctypes.RTLD_GLOBAL)
        self._api.stub_function.restype = ctypes.c_int64
        self._api.stub_launches.restype = ctypes.c_longlong
        self._api.stub_launch.restype = ctypes.POINTER(_Launch)
        self._api.stub_set_context.argtypes = [ctypes.c_void_p]
        self._api.stub_refuse.argtypes = [ctypes.c_ulonglong]
        self.metadata: dict[str, Any] = {}
        """Of kernels that are compiled from now on, what differs from the usual."""
        self.extra_sizes: tuple[int, ...] = (8, 8)
        """Parameters after those of the signature: scratch."""
        self._listener: Any = None
        self._install(capability)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def num_launches(self) -> int:
        return int(self._api.stub_launches())

    def set_context(self, context: int | None) -> None:
        """Change the current context; None: there is none."""
        self._api.stub_set_context(context)

    def refuse(self, pointer: int) -> None:
        """Let the driver not know this address; 0: it knows all."""
        self._api.stub_refuse(pointer)

    def listen(self, function: Callable[[Written], None] | None) -> None:
        """Call a function at each launch."""
        self._listener = (
            _LISTENER() if function is None else _LISTENER(lambda each: function(_read(each.contents)))
        )
        self._api.stub_listen(self._listener)

    @contextmanager
    def written(self) -> Iterator[list[Written]]:
        """Collect what is launched, in a list that is filled at the end."""
        launches: list[Written] = []
        self._api.stub_write(1)
        try:
            yield launches
        finally:
            launches += [
                _read(self._api.stub_launch(index).contents) for index in range(self._api.stub_written())
            ]
            self._api.stub_write(0)

    def _function(self, signature: dict[str, Any]) -> int:
        sizes = [
            8 if kind.startswith("*") else PARAMETER_BYTES[kind]
            for kind in signature.values()
            if kind != "constexpr"
        ]
        sizes += self.extra_sizes
        handle = self._api.stub_function((ctypes.c_int * len(sizes))(*sizes), len(sizes))
        assert handle, "too many functions"
        return int(handle)

    def _install(self, capability: int) -> None:
        import triton.compiler
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia.driver import CudaDriver, CudaLauncher
        from triton.compiler import CompiledKernel

        driver: Any = CudaDriver()
        target = GPUTarget("cuda", capability, 32)
        driver.get_current_device = lambda: 0
        driver.get_current_stream = lambda device: STREAM
        driver.get_current_target = lambda: target
        driver.get_device_capability = lambda device=0: (capability // 10, capability % 10)
        triton.runtime.driver.set_active(driver)
        stub = self

        class NotCompiled(CompiledKernel):  # type: ignore[misc,unused-ignore]
            """A kernel that was loaded, for Triton."""

            def __init__(self, src: Any, options: dict[str, Any]) -> None:
                self.src, self.name, self.hash = src, src.name, ""
                self.metadata = _Metadata(**{"num_warps": options["num_warps"]} | stub.metadata)
                self.packed_metadata = self.metadata.num_warps, self.metadata.num_ctas, self.metadata.shared
                self.module = self._module_pid = None
                self.function = stub._function(src.signature)
                self._run = CudaLauncher(src, self.metadata)

            def _init_handles(self) -> None: ...

            def __del__(self) -> None: ...

        triton.compiler.compile = lambda src, target=None, options=None, **_: NotCompiled(src, options)


def _read(launch: Any) -> Written:
    content = bytes(launch.bytes)
    return Written(
        launch.function,
        tuple(launch.grid),
        tuple(launch.block),
        launch.shared,
        launch.attributes,
        launch.stream,
        tuple(content[8 * index : 8 * index + 8] for index in range(launch.count)),
    )
