// The board: what is chosen, asking the server for what has changed, and putting it where it belongs.

import { jobCards, runActions } from "./act.js";
import { Chart, colorOf, el } from "./chart.js";
import { Heat, differences, emptyFolder, events, overview, rankTable, renew, stateClass, texts, timeBar } from "./panels.js";
import { StartForm } from "./start.js";
import { count, number, percent, say, speak } from "./words.js";

const $ = (id) => document.getElementById(id);
const KEYS = ["loss", "grad_norm", "lr", "tokens_per_s", "step_s", "wait_s", "memory_bytes", "mfu"];
// Known to every run's log and shown elsewhere, or of no use as a curve.
const NOT_CURVES = ["epoch", "num_targets", "num_tokens", "num_samples", "sent_bytes", "exchanged_s", "rollouts_s", "data_s", "forward_s", "backward_s", "optimizer_s", "checkpoint_s"];
const TABS = ["ranks", "events", "texts", "logs", "differences"];
const RETRY_S = [1, 2, 5, 10, 30];

const state = {
  chosen: [], focus: "", axis: "step", smooth: 0.6, logX: false, logY: false, zoom: null, tab: "ranks",
  runs: [], series: {}, now: null, version: "", control: false, jobs: [], failures: 0, log: null,
};
const charts = new Map();
const heat = new Heat();
const form = new StartForm($("new"), (name) => { state.wanted = name; again(); }, () => { showForm(false); again(); });
let timer = 0, heatTimer = 0, isAsking = false, isStale = false;

