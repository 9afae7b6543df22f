"""Tool calls in the text of a model: parsers, grammars and reasoning, one module per format."""
