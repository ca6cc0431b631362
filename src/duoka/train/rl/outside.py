"""Answers drawn by a server beside the run, vLLM or SGLang: token ids in, token ids and their log-probabilities out.

Before each step's answers the trained weights are written to a folder, which the server is told to load; so it must
see this disk. Nothing is encoded or decoded on the way. A server computes otherwise than training does, and its
answers are recorded, not promised: tokens are weighed by how far the two are apart (rl.importance).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duoka.comm.world import World
from duoka.config.adapters import WEIGHTS
from duoka.errors import ConfigError
from duoka.model.sampling import Sampling

TOKEN = "DUOKA_ENGINE_TOKEN"  # sent as a bearer token where it is set
_TRIES, _BETWEEN_S = 3, 2.0
# Said in every request: where it is silent, vLLM draws as the model's generation_config.json has it (Qwen's: from 20
# tokens, and those said before less likely), and tells log-probabilities among these.
_FROM_ALL = {
    "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """Tokens of an answer; `stop`, which ended it, is not among them, but its log-probability is the last."""

    ids: tuple[int, ...]
    stop: int | None
    logps: tuple[float, ...]
    version: str  # of the weights


class Server(ABC):
    """One server. `limit_s` is how long it may take to answer."""

    start: str  # how one begins it

    def __init__(self, url: str, stop_ids: frozenset[int], vocab: int, limit_s: float) -> None:
        self.url, self.stop_ids, self.vocab, self.limit_s = url.rstrip("/"), sorted(stop_ids), vocab, limit_s
        # Not through a proxy: it stands beside the run.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self.version = ""  # of the weights that it has, and the name by which these are asked for, if any
        self.name: str | None = None

    @abstractmethod
    def load(self, folder: Path, version: str) -> None:
        """From now on answer with the weights in `folder`: a whole model, or an adapter. Called by one rank."""

    @abstractmethod
    def answer(self, ids: Sequence[int], room: int, sampling: Sampling, seed: int) -> Drawn:
        """One answer to a prompt, of at most `room` tokens."""

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """POST with a body, else GET. Tried again where nobody listens or the connection breaks."""
        for left in reversed(range(_TRIES)):
            try:
                return self._ask(path, body)
            except urllib.error.HTTPError as error:
                said = error.read(2000).decode("utf-8", "replace").strip()
                raise self._fault(f"{path} was refused ({error.code}): {said[:300]}") from None
            except (urllib.error.URLError, OSError, ValueError) as error:
                if not left:
                    raise self._fault(f"{path}: {getattr(error, 'reason', error)}") from None
                time.sleep(_BETWEEN_S)

    def _ask(self, path: str, body: dict[str, Any] | None) -> Any:
        head = {"Content-Type": "application/json"}
        if token := os.environ.get(TOKEN):
            head["Authorization"] = f"Bearer {token}"
        data = None if body is None else json.dumps(body).encode()
        with self._opener.open(urllib.request.Request(self.url + path, data, head), timeout=self.limit_s) as answer:
            text = answer.read()
            return json.loads(text) if text.strip() else None

    def _fault(self, what: str) -> ConfigError:
        return ConfigError(
            f"the engine at {self.url} does not do what was asked: {what}", where="rl.engine",
            fix=f"start it with   {self.start}   or delete rl.engine, and the run draws by itself",
        )  # fmt: skip

    def _drawn(self, ids: Sequence[Any], logps: Sequence[Any], finish: str, version: str) -> Drawn:
        """Raises TypeError and ValueError for what is no number."""
        tokens, own, is_stopped = tuple(map(int, ids)), tuple(map(float, logps)), finish == "stop"
        if version != self.version:
            raise self._fault(f"an answer was drawn by weights {version!r}, and {self.version!r} were loaded")
        if not tokens or finish not in ("stop", "length"):
            raise self._fault(f"an answer ended with {finish!r} after {len(tokens)} tokens")
        if len(tokens) != len(own):
            raise self._fault(f"an answer of {len(tokens)} tokens has {len(own)} log-probabilities")
        if not all(math.isfinite(one) for one in own):
            raise self._fault("an answer has a log-probability that is no number")
        if is_stopped and tokens[-1] not in self.stop_ids:
            raise self._fault("an answer lacks the token that ended it")
        if not 0 <= min(tokens) <= max(tokens) < self.vocab:
            raise self._fault(f"an answer has a token that this model of {self.vocab:,} tokens does not know")
        return Drawn(tokens[:-1] if is_stopped else tokens, tokens[-1] if is_stopped else None, own, version)


class Vllm(Server):
    """Adapters by its LoRA routes, whole models by its worker's reload, which it offers in development mode alone."""

    start = (
        "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL "
        "--logprobs-mode processed_logprobs"
    )

    def load(self, folder: Path, version: str) -> None:
        before, self.version = self.version, version
        if _is_adapter(folder):
            self.ask("/v1/load_lora_adapter", {"lora_name": version, "lora_path": str(folder)})
            if before:
                self.ask("/v1/unload_lora_adapter", {"lora_name": before})
            self.name = version
            return
        self.name = self.name or self.ask("/v1/models")["data"][0]["id"]
        self.ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        self.ask("/reset_prefix_cache", {})

    def answer(self, ids: Sequence[int], room: int, sampling: Sampling, seed: int) -> Drawn:
        asked = {
            "model": self.name, "prompt": list(ids), "max_tokens": room, "temperature": sampling.temperature,
            "seed": seed, "logprobs": 1, "return_token_ids": True, "stop_token_ids": self.stop_ids,
            "skip_special_tokens": False, **_FROM_ALL,
        }  # fmt: skip
        found = self.ask("/v1/completions", asked)
        try:
            (one,) = found["choices"]
            version = found["model"] if self.name == self.version else self.version  # of adapters it says which
            return self._drawn(one["token_ids"], one["logprobs"]["token_logprobs"], one["finish_reason"], version)
        except (KeyError, TypeError, ValueError) as error:
            raise self._fault(f"its answer is none of vLLM's: {type(error).__name__} {error}") from None


