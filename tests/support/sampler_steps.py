"""A sampler driven by hand, step by step, and references in plain steps of what its requests ask for."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch

from argosy_engine.params import SamplingParams
from argosy_engine.sample.sampler import GrammarMask, SamplerOptions, make_sampler

VOCAB = 67
EOS = (1, 2)
SLOTS = 8
CPU = torch.device("cpu")
DEFAULTS = SamplerOptions(vocab_size=VOCAB)


class Batch:
    """A sampler with the token table its owner keeps; steps are driven by hand."""

    def __init__(self, options: SamplerOptions = DEFAULTS, num_slots: int = SLOTS) -> None:
        self.token_ids = np.zeros((num_slots, 64), np.int32)
        self.sampler = make_sampler(self.token_ids, EOS, CPU, options)
        self.tokens: dict[int, list[int]] = {}

    def add(self, slot: int, params: SamplingParams, prompt: list[int], output: list[int]) -> None:
        self.tokens[slot] = prompt + output
        self.token_ids[slot, : len(self.tokens[slot])] = self.tokens[slot]
        self.sampler.add(slot, params, prompt + output, len(prompt))

    def remove(self, slot: int) -> None:
        del self.tokens[slot]
        self.sampler.remove(slot)

    def step(self, slots: list[int], logits: torch.Tensor, grammar: GrammarMask | None = None) -> Any:
        positions = np.array([len(self.tokens[slot]) for slot in slots])
        out = self.sampler.sample(logits.clone(), np.array(slots), positions, grammar)
        for slot, token in zip(slots, out.token_ids.tolist(), strict=True):
            self.token_ids[slot, len(self.tokens[slot])] = token
            self.tokens[slot].append(token)
        return out


def reference(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """Processed logits of one row, as vLLM's documentation describes them, in plain steps."""
    x = logits.astype(np.float64).copy()
    if params.allowed_token_ids is not None:
        x = np.where(np.isin(np.arange(VOCAB), params.allowed_token_ids), x, -np.inf)
    for word in params.bad_words_token_ids:
        prefix = list(word[:-1])
        if len(output) >= len(prefix) and output[len(output) - len(prefix) :] == prefix:
            x[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        x[[*EOS, *params.stop_token_ids]] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in set(prompt) | set(output):
        x[token] = (
            x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        )
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return x


TOKEN = st.integers(0, VOCAB - 1)
PARAMS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.0, 0.7, 1.0]), "seed": st.integers(0, 1 << 40)},
    optional={
        "top_k": st.integers(1, 9),
        "top_p": st.floats(0.1, 1.0),
        "min_p": st.floats(0.0, 0.9),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.5, 3.0),
        "logit_bias": st.dictionaries(TOKEN, st.floats(-20, 20), max_size=5),
        "allowed_token_ids": st.sets(TOKEN, min_size=12).map(tuple),
        "bad_words_token_ids": st.lists(
            st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), max_size=4
        ).map(tuple),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.sets(TOKEN, max_size=2).map(tuple),
        "logprobs": st.integers(0, 5),
    },
).map(lambda fields: SamplingParams(max_tokens=32, **fields))
EVENT = st.tuples(
    st.integers(0, SLOTS - 1), PARAMS, st.lists(TOKEN, min_size=1, max_size=9), st.lists(TOKEN, max_size=4)
)


def cut(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """min_p, top-k and top-p, one after the other, of one row."""
    kept = logits.clone()
    if params.min_p:
        kept[logits < logits.max() + math.log(params.min_p)] = -math.inf
    if params.top_k:
        kept[kept < kept.topk(params.top_k).values[-1]] = -math.inf
    if params.top_p < 1.0:
        probs, order = kept.softmax(-1).sort(descending=True)
        kept[order[probs.cumsum(-1) - probs >= params.top_p]] = -math.inf
    return kept


def check_chosen_tokens(options: SamplerOptions) -> None:
    """Check log probabilities of rows that ask for the best tokens, for chosen ones, more or fewer, and for none."""
    torch.manual_seed(5)
    logits = torch.randn(4, VOCAB)
    batch = Batch(options)
    chosen = {0: (9, 5, 60), 3: tuple(range(10, 30))}
    batch.add(0, SamplingParams(temperature=0.0, logprobs=3, logprob_token_ids=chosen[0]), [3], [])
    batch.add(1, SamplingParams(temperature=0.0, logprobs=6), [3], [])
    batch.add(2, SamplingParams(temperature=0.0), [3], [])
    batch.add(3, SamplingParams(temperature=0.0, logprobs=20, logprob_token_ids=chosen[3]), [3], [])
    expected = logits.log_softmax(-1)
    logprobs = batch.step([0, 1, 2, 3], logits).logprobs.by_row()
    assert logprobs.keys() == {0, 1, 3}
    for row, entry in logprobs.items():
        alternatives = chosen.get(row) or tuple(expected[row].topk(6).indices.tolist())
        assert tuple(entry.token_ids) == (logits[row].argmax().item(), *alternatives)
        torch.testing.assert_close(torch.tensor(entry.logprobs), expected[row, entry.token_ids])
        assert entry.rank == 1
    batch.remove(0)
    batch.add(0, SamplingParams(temperature=0.0, logprobs=1), [3], [])
    entry = batch.step([0], logits[:1]).logprobs.by_row()[0]
    assert entry.token_ids == [logits[0].argmax().item()] * 2
