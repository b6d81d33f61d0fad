"""The replica's side of a request: one attempt, and how its response is read.

Must not know: other attempts at the same request, retries, the client.

attempt             a request at one replica: its charge, connection and response
attempt_log         records of the last attempts, and why their replicas were chosen
request_head        request line and headers that a replica gets
upstream_ids        request ids that engines get
relay               what is forwarded of a response, and what is held back
response_status     what a status says about the request and about the replica
stream_transcript   what the client has of a stream, and the request that continues it
stream_tally        the tokens of a stream without token ids
message_transcript  the same of a stream of Anthropic's API
stream_event        the fields of an event that a transcript reads
usage_scan          token usage, found in an answer's bytes
"""
