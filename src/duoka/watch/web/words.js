// Every word of the board, in English and Chinese. What the server says (causes, hints, events) stays as it is.

const WORDS = {
  skip: ["Skip to the run", "跳到运行"], language: ["Language", "语言"], theme: ["Theme", "主题"], auto: ["auto", "自动"],
  light: ["light", "浅色"], dark: ["dark", "深色"], runs: ["Runs", "运行"], filter: ["filter by name", "按名称筛选"],
  axis: ["Axis", "横轴"], step: ["step", "步"], tokens: ["tokens", "词元"], time: ["training time", "训练时间"],
  smooth: ["Smoothing", "平滑"], logX: ["log x", "横轴对数"], logY: ["log y", "纵轴对数"], unzoom: ["Whole run", "显示全程"],
  no: ["Cancel", "取消"], live: ["live", "实时"], reading: ["reading logs: {0}", "正在读取日志：{0}"],
  lost: ["no answer from the board; trying again", "看板没有响应，正在重试"], none: ["no runs in this folder yet", "此文件夹中还没有运行"],
  noneHelp: ["Runs appear here by themselves as soon as they start, for example by:", "运行开始后会自动出现在这里，例如："],
  overlay: ["show the curves of {0}", "显示 {0} 的曲线"], nothing: ["nothing measured yet", "尚无数据"],
  loss: ["Loss", "损失"], grad_norm: ["Gradient norm", "梯度范数"], lr: ["Learning rate", "学习率"],
  tokens_per_s: ["Tokens per second", "每秒词元"], step_s: ["Seconds per step", "每步秒数"], wait_s: ["Seconds waiting per step", "每步等待秒数"],
  memory_bytes: ["Peak memory, rank 0", "峰值内存（rank 0）"], mfu: ["MFU", "MFU"], last: ["last", "最新"], least: ["least", "最小"],
  evaluation: ["evaluation", "评估"], progress: ["step {0} of {1}", "第 {0} 步，共 {1} 步"], left: ["{0} left", "剩余 {0}"],
  age: ["last sign of life", "最近一次活动"], ago: ["{0} ago", "{0}前"], speed: ["Speed", "速度"], plan: ["plan {0}", "计划 {0}"],
  memory: ["Peak memory per rank", "每个 rank 的峰值内存"], cost: ["Cost", "费用"], processes: ["processes", "进程"], lr_is: ["learning rate {0}", "学习率 {0}"],
  spent: ["Training time", "训练时间"], restarts: ["restarts: {0}", "重启 {0} 次"],
  rollbacks: ["rollbacks: {0}", "回退 {0} 次"], steps_lost: ["steps lost: {0}", "丢失 {0} 步"],
  ranks: ["Ranks", "Rank"], events: ["Events", "事件"], texts: ["Texts", "文本"], logs: ["Logs", "日志"], differences: ["Differences", "差异"],
  where: ["Where the time of the last steps goes", "最近几步的时间分布"],
  rollouts: ["rollouts", "生成回答"], data: ["data", "数据"], forward: ["forward", "前向"], backward: ["backward", "反向"], wait: ["wait", "等待"], optimizer: ["optimizer", "优化器"],
  checkpoint: ["checkpoint", "检查点"], other: ["other", "其他"],
  heat: ["Ranks x steps", "Rank × 步"], own: ["own time against the ranks' median", "自身耗时与中位数之比"],
  waits: ["share of a step spent waiting", "每步等待占比"], measure: ["Shows", "显示"],
  heatHelp: ["All ranks wait for the slowest one, so the slow rank is the one with the least wait. Arrow keys move over the cells.",
    "所有 rank 都等最慢的那个，因此等待最少的就是慢的。方向键可移动光标。"],
  sampled: ["lines at even distances were read, not all", "按均匀间隔抽样读取，并非全部"], cell: ["rank {0}, step {1}: {2}", "rank {0}，第 {1} 步：{2}"],
  perCell: ["{0} ranks a row, the worst shown", "每行 {0} 个 rank，显示最差者"], noRanks: ["no rank has written a step yet", "还没有 rank 写入任何一步"],
  rank: ["rank", "rank"], waitShare: ["waiting", "等待"], seconds: ["seconds a step", "每步秒数"], ownTime: ["of it own", "其中自身"], peak: ["peak memory", "峰值内存"],
  againstPlan: ["against the plan (dashed)", "与计划对比（虚线）"], more: ["and {0} more ranks, which wait longer", "另有 {0} 个 rank，等待更久"],
  when: ["when", "时间"], kind: ["what", "类型"], text: ["said", "内容"], noTexts: ["No sample texts. Ask for them with log.samples: 2", "没有示例文本。可用 log.samples: 2 开启"],
  atStep: ["step {0}", "第 {0} 步"], file: ["File", "文件"], noLogs: ["no log files yet", "还没有日志文件"], follow: ["follow", "跟随"],
  choose: ["Choose two runs or more (the boxes in the list) to see what differs.", "请在列表中勾选两个或更多运行以查看差异。"],
  equal: ["Config, environment and plan of these runs are equal.", "这些运行的配置、环境和计划相同。"], key: ["key", "键"], source: ["of", "来源"],
  config: ["config", "配置"], environment: ["environment", "环境"], planOf: ["plan", "计划"], report: ["Report", "报告"],
  stop: ["Save and stop", "保存并停止"], goOn: ["Go on", "继续训练"],
  askStop: ["It finishes its step, saves a checkpoint and leaves. The same command, or Go on, continues from there.",
    "它会完成当前步、保存检查点后退出。之后可用同一命令或“继续训练”接着运行。"],
  askGoOn: ["It starts again from its newest checkpoint, on this machine, with its own config.", "它将在本机用自己的配置，从最新检查点继续。"],
  newRun: ["New run", "新建运行"], start: ["Start", "开始"], runName: ["name", "名称"],
  runNameHelp: ["Of the run and its folder.", "运行及其文件夹的名称。"],
  processesHelp: ["Empty: one for each GPU, or one.", "留空：每个 GPU 一个，没有则为一个。"],
  allKeys: ["All other keys; what is left empty keeps its default", "其余全部键；留空则用默认值"], byDefault: ["{0} (default)", "{0}（默认）"],
  planning: ["planning …", "正在计算计划…"], hasFaults: ["Not yet a config", "配置尚有问题"], yaml: ["What is written", "将写入的内容"],
  of: ["of", "/"], layout: ["Layout", "布局"], trained: ["Trained parameters", "训练的参数"], steps: ["Steps", "步数"],
  fits: ["It {0}", "放得下（{0}）"], doesNotFit: ["It does not fit", "放不下"],
  export: ["Export", "导出"], exportTo: ["as", "格式"], export_folder: ["transformers folder", "transformers 文件夹"],
  export_f16: ["folder and GGUF f16", "文件夹和 GGUF f16"], export_q8_0: ["folder and GGUF q8_0", "文件夹和 GGUF q8_0"],
  export_q4_0: ["folder and GGUF q4_0", "文件夹和 GGUF q4_0"], export_ollama: ["Ollama folder", "Ollama 文件夹"],
  askExport: ["A new folder is written inside the run's; nothing is overwritten.", "将在运行文件夹内写入一个新文件夹，不覆盖任何内容。"],
  chat: ["Chat", "对话"], openChat: ["Open the chat", "打开对话"],
  askChat: ["The model is loaded beside whatever runs here, and stays in memory until the board ends.", "模型将加载到内存中，与其他任务共用本机，直到看板结束。"],
  askChatOther: ["Another run's chat is open. It is closed, with whatever it is answering.", "另一个运行的对话正在打开，它将被关闭，正在进行的回答也会中断。"],
  job_running: ["running", "运行中"], job_done: ["done", "完成"], job_failed: ["failed", "失败"], job_loading: ["loading", "加载中"], job_ready: ["ready", "就绪"],
  starting: ["starting", "启动中"], running: ["running", "运行中"], stalled: ["stalled", "停滞"], silent: ["silent", "无响应"], done: ["done", "完成"],
  failed: ["failed", "失败"], stopped: ["stopped", "已停止"], dead: ["dead", "已死"], empty: ["empty", "空"], unknown: ["no status", "无状态"],
  zoomHelp: ["Drag to zoom, Escape for the whole run; arrow keys read values.", "拖动以放大，Esc 显示全程；方向键读数。"],
};

