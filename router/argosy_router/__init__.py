"""Argosy's router: one OpenAI endpoint in front of every replica of every model.

`http` speaks HTTP/1.1, `discovery` finds replicas, `telemetry` learns what they hold, `policy` chooses, `proxy`
carries requests, `admin` tells operators, `server` puts them together.
"""
