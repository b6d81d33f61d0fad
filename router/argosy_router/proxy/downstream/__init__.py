"""The client's side of a request: what is written to the client.

Must not know: attempts, retries, which replica answers.

answer             head, body, errors, and comments before them
commented_stream   comments that keep a stream's connection open
model_renaming     the model's name in answers
error_headers      headers of the router's own errors
api_shape          their bodies and events, in the shape of OpenAI's or of Anthropic's API
playground_client  the client of a chat in the admin page
"""
