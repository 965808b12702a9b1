"""An OpenAI-compatible endpoint inside the run, for agents that bring their own loop (docs/agents.md)."""
