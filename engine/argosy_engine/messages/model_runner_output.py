"""ModelRunnerOutput: what a worker returns for a step, to be processed by the scheduler."""

from __future__ import annotations

from msgspec import Struct

from argosy_engine.sample.token_logprobs import TokenLogprobs


class ModelRunnerOutput(Struct, array_like=True, gc=False):
    """Tokens that a step has sampled, and what else its requests asked for."""

    request_ids: list[str]
    sampled_token_ids: list[list[int]]
    """New tokens of each request: none during its prefill, several if drafts were accepted."""
    logprobs: dict[str, list[TokenLogprobs]] = {}
    """Request id -> entries of the new tokens, for requests that asked for them."""
    prompt_logprobs: dict[str, tuple[int, list[TokenLogprobs]]] = {}
    """Request id -> (number of earlier entries, entries computed in this step). Every prompt token except the first has
    an entry."""
    draft_token_ids: dict[str, list[int]] = {}
    """Request id -> proposed draft tokens, which the next step verifies."""
    pooler_output: dict[str, list[float]] = {}
    """Request id -> vector, for pooling requests whose prompts are complete with this step."""
    errors: dict[str, str] = {}
    """Request id -> reason why the request cannot continue."""
    lost: str = ""
    """Why the step is lost as a whole, with the keys and values that it should have written. Empty: it is not."""
