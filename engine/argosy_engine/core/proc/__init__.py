"""The process of the engine core, the handle that starts and ends it, and its clients."""
