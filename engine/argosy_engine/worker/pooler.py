"""Pooler: turns the hidden states of a prompt into one vector, or one for each token, for requests that ask for vectors
instead of tokens.

A prompt may be computed in chunks, so the pooler keeps what it needs of earlier ones between steps, in float32: the sum
of the states for their mean, the first state, or all of them.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F

from argosy_engine.model_configs.pooling_spec import PoolingSpec
from argosy_engine.models.pooled_model import ScoringModel
from argosy_engine.models.registry import CausalLM
from argosy_engine.params.pooling_params import PoolingParams
from argosy_engine.worker.step_arrays import StepArrays

_OF_GENERATING = PoolingSpec()


class Pooler:
    """Pools the hidden states of prompts, which may arrive in chunks.

    Args:
        spec: how the model pools; None: it generates, and may be asked for vectors as well.
    """

    def __init__(self, model: CausalLM, spec: PoolingSpec | None = None) -> None:
        self._model = model
        self._spec = spec or _OF_GENERATING
        self._params: dict[str, PoolingParams] = {}
        self._kept: dict[str, torch.Tensor] = {}
        """For a mean, float32 [1 + pooled_size]: the number of states so far, and their sum; for the first token's
        state, that, float32 [pooled_size]."""
        self._chunks: dict[str, list[torch.Tensor]] = {}
        """For tasks of tokens, their states so far, float32 [tokens, pooled_size] each."""

    def add(self, request_id: str, params: PoolingParams) -> None:
        """Add a request, whose parameters are resolved (`frontend.pooling.resolved_params`)."""
        self._params[request_id] = params

    def remove(self, request_id: str) -> None:
        """Drop a request. Unknown ids are ignored."""
        self._params.pop(request_id, None)
        self._kept.pop(request_id, None)
        self._chunks.pop(request_id, None)

    def pool(self, step: StepArrays, hidden: torch.Tensor) -> dict[str, list[float]]:
        """Return the vectors of the requests whose prompts are complete with this step; those of a prompt's tokens one
        after the other.

        Args:
            hidden: [T, hidden_size], states of the step's tokens before the final norm.
        """
        if not self._params:
            return {}
        complete = set(step.sampled.rows)
        last: dict[str, int] = {}
        """Of complete prompts that want the last token's state, its index."""
        kept: list[str] = []
        vectors: dict[str, list[float]] = {}
        for row, request_id in enumerate(step.request_ids):
            params = self._params.get(request_id)
            if params is None:
                continue
            end = int(step.ends[row])
            start = end - int(step.query_lens[row])
            if params.is_token_wise:
                self._chunks.setdefault(request_id, []).append(self._states(hidden[start:end]))
                if row in complete:
                    states = torch.cat(self._chunks.pop(request_id))
                    vectors[request_id] = self._results(states, params).flatten().tolist()
                continue
            if params.pooling_type == "mean":
                self._add_to_sum(request_id, hidden[start:end])
            elif params.pooling_type == "cls" and not step.computed[row]:
                self._kept[request_id] = self._states(hidden[start : start + 1])[0]
            if row in complete:
                if params.needs_every_token:
                    kept.append(request_id)
                else:
                    last[request_id] = end - 1
        if last:
            rows = torch.tensor(list(last.values()), device=hidden.device)
            self._finish(list(last), self._states(hidden.index_select(0, rows)), vectors)
        if kept:
            self._finish(kept, torch.stack([self._pooled(request_id) for request_id in kept]), vectors)
        return vectors

    def _states(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.last_hidden_state(hidden).float()

    def _add_to_sum(self, request_id: str, hidden: torch.Tensor) -> None:
        states = self._states(hidden)
        count_and_sum = torch.cat((states.new_tensor([len(states)]), states.sum(dim=0)))
        earlier = self._kept.get(request_id)
        self._kept[request_id] = count_and_sum if earlier is None else earlier + count_and_sum

    def _pooled(self, request_id: str) -> torch.Tensor:
        """Return the vector [pooled_size] of a complete prompt."""
        kept = self._kept.pop(request_id)
        return kept[1:] / kept[0] if self._params[request_id].pooling_type == "mean" else kept

    def _finish(self, request_ids: list[str], vectors: torch.Tensor, into: dict[str, list[float]]) -> None:
        """Make the results of vectors [R, pooled_size]."""
        by_params: dict[PoolingParams, list[int]] = {}
        for row, request_id in enumerate(request_ids):
            by_params.setdefault(self._params[request_id], []).append(row)
        for params, rows in by_params.items():
            some = vectors if len(by_params) == 1 else vectors[rows]
            result = self._results(some, params).tolist()
            into.update(zip((request_ids[row] for row in rows), result, strict=True))

    def _results(self, vectors: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        is_classified = params.task in ("classify", "token_classify")
        return self._scores(vectors, params) if is_classified else _embeddings(vectors, params)

    def _scores(self, vectors: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """Return scores [R, num_labels], or what the activation makes of them."""
        spec, model = self._spec, cast(ScoringModel, self._model)
        scores = (model.scores(vectors) - spec.logit_mean) / spec.logit_sigma
        if not params.use_activation:
            return scores
        match spec.activation:
            case "softmax":
                return scores.softmax(dim=-1)
            case "sigmoid":
                return scores.sigmoid()
        return scores


def _embeddings(vectors: torch.Tensor, params: PoolingParams) -> torch.Tensor:
    vectors = vectors[:, : params.dimensions]
    return F.normalize(vectors, dim=-1) if params.use_activation else vectors
