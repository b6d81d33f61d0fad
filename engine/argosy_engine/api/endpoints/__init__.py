"""The endpoints of the engine's server, a module for each family: routes, and what becomes of requests and outputs."""
