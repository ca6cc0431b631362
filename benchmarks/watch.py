"""What watching costs: 100,000 steps and 1,024 ranks' logs, written by a script, followed by `duoka board`.

    python benchmarks/watch.py FOLDER            # 0.8 GiB of logs are written there, and stay until they are removed

Prints a table for benchmarks/watch.md. Times are those of this machine at this moment; memory is the server's own peak.
"""

from __future__ import annotations

import http.client
import json
import os
import platform
import sys
import time
from pathlib import Path
from urllib.parse import urlencode

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

STEPS, RANKS, RANK_STEPS = 100_000, 1024, 2500
KEYS = ["loss", "grad_norm", "lr", "tokens_per_s", "step_s", "wait_s", "memory_bytes"]
FOLLOW_S = 60.0


def main(folder: Path) -> None:
    from written_runs import write_run

    from duoka.runs.status import leader_identity

    path = folder / "long"
    if not path.is_dir():
        write_run(path, STEPS, ranks=RANKS, slow_rank=700, rank_steps=RANK_STEPS, total_steps=2 * STEPS,
                  state="running", **leader_identity())  # fmt: skip
    size = sum(one.stat().st_size for one in (path / "events").iterdir())
    print(f"{STEPS:,} steps, {RANKS:,} ranks with {RANK_STEPS:,} lines each: {size / 2**30:.2f} GiB of logs")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        serve(folder, writer)
    os.close(writer)
    try:
        with os.fdopen(reader) as said:
            port, token = said.readline().split()
        for name, value in measure(child, int(port), token, path):
            print(f"| {name} | {value} |")
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def serve(folder: Path, out: int) -> None:
    from duoka.watch.board import Board
    from duoka.watch.server import BoardServer

    server = BoardServer(Board(folder))
    os.write(out, f"{server.port} {server.token}\n".encode())
    server.serve_forever()


def measure(pid: int, port: int, token: str, path: Path) -> list[tuple[str, str]]:
    from written_runs import step_line

    def get(target: str, **words: object) -> dict:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        connection.request("GET", f"{target}?{urlencode(words)}", headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200, body
        return json.loads(body)

    look = {"runs": '["long"]', "focus": "long", "keys": json.dumps(KEYS), "most": 900}
    began, cpu = time.perf_counter(), cpu_s(pid)
    answer = get("/api/look", **look)
    points = len(answer["series"]["long"]["curves"]["loss"])
    rows = [("first answer, with curves of the whole run", f"{took(pid, began, cpu)}, {points} points")]
    while answer["is_behind"]:
        answer = get("/api/look", **look)
    rows.append(("until the whole log is in it", took(pid, began, cpu)))
    num_steps = answer["series"]["long"]["num_steps"]
    assert num_steps >= STEPS and answer["focus"]["slowest"]["rank"] == 700
    began, cpu = time.perf_counter(), cpu_s(pid)
    heat = get("/api/heat", run="long")
    while not heat["is_whole"]:
        heat = get("/api/heat", run="long")
    rows.append(("map of ranks x steps", took(pid, began, cpu)))
    began, cpu = time.perf_counter(), cpu_s(pid)
    get("/api/look", **{**look, "axis": "time", "log": 1})
    rows.append(("another axis", took(pid, began, cpu)))
    cpu, began, step, looks = cpu_s(pid), time.perf_counter(), num_steps, 0
    with (path / "events" / "run.jsonl").open("a") as log:
        while (now := time.perf_counter() - began) < FOLLOW_S:
            while step - num_steps < 2 * now:  # two steps a second are written meanwhile
                step += 1
                log.write(step_line(step, t=time.time()))
            log.flush()
            answer = get("/api/look", **look, since=answer["version"])
            looks += 1
            time.sleep(answer["next_s"])
    share = (cpu_s(pid) - cpu) / (time.perf_counter() - began)
    rows.append((f"following for {FOLLOW_S:.0f} s at two steps a second", f"{share:.2%} of a core, {looks} looks"))
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    rows.append(("the server's peak memory", f"{peak / 1024:.0f} MiB"))
    return rows


def took(pid: int, began: float, cpu: float) -> str:
    return f"{time.perf_counter() - began:.2f} s, {cpu_s(pid) - cpu:.2f} s of CPU"


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
