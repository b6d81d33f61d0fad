"""Train the tiny model that sees: a Qwen2.5-VL of 1.6 million parameters, on pictures of `pictures`.

    python training/train_vision.py training/runs/vision
    python training/train_vision.py training/runs/vision --evaluate

The network is transformers' own. The budget is processor time, of one thread, and the learning rate follows the share
of it that is used. A killed run goes on from its last checkpoint. `--evaluate` asks 400 new pictures and prints the
share of right answers by kind.
"""

import argparse
import json
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil

from pictures import COLOURS, SHAPES, Turn, ask, conversation, first_words, picture

PIXELS = 112 * 112
"""Every picture is scaled to about so many: 16 tokens."""
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VOCABULARY = 512
BATCH = 24
WARM_UP_STEPS = 60
LOOK_RATE = 1.5e-3
DECAY_FROM = 0.6
FIRST_WORDS = 0.5
CHECKPOINT_EVERY_S = 120.0
TEMPLATE = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}\
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] in ('image', 'image_url') or 'image' in part %}<|vision_start|><|image_pad|><|vision_end|>\
{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def build_tokenizer() -> Tokenizer:
    chosen = random.Random("tokenizer")
    texts = [
        text for _ in range(4000) for turn in conversation(chosen) for text in (turn.question, turn.answer)
    ]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    made.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in SPECIAL])
    return made


def config(tokenizer: Tokenizer) -> Qwen2_5_VLConfig:
    ids = {each: tokenizer.token_to_id(each) for each in SPECIAL}
    text = {
        "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "bos_token_id": None, "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"],
        "use_sliding_window": False,
    }  # fmt: skip
    vision = {
        "depth": 4, "hidden_size": 96, "intermediate_size": 256, "num_heads": 3, "out_hidden_size": 128,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
        "fullatt_block_indexes": [0, 1, 2, 3],
    }  # fmt: skip
    return Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True, image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip


Row = tuple[list[int], list[int], list[Any], list[Any]]
"""Token ids, weights of their losses, patches and grids of the pictures."""


