"""The sampler of kernels: what it draws and reports against plain references and torch's, and how much it launches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from argosy_engine.params import SamplingParams
from argosy_engine.sample.logits_processor import BatchUpdate, LogitsProcessor, Rows
from argosy_engine.sample.sampler import GrammarMask, SamplerOptions, make_sampler
from argosy_engine.sample.token_logprobs import LogprobsMode
from argosy_engine.triton_kernels.launch import KNOWN_DEVICES, assume_device, recorded_launches
from argosy_engine.worker.pending_step import RejectionSampled
from sampler_steps import EVENT, SLOTS, VOCAB, Batch, check_chosen_tokens, cut, reference

KERNELS = SamplerOptions(vocab_size=VOCAB, kind="kernels")
EVERYTHING = SamplingParams(
    temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=1, presence_penalty=0.5, frequency_penalty=0.2,
    repetition_penalty=1.2, logit_bias={5: 1.0}, allowed_token_ids=tuple(range(3, 60)), min_tokens=3,
    bad_words_token_ids=((9,),), logprobs=3, max_tokens=32,
)  # fmt: skip


def mask(*allowed: int) -> np.ndarray:
    bits = np.zeros(96, np.bool_)
    bits[list(allowed)] = True
    return np.packbits(bits, bitorder="little").view(np.int32).reshape(1, 3)


TURNS = {
    "arrivals": st.lists(st.lists(EVENT, max_size=3), min_size=1, max_size=4),
    "leave": st.sets(st.tuples(st.integers(0, 3), st.integers(0, SLOTS - 1))),
    "skip": st.sets(st.tuples(st.integers(0, 3), st.integers(0, SLOTS - 1))),
    "seed": st.integers(0, 1 << 20),
}
"""Requests that come in each turn, and the turns and slots in which one leaves, or is not computed."""


@settings(max_examples=12, derandomize=True, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(**TURNS)
def test_requests_that_come_and_go_get_what_they_ask_for(**turns: Any) -> None:
    check_turns(**turns)


@pytest.mark.full
@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(**TURNS)
def test_any_requests_that_come_and_go_get_what_they_ask_for(**turns: Any) -> None:
    check_turns(**turns)


def check_turns(
    arrivals: list[list[Any]], leave: set[tuple[int, int]], skip: set[tuple[int, int]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch = Batch(KERNELS)
    live: dict[int, tuple[SamplingParams, int]] = {}
    for turn, events in enumerate(arrivals):
        for slot in [slot for slot in live if (turn, slot) in leave]:
            batch.remove(slot)
            del live[slot]
        for slot, params, prompt, output in events:
            if slot in live:
                batch.remove(slot)
            batch.add(slot, params, prompt, output)
            live[slot] = params, len(prompt)
        slots = [slot for slot in live if (turn, slot) not in skip]
        if not slots:
            continue
        logits = torch.randn(len(slots), VOCAB, generator=generator) * 3
        histories = [list(batch.tokens[slot]) for slot in slots]
        result = batch.step(slots, logits)
        scores = logits.log_softmax(-1)
        logprobs = result.logprobs.by_row() if result.logprobs is not None else {}
        assert logprobs.keys() == {
            row for row, slot in enumerate(slots) if live[slot][0].logprobs is not None
        }
        for row, slot in enumerate(slots):
            params, num_prompt = live[slot]
            history = histories[row]
            expected = reference(logits[row].numpy(), params, history[:num_prompt], history[num_prompt:])
            if expected.max() == -np.inf:
                continue  # nothing is possible: any token will do
            token = int(result.token_ids[row])
            if params.is_greedy:
                assert expected[token] >= expected.max() - 1e-4
            else:
                kept = cut(torch.from_numpy(expected / params.temperature), params)
                floor = kept[kept > -math.inf].min()
                assert expected[token] / params.temperature >= floor - 1e-4
            if row in logprobs:
                entry = logprobs[row]
                assert (entry.token_ids[0], len(entry.token_ids)) == (token, 1 + (params.logprobs or 0))
                # By the logits: two of them may have the same log probability, after rounding.
                assert entry.token_ids[1:] == logits[row].topk(params.logprobs or 0).indices.tolist()
                torch.testing.assert_close(torch.tensor(entry.logprobs), scores[row, entry.token_ids])
                assert entry.rank == int((logits[row] > logits[row, token]).sum()) + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_tokens_are_those_of_torch(dtype: torch.dtype) -> None:
    requests = [
        SamplingParams(temperature=0.0, max_tokens=32),
        SamplingParams(temperature=0.0, max_tokens=32, repetition_penalty=1.4, presence_penalty=0.3),
        SamplingParams(temperature=0.0, max_tokens=32, frequency_penalty=1.1, logit_bias={4: 2.5, 66: -3.0}),
        SamplingParams(temperature=0.0, max_tokens=32, allowed_token_ids=(1, 5, 33, 64, 66), min_tokens=3),
        SamplingParams(
            temperature=0.0, max_tokens=32, bad_words_token_ids=((3,), (4, 5), (8,)), min_tokens=2
        ),
        SamplingParams(temperature=0.0, max_tokens=32),
    ]
    torch_batch, batch = Batch(), Batch(KERNELS)
    for slot, params in enumerate(requests):
        for each in (torch_batch, batch):
            each.add(slot, params, [3, 4, 4], [7, 9])
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        # Few distinct values: ties are decided alike.
        logits = torch.randint(-6, 6, (6, VOCAB), generator=generator).to(dtype)
        grammar = GrammarMask(np.array([5, 1]), np.concatenate([mask(2, 31, 32, 66), mask(*range(20, 60))]))
        expected = torch_batch.step(list(range(6)), logits, grammar)
        assert batch.step(list(range(6)), logits, grammar).token_ids.equal(expected.token_ids)


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits", "processed_logprobs"])
@pytest.mark.parametrize("most", [5, 20])
def test_logprobs_modes(mode: LogprobsMode, most: int) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(4, VOCAB, generator=generator) * 2
    requests = [
        SamplingParams(temperature=0.0, logprobs=most, logit_bias={5: 1.5}),
        SamplingParams(temperature=0.5, logprobs=most, seed=1, presence_penalty=1.0),
        SamplingParams(temperature=2.0, logprobs=2, seed=2, top_k=9, top_p=0.8, min_p=0.05),
        SamplingParams(temperature=1.0, seed=3, top_p=0.5),
    ]
    usual, batch = Batch(KERNELS), Batch(KERNELS._replace(logprobs_mode=mode))
    for slot, params in enumerate(requests):
        for one in (usual, batch):
            one.add(slot, params, [3], [7, 9])
    drawn = usual.step([0, 1, 2, 3], logits).token_ids
    out = batch.step([0, 1, 2, 3], logits)
    assert torch.equal(out.token_ids, drawn)
    entries = out.logprobs.by_row()
    assert entries.keys() == {0, 1, 2}
    for row, entry in entries.items():
        params = requests[row]
        expected = logits[row].double()
        if mode != "raw_logits":
            expected = torch.from_numpy(reference(logits[row].numpy(), params, [3], [7, 9]))
            expected = cut(expected / (params.temperature or 1.0), params)
        if mode == "processed_logprobs":
            expected = expected.log_softmax(-1)
        assert entry.token_ids == [int(drawn[row]), *expected.topk(params.logprobs or 0).indices.tolist()]
        torch.testing.assert_close(
            torch.tensor(entry.logprobs), expected[entry.token_ids].float(), rtol=1e-4, atol=1e-4
        )
        assert entry.rank == int((expected > expected[entry.token_ids[0]]).sum()) + 1


def test_more_alternatives_than_kernels_find_are_found_by_torch() -> None:
    vocab = 200
    batch = Batch(KERNELS._replace(vocab_size=vocab))
    batch.add(0, SamplingParams(temperature=0.0, logprobs=-1), [3], [])
    batch.sampler.add(1, SamplingParams(temperature=0.0, logprobs=150), [3], 1)
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(1))
    out = batch.sampler.sample(logits, np.array([1]), np.array([1]), staged=None)
    (entry,) = out.logprobs.by_row().values()
    assert entry.token_ids[1:] == logits[0].topk(150).indices.tolist()


@pytest.mark.parametrize(
    ("rows", "params"),
    [
        (200, {"temperature": 0.7}),
        # `make test` has the kernels' own draws with limits (test_sampling), and that they keep what is asked for.
        pytest.param(
            40, {"temperature": 1.3, "top_k": 4, "top_p": 0.9, "min_p": 0.02}, marks=pytest.mark.full
        ),
    ],
)
def test_seeds_draw_by_the_probabilities_that_are_asked_for(rows: int, params: dict[str, Any]) -> None:
    """Chi-square over many seeds; its quantile at one in a million, by Laurent and Massart's bound."""
    vocab = 8
    logits = torch.tensor([0.3, 2.0, 1.1, -0.4, 1.9, 0.0, 0.9, -2.0])
    batch = Batch(KERNELS._replace(vocab_size=vocab), num_slots=rows)
    for slot in range(rows):
        batch.add(slot, SamplingParams(seed=1000 + slot, **params), [3], [])
    drawn = batch.step(list(range(rows)), logits.repeat(rows, 1)).token_ids
    expected = cut(logits / params.get("temperature", 1.0), SamplingParams(**params)).softmax(0) * rows
    observed = drawn.bincount(minlength=vocab)
    kept = expected > 0
    assert observed[~kept].sum() == 0
    statistic = ((observed - expected)[kept] ** 2 / expected[kept]).sum()
    freedom, bound = int(kept.sum()) - 1, math.log(1e6)
    assert statistic < freedom + 2 * math.sqrt(freedom * bound) + 2 * bound


