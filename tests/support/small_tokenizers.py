"""Tokenizers that tests build at run time."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers, trainers

_TEXT = [
    "The sea was calm and the lantern hung by the door.",
    "Once upon a time there was a small red house.",
]


def byte_fallback_tokenizer() -> Tokenizer:
    """Build a tokenizer like Llama 2's: SentencePiece's visible spaces, one of them prepended, and byte fallback."""
    base = Tokenizer(models.BPE())
    base.normalizer = normalizers.Replace(" ", "▁")
    base.train_from_iterator(_TEXT, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    merges, pieces = [], ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += sorted(base.get_vocab(), key=base.get_vocab().__getitem__)
    vocab = {piece: number for number, piece in enumerate(pieces)}
    for left in pieces:
        merges += [(left, right) for right in pieces if len(left + right) > 1 and left + right in vocab]
    merges.sort(key=lambda pair: vocab["".join(pair)])
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer
