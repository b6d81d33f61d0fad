"""Media worker: decodes one image and runs the model's processor on it, in a process that may be killed.
`python -m argosy_engine.frontend.media.worker FD PARENT` is the server that forks one such process for each image.

The server imports transformers and loads the model's processor once, then forks. An image that crashes a decoder, or
that unpacks into more memory or time than it may take, thus ends only its own process, and leaves nothing behind for
the next one. It is a fork server (`osproc`), which ends with the API process.

The client (`pool`) sends `ProcessorArgs`, and gets a `ProcessorInfo`, or why there is no processor. For each job it
sends an `ImageJob` and the image, and gets `ImageResult` or what is wrong with the image. All are msgpack, preceded by
their length.

torch is kept out: it takes four seconds and 300 MB to import, transformers' processors for PIL need none of it, and
what they make of an image is the same on every machine then.

Invariants: no code of a checkpoint runs (`trust_remote_code=False`, and classes of transformers only); no file is
fetched; a tensor leaves as bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct

from argosy_engine.checkpoint.fingerprint import OF_IMAGES
from argosy_engine.core.proc.media_channel import write_file
from argosy_engine.errors import installation
from argosy_engine.messages import MediaTensor
from argosy_engine.model_configs.vision_config import MAX_RESULT_BYTES
from argosy_engine.osproc import (
    fork_for_jobs,
    limit_memory,
    receive_exactly,
    receive_framed,
    run_fork_server,
)

DONE: Final = b"D"
"""Answer: an `ImageResult`, or the server's `ProcessorInfo`."""
REFUSED: Final = b"R"
"""Answer: what is wrong with the image, or the arguments, as a text for the client."""
FAULT: Final = b"F"
"""Answer: why no image can be processed, or what is wrong with the flag's arguments, as a text."""

MAX_PIXELS: Final = 50_000_000
"""Of a decoded image. Larger ones are photographs of satellites, or bombs."""
MAX_ASPECT: Final = 200
"""Longer side by the shorter one, as Qwen's processors have it."""
MAX_MEMORY_BYTES: Final = 2 << 30
"""Memory of one job, beyond what the process has at its start: an image of `MAX_PIXELS`, four copies of it while it is
turned, filled and resized, and what is made of it."""
NICENESS: Final = 5
"""Below the API process, whose event loop must not wait for images."""
_TEXT_INPUTS: Final = frozenset(
    ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "offset_mapping", "length")
)
"""Outputs of processors that are about the text."""

_PROBES: Final = ((64, 48), (900, 600))
"""Sizes of the images that a processor is tried with."""
_OWN_ARGUMENTS: Final = frozenset(("return_tensors", "device", "data_format", "input_data_format"))
"""Of processors, that are not a user's."""
_AROUND: Final = {
    "<|image_pad|>": ("<|vision_start|>", "<|vision_end|>"),
    "<|image|>": ("<|begin_of_image|>", "<|end_of_image|>"),
}
"""What Qwen's and GLM's models have around an image, by its placeholder."""

logger = logging.getLogger("argosy.frontend")


class ProcessorArgs(Struct, frozen=True):
    model_path: str
    model_type: str
    tokenizer_folder: str
    image_token_id: int
    kwargs: dict[str, Any]
    """`--mm-processor-kwargs`."""
    passes_files: bool = False
    """Whether tensors go in files (`core.proc.media_channel`)."""


class ProcessorInfo(Struct, frozen=True):
    """What the renderer needs to know of a processor."""

    name: str
    image_token: str
    """What stands for an image in the text of a chat."""
    image_text: str
    """What stands for it where no template of images writes it: as `image_token`, with what is around it."""
    placeholder_id: int
    """The token of `image_token`."""
    depends_on_others: bool
    """Whether an image becomes other tokens if there are several in a prompt (LLaVA-OneVision)."""
    marker_ids: list[int]
    """All tokens that images become, of those that were tried."""
    before: str = ""
    """Text that the processor puts before each image, whose tokens depend on the text before that (Gemma 3)."""
    after: str = ""
    """Likewise, behind it."""
    merge_size: int = 1
    """Patches by whose square the encoder has fewer outputs, for models with a grid."""


