"""ImageInputs: the worker's images. It encodes what a step names, keeps the outputs until the core drops them, and puts
them into the embeddings of the tokens that stand for them.

With M-RoPE (arXiv 2409.12191) a token has three coordinates: a text's are its position, those of an image's tokens are
its frame, row and column from where the image begins, and the text after it goes on behind the largest of them. Where
the three are equal, the rotation is that of a position, so decodes are only shifted; other tokens have rows of their
own at the end of the rotary tables, written before the step that reads them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray

from argosy_engine.attention.backend import DeepstackFeatures, ModelInputs
from argosy_engine.distributed.parallel_state import Communicator, first_failures
from argosy_engine.messages import (
    EncoderInput,
    MediaTensor,
    MultimodalFeature,
    NewRequest,
    SchedulerOutput,
)
from argosy_engine.model_configs.vision_config import LargestImage
from argosy_engine.models.loader import LoadedImages
from argosy_engine.worker.input_batch import Ints, StepArrays

if TYPE_CHECKING:
    from argosy_engine.models.image_encoder import ImageEncoder

logger = logging.getLogger("argosy.worker")


class EmbeddingModel(Protocol):
    """A model that embeds its tokens by themselves."""

    def embed(self, inputs: ModelInputs) -> torch.Tensor:
        """Return the embeddings [T, hidden_size]."""
        ...


class _Image(NamedTuple):
    """An image in a prompt."""

    identifier: str
    positions: NDArray[np.int64]
    """Of the tokens in whose place its embeddings are, ascending."""

    @property
    def run_ends(self) -> NDArray[np.int64]:
        """The position after the run of consecutive ones that each of them belongs to."""
        lasts = np.flatnonzero(np.append(np.diff(self.positions) != 1, True))
        run_of = np.searchsorted(lasts, np.arange(len(self.positions)))
        return self.positions[lasts][run_of] + 1


class ImagePart(NamedTuple):
    """Consecutive placeholders of an image, of which a step computes the tokens."""

    rows: NDArray[np.int64]
    """Indices of the tokens in the batch."""
    image: _Image
    places: slice
    """Of them among the image's placeholders."""


