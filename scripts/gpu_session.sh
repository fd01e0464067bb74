#!/usr/bin/env bash
# Measurements on a GPU host that has no network and is lent for minutes: everything is packed before it is asked for,
# and runs there one after the other while each call only looks.
#
#   gpu_session.sh prepare [sglang|verl|real]   here: .gpu/s0 ... .gpu/s3 (the bundle) and .gpu/extra (wheels, the
#                                     guide's model); with SGLang, .gpu/s4 and more; with verl, .gpu/v0; with the real
#                                     model, .gpu/m0 ... .gpu/m6
#   gpu_session.sh keep FOLDER        there, a call for each of them: it goes to ~/g
#   gpu_session.sh unpack             there: makes of ~/g what the items need
#   gpu_session.sh start LANE ...     there: a copy of this tree runs the items of each lane in their order, the lanes side
#                                     by side; LANE is "0: mfu_4b card" or "2,3: trl": its GPUs, 16 cores for each
#   gpu_session.sh watch SECONDS      there: how far they are; logs and results to $OUT/results.txz
#   gpu_session.sh stop               there: ends all lanes
#   gpu_session.sh items              their names
#
# BUNDLE and BUNDLE_SGLANG are the programs that build the bundles, PYTHON312 the Python 3.12 with which flash-attn is
# built for verl. .gpu belongs into .git/info/exclude.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
HERE=$PWD Q=$HOME/q
BUNDLE=${BUNDLE:-../shared/gpu/build_bundle.sh}
BUNDLE_SGLANG=${BUNDLE_SGLANG:-../shared/gpu/build_bundle_sglang.sh}

