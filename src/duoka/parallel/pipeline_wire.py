"""What travels between the stages of a pipeline: hidden states forward, their gradients back, nothing else.

Each direction between two ranks has a process group of its own, on which messages go in the order in which their
sender computes. A receiver takes them in that order, whatever it needs first, so no message can be taken for another,
and none waits behind one of the other direction. Shapes are known on both sides: buffers have each message's real size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from duoka.comm.collectives import TimedWork, start_receive, start_send
from duoka.comm.world import World
from duoka.errors import WorkerFailed
from duoka.model.pipeline_stages import PipelineStages
from duoka.plan.pipeline import Pass

# (from, to) as ranks of the pipeline -> the group of these two
Edges = Mapping[tuple[int, int], dist.ProcessGroup | None]


class Message(NamedTuple):
    """`what` of a micro-batch, for the pass of `stage` that takes it."""

    what: str
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.what} of micro-batch {self.micro + 1}"


def sent_after(one: Pass, stages: PipelineStages) -> Message | None:
    """What a pass gives to another stage."""
    if one.kind == "weights":
        return None
    if one.kind == "forward":
        return None if stages.is_last(one.stage) else Message("hidden states", one.stage + 1, one.micro)
    return Message("gradients", one.stage - 1, one.micro) if stages.has_backward(one.stage - 1) else None


def needed_before(one: Pass, stages: PipelineStages) -> Message | None:
    """What a pass takes from another stage."""
    if one.kind == "weights":
        return None
    if one.kind == "forward":
        return Message("hidden states", one.stage, one.micro) if one.stage else None
    return None if stages.is_last(one.stage) else Message("gradients", one.stage, one.micro)


class Wire:
    """The messages of one step, or of one pass without a step. Each is sent once and received once."""

    def __init__(
        self,
        stages: PipelineStages,
        world: World,
        pipeline: World,
        edges: Edges,
        passes: Callable[[int], Sequence[Pass]],
        shape_of: Callable[[int], tuple[int, int]],
    ) -> None:
        """`passes`: of each rank of the pipeline; `shape_of`: rows and tokens of a micro-batch."""
        self._stages, self._world, self._edges, self._rank = stages, world, edges, pipeline.rank
        self._shape_of = shape_of
        self._coming: dict[int, list[Message]] = {}
        for source in {one for one, target in edges if target == self._rank}:
            sent = (sent_after(one, stages) for one in passes(source))
            to_me = [message for message in sent if message and stages.rank_of(message.stage) == self._rank]
            self._coming[source] = to_me[::-1]  # taken from the end
        self._arrived: dict[Message, torch.Tensor] = {}
        self._taken: set[Message] = set()
        self._sent: set[Message] = set()
        self._leaving: list[tuple[TimedWork, torch.Tensor]] = []

    def send(self, message: Message, values: torch.Tensor | None) -> None:
        """Begin to send; None stands for zeros. A second time nothing happens."""
        if message in self._sent:
            return
        shape = (*self._shape_of(message.micro), self._stages.width)
        if values is None:
            values = torch.zeros(shape, dtype=self._stages.dtype, device=self._world.device)
        if tuple(values.shape) != shape or values.dtype != self._stages.dtype:
            raise RuntimeError(
                f"{message} are {tuple(values.shape)} of {values.dtype}, and stage {message.stage} waits for {shape} "
                f"of {self._stages.dtype}: this model's layers change what goes through them"
            )
        target = self._stages.rank_of(message.stage)
        values = values.detach().contiguous()
        self._sent.add(message)
        if target == self._rank:  # zbv: the stages down and up meet on the last rank
            self._arrived[message] = values
            return
        self._world.heart.begin_exchange(f"send of {message} to stage {message.stage}")
        work = start_send(values, self._edges[self._rank, target], target > self._rank)
        self._leaving.append((work, values))
        self._leaving = [one for one in self._leaving if not one[0].is_completed()]

    def receive(self, message: Message, source_stage: int) -> torch.Tensor:
        """Wait for a message, and take what was sent before it."""
        source = self._stages.rank_of(source_stage)
        while message not in self._arrived:
            following = self._coming[source][-1]
            shape = (*self._shape_of(following.micro), self._stages.width)
            buffer = torch.empty(shape, dtype=self._stages.dtype, device=self._world.device)
            with self._world.heart.exchange(f"receive of {following} from stage {source_stage}"):
                start_receive(buffer, self._edges[source, self._rank], source > self._rank).wait()
            self._arrived[self._coming[source].pop()] = buffer
        self._taken.add(message)
        return self._arrived.pop(message)

    def drop(self, message: Message, source_stage: int) -> None:
        """Receive it if that was not done, and let it go."""
        if message not in self._taken:
            self.receive(message, source_stage)

    def finish(self) -> None:
        """Wait until all has left."""
        for work, _ in self._leaving:
            work.wait()
        self._leaving.clear()


def check_same(digest: int, shapes: list[tuple[int, ...]], world: World, pipeline: World) -> None:
    """Refuse ranks of a pipeline that read something else: `digest` is of what each is about to compute."""
    mine = torch.zeros(pipeline.size, dtype=torch.float64)
    mine[pipeline.rank] = float(digest)
    digests = pipeline.sum_tensor(mine.to(world.device)).tolist()
    other = next((rank for rank, one in enumerate(digests) if one != digests[0]), None)
    if other is None:
        return
    found = pipeline.gather(shapes)
    raise WorkerFailed(
        f"the stages of a pipeline read different micro-batches for step {world.heart.beat.step + 1}",
        where=f"(rows, tokens) of the first rank's: {found[0]}; of rank {other} of the pipeline: {found[other]}",
        fix="every rank must see the same data files, config and version of duoka: `duoka doctor` compares them",
    )
