"""What instep adds to the command line and the environment of vLLM, by device."""

import importlib.metadata
import importlib.util
import json
from types import SimpleNamespace

import pytest

from instep.arguments.parse import parse
from instep.cluster.engine_plan import plan_engines
from instep.engines.backend_choice import resolve_backend
from instep.engines.engine import EngineRefusal
from instep.engines.spec import Addresses
from instep.engines.vllm import KIND
from instep.engines.vllm_process import serve_arguments, vllm_env
from instep.errors import ConfigError
from instep_engine import PROTOCOL
from tests.command_line import argv, make_folder, refusal


def resolved(device, precision, *more):
    words = ["--hf-checkpoint", "MODEL", "--actor-num-gpus-per-node", "1", "--rollout-backend", "vllm"]
    return parse([*words, "--device", device, "--precision", precision, *more], "plan")


def fraction(args):
    words = serve_arguments(plan_engines(args)[0], Addresses("HOST", 1))
    return words[words.index("--gpu-memory-utilization") + 1] if "--gpu-memory-utilization" in words else None


def test_a_gpu_that_is_shared_with_the_trainer_is_not_taken_whole():
    assert fraction(resolved("cuda", "bf16", "--colocate", "--no-offload-train")) == "0.4"
    assert fraction(resolved("cuda", "bf16", "--colocate")) == "0.8"  # the trainer leaves
    assert fraction(resolved("cuda", "bf16", "--colocate", "--weight-sync", "single-copy")) == "0.4"
    assert fraction(resolved("cuda", "bf16")) is None  # vLLM's own default
    assert fraction(resolved("cuda", "bf16", "--colocate", "--vllm-gpu-memory-utilization", "0.2")) == "0.2"
    assert fraction(resolved("cpu", "bf16", "--colocate")) is None


@pytest.mark.parametrize(("precision", "value"), [("fp32", "ieee"), ("bf16", None)])
def test_float32_on_a_gpu_is_float32(precision, value):
    assert vllm_env(resolved("cuda", precision), 1).get("TRITON_F32_DEFAULT") == value
    assert "TRITON_F32_DEFAULT" not in vllm_env(resolved("cpu", precision), 1)


def test_on_one_host_nothing_of_vllm_listens_beyond_loopback(monkeypatch):
    """UCX and gloo would take every interface; a choice of the user's for UCX stays."""
    args = resolved("cpu", "fp32")
    (spec,) = plan_engines(args)

    def environment(host):
        return KIND.environment(args, spec, Addresses(host, 1), host, 1)

    loopback = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "UCX_NET_DEVICES": "lo"}
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    assert environment("127.0.0.1").items() >= loopback.items()
    assert not environment("10.0.0.2").keys() & loopback.keys()
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    assert environment("127.0.0.1")["UCX_NET_DEVICES"] == "mlx5_0:1"


def test_nothing_is_compiled_beside_the_start_of_an_engine_by_processes_without_an_owner(monkeypatch):
    monkeypatch.delenv("HUMMING_DISABLE_PARALLEL_BUILD", raising=False)
    assert vllm_env(resolved("cuda", "bf16"), 1)["HUMMING_DISABLE_PARALLEL_BUILD"] == "1"
    monkeypatch.setenv("HUMMING_DISABLE_PARALLEL_BUILD", "0")
    assert vllm_env(resolved("cuda", "bf16"), 1)["HUMMING_DISABLE_PARALLEL_BUILD"] == "0"  # the user's


def test_the_core_of_one_gpu_and_the_processes_of_a_cpu_take_over_what_their_server_has_imported(monkeypatch):
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)

    def method(device, *flags):
        args = resolved(device, "bf16", *flags)
        (spec,) = plan_engines(args)
        env = KIND.environment(args, spec, Addresses("127.0.0.1", 1), "127.0.0.1", 1)
        return env.get("VLLM_WORKER_MULTIPROC_METHOD")

    assert method("cuda") == "fork"
    assert method("cuda", "--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2") is None
    assert method("cpu") == "fork"
    assert method("cpu", "--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2") == "fork"
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    assert method("cuda") == "spawn"  # the user's