def test_a_seed_draws_the_same_tokens_in_any_slot_and_batch() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    params = SamplingParams(seed=7, top_p=0.9)
    alone, together = Batch(KERNELS), Batch(KERNELS)
    alone.add(0, params, [3], [])
    for slot in (1, 4, 6):
        together.add(slot, params if slot == 4 else EVERYTHING, [3], [])
    for _ in range(4):
        token = alone.step([0], logits[:1]).token_ids
        assert together.step([6, 4, 1], logits[[1, 0, 2]]).token_ids[1] == token[0]


def test_padding_rows_draw_nothing_and_count_nothing() -> None:
    batch = Batch(KERNELS)
    batch.add(0, EVERYTHING, [3], [7])
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    padded = Batch(KERNELS)
    padded.add(0, EVERYTHING, [3], [7])
    for _ in range(3):
        expected = batch.step([0], logits[:1])
        positions = np.array([len(padded.tokens[0]), -1, -1])
        out = padded.sampler.sample(logits.clone(), np.array([0, 0, 0]), positions)
        assert out.token_ids.tolist() == [expected.token_ids.item(), 0, 0]
        assert out.logprobs.by_row() == expected.logprobs.by_row()
        padded.tokens[0].append(0)


class OnlyEven(LogitsProcessor):
    """Allows even tokens only."""

    @classmethod
    def is_used_by(cls, params: SamplingParams) -> bool:
        return bool(params.extra_args)

    def __init__(self, config: Any) -> None:
        pass

    def update_state(self, update: BatchUpdate) -> None:
        pass

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        logits[:, 1::2] = -math.inf


