// Who waits for whom: the requests that the engines had, and the phases of the last steps.

import { api, duration, h, hideTip, number, s, showTip } from "./dom.js";
import { ticks } from "./plot.js";
import { go } from "./main.js";

const LEFT = 74, RIGHT = 12, AREA = 64, BAR = 22, SPACE = 12, TOP = 20;
const KINDS = { rollout: 0, train: 1, sync: 2, eval: 3, save: 4, start: 5, report: 5 };
const GENERATES = new Set(["rollout", "eval"]);

export async function time({ runs, colors, query, width }) {
  const steps = Number(query.steps) || 4;
  const found = await api("timeline", { runs: runs.map((run) => run.id), steps, last: query.last });
  const choose = (number) => h("button", { class: number === steps ? "on" : "", onclick: () => go("time", { ...query, steps: number }) }, String(number));
  const newest = Math.max(...found.map((one) => one.newest ?? 0)), last = query.last ? Number(query.last) : newest;
  const move = (text, to, ok) => h("button", { disabled: !ok, onclick: () => go("time", { ...query, last: to >= newest ? "" : to }) }, text);
  return [
    h("div", { class: "bar" }, h("span", { class: "dim" }, "the last"), [2, 4, 8, 16].map(choose), h("span", { class: "dim" }, query.last ? "steps up to rollout" : "steps"),
      query.last && h("b", {}, String(last)), move("‹ earlier", Math.max(0, last - steps), last > 0), move("later ›", last + steps, last < newest), move("newest", newest, query.last)),
    runs.map((run, i) => section(run, found[i], colors, width)),
  ];
}

function section(run, found, colors, width) {
  if (!found.phases.length) return [h("h2", {}, run.name), h("p", { class: "dim" }, "This run has no timeline.jsonl: an earlier instep wrote it.")];
  return [h("h2", {}, h("i", { class: "box", style: { background: run.color } }), run.name), sentence(found.means), drawn(found, colors, width), table(found, colors)];
}

function sentence(means) {
  const share = (name) => `${Math.round(100 * means[name])} %`, parts = [];
  if ("perf/engine_idle_ratio" in means) parts.push(`Engines had no request for ${share("perf/engine_idle_ratio")} of the time`);
  if ("perf/trainer_idle_ratio" in means) parts.push(`${parts.length ? "t" : "T"}he trainer neither trained nor scored for ${share("perf/trainer_idle_ratio")}`);
  const more = [];
  if (means["perf/wait_seconds"]) more.push(`It waited ${duration(means["perf/wait_seconds"])} a step for groups or responses.`);
  if (means["perf/reward_seconds"] >= 0.1) more.push(`Of a rollout, engines were idle for ${duration(means["perf/reward_seconds"])} while rewards or tools were waited for.`);
  if ("async/staleness_mean" in means) more.push(`Trained tokens were ${means["async/staleness_mean"].toFixed(1)} versions old on average.`);
  return h("p", { class: "dim" }, parts.length ? `${parts.join("; ")}. ` : "", more.join(" "));
}

