"""docs/faq.md quotes messages that are really raised: every quoted one has a call here that raises it."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax import _compat
from moe_jax.cli import _doctor as doctor

FAQ = (Path(__file__).parent.parent / "docs/faq.md").read_text()
QUOTED = re.findall(r"```text\n(.*?)\n```", FAQ, re.DOTALL)
E, H, INNER = 4, 64, 32
SHAPES = {"gate_proj": (INNER, H), "up_proj": (INNER, H), "down_proj": (H, INNER)}


def layer(**options):
    return moe_jax.FusedMoE(E, H, INNER, **{"top_k": 2, "rngs": nnx.Rngs(0), **options})


def call(layer, width=H, columns=E):
    return layer(jnp.ones((3, width), jnp.bfloat16), jnp.zeros((3, columns)))


def load(pairs):
    empty = layer(rngs=None)
    empty.load_weights(pairs)
    empty.process_weights_after_loading()


def pairs(value=1.0, widen=0):
    for expert in range(E):
        for name, (rows, columns) in SHAPES.items():
            yield f"experts.{expert}.{name}.weight", np.full((rows, columns + widen), value, jnp.bfloat16)


def gradient_of_codes():
    quantized = layer(scheme="fp8_channel", dtype=jnp.float32)
    graph, state = nnx.split(quantized)
    x, logits = jnp.ones((3, H), jnp.float32), jnp.zeros((3, E))
    jax.grad(lambda state: nnx.merge(graph, state)(x, logits).sum(), allow_int=True)(state)


def say(text):
    raise ValueError(text)


# The first words of a quoted message (after any "...") -> a call that raises it.
RAISES = {
    "moe_jax supports jax": lambda: say(_compat.version_error("jax", "0.13.1")),
    "there is an NVIDIA GPU": lambda: say(doctor._why_on_the_cpu({"jax": "0.11.2"})),
    "unknown scheme": lambda: moe_jax.Scheme.parse("fp9"),
    "implementation=": lambda: call(layer(implementation="cuda")),
    "no implementation can run": lambda: call(layer(implementation="hopper")),
    "config.json: no such file": lambda: moe_jax.load_moe(Path(__file__).parent / "data"),
    "experts.0.gate_proj.weight": lambda: load(pairs(widen=2)),
    "values are NaN": lambda: load(pairs(np.nan)),
    "expected every tensor": lambda: load(list(pairs())[1:]),
    "has no weights yet": lambda: call(layer(rngs=None)),
    "is already processed": lambda: layer().load_weights(pairs()),
    "x has shape": lambda: call(layer(), width=H + 1),
    "router_logits have": lambda: call(layer(), columns=E + 1),
    "gradient requested": gradient_of_codes,
    "mesh=": lambda: layer(mesh=jax.make_mesh((1,), ("e",))),
}


@pytest.mark.parametrize("quoted", QUOTED)
@pytest.mark.sample(2)
def test_message_is_really_raised(quoted, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)  # the doctor's advice depends on it
    (trigger,) = [raises for words, raises in RAISES.items() if quoted.lstrip(". ").startswith(words)]
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as caught:
        trigger()
    pattern = ".*".join(re.escape(part.strip()) for part in quoted.split("..."))
    assert re.search(pattern, " ".join(str(caught.value).split())), caught.value


def test_every_trigger_has_its_quotation():
    assert len(QUOTED) == len(RAISES) == len(set(QUOTED))
