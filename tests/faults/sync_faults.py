"""Weight syncs that go wrong by a way: engines that die in them, memory that is too small, a trainer that dies."""

from __future__ import annotations

import signal
import time
from functools import partial
from pathlib import Path

import pytest

from instep.arguments.parse import parse
from instep.cluster.engine_plan import plan_engines
from instep.cluster.engine_start import start_engine
from instep.engines import keys
from instep.engines.engine import EngineRefusal
from instep.engines.held_lease import LEASE_SECONDS
from instep.engines.http import get_json
from instep.weights.way import OF_ADAPTERS
from tests.e2e.commands import grpo_arguments
from tests.faults.harness import ENDLESS, Place, Result
from tests.faults.registry import scenario, unindent

# In the controller, when an engine is to load what has been sent, for the second time.
KILL = """
    import signal
    from instep.engines.engine import Engine
    update, seen = Engine.update, []
    def dies(self, info, **options):
        if info["backend"] != "complete" and len(seen) == AFTER:
            mark()
            os.kill(self.process.pid, signal.SIGKILL)
        seen.append(info)
        return update(self, info, **options)
    Engine.update = dies
    """
WAYS = {
    "disk": "loads a checkpoint",
    "nccl": "receives a stream of weights",
    "ipc": "loads from the buckets that trainer and engine have open",
    "single-copy": "compares its memory",
    "lora": "loads an adapter",
    "lora_ipc": "loads an adapter from those buckets",
    "restart": "compares the checkpoint that it was started on",
}


# In the controller: `--weight-sync lora` means the way that it takes on shared GPUs.
ON_SHARED_GPUS = """
    from instep.weights import way
    way.way_of_adapters = lambda *place: ("lora_ipc", "for a test")
    """


def killed(place: Place, way: str) -> None:
    adapter = ["--lora-rank", "4"] if way in OF_ADAPTERS else []
    flags = ("--weight-sync", "lora" if adapter else way, "--rollout-backend", "embedded", *adapter)
    patch = unindent("AFTER = 1", *([ON_SHARED_GPUS] if way == "lora_ipc" else []), KILL)
    with place.run(*ENDLESS, *flags, patches={"controller": patch}) as run:
        run.error(f"killed_by_{way.replace('-', '_')}", "EngineError: engine 0 died (SIGKILL)")


for _way, _does in WAYS.items():
    _name = f"killed_by_{_way.replace('-', '_')}"
    _work = partial(killed, way=_way)
    _flag = _way if _way == "lora_ipc" else f"--weight-sync {_way}"  # no value of the flag names it
    _work.__name__ = _name  # type: ignore[attr-defined]
    scenario(slow=True, **{_name: f"error: an engine is killed while it {_does} (`{_flag}`)"})(_work)


@scenario(
    slow=True, not_started_anew="error: an engine that a sync restarts does not come up (`--weight-sync restart`)"
)
def not_started_anew(place: Place) -> None:
    patch = """
        if "--served-model-name" in sys.argv:
            mark()
            print("no room for the weights", flush=True)
            os._exit(3)
        """
    with place.run(*ENDLESS, "--weight-sync", "restart", patches={"engine": patch}) as run:
        run.error("not_started_anew", "EngineError: engine 0 ended before it was ready", "no room for the weights")


@scenario(slow=True, memory_too_small="error: shared memory is too small for the weights (`--weight-sync single-copy`)")
def memory_too_small(place: Place) -> None:
    patch = """
        from instep_engine import memory
        real = memory.new_file
        def limited(path, num_bytes):
            import resource
            mark()
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
            return real(path, num_bytes)
        memory.new_file = limited
        """
    with place.run("--weight-sync", "single-copy", patches={"engine": patch}) as run:
        run.error("memory_too_small", "EngineError", "of weights do not fit into /dev/shm", "--shm-size")


@scenario(slow=True, other_dtype="error: the engine holds its weights in another dtype (`--weight-sync single-copy`)")
def other_dtype(place: Place) -> None:
    patch = """
        from instep.weights.memory import EngineMemory
        check = EngineMemory.check
        def marked(self, specs):
            mark()
            check(self, specs)
        EngineMemory.check = marked
        """
    flags = ("--weight-sync", "single-copy", "--vllm-dtype", "bfloat16", "--precision", "fp32")
    with place.run(*flags, patches={"worker": patch}) as run:
        words = "SyncError: model.embed_tokens.weight is float32 in the trainer and bfloat16 in engine 0"
        run.error("other_dtype", words, "where:  the memory of engine 0 (")


