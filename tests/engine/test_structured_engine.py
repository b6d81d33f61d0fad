"""Structured outputs through the engine: the tiny model's output always has the requested form."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from argosy_engine import LLM, SamplingParams, StructuredOutputsParams
from argosy_engine.api.endpoints.exchange import to_api_error
from argosy_engine.frontend.llm import CompletionOutput, RequestOutput
from argosy_engine.frontend.output_processor import request_error
from preemptions import PreemptionCounter

SHORT = {"type": "string", "minLength": 1, "maxLength": 8}
SCHEMAS: dict[str, Any] = {
    "person": {
        "type": "object",
        "properties": {"name": SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
        "required": ["name", "age"],
    },
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}, "c": {"enum": ["x", 1, None, [2]]}},
    },
    "nested": {
        "$defs": {
            "Leaf": {
                "type": "object", "properties": {"kind": {"const": "leaf"}, "v": SHORT}, "required": ["kind", "v"]
            },
            "Pair": {
                "type": "object",
                "properties": {"kind": {"const": "pair"}, "l": {"$ref": "#/$defs/Leaf"}, "r": {"$ref": "#/$defs/Leaf"}},
                "required": ["kind", "l", "r"],
            },
        },
        "oneOf": [{"$ref": "#/$defs/Leaf"}, {"$ref": "#/$defs/Pair"}],
    },
    "list": {"type": "array", "items": {"type": "integer", "multipleOf": 5, "minimum": -20, "maximum": 20},
             "minItems": 1, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, SHORT], "items": False, "minItems": 2},
    "number": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 3},
    "text": {"type": "string", "pattern": "^[a-z]{2,6}(-[0-9]{2})?$"},
    "when": {"type": "object", "properties": {"d": {"type": "string", "format": "date"}}, "required": ["d"]},
    "address": {"type": "string", "format": "ipv4"},
    "union": {"anyOf": [{"type": "integer", "minimum": 10, "maximum": 99}, SHORT, {"type": "null"}]},
    "map": {"type": "object", "patternProperties": {"^[a-z]{1,3}$": {"type": "boolean"}}, "maxProperties": 3},
    "counted": {"type": "object", "properties": {k: {"type": "boolean"} for k in "abcd"}, "minProperties": 2,
                "maxProperties": 3},
}  # fmt: skip


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    engine = LLM("builtin://tiny", dtype="float32", threads=1, max_num_seqs=16, max_model_len=1024)
    yield engine
    engine.close()


def ask(llm: LLM, params: StructuredOutputsParams, **sampling: Any) -> list[CompletionOutput]:
    """Three answers with seeds of their own, in one batch."""
    fields = {"temperature": 1.0, "max_tokens": 300, "seed": 1, "n": 3, **sampling}
    (result,) = llm.generate("Answer:", SamplingParams(structured_outputs=params, **fields), use_tqdm=False)
    return result.outputs


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_validates(llm: LLM, name: str) -> None:
    schema = SCHEMAS[name]
    validator = jsonschema.Draft202012Validator(schema)
    for result in ask(llm, StructuredOutputsParams(json=schema, disable_any_whitespace=name != "person")):
        assert result.finish_reason == "stop", result.text
        value = json.loads(result.text)
        validator.validate(value)
        if name == "when":
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", value["d"])
        if name == "address":
            ipaddress.IPv4Address(value)


def test_compact_json_has_no_free_white_space(llm: LLM) -> None:
    for result in ask(llm, StructuredOutputsParams(json=SCHEMAS["person"], disable_any_whitespace=True)):
        assert result.text == json.dumps(json.loads(result.text), ensure_ascii=False)


def test_any_object_parses(llm: LLM) -> None:
    """Closing braces are made likely, so that the outputs end."""
    texts = {token_id: llm.renderer.tokenizer.decode([token_id]) for token_id in range(llm.config.vocab_size)}
    closing = {token_id: 10.0 for token_id, text in texts.items() if "}" in text or text.endswith('"')}
    params = StructuredOutputsParams(json_object=True, disable_any_whitespace=True)
    results = ask(llm, params, logit_bias=closing, n=6)
    finished = [result.text for result in results if result.finish_reason == "stop"]
    assert finished
    assert all(isinstance(json.loads(text), dict) for text in finished)


@pytest.mark.parametrize(
    "pattern", [r"[A-Z]{3}-\d{2,4}", r"(yes|no)( maybe)?", r"\d{1,3}(\.\d)?", "[äöü]{2}"]
)
def test_regex_matches_all_of_the_output(llm: LLM, pattern: str) -> None:
    for result in ask(llm, StructuredOutputsParams(regex=pattern)):
        assert re.fullmatch(pattern, result.text), result.text


def test_choice_is_one_of_them(llm: LLM) -> None:
    choices = ("red", "green", 'a "quoted" one', "red and green")
    assert {result.text for result in ask(llm, StructuredOutputsParams(choice=choices))} <= set(choices)


def test_grammar_is_followed(llm: LLM) -> None:
    grammar = 'root ::= sum\nsum ::= num (" + " num){1,3}\nnum ::= [1-9] [0-9]?'
    for result in ask(llm, StructuredOutputsParams(grammar=grammar)):
        assert re.fullmatch(r"[1-9]\d?( \+ [1-9]\d?){1,3}", result.text), result.text


def test_structural_tag_is_followed(llm: LLM) -> None:
    tag = {
        "type": "tag",
        "begin": "<n>",
        "content": {"type": "json_schema", "json_schema": SCHEMAS["list"]},
        "end": "</n>",
    }
    for result in ask(llm, StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": tag})):
        inside = re.fullmatch("<n>(.*)</n>", result.text, re.DOTALL)
        assert inside, result.text
        jsonschema.validate(json.loads(inside[1]), SCHEMAS["list"])


def test_greedy_top_p_and_penalties_stay_inside(llm: LLM) -> None:
    for sampling in (
        {"temperature": 0.0},
        {"top_p": 0.5, "top_k": 3},
        {"repetition_penalty": 1.5, "min_p": 0.3},
    ):
        # A penalty drives the model into white space, of which JSON may have as much as there are tokens.
        params = StructuredOutputsParams(json=SCHEMAS["nested"], disable_any_whitespace=True)
        for result in ask(llm, params, **sampling):
            assert result.finish_reason == "stop", result.text
            jsonschema.validate(json.loads(result.text), SCHEMAS["nested"])


def test_max_tokens_cuts_with_length(llm: LLM) -> None:
    for result in ask(llm, StructuredOutputsParams(json=SCHEMAS["person"]), max_tokens=4):
        assert (result.finish_reason, len(result.token_ids)) == ("length", 4)


def test_ignore_eos_ends_where_the_grammar_does(llm: LLM) -> None:
    for result in ask(llm, StructuredOutputsParams(choice=("a", "b")), ignore_eos=True):
        assert result.text in ("a", "b")
        assert result.finish_reason == "stop"


def test_stop_strings_end_inside_the_grammar(llm: LLM) -> None:
    for result in ask(llm, StructuredOutputsParams(regex="(ab){20}"), stop=("ba",)):
        assert (result.text, result.stop_reason) == ("a", "ba")


def test_choices_of_one_prompt_differ_and_all_match(llm: LLM) -> None:
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(regex="[0-9]{8}"),
        n=4,
        seed=3,
        temperature=2.0,
        max_tokens=50,
    )
    (result,) = llm.generate("Number:", params, use_tqdm=False)
    texts = [output.text for output in result.outputs]
    assert all(re.fullmatch("[0-9]{8}", text) for text in texts)
    assert len(set(texts)) > 1


def test_neighbours_are_not_touched(llm: LLM) -> None:
    """In one batch with structured requests, unconstrained ones give the very tokens they give alone."""
    from argosy_engine.messages import EngineCoreRequest

    free = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
    bound = free.replace(structured_outputs=StructuredOutputsParams(json=SCHEMAS["person"]))
    prompt = llm.renderer.render_text("Tell me about")

    def run(all_params: list[SamplingParams]) -> list[list[int]]:
        requests: list[EngineCoreRequest] = []
        for params in all_params:
            requests += llm.input_processor.process_inputs(prompt, params)
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        for request in requests:
            llm.client.add_request(request)
        while llm.client.has_work:
            for output in llm.client.step().outputs:
                tokens[output.request_id] += output.new_token_ids
        return list(tokens.values())

    (alone,) = run([free])
    mixed = run([bound, free, bound, free])
    assert mixed[1] == mixed[3] == alone
    assert mixed[0] == mixed[2] != alone


def test_preempted_outputs_continue_in_their_grammar() -> None:
    """Six requests share a KV cache for two: the preempted ones keep their grammar's state."""
    llm = LLM("builtin://tiny", dtype="float32", threads=1, num_gpu_blocks_override=14, max_model_len=128)
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(regex="([0-9]{3}-){25}"),
        temperature=1.0,
        seed=1,
        max_tokens=110,
    )
    preemptions = PreemptionCounter(llm.client)
    results = llm.generate([f"Number {i}:" for i in range(6)], params, use_tqdm=False)
    llm.close()
    assert preemptions.total
    for result in results:
        assert re.fullmatch("([0-9]{3}-){25}", result.text), result.text


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (StructuredOutputsParams(grammar="root ::= missing"), "not defined"),
        (StructuredOutputsParams(regex="(unclosed"), "does not compile"),
        (StructuredOutputsParams(structural_tag={"format": {"type": "nonsense"}}), "does not compile"),
        (StructuredOutputsParams(json={"type": "integer", "minimum": 0.5}), "whole number"),
    ],
)
def test_a_grammar_that_does_not_compile_fails_its_request_only(
    llm: LLM, params: StructuredOutputsParams, says: str
) -> None:
    (failed,) = llm.generate("x", SamplingParams(structured_outputs=params), use_tqdm=False)
    assert says in (failed.error or "")
    assert ask(llm, StructuredOutputsParams(choice=("fine",)))[0].text == "fine"
    assert llm.client.call_utility("check")


