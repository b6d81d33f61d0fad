"""Models of a local fleet: fetched into this machine's store before any replica is told of them.

Owns which models of the manifests are fetched, and what their replicas get instead: a directory, so that an engine that
starts again needs neither network nor credentials. Must not know processes. Invariant: if one of the models cannot be
fetched or divided among the devices, or a folder cannot be loaded, nothing has changed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from msgspec.structs import replace

from argosy.errors import UsageError
from argosy.fetching import check_local_model, engine_check, fetch_errors
from argosy_fetcher.errors import UnsupportedModel
from argosy_fetcher.progress_display import LineDisplay, ProgressDisplay, progress_display
from argosy_fetcher.pull import PulledModel, pull_model
from argosy_fetcher.source_uri import SourceUri, parse
from argosy_resource.engine_command import flags_as_fields
from argosy_resource.types import InferenceService


@contextmanager
def local_services(
    services: Sequence[InferenceService], *, is_plain: bool = False
) -> Iterator[tuple[InferenceService, ...]]:
    """Yield the services with directories as the sources of what they serve. Until the end nobody can remove these.

    Args:
        is_plain: show lines, although there is a terminal.

    Raises:
        UsageError: a source is malformed, or a model of this machine cannot be loaded.
        CommandError: a model cannot be fetched.
    """
    with ExitStack() as held, fetch_errors():
        models: dict[SourceUri, PulledModel] = {}
        for service in filter(
            _is_served, services
        ):  # all of them before the first fetch, which may take an hour
            _check_local(service)
        for service in services:
            uri = parse(service.spec.model.source)
            if uri.is_remote and uri not in models and _is_served(service):
                with _display(is_plain) as shown:
                    check = engine_check(uri, **service.spec.parallelism.layout)
                    models[uri] = pull_model(uri, progress=shown, check_config=check)
                held.callback(models[uri].close)
        local = tuple(_localized(service, models) for service in services)
        for service in filter(_is_served, local):  # a model that was in the store, or of several services
            _check_local(service)
        kept = held.pop_all()
    with kept:
        yield local


def _check_local(service: InferenceService) -> None:
    source = service.spec.model.source
    if parse(source).is_remote:
        return
    try:
        check_local_model(source, **service.spec.parallelism.layout)
    except UnsupportedModel as error:
        fields = flags_as_fields(str(error))
        text = f"{error} ({fields})" if fields else str(error)
        raise UsageError(f"{service.key}: {text}; nothing was changed") from error


def _is_served(service: InferenceService) -> bool:
    return service.spec.replicas > 0 and not service.spec.paused


def _localized(service: InferenceService, models: dict[SourceUri, PulledModel]) -> InferenceService:
    found = models.get(parse(service.spec.model.source))
    if found is None:
        return service
    model = replace(service.spec.model, source=f"file://{found.path}", secret_ref=None, cache=None)
    return replace(service, spec=replace(service.spec, model=model))


def _display(is_plain: bool) -> ProgressDisplay:
    return LineDisplay(_write) if is_plain else progress_display()


def _write(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
