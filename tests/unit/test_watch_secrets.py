"""What pages show of config.yaml: all values, and nothing that who they are handed to could use."""

import html
import json

from duoka.config.load import load_config
from duoka.config.write import resolved_yaml
from duoka.runs.folder import RunFolder
from duoka.watch.differences import find_differences
from duoka.watch.report import write_report


def test_a_report_is_handed_on_without_addresses_and_passwords(tmp_path, monkeypatch):
    """config.yaml has the webhook that the run itself needs, and stood in the page as it was."""
    monkeypatch.setenv("PROXY_TOKEN", "hunter2-of-the-environment")
    yaml = tmp_path / "a.yaml"
    yaml.write_text(
        "model: x/${env:PROXY_TOKEN}\ndata: {train: [identity, 'https://me:hunter2@data.example/x']}\n"
        "log: {alert: {webhook: 'https://hooks.example/T0  # hunter2', command: 'mail -p hunter2 # all'}}\n"
        "train: {epochs: 7}\n",
        encoding="utf-8",
    )
    (run := RunFolder(tmp_path / "run")).make()
    loaded = load_config(yaml)
    run.config.write_text(resolved_yaml(loaded, {"parallel.strategy": "ddp: all fits"}), encoding="utf-8")
    assert load_config(run.config).config.log.alert.webhook.endswith("hunter2"), "the run itself needs it"
    text = html.unescape(write_report(run).read_text(encoding="utf-8"))
    assert "hunter2" not in text and 'webhook: "***"' in text and 'command: "***"' in text
    assert "epochs: 7" in text and "here ddp: all fits" in text and f"{yaml.name}" in text
    (other := RunFolder(tmp_path / "other")).make()
    other.config.write_text("model: demo\nlog: {alert: {webhook: ''}}\n", encoding="utf-8")
    assert "hunter2" not in json.dumps(find_differences([run, other]))
