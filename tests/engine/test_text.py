"""Text in and out: detokeniser, stop strings, chat parsing, templates, and where chunks end."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given, settings
from tokenizers.decoders import DecodeStream

from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.chat_parser import ChatParser, Parsed
from argosy_engine.frontend.chat_template import ChatTemplate
from argosy_engine.frontend.chunk_map import map_chunks, map_token_chunks
from argosy_engine.frontend.detokenizer import IncrementalDetokenizer
from argosy_engine.frontend.tokenizer import Tokenizer
from argosy_engine.models.model_path import resolve_model
from argosy_engine.params.sampling_params import SamplingParams
from argosy_protocol.chunk_hash import chain_seed, chunk_hashes
from argosy_protocol.openai import ChatCompletionRequest, ChatMessage, decode_request
from argosy_protocol.prompt_segments import prompt_segments
from text_models import byte_fallback_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve_model("builtin://tiny"))


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    loaded = ChatTemplate.load(resolve_model("builtin://tiny"))
    assert loaded is not None
    return loaded


def detokenize(
    tokenizer: Tokenizer, ids: list[int], groups: list[int], **params: object
) -> tuple[str, str | None]:
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(**params), [])  # type: ignore[arg-type]
    text, position = "", 0
    sizes = [*groups, len(ids)]
    for size in sizes:
        piece = ids[position : position + size]
        position += size
        text += detokenizer.update(piece, position >= len(ids))
        if detokenizer.stop_reason is not None or position >= len(ids):
            break
    return text, detokenizer.stop_reason


@pytest.fixture(scope="module")
def tokenizers(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """One whose tokens are bytes throughout, and one that falls back to them and puts a space before a text."""
    path = tmp_path_factory.mktemp("tokenizer")
    byte_fallback_tokenizer().save(str(path / "tokenizer.json"))
    return {"bytes": tokenizer, "byte fallback": Tokenizer(path)}


@pytest.mark.parametrize("name", ["bytes", "byte fallback"])
@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60), groups=st.lists(st.integers(1, 5), max_size=40))
def test_detokenising_in_pieces_gives_the_whole_text(
    tokenizers: dict[str, Tokenizer], name: str, text: str, groups: list[int]
) -> None:
    tokenizer = tokenizers[name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert detokenize(tokenizer, ids, groups)[0] == tokenizer.decode(ids)


@settings(max_examples=150, deadline=None)
@given(
    words=st.lists(st.sampled_from(["The sea", " lantern", "世界", " 🌍", "é", " was"]), min_size=2),
    cut=st.integers(0),
)
def test_an_output_keeps_the_space_it_begins_with(
    tokenizers: dict[str, Tokenizer], words: list[str], cut: int
) -> None:
    tokenizer = tokenizers["byte fallback"]
    ids = tokenizer.encode("".join(words), add_special_tokens=False).ids
    whole = tokenizer.decode(ids)
    prompt = ids[: cut % len(ids)]
    before = tokenizer.decode(prompt)
    assume(whole.startswith(before))  # the prompt ends with a character
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(), prompt)
    text = "".join(detokenizer.update([token_id], is_last=False) for token_id in ids[len(prompt) :])
    assert text == whole[len(before) :]


def test_bytes_that_are_no_text_do_not_stop_it(tokenizers: dict[str, Tokenizer]) -> None:
    """A byte that begins no character spoils those before it: the decoder finds what it gave already changed."""
    tokenizer = tokenizers["byte fallback"]
    broken = [tokenizer.backend.token_to_id(token) for token in ("<0x41>", "<0x96>", "by")]
    stream = DecodeStream(ids=[], skip_special_tokens=True)
    with pytest.raises(Exception, match="Invalid prefix"):
        [stream.step(tokenizer.backend, token_id) for token_id in broken]
    rest = tokenizer.encode("the sea 世界", add_special_tokens=False).ids
    text, _ = detokenize(tokenizer, [*broken, *rest], [1] * 30)
    assert text == "Aby the sea 世界"


@settings(max_examples=150, deadline=None)
@given(data=st.data(), groups=st.lists(st.integers(1, 5), max_size=40))
def test_any_tokens_have_a_text(
    tokenizers: dict[str, Tokenizer], data: st.DataObject, groups: list[int]
) -> None:
    tokenizer = tokenizers["byte fallback"]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    assert detokenize(tokenizer, ids, groups)[0] == detokenize(tokenizer, ids, [1] * len(ids))[0]


@pytest.mark.parametrize("groups", [[], [1] * 60, [2, 1, 3, 1, 5] * 12])
@pytest.mark.parametrize(
    ("stop", "include", "expected", "reason"),
    [
        (("three",), False, "one two ", "three"),
        (("three",), True, "one two three", "three"),
        (("four", "two"), False, "one ", "two"),
        (("o th",), False, "one tw", "o th"),
        (("never",), False, "one two three four", None),
        (("r four five",), False, "one two three four", None),
        (("two three", "three"), False, "one ", "two three"),
    ],
)
def test_stop_strings(
    tokenizer: Tokenizer,
    groups: list[int],
    stop: tuple[str, ...],
    include: bool,
    expected: str,
    reason: str | None,
) -> None:
    ids = tokenizer.encode("one two three four", add_special_tokens=False).ids
    got = detokenize(tokenizer, ids, groups, stop=stop, include_stop_str_in_output=include)
    assert got == (expected, reason)


@pytest.mark.parametrize("stop", [(), ("never",)])
@pytest.mark.parametrize("include", [False, True])
def test_the_text_of_a_stop_token_is_shown_only_if_asked_for(
    tokenizer: Tokenizer, stop: tuple[str, ...], include: bool
) -> None:
    ids = tokenizer.encode("one two three", add_special_tokens=False).ids
    params = SamplingParams(stop=stop, include_stop_str_in_output=include)
    detokenizer = IncrementalDetokenizer(tokenizer, params, [])
    text = detokenizer.update(ids[:-2], is_last=False)
    text += detokenizer.update(ids[-2:], is_last=True, ends_at_stop_token=True)
    assert text == tokenizer.decode(ids if include else ids[:-1])


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NAN_CALL = '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'
HALF_CALL = '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>'
PARSES = [
    ("plain", "Hello there.", Parsed("", "Hello there.")),
    ("thinking", "<think>\nTwo and two.\n</think>\n\nFour.", Parsed("Two and two.", "Four.")),
    ("empty think", "<think>\n\n</think>\n\nHi", Parsed("", "Hi")),
    ("unclosed think", "<think>\nhmm", Parsed("hmm", "")),
    ("angle bracket", "<thin ice> a < b", Parsed("", "<thin ice> a < b")),
    ("call", CALL, Parsed("", "", (("get_weather", '{"city": "Paris"}'),))),  # type: ignore[arg-type]
    (
        "text and call",
        "Let me look.\n" + CALL,
        Parsed("", "Let me look.", (("get_weather", '{"city": "Paris"}'),)),
    ),  # type: ignore[arg-type]
    ("two calls", CALL + "\n" + CALL, Parsed("", "", (("get_weather", '{"city": "Paris"}'),) * 2)),  # type: ignore[arg-type]
    ("broken call", "<tool_call>{nope}</tool_call>", Parsed("", "<tool_call>{nope}</tool_call>")),
    ("no JSON", NAN_CALL, Parsed("", NAN_CALL)),
    ("half a pair", HALF_CALL, Parsed("", "", (("f", '{"a": "\\ud83d"}'),))),  # type: ignore[arg-type]
    ("half a name", HALF_CALL.replace('"f"', '"\\ud83d"'), Parsed("", HALF_CALL.replace('"f"', '"\\ud83d"'))),
    ("unclosed call", '<tool_call>{"name": "x"', Parsed("", '<tool_call>{"name": "x"')),
    ("trailing newlines", "Done.\n\n", Parsed("", "Done.\n\n")),
]


@pytest.mark.parametrize(("name", "text", "expected"), PARSES, ids=[name for name, _, _ in PARSES])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_chat_parser(name: str, text: str, expected: Parsed, size: int) -> None:
    parser = ChatParser(parse_reasoning=True, parse_calls=True)
    parts = [parser.feed(text[i : i + size], i + size >= len(text)) for i in range(0, len(text), size)]
    got = Parsed(
        "".join(part.reasoning for part in parts),
        "".join(part.content for part in parts),
        tuple(call for part in parts for call in part.calls),
    )
    assert got == expected


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(
            [
                "<think>",
                "</think>",
                "<tool_call>",
                "</tool_call>",
                '{"name": "f"}',
                "\n",
                "\n" * 9,
                "a",
                "<",
                "t",
            ]
        ),
        max_size=12,
    ),
    cuts=st.sets(st.integers(0, 120)),
    is_reasoning=st.booleans(),
    calls_end_reasoning=st.booleans(),
)
def test_chat_parser_does_not_care_how_text_is_cut(
    pieces: list[str], cuts: set[int], is_reasoning: bool, calls_end_reasoning: bool
) -> None:
    text = "".join(pieces)

    def new() -> ChatParser:
        return ChatParser(
            parse_reasoning=True,
            parse_calls=True,
            is_reasoning=is_reasoning,
            calls_end_reasoning=calls_end_reasoning,
        )

    def parse(parts: list[str], seam: int = 0) -> tuple[str, str, list[object]]:
        """What two parsers say: the second goes on at `seam`, as in an engine that resumes a stream."""
        parser = new()
        parsed = [parser.feed(part) for part in parts[:seam]]
        parser = new()
        parser.feed("".join(parts[:seam]))
        parsed += [
            parser.feed(part, index == len(parts)) for index, part in enumerate(parts[seam:], seam + 1)
        ]
        calls = [call for part in parsed for call in part.calls]
        return "".join(p.reasoning for p in parsed), "".join(p.content for p in parsed), calls

    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(edges)]
    for seam in range(len(parts)):
        assert parse(parts, seam) == parse([text])


@pytest.mark.parametrize("before", ["", "<think>", "<think>a</think>", "word"])
def test_nothing_but_newlines_is_not_silence(before: str) -> None:
    parser = ChatParser(parse_reasoning=True, parse_calls=True)
    parser.feed(before)
    heard = [parser.feed("\n") for _ in range(100)]
    assert sum(len(part.content) + len(part.reasoning) for part in heard) > 50


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("Hm", "Hm", ""),
        ("<think>again</think>x", "<think>again", "x"),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_text_that_begins_within_a_thought(text: str, reasoning: str, content: str, size: int) -> None:
    parser = ChatParser(parse_reasoning=True, parse_calls=True, is_reasoning=True)
    parts = [parser.feed(text[i : i + size], i + size >= len(text)) for i in range(0, len(text), size)]
    assert "".join(part.reasoning for part in parts) == reasoning
    assert "".join(part.content for part in parts) == content


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "num_calls"),
    [
        ("<think>I ask." + CALL, "I ask.", "", 1),
        ("<think>I ask.\n" + CALL + "\nDone.", "I ask.", "Done.", 1),
        ("<think>I could write <tool_call>.</think>No.", "I could write <tool_call>.", "No.", 0),
        ("<think>a <tool_call>nope</tool_call> b</think>c", "a <tool_call>nope</tool_call> b", "c", 0),
        ("<think>cut <tool_call>{", "cut <tool_call>{", "", 0),
        ("<think>a</think>" + CALL, "a", "", 1),
    ],
)
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_whole_call_ends_a_thought(
    text: str, reasoning: str, content: str, num_calls: int, size: int
) -> None:
    parser = ChatParser(parse_reasoning=True, parse_calls=True, calls_end_reasoning=True)
    parts = [parser.feed(text[i : i + size], i + size >= len(text)) for i in range(0, len(text), size)]
    assert "".join(part.reasoning for part in parts) == reasoning
    assert "".join(part.content for part in parts) == content
    assert parser.num_calls == num_calls


def test_without_tools_a_call_is_text() -> None:
    assert ChatParser(parse_reasoning=False, parse_calls=False).feed(CALL, True).content == CALL


def chat(**fields: object) -> ChatCompletionRequest:
    request = decode_request("chat/completions", json.dumps(fields).encode())
    assert isinstance(request, ChatCompletionRequest)
    return request


def test_a_template_that_fails_is_a_bad_request() -> None:
    for source in ("{{ range(10 ** 9) | list }}", "{{ messages[0].name.a.b }}", "{{ 1 // 0 }}"):
        with pytest.raises(InvalidRequest, match="cannot render"):
            ChatTemplate(source, {}).render(chat(messages=[{"role": "user", "content": "Hi"}]))


def test_template_takes_text_parts_and_refuses_others(template: ChatTemplate) -> None:
    parts = [{"type": "text", "text": "red"}, {"type": "text", "text": "door"}]
    assert "user\nred\ndoor<|im_end|>" in template.render(chat(messages=[{"role": "user", "content": parts}]))
    image = [{"type": "image_url", "image_url": {"url": "http://example.com/x.png"}}]
    with pytest.raises(InvalidRequest, match="image_url"):
        template.render(chat(messages=[{"role": "user", "content": image}]))


def test_template_variables_are_those_it_declares(template: ChatTemplate) -> None:
    messages = [{"role": "user", "content": "hi"}]
    off = template.render(chat(messages=messages, chat_template_kwargs={"enable_thinking": False}))
    assert off.endswith("<think>\n\n</think>\n\n")
    for name in ("chat_template", "tokenize", "messages"):
        with pytest.raises(InvalidRequest, match="no variable"):
            template.render(chat(messages=messages, chat_template_kwargs={name: "x"}))


def test_template_sandbox_holds(tmp_path: Path) -> None:
    hostile = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(InvalidRequest):
        hostile.render(ChatCompletionRequest(messages=[ChatMessage(role="user", content="x")]))


def test_tool_call_arguments_reach_the_template_as_values(template: ChatTemplate) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    text = template.render(
        chat(messages=[{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}])
    )
    assert '"arguments": {"a": 1}' in text
    call["function"]["arguments"] = "{broken"  # type: ignore[index]
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        template.render(chat(messages=[{"role": "assistant", "tool_calls": [call]}]))


def test_chunk_ends_lie_where_the_text_ends(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    system, question = "You know the sea. " * 40, "Where is the lantern?"
    request = chat(messages=[{"role": "system", "content": system}, {"role": "user", "content": question}])
    text = template.render(request)
    encoded = tokenizer.encode(text, add_special_tokens=False)
    (segments,) = prompt_segments(request)
    ends = map_chunks(segments, 1, text, encoded.ends)
    assert [end.hash for end in ends] == list(chunk_hashes(segments, 1))
    counts = [end.token_end for end in ends]
    assert counts == sorted(counts)
    # role, three chunks of 256 bytes (the last one shorter), role, question
    for end, value in ((ends[1], system[:256]), (ends[3], system), (ends[5], question)):
        offset = text.index(value) + len(value)
        assert encoded.ends[end.token_end - 1] <= offset
        assert encoded.ends[end.token_end] > offset - 12


def test_two_requests_that_share_chunks_share_tokens(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    def ends(question: str) -> tuple[list[int], dict[int, int]]:
        request = chat(
            messages=[{"role": "system", "content": "Facts. " * 90}, {"role": "user", "content": question}]
        )
        text = template.render(request)
        encoded = tokenizer.encode(text, add_special_tokens=False)
        mapped = map_chunks(prompt_segments(request)[0], chain_seed("m"), text, encoded.ends)
        return encoded.ids, {end.hash: end.token_end for end in mapped}

    ids_a, ends_a = ends("What is red?")
    ids_b, ends_b = ends("Who walks there?")
    shared = max(ends_a[chunk] for chunk in ends_a.keys() & ends_b.keys())
    assert shared > 90
    assert ids_a[:shared] == ids_b[:shared]


def test_what_the_template_drops_rounds_down(tokenizer: Tokenizer) -> None:
    request = chat(
        messages=[
            {"role": "user", "content": "kept text, long enough to be found in the prompt"},
            {"role": "user", "content": "yes"},
        ]
    )
    text = "kept text, long enough to be found in the prompt" + " filler" * 200 + " yes"
    encoded = tokenizer.encode(text, add_special_tokens=False)
    mapped = map_chunks(prompt_segments(request)[0], 1, text, encoded.ends)
    kept = mapped[1].token_end
    assert kept > 5
    assert mapped[-1].token_end <= kept


def test_token_prompts_map_exactly() -> None:
    request = decode_request("completions", json.dumps({"prompt": list(range(150))}).encode())
    (segments,) = prompt_segments(request)
    assert [end.token_end for end in map_token_chunks(segments, 1)] == [64, 128, 150]
