"""Checkpoints with Mistral's own tokenizers, which mistral-common reads: held to that library."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings
from mistral_common.protocol.fim.request import FIMRequest
from mistral_common.protocol.instruct.request import ChatCompletionRequest as MistralRequest
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer as Library
from sentencepiece import SentencePieceTrainer

from argosy_engine import LLM
from argosy_engine.api import doctor
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.checkpoint.tokenizer_files import find_tokenizer, prepare_tokenizer
from argosy_engine.errors import ConfigError, InvalidRequest
from argosy_engine.frontend.detokenizer import IncrementalDetokenizer
from argosy_engine.frontend.renderer import Renderer, open_tokenizer
from argosy_engine.frontend.tokenizer import Tokenizer
from argosy_engine.params import SamplingParams
from argosy_engine.resolved_config import ParserConfig, RequestDefaults, TokenizerConfig
from argosy_engine.structured.structured_outputs_params import StructuredOutputsParams
from argosy_engine.structured.xgrammar_backend import Vocabulary
from argosy_protocol.openai import ChatCompletionRequest, CompletionRequest
from mistral_tokenizers import WORDS, special_tokens, tekken, write_tekken
from shallow_model import write_shallow_model

VERSIONS = ("v3", "v7", "v11", "v13", "v15")
MAX_MODEL_LEN = 4096
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "book",
            "description": "Book a room in \u4f60.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = {"id": "abcdef123", "type": "function", "function": {"name": "book", "arguments": '{"city": "Oslo"}'}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "hello \u4f60, be brief"},
    {"role": "user", "content": "[INST]hello world</s> \U0001f389"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"room": "\u00e9"}', "tool_call_id": "abcdef123"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "abab aba"},
]
TEXTS = st.lists(
    st.sampled_from([*"helo wrdab\n 1./", "\u4f60", "\u00e9", "\U0001f389", "hello", "[INST]", "</s>"]),
    max_size=40,
).map("".join)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A cache of conversions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, cache: None) -> dict[str, Path]:
    """Folders with a tokenizer of each version, and with one of SentencePiece."""
    base = tmp_path_factory.mktemp("tokenizers")
    made = {version: write_tekken(base / version, version) for version in VERSIONS}
    made["sentencepiece"] = base / "sentencepiece"
    made["sentencepiece"].mkdir()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world, hello you", "abab aba be brief with hello"] * 20),
        model_prefix=str(made["sentencepiece"] / "trained"),
        vocab_size=310,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        control_symbols=list(special_tokens("v3")[3:]),
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (made["sentencepiece"] / "trained.model").rename(made["sentencepiece"] / "tokenizer.model.v3")
    return made


@pytest.fixture(scope="module")
def tokenizer_of(folders: dict[str, Path]) -> Callable[[str], Tokenizer]:
    made: dict[str, Tokenizer] = {}

    def tokenizer(name: str) -> Tokenizer:
        if name not in made:
            made[name] = open_tokenizer(prepare_tokenizer(folders[name]))
        return made[name]

    return tokenizer


def library_of(folder: Path) -> Any:
    return Library.from_file(find_tokenizer(folder).file)


def renderer_of(folder: Path, **defaults: Any) -> Renderer:
    prepared = prepare_tokenizer(folder)
    config = SimpleNamespace(
        model_path=str(folder),
        request_defaults=RequestDefaults(**defaults),
        model_name="m",
        vocab_size=4096,
        max_model_len=MAX_MODEL_LEN,
        pooling=None,
        logits_processors=(),
    )
    tokenizer = TokenizerConfig(folder=str(prepared.folder), mistral_file=str(prepared.mistral_file))
    return Renderer(config, ParserConfig(), tokenizer)  # type: ignore[arg-type]


def chat(messages: list[dict[str, Any]], **fields: Any) -> ChatCompletionRequest:
    return msgspec.convert({"messages": messages, **fields}, ChatCompletionRequest)


@pytest.mark.parametrize("name", [*VERSIONS, "sentencepiece"])
@settings(max_examples=40, deadline=None)
@given(text=TEXTS)
def test_texts_have_the_librarys_tokens_and_come_back_however_they_are_cut(
    folders: dict[str, Path], tokenizer_of: Callable[[str], Tokenizer], name: str, text: str
) -> None:
    tokenizer, library = tokenizer_of(name), library_of_cached(folders[name])
    for bos in (False, True):
        encoded = tokenizer.encode(text, add_special_tokens=bos)
        assert encoded.ids == library.encode(text, bos=bos, eos=False)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text == library.decode(ids)
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(), [library.bos_id])
    pieces = [detokenizer.update([id_], number + 1 == len(ids)) for number, id_ in enumerate(ids)]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)
    ends = tokenizer.encode(text, add_special_tokens=False).ends
    assert ends == sorted(ends)
    assert not text or ends[-1] == len(text)


_libraries: dict[Path, Any] = {}


def library_of_cached(folder: Path) -> Any:
    if folder not in _libraries:
        _libraries[folder] = library_of(folder).instruct_tokenizer.tokenizer
    return _libraries[folder]


@pytest.mark.parametrize("name", [*VERSIONS, "sentencepiece"])
def test_tokens_have_the_librarys_bytes_and_kinds(
    folders: dict[str, Path], tokenizer_of: Callable[[str], Tokenizer], name: str
) -> None:
    tokenizer, library = tokenizer_of(name), library_of_cached(folders[name])
    assert tokenizer.vocab_size == library.n_words
    for id_ in range(library.n_words):
        is_special = library.is_special(id_) or id_ == library.unk_id
        assert (id_ in tokenizer.special_ids) == is_special
        if is_special:
            assert tokenizer.token_strs([id_]) == [library.id_to_piece(id_)]
        elif name != "sentencepiece":
            assert tokenizer.token_bytes(id_) == library.id_to_byte_piece(id_, SpecialTokenPolicy.RAISE)


@pytest.mark.parametrize("name", VERSIONS)
def test_grammars_see_the_tokens_bytes_and_no_special_token(folders: dict[str, Path], name: str) -> None:
    num_special = len(special_tokens(name)) + 3
    vocabulary = Vocabulary(prepare_tokenizer(folders[name]).folder, num_special + len(WORDS) + 7, [2])
    decoded = vocabulary.tokenizer_info().decoded_vocab
    assert decoded[num_special:] == [*WORDS, *[b""] * 7]
    assert not any(decoded[:num_special])


@pytest.mark.parametrize("name", [*VERSIONS, "sentencepiece"])
def test_chats_have_the_librarys_tokens(folders: dict[str, Path], name: str) -> None:
    library, renderer = library_of(folders[name]), renderer_of(folders[name])
    wanted = library.encode_chat_completion(MistralRequest.from_openai(TALK, TOOLS)).tokens
    prompt = renderer.render_chat(chat(TALK, tools=TOOLS))
    assert prompt.token_ids == wanted
    assert prompt.token_ids == renderer.encode_chat(chat(TALK, tools=TOOLS)).ids
    without = library.encode_chat_completion(MistralRequest.from_openai(TALK)).tokens
    assert renderer.render_chat(chat(TALK, tools=TOOLS, tool_choice="none")).token_ids == without != wanted
    if name != "sentencepiece":
        text = renderer.chat_text(chat(TALK))
        assert text.startswith("<s>")
        assert "[INST]hello world</s> \U0001f389[/INST]" in text
        begin = library_of_cached(folders[name]).get_special_token("[INST]")
        assert without.count(begin) == 2  # what the user spelled is text


def test_a_client_can_not_write_control_tokens(folders: dict[str, Path]) -> None:
    renderer = renderer_of(folders["v13"])
    text = "".join(special_tokens("v13"))
    ids = renderer.render_chat(chat([{"role": "user", "content": text}])).token_ids
    assert [id_ for id_ in ids if id_ in renderer.tokenizer.special_ids] == [1, 3, 4]
    prompt = renderer.render_completion(CompletionRequest(model="m", prompt=text))[0].token_ids
    assert [id_ for id_ in prompt if id_ in renderer.tokenizer.special_ids] == [1]


@pytest.mark.parametrize("name", ["v7", "v13"])
def test_an_answer_is_continued(folders: dict[str, Path], name: str) -> None:
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hell"}]
    wanted = (
        library_of(folders[name]).encode_chat_completion(MistralRequest.from_openai(talk, None, True)).tokens
    )
    asked = chat(talk, continue_final_message=True, add_generation_prompt=False)
    prompt = renderer_of(folders[name]).render_chat(asked)
    assert prompt.token_ids == wanted
    assert prompt.token_ids[-1] != 2
    assert prompt.reasoning is None


def test_ids_of_calls_become_what_a_version_accepts(folders: dict[str, Path]) -> None:
    call = {**CALL, "id": "call_0123456789abcdef"}
    talk = [
        TALK[1],
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": call["id"]},
    ]
    unnamed = [*talk[:2], {"role": "function", "name": "book", "content": "1"}]
    for name in ("v3", "v11"):
        renderer = renderer_of(folders[name])
        assert renderer.chat_text(chat(talk)) == renderer.chat_text(chat(unnamed))
        assert "call_0" not in renderer.chat_text(chat(talk))


def test_reasoning_and_settings_are_rendered_where_a_version_has_them(folders: dict[str, Path]) -> None:
    talk = [TALK[1], {"role": "assistant", "reasoning": "hmm", "content": "hello"}, TALK[5]]
    marks = "[THINK]hmm[/THINK]hello"
    assert marks in renderer_of(folders["v13"]).chat_text(chat(talk))
    assert "hmm" not in renderer_of(folders["v7"]).chat_text(chat(talk))
    renderer = renderer_of(folders["v15"])
    high = renderer.chat_text(chat(talk, reasoning_effort="high"))
    assert marks in high
    assert '[MODEL_SETTINGS]{"reasoning_effort": "high"}[/MODEL_SETTINGS]' in high
    off = renderer.chat_text(chat(talk, chat_template_kwargs={"enable_thinking": False}))
    assert '"reasoning_effort": "none"' in off
    with pytest.raises(InvalidRequest, match="reasoning_effort"):
        renderer.render_chat(chat(talk, reasoning_effort="low"))
    default = renderer_of(folders["v15"], chat_template_kwargs={"reasoning_effort": "high"})
    assert default.chat_text(chat(talk)) == high


def test_the_models_reasoning_and_calls_are_parsed(folders: dict[str, Path]) -> None:
    renderer = renderer_of(folders["v13"])
    request = chat([TALK[1]], tools=TOOLS)
    prompt = renderer.render_chat(request)
    assert prompt.reasoning is not None
    assert not prompt.reasoning.is_open
    assert prompt.reasoning.start_ids == (special_tokens("v13").index("[THINK]"),)
    kept = renderer.parsed_token_ids(request)
    ids = [special_tokens("v13").index("[THINK]")]
    for text in ("hmm", "[/THINK]", "hello", "[TOOL_CALLS]", "book", "[ARGS]", '{"city": "Oslo"}'):
        marks = special_tokens("v13")
        ids += [marks.index(text)] if text in marks else renderer.encode(text, add_special_tokens=False).ids
    params = SamplingParams(kept_special_token_ids=kept)
    text = IncrementalDetokenizer(renderer.tokenizer, params, prompt.token_ids).update(ids, True)
    parsed = renderer.chat_parser(request, prompt).feed(text, True)
    assert (parsed.reasoning, parsed.content) == ("hmm", "hello")
    assert [(each.name, json.loads(each.arguments)) for each in parsed.calls] == [("book", {"city": "Oslo"})]
    assert not renderer_of(folders["v7"]).has_thinking


def test_stop_strings_and_special_tokens(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    tokenizer = tokenizer_of("v13")
    ids = [*tokenizer.encode("hello world", add_special_tokens=False).ids, 9, 2]
    stopping = IncrementalDetokenizer(tokenizer, SamplingParams(stop=("o w",)), [1])
    assert "".join(stopping.update([id_], False) for id_ in ids) == "hell"
    shown = IncrementalDetokenizer(tokenizer, SamplingParams(skip_special_tokens=False), [1])
    assert "".join(shown.update([id_], False) for id_ in ids) == "hello world[TOOL_CALLS]</s>"


def test_a_text_is_filled_in(folders: dict[str, Path]) -> None:
    wanted = library_of(folders["v7"]).encode_fim(FIMRequest(prompt="hell", suffix=" world")).tokens
    request = CompletionRequest(model="m", prompt="hell", suffix=" world")
    assert renderer_of(folders["v7"]).render_completion(request)[0].token_ids == wanted


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"chat_template": "{{ messages }}"}, "chat_template is refused"),
        ({"documents": [{"text": "a"}]}, "documents are refused"),
        ({"add_special_tokens": True}, "add_special_tokens is not supported"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "final message of the assistant"),
        ({"messages": [{"role": "narrator", "content": "a"}]}, "role"),
        ({"messages": [{"role": "user", "content": "a\ud800"}]}, "lone surrogates"),
        ({"messages": [TALK[1], TALK[4]]}, "last role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not supported by this model"),
        (
            {"messages": [{"role": "user", "content": " " * 1_000_000}]},
            "maximum context length|tokenised|render",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": 1}}}]}, "schema"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_the_library_can_not_render_is_a_bad_request(
    folders: dict[str, Path], fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidRequest, match=told):
        renderer_of(folders["v13"]).render_chat(chat(**{"messages": [TALK[1]], **fields}))


def test_a_long_chat_is_refused_or_truncated(folders: dict[str, Path]) -> None:
    renderer = renderer_of(folders["v13"])
    long = [{"role": "user", "content": "ab " * MAX_MODEL_LEN}]
    with pytest.raises(InvalidRequest, match="maximum context length"):
        renderer.render_chat(chat(long))
    kept = renderer.render_chat(chat(long, truncate_prompt_tokens=8))
    assert kept.is_truncated
    assert kept.token_ids == renderer.encode_chat(chat([{"role": "user", "content": "ab " * 100}])).ids[-8:]


def test_chunks_of_the_router_end_where_their_tokens_do(folders: dict[str, Path]) -> None:
    renderer = renderer_of(folders["v13"])
    talk = [{"role": "user", "content": "hello \u4f60 " * 200}, TALK[4], {"role": "user", "content": "aba"}]
    first = renderer.render_chat(chat(talk))
    other = renderer.render_chat(chat([*talk[:2], {"role": "user", "content": "hello"}]))
    assert first.chunk_ends
    shared = [end for end, theirs in zip(first.chunk_ends, other.chunk_ends, strict=False) if end == theirs]
    longest = max(end.token_end for end in shared)
    assert longest > 300
    assert first.token_ids[:longest] == other.token_ids[:longest]


def test_modes_choose_the_file(tmp_path: Path, cache: None) -> None:
    folder = write_tekken(tmp_path)
    assert str(find_tokenizer(folder)) == "tekken.json, read by mistral-common"
    with pytest.raises(
        ConfigError, match=r"no tokenizer\.json; its tekken\.json is read with --tokenizer-mode mistral"
    ):
        find_tokenizer(folder, "hf")
    (folder / "tokenizer.json").write_text("{}")
    assert str(find_tokenizer(folder)) == "tokenizer.json, read by tokenizers"
    assert str(find_tokenizer(folder, "mistral")) == "tekken.json, read by mistral-common"
    (folder / "tekken.json").unlink()
    with pytest.raises(ConfigError, match=r"no tekken\.json or tokenizer\.model\.vN.*leave the flag out"):
        find_tokenizer(folder, "mistral")


def _unknown_version(content: dict[str, Any]) -> None:
    content["config"]["version"] = "v99"


def _clash(content: dict[str, Any]) -> None:
    content["special_tokens"][special_tokens("v13").index("[MIDDLE]")]["token_str"] = "hello"


def _no_vocabulary(content: dict[str, Any]) -> None:
    del content["vocab"]


@pytest.mark.parametrize(
    ("damage", "told"),
    [(_unknown_version, "v99"), (_clash, "spelled as another token"), (_no_vocabulary, "vocab")],
)
def test_what_can_not_be_read_is_refused_with_the_remedy(
    tmp_path: Path, cache: None, damage: Callable[[dict[str, Any]], None], told: str
) -> None:
    content = tekken()
    damage(content)
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"cannot be read by mistral-common: .*{told}.*--tokenizer PATH"):
        prepare_tokenizer(tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, cache: None) -> Path:
    """The built-in model's config, without weights, with a tokenizer of Mistral's."""
    folder = write_shallow_model(tmp_path_factory.mktemp("model") / "m")
    (folder / "tokenizer.json").unlink()
    return write_tekken(folder)


def test_an_engine_serves_chats_texts_and_grammars(model: Path) -> None:
    with LLM(str(model), load_format="dummy", device="cpu", max_model_len=512) as llm:
        talk: Any = [{"role": "user", "content": "hello"}]
        wanted = library_of(model).encode_chat_completion(MistralRequest.from_openai(talk)).tokens
        (chatted,) = llm.chat(talk, SamplingParams(max_tokens=8), use_tqdm=False)
        assert chatted.prompt_token_ids == wanted
        library = library_of_cached(model)
        (written,) = llm.generate("hello", SamplingParams(max_tokens=4), use_tqdm=False)
        assert written.prompt_token_ids == library.encode("hello", bos=True, eos=False)
        choice = StructuredOutputsParams(choice=["hello world", "\u4f60 world"])
        params = SamplingParams(max_tokens=64, structured_outputs=choice)
        (constrained,) = llm.generate("hello", params, use_tqdm=False)
        assert constrained.outputs[0].text in ("hello world", "\u4f60 world")
        assert llm.get_tokenizer().apply_chat_template(talk) == wanted


def test_doctor_names_tokenizer_and_parsers(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--load-format", "dummy", "--device", "cpu", "--max-model-len", "512"]
    assert doctor.main([str(model), *flags]) == 0
    told = capsys.readouterr().out
    assert "tokenizer tekken.json, read by mistral-common" in told
    assert "parsers tool calls mistral, reasoning mistral" in told
    assert doctor.main([str(model), *flags, "--tokenizer-mode", "hf"]) == 2
    assert "its tekken.json is read with --tokenizer-mode mistral" in capsys.readouterr().err
    tiny = str(resolve_model("builtin://tiny"))
    assert doctor.main([str(model), *flags, "--tokenizer", tiny, "-o", "json"]) == 0
    diagnosis = json.loads(capsys.readouterr().out)
    assert diagnosis["tokenizer"] == "tokenizer.json, read by tokenizers"
    assert diagnosis["parsers"] == "tool calls hermes, reasoning qwen3"


def test_tokens_of_labels_need_a_tokenizer_json(model: Path) -> None:
    labels = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]}
    labels |= {"method": "from_2_way_softmax"}
    with pytest.raises(ConfigError, match=r"classifier_from_token names tokens of a tokenizer\.json"):
        LLM(str(model), load_format="dummy", device="cpu", max_model_len=64, hf_overrides=labels)
