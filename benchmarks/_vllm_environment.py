"""What processes with an engine of vLLM run under: one process, nothing downloaded or sent, no warm-up of others."""

ENVIRONMENT = dict(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="INFO",
    VLLM_USE_FLASHINFER_SAMPLER="0",
    VLLM_DEEP_GEMM_WARMUP="skip",
    TOKENIZERS_PARALLELISM="false",
    XLA_PYTHON_CLIENT_PREALLOCATE="false",
)
