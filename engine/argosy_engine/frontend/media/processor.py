"""MediaProcessor: the images of chats as the model gets them, each loaded, decoded and processed once.

    chat with image parts -> loader: bytes -> cache, or pool: tokens and tensors -> `ChatImages`, for the renderer

What a key of the cache covers: the bytes of the image as they were sent, the processor's arguments, the background, and
the request's cache salt, so that nobody finds out by the time that it takes what holders of another salt have sent. The
identifier of a feature covers the pixels with their size and mode instead of the bytes (CVE-2025-46722), and the same.

A part may have a `uuid`: then a later part of the same tenant and salt may name it without sending the image again, as
long as the image is in the cache. A part with a uuid and an image is always processed by its content, so that a uuid
never stands for another image than the one that came with it last.

Agents send their whole history with each request, and images of it may be gone, or be none that can be read here. So an
image of what is replayed (`skipped_content.is_replayed`) never refuses a request: the model gets a note in its place.
One of the user's newest message does.

Bounds: images of a request in number (`--limit-mm-per-prompt`), tokens (the model's context) and bytes of tensors; the
cache in bytes; what waits and runs is bounded by `pool`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import msgspec

from argosy_engine.errors import ConfigError, InvalidRequest, PromptTooLong, ResourceBusy
from argosy_engine.fair_shares import TenantShares
from argosy_engine.frontend.media.loader import MediaLoader
from argosy_engine.frontend.media.pool import MAX_PROCESSES, RETRY_S, MediaPool, NoProcessor
from argosy_engine.frontend.media.worker import ImageJob, ImageResult, ProcessorArgs, ProcessorInfo
from argosy_engine.messages import MediaTensor, MultimodalFeature
from argosy_engine.resolved_config import MediaConfig, ResolvedConfig, image_background
from argosy_protocol.openai import BatchChatCompletionRequest, ChatCompletionRequest, ChatMessage
from argosy_protocol.skipped_content import is_replayed, newest_message

logger = logging.getLogger("argosy.frontend")

MAX_REQUEST_BYTES: Final = 512 << 20
"""Tensors of all images of a request. 16,000 tokens of images have about 300 MB."""
MAX_HELD_BYTES: Final = 2 << 30
"""Images that requests hold in one API process, besides those of the cache, until they are rendered."""
MAX_UUID: Final = 256
MAX_UUIDS: Final = 1 << 16
"""That are kept, a few megabytes."""
_HASHED_INLINE: Final = 1 << 20
_INLINE_PARTS: Final = 4096
"""Of messages, that are looked at on the event loop."""
_TOKEN_BYTES: Final = 36
"""Of one token id in a list."""

_encoder = msgspec.json.Encoder(order="deterministic")


class ProcessedImage(msgspec.Struct, frozen=True, weakref=True):
    """An image as the model gets it, wherever it stands in a prompt."""

    identifier: str
    token_ids: list[int]
    """What takes the place of its placeholder."""
    num_embeds: int
    grid: tuple[int, ...]
    inputs: dict[str, MediaTensor]

    @property
    def num_bytes(self) -> int:
        return sum(len(tensor.data) for tensor in self.inputs.values()) + _TOKEN_BYTES * len(self.token_ids)

    def feature(self, offset: int) -> MultimodalFeature:
        """Return it as the core gets it.

        Args:
            offset: position of its first token.
        """
        return MultimodalFeature(
            "image", self.identifier, offset, len(self.token_ids), self.num_embeds, self.grid, self.inputs
        )


class ChatImages:
    """The images of a request, by the parts of its messages that have them."""

    def __init__(
        self,
        info: ProcessorInfo,
        images: Mapping[int, ProcessedImage],
        num_url_chars: int = 0,
        num_left_out: int = 0,
    ) -> None:
        self.info = info
        self.num_left_out = num_left_out
        """Images of what is replayed that cannot be loaded."""
        self._images = images
        """By the identities of the parts, which the request holds."""
        self.num_url_chars = num_url_chars
        """Of the URLs, data included, which no text of a prompt has."""

    def of(self, part: Mapping[str, Any]) -> ProcessedImage | None:
        """Return the image of a message's part; None if it has none."""
        return self._images.get(id(part))

    def __len__(self) -> int:
        return len(self._images)


