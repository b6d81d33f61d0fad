import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy_engine.triton_kernels.fused_moe import fused_moe
from argosy_engine.triton_kernels.launch import KNOWN_DEVICES, assume_device, recorded_launches
from option_pairs import covering

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(tokens, *, experts=4, hidden=64, inner=32, dtype=torch.float32):
    """Return x, logits, w1 and w2. Weights are scaled so that all results are of the order of 1."""
    return (
        random(tokens, hidden, dtype=dtype, seed=1),
        random(tokens, experts, seed=2),
        (random(experts, 2 * inner, hidden, seed=3) / hidden**0.5).to(dtype),
        (random(experts, hidden, inner, seed=4) / inner**0.5).to(dtype),
    )


def expected(x, logits, w1, w2, k, *, normalises, activate=F.silu):
    x, w1, w2 = x.float(), w1.float(), w2.float()
    chosen = torch.softmax(logits.float(), dim=-1).topk(k, dim=-1)
    weights = chosen.values
    if normalises:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    out = torch.zeros_like(x)
    for token, experts in enumerate(chosen.indices.tolist()):
        for expert, weight in zip(experts, weights[token], strict=True):
            gate, up = (w1[expert] @ x[token]).chunk(2)
            out[token] += weight * (w2[expert] @ (activate(gate) * up))
    return out


TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def assert_close(out, wanted):
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.float(), wanted, rtol=tolerance, atol=tolerance)


OPTIONS = {
    "tokens": [1, 2, 12],
    "shape": [(1, 1), (4, 2), (7, 3)],
    "hidden": [32, 64, 80],
    "inner": [16, 48, 100],
    "normalises": [False, True],
    "dtype": list(TOLERANCE),
}


def check(tokens, shape, hidden, inner, normalises, dtype):
    experts, k = shape
    args = inputs(tokens, experts=experts, hidden=hidden, inner=inner, dtype=dtype)
    out = fused_moe(*args, k, normalises=normalises)
    assert out.dtype is dtype
    assert_close(out, expected(*args, k, normalises=normalises))


@pytest.mark.parametrize("options", covering(OPTIONS), ids=str)
def test_experts_match_the_reference(options):
    check(**options)


@pytest.mark.full
@settings(max_examples=30, deadline=None)
@given(
    st.fixed_dictionaries(
        {name: st.sampled_from(values) for name, values in OPTIONS.items()} | {"tokens": st.integers(1, 12)}
    )
)
def test_random_experts_match_the_reference(options):
    check(**options)


@pytest.mark.parametrize("tokens", [40, 70])
def test_tiles_of_many_rows(tokens):
    args = inputs(tokens, experts=1, dtype=torch.bfloat16)
    assert_close(fused_moe(*args, 1, normalises=True), expected(*args, 1, normalises=True))


def test_all_tokens_at_one_expert():
    x, _, w1, w2 = inputs(70, experts=12)
    logits = torch.zeros(70, 12)
    logits[:, 3] = 9.0
    out = fused_moe(x, logits, w1, w2, 1, normalises=True)
    assert_close(out, expected(x, logits, w1, w2, 1, normalises=True))


@pytest.mark.parametrize("tokens", [1, 9])
def test_biases_and_the_clamped_activation(tokens):
    """As in gpt-oss; values reach its limits."""
    x, logits, w1, w2 = inputs(tokens, experts=5, inner=48)
    w1, b1, b2 = w1 * 8, random(5, 96, seed=5) * 4, random(5, 64, seed=6)
    wanted = torch.zeros_like(x)
    for token, row in enumerate(logits):
        chosen = row.topk(2)
        for expert, weight in zip(chosen.indices, torch.softmax(chosen.values, dim=0), strict=True):
            gate, up = (w1[expert] @ x[token] + b1[expert]).chunk(2)
            assert gate.max() > 7
            assert up.abs().max() > 7
            gate, up = gate.clamp(max=7), up.clamp(-7, 7)
            inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            wanted[token] += weight * (w2[expert] @ inner + b2[expert])
    out = fused_moe(x, logits, w1, w2, 2, normalises=True, activation="swigluoai", w1_bias=b1, w2_bias=b2)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "k"), [(torch.float32, 2), (torch.bfloat16, 1)])
