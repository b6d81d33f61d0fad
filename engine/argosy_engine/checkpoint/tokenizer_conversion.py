"""python -m argosy_engine.checkpoint.tokenizer_conversion KIND FILE RESULT: write a tokenizer.json for another form of
tokenizer (`tokenizer_files`).

Owns what each form means, as its authors have it: mistral-common reads Mistral's, transformers converts SentencePiece's
and tiktoken's. What was converted is compared with the library of its form on a sample of texts, and refused if it
differs. Must not be imported by the engine: it imports transformers.

Exit codes: 0 it is written; 2 it is refused, and the last line of standard error says why.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

_HAN = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]", r"\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_HAN[0]}]*[{_HAN[1]}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_HAN[0]}]+[{_HAN[1]}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How Kimi K2, Kimi Linear and Moonlight split texts (their tokenization_moonshot.py and tokenization_kimi.py)."""
_PATTERNS: Mapping[str, tuple[str, int]] = {"TikTokenTokenizer": (_KIMI_PATTERN, 256)}
"""By `tokenizer_class`: the pattern, and the number of ids after the vocabulary that are special tokens."""
_SAMPLE = (
    "Hello, world! It's 12345 o'clock, isn't it? WE'LL see: I'd've snake_case camelCase XMLHttpRequest.",
    "def f(x):\n    return {\"a\": [1, 2.5e-3], 'b': None}  # why?\n\n\n\tif x != y:\r\n  pass",
    "Z\u00fcrich caf\u00e9 na\u00efve \u0395\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac "
    "\u0420\u0443\u0441\u0441\u043a\u0438\u0439 \u4f60\u597d\u4e16\u754c\uff0cHi\u4eec "
    "\u3053\u3093\u306b\u3061\u306f \ud55c\uad6d\uc5b4 \U0001f389\U0001f680 e\u0301 \u00bd \u0661\u0662",
    "a",
    " ",
    "  b\n",
    "\n\t c  ",
    "https://example.com/a?b=c&d=%20e#f  two  spaces   three",
    "THE QUICK brown fOX. 1,000,000 and 3.14; 0xDEADBEEF <html> & \\ /",
)
"""Texts on which a conversion has to agree with the library of its form."""


class Refused(Exception):
    """The tokenizer cannot be converted; the message says why."""


def mistral(file: Path) -> dict[str, Any]:
    """Return a tokenizer.json with mistral-common's vocabulary, which decodes and has no merges."""
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
    from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    tokenizer = MistralTokenizer.from_file(file).instruct_tokenizer.tokenizer
    special = {
        id_: tokenizer.id_to_piece(id_) for id_ in range(tokenizer.n_words) if tokenizer.is_special(id_)
    }
    if isinstance(tokenizer, SentencePieceTokenizer):
        special[tokenizer.unk_id] = tokenizer.id_to_piece(tokenizer.unk_id)
        vocab = {tokenizer.id_to_piece(id_): id_ for id_ in range(tokenizer.n_words)}
        decoders: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]
        decoder: dict[str, Any] = {"type": "Sequence", "decoders": decoders}
        unknown: str | None = special[tokenizer.unk_id]
    elif isinstance(tokenizer, Tekkenizer):
        alphabet = byte_alphabet()
        vocab = {
            "".join(alphabet[byte] for byte in tokenizer.id_to_byte_piece(id_)): id_
            for id_ in range(tokenizer.n_words)
            if id_ not in special
        }
        decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        unknown = None
        for id_, text in special.items():
            if vocab.setdefault(text, id_) != id_:
                raise Refused(f"the special token {text!r} is spelled as another token is")
    else:
        raise Refused(f"mistral-common has another kind of tokenizer for it, {type(tokenizer).__name__}")
    if len(vocab) != tokenizer.n_words:
        raise Refused(f"{tokenizer.n_words} tokens have {len(vocab)} different spellings")
    model: dict[str, Any] = {
        "type": "BPE",
        "vocab": vocab,
        "merges": [],
        "unk_token": unknown,
        "byte_fallback": unknown is not None,
    }
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": id_, "content": text, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for id_, text in sorted(special.items())
        ],
        "model": model,
        "decoder": decoder,
    }


