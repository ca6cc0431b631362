"""`duoka run`: how stages inherit, what counts as a change, and that all are checked before any of them trains."""

import json
import os
from pathlib import Path

import pytest
from tiny import write_conversations

from duoka.cli import run
from duoka.cluster.pipeline.execute import decide, run_command
from duoka.cluster.pipeline.manifest import Manifest, hold_pipeline
from duoka.cluster.pipeline.nodes import Nodes
from duoka.config.load import load_config
from duoka.config.pipeline import read_pipeline
from duoka.config.stage_names import score_parts
from duoka.errors import Faults

TEXT = """
data: {max_length: 256}
train: {global_batch: 8, precision: fp32, epochs: 1}
lora: {rank: 4}
log: {to: []}
pipeline:
  base: {model: {name: MODEL}, lora: null, data: {train: [talk.jsonl]}, optim: {lr: 1e-3}}
  mid:
    stage: mid
    lora: null
    data: {train: [talk.jsonl, {name: 'task:sort', epochs: 2}]}
    optim: {state: base}
  sft: {from: mid, data: {train: [chat.jsonl]}, optim: {lr: 2e-4}}
  other: {from: mid, data: {train: [chat.jsonl]}, optim: {lr: 3e-4}}
  score: {eval: [sort], of: [sft, other], limit: 5}
  ship: {export: model, of: sft, when: score.sft.sort > score.other.sort}
output: out
"""


@pytest.fixture
def place(tmp_path, monkeypatch, tiny_model):
    monkeypatch.chdir(tmp_path)
    write_conversations(Path("talk.jsonl"), 12)
    write_conversations(Path("chat.jsonl"), 12, seed=1)
    Path("p.yaml").write_text(TEXT.replace("MODEL", str(tiny_model)), encoding="utf-8")
    return tmp_path


def nodes_of(draft, *overrides, file="p.yaml", generations=None):
    folder = Path(draft)
    folder.mkdir(exist_ok=True)
    nodes = Nodes(read_pipeline(Path(file), overrides), folder.resolve(), generations or {})
    assert not nodes.faults, nodes.faults
    return nodes


def folders(draft, *overrides, **more):
    return {node.name: node.folder for node in nodes_of(draft, *overrides, **more).all()}


