"""The CPU kernels against torch and against float64, and the fallback without them."""

from __future__ import annotations

import itertools
import logging
import os
import random
import re
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from argosy_engine.attention.backend import Attention, AttentionMetadata, ModelInputs
from argosy_engine.attention.cpu_attn import CpuBackend, attend_segments
from argosy_engine.attention.torch_attn import TorchBackend
from argosy_engine.checkpoint.weights import DummyWeights
from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.messages import EngineCoreRequest
from argosy_engine.model_configs.llama_config import LlamaConfig
from argosy_engine.models.config_file import load_model_config
from argosy_engine.models.llama import Llama
from argosy_engine.native import build, library
from argosy_engine.native.build import NativeUnavailable
from argosy_engine.native.library import Kernels, QuantizedWeight
from argosy_engine.params import SamplingParams
from attention_cases import Case, Span, attention_metadata, random_case
from greedy_reference import differing_tokens

HERE = [each for each in (*build.VARIANTS, build.AMX_MODEL) if each.cpu_flags <= build.cpu_flags()]
DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}

pytestmark = pytest.mark.skipif(not HERE, reason="no variant of the kernels for this CPU")


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=HERE, ids=lambda variant: variant.name)
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """Every variant this CPU can run, and AMX's model; three threads, more than some machines have."""
    loaded = Kernels(build.library_path(request.param))
    loaded.set_threads(3)
    yield loaded
    loaded.set_threads(1)


@pytest.fixture
def fresh_kernels() -> Iterator[Callable[[], Kernels | None]]:
    """`library.kernels`, deciding anew; afterwards the rest of the suite gets what it had."""
    library.kernels.cache_clear()
    yield library.kernels
    library.kernels.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_equals_float64_and_torch(kernels: Kernels, dtype: torch.dtype) -> None:
    rng = random.Random(5)
    for number in range(15):
        case = random_case(rng, dtype)
        expected = case.expected()
        ours = native_run(kernels, case)
        theirs = torch_run(case)
        assert error(ours, expected) < TOLERANCE[dtype], f"case {number}: {case.shape} {case.spans}"
        assert error(theirs, expected) < TOLERANCE[dtype], f"case {number}: {case.shape} {case.spans}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_attention_does_not_depend_on_batch_or_chunks(kernels: Kernels, dtype: torch.dtype) -> None:
    rng = random.Random(6)
    for _ in range(10):
        case = random_case(rng, dtype)
        together = native_run(kernels, case)
        kernels.set_threads(1)
        alone = native_run(kernels, case, chunk=rng.choice((1, 7, 64)), is_alone=True)
        kernels.set_threads(3)
        assert torch.equal(together, alone), f"{case.shape} {case.spans}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(2, 2, 32), (2, 1, 72), (1, 1, 256)], ids=str)
