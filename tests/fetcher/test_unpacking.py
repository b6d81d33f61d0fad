"""Unpacking archives: what is taken out, and what hostile ones cannot do."""

from __future__ import annotations

import gzip
import os
import tarfile
import tempfile
from contextlib import suppress
from pathlib import Path

import hypothesis.strategies as st
import pytest
import zstandard
from hypothesis import given, settings

from archives import member_of_type, packed, tar_of, tar_of_members
from argosy_fetcher import archives
from argosy_fetcher.archives import Unpacker, model_folder
from argosy_fetcher.errors import FetchError, NoSpace, UnsupportedModel
from argosy_fetcher.source import Packing
from model_files import other_files, served_files

PACKINGS: list[Packing] = ["tar", "tar+gzip", "tar+zstd"]


def unpack(directory: Path, *layers: tuple[bytes, Packing]) -> dict[str, bytes]:
    """Unpack archives in order; returns the gathered files' content by their path."""
    (directory / "unpacked").mkdir()
    unpacker = Unpacker(directory / "unpacked", "oci://acme/tiny")
    for number, (content, packing) in enumerate(layers):
        path = directory / f"archive-{number}"
        path.write_bytes(content)
        unpacker.add_archive(f"layer {number}", path, packing)
    return {name: file.path.read_bytes() for name, file in unpacker.files.items()}


def below(files: dict[str, bytes], folder: str) -> dict[str, bytes]:
    return {f"{folder}/{path}": content for path, content in files.items()}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("prefix", ["", "./", "models/tiny/"])
def test_served_files_are_taken_out(tmp_path: Path, packing: Packing, prefix: str) -> None:
    files = {prefix + path: content for path, content in {**other_files(), **served_files()}.items()}
    folder = "" if prefix == "./" else prefix
    expected = {folder + path: content for path, content in served_files().items()}
    assert unpack(tmp_path, (packed(files, packing), packing)) == expected
    assert len(list((tmp_path / "unpacked").iterdir())) == len(expected)


def test_files_of_later_layers_replace_earlier_ones(tmp_path: Path) -> None:
    first = tar_of({"m/config.json": b"old", "m/tokenizer.json": b"kept"})
    second = tar_of({"m/config.json": b"new"})
    assert unpack(tmp_path, (first, "tar"), (second, "tar")) == {
        "m/config.json": b"new",
        "m/tokenizer.json": b"kept",
    }


@pytest.mark.parametrize(
    ("whiteouts", "left"),
    [
        (["m/.wh.config.json"], {"m/tokenizer.json", "n/o/config.json"}),
        ([".wh.m"], {"n/o/config.json"}),
        ([".wh.n"], {"m/config.json", "m/tokenizer.json"}),
        (["n/o/.wh..wh..opq"], {"m/config.json", "m/tokenizer.json"}),
        (["n/.wh..wh..opq", "m/.wh.tokenizer.json"], {"m/config.json"}),
        ([".wh..wh..opq"], set()),
        (["m/.wh.conf", ".wh.absent", "m/.wh."], {"m/config.json", "m/tokenizer.json", "n/o/config.json"}),
    ],
)
def test_whiteouts_remove_files_of_earlier_layers(
    tmp_path: Path, whiteouts: list[str], left: set[str]
) -> None:
    first = tar_of({"m/config.json": b"1", "m/tokenizer.json": b"2", "n/o/config.json": b"3"})
    assert set(unpack(tmp_path, (first, "tar"), (tar_of(dict.fromkeys(whiteouts, b"")), "tar"))) == left


def test_only_given_folders_are_unpacked(tmp_path: Path) -> None:
    files = dict.fromkeys(
        ["config.json", "m/config.json", "m/n/config.json", "usr/lib/tokenizer.json"], b"{}"
    )
    (tmp_path / "image").write_bytes(tar_of(files))
    (tmp_path / "unpacked").mkdir()
    unpacker = Unpacker(tmp_path / "unpacked", "oci://acme/tiny")
    unpacker.add_archive("image", tmp_path / "image", "tar", ("m", ""))
    assert set(unpacker.files) == {"config.json", "m/config.json"}


def test_whiteouts_do_not_remove_files_of_their_own_layer(tmp_path: Path) -> None:
    first = tar_of({"m/config.json": b"old", "m/tokenizer.json": b"old"})
    second = tar_of({"m/config.json": b"new", "m/.wh..wh..opq": b""})
    assert unpack(tmp_path, (first, "tar"), (second, "tar")) == {"m/config.json": b"new"}


@pytest.mark.parametrize(
    "path", ["../config.json", "/config.json", "a/../../config.json", "a//config.json", ".argosy/config.json"]
)
@pytest.mark.parametrize("packing", PACKINGS)
def test_served_files_with_unsafe_paths_are_refused(tmp_path: Path, path: str, packing: Packing) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with pytest.raises(UnsupportedModel, match="unsafe name"):
        unpack(root, (packed({path: b"{}"}, packing), packing))
    assert os.listdir(tmp_path) == ["root"]
    assert set(os.listdir(root)) == {"archive-0", "unpacked"}


