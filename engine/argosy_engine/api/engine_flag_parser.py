"""EngineFlagParser: parses a model and the flags of `EngineArgs`, for `argosy serve` and `argosy doctor`.

Both take all of a server's command line, vLLM's flags without a setting included, so that what starts a server can be
given to `argosy doctor` as it is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from argosy_engine.config import EngineArgs
from argosy_engine.errors import ConfigError
from argosy_engine.parsers.parser_registry import check_parser_flags
from argosy_engine.vllm_flags import (
    RARE_REFUSED,
    RARE_WITHOUT_EFFECT,
    REFUSED,
    WITHOUT_EFFECT,
    add_vllm_flags,
    check_vllm_flags,
)
from argosy_engine.vllm_settings import SETTINGS, with_vllm_settings
from argosy_protocol.program.flags import FlagParser, InvalidValue

_WITHOUT_EFFECT = (*WITHOUT_EFFECT, *RARE_WITHOUT_EFFECT)
_REFUSED = (*REFUSED, *RARE_REFUSED)


class EngineFlagParser(FlagParser):
    """Parser whose only positional argument is the model, as in `vllm serve`."""

    def __init__(self, prog: str, description: str, epilog: str | None = None) -> None:
        super().__init__(prog, description, epilog)
        self.add_argument(
            "model",
            nargs="?",
            help="ORG/NAME of a Hugging Face hub, a directory, or hf://, s3://, gs://, oci://, https://, file://, "
            "builtin://tiny",
        )
        self.add_argument(
            "--model", dest="named_model", metavar="MODEL", help="the model, as vLLM's servers take it"
        )

    def add_engine_flags(self) -> None:
        """Add the flags of `EngineArgs`, after those of the program itself in the help text."""
        self.add_config(EngineArgs, "engine")

    def add_vllm_flags(self, *, is_listed: bool = True) -> None:
        """Add vLLM's flags that have no setting here.

        Args:
            is_listed: whether the help text has them.
        """
        add_vllm_flags(self, _WITHOUT_EFFECT, _REFUSED, SETTINGS, is_listed=is_listed)

    def check_vllm_flags(self, options: argparse.Namespace, args: EngineArgs) -> None:
        """Tell which of these flags have no effect. If one is refused, print one line and exit with code 2."""
        check_vllm_flags(self, options, _WITHOUT_EFFECT, _REFUSED, args.data_parallel_size)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse as `FlagParser` does. Without any other model, the last of several values of a flag such as `--api-key`
        is the model: `--api-key KEY MODEL`."""
        options = super().parse_args(args, namespace)
        if options.model is None and options.named_model is None:
            options.model = self._model_behind_values(options)
        return options

    def _model_behind_values(self, options: argparse.Namespace) -> str | None:
        for fields in self._configs.values():
            for field in fields:
                given: list[list[str]] = (
                    (getattr(options, field.dest) or []) if field.flag.takes_several else []
                )
                for values in reversed(given):
                    if len(values) > 1:
                        return values.pop()
        return None

    def engine_args(self, options: argparse.Namespace) -> EngineArgs:
        """Return the engine's arguments. If they are invalid, print one line and exit with code 2."""
        model, named = options.model, options.named_model
        if model is None or "model" in options.from_file:
            model = named or model
        elif named is not None and "named_model" not in options.from_file:
            self.error("give one model, as argument or with --model")
        if model is None:
            self.error("give a model: ORG/NAME, a directory or builtin://tiny, as argument or in --config")
        try:
            args = self.build(EngineArgs, options, model=model)
            given = {flag.name: getattr(options, flag.dest, None) for flag in SETTINGS}
            args, notices = with_vllm_settings(args, given)
            args.check()
            check_parser_flags(args)
        except (InvalidValue, ConfigError) as error:
            self.error(str(error))
        for notice in notices:
            print(f"{self.prog}: {notice}", file=sys.stderr)
        return args
