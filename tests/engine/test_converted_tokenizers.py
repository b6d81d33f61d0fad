"""Checkpoints with vocabularies of SentencePiece or tiktoken and no tokenizer.json: held to the libraries of both."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tiktoken import Encoding
from tiktoken.load import load_tiktoken_bpe

from argosy_engine.checkpoint.model_folder import check_folder
from argosy_engine.checkpoint.tokenizer_files import find_tokenizer, prepare_tokenizer
from argosy_engine.errors import ConfigError
from argosy_engine.frontend.detokenizer import IncrementalDetokenizer
from argosy_engine.frontend.renderer import open_tokenizer
from argosy_engine.frontend.tokenizer import Tokenizer
from argosy_engine.params import SamplingParams
from argosy_engine.structured.xgrammar_backend import Vocabulary

CORPUS = [
    "The sea was calm, and the lantern hung by the door.\u2581",
    "def f(x):    return x + 1  # why?",
    "\u4f60\u597d\u4e16\u754c \u0420\u0443\u0441\u0441\u043a\u0438\u0439 caf\u00e9 1,234 I've",
] * 20
PARTS = [
    "the",
    "lantern",
    " ",
    "  ",
    "\n",
    "\t",
    "    return",
    "x",
    "1",
    "23",
    "'ll",
    "HTTP",
    "\u4f60",
    "\u597d",
    "\u00e9",
    "\U0001f389",
]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=24).map("".join)
KIMI = "TikTokenTokenizer"
WORDS = [bytes([byte]) for byte in range(256)]
WORDS += [
    b"th",
    b"he",
    b"the",
    b" t",
    b" the",
    b"  ",
    b"an",
    b"lan",
    b"re",
    b"\xe4\xbd",
    "\u4f60".encode(),
    b"\n\n",
]
WORDS += ["\u4f60\u597d".encode(), b"'l", b"'ll", b"12"]


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def write_sentencepiece(folder: Path, kind: str, config: dict[str, Any] | None, **options: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    options = {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"} | options
    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(folder / "trained"),
        vocab_size=340,
        model_type=kind,
        byte_fallback=True,
        character_coverage=0.98,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        control_symbols=["<|turn|>"],
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    (folder / "trained.model").rename(folder / "tokenizer.model")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_tiktoken(folder: Path, name: str = "tiktoken.model", tokenizer_class: str = KIMI) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [b"%s %d" % (base64.b64encode(word), rank) for rank, word in enumerate(WORDS)]
    (folder / name).write_bytes(b"\n".join(lines) + b"\n")
    added = {
        len(WORDS): {"content": "[BOS]", "special": True},
        len(WORDS) + 2: {"content": "<|im_end|>", "special": True},
        len(WORDS) + 5: {"content": "<|tool_call_begin|>", "special": False},
    }
    config = {
        "tokenizer_class": tokenizer_class,
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": added,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


SENTENCEPIECE = {
    "llama": ("bpe", {"tokenizer_class": "LlamaTokenizer", "legacy": True, "add_bos_token": True}),
    "no-config": ("bpe", None),
    "unigram": ("unigram", {"tokenizer_class": "PreTrainedTokenizerFast"}),
}


@pytest.fixture(scope="module")
def sentencepieces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Any]]:
    """Converted tokenizers, each with the library's own."""
    made = {}
    for name, (kind, config) in SENTENCEPIECE.items():
        folder = write_sentencepiece(tmp_path_factory.mktemp("models") / name, kind, config)
        processor = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        made[name] = open_tokenizer(prepare_tokenizer(folder)), processor
    return made


@pytest.mark.parametrize("name", SENTENCEPIECE)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_sentencepieces_tokens_and_text(
    sentencepieces: dict[str, tuple[Tokenizer, Any]], name: str, text: str
) -> None:
    tokenizer, processor = sentencepieces[name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == processor.encode(text)
    assert tokenizer.decode(ids) == processor.decode(ids) == text
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(), [1])
    assert (
        "".join(detokenizer.update([id_], number + 1 == len(ids)) for number, id_ in enumerate(ids)) == text
    )


def test_sentencepieces_special_tokens(sentencepieces: dict[str, tuple[Tokenizer, Any]]) -> None:
    tokenizer, processor = sentencepieces["llama"]
    assert tokenizer.control_tokens["<|turn|>"] == processor.piece_to_id("<|turn|>")
    whole = tokenizer.encode("the<|turn|>", add_special_tokens=True).ids
    assert whole == [1, *processor.encode("the"), processor.piece_to_id("<|turn|>")]
    assert {1, 2, processor.piece_to_id("<|turn|>")} <= tokenizer.special_ids


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiktoken(tmp_path_factory.mktemp("kimi"))


