"""tiktoken.model, as Kimi-K2 and its relatives ship it: byte-pair ranks without a word on how texts are split.

The splitting is in Python code beside the file, which comes with the checkpoint and is never run. It is known here for
the classes that tokenizer_config.json names in ``auto_map``. Of ranks and splitting a ``tokenizers.Tokenizer`` is made,
which cuts texts as the package tiktoken does.
"""

import base64
import binascii
from pathlib import Path
from typing import Any

from moe_jax._typing import Json
from moe_jax.loading._errors import read_json, shown

NAME, CONFIG = "tiktoken.model", "tokenizer_config.json"
MAX_RANKS_BYTES = 64 << 20  # Kimi-K2's file takes 3 MB
MAX_TOKEN_BYTES = 1024  # finding its merges takes the square of that
MAX_CONFIG_BYTES = 16 << 20
_KNOWN = ("tokenization_kimi.TikTokenTokenizer", "tokenization_moonshot.TikTokenTokenizer")
_RESERVED = 258  # ids behind the ranks, of which tokenizer_config.json names a few

# Runs of Han; words that end in lower or in upper case, with a character before and an English ending behind; up to
# three digits; punctuation; ends of lines; blanks, but for the last one before a word.
_UPPER, _LOWER = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_BEFORE, _ENDING = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"\p{Han}+",
        f"{_BEFORE}{_UPPER}*{_LOWER}+{_ENDING}",
        f"{_BEFORE}{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def read_tiktoken(directory: Path) -> Any:
    """The ``tokenizers.Tokenizer`` that tiktoken.model and tokenizer_config.json of a checkpoint describe.

    Raises:
        ValueError: the splitting is not known, or a file is damaged or too large.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    path = directory / NAME
    config = _read_config(directory / CONFIG, path)
    ranks = _read_ranks(path)
    added = _added_tokens(config, len(ranks), directory / CONFIG)
    spelt = {token: "".join(map(_LETTERS.__getitem__, token)) for token in ranks}
    vocabulary = {spelt[token]: rank for token, rank in ranks.items()}
    merges = [(spelt[left], spelt[right]) for left, right in _merges(ranks)]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, by_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    # Each takes the next free id; what is not special is shown in answers.
    tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text, special in added.values()])
    for index, (text, _) in added.items():
        if tokenizer.token_to_id(text) != index:
            problem = f"token {index} {shown(text)} is token {tokenizer.token_to_id(text)} already"
            raise ValueError(f"{directory / CONFIG}: added_tokens_decoder: {problem}; expected a text of its own")
    return tokenizer


def _letters() -> list[str]:
    """The character that stands for each byte in the byte-level tokenizers of GPT-2 and later."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


_LETTERS = _letters()


def _read_config(path: Path, ranks: Path) -> Json:
    if not path.is_file():
        raise ValueError(f"{path} does not exist; {ranks} needs its special tokens")
    config = read_json(path, max_bytes=MAX_CONFIG_BYTES)
    classes = config.get("auto_map")
    stated = classes.get("AutoTokenizer") if isinstance(classes, dict) else None
    name = stated[0] if isinstance(stated, list) and stated else stated
    if name not in _KNOWN:
        raise ValueError(
            f"{path}: auto_map.AutoTokenizer is {shown(name)}, expected one of {', '.join(_KNOWN)}: how other classes "
            f"split a text is not in {NAME}; make tokenizer.json, or give token ids (--input-ids)"
        )
    return config


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Token -> rank, which is its id: 0, 1, 2 and so on in the order of lines."""
    if not path.is_file():
        raise ValueError(f"{path} is no file; expected Kimi's tiktoken.model, or a tokenizer.json in its place")
    if path.stat().st_size > MAX_RANKS_BYTES:
        raise ValueError(f"{path}: larger than {MAX_RANKS_BYTES} bytes, the most that is accepted for such a file")
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        where, words = f"{path}, line {number}", line.split()
        try:
            coded, rank = words
            token, found = base64.b64decode(coded, validate=True), int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"{where}: {shown(line[:40])}, expected a token in base64 and its rank") from None
        if found != len(ranks):
            raise ValueError(f"{where}: rank {found}, expected {len(ranks)}: ranks count up from 0")
        if len(token) > MAX_TOKEN_BYTES:
            problem = f"a token of {len(token)} bytes, expected at most {MAX_TOKEN_BYTES}"
            raise ValueError(f"{where}: {problem}; the file is damaged")
        if not token or token in ranks:
            problem = f"is that of rank {ranks[token]} too" if token else "is empty"
            raise ValueError(f"{where}: token {shown(token)} {problem}; the file is damaged")
        ranks[token] = found
    if lacking := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(
            f"{path}: no token for byte {lacking[0]:#04x}, nor for {len(lacking) - 1} others; expected one for each; "
            "the file is damaged or incomplete"
        )
    return ranks


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Pairs of tokens that are a token, those first that make the token of the lowest rank."""
    found = []
    for token in ranks:  # in the order of ranks
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        found += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return found


def _added_tokens(config: Json, first: int, path: Path) -> dict[int, tuple[str, bool]]:
    """Id -> (text, whether it is special) of all ids behind the ranks."""
    stated, where = config.get("added_tokens_decoder"), f"{path}: added_tokens_decoder"
    if not isinstance(stated, dict):
        raise ValueError(f"{where} is {shown(stated)}, expected an object of special tokens by their ids")
    added = {index: (f"<|reserved_token_{index}|>", False) for index in range(first, first + _RESERVED)}
    for key, token in stated.items():
        index = int(key) if key.isascii() and key.isdigit() and len(key) < 10 else -1
        if index not in added:
            ids = f"{first} to {first + _RESERVED - 1}, the {_RESERVED} behind the ranks"
            raise ValueError(f"{where}: id {shown(key)}, expected {ids} of {NAME}")
        content, special = (token.get(name) for name in ("content", "special")) if isinstance(token, dict) else (0, 0)
        if not isinstance(content, str) or not content or not isinstance(special, bool | None):
            raise ValueError(f"{where}: token {index} is {shown(token)}, expected a content, and whether it is special")
        added[index] = content, bool(special)
    return added
