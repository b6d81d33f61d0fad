"""Prompts: what the renderer does to a prompt besides applying a template and tokenising it.

- The types of prompts for offline use, as in vLLM.
- Truncation: `truncate_prompt_tokens` and `truncation_side`, with vLLM's meaning.
- Fill in the middle: prompts for a text between a prefix (`prompt`) and a `suffix`, for models that were trained so.
- Control tokens: `ControlTokens` keeps the text of a chat from becoming some (CVE-2026-44222).
- Images: `with_images` puts the tokens of each image in place of its placeholder.
- The chunk map: where the router's chunks end in the engine's tokens, as token counts. The router splits a request's
  values (`argosy_protocol.chunk_hash`) into chunks; the engine tokenises the rendered text. The values are found
  in order in the text; a chunk's end becomes a character offset, and that the number of tokens which end at or before
  it. What a template dropped or moved maps to the last place found. A count that is too low misses a hint, one that is
  too high is a wrong hint, so all counts are rounded down.
"""

from __future__ import annotations

import operator
import re
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypedDict

from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.admission import stop_if_abandoned
from argosy_engine.messages import ChunkEnd, MultimodalFeature
from argosy_protocol.chunk_hash import Segment, SegmentKind, chunk_ends, chunk_hashes
from argosy_protocol.openai import ChatCompletionRequest, GenerationRequest

if TYPE_CHECKING:
    from argosy_engine.frontend.media.processor import ChatImages
    from argosy_engine.frontend.tokenizer import Encoded


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]


PromptType: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt
"""Token ids: any sequence of integers, such as a list, a tuple or a numpy array."""

_FORMS = "a prompt is a text, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids'"


