import numpy as np
import pytest
import torch

from argosy_engine.params import SamplingParams
from argosy_engine.sample.builtin_processors import AllowedTokenIds, LogitBias, MinTokens, Penalties
from argosy_engine.sample.logits_processor import Added, BatchUpdate, Rows
from argosy_engine.sample.sampler import GrammarMask
from argosy_engine.sample.torch_sampler import apply_grammar
from argosy_engine.triton_kernels.process_logits import (
    IN_PROMPT,
    RowEdits,
    RowMasks,
    RowPenalties,
    clear_entries,
    count_tokens,
    process_logits,
)

VOCAB = 2100  # two programs per row; not a multiple of 32
EOS = 3
ALLOWED = (1, 3, 5, 40, 64, 2047, 2048, 2099)
BIAS = {0: 1.5, 5: -2.0, 40: 100.0, 2048: 3.0, 2099: -0.25}
PARAMS = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.7, logit_bias=BIAS),
    SamplingParams(allowed_token_ids=ALLOWED, min_tokens=4, max_tokens=9, stop_token_ids=(64,)),
    SamplingParams(
        frequency_penalty=2.0,
        repetition_penalty=0.5,
        allowed_token_ids=ALLOWED,
        min_tokens=1,
        logit_bias={**BIAS, EOS: 2.0},
    ),
]
PROMPTS = [[1, 2], [5, 5, 7, 2048], [9], [40, EOS, 12]]
OUTPUTS = [[3], [7, 40, 40, 11, 2099], [64, 1], [12, 3, 3, 3]]


def positions():
    return np.array([len(prompt) + len(output) for prompt, output in zip(PROMPTS, OUTPUTS, strict=True)])


def draw_logits(dtype=torch.float32):
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    logits[1, 40], logits[3, 5] = float("-inf"), 0.0
    return logits.to(dtype)


def draw_bitmask():
    words = np.random.default_rng(4).integers(-(1 << 31), 1 << 31, (2, -(-VOCAB // 32)), dtype=np.int64)
    return torch.from_numpy(words.astype(np.int32))


def expected(logits):
    """What the CPU's processors make of the logits."""
    logits = logits.float().clone()
    apply_grammar(logits, GrammarMask(np.array([3, 1]), draw_bitmask().numpy()))
    update = BatchUpdate()
    for slot, params in enumerate(PARAMS):
        tokens = PROMPTS[slot] + OUTPUTS[slot]
        update.added.append(Added(slot, params, tokens, len(PROMPTS[slot])))
    rows = Rows(np.arange(4), positions(), 4)
    for processor in (
        AllowedTokenIds(),
        MinTokens((EOS,)),
        LogitBias(),
        Penalties(4, torch.device("cpu")),
    ):
        processor.update_state(update)
        processor.apply(logits, rows)
    return logits


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def penalties():
    counts = torch.full((3, VOCAB), 99, dtype=torch.int32)  # left by earlier requests
    clear_entries(counts, ints(2, -1, 0))
    entries, tokens, is_output = [], [], []
    for row, entry in ((1, 2), (3, 0)):
        for part, is_out in ((PROMPTS[row], False), (OUTPUTS[row], True)):
            entries += [entry] * len(part)
            tokens += part
            is_output += [is_out] * len(part)
    count_tokens(counts, ints(*entries, -1), torch.tensor([*tokens, 8]), torch.tensor([*is_output, True]))
    values = torch.full((3, 3), float("nan"))
    for row, entry in ((1, 2), (3, 0)):
        params = PARAMS[row]
        values[entry] = torch.tensor(
            [params.repetition_penalty, params.frequency_penalty, params.presence_penalty]
        )
    return RowPenalties(ints(-1, 2, -1, 0), counts, values)


def edits():
    """Edits of rows 1 to 3, with more tokens for row 1 than the kernel visits at a time."""
    many = dict.fromkeys(range(100, 700), 0.0)
    lists = [
        {token: (bias, 0) for token, bias in {**BIAS, **many}.items()},
        {token: (0.0, len(PROMPTS[2]) + 4) for token in (EOS, 64)},
        {
            token: (bias, len(PROMPTS[3]) + 1 if token == EOS else 0)
            for token, bias in {**BIAS, EOS: 2.0}.items()
        },
    ]
    width = max(map(len, lists))
    ids = torch.full((3, width), 7, dtype=torch.int32)
    biases, first = torch.full((3, width), float("nan")), torch.full((3, width), 1 << 40)
    for entry, tokens in enumerate(lists):
        ids[entry, : len(tokens)] = ints(*tokens)
        biases[entry, : len(tokens)] = torch.tensor([bias for bias, _ in tokens.values()])
        first[entry, : len(tokens)] = torch.tensor([position for _, position in tokens.values()])
    return RowEdits(ints(-1, 0, 1, 2), ints(*map(len, lists)), ids, biases, first)


def allowed():
    bits = torch.zeros(1, 32 * -(-VOCAB // 32), dtype=torch.int64)
    bits[0, list(ALLOWED)] = 1
    words = (bits.view(1, -1, 32) << torch.arange(32)).sum(-1)
    return RowMasks(ints(-1, -1, 0, 0), words.to(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_processed_as_on_a_cpu(dtype):
    logits = draw_logits(dtype)
    processed = process_logits(
        logits,
        torch.from_numpy(positions()),
        grammar=RowMasks(ints(-1, 1, -1, 0), draw_bitmask()),
        allowed=allowed(),
        edits=edits(),
        penalties=penalties(),
    )
    torch.testing.assert_close(processed, expected(logits))


def test_rows_without_processors_are_widened_and_padding_is_not_written():
    logits = draw_logits(torch.float16)
    out = torch.full((4, VOCAB), 7.0)
    rows = torch.tensor([5, -1, 5, 5])
    process_logits(logits, rows, grammar=RowMasks(ints(-1, 0, -1, -1), draw_bitmask()), out=out)
    assert out[[0, 2, 3]].equal(logits[[0, 2, 3]].float())
    assert (out[1] == 7.0).all()


def test_counts_know_prompt_from_output():
    counts = penalties().token_counts
    assert counts[2, 5] == IN_PROMPT
    assert counts[2, 40] == 2
    assert counts[2, 7] == IN_PROMPT + 1
    assert counts[0, EOS] == IN_PROMPT + 3
    assert (counts[2] != 0).sum() == len({*PROMPTS[1], *OUTPUTS[1]})
    assert (counts[1] == 99).all()


def test_the_result_does_not_overwrite_the_logits():
    logits = draw_logits()
    with pytest.raises(ValueError, match="another tensor"):
        process_logits(logits, torch.from_numpy(positions()), out=logits)
