"""ImageEncoder: a wrapper's encoder of images, with the projection to its decoder's embeddings, by transformers' code.

Transformers' class of the wrapper is built without its decoder and output head, loaded by transformers' own loader, and
asked by `get_image_features`, which all wrappers have. Items are encoded one by one, so that what an image becomes does
not depend on the others of a step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from argosy_engine.checkpoint.shards import read_shards
from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.transformers_config import read_hf_config
from argosy_engine.model_configs.vision_config import VisionSpec
from argosy_engine.model_configs.wrapper_config import is_of_other_part
from argosy_engine.models.transformers_classes import text_modules, wrapper_class

_TEXTS_ALONE = "serve it for texts alone with --language-model-only"
_REMEDY = f"download it again, or {_TEXTS_ALONE}"
_FLOATS = ("BF16", "F16", "F32", "F64")


class ImageEncoder:
    """
    Args:
        model: transformers' wrapper without its decoder.
        hidden_size: width of the decoder's embeddings.
    """

    def __init__(
        self, model: PreTrainedModel, spec: VisionSpec, hidden_size: int, device: torch.device
    ) -> None:
        base: Any = model.base_model
        self._asked: Any = base if hasattr(base, "get_image_features") else model
        self._num_deepstack = spec.num_deepstack
        self.hidden_size = hidden_size
        self.device, self.dtype = device, model.dtype
        self.num_bytes = sum(each.nbytes for each in model.parameters())
        """Of its weights."""

    def encode(self, inputs: Mapping[str, torch.Tensor], num_embeds: int) -> torch.Tensor:
        """Return the embeddings of one image [num_embeds, hidden_size], and beside them, if there are any, the features
        for the first layers: [num_embeds, (1 + num_deepstack) * hidden_size].

        Args:
            inputs: arguments of `get_image_features`, as the processor makes them.

        Raises:
            ValueError: there are not `num_embeds` of them.
        """
        given = {name: self._on_device(each) for name, each in inputs.items()}
        output = self._asked.get_image_features(**given, return_dict=True)
        parts = [self._rows(output)]
        if self._num_deepstack:
            parts += [_joined(each) for each in output.deepstack_features]
        encoded = torch.cat([each.to(self.dtype) for each in parts], dim=-1)
        if encoded.shape != (num_embeds, (1 + self._num_deepstack) * self.hidden_size):
            raise ValueError(
                f"the encoder gave {list(encoded.shape)} for {num_embeds} placeholders of an image"
            )
        return encoded

    def _rows(self, output: Any) -> torch.Tensor:
        if type(self._asked).__name__ == "Llama4ForConditionalGeneration":  # the others project by themselves
            states = output.last_hidden_state
            projected: torch.Tensor = self._asked.multi_modal_projector(states.view(-1, states.shape[-1]))
            return projected
        return _joined(output.pooler_output)

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)


def _joined(features: Any) -> torch.Tensor:
    """Return features of an item, given as one tensor or several, as rows."""
    if isinstance(features, torch.Tensor):
        return features.reshape(-1, features.shape[-1])
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in features])


def load_image_encoder(
    path: Path,
    spec: VisionSpec,
    hidden_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int | None,
) -> ImageEncoder | None:
    """Load the encoder of a checkpoint; None: it has none of its tensors.

    Args:
        hidden_size: width of the decoder's embeddings.
        seed: of random weights, which no checkpoint is read for; None: the checkpoint's.

    Raises:
        ConfigError: the checkpoint lacks some of its tensors, has them quantised, or transformers cannot load it.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = read_hf_config(json.loads(spec.fields))
    for each in (config, config.get_text_config()):
        each.tie_word_embeddings = False  # neither of the two is there
    found = wrapper_class(config)
    if found is None:
        raise ConfigError(f"transformers {transformers.__version__} has no class for {config.model_type}")
    built: Any = _without_text(found)
    model: Any
    info: Mapping[str, Any]
    if seed is not None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = built._from_config(config, dtype=dtype)
    else:
        _check_unquantised(path)
        try:
            model, info = built.from_pretrained(
                str(path),
                config=config,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # named below
                output_loading_info=True,
            )
        except Exception as error:  # whatever its loader raises
            reason = str(error).strip()[:600]
            raise ConfigError(
                f"transformers cannot load the encoder of images of {path}: {type(error).__name__}: {reason}; {_REMEDY}"
            ) from error
        if len(info.get("missing_keys") or ()) == len(model.state_dict()):
            return None
        _check(path, info)
    return ImageEncoder(model.eval().requires_grad_(False).to(device), spec, hidden_size, device)


def _check_unquantised(path: Path) -> None:
    """
    Raises:
        ConfigError: a weight is quantised, and may be of the shape of one that is not.
    """
    for shard in read_shards(path):
        for name, tensor in shard.tensors.items():
            if is_of_other_part(name) and name.endswith(".weight") and tensor.dtype not in _FLOATS:
                raise ConfigError(
                    f"the encoder of images of {path} is quantised, which is not supported: {name} is {tensor.dtype}; "
                    f"take a checkpoint with an unquantised one, or {_TEXTS_ALONE}"
                )


def _check(path: Path, info: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: tensors are missing or of another shape.
    """
    names = sorted(info.get("missing_keys") or ())
    names += sorted(str(each[0]) for each in info.get("mismatched_keys") or ())
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ConfigError(
            f"the encoder of images of {path} lacks {', '.join(names[:3])}{more}, or has them in another shape or "
            f"quantised; {_REMEDY}"
        )


def _without_text(wrapper: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a wrapper's class without its decoder and output head."""

    def initialise(self: PreTrainedModel, config: Any, *args: Any, **kwargs: Any) -> None:
        wrapper.__init__(self, config, *args, **kwargs)
        for parent, name in text_modules(self):
            setattr(parent, name, nn.Identity())

    return type(wrapper.__name__, (wrapper,), {"__init__": initialise, "__module__": wrapper.__module__})