def as_list(prompts: Any) -> list[Any]:
    """Return one prompt, or several, as a list, without checking the types."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    try:
        prompts = list(prompts)
    except TypeError:
        raise InvalidRequest(f"{_FORMS}, not {type(prompts).__name__}", param="prompt") from None
    return [prompts] if prompts and isinstance(prompts[0], Integral) else prompts


def text_of(prompt: PromptType) -> str | None:
    """Return the text of a valid prompt; None if it has token ids only."""
    text: Any = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def text_or_token_ids(prompt: PromptType) -> str | list[int]:
    """Return a prompt's text or token ids, whichever type it has.

    Raises:
        InvalidRequest: it has none of these types.
    """
    given: Any = prompt
    if isinstance(prompt, Mapping):
        keys = set(prompt)
        if not keys or not keys <= {"prompt", "prompt_token_ids"}:
            raise InvalidRequest(
                f"{_FORMS}; this one has {', '.join(sorted(map(repr, keys)))}", param="prompt"
            )
        given = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if isinstance(given, str):
        return given
    try:
        if any(isinstance(token_id, bool) for token_id in given):
            raise TypeError
        return [operator.index(token_id) for token_id in given]
    except TypeError:
        raise InvalidRequest(_FORMS, param="prompt") from None


class Truncation(NamedTuple):
    """How a prompt that is too long is shortened."""

    num_tokens: int
    keeps_start: bool
    """Whether the first tokens stay, and not the last ones."""
    keeps_special: bool = False
    """Whether tokens that the tokenizer adds to a text, such as the one that begins it, stay and count."""

    def trimmed(self, text: str, max_characters: int) -> str:
        """Return the part of a text that can have the tokens that stay, so that no more is tokenised.

        Args:
            max_characters: those of the longest prompt.
        """
        return text[:max_characters] if self.keeps_start else text[max(len(text) - max_characters, 0) :]

    def kept(self, token_ids: list[int], num_added: tuple[int, int] = (0, 0)) -> list[int]:
        """Return the tokens that stay.

        Args:
            num_added: tokens at the start and at the end that the tokenizer has added to the text.
        """
        first, last = num_added if self.keeps_special else (0, 0)
        room = self.num_tokens - first - last
        if first + last and room >= 0:
            return token_ids[:first] + token_ids[len(token_ids) - last - room :]
        if self.keeps_start:
            return token_ids[: self.num_tokens]
        return token_ids[max(len(token_ids) - self.num_tokens, 0) :]


def truncation_of(
    request: GenerationRequest, max_model_len: int, *, least_output: int = 1
) -> Truncation | None:
    """Return the truncation that a request asks for, or None. The output has the room that `max_tokens` asks for, and
    at least `least_output` tokens.

    Raises:
        InvalidRequest: prompt and output would exceed the model's context.
    """
    asked = request.truncate_prompt_tokens
    if asked is None:
        return None
    if isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None:
        num_outputs = request.max_completion_tokens
    else:
        num_outputs = request.max_tokens or 0
    room = max_model_len - max(num_outputs, least_output)
    if room < 1:
        raise InvalidRequest(
            f"max_tokens ({num_outputs}) leaves no room for a prompt in this model's context of {max_model_len} tokens",
            param="max_tokens",
        )
    if asked > max_model_len - num_outputs:
        less = " less max_tokens" if num_outputs else ""
        raise InvalidRequest(
            f"truncate_prompt_tokens must be at most {max_model_len - num_outputs}, this model's context length{less}; "
            f"it is {asked}",
            param="truncate_prompt_tokens",
        )
    side = request.truncation_side
    return Truncation(
        room if asked < 0 else min(asked, room), keeps_start=side == "right", keeps_special=side is None
    )


class FillInMiddle(NamedTuple):
    """A form of prompts: `start`, the prefix, `hole`, the suffix, `end`; the model writes the middle after it."""

    start: str
    hole: str
    end: str

    def prompt(self, prefix: str, suffix: str) -> str:
        return f"{self.start}{prefix}{self.hole}{suffix}{self.end}"


_FILL_IN_FORMS = (
    FillInMiddle("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen 2.5 Coder, Qwen 3, CodeGemma
    FillInMiddle("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    FillInMiddle("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder, DeepSeek V3
)


def fill_in_middle(tokens: Container[str]) -> FillInMiddle | None:
    """Return the form whose tokens a tokenizer has; None if the model cannot fill in.

    Args:
        tokens: texts of the added tokens.
    """
    return next((form for form in _FILL_IN_FORMS if all(token in tokens for token in form)), None)


_PRIVATE = 0x10F000
"""First of the private characters that replace others while a template renders."""
_SLICE_CHARS = 1 << 16
"""Characters searched at a time, for which the search holds the GIL about a millisecond."""
_NAME = re.compile(r"[A-Za-z0-9_-]*")


class ControlTokens:
    """Keeps text of a chat from becoming control tokens of the chat template.

    A tokenizer turns `<|im_end|>` into a control token wherever it occurs in the rendered prompt, so a user could end a
    message and begin a system message. This is prevented in three steps:

    - Replace: before rendering, one character of each marker in a value, or of a part that could form one together with
      the template's text, is replaced by a private character.
    - Render: the template copies the private characters.
    - Split and restore: the text is split inside each such marker and the characters are restored. The tokenizer gets
      the parts one by one, so it never sees the marker.

    Chats without such text, which is nearly all of them, are rendered and tokenised directly.

    Control tokens are the tokens that the tokenizer calls special, and others of the form `<|...|>`. Markers that
    models write as text, like `<think>` or `<tool_call>`, are not changed. A value that is a plain name (letters,
    digits, `_`, `-`) is trusted, because templates expect roles between `<|` and `|>`.

    Args:
        markers: texts of the control tokens, each of at least two characters.
    """

    def __init__(self, markers: Iterable[str]) -> None:
        markers = frozenset(markers)
        self._longest = max(map(len, markers), default=0)
        self._marker = re.compile(_overlapping(markers)) if markers else None
        self._heads = {marker[:size] for marker in markers for size in range(1, len(marker))}
        self._tails = {marker[-size:] for marker in markers for size in range(1, len(marker))}
        self._markers = markers
        self._all = "\0".join(markers)
        characters = sorted({char for marker in markers for char in marker})
        self._private = {char: chr(_PRIVATE + number) for number, char in enumerate(characters)}
        self._public = {private: char for char, private in self._private.items()}
        self._any_private = re.compile("[" + "".join(self._private.values()) + "]") if markers else None
        telling = {char for char in characters if not _NAME.fullmatch(char)}
        telling |= {marker for marker in markers if _NAME.fullmatch(marker)}
        # A backslash may begin an escape in a tool call's JSON.
        self._telling = [text.encode() for text in (*telling, "\\")] if markers else []

    def concern(self, segments: Sequence[Segment]) -> bool:
        """Whether these values may contain a part of a marker. Fast, with false positives."""
        data = b"\0".join([data for _, data in segments])
        return any(text in data for text in self._telling)

    def hide(self, value: Any) -> Any:
        """Copy a JSON value such that no string contains or completes a marker."""
        if isinstance(value, str):
            return self._hide_in(value)
        if isinstance(value, dict):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.hide(item) for item in value]
        return value

    def reveal(self, rendered: str) -> tuple[str, list[int]]:
        """Restore the rendered text; return it with the offsets at which it must be split."""
        if self._any_private is None:
            return rendered, []
        hidden = [
            match.start()
            for begin in _slices(rendered)
            for match in self._any_private.finditer(rendered, begin, begin + _SLICE_CHARS)
        ]
        text = _with(rendered, hidden, self._public)
        cuts = []
        for start, end in self._find(text) if hidden else ():
            index = bisect_left(hidden, start)
            if index < len(hidden) and hidden[index] < end:
                cuts.append(max(hidden[index], start + 1))
        return text, sorted(set(cuts))

    def _find(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield start and end of the longest marker at each position, including overlapping ones."""
        if self._marker is None:
            return
        for begin in _slices(text):
            limit = begin + _SLICE_CHARS
            for match in self._marker.finditer(text, begin, limit + self._longest):
                if match.start() >= limit:
                    break
                assert match.lastindex is not None
                yield match.start(), match.end(match.lastindex)

    def _is_within(self, text: str) -> bool:
        """Whether a marker contains the text. All of them together may, too, if it has the character between them."""
        return text in self._all and any(text in marker for marker in self._markers)

    def _hide_in(self, text: str) -> str:
        if not text or (_NAME.fullmatch(text) and text not in self._all):
            return text
        positions = {start for start, _ in self._find(text)}
        for size in range(1, min(self._longest, len(text) + 1)):
            if text[-size:] in self._heads:
                positions.add(len(text) - size)
            if text[:size] in self._tails:
                positions.add(size - 1)
        if (
            len(text) < self._longest
            and self._is_within(text)
            and (odd := re.search(r"[^A-Za-z0-9_-]", text))
        ):
            positions.add(odd.start())
        return _with(text, sorted(positions), self._private)


