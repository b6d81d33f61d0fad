"""The list of a hub model's files: revisions, digests, and answers that cannot be used."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from argosy_fetcher.errors import FetchError, InvalidSource, Offline, UnsupportedModel
from argosy_fetcher.source import MAX_FILES, RemoteFile
from argosy_fetcher.sources.hub import MAX_LISTING_BYTES
from hub_faults import Fault
from hub_server import HubServer
from hub_sources import MODEL, file_of, hub_source, matches, read

WEIGHTS = bytes(range(256)) * 40
FILES = {
    "config.json": b'{"a": 1}\n',
    "model.safetensors": WEIGHTS,
    "sub/vocab.json": b"{}",
    "empty.txt": b"",
}
SHA = "a" * 40


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as hub:
        hub.add_model(MODEL, FILES)
        yield hub


def test_files_have_sizes_and_the_digests_of_git_and_lfs(hub: HubServer) -> None:
    source = hub_source(hub)
    snapshot = source.snapshot()
    assert snapshot.source == source.name == f"hf://{MODEL}?endpoint={hub.endpoint}"
    assert source.requested_revision == ""
    assert snapshot.revision == hub.repositories[MODEL].refs["main"]
    assert {file.path: file.size for file in snapshot.files} == {
        path: len(content) for path, content in FILES.items()
    }
    assert all(matches(file, FILES[file.path]) for file in snapshot.files)
    weights = file_of(snapshot, "model.safetensors")
    assert weights.digest is not None
    assert (weights.digest.algorithm, weights.version) == ("sha256", hashlib.sha256(WEIGHTS).hexdigest())
    config = file_of(snapshot, "config.json")
    assert config.digest is not None
    assert (config.digest.algorithm, config.version) == ("git-sha1", config.digest.hex)
    assert [request.kind for request in hub.requests()] == ["list"]


@pytest.mark.parametrize("revision", ["main", "v1.0", "refs/pr/1", "feature/long+name"])
def test_a_branch_or_tag_is_resolved_to_its_commit(hub: HubServer, revision: str) -> None:
    repository = hub.repositories[MODEL]
    repository.refs[revision] = repository.add({"config.json": revision.encode()}, "elsewhere").sha
    source = hub_source(hub, revision=revision)
    snapshot = source.snapshot()
    assert snapshot.revision == repository.refs[revision]
    assert read(source, file_of(snapshot, "config.json")) == revision.encode()
    assert source.requested_revision == revision


def test_reads_stay_at_the_commit_while_the_branch_moves_on(hub: HubServer) -> None:
    source = hub_source(hub)
    snapshot = source.snapshot()
    hub.repositories[MODEL].add({"config.json": b"new", "model.safetensors": b"new"})
    assert read(source, file_of(snapshot, "config.json")) == FILES["config.json"]
    assert read(source, file_of(snapshot, "model.safetensors")) == WEIGHTS
    assert source.snapshot().revision != snapshot.revision


def test_a_commit_is_a_revision(hub: HubServer) -> None:
    old = hub.repositories[MODEL].refs["main"]
    hub.repositories[MODEL].add({"config.json": b"new"})
    assert hub_source(hub, revision=old).snapshot().revision == old


def test_a_renamed_repository_is_found_under_its_old_name(hub: HubServer) -> None:
    hub.renamed["old/name"] = MODEL
    source = hub_source(hub, "old/name")
    snapshot = source.snapshot()
    assert snapshot.source == f"hf://old/name?endpoint={hub.endpoint}"
    for path in ("config.json", "model.safetensors"):
        assert read(source, file_of(snapshot, path)) == FILES[path]


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "ARGOSY_OFFLINE"])
def test_offline_mode_makes_no_request(hub: HubServer, name: str) -> None:
    with pytest.raises(Offline, match=r"hf://org/model is not in the store.*HF_HUB_OFFLINE"):
        hub_source(hub, **{name: "1"}).snapshot()
    assert hub.requests() == []


@pytest.mark.parametrize("name", ["org/na me", "org/..", "a--b/c", "org/name.git", "a/b/c", "org/-x"])
def test_malformed_names_are_refused_without_a_request(hub: HubServer, name: str) -> None:
    with pytest.raises(InvalidSource, match="is not the name of a model"):
        hub_source(hub, name)
    assert hub.requests() == []


def info(**fields: Any) -> dict[str, Any]:
    return {"id": MODEL, "sha": SHA, "siblings": [], **fields}


def listed(**fields: Any) -> dict[str, Any]:
    return info(siblings=[{"rfilename": "config.json", "size": 1, "blobId": "b" * 40, **fields}])


LFS = {"sha256": "c" * 64, "size": 1, "pointerSize": 1}
MALFORMED = {
    "no JSON": "<html>Log in to the network</html>",
    "cut JSON": '{"id": "org/model"',
    "nested without end": "[" * 100_000,
    "a list": "[]",
    "no id": json.dumps({"sha": SHA}),
    "no commit": json.dumps(info(sha=None)),
    "a commit that is a number": json.dumps(info(sha=5)),
    "a commit that is a branch": json.dumps(info(sha="main")),
    "a commit that leads elsewhere": json.dumps(info(sha="../" * 13 + "a")),
    "files that are a number": json.dumps(info(siblings=3)),
    "a file that is a text": json.dumps(info(siblings=["config.json"])),
    "a file without a name": json.dumps(info(siblings=[{"size": 1}])),
    "a name that is a number": json.dumps(listed(rfilename=3)),
    "no size": json.dumps(listed(size=None)),
    "a negative size": json.dumps(listed(size=-1)),
    "a size that is a text": json.dumps(listed(size="1")),
    "a size beyond all disks": json.dumps(listed(size=1 << 60)),
    "lfs that is a text": json.dumps(listed(lfs="abc")),
    "lfs without a digest": json.dumps(listed(lfs={"size": 1})),
    "a digest that is none": json.dumps(listed(lfs={**LFS, "sha256": "../../etc/passwd"})),
    "a digest that is a list": json.dumps(listed(lfs={**LFS, "sha256": ["c" * 64]})),
    "a file twice": json.dumps(info(siblings=listed()["siblings"] * 2)),
    "too many files": json.dumps(
        info(siblings=[{"rfilename": f"{index}.txt", "size": 1} for index in range(MAX_FILES + 1)])
    ),
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_an_answer_that_is_not_a_hub_s_is_an_error_that_names_the_setting(hub: HubServer, body: str) -> None:
    hub.faults.add("list", Fault(body=body.encode()))
    with pytest.raises(FetchError, match="HF_ENDPOINT, which must be a Hugging Face hub") as caught:
        hub_source(hub).snapshot()
    assert type(caught.value) is FetchError
    assert str(caught.value).startswith("hf://org/model: ")


def test_a_list_beyond_all_bounds_is_refused(hub: HubServer) -> None:
    hub.faults.add("list", Fault(body=b" " * (MAX_LISTING_BYTES + 1)))
    with pytest.raises(UnsupportedModel, match=f"the list of files has more than {MAX_LISTING_BYTES} bytes"):
        hub_source(hub).snapshot()


def test_another_commit_than_the_one_asked_for_is_refused(hub: HubServer) -> None:
    hub.faults.add("list", Fault(body=json.dumps(info(sha="b" * 40)).encode()))
    with pytest.raises(FetchError, match=f"it is for commit {'b' * 40}"):
        hub_source(hub, revision=hub.repositories[MODEL].refs["main"]).snapshot()


@pytest.mark.parametrize(
    "path",
    ["../config.json", "/etc/passwd", "a/../../b", "a\\b", "a//b", ".argosy-model.json", "x\n", "y" * 513],
)
def test_unsafe_names_of_files_are_refused(hub: HubServer, path: str) -> None:
    hub.faults.add("list", Fault(body=json.dumps(listed(rfilename=path)).encode()))
    with pytest.raises(UnsupportedModel, match="unsafe name"):
        hub_source(hub).snapshot()


@pytest.mark.parametrize("blob_id", [None, 7, "d" * 64, "main"])
def test_files_without_a_usable_digest_are_listed_without_one(hub: HubServer, blob_id: object) -> None:
    hub.faults.add("list", Fault(body=json.dumps(listed(blobId=blob_id)).encode()))
    assert hub_source(hub).snapshot().files == (RemoteFile("config.json", 1),)


SCRIPT = """
import os
from argosy_fetcher.source_uri import SourceUri
from argosy_fetcher.sources.hub import HubSource
source = HubSource(SourceUri("hf", "org/secret"), dict(os.environ))
snapshot = source.snapshot()
print(snapshot.revision, b"".join(source.read(snapshot.file("config.json"), 0, 8)).decode())
"""


def test_the_environment_s_login_is_used_and_nothing_but_the_model_is_asked_for(
    hub: HubServer, tmp_path: Path
) -> None:
    """In a process of its own, where huggingface_hub itself sees HF_ENDPOINT and HF_HOME."""
    hub.add_model("org/secret", FILES, is_private=True)
    hub.tokens["hf_login"] = {"org/secret"}
    (tmp_path / "token").write_text("hf_login\n")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**kept, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n")[0] == f"{hub.repositories['org/secret'].refs['main']} " + '{"a": 1}'
    assert [request.kind for request in hub.requests()] == ["list", "resolve", "content"]
    assert "hf_login" not in done.stdout + done.stderr
