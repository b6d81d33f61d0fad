"""The torch backend against attention written out token by token in float64."""

from __future__ import annotations

import random

import pytest
import torch

from argosy_engine.attention import torch_attn
from argosy_engine.attention.backend import Attention
from argosy_engine.attention.params import AttentionParams
from argosy_engine.attention.torch_attn import TorchBackend
from attention_cases import attention_metadata

BLOCK_SIZE = 8
OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.4},
    "window-1": {"sliding_window": 1},
    "window": {"sliding_window": 11},
    "window-beyond": {"sliding_window": 1000},
    "softcap": {"logit_softcap": 0.7},
    "all": {"scale": 0.5, "sliding_window": 9, "logit_softcap": 1.5},
}


@pytest.mark.parametrize("workspace", [1, 8192, torch_attn.WORKSPACE_BYTES])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_equals_the_definition(
    options: dict[str, float], heads: int, kv_heads: int, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_attn, "WORKSPACE_BYTES", workspace)
    rng = random.Random(f"{options}{heads}")
    torch.manual_seed(0)
    head_dim = 16
    # (new tokens, tokens in the end): decodes first, then whole prompts and chunks of prompts
    requests = [(1, rng.randrange(1, 60)) for _ in range(5)] + [(7, 7), (30, 30), (5, 40), (20, 33), (2, 2)]
    num_blocks = 1 + sum(-(-total // BLOCK_SIZE) for _, total in requests)
    free = rng.sample(range(1, num_blocks), num_blocks - 1)
    tables = torch.zeros(len(requests), 8, dtype=torch.int64)
    kv_cache = torch.randn(2, num_blocks, BLOCK_SIZE, kv_heads, head_dim)
    for row, (_, total) in enumerate(requests):
        for block in range(-(-total // BLOCK_SIZE)):
            tables[row, block] = free.pop()
    meta = attention_metadata([(total - new, total) for new, total in requests], tables, BLOCK_SIZE)
    num_tokens = sum(new for new, _ in requests)
    q, k, v = (torch.randn(num_tokens, count, head_dim) for count in (heads, kv_heads, kv_heads))
    params = AttentionParams(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, **{"scale": 0.25, **options}
    )
    attention = Attention(params, TorchBackend(torch.float32))
    attention.bind(kv_cache)
    ours = attention(torch.cat((q, k, v), dim=1).flatten(1), meta).view(q.shape)
    start = 0
    for row, (new, total) in enumerate(requests):
        blocks = tables[row, : -(-total // BLOCK_SIZE)]
        keys, values = (side[blocks].flatten(0, 1)[:total] for side in kv_cache)
        assert torch.equal(keys[total - new :], k[start : start + new])
        for index in range(new):
            expected = _attend(q[start + index], keys, values, total - new + index, **options)
            torch.testing.assert_close(ours[start + index].double(), expected, atol=1e-5, rtol=1e-5)
        start += new


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: int,
    scale: float = 0.25,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
) -> torch.Tensor:
    first = 0 if sliding_window is None else max(position - sliding_window + 1, 0)
    groups = q.shape[0] // keys.shape[1]
    rows = []
    for head in range(q.shape[0]):
        seen = keys[first : position + 1, head // groups].double()
        scores = seen @ q[head].double() * scale
        if logit_softcap is not None:
            scores = logit_softcap * torch.tanh(scores / logit_softcap)
        rows.append(torch.softmax(scores, dim=0) @ values[first : position + 1, head // groups].double())
    return torch.stack(rows)
