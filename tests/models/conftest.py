"""Checkpoints, torch models and our models, each made once per session."""

import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.models import load_pretrained
from tests.support.cases.models import VOCAB, Case, write_checkpoint


@pytest.fixture(scope="session")
def case(tmp_path_factory):
    """case(name) -> Case, made on first use."""
    made: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            torch_model = write_checkpoint(name, directory)
            made[name] = Case(directory, torch_model, load_pretrained(directory, dtype=jnp.float32))
        return made[name]

    return get


@pytest.fixture(scope="session")
def prompt():
    """prompt(batch, length) -> (batch, length) int32 random ids.

    Tests keep to two rows of 33 to 64 tokens where they can: one bucket, so one compiled ``score`` per checkpoint.
    """
    return lambda batch, length: np.random.default_rng(1).integers(0, VOCAB, (batch, length)).astype(np.int32)
