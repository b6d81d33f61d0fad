"""How the core reaches its workers: one interface, one implementation per way of running them."""
