"""Several API processes of one engine (`--api-server-count`).

The first process is the whole server of an engine with one: it starts the cores, and keeps everything that is not one
request's alone. The others do what costs time per request and token (HTTP, templates, tokens, text), with clients of
their own for the cores, and pass all other requests to the first.

process_group     starts, tells and ends the others, in the first process
api_process       the program of the others
relay_server      answers requests that the others pass on, in the first process
request_relay     passes them on
call_channel      how the first process calls the others
process_messages  what is said in both ways
frames            messages on a stream
"""
