// The page: runs at the top, five parts below. The part, and what it shows, stand in the address after "#".

import { api, duration, h, hideTip } from "./dom.js";
import { curves } from "./curves.js";
import { flags } from "./flags.js";
import { processes } from "./processes.js";
import { sample } from "./tokens.js";
import { samples } from "./samples.js";
import { time } from "./time.js";

const PARTS = { curves, time, samples, processes, flags, sample };
const LIVE = new Set(["curves", "time", "processes"]); // drawn again while a run goes on
const SECONDS = 4;
const MARKS = { running: "●", elsewhere: "●", failed: "✕", killed: "✕", unreadable: "✕" };

const state = { runs: [], chosen: null, panels: {}, colors: [], number: 0 };

export function address() {
  const [part, query] = location.hash.slice(1).split("?");
  return { part: PARTS[part] ? part : "curves", query: Object.fromEntries(new URLSearchParams(query)) };
}

export function go(part, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  location.hash = `${part}?${new URLSearchParams(given)}`;
}

export function phasesOf(run) {
  const alive = run.state === "running", name = (p) => `${p.name}${p.rollout_id === null ? "" : ` ${p.rollout_id}`}`;
  return run.phases.map((p) => (alive ? `in phase ${name(p)} for ${duration(p.seconds)}` : `its last phase was ${name(p)}`)).join("; ");
}

const marked = () => state.runs.filter((run) => state.chosen.has(run.id));
const chosen = () => marked().filter((run) => run.state !== "unreadable");

function top() {
  const chips = state.runs.map((run) => {
    const how = phasesOf(run);
    return h("button", {
      class: `run ${state.chosen.has(run.id) ? "on" : ""}`, title: `${run.folder}\n${run.state_text}${how ? `\n${how}` : ""}`,
      "aria-pressed": String(state.chosen.has(run.id)),
      onclick: () => { toggle(run.id); },
    }, h("i", { class: "box", style: { background: run.color } }), h("b", {}, run.name), " ",
    h("span", { class: `state ${run.state}` }, MARKS[run.state] || "", " ", run.state), " ",
    h("span", { class: "dim" }, `${run.num_steps}${run.num_rollout ? `/${run.num_rollout}` : ""}${run.reading ? " …" : ""}`));
  });
  document.getElementById("runs").replaceChildren(...chips);
  const { part } = address();
  const links = ["curves", "time", "samples", "processes", "flags"].map((name) =>
    h("a", { href: `#${name}`, class: name === part || (name === "samples" && part === "sample") ? "here" : null }, name));
  document.getElementById("parts").replaceChildren(...links);
  document.documentElement.style.setProperty("--top", `${document.getElementById("top").offsetHeight - 1}px`);
}

function toggle(id) {
  if (state.chosen.has(id) && state.chosen.size > 1) state.chosen.delete(id); else state.chosen.add(id);
  top();
  draw();
}

const widthOf = (main) => main.clientWidth - 2 * parseFloat(getComputedStyle(main).paddingLeft);

async function draw() {
  const { part, query } = address(), number = ++state.number, main = document.getElementById("main");
  try {
    const runs = chosen(), bad = marked().filter((run) => !runs.includes(run));
    const troubles = bad.map((run) => h("div", { class: "trouble" }, h("b", {}, run.name, ": "), run.state_text));
    const content = runs.length && await PARTS[part]({ runs, all: state.runs, panels: state.panels, colors: state.colors, query, width: widthOf(main) });
    if (number !== state.number) return; // another one was asked for meanwhile
    hideTip();
    main.replaceChildren(...[troubles, content].flat(Infinity).filter(Boolean));
  } catch (error) {
    if (number === state.number) main.replaceChildren(h("p", { class: "bad" }, `${error.message || error}`));
  }
}

async function look() {
  const found = await api("runs");
  state.panels = found.panels; state.colors = found.colors;
  state.runs = found.runs.map((run, id) => ({ ...run, id, color: found.colors[id % found.colors.length] }));
  if (!state.chosen) state.chosen = new Set(state.runs.slice(-4).map((run) => run.id));
  document.title = `${marked().map((run) => run.name).join(", ")} – instep`;
  top();
}

const changes = (run) => run.state === "running" || run.reading;

async function watch() {
  const first = !state.chosen, before = state.runs.some(changes);
  try {
    if (first || !document.hidden) await look();
    const now = state.runs.some(changes);
    if (first) await draw();
    else if ((before || now) && LIVE.has(address().part) && !document.hidden && !document.querySelector("svg:hover")) await draw();
  } catch (error) {
    const ended = error instanceof TypeError; // as `fetch` raises it
    document.title = ended ? "instep view has ended" : "instep view";
    document.getElementById("parts").replaceChildren(h("span", { class: "bad" }, ended ? "`instep view` does not answer any more" : error.message));
  }
  setTimeout(watch, SECONDS * 1000);
}

window.addEventListener("hashchange", () => { top(); draw(); window.scrollTo(0, 0); });
let resized = 0;
window.addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(draw, 150); });
await watch();
