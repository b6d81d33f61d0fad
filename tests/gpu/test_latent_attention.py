"""The kernels of attention over latents against plain torch in float64."""

import pytest
import torch
from msgspec.structs import replace

from argosy_engine.attention.params import LatentAttentionParams
from argosy_engine.attention.selector import AttentionNeeds
from argosy_engine.attention.triton_attn import TritonBackend
from argosy_engine.layers.self_test import attention_self_test
from argosy_engine.triton_kernels.latent_attention import latent_attention, latent_rope_and_cache
from argosy_engine.triton_kernels.launch import recorded_launches
from latent_cases import latent_case
from option_pairs import covering

CPU = torch.device("cpu")
PARAMS = LatentAttentionParams(
    num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, scale=0.2
)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SPANS = [(40, 41), (0, 1), (0, 20), (30, 33), (5, 40), (7, 9)]


class Batch:
    """Random queries and latents; what no request reads is NaN.

    Args:
        requests: queries and tokens of each.
    """

    def __init__(
        self, requests, *, num_heads=4, rank=32, rope=16, block_size=16, dtype=torch.float16, scale=0.25
    ):
        generator = torch.Generator().manual_seed(0)

        def draw(*shape):
            return torch.randn(shape, generator=generator).to(dtype)

        counts = torch.tensor([0, *(queries for queries, _ in requests)])
        num_queries, longest = int(counts.sum()), max(-(-total // block_size) for _, total in requests)
        # The layouts in which a backend has them.
        self.q_latent = draw(num_heads, num_queries, rank).transpose(0, 1)
        self.q_rope = draw(num_queries, num_heads, 24 + rope)[..., 24:]
        num_blocks = longest * len(requests)
        self.cache = torch.full((num_blocks, block_size, rank + rope), torch.nan, dtype=dtype)
        self.table = torch.randperm(num_blocks, generator=generator).view(len(requests), longest)
        self.options = {
            "query_start_loc": counts.cumsum(0).to(torch.int32),
            "seq_lens": torch.tensor([total for _, total in requests], dtype=torch.int32),
            "block_table": self.table.to(torch.int32),
            "max_query_len": max(queries for queries, _ in requests),
            "scale": scale,
        }
        self.expected = torch.empty(num_queries, num_heads, rank, dtype=torch.float64)
        first = 0
        for row, (queries, total) in enumerate(requests):
            keys = draw(total, rank + rope)
            for position in range(total):
                block = self.table[row, position // block_size]
                self.cache[block, position % block_size] = keys[position]
            own = slice(first, first + queries)
            q = torch.cat((self.q_latent[own], self.q_rope[own]), dim=2).double()
            scores = torch.einsum("nhd,sd->hns", q, keys.double()) * scale
            future = torch.arange(total) > torch.arange(total - queries, total)[:, None]
            probs = scores.masked_fill(future, -torch.inf).softmax(-1)
            self.expected[own] = torch.einsum("hns,sr->nhr", probs, keys[:, :rank].double())
            first += queries


def check(batch, **options):
    found = latent_attention(batch.q_latent, batch.q_rope, batch.cache, **(batch.options | options))
    tolerance = TOLERANCE[batch.cache.dtype]
    torch.testing.assert_close(found.double(), batch.expected, atol=tolerance, rtol=tolerance)


OPTIONS = {
    "requests": [[(1, 1), (1, 64), (0, 7), (1, 90)], [(3, 40), (1, 17)], [(33, 33), (2, 70), (0, 50)]],
    "num_heads": [1, 3, 16, 40],
    "rank": [16, 48],
    "rope": [16, 8],
    "block_size": [16, 48],
    "dtype": [torch.float16, torch.bfloat16],
    "num_segments": [None, 2, 5],
}


@pytest.mark.parametrize("options", covering(OPTIONS), ids=str)
def test_any_batch_has_the_attention_of_the_reference(options):
    num_segments = options.pop("num_segments")
    check(Batch(**options), num_segments=num_segments)


@pytest.mark.parametrize("requests", [[(1, 40), (1, 3)], [(20, 30)]], ids=str)
def test_the_largest_latents(requests):
    check(Batch(requests, rank=512, rope=64, num_heads=2, scale=0.05))


def test_float32():
    check(Batch([(1, 20), (9, 40), (0, 3)], dtype=torch.float32, rank=80))


def test_launches_do_not_depend_on_the_values_of_tensors():
    launched = []
    for total in (20, 60):
        batch = Batch([(1, total), (1, 64)])
        with recorded_launches() as launches:
            latent_attention(batch.q_latent, batch.q_rope, batch.cache, **batch.options)
        launched.append([(each.variant, each.grid) for each in launches])
    assert launched[0] == launched[1]


def test_nothing_is_launched_for_an_empty_batch():
    batch = Batch([(1, 5)])
    with recorded_launches() as launches:
        latent_attention(batch.q_latent[:0], batch.q_rope[:0], batch.cache, **batch.options)
    assert not launches


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"dtype": torch.float64}, {}, "takes one dtype"),
        ({"rank": 528}, {}, "up to 512 and 128"),
        ({}, {"num_segments": 33}, "between 1 and 32"),
    ],
)
def test_errors_say_what_is_supported(changes, options, message):
    batch = Batch([(1, 5)], **changes)
    with pytest.raises(ValueError, match=message):
        latent_attention(batch.q_latent, batch.q_rope, batch.cache, **batch.options, **options)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"num_heads": 3, "kv_lora_rank": 48, "v_head_dim": 40}, torch.float16),
        ({"qk_rope_head_dim": 2, "num_heads": 20}, torch.float32),
        ({"kv_lora_rank": 48}, torch.bfloat16),  # where long prompts are expanded
    ],
    ids=str,
)
def test_a_step_has_the_results_of_keys_and_values_of_each_head(changes, dtype):
    case = latent_case(replace(PARAMS, **changes), SPANS, dtype=dtype)
    tolerance = 4 * TOLERANCE[dtype]
    torch.testing.assert_close(
        case.run(TritonBackend(dtype)).double(), case.expected(), atol=tolerance, rtol=tolerance
    )


def test_rows_of_padding_are_left_alone():
    q, compressed = torch.ones(3, 2, 12), torch.ones(3, 24)
    cache = torch.zeros(2, 16, 24)
    table = torch.full((4, 4), 0.25)
    latent_rope_and_cache(
        q,
        compressed,
        torch.tensor([0, 1, 0]),
        table,
        table,
        torch.tensor([17, -1, 5]),
        cache,
        norm=torch.ones(16),
        eps=1e-6,
    )
    assert q[1].eq(1).all()
    assert q[[0, 2], :, 4:].ne(1).all()
    written = cache.view(32, 24).abs().sum(1).nonzero().flatten()
    assert written.tolist() == [5, 17]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_our_kernels_pass_the_test_on_the_device(dtype):
    assert (
        attention_self_test("triton", AttentionNeeds("cuda", dtype, 16, [PARAMS]), getattr(torch, dtype), CPU)
        is None
    )


def test_what_the_kernels_refuse_is_a_reason_against_the_backend():
    layer = replace(PARAMS, kv_lora_rank=528)
    reason = attention_self_test("triton", AttentionNeeds("cuda", "float32", 16, [layer]), torch.float32, CPU)
    assert reason.startswith("it failed with ValueError: a cache of 536 elements per token")
