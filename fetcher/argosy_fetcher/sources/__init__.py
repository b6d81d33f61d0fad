"""Sources of models, one module each. `registry` names them; `source` is what a new one implements."""
