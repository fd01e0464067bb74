// Plots: curves of several runs over the rollouts, stacks of one run, and small courses in tables.

import { h, hideTip, number, s, showTip } from "./dom.js";

const LEFT = 50, RIGHT = 10, TOP = 8, BOTTOM = 20, HEIGHT = 170, STRIP = 44, BETWEEN = 20;
const DASHES = ["", "5 3", "1.5 3", "8 3 1.5 3"];

export function ticks(low, high, most = 4) {
  const span = high - low || Math.abs(high) || 1;
  const raw = span / most, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((size) => span / size <= most) || power * 10;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * span; i += 1) found.push(i * step);
  return found;
}

function logTicks(low, high) {
  const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
  const every = Math.max(1, Math.ceil((last - first + 1) / 4));
  const found = [];
  for (let power = first; power <= last; power += every) found.push(10 ** power);
  return found.length ? found : [low, high];
}

// A scale of values to pixels; its ticks are readable numbers.
function scale(values, range, log, top, bottom) {
  let low = Math.min(...values), high = Math.max(...values);
  if (log) {
    if (low === high) { low /= 2; high *= 2; }
    const [a, b] = [Math.log10(low), Math.log10(high)];
    return { of: (v) => bottom - ((Math.log10(v) - a) / (b - a)) * (bottom - top), ticks: logTicks(low, high) };
  }
  if (range[0] !== undefined) low = Math.min(low, range[0]);
  if (range[1] !== undefined) high = Math.max(high, range[1]);
  if (low === high) { const pad = Math.abs(low) / 10 || 1; low -= range[0] === low ? 0 : pad; high += pad; }
  return { of: (v) => bottom - ((v - low) / (high - low)) * (bottom - top), ticks: ticks(low, high, 4) };
}

const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

function axes(top, bottom, width, y, x) {
  const lines = y.ticks.map((value) => s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y.of(value), y2: y.of(value) }));
  const labels = y.ticks.map((value) => s("text", { class: "tick", x: LEFT - 6, y: y.of(value) + 3.5, "text-anchor": "end" }, number(value, 4)));
  const below = x ? x.ticks.filter((value) => x.of(value) < width - RIGHT - 52).map((value) => s("text", { class: "tick", x: x.of(value), y: bottom + 15, "text-anchor": "middle" }, number(value))) : [];
  const what = x ? s("text", { class: "tick", x: width - RIGHT, y: bottom + 15, "text-anchor": "end" }, "rollout") : null;
  return [...lines, ...labels, ...below, what].filter(Boolean);
}

function xScale([low, high], width) {
  const of = (v) => LEFT + ((v - low) / (high - low)) * (width - LEFT - RIGHT);
  return { of, ticks: ticks(low, high, Math.max(2, Math.floor(width / 80))).filter(Number.isInteger), low, high };
}

// Curves: [{label, x, y, color, dash, points}]. The value of each at the pointer's rollout is in its legend.
export function curvePlot({ title, unit, curves, strip, stripUnit, range, stripRange, log, marks, domain, width }) {
  const shown = curves.filter((c) => c.x.length), under = strip.filter((c) => c.x.length);
  const every = [...shown, ...under], x = xScale(domain, width), end = TOP + HEIGHT;
  const middle = under.length && shown.length ? end - STRIP - BETWEEN : end, second = shown.length ? middle + BETWEEN : TOP + BETWEEN;
  const root = s("svg", { width, height: end + BOTTOM, role: "img", "aria-label": title });
  const y = shown.length ? scale(shown.flatMap((c) => c.y), range, log, TOP, middle) : null;
  const y2 = under.length ? scale(under.flatMap((c) => c.y), stripRange, false, second, end) : null;
  if (y) root.append(...axes(TOP, middle, width, y, under.length ? null : x));
  if (y2) {
    y2.ticks = y2.ticks.filter((_, i, all) => i === 0 || i === all.length - 1);
    root.append(...axes(second, end, width, y2, x));
    root.append(s("text", { class: "unit", x: LEFT, y: second - 6 }, stripUnit));
  }
  for (const mark of marks) root.append(...alarmMark(mark, x, end));
  const means = [];
  for (const c of every) {
    const to = under.includes(c) ? y2 : y, points = c.x.map((v, i) => [x.of(v), to.of(c.y[i])]);
    if (c.meanX.length) { // of a long curve the extremes are pale, and its means are on top
      root.append(s("path", { class: "curve", d: path(points), stroke: c.color, opacity: 0.25 }));
      means.push(s("path", { class: "curve", d: path(c.meanX.map((v, i) => [x.of(v), to.of(c.meanY[i])])), stroke: c.color, "stroke-dasharray": DASHES[c.dash % 4] || null }));
    } else if (!c.points || c.x.length > 2) {
      root.append(s("path", { class: "curve", d: path(points), stroke: c.color, "stroke-dasharray": DASHES[c.dash % 4] || null }));
    }
    if (c.points || c.x.length < 3) root.append(...points.map(([a, b]) => s("circle", { cx: a, cy: b, r: 2.6, fill: c.color })));
  }
  root.append(...means);
  const cursor = s("line", { class: "cursor", y1: TOP, y2: end, visibility: "hidden" });
  root.append(cursor);
  const values = new Map(every.map((c) => [c, h("b", { style: { color: c.color } }, number(c.y[c.y.length - 1]))]));
  const at = h("span", { class: "at" });
  const show = (event) => {
    const place = event.clientX - root.getBoundingClientRect().left;
    const wanted = x.low + ((place - LEFT) / (width - LEFT - RIGHT)) * (x.high - x.low);
    let nearest = null;
    for (const c of every) for (const v of c.x) if (nearest === null || Math.abs(v - wanted) < Math.abs(nearest - wanted)) nearest = v;
    cursor.setAttribute("x1", x.of(nearest)); cursor.setAttribute("x2", x.of(nearest)); cursor.setAttribute("visibility", "visible");
    at.textContent = `rollout ${nearest}`;
    for (const [c, node] of values) { const i = c.x.indexOf(nearest); node.textContent = i < 0 ? "–" : number(c.y[i]); }
  };
  const leave = () => {
    cursor.setAttribute("visibility", "hidden"); at.textContent = "";
    for (const [c, node] of values) node.textContent = number(c.y[c.y.length - 1]);
  };
  root.addEventListener("pointermove", show);
  root.addEventListener("pointerleave", leave);
  const labels = [...new Set(every.map((c) => c.label))];
  const legend = labels.map((label) => {
    const mine = every.filter((c) => c.label === label);
    return h("span", { class: "key" }, sample(mine[0]), label, " ", mine.map((c) => [values.get(c), " "]));
  });
  return h("figure", {}, h("figcaption", {}, h("strong", {}, title), h("span", { class: "unit" }, unit.toLowerCase() === title.toLowerCase() ? "" : unit), at), h("div", { class: "legend" }, legend), root);
}

