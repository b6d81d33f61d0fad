"""Generated requests to an engine, a pooling engine and a router: no server error, no hang, errors in their shape."""
