"""Renderer: turns messages, texts or token ids of a request into the tokens of its prompts.

It needs no core and changes no state, so it may run in any thread. A prompt that cannot fit into the model's context is
rejected before it is tokenised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from argosy_engine.checkpoint.tokenizer_files import PreparedTokenizer
from argosy_engine.errors import ConfigError, InvalidRequest, PromptTooLong
from argosy_engine.frontend.admission import stop_if_abandoned
from argosy_engine.frontend.chat_template import ChatTemplate
from argosy_engine.frontend.prompts import (
    ControlTokens,
    EncodedImages,
    PromptType,
    Truncation,
    fill_in_middle,
    map_chunks,
    map_token_chunks,
    text_or_token_ids,
    truncation_of,
    with_images,
)
from argosy_engine.frontend.tokenizer import Encoded, Tokenizer
from argosy_engine.messages import ChunkEnd, MultimodalFeature
from argosy_engine.model_configs.model_config import read_json
from argosy_engine.params import ThinkingMarks
from argosy_engine.parsers.chat_parser import ChatParser
from argosy_engine.parsers.harmony_parser import HarmonyParser, OpenAIToolParser
from argosy_engine.parsers.parser_registry import choose_parsers, load_tool_parser_plugin
from argosy_engine.parsers.tool_parsers.abstract_tool_parser import ToolParser
from argosy_engine.resolved_config import ParserConfig, ResolvedConfig, TokenizerConfig
from argosy_engine.structured.grammar_state import Reasoning, last_index, reasoning_after, reasoning_in
from argosy_protocol.chunk_hash import Segment, SegmentKind, chain_seed, prompt_segments
from argosy_protocol.openai import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerationRequest,
)

if TYPE_CHECKING:
    from argosy_engine.frontend.media.processor import ChatImages
    from argosy_engine.frontend.media.worker import ProcessorInfo
    from argosy_engine.frontend.mistral_tokenizer import MistralTokenizer

logger = logging.getLogger("argosy.frontend")

MIN_INPUT_BYTES = 1 << 20
"""Every chat may have so many bytes, however short the model's context, because templates drop earlier reasoning and
may drop documents. All of it is searched for control tokens."""


_CHOSEN_PARSERS = ParserConfig()
_OWN_TOKENIZER = TokenizerConfig()
_KEPT_TEMPLATES = 16
"""Compiled templates of requests that are kept; clients that bring one bring it with every request."""


class TokenizedPrompt(NamedTuple):
    """A tokenised prompt."""

    token_ids: list[int]
    chunk_ends: list[ChunkEnd]
    """For each chunk that the router hashes, the number of the prompt's tokens up to its end."""
    reasoning: Reasoning | None = None
    """Markers around the model's reasoning, if it may reason before it answers."""
    is_truncated: bool = False
    """Whether it lacks tokens, as the request asked for."""
    thinking_marks: ThinkingMarks | None = None
    """Set if the request bounds the tokens of its reasoning."""
    text: str | None = None
    """The rendered chat, if the request asked for it."""
    second_text: int | None = None
    """Index of the first token of a pair's second text, if the tokenizer tells the two apart by types."""
    mm_features: Sequence[MultimodalFeature] = ()
    """Its images, in the order of their positions."""


