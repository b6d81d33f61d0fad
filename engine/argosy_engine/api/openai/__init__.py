"""OpenAI endpoints: requests to generations, and outputs to the shapes of the API. They know no HTTP server.

openai_serving       what the endpoints of generations share
chat                 /v1/chat/completions
chat_batch_answer    /v1/chat/completions/batch
completions          /v1/completions
embeddings           /v1/embeddings
classification       /classify
scoring              /score and /rerank
pooled_data          /pooling
pooled_outputs       what these four share
prompt_token_count   counts the tokens of a chat's prompt
tokenization         /tokenize and /detokenize

call_ids             ids of tool calls, each of its own within a choice
choice_stream        choices as the events of a stream
event_template       the bytes of its events, of which one text differs
chat_format          a choice of a chat, complete or as deltas
completion_format    a choice of a completion, likewise
answer_bounds        how large an answer may become
beam_choices         choices found by beam search
logprobs_format      log probabilities
reasoning_counter    number of tokens of reasoning
usage                `usage`
error_fields         which field of the request an error is about
"""
