"""The embedded engine: vLLM's HTTP surface over a transformers decoder, small and exact rather than fast."""
