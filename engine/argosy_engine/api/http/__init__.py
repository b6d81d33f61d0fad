"""HTTP below the endpoints: bounded parsing, connections, the ASGI layers around the application, and responses."""
