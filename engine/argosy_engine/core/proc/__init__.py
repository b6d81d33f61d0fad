"""The process of the engine core, and how a client starts, reaches and ends it."""