class Renderer:
    """
    Args:
        least_output: tokens for which a prompt leaves room; 0 for a model that does not generate.

    Raises (from the constructor):
        ConfigError: the model directory has no readable tokenizer, or a chat template that cannot be compiled.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        parsers: ParserConfig = _CHOSEN_PARSERS,
        tokenizer: TokenizerConfig = _OWN_TOKENIZER,
        *,
        least_output: int = 1,
    ) -> None:
        path = Path(config.model_path)
        self.config = config
        self._least_output = least_output
        self._template_path = Path(tokenizer.path or path)
        file = tokenizer.mistral_file
        prepared = PreparedTokenizer(
            Path(tokenizer.folder or self._template_path), None if file is None else Path(file)
        )
        self._mistral = None if file is None else open_mistral_tokenizer(prepared)
        """The tokenizer, if it writes the chats."""
        self.tokenizer = self._mistral or Tokenizer(prepared.folder)
        self.template = (
            None
            if self._mistral is not None
            else ChatTemplate.load(self._template_path, config.request_defaults)
        )
        self._unsalted_seed = chain_seed(config.model_name)
        self._template_of_request = lru_cache(_KEPT_TEMPLATES)(self._compiled)
        self._control_tokens = ControlTokens(self.tokenizer.control_tokens)
        self._images: ProcessorInfo | None = None
        self._fill_in_middle = fill_in_middle(self.tokenizer.added_tokens)
        if parsers.tool_parser_plugin is not None:
            names = load_tool_parser_plugin(parsers.tool_parser_plugin)
            logger.info("%s registers the tool parsers %s", parsers.tool_parser_plugin, ", ".join(names))
        config_file = path / "config.json"
        family = None if self._mistral is None else "mistral"
        self.parsers = choose_parsers(
            None if self.template is None else self.template.source,
            read_json(config_file) if config_file.is_file() else {},
            tool_call_parser=parsers.tool_call_parser or family,
            reasoning_parser=parsers.reasoning_parser or family,
        )
        self._names_reasoning = parsers.reasoning_parser is not None
        if self.template is not None or self._mistral is not None:
            logger.info("parsers: %s", self.parsers.described(has_thinking=self.has_thinking))
        thoughts = self.parsers.reasoning_parser
        self._thought_marks = thoughts.start, thoughts.end
        self._thought_ids = [self._mark_ids(marker) for marker in self._thought_marks]
        before_calls = thoughts.end_before_calls
        self._end_before_calls = (
            tuple(self.tokenizer.encode(before_calls, add_special_tokens=False).ids) if before_calls else ()
        )
        self.message_end_ids = frozenset(
            self.tokenizer.control_tokens[mark]
            for mark in thoughts.message_ends
            if mark in self.tokenizer.control_tokens
        )
        """Tokens that end a message of reasoning, if the model may write several."""
        special = {
            text: id_
            for text, id_ in self.tokenizer.control_tokens.items()
            if id_ in self.tokenizer.special_ids
        }
        self._call_token_ids = {
            special[mark] for mark in self.parsers.tool_parser.markers() if mark in special
        }
        self._thought_token_ids = {
            special[mark] for mark in (*self._thought_marks, *thoughts.tokens) if mark in special
        }

    def _mark_ids(self, mark: str) -> list[int]:
        """Return the tokens of a mark of reasoning."""
        if self._mistral is not None and mark in self.tokenizer.control_tokens:
            return [self.tokenizer.control_tokens[mark]]  # which no text becomes
        return self.tokenizer.encode(mark, add_special_tokens=False).ids

    @property
    def has_thinking(self) -> bool:
        """Whether the chat template supports reasoning, or the user has named a reasoning parser."""
        if self._mistral is not None:
            return (
                self._names_reasoning or self.parsers.reasoning_parser.start in self.tokenizer.control_tokens
            )
        return self.template is not None and (self.template.has_thinking or self._names_reasoning)

    @property
    def bounds_thinking(self) -> bool:
        """Whether `thinking_token_budget` can end the reasoning: its marks have to be found by their tokens."""
        return self.has_thinking and not self.parsers.reasoning_parser.is_prose

    @property
    def writes_by_mistral(self) -> bool:
        """Whether mistral-common writes the chats, and no template."""
        return self._mistral is not None

    def set_images(self, info: ProcessorInfo) -> None:
        """Let chats have images: no text may become the tokens that stand for them.

        Args:
            info: of the model's processor.
        """
        self._images = info
        texts = map(self.tokenizer.backend.id_to_token, info.marker_ids)
        markers = {*self.tokenizer.control_tokens, info.image_token, *texts}
        self._control_tokens = ControlTokens(marker for marker in markers if marker and len(marker) > 1)

    def image_roles(self, request: ChatCompletionRequest) -> Callable[[str], bool]:
        """Return which roles' images the template of a chat renders.

        Raises:
            InvalidRequest: as `render_chat`, about the template.
        """
        info, template = self._images, self._template(request)
        return lambda role: info is not None and template.image_form(role, info.image_token) is not None

    def _template(self, request: ChatCompletionRequest) -> ChatTemplate:
        """Return the template of a chat: the request's own, if it has one, else the model's.

        Raises:
            InvalidRequest: the model has none, or the engine does not trust requests to bring one.
        """
        if request.chat_template is not None:
            return self._template_of_request(request.chat_template)
        if self.template is None:
            instead = (
                "use /v1/completions" if self.config.pooling is None else "send texts instead of messages"
            )
            raise InvalidRequest(
                f"this model has no chat template; {instead}, or start the engine with --chat-template FILE",
                param="messages",
            )
        return self.template

    def _compiled(self, source: str) -> ChatTemplate:
        if not self.config.request_defaults.trust_request_chat_template:
            raise InvalidRequest(
                "chat_template is refused: it needs an engine that was started with --trust-request-chat-template",
                param="chat_template",
            )
        try:
            template = ChatTemplate.load(self._template_path, self.config.request_defaults, source)
        except ConfigError as error:
            raise InvalidRequest(f"chat_template: {error}", param="chat_template") from None
        assert template is not None
        return template

    def parsed_token_ids(self, request: GenerationRequest) -> tuple[int, ...]:
        """Return the special tokens that the parser of a request's output reads."""
        if not isinstance(request, ChatCompletionRequest):
            return ()
        ids = set(self._thought_token_ids) if self.has_thinking else set()
        if _calls_tools(request) or issubclass(self.parsers.tool_parser, OpenAIToolParser):
            ids |= self._call_token_ids
        return tuple(sorted(ids))

    def chat_parser(
        self, request: ChatCompletionRequest, prompt: TokenizedPrompt
    ) -> ChatParser | HarmonyParser:
        """Return the parser of one choice of a chat."""
        if issubclass(self.parsers.tool_parser, OpenAIToolParser):
            tools = self.tool_parser(request)
            return HarmonyParser(tools if isinstance(tools, OpenAIToolParser) else None)
        starts_open = prompt.reasoning is not None and self.parsers.reasoning_parser.starts_open
        return ChatParser(
            reasoning_parser=self.parsers.reasoning_parser() if self.has_thinking else None,
            tool_parser=self.tool_parser(request),
            starts_open=starts_open,
            is_reasoning=prompt.reasoning is not None and prompt.reasoning.is_open and not starts_open,
            calls_end_reasoning=request.tool_choice in (None, "auto") and not _is_constrained(request),
        )

    def tool_parser(self, request: ChatCompletionRequest) -> ToolParser | None:
        """Return the parser of the tool calls of one choice; None if the request has none."""
        return self.parsers.tool_parser(request.tools or ()) if _calls_tools(request) else None

    def render_chat(
        self, request: ChatCompletionRequest, images: ChatImages | None = None
    ) -> TokenizedPrompt:
        """Apply the chat template, and tokenise the result.

        Args:
            images: of the chat, as far as the model gets them; others are refused, or leave a note in a history.

        Raises:
            InvalidRequest: the template rejects the messages, or the model has no template.
        """
        (segments,) = prompt_segments(request)
        if self._mistral is not None:
            text, encoded = self._mistral_chat(self._mistral, request, segments)
            prompt = self._prompt_of(encoded, text, segments, request)
        else:
            text, cuts = self._chat_text(request, segments, images)
            if request.truncate_prompt_tokens is None:
                self.check_length(len(cuts) + 1)  # each piece is at least one token
            if images is not None:
                prompt = self._image_prompt(text, cuts, segments, request, images)
            else:
                prompt = self._text_prompt(text, segments, request, add_special_tokens=False, cuts=cuts)
        if request.return_prompt_text:
            prompt = prompt._replace(text=text)
        reasoning = self._reasoning_after(prompt, text, request)
        if reasoning is None:
            return self._with_thinking_marks(prompt, request, is_open=False)
        prompt = prompt._replace(reasoning=reasoning)
        return self._with_thinking_marks(
            prompt, request, is_open=reasoning.is_open, end_ids=reasoning.end_ids
        )

    def _reasoning_after(
        self, prompt: TokenizedPrompt, text: str, request: ChatCompletionRequest
    ) -> Reasoning | None:
        """Return the markers of the reasoning that the model may write after a chat; None if it cannot."""
        parser, is_called = self.parsers.reasoning_parser, request.tool_choice not in (None, "auto", "none")
        if not self.has_thinking or (prompt.is_truncated and request.truncation_side == "right"):
            return None  # without the end of the prompt nobody knows whether the model reasons
        if self._mistral is not None:
            return self._mistral_reasoning(prompt, request)
        if parser.is_prose and (is_called or _is_constrained(request)):
            return None  # the grammar applies from the first token on
        if request.continue_final_message:
            begun = "\n".join(_texts(request.messages[-1]))
            return reasoning_in(begun, *self._thought_marks, *self._thought_ids)
        if parser.text_end is not None and text.rstrip().endswith(parser.text_end):
            return None
        reasoning = reasoning_after(text, *self._thought_marks, *self._thought_ids)
        if reasoning is None:
            return None
        if parser.starts_open:
            reasoning = msgspec.structs.replace(reasoning, is_open=True)
        if self._end_before_calls and is_called:
            reasoning = msgspec.structs.replace(reasoning, end_ids=self._end_before_calls)
        return reasoning

    def _mistral_reasoning(self, prompt: TokenizedPrompt, request: ChatCompletionRequest) -> Reasoning | None:
        if request.continue_final_message:  # within an answer
            return None
        start, end = self._thought_ids
        is_open = last_index(prompt.token_ids, start) > last_index(prompt.token_ids, end)
        return Reasoning(tuple(start), tuple(end), is_open or self.parsers.reasoning_parser.starts_open)

    def encode_chat(self, request: ChatCompletionRequest, images: ChatImages | None = None) -> Encoded:
        """Tokenise a chat's prompt, even if it is too long for the model.

        Raises:
            InvalidRequest: as `render_chat`.
        """
        (segments,) = prompt_segments(request)
        if self._mistral is not None:
            return self._mistral_chat(self._mistral, request, segments)[1]
        text, cuts = self._chat_text(request, segments, images)
        encoded = self.encode(text, add_special_tokens=False, cuts=cuts)
        return encoded if images is None else with_images(encoded, request, images)

    def chat_text(self, request: ChatCompletionRequest) -> str:
        """Return the text of a chat's prompt, in which control tokens of the template look like those in messages.

        Raises:
            InvalidRequest: as `render_chat`.
        """
        (segments,) = prompt_segments(request)
        if self._mistral is not None:
            return self._mistral_chat(self._mistral, request, segments)[0]
        return self._chat_text(request, segments)[0]

    def render_completion(self, request: CompletionRequest) -> list[TokenizedPrompt]:
        """Tokenise each prompt of the batch.

        Raises:
            InvalidRequest: a prompt is too long, has a token id beyond the vocabulary, or is not text.
        """
        prompts = request.prompts()
        if request.suffix:  # an empty one asks for a plain continuation
            return [
                self._with_thinking_marks(self._filled_in(prompt, request.suffix, request), request)
                for prompt in prompts
            ]
        for prompt in prompts:
            if isinstance(prompt, str) and request.truncate_prompt_tokens is None:
                self._check_characters(len(prompt))
        made = [
            self._text_prompt(
                prompt, segments, request, add_special_tokens=request.add_special_tokens is not False
            )
            if isinstance(prompt, str)
            else self._token_prompt(prompt, segments, request)
            for prompt, segments in zip(prompts, prompt_segments(request), strict=True)
        ]
        return [self._with_thinking_marks(prompt, request) for prompt in made]

    def _with_thinking_marks(
        self,
        prompt: TokenizedPrompt,
        request: GenerationRequest,
        *,
        is_open: bool | None = None,
        end_ids: Sequence[int] | None = None,
    ) -> TokenizedPrompt:
        """Return a prompt with the marks of its reasoning, if the request bounds that.

        Args:
            is_open: whether the prompt ends in a think block; None: its tokens tell.
            end_ids: tokens that end the block, if not the parser's.

        Raises:
            InvalidRequest: the model does not reason, or its reasoning cannot be bounded.
        """
        if request.thinking_token_budget in (None, -1):
            return prompt
        if not self.has_thinking:
            raise InvalidRequest(
                "thinking_token_budget needs a model that reasons; if this one does, start the engine with "
                "--reasoning-parser",
                param="thinking_token_budget",
            )
        if not self.bounds_thinking:
            raise InvalidRequest(
                f"thinking_token_budget cannot end the reasoning of this model, which sentences mark "
                f"({self._thought_marks[1]!r}), not tokens; leave it out, or bound the answer by max_tokens",
                param="thinking_token_budget",
            )
        start, end = (tuple(ids) for ids in self._thought_ids)
        started, ended = (last_index(prompt.token_ids, mark) for mark in (start, end))
        num_open = -1
        if started > ended and is_open is not False:
            num_open = len(prompt.token_ids) - started - len(start)
        elif is_open:  # by the template's convention, without a mark
            num_open = 0
        return prompt._replace(thinking_marks=ThinkingMarks(start, tuple(end_ids or end), num_open))

    def _filled_in(self, prompt: str | list[int], suffix: str, request: CompletionRequest) -> TokenizedPrompt:
        """Tokenise a prompt after which the model writes what stands between `prompt` and `suffix`.

        Raises:
            InvalidRequest: the model cannot, or the request has a field that does not go with it.
        """
        is_mistral = self._mistral is not None and self._mistral.fills_in
        if self._fill_in_middle is None and not is_mistral:
            raise InvalidRequest(
                "suffix needs a model that fills in the middle; the tokenizer of this one has no tokens for it",
                param="suffix",
            )
        for field in ("echo", "truncate_prompt_tokens"):
            if getattr(request, field) not in (None, False):
                raise InvalidRequest(f"suffix cannot be combined with {field}", param="suffix")
        if not isinstance(prompt, str):
            raise InvalidRequest("suffix needs a prompt that is text, not token ids", param="suffix")
        if self._mistral is not None:
            self._check_characters(len(prompt) + len(suffix))
            ids = self._mistral.encode_fill_in(prompt, suffix)
            self.check_length(len(ids))
            return TokenizedPrompt(ids, [])
        assert self._fill_in_middle is not None
        text = self._fill_in_middle.prompt(prompt, suffix)
        # Chunks are those of plain prompts, whose tokens are others.
        return self._text_prompt(text, [], request, add_special_tokens=True)

    def render_text(self, text: str, *, add_special_tokens: bool = True) -> TokenizedPrompt:
        """Tokenise a plain text, for offline use."""
        segment = SegmentKind.TEXT, text.encode("utf-8", "surrogatepass")
        return self._text_prompt(text, [segment], GenerationRequest(), add_special_tokens=add_special_tokens)

    def render_prompt(self, prompt: PromptType | TokenizedPrompt) -> TokenizedPrompt:
        """Tokenise a text, or check token ids against the vocabulary, for offline use.

        Raises:
            InvalidRequest: not a prompt, a token id is beyond the vocabulary, or the text is not valid Unicode.
        """
        if isinstance(prompt, TokenizedPrompt):
            return prompt
        given = text_or_token_ids(prompt)
        if isinstance(given, str):
            return self.render_text(given)
        self.check_token_ids(given)
        return TokenizedPrompt(given, [])

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        cuts: Sequence[int] = (),
        is_truncated: bool = False,
    ) -> Encoded:
        """Tokenise a text.

        Args:
            cuts: offsets in characters that no token crosses.
            is_truncated: the text may be too long, because not all of its tokens are used.

        Raises:
            PromptTooLong: no model's token is so long that this could be a prompt.
            InvalidRequest: it is not text.
        """
        if not is_truncated:
            self._check_characters(len(text))
        stop_if_abandoned()
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens, cuts=cuts)
        except UnicodeEncodeError:
            raise InvalidRequest("the prompt contains lone surrogates, which are not text") from None

    def check_token_ids(self, token_ids: Sequence[int], param: str = "prompt") -> None:
        """
        Raises:
            InvalidRequest: an id is beyond the vocabulary.
        """
        vocab_size = self.config.vocab_size
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            wrong = max(token_ids) if max(token_ids) >= vocab_size else min(token_ids)
            raise InvalidRequest(
                f"{param} has the token id {wrong}, which is out of vocabulary: ids begin at 0 and are below "
                f"{vocab_size}",
                param=param,
            )

    def truncation_of(self, request: GenerationRequest) -> Truncation | None:
        """Return how a request's prompts are shortened; None if they are not (`prompts.truncation_of`)."""
        return truncation_of(request, self.config.max_model_len, least_output=self._least_output)

    def check_length(self, num_tokens: int) -> None:
        """
        Raises:
            PromptTooLong: a prompt of so many tokens leaves no room for output.
        """
        limit = self.config.max_model_len
        if num_tokens > limit - self._least_output:
            raise PromptTooLong(
                f"this model's maximum context length is {limit} tokens, the prompt has {num_tokens}; {self._remedy}",
                param="prompt",
            )

    def _chat_text(
        self, request: ChatCompletionRequest, segments: list[Segment], images: ChatImages | None = None
    ) -> tuple[str, list[int]]:
        """Render a chat; return the text and the offsets at which it is split. Checks lengths before rendering."""
        if request.add_special_tokens and self.tokenizer.adds_special_tokens:
            raise InvalidRequest(
                "add_special_tokens is not supported in chats: the chat template writes this model's special tokens",
                param="add_special_tokens",
            )
        template = self._template(request)
        size = self._check_chat(request, segments)
        is_truncated = request.truncate_prompt_tokens is not None
        if not self._control_tokens.concern(segments):
            return template.render(request, images=images), []
        if size > self._max_characters and not is_truncated:
            # Hiding reads texts that templates may drop, too, and changes no length.
            self._check_characters(len(template.render(request, images=images)))
        rendered = template.render(request, self._control_tokens.hide, images)
        if not is_truncated:
            self._check_characters(len(rendered))
        return self._control_tokens.reveal(rendered)

    def _mistral_chat(
        self, tokenizer: MistralTokenizer, request: ChatCompletionRequest, segments: list[Segment]
    ) -> tuple[str, Encoded]:
        """Render a chat by mistral-common; return its text and tokens. Checks lengths before rendering."""
        if request.add_special_tokens:
            raise InvalidRequest(
                "add_special_tokens is not supported in chats: mistral-common writes this model's special tokens",
                param="add_special_tokens",
            )
        self._check_chat(request, segments)
        stop_if_abandoned()
        return tokenizer.encode_chat(request, self.config.request_defaults.chat_template_kwargs or {})

    def _check_chat(self, request: ChatCompletionRequest, segments: list[Segment]) -> int:
        """Return the size of a chat in bytes.

        Raises:
            PromptTooLong: whatever is made of it is too long.
        """
        # Templates may drop an assistant's answers and reasoning, but not the other messages.
        if request.truncate_prompt_tokens is None:
            self._check_characters(
                sum(len(text) for m in request.messages if m.role != "assistant" for text in _texts(m))
            )
        size = sum(len(data) for _, data in segments)
        self._check_input(size)
        return size

    def _text_prompt(
        self,
        text: str,
        segments: list[Segment],
        request: GenerationRequest,
        *,
        add_special_tokens: bool,
        cuts: Sequence[int] = (),
    ) -> TokenizedPrompt:
        truncation = self.truncation_of(request)
        if truncation is not None and not cuts:
            text = truncation.trimmed(text, self._max_characters)
        encoded = self.encode(
            text, add_special_tokens=add_special_tokens, cuts=cuts, is_truncated=truncation is not None
        )
        return self._prompt_of(encoded, text, segments, request, add_special_tokens=add_special_tokens)

    def _image_prompt(
        self,
        text: str,
        cuts: Sequence[int],
        segments: list[Segment],
        request: ChatCompletionRequest,
        images: ChatImages,
    ) -> TokenizedPrompt:
        encoded = with_images(self.encode(text, add_special_tokens=False, cuts=cuts), request, images)
        truncation = self.truncation_of(request)
        if truncation is not None and len(encoded) > truncation.num_tokens:
            raise PromptTooLong(
                f"a prompt with images is not cut, and this one has {len(encoded)} tokens, more than "
                f"{truncation.num_tokens}; shorten it, or send fewer or smaller images",
                param="prompt",
            )
        return self._prompt_of(encoded, text, segments, request)

    def _prompt_of(
        self,
        encoded: Encoded,
        text: str,
        segments: list[Segment],
        request: GenerationRequest,
        *,
        add_special_tokens: bool = False,
    ) -> TokenizedPrompt:
        self.check_token_ids(encoded.ids)  # tokens may have been added, and the embeddings not resized
        truncation = self.truncation_of(request)
        if truncation is not None and len(encoded) > truncation.num_tokens:
            num_added = self.tokenizer.num_added if add_special_tokens else (0, 0)
            return TokenizedPrompt(truncation.kept(encoded.ids, num_added), [], is_truncated=True)
        self.check_length(len(encoded))
        stop_if_abandoned()
        features, digest_ends = (
            (encoded.features, encoded.digest_ends) if isinstance(encoded, EncodedImages) else ([], [])
        )
        chunk_ends = map_chunks(segments, self._seed(request), text, encoded.ends, digest_ends)
        return TokenizedPrompt(encoded.ids, chunk_ends, mm_features=features)

    def _token_prompt(
        self, token_ids: list[int], segments: list[Segment], request: GenerationRequest
    ) -> TokenizedPrompt:
        self.check_token_ids(token_ids)
        truncation = self.truncation_of(request)
        if truncation is not None and len(token_ids) > truncation.num_tokens:
            return TokenizedPrompt(truncation.kept(token_ids), [], is_truncated=True)
        return TokenizedPrompt(list(token_ids), map_token_chunks(segments, self._seed(request)))

    def _check_input(self, size: int) -> None:
        """
        Raises:
            PromptTooLong: a chat has more bytes than any prompt, and more than templates are known to drop.
        """
        limit = max(self._max_characters, MIN_INPUT_BYTES)
        if size > limit:
            raise PromptTooLong(
                f"messages, tools and documents together have {size} bytes, at most {limit} are read, those "
                "included that the chat template drops; shorten them",
                param="messages",
            )

    def _check_characters(self, count: int) -> None:
        """
        Raises:
            PromptTooLong: no model's token is so long that a text of so many characters could be a prompt.
        """
        limit = self.config.max_model_len
        if count > limit and count > (most := self._max_characters):
            raise PromptTooLong(
                f"this model's maximum context length is {limit} tokens, which are {most} characters at most, "
                f"the prompt has {count}; {self._remedy}",
                param="prompt",
            )

    @property
    def _remedy(self) -> str:
        """What to do about a prompt that is too long."""
        if self.config.pooling is None:
            return "shorten it"
        return "shorten it, or set truncate_prompt_tokens: the number of tokens that stay, or -1 for all that fit"

    @property
    def _max_characters(self) -> int:
        return self.config.max_model_len * self.tokenizer.max_token_chars

    def _seed(self, request: GenerationRequest) -> int:
        """Return the seed of the chain of chunk hashes."""
        if not request.cache_salt:
            return self._unsalted_seed
        return chain_seed(self.config.model_name, cache_salt=request.cache_salt)


