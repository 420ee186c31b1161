"""tiktoken.model of Kimi-K2: ids beside the package tiktoken, texts out of a model, files that are refused."""

import base64
import json
import random

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

import moe_jax
from moe_jax.text._tiktoken import read_tiktoken
from moe_jax.text._tokenizer import Tokenizer as OurTokenizer
from tests.cli.test_main import run
from tests.support.checkpoints import writers
from tests.support.refusals import refuses

# As tokenization_kimi.py has it.
PATTERN = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"""
        r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"""
        r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
CORPUS = """The quick brown fox doesn't jump over 1234567 lazy dogs; HTTPServer's CamelCase, we'll see. DON'T SHOUT!
中文English混合，你好世界。北京市 Pascal の東京タワー、こんにちは Привет мир ñandú café naïve Ünïcödé 안녕하세요
    def f(x):\r\n\treturn x ** 2  # square\n\n\n----- ===== ----- aaaaaaaa abababab 😀😀 👩‍👩‍👧 ٣٤٥ ½ ² Ⅷ"""
# What splitting is about: endings, cases, marks, digits, blanks of many kinds, Han beside letters.
PIECES = ["'s", "'S", "'LL", "'ſ", " ", "  ", "\n", "\r\n", "\t", "\u3000", "\x85", "\u2028", "\u200b", "a", "A", "Ab"]
PIECES += [
    "é",
    "e\u0301",
    "ǅ",
    "ʰ",
    "ª",
    "ß",
    "İ",
    "ﬁ",
    "中",
    "文",
    "々",
    "〇",
    "𠀀",
    "あ",
    "ー",
    "1",
    "23",
    "٣",
    "½",
    "!",
    "?!",
]
PIECES += ["。", "-", "--", "aa", "<|im_end|>", "[BOS]", "[EOS]", "<|im", "😀", "\u200d"]
KIMI = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
SPECIAL = {0: ("[BOS]", True), 1: ("[EOS]", True), 2: ("<|im_end|>", True), 11: ("<|tool_call|>", False)}


def trained(size):
    """Tokens as bytes, in the order of their ranks, learnt from CORPUS."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([CORPUS] * 5, trainer)
    decode = {chr(b if chr(b) in alphabet else 0): b for b in range(256)}
    hidden = (b for b in range(256) if chr(b) not in alphabet)
    decode |= {chr(256 + n): byte for n, byte in enumerate(hidden)}
    found = tokenizer.get_vocab()
    return [bytes(decode[char] for char in token) for token in sorted(found, key=found.get)]


def ambiguous(size):
    """Tokens that are made of others in many ways, and one that is made of none, which no training would give."""
    draw = random.Random(0)
    tokens = [bytes([b]) for b in range(256)]
    draw.shuffle(tokens)
    pool = [bytes([b]) for b in b"ab- "]
    while len(tokens) < size:
        token = draw.choice(pool) + draw.choice(pool)
        if len(token) < 12 and token not in tokens:
            tokens.append(token)
            pool.append(token)
    return [*tokens, b" Pascal"]


def write(directory, tokens, **config):
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (directory / "tiktoken.model").write_text("".join(lines))
    added = {str(len(tokens) + at): dict(content=text, special=special) for at, (text, special) in SPECIAL.items()}
    config = dict(auto_map=KIMI, tokenizer_class="TikTokenTokenizer", added_tokens_decoder=added) | config
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module", params=[trained, ambiguous])
def pair(request, tmp_path_factory):
    """Our tokenizer, and tiktoken's of the same ranks."""
    tiktoken = pytest.importorskip("tiktoken")
    directory, tokens = tmp_path_factory.mktemp("kimi"), request.param(700)
    write(directory, tokens)
    named = {len(tokens) + at: text for at, (text, _) in SPECIAL.items()}
    special = {named.get(i, f"<|reserved_token_{i}|>"): i for i in range(len(tokens), len(tokens) + 258)}
    ranks = {token: rank for rank, token in enumerate(tokens)}
    judge = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)
    return read_tiktoken(directory), judge


