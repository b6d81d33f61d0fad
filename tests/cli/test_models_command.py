"""`argosy models`: what it prints, what it removes, and how it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from argosy.main import main
from argosy.terminal import age_seconds, size_bytes
from argosy_fetcher.errors import AccessDenied
from argosy_fetcher.store import Store
from argosy_fetcher.store_index import LAST_USE
from named_sources import PUBLISHED, TINY, publish_tiny, serve_names
from scripted_source import ScriptedSource, Stop

DAY_S = 86400


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    serve_names(monkeypatch, tmp_path)
    monkeypatch.chdir(tmp_path)  # where no directory is named like a repository


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that succeeds, and return its output."""
    assert main(["models", *arguments]) == 0
    return capsys.readouterr().out


def fail(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 1) -> str:
    """Run a command that fails, and return the last line of its errors."""
    assert main(["models", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()[-1]


def use(path: str, days_ago: float) -> None:
    then = time.time() - days_ago * DAY_S
    os.utime(Path(path) / LAST_USE, (then, then))


def test_pull_prints_the_directory_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    source = publish_tiny("acme/tiny")
    assert main(["models", "pull", "acme/tiny"]) == 0
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    assert (Path(line) / "model.safetensors").read_bytes() == (TINY / "model.safetensors").read_bytes()
    assert f"hf://acme/tiny: revision {source.revision}" in captured.err
    assert run(capsys, "path", "acme/tiny") == f"{line}\n"
    assert run(capsys, "path", "hf://acme/tiny@" + source.revision) == f"{line}\n"
    assert run(capsys, "pull", "hf://acme/tiny") == f"{line}\n"
    assert source.num_snapshots == 1


def test_a_link_leads_to_the_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = publish_tiny("acme/tiny")
    link = tmp_path / "model"
    first = run(capsys, "pull", "acme/tiny", "--link", str(link)).strip()
    assert link.is_symlink()
    assert link.resolve() == Path(first).resolve()
    source.revision = "f" * 40
    second = run(capsys, "pull", "acme/tiny", "--refresh", "--link", str(link)).strip()
    assert second != first
    assert link.resolve() == Path(second).resolve()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".model")] == []


def test_a_gguf_file_is_a_model_of_its_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    publish_tiny("acme/tiny")
    run(capsys, "pull", "acme/tiny")
    files = {"Tiny-Q4_K_M.gguf": b"GGUF 4", "Tiny-Q8_0.gguf": b"GGUF 8"}
    PUBLISHED["acme/tiny"] = ScriptedSource(files, name="hf://acme/tiny:Q8_0")
    link = tmp_path / "model.gguf"
    path = run(capsys, "pull", "acme/tiny:q8_0", "--link", str(link)).strip()
    assert Path(path).name == "Tiny-Q8_0.gguf"
    assert Path(path).read_bytes() == link.read_bytes() == b"GGUF 8"
    assert run(capsys, "path", "acme/tiny:Q8_0@main") == f"{path}\n"
    assert "pull hf://acme/tiny:Q4_K_M` fetches it" in fail(capsys, "path", "acme/tiny:Q4_K_M")
    listed = [line.split()[0] for line in run(capsys, "list").splitlines()[1:]]
    assert listed == ["hf://acme/tiny", "hf://acme/tiny:Q8_0"]
    assert run(capsys, "rm", "acme/tiny:q8_0").startswith("removed hf://acme/tiny:Q8_0 at ")
    assert [line.split()[0] for line in run(capsys, "list").splitlines()[1:]] == ["hf://acme/tiny"]


def test_a_link_in_a_missing_folder_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    publish_tiny("acme/tiny")
    told = fail(capsys, "pull", "acme/tiny", "--link", str(tmp_path / "missing" / "model"))
    assert "cannot make the link" in told
    assert "give a path in a writable folder" in told


def test_a_model_of_another_engine_is_fetched_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    publish_tiny("acme/bert", architectures=["SwinBackbone"])
    assert "architecture SwinBackbone is not supported" in fail(capsys, "pull", "acme/bert")
    path = run(capsys, "pull", "acme/bert", "--any-architecture").strip()
    assert (Path(path) / "model.safetensors").is_file()


def test_a_revision_may_be_part_of_the_name_or_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    source = publish_tiny("acme/tiny")
    run(capsys, "pull", "acme/tiny", "--revision", "v1")
    assert source.requested_revision == "v1"
    assert run(capsys, "path", "acme/tiny@v1") == run(capsys, "path", "acme/tiny", "--revision", "v1")