def test_unsafe_paths_of_other_files_do_not_matter(tmp_path: Path) -> None:
    assert unpack(tmp_path, (tar_of({"../../evil.py": b"", "config.json": b"{}"}), "tar")) == {
        "config.json": b"{}"
    }


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_links_are_refused_with_a_remedy(tmp_path: Path, kind: bytes) -> None:
    archive = tar_of_members([(member_of_type("config.json", kind, "/etc/passwd"), b"")])
    with pytest.raises(UnsupportedModel, match=r"oci://acme/tiny: 'config.json' is a link.*--dereference"):
        unpack(tmp_path, (archive, "tar"))


def test_a_link_to_a_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    archive = tar_of_members(
        [
            (member_of_type("m", tarfile.SYMTYPE, str(tmp_path / "outside")), b""),
            (tarfile.TarInfo("m/config.json"), b"{}"),
        ]
    )
    (tmp_path / "root").mkdir()
    assert unpack(tmp_path / "root", (archive, "tar")) == {"m/config.json": b"{}"}
    assert list((tmp_path / "outside").iterdir()) == []


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_devices_and_folders_are_skipped(tmp_path: Path, kind: bytes) -> None:
    archive = tar_of_members(
        [(member_of_type("config.json", kind), b""), (tarfile.TarInfo("m/config.json"), b"1")]
    )
    assert unpack(tmp_path, (archive, "tar")) == {"m/config.json": b"1"}


