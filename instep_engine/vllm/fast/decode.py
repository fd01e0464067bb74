"""Shorter loops for vLLM 0.26's scheduler, in steps in which each running request decodes one token.

These are most steps of a rollout. In them vLLM's own loops take longer than the GPU: they check for each request
whether its blocks suffice, which only one in `block_size` steps needs, and make an object for each token. The code here
has the same result as `Scheduler.schedule`, `AsyncScheduler._update_after_schedule` and `Scheduler.update_from_output`
after such a step. In any other step, version or configuration vLLM's own methods run.

A step that also begins a prompt has no full CUDA graph and takes two to three times as long. In a full engine, each
response that ends would cause one. So prompts wait for each other, for a bounded number of steps.
"""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.utils import check_stop, remove_all
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from instep_engine.vllm.fast.hold_back import Held, HoldBack

logger = init_logger("vllm.instep")
RUNNING = RequestStatus.RUNNING
STATISTICS_STEPS = 16  # if nothing else leaves, every so many steps send statistics
TOGETHER = 16  # prompts begin when 1 / that of the slots are free, or as many as there are prompts
LONGEST_WAIT = 32  # steps


class QuickScheduler(HoldBack, AsyncScheduler):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._obstacles = obstacles(self)
        self._num_quiet_steps = 0
        self._num_put_off = 0  # steps with free slots since waiting requests were last checked
        self._most_running = self.max_num_running_reqs + 1  # with so many there was no room for the next one
        if self._obstacles:
            logger.info("instep: vLLM's own loops, because there is %s", ", ".join(self._obstacles))
        else:
            logger.info("instep: short loops for steps that decode only")

    # ---- before the step ---------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        unpaused = self._pause_state == PauseState.UNPAUSED
        decodes_only = not self._obstacles and not throttle_prefills and unpaused and not self._admits()
        if decodes_only and self.running:
            decoding = self._decoding()
            if decoding:
                return self._schedule(decoding)
        num_waiting, self._num_put_off = len(self.waiting), 0
        output = super().schedule(throttle_prefills)
        could = unpaused and output.total_num_scheduled_tokens < self.max_num_scheduled_tokens
        refused = could and 0 < num_waiting <= len(self.waiting)
        self._most_running = len(self.running) if refused else self.max_num_running_reqs + 1
        return output

    def _admits(self) -> bool:
        """Return whether this step must check waiting requests."""
        if not self.waiting or self.skipped_waiting:
            return bool(self.skipped_waiting)
        slots = self.max_num_running_reqs
        num_free = slots - len(self.running) - self.num_waiting_for_streaming_input
        if num_free <= 0:
            return False
        self._num_put_off += 1
        together = min(max(1, slots // TOGETHER), len(self.waiting))
        return self._num_put_off > LONGEST_WAIT or (num_free >= together and len(self.running) < self._most_running)

    def _decoding(self) -> list[Request]:
        """Return the running requests that decode one token in this step; empty if the step must do anything else."""
        manager, group, last = self.kv_cache_manager, self._groups[0], self.max_model_len - 1
        blocks, block_size = group.req_to_blocks, group.block_size
        decoding, num_growing = [], 0
        for request in self.running:
            computed, expected = request.num_computed_tokens, request.num_output_placeholders
            if (
                len(request._all_token_ids) + expected - computed != 1
                or request.is_prefill_chunk
                or request.spec_token_ids
                or request.mm_features
                or request.structured_output_request is not None
            ):
                return []
            # The current step brings its last token, or fills the context.
            length = request.num_prompt_tokens + request.max_tokens
            if (expected and computed + 2 - expected >= length) or computed >= last:
                continue
            num_growing += computed >= len(blocks[request.request_id]) * block_size
            decoding.append(request)
        room = num_growing * len(self._groups) <= manager.block_pool.get_num_free_blocks()
        return decoding if room and len(decoding) <= self.max_num_scheduled_tokens else []

    def _schedule(self, decoding: list[Request]) -> SchedulerOutput:
        manager, blocks, block_size = self.kv_cache_manager, self._groups[0].req_to_blocks, self._groups[0].block_size
        self.current_step += 1
        manager.new_step_starts()
        new_blocks: list[tuple[list[int], ...] | None] = []
        for request in decoding:
            if request.num_computed_tokens < len(blocks[request.request_id]) * block_size:
                new_blocks.append(None)
                continue
            allocated = manager.allocate_slots(request, 1)
            assert allocated is not None, "_decoding has counted the free blocks"
            new_blocks.append(allocated.get_block_ids(allow_none=True))
        ids, num_computed, num_output = [], [], []
        for request in decoding:
            computed, expected = request.num_computed_tokens, request.num_output_placeholders
            ids.append(request.request_id)
            num_computed.append(computed)
            num_output.append(len(request._output_token_ids) + expected)
            request.num_computed_tokens = computed + 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders = expected + 1
            request.next_decode_eligible_step = self.current_step + 1
        copies, retained = manager.take_kv_cache_block_copies()
        if copies:
            self._free_cow_retained_blocks(retained, self.sched_step_seq + 1)
        output = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=ids,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=new_blocks,
                num_computed_tokens=num_computed,
                num_output_tokens=num_output,
            ),
            num_scheduled_tokens=dict.fromkeys(ids, 1),
            total_num_scheduled_tokens=len(ids),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            scheduled_encoder_input_stats=None,
            num_common_prefix_blocks=manager.get_num_common_prefix_blocks(self.running[0].request_id),
            preempted_req_ids=self.reset_preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=self.encoder_cache_manager.get_freed_mm_hashes(),
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
            kv_cache_block_copies=copies or None,
            num_spec_tokens_to_schedule=self.num_spec_tokens,
        )
        self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
        return output

    # ---- after the step ----------------------------------------------------------------------------------------------

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        if self._obstacles or not self._all_fast(scheduler_output, model_runner_output):
            return super().update_from_output(scheduler_output, model_runner_output)
        outputs, stopped = self._update(scheduler_output, model_runner_output)
        if stopped:
            self.running = remove_all(self.running, stopped)
        messages = {client: EngineCoreOutputs(outputs=own) for client, own in outputs.items()}
        if self.finished_req_ids_dict:
            for client, ids in self.finished_req_ids_dict.items():
                messages.setdefault(client, EngineCoreOutputs()).finished_requests = ids
            self.finished_req_ids_dict.clear()
        self._num_quiet_steps += 1
        if messages or self._num_quiet_steps >= STATISTICS_STEPS:
            self._num_quiet_steps = 0
            statistics = self.make_stats()
            if statistics is not None:
                first = next(iter(messages.values()), None) or messages.setdefault(0, EngineCoreOutputs())
                first.scheduler_stats = statistics
        return messages

    def _all_fast(self, scheduler_output: SchedulerOutput, result: Any) -> bool:
        """Return whether the step brought only fast requests at most one token each, and nothing else."""
        if (
            not result.sampled_token_ids
            or result.pooler_output
            or result.kv_connector_output
            or result.num_nans_in_logits
            or result.routed_experts is not None
            or result.prompt_logprobs_dict
            or result.cudagraph_stats is not None
            or not result.logprobs
            or scheduler_output.scheduled_spec_decode_tokens
            or self.grammar_compile_error_reqs
        ):
            return False
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None:  # it was aborted meanwhile
                continue
            if request.status is not RUNNING and not request.is_finished():
                return False
            if request.async_tokens_to_discard or request.mm_features or self._of(request) is None:
                return False
        return True

    def _update(
        self, scheduler_output: SchedulerOutput, result: Any
    ) -> tuple[dict[int, list[EngineCoreOutput]], set[Request]]:
        """Add the sampled tokens to their requests. Return what leaves, by client, and which requests have ended."""
        manager, hash_size, block_size = self.kv_cache_manager, self.hash_block_size, self._groups[0].block_size
        sampled, rows = result.sampled_token_ids, result.req_id_to_index
        log_probs = result.logprobs.logprobs[:, 0].tolist()
        outputs: dict[int, list[EngineCoreOutput]] = {}
        stopped: set[Request] = set()
        for request_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None:
                continue
            request.num_in_flight_tokens -= num_scheduled
            if request.status is not RUNNING:  # it has ended
                continue
            row = rows[request_id]
            if not sampled[row]:  # only a part of its prompt
                continue
            token, held = sampled[row][0], self._held[request_id]
            request._output_token_ids.append(token)
            request._all_token_ids.append(token)
            count, length = len(request._output_token_ids), len(request._all_token_ids)
            held.log_probs.append(log_probs[row])
            if length % hash_size == 0:
                request.update_block_hashes()
            may_stop = count >= held.max_tokens or length >= self.max_model_len or token in held.stops
            ends = may_stop and check_stop(request, self.max_model_len)
            request.num_output_placeholders -= 1
            first = request.prefill_stats is not None
            num_done = request.num_computed_tokens - request.num_output_placeholders
            if num_done % block_size == 0 or first:
                manager.cache_blocks(request, num_done)
            if ends or first or held.is_due(count):
                outputs.setdefault(request.client_index, []).append(self._output(request, held, ends))
                if ends:
                    stopped.add(request)
        return outputs, stopped

    def _output(self, request: Request, held: Held, ends: bool) -> EngineCoreOutput:
        output = held.fill(EngineCoreOutput(request_id=request.request_id, new_token_ids=[]), self.mark)
        output.stop_reason, output.trace_headers = request.stop_reason, request.trace_headers
        output.events = request.take_events()
        output.prefill_stats = request.take_prefill_stats()
        if output.prefill_stats is not None:
            output.prefill_stats.finalize(self.kv_cache_manager.estimate_cached_tokens(request))
        if ends:
            output.finish_reason = request.get_finished_reason()
            output.kv_transfer_params, output.ec_transfer_params = self._free_request(request)
            del self._held[request.request_id]
        return output

    @property
    def _groups(self) -> Any:
        """Return the groups of layers that share their blocks. A request has as many blocks in each of them."""
        return self.kv_cache_manager.coordinator.single_type_managers


