"""A request's prompt as routing sees it, without its content.

Must not know: replicas, indexes, HTTP.

prompt_hash          chunk hashes and sizes
prompt_length_model  estimate of a prompt's tokens from its bytes
"""