class Sglang(Server):
    start = "python -m sglang.launch_server --model-path MODEL"

    def load(self, folder: Path, version: str) -> None:
        self.version = version
        if _is_adapter(folder):
            self.ask("/load_lora_adapter", {"lora_name": version, "lora_path": str(folder)})
            if self.name:
                self.ask("/unload_lora_adapter", {"lora_name": self.name})
            self.name = version
            return
        done = self.ask("/update_weights_from_disk", {"model_path": str(folder), "weight_version": version})
        if not done.get("success", True):
            raise self._fault(f"/update_weights_from_disk: {done.get('message')}")

    def answer(self, ids: Sequence[int], room: int, sampling: Sampling, seed: int) -> Drawn:
        how = {
            "temperature": sampling.temperature, "max_new_tokens": room, "stop_token_ids": self.stop_ids,
            "sampling_seed": seed, "skip_special_tokens": False, **_FROM_ALL,
        }  # fmt: skip
        asked = {"input_ids": list(ids), "sampling_params": how, "return_logprob": True}
        found = self.ask("/generate", asked | ({"lora_path": self.name} if self.name else {}))
        try:
            told = found["meta_info"]
            version = self.version if self.name else str(told["weight_version"])
            logps = [one[0] for one in told["output_token_logprobs"]]
            return self._drawn(found["output_ids"], logps, told["finish_reason"]["type"], version)
        except (KeyError, TypeError, ValueError) as error:
            raise self._fault(f"its answer is none of SGLang's: {type(error).__name__} {error}") from None


SERVERS: dict[str, type[Server]] = {"vllm": Vllm, "sglang": Sglang}


def _is_adapter(folder: Path) -> bool:
    return (folder / WEIGHTS).is_file()


@dataclass
class Outside:
    """A server that draws for all ranks: rank 0 has it load weights, each rank asks for its own answers."""

    server: Server
    world: World
    write: Callable[[Path], None]  # the trained weights into a folder, by all ranks together
    folder: Path  # RUN/engine
    at_once: int
    sign: str  # of this process: a server may still have what an earlier one gave it

    def load(self, number: int) -> None:
        """The weights as they are, on all ranks together."""
        self.world.heart.tell("engine")
        target = (self.folder / f"step-{number:08d}-{self.sign}").resolve()
        if self.world.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
        self.write(target)
        fault: ConfigError | None = None
        if self.world.is_main:
            try:
                self.server.load(target, target.name)
            except ConfigError as error:
                fault = error
            for other in self.folder.iterdir():  # it has the new ones in its memory
                if other != target:
                    shutil.rmtree(other, ignore_errors=True)
        self._share(fault)
        self.server.version, self.server.name = target.name, self.world.agree(self.server.name)

    def answer(
        self, asked: Sequence[tuple[Sequence[int], int, int]], sampling: Sampling, alive: Callable[[], None]
    ) -> list[Drawn]:
        """Of (prompt, room, seed) each, in order; on all ranks together."""
        found: list[Drawn] = []
        fault: ConfigError | None = None
        try:
            found = self._answer(asked, sampling, alive)
        except ConfigError as error:
            fault = error
        self._share(fault)
        return found

    def _answer(
        self, asked: Sequence[tuple[Sequence[int], int, int]], sampling: Sampling, alive: Callable[[], None]
    ) -> list[Drawn]:
        with ThreadPoolExecutor(self.at_once, "duoka-engine") as threads:
            futures = [threads.submit(self.server.answer, ids, room, sampling, seed) for ids, room, seed in asked]
            going: set[Future[Drawn]] = set(futures)
            while going:
                done, going = wait(going, timeout=1.0)
                alive()
                if any(one.exception() is not None for one in done):
                    threads.shutdown(wait=False, cancel_futures=True)
        return [one.result() for one in futures if not one.cancelled()]

    def _share(self, fault: ConfigError | None) -> None:
        """What one rank was refused ends all of them here: none waits for one that has left."""
        for found in self.world.gather(fault):
            if found is not None:
                raise found

    def close(self) -> None:
        if self.world.is_main:
            shutil.rmtree(self.folder, ignore_errors=True)
