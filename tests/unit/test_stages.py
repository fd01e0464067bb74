"""Which layers the stages and chunks of a pipeline have."""

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest

from instep.models.stages import num_chunks, stage_layers
from instep.models.weight_map import Kind
from instep.training.megatron.layout import Placement


def arguments(stages: int, first: int | None = None, last: int | None = None, chunks: int | None = None):
    return SimpleNamespace(
        pipeline_model_parallel_size=stages,
        decoder_first_pipeline_num_layers=first,
        decoder_last_pipeline_num_layers=last,
        num_virtual_stages_per_pipeline_rank=chunks,
        num_layers_per_virtual_pipeline_stage=None,
    )


@pytest.mark.parametrize(
    ("args", "num_layers", "sizes"),
    [
        (arguments(1), 3, [3]),
        (arguments(4), 8, [2, 2, 2, 2]),
        (arguments(4, last=13), 61, [16, 16, 16, 13]),  # slime's DeepSeek-R1
        (arguments(3, first=2, last=4, chunks=2), 12, [2, 6, 4]),
        (arguments(2, first=1, last=3), 4, [1, 3]),
    ],
)
def test_every_layer_is_in_one_chunk_of_one_stage(args, num_layers, sizes):
    assert stage_layers(args, num_layers) == sizes
    chunks = num_chunks(args, num_layers)
    nothing = Placement(**dict.fromkeys((f.name for f in fields(Placement)), 0))
    seen = []
    for chunk in range(chunks):  # the order in which a token passes them
        for rank, size in enumerate(sizes):
            place = replace(nothing, pp_rank=rank, pp_size=len(sizes), num_chunks=chunks, stage_layers=sizes)
            first = place.first_layer(chunk)
            layers = range(first, first + size // chunks)
            seen += layers
            assert all(place.stage(SimpleNamespace(layer=i, kind=Kind.COLUMNS, megatron="")) == rank for i in layers)
    assert seen == list(range(num_layers))


@pytest.mark.parametrize(
    ("args", "num_layers", "words"),
    [
        (arguments(3), 8, "8 layers cannot be shared equally by the 3 of 3 pipeline stages"),
        (arguments(3, first=3), 8, "5 layers cannot be shared equally by the other 2 of 3 pipeline stages"),
        (arguments(2, first=3, last=3), 8, "leave 2 layers, but there is no other stage"),
        (arguments(4, first=8), 8, "0 layers cannot be shared"),
        (arguments(4, first=30), 20, "have 30 layers, the model has 20"),
        (arguments(1, first=2, last=2), 8, "1 pipeline stage cannot be both the first and the last"),
    ],
)
def test_layers_that_do_not_divide_are_named(args, num_layers, words):
    with pytest.raises(ValueError, match=words):
        stage_layers(args, num_layers)
