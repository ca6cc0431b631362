"""Promise 4: processes are killed at random moments, and the run ends in the weights of one that nobody disturbed."""

import contextlib
import json
import random
import re
import signal
import threading
import time

import psutil
import pytest
from commands import start_duoka
from struck import STEPS, WITHIN_S, finish, make_case, same_weights, start, start_really, wait_for_step
from worlds import train_all

from duoka.cluster.fault_injection import living_ranks, strike, wait_for_ranks
from duoka.runs.events import read_steps
from duoka.runs.folder import RunFolder

HANGS_AFTER = 12
SHORT = 40  # steps of 8 epochs


@pytest.fixture(scope="module")
def case(tmp_path_factory, tiny_model):
    return make_case(tmp_path_factory.mktemp("crash"), tiny_model, epochs=8)


@pytest.fixture(scope="module")
def long_case(tmp_path_factory, tiny_model):
    """Of 70 steps, for many kills."""
    return make_case(tmp_path_factory.mktemp("crash-long"), tiny_model)


def strike_in_turn(run, dice, victims, hangs_after, done):
    """One blow per world: some steps after it has begun, and some time into a step."""
    old = []
    for victim in victims:
        ranks = wait_for_ranks(run, 2, lambda beat: not beat.is_slow, old_pids=old, within_s=WITHIN_S)
        step = hangs_after if victim == "hang" else ranks[1].step + dice.randint(2, 9)
        if done and victim != "hang":  # at the same step twice it would rightly be taken for no accident
            step = max(step, done[-1] + 4)  # what is recorded lags a step or two behind the heartbeat
        ranks = wait_for_step(run, step, old_pids=old)
        threading.Event().wait(dice.random() * 0.05)
        old = [beat.pid for beat in ranks.values()]
        if victim == "stop":
            strike([ranks[1]], "SIGSTOP")
        elif victim != "hang":
            strike(ranks.values() if victim == "all" else [ranks[victim]], "SIGKILL")
        done.append(ranks[1].step)


def survive(case, name, dice, victims, num_steps):
    """Kill the launcher once, and then strike the ranks of the same command with restarts; returns what it said."""
    folder, yaml = case
    run = RunFolder(folder / name)
    process = start_really(yaml, run.path)
    ranks = wait_for_step(run, dice.randint(3, 12))
    open_ports = [one for beat in ranks.values() for one in psutil.Process(beat.pid).net_connections("tcp")]
    listening = {one.laddr.ip for one in open_ports if one.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}, "the ranks of one machine listen to nobody else"
    process.kill()
    process.communicate()
    _, left = psutil.wait_procs([psutil.Process(b.pid) for b in living_ranks(run).values()], timeout=30)
    assert not left, f"the launcher was killed, and its ranks live on: {left}"

    # A world's first step may take long, so a hang in it is not seen for minutes. Where the machine was slow to kill,
    # the next world begins at a later checkpoint.
    saved = [int(path.name.removeprefix("step-")) for path in run.checkpoints.glob("step-*") if path.suffix != ".draft"]
    hangs_after = max([HANGS_AFTER, *(step + 2 for step in saved)])
    process = start_really(
        yaml, run.path, "--restarts", str(2 * len(victims)), "parallel.timeout=180000000", "faults.hang_after=6",
        DUOKA_INJECT=f"hang step={hangs_after + 1} rank=0" if "hang" in victims else "",
    )  # fmt: skip
    done = []
    threading.Thread(target=strike_in_turn, args=(run, dice, victims, hangs_after, done), daemon=True).start()
    code, output = finish(process)
    assert code == 0, output
    assert len(done) == len(victims), f"struck after steps {done} of {victims}: {output}"
    assert output.count("was killed by SIGKILL") == sum(victim not in ("stop", "hang") for victim in victims)
    assert f"restart {len(victims)} of {2 * len(victims)}" in output and "Traceback" not in output
    assert same_weights(run.path, folder / "whole"), f"struck after steps {done}"
    assert [event["step"] for event in read_steps(run)] == list(range(1, num_steps + 1))
    left = sorted(path.name for path in run.checkpoints.iterdir())
    assert len(left) == 2, f"two checkpoints are kept, and nothing half-written: {left}"
    return output