def test_custom_processors_change_the_processed_logits() -> None:
    batch = Batch(KERNELS._replace(logits_processors=(OnlyEven,)))
    batch.add(0, SamplingParams(temperature=0.0), [3], [])
    batch.add(1, SamplingParams(temperature=0.0, logit_bias={8: 5.0}, extra_args={"even": True}), [3], [])
    logits = torch.zeros(2, VOCAB)
    logits[:, 9] = 10.0
    assert batch.step([0, 1], logits).token_ids.tolist() == [9, 8]


def test_drafts_are_verified_as_by_any_sampler() -> None:
    """Tokens after right drafts are those of steps without drafts, penalties included."""
    params = [
        SamplingParams(seed=5, top_k=30, frequency_penalty=1.5),
        SamplingParams(temperature=0.0, presence_penalty=1.0),
    ]
    logits = torch.randn(2, 3, VOCAB, generator=torch.Generator().manual_seed(6))
    plain, drafted = Batch(KERNELS), Batch(KERNELS)
    for slot, each in enumerate(params):
        plain.add(slot, each, [3], [])
        drafted.add(slot, each, [3], [])
    expected = [plain.step([0, 1], logits[:, depth]).token_ids.tolist() for depth in range(3)]
    first, second = (list(tokens) for tokens in zip(*expected, strict=True))
    verified = RejectionSampled(
        drafted.sampler,
        logits.flatten(0, 1),
        np.array([0, 1]),
        np.array([1, 1]),
        [first[:2], [second[0], (second[1] + 1) % VOCAB]],
        None,
    )
    assert verified.wait().token_ids == [first, second[:2]]


@dataclass
class Counted:
    launches: list[str]
    operations: list[str]


class _Operations(TorchDispatchMode):
    """Notes operations that launch something on a device: all but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("aten.") and not func.is_view and not name.startswith("aten.empty"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def counted(batch: Batch, slots: list[int], grammar: GrammarMask | None = None) -> Counted:
    """Count a step's kernels and operations; no kernel is computed."""
    positions = np.array([len(batch.tokens[slot]) for slot in slots])
    logits = torch.zeros(len(slots), VOCAB, dtype=torch.bfloat16)
    assert not batch.sampler.reads_tokens  # writes what new requests need
    with _Operations() as operations, recorded_launches() as launches:
        batch.sampler.sample(logits, np.array(slots), positions, grammar)
    return Counted([each.name for each in launches], operations.names)


