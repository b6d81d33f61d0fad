"""The table of manifests through our own validation; the same table runs through an API server end to end."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml

from argosy_resource.validation import ManifestError, load_manifests, validate_manifest
from manifests_table import TABLE, TINY, manifest, wrongly_answered


def told(text: str) -> str | None:
    """Return what a manifest is refused with, None if it is accepted."""
    try:
        (service,) = load_manifests(text)
    except ManifestError as error:
        return str(error)
    assert service.metadata.namespace == "default"
    return None


@pytest.mark.parametrize("kind", TABLE)
def test_table(kind: str) -> None:
    messages = {case.name: told(case.manifest) for case in TABLE[kind]}
    assert not wrongly_answered(TABLE[kind], messages)


def test_defaults_are_those_of_the_schema() -> None:
    (service,) = load_manifests(manifest(TINY))
    assert service.spec.replicas == 1
    assert service.spec.engine.device == "auto"
    assert service.spec.engine.enable_prefix_caching
    assert service.spec.router.policy == "cost"
    assert (service.spec.rollout.max_surge, service.spec.rollout.max_unavailable) == (None, None)
    assert service.served_name == "tiny"


def test_metadata_as_an_api_server_shows_it_is_accepted() -> None:
    entry = {
        "manager": "kubectl",
        "operation": "Apply",
        "apiVersion": "v1",
        "fieldsType": "FieldsV1",
        "fieldsV1": {},
    }
    shown = yaml.safe_load(manifest(TINY))
    shown["metadata"] |= {"managedFields": [entry, entry], "uid": "1", "finalizers": ["example.com/a"]}
    assert [each.served_name for each in load_manifests(yaml.safe_dump(shown))] == ["tiny"]


def test_null_takes_a_default_where_there_is_one() -> None:
    (service,) = load_manifests(manifest(f"{TINY}\nreplicas: null\nengine: null"))
    assert (service.spec.replicas, service.spec.engine.device) == (1, "auto")


def test_every_field_at_fault_is_named() -> None:
    with pytest.raises(ManifestError) as caught:
        load_manifests(manifest(f"{TINY}\nreplicas: -1\nengine: {{device: tpu}}"))
    assert [error.path for error in caught.value.errors] == ["spec.engine.device", "spec.replicas"]
    assert str(caught.value).startswith('InferenceService "tiny" is invalid: ')


def test_unknown_field_is_answered_with_the_nearest() -> None:
    with pytest.raises(ManifestError, match=r'unknown field "spec.modle"; did you mean .model.'):
        load_manifests(manifest(f"modle: 1\n{TINY}"))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("- a list", "a manifest must be a mapping, not array"),
        ("a: [", "not valid YAML"),
        ("a: [b\nc: d", "  at line 2, column 2"),
        ("a: 1\na: 2", "key 'a' already set in map"),
        (
            manifest(TINY).replace("v1alpha1", "v1"),
            'apiVersion: Unsupported value: "inference.argosy.dev/v1"',
        ),
        (manifest(TINY).replace("InferenceService", "Pod"), 'kind: Unsupported value: "Pod"'),
        (manifest(TINY).replace("name: tiny", "labels: {}"), "metadata.name: Required value"),
        (manifest(TINY) + "---\n" + manifest(TINY), "metadata.name: Duplicate value: 'default/tiny'"),
        (manifest(TINY).replace("name: tiny", "name: tiny\n  labels: {a: 1}"), "metadata"),
        (
            manifest(TINY).replace("name: tiny", "name: tiny\n  namespaces: x"),
            'unknown field "metadata.namespaces"',
        ),
        (
            manifest(TINY).replace("name: tiny", "name: tiny\n  namespace: ../../elsewhere"),
            'metadata.namespace: Invalid value: "../../elsewhere"',
        ),
        ("? [a, b]\n: 1", "a key must be a text"),
        ("{a: " * 3000, "nested too deeply"),
        (manifest(f"{TINY}\nreplicas: !!binary aGVsbG8="), "not what JSON can say"),
        (manifest(f"{TINY}\nreplicas: !!set {{a, b}}"), "not what JSON can say"),
        (
            manifest(TINY).replace("name: tiny", "name: tiny\n  labels: &self {a: *self}"),
            "not what JSON can say",
        ),
        (manifest(f'{TINY}\nengine: {{env: [{{name: A, value: "\\ud800"}}]}}'), "not what JSON can say"),
    ],
)
def test_refused_before_the_schema(text: str, error: str) -> None:
    with pytest.raises(ManifestError) as caught:
        load_manifests(text)
    assert error in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "number"), [("resources: {cpu: 0.5}", "0.5"), ("engine: {env: [{name: A, value: 1}]}", "1")]
)
def test_a_number_that_must_be_text_is_told_to_want_quotes(spec: str, number: str) -> None:
    with pytest.raises(ManifestError) as caught:
        load_manifests(manifest(f"{TINY}\n{spec}"))
    assert f'; write it in quotes: "{number}"' in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        ("resources: {gpu: 1}", "spec.resources.gpu: Invalid value: "),
        ("resources: {gpu: 1}", '"integer"; its fields are count, resourceName'),
        ("engine: vllm", '"string"; its fields are type, image, '),
    ],
)
def test_the_fields_of_an_object_are_named_where_something_else_is_given(spec: str, fields: str) -> None:
    with pytest.raises(ManifestError) as caught:
        load_manifests(manifest(f"{TINY}\n{spec}"))
    assert fields in str(caught.value)


def test_several_documents_and_lists() -> None:
    text = manifest(TINY, name="a") + "---\n---\n" + manifest(TINY, name="b")
    assert [service.key for service in load_manifests(text, default_namespace="n")] == ["n/a", "n/b"]
    items = "\n".join(f"  {line}" for line in manifest(TINY, name="c").splitlines()).replace(
        "  api", "- api", 1
    )
    assert [service.key for service in load_manifests(f"kind: List\nitems:\n{items}\n")] == ["default/c"]


def test_the_callers_document_stays_as_it_is() -> None:
    document = {
        "apiVersion": "inference.argosy.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "tiny"},
        "spec": {"model": {"source": "builtin://tiny"}},
    }
    validate_manifest(document)
    assert document["metadata"] == {"name": "tiny"}
    assert document["spec"] == {"model": {"source": "builtin://tiny"}}


def test_import_is_light() -> None:
    """The command line imports it to print help; heavy libraries wait for the first manifest."""
    heavy = "{'kopf', 'kubernetes', 'jsonschema', 'celpy', 'torch', 'aiohttp'}"
    code = f"import argosy_resource.validation, sys; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
