// Line charts in SVG: several runs in one, smoothed on the page, readable with pointer, keyboard and screen reader.
// A row of a curve is [x, y], or [x, mean, least, most] where many steps share a pixel; null is a gap.

import { bytes, count, number, say, seconds } from "./words.js";

// Okabe and Ito's colors, which color-blind readers can tell apart, with a dash each for print.
const COLORS = [
  ["light-dark(#0060a8,#56a8f0)", ""], ["light-dark(#c45100,#f59a3c)", "6 3"], ["light-dark(#00805a,#3ecf9c)", "2 2"],
  ["light-dark(#a8437c,#e391bd)", "8 3 2 3"], ["light-dark(#806c00,#e8d44d)", "4 2"], ["light-dark(#444,#ccc)", "1 3"],
];
const LEFT = 54, RIGHT = 12, TOP = 8, BOTTOM = 26;

export const colorOf = (place) => COLORS[place % COLORS.length][0];

export function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") node.textContent = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== false && value != null) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

function svg(name, attributes = {}, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text != null) node.textContent = text;
  return node;
}

export function paint(node, color) {
  node.style.setProperty("stroke", color); // by script: the page's policy allows no style in markup
  return node;
}

// A running mean that forgets, from both ends: from one alone it would run behind a falling curve.
export function smooth(rows, keep) {
  if (!keep) return rows;
  const there = forgetful(rows, keep), back = forgetful([...rows].reverse(), keep).reverse();
  return rows.map((row, place) => (row[1] == null ? row : [row[0], (there[place] + back[place]) / 2]));
}

function forgetful(rows, keep) {
  let total = 0, weight = 0;
  return rows.map((row) => {
    if (row[1] == null) return null;
    total = keep * total + (1 - keep) * row[1];
    weight = keep * weight + 1 - keep;
    return total / weight;
  });
}

export function ticks(low, high, most, log) {
  if (log) {
    const powers = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) powers.push(10 ** power);
    const fine = powers.flatMap((power) => [power, 2 * power, 5 * power]).filter((one) => one >= low && one <= high);
    if (fine.length >= 2 && fine.length <= most) return fine;
    const coarse = powers.filter((one) => one >= low && one <= high);
    if (coarse.length >= 2) return coarse.filter((_, place) => place % Math.ceil(coarse.length / most) === 0);
  }
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const out = [];
  for (let place = Math.ceil(low / size - 1e-9); place * size <= high + size * 1e-9; place += 1) {
    out.push(Number((place * size).toPrecision(12)));
  }
  return out;
}

