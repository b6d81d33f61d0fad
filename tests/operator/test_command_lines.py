"""Command lines written by operator and chart are accepted by the engine and the router of this tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from builders import CONFIG, isvc

from argosy.commands.models import build_parser as models_parser
from argosy_engine.api.serve import build_parser as engine_parser
from argosy_engine.api.serve import parse_args
from argosy_operator.desired.pod_template import model_volume
from argosy_resource import crd
from argosy_resource.engine_arguments import FLAG_FIELDS
from argosy_resource.engine_command import engine_args, flags_as_fields
from argosy_router.main import build_parser, config_of

ROOT = Path(__file__).parents[2]


def test_engine_understands_every_flag() -> None:
    service = isvc(
        model={"source": "builtin://tiny", "servedName": "org/Tiny", "aliases": ["a", "b"]},
        engine={
            "device": "cpu",
            "dtype": "float32",
            "attentionBackend": "torch",
            "maxModelLen": 1024,
            "maxNumSeqs": 8,
            "maxNumBatchedTokens": 512,
            "blockSize": 16,
            "kvCacheMemory": "64Mi",
            "threads": 1,
            "enablePrefixCaching": False,
            "shutdownTimeoutSeconds": 5,
        },
    )
    options, engine = parse_args(engine_args(service)[1:])
    assert (options.host, options.port, options.shutdown_timeout) == ("0.0.0.0", 8000, 5)
    assert engine.model == "builtin://tiny"
    assert tuple(engine.served_model_name) == ("tiny",), "names of clients are the fleet document's"
    assert options.any_model_name
    assert (engine.device, engine.dtype, engine.attention_backend) == ("cpu", "float32", "torch")
    assert (engine.max_model_len, engine.max_num_seqs, engine.max_num_batched_tokens) == (1024, 8, 512)
    assert (engine.block_size, engine.kv_cache_memory_bytes, engine.threads) == (16, 64 * 2**20, 1)
    assert engine.enable_prefix_caching is False


def test_engine_understands_several_devices() -> None:
    _, engine = parse_args(engine_args(isvc(parallelism={"tensor": 2, "pipeline": 3, "data": 4}))[1:])
    assert engine.tensor_parallel_size == 2
    assert engine.pipeline_parallel_size == 3
    assert engine.data_parallel_size == 4
    _, engine = parse_args(engine_args(isvc(parallelism={"tensor": 2, "expert": True}))[1:])
    assert engine.enable_expert_parallel is True


def test_engine_understands_a_share_of_gpu_memory() -> None:
    _, engine = parse_args(engine_args(isvc(engine={"gpuMemoryUtilization": 0.85}))[1:])
    assert engine.gpu_memory_utilization == 0.85


def test_every_flag_of_a_field_is_known_by_it() -> None:
    """Else a message of the engine about it would not name the field."""
    spec = crd.schema()["properties"]["spec"]["properties"]
    fields = {f"{part}.{name}" for part in ("engine", "parallelism") for name in spec[part]["properties"]}
    assert set(FLAG_FIELDS.values()) == fields - {
        "engine.image",
        "engine.env",
        "engine.args",
        "engine.upgradePolicy",
        "engine.type",
    }
    help_text = engine_parser().format_help()
    assert [flag for flag in FLAG_FIELDS if flag not in help_text] == []


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("--max-model-len 9 exceeds 4", "in the manifest --max-model-len is spec.engine.maxModelLen"),
        ("--block-size (--block-size 3) and --dtype",
         "in the manifest --block-size is spec.engine.blockSize, --dtype is spec.engine.dtype"),
        ("--tensor-parallel-size 3 does not divide the attention heads",
         "in the manifest --tensor-parallel-size is spec.parallelism.tensor"),
        ("--enable-expert-parallel with --data-parallel-size 2",
         "in the manifest --enable-expert-parallel is spec.parallelism.expert, "
         "--data-parallel-size is spec.parallelism.data"),
        ("--pipeline-parallel-size 9", "in the manifest --pipeline-parallel-size is spec.parallelism.pipeline"),
        ("--device-x, --revision and -dtype are others", ""),
        ("no flag", ""),
    ],
)  # fmt: skip
def test_a_message_of_the_engine_is_told_in_fields(message: str, told: str) -> None:
    assert flags_as_fields(message) == told


def test_engine_understands_where_a_fetched_model_is() -> None:
    service = isvc(model={"source": "hf://org/name@main"})
    _, engine = parse_args(engine_args(service, download_dir="/models")[1:])
    assert (engine.model, engine.download_dir) == ("hf://org/name@main", "/models")


def test_the_fetcher_understands_the_arguments_of_its_container(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = model_volume(isvc(model={"source": "hf://org/name@main"}), CONFIG).fetch
    assert fetch is not None
    for variable in fetch["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    assert fetch["args"][0] == "models"
    read = models_parser().parse_args(fetch["args"][1:])
    assert (read.model, read.download_dir) == ("hf://org/name@main", "/models")
    assert (read.progress_port, read.make_room, read.min_free) == (8009, True, 15.0)


def test_the_fetcher_understands_the_charts_arguments() -> None:
    text = (ROOT / "charts" / "argosy" / "templates" / "node-cache.yaml").read_text()
    args = re.findall(r"^        - (prune|--.+)$", text, re.MULTILINE)
    values = {"--max-size={{ . }}": "--max-size=500Gi", "--max-age={{ . }}": "--max-age=30d"}
    values["--min-free={{ . }}"] = "--min-free=20%"
    assert values.keys() <= set(args)
    read = models_parser().parse_args([values.get(arg, arg) for arg in args])
    assert (read.tree, read.every) == ("/cache/models", 3600)
    assert (read.max_size, read.max_age) == (500 * 2**30, 30 * 86400)


def test_router_understands_the_charts_arguments(tmp_path: Path) -> None:
    text = (ROOT / "charts" / "argosy" / "templates" / "router.yaml").read_text()
    args = re.findall(r"^        - (--\S+)$", text, re.MULTILINE)
    args = [re.sub(r"\{\{.*\}\}", "7", arg) for arg in args]
    args = [arg.replace("/var/lib/argosy/usage", str(tmp_path)) for arg in args]
    assert "--kubernetes" in args
    assert f"--usage-log={tmp_path}" in args
    for access in ("--no-auth", "--api-keys-file=/etc/argosy/api-keys"):
        assert access in args
        chosen = [
            arg for arg in args if arg == access or not arg.startswith(("--no-auth", "--api-keys-file"))
        ]
        config = config_of(build_parser().parse_args(chosen), {"ARGOSY_FLEET_KEY": "0123456789abcdef"})
        assert (config.port, config.admin_port, config.fleet_configmap) == (8080, 8081, "argosy-fleet")
