// The chat page: conversations live in this page alone; nothing is asked of any other machine.
"use strict";

const words = {
  zh: {
    models: "模型", settings: "设置", system: "系统消息", temperature: "温度", longest: "最长回答（词元）",
    seed: "种子（留空：每次不同）", key: "密钥", new: "新对话", save: "导出", open: "导入", send: "发送", stop: "停止",
    hint: "请输入问题。回车发送，Shift+回车换行。", edit: "编辑", again: "重新生成", copy: "复制",
    none: "请至少选择一个模型。", lost: "与服务器的连接断了。", wrong: "这个文件不是导出的对话。", stopped: "已停止",
    ask: "问题", copied: "已复制", noCopy: "浏览器不允许复制。", kept: "编辑中：发送后，此问题之后的内容将被替换；按 Esc 取消。",
    speed: "{0} 个词元，{1} 秒，每秒 {2} 个 · 首个在 {3} 秒后", begin: "在下方提问",
    beginHelp: "勾选多个模型，它们会并排回答。对话只保存在这个标签页中。",
  },
  en: {
    models: "Models", settings: "Settings", system: "System message", temperature: "Temperature",
    longest: "Longest answer (tokens)", seed: "Seed (empty: another each time)", key: "Key", new: "New", save: "Export",
    open: "Import", send: "Send", stop: "Stop", hint: "Ask something. Enter sends, Shift+Enter makes a new line.",
    edit: "Edit", again: "Again", copy: "Copy", none: "Choose at least one model.", lost: "The connection was lost.",
    wrong: "This file is no exported conversation.", stopped: "stopped", ask: "Question", copied: "copied",
    noCopy: "The browser does not allow copying.",
    kept: "Editing: sending replaces this question and what follows; Escape leaves it as it is.",
    speed: "{0} tokens in {1} s, {2}/s · first after {3} s", begin: "Ask something below",
    beginHelp: "Tick several models and they answer side by side. The conversation stays in this tab.",
  },
};
const at = (id) => document.getElementById(id);
let language = navigator.language.startsWith("zh") ? "zh" : "en";
let turns = []; // {text, answers: {model: {text, note, bad}}}
let running = null; // an AbortController while answers are written
let editing = null; // the place of the turn whose question is being edited

const say = (name, ...values) => words[language][name].replace(/\{(\d)\}/g, (_, place) => values[place]);

function tell(text) {
  at("said").textContent = text;
}

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function translate() {
  document.documentElement.lang = language;
  for (const one of document.querySelectorAll("[data-text]")) one.textContent = say(one.dataset.text);
  at("text").placeholder = say("hint");
  at("text").setAttribute("aria-label", say("ask"));
  at("language").textContent = language === "zh" ? "English" : "中文";
  draw();
}

function chosenModels() {
  return [...document.querySelectorAll("#models input:checked")].map((box) => box.value);
}

// --- drawing ---

function draw() {
  const empty = element("section", { className: "empty" }, element("h2", { textContent: say("begin") }),
    element("p", { textContent: say("beginHelp") }));
  at("log").replaceChildren(...(turns.length ? turns.map(drawTurn) : [empty]));
  at("log").scrollTop = at("log").scrollHeight;
}

function plain() {
  return turns.map(({ text, answers }) => ({
    text, answers: Object.fromEntries(Object.entries(answers).map(([model, { text }]) => [model, { text }])),
  }));
}

function take(found) {
  turns = found.turns.map(({ text, answers }) => ({
    text: String(text),
    answers: Object.fromEntries(Object.entries(answers).map(([model, answer]) =>
      [model, { text: String(answer.text), note: "", bad: false }])),
  }));
  at("system").value = found.system;
}

// For this tab alone, so that loading the page again does not lose what was said.
function keep() {
  try {
    sessionStorage.setItem("chat", JSON.stringify({ system: at("system").value, turns: plain() }));
  } catch { /* too long for the browser: it is kept on the page */ }
}

function drawTurn(turn, place) {
  const edit = element("button", { type: "button", textContent: say("edit"), onclick: () => editTurn(place) });
  const answers = Object.entries(turn.answers).map(([model, answer]) => drawAnswer(turn, place, model, answer));
  return element("section", { className: editing !== null && place >= editing ? "turn replaced" : "turn" },
    element("div", { className: "said", textContent: turn.text }),
    element("div", { className: "edit" }, edit),
    element("div", { className: "answers" }, ...answers));
}

function drawAnswer(turn, place, model, answer) {
  const text = element("p", { textContent: answer.text });
  const note = element("span", { textContent: answer.note, className: answer.bad ? "bad" : "" });
  answer.show = () => {
    const log = at("log");
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60; // who scrolled up reads there
    text.textContent = answer.text;
    note.textContent = answer.note;
    note.className = answer.bad ? "bad" : "";
    if (follows) log.scrollTop = log.scrollHeight;
  };
  const again = element("button", { type: "button", textContent: say("again"), onclick: () => answerAgain(place, model) });
  const copy = element("button", { type: "button", textContent: say("copy"), onclick: () => copyText(answer.text) });
  return element("article", { className: "answer" }, element("h2", { textContent: model }), text,
    element("footer", {}, again, copy, note));
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    tell(say("copied"));
  } catch {
    tell(say("noCopy"));
  }
}

// --- asking ---

function messagesFor(place, model) {
  const system = at("system").value.trim();
  const messages = system ? [{ role: "system", content: system }] : [];
  turns.slice(0, place + 1).forEach((turn, number) => {
    messages.push({ role: "user", content: turn.text });
    if (number < place) {
      const own = turn.answers[model] || Object.values(turn.answers)[0];
      messages.push({ role: "assistant", content: own ? own.text : "" });
    }
  });
  return messages;
}

