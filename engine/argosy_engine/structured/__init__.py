"""Structured outputs: the request parameters, and the grammars that constrain an output to them.

structured_outputs_params   what a request asks for, and the grammar to compile
structural_tag              XGrammar's tags, and the one that enforces tool calls
json_schema                 refuses schemas that XGrammar would not fully enforce
json_size                   lower bound of a value's size as JSON
grammar_notation            refuses EBNF of other notations
grammar_size                limits on regular expressions and EBNF
pattern_syntax              refuses regular expressions that XGrammar would not fully enforce

manager                     StructuredOutputManager: the core's interface, compiles and follows grammars
manager_factory             connects it with the rest
copied_grammars             the same for copies of a core
grammar_state               the position of one output in its grammar
reasoning                   the tokens around the reasoning before a structured output
step_costs                  which requests fail if a step's grammars take too long
bounded_thread              thread for native calls that may hang

compile_queue               deadlines, turns and a cache for the grammars to compile
round_robin_queue           turns of its keys
queued_grammars             bounds the grammars that waiting requests hold
grammar_client              the core's side of the process that compiles
grammar_server              that process, which forks for each grammar
grammar_messages            messages between them
xgrammar_backend            compiles by XGrammar
xgrammar_import             imports XGrammar without torch
vocabulary                  the bytes of each token id
step_probe                  finds grammars that are slow to follow
"""
