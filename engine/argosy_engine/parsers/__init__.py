"""Parsers of a chat model's output: reasoning, content and tool calls, one parser per family of models.

parser_registry      names as in vLLM, the choice for a model, plugins
chat_parser          ChatParser, which reads an output as it streams
harmony_parser       the same for gpt-oss, whose output is a list of messages
parsed_output        what a piece of an output adds to a message

tool_parsers         the form of calls, a module per family: a subclass of ToolParser
reasoning_parsers    the marks around reasoning, a subclass of ReasoningParser per family

argument_readers     read arguments while the model writes them
arguments_text       arguments as JSON text
markers              texts to look for in an output that arrives in pieces
scanners             find the end of a call in such an output
python_literals      calls in the form of Python
parameter_types      arguments written as plain text, by the function's JSON schema
"""
