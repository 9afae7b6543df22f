"""Text to ids and back: chat templates, control tokens, detokenisation."""
