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
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from argosy_engine.attention.backend import DeepstackFeatures, ModelInputs
from argosy_engine.distributed.parallel_state import Communicator, first_failures
from argosy_engine.messages import EncoderInput, MediaTensor, NewRequest, SchedulerOutput
from argosy_engine.models.loader import LoadedImages
from argosy_engine.worker.input_batch import Ints, StepArrays

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
        ranks: those that encode the same items. What one of them cannot encode, fails on all.
    """

    def __init__(self, loaded: LoadedImages, num_slots: int, ranks: Communicator) -> None:
        self._ranks = ranks
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
        rank or another."""
        for identifier in step.freed_encoder_outputs:
            self._outputs.pop(identifier, None)
        if not step.encoder_inputs:
            return {}
        reasons = [self._encode(item) for item in step.encoder_inputs]
        agreed = first_failures(reasons, self._ranks, self._encoder.device)
        failed: dict[str, str] = {}
        for item, reason in zip(step.encoder_inputs, agreed, strict=True):
            if reason is not None:
                failed[item.identifier] = reason
                self._outputs[item.identifier] = self._nothing(item)
        return failed

    def _encode(self, item: EncoderInput) -> str | None:
        """Encode an item, and return why it cannot be."""
        try:
            inputs = {name: _tensor(each) for name, each in item.inputs.items()}
            self._outputs[item.identifier] = self._encoder.encode(inputs, item.num_embeds)
        except torch.OutOfMemoryError as error:
            logger.error("there is no memory to encode an %s: %s", item.modality, str(error)[:200])
            return "there is not enough memory on the device; send a smaller one"
        except Exception as error:  # whatever transformers' modules raise
            logger.exception("an %s cannot be encoded", item.modality)
            return f"{type(error).__name__}: {str(error)[:200]}"
        return None

    def _nothing(self, item: EncoderInput) -> torch.Tensor:
        """Return embeddings for steps whose results are thrown away, which take no memory."""
        width = (1 + self._spec.num_deepstack) * self._encoder.hidden_size
        zeros = torch.zeros(1, width, dtype=self._encoder.dtype, device=self._encoder.device)
        return zeros.expand(item.num_embeds, width)

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
        rows = torch.from_numpy(np.concatenate([part.rows for part in parts])).to(hidden.device)
        outputs = [self._outputs[part.image.identifier][part.places] for part in parts]
        features = torch.cat(outputs).to(hidden.dtype)
        width = hidden.shape[-1]
        hidden = hidden.index_copy(0, rows, features[:, :width])
        deepstack = None
        if self._spec.num_deepstack:
            layers = features[:, width:].unflatten(-1, (-1, width)).transpose(0, 1).contiguous()
            deepstack = DeepstackFeatures(rows, layers)
        return replace(inputs, hidden=hidden, deepstack=deepstack)


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
