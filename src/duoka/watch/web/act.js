// Acting, on a board that was started with --control: buttons of a run, what asks first, and what has been begun.

import { el } from "./chart.js";
import { say } from "./words.js";

const $ = (id) => document.getElementById(id);
const EXPORTS = ["folder", "f16", "q8_0", "q4_0", "ollama"];
const ON = ["running", "starting", "stalled"];

export async function post(path, asked) {
  const answer = await fetch(path, { method: "POST", headers: { "X-Duoka": "act" }, body: JSON.stringify(asked) });
  return answer.json();
}

export function tell(text) {
  $("live").textContent = text;
  $("said").textContent = text;
}

/** The buttons of the run that is looked at; `again` asks the server anew. */
export function runActions(now, jobs, again) {
  const isOn = ON.includes(now.state), name = now.name, made = [];
  const add = (id, word, text, path, kind, extra) => made.push(el("button", {
    type: "button", id, class: kind, text: say(word), onclick: () => ask(name, path, word, text, again, extra),
  }));
  if (isOn) add("act", "stop", "askStop", "/api/stop", "danger");
  else if (now.state !== "done") add("act", "goOn", "askGoOn", "/api/go-on", "");
  const chat = jobs.find((job) => job.kind === "chat");
  if (chat?.run === name && chat.state === "ready") made.push(openChat());
  else if (chat?.run !== name || chat.state !== "loading") {
    const other = chat && chat.run !== name && chat.state !== "failed";
    add("chat", "chat", other ? "askChatOther" : "askChat", "/api/chat", "");
  }
  add("export", "export", "askExport", "/api/export", "", exportKinds);
  return made;
}

const openChat = () => el("a", { href: "/chat", target: "_blank", rel: "noopener", class: "badge good", text: say("openChat") });

function exportKinds() {
  const select = el("select", { id: "export-kind" }, ...EXPORTS.map((kind) => el("option", { value: kind, text: say(`export_${kind}`) })));
  return { node: el("label", {}, `${say("exportTo")} `, select), asked: () => ({ kind: select.value }) };
}

function ask(name, path, word, text, again, extra) {
  const more = extra?.();
  $("ask-title").textContent = `${say(word)}: ${name}`;
  $("ask-text").textContent = say(text);
  $("ask-more").replaceChildren(...(more ? [more.node] : []));
  $("ask-yes").textContent = say(word);
  $("ask").onclose = async () => {
    if ($("ask").returnValue !== "yes") return;
    $("ask").returnValue = "";
    const found = await post(path, { run: name, confirm: name, ...more?.asked() }).catch((error) => ({ error: error.message }));
    tell(found.done ?? found.error);
    setTimeout(again, 1500);
  };
  $("ask").showModal();
}

/** What has been begun here and is no run of the list. */
export function jobCards(jobs) {
  return jobs.map((job) => {
    const kind = job.kind.startsWith("export ") ? say("export") : say(job.kind === "chat" ? "chat" : "start");
    const look = job.state === "failed" ? "bad" : job.state === "done" || job.state === "ready" ? "good" : "soft";
    const head = el("div", {}, `${kind}: ${job.run} `, el("span", { class: look, text: say(`job_${job.state}`) }));
    if (job.kind === "chat" && job.state === "ready") head.append(" ", openChat());
    return el("li", { class: "card" }, head, job.text ? el("pre", { tabindex: "0", text: job.text }) : null);
  });
}
