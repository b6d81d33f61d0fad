"""Which replica holds which beginnings of prompts."""