@pytest.mark.timeout(700)
def test_struck_runs_end_in_the_weights_of_an_undisturbed_one(case):
    output = survive(case, "struck", random.Random(7), ["hang", 1, "stop"], SHORT)
    assert "more than a day" in output, "a timeout of 5.7 years is accepted, and said"
    assert "rank 1 of 2 is stopped (SIGSTOP, a debugger, a frozen container) for" in output
    top = r"the run hangs after step \d+: rank 0 of 2 has not moved for"
    assert re.search(top, output), "the other one waits for it"
    assert "last collective: all_reduce of" in output and "stacks of 2 of 2 ranks" in output
    logs = case[0] / "struck" / "logs"
    stacks = [(logs / f"stacks-rank{rank:05d}.txt").read_text(encoding="utf-8") for rank in (0, 1)]
    assert "in strike_forward" in stacks[0] and "in backward" in stacks[1]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(5))
def test_killed_runs_end_in_the_same_weights_many_times(long_case, seed):
    dice = random.Random(seed)
    survive(long_case, f"killed-{seed}", dice, [dice.choice([0, 1, "all"]) for _ in range(4)], STEPS)


def rank_process(launcher, run, rank):
    """A rank's process from its first moment on, before it has a heartbeat: each start writes its pid into its log."""
    log = run.logs / f"rank{rank:05d}.log"
    while launcher.poll() is None:
        with contextlib.suppress(OSError, psutil.Error):
            pids = re.findall(rf"rank {rank}, pid (\d+),", log.read_text(encoding="utf-8"))
            child = psutil.Process(int(pids[-1])) if pids else None
            if child is not None and child.ppid() == launcher.pid:
                return child
    raise AssertionError("the launcher has ended")


def wait_while_it_starts(run, seconds):
    """Some seconds, but not beyond the first step: a fast machine has trained it all soon after."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and all(beat.step < 2 for beat in living_ranks(run).values()):
        time.sleep(0.005)


def kill_once(launcher, run, dice):
    """One rank, at a moment that the dice choose: anywhere from its start on, in a step, or in a save."""
    moment, rank, step = dice.choice(["start", "step", "save"]), dice.randrange(2), dice.randint(1, STEPS - 12)
    if moment == "start":
        wait_while_it_starts(run, dice.random() * 8)
    elif moment == "step":
        wait_for_step(run, step)
        time.sleep(dice.random() * 0.05)
    else:
        draft, deadline = run.checkpoints / f".step-{(step + 3) // 4 * 4:08d}.draft", time.monotonic() + WITHIN_S
        while not draft.exists() and time.monotonic() < deadline:
            time.sleep(0.0005)
        time.sleep(dice.random() * 0.03)
    rank_process(launcher, run, rank).kill()
    return f"rank {rank}, {moment}, {step}"


@pytest.mark.nightly
@pytest.mark.timeout(500)
@pytest.mark.parametrize("seed", range(20))
def test_twenty_of_twenty_killed_runs_restart_cleanly(long_case, seed):
    """One SIGKILL costs one restart, and nothing else can be told afterwards."""
    folder, yaml = long_case
    run = RunFolder(folder / f"once-{seed}")
    process = start_really(yaml, run.path, "--restarts", "3")
    struck = kill_once(process, run, random.Random(seed))
    code, output = finish(process)
    assert code == 0 and "Traceback" not in output, f"{struck}: {output}"
    assert output.count("was killed by SIGKILL") == output.count("restart 1 of 3 in") == 1, f"{struck}: {output}"
    assert "restart 2" not in output, f"{struck}: {output}"
    assert same_weights(run.path, folder / "whole"), struck
    assert [event["step"] for event in read_steps(run)] == list(range(1, STEPS + 1)), struck
    left = sorted(path.name for path in run.checkpoints.iterdir())
    assert len(left) == 2 and not any(name.startswith(".") for name in left), f"{struck}: {left}"


@pytest.mark.nightly
@pytest.mark.timeout(700)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("victim", ["launcher", "all"])
def test_the_same_command_goes_on_after_25_kills_of_the_launcher_or_of_all_ranks(long_case, victim, seed):
    folder, yaml = long_case
    run, dice = RunFolder(folder / f"again-{victim}-{seed}"), random.Random(seed)
    for number in range(5):
        process = start_really(yaml, run.path)
        ranks = [rank_process(process, run, rank) for rank in (0, 1)]
        if dice.random() < 0.3:  # while it starts
            wait_while_it_starts(run, dice.random() * 6)
        else:
            wait_for_step(run, 12 * number + dice.randint(1, 10))
            time.sleep(dice.random() * 0.05)
        for one in [process] if victim == "launcher" else ranks:
            one.kill()
        code, output = finish(process)
        assert code == (-signal.SIGKILL if victim == "launcher" else 5), f"kill {number}: {output}"
        _, left = psutil.wait_procs(ranks, timeout=30)
        assert not left, f"kill {number}: {left} live on"
    code, output = finish(start_really(yaml, run.path))
    assert code == 0 and "Traceback" not in output, output
    assert same_weights(run.path, folder / "whole")
    assert [event["step"] for event in read_steps(run)] == list(range(1, STEPS + 1))
    assert len(list(run.checkpoints.iterdir())) == 2, "two checkpoints are kept, and nothing half-written"


def launch(tmp_path, script, *flags):
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    return start_duoka("launch", "--output", tmp_path / "out", *flags, "script.py", cwd=tmp_path)


def test_the_same_failure_at_the_same_step_is_not_tried_again(tmp_path):
    script = "open('starts', 'a').write('x')\nraise ValueError('the file has 3 rows, not 4')\n"
    code, output = finish(launch(tmp_path, script, "--restarts", "5"))
    assert code == 5 and (tmp_path / "starts").read_text() == "xx", output
    assert "worker failed: rank 0 of 1 raised ValueError: the file has 3 rows, not 4" in output
    assert "the same failure at the same step twice: not started again (4 of 5 restarts left)" in output


def test_a_failure_that_does_not_repeat_costs_one_restart(tmp_path):
    script = (
        "import os, pathlib, sys\nseen = len(list(pathlib.Path().glob('start-*')))\n"
        "pathlib.Path(f'start-{seen}').touch()\n"
        "print('restart', os.environ['DUOKA_NUM_RESTARTS'], flush=True)\n"
        "assert seen > 0, 'the network was away'\n"
    )
    code, output = finish(launch(tmp_path, script, "--restarts", "5"))
    assert code == 0 and "restart 0" in output and "restart 1 of 5 in 1.0 s" in output and "restart 2" not in output
    status = json.loads((tmp_path / "out" / "status.json").read_text())
    assert status["state"] == "done" and status["cause"] == ""
    events = (tmp_path / "out" / "events" / "run.jsonl").read_text()
    assert "the network was away; restart 1 of 5" in events


def test_a_stop_between_two_worlds_ends_the_run(tmp_path):
    process = launch(tmp_path, "raise SystemExit(9)\n", "--restarts", "5")
    while "restart 1 of 5" not in process.said():
        assert process.poll() is None, process.said()
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 75 and "between two worlds" in output


CRASH_ONCE = """
import os, signal
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if os.environ["DUOKA_NUM_RESTARTS"] == "0" and dist.get_rank() == int(os.environ["VICTIM"]):
    os.kill(os.getpid(), signal.SIGKILL)
