"""What held when this process imported the package: the time, and our part of the environment."""

import os
import time


def environment() -> dict[str, str]:
    """Our part of it, now."""
    return {name: value for name, value in os.environ.items() if name.startswith("MOE_JAX_")}


TIME, ENVIRONMENT = time.time(), environment()
