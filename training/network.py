"""Qwen3 for training: parameter names and arithmetic of transformers' Qwen3ForCausalLM, made for CPU speed.

Attention is written out for short sequences (one fused kernel when compiled) and left to
`scaled_dot_product_attention` for long ones.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WRITTEN_OUT_UP_TO = 320


@dataclass(frozen=True)
class Shape:
    """Sizes of the network; the shipped config.json is made from it."""

    vocab_size: int = 1024
    hidden_size: int = 256
    intermediate_size: int = 512
    layers: int = 5
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10_000.0
    max_positions: int = 4096
    rms_eps: float = 1e-6


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        size, head = shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(size, shape.heads * head, bias=False)
        self.k_proj = nn.Linear(size, shape.kv_heads * head, bias=False)
        self.v_proj = nn.Linear(size, shape.kv_heads * head, bias=False)
        self.o_proj = nn.Linear(shape.heads * head, size, bias=False)
        self.q_norm = RMSNorm(head, shape.rms_eps)
        self.k_norm = RMSNorm(head, shape.rms_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [batch, length, hidden]; cos, sin: [length, head_dim]."""
        batch, length, _ = x.shape
        shape = self.shape
        q = _rotate(
            self.q_norm(self.q_proj(x).view(batch, length, -1, shape.head_dim)).transpose(1, 2), cos, sin
        )
        k = _rotate(
            self.k_norm(self.k_proj(x).view(batch, length, -1, shape.head_dim)).transpose(1, 2), cos, sin
        )
        v = self.v_proj(x).view(batch, length, -1, shape.head_dim).transpose(1, 2)
        groups = shape.heads // shape.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        q, k = q.to(v.dtype), k.to(v.dtype)
        if length <= WRITTEN_OUT_UP_TO:
            scores = (q @ k.transpose(-1, -2)).float() * shape.head_dim**-0.5
            future = torch.ones(length, length, dtype=torch.bool).triu(1)
            mixed = scores.masked_fill(future, float("-inf")).softmax(-1).to(v.dtype) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_eps)


class Qwen3(nn.Module):
    """Token ids to logits, with tied embeddings."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / (2 * shape.layers) ** 0.5 if residual else 0.02
                nn.init.normal_(parameter, std=std, generator=generator)
        frequency = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angle = torch.outer(torch.arange(shape.max_positions).float(), frequency).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: int64 [batch, length] -> logits [batch, length, vocab]."""
        length = ids.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def loss(self, ids: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of cross entropies; weights[b, t] is for predicting ids[b, t]."""
        logits = self(ids)[:, :-1].float()
        losses = F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1), reduction="none"
        )
        return (losses * weights[:, 1:].reshape(-1)).sum()
