"""The router's Prometheus metrics: the series and the registry that renders them."""