class ImageJob(Struct, frozen=True):
    deadline_s: float
    num_bytes: int
    format: str
    is_among_others: bool
    kwargs: dict[str, Any]
    """Arguments for the processor, over those of `ProcessorArgs`."""
    background: tuple[int, int, int]
    """Red, green and blue behind transparent pixels."""


class ImageResult(Struct, frozen=True):
    token_ids: list[int]
    num_embeds: int
    pixels: bytes
    """Digest of the decoded image."""
    inputs: dict[str, MediaTensor]


class ImageRefused(Exception):
    """The image, or what is asked of it, cannot be processed; the message is for the client."""


class BadArguments(Exception):
    """The processor cannot be used with `--mm-processor-kwargs`."""


class Processor(NamedTuple):
    """A model's processor of transformers, and how it is asked."""

    call: Any
    info: ProcessorInfo
    image_token_id: int
    kwargs: dict[str, Any]
    edges: tuple[list[int], list[int]] = ([], [])
    """Tokens of the texts before and after each image."""

    def process(self, image: Any, kwargs: Mapping[str, Any], *, is_among_others: bool) -> ImageResult:
        """Return the tokens and tensors of an image (PIL, RGB).

        Args:
            is_among_others: whether the prompt has further images.

        Raises:
            ImageRefused: the processor does.
        """
        count = 2 if is_among_others and self.info.depends_on_others else 1
        outputs = self._run([image] * count, {**self.kwargs, **self.arguments(kwargs)})
        token_ids = [int(token_id) for token_id in outputs.pop("input_ids")]
        inputs = {}
        for name, value in outputs.items():
            if count > 1 and value.shape[:1] == (count,):
                value = value[:1]  # of the first image; the other is the same once more
            inputs[name] = tensor_of(value)
        if sum(len(tensor.data) for tensor in inputs.values()) > MAX_RESULT_BYTES:
            raise ImageRefused(
                f"becomes more than {MAX_RESULT_BYTES >> 20} MiB of patches; send a smaller one, or bound them by the "
                "processor's arguments (--mm-processor-kwargs)"
            )
        token_ids = token_ids[: len(token_ids) // count]
        first, last = self.edges
        if token_ids[: len(first)] != first or token_ids[len(token_ids) - len(last) :] != last:
            raise ImageRefused(
                "gets another text around it than other images; leave out the arguments that crop it"
            )
        token_ids = token_ids[len(first) : len(token_ids) - len(last)]
        return ImageResult(token_ids, token_ids.count(self.image_token_id), b"", inputs)

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments as the processor takes them.

        Raises:
            ImageRefused: it has no such argument; it would leave it out.
        """
        image_processor = self.call.image_processor
        known = set(image_processor.valid_kwargs.__annotations__) - _OWN_ARGUMENTS
        for name in given:
            if name not in known:
                raise ImageRefused(
                    f"has no argument {name[:64]!r} of {self.info.name}; there is {', '.join(sorted(known))}"
                )
        kwargs = dict(given)
        pixels = {
            "shortest_edge": kwargs.pop("min_pixels", None),
            "longest_edge": kwargs.pop("max_pixels", None),
        }
        if any(value is not None for value in pixels.values()):  # the older names, which transformers drops
            own = image_processor.size
            kwargs["size"] = {name: own[name] if value is None else value for name, value in pixels.items()}
        return kwargs

    def _run(self, images: list[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        import numpy as np

        outputs = self.call(
            images=[images],
            text=[self.info.image_token * len(images)],
            add_special_tokens=False,
            return_tensors="np",
            **kwargs,
        )
        found = {name: np.asarray(value) for name, value in outputs.items() if name not in _TEXT_INPUTS}
        return {**found, "input_ids": np.asarray(outputs["input_ids"])[0]}


def tensor_of(value: Any) -> MediaTensor:
    """Return a numpy array as it is sent.

    Raises:
        ImageRefused: it is not of a dtype that is.
    """
    import numpy as np

    if value.dtype == np.float64:
        value = value.astype(np.float32)
    if value.dtype.name not in ("float32", "float16", "uint8", "int32", "int64", "bool"):
        raise ImageRefused(f"becomes numbers of type {value.dtype.name}, which no encoder reads")
    data: Any = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    return MediaTensor(value.dtype.name, tuple(value.shape), data)


def load_processor(args: ProcessorArgs) -> Processor:
    """Load a model's processor.

    Raises:
        ImageRefused: the folder has none, transformers has not its class, or its prompts cannot be made piece by piece.
        BadArguments: it does not take those of the flag.
        OSError, ValueError, ImportError: transformers cannot load it.
    """
    folder = Path(args.model_path)
    if not any((folder / name).is_file() for name in OF_IMAGES):
        raise ImageRefused(f"the model's folder has neither {' nor '.join(OF_IMAGES)}")
    processor = _construct(args)
    token = getattr(processor, "image_token", None)
    placeholder_id = tokenizer_id(processor.tokenizer, token) if isinstance(token, str) else None
    if placeholder_id is None:
        raise ImageRefused("its processor has no token that stands for an image")
    assert isinstance(token, str)
    name = type(processor).__mro__[1].__name__
    around = [tokenizer_id(processor.tokenizer, each) for each in _AROUND.get(token, ())]
    text = "".join((_AROUND[token][0], token, _AROUND[token][1])) if around and None not in around else token
    merge_size = int(getattr(processor.image_processor, "merge_size", 1))
    info = ProcessorInfo(name, token, text, placeholder_id, False, [], merge_size=merge_size)
    made = Processor(processor, info, args.image_token_id, {})
    try:
        made = made._replace(kwargs=made.arguments(args.kwargs))
        made = _probed(made, processor.tokenizer)
    except ImageRefused as error:
        if args.kwargs:
            raise BadArguments(str(error)) from None
        raise
    except Exception as error:
        if args.kwargs:
            raise BadArguments(f"{type(error).__name__}: {str(error)[:512]}") from None
        raise
    return made


def tokenizer_id(tokenizer: Any, token: str) -> int | None:
    """Return the id of a token that was added to a vocabulary; None if there is none."""
    found = tokenizer.convert_tokens_to_ids(token)
    return found if isinstance(found, int) and found in tokenizer.added_tokens_decoder else None


def _probed(processor: Processor, tokenizer: Any) -> Processor:
    """Find out by examples whether images can be processed one by one, and which tokens they become.

    What is added to a vocabulary splits a text, so the tokens between the first and the last added one of an image are
    the same in every text. What is around them is text of the prompt (`ProcessorInfo.before`).

    Raises:
        ImageRefused: they cannot.
    """
    from PIL import Image

    info = processor.info
    markers: set[int] = {info.placeholder_id, processor.image_token_id}
    depends = False
    for size in _PROBES:
        image = Image.new("RGB", size, (90, 120, 150))
        whole = _numbers(processor, [image])
        added = tokenizer.added_tokens_decoder
        places = [index for index, token_id in enumerate(whole) if token_id in added]
        if not places:
            raise ImageRefused("the tokens of an image in a prompt depend on the text around it")
        alone = whole[places[0] : places[-1] + 1]
        edges = whole[: places[0]], whole[places[-1] + 1 :]
        if size == _PROBES[0]:
            processor = processor._replace(edges=edges)
        elif edges != processor.edges:
            raise ImageRefused("the text around an image depends on its size")
        first, last, own = (added.get(each) for each in (alone[0], alone[-1], info.placeholder_id))
        if first is None or last is None or own is None:
            raise ImageRefused("the tokens of an image in a prompt depend on the text around it")
        if first.lstrip != own.lstrip or last.rstrip != own.rstrip:
            raise ImageRefused("the white space around an image depends on what it becomes")
        if processor.image_token_id not in alone:
            raise ImageRefused("its images become none of the tokens that config.json says")
        pair = _numbers(processor, [image, image])
        three = _numbers(processor, [image, image, image])
        among = alone if any(edges) else pair[: len(pair) // 2]
        is_once = _count(among, pair) == 2 and _count(among, three) == 3
        if not is_once or (not any(edges) and (pair != among * 2 or three != among * 3)):
            raise ImageRefused("the tokens of an image depend on how many there are")
        depends = depends or alone != among
        markers.update(token_id for token_id in (*alone, *among) if token_id in added)
    before, after = (tokenizer.decode(ids) if ids else "" for ids in processor.edges)
    for text, ids in zip((before, after), processor.edges, strict=True):
        if text and tokenizer(text, add_special_tokens=False)["input_ids"] != ids:
            raise ImageRefused("the text around an image is none that its tokens say")
    info = msgspec.structs.replace(
        info, depends_on_others=depends, marker_ids=sorted(markers), before=before, after=after
    )
    return processor._replace(info=info)


def _count(part: list[int], whole: list[int]) -> int:
    """Return how often a list is in another one, without overlaps."""
    found = start = 0
    while start <= len(whole) - len(part):
        is_there = whole[start : start + len(part)] == part
        found += is_there
        start += len(part) if is_there else 1
    return found


def _numbers(processor: Processor, images: list[Any]) -> list[int]:
    return [int(token_id) for token_id in processor._run(images, processor.kwargs)["input_ids"]]


def hide_torch() -> None:
    """Let transformers find no torch in this process, and this process and its children no hub."""
    for name in ("torch", "torchvision"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ[name] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def _construct(args: ProcessorArgs) -> Any:
    """Make transformers' processor without the parts for videos and sound, which are not served."""
    from transformers import AutoImageProcessor, TokenizersBackend

    processor_class = _class_of(args)

    class OnlyImages(processor_class):  # type: ignore[valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is None and argument_name not in ("image_processor", "tokenizer"):
                return type(None)
            return super().check_argument_for_proper_class(argument_name, argument)

    own = {"local_files_only": True, "trust_remote_code": False}
    parts = {
        "image_processor": AutoImageProcessor.from_pretrained(args.model_path, backend="pil", **own),
        "tokenizer": TokenizersBackend.from_pretrained(args.tokenizer_folder, local_files_only=True),
    }
    fields, _ = processor_class.get_processor_dict(args.model_path, local_files_only=True)
    arguments = [parts.get(name) for name in processor_class.get_attributes()]
    return OnlyImages.from_args_and_dict(arguments, fields)


def _class_of(args: ProcessorArgs) -> Any:
    """Return transformers' class of a model's processor: the one that its files name, else that of its type."""
    auto: Any = importlib.import_module("transformers.models.auto.processing_auto")
    names: Mapping[str, str | None] = auto.PROCESSOR_MAPPING_NAMES
    name = None
    for file in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        path = Path(args.model_path) / file
        if name is None and path.is_file():
            name = msgspec.json.decode(path.read_bytes(), type=dict[str, Any]).get("processor_class")
    if name not in names.values():
        name = names.get(args.model_type)
    if name is None:
        raise ImageRefused(f"transformers has no processor for models of type {args.model_type}")
    plain = name.lower().replace("_", "").removesuffix("processor")
    for model_type in names:
        if model_type.replace("_", "") == plain:
            if model_type == "pixtral":  # whose class needs one function, which both modules have
                pil = importlib.import_module("transformers.models.pixtral.image_processing_pil_pixtral")
                sys.modules["transformers.models.pixtral.image_processing_pixtral"] = pil
            module: Any = importlib.import_module(f"transformers.models.{model_type}.processing_{model_type}")
            if hasattr(module, "num2words") and module.num2words is None:
                module.num2words = _no_words  # of videos, whose lengths it writes in words
            return getattr(module, name)
    raise ImageRefused(f"transformers has no {name}")


def _no_words(number: int) -> str:
    raise ImageRefused("has parts that are no images")


def decode(data: bytes, kind: str, background: tuple[int, int, int]) -> tuple[Any, bytes]:
    """Return an image (PIL, RGB, turned as its EXIF data say; of an animation the first frame) and the digest of it.

    Raises:
        ImageRefused: it is damaged, or too large.
    """
    import warnings

    from PIL import Image, ImageOps

    warnings.simplefilter("error", Image.DecompressionBombWarning)
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS
    try:
        image: Any = Image.open(io.BytesIO(data), formats=[kind.upper()])
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise ImageRefused(
                f"has {width} x {height} pixels, more than {MAX_PIXELS} in all; send a smaller one"
            )
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise ImageRefused(
                f"has {width} x {height} pixels: one side is more than {MAX_ASPECT} times the other"
            )
        image.load()
        image = ImageOps.exif_transpose(image)
        image = _on_background(image, background)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ImageRefused(f"has more than {MAX_PIXELS} pixels; send a smaller one") from None
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, AttributeError, OverflowError,
            ZeroDivisionError):  # fmt: skip  # of Pillow's readers on damaged files
        raise ImageRefused("is damaged, or cut off: it cannot be decoded") from None
    digest = hashlib.blake2b(f"{image.mode} {image.size[0]} {image.size[1]} ".encode(), digest_size=16)
    digest.update(image.tobytes())
    return image, digest.digest()


