"""Servers over uvicorn, of engines, `argosy batch` and routers' admin port: its HTTP protocol with bounds on what
clients send and on how long they take, and TLS handshakes. Routers' main port has a server of its own."""
