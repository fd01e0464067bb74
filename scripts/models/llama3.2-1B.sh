# Llama-3.2-1B; `source` it: flags of its shape
MODEL_ARGS=(
    --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --swiglu
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 64
    --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear
    --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-500000}"
    --vocab-size 128256
)
