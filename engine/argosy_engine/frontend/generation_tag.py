"""GenerationTag: the tag `{% generation %}` of chat templates, which tells trainers what the model has written.

Templates for transformers may have it around the assistant's answers. Where a prompt is rendered, it has no effect.
"""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class GenerationTag(Extension):
    tags = {"generation"}  # noqa: RUF012 (the type of the base class)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the body, in a scope of its own, as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
