# Qwen3-30B-A3B (Instruct- and Thinking-2507: MODEL_ARGS_ROTARY_BASE=10000000); `source` it: flags of its shape
MODEL_ARGS=(
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --swiglu
    --num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128
    --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear --qk-layernorm
    --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --vocab-size 151936 --untie-embeddings-and-output-weights
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768
)