export class Chart {
  constructor(key, isWide, onZoom) {
    this.key = key;
    this.isWide = isWide;
    this.onZoom = onZoom;
    this.data = null;
    this.at = null; // where the cursor stands, on the x axis
    this.title = el("h2");
    this.svg = svg("svg", { role: "img", tabindex: "0" });
    this.legend = el("table", { class: "legend" });
    this.node = el("article", { class: `card chart${isWide ? " wide" : ""}` }, this.title, this.svg, this.legend);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.move(null));
    this.svg.addEventListener("pointerdown", (event) => this.grab(event));
    this.svg.addEventListener("pointerup", (event) => this.release(event));
    this.svg.addEventListener("dblclick", () => this.onZoom(null));
    this.svg.addEventListener("keydown", (event) => this.press(event));
    // In the next frame: drawing changes the height, and would call for another look at once.
    new ResizeObserver(() => requestAnimationFrame(() => this.data && this.draw(this.data))).observe(this.title);
  }

  format(value) {
    if (this.key === "memory_bytes") return bytes(value);
    return this.key === "mfu" && value != null ? `${(value * 100).toFixed(1)}%` : number(value);
  }

  formatX(value) {
    return this.data.axis === "time" ? seconds(value) : this.data.axis === "tokens" ? number(value) : count(value);
  }

  // data: {axis, logX, logY, smooth, runs: [{name, place, rows, evals, marks}]}
  draw(data) {
    this.data = data;
    this.width = Math.max(240, this.node.clientWidth - 30);
    this.height = this.isWide ? 300 : 190;
    this.title.textContent = say(this.key);
    this.lines = data.runs.filter((run) => run.rows.some((row) => row[1] != null))
      .map((run) => ({ ...run, shown: smooth(run.rows, data.smooth) }));
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.svg.setAttribute("height", this.height);
    this.svg.setAttribute("aria-label", this.inWords());
    if (!this.lines.length) {
      this.svg.append(svg("text", { x: this.width / 2, y: this.height / 2, "text-anchor": "middle" }, say("nothing")));
      this.legend.replaceChildren();
      return;
    }
    this.scale();
    this.axes();
    if (this.isWide) this.marks();
    for (const line of this.lines) this.line(line);
    this.cursor = paint(svg("line", { class: "cursor", y1: TOP, y2: this.height - BOTTOM, visibility: "hidden" }), "");
    this.band = svg("rect", { class: "zoom", y: TOP, height: this.height - BOTTOM - TOP, visibility: "hidden" });
    this.svg.append(this.band, this.cursor);
    this.move(this.at);
  }

  scale() {
    const xs = [], ys = [];
    for (const line of this.lines) {
      for (const row of line.rows) {
        xs.push(row[0]);
        for (const y of this.data.smooth ? [row[1]] : row.slice(1)) if (y != null) ys.push(y);
      }
      for (const one of line.evals ?? []) if (one[1] != null) ys.push(one[1]);
    }
    const above = (values) => least(values.filter((one) => one > 0));
    this.logX = this.data.logX && most(xs) > 0;
    this.logY = this.data.logY && most(ys) > 0;
    this.x = [this.logX ? above(xs) : least(xs), most(xs)];
    this.y = [this.logY ? above(ys) : least(ys), most(ys)];
    if (this.x[0] === this.x[1]) this.x = [this.x[0] - 1, this.x[1] + 1];
    const air = (this.y[1] - this.y[0]) * 0.05 || Math.abs(this.y[0]) * 0.1 || 1;
    this.y = this.logY ? [this.y[0] / 1.1, this.y[1] * 1.1] : [this.y[0] - air, this.y[1] + air];
    // What is never below zero does not get an axis that is.
    if (!this.logY && this.y[0] < 0 && least(ys) >= 0) this.y[0] = 0;
  }

  share(value, [low, high], log) {
    return log ? Math.log(Math.max(value, low) / low) / Math.log(high / low) : (value - low) / (high - low);
  }

  px(value) { return LEFT + this.share(value, this.x, this.logX) * (this.width - LEFT - RIGHT); }

  py(value) { return this.height - BOTTOM - this.share(value, this.y, this.logY) * (this.height - BOTTOM - TOP); }

  axes() {
    // Round numbers of bytes are powers of two.
    const unit = this.key === "memory_bytes" ? 1024 ** Math.floor(Math.log2(Math.max(1, this.y[1])) / 10) : 1;
    for (const tick of ticks(this.y[0] / unit, this.y[1] / unit, this.isWide ? 7 : 4, this.logY).map((one) => one * unit)) {
      const y = this.py(tick);
      this.svg.append(svg("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }));
      this.svg.append(svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, this.format(tick)));
    }
    const bottom = this.height - BOTTOM;
    this.svg.append(svg("line", { class: "axis", x1: LEFT, x2: this.width - RIGHT, y1: bottom, y2: bottom }));
    for (const tick of ticks(this.x[0], this.x[1], Math.max(3, Math.floor(this.width / 110)), this.logX)) {
      const anchor = this.px(tick) > this.width - 40 ? "end" : "middle";
      this.svg.append(svg("text", { x: this.px(tick), y: bottom + 16, "text-anchor": anchor }, this.formatX(tick)));
    }
  }

  marks() {
    const bottom = this.height - BOTTOM;
    for (const line of this.lines) {
      for (const [kind, step, place, text] of line.marks ?? []) {
        if (place == null || place < this.x[0] || place > this.x[1]) continue;
        const x = this.px(place);
        const isLong = kind === "resume" || kind === "warning";
        if (!isLong && kind !== "checkpoint") continue;
        const mark = svg("line", { class: `mark ${kind}`, x1: x, x2: x, y1: isLong ? TOP : bottom - 6, y2: bottom });
        mark.append(svg("title", {}, `${line.name}, ${say("atStep", count(step))}: ${kind} ${text}`));
        this.svg.append(mark);
        if (isLong) this.svg.append(svg("text", { class: kind, x: x + 3, y: TOP + 10 }, kind === "resume" ? "↻" : "⚠"));
      }
    }
  }

  path(rows, value) {
    let out = "", isDown = false;
    for (const row of rows) {
      const y = value(row);
      if (y == null || (this.logY && y <= 0) || (this.logX && row[0] <= 0)) isDown = false;
      else {
        out += `${isDown ? "L" : "M"}${this.px(row[0]).toFixed(1)} ${this.py(y).toFixed(1)}`;
        isDown = true;
      }
    }
    return out;
  }

  line(line) {
    const [color, dash] = COLORS[line.place % COLORS.length];
    const whole = line.rows.filter((row) => row.length === 4 && row[2] != null);
    if (whole.length > 1) {
      const top = this.path(whole, (row) => row[3]), low = this.path([...whole].reverse(), (row) => row[2]);
      const band = svg("path", { class: "band", d: `${top}L${low.slice(1)}Z` });
      band.style.setProperty("fill", color);
      this.svg.append(band);
    }
    if (this.data.smooth) this.svg.append(paint(svg("path", { class: "raw", d: this.path(line.rows, (row) => row[1]) }), color));
    this.svg.append(paint(svg("path", { d: this.path(line.shown, (row) => row[1]), "stroke-dasharray": dash }), color));
    if (line.rows.length === 1) this.dot(line.rows[0][0], line.rows[0][1], color, line.name);
    for (const [place, value] of line.evals ?? []) {
      if (place != null && value != null && place >= this.x[0] && place <= this.x[1]) {
        this.dot(place, value, color, `${line.name}, ${say("evaluation")}: ${number(value)}`);
      }
    }
  }

  dot(x, y, color, text) {
    const dot = svg("circle", { cx: this.px(x), cy: this.py(y), r: 3.5 });
    dot.style.setProperty("fill", color);
    dot.append(svg("title", {}, text));
    this.svg.append(dot);
  }

  // --- reading values ---

  valueAt(line, x) {
    let best = null;
    for (const row of line.shown) if (row[1] != null && (!best || Math.abs(row[0] - x) < Math.abs(best[0] - x))) best = row;
    return best;
  }

  move(x) {
    this.at = x;
    if (!this.lines?.length) return;
    this.cursor.setAttribute("visibility", x == null ? "hidden" : "visible");
    if (x != null) for (const end of ["x1", "x2"]) this.cursor.setAttribute(end, this.px(x));
    const head = x == null ? say("last") : `${say(this.data.axis)} ${this.formatX(x)}`;
    const rows = this.lines.map((line) => {
      const [color, dash] = COLORS[line.place % COLORS.length];
      const sample = svg("svg", { viewBox: "0 0 26 8", "aria-hidden": "true" });
      sample.append(paint(svg("path", { d: "M0 4H26", "stroke-dasharray": dash }), color));
      const row = x == null ? line.shown.findLast((one) => one[1] != null) : this.valueAt(line, x);
      const values = line.rows.flatMap((one) => (one.length === 4 ? [one[2]] : [one[1]])).filter((one) => one != null);
      return el("tr", {}, el("th", { scope: "row" }, sample, line.name),
        el("td", { text: `${head} ${this.format(row?.[1])}` }), el("td", { text: `${say("least")} ${this.format(least(values))}` }));
    });
    this.legend.replaceChildren(...rows);
  }

  toX(event) {
    const box = this.svg.getBoundingClientRect();
    const share = ((event.clientX - box.left) * this.width / box.width - LEFT) / (this.width - LEFT - RIGHT);
    const inside = Math.min(1, Math.max(0, share)), [low, high] = this.x;
    return this.logX ? low * (high / low) ** inside : low + (high - low) * inside;
  }

  point(event) {
    if (!this.lines?.length) return;
    const x = this.toX(event);
    this.move(x);
    if (this.from != null) {
      const [left, right] = [this.px(this.from), this.px(x)].sort((a, b) => a - b);
      this.band.setAttribute("visibility", "visible");
      this.band.setAttribute("x", left);
      this.band.setAttribute("width", right - left);
    }
  }

  grab(event) {
    if (!this.lines?.length || event.button || event.pointerType === "touch") return;
    this.from = this.toX(event);
    this.svg.setPointerCapture(event.pointerId);
  }

  release(event) {
    const from = this.from;
    this.from = null;
    if (from == null) return;
    this.band.setAttribute("visibility", "hidden");
    const [low, high] = [from, this.toX(event)].sort((a, b) => a - b);
    if (this.px(high) - this.px(low) > 8) this.onZoom([low, high]);
  }

  press(event) {
    if (event.key === "Escape") return this.onZoom(null);
    const turn = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!turn || !this.lines?.length) return undefined;
    event.preventDefault();
    const rows = this.lines[0].shown.filter((row) => row[1] != null);
    let place = this.at == null ? (turn > 0 ? -1 : rows.length) : rows.findIndex((row) => row[0] >= this.at);
    place = Math.min(rows.length - 1, Math.max(0, place + turn * (event.shiftKey ? 10 : 1)));
    this.move(rows[place][0]);
    document.getElementById("said").textContent = `${say(this.data.axis)} ${this.formatX(rows[place][0])}: ` +
      this.lines.map((line) => `${line.name} ${this.format(this.valueAt(line, rows[place][0])[1])}`).join(", ");
    return undefined;
  }

  inWords() {
    const told = this.lines.map((line) => {
      const known = line.rows.filter((row) => row[1] != null), [first, last] = [known[0], known.at(-1)];
      return `${line.name} ${this.format(first[1])} → ${this.format(last[1])}`;
    });
    return `${say(this.key)}: ${told.join("; ") || say("nothing")}. ${say("zoomHelp")}`;
  }
}

// Math.min(...values) would overflow the stack on long curves.
export const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
export const most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
