"""Where a model lies already: what nodes know before rank 0 prepares anything."""

import pytest

from duoka.config.schema_learning import ModelConfig
from duoka.hub.models import known_folder


@pytest.mark.parametrize("place", ["here", "of a run"])
def test_a_folder_is_known(tmp_path, place):
    model = tmp_path / "model"
    inside = model if place == "here" else model / "final"
    inside.mkdir(parents=True)
    (inside / "config.json").write_text('{"model_type": "llama"}')
    assert known_folder(ModelConfig(name="model"), tmp_path) == inside.resolve()


@pytest.mark.parametrize("model", [{"name": "./nothing-here"}, {"name": "nobody/nothing"}, {"depth": 2}])
def test_what_is_not_here_is_not_fetched_and_not_refused(tmp_path, monkeypatch, model):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert known_folder(ModelConfig(**model), tmp_path) is None
