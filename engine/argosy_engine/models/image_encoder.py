"""ImageEncoder: a wrapper's encoder of images, with the projection to its decoder's embeddings, by transformers' code.

Transformers' class of the wrapper is built without its decoder and output head, loaded by transformers' own loader, and
asked by `get_image_features`, which all wrappers have. Items are encoded one by one, so that what an image becomes does
not depend on the others of a step. On CPUs our kernels compute its attention, in half the time or less.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from argosy_engine.attention.cpu_attn import MAX_SEGMENT_HEAD_DIM, attend_segments
from argosy_engine.checkpoint.shards import read_shards
from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.transformers_config import read_hf_config
from argosy_engine.model_configs.vision_config import LargestImage, VisionSpec
from argosy_engine.model_configs.wrapper_config import is_of_other_part
from argosy_engine.models.transformers_classes import text_modules, wrapper_class
from argosy_engine.native.library import kernels_for

_TEXTS_ALONE = "serve it for texts alone with --language-model-only"
_REMEDY = f"download it again, or {_TEXTS_ALONE}"
_FLOATS = ("BF16", "F16", "F32", "F64")
WHOLE, SEGMENTS = "argosy_images", "argosy_images_flash"
"""Names of our attention function: for modules that give it a batch, and for those that give it one row of tokens and
where images and windows begin (`cu_seqlens`), which transformers' modules do for functions named so."""


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
        encoded = self._features(inputs)
        if encoded.shape != (num_embeds, (1 + self._num_deepstack) * self.hidden_size):
            raise ValueError(
                f"the encoder gave {list(encoded.shape)} for {num_embeds} placeholders of an image"
            )
        return encoded

    def encode_largest(self, image: LargestImage) -> int:
        """Encode an image of one colour, and return how many embeddings it has."""
        inputs = {"pixel_values": torch.ones(image.pixels)}  # zeros would pass for padding
        inputs |= {name: torch.tensor(each) for name, each in image.integers.items()}
        inputs |= {name: torch.ones(shape, dtype=torch.bool) for name, shape in image.masks.items()}
        return len(self._features(inputs))

    def _features(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        given = {name: self._on_device(each) for name, each in inputs.items()}
        output = self._asked.get_image_features(**given, return_dict=True)
        parts = [self._rows(output)]
        if self._num_deepstack:
            parts += [_joined(each) for each in output.deepstack_features]
        return torch.cat([each.to(self.dtype) for each in parts], dim=-1)

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
    model = model.eval().requires_grad_(False).to(device)
    if kernels_for(device, dtype) is not None:
        use_kernels(model)
    return ImageEncoder(model, spec, hidden_size, device)


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


def use_kernels(model: nn.Module) -> None:
    """Let our kernels compute attention wherever modules look for its function by the name in their config."""
    for module in model.modules():
        if isinstance(config := getattr(module, "config", None), PreTrainedConfig):
            takes_segments = "cu_seqlens" in inspect.signature(module.forward).parameters
            name = SEGMENTS if takes_segments else WHOLE
            if config._attn_implementation != SEGMENTS:  # one config is that of all modules of a tower
                config._attn_implementation = name


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Return [B, T, num_heads, head_dim] for q [B, num_heads, T, head_dim], k and v: by our kernels, or by torch where
    they have not what is asked for."""
    count, num_heads, num_tokens, head_dim = query.shape
    is_causal = others.get("is_causal")
    is_causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    loaded = kernels_for(query.device, query.dtype)
    can = attention_mask is None and not is_causal and key.shape[2] == num_tokens == value.shape[2]
    can = can and head_dim == value.shape[3] <= MAX_SEGMENT_HEAD_DIM and not others.get("dropout")
    if loaded is None or not can or others.get("softcap") or others.get("s_aux") is not None:
        if cu_seq_lens_q is not None:
            raise NotImplementedError(f"attention of {type(module).__name__} over several images or windows")
        found, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
        return found, None
    if cu_seq_lens_q is None:
        cu_seq_lens_q = torch.arange(count + 1) * num_tokens
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    made = attend_segments(loaded, q, k, v, cu_seq_lens_q, head_dim**-0.5 if scaling is None else scaling)
    return made.view(count, num_tokens, num_heads, head_dim), None


AttentionInterface.register(WHOLE, _attention)
AttentionInterface.register(SEGMENTS, _attention)
AttentionMaskInterface.register(WHOLE, sdpa_mask)
