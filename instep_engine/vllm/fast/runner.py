"""Less host work in steps of vLLM 0.26's model runner V2 in which the requests of the step before decode again.

Most steps of a rollout are such. In them vLLM's runner makes and copies the same indices as in the step before, and
copies the sampling parameters of all slots, which only a new request changes.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.triton_utils import HAS_TRITON

from instep_engine.vllm.fast import is_known

logger = init_logger("vllm.instep")


def install() -> None:
    """Reuse what did not change. Once in each process that may compute."""
    if not is_known() or not HAS_TRITON:
        logger.info("instep: vLLM's own preparation of steps, because this is not vLLM 0.26 with Triton")
        return
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    prepare, dummy_run = GPUModelRunner.prepare_inputs, GPUModelRunner._dummy_run
    add_request, apply_staged_writes = Sampler.add_request, Sampler.apply_staged_writes
    if hasattr(prepare, "__wrapped__"):
        return

    @functools.wraps(prepare)
    def prepare_inputs(self: Any, step: Any, graph: Any) -> Any:
        last, ids = self._instep_last, list(step.num_scheduled_tokens)
        one_each = step.total_num_scheduled_tokens == len(ids) and not step.scheduled_new_reqs
        if last and one_each and last[1] == graph and last[0].req_ids == ids:
            return _again(self, last[0], step)
        batch = prepare(self, step, graph)
        plain = one_each and self.pcp_manager is None and not self.use_dcp and not batch.is_prefilling_np.any()
        self._instep_last = (batch, graph) if plain else None
        return batch

    def forget(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._instep_last = None  # the dummy overwrites its buffers
        return dummy_run(self, *args, **kwargs)

    def add(self: Any, *args: Any) -> None:
        self._instep_changed = True
        add_request(self, *args)

    def apply(self: Any) -> None:
        if self._instep_changed:
            apply_staged_writes(self)
        self._instep_changed = False

    GPUModelRunner._instep_last, Sampler._instep_changed = None, True
    GPUModelRunner.prepare_inputs, GPUModelRunner._dummy_run = prepare_inputs, forget
    Sampler.add_request, Sampler.apply_staged_writes = add, apply
    logger.info("instep: steps that decode the same requests again reuse their indices (model runner V2)")


def _again(runner: Any, last: Any, step: Any) -> Any:
    """Return the inputs of a step for the requests of `last`, an `InputBatch`, each of which decodes its next token."""
    from vllm.v1.worker.gpu import model_runner

    states, buffers, batch = runner.req_states, runner.input_buffers, copy.copy(last)
    index, starts, computed = last.idx_mapping, last.query_start_loc, states.num_computed_tokens.gpu
    model_runner.prepare_pos_seq_lens(index, starts, computed, buffers.positions, buffers.seq_lens)
    batch.logits_indices = model_runner.combine_sampled_and_draft_tokens(
        buffers.input_ids, index, states.last_sampled_tokens, starts, last.seq_lens, states.prefill_len.gpu,
        states.draft_tokens, last.cu_num_logits, last.num_reqs, runner.model_state.num_new_sampled_tokens_per_step,
    )  # fmt: skip
    batch.num_computed_tokens_np = states.num_computed_tokens_np[last.idx_mapping_np]
    batch.seq_lens_cpu_upper_bound = torch.zeros_like(last.seq_lens_cpu_upper_bound)
    batch.seq_lens_cpu_upper_bound.numpy()[: last.num_reqs] = batch.num_computed_tokens_np + 1
    batch.has_structured_output_reqs = step.has_structured_output_requests
    return batch
