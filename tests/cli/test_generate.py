"""`jfla generate`: the authors' tokens, text by a tokenizer, recommended sampling, and what it refuses."""

import json
import pathlib
import shutil
import sys
import types

import pytest
from support import golden_models
from typer.testing import CliRunner

from jfla.cli import published
from jfla.cli.app import app

MODEL = golden_models.FOLDER / "qwen3_5"


def invoke(*arguments: str) -> tuple[int, str, str]:
    """(status, standard output, standard error in one line)"""
    result = CliRunner().invoke(
        app, ["generate", *arguments], env={"COLUMNS": "200", "TERM": "dumb"}
    )
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy that a test may change."""
    return shutil.copytree(MODEL, tmp_path / "model")


def test_greedy_tokens_are_the_authors(monkeypatch: pytest.MonkeyPatch):
    golden = golden_models.golden("qwen3_5")
    expected = golden["generated_ids"].tolist()
    # Their continuation does not end at a stop token.
    monkeypatch.setattr(published, "stop_tokens", lambda *_: ((), "a test"))
    prompt = ", ".join(
        map(str, golden["input_ids"][0, golden["attention_mask"][0] == 1])
    )
    arguments = (
        "--prompt",
        prompt,
        "--max-tokens",
        str(len(expected)),
        "--temperature",
        "0",
    )
    code, out, notes = invoke("--model", str(MODEL), *arguments)
    assert code == 0, notes
    assert [int(token) for token in out.split()] == expected
    assert f"{len(expected)} tokens, ended by --max-tokens" in notes
    assert "tokens/s" in notes
    for row in (
        "model │ qwen3_5 │ config.json: layers 3 GDN, 1 attention",
        "dtype │ float32 │ as published",
        "tokenizer │ token ids │",
        "temperature │ 0.0 │ --temperature",
        "recurrent_gdn, B = 1, T = 1 │ xla │ pallas: K = 16",
    ):
        assert row in notes


class ByteTokenizer:
    """Stands for a tokenizer of the package `tokenizers`: bytes, and 255 as the end of a text."""

    @staticmethod
    def from_file(path: str) -> "ByteTokenizer":
        json.loads(pathlib.Path(path).read_text())
        return ByteTokenizer()

    def encode(self, text: str, add_special_tokens: bool) -> types.SimpleNamespace:
        return types.SimpleNamespace(ids=list(text.encode()))


class ByteStream:
    def __init__(self, skip_special_tokens: bool):
        assert skip_special_tokens

    def step(self, tokenizer: ByteTokenizer, token: int) -> str | None:
        return chr(token) if token < 128 else None


@pytest.fixture
def tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    decoders = types.SimpleNamespace(DecodeStream=ByteStream)
    package = types.SimpleNamespace(Tokenizer=ByteTokenizer, decoders=decoders)
    monkeypatch.setitem(sys.modules, "tokenizers", package)
    monkeypatch.setitem(sys.modules, "tokenizers.decoders", decoders)


def test_text_recommended_sampling_and_stop_tokens(folder: pathlib.Path, tokenizers):
    (folder / "tokenizer.json").write_text("{}")
    stop = list(range(128, 256))
    recommended = {
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 0,
        "eos_token_id": stop,
    }
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    code, out, notes = invoke(
        "--model", str(folder), "--prompt", "ab", "--dtype", "bfloat16"
    )
    assert code == 0, notes
    text = out[:-1]
    assert "tokenizer │ tokenizer.json │ tokenizers is installed" in notes
    assert "temperature │ 0.5 │ generation_config.json" in notes
    assert "top-k │ all │ the whole distribution" in notes
    assert "dtype │ bfloat16 │ --dtype" in notes
    assert "eos_token_id of generation_config.json" in notes
    assert "2 tokens read" in notes
    # The token that ends the text is counted and not shown.
    assert f"{len(text) + 1} tokens, ended by a stop token" in notes


def test_a_published_sixteen_bit_dtype_is_widened_on_a_cpu(folder: pathlib.Path):
    path = folder / "config.json"
    path.write_text(
        path.read_text().replace('"dtype": "float32"', '"dtype": "bfloat16"')
    )
    plan = published.Plan()
    assert plan.add_dtype(None, published.read_config(folder)) == "float32"
    assert plan.rows == [
        ("dtype", "float32", "CPUs are faster in it than in bfloat16, as published")
    ]
    assert plan.add_dtype("float16", published.read_config(folder)) == "float16"


@pytest.mark.parametrize(
    ("files", "arguments", "said"),
    [
        ({}, {"--prompt": "hello"}, "token ids, as \"12 7 301\", got 'hello': "),
        ({}, {"--prompt": "12 -3"}, "a prompt must be token ids"),
        ({}, {"--prompt": ""}, "a prompt must be tokens in 0 .. 255, got none"),
        ({}, {"--prompt": "3 256"}, "a prompt must be tokens in 0 .. 255, got [256]"),
        ({}, {"--top-p": "2"}, "top_p must be None or above 0 and at most 1, got 2.0"),
        ({}, {"--top-k": "257"}, "top_k must be None or in 1 .. 256, got 257"),
        (
            {},
            {"--temperature": "-1"},
            "'--temperature': Input should be greater than or equal to 0",
        ),
        ({}, {"--model": "nowhere"}, "nowhere must be a folder with config.json"),
        (
            {},
            {"--implementation": "pallas"},
            '--implementation: implementation="pallas" cannot take this call: K = 16',
        ),
        (
            {"tokenizer.json": "{}"},
            {"--prompt": "a"},
            "needs tokenizers: pip install tokenizers",
        ),
        (
            {"vocab.json": "{}"},
            {"--prompt": "a"},
            "needs transformers: pip install transformers",
        ),
        (
            {"generation_config.json": "[]"},
            {},
            "generation_config.json must hold a JSON object",
        ),
        (
            {"generation_config.json": '{"eos_token_id": "x"}'},
            {},
            "must be tokens in 0 .. 255, got 'x'",
        ),
        (
            {"generation_config.json": '{"do_sample": true, "top_p": "x"}'},
            {},
            "must be a number, got 'x'",
        ),
    ],
)
def test_what_cannot_be_is_said(
    folder: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict,
    arguments: dict,
    said: str,
):
    for package in ("tokenizers", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    for name, text in files.items():
        (folder / name).write_text(text)
    given = {"--model": str(folder), "--prompt": "1", **arguments}
    code, out, notes = invoke(*(word for pair in given.items() for word in pair))
    assert code in (1, 2)
    assert said in notes.replace("│ ", "").replace(str(folder) + "/", "")
    assert out == ""
