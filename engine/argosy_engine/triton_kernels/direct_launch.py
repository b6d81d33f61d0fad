"""Direct launches: compiled kernels are started by the CUDA driver, past the launcher of Triton.

Triton's launcher makes objects and calls hooks for each launch, which takes the host longer than many kernels take the
device. What it then asks of the driver is little: the function, the grid, the stream, and the address of each argument,
in the order of the kernel's parameters. `driver_launch.c` asks the same, and is built at start-up, as Triton builds its
own, by the C compiler that Triton needs.

The first launch of a variant is Triton's, always; so is every launch that is not certain to be the same:

- a variant whose parameters, as the driver knows them, are not those of Triton's signature followed by null pointers
  (scratch space that the variant doesn't use),
- one that is launched with clusters, cooperatively, or with scratch space of its own,
- arguments of other types than tensors, integers, floats and compile-time constants; a tensor that is on no device,
- all, while something listens to launches (a profiler), and if the check at start-up has failed.

Which launches are alike is decided by what Triton looks at (`launch._key`) and by the driver's current context, to
which a loaded function belongs.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from argosy_engine.triton_kernels import launch as launching

logger = logging.getLogger(__name__)

_LIBRARY = "libcuda.so.1"
_SOURCE = Path(__file__).with_name("driver_launch.c")
_SIZES = {"p": 8, "i": 4, "l": 8, "f": 4}
"""Bytes of a parameter, by its letter in `driver_launch.c`."""
_LETTERS = {"i32": "i", "i64": "l", "fp32": "f", "constexpr": "."}
_MAX_SHARED = 227 << 10
"""Bytes of shared memory; for more, Triton asks for a mode of the device."""
_MAX_SCRATCH = 4


class NotDirect(Exception):
    """Kernels, or one of them, must be started by Triton; the message says why."""


def use_direct_launches(device: torch.device) -> bool:
    """Let `launch` start compiled kernels by the driver, if a check on the device succeeds; a line of the log tells.

    Returns:
        Whether it does so.
    """
    try:
        direct = Direct(load_module())
        launching.set_direct(direct)
        _check(direct, device)
    except Exception as error:  # whatever another version of Triton or the driver does differently
        launching.set_direct(None)
        reason = str(error) or type(error).__name__
        logger.info(
            "kernels are started by Triton's launcher, which takes the host longer: %s",
            reason.splitlines()[0],
        )
        return False
    logger.info("kernels are started by the CUDA driver directly")
    return True


def load_module(library: str = _LIBRARY) -> Any:
    """Build `driver_launch.c`, or read what was built before, and connect it with the driver.

    Raises:
        Exception: of any kind; there is no compiler, or this version of Triton is another.
    """
    from triton.runtime.build import compile_module_from_src

    module = compile_module_from_src(src=_SOURCE.read_text(), name="argosy_driver_launch")
    active = triton.runtime.driver.active
    hooks = []
    for name in ("launch_enter_hook", "launch_exit_hook"):
        hook = getattr(triton.knobs.runtime, name)
        if hook is not None:
            hooks.append(hook.calls)
    module.open(library, torch.Tensor, torch.nn.Parameter, active.get_current_stream, tuple(hooks))
    return module


class Direct:
    """What `launch` starts kernels by.

    Args:
        module: built from `driver_launch.c`, connected.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self.last_refusal = ""
        """Why the last variant that was refused is Triton's to start."""

    def kernel(self, params: Any) -> Any:
        """Make the `Kernel` of a function decorated by `triton.jit`.

        Args:
            params: its parameters (`JITFunction.params`).
        """
        kinds = bytes(2 if each.is_constexpr else 1 if each.do_not_specialize else 0 for each in params)
        return self._module.Kernel(tuple(each.name for each in params), kinds)

    def learn(self, kernel: Any, key: bytes, compiled: Any) -> None:
        """Start what has this key by the driver from now on, or by Triton where it can't be.

        Args:
            compiled: what Triton has compiled and loaded for it.
        """
        try:
            variant = self._variant(compiled)
        except (NotDirect, AttributeError, TypeError, RuntimeError) as error:
            self.last_refusal = str(error)
            logger.debug("a kernel is started by Triton: %s", error)
            variant = None
        kernel.learn(key, variant, launching.MAX_COMPILED)

    def _variant(self, compiled: Any) -> Any:
        metadata = compiled.metadata
        num_warps, num_ctas, shared = compiled.packed_metadata[:3]
        if num_ctas != 1 or shared > _MAX_SHARED or metadata.warp_size != 32:
            raise NotDirect(
                f"{num_ctas} blocks per cluster, {shared} bytes of shared memory, warps of {metadata.warp_size}"
            )
        for name, value in metadata._asdict().items():
            if name.endswith("scratch_size") or name in ("launch_cooperative_grid", "launch_pdl"):
                if value:
                    raise NotDirect(f"{name} is {value}")
            elif name == "instrumentation_mode" and value:
                raise NotDirect(f"it is instrumented: {value}")
        types = "".join(_letter(kind) for kind in compiled.src.signature.values())
        expected = [_SIZES[letter] for letter in types if letter != "."]
        found = self._module.parameter_sizes(compiled.function)
        scratch = found[len(expected) :]
        if found[: len(expected)] != expected or scratch != [8] * len(scratch) or len(scratch) > _MAX_SCRATCH:
            raise NotDirect(f"its parameters take {found} bytes rather than {expected} and scratch")
        return self._module.variant(
            compiled.function, num_warps * metadata.warp_size, shared, types, len(scratch), compiled
        )