let language = 0;

export function speak(code) {
  language = code === "zh" ? 1 : 0;
  document.documentElement.lang = code === "zh" ? "zh-CN" : "en";
  for (const node of document.querySelectorAll("[data-word]")) node.textContent = say(node.dataset.word);
  for (const node of document.querySelectorAll("[data-hint]")) {
    node.placeholder = say(node.dataset.hint);
    node.setAttribute("aria-label", say(node.dataset.hint));
  }
}

export function say(key, ...values) {
  const found = WORDS[key];
  return found ? found[language].replace(/\{(\d)\}/g, (_, place) => values[place]) : key;
}

/** 0: English, 1: Chinese. */
export const tongue = () => language;

// --- numbers as people read them ---

export function count(value) {
  return value == null ? "–" : value.toLocaleString("en-US", { maximumFractionDigits: 0 });
}

export function number(value) {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e9) return trim(value / 1e9, 3) + "B";
  if (size >= 1e6) return trim(value / 1e6, 3) + "M";
  if (size >= 1e4) return trim(value / 1e3, 3) + "k";
  return size < 1e-3 ? value.toExponential(1).replace("e-0", "e-") : trim(value, 5);
}

function trim(value, digits) {
  return String(Number(value.toPrecision(digits)));
}

export function bytes(value) {
  if (!value) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  for (; value >= 1023.5 && place < 4; place += 1) value /= 1024;
  return `${trim(value, value >= 1000 ? 4 : 3)} ${units[place]}`;
}

export function seconds(value) {
  if (value == null) return "–";
  if (value < 0.1 && value > 0) return `${trim(value * 1000, 2)} ms`;
  if (value < 60) return `${value < 10 ? value.toFixed(1) : Math.round(value)} s`;
  const minutes = Math.floor(value / 60), hours = Math.floor(minutes / 60);
  if (minutes < 60) return `${minutes} min`;
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function percent(share) {
  return share > 0 && share < 0.005 ? "<1%" : `${Math.round(share * 100)}%`;
}
