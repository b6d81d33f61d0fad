"""What the engine divides is shared by the tenant that a router names for its client."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from argosy_engine.api.endpoints.pooling import embed
from argosy_engine.api.served_engine import OpenAIServing
from argosy_engine.config import EngineArgs
from argosy_engine.core.engine_core import EngineCore
from argosy_engine.frontend.async_llm import AsyncLLM
from argosy_engine.messages import EngineCoreRequest
from argosy_engine.params import SamplingParams
from argosy_engine.structured.compile_queue import MAX_QUEUED_PER_KEY, CompileQueue
from argosy_engine.structured.manager import GrammarRequest, StructuredOutputManager
from argosy_engine.structured.structured_outputs_params import GrammarSpec
from argosy_protocol.openai import CompletionRequest
from argosy_protocol.pooling import EmbeddingRequest
from fake_executor import BLOCK, FakeExecutor


class NeverCompiles:
    def new_compilation(self) -> Any:
        return self

    def run(self, spec: GrammarSpec) -> Any:
        raise AssertionError("no thread runs it")

    def kill(self) -> None: ...

    def lower_priority(self) -> None: ...

    def close(self) -> None: ...


def test_a_tenant_with_many_salts_has_one_share_of_the_queue() -> None:
    core = EngineCore(EngineArgs.of(model="builtin://tiny", block_size=BLOCK), FakeExecutor())
    core.structured.close()
    queue = CompileQueue(NeverCompiles(), num_threads=1, start_thread=lambda target: None)
    core.structured = StructuredOutputManager(queue, 4096, [0])

    def ask(number: int, tenant: str) -> int:
        """Those in the queue then."""
        core.add_request(
            EngineCoreRequest(
                f"{tenant}-{number}",
                [1] * 5,
                SamplingParams(max_tokens=4),
                0.0,
                cache_salt=f"salt {number}",
                grammar=GrammarRequest(GrammarSpec("regex", f"{tenant}{number}")),
                tenant=tenant,
            )
        )
        return queue.num_queued

    for number in range(MAX_QUEUED_PER_KEY + 8):
        queued = ask(number, "greedy")
    assert queued == MAX_QUEUED_PER_KEY
    assert ask(0, "modest") == MAX_QUEUED_PER_KEY + 1
    core.structured.close()


@pytest.mark.parametrize("name", [None, "org/Tiny"])
def test_the_tenant_of_a_request_reaches_the_core(name: str | None) -> None:
    told: list[str] = []

    def process_inputs(prompt: Any, params: Any, *, tenant: str = "", **_: Any) -> list[Any]:
        told.append(tenant)
        return []

    processor = SimpleNamespace(
        sampling_params=lambda request, num_prompts: SamplingParams(), process_inputs=process_inputs
    )
    serving = OpenAIServing(cast(Any, SimpleNamespace(input_processor=processor)), ("tiny",))
    request = CompletionRequest(prompt="a")
    serving.answering_as(name, "tenant").core_requests([cast(Any, "prompt")], request)
    serving.core_requests([cast(Any, "prompt")], request)
    assert told == ["tenant", ""]
    assert serving.answering_as(name, "tenant").check_model("tiny") == (name or "tiny")
    serving.close()


async def test_embeddings_and_beam_searches_have_their_tenant_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = EngineArgs.of(model="builtin://tiny", device="cpu", threads=1, num_gpu_blocks_override=64)
    llm = await AsyncLLM.start(args)
    told = list[str]()
    send = llm.client.add_request

    async def add_request(request: EngineCoreRequest) -> None:
        told.append(request.tenant)
        await send(request)

    monkeypatch.setattr(llm.client, "add_request", add_request)
    serving = OpenAIServing(llm, ("tiny",)).answering_as(None, "tenant")
    try:
        await embed(serving, EmbeddingRequest(model="tiny", input=["a", "b"]), "1", 10)
        prompts = llm.renderer.render_completion(CompletionRequest(prompt="The sea"))
        beams = CompletionRequest(prompt="The sea", use_beam_search=True, n=2, max_tokens=3, temperature=0.0)
        assert len(await serving.generate(prompts, [], beams)) == 2
    finally:
        serving.close()
        await llm.close()
    assert len(told) > 4
    assert set(told) == {"tenant"}