class _ImagePart(NamedTuple):
    part: dict[str, Any]
    where: str
    is_replayed: bool


class _Options(NamedTuple):
    """What the images of one request have in common."""

    kwargs: dict[str, Any]
    background: tuple[int, int, int]
    is_among_others: bool
    salt: str
    tenant: str


class _Cache:
    """Processed images by key, the least recently used dropped first, and what uuids stand for. Thread-safe.

    Invariant: the bytes of its images are at most `max_bytes`.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._images: OrderedDict[bytes, ProcessedImage] = OrderedDict()
        self._keys: OrderedDict[tuple[str, str, str], bytes] = OrderedDict()
        """Of the images that uuids stand for, by tenant, salt and uuid, without what a request adds to a key."""
        self._lock = threading.Lock()

    def get(self, key: bytes) -> ProcessedImage | None:
        with self._lock:
            image = self._images.get(key)
            if image is not None:
                self._images.move_to_end(key)
            return image

    def put(self, key: bytes, image: ProcessedImage) -> None:
        size = image.num_bytes
        if size > self._max_bytes:
            return
        with self._lock:
            if key in self._images:
                return
            self._images[key] = image
            self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                _, dropped = self._images.popitem(last=False)
                self._num_bytes -= dropped.num_bytes

    def name(self, uuid: tuple[str, str, str], content: bytes) -> None:
        """Let a uuid stand for the content of an image."""
        with self._lock:
            self._keys[uuid] = content
            self._keys.move_to_end(uuid)
            if len(self._keys) > MAX_UUIDS:
                self._keys.popitem(last=False)

    def named(self, uuid: tuple[str, str, str]) -> bytes | None:
        with self._lock:
            return self._keys.get(uuid)


class MediaProcessor:
    """
    Args:
        info: of the model's processor.
    """

    def __init__(
        self, config: ResolvedConfig, pool: MediaPool, info: ProcessorInfo, loader: MediaLoader | None = None
    ) -> None:
        media = config.media
        self.info = info
        self._media: MediaConfig = media
        self._pool = pool
        self._loader = loader or MediaLoader(media.allowed_domains, media.allowed_path)
        self._max_tokens = config.max_model_len
        self._cache = _Cache(media.cache_bytes)
        self.num_queries = 0
        """Images of requests that were looked up in the cache, and of them those that were there."""
        self.num_hits = 0
        self._held = TenantShares(media.cache_bytes + MAX_HELD_BYTES)
        """Bytes of the images that somebody holds, the cache included, and of those in `_released`."""
        self._released: deque[tuple[str, int]] = deque()
        """Tenants and bytes of images that nobody holds any more; any thread adds them."""

    @classmethod
    def of(cls, config: ResolvedConfig, *, has_mistral_tokenizer: bool = False) -> MediaProcessor | None:
        """Start the process that handles images; None, with a line in the log, if the model gets none. Blocks until
        the process is ready, some seconds.

        Raises:
            ConfigError: the processor does not take `--mm-processor-kwargs`.
        """
        media = config.media
        if media.vision is None:
            if media.why_blind:
                logger.info("images are turned off by %s", media.why_blind)
            return None
        if has_mistral_tokenizer:
            logger.warning(
                "the model is served for texts only: mistral-common writes its chats; --tokenizer-mode hf takes a "
                "tokenizer.json, with which images are served"
            )
            return None
        pool = MediaPool(processor_args(config), num_processes())
        try:
            info = pool.info()
        except NoProcessor as error:
            pool.close()
            logger.warning("the model is served for texts only: %s", error)
            return None
        except ConfigError:
            pool.close()
            raise
        logger.info("images: %s of transformers, up to %d in a prompt", info.name, media.max_images)
        return cls(config, pool, info)

    async def load(
        self,
        request: ChatCompletionRequest,
        tenant: str = "",
        is_seen: Callable[[str], bool] = lambda _: True,
    ) -> ChatImages | None:
        """Load and process the images of a chat, or of a batch of chats; None if it has none.

        Args:
            tenant: the request's tenant (`headers.TENANT`).
            is_seen: whether the chat template renders images of a role.

        Raises:
            InvalidRequest: an image of the user's newest message cannot be loaded or processed, or there are too many.
            PromptTooLong: they have more tokens than the model's context.
            EngineBusy, RequestFailed: as `MediaPool.run`.
        """
        chats, is_batch = _chats(request), isinstance(request, BatchChatCompletionRequest)
        found: dict[int, ProcessedImage] = {}
        kwargs, background = self._arguments(request)
        num_bytes = num_url_chars = num_left_out = 0
        is_in_thread = is_long(request)
        for index, messages in enumerate(chats):
            listing = _image_parts(messages, f"messages[{index}]" if is_batch else "messages", is_seen)
            parts = await asyncio.to_thread(list, listing) if is_in_thread else list(listing)
            if len(parts) > self._media.max_images:
                raise InvalidRequest(
                    f"the messages have {len(parts)} images, at most {self._media.max_images} are taken "
                    "(--limit-mm-per-prompt)",
                    param="messages",
                )
            options = _Options(
                kwargs,
                background,
                len(parts) > 1 and self.info.depends_on_others,
                request.cache_salt or "",
                tenant,
            )
            for part, image in zip(parts, await self._load_all(parts, options, num_bytes), strict=True):
                if image is None:
                    num_left_out += 1
                else:
                    found[id(part.part)] = image
                    num_url_chars += len(_url_of(part) or "")
            num_bytes = sum(image.num_bytes for image in {id(each): each for each in found.values()}.values())
        if not found and not num_left_out:
            return None
        return ChatImages(self.info, found, num_url_chars, num_left_out)

    def close(self) -> None:
        self._pool.close()

    def _arguments(self, request: ChatCompletionRequest) -> tuple[dict[str, Any], tuple[int, int, int]]:
        """Return the request's arguments for the processor, and its background."""
        if request.mm_processor_kwargs and not self._media.trusts_request_kwargs:
            raise InvalidRequest(
                "mm_processor_kwargs is refused: it needs an engine that was started with --trust-request-mm-kwargs",
                param="mm_processor_kwargs",
            )
        try:
            background = image_background(request.media_io_kwargs, "media_io_kwargs", self._media.background)
        except ConfigError as error:
            raise InvalidRequest(str(error), param="media_io_kwargs") from None
        return request.mm_processor_kwargs or {}, background

    async def _load_all(
        self, parts: Sequence[_ImagePart], options: _Options, num_bytes: int
    ) -> list[ProcessedImage | None]:
        """Load images, some at a time; equal ones once; None for those that are left out. A uuid stands for the image
        that came with it last before it, in this request or an earlier one.

        Args:
            num_bytes: that the request's other images have.
        """
        places = asyncio.Semaphore(2 * num_processes())
        running: dict[bytes, asyncio.Future[ProcessedImage]] = {}
        num_tokens = 0
        named: dict[int, ProcessedImage | int | None] = {}
        """Of parts without an image: the one that is kept, or the index of the part that has it."""
        uuids: dict[str, int] = {}
        contents: dict[int, bytes] = {}
        for index, part in enumerate(parts):
            with self._leaving_out(part):
                uuid = _uuid_of(part)
                if _url_of(part) is None:
                    assert uuid is not None
                    named[index] = None  # if it is not kept
                    named[index] = uuids[uuid] if uuid in uuids else self._kept(part, uuid, options)
                elif uuid is not None:
                    uuids[uuid] = index

        async def find(index: int) -> tuple[ProcessedImage | None, bool]:
            """Return the image of a part, and whether it is the first that has it."""
            if index in named:
                known = named[index]
                return (
                    (await asyncio.shield(tasks[known]), False) if isinstance(known, int) else (known, True)
                )
            async with places:
                image, is_new, contents[index] = await self._load_part(parts[index], options, running)
            return image, is_new

        async def load(index: int) -> ProcessedImage | None:
            nonlocal num_tokens, num_bytes
            image, is_new = None, False
            with self._leaving_out(parts[index]):
                image, is_new = await find(index)
            if image is None:
                if not parts[index].is_replayed:  # it has the uuid of one that is left out
                    raise _not_kept(parts[index])
                return None
            num_tokens += len(image.token_ids)
            num_bytes += image.num_bytes if is_new else 0
            if num_tokens > self._max_tokens:
                raise PromptTooLong(
                    f"this model's maximum context length is {self._max_tokens} tokens, and the images alone have "
                    "more; send fewer or smaller ones",
                    param="prompt",
                )
            if num_bytes > MAX_REQUEST_BYTES:
                raise InvalidRequest(
                    f"the images become more than {MAX_REQUEST_BYTES >> 20} MiB of patches; send fewer or smaller ones",
                    param="messages",
                )
            return image

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(load(index)) for index in range(len(parts))]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        for uuid, index in uuids.items():
            if index in contents:
                self._cache.name((options.tenant, options.salt, uuid), contents[index])
        return [task.result() for task in tasks]

    async def _load_part(
        self, part: _ImagePart, options: _Options, running: dict[bytes, asyncio.Future[ProcessedImage]]
    ) -> tuple[ProcessedImage, bool, bytes]:
        """Return the image that a part brings, whether no other part of the request has brought it, and the digest of
        its content."""
        url = _url_of(part)
        assert url is not None
        media = await self._loader.load(url, part.where, options.tenant)
        content = await _digest(media.data)
        key = _key(content, options)
        self.num_queries += 1
        if (image := self._cache.get(key)) is not None:
            self.num_hits += 1
            return image, True, content
        if (other := running.get(key)) is not None:
            return await asyncio.shield(other), False, content
        mine = running[key] = asyncio.get_running_loop().create_future()
        mine.add_done_callback(lambda done: done.cancelled() or done.exception())  # it is raised here, too
        try:
            job = ImageJob(
                0.0,
                len(media.data),
                media.format,
                options.is_among_others,
                options.kwargs,
                options.background,
            )
            result = await self._pool.run(job, media.data, part.where, options.tenant)
            image = self._processed(result, options, part.where)
            self._hold(image, options.tenant)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                mine.cancel()
            else:
                mine.set_exception(error)
            raise
        self._cache.put(key, image)
        mine.set_result(image)
        return image, True, content

    def _kept(self, part: _ImagePart, uuid: str, options: _Options) -> ProcessedImage:
        """Return the image that a uuid stands for.

        Raises:
            InvalidRequest: it is not kept.
        """
        content = self._cache.named((options.tenant, options.salt, uuid))
        image = None if content is None else self._cache.get(_key(content, options))
        self.num_queries += 1
        self.num_hits += image is not None
        if image is None:
            raise _not_kept(part)
        return image

    @contextlib.contextmanager
    def _leaving_out(self, part: _ImagePart) -> Iterator[None]:
        """Let a request do without an image of what is replayed that cannot be loaded within the block."""
        try:
            yield
        except InvalidRequest as error:
            if not part.is_replayed:
                raise
            logger.info("an image of a chat's history is left out: %s", error)

    def _hold(self, image: ProcessedImage, tenant: str) -> None:
        """Count an image for as long as it is held.

        Raises:
            ResourceBusy: there is no room for it beside others, or beside others of its tenant.
        """
        held, size = self._held, image.num_bytes
        while self._released:
            held.remove(*self._released.popleft())
        if not held.takes(tenant, size):
            raise ResourceBusy(
                f"images of {held.total >> 20} MiB are held by requests that wait for further ones, "
                f"{held.held_by(tenant) >> 20} of them of the same key",
                retry_after_s=RETRY_S,
            )
        held.add(tenant, size)
        weakref.finalize(image, self._released.append, (tenant, size)).atexit = False

    def _processed(self, result: ImageResult, options: _Options, where: str) -> ProcessedImage:
        if not result.num_embeds:
            raise InvalidRequest(f"{where}: the image becomes no tokens; send a larger one", param=where)
        about = _encoder.encode(
            [self._media.processor_kwargs, options.kwargs, options.is_among_others, options.salt]
        )
        identifier = hashlib.blake2b(result.pixels + about, digest_size=16).hexdigest()
        grid = self._grid(result.inputs)
        if grid and math.prod(grid) != result.num_embeds:
            raise InvalidRequest(
                f"{where}: the model's processor makes {result.num_embeds} tokens of an image of "
                f"{' x '.join(map(str, grid))} outputs; leave merge_size out of its arguments",
                param=where,
            )
        return ProcessedImage(identifier, result.token_ids, result.num_embeds, grid, result.inputs)

    def _grid(self, inputs: Mapping[str, MediaTensor]) -> tuple[int, ...]:
        """Return frames, rows and columns of the encoder's outputs, of models whose processor says the patches'."""
        patches = inputs.get("image_grid_thw")
        if patches is None:
            return ()
        size = len(patches.data) // 3
        frames, rows, columns = (
            int.from_bytes(patches.data[size * index : size * (index + 1)], "little") for index in range(3)
        )
        return frames, rows // self.info.merge_size, columns // self.info.merge_size