def open_tokenizer(prepared: PreparedTokenizer) -> Tokenizer:
    """Load a tokenizer (`checkpoint.tokenizer_files.prepare_tokenizer`).

    Raises:
        ConfigError: it cannot be read.
    """
    return Tokenizer(prepared.folder) if prepared.mistral_file is None else open_mistral_tokenizer(prepared)


def open_mistral_tokenizer(prepared: PreparedTokenizer) -> MistralTokenizer:
    """Load a tokenizer of Mistral's, and mistral-common.

    Raises:
        ConfigError: it cannot be read.
    """
    from argosy_engine.frontend.mistral_tokenizer import MistralTokenizer

    return MistralTokenizer(prepared)


def _calls_tools(request: ChatCompletionRequest) -> bool:
    return bool(request.tools) and request.tool_choice != "none"


def _is_constrained(request: ChatCompletionRequest) -> bool:
    """Whether a grammar waits for the end of the reasoning, besides that of required calls."""
    response_format = request.response_format or {"type": "text"}
    return request.structured_outputs is not None or response_format.get("type") != "text"


def _texts(message: ChatMessage) -> list[str]:
    """Return a message's content."""
    if isinstance(message.content, str):
        return [message.content]
    texts = (part.get("text") for part in message.content or ())
    return [text for text in texts if isinstance(text, str)]
