// What stands around the charts: how a run stands, its ranks, events, texts, logs, and how runs differ.

import { el, least, most } from "./chart.js";
import { bytes, count, number, percent, say, seconds } from "./words.js";

const PARTS = {
  rollouts: "#d55e00", data: "#56b4e9", forward: "#0072b2", backward: "#5b5bd6", wait: "#e69f00", optimizer: "#009e73", checkpoint: "#cc79a7", other: "#999",
};
const GOOD = ["running", "done"], BAD = ["failed", "dead", "stalled"];
const MOST_ROWS = 64;

export const stateClass = (state) => (GOOD.includes(state) ? "good" : BAD.includes(state) ? "bad" : "warn");

/** What is as it was stays: a button that is replaced loses the focus, and a click that began on it. */
export function renew(parent, nodes) {
  const old = [...parent.children];
  nodes.forEach((node, place) => {
    if (place >= old.length) parent.append(node);
    else if (old[place].outerHTML !== node.outerHTML) old[place].replaceWith(node);
  });
  for (const node of old.slice(nodes.length)) node.remove();
}

export function badge(state) {
  return el("span", { class: `badge ${stateClass(state)}`, text: say(state) });
}

function table(head, rows, isNumber = () => false) {
  const cells = (row, tag) => row.map((cell, place) => {
    const node = el(tag, tag === "th" ? { scope: "col" } : {}, cell ?? "");
    if (isNumber(place)) node.className = "n";
    return node;
  });
  return el("div", { class: "scroll", tabindex: "0" }, el("table", { class: "plain" },
    el("thead", {}, el("tr", {}, ...cells(head, "th"))), el("tbody", {}, ...rows.map((row) => el("tr", {}, ...cells(row, "td"))))));
}

function figure(name, value, note) {
  return el("div", { class: "card" }, el("span", { text: name }), el("b", { text: value }), note ? el("small", { text: note }) : null);
}

export function emptyFolder() {
  return el("div", { class: "card empty" }, el("h2", { text: say("none") }), el("p", { class: "soft", text: say("noneHelp") }),
    el("pre", { text: "duoka init\nduoka train sft.yaml" }));
}

function wentBack(now) {
  const { num_restarts: starts, num_rollbacks: backs } = now;
  const parts = [starts && say("restarts", starts), backs && say("rollbacks", backs)].filter(Boolean);
  return parts.length ? [...parts, say("steps_lost", count(now.num_lost))].join(", ") : "";
}

export function overview(now, actions) {
  const isOver = ["done", "failed", "stopped", "dead"].includes(now.state);
  const title = el("div", { class: "title" }, el("h2", { text: now.name }), badge(now.state),
    el("span", { class: "soft", text: `${count(now.world_size)} ${say("processes")}${now.host ? ` · ${now.host}` : ""}` }),
    el("a", { href: `/report?run=${encodeURIComponent(now.name)}`, target: "_blank", rel: "noopener", text: say("report") }), ...actions);
  const steps = now.total_steps ? say("progress", count(now.step), count(now.total_steps)) : say("atStep", count(now.step));
  const memory = now.memory;
  const cards = [
    figure(say("loss"), number(now.loss_recent ?? now.loss), now.eval_loss == null ? "" : `${say("evaluation")} ${number(now.eval_loss)}`),
    figure(say("speed"), now.tokens_per_s ? `${count(now.tokens_per_s)} tok/s` : "–",
      now.predicted_tokens_per_s ? say("plan", count(now.predicted_tokens_per_s)) : ""),
    figure(say("grad_norm"), number(now.grad_norm), now.lr == null ? "" : say("lr_is", number(now.lr))),
    figure(say("memory"), bytes(memory.max), memory.peak ? say("plan", bytes(memory.peak)) : ""),
    figure(say("spent"), seconds(now.seconds), wentBack(now)),
    isOver ? null : figure(say("age"), say("ago", seconds(now.age_s)), now.eta_s == null ? "" : say("left", seconds(now.eta_s))),
    now.mfu == null ? null : figure("MFU", `${(now.mfu * 100).toFixed(1)}%`),
    now.cost == null ? null : figure(say("cost"), now.cost.toFixed(2)),
  ].filter(Boolean);
  const hints = now.hints.map((hint) => el("li", {}, hint.seen, el("small", { text: hint.do })));
  return [
    title, el("progress", { max: now.total_steps || 1, value: now.total_steps ? now.step : 0, "aria-label": steps }),
    el("small", { class: "soft", text: steps }), now.cause.length ? el("pre", { class: "bad", text: now.cause.join("\n") }) : null,
    hints.length ? el("ul", { class: "hints" }, ...hints) : null, el("div", { class: "cards" }, ...cards),
  ].filter(Boolean);
}