def test_an_overloaded_compiler_is_a_reason_to_retry(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argosy_engine.structured.compile_queue.MAX_QUEUED", 0)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="never seen before"))
    llm.client.add_request(llm.input_processor.process_inputs(llm.renderer.render_text("x"), params)[0])
    (output,) = llm.client.step().outputs
    error = to_api_error(request_error(output))
    assert error.http_status == 503
    assert int(error.headers()["retry-after"]) >= 1
    assert "too many grammars" in error.message


def test_contradicting_limits_are_an_error_of_their_request(llm: LLM) -> None:
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(regex="[0-9]{3}"), allowed_token_ids=(5,)
    )
    (failed,) = llm.generate("x", params, use_tqdm=False)
    assert "no token satisfies" in (failed.error or "")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_holds_where_the_grammar_leaves_a_choice(llm: LLM, temperature: float) -> None:
    (eos,) = llm.config.eos_token_ids[:1]
    digits = StructuredOutputsParams(regex="[0-9]{1,200}")
    fields: dict[str, Any] = {"temperature": temperature, "logit_bias": {eos: 100.0}}
    for result in ask(llm, digits, **fields):
        assert len(result.token_ids) == 2, "ends as soon as it may"
    for result in ask(llm, digits, min_tokens=12, **fields):
        assert (len(result.token_ids), result.finish_reason) == (13, "stop")
        assert result.text.isdigit()