# ITEMS: each is run in a copy of the tree with its folder in $R. The figure is its limit in seconds.
item_train_4b() { # 300 one optimizer step of 4B dimensions with 8-bit AdamW, both backends
    python benchmarks/train_step.py --size 4b --max-tokens-per-gpu 6400 --num-samples 256 --steps 3 --out "$R/out.json" \
        --case "hf --optimizer adamw_8bit" "megatron --optimizer adamw_8bit"
}
item_mfu_4b() { # 480 MFU and the longest kernels of a step of 4B dimensions in 64 samples, both backends
    python benchmarks/train_step.py --size 4b --num-samples 64 --max-tokens-per-gpu 6400 --kernels 40 --out "$R/out.json" \
        --case "hf --optimizer adamw_8bit" "megatron --optimizer adamw_8bit"
}
item_guide() { # 560 Atropos' guide in its three modes (alone on the GPU)
    GUIDE_MODEL=~/g/extra/guide PYTHONPATH=$PYTHONPATH:$HOME/atropos \
        python -m pytest -q -p no:cacheprovider -m gpu -s tests/gpu/test_atropos_guide.py
}
item_guide_none() { # 280 its mode `none` (alone on the GPU)
    INSTEP_GUIDE_MODES=none item_guide
}
item_async() { # 440 one step ahead against synchronous, one card
    python benchmarks/async.py --device cuda --rollouts 24 --limit 420 --out "$R/out.json" \
        --modes "in turns" synchronous "one step ahead"
}
item_async_versions() { # 600 two and four versions ahead against synchronous, one card
    python benchmarks/async.py --device cuda --rollouts 24 --limit 580 --out "$R/out.json" \
        --modes "in turns" synchronous "4 versions" "2 versions"
}
item_async_profile() { # 200 a run four versions ahead: where two of its rollouts went; responses, metrics and logs
    python benchmarks/async.py --device cuda --limit 190 --modes "4 versions" --logs "$R/logs" --out "$R/out.json" \
        --more "--profile --profile-step-start 6 --profile-step-end 8"
}
item_async_two() { # 600 four versions against synchronous and in turns, a card each for engine and trainer
    python benchmarks/async.py --device cuda --rollouts 24 --limit 345 --modes "in turns" synchronous "4 versions" \
        --logs "$R/logs" --out "$R/out.json"
    async_pair 1 240 --add --out "$R/out.json"
}
item_async_pair() { # 280 a third seed of it
    async_pair 2 270 --out "$R/out.json"
}
async_pair() {
    python benchmarks/async.py --device cuda --rollouts 24 --seeds "$1" --limit "$2" --modes synchronous "4 versions" \
        --logs "$R/logs" "${@:3}"
}
item_async_save() { # 300 a run that saves in the background waits less, with Megatron (alone on the GPU)
    python -m pytest -q -p no:cacheprovider -m gpu -s tests/gpu/test_async_save.py -k "waits_less and megatron"
}
item_lora_engine() { # 330 an engine's tokens/s with an adapter in one product, and without
    python benchmarks/lora_engine.py --size 4b --only base joined --out "$R/out.json"
}
item_lora_joined() { # 240 one product gives vLLM's log-probs
    python -m pytest -q -p no:cacheprovider -m gpu -s tests/gpu/test_lora.py -k joined
}
item_quickstart() { # 420 the quickstart (alone on the GPU)
    python examples/quickstart/run.py --device cuda --out "$R/run"
}
item_main_4b() { # 420 two steps of 4B dimensions, colocated
    python scripts/gpu_main.py --only 4b --limit 400 --out "$R/out"
}
item_main_ipc() { # 420 ten steps of hf by ipc, with sleep and offload
    python scripts/gpu_main.py --only ipc-hf --limit 400 --out "$R/out"
}
item_main_lora() { # 300 ten steps of hf with an adapter
    python scripts/gpu_main.py --only lora-hf --limit 280 --out "$R/out"
}
item_main_megatron() { # 300 ten steps of Megatron by ipc
    python scripts/gpu_main.py --only ipc-megatron --limit 280 --out "$R/out"
}
item_sync_06b() { # 300 syncs of 0.6B dimensions
    python benchmarks/weight_sync.py --device cuda --only 0.6b:ipc 0.6b:single-copy --limit 280 --out "$R/out.json"
}
item_sync_4b() { # 300 syncs of 4B dimensions, and an adapter's tokens/s
    python benchmarks/weight_sync.py --device cuda --only 4b:ipc 4b:lora --limit 280 --out "$R/out.json"
}
item_sync_4b_copy() { # 480 syncs of 4B dimensions in one memory, and by ipc from a copy, for which an H100 has no room
    python benchmarks/weight_sync.py --device cuda --only 4b:ipc 4b:single-copy --flags=--optimizer-cpu-offload \
        --limit 460 --out "$R/out.json"
}
item_sync_nccl() { # 480 syncs of 4B and 8B dimensions between two GPUs
    python benchmarks/weight_sync.py --device cuda --only 4b:nccl 8b:nccl --limit 460 --out "$R/out.json"
}
item_sync_tp2() { # 300 syncs in one memory with TP 2 (two GPUs)
    python benchmarks/weight_sync.py --device cuda --only 0.6b:single-copy-tp2 --limit 280 --out "$R/out.json"
}
item_tests_ways() { # 480 the tests of the ways on one GPU
    python scripts/gpu_main.py --tests ipc single_copy lease --side-by-side 3 --limit 460 --out "$R/out"
}
item_tests_offload() { # 480 trainers and engines that free their memory (alone on the GPU)
    python scripts/gpu_main.py --tests offload --side-by-side 1 --limit 460 --out "$R/out"
}
item_tests_lora() { # 560 adapters: an engine measures what it has (alone on the GPU)
    python scripts/gpu_main.py --tests test_lora --side-by-side 1 --limit 540 --out "$R/out"
}
item_tests_two() { # 600 the tests that need two GPUs
    python scripts/gpu_main.py --tests nccl single_copy hf_parallel context_parallel --side-by-side 4 --limit 580 \
        --out "$R/out"
}
item_tests_rest() { # 600 all other files of tests/gpu
    python scripts/gpu_main.py --tests async compiled conversion families fast faults grouped host latent optimizer plan \
        profile quantized routing short_loops --side-by-side 4 --limit 580 --out "$R/out"
}
item_grpo() { # 600 0.6B dimensions, hf beside TRL as it is and tuned
    python benchmarks/gpu_grpo.py --only instep-hf trl trl-tuned --steps 4 --limit 230 --out "$R/out.json"
}
item_grpo_long() { # 600 1.7B dimensions, 1,024 new tokens, beside TRL tuned
    python benchmarks/gpu_grpo.py --size 1.7b --new-tokens 1024 --steps 3 --limit 280 --out "$R/out.json" \
        --only instep-hf trl-tuned
}
item_grpo_long_rest() { # 600 the same with Megatron, and TRL as it is
    python benchmarks/gpu_grpo.py --size 1.7b --new-tokens 1024 --steps 3 --limit 280 --out "$R/out.json" \
        --only instep-megatron trl
}
item_grpo_megatron() { # 600 Megatron beside TRL tuned, and how long a start takes whose caches are warm
    python benchmarks/gpu_grpo.py --only instep-megatron trl-tuned --limit 240 --out "$R/out.json"
    python benchmarks/gpu_grpo.py --only instep-megatron --steps 2 --out "$R/again.json"
}
item_mfu_06b() { # 120 the longest kernels of a step of 0.6B dimensions in 256 samples, hf
    python benchmarks/train_step.py --size 0.6b --num-samples 256 --max-tokens-per-gpu 16384 --kernels 40 --steps 3 \
        --case hf --out "$R/out.json"
}
item_grpo_dp2() { # 300 two GPUs: both on both with 512 samples, and with 256 beside the rows of item grpo_tuned
    python benchmarks/gpu_grpo.py --only instep-hf-dp2 --steps 4 --limit 160 --logs "$R/logs-512" --samples 512 \
        --out "$R/512.json"
    cp "$Q/grpo_tuned/out.json" "$R/" || echo '{"rows": []}' >"$R/out.json"
    python benchmarks/gpu_grpo.py --only instep-hf-dp2 --steps 4 --limit 130 --logs "$R/logs" --add --out "$R/out.json"
}
item_grpo_two() { # 480 two GPUs: one trains and one generates, and both on both, with two engines and with one of TP 2
    python benchmarks/gpu_grpo.py --only instep-hf-apart instep-hf-dp2 instep-hf-tp2 --out "$R/out.json"
}
item_sglang() { # 560 ten steps on SGLang by ipc with sleep, in one memory, and with an adapter
    python scripts/gpu_main.py --only sglang-ipc-hf sglang-single-copy-hf sglang-lora-hf --side-by-side 1 --limit 540 \
        --out "$R/out"
}
item_sglang_drafter() { # 300 SGLang's drafters follow a sync: Qwen3-Next and DeepSeek-V3 with a layer of multi-token prediction
    python -m pytest -q -p no:cacheprovider -m gpu -s --basetemp "$R/tmp" tests/gpu/test_sglang_drafter.py # with the logs of engines
}
item_grpo_sglang() { # 590 0.6B dimensions on SGLang, on vLLM, and TRL tuned
    python benchmarks/gpu_grpo.py --only instep-sglang instep-hf trl-tuned --steps 4 --limit 250 --logs "$R/logs" \
        --out "$R/out.json"
}
item_grpo_turns() { # 300 0.6B dimensions, with the memory of both on the GPU and in turns
    python benchmarks/gpu_grpo.py --only instep-hf instep-hf-turns --steps 5 --limit 145 --logs "$R/logs" --out "$R/out.json"
}
item_grpo_verl() { # 500 0.6B dimensions beside verl tuned
    grpo_verl 150 --only instep-hf
    grpo_verl 330 --only verl-tuned --add
}
item_grpo_tuned() { # 420 0.6B dimensions beside TRL tuned
    python benchmarks/gpu_grpo.py --only instep-hf trl-tuned --steps 5 --limit 200 --logs "$R/logs" --out "$R/out.json"
}
grpo_verl() { # SECONDS WORDS ...
    python benchmarks/gpu_grpo.py --limit "$1" --steps 4 --logs "$R/logs" --out "$R/out.json" "${@:2}"
}
item_grpo_verl_example() { # 340 verl as its example sets it
    python benchmarks/gpu_grpo.py --only verl --steps 4 --limit 330 --logs "$R/logs" --out "$R/out.json"
}
item_grpo_verl_long() { # 600 1.7B dimensions, 1,024 new tokens, beside verl tuned
    python benchmarks/gpu_grpo.py --size 1.7b --new-tokens 1024 --steps 3 --limit 290 --logs "$R/logs" \
        --only instep-hf verl-tuned --out "$R/out.json"
}
item_grpo_verl_alone() { # 600 the same without the others, which item grpo_beside_verl runs on another GPU
    python benchmarks/gpu_grpo.py --only verl-tuned verl --steps 4 --limit 340 --logs "$R/logs" --out "$R/out.json"
}
item_grpo_beside_verl() { # 300 0.6B dimensions, hf and TRL tuned
    python benchmarks/gpu_grpo.py --only instep-hf trl-tuned --steps 4 --limit 200 --logs "$R/logs" --out "$R/out.json"
}
item_verl_probe() { # 60 FlashAttention as packed for verl
    PYTHONPATH=$HOME/verl:$PYTHONPATH python -c "import sys; sys.path.insert(0, 'benchmarks/verl'); \
        import run_verl; exec(run_verl.PROBE); print('FlashAttention works')"
}
item_grpo_sglang_two() { # 340 SGLang on two GPUs: trainer apart by NCCL, both on both with TP 2
    python benchmarks/gpu_grpo.py --only instep-sglang-apart instep-sglang-tp2 --steps 4 --limit 160 \
        --logs "$R/logs" --out "$R/out.json"
}
item_grpo_sglang_pd() { # 190 SGLang on two GPUs: prefill and decode apart, both beside the trainer
    python benchmarks/gpu_grpo.py --only instep-sglang-pd --steps 4 --limit 180 --logs "$R/logs" --out "$R/out.json"
}
hybrid() { # hybrid KERNELS FILE SIZE ... -- CASE: with flash-linear-attention's kernels, or in plain PyTorch
    local fla="" file=$2
    [[ $1 == plain ]] || fla=$HOME/fla: # first: vLLM's bundle has an older tvm_ffi than tilelang needs
    PYTHONPATH=$fla$PYTHONPATH python benchmarks/train_step.py --num-samples 128 --max-tokens-per-gpu 16384 --steps 3 \
        --kernels 25 --out "$R/$file.json" --case "${@: -1} --optimizer adamw_8bit" --size "${@:3:$#-4}"
}
item_hybrid_megatron() { # 590 MFU of four layers of mixtures of experts, hybrid ones with flash-linear-attention and without
    hybrid fla out next-80b-a3b-4-layers 35b-a3b-4-layers 30b-a3b-4-layers -- "megatron --moe-grouped-gemm"
    hybrid plain plain next-80b-a3b-4-layers -- "megatron --moe-grouped-gemm"
}
item_hybrid_hf() { # 590 the same with hf
    hybrid fla out next-80b-a3b-4-layers 35b-a3b-4-layers 30b-a3b-4-layers -- hf
    hybrid plain plain next-80b-a3b-4-layers -- hf
}
item_attention() { # 120 packed attention and the sums of copied keys; attention of decoding, and the choice of tokens
    python -m pytest -q -p no:cacheprovider -m gpu -s tests/gpu/test_attention.py tests/gpu/test_decode_kernels.py
}
item_fla() { # 120 the kernels of flash-linear-attention against the plain form
    PYTHONPATH=$HOME/fla:$PYTHONPATH python -m pytest -q -p no:cacheprovider -m gpu -s tests/unit/test_delta_net.py \
        tests/unit/test_shared_prefixes.py
}
item_lora_step() { # 300 steps of 4B and 8B dimensions with an adapter, both backends
    python benchmarks/train_step.py --size 8b 4b --num-samples 128 --max-tokens-per-gpu 16384 --steps 4 \
        --case "hf --lora-rank 16" "megatron --lora-rank 16" --out "$R/out.json"
}
item_main_lora_megatron() { # 300 ten steps of Megatron with an adapter
    python scripts/gpu_main.py --only lora-megatron --limit 280 --out "$R/out"
}
item_card() { # 150 the card's rates, for instep plan
    XDG_CACHE_HOME=$R/cache python -m instep.cli plan --card-profile measure --hf-checkpoint ~/g/extra/guide/models/policy \
        --rollout-backend vllm --colocate --actor-num-gpus-per-node 1 --rollout-batch-size 32
    cp "$R"/cache/instep/card-*.json "$R/"
}
item_parking() { # 60 how long a parked trainer takes to come back
    python benchmarks/parking.py
}
item_controller() { # 90 the controller's share
    python benchmarks/controller_share.py --out "$R/out.json"
}
item_megatron_parallel() { # 300 Megatron on two GPUs gives the losses and norms of one
    python -m pytest -q -p no:cacheprovider -m gpu -s tests/gpu/test_megatron_parallel.py
}
real_task() {
    python benchmarks/real_task.py --model ~/gemma --logs "$R/logs" --out "$R/out.json" "$@"
}
item_real_beside() { # 590 the real model at defaults, beside TRL
    real_task --limit 280 --only trl ipc
}
item_real_lora() { # 280 the real model with an adapter
    real_task --limit 260 --only lora
}
item_real_fp32() { # 280 the real model in float32, 21 syncs
    real_task --limit 260 --rollouts 21 --only ipc-fp32
}
item_real_copy() { # 500 the real model in one memory, and ahead
    real_task --limit 240 --only single-copy async
}
item_real_ways() { # 400 the real model by shm and disk, 21 syncs each
    real_task --rollouts 21 --limit 190 --only shm disk
}
item_real_restart() { # 300 the real model with engines that are started for each version
    real_task --rollouts 3 --limit 280 --only restart
}
item_real_two() { # 300 the real model on two GPUs
    real_task --rollouts 21 --limit 140 --only nccl nccl-async
}
item_real_example() { # 300 make real
    time python examples/real/run.py --device cuda --model ~/gemma --out "$R/run"
}
item_tests_quantized() { # 400 vLLM's kernels for GPTQ and AWQ
    python -m pytest -q -p no:cacheprovider -m gpu -s tests/gpu/test_quantized.py
}
item_trl() { # 420 TRL's own trainer sends its weights by NCCL (two GPUs)
    python -m pytest -q -p no:cacheprovider -m gpu -s tests/gpu/test_trl.py
}