def test_weights_on_what_experts_get(dtype, k):
    """As in Llama 4."""
    x, logits, w1, w2 = inputs(9, experts=5, dtype=dtype)
    wanted = torch.zeros(x.shape)
    for token, row in enumerate(logits):
        for expert in row.topk(k).indices:
            gate, up = (w1[expert].float() @ (x[token].float() * torch.sigmoid(row[expert]))).chunk(2)
            wanted[token] += w2[expert].float() @ (F.silu(gate) * up)
    out = fused_moe(x, logits, w1, w2, k, normalises=False, is_sigmoid=True, scales_inputs=True)
    assert_close(out, wanted)


@pytest.mark.parametrize("scales_inputs", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("hidden", "inner"), [(64, 32), (80, 100)])
def test_experts_without_a_gate(hidden, inner, dtype, scales_inputs):
    """As in Nemotron-H, and with what a gate has: biases, and weights on inputs."""
    x, logits, w1, w2 = inputs(9, experts=5, hidden=hidden, inner=inner, dtype=dtype)
    w1, b1 = w1[:, inner:], random(5, inner, seed=5, dtype=dtype)
    wanted = torch.zeros(x.shape)
    for token, row in enumerate(logits):
        for expert in row.topk(2).indices:
            weight = torch.sigmoid(row[expert])
            given, factor = (x[token].float() * weight, 1.0) if scales_inputs else (x[token].float(), weight)
            up = F.relu(w1[expert].float() @ given + b1[expert].float()).square()
            wanted[token] += factor * (w2[expert].float() @ up)
    out = fused_moe(
        x,
        logits,
        w1.contiguous(),
        w2,
        2,
        normalises=False,
        is_sigmoid=True,
        scales_inputs=scales_inputs,
        activation="relu2",
        w1_bias=b1,
    )
    tolerance = 2 * TOLERANCE[dtype]  # squares
    torch.testing.assert_close(out.float(), wanted, rtol=tolerance, atol=tolerance)


def test_experts_without_a_gate_in_fp8():
    x, logits, w1, w2 = inputs(5, dtype=torch.bfloat16)
    w1, scale = w1[:, :32].contiguous(), random(4, 32, seed=5).abs() + 0.5
    w1 = (w1.float() / scale[:, :, None]).to(torch.float8_e4m3fn)
    w2, ones = w2.to(torch.float8_e4m3fn), torch.ones(4, 64)
    wanted = torch.zeros(x.shape)
    for token, row in enumerate(logits):
        chosen = torch.softmax(row, dim=0).topk(2)
        for expert, weight in zip(chosen.indices, chosen.values, strict=True):
            up = F.relu((w1[expert].float() * scale[expert, :, None]) @ x[token].float()).square()
            wanted[token] += weight * (w2[expert].float() @ up)
    out = fused_moe(x, logits, w1, w2, 2, normalises=False, activation="relu2", w1_scale=scale, w2_scale=ones)
    assert_close(out, wanted)


def test_nan_of_an_expert_without_a_gate_stays_in_its_row():
    x, logits, w1, w2 = inputs(4)
    clean = fused_moe(x, logits, w1[:, :32].contiguous(), w2, 2, normalises=True, activation="relu2")
    x[1, 5] = torch.nan
    out = fused_moe(x, logits, w1[:, :32].contiguous(), w2, 2, normalises=True, activation="relu2")
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2, 3]], clean[[0, 2, 3]])


def test_gelu():
    args = inputs(3)
    wanted = expected(*args, 2, normalises=True, activate=lambda gate: F.gelu(gate, approximate="tanh"))
    assert_close(fused_moe(*args, 2, normalises=True, activation="gelu"), wanted)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("is_per_channel", [False, True])
def test_fp8_weights(dtype, is_per_channel):
    x, logits, w1, w2 = inputs(5, dtype=dtype)

    def quantised(weight):
        dim = -1 if is_per_channel else (1, 2)
        scale = weight.float().abs().amax(dim=dim, keepdim=True) / 448
        return (weight.float() / scale).to(torch.float8_e4m3fn), scale

    (w1, w1_scale), (w2, w2_scale) = quantised(w1), quantised(w2)
    wanted = expected(x, logits, w1.float() * w1_scale, w2.float() * w2_scale, 2, normalises=True)
    w1_scale, w2_scale = (
        scale.squeeze(-1) if is_per_channel else scale.flatten() for scale in (w1_scale, w2_scale)
    )
    out = fused_moe(x, logits, w1, w2, 2, normalises=True, w1_scale=w1_scale, w2_scale=w2_scale)
    assert_close(out, wanted)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("hidden", "inner"), [(128, 256), (176, 144)])
