"""docs/api.md tells of every field that a request may have, and docs/supported-models.md of every architecture."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from argosy_engine.models.registry import architectures
from argosy_protocol.errors import BadRequest
from argosy_protocol.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    InternalFields,
    TextTokenizeRequest,
    decode_request,
    unsupported,
)
from argosy_protocol.pooling import EmbeddingRequest
from argosy_resource.model import LOCAL_SCHEMES, REMOTE_SCHEMES
from argosy_resource.validation import load_manifests

DOCS = Path(__file__).parent.parent / "docs"
TEXT = (DOCS / "api.md").read_text("utf-8")
SERVING = (DOCS / "serving.md").read_text("utf-8")
ARCHITECTURES = (DOCS / "supported-models.md").read_text("utf-8")
REQUESTS = (
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    TextTokenizeRequest,
    DetokenizeRequest,
)


def chapter(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## )", TEXT, re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


def named(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def test_every_field_is_documented() -> None:
    fields = {field for request in REQUESTS for field in request.__struct_fields__}
    assert fields - named(TEXT) == set()


def refused() -> list[str]:
    rows = re.findall(r"^\| (`.*?) \|", chapter("Refused fields"), re.MULTILINE)
    fields = [field for cell in rows for field in sorted(named(cell))]
    # `structured_outputs` refuses vLLM's former names of it.
    return [field for field in fields if field != "structural_tag" and not field.startswith("guided_")]


@pytest.mark.parametrize("field", refused())
def test_fields_that_are_said_to_be_refused_are(field: str) -> None:
    value = 2 if field in ("best_of", "length_penalty") else "x"
    request = CompletionRequest if field in CompletionRequest.__struct_fields__ else ChatCompletionRequest
    body = {"prompt": "a"} if request is CompletionRequest else {"messages": []}
    assert unsupported(request(**body, **{field: value})) == field


def test_internal_fields_are_refused() -> None:
    told = named(chapter("Refused fields"))
    for field in InternalFields.__struct_fields__:
        assert field in told
        with pytest.raises(BadRequest):
            decode_request("completions", f'{{"prompt": "a", "{field}": 1}}'.encode())


def test_every_architecture_is_documented() -> None:
    assert {name for name in named(ARCHITECTURES) if name.endswith(("ForCausalLM", "LMHeadModel"))} == set(
        architectures()
    )


def test_the_manifest_of_the_guide_is_valid() -> None:
    found = re.search(r"^```yaml\n(.*?)^```", SERVING, re.MULTILINE | re.DOTALL)
    assert found
    assert [service.served_name for service in load_manifests(found[1])] == ["qwen3-8b"]


@pytest.mark.parametrize(
    ("page", "least"), [("models-in-a-cluster.md", 2), ("serving-on-kubernetes.md", 1), ("serving.md", 1)]
)
def test_every_manifest_and_every_value_of_the_chart_in_a_guide_is_valid(page: str, least: int) -> None:
    schema = json.loads((DOCS.parent / "charts" / "argosy" / "values.schema.json").read_text("utf-8"))
    count = 0
    for block in re.findall(
        r"^```yaml\n(.*?)^```", (DOCS / page).read_text("utf-8"), re.MULTILINE | re.DOTALL
    ):
        (*documents,) = yaml.safe_load_all(block)
        if any(document.get("kind") == "InferenceService" for document in documents):
            assert load_manifests(block)
            count += 1
        elif not any("kind" in document for document in documents) and "spec" not in documents[0]:
            jsonschema.Draft202012Validator(schema).validate(documents[0])
            count += 1
    assert count >= least


def test_the_guide_has_the_sources_that_a_manifest_may_have() -> None:
    """Forms of the guide, with a name in the place of each capital word."""
    names = {"ORG/NAME": "org/name", "BUCKET": "bucket", "HOST": "registry.example", "REPOSITORY": "a/b",
             "PREFIX": "a", "PATH": "a", "REV": "v1", "DIGEST": "0" * 64, "TAG": "v1", "CLAIM": "claim"}  # fmt: skip
    text = "".join((DOCS / page).read_text("utf-8") for page in ("models.md", "models-in-a-cluster.md"))
    cells = re.findall(r"^\| (.*?) \|", text, re.MULTILINE)
    forms = {form for cell in cells for form in re.findall(r"`([a-z0-9]+://[^`]+)`", cell)}
    manifest = "apiVersion: inference.argosy.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: a}\n"
    for form in forms:
        for word, name in names.items():
            form = re.sub(rf"\b{word}\b", name, form)
        source = re.sub(r"[\[\]]", "", form)
        room = ", widenedSize: 16Gi" if source.endswith(".gguf") else ""
        assert load_manifests(f"{manifest}spec: {{model: {{source: '{source}'{room}}}}}"), form
    assert {form.partition(":")[0] for form in forms} == {*REMOTE_SCHEMES, *LOCAL_SCHEMES}


def test_reasons_and_conditions_of_the_guide_are_the_operators() -> None:
    table = re.findall(r"^\| (`[A-Z].*?) \|", (DOCS / "operations.md").read_text("utf-8"), re.MULTILINE)
    told = {word for cell in table for word in named(cell)}
    sources = "".join(path.read_text("utf-8") for path in (DOCS.parent / "operator").rglob("*.py"))
    assert {"Ready", "RolloutHalted"} <= told
    assert {word for word in told if f'"{word}"' not in sources} == set()


def test_the_offline_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(r"^```python\n(.*?)^```", SERVING, re.MULTILINE | re.DOTALL)
    assert found
    exec(compile(found[1], "docs/serving.md", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out.strip()
