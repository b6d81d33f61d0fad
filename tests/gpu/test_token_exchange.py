"""TokenExchange: ranks with different numbers of tokens get what one process computes, whoever has the experts."""

from __future__ import annotations

import pytest
import torch

from argosy_engine.attention.selector import load_backend
from argosy_engine.checkpoint.weights import DummyWeights
from argosy_engine.distributed.parallel_state import Communicator
from argosy_engine.layers.experts import ExpertsSpec, TokenExchange
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.layers.mlp import GatedMLP, LatentProjections, SparseMLP, SquaredReluMLP
from argosy_engine.model_configs.experts_config import RoutingSpec
from argosy_engine.model_configs.gemma_config import Gemma4Config
from argosy_engine.model_configs.sharding import WHOLE, Sharding
from argosy_engine.models.config_file import parse_config
from argosy_engine.models.gemma import Gemma4Experts
from gemma4_shapes import EXPERTS
from thread_ranks import run_threads
from transformers_checkpoints import small_config

CPU = torch.device("cpu")
HIDDEN, SIZE = 32, 3
STEPS = [[5, 0, 2], [1, 1, 1], [0, 0, 4], [2, 3, 0]]
"""Tokens of each rank in each step."""


Layer = SparseMLP | Gemma4Experts


def make_layers(
    kind: str, backend: str, sharding: Sharding, exchange: TokenExchange | None = None
) -> list[Layer]:
    weights = DummyWeights(torch.float32, CPU, 0)
    factory = LayerFactory(
        weights, load_backend(backend, torch.float32), 1, sharding=sharding, exchange=exchange
    )
    if kind == "gemma4":
        sizes = {"hidden_size": HIDDEN, "num_experts": 7, "top_k_experts": 2, "moe_intermediate_size": 16}
        raw = small_config("gemma4_text", **{**EXPERTS, **sizes}).to_dict() | {
            "architectures": ["Gemma4ForCausalLM"]
        }
        config = parse_config(raw, {}, {}, "argosy")
        assert isinstance(config, Gemma4Config)
        assert config.experts is not None
        return [Gemma4Experts(config, config.experts, factory, f"{index}.") for index in range(2)]
    routing = RoutingSpec(num_experts=7, experts_per_token=2, normalises=True)
    gated = SparseMLP(
        factory,
        ExpertsSpec("0.", routing, HIDDEN, 16),
        shared=GatedMLP(factory, "0.shared.", HIDDEN, 16),
    )
    latent = LatentProjections(factory.linear({"1.in": 24}, HIDDEN), factory.linear({"1.out": HIDDEN}, 24))
    ungated = SparseMLP(
        factory,
        ExpertsSpec("1.", routing, 24, 16, "relu2"),
        hidden=HIDDEN,
        shared=SquaredReluMLP(factory, "1.shared.", HIDDEN, 16, bias=False),
        latent=latent,
    )
    return [gated, ungated]


def run(layers: list[Layer], x: torch.Tensor) -> torch.Tensor:
    # The last token, if there are several, is padding: nothing reads its result.
    slots = torch.arange(len(x))
    slots[1:][-1:] = -1
    for layer in layers:
        x = layer(x, slots)
    return x[: max(len(x) - 1, 1)]


def inputs(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(STEPS[step][rank], HIDDEN, generator=generator)


@pytest.mark.parametrize(("kind", "backend"), [("plain", "torch"), ("plain", "triton"), ("gemma4", "torch")])
def test_every_rank_gets_what_one_process_computes(kind: str, backend: str) -> None:
    def steps_of(group: Communicator) -> list[torch.Tensor]:
        exchange = TokenExchange(group)
        layers = make_layers(kind, backend, Sharding(0, 1, True, group.rank, SIZE), exchange)
        results = []
        for index, counts in enumerate(STEPS):
            x, num_rows = inputs(index, group.rank), max(counts)
            if len(x):
                exchange.begin(None if len({*counts}) == 1 else num_rows)
                results.append(run(layers, x))
            else:
                exchange.lend_experts(num_rows)
                results.append(x)
        return results

    found = run_threads(SIZE, steps_of)
    with torch.inference_mode():
        alone = make_layers(kind, "torch", WHOLE)
        for rank in range(SIZE):
            for step, result in enumerate(found[rank]):
                x = inputs(step, rank)
                expected = run(alone, x) if len(x) else x
                assert expected.abs().sum() > 0.1 or not len(x)
                torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-4)


def test_cores_have_different_experts() -> None:
    parts = [Sharding(rank, 2, True, core, 2).experts(7) for core in range(2) for rank in range(2)]
    assert [index for part in parts for index in part] == list(range(7))
    assert Sharding(0, 1, True, 1, 2).divides_experts
    assert not Sharding(0, 1, True).divides_experts
