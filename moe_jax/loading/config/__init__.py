"""From ``quantization_config`` of a checkpoint to the scheme of each module."""
