"""Train the tiny model: tokenizer, data, training by a budget of minutes, export.

    python training/train.py --minutes 90 --name first
    python training/train.py --minutes 90 --name wider --start models/argosy-tiny --rate 0.5

The learning rate follows the elapsed share of the budget, so that a busy machine means fewer
tokens, never a missing decay. A run that was killed goes on from its last checkpoint with
`--resume`; time for which it was stopped does not count. Workers are single-threaded processes that
sum gradients over gloo: on shared cores that loses less than one pool of threads.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from batches import CHUNK, Batches
from export import export
from muon import Optimizer
from network import Qwen3, Shape
from scoring import score
from tokenizer import build, feed_pieces

HERE = Path(__file__).parent
WARM_UP_STEPS = 40
DECAY_FROM = 0.45
PHASE_ENDS = (0.16, 0.45)
"""Shares of the budget after which longer documents come in."""

CHECKPOINT_EVERY_S = 240.0
SCORE_EVERY_S = 1800.0
MOST_STEP_S = 20.0
"""What a step counts at most: a process that is stopped, or compiles, must not use up its budget by that."""


def rate(step: int, elapsed: float, decay_from: float = DECAY_FROM) -> float:
    """Learning-rate factor: warm-up by steps, constant, then linear to zero by elapsed share."""
    return min(1.0, (step + 1) / WARM_UP_STEPS, max(0.0, (1.0 - elapsed) / (1.0 - decay_from)))


def phase(elapsed: float) -> int:
    """Which documents are drawn at this elapsed share."""
    return sum(elapsed >= end for end in PHASE_ENDS)


class Trainer:
    """One worker's model, optimizer, batches and clock."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.rank, self.workers = options.rank, options.workers
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        feed_pieces(self.tokenizer)
        self.model = Qwen3(Shape(), options.seed)
        self.flat = torch.zeros(sum(p.numel() for p in self.model.parameters()) + 4)
        offset = 0
        for parameter in self.model.parameters():
            parameter.grad = self.flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        self.extra = self.flat[offset:]
        self.optimizer = Optimizer(
            self.model, self.rank, self.workers, 0.02 * options.rate, 3e-3 * options.rate, decay=0.02
        )
        self.step = 0
        self.tokens = 0.0
        self.seconds = 0.0
        if options.resume:
            self._resume()
        elif options.start:
            self._take(load_file(options.start / "model.safetensors"))
        self.batches = Batches(
            self.tokenizer, f"train {options.seed} {self.rank} {self.step}", options.tokens, options.chunk
        )
        self.batches.phase = self._phase(self.elapsed)
        if not options.eager:
            for layer in self.model.model.layers:
                layer.compile(dynamic=True)

    def _take(self, tensors: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(tensors[name])

    def _resume(self) -> None:
        tensors = load_file(self.folder / "checkpoint.safetensors")
        self._take(tensors)
        self.optimizer.load(tensors)
        status = json.loads((self.folder / "status.json").read_text())
        self.step, self.tokens, self.seconds = status["steps"], status["tokens"], status["seconds"]

    def _phase(self, elapsed: float) -> int:
        """Which documents are drawn; a model that starts from trained weights reads everything from the start."""
        return 2 if self.options.start else phase(elapsed)

    def gradients(self, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Sum of weighted losses and its gradient, over all workers, divided by the summed weights."""
        self.flat.zero_()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.options.precision == "bfloat16"):
            value = self.model.loss(ids, weights)
        value.backward()
        with torch.no_grad():
            self.extra[0] = value.detach()
            self.extra[1] = weights[:, 1:].sum()
            self.extra[2] = ids.numel()
            self.extra[3] = self.elapsed if self.rank == 0 else 0.0
            if self.workers > 1:
                dist.all_reduce(self.flat)
            self.flat[:-4] /= self.extra[1]
            norm = self.flat[:-4].norm()
            if norm > 1.0:
                self.flat[:-4] /= norm

    @property
    def elapsed(self) -> float:
        """Share of the budget used, by this worker's clock."""
        return self.seconds / (self.options.minutes * 60)

    def run(self) -> None:
        """Train until the budget is used."""
        last = checkpointed = scored = logged = time.monotonic()
        seen, total, weight, share = self.tokens, 0.0, 0.0, self.elapsed
        for ids, weights in self.batches:
            self.gradients(ids, weights)
            share = float(self.extra[3])
            if share >= 1.0:
                break
            self.optimizer.step(rate(self.step, share, self.options.decay_from))
            self.step += 1
            self.tokens += float(self.extra[2])
            self.batches.phase = self._phase(share)
            total += float(self.extra[0])
            weight += float(self.extra[1])
            now = time.monotonic()
            self.seconds += min(now - last, MOST_STEP_S)
            last = now
            if self.rank == 0 and now - logged > 20:
                speed = (self.tokens - seen) / (now - logged)
                left = (1 - share) * self.options.minutes
                seen_m = f"step {self.step} tokens {self.tokens / 1e6:.2f}M"
                self.log(f"{seen_m} loss {total / weight:.4f} tok/s {speed:.0f} left {left:.1f}min")
                logged, seen, total, weight = now, self.tokens, 0.0, 0.0
            if self.rank == 0 and now - checkpointed > CHECKPOINT_EVERY_S:
                self.save()
                checkpointed = now
            if self.rank == 0 and now - scored > SCORE_EVERY_S:
                self.log(
                    "exact "
                    + " ".join(
                        f"{k}={v:.0%}" for k, v in score(self.model, self.tokenizer, 16, seed=1).items()
                    )
                )
                scored = now
            if self.options.steps and self.step >= self.options.steps:
                break
        if self.rank == 0:
            self.save()
            self.log("done")

    def log(self, line: str) -> None:
        """A plain line to the log file and standard output."""
        line = f"{time.strftime('%H:%M:%S')} {line}"
        print(line, flush=True)
        with (self.folder / "train.log").open("a") as file:
            file.write(line + "\n")

    def save(self) -> None:
        """Checkpoint with optimizer state, an exported model, and what has been seen."""
        named = {n: p.detach() for n, p in self.model.named_parameters()}
        partial = self.folder / "checkpoint.partial"
        save_file(named | self.optimizer.state(), partial)
        partial.replace(self.folder / "checkpoint.safetensors")
        export(self.folder / "export", self.model.shape, named, self.tokenizer)
        status = {
            "steps": self.step, "tokens": self.tokens, "seconds": self.seconds,
            "minutes": self.options.minutes, "seed": self.options.seed, "workers": self.workers,
            "documents_made_by_first_worker": self.batches.documents,
            "precision": self.options.precision,
            "parameters": sum(p.numel() for p in self.model.parameters()),
        }  # fmt: skip
        written = self.folder / "status.partial"
        written.write_text(json.dumps(status, indent=2) + "\n")
        written.replace(self.folder / "status.json")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=75, help="training time; the decay ends with it")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps (smoke runs)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2, help="processes that share a step")
    parser.add_argument("--threads", type=int, default=1, help="threads of each worker")
    parser.add_argument(
        "--precision", choices=("auto", "float32", "bfloat16"), default="auto",
        help="of matrix products; weights stay float32. auto: bfloat16 where the processor multiplies it natively",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=int, default=3584, help="padded tokens of a worker's step at length 256"
    )
    parser.add_argument(
        "--chunk", type=int, default=CHUNK, help="conversations made at a time (fewer in smoke runs)"
    )
    parser.add_argument(
        "--priority", type=int, default=0, help="nice value; also of the scheduler's autogroup"
    )
    parser.add_argument("--name", default="run", help="folder of the run, for log and checkpoints")
    parser.add_argument("--runs", type=Path, default=HERE / "runs", help="folder of the runs' folders")
    parser.add_argument(
        "--start", type=Path, help="model folder whose weights and tokenizer the run starts from"
    )
    parser.add_argument("--rate", type=float, default=1.0, help="factor of all learning rates")
    parser.add_argument(
        "--decay-from", type=float, default=DECAY_FROM, help="share of the time after which rates decay"
    )
    parser.add_argument("--eager", action="store_true", help="do not compile (smoke runs)")
    parser.add_argument("--out", type=Path, help="also export the final model to this folder")
    parser.add_argument("--resume", action="store_true", help="go on from the run's last checkpoint")
    parser.add_argument(
        "--untrained", action="store_true", help="export a model with random weights and stop"
    )
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def _raise_priority(nice: int) -> None:
    """Set the nice value. Linux weighs sessions before processes, so the autogroup needs it too."""
    if nice:
        os.setpriority(os.PRIO_PROCESS, 0, nice)
        Path("/proc/self/autogroup").write_text(str(nice))


