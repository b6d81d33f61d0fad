"""Scheduler and KV cache under random operations, against a naive model of what every request must get."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from argosy_engine.attention.kv_cache_spec import (
    ChunkedAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
)
from argosy_engine.core import kv_cache_manager
from argosy_engine.core.kv_cache_manager import KVCacheManager
from argosy_engine.core.request import Request, RequestStatus
from argosy_engine.core.scheduler import Scheduler
from argosy_engine.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    MediaTensor,
    ModelRunnerOutput,
    MultimodalFeature,
    SchedulerOutput,
)
from argosy_engine.params import SamplingParams
from fake_worker import FakeWorker, next_token, seen

BLOCK = 4
MAX_MODEL_LEN = 40
EOS = 0
KINDS: dict[str, tuple[KVCacheSpec, ...]] = {
    "full": (FullAttentionSpec(0),),
    "sliding": (SlidingWindowSpec(0, 6),),
    "hybrid": (
        FullAttentionSpec(0),
        SlidingWindowSpec(0, 5),
        SlidingWindowSpec(0, 13),
        ChunkedAttentionSpec(0, 10),
    ),
    "chunked": (FullAttentionSpec(0), ChunkedAttentionSpec(0, 8), ChunkedAttentionSpec(0, 10)),
    "recurrent": (FullAttentionSpec(0), RecurrentStateSpec(0)),
    "recurrent, sliding": (FullAttentionSpec(0), SlidingWindowSpec(0, 5), RecurrentStateSpec(0)),
    "recurrent alone": (RecurrentStateSpec(0),),
}
TEXTS = ([1, 2, 3] * 10, [1, 2, 4, 3] * 7)
"""Prompts are beginnings of few texts, so that they share prefixes."""


@pytest.fixture(autouse=True, scope="module")
def short_checkpoints() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache_manager, "MIN_CHECKPOINT_TOKENS", BLOCK)
        yield


def expected_output(prompt: list[int], max_tokens: int, capacity: int) -> tuple[list[int], FinishReason]:
    """What an engine with all the room and time in the world would answer."""
    tokens = list(prompt)
    while True:
        if len(tokens) > capacity:
            return tokens[len(prompt) :], FinishReason.ERROR  # outgrew the cache, alone
        tokens.append(next_token(tuple(tokens)))
        if tokens[-1] == EOS:
            return tokens[len(prompt) :], FinishReason.STOP
        if len(tokens) >= MAX_MODEL_LEN or len(tokens) - len(prompt) >= max_tokens:
            return tokens[len(prompt) :], FinishReason.LENGTH


def features_of(num_tokens: int, pictures: Sequence[tuple[str, int, int]]) -> list[MultimodalFeature]:
    """Return pictures with gaps before them, as far as a prompt has room: (name, gap, length) of each. Names of unlike
    length are unlike pictures."""
    found: list[MultimodalFeature] = []
    end = 0
    for name, gap, length in pictures:
        offset, end = end + gap, end + gap + length
        if end > num_tokens:
            break
        pixels = {"pixel_values": MediaTensor("uint8", (1,), b"x")}
        found.append(MultimodalFeature("image", f"{name}{length}", offset, length, length, inputs=pixels))
    return found


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        kind=st.sampled_from(["full", *KINDS]),
        num_blocks=st.integers(3, 24),
        budget=st.integers(1, 24),
        max_num_seqs=st.integers(1, 6),
        threshold=st.sampled_from([0, 3, 8]),
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.booleans(),
        num_drafts=st.sampled_from([0, 0, 2]),
        watermark=st.sampled_from([0.0, 0.2]),
        mixed=st.sampled_from([None, 2, 6]),
        max_in_flight=st.sampled_from([1, 2, 2, 3]),
        is_pipeline=st.booleans(),
        num_states=st.integers(3, 12),
        state_interval=st.sampled_from([4, 8, 64]),
    )
    def start(
        self,
        kind: str,
        num_blocks: int,
        budget: int,
        max_num_seqs: int,
        threshold: int,
        policy: str,
        caching: bool,
        num_drafts: int,
        watermark: float,
        mixed: int | None,
        max_in_flight: int,
        is_pipeline: bool,
        num_states: int,
        state_interval: int,
    ) -> None:
        self.budget, self.max_num_seqs = budget, max_num_seqs
        self.capacity = (num_blocks - 1) * BLOCK
        specs = KINDS[kind]
        if kind != "full":  # room for any request alone, so that what it gets is easily told
            num_blocks += len(specs) * MAX_MODEL_LEN // BLOCK
            self.capacity = MAX_MODEL_LEN
        if kind.startswith("recurrent"):
            num_drafts = 0  # a state cannot be taken back
        if is_pipeline:
            num_drafts = 0
        self.scheduler = Scheduler(
            KVCacheManager(
                num_blocks,
                BLOCK,
                caching,
                watermark,
                specs,
                budget,
                num_states=num_states,
                state_interval=state_interval,
            ),
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=frozenset({EOS}),
            long_prefill_token_threshold=threshold,
            max_num_mixed_prefill_tokens=mixed,
            policy=policy,  # type: ignore[arg-type]
            pipeline_parallel_size=max_in_flight if is_pipeline else 1,
        )
        self.worker = FakeWorker(BLOCK, num_drafts, specs)
        self.first_stage = FakeWorker(BLOCK, 0, specs, samples=False)
        """Is given the steps of a pipeline of several stages, and never samples."""
        self.max_in_flight = max_in_flight
        self.results: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        """Of steps that were computed and are not booked yet."""
        self.expected: dict[str, tuple[list[int], FinishReason]] = {}
        self.received: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.blocked: set[str] = set()
        self.forgiven: set[str] = set()
        """Requests that we aborted or failed ourselves."""
        self.skipped: dict[str, int] = {}
        """Steps of a pipeline that a running request was left out of, although it could have been in, in a row."""
        self.count = 0

    @rule(
        prompt=st.builds(
            lambda text, length, tail: [*text[:length], *tail],
            st.sampled_from(TEXTS),
            st.integers(1, 28),
            st.lists(st.integers(1, 2), max_size=2),
        ),
        max_tokens=st.integers(1, 12),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([None, None, "tenant"]),
        is_blocked=st.booleans(),
        copies=st.sampled_from([1, 1, 3]),
        call=st.sampled_from(["", "", "a", "b"]),
        pictures=st.lists(
            st.tuples(st.sampled_from("pqr"), st.integers(0, 9), st.integers(1, 8)), max_size=3
        ),
        are_whole=st.booleans(),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: int,
        salt: str | None,
        is_blocked: bool,
        copies: int,
        call: str,
        pictures: list[tuple[str, int, int]],
        are_whole: bool,
    ) -> None:
        call_id = f"{call}{priority}" if call else ""
        features = [] if self.scheduler.pipeline_parallel_size > 1 else features_of(len(prompt), pictures)
        for _ in range(copies):
            name, self.count = str(self.count), self.count + 1
            params = SamplingParams(max_tokens=max_tokens)
            message = EngineCoreRequest(
                name,
                prompt,
                params,
                0.0,
                cache_salt=salt,
                priority=priority,
                call_id=call_id,
                mm_features=features,
            )
            request = Request(message, BLOCK, self.scheduler.kv.enable_prefix_caching)
            if are_whole and self.budget >= 8:
                request.whole_spans = [(each.offset, each.offset + each.length) for each in features]
            if is_blocked:
                request.status = RequestStatus.WAITING_FOR_GRAMMAR
                self.blocked.add(name)
            self.scheduler.add(request)
            self.expected[name] = expected_output(seen(prompt, features), max_tokens, self.capacity)

    def _pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.expected)))

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = self._pick(data)
        self.scheduler.abort([name, "unknown"])
        if name not in self.finished:
            self.forgiven.add(name)
        self.blocked.discard(name)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        name = self._pick(data)
        self.scheduler.fail(name, "no such grammar")
        if name not in self.finished and name not in self.forgiven:
            self.expected[name] = (self.received.get(name, []), FinishReason.ERROR)
        self.blocked.discard(name)

    @precondition(lambda self: self.blocked)
    @rule(data=st.data())
    def unblock(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.blocked)))
        self.blocked.discard(name)
        self.scheduler.unblock(name)

    @rule()
    def reset_cache(self) -> None:
        assert self.scheduler.kv.reset_prefix_cache() == (not self.scheduler.running)

    @rule(count=st.integers(1, 6))
    def run(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def run_with_an_abort_in_flight(self, data: st.DataObject) -> None:
        self._step(victim=self._pick(data))

    @rule()
    def lose_track(self) -> None:
        """A fault was found: everything is recomputed, and no output changes."""
        self.scheduler.rebuild()

    def _step(self, victim: str | None = None) -> None:
        """Schedules and computes a step; books the oldest one if no more may be in flight, or nothing is left."""
        ready = {
            request.request_id
            for request in self.scheduler.running
            if not request.num_output_placeholders and request.num_computed_tokens < request.num_tokens
        }
        step = self.scheduler.schedule()
        if self.scheduler.pipeline_parallel_size > 1:
            left = {
                request.request_id for request in self.scheduler.running
            } - step.num_scheduled_tokens.keys()
            self.skipped = {name: self.skipped.get(name, 0) + (name in ready) for name in left}
            assert max(self.skipped.values(), default=0) < self.max_num_seqs, "a request starves"
        assert sum(step.num_scheduled_tokens.values()) == step.total_num_scheduled_tokens <= self.budget
        assert len(self.scheduler.running) <= self.max_num_seqs
        assert not self.blocked & set(step.num_scheduled_tokens)
        for request in self.scheduler.running:
            done = request.num_computed_tokens
            assert not any(first < done < end for first, end in request.whole_spans), "a picture in two steps"
        if self.scheduler.requests.keys() - self.blocked:
            assert step.num_scheduled_tokens or self.results or self.scheduler.has_work, "a livelock"
        self.results.append((step, self.worker.execute(step)))
        if self.scheduler.pipeline_parallel_size > 1:
            self.first_stage.execute(step)
        if victim is not None:
            self.scheduler.abort([victim])
            self.blocked.discard(victim)
            if victim not in self.finished:
                self.forgiven.add(victim)
        if len(self.results) == self.max_in_flight or not step.num_scheduled_tokens:
            for output in self.scheduler.update_from_output(*self.results.popleft()):
                self._receive(output)

    def _receive(self, output: EngineCoreOutput) -> None:
        name = output.request_id
        assert name not in self.finished, "answered twice"
        self.received.setdefault(name, []).extend(output.new_token_ids)
        if output.finish_reason is not None:
            self.finished[name] = output.finish_reason

    @invariant()
    def is_consistent(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        for name, tokens in self.received.items():
            assert self.expected[name][0][: len(tokens)] == tokens
        for name, reason in self.finished.items():
            if name not in self.forgiven:
                assert (self.received.get(name, []), reason) == self.expected[name]

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for name in sorted(self.blocked):
            self.scheduler.unblock(name)
        self.blocked.clear()
        for _ in range(60 * len(self.expected) + 4):
            if not self.scheduler.has_work and not any(step.num_scheduled_tokens for step, _ in self.results):
                break
            self._step()
            self.is_consistent()
        assert not self.scheduler.requests
        assert set(self.finished) | self.forgiven == set(self.expected)
        assert self.scheduler.kv.usage == 0.0
        assert self.scheduler.queued_uncached_tokens == 0
        self.worker.execute(self.scheduler.schedule())
        assert not self.worker.rows, "worker slots leak"
        cache = self.scheduler.encoder_cache
        assert all(each in cache for each in self.worker.encoded), (
            "the worker holds more than the core knows of"
        )
        assert cache.has_room(cache.capacity), "somebody holds outputs"


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
