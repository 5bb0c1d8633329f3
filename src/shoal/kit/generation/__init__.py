"""Language models: prompts, chat templates, requests of token ids, sampling, weights, and token ids back to text."""