refuse() {
    echo "$1" >&2
    exit 2
}

items() { sed -n 's/^item_\([a-z0-9_]*\)() { # \([0-9]*\) \(.*\)/\1 \2 \3/p' "$HERE/scripts/gpu_session.sh"; }

prepare() {
    mkdir -p .gpu/extra/wheels
    if [[ ! -e .gpu/s3 ]]; then
        "$BUNDLE" "$PWD/.gpu"
        cat .gpu/p[0-9]*/part_* >.gpu/all && rm -r .gpu/p[0-9]*
        split -n 4 -d -a 1 .gpu/all .gpu/part_ && rm .gpu/all
        for n in 0 1 2 3; do mkdir -p ".gpu/s$n" && mv ".gpu/part_$n" ".gpu/s$n/"; done
    fi
    if [[ ${1:-} == sglang && ! -e .gpu/s4 ]]; then
        BESIDE_VLLM=1 "$BUNDLE_SGLANG" "$PWD/.gpu"
        cat .gpu/p[0-9]*/part_* >.gpu/all && rm -r .gpu/p[0-9]*
        split -b 54000000 -d -a 1 --numeric-suffixes=4 .gpu/all .gpu/part_ && rm .gpu/all
        for part in .gpu/part_*; do mkdir -p ".gpu/s${part##*_}" && mv "$part" ".gpu/s${part##*_}/"; done
        # NIXL, by which prefill engines pass on the KV cache, without its kernels for experts.
        python3 -m pip install --quiet --no-deps --no-compile --target .gpu/nixl --python-version 3.12 --implementation cp \
            --only-binary=:all: --platform manylinux_2_28_x86_64 --platform any nixl==1.5.1 nixl-cu13==1.5.1
        rm -rf .gpu/nixl/nixl_ep* && mkdir -p .gpu/s9
        tar c -C .gpu/nixl . | xz -3 >.gpu/s9/part_9 && rm -r .gpu/nixl
    fi
    if [[ ${1:-} == verl && ! -e .gpu/v0 ]]; then
        ls .gpu/flash-attn/*.whl >/dev/null 2>&1 || "${PYTHON312:-python3.12}" benchmarks/verl/build_flash_attn.py .gpu/flash-attn
        # Of ANTLR's old runtime, which Hydra needs, there is no wheel.
        python3 -m pip wheel --quiet --no-deps --wheel-dir .gpu/flash-attn antlr4-python3-runtime==4.9.3
        local target=(--no-deps --python-version 3.12 --implementation cp --only-binary=:all: --platform any
            --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 --platform linux_x86_64)
        python3 -m pip install --quiet --no-compile --target .gpu/verl "${target[@]}" \
            --requirement benchmarks/verl/requirements.txt .gpu/flash-attn/*.whl
        rm -rf .gpu/verl/{bin,hopper,pydevd_plugins,recipe,scripts,tests,tutorial} && mkdir -p .gpu/v0
        tar c -C .gpu/verl . | xz -6 >.gpu/v0/verl.tar.xz && rm -r .gpu/verl
    fi
    if [[ ${1:-} == real && ! -e .gpu/m6 ]]; then
        rm -rf .gpu/m? && .venv/bin/python examples/real/make_model.py .gpu/gemma
        tar c -C .gpu gemma | xz -1 -T0 >.gpu/all
        split -n 7 -d -a 1 .gpu/all .gpu/gemma_ && rm -r .gpu/all .gpu/gemma
        for n in 0 1 2 3 4 5 6; do mkdir -p ".gpu/m$n" && mv ".gpu/gemma_$n" ".gpu/m$n/"; done
    fi
    .venv/bin/python -m pip --disable-pip-version-check download --quiet --no-deps --dest .gpu/extra/wheels \
        --python-version 3.12 --implementation cp --only-binary=:all: --platform any --platform manylinux2014_x86_64 \
        --platform manylinux_2_28_x86_64 --requirement instep/preflight/install/pins/atropos.txt --requirement /dev/stdin <<'END'
wandb==0.31.0
platformdirs==4.14.5
protobuf==7.36.2
markdown==3.11.3
attrs==26.1.0
click==8.5.1
gitpython
gitdb
smmap
END
    .venv/bin/python -m pip download --quiet --no-deps --dest .gpu/extra/fla flash-linear-attention fla-core einops
    if [[ ! -e .gpu/t1 ]]; then # tilelang, without which flash-linear-attention refuses Hopper with this Triton
        .venv/bin/python -m pip download --quiet --no-deps --dest .gpu/t0 --python-version 3.12 --only-binary=:all: \
            --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform any tilelang==0.1.15 \
            z3-solver==4.15.4.0 ml-dtypes==0.6.0 torch-c-dlpack-ext==0.1.5 apache-tvm-ffi==0.1.11 cloudpickle
        mkdir -p .gpu/t1 && mv .gpu/t0/z3_solver* .gpu/t1/
    fi
    if [[ ! -e .gpu/extra/guide ]]; then
        mkdir -p .gpu/extra/making
        (cd .gpu/extra/making && "$HERE/.venv/bin/python" "$HERE/examples/atropos/make_model.py" --num-threads 1)
        rm -rf .gpu/extra/making/runs && mv .gpu/extra/making .gpu/extra/guide
    fi
    du -sh .gpu/[mstv]? .gpu/extra
}

unpack() {
    . scripts/gpu_host.sh
    if [[ -e ~/g/extra ]]; then
        python -m pip install --quiet --no-index --no-deps --target ~/atropos ~/g/extra/wheels/*.whl
        python -m pip install --quiet --no-index --no-deps --target ~/fla ~/g/extra/fla/*.whl $(ls ~/g/*.whl 2>/dev/null)
    fi
    if [[ -e ~/g/verl.tar.xz ]]; then
        mkdir -p ~/verl && tar xJf ~/g/verl.tar.xz -C ~/verl
        python -m compileall -q -j 0 ~/verl >/dev/null 2>&1 || true
    fi
    [[ ! -e ~/g/gemma_0 ]] || cat ~/g/gemma_* | xz -dc -T0 | tar x -C ~
    touch ~/g/unpacked
}

start() {
    [[ -e ~/g/unpacked ]] || refuse "first: gpu_session.sh unpack"
    for lane in "$@"; do
        [[ $lane =~ ^[0-9,]+: ]] || refuse "a lane is GPUS: ITEM ..., not $lane"
        [[ ! $lane =~ guide || $lane =~ ^0 ]] || refuse "the guide types CUDA_VISIBLE_DEVICES=0: it needs GPU 0"
    done
    for item in $(printf '%s\n' "${@#*:}"); do
        declare -F "item_$item" >/dev/null || refuse "no item $item: $(items)"
    done
    local copy python twice
    twice=$( (printf '%s\n' "${@%%:*}" | tr , '\n'; printf '%s\n' ${*#*:}) | sort | uniq -d)
    [[ -z $twice ]] || refuse "twice: $twice"
    mkdir -p ~/t "$Q"
    copy=$(mktemp -d ~/t/XXXX)
    cp -r "$HERE/." "$copy"
    cd "$copy"
    mkdir -p .venv-atropos/bin
    python=$(python -c 'import sys; print(sys.executable)') # this one: `python3` may be another
    printf '#!/bin/sh\nexec %s "$@"\n' "$python" >.venv-atropos/bin/python
    printf '#!%s\nfrom atroposlib.cli.run_api import main\n\nmain()\n' "$python" >.venv-atropos/bin/run-api
    chmod +x .venv-atropos/bin/*
    for lane in "$@"; do
        setsid scripts/gpu_session.sh queue "${lane%%:*}" ${lane#*:} >>"$Q/queue.log" 2>&1 </dev/null &
    done
}

queue() { # with a lock of each of its GPUs
    for gpu in ${1//,/ }; do
        exec {lock}>"$Q/gpu$gpu.lock"
        flock --nonblock "$lock" || refuse "GPU $gpu has a lane: $1: ${*:2} is not run"
    done
    echo $$ >"$Q/lane-$1.pid" # of a process group of its own
    trap 'rm -f "$Q/lane-'"$1"'.pid"' EXIT
    . scripts/gpu_host.sh
    export CUDA_VISIBLE_DEVICES=$1 VLLM_CACHE_ROOT=$HOME/.cache/vllm TORCHINDUCTOR_CACHE_DIR=$HOME/.cache/inductor
    export TMPDIR=$HOME/tmp/${1//,/} # models of benchmarks are of one lane
    mkdir -p "$TMPDIR"
    local cores=""
    for gpu in ${1//,/ }; do cores+=${cores:+,}$((16 * gpu))-$((16 * gpu + 15)); done
    for item in "${@:2}"; do
        export R=$Q/$item
        rm -rf "$R" && mkdir -p "$R"
        echo "$(date +%T) $1: $item begins"
        status=0
        timeout --kill-after=10 "$(items | awk -v item="$item" '$1 == item { print $2 }')" \
            taskset -c "$cores" "$0" one "$item" >"$R.log" 2>&1 || status=$?
        echo "$(date +%T) $1: $item ended with $status"
    done
}

stop() {
    shopt -s nullglob
    for lane in "$Q"/lane-*.pid; do
        kill -TERM -- "-$(<"$lane")" || true
        rm -f "$lane"
    done
}

pack() { # small files, some of which change while they are read (tar's 1)
    local files=(-ignore_readdir_race -type f ! -name '*.safetensors' ! -name '*.pt' ! -path '*/checkpoints/*' ! -path '*/cache/*' ! -name '*.lock')
    (cd "$Q" && find . "${files[@]}" -size -2000k -print0 || true) |
        { tar cJf "$OUT/new" -C "$Q" --warning=no-file-changed --ignore-failed-read --null --files-from=- ||
            (($? == 1)) || echo "results.txz is not whole" >&2; }
    mv "$OUT/new" "$OUT/results.txz"
    (cd "$Q" && find . "${files[@]}" ! -size -2000k -printf 'left out, as it is large: %p, %s bytes\n' || true) >"$OUT/left_out"
}

watch() {
    local until=$((SECONDS + $1))
    while sleep 15 && ((SECONDS < until)) && pgrep -f "gpu_session.sh queue" >/dev/null; do
        pack
    done
    pack
    cat "$OUT/left_out" "$Q/queue.log"
    for log in $(ls -t "$Q"/*.log); do echo "== $log" && tail -n 8 "$log" | cut -c1-300; done
}

case ${1:-} in
    prepare) prepare "${2:-}" ;;
    keep) mkdir -p ~/g && if [[ $2 == */extra ]]; then cp -r "$2" ~/g/; else cp "$2"/* ~/g/; fi ;;
    unpack | start | stop | queue | watch) "$@" ;;
    one) "item_$2" ;;
    items) items ;;
    *) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" && exit 2 ;;
esac