class ImageInputs:
    """
    Args:
        num_slots: of the input batch.
        ranks: those that need the same outputs. What one of them cannot encode, fails on all.
        shares_items: whether each of them encodes some of a step's items and sends the outputs to the others, instead
            of encoding all.
    """

    def __init__(
        self, loaded: LoadedImages, num_slots: int, ranks: Communicator, *, shares_items: bool = False
    ) -> None:
        self._ranks = ranks
        self._shares_items = shares_items and ranks.size > 1
        self._spec, self._encoder, self._rotary = loaded.spec, loaded.encoder, loaded.rotary
        self._outputs: dict[str, torch.Tensor] = {}
        self._images: dict[int, Sequence[_Image]] = {}
        """Slot -> images of its request."""
        self._coordinates: dict[int, NDArray[np.int64]] = {}
        """Slot -> coordinates [3, N] of its tokens up to the end of the last image."""
        self._shifts = np.zeros(num_slots, np.int64)
        """What the tokens after that are shifted by."""

    def encode(self, step: SchedulerOutput) -> dict[str, str]:
        """Drop and make encoder outputs as a step says. Return, by identifier, why items could not be encoded, on this
        rank or another. On a pipeline stage without the encoder it does nothing."""
        encoder = self._encoder
        if encoder is None:
            return {}
        for identifier in step.freed_encoder_outputs:
            self._outputs.pop(identifier, None)
        if not step.encoder_inputs:
            return {}
        items = step.encoder_inputs
        owners = divided(_costs(items), self._ranks.size) if self._shares_items else None
        reasons = [
            self._encode(encoder, item, is_own=owners is None or owners[index] == self._ranks.rank)
            for index, item in enumerate(items)
        ]
        agreed = first_failures(reasons, self._ranks, encoder.device)
        failed: dict[str, str] = {}
        for index, (item, reason) in enumerate(zip(items, agreed, strict=True)):
            if reason is not None:
                failed[item.identifier] = reason
                self._outputs[item.identifier] = self._nothing(encoder, item)
            elif owners is not None:
                self._ranks.broadcast(self._outputs[item.identifier], owners[index])
        return failed

    def _encode(self, encoder: ImageEncoder, item: EncoderInput, *, is_own: bool) -> str | None:
        """Encode an item, or make room for what another rank encodes. Return why it cannot be."""
        try:
            if not is_own:
                self._outputs[item.identifier] = torch.empty(
                    item.num_embeds, self._width(encoder), dtype=encoder.dtype, device=encoder.device
                )
                return None
            inputs = {name: _tensor(each) for name, each in item.inputs.items()}
            self._outputs[item.identifier] = encoder.encode(inputs, item.num_embeds)
        except torch.OutOfMemoryError as error:
            logger.error("there is no memory to encode an %s: %s", item.modality, str(error)[:200])
            return "there is not enough memory on the device; send a smaller one"
        except Exception as error:  # whatever transformers' modules raise
            logger.exception("an %s cannot be encoded", item.modality)
            return f"{type(error).__name__}: {str(error)[:200]}"
        return None

    def encode_largest(self, image: LargestImage) -> None:
        """Encode an image of one colour, of which nothing is kept.

        Raises:
            torch.OutOfMemoryError: there is no memory for it.
        """
        assert self._encoder is not None
        self._encoder.encode_largest(image)

    @property
    def is_bidirectional(self) -> bool:
        """Whether tokens of an image attend to all of it."""
        return self._spec.is_bidirectional

    def with_dummy(self, request: NewRequest) -> NewRequest:
        """Return a dummy request whose tokens are all those of an image, whose output is zeros."""
        count = len(request.token_ids)
        item = EncoderInput(f"dummy of {count}", "image", count, {})
        if self._encoder is not None:
            self._outputs[item.identifier] = self._nothing(self._encoder, item)
        feature = MultimodalFeature("image", item.identifier, 0, count, count)
        return structs.replace(request, token_ids=[self._spec.image_token_id] * count, mm_features=[feature])

    def _nothing(self, encoder: ImageEncoder, item: EncoderInput) -> torch.Tensor:
        """Return embeddings for steps whose results are thrown away, which take no memory."""
        zeros = torch.zeros(1, self._width(encoder), dtype=encoder.dtype, device=encoder.device)
        return zeros.expand(item.num_embeds, self._width(encoder))

    def _width(self, encoder: ImageEncoder) -> int:
        """Return that of an output's rows: embeddings, and features for the first layers."""
        return (1 + self._spec.num_deepstack) * encoder.hidden_size

    def add(self, slot: int, request: NewRequest) -> None:
        """Add a request, with or without images."""
        self.remove(slot)
        if not request.mm_features:
            return
        token_ids = np.array(request.token_ids, np.int64)
        images = []
        for feature in request.mm_features:
            span = token_ids[feature.offset : feature.offset + feature.length]
            places = feature.offset + np.flatnonzero(span == self._spec.image_token_id)
            images.append(_Image(feature.identifier, places))
        self._images[slot] = images
        if self._spec.mrope_section:
            grids = [feature.grid for feature in request.mm_features]
            self._coordinates[slot], self._shifts[slot] = coordinates(images, grids)

    def remove(self, slot: int) -> None:
        """Drop the request of a slot."""
        if self._images.pop(slot, None) is not None:
            self._coordinates.pop(slot, None)
            self._shifts[slot] = 0

    def rotary_rows(self, step: StepArrays) -> Ints | None:
        """Return the row of the rotary tables for each token, int64 [T], once those of the step's own tokens are
        written; None: the tokens' positions."""
        if not self._coordinates:
            return None
        rows = step.positions + self._shifts[step.token_slots]
        own: list[NDArray[np.int64]] = []
        table = self._rotary.tables[0].first_own_row if self._rotary.tables else 0
        for first, start, end, slot in _spans(step):
            known = self._coordinates.get(slot)
            if known is None or start >= known.shape[1]:
                continue
            found = known[:, start : min(end, known.shape[1])]
            is_own = (found != found[0]).any(axis=0)
            numbers = table + sum(each.shape[1] for each in own) + np.arange(int(is_own.sum()))
            chosen = found[0].copy()
            chosen[is_own] = numbers
            rows[first : first + found.shape[1]] = chosen
            own.append(found[:, is_own])
        if own and (written := np.concatenate(own, axis=1)).size:
            for each in self._rotary.tables:
                each.write_rows(written)
        return rows

    def parts(self, step: StepArrays) -> list[ImagePart]:
        """Return what a step computes of images."""
        parts: list[ImagePart] = []
        if not self._images:
            return parts
        for first, start, end, slot in _spans(step):
            for image in self._images.get(slot, ()):
                low, high = np.searchsorted(image.positions, (start, end))
                if low < high:
                    places = slice(int(low), int(high))
                    parts.append(ImagePart(first + image.positions[places] - start, image, places))
        return parts

    def key_ends(self, step: StepArrays, parts: Sequence[ImagePart]) -> NDArray[np.int32] | None:
        """Return where the keys of each token end, int32 [T], if tokens of an image attend to all of it; None: all
        attend to themselves and those before."""
        if not self._spec.is_bidirectional or not parts:
            return None
        ends = (step.positions + 1).astype(np.int32)
        for part in parts:
            ends[part.rows] = part.image.run_ends[part.places]
        return ends

    def embedded(self, model: EmbeddingModel, inputs: ModelInputs, parts: Sequence[ImagePart]) -> ModelInputs:
        """Return the inputs with the embeddings of the step's tokens, those of images in their places.

        Args:
            parts: of the step, at least one.
        """
        hidden = model.embed(inputs)
        rows = rows_of(parts, hidden.device)
        outputs = [self._outputs[part.image.identifier][part.places] for part in parts]
        features = torch.cat(outputs).to(hidden.dtype)
        width = hidden.shape[-1]
        hidden = hidden.index_copy(0, rows, features[:, :width])
        deepstack = None
        if self._spec.num_deepstack:
            layers = features[:, width:].unflatten(-1, (-1, width)).transpose(0, 1).contiguous()
            deepstack = DeepstackFeatures(rows, layers)
        return replace(inputs, hidden=hidden, deepstack=deepstack)


