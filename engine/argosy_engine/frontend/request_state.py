"""RequestState: state of one choice that the core computes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from argosy_engine.frontend.detokenizer import IncrementalDetokenizer
from argosy_engine.frontend.observer import RequestTimings
from argosy_engine.frontend.output_collector import OutputCollector
from argosy_engine.frontend.outputs import GenerationOutput, RequestOutput
from argosy_engine.messages.core_messages import EngineCoreOutput, EngineCoreRequest

MAX_WITHHELD = 256
"""Tokens of a choice from which on no more are withheld. Decoding them takes the event loop about a millisecond."""


class RequestState:
    """Detokenizer, counts and timings of one choice, and where its output goes.

    Args:
        index: index of the choice: in the call if there is a `queue`, else in `request_output`.
        queue: gets the output as deltas.
        request_output: accumulates the output if there is no `queue`.
        final_only: the `queue` gets tokens after the first in large pieces only (`withhold`).
    """

    __slots__ = (
        "detokenizer",
        "final_only",
        "has_output",
        "held",
        "index",
        "is_finished",
        "is_submitted",
        "num_output",
        "num_prompt",
        "num_withheld",
        "queue",
        "request_output",
        "resumed_text",
        "siblings",
        "stream_interval",
        "timings",
        "withheld",
    )

    def __init__(
        self,
        index: int,
        detokenizer: IncrementalDetokenizer,
        num_prompt: int,
        queue: OutputCollector | None,
        request_output: RequestOutput | None,
        timings: RequestTimings,
        *,
        final_only: bool = False,
    ) -> None:
        self.index = index
        self.detokenizer = detokenizer
        self.num_prompt = num_prompt
        """Number of prompt tokens."""
        self.queue = queue
        self.request_output = request_output
        self.num_output = 0
        """Number of output tokens, including those of a run that this one continues."""
        self.has_output = False
        self.is_finished = False
        """Whether the request resumes a run that had ended, so that there is nothing to compute."""
        self.is_submitted = False
        """Whether the request was sent to the core."""
        self.resumed_text = ""
        self.siblings: Sequence[EngineCoreRequest] = ()
        """Other choices of the same prompt, which are sent to the core once this one has computed it."""
        self.timings = timings
        self.final_only = final_only
        self.stream_interval = 1
        """Tokens in each output for the `queue`, but the first and the last."""
        self.held: GenerationOutput | None = None
        """Fewer tokens than that, which wait for the next ones."""
        self.withheld: list[EngineCoreOutput] = []
        """Outputs that were counted, but neither decoded nor delivered yet."""
        self.num_withheld = 0
        """Tokens in them."""

    def withhold(self, output: EngineCoreOutput) -> bool:
        """Keep an output for later, if its reader waits for the last one and few are kept; return whether it is kept.

        Not one that tells of the prompt, nor the first one of a run that continues another.
        """
        if not self.final_only or output.finish_reason is not None or self.num_withheld >= MAX_WITHHELD:
            return False
        if output.prompt_logprobs is not None or self.resumed_text:
            return False
        self.withheld.append(output)
        self.num_withheld += len(output.new_token_ids)
        return True

    def release(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """Return an output with the tokens before it that were withheld."""
        if not self.withheld:
            return output
        self.withheld.append(output)
        withheld, self.withheld, self.num_withheld = self.withheld, [], 0
        token_ids = [token_id for each in withheld for token_id in each.new_token_ids]
        logprobs = [entry for each in withheld for entry in each.logprobs or ()]
        return msgspec.structs.replace(output, new_token_ids=token_ids, logprobs=logprobs or None)

    def without_tokens_past_stop(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """Return an output up to the token that completed a stop string, and count no others."""
        num_past = self.detokenizer.num_past_stop
        if not num_past or not output.new_token_ids:
            return output
        self.num_output -= num_past
        num_kept = len(output.new_token_ids) - num_past
        return msgspec.structs.replace(
            output,
            new_token_ids=output.new_token_ids[:num_kept],
            logprobs=output.logprobs and output.logprobs[:num_kept],
        )

    def resume(self, token_ids: Sequence[int]) -> bool:
        """Decode the output of the run that this one continues; return whether the core has more to compute."""
        self.resumed_text = self.detokenizer.update(token_ids, is_last=False)
        self.num_output = len(token_ids) - self.detokenizer.num_past_stop
        return self.detokenizer.stop_reason is None and not self.is_finished

    def delta(
        self,
        output: EngineCoreOutput,
        text: str,
        finish_reason: str | None,
        stop_reason: int | str | None,
        is_first: bool,
    ) -> GenerationOutput:
        """Make the delta for one output of the core."""
        return GenerationOutput(
            index=self.index,
            text=text,
            token_ids=output.new_token_ids,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_prompt_tokens=self.num_prompt,
            num_cached_tokens=self.timings.num_cached,
            num_output_tokens=self.num_output,
            num_unshown=self.detokenizer.num_unshown,
            resumed_text=self.resumed_text if is_first else "",
            logprobs=output.logprobs or [],
            prompt_logprobs=output.prompt_logprobs,
            embedding=output.pooling_output,
        )

    def hold(self, output: GenerationOutput, is_first: bool) -> GenerationOutput | None:
        """Return an output for the reader, with what was held before; None while it is held."""
        if self.stream_interval == 1:
            return output
        held, self.held = self.held, None
        if held is not None:
            held.merge(output)
            output = held
        if is_first or output.finish_reason is not None or len(output.token_ids) >= self.stream_interval:
            return output
        self.held = output
        return None

    def accumulate(
        self,
        result: RequestOutput,
        output: EngineCoreOutput,
        text: str,
        finish_reason: str | None,
        stop_reason: int | str | None,
    ) -> None:
        """Append one output of the core to `request_output`, which is `result`."""
        choice = result.outputs[self.index]
        choice.text += text
        choice.token_ids += output.new_token_ids
        if output.logprobs:
            choice.logprobs += output.logprobs
        if self.index == 0:  # of later choices, the first one's blocks are cached
            result.num_cached_tokens = self.timings.num_cached
        if output.prompt_logprobs is not None:
            result.prompt_logprobs = [None, *output.prompt_logprobs]
        if finish_reason is not None:
            choice.finish_reason, choice.stop_reason = finish_reason, stop_reason