@scenario(quantized="error: the engines would quantize weights that are trained (`--vllm-quantization`)")
def quantized(place: Place) -> None:
    with place.run("--rollout-backend", "vllm", "--vllm-quantization", "fp8") as run:
        run.error("quantized", "ConfigError: an engine with weights in fp8", "--lora-rank", code=2)


@scenario(exchanged="error: the trainer sends two weights of one shape under each other's names")
def exchanged(place: Place) -> None:
    """Every digest is right: the probe tells, and the comparison with the trainer's weights names both."""
    patch = """
        import instep.training.hf.weights as module
        real = module.HfWeightSource.__iter__
        def exchanged(self):
            items = [(spec, tensor.clone()) for spec, tensor in real(self)]
            names = [spec.name for spec, _ in items]
            k, v = (names.index(f"model.layers.0.self_attn.{x}_proj.weight") for x in "kv")
            if sys._getframe(1).f_code.co_name == "send":
                mark()
                items[k], items[v] = (items[k][0], items[v][1]), (items[v][0], items[k][1])
            return iter(items)
        module.HfWeightSource.__iter__ = exchanged
        """
    with place.run(*ENDLESS, patches={"worker": patch}) as run:
        words = ("layers.0.self_attn.k_proj.weight", "layers.0.self_attn.v_proj.weight")
        run.error("exchanged", "SyncError: engine 0 does not hold version 1", *words)


# In a controller whose engine is external, when it loads for the AFTER-th time.
DIE = """
    import signal
    from instep.engines.engine import Engine
    from instep.engines.http import get_json
    update, seen = Engine.update, []
    def dies(self, info, **options):
        if len(seen) == AFTER:
            assert get_json(self.url + "/is_paused", 10.0)["is_paused"]
            mark()
            os.kill(os.getpid(), signal.SIGKILL)
        seen.append(info)
        return update(self, info, **options)
    Engine.update = dies
    """


@scenario(
    slow=True,
    trainer_gone="recovered: the controller is killed (SIGKILL) while it has paused an external engine",
    trainer_gone_in_load="error: the same, when the engine has loaded a part of the weights",
)
def trainer_gone(place: Place) -> None:
    """When the lease of its pause has ended the engine goes on, but with no weights of two versions."""
    words = grpo_arguments(place.tiny, place.folder / "served", "--rollout-backend", "embedded")[1:]
    args = parse(words, "train").replace(device="cpu", precision="fp32", rollout_backend="embedded")
    engine = start_engine(args, plan_engines(args)[0], num_threads=1, log_dir=place.folder / "logs")
    try:
        engine.wait_ready(120)
        key = Path(place.folder / "key")
        key.write_text(keys.key_of(engine.url))
        key.chmod(0o600)
        address = engine.url.removeprefix("http://")
        flags = ("--rollout-external-engine-addrs", address, "--api-key-file", str(key))
        small = ("--update-weight-buffer-size", "20000")
        before = engine.weight_digests(timeout=30)
        for number, fault in enumerate(("trainer_gone", "trainer_gone_in_load")):
            patch = unindent(f"AFTER = {number}", DIE)
            with place.run(*ENDLESS, *flags, *small, name=fault, patches={"controller": patch}) as run:
                assert run.end()[0] == -signal.SIGKILL
            killed = (place.folder / f"{fault}-code" / "mark").stat().st_mtime
            while get_json(engine.url + "/is_paused", 10.0)["is_paused"]:
                assert time.time() - killed < LEASE_SECONDS + 5
                time.sleep(0.1)
            seconds = time.time() - killed
            assert engine.process is not None
            said = "no process renews the lease of the pause: it resumes"
            assert engine.process.log_tail().count(said) == number + 1
            if fault == "trainer_gone":
                assert engine.weight_digests(timeout=30) == before
                assert len(engine.prompt_log_probs([5, 6, 7], timeout=30)) == 2
                place.results[fault] = Result(seconds, f"the engine's log: {said}, with the weights that it had")
                continue
            with pytest.raises(EngineRefusal, match="503: the last weight update failed") as refused:
                engine.prompt_log_probs([5, 6, 7], timeout=30)
            place.results[fault] = Result(seconds, str(refused.value).splitlines()[0])
    finally:
        engine.stop()
