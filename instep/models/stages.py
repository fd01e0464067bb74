"""How the layers of a model are dealt out to pipeline stages, as Megatron-Core does it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from instep.arguments.settings import Settings


def stage_layers(args: Settings, num_layers: int) -> list[int]:
    """The layers of each pipeline stage: of the first and the last what their flags say, of the others equally many.

    Raises: ValueError, with what does not divide.
    """
    stages = args.pipeline_model_parallel_size
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    between, rest = stages - (first is not None) - (last is not None), num_layers - (first or 0) - (last or 0)
    if between < 0:
        raise ValueError(f"{stages} pipeline stage is no first and last one")
    if rest < 0:
        raise ValueError(f"the first and the last stage have {num_layers - rest} layers, the model has {num_layers}")
    if between == 0 and rest:
        raise ValueError(f"the first and the last stage leave {rest} layers to no stage")
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


def num_chunks(args: Settings, num_layers: int) -> int:
    """Chunks of layers that each pipeline stage holds (virtual stages)."""
    if layers := args.num_layers_per_virtual_pipeline_stage:
        return num_layers // (args.pipeline_model_parallel_size * layers)
    return args.num_virtual_stages_per_pipeline_rank or 1
