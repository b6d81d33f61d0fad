"""/classify: the labels of prompts, by a model with a head for sequence classification."""

from __future__ import annotations

import time
from functools import partial

from argosy_engine.api.openai.openai_serving import OpenAIServing
from argosy_engine.api.openai.pooled_outputs import pooled_outputs, usage_of, vector_of
from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.pooled_prompts import render_inputs
from argosy_engine.params.pooling_params import PoolingParams
from argosy_protocol.pooling import ClassificationData, ClassificationRequest, ClassificationResponse


async def classify(
    serving: OpenAIServing, request: ClassificationRequest, request_id: str, size: int
) -> ClassificationResponse:
    """
    Args:
        size: of the request's body, in bytes.

    Raises:
        ApiError, EngineError: see `openai_serving.to_api_error`.
    """
    name, pooling = serving.check_model(request.model), serving.llm.config.pooling
    if pooling is None or pooling.task != "classify":
        raise InvalidRequest(
            f"{name} does not classify: that needs a checkpoint with a head for labels (ForSequenceClassification), "
            "served with --convert classify or auto"
        )
    params = PoolingParams(task="classify", use_activation=request.use_activation)
    outputs = await pooled_outputs(serving, partial(render_inputs, request=request), request, params, size)
    return ClassificationResponse(
        id=f"classify-{request_id}",
        created=int(time.time()),
        model=name,
        data=[
            _data(index, vector_of(output), pooling.labels[_best(vector_of(output))])
            for index, output in enumerate(outputs)
        ],
        usage=usage_of(outputs),
    )


def _best(probs: list[float]) -> int:
    return max(range(len(probs)), key=probs.__getitem__)


def _data(index: int, probs: list[float], label: str) -> ClassificationData:
    return ClassificationData(index=index, label=label, probs=probs, num_classes=len(probs))
