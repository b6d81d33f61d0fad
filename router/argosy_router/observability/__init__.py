"""What a router records of its requests: access log, usage files, spans, and traces without text."""
