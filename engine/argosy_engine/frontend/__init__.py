"""Text in, text out: templates, tokens, detokenising, and the request's life around the core. It never computes."""
