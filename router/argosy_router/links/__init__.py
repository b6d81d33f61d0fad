"""What the router hears from replicas: telemetry of our engines, the metrics of others."""
