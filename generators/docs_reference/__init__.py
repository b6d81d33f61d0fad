"""Writes docs/reference from the definitions: parsers, CustomResourceDefinition, chart schema, metric registries."""
