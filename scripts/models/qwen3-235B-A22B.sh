# Qwen3-235B-A22B (Instruct- and Thinking-2507: MODEL_ARGS_ROTARY_BASE=5000000); `source` it: flags of its shape
MODEL_ARGS=(
    --num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 --swiglu
    --num-attention-heads 64 --group-query-attention --num-query-groups 4 --kv-channels 128
    --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear --qk-layernorm
    --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --vocab-size 151936 --untie-embeddings-and-output-weights
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 1536
)
