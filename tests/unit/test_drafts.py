"""The share of accepted drafts follows from vLLM's own counters."""

from __future__ import annotations

from instep.controller.drafts import AcceptedDrafts
from instep.engines.engine import Engine
from instep.engines.vllm import KIND
from tests.stub_server import answering

COUNTS = 'vllm:spec_decode_num_{name}_tokens_total{{engine="{rank}",model_name="m"}} {count}.0\n'
PER_POSITION = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 99.0\n'


def test_it_is_that_of_the_drafts_since_the_last_call() -> None:
    drafts, said = AcceptedDrafts(), {"/metrics": "vllm:num_requests_running 0.0\n"}

    def counters(*counts: tuple[int, int]) -> None:
        both = [
            (name, rank, n)
            for rank, two in enumerate(counts)
            for name, n in zip(("draft", "accepted"), two, strict=True)
        ]
        said["/metrics"] = PER_POSITION + "".join(COUNTS.format(name=a, rank=b, count=n) for a, b, n in both)

    with answering(said) as url:
        engine = Engine("engine 0", url, kind=KIND)
        assert drafts.take([engine]) == {}
        counters((100, 40), (20, 20))  # two replicas
        assert drafts.take([engine]) == {"perf/accepted_drafts": 0.5}
        assert drafts.take([engine]) == {}  # nothing was drafted
        counters((180, 60), (40, 20))
        assert drafts.take([engine]) == {"perf/accepted_drafts": 0.2}
        counters((10, 9), (0, 0))  # started again
        assert drafts.take([engine]) == {}
        other = Engine("engine 1", url.replace("127.0.0.1", "localhost"), kind=KIND)
        assert drafts.take([engine, other]) == {"perf/accepted_drafts": 0.9}  # of the other, for the first time
        counters((110, 59), (0, 0))
        assert drafts.take([engine, other]) == {"perf/accepted_drafts": 0.5}
