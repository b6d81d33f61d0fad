"""Stage: which layers of a model one rank of a pipeline has. No torch.

The first stage also has the embedding, the last one the final norm and the output head, with the embedding if they are
tied.
"""

from __future__ import annotations

from dataclasses import dataclass

from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Stage:
    """One of `size` stages."""

    index: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1

    def layers(self, count: int) -> range:
        """Return the stage's layers, of a model of `count`.

        If they cannot be divided evenly, stages before the last have one more, because the last also samples.
        """
        each, more = divmod(count, self.size)
        first = self.size - 1 - more
        """The first stage that has one more; the last never has."""
        start = self.index * each + min(max(self.index - first, 0), more)
        return range(start, start + each + (first <= self.index < self.size - 1))


WHOLE_MODEL = Stage()
"""The only stage has everything."""


def all_stages(size: int) -> list[Stage]:
    """Return the stages of a pipeline, in their order."""
    return [Stage(index, size) for index in range(size)]


def check_pipeline_parallel(config: ModelConfig, size: int) -> None:
    """Check that a model can be divided into `size` stages.

    Raises:
        ConfigError: it has fewer layers, or runs on code that is not divided.
    """
    if config.undivided_stages is not None and size > 1:
        raise ConfigError(
            f"--pipeline-parallel-size {size}: {config.undivided_stages}; leave it out, or use --data-parallel-size"
        )
    if size > config.num_hidden_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {size} exceeds the model's {config.num_hidden_layers} layers; use at most as "
            "many stages as layers"
        )
