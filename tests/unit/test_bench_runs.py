"""`duoka bench run`: rows of measured runs, an efficiency that its own times give, and what did not run said."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from commands import run_duoka
from tiny import write_conversations

from duoka.cli.bench_runs import Case, chart, find_problem, table, with_efficiency

ONE = Case(1, "auto", 0, "single", 2.0, 1000.0, peak_bytes=1 << 30, planned_bytes=1 << 30)
TWO = Case(
    2, "ddp", 0, "ddp2", 1.25, 1720.0, peak_bytes=1 << 30, planned_bytes=1 << 30, sent_bytes=5e6, planned_step_s=1.2
)
NOT = Case(4, "hsdp", problem="config error: parallel.shard_ranks is missing")


def test_efficiency_is_of_measured_times_alone():
    one, two, none = with_efficiency([ONE, TWO, NOT])
    assert (one.efficiency, two.efficiency, none.efficiency) == (1.0, 0.86, None)
    assert with_efficiency([TWO])[0].efficiency is None
    assert "no efficiency without one process" in table([TWO], 8, 0)[-1]


def test_what_did_not_run_and_what_cores_do_not_give_is_said():
    lines = table(with_efficiency([ONE, TWO, NOT]), 2, 0)
    assert "config error: parallel.shard_ranks is missing" in lines[3]
    assert lines[-1].startswith("note: 4 processes share 2 cores") and "no speed-up" in lines[-1]
    assert not [line for line in table([ONE, TWO], 2, 0) if line.startswith("note")]
    assert not [line for line in table([ONE, TWO, NOT], 2, 4) if line.startswith("note")], "GPUs are no cores"


def test_each_batch_is_compared_with_one_process_at_that_batch_and_a_low_efficiency_has_a_reason():
    cases = [
        replace(ONE, batch=8), replace(TWO, batch=8, tokens_per_s=1200.0, wait_share=0.4),
        replace(ONE, batch=32, tokens_per_s=1500.0), replace(TWO, batch=32, tokens_per_s=2850.0, wait_share=0.05),
        replace(TWO, batch=64),
    ]  # fmt: skip
    found = with_efficiency(cases)
    assert [one.efficiency for one in found] == [1.0, 0.6, 1.0, 0.95, None]
    lines = table(found, 2, 0)
    assert "1.20x" in lines[2] and "60%" in lines[2] and "40%" in lines[2] and "1.90x" in lines[4]
    (why,) = [line for line in lines if line.startswith("note")]
    assert "at 8 samples a step reaches 60% of 2 times one process: 40% of a step waits" in why and "4.77 MiB" in why
    alone = table(with_efficiency([ONE, replace(TWO, tokens_per_s=1200.0)]), 2, 0)[-1]
    assert "each computes slower beside the others" in alone
    crowded = table(with_efficiency([ONE, replace(TWO, tokens_per_s=1200.0)]), 1, 0)
    assert [line for line in crowded if line.startswith("note")] == crowded[-1:] and "share 1 cores" in crowded[-1]


def test_more_than_sharing_can_give_is_not_shown_without_a_word():
    (note,) = table(with_efficiency([ONE, replace(TWO, tokens_per_s=2500.0)]), 2, 0)[3:]
    assert "2 x ddp is 2.50 times one process, more than sharing its work can give" in note
    assert len(table(with_efficiency([ONE, replace(TWO, tokens_per_s=2200.0)]), 2, 0)) == 3


def test_the_fault_is_found_among_notes():
    said = "/tmp/chats.jsonl: messages; 40 of 40 kept\nnote: fine\nconfig error: lora.rank is 0\n  write:   rank: 8\n"
    assert find_problem(said, 2) == "config error: lora.rank is 0"
    assert find_problem("first\nlast\n", 1) == "last" and find_problem("", 9) == "exit code 9"


def test_the_picture_has_a_bar_for_each_that_ran():
    root = ET.fromstring(chart(with_efficiency([ONE, TWO, NOT])))
    bars = [float(one.get("width")) for one in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert len(bars) == 2 and bars[1] == pytest.approx(1.72 * bars[0], rel=1e-3)


@pytest.mark.timeout(300)
def test_a_config_is_measured_on_processes_of_its_own(tmp_path, tiny_model):
    data = write_conversations(tmp_path / "chats.jsonl", 40)
    yaml = tmp_path / "run.yaml"
    sections = f"data: {{train: [{data}]}}\ntrain: {{global_batch: 4}}\n"
    yaml.write_text(f"model: {tiny_model}\n{sections}output: {tmp_path}/out\n")
    chosen = ("--nproc", "2", "--strategies", "fsdp,hsdpp", "--batches", "6", "--steps", "1")
    done = run_duoka("bench", "run", yaml, *chosen, "--json", "--svg", tmp_path / "speeds.svg", timeout=280)
    assert done.returncode == 0, done.stderr
    two, wrong = json.loads(done.stdout)
    assert two["layout"] == "fsdp2" and two["sent_bytes"] > 0 and two["peak_bytes"] > 0 < two["planned_bytes"]
    assert two["batch"] == 6 and 0 < two["wait_share"] < 1
    assert two["tokens_per_s"] > 0 and two["efficiency"] is None
    assert "parallel.strategy" in wrong["problem"] and wrong["step_s"] is None
    assert (tmp_path / "speeds.svg").exists() and not (tmp_path / "out").exists()
