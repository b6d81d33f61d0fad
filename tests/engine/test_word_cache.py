"""Tokens from words that were seen before: those that the library finds, or none."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.frontend import tokenizer as word_cache
from argosy_engine.frontend.tokenizer import MAX_WORDS, Tokenizer, WordCache, ascii_pattern
from small_tokenizers import byte_fallback_tokenizer

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"gpt2": GPT2, "qwen2": QWEN2, "llama3": LLAMA3, "o200k": O200K}
CONTROL = ["<|im_start|>", "<|im_end|>", "<|im_", "<think>", "\uff5cend\uff5c"]
TEXT = "It's the sea's 1234 lanterns, we'll see: THE door of a HTTPServer (by them) is  there.\n\n\tOnce upon a time. "


def backend_of(pattern: str, added: list[str | AddedToken] = CONTROL) -> Backend:  # type: ignore[assignment]
    """Build a byte-level tokenizer that splits texts by a pattern."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator([TEXT] * 3, trainer)
    backend.add_special_tokens(added)
    return backend


BACKENDS = {name: backend_of(pattern) for name, pattern in PATTERNS.items()}
BACKENDS["tiny"] = Backend.from_file(str(Path(resolve_model("builtin://tiny")) / "tokenizer.json"))
CACHES = {name: WordCache.of(backend) for name, backend in BACKENDS.items()}

texts = st.lists(
    st.one_of(
        st.text(st.characters(max_codepoint=127), max_size=12),
        st.text("aSLl' 19\n\r\t.\x0b\x1c\x1f", max_size=12),
        st.sampled_from([*CONTROL[:4], "<|im_start|", "'ll", "'LL", "{}[]&&--"]),
        st.sampled_from(TEXT.split(" ")).map(lambda word: f" {word}"),
    ),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("name", BACKENDS)
@given(text=texts)
def test_words_have_the_tokens_and_ends_that_the_library_finds(name: str, text: str) -> None:
    cache, encoding = CACHES[name], BACKENDS[name].encode(text, add_special_tokens=False)
    assert cache is not None
    for _ in range(2):  # the second time from the cache
        token_ids = cache.encode(text)
        if token_ids is not None:
            assert token_ids == encoding.ids
            assert cache.ends(token_ids) == [end for _, end in encoding.offsets]


@pytest.mark.parametrize("name", BACKENDS)
def test_a_text_whose_words_are_known_is_not_left_to_the_library(name: str) -> None:
    cache = WordCache.of(BACKENDS[name])
    assert cache is not None
    for _ in range(3):
        cache.encode(TEXT)
        cache.encode("<|im_start|>user\nthe sea<|im_end|>\n")
    assert cache.encode(TEXT) == BACKENDS[name].encode(TEXT, add_special_tokens=False).ids
    assert cache.encode(f"<|im_start|>user\n{TEXT}<|im_end|>\n") is not None


def test_texts_that_are_not_ascii_and_many_new_words_are_left_to_the_library() -> None:
    cache = WordCache.of(BACKENDS["qwen2"])
    assert cache is not None
    assert cache.encode("caf\u00e9") is None
    assert cache.encode(" ".join(f"x{chr(97 + number)}" for number in range(26))) is None
    assert cache.encode("") == []


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, rng = WordCache.of(BACKENDS["qwen2"]), random.Random(3)
    assert cache is not None
    for _ in range(MAX_WORDS // 8):
        words = ["".join(rng.choices("abcdefgh", k=8)) for _ in range(10)]
        assert cache.encode(" ".join(words)) is not None
        assert len(cache) <= MAX_WORDS
    before = len(cache)
    assert cache.encode("a" * 16384) is not None
    assert len(cache) == before


@pytest.mark.parametrize(
    "pattern",
    [r"[[:alpha:]]+", r"\p{Han}+", r"\P{L}+", r"[a-z&&[^aeiou]]+", r"\w+\b", r"^a", r"a$", r"(?<=a)b", r"a{1,3}+",
     r"a*", r"[^\p{Lm}", r"\p{Lm}", r"\h+", r"(?=a)a", r"\Aa"],
)  # fmt: skip
def test_patterns_that_may_mean_something_else_are_not_read(pattern: str) -> None:
    assert ascii_pattern(pattern) is None


def test_a_pattern_that_leaves_out_a_part_of_a_text_is_left_to_the_library() -> None:
    assert WordCache.of(backend_of(r"[a-z]+")) is None


def test_other_tokenizers_have_no_cache() -> None:
    assert WordCache.of(byte_fallback_tokenizer()) is None
    assert WordCache.of(backend_of(QWEN2, [AddedToken("<s>", lstrip=True)])) is None
    assert WordCache.of(backend_of(QWEN2, [AddedToken("<s>", single_word=True)])) is None
    mixed: list[str | AddedToken] = [
        AddedToken("<s>", normalized=True),
        AddedToken("</s>", normalized=False),
    ]
    assert WordCache.of(backend_of(QWEN2, mixed)) is None
    prefixed, lower, dropping = (backend_of(QWEN2) for _ in range(3))
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    lower.normalizer = normalizers.Lowercase()
    dropping.model.dropout = 0.1
    assert [WordCache.of(backend) for backend in (prefixed, lower, dropping)] == [None] * 3


def test_a_tokenizer_that_the_sample_tells_apart_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of(QWEN2)
    assert WordCache.of(backend) is not None
    monkeypatch.setattr(word_cache, "ascii_pattern", lambda _: ascii_pattern(GPT2))
    assert WordCache.of(backend) is None


def test_special_tokens_around_a_text_are_the_librarys(tmp_path: Path) -> None:
    backend = backend_of(QWEN2, ["<s>"])
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    for _ in range(2):
        plain = tokenizer.encode("the sea", add_special_tokens=False)
        assert tokenizer.encode("the sea", add_special_tokens=True).ids == [bos, *plain.ids]
        assert plain.ends == [end for _, end in backend.encode("the sea", add_special_tokens=False).offsets]
        assert len(plain) == len(plain.ids)
