"""Executors: how the core reaches its workers, with one interface and one implementation per way of running them."""
