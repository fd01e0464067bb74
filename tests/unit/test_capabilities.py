"""Which engines may keep responses through a sync: those that say which weights made each token."""

import pytest

from instep.arguments.parse import parse
from instep.engines.backend_choice import answers_in_arrays
from instep.engines.vllm import VllmKind
from instep.errors import ConfigError

ENGINES = "--actor-num-gpus-per-node 1 --rollout-backend vllm --device cpu --pause-mode keep"


@pytest.mark.parametrize(
    ("version", "arrays", "keeps"),
    [("0.26.0", True, True), ("0.26.0", False, False), ("0.29.1", False, False), ("0.32.0+cpu", False, True)],
)
def test_before_vllm_0_32_versions_of_tokens_stand_in_arrays_alone(version, arrays, keeps):
    capabilities = VllmKind(version).capabilities
    capabilities.check_pause("abort", arrays=arrays)
    capabilities.check_pause("wait", arrays=arrays)
    if keeps:
        capabilities.check_pause("keep", arrays=arrays)
    else:
        with pytest.raises(ConfigError, match="does not say in JSON which weights made a token"):
            capabilities.check_pause("keep", arrays=arrays)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", True),
        ("--no-fast-log-probs", False),
        ("--vllm-scheduler-cls mine.Scheduler", False),
        ("--rollout-external-engine-addrs 127.0.0.1:8000", False),
    ],
)
def test_which_runs_have_only_engines_that_answer_in_arrays(flags, expected):
    args = parse([*ENGINES.split(), *flags.split()], "plan")
    assert answers_in_arrays(args) is expected
