"""The hub look-alike is a hub to huggingface_hub itself, refusals included."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from hub_faults import Fault
from hub_repositories import files_under
from hub_server import HubServer
from loopback_certificate import issue_certificate

FILES = {"config.json": b'{"a": 1}', "model.safetensors": bytes(range(256)) * 4000, "sub/x y.json": b"{}"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    with HubServer() as hub:
        hub.add_model("org/model", FILES)
        hub.add_model("org/private", FILES, is_private=True)
        hub.add_model("org/gated", FILES, gate="content")
        hub.add_model("org/disabled", FILES, is_disabled=True)
        hub.tokens |= {"hf_known": set(), "hf_member": {"org/private", "org/gated"}}
        yield hub


@pytest.mark.parametrize("redirects_small_files", [True, False])
def test_a_whole_model_is_downloaded(hub: HubServer, tmp_path: Path, redirects_small_files: bool) -> None:
    hub.redirects_small_files = redirects_small_files
    folder = Path(snapshot_download("org/model", cache_dir=tmp_path, endpoint=hub.endpoint, token=False))
    assert folder.name == hub.repositories["org/model"].refs["main"]
    assert {path: content.read_bytes() for path, content in files_under(folder).items()} == FILES


def test_it_listens_where_it_is_told(tmp_path: Path) -> None:
    with HubServer("127.0.0.2") as hub:
        hub.add_model("org/model", FILES)
        folder = Path(snapshot_download("org/model", cache_dir=tmp_path, endpoint=hub.endpoint, token=False))
        addresses = (hub.endpoint, f"http://{hub.storage_host}")
    assert all(address.startswith("http://127.0.0.2:") for address in addresses)
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_it_speaks_tls_on_both_ports(tmp_path: Path) -> None:
    tls = issue_certificate(tmp_path)
    with HubServer(tls=tls) as hub, httpx.Client(verify=ssl.create_default_context(cafile=tls[0])) as client:
        hub.add_model("org/model", FILES)
        answer = client.get(f"{hub.endpoint}/org/model/resolve/main/model.safetensors", follow_redirects=True)
    assert answer.content == FILES["model.safetensors"]
    assert [str(each.url).partition(":")[0] for each in (*answer.history, answer)] == ["https", "https"]


def test_ids_are_those_of_git_and_lfs(hub: HubServer) -> None:
    info = HfApi(endpoint=hub.endpoint, token=False).model_info("org/model", files_metadata=True)
    assert info.sha == hub.repositories["org/model"].refs["main"]
    config, weights, _ = info.siblings or []
    assert config.blob_id == "4a036f56bb619924ec4189bd84ed716c766971ae"  # git hash-object
    assert weights.lfs is not None
    assert (weights.size, weights.lfs.size) == (1_024_000, 1_024_000)


def test_a_private_model_needs_its_account(hub: HubServer) -> None:
    for token in (False, "hf_known"):
        with pytest.raises(RepositoryNotFoundError):
            HfApi(endpoint=hub.endpoint, token=token).model_info("org/private")
    assert HfApi(endpoint=hub.endpoint, token="hf_member").model_info("org/private").private


def test_a_gated_model_s_files_need_consent(hub: HubServer, tmp_path: Path) -> None:
    for token in (False, "hf_known"):
        with pytest.raises(GatedRepoError):
            hf_hub_download(
                "org/gated", "config.json", cache_dir=tmp_path, endpoint=hub.endpoint, token=token
            )
    path = hf_hub_download(
        "org/gated", "config.json", cache_dir=tmp_path, endpoint=hub.endpoint, token="hf_member"
    )
    assert Path(path).read_bytes() == FILES["config.json"]


def test_refusals_have_their_own_errors(hub: HubServer, tmp_path: Path) -> None:
    api = HfApi(endpoint=hub.endpoint, token="hf_known")
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("org/none")
    with pytest.raises(RevisionNotFoundError):
        api.model_info("org/model", revision="v9")
    with pytest.raises(DisabledRepoError):
        api.model_info("org/disabled")
    with pytest.raises(EntryNotFoundError):
        api.hf_hub_download("org/model", "none.json", cache_dir=tmp_path)
    with pytest.raises(HfHubHTTPError, match="Invalid credentials"):
        HfApi(endpoint=hub.endpoint, token="hf_wrong").model_info("org/model")


def test_a_renamed_model_is_followed(hub: HubServer, tmp_path: Path) -> None:
    hub.renamed["old/name"] = "org/model"
    path = hf_hub_download(
        "old/name", "model.safetensors", cache_dir=tmp_path, endpoint=hub.endpoint, token=False
    )
    assert Path(path).read_bytes() == FILES["model.safetensors"]


def test_files_on_disk_are_served(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "model.safetensors").write_bytes(FILES["model.safetensors"])
    hub.add_model("org/disk", files_under(tmp_path / "repository"))
    path = hf_hub_download(
        "org/disk", "model.safetensors", cache_dir=tmp_path, endpoint=hub.endpoint, token=False
    )
    assert Path(path).read_bytes() == FILES["model.safetensors"]
    assert hub.sent_bytes == len(FILES["model.safetensors"])


def test_a_fault_spoils_the_answers_that_it_is_for(hub: HubServer, tmp_path: Path) -> None:
    hub.faults.add("content", Fault(flip_at=500_000), path="*.safetensors")
    path = hf_hub_download(
        "org/model", "model.safetensors", cache_dir=tmp_path, endpoint=hub.endpoint, token=False
    )
    content, expected = Path(path).read_bytes(), FILES["model.safetensors"]
    assert [at for at in range(len(expected)) if content[at] != expected[at]] == [500_000]
    assert hub.faults.is_used_up
    hub.faults.add("list", Fault(status=418), after=1)
    api = HfApi(endpoint=hub.endpoint, token=False)
    assert api.model_info("org/model").sha
    with pytest.raises(HfHubHTTPError):
        api.model_info("org/model")
    assert api.model_info("org/model").sha
