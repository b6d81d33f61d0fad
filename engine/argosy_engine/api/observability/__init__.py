"""What the engine reports about itself: Prometheus metrics, the telemetry stream, the line of statistics, the prefixes
that new replicas warm up with; and of each request a line and spans."""