@pytest.mark.parametrize("stop_token_ids", [(), (5,)])
def test_a_complete_output_ends_before_min_tokens(llm: LLM, stop_token_ids: tuple[int, ...]) -> None:
    for result in ask(
        llm, StructuredOutputsParams(choice=("yes", "no")), min_tokens=30, stop_token_ids=stop_token_ids
    ):
        assert result.text in ("yes", "no")
        assert result.finish_reason == "stop"
        assert len(result.token_ids) < 30


def think(llm: LLM, **template: Any) -> list[RequestOutput]:
    """Answers of a chat, unconstrained before the end of thought."""
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(regex="[0-9]{4}"),
        temperature=1.0,
        max_tokens=300,
        seed=1,
        n=4,
    )
    messages = [{"role": "user", "content": "Say something about <think>."}]
    return llm.chat(messages, params, chat_template_kwargs=template, use_tqdm=False)


def test_with_thinking_off_the_answer_is_constrained_from_its_first_token(llm: LLM) -> None:
    (result,) = think(llm, enable_thinking=False)
    assert all(re.fullmatch("[0-9]{4}", output.text) for output in result.outputs)


def test_thoughts_are_free_and_what_follows_is_not(llm: LLM) -> None:
    (result,) = think(llm, enable_thinking=True)
    for output in result.outputs:
        if output.finish_reason == "stop":
            assert re.fullmatch(r"(<think>.*</think>)?[0-9]{4}", output.text, re.DOTALL), output.text
    assert any(output.finish_reason == "stop" for output in result.outputs)


def test_a_forced_thought_does_not_end_the_output(llm: LLM) -> None:
    """The model is made to think: whatever it does there, the number comes after it."""
    think_id, end_id = (
        llm.renderer.tokenizer.encode(marker, add_special_tokens=False).ids[0]
        for marker in ("<think>", "</think>")
    )
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(regex="[0-9]{4}"), temperature=1.0, max_tokens=150, seed=1, n=4,
        logit_bias={think_id: 100.0, end_id: 4.0},
    )  # fmt: skip
    (result,) = llm.chat([{"role": "user", "content": "Hi"}], params, chat_template_kwargs={"enable_thinking": True},
                         use_tqdm=False)  # fmt: skip
    for output in result.outputs:
        assert output.text.startswith("<think>")
        if output.finish_reason == "stop":
            assert re.fullmatch("[0-9]{4}", output.text.rpartition("</think>")[2]), output.text


def test_resumed_outputs_replay_their_grammar(llm: LLM) -> None:
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(json=SCHEMAS["nested"]),
        temperature=1.0,
        seed=2,
        max_tokens=200,
    )
    prompt = llm.renderer.render_text("Answer:")
    (whole,) = llm.generate("Answer:", params, use_tqdm=False)
    for seam in (1, len(whole.token_ids) // 2):
        (request,) = llm.input_processor.process_inputs(prompt, params, resume=[whole.token_ids[:seam]])
        llm.client.add_request(request)
        tokens: list[int] = []
        while llm.client.has_work:
            for output in llm.client.step().outputs:
                tokens += output.new_token_ids
        assert whole.token_ids[:seam] + tokens == whole.token_ids