def faults_of(text):
    Path("bad.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(Faults) as caught:
        read_pipeline(Path("bad.yaml"))
    return str(caught.value)


def test_stages_inherit_and_begin_from_one_another(place):
    nodes = nodes_of("draft")
    configs = {name: node.loaded.config for name, node in nodes.by_name.items() if node.loaded}
    assert configs["base"].lora is None and configs["sft"].lora.rank == 4, "null takes a default block away"
    assert configs["mid"].train.global_batch == 8 and configs["mid"].data.targets == "all"
    names = {name: node.folder for name, node in nodes.by_name.items()}
    assert configs["mid"].model.name == configs["mid"].optim.state == str(nodes.draft / names["base"])
    assert configs["mid"].optim.lr == 1e-3, "mid goes on at the rates of the run before"
    assert configs["sft"].model.name == configs["other"].model.name == str(nodes.draft / names["mid"])
    assert [stage.name for stage in nodes.pipeline.stages] == ["base", "mid", "sft", "other", "score", "ship"]


def test_a_stages_own_file_is_the_same_config(place):
    nodes = nodes_of("draft")
    for node in nodes.all():
        if node.loaded is not None:
            Path("alone.yaml").write_text(nodes.yaml(node.spec, nodes.draft), encoding="utf-8")
            alone = load_config("alone.yaml").config
            assert alone.model_copy(update={"output": ""}) == node.loaded.config.model_copy(update={"output": ""})


def test_only_what_changes_results_changes_a_fingerprint(place):
    before = folders("a")
    text = Path("p.yaml").read_text(encoding="utf-8")
    Path("p.yaml").write_text("# said\n" + text.replace("2e-4", "0.0002"), encoding="utf-8")
    os.utime("talk.jsonl", (1, 1))
    assert folders("elsewhere") == before, "places, comments, spellings and times are no change"
    assert folders("b", "checkpoint.every=7", "train.micro_batch=2", "log.every=3") == before
    after = folders("c", "sft.optim.lr=1e-4")
    assert {name for name in before if before[name] != after[name]} == {"sft", "score", "ship"}
    assert folders("d", "sft.optim.lr=2e-4") == before, "what is taken back is found again"
    write_conversations(Path("talk.jsonl"), 12, seed=5)
    after = folders("e")
    assert all(before[name] != after[name] for name in before), "data that base learns is part of all"
    assert folders("f", generations={"sft": 1})["other"] == after["other"] != before["other"]


def test_it_says_what_changed_and_what_follows(place):
    manifest = Manifest(place / "out")
    manifest.root.mkdir()
    assert decide(nodes_of("a").by_name["sft"], manifest).why == "runs: it is new"
    for node in nodes_of("a").all():
        manifest.note(node, "done")
    decided = {name: decide(node, manifest).why for name, node in nodes_of("b", "sft.optim.lr=1e-4").by_name.items()}
    assert decided["sft"] == "runs: changed: optim.lr 0.0002 -> 0.0001"
    assert decided["score"] == "runs: follows from sft"
    again = nodes_of("c", generations={"mid": 1})
    assert decide(again.by_name["mid"], manifest).why == "runs: asked for by --from"
    assert decide(again.by_name["sft"], manifest).why == "runs: follows from mid"


def test_what_is_wrong_with_stages_is_said_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = faults_of(
        "pipeline:\n  a: {eval: [sort], of: [b], vocab: 3}\n  b: {from: c, model: demo}\n  'x y': {stage: sft}\n"
        "  d: {export: gguf q8_0, of: b}\n  e: {}\n  f: {from: b, when: good}\n"
    )
    for words in ("has no key vocab", "names a model of its own", "a stage is called 'x y'", "gguf q8_0 of b is not",
                  "stage e says nothing", "compares no score"):  # fmt: skip
        assert words in said, said
    said = faults_of(
        "pipeline:\n  a: {model: demo}\n  b: {from: bass}\n  s: {eval: [sort], of: [a]}\n  t: {of: x, eval: q}\n"
    )
    assert "b names x" not in said and "t names x, which is no stage" in said
    assert "wait for each other" in faults_of(
        "pipeline:\n  a: {optim: {state: b}}\n  b: {optim: {state: a}, from: null}\n"
    )
    assert "does not say of which stages" in faults_of("pipeline:\n  c: {chat: [Hi]}\n")
    assert "has no stages" in faults_of("model: demo\n")
    assert "when asks for s.a.x" in faults_of(
        "pipeline:\n  a: {model: demo}\n  s: {eval: [sort], of: a}\n  b: {from: a, when: s.a.x > 1}\n"
    )


def test_a_sweep_is_forks(place):
    text = Path("p.yaml").read_text(encoding="utf-8").split("  sft:")[0]
    Path("s.yaml").write_text(
        text + "  sft: {from: mid, data: {train: [chat.jsonl]}, sweep: {optim.lr: [1e-4, 3e-4]}}\n"
        "  score: {eval: [sort], of: [sft], limit: 5}\n",
        encoding="utf-8",
    )
    nodes = nodes_of("draft", file="s.yaml")
    rates = {node.name: node.loaded.config.optim.lr for node in nodes.all() if node.name.startswith("sft")}
    assert rates == {"sft@lr=0.0001": 1e-4, "sft@lr=0.0003": 3e-4}
    assert nodes.by_name["score"].spec.of == tuple(rates)


def swept(place, sweep, *, when="score.mid.sort > 0.5"):
    text = Path("p.yaml").read_text(encoding="utf-8").split("  sft:")[0]
    Path("s.yaml").write_text(
        text + f"  sft: {{from: mid, data: {{train: [chat.jsonl]}}, sweep: {sweep}}}\n"
        f"  score: {{eval: [sort], of: [mid, sft], limit: 5}}\n"
        f"  ship: {{export: model, of: mid, when: '{when}'}}\n",
        encoding="utf-8",
    )
    return [node for node in nodes_of("draft", file="s.yaml").all() if node.name.startswith("sft")]


def test_forks_over_paths_stand_beside_each_other(place):
    """A slash was a folder in a folder, and the command ended with a traceback."""
    Path("more").mkdir()
    for name in ("more/a.jsonl", "more-a.jsonl"):
        write_conversations(Path(name), 12)
    nodes = swept(place, "{data.train: [[more/a.jsonl], [more-a.jsonl]]}")
    assert [node.loaded.config.data.train[0].name for node in nodes] == ["more/a.jsonl", "more-a.jsonl"]
    assert [node.name for node in nodes] == ["sft@0,train=[more-a.jsonl]", "sft@1,train=[more-a.jsonl]"]
    assert [node.name for node in swept(place, "{data.train: [[more/a.jsonl], [chat.jsonl]]}")] == [
        "sft@train=[more-a.jsonl]", "sft@train=[chat.jsonl]"
    ]  # fmt: skip


def test_forks_over_long_lists_have_names_that_a_disk_takes(place):
    names = [f"chat-with-a-name-that-is-long-{number}.jsonl" for number in range(12)]
    for name in names:
        write_conversations(Path(name), 12)
    nodes = swept(place, f"{{data.train: [[{', '.join(names)}], [{', '.join(names[:11])}]]}}")
    assert [len(node.loaded.config.data.train) for node in nodes] == [12, 11]
    assert len({node.name for node in nodes}) == 2 and all(len(node.folder.encode()) < 150 for node in nodes)


def test_a_value_that_a_sweep_has_twice_is_one_fork(place):
    assert [node.name for node in swept(place, "{optim.lr: [1e-4, 0.0001, 3e-4]}")] == [
        "sft@lr=0.0001", "sft@lr=0.0003"
    ]  # fmt: skip


def test_a_gate_may_ask_for_the_score_of_a_fork(place):
    swept(place, "{optim.lr: [1e-4, 3e-4]}", when="score.sft@lr=0.0001.sort > score.mid.sort")
    nodes = nodes_of("draft", file="s.yaml")
    assert nodes.by_name["ship"].spec.when.left == "score.sft@lr=0.0001.sort"
    assert score_parts("score.sft@lr=0.0001.sort", nodes.by_name["score"].spec.of) == (
        "score", "sft@lr=0.0001", "sort"
    )  # fmt: skip
    Path("s.yaml").write_text(Path("s.yaml").read_text("utf-8") + "  x: {from: sft}\n", encoding="utf-8")
    with pytest.raises(Faults, match="is swept"):
        read_pipeline(Path("s.yaml"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("other.optim.lrr=1", "stage other: unknown key optim.lrr"),
        ("other.data.train=[nowhere.jsonl]", "no file 'nowhere.jsonl'"),
        ("sft.lora=null", "whose result is an adapter"),
    ],
)
def test_a_late_stages_fault_is_found_before_anything_starts(place, capsys, override, words):
    # Without its adapters `sft` trains in full: what begins from adapters is `last`.
    text = Path("p.yaml").read_text(encoding="utf-8")
    Path("p.yaml").write_text(text.replace("output: out", "  last: {from: other, lora: null}\noutput: out")
                              if "lora" in override else text, encoding="utf-8")  # fmt: skip
    override = override if "lora" not in override else "train.seed=1"
    assert run(["run", "p.yaml", override]) == 2
    said = capsys.readouterr().err
    assert words in said, said
    assert not list(Path("out").glob("*-*")), "nothing was started"


def test_a_fault_names_no_file_that_is_thrown_away(place, capsys):
    assert run(["run", "p.yaml", "data.max_length=256", 'other.train.global_batch="64 tokens"']) == 2
    said = capsys.readouterr().err
    assert "stage other: train.global_batch" in said and "other.yaml" not in said, said


def test_a_dry_run_checks_each_stage_and_writes_nothing(place, capsys):
    assert run(["run", "p.yaml", "--dry-run"]) == 0
    assert "no fault in 6 stages" in capsys.readouterr().out and not Path("out").exists()
    Path("chat.jsonl").write_text(json.dumps({"messages": [{"role": "tool", "content": "x"}]}) + "\n", encoding="utf-8")
    assert run(["run", "p.yaml", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "stage sft: " in said and "stage other: " in said


def test_a_second_run_on_the_folder_refuses(place, capsys):
    with hold_pipeline(Path("out")):
        assert run(["run", "p.yaml"]) == 2
    assert "another process runs the stages" in capsys.readouterr().err


def test_duoka_train_says_who_runs_a_file_of_stages(place, capsys):
    assert run(["train", "p.yaml"]) == 2
    assert "duoka run p.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR2"])
def test_a_request_to_stop_reaches_the_stage_that_is_under_way(monkeypatch, name):
    """`duoka run` died of a closed terminal, and with it at once, unsaved, the stage that was about to save."""
    stage = (
        "import os, signal, time; number = signal.Signals[NAME]; signal.signal(number, lambda *_: os._exit(75)); "
        "os.kill(os.getppid(), number); time.sleep(60)"
    )
    monkeypatch.setattr("duoka.cluster.pipeline.execute.CHILD", stage.replace("NAME", repr(name)))
    assert run_command() == 75
