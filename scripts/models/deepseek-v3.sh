# DeepSeek-V3, V3.1 and R1; `source` it: flags of its shape
MODEL_ARGS=(
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --swiglu --num-attention-heads 128
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
    --v-head-dim 128 --qk-layernorm --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear
    --use-rotary-position-embeddings --rotary-base 10000
    --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0
    --vocab-size 129280 --untie-embeddings-and-output-weights
    --num-experts 256 --moe-layer-freq "[0]*3+[1]*58" --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 0
    --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5
)
