"""Fields that change how a prompt is made: truncate_prompt_tokens, suffix, and a template of the request's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.errors import InvalidRequest, PromptTooLong
from argosy_engine.frontend.renderer import Renderer
from argosy_engine.resolved_config import RequestDefaults
from argosy_protocol.openai import ChatCompletionRequest, decode_request

TINY = resolve_model("builtin://tiny")
MAX_MODEL_LEN = 64
IDS = list(range(100, 200))
FORMS = {
    "qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "deepseek": ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
}


def renderer_of(path: Path, defaults: RequestDefaults = RequestDefaults()) -> Renderer:  # noqa: B008  # immutable
    config = SimpleNamespace(
        model_path=str(path),
        request_defaults=defaults,
        model_name="m",
        vocab_size=1 << 20,
        max_model_len=MAX_MODEL_LEN,
        pooling=None,
        logits_processors=(),
    )
    return Renderer(config)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return renderer_of(TINY)


def completion_ids(renderer: Renderer, prompt: Any, **fields: Any) -> list[int]:
    (prompt,) = renderer.render_completion(
        decode_request("completions", json.dumps({"prompt": prompt, **fields}).encode())  # type: ignore[arg-type]
    )
    return prompt.token_ids


def chat_ids(renderer: Renderer, text: str = "Hi", **fields: Any) -> list[int]:
    body = {"messages": [{"role": "user", "content": text}], **fields}
    request = decode_request("chat/completions", json.dumps(body).encode())
    assert isinstance(request, ChatCompletionRequest)
    return renderer.render_chat(request).token_ids


def test_special_tokens_are_around_completions_unless_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(Path(TINY) / "tokenizer.json"))
    begin = tokenizer.token_to_id("<|im_start|>")
    tokenizer.post_processor = TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", begin)])
    for file in Path(TINY).glob("*.json*"):
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").symlink_to(Path(TINY) / "chat_template.jinja")
    (tmp_path / "tokenizer.json").unlink()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    renderer = renderer_of(tmp_path)
    plain = completion_ids(renderer, "Hi", add_special_tokens=False)
    assert completion_ids(renderer, "Hi") == [begin, *plain]
    assert completion_ids(renderer, "Hi", add_special_tokens=True) == [begin, *plain]
    assert chat_ids(renderer) == chat_ids(renderer, add_special_tokens=False)
    with pytest.raises(InvalidRequest, match="add_special_tokens is not supported in chats"):
        chat_ids(renderer, add_special_tokens=True)


def test_special_tokens_are_accepted_in_chats_of_models_without_any(renderer: Renderer) -> None:
    assert chat_ids(renderer, add_special_tokens=True) == chat_ids(renderer)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"truncate_prompt_tokens": 5}, IDS[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, IDS[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, IDS[:5]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 10}, IDS[-(MAX_MODEL_LEN - 10) :]),
        ({"truncate_prompt_tokens": -1}, IDS[-(MAX_MODEL_LEN - 1) :]),
        ({"truncate_prompt_tokens": 0}, []),
    ],
)
def test_a_long_prompt_is_truncated(renderer: Renderer, fields: dict[str, Any], expected: list[int]) -> None:
    assert completion_ids(renderer, IDS, **fields) == expected


def test_a_truncated_text_has_the_tokens_of_the_whole_text(renderer: Renderer) -> None:
    text = "The red lantern and the sea. " * 2
    whole = completion_ids(renderer, text)
    assert len(whole) > 7
    assert completion_ids(renderer, text, truncate_prompt_tokens=7) == whole[-7:]
    assert completion_ids(renderer, text, truncate_prompt_tokens=7, truncation_side="right") == whole[:7]
    assert completion_ids(renderer, text, truncate_prompt_tokens=MAX_MODEL_LEN) == whole


@pytest.fixture(scope="module")
def framing_renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """Of a tokenizer that adds a token before every text and one after it."""
    folder = tmp_path_factory.mktemp("framing")
    for name in ("config.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, folder)
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    first, last = "<|endoftext|>", "<|im_end|>"
    special = [(each, tokenizer.token_to_id(each)) for each in (first, last)]
    tokenizer.post_processor = TemplateProcessing(single=f"{first} $A {last}", special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))
    return renderer_of(folder)


def test_a_truncated_text_keeps_the_tokens_that_its_tokenizer_adds(framing_renderer: Renderer) -> None:
    """The numbers are those of transformers' fast tokenizers with `truncation=True` and `truncation_side="left"`."""
    text = "The red lantern and the sea."

    def ids(**fields: Any) -> list[int]:
        return completion_ids(framing_renderer, text, **fields)

    whole = ids()
    reference = Tokenizer.from_str(framing_renderer.tokenizer.backend.to_str())
    for limit in (2, 3, 6, len(whole) - 1, len(whole)):
        reference.enable_truncation(limit, direction="left")
        assert ids(truncate_prompt_tokens=limit) == reference.encode(text).ids
    assert ids(truncate_prompt_tokens=1) == whole[-1:]
    assert ids(truncate_prompt_tokens=5, truncation_side="left") == whole[-5:]
    assert ids(truncate_prompt_tokens=5, truncation_side="right") == whole[:5]
    assert completion_ids(framing_renderer, whole, truncate_prompt_tokens=5) == whole[-5:]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_beyond_the_context_is_truncated_instead_of_refused(renderer: Renderer, side: str) -> None:
    text = " ".join(f"word {number}" for number in range(20_000))
    with pytest.raises(PromptTooLong):
        completion_ids(renderer, text)
    part = text[-200:] if side == "left" else text[:200]
    ids = completion_ids(renderer, text, truncate_prompt_tokens=8, truncation_side=side)
    decoded = renderer.tokenizer.decode(ids)
    assert len(ids) == 8
    assert part.endswith(decoded) if side == "left" else part.startswith(decoded)