def _on_background(image: Any, background: tuple[int, int, int]) -> Any:
    """Return an image in RGB, its transparent pixels on a background, as vLLM does."""
    from PIL import Image

    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    filled = Image.new("RGB", image.size, background)
    filled.paste(image, mask=image.getchannel("A"))
    return filled


def main() -> None:
    run_fork_server("argosy engine media server", serve)


def serve(control: socket.socket) -> None:
    """Load the processor, and fork for each job until the other end of the socket is closed."""
    args = msgspec.msgpack.decode(receive_framed(control), type=ProcessorArgs)
    hide_torch()
    try:
        processor = load_processor(args)
    except ImageRefused as error:
        answer(control, REFUSED, str(error))
        return
    except BadArguments as error:
        answer(control, FAULT, str(error))
        return
    except ImportError as error:
        answer(
            control, REFUSED, f"{error}; images need the extra `transformers`: {installation('transformers')}"
        )
        return
    except Exception as error:  # whatever transformers makes of the files
        logger.exception("the model's processor cannot be loaded")
        answer(control, REFUSED, f"its processor cannot be loaded ({type(error).__name__})")
        return
    answer(control, DONE, processor.info)
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    fork_for_jobs(
        control,
        lambda job: _work(job, processor, passes_files=args.passes_files),
        lambda job, reason: answer(job, FAULT, reason),
    )


