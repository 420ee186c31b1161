"""``python -m moe_jax`` equals the command ``moe-jax``."""

import sys

from moe_jax.cli._main import main

sys.exit(main())