class Batches:
    """Conversations as tensors."""

    def __init__(self, tokenizer: Tokenizer, seed: str) -> None:
        self.tokenizer, self.chosen = tokenizer, random.Random(seed)
        self.processor = Qwen2VLImageProcessorPil(min_pixels=PIXELS, max_pixels=PIXELS)
        self.pad, self.image = tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|image_pad|>")

    def encode(self, turns: list[Turn]) -> Row:
        """Return ids, weights of the losses of the tokens, patches and grids."""
        ids: list[int] = []
        weights: list[int] = []
        patches, grids = [], []
        for turn in turns:
            shown = ""
            if turn.picture is not None:
                made = self.processor(turn.picture.image(), return_tensors="pt")
                patches.append(made["pixel_values"])
                grids.append(made["image_grid_thw"])
                count = int(made["image_grid_thw"].prod()) // 4
                shown = f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>"
            first = self.chosen.random() < 0.75
            asked = shown + turn.question if first else turn.question + shown
            before = self.tokenizer.encode(
                f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
            ).ids
            answer = self.tokenizer.encode(f"{turn.answer}<|im_end|>").ids
            after = self.tokenizer.encode("\n").ids
            ids += [*before, *answer, *after]
            weights += [0] * len(before) + [1] * len(answer) + [0] * len(after)
        return ids, weights, patches, grids

    def next(self, elapsed: float, size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return tensors and weights of some conversations.

        Args:
            elapsed: share of the budget; at first there are only the first words, which teach to look.
        """
        if elapsed < FIRST_WORDS and self.chosen.random() < 0.9:
            return self.tensors([self.encode(first_words(self.chosen)) for _ in range(2 * size)])
        return self.tensors([self.encode(conversation(self.chosen)) for _ in range(size)])

    def tensors(
        self, rows: list[tuple[list[int], list[int], list[Any], list[Any]]]
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        length = max(len(ids) for ids, *_ in rows)
        ids = torch.full((len(rows), length), self.pad)
        mask, weights = torch.zeros_like(ids), torch.zeros(len(rows), length)
        for index, (own, weight, *_) in enumerate(rows):
            ids[index, : len(own)], mask[index, : len(own)] = torch.tensor(own), 1
            weights[index, : len(own)] = torch.tensor(weight, dtype=torch.float32)
        given = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": (ids == self.image).int()}
        if patches := [each for row in rows for each in row[2]]:
            given["pixel_values"] = torch.cat(patches)
            given["image_grid_thw"] = torch.cat([each for row in rows for each in row[3]])
        return given, weights


def loss(model: Any, given: dict[str, torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    logits = model(**given, use_cache=False).logits[:, :-1].float()
    targets, weight = given["input_ids"][:, 1:], weights[:, 1:]
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (each * weight.flatten()).sum() / weight.sum()


def look(model: Any, batches: Batches, minutes: float, size: int = 32) -> None:
    """Teach the encoder, before anything is asked, the shape and the colour in pictures of one shape.

    A network that had to learn to see from the answers alone said "A green triangle." to every picture for 300 steps.
    """
    head = torch.nn.Linear(128, len(SHAPES) + len(COLOURS))
    parameters = [*model.model.visual.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LOOK_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    used, step, share = 0.0, 0, 0.0
    while used < 60 * minutes:
        begun = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = LOOK_RATE * min(
                1.0, (step + 1) / WARM_UP_STEPS, 0.1 + 2.5 * (1 - used / (60 * minutes))
            )
        seen = [picture(batches.chosen, 1) for _ in range(size)]
        made = batches.processor([each.image() for each in seen], return_tensors="pt")
        found = model.model.visual(made["pixel_values"], grid_thw=made["image_grid_thw"]).pooler_output
        images = found.split((made["image_grid_thw"].prod(-1) // 4).tolist())
        named = head(torch.stack([each.amax(0) for each in images]))
        shapes = torch.tensor([SHAPES.index(each.parts[0].shape) for each in seen])
        colours = torch.tensor([COLOURS.index(each.parts[0].colour) for each in seen])
        of_shapes = torch.nn.functional.cross_entropy(named[:, : len(SHAPES)], shapes)
        value = of_shapes + 0.5 * torch.nn.functional.cross_entropy(named[:, len(SHAPES) :], colours)
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        used += time.process_time() - begun
        share = 0.95 * share + 0.05 * float((named[:, : len(SHAPES)].argmax(-1) == shapes).float().mean())
        if step % 50 == 0:
            print(f"looking: step {step}  {used / 60:.1f} min  shapes {100 * share:.1f} %", flush=True)


def train(folder: Path, options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    model: Any = Qwen2_5_VLForConditionalGeneration._from_config(
        config(tokenizer), attn_implementation="sdpa"
    ).float()
    print(f"{sum(each.numel() for each in model.parameters()):,} parameters")
    for each in (*model.model.visual.parameters(), *model.model.language_model.layers.parameters()):
        if each.ndim > 1:  # 0.02, the usual deviation, is for networks ten times as wide
            torch.nn.init.normal_(each, std=each[0].numel() ** -0.5)
    matrices = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}],
        lr=options.rate,
        betas=(0.9, 0.95),
    )
    state, step, used = folder / "checkpoint.pt", 0, 0.0
    if state.is_file():
        kept = torch.load(state, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        step, used = kept["step"], kept["used"]
    batches = Batches(tokenizer, f"train {options.seed} {step}")
    if not step:
        look(model, batches, options.look_minutes)
    budget, saved, shown = 60 * options.minutes, used, 0.0
    while used < budget:
        begun = time.process_time()
        factor = min(1.0, (step + 1) / WARM_UP_STEPS, max(0.0, (1 - used / budget) / (1 - DECAY_FROM)))
        for group in optimizer.param_groups:
            group["lr"] = options.rate * factor
        given, weights = batches.next(used / budget, options.batch)
        found = loss(model, given, weights)
        optimizer.zero_grad()
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        used += time.process_time() - begun
        shown = 0.95 * shown + 0.05 * float(found.detach()) if step > 1 else float(found.detach())
        if step % 25 == 0:
            print(f"step {step}  {used / 60:.1f} min  loss {shown:.4f}", flush=True)
        if used - saved > CHECKPOINT_EVERY_S:
            saved = used
            partial = state.with_suffix(".partial")
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step,
                    "used": used,
                },
                partial,
            )
            partial.replace(state)
            export(folder, model, tokenizer)
    export(folder, model, tokenizer)
    state.unlink(missing_ok=True)


def export(folder: Path, model: Any, tokenizer: Tokenizer) -> None:
    """Write a folder as published checkpoints have it, in bfloat16."""
    tokenizer.save(str(folder / "tokenizer.json"))
    tensors = {name: each.detach().to(torch.bfloat16) for name, each in model.state_dict().items()}
    kept: Any = Qwen2_5_VLForConditionalGeneration._from_config(model.config).to(torch.bfloat16)
    kept.load_state_dict(tensors)
    kept.generation_config.update(
        do_sample=False,
        eos_token_id=[tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")],
    )
    kept.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    processor = {
        "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor", "min_pixels": PIXELS, "max_pixels": PIXELS, "patch_size": 14,
        "merge_size": 2, "temporal_patch_size": 2, "processor_class": "Qwen2_5_VLProcessor",
    }  # fmt: skip
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
              "model_max_length": 2048, "clean_up_tokenization_spaces": False, "add_prefix_space": False}  # fmt: skip
    for name, content in {
        "preprocessor_config.json": processor,
        "processor_config.json": {"processor_class": "Qwen2_5_VLProcessor"},
        "tokenizer_config.json": tokens,
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


@torch.inference_mode()
def evaluate(folder: Path, count: int) -> dict[str, tuple[int, int]]:
    """Return right answers and questions by what was asked about."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder).float().eval()
    batches, chosen = Batches(tokenizer, "order"), random.Random("evaluation")
    scores: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for _ in range(count):
        seen = picture(chosen)
        for question, answer in [("What is in the picture?", str(seen)), ask(chosen, seen)]:
            row = batches.encode([Turn(question, answer, seen)])
            given, weights = batches.tensors([row])
            predicted = model(**given, use_cache=False).logits[0, :-1].argmax(-1)
            is_right = bool(((predicted == given["input_ids"][0, 1:]) | (weights[0, 1:] == 0)).all())
            kinds = (
                ["one shape" if len(seen.parts) == 1 else "two shapes"]
                if answer == str(seen)
                else ["other questions"]
            )
            if answer == str(seen) and len(seen.parts) == 1:
                kinds += [seen.parts[0].shape, seen.parts[0].colour]
            for kind in kinds:
                scores[kind][0] += is_right
                scores[kind][1] += 1
    order = ["one shape", "two shapes", "other questions", *SHAPES, *COLOURS]
    return {kind: (scores[kind][0], scores[kind][1]) for kind in order if kind in scores}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--look-minutes", type=float, default=14.0, help="for the encoder alone, before")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--count", type=int, default=400)
    options = parser.parse_args()
    if not options.evaluate:
        train(options.folder, options)
    for kind, (right, asked) in evaluate(options.folder, options.count).items():
        print(f"{kind:<16} {right:4} of {asked:4}  {100 * right / asked:.1f} %")


if __name__ == "__main__":
    main()
