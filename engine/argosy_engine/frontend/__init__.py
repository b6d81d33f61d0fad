"""Front end: renders and tokenises prompts, follows requests through the core, and turns tokens into text.

async_llm                   AsyncLLM: the engine of the API server, with the core in another process
llm                         LLM: offline generation
llm_engine                  LLMEngine: steps one by one; LLM is built on it
llm_tokenizer               what LLM.get_tokenizer returns
beam_search                 beam search, by one request per beam and token
pooling                     requests for vectors, offline pooling and scores
model_source                makes a model a folder on this machine, and fetches it if it is remote
memory_report               the memory budget as a table

render_pool                 threads that render and tokenise
renderer                    a request's messages, texts or token ids become tokens
chat_template               the model's own Jinja template
bounded_template            the sandbox of templates, with a deadline and a cap
guarded_template            the sandbox of templates that come with requests
generation_tag              the tag for trainers, without effect
template_roles              which roles it renders
control_tokens              keeps a chat's text from becoming control tokens
tokenizer                   tokenizer.json
mistral_tokenizer           tekken.json and tokenizer.model.vN, by mistral-common
word_cache                  tokens of the words of ASCII text that were seen before
chunk_map                   where the router's chunks end in the tokens
prompt_truncation           truncate_prompt_tokens: how much of a prompt stays
pooled_prompts              inputs and pairs of texts of pooling models
fill_in_middle              prompts of models that write between a prompt and a suffix
prompts                     types of prompts for offline use

request_params              sampling parameters of an API request
structured_output_request   its structured output
input_processor             makes the core's requests
queue_limits                refuses requests while there are too many

request_state               what is known of a choice while it is computed
output_processor            turns the core's outputs into text and finish reasons
detokenizer                 tokens become text, and stop strings are found
output_collector            outputs that a reader has not taken yet
outputs                     types of what a reader gets
request_record              what is known of an HTTP request, for logs and spans
observer                    interface of metrics and telemetry
"""
