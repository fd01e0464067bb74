"""What a run goes on with: counters, the data source's state, and arguments that must be those of before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from instep.errors import ConfigError

# What a run cannot change on its way: it would train on other data, on the same twice, or read other files.
_FIXED = (
    "command prompt_data data_source_path input_key label_key apply_chat_template rollout_max_prompt_len "
    "rollout_seed rollout_shuffle n_samples_per_prompt train_backend"
).split()
# Where a run reads and writes, and what follows from other arguments, is not the run.
_PLACES = frozenset(
    "load save save_hf critic_load critic_save megatron_config_path run_dir "
    "ckpt_step ref_ckpt_step engine_port ray_address dp_size world_size rollout_num_engines notes".split()
)


def start_rollout_id(args: Any, checkpoint: tuple[Path, int] | None, state: dict[str, Any] | None) -> int:
    """The first rollout of this session: as given, after that of the resumed `state`, or after the checkpoint's."""
    if args.start_rollout_id is not None:
        return int(args.start_rollout_id)
    if state is not None:
        return int(state["rollout_id"]) + 1
    return checkpoint[1] + 1 if checkpoint is not None and not args.finetune else 0


def changed_arguments(before: dict[str, Any], args: Any) -> list[str]:
    """What is set otherwise than when the checkpoint was written, one line each.

    Raises:
        ConfigError: the run cannot go on with it.
    """
    now = json.loads(json.dumps(args.to_dict()))
    changed = {
        name: f"--{name.replace('_', '-')} was {_shown(before.get(name))} and is {_shown(now.get(name))}"
        for name in sorted(before.keys() | now.keys())
        if name not in _PLACES and before.get(name) != now.get(name)
    }
    # Another number of threads sums in another order.
    fixed = (*_FIXED, "num_threads") if args.deterministic_mode else _FIXED
    refused = [line for name, line in changed.items() if name in fixed]
    if refused:
        raise ConfigError(
            "; ".join(refused),
            where="the checkpoint in --load belongs to another run",
            remedy="use the same values to go on with it, or --finetune to take only its weights",
        )
    return list(changed.values())


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def source_state(source: Any, rollout_id: int) -> Any:
    """The data source's state as JSON; one in the seeds' style keeps it itself, by `save(rollout_id)`."""
    if hasattr(source, "state_dict"):
        return source.state_dict()
    source.save(rollout_id)
    return None


def restore_source(source: Any, state: Any, rollout_id: int) -> None:
    """The other way round: `load_state_dict(state)`, or `load(rollout_id)`."""
    if hasattr(source, "load_state_dict"):
        source.load_state_dict(state)
    else:
        source.load(rollout_id)
