"""The report on a service, as pure functions: conditions, counts, and which changes are worth an event."""