def main() -> None:
    options = parse()
    if options.precision == "auto":
        options.precision = "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"
    torch.set_num_threads(options.threads)
    if not options.eager:
        torch._dynamo.config.recompile_limit = 64
    _raise_priority(options.priority)
    folder = options.runs / options.name
    folder.mkdir(parents=True, exist_ok=True)
    others: list[subprocess.Popen[bytes]] = []
    if options.rank == 0:
        if options.start and not options.resume:
            shutil.copyfile(options.start / "tokenizer.json", folder / "tokenizer.json")
        elif not options.resume:
            build(options.seed).save(str(folder / "tokenizer.json"))
        (folder / "rendezvous").unlink(missing_ok=True)
        if options.untrained:
            model = Qwen3(Shape(), options.seed)
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            export(options.out or folder / "export", model.shape, dict(model.named_parameters()), tokenizer)
            return
        command = [sys.executable, __file__, *sys.argv[1:], "--rank"]
        others = [subprocess.Popen([*command, str(rank)]) for rank in range(1, options.workers)]
    if options.workers > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'rendezvous'}",
            rank=options.rank,
            world_size=options.workers,
        )
    trainer = Trainer(options, folder)
    trainer.run()
    if options.workers > 1:
        dist.destroy_process_group()
    for process in others:
        process.wait(timeout=60)
    if options.rank == 0 and options.out:
        export(options.out, trainer.model.shape, dict(trainer.model.named_parameters()), trainer.tokenizer)


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    main()
