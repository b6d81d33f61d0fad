"""`LLM` with lists of prompts and parameters."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argosy_engine import (
    LLM,
    BeamSearchParams,
    EngineArgs,
    LLMEngine,
    SamplingParams,
    StructuredOutputsParams,
)
from argosy_engine.errors import ConfigError, EngineClosed, InvalidRequest
from argosy_engine.frontend.llm import RequestOutput
from argosy_engine.frontend.prompts import as_list, text_or_token_ids
from argosy_engine.messages import EngineCoreOutputs, FinishReason
from argosy_engine.vllm_settings import engine_args_of
from chat_requests import chat


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM(
        "builtin://tiny",
        device="cpu",
        dtype="float32",
        threads=1,
        num_gpu_blocks_override=64,
        max_model_len=256,
    )
    yield made
    made.close()


def test_a_token_beyond_the_embeddings_is_an_error_of_its_request(tmp_path: Path) -> None:
    """A tokenizer may have more tokens than the model, as one has to which somebody added [PAD]."""
    shutil.copytree(Path(__file__).parents[2] / "models" / "argosy-tiny", tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    saved = json.loads(file.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    saved["added_tokens"].append({"id": 1024, "content": "[PAD]", **flags, "special": True})
    file.write_text(json.dumps(saved))
    padded = LLM(model=str(tmp_path / "model"), device="cpu", threads=1)
    params = SamplingParams(temperature=0.0, max_tokens=2)
    with pytest.raises(InvalidRequest, match="1024, which is out of vocabulary"):
        padded.generate(["Hi [PAD]"], params, use_tqdm=False)
    assert len(padded.generate(["Hi"], params, use_tqdm=False)[0].token_ids) == 2
    padded.close()


def test_the_log_has_the_memory_budget(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="argosy.frontend")
    args = EngineArgs.of(model="builtin://tiny", device="cpu", threads=1, num_gpu_blocks_override=64)
    engine = LLMEngine.from_engine_args(args)
    engine.close()
    assert f"64 blocks of {engine.config.block_size}; set by --num-gpu-blocks-override" in caplog.text


def test_a_stop_token_is_among_the_ids_and_not_in_the_text(llm: LLM) -> None:
    def run(**fields: Any) -> RequestOutput:
        return llm.generate("Once", SamplingParams(temperature=0.0, max_tokens=8, **fields), use_tqdm=False)[
            0
        ]

    free = run()
    stop = free.token_ids[3]
    at = free.token_ids.index(stop)
    decode = llm.renderer.tokenizer.decode
    dropped, shown = run(stop_token_ids=(stop,)), run(stop_token_ids=(stop,), include_stop_str_in_output=True)
    assert dropped.token_ids == shown.token_ids == free.token_ids[: at + 1]
    assert dropped.stop_reason == shown.stop_reason == stop
    assert (dropped.text, shown.text) == (decode(free.token_ids[:at]), decode(free.token_ids[: at + 1]))


def test_parameters_are_for_all_prompts_or_one_for_each(llm: LLM) -> None:
    prompts = ["The sea", "Once upon a time"]
    short, long = (SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (2, 7))
    shared = llm.generate(prompts, long, use_tqdm=False)
    assert [len(result.token_ids) for result in shared] == [7, 7]
    own = llm.generate(prompts, [short, long], use_tqdm=False)
    assert [result.token_ids for result in own] == [shared[0].token_ids[:2], shared[1].token_ids]
    with pytest.raises(InvalidRequest, match="1 sampling_params for 2 prompts"):
        llm.generate(prompts, [short], use_tqdm=False)
    assert llm.generate([], use_tqdm=False) == []


@pytest.mark.parametrize(
    ("params", "kind"),
    [({"max_tokens": 3}, "dict"), ([{"max_tokens": 3}], "list with dict"), (3, "int"), ("abc", "str")],
)
def test_parameters_of_another_type_are_refused_by_name(llm: LLM, params: Any, kind: str) -> None:
    with pytest.raises(InvalidRequest, match=f"must be a SamplingParams, or a list .*, not {kind}$"):
        llm.generate("hi", params, use_tqdm=False)


def test_a_chat_ends_with_a_generation_prompt_or_with_the_message_to_continue(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "The sea is"}]
    params = SamplingParams(temperature=0.0, max_tokens=2)

    def prompt(**fields: Any) -> str:
        (output,) = llm.chat(messages, params, use_tqdm=False, **fields)
        return llm.renderer.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    end = "The sea is<|im_end|>\n"
    assert prompt().endswith(f"{end}<|im_start|>assistant\n")
    assert prompt(add_generation_prompt=False).endswith(end)
    assert prompt(add_generation_prompt=False, continue_final_message=True).endswith("The sea is")
    with pytest.raises(InvalidRequest, match="Cannot set both"):
        prompt(continue_final_message=True)


@pytest.mark.parametrize(
    ("content", "is_thinking"),
    [
        ("The door is", False),
        ("", False),
        ("<think>\nThe door", True),
        ("\n<think>The door", True),
        ("<think>\nHm.\n</think>\n\nThe door", False),
        ("Write <think> to think", False),
    ],
)
def test_a_message_is_continued_as_reasoning_only_inside_its_own_block(
    llm: LLM, content: str, is_thinking: bool
) -> None:
    messages = [{"role": "assistant", "content": content}]
    request = chat(messages=messages, continue_final_message=True, add_generation_prompt=False)
    reasoning = llm.renderer.render_chat(request).reasoning
    assert (reasoning is not None) == is_thinking
    assert reasoning is None or reasoning.is_open


@pytest.mark.parametrize("multiprocess", [False, True])
def test_a_closed_engine_says_so(multiprocess: bool) -> None:
    args: dict[str, Any] = {"device": "cpu", "threads": 1, "num_gpu_blocks_override": 64}
    with LLM("builtin://tiny", multiprocess=multiprocess, **args) as llm:
        (output,) = llm.generate("The sea", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        assert len(output.token_ids) == 2
    llm.close()
    messages = [{"role": "user", "content": "Hello!"}]
    for call in (
        lambda: llm.generate("The sea", use_tqdm=False),
        lambda: llm.chat(messages, use_tqdm=False),
        lambda: llm.encode("The sea", use_tqdm=False),
        lambda: llm.beam_search("The sea", BeamSearchParams(beam_width=2, max_tokens=2)),
        llm.sleep,
        llm.wake_up,
    ):
        with pytest.raises(EngineClosed, match="the engine is closed; make a new LLM"):
            call()


def test_leaving_the_context_after_an_error_closes_the_engine() -> None:
    args = EngineArgs.of(model="builtin://tiny", device="cpu", threads=1, num_gpu_blocks_override=64)
    engine = LLMEngine.from_engine_args(args)
    engine.add_request("1", "The sea")
    with pytest.raises(ZeroDivisionError), engine:
        raise ZeroDivisionError
    assert engine.has_unfinished_requests()
    with pytest.raises(EngineClosed):
        engine.step()


IDS = [5, 6, 7]


@pytest.mark.parametrize(
    "prompts",
    [
        IDS,
        tuple(IDS),
        [IDS],
        np.array(IDS),
        [np.array(IDS)],
        np.array([IDS]),
        {"prompt_token_ids": IDS},
        [{"prompt_token_ids": np.array(IDS)}],
        {"prompt": "shown in logs", "prompt_token_ids": IDS},
    ],
)
def test_token_ids_come_in_several_forms(prompts: Any) -> None:
    assert [text_or_token_ids(prompt) for prompt in as_list(prompts)] == [IDS]


@pytest.mark.parametrize("prompts", ["The sea", ["The sea"], {"prompt": "The sea"}, [{"prompt": "The sea"}]])
def test_texts_come_in_several_forms(prompts: Any) -> None:
    assert [text_or_token_ids(prompt) for prompt in as_list(prompts)] == ["The sea"]


@pytest.mark.parametrize(
    "prompts",
    [[True, False], [[True]], [[1, "a"]], [1.5], [None], 7, {}, {"text": "x"}, [{"prompt": None}], [["a"]]],
)
def test_an_invalid_prompt_is_refused(prompts: Any) -> None:
    with pytest.raises(InvalidRequest, match="a prompt is a text"):
        [text_or_token_ids(prompt) for prompt in as_list(prompts)]


def test_forms_of_a_prompt_have_one_answer(llm: LLM) -> None:
    ids = llm.renderer.render_text("The sea").token_ids
    forms = ["The sea", {"prompt": "The sea"}, {"prompt_token_ids": ids}, np.array(ids)]
    params = SamplingParams(temperature=0.0, max_tokens=4)
    first, *others = llm.generate(forms, params, use_tqdm=False)
    assert {tuple(other.token_ids) for other in others} == {tuple(first.token_ids)}
    assert [made.prompt_token_ids for made in llm.embed(forms, use_tqdm=False)] == [ids] * 4


def test_outputs_have_the_text_of_their_prompt(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1)
    forms: list[Any] = ["The sea", {"prompt": "The sea"}, {"prompt_token_ids": [5]}, [5, 6]]
    outputs = llm.generate(forms, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["The sea", "The sea", None, None]
    (output,) = llm.chat([{"role": "user", "content": "Hello!"}], params, use_tqdm=False)
    assert output.prompt is not None
    assert "<|im_start|>user\nHello!<|im_end|>" in output.prompt


def test_calls_take_the_arguments_of_vllm_s(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1)
    empty: dict[str, Any] = {"lora_request": None, "tokenization_kwargs": {}, "mm_processor_kwargs": None}
    message = [{"role": "user", "content": "Hello!"}]
    for priority in (None, 0, [0]):
        llm.generate("The sea", params, use_tqdm=False, priority=priority, **empty)
        llm.chat(message, params, use_tqdm=False, priority=priority, chat_template=None, **empty)
    for arguments, told in (
        ({"priority": [1]}, "priority needs an engine started with --scheduling-policy priority"),
        ({"priority": [0, 0]}, "2 priorities for 1 prompts; give one for all, or one for each"),
        ({"lora_request": "adapter"}, "lora_request is not supported: adapters are not served yet"),
        ({"tokenization_kwargs": {"truncation": True}}, "tokenization_kwargs is not supported"),
        ({"mm_processor_kwargs": {"num_crops": 1}}, "mm_processor_kwargs is not supported: give it to LLM"),
    ):
        given: dict[str, Any] = arguments
        with pytest.raises(InvalidRequest, match=told):
            llm.generate("The sea", params, use_tqdm=False, **given)
        with pytest.raises(InvalidRequest, match=told):
            llm.chat(message, params, use_tqdm=False, **given)
    with pytest.raises(InvalidRequest, match="chat_template is refused: it needs"):
        llm.chat(message, params, chat_template="{{ messages }}")
    with pytest.raises(InvalidRequest, match="must be auto or string"):
        llm.chat(message, params, chat_template_content_format="openai")


def test_arguments_of_vllm_s_engine_are_those_of_its_command_line(caplog: pytest.LogCaptureFixture) -> None:
    neutral: dict[str, Any] = {
        "tokenizer": "m", "tokenizer_mode": "auto", "cpu_offload_gb": 0, "enable_lora": False, "max_loras": None,
        "trust_remote_code": False, "speculative_config": None, "data_parallel_size_local": 2,
    }  # fmt: skip
    args = engine_args_of(model="m", data_parallel_size=2, dtype="half", max_model_len="-1", **neutral)
    assert (args.dtype, args.max_model_len) == ("float16", "auto")
    assert caplog.messages == []
    args = engine_args_of(
        model="m",
        trust_remote_code=True,
        disable_log_stats=True,
        limit_mm_per_prompt={"image": 0},
        language_model_only=True,
        cudagraph_capture_sizes=[1, 2],
        structured_outputs_config={"reasoning_parser": "qwen3"},
    )
    assert args.compilation_config.cudagraph_capture_sizes == (1, 2)
    assert args.reasoning_parser == "qwen3"
    assert caplog.messages == [
        "trust_remote_code has no effect: a checkpoint's code is never run; its model runs on argosy's own code or on "
        "transformers'",
        "disable_log_stats has no effect: lines of statistics are a server's",
    ]
    assert args.language_model_only
    assert args.limit_mm_per_prompt == {"image": 0}
    for arguments, told in (
        ({"enable_lora": True}, "enable_lora is not supported: adapters are not served yet"),
        ({"limit_mm_per_prompt": {"image": -1}}, "image must be a whole number from 0"),
        ({"tokenizer_mode": "slow"}, "there is one implementation of each"),
        ({"structured_outputs_config": {"disable_any_whitespace": True}}, "disable_any_whitespace is not"),
        ({"trust_remote": True}, "there is no argument trust_remote"),
    ):
        with pytest.raises(ConfigError, match=told):
            engine_args_of(model="m", **arguments)


def test_a_failure_in_the_core_affects_no_other_request(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    broken = SamplingParams(structured_outputs=StructuredOutputsParams(grammar="root ::= nosuch"), n=2)
    fine = SamplingParams(max_tokens=3, ignore_eos=True)
    first, failed, last = llm.generate(["a", "b", "c"], [fine, broken, fine], use_tqdm=False)
    assert [len(first.token_ids), len(last.token_ids)] == [3, 3]
    assert (first.error, last.error) == (None, None)
    assert "nosuch" in (failed.error or "")
    assert [output.finish_reason for output in failed.outputs] == ["error", "error"]
    assert "1 of 3 requests failed" in caplog.text


def test_an_embedding_that_fails_affects_no_other(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llm.client.step

    def step_with_a_failure() -> EngineCoreOutputs:
        outputs = step()
        for output in outputs.outputs[:1]:
            output.finish_reason, output.error, output.pooling_output = FinishReason.ERROR, "broken", None
        return outputs

    monkeypatch.setattr(llm.client, "step", step_with_a_failure)
    failed, fine = llm.embed(["The sea", "The land"], use_tqdm=False)
    assert (failed.error, failed.outputs.embedding) == ("broken", [])
    assert fine.error is None
    assert len(fine.outputs.embedding) == llm.config.embedding_size
