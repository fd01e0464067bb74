// Samples side by side: turns of the conversation, and each token coloured by what engine and trainer know of it.

import { api, h, number } from "./dom.js";
import { go } from "./main.js";

// A measure: how much of a token there is, from 0 to 1, and the values of its legend. Logarithmic where values are.
const log = (low, high) => (v) => (v <= 0 ? 0 : Math.min(1, Math.max(0, Math.log(v / low) / Math.log(high / low))));
const MEASURES = {
  gap: { text: "gap", help: "|trainer − engine| of the log-prob, in nats; of tokens that older versions made it has the policy's steps since then, too", hue: "var(--hot)", of: (t, i) => t.gaps[i], share: log(1e-4, 1), legend: [1e-4, 1e-3, 0.01, 0.1, 1], unit: "nats" },
  log_prob: { text: "log-prob", help: "of the trainer's policy; the engine's where the trainer has none", hue: "var(--cool)", of: (t, i) => negative(t.trainer[i] ?? t.engine[i]), share: log(0.01, 10), legend: [0.01, 0.1, 1, 10], sign: "−", unit: "nats" },
  entropy: { text: "entropy", help: "of the trained policy at this token, as its step found it", hue: "var(--violet)", of: (t, i) => t.entropies[i], share: log(0.01, 5), legend: [0.01, 0.1, 1, 5], unit: "nats" },
  version: { text: "version", help: "of the weights that made the token: the newest of these samples is palest", hue: "var(--leaf)", of: (t, i) => t.versions[i] },
  mask: { text: "mask", help: "tokens that are not trained on: tools' answers, masked turns", hue: "var(--grey)", of: (t, i) => 1 - t.mask[i], share: (v) => v, legend: [0, 1], names: ["trained on", "not trained on"] },
};
const negative = (v) => (v === null || v === undefined ? null : -v);
let chosen = "gap";

export async function sample({ all, query }) {
  const run = all.find((one) => String(one.id) === query.run) || all[0], offsets = query.at.split(",");
  const found = await Promise.all(offsets.map((at) => api("sample", { runs: run.id, at })));
  const rows = found.map(([row]) => row), tokens = rows.map(tokensOf);
  ages(tokens);
  if (chosen === "gap" && tokens.every((t) => t.gaps.every((g) => g === null))) chosen = "log_prob";
  const body = h("div", { class: rows.length > 1 ? "beside" : "" });
  const facts = h("div", { class: "facts-line dim" }, "Point at a token.");
  const choose = h("div", { class: "bar measures" });
  const draw = () => {
    choose.replaceChildren(h("span", { class: "dim" }, "colour by"), ...Object.entries(MEASURES).map(([name, m]) =>
      h("button", { class: name === chosen ? "on" : "", title: m.help, onclick: () => { chosen = name; draw(); } }, m.text)), legend(tokens));
    body.replaceChildren(...rows.map((row, i) => one(row, tokens[i], run, facts)));
  };
  draw();
  const same = rows.length === 1 && rows[0].group.length > 1;
  return [
    h("div", { class: "bar" }, h("button", { onclick: () => history.back() }, "‹ back"),
      same && h("button", { onclick: () => go("sample", { run: run.id, at: rows[0].group }) }, `the ${rows[0].group.length} logged samples of this group side by side`),
      rows.length === 1 && rows[0].group.length === 1 && !("loss" in rows[0]) && h("span", { class: "dim" }, "No other sample of its group is logged; --num-logged-samples logs more."),
      h("span", { class: "dim" }, run.name)),
    tokens.some((t) => t.ids.length) && [choose, notes(rows, tokens), facts], body,
  ];
}

function tokensOf(row) {
  const t = row.tokens || {}, num = (t.ids || []).length, blank = Array(num).fill(null);
  const versions = blank.slice();
  for (const [version, start, end] of row.version_spans || []) versions.fill(version, start, Math.min(end, num));
  return { ids: t.ids || [], texts: t.texts, mask: t.loss_mask || [], engine: t.rollout_log_probs || blank, trainer: t.log_probs || blank, entropies: t.entropies || blank, gaps: row.gaps, versions };
}

// Versions by age, over all samples that are shown.
function ages(tokens) {
  const known = [...new Set(tokens.flatMap((t) => t.versions).filter((v) => v !== null))].sort((a, b) => b - a);
  MEASURES.version.known = known;
  MEASURES.version.share = (v) => 0.12 + 0.8 * (known.length > 1 ? known.indexOf(v) / (known.length - 1) : 0);
}

const tint = (measure, share) => `color-mix(in oklab, ${measure.hue} ${Math.round(share * 78)}%, transparent)`;

function legend(tokens) {
  const m = MEASURES[chosen], num = chosen === "version" ? m.known.length : 0;
  const values = chosen === "version" ? (num > 6 ? [0, 1, 2, 3, 4].map((k) => m.known[Math.round((k * (num - 1)) / 4)]) : m.known) : m.legend;
  const text = (v, i) => (m.names ? m.names[i] : chosen === "version" ? v : `${m.sign || ""}${number(v)}`);
  return h("span", { class: "scale" }, values.map((v, i) => h("span", { style: { background: tint(m, m.share(v)) } }, text(v, i))), m.unit && h("span", { class: "dim" }, m.unit));
}

