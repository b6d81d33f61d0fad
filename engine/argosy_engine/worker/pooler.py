"""Pooler: turns the hidden states of a prompt into one vector, for requests that ask for a vector instead of tokens.

A prompt may be computed in chunks, so the pooler keeps the sum of its states between steps, in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from argosy_engine.models.registry import CausalLM
from argosy_engine.params.pooling_params import PoolingParams
from argosy_engine.worker.step_arrays import StepArrays


class Pooler:
    """Pools the hidden states of prompts, which may arrive in chunks."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self._params: dict[str, PoolingParams] = {}
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, request_id: str, params: PoolingParams) -> None:
        self._params[request_id] = params

    def remove(self, request_id: str) -> None:
        """Drop a request. Unknown ids are ignored."""
        self._params.pop(request_id, None)
        self._sums.pop(request_id, None)

    def pool(self, step: StepArrays, hidden: torch.Tensor) -> dict[str, list[float]]:
        """Return the vectors of the requests whose prompts are complete with this step.

        Args:
            hidden: [T, hidden_size], states of the step's tokens before the final norm.
        """
        vectors: dict[str, list[float]] = {}
        if not self._params:
            return vectors
        complete = set(step.sampled.rows)
        for row, request_id in enumerate(step.request_ids):
            params = self._params.get(request_id)
            if params is None:
                continue
            end = int(step.ends[row])
            if params.pooling_type == "mean":
                self._add_to_sum(request_id, hidden[end - int(step.query_lens[row]) : end])
            if row in complete:
                vectors[request_id] = self._finish(request_id, params, hidden[end - 1 : end])
        return vectors

    def _add_to_sum(self, request_id: str, hidden: torch.Tensor) -> None:
        states = self._model.last_hidden_state(hidden).float()
        count_and_sum = torch.cat((states.new_tensor([len(states)]), states.sum(dim=0)))
        earlier = self._sums.get(request_id)
        self._sums[request_id] = count_and_sum if earlier is None else earlier + count_and_sum

    def _finish(self, request_id: str, params: PoolingParams, last: torch.Tensor) -> list[float]:
        if params.pooling_type == "mean":
            count_and_sum = self._sums.pop(request_id)
            vector = count_and_sum[1:] / count_and_sum[0]
        else:
            vector = self._model.last_hidden_state(last)[0].float()
        vector = vector[: params.dimensions]
        return (F.normalize(vector, dim=0) if params.normalize else vector).tolist()
