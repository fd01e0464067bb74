"""The sizes of a `GRPOConfig`: samples of a step and of a rollout, and the numbers of steps and rollouts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from instep_neighbours.trl.fields import Config, error


@dataclass(frozen=True)
class Sizes:
    """Of a run: optimizer steps of a rollout and of the run, and rollouts of an epoch, as far as they are known."""

    steps_per_rollout: int
    num_steps: int | None
    rollouts_per_epoch: int | None

    def in_rollouts(self, value: float, name: str) -> int:
        """Return an interval in optimizer steps (below 1: a fraction of all steps) as rollouts."""
        steps = self.whole(value, name)
        if steps % self.steps_per_rollout:
            what = f"{steps} steps are not a whole number of rollouts of {self.steps_per_rollout} steps"
            raise error(what, name, f"give a multiple of {self.steps_per_rollout}")
        return steps // self.steps_per_rollout

    def whole(self, value: float, name: str) -> int:
        """Return `value` steps; below 1 it is a fraction of all steps, as in transformers."""
        if 0 < value < 1:
            if self.num_steps is None:
                raise error("it is a fraction of an unknown number of steps", name, "give max_steps")
            return math.ceil(value * self.num_steps)
        return int(value)


def sizes_of(config: Config, num_prompts: int | None) -> Sizes:
    """Compute TRL's sizes: a generation batch, of whole groups, is used for steps_per_generation micro-steps per
    process."""
    batching = ("per_device_train_batch_size", "gradient_accumulation_steps")
    per_device, accumulation, group = (config[name] for name in (*batching, "num_generations"))
    slices, batch = config["steps_per_generation"], config["generation_batch_size"]
    per_step = per_device * _num_processes(config.flags)
    if batch is not None and slices is not None:
        raise error("steps_per_generation sets the same", "generation_batch_size", "give one of the two")
    if batch is not None and batch % per_step:
        what = f"{batch} is not a multiple of {per_step}, the samples of a micro-step"
        raise error(what, "generation_batch_size", "change it")
    slices = slices or (accumulation if batch is None else batch // per_step)
    if slices % accumulation:
        what = f"a rollout of {slices} micro-steps ends within an optimizer step of {accumulation}"
        raise error(what, "steps_per_generation", "give a multiple of gradient_accumulation_steps")
    completions = per_step * slices
    if completions % group:
        what = f"{completions} completions of a rollout are not whole groups of {group}"
        raise error(what, "num_generations", "change it, per_device_train_batch_size or gradient_accumulation_steps")
    config.put("n_samples_per_prompt", group, "num_generations")
    config.put("rollout_batch_size", completions // group, *batching, "generation_batch_size", "steps_per_generation")
    config.put("global_batch_size", per_step * accumulation, *batching)
    if batching[0] in config.given:
        config.put("micro_batch_size", per_device)
    prompts, steps = completions // group, slices // accumulation
    per_epoch = None if num_prompts is None else num_prompts // prompts
    if config["max_steps"] > 0:
        total = config["max_steps"]
    elif per_epoch:
        total = math.ceil(config["num_train_epochs"] * per_epoch) * steps
    elif per_epoch == 0:
        raise error(f"{num_prompts} prompts are fewer than the {prompts} of a rollout", "train_dataset", "give more")
    else:
        total = None
    sizes = Sizes(steps, total, per_epoch)
    if total is not None:
        config.put("num_rollout", sizes.in_rollouts(total, "max_steps"), "max_steps", "num_train_epochs")
    return sizes


def _num_processes(flags: Mapping[str, Any]) -> int:
    """Return the trainer's data-parallel ranks; TRL counts the processes of `accelerate launch`."""
    copy = math.prod(
        flags.get(name) or 1
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    )
    on_cpu = flags.get("device") == "cpu" and flags.get("cluster") in (None, "local")
    per_node = flags.get("actor_num_gpus_per_node") or (copy if on_cpu else 8)
    return max(1, (flags.get("actor_num_nodes") or 1) * per_node // copy)
