"""CompletionParts: outputs of the engine as choices of /v1/completions, whole or a delta at a time."""

from __future__ import annotations

from collections.abc import Sequence

from argosy_engine.api.logprobs import LogprobsFormat, TextOffsets
from argosy_engine.frontend.outputs import GenerationOutput
from argosy_engine.frontend.processor import Prompt
from argosy_engine.frontend.tokenizer import Tokenizer
from argosy_protocol.openai import CompletionChoice, CompletionLogprobs, CompletionRequest


class CompletionParts:
    """
    Args:
        resumed: per choice the output of the run that it continues.
        with_ids: every part carries its `token_ids`.
    """

    def __init__(
        self,
        request: CompletionRequest,
        tokenizer: Tokenizer,
        prompts: Sequence[Prompt],
        resumed: Sequence[Sequence[int]],
        *,
        with_ids: bool,
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._with_ids = with_ids
        self._format = LogprobsFormat(tokenizer, as_token_ids=request.return_tokens_as_token_ids)
        self._offsets: dict[int, TextOffsets] = {}
        if request.logprobs is not None:
            for choice, token_ids in enumerate(resumed):
                offsets = TextOffsets(tokenizer, skip_special_tokens=request.skip_special_tokens)
                echoed = self._prompt(choice).token_ids if request.echo and token_ids else ()
                for token_id in (*echoed, *token_ids):
                    offsets.advance(token_id)
                self._offsets[choice] = offsets

    def choice(self, output: GenerationOutput, *, is_first: bool) -> CompletionChoice:
        """
        Args:
            is_first: the choice's first part, which carries what belongs to the prompt.
        """
        request, prompt = self._request, self._prompt(output.index)
        if request.is_scoring:
            output.text, output.token_ids, output.logprobs = "", [], []
            output.num_output_tokens, output.finish_reason, output.stop_reason = 0, "length", None
        text = output.text
        if request.echo and is_first:
            text = (
                self._tokenizer.decode(prompt.token_ids, skip_special_tokens=request.skip_special_tokens)
                + text
            )
        wants_prompt = is_first and request.prompt_logprobs is not None
        return CompletionChoice(
            index=output.index,
            text=text,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            logprobs=self._logprobs(output, prompt, is_first),
            token_ids=output.token_ids if self._with_ids else None,
            prompt_token_ids=prompt.token_ids if is_first and request.return_token_ids else None,
            prompt_logprobs=self._format.prompt(output.prompt_logprobs or []) if wants_prompt else None,
        )

    def _logprobs(
        self, output: GenerationOutput, prompt: Prompt, is_first: bool
    ) -> CompletionLogprobs | None:
        if self._request.logprobs is None:
            return None
        offsets = self._offsets[output.index]
        if self._request.echo and is_first:
            entries = [*(output.prompt_logprobs or []), *output.logprobs]
            return self._format.completion(entries, offsets, first_token_id=prompt.token_ids[0])
        return self._format.completion(output.logprobs, offsets) if output.logprobs else None

    def _prompt(self, choice: int) -> Prompt:
        return self._prompts[choice // (self._request.n or 1)]
