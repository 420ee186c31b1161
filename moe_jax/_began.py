"""What held when this process imported the package: the time, and our part of the environment."""

import os
import time

TIME = time.time()
ENVIRONMENT = {name: value for name, value in os.environ.items() if name.startswith("MOE_JAX_")}
