"""The whole path on one machine with the engine, the model and the router that ship."""

from __future__ import annotations

import pytest
from local_fleet import QUICK_SUPERVISOR, Load, LocalFleet, descendants, kill, watched
from openai import OpenAI

pytestmark = pytest.mark.timeout(600)


def test_the_tiny_model_from_manifest_to_answer(
    own_fleet: LocalFleet, capfd: pytest.CaptureFixture[str]
) -> None:
    own_fleet.supervisor = QUICK_SUPERVISOR
    own_fleet.manifest(replicas=1)
    assert own_fleet.start() == 0
    assert "loading the model" in capfd.readouterr().out

    assert own_fleet.argosy("chat", "tiny", "Hello!", "--max-tokens", "16", "--temperature", "0") == 0
    assert capfd.readouterr().out.strip("\n") != ""

    with OpenAI(base_url=f"{own_fleet.url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        question = [{"role": "user", "content": "What is your name?"}]
        whole = client.chat.completions.create(model="tiny", messages=question, max_tokens=12, temperature=0)
        streamed = client.chat.completions.create(
            model="tiny", messages=question, max_tokens=12, temperature=0, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert text == whole.choices[0].message.content

    with Load(own_fleet, workers=1) as load:
        own_fleet.manifest(replicas=1, engine={"maxNumSeqs": 8})
        assert own_fleet.up() == 0
    assert load.failures == []
    assert load.replicas == {"tiny-0", "tiny-1"}

    status = own_fleet.status()
    engine = status.services[0].replicas[0].pid
    assert engine is not None
    with watched([engine, *descendants(engine)]) as survivors:  # the engine's core ends with its API server
        kill(engine)
        assert survivors() == []
    with watched(descendants(status.pid)) as survivors:
        kill(status.pid)
        assert survivors() == []
