// Curves of the chosen runs in common plots, their alarms, and their headline figures.

import { api, h } from "./dom.js";
import { phasesOf } from "./main.js";
import { curvePlot, stackPlot } from "./plot.js";

const GAP = 28, LEAST = 400;

export async function curves({ runs, panels, colors, width }) {
  const found = await api("curves", { runs: runs.map((run) => run.id) });
  const columns = Math.max(1, Math.floor((width + GAP) / (LEAST + GAP)));
  const wide = Math.floor((width - GAP * (columns - 1)) / columns);
  const domain = domainOf(found);
  const plots = Object.entries(panels).flatMap(([name, panel]) => drawn(name, panel, found, runs, colors, domain, wide));
  return [
    troubles(runs), alarms(runs),
    plots.length ? h("div", { class: "plots-grid", style: { gridTemplateColumns: `repeat(${columns}, ${wide}px)` } }, plots)
      : h("p", { class: "dim" }, "No step has ended yet: curves begin with the first row of metrics.jsonl."),
    figures(runs),
  ];
}

// All plots have the same rollouts from left to right.
function domainOf(found) {
  let low = Infinity, high = -Infinity;
  for (const { panels } of found) for (const panel of Object.values(panels)) {
    for (const [, x] of [...panel.left, ...panel.right, ...panel.evaluations, ...panel.stack]) if (x.length) { low = Math.min(low, x[0]); high = Math.max(high, x[x.length - 1]); }
  }
  return [low, Math.max(high, low + 1)];
}

function drawn(name, panel, found, runs, colors, domain, width) {
  const mine = runs.map((run, i) => [run, found[i].panels[name], found[i].raised]).filter(([, content]) => content);
  const unit = panel.left_label;
  if (panel.stack) {
    const stacks = mine.filter(([, content]) => content.stack.length).map(([run, content]) => stackPlot({
      title: runs.length > 1 ? `${panel.title}, ${run.name}` : panel.title, unit, layers: content.stack, range: panel.left_range || [], domain, width,
      colors: content.stack.map(([label], k) => (label.startsWith("other") ? "var(--line)" : colors[k % colors.length])),
    }));
    if (!panel.right) return stacks;
    const [label] = Object.keys(panel.right);
    const beside = { ...panel, stack: null, title: label[0].toUpperCase() + label.slice(1), left_range: panel.right_range, left_label: panel.right_label, right: null };
    const moved = mine.map(([, content]) => ({ panels: { [name]: { ...content, left: content.right, right: [] } }, raised: {} }));
    return [...stacks, ...drawn(name, beside, moved, mine.map(([run]) => run), colors, domain, width)];
  }
  const labels = [...new Set(mine.flatMap(([, c]) => [...c.left, ...c.right, ...c.evaluations].map(([label]) => label)))];
  const curve = (run, points) => ([label, x, y, meanX, meanY]) => {
    const dash = labels.indexOf(label), one = runs.length === 1;
    return { label, x, y, meanX, meanY, points, dash: one ? 0 : dash, color: one ? colors[dash % colors.length] : run.color, keyColor: one ? null : "var(--dim)" };
  };
  const of = (side, points) => mine.flatMap(([run, content]) => content[side].map(curve(run, points)));
  const all = { curves: [...of("left", false), ...of("evaluations", true)], strip: of("right", false) };
  if (![...all.curves, ...all.strip].some((c) => c.x.length)) return [];
  const marks = mine.flatMap(([run, , raised]) => (panel.alarms || []).filter((alarm) => raised[alarm]).map((alarm) => ({
    name: runs.length > 1 ? `${alarm}, ${run.name}` : alarm, steps: raised[alarm], color: run.color,
    text: (run.alarms.find((a) => a.name === alarm) || {}).text || "",
  })));
  return [curvePlot({
    title: panel.title, unit, ...all, stripUnit: panel.right_label || "", range: panel.left_range || [], stripRange: panel.right_range || [],
    log: panel.scale === "log", marks, domain, width,
  })];
}

function alarms(runs) {
  const rows = runs.flatMap((run) => run.alarms.map(({ step, name, text }) => h("tr", {},
    runs.length > 1 && h("td", {}, h("i", { class: "box", style: { background: run.color } }), run.name),
    h("td", {}, `rollout ${step}`), h("td", {}, h("b", {}, name)), h("td", {}, text))));
  return rows.length ? [h("h2", {}, "Alarms"), h("div", { class: "scroll" }, h("table", { class: "alarms" }, rows))] : null;
}

// What a run that failed, was killed or cannot be seen from here said last.
function troubles(runs) {
  const damaged = runs.filter((run) => run.num_damaged).map((run) => h("div", { class: "trouble" }, `${run.name}: ${run.num_damaged} damaged lines of its files are left out`));
  return damaged.concat(runs.filter((run) => ["failed", "killed", "elsewhere", "interrupted"].includes(run.state)).map((run) => {
    const [first, ...rest] = run.state_text.split("\n");
    return h("div", { class: "trouble" }, h("b", {}, h("i", { class: "box", style: { background: run.color } }), run.name, ": "), first,
      phasesOf(run) && `; ${phasesOf(run)}`, rest.length ? h("pre", {}, rest.join("\n")) : null, run.remedy ? h("div", { class: "dim" }, run.remedy) : null);
  }));
}

function figures(runs) {
  const labels = [...new Set(runs.flatMap((run) => run.figures.map(([label]) => label.replace(/^alarms: .*/, "alarms"))))];
  const of = (run, label) => (run.figures.find(([name]) => name.replace(/^alarms: .*/, "alarms") === label) || [])[1] || "–";
  const head = h("tr", {}, h("th", {}), runs.map((run) => h("th", { class: "num" }, h("i", { class: "box", style: { background: run.color } }), run.name)));
  const rows = labels.map((label) => h("tr", {}, h("td", {}, label), runs.map((run) => h("td", { class: "num" }, of(run, label)))));
  return labels.length ? [h("h2", {}, "Figures"), h("div", { class: "scroll" }, h("table", { class: "grid" }, head, rows))] : null;
}
