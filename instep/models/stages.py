"""How Megatron-Core distributes the layers of a model over pipeline stages."""

from __future__ import annotations

from instep.arguments.settings import ParallelSettings


def stage_layers(args: ParallelSettings, num_layers: int) -> list[int]:
    """Return the layers of each pipeline stage: the first and the last by their flags, the others in equal numbers.

    Raises ValueError with what does not divide.
    """
    stages = args.pipeline_model_parallel_size
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    between, rest = stages - (first is not None) - (last is not None), num_layers - (first or 0) - (last or 0)
    if between < 0:
        raise ValueError(f"{stages} pipeline stage cannot be both the first and the last")
    if rest < 0:
        raise ValueError(f"the first and the last stage have {num_layers - rest} layers, the model has {num_layers}")
    if between == 0 and rest:
        raise ValueError(f"the first and the last stage leave {rest} layers, but there is no other stage")
    if between and (rest % between or not rest):
        which = "the" if between == stages else "the other"
        raise ValueError(f"{rest} layers cannot be shared equally by {which} {between} of {stages} pipeline stages")
    each = rest // between if between else 0
    sizes = [each] * stages
    if first is not None:
        sizes[0] = first
    if last is not None:
        sizes[-1] = last
    return sizes


def num_chunks(args: ParallelSettings, num_layers: int) -> int:
    """Return the number of layer chunks of each pipeline stage (virtual stages)."""
    if layers := args.num_layers_per_virtual_pipeline_stage:
        return num_layers // (args.pipeline_model_parallel_size * layers)
    return args.num_virtual_stages_per_pipeline_rank or 1