def test_list_shows_models_and_what_interrupted_fetches_have_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "list") == "MODEL  REVISION  SIZE  USED  STATE\n"
    whole = publish_tiny("acme/tiny")
    path = run(capsys, "pull", "acme/tiny").strip()
    cut = publish_tiny("acme/cut")
    cut.on_read = lambda read: (
        Stop(after=1000, error=AccessDenied("gated")) if "safetensors" in read.path else None
    )
    assert fail(capsys, "pull", "acme/cut") == "argosy models: gated"
    use(path, 3)
    header, *rows = run(capsys, "list").splitlines()
    assert header.split() == ["MODEL", "REVISION", "SIZE", "USED", "STATE"]
    assert [row.split()[0] for row in rows] == ["hf://acme/tiny", "hf://acme/cut"]
    assert [row.split()[1] for row in rows] == [whole.revision[:12]] * 2
    assert [row.split()[-1] for row in rows] == ["complete", "partial"]
    assert "  3d ago  " in rows[0]
    models = json.loads(run(capsys, "list", "-o", "json"))
    assert [model["complete"] for model in models] == [True, False]
    assert models[0]["path"] == path
    assert models[0]["requested_revisions"] == [""]


def test_damaged_models_are_listed_and_removed(capsys: pytest.CaptureFixture[str]) -> None:
    publish_tiny("acme/tiny")
    path = Path(run(capsys, "pull", "acme/tiny").strip())
    (path / ".argosy-model.json").unlink()
    (row,) = run(capsys, "list").splitlines()[1:]
    assert (row.split()[0], row.split()[-1]) == (path.parent.name, "damaged")
    (model,) = json.loads(run(capsys, "list", "-o", "json"))
    assert (model["complete"], model["state"]) == (False, "damaged")
    run(capsys, "rm", "acme/tiny")
    assert not path.exists()


def test_rm_of_the_default_revision_means_what_was_pulled_without_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = publish_tiny("acme/tiny")
    run(capsys, "pull", "acme/tiny@v1")
    source.revision = "f" * 40
    run(capsys, "pull", "acme/tiny")
    assert run(capsys, "rm", "acme/tiny@main").startswith("removed hf://acme/tiny at ffffffffffff (")
    assert len(run(capsys, "list").splitlines()) == 2


def test_an_architecture_that_the_engine_does_not_serve_is_refused_before_the_weights(
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = publish_tiny("acme/bert", architectures=["SwinBackbone"])
    error = fail(capsys, "pull", "acme/bert")
    assert error.startswith(
        "argosy models: hf://acme/bert: config.json: architecture SwinBackbone is not supported"
    )
    assert source.paths_read() == {"config.json"}


def test_rm_removes_every_revision_or_the_one_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    source = publish_tiny("acme/tiny")
    for revision in ("a", "b", "c"):
        source.revision = revision * 40
        run(capsys, "pull", "acme/tiny", "--revision", revision)
    assert run(capsys, "rm", "acme/tiny@a").startswith("removed hf://acme/tiny at aaaaaaaaaaaa (")
    assert [row.split()[1] for row in run(capsys, "list").splitlines()[1:]] == ["b" * 12, "c" * 12]
    run(capsys, "rm", "acme/tiny", "--revision", "b" * 7)
    assert [row.split()[1] for row in run(capsys, "list").splitlines()[1:]] == ["c" * 12]
    assert "is not in the store; `argosy models list` shows" in fail(capsys, "rm", "acme/tiny@bbb")
    run(capsys, "rm", "acme/tiny")
    assert len(run(capsys, "list").splitlines()) == 1
    assert "is not in the store" in fail(capsys, "rm", "acme/tiny")


def test_a_model_in_use_is_not_removed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    publish_tiny("acme/tiny")
    path = Path(run(capsys, "pull", "acme/tiny").strip())
    with Store(tmp_path).hold(path):
        assert "a running process uses it" in fail(capsys, "rm", "acme/tiny")
        assert main(["models", "prune", "--max-size", "0"]) == 0
        captured = capsys.readouterr()
        assert captured.out == "freed 0 B\n"
        assert "is in use and stays" in captured.err
    assert path.is_dir()
    run(capsys, "rm", "acme/tiny")
    assert not path.exists()


def test_prune_removes_by_age_and_by_size(capsys: pytest.CaptureFixture[str]) -> None:
    for name, days_ago in (("old", 40), ("older", 50), ("new", 1)):
        publish_tiny(f"acme/{name}")
        use(run(capsys, "pull", f"acme/{name}").strip(), days_ago)
    lines = run(capsys, "prune", "--max-age", "45d").splitlines()
    assert lines[0].startswith("removed hf://acme/older at ")
    assert lines[1].startswith("freed ")
    assert "removed hf://acme/old at" in run(capsys, "prune", "--max-size", "8M")
    assert "hf://acme/new" in run(capsys, "list")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["pull", "./nowhere"], "'./nowhere' is neither ORG/NAME of a hub nor another source; see"),
        (["pull", "/"], "'/' is a directory of this machine; write hf://ORG/NAME"),
        (["pull", "Qwen3-0.6B"], "'Qwen3-0.6B' has no organisation: write ORG/Qwen3-0.6B, as the hub's page"),
        (["rm", "gpt2@main"], "'gpt2@main' has no organisation: write ORG/gpt2@main, as"),
        (["pull", "builtin://tiny"], "builtin:// models are not kept in the store"),
        (["pull", "s3://UPPER/x"], "'UPPER' is no name of a bucket"),
        (["pull", "hf://a/b@v1", "--revision", "v2"], "names another revision"),
        (["prune"], "give --max-size SIZE, --max-age AGE or both"),
        (["prune", "--max-size", "much"], "argument --max-size: must be a size such as 500G"),
        (["prune", "--max-size", "5GB"], "argument --max-size: must be a size such as 500G"),
        (["prune", "--max-age", "30"], "argument --max-age: must be a number with a unit"),
        (["xyzzy"], "invalid choice: 'xyzzy'"),
        (["ls"], "'ls' is not a command; did you mean `argosy models list`?"),
        (["delete", "acme/tiny"], "'delete' is not a command; did you mean `argosy models rm`?"),
    ],
)
def test_wrong_usage_is_one_line_with_the_remedy(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error in fail(capsys, *arguments, code=2)


def test_without_a_command_the_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    publish_tiny("acme/tiny")
    run(capsys, "pull", "acme/tiny")
    assert "acme/tiny" in run(capsys)


def test_what_is_not_in_the_store_has_no_path(capsys: pytest.CaptureFixture[str]) -> None:
    publish_tiny("acme/tiny")
    error = fail(capsys, "path", "acme/tiny")
    assert error == (
        "argosy models: hf://acme/tiny is not in the store; `argosy models pull hf://acme/tiny` fetches it"
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("64000000", 64_000_000),
        ("2k", 2000),
        ("1.5G", 3 << 29),
        ("2Gi", 2 << 30),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("2h", 7200), ("30d", 30 * DAY_S), ("1w", 7 * DAY_S)]
)
def test_ages(text: str, seconds: float) -> None:
    assert age_seconds(text) == seconds


