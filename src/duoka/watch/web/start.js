// A run from a form: its fields are the schema's, and what `duoka plan` says stands beside them while they are typed.

import { post, tell } from "./act.js";
import { el } from "./chart.js";
import { bytes, count, number, percent, say, seconds, tongue } from "./words.js";

const QUIET_MS = 350; // after the last key

export class StartForm {
  constructor(node, started, left) {
    [this.node, this.started, this.left] = [node, started, left];
    this.values = new Map();
    this.form = null;
    this.timer = 0;
    this.isAsking = this.isStale = false;
    this.found = null;
  }

  get isOpen() { return !this.node.hidden; }

  async open() {
    this.node.hidden = false;
    if (!this.form) {
      this.form = await (await fetch("/api/form")).json();
      for (const [key, value] of Object.entries(this.form.filled)) this.values.set(key, value);
      this.name = "run-1";
      this.processes = "";
    }
    this.draw();
    this.node.querySelector("#new-name").focus();
    this.ask();
  }

  close() {
    this.node.hidden = true;
    this.left();
  }

  // --- the fields ---

  draw() {
    const wasOpen = new Set([...this.node.querySelectorAll("details[open]")].map((one) => one.dataset.block));
    const known = new Map(this.form.fields.map((field) => [field.name, field]));
    const first = this.form.first.map((name) => known.get(name)).filter(Boolean);
    const rest = this.form.fields.filter((field) => !this.form.first.includes(field.name));
    const blocks = [...new Set(rest.map((field) => field.block))];
    const name = el("input", { id: "new-name", value: this.name, required: true, autocomplete: "off", oninput: () => { this.name = name.value; } });
    const processes = el("input", { id: "new-processes", type: "number", min: "0", value: this.processes, placeholder: say("auto"),
      oninput: () => { this.processes = processes.value; this.soon(); } });
    this.side = el("div", { id: "new-plan", class: "card", "aria-live": "polite" });
    this.button = el("button", { type: "submit", id: "new-start", class: "main", text: say("start"), disabled: true });
    const form = el("form", { onsubmit: (event) => { event.preventDefault(); this.start(); } },
      el("div", { class: "fields" }, row(say("runName"), "new-name", name, say("runNameHelp")),
        row(say("processes"), "new-processes", processes, say("processesHelp")), ...first.map((field) => this.field(field))),
      el("h3", { text: say("allKeys") }),
      ...blocks.map((block) => el("details", { "data-block": block, open: wasOpen.has(block) }, el("summary", { text: block }),
        el("div", { class: "fields" }, ...rest.filter((field) => field.block === block).map((field) => this.field(field))))),
      el("menu", {}, el("button", { type: "button", text: say("no"), onclick: () => this.close() }), this.button));
    this.node.replaceChildren(el("h2", { text: say("newRun") }), el("div", { class: "beside" }, form, this.side));
    this.show();
  }

  field(field) {
    const id = `key-${field.name}`, value = this.values.get(field.name) ?? "";
    const set = (text) => {
      if (text.trim()) this.values.set(field.name, text);
      else this.values.delete(field.name);
      this.soon();
    };
    let input;
    if (field.is_switch) {
      input = el("input", { id, type: "checkbox", checked: value === "true", onchange: () => set(input.checked ? "true" : "") });
    } else if (field.choices.length) {
      const none = el("option", { value: "", text: field.default ? say("byDefault", field.default) : "–" });
      input = el("select", { id, onchange: () => set(input.value) }, none, ...field.choices.map((one) => el("option", { value: one, text: one, selected: one === value })));
    } else {
      input = el("input", { id, value, placeholder: field.default || field.words, autocomplete: "off", spellcheck: "false", oninput: () => set(input.value) });
    }
    return row(field.name, id, input, field.help[tongue()]);
  }

  // --- the plan beside them ---

  soon() {
    clearTimeout(this.timer);
    this.button.disabled = true;
    this.timer = setTimeout(() => this.ask(), QUIET_MS);
  }