def encoding_of(folder: Path) -> Encoding:
    """The same by tiktoken, with the pattern that Kimi's models publish."""
    word = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]", r"\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
    ending = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    pattern = (
        rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?[{word[0]}]*[{word[1]}]+{ending}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?[{word[0]}]+[{word[1]}]*{ending}"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    ranks = load_tiktoken_bpe(str(folder / "tiktoken.model"))
    return Encoding("kimi", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_tiktokens_tokens_and_text(kimi: Path, text: str) -> None:
    tokenizer = open_tokenizer(prepare_tokenizer(kimi))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == encoding_of(kimi).encode(text)
    assert tokenizer.decode(ids) == text
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(), ())
    assert (
        "".join(detokenizer.update([id_], number + 1 == len(ids)) for number, id_ in enumerate(ids)) == text
    )


def test_tiktokens_special_tokens_and_vocabulary(kimi: Path) -> None:
    prepared = prepare_tokenizer(kimi)
    tokenizer, base = open_tokenizer(prepared), len(WORDS)
    assert tokenizer.vocab_size == base + 256
    assert tokenizer.encode("the<|im_end|>", add_special_tokens=True).ids[-1] == base + 2
    assert tokenizer.token_strs([base + 1, base + 255]) == [
        f"<|reserved_token_{base + i}|>" for i in (1, 255)
    ]
    assert base + 2 in tokenizer.special_ids
    assert base + 5 not in tokenizer.special_ids
    decoded = Vocabulary(prepared.folder, base + 256, [base + 2]).tokenizer_info().decoded_vocab
    assert decoded[:base] == WORDS
    assert decoded[base + 5] == b"<|tool_call_begin|>"


def test_a_conversion_is_made_once_and_again_when_a_file_changes(tmp_path: Path) -> None:
    folder = write_tiktoken(tmp_path / "kimi")
    first = prepare_tokenizer(folder).folder
    inode = (first / "tokenizer.json").stat().st_ino
    assert prepare_tokenizer(folder).folder == first
    assert (first / "tokenizer.json").stat().st_ino == inode
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"][str(len(WORDS))]["content"] = "[START]"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    again = prepare_tokenizer(folder).folder
    assert again != first
    assert open_tokenizer(prepare_tokenizer(folder)).control_tokens["[START]"] == len(WORDS)
    assert not list(again.parent.glob(".converting-*"))


def own_code(folder: Path) -> None:
    config = {
        "tokenizer_class": "InternLM2Tokenizer",
        "auto_map": {"AutoTokenizer": ["t.InternLM2Tokenizer", None]},
    }
    write_sentencepiece(folder, "bpe", config)


def unknown_pattern(folder: Path) -> None:
    write_tiktoken(folder, "qwen.tiktoken", "QWenTokenizer")


def damaged(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(b"not a model")


def missing_rank(folder: Path) -> None:
    write_tiktoken(folder)
    lines = (folder / "tiktoken.model").read_bytes().splitlines()
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines[:-2] + lines[-1:]))


def added_elsewhere(folder: Path) -> None:
    write_tiktoken(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"]["7"] = {"content": "<|seven|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def spelled_twice(folder: Path) -> None:
    write_tiktoken(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"][str(len(WORDS))]["content"] = "the"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("write", "told"),
    [
        (own_code, "InternLM2Tokenizer' is the checkpoint's own code"),
        (unknown_pattern, "QWenTokenizer' splits texts is in the checkpoint's code"),
        (damaged, "no SentencePiece model"),
        (missing_rank, "ranks are not 0, 1, 2"),
        (added_elsewhere, r"added tokens \[7\] are not among the 256"),
        (spelled_twice, "special token"),
    ],
)
def test_what_can_not_be_converted_is_refused_with_the_remedy(
    tmp_path: Path, write: Callable[[Path], object], told: str
) -> None:
    write(tmp_path)
    with pytest.raises(ConfigError, match=f"cannot be read by transformers: .*{told}.*--tokenizer PATH"):
        prepare_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="--tokenizer PATH"):
        check_folder(tmp_path, has_weights=False)


def test_code_of_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    own_code(tmp_path)
    ran = tmp_path / "ran"
    (tmp_path / "t.py").write_text(f"open({str(ran)!r}, 'w')\nclass InternLM2Tokenizer: pass\n")
    with pytest.raises(ConfigError, match="own code"):
        prepare_tokenizer(tmp_path)
    assert not ran.exists()


def test_a_file_that_is_no_tokenizers_size_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.model").open("wb") as file:
        file.truncate((256 << 20) + 1)
    with pytest.raises(ConfigError, match=r"tokenizer\.model has \d+ bytes, more than"):
        prepare_tokenizer(tmp_path)


def test_the_files_are_chosen_in_order(tmp_path: Path) -> None:
    write_tiktoken(write_sentencepiece(tmp_path, "bpe", None))
    assert str(find_tokenizer(tmp_path)) == "tiktoken.model, converted by transformers"
    (tmp_path / "tiktoken.model").unlink()
    assert str(find_tokenizer(tmp_path)) == "tokenizer.model, converted by transformers"
    (tmp_path / "tokenizer.model").unlink()
    with pytest.raises(
        ConfigError, match=r"has no tokenizer\.json; write one with transformers.*--tokenizer PATH"
    ):
        find_tokenizer(tmp_path)