async function get(path, words = {}) {
  const answer = await fetch(`${path}?${new URLSearchParams(words)}`);
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

// --- asking ---

async function look() {
  clearTimeout(timer);
  isStale = isAsking; // what is under way was asked before the choice changed
  if (isAsking) return;
  isAsking = true;
  let wait = 2;
  try {
    const asked = {
      runs: JSON.stringify(state.chosen), focus: state.focus, axis: state.axis, log: state.logX ? 1 : 0,
      keys: JSON.stringify([...charts.keys()].length ? [...charts.keys()] : KEYS), most: pixels(), since: state.version,
    };
    if (state.zoom) [asked.low, asked.high] = state.zoom;
    const answer = await get("/api/look", asked);
    wait = answer.next_s;
    state.failures = 0;
    take(answer);
  } catch (error) {
    wait = RETRY_S[Math.min(state.failures, RETRY_S.length - 1)];
    state.failures += 1;
    $("live").textContent = `${say("lost")} (${error.message})`;
    $("live").className = "lost";
  }
  isAsking = false;
  if (isStale) {
    again();
    return;
  }
  timer = setTimeout(look, 1000 * wait * (document.hidden ? 5 : 1));
}

/** The form stands in place of what is shown of a run. */
function showForm(isOpen) {
  for (const id of ["overview", "charts"]) $(id).hidden = isOpen;
  for (const id of ["tabs", "panel", "tools", "new-run"]) $(id).hidden = isOpen || (id !== "new-run" && !state.now);
}

function pixels() {
  return Math.min(1500, Math.max(200, Math.round($("charts").clientWidth * 0.8)));
}

function again() {
  state.version = "";
  look();
}

function take(answer) {
  state.runs = answer.runs.sort((a, b) => a.age_s - b.age_s);
  state.control = answer.control;
  $("folder").textContent = answer.folder;
  if (!state.focus && state.runs.length) {
    const first = location.hash ? decodeURIComponent(location.hash.slice(1)) : "";
    choose(state.runs.some((run) => run.name === first) ? first : state.runs[0].name);
    return;
  }
  const isNew = Boolean(answer.series);
  state.version = answer.version;
  if (isNew) state.series = answer.series;
  if (answer.focus) state.now = answer.focus.is_new ? answer.focus : { ...state.now, ...answer.focus };
  else if (state.focus) state.now = null; // moved away
  const behind = Object.values(answer.share_read).filter((one) => one < 1);
  $("live").className = "";
  $("live").textContent = behind.length ? say("reading", percent(Math.min(...behind))) : `● ${say("live")}`;
  listRuns();
  drawActing(answer.jobs ?? []);
  if (state.wanted && state.runs.some((run) => run.name === state.wanted)) { // a run that was started here has come up
    const name = state.wanted;
    state.wanted = "";
    choose(name);
    return;
  }
  renew($("overview"), state.now ? overview(state.now, state.control ? runActions(state.now, state.jobs, again) : []) : state.runs.length ? [] : [emptyFolder()]);
  for (const id of ["tabs", "panel"]) $(id).hidden = !state.now || form.isOpen;
  $("tools").hidden = form.isOpen || !Object.values(state.series).some((one) => one.num_steps);
  if (isNew) {
    drawCharts();
    drawPanel();
  }
}

// --- the list ---

function choose(name) {
  if (form.isOpen) form.close();
  state.focus = name;
  if (!state.chosen.includes(name)) state.chosen = [...state.chosen.filter((one) => one !== state.before), name];
  state.before = name; // goes when another one is looked at, unless its box was ticked
  state.log = null;
  location.hash = encodeURIComponent(name);
  again();
}

function tick(name, isOn) {
  state.chosen = isOn ? [...state.chosen, name] : state.chosen.filter((one) => one !== name);
  if (state.before === name || isOn) state.before = null;
  again();
}

function listRuns() {
  const wanted = $("filter").value.toLowerCase(), list = $("runs");
  const shown = state.runs.filter((run) => run.name.toLowerCase().includes(wanted));
  $("count").textContent = `(${shown.length})`;
  const known = new Map([...list.children].map((item) => [item.dataset.name, item]));
  const items = shown.map((run) => {
    const item = known.get(run.name) ?? runItem(run.name);
    const place = state.chosen.indexOf(run.name);
    item.className = run.name === state.focus ? "focus" : "";
    const [box, button] = item.children;
    box.checked = place >= 0;
    box.setAttribute("aria-label", say("overlay", run.name));
    item.style.setProperty("--run", place >= 0 ? colorOf(place) : "var(--main)");
    button.setAttribute("aria-current", run.name === state.focus ? "true" : "false");
    const steps = run.total_steps ? `${count(run.step)}/${count(run.total_steps)}` : count(run.step);
    button.lastChild.replaceChildren(el("span", { class: stateClass(run.state), text: say(run.state) }),
      ` · ${steps}${run.loss == null ? "" : ` · ${number(run.loss)}`}`);
    return item;
  });
  // Only when the order changed: moving an element would take the focus from it.
  if (items.length !== list.children.length || items.some((item, place) => list.children[place] !== item)) list.replaceChildren(...items);
}

function runItem(name) {
  const box = el("input", { type: "checkbox", onchange: () => tick(name, box.checked) });
  const item = el("li", {}, box, el("button", { type: "button", onclick: () => choose(name) }, name, el("small")));
  item.dataset.name = name;
  return item;
}

// --- the curves ---

function drawCharts() {
  const names = new Set(Object.values(state.series).flatMap((one) => one.names));
  const extra = [...names].filter((name) => !KEYS.includes(name) && !NOT_CURVES.includes(name)).sort();
  const keys = [...KEYS.filter((key) => key === "loss" || names.has(key)), ...extra];
  const isNew = names.size > 0 && (keys.length !== charts.size || keys.some((key) => !charts.has(key)));
  if (isNew) {
    for (const key of charts.keys()) if (!keys.includes(key)) charts.delete(key);
    for (const key of keys) if (!charts.has(key)) charts.set(key, new Chart(key, key === "loss", zoom));
    $("charts").replaceChildren(...keys.map((key) => charts.get(key).node));
  }
  for (const [key, chart] of charts) {
    const runs = state.chosen.map((name, place) => ({
      name, place, rows: state.series[name]?.curves[key] ?? [],
      evals: key === "loss" ? state.series[name]?.evals : [], marks: state.series[name]?.marks,
    }));
    chart.draw({ axis: state.axis, logX: state.logX, logY: state.logY || (key === "grad_norm" && state.logY), smooth: state.smooth, runs });
  }
  $("unzoom").hidden = !state.zoom;
  if (isNew && extra.length) again();
}

function zoom(range) {
  if (!range && !state.zoom) return;
  state.zoom = range;
  again();
}

// --- below the curves ---

function drawTabs() {
  $("tabs").replaceChildren(...TABS.map((tab) => el("button", {
    type: "button", role: "tab", id: `tab-${tab}`, "aria-selected": String(tab === state.tab), "aria-controls": "panel",
    tabindex: tab === state.tab ? "0" : "-1", text: say(tab), onclick: () => turnTo(tab), onkeydown: (event) => {
      const turn = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (turn) turnTo(TABS[(TABS.indexOf(tab) + turn + TABS.length) % TABS.length]);
    },
  })));
  $("panel").setAttribute("aria-labelledby", `tab-${state.tab}`);
}

function turnTo(tab) {
  state.tab = tab;
  drawTabs();
  $(`tab-${tab}`).focus();
  $("panel").replaceChildren();
  drawPanel();
}

async function drawPanel() {
  clearTimeout(heatTimer);
  const panel = $("panel"), { now, tab } = state;
  if (!now) return panel.replaceChildren();
  try { // what is as it was stays, and with it what somebody has marked there to copy it
    if (tab === "ranks") {
      const parts = [timeBar(now.times), rankTable(now)].filter(Boolean);
      panel.replaceChildren(...parts, ...(now.ranks.length > 1 && heat.data?.run === now.name ? [heat.node] : []));
      if (now.ranks.length > 1) await drawHeat(now.name);
    } else if (tab === "events") renew(panel, [events(now.notes ?? [])]);
    else if (tab === "texts") renew(panel, [texts(now.samples ?? [])]);
    else if (tab === "logs") await drawLog(now);
    else renew(panel, [differences(await get("/api/differences", { runs: JSON.stringify(state.chosen) }))]);
  } catch (error) {
    panel.replaceChildren(el("p", { class: "bad", text: error.message }));
  }
  return undefined;
}

async function drawHeat(name) {
  const found = await get("/api/heat", { run: name });
  if (state.tab !== "ranks" || state.now?.name !== name) return;
  heat.draw({ ...found, run: name });
  if (!heat.node.isConnected) $("panel").append(heat.node);
  heatTimer = setTimeout(() => drawHeat(name).catch(() => {}), 1000 * found.next_s * (document.hidden ? 5 : 1));
}

async function drawLog(now) {
  const panel = $("panel");
  if (!now.logs?.length) return panel.replaceChildren(el("p", { class: "soft", text: say("noLogs") }));
  if (!state.log || state.log.run !== now.name) state.log = { run: now.name, file: now.logs[0].name, end: "", text: "" };
  const asked = state.log, piece = await get("/api/log", { run: now.name, file: asked.file, start: asked.end });
  if (asked !== state.log || state.tab !== "logs") return undefined;
  // What is shown of a log is its end: a page with all of a long one would be slow.
  asked.text = (piece.start === asked.end ? asked.text + piece.text : piece.text).slice(-200_000);
  asked.end = piece.end;
  const known = JSON.stringify([now.name, document.documentElement.lang, now.logs.map((one) => one.name)]), shown = panel.querySelector("pre");
  if (shown && panel.dataset.logs === known) { // a list that is open stays, and so does who has scrolled up
    const follows = shown.scrollHeight - shown.scrollTop - shown.clientHeight < 60;
    shown.textContent = asked.text;
    if (follows) shown.scrollTop = shown.scrollHeight;
    return undefined;
  }
  const select = el("select", { onchange: () => { state.log = { run: now.name, file: select.value, end: "", text: "" }; drawPanel(); } },
    ...now.logs.map((one) => el("option", { value: one.name, text: one.name, selected: one.name === asked.file })));
  const text = el("pre", { tabindex: "0", text: asked.text });
  panel.dataset.logs = known;
  panel.replaceChildren(el("div", { class: "card" }, el("label", {}, `${say("file")} `, select), text));
  text.scrollTop = text.scrollHeight;
  return undefined;
}

// --- acting ---

function drawActing(jobs) {
  state.jobs = jobs;
  $("new-run").hidden = !state.control || form.isOpen;
  const text = JSON.stringify(jobs) + document.documentElement.lang;
  if ($("jobs").dataset.text === text) return; // a page that is read is not drawn under the eyes
  $("jobs").dataset.text = text;
  $("jobs").hidden = !jobs.length;
  $("jobs").replaceChildren(...jobCards(jobs));
}

// --- what the user sets ---

function remember(key, value) {
  try { localStorage.setItem(`duoka-${key}`, value); } catch { /* a private window: it is forgotten */ }
}

function recall(key, fallback) {
  try { return localStorage.getItem(`duoka-${key}`) ?? fallback; } catch { return fallback; }
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

function setLanguage(code) {
  speak(code);
  drawTabs();
  if (form.isOpen) form.draw();
  drawActing(state.jobs);
  if (state.now) {
    listRuns();
    drawCharts();
    drawPanel();
  }
}

function begin() {
  const guess = navigator.language.startsWith("zh") ? "zh" : "en";
  $("language").value = recall("language", guess);
  $("theme").value = recall("theme", "auto");
  state.smooth = Number(recall("smooth", "0.6"));
  $("smooth").value = state.smooth;
  setTheme($("theme").value);
  setLanguage($("language").value);
  if (matchMedia("(max-width: 860px)").matches) $("list").open = false;
  $("language").onchange = (event) => { remember("language", event.target.value); setLanguage(event.target.value); look(); };
  $("theme").onchange = (event) => { remember("theme", event.target.value); setTheme(event.target.value); };
  $("smooth").oninput = (event) => { state.smooth = Number(event.target.value); remember("smooth", state.smooth); drawCharts(); };
  $("axis").onchange = (event) => { state.axis = event.target.value; state.zoom = null; again(); };
  $("log-x").onchange = (event) => { state.logX = event.target.checked; again(); };
  $("log-y").onchange = (event) => { state.logY = event.target.checked; drawCharts(); };
  $("unzoom").onclick = () => zoom(null);
  $("filter").oninput = listRuns;
  $("new-run").onclick = () => { showForm(true); form.open().catch((error) => { $("live").textContent = error.message; }); };
  document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
  look();
}

begin();
