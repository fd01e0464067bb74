"""The embedded engine: vLLM's HTTP surface over a transformers causal language model, in a process of its own.

Small and exact rather than fast: the reference of the conformance suite and the engine of a machine without vLLM.
Start it with `python -m instep.engines.embedded --model DIR --port N`.
"""