def hostile(draw):
    kind = draw.randrange(4)
    if kind == 0:
        start = draw.randrange(len(CORPUS))
        return CORPUS[start : start + draw.randrange(120)]
    if kind == 1:  # any characters but surrogates
        codes = (draw.randrange(0x110000) for _ in range(draw.randrange(30)))
        return "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)
    return "".join(draw.choice(PIECES if kind == 2 else "ab- ") for _ in range(draw.randrange(40)))


def test_ids_beside_tiktoken(pair):
    ours, judge = pair
    draw = random.Random(3)
    for text in ("", CORPUS, *(hostile(draw) for _ in range(2000))):
        expected = judge.encode(text, allowed_special="all")
        assert ours.encode(text).ids == expected, text
        assert ours.decode(expected, skip_special_tokens=False) == judge.decode(expected) == text


def test_any_ids_decode_as_tiktoken_does(pair):
    """Halves of characters included."""
    ours, judge = pair
    rng = np.random.default_rng(0)
    for _ in range(200):
        ids = rng.integers(0, judge.n_vocab, 8).tolist()
        assert ours.decode(ids, skip_special_tokens=False) == judge.decode(ids)


@pytest.fixture
def directory(tmp_path):
    write(tmp_path, trained(400))
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    "text, expected",
    [
        ("中文English混合", ["中文", "English", "混合"]),
        ("北京市 Pascal", ["北京市", " Pascal"]),
        ("HTTPServer's we'LL", ["HTTPServer's", " we'LL"]),
        ("12345 a1", ["123", "45", " a", "1"]),
        ("x  y\n\n z", ["x", " ", " y", "\n\n", " z"]),
    ],
)
def test_splits(directory, text, expected):
    parts = read_tiktoken(directory).pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in parts] == expected


def test_special_tokens(directory):
    """They are one token each in a text; those that are not marked as special show in answers."""
    tokenizer = OurTokenizer(directory)
    first = len(trained(400))
    assert tokenizer.encode("[BOS]<|tool_call|>[EOS]", "text") == [first, first + 11, first + 1]
    assert tokenizer.decode([first, first + 11, first + 2]) == "<|tool_call|>"
    assert tokenizer.token_id("<|im_end|>") == first + 2
    assert tokenizer.token_id(f"<|reserved_token_{first + 5}|>") == first + 5


def test_texts_of_a_model(tmp_path, capsys):
    """LLM and ``moe-jax run`` on a Kimi-K2 of one layer, whose answers are those to the same ids."""
    tokens = trained(400)
    options = dict(vocab_size=len(tokens) + 258, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    mla = dict(kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, head_dim=8)
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=0)
    experts |= dict(n_group=1, topk_group=1, num_key_value_heads=2, intermediate_size=32, max_position_embeddings=64)
    ids = dict(eos_token_id=len(tokens) + 1, bos_token_id=None, pad_token_id=None)
    writers.save_random("DeepseekV3", tmp_path, **options, **mla, **experts, **ids)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    template = "{% for m in messages %}[BOS]{{ m.content }}<|im_end|>{% endfor %}"
    write(tmp_path, tokens, chat_template=template)
    llm = moe_jax.LLM(tmp_path, dtype="float32")
    (made,) = llm.generate("中文English", moe_jax.SamplingParams(temperature=0, max_tokens=5))
    given = read_tiktoken(tmp_path).encode("中文English").ids
    assert made.prompt_token_ids == given
    expected = np.asarray(moe_jax.generate(llm.model, [given], max_new_tokens=5))[0, len(given) :].tolist()
    (answer,) = made.outputs
    assert answer.token_ids == expected and answer.text == read_tiktoken(tmp_path).decode(expected)
    (talk,) = llm.chat([{"role": "user", "content": "fox"}], moe_jax.SamplingParams(max_tokens=1))
    first = len(tokens)
    assert talk.prompt_token_ids[0] == first and talk.prompt_token_ids[-1] == first + 2
    arguments = ("--prompt", "中文English", "--max-new-tokens", "5", "--temperature", "0", "--dtype", "float32")
    assert run(tmp_path, *arguments) == 0 and answer.text in capsys.readouterr().out


