"""n samples are n: n = 1..130 on 1, 2 and 4 processes, however the data is read; ranks without samples go along."""

import json

import pytest
from verbs import evaluate_all
from worlds import run_world


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_number_of_samples_is_measured_as_it_is(tmp_path, size):
    counts = list(range(1, 131)) if size == 1 else [*range(1, 40), 63, 64, 65, 99, 127, 128, 129, 130]
    run_world(size, evaluate_all, counts, str(tmp_path))
    for rank in range(size):
        seen = json.loads((tmp_path / f"evaluate-{rank}.json").read_text())
        assert seen == {"wrong": [], "size": size}