function request(place, model) {
  const body = {
    model, messages: messagesFor(place, model), stream: true, stream_options: { include_usage: true },
    temperature: Number(at("temperature").value), top_p: Number(at("top_p").value),
    max_tokens: Number(at("max_tokens").value),
  };
  if (at("seed").value !== "") body.seed = Number(at("seed").value);
  return body;
}

async function fetchAnswer(place, model, answer, signal) {
  const began = performance.now();
  let first = null;
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST", signal, body: JSON.stringify(request(place, model)),
      headers: { "Content-Type": "application/json", Authorization: `Bearer ${at("key").value}` },
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const frame of frames(response.body)) {
      if (frame.error) throw new Error(frame.error.message);
      const piece = frame.choices[0]?.delta.content;
      if (piece) {
        first ??= performance.now();
        answer.text += piece;
      }
      if (frame.usage) {
        const seconds = (performance.now() - began) / 1000, waited = ((first ?? performance.now()) - began) / 1000;
        const count = frame.usage.completion_tokens;
        answer.note = say("speed", count, seconds.toFixed(2), (count / seconds).toFixed(1), waited.toFixed(2));
      }
      answer.show();
    }
  } catch (error) {
    const isStopped = error.name === "AbortError";
    answer.bad = !isStopped;
    answer.note = isStopped ? say("stopped") : error instanceof TypeError ? say("lost") : error.message;
    answer.show();
  }
}

async function* frames(stream) {
  const decoder = new TextDecoder(); // keeps the bytes of a character until it is whole
  const reader = stream.getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += decoder.decode(value, { stream: true });
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function answerTurn(place, models) {
  if (!models.length) return tell(say("none"));
  running?.abort();
  tell("");
  const own = running = new AbortController();
  const turn = turns[place];
  for (const model of models) turn.answers[model] = { text: "", note: "…", bad: false };
  turns = turns.slice(0, place + 1);
  draw();
  at("stop").hidden = false;
  at("send").hidden = true;
  keep();
  await Promise.all(models.map((model) => fetchAnswer(place, model, turn.answers[model], own.signal)));
  if (running === own) {
    keep();
    // Once, when they are whole: a screen reader would begin anew with every piece.
    at("heard").textContent = models.map((model) => `${model}: ${turn.answers[model].text}`).join("\n");
    running = null;
    at("stop").hidden = true;
    at("send").hidden = false;
  }
}

function answerAgain(place, model) {
  turns = turns.slice(0, place + 1);
  return answerTurn(place, [model]);
}

function editTurn(place) {
  running?.abort();
  setEditing(place);
  at("text").value = turns[place].text;
  at("text").focus();
}

function setEditing(place) {
  editing = place;
  tell(place === null ? "" : say("kept"));
  draw();
}

// --- what is clicked and typed ---

at("form").onsubmit = (event) => {
  event.preventDefault();
  const text = at("text").value.trim();
  if (!text || (running && !running.signal.aborted)) return;
  if (!chosenModels().length) return tell(say("none"));
  at("text").value = "";
  if (editing !== null) turns = turns.slice(0, editing);
  editing = null;
  turns.push({ text, answers: {} });
  answerTurn(turns.length - 1, chosenModels());
};
at("text").onkeydown = (event) => {
  if (event.key === "Escape" && editing !== null) {
    at("text").value = "";
    return setEditing(null);
  }
  const sends = event.key === "Enter" && !event.shiftKey && !event.isComposing;
  if (sends && !matchMedia("(pointer: coarse)").matches) {
    event.preventDefault();
    at("form").requestSubmit();
  }
  return undefined;
};
at("stop").onclick = () => running?.abort();
at("new").onclick = () => {
  running?.abort();
  turns = [];
  setEditing(null);
  keep();
  at("text").focus();
};
at("save").onclick = () => {
  const file = new Blob([JSON.stringify({ duoka: "chat", system: at("system").value, turns: plain() }, null, 2)]);
  const link = element("a", { href: URL.createObjectURL(file), download: "chat.json" });
  link.click();
  URL.revokeObjectURL(link.href);
};
at("open").onchange = async () => {
  try {
    const found = JSON.parse(await at("open").files[0].text());
    if (found.duoka !== "chat") throw new Error();
    take(found);
    setEditing(null);
    keep();
  } catch {
    tell(say("wrong"));
  }
  at("open").value = "";
};
at("language").onclick = () => {
  language = language === "zh" ? "en" : "zh";
  translate();
};
at("key").onchange = () => {
  sessionStorage.setItem("key", at("key").value);
  listModels();
};

async function listModels() {
  try {
    const response = await fetch("/v1/models", { headers: { Authorization: `Bearer ${at("key").value}` } });
    const found = await response.json();
    if (!response.ok) throw new Error(found.error.message);
    const boxes = found.data.map(({ id }, place) => element("label", {},
      element("input", { type: "checkbox", value: id, checked: place === 0 }), ` ${id}`));
    at("models").replaceChildren(at("models").querySelector("legend"), ...boxes);
  } catch (error) {
    at("settings").open = true;
    at("models").replaceChildren(at("models").querySelector("legend"),
      element("span", { className: "bad", textContent: error.message }));
  }
}

// The key comes behind the #, which no request carries; it is kept for this tab and taken out of the address.
const given = new URLSearchParams(location.hash.slice(1)).get("key");
if (given) {
  sessionStorage.setItem("key", given);
  history.replaceState(null, "", location.pathname);
}
at("key").value = sessionStorage.getItem("key") ?? "";
try {
  take(JSON.parse(sessionStorage.getItem("chat")));
} catch { /* nothing was said in this tab yet */ }
translate();
listModels();
