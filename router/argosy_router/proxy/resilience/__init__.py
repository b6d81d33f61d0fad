"""What happens when attempts fail or are slow: retry budget, hedging, outlier detection.

Must not know: the bytes of requests and answers, connections.
"""