DRAW, LIMITED = (
    ["scan_logits", "draw_tokens"],
    [
        "scan_logits",
        "measure_reaches",
        "collect_candidates",
        "draw_tokens",
    ],
)
SCORE = ["score_tiles", "merge_tiles"]


@pytest.mark.parametrize(
    ("params", "launched"),
    [
        (SamplingParams(temperature=0.0), DRAW),
        (SamplingParams(temperature=0.0, top_k=5, top_p=0.5), DRAW),
        (SamplingParams(temperature=0.7), DRAW),
        (SamplingParams(temperature=0.7, top_k=5), LIMITED),
        (SamplingParams(temperature=0.0, presence_penalty=1.0), ["process_logits", *DRAW]),
        (SamplingParams(temperature=0.0, logprobs=5), [*DRAW, *SCORE]),
        (EVERYTHING, ["process_logits", *LIMITED, *SCORE]),
    ],
)
def test_kernels_that_a_step_launches(params: SamplingParams, launched: list[str]) -> None:
    batch = Batch(KERNELS)
    batch.add(0, SamplingParams(temperature=0.0), [3], [])
    batch.add(3, params, [3], [])
    assert counted(batch, [0, 3]) == Counted(launched, [])


def test_sampling_takes_at_most_eight_launches_whatever_its_parameters() -> None:
    batch = Batch(KERNELS._replace(logprobs_mode="processed_logprobs"))
    for slot in range(SLOTS):
        batch.add(slot, EVERYTHING, [3], [7])
    grammar = GrammarMask(np.arange(SLOTS), np.repeat(mask(*range(VOCAB)), SLOTS, 0))
    step = counted(batch, list(range(SLOTS)), grammar)
    assert step.launches == ["process_logits", *LIMITED, "cut_logits", *SCORE]
    assert len(step.launches) <= 8
    assert step.operations == []


def test_rows_that_the_caller_copied_are_not_copied_again() -> None:
    batch, staged = Batch(KERNELS), Batch(KERNELS)
    for each in (batch, staged):
        each.add(2, EVERYTHING, [3], [7])
        each.add(5, SamplingParams(seed=4), [3], [])
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(5))
    slots, positions = np.array([5, 2]), np.array([1, 2])
    rows = torch.from_numpy(staged.sampler.stage(slots, positions)).clone()
    out = staged.sampler.sample(logits.clone(), slots, positions, staged=rows)
    assert out.token_ids.equal(batch.step([5, 2], logits).token_ids)


@pytest.mark.parametrize("is_staged", [True, False])
def test_a_step_on_a_gpu_copies_rows_and_masks_and_waits_for_nothing(
    is_staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake tensors hold no values: whatever asks for one raises."""
    mode, real = FakeTensorMode(allow_non_fake_inputs=True), torch.from_numpy
    monkeypatch.setattr(torch, "from_numpy", lambda array: mode.from_tensor(real(array)))
    # In inference mode copies between devices pass the fakes by.
    monkeypatch.setattr(torch.inference_mode, "__enter__", lambda _: None)
    monkeypatch.setattr(torch.inference_mode, "__exit__", lambda *_: None)
    cuda, slots, positions = torch.device("cuda"), np.arange(3), np.array([2, 2, 2])
    grammar = GrammarMask(np.array([1]), mask(*range(VOCAB)))
    with mode, assume_device(KNOWN_DEVICES["H100"]), recorded_launches() as launches:
        options = KERNELS._replace(logprobs_mode="processed_logprobs")
        sampler = make_sampler(np.zeros((4, 64), np.int32), (1,), cuda, options)
        for slot in range(3):
            sampler.add(slot, EVERYTHING, [3, 4], 1)
        assert not sampler.reads_tokens  # writes what new requests need
        logits = torch.empty(3, VOCAB, dtype=torch.bfloat16, device=cuda)
        rows = torch.from_numpy(sampler.stage(slots, positions)).to(cuda) if is_staged else None
        launches.clear()
        with _Operations() as operations:
            out = sampler.sample(logits, slots, positions, grammar, rows)
    assert out.token_ids.device.type == "cuda"
    assert len(launches) == 8
    copy = ["aten.copy_.default", "aten._to_copy.default"]  # to pinned memory, and from there to the device
    assert operations.names == (copy if is_staged else 2 * copy)


def test_logprobs_of_chosen_tokens() -> None:
    check_chosen_tokens(KERNELS)
