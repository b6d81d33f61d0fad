"""An engine of the API server in front of a stand-in for its model, for tests of the endpoints."""

from __future__ import annotations

from typing import Any

from argosy_engine.api.served_engine import Engine, OpenAIServing


class StubEngine(Engine):
    """Serves requests with `llm`, without metrics and telemetry."""

    def __init__(self, llm: Any) -> None:
        super().__init__(("tiny",))
        self.llm = llm
        self._stub_serving = OpenAIServing(llm, self.names)

    @property
    def serving(self) -> OpenAIServing:
        return self._stub_serving