export function timeBar(times) {
  const total = Object.values(times).reduce((a, b) => a + b, 0);
  if (!total) return null;
  const bar = el("div", { class: "bar", role: "img" }), key = el("p", { class: "key" });
  for (const [name, value] of Object.entries(times)) {
    const piece = el("i", { title: `${say(name)} ${percent(value / total)}` }), sample = el("i");
    piece.style.setProperty("width", `${(100 * value) / total}%`);
    for (const one of [piece, sample]) one.style.setProperty("background", PARTS[name]);
    bar.append(piece);
    key.append(el("span", {}, sample, `${say(name)} ${percent(value / total)}`));
  }
  bar.setAttribute("aria-label", key.textContent);
  return el("div", { class: "card" }, el("h2", { text: say("where") }), bar, key);
}

export function rankTable(now) {
  if (!now.ranks.length) return el("p", { class: "soft", text: say("noRanks") });
  const sorted = [...now.ranks].sort((a, b) => a.wait_s - b.wait_s), shown = sorted.slice(0, MOST_ROWS);
  const { peak, high } = now.memory, scale = 1.05 * Math.max(high ?? 0, ...sorted.map((one) => one.memory_bytes ?? 0));
  const head = [say("rank"), say("step"), say("seconds"), say("ownTime"), say("waitShare"), say("peak"), peak ? say("againstPlan") : ""];
  const node = table(head, shown.map((one) => [
    String(one.rank), count(one.step), one.step_s.toPrecision(3), one.own_s.toPrecision(3), percent(one.wait_s / (one.step_s || 1)),
    bytes(one.memory_bytes), track(one.memory_bytes, peak, scale),
  ]), (place) => place < 6);
  if (now.slowest) {
    const place = shown.findIndex((one) => one.rank === now.slowest.rank);
    node.querySelectorAll("tbody tr")[place]?.classList.add("slow");
  }
  const more = sorted.length - shown.length;
  return el("div", { class: "card" }, el("h2", { text: say("ranks") }), now.slowest_says ? el("p", { class: "bad", text: now.slowest_says }) : null,
    node, more > 0 ? el("p", { class: "soft", text: say("more", more) }) : null);
}

function track(value, plan, scale) {
  if (!value) return "";
  const bar = el("span", { class: "track" }), fill = el("i"), line = el("u");
  fill.style.setProperty("width", `${(100 * value) / scale}%`);
  bar.append(fill);
  if (plan) {
    line.style.setProperty("left", `${(100 * plan) / scale}%`);
    bar.append(line);
  }
  return bar;
}

