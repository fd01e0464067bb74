"""The embedded engine: vLLM's HTTP routes on a transformers decoder, small and exact rather than fast."""