def test_what_vllm_has_compiled_serves_runs_with_other_ports_and_bounds(monkeypatch):
    """Most of its variables are in the key of its compile cache."""
    monkeypatch.delenv("VLLM_ENGINE_READY_TIMEOUT_S", raising=False)

    def environment(port, *flags):
        args = resolved("cuda", "bf16", "--colocate", *flags)
        (spec,) = plan_engines(args)
        at = Addresses("127.0.0.1", port, "127.0.0.1", side_channel_port=0)
        return KIND.environment(args, spec, at, "127.0.0.1", 1)

    one = environment(21000)
    assert one == environment(22000, "--worker-start-timeout", "5000", "--engine-start-timeout", "77")
    assert one["VLLM_ENGINE_READY_TIMEOUT_S"] == "86400"
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "5")
    assert environment(21000)["VLLM_ENGINE_READY_TIMEOUT_S"] == "5"  # the user's


@pytest.mark.parametrize("key", ["linear_num_key_heads", "kv_lora_rank"])
def test_models_that_vllm_on_a_cpu_has_in_bfloat16_alone(tmp_path, key):
    (tmp_path / "config.json").write_text(json.dumps({"head_dim": 64, key: 2}))
    for precision in ("fp32", "bf16"):
        args = resolved("cpu", precision).replace(hf_checkpoint=str(tmp_path))
        (spec,) = plan_engines(args)
        uncached = "--no-enable-prefix-caching" in serve_arguments(spec, Addresses("HOST", 1))
        assert uncached is (key == "linear_num_key_heads")
        if precision == "bf16":
            KIND.check_start(args, spec)
        else:
            with pytest.raises(ConfigError, match="support only bfloat16"):
                KIND.check_start(args, spec)


@pytest.mark.parametrize("log, advised", [
    ("ValueError: Free memory on device cuda:0 (31.2/79.2 GiB) on startup is less than desired GPU memory utilization "
     "(0.8, 63.3 GiB).", True),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB.", True),
    ("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`", True),
    ("ImportError: libcudart.so.13", False),
])  # fmt: skip
def test_an_engine_without_room_says_what_gives_it_room(log, advised):
    assert ("--colocate --offload" in KIND.start_remedy(f"INFO\n{log}\n")) == advised


@pytest.mark.parametrize(
    "words",
    [
        "--vllm-gpu-memory-utilization 0.5 --vllm-no-enable-prefix-caching",
        "--prefill-num-servers 1 --rollout-num-gpus 2",
        "--rollout-num-gpus-per-engine 16 --rollout-num-gpus 16",
    ],
)
def test_a_flag_that_chose_an_engine_that_is_not_there_is_named(tmp_path, monkeypatch, words):
    """Without it the embedded engine serves: neither refusal sends the user back to the other."""
    make_folder(tmp_path, monkeypatch)
    args = parse(argv(f"--device cpu {words}"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="vLLM is not installed here") as caught:
        resolve_backend(args)
    flags = [word for word in words.split() if word.startswith("--") and word != "--rollout-num-gpus"]
    assert caught.value.where == f"--rollout-backend vllm, which {', '.join(flags)} means"
    assert "remove vLLM's flags, and name --rollout-backend embedded" in caught.value.remedy
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    text = refusal(f"--device cpu {words} --rollout-backend embedded")
    assert "remove it, or use --rollout-backend vllm" in text or "use at most 1" in text


def test_a_plugin_that_is_not_installed_is_named_before_anything_starts(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [SimpleNamespace(value="instep_engine.vllm:register")]
    )
    KIND.check_installed("--rollout-backend vllm")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])  # on PYTHONPATH alone
    with pytest.raises(ConfigError, match="is not installed: vLLM finds its plugin only by the entry point") as caught:
        KIND.check_installed("--rollout-backend vllm")
    assert "install this instep where the engine runs" in caught.value.remedy


def test_an_older_plugin_of_somebody_elses_engine_is_named_in_its_first_session():
    def post(path, body=None, *, timeout, **query):
        said = f"instep speaks protocol {body['init_info']['protocol']}, this instep-vllm 1: install the other"
        raise EngineRefusal(f"engine 0 refused {path} with 500: {said}", code=500)

    engine = SimpleNamespace(name="engine 0", url="http://e", post=post)
    with pytest.raises(ConfigError, match=f"engine 0: instep speaks protocol {PROTOCOL}, this .* 1") as caught:
        KIND.start_update(engine, "1", "nonce", timeout=1)
    assert caught.value.where == "http://e" and "restart the engine" in caught.value.remedy
