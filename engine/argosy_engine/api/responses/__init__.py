"""Endpoints of OpenAI's /v1/responses, and the responses that are stored.

response_job         one response, from its request to its end
response_events      its output items, and the events of a stream
response_store       where responses are kept, and the memory of one engine
background_runs      responses that are generated while no client waits
"""
