"""The mean of two models' weights."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from average import average

SCRIPT = Path(__file__).parents[2] / "training" / "average.py"


def model(*values: float) -> dict[str, Tensor]:
    return {"up.weight": torch.tensor(values, dtype=torch.bfloat16)}


@pytest.mark.parametrize(
    ("share", "wanted"), [(0.0, [1.0, 2.0]), (0.5, [2.0, 1.0]), (0.25, [1.5, 1.5]), (1.0, [3.0, 0.0])]
)
def test_the_share_is_the_second_models(share: float, wanted: list[float]) -> None:
    made = average(model(1.0, 2.0), model(3.0, 0.0), share)
    assert made["up.weight"].dtype == torch.bfloat16
    assert made["up.weight"].tolist() == wanted


@pytest.mark.parametrize(
    ("second", "share", "said"),
    [
        (model(1.0), 0.5, "up.weight"),
        (model(1.0, 2.0) | {"down.weight": torch.zeros(1)}, 0.5, "down.weight"),
        (model(1.0, 2.0), 1.5, "1.5"),
    ],
)
def test_models_of_other_shapes_and_shares_are_refused_by_name(
    second: dict[str, Tensor], share: float, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        average(model(1.0, 2.0), second, share)


def test_the_folder_written_is_the_firsts_with_other_weights(tmp_path: Path) -> None:
    for name, values in (("first", (1.0, 2.0)), ("second", (3.0, 0.0))):
        (tmp_path / name).mkdir()
        save_file(model(*values), tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(f'{{"is": "{name}"}}')
    command = [sys.executable, str(SCRIPT), "--first", "first", "--second", "second", "--out", "mean"]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=120)
    assert {path.name for path in (tmp_path / "mean").iterdir()} == {"config.json", "model.safetensors"}
    assert (tmp_path / "mean" / "config.json").read_text() == '{"is": "first"}'
    assert load_file(tmp_path / "mean" / "model.safetensors")["up.weight"].tolist() == [2.0, 1.0]
