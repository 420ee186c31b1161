"""``Tokenizer``: tokenizer.json of a checkpoint, or Kimi's tiktoken.model, by the package tokenizers."""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moe_jax.text._answer import Detokenizer
from moe_jax.text._tiktoken import NAME as TIKTOKEN
from moe_jax.text._tiktoken import read_tiktoken

MAX_TOKENIZER_BYTES = 256 << 20  # large ones take 40 MB
# What else a tokenizer may be stored in, and how transformers makes tokenizer.json of it.
_OTHER_TOKENIZERS = ("tokenizer.model", "tekken.json", "vocab.json")
_CONVERT = "transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


class Tokenizer:
    """Text to ids and back.

    Attributes:
        backend: the ``tokenizers.Tokenizer``.

    Raises:
        ValueError: neither tokenizer.json nor tiktoken.model, or one that cannot be used. ImportError: tokenizers is
            not installed.
    """

    def __init__(self, directory: Path):
        self.backend = _load(directory)
        vocabulary = self.backend.get_vocab() if "ByteFallback" in repr(self.backend.decoder) else {}
        self._byte_tokens = frozenset(i for token, i in vocabulary.items() if _BYTE_TOKEN.fullmatch(token))
        added = self.backend.get_added_tokens_decoder()
        self._special_tokens = frozenset(i for i, token in added.items() if token.special)

    def encode(self, text: str, where: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. where: its place, for errors.

        Raises:
            ValueError: it makes no token, or holds what Python may hold in a text and UTF-8 may not.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            problem = f"character {error.start} is an unpaired surrogate"
            raise ValueError(f"{where}: {problem}, which is not valid text; pass UTF-8") from None
        ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        if not ids:
            raise ValueError(f"{where} is empty after tokenization")
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """For the tokens of one answer."""

        def decode(ids: list[int]) -> str:
            return self.decode(ids, skip_special_tokens=skip_special_tokens)

        def is_left_out(token: int) -> bool:
            is_skipped = skip_special_tokens and token in self._special_tokens
            return is_skipped or self.backend.id_to_token(token) is None  # tables of models may have more rows

        return Detokenizer(decode, self._byte_tokens, is_left_out)

    def token_id(self, text: str) -> int | None:
        """The id of a token by its text; None for a text that is no token."""
        return self.backend.token_to_id(text)


def _load(directory: Path) -> Any:
    path = directory / "tokenizer.json"
    is_json = path.is_file()
    if not is_json and not (directory / TIKTOKEN).is_file():
        other = next((name for name in _OTHER_TOKENIZERS if (directory / name).is_file()), None)
        way = f"make it from {other}: {_CONVERT}" if other else "copy it from where the model was published"
        raise ValueError(f"{path} does not exist, and text needs it; {way}; or give token ids (--input-ids)")
    if find_spec("tokenizers") is None:
        why = "text needs the package tokenizers"
        raise ImportError(f"{why}: pip install tokenizers, or give token ids (--input-ids)")
    return _read_json(path) if is_json else read_tiktoken(directory)


def _read_json(path: Path) -> Any:
    from tokenizers import Tokenizer as Backend

    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise ValueError(f"{path}: larger than {MAX_TOKENIZER_BYTES} bytes, the most that is accepted for such a file")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the Rust side raises plain Exception
        raise ValueError(f"{path}: not a readable tokenizer: {' '.join(str(error).split())}") from None
    backend.no_truncation()  # a file may hold settings of a training run
    backend.no_padding()
    return backend
