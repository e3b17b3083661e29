"""OpenAI's protocol: requests to prompts, tokens to answers."""
