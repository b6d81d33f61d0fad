"""The detokenizer: text in pieces, invalid bytes, stop strings and stop tokens."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
import tokenizers as tokenizers_library
from hypothesis import assume, given, settings
from tokenizers import decoders, models
from tokenizers.decoders import DecodeStream

from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.detokenizer import IncrementalDetokenizer
from argosy_engine.frontend.tokenizer import MAX_DECODED_TOKENS, Tokenizer
from argosy_engine.params import SamplingParams
from small_tokenizers import byte_fallback_tokenizer


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


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 1023), max_size=12), size=st.integers(1, 4))
def test_decoding_in_slices_gives_the_same_text(tokenizer: Tokenizer, ids: list[int], size: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("argosy_engine.frontend.tokenizer.SLICE_TOKENS", size)
        assert tokenizer.decode_long(ids) == tokenizer.decode(ids, skip_special_tokens=False)


def test_only_tokens_that_are_bytes_are_decoded_without_a_bound(tokenizers: dict[str, Tokenizer]) -> None:
    """The library decodes all tokens in one call, in which time no other thread runs."""
    ids = [100] * (MAX_DECODED_TOKENS + 1)
    assert tokenizers["bytes"].decode_long(ids) == tokenizers["bytes"].decode([100]) * len(ids)
    assert tokenizers["byte fallback"].decode_long(ids[1:])
    with pytest.raises(InvalidRequest, match="send them in parts"):
        tokenizers["byte fallback"].decode_long(ids)


@settings(max_examples=400, deadline=None)
@given(
    text=st.text(max_size=12) | st.lists(st.sampled_from(["<|im_end|>", "\ufffd", "é", " 🌍"])).map("".join),
    ids=st.none() | st.lists(st.integers(0, 1023), max_size=8),
    context=st.lists(st.integers(0, 1023), max_size=12) | st.just("the sea"),
    cut=st.integers(0, 20),
    skips=st.booleans(),
)
def test_an_output_decoded_at_once_is_the_one_decoded_token_by_token(
    tokenizer: Tokenizer, text: str, ids: list[int] | None, context: list[int] | str, cut: int, skips: bool
) -> None:
    if ids is None:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
    if isinstance(context, str):
        context = tokenizer.encode(context, add_special_tokens=False).ids
    ids = ids[: len(ids) - min(cut, len(ids)) // 4]
    params = SamplingParams(skip_special_tokens=skips)
    whole, stepwise = (IncrementalDetokenizer(tokenizer, params, context) for _ in range(2))
    pieces = [stepwise.update([token_id], is_last=False) for token_id in ids]
    assert whole.update(ids, is_last=True) == "".join(pieces) + stepwise.update([], is_last=True)


@settings(max_examples=400, deadline=None)
@given(
    texts=st.lists(st.text(max_size=6) | st.sampled_from(["<|im_end|>", "\ufffd", " 🌍", "é", " the sea"])),
    ids=st.none() | st.lists(st.integers(0, 1023), max_size=8),
    cut=st.integers(0, 3),
    skips=st.booleans(),
)
def test_tokens_have_the_texts_that_the_decoder_of_the_library_gives(
    tokenizer: Tokenizer, texts: list[str], ids: list[int] | None, cut: int, skips: bool
) -> None:
    context = tokenizer.encode("say the sea", add_special_tokens=False).ids
    if ids is None:
        ids = [each for text in texts for each in tokenizer.encode(text, add_special_tokens=False).ids[cut:]]
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(skip_special_tokens=skips), context)
    stream = DecodeStream(ids=context, skip_special_tokens=skips)
    for token_id in ids:
        assert detokenizer.update([token_id], is_last=False) == (
            stream.step(tokenizer.backend, token_id) or ""
        )


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


SPECIAL = "one<|im_end|>\ntwo<|im_start|>three"


@pytest.mark.parametrize("groups", [[], [1] * 60, [2, 1, 3, 1, 5] * 12])
@pytest.mark.parametrize(
    ("stop", "include", "expected", "reason"),
    [
        (("<|im_end|>",), False, "one", "<|im_end|>"),
        (("<|im_end|>",), True, "one<|im_end|>", "<|im_end|>"),
        (("e<|im_end|>\ntw",), False, "on", "e<|im_end|>\ntw"),
        (("e<|im_end|>\ntw",), True, "one<|im_end|>\ntw", "e<|im_end|>\ntw"),
        (("never<|im_start|>", "three"), False, "one\ntwo", "three"),
        (("<|im_end|>two", "|>\ntwo"), False, "one\ntwothree", None),
        (("two<|im_start|>", "<|im_end|>"), False, "one", "<|im_end|>"),
    ],
)
def test_stop_strings_with_special_tokens(
    tokenizer: Tokenizer,
    groups: list[int],
    stop: tuple[str, ...],
    include: bool,
    expected: str,
    reason: str | None,
) -> None:
    """They are found although the text does not show them."""
    ids = tokenizer.encode(SPECIAL, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == "one\ntwothree"
    got = detokenize(tokenizer, ids, groups, stop=stop, include_stop_str_in_output=include)
    assert got == (expected, reason)


@pytest.mark.parametrize("kept", ["<|im_start|>", "<|im_end|>"])
@pytest.mark.parametrize("groups", [[], [1] * 60])
def test_stop_strings_with_special_tokens_of_which_a_parser_reads_one(
    tokenizer: Tokenizer, groups: list[int], kept: str
) -> None:
    ids = tokenizer.encode(SPECIAL, add_special_tokens=False).ids
    fields = {"kept_special_token_ids": (tokenizer.control_tokens[kept],), "stop": ("<|im_start|>th",)}
    shown = "one<|im_end|>\ntwo" if kept == "<|im_end|>" else "one\ntwo"
    assert detokenize(tokenizer, ids, groups, **fields) == (shown, "<|im_start|>th")


@pytest.mark.parametrize("groups", [[], [1] * 60])
def test_text_that_spells_a_special_token_ends_the_output_as_well(
    tokenizer: Tokenizer, groups: list[int]
) -> None:
    ids = tokenizer.encode("one<|im_", add_special_tokens=False).ids
    ids += tokenizer.encode("end|>two", add_special_tokens=False).ids
    assert detokenize(tokenizer, ids, groups, stop=("<|im_end|>",)) == ("one", "<|im_end|>")


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


@pytest.mark.parametrize(("fields", "expected"), [
    ({"skip_special_tokens": False}, "a <s> <s> b"),
    ({"skip_special_tokens": False, "spaces_between_special_tokens": False}, "a <s><s> b"),
    ({"spaces_between_special_tokens": False}, "a b"),
])  # fmt: skip
def test_spaces_between_special_tokens(tmp_path: Path, fields: dict[str, bool], expected: str) -> None:
    base = tokenizers_library.Tokenizer(models.WordLevel({"a": 0, "b": 1, "<s>": 2}, unk_token="a"))
    base.add_special_tokens(["<s>"])
    base.decoder = decoders.WordPiece(cleanup=False)  # it puts a space before every token but the first
    base.save(str(tmp_path / "tokenizer.json"))
    assert detokenize(Tokenizer(tmp_path), [0, 2, 2, 1], [1, 1, 1], **fields)[0] == expected
