"""Real requests at a set concurrency through the OpenAI API, and what became of them."""