def test_help_shows_every_subcommand_with_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["models", "--help"])
    shown = capsys.readouterr().out
    for usage in (
        "argosy models list ",
        "argosy models pull ",
        "argosy models rm ",
        "--max-age AGE",
        "--refresh",
    ):
        assert usage in shown


def test_a_tree_of_stores_is_pruned_as_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_tiny("acme/tiny")
    tree = tmp_path / "tree"
    stores = [str(tree / "blue/public"), str(tree / "green/secret-hub")]
    paths = [run(capsys, "pull", "acme/tiny", "--download-dir", store).strip() for store in stores]
    prune = ("prune", "--tree", str(tree), "--max-size", "0")
    assert run(capsys, *prune) == "freed 0 B; 12.4 MiB are left\n"
    use(paths[0], 1)
    name = Path(paths[0]).relative_to(tree)
    assert (
        run(capsys, *prune)
        == f"removed {name} (6.2 MiB, unused for 24.0 h)\nfreed 6.2 MiB; 6.2 MiB are left\n"
    )
    monkeypatch.setenv("ARGOSY_CACHE_MIN_AGE", "0s")
    with Store(Path(stores[1])).hold(Path(paths[1])):
        output = run(capsys, *prune)
    assert output == f"{Path(paths[1]).relative_to(tree)} is in use and stays\nfreed 0 B; 6.2 MiB are left\n"


def test_pruning_a_tree_refuses_what_it_cannot_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--max-size" in fail(capsys, "prune", "--tree", str(tmp_path), code=2)
    assert "--every needs --tree" in fail(capsys, "prune", "--max-size", "0", "--every", "9", code=2)
    every = ("--tree", str(tmp_path), "--max-size", "0", "--every", "0")
    assert "at least 1 second" in fail(capsys, "prune", *every, code=2)
    missing = str(tmp_path / "none")
    assert f"cannot read {missing}" in fail(capsys, "prune", "--tree", missing, "--max-size", "0")
    monkeypatch.setenv("ARGOSY_CACHE_MIN_AGE", "soon")
    assert "ARGOSY_CACHE_MIN_AGE: 'soon' must be a number with a unit" in fail(
        capsys, "prune", "--tree", str(tmp_path), "--max-size", "0", code=2
    )


def test_repeated_rounds_remove_nothing_by_age_at_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """After a reboot the engines that use the models do not hold them yet."""
    publish_tiny("acme/tiny")
    tree = tmp_path / "tree"
    path = run(capsys, "pull", "acme/tiny", "--download-dir", str(tree / "blue/public")).strip()
    use(path, 40)
    command = ["models", "prune", "--tree", str(tree), "--max-age", "30d", "--every", "1"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "argosy", *command], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    rounds = [process.stdout.readline() for _ in range(2)]
    process.terminate()
    process.communicate(timeout=60)
    assert rounds[0] == "freed 0 B; 6.2 MiB are left\n"
    assert rounds[1].startswith("removed ")


def test_pruning_a_tree_again_and_again_ends_at_sigterm(tmp_path: Path) -> None:
    command = ["models", "prune", "--tree", str(tmp_path), "--max-size", "0", "--every", "3600"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "argosy", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "freed 0 B; 0 B are left\n"
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (143, "argosy: stopped by SIGTERM\n")