// What is unknown, and which flag makes it known.
function notes(rows, tokens) {
  const every = tokens.filter((t) => t.ids.length), none = (name) => every.every((t) => t[name].every((v) => v === null)), out = [];
  const evaluated = rows.every((row) => String(row.split).startsWith("eval/"));
  if (evaluated) out.push("The trainer does not score an evaluation: there is no gap and no entropy.");
  else {
    if (none("trainer")) out.push("The trainer's log-probs are unknown: an optimizer step before this sample's had moved the policy.");
    if (none("entropies")) out.push("Entropies are unknown: the run is of an earlier instep, or trained nothing on these samples.");
  }
  if (none("engine") && !("loss" in rows[0])) out.push("The engine's log-probs are unknown: the generate function left them out.");
  if (rows.some((row) => row.tokens && row.response_length > row.tokens.ids.length && !("loss" in row))) out.push("The first 4,096 tokens of a response are logged.");
  return out.length ? h("p", { class: "dim" }, out.join(" ")) : null;
}

function one(row, tokens, run, facts) {
  const reward = row.reward && typeof row.reward === "object" ? JSON.stringify(row.reward) : number(row.reward);
  const parts = "loss" in row ? [`${row.pair || ""} loss ${number(row.loss, 4)}`] : [`reward ${reward}`, row.status];
  const known = tokens.gaps.filter((g) => g !== null), good = typeof row.reward === "number" ? (row.reward > 0 ? "good" : "bad") : "";
  const head = h("h3", {}, h("span", { class: `tag ${good}` }, parts[0]), parts.slice(1).map((text) => h("span", { class: "tag" }, text)),
    h("span", { class: "tag" }, `${(row.response_length || tokens.ids.length).toLocaleString("en-US")} tokens`),
    known.length ? h("span", { class: "tag" }, `gap mean ${number(known.reduce((a, b) => a + b, 0) / known.length, 4)}, max ${number(Math.max(...known), 4)} nats`) : null);
  const where = h("div", { class: "dim where" }, `${row.split}, rollout ${row.rollout_id}, group ${row.group_index}, sample ${row.index}`,
    row.label === null || row.label === undefined || "pair" in row ? "" : `, label ${typeof row.label === "string" ? row.label : JSON.stringify(row.label)}`);
  const turns = row.turns.map((turn) => h("div", { class: `turn ${role(turn.role)}` }, h("div", { class: "role" }, turn.role),
    h("div", { class: "words" }, turn.start === undefined || !tokens.texts ? turn.text : spans(tokens, turn, facts))));
  return h("article", {}, head, where, tokens.ids.length ? strip(tokens, facts) : null, turns);
}

const role = (name) => (name === "model" || name === "assistant" ? "model" : name === "tool call" ? "call" : name === "not trained on" || name === "tool" ? "tool" : "prompt");

function spans(tokens, turn, facts) {
  const m = MEASURES[chosen], out = [];
  for (let i = turn.start; i < turn.end; i += 1) {
    const value = m.of(tokens, i), share = value === null || value === undefined ? 0 : m.share(value);
    const text = tokens.texts[i].replace(/\n/g, "↵\n");
    out.push(h("span", { class: "t", style: share > 0.01 ? { background: tint(m, share) } : null, onpointerenter: () => facts.replaceChildren(...told(tokens, i)) }, text));
  }
  return out;
}

function told(tokens, i) {
  const part = (name, value) => [h("span", { class: "dim" }, name), h("b", {}, value === null || value === undefined ? "–" : value), " "];
  const nats = (v) => (v === null || v === undefined ? null : number(v, 4));
  return [
    part(`token ${i}`, tokens.texts ? JSON.stringify(tokens.texts[i]) : null), part("id", tokens.ids[i]), part("engine", nats(tokens.mask[i] ? tokens.engine[i] : null)), part("trainer", nats(tokens.trainer[i])),
    part("gap", nats(tokens.gaps[i])), part("entropy", nats(tokens.entropies[i])), part("version", tokens.versions[i]), part("", tokens.mask[i] ? "trained on" : "not trained on"),
  ].flat();
}

// All five measures of the whole response: a row each, a column per token.
function strip(tokens, facts) {
  const num = tokens.ids.length, row = 12, names = Object.entries(MEASURES), canvas = h("canvas", { class: "strip" });
  const box = h("div", { class: "strips" }, h("div", { class: "names" }, names.map(([name, m]) => h("span", { class: name === chosen ? "on" : "" }, m.text))), canvas);
  const paint = () => {
    const wide = Math.min(canvas.parentNode.clientWidth - 70, num * 12), dense = window.devicePixelRatio || 1, styles = getComputedStyle(document.documentElement);
    Object.assign(canvas.style, { width: `${wide}px`, height: `${row * names.length}px` });
    canvas.width = wide * dense; canvas.height = row * names.length * dense;
    const pen = canvas.getContext("2d");
    names.forEach(([, m], k) => {
      pen.fillStyle = styles.getPropertyValue(m.hue.slice(4, -1));
      for (let i = 0; i < num; i += 1) {
        const value = m.of(tokens, i);
        pen.globalAlpha = value === null || value === undefined ? 0 : Math.max(0.05, m.share(value));
        pen.fillRect((i / num) * canvas.width, k * row * dense, Math.max(1, canvas.width / num - (wide / num > 3 ? dense : 0)), (row - 1) * dense);
      }
    });
  };
  canvas.addEventListener("pointermove", (event) => {
    const i = Math.min(num - 1, Math.max(0, Math.floor((event.offsetX / canvas.clientWidth) * num)));
    facts.replaceChildren(...told(tokens, i));
    const words = box.parentNode.querySelectorAll(".t");
    box.parentNode.querySelectorAll(".t.at").forEach((node) => node.classList.remove("at"));
    if (words[i]) words[i].classList.add("at");
  });
  new ResizeObserver(paint).observe(box);
  return box;
}
