"""The processes that decode images: hostile files end only their own, beside a canary that must not notice."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from argosy_engine.errors import ConfigError, InvalidRequest, RequestFailed, ResourceBusy
from argosy_engine.frontend.media import pool as module
from argosy_engine.frontend.media.pool import MediaPool, NoProcessor
from argosy_engine.frontend.media.processor import MediaProcessor, processor_args
from argosy_engine.frontend.media.worker import ImageJob, ImageResult, load_processor
from argosy_engine.frontend.renderer import Renderer
from argosy_protocol.openai import ChatCompletionRequest, ChatMessage
from image_processors import encoded, image_part, make_folder, picture, resolved
from processes import children, wait_until

GOOD = encoded(picture(90, 60))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder("qwen2_5_vl", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[MediaPool]:
    made = MediaPool(processor_args(resolved(folder)), 2)
    made.info()
    yield made
    made.close()


def job(data: bytes, kind: str = "png", **kwargs: Any) -> ImageJob:
    return ImageJob(0.0, len(data), kind, False, kwargs, (255, 255, 255))


async def process(pool: MediaPool, data: bytes, kind: str = "png", **kwargs: Any) -> ImageResult:
    return await pool.run(job(data, kind, **kwargs), data, "image_url")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, rows: bytes = b"", *chunks: bytes) -> bytes:
    """A PNG with a header that says so, whatever it has."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", header),
            *chunks,
            chunk(b"IDAT", zlib.compress(rows, 9)),
            chunk(b"IEND", b""),
        )
    )


def animated() -> bytes:
    first, *others = (picture(20, 20, seed) for seed in range(40))
    return encoded(first, "GIF", save_all=True, append_images=others)


