"""The prompts of one call take turns with other calls' requests; chunks leave budget for requests that wait."""

from __future__ import annotations

from argosy_engine.core.kv_cache_manager import KVCacheManager
from argosy_engine.core.request import Request
from argosy_engine.core.scheduler import Scheduler
from argosy_engine.messages import EngineCoreRequest
from argosy_engine.params import SamplingParams
from fake_worker import FakeWorker

BLOCK, BUDGET = 4, 32


class Engine:
    """A scheduler, a worker without a model, and the order in which requests were admitted and got first tokens."""

    def __init__(self, max_num_seqs: int = 8, mixed: int | None = None) -> None:
        self.scheduler = Scheduler(
            KVCacheManager(4096, BLOCK, False, 0.0),
            max_num_batched_tokens=BUDGET,
            max_num_seqs=max_num_seqs,
            max_model_len=4096,
            eos_token_ids=frozenset(),
            max_num_mixed_prefill_tokens=mixed,
        )
        self.worker = FakeWorker(BLOCK)
        self.admitted: list[str] = []
        self.started: list[str] = []
        self.chunks: list[dict[str, int]] = []
        self._num_prompts = 0

    def add(self, name: str, num_tokens: int, batch_offset: int = 0, scores: bool = False) -> None:
        self._num_prompts += 1
        params = SamplingParams(max_tokens=1, prompt_logprobs=0 if scores else None)
        prompt = [self._num_prompts] * num_tokens
        message = EngineCoreRequest(name, prompt, params, 0.0, batch_offset=batch_offset)
        self.scheduler.add(Request(message, BLOCK, False))

    def add_batch(self, name: str, num_prompts: int, num_tokens: int) -> None:
        for number in range(num_prompts):
            self.add(f"{name}{number}", num_tokens, (number + 1) * num_tokens)

    def step(self) -> None:
        step = self.scheduler.schedule()
        self.chunks.append(dict(step.num_scheduled_tokens))
        self.admitted += [new.request_id for new in step.new_requests]
        result = self.worker.execute(step)
        if step.num_scheduled_tokens:
            self.started += [output.request_id for output in self.scheduler.update_from_output(step, result)]

    def steps_until(self, name: str) -> int:
        """Steps until the request has its first token."""
        count = 0
        while name not in self.started:
            self.step()
            count += 1
        return count

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()


def test_a_request_goes_ahead_of_the_prompts_of_a_batch_that_are_to_come() -> None:
    engine = Engine()
    engine.add_batch("batch", 16, 100)
    for _ in range(5):
        engine.step()
    engine.add("canary", 10)
    assert engine.steps_until("canary") <= 2
    assert "batch15" not in engine.admitted
    engine.finish()
    assert len(engine.started) == 17


def test_a_batch_is_as_fast_alone_as_one_after_the_other() -> None:
    engine = Engine()
    engine.add_batch("batch", 16, 100)
    engine.finish()
    assert engine.started == [f"batch{number}" for number in range(16)]
    assert len(engine.chunks) == 16 * 100 // BUDGET
    assert all(sum(chunk.values()) == BUDGET for chunk in engine.chunks)


def test_a_batch_is_not_starved_by_requests_that_keep_coming() -> None:
    """It gets half of the work at least, while as many others as can be computed arrive in every step."""
    engine = Engine(max_num_seqs=2)
    engine.add_batch("batch", 8, BUDGET)
    for number in range(64):
        engine.add(f"single{number}", BUDGET)
        if engine.scheduler.has_work:
            engine.step()
    firsts = engine.started[:24]
    assert {f"batch{number}" for number in range(8)} <= set(firsts)


def test_two_batches_take_turns() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add_batch("a", 4, BUDGET)
    engine.add_batch("b", 4, BUDGET)
    engine.finish()
    assert engine.started == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3"]


def test_calls_of_one_prompt_are_first_come_first_served() -> None:
    engine = Engine(max_num_seqs=1)
    names = [f"single{number}" for number in range(12)]
    for number, name in enumerate(names):
        engine.add(name, 1 + number * 7 % 50)
        if number % 3 == 0:
            engine.step()
    engine.finish()
    assert engine.started == names


def test_a_prompt_with_log_probabilities_takes_small_chunks_even_if_no_request_decodes() -> None:
    engine = Engine(mixed=8)
    engine.add("scored", 60, scores=True)
    engine.add("plain", 60)
    engine.step()
    assert engine.chunks[0] == {"scored": 8, "plain": BUDGET - 8}
    engine.finish()
    assert max(chunk.get("scored", 0) for chunk in engine.chunks) == 8


def test_while_another_call_waits_for_its_first_token_a_batch_leaves_half_of_each_step() -> None:
    engine = Engine()
    engine.add_batch("batch", 4, 500)
    engine.step()
    engine.add("canary", 3 * BUDGET)
    steps = engine.steps_until("canary")
    assert engine.chunks[1:steps] == [{"batch0": BUDGET // 2, "canary": BUDGET // 2}] * (steps - 1)
    engine.step()
    assert engine.chunks[-1] == {"batch0": BUDGET}