def _overlapping(markers: Iterable[str]) -> str:
    """Make a pattern that matches the first character of each marker, including overlapping ones.

    Its group ends at the end of the longest marker from there. The pattern is a trie, so text with which no marker
    begins fails at once, however many markers there are.
    """
    by_first: dict[str, list[str]] = {}
    for marker in sorted(markers):
        by_first.setdefault(marker[0], []).append(marker[1:])
    return "|".join(f"{re.escape(first)}(?=({_longest_of(rest)}))" for first, rest in by_first.items())


def _longest_of(texts: Sequence[str]) -> str:
    """Make a pattern for the longest of these texts that matches."""
    by_first: dict[str, list[str]] = {}
    for text in texts:
        if text:
            by_first.setdefault(text[0], []).append(text)
    branches = []
    for group in by_first.values():
        size = _shared_prefix(min(group), max(group))  # and of all between them
        branches.append(re.escape(group[0][:size]) + _longest_of([text[size:] for text in group]))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if "" in texts else "")


def _slices(text: str) -> Iterator[int]:
    """Yield the starts of the slices of a text that are searched at a time."""
    for begin in range(0, len(text), _SLICE_CHARS):
        stop_if_abandoned()
        yield begin


def _shared_prefix(one: str, other: str) -> int:
    """Return the length of the prefix that two strings share."""
    for size, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return size
    return min(len(one), len(other))


def _with(text: str, positions: Sequence[int], others: Mapping[str, str]) -> str:
    """Replace the characters at ascending positions."""
    if not positions:
        return text
    pieces: list[str] = []
    done = 0
    for position in positions:
        pieces += (text[done:position], others[text[position]])
        done = position + 1
    return "".join((*pieces, text[done:]))


_SHORT_CHARS = 32
_SHORT_WINDOW_CHARS = 256
"""Maximum distance at which a short value (a role, "yes") counts as found, because it may occur by chance in other
text."""

_LITERAL = {
    SegmentKind.TEXT,
    SegmentKind.ROLE,
    SegmentKind.NAME,
    SegmentKind.REASONING,
    SegmentKind.TOOL_CALL_ID,
}
"""Kinds of segments whose bytes are text that templates copy unchanged."""


