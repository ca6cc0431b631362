"""The only reader of RANK, LOCAL_RANK and WORLD_SIZE. Knows no torch, so that the command line may ask too."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from duoka.errors import ConfigError

INJECT = "DUOKA_INJECT"  # faults on order, for `duoka chaos` and tests
LOOPBACK = "127.0.0.1"  # where the ranks of one machine meet


@dataclass(frozen=True)
class RankEnvironment:
    """What a launcher (ours, torchrun, Slurm's srun with exports) said about this process."""

    rank: int
    local_rank: int
    size: int
    local_size: int
    node: int
    master_addr: str
    master_port: int
    guesses_node: bool = False  # nobody said which: as if ranks of a machine were neighbors


def has_peers(env: Mapping[str, str] = os.environ) -> bool:
    """True in a process that a launcher started as one of several."""
    return env.get("WORLD_SIZE", "1") != "1"


def get_dist_info() -> tuple[bool, int, int, int]:
    """(is distributed, rank, local rank, world size), as the launcher said; (False, 0, 0, 1) without one."""
    place = read_rank_environment()
    return (True, place.rank, place.local_rank, place.size) if place else (False, 0, 0, 1)


def print0(*values: object, **options: Any) -> None:
    """`print`, once and not once per rank. Needs no process group."""
    if get_dist_info()[1] == 0:
        print(*values, **options)


def read_rank_environment(env: Mapping[str, str] = os.environ) -> RankEnvironment | None:
    """This process's place in the world that a launcher started, or None when nobody launched us."""
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return None
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in env]
    size = _whole(env, "WORLD_SIZE", 1)
    if size > 1:
        missing += [name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise ConfigError(
            f"the environment names a world of {size} but lacks {', '.join(missing)}",
            fix="start with `duoka train CONFIG --nproc N`, with torchrun, or set all of "
            "RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
        )
    rank = _whole(env, "RANK", 0)
    if not 0 <= rank < size:
        raise ConfigError(f"RANK={rank} is outside WORLD_SIZE={size}", fix="ranks count from 0 to WORLD_SIZE - 1")
    local_size = _whole(env, "LOCAL_WORLD_SIZE", size)
    return RankEnvironment(
        rank=rank,
        local_rank=_whole(env, "LOCAL_RANK", 0),
        size=size,
        local_size=local_size,
        node=_whole(env, "GROUP_RANK", rank // max(local_size, 1)),
        master_addr=env.get("MASTER_ADDR", LOOPBACK),
        master_port=_whole(env, "MASTER_PORT", 0),
        guesses_node="GROUP_RANK" not in env and local_size < size,
    )


def _whole(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} in the environment is not a whole number") from None