def rows_of(parts: Sequence[ImagePart], device: torch.device) -> torch.Tensor:
    """Return the indices of all tokens of images in the batch, int64 [I]."""
    return torch.from_numpy(np.concatenate([part.rows for part in parts])).to(device)


def divided(costs: Sequence[int], size: int) -> list[int]:
    """Return for each of several items the one of `size` ranks that computes it, such that the costs of all ranks are
    about alike: the dearest first, each to the rank with the least so far."""
    sums, owners = [0] * size, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owners[index] = sums.index(min(sums))
        sums[owners[index]] += costs[index]
    return owners


def _costs(items: Sequence[EncoderInput]) -> list[int]:
    return [sum(len(each.data) for each in item.inputs.values()) for item in items]


def _tensor(stored: MediaTensor) -> torch.Tensor:
    data: Any = stored.data
    is_own = (
        isinstance(data, memoryview) and not data.readonly
    )  # the mapping of a file, which no one else writes
    tensor = torch.frombuffer(data if is_own else bytearray(data), dtype=getattr(torch, stored.dtype))
    return tensor.view(stored.shape)


def _spans(step: StepArrays) -> list[tuple[int, int, int, int]]:
    """Return of each request the index of its first token in the batch, the positions of its first token and after its
    last one, and its slot."""
    firsts = step.ends - step.query_lens
    return list(
        zip(firsts.tolist(), step.computed.tolist(), step.seq_lens.tolist(), step.slots.tolist(), strict=True)
    )


def coordinates(images: Sequence[_Image], grids: Sequence[tuple[int, ...]]) -> tuple[NDArray[np.int64], int]:
    """Return the coordinates (frame, row, column) of a prompt's tokens up to the end of its last image, int64 [3, N],
    and how far the position of each token after that is from the one it would have without images.

    Args:
        grids: of each image the numbers of frames, rows and columns, whose product is that of its tokens.
    """
    parts: list[NDArray[np.int64]] = []
    token = position = 0
    for image, grid in zip(images, grids, strict=True):
        if not len(image.positions):
            continue
        before = int(image.positions[0]) - token
        parts.append(np.broadcast_to(np.arange(position, position + before), (3, before)))
        position += before
        parts.append(position + np.indices(grid, np.int64).reshape(3, -1))
        token = int(image.positions[-1]) + 1
        position += max(grid[1:])
    found = np.concatenate(parts, axis=1) if parts else np.empty((3, 0), np.int64)
    return found, position - token
