"""Muon for matrices, AdamW for the rest, with the orthogonalisations shared out among workers.

Muon: https://kellerjordan.github.io/posts/muon/ (Newton-Schulz quintic, Nesterov momentum).
Invariant: all workers hold bit-equal parameters, for each applies the same summed update.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly (singular values near 1)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T.contiguous() if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.T if tall else x


class Optimizer:
    """One step over a model's parameters from gradients that are already summed over workers."""

    def __init__(
        self, model: nn.Module, rank: int, workers: int, muon_lr: float, adam_lr: float, decay: float
    ) -> None:
        named = list(model.named_parameters())
        self.matrices = {n: p for n, p in named if p.ndim == 2 and "embed" not in n}
        self.rank, self.workers = rank, workers
        self.muon_lr, self.decay = muon_lr, decay
        self.momentum = {n: torch.zeros_like(p) for n, p in self.matrices.items()}
        rest = [p for n, p in named if n not in self.matrices]
        self.adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, foreach=True)
        self.adam_lr = adam_lr
        self.update = torch.zeros(sum(p.numel() for p in self.matrices.values()))

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Apply one update with learning rates times `scale`."""
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * scale
        self.adam.step()
        self.update.zero_()
        offset = 0
        for index, (name, parameter) in enumerate(self.matrices.items()):
            momentum = self.momentum[name].lerp_(parameter.grad, 0.05)
            if index % self.workers == self.rank:
                update = orthogonalise(torch.lerp(parameter.grad, momentum, 0.95))
                self.update[offset : offset + parameter.numel()] = update.reshape(-1)
            offset += parameter.numel()
        if self.workers > 1:
            dist.all_reduce(self.update)
        offset = 0
        for parameter in self.matrices.values():
            update = self.update[offset : offset + parameter.numel()].view_as(parameter)
            rows, columns = parameter.shape
            rate = self.muon_lr * scale * max(1.0, rows / columns) ** 0.5
            parameter.mul_(1 - rate * self.decay).add_(update, alpha=-rate)
            offset += parameter.numel()

    def state(self) -> dict[str, Tensor]:
        """Momenta, as tensors by name."""
        tensors = {f"muon.{n}": m for n, m in self.momentum.items()}
        for index, state in self.adam.state_dict()["state"].items():
            tensors |= {f"adam.{index}.{k}": v.clone() for k, v in state.items()}
        return tensors

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `state` gave."""
        for name, momentum in self.momentum.items():
            momentum.copy_(tensors[f"muon.{name}"])
        states: dict[int, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            if key.startswith("adam."):
                _, index, name = key.split(".")
                states.setdefault(int(index), {})[name] = tensor
        self.adam.load_state_dict({"state": states, "param_groups": self.adam.state_dict()["param_groups"]})