def processor_args(config: ResolvedConfig) -> ProcessorArgs:
    """Return what the process for images needs of a model that sees."""
    vision = config.media.vision
    assert vision is not None
    has_own = (Path(config.tokenizer_path) / "tokenizer.json").is_file()
    return ProcessorArgs(
        model_path=config.model_path,
        model_type=config.media.model_type,
        tokenizer_folder=config.tokenizer_path if has_own else config.tokenizer_folder,
        image_token_id=vision.image_token_id,
        kwargs=config.media.processor_kwargs,
        passes_files=config.media.passes_files,
    )


def num_processes() -> int:
    """Images that one API process has decoded at the same time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_PROCESSES, cores))


def _chats(request: ChatCompletionRequest) -> Sequence[Sequence[ChatMessage]]:
    if isinstance(request, BatchChatCompletionRequest):
        return cast("Sequence[Sequence[ChatMessage]]", request.messages)
    return [request.messages]


def image_roles(request: ChatCompletionRequest) -> frozenset[str]:
    """Return the roles of messages of which a part is an image. Linear in the parts (`is_long`)."""
    return frozenset(
        message.role
        for messages in _chats(request)
        for message in messages
        if isinstance(message.content, list)
        and any(part.get("type") == "image_url" for part in message.content)
    )


def is_long(request: ChatCompletionRequest) -> bool:
    """Whether a request has so many parts that nobody may go through them on an event loop."""
    return (
        sum(
            len(message.content)
            for messages in _chats(request)
            for message in messages
            if isinstance(message.content, list)
        )
        > _INLINE_PARTS
    )


def _image_parts(
    messages: Sequence[ChatMessage], where: str, is_seen: Callable[[str], bool]
) -> Iterable[_ImagePart]:
    newest = newest_message(messages)
    for index, message in enumerate(messages):
        for at, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.get("type") == "image_url" and is_seen(message.role):
                is_replay = is_replayed(message, index, newest)
                yield _ImagePart(part, f"{where}[{index}].content[{at}].image_url", is_replay)


def _url_of(part: _ImagePart) -> str | None:
    """Return the URL of a part; None if it names an image by its uuid only.

    Raises:
        InvalidRequest: it has neither.
    """
    given = part.part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    if url is None and part.part.get("uuid") is not None:
        return None
    if not isinstance(url, str):
        raise InvalidRequest(
            f"{part.where} must be an object with the url of an image, as data: or https:", param=part.where
        )
    return url


def _not_kept(part: _ImagePart) -> InvalidRequest:
    uuid = str(part.part.get("uuid"))[:MAX_UUID]
    return InvalidRequest(
        f"{part.where}: no image is kept here for the uuid {uuid!r}; send it with its image_url",
        param=part.where,
    )


def _uuid_of(part: _ImagePart) -> str | None:
    uuid = part.part.get("uuid")
    if uuid is not None and not (isinstance(uuid, str) and 0 < len(uuid) <= MAX_UUID):
        where = part.where.removesuffix("image_url") + "uuid"
        raise InvalidRequest(f"{where} must be a text of 1 to {MAX_UUID} characters", param=where)
    return uuid


def _key(content: bytes, options: _Options) -> bytes:
    about = _encoder.encode([options.kwargs, options.background, options.is_among_others, options.salt])
    return content + hashlib.blake2b(about, digest_size=16).digest()


async def _digest(data: bytes) -> bytes:
    def digest() -> bytes:
        return hashlib.blake2b(data, digest_size=16).digest()

    return digest() if len(data) <= _HASHED_INLINE else await asyncio.to_thread(digest)