function drawn(found, colors, width) {
  const { began, ended } = found, span = ended - began || 1;
  const x = (t) => LEFT + ((t - began) / span) * (width - LEFT - RIGHT);
  const generates = found.phases.filter((p) => GENERATES.has(p.phase)), works = found.phases.filter((p) => !GENERATES.has(p.phase));
  const area = found.requests.length ? AREA : 0, lanes = [];
  let top = TOP + (area ? area + SPACE : 0);
  for (const [name, phases] of [["rollout", generates], ["trainer", works]]) {
    const rows = packed(phases);
    if (rows.length) { lanes.push([name, rows, top]); top += rows.length * (BAR + 3) + SPACE; }
  }
  const root = s("svg", { width, height: top + 22, role: "img", "aria-label": "phases over time" });
  root.append(s("defs", {}, s("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, s("line", { class: "hatch", x1: 0, y1: 0, x2: 0, y2: 6 }))));
  for (const t of ticks(0, span, Math.max(3, Math.floor(width / 110)))) {
    root.append(s("line", { class: "grid", x1: x(began + t), x2: x(began + t), y1: TOP, y2: top }), s("text", { class: "tick", x: x(began + t), y: top + 14, "text-anchor": "middle" }, t === 0 ? "0" : `${number(t)} s`));
  }
  let free = 0;
  for (const [rollout, at] of found.steps) {
    root.append(s("line", { class: "step", x1: x(at), x2: x(at), y1: TOP - 4, y2: top }));
    if (x(at) - free > 74) { root.append(s("text", { class: "tick", x: x(at) - 4, y: 12, "text-anchor": "end" }, `end of ${rollout}`)); free = x(at); }
  }
  if (area) root.append(...requests(found, x, area, colors));
  for (const [name, rows, y] of lanes) {
    root.append(s("text", { class: "lane", x: 0, y: y + 15 }, name));
    rows.forEach((row, k) => row.forEach((p) => root.append(bar(p, x, y + k * (BAR + 3), colors))));
  }
  return h("div", { class: "timeline" }, root);
}

// Phases in as few rows as they need: those that overlap stand below each other.
function packed(phases) {
  const rows = [];
  for (const p of phases) {
    const row = rows.find((r) => r[r.length - 1].ended <= p.began + 1e-6);
    if (row) row.push(p); else rows.push([p]);
  }
  return rows;
}

function requests(found, x, height, colors) {
  const most = Math.max(...found.requests.map(([, n]) => n), 1), y = (n) => TOP + height - (n / most) * height;
  let d = "";
  let before = 0;
  for (const [t, n] of found.requests) { d += `${d ? "L" : "M"}${x(t).toFixed(1)} ${y(before).toFixed(1)}L${x(t).toFixed(1)} ${y(n).toFixed(1)}`; before = n; }
  const last = found.requests[found.requests.length - 1][0], first = found.requests[0][0];
  const end = before ? x(found.ended) : x(last);
  d += `L${end.toFixed(1)} ${y(before).toFixed(1)}L${end.toFixed(1)} ${y(0)}L${x(first).toFixed(1)} ${y(0)}Z`;
  const tell = (event) => {
    const box = event.currentTarget.ownerSVGElement.getBoundingClientRect();
    const t = found.began + ((event.clientX - box.left - x(found.began)) / (x(found.ended) - x(found.began))) * (found.ended - found.began);
    const now = found.requests.filter(([at]) => at <= t).pop();
    showTip(event, h("strong", {}, `${now ? now[1] : 0} requests under way`), h("div", { class: "dim" }, `at ${(t - found.began).toFixed(2)} s`));
  };
  return [
    s("text", { class: "lane", x: 0, y: TOP + 15 }, "engines"), s("text", { class: "tick", x: 0, y: TOP + 30 }, "requests"),
    s("text", { class: "tick", x: LEFT - 6, y: TOP + 4, "text-anchor": "end" }, String(most)), s("text", { class: "tick", x: LEFT - 6, y: TOP + height + 3, "text-anchor": "end" }, "0"),
    s("line", { class: "grid", x1: LEFT, x2: x(found.ended), y1: y(0), y2: y(0) }),
    s("path", { d, fill: colors[0], opacity: 0.55, onpointermove: tell, onpointerleave: hideTip }),
  ];
}

function bar(p, x, y, colors) {
  const left = x(p.began), wide = Math.max(p.goes_on ? 4 : 1, x(p.ended) - left), name = p.rollout_id === undefined ? p.phase : `${p.phase} ${p.rollout_id}`;
  const color = p.phase in KINDS ? colors[KINDS[p.phase]] : "url(#hatch)";
  const left0 = Math.max(left, LEFT);
  const seen = Math.max(1, left + wide - left0);
  const tell = (event) => showTip(event, h("strong", {}, name), h("div", {}, duration(p.ended - p.began), p.goes_on ? ", without an end so far" : ""));
  const text = seen > name.length * 6.6 + 8 ? s("text", { class: p.phase in KINDS ? "on-bar" : "tick", x: left0 + 5, y: y + 15 }, name) : null;
  return s("g", { onpointermove: tell, onpointerleave: hideTip },
    s("rect", { x: left0, y, width: seen, height: BAR, rx: 2, fill: color, class: p.goes_on ? "goes-on" : null }), text);
}

function table(found, colors) {
  const seconds = new Map();
  for (const p of found.phases) {
    const inside = Math.min(p.ended, found.ended) - Math.max(p.began, found.began);
    seconds.set(p.phase, (seconds.get(p.phase) || 0) + inside);
  }
  const span = found.ended - found.began || 1;
  const rows = [...seconds].sort((a, b) => b[1] - a[1]).map(([name, sum]) => h("tr", {},
    h("td", {}, h("i", { class: "box", style: { background: name in KINDS ? colors[KINDS[name]] : "var(--line)" } }), name),
    h("td", { class: "num" }, duration(sum)), h("td", { class: "num" }, `${Math.round((100 * sum) / span)} %`)));
  return h("table", { class: "grid narrow" }, h("tr", {}, h("th", {}, "phase"), h("th", { class: "num" }, "time"), h("th", { class: "num" }, `of ${duration(span)}`)), rows);
}