HOSTILE: dict[str, tuple[bytes, str, str]] = {
    "a header of many pixels": (png(60_000, 60_000), "png", "more than 50000000"),
    "a bomb of 2 GB": (png(30_000, 30_000, bytes(30_001 * 1000)), "png", "more than 50000000"),
    "a line": (png(1, 30_000), "png", "more than 200 times the other"),
    "a text that unpacks": (
        png(9, 9, b"", chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(32 << 20), 9))), "png", "damaged"
    ),
    "no rows": (png(9, 9), "png", "damaged"),
    "cut off": (GOOD[: len(GOOD) // 2], "png", "damaged"),
    "a head alone": (GOOD[:16], "png", "damaged"),
    "a JPEG cut off": (encoded(picture(90, 60), "JPEG")[:600], "jpeg", "damaged"),
    "a WebP cut off": (encoded(picture(90, 60), "WEBP")[:200], "webp", "damaged"),
    "a GIF cut off": (encoded(picture(90, 60), "GIF")[:30], "gif", "damaged"),
    "another format": (encoded(picture(9, 9), "JPEG"), "png", "damaged"),
    "no pixel": (png(0, 0), "png", "damaged"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_files_are_refused_beside_a_canary(name: str, pool: MediaPool) -> None:
    data, kind, told = HOSTILE[name]
    server = pool.pid
    refused, canary = await asyncio.gather(
        process(pool, data, kind), process(pool, GOOD), return_exceptions=True
    )
    assert isinstance(refused, InvalidRequest)
    assert told in str(refused)
    assert isinstance(canary, ImageResult)
    assert canary.num_embeds == 6
    assert pool.pid == server


async def test_the_first_frame_of_an_animation_counts(pool: MediaPool) -> None:
    still = encoded(picture(20, 20, 0), "GIF")
    assert (await process(pool, animated(), "gif")) == (await process(pool, still, "gif"))


async def test_an_image_is_turned_as_its_camera_was(pool: MediaPool) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encoded(picture(90, 60), "JPEG", quality=95, exif=exif)
    found = await process(pool, turned, "jpeg")
    assert found.inputs["image_grid_thw"].data == struct.pack("<3q", 1, 6, 4)


async def test_results_are_those_of_the_processor(pool: MediaPool, folder: Path) -> None:
    own = load_processor(processor_args(resolved(folder))).process(picture(90, 60), {}, is_among_others=False)
    found = await process(pool, GOOD)
    assert (found.token_ids, found.inputs) == (own.token_ids, own.inputs)


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        ({"colour": 1}, "has no argument 'colour' of Qwen2_5_VLProcessor"),
        ({"return_tensors": "pt"}, "has no argument 'return_tensors'"),
        ({"patch_size": 0}, "is refused by the model's processor"),
        ({"max_pixels": 10**12, "min_pixels": 10**12}, "more than"),
        ({"size": "large"}, "is refused by the model's processor"),
    ],
)
async def test_arguments_of_a_request_may_be_wrong(
    kwargs: dict[str, Any], told: str, pool: MediaPool
) -> None:
    with pytest.raises(InvalidRequest, match=told):
        await process(pool, GOOD, **kwargs)
    assert (await process(pool, GOOD)).num_embeds == 6


async def test_a_fork_that_is_killed_takes_nothing_with_it(pool: MediaPool) -> None:
    server = pool.pid
    assert server is not None

    def kill_fork() -> None:
        wait_until(lambda: bool(children(server)), "a fork")
        for child in children(server):
            os.kill(child, signal.SIGKILL)

    big = encoded(picture(4000, 3000), "PNG", compress_level=1)
    running = asyncio.create_task(process(pool, big))
    await asyncio.to_thread(kill_fork)
    with pytest.raises(InvalidRequest, match="ended the process that decodes it"):
        await running
    assert (await process(pool, GOOD)).num_embeds == 6
    assert pool.pid == server


async def test_a_server_that_is_killed_is_replaced(pool: MediaPool) -> None:
    first = pool.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    found = await asyncio.gather(*(process(pool, GOOD) for _ in range(4)))
    assert {each.num_embeds for each in found} == {6}
    assert pool.pid != first


async def test_an_image_whose_server_is_killed_is_tried_again(pool: MediaPool) -> None:
    """It is not at fault."""
    first = pool.pid
    assert first is not None
    big = encoded(picture(4000, 3000), "PNG", compress_level=1)
    running = asyncio.create_task(process(pool, big))
    await asyncio.to_thread(wait_until, lambda: bool(children(first)), "a fork")
    os.kill(first, signal.SIGKILL)
    assert (await running).num_embeds
    assert pool.pid != first


async def test_a_server_that_hangs_is_replaced(pool: MediaPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FORK_TIMEOUT_S", 0.2)
    first = pool.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    monkeypatch.setattr(module, "FORK_TIMEOUT_S", 0.5)
    found = await process(pool, GOOD)
    assert found.num_embeds == 6
    assert pool.pid != first


async def test_a_job_takes_no_longer_than_it_may(folder: Path) -> None:
    made = MediaPool(processor_args(resolved(folder)), 1, job_timeout_s=0.05)
    made.info()
    big = encoded(picture(4000, 3000), "PNG", compress_level=1)
    with pytest.raises(InvalidRequest, match=r"was not decoded within 0\.05 s"):
        await process(made, big)
    made.close()


async def test_a_client_who_leaves_ends_its_jobs(folder: Path) -> None:
    made = MediaPool(processor_args(resolved(folder)), 1)
    made.info()
    big = encoded(picture(4000, 3000), "PNG", compress_level=1)
    left = [asyncio.create_task(process(made, big)) for _ in range(5)]
    await asyncio.sleep(0)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    assert (await process(made, GOOD)).num_embeds == 6
    made.close()
    with pytest.raises((RequestFailed, RuntimeError)):
        await process(made, GOOD)


async def test_what_waits_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 2 * len(GOOD))
    made = MediaPool(processor_args(resolved(folder)), 1)
    made.info()
    found = await asyncio.gather(*(process(made, GOOD) for _ in range(5)), return_exceptions=True)
    assert [type(each) for each in found] == [ImageResult] * 2 + [ResourceBusy] * 3
    made.close()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda folder: (folder / "preprocessor_config.json").unlink() or (folder / "processor_config.json").unlink(),
         "has neither preprocessor_config.json nor processor_config.json"),
        (lambda folder: (folder / "preprocessor_config.json").write_text("{"), "its processor cannot be loaded"),
        (lambda folder: (folder / "preprocessor_config.json").write_text(
            '{"image_processor_type": "None", "auto_map": {"AutoImageProcessor": "evil.Evil"}}'), "cannot be loaded"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "qwen2_5_vl", "image_token_id": 3}'),
         "none of the tokens that config.json says"),
    ],
)  # fmt: skip
def test_without_a_processor_texts_are_served(
    change: Callable[[Path], Any], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_folder("qwen2_5_vl", tmp_path)
    (folder / "evil.py").write_text("raise SystemExit(1)")
    change(folder)
    config = resolved(folder)
    with caplog.at_level("WARNING", "argosy.frontend"):
        assert MediaProcessor.of(config) is None
    assert "the model is served for texts only" in caplog.text
    assert told in caplog.text
    request = ChatCompletionRequest(messages=[ChatMessage(role="user", content=[image_part(picture(9, 9))])])
    with pytest.raises(
        InvalidRequest, match="content of type 'image_url' is not supported by this model, only text"
    ):
        Renderer(config).render_chat(request)


def test_arguments_of_the_flag_that_the_processor_does_not_take_end_the_start(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--mm-processor-kwargs: has no argument 'max_pixel' of"):
        MediaProcessor.of(resolved(folder, processor_kwargs={"max_pixel": 5}))


def test_a_server_that_cannot_start_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    made = MediaPool(processor_args(resolved(folder)), 1)
    with pytest.raises(NoProcessor, match="does not start"):
        made.info()
    made.close()