def replaced(line, text):
    def change(lines):
        lines[line : line + 1] = text
        return lines

    return change


@pytest.mark.parametrize(
    "change, words",
    [
        (replaced(3, ["not base64 3"]), r"tiktoken.model, line 4: b'not base64 3', expected a token in base64 and its"),
        (replaced(3, ["QQ=="]), "line 4: b'QQ==', expected a token in base64 and its rank"),
        (replaced(3, ["QQ== x"]), "line 4: b'QQ== x', expected"),
        (replaced(3, ["Q 3"]), "line 4: b'Q 3', expected"),
        (replaced(3, ["\u00fc\u00fc\u00fc\u00fc 3"]), "line 4: .*expected a token in base64"),
        (lambda lines: [*lines, f"{'QUFB' * 400} {len(lines)}"], "a token of 1200 bytes, expected at most 1024"),
        (lambda lines: lines[:3] + lines[4:], "line 4: rank 4, expected 3: ranks count up from 0"),
        (
            lambda lines: [*lines[:3], lines[2].replace(" 2", " 3"), *lines[4:]],
            "line 4: token .* is that of rank 2 too",
        ),
        (replaced(0, [" 0"]), "line 1: b' 0', expected"),
        (lambda lines: lines[:100], "no token for byte .*, nor for 155 others; expected one for each"),
        (lambda lines: [], "no token for byte 0x00, nor for 255 others"),
    ],
)
def test_damaged_ranks(directory, change, words):
    path = directory / "tiktoken.model"
    path.write_text("\n".join(change(path.read_text().splitlines())))
    refuses(ValueError, words, moe_jax.LLM, directory)


@pytest.mark.parametrize(
    "config, words",
    [
        (dict(auto_map=None), "auto_map.AutoTokenizer is None, expected one of tokenization_kimi.TikTokenTokenizer"),
        (dict(auto_map={"AutoTokenizer": ["other.Class", None]}), "auto_map.AutoTokenizer is 'other.Class', expected"),
        (dict(added_tokens_decoder=None), "added_tokens_decoder is None, expected an object of special tokens"),
        (dict(added_tokens_decoder={"12": {"content": "x"}}), "id '12', expected 400 to 657, the 258 behind the ranks"),
        (dict(added_tokens_decoder={"x": {"content": "x"}}), "id 'x', expected 400 to 657"),
        (dict(added_tokens_decoder={"400": "x"}), "token 400 is 'x', expected a content"),
        (dict(added_tokens_decoder={"400": {"content": 3}}), "token 400 is .*expected a content"),
        (
            dict(added_tokens_decoder={"400": {"content": "x", "special": "yes"}}),
            "token 400 is .*whether it is special",
        ),
        (
            dict(added_tokens_decoder={"400": {"content": "<x>"}, "401": {"content": "<x>"}}),
            "token 401 '<x>' is token 400 already; expected a text of its own",
        ),
        (dict(added_tokens_decoder={"400": {"content": "a"}}), "token 400 'a' is token .* already"),
    ],
)
def test_damaged_configs(directory, config, words):
    write(directory, trained(400), **config)
    refuses(ValueError, words, moe_jax.LLM, directory)


def test_missing_and_large_files(directory):
    (directory / "tokenizer_config.json").unlink()
    refuses(ValueError, "tokenizer_config.json does not exist; .*tiktoken.model needs its", moe_jax.LLM, directory)
    write(directory, trained(400))
    with open(directory / "tiktoken.model", "ab") as file:
        file.truncate((64 << 20) + 1)
    refuses(ValueError, "larger than 67108864 bytes", moe_jax.LLM, directory)


def test_tokenizer_json_goes_first(directory):
    """A checkpoint that has both, as after a conversion."""
    other = Tokenizer(models.WordLevel({"w0": 0}, "w0"))
    other.save(str(directory / "tokenizer.json"))
    assert OurTokenizer(directory).encode("中文", "text") == [0]
