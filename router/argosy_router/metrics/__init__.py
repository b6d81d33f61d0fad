"""The router's Prometheus metrics: series types, and the registry that defines and renders them."""
