"""What the command line's frame says, in Chinese: the page of `duoka --help`, and the kinds of refusals of errors.py.

What is not here is said in English. Explanations of keys, codes and topics have files of their own (explain/texts/).
"""

from __future__ import annotations

HELP = (
    "duoka（多卡）用一份 YAML 训练语言模型：一个 CPU、一张卡或许多卡。\n\n"
    "从这里开始：   duoka init   然后   duoka train sft.yaml"
)
EPILOG = (
    "退出码：0 完成，1 程序缺陷，2 配置或数据被拒绝，3 机器不合格，4 放不下，5 有进程死亡，6 存储，"
    "75 提前停止（同一条命令会接着训练），130 被中断。"
)
# By the names of cli/__init__.py:COMMANDS.
COMMANDS = {
    "demo": "在这里真的微调一个小模型，训练前后各问一遍。",
    "new": "回答五个问题，为自己的数据写一份配置，并说明能否放得下。",
    "init": "写一份带注释的初始配置。",
    "train": "按 YAML 训练；中断之后，同一条命令接着训练。",
    "run": "运行一份 YAML 里的各个阶段；没有变化的阶段不会重跑。",
    "pretrain": "用教程里的参数从零训练一个模型。",
    "mid": "用教程里的参数，接着在对话和任务上训练。",
    "sft": "用教程里的参数，在助手的回答上微调。",
    "rl": "用教程里的参数，按回答所得的奖励继续训练。",
    "eval": "测量损失、困惑度和准确率。",
    "score": "用奖励模型给回答打分。",
    "embed": "为文本文件的每一行写出一个向量。",
    "chat": "和训练到现在的模型对话。",
    "serve": "以 OpenAI 的 HTTP 接口提供服务，附聊天页面。",
    "export": "合并适配器，写出标准的模型文件夹。",
    "import-checkpoint": "把 DeepSpeed 或 FSDP 训练的结果写成模型文件夹。",
    "export-checkpoint": "写出 DeepSpeed 能接着训练的检查点。",
    "plan": "训练之前说明能否放得下、怎样布局。",
    "comm": "测试进程之间的通信是否正确、有多快。",
    "sync": "把代码、小数据和软件包清单送到别的机器。",
    "profile": "说明一个训练步的时间花在哪里。",
    "bench": "测量本机，让规划有实测数据可依。",
    "env": "打印报告问题所需的信息：版本、机器、设置；不含机密。",
    "doctor": "检查这台机器是否适合训练。",
    "chaos": "对训练的一个短副本制造故障，看它能承受什么。",
    "runs": "列出各次训练的状态、步数、损失；查看或停止其中一个。",
    "top": "在终端里观察正在进行的训练。",
    "board": "在浏览器里实时显示一个文件夹里的所有训练。",
    "alerts": "跟踪一次训练，把结果告诉一条命令或一个 webhook。",
    "report": "写出一次训练的报告页：一个不联网的文件。",
    "config": "显示配置和每个值的来源，或者全部键的定义。",
    "data": "按训练的视角查看数据集。",
    "launch": "用 N 个进程运行你自己的脚本。",
    "explain": "用中文或英文解释一个键、错误、退出码或主题。",
    "llamafactory-cli": "教程里的 llamafactory-cli 命令：train、export、chat、eval。",
    "torchrun": "教程里的 torchrun 命令。",
    "accelerate": "教程里的 accelerate launch 命令。",
    "completion": "打印命令行补全脚本。",
}
KINDS = {
    "error": "错误",
    "config error": "配置错误",
    "data error": "数据错误",
    "usage error": "用法错误",
    "doctor": "体检",
    "does not fit": "放不下",
    "worker failed": "进程失败",
    "storage error": "存储错误",
    "stopped early": "提前停止",
    "interrupted": "已中断",
}
