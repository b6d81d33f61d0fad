"""Average the weights of two models that were trained one from the other.

    python training/average.py --first runs/wider/export --second runs/again/export --share 0.5 --out models/argosy-tiny

Source: Wortsman et al., "Model soups" (2022): between two fine-tuned copies of one model the loss has no barrier, and
the mean often generalises better than either. The tokenizer, configuration and template are the first's.
"""

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def average(first: dict[str, Tensor], second: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """`(1 - share) * first + share * second` per tensor, computed in float32, in the dtype of `first`.

    Raises ValueError if the names or shapes differ, or `share` is not within 0 and 1.
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"the share of the second model must be within 0 and 1, not {share}")
    shapes, others = ({name: t.shape for name, t in each.items()} for each in (first, second))
    if shapes != others:
        differing = sorted(n for n in shapes.keys() | others.keys() if shapes.get(n) != others.get(n))
        raise ValueError(
            f"the models are not copies of one another: {', '.join(differing[:3])} differ in shape or are absent"
        )
    return {
        name: torch.lerp(tensor.float(), second[name].float(), share).to(tensor.dtype).contiguous()
        for name, tensor in first.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=Path, required=True, help="model folder")
    parser.add_argument("--second", type=Path, required=True, help="model folder")
    parser.add_argument("--share", type=float, default=0.5, help="share of the second, 0 to 1")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; may be one of the two")
    options = parser.parse_args()
    weights = "model.safetensors"
    made = average(load_file(options.first / weights), load_file(options.second / weights), options.share)
    if options.out.resolve() != options.first.resolve():
        options.out.mkdir(parents=True, exist_ok=True)
        for path in options.first.iterdir():
            if path.name != weights and path.suffix in (".json", ".jinja"):
                shutil.copyfile(path, options.out / path.name)
    partial = options.out / f"{weights}.partial"
    save_file(made, partial, metadata={"format": "pt"})
    partial.replace(options.out / weights)


if __name__ == "__main__":
    main()