export class Heat {
  constructor() {
    this.canvas = el("canvas", { tabindex: "0", role: "img" });
    this.says = el("p", { class: "soft", "aria-live": "polite" });
    this.measure = el("select", { onchange: () => this.draw(this.data) });
    this.node = el("div", { class: "card" });
    this.at = [0, 0];
    this.canvas.addEventListener("pointermove", (event) => {
      const box = this.canvas.getBoundingClientRect();
      this.tell(Math.floor(((event.clientY - box.top) / box.height) * this.canvas.height),
        Math.floor(((event.clientX - box.left) / box.width) * this.canvas.width));
    });
    this.canvas.addEventListener("keydown", (event) => {
      const turn = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!turn) return;
      event.preventDefault();
      this.tell(this.at[0] + turn[0], this.at[1] + turn[1]);
    });
  }

  draw(data) {
    if (!data.is_whole) {
      this.says.textContent = say("reading", percent(data.share_read));
      if (!this.data || this.data.run !== data.run) this.node.replaceChildren(el("h2", { text: say("heat") }), this.says);
      return;
    }
    if (!this.data || this.data.run !== data.run) this.says.textContent = "";
    this.data = data;
    const chosen = this.measure.value || "own";
    this.measure.replaceChildren(el("option", { value: "own", text: say("own") }), el("option", { value: "wait", text: say("waits") }));
    this.measure.value = chosen;
    const cells = data[chosen], isOwn = chosen === "own";
    this.canvas.height = Math.max(1, cells.length);
    this.canvas.width = Math.max(1, cells[0]?.length ?? 1);
    this.canvas.style.setProperty("height", `${Math.min(420, Math.max(60, cells.length * 16))}px`);
    const known = cells.flat().filter((one) => one != null);
    // A map of next to no spread would show noise as if it were news.
    const low = isOwn ? Math.min(0.9, least(known)) : 0, high = isOwn ? Math.max(1.2, most(known)) : Math.max(0.1, most(known));
    const brush = this.canvas.getContext("2d"), image = brush.createImageData(this.canvas.width, this.canvas.height);
    cells.forEach((row, y) => row.forEach((value, x) => {
      const share = value == null ? null : (value - low) / (high - low);
      image.data.set(heatColor(isOwn || share == null ? share : 1 - share), 4 * (y * this.canvas.width + x));
    }));
    brush.putImageData(image, 0, 0);
    this.canvas.setAttribute("aria-label", `${say("heat")}: ${say(isOwn ? "own" : "waits")}`);
    const ends = isOwn ? [`${number(low)}×`, `${number(high)}×`] : [percent(high), percent(low)];
    const scale = el("p", { class: "soft scale", "aria-hidden": "true" }, ends[0], el("i"), ends[1]);
    const notes = [data.group > 1 ? say("perCell", data.group) : "", data.is_sampled ? say("sampled") : ""].filter(Boolean).join(" · ");
    this.node.replaceChildren(el("h2", { text: say("heat") }), el("label", {}, `${say("measure")} `, this.measure),
      el("p", { class: "soft", text: `${say("heatHelp")} ${notes}` }), this.canvas, scale, this.says);
  }

  tell(row, column) {
    const cells = this.data[this.measure.value];
    this.at = [Math.min(cells.length - 1, Math.max(0, row)), Math.min(this.canvas.width - 1, Math.max(0, column))];
    const value = cells[this.at[0]]?.[this.at[1]];
    const step = Math.floor((this.at[1] * this.data.last_step) / this.canvas.width) + 1;
    const shown = value == null ? "–" : this.measure.value === "own" ? `${number(value)}×` : percent(value);
    this.says.textContent = say("cell", this.data.ranks[this.at[0]], count(step), shown);
  }
}

// Dark blue over grey to yellow (cividis): rises in lightness too, so that it reads without color.
function heatColor(share) {
  if (share == null) return [128, 128, 128, 60];
  const stops = [[0, 34, 78], [53, 69, 108], [102, 105, 112], [148, 142, 119], [200, 184, 102], [254, 232, 56]];
  const place = Math.min(0.9999, Math.max(0, share)) * (stops.length - 1), from = Math.floor(place);
  return [...stops[from].map((one, i) => one + (stops[from + 1][i] - one) * (place - from)), 255];
}

export function events(notes) {
  const rows = [...notes].reverse().map((note) => {
    const when = note.t == null ? "" : new Date(note.t * 1000).toLocaleString(document.documentElement.lang);
    const kind = el("span", { class: { warning: "warn", resume: "good" }[note.kind] ?? "", text: note.kind });
    return [when, count(note.step), kind, note.text];
  });
  return el("div", { class: "card" }, table([say("when"), say("step"), say("kind"), say("text")], rows, (place) => place === 1));
}

export function texts(samples) {
  if (!samples.length) return el("p", { class: "soft", text: say("noTexts") });
  return el("div", { class: "stack" }, ...[...samples].reverse().map((one) => el("div", { class: "card" }, el("h2", { text: say("atStep", count(one.step)) }),
    ...(one.samples ?? []).map((pair) => el("blockquote", {}, el("span", { class: "soft", text: pair.prompt }), el("b", { text: pair.text }))))));
}

export function differences(found) {
  if (found.runs.length < 2) return el("p", { class: "soft", text: say("choose") });
  if (!found.rows.length) return el("p", { text: say("equal") });
  const of = { config: say("config"), environment: say("environment"), plan: say("planOf") };
  return el("div", { class: "card" }, table([say("source"), say("key"), ...found.runs],
    found.rows.map((row) => [of[row.source], row.key, ...row.values.map((value) => value ?? "–")])));
}
