# Qwen3.6-27B, whose language model has the shape of Qwen3.5-27B
source "$(dirname "${BASH_SOURCE[0]}")/qwen3.5-27B.sh"
