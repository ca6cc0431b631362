"""duoka (多卡): train and fine-tune language models on one CPU, one GPU or many nodes, from one YAML file."""

__version__ = "0.1.0"
