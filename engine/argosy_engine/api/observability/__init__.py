"""What the engine reports about itself: Prometheus metrics, the telemetry stream, the line of statistics."""
