"""`jfla finetune`: packed documents, LoRA and all parameters, runs that go on, and the folder that comes out."""

import io
import json
import pathlib

import numpy as np
import pytest
from flax import nnx
from rich.console import Console
from safetensors.numpy import load_file
from typer.testing import CliRunner

import jfla.nn
from jfla.cli import documents, finetune, train
from jfla.cli.app import app
from jfla.cli.tokenizer import TokenIds

STEPS = 6
SETTINGS = {
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "eos_token_id": 63,
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
}


@pytest.fixture(scope="module")
def inputs(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[pathlib.Path, pathlib.Path]:
    """A model and a file of documents that count upwards."""
    folder = tmp_path_factory.mktemp("inputs")
    jfla.nn.save_hf(jfla.nn.from_config(SETTINGS, rngs=nnx.Rngs(0)), folder / "model")
    (folder / "model" / "generation_config.json").write_text("{}")
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(24):
        start, length = rng.integers(40), rng.integers(5, 20)
        lines.append(json.dumps({"tokens": list(range(start, start + length))}))
    (folder / "data.jsonl").write_text("\n".join(lines))
    return folder / "model", folder / "data.jsonl"


def run(inputs: tuple[pathlib.Path, pathlib.Path], out: pathlib.Path, **options) -> str:
    """What was printed."""
    model, data = inputs
    console = Console(file=io.StringIO(), width=200)
    usual = {"rank": 4, "rows": 4, "time": 32, "learning_rate": 1e-2, "steps": STEPS}
    given = finetune.Options(model=model, data=data, out=out, **(usual | options))
    finetune.run(given, console)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def bits(out: pathlib.Path, step: int) -> list[float]:
    path = out / "checkpoints" / str(step) / "curves" / "metadata"
    return json.loads(path.read_text())["bits"]


@pytest.fixture(scope="module", autouse=True)
def _save_often():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetune, "SAVE_EVERY", 2)
        yield


@pytest.fixture(scope="module")
def finished(
    inputs, tmp_path_factory: pytest.TempPathFactory
) -> tuple[pathlib.Path, str]:
    """A run of LoRA that nobody interrupted."""
    out = tmp_path_factory.mktemp("finetune") / "finished"
    return out, run(inputs, out)


def test_lora_learns_and_leaves_a_published_model(inputs, finished):
    out, printed = finished
    curve = bits(out, STEPS)
    assert len(curve) == STEPS
    assert curve[-1] < curve[0] - 0.5
    for row in (
        "tokens of a step │ 4 x 32 = 128 │",
        "LoRA of rank 4 at",
        "chunk_gdn, B = 4, T = 32",
    ):
        assert row in " ".join(printed.split())
    assert (out / "loss.png").stat().st_size > 10_000
    before = load_file(inputs[0] / "model.safetensors")
    after = load_file(out / "model" / "model.safetensors")
    assert after.keys() == before.keys()
    trained = [name for name in before if (before[name] != after[name]).any()]
    assert trained
    assert all("proj" in name for name in trained)
    assert {name: x.dtype for name, x in before.items()} == {
        n: x.dtype for n, x in after.items()
    }
    assert (out / "model" / "generation_config.json").exists()
    # The folder is a model, and it is the one that was trained: it continues what it has seen.
    loaded = jfla.nn.load_hf(out / "model")
    assert loaded.config.published == (inputs[0] / "config.json").read_text()


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(inputs, finished, tmp_path):
    out = tmp_path / "out"
    save = train.Run._save

    def save_and_stop(self):
        save(self)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Run, "_save", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            run(inputs, out)
    assert not (out / "model").exists()
    assert "finetune: continuing after step 2" in run(inputs, out)
    whole, _ = finished
    assert bits(out, STEPS) == bits(whole, STEPS)
    weights = [(x / "model" / "model.safetensors").read_bytes() for x in (out, whole)]
    assert weights[0] == weights[1]
    # What is not trained is in the model's folder, not in the checkpoints.
    assert "a finished run of 6 steps" in run(inputs, out)
    with pytest.raises(ValueError, match="holds a run with rank = 4"):
        run(inputs, out, full=True)