def test_tokens_of_a_segment_see_all_of_it_and_nothing_else(
    kernels: Kernels, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(head_dim)
    starts = [0, 1, 33, 33 + 129, 162 + 48]

    def draw(count: int) -> torch.Tensor:
        return torch.randn(starts[-1], count, head_dim, generator=generator).to(dtype)

    q, k, v = draw(num_heads), draw(num_kv_heads), draw(num_kv_heads)
    found = attend_segments(kernels, q, k, v, torch.tensor(starts, dtype=torch.int32), 0.3)
    assert found.shape == q.shape
    for first, end in itertools.pairwise(starts):
        parts = (each[first:end].double().transpose(0, 1)[None] for each in (q, k, v))
        expected = F.scaled_dot_product_attention(*parts, scale=0.3, enable_gqa=num_heads > num_kv_heads)
        torch.testing.assert_close(
            found[first:end].double(), expected[0].transpose(0, 1), rtol=0, atol=TOLERANCE[dtype]
        )
        alone = (each[first:end] for each in (q, k, v))
        assert torch.equal(
            attend_segments(kernels, *alone, torch.tensor([0, end - first]), 0.3), found[first:end]
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_equals_float64_for_every_number_of_rows(kernels: Kernels, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    for out_features, in_features in ((1, 16), (33, 62), (64, 64), (200, 130), (1000, 256), (40, 1056)):
        weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
        bias = torch.randn(out_features, generator=generator).to(dtype)
        packed = kernels.pack_linear(weight, bias)
        x = torch.randn(301, in_features, generator=generator).to(dtype)
        expected = x.double() @ weight.double().t() + bias.double()
        whole = kernels.linear(x, packed, torch.float32)
        assert error(whole, expected) < 1e-4
        for rows in (*range(26), 48, 97):
            part = kernels.linear(x[:rows].contiguous(), packed, torch.float32)
            assert torch.equal(part, whole[:rows]), f"{rows} rows of {out_features} x {in_features}"
        narrow = kernels.linear(x, kernels.pack_linear(weight), dtype)
        assert error(narrow, (whole.double() - bias.double()).to(dtype).double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_linear_equals_float64_for_every_number_of_rows(
    kernels: Kernels, dtype: torch.dtype, bits: int
) -> None:
    generator = torch.Generator().manual_seed(2)
    shapes = (
        (1, 32, 32),
        (33, 64, 32),
        (64, 96, 96),
        (100, 128, 128),
        (130, 200, 200),
        (97, 512, 256),
        (200, 384, 8),
    )
    for number, (out_features, in_features, group) in enumerate(shapes):
        weight = random_quantized(generator, bits, out_features, in_features, group, is_full=number % 2 == 1)
        bias = torch.randn(out_features, generator=generator).to(dtype)
        packed = kernels.pack_quantized(weight, dtype, bias)
        x = torch.randn(301, in_features, generator=generator).to(dtype)
        expected = x.double() @ weight.widened(torch.float64).t() + bias.double()
        whole = kernels.linear(x, packed, torch.float32)
        assert error(whole, expected) < 1e-4
        for rows in (*range(26), 48, 97, 193):
            part = kernels.linear(x[:rows].contiguous(), packed, torch.float32)
            assert torch.equal(part, whole[:rows]), f"{rows} rows of {out_features} x {in_features}"
        narrow = kernels.linear(x, kernels.pack_quantized(weight, dtype), dtype)
        assert error(narrow, (whole.double() - bias.double()).to(dtype).double()) < TOLERANCE[dtype]
        squared = kernels.squared_relu_linear(x, packed)
        assert torch.equal(squared, (whole.clamp(min=0) ** 2).to(dtype))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_gated_linear_equals_float64(kernels: Kernels, dtype: torch.dtype, bits: int) -> None:
    generator = torch.Generator().manual_seed(3)
    for inner, in_features, group in ((16, 32, 32), (48, 64, 32), (208, 256, 128)):
        weight = random_quantized(generator, bits, 2 * inner, in_features, group, is_full=inner == 48)
        bias = torch.randn(2 * inner, generator=generator).to(dtype)
        x = (torch.randn(70, in_features, generator=generator) / in_features**0.5).to(dtype)
        packed = kernels.pack_quantized(weight, dtype, bias, is_gated=True)
        gate, up = (x.double() @ weight.widened(torch.float64).t() + bias.double()).chunk(2, dim=1)
        whole = kernels.gated_linear(x, packed)
        assert error(whole, F.silu(gate) * up) < TOLERANCE[dtype]
        for rows in (1, 6, 7, 16):
            assert torch.equal(kernels.gated_linear(x[:rows].contiguous(), packed), whole[:rows])


def test_every_integer_is_widened_exactly(kernels: Kernels) -> None:
    for bits, numbers in ((8, torch.arange(-128, 128)), (4, torch.arange(-8, 8).repeat(2))):
        weight = QuantizedWeight(bits, torch.diag(numbers).to(torch.int8), torch.ones(len(numbers), 1))
        for dtype in (torch.float32, torch.bfloat16):
            for rows in (1, len(numbers)):
                x = torch.ones(rows, len(numbers), dtype=dtype)
                y = kernels.linear(x, kernels.pack_quantized(weight, dtype), torch.float32)
                assert torch.equal(y, numbers.float().expand(rows, -1))


def random_quantized(
    generator: torch.Generator, bits: int, out_features: int, in_features: int, group: int, *, is_full: bool
) -> QuantizedWeight:
    """Return a random weight, with zero points and inputs in another order if `is_full`."""
    low = -(1 << (bits - 1))
    integers = torch.randint(low, -low, (out_features, in_features), dtype=torch.int8, generator=generator)
    scales = torch.rand(out_features, in_features // group, generator=generator) / -low + 0.01
    if not is_full:
        return QuantizedWeight(bits, integers, scales)
    zeros = torch.randint(low, -low, scales.shape, generator=generator)
    order = torch.randperm(in_features, generator=generator).int()
    return QuantizedWeight(bits, integers, scales, -scales * zeros, order)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_linear_equals_float64_for_every_number_of_rows(kernels: Kernels, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    for inner, in_features in ((16, 16), (48, 62), (208, 130), (48, 96)):
        weight = torch.randn(2 * inner, in_features, generator=generator).to(dtype)
        bias = torch.randn(2 * inner, generator=generator).to(dtype)
        x = (torch.randn(70, in_features, generator=generator) / in_features**0.5).to(dtype)
        for offset in (None, bias):
            packed = kernels.pack_linear(weight, offset, is_gated=True)
            gate, up = F.linear(
                x.double(), weight.double(), offset if offset is None else offset.double()
            ).chunk(2, -1)
            whole = kernels.gated_linear(x, packed)
            assert error(whole, F.silu(gate) * up) < TOLERANCE[dtype]
            for rows in (0, 1, 2, 13, 48):
                assert torch.equal(kernels.gated_linear(x[:rows].contiguous(), packed), whole[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_squared_relus_equal_float64_for_every_number_of_rows(kernels: Kernels, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    for inner, in_features in ((1, 16), (33, 62), (208, 130)):
        weight = torch.randn(inner, in_features, generator=generator).to(dtype)
        bias = torch.randn(inner, generator=generator).to(dtype)
        x = (torch.randn(70, in_features, generator=generator) / in_features**0.5).to(dtype)
        for offset in (None, bias):
            packed = kernels.pack_linear(weight, offset)
            up = F.linear(x.double(), weight.double(), offset if offset is None else offset.double())
            whole = kernels.squared_relu_linear(x, packed)
            assert error(whole, F.relu(up).square()) < TOLERANCE[dtype]
            for rows in (0, 1, 2, 13, 48):
                assert torch.equal(kernels.squared_relu_linear(x[:rows].contiguous(), packed), whole[:rows])


@pytest.mark.skipif(
    not build.AMX_MODEL.cpu_flags <= build.cpu_flags(), reason="the model of AMX needs AVX-512"
)
def test_the_model_of_amx_rounds_as_the_manual_says() -> None:
    loaded = Kernels(build.library_path(build.AMX_MODEL))
    generator = torch.Generator().manual_seed(9)
    x, weight = (torch.randn(n, 608, generator=generator).bfloat16() for n in (35, 33))
    x[0, :64] *= 2.0**-126  # denormal numbers and sums count as zero
    found = loaded.linear(x, loaded.pack_linear(weight), torch.float32)
    products = (x.float()[:, None] * weight.float()[None]).numpy()  # exact: 8 bits by 8

    def flushed(sums: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.where(np.abs(sums) < np.finfo(np.float32).tiny, np.float32(0), sums)

    products[0, :, :64] = 0
    total = np.zeros(products.shape[:2], np.float32)
    for tile in range(0, 608, 32):
        pair = np.zeros((2, *total.shape), np.float32)
        for k in range(tile, tile + 32):
            pair[k % 2] = flushed(pair[k % 2] + products[..., k])
        total = flushed(total + flushed(pair[0] + pair[1]))
    assert np.array_equal(found.numpy(), total)


@pytest.mark.parametrize("fault", ["refused", "wrong"])
def test_without_working_amx_the_next_variant_serves(
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fresh_kernels: Callable[[], Kernels | None],
) -> None:
    if build.AMX_MODEL not in HERE:
        pytest.skip("the model of AMX needs AVX-512")
    monkeypatch.setattr(build, "VARIANTS", (build.AMX_MODEL, *HERE[:-1]))
    check = library.check_tiles
    monkeypatch.setattr(
        library,
        "check_tiles",
        lambda found: check(found if found < 0 else found | {"refused": 8, "wrong": 1}[fault]),
    )
    with caplog.at_level(logging.WARNING, logger=library.__name__):
        loaded = fresh_kernels()
    assert loaded is not None
    assert loaded.variant == next(each.name for each in HERE if not each.name.startswith("amx"))
    (line,) = caplog.messages
    assert ("does not let" if fault == "refused" else "computes wrongly") in line


def test_squared_relus_keep_nan(kernels: Kernels) -> None:
    x = torch.tensor([[torch.nan, 1.0], [-1.0, 1.0], [3.0, 1.0]])
    out = kernels.squared_relu_linear(x, kernels.pack_linear(torch.tensor([[1.0, 0.0]])))
    torch.testing.assert_close(out, torch.tensor([[torch.nan], [0.0], [9.0]]), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_equals_float64(kernels: Kernels, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 3).to(dtype)

    for rows, width in ((1, 16), (5, 256), (300, 1024)):
        x, residual, weight = draw(rows, width), draw(rows, width), draw(width)
        total = x + residual
        changed = residual.clone()
        out = kernels.rms_norm(x, weight, 1e-6, changed)
        assert torch.equal(changed, total)
        wide = total.double()
        expected = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
        assert error(out, expected) < TOLERANCE[dtype]
        assert torch.equal(kernels.rms_norm(total, weight, 1e-6), out)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 16, 16), (2, 7, 2, 4, 24, 48), (1, 70, 1, 3, 129, 80), (3, 1, 2, 2, 128, 128)]
)
def test_the_gated_delta_rule_equals_float64(kernels: Kernels, shape: tuple[int, ...]) -> None:
    num_rows, num_tokens, key_heads, value_heads, key_dim, value_dim = shape
    generator = torch.Generator().manual_seed(7)

    def random_of(*size: int) -> torch.Tensor:
        return torch.randn(num_rows, *size, generator=generator)

    q, k = (F.normalize(random_of(num_tokens, key_heads, key_dim), dim=-1) for _ in range(2))
    v = random_of(num_tokens, value_heads, value_dim)
    g, beta = F.logsigmoid(random_of(num_tokens, value_heads)), random_of(num_tokens, value_heads).sigmoid()
    state = random_of(value_heads, key_dim, value_dim)
    expected, own = [], state.double()
    for token in range(num_tokens):
        query, key = (
            each[:, token].double().repeat_interleave(value_heads // key_heads, dim=1) for each in (q, k)
        )
        own = own * g[:, token].double().exp()[..., None, None]
        change = (v[:, token] - torch.einsum("nhkv,nhk->nhv", own, key)) * beta[:, token, :, None]
        own = own + torch.einsum("nhk,nhv->nhkv", key, change)
        expected.append(torch.einsum("nhkv,nhk->nhv", own, query))
    parts = state.clone()
    found = kernels.gated_delta_rule(q, k, v, g, beta, state)
    torch.testing.assert_close(found.double(), torch.stack(expected, 1), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(state.double(), own, atol=2e-5, rtol=2e-5)
    halves = [
        kernels.gated_delta_rule(*(each[:, part].contiguous() for each in (q, k, v, g, beta)), parts)
        for part in (slice(0, num_tokens // 2), slice(num_tokens // 2, num_tokens))
    ]
    assert torch.equal(torch.cat(halves, 1), found)
    assert torch.equal(parts, state)


@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_takes_the_first_of_equals(kernels: Kernels, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(0, 40, (50, 1003), generator=generator).to(dtype)
    expected = [row.index(max(row)) for row in x.tolist()]
    assert kernels.argmax(x).tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ["qwen3-tied", "qwen2-bias"])
def test_all_layers_in_one_call_equal_the_layers_one_by_one(
    architecture: str, dtype: torch.dtype, random_checkpoint: Any
) -> None:
    config = load_model_config(random_checkpoint(architecture)[0])
    assert isinstance(config, LlamaConfig)
    generator = torch.Generator().manual_seed(8)
    lengths = [1100, 5, 40]  # more rows than one chunk
    blocks = iter(range(100))
    tables = torch.zeros(3, 70, dtype=torch.int64)
    for row, length in enumerate(lengths):
        for column in range(length // 16 + 1):
            tables[row, column] = next(blocks)

    def step(starts: list[int], ends: list[int]) -> AttentionMetadata:
        return attention_metadata(list(zip(starts, ends, strict=True)), tables, 16)

    ends = [length + 1 for length in lengths]
    tokens = [
        torch.randint(0, config.vocab_size, (sum(n),), generator=generator) for n in (lengths, [1, 1, 1])
    ]
    results: list[list[torch.Tensor]] = []
    for is_whole in (True, False):
        weights = DummyWeights(dtype, torch.device("cpu"), 3)
        model = Llama(config, LayerFactory(weights, CpuBackend(dtype), 1200))
        assert model.fused is not None
        if not is_whole:
            model.fused = None
        cache = torch.zeros(
            config.num_hidden_layers, 2, 100, 16, config.num_key_value_heads, config.head_dim, dtype=dtype
        )
        for layer, layer_cache in zip(model.attention_layers, cache, strict=True):
            layer.bind(layer_cache)
        metas = step([0, 0, 0], lengths), step(lengths, ends)
        results.append(
            [
                model.forward(ModelInputs(token_ids=ids, positions=meta.positions, meta=meta))
                for ids, meta in zip(tokens, metas, strict=True)
            ]
        )
    for whole, one_by_one in zip(*results, strict=True):
        assert whole.isfinite().all()
        assert torch.equal(whole, one_by_one)


def test_engines_in_two_threads_share_the_pool(kernels: Kernels) -> None:
    weight = torch.randn(4000, 64)
    packed, x = kernels.pack_linear(weight), torch.randn(40, 64)
    expected = kernels.linear(x, packed, torch.float32)
    wrong: list[int] = []

    def compute(number: int) -> None:
        for _ in range(50):
            if not torch.equal(kernels.linear(x, packed, torch.float32), expected):
                wrong.append(number)

    threads = [threading.Thread(target=compute, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("asked", [None, "ACTIVE"])
def test_threads_of_torch_do_not_spin_unless_asked_to(asked: str | None) -> None:
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    script = "import argosy_engine, os, sys; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env=env | ({"OMP_WAIT_POLICY": asked} if asked else {}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{asked or 'PASSIVE'} False\n"


@pytest.mark.parametrize(("value", "block_size"), [("0", 16), ("1", 8)], ids=["off", "unfit blocks"])
def test_without_the_kernels_tokens_are_the_same(
    value: str,
    block_size: int,
    random_checkpoint: Any,
    monkeypatch: pytest.MonkeyPatch,
    fresh_kernels: Callable[[], Kernels | None],
) -> None:
    monkeypatch.setenv("ARGOSY_NATIVE", value)
    path, model = random_checkpoint("qwen3-tied")
    args = EngineArgs.of(
        model=str(path),
        dtype="float32",
        device="cpu",
        threads=1,
        block_size=block_size,
        max_num_batched_tokens=24,
    )
    client = InprocClient(args)
    assert (library.kernels() is None) == (value == "0")
    params = SamplingParams(temperature=0.0, max_tokens=12)
    prompts = [[5, 6, 7], list(range(20, 70)), [9]]
    outputs: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        client.add_request(EngineCoreRequest(str(index), prompt, params, time.time()))
    while client.has_work:
        for out in client.step().outputs:
            outputs.setdefault(out.request_id, []).extend(out.new_token_ids)
    for index, prompt in enumerate(prompts):
        assert differing_tokens(model, prompt, outputs[str(index)]) == []


def test_a_debug_build_stops_at_a_slot_outside_of_the_cache() -> None:
    script = (
        "import numpy as np, torch\n"
        "from argosy_engine.attention.cpu_attn import CpuBackend\n"
        "from argosy_engine.attention.backend import Attention\n"
        "from argosy_engine.attention.backend import AttentionMetadata\n"
        "from argosy_engine.attention.params import AttentionParams\n"
        "params = AttentionParams(num_heads=2, num_kv_heads=2, head_dim=16, scale=0.25)\n"
        "attend = Attention(params, CpuBackend(torch.float32))\n"
        "attend.bind(torch.zeros(2, 4, 16, 2, 16))\n"
        "starts, lens = np.array([0, 1], np.int32), np.ones(1, np.int32)\n"
        "for slot in (5, 64):\n"
        "    meta = AttentionMetadata(num_decodes=1, query_start_loc=torch.from_numpy(starts),\n"
        "        seq_lens=torch.from_numpy(lens), positions=torch.tensor([0]), slot_mapping=torch.tensor([slot]),\n"
        "        block_table=torch.zeros(1, 1, dtype=torch.int32), query_start_loc_cpu=starts, seq_lens_cpu=lens)\n"
        "    attend(torch.zeros(1, 96), meta)\n"
        "    print('survived', slot, flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env={**os.environ, "ARGOSY_NATIVE": "debug"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "survived 5\n"
    assert "check failed" in done.stderr
    assert "rotary.h" in done.stderr


def test_the_best_variant_of_a_cpu_is_chosen() -> None:
    everything = frozenset().union(*(variant.cpu_flags for variant in build.VARIANTS))
    amd, sapphire_rapids = ("AuthenticAMD", 26, 2), ("GenuineIntel", 6, 143)
    for without, model, expected in (
        ((), amd, "amx_bf16"),
        ((), sapphire_rapids, "amx_bf16"),
        (("amx_bf16",), amd, "avx512_bf16"),
        (("amx_tile",), sapphire_rapids, "avx512"),
        (("amx_bf16", "avx512_bf16"), amd, "avx512"),
        (("avx512_bf16", "avx512vl"), amd, "avx2"),
    ):
        assert build.fitting_variants(everything - {*without}, model)[0].name == expected
    with pytest.raises(NativeUnavailable, match="none of: amx_bf16, avx512_bf16, avx512, avx2"):
        build.fitting_variants(frozenset({"fpu", "avx2"}))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("no compiler", "no C\\+\\+ compiler"),
        ("bad compiler", "the compiler failed: .*error: it is Monday"),
        ("no instructions", "none of"),
        ("open cache", "somebody else"),
        ("no cache", "cannot be created"),
        ("not a library", "invalid ELF|file too short"),
    ],
)
def test_a_machine_that_cannot_have_them_gets_torch_and_one_line_that_says_why(
    fault: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fresh_kernels: Callable[[], Kernels | None],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path)))
    if fault == "no compiler":
        monkeypatch.setenv("CXX", "")
        monkeypatch.setenv("PATH", str(tmp_path))
    elif fault == "bad compiler":
        monkeypatch.setenv(
            "CXX", str(fake_compiler(tmp_path, "echo 'x.cc:1: error: it is Monday' >&2; exit 1"))
        )
    elif fault == "no instructions":
        monkeypatch.setattr(build, "cpu_flags", lambda: frozenset({"fpu"}))
    elif fault == "open cache":
        build.cache_directory().chmod(0o777)
    elif fault == "no cache":
        (tmp_path / "argosy").write_text("a file")
    with caplog.at_level(logging.INFO, logger=library.__name__):
        assert fresh_kernels() is None
        assert fresh_kernels() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.text.count("computing with torch") == 1
    assert re.search(reason, caplog.text)


def test_engines_that_start_together_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path)))
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(build.library_path())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4
    assert len(set(paths)) == 1
    links = [line for line in (tmp_path / "calls").read_text().splitlines() if "-shared" in line]
    assert len(links) == 1
    directory = paths[0].parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert sorted(path.name for path in directory.iterdir()) == sorted(["lock", paths[0].name])
    monkeypatch.setattr(build, "BASE_FLAGS", (*build.BASE_FLAGS, "-DOTHER"))
    assert build.library_path() != paths[0]


def test_an_image_brings_its_own_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path)))
    monkeypatch.setattr(sys, "argv", ["build", "--output", str(tmp_path / "prebuilt")])
    assert build.main() == 0
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/nonexistent")
    for variant in build.VARIANTS:
        assert build.library_path(variant).parent == tmp_path / "prebuilt"


def fake_compiler(tmp_path: Path, then: str = "") -> Path:
    """Writes its arguments to `calls` and makes an empty output."""
    path = tmp_path / "fake-g++"
    path.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {tmp_path}/calls\n'
        'if [ "$1" = --version ]; then echo fake 1.0; exit; fi\n'
        f"{then}\n"
        'while [ $# -gt 1 ]; do [ "$1" = -o ] && : > "$2"; shift; done\n'
    )
    path.chmod(0o755)
    return path


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to values above 1."""
    difference = (actual.double() - expected).abs() / expected.abs().clamp(min=1.0)
    return float("inf") if difference.isnan().any() else float(difference.max())


def native_run(
    kernels: Kernels, case: Case, *, chunk: int | None = None, is_alone: bool = False
) -> torch.Tensor:
    """The spans' attention by the kernels, after the context of each was written.

    Args:
        chunk: cuts the spans of a step to that many tokens.
        is_alone: every sequence in steps of its own.
    """
    cache = case.empty_cache()
    attend = Attention(case.shape.params, CpuBackend(cache.dtype, kernels), case.weights)
    attend.bind(cache)

    def step(rows: list[int], spans: list[Span]) -> torch.Tensor:
        return attend(case.qkv(rows, spans), case.metadata(rows, spans))

    for row, (start, _) in enumerate(case.spans):
        if start:
            step([row], [(0, start)])
    everything = list(range(len(case.spans)))
    if not is_alone:
        return step(everything, case.spans)
    assert chunk is not None
    return torch.cat(
        [
            step([row], [(at, min(at + chunk, case.spans[row][1]))])
            for row in everything
            for at in range(*case.spans[row], chunk)
        ]
    )


def torch_run(case: Case) -> torch.Tensor:
    cache = case.empty_cache().zero_()
    attend = Attention(case.shape.params, TorchBackend(cache.dtype), case.weights)
    attend.bind(cache)
    for row, (start, _) in enumerate(case.spans):
        if start:
            attend(case.qkv([row], [(0, start)]), case.metadata([row], [(0, start)]))
    rows = list(range(len(case.spans)))
    return attend(case.qkv(rows, case.spans), case.metadata(rows, case.spans))
