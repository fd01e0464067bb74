"""TRL imports it for `vllm_mode="colocate"`."""


class StructuredOutputsParams:
    """Never made in `vllm_mode="server"`."""
