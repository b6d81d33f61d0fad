"""The client's request: decoding, checks, and what is rewritten before an engine gets it.

Must not know: attempts, retries, how a replica is chosen.

call_decoding   HTTP request -> call
examination     reads a body, and refuses it for its content
examined        what routing knows of a body that was read
large_bodies    large bodies are read by another process
body_process    that process
ended_response  the responses in what engines answer, which it reads as well
call            a decoded request
model_names     which service a name means, which keys may use it, and what engines call it
token_estimate  tokens that a request is charged to its key's limits
stream_shape    which streams can be continued, and when they are complete
body_rewrite    changes to single fields of a JSON body
foreign_fields  fields that engines of other makes get
header_policy   headers that cross the router
request_id      ids of requests, as clients see them
"""
