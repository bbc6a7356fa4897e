"""Text to token ids and back: tokenizer bundle, chat templates, incremental detokenizing, stop strings. No torch."""
