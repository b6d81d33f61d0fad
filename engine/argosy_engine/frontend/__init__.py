"""Front end: renders and tokenises prompts, follows requests through the core, and turns tokens into text."""
