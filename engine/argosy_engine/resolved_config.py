"""ResolvedConfig: what an engine runs with, once model and device have decided what the flags left open.

`RequestDefaults` are part of it: what flags put in place of the model folder's own chat template and sampling
parameters, once files are read. How a template is rendered is not known here. So is `MediaConfig`: whether requests may
have images, and how they are loaded and processed; its flags are `MediaArgs`, a part of `config.EngineArgs`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Container
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.model_config import read_json
from argosy_engine.model_configs.model_use import PoolingSpec
from argosy_engine.model_configs.vision_config import VisionSpec
from argosy_engine.sample.token_logprobs import LogprobsMode
from argosy_protocol.program.flags import Flag, InvalidValue, convert

MAX_TEMPLATE_BYTES = 1 << 20
_LITERAL_SIGNS = frozenset("{}\n")
"""Characters of templates that no file name has; vLLM tells them apart in the same way."""
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_NAMES = ("temperature", "top_p", "top_k", "min_p", *_PENALTIES)


class GenerationConfig(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling parameters of `--override-generation-config` and generation_config.json; names are transformers'."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 20)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, le=1 << 24)] | None = None


class RequestDefaults(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What requests get that do not say otherwise."""

    chat_template: str | None = None
    """Source of the template; None: the model folder's."""
    chat_template_kwargs: dict[str, Any] | None = None
    trust_request_chat_template: bool = False
    """Whether a request may bring a template of its own."""
    generation_config: str = "auto"
    """`auto`: the model folder's; `vllm`: none; else a directory with a generation_config.json."""
    override_generation_config: GenerationConfig = GenerationConfig()

    def check(self) -> None:
        """
        Raises:
            ConfigError: the directory of the generation config has none.
        """
        if self.generation_config not in ("auto", "vllm"):
            read_json(Path(self.generation_config) / "generation_config.json")

    def setting(self) -> str:
        """Return what of it determines outputs, for the model's fingerprint; empty if nothing is set."""
        fixed = msgspec.structs.replace(self, trust_request_chat_template=False)
        return (
            "" if fixed == RequestDefaults() else msgspec.json.encode(fixed, order="deterministic").decode()
        )


class SamplingDefaults(Struct, frozen=True, kw_only=True):
    """Sampling parameters of requests that give none."""

    values: dict[str, float] = {}
    max_tokens: int | None = None
    """`max_tokens` of chats that give none."""
    max_tokens_limit: int | None = None
    """Upper bound for every request, as vLLM has it for a `max_new_tokens` that does not come from the model."""


def chat_template_source(argument: str) -> str:
    """Return the template that `--chat-template` names or is.

    Raises:
        ConfigError: it is neither a readable file nor a template.
    """
    file = Path(argument)
    try:
        if _LITERAL_SIGNS.isdisjoint(argument):
            with file.open("rb") as opened:
                data = opened.read(MAX_TEMPLATE_BYTES + 1)
            if len(data) > MAX_TEMPLATE_BYTES:
                raise ConfigError(f"--chat-template {argument} is larger than {MAX_TEMPLATE_BYTES} bytes")
            return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template {argument} cannot be read ({error}); give a file, or a template in one line"
        ) from None
    return argument


def sampling_defaults(model_path: Path, defaults: RequestDefaults) -> SamplingDefaults:
    """Return the sampling parameters of the generation config, and over them those of the flags.

    A generation config that disables sampling means greedy decoding, to which its penalties still apply.

    Raises:
        ConfigError: the generation config cannot be read, or has a value out of bounds that no flag replaces.
    """
    override = {
        name: value
        for name, value in msgspec.to_builtins(defaults.override_generation_config).items()
        if value is not None
    }
    is_of_model = defaults.generation_config == "auto"
    config = (
        {}
        if defaults.generation_config == "vllm"
        else _read(model_path, defaults.generation_config, override)
    )
    limit = override.get("max_new_tokens", None if is_of_model else config.get("max_new_tokens"))
    merged = {**config, **override}
    return SamplingDefaults(
        values={name: merged[name] for name in _NAMES if merged.get(name) is not None},
        max_tokens=merged.get("max_new_tokens"),
        max_tokens_limit=limit,
    )


def _read(model_path: Path, source: str, override: Container[str]) -> dict[str, Any]:
    """Return the parameters of a generation config, except those in `override`."""
    file = (model_path if source == "auto" else Path(source)) / "generation_config.json"
    given = {} if source == "auto" and not file.is_file() else read_json(file)
    samples = _checked(file, "do_sample", given.get("do_sample"), _Sampling)
    names = _PENALTIES if samples is False else _NAMES
    config = {
        name: _checked(file, name, given.get(name), GenerationConfig)
        for name in (*names, "max_new_tokens")
        if name not in override
    }
    return {"temperature": 0.0, **config} if samples is False else config


