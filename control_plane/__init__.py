"""What operators use: configuration, commands, the HTTP API and metrics."""