for _ in range(20):
    dist.all_reduce(total)
print("sum", total.item(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_rank_that_leaves_with_exit_code_0_is_named_and_not_the_one_that_lost_it(tmp_path, monkeypatch):
    monkeypatch.setenv("VICTIM", "1")
    script = CRASH_ONCE.replace("os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)")
    code, output = finish(launch(tmp_path, script, "--nproc", "2"))
    assert code == 5 and "worker failed: rank 1 of 2 left early, with exit code 0" in output, output
    assert "1 other rank was stopped because of it" in output


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(20))
def test_twenty_of_twenty_restarts_are_clean(tmp_path, monkeypatch, number):
    """Torch's own restart on gloo: 2 of 6 by default."""
    monkeypatch.setenv("VICTIM", str(number % 3))
    code, output = finish(launch(tmp_path, CRASH_ONCE, "--nproc", "3", "--restarts", "3"))
    assert code == 0 and "restart 2" not in output and output.count("sum ") == 1, output


@pytest.mark.timeout(500)
@pytest.mark.parametrize("way", ["parallel.strategy=fsdp", "parallel.sequence=2"])
def test_memory_short_where_layers_exchange_begins_a_world_with_less_at_once(case, way):
    """The step cannot be done again in place: a fresh world takes half, without being told to, to the same numbers."""
    folder, yaml = case
    roomy, short = (folder / f"{name}-{way.split('=')[1]}" for name in ("roomy", "short"))
    settings = [way, "lora.dropout=0", "train.max_steps=8"]
    train_all([(str(yaml), settings, str(roomy))], 2)
    code, output = finish(start(yaml, short, *settings, DUOKA_INJECT="oom step=7 rank=1"))
    assert code == 0, output
    assert "out of memory: a micro-batch of" in output and "going on from step-00000004" in output, output
    steps = [read_steps(RunFolder(one)) for one in (short, roomy)]
    assert [step["step"] for step in steps[0]] == list(range(1, 9))
    for mine, theirs in zip(*steps, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5) and mine["num_targets"] == theirs["num_targets"]
    most = json.loads((short / "memory.json").read_text(encoding="utf-8"))["most_tokens_at_once"]
    assert f"-> {most} tokens" in output
