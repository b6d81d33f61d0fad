"""The routes of the engine's server. They decode requests, and leave the answers to the rooms of the endpoints.

openai_routes     chats, completions and models; tokens
pooling_routes    embeddings, classification, scores and reranking
message_routes    Anthropic's messages
response_routes   OpenAI's responses, with those that are stored
sagemaker_routes  Amazon SageMaker's `/invocations`
state_routes      health, load, metrics and telemetry
info_routes       the server and its tokenizer
admin_routes      cache, sleep and profiles
request_context   what every route needs of a request besides its body
"""
