"""CallParameters: lets the sequences of one call share the large values of their parameters in the core's memory.

Every sequence arrives as a message of its own, so that a list of a hundred thousand allowed tokens would be held once
for each of a call's thousand sequences. Values are compared, not trusted to be equal. One thread uses it.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from msgspec import structs

from argosy_engine.messages.core_messages import EngineCoreRequest
from argosy_engine.params.sampling_params import SamplingParams
from argosy_engine.structured.structured_outputs_params import GrammarSpec

_LARGE = ("allowed_token_ids", "logit_bias", "bad_words_token_ids", "extra_args")


class CallParameters:
    """Remembers the parameters of each call's latest sequence for as long as the core holds them."""

    def __init__(self) -> None:
        self._params: WeakValueDictionary[str, SamplingParams] = WeakValueDictionary()
        self._specs: WeakValueDictionary[str, GrammarSpec] = WeakValueDictionary()

    def share(self, message: EngineCoreRequest) -> None:
        """Replace what is equal to the call's latest sequence by the objects of that one."""
        call_id = message.call_id
        if not call_id:
            return
        params, earlier = message.sampling_params, self._params.get(call_id)
        if earlier is not None:
            for name in _LARGE:
                value = getattr(earlier, name)
                if value == getattr(params, name):
                    setattr(params, name, value)
        self._params[call_id] = params
        if message.grammar is None:
            return
        spec = self._specs.get(call_id)
        if spec == message.grammar.spec:
            message.grammar = structs.replace(message.grammar, spec=spec)
        self._specs[call_id] = message.grammar.spec
