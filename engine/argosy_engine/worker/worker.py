"""Worker: runs the model on one device. It chooses device and dtype, loads the weights and sizes the KV cache."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import msgspec
import torch

from argosy_engine.attention.kv_cache_spec import KVCacheGroup
from argosy_engine.attention.params import LatentAttentionParams
from argosy_engine.attention.selector import (
    BIDIRECTIONAL_BACKENDS,
    AttentionNeeds,
    BackendChoice,
    backend_names,
    select_backend,
)
from argosy_engine.checkpoint.fingerprint import fingerprint
from argosy_engine.checkpoint.model_folder import hold_stored_model, resolve_model
from argosy_engine.checkpoint.stored_tensors import with_stored_head
from argosy_engine.config import EngineArgs
from argosy_engine.distributed.engine_copies import LaunchedGroups
from argosy_engine.distributed.lockstep import Round
from argosy_engine.distributed.parallel_state import ParallelState, init_parallel_state, single_process
from argosy_engine.errors import ConfigError, EngineError
from argosy_engine.layers.experts import TokenExchange
from argosy_engine.layers.linear_method import has_fp8_products, keeps_integers, packed_forms, packs_mxfp4
from argosy_engine.layers.self_test import layer_self_test, working_backend
from argosy_engine.messages import LoadStep, OnLoadStep, SchedulerOutput, WorkerInfo, ignore_step
from argosy_engine.model_configs.model_config import (
    ModelConfig,
    check_pipeline_parallel,
    check_tensor_parallel,
)
from argosy_engine.model_configs.quantization_config import HEAD_BITS, INTEGER_BITS
from argosy_engine.model_configs.sharding import Sharding, Stage
from argosy_engine.model_configs.transformers_config import TransformersConfig
from argosy_engine.models.config_file import REPLACED_CODE, load_model_config
from argosy_engine.models.loader import LoadedModel, complete_config, load_model
from argosy_engine.native.build import ENVIRONMENT_VARIABLE
from argosy_engine.native.library import Kernels, kernels, kernels_for
from argosy_engine.resolved_config import MemoryBudget
from argosy_engine.sample.logits_processor import load_logits_processors, source_digest
from argosy_engine.sample.sampler import SamplerOptions, self_test
from argosy_engine.sizing.kv_cache_sizing import (
    as_served,
    encoder_cache_bytes,
    estimate_activations,
    estimate_weights,
    find_largest_image,
    plan_memory,
    planned_groups,
    request_blocks,
    wanted_model_len,
)
from argosy_engine.sizing.resources import DeviceMemory, choose_dtype, cpu_memory
from argosy_engine.worker.compilation import LayerCompilation, start_compilation
from argosy_engine.worker.cuda_graphs import graph_sizes, mixed_graph_sizes
from argosy_engine.worker.model_runner import ModelRunner, Pipeline
from argosy_engine.worker.pending_step import PendingStep
from argosy_engine.worker.warm_up import measure_activations, warm_up
from argosy_fetcher.store import ModelHold

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Worker:
    """Owner of one device's weights, KV cache and model runner.

    Call `start` first. Between `sleep` and `wake_up` it holds neither weights nor KV cache and cannot `execute`.

    Args:
        args: arguments of the engine.
        rank: index among the `world_size` workers.
        world_size: number of workers.
        init_method: how the workers find each other (`init_parallel_state`).
        launched: the groups of a worker that a launcher has started, instead; they know its GPU.
        data_rank: of the engine core, if several share experts.
        local_rank: index of its GPU among those that its process sees; default: its rank.
    """

    def __init__(
        self,
        args: EngineArgs,
        rank: int = 0,
        world_size: int = 1,
        init_method: str = "env://",
        launched: LaunchedGroups | None = None,
        data_rank: int = 0,
        local_rank: int | None = None,
    ) -> None:
        self.args = args
        self.rank = rank
        self.world_size = world_size
        self._init_method = init_method
        self._launched = launched
        self.data_rank = data_rank
        self._local_rank = local_rank
        self.on_load_step: OnLoadStep = ignore_step
        """Called as the load advances."""
        self._phases: list[tuple[str, float]] = []
        self._runner: ModelRunner | None = None
        self._exchange: TokenExchange | None = None
        self._hold: ModelHold | None = None
        """Keeps the checkpoint, which `wake_up` reads again, from being removed from the store."""
        self._path: Path
        self._config: ModelConfig
        self._parallel = single_process()
        self._device: torch.device
        self._dtype: torch.dtype
        self._backend: BackendChoice
        self._compilation: LayerCompilation | None = None
        self._sampling: SamplerOptions
        self._budget: MemoryBudget
        self._fingerprint: str

    def start(self) -> WorkerInfo:
        """Load the model and allocate the KV cache.

        Raises:
            ConfigError: the model cannot be served on this device, or not with these flags.
        """
        args = self.args
        with self._phase("device"):
            launched, cores = self._launched, len(os.sched_getaffinity(0))
            local_rank, num_gpus, num_sharing = self.rank, self.world_size, self.world_size
            if launched is not None:
                local_rank = launched.launch.local_rank
                num_gpus = num_sharing = launched.launch.local_world_size
            elif self._local_rank is not None:  # others may see other GPUs
                local_rank, num_gpus = self._local_rank, self._local_rank + 1
            self._device = device = choose_device(args.device, local_rank, num_gpus)
            torch.set_num_threads(args.threads or max(cores // num_sharing, 1))
            if launched is not None:
                self._parallel = launched.parallel_state(device)
            else:
                self._parallel = init_parallel_state(
                    args.parallel_config,
                    self.rank,
                    device,
                    self._init_method,
                    self.data_rank,
                    args.distributed_timeout_seconds,
                )
            memory = cpu_memory() if device.type == "cpu" else _cuda_memory(device)
            self._parallel.world.barrier()  # no worker takes memory before all have seen what is free
        unavailable: dict[str, str] = {}
        if device.type == "cpu":
            with self._phase("kernels"):
                if (loaded_kernels := kernels()) is not None:
                    loaded_kernels.set_threads(torch.get_num_threads())
                else:
                    unavailable["cpu"] = "there are no CPU kernels; an earlier line of this log says why"
        with self._phase("config"):
            self._path = resolve_model(args.model)
            self._hold = hold_stored_model(self._path)
            config = load_model_config(self._path, args.model_use)
            config = as_served(args, config)
            if config.wrapper is not None and config.vision is None and self.rank == 0:
                logger.info(
                    "%s: its text part is served, as with --language-model-only; requests with images, video or sound "
                    "are refused",
                    config.wrapper,
                )
            if config.replaced_code and self.rank == 0:
                logger.warning("%s", REPLACED_CODE)
            if args.load_format != "dummy":
                config = with_stored_head(self._path, config)
            check_tensor_parallel(
                config, args.tensor_parallel_size, args.enable_expert_parallel, args.data_parallel_size
            )
            check_pipeline_parallel(config, args.pipeline_parallel_size)
            self._config = config = complete_config(config, args.tensor_parallel_size)
            self._dtype = dtype = _DTYPES[choose_dtype(args.dtype, config.dtype, device.type)]
            longest = wanted_model_len(args, config)
            if config.computes_whole_prompts:
                self.args = args = args.with_whole_prompts(longest)
            needs = AttentionNeeds(
                device.type,
                str(dtype).removeprefix("torch."),
                args.block_size,
                [layer.of_rank(args.tensor_parallel_size) for layer in config.attention_layers],
                args.has_fp8_kv_cache,
                config.vision is not None and config.vision.is_bidirectional,
            )
            packed = packed_forms(config, args.quantization, dtype, device)
            is_fp8 = has_fp8_products(config, args.quantization, dtype, device)
            if device.type == "cpu":  # the kernels were tested when they were built
                self._backend = select_backend(needs, args.attention_backend, unavailable)
            else:
                _start_kernels_directly(device)  # before the tests of what is launched
                chosen = working_backend(
                    needs,
                    args.attention_backend,
                    unavailable,
                    dtype,
                    device,
                    partial(
                        layer_self_test,
                        config,
                        dtype,
                        device,
                        args.tensor_parallel_size,
                        has_fp8_products=is_fp8,
                        packed=packed,
                        has_mxfp4=packs_mxfp4(config, dtype, device, uses_triton=True),
                    ),
                )
                self._backend = agreed_backend(chosen, self._parallel)
            logger.info("attention backend: %s", self._backend)
            is_bidirectional = config.vision is not None and config.vision.is_bidirectional
            if is_bidirectional and self._backend.name not in BIDIRECTIONAL_BACKENDS:
                logger.warning(
                    "texts alone are served: tokens of an image attend to all of it in %s, which the attention backend "
                    "%s does not compute; --attention-backend triton does",
                    config.wrapper,
                    self._backend.name,
                )
                self._config = config = msgspec.structs.replace(config, vision=None)
            self._sampling = SamplerOptions(
                model_path=str(self._path),
                vocab_size=config.vocab_size,
                logprobs_mode=args.logprobs_mode,
                logits_processors=load_logits_processors(args.logits_processors),
            )
            if self._backend.name == "triton":
                self._sampling = self._with_kernels(self._sampling)
        self._compilation = start_compilation(args, config, dtype, device, self._backend.name)
        with self._phase("weights"):
            before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
            loaded = self._load()
            has_images = config.vision is not None and self._parallel.least(
                int(loaded.images is not None)
            ) == [1]
            if config.vision is not None and not has_images:  # which the first stage has found out
                logger.warning("the checkpoint has no encoder of images: texts alone are served")
                self._config = config = msgspec.structs.replace(config, vision=None)
                loaded = replace(loaded, images=None)
            if device.type == "cuda":
                # An estimate would not know what was quantised.
                weights_bytes = torch.cuda.memory_allocated(device) - before
            else:
                weights_bytes = estimate_weights(
                    config,
                    loaded.elements,
                    dtype.itemsize,
                    device.type,
                    args.tensor_parallel_size,
                    self._stage,
                    args.quantization,
                    keeps_integers=args.load_format != "dummy" and self._keeps_integers(),
                )
                if loaded.images is not None and loaded.images.encoder is not None:
                    weights_bytes += loaded.images.encoder.num_bytes
        if self._compilation is not None:
            with self._phase("compile"):
                if not self._compilation.prepare(loaded.model, dtype, device, self._counted("compile")):
                    self._compilation = None
                    if device.type == "cpu":  # weights are in the layout of our kernels otherwise
                        loaded = self._load()
        with self._phase("fingerprint"):
            self._fingerprint = self._current_fingerprint()
        image = find_largest_image(args, config, self._path) if self._stage.is_first else None
        if device.type == "cpu":
            activation_bytes = estimate_activations(config, args, dtype.itemsize, self._backend.name, image)
        else:
            with self._phase("profile"):
                activation_bytes = measure_activations(
                    lambda blocks, length: self._make_runner(loaded, blocks, length),
                    args,
                    longest,
                    device,
                    memory,
                    self._graph_sizes(),
                    self._mixed_graph_sizes(),
                    image,
                )
        activation_bytes += encoder_cache_bytes(args, config, dtype.itemsize, self._stage)
        with self._phase("kv cache"):
            groups = self._groups()
            budget = plan_memory(
                args,
                config,
                memory,
                groups=groups,
                weights_bytes=weights_bytes,
                activation_bytes=activation_bytes,
            )
            # The same on every worker, because a block id is used on all, and the largest step depends on the length.
            num_blocks, max_model_len, num_states = self._parallel.least(
                budget.num_blocks, budget.max_model_len, budget.num_states
            )
            self._budget = msgspec.structs.replace(
                budget,
                num_blocks=num_blocks,
                max_model_len=max_model_len,
                num_states=num_states,
                request_blocks=request_blocks(groups, max_model_len, args),
            )
            self._runner = self._make_runner(loaded, num_blocks, max_model_len, num_states)
        if device.type == "cuda" and self._backend.name == "triton":
            with self._phase("warm-up"):
                warm_up(
                    self._runner,
                    args,
                    self._budget.max_model_len,
                    self._counted("warm-up"),
                    has_tiles=config.num_routed_experts > 0 or bool(packed) or is_fp8,
                )
        if self._graph_sizes():
            with self._phase("graphs"):
                self._capture_graphs(self._runner)
        return WorkerInfo(
            model_path=str(self._path),
            model_fingerprint=self._fingerprint,
            config=config,
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            memory=self._budget,
            kv_cache_groups=self._runner.groups,
            phases=tuple(self._phases),
        )

    def execute(self, step: SchedulerOutput) -> PendingStep:
        assert self._runner is not None, "the worker is asleep"
        return self._runner.execute(step)

    def lend_experts(self, step: Round) -> None:
        """Compute the experts of this worker for a step of other engine cores, in which this one has no tokens."""
        assert self._runner is not None, "the worker is asleep"
        self._runner.lend_experts(step)

    def sleep(self, level: int) -> None:
        """Free weights and KV cache. No request may be running.

        Level 1 leaves the checkpoint in the page cache, so that `wake_up` is fast; level 2 asks the kernel to drop it.
        """
        self._runner = self._exchange = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        if level >= 2:
            for file in self._path.glob("*.safetensors"):
                with file.open("rb") as handle:
                    os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def wake_up(self) -> None:
        """Load the weights again and allocate an empty KV cache of the same size. No effect on a worker that is awake.

        Every worker has to be called, awake or not: they agree that all can, because graphs are captured together.

        Raises:
            ConfigError: the checkpoint is gone or has changed, or there is not enough memory, of any worker. All stay
                asleep.
        """
        if self._parallel.least(int(self._runner is not None)) == [1]:
            return
        self.sleep(1)  # where only some sleep, so that all capture the same graphs
        try:
            runner, reason = self._reload(), None
        except Exception as error:  # the others have to hear of it, whatever it is
            runner, reason = None, str(error) if isinstance(error, EngineError) else repr(error)
        failure = self._parallel.first_failure(reason)
        if runner is None or failure is not None:
            del runner
            self.sleep(1)
            raise ConfigError(failure)
        if self._graph_sizes():
            self._capture_graphs(runner)
        self._runner = runner

    def _reload(self) -> ModelRunner:
        loaded = self._load()
        if self._current_fingerprint() != self._fingerprint:
            raise ConfigError(
                f"the checkpoint in {self._path} has changed since this engine started; restart it"
            )
        budget = self._budget
        return self._make_runner(loaded, budget.num_blocks, budget.max_model_len, budget.num_states)

    def shutdown(self) -> None:
        self._runner = None
        self._parallel.destroy()
        if self._compilation is not None:
            self._compilation.cache.close()
        if self._hold is not None:
            self._hold.close()

    def _with_kernels(self, options: SamplerOptions) -> SamplerOptions:
        """Let the sampler use our Triton kernels, if they pass their test on the GPU of every worker: all have to draw
        the same tokens."""
        reason = self_test(options, self._dtype, self._device) if self._device.type == "cuda" else None
        if self._parallel.least(int(reason is None)) == [1]:
            return options._replace(kind="kernels")
        logger.warning(
            "sampling runs torch operations, because the kernels failed their test: %s",
            reason or "on another worker's GPU",
        )
        return options

    def _load(self) -> LoadedModel:
        group, cores = self._parallel.tensor, self._parallel.data
        self._exchange = TokenExchange(cores) if cores.size > 1 else None
        return load_model(
            self._path,
            self._config,
            dtype=self._dtype,
            device=self._device,
            attention_backend=self._backend.name,
            has_fp8_kv_cache=self.args.has_fp8_kv_cache,
            quantization=self.args.quantization,
            max_positions=wanted_model_len(self.args, self._config) + 1,
            load_format=self.args.load_format,
            seed=self.args.seed or 0,
            sharding=Sharding(
                group.rank, group.size, self.args.enable_expert_parallel, cores.rank, cores.size
            ),
            communicator=group,
            stage=self._stage,
            exchange=self._exchange,
            compiler=self._compilation.compiler if self._compilation else None,
            on_read=lambda done, total: self.on_load_step(LoadStep("weights", done, total)),
            max_step_tokens=self.args.max_num_batched_tokens,
        )

    @property
    def _stage(self) -> Stage:
        return Stage(self._parallel.pipeline.rank, self._parallel.pipeline.size)

    def _groups(self) -> tuple[KVCacheGroup, ...]:
        """Return the KV cache groups, which are the same on every worker but for the layers in them."""
        itemsize = self._dtype.itemsize
        return planned_groups(
            self._config,
            1 if self.args.has_fp8_kv_cache else itemsize,
            self.args.block_size,
            self._parallel.tensor.size,
            self._stage,
            state_itemsize=itemsize,
        )

    def _current_fingerprint(self) -> str:
        """Compute the fingerprint of the checkpoint on disk and the settings that determine outputs."""
        args = self.args
        is_dummy = args.load_format == "dummy"
        settings = (
            repr(self._config),
            str(self._dtype),
            repr(args.logits_processors),
            *map(source_digest, self._sampling.logits_processors),
            args.logprobs_mode,
            f"dummy {args.seed or 0}" if is_dummy else "",
            *(["fp8 kv cache"] if args.has_fp8_kv_cache else []),
            *(("kernels draw",) if self._sampling.kind == "kernels" else ()),
            *([f"quantization {args.quantization}"] if args.quantization else []),
            *([f"head int{HEAD_BITS}"] if args.quantization in INTEGER_BITS else []),
            # Scales multiply sums, which rounds otherwise than widened weights do.
            *(["packed integers"] if not is_dummy and self._keeps_integers() else []),
            # Replicas on unlike CPUs must not continue each other's streams.
            *([f"cpu kernels {loaded.variant}"] if (loaded := self._bf16_kernels()) is not None else []),
            *([setting] if (setting := args.request_defaults.setting()) else []),
            *(
                ["images by transformers " + version("transformers")]
                if self._config.vision is not None
                else []
            ),
        )
        return fingerprint(self._path, settings, has_weights=not is_dummy)

    def _keeps_integers(self) -> bool:
        uses_triton = self._backend.uses_triton
        return keeps_integers(self._config, self._dtype, self._device, uses_triton=uses_triton)

    def _bf16_kernels(self) -> Kernels | None:
        return kernels_for(self._device, self._dtype) if self._dtype is torch.bfloat16 else None

    def _graph_sizes(self) -> list[int]:
        """Return the decode steps to capture as CUDA graphs, by number of requests; empty: all run eagerly."""
        if self._config.computes_whole_prompts:
            return []  # there are no decodes
        if self._config.state_layers and isinstance(self._config, TransformersConfig):
            return []  # which requests are computed together depends on where each begins
        return graph_sizes(self.args, self._device.type, self._backend.name)

    def _mixed_graph_sizes(self) -> list[int]:
        """Return the mixed steps to capture, by number of tokens."""
        config, reason = self._config, None
        if isinstance(config, TransformersConfig):
            reason = "transformers' code may depend on the lengths of prompts"
        elif config.vision is not None:
            reason = "images change what prompts read"
        elif config.pooling is not None:
            reason = "vectors outlive the step that computes them"
        elif config.state_layers:
            reason = "layers with states divide prompts by their lengths"
        elif any(isinstance(layer, LatentAttentionParams) for layer in config.attention_layers):
            reason = "latent attention computes long prompts one by one"
        elif self._exchange is not None:
            reason = "engine cores that share experts agree on decodes only"
        return mixed_graph_sizes(self.args, self._device.type, self._backend.name, reason)

    def _capture_graphs(self, runner: ModelRunner) -> None:
        runner.capture_graphs(
            self._graph_sizes(), on_captured=self._counted("graphs"), mixed=self._mixed_graph_sizes()
        )

    def _make_runner(
        self, loaded: LoadedModel, num_blocks: int, max_model_len: int, num_states: int = 2
    ) -> ModelRunner:
        group = self._parallel.pipeline
        pipeline = None
        if group.size > 1:
            vision, own = self._config.vision, self._stage.layers(self._config.num_hidden_layers)
            pipeline = Pipeline(
                loaded.model,
                group,
                self._config.hidden_size,
                self._dtype,
                self._device,
                max_num_tokens=max(self.args.max_num_batched_tokens, self.args.max_num_seqs),
                num_deepstack=0 if vision is None else max(vision.num_deepstack - own.start, 0),
            )
        return ModelRunner(
            loaded.model,
            self._config,
            num_blocks=num_blocks,
            block_size=self.args.block_size,
            max_num_seqs=self.args.max_num_seqs,
            max_num_batched_tokens=self.args.max_num_batched_tokens,
            max_model_len=max_model_len,
            device=self._device,
            sampling=self._sampling,
            groups=self._groups(),
            pipeline=pipeline,
            exchange=self._exchange,
            can_lose_steps=self._parallel.world.size == 1,
            # Padding is exchanged with these ranks, but not between stages.
            num_states=num_states,
            requires_graphs=max(self._parallel.tensor.size, self._parallel.data.size) > 1,
            images=loaded.images,
            ranks=self._parallel.tensor,
            shares_images=self.args.mm_encoder_tp_mode == "data",
        )

    def _counted(self, phase: str) -> Callable[[], None]:
        """Return a function to call whenever a part of a phase is done."""
        counts = itertools.count(1)
        return lambda: self.on_load_step(LoadStep(phase, next(counts)))

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        self.on_load_step(LoadStep(name))
        yield
        self._phases.append((name, time.perf_counter() - started))


def agreed_backend(choice: BackendChoice, parallel: ParallelState) -> BackendChoice:
    """Return the attention backend that every worker can use: of their choices the one that is least preferred."""
    names = backend_names()
    (last,) = parallel.least(-names.index(choice.name))
    if names[-last] == choice.name:
        return choice
    return BackendChoice(names[-last], {**choice.refused, choice.name: "another worker cannot use it"})


def choose_device(wanted: str, rank: int, world_size: int) -> torch.device:
    """Return the CPU, or the rank's GPU, which becomes the default device of this process.

    Raises:
        ConfigError: `cuda` was asked for and there is no GPU, or there are fewer GPUs than workers.
    """
    has_cuda = wanted != "cpu" and torch.cuda.is_available()
    if not has_cuda:
        if wanted == "cuda":
            raise ConfigError("--device cuda: torch sees no CUDA device; use --device auto or cpu")
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count < world_size:
        raise ConfigError(
            f"{world_size} workers need a GPU each, and torch sees {count}; use a smaller --tensor-parallel-size, or "
            "--device cpu"
        )
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def _start_kernels_directly(device: torch.device) -> None:
    """Start our Triton kernels by the driver, where that works; see `triton_kernels.direct_launch`."""
    if os.environ.get(ENVIRONMENT_VARIABLE) == "0":
        logger.info("kernels are started by Triton's launcher (%s=0)", ENVIRONMENT_VARIABLE)
    elif find_spec("triton") is not None:
        from argosy_engine.triton_kernels.direct_launch import use_direct_launches

        use_direct_launches(device)


def _cuda_memory(device: torch.device) -> DeviceMemory:
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory("cuda", torch.cuda.get_device_name(device), total, free)
