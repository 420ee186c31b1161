"""Files of a checkpoint: safetensors, its index, and the containers of GPTQ and AWQ."""
