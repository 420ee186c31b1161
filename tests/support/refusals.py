"""One line for each call that must be refused."""

from collections.abc import Callable
from typing import Any

import pytest


def refuses(error: type[Exception], match: str, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
    """``call(*args, **kwargs)`` raises ``error``, and its message has the pattern ``match``."""
    with pytest.raises(error, match=match):
        call(*args, **kwargs)
