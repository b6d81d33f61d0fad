"""Models that an engine fetches before it starts: names, refusals, the store, and what `argosy doctor` reads."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from argosy_engine import LLM, EngineArgs, SamplingParams
from argosy_engine.api.doctor import diagnose
from argosy_engine.api.doctor import main as doctor
from argosy_engine.checkpoint.model_folder import hold_stored_model, resolve_model
from argosy_engine.errors import ConfigError, FetchFailed
from argosy_engine.frontend.model_source import is_remote, local_model, local_model_async, model_headers
from argosy_engine.models.config_file import load_model_config
from argosy_fetcher.errors import ModelInUse, NoSpace, TransientError
from argosy_fetcher.progress import LineDisplay
from argosy_fetcher.pull import find_model, open_store
from argosy_fetcher.source_uri import parse
from named_sources import PUBLISHED, publish_tiny, serve_names
from scripted_source import Read, Stop

URI = parse("hf://acme/tiny")
SMALL: dict[str, Any] = {"device": "cpu", "threads": 1, "num_gpu_blocks_override": 64, "max_model_len": 256}


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    serve_names(monkeypatch, tmp_path)
    monkeypatch.chdir(tmp_path)  # where no directory is named like a repository


def quiet() -> LineDisplay:
    return LineDisplay(lambda line: None)


def test_a_model_of_the_hub_generates_under_the_name_that_was_typed() -> None:
    source = publish_tiny("acme/tiny")
    params = SamplingParams(temperature=0.0, max_tokens=4)
    llm = LLM("acme/tiny", **SMALL)
    try:
        assert llm.config.model_name == "acme/tiny"
        assert Path(llm.config.model_path).name == source.revision
        (fetched,) = llm.generate("The sea", params, use_tqdm=False)
    finally:
        llm.close()
    shipped = LLM("builtin://tiny", **SMALL)
    try:
        (expected,) = shipped.generate("The sea", params, use_tqdm=False)
    finally:
        shipped.close()
    assert fetched.token_ids == expected.token_ids


def test_dummy_weights_fetch_no_weights() -> None:
    source = publish_tiny("acme/tiny")
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    llm = LLM("acme/tiny", load_format="dummy", **SMALL)
    try:
        (first,) = llm.generate("The sea", params, use_tqdm=False)
        llm.sleep()
        llm.wake_up()
        (second,) = llm.generate("The sea", params, use_tqdm=False)
    finally:
        llm.close()
    assert first.token_ids == second.token_ids
    assert not any(path.endswith(".safetensors") for path in source.paths_read())
    assert find_model(URI) is None


def test_a_model_stays_in_the_store_while_an_engine_runs() -> None:
    publish_tiny("acme/tiny")
    llm = LLM("acme/tiny", **SMALL)
    store = open_store(None)
    (stored,) = store.list()
    with pytest.raises(ModelInUse):
        store.remove(stored)
    llm.close()
    store.remove(stored)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"architectures": ["SwinBackbone"]},
            "architecture SwinBackbone is not supported; there is: BambaForCausalLM",
        ),
        ({"quantization_config": {"bits": 4}}, "the checkpoint is quantised"),
        ({"auto_map": {"AutoModel": "model.Model"}}, "auto_map asks to run Python code"),
        ({"torch_dtype": "float8_e4m3fn", "dtype": None}, "dtype 'float8_e4m3fn' is not supported"),
        ({"hidden_size": "many"}, "Expected `int`"),
    ],
)
def test_what_the_engine_does_not_serve_is_refused_before_any_weight(
    change: dict[str, Any], reason: str
) -> None:
    source = publish_tiny("acme/odd", **change)
    for refused in (partial(LLM, **SMALL), lambda model: diagnose(EngineArgs.of(model=model))):
        with pytest.raises(ConfigError) as refusal:
            refused("acme/odd")
        assert str(refusal.value).startswith("hf://acme/odd: config.json: ")
        assert reason in str(refusal.value)
        assert source.paths_read() == {"config.json"}


def test_what_overrides_make_servable_is_fetched() -> None:
    publish_tiny("acme/odd", auto_map={"AutoModel": "model.Model"})
    args = EngineArgs.of(model="acme/odd", hf_overrides={"auto_map": None})
    diagnose(args)
    with local_model(args, quiet()) as local:
        assert load_model_config(Path(local.model), local.model_use).replaced_code is False


def test_whose_code_is_asked_for_counts_before_any_weight() -> None:
    source = publish_tiny("acme/odd", hidden_act="gelu")
    args = EngineArgs.of(model="acme/odd", model_impl="argosy")
    with (
        pytest.raises(ConfigError, match="only silu; leave out --model-impl argosy"),
        local_model(args, quiet()),
    ):
        pass
    assert source.paths_read() == {"config.json"}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("acme/tiny", "acme/tiny"),
        ("hf://acme/tiny", "acme/tiny"),
        ("acme/tiny@v1", "acme/tiny"),
        ("hf://acme/tiny@v1", "acme/tiny"),
    ],
)
def test_a_model_of_the_hub_has_the_name_of_its_repository_unless_it_is_given(model: str, name: str) -> None:
    publish_tiny("acme/tiny")
    with local_model(EngineArgs.of(model=model), quiet()) as local:
        assert local.canonical_name == name
    with local_model(EngineArgs.of(model=model, served_model_name=("mine", "also")), quiet()) as local:
        assert local.served_model_name == ("mine", "also")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("builtin://tiny", "tiny"),
        ("/models/tiny", "/models/tiny"),
        ("file:///models/tiny", "/models/tiny"),
        ("s3://bucket/tiny", "s3://bucket/tiny"),
        ("oci://host/org/tiny:v1", "oci://host/org/tiny"),
        (f"oci://host/org/tiny@sha256:{'a' * 64}", "oci://host/org/tiny"),
        ("https://host/m.tar?sig=hunter2", "https://host/m.tar"),
        (f"https://host/m.tar?x=1&sig=hunter2#sha256={'a' * 64}", "https://host/m.tar"),
        ("ftp://host/m?sig=hunter2", "ftp://host/m"),
    ],
)
def test_neither_revision_nor_query_is_part_of_a_name(model: str, name: str) -> None:
    assert EngineArgs.of(model=model).canonical_name == name


def test_a_directory_whose_name_looks_like_a_revision_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "acme" / "tiny@v1").mkdir(parents=True)
    assert EngineArgs.of(model="acme/tiny@v1").canonical_name == "acme/tiny@v1"


def test_arguments_of_a_fetch_end_with_it(tmp_path: Path) -> None:
    source = publish_tiny("acme/tiny")
    args = EngineArgs.of(model="acme/tiny", revision="v1", download_dir=str(tmp_path / "here"), seed=7)
    with local_model(args, quiet()) as local:
        assert Path(local.model).is_relative_to(tmp_path / "here")
        assert (local.revision, local.download_dir, local.seed) == (None, None, 7)
        assert source.requested_revision == "v1"
        with local_model(local) as again:
            assert again is local


def test_a_directory_wins_over_a_repository_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    assert not is_remote(EngineArgs.of(model="acme/tiny"))
    assert is_remote(EngineArgs.of(model="hf://acme/tiny"))
    with pytest.raises(ConfigError, match=r"has no config\.json.*hf://ORG/NAME"):
        LLM("acme/tiny", **SMALL)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("ftp://host/x", "must begin with one of hf://"),
        ("hf://a/b/c", "must be hf://ORG/NAME"),
        ("gpt2", "is no directory; .* hf://ORG/NAME .*: openai-community/gpt2"),
        ("hf://gpt2", "gpt2 is openai-community/gpt2"),
        ("acme/missing", "hf://acme/missing: no such repository"),
        ("pvc://claim/x", "is not on this machine"),
    ],
)
def test_a_model_that_is_nowhere_is_a_config_error(model: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        LLM(model, **SMALL)


def test_a_local_model_has_no_revision() -> None:
    with pytest.raises(ConfigError, match="--revision v1: 'builtin://tiny' is on this machine"):
        LLM("builtin://tiny", revision="v1", **SMALL)


@pytest.mark.parametrize(
    "error", [TransientError("hf://acme/tiny: no answer"), NoSpace("hf://acme/tiny: the disk is full")]
)
def test_what_another_attempt_may_cure_is_no_config_error(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    PUBLISHED["acme/tiny"] = error
    with pytest.raises(FetchFailed, match=str(error)):
        LLM("acme/tiny", **SMALL)
    assert doctor(["acme/tiny"]) == 1
    assert capsys.readouterr().err == f"argosy doctor: {error}\n"


def test_doctor_reads_headers_only_and_says_the_same() -> None:
    source = publish_tiny("acme/tiny")
    flags: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": 64 << 20}
    told = diagnose(EngineArgs.of(model="acme/tiny", **flags))
    assert told.model == "acme/tiny"
    shipped = diagnose(EngineArgs.of(model="builtin://tiny", **flags))
    assert told.budget is not None
    assert shipped.budget is not None
    assert told.budget.weights_bytes == shipped.budget.weights_bytes
    assert told.kv_cache_tokens == shipped.kv_cache_tokens
    assert source.num_bytes < len(source.content["model.safetensors"]) / 4
    assert find_model(URI) is None


def test_doctor_reads_the_store_if_the_model_is_there() -> None:
    source = publish_tiny("acme/tiny")
    with local_model(EngineArgs.of(model="acme/tiny"), quiet()):
        pass
    before = len(source.reads)
    with model_headers(EngineArgs.of(model="acme/tiny")) as path:
        assert load_model_config(path).architecture == "Qwen3ForCausalLM"
    assert (len(source.reads), source.num_snapshots) == (before, 1)


def test_headers_are_gone_afterwards() -> None:
    publish_tiny("acme/tiny")
    with model_headers(EngineArgs.of(model="acme/tiny"), quiet()) as path:
        assert (path / "config.json").is_file()
    assert not path.exists()


def test_only_models_of_a_store_are_held() -> None:
    assert hold_stored_model(resolve_model("builtin://tiny")) is None


async def test_a_fetch_leaves_the_event_loop_free_and_ends_when_it_is_cancelled() -> None:
    started, may_go_on = threading.Event(), threading.Event()

    def wait(read: Read) -> Stop | None:
        if "safetensors" in read.path:
            started.set()
            may_go_on.wait(30.0)
        return None

    source = publish_tiny("acme/tiny")
    source.on_read = wait
    args = EngineArgs.of(model="acme/tiny")

    async def fetch() -> None:
        async with local_model_async(args, quiet()):
            raise AssertionError("the fetch has not ended")

    task = asyncio.create_task(fetch())
    await asyncio.to_thread(started.wait, 30.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    may_go_on.set()
    async with local_model_async(
        args, quiet()
    ) as local:  # waits until the cancelled fetch has let the lock go
        store = open_store(None)
        assert [model.path for model in store.list()] == [Path(local.model)]
    assert source.num_snapshots == 2


def test_an_adapter_is_told_from_a_model_and_names_its_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        '{"base_model_name_or_path": "Qwen/Qwen3-0.6B", "peft_type": "LORA"}'
    )
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(
        ConfigError, match=r"is an adapter of Qwen/Qwen3-0.6B, and .*merge it.*engine.type vllm"
    ):
        resolve_model(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("no JSON")
    with pytest.raises(ConfigError, match="is an adapter, and"):
        resolve_model(str(tmp_path))
