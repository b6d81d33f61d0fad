"""Parameters of requests: validated structs that every process can import, because they need no torch."""
