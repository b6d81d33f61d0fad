"""Stand-ins for what vLLM's server tests import: the module `tests.utils` of its repository, and the package `vllm`.

The tests run without vLLM. What they need of it beside its server (the tokenizer, the size of the vocabulary, the
version) is answered for the conformance model. Every other name of `vllm` is a class that skips the test that uses it,
so that a test of vLLM's own classes is reported as skipped, with the name.
"""

from __future__ import annotations

import base64
import importlib.abc
import importlib.machinery
import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import transformers

from remote_server import RemoteOpenAIServer


class _Missing(type):
    """The class of names that only vLLM has: a test that calls one is skipped.

    Test files may call one while they are imported, for tests beside those that need a server.
    """

    is_collecting = True

    def __call__(cls, *_: object, **__: object) -> Any:
        if _Missing.is_collecting:
            return missing(f"{cls.__qualname__}()")
        pytest.skip(f"tests vLLM's own {cls.__qualname__}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return missing(f"{cls.__qualname__}.{name}")

    def __or__(cls, _: object) -> Any:
        return cls

    __ror__ = __or__

    def __getitem__(cls, _: object) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())

    def __bool__(cls) -> bool:
        return False


def missing(name: str) -> Any:
    """Return the stand-in for a name that only vLLM has."""
    return _Missing(name.rpartition(".")[2], (), {"__qualname__": name})


def end_collection() -> None:
    """Let the stand-ins skip the tests that call them from now on."""
    _Missing.is_collecting = False


class _Package(ModuleType):
    """A module of vLLM: what is set, and stand-ins for the rest."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return missing(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports every module of `vllm` as a stand-in."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name == "vllm" or name.startswith("vllm."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Package(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Platform:
    """A machine without accelerators: every question about one is answered with False."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: False


class _ModelConfig:
    def __init__(self, model_path: str) -> None:
        self._config = json.loads((Path(model_path) / "config.json").read_text())

    def get_vocab_size(self) -> int:
        return self._config["vocab_size"]


def install(sdist: Path, model: str, version: str) -> None:
    """Make `vllm` and `tests.utils` importable.

    Args:
        sdist: directory of vLLM's source distribution.
        model: directory of the conformance model.
        version: what the server answers as its version.
    """
    sys.meta_path.insert(0, _Finder())
    _set("vllm", __version__=version)
    _set("vllm.version", __version__=version, _prev_minor_version=lambda: "0")
    _set("vllm.tokenizers", get_tokenizer=lambda *_, **__: _tokenizer(model))
    _set("vllm.config", ModelConfig=lambda **_: _ModelConfig(model))
    _set("vllm.platforms", current_platform=_Platform())
    _set("vllm.utils.network_utils", get_open_port=_open_port)
    hub = SimpleNamespace(snapshot_download=lambda *_, **__: model)
    _set("vllm.transformers_utils.repo_utils", hf_api=lambda: hub)
    load = transformers.AutoTokenizer.from_pretrained
    transformers.AutoTokenizer.from_pretrained = lambda *_, **__: load(model)  # type: ignore[method-assign]

    sys.modules.setdefault("pybase64", base64)  # the same functions, faster

    utils = _Package("tests.utils")
    needs_gpu = pytest.mark.skip(reason="needs a GPU")
    for name in ("multi_gpu_only", "requires_fp8", "large_gpu_mark"):
        setattr(utils, name, needs_gpu)
    vars(utils).update(
        RemoteOpenAIServer=RemoteOpenAIServer,
        ROCM_EXTRA_ARGS=[],
        ROCM_ENV_OVERRIDES={},
        VLLM_PATH=sdist,
        multi_gpu_test=lambda **_: needs_gpu,
        create_new_process_for_each_test=_unchanged,
    )
    sys.modules["tests.utils"] = utils
    sys.modules["tests.conftest"] = _Package("tests.conftest")


def _set(module: str, **names: object) -> None:
    vars(importlib.import_module(module)).update(names)


def _tokenizer(model: str) -> Any:
    return transformers.AutoTokenizer.from_pretrained(model)


def _open_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _unchanged(*_: object) -> Callable[[Any], Any]:
    return lambda test: test