def _letter(kind: Any) -> str:
    if isinstance(kind, str):
        if kind.startswith("*"):
            return "p"
        if kind in _LETTERS:
            return _LETTERS[kind]
    raise NotDirect(f"a parameter is of type {kind}")


@triton.jit(do_not_specialize=["count"])
def _probe(
    out_ptr, source_ptr, absent_ptr, count, wide, stride, factor, one, BLOCK: tl.constexpr, NAME: tl.constexpr
):
    """Write what each argument says: for the check at start-up."""
    index = tl.arange(0, BLOCK)
    value = tl.load(source_ptr + index * stride, mask=index < count, other=0.0) * factor + one
    if absent_ptr is not None:
        value += tl.load(absent_ptr)
    if NAME == "twice":
        value *= 2
    tl.store(out_ptr + index, value + (wide >> 32).to(tl.float32), mask=index < count)


def _check(direct: Direct, device: torch.device) -> None:
    """Start a kernel by Triton, then with other values and tensors by the driver, on another stream.

    Raises:
        NotDirect: it was not started by the driver, or the results are not those of the arguments.
    """
    source = torch.arange(1, 257, dtype=torch.float32, device=device)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    for name, factor in (("once", 0.5), ("twice", 4.0)):
        for count, start in ((5, 0), (7, 128)):  # not specialised, and tensors aligned alike
            out = torch.zeros(16, device=device)
            values: dict[str, Any] = {
                "out_ptr": out, "source_ptr": source[start:], "absent_ptr": None, "count": count, "wide": 3 << 32,
                "stride": 2, "factor": factor + count, "one": 1, "BLOCK": 16, "NAME": name,
            }  # fmt: skip
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                is_direct = launching.start_kernel(_probe, (1,), 1, 1, values)
            if stream is not None:
                stream.synchronize()
            if is_direct != (start > 0):
                raise NotDirect(direct.last_refusal or "the arguments were not taken")
            scale = 2.0 if name == "twice" else 1.0
            expected = [
                ((start + 1 + 2 * index) * (factor + count) + 1) * scale + 3 for index in range(count)
            ]
            if out.tolist() != expected + [0.0] * (16 - count):
                raise NotDirect(f"a kernel wrote {out.tolist()[:count]} rather than {expected}")
