"""OpenAI's API and its neighbours, above the same gate as Triton's protocols."""