@pytest.mark.parametrize("packing", PACKINGS)
def test_truncated_archives_are_refused(tmp_path: Path, packing: Packing) -> None:
    content = packed(served_files(shard_bytes=20_000), packing)
    with pytest.raises(UnsupportedModel, match=r"oci://acme/tiny: layer 0: the archive cannot be unpacked"):
        unpack(tmp_path, (content[: len(content) // 2], packing))


@pytest.mark.parametrize("packing", PACKINGS)
def test_what_is_no_archive_is_refused(tmp_path: Path, packing: Packing) -> None:
    with pytest.raises(UnsupportedModel, match="the archive cannot be unpacked"):
        unpack(tmp_path, (b"<html>Not found</html>" * 100, packing))


@pytest.mark.parametrize("packing", ["tar+gzip", "tar+zstd"])
def test_archives_that_explode_are_refused(
    tmp_path: Path, packing: Packing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "RATIO_FREE_BYTES", 100_000)
    monkeypatch.setattr(archives, "MAX_RATIO", 10)
    content = packed({"model.safetensors": bytes(2_000_000)}, packing)
    with pytest.raises(UnsupportedModel, match="decompresses to"):
        unpack(tmp_path, (content, packing))


def test_skipped_files_count_as_decompressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "RATIO_FREE_BYTES", 100_000)
    monkeypatch.setattr(archives, "MAX_RATIO", 10)
    with pytest.raises(UnsupportedModel, match="decompresses to"):
        unpack(tmp_path, (gzip.compress(tar_of({"zeros": bytes(2_000_000), "config.json": b""})), "tar+gzip"))


def test_a_header_of_any_size_is_refused(tmp_path: Path) -> None:
    member = tarfile.TarInfo("config.json")
    member.pax_headers = {"comment": "x" * 2_000_000}
    with pytest.raises(UnsupportedModel, match="a header has"):
        unpack(tmp_path, (gzip.compress(tar_of_members([(member, b"{}")])), "tar+gzip"))


def pax_header(kind: bytes, content: bytes) -> tuple[tarfile.TarInfo, bytes]:
    """Return a pax header as a member, with content that no tool would write."""
    return member_of_type("pax", kind), content


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"9" * 30_000, "a pax header is malformed"),
        (b"2 " * 15_000, "a pax header is malformed"),
        (b"30013 comment=" + b"9" * 29_998 + b"\n", "a number of more than 128 digits"),
        (b"99 path=x\n", "a pax header is malformed"),
        (b"9 path=x", "a pax header is malformed"),
        (b"5 =x\n", "a pax header is malformed"),
        (b"0 path=x\n", "a pax header is malformed"),
    ],
)
def test_pax_headers_that_take_quadratic_time_are_refused(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    members = [pax_header(tarfile.XHDTYPE, content), (tarfile.TarInfo("config.json"), b"{}")]
    with pytest.raises(UnsupportedModel, match=reason):
        unpack(tmp_path, (tar_of_members(members), "tar"))


def test_global_headers_do_not_pile_up(tmp_path: Path) -> None:
    members = [(tarfile.TarInfo("config.json"), b"{}")]
    for number in range(40):
        record = b"1013 key%03d=%s\n" % (number, b"x" * 1000)
        members += [pax_header(tarfile.XGLTYPE, record), (tarfile.TarInfo(f"file-{number}"), b"")]
    assert len(members[1][1]) == 1013
    (tmp_path / "few").mkdir()
    assert unpack(tmp_path / "few", (tar_of_members(members[:41]), "tar")) == {"config.json": b"{}"}
    with pytest.raises(UnsupportedModel, match="global headers have more than 32768 bytes"):
        unpack(tmp_path, (tar_of_members(members), "tar"))


def test_the_map_of_a_sparse_file_is_bounded(tmp_path: Path) -> None:
    member = tarfile.TarInfo("sparse")
    member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    content = gzip.compress(tar_of_members([(member, b"1000000000\n" + b"1\n" * 10_000_000)]))
    with pytest.raises(UnsupportedModel, match="a header has more than 262144 bytes"):
        unpack(tmp_path, (content, "tar+gzip"))


@pytest.mark.parametrize("packing", ["tar", "tar+gzip", "tar+zstd"])
@pytest.mark.parametrize("end", [0, 100, 1024])
def test_a_tar_that_was_cut_between_files_is_refused(tmp_path: Path, packing: Packing, end: int) -> None:
    content = tar_of({"config.json": b"{}"})[:1024] + tar_of({"tokenizer.json": b"{}"})[:end]
    compress = {"tar": bytes, "tar+gzip": gzip.compress, "tar+zstd": zstandard.compress}[packing]
    with pytest.raises(UnsupportedModel, match="it ends without the mark of its end"):
        unpack(tmp_path, (compress(content), packing))
    (tmp_path / "whole").mkdir()
    whole = compress(content[:1024] + bytes(512))
    assert unpack(tmp_path / "whole", (whole, packing)) == {"config.json": b"{}"}


def test_a_damaged_header_is_not_the_end(tmp_path: Path) -> None:
    content = bytearray(tar_of({"config.json": b"{}", "tokenizer.json": b"{}"}))
    content[1024 + 10] ^= 1  # in the name of the second member
    with pytest.raises(UnsupportedModel, match="it ends without the mark of its end"):
        unpack(tmp_path, (bytes(content), "tar"))


@pytest.mark.parametrize("packing", ["tar+gzip", "tar+zstd"])
def test_the_checksum_behind_the_last_file_is_checked(tmp_path: Path, packing: Packing) -> None:
    content = tar_of({"config.json": b"{}"})
    with_checksum = zstandard.ZstdCompressor(write_checksum=True).compress(content)
    damaged = bytearray(gzip.compress(content) if packing == "tar+gzip" else with_checksum)
    damaged[-8 if packing == "tar+gzip" else -1] ^= 1
    with pytest.raises(UnsupportedModel, match="the archive cannot be unpacked"):
        unpack(tmp_path, (bytes(damaged), packing))


def test_the_number_of_members_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_MEMBERS", 10)
    files = {f"file-{number}": b"" for number in range(11)}
    with pytest.raises(UnsupportedModel, match="more than 10 files"):
        unpack(tmp_path, (tar_of(files), "tar"))


def test_a_file_larger_than_the_disk_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.statvfs_result((4096, 4096, 1000, 0, 0, 1000, 1000, 1000, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(NoSpace):
        unpack(tmp_path, (tar_of({"model.safetensors": b"x"}), "tar"))
    assert list((tmp_path / "unpacked").iterdir()) == []


@given(
    packing=st.sampled_from(PACKINGS),
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=8),
    length=st.floats(0, 1),
)
@settings(deadline=None, max_examples=300)
def test_damaged_archives_do_no_harm(
    packing: Packing, changes: list[tuple[float, int]], length: float
) -> None:
    content = bytearray(packed(below(served_files(shard_bytes=300), "m"), packing))
    for place, value in changes:
        content[int(place * len(content))] = value
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "root"
        root.mkdir()
        with suppress(FetchError):
            unpack(root, (bytes(content[: int(length * len(content)) + 1]), packing))
        assert os.listdir(name) == ["root"]
        assert set(os.listdir(root)) == {"archive-0", "unpacked"}
        assert all(path.is_file() and not path.is_symlink() for path in (root / "unpacked").iterdir())


@pytest.mark.parametrize(
    ("files", "preferred", "folder"),
    [
        (["config.json", "sub/config.json"], [], ""),
        (["models/tiny/config.json", "models/tiny/model.safetensors"], [], "models/tiny/"),
        (["config.json", "models/config.json"], ["models", ""], "models/"),
        (["config.json", "models/model.safetensors"], ["models", ""], ""),
        (["other/config.json"], ["models", ""], "other/"),
    ],
)
def test_the_model_s_folder(files: list[str], preferred: list[str], folder: str) -> None:
    assert model_folder(files, "oci://acme/tiny", preferred) == folder


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "there is no config.json in it"),
        (["model.safetensors"], "there is no config.json in it"),
        (["a/config.json", "b/config.json"], r"there are several models in it \('a/', 'b/'\)"),
    ],
)
def test_a_folder_that_is_not_clear(files: list[str], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"^oci://acme/tiny: {message}"):
        model_folder(files, "oci://acme/tiny")