@pytest.mark.slow
def test_all_parameters_over_several_devices(inputs, tmp_path):
    """Rows divided among four devices; float32 in training, the published dtype in the folder."""
    printed = " ".join(
        run(inputs, tmp_path / "out", full=True, steps=2, dtype="float32").split()
    )
    assert "devices │ 4 x " in printed
    assert "rows of a step are divided among them: 4 by 8 devices" in printed
    assert "trained │ all " in printed
    before = load_file(inputs[0] / "model.safetensors")
    after = load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert {name: x.dtype for name, x in before.items()} == {
        n: x.dtype for n, x in after.items()
    }
    name = "model.embed_tokens.weight"
    assert (before[name] != after[name]).any()


def test_packed_rows_hold_every_prediction_once(inputs):
    rng = np.random.default_rng(1)
    found = []
    for number, length in enumerate(rng.integers(2, 70, size=30)):
        tokens = 100 * number + np.arange(length)
        found.append(documents.Document(tokens, np.arange(length) >= length // 2))
    rows = documents.pack(found, 24, seed=3)
    pairs = []
    for tokens, scored, segments in rows:
        assert tokens.shape == (25,)
        assert (np.diff(segments[segments > 0]) >= 0).all()
        assert (segments > 0)[scored].all()
        assert scored.any()
        pairs += zip(tokens[:-1][scored], tokens[1:][scored])
    expected = []
    for tokens, predicted in found:
        expected += [(a, b) for a, b, p in zip(tokens, tokens[1:], predicted[1:]) if p]
    assert sorted(pairs) == sorted(expected)
    used = sum(len(document.tokens) for document in found)
    assert len(rows) * 24 < 1.3 * used
    batches = documents.batches(rows, 4, seed=0)
    first = [batches.batch(i).tokens for i in range(8)]
    again = documents.batches(rows, 4, seed=0)
    np.testing.assert_array_equal(again.batch(7).tokens, first[7])
    assert (first[0] != first[7]).any()


def test_packed_documents_have_the_loss_of_separate_ones(inputs):
    model = jfla.nn.load_hf(inputs[0], jfla.nn.hf_config(inputs[0] / "config.json"))
    found = [np.arange(3, 15), np.arange(20, 29), np.array([9, 9, 4])]
    whole = [documents.Document(x, np.ones(len(x), bool)) for x in found]
    (packed,) = documents.pack(whole, 32, seed=0)
    batch = type(packed)(*(x[None] for x in packed))
    total, count = 0.0, 0
    for tokens in found:
        row = np.zeros((1, 33), np.int32)
        row[0, : len(tokens)] = tokens
        scored = np.arange(32)[None] < len(tokens) - 1
        alone = type(packed)(row, scored, np.asarray(scored, np.int32))
        total += float(train.metrics(model, alone).bits) * (len(tokens) - 1)
        count += len(tokens) - 1
    assert batch.scored.sum() == count
    np.testing.assert_allclose(
        float(train.metrics(model, batch).bits), total / count, rtol=2e-3
    )


def test_prompts_are_not_predicted_and_texts_end(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(
        '{"text": "1 2 3"}\n\n{"prompt": [4, 5], "completion": "6 7"}\n{"tokens": [8]}\n'
    )
    first, second = documents.read(path, TokenIds("a test"), (9, 10), 11)
    assert first.tokens.tolist() == [1, 2, 3, 9]
    assert first.predicted.all()
    assert second.tokens.tolist() == [4, 5, 6, 7, 9]
    assert second.predicted.tolist() == [False, False, True, True, True]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: Expecting"),
        ("[1]", "line 2: a document must be"),
        ('{"body": "1"}', "line 2: a document must be"),
        ('{"text": 3}', "line 2: a text or a list of token ids was expected, got 3"),
        ('{"tokens": [1, true]}', "line 2: a text or a list of token ids was expected"),
        ('{"tokens": [1, 64]}', "line 2: tokens must be in 0 .. 63, got [64]"),
        ('{"text": "hello"}', 'line 2: a prompt must be token ids, as "12 7 301"'),
    ],
)
def test_a_line_that_cannot_be_is_named(inputs, tmp_path, line: str, said: str):
    path = tmp_path / "data.jsonl"
    path.write_text('{"tokens": [1, 2]}\n' + line)
    out = tmp_path / "out"
    arguments = [
        "finetune",
        "--model",
        str(inputs[0]),
        "--data",
        str(path),
        "--out",
        str(out),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert said in result.stderr
    assert not out.exists()


def test_a_file_of_nothing_is_refused(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"tokens": [1]}\n')
    with pytest.raises(ValueError, match="must hold documents of two tokens or more"):
        documents.read(path, TokenIds("a test"), (), 64)
