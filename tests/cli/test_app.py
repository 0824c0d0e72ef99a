"""The command line: what it says about the machine, about wrong options, and when its packages are missing."""

import importlib.util
import pathlib
import sys

import jax
import pytest
from typer.testing import CliRunner

from jfla import cli, pallas
from jfla.cli.app import app


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(
        app, list(arguments), env={"COLUMNS": "200", "TERM": "dumb"}
    )
    return result.exit_code, " ".join(result.output.split())


def test_info_names_versions_devices_and_the_choice_of_every_op():
    code, output = invoke("info")
    assert code == 0
    assert jax.__version__ in output
    assert str(jax.devices()[0]) in output
    for op in ("chunk_kda", "chunk_gdn", "recurrent_kda", "recurrent_gdn"):
        assert f"{op} │ bfloat16 │ xla │ pallas: " in output


def test_info_gives_the_choice_and_the_reason_of_explain():
    """Nothing is compiled: the choice is that of a Hopper GPU, also on a machine without one."""
    with pallas.compiling_for("9.0"):
        _, output = invoke("info")
    for op in ("chunk_kda", "chunk_gdn", "recurrent_kda", "recurrent_gdn"):
        assert f"{op} │ bfloat16 │ pallas │ Hopper kernels" in output
    refused = "pallas: q is float32; the kernels take bfloat16 and float16"
    for op in ("chunk_kda", "chunk_gdn"):
        assert f"{op} │ float32 │ xla │ {refused}" in output
    for op in ("recurrent_kda", "recurrent_gdn"):
        assert f"{op} │ float32 │ pallas │ Hopper kernels" in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--op", "mamba"], ("--op", "'mamba' is not one of 'kda', 'gdn'")),
        (["--steps", "0"], ("--steps", "1")),
        (
            ["--mesh", "data=2,time=4"],
            (
                "--mesh",
                "axes must be data, sequence, model, got 'time' in 'data=2,time=4'",
            ),
        ),
        (
            ["--mesh", "data=2,data=4"],
            ("--mesh", "an axis must occur once, got data again"),
        ),
        (
            ["--mesh", "data=two"],
            ("--mesh", "data must be a whole number above 0, got 'two'"),
        ),
        (["--mesh", "data"], ("--mesh", "data must be a whole number above 0, got ''")),
        (
            ["--mesh", "data=2,sequence=2"],
            ("--mesh", "must be the number of devices, 8, got 2 x 2 x 1 = 4"),
        ),
        (["--mesh", "model=8"], ("--mesh", "model must divide the 2 heads, got 8")),
        (
            ["--process-id", "1"],
            ("--process-id", "--coordinator must be given with it, got 1"),
        ),
        (
            ["--coordinator", "here"],
            ("--coordinator", "must be HOST:PORT or auto, got 'here'"),
        ),
        (
            ["--coordinator", "here:1234", "--process-id", "1"],
            (
                "--coordinator",
                "an address must come with --num-processes and --process-id",
            ),
        ),
        (
            ["--coordinator", "here:1234", "--num-processes", "2", "--process-id", "2"],
            ("--process-id", "it must be in 0 .. 1, got 2"),
        ),
        (
            ["--coordinator", "auto", "--process-id", "1"],
            (
                "--coordinator",
                "auto must come without --num-processes and --process-id",
            ),
        ),
        (["--seed", "-1"], ("--seed", "0")),
        (["--implementation", "triton"], ("--implementation", "'pallas', 'xla'")),
        (
            ["--implementation", "pallas"],
            ("--implementation", "pallas cannot run this model here: "),
        ),
    ],
)
def test_wrong_options_are_named(arguments: list[str], said: tuple[str, ...], tmp_path):
    code, output = invoke("demo", "--out", str(tmp_path / "out"), *arguments)
    assert code == 2
    for part in said:
        assert part in output
    assert not (tmp_path / "out").exists()


def test_a_folder_of_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    code, output = invoke("demo", "--out", str(tmp_path))
    assert code == 2
    assert "is not empty and not a folder of such a run" in output
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in ("typer", "grain") else found(name),
    )
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 1
    message = capsys.readouterr().err
    assert "typer, grain" in message
    assert "pip install 'jfla[cli]'" in message


@pytest.mark.parametrize(
    "arguments",
    [("bench", "--readme", "check"), ("bench-merge", __file__, "--out", "out.json")],
)
def test_without_a_clone_the_benchmarks_say_where_they_are(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    """As in an installed wheel, where there is no package of that name."""
    for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(
        sys,
        "path",
        [path for path in sys.path if not (pathlib.Path(path) / "benchmarks").exists()],
    )
    monkeypatch.setattr(sys, "path_importer_cache", {})
    code, output = invoke(*arguments)
    assert code == 1
    assert "The benchmarks run from a clone: git clone https://" in output
    assert "uv run jfla bench" in output
