"""The byte-level BPE tokenizer: how text is cut before merging, and its training on generated text.

A word is cut the same way wherever it stands: spaces, digits and most punctuation are their own
pieces, so that a copied word costs the same tokens after a space, a quote or a line start.
"""

import random
import re
from itertools import islice

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from corpus import mix, render, words

VOCAB_SIZE = 1024
END, PAD = "<|im_end|>", "<|endoftext|>"
SPECIAL = (PAD, "<|im_start|>", END)
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

_PIECES = r"""\n+|[0-9]|[A-Z]?[a-z]+|[A-Z]|["{}\[\]:,]+(?: ["{\[]+)?|[^A-Za-z0-9\n]"""


def build(seed: int, conversations: int = 12_000) -> Tokenizer:
    """Train the tokenizer on the text of `conversations` generated conversations."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKUP),
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(f"tokenizer {seed}")
    markup = re.compile("|".join(map(re.escape, (*SPECIAL, *MARKUP))))
    texts = (
        part
        for conversation in islice(mix.training(rng), conversations)
        for part in markup.split("".join(text for text, *_ in render.spans(conversation)))
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def feed_pieces(tokenizer: Tokenizer) -> None:
    """Make the generator draw payloads from the tokenizer's letter pieces too."""
    letters = sorted(t for t in tokenizer.get_vocab() if re.fullmatch(r"[A-Za-z][a-z]+", t))
    words.use_pieces(letters)


def encode(tokenizer: Tokenizer, spans: list[render.Span]) -> tuple[list[int], list[float]]:
    """Token ids, and per token the loss weight of predicting it."""
    ids: list[int] = []
    weights: list[float] = []
    encodings = tokenizer.encode_batch_fast([span.text for span in spans], add_special_tokens=False)
    for encoded, span in zip(encodings, spans, strict=True):
        ids += encoded.ids
        weights += [span.weight] * len(encoded.ids)
        if span.first is not None:
            weights[-len(encoded.ids)] = span.first
    return ids, weights
