"""The recipe of the embedded pair: corpus, tokenizer, target, drafters, evaluation."""
