"""The paged attention kernel against plain attention in float32."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy_engine.triton_kernels.launch import KNOWN_DEVICES, assume_device, recorded_launches
from argosy_engine.triton_kernels.paged_attention import paged_attention, paged_attention_fp8
from attention_reference import UNWRITTEN, PagedBatch
from fp8_reference import assert_fp8_rows
from option_pairs import covering

FP8 = torch.float8_e4m3fn
MIXED = [(1, 90), (1, 1), (0, 0), (70, 150)]
DECODES = [(1, 1), (1, 64), (0, 0), (1, 203)]


def attend(batch, **options):
    out = batch.output()
    assert paged_attention(batch.q, batch.kv_cache, **(batch.options | options), out=out) is out
    return out


def check(batch, **options):
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[batch.dtype]
    out = attend(batch, **options).float()
    torch.testing.assert_close(out, batch.expected, atol=tolerance, rtol=tolerance)


OPTIONS = {
    "requests": [
        [(1, 1), (0, 0), (17, 64)],
        [(1, 65), (1, 140)],
        [(33, 33), (2, 129), (0, 50)],
        [(7, 63)],
    ],
    "num_kv_heads": [1, 2],
    "group_size": [1, 2, 3, 4, 7],
    "head_dim": [16, 40, 64],
    "block_size": [16, 32, 64],
    "dtype": [torch.float16, torch.bfloat16],
    "sliding_window": [None, 1, 17, 100],
    "chunk_size": [None, None, 24],
    "logit_softcap": [None, 2.0, 30.0],
    "has_sinks": [False, True],
    "has_alibi": [False, True],
}


def batch_of(requests, *, group_size, num_kv_heads, **options):
    torch.manual_seed(0)
    return PagedBatch(requests, num_heads=num_kv_heads * group_size, num_kv_heads=num_kv_heads, **options)


@pytest.mark.parametrize("options", covering(OPTIONS | {"num_segments": [None, 2, 5]}), ids=str)
def test_any_batch_has_the_attention_of_the_reference(options):
    num_segments = options.pop("num_segments")
    check(batch_of(**options), num_segments=num_segments)


@st.composite
def batches(draw):
    totals = draw(st.lists(st.integers(1, 140), min_size=1, max_size=3))
    options = {name: draw(st.sampled_from(values)) for name, values in OPTIONS.items()}
    return batch_of(
        **options
        | {
            "requests": [(draw(st.integers(0, total)), total) for total in totals],
            "sliding_window": draw(st.none() | st.integers(1, 100)),
        }
    )


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(batches(), st.none() | st.integers(2, 7))
def test_random_batches_have_the_attention_of_the_reference(batch, num_segments):
    check(batch, num_segments=num_segments)


@pytest.mark.parametrize("span", [(0, 70), (20, 70), (85, 90), (64, 128)], ids=str)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 17}, {"dtype": torch.float32}], ids=str)
def test_tokens_of_an_image_attend_to_all_of_it(span, options):
    """In several tiles of queries, in a few queries that are left of it, and beside decodes."""
    prompts = PagedBatch([(1, 150), (150, 150), (70, 140)], span=span, num_heads=2, num_kv_heads=1, **options)
    assert (prompts.options["key_ends"] == span[1]).sum() > 4
    check(prompts)
    few = PagedBatch([(5, 90), (1, 1), (9, 128)], span=(86, 90), num_heads=2, num_kv_heads=1, **options)
    check(few)
    check(few, num_segments=3)


@pytest.mark.parametrize("chunk_size", [1, 16, 50, 70, 1000])
def test_chunks(chunk_size):
    check(PagedBatch(MIXED, chunk_size=chunk_size, num_heads=2, num_kv_heads=1))
    check(PagedBatch(DECODES, chunk_size=chunk_size, num_heads=2, num_kv_heads=1), num_segments=3)


@pytest.mark.parametrize("requests", [MIXED, DECODES], ids=["mixed", "decodes"])
@pytest.mark.parametrize("head_dim", [80, 96, 112, 128, 256, 512])
def test_head_sizes(requests, head_dim):
    check(PagedBatch(requests, head_dim=head_dim, num_kv_heads=1, num_heads=2, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("requests", "dtype"),
    [
        (MIXED, torch.bfloat16),
        (MIXED, torch.float16),
        (DECODES, torch.bfloat16),
        (DECODES, torch.float32),
    ],
    ids=str,
)
def test_fp8_cache_with_scales(requests, dtype):
    check(PagedBatch(requests, dtype=dtype, kv_dtype=FP8, num_kv_heads=1))


@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 17, "has_sinks": True}, {"logit_softcap": 2.0}, {"has_alibi": True}],
    ids=str,
)
def test_float32(options):
    check(PagedBatch([(1, 20), (9, 40), (0, 0)], dtype=torch.float32, num_kv_heads=1, **options))
    check(PagedBatch(DECODES, dtype=torch.float32, num_kv_heads=1, **options), num_segments=2)


@pytest.mark.parametrize("window", [1, 15, 16, 64, 1000])
def test_windows_that_end_anywhere_in_a_block(window):
    check(PagedBatch(MIXED, sliding_window=window, num_heads=2, num_kv_heads=1))
    check(PagedBatch(DECODES, sliding_window=window, num_heads=2, num_kv_heads=1), num_segments=3)


@pytest.mark.parametrize("tokens", [63, 64, 65, 128])
def test_prompts_that_end_anywhere_in_a_tile(tokens):
    check(PagedBatch([(tokens, tokens), (tokens, 2 * tokens)], dtype=torch.float16, head_dim=32))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (12, 1), (5, 1), (64, 1)])
def test_any_number_of_heads_shares_a_key_head(num_heads, num_kv_heads):
    options = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": 16}
    check(PagedBatch([(3, 20), (1, 30)], **options))
    check(PagedBatch([(30, 30), (1, 30)], **options))
    check(PagedBatch([(3, 20), (1, 30)], **options, dtype=torch.float32))


@pytest.mark.parametrize("num_segments", [1, 2, 3, 16])
def test_sequences_shorter_than_their_segments(num_segments):
    check(PagedBatch(DECODES, has_sinks=True, num_kv_heads=1), num_segments=num_segments)
    check(PagedBatch([(5, 150), (2, 9)], num_kv_heads=1), num_segments=num_segments)


def test_scores_far_beyond_the_soft_cap():
    batch = PagedBatch([(1, 40)], num_heads=1, num_kv_heads=1, logit_softcap=5.0)
    for key, query in ((1.0, 60000.0), (1.0, -60000.0)):
        batch.q.fill_(query)
        keys = batch.kv_cache[0]
        keys[~keys.isnan()] = key
        # Every score is at the cap, so every key counts alike.
        blocks = batch.options["block_table"][0].long()
        mean = batch.kv_cache[1][blocks].flatten(0, 1)[:40].float().mean(0).half()
        torch.testing.assert_close(attend(batch)[:1], mean.unsqueeze(0), atol=4e-3, rtol=4e-3)


def test_nothing_is_launched_for_an_empty_batch():
    with recorded_launches() as launches:
        attend(PagedBatch([]))
        attend(PagedBatch([], padding=0))
    assert launches == []


def test_padding_requests_alone_write_nothing():
    batch = PagedBatch([(0, 0), (0, 0)], padding=4)
    check(batch, max_query_len=1)
    check(batch, max_query_len=1, num_segments=2)
    check(batch, max_query_len=4)


def test_a_slice_of_the_requests_leaves_the_other_rows_alone():
    batch = PagedBatch(MIXED)
    split = 2
    out = batch.output()
    for part, max_query_len in ((slice(0, split), 1), (slice(split, None), 70)):
        rows = {name: batch.options[name][part] for name in ("seq_lens", "block_table")}
        starts = batch.options["query_start_loc"]
        rows["query_start_loc"] = starts[: split + 1] if part.start == 0 else starts[split:]
        options = batch.options | rows | {"max_query_len": max_query_len}
        paged_attention(batch.q, batch.kv_cache, **options, out=out)
        if part.start == 0:
            assert (out[split:] == batch.output()[split:]).all()
    torch.testing.assert_close(out.float(), batch.expected, atol=4e-3, rtol=4e-3)


def test_a_request_has_the_same_bits_alone():
    batch = PagedBatch(MIXED, dtype=torch.bfloat16)
    together = attend(batch, num_segments=1)
    starts = batch.options["query_start_loc"]
    for row, (new, _) in enumerate(MIXED):
        alone = {name: batch.options[name][row : row + 1] for name in ("seq_lens", "block_table")}
        alone["query_start_loc"] = starts[row : row + 2]
        rows = slice(int(starts[row]), int(starts[row]) + new)
        assert torch.equal(attend(batch, **alone, num_segments=1)[rows], together[rows])


def test_launches_do_not_depend_on_the_values_of_tensors():
    def recorded(requests, max_query_len):
        batch = PagedBatch(requests, padding=60 - sum(new for new, _ in requests))
        batch.options["block_table"] = torch.zeros(len(requests), 40, dtype=torch.int32)
        with recorded_launches() as launches:
            attend(batch, max_query_len=max_query_len)
        return [
            (
                launch.name,
                launch.grid,
                {
                    name: value.shape if name != "k_ptr" and name != "v_ptr" else value.shape[1:]
                    for name, value in launch.arguments.items()
                    if isinstance(value, torch.Tensor)
                },
                {n: v for n, v in launch.arguments.items() if not isinstance(v, torch.Tensor)},
            )
            for launch in launches
        ]

    assert recorded([(1, 300), (1, 200)], 1) == recorded([(0, 0), (1, 3)], 1)
    assert recorded([(1, 300), (50, 200)], 50) == recorded([(0, 0), (2, 3)], 50)


@pytest.mark.parametrize(
    ("num_requests", "max_query_len", "names"),
    [
        (1, 1, ["paged_attention_kernel", "merge_segments_kernel"]),
        (2, 8, ["paged_attention_kernel", "merge_segments_kernel"]),
        (400, 1, ["paged_attention_kernel"]),
        (1, 100, ["paged_attention_kernel"]),
    ],
)
@pytest.mark.parametrize("device", KNOWN_DEVICES)
def test_keys_are_split_where_the_batch_leaves_the_device_idle(num_requests, max_query_len, names, device):
    q = torch.empty(num_requests * max_query_len, 4, 64, dtype=torch.float16)
    with recorded_launches() as launches, assume_device(KNOWN_DEVICES[device]):
        paged_attention(
            q,
            torch.empty(2, 1, 16, 2, 64, dtype=torch.float16),
            query_start_loc=torch.zeros(num_requests + 1, dtype=torch.int32),
            seq_lens=torch.zeros(num_requests, dtype=torch.int32),
            block_table=torch.zeros(num_requests, 256, dtype=torch.int32),
            max_query_len=max_query_len,
            scale=1.0,
        )
    assert [launch.name for launch in launches] == names


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"dtype": torch.float64}, {}, "bfloat16, float16 and float32"),
        ({"kv_dtype": torch.float32}, {}, "use their dtype or torch.float8_e4m3fn"),
        ({"head_dim": 513}, {}, "up to 512"),
        ({"num_heads": 130}, {}, "a multiple, up to 64 times"),
        (
            {"num_heads": 34, "num_kv_heads": 2, "head_dim": 272},
            {},
            "up to 16 may share one of more than 256",
        ),
        ({}, {"sliding_window": 0}, "1 or more"),
        ({}, {"logit_softcap": 0.0}, "must be positive"),
        ({}, {"num_segments": 33}, "between 1 and 32"),
    ],
)
def test_errors_say_what_is_supported(changes, options, message):
    batch = dataclasses.replace(PagedBatch([(1, 2)]), **changes)
    with pytest.raises(ValueError, match=message):
        attend(batch, **options)


def test_fp8_cache_is_refused_where_the_device_lacks_it():
    batch = PagedBatch([(1, 2)], kv_dtype=FP8)
    with assume_device(KNOWN_DEVICES["A100"]), pytest.raises(ValueError, match=r"capability 8\.9"):
        attend(batch)


def check_fp8(batch, scale, **options):
    out_scale = None if scale is None else torch.tensor([scale])
    options = batch.options | options
    out, scales = paged_attention_fp8(batch.q, batch.kv_cache, out_scale=out_scale, **options)
    exact = attend(batch, **options)
    is_written = (exact != UNWRITTEN).any(dim=(1, 2))
    out, exact = out.flatten(1)[is_written], exact.flatten(1)[is_written]
    assert_fp8_rows(out, scales[is_written], exact, scale, looseness=4.0, tolerance=2**-8)


@pytest.mark.parametrize("scale", [0.001, 0.02])
@pytest.mark.parametrize("requests", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_any_batch_in_fp8_with_one_scale(requests, scale):
    torch.manual_seed(0)
    check_fp8(PagedBatch(requests, num_heads=3, num_kv_heads=1, head_dim=40), scale, num_segments=1)


@pytest.mark.parametrize(
    "options",
    [{"sliding_window": 17}, {"has_sinks": True}, {"logit_softcap": 2.0}, {"has_alibi": True}],
    ids=str,
)
def test_options_of_attention_in_fp8_with_one_scale(options):
    torch.manual_seed(0)
    check_fp8(PagedBatch(MIXED, num_heads=3, num_kv_heads=1, head_dim=40, **options), 0.02, num_segments=1)


@pytest.mark.full
@settings(max_examples=10, deadline=None)
@given(batches(), st.sampled_from([0.001, 0.02]))
def test_random_batches_in_fp8_with_one_scale(batch, scale):
    check_fp8(batch, scale, num_segments=1)


@pytest.mark.parametrize("scale", [None, 0.02])
@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 17, "has_sinks": True}, {"logit_softcap": 2.0}, {"has_alibi": True}],
    ids=str,
)
def test_segments_are_merged_in_fp8(options, scale):
    check_fp8(PagedBatch(DECODES, num_heads=3, num_kv_heads=1, head_dim=40, **options), scale, num_segments=3)


@pytest.mark.parametrize("scale", [None, 0.02])
def test_the_largest_head_decides_the_scale_of_a_token(scale):
    batch = PagedBatch(DECODES, num_heads=6, num_kv_heads=3, dtype=torch.float32, head_dim=40)
    batch.kv_cache[1, :, :, 2] *= 1000.0
    check_fp8(batch, scale, num_segments=5)


def test_a_scale_per_token_is_left_to_the_product_where_nothing_is_merged():
    batch = PagedBatch(DECODES)
    out, scales = paged_attention_fp8(
        batch.q, batch.kv_cache, out_scale=None, **batch.options, num_segments=1
    )
    assert scales is None
    assert out.dtype is batch.dtype
    with pytest.raises(ValueError, match="give an out_scale"):
        paged_attention(
            batch.q,
            batch.kv_cache,
            **batch.options,
            num_segments=1,
            out=torch.empty(batch.q.shape, dtype=FP8),
            row_scales=torch.empty(len(batch.q), 1),
        )
