"""Observability: access log, usage files, spans, trace capture, and the state dump on a signal.

access_log     a line per request
usage_ledger   tokens per key, model and hour, in files of `usage_line`s
tracing        a span per request, sent by OTLP
trace_capture  requests as a trace without text, which `simulation` can replay
debug_signal   what the router is doing, on SIGUSR1
append_file    append-only files that several tasks flush
line_writer    a file descriptor that is written without blocking
"""