function sample(c) {
  const line = c.points ? s("circle", { cx: 9, cy: 5, r: 2.6, fill: c.keyColor || c.color })
    : s("line", { x1: 0, x2: 18, y1: 5, y2: 5, class: "curve", stroke: c.keyColor || c.color, "stroke-dasharray": DASHES[c.dash % 4] || null });
  return s("svg", { width: 18, height: 10, class: "sample-line" }, line);
}

// A red bar along the axis where an alarm was up, and a hairline where it was first raised.
function alarmMark({ name, text, steps, color }, x, end) {
  const parts = [];
  for (const step of steps) {
    const last = parts[parts.length - 1];
    if (last && step - last[1] <= Math.max(1, (x.high - x.low) / 300)) last[1] = step; else parts.push([step, step]);
  }
  const first = x.of(steps[0]);
  const tell = (event) => showTip(event, h("strong", { class: "bad" }, name), h("div", {}, text));
  const events = { onpointermove: tell, onpointerleave: hideTip };
  return [
    ...parts.map(([a, b]) => s("rect", { class: "alarm", x: x.of(a) - 1.5, width: x.of(b) - x.of(a) + 3, y: end - 3, height: 5, ...events })),
    s("line", { class: "alarm", x1: first, x2: first, y1: TOP, y2: end }),
    s("path", { class: "alarm", d: `M${first - 5} ${TOP - 7}h10l-5 8z`, stroke: color, ...events }),
  ];
}

// Layers on top of each other: [[label, x, y]].
export function stackPlot({ title, unit, layers, colors, range, domain, width }) {
  const x = xScale([domain[0] - 0.5, domain[1] + 0.5], width), num = layers[0][1].length, sums = Array(num).fill(0);
  const tops = layers.map(([, , y]) => y.map((v, i) => (sums[i] += v)));
  const y = scale([0, ...sums], [0, range[1]], false, TOP, TOP + HEIGHT);
  const root = s("svg", { width, height: TOP + HEIGHT + BOTTOM, role: "img", "aria-label": title });
  root.append(...axes(TOP, TOP + HEIGHT, width, y, x));
  const [first, second] = layers[0][1], wide = Math.max(1, 0.82 * (num > 1 ? x.of(second) - x.of(first) : x.of(1) - x.of(0)));
  tops.forEach((top, k) => {
    const low = k ? tops[k - 1] : Array(num).fill(0);
    root.append(...top.map((v, i) => s("rect", {
      fill: colors[k], x: x.of(layers[0][1][i]) - wide / 2, width: wide, y: y.of(v), height: Math.max(0, y.of(low[i]) - y.of(v)),
    })));
  });
  const legend = layers.map(([label], k) => h("span", { class: "key" }, h("i", { class: "box", style: { background: colors[k] } }), label));
  return h("figure", {}, h("figcaption", {}, h("strong", {}, title), h("span", { class: "unit" }, unit)), h("div", { class: "legend" }, legend), root);
}

// A course for a table: a line of words' height.
export function spark(values, color, width = 150, height = 24) {
  const known = values.map((v, i) => [i, v]).filter(([, v]) => v !== null && v !== undefined);
  if (known.length < 2) return s("svg", { width, height });
  const low = Math.min(0, ...known.map(([, v]) => v)), high = Math.max(...known.map(([, v]) => v), low + 1e-12);
  const points = known.map(([i, v]) => [2 + (i / (values.length - 1)) * (width - 4), height - 3 - ((v - low) / (high - low)) * (height - 6)]);
  const [a, b] = points[points.length - 1];
  return s("svg", { width, height, class: "spark" }, s("path", { class: "curve", d: path(points), stroke: color }), s("circle", { cx: a, cy: b, r: 2, fill: color }));
}
