"""What TRL's vLLM clients import from vLLM, for tests on a machine without CUDA: the weight group speaks gloo.

TRL moves weights through vLLM's own classes, which need NCCL, thus a GPU. Those here have the same names and meet on
the same TCPStore with the same ranks; then the bytes go through torch's gloo, under the store's prefix `instep-gloo`.
The folder is first on the client's PYTHONPATH; the dist-info beside it tells TRL a version that both 1.10 and 1.16
accept. With `stub_vllm_0_31` before it TRL finds one from 0.28 on, of which it calls other functions.
"""


class LLM:
    """TRL imports it for `vllm_mode="colocate"`, which this stand-in does not have."""


class RequestOutput:
    """As above."""


class SamplingParams:
    """As above."""
