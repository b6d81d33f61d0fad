"""The engine's HTTP surface: OpenAI routes, health, metrics, telemetry. Thin over `frontend`."""