def test_the_model_reasons_unless_the_end_of_its_prompt_is_cut_off(renderer: Renderer) -> None:
    for side, limit, reasons in (
        ("right", None, True),
        ("right", 60, True),
        ("right", 3, False),
        ("left", 3, True),
    ):
        fields = {"truncation_side": side, "truncate_prompt_tokens": limit}
        body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
        request = decode_request("chat/completions", json.dumps(body).encode())
        assert isinstance(request, ChatCompletionRequest)
        assert (renderer.render_chat(request).reasoning is not None) is reasons, fields


def test_a_long_chat_keeps_its_end(renderer: Renderer) -> None:
    short = chat_ids(renderer)
    ids = chat_ids(renderer, "hello there " * 5000, truncate_prompt_tokens=20)
    assert len(ids) == 20
    assert ids[-3:] == short[-3:]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": MAX_MODEL_LEN + 1}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 60, "max_tokens": 10}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -1, "max_tokens": MAX_MODEL_LEN}, "max_tokens"),
    ],
)
def test_a_truncation_beyond_the_context_is_refused(
    renderer: Renderer, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        completion_ids(renderer, IDS, **fields)
    assert refused.value.param == param


@pytest.mark.parametrize("family", FORMS)
def test_a_suffix_is_filled_in_by_models_that_can(family: str, tmp_path: Path) -> None:
    for file in ("config.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / file).write_bytes((TINY / file).read_bytes())
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in FORMS[family]])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    able = renderer_of(tmp_path)
    start, hole, end = (tokenizer.token_to_id(text) for text in FORMS[family])
    ids = completion_ids(able, "def f(", suffix="return a")
    # The tokenizer may put a token of its own before every text.
    ids = ids[ids.index(start) :]
    assert ids[0] == start
    assert ids[-1] == end
    before, after = ids[1 : ids.index(hole)], ids[ids.index(hole) + 1 : -1]
    assert able.tokenizer.decode(before) == "def f("
    assert able.tokenizer.decode(after) == "return a"
    assert completion_ids(able, "def f(", suffix="") == completion_ids(able, "def f(")
    for other in ({"echo": True}, {"truncate_prompt_tokens": 5}):
        with pytest.raises(InvalidRequest, match="suffix cannot be combined with"):
            completion_ids(able, "def f(", suffix="return a", **other)
    with pytest.raises(InvalidRequest, match="text, not token ids"):
        completion_ids(able, [1, 2], suffix="return a")


def test_a_suffix_is_refused_by_models_that_cannot_fill_in(renderer: Renderer) -> None:
    with pytest.raises(InvalidRequest, match="no tokens for it") as refused:
        completion_ids(renderer, "def f(", suffix="return a")
    assert refused.value.param == "suffix"


def test_a_template_of_a_request_is_used_only_if_the_engine_trusts_it(renderer: Renderer) -> None:
    trusting = renderer_of(TINY, RequestDefaults(trust_request_chat_template=True))
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    ids = chat_ids(trusting, chat_template=template)
    assert trusting.tokenizer.decode(ids) == "[Hi]"
    assert chat_ids(trusting) == chat_ids(renderer)
    with pytest.raises(InvalidRequest, match="--trust-request-chat-template") as refused:
        chat_ids(renderer, chat_template=template)
    assert refused.value.param == "chat_template"
    with pytest.raises(InvalidRequest) as broken:
        chat_ids(trusting, chat_template="{% for %}")
    assert broken.value.param == "chat_template"


def test_a_template_of_a_request_runs_in_the_sandbox() -> None:
    trusting = renderer_of(TINY, RequestDefaults(trust_request_chat_template=True))
    with pytest.raises(InvalidRequest, match="cannot render"):
        chat_ids(trusting, chat_template="{{ messages.__class__.__mro__[1].__subclasses__() }}")
