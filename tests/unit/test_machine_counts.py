"""How many machines a world may have, where the config has no layout for every number of them."""

import pytest
from test_meeting import seat  # noqa: F401

from duoka.cli.prepare import machine_counts
from duoka.cluster.elastic import ComingAndGoing
from duoka.cluster.meeting import Rules
from duoka.cluster.restart import LocalLauncher
from duoka.config.load import load_config
from duoka.plan.hardware import read_machine


def test_a_world_has_as_many_machines_as_the_config_has_a_layout_for(seat):  # noqa: F811
    """With `tensor: 4` a machine that was lost ended the run: the others were refused by its own config."""
    table = seat(1, 4, counts=(2, 4))
    table.join("host", is_host=True)
    assert table.go("host") is None and "1 of at least 2 machines are here" in table.said("host")
    table.join("one")
    assert table.go("host") == (1, 0, 2)
    table.join("two")
    table.tend()
    assert table.last("host", "stop") is None, "three learn as two do"
    table.join("three")
    table.tend()
    assert table.last("host", "stop") == 1
    for first, name in ((0, "host"), (2, "one")):
        table.ended(name, 75, first, 1)
    assert table.go("three") == (2, 3, 4)
    table.leave("one")
    for first, name in ((0, "host"), (4, "two"), (6, "three")):
        table.ended(name, 5, first, 2)
    assert table.go("host") == (3, 0, 2) and table.go("three") == (2, 3, 4), "the newest of three waits"
    table.leave("two")
    table.ended("host", 5, 0, 3)
    assert table.go("three") == (4, 1, 2)
    table.leave("three")
    table.ended("host", 5, 0, 4)
    assert table.go("host") == (4, 0, 2) and table.meeting.verdict is None, "it waits for another one"


@pytest.mark.parametrize(
    "parallel, num_processes, expected",
    [
        ("{}", 1, (1, 2, 3, 4)),
        ("{strategy: zero3}", 1, (1, 2, 3, 4)),
        ("{tensor: 2}", 1, (2, 4)),
        ("{tensor: 2}", 2, (1, 2, 3, 4)),
        ("{sequence: 2, pipeline: 2}", 1, (4,)),
        ("{strategy: hsdp, shard_ranks: 2}", 1, (1, 2, 4)),
    ],
)
def test_the_config_tells_with_how_many_machines_it_can_be_trained(
    parallel, num_processes, expected, tiny_model, tmp_path, capsys
):
    yaml = tmp_path / "run.yaml"
    yaml.write_text(f"model: {tiny_model}\ndata: {{train: [identity]}}\nparallel: {parallel}\noutput: {tmp_path}/out\n")
    loaded = load_config(str(yaml))
    launcher = ComingAndGoing(Rules(1, 4, "10.0.0.1", 29500))
    assert machine_counts(loaded, read_machine(), launcher, num_processes) == expected
    said = capsys.readouterr().err
    assert ("can train together" in said) == (len(expected) < 4), said
    assert machine_counts(loaded, read_machine(), LocalLauncher(), num_processes) == ()
