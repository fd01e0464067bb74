"""Which engines may share their weights with the trainer, told from the command line alone."""

from __future__ import annotations

import pytest

from instep.arguments.parse import parse
from tests.command_line import argv, make_folder, refusal

ONE = "--weight-sync single-copy --actor-num-gpus-per-node 1 "
VLLM = ONE + "--rollout-backend vllm --device cuda --precision bf16 "
EMBEDDED = ONE + "--rollout-backend embedded "


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    make_folder(tmp_path, monkeypatch)


def test_engines_on_the_gpus_of_the_trainer_share_their_weights():
    for more in ("", "--actor-num-gpus-per-node 2", "--actor-num-gpus-per-node 2 --rollout-num-gpus-per-engine 2"):
        assert not parse(argv(VLLM + "--colocate " + more)).offload_rollout
    parse(argv(EMBEDDED + "--device cpu --rollout-num-gpus 3"))
    parse(argv(ONE + "--device cpu --rollout-external-engine-addrs 127.0.0.1:8000 --vllm-config-path bridge.json"))


@pytest.mark.parametrize(
    "extra, words",
    [
        (VLLM, ("engine 0 is planned on a GPU without a trainer rank", "--colocate")),
        (EMBEDDED + "--device cuda --colocate", ("an embedded engine only on a CPU", "--device cpu")),
        (VLLM + "--colocate --offload-rollout", ("--offload-rollout with --weight-sync single-copy",)),
        (VLLM + "--colocate --actor-num-gpus-per-node 2 --rollout-num-gpus-per-engine 2 --vllm-data-parallel-size 2",
         ("engine 0 has 2 replicas", "its own engine")),
        (VLLM + "--colocate --actor-num-gpus-per-node 2 --rollout-num-gpus-per-engine 2 "
         "--vllm-pipeline-parallel-size 2",
         ("engine 0 has 2 pipeline stages", "use tensor parallelism")),
        (ONE + "--device cpu --rollout-external-engine-addrs 127.0.0.1:1 127.0.0.1:2", ("2 are named",)),
        (EMBEDDED + "--device cpu --vllm-config-path bridge.json", ("--rollout-external-engine-addrs",)),
        ("--vllm-config-path bridge.json", ("--vllm-config-path", "--weight-sync single-copy")),
    ],
)  # fmt: skip
def test_what_cannot_share_is_named(extra, words):
    message = refusal(extra)
    assert all(word in message for word in words), message
