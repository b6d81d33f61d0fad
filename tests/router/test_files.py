"""/v1/files: uploads into the storage, lists, contents, deletion, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIStatusError, NotFoundError

from argosy_batch.app import MAX_DOWNLOADS
from argosy_batch.files_api import MAX_UPLOADS
from argosy_router.config import ServerLimits

from .batch_rig import lines, official, stored
from .fake_engine import FakeEngine
from .harness import MODEL, Rig, raw, read_all, rig, until

FORM = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'


def stored_files(tmp_path: Path) -> list[Path]:
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    return [path for path in files if path.name != "keys" and path.parent.name != "locks"]


async def upload(r: Rig, content: bytes = b"{}", name: str = "a.jsonl", **fields: Any) -> httpx.Response:
    return await r.http.post(
        "/v1/files", files={"file": (name, content)}, data={"purpose": "batch", **fields}
    )


def refusal(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["message"]


async def test_the_official_client_uploads_lists_reads_and_deletes(tmp_path: Path) -> None:
    async with stored(tmp_path, [FakeEngine()]) as r, official(r) as client:
        content = lines("a", "b")
        file = await client.files.create(file=("input.jsonl", content), purpose="batch")
        assert (file.filename, file.bytes, file.purpose, file.object) == (
            "input.jsonl",
            len(content),
            "batch",
            "file",
        )
        assert file.expires_at == file.created_at + 30 * 86400
        assert await client.files.retrieve(file.id) == file
        assert (await client.files.content(file.id)).content == content
        later = await client.files.create(
            file=b"{}", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert later.expires_at == later.created_at + 3600
        assert [each.id async for each in client.files.list()] == [later.id, file.id]
        assert [each.id async for each in client.files.list(order="asc", limit=1)] == [file.id, later.id]
        assert [each.id async for each in client.files.list(purpose="batch_output")] == []
        assert (await client.files.delete(file.id)).deleted
        for gone in (
            client.files.retrieve(file.id),
            client.files.content(file.id),
            client.files.delete(file.id),
        ):
            with pytest.raises(NotFoundError):
                await gone


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_files_that_are_deleted_as_they_are_listed_are_listed_all(tmp_path: Path, order: Any) -> None:
    async with stored(tmp_path, [FakeEngine()]) as r, official(r) as client:
        made = [(await client.files.create(file=b"{}", purpose="batch")).id for _ in range(5)]
        seen = []
        async for file in client.files.list(order=order, limit=2):
            seen.append(file.id)
            await client.files.delete(file.id)
        assert seen == (made if order == "asc" else made[::-1])
        for wrong in ("file-1", "batch_" + made[0].removeprefix("file-")):
            error = (await r.http.get("/v1/files", params={"after": wrong})).json()["error"]
            assert error["param"] == "after"


async def test_files_of_other_keys_do_not_exist(tmp_path: Path) -> None:
    async with stored(tmp_path, [FakeEngine()]) as r, official(r) as shop, official(r, "sk-lab") as lab:
        file = await shop.files.create(file=b"{}", purpose="batch")
        for refused in (lab.files.retrieve(file.id), lab.files.content(file.id), lab.files.delete(file.id)):
            with pytest.raises(NotFoundError, match="no such File object"):
                await refused
        assert [each async for each in lab.files.list()] == []
        assert (await shop.files.retrieve(file.id)).id == file.id


async def test_a_large_file_passes_through_without_staying_in_memory(tmp_path: Path) -> None:
    limits = ServerLimits(max_body_bytes=64 * 1024, max_inflight_bytes=64 * 1024)
    async with stored(tmp_path, [FakeEngine()], server=limits) as r:
        content = bytes(range(256)) * 64 * 1024  # 16 MiB: 256 times what bodies may have in memory
        sent = await upload(r, content)
        assert sent.status_code == 200, sent.text
        assert r.router.server.body_memory.held == 0
        answer = await r.http.get(f"/v1/files/{sent.json()['id']}/content")
        assert answer.content == content
        assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''a.jsonl"


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("../../etc/passwd", "passwd"),
        ("..\\..\\boot.ini", "boot.ini"),
        ("/", "upload.jsonl"),
        ("..", "upload.jsonl"),
        ("a\r\nx: y", "ax: y"),
        ("n" * 400, "n" * 255),
    ],
)
async def test_a_file_name_is_shown_and_names_no_path(tmp_path: Path, sent: str, shown: str) -> None:
    head = b'--b\r\ncontent-disposition: form-data; name="file"; filename="%b"\r\n\r\n{}\r\n--b--' % (
        sent.replace("\\", "\\\\").replace("\r\n", "\x01\x02").encode()
    )
    async with stored(tmp_path, [FakeEngine()]) as r:
        headers = {"content-type": "multipart/form-data; boundary=b"}
        answer = await r.http.post("/v1/files", content=FORM + head, headers=headers)
        assert answer.json()["filename"] == shown
        assert (await r.http.get(f"/v1/files/{answer.json()['id']}/content")).content == b"{}"
    assert {path.relative_to(tmp_path).parts[0] for path in stored_files(tmp_path)} == {"storage"}


async def test_forms_that_cannot_be_used_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    async with stored(tmp_path, [FakeEngine()], {"max_file_bytes": 100}) as r:
        post, headers = r.http.post, {"content-type": "multipart/form-data; boundary=b"}
        for size in (101, 200_000):
            status, message = refusal(await upload(r, b"x" * size))
            assert (status, "(--max-file-bytes); split it" in message) == (413, True)
        assert refusal(await upload(r, purpose="fine-tune")) == (
            400,
            "purpose must be 'batch', not 'fine-tune': files are for batches only",
        )
        assert refusal(await upload(r, colour="blue"))[1].startswith("unknown field 'colour'")
        status, message = refusal(await upload(r, **{"expires_after[seconds]": "10"}))
        assert (status, "from 3600 to" in message) == (400, True)
        two = [("file", ("a", b"1")), ("file", ("b", b"2"))]
        assert "two files" in refusal(await post("/v1/files", files=two, data={"purpose": "batch"}))[1]
        other = {"image": ("a", b"1")}
        assert "send it as `file`" in refusal(await post("/v1/files", files=other))[1]
        assert "no `file`" in refusal(await post("/v1/files", content=FORM + b"--b--", headers=headers))[1]
        assert (
            "last boundary"
            in refusal(await post("/v1/files", content=FORM + FILE + b"{}", headers=headers))[1]
        )
        assert refusal(await post("/v1/files", json={"purpose": "batch"}))[0] == 400
        late = (
            FORM
            + FILE
            + b'{}\r\n--b\r\ncontent-disposition: form-data; name="expires_after[seconds]"\r\n\r\n4000'
        )
        assert (
            "must precede"
            in refusal(await post("/v1/files", content=late + b"\r\n--b--", headers=headers))[1]
        )
        await until(lambda: not stored_files(tmp_path))


async def test_a_client_that_leaves_during_an_upload_leaves_nothing(tmp_path: Path) -> None:
    async with stored(tmp_path, [FakeEngine()]) as r:
        async with raw(r.router) as (_, writer):
            writer.write(
                b"POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-shop\r\n"
                b"content-type: multipart/form-data; boundary=b\r\ncontent-length: 1000000\r\n\r\n"
            )
            writer.write(FORM + FILE + b"x" * 100_000)
            await until(lambda: bool(stored_files(tmp_path)))
        await until(lambda: not stored_files(tmp_path))
        assert (await upload(r)).status_code == 200


async def test_uploads_of_one_key_leave_room_for_those_of_another(tmp_path: Path) -> None:
    async with stored(tmp_path, [FakeEngine()]) as r, contextlib.AsyncExitStack() as stack:
        head = (
            b"POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-shop\r\n"
            b"content-type: multipart/form-data; boundary=b\r\ncontent-length: 1000000\r\n\r\n"
        )
        writers = []
        for _ in range(MAX_UPLOADS // 2):
            _, writer = await stack.enter_async_context(raw(r.router))
            writer.write(head + FORM + FILE + b"x")
            writers.append(writer)
        await until(lambda: len(stored_files(tmp_path)) == MAX_UPLOADS // 2, 60.0)
        refused = await upload(r)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "32 of them with this key" in refused.json()["error"]["message"]
        other = {"authorization": "Bearer sk-lab"}
        form: dict[str, Any] = {"files": {"file": ("a", b"{}")}, "data": {"purpose": "batch"}}
        assert (await r.http.post("/v1/files", **form, headers=other)).status_code == 200
        writers[0].transport.abort()
        async with asyncio.timeout(60.0):
            while (await upload(r)).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_unread_downloads_of_one_key_leave_room_for_those_of_another(tmp_path: Path) -> None:
    async with stored(tmp_path, [FakeEngine()]) as r, contextlib.AsyncExitStack() as stack:
        file_id = (await upload(r, b"x" * (16 * 1024 * 1024))).json()["id"]
        path = f"/v1/files/{file_id}/content"
        writers = []
        for _ in range(MAX_DOWNLOADS // 2):
            _, writer = await stack.enter_async_context(raw(r.router))
            writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-shop\r\n\r\n".encode())
            writers.append(writer)
        num_behind = 0
        async with asyncio.timeout(60.0):
            while num_behind < MAX_DOWNLOADS // 2:
                num_behind = sum(connection.is_behind for connection in r.router.server.connections)
                await asyncio.sleep(0.01)
        refused = await r.http.get(path)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert f"{MAX_DOWNLOADS // 2} of them with this key" in refused.json()["error"]["message"]
        assert (await r.http.get(f"/v1/files/{file_id}")).status_code == 200
        other = {"authorization": "Bearer sk-lab"}
        form: dict[str, Any] = {"files": {"file": ("a", b"{}")}, "data": {"purpose": "batch"}}
        theirs = (await r.http.post("/v1/files", **form, headers=other)).json()["id"]
        assert (await r.http.get(f"/v1/files/{theirs}/content", headers=other)).content == b"{}"
        writers[0].transport.abort()
        async with asyncio.timeout(60.0):
            while (await r.http.get(path)).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_uploads_beyond_the_quota_of_a_key_are_refused(tmp_path: Path) -> None:
    limits = {"storage_max_bytes": 3000, "storage_max_objects": 3}
    async with stored(tmp_path, [FakeEngine()], limits) as r:
        status, message = refusal(await upload(r, b"x" * 4000))
        assert (status, "--storage-max-bytes" in message) == (403, True)
        for _ in range(3):
            assert (await upload(r)).status_code == 200
        answer = await upload(r)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "storage_quota_exceeded")
        r.http.headers["authorization"] = "Bearer sk-lab"
        assert (await upload(r)).status_code == 200


async def test_an_upload_that_the_quota_refuses_at_its_end_leaves_nothing(tmp_path: Path) -> None:
    async with stored(tmp_path, [FakeEngine()], {"storage_max_objects": 1}) as r:
        may_end = asyncio.Event()

        async def form() -> AsyncIterator[bytes]:
            yield FORM + FILE + b"x" * 100_000
            await may_end.wait()
            yield b"\r\n--b--\r\n"

        headers = {"content-type": "multipart/form-data; boundary=b"}
        late = asyncio.create_task(r.http.post("/v1/files", content=form(), headers=headers))
        await until(lambda: bool(stored_files(tmp_path)))
        first = await upload(r)
        assert first.status_code == 200
        may_end.set()
        answer = await late
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "storage_quota_exceeded")
        assert [path.stem for path in stored_files(tmp_path)] == [first.json()["id"]] * 2


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/files/file-1", 404),
        ("GET", "/v1/files/..%2f..%2fkeys", 404),
        ("GET", "/v1/files/../keys", 404),
        ("GET", "/v1/files/", 404),
        ("GET", "/v1/files/a/b/c", 404),
        ("GET", "/v1/files/a/cancel", 404),
        ("PUT", "/v1/files", 405),
        ("OPTIONS", "/v1/files", 405),
        ("POST", "/v1/files/a", 405),
        ("DELETE", "/v1/files/a/content", 405),
        ("GET", "/v1/files?limit=0", 400),
        ("GET", "/v1/files?limit=x", 400),
        ("GET", "/v1/files?order=up", 400),
        ("GET", "/v1/files?after=file-1", 400),
        ("GET", "/v1/filesystem", 404),
    ],
)
async def test_requests_that_fit_no_route_are_refused_in_openais_shape(
    tmp_path: Path, method: str, path: str, status: int
) -> None:
    async with stored(tmp_path, [FakeEngine()]) as r, raw(r.router) as (reader, writer):
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-shop\r\nconnection: close\r\n\r\n"
        writer.write(head.encode())
        answer = await read_all(reader)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b'{"error":{"message":"' in answer


@pytest.mark.parametrize(
    "path", ["/v1/files", "/v1/files/a", "/v1/files/a/content", "/v1/batches", "/v1/batches/a"]
)
async def test_head_is_a_method_that_files_and_batches_do_not_take(
    tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with stored(tmp_path, [FakeEngine()]) as r:
        answer = await r.http.head(path)
        assert answer.status_code == 405
        assert "HEAD" not in answer.headers["allow"]
        assert "failed" not in caplog.text


async def test_without_a_key_no_file_is_taken(tmp_path: Path) -> None:
    async with stored(tmp_path, [FakeEngine()]) as r:
        r.http.headers["authorization"] = "Bearer sk-guess"
        assert (await upload(r)).status_code == 401
    assert stored_files(tmp_path) == []


async def test_a_router_without_storage_says_how_to_get_one() -> None:
    async with rig([FakeEngine()]) as r:
        for path in ("/v1/files", "/v1/batches", "/v1/files/file-1/content"):
            status, message = refusal(await r.http.get(path))
            assert (status, "--batch-url" in message) == (404, True)
        assert refusal(await upload(r))[0] == 404


async def test_without_keys_all_clients_share_the_files(tmp_path: Path) -> None:
    from argosy_batch.config import BatchConfig

    async with rig([FakeEngine()], storage=BatchConfig(storage=str(tmp_path))) as r:
        sent = (await upload(r)).json()
        assert (await r.http.get("/v1/files")).json()["data"] == [sent]
        assert (await r.http.get(f"/v1/models/{MODEL}")).status_code == 200


async def test_two_routers_on_one_storage_see_each_others_files(tmp_path: Path) -> None:
    async with (
        stored(tmp_path, [FakeEngine()]) as one,
        stored(tmp_path, [FakeEngine()]) as two,
        official(one) as first,
        official(two) as second,
    ):
        files = await asyncio.gather(*(first.files.create(file=b"%d" % n, purpose="batch") for n in range(5)))
        assert {each.id async for each in second.files.list()} == {file.id for file in files}
        await second.files.delete(files[0].id)
        with pytest.raises(APIStatusError):
            await first.files.content(files[0].id)


async def test_a_slow_reader_of_a_file_does_not_make_the_router_read_ahead(tmp_path: Path) -> None:
    async with stored(tmp_path, [FakeEngine()]) as r:
        content = b"x" * (32 * 1024 * 1024)
        file_id = (await upload(r, content)).json()["id"]
        async with raw(r.router) as (reader, writer):
            head = f"GET /v1/files/{file_id}/content HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-shop\r\n\r\n"
            writer.write(head.encode())
            await reader.readexactly(1000)
            server_side = [each.transport for each in r.router.server.connections]
            await until(lambda: any(each.get_write_buffer_size() for each in server_side))
            held = max(each.get_write_buffer_size() for each in server_side)
            assert held < 4 * 1024 * 1024


async def test_a_storage_that_fails_is_told_and_works_again_later(tmp_path: Path) -> None:
    async with stored(tmp_path, [FakeEngine()]) as r, official(r) as client:
        owners = tmp_path / "storage" / "objects" / "owners"
        owners.write_bytes(b"a file where a folder should be")
        answer = await upload(r)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], answer.headers["x-should-retry"]) == (
            503,
            "storage_unavailable",
            "true",
        )
        assert str(tmp_path) not in error["message"]
        assert (await r.chat()).status_code == 200
        owners.unlink()
        file = await client.files.create(file=b"{}", purpose="batch")
        owners.rename(tmp_path / "elsewhere")
        for gone in (client.files.content(file.id), client.batches.retrieve("batch_1")):
            with pytest.raises(NotFoundError):
                await gone
