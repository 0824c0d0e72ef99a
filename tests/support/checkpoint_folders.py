"""Folders of checkpoints that tests write, damage and compare."""

import json

import numpy as np
from safetensors.numpy import load_file, save_file

from support import golden_models


def tensors_of(folder):
    return {
        name: x
        for file in folder.glob("*.safetensors")
        for name, x in load_file(file).items()
    }


def settings_of(family):
    return json.loads((golden_models.FOLDER / family / "config.json").read_text())


def write(folder, settings, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "model.safetensors")
    return folder


def assert_equal(got, expected):
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert got[name].dtype == x.dtype, name
        np.testing.assert_array_equal(got[name], x, err_msg=name)
        assert got[name].shape == x.shape, name
