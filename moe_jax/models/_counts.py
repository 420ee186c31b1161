"""Whether a checkpoint can hold as many layers and experts as its config.json says, asked before anything is built."""

from moe_jax.loading import CheckpointError
from moe_jax.loading.files._checkpoint import CheckpointLike
from moe_jax.loading.layer._names import is_expert_name
from moe_jax.models._config import MoEBlockConfig


def check_counts(config: MoEBlockConfig, checkpoint: CheckpointLike, *, layers: int | None = None) -> None:
    """Compare counts alone: which tensors are missing is said later, by name.

    Args:
        layers: how many layers with experts will be loaded, None for the whole model.

    Raises:
        CheckpointError: more layers than tensors, or more experts than the tensors can hold.
    """
    # A tensor is part of one expert, or holds one in each of its first rows.
    infos = (checkpoint.info(name) for name in checkpoint.names if is_expert_name(name))
    held = sum(info.shape[0] if len(info.shape) > 2 and info.nbytes else 1 for info in infos)
    stated = config.num_experts * (len(config.moe_layers) if layers is None else layers)
    if stated > held or (layers is None and config.num_layers > len(checkpoint.names)):
        raise CheckpointError(
            f"{checkpoint.config_path}: describes {config.num_layers} layers, {len(config.moe_layers)} of them with "
            f"{config.num_experts} experts; the {len(checkpoint.names)} tensors of the files cannot hold that many; "
            "config.json and the weights do not belong together, or files are missing"
        )
