"""Records of requests: access log, usage files, traces, recordings."""
