"""The router's Prometheus metrics.

definitions  name, kind, labels, help and buckets of every series
series       values and text exposition of counters, histograms and readings
registry     the series of one router, and its scrape
"""
