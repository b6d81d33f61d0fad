"""Default sampling parameters of a model's generation_config.json: their bounds, and what greedy decoding keeps."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.errors import ConfigError
from argosy_engine.resolved_config import GenerationConfig, RequestDefaults, sampling_defaults
from processes import free_port


def defaults_of(path: Path, config: dict[str, Any], **flags: Any) -> Any:
    (path / "generation_config.json").write_text(json.dumps(config))
    return sampling_defaults(path, RequestDefaults(**flags))


@pytest.mark.parametrize(("config", "told"), [
    ({"temperature": 5}, "temperature: must be a number from 0 to 2, not 5"),
    ({"temperature": "warm"}, "temperature: must be a number from 0 to 2, not 'warm'"),
    ({"temperature": True}, "temperature: must be a number from 0 to 2, not True"),
    ({"temperature": float("nan")}, "temperature: must be a number from 0 to 2, not nan"),
    ({"top_p": 0}, "top_p: must be a number above 0 and at most 1, not 0"),
    ({"top_k": 50.5}, "top_k: must be a whole number from -1 to 1048576, not 50.5"),
    ({"top_k": -2}, "top_k: must be a whole number from -1 to 1048576, not -2"),
    ({"min_p": [0.1]}, "min_p: must be a number from 0 to 1"),
    ({"repetition_penalty": 0}, "repetition_penalty: must be a number above 0 and at most 10, not 0"),
    ({"max_new_tokens": 0}, "max_new_tokens: must be a whole number from 1 to 16777216, not 0"),
    ({"do_sample": "perhaps"}, "do_sample: "),
    ({"do_sample": False, "presence_penalty": -9}, "presence_penalty: must be a number from -2 to 2, not -9"),
])  # fmt: skip
def test_values_out_of_the_flags_bounds_are_refused_with_file_and_key(
    tmp_path: Path, config: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        defaults_of(tmp_path, config)
    assert str(caught.value).startswith(f"{tmp_path}/generation_config.json: {told}")
    assert "--generation-config vllm" in str(caught.value)


def test_a_value_that_is_not_used_is_not_refused(tmp_path: Path) -> None:
    wrong = {"temperature": 5, "max_new_tokens": 9.0}
    replaced = defaults_of(tmp_path, wrong, override_generation_config=GenerationConfig(temperature=0.5))
    assert (replaced.values, replaced.max_tokens) == ({"temperature": 0.5}, 9)
    assert defaults_of(tmp_path, wrong, generation_config="vllm").values == {}
    assert defaults_of(tmp_path, {**wrong, "do_sample": False}).values == {"temperature": 0.0}


def test_numbers_are_read_as_on_command_lines(tmp_path: Path) -> None:
    made = defaults_of(
        tmp_path,
        {
            "temperature": "0.6",
            "top_k": 50.0,
            "top_p": 1,
            "max_new_tokens": "20",
            "min_p": None,
            "num_beams": 1,
        },
    )
    assert made.values == {"temperature": 0.6, "top_k": 50, "top_p": 1.0}
    assert [type(value) for value in made.values.values()] == [float, float, int]
    assert made.max_tokens == 20


@pytest.mark.parametrize("off", [False, "false", 0])
def test_greedy_decoding_keeps_the_penalties(tmp_path: Path, off: Any) -> None:
    config = {
        "do_sample": off,
        "temperature": 0.7,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "frequency_penalty": "0.5",
    }
    made = defaults_of(tmp_path, config)
    assert made.values == {"temperature": 0.0, "repetition_penalty": 1.05, "frequency_penalty": 0.5}


def test_an_engine_with_a_wrong_value_does_not_start(tmp_path: Path) -> None:
    """Whatever is told comes before the model is loaded."""
    model = tmp_path / "model"
    shutil.copytree(resolve_model("builtin://tiny"), model)
    (model / "generation_config.json").write_text('{"temperature": 5}')
    serve = ["argosy_engine.api.serve", str(model), "--device", "cpu", "--port", str(free_port())]
    for command in (serve, ["argosy_engine.api.doctor", str(model)]):
        ended = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
        assert ended.returncode == 2, ended.stderr
        assert (
            f"{model}/generation_config.json: temperature: must be a number from 0 to 2, not 5"
            in ended.stderr
        )
        assert "Traceback" not in ended.stderr