def obstacles(scheduler: AsyncScheduler) -> list[str]:
    """Return the features of this scheduler that the short loops lack."""
    managers, parallel = scheduler.kv_cache_manager.coordinator.single_type_managers, scheduler.parallel_config
    known = {type(manager) for manager in managers} <= {FullAttentionManager, SlidingWindowManager}
    alike = known and len({manager.block_size for manager in managers}) == 1
    found = {
        "model runner V1": not scheduler.use_v2_model_runner,
        "another cache than those of full attention and windows": not alike or scheduler.has_mamba_layers,
        "a connector": scheduler.connector is not None or scheduler.ec_connector is not None,
        "speculation": bool(scheduler.num_spec_tokens or scheduler.num_lookahead_tokens or scheduler.dynamic_sd_lookup),
        "pipeline parallelism": scheduler.use_pp,
        "data parallelism": parallel.data_parallel_size > 1,
        "context parallelism": scheduler.dcp_world_size > 1 or scheduler.pcp_world_size > 1,
        "routed experts in answers": scheduler.enable_return_routed_experts,
        "cache events": scheduler.enable_kv_cache_events,
        "cache zeroing": scheduler.needs_kv_cache_zeroing,
        "diffusion": scheduler.num_sampled_tokens_per_step != 1,
        "a measure of FLOPs": scheduler.perf_metrics is not None,
        "a log of each iteration": scheduler.observability_config.enable_logging_iteration_details,
    }
    return [name for name, there in found.items() if there]