def sentencepiece(file: Path) -> dict[str, Any]:
    """Convert a SentencePiece model by transformers, as its tokenizer class and config ask."""
    from sentencepiece import SentencePieceProcessor

    try:
        processor = SentencePieceProcessor(model_file=str(file))
    except Exception as error:
        raise Refused(f"it is no SentencePiece model ({error})") from None
    from transformers import AutoTokenizer  # which takes longer than to refuse what is none
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    _check_no_code(file.parent)
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, mistral_format=False, **options)
    if not isinstance(tokenizer, TokenizersBackend):
        raise Refused(f"transformers has no fast tokenizer for it ({type(tokenizer).__name__})")
    converted = tokenizer.backend_tokenizer

    def differs() -> str:
        return _difference(converted, lambda text: list(processor.encode(text)), "SentencePiece")

    if differs():
        # Classes of transformers, LlamaTokenizer's among them, rank merges by id; this one ranks them by score.
        special = converted.post_processor
        converted = TokenizersBackend.from_pretrained(file.parent, **options).backend_tokenizer
        converted.post_processor = special
    if told := differs():
        raise Refused(told)
    return dict(json.loads(converted.to_str()))


def tiktoken(file: Path) -> dict[str, Any]:
    """Convert ranks of tiktoken by transformers, with the pattern and special tokens of the tokenizer class."""
    from tiktoken import Encoding
    from tiktoken.load import load_tiktoken_bpe

    config = _tokenizer_config(file.parent)
    name = str(config.get("tokenizer_class"))
    if name not in _PATTERNS:
        raise Refused(
            f"how its tokenizer class {name[:100]!r} splits texts is in the checkpoint's code, which does not run "
            f"here (known: {', '.join(_PATTERNS)})"
        )
    pattern, num_special = _PATTERNS[name]
    ranks = load_tiktoken_bpe(str(file))
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise Refused("its ranks are not 0, 1, 2 and so on")
    named = {
        int(id_): token if isinstance(token, dict) else {"content": str(token)}
        for id_, token in (config.get("added_tokens_decoder") or {}).items()
    }
    ids = range(len(ranks), len(ranks) + num_special)
    if strange := sorted(named.keys() - set(ids)):
        raise Refused(f"its added tokens {strange[:5]} are not among the {num_special} after the vocabulary")
    special = {
        id_: str(named[id_]["content"]) if id_ in named else f"<|reserved_token_{id_}|>" for id_ in ids
    }
    from transformers.convert_slow_tokenizer import TikTokenConverter

    converted = TikTokenConverter(str(file), pattern, extra_special_tokens=list(special.values())).converted()
    encoding = Encoding("converted", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    if told := _difference(converted, encoding.encode, "tiktoken"):
        raise Refused(told)
    made: dict[str, Any] = json.loads(converted.to_str())
    for token in made["added_tokens"]:
        if special.get(token["id"]) != token["content"]:
            raise Refused(f"its special token {token['content']!r} is a token of the vocabulary as well")
        token["special"] = bool(named.get(token["id"], {}).get("special", True))
    return made


def byte_alphabet() -> list[str]:
    """Return GPT-2's printable character for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    chars = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [chars[byte] for byte in range(256)]


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_bytes()) if file.is_file() else {}
    return config if isinstance(config, dict) else {}


def _check_no_code(folder: Path) -> None:
    """Refuse a tokenizer class that only the checkpoint's own code has."""
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    config = _tokenizer_config(folder)
    name = config.get("tokenizer_class")
    if "auto_map" in config and (not isinstance(name, str) or tokenizer_class_from_name(name) is None):
        raise Refused(
            f"its tokenizer class {str(name)[:100]!r} is the checkpoint's own code, which does not run here"
        )


def _difference(converted: Tokenizer, encode: Callable[[str], Sequence[int]], library: str) -> str:
    """Return on which text of the sample a conversion differs from the library; empty if on none."""
    for text in _SAMPLE:
        if converted.encode(text, add_special_tokens=False).ids != list(encode(text)):
            return f"what transformers makes of it has other tokens than {library} for {text[:40]!r}"
    return ""


def main(argv: Sequence[str]) -> int:
    kind, file, result = argv
    convert = {"mistral": mistral, "sentencepiece": sentencepiece, "tiktoken": tiktoken}[kind]
    try:
        made = json.dumps(convert(Path(file)), ensure_ascii=False)
        Tokenizer.from_str(made)
    except Exception as error:  # the libraries raise anything on malformed files
        print(" ".join(str(error).split()) or type(error).__name__, file=sys.stderr)
        return 2
    Path(result).write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    # transformers would import it, which takes two seconds, and no tokenizer needs it.
    sys.modules["torch"] = None  # type: ignore[assignment]
    sys.exit(main(sys.argv[1:]))
