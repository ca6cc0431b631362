"""Worlds of processes for tests: forked from one process that has imported everything, ended whatever happens."""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import secrets
import socket
import time
from pathlib import Path

WORLD_TIMEOUT_S = 570  # the last resort: pytest's own limit ends most tests before
WORLD_HANGS_S = 165  # each rank says where it is, before pytest's own limit ends the test
# Imported once by the fork server: each process of a world starts in a blink instead of ten seconds.
PRELOADED = [
    "duoka.train.main",
    "duoka.model.preload",
    "transformers.models.llama.modeling_llama",
    "peft",
    "torch.utils.tensorboard",
    # What commands.py looks for in each command, with the parser and launchers that it brings.
    "duoka.cli.bench_runs",
    "duoka.cluster.forks",
    "duoka.cluster.pipeline.execute",
    "duoka.cluster.ranks",
]


def fresh_cache(folder):
    """{"DUOKA_CACHE": a cache that knows nothing yet but how kernels were compiled}: that takes half a minute."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "native").exists():
        (folder / "native").symlink_to(Path(os.environ["DUOKA_CACHE"], "native").resolve())
    return {"DUOKA_CACHE": str(folder)}


def free_port():
    """Below those that the system gives to whoever asks for any: another test's could be this one a moment later."""
    while True:
        port = secrets.randbelow(12000) + 20000
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def run_world(size, function, *arguments):
    """Call function(*arguments) in each of `size` processes that know their rank; all must end well."""
    processes = start_processes(size, function, *arguments)
    deadline = time.monotonic() + WORLD_TIMEOUT_S
    try:
        while any(process.is_alive() for process in processes):
            failed = [rank for rank, process in enumerate(processes) if process.exitcode not in (None, 0)]
            if failed:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"a world of {size} did not end within {WORLD_TIMEOUT_S} s")
            time.sleep(0.02)
        codes = [process.exitcode for process in processes]
        assert codes == [0] * size, f"exit codes {codes}; the traceback is in the captured output"
    finally:
        end_processes(processes)


def start_processes(size, function, *arguments):
    """The processes of a world, started; whoever calls this ends them with end_processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port = free_port()
    kept = {name: os.environ[name] for name in ("DUOKA_CACHE", "OMP_NUM_THREADS") if name in os.environ}
    processes = [
        context.Process(target=_enter, args=(rank, size, port, kept, function, arguments)) for rank in range(size)
    ]
    try:
        for process in processes:
            process.start()
    except BaseException:
        end_processes([process for process in processes if process.pid])
        raise
    return processes


def end_processes(processes):
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def _enter(rank, size, port, env, function, arguments):
    os.environ.update(env)
    leave_garbage()
    faulthandler.dump_traceback_later(WORLD_HANGS_S)
    if size > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
    import torch

    # As many as commands have: other numbers of threads are other bits. It was imported before the variable was known.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with known_architectures():
        function(*arguments)


@contextlib.contextmanager
def known_architectures():
    """What the self-tests of architectures found in other worlds of this session is found already in this one.

    Each process made them anew, of the same few tiny models: a third of a second. test_exactness.py tests them.
    """
    from duoka.model.attention import register_attention
    from duoka.model.exactness import KNOWN

    register_attention()
    file = Path(os.environ["DUOKA_CACHE"]) / "architectures.pickle"
    if file.is_file():
        KNOWN.update(pickle.loads(file.read_bytes()))
    before = {name: sorted(vars(one)) for name, one in KNOWN.items()}
    yield
    if os.environ.get("RANK", "0") == "0" and before != {name: sorted(vars(one)) for name, one in KNOWN.items()}:
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_bytes(pickle.dumps(KNOWN))
        draft.replace(file)


def leave_garbage():
    """What lies there is not searched by the next run's collections; a run gives back what it froze, at its end.

    A run of this process searched all that the fork server imported: a third of a second of two.
    """
    gc.freeze()


def train_all(jobs, size):
    """Train every (yaml, overrides, run folder[, environment]) in turn on a world of `size` gloo processes.

    What can be called instead of that, the first rank calls in its turn.
    """
    run_world(size, train_jobs, jobs)


def train_jobs(jobs):
    from duoka.comm.world import end_world, start_world
    from duoka.config.load import load_config
    from duoka.parallel import inject
    from duoka.runs.folder import RunFolder
    from duoka.train.main import read_inputs, run_in_world

    world = None
    try:
        for job in jobs:
            if callable(job):
                if world is None or world.is_main:
                    job()
                continue
            yaml, overrides, folder, *env = job
            leave_garbage()
            os.environ.update(*env)
            inject.forget()
            run = RunFolder(Path(folder))
            run.make()
            loaded = load_config(yaml, overrides)
            inputs = read_inputs(loaded, run)
            world = world or start_world(loaded.config.parallel)
            assert run_in_world(inputs, world) == 0
    finally:
        if world is not None:
            end_world(world)
