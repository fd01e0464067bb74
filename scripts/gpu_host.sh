# Source this in the repository's root on a GPU host without a network. It makes the packages of build_bundle.sh and
# build_bundle_sglang.sh importable, with their bytecode, and instep's entry point, by which vLLM finds the plugin.
#
#   PARTS=~/g SITE=~/site . scripts/gpu_host.sh      PARTS: the folder of part_0, part_1, ...; SITE: made if it is not there

PARTS=${PARTS:-$HOME/g} SITE=${SITE:-$HOME/site}
if [ ! -e "$SITE/vllm" ]; then
    mkdir -p "$SITE"
    cat "$PARTS"/part_* | xz -dc -T8 | tar xi -C "$SITE"
    python -m compileall -q -j 0 "$SITE" > /dev/null 2>&1 || true # some packages ship files of other Pythons
fi
python - pyproject.toml "$SITE" << 'PY'
import pathlib, sys, tomllib

project = tomllib.loads(pathlib.Path(sys.argv[1]).read_text())["project"]
version = "0.dev0"  # that of a tree is nobody's
info = pathlib.Path(sys.argv[2], f"{project['name'].replace('-', '_')}-{version}.dist-info")
info.mkdir(exist_ok=True)
(info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {version}\n")
groups = project["entry-points"].items()
lines = [f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in own.items()) for group, own in groups]
(info / "entry_points.txt").write_text("\n".join(lines))
PY
export PYTHONPATH="$PWD:$SITE" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
export VLLM_USE_FLASHINFER_SAMPLER=0 TORCH_NCCL_DUMP_ON_TIMEOUT=0
export VLLM_ALLREDUCE_USE_SYMM_MEM=0 NCCL_NVLS_ENABLE=0 # no NVLink multicast
