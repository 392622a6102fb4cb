"""A local OpenAI-compatible endpoint over one draft model and one verifier."""
