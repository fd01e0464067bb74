#!/usr/bin/env bash
# Adds SGLang and sglang-router to .venv, beside vLLM. A second call installs nothing.
# INSTEP_SGLANG=0.5.23 chooses another version of SGLang.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup_vllm.sh
version=${INSTEP_SGLANG:-$(sed -n 's/^sglang==//p' requirements/sglang.txt)}
stamp=".venv/.sglang-$version-$(cat requirements/*.txt scripts/setup_sglang.sh | cksum | tr ' ' -)"
[[ -e $stamp ]] && exit 0
unset PYTHONPATH PYTHONHOME
start=$SECONDS
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

echo "setup: installing SGLang $version and sglang-router (once, about 55 MB)"
sed "s/^sglang==.*/sglang==$version/" requirements/sglang.txt | pip install --quiet --no-compile --no-deps --requirement /dev/stdin
echo "setup: compiling"
.venv/bin/python -m compileall -q -j 0 .venv/lib/python3*/site-packages/sglang >/dev/null || true
rm -f .venv/.sglang-*
touch "$stamp"
echo "setup: SGLang done in $((SECONDS - start)) s"
