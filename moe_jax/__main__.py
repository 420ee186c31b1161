"""The program: ``moe-jax`` and ``python -m moe_jax``. Signals are seen to first, before anything large is imported."""

import sys

from moe_jax._signals import end_on_signals


def program() -> int:
    """The command line of this process. Returns the exit code."""
    end_on_signals("moe-jax")
    from moe_jax.cli._main import finish, main

    return finish(main())


if __name__ == "__main__":
    sys.exit(program())
