"""`argosy serve MODEL`: the API server process, from the command line to the last drained request."""

from __future__ import annotations

import argparse
import asyncio
import difflib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import uvicorn

from argosy_engine.api.app import Engine, build_app
from argosy_engine.api.guard import Guard
from argosy_engine.config import EngineArgs, ResolvedConfig
from argosy_engine.errors import ConfigError, EngineDead
from argosy_engine.frontend.async_llm import AsyncLLM
from argosy_engine.protocol.keys import KeyRing

logger = logging.getLogger("argosy.api")

_KEEP_ALIVE_S = 75
"""Longer than the router keeps idle connections, so that the router closes first."""
_LAST_BYTES_S = 5
"""After the drain: time for clients to read what is already written."""
_GIB = 1 << 30


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server; exit code 0 after a drain, 1 when the engine died, 2 for wrong usage."""
    started = time.perf_counter()
    options, args = parse_args(argv)
    logging.basicConfig(
        level=options.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )
    try:
        import uvloop

        return uvloop.run(_serve(options, args, started))
    except ConfigError as error:
        print(f"argosy serve: {error}", file=sys.stderr)
        return 2
    except EngineDead as error:
        print(f"argosy serve: the engine core died: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


async def _serve(options: argparse.Namespace, args: EngineArgs, started: float) -> int:
    keys = KeyRing([*options.api_key, *os.environ.get("ARGOSY_API_KEY", "").split(",")])
    engine = Engine(args.served_model_name or (args.canonical_name,))
    server = _Server(
        uvicorn.Config(
            Guard(build_app(engine), keys, options.guard_metrics),
            host=options.host,
            port=options.port,
            http="httptools",
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_LAST_BYTES_S,
            h11_max_incomplete_event_size=65536,
            server_header=False,
        )
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    serving = asyncio.create_task(server.serve(), name="http")
    loading = asyncio.create_task(_load(engine, args, stop, started, options), name="load")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait({loading, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()  # a model that cannot load ends the server, with its message
            await asyncio.wait({stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done() and not stop.is_set():
            return 1  # uvicorn has said why: the port is taken, for one
        await _drain(engine, options.shutdown_timeout)
        return 1 if engine.llm is not None and engine.llm.is_dead else 0
    finally:
        for task in (loading, stopping):
            task.cancel()
        await asyncio.gather(loading, stopping, return_exceptions=True)
        server.should_exit = True
        await engine.close()
        await asyncio.gather(serving, return_exceptions=True)


async def _load(
    engine: Engine, args: EngineArgs, stop: asyncio.Event, started: float, options: argparse.Namespace
) -> None:
    engine.phase = "loading the model"
    before = time.perf_counter()
    llm = await AsyncLLM.start(args)
    llm.on_dead = stop.set
    engine.attach(llm)
    _print_start_up(llm.config, options, before - started, time.perf_counter() - started)


async def _drain(engine: Engine, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(engine.drain(), timeout_s)
    except TimeoutError:
        logger.warning(
            "drain timed out after %.0f s; %d requests aborted",
            timeout_s,
            engine.llm.num_live if engine.llm else 0,
        )


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process drains on its own terms."""

    def install_signal_handlers(self) -> None: ...

    def capture_signals(self) -> Any:
        from contextlib import nullcontext

        return nullcontext()


def _print_start_up(
    config: ResolvedConfig, options: argparse.Namespace, imports_s: float, total_s: float
) -> None:
    """Where the time went, and what there is now; one table on standard error."""
    rows = [("api server imports", imports_s), *config.startup_phases]
    rows.append(("processes, tokenizer, hand-over", max(total_s - sum(seconds for _, seconds in rows), 0.0)))
    lines = [f"  {name:<34}{seconds:8.2f} s" for name, seconds in rows]
    print(
        "\n".join(
            [
                f"{config.model_name}: {config.architecture}, {config.dtype} on {config.device}, "
                f"weights {config.weights_bytes / _GIB:.2f} GiB",
                f"KV cache {config.kv_cache_bytes / _GIB:.2f} GiB: {config.kv_cache_tokens} tokens, "
                f"{config.max_concurrency:.1f} requests of {config.max_model_len} tokens at once",
                *lines,
                f"  {'ready':<34}{total_s:8.2f} s",
                f"listening on http://{options.host}:{options.port}",
            ]
        ),
        file=sys.stderr,
        flush=True,
    )


def parse_args(argv: Sequence[str] | None) -> tuple[argparse.Namespace, EngineArgs]:
    """Server options and engine arguments; the engine's flags are made from `EngineArgs`.

    Exits with code 2 and a suggestion on an unknown flag.
    """
    parser = argparse.ArgumentParser(prog="argosy serve", description="Serve one model behind an OpenAI API.")
    parser.add_argument("model", help="builtin://tiny or a model directory")
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    server.add_argument("--port", type=_port, default=8000, help="port to listen on (default: %(default)s)")
    server.add_argument(
        "--api-key", action="append", default=[], help="accepted bearer key; repeatable; also ARGOSY_API_KEY"
    )
    server.add_argument("--guard-metrics", action="store_true", help="ask for the key on /metrics too")
    server.add_argument(
        "--shutdown-timeout",
        type=float,
        default=45.0,
        help="seconds to finish running requests on SIGTERM (default: 45)",
    )
    server.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    names = _add_engine_flags(parser.add_argument_group("engine"))
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        close = difflib.get_close_matches(unknown[0].split("=")[0], parser._option_string_actions, n=1)
        parser.error(f"unknown argument {unknown[0]}" + (f"; did you mean {close[0]}?" if close else ""))
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    try:
        return options, EngineArgs.of(model=options.model, **given)
    except ConfigError as error:
        parser.error(str(error))


def _add_engine_flags(group: argparse._ArgumentGroup) -> list[str]:
    """One flag per field of EngineArgs; booleans get vLLM's --no- form."""
    names = []
    defaults = {field.name: field.default for field in msgspec.structs.fields(EngineArgs)}
    for name, annotation in get_type_hints(EngineArgs, include_extras=True).items():
        if name == "model":
            continue
        names.append(name)
        flag = "--" + name.replace("_", "-")
        kind, help_text = _unwrap(annotation)
        default = defaults[name]
        help_text += "" if default in (None, ()) else f" (default: {default})"
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=help_text)
        elif isinstance(default, tuple):
            group.add_argument(flag, nargs="+", default=None, help=help_text)
        else:
            choices = (
                get_args(kind)
                if isinstance(kind, type) is False and all(isinstance(a, str) for a in get_args(kind))
                else ()
            )
            group.add_argument(
                flag,
                default=None,
                choices=choices or None,
                metavar=None if choices else name.split("_")[-1].upper(),
                help=help_text,
            )
    return names


def _unwrap(annotation: Any) -> tuple[Any, str]:
    """The type below Annotated and Optional, and its description."""
    text = ""
    while True:
        if hasattr(annotation, "__metadata__"):
            text = next((meta.description for meta in annotation.__metadata__ if meta.description), text)
            annotation = annotation.__origin__
            continue
        options = [option for option in get_args(annotation) if option is not type(None)]
        if len(options) == 1 and get_origin(annotation) is not tuple:
            annotation = options[0]
            continue
        return annotation, text.replace("%", "%%")


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError("must be between 0 and 65535")
    return port


if __name__ == "__main__":
    sys.exit(main())
