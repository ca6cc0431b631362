"""GGUF files: what transformers reads from them is what was written, tokens and answers alike."""

from __future__ import annotations

import errno
import json
import logging
from pathlib import Path

import pytest
import torch
from commands import run_duoka
from tiny import CHATML, build_tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerFast

from duoka.cli import run as duoka
from duoka.errors import ConfigError
from duoka.model.gguf import BOUNDS, check_gguf, name_of_cut, write_gguf

gguf = pytest.importorskip("gguf")
TEXT = "Who are you? I am duoka, 多卡, and 42 cards train."
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


def write_model(folder: Path, kind: str, *, tied: bool = True, **more) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(folder)
    config = AutoConfig.for_model(
        kind, vocab_size=len(fast) + 3, tie_word_embeddings=tied, eos_token_id=fast.eos_token_id, **{**SIZES, **more}
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "stored", "options"),
    [
        ("llama", "f16", {}),
        ("llama", "f32", {"tied": False, "head_dim": 32}),
        ("qwen2", "f16", {"tied": False}),
        ("qwen3", "q8_0", {"head_dim": 128}),
    ],
)
def test_what_transformers_reads_is_what_was_written(tmp_path: Path, kind: str, stored: str, options: dict) -> None:
    folder = write_model(tmp_path / "model", kind, **options)
    done = write_gguf(folder, stored, "model")
    assert done.largest_error <= BOUNDS[stored]
    logging.getLogger("transformers").setLevel(logging.ERROR)
    read = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=done.path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        ours, theirs = (lm(ids).logits for lm in (read, wanted))
    bound = {"f32": 1e-5, "f16": 5e-3, "q8_0": 6e-2}[stored] * float(theirs.abs().max())
    assert float((ours - theirs).abs().max()) < bound
    if kind == "llama":  # of other kinds transformers takes the family's own way to cut words, not the file's
        assert AutoTokenizer.from_pretrained(folder, gguf_file=done.path.name)(TEXT).input_ids == ids[0].tolist()
    keys = gguf.GGUFReader(done.path).fields
    assert "tokenizer.chat_template" in keys
    assert (folder / "Modelfile").read_text() == f'FROM ./{done.path.name}\nPARAMETER stop "<|im_end|>"\n'


@pytest.mark.parametrize("stored", ["bf16", "q4_0", "q5_1"])
def test_each_type_is_as_near_as_it_can_be(tmp_path: Path, stored: str) -> None:
    done = write_gguf(write_model(tmp_path / "model", "llama"), stored, "model")
    assert BOUNDS[stored] / 20 < done.largest_error <= BOUNDS[stored]


def test_a_file_that_came_out_wrong_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "model", "llama")
    plain = gguf.quants.quantize
    monkeypatch.setattr(gguf.quants, "quantize", lambda values, kind: plain(values * 1.01, kind))
    with pytest.raises(Exception, match="off by"):
        write_gguf(folder, "f16", "model")
    assert not list(folder.glob("*.gguf"))


def test_positions_that_are_stretched_as_llama_3_s_are_written_as_transformers_computes_them(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama", rope_parameters=LLAMA3, head_dim=64)
    path = write_gguf(folder, "f16", "model").path
    (divisors,) = (one.data for one in gguf.GGUFReader(path).tensors if one.name == "rope_freqs.weight")
    wanted = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb.inv_freq
    plain = LLAMA3["rope_theta"] ** -(torch.arange(0, 64, 2) / 64)
    assert torch.allclose(plain / torch.tensor(divisors), wanted, rtol=1e-5)
    assert 1 in divisors and 8 in divisors and any(1 < one < 8 for one in divisors)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_positions_that_are_stretched_otherwise_are_told_by_the_keys_of_such_files(tmp_path: Path, kind: str) -> None:
    """transformers does not read them; llama.cpp does (test_gguf_llama_cpp.py)."""
    for name, rope in (("yarn", YARN), ("linear", LINEAR)):
        path = write_gguf(write_model(tmp_path / name, kind, rope_parameters=rope), "f16", "model").path
        fields = {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items() if "scaling" in key}
        wanted = {"type": name, "factor": 4.0} | ({"original_context_length": 64} if name == "yarn" else {})
        assert fields == {f"{kind}.rope.scaling.{key}": value for key, value in wanted.items()}


def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path: Path) -> None:
    for number, (kind, rope, match) in enumerate((
        ("llama", {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "how long a text is"),
        ("qwen2", LLAMA3, "no llama3 of qwen2"),
        ("qwen3", {**YARN, "beta_fast": 16}, "beta_fast 16, and readers take 32"),
        ("llama", {**YARN, "attention_factor": 1.0}, "scales attention by 1, and readers by"),
        ("llama", {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}, "scales attention by 0.96"),
    )):  # fmt: skip
        with pytest.raises(ConfigError, match=match):
            check_gguf(write_model(tmp_path / f"a{number}", kind, rope_parameters=rope))
    windows = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    for number, (kind, more, match) in enumerate((
        ("llama", {"hidden_act": "gelu"}, "hidden_act gelu"),
        ("qwen3", {"attention_bias": True}, "biases of attention"),
        ("qwen2", windows, r"windows of attention \(16 tokens\)"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "turn 0.5 of each head"),
    )):  # fmt: skip
        with pytest.raises(ConfigError, match=match):
            check_gguf(write_model(tmp_path / f"odd{number}", kind, **more))
    check_gguf(write_model(tmp_path / "unused", "qwen2", use_sliding_window=False, sliding_window=16))
    folder = write_model(tmp_path / "b", "llama")
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"model_type": "mamba"}))
    with pytest.raises(ConfigError, match="architecture mamba"):
        check_gguf(folder)
    with pytest.raises(ConfigError, match="cuts text into words"):
        name_of_cut({"model": {"type": "BPE"}, "pre_tokenizer": {"type": "ByteLevel", "use_regex": False}})