@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_fp8_weights_with_scales_of_blocks(activation, hidden, inner, dtype):
    tokens = 5
    x, logits, w1, w2 = inputs(tokens, hidden=hidden, inner=inner, dtype=dtype)
    if activation == "relu2":
        w1 = w1[:, inner:].contiguous()

    def quantised(weight, seed):
        """Return FP8, scales [experts, blocks, rows], and what these stand for."""
        experts, rows, columns = weight.shape
        scales = 0.5 + torch.rand(
            experts, -(-columns // 128), rows, generator=torch.Generator().manual_seed(seed)
        )
        factors = scales.repeat_interleave(128, dim=1)[:, :columns].transpose(1, 2)
        values = (weight.float() / factors).to(torch.float8_e4m3fn)
        return values, scales, values.float() * factors

    (w1, w1_scale, wide_1), (w2, w2_scale, wide_2) = quantised(w1, 5), quantised(w2, 6)
    if activation == "silu":
        wanted = expected(x, logits, wide_1, wide_2, 2, normalises=True)
    else:
        wanted = torch.zeros(x.shape)
        for token, row in enumerate(logits):
            chosen = row.topk(2)
            for expert, weight in zip(chosen.indices, torch.softmax(chosen.values, dim=0), strict=True):
                wanted[token] += weight * (
                    wide_2[expert] @ F.relu(wide_1[expert] @ x[token].float()).square()
                )
    out = fused_moe(
        x, logits, w1, w2, 2, normalises=True, activation=activation, w1_scale=w1_scale, w2_scale=w2_scale
    )
    tolerance = 2 * TOLERANCE[dtype]
    torch.testing.assert_close(out.float(), wanted, rtol=tolerance, atol=tolerance)


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat((E2M1, -E2M1))


def mxfp4(experts, rows, columns, seed):
    """Return pairs, exponents, and what they stand for. Every number and some extremes of the exponents occur."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(
        122, 126, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator
    )
    exponents[:, 0] = 1  # as good as 0
    numbers = torch.stack((E2M1[(pairs & 15).long()], E2M1[(pairs >> 4).long()]), dim=3).flatten(2)
    factors = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)
    return pairs, exponents, numbers * factors.repeat_interleave(32, dim=2)


@pytest.mark.parametrize("tokens", [1, 9, 70])
@pytest.mark.parametrize(("hidden", "inner"), [(64, 32), (96, 64), (128, 160)])
def test_mxfp4_with_biases_and_the_clamped_activation(hidden, inner, tokens):
    """As in gpt-oss: weights are widened in the kernel, and the result is that of the widened ones."""
    x, logits, _, _ = inputs(tokens, experts=5, hidden=hidden, dtype=torch.bfloat16)
    w1, w1_scale, wide_1 = mxfp4(5, 2 * inner, hidden, 5)
    w2, w2_scale, wide_2 = mxfp4(5, hidden, inner, 6)
    biases = {
        "w1_bias": random(5, 2 * inner, seed=7, dtype=torch.bfloat16),
        "w2_bias": random(5, hidden, seed=8, dtype=torch.bfloat16),
    }
    out = fused_moe(
        x,
        logits,
        w1,
        w2,
        2,
        normalises=True,
        activation="swigluoai",
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        **biases,
    )
    wide_1, wide_2 = wide_1.to(torch.bfloat16), wide_2.to(torch.bfloat16)
    widened = fused_moe(x, logits, wide_1, wide_2, 2, normalises=True, activation="swigluoai", **biases)
    torch.testing.assert_close(out.float(), widened.float(), rtol=1e-2, atol=1e-2)
    exact = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token, row in enumerate(logits):
        chosen = row.topk(2)
        for expert, weight in zip(chosen.indices, torch.softmax(chosen.values, dim=0), strict=True):
            both = wide_1[expert].double() @ x[token].double() + biases["w1_bias"][expert].double()
            gate, up = both.chunk(2)
            gate, up = gate.clamp(max=7), up.clamp(-7, 7)
            activated = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            exact[token] += weight * (
                wide_2[expert].double() @ activated + biases["w2_bias"][expert].double()
            )
    assert (out.double() - exact).norm() < 1e-2 * exact.norm()


@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_mxfp4_with_other_activations(activation):
    x, logits, _, _ = inputs(3, dtype=torch.bfloat16)
    w1, w1_scale, wide_1 = mxfp4(4, 32 if activation == "relu2" else 64, 64, 5)
    w2, w2_scale, wide_2 = mxfp4(4, 64, 32, 6)
    given = {"normalises": True, "activation": activation}
    out = fused_moe(x, logits, w1, w2, 2, w1_scale=w1_scale, w2_scale=w2_scale, **given)
    widened = fused_moe(x, logits, wide_1.to(x.dtype), wide_2.to(x.dtype), 2, **given)
    torch.testing.assert_close(out.float(), widened.float(), rtol=2e-2, atol=2e-2)


def test_mxfp4_needs_bfloat16_and_whole_blocks():
    x, logits, _, _ = inputs(1)
    w1, w1_scale, _ = mxfp4(4, 64, 64, 5)
    w2, w2_scale, _ = mxfp4(4, 64, 32, 6)
    scales = {"w1_scale": w1_scale, "w2_scale": w2_scale}
    with pytest.raises(ValueError, match="bfloat16"):
        fused_moe(x, logits, w1, w2, 2, normalises=True, **scales)
    with pytest.raises(ValueError, match="multiples of 32"):
        fused_moe(x.bfloat16(), logits, w1, w2[:, :, :8], 2, normalises=True, **scales)
    with pytest.raises(ValueError, match="need both"):
        fused_moe(x.bfloat16(), logits, w1, w2, 2, normalises=True, w1_scale=w1_scale)


def test_padding_is_zero_and_changes_nothing():
    x, logits, w1, w2 = inputs(6)
    slots = torch.tensor([0, -1, 5, -1, -1, 7])
    used = slots >= 0
    x[~used], logits[~used] = torch.nan, torch.nan
    out = fused_moe(x, logits, w1, w2, 2, normalises=True, slot_mapping=slots)
    assert (out[~used] == 0).all()
    assert torch.equal(out[used], fused_moe(x[used], logits[used], w1, w2, 2, normalises=True))


@pytest.mark.parametrize("split", [1, 3])
def test_parts_of_the_experts_add_up(split):
    """Expert parallelism: a token may have none of the experts of a part."""
    x, logits, w1, w2 = inputs(20, experts=7)
    slots = torch.arange(20)
    slots[4] = -1
    parts = [
        fused_moe(
            x, logits, w1[part], w2[part], 2, normalises=True, slot_mapping=slots, first_expert=part.start
        )
        for part in (slice(0, split), slice(split, 7))
    ]
    wanted = expected(x, logits, w1, w2, 2, normalises=True)
    wanted[4] = 0.0
    assert_close(parts[0] + parts[1], wanted)
    assert (parts[0] == 0).all(dim=1).sum() > 1, "every token has an expert of the first part"


def test_nan_stays_in_its_row():
    args = inputs(4)
    args[0][1, 5] = torch.nan
    out = fused_moe(*args, 2, normalises=True)
    assert out[1].isnan().all()
    rest = [0, 2, 3]
    assert_close(out[rest], expected(*args, 2, normalises=True)[rest])


def test_strided_rows_and_given_output():
    x, *args = inputs(4)
    out = torch.full((4, 80), 7.0)
    fused_moe(torch.cat((x, x), dim=1)[:, :64], *args, 2, normalises=True, out=out[:, :64])
    assert_close(out[:, :64], expected(x, *args, 2, normalises=True))
    assert (out[:, 64:] == 7.0).all()


def test_five_launches_whatever_the_batch():
    for tokens in (1, 300):
        with recorded_launches() as launches:
            fused_moe(*inputs(tokens), 2, normalises=True)
        assert len(launches) == 5


def test_empty_batch():
    assert fused_moe(*inputs(0), 2, normalises=True).shape == (0, 64)


def test_fp8_weights_need_both_scales():
    x, logits, w1, w2 = inputs(1)
    with pytest.raises(ValueError, match="w1_scale"):
        fused_moe(x, logits, w1, w2, 2, normalises=True, w1_scale=torch.ones(4))
    w1, w2 = w1.to(torch.float8_e4m3fn), w2.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="w2_scale"):
        fused_moe(x, logits, w1, w2, 2, normalises=True, w1_scale=torch.ones(4))


def test_fp8_weights_are_refused_where_the_device_has_none():
    x, logits, w1, w2 = inputs(1)
    w1, w2 = w1.to(torch.float8_e4m3fn), w2.to(torch.float8_e4m3fn)
    with assume_device(KNOWN_DEVICES["A100"]), pytest.raises(ValueError, match="FP8"):
        fused_moe(x, logits, w1, w2, 2, normalises=True, w1_scale=torch.ones(4), w2_scale=torch.ones(4))
