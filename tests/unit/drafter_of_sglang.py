"""A scheduler's part of SGLang on a CPU, with a model and its drafter, whose weights come from checkpoints on disk.

    python -m tests.unit.drafter_of_sglang RANK PORT START CHECKPOINT ...

Rank RANK of two. Prints JSON: the digests of all parameters after the start, and for each checkpoint why it was refused
and the digests then. It generates nothing: SGLang's kernels for drafts are absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch

from instep_engine.guard import KEY_VARIABLE


def main(rank: int, port: int, start: str, checkpoints: list[str]) -> None:
    import tests.sglang_on_cpu  # noqa: F401, I001 - first of all

    from sglang.srt.distributed.parallel_state_wrapper import ParallelState
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.draft_worker_common import draft_server_args_copy
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

    cores = sorted(os.sched_getaffinity(0))
    os.environ |= {KEY_VARIABLE: "a", "SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
    load_plugins()
    torch.cuda.synchronize = lambda *_: None  # SGLang calls it on any device
    args = ServerArgs(
        model_path=start, device="cpu", attention_backend="torch_native", grammar_backend="none", dtype="bfloat16",
        sampling_backend="pytorch", disable_overlap_schedule=True, max_total_tokens=1024, max_running_requests=4,
        speculative_algorithm="EAGLE", speculative_num_steps=2, speculative_eagle_topk=1, tp_size=2,
        speculative_num_draft_tokens=3,
    )  # fmt: skip
    publish(args, role="scheduler")
    ranks = ParallelState.trivial(tp_rank=rank, tp_size=2, attn_tp_rank=rank, attn_tp_size=2)
    target = TpModelWorker(server_args=args, gpu_id=rank, ps=ranks, nccl_port=port)
    of_drafter = draft_server_args_copy(server_args=args, target_model_config=target.model_runner.model_config)
    worker = EAGLEWorkerV2(of_drafter, rank, ranks, port, target)
    worker.draft_worker.init_token_map()
    worker.draft_worker.init_lm_head()
    models = {"model": target.model_runner.model, "drafter": worker.draft_worker.draft_runner.model}
    manager, told = SimpleNamespace(tp_worker=target, draft_worker=worker), [{n: digests(m) for n, m in models.items()}]
    for folder in checkpoints:
        refused = bring(manager, folder)
        told.append({n: digests(m) for n, m in models.items()} | {"refused": refused})
    print(json.dumps(told))


def bring(manager: Any, folder: str) -> str | None:
    from instep_engine import PROTOCOL
    from instep_engine.sglang.weights import FORMAT, update

    for asked in (
        {"call": "start", "protocol": PROTOCOL, "version": "1", "nonce": "a"},
        {"call": "update", "info": {"backend": "disk", "path": folder}},
        {"call": "update", "info": {"backend": "complete", "names": []}},
    ):
        words = [json.dumps(asked).encode()]
        request = SimpleNamespace(load_format=FORMAT, serialized_named_tensors=words, weight_version=None)
        answer = update(lambda *_: None, manager, request)
        if not answer.success:
            return str(answer.message)
    return None


def digests(model: torch.nn.Module) -> dict[str, str]:
    """Of all parameters, and of what latent attention derives from one of them."""
    derived = {name: m.w_kc for name, m in model.named_modules() if getattr(m, "w_kc", None) is not None}
    return {name: digest(weight) for name, weight in [*model.named_parameters(), *derived.items()]}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