def test_a_beginning_that_the_tokenizer_itself_writes_is_told(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")

    def says() -> bool:
        path = write_gguf(folder, "f32", "model").path
        return bool(gguf.GGUFReader(path).fields["tokenizer.ggml.add_bos_token"].contents())

    assert not says()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin = ("<|im_start|>", tokenizer.token_to_id("<|im_start|>"))
    tokenizer.post_processor = processors.TemplateProcessing("<|im_start|> $A", special_tokens=[begin])  # as Llama 3's
    tokenizer.save(str(folder / "tokenizer.json"))
    assert says()


def test_export_writes_one_beside_the_folder(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    done = run_duoka("export", folder, "-o", tmp_path / "out", "--gguf", "q8_0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no matrix is off by more than" in done.stdout and (tmp_path / "out" / "out.q8_0.gguf").is_file()


def test_an_export_whose_gguf_file_fails_leaves_nothing_that_the_next_one_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = write_model(tmp_path / "model", "llama"), tmp_path / "out"

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("duoka.model.gguf.write_gguf", fail)
        assert duoka(["export", str(folder), "-o", str(out), "--gguf", "f16"]) == 6
    assert [path.name for path in tmp_path.iterdir()] == ["model"] and "no space left" in capsys.readouterr().err
    assert duoka(["export", str(folder), "-o", str(out), "--gguf", "f16"]) == 0


def test_the_modelfile_has_chatml_and_what_a_template_says_unasked_and_no_other_form(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    (folder / "chat_template.jinja").write_text(CHATML)
    write_gguf(folder, "q8_0", "l")
    _, *template, _ = (folder / "Modelfile").read_text().splitlines()
    assert template == [
        'TEMPLATE """{{- range .Messages }}<|im_start|>{{ .Role }}', "{{ .Content }}<|im_end|>",
        '{{ end }}<|im_start|>assistant', '"""',
    ]  # fmt: skip
    unasked = "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    (folder / "chat_template.jinja").write_text(unasked + CHATML)
    write_gguf(folder, "q8_0", "m")
    assert 'SYSTEM """Be kind."""' in (folder / "Modelfile").read_text()
    (folder / "chat_template.jinja").write_text(CHATML.replace("im_start", "endoftext"))
    write_gguf(folder, "q8_0", "n")
    assert "TEMPLATE" not in (folder / "Modelfile").read_text()


def test_export_to_ollama_is_the_file_and_its_modelfile_alone(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    done = run_duoka("export", folder, "-o", tmp_path / "mine", "--to", "ollama")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["Modelfile", "mine.q8_0.gguf"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "model"], "what was written beside it is gone"
    assert "ollama create mine -f" in done.stdout
    assert (tmp_path / "mine/Modelfile").read_text().startswith("FROM ./mine.q8_0.gguf\n")


ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
LLAMA = ENDINGS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def split_by(pattern: str, **more) -> dict:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False, **more}


def cut_by(*parts: str | dict, whole: bool = False, use_regex: bool = False, normalizer=None, **last) -> str:
    splits = [split_by(one) if isinstance(one, str) else one for one in parts]
    end = {"type": "ByteLevel", "use_regex": use_regex, **last}
    before = {"type": "Sequence", "pretokenizers": [*splits, end]}
    model = {"type": "BPE", "ignore_merges": whole}
    return name_of_cut({"model": model, "pre_tokenizer": before, "normalizer": normalizer})


def test_a_tokenizer_is_named_by_all_of_its_pattern() -> None:
    """o200k (GPT-4o, Llama 4) and DeepSeek's take three digits at once as Llama 3's does, and cut words otherwise."""
    assert cut_by(LLAMA, whole=True) == "llama-bpe" and cut_by(LLAMA.replace("{1,3}", "")) == "qwen2"
    o200k = LLAMA.replace(r"\p{L}+", r"[\p{Lu}\p{Lt}]*[\p{Ll}]+")
    for patterns in ((o200k,), (r"\p{N}{1,3}", LLAMA), (LLAMA.removeprefix(ENDINGS),)):
        with pytest.raises(ConfigError, match="no name for how this tokenizer cuts") as refused:
            cut_by(*patterns)
        assert "convert_hf_to_gguf.py" in (refused.value.fix or ""), "and what to do"


def test_a_tokenizer_that_makes_more_of_text_than_a_name_says_is_refused() -> None:
    digits = {"type": "Digits", "individual_digits": True}
    assert cut_by(use_regex=True) == "gpt-2" and cut_by(digits, use_regex=True) == "smollm"
    assert cut_by(LLAMA.replace("{1,3}", ""), normalizer={"type": "NFC"}) == "qwen2"
    assert cut_by(LLAMA) == "smaug-bpe", "llama-bpe takes words that are tokens whole, and merges do not"
    lowered = {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}
    for parts, more in (
        ((digits | {"individual_digits": False},), {"use_regex": True}),
        ((digits,), {}),
        (({"type": "Punctuation", "behavior": "Contiguous"},), {"use_regex": True}),
        ((), {"use_regex": True, "add_prefix_space": True}),
        ((), {"use_regex": True, "whole": True}),
        ((LLAMA,), {"use_regex": True}),
        ((split_by(LLAMA, behavior="Removed"),), {}),
        ((split_by(LLAMA, invert=True),), {}),
    ):
        with pytest.raises(ConfigError, match="no name for how this tokenizer cuts"):
            cut_by(*parts, **more)
    with pytest.raises(ConfigError, match=r"makes of text first \(Lowercase\)"):
        cut_by(use_regex=True, normalizer=lowered)


def fields_of(path: Path) -> dict:
    return {name: one.contents() for name, one in gguf.GGUFReader(path).fields.items() if name.startswith("tokenizer")}


def test_what_begins_and_ends_texts_is_what_the_tokenizer_and_the_model_say(tmp_path: Path) -> None:
    """Readers take token 11 for an end that is not named."""
    folder = write_model(tmp_path / "model", "llama")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    marks = {name: settings.pop(name) for name in ("bos_token", "eos_token")}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": True}))
    (folder / "special_tokens_map.json").write_text(json.dumps(marks))
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs("a").input_ids == theirs("a", add_special_tokens=False).input_ids, "whatever the settings say"
    found = fields_of(write_gguf(folder, "f32", "older").path)
    keys = [f"tokenizer.ggml.{name}" for name in ("bos_token_id", "eos_token_id", "add_bos_token", "pre")]
    assert [found[key] for key in keys] == [theirs.bos_token_id, theirs.eos_token_id, False, "gpt-2"]

    (folder / "special_tokens_map.json").unlink()
    stops = json.dumps({"eos_token_id": [theirs.convert_tokens_to_ids("<|endoftext|>"), 7]})
    (folder / "generation_config.json").write_text(stops)
    found = fields_of(write_gguf(folder, "f32", "stops").path)
    assert found["tokenizer.ggml.eos_token_id"] == 0 and found["tokenizer.ggml.eot_token_id"] == 7


def test_an_adapter_with_a_tokenizer_of_its_own_is_asked_for_that_one(tmp_path: Path) -> None:
    folder, other = write_model(tmp_path / "model", "llama"), tmp_path / "other"
    build_tiny_tokenizer().save_pretrained(other)
    check_gguf(folder)
    with pytest.raises(ConfigError, match="cuts text into words"):
        check_gguf(folder, other)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    write_model(other, "llama")
    check_gguf(folder, other)


def test_a_file_that_could_not_be_written_whole_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "model", "llama")
    before = sorted(folder.iterdir())

    def refuse(*given, **named) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", refuse)
    with pytest.raises(OSError, match="No space"):
        write_gguf(folder, "f32", "model")
    assert sorted(folder.iterdir()) == before
