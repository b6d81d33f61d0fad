"""Responses: the stored responses of OpenAI's Responses API, kept with `argosy batch`, where all routers find them.

Owns: which stored responses a request continues, and what is stored of its answer. Must not know: how a request is
routed, where objects are kept.
Invariant: a response's id cannot be guessed, and only its owner finds it. Engines store nothing: they get the whole
conversation, and the id of the response.
"""

# Not compiled: waits for the storage.
