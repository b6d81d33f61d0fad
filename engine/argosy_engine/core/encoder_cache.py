"""EncoderCacheManager: which outputs of the encoder the workers keep, and for which requests.

The core decides and workers follow: a step names the items to encode and the outputs to drop before that, so that all
workers hold the same. Outputs are kept by the identifier of their item, for later requests with the same item, until
their room is needed. A request holds the outputs that its next chunk reads, from the step that encodes them to the one
that computes the item's last token; the step under construction holds what any of its chunks reads. Design: vLLM V1,
`v1/core/encoder_cache_manager.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from math import prod

from argosy_engine.messages import EngineCoreRequest, MultimodalFeature
from argosy_engine.model_configs.vision_config import VisionSpec

_STEP = ""
"""Holds what the step under construction reads; no request has this id."""


class EncoderCacheManager:
    """
    Args:
        capacity: most embeddings that workers keep. No request may have more.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_used = 0
        """Embeddings of the outputs that are kept."""
        self._num_held = 0
        """Embeddings of the outputs that somebody holds."""
        self._num_embeds: dict[str, int] = {}
        """Of each output, by the item's identifier."""
        self._holders: dict[str, set[str]] = {}
        """Ids of the requests that hold it."""
        self._unheld: OrderedDict[str, None] = OrderedDict()
        """Outputs that nobody holds, the one that was left first at the front."""
        self._held_by: dict[str, set[str]] = {}
        """Id of a request -> what it holds."""
        self._dropped: list[str] = []
        self.num_queries = 0
        """Items that requests began to need, since somebody set this to 0; of them those that were there."""
        self.num_hits = 0

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._num_embeds

    def has_room(self, num_embeds: int) -> bool:
        """Whether an output would fit, once outputs that nobody holds are dropped."""
        return self._num_held + num_embeds <= self.capacity

    def hold(self, request_id: str, feature: MultimodalFeature) -> bool:
        """Let a request, and the step under construction, hold an item's output; return whether the step has to encode
        it. If it does, `has_room` was true."""
        identifier = feature.identifier
        is_new = identifier not in self._num_embeds
        if identifier not in self._held_by.get(request_id, ()):
            self.num_queries += 1
            self.num_hits += not is_new
        if is_new:
            while self.num_used + feature.num_embeds > self.capacity:
                left, _ = self._unheld.popitem(last=False)
                self._drop(left)
            self._num_embeds[identifier] = feature.num_embeds
            self._holders[identifier] = set()
            self._unheld[identifier] = None
            self.num_used += feature.num_embeds
        for holder in (request_id, _STEP):
            self._held_by.setdefault(holder, set()).add(identifier)
            self._holders[identifier].add(holder)
        if identifier in self._unheld:
            del self._unheld[identifier]
            self._num_held += feature.num_embeds
        return is_new

    def leave(self, request_id: str, identifier: str) -> None:
        """Let a request no longer hold an item's output. It need not hold it."""
        held = self._held_by.get(request_id)
        if held is None or identifier not in held:
            return
        held.discard(identifier)
        if not held:
            del self._held_by[request_id]
        holders = self._holders[identifier]
        holders.discard(request_id)
        if not holders:
            self._unheld[identifier] = None
            self._num_held -= self._num_embeds[identifier]

    def leave_all(self, request_id: str) -> None:
        """Let a request hold nothing any more."""
        for identifier in list(self._held_by.get(request_id, ())):
            self.leave(request_id, identifier)

    def end_step(self) -> list[str]:
        """End the step under construction; return what workers have to drop before it encodes anything."""
        self.leave_all(_STEP)
        dropped, self._dropped = self._dropped, []
        return dropped

    def cancel_step(self, identifiers: Iterable[str]) -> None:
        """End the step under construction, which is not computed.

        Args:
            identifiers: of what it would have encoded, which no request holds.
        """
        self.leave_all(_STEP)
        for identifier in identifiers:
            del self._unheld[identifier]
            self._drop(identifier)

    def reset(self) -> None:
        """Drop everything: nothing is known of what the workers hold."""
        for identifier in list(self._num_embeds):
            self._drop(identifier)
        self._unheld.clear()
        self._held_by.clear()
        self._num_held = 0

    def check(self, request_ids: set[str]) -> None:
        """Assert the invariants.

        Args:
            request_ids: of the requests that run.
        """
        assert self._holders.keys() == self._num_embeds.keys()
        assert sum(self._num_embeds.values()) == self.num_used <= self.capacity
        assert self._unheld.keys() == {each for each, holders in self._holders.items() if not holders}
        assert self._num_held == self.num_used - sum(self._num_embeds[each] for each in self._unheld)
        assert self._held_by.keys() <= request_ids
        held = {(request_id, each) for request_id, held in self._held_by.items() for each in held}
        assert held == {(holder, each) for each, holders in self._holders.items() for holder in holders}

    def _drop(self, identifier: str) -> None:
        del self._holders[identifier]
        self.num_used -= self._num_embeds.pop(identifier)
        self._dropped.append(identifier)


def check_features(
    message: EngineCoreRequest, spec: VisionSpec | None, max_step_tokens: int
) -> list[tuple[int, int]]:
    """Check that the multimodal items of a request are what its prompt and the model say; return its `whole_spans`.

    Args:
        max_step_tokens: most tokens of a step.

    Raises:
        ValueError: they are not, which no request of a client can cause, or tokens that have to be computed in one step
            are more than that.
    """
    if spec is None:
        raise ValueError("this engine serves no images")
    end = 0
    for feature in message.mm_features:
        start, end, before = feature.offset, feature.offset + feature.length, end
        if not feature.identifier or feature.modality != "image":
            raise ValueError(f"an item is {feature.modality!r} without an identifier, or no image")
        if start < before or end > len(message.prompt_token_ids):
            raise ValueError(
                f"placeholders {start} to {end} of an image are beyond the prompt or another image"
            )
        placeholders = message.prompt_token_ids[start:end].count(spec.image_token_id)
        if placeholders != feature.num_embeds:
            raise ValueError(f"an image of {feature.num_embeds} embeddings has {placeholders} placeholders")
        if spec.mrope_section and (len(feature.grid) != 3 or prod(feature.grid) != placeholders):
            raise ValueError(f"the grid {feature.grid} of an image is not of {placeholders} placeholders")
    spans = whole_spans(message, spec)
    for start, end in spans:
        if end - start > max_step_tokens:
            raise ValueError(
                f"{end - start} tokens of an image are computed in one step, and steps have at most {max_step_tokens} "
                "(--max-num-batched-tokens)"
            )
    return spans


def whole_spans(message: EngineCoreRequest, spec: VisionSpec) -> list[tuple[int, int]]:
    """Return the first position, and that after the last, of the tokens of a request that attend to each other and so
    have to be computed in one step: each run of an image's placeholders, for models that let them."""
    if not spec.is_bidirectional:
        return []
    spans: list[tuple[int, int]] = []
    for feature in message.mm_features:
        start = None
        for position in range(feature.offset, feature.offset + feature.length):
            if message.prompt_token_ids[position] == spec.image_token_id:
                start = position if start is None else start
            elif start is not None:
                spans.append((start, position))
                start = None
        if start is not None:
            spans.append((start, feature.offset + feature.length))
    return spans
