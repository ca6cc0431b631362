"""A server that speaks what vLLM and SGLang speak of token ids, with transformers behind it: no code of duoka.

It loads weights from folders as they do, whole models and adapters, and draws with torch's own generator.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class StandIn:
    """`is_stale`: it says that it loaded weights, and answers with the first ones; with `says_so` by their name.
    `drops`: a name of what is wrong with its answers."""

    def __init__(
        self, base: Path, *, is_stale: bool = False, says_so: bool = False, token: str | None = None, drops: str = ""
    ) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.base, self.is_stale, self.says_so, self.token = base, is_stale, says_so, token
        self.drops = drops
        self.lm = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        self.lock = threading.Lock()
        self.version = "default"
        self.adapters: dict[str, Any] = {}
        self.asked: list[str] = []  # paths, as they came
        self.seen: list[int] = []  # folders beside weights, when it was told to load these

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        self.asked.append(path)
        routes = {
            "/v1/models": lambda: {"data": [{"id": "base"}]},
            "/collective_rpc": lambda: self._load(body["kwargs"]["weights_path"], ""),
            "/reset_prefix_cache": lambda: None,
            "/v1/load_lora_adapter": lambda: self._adapt(body),
            "/v1/unload_lora_adapter": lambda: self.adapters.pop(body["lora_name"]) and None,
            "/v1/completions": lambda: self._complete(body),
            "/update_weights_from_disk": lambda: self._load(body["model_path"], body["weight_version"]),
            "/load_lora_adapter": lambda: self._adapt(body),
            "/unload_lora_adapter": lambda: self.adapters.pop(body["lora_name"]) and None,
            "/generate": lambda: self._generate(body),
        }
        with self.lock:
            return routes[path]()

    def _load(self, folder: str, version: str) -> dict[str, Any]:
        import torch
        from transformers import AutoModelForCausalLM

        if not self.is_stale:
            self.lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.version = self.version if self.says_so else version
        self.seen.append(len(list(Path(folder).parent.iterdir())))
        return {"success": True, "message": "loaded"}

    def _adapt(self, body: dict[str, Any]) -> None:
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)
        self.adapters[body["lora_name"]] = PeftModel.from_pretrained(base, body["lora_path"]).eval()

    def _draw(
        self, lm: Any, ids: list[int], room: int, how: dict[str, Any], seed: int, stops: list[int]
    ) -> tuple[list[int], list[float]]:
        """Where a request is silent, a model's own generation_config.json speaks, as it does with vLLM."""
        import torch

        assert (how.get("top_p"), how.get("min_p"), how.get("repetition_penalty")) in [(1, 0, 1), (None, None, None)]
        temperature, most = how["temperature"], how.get("top_k", 2)

        dice = torch.Generator().manual_seed(seed)
        own: list[int] = []
        logps: list[float] = []
        with torch.no_grad():
            while len(own) < room and (not own or own[-1] not in stops):
                logits = lm(torch.tensor([ids + own])).logits[0, -1].double() / temperature
                if most > 0:
                    logits[logits < logits.topk(most).values[-1]] = -torch.inf
                row = logits.log_softmax(-1)
                own.append(int(torch.multinomial(row.exp(), 1, generator=dice)))
                logps.append(float(row[own[-1]]))
        return own, logps

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["logprobs"] == 1 and body["return_token_ids"]
        lm = self.adapters.get(body["model"], self.lm)
        assert body["model"] == "base" or body["model"] in self.adapters
        stops = body["stop_token_ids"]
        ids, logps = self._draw(lm, body["prompt"], body["max_tokens"], body, body["seed"], stops)
        one: dict[str, Any] = {
            "token_ids": ids, "logprobs": {"token_logprobs": logps}, "text": "",
            "finish_reason": "stop" if ids[-1] in stops else "length",
        }  # fmt: skip
        if self.drops == "answer":
            one |= {"token_ids": [], "logprobs": {"token_logprobs": []}, "finish_reason": "abort"}
        elif self.drops == "number":
            one["logprobs"] = {"token_logprobs": [None, *logps[1:]]}
        elif self.drops == "vocabulary":
            one["token_ids"] = [1_000_000, *ids[1:]]
        elif self.drops == "end":
            one |= {"token_ids": [3] * len(ids), "finish_reason": "stop"}
        return {"model": body["model"], "choices": [one]}

    def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        how = body["sampling_params"]
        lm = self.adapters[body["lora_path"]] if "lora_path" in body else self.lm
        ids, logps = self._draw(
            lm, body["input_ids"], how["max_new_tokens"], how, how["sampling_seed"], how["stop_token_ids"],
        )  # fmt: skip
        told = {
            "output_token_logprobs": [[logp, token, None] for logp, token in zip(logps, ids, strict=True)],
            "finish_reason": {"type": "stop" if ids[-1] in how["stop_token_ids"] else "length"},
            "weight_version": self.version,
        }
        return {"text": "", "output_ids": ids, "meta_info": told}


@contextmanager
def serving(server: StandIn) -> Iterator[str]:
    """Its address, on loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, body: dict[str, Any]) -> None:
            status, found = 200, None
            if server.token and self.headers.get("Authorization") != f"Bearer {server.token}":
                status, found = 401, {"error": "no token"}
            else:
                found = server.answer(self.path, body)
            text = b"" if found is None else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}"
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()
