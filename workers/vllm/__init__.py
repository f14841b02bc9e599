"""What runs inside a vLLM process. Importing this package imports nothing of vLLM."""
