"""The tasks of a verifiers environment, with rollouts and evaluations in it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from instep.arguments.evaluation import eval_defaults
from instep.arguments.settings import DataSettings, HookSettings
from instep.data.dataset import load_dataset
from instep.data.formats import EvalDataset
from instep.data.mixture import Mixture
from instep.data.rows import RowFormat
from instep.data.source import RolloutDataSourceWithBuffer
from instep.errors import RolloutError
from instep.rollout import runtime
from instep.rollout.client import abort_all, get_model_url, to_vllm, wire_of
from instep.rollout.eval import run_sets
from instep.rollout.http import headers_for
from instep.rollout.tokens import tokenizer_of
from instep.rollout.vllm_rollout import GroupRollout
from instep.types import RolloutFnEvalOutput, RolloutFnTrainOutput, Sample, name_of
from instep_neighbours.verifiers.servers import environment_of
from instep_neighbours.verifiers.traces import CutError, samples_of

MAX_CUT = 3  # episodes of a sample with requests that an engine has cut off
_PARAMETERS = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "stop")


def generate_rollout(
    args: HookSettings, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Run as `vllm_rollout.generate_rollout`, with episodes in the environment of `--env`. This call blocks.

    Raises:
        EngineError, RolloutError: the first error ends the rollout.
        ConfigError: the environment does not start.
    """
    if evaluation:
        return _evaluate(args, rollout_id)
    return runtime.run(EpisodeRollout(args, rollout_id, data_source).run(), timeout=args.rollout_timeout)


async def generate(
    args: HookSettings, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Run one episode of the task of `sample`; its samples have their rewards.

    `max_new_tokens` limits each turn. No seed is sent: with one, every turn of an episode would draw the same random
    numbers.
    """
    environment = environment_of(args, evaluation=evaluation)
    params = {name: value for name, value in to_vllm(sampling_params).items() if name in _PARAMETERS}
    request = {"task_data": sample.metadata["task"], "model": str(args.hf_checkpoint), "sampling": params}
    request["client"] = client_config(args)
    tokenizer, skip = tokenizer_of(args), args.rollout_skip_special_tokens
    for _ in range(MAX_CUT):
        episode = await environment.run(request)
        try:
            samples = samples_of(sample, episode, params, lambda ids: tokenizer.decode(ids, skip_special_tokens=skip))
        except CutError:
            continue
        return samples if len(samples) > 1 else samples[0]
    what = f"{MAX_CUT} episodes were cut off by engines that have ended their requests"
    remedy = "see the engines' logs, and check whether another process aborts requests"
    raise RolloutError(what, where=name_of(sample), remedy=remedy)


def client_config(args: HookSettings) -> dict[str, Any]:
    """Return the environment's connection to the run's engines: token ids in and out, through their router."""
    url, model = get_model_url(args, endpoint=""), str(args.hf_checkpoint)
    return {
        "type": "train",
        "base_url": f"{url}/v1",
        "api_key_var": "INSTEP_NO_API_KEY",  # the key is in the headers
        "headers": headers_for(url),
        "timeout": {"connect": 10.0, "read": args.rollout_timeout},
        "renderer": {"name": args.env_renderer} if args.env_renderer else None,
        "renderer_model_name": os.path.abspath(model) if os.path.isdir(model) else model,
    }


class Tasks(RolloutDataSourceWithBuffer):
    """Groups of samples whose `metadata["task"]` is the task's data in verifiers.

    A resume continues with the next task; it refuses a taskset that has changed.

    Raises:
        ConfigError: the environment does not start.
    """

    def read(self, args: DataSettings, tokenizer: Any) -> Mixture:
        environment = environment_of(args)  # type: ignore[arg-type]  # a data source gets what hooks get
        dataset = load_dataset(str(environment.tasks()), RowFormat(), cache_path=str(environment.folder))
        return Mixture([dataset], None, args.rollout_seed if args.rollout_shuffle else None)


class EpisodeRollout(GroupRollout):
    """A training rollout of episodes; they can be cancelled, but not continued."""

    async def _end_the_rest(self) -> None:
        self.execution.aborted = True
        if self.pending:
            await self._cancel_pending()  # each task cancels its episode, and waits for its end
            # An agent's program may still send requests.
            await abort_all(self.args.rollout_engine_urls, wire_of(self.args))

    async def _output(self) -> RolloutFnTrainOutput:
        output = await super()._output()
        output.metrics |= metrics_of(sample for group in self.kept for sample in group)
        return output


def metrics_of(samples: Iterable[Sample]) -> dict[str, float]:
    """Return the means over traces: the environment's rewards by name, its metrics, and the turns."""
    values = defaultdict[str, list[float]](list)
    for facts in (s.metadata["env"] for s in samples if s.metadata.get("env", {}).get("first_of_trace")):
        values["num_turns"].append(facts["num_turns"])
        for kind in ("rewards", "metrics"):
            for name, value in facts[kind].items():
                values[f"{kind}/{name}"].append(float(value))
    return {f"rollout/env/{name}": sum(found) / len(found) for name, found in values.items()}


# ---- evaluation ------------------------------------------------------------------------------------------------------


def _evaluate(args: HookSettings, rollout_id: int) -> RolloutFnEvalOutput:
    environment, name, n = environment_of(args, evaluation=True), str(args.env), args.n_samples_per_eval_prompt
    dataset = EvalDataset(name, str(environment.tasks()), **eval_defaults(args))
    rows = load_dataset(dataset.path, RowFormat(), cache_path=str(environment.folder))
    groups = [
        [Sample(group_index=row, index=row * n + i, prompt=r.prompt, metadata=dict(r.metadata)) for i in range(n)]
        for row, r in enumerate(rows)
    ]
    found = runtime.run(run_sets(args, rollout_id, [(dataset, groups)]), timeout=args.rollout_timeout).data[name]
    first = [i for i, s in enumerate(found["samples"]) if s.metadata["env"]["first_of_trace"]]  # one for each trace
    metrics = {k.replace("rollout/env/", f"eval/{name}/"): v for k, v in metrics_of(found["samples"]).items()}
    return RolloutFnEvalOutput({name: {key: [values[i] for i in first] for key, values in found.items()}}, metrics)
