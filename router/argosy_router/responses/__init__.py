"""Responses: the stored responses of OpenAI's Responses API, kept with `argosy batch`, where all routers find them.

Owns: which stored responses a request continues, and what is stored of its answer. Must not know: how a request is
routed, where objects are kept.
Invariant: a response's id cannot be guessed, and only its owner finds it. Engines store nothing: they get the whole
conversation, and the id of the response.

    response_store        records by account and id, with `argosy batch`
    stateful_routes       the routes below /v1/responses, and the creation of responses
    storing_client        stores a finished answer before its client sees the end
    background_run        one response that is generated while no client waits, and who follows its events
    background_responses  responses that are generated while no client waits
"""

# Not compiled: waits for the storage.
