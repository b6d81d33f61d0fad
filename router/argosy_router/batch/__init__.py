"""The way to `argosy batch`, which keeps files, batches and stored responses.

Owns: what is forwarded to it, and the room that requests of batches have. Must not know: what is kept there, and where.
Invariant: a storage that hangs holds up no stream, and takes no more than a bounded memory.

    batch_client      the connection: its key, deadlines, and a breaker
    forwarded_routes  /v1/files and /v1/batches
    content_stream    a file on its way to the client
"""

# Not compiled: waits for the storage.