def _work(connection: socket.socket, processor: Processor, *, passes_files: bool) -> None:
    """Run one job in a forked process."""
    job = msgspec.msgpack.decode(receive_framed(connection), type=ImageJob)
    # SIGALRM's default action kills the process without needing the interpreter.
    signal.setitimer(signal.ITIMER_REAL, job.deadline_s)
    seconds = int(job.deadline_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    data = receive_exactly(connection, job.num_bytes)
    limit_memory(MAX_MEMORY_BYTES)
    try:
        image, digest = decode(data, job.format, job.background)
        result = processor.process(image, job.kwargs, is_among_others=job.is_among_others)
        made: tuple[bytes, Any] = DONE, msgspec.structs.replace(result, pixels=digest)
    except ImageRefused as error:
        made = REFUSED, str(error)
    except MemoryError:
        made = (
            REFUSED,
            f"takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory to process; send a smaller one",
        )
    except Exception as error:  # of processors, on arguments and sizes that they do not take
        made = REFUSED, f"is refused by the model's processor: {type(error).__name__}: {str(error)[:256]}"
    descriptors: list[int] = []
    if passes_files and made[0] == DONE:
        with contextlib.suppress(OSError):  # of no memory for files
            inputs, descriptor = write_file(made[1].inputs)
            made, descriptors = (DONE, msgspec.structs.replace(made[1], inputs=inputs)), [descriptor]
    with contextlib.suppress(OSError):
        answer(connection, *made, descriptors)


def answer(connection: socket.socket, kind: bytes, value: Any, descriptors: Sequence[int] = ()) -> None:
    """Send a kind of answer, and the answer preceded by its length.

    Args:
        descriptors: at most one, which goes with the kind.
    """
    payload = msgspec.msgpack.encode(value)
    head = kind + len(payload).to_bytes(4, "little")
    if descriptors:
        socket.send_fds(connection, [head[:1]], descriptors)
        head = head[1:]
    connection.sendall(head)
    connection.sendall(payload)


if __name__ == "__main__":
    main()