class _Sampling(Struct):
    do_sample: bool | None = None


def _checked(file: Path, name: str, value: Any, kind: type[Struct]) -> Any:
    """Return the value of a key as a flag would take it."""
    try:
        return getattr(convert({name: value}, kind), name)
    except InvalidValue as error:
        _, _, told = str(error).partition(": ")
        raise ConfigError(
            f"{file}: {name}: {told or error}; correct it, replace it by --override-generation-config, or leave the "
            "file out by --generation-config vllm"
        ) from None


class MemoryBudget(Struct, frozen=True, kw_only=True):
    """How a device's memory is divided up. `sizing.kv_cache_sizing.plan_memory` makes it."""

    device: str
    """`cpu` or `cuda`."""
    num_workers: int = 1
    """Workers that share the model. Each needs as much as is given here, on a device of its own or on the same CPU."""
    total_bytes: int
    """The device's memory; on a CPU, the most that this process may use (the host's memory or its cgroup's limit)."""
    available_bytes: int
    """Memory that was free when the engine started; on a CPU, a worker's share of it."""
    utilization: float
    """`--gpu-memory-utilization` or its default."""
    weights_bytes: int
    activation_bytes: int
    """Peak of the largest step: measured on CUDA, estimated on a CPU and before the model is loaded."""
    block_bytes: int
    """One KV block over the layers that share it (all layers if they are of one kind)."""
    block_size: int
    num_blocks: int
    """Number of KV blocks, including the null block."""
    request_blocks: int
    """Blocks that one request of full length holds at most."""
    max_model_len: int
    limited_by: Literal["memory", "--kv-cache-memory-bytes", "--num-gpu-blocks-override", "--max-num-seqs"]
    """What determines the number of blocks. `--max-num-seqs`: more blocks could never be used."""
    state_bytes: int = 0
    """States of one request over all recurrent layers; 0: there are none."""
    num_states: int = 0
    """Number of blocks with states, including the null block."""

    @property
    def most_running(self) -> int:
        """Requests that can run at once, as far as states limit it."""
        return self.num_states - 1 if self.num_states else sys.maxsize

    @property
    def kv_cache_bytes(self) -> int:
        return self.num_blocks * self.block_bytes + self.num_states * self.state_bytes

    @property
    def kv_cache_tokens(self) -> int:
        """Capacity in tokens of full-length requests. With windows or chunks it exceeds the number of slots, because
        requests free the blocks that no later token reads. 0 for encoders."""
        full_length = -(-self.max_model_len // self.block_size) * self.block_size
        if not self.request_blocks and not self.num_states:
            return 0  # an encoder keeps nothing of a request
        in_states = (self.num_states - 1) * full_length
        if not self.request_blocks:  # states alone
            return in_states
        in_blocks = (self.num_blocks - 1) * full_length // self.request_blocks
        return min(in_blocks, in_states) if self.num_states else in_blocks

    @property
    def max_concurrency(self) -> float:
        """Number of full-length requests that fit into the KV cache at once; 0 for encoders."""
        return self.kv_cache_tokens / self.max_model_len


class ParserConfig(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The flags that choose the parsers of the model's output."""

    enable_auto_tool_choice: bool = True
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    tool_parser_plugin: str | None = None


class TokenizerConfig(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the tokenizer is, if it is no tokenizer.json in the model's directory."""

    path: str | None = None
    """Directory with tokenizer_config.json and chat template (`--tokenizer`); None: the model's."""
    folder: str | None = None
    """Directory with the tokenizer.json that is loaded; None: the same."""
    mistral_file: str | None = None
    """The file that mistral-common encodes with."""


DEFAULT_MAX_IMAGES = 256
"""Images of one prompt. vLLM's default is 999, which it does not bound in bytes."""
MAX_IMAGES = 4096
_Domain = Annotated[str, Meta(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9._:\[\]-]+$")]


class MediaConfig(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How images of requests are loaded and processed."""

    vision: VisionSpec | None = None
    """How the model sees them; None: requests with images are refused."""
    why_blind: str = ""
    """The flag that turns images off, if one does."""
    max_images: int = DEFAULT_MAX_IMAGES
    """Of one prompt."""
    processor_kwargs: dict[str, Any] = {}
    background: tuple[int, int, int] = (255, 255, 255)
    """Red, green and blue behind transparent pixels."""
    trusts_request_kwargs: bool = False
    """Whether a request may have arguments for the processor."""
    cache_bytes: int = 0
    passes_files: bool = False
    """Whether tensors go from process to process as files in memory (`--mm-tensor-ipc torch_shm`)."""
    allowed_domains: tuple[str, ...] = ()
    allowed_path: str | None = None

    def setting(self) -> str:
        """Return what of it determines what becomes of an image, for the model's fingerprint; empty if nothing is
        set, or the model sees none."""
        asked = {"processor": self.processor_kwargs} if self.processor_kwargs else {}
        if self.background != (255, 255, 255):
            asked["background"] = {"rgb": self.background}
        if self.vision is None or not asked:
            return self.why_blind
        return msgspec.json.encode(asked, order="deterministic").decode()

    @property
    def model_type(self) -> str:
        """Of the checkpoint's config.json; empty without `vision`."""
        fields = {} if self.vision is None else msgspec.json.decode(self.vision.fields, type=dict[str, Any])
        return str(fields.get("model_type", ""))


class MediaArgs(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The flags for images, with vLLM's names."""

    language_model_only: Annotated[
        bool,
        Meta(
            description="serve only the text part of a model that sees images; requests with images are refused"
        ),
    ] = False
    limit_mm_per_prompt: Annotated[
        Annotated[dict[str, Any], Meta(max_length=16)] | None,
        Meta(
            description='JSON object; {"image": 4} bounds the images of a prompt (default 256), {"image": 0} refuses '
            "them. Video and audio are not served, whatever their limits"
        ),
        Flag(is_json=True),
    ] = None
    mm_processor_kwargs: Annotated[
        Annotated[dict[str, Any], Meta(max_length=64)] | None,
        Meta(
            description='JSON object of arguments for the model\'s image processor, such as `{"max_pixels": 1003520}` '
            "of Qwen2.5-VL, which bounds the tokens of an image"
        ),
        Flag(is_json=True),
    ] = None
    trust_request_mm_kwargs: Annotated[
        bool,
        Meta(
            description="accept `mm_processor_kwargs` in requests: a client then chooses how large images become"
        ),
    ] = False
    media_io_kwargs: Annotated[
        Annotated[dict[str, Any], Meta(max_length=16)] | None,
        Meta(
            description='JSON object; {"image": {"rgba_background_color": [0, 0, 0]}} is the colour behind transparent '
            "pixels (default: white)"
        ),
        Flag(is_json=True),
    ] = None
    mm_processor_cache_gb: Annotated[
        float,
        Meta(
            ge=0.0,
            le=4096.0,
            description="GiB of processed images that each API process keeps, by their content; 0: none",
        ),
    ] = 1.0
    mm_tensor_ipc: Annotated[
        Literal["direct_rpc", "torch_shm"],
        Meta(
            description="how the tensors of images get to the engine's core: in its messages, or as files in memory, "
            "which no process copies (Linux)"
        ),
    ] = "direct_rpc"
    mm_encoder_tp_mode: Annotated[
        Literal["weights", "data"],
        Meta(
            description="how tensor-parallel ranks encode the images of a step: each rank all of them (weights), or "
            "each some, whose outputs it sends to the others (data). The whole encoder is on each of them in both cases"
        ),
    ] = "weights"
    allowed_media_domains: Annotated[
        tuple[_Domain, ...],
        Meta(
            max_length=256,
            description="hosts, as HOST or HOST:PORT, from which images are fetched that requests name by an http(s) "
            "URL; default: none. Addresses in private networks are refused in any case",
        ),
    ] = ()
    allowed_local_media_path: Annotated[
        Annotated[str, Meta(max_length=4096)] | None,
        Meta(
            description="directory of this machine below which images are read that requests name by a file:// URL, by "
            "every client; default: none"
        ),
    ] = None

    def media_config(self, vision: VisionSpec | None) -> MediaConfig:
        """Return how images are loaded and processed.

        Args:
            vision: of the model.

        Raises:
            ConfigError: a flag has a value that means nothing here.
        """
        limit = _image_limit(self.limit_mm_per_prompt)
        off = "--language-model-only" if self.language_model_only else ""
        off = off or ("--limit-mm-per-prompt" if not limit else "")
        if self.allowed_local_media_path and not Path(self.allowed_local_media_path).expanduser().is_dir():
            raise ConfigError(
                f"--allowed-local-media-path {self.allowed_local_media_path} is no directory of this machine"
            )
        if self.mm_tensor_ipc == "torch_shm" and not hasattr(os, "memfd_create"):
            raise ConfigError("--mm-tensor-ipc torch_shm needs Linux; leave it out")
        return MediaConfig(
            vision=None if off else vision,
            why_blind=off if vision is not None else "",
            max_images=limit,
            processor_kwargs=self.mm_processor_kwargs or {},
            background=image_background(self.media_io_kwargs, "--media-io-kwargs"),
            trusts_request_kwargs=self.trust_request_mm_kwargs,
            cache_bytes=int(self.mm_processor_cache_gb * (1 << 30)),
            passes_files=self.mm_tensor_ipc == "torch_shm",
            allowed_domains=self.allowed_media_domains,
            allowed_path=self.allowed_local_media_path or None,
        )


def _image_limit(limits: dict[str, Any] | None) -> int:
    """Return how many images a prompt may have. As in vLLM a limit is a number, or an object with `count`."""
    found = DEFAULT_MAX_IMAGES
    for modality, value in (limits or {}).items():
        limit = value.get("count", DEFAULT_MAX_IMAGES) if isinstance(value, dict) else value
        if not isinstance(limit, int) or isinstance(limit, bool) or not 0 <= limit <= MAX_IMAGES:
            raise ConfigError(
                f"--limit-mm-per-prompt: {modality[:32]} must be a whole number from 0 to {MAX_IMAGES}, or an object "
                "with it as count"
            )
        if modality == "image":
            found = limit
        elif modality not in ("video", "audio"):
            raise ConfigError(
                f"--limit-mm-per-prompt: there is no {modality[:32]!r}, but image, video and audio"
            )
    return found


def image_background(
    kwargs: dict[str, Any] | None, where: str, default: tuple[int, int, int] = (255, 255, 255)
) -> tuple[int, int, int]:
    """Return the colour behind transparent pixels that vLLM's `media_io_kwargs` ask for.

    Raises:
        ConfigError: they ask for something else, or for no colour.
    """
    for modality, options in (kwargs or {}).items():
        if modality not in ("image", "video", "audio") or not isinstance(options, dict):
            raise ConfigError(f"{where}: must have an object for image, such as {{'image': {{}}}}")
        for name, value in options.items() if modality == "image" else ():
            if name == "image_mode" and value == "RGB":
                continue
            is_color = isinstance(value, list | tuple) and len(value) == 3
            if name != "rgba_background_color":
                raise ConfigError(f"{where}: there is no {name[:64]!r} of images, but rgba_background_color")
            if not is_color or not all(type(each) is int and 0 <= each <= 255 for each in value):
                raise ConfigError(f"{where}: rgba_background_color must be three whole numbers from 0 to 255")
            default = (value[0], value[1], value[2])
    return default


class ResolvedConfig(Struct, frozen=True, kw_only=True):
    """Configuration with all defaults resolved. The core sends it to every client in its READY message."""

    model_path: str
    model_name: str
    model_fingerprint: str
    architecture: str
    device: str
    dtype: str
    max_model_len: int
    vocab_size: int
    embedding_size: int
    """Number of elements of an embedding."""
    is_matryoshka: bool
    """Whether requests may ask for embeddings with fewer `dimensions`."""
    matryoshka_dimensions: tuple[int, ...]
    """Permitted `dimensions`; empty: any number, if `is_matryoshka`."""
    block_size: int
    num_gpu_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int
    max_num_queued_tokens: int | None
    scheduling_policy: Literal["fcfs", "priority"]
    async_scheduling: bool
    epoch: str
    eos_token_ids: tuple[int, ...]
    logits_processors: tuple[str, ...]
    max_logprobs: int
    """-1: the whole vocabulary."""
    logprobs_mode: LogprobsMode
    startup_phases: tuple[tuple[str, float], ...]
    """(phase, seconds) in order, for the start-up table."""
    memory: MemoryBudget
    """The first data-parallel rank's."""
    seed: int | None = None
    has_copies: bool = False
    """Whether other processes run copies of this core, which are given the same requests."""
    parsers: ParserConfig = ParserConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    request_defaults: RequestDefaults = RequestDefaults()
    media: MediaConfig = MediaConfig()
    pooling: PoolingSpec | None = None
    """How the model pools; None: it generates."""
    kv_cache_metrics: bool = False
    rank_memory: tuple[MemoryBudget, ...] = ()
    """With data parallelism the memory budget of each rank."""

    @property
    def tokenizer_path(self) -> str:
        """Directory with tokenizer_config.json and chat template."""
        return self.tokenizer.path or self.model_path

    @property
    def tokenizer_folder(self) -> str:
        """Directory with the tokenizer.json that is loaded."""
        return self.tokenizer.folder or self.tokenizer_path

    @property
    def memory_of_ranks(self) -> tuple[MemoryBudget, ...]:
        """Memory budget of each data-parallel rank."""
        return self.rank_memory or (self.memory,)

    @property
    def data_parallel_size(self) -> int:
        return len(self.memory_of_ranks)