  /** One question at a time; what was typed meanwhile is asked after it. */
  async ask() {
    this.isStale = this.isAsking;
    if (this.isAsking) return;
    this.isAsking = true;
    this.side.setAttribute("aria-busy", "true");
    const found = await post("/api/plan", this.draft()).catch((error) => ({ yaml: "", faults: [error.message] }));
    this.isAsking = false;
    if (this.isStale) {
      this.ask();
      return;
    }
    this.found = found.error ? { yaml: "", faults: [found.error] } : found;
    this.show();
  }

  draft() {
    return { values: Object.fromEntries(this.values), processes: Math.trunc(Number(this.processes)) || 0 };
  }

  show() {
    const { found } = this;
    this.side.removeAttribute("aria-busy");
    if (!found) {
      this.side.replaceChildren(el("p", { class: "soft", text: say("planning") }));
      return;
    }
    const faults = (found.faults ?? []).join("\n");
    for (const input of this.node.querySelectorAll("[id^=key-]")) {
      const isNamed = new RegExp(`(^|[\\s"])${input.id.slice(4).replaceAll(".", "\\.")}([\\s,;:"]|$)`).test(faults);
      input.toggleAttribute("aria-invalid", isNamed);
    }
    this.button.disabled = !found.plan || found.plan.verdict === "does not fit";
    const yaml = el("details", { open: true }, el("summary", { text: say("yaml") }), el("pre", { tabindex: "0", text: found.yaml || "–" }));
    this.side.replaceChildren(...(found.plan ? planned(found.plan, found.notes) : [
      el("h3", { class: "bad", text: say("hasFaults") }), el("pre", { class: "bad", tabindex: "0", text: faults })]), yaml);
  }

  async start() {
    this.button.disabled = true;
    const name = this.name.trim();
    const found = await post("/api/start", { ...this.draft(), run: name, confirm: name }).catch((error) => ({ error: error.message }));
    tell(found.done ?? found.error);
    if (found.done) {
      this.close();
      this.started(name);
    } else {
      this.side.prepend(el("pre", { class: "bad", role: "alert", text: found.error }));
      this.button.disabled = false;
    }
  }
}

function row(name, id, input, help) {
  input.setAttribute("aria-describedby", `${id}-help`);
  return el("div", { class: "field" }, el("label", { for: id, text: name }), input, el("small", { id: `${id}-help`, text: help }));
}

function planned(plan, notes = []) {
  const { memory } = plan, fits = plan.verdict !== "does not fit", share = memory.peak_bytes / memory.available_bytes;
  const least = plan.steps?.is_exact ? "" : "≈ ";
  const facts = [
    [say("memory"), `${bytes(memory.peak_bytes)} ${say("of")} ${bytes(memory.available_bytes)} (${percent(share)})`],
    [say("layout"), `${plan.layout.name}, ${plan.layout.precision}`],
    [say("trained"), `${number(plan.trained)} ${say("of")} ${number(plan.parameters)}`],
    [say("steps"), plan.steps ? `${least}${count(plan.steps.total)}` : "–"],
    [say("speed"), plan.tokens_per_s ? `≈ ${count(plan.tokens_per_s)} tok/s` : "–"],
    [say("spent"), plan.total_s ? `≈ ${seconds(plan.total_s)}` : "–"],
  ];
  const bar = el("meter", { min: "0", max: "1", high: "0.9", optimum: "0.5", value: String(Math.min(1, share)), "aria-label": say("memory") });
  const more = [plan.batch, ...plan.warnings, ...plan.notes, ...notes].map(String);
  return [
    el("h3", { class: fits ? "good" : "bad", text: fits ? say("fits", plan.verdict) : say("doesNotFit") }), bar,
    el("dl", {}, ...facts.flatMap(([name, value]) => [el("dt", { text: name }), el("dd", { text: value })])),
    el("ul", { class: "plain-list" }, ...more.map((text) => el("li", { text }))),
    fits ? null : el("ul", { class: "hints" }, ...plan.smaller.map((one) => el("li", { text: one }))),
  ].filter(Boolean);
}