class EncodedImages(NamedTuple):
    """Tokens of a text with images (`tokenizer.Encoded`)."""

    ids: list[int]
    ends: list[int]
    """Each token's end in characters of the text; those of an image have the end of its placeholder."""
    features: list[MultimodalFeature]
    digest_ends: list[int | None]
    """Of each part of the chat that is no text, its placeholder's end in the text; None if it is no image."""

    def __len__(self) -> int:
        return len(self.ids)


def with_images(encoded: Encoded, request: ChatCompletionRequest, images: ChatImages) -> EncodedImages:
    """Replace the placeholders in a chat's tokens by the tokens of its images, which are in the same order.

    Raises:
        InvalidRequest: there are more or fewer placeholders than images.
    """
    given = [
        images.of(part)
        for message in request.messages
        if isinstance(message.content, list)
        for part in message.content
        if part.get("type") != "text" or not isinstance(part.get("text"), str)
    ]
    shown = [image for image in given if image is not None]
    token_ids, token_ends, placeholder_id = encoded.ids, encoded.ends, images.info.placeholder_id
    places = [index for index, token_id in enumerate(token_ids) if token_id == placeholder_id]
    if len(places) != len(shown):
        raise InvalidRequest(
            f"the chat template renders {len(places)} of the {len(shown)} images of these messages; leave out those of "
            "earlier messages",
            param="messages",
        )
    ids: list[int] = []
    ends: list[int] = []
    features = []
    done = 0
    for place, image in zip(places, shown, strict=True):
        ids += token_ids[done:place]
        ends += token_ends[done:place]
        features.append(image.feature(len(ids)))
        ids += image.token_ids
        ends += [token_ends[place]] * len(image.token_ids)
        done = place + 1
    left = iter(token_ends[place] for place in places)
    digest_ends = [None if image is None else next(left) for image in given]
    return EncodedImages(ids + token_ids[done:], ends + token_ends[done:], features, digest_ends)


def map_chunks(
    segments: Sequence[Segment],
    seed: int,
    text: str,
    token_ends: Sequence[int],
    digest_ends: Sequence[int | None] = (),
) -> list[ChunkEnd]:
    """Compute the chunk ends of a prompt that was rendered to `text`, from its tokens' ends in characters.

    Args:
        digest_ends: of parts that are no text, where in the text they end, as far as they are in it
            (`EncodedImages`).
    """
    hashes = chunk_hashes(segments, seed)
    spans = _locate(segments, text, digest_ends)
    ends = []
    for chunk_hash, (index, byte_end) in zip(hashes, chunk_ends(segments), strict=True):
        start, value, is_found = spans[index]
        offset = start + (_char_count(value, byte_end) if is_found else 0)
        ends.append(ChunkEnd(chunk_hash, bisect_right(token_ends, offset)))
    return ends


def map_token_chunks(segments: Sequence[Segment], seed: int) -> list[ChunkEnd]:
    """Compute the chunk ends of a prompt given as token ids, of four bytes each."""
    hashes = chunk_hashes(segments, seed)
    return [
        ChunkEnd(chunk_hash, byte_end // 4)
        for chunk_hash, (_, byte_end) in zip(hashes, chunk_ends(segments), strict=True)
    ]


def _locate(
    segments: Sequence[Segment], text: str, digest_ends: Sequence[int | None]
) -> list[tuple[int, bytes, bool]]:
    """Return for each segment the offset of its text (or the last place found), its bytes, and whether it was found."""
    position = 0
    spans = []
    places = iter(digest_ends)
    for kind, data in segments:
        if kind is SegmentKind.DIGEST and (place := next(places, None)) is not None:
            position = max(position, place)
        start = -1
        value = data
        if kind in _LITERAL and data:
            content = data.decode("utf-8", "replace")
            start = _find(text, content, position)
            if start < 0 and (stripped := content.strip()) and stripped != content:
                start = _find(text, stripped, position)
                value = stripped.encode("utf-8", "surrogatepass")
                content = stripped
        if start < 0:
            spans.append((position, data, False))
        else:
            spans.append((start, value, True))
            position = start + len(content)
    return spans


def _find(text: str, value: str, position: int) -> int:
    if len(value) < _SHORT_CHARS:
        return text.find(value, position, position + _SHORT_WINDOW_CHARS + len(value))
    return text.find(value, position)


def _char_count(value: bytes, byte_end: int) -> int:
    """Count the complete characters in the first `byte_end` bytes."""
    head = value[:byte_end]
    return len(head) if head.isascii() else len(head.decode("utf-8", "ignore"))
