#!/usr/bin/env bash
# Measurements on a GPU host that has no network and is lent for minutes: everything is packed before it is asked for,
# and runs there one after the other while each call only looks.
#
#   gpu_session.sh prepare            here: .gpu/s0 ... .gpu/s3 (the bundle) and .gpu/extra (wheels, the guide's model)
#   gpu_session.sh keep FOLDER        there, a call for each of them: it goes to ~/g
#   gpu_session.sh start ITEM ...     there: unpacks all, copies this tree to ~/t/main, and runs the items in their order
#   gpu_session.sh watch SECONDS      there: how far they are; logs and results to $OUT/results.txz
#   gpu_session.sh items              their names
#
# BUNDLE is the program that builds the bundle. .gpu belongs into .git/info/exclude.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
HERE=$PWD Q=$HOME/q
BUNDLE=${BUNDLE:-../shared/gpu/build_bundle.sh}

# ITEMS: each is run in ~/t/main with its folder in $R. The figure is its limit in seconds.
item_train_4b() { # 300 one optimizer step of 4B dimensions with 8-bit AdamW, both backends
    python benchmarks/train_step.py --size 4b --max-tokens-per-gpu 8192 --num-samples 256 --steps 3 --out "$R/out.json" \
        --case "hf --optimizer adamw_8bit" "megatron --optimizer adamw_8bit --max-tokens-per-gpu 6400"
}
item_mfu_4b() { # 480 MFU and the longest kernels of a step of 4B dimensions in 64 samples, both backends
    python benchmarks/train_step.py --size 4b --num-samples 64 --max-tokens-per-gpu 8192 --kernels 40 --out "$R/out.json" \
        --case "hf --optimizer adamw_8bit" "megatron --optimizer adamw_8bit --max-tokens-per-gpu 6400"
}
item_guide() { # 420 Atropos' guide in its three modes (alone on the GPU)
    GUIDE_MODEL=~/g/extra/guide PYTHONPATH=$PYTHONPATH:$HOME/atropos \
        python -m pytest -q -p no:cacheprovider -m gpu -s tests/gpu/test_atropos_guide.py
}
item_async() { # 420 one step ahead against synchronous, one card
    python benchmarks/async.py --device cuda --limit 270 --modes synchronous "one step ahead" --out "$R/out.json"
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
item_main_4b() { # 420 ten steps of 4B dimensions, colocated
    python scripts/gpu_main.py --only 4b --out "$R/out.json"
}
item_main_megatron() { # 300 ten steps of Megatron by ipc
    python scripts/gpu_main.py --only ipc-megatron --out "$R/out.json"
}
item_sync_4b() { # 300 pauses of syncs of 4B dimensions
    python benchmarks/weight_sync.py --device cuda --only 4b:ipc 4b:lora --out "$R/out.json"
}
item_grpo_long() { # 300 1.7B dimensions, 1,024 new tokens
    python benchmarks/gpu_grpo.py --size 1.7b --new-tokens 1024 --steps 3 --only instep-hf --out "$R/out.json"
}
item_controller() { # 90 the controller's share
    python benchmarks/controller_share.py --out "$R/out.json"
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
    .venv/bin/python -m pip --disable-pip-version-check download --quiet --no-deps --dest .gpu/extra/wheels \
        --python-version 3.12 --implementation cp --only-binary=:all: --platform any --platform manylinux2014_x86_64 \
        --platform manylinux_2_28_x86_64 --requirement requirements/atropos.txt --requirement - <<'END'
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
    if [[ ! -e .gpu/extra/guide ]]; then
        mkdir -p .gpu/extra/making
        (cd .gpu/extra/making && "$HERE/.venv/bin/python" "$HERE/examples/atropos/make_model.py" --num-threads 1)
        rm -rf .gpu/extra/making/runs && mv .gpu/extra/making .gpu/extra/guide
    fi
    du -sh .gpu/s? .gpu/extra
}

start() {
    for item in "$@"; do declare -F "item_$item" >/dev/null || { echo "no item $item: $(items)" >&2; exit 2; }; done
    mkdir -p ~/t "$Q" && cp -r "$HERE" ~/t/main && cd ~/t/main
    python -m pip install --quiet --no-index --no-deps --target ~/atropos ~/g/extra/wheels/*.whl
    mkdir -p .venv-atropos/bin
    printf '#!/bin/sh\nexec python3 "$@"\n' >.venv-atropos/bin/python
    printf '#!/usr/bin/env python3\nfrom atroposlib.cli.run_api import main\n\nmain()\n' >.venv-atropos/bin/run-api
    chmod +x .venv-atropos/bin/*
    setsid scripts/gpu_session.sh queue "$@" >"$Q/queue.log" 2>&1 </dev/null &
}

queue() {
    . scripts/gpu_host.sh
    export VLLM_CACHE_ROOT=$HOME/.cache/vllm TORCHINDUCTOR_CACHE_DIR=$HOME/.cache/inductor
    for item in "$@"; do
        export R=$Q/$item
        mkdir -p "$R"
        echo "$(date +%T) $item begins"
        status=0
        timeout --kill-after=10 "$(items | awk -v item="$item" '$1 == item { print $2 }')" \
            "$0" one "$item" >"$R.log" 2>&1 || status=$?
        echo "$(date +%T) $item ended with $status"
    done
}

watch() {
    local until=$((SECONDS + $1))
    while sleep 15 && ((SECONDS < until)); do
        tar cJf "$OUT/new" -C "$Q" --exclude='*.safetensors' --exclude='*.pt' --exclude=checkpoints . && mv "$OUT/new" "$OUT/results.txz"
    done
    cat "$Q/queue.log"
    for log in "$Q"/*.log; do echo "== $log" && tail -n 12 "$log" | cut -c1-300; done
}

case ${1:-} in
    prepare) prepare ;;
    keep) mkdir -p ~/g && if [[ $2 == */extra ]]; then cp -r "$2" ~/g/; else cp "$2"/* ~/g/; fi ;;
    start | queue | watch) "$@" ;;
    one) "item_$2" ;;
    items) items ;;
    *) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" && exit 2 ;;
esac
