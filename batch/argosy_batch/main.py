"""`argosy batch`: read flags and environment, and run the program until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from argosy_batch.config import BatchConfig, ConfigError
from argosy_protocol.program.flags import FlagParser, InvalidValue, decode_path
from argosy_protocol.program.process import configure_logging, return_freed_memory

EXIT_USAGE = 2
EXIT_ADDRESS = 3


def build_parser() -> FlagParser:
    """Build the parser with all flags, grouped."""
    parser = FlagParser(
        "argosy batch",
        "Keeps files, batches and stored responses, and sends the requests of batches through a router.",
        epilog="Environment: ARGOSY_FLEET_KEY, or ARGOSY_FLEET_KEY_DIR with its files: the same as the routers'. Exit "
        "codes: 0 stopped, 2 usage, 3 address not available.",
    )
    parser.add_config(BatchConfig)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return the exit code."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        config = config_of(parser, arguments, os.environ)
        configure_logging(config.log_level.upper(), logging.StreamHandler(sys.stderr))
        return_freed_memory()
        return _run(config)
    except (ConfigError, InvalidValue) as error:
        print(f"argosy batch: {error}", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:  # CannotListen above all
        print(f"argosy batch: {error}", file=sys.stderr)
        return EXIT_ADDRESS


def config_of(parser: FlagParser, arguments: Any, environment: Mapping[str, str]) -> BatchConfig:
    """Build and check the configuration.

    Raises:
        InvalidValue: a value is out of bounds.
        ConfigError: something is missing.
    """
    config = parser.build(BatchConfig, arguments, environment, dec_hook=decode_path)
    config.check()
    return config


def _run(config: BatchConfig) -> int:
    import uvloop

    from argosy_batch.program import BatchProgram

    async def serve() -> None:
        program = BatchProgram(config)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, program.stopping.set)
        await program.run()

    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
